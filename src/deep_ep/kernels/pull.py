"""Summing each token's rows out of the peers' windows, and copying rows into the window first. On the device.

Shape letters: T tokens, K selections of a token, R ranks, H elements of a row, n rows. The twin of `Pull` is
`reduce.reduce_rows`. FP32 accumulation (FP64 for FP64 rows), biases first, then peers in ascending order, one rounding
at the end: the result does not depend on the grid.

The last block of `Pull` ends the combine (`finish.py`). Nothing is done once the buffer has failed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._triton import Launch, jit, launch, next_power_of_2, tl, triton, variant
from .exchange import (
    STATE_ENDED,
    STATE_FAILED,
    STATE_STAGED,
    STATE_TOKENS,
    TABLE_CAPACITIES,
    TABLE_SOURCE_ROWS,
    Context,
    is_last_block,
    may_move,
    may_still_move,
    num_lanes,
    open_context,
)
from .finish import count_rounds, first_rows, range_tokens_of, signal_and_wait, stage_in
from .primitives import rounded, widened
from .put import VECTOR_BYTES, End, LaunchShape, load_slots, word_of

_FAILED, _STAGED, _ENDED = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_STAGED), tl.constexpr(STATE_ENDED)
_MOST_TOKENS = tl.constexpr(STATE_TOKENS)
_CAPACITIES, _SOURCE_ROWS = tl.constexpr(TABLE_CAPACITIES), tl.constexpr(TABLE_SOURCE_ROWS)
_MOST_AT_ONCE = 8  # rows that a block loads before it adds the first


class Given(NamedTuple):
    """What this rank gives in a combine, for a rank that is staged.

    Attributes:
        prefix: [R, R] int32.
        source_idx: [n] int32, the token of each row at its source, ascending for each source.
        rows: [n, H] contiguous.
        weights: [n, K] float32 contiguous, or None.
    """

    prefix: torch.Tensor
    source_idx: torch.Tensor
    rows: torch.Tensor
    weights: torch.Tensor | None = None


class Pull:
    """Sums each token's rows, and its weights.

    `out[t] = sum(biases[t]) + sum(row slots[t, d] of peer d, for d with slots[t, d] >= 0)`

    Args:
        context: Holds the peers' addresses and the rows that they offer.
        shape: How to launch.
        hidden: H.
        dtype: The dtype of the rows.
        num_biases: At most two.
        is_aligned: `out` and the biases consist of vectors, see `word_of`.
        num_topk: K, of the weights that come with the rows; 0: none do.
        end: How the combine ends. If no rank is staged, only the step after it is signalled.
    """

    def __init__(
        self,
        context: Context,
        shape: LaunchShape,
        hidden: int,
        dtype: torch.dtype,
        num_biases: int,
        is_aligned: bool,
        num_topk: int,
        end: End,
    ):
        vector, block, self._num_pieces, num_warps = shape.cut(hidden, dtype.itemsize, is_aligned)
        self._most_blocks = shape.num_blocks
        constants = {
            "NUM_BIASES": num_biases,
            "BLOCK": block,
            "AT_ONCE": min(_MOST_AT_ONCE, next_power_of_2(context.num_ranks)),
            "LANES": next_power_of_2(context.num_ranks),
            "VECTOR": vector,
            "WIDE": wide_type(dtype),
            "TOPK": next_power_of_2(num_topk) if num_topk else 0,
            "POLLERS": num_lanes(context, num_warps),
            "NUM_WARPS": num_warps,
        }
        kernel = variant(combine_rows_kernel, num_warps, constants, (dtype,), shape.num_registers)
        row_vectors = hidden * dtype.itemsize // vector
        fixed = (context.words, row_vectors, num_topk, *end)
        types = (dtype, dtype, dtype, torch.float32, torch.int32, torch.int32, torch.int32, None, None, None, None)
        self._launch = Launch(kernel, types, fixed)

    def __call__(
        self,
        out: torch.Tensor,
        weights: torch.Tensor | None,
        slots: torch.Tensor,
        biases: Sequence[torch.Tensor],
        given: Given | tuple,
    ) -> None:
        """Sum the rows of one call.

        Args:
            out: [T, H], written.
            weights: [T, K] float32, written; None: none come.
            slots: [T, R] int32; -1 where a peer has no row of the token.
            biases: Tensors [T, H] of out's dtype, added first and in order.
            given: What this rank gives; a plain tuple is made faster.
        """
        num_tokens = out.shape[0]
        prefix, source_idx, rows, row_weights = given
        first, second = (*biases, out, out)[:2] if biases else (out, out)
        num_blocks = max(1, min(self._most_blocks, num_tokens * self._num_pieces))
        given_at = 0 if row_weights is None else row_weights.data_ptr()
        self._launch(
            num_blocks,
            (out, first, second, slots if weights is None else weights, slots, prefix, source_idx),
            (num_tokens, rows.shape[0], rows.data_ptr(), given_at),
        )


def wide_type(dtype: torch.dtype) -> tl.dtype:
    """Return the type to add rows of a type in."""
    return tl.float64 if dtype == torch.float64 else tl.float32


@jit
def combine_rows_kernel(
    out,
    bias_0,
    bias_1,
    out_weights,
    slots,
    prefix,
    source_idx,
    num_tokens: tl.int32,
    num_rows: tl.int32,
    rows_at: tl.int64,
    weights_at: tl.int64,
    context_words,
    row_vectors: tl.int32,
    num_topk: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    NUM_BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
    TOPK: tl.constexpr,
    POLLERS: tl.constexpr,
    NUM_WARPS: tl.constexpr,
):
    """Items are pieces of rows: piece c of token t is item `t * pieces + c`. The first piece also sums the weights.

    Example: one token, slots `[[2, -1]]`, row 2 of peer 0 is `[1, 2]`, bias `[[10, 10]]`: out is `[[11, 12]]`.
    """
    context = open_context(context_words)
    state = context[2]
    ELEMENT_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    hidden = row_vectors * (VECTOR // ELEMENT_BYTES)  # so the compiler knows that vectors of elements are whole
    sums = (out, bias_0, bias_1, out_weights, slots)
    if may_move(state):
        _sum_items(
            context, sums, tl.program_id(0), tl.num_programs(0), num_tokens, num_tokens, 0, 0, hidden, num_topk, False,
            NUM_BIASES, BLOCK, AT_ONCE, LANES, VECTOR, WIDE, TOPK,
        )  # fmt: skip
    if is_last_block(state + _ENDED, True):
        is_well = may_still_move(state)
        if is_well:
            if tl.load(state + _STAGED) == 0:
                signal_and_wait(context, step + 1, operation, POLLERS, NUM_WARPS)
            else:
                range_tokens = range_tokens_of(context, LANES)
                most_tokens = tl.maximum(tl.load(state + _MOST_TOKENS), 1)
                num_rounds = ((most_tokens + range_tokens - 1) // range_tokens).to(tl.int32)
                rows = first_rows(context, prefix, LANES)  # with which the next round begins, of each source
                given, widths = (rows_at, weights_at), (hidden * ELEMENT_BYTES, num_topk * 4)
                turn = tl.zeros((), tl.int32)
                while is_well & (turn < 2 * num_rounds):
                    start = turn // 2 * range_tokens
                    if turn % 2 == 0:
                        rows = stage_in(
                            context, prefix, source_idx, rows, start, range_tokens, num_rows, given, widths, LANES
                        )
                    is_well = signal_and_wait(context, step + turn, operation, POLLERS, NUM_WARPS)
                    if is_well & (turn % 2 == 0):
                        end = tl.minimum(start + range_tokens, num_tokens)
                        _sum_items(
                            context, sums, start * tl.cdiv(hidden, BLOCK), 1, end, num_tokens, start, range_tokens,
                            hidden, num_topk, True, NUM_BIASES, BLOCK, AT_ONCE, LANES, VECTOR, WIDE, TOPK,
                        )  # fmt: skip
                    turn += 1
                count_rounds(context, is_well, num_rounds - 1)


@triton.jit
def _sum_items(
    context, sums, first, step, end, num_tokens, range_start, range_tokens, hidden, num_topk, IS_ROUND: tl.constexpr,
    NUM_BIASES: tl.constexpr, BLOCK: tl.constexpr, AT_ONCE: tl.constexpr, LANES: tl.constexpr, VECTOR: tl.constexpr,
    WIDE: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Sum every `step`-th item from `first` on; in a round of staging those that have a row at a staged rank.

    Args:
        context: See `exchange.open_context`.
        sums: The sums, both biases, the sums of weights, and the slots.
        first: The first item.
        step: From one item to the next.
        end: Behind the last token.
        num_tokens: T.
        range_start: The first token of a round.
        range_tokens: B, in a round.
        hidden: H.
        num_topk: K.
        IS_ROUND: It is a round of staging.
        NUM_BIASES: How many there are.
        BLOCK: Elements of a piece.
        AT_ONCE: Rows that are loaded before the first is added.
        LANES: At least R.
        VECTOR: Bytes that rows are aligned to.
        WIDE: The type to add in.
        TOPK: At least K; 0: no weights come.
    """
    _, _, _, table, _, num_ranks, rank, _, _, _ = context
    out, bias_0, bias_1, out_weights, slots = sums
    ELEMENT_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    bases = tl.load(table + lanes, mask=is_rank, other=0)
    capacities = tl.load(table + _CAPACITIES * num_ranks + lanes, mask=is_rank, other=0)
    num_pieces = tl.cdiv(hidden, BLOCK)
    slot = load_slots(slots, first // num_pieces, num_tokens, num_ranks, lanes)
    for item in range(first, end * num_pieces, step):
        next_slot = load_slots(slots, (item + step) // num_pieces, num_tokens, num_ranks, lanes)
        token, piece = item // num_pieces, item % num_pieces
        row_idx = slot.to(tl.int64)
        has_row = (slot >= 0) & (slot < capacities)
        is_wanted = True
        if IS_ROUND:
            part_rows = tl.load(table + _SOURCE_ROWS * num_ranks + lanes, mask=is_rank, other=0)
            has_staged_row = (slot >= 0) & (part_rows > 0)
            has_row = has_row | has_staged_row
            row_idx = tl.where(part_rows > 0, (rank * range_tokens + token - range_start).to(tl.int64), row_idx)
            is_wanted = tl.sum(has_staged_row.to(tl.int32)) > 0
        if is_wanted:
            columns = piece * BLOCK + tl.arange(0, BLOCK)
            start = tl.cast(token, tl.int64) * hidden
            rows = tl.where(has_row, bases + row_idx * hidden * ELEMENT_BYTES, 0)
            add_rows(out, bias_0, bias_1, rows, start, columns, hidden, num_ranks, NUM_BIASES, AT_ONCE, VECTOR, WIDE)
            if TOPK > 0:
                if piece == 0:
                    add_weights(
                        out_weights, table, has_row, row_idx, token, num_topk, num_ranks, AT_ONCE, LANES, TOPK,
                        tl.float32,
                    )  # fmt: skip
        slot = next_slot


@triton.jit
def add_weights(
    out, table, has_row, row_idx, token, num_topk, num_ranks, AT_ONCE: tl.constexpr, LANES: tl.constexpr,
    TOPK: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum the weights of a token over the peers that have a row of it.

    Args:
        out: [T, K], written: a pointer to words of 4 bytes, in whose type the peers' rows are read.
        table: See `exchange.open_context`.
        has_row: [LANES] whether a peer has a row.
        row_idx: [LANES] int64, which one.
        token: The token.
        num_topk: K.
        num_ranks: R.
        AT_ONCE: Rows that are loaded before the first is added.
        LANES: At least R.
        TOPK: At least K.
        WIDE: The type to add in, `out`'s. As int32, a word that all peers but one give as 0 keeps all its bits.
    """
    lanes = tl.arange(0, LANES)
    bases = tl.load(table + num_ranks + lanes, mask=lanes < num_ranks, other=0)
    rows = tl.where(has_row, bases + row_idx * num_topk * 4, 0)
    start = tl.cast(token, tl.int64) * num_topk
    columns = tl.arange(0, TOPK)
    add_rows(out, out, out, rows, start, columns, num_topk, num_ranks, 0, AT_ONCE, 4, WIDE)


@triton.jit
def add_rows(
    out, bias_0, bias_1, rows, start, columns, hidden, num_ranks, NUM_BIASES: tl.constexpr, AT_ONCE: tl.constexpr,
    VECTOR: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Sum one piece of a token's rows, the biases first.

    Args:
        out: Written, from `start` on.
        bias_0: The first bias, read from `start` on, if there is one.
        bias_1: The second bias, if there are two.
        rows: [LANES] the address of each peer's row; 0: it has none.
        start: Where the token's row begins.
        columns: [BLOCK] of the piece.
        hidden: H.
        num_ranks: R.
        NUM_BIASES: How many there are.
        AT_ONCE: Rows that are loaded before the first is added.
        VECTOR: Bytes that rows are aligned to.
        WIDE: The type to add in.
    """
    total = add_biases(bias_0 + start, bias_1 + start, columns, hidden, NUM_BIASES, VECTOR, WIDE)
    total = add_to(total, out, rows, columns, hidden, num_ranks, AT_ONCE, VECTOR, WIDE)
    target = tl.multiple_of(out + start, VECTOR) + columns
    tl.store(target, rounded(total, out.dtype.element_ty), mask=columns < hidden)


@triton.jit
def add_biases(
    bias_0, bias_1, columns, hidden, NUM_BIASES: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Return what a sum begins with: one piece of a token's biases, or zeros."""
    total = tl.zeros([columns.shape[0]], WIDE)
    if NUM_BIASES > 0:
        total = widened(tl.load(tl.multiple_of(bias_0, VECTOR) + columns, mask=columns < hidden, other=0.0), WIDE)
    if NUM_BIASES > 1:
        total += widened(tl.load(tl.multiple_of(bias_1, VECTOR) + columns, mask=columns < hidden, other=0.0), WIDE)
    return total


@triton.jit
def add_to(
    total, like, rows, columns, hidden, count, AT_ONCE: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """Add one piece of some rows, in order.

    Args:
        total: [BLOCK], to begin with.
        like: A pointer of the rows' type.
        rows: [LANES] addresses; 0: there is none.
        columns: [BLOCK] of the piece.
        hidden: Elements of a row.
        count: Rows.
        AT_ONCE: Rows that are loaded before the first is added.
        VECTOR: Bytes that rows are aligned to.
        WIDE: The type to add in.
    """
    lanes = tl.arange(0, rows.shape[0])
    for first in range(0, count, AT_ONCE):
        for turn in tl.static_range(AT_ONCE):
            row = tl.sum(tl.where(lanes == first + turn, rows, 0))
            pointer = tl.multiple_of(row.to(like.dtype), VECTOR)
            mask = columns < tl.where(row != 0, hidden, 0)
            value = widened(tl.load(pointer + columns, mask=mask, other=0.0), WIDE)
            total = tl.where(row != 0, total + value, total)  # adding nothing must not make 0.0 of -0.0
    return total


def copy_shape(shape: LaunchShape, num_bytes: int, word: torch.dtype, is_aligned: bool) -> tuple[int, int, int]:
    """Return, for rows of `num_bytes`, the vectors of a row, the bytes of a vector, and the words that a block
    copies at once.
    """
    vector = VECTOR_BYTES if is_aligned else word.itemsize
    return num_bytes // vector, vector, shape.words * 4 // word.itemsize


def copy_in(
    context: Context, shape: LaunchShape, target: torch.Tensor, rows: torch.Tensor, prefix: torch.Tensor
) -> None:
    """Copy the rows that came to this rank in a dispatch, of as many as there is memory for.

    Args:
        context: For this rank's number, and whether the buffer has failed.
        shape: How to launch.
        target: [n, columns] contiguous, written.
        rows: [n, columns] contiguous, of the same dtype.
        prefix: [R, R] int32, of the dispatch.
    """
    if rows.numel() == 0:
        return
    word, is_aligned = word_of(target, rows)
    num_bytes = rows.size(1) * rows.element_size()
    row_vectors, vector, block = copy_shape(shape, num_bytes, word, is_aligned)
    num_pieces = -(-rows.size(0) * num_bytes // word.itemsize // block)
    launch(
        _copy_in_kernel,
        max(1, min(shape.num_blocks, num_pieces)),
        (
            target.view(-1).view(word),
            rows.view(-1).view(word),
            prefix,
            rows.size(0),
            context.words,
            row_vectors,
        ),
        (word,),
        num_warps=shape.num_warps,
        VECTOR=vector,
        BLOCK=block,
    )


@jit
def _copy_in_kernel(
    target,
    rows,
    prefix,
    num_rows: tl.int32,
    context_words,
    row_vectors: tl.int32,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the rows that came. `notify.py` has a kernel that also does the handshake."""
    copy_pieces(open_context(context_words), target, rows, prefix, num_rows, row_vectors, VECTOR, BLOCK)


@triton.jit
def copy_pieces(
    context, target, rows, prefix, num_rows, row_vectors, VECTOR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy the rows that came, piece by piece; they are contiguous, so a piece may span several."""
    _, _, state, _, _, num_ranks, rank, _, _, _ = context
    WORD_BYTES: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    if tl.load(state + _FAILED) == 0:  # whatever was held before is over: this comes before the call's first words
        num_came = tl.minimum(tl.load(prefix + (num_ranks - 1) * num_ranks + rank), num_rows)
        num_words = num_came.to(tl.int64) * row_vectors * (VECTOR // WORD_BYTES)
        piece = tl.program_id(0).to(tl.int64)
        values = _load_words(rows, piece * BLOCK, num_words, VECTOR, BLOCK)
        while piece * BLOCK < num_words:
            following = piece + tl.num_programs(0)
            next_values = _load_words(rows, following * BLOCK, num_words, VECTOR, BLOCK)  # overlaps the store below
            words = piece * BLOCK + tl.arange(0, BLOCK)
            tl.store(
                tl.multiple_of(target + piece * BLOCK, VECTOR) + tl.arange(0, BLOCK), values, mask=words < num_words
            )
            values = next_values
            piece = following


@triton.jit
def _load_words(rows, start, num_words, VECTOR: tl.constexpr, BLOCK: tl.constexpr):
    """Load a piece of the rows, without anything beyond their end."""
    words = start + tl.arange(0, BLOCK)
    return tl.load(tl.multiple_of(rows + start, VECTOR) + tl.arange(0, BLOCK), mask=words < num_words, other=0)
