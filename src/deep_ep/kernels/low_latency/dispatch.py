"""Low-latency dispatch on a GPU: cast and publish rows, then fetch those of this rank's experts.

Shape letters: T tokens, M the most of a rank, K selections of a token, R ranks, E experts, L = E / R, H channels, G
groups of 128 channels, S scales of a received row.

An *expert slot* is `expert << 16 | n` for a selection, where n earlier tokens of the same rank chose that expert; -1:
the selection does not count. Together with the counts of the ranks before, it determines where a row goes. The CPU's
twin is `engine/low_latency/cpu/dispatch.py`, with `rows.py` beside this file.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch

from .._triton import Launch, Variant, jit, next_power_of_2, tl, triton
from ..exchange import is_last_block
from ..primitives import to_fp8, widened
from .words import (
    ARRIVED,
    KernelCall,
    LowLatencyContext,
    WaitOptions,
    await_all,
    awaiting,
    copy_set_offset,
    free_slot,
    is_working,
    last_refusal,
    masks_of,
    memories_of,
    offset_of_set,
    one_of,
    posted_base,
    posted_tokens,
    signal_all,
    slot_offset,
    table_at,
    use_slot,
)

GROUP = 128
_GROUP = tl.constexpr(GROUP)
_FP8_MAX = tl.constexpr(448.0)
_AMAX_FLOOR = tl.constexpr(1e-4)
_MOST_GROUPS = 32  # of a row that a block casts at once
_MOST_CELLS = 2048  # selections that a block processes together
_MOST_NUMBERING_BLOCKS = 64  # beyond those that have a token; each signals its end, so fewer are quicker
_SEND_WARPS = 8
_WORDS_AT_ONCE = 2048  # of 4 bytes, that a block fetches


class DispatchSizes(NamedTuple):
    """The sizes of a dispatch's rows, as they travel.

    Attributes:
        hidden: H.
        num_topk: K.
        num_experts: E.
        max_tokens: M.
        row_bytes: From one row of a set to the next.
        scales_offset: Where the scales are in a row.
        expert_slots_offset: Where the expert slots are in a set, [T, K] int32.
        use_fp8: Rows are FP8; otherwise BF16.
        round_scale: Scales are powers of two.
    """

    hidden: int
    num_topk: int
    num_experts: int
    max_tokens: int
    row_bytes: int
    scales_offset: int
    expert_slots_offset: int
    use_fp8: bool
    round_scale: bool


def sender(
    context: LowLatencyContext,
    call: KernelCall,
    sizes: DispatchSizes,
    idx_dtype: torch.dtype,
    is_aligned: bool,
    wait_options: WaitOptions | None,
) -> Launch:
    """Return a kernel that publishes a rank's rows, and whose last block signals; see `send`.

    It takes `x`, `topk_idx`, what the wait adds to (or any tensor), the number of tokens, and a bit for each slot that
    is leased.

    Args:
        context: The words.
        call: The call.
        sizes: The sizes of the rows.
        idx_dtype: The dtype of `topk_idx`.
        is_aligned: `x` begins at a multiple of 16 bytes.
        wait_options: The last block then waits for the peers, in this way; None: it does not.
    """
    buffer = context.buffer
    whole = _whole(sizes)
    waits = (wait_options is not None, wait_options is not None and wait_options.stats is not None)
    tile = tile_of(sizes.num_topk, sizes.max_tokens)
    is_wide = call.takes_slot
    variant = _send_variant(sizes, idx_dtype, is_aligned and whole > 1, is_wide, *waits, *tile, context.num_lanes)
    fixed = (
        context.windows,
        context.state,
        buffer.state,
        sizes.hidden // whole,
        sizes.num_topk,
        sizes.num_experts,
        buffer.num_ranks,
        buffer.rank,
        context.max_experts,
        sizes.row_bytes // 16,
        sizes.scales_offset,
        sizes.expert_slots_offset,
        *call.kernel_args,
        *awaiting(context, call, wait_options is not None and wait_options.can_mask),
    )
    return Launch(variant, (None,) * 5, fixed)


def num_send_blocks(sizes: DispatchSizes, num_tokens: int) -> int:
    """Return the number of blocks of a send."""
    return num_tokens + min(_MOST_NUMBERING_BLOCKS, sizes.num_experts)


def _whole(sizes: DispatchSizes) -> int:
    """Return the channels of a vector."""
    return 8 if sizes.hidden % 8 == 0 else 1


@functools.cache
def _send_variant(
    sizes: DispatchSizes,
    idx_dtype: torch.dtype,
    is_aligned: bool,
    is_wide: bool,
    waits: bool,
    has_stats: bool,
    topk: int,
    tokens: int,
    lanes: int,
) -> Variant:
    del idx_dtype  # another type is another variant
    constants = {
        "USE_FP8": sizes.use_fp8,
        "ROUND": sizes.round_scale,
        "VECTOR": 16 if is_aligned else 2,
        "WHOLE": _whole(sizes),
        "GROUPS": min(_MOST_GROUPS, next_power_of_2(-(-sizes.hidden // GROUP))),
        "IS_WIDE": is_wide,
        "WAITS": waits,
        "HAS_STATS": has_stats,
        "TOPK": topk,
        "TOKENS": tokens,
        # The condition of a wait's loop must be one value for a warp: no fewer lanes than it has.
        "LANES": max(32, lanes) if waits else lanes,
    }
    return Variant(_send_kernel, constants, num_warps=_SEND_WARPS)


@functools.cache
def tile_of(num_topk: int, max_tokens: int) -> tuple[int, int]:
    """Return the selections of a token, and the tokens, that are processed together; powers of two.

    They depend on the most tokens, not on those of the call: decoding must not compile a kernel because a batch is
    smaller.
    """
    topk = next_power_of_2(max(1, num_topk))
    return topk, max(1, min(next_power_of_2(max_tokens), _MOST_CELLS // topk))


@jit(name="low_latency::dispatch")
def _send_kernel(
    x,
    topk_idx,
    stats,
    num_tokens: tl.int32,
    leased: tl.int32,
    windows,
    ll,
    state,
    row_vectors: tl.int32,
    num_topk: tl.int32,
    num_experts: tl.int32,
    num_ranks: tl.int32,
    rank: tl.int32,
    max_experts: tl.int32,
    row_lines: tl.int32,
    scales_offset: tl.int32,
    expert_slots_offset: tl.int64,
    word_a: tl.int64,
    word_b: tl.int64,
    region_bytes: tl.int64,
    set_bytes: tl.int64,
    ranks_mask,
    seen,
    ll_host,
    boards,
    own_boards,
    host,
    limit_ns: tl.int64,
    operation: tl.int32,
    can_mask: tl.int32,
    USE_FP8: tl.constexpr,
    ROUND: tl.constexpr,
    VECTOR: tl.constexpr,
    WHOLE: tl.constexpr,
    GROUPS: tl.constexpr,
    IS_WIDE: tl.constexpr,
    WAITS: tl.constexpr,
    HAS_STATS: tl.constexpr,
    TOPK: tl.constexpr,
    TOKENS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Block t publishes token t; the blocks beyond the tokens share the experts, whose tokens they number.

    Example: tokens with experts `[3, 1]`, `[1, -1]`, `[3, 3]`: expert slots are `[3<<16, 1<<16]`, `[1<<16|1, -1]`,
    `[3<<16|1, -1]`; the counts are 2 of expert 1 and 2 of expert 3.
    """
    number = tl.load(ll) + 1
    memories = memories_of(windows, num_ranks, LANES)
    masks, refused = masks_of(ranks_mask, num_ranks, LANES), last_refusal(ll, number)
    slot = free_slot(ll, leased) if IS_WIDE else 0
    if is_working(state):
        memory = one_of(memories, rank, LANES)
        if IS_WIDE:
            offset = slot_offset(num_ranks, max_experts, slot, region_bytes)
        else:
            offset = offset_of_set(num_ranks, max_experts, number, region_bytes, set_bytes)
        expert_slots = (memory + offset + expert_slots_offset).to(tl.pointer_type(tl.int32))
        hidden = row_vectors * WHOLE
        token = tl.program_id(0)
        if token < num_tokens:
            source = tl.multiple_of(x + tl.cast(token, tl.int64) * hidden, VECTOR)
            row = memory + offset + tl.cast(token, tl.int64) * row_lines * 16
            if USE_FP8:
                _cast_row(source, row, hidden, scales_offset, ROUND, GROUPS)
            else:
                _copy_row(source, row, hidden, GROUPS)
            _drop_selections(topk_idx, expert_slots, token, num_topk, num_experts, TOPK)
        table = table_at(memory, num_ranks, number, max_experts)
        if token >= num_tokens:
            for expert in range(token - num_tokens, num_experts, tl.num_programs(0) - num_tokens):
                count = number_tokens(
                    topk_idx, expert_slots, expert, num_tokens, num_topk, num_experts, True, TOPK, TOKENS
                )
                tl.store(table + expert, count.to(tl.int64))
        if is_last_block(ll + ARRIVED):
            if IS_WIDE:
                use_slot(ll, slot, number)
            signal_all(memories, ll, masks, refused, number, num_ranks, rank, word_a, word_b, num_tokens, offset, LANES)
            if WAITS:
                await_all(
                    memories, ll, state, ranks_mask, refused, seen, ll_host, stats, boards, own_boards, host, limit_ns,
                    operation, can_mask, num_ranks, rank, number, word_a, word_b, HAS_STATS, LANES,
                )  # fmt: skip


@triton.jit
def _cast_row(source, row, hidden, scales_offset, ROUND: tl.constexpr, GROUPS: tl.constexpr):
    """Cast one row to FP8, group by group. To the bit what `quant.cast_fp8` makes of it."""
    target = tl.multiple_of(row.to(tl.pointer_type(tl.float8e4nv)), 16)
    scales = (row + scales_offset).to(tl.pointer_type(tl.float32))
    num_groups = tl.cdiv(hidden, _GROUP)
    for first in range(0, num_groups, GROUPS):
        groups = first + tl.arange(0, GROUPS)
        channels = groups[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        values = widened(tl.load(source + channels, mask=channels < hidden, other=0.0), tl.float32)
        magnitudes = tl.where(values == values, tl.abs(values), 0.0)  # a NaN must not spoil its neighbours' scale
        amax = tl.maximum(tl.max(magnitudes, 1), _AMAX_FLOOR)
        inverse = amax * (1.0 / _FP8_MAX)
        if ROUND:
            bits = inverse.to(tl.int32, bitcast=True)
            exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
            inverse = (exponent << 23).to(tl.float32, bitcast=True)
            scale = (tl.maximum(254 - exponent, 0) << 23).to(tl.float32, bitcast=True)
        else:
            scale = tl.div_rn(tl.full([GROUPS], _FP8_MAX, tl.float32), amax)
        scaled = values * scale[:, None]
        clamped = tl.minimum(tl.maximum(scaled, -_FP8_MAX), _FP8_MAX)
        result = tl.where(scaled == scaled, clamped, scaled)
        tl.store(target + channels, to_fp8(result), mask=channels < hidden)
        tl.store(scales + groups, inverse, mask=groups < num_groups)


@triton.jit
def _copy_row(source, row, hidden, GROUPS: tl.constexpr):
    """Copy one row without a cast."""
    target = tl.multiple_of(row.to(source.dtype), 16)
    for first in range(0, hidden, GROUPS * _GROUP):
        channels = first + tl.arange(0, GROUPS * _GROUP)
        tl.store(target + channels, tl.load(source + channels, mask=channels < hidden), mask=channels < hidden)


@triton.jit
def valid_ids(topk_idx, cells, is_cell, num_experts):
    """Experts at cells of [T, K], int32; -1 where there is none."""
    ids = tl.load(topk_idx + cells, mask=is_cell, other=-1)
    return tl.where((ids >= 0) & (ids < num_experts), ids, -1).to(tl.int32)


@triton.jit
def number_tokens(
    topk_idx, numbers, expert, num_tokens, num_topk, num_experts, WITH_EXPERT: tl.constexpr, TOPK: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    """Write, for each selection of an expert, how many earlier tokens have it. Returns how many tokens have it.

    Args:
        topk_idx: [T, K].
        numbers: [T, K] int32, written where `topk_idx` is the expert.
        expert: The expert.
        num_tokens: T.
        num_topk: K.
        num_experts: E.
        WITH_EXPERT: Write expert slots, for the first selection of a token only; otherwise plain numbers.
        TOPK: K, or the next power of two.
        TOKENS: Tokens that are processed together.
    """
    total = tl.zeros((), tl.int32)
    ks = tl.arange(0, TOPK)[None, :]
    for first in range(0, num_tokens, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        cells = tokens[:, None] * num_topk + ks
        is_cell = (tokens < num_tokens)[:, None] & (ks < num_topk)
        is_chosen = valid_ids(topk_idx, cells, is_cell, num_experts) == expert
        has = tl.max(is_chosen.to(tl.int32), 1)
        earlier = (total + tl.cumsum(has, 0) - has)[:, None] + tl.zeros([TOKENS, TOPK], tl.int32)
        if WITH_EXPERT:
            is_first = is_chosen & (tl.cumsum(is_chosen.to(tl.int32), 1) == 1)
            tl.store(numbers + cells, tl.where(is_first, (expert << 16) | earlier, -1), mask=is_chosen)
        else:
            tl.store(numbers + cells, earlier, mask=is_chosen)
        total += tl.sum(has)
    return total


@triton.jit
def _drop_selections(topk_idx, expert_slots, token, num_topk, num_experts, TOPK: tl.constexpr):
    """Write -1 for selections of a token that are not experts."""
    cells = token * num_topk + tl.arange(0, TOPK)
    is_cell = tl.arange(0, TOPK) < num_topk
    ids = valid_ids(topk_idx, cells, is_cell, num_experts)
    tl.store(expert_slots + cells, tl.full([TOPK], -1, tl.int32), mask=is_cell & (ids < 0))


# Receive -------------------------------------------------------------------------------------------------------------


def receiver(
    context: LowLatencyContext, call: KernelCall, sizes: DispatchSizes, scale_dtype: torch.dtype | None, has_stats: bool
) -> Launch:
    """Return a kernel that fetches the rows of this rank's experts.

    It takes what `receive` writes, with any tensor for those that there are not, and the age of the call: how many
    calls this rank has sent since.

    Args:
        context: The words.
        call: The call.
        sizes: The sizes of the rows.
        scale_dtype: Of the scales; None: there are none.
        has_stats: Counts are added to a tensor.
    """
    buffer = context.buffer
    has_remote = call.copy_set_bytes > 0
    variant, word, num_vectors = _receive_variant(
        sizes, scale_dtype, has_stats, has_remote, call.takes_slot, context.num_lanes
    )
    fixed: tuple[torch.Tensor | int, ...] = (
        context.windows,
        context.state,
        context.mask,
        buffer.state,
        sizes.max_tokens,
        num_vectors,
        sizes.num_topk,
        sizes.num_experts // buffer.num_ranks,
        buffer.num_ranks,
        buffer.rank,
        context.max_experts,
        sizes.row_bytes // 16,
        sizes.scales_offset,
        sizes.expert_slots_offset,
        -(-sizes.hidden // GROUP),
        *call.kernel_args[2:],
        buffer.ranks_per_node,
        call.copy_set_bytes,
    )
    return Launch(variant, (word, None, None, None, None, None, None), fixed)


def num_receive_blocks(sizes: DispatchSizes, num_ranks: int) -> int:
    """Return the number of blocks of a receive."""
    return num_ranks * sizes.max_tokens + sizes.num_experts // num_ranks


@functools.cache
def _receive_variant(
    sizes: DispatchSizes, scale_dtype: torch.dtype | None, has_stats: bool, has_remote: bool, is_wide: bool, lanes: int
) -> tuple[Variant, torch.dtype, int]:
    """Return the kernel, the words that it moves rows in, and the vectors of a row."""
    used_bytes = sizes.hidden * (1 if sizes.use_fp8 else 2)
    word = torch.int32 if used_bytes % 4 == 0 else torch.int8
    vector = 16 if used_bytes % 16 == 0 else word.itemsize
    constants = {
        "HAS_SCALES": scale_dtype is not None,
        "HAS_STATS": has_stats,
        "HAS_REMOTE": has_remote,
        "IS_WIDE": is_wide,
        "VECTOR": vector,
        "BLOCK": min(_WORDS_AT_ONCE * 4 // word.itemsize, next_power_of_2(used_bytes // word.itemsize)),
        "GROUPS": next_power_of_2(-(-sizes.hidden // (4 * GROUP)) * 4),
        "TOPK": next_power_of_2(max(1, sizes.num_topk)),
        "LANES": lanes,
    }
    return Variant(_receive_kernel, constants, num_warps=4), word, used_bytes // vector


@jit(name="low_latency::dispatch")
def _receive_kernel(
    x,
    scales,
    count,
    src_info,
    layout_range,
    stats,
    age: tl.int32,
    windows,
    ll,
    ranks_mask,
    state,
    max_tokens: tl.int32,
    row_vectors: tl.int32,
    num_topk: tl.int32,
    num_local: tl.int32,
    num_ranks: tl.int32,
    rank: tl.int32,
    max_experts: tl.int32,
    row_lines: tl.int32,
    scales_offset: tl.int32,
    expert_slots_offset: tl.int64,
    num_groups: tl.int32,
    region_bytes: tl.int64,
    set_bytes: tl.int64,
    ranks_per_node: tl.int32,
    copy_set_bytes: tl.int64,
    HAS_SCALES: tl.constexpr,
    HAS_STATS: tl.constexpr,
    HAS_REMOTE: tl.constexpr,
    IS_WIDE: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUPS: tl.constexpr,
    TOPK: tl.constexpr,
    LANES: tl.constexpr,
):
    """The first L blocks write the counts, block L + p * M + t fetches token t of rank p.

    Example: expert 0 has 2 tokens of rank 0 and 1 of rank 1: its rows 0 and 1 are rank 0's, row 2 is rank 1's.

    With `HAS_REMOTE` ranks of other nodes are read in copies, whose sets are smaller.
    """
    number = tl.load(ll) - age
    memories = memories_of(windows, num_ranks, LANES)
    lanes = tl.arange(0, LANES)
    is_masked = tl.load(ranks_mask + lanes, mask=lanes < num_ranks, other=1)
    if is_working(state):
        item = tl.program_id(0) - num_local
        if item < 0:
            _write_layout(
                count, layout_range, stats, memories, is_masked, tl.program_id(0), num_local, num_ranks, rank,
                max_experts, number, HAS_STATS, LANES,
            )  # fmt: skip
        else:
            source = item % num_ranks  # neighbours fetch from different ranks
            token = item // num_ranks
            if IS_WIDE:
                offset = posted_base(one_of(memories, source, LANES), num_ranks, number)
            else:
                offset = offset_of_set(num_ranks, max_experts, number, region_bytes, set_bytes)
            if HAS_REMOTE:
                is_remote = source // ranks_per_node != rank // ranks_per_node
                offset = tl.where(is_remote, copy_set_offset(num_ranks, max_experts, number, copy_set_bytes), offset)
            _fetch_row(
                x, scales, src_info, memories, is_masked, offset, source, token, max_tokens, row_vectors, num_topk,
                num_local, num_ranks, rank, max_experts, number, row_lines, scales_offset, expert_slots_offset,
                num_groups, HAS_SCALES, VECTOR, BLOCK, GROUPS, TOPK, LANES,
            )  # fmt: skip


@triton.jit
def _write_layout(
    count, layout_range, stats, memories, is_masked, expert, num_local, num_ranks, rank, max_experts, number,
    HAS_STATS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write how many rows of one expert come from each rank, and where they begin."""
    lanes = tl.arange(0, LANES)
    tables = table_at(memories, num_ranks, number, max_experts)
    counts = tl.load(tables + rank * num_local + expert, mask=is_masked == 0, other=0)
    ends = tl.cumsum(counts, 0)
    tl.store(layout_range + expert * num_ranks + lanes, counts | ((ends - counts) << 32), mask=lanes < num_ranks)
    total = tl.sum(counts).to(tl.int32)
    tl.store(count + expert, total)
    if HAS_STATS:
        tl.store(stats + expert, tl.load(stats + expert) + total)


@triton.jit
def _fetch_row(
    x, scales, src_info, memories, is_masked, offset, source, token, max_tokens, row_vectors, num_topk, num_local,
    num_ranks, rank, max_experts, number, row_lines, scales_offset, expert_slots_offset, num_groups,
    HAS_SCALES: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, GROUPS: tl.constexpr, TOPK: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Read a token's row once, and write it to each of its experts here."""
    WORD_BYTES: tl.constexpr = x.dtype.element_ty.primitive_bitwidth // 8
    ks = tl.arange(0, TOPK)
    lanes = tl.arange(0, LANES)
    # To hide latency, all loads that do not depend on another are issued at once. What a rank without this
    # token has at its index is not used.
    memory = one_of(memories, source, LANES)
    begin = memory + offset
    cells = (begin + expert_slots_offset).to(tl.pointer_type(tl.int32)) + token * num_topk + ks
    expert_slot = tl.load(cells, mask=ks < num_topk, other=-1)
    num_tokens = tl.where(one_of(is_masked, source, LANES) == 0, posted_tokens(memory, num_ranks, number), 0)
    expert = expert_slot >> 16
    local = expert - rank * num_local
    is_mine = (expert_slot >= 0) & (local >= 0) & (local < num_local) & (token + ks * 0 < num_tokens)
    if tl.sum(is_mine.to(tl.int32)) > 0:
        row = begin + tl.cast(token, tl.int64) * row_lines * 16
        row_words = row_vectors * (VECTOR // WORD_BYTES)
        words_of_row = tl.multiple_of(row.to(x.dtype), VECTOR)
        words = tl.arange(0, BLOCK)
        piece = tl.load(words_of_row + words, mask=words < row_words, other=0)
        # Rows of the ranks before come first.
        is_before = (lanes < source) & (is_masked == 0)
        tables = table_at(memories, num_ranks, number, max_experts)
        is_cell = is_mine[:, None] & is_before[None, :]
        before = tl.sum(tl.load(tables[None, :] + expert[:, None], mask=is_cell, other=0), 1).to(tl.int32)
        num_rows = num_ranks * max_tokens
        index = before + (expert_slot & 0xFFFF)
        rows = tl.cast(local, tl.int64) * num_rows + index
        tl.store(src_info + rows, token, mask=is_mine)
        for first in range(0, row_words, BLOCK):
            words = first + tl.arange(0, BLOCK)
            following = words + BLOCK
            next_piece = tl.load(words_of_row + following, mask=following < row_words, other=0)
            for k in range(num_topk):
                target = tl.sum(tl.where((ks == k) & is_mine, rows + 1, 0)) - 1
                if target >= 0:
                    pointer = tl.multiple_of(x + target * row_words, VECTOR)
                    tl.store(pointer + words, piece, mask=words < row_words)
            piece = next_piece
        if HAS_SCALES:
            _fetch_scales(scales, row + scales_offset, local, index, is_mine, num_rows, num_groups, GROUPS)


@triton.jit
def _fetch_scales(scales, row, local, index, is_mine, num_rows, num_groups, GROUPS: tl.constexpr):
    """Write a row's scales to each of its experts: in columns, as they are or as exponents, four to a word."""
    source = row.to(tl.pointer_type(tl.float32))
    if scales.dtype.element_ty == tl.int32:
        groups = tl.arange(0, GROUPS)
        bits = tl.load(source + groups, mask=groups < num_groups, other=0.0).to(tl.int32, bitcast=True)
        byte = ((bits >> 23) & 0xFF) << ((groups % 4) * 8)
        value = tl.sum(tl.reshape(byte, [GROUPS // 4, 4]), 1)
        num_scales = tl.cdiv(num_groups, 4)
        columns = tl.arange(0, GROUPS // 4)
    else:
        columns = tl.arange(0, GROUPS)
        value = tl.load(source + columns, mask=columns < num_groups, other=0.0)
        num_scales = num_groups
    start = tl.cast(local, tl.int64) * num_scales * num_rows + index
    cells = scales + start[:, None] + tl.cast(columns, tl.int64)[None, :] * num_rows
    tl.store(cells, value[None, :], mask=is_mine[:, None] & (columns < num_scales)[None, :])
