"""Which rank the others wait for, while a program runs: a verdict now and then, through `logging`.

A trace and `python -m deep_ep report` show the same for every single call, afterwards.
"""

from __future__ import annotations

import time
from collections.abc import Mapping

from .log import logger

# In a balanced group of R ranks, each comes last in 1 / R of the waits; of two ranks one always does.
_LEAST_SHARE, _MOST_SHARE = 0.5, 0.75
# Of the elapsed time, what was spent waiting for a rank: less is not worth a line; more is, however seldom it was last.
_LEAST_TIME_SHARE, _MOST_TIME_SHARE = 0.05, 0.5


class Watch:
    """Counts which rank came last in the waits of one rank. Only the comm stream calls `note`.

    Args:
        rank: This rank.
        num_ranks: How many ranks there are.
        num_waits: After how many waits there is a verdict.
        interval_secs: Seconds between two verdicts on the same rank, at least.

    Attributes:
        num_noted: All waits so far.
        num_last: By rank, in how many of them it came last.
    """

    def __init__(self, rank: int, num_ranks: int, num_waits: int, interval_secs: float):
        self.rank, self.num_ranks, self.num_waits, self.interval_secs = rank, num_ranks, num_waits, interval_secs
        self.num_noted, self.num_last = 0, [0] * num_ranks
        self._share = min(_MOST_SHARE, max(_LEAST_SHARE, 2 / num_ranks))
        self._told: dict[int, float] = {}  # by rank, when there was a verdict on it
        self._begin()

    def anew(self) -> Watch:
        """Return one for a new generation of the buffer, whose counters begin anew."""
        return Watch(self.rank, self.num_ranks, self.num_waits, self.interval_secs)

    def _begin(self) -> None:
        self._begun, self._num = time.monotonic(), 0
        self._last, self._secs = [0] * self.num_ranks, [0.0] * self.num_ranks

    def note(self, waited: Mapping[int, float], first_rank: int = 0) -> None:
        """Take one wait into account.

        Args:
            waited: By rank, how long it was waited for; ranks that had come before are left out, or have 0.
            first_rank: What is added to these ranks.
        """
        self._num += 1
        self.num_noted += 1
        secs = max(waited.values(), default=0.0)
        if secs > 0:
            for rank, one in waited.items():
                if one == secs:
                    self.num_last[first_rank + rank] += 1
                    self._last[first_rank + rank] += 1
                    self._secs[first_rank + rank] += secs
        if self._num >= self.num_waits:
            self._judge()
            self._begin()

    def _judge(self) -> None:
        now = time.monotonic()
        rank = max(range(self.num_ranks), key=self._secs.__getitem__)
        elapsed, share, secs = now - self._begun, self._last[rank] / self._num, self._secs[rank]
        # A rank that is late for every dispatch finds all rows there, and may well be the first in the combine.
        is_often_last = share >= self._share and secs >= _LEAST_TIME_SHARE * elapsed
        is_long_awaited = secs >= max(_MOST_TIME_SHARE * elapsed, self._share * sum(self._secs))
        if secs == 0 or not (is_often_last or is_long_awaited):
            return
        if rank in self._told and now - self._told[rank] < self.interval_secs:
            return
        self._told[rank] = now
        logger.warning(
            "rank %d came last in %.0f%% of the last %s waits: %.2g s of %.2g s were spent waiting for it (rank %d/%d)",
            *(rank, 100 * share, f"{self._num:,}", secs, elapsed, self.rank, self.num_ranks),
        )
