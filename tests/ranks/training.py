"""A small model with experts, trained in many compositions, and the dense model that it is compared with."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import deep_ep
from common import OneRank
from deep_ep import moe
from deep_ep.moe import GateOptions, MoELayer

NUM_RANKS, STEPS, EMPTY_RANK = 4, 20, 1
T, H, INNER, E, K = 6, 8, 4, 8, 2
OPTIONS = GateOptions(balance_loss=0.1)
MAX_NORM, DECAY, SEED = 0.05, 0.9, 3
LIMIT_SECS = 60.0


@dataclass(frozen=True)
class Row:
    """One composition.

    Attributes:
        experts: `plain`, or DTensors over all four ranks (`ep`) or over two, twice (`ep x dp`).
        rest: What reduces the other gradients: `sum` or `mean` (`reduce_replicated_gradients`), `ddp`, or `fsdp`.
        num_parts: A batch is given in this many parts, whose gradients are accumulated.
        is_checkpointed: Whether activations are computed again.
        is_autocast: Whether the model computes in BF16.
        is_clipped: Whether gradients are clipped.
        is_averaged: Whether a copy of the model keeps an exponential average of the weights.
        is_meta: Whether the model is made without memory first.
        optimizer: How AdamW works on its lists.
    """

    experts: str = "ep"
    rest: str = "ddp"
    num_parts: int = 1
    is_checkpointed: bool = False
    is_autocast: bool = False
    is_clipped: bool = False
    is_averaged: bool = False
    is_meta: bool = False
    optimizer: dict[str, bool] = field(default_factory=dict)


FOREACH, FUSED = {"foreach": True}, {"fused": True}
ROWS = {
    "plain experts, summed, clipped, fused": Row("plain", "sum", is_clipped=True, optimizer=FUSED),
    "plain experts, mean, checkpointed, foreach": Row("plain", "mean", is_checkpointed=True, optimizer=FOREACH),
    "plain experts, DDP, accumulated, averaged copy": Row("plain", num_parts=2, is_averaged=True),
    "DDP, checkpointed, averaged copy": Row(is_checkpointed=True, is_averaged=True),
    "DDP, accumulated, clipped, foreach": Row(num_parts=2, is_clipped=True, optimizer=FOREACH),
    "DDP, autocast": Row(is_autocast=True),
    "FSDP2, accumulated, checkpointed": Row(rest="fsdp", num_parts=2, is_checkpointed=True),
    "FSDP2, meta device, clipped, fused": Row(rest="fsdp", is_meta=True, is_clipped=True, optimizer=FUSED),
    "FSDP2 x experts, accumulated, clipped, foreach": Row(
        "ep x dp", "fsdp", num_parts=2, is_clipped=True, optimizer=FOREACH
    ),
    "FSDP2 x experts, meta device, checkpointed, fused": Row(
        "ep x dp", "fsdp", is_meta=True, is_checkpointed=True, optimizer=FUSED
    ),
    "FSDP2 x experts, autocast": Row("ep x dp", "fsdp", is_autocast=True),
    "FSDP2 of experts, DDP of the rest, clipped": Row("ep x dp", is_clipped=True),
    "FSDP2 of experts, the rest reduced": Row("ep x dp", "mean"),
}


@dataclass
class Seen:
    """What a rank saw in a row. Sharded tensors are whole here, and plain experts the rank's own.

    Attributes:
        first_weights: Before the first step, by name.
        outputs: Of the first step.
        grads: Of the first step, by name, before they are clipped.
        last_weights: After the last step.
        norms: Of each step, where gradients are clipped.
        averages: Of the weights, after the last step.
        num_choices: How many choices of this rank's tokens the gate has counted.
    """

    first_weights: dict[str, torch.Tensor]
    outputs: torch.Tensor = field(default_factory=lambda: torch.empty(0))
    grads: dict[str, torch.Tensor] = field(default_factory=dict)
    last_weights: dict[str, torch.Tensor] = field(default_factory=dict)
    norms: list[torch.Tensor] = field(default_factory=list)
    averages: dict[str, torch.Tensor] = field(default_factory=dict)
    num_choices: int = 0

    @staticmethod
    def merge(results: list[Seen]) -> Seen:
        """The same with all experts, whose parts the ranks saw."""
        kinds = ("first_weights", "grads", "last_weights", "averages")
        merged = {kind: [getattr(result, kind) for result in results] for kind in kinds}
        if results[0].first_weights["moe.experts.up"].size(0) == E:
            return results[0]
        return Seen(**{kind: moe.merge_experts(states) for kind, states in merged.items()})


# The model -----------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    """Experts between two linear layers."""

    def __init__(self, layer: nn.Module, dtype: torch.dtype):
        super().__init__()
        self.first = nn.Linear(H, H, dtype=dtype)
        self.moe = layer
        self.last = nn.Linear(H, H, bias=False, dtype=dtype)
        self.is_checkpointed = False

    def reset_parameters(self) -> None:
        for module in (self.first, self.last):
            with torch.no_grad():
                for parameter in module.parameters():
                    generator = torch.Generator().manual_seed(SEED)
                    values = torch.randn(parameter.shape, generator=generator).to(parameter.dtype) * H**-0.5
                    if isinstance(parameter, DTensor):  # FSDP2's: rows of each rank
                        values = values.chunk(parameter.device_mesh.size())[parameter.device_mesh.get_local_rank()]
                        parameter = parameter.to_local()
                    parameter.copy_(values)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.first(x))
        y, loss = checkpoint(self.moe, h, use_reentrant=False) if self.is_checkpointed else self.moe(h)
        return self.last(h + y), loss


class DenseLayer(nn.Module):
    """The MoE layer in plain torch, with all experts and the same names. It shares only the gate with ours."""

    def __init__(self, layer: MoELayer):
        super().__init__()
        self.gate, self.experts, self.shared = layer.gate, nn.Module(), nn.Module()
        for here, there in ((self.experts, layer.experts), (self.shared, layer.shared)):
            here.up, here.down = nn.Parameter(there.up.detach()), nn.Parameter(there.down.detach())

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routes = self.gate(x)
        output = self.block(x, self.shared.up, self.shared.down)
        for expert, (up, down) in enumerate(zip(self.experts.up, self.experts.down, strict=True)):
            weight = (routes.topk_weights * (routes.topk_idx == expert)).sum(1, keepdim=True)
            output = output + weight * self.block(x, up, down)
        return output, routes.balance_loss

    @staticmethod
    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        gate, value = F.linear(x, up).chunk(2, dim=-1)
        return F.linear(F.silu(gate) * value, down)


def batch(step: int, rank: int, dtype: torch.dtype) -> torch.Tensor:
    """[T, 2, H], tokens of a rank and what should become of them; none on one rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(0 if rank == EMPTY_RANK else T, 2, H, generator=generator, dtype=torch.float64).to(dtype)


def part_loss(model: nn.Module, part: torch.Tensor, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """The outputs for a part of a rank's batch, and its part of the rank's loss."""
    x, wanted = part.unbind(1)
    with torch.autocast("cpu", torch.bfloat16, enabled=row.is_autocast):
        output, balance_loss = model(x)
    loss = (output.to(wanted.dtype) - wanted).square().sum() / T + balance_loss / row.num_parts
    return output.detach().to(wanted.dtype), loss


# Training ------------------------------------------------------------------------------------------------------------


def full(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def weights_of(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name.removeprefix("module."): full(value) for name, value in model.named_parameters()}


def make_optimizer(model: nn.Module, **how: Any) -> torch.optim.Optimizer:
    # A large epsilon: steps must not follow the sign of what is only rounding.
    return torch.optim.AdamW(moe.parameter_groups(model), lr=1e-2, eps=1e-3, **how)


def update_average(average: nn.Module, model: nn.Module) -> None:
    with torch.no_grad():
        for mine, new in zip(average.parameters(), model.parameters(), strict=True):
            mine.lerp_(new, 1 - DECAY)


def train_dense(row: Row, dtype: torch.dtype) -> Seen:
    """The row in one process: the mean of the ranks' losses."""
    torch.manual_seed(SEED)
    layer = make_layer(dtype, buffer=deep_ep.Buffer(None, comm=OneRank()))
    model = Model(DenseLayer(layer), dtype)
    model.reset_parameters()
    seen, optimizer, average = Seen(weights_of(model)), make_optimizer(model), copy.deepcopy(model)
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = []
        for rank in range(NUM_RANKS):
            for part in batch(step, rank, dtype).tensor_split(row.num_parts):
                output, loss = part_loss(model, part, row)
                (loss if row.rest == "sum" else loss / NUM_RANKS).backward()
                outputs.append(output)
        if step == 0:
            seen.outputs, seen.grads = torch.cat(outputs), {n: full(p.grad) for n, p in model.named_parameters()}
        if row.is_clipped:
            seen.norms.append(nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM))
        optimizer.step()
        update_average(average, model)
    seen.last_weights = weights_of(model)
    seen.averages = weights_of(average) if row.is_averaged else {}
    return seen


def make_layer(dtype: torch.dtype, **how: Any) -> MoELayer:
    return MoELayer(H, INNER, E, K, shared_intermediate=INNER, dtype=dtype, **{"options": OPTIONS, **how})


def train_rows(rank: int, num_ranks: int, cells: list[tuple[str, torch.dtype]]) -> dict[tuple[str, torch.dtype], Seen]:
    """Rows, each in a dtype, in turn, in one set of processes."""
    world = init_device_mesh("cpu", (num_ranks,))
    grid = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("dp", "ep"))
    buffers = {
        "ep": deep_ep.Buffer(world.get_group(), num_cpu_timeout_secs=LIMIT_SECS),
        "ep x dp": deep_ep.Buffer(grid.get_group("ep"), num_cpu_timeout_secs=LIMIT_SECS),
    }
    buffers["plain"] = buffers["ep"]
    meshes = {"plain": None, "ep": world, "ep x dp": grid["ep"]}
    seen = {}
    for name, dtype in cells:
        row = ROWS[name]
        model = make_model(row, dtype, buffers[row.experts], meshes[row.experts])
        seen[name, dtype] = train_row(row, prepare(row, model, world, grid), rank, dtype)
    return seen


def make_model(row: Row, dtype: torch.dtype, buffer: deep_ep.Buffer, mesh: Any) -> Model:
    torch.manual_seed(SEED)
    reduction = {"sum": "sum", "mean": "mean"}.get(row.rest, "mean")
    with torch.device("meta") if row.is_meta else contextlib.nullcontext():
        model = Model(make_layer(dtype, buffer=buffer, mesh=mesh, reduction=reduction), dtype)
    model.is_checkpointed = row.is_checkpointed
    if not row.is_meta:
        model.reset_parameters()
    return model


def prepare(row: Row, model: Model, world: Any, grid: Any) -> nn.Module:
    """The model in its company."""
    if row.experts == "ep x dp":
        fully_shard(model.moe.experts, mesh=grid["dp"])
    if row.rest == "ddp":
        return DistributedDataParallel(moe.ignore_experts(model))
    if row.rest == "fsdp":
        fully_shard(model, mesh=world, ignored_params=moe.expert_parameters(model))
    if row.is_meta:
        model.to_empty(device="cpu")
        torch.manual_seed(SEED)
        model.reset_parameters()
        reset_all(model.moe, are_parts_first=row.experts == "ep x dp")
    return model


def reset_all(module: nn.Module, are_parts_first: bool) -> None:
    """Reset every module that can be, as loops after `to_empty` do."""

    def reset(one: nn.Module) -> None:
        if hasattr(one, "reset_parameters"):
            one.reset_parameters()

    if are_parts_first:
        module.apply(reset)
    else:
        for one in module.modules():
            reset(one)


def train_row(row: Row, model: nn.Module, rank: int, dtype: torch.dtype) -> Seen:
    seen = Seen(weights_of(model))
    optimizer = make_optimizer(model, **row.optimizer)
    average = copy.deepcopy(model) if row.is_averaged else None
    for step in range(STEPS):
        optimizer.zero_grad()
        outputs = []
        parts = batch(step, rank, dtype).tensor_split(row.num_parts)
        for index, part in enumerate(parts):
            with syncing(row, model, index == len(parts) - 1):
                output, loss = part_loss(model, part, row)
                loss.backward()
                outputs.append(output)
        if row.rest in ("sum", "mean"):
            moe.reduce_replicated_gradients(model, dist.group.WORLD, row.rest)
        if step == 0:
            grads = {name: full(value.grad) for name, value in model.named_parameters()}
            seen.outputs, seen.grads = torch.cat(outputs), {n.removeprefix("module."): g for n, g in grads.items()}
        if row.is_clipped:
            seen.norms.append(moe.clip_grad_norm_(model, MAX_NORM))
        optimizer.step()
        if average is not None:
            update_average(average, model)
    seen.last_weights = weights_of(model)
    if average is not None:
        seen.averages = weights_of(average)
        assert next(moe_layers(average)).buffer is next(moe_layers(model)).buffer
    seen.num_choices = int(next(moe_layers(model)).gate.load.sum())
    return seen


def moe_layers(model: nn.Module) -> Iterator[MoELayer]:
    return (module for module in model.modules() if isinstance(module, MoELayer))


def syncing(row: Row, model: Any, is_last: bool) -> contextlib.AbstractContextManager:
    """Reduce gradients only with the last part of a batch, as the company's documentation has it."""
    if row.rest == "fsdp":
        model.set_requires_gradient_sync(is_last)
    return model.no_sync() if row.rest == "ddp" and not is_last else contextlib.nullcontext()
