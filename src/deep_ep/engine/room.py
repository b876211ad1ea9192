"""Memory for the calls of the engine on a GPU: regions of the window, and ordinary tensors on the right stream."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import EPTransportError
from ..handle import Handle
from ..kernels.exchange import NUM_SECTIONS, SEGMENT_BITS
from ..kernels.put import VECTOR_BYTES, record_words
from ..sizing import align
from ..stream import LaunchStream
from ..transport.arena import GROWTH_BYTES
from ..transport.device import DeviceWindow
from ..transport.spans import whole_units
from .direct import Order
from .parcel import Payload, Received, Routing, empty_handle, empty_topk
from .signals import Counts
from .staging import MOST_BYTES, lane_rows

_SPARE_BYTES = 128 << 10  # regions are whole pages, and records at least half of this
_LEAST_COMBINE_BYTES = 2  # of an element that a combine brings back: BF16, also where FP8 was dispatched

_STAGING_BYTES_PER_RANK = 64 << 10  # at least: a row of every rank must fit
_LINE_BYTES = 128  # to which the sections of staging are aligned

Parts = list[torch.Tensor | None]  # payload, scales, records; None: it does not travel, or there is no room yet


class Lanes(NamedTuple):
    """How a call cuts the staging.

    Attributes:
        num_rows: Of a lane.
        bases: Of each section, as an offer says it.
    """

    num_rows: int
    bases: tuple[int, ...]


class Sections(NamedTuple):
    """Room for the rows of a dispatch.

    Attributes:
        parts: Payload, scales, records: regions of the window, or ordinary memory if they come through staging.
        lanes: Of the staging; None: the rows come straight.
    """

    parts: Parts
    lanes: Lanes | None = None

    @property
    def num_rows(self) -> int:
        """Rows that there is room for."""
        return self.parts[0].size(0) if self.parts[0] is not None else 0


NO_SECTIONS = Sections([None, None, None])


@dataclass(frozen=True)
class Frame:
    """Whose tensors a call makes.

    Attributes:
        order: How the call stands to the caller's stream.
        caller: That stream.
    """

    order: Order
    caller: Any


class Room:
    """Memory of one engine.

    Args:
        window: The window.
        stream: Where calls are launched.
    """

    def __init__(self, window: DeviceWindow, stream: LaunchStream):
        self._window = window
        self._stream = stream
        self._zeros: dict[int, torch.Tensor] = {}

    # Regions of the window -------------------------------------------------------------------------------------------

    def region(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """A region that the call uses first; None where there is no room."""
        return self._window.allocate(shape, dtype, self._stream.current)

    def reclaim(self) -> None:
        """Have the next user of what a call dropped wait for that call, and not for what the caller launches later."""
        if not self._window.is_capturing():
            self._window.arena.reclaim()

    def sections(self, payload: Payload, routing: Routing | None, num_rows: int) -> Sections | None:
        """Room for payload, scales and records of `num_rows` rows, None for what does not travel; None: no room."""
        x, scales = payload.x, payload.scales
        parts: Parts = [self.region((num_rows, x.size(1)), x.dtype), None, None]
        if scales is not None and parts[0] is not None:
            parts[1] = self.region((num_rows, scales.size(1)), scales.dtype)
        if routing is not None and parts[0] is not None:
            parts[2] = self._records(num_rows, record_words(routing.num_topk))
        wanted = (True, scales is not None, routing is not None)
        is_there = all(part is not None for part, is_wanted in zip(parts, wanted, strict=True) if is_wanted)
        if is_there:
            return Sections(parts)
        for part in parts:
            if part is not None:
                self._window.arena.give_up(part)
        return None

    def staged_sections(self, frame: Frame, payload: Payload, routing: Routing | None, num_rows: int) -> Sections:
        """The same in ordinary memory, which rows reach through the staging.

        Raises:
            EPTransportError: The staging cannot hold a row of every rank.
        """
        x, scales = payload.x, payload.scales
        words = record_words(routing.num_topk) if routing is not None else 0
        lanes = self.lanes([_row_bytes(x), _row_bytes(scales), 4 * words])
        with self.outputs(frame):
            rows = x.new_empty(num_rows, x.size(1))
            row_scales = scales.new_empty(num_rows, scales.size(1)) if scales is not None else None
        # Only the call itself uses records: they are of its stream.
        records = x.new_empty(num_rows, words, dtype=torch.int32) if words else None
        return Sections([rows, row_scales, records], lanes)

    def lanes(self, row_bytes: Sequence[int]) -> Lanes:
        """Cut the staging into lanes.

        Args:
            row_bytes: Bytes of a row of each section; 0: it does not travel.

        Raises:
            EPTransportError: It cannot hold a row of every rank.
        """
        num_ranks = self._window.num_ranks
        num_rows = lane_rows(num_ranks, sum(row_bytes), self._window.arena.limit_bytes)
        start, stop = self._window.staging
        bases: list[int] = []
        for width in row_bytes:
            bases.append(start if width else -1)  # in segment 0
            start += align(num_ranks * num_rows * width, _LINE_BYTES)
        if start > stop:
            raise self._lack(num_ranks * sum(row_bytes))
        return Lanes(num_rows, tuple(bases))

    def _records(self, num_rows: int, num_words: int) -> torch.Tensor | None:
        memory = self._window.records(4 * num_rows * num_words, self._stream.current)
        return None if memory is None else memory.view(torch.int32).view(num_rows, num_words)

    def base(self, region: torch.Tensor | None) -> int:
        """Where a region is, as an offer says it; -1: there is none."""
        base = self._window.arena.base_of(region) if region is not None and region.numel() else None
        return -1 if base is None else base[0] << SEGMENT_BITS | base[1]

    def _lack(self, num_bytes: int) -> EPTransportError:
        """The error where neither a region can be had nor staging will do."""
        sizes = self._window.arena.num_bytes()
        return EPTransportError(
            f"window: the arena has no room ({sizes['used']} of {sizes['reserved']} bytes are in use), and one row of "
            f"every rank is {num_bytes} bytes, more than the {self._window.staging.num_bytes} of staging "
            f"(rank {self._window.rank}/{self._window.num_ranks}). Drop received tensors, or make the buffer with a "
            "larger num_nvl_bytes; it grows by itself only in a dispatch without handle or num_worst_tokens"
        )

    def grow_alike(self, told: Counts, payload: Payload, routing: Routing, is_pushed: bool) -> None:
        """Add a segment where some rank lacks room for its rows, or for what a combine may need.

        That is a copy of them, or an inbox. All ranks know all ranks' rows and room, so all of them grow, or none.
        """
        x, scales = payload.x, payload.scales
        row_bytes = x.size(1) * x.element_size() + (scales.size(1) * scales.element_size() if scales is not None else 0)
        back_bytes = x.size(1) * max(x.element_size(), _LEAST_COMBINE_BYTES)
        back_bytes = align(back_bytes, VECTOR_BYTES) + align(
            4 * routing.num_topk, VECTOR_BYTES
        )  # weights may come back
        # What fits is taken already; only the way back is still to come. Records are rounded up to a power of two.
        come_bytes = 0 if told.fits else row_bytes + 2 * 4 * record_words(routing.num_topk)
        num_slots = [count * len(told.num_tokens) for count in told.num_tokens] if is_pushed else told.num_rows
        wanted = [
            whole_units(rows * come_bytes) + whole_units(slots * back_bytes) + _SPARE_BYTES
            for rows, slots in zip(told.num_rows, num_slots, strict=True)
        ]
        if any(free < size for free, size in zip(told.free_bytes, wanted, strict=True)):
            self._window.grow(align(max(wanted), GROWTH_BYTES))

    # Ordinary memory -------------------------------------------------------------------------------------------------

    def outputs(self, frame: Frame) -> AbstractContextManager[None]:
        """Tensors made inside are the caller's, unless its stream may be behind the call (an event came before)."""
        return self._stream.lent(frame.caller if frame.order.after is None else self._stream.raw)

    def handle(self, routing: Routing, num_rows: int, num_channels: int, prefix: torch.Tensor) -> Handle:
        """A handle to be filled."""
        return empty_handle(routing, num_rows, self.no_channels(prefix, num_channels), prefix)

    def no_channels(self, like: torch.Tensor, num_channels: int) -> torch.Tensor:
        """[R, C] int32 zeros, which handles share: nobody writes them, and only callers read them."""
        zeros = self._zeros.get(num_channels)
        if zeros is None:
            zeros = like.new_zeros(self._window.num_ranks, num_channels, dtype=torch.int32)
            if not self._window.is_capturing():  # a graph's memory is its own
                self._zeros[num_channels] = zeros
        return zeros

    def received(self, sections: Sections, routing: Routing | None, handle: Any, num_rows: int) -> Received:
        """What a dispatch returns, of which `num_rows` rows are the caller's."""
        x, scales, records = (None if part is None else part[:num_rows] for part in sections.parts)
        assert x is not None
        topk_idx, topk_weights = empty_topk(routing, num_rows)
        return Received(x, scales, records, topk_idx, topk_weights, handle, sections.lanes is not None)

    # Lifetimes -------------------------------------------------------------------------------------------------------

    def hold_inputs(self, frame: Frame, *tensors: torch.Tensor | None) -> None:
        """Keep what a call reads until it is done, however it ends. Inside the call, before anything is launched."""
        for tensor in tensors:
            if tensor is not None:
                self._window.arena.used_by(tensor, self._stream.current)
        if frame.order.is_async:
            self._stream.hold(tensors, self._stream.raw)

    def hold_outputs(self, frame: Frame, *tensors: torch.Tensor | None) -> None:
        """Keep what a call returns until the streams that use it are done: the caller's, and the call's."""
        for tensor in tensors:
            if tensor is not None:
                self._window.arena.used_by(tensor, frame.caller)
        if frame.order.after is not None:
            self._stream.hold(tensors, frame.caller)
        elif frame.order.is_async:
            self._stream.hold(tensors, self._stream.raw)


def staging_bytes(num_ranks: int) -> int:
    """Bytes of a window that are staging."""
    return max(MOST_BYTES, _STAGING_BYTES_PER_RANK * num_ranks) + NUM_SECTIONS * _LINE_BYTES


def _row_bytes(part: torch.Tensor | None) -> int:
    return 0 if part is None else part.size(1) * part.element_size()
