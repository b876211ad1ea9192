"""One clock for all ranks: that of rank 0, and how well it is known elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

from ..control import Control

_NUM_ROUNDS = 8


class Clock(NamedTuple):
    """How a rank's clock stands to that of rank 0. Both are `time.monotonic_ns`.

    Attributes:
        offset_ns: To be added to this rank's time.
        error_ns: How far from the truth that can be; 0 on the host of rank 0, whose processes share a clock.
    """

    offset_ns: int = 0
    error_ns: int = 0


def compare_clocks(control: Control, hosts: Sequence[str]) -> Clock:
    """Find out how this rank's clock stands to that of rank 0. All ranks call it together.

    Args:
        control: The group.
        hosts: The host of every rank; the processes of one share a clock.
    """
    if len(set(hosts)) == 1:
        return Clock()
    sent, ended = [], []
    for _ in range(_NUM_ROUNDS):
        sent.append(control.gather(time.monotonic_ns(), "comparing clocks"))
        ended.append(time.monotonic_ns())
    all_ended = control.gather(ended, "comparing clocks")
    mine = estimate(
        [times[0] for times in sent], all_ended[0], [times[control.rank] for times in sent], all_ended[control.rank]
    )
    clocks = control.gather(mine, "comparing clocks")
    here = hosts[control.rank]
    if here == hosts[0]:
        return Clock()
    # Ranks of a host have one clock, so they use one estimate: the best.
    return min((clock for clock, host in zip(clocks, hosts, strict=True) if host == here), key=lambda one: one.error_ns)


def estimate(sent_0: Sequence[int], ended_0: Sequence[int], sent: Sequence[int], ended: Sequence[int]) -> Clock:
    """The clock of a rank, from gathers that it and rank 0 took part in.

    A gather ends nowhere before everybody has entered it. So `sent_0 <= ended + offset` and `sent + offset <= ended_0`
    hold for each of them, and the truth lies between the tightest of these bounds.

    Args:
        sent_0: When rank 0 entered, by its clock.
        ended_0: When it was through.
        sent: When the other rank entered, by its own clock.
        ended: When that was through.

    Example:
        Rank 0 enters at 1000 and is through at 1010; the other at 3 and 9 of its clock: the offset is between 991 and
        1007, so `Clock(999, 8)`.
    """
    low = max(begin - end for begin, end in zip(sent_0, ended, strict=True))
    high = min(end - begin for begin, end in zip(sent, ended_0, strict=True))
    return Clock((low + high) // 2, max(0, (high - low + 1) // 2))
