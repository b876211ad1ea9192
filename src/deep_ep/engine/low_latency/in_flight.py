"""Which calls are in flight, as the host knows it: sent, and not yet received.

Why memory may be written again without a handshake: a rank sends call n when it has received all calls up to n - 2
(`MOST_IN_FLIGHT`). So if a rank has received call i from all ranks, all of them have sent it, and have received and
read all calls up to i - 2. `docs/low-latency.md` has the whole argument.
"""

from __future__ import annotations

import gc
from collections import deque

from ...errors import EPError
from .geometry import MOST_IN_FLIGHT, NUM_SLOTS
from .slots import FREE_SLOT, Slots


class InFlight:
    """The low-latency calls of a buffer, one chain.

    A call is identified by its number among the calls that this host has made. Calls that a graph replays are not
    counted, so on a GPU only differences mean anything.

    This is on the path of every call, so it has to be fast.

    Args:
        slots: The slots of the rank's memory.

    Attributes:
        bytes_for_two: The `num_rdma_bytes` with which no dispatch so far would have taken a slot; 0: none has.
    """

    def __init__(self, slots: Slots) -> None:
        self._slots = slots
        self._num_sent = 0
        self._newest_received = 0
        self._least_consumed = 0  # all ranks have agreed that calls up to this one are over
        self._pending: dict[int, None] = {}  # the oldest comes first
        self._abandoned: set[int] = set()
        self._took_slots: deque[int] = deque(maxlen=NUM_SLOTS)  # the last calls that did
        self.bytes_for_two = 0

    def send(self, slot: int) -> int:
        """Begin a call, for which there is capacity, and return its number.

        Args:
            slot: What it takes of the slots.
        """
        number = self._num_sent = self._num_sent + 1
        if slot:
            self._took_slots.append(number)
        self._pending[number] = None
        return number

    def require_capacity(self, where: str, slot: int, bytes_for_two: int = 0) -> None:
        """Raise if a call would exceed the memory for calls in flight.

        Args:
            where: The call, for the error.
            slot: What it takes of the slots.
            bytes_for_two: Of a dispatch that takes a slot: the `num_rdma_bytes` with which it would take none.

        Raises:
            EPError: Too many results would be in flight, or too many slots in use.
        """
        self.bytes_for_two = max(self.bytes_for_two, bytes_for_two)
        if not self._pending and not (slot == FREE_SLOT and self._slots.leased):
            return  # nearly every call
        number = self._num_sent + 1
        depth = number - self._oldest + 1  # from the oldest one on, since it holds up what is behind it
        if depth > MOST_IN_FLIGHT:
            num_results = len(self._pending) + 1
            what = f"{num_results} results would be in flight, the window has room for {MOST_IN_FLIGHT}"
            if num_results <= MOST_IN_FLIGHT:  # the last call was received first
                what = "the call before the last one is still in flight, and only the last one may be"
            raise EPError(
                f"{where}: {what}. Call the hook of the earlier call first. If it was dropped, make a new buffer, or, "
                "with enable_shrink, let clean_low_latency_buffer give the call up"
            )
        if slot != FREE_SLOT:
            return
        # Peers may still read what calls of the last two numbers sent, and of one more if one is in flight here.
        first = number - MOST_IN_FLIGHT - (depth - 1)
        num_read = sum(one >= first for one in self._took_slots)
        num_leased = self._slots.num_leased() if num_read else 0
        if num_leased and num_read + num_leased >= NUM_SLOTS:
            gc.collect()  # handles that only a reference cycle keeps: on other ranks they may be gone already
            num_leased = self._slots.num_leased()
        if num_read + num_leased < NUM_SLOTS:
            return
        if depth > 1:
            remedy = f", or make the buffer with num_rdma_bytes={self.bytes_for_two}" if self.bytes_for_two else ""
            raise EPError(
                f"{where}: {depth} results would be in flight, the window has room for {depth - 1}, since the calls "
                f"before took its {NUM_SLOTS} slots. Call the hook of the earlier call first{remedy}"
            )
        raise EPError(
            f"{where}: peers may still read {num_read} of the window's {NUM_SLOTS} slots, and {num_leased} belong to "
            "handles with a tensor of get_next_low_latency_combine_buffer. Combine one of those handles first"
        )

    def require_pending(self, number: int) -> None:
        """Raise unless a call is pending, so that none is ended twice.

        Raises:
            EPError: It has ended already: a hook is called once. Or it was abandoned.
        """
        if number in self._abandoned:
            raise EPError("low-latency hook: clean_low_latency_buffer has given up this call. Make it again")
        if number not in self._pending:
            raise EPError("low-latency hook: it has been called before. Each call's hook is called once")

    def receive(self, number: int) -> int:
        """End a call, which is pending. Returns its age."""
        self.require_pending(number)
        del self._pending[number]
        self._newest_received = max(self._newest_received, number)
        return self._num_sent - number

    def abandon(self) -> None:
        """Give up all calls that are in flight: their hooks will raise."""
        self._abandoned.update(self._pending)
        self._pending.clear()

    def go_on_from(self, number: int) -> None:
        """Give the next call this number, which must not be below its own. No call may be in flight on any rank.

        All earlier calls are over on all ranks, so all slots that are not leased are free.
        """
        assert not self._pending
        assert number > self._num_sent, (number, self._num_sent)
        self._num_sent = self._newest_received = self._least_consumed = number - 1
        self._took_slots.clear()

    @property
    def next_number(self) -> int:
        """The number of the call that is sent next."""
        return self._num_sent + 1

    @property
    def num_consumed(self) -> int:
        """The last call up to which all ranks, this one included, have received every call."""
        return max(self._least_consumed, min(self._oldest - 1, self._newest_received - MOST_IN_FLIGHT))

    @property
    def _oldest(self) -> int:
        """Return the oldest call that is pending, or the next one."""
        return next(iter(self._pending), self._num_sent + 1)
