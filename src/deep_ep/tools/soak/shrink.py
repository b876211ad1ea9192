"""Cuts a failing segment down to the few calls that matter.

Every call is drawn apart from the others (`program.py`), so any subset of a segment's calls can be played. Chunks of
them are left out, first halves, then quarters and so on, and stay out if the rest still fails.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from .plan import Goal, plan_calls, plan_segment
from .program import ProgramCall

_NUM_TRIES = 2  # of each subset: a failure may depend on timing
_LIMIT_SECS = 10.0  # of a wait for a peer; the failure may be a hang


@dataclass(frozen=True)
class Shrunk:
    """A failing segment, cut down.

    Attributes:
        num_before: Calls that it had up to the failure.
        calls: Those that are left, the failing one among them.
        num_played: Subsets that were played.
    """

    num_before: int
    calls: tuple[ProgramCall, ...]
    num_played: int

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of the calls that are left."""
        return tuple(call.number for call in self.calls)


def shrink(goal: Goal, segment: int, last_call: int, fails: Callable[[Goal], bool], secs: float) -> Shrunk | None:
    """Find a small subset of a segment's calls that still fails.

    Args:
        goal: What was asked for when the segment failed.
        segment: The number of that segment.
        last_call: The call at which the failure was noticed.
        fails: Plays a goal, and tells whether it fails.
        secs: When to be content with what there is.

    Returns:
        None if the segment does not fail again.
    """
    deadline = time.monotonic() + secs
    every = plan_calls(goal, plan_segment(goal, segment), last_call)
    num_played = 0

    def is_failing(calls: list[ProgramCall]) -> bool:
        nonlocal num_played
        numbers = tuple(call.number for call in calls)
        subset = replace(goal, segment=segment, only=numbers, secs=None, num_calls=None, limit_secs=_LIMIT_SECS)
        for _ in range(_NUM_TRIES):
            num_played += 1
            if fails(subset):
                return True
        return False

    if not is_failing(every):
        return None
    calls, size = every, len(every) // 2
    while size and time.monotonic() < deadline:
        start = 0
        while start < len(calls) and time.monotonic() < deadline:
            rest = without(calls, calls[start : start + size])
            if rest and is_failing(rest):
                calls = rest
            else:
                start += size
        size //= 2
    return Shrunk(len(every), tuple(calls), num_played)


def without(calls: list[ProgramCall], dropped: list[ProgramCall]) -> list[ProgramCall]:
    """The calls but for some, and for those that go back to one of these."""
    numbers = {call.number for call in dropped}
    return [call for call in calls if call.number not in numbers and call.source not in numbers]
