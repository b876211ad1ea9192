"""Device memory that peers address: segments, and an arena of regions whose reuse follows streams.

It is the counterpart of `window.py` for ranks whose kernels do the waiting: there is only memory and its addresses
here; kernels write the words and signals. `symm.py` and `interpreted.py` make the memory.
"""

from __future__ import annotations

import ctypes
import functools
import math
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import Any, NamedTuple, Protocol

import torch

from .. import reaper
from ..errors import EPTransportError
from ..stream import CudaStream
from .spans import Span, SpanSet, whole_units

MAX_SEGMENTS = 64
_LEAST_RECORD_BYTES = 64 << 10

# Numbers of reclaims, see the rules below. A dispatch and its combine reclaim up to six times, and what a program takes
# again in each round of its calls should need no event.
_MOST_AGE = 16
_MIXED_AGE = 64
_NO_END = 1 << 62  # behind all bytes of any segment
_LINE_BYTES = 128  # to which tensors of one region are aligned

# Private functions of torch. `torch.as_tensor` and views would take three times as long. None: not in this
# torch, or, the second one, not without CUDA.
_new_storage: Any = getattr(torch._C, "_construct_storage_from_data_pointer", None)
_new_cuda_tensor: Any = getattr(torch._C, "_construct_CUDA_Tensor_From_Storage_And_Metadata", None)


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
    """An allocator of memory on every rank, for segments.

    Attributes:
        num_sharing: Ranks that share this rank's GPU, itself included.
    """

    num_sharing: int

    def grow(self, num_bytes: int) -> Part:
        """Allocate a piece of `num_bytes` zeros on every rank. All ranks call it together, with the same size.

        Raises:
            EPTransportError: Some rank cannot have it; all ranks raise.
        """
        ...

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured in a graph."""
        ...


class DeviceWindow:
    """A rank's segments, its peers' addresses, and the arena.

    Args:
        rank: This rank.
        num_ranks: R.
        memory: Where segments come from.
        board_bytes: The first bytes of segment 0, which are the kernels'.
        arena_bytes: Bytes for regions in segment 0.
        arena_limit_bytes: Bytes for regions in all segments together; 0: no limit. The same on all ranks.
        staging_bytes: Bytes of segment 0, behind the board, that are never a region.

    Attributes:
        staging: Those bytes: where they begin in segment 0, and where they end.
        fault: Called at every fault point, where tests fail or delay the rank; None: there is none.
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
        self.memory = memory
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
        """Add a segment of at least `num_bytes`. All ranks call it together, with the same size.

        Returns:
            Whether it was added: the arena's limit or the memory may not allow it.
        """
        size = whole_units(num_bytes)
        limit = self.arena.limit_bytes
        if self._num_segments == MAX_SEGMENTS or (limit and self.arena.num_bytes()["reserved"] + size > limit):
            return False
        try:
            self._add(self.memory.grow(size), 0)
        except EPTransportError:
            return False
        return True

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured in a graph."""
        return self.memory.is_capturing()

    def allocate(self, shape: Sequence[int], dtype: torch.dtype, stream: Any) -> torch.Tensor | None:
        """Allocate a region that is used first on `stream`, which must be the current one; None if there is no
        memory left.
        """
        return self.arena.allocate(shape, dtype, stream, self.is_capturing())

    def _add(self, part: Part, reserved_bytes: int) -> None:
        addresses = torch.tensor(part.addresses, dtype=torch.int64, device="cpu")
        self.windows[self._num_segments].copy_(addresses)
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)  # kernels on any stream may follow the new addresses
        self.arena.add(self._num_segments, part, reserved_bytes)
        self._num_segments += 1


@dataclass(eq=False, slots=True)
class _Segment:
    number: int
    address: int
    usable_bytes: int
    owner: Part
    keeper: object  # of the memory, for regions
    device: torch.device
    is_cuda: bool
    free: SpanSet


class _Keeper:
    """Keeps the memory of a segment on a GPU until the last region is gone, which may outlive the buffer.

    Torch waits for the device before it frees symmetric memory. In a capture that ends the process: there the reaper
    frees it, after the capture.
    """

    def __init__(self, part: Part):
        weakref.finalize(self, _let_go, part).atexit = False


def _let_go(part: Part) -> None:
    """Release the memory of a segment: with the argument, unless the current stream is being captured."""
    if torch.cuda.is_current_stream_capturing():
        reaper.hand_over(functools.partial(_let_go_later, part))


def _let_go_later(part: Part) -> None:
    """Release the memory of a segment once no graph is captured. Runs on the reaper's thread."""
    stream = CudaStream(part.memory.device)
    with stream.on_device():
        if not stream.await_capture():
            _kept.append(part)


_kept: list[Part] = []  # memory that could not be released


@dataclass(eq=False, slots=True)
class RegionLayout:
    """Contiguous tensors of one region, one behind the other.

    Attributes:
        num_bytes: Bytes of all of them; 0: they are empty.
        whole_bytes: The same, in whole units.
        starts: Bytes before each of them.
        tensors: Of each what `_new_cuda_tensor` takes: shape, strides and offset in elements, dtype, device.
    """

    num_bytes: int
    whole_bytes: int
    starts: list[int]
    tensors: list[dict[str, Any]]


@functools.lru_cache(256)  # a program's calls repeat a few
def region_layout(shapes: tuple[tuple[tuple[int, ...], torch.dtype], ...], device: torch.device) -> RegionLayout:
    """Lay tensors of these shapes and dtypes out, one behind the other."""
    tensors, starts = [], []
    num_bytes = 0
    for shape, dtype in shapes:
        num_own_bytes = math.prod(shape) * dtype.itemsize
        start = -(-num_bytes // _LINE_BYTES) * _LINE_BYTES if num_own_bytes else 0
        strides = tuple(math.prod(shape[index + 1 :]) for index in range(len(shape)))
        offset = start // dtype.itemsize
        tensors.append({"size": shape, "stride": strides, "storage_offset": offset, "dtype": dtype, "device": device})
        starts.append(start)
        num_bytes = max(num_bytes, start + num_own_bytes)
    return RegionLayout(num_bytes, whole_units(num_bytes), starts, tensors)


class _Used(NamedTuple):
    """A piece of free memory that work which is still queued may use.

    Attributes:
        segment: Its number.
        start: Where the piece begins in the segment.
        stop: Where it ends.
        stream: Which has used it too, and on which no event has been recorded for that; None: there is none.
        events: Behind the work of all other streams that have used it.
        since: The number of the reclaim that made the entry.
    """

    segment: int
    start: int
    stop: int
    stream: Any
    events: tuple[Any, ...]
    since: int


class _Region(weakref.ref):
    """An allocated region: a reference to the object that is freed with the last tensor over it, and what is needed
    then.

    Attributes:
        block: The segment, and the span of it.
        users: The streams that use it.
        address: Where it begins. Set last: a region that an interrupt has left unfinished has none.
    """

    __slots__ = ("address", "block", "users")

    block: tuple[_Segment, Span]
    users: tuple[Any, ...]
    address: int


class _Foreign:
    """Bytes for torch to wrap, where it cannot be given a storage."""

    def __init__(self, address: int, num_bytes: int):
        self.__cuda_array_interface__ = {
            "shape": (num_bytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }


# How memory is used again in the order of streams. `_used` has an entry for each piece of free memory that queued work
# may still use.
#
# - When a dead region is reclaimed, an event is recorded on each stream that has used it, but not on the stream of the
#   call that reclaims: most often that stream takes the memory next, behind its own work, and needs no event. The entry
#   names it instead.
# - A stream that takes memory waits for the events of all entries that overlap it. If an entry names another stream,
#   the event is recorded only then. What is taken is cut out of the entries: its next user waits for the stream that
#   has taken it, which has waited for all before.
# - An event that is recorded late comes after whatever was launched meanwhile, and a wait for it includes that,
#   too. So no stream goes without an event for `_MIXED_AGE` reclaims after a stream has taken memory that is not the
#   one that took memory before. It is programs that take memory on one stream only that save the events.
# - An entry that has named a stream for more than `_MOST_AGE` reclaims is given its event: captures avoid the memory.
# - An entry that names no stream is dropped when its events have happened. Entries are in the order of their age, and
#   none of them is looked at while the oldest names a stream and is not old enough.
# - A capture can neither wait for what was launched outside of it nor ask whether that has happened: it takes only what
#   is in no entry. Nothing is reclaimed inside of it, so that no event is recorded or asked for.


class DeviceArena:
    """Regions of the segments. A region is free when the tensor's storage dies, and is used again in stream order.

    Args:
        limit_bytes: Of all segments together; 0: none.

    Attributes:
        bounds: Of each segment its first address, the one behind it, and its number.
    """

    def __init__(self, limit_bytes: int):
        self.limit_bytes = limit_bytes
        self.bounds: list[tuple[int, int, int]] = []
        self._segments: list[_Segment] = []
        self._regions: dict[int, _Region] = {}  # by address
        self._freed: deque[_Region] = deque()
        self._used: list[_Used] = []
        self._num_reclaims = 0
        self._taker: Any = None  # the last stream that took memory, outside captures
        self._is_mixed_until = 0  # a number of reclaims
        self._captured: list[torch.Tensor] = []
        self._records: torch.Tensor | None = None
        self._some_records: torch.Tensor | None = None  # as many of them as the last call wanted
        self._records_user: Any = None  # the stream of the last call that used them, which is known as a user
        self._can_watch_storages = _can_watch_storages()

    def add(self, number: int, part: Part, reserved_bytes: int) -> None:
        """Use a segment, except for its first bytes."""
        memory = part.memory
        address, num_bytes, device = memory.data_ptr(), memory.numel(), memory.device
        free = SpanSet(Span(reserved_bytes, num_bytes)) if num_bytes > reserved_bytes else SpanSet()
        is_cuda = device.type == "cuda"
        keeper = _Keeper(part) if is_cuda else part
        usable_bytes = num_bytes - reserved_bytes
        self._segments.append(_Segment(number, address, usable_bytes, part, keeper, device, is_cuda, free))
        self.bounds.append((address, address + num_bytes, number))

    def allocate(
        self, shape: Sequence[int], dtype: torch.dtype, stream: Any = None, is_capturing: bool = False
    ) -> torch.Tensor | None:
        """Allocate a contiguous tensor over a region; None if there is no memory left.

        Args:
            shape: Of the tensor.
            dtype: Of the tensor.
            stream: Where it is used first: this stream waits for those that used the memory before. None: the CPU.
            is_capturing: The stream is being captured: take only what needs no wait, and keep it until
                `release_captured`.
        """
        layout = region_layout(((tuple(shape), dtype),), self._segments[0].device)
        made = self.allocate_region(layout, stream, is_capturing)
        return made[0][0] if made is not None else None

    def allocate_region(
        self, layout: RegionLayout, stream: Any = None, is_capturing: bool = False
    ) -> tuple[list[torch.Tensor], int, int] | None:
        """Allocate contiguous tensors over one region, which is free when the last of them is gone; None if there is
        no memory left.

        It takes half the time of a region for each of them.

        Args:
            layout: The tensors.
            stream: As in `allocate`.
            is_capturing: Likewise.

        Returns:
            The tensors, the segment, and where the region begins in it. Empty tensors lie nowhere, at segment -1.
        """
        if layout.num_bytes == 0:
            memory = self._segments[0].owner.memory
            return [memory.new_empty(one["size"], dtype=one["dtype"]) for one in layout.tensors], -1, 0
        users = () if stream is None else (stream,)
        if is_capturing:
            block, is_ordered = self._take_unused(layout.whole_bytes), True
        else:
            if stream is not self._taker:
                self._note_taker(stream)
            block = self._reclaim(stream, users, layout.whole_bytes)
            is_ordered = block is not None or not self._used
            if block is None:
                block = self._take(layout.whole_bytes)
        if block is None:
            return None
        try:
            used = self._used if is_ordered else self._follow(block, stream)
            tensors = self._wrap(block, users, layout)
            self._used = used  # not before: if the allocation fails, the next user of the memory must still wait
        except BaseException:
            self._give_back(block, stream)
            raise
        if is_capturing:
            self._captured.append(tensors[0])
        segment, (start, _) = block
        return tensors, segment.number, start

    def records(self, num_bytes: int, stream: Any = None, is_capturing: bool = False) -> torch.Tensor | None:
        """Return memory for the records of a call, [num_bytes] uint8: the same for all calls, which follow one
        another.
        """
        if num_bytes == 0:
            return self.allocate((0,), torch.uint8)
        if self._records is None or self._records.numel() < num_bytes:
            self._records = self._some_records = self._records_user = None
            size = max(_LEAST_RECORD_BYTES, 1 << (num_bytes - 1).bit_length())
            self._records = self.allocate((size,), torch.uint8, stream, is_capturing)
        elif is_capturing:
            self._captured.append(self._records)
        if self._records is None:
            return None
        if stream is not self._records_user:
            self.used_by(self._records, stream)
            self._records_user = stream
        if self._some_records is None or self._some_records.numel() != num_bytes:
            self._some_records = self._records[:num_bytes]
        return self._some_records

    def used_by(self, tensor: torch.Tensor, stream: Any) -> None:
        """Note that a stream uses a region, so that the next user of its memory waits for that stream."""
        if stream is None:
            return
        address = tensor.data_ptr()
        for start, stop, _ in self.bounds:
            if start <= address < stop:
                region = self._regions.get(address)
                if region is None:  # a view that begins further in, or no region at all
                    region = self._regions.get(tensor.untyped_storage().data_ptr())
                if region is not None and stream not in region.users:
                    region.users += (stream,)
                return

    def base_of(self, tensor: torch.Tensor) -> tuple[int, int] | None:
        """Return `(segment, offset)` of a contiguous tensor that lies in the arena."""
        address = tensor.data_ptr()
        for start, stop, number in self.bounds:
            if start <= address < stop:
                return number, address - start
        return None

    def largest_free_bytes(self) -> int:
        """Return the bytes of the largest region that could be allocated."""
        if self._freed:
            self.reclaim()
        if len(self._segments) == 1:
            return self._segments[0].free.largest_bytes()
        return max([segment.free.largest_bytes() for segment in self._segments])

    def num_bytes(self) -> dict[str, int]:
        """Bytes `used` by regions, `committed` and `reserved` (which are the same: device memory is taken whole)."""
        freed = sum(region.block[1].num_bytes for region in tuple(self._freed) if self._is_known(region))
        reserved = sum(segment.usable_bytes for segment in self._segments)
        if self._records is not None:
            freed += whole_units(self._records.numel())  # they are not part of a result
        free = freed + sum(segment.free.num_bytes for segment in self._segments)
        return {"used": reserved - free, "committed": reserved, "reserved": reserved}

    def give_up(self, tensor: torch.Tensor) -> None:
        """Have a capture not keep a region that it has allocated in vain."""
        self._captured = [one for one in self._captured if one is not tensor]

    def release_captured(self) -> None:
        """Release the regions that were allocated while graphs were captured."""
        self._captured.clear()

    def reclaim(self, stream: Any = None) -> None:
        """Make the memory of dead regions free again, behind the work that is queued on the streams that used them.

        Args:
            stream: Of the call that reclaims; None: of no call.
        """
        self._reclaim(stream, (), 0)

    def reclaim_released(self, stream: Any) -> None:
        """Reclaim memory that a call has released, so that its next user waits for that call, and not for later work.

        As long as one stream takes all memory there is no event to record. Then the next call does it, which most
        often takes just this memory: it needs not become free in between.

        Args:
            stream: Of the call.
        """
        if self._num_reclaims <= self._is_mixed_until:
            self._reclaim(stream, (), 0)

    def _reclaim(self, stream: Any, users: tuple[Any, ...], wanted_bytes: int) -> tuple[_Segment, Span] | None:
        """Reclaim the memory of dead regions for a call that is about to allocate.

        Args:
            stream: The stream of the call.
            users: The stream, as the `users` of a region have it.
            wanted_bytes: That it takes, in whole units; 0: none.

        Returns:
            What it takes, if that is just what a dead region had that no other stream has used: such memory needs to
            become neither free nor part of an entry. Else None.
        """
        self._num_reclaims += 1
        if self._used:
            self._settle()
        if not self._freed:
            return None
        own = stream if self._num_reclaims > self._is_mixed_until else None
        events: dict[Any, Any] = {}
        again: _Region | None = None
        while self._freed:
            region = self._freed.popleft()
            if not self._is_known(region):
                continue  # an interrupt came before it was returned to a caller
            start, stop = region.block[1]
            if again is None and stop - start == wanted_bytes and region.users == users:
                again = region
            else:
                self._free(region, own, events)
        if again is None:
            return None
        if self._is_lowest(again):
            del self._regions[again.address]
            return again.block
        self._free(again, own, events)
        return None

    def _is_known(self, region: _Region) -> bool:
        return self._regions.get(getattr(region, "address", -1)) is region

    def _free(self, region: _Region, own: Any, events: dict[Any, Any]) -> None:
        """Make the memory of a dead region free.

        Args:
            region: The region.
            own: The stream for which no event is recorded; None: there is none.
            events: Those that were recorded since the reclaim began, by stream.
        """
        (segment, span), users = region.block, region.users
        if users:
            named = own if own is not None and own in users else None
            others = users if named is None else () if len(users) == 1 else [user for user in users if user != named]
            recorded = tuple([_recorded(user, events) for user in others]) if others else ()
            self._used.append(_Used(segment.number, *span, named, recorded, self._num_reclaims))
        segment.free.add(span)
        del self._regions[region.address]

    def _is_lowest(self, region: _Region) -> bool:
        """Whether `_take` would return the memory of a dead region, if that were free."""
        own, (start, stop) = region.block
        for segment in self._segments:
            if segment is own:
                break
            if segment.free.has_below(_NO_END, stop - start):
                return False
        return not own.free.has_below(start, stop - start)

    def _note_taker(self, stream: Any) -> None:
        """Note that another stream than before allocates memory, or another object for the same stream."""
        if self._taker is not None and stream != self._taker:
            self._is_mixed_until = self._num_reclaims + _MIXED_AGE
        self._taker = stream

    def _settle(self) -> None:
        """Give old entries their events, and drop those whose events have happened."""
        oldest = self._used[0]  # entries are in the order of their age
        if oldest.stream is not None and self._num_reclaims - oldest.since <= _MOST_AGE:
            return
        kept: list[_Used] = []
        events: dict[Any, Any] = {}
        for used in self._used:
            if used.stream is not None:
                is_old = self._num_reclaims - used.since > _MOST_AGE
                kept.append(_with_event(used, events) if is_old else used)
            elif not all(event.query() for event in used.events):
                kept.append(used)
        self._used = kept

    def _follow(self, block: tuple[_Segment, Span], stream: Any) -> list[_Used]:
        """Have a stream wait for all work with memory that it takes.

        Returns:
            The entries that are left, without this memory.
        """
        segment, (start, stop) = block
        number = segment.number
        kept: list[_Used] = []
        events: dict[Any, Any] = {}
        awaited: list[Any] = []
        for used in self._used:
            in_segment, first, behind, named, before, since = used
            if in_segment != number or behind <= start or stop <= first:
                kept.append(used)
                continue
            if named is not None and named is not stream and named != stream:
                _, _, _, named, before, _ = _with_event(used, events)
            awaited += before
            if first < start:
                kept.append(_Used(number, first, start, named, before, since))
            if stop < behind:
                kept.append(_Used(number, stop, behind, named, before, since))
        for event in dict.fromkeys(awaited):
            stream.wait_event(event)
        return kept

    def _wrap(self, block: tuple[_Segment, Span], users: tuple[Any, ...], layout: RegionLayout) -> list[torch.Tensor]:
        """Tensors over memory that was taken, and the region to know them by."""
        segment, (start, _) = block
        address = segment.address + start
        watched: Any
        if self._can_watch_storages:
            watched = _new_storage(address, segment.device, layout.num_bytes)
        elif segment.is_cuda:
            watched = _Foreign(address, layout.num_bytes)
        else:
            watched = (ctypes.c_ubyte * layout.num_bytes).from_address(address)
        watched.owner = segment.keeper  # keeps the memory mapped
        # A region may die on any thread, inside garbage collection or a capture, and beside an interrupt: so nothing
        # happens then but that its reference is appended, by code that is not Python's.
        region = _Region(watched, self._freed.append)
        region.block = block
        region.users = users
        region.address = address
        self._regions[address] = region
        if self._can_watch_storages:
            if segment.is_cuda and _new_cuda_tensor is not None:
                return [*map(_new_cuda_tensor, layout.tensors, repeat(watched))]  # without a function of Python
            return [
                torch.empty(0, dtype=tensor["dtype"], device=segment.device).set_(
                    watched, tensor["storage_offset"], tensor["size"], tensor["stride"]
                )
                for tensor in layout.tensors
            ]
        if segment.is_cuda:
            memory = torch.as_tensor(watched, device=segment.device)
        else:
            memory = torch.frombuffer(watched, dtype=torch.uint8)
        return [_view(memory, tensor) for tensor in layout.tensors]

    def _give_back(self, block: tuple[_Segment, Span], stream: Any) -> None:
        """Make memory free that was taken, and that an exception has kept from becoming a region."""
        segment, span = block
        if segment.address + span.start in self._regions:
            return  # it is one, and is freed as any other
        if stream is not None:
            self._used.append(_Used(segment.number, *span, stream, (), self._num_reclaims))
        segment.free.add(span)

    def _take(self, num_bytes: int) -> tuple[_Segment, Span] | None:
        for segment in self._segments:
            span = segment.free.take(num_bytes)
            if span is not None:
                return segment, span
        return None

    def _take_unused(self, num_bytes: int) -> tuple[_Segment, Span] | None:
        """Take the lowest free memory that is in no entry, as `_take` does; captures may use only that."""
        for segment in self._segments:
            candidates = SpanSet(*segment.free)
            for used in self._used:
                if used.segment == segment.number:
                    candidates.remove(Span(used.start, used.stop))
            span = candidates.take(num_bytes)
            if span is not None:
                segment.free.remove(span)
                return segment, span
        return None


def _view(memory: torch.Tensor, tensor: dict[str, Any]) -> torch.Tensor:
    """A view of bytes, as a layout has it."""
    shape, dtype = tensor["size"], tensor["dtype"]
    start = tensor["storage_offset"] * dtype.itemsize
    return memory[start : start + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)


def _recorded(stream: Any, events: dict[Any, Any]) -> Any:
    """The event of a stream among those of one step, which is recorded if it is not there."""
    event = events.get(stream)
    if event is None:
        event = events[stream] = stream.record_event()
    return event


def _with_event(used: _Used, events: dict[Any, Any]) -> _Used:
    """An entry with an event in place of the stream that it names."""
    return used._replace(stream=None, events=(*used.events, _recorded(used.stream, events)))


@functools.cache
def _can_watch_storages() -> bool:
    """Whether torch keeps the Python object of a storage, and what is set on it, while any tensor over it lives.

    It has done so for long, but does not promise it, and a region that seemed dead would be given away under its
    tensors. So it is tried, once.
    """
    if _new_storage is None:
        return False
    memory, deaths = torch.zeros(2, dtype=torch.uint8, device="cpu"), deque[Any]()
    try:
        storage = _new_storage(memory.data_ptr(), memory.device, 2)
        storage.owner = memory
        died = weakref.ref(storage, deaths.append)
        view = torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage, 0, (2,), (1,))[1:]
        del storage
        is_kept = not deaths and getattr(view.untyped_storage(), "owner", None) is memory
        del view
        return is_kept and list(deaths) == [died]
    except (AttributeError, RuntimeError, TypeError):  # private functions may change
        return False
