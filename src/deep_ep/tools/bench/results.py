"""Results that are shown and kept: a table, a file for each run, a picture beside it, and README's table from it."""

from __future__ import annotations

import datetime
import re
import sys
from pathlib import Path

from rich.table import Table

from ..plotting import INSTALL, require_matplotlib
from ..terminal import print_table, table_console
from .plot import write_plot
from .report import BenchReport, read_json, write_json, write_readme

FOLDER = Path("benchmarks/results")

_PLAIN_WIDTH = 170  # of a table that goes into a file or a pipe, where there is no terminal to fit


def file_name(report: BenchReport, date: datetime.date) -> str:
    """`2026-01-31-nvidia-h200-normal-8ranks.json`."""
    machine = slug(str(report.machine["gpu" if report.is_gpu else "cpu"]))
    sizes = "-".join(str(size) for size in dict.fromkeys(row.num_ranks for row in report.rows))
    return f"{date.isoformat()}-{machine}-{slug(report.name)}-{sizes}ranks.json"


def slug(text: str) -> str:
    """A name for files: small letters, digits, and `-` for all else."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def save(report: BenchReport, folder: Path) -> None:
    """Write a results file and its picture; without matplotlib say that there is none."""
    path = folder / file_name(report, datetime.date.today())
    write_json(report, path)
    tell(f"wrote {path}")
    try:
        require_matplotlib("bench")
    except ValueError:
        tell(f"matplotlib is not installed: no picture beside it. {INSTALL}, or `bench readme` where it is")
        return
    write_plot(report, path.with_suffix(".png"))
    tell(f"wrote {path.with_suffix('.png')}")


def newest(folder: Path) -> Path:
    """The latest results file.

    Raises:
        ValueError: There is none.
    """
    files = sorted(folder.glob("*ranks.json"), key=lambda path: (path.name[:10], path.stat().st_mtime))
    if not files:
        raise ValueError(f"bench: there are no results in {folder}. Make some with --save, or name a file")
    return files[-1]


def put_into_readme(results: Path, readme: Path, plot: Path | None) -> None:
    """README's table, and if asked for the picture, from a results file."""
    report = read_json(results)
    write_readme(report, readme)
    tell(f"wrote the table of {results} into {readme}")
    if plot is not None:
        write_plot(report, plot)
        tell(f"wrote {plot}")


def show_table(table: Table) -> None:
    """Print a table."""
    print_table(table_console(_PLAIN_WIDTH), table)


def tell(text: str) -> None:
    """Say something beside the results."""
    print(text, file=sys.stderr)
