"""Low-latency calls across nodes over NVSHMEM: kernels that carry a publication to the far ranks' copies of it.

`docs/decisions/0014-low-latency-over-nvshmem.md` has the plan. Shape letters: R ranks, P of a node, E experts,
L = E / R, M the most tokens of a rank, K selections of a token.

A rank has a *copy* of each far rank's low-latency memory: the words in front as they are there, and behind them sets of
its own, smaller measure. The far rank fills it. In the address table that kernels read from, copies stand in for far
ranks; what a rank stores there of its own, the word `sent`, is carried to the far rank's memory.

Behind a send come a carrier of its rows and then a poster, which signals. None of them waits for a peer. They call
NVSHMEM, which Triton's interpreter has not: tests have a stand-in for it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from .._nvshmem import DEVICE_LIBRARY, put, quiet, set_word
from .._triton import Launch, Variant, jit, next_power_of_2, tl, triton
from ..primitives import words_at
from . import combine, dispatch
from .words import (
    POST_WORDS,
    Call,
    Spots,
    copy_set_offset,
    is_working,
    post_at,
    posted_base,
    posted_tokens,
    table_at,
)

BARRIER, DISPATCH, COMBINE = 0, 1, 2  # what a call is, for `poster`
_BARRIER, _DISPATCH, _COMBINE = tl.constexpr(BARRIER), tl.constexpr(DISPATCH), tl.constexpr(COMBINE)
_LINE = tl.constexpr(8)
_POST_WORDS = tl.constexpr(POST_WORDS)
_ROW_WARPS = 8
_MOST_BLOCKS = 512  # that put rows
# Up to so many, one kernel does for all: it is compiled when a buffer is made.
_TOPK, _LOCAL = 32, 32


@dataclass(frozen=True)
class Couriers:
    """Where a rank's publication is, and where its copies at far ranks are. Made once for a buffer.

    Attributes:
        spots: The words.
        memory: Address of this rank's low-latency memory, in symmetric memory.
        copies: Address of its copies of far ranks, likewise: R - P of them, in the order of ranks.
        copy_bytes: From one copy to the next.
        tables: Address of [R, max_experts] int64, likewise: the table of a combine as each far rank is to see it.
        pes: [R] int32, NVSHMEM's number of each rank.
    """

    spots: Spots
    memory: int
    copies: int
    copy_bytes: int
    tables: int
    pes: torch.Tensor

    @property
    def num_far(self) -> int:
        """Ranks of other nodes."""
        return self.spots.places.num_ranks - self.spots.places.num_near

    def arguments(self, call: Call) -> tuple[torch.Tensor | int, ...]:
        """As a kernel takes them, with the measure of a call's sets in copies."""
        spots, places = self.spots, self.spots.places
        words = (spots.state, places.state, spots.mask, self.pes, self.memory, self.copies, self.copy_bytes)
        numbers = (places.num_ranks, places.num_near, places.rank, spots.max_experts)
        return *words, *numbers, call.copy_set_bytes


def dispatch_carrier(couriers: Couriers, call: Call, sizes: dispatch.Sizes) -> tuple[Launch, int]:
    """A kernel that puts each token's row to every far rank that has one of its experts, once, at the token's place.

    It takes nothing more.

    Args:
        couriers: The words.
        call: The call.
        sizes: Of the rows.

    Returns:
        The kernel, and its blocks.
    """
    num_local = sizes.num_experts // couriers.spots.places.num_ranks
    fixed = (*couriers.arguments(call), sizes.num_topk, num_local, sizes.row_bytes, sizes.places_offset)
    variant = _rows_variant(max(_TOPK, next_power_of_2(sizes.num_topk)))
    return Launch(variant, (), fixed), max(1, min(_MOST_BLOCKS, sizes.max_tokens * couriers.num_far))


def combine_carrier(couriers: Couriers, call: Call, sizes: combine.Sizes) -> tuple[Launch, int]:
    """A kernel that puts the rows that this rank's experts have for each far rank, without gaps.

    It takes `layout_range` [L, R] int64, of the handle.

    Args:
        couriers: The words.
        call: The call.
        sizes: Of the rows.

    Returns:
        The kernel, and its blocks.
    """
    num_local = sizes.num_experts // couriers.spots.places.num_ranks
    num_pairs = num_local * couriers.num_far
    num_shares = max(1, min(sizes.max_tokens, _MOST_BLOCKS // num_pairs))
    fixed = (*couriers.arguments(call), num_local, sizes.slot_bytes, sizes.max_tokens, num_shares)
    variant = _back_variant(max(_LOCAL, next_power_of_2(num_local)))
    return Launch(variant, (None,), fixed), num_pairs * num_shares


def poster(
    couriers: Couriers, call: Call, kind: int, sizes: dispatch.Sizes | combine.Sizes | None = None
) -> tuple[Launch, int]:
    """A kernel that puts what far ranks must know of a call, waits until all of it has arrived, and sets `sent` there.

    It takes `layout_range` [L, R] int64, of a combine's handle; otherwise any such tensor.

    Args:
        couriers: The words.
        call: The call.
        kind: `BARRIER`, `DISPATCH` or `COMBINE`.
        sizes: Of the rows, but for a barrier.

    Returns:
        The kernel, and its blocks.
    """
    num_ranks = couriers.spots.places.num_ranks
    num_local = sizes.num_experts // num_ranks if sizes is not None else 0
    places_offset = sizes.places_offset if isinstance(sizes, dispatch.Sizes) else 0
    slot_bytes = sizes.slot_bytes if isinstance(sizes, combine.Sizes) else 0
    numbers = (kind, sizes.num_topk if sizes is not None else 0, num_local, places_offset, slot_bytes)
    fixed = (*couriers.arguments(call), couriers.tables, *numbers)
    variant = _posts_variant(max(_LOCAL, next_power_of_2(num_local)))
    return Launch(variant, (None,), fixed), num_ranks


def prepare_all(couriers: Couriers) -> None:
    """Compile and load the kernels of this file. NVSHMEM must have been started: the memory must be there."""
    words, some = couriers.arguments(Call((0, 0), 16, 16, 0)), couriers.spots.state
    _rows_variant(_TOPK).prepare(*words, 0, 0, 0, 0)
    _back_variant(_LOCAL).prepare(some, *words, 0, 0, 0, 0)
    _posts_variant(_LOCAL).prepare(some, *words, couriers.tables, BARRIER, 0, 0, 0, 0)


@functools.cache
def _rows_variant(topk: int) -> Variant:
    return Variant(_put_rows_kernel, {"TOPK": topk}, _ROW_WARPS, library=DEVICE_LIBRARY)


@functools.cache
def _back_variant(local: int) -> Variant:
    return Variant(_put_back_kernel, {"LOCAL": local}, _ROW_WARPS, library=DEVICE_LIBRARY)


@functools.cache
def _posts_variant(local: int) -> Variant:
    return Variant(_put_posts_kernel, {"LOCAL": local}, num_warps=1, library=DEVICE_LIBRARY)


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _far_rank(index, ranks_per_node, rank):
    """The far rank of a number among them."""
    return index + tl.where(index >= rank // ranks_per_node * ranks_per_node, ranks_per_node, 0)


@triton.jit
def _copy_at(copies, copy_bytes, ranks_per_node, rank, target):
    """Where a far rank has its copy of this rank: copies leave out the ranks of their owner's node."""
    index = rank - tl.where(rank // ranks_per_node > target // ranks_per_node, ranks_per_node, 0)
    return copies + index * copy_bytes


@jit(name="low_latency::carry_rows")
def _put_rows_kernel(
    ll, state, ranks_mask, pes, memory: tl.int64, copies: tl.int64, copy_bytes: tl.int64, num_ranks: tl.int32,
    ranks_per_node: tl.int32, rank: tl.int32, max_experts: tl.int32, far_set_bytes: tl.int64, num_topk: tl.int32,
    num_local: tl.int32, row_bytes: tl.int64, places_offset: tl.int64, TOPK: tl.constexpr,
):  # fmt: skip
    """Blocks share the pairs of a token and a far rank.

    Example: two nodes of two ranks, two experts a rank, rank 0, a token with experts 1, 4 and 5: its row goes to rank
    2, once; rank 1 fetches it.
    """
    number = tl.load(ll)
    ks = tl.arange(0, TOPK)
    if is_working(state):
        offset = posted_base(memory, num_ranks, number)
        far_offset = copy_set_offset(num_ranks, max_experts, number, far_set_bytes)
        places = (memory + offset + places_offset).to(tl.pointer_type(tl.int32))
        num_far = num_ranks - ranks_per_node
        num_tokens = posted_tokens(memory, num_ranks, number).to(tl.int32)
        for item in range(tl.program_id(0), num_tokens * num_far, tl.num_programs(0)):
            target = _far_rank(item % num_far, ranks_per_node, rank)
            token = item // num_far
            place = tl.load(places + token * num_topk + ks, mask=ks < num_topk, other=-1)
            is_there = (place >= 0) & ((place >> 16) // num_local == target)
            if (tl.sum(is_there.to(tl.int32)) > 0) & (tl.load(ranks_mask + target) == 0):
                row = token * row_bytes
                copy = _copy_at(copies, copy_bytes, ranks_per_node, rank, target)
                put(copy + far_offset + row, memory + offset + row, row_bytes, tl.load(pes + target))


@jit(name="low_latency::carry_back")
def _put_back_kernel(
    layout_range, ll, state, ranks_mask, pes, memory: tl.int64, copies: tl.int64,
    copy_bytes: tl.int64, num_ranks: tl.int32, ranks_per_node: tl.int32, rank: tl.int32, max_experts: tl.int32,
    far_set_bytes: tl.int64, num_local: tl.int32, slot_bytes: tl.int64, max_tokens: tl.int64, num_shares: tl.int32,
    LOCAL: tl.constexpr,
):  # fmt: skip
    """Block s * pairs + j puts share s of the rows of pair j, a local expert and a far rank.

    Example: rank 2's rows are 2 of expert 0 and 3 of expert 1. They lie apart here, and behind one another in rank 2's
    copy: expert 1's begin at its third slot.
    """
    number = tl.load(ll)
    num_far = num_ranks - ranks_per_node
    num_pairs = num_local * num_far
    pair = tl.program_id(0) % num_pairs
    share = tl.program_id(0) // num_pairs
    target = _far_rank(pair % num_far, ranks_per_node, rank)
    expert = pair // num_far
    locals_ = tl.arange(0, LOCAL)
    if is_working(state) & (tl.load(ranks_mask + target) == 0):
        ranges = tl.load(layout_range + locals_ * num_ranks + target, mask=locals_ < num_local, other=0)
        counts = ranges & 0xFFFFFFFF
        before = tl.sum(tl.where(locals_ < expert, counts, 0))
        count = tl.sum(tl.where(locals_ == expert, counts, 0))
        first = tl.sum(tl.where(locals_ == expert, ranges >> 32, 0)) + expert * num_ranks * max_tokens
        begin = count * share // num_shares
        size = (count * (share + 1) // num_shares - begin) * slot_bytes
        if size > 0:
            offset = posted_base(memory, num_ranks, number)
            far_offset = copy_set_offset(num_ranks, max_experts, number, far_set_bytes)
            copy = _copy_at(copies, copy_bytes, ranks_per_node, rank, target) + far_offset
            source = memory + offset + (first + begin) * slot_bytes
            put(copy + (before + begin) * slot_bytes, source, size, tl.load(pes + target))


@jit(name="low_latency::carry_posts")
def _put_posts_kernel(
    layout_range, ll, state, ranks_mask, pes, memory: tl.int64, copies: tl.int64, copy_bytes: tl.int64,
    num_ranks: tl.int32, ranks_per_node: tl.int32, rank: tl.int32, max_experts: tl.int32, far_set_bytes: tl.int64,
    tables: tl.int64, kind: tl.int32, num_topk: tl.int32, num_local: tl.int32, places_offset: tl.int64,
    slot_bytes: tl.int64, LOCAL: tl.constexpr,
):  # fmt: skip
    """Block q tells far rank q: the table, the places of a dispatch, the post, and then `sent`.

    `quiet` waits for the rows, too, which other blocks of an earlier launch have put, over queues of their own; so
    whoever sees `sent` finds everything.

    Example: as in `_put_back_kernel`; the table for rank 2 says that its rows of expert 1 begin two slots into the
    set of its copy, and that there are none where the count is 0.
    """
    target = tl.program_id(0)
    number = tl.load(ll)
    is_far = target // ranks_per_node != rank // ranks_per_node
    if is_far & is_working(state) & (tl.load(ranks_mask + target) == 0):
        pe = tl.load(pes + target)
        copy = _copy_at(copies, copy_bytes, ranks_per_node, rank, target)
        far_offset = copy_set_offset(num_ranks, max_experts, number, far_set_bytes)
        table_bytes = 8 * (num_local * num_ranks).to(tl.int64)
        # As places in a memory, so that they are the same in a copy.
        table = _place(table_at(memory, num_ranks, number, max_experts), memory)
        post = _place(post_at(memory, num_ranks, number), memory)
        if kind == _DISPATCH:
            num_tokens = posted_tokens(memory, num_ranks, number)
            offset = posted_base(memory, num_ranks, number)
            put(copy + table, memory + table, table_bytes, pe)
            if num_tokens > 0:
                places = memory + offset + places_offset
                put(copy + far_offset + places_offset, places, 4 * num_tokens * num_topk, pe)
        if kind == _COMBINE:
            mine = tables + 8 * target.to(tl.int64) * max_experts
            locals_ = tl.arange(0, LOCAL)
            column = locals_ * num_ranks + target
            counts = tl.load(layout_range + column, mask=locals_ < num_local, other=0) & 0xFFFFFFFF
            starts = far_offset + (tl.cumsum(counts, 0) - counts) * slot_bytes
            tl.store(words_at(mine) + column, tl.where(counts > 0, starts, 0), mask=locals_ < num_local)
            tl.debug_barrier()  # what one thread stored, all put
            put(copy + table, mine, table_bytes, pe)
        put(copy + post, memory + post, tl.full((), 8 * _POST_WORDS, tl.int64), pe)
        quiet()
        set_word(memory + 8 * _LINE * rank.to(tl.int64), number, pe)


@triton.jit
def _place(pointer, memory):
    """Where a pointer points to in a memory."""
    return pointer.to(tl.int64, bitcast=True) - memory
