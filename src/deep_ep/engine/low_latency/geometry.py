"""Where the rows of low-latency calls lie in a rank's memory.

Shape letters: R ranks, E experts, L = E / R, M the most tokens of a rank in a call, H channels, K selections of a
token, G = ceil(H / 128) groups of channels. The low-latency memory of a rank has `num_rdma_bytes`, in four regions,
whatever the sizes of the calls are:

    region 0, 1, 2    three *slots*: the rows that a combine copies in, or a zero-copy tensor
    region 3          four *dispatch sets*, which calls take in turn, by their number

Only its owner writes it. A dispatch set holds T rows and the expert slots of their copies, a slot the rows that this
rank's experts made. A dispatch that is too large for its set (where there are fewer than five experts) takes a slot,
too: it is *wide*. Each rank chooses the slot of a call for itself, and posts it with the call.

A *copy* of the memory of a rank of another node, in this rank's own, has what that rank sends to this one alone: four
sets, which calls take in turn, each of a little more than 1 / R of a region
(`docs/decisions/0014-low-latency-over-nvshmem.md`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...sizing import (
    ALIGNMENT_BYTES,
    CHANNELS_PER_SCALE,
    SLOT_ALIGNMENT_BYTES,
    align,
    ceil_div,
    low_latency_buffer_bytes,
    low_latency_combine_slot_bytes,
)

MOST_IN_FLIGHT = 2  # results of a rank: engines run two micro-batches
NUM_SETS = 2 * MOST_IN_FLIGHT  # for dispatches, and in a copy. `docs/low-latency.md` says why so many
NUM_SLOTS = MOST_IN_FLIGHT + 1
NUM_ZERO_COPY = 2  # handles that may have a zero-copy tensor at a time; the third slot is left for other calls
MOST_TOKENS = 1 << 16  # an index and an expert share a word
_NUM_REGIONS = 4
_LEAST_COPY_BYTES = 256 << 10  # of a set in a copy, if a region has so many: expert slots may outweigh short rows
_COPY_MARGIN = 8  # a set in a copy is larger by one part in so many: for expert slots, with one expert a rank


class RowFormat(NamedTuple):
    """How rows travel in a dispatch.

    Attributes:
        use_fp8: As FP8 with a scale for each 128 channels; otherwise BF16.
        round_scale: Scales are powers of two.
        use_ue8m0: Scales are returned as exponents, four to an int32.
    """

    use_fp8: bool = True
    round_scale: bool = False
    use_ue8m0: bool = False

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the received rows."""
        return torch.float8_e4m3fn if self.use_fp8 else torch.bfloat16

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """The dtype of the received scales."""
        if not self.use_fp8:
            return None
        return torch.int32 if self.use_ue8m0 else torch.float32


class Geometry(NamedTuple):
    """The sizes of a call, the same on all ranks.

    Attributes:
        num_ranks: R.
        num_experts: E.
        max_tokens: M.
        hidden: H.
        num_topk: K.
    """

    num_ranks: int
    num_experts: int
    max_tokens: int
    hidden: int
    num_topk: int

    @property
    def num_local_experts(self) -> int:
        """The number of experts of a rank, L."""
        return self.num_experts // self.num_ranks

    @property
    def num_groups(self) -> int:
        """The number of groups of channels, G."""
        return ceil_div(self.hidden, CHANNELS_PER_SCALE)

    @property
    def num_rows(self) -> int:
        """The most rows that one expert may receive."""
        return self.num_ranks * self.max_tokens

    def num_scales(self, form: RowFormat) -> int:
        """The number of columns of the received scales."""
        return ceil_div(self.num_groups, 4) if form.use_ue8m0 else self.num_groups

    # A dispatched row: its values, then, if they are FP8, its scales as float32.

    @property
    def scales_offset(self) -> int:
        """The byte offset of the scales in an FP8 row."""
        return align(self.hidden, 4)

    def row_bytes(self, form: RowFormat) -> int:
        """The bytes from one dispatched row to the next."""
        used = self.scales_offset + 4 * self.num_groups if form.use_fp8 else 2 * self.hidden
        return align(used, SLOT_ALIGNMENT_BYTES)

    def expert_slots_offset(self, form: RowFormat) -> int:
        """The byte offset of the expert slots, [M, K] int32, which come after the rows of a dispatch."""
        return self.max_tokens * self.row_bytes(form)

    def dispatch_bytes(self, form: RowFormat) -> int:
        """The bytes of a dispatch's set."""
        return self.expert_slots_offset(form) + 4 * self.max_tokens * self.num_topk

    # A row that is combined: BF16 values, and space for the range of each group (LogFMT).

    @property
    def slot_bytes(self) -> int:
        """The bytes from one combined row to the next."""
        return low_latency_combine_slot_bytes(self.hidden)

    @property
    def ranges_offset(self) -> int:
        """The byte offset, in a combined row, of the ranges: [G, 2] BF16, the largest and the smallest magnitude."""
        return align(2 * self.hidden, 4)

    @property
    def combine_bytes(self) -> int:
        """The bytes of a slot: the rows of a combine, or a zero-copy tensor."""
        return self.num_experts * self.max_tokens * self.slot_bytes

    @property
    def copied_combine_bytes(self) -> int:
        """The most bytes of the copy of a slot: one rank's rows."""
        return self.num_local_experts * self.max_tokens * self.slot_bytes

    def hint(self) -> int:
        """The number of bytes that `get_low_latency_rdma_size_hint` returns for these sizes."""
        return low_latency_buffer_bytes(self.max_tokens, self.hidden, self.num_ranks, self.num_experts)


class SetPlan(NamedTuple):
    """Where a call's rows lie in the low-latency memory.

    Attributes:
        region_bytes: Bytes of a region, and so of a slot.
        takes_slot: Its rows are in a slot: those of a combine, and of a wide dispatch.
        copy_set_bytes: Bytes of a set in a copy; 0: there are no copies.
    """

    region_bytes: int
    takes_slot: bool
    copy_set_bytes: int = 0

    @property
    def set_bytes(self) -> int:
        """The bytes from one dispatch set to the next."""
        return _aligned(self.region_bytes // NUM_SETS)

    @property
    def sets_offset(self) -> int:
        """The byte offset of the first dispatch set."""
        return NUM_SLOTS * self.region_bytes

    def offset_of_set(self, number: int) -> int:
        """Return the byte offset of the dispatch set of call `number`."""
        return self.sets_offset + number % NUM_SETS * self.set_bytes

    def slot_offset(self, index: int) -> int:
        """Return the byte offset of a slot."""
        return index * self.region_bytes


def copy_bytes(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes of the sets of a copy, if low-latency memory has `num_bytes`."""
    return NUM_SETS * _copy_set_bytes(num_bytes, num_ranks)


def plan_dispatch(where: str, num_bytes: int, geometry: Geometry, form: RowFormat, has_copies: bool = False) -> SetPlan:
    """Return where the rows of a dispatch lie.

    Args:
        where: The call, for the error.
        num_bytes: Of the low-latency memory.
        geometry: The sizes of the call.
        form: How rows travel.
        has_copies: There are ranks of other nodes, which have copies.

    Raises:
        ValueError: The memory is too small.
    """
    needed_bytes = geometry.dispatch_bytes(form)
    plan = _plan(where, num_bytes, geometry, needed_bytes, needed_bytes if has_copies else None)
    return plan._replace(takes_slot=needed_bytes > plan.set_bytes)


def plan_combine(where: str, num_bytes: int, geometry: Geometry, has_copies: bool = False) -> SetPlan:
    """Return where the rows of a combine lie. The arguments are those of `plan_dispatch`."""
    copied_bytes = geometry.copied_combine_bytes if has_copies else None
    return _plan(where, num_bytes, geometry, geometry.combine_bytes, copied_bytes)


def bytes_for_two(geometry: Geometry, form: RowFormat) -> int:
    """Return the `num_rdma_bytes` with which a dispatch is not wide."""
    # All sets lie in one of the regions.
    return _NUM_REGIONS * NUM_SETS * align(geometry.dispatch_bytes(form), ALIGNMENT_BYTES)


def _plan(where: str, num_bytes: int, geometry: Geometry, needed_bytes: int, copied_bytes: int | None) -> SetPlan:
    region_bytes = _aligned(num_bytes // _NUM_REGIONS)
    copy_set_bytes = 0 if copied_bytes is None else _copy_set_bytes(num_bytes, geometry.num_ranks)
    if needed_bytes > region_bytes or (copied_bytes or 0) > copy_set_bytes:
        raise _too_small(where, num_bytes, needed_bytes, geometry, copied_bytes or 0)
    return SetPlan(region_bytes, True, copy_set_bytes)


def _copy_set_bytes(num_bytes: int, num_ranks: int) -> int:
    """Return the bytes of a set in a copy.

    A rank's part of a combine's slot is at most 1 / R of it, so it fits here, too.

    A dispatch's set is as large as in the rank's own memory. Where a rank has several experts that is less than a
    combine's part; where it has one, the expert slots come on top.
    """
    region_bytes = _aligned(num_bytes // _NUM_REGIONS)
    due = region_bytes // num_ranks
    return min(region_bytes, max(_aligned(due + due // _COPY_MARGIN), _LEAST_COPY_BYTES))


def _aligned(num_bytes: int) -> int:
    return num_bytes // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES


def _too_small(where: str, num_bytes: int, needed_bytes: int, geometry: Geometry, copied_bytes: int) -> ValueError:
    hint = geometry.hint()
    wanted = max(hint, _NUM_REGIONS * align(needed_bytes, ALIGNMENT_BYTES))
    if copied_bytes > _copy_set_bytes(wanted, geometry.num_ranks):
        # A set in a copy has at least 1 / R of a region.
        wanted = _NUM_REGIONS * geometry.num_ranks * align(copied_bytes, ALIGNMENT_BYTES)
    advice = "Buffer.get_low_latency_rdma_size_hint(...) bytes" if wanted == hint else "so many"
    return ValueError(
        f"{where}: num_max_dispatch_tokens_per_rank={geometry.max_tokens}, hidden {geometry.hidden} and "
        f"{geometry.num_experts} experts need num_rdma_bytes={wanted}, the buffer has {num_bytes}. "
        f"Make it with {advice}"
    )
