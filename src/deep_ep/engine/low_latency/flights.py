"""Which calls are under way, as the host knows it: sent, and not yet received.

Why a set may be written again without asking anybody: whoever has received call i from everybody knows that everybody
has sent it, and had, at that time, at most so many results in flight as calls of that size may have (*most*). So
everybody has received, and read, all calls up to i - most. What may still be read is apart from the set of the next
call, or a barrier comes first. `docs/low-latency.md` has the whole argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from ...errors import EPError
from .geometry import MOST_SETS

_NUM_KEPT = 2 * MOST_SETS  # calls back, further than any set can still be read


class Flight:
    """A call that was sent.

    Attributes:
        number: Its place among the calls that this host has made. Calls that a graph replays are not counted, so only
            differences mean anything.
    """

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number


class _Sent(NamedTuple):
    """A call of the past.

    Attributes:
        number: Of the call.
        num_sets: That calls of its size divide the memory into; 0: it had no set (a barrier).
        most: Results that any rank may have had in flight with it, itself included.
    """

    number: int
    num_sets: int
    most: int


class Flights:
    """The low-latency calls of a buffer, one chain."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._deepest = 1
        self._pending: dict[int, Flight] = {}  # the oldest comes first
        self._recent: deque[_Sent] = deque(maxlen=_NUM_KEPT)
        self._num_alike = 0  # of the recent ones, counted back from the last: with as many sets as that

    def send(self, where: str, num_sets: int) -> Flight:
        """Begin a call. `needs_barrier` was asked before.

        Args:
            where: The call, for the error.
            num_sets: That calls of its size divide the memory into; 0: it has no set.

        Raises:
            EPError: So many results cannot be in flight. Nothing was sent.
        """
        self._deepest = max(self._deepest, self.require_room(where, num_sets))
        sent = _Sent(self._num_sent + 1, num_sets, self._most_in_flight(num_sets))
        is_alike = bool(self._recent) and self._recent[-1].num_sets == num_sets
        self._num_alike = min(self._num_alike + 1, _NUM_KEPT) if is_alike else 1
        self._recent.append(sent)
        self._num_sent = sent.number
        flight = self._pending[sent.number] = Flight(sent.number)
        return flight

    def require_room(self, where: str, num_sets: int) -> int:
        """How many results are in flight with one more; the rest as for `send`, which does it, too."""
        if not self._pending:
            return 1
        depth = self._depth()
        most = self._most_in_flight(num_sets)
        if depth > most or self._overwrites(num_sets):
            other_sizes = " right after calls of other sizes" if 2 * depth <= num_sets else ""
            raise EPError(
                f"{where}: {depth} results would be in flight, the window has sets for {min(most, depth - 1)}"
                f"{other_sizes}. Call the hook of the earlier call first, or make the buffer with a larger "
                "num_rdma_bytes"
            )
        return depth

    def needs_barrier(self, num_sets: int) -> bool:
        """Whether somebody may still read what the next call would write over, though nothing is in flight here.

        It follows from the sizes of the calls alone, so all ranks answer alike. It happens where calls of one size,
        which allow several in flight, are followed by one of another size.
        """
        return not self._pending and self._overwrites(num_sets)

    def make_way(self, where: str, num_sets: int, barrier: Callable[[], None]) -> None:
        """Have everybody read what the next call writes over, by a barrier if need be, or refuse the call.

        Args:
            where: The call, for the error.
            num_sets: That calls of its size divide the memory into.
            barrier: Makes one.

        Raises:
            EPError: So many results cannot be in flight. Nothing was sent.
        """
        if self.needs_barrier(num_sets):
            barrier()
        self.require_room(where, num_sets)

    def age(self, flight: Flight) -> int:
        """How many calls were sent after it."""
        return self._num_sent - flight.number

    def receive(self, flight: Flight) -> None:
        """End a call.

        Raises:
            EPError: It has ended already: a hook is called once.
        """
        if self._pending.pop(flight.number, None) is None:
            raise EPError("low-latency hook: it has been called before. Each call's hook is called once")

    @property
    def next_number(self) -> int:
        """Of the call that is sent next."""
        return self._num_sent + 1

    @property
    def num_consumed(self) -> int:
        """All ranks have received all calls up to this number, if they call their hooks in this rank's order."""
        return self._oldest - 1 - self._deepest

    @property
    def _oldest(self) -> int:
        """The oldest call that is pending, or the next one."""
        return next(iter(self._pending), self._num_sent + 1)

    def _depth(self) -> int:
        """Results in flight with the next call: from the oldest one on, since what it holds up is all behind it."""
        return self.next_number - self._oldest + 1

    def _most_in_flight(self, num_sets: int) -> int:
        """Results that a rank may have in flight with the next call: half the sets, if the calls before had as many."""
        depth, num_recent = 1, len(self._recent)
        num_alike = self._num_alike if num_recent and self._recent[-1].num_sets == num_sets else 0
        while 2 * (depth + 1) <= num_sets and depth <= self._num_sent and num_alike >= min(2 * depth + 1, num_recent):
            depth += 1
        return depth

    def _overwrites(self, num_sets: int) -> bool:
        """Whether the set of the next call may still be read as that of an earlier one."""
        if not self._recent:
            return False
        last = self._recent[-1]
        # As in any decoding loop: all but the call before has been read, and that lies in the other quarter.
        is_alternating = last.most == 1
        # One call like another: those that may not have been read are at most half as many as there are sets.
        is_steady = last.num_sets == num_sets and self._num_alike >= last.most
        if not self._pending and (is_alternating or is_steady):
            return False
        last_received = self._oldest - 1
        read = max((one.number - one.most for one in self._recent if one.number <= last_received), default=0)
        return any(one.number > read and self._shares_set(one, num_sets) for one in self._recent)

    def _shares_set(self, sent: _Sent, num_sets: int) -> bool:
        number = self.next_number
        if not sent.num_sets or not num_sets or (sent.number ^ number) & 1:
            return False
        half = num_sets // 2
        return sent.num_sets != num_sets or (sent.number >> 1) % half == (number >> 1) % half
