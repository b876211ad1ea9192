"""What is seen while a benchmark runs: a bar on a terminal, else a line for each case, on stderr."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from multiprocessing.connection import Connection

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from ..terminal import counted, hearing_ranks, only_on_terminal
from .cases import Note


@contextmanager
def showing_progress(num_rounds: int, titles: Mapping[str, str]) -> Iterator[tuple[Progress, Connection]]:
    """Show progress, as far as rank 0 tells it from its own process.

    Args:
        num_rounds: Rounds of everything together.
        titles: Of each case, how to call it.

    Yields:
        The progress, and where rank 0 sends its notes.
    """
    progress = Progress(num_rounds, titles)
    with only_on_terminal(progress.console, progress.bar), hearing_ranks(progress.show) as news:
        yield progress, news


class Progress:
    """The bar and the lines; see `showing_progress`."""

    def __init__(self, num_rounds: int, titles: Mapping[str, str]):
        self._titles = titles
        self.console = Console(stderr=True, highlight=False)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        # Drawing takes time from the ranks on a small machine: twice a second is enough to see that it moves.
        self.bar = RichProgress(*columns, console=self.console, refresh_per_second=2)
        self._task = self.bar.add_task("starting the ranks", total=num_rounds)

    def skip(self, num_ranks: int, reason: str, num_rounds: int) -> None:
        """Say that a group size does not run."""
        self.console.print(f"{counted(num_ranks, 'rank')}: skipped: {reason}")
        self.bar.advance(self._task, num_rounds)

    def show(self, note: Note) -> None:
        """Show what rank 0 said."""
        description = f"{counted(note.num_ranks, 'rank')}: {self._titles[note.case]}"
        self.bar.update(self._task, description=description, advance=1 if note.num_done else 0)
        if not self.console.is_terminal and note.num_done == 0:
            self.console.print(description)
