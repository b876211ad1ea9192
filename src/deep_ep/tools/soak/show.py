"""What a soak prints: progress while it runs, what it did, and the line that plays a failure again."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from rich.console import Console
from rich.status import Status
from rich.table import Table

from ... import __version__
from ..terminal import Terminal, counted, only_on_terminal, plain_table, print_table
from .fault_runs import PlanResult
from .parent import Outcome
from .plan import Goal, plan_segment
from .rank import SoakNote
from .returns import Played
from .shrink import Shrunk

_LINE_SECS = 10.0  # between two lines of progress where there is no terminal
_MB = 1e6


def show_title(console: Console, goal: Goal) -> None:
    """What is about to run."""
    console.print(f"[bold]deep_ep {__version__} soak[/]: random calls against a dense oracle, with delays and stops")
    kind = {"cpu": "CPU rank", "cuda": "GPU rank", "interpreter": "interpreted rank"}[goal.device]
    parts = [counted(goal.num_ranks, kind), f"seed {goal.seed}"]
    if goal.ranks_per_node:
        parts[0] += f" on {counted(goal.num_ranks // goal.ranks_per_node, 'node')}"
    if goal.segment is not None:
        segment = plan_segment(goal, goal.segment)
        parts.append(f"segment {goal.segment} alone ({segment.num_calls} calls, arena {segment.arena})")
    if goal.secs is not None:
        parts.append(f"{goal.secs / 60:g} minutes")
    if goal.num_calls is not None:
        parts.append(f"at most {goal.num_calls:,} calls")
    console.print(", ".join(parts))


class SoakProgress:
    """The latest of every rank: a line that changes on a terminal, else a line now and then. On stderr."""

    def __init__(self, goal: Goal):
        self.console = Terminal(stderr=True, highlight=False, soft_wrap=True)
        self.status = Status("starting the ranks", console=self.console, refresh_per_second=2)
        self._goal = goal
        self._begin = time.monotonic()
        self._next_line = 0.0
        self._notes: dict[int, SoakNote] = {}
        self._failed: set[int] = set()

    def hear(self, note: SoakNote, num_stops: int) -> None:
        """Show what a rank told."""
        self._notes[note.rank] = note
        if note.failure is not None and note.rank not in self._failed:
            self._failed.add(note.rank)
            # At once: others may hang, and then it takes a while until everything is told.
            where = f"rank {note.rank}, segment {note.failure.segment}, call {note.failure.call_idx}"
            self.console.print(f"{where}: {note.failure.text.rstrip().splitlines()[-1]}", markup=False)
        secs = time.monotonic() - self._begin
        text = self._text(secs, num_stops)
        self.status.update(text)
        if not self.console.is_terminal and secs >= self._next_line and len(self._notes) == self._goal.num_ranks:
            self._next_line = secs + _LINE_SECS
            self.console.print(text)

    def _text(self, secs: float, num_stops: int) -> str:
        notes = self._notes.values()
        segment = plan_segment(self._goal, max(note.segment for note in notes))
        num_calls = max(note.sample.num_calls for note in notes)
        sent, private, arena = (
            sum(note.num_bytes for note in notes) / _MB,
            max(note.sample.private_bytes for note in notes) / _MB,
            sum(note.sample.committed_bytes for note in notes) / _MB,
        )
        return (
            f"{secs:5.0f} s  segment {segment.number} (arena {segment.arena})  {num_calls:,} calls  {sent:,.1f} MB sent"
            f"  largest rank {private:.0f} MB, arenas {arena:.1f} MB  {num_stops} stops  {len(self._failed)} errors"
        )


@contextmanager
def showing_progress(goal: Goal) -> Iterator[SoakProgress]:
    """Show progress on stderr."""
    progress = SoakProgress(goal)
    with only_on_terminal(progress.console, progress.status):
        yield progress


@contextmanager
def showing_plans(console: Console, num_plans: int) -> Iterator[Callable[[PlanResult], None]]:
    """Show how many fault plans have been played. Yields what is to be told of each result."""
    status = Status("starting the ranks", console=console, refresh_per_second=2)
    results: list[PlanResult] = []

    def hear(result: PlanResult) -> None:
        results.append(result)
        num_failed = sum(bool(one.wrong) for one in results)
        status.update(f"{len(results)} of {counted(num_plans, 'fault plan')}, {num_failed} failed")
        if result.wrong:
            console.print(f"plan {len(results)} of {num_plans} failed: {result.plan}", markup=False)

    with only_on_terminal(console, status):
        yield hear


def show_outcome(console: Console, outcome: Outcome) -> None:
    """The tables, what went wrong, and the verdict."""
    if outcome.reports:
        longest = max(outcome.reports, key=lambda report: report.calls.total())
        console.print(_counts("calls", "", longest.calls))
        # Ranks make the same calls, but a path is each rank's own: it depends on the room in its arena.
        console.print(_counts("paths", "all ranks", sum((report.paths for report in outcome.reports), Counter())))
        print_table(console, _ranks(outcome))
        if outcome.goal.is_cpu:  # elsewhere every new kind of call loads, or compiles, kernels
            console.print(_memory(outcome))
    for failure in outcome.failures:
        console.print(f"\n[bold]rank {failure.rank}, segment {failure.segment}, call {failure.call_idx}[/]: ", end="")
        console.print(failure.text.rstrip(), markup=False, soft_wrap=True)
    if outcome.crash is not None:
        console.print(f"\n{outcome.crash.rstrip()}", markup=False, soft_wrap=True)
    console.print(_verdict(outcome), soft_wrap=True)
    if outcome.shrunk is not None:
        console.print(_calls_left(outcome.shrunk), markup=False, soft_wrap=True)
    if outcome.replay is not None:
        console.print(f"Replay: {outcome.replay}", markup=False, soft_wrap=True)


def _calls_left(shrunk: Shrunk) -> str:
    calls = [
        f"{call.number} ({call.kind}{f' of {call.source}' if call.source is not None else ''})" for call in shrunk.calls
    ]
    return (
        f"Shrunk from {counted(shrunk.num_before, 'call')} to {len(calls)}, in {shrunk.num_played} runs: "
        f"{', '.join(calls)}"
    )


def _counts(title: str, more: str, counts: Mapping[str, int]) -> Table:
    table = plain_table(header_style="bold")
    table.add_column(f"\n{title}", no_wrap=True, min_width=24)
    table.add_column(f"\n{more}", justify="right", no_wrap=True)
    for name, number in sorted(counts.items()):
        table.add_row(name, f"{number:,}")
    return table


def _ranks(outcome: Outcome) -> Table:
    table = plain_table(header_style="bold")
    headers = ("\nrank", "\ncalls", "MB\nsent", "MB at\nstart", "MB at\npeak", "MB at\nend", "arena MB\nat peak")
    for header in (*headers, "arena\nempty", "threads\nleft", "memfds\nleft", "\ndelays"):
        table.add_column(header, justify="right", no_wrap=True)
    for rank, report in enumerate(outcome.reports):
        private = [sample.private_bytes / _MB for sample in report.samples]
        table.add_row(
            str(rank),
            f"{report.calls.total():,}",
            f"{report.num_bytes / _MB:,.1f}",
            *(f"{megabytes:.1f}" for megabytes in (private[0], max(private), private[-1])),
            f"{max(sample.committed_bytes for sample in report.samples) / _MB:.2f}",
            "no" if report.arena_used_bytes else "yes",
            str(len(report.threads_left)),
            str(report.memfds_left),
            f"{report.num_delays:,}",
        )
    return table


def _memory(outcome: Outcome) -> str:
    rank, growth = max(enumerate(outcome.growths), key=lambda item: item[1].num_bytes)
    early, last = growth.early_bytes / _MB, growth.last_bytes / _MB
    verdict = "flat" if growth.is_flat else "not flat"
    return f"\nMemory: {verdict}. Rank {rank} grew most, from {early:.1f} MB after the first tenth to {last:.1f} MB"


def _verdict(outcome: Outcome) -> str:
    word = "[bold red]not OK[/]" if outcome.num_errors else "[bold green]OK[/]"
    parts = [counted(outcome.num_errors, "error")]
    if outcome.reports:
        num_bytes = sum(report.num_bytes for report in outcome.reports)
        num_segments = max(report.num_segments for report in outcome.reports)
        parts += [f"{outcome.num_calls:,} calls in {counted(num_segments, 'segment')}", f"{num_bytes / _MB:,.1f} MB"]
    return f"{word}: {', '.join(parts)}, {counted(outcome.num_stops, 'stop')}, {outcome.secs:.1f} s"


def show_history(console: Console, played: Played) -> None:
    """Print what came of a history of ranks that leave and come back."""
    if played.error:
        console.print(f"wrong: soak {played.history}\n{played.error}", markup=False)


def show_histories(console: Console, results: Sequence[Played]) -> None:
    """Print what came of all of them."""
    num_wrong = sum(bool(one.error) for one in results)
    rounds, degraded, num_returns = (sum(numbers) for numbers in zip(*(one[2:5] for one in results), strict=True))
    num_replaced = sum(one.num_replaced for one in results)
    secs = max(one.return_secs for one in results)
    console.print(
        f"{len(results)} histories, {num_wrong} wrong; {rounds:,} rounds compared, {degraded:,} of them with masks; "
        f"{num_returns} returns, {num_replaced} of them by new processes, the slowest {secs:.2f} s to the first "
        "full result"
    )
