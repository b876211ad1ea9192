"""The other form of combine: rows are written into their source's inbox, and summed there. On the device.

Shape letters: T tokens of the receiver, R ranks, H elements of a row, n rows of the giver. An *inbox* has a slot for
each token and rank, [T * R, slot_bytes]: slot `t * R + p` is for what rank p makes of token t. Several tensors may
travel side by side in a slot. Sums are those of `pull.pull`, to the bit.

No kernel here waits or signals; all of them do nothing once the buffer has failed. While a call goes in rounds nothing
is pushed, and only tokens without rows are left to the sum.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._triton import jit, launch, next_power_of_2, tl
from .exchange import STATE_FAILED, STATE_HELD, STATE_STAGED, TABLE_ROOMS, Places
from .pull import add_rows, launch_sum
from .put import VECTOR_BYTES, Shape, load_slots, word_of

INBOX = 2  # the section in which a rank offers its inbox

_FAILED, _HELD, _STAGED = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_HELD), tl.constexpr(STATE_STAGED)
_ROOMS, _INBOX = tl.constexpr(TABLE_ROOMS), tl.constexpr(INBOX)


def push(
    places: Places,
    shape: Shape,
    rows: torch.Tensor,
    source_idx: torch.Tensor,
    prefix: torch.Tensor,
    slot_bytes: int,
    offset: int,
) -> None:
    """Write the rows that came to this rank in a dispatch into the inboxes of the ranks that they came from.

    Args:
        places: Holds the addresses of the inboxes, and their slots.
        shape: How to launch.
        rows: [n, H] contiguous.
        source_idx: [n] int32, the token of each row at its source.
        prefix: [R, R] int32, of the dispatch.
        slot_bytes: Of a slot; a multiple of 16.
        offset: Where in a slot the row goes; a multiple of 16.
    """
    if rows.numel() == 0:
        return
    word, is_aligned = word_of(rows)
    vector = VECTOR_BYTES if is_aligned else word.itemsize
    row_bytes = rows.size(1) * rows.element_size()
    block = min(shape.words * 4 // word.itemsize, next_power_of_2(row_bytes // word.itemsize))
    launch(
        _push_kernel,
        max(1, min(shape.num_blocks, rows.size(0))),
        (
            rows.view(-1).view(word),
            source_idx,
            prefix,
            places.table,
            places.state,
            rows.size(0),
            row_bytes // vector,
            slot_bytes // 16,
            offset // 16,
            places.num_ranks,
            places.rank,
        ),
        (word,),
        num_warps=shape.warps_for(block * word.itemsize, vector),
        VECTOR=vector,
        BLOCK=block,
        LANES=next_power_of_2(places.num_ranks),
    )


def push_torch(
    inboxes: Sequence[torch.Tensor],
    rank: int,
    rows: torch.Tensor,
    source_idx: torch.Tensor,
    prefix: torch.Tensor,
    offset: int,
) -> None:
    """The twin of `push`; `inboxes` are [T * R, slot_bytes] uint8, by rank."""
    num_ranks, width, begin = len(inboxes), rows.size(1) * rows.element_size(), 0
    for source, end in enumerate(prefix[:, rank].tolist()):
        slots = source_idx[begin:end].long() * num_ranks + rank
        inboxes[source][slots, offset : offset + width] = rows[begin:end].view(torch.uint8)
        begin = end


@jit
def _push_kernel(
    rows,
    source_idx,
    prefix,
    table,
    state,
    num_rows: tl.int32,
    row_vectors: tl.int32,
    slot_lines: tl.int32,
    offset_lines: tl.int32,
    num_ranks: tl.int32,
    rank: tl.int32,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Rows are shared by the blocks.

    Example: two ranks, prefix column of rank 1 is `[2, 3]`, `source_idx` is `[0, 4, 1]`: rank 1's rows 0 and 1 go to
    slots 1 and 9 of rank 0, row 2 to slot 3 of itself.
    """
    WORD_BYTES: tl.constexpr = rows.dtype.element_ty.primitive_bitwidth // 8
    if (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0):
        lanes = tl.arange(0, LANES)
        is_rank = lanes < num_ranks
        ends = tl.load(prefix + lanes * num_ranks + rank, mask=is_rank, other=0x7FFFFFFF)
        inboxes = tl.load(table + _INBOX * num_ranks + lanes, mask=is_rank, other=0)
        rooms = tl.load(table + _ROOMS * num_ranks + lanes, mask=is_rank, other=0)
        num_came = tl.minimum(tl.load(prefix + (num_ranks - 1) * num_ranks + rank), num_rows)
        row_words = row_vectors * (VECTOR // WORD_BYTES)
        for row in range(tl.program_id(0), num_came, tl.num_programs(0)):
            source = tl.sum((ends <= row).to(tl.int32))
            slot = tl.load(source_idx + row).to(tl.int64) * num_ranks + rank
            room = tl.sum(tl.where(lanes == source, rooms, 0))
            if (slot >= 0) & (slot < room):
                inbox = tl.sum(tl.where(lanes == source, inboxes, 0))
                target = tl.multiple_of((inbox + (slot * slot_lines + offset_lines) * 16).to(rows.dtype), VECTOR)
                origin = tl.multiple_of(rows + tl.cast(row, tl.int64) * row_words, VECTOR)
                for first in range(0, row_words, BLOCK):
                    words = first + tl.arange(0, BLOCK)
                    tl.store(target + words, tl.load(origin + words, mask=words < row_words), mask=words < row_words)


def sum_inbox(
    places: Places,
    shape: Shape,
    inbox: torch.Tensor | None,
    slot_bytes: int,
    offset: int,
    out: torch.Tensor,
    slots: torch.Tensor,
    biases: Sequence[torch.Tensor],
) -> None:
    """Sum each token's rows in this rank's inbox.

    Args:
        places: For this rank's failures.
        shape: How to launch.
        inbox: [T * R, slot_bytes] uint8; None: there is no room for one, and the call goes in rounds.
        slot_bytes: Of a slot.
        offset: Where in a slot the rows are.
        out: [T, H], written.
        slots: [T, R] int32 of the handle; -1 where a peer has no row of the token.
        biases: At most two tensors [T, H] of out's dtype, added first and in order.
    """
    slot = (slot_bytes // 16, offset // 16)
    launch_sum(_sum_inbox_kernel, places, shape, out, slots, biases, out if inbox is None else inbox, slot)


@jit
def _sum_inbox_kernel(
    out,
    bias_0,
    bias_1,
    slots,
    inbox,
    state,
    num_tokens: tl.int32,
    row_vectors: tl.int32,
    num_ranks: tl.int32,
    slot_lines: tl.int32,
    offset_lines: tl.int32,
    NUM_BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Items are pieces of rows: piece c of token t is item `t * pieces + c`.

    Example: two ranks, one token, slots `[[2, -1]]`, slot 0 of the inbox is `[1, 2]`, bias `[[10, 10]]`: out is
    `[[11, 12]]`. Where a row was at its giver does not matter, only that it has one.
    """
    if (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0):
        is_staged = tl.load(state + _STAGED) != 0
        ELEMENT_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
        hidden = row_vectors * (VECTOR // ELEMENT_BYTES)
        lanes = tl.arange(0, LANES)
        begin = inbox.to(tl.int64) + offset_lines * 16
        num_pieces = tl.cdiv(hidden, BLOCK)
        for item in range(tl.program_id(0), num_tokens * num_pieces, tl.num_programs(0)):
            token = item // num_pieces
            slot = load_slots(slots, token, num_tokens, num_ranks, lanes)
            cells = tl.cast(token, tl.int64) * num_ranks + lanes
            rows = tl.where(slot >= 0, begin + cells * slot_lines * 16, 0)
            columns = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
            # What has rows has been summed in the rounds. What has none was nobody's there.
            if (tl.sum((slot >= 0).to(tl.int32)) == 0) | (not is_staged):
                start = tl.cast(token, tl.int64) * hidden
                add_rows(
                    out, bias_0, bias_1, rows, start, columns, hidden, num_ranks, NUM_BIASES, AT_ONCE, VECTOR, WIDE
                )
