"""What the commands have in common where they meet the user: tables, news from the ranks, files to write."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table


class Terminal(Console):
    """A console that lets a closed pipe be an error like others; rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        """Raise what rich has caught."""
        raise


def plain_table(gap: int = 2, **options: Any) -> Table:
    """A table without lines, its columns `gap` characters apart."""
    return Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, **options)


def table_console(plain_width: int) -> Console:
    """A console for tables.

    Args:
        plain_width: Its width in a file or a pipe, unless `COLUMNS` says otherwise.
    """
    console = Terminal()
    return console if console.is_terminal or "COLUMNS" in os.environ else Terminal(width=plain_width)


def print_table(console: Console, table: Table, num_kept: int = 1) -> None:
    """Print a table; one that is too wide in several below each other, so that no value is cut.

    Args:
        console: Where to.
        table: What.
        num_kept: Columns that all of them begin with.
    """
    if table_width(console, table) <= console.width:
        console.print(table)
        return
    if table.title is not None:
        console.print(table.title, style=table.title_style)
    for number, part in enumerate(_parts(console, table, num_kept)):
        if number:
            console.print()
        console.print(part)
    if table.caption is not None:
        console.print(table.caption, style=table.caption_style or "dim")


def table_width(console: Console, table: Table) -> int:
    """The width that a table would take if it could: `minimum` does not know that cells must not wrap."""
    return console.measure(table, options=console.options.update(width=10_000)).maximum


def _parts(console: Console, table: Table, num_kept: int) -> Iterator[Table]:
    kept, rest = list(range(num_kept)), list(range(num_kept, len(table.columns)))
    while rest:
        num_taken = 1
        while (
            num_taken < len(rest) and table_width(console, _part(table, kept + rest[: num_taken + 1])) <= console.width
        ):
            num_taken += 1
        yield _part(table, kept + rest[:num_taken])
        rest = rest[num_taken:]


def _part(table: Table, indices: Sequence[int]) -> Table:
    """Some columns of a table. What is too wide even so is folded."""
    columns = [table.columns[index] for index in indices]
    part = Table(box=table.box, padding=table.padding, show_edge=table.show_edge, pad_edge=table.pad_edge)
    for column in columns:
        part.add_column(column.header, justify=column.justify, style=column.style, overflow="fold")
    for row in zip(*(column.cells for column in columns), strict=True):
        part.add_row(*row)
    return part


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def only_on_terminal(console: Console, shown: AbstractContextManager) -> AbstractContextManager:
    """What moves while it is shown: in a file or a pipe it would be lines of no use."""
    return shown if console.is_terminal else nullcontext()


def require_folder(command: str, path: Path) -> None:
    """Fail before anything runs if a file cannot be written after it.

    Raises:
        ValueError: It is a folder, there is no folder for it, or it may not be written.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{command}: there is no folder {folder} to write {path.name} into")
    if path.is_dir():
        raise ValueError(f"{command}: {path} is a folder, and must be a file to write")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{command}: {path} cannot be written")


def require_device(command: str, device: str | None) -> None:
    """Fail before anything runs if ranks are to run on GPUs and there is none.

    Raises:
        ValueError: There is none.
    """
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"{command}: --device cuda needs a GPU, and torch sees none here. Pass --device cpu")


def require_positive(command: str, **options: float | None) -> None:
    """Fail before anything runs if an option that was given is not greater than 0, or not finite.

    Raises:
        ValueError: One is not.
    """
    for name, value in options.items():
        if value is not None and not (value > 0 and math.isfinite(value)):
            least = "at least 1" if isinstance(value, int) else "greater than 0, and finite"
            raise ValueError(f"{command}: --{name.replace('_', '-')} must be {least}, got {value}")


@contextmanager
def hearing_ranks(on_news: Callable[[Any], object]) -> Iterator[Connection]:
    """Hear what ranks say while they run; see `teller` for their side.

    The ranks themselves run from the main thread, so that Ctrl-C ends them; `on_news` is called on another.

    Yields:
        The end to hand to the ranks.
    """
    here, there = Pipe(duplex=False)
    thread = threading.Thread(target=_hear, args=(here, on_news), name="news", daemon=True)
    with here:
        thread.start()
        try:
            with there:
                yield there
        finally:
            thread.join(timeout=5.0)  # it ends by itself, once all ends of the pipe are closed


def _hear(here: Connection, on_news: Callable[[Any], object]) -> None:
    with suppress(EOFError, OSError):
        while True:
            on_news(here.recv())


def teller(rank: int, news: Connection) -> Callable[[Any], None]:
    """What a rank calls to say something. Only rank 0 is heard: all others are within a call of it."""
    return news.send if rank == 0 else lambda _: None
