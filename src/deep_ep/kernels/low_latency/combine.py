"""Low-latency combine on a GPU: publish the experts' rows, then sum those of this rank's tokens.

Shape letters as in `dispatch.py`; n = R * M rows of an expert. A row that travels has `slot_bytes`: H BF16 values, and
behind them the ranges of LogFMT. FP32 accumulation, k ascending, one rounding at the end: the result does not depend on
the grid.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .._triton import Launch, Variant, jit, next_power_of_2, tl, triton
from ..exchange import is_last_block
from ..primitives import rounded, widened
from .dispatch import number_tokens, tile_of, valid_ids
from .logfmt import encode_row, store_sums, sum_rows, unit_of
from .words import (
    ARRIVED,
    MASKED,
    KernelCall,
    LowLatencyContext,
    WaitOptions,
    await_all,
    awaiting,
    free_slot,
    is_working,
    last_refusal,
    masks_of,
    memories_of,
    one_of,
    signal_all,
    slot_offset,
    some_of,
    table_at,
    use_slot,
)

_WORDS_AT_ONCE = 2048  # of 4 bytes, that a block copies
_CHANNELS_AT_ONCE = 2048  # that a block sums
_MOST_AT_ONCE = 8  # rows that a block loads before it adds the first
_SHARES = 2  # blocks that share the rows of an expert for a rank
_MOST_IDLE_BLOCKS = 64  # where no row is copied
# Most registers of a thread; 0: the compiler decides. It would sum BF16 rows with fewer, and wait for rows before it
# issues the last loads. LogFMT is bound by instructions: the more warps are there, the fewer cycles have none to issue.
_SUM_REGISTERS, _DECODE_REGISTERS, _ENCODE_REGISTERS = 64, 128, 64
_MASKED = tl.constexpr(MASKED)


class CombineSizes(NamedTuple):
    """The sizes of a combine's rows, as they travel.

    Attributes:
        hidden: H.
        num_topk: K.
        num_experts: E.
        max_tokens: M.
        slot_bytes: From one row of a slot to the next.
        ranges_offset: Where in a row the ranges of LogFMT are.
        use_logfmt: Rows are compressed.
    """

    hidden: int
    num_topk: int
    num_experts: int
    max_tokens: int
    slot_bytes: int
    ranges_offset: int
    use_logfmt: bool


def sender(
    context: LowLatencyContext,
    call: KernelCall,
    sizes: CombineSizes,
    idx_dtype: torch.dtype,
    is_copied: bool,
    is_aligned: bool,
    wait_options: WaitOptions | None,
) -> Launch:
    """Return a kernel that publishes the rows of this rank's experts, and whose last block signals; see `send`.

    It takes `x` (or any tensor), `layout_range`, `topk_idx`, `earlier`, what the wait adds to (or any tensor), the
    number of tokens, and the zero-copy tensor's slot or, where rows are copied, a bit for each slot that is leased.

    Args:
        context: The words.
        call: The call.
        sizes: The sizes of the rows.
        idx_dtype: The dtype of `topk_idx`.
        is_copied: Rows are copied from `x`; otherwise they are in the zero-copy tensor.
        is_aligned: `x` begins at a multiple of 16 bytes.
        wait_options: The last block then waits for the peers, in this way; None: it does not.
    """
    buffer = context.buffer
    word, vector = _words_of(is_aligned, sizes)
    tile = tile_of(sizes.num_topk, sizes.max_tokens)
    waits = (wait_options is not None, wait_options is not None and wait_options.stats is not None)
    variant = _send_variant(sizes, idx_dtype, is_copied, word, vector, *waits, *tile, context.num_lanes)
    fixed = (
        context.windows,
        context.state,
        buffer.state,
        buffer.num_ranks * sizes.max_tokens,
        sizes.hidden * 2 // vector,
        sizes.num_topk,
        sizes.num_experts,
        buffer.num_ranks,
        buffer.rank,
        context.max_experts,
        sizes.slot_bytes // 16,
        sizes.ranges_offset,
        *call.agreement,
        call.region_bytes,
        *awaiting(context, call, wait_options is not None and wait_options.can_mask),
    )
    return Launch(variant, (word if is_copied else None, *(None,) * 6), fixed)


def num_send_blocks(sizes: CombineSizes, is_copied: bool) -> int:
    """Return the number of blocks of a send."""
    if not is_copied:
        return min(sizes.num_experts, _MOST_IDLE_BLOCKS)
    # On average. A block that has nothing to do still has to count as done.
    num_rows_of_a_pair = sizes.max_tokens * sizes.num_topk // sizes.num_experts
    return sizes.num_experts * (_SHARES if num_rows_of_a_pair >= _SHARES else 1)


@functools.cache
def _send_variant(
    sizes: CombineSizes,
    idx_dtype: torch.dtype,
    is_copied: bool,
    word: torch.dtype,
    vector: int,
    waits: bool,
    has_stats: bool,
    topk: int,
    tokens: int,
    lanes: int,
) -> Variant:
    del idx_dtype  # another type is another variant
    constants = {
        "IS_COPIED": is_copied,
        "USE_LOGFMT": sizes.use_logfmt,
        "UNIT": unit_of(sizes.hidden),
        "VECTOR": vector,
        "BLOCK": min(_WORDS_AT_ONCE * 4 // word.itemsize, next_power_of_2(sizes.hidden * 2 // word.itemsize)),
        "WAITS": waits,
        "HAS_STATS": has_stats,
        "TOPK": topk,
        "TOKENS": tokens,
        # The condition of a wait's loop must be one value for a warp: no fewer lanes than it has.
        "LANES": max(32, lanes) if waits else lanes,
    }
    is_usual = is_copied and sizes.use_logfmt and vector == 16
    return Variant(_send_kernel, constants, 4, _ENCODE_REGISTERS if is_usual else 0)


def _words_of(is_aligned: bool, sizes: CombineSizes) -> tuple[torch.dtype, int]:
    """Return what rows are read in: a type, and the bytes of a vector. LogFMT reads four channels of whole groups."""
    whole = 128 if sizes.use_logfmt else 8
    if sizes.hidden % whole or not is_aligned:
        return torch.int16, 2
    return (torch.int64 if sizes.use_logfmt else torch.int32), 16


@jit(name="low_latency::combine")
def _send_kernel(
    x,
    layout_range,
    topk_idx,
    earlier,
    stats,
    num_tokens: tl.int32,
    slot: tl.int32,
    windows,
    ll,
    state,
    num_rows: tl.int32,
    row_vectors: tl.int32,
    num_topk: tl.int32,
    num_experts: tl.int32,
    num_ranks: tl.int32,
    rank: tl.int32,
    max_experts: tl.int32,
    slot_lines: tl.int32,
    ranges_offset: tl.int32,
    word_a: tl.int64,
    word_b: tl.int64,
    region_bytes: tl.int64,
    ranks_mask,
    seen,
    ll_host,
    boards,
    own_boards,
    host,
    limit_ns: tl.int64,
    operation: tl.int32,
    can_mask: tl.int32,
    IS_COPIED: tl.constexpr,
    USE_LOGFMT: tl.constexpr,
    UNIT: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    WAITS: tl.constexpr,
    HAS_STATS: tl.constexpr,
    TOPK: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Pairs of a local expert and a rank are shared by the blocks, and so are this rank's own tokens.

    Example: the range of pair (expert 1, rank 0) is rows 5 and 6 of 16: rows 21 and 22 of the slot are theirs, and the
    table says where row 21 is.
    """
    number = tl.load(ll) + 1
    memories = memories_of(windows, num_ranks, LANES)
    masks, refused = masks_of(ranks_mask, num_ranks, LANES), last_refusal(ll, number)
    taken = free_slot(ll, slot) if IS_COPIED else slot
    if is_working(state):
        memory = one_of(memories, rank, LANES)
        offset = slot_offset(num_ranks, max_experts, taken, region_bytes)
        table = table_at(memory, num_ranks, number, max_experts)
        block = tl.program_id(0)
        share = block // num_experts  # of a pair's rows, where several blocks share them
        num_shares = tl.maximum(tl.num_programs(0) // num_experts, 1)
        for pair in range(block % num_experts, num_experts, tl.minimum(tl.num_programs(0), num_experts)):
            rows = tl.load(layout_range + pair)
            first = (pair // num_ranks) * num_rows + (rows >> 32)
            if share == 0:
                start = offset + first * slot_lines * 16
                tl.store(table + pair, tl.where((rows & 0xFFFFFFFF) > 0, start, 0))
            if IS_COPIED:
                last = first + (rows & 0xFFFFFFFF)
                slots = memory + offset
                if USE_LOGFMT:
                    hidden = row_vectors * (VECTOR // 2)
                    row_words = row_vectors * (VECTOR // (x.dtype.element_ty.primitive_bitwidth // 8))
                    for row in range(first + share, last, num_shares):
                        source = tl.multiple_of(x + row * row_words, VECTOR)
                        encode_row(source, slots + row * slot_lines * 16, hidden, ranges_offset, UNIT)
                else:
                    _copy_rows(x, slots, first + share, last, num_shares, row_vectors, slot_lines, VECTOR, BLOCK)
        # From the last block on: those beyond the pairs have nothing else to do.
        for expert in range(tl.num_programs(0) - 1 - block, num_experts, tl.num_programs(0)):
            number_tokens(topk_idx, earlier, expert, num_tokens, num_topk, num_experts, False, TOPK, TOKENS)
        if is_last_block(ll + ARRIVED):
            use_slot(ll, taken, number)
            signal_all(memories, ll, masks, refused, number, num_ranks, rank, word_a, word_b, num_tokens, offset, LANES)
            if WAITS:
                await_all(
                    memories, ll, state, ranks_mask, refused, seen, ll_host, stats, boards, own_boards, host, limit_ns,
                    operation, can_mask, num_ranks, rank, number, word_a, word_b, HAS_STATS, LANES,
                )  # fmt: skip


@triton.jit
def _copy_rows(
    x, slots, first, last, step, row_vectors, slot_lines, VECTOR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy every so many rows of a pair: those of this block."""
    WORD_BYTES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    row_words = row_vectors * (VECTOR // WORD_BYTES)
    for row in range(first, last, step):
        source = tl.multiple_of(x + row * row_words, VECTOR)
        target = tl.multiple_of((slots + row * slot_lines * 16).to(x.dtype), 16)
        for start in range(0, row_words, BLOCK):
            words = start + tl.arange(0, BLOCK)
            values = tl.load(source + words, mask=words < row_words, other=0)
            tl.store(target + words, values, mask=words < row_words)


# Receive -------------------------------------------------------------------------------------------------------------


def receiver(
    context: LowLatencyContext, sizes: CombineSizes, idx_dtype: torch.dtype, is_aligned: bool, can_mask: bool = False
) -> tuple[Launch, int]:
    """Return a kernel that sums each token's rows, see `receive`, and its blocks for one token.

    It takes `out`, `topk_idx`, `topk_weights`, `earlier` and the age of the call: how many calls this rank has sent
    since.

    Args:
        context: The words.
        sizes: The sizes of the rows.
        idx_dtype: The dtype of `topk_idx`.
        is_aligned: `out` begins at a multiple of 16 bytes.
        can_mask: Mask a rank that has no row where one is wanted.
    """
    buffer, whole = context.buffer, 8 if sizes.hidden % 8 == 0 else 1
    variant, num_pieces = _receive_variant(sizes, idx_dtype, is_aligned and whole > 1, context.num_lanes)
    fixed = (
        context.windows,
        context.state,
        context.mask,
        buffer.state,
        sizes.hidden // whole,
        sizes.num_topk,
        sizes.num_experts // buffer.num_ranks,
        buffer.num_ranks,
        buffer.rank,
        context.max_experts,
        sizes.slot_bytes // 16,
        sizes.ranges_offset,
        int(can_mask),
    )
    return Launch(variant, (None,) * 5, fixed), num_pieces


@functools.cache
def _receive_variant(sizes: CombineSizes, idx_dtype: torch.dtype, is_aligned: bool, lanes: int) -> tuple[Variant, int]:
    """The kernel, and the pieces that it cuts a row into."""
    del idx_dtype  # another type is another variant
    hidden = sizes.hidden
    block = unit_of(hidden) if sizes.use_logfmt else min(_CHANNELS_AT_ONCE, next_power_of_2(hidden))
    constants = {
        "USE_LOGFMT": sizes.use_logfmt,
        "WHOLE": 8 if hidden % 8 == 0 else 1,
        "VECTOR": 16 if is_aligned else 2,
        "BLOCK": block,
        "AT_ONCE": min(_MOST_AT_ONCE, next_power_of_2(max(1, sizes.num_topk))),
        "TOPK": next_power_of_2(max(1, sizes.num_topk)),
        "LANES": lanes,
    }
    # A warp that decodes has a unit for itself, and needs no other warp to know whether it is compressed.
    num_warps = 1 if sizes.use_logfmt else max(1, min(16, block // 256))
    num_registers = _SUM_REGISTERS
    if sizes.use_logfmt:  # in a loop over more rows they would not suffice
        num_registers = _DECODE_REGISTERS if sizes.num_topk <= _MOST_AT_ONCE else 0
    return Variant(_receive_kernel, constants, num_warps, num_registers), -(-hidden // block)


@jit(name="low_latency::combine")
def _receive_kernel(
    out,
    topk_idx,
    topk_weights,
    earlier,
    age: tl.int32,
    windows,
    ll,
    ranks_mask,
    state,
    row_vectors: tl.int32,
    num_topk: tl.int32,
    num_local: tl.int32,
    num_ranks: tl.int32,
    rank: tl.int32,
    max_experts: tl.int32,
    slot_lines: tl.int32,
    ranges_offset: tl.int32,
    can_mask: tl.int32,
    USE_LOGFMT: tl.constexpr,
    WHOLE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    TOPK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Block t * pieces + c sums piece c of token t.

    Example: experts `[1, 0]`, weights `[0.5, 2]`, rows `[4, 8]` of expert 1 and `[1, 1]` of expert 0: out is `[4, 6]`.
    """
    hidden = row_vectors * WHOLE
    num_pieces = tl.cdiv(hidden, BLOCK)
    token = tl.program_id(0) // num_pieces
    first_channel = (tl.program_id(0) % num_pieces) * BLOCK
    channels = first_channel + tl.arange(0, BLOCK)
    ks = tl.arange(0, TOPK)
    lanes = tl.arange(0, LANES)
    number = tl.load(ll) - age
    memories = memories_of(windows, num_ranks, LANES)
    is_masked = tl.load(ranks_mask + lanes, mask=lanes < num_ranks, other=1)
    ids = valid_ids(topk_idx, token * num_topk + ks, ks < num_topk, num_local * num_ranks)
    index = tl.load(earlier + token * num_topk + ks, mask=ks < num_topk, other=0)
    weights = tl.load(topk_weights + token * num_topk + ks, mask=ks < num_topk, other=0.0)
    if is_working(state):
        peer = tl.where(ids >= 0, ids // num_local, 0)
        is_there = (ids >= 0) & (some_of(is_masked, peer, LANES) == 0)
        memory = some_of(memories, peer, LANES)
        pair = (ids - peer * num_local) * num_ranks + rank
        start = tl.load(table_at(memory, num_ranks, number, max_experts) + pair, mask=is_there, other=0)
        # A rank that had masked this one at the dispatch has no rows for it, so this rank masks it, and publishes that.
        if can_mask != 0:
            tl.store(ranks_mask + peer, _MASKED, mask=is_there & (start == 0))
        is_there = is_there & (start != 0)
        rows = tl.where(is_there, memory + start + tl.cast(index, tl.int64) * slot_lines * 16, 0)
        weights = tl.where(is_there, weights, 0.0)
        target = tl.multiple_of(out + tl.cast(token, tl.int64) * hidden, VECTOR)
        if USE_LOGFMT:
            sums = sum_rows(rows, weights, num_topk, first_channel, hidden, ranges_offset, BLOCK, WHOLE, AT_ONCE)
            store_sums(target, first_channel, hidden, sums, VECTOR == 16, BLOCK)
        else:
            total = tl.zeros([BLOCK], tl.float32)
            if AT_ONCE >= TOPK:  # without a loop, across which the compiler would not issue loads early
                total = _add_rows(total, rows, weights, 0, channels, hidden, AT_ONCE)
            else:
                for start in range(0, num_topk, AT_ONCE):
                    total = _add_rows(total, rows, weights, start, channels, hidden, AT_ONCE)
            tl.store(target + channels, rounded(total, tl.bfloat16), mask=channels < hidden)


@triton.jit
def _add_rows(total, rows, weights, start, channels, hidden, AT_ONCE: tl.constexpr):
    """Add some rows, from the `start`-th on and in order. All loads are issued before any of them is waited for."""
    ks = tl.arange(0, rows.shape[0])
    values = ()
    for turn in tl.static_range(AT_ONCE):
        row = tl.sum(tl.where(ks == start + turn, rows, 0))
        pointer = tl.multiple_of(row.to(tl.pointer_type(tl.bfloat16)), 16)
        mask = channels < tl.where(row != 0, hidden, 0)
        values = values + (tl.load(pointer + channels, mask=mask, other=0.0),)  # type: ignore[assignment]
    for turn in tl.static_range(AT_ONCE):
        # Where there is no row, 0 times 0: an infinite weight of a masked expert must not reach the sum.
        weight = tl.sum(tl.where(ks == start + turn, weights, 0.0))
        total += weight * widened(values[turn], tl.float32)
    return total
