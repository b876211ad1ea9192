"""The low-latency exchange by gloo as users write it: plain torch, tensors made in the call.

Letters as in `low_latency_work`; n rows sent, m received.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.distributed as dist

from ...quant import cast_fp8
from .low_latency_work import Delivered, LowLatencyWork


class _Routes(NamedTuple):
    """What a dispatch leaves for its combine.

    Attributes:
        order: [n] int64, the selections, `token * K + k`, by expert.
        send_splits: R numbers of rows sent.
        recv_splits: R numbers of rows received.
        arrived: [m] int64, received rows by expert.
        experts: [m] int64, their experts.
        expert_rows: [m] int64, where they lie at their experts.
    """

    order: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]
    arrived: torch.Tensor
    experts: torch.Tensor
    expert_rows: torch.Tensor


class WrittenExchange:
    """Dispatch and combine by gloo.

    Args:
        work: What the rank brings.
    """

    def __init__(self, work: LowLatencyWork):
        self._work = work
        self._routes: _Routes | None = None

    def dispatch(self) -> Delivered:
        """Cast, sort by expert, exchange counts and rows, and pack."""
        work, (x, topk_idx, _) = self._work, self._work.drawn
        q, scales = cast_fp8(x)
        order = topk_idx.flatten().argsort(stable=True)
        tokens = order // topk_idx.size(1)
        counts = torch.bincount(topk_idx.flatten(), minlength=work.setting.num_experts).view(work.num_ranks, -1)
        recv_counts = torch.empty_like(counts)
        dist.all_to_all_single(recv_counts, counts)
        self._routes = routes = _find_routes(order, counts, recv_counts)
        rows, recv_scales, recv_tokens = (
            _exchange(part, routes.recv_splits, routes.send_splits)
            for part in (q.view(torch.uint8)[tokens], scales[tokens], tokens.int())
        )
        firsts = recv_counts.cumsum(0) - recv_counts
        layout_range = (recv_counts | firsts << 32).t()
        packed = self._pack(rows).view(torch.float8_e4m3fn)
        return Delivered(packed, self._pack(recv_scales), self._pack(recv_tokens), layout_range)

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Give the experts' rows back and sum them, weighted; after a dispatch.

        Args:
            rows: [L, R * M, H] bfloat16.

        Returns:
            [T, H] bfloat16, new.
        """
        assert self._routes is not None
        routes, (x, topk_idx, weights) = self._routes, self._work.drawn
        send = torch.empty(routes.arrived.numel(), x.size(1), dtype=rows.dtype)
        send[routes.arrived] = rows[routes.experts, routes.expert_rows]
        back = _exchange(send, routes.send_splits, routes.recv_splits)
        back = back.float() * weights.flatten()[routes.order].unsqueeze(1)
        sums = torch.zeros(x.shape).index_add_(0, routes.order // topk_idx.size(1), back)
        return sums.bfloat16()

    def _pack(self, rows: torch.Tensor) -> torch.Tensor:
        """Rows [m, ...] to their experts, [L, R * M, ...]."""
        assert self._routes is not None
        packed = torch.empty(self._work.num_local, self._work.num_rows, *rows.shape[1:], dtype=rows.dtype)
        packed[self._routes.experts, self._routes.expert_rows] = rows[self._routes.arrived]
        return packed


def _find_routes(order: torch.Tensor, counts: torch.Tensor, recv_counts: torch.Tensor) -> _Routes:
    num_ranks, num_local = recv_counts.shape
    experts = torch.arange(num_local).repeat(num_ranks).repeat_interleave(recv_counts.flatten())
    arrived = experts.argsort(stable=True)
    per_expert = recv_counts.sum(0)
    firsts = per_expert.cumsum(0) - per_expert
    expert_rows = torch.arange(arrived.numel()) - firsts[experts[arrived]]
    splits = (counts.sum(1).tolist(), recv_counts.sum(1).tolist())
    return _Routes(order, *splits, arrived, experts[arrived], expert_rows)


def _exchange(rows: torch.Tensor, recv_splits: list[int], send_splits: list[int]) -> torch.Tensor:
    received = torch.empty(sum(recv_splits), *rows.shape[1:], dtype=rows.dtype)
    dist.all_to_all_single(received, rows, recv_splits, send_splits)
    return received
