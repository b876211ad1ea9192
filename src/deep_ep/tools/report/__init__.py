"""`python -m deep_ep report`: what a trace says, as one page that needs nothing but a browser.

`load` reads the files of the ranks, `figures` counts, `timeline` chooses what is drawn, `page` writes HTML (with
`page.css` and `page.js` inside it), `text` has the words and numbers in it, and `merge` writes one file for Perfetto.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..terminal import counted, require_folder
from .figures import count
from .load import load
from .merge import write_merged
from .page import render
from .timeline import MOST_SLICES


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `report`."""
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="the folder that DEEP_EP_TRACE named, or a file of it"
    )
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), help="the page to write")
    parser.add_argument(
        "--perfetto",
        type=Path,
        default=argparse.SUPPRESS,  # so that the help does not say None
        metavar="PATH.json",
        help="write all ranks as one trace, too, for ui.perfetto.dev or chrome://tracing",
    )
    parser.add_argument("--slices", type=int, default=MOST_SLICES, help="most slices in the page's timeline")


def run(args: argparse.Namespace) -> int:
    """Read a trace and write the page.

    Returns:
        0.

    Raises:
        ValueError: There is no trace, it cannot be read, it makes no sense, or a file cannot be written.
    """
    if args.slices < 1:
        raise ValueError(f"report: --slices must be at least 1, got {args.slices}")
    outputs = [args.output, *([args.perfetto] if hasattr(args, "perfetto") else [])]
    for path in outputs:
        require_folder("report", path)
    try:
        trace = load(args.trace)
        figures = count(trace)
        page = render(trace, figures, args.slices)
    except (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError) as error:
        # What can be wrong with a file is checked as it is read; whatever else a damaged one holds ends here.
        said = f"{type(error).__name__}: {error}"
        raise ValueError(f"report: {args.trace} makes no sense ({said}). Record it again") from error
    _write(args.output, page)
    if len(outputs) > 1:
        write_merged(trace, args.perfetto)
    console = Console(highlight=False)
    ranks = f"{len(figures.ranks)} of {counted(figures.num_ranks, 'rank')}"
    console.print(f"{ranks}, {counted(figures.num_calls, 'call')} in {figures.span_us / 1e6:.3f} s")
    for problem in trace.problems:
        console.print(Text(_printable(problem), "yellow"), soft_wrap=True)
    for path in outputs:
        console.print(Text(f"Wrote {_printable(str(path))}"), soft_wrap=True)
    return 0


def _printable(text: str) -> str:
    """A text that every terminal takes: names of files, and what traces hold, may be no valid Unicode."""
    return text.encode(errors="backslashreplace").decode()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"report: cannot write {path} ({error.strerror})") from None
