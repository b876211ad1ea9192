"""`python -m deep_ep bench normal | elastic | low-latency | internode | layer | tune | readme`: arguments, and work."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path

from ...buffers.engines import NVSHMEM
from ...transport import MESSAGE
from ..plotting import require_matplotlib
from ..terminal import require_folder, require_positive
from . import elastic, internode, low_latency, normal, results
from . import report as reports
from .cases import CASES
from .elastic_cases import ELASTIC_CASES, ELASTIC_GPU_CASES
from .gpu_cases import GPU_CASES
from .hop_cases import HOP_CASES
from .inputs import Setting
from .internode_cases import RAIL_CASES
from .low_latency_cases import low_latency_titles
from .plot import write_plot
from .suite import measure
from .tune_report import OUT, tune

_SIZES = {
    "tokens": ("num_tokens", "tokens of a rank"),
    "hidden": ("hidden", "elements of a token"),
    "topk": ("num_topk", "experts of a token"),
    "experts": ("num_experts", "experts of all ranks together"),
    "groups": ("num_groups", "groups of experts, for group-limited routing"),
    "topk_groups": ("num_topk_groups", "groups that a token may use"),
    "rounds": ("num_rounds", "timed rounds"),
    "seed": ("seed", "seed of rows and routes"),
}
"""Arguments that are fields of `Setting`, on all devices alike."""

_QUICK = {"num_tokens": 256, "hidden": 1024, "num_experts": 64, "num_rounds": 15}
_ON_GPU = {"device": "cuda", "num_sms": 16, "num_rounds": 30}
_TUNE = {**_ON_GPU, "num_rounds": 9}
_LOW_LATENCY = {"num_tokens": 128, "num_rounds": 50}
_LOW_LATENCY_ON_GPU = {**_LOW_LATENCY, "device": "cuda", "num_rounds": 100}
_LOW_LATENCY_QUICK = {"num_tokens": 32, "hidden": 1024, "num_experts": 64, "num_rounds": 20}
_INTERNODE_QUICK = {"num_tokens": 512, "num_rounds": 5}
_NUM_RANKS = {"cpu": 4, "cuda": 8}

_WRITERS = {
    "csv": reports.write_csv,
    "json": reports.write_json,
    "plot": write_plot,
    "readme": reports.write_readme,
    "save": results.save,
}
"""Arguments that name a file, or a folder."""


# Arguments -----------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `bench` takes."""
    modes = parser.add_subparsers(dest="mode", metavar="what", required=True)
    normal = modes.add_parser("normal", help="measure dispatch and combine of normal mode")
    _add_bench_arguments(normal, _ON_GPU, [*CASES, *GPU_CASES], "`bench normal` or `bench gpu`")
    _add_sms(normal, _ON_GPU)
    v2 = modes.add_parser(elastic.NAME, help="measure dispatch and combine of ElasticBuffer, DeepEP V2's interface")
    v2_cases = [*ELASTIC_CASES, *ELASTIC_GPU_CASES]
    _add_bench_arguments(v2, _ON_GPU, v2_cases, "`bench elastic` or `bench elastic gpu`")
    _add_sms(v2, _ON_GPU)
    decode = modes.add_parser(
        "low-latency", help="measure low-latency dispatch and combine, their halves, and CUDA graphs of them"
    )
    cases = [*low_latency_titles("cuda")]
    _add_bench_arguments(
        decode, _LOW_LATENCY_ON_GPU, cases, "`bench low-latency` or `bench low-latency gpu`", _LOW_LATENCY
    )
    rails = modes.add_parser(internode.NAME, help="measure dispatch and combine across nodes")
    _add_internode_arguments(rails)
    _add_layer_arguments(modes.add_parser("layer", help="measure an MoE layer, forward and backward"))
    tuned = modes.add_parser("tune", help="find the best launch shapes for this GPU, and write a tuning file")
    tuned.add_argument("--ranks", type=int, metavar="R", default=_NUM_RANKS["cuda"], help="group size (default: 8)")
    _add_sizes(tuned, _TUNE)
    _add_sms(tuned, _TUNE)
    tuned.add_argument("--out", type=Path, metavar="PATH", default=OUT, help=f"the tuning file (default: {OUT})")
    readme = modes.add_parser(
        "readme", help="write the table of a results file into docs/performance.md, or another page"
    )
    readme.add_argument(
        "results", type=Path, nargs="?", help=f"written by --save or --json (default: newest of {results.FOLDER})"
    )
    page = Path("docs/performance.md")
    readme.add_argument(
        "--readme", type=Path, metavar="PATH", default=page, help=f"a page with markers (default: {page})"
    )
    readme.add_argument("--plot", type=Path, metavar="PATH.png", help="draw the times as well (needs matplotlib)")


def _add_bench_arguments(
    parser: argparse.ArgumentParser, on_gpu: dict, cases: Sequence[str], markers: str, on_cpu: dict | None = None
) -> None:
    """What all benchmarks of calls take.

    Args:
        parser: Of the benchmark.
        on_gpu: Fields of the setting whose default is another one on a GPU.
        cases: On all devices.
        markers: What is replaced in a README.
        on_cpu: Fields whose default is another one on the CPU.
    """
    parser.add_argument("--ranks", type=int, nargs="+", metavar="R", help="group sizes (default: 4, on a GPU 8)")
    _add_device(parser)
    _add_sizes(parser, on_gpu, on_cpu)
    _add_case_arguments(parser, cases, markers)


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where tensors live (default: cpu)")


def _add_internode_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--nodes", type=int, metavar="N", default=2, help="nodes (default: 2)")
    parser.add_argument("--ranks-per-node", type=int, metavar="P", default=2, help="ranks of each (default: 2)")
    parser.add_argument(
        "--link",
        metavar="RATE",
        default="",
        help="give each node a network namespace, and its interface this rate: `1gbit`, or as `tc` has it; "
        f"`{internode.UNLIMITED}`: none. Needs root. Without: nodes share this host's network, over loopback",
    )
    _add_device(parser)
    parser.add_argument(
        "--transport",
        choices=(MESSAGE, NVSHMEM),
        help=f"on a GPU, how ranks of different nodes reach each other (default: {MESSAGE}, TCP)",
    )
    _add_sizes(parser, _ON_GPU)
    _add_sms(parser, _ON_GPU)
    markers = "`bench internode`, `bench internode RATE` of a link, or `bench internode TRANSPORT gpu`"
    _add_case_arguments(parser, [*RAIL_CASES, *HOP_CASES], markers)


def _add_layer_arguments(parser: argparse.ArgumentParser) -> None:
    _add_device(parser)
    for name, default, meaning in (
        ("ranks", 4, "group size"),
        ("tokens", 4096, "tokens of a rank"),
        ("hidden", 4096, "elements of a token"),
        ("intermediate", 1024, "inner size of an expert"),
        ("shared", 4096, "inner size of the shared expert"),
        ("experts", 64, "experts of all ranks together"),
        ("topk", 8, "experts of a token"),
        ("rounds", 20, "timed rounds"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", default=default, help=f"{meaning} (default: {default})")
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")


def _add_case_arguments(parser: argparse.ArgumentParser, cases: Sequence[str], markers: str) -> None:
    """Which cases, and what is written of them."""
    known = list(dict.fromkeys(cases))
    parser.add_argument(
        "--cases", nargs="+", choices=known, metavar="CASE", help=f"which cases (default: all): {', '.join(known)}"
    )
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write the figures, a line for each case")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything: each rank's time of each round")
    parser.add_argument("--plot", type=Path, metavar="PATH.png", help="draw the times (needs matplotlib)")
    parser.add_argument(
        "--save",
        type=Path,
        nargs="?",
        const=results.FOLDER,
        metavar="FOLDER",
        help=f"keep everything and a picture, named by date and machine (default folder: {results.FOLDER})",
    )
    parser.add_argument(
        "--readme",
        type=Path,
        metavar="PATH",
        help=f"replace the table between the markers {markers}",
    )


def _add_sizes(parser: argparse.ArgumentParser, on_gpu: dict, on_cpu: dict | None = None) -> None:
    """Sizes have no default here: that depends on `--quick` and on the device."""
    setting = dataclasses.replace(Setting(), **(on_cpu or {}))
    for name, (field, meaning) in _SIZES.items():
        default = getattr(setting, field) or ("0" if name == "seed" else "off")
        if name == "rounds" and on_gpu:
            default = f"{default}, on a GPU {on_gpu['num_rounds']}"
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, metavar="N", help=f"{meaning} (default: {default})")
    parser.add_argument("--quick", action="store_true", help="small sizes: seconds instead of minutes")


def _add_sms(parser: argparse.ArgumentParser, on_gpu: dict) -> None:
    parser.add_argument(
        "--sms",
        type=int,
        metavar="N",
        help=f"on a GPU, blocks that a rank may use; 0: any number (default: {on_gpu['num_sms']})",
    )


def find_setting(args: argparse.Namespace, base: dict, quick: dict | None = None) -> Setting:
    """The setting: what was given, over the small sizes of `--quick`, over the defaults.

    Args:
        args: The arguments.
        base: Fields whose default is another one here.
        quick: Those of `--quick`, if other than usual.

    Raises:
        ValueError: It cannot be routed.
    """
    given = {field: getattr(args, name) for name, (field, _) in _SIZES.items()} | {"num_sms": _sms(args)}
    given = {field: value for field, value in given.items() if value is not None}
    setting = dataclasses.replace(Setting(), **{**base, **((quick or _QUICK) if args.quick else {}), **given})
    setting.check()
    if setting.num_sms < 0:
        raise ValueError(f"bench: --sms must not be negative, got {setting.num_sms}")
    if setting.num_sms and setting.device == "cpu":
        raise ValueError("bench: --sms is for a GPU. Pass --device cuda with it")
    return setting


def _sms(args: argparse.Namespace) -> int | None:
    """Low-latency calls have no such bound."""
    return getattr(args, "sms", None)


# Modes ---------------------------------------------------------------------------------------------------------------


def run(args: argparse.Namespace) -> int:
    """Run what was asked for.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: The arguments cannot be met.
        EPError: The run failed, or there is no such device.
    """
    if args.mode in (normal.NAME, elastic.NAME, low_latency.NAME):
        _run_bench(args)
    elif args.mode == internode.NAME:
        _run_internode(args)
    elif args.mode == "layer":
        from .layer import run as run_layer  # late: training imports a second's worth of torch

        run_layer(args)
    elif args.mode == "tune":
        _run_tune(args)
    else:
        _run_readme(args)
    return 0


def _run_bench(args: argparse.Namespace) -> None:
    is_gpu = args.device == "cuda"
    if args.mode == low_latency.NAME:
        setting = find_setting(args, _LOW_LATENCY_ON_GPU if is_gpu else _LOW_LATENCY, _LOW_LATENCY_QUICK)
        suite = low_latency.suite_of(setting)
    else:
        setting = find_setting(args, _ON_GPU if is_gpu else {})
        suite = (normal if args.mode == normal.NAME else elastic).suite_of(setting)
    args.ranks = args.ranks or [_NUM_RANKS[args.device]]
    for size in args.ranks:
        require_positive("bench", ranks=size)
    _choose_cases(args, suite.titles)
    _check_files(args, reports.marker_of(args.mode, is_gpu))
    words = ["--ranks", *(str(size) for size in args.ranks)]
    _leave(measure(suite, setting, args.ranks, args.cases, _command(args, words, list(suite.titles))), args)


def _run_internode(args: argparse.Namespace) -> None:
    if args.nodes < 2 or args.ranks_per_node < 1:
        raise ValueError(
            "bench internode: --nodes must be at least 2 and --ranks-per-node at least 1, "
            f"got {args.nodes} and {args.ranks_per_node}"
        )
    is_gpu = args.device == "cuda"
    if args.link and is_gpu:
        raise ValueError("bench internode: --link is for the CPU. On a GPU pass --transport")
    if args.transport and not is_gpu:
        raise ValueError("bench internode: --transport is for a GPU. Pass --device cuda with it")
    # As DeepEP's benchmark routes: the experts of a node are a group, and a token may use the best four.
    groups = {"num_groups": args.nodes, "num_topk_groups": min(args.nodes, internode.MOST_TOPK_GROUPS)}
    base = {"num_nodes": args.nodes, "link": args.link, **groups}
    if is_gpu:
        base |= {**_ON_GPU, "transport": args.transport or MESSAGE}
    setting = find_setting(args, base, _INTERNODE_QUICK)
    titles = internode.titles_of(setting)
    _choose_cases(args, titles)
    _check_files(args, reports.marker_of(internode.name_of(setting), is_gpu))
    words = ["--nodes", str(args.nodes), "--ranks-per-node", str(args.ranks_per_node)]
    words += ["--link", args.link] if args.link else []
    words += ["--transport", setting.transport] if is_gpu else []
    num_ranks = args.nodes * args.ranks_per_node
    _leave(internode.measure(setting, num_ranks, args.cases, _command(args, words, list(titles))), args)


def _choose_cases(args: argparse.Namespace, titles: Mapping[str, str]) -> None:
    """All cases of the device, where none were named."""
    args.cases = args.cases or list(titles)
    unknown = [name for name in args.cases if name not in titles]
    if unknown:
        raise ValueError(f"bench: {', '.join(unknown)} is no case here. On {args.device}: {', '.join(titles)}")


def _leave(report: reports.BenchReport, args: argparse.Namespace) -> None:
    """Show a report, and write what was asked for."""
    results.show_table(reports.rich_table(report))
    for name, write in _WRITERS.items():
        path = getattr(args, name)
        if path is not None:
            write(report, path)
            if name != "save":
                results.tell(f"wrote {path}")


def _run_tune(args: argparse.Namespace) -> None:
    setting = find_setting(args, _TUNE)
    if not setting.num_sms:
        raise ValueError("bench tune: --sms must be at least 1: it bounds the blocks of the bounded shapes")
    require_folder("bench tune", args.out)
    tune(setting, args.ranks, args.out)


def _run_readme(args: argparse.Namespace) -> None:
    if args.plot is not None:
        require_folder("bench", args.plot)
        require_matplotlib("bench")
    if not args.readme.is_file():
        raise ValueError(f"bench: there is no file {args.readme} to put the table into")
    results.put_into_readme(args.results or results.newest(results.FOLDER), args.readme, args.plot)


def _check_files(args: argparse.Namespace, marker: str) -> None:
    """Minutes of measuring must not end at a missing folder, marker or package."""
    for path in (args.csv, args.json, args.plot):
        if path is not None:
            require_folder("bench", path)
    if args.save is not None:
        args.save.mkdir(parents=True, exist_ok=True)
    if args.readme is not None:
        if not args.readme.is_file():
            raise ValueError(f"bench: there is no file {args.readme} to put the table into")
        reports.replace_table(args.readme.read_text(encoding="utf-8"), marker, "")
    if args.plot is not None:
        require_matplotlib("bench")


def _command(args: argparse.Namespace, group: list[str], all_cases: list[str]) -> str:
    """The line that measures the same again: what was given, without the files that it writes."""
    words = ["python", "-m", "deep_ep", "bench", args.mode]
    if args.device != "cpu":
        words += ["--device", args.device]
    if args.quick:
        words.append("--quick")
    words += group
    for name in (*_SIZES, "sms"):
        if getattr(args, name, None) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if list(args.cases) != all_cases:
        words += ["--cases", *args.cases]
    return shlex.join(words)
