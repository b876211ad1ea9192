"""`python -m deep_ep soak --states`: explore the models of the protocol, and print what was found."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from ...terminal import Terminal, require_folder
from ..files import write_text
from .explore import SearchResult, explore
from .suites import MODELS, SearchCase, cases_of

_STDOUT = Path("-")
_DEFAULT_RANKS = 2
_LEAST_WIDTH = 120  # a table that is folded cannot be read


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the option of `soak` that explores."""
    parser.add_argument(
        "--states",
        nargs="?",
        const="all",
        metavar="MODEL",
        help=f"instead, look at every state of a model of the protocol: {', '.join(MODELS)} or all (2 ranks)",
    )


def run(args: argparse.Namespace) -> int:
    """Explore the models that were asked for.

    Returns:
        0 if all of them hold, else 1.

    Raises:
        ValueError: An option is wrong.
    """
    for name in ("minutes", "calls", "segment", "plot", "faults", "plan"):
        if hasattr(args, name):
            raise ValueError(f"soak: --{name} makes real calls; leave it out with --states")
    if args.device != "cpu" or args.low_latency:
        raise ValueError("soak: --states needs no device. Leave --device and --low-latency out")
    json_path: Path | None = getattr(args, "json", None)
    if json_path not in (None, _STDOUT):
        require_folder("soak", json_path)
    progress = Terminal(stderr=True, highlight=False, soft_wrap=True)
    results = []
    for case in _cases(args):
        results.append((case.title, _explored(case, progress)))
        if results[-1][1].violation is not None:
            break  # the others would take their time, and there is something to look at
    if json_path == _STDOUT:
        print(as_json(results))
    else:
        show(Terminal(highlight=False, width=max(Terminal().width, _LEAST_WIDTH)), results)
    if json_path not in (None, _STDOUT):
        write_text(json_path, as_json(results))
    return 1 if any(result.violation is not None for _, result in results) else 0


def _cases(args: argparse.Namespace) -> list[SearchCase]:
    names = MODELS if args.states == "all" else (args.states,)
    if not set(names) <= set(MODELS):
        raise ValueError(f"soak: --states must be one of {', '.join(MODELS)} or all, got {args.states}")
    num_ranks, per_node = getattr(args, "ranks", _DEFAULT_RANKS), args.ranks_per_node
    if num_ranks < 2:
        raise ValueError(f"soak: --states needs at least 2 --ranks, got {num_ranks}")
    if per_node < 0 or num_ranks % (per_node or 1) or per_node == num_ranks:
        raise ValueError(f"soak: --ranks-per-node must divide the {num_ranks} ranks into nodes, got {per_node}")
    if per_node and "two-hops" not in names:
        raise ValueError("soak: --ranks-per-node is for --states two-hops. Leave it out")
    return [case for name in names for case in cases_of(name, num_ranks, per_node or 1)]


def _explored(case: SearchCase, progress: Console) -> SearchResult:
    model = case.make()
    with progress.status("") as status:
        what = f"{model.name}, {case.title}"
        return explore(model, on_level=lambda depth, count: status.update(f"{what}: {count:,} states, {depth} steps"))


def show(console: Console, results: Iterable[tuple[str, SearchResult]]) -> None:
    """Print a table, and the path to what is wrong."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in ("model", "what"):
        table.add_column(name, no_wrap=True)
    for name in ("ranks", "calls", "states", "steps", "deepest", "seconds"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("verdict")
    for title, result in results:
        numbers = (result.num_ranks, result.num_calls, result.num_states, result.num_steps, result.depth)
        cells = [f"{number:,}" for number in numbers]
        table.add_row(result.model, title, *cells, f"{result.secs:.1f}", result.verdict)
    console.print(table)
    for _, result in results:
        if result.violation is not None:
            console.print(f"\n{result.violation}, after {len(result.path)} steps:", soft_wrap=True)
            for label in result.path:
                console.print(f"  {label}", soft_wrap=True)


def as_json(results: Iterable[tuple[str, SearchResult]]) -> str:
    """Everything, as text."""
    rows = []
    for title, result in results:
        row = {**result._asdict(), "what": title, "verdict": result.verdict, "path": [str(one) for one in result.path]}
        rows.append(row)
    return json.dumps(rows, indent=1)
