"""A soak as the process that starts it sees it: ranks that run, stops that disturb them, and what came of it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from ... import env
from ...launch import RankFailed, run_ranks
from ..terminal import hearing_ranks
from .faults import Stops
from .memory import Growth, growth_of
from .plan import Goal
from .rank import RankReport, SoakFailure, SoakNote, play_rank
from .seeds import mixed
from .shrink import Shrunk, shrink

_SPARE_SECS = 300.0  # beyond what was asked for, before ranks that do not end are ended
_MOST_SECS_PER_CALL = 2.0
_INTERPRET = "TRITON_INTERPRET"


@dataclass
class Outcome:
    """What came of a soak.

    Attributes:
        goal: What was asked for.
        reports: By rank; none where a rank hung or died.
        failures: What ranks said that went wrong, causes before consequences.
        crash: How the ranks ended, where they gave no reports.
        last_segment: The last segment that was heard of.
        num_stops: How often a rank was stopped.
        secs: How long it took.
        shrunk: The failing segment, cut down; None: nothing failed, or it was not asked for, or it did not fail again.
    """

    goal: Goal
    reports: list[RankReport] = field(default_factory=list)
    failures: list[SoakFailure] = field(default_factory=list)
    crash: str | None = None
    last_segment: int = 0
    num_stops: int = 0
    secs: float = 0.0
    shrunk: Shrunk | None = None

    @property
    def growths(self) -> list[Growth]:
        """How each rank's memory grew."""
        return [growth_of(report.samples) for report in self.reports]

    @property
    def num_calls(self) -> int:
        """Calls, each of which all ranks made together."""
        return max((report.calls.total() for report in self.reports), default=0)

    @property
    def num_errors(self) -> int:
        """Ranks that failed, crashed, or did not stay the same size."""
        if self.failures or self.crash is not None:
            return max(1, len(self.failures))
        if not self.goal.is_cpu:
            return 0  # every new kind of call loads kernels: memory says nothing there
        return sum(not growth.is_flat for growth in self.growths)

    @property
    def replay(self) -> str | None:
        """The line that plays what went wrong again: the failing segment, or everything where memory grew."""
        if self.shrunk is not None:
            return self.goal.command(self.failures[0].segment, only=self.shrunk.numbers)
        if self.failures:
            return self.goal.command(self.failures[0].segment, self.failures[0].num_calls)
        if self.crash is not None:
            return self.goal.command(self.last_segment)
        if self.num_errors:
            return self.goal.command(self.goal.segment, self.num_calls)
        return None


def run_soak(goal: Goal, on_note: Callable[[SoakNote, int], object]) -> Outcome:
    """Run a soak.

    Args:
        goal: What to do.
        on_note: Hears every rank's notes, with the number of stops so far.
    """
    outcome, begin = Outcome(goal, last_segment=goal.segment or 0), time.monotonic()
    # By rank: a crash leaves no reports, but what was said before.
    said: dict[int, SoakFailure] = {}
    stops = Stops(mixed(goal.seed))

    def hear(note: SoakNote) -> None:
        stops.add(note.pid)
        outcome.last_segment = max(outcome.last_segment, note.segment)
        if note.failure is not None:
            said[note.rank] = note.failure
        on_note(note, stops.num_stops)

    with stops, hearing_ranks(hear) as news:
        try:
            variables = _variables(goal)
            limit_secs = _limit_secs(goal)
            outcome.reports = run_ranks(play_rank, goal.num_ranks, goal, news, limit_secs=limit_secs, env=variables)
        except RankFailed as error:
            outcome.crash = str(error)
    outcome.secs, outcome.num_stops = time.monotonic() - begin, stops.num_stops
    said |= {report.failure.rank: report.failure for report in outcome.reports if report.failure is not None}
    outcome.failures = sorted(said.values(), key=lambda failure: (not failure.is_cause, failure.rank))
    return outcome


def shrink_outcome(outcome: Outcome, secs: float) -> None:
    """Cut a failing segment down, if a rank has said where it failed."""
    if outcome.failures and outcome.goal.only is None:
        failure = outcome.failures[0]
        outcome.shrunk = shrink(outcome.goal, failure.segment, failure.call_idx, _fails, secs)


def _fails(goal: Goal) -> bool:
    return bool(run_soak(goal, lambda *_: None).num_errors)  # nobody watches


def _variables(goal: Goal) -> dict[str, str]:
    """Environment variables of the ranks."""
    variables = {env.RANKS_PER_NODE.name: str(goal.ranks_per_node)} if goal.ranks_per_node else {}
    if goal.device == "interpreter":
        # Triton looks when it is imported, which may be in the process that ranks are forked from.
        os.environ[_INTERPRET] = "1"
        variables |= {env.TRANSPORT.name: "interpreted", env.DEVICE.name: "cpu"}
    return variables


def _limit_secs(goal: Goal) -> float:
    most_calls = goal.num_calls or 1000
    return _SPARE_SECS + (goal.secs if goal.secs is not None else most_calls * _MOST_SECS_PER_CALL)
