"""What the commands have in common where they meet the user: tables, news from the ranks, files to write."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table


def plain_table(gap: int = 2, **options: Any) -> Table:
    """A table without lines, its columns `gap` characters apart."""
    return Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, **options)


def counted(number: int, noun: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def only_on_terminal(console: Console, shown: AbstractContextManager) -> AbstractContextManager:
    """What moves while it is shown: in a file or a pipe it would be lines of no use."""
    return shown if console.is_terminal else nullcontext()


def require_folder(command: str, path: Path) -> None:
    """Fail before anything runs if there is no folder for a file that is written after it.

    Raises:
        ValueError: There is none.
    """
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"{command}: there is no folder {folder} to write {path.name} into")


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
