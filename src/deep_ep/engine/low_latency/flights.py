"""Which calls are under way, as the host knows it: sent, and not yet received.

Why a set may be written again without asking anybody: rank p sends call j only when it has received all calls up to
j - k, with 2k sets. So who has received call n - k from everybody knows that everybody had received n - 2k before, and
has read the set that call n is about to use. `docs/low-latency.md` has the whole argument.
"""

from __future__ import annotations

from collections import deque

from ...errors import EPError
from .geometry import MOST_SETS


class Flight:
    """A call that was sent.

    Attributes:
        number: Its place among the calls that this host has made. Calls that a graph replays are not counted, so only
            differences mean anything.
    """

    __slots__ = ("number",)

    def __init__(self, number: int):
        self.number = number


class Flights:
    """The low-latency calls of a buffer, one chain."""

    def __init__(self) -> None:
        self._num_sent = 0
        self._deepest = 1
        self._pending: dict[int, Flight] = {}
        self._recent_sets: deque[int] = deque(maxlen=MOST_SETS)  # of the last calls

    def send(self, where: str, num_sets: int) -> Flight:
        """Begin a call.

        Args:
            where: The call, for the error.
            num_sets: That calls of its size divide the memory into.

        Raises:
            EPError: So many results cannot be in flight. Nothing was sent.
        """
        self._deepest = max(self._deepest, self.require_room(where, num_sets))
        self._num_sent += 1
        self._recent_sets.append(num_sets)
        flight = self._pending[self._num_sent] = Flight(self._num_sent)
        return flight

    def require_room(self, where: str, num_sets: int) -> int:
        """How many results are in flight with one more; the rest as for `send`, which does it, too."""
        number = self._num_sent + 1
        depth = number - min(self._pending, default=number) + 1
        if depth > 1:
            recent = [*self._recent_sets][-(2 * depth - 1) :]
            if 2 * depth > num_sets or any(one != num_sets for one in recent):
                most = max(1, min([num_sets, *recent]) // 2)
                raise EPError(
                    f"{where}: {depth} results would be in flight, the window has sets for {most}"
                    f"{'' if 2 * depth > num_sets else ' right after calls of other sizes'}. Call the hook of the "
                    "earlier call first, or make the buffer with a larger num_rdma_bytes"
                )
        return depth

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
        return min(self._pending, default=self._num_sent + 1) - 1 - self._deepest
