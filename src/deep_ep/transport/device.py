"""Device memory that peers address: segments, and an arena of regions whose reuse follows streams.

It is the counterpart of `window.py` for ranks whose kernels do the waiting: all there is here is memory and its
addresses; words and signals are the kernels'. `symm.py` and `interpreted.py` make the memory.
"""

from __future__ import annotations

import ctypes
import math
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ..errors import EPTransportError
from .spans import Span, SpanSet, whole_units

MAX_SEGMENTS = 64
_LEAST_RECORD_BYTES = 64 << 10


class Part(NamedTuple):
    """A piece of memory on every rank.

    Attributes:
        memory: This rank's, [n] uint8.
        addresses: Where each rank's is, for this rank.
        owner: Kept as long as any tensor over the memory lives.
    """

    memory: torch.Tensor
    addresses: tuple[int, ...]
    owner: Any


class DeviceMemory(Protocol):
    """Where segments come from."""

    def grow(self, num_bytes: int) -> Part:
        """A piece of `num_bytes` zeros on every rank. All ranks call it together, with the same number.

        Raises:
            EPTransportError: Some rank cannot have it; all ranks raise.
        """
        ...

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured in a graph."""
        ...


class DeviceWindow:
    """A rank's segments, its peers' addresses, and the arena.

    Args:
        rank: This rank.
        num_ranks: R.
        memory: Where segments come from.
        board_bytes: The first bytes of segment 0, which are the kernels'.
        arena_bytes: Room for regions in segment 0.
        arena_limit_bytes: All room for regions together; 0: no limit. The same on all ranks.
        staging_bytes: Bytes of segment 0, behind the board, that are never a region.

    Attributes:
        staging: Those bytes: where they begin in segment 0, and where they end.
        fault: Told of every fault point, where tests fail or delay the rank; None: nobody is.
    """

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        memory: DeviceMemory,
        board_bytes: int,
        arena_bytes: int,
        arena_limit_bytes: int = 0,
        staging_bytes: int = 0,
    ):
        self.rank = rank
        self.num_ranks = num_ranks
        self._memory = memory
        if arena_limit_bytes:
            arena_bytes = min(arena_bytes, arena_limit_bytes)
        board_bytes = whole_units(board_bytes)
        self.staging = Span(board_bytes, board_bytes + whole_units(staging_bytes))
        first = memory.grow(self.staging.stop + whole_units(arena_bytes))
        self.device = first.memory.device
        self.windows = torch.zeros(MAX_SEGMENTS, num_ranks, dtype=torch.int64, device=self.device)
        self.board = first.memory[:board_bytes]
        self.arena = DeviceArena(arena_limit_bytes)
        self.fault: Callable[[str], None] | None = None
        self._num_segments = 0
        self._add(first, self.staging.stop)

    def grow(self, num_bytes: int) -> bool:
        """Add a segment of at least `num_bytes`. All ranks call it together, with the same number.

        Returns:
            Whether there is one: its limit or the memory may not allow it.
        """
        size = whole_units(num_bytes)
        limit = self.arena.limit_bytes
        if self._num_segments == MAX_SEGMENTS or (limit and self.arena.num_bytes()["reserved"] + size > limit):
            return False
        try:
            self._add(self._memory.grow(size), 0)
        except EPTransportError:
            return False
        return True

    def set_aside(self, num_bytes: int) -> Part:
        """A piece of memory on every rank that is not the arena's. All ranks call it together, with the same number.

        Raises:
            EPTransportError: Some rank cannot have it; all ranks raise.
        """
        return self._memory.grow(whole_units(num_bytes))

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured in a graph."""
        return self._memory.is_capturing()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, stream: Any) -> torch.Tensor | None:
        """A region that is used first on `stream`, which must be the current one; None where there is no room."""
        return self.arena.allocate(shape, dtype, stream, self.is_capturing())

    def records(self, num_bytes: int, stream: Any) -> torch.Tensor | None:
        """[num_bytes] uint8 for the records of a call, likewise."""
        return self.arena.records(num_bytes, stream, self.is_capturing())

    def _add(self, part: Part, reserved_bytes: int) -> None:
        addresses = torch.tensor(part.addresses, dtype=torch.int64, device="cpu")
        self.windows[self._num_segments].copy_(addresses)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels on any stream may follow the new addresses
        self.arena.add(self._num_segments, part, reserved_bytes)
        self._num_segments += 1


class _Segment(NamedTuple):
    number: int
    address: int
    num_bytes: int
    room_bytes: int
    owner: Any
    free: SpanSet


class _Used(NamedTuple):
    """Memory that is free again, once the work that was queued on some streams is done."""

    segment: int
    span: Span
    events: tuple[Any, ...]


class _Region:
    """The bytes of a region, for torch to wrap. It dies with the last tensor over them."""

    def __init__(self, segment: _Segment, span: Span):
        self.owner = segment.owner  # keeps the memory mapped
        self.__cuda_array_interface__ = {
            "shape": (span.num_bytes,),
            "typestr": "|u1",
            "data": (segment.address + span.start, False),
            "version": 3,
        }


class DeviceArena:
    """Regions of the segments. A region is free when the tensor's storage dies, and is used again in stream order.

    Args:
        limit_bytes: Of all segments together; 0: none.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self._segments: list[_Segment] = []
        self._regions: dict[int, tuple[weakref.ref, int, Span]] = {}
        self._freed: deque[weakref.ref] = deque()
        self._streams: dict[int, set[Any]] = {}  # that use a region, by its address
        self._used: list[_Used] = []
        self._captured: list[torch.Tensor] = []
        self._records: torch.Tensor | None = None

    def add(self, number: int, part: Part, reserved_bytes: int) -> None:
        """Use a segment, but for its first bytes."""
        num_bytes = part.memory.numel()
        free = SpanSet(Span(reserved_bytes, num_bytes)) if num_bytes > reserved_bytes else SpanSet()
        segment = _Segment(number, part.memory.data_ptr(), num_bytes, num_bytes - reserved_bytes, part, free)
        self._segments.append(segment)

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, stream: Any = None, is_capturing: bool = False
    ) -> torch.Tensor | None:
        """A contiguous tensor over a region; None where there is no room.

        Args:
            shape: Of the tensor.
            dtype: Of the tensor.
            stream: Where it is used first: this stream waits for those that used the memory before. None: the CPU.
            is_capturing: The stream is being captured: take only what needs no wait, and keep it until
                `release_captured`.
        """
        num_bytes = math.prod(shape) * dtype.itemsize
        if num_bytes == 0:
            return self._segments[0].owner.memory.new_empty(shape, dtype=dtype)
        if not is_capturing:
            self.reclaim()
        found = self._take(num_bytes, self._used if is_capturing else ())
        if found is None:
            return None
        segment, span = found
        before = [used for used in self._used if used.segment == segment.number and _overlap(used.span, span)]
        for event in {event for used in before for event in used.events}:
            stream.wait_event(event)
        tensor = self._wrap(segment, span, num_bytes).view(dtype).view(*shape)
        self.used_by(tensor, stream)
        if is_capturing:
            self._captured.append(tensor)
        return tensor

    def records(self, num_bytes: int, stream: Any = None, is_capturing: bool = False) -> torch.Tensor | None:
        """Memory for the records of a call, [num_bytes] uint8: the same for all calls, which follow one another."""
        if num_bytes == 0:
            return self.allocate((0,), torch.uint8)
        if self._records is None or self._records.numel() < num_bytes:
            self._records = None
            room = max(_LEAST_RECORD_BYTES, 1 << (num_bytes - 1).bit_length())
            self._records = self.allocate((room,), torch.uint8, stream, is_capturing)
        elif is_capturing:
            self._captured.append(self._records)
        if self._records is None:
            return None
        self.used_by(self._records, stream)
        return self._records[:num_bytes]

    def used_by(self, tensor: torch.Tensor, stream: Any) -> None:
        """Note that a stream works with a region, so that its next user waits for that stream."""
        if stream is not None and self.base_of(tensor) is not None:
            address = tensor.untyped_storage().data_ptr()
            if address in self._streams:
                self._streams[address].add(stream)

    def base_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """`(segment, offset)` of a contiguous tensor that lies in the arena."""
        for segment in self._segments:
            offset = tensor.data_ptr() - segment.address
            if 0 <= offset < segment.num_bytes:
                return segment.number, offset
        return None

    def largest_free_bytes(self) -> int:
        """The largest region that could be taken."""
        self.reclaim()
        return max((span.num_bytes for segment in self._segments for span in segment.free), default=0)

    def num_bytes(self) -> dict[str, int]:
        """Bytes `used` by regions, `committed` and `reserved` (which are the same: device memory is taken whole)."""
        known = (self._regions.get(id(died)) for died in tuple(self._freed))
        freed = sum(region[2].num_bytes for region in known if region is not None)
        reserved = sum(segment.room_bytes for segment in self._segments)
        if self._records is not None:
            freed += whole_units(self._records.numel())  # they are nobody's result
        free = freed + sum(segment.free.num_bytes for segment in self._segments)
        return {"used": reserved - free, "committed": reserved, "reserved": reserved}

    def give_up(self, tensor: torch.Tensor) -> None:
        """Have a capture not keep a region that it took for nothing."""
        self._captured = [one for one in self._captured if one is not tensor]

    def release_captured(self) -> None:
        """Let go of the regions that were taken while graphs were captured."""
        self._captured.clear()

    def reclaim(self) -> None:
        """Make the memory of dead regions free again, behind the work that is queued on the streams that used them."""
        if self._used:
            self._used = [used for used in self._used if not all(event.query() for event in used.events)]
        events: dict[Any, Any] = {}
        while self._freed:
            region = self._regions.pop(id(self._freed.popleft()), None)
            if region is None:
                continue  # an interrupt came before it was anybody's
            _, index, span = region
            segment = self._segments[index]
            segment.free.add(span)
            streams = self._streams.pop(segment.address + span.start, set())
            for stream in streams - events.keys():
                events[stream] = stream.record_event()
            if streams:
                self._used.append(_Used(index, span, tuple(events[stream] for stream in streams)))

    def _wrap(self, segment: _Segment, span: Span, num_bytes: int) -> torch.Tensor:
        address = segment.address + span.start
        self._streams[address] = set()
        exact = Span(span.start, span.start + num_bytes)
        if segment.owner.memory.device.type == "cuda":
            region: Any = _Region(segment, exact)
            tensor = torch.as_tensor(region, device=segment.owner.memory.device)
        else:
            region = (ctypes.c_ubyte * num_bytes).from_address(address)
            region.owner = segment.owner
            tensor = torch.frombuffer(region, dtype=torch.uint8)
        # A region may die on any thread, inside garbage collection or a capture, and beside an interrupt: so nothing
        # happens then but that its reference is appended, by code that is not Python's.
        died = weakref.ref(region, self._freed.append)
        self._regions[id(died)] = died, segment.number, span
        return tensor

    def _take(self, num_bytes: int, avoided: Iterable[_Used]) -> tuple[_Segment, Span] | None:
        for segment in self._segments:
            candidates = SpanSet(*segment.free)
            for used in avoided:
                if used.segment == segment.number:
                    candidates.remove(used.span)
            span = candidates.take(num_bytes)
            if span is not None:
                segment.free.remove(span)
                return segment, span
        return None


def _overlap(one: Span, other: Span) -> bool:
    return one.start < other.stop and other.start < one.stop
