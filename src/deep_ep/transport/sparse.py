"""Memory of which little is used, here and there: the low-latency memory of a rank, and the results of its calls.

A segment of the arena fills from the bottom, and is faulted in up to what is used. Low-latency memory is reserved for
the worst case, of which a call uses a few rows: it is committed where it is used, and never faulted in as a whole.
"""

from __future__ import annotations

import ctypes

import torch

from .memory import Mapping, Memory, PrivateMemory, bytes_tensor, commit_fresh
from .spans import Span, SpanSet

GRAIN_BYTES = 16  # what is gathered begins at multiples of it


class SparseSegment:
    """A stretch of this rank's memory that peers map. Reserved as a whole, taken span by span.

    Args:
        memory: The rank's memory.
        num_bytes: How much to reserve.
    """

    def __init__(self, memory: Memory, num_bytes: int):
        self._memory = memory
        self.span = memory.grow(num_bytes)
        self.mapping = memory.map(self.span)
        self._uncommitted = SpanSet(self.span)

    def commit(self, start: int, num_bytes: int) -> torch.Tensor:
        """Commit bytes `[start, start + num_bytes)`, and return them as a uint8 tensor.

        Raises:
            EPTransportError: There is too little memory.
        """
        first = self.span.start + start
        commit_fresh(self._memory, self._uncommitted, Span(first, first + num_bytes))
        return self.bytes(start, num_bytes)

    def bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        """Return bytes `[start, start + num_bytes)` without committing them; memory is committed as they are
        touched.
        """
        first = self.span.start + start
        assert first + num_bytes <= self.span.stop, (start, num_bytes, self.span)
        return bytes_tensor(self.mapping.view(Span(first, first + num_bytes)))


class Atlas:
    """Mappings of several ranks as one tensor, so that one operator gathers rows from all of them.

    The tensor spans all addresses from the lowest mapping to the end of the highest. What lies between belongs to other
    allocations, so an index must be checked before it is used. Only its owner reads it, and only while it holds the
    mappings.
    """

    def __init__(self) -> None:
        self._mappings: dict[int, Mapping] = {}
        self._low = self._high = 0
        self._everything: dict[torch.dtype, torch.Tensor] = {}

    def add(self, mapping: Mapping) -> None:
        """Add a mapping. The grains of all mappings may change."""
        if mapping.address in self._mappings:
            return
        self._mappings[mapping.address] = mapping
        self._low = min(one.address for one in self._mappings.values())
        self._high = max(one.address + one.span.num_bytes for one in self._mappings.values())
        self._everything.clear()

    def grain_of(self, mapping: Mapping, offset: int) -> int:
        """Return the row of `rows` that begins at an offset of a rank's memory, a multiple of `GRAIN_BYTES`."""
        return self.grain_at(mapping.address + offset - mapping.span.start)

    def grain_at(self, address: int) -> int:
        """Return the row of `rows` that begins at an address of this process, inside one of the mappings."""
        return (address - self._low) // GRAIN_BYTES

    def rows(self, num_columns: int, dtype: torch.dtype, shift_bytes: int = 0) -> torch.Tensor:
        """Return [grains, num_columns]: row i begins `shift_bytes` behind grain i.

        Valid until the next mapping is added.
        """
        if dtype not in self._everything:
            memory = (ctypes.c_char * (self._high - self._low)).from_address(self._low)
            self._everything[dtype] = torch.frombuffer(memory, dtype=dtype)
        everything, grain = self._everything[dtype], GRAIN_BYTES // dtype.itemsize
        shift = shift_bytes // dtype.itemsize
        num_grains = (everything.numel() - shift - num_columns) // grain + 1
        return everything.as_strided((num_grains, num_columns), (grain, 1), shift)


class HollowMemory(PrivateMemory):
    """Private memory for tensors that are mostly never touched: no page is faulted in before that."""

    def map(self, span: Span) -> Mapping:
        """Map a span. Each span is mapped once."""
        return _HollowMapping(super().map(span).memory, span, is_private=True)


class _HollowMapping(Mapping):
    def fault_in(self, span: Span) -> None:
        """Do nothing: pages are faulted in when they are touched."""
