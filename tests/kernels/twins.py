"""Kernels of rows between nodes in plain torch, token by token: what the kernels are compared with."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deep_ep.kernels.exchange import PLAN_IN_START, PLAN_NUM_IN, PLAN_OUT_START
from deep_ep.kernels.relay import relay_record_words
from deep_ep.kernels.route import TokenRoutes


def route_tokens(
    token_routes: TokenRoutes,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    num_local_experts: int,
    plan: torch.Tensor,
    starts: Sequence[int],
    node: int,
    local_rank: int,
    local_records: Sequence[torch.Tensor],
    remote_records: torch.Tensor,
) -> None:
    """The twin of `route.route_tokens`, except for the table.

    Args:
        token_routes: The routes of the tokens.
        topk_idx: [T, K] or None.
        topk_weights: [T, K] float32 or None.
        num_local_experts: L.
        plan: [N, PLAN_WORDS] int64.
        starts: This rank's first row at every rank.
        node: Of this rank.
        local_rank: Of this rank.
        local_records: By rank of the node, [rows offered, words] int32, written.
        remote_records: [rows of the outbox, words] int32, written.
    """
    (num_tokens, num_nodes), ranks_per_node = token_routes.node_slots.shape, token_routes.forwarded.size(1)
    lines, slots = plan.tolist(), token_routes.slots.fill_(-1)
    for token, other in ((token, other) for token in range(num_tokens) for other in range(num_nodes)):
        node_slot, ranks = (
            int(token_routes.node_slots[token, other]),
            range(other * ranks_per_node, (other + 1) * ranks_per_node),
        )
        if node_slot < 0:
            continue
        own = lines[node][PLAN_IN_START] + node_slot if other == node else -1
        if token_routes.numbers is None:
            rows = (
                token_routes.forwarded[own].tolist()
                if 0 <= own < token_routes.forwarded.size(0)
                else [-1] * ranks_per_node
            )
        else:
            rows = [int(token_routes.numbers[token, rank]) for rank in ranks]
        if other == node:
            slots[token, ranks.start : ranks.stop] = torch.tensor(rows)
        else:
            slots[token, other * ranks_per_node + local_rank] = node_slot
        if token_routes.numbers is None:
            continue
        rows = [row + starts[rank] if row >= 0 else -1 for row, rank in zip(rows, ranks, strict=True)]
        ids = [int(one) for one in topk_idx[token]] if topk_idx is not None else []
        ids = [one if 0 <= one < num_local_experts * num_nodes * ranks_per_node else -1 for one in ids]
        weights = topk_weights[token].view(torch.int32).tolist() if topk_weights is not None else []
        if other != node:
            record = [token, *rows, *ids, *weights]
            remote_records[lines[other][PLAN_OUT_START] + node_slot, : len(record)] = torch.tensor(record)
            continue
        if own < token_routes.forwarded.size(0):
            token_routes.forwarded[own] = torch.tensor(rows)
        for rank, row, records in zip(ranks, rows, local_records, strict=True):
            if 0 <= row < records.size(0):
                local = [one - rank * num_local_experts for one in ids]
                kept = [0 <= one < num_local_experts for one in local]
                local = [one if is_kept else -1 for one, is_kept in zip(local, kept, strict=True)]
                bits = [one if is_kept else 0 for one, is_kept in zip(weights, kept, strict=True)]
                records[row, : 1 + 2 * len(ids)] = torch.tensor([token, *local, *bits])


def forward(
    plan: torch.Tensor,
    recv_buffer: torch.Tensor,
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
    """The twin of `relay.forward`; `windows` are, by rank of the node, its sections [rows offered, bytes] uint8."""
    num_rows, ranks_per_node = slots.shape
    for other, line in enumerate(plan.tolist()):
        if other == node:
            continue
        begin, end = _chunk_bounds(line[PLAN_NUM_IN], chunk, num_chunks)
        for row in range(line[PLAN_IN_START] + begin, line[PLAN_IN_START] + end):
            if has_records:
                num_words = relay_record_words(ranks_per_node, num_topk)
                record = _rows_of(recv_buffer, offsets[2], 4 * num_words)[row].view(torch.int32)
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
                rows[slot] = _rows_of(recv_buffer, offsets[0], rows.size(1))[row]
                if scales is not None:
                    scales[slot] = _rows_of(recv_buffer, offsets[1], scales.size(1))[row]
                if has_records and records is not None:
                    local = ids - (first_rank + peer) * num_local_experts
                    is_local = (ids >= 0) & (local >= 0) & (local < num_local_experts)
                    final = [record[:1], torch.where(is_local, local, -1), torch.where(is_local, weights, 0)]
                    records[slot].view(torch.int32)[: 1 + 2 * num_topk] = torch.cat(final)


def _chunk_bounds(num_rows: int, chunk: int, num_chunks: int) -> tuple[int, int]:
    return num_rows * chunk // num_chunks, num_rows * (chunk + 1) // num_chunks


def _rows_of(memory: torch.Tensor, offset: int, width: int) -> torch.Tensor:
    """Return all rows of a width that fit behind an offset."""
    num_rows = (memory.numel() - offset) // width
    return memory[offset : offset + num_rows * width].view(num_rows, width)
