"""What composes with the MoE layer, row by row, against a dense model of one process.

Every row trains the same small model for 20 steps on four ranks, one of which has no tokens, in FP32 and in FP64. It
must have the dense model's first weights (to the bit), outputs and gradients of the first step, norms, and last
weights. The wrong compositions must raise. Model and steps are in `training.py`.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import distribute_module
from torch.nn.parallel import DistributedDataParallel
from training import (
    EMPTY_RANK,
    LIMIT_SECS,
    NUM_RANKS,
    ROWS,
    STEPS,
    E,
    K,
    Model,
    Seen,
    T,
    batch,
    full,
    make_layer,
    train_dense,
    train_rows,
)

import deep_ep
from common import error_of, run_ranks
from deep_ep import moe

pytestmark = pytest.mark.cpu_only  # FSDP2 reduces over gloo on the CPU only

# In FP64 errors of one part in 10**10 show: FP32 is for rows that cannot be in FP64, and for a look now and then.
OFTEN = {f"{name}, FP64": (name, torch.float64) for name, row in ROWS.items() if not row.is_autocast} | {
    f"{name}, FP32": (name, torch.float32) for name, row in ROWS.items() if row.is_autocast
}
RARELY = {f"{name}, FP32": (name, torch.float32) for name, row in ROWS.items() if not row.is_autocast}
LIMITS = {torch.float32: 1e-4, torch.float64: 1e-10}
AUTOCAST_LIMIT = 5e-2  # of BF16


@functools.cache
def trained(is_often: bool) -> list[dict[tuple[str, torch.dtype], Seen]]:
    """What each rank saw in all rows that run often, or rarely; computed once."""
    return run_ranks(train_rows, NUM_RANKS, list((OFTEN if is_often else RARELY).values()))


def assert_close(what: str, seen: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    assert seen.shape == expected.shape, what
    error, largest = (seen - expected).abs().max().item(), expected.abs().max().item()
    assert error <= limit * max(largest, 1.0), f"{what}: error {error}, largest {largest}"


@pytest.mark.parametrize(
    ("row", "dtype"),
    [
        *(pytest.param(*cell, id=name) for name, cell in OFTEN.items()),
        *(pytest.param(*cell, id=name, marks=pytest.mark.exhaustive) for name, cell in RARELY.items()),
    ],
)
def test_a_row_trains_like_the_dense_model(row: str, dtype: torch.dtype) -> None:
    results = [result[row, dtype] for result in trained((row, dtype) in OFTEN.values())]
    dense = train_dense(ROWS[row], dtype)
    limit = AUTOCAST_LIMIT if ROWS[row].is_autocast else LIMITS[dtype]
    seen = Seen.merge(results)
    for name, value in dense.first_weights.items():
        assert torch.equal(seen.first_weights[name], value), name
    for what, left, right in (
        ("gradient", seen.grads, dense.grads),
        ("weight", seen.last_weights, dense.last_weights),
        ("average", seen.averages, dense.averages),
    ):
        assert left.keys() == right.keys()
        for name in right:
            assert_close(f"{what} of {name}", left[name], right[name], limit)
    assert_close("outputs", torch.cat([result.outputs for result in results]), dense.outputs, limit)
    times = 1 + ROWS[row].is_checkpointed  # it counts again
    assert [result.num_choices for result in results] == [
        0 if rank == EMPTY_RANK else times * STEPS * T * K for rank in range(NUM_RANKS)
    ]
    for result, step in itertools.product(results, range(len(dense.norms))):
        assert torch.equal(result.norms[step], results[0].norms[step])  # the same everywhere, to the bit
        assert_close(f"norm of step {step}", result.norms[step], dense.norms[step], limit)


# What would go wrong in silence --------------------------------------------------------------------------------------


def checkpoint_error(work: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """As `error_of`, for calls of `torch.distributed.checkpoint`, whose exception is no `Exception`."""
    try:
        return error_of(work, *args, **kwargs)
    except dcp.CheckpointException as error:
        return type(error).__name__, str(error)


def wrapped_by_fsdp1(model: Model) -> None:
    """What its constructor does on a GPU; it does not begin without one."""
    wrapper = FullyShardedDataParallel.__new__(FullyShardedDataParallel)
    nn.Module.__init__(wrapper)
    wrapper._fsdp_wrapped_module = model


def refusals(rank: int, num_ranks: int, folder: str) -> dict[str, tuple[str, str]]:
    """What each wrong composition raises."""
    world = init_device_mesh("cpu", (num_ranks,))
    grid = init_device_mesh("cpu", (2, num_ranks // 2), mesh_dim_names=("dp", "ep"))
    buffer = deep_ep.Buffer(dist.group.WORLD, num_cpu_timeout_secs=LIMIT_SECS)

    def model(**how: Any) -> Model:
        how = {"buffer": buffer} | how if "mesh" not in how or how["mesh"] is world else how
        return Model(make_layer(torch.float32, **how), torch.float32)

    def clipped(model: Model) -> torch.Tensor:
        outputs, loss = model(batch(0, rank, torch.float32)[:, 0])
        (outputs.square().sum() + loss).backward()
        return nn.utils.clip_grad_norm_(model.parameters(), math.inf)

    def clipped_on_one_mesh() -> None:
        """Where all parameters are DTensors of one mesh torch's own norm is right."""
        sharded = model(mesh=world)
        fully_shard(sharded, mesh=world, ignored_params=moe.expert_parameters(sharded))
        torch.testing.assert_close(clipped(sharded).full_tensor().double(), moe.clip_grad_norm_(sharded, math.inf))
        largest = max(parameter.grad.full_tensor().abs().max() for parameter in sharded.parameters())
        assert moe.clip_grad_norm_(sharded, math.inf, math.inf) == largest

    def clipped_infinity() -> None:
        """All ranks raise for what only one has."""
        plain = model()
        for parameter in plain.parameters():
            parameter.grad = torch.full_like(parameter, math.inf if rank == 1 else 1.0)
        moe.clip_grad_norm_(plain, 1.0, error_if_nonfinite=True)

    def clipped_nan() -> None:
        """Of the greatest of all numbers, too, to which not every backend knows that NaN belongs."""
        plain = model()
        for parameter in plain.parameters():
            parameter.grad = torch.full_like(parameter, math.nan if rank == 1 else 1.0)
        assert moe.clip_grad_norm_(plain, math.inf, math.inf).isnan()
        moe.clip_grad_norm_(plain, 1.0, math.inf, error_if_nonfinite=True)

    def replaced(model: Model) -> None:
        """Parameters that were put in later, or unfrozen in a copy, refuse as the first ones do."""
        state = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        assert "moe.clip_grad_norm_" in error_of(clipped, model)[1]
        model.zero_grad()
        clipped(copy.deepcopy(model.requires_grad_(False)).requires_grad_())

    def scaled(model: Model) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        outputs, loss = model(batch(0, rank, torch.float32)[:, 0])
        scaler.scale(outputs.square().sum() + loss).backward()
        scaler.step(optimizer)

    def everywhere(**how: Any) -> None:
        """Experts of which every rank has all are replicas: DDP makes their gradients the same."""
        alone = [dist.new_group([one]) for one in range(num_ranks)][rank]
        ddp = DistributedDataParallel(moe.ignore_experts(model(buffer=deep_ep.Buffer(alone), reduction="mean", **how)))
        outputs, loss = ddp(batch(0, rank, torch.float32)[:, 0])
        (outputs.square().sum() + loss).backward()
        grad = ddp.module.moe.experts.up.grad
        expected = grad.clone()
        dist.broadcast(expected, 0)
        assert torch.equal(grad, expected)

    def reduced_everywhere() -> None:
        """And so does `reduce_replicated_gradients`, which leaves other experts alone, by whatever name."""
        alone = [dist.new_group([one]) for one in range(num_ranks)][rank]
        mesh = init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("dp", "ep"))["ep"]
        total = num_ranks * (num_ranks + 1) / 2
        for one in (model(buffer=deep_ep.Buffer(alone)), model(buffer=deep_ep.Buffer(alone), mesh=mesh)):
            layers = nn.ModuleDict({"experts": one, "norm": nn.LayerNorm(4)})
            for parameter in layers.parameters():
                parameter.grad = torch.full_like(parameter, 1.0 + rank)
            moe.reduce_replicated_gradients(layers, dist.group.WORLD)
            assert all(full(parameter.grad).eq(total).all() for parameter in layers.parameters())
        layers = nn.ModuleDict({"experts": model()})
        for parameter in layers.parameters():
            parameter.grad = torch.full_like(parameter, 1.0 + rank)
        moe.reduce_replicated_gradients(layers, dist.group.WORLD)
        own = moe.expert_parameters(layers)
        assert all(one.grad.eq(1.0 + rank if one in own else total).all() for one in layers.parameters())

    def clipped_on_two_meshes() -> None:
        sharded = model(mesh=grid["ep"])
        fully_shard(sharded.moe.experts, mesh=grid["dp"])
        fully_shard(sharded, mesh=world, ignored_params=moe.expert_parameters(sharded))
        clipped(sharded)

    def replicated(model: Model, **how: Any) -> None:
        """`replicate` makes its DDP in the first forward."""
        experts = full(model.moe.experts.up)
        replicate(model, **how)(batch(0, rank, torch.float32)[:, 0])
        assert torch.equal(full(model.moe.experts.up), experts)

    def replicated_but_experts(model: Model) -> None:
        replicated(model, ignored_modules={model.moe.experts})

    def stepped(model: Model, parameters: Any) -> None:
        """A step of no length, which overwrites nevertheless."""
        from torch.distributed.optim import ZeroRedundancyOptimizer  # late: it warns, and ranks alone need it

        experts = full(model.moe.experts.up)
        outputs, loss = model(batch(0, rank, torch.float32)[:, 0])
        (outputs.square().sum() + loss).backward()
        ZeroRedundancyOptimizer(parameters(model), torch.optim.SGD, lr=0.0).step()
        assert torch.equal(full(model.moe.experts.up), experts)

    def all_but_experts(model: Model) -> list[nn.Parameter]:
        return [one for one in model.parameters() if one not in moe.expert_parameters(model)]

    def balanced() -> None:
        """Replicas that FSDP2 knows count by themselves; where they may be unknown, a warning names the argument."""
        layer = model(mesh=grid["ep"]).moe
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            layer.update_bias()
            layer.update_bias(group=layer.buffer.group)
        assert ["pass `group`" in str(one.message) for one in caught] == [True]
        fully_shard(layer.experts, mesh=grid["dp"])
        layer.gate.load[rank] = 1
        layer.experts.unshard()  # as between forward and backward: their mesh is that of a replica alone
        layer.update_bias(speed=1.0)
        assert layer.gate.bias.tolist() == [-1.0] * num_ranks + [1.0] * (E - num_ranks)

    def sharded_in_bf16(is_gate_first: bool, is_frozen: bool = False) -> None:
        """Its gate is FP32, and FSDP2 takes one dtype at a time."""
        sharded = Model(make_layer(torch.bfloat16, buffer=buffer, mesh=world), torch.bfloat16)
        sharded.moe.gate.requires_grad_(not is_frozen)
        if is_gate_first:
            fully_shard(sharded.moe.gate, mesh=world)
        fully_shard(sharded, mesh=world, ignored_params=moe.expert_parameters(sharded))
        outputs, loss = sharded(batch(0, rank, torch.bfloat16)[:, 0])
        (outputs.square().sum() + loss).backward()
        dtypes = {name: full(one.grad).dtype for name, one in sharded.named_parameters() if one.grad is not None}
        expected = {name: torch.float32 if "gate" in name else torch.bfloat16 for name in dtypes}
        assert dtypes == expected
        assert ("moe.gate.weight" in dtypes) != is_frozen

    def reduced_shards() -> None:
        sharded = model(mesh=world)
        fully_shard(sharded, mesh=world, ignored_params=moe.expert_parameters(sharded))
        moe.reduce_replicated_gradients(sharded, dist.group.WORLD, "mean")

    def loaded(model: Model) -> None:
        state = model.state_dict()
        dcp.save({name: value.detach() for name, value in state.items()}, checkpoint_id=folder)  # as plain tensors
        dcp.load(state, checkpoint_id=folder)

    def saved_in_a_thread(model: Model) -> None:
        dcp.async_save(model.state_dict(), checkpoint_id=folder).result(timeout=60)

    def copied(model: Model) -> None:
        """Copies refuse as well, also those that are sent to another process, which may save them."""
        state = model.state_dict()
        sent = ForkingPickler.loads(ForkingPickler.dumps(state["moe.experts.up"]))
        assert torch.equal(sent, model.moe.experts.up)
        assert "are plain experts" in checkpoint_error(dcp.save, {"sent": sent}, checkpoint_id=folder)[1]
        dcp.save({name: value.cpu().clone() for name, value in state.items()}, checkpoint_id=folder)

    return {
        "DDP": error_of(DistributedDataParallel, model()),
        "DDP, DTensors": error_of(DistributedDataParallel, model(mesh=world)),
        "DDP, the sum": error_of(DistributedDataParallel, moe.ignore_experts(model())),
        "DDP, replicas": error_of(DistributedDataParallel, moe.ignore_experts(model(mesh=grid["ep"]))),
        "DDP, other ranks": error_of(
            DistributedDataParallel,
            moe.ignore_experts(model(mesh=grid["ep"])),
            process_group=grid.get_group("dp"),
        ),
        "fully_shard": error_of(fully_shard, model(), mesh=world),
        "fully_shard, BF16": error_of(sharded_in_bf16, is_gate_first=False),
        "fully_shard, BF16, gate first": error_of(sharded_in_bf16, is_gate_first=True),
        "fully_shard, BF16, gate frozen": error_of(sharded_in_bf16, is_gate_first=False, is_frozen=True),
        "distribute_module": error_of(distribute_module, model(), world),
        "replicate": error_of(replicated, model()),
        "replicate, DTensors": error_of(replicated, model(mesh=world)),
        "replicate, left out": error_of(replicated_but_experts, model()),
        "replicate, DTensors left out": error_of(replicated_but_experts, model(mesh=world)),
        "ZeRO": error_of(stepped, model(), Model.parameters),
        "ZeRO, left out": error_of(stepped, model(), all_but_experts),
        "FSDP1": error_of(wrapped_by_fsdp1, model()),
        "DCP": checkpoint_error(dcp.save, model().state_dict(), checkpoint_id=folder),
        "DCP, asynchronous": checkpoint_error(saved_in_a_thread, model()),
        "DCP, copies": checkpoint_error(copied, model()),
        "DCP, loading": checkpoint_error(loaded, model()),
        "clip_grad_norm_": error_of(clipped, model()),
        "clip_grad_norm_, DTensors": error_of(clipped, model(mesh=world)),
        "clip_grad_norm_, one mesh": error_of(clipped_on_one_mesh),
        "clip_grad_norm_, two meshes": error_of(clipped_on_two_meshes),
        "clip_grad_norm_, infinite": error_of(clipped_infinity),
        "clip_grad_norm_, NaN": error_of(clipped_nan),
        "clip_grad_norm_, replaced": error_of(replaced, model()),
        "GradScaler": error_of(scaled, model()),
        "experts everywhere": error_of(everywhere),
        "experts everywhere, reduced": error_of(reduced_everywhere),
        "replicas, reduced": error_of(
            moe.reduce_replicated_gradients, model(mesh=grid["ep"]), dist.group.WORLD, "mean"
        ),
        "other ranks, reduced": error_of(
            moe.reduce_replicated_gradients, model(mesh=grid["ep"]), grid.get_group("dp"), "mean"
        ),
        "replicas, balanced": error_of(balanced),
        "shards, reduced": error_of(reduced_shards),
        "DDP, each alone": error_of(
            DistributedDataParallel,
            moe.ignore_experts(model(mesh=init_device_mesh("cpu", (num_ranks, 1), mesh_dim_names=("dp", "ep"))["ep"])),
        ),
        "reduction": error_of(moe.reduce_replicated_gradients, model(mesh=world), dist.group.WORLD),
        "mesh": error_of(model, mesh=grid),
        "ranks": error_of(make_layer, torch.float32, buffer=buffer, mesh=grid["ep"]),
    }


REFUSED = {
    "DDP": "`DistributedDataParallel(deep_ep.moe.ignore_experts(model))`. They have gradients of the sum of all ranks'",
    "DDP, DTensors": "deep_ep.moe.ignore_experts(model)",
    "DDP, the sum": "MoELayer(..., reduction='mean')",
    "DDP, replicas": "`fully_shard(layer.experts, mesh=mesh['dp'])`",
    "DDP, other ranks": "give DDP the group of all of them",
    "fully_shard": "or with `MoELayer(..., reduction='mean')`; and leave them out, in both cases: `fully_shard(model, ",
    "fully_shard, BF16": "`fully_shard(layer.gate, mesh=mesh)`",
    "fully_shard, BF16, gate first": "",
    "fully_shard, BF16, gate frozen": "",
    "distribute_module": "would be distributed as if they were replicas. Make the layer with `MoELayer(..., mesh",
    "replicate": "Leave them out: `replicate(model, ignored_modules={layer.experts})`",
    "replicate, DTensors": "the experts `up` must stay DTensors",
    "replicate, left out": "",
    "replicate, DTensors left out": "",
    "ZeRO": "Give it all parameters but `deep_ep.moe.expert_parameters(model)`",
    "ZeRO, left out": "",
    "FSDP1": "Use `torch.distributed.fsdp.fully_shard`",
    "DCP": "`moe.experts.up` are plain experts",
    "DCP, asynchronous": "`moe.experts.up` are plain experts",
    "DCP, copies": "`moe.experts.up` are plain experts",
    "DCP, loading": "or load one file with `deep_ep.moe.take_experts`",
    "clip_grad_norm_": "Use `deep_ep.moe.clip_grad_norm_(model, ...)`",
    "clip_grad_norm_, DTensors": "mixed torch.Tensor and DTensor",
    "clip_grad_norm_, one mesh": "",
    "clip_grad_norm_, two meshes": "mesh",
    "clip_grad_norm_, infinite": "the total norm of order 2.0 is inf, nothing was scaled",
    "clip_grad_norm_, NaN": "the total norm of order inf is nan, nothing was scaled",
    "clip_grad_norm_, replaced": "Use `deep_ep.moe.clip_grad_norm_(model, ...)`",
    "GradScaler": "or train in BF16, which needs no scaler",
    "experts everywhere": "",
    "experts everywhere, reduced": "",
    "replicas, reduced": "and `group` has 4 ranks (0, 1, 2, 3): all gradients must come from the same ranks",
    "other ranks, reduced": "all gradients must come from the same ranks, or replicas of experts would drift apart",
    "replicas, balanced": "",
    "shards, reduced": "leave this call out: its gradients are reduced in the backward pass",
    "DDP, each alone": "and DDP is on 4 ranks (0, 1, 2, 3)",
    "reduction": "Pass reduction='mean'",
    "mesh": "such as `mesh['ep']`",
    "ranks": "`mesh` must have the buffer's ranks [0, 1, 2, 3]",
}


def test_what_would_go_wrong_in_silence_is_refused(tmp_path: Path) -> None:
    for errors in run_ranks(refusals, NUM_RANKS, str(tmp_path)):
        assert errors.keys() == REFUSED.keys()
        for name, (_, text) in errors.items():
            assert REFUSED[name] in text, f"{name}: {text}"
            assert bool(text) == bool(REFUSED[name]), f"{name}: {text}"
