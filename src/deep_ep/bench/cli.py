"""`python -m deep_ep bench`: arguments, the run, and the reports."""

from __future__ import annotations

import argparse
import dataclasses
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from .. import __version__
from ..errors import EPUnsupported
from ..launch import run_ranks
from ..machine import find_machine
from ..plotting import require_matplotlib
from ..terminal import require_folder
from ..transport.memory import available_bytes
from . import report as reports
from .cases import CASES, RankMeasured, run_cases
from .core import Measured
from .inputs import Setting, reason_to_skip
from .plot import write_plot
from .progress import showing_progress

QUICK = Setting(num_tokens=256, hidden=1024, num_experts=64, num_rounds=15)

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
"""Arguments that are fields of `Setting`."""

_WRITERS = {
    "csv": reports.write_csv,
    "json": reports.write_json,
    "plot": write_plot,
    "readme": reports.write_readme,
}
"""Arguments that name a file."""

_LIMIT_SECS = 3600.0  # for one group size; the default setting takes minutes
_PLAIN_WIDTH = 160  # of a table that goes into a file or a pipe, where there is no terminal to fit


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add what `bench` takes. What is not given stays out of the result: see `_with_defaults`."""
    parser.argument_default = argparse.SUPPRESS
    parser.add_argument("mode", choices=("normal",), help="what to measure: dispatch and combine of normal mode")
    parser.add_argument("--ranks", type=int, nargs="+", metavar="R", help="group sizes (default: 4)")
    for name, (field, meaning) in _SIZES.items():
        default = getattr(Setting(), field) or ("0" if name == "seed" else "off")
        option = f"--{name.replace('_', '-')}"
        parser.add_argument(option, type=int, metavar="N", help=f"{meaning} (default: {default})")
    parser.add_argument(
        "--quick", action="store_true", default=argparse.SUPPRESS, help="small sizes: seconds instead of minutes"
    )
    parser.add_argument("--cases", nargs="+", choices=list(CASES), metavar="CASE", help=_names())
    parser.add_argument("--device", choices=("cpu", "cuda"), help="where the ranks' tensors live (default: cpu)")
    parser.add_argument("--csv", type=Path, metavar="PATH", help="write the figures, a line for each case")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write everything: each rank's time of each round")
    parser.add_argument("--plot", type=Path, metavar="PATH.png", help="draw the times (needs matplotlib)")
    parser.add_argument(
        "--readme", type=Path, metavar="PATH", help="replace the table between <!-- bench normal --> and its end"
    )


def _names() -> str:
    return f"which cases (default: all): {', '.join(CASES)}"


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was asked for.

    Returns:
        The exit status, 0.

    Raises:
        ValueError: The arguments cannot be met.
        EPError: The run failed, or the device is not there yet.
    """
    args = _with_defaults(args)
    setting = find_setting(args)
    _check_files(args)
    report = measure(setting, args.ranks, args.cases, _command(args))
    show(report)
    _write_files(report, args)
    return 0


def _with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """What was given, and None, or the default, for the rest. Sizes get theirs later: `--quick` changes them."""
    defaults = dict.fromkeys((*_SIZES, *_WRITERS)) | {
        "ranks": [4],
        "cases": list(CASES),
        "device": "cpu",
        "quick": False,
    }
    return argparse.Namespace(**{**defaults, **vars(args)})


def find_setting(args: argparse.Namespace) -> Setting:
    """The setting: what was given, over the defaults or the small ones of `--quick`.

    Raises:
        ValueError: It cannot be routed.
        EPUnsupported: The device is not there yet.
    """
    if args.device != "cpu":
        raise EPUnsupported(f"bench: device {args.device} is not supported yet, only the CPU is. Pass --device cpu")
    given = {field: getattr(args, name) for name, (field, _) in _SIZES.items()}
    base = QUICK if args.quick else Setting()
    setting = dataclasses.replace(base, **{field: value for field, value in given.items() if value is not None})
    setting.check()
    return setting


def _check_files(args: argparse.Namespace) -> None:
    """Minutes of measuring must not end at a missing folder, marker or package."""
    for path in (args.csv, args.json, args.plot):
        if path is not None:
            require_folder("bench", path)
    if args.readme is not None:
        if not args.readme.is_file():
            raise ValueError(f"bench: there is no file {args.readme} to put the table into")
        reports.replace_table(args.readme.read_text(), args.mode, "")
    if args.plot is not None:
        require_matplotlib("bench")


def measure(setting: Setting, group_sizes: Sequence[int], names: Sequence[str], command: str) -> reports.Report:
    """Run cases with each group size, and show progress on the way.

    Args:
        setting: The setting.
        group_sizes: Numbers of ranks.
        names: Keys of `CASES`.
        command: The line that runs it again.
    """
    machine = find_machine(__version__)
    rows: list[Measured] = []
    rounds_of_group = len(names) * setting.num_rounds
    with showing_progress(len(group_sizes) * rounds_of_group) as (progress, news):
        for num_ranks in group_sizes:
            reason = reason_to_skip(setting, num_ranks, available_bytes())
            if reason is not None:
                progress.skip(num_ranks, reason, rounds_of_group)
                rows += [Measured(name, num_ranks, skipped=reason) for name in names]
                continue
            results = run_ranks(run_cases, num_ranks, setting, list(names), news, limit_secs=_LIMIT_SECS)
            rows += [_join(name, [result[index] for result in results]) for index, name in enumerate(names)]
    return reports.Report(
        name="normal",
        command=command,
        shape=_shape(setting),
        setting=dataclasses.asdict(setting),
        machine=machine,
        titles={name: title for name, (title, _) in CASES.items()},
        rows=rows,
    )


def _join(name: str, parts: Sequence[RankMeasured]) -> Measured:
    """One case out of all ranks' parts of it."""
    times = {variant: [part.times[variant] for part in parts] for variant in parts[0].times}
    return Measured(name, len(parts), [part.num_bytes for part in parts], times)


def _shape(setting: Setting) -> str:
    shape = f"{setting.num_tokens} tokens a rank, hidden {setting.hidden}, top-{setting.num_topk} of "
    shape += f"{setting.num_experts} experts"
    if setting.num_groups:
        shape += f", {setting.num_topk_groups} of {setting.num_groups} groups"
    return f"{shape}, {setting.num_rounds} rounds"


def _command(args: argparse.Namespace) -> str:
    """The line that measures the same again: what was given, without the files that it writes."""
    words = ["python", "-m", "deep_ep", "bench", args.mode]
    if args.quick:
        words.append("--quick")
    words += ["--ranks", *(str(size) for size in args.ranks)]
    for name in _SIZES:
        if getattr(args, name) is not None:
            words += [f"--{name.replace('_', '-')}", str(getattr(args, name))]
    if list(args.cases) != list(CASES):
        words += ["--cases", *args.cases]
    return shlex.join(words)


def show(report: reports.Report) -> None:
    """Print the table."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_PLAIN_WIDTH)
    console.print(reports.rich_table(report))


def _write_files(report: reports.Report, args: argparse.Namespace) -> None:
    for name, write in _WRITERS.items():
        path = getattr(args, name)
        if path is not None:
            write(report, path)
            print(f"wrote {path}", file=sys.stderr)
