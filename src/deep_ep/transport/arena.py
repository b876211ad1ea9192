"""The arena: regions of a rank's memory that live as long as the tensors over them.

Memory comes in segments, each of which a peer maps when an offer first names it. A segment is reserved in the address
space as a whole and committed span by span, when it is first used.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..errors import EPTransportError
from .memory import Mapping, Memory, commit_fresh, ordinary_tensor
from .spans import UNIT_BYTES, Span, SpanSet, whole_units

GROWTH_BYTES = 2 << 20  # segments are multiples of this


class Base(NamedTuple):
    """Where a region begins, for a peer: the segment that holds it, and its offset in the owner's memory."""

    segment: Span
    offset: int

    def words(self) -> list[int]:
        """Return the three words by which an offer names this base."""
        return [self.segment.start, self.segment.stop, self.offset]

    @classmethod
    def from_words(cls, words: Sequence[int]) -> Base:
        """Decode the words of `words`."""
        return cls(Span(words[0], words[1]), words[2])


class Segment:
    """A mapped span of this rank's memory, and which parts of it are free or not yet committed."""

    def __init__(self, memory: Memory, num_bytes: int):
        self.memory = memory
        self.span = memory.grow(num_bytes)
        self.mapping = memory.map(self.span)
        self.free = SpanSet(self.span)
        self._uncommitted = SpanSet(self.span)

    def commit(self, span: Span) -> None:
        """Make sure that a span is backed by memory.

        Raises:
            EPTransportError: There is too little.
        """
        for fresh in commit_fresh(self.memory, self._uncommitted, span):
            self.mapping.fault_in(fresh)  # no more than this: pages that are touched are memory that is taken

    def trim(self) -> int:
        """Give free memory back to the system. Returns the bytes given back."""
        before = self.num_committed_bytes
        for span in self.free:
            # Before the pages go: an interrupt must leave none as committed that have no memory. Removed first, since
            # parts of the span may be uncommitted already, and `add` takes no overlap.
            self._uncommitted.remove(span)
            self._uncommitted.add(span)
            self.mapping.discard(span)
        return before - self.num_committed_bytes

    @property
    def num_committed_bytes(self) -> int:
        """The bytes that the system has committed."""
        return self.span.num_bytes - self._uncommitted.num_bytes


class Arena:
    """Segments, and the regions in them.

    Args:
        memory: The rank's memory.
        first_bytes: Size of the first segment.
        limit_bytes: Most bytes of all segments together; 0: no limit.
        on_map: Called with each mapping that is made, if given.
    """

    def __init__(
        self,
        memory: Memory,
        first_bytes: int = 0,
        limit_bytes: int = 0,
        on_map: Callable[[Mapping], None] | None = None,
    ):
        self._memory = memory
        self._first_bytes = first_bytes
        self.limit_bytes = limit_bytes
        self._on_map = on_map
        self._segments: list[Segment] = []
        self._regions: dict[int, tuple[weakref.ref, Span]] = {}
        self._freed: deque[weakref.ref] = deque()
        self._lock = threading.Lock()  # the caller allocates results while the comm stream allocates rows of its calls

    def allocate(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a contiguous tensor over a region of the arena.

        The region is free again when the tensor's storage dies, with the last view of it. The arena grows where its
        limit and the memory allow.

        Returns:
            The tensor, uninitialised; None if there is no memory left. A tensor without elements takes none.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return ordinary_tensor(shape, dtype)
        view = self.take(num_bytes)
        return torch.frombuffer(view, dtype=dtype).view(*shape) if view is not None else None

    def take(self, num_bytes: int) -> memoryview | None:
        """Allocate bytes of the arena, at least one.

        They are free again when this view is freed, whatever slices it has.
        """
        with self._lock:
            self._reclaim()
            found = self._take(num_bytes)
        if found is None:
            return None
        segment, span = found
        try:
            return self._watched(segment, span, num_bytes)
        except BaseException:  # an interrupt: the region was not returned to the caller
            with self._lock:
                if all(taken != span for _, taken in self._regions.values()):  # else it is freed as any other
                    segment.free.add(span)
            raise

    def _watched(self, segment: Segment, span: Span, num_bytes: int) -> memoryview:
        view = segment.mapping.view(Span(span.start, span.start + num_bytes))
        # A region may die on any thread, inside garbage collection, and beside an interrupt: so nothing happens then
        # but that its reference is appended, by code that is not Python's.
        died = weakref.ref(view, self._freed.append)
        self._regions[id(died)] = died, span  # a weak reference that is gone itself calls nothing
        return view

    def base_of(self, tensor: torch.Tensor) -> Base | None:
        """Return where a contiguous tensor lies, if it lies in a region of this rank's arena."""
        for segment in self._segments:
            # Without the lock: segments are only ever appended.
            offset = segment.mapping.offset_of(tensor.data_ptr())
            if offset is not None:
                return Base(segment.span, offset)
        return None

    def trim(self) -> int:
        """Give free memory back to the system. Returns the bytes given back."""
        with self._lock:
            self._reclaim()
            return sum(segment.trim() for segment in self._segments)

    def num_bytes(self) -> dict[str, int]:
        """Return the bytes `used` by regions, `committed` by the system, and `reserved` in the address space."""
        with self._lock:
            self._reclaim()
            reserved = sum(segment.span.num_bytes for segment in self._segments)
            return {
                "used": reserved - sum(segment.free.num_bytes for segment in self._segments),
                "committed": sum(segment.num_committed_bytes for segment in self._segments),
                "reserved": reserved,
            }

    def _reclaim(self) -> None:
        while self._freed:
            region = self._regions.pop(id(self._freed.popleft()), None)
            if region is None:
                continue  # an interrupt came before it was returned to a caller
            _, span = region
            next(s for s in self._segments if s.span.start <= span.start < s.span.stop).free.add(span)

    def _take(self, num_bytes: int) -> tuple[Segment, Span] | None:
        for segment in self._segments:
            span = segment.free.take(num_bytes)
            if span is not None:
                return self._committed(segment, span)
        size = self._next_bytes(num_bytes)
        if not size:
            return None
        try:
            segment = Segment(self._memory, size)
        except EPTransportError:
            return None
        if self._on_map is not None:
            self._on_map(segment.mapping)
        self._segments.append(segment)
        span = segment.free.take(num_bytes)
        assert span is not None
        return self._committed(segment, span)

    def _committed(self, segment: Segment, span: Span) -> tuple[Segment, Span] | None:
        try:
            segment.commit(span)
        except EPTransportError:
            segment.free.add(span)
            return None
        return segment, span

    def _next_bytes(self, num_bytes: int) -> int:
        """Return the size of the next segment; 0 if `num_bytes` are too many.

        Segments double the arena. One with a limit is a single segment: reserving costs nothing, and what is in one
        piece is not wasted at the seams.
        """
        reserved = sum(segment.span.num_bytes for segment in self._segments)
        wanted = max(num_bytes, reserved or self._first_bytes)
        size = -(-wanted // GROWTH_BYTES) * GROWTH_BYTES
        if self.limit_bytes:
            size = (self.limit_bytes - reserved) // UNIT_BYTES * UNIT_BYTES
        return size if size >= whole_units(num_bytes) else 0
