"""Memory for the calls of the engine on a GPU: regions of the window, and ordinary tensors on the right stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import torch

from ...errors import EPTransportError
from ...kernels.exchange import NUM_SECTIONS, SEGMENT_BITS
from ...kernels.notify import Post, make_post
from ...kernels.put import VECTOR_BYTES
from ...sizing import align
from ...stream import LaunchStream
from ...transport.arena import GROWTH_BYTES
from ...transport.device import DeviceWindow, RegionLayout, region_layout
from ...transport.spans import UNIT_BYTES, whole_units
from ..ops import Counts, Sections, make_sections
from ..protocol import warn_staged
from ..staging import MOST_BYTES, rows_per_source
from .scope import CudaScope

_SPARE_BYTES = 128 << 10  # regions are whole pages, and records at least half of this
MARGIN_BYTES = _SPARE_BYTES + 2 * UNIT_BYTES  # with which what is rounded up below is enough in any case
_LEAST_COMBINE_BYTES = 2  # of an element that a combine brings back: BF16, also where FP8 was dispatched

_STAGING_BYTES_PER_RANK = 64 << 10  # at least: a row of every rank must fit
_LINE_BYTES = 128  # to which the sections of staging are aligned


@dataclass(eq=False)
class Columns:
    """What a row of a dispatch consists of.

    Attributes:
        hidden: Elements of the payload.
        dtype: Their type.
        num_scales: Scales.
        scale_dtype: Their type; None: there are none.
        record_words: Words of 4 bytes of the record; 0: there is none.
    """

    hidden: int
    dtype: torch.dtype
    num_scales: int
    scale_dtype: torch.dtype | None
    record_words: int
    _kept: tuple[int, RegionLayout] | None = field(default=None, init=False)

    def widths(self) -> tuple[int, int, int]:
        """The bytes of a row of each section."""
        scale_bytes = self.num_scales * self.scale_dtype.itemsize if self.scale_dtype is not None else 0
        return self.hidden * self.dtype.itemsize, scale_bytes, 4 * self.record_words

    def back_bytes(self, num_topk: int, least_bytes: int = _LEAST_COMBINE_BYTES) -> int:
        """Bytes of a row that a combine may bring back, with weights, if an element has at least so many bytes."""
        row_bytes = self.hidden * max(self.dtype.itemsize, least_bytes)
        return align(row_bytes, VECTOR_BYTES) + align(4 * num_topk, VECTOR_BYTES)

    def layout(self, num_rows: int, device: torch.device) -> RegionLayout:
        """Return how rows and their scales share a region. That of the last call is kept: most often it will do."""
        kept = self._kept
        if kept is None or kept[0] != num_rows:
            shapes: tuple = (((num_rows, self.hidden), self.dtype),)
            if self.scale_dtype is not None:
                shapes = (*shapes, ((num_rows, self.num_scales), self.scale_dtype))
            kept = self._kept = (num_rows, region_layout(shapes, device))
        return kept[1]


class CombineSource(NamedTuple):
    """How a rank gives its rows in a combine.

    Attributes:
        path: `combine/pulled`, `combine/copied_in` or `combine/staged`.
        post: The offer of these rows, and the rest of what the rank posts.
        copies: Pairs of a region and the rows that are copied into it first.
    """

    path: str
    post: Post
    copies: list[tuple[torch.Tensor, torch.Tensor]]


_make_source: Callable[[tuple], CombineSource] = partial(tuple.__new__, CombineSource)  # see `notify.make_post`


class Memory:
    """Memory of one engine.

    Args:
        window: The window.
        stream: Where calls are launched.
        can_stage: Rows that the window has no memory for may go through staging.
    """

    def __init__(self, window: DeviceWindow, stream: LaunchStream, can_stage: bool = True):
        self._window = window
        self._device = window.device
        self._arena = window.arena
        self._bounds = window.arena.bounds  # asked two or three times in a call, so without a function in between
        self._stream = stream
        self._can_stage = can_stage
        self._has_warned = False
        self.guessed_rows = 0
        self.largest_free_bytes = window.arena.largest_free_bytes
        self._zeros: dict[int, torch.Tensor] = {}
        self._scratch: dict[str, torch.Tensor] = {}
        self._no_words = torch.empty(0, dtype=torch.int32, device=window.device)

    # Regions of the window -------------------------------------------------------------------------------------------

    def region(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Allocate a region that the call uses first; None if the arena has no memory left."""
        stream = self._stream
        return self._arena.allocate(shape, dtype, stream.current, stream.is_capturing)

    def reclaim(self) -> None:
        """Have the next user of memory that a call has released wait for that call, and not for later work of the
        caller.
        """
        if not self._stream.is_capturing:
            self._arena.reclaim_released(self._stream.current)

    def guess(self, columns: Columns) -> Sections:
        """Allocate memory for a few rows more than the last dispatch received; for no row if there is none left."""
        sections = self.sections(columns, self.guessed_rows)
        return sections if sections is not None else self.no_rows(columns)

    def no_rows(self, columns: Columns) -> Sections:
        """Return memory for no row. It is enough if nothing comes."""
        sections = self.sections(columns, 0)
        assert sections is not None
        return sections

    def guess_from(self, num_rows: int) -> None:
        """Set how many rows came with the last dispatch, from which `guess` starts."""
        self.guessed_rows = next_guess(self.guessed_rows, num_rows)

    def sections(self, columns: Columns, num_rows: int) -> Sections | None:
        """Allocate regions for `num_rows` rows; None if the arena has no memory left."""
        arena, stream, is_capturing = self._arena, self._stream.current, self._stream.is_capturing
        layout = columns.layout(num_rows, self._device)
        made = arena.allocate_region(layout, stream, is_capturing)
        if made is None:
            return None
        tensors, segment, start = made
        x, scales, records = tensors[0], None, None
        base = scale_base = record_base = -1
        if segment >= 0:
            base = segment << SEGMENT_BITS | start
        if columns.scale_dtype is not None:
            scales = tensors[1]
            if scales.numel():
                scale_base = base + layout.starts[1]
        if columns.record_words:
            records = arena.records(4 * num_rows * columns.record_words, stream, is_capturing)
            if records is None:
                arena.give_up(x)
                return None
            record_base = self.base(records)
        return make_sections((x, scales, records, num_rows, 0, (base, scale_base, record_base), 0))

    def records(self, num_bytes: int) -> torch.Tensor | None:
        """Allocate memory of the window for the records of a call; None if the arena has none left."""
        stream = self._stream
        return self._arena.records(num_bytes, stream.current, stream.is_capturing)

    def give_up(self, x: torch.Tensor) -> None:
        """Have a capture not keep rows that were allocated in vain, nor the scales beside them."""
        self._arena.give_up(x)

    @property
    def reserved_bytes(self) -> int:
        """The bytes of all regions together that the window has memory for."""
        return self._arena.num_bytes()["reserved"]

    def staged_sections(self, scope: CudaScope, columns: Columns, num_rows: int) -> Sections:
        """Allocate ordinary memory for `num_rows` rows, which they reach through staging.

        Raises:
            EPTransportError: There is no staging, or it cannot hold a row of every rank.
        """
        self._require_staging("dispatch", self._can_stage)
        source_rows, bases = self._cut_staging(columns.widths())
        scales = records = None
        with scope.outputs:
            x = torch.empty(num_rows, columns.hidden, dtype=columns.dtype, device=self._device)
            if columns.scale_dtype is not None:
                scales = torch.empty(num_rows, columns.num_scales, dtype=columns.scale_dtype, device=self._device)
        if columns.record_words:  # only the call itself uses records: they are of its stream
            records = torch.empty(num_rows, columns.record_words, dtype=torch.int32, device=self._device)
        return Sections(x, scales, records, num_rows, source_rows, bases)

    def _cut_staging(self, row_bytes: Sequence[int]) -> tuple[int, tuple[int, int, int]]:
        """Divide the staging among the sources.

        Args:
            row_bytes: Bytes of a row of each section; 0: it does not travel.

        Returns:
            Rows that each source has, and where each section begins, as an offer has it.

        Raises:
            EPTransportError: It cannot hold a row of every rank.
        """
        num_ranks = self._window.num_ranks
        num_rows = rows_per_source(num_ranks, sum(row_bytes), self._arena.limit_bytes)
        start, stop = self._window.staging
        bases = [-1] * NUM_SECTIONS
        for section, width in enumerate(row_bytes):
            if width:
                bases[section] = start  # in segment 0
            start += align(num_ranks * num_rows * width, _LINE_BYTES)
        if start > stop:
            raise self._lack(num_ranks * sum(row_bytes))
        return num_rows, (bases[0], bases[1], bases[2])

    def base(self, region: torch.Tensor) -> int:
        """Return where a region is, as an offer has it; -1: it has no bytes, or there is none."""
        if region.numel():
            address = region.data_ptr()
            for start, stop, number in self._bounds:
                if start <= address < stop:
                    return number << SEGMENT_BITS | address - start
        return -1

    def source(self, parts: Sequence[torch.Tensor], num_tokens: int, can_stage: bool = True) -> CombineSource:
        """Return how rows are given: where they lie in the arena, as a copy in it, or, if it has no memory left,
        through staging.

        Raises:
            EPTransportError: The arena has no memory left, and they cannot be staged.
        """
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        base = self.base(parts[0])
        if len(parts) == 1 and base % VECTOR_BYTES == 0:  # as most often: rows alone, which lie in the window
            return _make_source(
                ("combine/pulled", make_post((parts[0].shape[0], 0, num_tokens, 0, (base, -1, -1), 0, 0)), copies)
            )
        bases = [-1, -1, -1]
        for section, part in enumerate(parts):
            bases[section] = self.base(part)
            # Peers read vectors: a view that begins between two of them is copied like anything outside the window.
            if bases[section] % VECTOR_BYTES and part.numel():
                region = self.region(part.shape, part.dtype)
                if region is None:
                    taken = [region for region, _ in copies]
                    return self._staged_source(parts, taken, num_tokens, can_stage and self._can_stage)
                copies.append((region, part))
                bases[section] = self.base(region)
        path = "combine/copied_in" if copies and copies[0][1] is parts[0] else "combine/pulled"
        post = make_post((parts[0].shape[0], 0, num_tokens, 0, (bases[0], bases[1], bases[2]), 0, 0))
        return _make_source((path, post, copies))

    def _staged_source(
        self, parts: Sequence[torch.Tensor], taken: list[torch.Tensor], num_tokens: int, can_stage: bool
    ) -> CombineSource:
        """Give all parts through staging. Regions that were allocated for some of them are released."""
        self._require_staging("combine", can_stage)
        for region in taken:
            self._arena.give_up(region)
        source_rows, bases = self._cut_staging([part.shape[1] * part.element_size() for part in parts])
        return CombineSource("combine/staged", Post(parts[0].shape[0], source_rows, num_tokens, bases=bases), [])

    def _require_staging(self, operation: str, can_stage: bool) -> None:
        """Check that there is staging, and warn once that calls through it are slower.

        Raises:
            EPTransportError: There is none: across nodes, and for sums in the order of columns. (Nor is there for
                expanded dispatches, which do not ask.)
        """
        if not can_stage:
            raise self.lack_of_rows(operation)
        if not self._has_warned:
            self._has_warned = True
            warn_staged(operation, self._arena.num_bytes()["used"], self._window.rank, self._window.num_ranks)

    def lack_of_rows(self, operation: str) -> EPTransportError:
        """Return the error for rows that do not fit into the window, and cannot be staged."""
        sizes, rank, num_ranks = self._arena.num_bytes(), self._window.rank, self._window.num_ranks
        return EPTransportError(
            f"{operation}: the arena has no room for the rows ({sizes['used']} of {sizes['reserved']} bytes are in "
            f"use, rank {rank}/{num_ranks}). Drop received tensors, or make the buffer with a larger "
            "num_nvl_bytes (of an ElasticBuffer: num_bytes); it grows by itself only in a dispatch without handle "
            "or num_worst_tokens"
        )

    def _lack(self, num_bytes: int) -> EPTransportError:
        """Return the error for rows that fit neither into a region nor into staging."""
        sizes = self._arena.num_bytes()
        return EPTransportError(
            f"window: the arena has no room ({sizes['used']} of {sizes['reserved']} bytes are in use), and one row of "
            f"every rank is {num_bytes} bytes, more than the {self._window.staging.num_bytes} of staging "
            f"(rank {self._window.rank}/{self._window.num_ranks}). Drop received tensors, or make the buffer with a "
            "larger num_nvl_bytes; it grows by itself only in a dispatch without handle or num_worst_tokens"
        )

    def grow_alike(self, told: Counts, columns: Columns, num_topk: int) -> None:
        """Add a segment if any rank lacks memory for its rows, or for a copy of them that a combine may need.

        All ranks have the row counts and the free memory of all ranks, so either all of them grow or none does.
        """
        # What fits is allocated already; the combine's copy is not. Records are rounded up to a power of two.
        row_bytes, scale_bytes, record_bytes = columns.widths()
        come_bytes = 0 if told.fits else row_bytes + scale_bytes + 2 * record_bytes
        back_bytes = columns.back_bytes(num_topk)
        most = max(told.num_rows)
        if min(told.free_bytes) < _needed_bytes((most * come_bytes, most * back_bytes)):
            self.grow_for(told, [(rows * come_bytes, rows * back_bytes) for rows in told.num_rows])

    def grow_for(self, told: Counts, sizes: Sequence[Sequence[int]]) -> None:
        """Add a segment if any rank lacks memory for regions of some sizes.

        Args:
            told: The counts.
            sizes: For each rank, the bytes of its regions.
        """
        wanted = [_needed_bytes(regions) for regions in sizes]
        if any(free < size for free, size in zip(told.free_bytes, wanted, strict=True)):
            self._window.grow(align(max(wanted), GROWTH_BYTES))

    # Ordinary memory -------------------------------------------------------------------------------------------------

    def scratch(self, num_words: int, name: str = "slots") -> torch.Tensor:
        """[m] int32 with m at least `num_words` and even, for the call that is being made: the next one uses it again.

        Args:
            num_words: The least size.
            name: What it is for, if a call needs several.
        """
        if self._stream.is_capturing:  # a graph's memory is its own
            return self._no_words.new_empty(num_words + num_words % 2)
        known = self._scratch.get(name, self._no_words)
        if known.numel() < num_words:
            self._stream.hold([known], self._stream.current)  # behind all calls before: they are in order
            size = max(num_words + num_words % 2, 2 * known.numel())
            known = self._scratch[name] = self._no_words.new_empty(size)
        return known

    def no_channels(self, num_channels: int) -> torch.Tensor:
        """[R, C] int32 zeros, which handles share: they are never written, and only callers read them."""
        zeros = self._zeros.get(num_channels)
        if zeros is None:
            shape = (self._window.num_ranks, num_channels)
            zeros = torch.zeros(shape, dtype=torch.int32, device=self._window.device)
            if not self._stream.is_capturing:  # a graph's memory is its own
                self._zeros[num_channels] = zeros
        return zeros


def next_guess(guessed: int, num_rows: int) -> int:
    """Return how many rows the next dispatch is expected to receive at most, if the last one received `num_rows`.

    A guess that still fits, and is not much too large, is kept: a call that takes as many bytes as the one before takes
    the same memory.
    """
    if num_rows // 32 + 32 <= guessed - num_rows <= num_rows // 8 + 128:
        return guessed
    return num_rows + num_rows // 16 + 64


def _needed_bytes(regions: Sequence[int]) -> int:
    return sum(whole_units(size) for size in regions) + _SPARE_BYTES


def staging_bytes(num_ranks: int) -> int:
    """Return the bytes of a window that are staging."""
    return max(MOST_BYTES, _STAGING_BYTES_PER_RANK * num_ranks) + NUM_SECTIONS * _LINE_BYTES
