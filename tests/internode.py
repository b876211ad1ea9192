"""What tests across nodes share: inputs of all ranks, the oracle's answers, and calls with them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist

from deep_ep import Buffer, reference

HIDDEN, TOPK, EXPERTS_PER_RANK = 256, 4, 4


@dataclass
class World:
    """The inputs of all ranks, the same on each, and what the oracle makes of them."""

    num_ranks: int
    ranks_per_node: int
    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]

    @property
    def num_experts(self) -> int:
        return EXPERTS_PER_RANK * self.num_ranks

    @cached_property
    def layouts(self) -> list[reference.Layout]:
        return [reference.layout(ids, self.num_experts, self.num_ranks, self.ranks_per_node) for ids in self.ids]

    @cached_property
    def masks(self) -> list[torch.Tensor]:
        return [one.is_token_in_rank for one in self.layouts]

    def dispatched(
        self, scales: list[torch.Tensor] | None = None, xs: list[torch.Tensor] | None = None, align: int = 1
    ):
        return reference.dispatch(
            xs or self.xs,
            self.masks,
            scales=scales,
            topk_idx=self.ids,
            topk_weights=self.weights,
            num_experts=self.num_experts,
            expert_alignment=align,
            num_tokens_per_expert=[one.num_tokens_per_expert for one in self.layouts],
        )


def make_world(
    num_ranks: int,
    ranks_per_node: int,
    num_tokens: int = 10,
    idx_dtype: torch.dtype = torch.int64,
    seed: int = 0,
    hidden: int = HIDDEN,
) -> World:
    """Rank r has `num_tokens + r` tokens, routed to a few nodes at most, as a group-limited gate does."""
    random = torch.Generator().manual_seed(seed)
    num_nodes, num_experts = num_ranks // ranks_per_node, EXPERTS_PER_RANK * num_ranks
    xs, ids, weights = [], [], []
    for rank in range(num_ranks):
        count = num_tokens + rank if num_tokens else 0
        xs.append(torch.randn(count, hidden, generator=random).bfloat16())
        scores = torch.rand(count, num_experts, generator=random)
        by_node = scores.view(count, num_nodes, num_experts // num_nodes)
        best = by_node.amax(2).topk(min(num_nodes, 2), dim=1).indices
        allowed = torch.zeros(count, num_nodes, dtype=torch.bool).scatter_(1, best, True)
        scores = by_node.masked_fill(~allowed.unsqueeze(2), -1).reshape(count, num_experts)
        chosen = scores.topk(TOPK, dim=1).indices
        chosen[torch.rand(chosen.shape, generator=random) < 0.1] = -1
        ids.append(chosen.to(idx_dtype))
        weights.append(torch.rand(count, TOPK, generator=random))
    return World(num_ranks, ranks_per_node, xs, ids, weights)


def make_buffer(limit_secs: float | None = None, **more: Any) -> Buffer:
    return Buffer(dist.group.WORLD, explicitly_destroy=True, num_cpu_timeout_secs=limit_secs, **more)


def layout_arguments(buffer: Buffer, world: World) -> dict[str, Any]:
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(world.ids[buffer.rank], world.num_experts)
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": mask,
        "num_tokens_per_expert": per_expert,
    }


def topk_arguments(world: World, rank: int) -> dict[str, Any]:
    return {"topk_idx": world.ids[rank], "topk_weights": world.weights[rank]}


def dispatch(buffer: Buffer, world: World, x: Any = None, **more: Any) -> tuple:
    arguments = {**layout_arguments(buffer, world), **topk_arguments(world, buffer.rank), **more}
    return buffer.dispatch(world.xs[buffer.rank] if x is None else x, **arguments)


def equal(got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


def combined(world: World, rank: int, biases: Any = None) -> torch.Tensor:
    """What a combine of the received rows gives a rank, by the oracle."""
    rows = [one.recv_x for one in world.dispatched()]
    return reference.combine(rows, world.masks, biases, ranks_per_node=world.ranks_per_node)[rank].combined_x


def round_trip(buffer: Buffer, world: World) -> None:
    """A dispatch and a combine, checked."""
    recv_x, *_, handle, _ = dispatch(buffer, world)
    equal(recv_x, world.dispatched()[buffer.rank].recv_x)
    equal(buffer.combine(recv_x, handle)[0], combined(world, buffer.rank))
