"""`python -m deep_ep plan`: arguments, and what becomes of them."""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table as RichTable

from ...planner.calls import read_points
from ...planner.formats import FORMATS
from ...planner.hardware import CLUSTERS, Cluster
from ...planner.layer import PHASES
from ...planner.models import MODELS, Model
from ...planner.plan import MODES, Plan, Question, make_plan
from ...planner.table import Table, fit_table, load_table, prepare
from ...planner.validate import KINDS, check_points, cross_validate, score_families
from ..plotting import require_matplotlib
from ..report.figures import count
from ..report.load import load
from ..terminal import print_table, require_folder, require_positive, table_console
from . import calibrate, show

_PLAIN_WIDTH = 200  # of a table that goes into a file or a pipe
_TOKENS = {"training": 4096, "prefill": 4096, "decoding": 128}
_MOST_RANKS = 2048
_FEWEST_RANKS = 8
_COMPARED: dict[str, Any] = {
    "cluster": str, "gpu": str, "network": str, "ranks_per_node": int, "link_gbps": float, "network_gbps": float,
    "model": str, "phase": str, "tokens": int, "context": int, "zipf": float, "replicas": int, "groups": int,
    "topk_groups": int, "dtype": str, "sms": int, "system": str, "micro_batches": int,
}  # fmt: skip
"""What `--compare` may change, and of what type it is."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `plan`."""
    what = parser.add_argument_group("what runs")
    what.add_argument("--model", default="deepseek-v3", metavar="NAME", help=f"one of {', '.join(MODELS)}")
    for name, meaning in (
        ("hidden", "channels of a token"),
        ("topk", "experts of a token"),
        ("experts", "experts of a layer"),
        ("intermediate", "inner size of an expert"),
        ("layers", "layers with experts"),
    ):
        what.add_argument(f"--{name}", type=int, metavar="N", help=f"{meaning}, instead of the model's")
    what.add_argument("--phase", choices=PHASES, default="training", help="what the layer is used for")
    what.add_argument("--tokens", type=int, metavar="N", help="of a rank in a step (4096; decoding: 128 sequences)")
    what.add_argument("--context", type=int, default=4096, metavar="N", help="tokens of a sequence")
    what.add_argument("--groups", type=int, metavar="N", help="groups of experts (default: the model's); 1: no limits")
    what.add_argument("--topk-groups", type=int, metavar="N", help="groups of a token (default: the model's)")
    what.add_argument("--zipf", type=float, default=0.0, help="exponent of the experts' popularity; 0: uniform")
    what.add_argument("--trace", type=Path, metavar="FOLDER", help="take the experts' load from this trace instead")
    what.add_argument("--replicas", type=int, default=0, metavar="N", help="copies of hot experts, beyond the experts")
    what.add_argument("--dtype", choices=FORMATS, default="fp8", help="of dispatched rows")
    what.add_argument("--logfmt", action="store_true", help="combine LogFMT rows in low latency")
    what.add_argument("--expanded", action="store_true", help="the receiver writes a row for each expert")
    what.add_argument("--micro-batches", type=int, default=2, metavar="N", help="1: nothing overlaps")
    where = parser.add_argument_group("what it runs on")
    where.add_argument("--cluster", default="h100-ib", metavar="NAME", help=f"one of {', '.join(CLUSTERS)}")
    where.add_argument("--gpu", help="instead of the cluster's")
    where.add_argument("--network", help="instead of the cluster's")
    where.add_argument("--ranks-per-node", type=int, metavar="N", help="GPUs that fast links join")
    where.add_argument("--link-gbps", type=float, metavar="GB/s", help="nominal, of a GPU's links, in one direction")
    where.add_argument("--network-gbps", type=float, metavar="GB/s", help="nominal, of a GPU's share of the network")
    where.add_argument("--sizes", type=int, nargs="+", metavar="R", help="numbers of ranks (default: 8 to 2048)")
    where.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES), help="modes to look at")
    where.add_argument("--sms", type=int, default=0, metavar="N", help="of normal calls; 0: chosen")
    where.add_argument("--system", default="", help="whose kernels (default: those that are usual on the GPU)")
    where.add_argument("--table", type=Path, metavar="PATH", help="constants (default: the package's)")
    shown = parser.add_argument_group("what is shown")
    shown.add_argument("--compare", metavar="NAME=VALUE,...", help="a second plan with these options changed")
    shown.add_argument("--json", action="store_true", help="print JSON instead of tables")
    shown.add_argument("--plot", type=Path, metavar="PATH.svg", help="draw it, as SVG or PNG (needs matplotlib)")
    other = parser.add_argument_group("the model itself")
    other.add_argument("--validate", type=Path, metavar="FILE.csv", help="errors on published latencies")
    other.add_argument("--cross", nargs="*", choices=list(KINDS), help="with --validate: each from the others (all)")
    other.add_argument("--fit", type=Path, metavar="FILE.csv", help="make a table of constants from figures")
    other.add_argument("--calibrate", action="store_true", help="measure this machine, and add it to a table")
    other.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="with --calibrate: what is measured")
    other.add_argument(
        "--ranks", type=int, nargs="+", default=[2, 4], metavar="R", help="with --calibrate: group sizes"
    )
    other.add_argument(
        "--namespaces", metavar="RATE", help="with --calibrate: between network namespaces of this rate, like 1gbit"
    )
    other.add_argument(
        "--results", type=Path, nargs="+", metavar="FILE", help="with --calibrate: results of `bench`, measure nothing"
    )
    other.add_argument("-o", "--output", type=Path, metavar="PATH.json", help="with --fit, --calibrate: the new table")


def run(args: argparse.Namespace) -> int:
    """Plan, validate, fit or calibrate.

    Raises:
        ValueError: The arguments make no sense.
    """
    for path in (args.plot, args.output):
        if path is not None:
            require_folder("plan", path)
    if args.plot is not None:
        require_matplotlib("plan")
    if args.cross is not None and args.validate is None:
        raise ValueError("plan: --cross needs --validate and a file of figures")
    for name in ("results", "namespaces"):
        if getattr(args, name) is not None and not args.calibrate:
            raise ValueError(f"plan: --{name} needs --calibrate")
    if args.output is not None and not (args.calibrate or args.fit is not None):
        raise ValueError("plan: -o needs --fit or --calibrate")
    if args.fit is not None:
        _fit(args)
    elif args.validate is not None:
        _validate(args)
    elif args.calibrate:
        _calibrate(args)
    else:
        _plan(args)
    return 0


# Plans ---------------------------------------------------------------------------------------------------------------


def _plan(args: argparse.Namespace) -> None:
    table = load_table(args.table)
    load_of_trace = None if args.trace is None else _trace_load(args.trace)
    names, plans = [_name(args)], [make_plan(_question(args, load_of_trace), table)]
    if args.compare:
        other = _changed(args)
        names.append(args.compare)
        plans.append(make_plan(_question(other, load_of_trace), table))
    if args.json:
        print(json.dumps([show.plan_json(plan) for plan in plans], indent=1))
    else:
        _print_plans(plans, names, args)
    if args.plot is not None:
        show.draw_plans(plans, names, args.plot)


def _print_plans(plans: Sequence[Plan], names: Sequence[str], args: argparse.Namespace) -> None:
    console = table_console(_PLAIN_WIDTH)
    for plan, name in zip(plans, names, strict=True):
        question = plan.question
        console.print(
            f"{name}: {question.phase}, {question.num_tokens} tokens a rank in {question.num_micro_batches} "
            f"micro-batches, {question.kernels} on {question.cluster.gpu}, nodes of {question.cluster.ranks_per_node}",
            markup=False,
        )
        print_table(console, show.plan_table(plan), num_kept=2)
        for line in show.recommendations(plan):
            console.print(line, markup=False, highlight=False)
        console.print()
    if args.compare:
        print_table(console, show.compare_table(plans, ("first", "second")))
    console.print(
        "Times of a call are of one micro-batch; * is recommended. MB: dispatch and combine of the busiest rank.",
        markup=False,
    )


def _name(args: argparse.Namespace) -> str:
    return f"{args.model} on {args.cluster}"


def _question(args: argparse.Namespace, load_of_trace: tuple[float, ...] | None) -> Question:
    _check_numbers(args)
    cluster, model = _cluster(args), _model(args)
    if load_of_trace is not None:
        model = replace(model, num_experts=len(load_of_trace))
    usual_groups = 1 if model.num_experts % model.num_groups else model.num_groups
    num_groups = args.groups if args.groups is not None else usual_groups
    topk_groups = args.topk_groups if args.topk_groups is not None else min(model.topk_groups, num_groups)
    return Question(
        model=model,
        cluster=cluster,
        phase=args.phase,
        num_tokens=args.tokens or _TOKENS[args.phase],
        context=args.context,
        sizes=args.sizes or _sizes(cluster),
        modes=args.modes,
        system=args.system,
        dtype=args.dtype,
        num_sms=args.sms,
        num_micro_batches=args.micro_batches,
        zipf=args.zipf,
        load=load_of_trace,
        num_replicas=args.replicas,
        num_groups=num_groups,
        topk_groups=topk_groups,
        is_logfmt=args.logfmt,
        is_expanded=args.expanded,
    )


def _check_numbers(args: argparse.Namespace) -> None:
    """Refuse numbers that no cluster and no model has."""
    names = (
        "ranks_per_node",
        "link_gbps",
        "network_gbps",
        "tokens",
        "context",
        "micro_batches",
        "groups",
        "topk_groups",
    )
    require_positive("plan", **{name: getattr(args, name) for name in names})
    for size in args.sizes or ():
        require_positive("plan", sizes=size)
    for name in ("zipf", "replicas", "sms"):
        if not (getattr(args, name) >= 0 and math.isfinite(getattr(args, name))):
            raise ValueError(f"plan: --{name} must be at least 0, and finite, got {getattr(args, name)}")


def _model(args: argparse.Namespace) -> Model:
    if args.model not in MODELS:
        raise ValueError(f"plan: there is no model {args.model!r}. There are {', '.join(MODELS)}, or give numbers")
    fields = {"hidden": "hidden", "topk": "topk", "experts": "num_experts", "intermediate": "intermediate"}
    fields["layers"] = "num_layers"
    given = {field: getattr(args, name) for name, field in fields.items() if getattr(args, name) is not None}
    if any(value < 1 for value in given.values()):
        raise ValueError(f"plan: sizes of a model must be at least 1, got {given}")
    return replace(MODELS[args.model], **given)


def _cluster(args: argparse.Namespace) -> Cluster:
    if args.cluster not in CLUSTERS:
        raise ValueError(f"plan: there is no cluster {args.cluster!r}. There are {', '.join(CLUSTERS)}")
    given = {
        "gpu": args.gpu,
        "network": args.network,
        "ranks_per_node": args.ranks_per_node,
        "link_GBps": args.link_gbps,
        "network_GBps": args.network_gbps,
    }
    return replace(CLUSTERS[args.cluster], **{name: value for name, value in given.items() if value is not None})


def _sizes(cluster: Cluster) -> list[int]:
    """Powers of two inside a node, then full nodes, twice as many each time."""
    sizes, size = [], _FEWEST_RANKS
    while size < cluster.ranks_per_node:
        sizes.append(size)
        size *= 2
    size = cluster.ranks_per_node
    while size <= _MOST_RANKS:
        if size > 1:
            sizes.append(size)
        size *= 2
    return sizes


def _changed(args: argparse.Namespace) -> argparse.Namespace:
    """The arguments with what `--compare` says instead."""
    other = argparse.Namespace(**vars(args))
    for pair in args.compare.split(","):
        name, is_pair, value = pair.partition("=")
        field = name.strip().replace("-", "_")
        if not is_pair or field not in _COMPARED:
            known = ", ".join(one.replace("_", "-") for one in _COMPARED)
            raise ValueError(f"plan: --compare takes NAME=VALUE,... with {known}, got {pair!r}")
        try:
            setattr(other, field, _COMPARED[field](value.strip()))
        except ValueError:
            raise ValueError(f"plan: --compare: {name} must be a number, got {value!r}") from None
    return other


def _trace_load(path: Path) -> tuple[float, ...]:
    load_of_trace = count(load(path)).load
    if load_of_trace is None or not sum(load_of_trace.totals):
        raise ValueError(f"plan: no call in {path} told how many tokens its experts got")
    return tuple(map(float, load_of_trace.totals))


# The model itself ----------------------------------------------------------------------------------------------------


def _fit(args: argparse.Namespace) -> None:
    if args.output is None:
        raise ValueError("plan: --fit needs -o and a file for the table")
    figures = read_points(args.fit)
    table = fit_table(prepare(figures.points))
    table.save(args.output)
    print(f"wrote {len(table.entries)} sets of constants from {len(figures.points)} figures to {args.output}")
    _tell_left_out(figures.left_out)


def _tell_left_out(left_out: dict[str, int]) -> None:
    for reason, number in left_out.items():
        print(f"{number} left out: {reason}")


def _validate(args: argparse.Namespace) -> None:
    figures = read_points(args.validate)
    points = figures.with_latency()
    if not points:
        raise ValueError(f"plan: {args.validate} has no latencies")
    if args.cross is None:
        checked = {"as the table has it": check_points(load_table(args.table), points)}
    else:
        checked = {f"unseen {kind}": cross_validate(figures.points, kind) for kind in args.cross or KINDS}
    scores = {title: score_families(some) for title, some in checked.items() if some}
    if args.json:
        print(json.dumps({title: show.scores_json(one) for title, one in scores.items()}, indent=1))
    else:
        console = table_console(_PLAIN_WIDTH)
        for title, one in scores.items():
            console.print(title)
            print_table(console, show.family_table(one))
            console.print(show.summary_line(title, one), markup=False, highlight=False)
            console.print()
        num_bandwidths = len(figures.points) - len(points)
        print(f"{num_bandwidths} figures have a bandwidth and no latency: they help to fit, and are not validated.")
        _tell_left_out(figures.left_out)
    if args.plot is not None:
        show.draw_scatter({title: some for title, some in checked.items() if some}, args.plot)


def _calibrate(args: argparse.Namespace) -> None:
    if args.results:
        reports = calibrate.read_results(args.results)
    elif args.namespaces:
        reports = calibrate.measure_nodes(calibrate.LAYOUTS, args.namespaces)
    else:
        reports = calibrate.measure_here(args.device, args.ranks)
    points = calibrate.points_of(reports)
    trials = calibrate.try_points(points)
    table: Table = calibrate.fit_machine(points, load_table(args.table))
    if args.output is not None:
        table.save(args.output)
    console = table_console(_PLAIN_WIDTH)
    shown: RichTable = show.trial_table(trials)
    console.print("Each call predicted from the others, those with its tokens and ranks left out:")
    print_table(console, shown)
    if trials:
        errors = [abs(one.us / one.point.latency_us - 1) for one in trials]
        print(f"median error {100 * float(np.median(errors)):.1f}%, {len(trials)} of {len(points)} calls")
    if args.output is not None:
        print(f"wrote {args.output}: plan with --table {args.output} --system {calibrate.SYSTEM}")
