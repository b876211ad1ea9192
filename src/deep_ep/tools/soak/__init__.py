"""`python -m deep_ep soak`: random mixed calls against an oracle of its own, while ranks are delayed and stopped.

All ranks draw the same plan from one seed and make every rank's inputs themselves, so each knows what it must receive
without asking: the oracle gets all inputs and gives this rank's outputs. Everything is compared exactly.

`plan` has the segments, `program` their calls as data, `data` and `layouts` what they send, `oracle` what must come of
it; `play`, `normal`, `mistakes` and `low_latency` make the calls (`state` has what they leave for each other), `checks`
compares, `faults` disturbs; `rank` and `parent` are the two sides of a run, `shrink` cuts a failing one down, and
`memory`, `show` and `files` tell of it.

`--faults` plays fault plans instead: `plans` has them as data, `fault_program` what a rank does, `fault_runs` the rest.
`--returns` plays histories of ranks that leave low-latency calls and come back (`returns`).
`--states` makes no calls: it looks at every state of models of the protocol (`states`).
"""

from __future__ import annotations

import argparse
from contextlib import nullcontext
from pathlib import Path

import torch.distributed as dist

from ... import __version__
from ...buffers.legacy import Buffer
from ..machine import find_machine
from ..mps import shared_gpu
from ..plotting import require_matplotlib
from ..terminal import Terminal, require_device, require_folder, require_positive
from . import fault_runs, files, returns, show
from .data import Limits
from .parent import run_soak, shrink_outcome
from .plan import Goal
from .plans import TOPOLOGIES, FaultPlan, draw_plans
from .play import play
from .state import SoakReport
from .states import command as states

__all__ = ["Limits", "SoakReport", "add_arguments", "play", "run", "soak_rank"]

_DEFAULT_MINUTES = 1.0
_DEFAULT_RANKS = 4
_SHRINK_SECS = 60.0
_STDOUT = Path("-")


def soak_rank(
    _rank: int,
    _num_ranks: int,
    seed: int,
    num_calls: int,
    limits: Limits = Limits(),  # noqa: B008 - it is frozen
) -> SoakReport:
    """Play calls on one rank of the default group, undisturbed and with one buffer; `run_ranks` calls it."""
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes=0, explicitly_destroy=True)
    report = play(buffer, seed, num_calls, limits)
    buffer.destroy()
    return report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `soak`."""
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument(
        "--minutes", type=float, metavar="N", help=f"how long (default: {_DEFAULT_MINUTES:g}, unless --calls is given)"
    )
    parser.add_argument("--calls", type=int, metavar="N", help="end after so many calls")
    parser.add_argument(
        "--ranks", type=int, metavar="R", help=f"processes (default: {_DEFAULT_RANKS}; of fault plans: 2, 3 and 4)"
    )
    parser.add_argument(
        "--ranks-per-node",
        type=int,
        default=0,
        metavar="P",
        help="split the ranks into nodes, with TCP between; 0: one",
    )
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of all calls and their data")
    parser.add_argument("--segment", type=int, metavar="K", help="play one segment alone, as a failure says")
    parser.add_argument(
        "--only", type=_numbers, metavar="N,N", help="of that segment, make only these calls, as a failure says"
    )
    parser.add_argument(
        "--shrink",
        type=float,
        default=_SHRINK_SECS,
        metavar="SECS",
        help="how long to look for fewer calls that fail, too; 0: not at all",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda", "interpreter"),
        default="cpu",
        help="of the ranks, which may share a GPU; interpreter: the kernels of GPUs on CPU ranks, slow",
    )
    parser.add_argument("--low-latency", action="store_true", default=False, help="make low-latency calls only")
    parser.add_argument(
        "--json",
        type=Path,
        nargs="?",
        const=_STDOUT,
        metavar="PATH",
        help="write everything, with each rank's memory over time; of fault plans, without PATH, print it",
    )
    parser.add_argument("--plot", type=Path, metavar="PATH.png", help="draw memory over time (needs matplotlib)")
    parser.add_argument(
        "--faults",
        type=int,
        metavar="N",
        help="instead, play N fault plans: ranks that are killed, stopped, interrupted",
    )
    parser.add_argument(
        "--returns",
        type=int,
        metavar="N",
        help="instead, play so many histories of ranks that leave low-latency calls and come back (CPU ranks)",
    )
    parser.add_argument("--plan", metavar="TEXT", help="play one fault plan, as a failure says")
    states.add_arguments(parser)


def _numbers(text: str) -> tuple[int, ...]:
    """Numbers with commas between them."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"must be numbers with commas between them, got {text!r}") from None


def run(args: argparse.Namespace) -> int:
    """Run a soak.

    Returns:
        0 if nothing went wrong, else 1.

    Raises:
        ValueError: An option is wrong.
    """
    if hasattr(args, "states"):
        return states.run(args)
    if hasattr(args, "faults") or hasattr(args, "plan"):
        return _run_plans(args)
    if hasattr(args, "returns"):
        return _run_histories(args)
    goal = _goal_of(args)
    json_path, plot_path = _paths_of(args)
    machine = find_machine(__version__)
    console = Terminal(highlight=False)
    show.show_title(console, goal)
    sharing = shared_gpu(goal.num_ranks) if goal.device == "cuda" else nullcontext()
    with sharing, show.showing_progress(goal) as progress:
        outcome = run_soak(goal, progress.hear)
        if args.shrink > 0:
            shrink_outcome(outcome, args.shrink)
    show.show_outcome(console, outcome)
    if json_path is not None:
        files.write_json(json_path, outcome, machine)
    if plot_path is not None:
        files.write_plot(plot_path, outcome)
    for path in (json_path, plot_path):
        if path is not None:
            console.print(f"Wrote {path}", soft_wrap=True)
    return 1 if outcome.num_errors else 0


def _run_plans(args: argparse.Namespace) -> int:
    """Play the fault plans that were asked for, and print what came of them."""
    for name in ("minutes", "calls", "segment", "only", "plot"):
        if hasattr(args, name):
            raise ValueError(f"soak: --{name} is for random calls; leave it out with --faults and --plan")
    if args.device != "cpu":
        raise ValueError("soak: --faults and --plan are for CPU ranks. Leave --device out")
    plans = _plans_of(args)
    json_path: Path | None = getattr(args, "json", None)
    if json_path not in (None, _STDOUT):
        require_folder("soak", json_path)
    progress = Terminal(stderr=True, highlight=False, soft_wrap=True)
    with show.showing_plans(progress, len(plans)) as on_result:
        results = fault_runs.run_plans(plans, on_result)
    if json_path == _STDOUT:
        print(fault_runs.as_json(results))
    else:
        fault_runs.show_results(Terminal(highlight=False), results)
    if json_path not in (None, _STDOUT):
        files.write_text(json_path, fault_runs.as_json(results))
    return 1 if any(result.wrong for result in results) else 0


def _run_histories(args: argparse.Namespace) -> int:
    """Play the histories that were asked for, and print what came of them."""
    for name in ("minutes", "calls", "segment", "only", "plot", "json"):
        if hasattr(args, name):
            raise ValueError(f"soak: --{name} is for random calls; leave it out with --returns")
    if args.device != "cpu":
        raise ValueError("soak: --returns is for CPU ranks. Leave --device out")
    require_positive("soak", returns=args.returns)
    ranks, per_node = getattr(args, "ranks", 0), args.ranks_per_node
    if per_node and not ranks:
        raise ValueError(f"soak: --ranks-per-node {per_node} needs --ranks")
    if ranks:
        _check_ranks(ranks, per_node)
    topologies = [(ranks, per_node)] if ranks else returns.TOPOLOGIES
    seeds = range(args.seed, args.seed + args.returns)
    histories = [returns.draw_history(seed, *topologies[seed % len(topologies)]) for seed in seeds]
    console = Terminal(highlight=False, soft_wrap=True)
    results = returns.play_histories(histories, lambda played: show.show_history(console, played))
    show.show_histories(console, results)
    return 1 if any(one.error for one in results) else 0


def _plans_of(args: argparse.Namespace) -> list[FaultPlan]:
    if hasattr(args, "plan"):
        if hasattr(args, "faults"):
            raise ValueError("soak: --plan plays one plan; leave --faults out")
        return [FaultPlan.parse(args.plan)]
    require_positive("soak", faults=args.faults)
    ranks, per_node = getattr(args, "ranks", 0), args.ranks_per_node
    topologies = [one for one in TOPOLOGIES if one[1] == per_node or not per_node]
    if ranks:
        _check_ranks(ranks, per_node)
        topologies = [(ranks, per_node)]
    if not topologies:
        raise ValueError(f"soak: --ranks-per-node {per_node} needs --ranks")
    return draw_plans(args.faults, args.seed, topologies, args.low_latency)


def _check_ranks(num_ranks: int, ranks_per_node: int) -> None:
    require_positive("soak", ranks=num_ranks)
    if ranks_per_node < 0 or (ranks_per_node and num_ranks % ranks_per_node):
        raise ValueError(f"soak: --ranks-per-node must divide the {num_ranks} ranks, got {ranks_per_node}")


def _goal_of(args: argparse.Namespace) -> Goal:
    minutes: float | None = getattr(args, "minutes", None)
    num_calls: int | None = getattr(args, "calls", None)
    segment: int | None = getattr(args, "segment", None)
    num_ranks: int = getattr(args, "ranks", _DEFAULT_RANKS)
    _check_ranks(num_ranks, args.ranks_per_node)
    per_node = args.ranks_per_node if args.ranks_per_node < num_ranks else 0
    if per_node and args.low_latency and args.device != "cpu":
        raise ValueError("soak: --low-latency with --ranks-per-node is for CPU ranks. Leave --device out")
    require_positive("soak", minutes=minutes, calls=num_calls)
    require_device("soak", args.device)
    if segment is not None and segment < 0:
        raise ValueError(f"soak: --segment must be at least 0, got {segment}")
    if hasattr(args, "only") and segment is None:
        raise ValueError("soak: --only is about the calls of a segment; give --segment, too")
    if segment is not None and minutes is not None:
        raise ValueError("soak: --segment plays a whole segment; leave --minutes out, or give --calls")
    if minutes is None and num_calls is None and segment is None:
        minutes = _DEFAULT_MINUTES
    secs = None if minutes is None else 60 * minutes
    only = getattr(args, "only", None)
    return Goal(num_ranks, args.seed, secs, num_calls, segment, only, args.device, args.low_latency, per_node)


def _paths_of(args: argparse.Namespace) -> tuple[Path | None, Path | None]:
    """Where to write; checked now, since minutes of calls must not end at a missing folder or package."""
    json_path: Path | None = getattr(args, "json", None)
    plot_path: Path | None = getattr(args, "plot", None)
    if json_path == _STDOUT:
        raise ValueError("soak: --json needs a PATH where no fault plans are played")
    for path in (json_path, plot_path):
        if path is not None:
            require_folder("soak", path)
    if plot_path is not None:
        require_matplotlib("soak")
        if plot_path.suffix.lower() != ".png":
            raise ValueError(f"soak: --plot must name a .png file, got {plot_path}")
    return json_path, plot_path
