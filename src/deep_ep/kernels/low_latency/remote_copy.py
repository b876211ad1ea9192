"""Low-latency calls across nodes over NVSHMEM: kernels that copy a publication to remote ranks.

`docs/decisions/0014-low-latency-over-nvshmem.md` has the plan. Shape letters: R ranks, P of a node, E experts,
L = E / R, M the most tokens of a rank, K selections of a token.

A rank has a *copy* of each remote rank's low-latency memory: the same words in front, and behind them sets that are
smaller than the original ones. The remote rank fills it. In the address table that kernels read from, copies stand in
for remote ranks; what a rank stores there itself, the word `sent`, is put to the remote rank's memory.

After a send, a copier puts its rows, and then a poster puts its words and signals. None of them waits for a peer. They
call NVSHMEM, which Triton's interpreter does not have: tests have a substitute for it.
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
    KernelCall,
    LowLatencyContext,
    copy_set_offset,
    is_working,
    post_at,
    posted_base,
    posted_tokens,
    table_at,
)

BARRIER, DISPATCH, COMBINE = 0, 1, 2  # what a call is, for `poster`
_DISPATCH, _COMBINE = tl.constexpr(DISPATCH), tl.constexpr(COMBINE)
_LINE = tl.constexpr(8)
_POST_WORDS = tl.constexpr(POST_WORDS)
_ROW_WARPS = 8
_MOST_BLOCKS = 512  # that put rows
# Up to so many, one kernel does for all: it is compiled when a buffer is made.
_TOPK, _LOCAL = 32, 32


@dataclass(frozen=True)
class CopyContext:
    """Where a rank's publication is, and where its copies at remote ranks are. Made once for a buffer.

    Attributes:
        context: The words.
        memory: Address of this rank's low-latency memory, in symmetric memory.
        copies: Address of its copies of remote ranks, likewise: R - P of them, in the order of ranks.
        copy_bytes: From one copy to the next.
        tables: Address of [R, max_experts] int64, likewise: the table of a combine as each remote rank is to see it.
        pes: [R] int32, NVSHMEM's number of each rank.
    """

    context: LowLatencyContext
    memory: int
    copies: int
    copy_bytes: int
    tables: int
    pes: torch.Tensor

    @property
    def num_remote(self) -> int:
        """The number of ranks of other nodes."""
        return self.context.buffer.num_ranks - self.context.buffer.ranks_per_node

    def arguments(self, call: KernelCall) -> tuple[torch.Tensor | int, ...]:
        """Return the arguments of a kernel, with the size of a call's sets in copies."""
        context, buffer = self.context, self.context.buffer
        words = (context.state, buffer.state, context.mask, self.pes, self.memory, self.copies, self.copy_bytes)
        numbers = (buffer.num_ranks, buffer.ranks_per_node, buffer.rank, context.max_experts)
        return *words, *numbers, call.copy_set_bytes


def dispatch_copier(remote: CopyContext, call: KernelCall, sizes: dispatch.DispatchSizes) -> tuple[Launch, int]:
    """Return a kernel that puts each token's row to every remote rank that has one of its experts, once, at the token's
    index.

    It takes no further argument.

    Args:
        remote: The words.
        call: The call.
        sizes: The sizes of the rows.

    Returns:
        The kernel, and its blocks.
    """
    num_local = sizes.num_experts // remote.context.buffer.num_ranks
    fixed = (*remote.arguments(call), sizes.num_topk, num_local, sizes.row_bytes, sizes.expert_slots_offset)
    variant = _rows_variant(max(_TOPK, next_power_of_2(sizes.num_topk)))
    return Launch(variant, (), fixed), max(1, min(_MOST_BLOCKS, sizes.max_tokens * remote.num_remote))


def combine_copier(remote: CopyContext, call: KernelCall, sizes: combine.CombineSizes) -> tuple[Launch, int]:
    """Return a kernel that puts the rows that this rank's experts have for each remote rank, without gaps.

    It takes `layout_range` [L, R] int64, of the handle.

    Args:
        remote: The words.
        call: The call.
        sizes: The sizes of the rows.

    Returns:
        The kernel, and its blocks.
    """
    num_local = sizes.num_experts // remote.context.buffer.num_ranks
    num_pairs = num_local * remote.num_remote
    num_shares = max(1, min(sizes.max_tokens, _MOST_BLOCKS // num_pairs))
    fixed = (*remote.arguments(call), num_local, sizes.slot_bytes, sizes.max_tokens, num_shares)
    variant = _back_variant(max(_LOCAL, next_power_of_2(num_local)))
    return Launch(variant, (None,), fixed), num_pairs * num_shares


def poster(
    remote: CopyContext, call: KernelCall, kind: int, sizes: dispatch.DispatchSizes | combine.CombineSizes | None = None
) -> tuple[Launch, int]:
    """Return a kernel that puts the words of a call to remote ranks, waits until all of it has arrived, and sets `sent`
    there.

    It takes `layout_range` [L, R] int64, of a combine's handle; otherwise any such tensor.

    Args:
        remote: The words.
        call: The call.
        kind: `BARRIER`, `DISPATCH` or `COMBINE`.
        sizes: The sizes of the rows; not used for a barrier.

    Returns:
        The kernel, and its blocks.
    """
    num_ranks = remote.context.buffer.num_ranks
    num_local = sizes.num_experts // num_ranks if sizes is not None else 0
    expert_slots_offset = sizes.expert_slots_offset if isinstance(sizes, dispatch.DispatchSizes) else 0
    slot_bytes = sizes.slot_bytes if isinstance(sizes, combine.CombineSizes) else 0
    numbers = (kind, sizes.num_topk if sizes is not None else 0, num_local, expert_slots_offset, slot_bytes)
    fixed = (*remote.arguments(call), remote.tables, *numbers)
    variant = _posts_variant(max(_LOCAL, next_power_of_2(num_local)))
    return Launch(variant, (None,), fixed), num_ranks


def prepare_all(remote: CopyContext) -> None:
    """Compile and load the kernels of this file. NVSHMEM must have been started: the memory must be there."""
    words, some = remote.arguments(KernelCall((0, 0), 16, 16, 0)), remote.context.state
    _rows_variant(_TOPK).prepare(*words, 0, 0, 0, 0)
    _back_variant(_LOCAL).prepare(some, *words, 0, 0, 0, 0)
    _posts_variant(_LOCAL).prepare(some, *words, remote.tables, BARRIER, 0, 0, 0, 0)


@functools.cache
def _rows_variant(topk: int) -> Variant:
    return Variant(_copy_rows_kernel, {"TOPK": topk}, _ROW_WARPS, library=DEVICE_LIBRARY)


@functools.cache
def _back_variant(local: int) -> Variant:
    return Variant(_copy_back_kernel, {"LOCAL": local}, _ROW_WARPS, library=DEVICE_LIBRARY)


@functools.cache
def _posts_variant(local: int) -> Variant:
    return Variant(_copy_posts_kernel, {"LOCAL": local}, num_warps=1, library=DEVICE_LIBRARY)


# Kernels -------------------------------------------------------------------------------------------------------------


@triton.jit
def _remote_rank(index, ranks_per_node, rank):
    """Return the remote rank with a number among the remote ranks."""
    return index + tl.where(index >= rank // ranks_per_node * ranks_per_node, ranks_per_node, 0)


@triton.jit
def _copy_at(copies, copy_bytes, ranks_per_node, rank, target):
    """Return where a remote rank has its copy of this rank: copies leave out the ranks of their owner's node."""
    index = rank - tl.where(rank // ranks_per_node > target // ranks_per_node, ranks_per_node, 0)
    return copies + index * copy_bytes


@jit(name="low_latency::copy_rows")
def _copy_rows_kernel(
    ll, state, ranks_mask, pes, memory: tl.int64, copies: tl.int64, copy_bytes: tl.int64, num_ranks: tl.int32,
    ranks_per_node: tl.int32, rank: tl.int32, max_experts: tl.int32, remote_set_bytes: tl.int64, num_topk: tl.int32,
    num_local: tl.int32, row_bytes: tl.int64, expert_slots_offset: tl.int64, TOPK: tl.constexpr,
):  # fmt: skip
    """Blocks share the pairs of a token and a remote rank.

    Example: two nodes of two ranks, two experts a rank, rank 0, a token with experts 1, 4 and 5: its row goes to rank
    2, once; rank 1 fetches it.
    """
    number = tl.load(ll)
    ks = tl.arange(0, TOPK)
    if is_working(state):
        offset = posted_base(memory, num_ranks, number)
        remote_offset = copy_set_offset(num_ranks, max_experts, number, remote_set_bytes)
        expert_slots = (memory + offset + expert_slots_offset).to(tl.pointer_type(tl.int32))
        num_remote = num_ranks - ranks_per_node
        num_tokens = posted_tokens(memory, num_ranks, number).to(tl.int32)
        for item in range(tl.program_id(0), num_tokens * num_remote, tl.num_programs(0)):
            target = _remote_rank(item % num_remote, ranks_per_node, rank)
            token = item // num_remote
            expert_slot = tl.load(expert_slots + token * num_topk + ks, mask=ks < num_topk, other=-1)
            is_there = (expert_slot >= 0) & ((expert_slot >> 16) // num_local == target)
            if (tl.sum(is_there.to(tl.int32)) > 0) & (tl.load(ranks_mask + target) == 0):
                row = token * row_bytes
                copy = _copy_at(copies, copy_bytes, ranks_per_node, rank, target)
                put(copy + remote_offset + row, memory + offset + row, row_bytes, tl.load(pes + target))


@jit(name="low_latency::copy_back")
def _copy_back_kernel(
    layout_range, ll, state, ranks_mask, pes, memory: tl.int64, copies: tl.int64,
    copy_bytes: tl.int64, num_ranks: tl.int32, ranks_per_node: tl.int32, rank: tl.int32, max_experts: tl.int32,
    remote_set_bytes: tl.int64, num_local: tl.int32, slot_bytes: tl.int64, max_tokens: tl.int64, num_shares: tl.int32,
    LOCAL: tl.constexpr,
):  # fmt: skip
    """Block s * pairs + j puts share s of the rows of pair j, a local expert and a remote rank.

    Example: rank 2's rows are 2 of expert 0 and 3 of expert 1. They lie apart here, and behind one another in rank 2's
    copy: expert 1's begin at its third slot.
    """
    number = tl.load(ll)
    num_remote = num_ranks - ranks_per_node
    num_pairs = num_local * num_remote
    pair = tl.program_id(0) % num_pairs
    share = tl.program_id(0) // num_pairs
    target = _remote_rank(pair % num_remote, ranks_per_node, rank)
    expert = pair // num_remote
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
            remote_offset = copy_set_offset(num_ranks, max_experts, number, remote_set_bytes)
            copy = _copy_at(copies, copy_bytes, ranks_per_node, rank, target) + remote_offset
            source = memory + offset + (first + begin) * slot_bytes
            put(copy + (before + begin) * slot_bytes, source, size, tl.load(pes + target))


@jit(name="low_latency::copy_posts")
def _copy_posts_kernel(
    layout_range, ll, state, ranks_mask, pes, memory: tl.int64, copies: tl.int64, copy_bytes: tl.int64,
    num_ranks: tl.int32, ranks_per_node: tl.int32, rank: tl.int32, max_experts: tl.int32, remote_set_bytes: tl.int64,
    tables: tl.int64, kind: tl.int32, num_topk: tl.int32, num_local: tl.int32, expert_slots_offset: tl.int64,
    slot_bytes: tl.int64, LOCAL: tl.constexpr,
):  # fmt: skip
    """Block q puts to remote rank q the table, the expert slots of a dispatch, the post, and then `sent`.

    `quiet` waits for the rows, too, which other blocks of an earlier launch have put, over queues of their own; so a
    rank that sees `sent` finds everything.

    Example: as in `_copy_back_kernel`; in the table for rank 2, its rows of expert 1 begin two slots into the set of
    its copy; a count of 0 means none.
    """
    target = tl.program_id(0)
    number = tl.load(ll)
    is_remote = target // ranks_per_node != rank // ranks_per_node
    if is_remote & is_working(state) & (tl.load(ranks_mask + target) == 0):
        pe = tl.load(pes + target)
        copy = _copy_at(copies, copy_bytes, ranks_per_node, rank, target)
        remote_offset = copy_set_offset(num_ranks, max_experts, number, remote_set_bytes)
        table_bytes = 8 * (num_local * num_ranks).to(tl.int64)
        # As offsets in a memory, so that they are the same in a copy.
        table = _offset_in(table_at(memory, num_ranks, number, max_experts), memory)
        post = _offset_in(post_at(memory, num_ranks, number), memory)
        if kind == _DISPATCH:
            num_tokens = posted_tokens(memory, num_ranks, number)
            offset = posted_base(memory, num_ranks, number)
            put(copy + table, memory + table, table_bytes, pe)
            if num_tokens > 0:
                expert_slots = memory + offset + expert_slots_offset
                put(copy + remote_offset + expert_slots_offset, expert_slots, 4 * num_tokens * num_topk, pe)
        if kind == _COMBINE:
            mine = tables + 8 * target.to(tl.int64) * max_experts
            locals_ = tl.arange(0, LOCAL)
            column = locals_ * num_ranks + target
            counts = tl.load(layout_range + column, mask=locals_ < num_local, other=0) & 0xFFFFFFFF
            starts = remote_offset + (tl.cumsum(counts, 0) - counts) * slot_bytes
            tl.store(words_at(mine) + column, tl.where(counts > 0, starts, 0), mask=locals_ < num_local)
            tl.debug_barrier()  # what one thread stored, all put
            put(copy + table, mine, table_bytes, pe)
        put(copy + post, memory + post, tl.full((), 8 * _POST_WORDS, tl.int64), pe)
        quiet()
        set_word(memory + 8 * _LINE * rank.to(tl.int64), number, pe)


@triton.jit
def _offset_in(pointer, memory):
    """Return the offset of a pointer in a memory."""
    return pointer.to(tl.int64, bitcast=True) - memory
