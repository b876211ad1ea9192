"""Rows from another node, from where they land to the ranks of the node. On the device.

Shape letters: T tokens, K selections of a token, N nodes of P ranks, R = N P ranks, F rows that land here.

A token crosses once to each node that it goes to. Its row is put into this rank's *outbox* (`steer.py`), from where it
is carried into the *landing* of the rank of this rail on that node; there `forward` writes it to the ranks of the node.
Outbox and landing are memory of the device or pinned memory of the host, with up to three sections one after the
other: payload, scales, relay records. Row f of a section begins at `offset + f * width`. The rows for a node, and those
from one, are blocks, and a block moves in chunks: chunk c of C has its rows `[n c // C, n (c + 1) // C)`.

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
    STATE_FAILED,
    STATE_HELD,
    TABLE_ROOMS,
    Places,
)
from .put import VECTOR_BYTES, Shape, put_topk, record_words, widest_word

_FAILED, _HELD, _ROOMS = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_HELD), tl.constexpr(TABLE_ROOMS)
_NUM_IN, _IN_START = tl.constexpr(PLAN_NUM_IN), tl.constexpr(PLAN_IN_START)
_BACK_START, _PLAN_WORDS = tl.constexpr(PLAN_BACK_START), tl.constexpr(PLAN_WORDS)
_WARP = 32


def relay_record_words(ranks_per_node: int, num_topk: int) -> int:
    """Words of 4 bytes of a relay record."""
    return align(1 + ranks_per_node + 2 * num_topk, 4)


def forward(
    places: Places,
    shape: Shape,
    plan: torch.Tensor,
    landing: torch.Tensor,
    offsets: Sequence[int],
    row_bytes: int,
    scale_bytes: int,
    slots: torch.Tensor,
    table: torch.Tensor,
    first_rank: int,
    ranks_per_node: int,
    node: int,
    has_records: bool,
    num_topk: int,
    num_local_experts: int,
    chunk: int,
    num_chunks: int,
    sources: torch.Tensor | None = None,
) -> None:
    """Write the rows of a chunk that landed here to the ranks of the node: one read, one write for each destination.

    Args:
        places: For this rank's number, and whether the buffer has failed.
        shape: How to launch.
        plan: [N, PLAN_WORDS] int64.
        landing: Bytes, uint8.
        offsets: Where its sections begin, multiples of 16; those that do not travel are not looked at.
        row_bytes: Of a row of the payload.
        scale_bytes: Of a row of the scales; 0: there are none.
        slots: [F, P] int32 contiguous, the slots of each row at the ranks of the node; written from the records if
            they travel, otherwise those of a handle.
        table: [TABLE_ROWS, R] int64, `places.table` or one like it: addresses of the sections, and rows offered.
        first_rank: Of this node.
        ranks_per_node: P.
        node: This rank's node.
        has_records: Records travel.
        num_topk: K; 0: no ids travel.
        num_local_experts: L.
        chunk: Which part of each node's block.
        num_chunks: Of how many.
        sources: [N] int64, addresses of outboxes: the rows are still there, and are fetched from there. None: they
            have landed.
    """
    if plan.size(0) == 1:
        return
    begin = landing.data_ptr() if sources is None else 0
    word, is_aligned = widest_word(row_bytes, begin)
    vector = VECTOR_BYTES if is_aligned else word.itemsize
    row_words = row_bytes // word.itemsize
    block = min(shape.words * 4 // word.itemsize, next_power_of_2(row_words))
    scale_word, _ = widest_word(scale_bytes, begin)
    num_topk = num_topk if has_records else 0
    launch(
        _forward_kernel,
        max(1, min(shape.num_blocks, slots.size(0) * -(-row_words // block))),
        (
            plan,
            slots,
            table,
            places.state,
            sources if sources is not None else plan,
            *(begin + offset for offset in (*offsets, 0, 0)[:3]),
            row_bytes // vector,
            scale_bytes // scale_word.itemsize,
            slots.size(0),
            num_topk,
            num_local_experts,
            places.num_ranks,
            places.rank,
            first_rank,
            ranks_per_node,
            plan.size(0),
            node,
            relay_record_words(ranks_per_node, num_topk),
            record_words(num_topk),
            chunk,
            num_chunks,
        ),
        num_warps=max(1, min(shape.num_warps, block // _WARP)),
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
        NODES=next_power_of_2(plan.size(0)),
        LANES=next_power_of_2(ranks_per_node),
    )


def _chunk_bounds(num_rows: int, chunk: int, num_chunks: int) -> tuple[int, int]:
    return num_rows * chunk // num_chunks, num_rows * (chunk + 1) // num_chunks


def _rows_of(memory: torch.Tensor, offset: int, width: int) -> torch.Tensor:
    """All rows of a width that there is room for behind an offset."""
    num_rows = (memory.numel() - offset) // width
    return memory[offset : offset + num_rows * width].view(num_rows, width)


def _kernel_type(word: torch.dtype) -> tl.dtype:
    return {1: tl.int8, 2: tl.int16, 4: tl.int32}[word.itemsize]


def forward_torch(
    plan: torch.Tensor,
    landing: torch.Tensor,
    offsets: Sequence[int],
    slots: torch.Tensor,
    windows: Sequence[Sequence[torch.Tensor | None]],
    first_rank: int,
    node: int,
    has_records: bool,
    num_topk: int,
    num_local_experts: int,
    chunk: int,
    num_chunks: int,
) -> None:
    """The twin of `forward`; `windows` are, by rank of the node, its sections [rows offered, bytes] uint8."""
    num_rows, ranks_per_node = slots.shape
    for other, line in enumerate(plan.tolist()):
        if other == node:
            continue
        begin, end = _chunk_bounds(line[PLAN_NUM_IN], chunk, num_chunks)
        for row in range(line[PLAN_IN_START] + begin, line[PLAN_IN_START] + end):
            if has_records:
                num_words = relay_record_words(ranks_per_node, num_topk)
                record = _rows_of(landing, offsets[2], 4 * num_words)[row].view(torch.int32)
                own, tail = record[1 : 1 + ranks_per_node], record[1 + ranks_per_node :]
                ids, weights = tail[:num_topk], tail[num_topk : 2 * num_topk]
                if row < num_rows:
                    slots[row] = own
            else:
                own = slots[row] if row < num_rows else slots.new_full((ranks_per_node,), -1)
            for peer, slot in enumerate(own.tolist()):
                rows, scales, records = windows[peer]
                if rows is None or not 0 <= slot < rows.size(0):
                    continue
                rows[slot] = _rows_of(landing, offsets[0], rows.size(1))[row]
                if scales is not None:
                    scales[slot] = _rows_of(landing, offsets[1], scales.size(1))[row]
                if has_records and records is not None:
                    local = ids - (first_rank + peer) * num_local_experts
                    is_local = (ids >= 0) & (local >= 0) & (local < num_local_experts)
                    final = [record[:1], torch.where(is_local, local, -1), torch.where(is_local, weights, 0)]
                    records[slot].view(torch.int32)[: 1 + 2 * num_topk] = torch.cat(final)


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
    NODES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Items are pieces of rows: piece c of the r-th row of this chunk, of all nodes, is item `r * pieces + c`.

    Example: two nodes of two ranks, this is node 0; the plan's line of node 1 has 1 row from row 4 of the landing on,
    and its record says `[7, 5, -1]`: the row goes to row 5 of rank 0, `slots[4]` is `[5, -1]`, the source index is 7.
    """
    if (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0):
        WORD_BYTES: tl.constexpr = WORD.primitive_bitwidth // 8
        SCALE_BYTES: tl.constexpr = SCALE_WORD.primitive_bitwidth // 8
        lanes = tl.arange(0, LANES)
        is_lane = lanes < ranks_per_node
        near = table + first_rank + lanes
        bases = tl.load(near, mask=is_lane, other=0)
        scale_bases = tl.load(near + num_ranks, mask=is_lane, other=0)
        record_bases = tl.load(near + 2 * num_ranks, mask=is_lane, other=0)
        rooms = tl.load(near + _ROOMS * num_ranks, mask=is_lane, other=0)
        ends, shifts, num_rows = in_bounds(plan, num_nodes, node, chunk, num_chunks, NODES)
        outboxes, aheads = _origins(plan, sources, num_nodes, node, IS_FETCHED, NODES)
        row_words = row_vectors * (VECTOR // WORD_BYTES)  # so the compiler knows that vectors of words are whole
        num_pieces = tl.cdiv(row_words, BLOCK)
        num_items = num_rows * num_pieces
        # The next item is on its way while this one is written: the landing may be the host's memory.
        landed = landed_row(tl.program_id(0) // num_pieces, ends, shifts)
        outbox, source = _origin(tl.program_id(0) // num_pieces, landed, ends, outboxes, aheads, IS_FETCHED)
        row = _load_row(
            outbox + rows_at, row_words, source, tl.program_id(0), num_pieces, num_items, WORD, VECTOR, BLOCK
        )  # fmt: skip
        slot, token, scale, ids, weights = _load_landed(
            slots, outbox + scales_at, outbox + records_at, landed, source, tl.program_id(0), num_pieces, num_items,
            num_slots, scale_words, num_topk, ranks_per_node, num_relay_words, lanes,
            SCALE_WORD, HAS_SCALES, SCALES, HAS_RECORDS, HAS_TOPK, TOPK,
        )  # fmt: skip
        for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
            following = item + tl.num_programs(0)
            next_landed = landed_row(following // num_pieces, ends, shifts)
            outbox, source = _origin(following // num_pieces, next_landed, ends, outboxes, aheads, IS_FETCHED)
            next_row = _load_row(
                outbox + rows_at, row_words, source, following, num_pieces, num_items, WORD, VECTOR, BLOCK
            )  # fmt: skip
            next_slot, next_token, next_scale, next_ids, next_weights = _load_landed(
                slots, outbox + scales_at, outbox + records_at, next_landed, source, following, num_pieces, num_items,
                num_slots, scale_words, num_topk, ranks_per_node, num_relay_words, lanes,
                SCALE_WORD, HAS_SCALES, SCALES, HAS_RECORDS, HAS_TOPK, TOPK,
            )  # fmt: skip
            piece = item % num_pieces
            words = piece * BLOCK + tl.arange(0, BLOCK)
            goes = (slot >= 0) & (slot < rooms)
            places = slot.to(tl.int64)
            targets = tl.where(goes, bases + places * row_words * WORD_BYTES, 0)
            for turn in range(ranks_per_node):
                peer = (rank - first_rank + 1 + turn) % ranks_per_node  # not all ranks to the same one at once
                target = tl.sum(tl.where(lanes == peer, targets, 0))
                if target != 0:
                    pointer = tl.multiple_of(target.to(tl.pointer_type(WORD)), VECTOR)
                    tl.store(pointer + words, row, mask=words < row_words)
            if HAS_SCALES or HAS_RECORDS:
                if piece == 0:
                    if HAS_SCALES:
                        columns = tl.arange(0, SCALES)
                        cells = (scale_bases + places * scale_words * SCALE_BYTES).to(tl.pointer_type(SCALE_WORD))
                        is_cell = goes[:, None] & (columns < scale_words)[None, :]
                        tl.store(cells[:, None] + columns[None, :], scale[None, :], mask=is_cell)
                    if HAS_RECORDS:
                        own = slots + landed * ranks_per_node + lanes
                        tl.store(own, slot, mask=lanes < tl.where(landed < num_slots, ranks_per_node, 0))
                        record = (record_bases + places * num_record_words * 4).to(tl.pointer_type(tl.int32))
                        tl.store(record, token, mask=goes)
                    if HAS_TOPK:
                        ranks = first_rank + lanes
                        put_topk(ids, weights, record, num_topk, num_local, num_ranks, goes, ranks, TOPK)
            landed, row = next_landed, next_row
            slot, token, scale, ids, weights = next_slot, next_token, next_scale, next_ids, next_weights


@triton.jit
def in_bounds(plan, num_nodes, node, chunk, num_chunks, NODES: tl.constexpr):
    """The rows of a chunk, of all other nodes one after the other.

    Returns:
        Where each node's end, how much further on they are in the landing, and how many there are.
    """
    nodes = tl.arange(0, NODES)
    is_other = (nodes < num_nodes) & (nodes != node)
    count = tl.load(plan + nodes * _PLAN_WORDS + _NUM_IN, mask=is_other, other=0)
    start = tl.load(plan + nodes * _PLAN_WORDS + _IN_START, mask=is_other, other=0)
    begin = count * chunk // num_chunks
    num_rows = count * (chunk + 1) // num_chunks - begin
    ends = tl.cumsum(num_rows)
    return ends, start + begin - (ends - num_rows), tl.sum(num_rows).to(tl.int32)


@triton.jit
def landed_row(row, ends, shifts):
    """Where in the landing a row of this chunk is."""
    nodes = tl.arange(0, ends.shape[0])
    node = tl.sum((ends <= row).to(tl.int32))
    return row + tl.sum(tl.where(nodes == node, shifts, 0))


@triton.jit
def _origins(plan, sources, num_nodes, node, IS_FETCHED: tl.constexpr, NODES: tl.constexpr):
    """Of each node, its outbox, and how much further on rows are there than in the landing; zeros where they landed."""
    nodes = tl.arange(0, NODES)
    outboxes, aheads = tl.zeros([NODES], tl.int64), tl.zeros([NODES], tl.int64)
    if IS_FETCHED:
        is_other = (nodes < num_nodes) & (nodes != node)
        outboxes = tl.load(sources + nodes, mask=is_other, other=0)
        aheads = tl.load(plan + nodes * _PLAN_WORDS + _BACK_START, mask=is_other, other=0)
        aheads -= tl.load(plan + nodes * _PLAN_WORDS + _IN_START, mask=is_other, other=0)
    return outboxes, aheads


@triton.jit
def _origin(row, landed, ends, outboxes, aheads, IS_FETCHED: tl.constexpr):
    """The outbox that a row of this chunk is in, and its place there; where it has landed, nothing is added to that."""
    outbox, source = tl.zeros((), tl.int64), landed
    if IS_FETCHED:
        nodes = tl.arange(0, ends.shape[0])
        node = tl.sum((ends <= row).to(tl.int32))
        outbox = tl.sum(tl.where(nodes == node, outboxes, 0))
        source += tl.sum(tl.where(nodes == node, aheads, 0))
    return outbox, source


@triton.jit
def _load_row(
    rows_at, row_words, landed, item, num_pieces, num_items,
    WORD: tl.constexpr, VECTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """A piece of a row that landed; nothing where there is no such item."""
    words = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
    address = rows_at + landed * row_words * (WORD.primitive_bitwidth // 8)
    row = tl.multiple_of(address.to(tl.pointer_type(WORD)), VECTOR)
    return tl.load(row + words, mask=words < tl.where(item < num_items, row_words, 0), other=0)


@triton.jit
def _load_landed(
    slots, scales_at, records_at, landed, source, item, num_pieces, num_items, num_slots, scale_words,
    num_topk, ranks_per_node, num_relay_words, lanes,
    SCALE_WORD: tl.constexpr, HAS_SCALES: tl.constexpr, SCALES: tl.constexpr, HAS_RECORDS: tl.constexpr,
    HAS_TOPK: tl.constexpr, TOPK: tl.constexpr,
):  # fmt: skip
    """All of a row that landed but its payload. Every piece needs the slots; the rest is read with the first only."""
    is_item = item < num_items
    is_first = is_item & (item % num_pieces == 0)
    token, scale = tl.zeros((), tl.int32), tl.zeros([SCALES], SCALE_WORD)
    ids, weights = tl.zeros([TOPK], tl.int32), tl.zeros([TOPK], tl.float32)
    if HAS_SCALES:
        columns = tl.arange(0, SCALES)
        address = scales_at + source * scale_words * (SCALE_WORD.primitive_bitwidth // 8)
        width = tl.where(is_first, scale_words, 0)
        scale = tl.load(address.to(tl.pointer_type(SCALE_WORD)) + columns, mask=columns < width, other=0)
    if HAS_RECORDS:
        record = (records_at + source * num_relay_words * 4).to(tl.pointer_type(tl.int32))
        token = tl.load(record, mask=is_first, other=0)
        slot = tl.load(record + 1 + lanes, mask=lanes < tl.where(is_item, ranks_per_node, 0), other=-1)
    else:
        width = tl.where(is_item & (landed < num_slots), ranks_per_node, 0)
        slot = tl.load(slots + landed * ranks_per_node + lanes, mask=lanes < width, other=-1)
    if HAS_TOPK:
        columns = tl.arange(0, TOPK)
        is_cell = columns < tl.where(is_first, num_topk, 0)
        cells = record + 1 + ranks_per_node + columns
        ids = tl.load(cells, mask=is_cell, other=-1)
        weights = tl.load(cells + num_topk, mask=is_cell, other=0).to(tl.float32, bitcast=True)
    return slot, token, scale, ids, weights
