"""Summing each token's rows out of the peers' windows, and copying rows into the window first. On the device.

Shape letters: T tokens, R ranks, H elements of a row, n rows. The twin of `Pull` is `reduce.reduce_rows`. FP32
accumulation (FP64 for FP64 rows), biases first, then peers in ascending order, one rounding at the end: the result
does not depend on the grid.

No kernel here waits or signals; all of them do nothing once the buffer has failed, or while a call is held.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._triton import Launch, jit, launch, next_power_of_2, tl, triton, variant
from .exchange import STATE_FAILED, STATE_HELD, TABLE_CAPACITIES, Context
from .primitives import rounded
from .put import VECTOR_BYTES, LaunchShape, load_slots, word_of

_FAILED, _HELD = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_HELD)
_CAPACITIES = tl.constexpr(TABLE_CAPACITIES)
_MOST_AT_ONCE = 8  # rows that a block loads before it adds the first


class Pull:
    """Sums each token's rows.

    `out[t] = sum(biases[t]) + sum(row slots[t, d] of peer d, for d with slots[t, d] >= 0)`

    Args:
        context: Holds the peers' addresses and the rows that they offer.
        shape: How to launch.
        section: Which of the peers' sections.
        hidden: H.
        dtype: The dtype of the rows.
        num_biases: At most two.
        is_aligned: `out` and the biases consist of vectors, see `word_of`.
    """

    def __init__(
        self,
        context: Context,
        shape: LaunchShape,
        section: int,
        hidden: int,
        dtype: torch.dtype,
        num_biases: int = 0,
        is_aligned: bool = True,
    ):
        vector = VECTOR_BYTES if is_aligned else dtype.itemsize
        block = min(shape.words * 4 // dtype.itemsize, next_power_of_2(hidden))
        self._num_pieces = -(-hidden // block)
        self._most_blocks = shape.num_blocks
        constants = {
            "NUM_BIASES": num_biases,
            "BLOCK": block,
            "AT_ONCE": min(_MOST_AT_ONCE, next_power_of_2(context.num_ranks)),
            "LANES": next_power_of_2(context.num_ranks),
            "VECTOR": vector,
            "WIDE": tl.float64 if dtype == torch.float64 else tl.float32,
        }
        num_warps = shape.warps_for(block * dtype.itemsize, vector)
        kernel = variant(combine_rows_kernel, num_warps, constants, (dtype,), shape.num_registers)
        row_vectors = hidden * dtype.itemsize // vector
        fixed = (context.table, context.state, row_vectors, context.num_ranks, section)
        types = (dtype, dtype, dtype, torch.int32, None)
        self._launch = Launch(kernel, types, fixed)

    def __call__(
        self,
        out: torch.Tensor,
        slots: torch.Tensor,
        biases: Sequence[torch.Tensor] = (),
    ) -> None:
        """Sum the rows of one call.

        Args:
            out: [T, H], written.
            slots: [T, R] int32; -1 where a peer has no row of the token.
            biases: Tensors [T, H] of out's dtype, added first and in order.
        """
        num_tokens = out.shape[0]
        first, second = (*biases, out, out)[:2] if biases else (out, out)
        num_blocks = min(self._most_blocks, num_tokens * self._num_pieces)
        self._launch(num_blocks, (out, first, second, slots), (num_tokens,))


@jit
def combine_rows_kernel(
    out,
    bias_0,
    bias_1,
    slots,
    num_tokens: tl.int32,
    table,
    state,
    row_vectors: tl.int32,
    num_ranks: tl.int32,
    section: tl.int32,
    NUM_BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Items are pieces of rows: piece c of token t is item `t * pieces + c`.

    Example: one token, slots `[[2, -1]]`, row 2 of peer 0 is `[1, 2]`, bias `[[10, 10]]`: out is `[[11, 12]]`.
    """
    if (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0):
        ELEMENT_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
        hidden = row_vectors * (VECTOR // ELEMENT_BYTES)  # so the compiler knows that vectors of elements are whole
        lanes = tl.arange(0, LANES)
        is_rank = lanes < num_ranks
        bases = tl.load(table + section * num_ranks + lanes, mask=is_rank, other=0)
        capacities = tl.load(table + _CAPACITIES * num_ranks + lanes, mask=is_rank, other=0)
        num_pieces = tl.cdiv(hidden, BLOCK)
        num_items = num_tokens * num_pieces
        slot = load_slots(slots, tl.program_id(0) // num_pieces, num_tokens, num_ranks, lanes)
        for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
            next_slot = load_slots(slots, (item + tl.num_programs(0)) // num_pieces, num_tokens, num_ranks, lanes)
            columns = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
            start = tl.cast(item // num_pieces, tl.int64) * hidden
            has_row = (slot >= 0) & (slot < capacities)
            rows = tl.where(has_row, bases + slot.to(tl.int64) * hidden * ELEMENT_BYTES, 0)
            add_rows(out, bias_0, bias_1, rows, start, columns, hidden, num_ranks, NUM_BIASES, AT_ONCE, VECTOR, WIDE)
            slot = next_slot


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
        WIDE: What is summed in.
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
        total = tl.load(tl.multiple_of(bias_0, VECTOR) + columns, mask=columns < hidden, other=0.0).to(WIDE)
    if NUM_BIASES > 1:
        total += tl.load(tl.multiple_of(bias_1, VECTOR) + columns, mask=columns < hidden, other=0.0).to(WIDE)
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
        WIDE: What is summed in.
    """
    lanes = tl.arange(0, rows.shape[0])
    for first in range(0, count, AT_ONCE):
        for turn in tl.static_range(AT_ONCE):
            row = tl.sum(tl.where(lanes == first + turn, rows, 0))
            pointer = tl.multiple_of(row.to(like.dtype), VECTOR)
            mask = columns < tl.where(row != 0, hidden, 0)
            value = tl.load(pointer + columns, mask=mask, other=0.0).to(WIDE)
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
            context.state,
            rows.size(0),
            row_vectors,
            context.num_ranks,
            context.rank,
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
    state,
    num_rows: tl.int32,
    row_vectors: tl.int32,
    num_ranks: tl.int32,
    rank: tl.int32,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the rows that came. `notify.py` has a kernel that also does the handshake."""
    copy_pieces(target, rows, prefix, state, num_rows, row_vectors, num_ranks, rank, VECTOR, BLOCK)


@triton.jit
def copy_pieces(
    target, rows, prefix, state, num_rows, row_vectors, num_ranks, rank, VECTOR: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """Copy the rows that came, piece by piece; they are contiguous, so a piece may span several."""
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
