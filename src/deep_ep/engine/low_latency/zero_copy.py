"""The tensors that experts write into for a zero-copy combine: two, each of one handle at a time."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import torch

from ...errors import EPError
from .geometry import NUM_ZERO_COPY, Geometry


@dataclass
class _Lease:
    key: int = 0  # the handle that it belongs to; 0: nobody's
    handle: weakref.ref | None = None
    is_combined: bool = True
    last_call: int = 0  # that read it

    def is_over(self) -> bool:
        """Whether it will not be combined any more: it was, or the handle is gone."""
        return self.is_combined or self.handle is None or self.handle() is None


class ZeroCopy:
    """Who has which of the zero-copy tensors.

    One is free for another handle when its combine has been made and a later call has been received from everybody:
    only then have all peers read it.
    """

    def __init__(self) -> None:
        self._leases = [_Lease() for _ in range(NUM_ZERO_COPY)]

    def take(self, src_info: torch.Tensor, num_consumed: int) -> int:
        """The tensor of a handle, known by its `packed_recv_src_info`: the one that it has, or a free one.

        Args:
            src_info: Of the handle.
            num_consumed: All ranks have received all calls up to this number.

        Raises:
            EPError: None is free.
        """
        key = src_info.data_ptr()
        own = [index for index, lease in enumerate(self._leases) if lease.key == key and not lease.is_combined]
        free = [
            index
            for index, lease in enumerate(self._leases)
            if lease.is_over() and lease.last_call <= max(0, num_consumed)
        ]
        if not own and not free:
            raise EPError(
                f"get_next_low_latency_combine_buffer: all {NUM_ZERO_COPY} buffers belong to handles that are still to "
                "be combined, or peers may still read them. Combine one of those handles first, then dispatch again"
            )
        index = own[0] if own else min(free, key=lambda one: self._leases[one].last_call)
        self._leases[index] = _Lease(key, weakref.ref(src_info), False, self._leases[index].last_call)
        return index

    def give(self, src_info: torch.Tensor, call: int) -> int:
        """The tensor that a handle's combine is about to read.

        Args:
            src_info: Of the handle.
            call: The number of the combine.

        Raises:
            EPError: The handle has none.
        """
        for index, lease in enumerate(self._leases):
            if lease.key == src_info.data_ptr() and not lease.is_combined:
                lease.is_combined, lease.last_call = True, call
                return index
        raise EPError(
            "low_latency_combine: zero_copy needs the tensor that get_next_low_latency_combine_buffer(handle) returns, "
            "filled for this handle. Call it first"
        )


def zero_copy_view(memory: torch.Tensor, geometry: Geometry) -> torch.Tensor:
    """A zero-copy tensor: [L, R * M, H] BF16 whose rows are `slot_bytes` apart.

    Args:
        memory: [combine_bytes] uint8.
        geometry: Its sizes.
    """
    row, num_rows = geometry.slot_bytes // 2, geometry.num_rows
    size = (geometry.num_local_experts, num_rows, geometry.hidden)
    return memory.view(torch.bfloat16).as_strided(size, (num_rows * row, row, 1))
