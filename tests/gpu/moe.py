"""Inputs of all ranks, what the oracle says of them, and a buffer's calls with them. For tests that need a GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from common import layout_of
from deep_ep import Buffer, reference

HIDDEN, NUM_TOPK, EXPERTS_PER_RANK = 256, 3, 4
CYCLES_PER_MS = 2_000_000  # of `torch.cuda._sleep`: about, on a GPU of 2 GHz


def sleep(ms: float) -> None:
    """Have the current stream do nothing for a while."""
    torch.cuda._sleep(int(ms * CYCLES_PER_MS))


def make_buffer(
    group: dist.ProcessGroup | None = None, num_nvl_bytes: int = 64 << 20, limit_secs: float = 60
) -> Buffer:
    torch.cuda.set_device(0)
    return Buffer(
        group or dist.group.WORLD,
        num_nvl_bytes,
        explicitly_destroy=True,
        device="cuda",
        num_cpu_timeout_secs=60,
        num_gpu_timeout_secs=limit_secs,
    )


@dataclass
class Layer:
    """Tokens and routes of all ranks, on the CPU, and this rank's part on the GPU."""

    rank: int
    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]

    def __post_init__(self) -> None:
        self.num_ranks = len(self.xs)
        self.num_experts = self.num_ranks * EXPERTS_PER_RANK
        self.masks = [reference.layout(ids, self.num_experts, self.num_ranks).is_token_in_rank for ids in self.ids]
        self.sent = reference.dispatch(self.xs, self.masks, None, self.ids, self.weights, self.num_experts)
        self.received = self.sent[self.rank]
        self.num_rows = self.received.recv_x.size(0)
        self.x = self.xs[self.rank].cuda()
        self.topk_idx, self.topk_weights = self.ids[self.rank].cuda(), self.weights[self.rank].cuda()

    def doubled(self) -> torch.Tensor:
        """What a combine of the received rows, each doubled, brings back."""
        return reference.combine([2 * one.recv_x for one in self.sent], self.masks)[self.rank].combined_x


def make_layer(rank: int, num_ranks: int, seed: int, num_tokens: int = 64) -> Layer:
    generator = torch.Generator().manual_seed(seed)
    num_experts = num_ranks * EXPERTS_PER_RANK
    xs, ids, weights = [], [], []
    for _ in range(num_ranks):
        xs.append(torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16())
        ids.append(torch.rand(num_tokens, num_experts, generator=generator).topk(NUM_TOPK).indices)
        weights.append(torch.rand(num_tokens, NUM_TOPK, generator=generator))
    return Layer(rank, xs, ids, weights)


def dispatch(buffer: Buffer, layer: Layer, **more: Any) -> tuple:
    layout = layout_of(buffer, layer.topk_idx, layer.num_experts)
    return buffer.dispatch(
        layer.x,
        **layout,
        topk_idx=layer.topk_idx,
        topk_weights=layer.topk_weights,
        **more,
    )


def check_dispatched(layer: Layer, recv_x: torch.Tensor, recv_ids: Any = None, recv_weights: Any = None) -> None:
    rows = layer.num_rows
    assert torch.equal(recv_x[:rows].cpu(), layer.received.recv_x)
    if recv_ids is not None:
        assert torch.equal(recv_ids[:rows].cpu(), layer.received.recv_topk_idx)
        assert (recv_ids[rows:] == -1).all()
        assert torch.equal(recv_weights[:rows].cpu(), layer.received.recv_topk_weights)


def check_combined(layer: Layer, combined: torch.Tensor) -> None:
    assert torch.equal(combined.cpu(), layer.doubled())


def round_trip(buffer: Buffer, layer: Layer) -> tuple:
    """A full dispatch and a combine, checked. Returns the handle."""
    recv_x, recv_ids, recv_weights, _, handle, _ = dispatch(buffer, layer)
    check_dispatched(layer, recv_x, recv_ids, recv_weights)
    combined, _, _ = buffer.combine(recv_x.mul_(2), handle)
    check_combined(layer, combined)
    return handle
