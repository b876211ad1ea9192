"""Routing a dispatch across nodes: where `put` writes each token's rows, and the records that go with them.

Shape letters: T tokens, K selections of a token, N nodes of P ranks, R = N P ranks, F rows that this rank forwards.

`put` writes rows to ranks, by a table of their sections and by slots [T, R]. A token crosses to another node once,
through the rank of this rail there: so in a copy of the table that rank's sections are those of this rank's outbox, and
its slots are the token's positions among those for the node. One pass then writes the rows for this node and for all
others. Records differ from rank to rank, and are small: they are written here.

The kernel neither waits nor signals, and does nothing once the buffer has failed, or while a call is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._triton import jit, launch, next_power_of_2, tl, triton
from .exchange import (
    PLAN_IN_START,
    PLAN_NUM_OUT,
    PLAN_OUT_START,
    PLAN_WORDS,
    TABLE_CAPACITIES,
    TABLE_STARTS,
    Context,
    may_move,
)
from .put import record_words
from .relay import relay_record_words

_CAPACITIES, _STARTS, _RECORDS = tl.constexpr(TABLE_CAPACITIES), tl.constexpr(TABLE_STARTS), tl.constexpr(2)
_IN_START, _NUM_OUT = tl.constexpr(PLAN_IN_START), tl.constexpr(PLAN_NUM_OUT)
_OUT_START, _PLAN_WORDS = tl.constexpr(PLAN_OUT_START), tl.constexpr(PLAN_WORDS)

_TILE_ELEMENTS = 2048  # of [tokens, ranks] that a program holds
_MOST_TOKENS = 128  # of a tile: enough tiles for all blocks from a few thousand tokens


class TokenRoutes(NamedTuple):
    """The routes of a dispatch's tokens.

    Attributes:
        node_slots: [T, N] int32, the position of each token among those that go to a node; -1: it does not.
        numbers: [T, R] int32, likewise of ranks; None: there is a handle.
        forwarded: [F, P] int32, the row of each token that this rank forwards, its own included, at the ranks of its
            node. With a handle they are read, else those of its own tokens are written.
        slots: [T, R] int32, written: what `put` takes, with the table that is made for it.
    """

    node_slots: torch.Tensor
    numbers: torch.Tensor | None
    forwarded: torch.Tensor
    slots: torch.Tensor


def route_tokens(
    context: Context,
    num_blocks: int,
    token_routes: TokenRoutes,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    num_local_experts: int,
    plan: torch.Tensor,
    table: torch.Tensor,
    outbox: int,
    offsets: Sequence[int],
) -> None:
    """Find the slots by which `put` writes the rows, make its table, and write the records unless there is a handle.

    Args:
        context: Holds the table of the call.
        num_blocks: Most blocks.
        token_routes: The routes of the tokens.
        topk_idx: [T, K] int32 or int64, or None.
        topk_weights: [T, K] float32 or None.
        num_local_experts: L.
        plan: [N, PLAN_WORDS] int64.
        table: [TABLE_ROWS, R] int64, written.
        outbox: Its address.
        offsets: Where its sections begin.
    """
    num_tokens, num_nodes = token_routes.node_slots.shape
    if num_tokens == 0:
        return
    has_records = token_routes.numbers is not None
    num_topk = topk_idx.size(1) if topk_idx is not None and has_records else 0
    lanes, ranks_per_node = next_power_of_2(context.num_ranks), context.num_ranks // num_nodes
    tile = max(1, min(_MOST_TOKENS, _TILE_ELEMENTS // lanes))
    launch(
        _route_tokens_kernel,
        max(1, min(num_blocks, -(-num_tokens // tile))),
        (
            token_routes.node_slots,
            token_routes.numbers if token_routes.numbers is not None else token_routes.slots,
            token_routes.forwarded,
            token_routes.slots,
            topk_idx if topk_idx is not None else token_routes.slots,
            topk_weights if topk_weights is not None else token_routes.slots,
            context.table,
            plan,
            table,
            context.state,
            outbox,
            *offsets,
            num_tokens,
            token_routes.forwarded.size(0),
            num_topk,
            num_local_experts,
            context.num_ranks,
            context.rank,
            ranks_per_node,
            num_nodes,
            record_words(num_topk),
            relay_record_words(ranks_per_node, num_topk),
        ),
        (topk_idx.dtype,) if topk_idx is not None else (),
        num_warps=8,
        HAS_RECORDS=has_records,
        TILE=tile,
        LANES=lanes,
    )


@jit
def _route_tokens_kernel(
    node_slots,
    numbers,
    forwarded,
    slots,
    topk_idx,
    topk_weights,
    table,
    plan,
    aimed,
    state,
    outbox: tl.int64,
    offset_0: tl.int64,
    offset_1: tl.int64,
    offset_2: tl.int64,
    num_tokens: tl.int32,
    num_forwarded: tl.int32,
    num_topk: tl.int32,
    num_local: tl.int32,
    num_ranks: tl.int32,
    rank: tl.int32,
    ranks_per_node: tl.int32,
    num_nodes: tl.int32,
    num_record_words: tl.int32,
    num_relay_words: tl.int32,
    HAS_RECORDS: tl.constexpr,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
):
    """Tile by tile of tokens, one lane for each rank; the first block makes the table.

    Example: two nodes of two ranks, this is rank 1; token 5 is the 4th for rank 0, where this rank's rows begin at row
    10, and the 3rd for node 1. Its slots are `[3, -1, -1, 2]`; its record in row 13 of rank 0 says that it is token 5.
    """
    if may_move(state):
        ranks = tl.arange(0, LANES)
        is_rank = ranks < num_ranks
        node = rank // ranks_per_node
        nodes = ranks // ranks_per_node
        peers = ranks % ranks_per_node
        is_local_rank = is_rank & (nodes == node)
        is_remote = is_rank & (nodes != node)
        is_rail = is_remote & (peers == rank % ranks_per_node)
        line = plan + nodes * _PLAN_WORDS
        out_starts = tl.load(line + _OUT_START, mask=is_remote, other=0)
        starts = tl.load(table + _STARTS * num_ranks + ranks, mask=is_rank, other=0)
        capacities = tl.load(table + _CAPACITIES * num_ranks + ranks, mask=is_rank, other=0)
        if tl.program_id(0) == 0:
            counts = tl.load(line + _NUM_OUT, mask=is_rail, other=0)
            for section in tl.static_range(3):
                offset = offset_0 if section == 0 else (offset_1 if section == 1 else offset_2)
                base = tl.load(table + section * num_ranks + ranks, mask=is_rank, other=0)
                tl.store(aimed + section * num_ranks + ranks, tl.where(is_rail, outbox + offset, base), mask=is_rank)
            tl.store(
                aimed + _CAPACITIES * num_ranks + ranks,
                tl.where(is_rail, out_starts + counts, capacities),
                mask=is_rank,
            )
            tl.store(aimed + _STARTS * num_ranks + ranks, tl.where(is_rail, out_starts, starts), mask=is_rank)
        in_start = tl.load(plan + node * _PLAN_WORDS + _IN_START)
        record_bases = tl.load(table + _RECORDS * num_ranks + ranks, mask=is_local_rank, other=0)
        for first in range(tl.program_id(0) * TILE, num_tokens, tl.num_programs(0) * TILE):
            tokens = first + tl.arange(0, TILE)
            is_token = (tokens < num_tokens)[:, None]
            cells = tokens.to(tl.int64)[:, None] * num_ranks + ranks[None, :]
            node_cells = tokens.to(tl.int64)[:, None] * num_nodes + nodes[None, :]
            node_slot = tl.load(node_slots + node_cells, mask=is_token & is_rank[None, :], other=-1)
            own = node_slot + in_start  # of a local rank: the token among those that this rank forwards
            is_own = is_local_rank[None, :] & (node_slot >= 0) & (own < num_forwarded)
            own_cells = forwarded + own * ranks_per_node + peers[None, :]
            if HAS_RECORDS:
                number = tl.load(numbers + cells, mask=is_token & is_rank[None, :], other=-1)
                row = tl.where(number >= 0, number + starts[None, :], -1)
                tl.store(own_cells, row.to(tl.int32), mask=is_own)
                local_slot = number
                goes = is_local_rank[None, :] & (row >= 0) & (row < capacities[None, :])
                local_record = record_bases[None, :] + row * num_record_words * 4
                remote_record = outbox + offset_2 + (out_starts[None, :] + node_slot) * num_relay_words * 4
                crosses = is_remote[None, :] & (node_slot >= 0)
                _write_records(
                    local_record, remote_record, goes, crosses, tokens, row, peers, ranks, topk_idx, topk_weights,
                    num_tokens, num_topk, num_local, num_ranks, ranks_per_node,
                )  # fmt: skip
            else:
                local_slot = tl.load(own_cells, mask=is_own, other=-1)
            slot = tl.where(is_local_rank[None, :], local_slot, tl.where(is_rail[None, :], node_slot, -1))
            tl.store(slots + cells, slot, mask=is_token & is_rank[None, :])


@triton.jit
def _write_records(
    local_record, remote_record, goes, crosses, tokens, row, peers, ranks, topk_idx, topk_weights,
    num_tokens, num_topk, num_local, num_ranks, ranks_per_node,
):  # fmt: skip
    """Write the records of a tile: at the ranks of the node that tokens go to, and in the outbox, by node.

    A remote rank's lane writes its token's row there; the first one of a node, what all of them share.
    """
    local_words = local_record.to(tl.pointer_type(tl.int32))
    remote_words = remote_record.to(tl.pointer_type(tl.int32))
    leads = crosses & (peers == 0)[None, :]
    lines = tokens[:, None] + tl.zeros_like(row).to(tl.int32)
    tl.store(local_words, lines, mask=goes)
    tl.store(remote_words, lines, mask=leads)
    tl.store(remote_words + 1 + peers[None, :], row.to(tl.int32), mask=crosses)
    for k in range(num_topk):
        cells = tokens.to(tl.int64) * num_topk + k
        ids = tl.load(topk_idx + cells, mask=tokens < num_tokens, other=-1)
        ids = tl.where((ids >= 0) & (ids < num_local * num_ranks), ids, -1).to(tl.int32)  # before any bits are cut off
        weights = tl.load(topk_weights + cells, mask=tokens < num_tokens, other=0).to(tl.int32, bitcast=True)
        local = tl.where(ids[:, None] >= 0, ids[:, None] - ranks[None, :] * num_local, -1)
        is_local = (local >= 0) & (local < num_local)
        tl.store(local_words + 1 + k, tl.where(is_local, local, -1), mask=goes)
        tl.store(local_words + 1 + num_topk + k, tl.where(is_local, weights[:, None], 0), mask=goes)
        shared = remote_words + 1 + ranks_per_node + k
        tl.store(shared, ids[:, None] + tl.zeros_like(local), mask=leads)
        tl.store(shared + num_topk, weights[:, None] + tl.zeros_like(local), mask=leads)
