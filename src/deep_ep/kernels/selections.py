"""Moving a row for each selection of a token, straight between its place in an expanded result and the token. On the
device.

Shape letters: T tokens of this rank, K selections of a token, R ranks, E experts, L = E / R, n compact rows received,
one for each (token, this rank), X rows of an expanded result, one for each (token, local expert).

An expanded row's place is *expert, source rank, token, column*, with the rows of each expert rounded up. The source
computes it: the handshake (`notify.py`) gives it the first row of its selections of each expert, and `Place` adds how
many selections of that expert come before: in earlier tiles, which the handshake has counted, and in its own. Compact
rows are numbered in the same way. The places travel in the records, so a receiver computes none.

Every rank says in its offer whether it takes (or gives) expanded rows or compact ones, for which it may have more
memory. `Place` and `Arrange` turn places into addresses, for one kind or the other; `PutSelections` and
`PullSelections` know addresses only, and serve also where a rank unfolds or folds its own rows.

The last block of `PutSelections` and `PullSelections` ends the call, unless a rank works on its own rows; nothing is
staged here. Kernels that move rows do nothing once the buffer has failed, or while a call is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ._triton import Launch, jit, launch, next_power_of_2, tl, triton, variant
from .exchange import (
    STATE_ENDED,
    STATE_FAILED,
    STATE_HELD,
    TABLE_CAPACITIES,
    TABLE_EXPANDED,
    TABLE_STARTS,
    Context,
    is_last_block,
    may_move,
    may_still_move,
    num_lanes,
    open_context,
)
from .finish import signal_and_wait
from .primitives import rounded, widened
from .pull import add_biases, add_weights, wide_type
from .put import (
    End,
    LaunchShape,
    RowSpec,
    integer_of,
    load_columns,
    load_piece,
    load_slots,
    num_rows_came,
    record_words,
    source_of,
)

_FAILED, _HELD, _ENDED = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_HELD), tl.constexpr(STATE_ENDED)
_CAPACITIES, _STARTS = tl.constexpr(TABLE_CAPACITIES), tl.constexpr(TABLE_STARTS)
_EXPANDED = tl.constexpr(TABLE_EXPANDED)
MOST_TOPK = 128  # columns are compared with each other: with more, kernels take minutes to compile, and spill
_MOST_PAIRS = 1 << 15  # of columns that a block compares at once: more do not fit into registers
_TILE = 256  # selections that a block numbers: each is compared with all others of the tile
_COMPARED = tl.constexpr(8)  # with which it is compared at once
_SUMMED_TILES, _SUMMED_BINS = tl.constexpr(16), tl.constexpr(256)  # whose counts are added up at once
_UNROLLED = tl.constexpr(8)  # selections whose loads or stores stand one behind the other, without a branch
_FOLDED = 2  # rows that are folded at once: a token rarely selects more experts of one rank
_ELEMENTWISE_WARPS = 8
_PLACE_REGISTERS = 80  # of a thread of `Place`: with more, few of its blocks would run at once


def tile_tokens(num_topk: int) -> int:
    """Return the tokens of a tile."""
    return max(1, _TILE // next_power_of_2(num_topk))


def num_tiles(num_tokens: int, num_topk: int) -> int:
    """Return the tiles of so many tokens."""
    return -(-num_tokens // tile_tokens(num_topk))


@triton.jit
def count_tile(
    topk_idx, mask, tiles, tile, num_tokens, num_topk, num_ranks, num_local, TOKENS: tl.constexpr, TOPK: tl.constexpr,
    LANES: tl.constexpr, BINS: tl.constexpr,
):  # fmt: skip
    """Count how often each expert is selected in a tile of tokens, `tiles[0, tile, e]`, and how many tokens go to each
    rank, `tiles[0, tile, E + r]`. Mark where each token goes.
    """
    num_experts = num_local * num_ranks
    ids, is_id, _ = _load_ids(topk_idx, tile, num_tokens, num_topk, num_experts, TOKENS, TOPK)
    is_in = tl.reshape(is_id, [TOKENS * TOPK])
    chosen = tl.histogram(tl.reshape(ids, [TOKENS * TOPK]), BINS, mask=is_in)
    bins, lanes, tokens = tl.arange(0, BINS), tl.arange(0, LANES), tile * TOKENS + tl.arange(0, TOKENS)
    row = tiles + tl.cast(tile, tl.int64) * (num_experts + num_ranks)
    tl.store(row + bins, chosen, mask=bins < num_experts)
    goes = _goes_to(tl.where(is_id, ids // num_local, -1), LANES)
    tl.store(row + num_experts + lanes, tl.sum(goes, 0), mask=lanes < num_ranks)
    cells = tokens.to(tl.int64)[:, None] * num_ranks + lanes[None, :]
    tl.store(mask + cells, goes.to(tl.int8), mask=(tokens < num_tokens)[:, None] & (lanes < num_ranks)[None, :])


@triton.jit
def sum_tiles(tiles, per_rank, per_expert, num_tiles, num_ranks, num_experts):
    """Add up the counts of all tiles, in one block: selections of each expert, and tokens of each rank. Those of the
    tiles before each are `tiles[1, tile]`.
    """
    before = tiles + tl.cast(num_tiles, tl.int64) * (num_experts + num_ranks)
    for first in range(0, num_experts + num_ranks, _SUMMED_BINS):
        bins = first + tl.arange(0, _SUMMED_BINS)
        is_bin = bins < num_experts + num_ranks
        total = tl.zeros([_SUMMED_BINS], tl.int32)
        for start in range(0, num_tiles, _SUMMED_TILES):
            some = start + tl.arange(0, _SUMMED_TILES)
            cells = some.to(tl.int64)[:, None] * (num_experts + num_ranks) + bins[None, :]
            is_cell = (some < num_tiles)[:, None] & is_bin[None, :]
            counts = tl.load(tiles + cells, mask=is_cell, other=0)
            tl.store(before + cells, total[None, :] + tl.cumsum(counts, 0) - counts, mask=is_cell)
            total += tl.sum(counts, 0)
        tl.store(per_expert + bins, total, mask=bins < num_experts)
        tl.store(per_rank + bins - num_experts, total, mask=is_bin & (bins >= num_experts))


@triton.jit
def _load_ids(topk_idx, tile, num_tokens, num_topk, num_experts, TOKENS: tl.constexpr, TOPK: tl.constexpr):
    """Load the ids of a tile, [TOKENS, TOPK]: as int32, 0 where they select nothing; whether they do; as they are."""
    tokens, columns = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, TOPK)
    is_cell = (tokens < num_tokens)[:, None] & (columns < num_topk)[None, :]
    given = tl.load(topk_idx + tokens.to(tl.int64)[:, None] * num_topk + columns[None, :], mask=is_cell, other=-1)
    is_id = (given >= 0) & (given < num_experts)
    return tl.where(is_id, given, 0).to(tl.int32), is_id, given


@triton.jit
def _goes_to(owner, LANES: tl.constexpr):
    """Return [TOKENS, LANES] int32: whether any selection of a token, [TOKENS, TOPK] owners, is of a rank."""
    lanes = tl.arange(0, LANES)
    return tl.max((owner[:, None, :] == lanes[None, :, None]).to(tl.int32), 2)


# Dispatch, at the source ---------------------------------------------------------------------------------------------


class Place:
    """Finds the row of each selection at its rank and the addresses that rows are put to, and writes the records.

    (A kernel that moves rows with few blocks would wait for all that a record consists of, token after token.)

    Args:
        context: Holds the peers' offers, and the first slots.
        rows: What the rows are made of.
        num_topk: K.
        num_local: L.
        idx_dtype: Type of the ids.
        is_new: The selections are new; otherwise the owners, slots and rows of an earlier dispatch are given.
    """

    def __init__(
        self, context: Context, rows: RowSpec, num_topk: int, num_local: int, idx_dtype: torch.dtype, is_new: bool
    ):
        self._num_topk = num_topk
        constants = {
            "IS_NEW": is_new,
            "HAS_SCALES": rows.scale_bytes > 0,
            "TOKENS": tile_tokens(num_topk),
            "TOPK": next_power_of_2(num_topk),
            "LANES": next_power_of_2(context.num_ranks),
        }
        kernel = variant(_place_kernel, _ELEMENTWISE_WARPS, constants, (idx_dtype,), _PLACE_REGISTERS)
        int32 = torch.int32
        types = (idx_dtype, idx_dtype, torch.float32, *(int32,) * 6, torch.int64, None, None)
        row_bytes, scale_bytes = rows.row_bytes, rows.num_scales * rows.scale_bytes
        words = record_words(num_topk, has_rows=True)
        self._launch = Launch(kernel, types, (context.words, num_topk, num_local, row_bytes, scale_bytes, words))

    def __call__(
        self,
        num_tokens: int,
        topk_idx: torch.Tensor,
        copied_idx: torch.Tensor | None,
        topk_weights: torch.Tensor,
        tiles: torch.Tensor,
        first: torch.Tensor,
        send_head: torch.Tensor,
        owners: torch.Tensor,
        slots: torch.Tensor,
        rows: torch.Tensor,
        targets: torch.Tensor,
    ) -> None:
        """Place the selections of one call.

        Args:
            num_tokens: T.
            topk_idx: [T, K]; not used if they are not new, as all up to `send_head`.
            copied_idx: [T, K], written with the ids; None: no copy is wanted.
            topk_weights: [T, K] float32, for the records.
            tiles: [2, tiles, E + R] int32, see `sum_tiles`.
            first: [E] int32, the first row of this rank's selections of each expert, at its rank.
            send_head: [T, R] int32, written with the compact rows, see `Handle`.
            owners: [T, K] int32, the rank of each selection; -1: there is none. Written if they are new.
            slots: [T, K] int32, the compact row of the token at that rank, in the highest column of the rank; -1 in
                others. Written likewise.
            rows: [T, K] int32, the expanded row of each selection; -1: none. Written likewise.
            targets: [2, T, K] int64, written: where the payload and the scales of each selection go; 0: nowhere.
        """
        copied = topk_idx if copied_idx is None else copied_idx
        tensors = (topk_idx, copied, topk_weights, tiles, first, send_head, owners, slots, rows, targets)
        self._launch(num_tiles(num_tokens, self._num_topk), tensors, (num_tokens, int(copied_idx is not None)))


@jit
def _place_kernel(
    topk_idx,
    copied_idx,
    topk_weights,
    tiles,
    first,
    send_head,
    owners,
    slots,
    rows,
    targets,
    num_tokens: tl.int32,
    has_copy: tl.int32,
    context_words,
    num_topk: tl.int32,
    num_local: tl.int32,
    row_bytes: tl.int64,
    scale_bytes: tl.int64,
    num_record_words: tl.int32,
    IS_NEW: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
    LANES: tl.constexpr,
):
    """A block for each tile.

    Example: ids `[[1, 0], [1, -1]]`, two experts on two ranks, first rows `[3, 5]`: owners are the ids, rows are
    `[[5, 3], [6, -1]]`. If rank 1 takes expanded rows, token 1 goes to its row 6.
    """
    context = open_context(context_words)
    state, table, num_ranks = context[2], context[3], context[5]
    if tl.load(state + _FAILED) == 0:
        tile = tl.program_id(0)
        tokens, columns = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, TOPK)
        is_cell = (tokens < num_tokens)[:, None] & (columns < num_topk)[None, :]
        cells = tokens.to(tl.int64)[:, None] * num_topk + columns[None, :]
        if IS_NEW:
            num_experts = num_local * num_ranks
            expert, is_id, given = _load_ids(topk_idx, tile, num_tokens, num_topk, num_experts, TOKENS, TOPK)
            tl.store(copied_idx + cells, given, mask=is_cell & (columns < tl.where(has_copy != 0, TOPK, 0))[None, :])
            owner = tl.where(is_id, expert // num_local, -1)
            compact = _compact_rows(tiles, table, owner, tile, num_experts, num_ranks, LANES)
            slot = _slots_of(owner, is_id, _at_owner(compact, owner))
            tl.store(owners + cells, owner, mask=is_cell)
            tl.store(slots + cells, slot, mask=is_cell)
            before = _count_before(
                topk_idx, tiles, tile, expert, is_id, num_tokens, num_topk, num_experts, num_ranks, TOKENS, TOPK
            )
            row = tl.where(is_id, tl.load(first + expert, mask=is_id, other=0) + before, -1)
            tl.store(rows + cells, row, mask=is_cell)
            if tl.load(state + _HELD) == 0:
                weights = tl.load(topk_weights + cells, mask=is_cell, other=0.0)
                _put_records(
                    send_head, table, tokens, compact, expert, is_id, weights, row, num_tokens, num_topk, num_local,
                    num_ranks, num_record_words,
                )  # fmt: skip
        else:
            owner = tl.load(owners + cells, mask=is_cell, other=-1)
            slot = tl.load(slots + cells, mask=is_cell, other=-1)
            row = tl.load(rows + cells, mask=is_cell, other=-1)
        _, taken, goes = _choose(table, owner, slot, row, num_ranks)
        address = tl.load(table + owner, mask=goes, other=0) + taken * row_bytes
        tl.store(targets + cells, tl.where(goes, address, 0), mask=is_cell)
        if HAS_SCALES:
            address = tl.load(table + num_ranks + owner, mask=goes, other=0) + taken * scale_bytes
            behind = tl.cast(num_tokens, tl.int64) * num_topk
            tl.store(targets + behind + cells, tl.where(goes, address, 0), mask=is_cell)


@triton.jit
def _compact_rows(tiles, table, owner, tile, num_experts, num_ranks, LANES: tl.constexpr):
    """Return [TOKENS, LANES] int32: the compact row of each token of a tile at each rank; -1: it does not go there.

    It is the first slot of this rank there, the tokens of earlier tiles that go there, and the earlier ones of this.
    """
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    counts = tiles + tl.cast(tl.num_programs(0) + tile, tl.int64) * (num_experts + num_ranks) + num_experts
    before = tl.load(table + _STARTS * num_ranks + lanes, mask=is_rank, other=0).to(tl.int32)
    before += tl.load(counts + lanes, mask=is_rank, other=0)
    goes = _goes_to(owner, LANES)
    return tl.where(goes > 0, before[None, :] + tl.cumsum(goes, 0) - 1, -1)


@triton.jit
def _at_owner(compact, owner):
    """Return [TOKENS, TOPK] int32: of [TOKENS, LANES] rows those at the rank of each selection."""
    lanes = tl.arange(0, compact.shape[1])
    return tl.sum(tl.where(owner[:, None, :] == lanes[None, :, None], compact[:, :, None], 0), 1)


@triton.jit
def _slots_of(owner, is_id, row):
    """Return [TOKENS, TOPK] int32: compact rows, in the highest column of each rank alone; -1 in others."""
    columns = tl.arange(0, owner.shape[1])
    return tl.where(is_id & (columns[None, :] == _highest(owner, columns)), row, -1)


@triton.jit
def _put_records(
    send_head, table, tokens, compact, expert, is_id, weights, row, num_tokens, num_topk, num_local, num_ranks,
    num_record_words,
):  # fmt: skip
    """Write the records of a tile of tokens to all their ranks: index, ids as the rank counts them, weights, rows.

    Compact rows are [TOKENS, LANES], ids, weights and rows [TOKENS, TOPK]; cells are [TOKENS, LANES, TOPK], of which a
    record has one for each column.
    """
    lanes, columns = tl.arange(0, compact.shape[1]), tl.arange(0, expert.shape[1])
    is_rank = lanes < num_ranks
    bases = tl.load(table + 2 * num_ranks + lanes, mask=is_rank, other=0)
    capacities = tl.load(table + _CAPACITIES * num_ranks + lanes, mask=is_rank, other=0)
    is_pair = (tokens < num_tokens)[:, None] & is_rank[None, :]
    tl.store(send_head + tokens.to(tl.int64)[:, None] * num_ranks + lanes[None, :], compact, mask=is_pair)
    goes = (compact >= 0) & (compact < capacities[None, :])
    record = (bases[None, :] + compact.to(tl.int64) * num_record_words * 4).to(tl.pointer_type(tl.int32))
    tl.store(record, tokens[:, None] + tl.zeros_like(compact), mask=goes)
    cells = record[:, :, None] + 1 + columns[None, None, :]
    is_cell = goes[:, :, None] & (columns < num_topk)[None, None, :]
    local = expert[:, None, :] - lanes[None, :, None] * num_local
    is_local = is_id[:, None, :] & (local >= 0) & (local < num_local)
    tl.store(cells, tl.where(is_local, local, -1), mask=is_cell)
    tl.store(cells + num_topk, weights.to(tl.int32, bitcast=True)[:, None, :] + local * 0, mask=is_cell)
    tl.store(cells + 2 * num_topk, row[:, None, :] + local * 0, mask=is_cell)


@triton.jit
def _highest(owner, columns):
    """The highest column of the same owner, for each column of [TOKENS, TOPK]."""
    same = owner[:, :, None] == owner[:, None, :]
    return tl.max(tl.where(same, columns[None, None, :], -1), 2)


@triton.jit
def _choose(table, owner, slot, row, num_ranks):
    """Choose the row by which a peer knows each selection, as it has offered to take or give them.

    Returns:
        Whether its rows are expanded; the row, int64; and whether there is one, inside of what was offered.
    """
    is_owned = owner >= 0
    expanded = tl.load(table + _EXPANDED * num_ranks + owner, mask=is_owned, other=0)
    capacity = tl.load(table + _CAPACITIES * num_ranks + owner, mask=is_owned, other=0)
    chosen = tl.where(expanded > 0, row, slot).to(tl.int64)
    capacity = tl.where(expanded > 0, expanded, capacity)
    return expanded > 0, chosen, is_owned & (chosen >= 0) & (chosen < capacity)


@triton.jit
def _count_before(
    topk_idx, tiles, tile, expert, is_id, num_tokens, num_topk, num_experts, num_ranks, TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
):  # fmt: skip
    """Count the selections of the same expert before each selection, by token and then by column."""
    SIZE: tl.constexpr = TOKENS * TOPK
    experts = tl.reshape(tl.where(is_id, expert, -1), [SIZE])
    counts = tiles + tl.cast(tl.num_programs(0) + tile, tl.int64) * (num_experts + num_ranks)
    before = tl.load(counts + experts, mask=experts >= 0, other=0)
    positions = tl.arange(0, SIZE)
    for start in range(0, SIZE, _COMPARED):
        others = start + tl.arange(0, _COMPARED)
        token, column = tile * TOKENS + others // TOPK, others % TOPK
        is_other = (token < num_tokens) & (column < num_topk)
        given = tl.load(topk_idx + token.to(tl.int64) * num_topk + column, mask=is_other, other=-1)
        is_given = (given >= 0) & (given < num_experts)
        other = tl.where(is_given, given, -1).to(tl.int32)  # before any bits are cut off
        is_same = (experts[:, None] == other[None, :]) & (others[None, :] < positions[:, None])
        before += tl.sum(is_same.to(tl.int32), 1)
    return tl.reshape(before, [TOKENS, TOPK])


class PutSelections:
    """Writes each token's rows to the addresses of its selections.

    Args:
        context: The words of the buffer.
        shape: How to launch.
        rows: What the rows are made of.
        num_topk: K.
        end: How the dispatch ends; None: the addresses are in this rank's own memory, and the kernel is no `dispatch`.
    """

    def __init__(self, context: Context, shape: LaunchShape, rows: RowSpec, num_topk: int, end: End | None):
        self._nothing = context.state  # a dummy for arguments that are not used
        word_bytes = rows.word.itemsize
        row_words = rows.row_bytes // word_bytes
        vector, block, self._num_pieces, num_warps = shape.cut(row_words, word_bytes, rows.is_aligned)
        self._most_blocks = shape.num_blocks
        constants = {
            "WORD_BYTES": word_bytes,
            "VECTOR": vector,
            "BLOCK": block,
            "HAS_SCALES": rows.scale_bytes > 0,
            "SCALES": next_power_of_2(rows.num_scales),
            "TOPK": next_power_of_2(num_topk),
            "IS_WHOLE": row_words <= block,
            "ENDS": end is not None,
            "POLLERS": num_lanes(context, num_warps),
            "NUM_WARPS": num_warps,
        }
        scale_type = integer_of(rows.scale_bytes or 4)
        kernel = variant(_put_selections_kernel, num_warps, constants, (rows.word, scale_type), shape.num_registers)
        types = (rows.word, scale_type, torch.int64, None, None, None)
        fixed = (context.words, row_words * word_bytes // vector, rows.num_scales, num_topk, *(end or (0, 0)))
        self._launch = Launch(kernel, types, fixed)

    def __call__(self, x: torch.Tensor, scales: torch.Tensor | None, targets: torch.Tensor) -> None:
        """Put the rows of one call.

        Args:
            x: [T, H] contiguous.
            scales: [T, S] of any strides, or None.
            targets: [2, T, K] int64, addresses for payload and scales; 0: a row goes nowhere.
        """
        num_tokens = x.shape[0]
        stride_t, stride_s = (0, 0) if scales is None else scales.stride()
        num_blocks = max(1, min(self._most_blocks, num_tokens * self._num_pieces))
        tensors = (x, self._nothing if scales is None else scales, targets)
        self._launch(num_blocks, tensors, (stride_t, stride_s, num_tokens))


@jit(name=lambda constants: "dispatch_selections_kernel" if constants["ENDS"] else "unfold_selections_kernel")
def _put_selections_kernel(
    x,
    scales,
    targets,
    scale_stride_t: tl.int32,
    scale_stride_s: tl.int32,
    num_tokens: tl.int32,
    context_words,
    row_vectors: tl.int32,
    num_scales: tl.int32,
    num_topk: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    WORD_BYTES: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SCALES: tl.constexpr,
    TOPK: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ENDS: tl.constexpr,
    POLLERS: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Unfolding is no part of an exchange, and is not held.

    Example: one token with targets `[[a, 0, b]]`: its row is written at `a` and at `b`.
    """
    context = open_context(context_words)
    state = context[2]
    is_well = may_move(state) if ENDS else tl.load(state + _FAILED) == 0
    if is_well:
        widths = (row_vectors, num_scales, scale_stride_t, scale_stride_s, num_topk)
        _put_selections(
            (x, scales, targets), widths, num_tokens, WORD_BYTES, VECTOR, BLOCK, HAS_SCALES, SCALES, TOPK, IS_WHOLE
        )
    if ENDS:
        if is_last_block(state + _ENDED, True):
            if may_still_move(state):
                signal_and_wait(context, step, operation, POLLERS, NUM_WARPS)


@triton.jit
def _put_selections(
    sources, widths, num_tokens, WORD_BYTES: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr, SCALES: tl.constexpr, TOPK: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Items are pieces of rows: piece c of token t is item `t * pieces + c`. The first piece also moves the scales.

    Args:
        sources: Rows, scales and addresses.
        widths: Vectors of a row, scales with their strides, K.
        num_tokens: T.
        WORD_BYTES: Of a word.
        VECTOR: Bytes that rows are aligned to.
        BLOCK: Words of a piece.
        HAS_SCALES: There are scales.
        SCALES: At least as many as a row has.
        TOPK: At least K.
        IS_WHOLE: A row is one piece.
    """
    row_vectors, num_scales, stride_t, stride_s, num_topk = widths
    row_words = row_vectors * (VECTOR // WORD_BYTES)  # so the compiler knows that vectors of words are whole
    num_pieces = 1 if IS_WHOLE else tl.cdiv(row_words, BLOCK)  # 1 is known: nothing is divided by it
    num_items = num_tokens * num_pieces
    first, step = tl.program_id(0), tl.num_programs(0)
    widths = (row_words, num_scales, stride_t, stride_s, num_topk)
    sizes = (num_pieces, num_items, num_tokens)
    # The next item is loaded while this one is written, as in `put.py`.
    coming = _load_item(sources, widths, sizes, first, VECTOR, BLOCK, HAS_SCALES, SCALES, TOPK)
    for item in range(first, num_items, step):
        row, target, scale, cells = coming
        coming = _load_item(sources, widths, sizes, item + step, VECTOR, BLOCK, HAS_SCALES, SCALES, TOPK)
        words = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
        _write_selections(row, words, row_words, target, num_topk, VECTOR)
        if HAS_SCALES:
            if item % num_pieces == 0:
                columns = tl.arange(0, SCALES)
                is_scale = (cells != 0)[:, None] & (columns < num_scales)[None, :]
                tl.store(cells.to(sources[1].dtype)[:, None] + columns[None, :], scale[None, :], mask=is_scale)


@triton.jit
def _load_item(
    sources, widths, sizes, item, VECTOR: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr,
    SCALES: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Load a piece of a row, its token's scales, and where both go; nothing is loaded if there is no such item."""
    x, scales, targets = sources
    row_words, num_scales, stride_t, stride_s, num_topk = widths
    num_pieces, num_items, num_tokens = sizes
    token = item // num_pieces
    row = load_piece(x, row_words, item, num_pieces, num_items, VECTOR, BLOCK)
    target = load_columns(targets, token, num_tokens, num_topk, 1, num_topk, TOPK)
    scale, cells = target, target
    if HAS_SCALES:
        scale = load_columns(scales, token, num_tokens, stride_t, stride_s, num_scales, SCALES)
        behind = targets + tl.cast(num_tokens, tl.int64) * num_topk
        cells = load_columns(behind, token, num_tokens, num_topk, 1, num_topk, TOPK)
    return row, target, scale, cells


@triton.jit
def _write_selections(row, words, row_words, target, num_topk, VECTOR: tl.constexpr):
    """Write a piece of a row to all addresses of its selections."""
    lanes = tl.arange(0, target.shape[0])
    if target.shape[0] <= _UNROLLED:
        for turn in tl.static_range(target.shape[0]):
            _write_to(row, words, row_words, tl.sum(tl.where(lanes == turn, target, 0)), VECTOR)
    else:
        for turn in range(num_topk):
            address = tl.sum(tl.where(lanes == turn, target, 0))
            if address != 0:
                _write_to(row, words, row_words, address, VECTOR)


@triton.jit
def _write_to(row, words, row_words, address, VECTOR: tl.constexpr):
    """Write a piece of a row to an address, if there is one."""
    pointer = tl.multiple_of(address.to(tl.pointer_type(row.dtype)), VECTOR)
    tl.store(pointer + words, row, mask=words < tl.where(address != 0, row_words, 0))


# Dispatch, at the receiver -------------------------------------------------------------------------------------------


class Describe:
    """Splits the records of the rows that came, and describes each row. If the result is compact, it also finds where
    this rank's selections have gone, which `Place` does otherwise.

    Args:
        context: The words of the buffer.
        num_blocks: Most blocks that describe rows.
        num_topk: K.
        num_local: L.
        idx_dtype: Type of the ids.
        is_expanded: Records have the rows of their selections.
    """

    def __init__(
        self,
        context: Context,
        num_blocks: int,
        num_topk: int,
        num_local: int,
        idx_dtype: torch.dtype,
        is_expanded: bool,
    ):
        self._nothing = context.state
        self._most_blocks, self._num_topk, self._is_expanded = num_blocks, num_topk, is_expanded
        topk = next_power_of_2(num_topk)
        self._tile = max(1, min(4096 // topk, _MOST_PAIRS // topk**2))
        constants = {
            "IS_EXPANDED": is_expanded,
            "TOPK": topk,
            "LANES": next_power_of_2(context.num_ranks),
            "TILE": self._tile,
        }
        kernel = variant(_describe_kernel, 16, constants, (idx_dtype,))
        int32, float32 = torch.int32, torch.float32
        rows = (int32, int32, int32, int32, int32, int32, idx_dtype, idx_dtype, float32)
        types = (*rows, idx_dtype, idx_dtype, int32, int32, int32, *(None,) * 5)
        words = record_words(num_topk, is_expanded)
        self._launch = Launch(kernel, types, (context.words, num_topk, num_local, words))

    def __call__(
        self,
        records: torch.Tensor,
        num_rows: int,
        prefix: torch.Tensor,
        experts: torch.Tensor,
        rank_ends: torch.Tensor,
        source_idx: torch.Tensor,
        sources: torch.Tensor,
        recv_topk_idx: torch.Tensor | None,
        ids: torch.Tensor | None,
        weights: torch.Tensor,
        sent: Sequence[torch.Tensor | None] = (),
    ) -> None:
        """Describe the rows of one call.

        Args:
            records: [n, W] int32.
            num_rows: n, for which there is memory.
            prefix: [R, R] int32.
            experts: [2 L + 1] int32, the last of which is M, see `notify.Selected`.
            rank_ends: [R] int32, written: rows that came from ranks 0..s.
            source_idx: [n] int32, written: the token of each row at its source.
            sources: [n, 2 + K] int32, written, see `EPHandle.recv_src_metadata`.
            recv_topk_idx: [n, K], written: local ids; None: the result is expanded.
            ids: [n, K], the same once more, which the caller does not get.
            weights: Written: [n, K] float32, or [X] where the result is expanded: of each row.
            sent: If the result is compact: `topk_idx` [T, K] of this rank, `copied_idx`, `numbers`, `owners` and
                `slots`, as in `Place`.
        """
        nothing, num_weights, num_tokens, has_copy = self._nothing, weights.shape[0], 0, 0
        if recv_topk_idx is None or ids is None:
            recv_topk_idx = ids = nothing
        own: tuple[Any, ...] = (nothing,) * 5
        if sent:
            topk_idx, copied_idx, numbers, owners, slots = sent
            assert topk_idx is not None
            num_tokens, has_copy = topk_idx.shape[0], int(copied_idx is not None)
            own = (topk_idx, copied_idx if has_copy else topk_idx, numbers, owners, slots)
        row_blocks = max(1, min(self._most_blocks, -(-num_rows // self._tile)))
        token_blocks = -(-num_tokens // self._tile)
        tensors = (records, prefix, experts, rank_ends, source_idx, sources, recv_topk_idx, ids, weights, *own)
        numbers_of = (num_rows, num_weights, num_tokens, has_copy, row_blocks)
        self._launch(row_blocks + token_blocks, tensors, numbers_of)


@jit
def _describe_kernel(
    records,
    prefix,
    experts,
    rank_ends,
    source_idx,
    sources,
    recv_topk_idx,
    kept_idx,
    weights,
    topk_idx,
    copied_idx,
    numbers,
    owners,
    slots,
    num_rows: tl.int32,
    num_weights: tl.int32,
    num_tokens: tl.int32,
    has_copy: tl.int32,
    row_blocks: tl.int32,
    context_words,
    num_topk: tl.int32,
    num_local: tl.int32,
    num_record_words: tl.int32,
    IS_EXPANDED: tl.constexpr,
    TOPK: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    """The first blocks describe tiles of rows, the first of all also copies the ends. The others find where tiles of
    tokens have gone.

    Example: record `[4, 1, -1, bits(0.5), bits(0.2), 7, 3]` with K = 2 and M = 16, from rank 1: sources are
    `[20, 2, 7, -1]`, and the weight of expanded row 7 is 0.5.
    """
    context = open_context(context_words)
    _, _, state, _, _, num_ranks, rank, _, _, _ = context
    block = tl.program_id(0)
    if block == 0:
        lanes = tl.arange(0, LANES)
        is_rank = lanes < num_ranks
        tl.store(rank_ends + lanes, tl.load(prefix + lanes * num_ranks + rank, mask=is_rank), mask=is_rank)
    if block < row_blocks:
        num_came = num_rows_came(context, prefix, num_rows)
        max_tokens = tl.load(experts + 2 * num_local)
        for start in range(block * TILE, num_rows, row_blocks * TILE):
            _describe_rows(
                context, records, prefix, source_idx, sources, recv_topk_idx, kept_idx, weights, start, num_rows,
                num_came, num_weights, max_tokens, num_topk, num_record_words, IS_EXPANDED, TOPK, LANES, TILE,
            )  # fmt: skip
    elif not IS_EXPANDED:
        if tl.load(state + _FAILED) == 0:
            _find_slots(
                context, (topk_idx, copied_idx, numbers, owners, slots), block - row_blocks, num_tokens, num_topk,
                num_local, has_copy, TILE, TOPK,
            )  # fmt: skip


@triton.jit
def _find_slots(
    context, tables, tile, num_tokens, num_topk, num_local, has_copy, TOKENS: tl.constexpr, TOPK: tl.constexpr
):
    """Find the rank of each selection of a tile, and its compact row there, and write both; also copy the ids.

    Args:
        context: See `exchange.open_context`.
        tables: Ids, their copy, numbers, owners and slots.
        tile: Which one.
        num_tokens: T.
        num_topk: K.
        num_local: L.
        has_copy: A copy is wanted.
        TOKENS: Of a tile.
        TOPK: At least K.
    """
    table, num_ranks = context[3], context[5]
    topk_idx, copied_idx, numbers, owners, slots = tables
    tokens, columns = tile * TOKENS + tl.arange(0, TOKENS), tl.arange(0, TOPK)
    is_cell = (tokens < num_tokens)[:, None] & (columns < num_topk)[None, :]
    cells = tokens.to(tl.int64)[:, None] * num_topk + columns[None, :]
    expert, is_id, given = _load_ids(topk_idx, tile, num_tokens, num_topk, num_local * num_ranks, TOKENS, TOPK)
    tl.store(copied_idx + cells, given, mask=is_cell & (columns < tl.where(has_copy != 0, TOPK, 0))[None, :])
    owner = tl.where(is_id, expert // num_local, -1)
    number = tl.load(numbers + tokens.to(tl.int64)[:, None] * num_ranks + owner, mask=is_id, other=-1)
    row = number + tl.load(table + _STARTS * num_ranks + owner, mask=is_id, other=0).to(tl.int32)
    tl.store(owners + cells, owner, mask=is_cell)
    tl.store(slots + cells, _slots_of(owner, is_id, row), mask=is_cell)


@triton.jit
def _describe_rows(
    context, records, prefix, source_idx, sources, topk_idx, kept_idx, weights, start, num_rows, num_came,
    num_weights, max_tokens, num_topk, num_record_words, IS_EXPANDED: tl.constexpr, TOPK: tl.constexpr,
    LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Describe a tile of rows, see `Describe`."""
    num_ranks, rank = context[5], context[6]
    columns = tl.arange(0, TOPK)
    is_column = (columns < num_topk)[None, :]
    row_idx = start + tl.arange(0, TILE)
    came, is_row = row_idx < num_came, row_idx < num_rows
    is_cell = came[:, None] & is_column
    record = records + row_idx.to(tl.int64) * num_record_words
    token = tl.load(record, mask=came, other=-1)
    tl.store(source_idx + row_idx, token, mask=is_row)
    source = source_of(row_idx, prefix, num_ranks, rank, LANES)
    ids = tl.load(record[:, None] + 1 + columns[None, :], mask=is_cell, other=-1)
    weight = tl.load(record[:, None] + 1 + num_topk + columns[None, :], mask=is_cell, other=0)
    weight = weight.to(tl.float32, bitcast=True)
    highest = tl.max(tl.where(ids >= 0, columns[None, :], -1), 1)
    described = sources + row_idx.to(tl.int64) * (2 + num_topk)
    tl.store(described, tl.where(came, source * max_tokens + token, -1), mask=is_row)
    tl.store(described + 1, tl.where(came, source * num_topk + highest, -1), mask=is_row)
    cells = described[:, None] + 2 + columns[None, :]
    is_written = is_row[:, None] & is_column
    if IS_EXPANDED:
        row = tl.load(record[:, None] + 1 + 2 * num_topk + columns[None, :], mask=is_cell, other=-1)
        row = tl.where(ids >= 0, row, -1)
        tl.store(cells, row, mask=is_written)
        tl.store(weights + row, weight, mask=(row >= 0) & (row < num_weights))
    else:
        tl.store(cells, tl.full([TILE, TOPK], -1, tl.int32), mask=is_written)
        targets = row_idx.to(tl.int64)[:, None] * num_topk + columns[None, :]
        tl.store(topk_idx + targets, ids, mask=is_written)
        tl.store(kept_idx + targets, ids, mask=is_written)
        tl.store(weights + targets, weight, mask=is_cell)


def zero_gaps(out: torch.Tensor, ends: torch.Tensor, alignment: int) -> None:
    """Set the rows between the experts' to zero.

    Args:
        out: [X, columns] of any strides, or [X].
        ends: [L] int32, where the rows of each expert end.
        alignment: To which each end is rounded up.

    Example:
        Ends `[1, 4]` with alignment 2: row 1 alone becomes zero.
    """
    if alignment == 1 or not out.numel():
        return
    word = integer_of(min(8, out.element_size()))
    rows = (out[:, None] if out.dim() == 1 else out).view(word)
    num_rows, num_columns = rows.shape
    args: tuple[torch.Tensor | int, ...] = (rows, ends, num_rows, num_columns, *rows.stride(), alignment)
    block = min(1024, next_power_of_2(num_columns))
    launch(_zero_gaps_kernel, ends.shape[0], args, (word,), BLOCK=block)


@jit
def _zero_gaps_kernel(
    out,
    ends,
    num_rows: tl.int64,
    num_columns: tl.int32,
    stride_row: tl.int64,
    stride_column: tl.int64,
    alignment: tl.int64,
    BLOCK: tl.constexpr,
):
    """A block for each expert."""
    end = tl.load(ends + tl.program_id(0)).to(tl.int64)
    stop = tl.minimum((end + alignment - 1) // alignment * alignment, num_rows)
    for row in range(end, stop):
        for start in range(0, num_columns, BLOCK):
            columns = start + tl.arange(0, BLOCK)
            cells = out + row * stride_row + columns * stride_column
            tl.store(cells, tl.zeros([BLOCK], out.dtype.element_ty), mask=columns < num_columns)


def address_rows(
    addresses: torch.Tensor, rows: torch.Tensor, memory: torch.Tensor, ends: torch.Tensor, first: int = 0
) -> None:
    """Turn rows of this rank's own memory into addresses, for `PutSelections` or `PullSelections`.

    Args:
        addresses: [.., n, K] int64 contiguous, of which n * K from `first * n * K` on are written: those of each row's
            columns, in order, and 0 behind them.
        rows: [n, K] int32, a view of columns; -1: none.
        memory: [X, columns], contiguous rows.
        ends: [R] int32, the last of which is how many of the n rows came.
        first: Which of the stacked matrices.
    """
    num_rows, num_topk = rows.shape
    row_bytes = memory.stride(0) * memory.element_size()
    args: tuple[torch.Tensor | int, ...] = (
        addresses, rows, ends, first * num_rows * num_topk, num_rows, num_topk, rows.stride(0), ends.shape[0],
        memory.data_ptr(), row_bytes, memory.shape[0],
    )  # fmt: skip
    tile, topk = tile_tokens(num_topk), next_power_of_2(num_topk)
    launch(_address_rows_kernel, max(1, -(-num_rows // tile)), args, TOKENS=tile, TOPK=topk)


@jit
def _address_rows_kernel(
    addresses,
    rows,
    ends,
    offset: tl.int64,
    num_rows: tl.int32,
    num_topk: tl.int32,
    stride: tl.int32,
    num_ranks: tl.int32,
    base: tl.int64,
    row_bytes: tl.int64,
    limit: tl.int64,
    TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
):
    """Example: rows `[[-1, 1]]` of memory at 1000 with rows of 16 bytes are `[[1016, 0]]`."""
    num_came = tl.minimum(tl.load(ends + num_ranks - 1), num_rows)
    row_idx, columns = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, TOPK)
    is_column = (columns < num_topk)[None, :]
    cells = row_idx.to(tl.int64)[:, None] * stride + columns[None, :]
    row = tl.load(rows + cells, mask=(row_idx < num_came)[:, None] & is_column, other=-1).to(tl.int64)
    is_there = (row >= 0) & (row < limit)
    position = _position(columns[None, :] + tl.where(is_there, 0, TOPK))
    targets = offset + row_idx.to(tl.int64)[:, None] * num_topk + position
    address = tl.where(is_there, base + row * row_bytes, 0)
    tl.store(addresses + targets, address, mask=(row_idx < num_rows)[:, None] & is_column)


# Combine -------------------------------------------------------------------------------------------------------------


class Arrange:
    """Finds the addresses that a token's rows are pulled from, in the order in which they are added.

    Args:
        context: Holds the peers' offers.
        num_topk: K.
        row_bytes: Bytes of a row.
        has_rows: Selections may have rows of their own, at ranks that give expanded rows.
        is_grouped: The rows of each rank are summed first; otherwise they are added in the order of columns.
    """

    def __init__(self, context: Context, num_topk: int, row_bytes: int, has_rows: bool, is_grouped: bool):
        self._num_topk, self._nothing = num_topk, context.state
        constants = {
            "HAS_ROWS": has_rows,
            "IS_GROUPED": is_grouped,
            "TOKENS": tile_tokens(num_topk),
            "TOPK": next_power_of_2(num_topk),
        }
        types = (torch.int32, torch.int32, torch.int32, torch.int64, None)
        fixed = (context.words, num_topk, row_bytes)
        self._launch = Launch(variant(_arrange_kernel, _ELEMENTWISE_WARPS, constants), types, fixed)

    def __call__(
        self, owners: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor | None, sources: torch.Tensor
    ) -> None:
        """Arrange the rows of one call.

        Args:
            owners: [T, K] int32, see `Place`.
            slots: [T, K] int32, likewise.
            rows: [T, K] int32, likewise; None: all rows are compact.
            sources: [T, K] int64, written: addresses, and 1 added to the last one of each group; 0 behind them.
        """
        num_tokens = owners.shape[0]
        tensors = (owners, slots, self._nothing if rows is None else rows, sources)
        self._launch(num_tiles(num_tokens, self._num_topk), tensors, (num_tokens,))


@jit
def _arrange_kernel(
    owners,
    slots,
    rows,
    sources,
    num_tokens: tl.int32,
    context_words,
    num_topk: tl.int32,
    row_bytes: tl.int64,
    HAS_ROWS: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
):
    """A block for each tile of tokens.

    Example: owners `[[0, 1, -1, 0]]`, of which all give expanded rows `[[a, b, -1, c]]`: grouped they are
    `[[b + 1, a, c + 1, 0]]`, since the sum of rank 0 stands at its highest column; otherwise
    `[[a + 1, b + 1, c + 1, 0]]`.
    """
    context = open_context(context_words)
    table, num_ranks = context[3], context[5]
    tokens, columns = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS), tl.arange(0, TOPK)
    is_cell = (tokens < num_tokens)[:, None] & (columns < num_topk)[None, :]
    cells = tokens.to(tl.int64)[:, None] * num_topk + columns[None, :]
    owner = tl.load(owners + cells, mask=is_cell, other=-1)
    slot = tl.load(slots + cells, mask=is_cell, other=-1)
    row = slot
    if HAS_ROWS:
        row = tl.load(rows + cells, mask=is_cell, other=-1)
    is_expanded, given, comes = _choose(table, owner, slot, row, num_ranks)
    rank = columns[None, :] + tl.zeros_like(owner)
    is_last = comes
    if IS_GROUPED:
        highest = _highest(tl.where(comes, owner, -1), columns)  # so that every group has a last row
        rank += highest * TOPK
        is_last = comes & (~is_expanded | (columns[None, :] == highest))
    position = _position(rank + tl.where(comes, 0, TOPK * TOPK))  # what does not come is behind all that comes
    address = tl.load(table + owner, mask=comes, other=0) + given * row_bytes + is_last.to(tl.int64)
    targets = tokens.to(tl.int64)[:, None] * num_topk + position
    tl.store(sources + targets, tl.where(comes, address, 0), mask=is_cell)


@triton.jit
def _position(rank):
    """The position of each column of [TOKENS, TOPK] in the order of their ranks, which all differ."""
    return tl.sum((rank[:, None, :] < rank[:, :, None]).to(tl.int32), 2)


class PullSelections:
    """Sums each token's rows out of the memory of this rank and of its peers.

    `out[t] = sum(biases[t]) + sum(of groups of rows)`, in FP32 (FP64 of FP64), rounded once; the sum of a group is
    rounded, too.

    Args:
        context: The words of the buffer.
        shape: How to launch.
        hidden: H.
        dtype: The dtype of the rows.
        num_topk: K.
        num_biases: At most two.
        is_aligned: `out`, the rows and the biases consist of vectors, see `put.word_of`.
        is_grouped: Rows are summed in groups; otherwise each is added by itself.
        num_weights: K, if weights come with the rows, by rank as those of `pull.Pull`, a column from one rank and
            zeros from the others; else 0.
        end: How the combine ends; None: rows are this rank's own, a sum of no more than one row is that row, and the
            kernel is no `combine`.
    """

    def __init__(
        self,
        context: Context,
        shape: LaunchShape,
        hidden: int,
        dtype: torch.dtype,
        num_topk: int,
        num_biases: int = 0,
        is_aligned: bool = True,
        is_grouped: bool = False,
        num_weights: int = 0,
        end: End | None = None,
    ):
        self._nothing = context.state
        vector, block, self._num_pieces, num_warps = shape.cut(hidden, dtype.itemsize, is_aligned)
        self._most_blocks = shape.num_blocks
        constants = {
            "NUM_BIASES": num_biases,
            "BLOCK": block,
            "TOPK": next_power_of_2(num_topk),
            "AT_ONCE": min(_FOLDED if end is None else _UNROLLED.value, next_power_of_2(num_topk)),
            "LANES": next_power_of_2(context.num_ranks),
            "VECTOR": vector,
            "WIDE": wide_type(dtype),
            "IS_GROUPED": is_grouped,
            "HAS_WEIGHTS": num_weights > 0,
            "ENDS": end is not None,
            "POLLERS": num_lanes(context, num_warps),
            "NUM_WARPS": num_warps,
        }
        kernel = variant(_pull_selections_kernel, num_warps, constants, (dtype,), shape.num_registers)
        fixed = (context.words, hidden * dtype.itemsize // vector, num_topk, *(end or (0, 0)))
        # Weights are words: one rank gives a column, the others zeros, and their sum has the bits of what it gives.
        self._launch = Launch(kernel, (dtype, dtype, dtype, torch.int64, torch.int32, torch.int32, None), fixed)

    def __call__(
        self,
        out: torch.Tensor,
        sources: torch.Tensor,
        biases: Sequence[torch.Tensor] = (),
        weights: torch.Tensor | None = None,
        slots: torch.Tensor | None = None,
    ) -> None:
        """Sum the rows of one call.

        Args:
            out: [T, H], written.
            sources: [T, K] int64, see `Arrange`, or `address_rows`.
            biases: Tensors [T, H] of out's dtype, added first and in order.
            weights: [T, K] float32, written; None: none come.
            slots: [T, R] int32, by which the weights of a token are found.
        """
        num_tokens, nothing = out.shape[0], self._nothing
        first, second = (*biases, out, out)[:2] if biases else (out, out)
        num_blocks = max(1, min(self._most_blocks, num_tokens * self._num_pieces))
        if weights is None or slots is None:
            weights = slots = nothing
        self._launch(num_blocks, (out, first, second, sources, weights, slots), (num_tokens,))


@jit(name=lambda constants: "combine_selections_kernel" if constants["ENDS"] else "fold_selections_kernel")
def _pull_selections_kernel(
    out,
    bias_0,
    bias_1,
    sources,
    out_weights,
    slots,
    num_tokens: tl.int32,
    context_words,
    row_vectors: tl.int32,
    num_topk: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    NUM_BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    TOPK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
    IS_GROUPED: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    ENDS: tl.constexpr,
    POLLERS: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Folding comes before the call's first words, so that nothing is held, and begins with -0.0: one row alone is
    forwarded as it is.

    Example: one token with sources `[[a, b + 1, c + 1]]`: out is `round(round(a + b) + c)`.
    """
    context = open_context(context_words)
    state = context[2]
    is_well = may_move(state) if ENDS else tl.load(state + _FAILED) == 0
    if is_well:
        SIGN: tl.constexpr = 1.0 if ENDS else -1.0
        _sum_selections(
            context, (out, bias_0, bias_1, sources, out_weights, slots), num_tokens, row_vectors, num_topk, NUM_BIASES,
            BLOCK, TOPK, AT_ONCE, LANES, VECTOR, WIDE, IS_GROUPED, HAS_WEIGHTS, SIGN,
        )  # fmt: skip
    if ENDS:
        if is_last_block(state + _ENDED, True):
            if may_still_move(state):
                signal_and_wait(context, step + 1, operation, POLLERS, NUM_WARPS)


@triton.jit
def _sum_selections(
    context, sums, num_tokens, row_vectors, num_topk, NUM_BIASES: tl.constexpr, BLOCK: tl.constexpr,
    TOPK: tl.constexpr, AT_ONCE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr,
    IS_GROUPED: tl.constexpr, HAS_WEIGHTS: tl.constexpr, SIGN: tl.constexpr,
):  # fmt: skip
    """Items are pieces of rows: piece c of token t is item `t * pieces + c`. The first piece also sums the weights.

    Args:
        context: See `exchange.open_context`.
        sums: The sums, both biases, the addresses of the rows, the sums of weights, and their slots.
        num_tokens: T.
        row_vectors: Vectors of a row.
        num_topk: K.
        NUM_BIASES: How many there are.
        BLOCK: Elements of a piece.
        TOPK: At least K.
        AT_ONCE: Rows that are loaded before the first is added.
        LANES: At least R.
        VECTOR: Bytes that rows are aligned to.
        WIDE: The type to add in.
        IS_GROUPED: Rows are summed in groups.
        HAS_WEIGHTS: Weights come.
        SIGN: Of the zero that a sum without biases begins with.
    """
    table, num_ranks = context[3], context[5]
    out, bias_0, bias_1, sources, out_weights, slots = sums
    ELEMENT_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    hidden = row_vectors * (VECTOR // ELEMENT_BYTES)  # so the compiler knows that vectors of elements are whole
    num_pieces = tl.cdiv(hidden, BLOCK)
    first, step = tl.program_id(0), tl.num_programs(0)
    source = load_columns(sources, first // num_pieces, num_tokens, num_topk, 1, num_topk, TOPK)
    for item in range(first, num_tokens * num_pieces, step):
        following = (item + step) // num_pieces
        next_source = load_columns(sources, following, num_tokens, num_topk, 1, num_topk, TOPK)
        token, piece = item // num_pieces, item % num_pieces
        columns = piece * BLOCK + tl.arange(0, BLOCK)
        begin = tl.cast(token, tl.int64) * hidden
        total = tl.zeros([BLOCK], WIDE) * SIGN
        if NUM_BIASES > 0:
            total = add_biases(bias_0 + begin, bias_1 + begin, columns, hidden, NUM_BIASES, VECTOR, WIDE)
        total = _add_selections(total, out, source, columns, hidden, num_topk, AT_ONCE, VECTOR, WIDE, IS_GROUPED)
        target = tl.multiple_of(out + begin, VECTOR) + columns
        tl.store(target, rounded(total, out.dtype.element_ty), mask=columns < hidden)
        if HAS_WEIGHTS:
            if piece == 0:
                lanes = tl.arange(0, LANES)
                slot = load_slots(slots, token, num_tokens, num_ranks, lanes)
                capacities = tl.load(table + _CAPACITIES * num_ranks + lanes, mask=lanes < num_ranks, other=0)
                has_row = (slot >= 0) & (slot < capacities)
                add_weights(
                    out_weights, table, has_row, slot.to(tl.int64), token, num_topk, num_ranks, 1, LANES, TOPK, tl.int32
                )
        source = next_source


@triton.jit
def _add_selections(
    total, like, source, columns, hidden, num_topk, AT_ONCE: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr,
    IS_GROUPED: tl.constexpr,
):  # fmt: skip
    """Add one piece of some rows to a sum, in order, those of a group by way of their own sum."""
    lanes = tl.arange(0, source.shape[0])
    count = num_topk
    if source.shape[0] > AT_ONCE and AT_ONCE < _UNROLLED:  # few rows of many columns, which come first
        count = tl.sum((source != 0).to(tl.int32))
    # Adding to -0.0 changes nothing, not even the sign of a zero. As a literal it would lose its own.
    nothing = tl.zeros([columns.shape[0]], WIDE) * -1.0
    group = tl.zeros([columns.shape[0]], WIDE) * -1.0
    for first in range(0, count, AT_ONCE):
        for turn in tl.static_range(AT_ONCE):
            word = tl.sum(tl.where(lanes == first + turn, source, 0))
            is_last = (word & 1) != 0
            row = word - (word & 1)
            pointer = tl.multiple_of(row.to(like.dtype), VECTOR)
            value = tl.load(pointer + columns, mask=columns < tl.where(row != 0, hidden, 0), other=0.0)
            value = widened(value, WIDE)
            if IS_GROUPED:
                group = group + value  # nothing comes behind the last group, so what is added there is never used
                whole = widened(rounded(group, like.dtype.element_ty), WIDE)
                total = tl.where(is_last, total + whole, total)
                group = tl.where(is_last, nothing, group)
            else:
                total = tl.where(row != 0, total + value, total)  # adding nothing must not make 0.0 of -0.0
    return total
