"""The slots of a rank's low-latency memory: each holds a combine's rows, or is the zero-copy tensor of a handle."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from ...errors import EPError
from .geometry import NUM_SLOTS, NUM_ZERO_COPY, Geometry

# What a call takes of the slots: none, the one of its zero-copy tensor, or any that is free.
NO_SLOT, OWN_SLOT, FREE_SLOT = 0, 1, 2
ALL_SLOTS = (1 << NUM_SLOTS) - 1  # as bits


@dataclass
class _Slot:
    key: int = 0  # the handle that it is leased to; 0: none
    handle: weakref.ref | None = None
    last_call: int = 0  # that used it

    def is_leased(self) -> bool:
        """Whether a handle has it as its zero-copy tensor and is still to be combined.

        A handle may be freed before that.
        """
        return self.handle is not None and self.handle() is not None


class Slots:
    """Which call or handle uses which slot.

    A slot is free for another use when all peers have received the call that used it last. Calls are numbered as in
    `InFlight`, which tracks what the peers have received.

    A call that needs a free slot takes the one that was used longest ago. On a GPU its kernel chooses, by the same rule
    (`words.free_slot`); once calls are captured in graphs, whose replays the host does not see, it cannot follow.

    Attributes:
        leased: A bit for each slot that a handle has as its zero-copy tensor.
        is_exact: The host knows which slot each call has taken.
    """

    def __init__(self) -> None:
        self._slots = [_Slot() for _ in range(NUM_SLOTS)]
        self._order = list(range(NUM_SLOTS))  # the one that was used longest ago comes first
        self._last_unknown = 0  # the last call that took a slot of which the host does not know which one it is
        self.leased = 0
        self.is_exact = True

    def num_leased(self) -> int:
        """Slots that are leased now. Slots of handles that no longer exist are taken back."""
        self.leased = sum(1 << index for index, slot in enumerate(self._slots) if slot.is_leased())
        return self.leased.bit_count()

    def lease(self, src_info: torch.Tensor, num_consumed: int, bytes_for_two: int = 0) -> tuple[int, int]:
        """Lease a free slot to a handle, as its zero-copy tensor, or return the slot that it has.

        Args:
            src_info: `packed_recv_src_info` of the handle.
            num_consumed: All ranks have received all calls up to this number.
            bytes_for_two: The `num_rdma_bytes` with which no dispatch so far would have taken a slot; 0: none has.

        Returns:
            The slot, and the call that used it last.

        Raises:
            EPError: None is free.
        """
        own = self._leased_to(src_info)
        if own is not None:
            return own, self._slots[own].last_call
        num_leased = self.num_leased()
        free = [
            index
            for index, slot in enumerate(self._slots)
            # A slot that no call has used has 0, and before the first calls the other number is below that.
            if not self.leased >> index & 1 and max(slot.last_call, self._last_unknown) <= max(0, num_consumed)
        ]
        if num_leased == NUM_ZERO_COPY:
            raise EPError(
                f"get_next_low_latency_combine_buffer: all {NUM_ZERO_COPY} buffers belong to handles that are still to "
                "be combined. Combine one of those handles first"
            )
        if not free:
            first = "Combine the handle of the other" if num_leased else "Make another call, and receive it,"
            remedy = f", or make the buffer with num_rdma_bytes={bytes_for_two}" if bytes_for_two else ""
            raise EPError(
                f"get_next_low_latency_combine_buffer: peers may still read {NUM_SLOTS - num_leased} of the window's "
                f"{NUM_SLOTS} slots, and {num_leased} belong to other handles. {first} first{remedy}"
            )
        index = next(index for index in self._order if index in free)
        slot = self._slots[index]
        # Both: when the handle is gone, another tensor may get its address.
        slot.key, slot.handle = src_info.data_ptr(), weakref.ref(src_info)
        self.leased |= 1 << index
        return index, slot.last_call

    def give_back(self, src_info: torch.Tensor, call: int) -> int:
        """End the lease of a handle whose combine is about to send, and return its slot.

        Args:
            src_info: `packed_recv_src_info` of the handle.
            call: The number of the combine.

        Raises:
            EPError: The handle has none.
        """
        index = self._leased_to(src_info)
        if index is None:
            raise EPError(
                "low_latency_combine: zero_copy needs the tensor that get_next_low_latency_combine_buffer(handle) "
                "returns, filled for this handle. Call it first"
            )
        slot = self._slots[index]
        slot.key, slot.handle = 0, None
        self.leased &= ~(1 << index)
        self._use(index, call)
        return index

    def has_lease(self, src_info: torch.Tensor) -> bool:
        """Return whether a handle has a slot. Its combine takes that slot, even if it copies its rows in."""
        return bool(self.leased) and self._leased_to(src_info) is not None

    def take(self, call: int) -> tuple[int, int]:
        """Have a call take the free slot that was used longest ago. Returns it, and the call that used it last."""
        index, leased = self._order[0], self.leased
        if leased:
            index = next(one for one in self._order if not leased >> one & 1)
        if not self.is_exact:
            self._last_unknown = call
        last_call = self._slots[index].last_call
        self._use(index, call)
        return index, last_call

    def _use(self, index: int, call: int) -> None:
        self._slots[index].last_call = call
        self._order.remove(index)
        self._order.append(index)

    def _leased_to(self, src_info: torch.Tensor) -> int | None:
        key = src_info.data_ptr()
        return next((i for i, slot in enumerate(self._slots) if slot.key == key and slot.is_leased()), None)


def zero_copy_view(memory: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """A zero-copy tensor: [L, R * M, H] BF16 whose rows are `slot_bytes` apart.

    Args:
        memory: [combine_bytes] uint8.
        geometry: Its sizes.
    """
    row, num_rows = geometry.slot_bytes // 2, geometry.num_rows
    size = (geometry.num_local_experts, num_rows, geometry.hidden)
    return memory.view(torch.bfloat16).as_strided(size, (num_rows * row, row, 1))
