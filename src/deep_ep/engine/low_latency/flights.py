"""Which calls are under way, as the host knows it: sent, and not yet received.

Why a set may be written again without asking anybody: whoever has received call i from everybody knows that everybody
has sent it, and had, at that time, at most so many results in flight as calls of that size may have (*most*). So
everybody has received, and read, all calls up to i - most. What may still be read is apart from the set of the next
call, or a barrier comes first. `docs/low-latency.md` has the whole argument.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from ...errors import EPError
from .geometry import MOST_SETS

_NUM_KEPT = 2 * MOST_SETS  # calls back, further than any set can still be read


class Flights:
    """The low-latency calls of a buffer, one chain.

    A call is known by its number, its place among the calls that this host has made. Calls that a graph replays are not
    counted, so only differences mean anything.

    Every call comes through here, and should not take longer for it: what is known of the last one is at hand.
    """

    def __init__(self) -> None:
        self._num_sent = 0
        self._deepest = 1
        self._pending: dict[int, None] = {}  # the oldest comes first
        # Calls of the past: the number; the sets that calls of its size divide the memory into, 0: it had none (a
        # barrier); the results that any rank may have had in flight with it, itself included (most).
        self._recent: deque[tuple[int, int, int]] = deque(maxlen=_NUM_KEPT)
        self._last_sets = self._last_most = 0  # of the last one
        self._num_alike = 0  # of the recent ones, counted back from the last: with as many sets as that

    def send(self, where: str, num_sets: int) -> int:
        """Begin a call: its number. `needs_barrier` was asked before.

        Args:
            where: The call, for the error.
            num_sets: That calls of its size divide the memory into; 0: it has no set.

        Raises:
            EPError: So many results cannot be in flight. Nothing was sent.
        """
        if self._pending:
            self._deepest = max(self._deepest, self.require_room(where, num_sets))
        number, most = self._num_sent + 1, self._most_in_flight(num_sets)
        self._num_alike = min(self._num_alike + 1, _NUM_KEPT) if num_sets == self._last_sets else 1
        self._last_sets, self._last_most = num_sets, most
        self._recent.append((number, num_sets, most))
        self._pending[number] = None
        self._num_sent = number
        return number

    def pass_by(self, num_sets: int) -> bool:
        """Begin and end a call at once, where plainly nothing has to be done before: `make_way`, `send` and `receive`.

        Args:
            num_sets: As for `send`, not 0.

        Returns:
            Whether it was done. If not, nothing has changed, and `make_way` says what there is to do.
        """
        num_alike = self._num_alike if num_sets == self._last_sets else 0
        most = self._last_most
        if self._pending or (most > 1 and num_alike < most):  # see `_overwrites`
            return False
        if num_alike == 0:
            most = 1
        elif num_alike < _NUM_KEPT:  # else as many as in the call before, which was like it
            most = self._most_in_flight(num_sets)
        self._num_alike = num_alike + 1 if num_alike < _NUM_KEPT else num_alike
        self._last_sets, self._last_most = num_sets, most
        self._num_sent += 1
        self._recent.append((self._num_sent, num_sets, most))
        return True

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
        if self._pending:
            self.require_room(where, num_sets)
        elif self.needs_barrier(num_sets):
            barrier()

    def newest_spent(self, num_sets: int) -> int:
        """The newest call over which the next one writes: what it has sent, or its post; 0: there is none.

        Args:
            num_sets: As for `send`.
        """
        shared = (number for number, sets, _ in self._recent if self._shares_set(number, sets, num_sets))
        return max([*shared, self.next_number - MOST_SETS, 0])

    def age(self, number: int) -> int:
        """How many calls were sent after it."""
        return self._num_sent - number

    def require_pending(self, number: int) -> None:
        """Refuse to end a call twice.

        Raises:
            EPError: It has ended already: a hook is called once.
        """
        if number not in self._pending:
            raise EPError("low-latency hook: it has been called before. Each call's hook is called once")

    def receive(self, number: int) -> int:
        """End a call, which is pending. Returns its age."""
        self.require_pending(number)
        del self._pending[number]
        return self._num_sent - number

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
        num_alike = self._num_alike if num_sets == self._last_sets else 0
        while 2 * (depth + 1) <= num_sets and depth <= self._num_sent and num_alike >= min(2 * depth + 1, num_recent):
            depth += 1
        return depth

    def _overwrites(self, num_sets: int) -> bool:
        """Whether the set of the next call may still be read as that of an earlier one."""
        most = self._last_most
        # As in any decoding loop: all but the call before has been read, and that lies in the other quarter.
        # Or one call like another: those that may not have been read are at most half as many as there are sets.
        if not self._pending and (most <= 1 or (num_sets == self._last_sets and self._num_alike >= most)):
            return False
        last_received = self._oldest - 1
        read = max((number - most for number, _, most in self._recent if number <= last_received), default=0)
        return any(number > read and self._shares_set(number, sets, num_sets) for number, sets, _ in self._recent)

    def _shares_set(self, earlier: int, earlier_sets: int, num_sets: int) -> bool:
        number = self.next_number
        if not earlier_sets or not num_sets or (earlier ^ number) & 1:
            return False
        half = num_sets // 2
        return earlier_sets != num_sets or (earlier >> 1) % half == (number >> 1) % half
