"""Putting rows into the peers' slots, and splitting the records where they arrive. On the device.

Shape letters: T tokens, K selections of a token, R ranks, n rows received, W words of a row. The twin is
`rows.put_rows`; records on the CPU have another layout (`engine.payload`), since they never meet those of a GPU.

A *record* goes with each row of a dispatch with routing: W = 1 + 2 K words of 4 bytes, rounded up to 4: the token's
index at its source, its expert ids as the receiver counts them (-1: another rank's), its weights (0 there, unless the
call keeps them). Those of an expanded dispatch have K more, the row of each selection (`selections.py`).

The last block of `Put` ends the dispatch (`finish.py`) and, if few rows come, splits their records; of many rows
`Unpack` splits them with more blocks. Nothing is done once the buffer has failed, and no row is put while a call is
held. (Records are split then, too; nothing uses the result.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..sizing import align
from ._triton import Launch, jit, next_power_of_2, tl, triton, variant
from .exchange import (
    STATE_ENDED,
    STATE_FAILED,
    STATE_STAGED,
    TABLE_CAPACITIES,
    TABLE_SOURCE_ROWS,
    TABLE_STARTS,
    Context,
    is_last_block,
    may_move,
    may_still_move,
    num_lanes,
    open_context,
)
from .finish import count_rounds, num_dispatch_rounds, signal_and_wait, unstage

_FAILED, _STAGED, _ENDED = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_STAGED), tl.constexpr(STATE_ENDED)
_CAPACITIES, _STARTS = tl.constexpr(TABLE_CAPACITIES), tl.constexpr(TABLE_STARTS)
_SOURCE_ROWS = tl.constexpr(TABLE_SOURCE_ROWS)
VECTOR_BYTES = 16  # what a thread moves at once, if rows are aligned to it
_WARP = 32
_MOST_RECORD_WARPS = 16  # with records a thread needs more registers than twice as many would leave it
MOST_SPLIT = 2048  # records that the last block of `Put` splits: with more it takes longer than another launch
_MOST_UNROLLED = tl.constexpr(8)  # peers whose writes stand one behind the other, without a branch


@dataclass(frozen=True)
class LaunchShape:
    """How a kernel that moves rows is launched.

    Attributes:
        num_blocks: Blocks of the grid.
        words: Words of 4 bytes that a block moves at once.
        num_warps: Warps of a block.
        num_registers: Most registers of a thread; 0: the compiler decides. With few blocks, threads should use all
            registers there are, to keep more rows in flight.
    """

    num_blocks: int
    words: int
    num_warps: int
    num_registers: int = 0

    def warps_for(self, num_bytes: int, vector: int) -> int:
        """Return the warps for a piece of so many bytes: as many as have a vector of it for each thread."""
        return max(1, min(self.num_warps, num_bytes // (_WARP * vector)))

    def cut(self, num_elements: int, element_bytes: int, is_aligned: bool) -> tuple[int, int, int, int]:
        """Return how rows of so many elements are moved: the bytes of a vector, the elements of a piece, the pieces of
        a row, and the warps of a block.
        """
        vector = VECTOR_BYTES if is_aligned else element_bytes
        block = min(self.words * 4 // element_bytes, next_power_of_2(num_elements))
        return vector, block, -(-num_elements // block), self.warps_for(block * element_bytes, vector)


def record_words(num_topk: int, has_rows: bool = False) -> int:
    """Return the number of 4-byte words of a record. Those of selections also have a row for each of them."""
    return align(1 + (3 if has_rows else 2) * num_topk, 4)


def word_of(*rows: torch.Tensor) -> tuple[torch.dtype, bool]:
    """Return the widest word, up to 4 bytes, that all these [n, columns] rows consist of, and whether vectors of
    words fit.
    """
    return widest_word(*(n for one in rows for n in (one.size(1) * one.element_size(), one.data_ptr())))


def widest_word(*numbers: int) -> tuple[torch.dtype, bool]:
    """Return the widest word, up to 4 bytes, that divides all these widths and offsets, and whether vectors of words
    fit.
    """
    for dtype in (torch.int32, torch.int16, torch.int8):
        if all(number % dtype.itemsize == 0 for number in numbers):
            return dtype, all(number % VECTOR_BYTES == 0 for number in numbers)
    raise AssertionError("every row consists of bytes")


class RowSpec(NamedTuple):
    """What the rows of a dispatch are made of.

    Attributes:
        row_bytes: Bytes of a row of the payload.
        word: What the payload is moved as.
        is_aligned: Whether vectors of words fit, see `word_of`.
        num_scales: Scales of a row.
        scale_bytes: Bytes of a scale; 0: there are none.
        has_records: Records travel.
        num_topk: K; 0: ids and weights do not travel.
        idx_dtype: Type of the ids, where they do.
        keeps_weights: Records have all weights of a token, also those of experts of other ranks.
    """

    row_bytes: int
    word: torch.dtype
    is_aligned: bool
    num_scales: int = 0
    scale_bytes: int = 0
    has_records: bool = False
    num_topk: int = 0
    idx_dtype: torch.dtype = torch.int32
    keeps_weights: bool = False


class End(NamedTuple):
    """How a kernel that moves rows ends its call.

    Attributes:
        step: The step that is signalled and waited for, `READY`.
        operation: For the record of a failure.
    """

    step: int
    operation: int


class Received(NamedTuple):
    """Where what a dispatch receives is, on this rank.

    Attributes:
        prefix: [R, R] int32.
        records: [n, W] int32; None: none come, or `Unpack` splits them.
        source_idx: [n] int32, written: the token of each row at its source.
        topk_idx: [n, K], written, or None.
        topk_weights: [n, K] float32, written, or None.
        num_rows: n.
        x: Address where rows stay, if this rank is staged; else 0.
        scales: Address where scales stay, likewise.
    """

    prefix: torch.Tensor
    records: torch.Tensor | None = None
    source_idx: torch.Tensor | None = None
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    num_rows: int = 0
    x: int = 0
    scales: int = 0


class Put:
    """Writes each token's rows to every peer that takes it: one read, one write for each destination.

    Args:
        context: Holds the peers' addresses, the rows that they offer, and the first slots.
        shape: How to launch.
        rows: What the rows are made of.
        num_local_experts: L.
        end: How the dispatch ends; None: other kernels end it.
    """

    def __init__(
        self,
        context: Context,
        shape: LaunchShape,
        rows: RowSpec,
        num_local_experts: int = 0,
        end: End | None = None,
    ):
        self._nothing = context.state  # a dummy for arguments that are not used
        word_bytes = rows.word.itemsize
        row_words = rows.row_bytes // word_bytes
        vector, block, self._num_pieces, num_warps = shape.cut(row_words, word_bytes, rows.is_aligned)
        if rows.has_records:
            num_warps = min(_MOST_RECORD_WARPS, num_warps)
        scale_bytes, topk = rows.scale_bytes or 4, next_power_of_2(rows.num_topk)
        self._most_blocks = shape.num_blocks
        constants = {
            "WORD_BYTES": word_bytes,
            "VECTOR": vector,
            "SCALE_BYTES": scale_bytes,
            "BLOCK": block,
            "HAS_SCALES": rows.scale_bytes > 0,
            "SCALES": next_power_of_2(rows.num_scales),
            "HAS_RECORDS": rows.has_records,
            "HAS_TOPK": rows.num_topk > 0,
            "TOPK": topk,
            "KEEPS_WEIGHTS": rows.keeps_weights,
            "LANES": next_power_of_2(context.num_ranks),
            "IS_WHOLE": row_words <= block,
            "ENDS": end is not None,
            "POLLERS": num_lanes(context, num_warps),
            "NUM_WARPS": num_warps,
            "TILE": max(1, 2048 // topk),
        }
        kernel = variant(dispatch_rows_kernel, num_warps, constants, (rows.idx_dtype,), shape.num_registers)
        int32, float32 = torch.int32, torch.float32
        sent = (rows.word, integer_of(scale_bytes), int32, int32, rows.idx_dtype, float32)
        came = (int32, int32, int32, rows.idx_dtype, float32)
        fixed = (
            context.words,
            row_words * word_bytes // vector,
            rows.num_scales,
            rows.num_topk,
            num_local_experts,
            record_words(rows.num_topk) if rows.has_records else 0,
            *(end or (0, 0)),
        )
        self._launch = Launch(kernel, (*sent, *came, *(None,) * 7), fixed)

    def __call__(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        slots: torch.Tensor,
        send_head: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        received: Received | tuple | None = None,
    ) -> None:
        """Put the rows of one call.

        Args:
            x: [T, H] contiguous.
            scales: [T, S] of elements of at most 8 bytes, any strides, or None.
            slots: [T, R] int32, relative to the first slots; -1 where a token is not sent.
            send_head: [T, R] int32, written with the slots; None: `slots` are those of a handle, and no records travel.
            topk_idx: [T, K] or None.
            topk_weights: [T, K] float32 or None.
            received: What comes; a plain tuple is made faster. None: other kernels end the dispatch.
        """
        nothing, num_tokens = self._nothing, x.shape[0]
        stride_t, stride_s = (0, 0) if scales is None else scales.stride()
        if scales is None:
            scales = nothing
        if send_head is None:
            send_head = nothing
        if topk_idx is None or topk_weights is None:
            topk_idx = topk_weights = nothing
        prefix = records = source_idx = recv_idx = recv_weights = nothing
        num_rows = num_split = at = scales_at = 0
        if received is not None:
            prefix, records, source_idx, recv_idx, recv_weights, num_rows, at, scales_at = received
            if source_idx is not None:
                num_split = num_rows
            else:
                source_idx = nothing
            if records is None:
                records = nothing
            if recv_idx is None or recv_weights is None:
                recv_idx = recv_weights = nothing
        self._launch(
            max(1, min(self._most_blocks, num_tokens * self._num_pieces)),
            (
                x, scales, slots, send_head, topk_idx, topk_weights, prefix, records, source_idx, recv_idx,
                recv_weights,
            ),
            (stride_t, stride_s, num_tokens, num_rows, num_split, at, scales_at),
        )  # fmt: skip


def integer_of(num_bytes: int) -> torch.dtype:
    """Return the integer type of so many bytes, as which elements are moved."""
    return {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[num_bytes]


@jit
def dispatch_rows_kernel(
    x,
    scales,
    slots,
    send_head,
    topk_idx,
    topk_weights,
    prefix,
    records,
    source_idx,
    recv_topk_idx,
    recv_topk_weights,
    scale_stride_t: tl.int32,
    scale_stride_s: tl.int32,
    num_tokens: tl.int32,
    num_rows: tl.int64,
    num_split: tl.int32,
    staged_x: tl.int64,
    staged_scales: tl.int64,
    context_words,
    row_vectors: tl.int32,
    num_scales: tl.int32,
    num_topk: tl.int32,
    num_local: tl.int32,
    num_record_words: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    WORD_BYTES: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_RECORDS: tl.constexpr,
    HAS_TOPK: tl.constexpr,
    TOPK: tl.constexpr,
    KEEPS_WEIGHTS: tl.constexpr,
    LANES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
    ENDS: tl.constexpr,
    POLLERS: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Items are pieces of rows: piece c of token t is item `t * pieces + c`.

    The first piece also moves scales and records.

    Example: slots `[[0, 1]]`, first slots `[5, 7]`: token 0 goes to row 5 of peer 0 and to row 8 of peer 1.
    """
    context = open_context(context_words)
    _, _, state, table, _, num_ranks, rank, _, _, _ = context
    row_words = row_vectors * (VECTOR // WORD_BYTES)  # so the compiler knows that vectors of words are whole
    num_pieces = 1 if IS_WHOLE else tl.cdiv(row_words, BLOCK)  # 1 is known: nothing is divided by it
    sent = (x, scales, slots, send_head, topk_idx, topk_weights)
    widths = (row_words, num_scales, scale_stride_t, scale_stride_s, num_topk, num_local, num_record_words)
    sizes = (num_pieces, num_tokens * num_pieces, num_tokens)
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    if may_move(state):
        # What every token needs of every peer: in registers, once.
        capacities = tl.load(table + _CAPACITIES * num_ranks + lanes, mask=is_rank, other=0)
        starts = tl.load(table + _STARTS * num_ranks + lanes, mask=is_rank, other=0)
        _put_items(
            context, sent, widths, sizes, (starts, capacities * 0, capacities), tl.program_id(0), tl.num_programs(0),
            False, WORD_BYTES, VECTOR, SCALE_BYTES, BLOCK, HAS_SCALES, SCALES, HAS_RECORDS, HAS_TOPK, TOPK,
            KEEPS_WEIGHTS, LANES,
        )  # fmt: skip
    if ENDS:
        if is_last_block(state + _ENDED, True):
            is_well = may_still_move(state)
            if is_well:
                num_rounds = tl.full((), 1, tl.int32)
                is_staged = tl.load(state + _STAGED) != 0
                if is_staged:
                    num_rounds = num_dispatch_rounds(context, prefix, LANES)
                turn = tl.zeros((), tl.int32)
                while is_well & (turn < 2 * num_rounds - 1):
                    if is_staged & (turn % 2 == 0):
                        # Of a round: its rows of each staged peer, into this rank's part of the peer's staging.
                        part = tl.load(table + _SOURCE_ROWS * num_ranks + lanes, mask=is_rank, other=0)
                        width = tl.where(rank > 0, num_ranks, 0)
                        before = tl.load(prefix + (rank - 1) * num_ranks + lanes, mask=lanes < width, other=0)
                        starts = tl.load(table + _STARTS * num_ranks + lanes, mask=is_rank, other=0) - before
                        lowest = rank * part
                        _put_items(
                            context, sent, widths, sizes, (starts + lowest - turn // 2 * part, lowest, lowest + part),
                            0, 1, True, WORD_BYTES, VECTOR, SCALE_BYTES, BLOCK, HAS_SCALES, SCALES, HAS_RECORDS,
                            HAS_TOPK, TOPK, KEEPS_WEIGHTS, LANES,
                        )  # fmt: skip
                    is_well = signal_and_wait(context, step + turn, operation, POLLERS, NUM_WARPS)
                    if is_well & is_staged & (turn % 2 == 0):
                        row_bytes, scale_bytes = row_words.to(tl.int64) * WORD_BYTES, num_scales * SCALE_BYTES
                        row_widths = (row_bytes, scale_bytes, num_record_words * 4)
                        stays = (staged_x, staged_scales, records.to(tl.int64))
                        unstage(context, prefix, turn // 2, num_rows, row_widths, stays)
                    turn += 1
                count_rounds(context, is_well, num_rounds - 1)
            if HAS_RECORDS and num_split > 0:
                tl.debug_barrier()  # this block may have copied them out
                split_records(
                    context, records, prefix, source_idx, recv_topk_idx, recv_topk_weights, num_split, num_topk,
                    num_record_words, 0, TILE, HAS_TOPK, TOPK, False, LANES, TILE,
                )  # fmt: skip


@triton.jit
def _put_items(
    context, sent, widths, sizes, slots_at, first, step, IS_ROUND: tl.constexpr, WORD_BYTES: tl.constexpr,
    VECTOR: tl.constexpr, SCALE_BYTES: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr,
    SCALES: tl.constexpr, HAS_RECORDS: tl.constexpr, HAS_TOPK: tl.constexpr, TOPK: tl.constexpr,
    KEEPS_WEIGHTS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write every `step`-th item, from `first` on, to all peers that take it.

    Args:
        context: See `exchange.open_context`.
        sent: Rows, scales, slots, `send_head`, ids and weights.
        widths: Words of a row, scales with their strides, K, L, and words of a record.
        sizes: Pieces of a row, items, tokens.
        slots_at: [LANES] each: what is added to a slot to make it a row of the peer, and from and to which row the peer
            takes rows.
        first: The first item.
        step: From one item to the next.
        IS_ROUND: It is a round of staging: rows are those of a part, and not what `send_head` has.
        WORD_BYTES: Of a word.
        VECTOR: Bytes that rows are aligned to.
        SCALE_BYTES: Of a scale.
        BLOCK: Words of a piece.
        HAS_SCALES: There are scales.
        SCALES: At least as many as a row has.
        HAS_RECORDS: Records travel.
        HAS_TOPK: They have ids and weights.
        TOPK: At least K.
        KEEPS_WEIGHTS: Records have all weights of a token.
        LANES: At least R.
    """
    _, _, _, table, _, num_ranks, rank, _, _, _ = context
    row_words, num_scales, _, _, num_topk, num_local, num_record_words = widths
    num_pieces, num_items, _ = sizes
    starts, lowest, highest = slots_at
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    bases = tl.load(table + lanes, mask=is_rank, other=0)
    scale_bases = tl.load(table + num_ranks + lanes, mask=is_rank, other=0)
    record_bases = tl.load(table + 2 * num_ranks + lanes, mask=is_rank, other=0)
    # The next item is loaded while this one is written, to hide the latency of memory, the peers' and this rank's.
    coming = _load_item(sent, widths, sizes, first, num_ranks, VECTOR, BLOCK, HAS_SCALES, SCALES, HAS_TOPK, TOPK, LANES)
    for item in range(first, num_items, step):
        row, slot, scale, ids, weights = coming
        coming = _load_item(
            sent, widths, sizes, item + step, num_ranks, VECTOR, BLOCK, HAS_SCALES, SCALES, HAS_TOPK, TOPK, LANES
        )
        token, piece = item // num_pieces, item % num_pieces
        words = piece * BLOCK + tl.arange(0, BLOCK)
        target_rows = tl.where(slot >= 0, slot + starts, -1)
        goes = (target_rows >= lowest) & (target_rows < highest)
        rows_from_1 = tl.where(goes, target_rows + 1, 0).to(tl.int32)
        write_row(row, words, row_words, rows_from_1, bases, rank, num_ranks, WORD_BYTES, VECTOR)
        if HAS_SCALES or HAS_RECORDS:
            if piece == 0:
                if HAS_SCALES:
                    columns = tl.arange(0, SCALES)
                    cells = (scale_bases + target_rows * num_scales * SCALE_BYTES).to(sent[1].dtype)
                    is_cell = goes[:, None] & (columns < num_scales)[None, :]
                    tl.store(cells[:, None] + columns[None, :], scale[None, :], mask=is_cell)
                if HAS_RECORDS:
                    if not IS_ROUND:
                        tl.store(sent[3] + token * num_ranks + lanes, target_rows.to(tl.int32), mask=is_rank)
                    record = (record_bases + target_rows * num_record_words * 4).to(tl.pointer_type(tl.int32))
                    tl.store(record, token, mask=goes)
                if HAS_TOPK:
                    put_topk(ids, weights, record, num_topk, num_local, num_ranks, goes, lanes, TOPK, KEEPS_WEIGHTS)


@triton.jit
def write_row(
    row, words, row_words, rows_from_1, bases, rank, num_ranks, WORD_BYTES: tl.constexpr, VECTOR: tl.constexpr
):
    """Write a piece of a row to all peers that take it, beginning behind this rank: not all to the same one at once.

    A block has so little to do for a piece that its address arithmetic costs as much as its stores.

    Args:
        row: [BLOCK], the piece.
        words: [BLOCK], where it is in the row.
        row_words: Words of a row.
        rows_from_1: [LANES] int32, its row at each peer, from 1 on; 0: it does not go there.
        bases: [LANES] int64, where the rows of each peer begin.
        rank: This rank, among the peers.
        num_ranks: The peers.
        WORD_BYTES: Of a word.
        VECTOR: Bytes that rows are aligned to.
    """
    lanes = tl.arange(0, rows_from_1.shape[0])
    if rows_from_1.shape[0] <= _MOST_UNROLLED:
        for turn in tl.static_range(rows_from_1.shape[0]):
            peer = rank + 1 + turn
            is_peer = lanes == tl.where(peer >= num_ranks, peer - num_ranks, peer)
            _write_to(row, words, row_words, rows_from_1, bases, is_peer & (turn < num_ranks), WORD_BYTES, VECTOR)
    else:
        for turn in range(num_ranks):
            peer = rank + 1 + turn
            is_peer = lanes == tl.where(peer >= num_ranks, peer - num_ranks, peer)
            if tl.sum(tl.where(is_peer, rows_from_1, 0)) > 0:
                _write_to(row, words, row_words, rows_from_1, bases, is_peer, WORD_BYTES, VECTOR)


@triton.jit
def _write_to(row, words, row_words, rows_from_1, bases, is_peer, WORD_BYTES: tl.constexpr, VECTOR: tl.constexpr):
    """Write a piece of a row to one peer, if it takes it."""
    row_from_1 = tl.sum(tl.where(is_peer, rows_from_1, 0))
    base = tl.sum(tl.where(is_peer, bases, 0))  # the same in every iteration, so it is hoisted
    address = base + (row_from_1 - 1).to(tl.int64) * (row_words * WORD_BYTES)
    pointer = tl.multiple_of(address.to(tl.pointer_type(row.dtype)), VECTOR)
    tl.store(pointer + words, row, mask=words < tl.where(row_from_1 > 0, row_words, 0))


@triton.jit
def _load_item(
    sent, widths, sizes, item, num_ranks, VECTOR: tl.constexpr, BLOCK: tl.constexpr, HAS_SCALES: tl.constexpr,
    SCALES: tl.constexpr, HAS_TOPK: tl.constexpr, TOPK: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Load a piece of a row, and what its token has beside it; nothing is loaded if there is no such item."""
    x, scales, slots, _, topk_idx, topk_weights = sent
    row_words, num_scales, stride_t, stride_s, num_topk, _, _ = widths
    num_pieces, num_items, num_tokens = sizes
    token = item // num_pieces
    row = load_piece(x, row_words, item, num_pieces, num_items, VECTOR, BLOCK)
    slot = load_slots(slots, token, num_tokens, num_ranks, tl.arange(0, LANES))
    scale, ids, weights = slot, slot, slot
    if HAS_SCALES:
        scale = load_columns(scales, token, num_tokens, stride_t, stride_s, num_scales, SCALES)
    if HAS_TOPK:
        ids = load_columns(topk_idx, token, num_tokens, num_topk, 1, num_topk, TOPK)
        weights = load_columns(topk_weights, token, num_tokens, num_topk, 1, num_topk, TOPK)
    return row, slot, scale, ids, weights


@triton.jit
def load_piece(x, row_words, item, num_pieces, num_items, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """A piece of a row; nothing where there is no such item."""
    words = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
    row = tl.multiple_of(x + tl.cast(item // num_pieces, tl.int64) * row_words, VECTOR)
    return tl.load(row + words, mask=words < tl.where(item < num_items, row_words, 0), other=0)


@triton.jit
def load_slots(slots, token, num_tokens, num_ranks, lanes):
    """A token's slot at every peer, relative to the first one."""
    width = tl.where(token < num_tokens, num_ranks, 0)
    return tl.load(slots + tl.cast(token, tl.int64) * num_ranks + lanes, mask=lanes < width, other=-1)


@triton.jit
def load_columns(matrix, token, num_tokens, stride_t, stride_c, num_columns, COLUMNS: tl.constexpr):
    """The few columns that a token has of a matrix; nothing where there is no such token."""
    columns = tl.arange(0, COLUMNS)
    width = tl.where(token < num_tokens, num_columns, 0)
    return tl.load(matrix + tl.cast(token, tl.int64) * stride_t + columns * stride_c, mask=columns < width, other=0)


@triton.jit
def put_topk(
    ids, weights, record, num_topk, num_local, num_ranks, goes, lanes, TOPK: tl.constexpr, KEEPS_WEIGHTS: tl.constexpr
):
    """Write a token's ids and weights into its records at the peers `lanes`, each as that peer counts them.

    Weights of experts of other ranks become 0, unless they are kept.
    """
    columns = tl.arange(0, TOPK)
    ids = tl.where((ids >= 0) & (ids < num_local * num_ranks), ids, -1).to(tl.int32)  # before any bits are cut off
    local = tl.where(ids[None, :] >= 0, ids[None, :] - lanes[:, None] * num_local, -1)
    is_local = (local >= 0) & (local < num_local)
    is_cell = goes[:, None] & (columns < num_topk)[None, :]
    cells = record[:, None] + 1 + columns[None, :]
    tl.store(cells, tl.where(is_local, local, -1), mask=is_cell)
    is_kept = is_local
    if KEEPS_WEIGHTS:
        is_kept = is_cell
    bits = tl.where(is_kept, weights[None, :], 0.0).to(tl.int32, bitcast=True)
    tl.store(cells + num_topk, bits, mask=is_cell)


class Unpack:
    """Splits the records of the rows that came. Rows beyond them get ids -1.

    Args:
        context: For this rank's number, and whether the buffer has failed.
        num_blocks: Most blocks.
        num_topk: K.
        idx_dtype: Type of the ids.
        has_ends: Sources are written with their rank, and so is where the rows of each rank end.
    """

    def __init__(
        self, context: Context, num_blocks: int, num_topk: int, idx_dtype: torch.dtype, has_ends: bool = False
    ):
        self._nothing = context.state  # a dummy for arguments that are not used
        self._most_blocks, self._has_ends = num_blocks, has_ends
        topk = next_power_of_2(num_topk)
        self._tile = max(1, 4096 // topk)
        constants = {
            "HAS_TOPK": num_topk > 0,
            "TOPK": topk,
            "HAS_ENDS": has_ends,
            "LANES": next_power_of_2(context.num_ranks),
            "TILE": self._tile,
        }
        kernel = variant(_unpack_kernel, 8, constants, (idx_dtype,))
        types = (torch.int32, torch.int32, torch.int32, idx_dtype, torch.float32, torch.int32, None)
        fixed = (context.words, num_topk, record_words(num_topk))
        self._launch = Launch(kernel, types, fixed)

    def __call__(
        self,
        records: torch.Tensor,
        num_rows: int,
        prefix: torch.Tensor,
        sources: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        ends: torch.Tensor | None = None,
    ) -> None:
        """Split the records of one call.

        Args:
            records: [m, W] int32, m at least n.
            num_rows: n.
            prefix: [R, R] int32.
            sources: [n] int32, written: the token of each row at its source. With `ends` [n, 2]: also, in front of it,
                the rank that it came from; R and -1 beyond the rows that came.
            topk_idx: [n, K] int32 or int64, written, or None.
            topk_weights: [n, K] float32, written, or None.
            ends: [R] int32, written: the rows that came from ranks 0..s, which is this rank's column of `prefix`.
        """
        nothing = self._nothing
        if topk_idx is None or topk_weights is None:
            topk_idx = topk_weights = nothing
        if ends is None:
            ends = nothing
        num_blocks = max(self._has_ends, min(self._most_blocks, -(-num_rows // self._tile)))
        self._launch(num_blocks, (records, prefix, sources, topk_idx, topk_weights, ends), (num_rows,))


@jit
def _unpack_kernel(
    records,
    prefix,
    sources,
    topk_idx,
    topk_weights,
    ends,
    num_rows: tl.int32,
    context_words,
    num_topk: tl.int32,
    num_record_words: tl.int32,
    HAS_TOPK: tl.constexpr,
    TOPK: tl.constexpr,
    HAS_ENDS: tl.constexpr,
    LANES: tl.constexpr,
    TILE: tl.constexpr,
):
    """Blocks split tiles of rows; the first block copies the ends.

    Example: record `[4, 1, -1, bits(0.5), bits(0)]` with K = 2: source index 4, ids `[1, -1]`, weights `[0.5, 0]`. With
    ends `[0, 1]` it came from rank 1, and the row behind it, which did not come, from "rank" 2.
    """
    context = open_context(context_words)
    num_ranks, rank = context[5], context[6]
    if HAS_ENDS and tl.program_id(0) == 0:
        lanes = tl.arange(0, LANES)
        is_rank = lanes < num_ranks
        tl.store(ends + lanes, tl.load(prefix + lanes * num_ranks + rank, mask=is_rank), mask=is_rank)
    split_records(
        context, records, prefix, sources, topk_idx, topk_weights, num_rows, num_topk, num_record_words,
        tl.program_id(0) * TILE, tl.num_programs(0) * TILE, HAS_TOPK, TOPK, HAS_ENDS, LANES, TILE,
    )  # fmt: skip


@triton.jit
def num_rows_came(context, prefix, num_rows):
    """Return how many rows came, of those that there is memory for.

    If the call has failed, none came: ids of -1 keep later kernels from memory that was never written. More may come
    than was guessed. Then the call is held, and nothing uses what is made of them.
    """
    _, _, state, _, _, num_ranks, rank, _, _, _ = context
    num_came = tl.load(prefix + (num_ranks - 1) * num_ranks + rank)
    return tl.minimum(tl.where(tl.load(state + _FAILED) == 0, num_came, 0), num_rows)


@triton.jit
def split_records(
    context, records, prefix, sources, topk_idx, topk_weights, num_rows, num_topk, num_record_words, first, step,
    HAS_TOPK: tl.constexpr, TOPK: tl.constexpr, HAS_ENDS: tl.constexpr, LANES: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Split the records of tiles of rows, from `first` on and in steps. Rows beyond those that came get ids -1."""
    num_ranks, rank = context[5], context[6]
    num_came = num_rows_came(context, prefix, num_rows)
    columns = tl.arange(0, TOPK)
    for start in range(first, num_rows, step):
        rows = start + tl.arange(0, TILE)
        offsets = rows.to(tl.int64) * num_record_words
        came = rows < num_came
        source_idx = tl.load(records + offsets, mask=came, other=-1)
        if HAS_ENDS:
            source = tl.where(came, source_of(rows, prefix, num_ranks, rank, LANES), num_ranks)
            pairs = sources + 2 * rows.to(tl.int64)
            tl.store(pairs, source, mask=rows < num_rows)
            tl.store(pairs + 1, source_idx, mask=rows < num_rows)
        else:
            tl.store(sources + rows, source_idx, mask=came)
        if HAS_TOPK:
            cells = offsets[:, None] + 1 + columns[None, :]
            is_topk = (columns < num_topk)[None, :]
            is_cell = came[:, None] & is_topk
            targets = rows.to(tl.int64)[:, None] * num_topk + columns[None, :]
            tl.store(
                topk_idx + targets,
                tl.load(records + cells, mask=is_cell, other=-1),
                mask=(rows < num_rows)[:, None] & is_topk,
            )
            weights = tl.load(records + cells + num_topk, mask=is_cell, other=0).to(tl.float32, bitcast=True)
            tl.store(topk_weights + targets, weights, mask=is_cell)


@triton.jit
def source_of(rows, prefix, num_ranks, rank, LANES: tl.constexpr):
    """The rank that each row which came is from: so many ranks' rows end before it. They ascend: a binary search.

    Example: ends `[2, 2, 5]`: rows 0 and 1 came from rank 0, rows 2 to 4 from rank 2.
    """
    source = tl.zeros_like(rows)
    step = tl.full((), LANES, tl.int32)  # half of it would do, but Triton 3.6 fails at a loop that never runs
    while step > 0:
        ahead = source + step
        end = tl.load(prefix + (ahead - 1) * num_ranks + rank, mask=ahead <= num_ranks, other=0)
        source = tl.where((ahead <= num_ranks) & (end <= rows), ahead, source)
        step //= 2
    return source
