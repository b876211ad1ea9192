"""Checkpoints of model and optimizer: saved on four ranks, opened on others, where training goes on as it would have.

The batch of a step is split over however many ranks there are, so losses do not depend on them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from training import LIMIT_SECS, H, Model, T, make_layer, make_optimizer

import deep_ep
from common import error_of, run_ranks
from deep_ep import moe
from deep_ep.moe import GateOptions

pytestmark = pytest.mark.cpu_only  # FSDP2 reduces over gloo on the CPU only

NUM_STEPS, NUM_MORE = 100, 10
BALANCED = GateOptions(update_every=3)  # so that checkpoints lie between two moves of the bias


def make_sharded(num_ranks: int) -> Model:
    """Experts on up to two ranks, and FSDP2 for their replicas and for everything else."""
    num_replicas = max(1, num_ranks // 2)
    grid = init_device_mesh("cpu", (num_replicas, num_ranks // num_replicas), mesh_dim_names=("dp", "ep"))
    buffer = deep_ep.Buffer(grid.get_group("ep"), num_cpu_timeout_secs=LIMIT_SECS)
    torch.manual_seed(num_ranks)  # loading must not find the right weights there
    model = Model(make_layer(torch.float32, buffer=buffer, mesh=grid["ep"], options=BALANCED), torch.float32)
    fully_shard(model.moe.experts, mesh=grid["dp"])
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)), ignored_params=moe.expert_parameters(model))
    return model


def make_plain(num_ranks: int) -> Model:
    buffer = deep_ep.Buffer(dist.group.WORLD, num_cpu_timeout_secs=LIMIT_SECS)
    torch.manual_seed(num_ranks)
    model = Model(make_layer(torch.float32, buffer=buffer, reduction="mean", options=BALANCED), torch.float32)
    model.reset_parameters()  # the same on all ranks
    return model


def train(model: Model, optimizer: torch.optim.Optimizer, steps: range, is_reduced: bool) -> list[float]:
    """Losses of the steps, and the bias behind the last."""
    losses, rank, num_ranks = [], dist.get_rank(), dist.get_world_size()
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x, wanted = torch.randn(2, 4 * T, H, generator=generator)
        output, _ = model(x.chunk(num_ranks)[rank])
        loss = (output - wanted.chunk(num_ranks)[rank]).square().mean()  # chunks are equal: so is their weight
        optimizer.zero_grad()
        loss.backward()
        if not is_reduced:
            moe.reduce_replicated_gradients(model, dist.group.WORLD, "mean")
        moe.clip_grad_norm_(model, 0.5)
        optimizer.step()
        model.moe.update_bias(speed=0.01)
        total = loss.detach() / num_ranks
        dist.all_reduce(total)
        losses.append(total.item())
    return losses + model.moe.gate.bias.tolist()


def state_of(
    model: nn.Module, optimizer: torch.optim.Optimizer, options: StateDictOptions | None = None
) -> dict[str, Any]:
    return dict(zip(("model", "optimizer"), get_state_dict(model, optimizer, options=options), strict=True))


def load(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: dict[str, Any],
    options: StateDictOptions | None = None,
) -> None:
    states = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
    set_state_dict(model, optimizer, **states, options=options)


def save_and_go_on(rank: int, num_ranks: int, folder: str) -> list[float]:
    model = make_sharded(num_ranks)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(NUM_STEPS), True)
    # Its thread communicates beside the training: in a group of its own.
    group = dist.new_group(backend="gloo")
    saving = dcp.async_save(state_of(model, optimizer), checkpoint_id=folder, process_group=group)
    losses = train(model, optimizer, range(NUM_STEPS, NUM_STEPS + NUM_MORE), True)  # while it is written
    saving.result(timeout=60)
    return losses


def load_and_go_on(rank: int, num_ranks: int, folder: str) -> list[float]:
    model = make_sharded(num_ranks)
    optimizer = make_optimizer(model)
    state = state_of(model, optimizer)
    dcp.load(state, checkpoint_id=folder)
    load(model, optimizer, state)
    return train(model, optimizer, range(NUM_STEPS, NUM_STEPS + NUM_MORE), True)


def test_a_checkpoint_of_four_ranks_goes_on_with_others(tmp_path: Path) -> None:
    expected = run_ranks(save_and_go_on, 4, str(tmp_path))[0]
    for num_ranks in (2, 1):
        for losses in run_ranks(load_and_go_on, num_ranks, str(tmp_path)):
            assert losses == pytest.approx(expected, rel=1e-5)


def save_plain(rank: int, num_ranks: int, folder: Path) -> list[float]:
    model = make_plain(num_ranks)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(5), False)
    torch.save(state_of(model, optimizer), folder / f"{rank}.pt")
    return train(model, optimizer, range(5, 10), False)


def load_plain(rank: int, num_ranks: int, file: Path) -> list[float]:
    model = make_plain(num_ranks)
    optimizer = make_optimizer(model)
    load(model, optimizer, moe.take_experts(torch.load(file), rank, num_ranks))
    return train(model, optimizer, range(5, 10), False)


def test_one_file_of_plain_experts_with_their_optimizer(tmp_path: Path) -> None:
    expected = run_ranks(save_plain, 4, tmp_path)[0]
    merged = moe.merge_experts([torch.load(tmp_path / f"{rank}.pt") for rank in range(4)])
    moments = merged["optimizer"]["state"]["moe.experts.up"]
    assert moments["exp_avg"].shape == merged["model"]["moe.experts.up"].shape
    assert moments["step"] == 5
    torch.save(merged, tmp_path / "all.pt")
    for losses in run_ranks(load_plain, 2, tmp_path / "all.pt"):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_states_that_lack_something() -> None:
    shards = [{"model": {"experts.up": torch.ones(2, 3), "gate.weight": torch.ones(3)}} for _ in range(2)]
    del shards[1]["model"]["experts.up"]
    text = error_of(moe.merge_experts, shards)[1]
    assert text.startswith("merge_experts: the state of rank 1/2 lacks `model.experts.up`, which another rank's has.")
    shards[0]["model"] = {"gate.weight": torch.ones(3)}
    assert error_of(moe.take_experts, shards[0], 0, 2)[1].startswith("take_experts: `state` has no experts")
    assert error_of(moe.merge_experts, [])[0] == "ValueError"
    numbered = [{"optimizer": {"state": {0: {"exp_avg": torch.ones(2, 3)}}, "param_groups": []}} for _ in range(2)]
    text = error_of(moe.merge_experts, numbered)[1]
    assert text.startswith("merge_experts: `optimizer.state` has numbers for keys")


def test_what_is_beside_the_experts_is_not_split() -> None:
    """Also where the layer itself, or a list of layers, is called so, and in an optimizer's state."""
    own = [
        "experts.experts.up",
        "experts.experts.adapter.up",
        "lists.experts.1.experts.down",
        "moe.experts._orig_mod.up",
    ]
    common = ["experts.gate.weight", "experts.shared.up", "lists.experts.1.gate.weight", "lists.experts.0.norm.weight"]
    wrapped = [f"again.experts._orig_mod.{name}" for name in ("gate.weight", "shared.up")]
    names = own + common + wrapped + ["norm.weight", "again.experts._orig_mod.experts.up"]
    shards = []
    for rank in range(2):
        model = {name: torch.full((2, 3), float(rank)) for name in names}
        moments = {name: {"exp_avg": value, "step": torch.tensor(1.0)} for name, value in model.items()}
        # Of experts of which only an adapter is trained, the model alone says what they are.
        flat = {f"state.{name}.exp_avg": model[name] for name in (own[1], *common)}
        shards.append({"model": model, "optimizer": {"state": moments}, "flat": flat})
    merged = moe.merge_experts(shards)
    taken = moe.take_experts(merged, 1, 2)
    for name in names:
        is_own = name in own or name.endswith("experts.up")
        for state, size, value in ((merged, 2 + 2 * is_own, 0.0), (taken, 2, float(is_own))):
            tensors = [state["model"][name], state["optimizer"]["state"][name]["exp_avg"]]
            tensors += [state["flat"][key] for key in state["flat"] if key == f"state.{name}.exp_avg"]
            assert all(one.size(0) == size and one[0, 0] == value for one in tensors), name


def test_nothing_says_which_are_experts() -> None:
    shards = [{"state": {"moe.experts.adapter.up": {"exp_avg": torch.ones(2, 3)}}} for _ in range(2)]
    text = error_of(moe.merge_experts, shards)[1]
    assert text.startswith("merge_experts: `state.moe.experts.adapter.up.exp_avg` may be of experts or beside them")
    assert text.endswith("Pass the model's state in the same mapping")


# Plain experts, and FSDP2 for everything else ------------------------------------------------------------------------

WHOLE = StateDictOptions(full_state_dict=True)


def make_plain_sharded(num_ranks: int) -> Model:
    model = make_plain(num_ranks)
    fully_shard(model, mesh=init_device_mesh("cpu", (num_ranks,)), ignored_params=moe.expert_parameters(model))
    return model


def save_beside_fsdp(rank: int, num_ranks: int, folder: Path) -> tuple[list[float], str]:
    model = make_plain_sharded(num_ranks)
    optimizer = make_optimizer(model)
    train(model, optimizer, range(5), True)
    text = error_of(moe.merge_experts, [state_of(model, optimizer)] * num_ranks)[1]
    torch.save(state_of(model, optimizer, WHOLE), folder / f"{rank}.pt")
    return train(model, optimizer, range(5, 10), True), text


def load_beside_fsdp(rank: int, num_ranks: int, folder: Path) -> list[float]:
    merged = moe.merge_experts([torch.load(folder / f"{one}.pt") for one in range(4)])
    model = make_plain_sharded(num_ranks)
    optimizer = make_optimizer(model)
    load(model, optimizer, moe.take_experts(merged, rank, num_ranks), WHOLE)
    return train(model, optimizer, range(5, 10), True)


def test_one_file_of_plain_experts_beside_fsdp(tmp_path: Path) -> None:
    expected, text = run_ranks(save_beside_fsdp, 4, tmp_path)[0]
    assert text.startswith("merge_experts: `model.first.weight` is a DTensor, of which a rank's state has a part.")
    assert "StateDictOptions(full_state_dict=True)" in text
    for losses in run_ranks(load_beside_fsdp, 2, tmp_path):
        assert losses == pytest.approx(expected, rel=1e-5)
