"""Forwarding rows from another node, out of the receive buffer, to the ranks of the node. On the device.

Shape letters: T tokens, K selections of a token, N nodes of P ranks, R = N P ranks, F rows that arrive here.

A token crosses once to each node that it goes to. Its row is put into this rank's *outbox* (`route.py`), from where it
is sent to the *receive buffer* of the rank of this rail on that node; there `forward` writes it to the ranks of the
node. Outbox and receive buffer are memory of the device or pinned memory of the host, with up to three sections one
after the other: payload, scales, relay records. Row f of a section begins at `offset + f * width`. The rows for a node,
and those from one, are blocks, and a block moves in chunks: chunk c of C has its rows `[n c // C, n (c + 1) // C)`.

A *relay record* goes with each row of a dispatch with routing: words of 4 bytes, rounded up to 4: the token's index at
its source, its P rows at the ranks of the node (-1: none), its K expert ids (-1: none), its K weights.

The *plan* of a call is [N, 8] int64, a line for each node; that of the own node is filled, but its rows take no relay.

No kernel here waits or signals; all of them do nothing once the buffer has failed, or while a call is held.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sizing import align
from ._triton import jit, launch, next_power_of_2, tl, triton
from .exchange import (
    PLAN_BACK_START,
    PLAN_IN_START,
    PLAN_NUM_IN,
    PLAN_WORDS,
    TABLE_CAPACITIES,
    Context,
    may_move,
)
from .put import LaunchShape, load_slots, put_topk, record_words, widest_word, write_row

_CAPACITIES = tl.constexpr(TABLE_CAPACITIES)
_NUM_IN, _IN_START = tl.constexpr(PLAN_NUM_IN), tl.constexpr(PLAN_IN_START)
_BACK_START, _PLAN_WORDS = tl.constexpr(PLAN_BACK_START), tl.constexpr(PLAN_WORDS)


def relay_record_words(ranks_per_node: int, num_topk: int) -> int:
    """Return the number of 4-byte words of a relay record."""
    return align(1 + ranks_per_node + 2 * num_topk, 4)


def forward(
    context: Context,
    shape: LaunchShape,
    plan: torch.Tensor,
    recv_buffer: torch.Tensor,
    offsets: Sequence[int],
    row_bytes: int,
    scale_bytes: int,
    slots: torch.Tensor,
    has_records: bool,
    num_topk: int,
    num_local_experts: int,
    chunk: int,
    num_chunks: int,
    sources: torch.Tensor | None = None,
) -> None:
    """Write the rows of a chunk that has arrived here to the ranks of the node: one read, one write for each
    destination.

    Args:
        context: Of the buffer, whose table has been filled: addresses of the sections, and rows offered.
        shape: How to launch.
        plan: [N, PLAN_WORDS] int64.
        recv_buffer: Bytes, uint8.
        offsets: Where its sections begin, multiples of 16; those of sections that do not travel are not used.
        row_bytes: Of a row of the payload.
        scale_bytes: Of a row of the scales; 0: there are none.
        slots: [F, P] int32 contiguous, the slots of each row at the ranks of the node; written from the records if
            they travel, otherwise those of a handle.
        has_records: Records travel.
        num_topk: K; 0: no ids travel.
        num_local_experts: L.
        chunk: Which part of each node's block.
        num_chunks: Of how many.
        sources: [N] int64, addresses of outboxes: the rows are still there, and are fetched from there. None: they
            have arrived.
    """
    if plan.size(0) == 1:
        return
    num_nodes = plan.size(0)
    ranks_per_node = context.num_ranks // num_nodes
    node = context.rank // ranks_per_node
    begin = recv_buffer.data_ptr() if sources is None else 0
    word, is_aligned = widest_word(row_bytes, begin)
    row_words = row_bytes // word.itemsize
    vector, block, num_pieces, num_warps = shape.cut(row_words, word.itemsize, is_aligned)
    scale_word, _ = widest_word(scale_bytes, begin)
    num_topk = num_topk if has_records else 0
    launch(
        _forward_kernel,
        max(1, min(shape.num_blocks, slots.size(0) * num_pieces)),
        (
            plan,
            slots,
            context.table,
            context.state,
            sources if sources is not None else plan,
            *(begin + offset for offset in (*offsets, 0, 0)[:3]),
            row_bytes // vector,
            scale_bytes // scale_word.itemsize,
            slots.size(0),
            num_topk,
            num_local_experts,
            context.num_ranks,
            context.rank,
            node * ranks_per_node,
            ranks_per_node,
            num_nodes,
            node,
            relay_record_words(ranks_per_node, num_topk),
            record_words(num_topk),
            chunk,
            num_chunks,
        ),
        num_warps=num_warps,
        num_registers=shape.num_registers,
        WORD=_kernel_type(word),
        VECTOR=vector,
        SCALE_WORD=_kernel_type(scale_word),
        BLOCK=block,
        HAS_SCALES=scale_bytes > 0,
        SCALES=next_power_of_2(scale_bytes // scale_word.itemsize),
        HAS_RECORDS=has_records,
        HAS_TOPK=num_topk > 0,
        TOPK=next_power_of_2(num_topk),
        IS_FETCHED=sources is not None,
        LANES=next_power_of_2(ranks_per_node),
        IS_WHOLE=num_pieces == 1,
    )


def _kernel_type(word: torch.dtype) -> tl.dtype:
    return {1: tl.int8, 2: tl.int16, 4: tl.int32}[word.itemsize]


@jit
def _forward_kernel(
    plan,
    slots,
    table,
    state,
    sources,
    rows_at: tl.int64,
    scales_at: tl.int64,
    records_at: tl.int64,
    row_vectors: tl.int32,
    scale_words: tl.int32,
    num_slots: tl.int32,
    num_topk: tl.int32,
    num_local: tl.int32,
    num_ranks: tl.int32,
    rank: tl.int32,
    first_rank: tl.int32,
    ranks_per_node: tl.int32,
    num_nodes: tl.int32,
    node: tl.int32,
    num_relay_words: tl.int32,
    num_record_words: tl.int32,
    chunk: tl.int32,
    num_chunks: tl.int32,
    WORD: tl.constexpr,
    VECTOR: tl.constexpr,
    SCALE_WORD: tl.constexpr,
    BLOCK: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_RECORDS: tl.constexpr,
    HAS_TOPK: tl.constexpr,
    TOPK: tl.constexpr,
    IS_FETCHED: tl.constexpr,
    LANES: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Node after node. Items are pieces of rows: piece c of the r-th row of its chunk is item `r * pieces + c`.

    Example: two nodes of two ranks, this is node 0; the plan's line of node 1 has 1 row from row 4 of the receive
    buffer on, and its record says `[7, 5, -1]`: the row goes to row 5 of rank 0, `slots[4]` is `[5, -1]`, the source
    index is 7.
    """
    if may_move(state):
        WORD_BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
        SCALE_BYTES: tl.constexpr = SCALE_WORD.primitive_bitwidth // 8
        lanes = tl.arange(0, LANES)
        is_lane = lanes < ranks_per_node
        node_table = table + first_rank + lanes
        targets = (
            tl.load(node_table, mask=is_lane, other=0),
            tl.load(node_table + num_ranks, mask=is_lane, other=0),
            tl.load(node_table + 2 * num_ranks, mask=is_lane, other=0),
            tl.load(node_table + _CAPACITIES * num_ranks, mask=is_lane, other=0),
        )
        row_words = row_vectors * (VECTOR // WORD_BYTES)  # so the compiler knows that vectors of words are whole
        num_pieces = 1 if IS_WHOLE else tl.cdiv(row_words, BLOCK)
        widths = (row_words, scale_words, num_topk, ranks_per_node, num_relay_words)
        ranks = (rank, first_rank, num_ranks)
        step = tl.num_programs(0)
        num_before = tl.zeros((), tl.int32)
        for other in range(num_nodes):
            if other != node:
                begin, num_rows, first_row = chunk_of(plan, other, chunk, num_chunks)
                memory = _memory(
                    plan, sources, other, begin, first_row, rows_at, scales_at, records_at, widths,
                    WORD_BYTES, SCALE_BYTES, IS_FETCHED,
                )  # fmt: skip
                own = slots + first_row * ranks_per_node
                num_own = tl.minimum(num_slots - first_row, num_rows)
                num_items = num_rows * num_pieces
                sizes = (num_pieces, num_items, num_own)
                start = share_start(num_before, step)
                num_before += num_items
                # The next item is loaded while this one is written: the receive buffer may be in the host's memory.
                coming = _load_arrived(
                    own, memory, widths, sizes, start, lanes, WORD, VECTOR, BLOCK, SCALE_WORD, HAS_SCALES, SCALES,
                    HAS_RECORDS, HAS_TOPK, TOPK,
                )  # fmt: skip
                for item in range(start, num_items, step):
                    loaded = coming
                    coming = _load_arrived(
                        own, memory, widths, sizes, item + step, lanes, WORD, VECTOR, BLOCK, SCALE_WORD, HAS_SCALES,
                        SCALES, HAS_RECORDS, HAS_TOPK, TOPK,
                    )  # fmt: skip
                    _write_arrived(
                        loaded, own, targets, widths, sizes, item, ranks, num_local, num_record_words, lanes,
                        WORD, VECTOR, BLOCK, SCALE_WORD, HAS_SCALES, SCALES, HAS_RECORDS, HAS_TOPK, TOPK,
                    )  # fmt: skip


@triton.jit
def chunk_of(plan, node, chunk, num_chunks):
    """Return the chunk of the rows from a node: the rows before it, its rows, and where they are in the receive
    buffer.
    """
    line = plan + node * _PLAN_WORDS
    count = tl.load(line + _NUM_IN)
    begin = count * chunk // num_chunks
    num_rows = (count * (chunk + 1) // num_chunks - begin).to(tl.int32)
    return begin, num_rows, tl.load(line + _IN_START) + begin


@triton.jit
def share_start(num_before, step):
    """The first item of this block, where so many items of other nodes came before: all blocks have as many in all."""
    return (tl.program_id(0) + step - num_before % step) % step


@triton.jit
def _memory(
    plan, sources, node, begin, first_row, rows_at, scales_at, records_at, widths,
    WORD_BYTES: tl.constexpr, SCALE_BYTES: tl.constexpr, IS_FETCHED: tl.constexpr,
):  # fmt: skip
    """Where the sections of a chunk begin: in the receive buffer or, if they are fetched, in the outbox that they are
    in.
    """
    row_words, scale_words, _, _, num_relay_words = widths
    outbox, source = tl.zeros((), tl.int64), first_row
    if IS_FETCHED:
        outbox = tl.load(sources + node)
        source = tl.load(plan + node * _PLAN_WORDS + _BACK_START) + begin
    rows = outbox + rows_at + source * row_words * WORD_BYTES
    return (
        rows,
        outbox + scales_at + source * scale_words * SCALE_BYTES,
        outbox + records_at + source * num_relay_words * 4,
    )


@triton.jit
def _load_arrived(
    own, memory, widths, sizes, item, lanes,
    WORD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, SCALE_WORD: tl.constexpr, HAS_SCALES: tl.constexpr,
    SCALES: tl.constexpr, HAS_RECORDS: tl.constexpr, HAS_TOPK: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Load a piece of a row that has arrived, and what goes with it; nothing is loaded if there is no such item.

    Every piece needs the slots; scales, ids and weights are read with the first only.
    """
    rows_at, scales_at, records_at = memory
    row_words, scale_words, num_topk, ranks_per_node, num_relay_words = widths
    num_pieces, num_items, num_own = sizes
    row_idx = item // num_pieces
    is_item = item < num_items
    is_first = is_item & (item % num_pieces == 0)
    words = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
    address = rows_at + tl.cast(row_idx, tl.int64) * (row_words * (WORD.primitive_bitwidth // 8))
    pointer = tl.multiple_of(address.to(tl.pointer_type(WORD)), VECTOR)
    row = tl.load(pointer + words, mask=words < tl.where(is_item, row_words, 0), other=0)
    token, scale = tl.zeros((), tl.int32), tl.zeros([SCALES], SCALE_WORD)
    ids, weights = tl.zeros([TOPK], tl.int32), tl.zeros([TOPK], tl.float32)
    if HAS_SCALES:
        columns = tl.arange(0, SCALES)
        address = scales_at + tl.cast(row_idx, tl.int64) * (scale_words * (SCALE_WORD.primitive_bitwidth // 8))
        width = tl.where(is_first, scale_words, 0)
        scale = tl.load(address.to(tl.pointer_type(SCALE_WORD)) + columns, mask=columns < width, other=0)
    if HAS_RECORDS:
        record = (records_at + tl.cast(row_idx, tl.int64) * (num_relay_words * 4)).to(tl.pointer_type(tl.int32))
        token = tl.load(record, mask=is_first, other=0)
        slot = tl.load(record + 1 + lanes, mask=lanes < tl.where(is_item, ranks_per_node, 0), other=-1)
    else:
        slot = load_slots(own, row_idx, num_own, ranks_per_node, lanes)
    if HAS_TOPK:
        columns = tl.arange(0, TOPK)
        is_cell = columns < tl.where(is_first, num_topk, 0)
        cells = record + 1 + ranks_per_node + columns
        ids = tl.load(cells, mask=is_cell, other=-1)
        weights = tl.load(cells + num_topk, mask=is_cell, other=0).to(tl.float32, bitcast=True)
    return row, slot, token, scale, ids, weights


@triton.jit
def _write_arrived(
    loaded, own, targets, widths, sizes, item, ranks, num_local, num_record_words, lanes,
    WORD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr, SCALE_WORD: tl.constexpr, HAS_SCALES: tl.constexpr,
    SCALES: tl.constexpr, HAS_RECORDS: tl.constexpr, HAS_TOPK: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """Write what `_load_arrived` has loaded to the ranks of the node, and its slots to where the handle will be."""
    row, slot, token, scale, ids, weights = loaded
    bases, scale_bases, record_bases, capacities = targets
    row_words, scale_words, num_topk, ranks_per_node, _ = widths
    num_pieces, _, num_own = sizes
    rank, first_rank, num_ranks = ranks
    piece = item % num_pieces
    goes = (slot >= 0) & (slot < capacities)
    target_rows = slot.to(tl.int64)
    words, rows_from_1 = piece * BLOCK + tl.arange(0, BLOCK), tl.where(goes, slot + 1, 0)
    word_bytes: tl.constexpr = WORD.primitive_bitwidth // 8
    write_row(row, words, row_words, rows_from_1, bases, rank - first_rank, ranks_per_node, word_bytes, VECTOR)
    if HAS_SCALES or HAS_RECORDS:
        if piece == 0:
            if HAS_SCALES:
                columns = tl.arange(0, SCALES)
                cells = scale_bases + target_rows * (scale_words * (SCALE_WORD.primitive_bitwidth // 8))
                is_cell = goes[:, None] & (columns < scale_words)[None, :]
                cells = cells.to(tl.pointer_type(SCALE_WORD))[:, None] + columns[None, :]
                tl.store(cells, scale[None, :], mask=is_cell)
            if HAS_RECORDS:
                row_idx = item // num_pieces
                width = tl.where(row_idx < num_own, ranks_per_node, 0)
                tl.store(own + row_idx * ranks_per_node + lanes, slot, mask=lanes < width)
                record = (record_bases + target_rows * num_record_words * 4).to(tl.pointer_type(tl.int32))
                tl.store(record, token, mask=goes)
            if HAS_TOPK:
                put_topk(ids, weights, record, num_topk, num_local, num_ranks, goes, first_rank + lanes, TOPK, False)
