"""`python -m deep_ep report`: what a trace says, as one page that needs nothing but a browser.

`load` reads the files of the ranks, `figures` counts, `timeline` chooses what is drawn, `page` writes HTML (with
`page.css` and `page.js` inside it), `compare` two runs, `text` has the words and numbers in it, and `merge` writes one
file for Perfetto. In a notebook, `make_page(folder)` at the end of a cell shows the page there.
"""

from __future__ import annotations

import argparse
import html
import json
from pathlib import Path

from rich.console import Console
from rich.text import Text

from ..terminal import counted, require_folder, require_positive
from .figures import Figures, count
from .load import LoadedTrace, load
from .merge import write_merged
from .page import render
from .timeline import MOST_SLICES

_PAGE = Path("report.html")
_NO_SENSE = (TypeError, LookupError, AttributeError, ArithmeticError, RecursionError, MemoryError)


class Page(str):
    """A page as HTML, which a notebook shows in a frame of its own."""

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Page({len(self):,} characters)"  # all of them are too many for a console

    def _repr_html_(self) -> str:
        style = "width: 100%; height: 900px; border: 0"
        return f'<iframe srcdoc="{html.escape(self)}" style="{style}" title="deep_ep report"></iframe>'


def make_page(trace: Path | str, against: Path | str | None = None, most_slices: int = MOST_SLICES) -> Page:
    """Make the page of a trace. It needs nothing but a browser; a notebook shows it inline.

    Args:
        trace: The folder that `DEEP_EP_TRACE` or `Buffer(trace=...)` named, or a file of it.
        against: Another one, which the page compares it with.
        most_slices: Most slices in the timeline.

    Raises:
        ValueError: There is no trace, it cannot be read, or it makes no sense.
    """
    other = None if against is None else _read(Path(against))
    return _render(*_read(Path(trace)), most_slices, other)


def _read(path: Path) -> tuple[LoadedTrace, Figures]:
    try:
        trace = load(path)
        return trace, count(trace)
    except _NO_SENSE as error:
        raise _senseless(path, error) from error


def _render(trace: LoadedTrace, figures: Figures, most_slices: int, other: tuple[LoadedTrace, Figures] | None) -> Page:
    try:
        return Page(render(trace, figures, most_slices, other))
    except _NO_SENSE as error:
        raise _senseless(trace.path, error) from error


def _senseless(path: Path, error: Exception) -> ValueError:
    # What can be wrong with a file is checked as it is read; whatever else a damaged one holds ends here.
    return ValueError(f"report: {path} makes no sense ({type(error).__name__}: {error}). Record it again")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `report`."""
    parser.add_argument(
        "trace", type=Path, metavar="TRACE", help="the folder that DEEP_EP_TRACE named, or a file of it"
    )
    parser.add_argument(
        "--against",
        type=Path,
        default=argparse.SUPPRESS,
        metavar="TRACE",
        help="another run, which the page compares this one with",
    )
    parser.add_argument(
        "-o",
        "--output",
        type=Path,
        default=argparse.SUPPRESS,
        help=f"the page to write (default: {_PAGE}, and with --json none)",
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
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
    require_positive("report", slices=args.slices)
    page_path = getattr(args, "output", None if args.json else _PAGE)
    perfetto_path = getattr(args, "perfetto", None)
    outputs = [path for path in (page_path, perfetto_path) if path is not None]
    for path in outputs:
        require_folder("report", path)
    trace, figures = _read(args.trace)
    other = _read(args.against) if hasattr(args, "against") else None
    if page_path is not None:
        _write(page_path, _render(trace, figures, args.slices, other))
    if perfetto_path is not None:
        write_merged(trace, perfetto_path)
    if args.json:
        against = {} if other is None else {"against": other[1].as_dict()}
        print(json.dumps({**figures.as_dict(), "problems": trace.problems, **against}, allow_nan=False))
    else:
        _show(trace, figures, outputs)
    return 0


def _show(trace: LoadedTrace, figures: Figures, outputs: list[Path]) -> None:
    console = Console(highlight=False)
    ranks = f"{len(figures.ranks)} of {counted(figures.num_ranks, 'rank')}"
    console.print(f"{ranks}, {counted(figures.num_calls, 'call')} in {figures.span_us / 1e6:.3f} s")
    for problem in trace.problems:
        console.print(Text(_printable(problem), "yellow"), soft_wrap=True)
    for path in outputs:
        console.print(Text(f"Wrote {_printable(str(path))}"), soft_wrap=True)


def _printable(text: str) -> str:
    """A text that every terminal takes: names of files, and what traces hold, may be no valid Unicode."""
    return text.encode(errors="backslashreplace").decode()


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise ValueError(f"report: cannot write {path} ({error.strerror})") from None
