"""Where the rows of low-latency calls lie in a rank's memory. Everybody computes it alike, so nobody asks.

Shape letters: R ranks, E experts, L = E / R, M the most tokens of a rank in a call, H channels, K selections of a
token, G = ceil(H / 128) groups of channels. The low-latency memory of a rank has `num_rdma_bytes`, in four quarters:

    quarter 0, 1    what calls of even and of odd number send, each cut into as many *sets* as the call's size allows
    quarter 2, 3    two tensors for zero-copy combine

Only its owner writes it. A set holds, for a dispatch, T rows and the places of their copies; for a combine, the rows
that this rank's experts made.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...sizing import (
    CHANNELS_PER_SCALE,
    SLOT_ALIGNMENT_BYTES,
    align,
    ceil_div,
    low_latency_buffer_bytes,
    low_latency_combine_slot_bytes,
)

NUM_ZERO_COPY = 2
MOST_SETS = 8  # of all quarters together; so many calls' words are kept, too
MOST_TOKENS = 1 << 16  # a place and an expert share a word
_QUARTERS = 4


class Form(NamedTuple):
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
        """Of the received rows."""
        return torch.float8_e4m3fn if self.use_fp8 else torch.bfloat16

    @property
    def scale_dtype(self) -> torch.dtype | None:
        """Of the received scales."""
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
        """L."""
        return self.num_experts // self.num_ranks

    @property
    def num_groups(self) -> int:
        """G."""
        return ceil_div(self.hidden, CHANNELS_PER_SCALE)

    @property
    def num_rows(self) -> int:
        """Rows that one expert may receive."""
        return self.num_ranks * self.max_tokens

    def num_scales(self, form: Form) -> int:
        """Columns of the received scales."""
        return ceil_div(self.num_groups, 4) if form.use_ue8m0 else self.num_groups

    # A dispatched row: its values, then, if they are FP8, its scales as float32.

    @property
    def scales_offset(self) -> int:
        """Where the scales of an FP8 row begin."""
        return align(self.hidden, 4)

    def row_bytes(self, form: Form) -> int:
        """From one dispatched row to the next."""
        used = self.scales_offset + 4 * self.num_groups if form.use_fp8 else 2 * self.hidden
        return align(used, SLOT_ALIGNMENT_BYTES)

    def places_offset(self, form: Form) -> int:
        """Where, behind the rows of a dispatch, the places begin: [M, K] int32."""
        return self.max_tokens * self.row_bytes(form)

    def dispatch_bytes(self, form: Form) -> int:
        """Of a dispatch's set."""
        return self.places_offset(form) + 4 * self.max_tokens * self.num_topk

    # A row that is combined: BF16 values, and room for the range of each group (LogFMT).

    @property
    def slot_bytes(self) -> int:
        """From one combined row to the next."""
        return low_latency_combine_slot_bytes(self.hidden)

    @property
    def ranges_offset(self) -> int:
        """Where in it the ranges begin: [G, 2] BF16, the largest and the smallest magnitude."""
        return align(2 * self.hidden, 4)

    @property
    def combine_bytes(self) -> int:
        """Of a combine's set, and of a zero-copy tensor."""
        return self.num_experts * self.max_tokens * self.slot_bytes

    def hint(self) -> int:
        """What `get_low_latency_rdma_size_hint` says for these sizes."""
        return low_latency_buffer_bytes(self.max_tokens, self.hidden, self.num_ranks, self.num_experts)


class Plan(NamedTuple):
    """How calls of one size divide the low-latency memory.

    Attributes:
        quarter_bytes: Of a quarter.
        sets_per_quarter: A power of two.
    """

    quarter_bytes: int
    sets_per_quarter: int

    @property
    def set_bytes(self) -> int:
        """From one set to the next."""
        return self.quarter_bytes // self.sets_per_quarter // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES

    @property
    def num_sets(self) -> int:
        """In both quarters."""
        return 2 * self.sets_per_quarter

    def set_offset(self, number: int) -> int:
        """Where the set of call `number` begins. Calls side by side never share a quarter, whatever their sizes."""
        return (number & 1) * self.quarter_bytes + (number >> 1) % self.sets_per_quarter * self.set_bytes

    def zero_copy_offset(self, index: int) -> int:
        """Where a zero-copy tensor begins."""
        return (2 + index) * self.quarter_bytes


def plan_sets(where: str, num_bytes: int, needed_bytes: int, geometry: Geometry) -> Plan:
    """Divide the memory for a call.

    Args:
        where: The call, for the error.
        num_bytes: Of the low-latency memory.
        needed_bytes: That a set of the call needs.
        geometry: Its sizes.

    Raises:
        ValueError: The memory is too small.
    """
    quarter_bytes = num_bytes // _QUARTERS // SLOT_ALIGNMENT_BYTES * SLOT_ALIGNMENT_BYTES
    if needed_bytes > quarter_bytes:
        wanted = max(geometry.hint(), _QUARTERS * align(needed_bytes, SLOT_ALIGNMENT_BYTES))
        raise ValueError(
            f"{where}: num_max_dispatch_tokens_per_rank={geometry.max_tokens}, hidden {geometry.hidden} and "
            f"{geometry.num_experts} experts need num_rdma_bytes={wanted}, the buffer has {num_bytes}. "
            "Make it with Buffer.get_low_latency_rdma_size_hint(...) bytes"
        )
    sets = 1
    while 2 * sets <= MOST_SETS // 2 and 2 * sets * align(needed_bytes, SLOT_ALIGNMENT_BYTES) <= quarter_bytes:
        sets *= 2
    return Plan(quarter_bytes, sets)
