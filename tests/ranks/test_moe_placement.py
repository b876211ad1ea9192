"""Layers whose experts have replicas: the same results and the same training as without, also after experts moved."""

from __future__ import annotations

import math

import torch
import torch.distributed as dist

from common import error_of, run_ranks
from deep_ep import Buffer
from deep_ep.moe import MoELayer, clip_grad_norm_, reduce_replicated_gradients
from deep_ep.placement import Placement, place_experts

H, INNER, E, K, T = 16, 8, 8, 3, 24
LIMIT = 1e-10


def make_layer(buffer: Buffer, placement: Placement | None) -> MoELayer:
    torch.manual_seed(3)
    return MoELayer(H, INNER, E, K, buffer=buffer, dtype=torch.float64, shared_intermediate=4, placement=placement)


class Momentum(torch.optim.Optimizer):
    """A plain optimizer with state; torch's own import a compiler, which takes ranks longer than the test."""

    def __init__(self, parameters: object) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            momentum = state.setdefault("momentum", torch.zeros_like(parameter))
            momentum.mul_(0.9).add_(parameter.grad)
            parameter -= 0.003 * momentum
            if parameter.dim() == 3:  # of experts: a number for each, as optimizers have that save memory
                scale = state.setdefault("scale", torch.zeros_like(parameter[:, :1, :1]))
                scale.add_(parameter.grad.abs().amax((1, 2), keepdim=True))
                parameter -= 1e-4 * scale


def step(layer: MoELayer, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    x = x.clone().requires_grad_()
    y = layer(x).x
    optimizer.zero_grad()
    y.square().sum().backward()
    reduce_replicated_gradients(layer, layer.buffer.group)
    layer.reduce_replica_gradients()
    norm = clip_grad_norm_(layer, math.inf)  # in which a copy is no other expert
    optimizer.step()
    return y.detach(), x.grad, norm


def by_expert(layer: MoELayer) -> dict[int, list[torch.Tensor]]:
    """All copies of each expert, of all ranks."""
    shards: list = [None] * layer.buffer.group_size
    own = layer.placement.of_rank(layer.buffer.rank).tolist()
    dist.all_gather_object(shards, list(zip(own, layer.experts.up.detach(), strict=True)))
    experts: dict[int, list[torch.Tensor]] = {}
    for expert, up in (pair for shard in shards for pair in shard):
        experts.setdefault(expert, []).append(up)
    return experts


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


def trained(rank: int, num_ranks: int) -> dict[str, object]:
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20, num_cpu_timeout_secs=20.0)
    load = (torch.arange(E) + 1.0) ** -1
    first = place_experts(load, num_ranks, num_replicas=num_ranks)
    second = place_experts(load.flip(0), num_ranks, num_replicas=num_ranks)
    plain, placed = make_layer(buffer, None), make_layer(buffer, first)
    pairs = [(layer, Momentum(layer.parameters())) for layer in (plain, placed)]
    errors = []
    for number in range(4):
        generator = torch.Generator().manual_seed(10 * number + rank)
        x = torch.randn(T, H, generator=generator, dtype=torch.float64).to(buffer.device)
        expected, found = (step(layer, optimizer, x) for layer, optimizer in pairs)
        errors += [distance(*pair) for pair in zip(found, expected, strict=True)]
        if number == 1:
            placed.move_experts(second, pairs[1][1])
    pairs[1][1].state[placed.experts.up]["by column"] = torch.zeros(H)
    experts, copies = by_expert(plain), by_expert(placed)
    return {
        "refused": error_of(placed.move_experts, first, pairs[1][1]),
        "errors": errors,
        "numbers": [len(copies[expert]) for expert in range(E)],
        "wanted": second.num_copies.tolist(),
        "moved": not torch.equal(first.physical_to_logical, second.physical_to_logical),
        "alike": all(torch.equal(one, group[0]) for group in copies.values() for one in group),
        "experts": max(distance(copies[expert][0], experts[expert][0]) for expert in range(E)),
    }


def test_replicas_and_moves_change_no_result() -> None:
    for told in run_ranks(trained, 4):
        assert max(told["errors"]) < LIMIT, told
        assert told["numbers"] == told["wanted"]
        assert told["moved"]
        assert told["alike"]
        assert told["experts"] < LIMIT
        assert told["refused"][1].startswith("move_experts: the optimizer's `by column` of the experts has shape [16]")
