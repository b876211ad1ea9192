"""One file with all experts, out of the states of all ranks, and back: for plain experts, without communication.

Experts that are DTensors need none of this: `torch.distributed.checkpoint` saves and loads them, on other numbers of
ranks too. A state here is any nesting of mappings, such as a model's state dict, or that of an optimizer by parameter
name (`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`), or both in one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_REPLICATED = ("gate", "shared")  # what a layer has beside its experts


def merge_experts(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state with all experts, out of those of all ranks. No communication: shards may come from files.

    Args:
        shards: The state of each rank, by rank.

    Returns:
        Experts, and an optimizer's moments of them, [E, ...] joined; everything else as the first rank has it.

    Raises:
        ValueError: A rank's state lacks a key that another has.
    """
    if not shards:
        raise ValueError("merge_experts: `shards` must be the states of all ranks, got none")
    return _merge(shards, "")


def _merge(shards: Sequence[Mapping[str, Any]], path: str) -> dict[str, Any]:
    keys = set().union(*shards)
    if any(isinstance(key, int) for key in keys):
        raise ValueError(
            f"merge_experts: `{path.rstrip('.')}` has numbers for keys, and nothing says which of them are experts. "
            "Pass an optimizer's state by name, `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`"
        )
    for rank, shard in enumerate(shards):
        missing = sorted(map(str, keys.difference(shard)))
        if missing:
            raise ValueError(
                f"merge_experts: the state of rank {rank}/{len(shards)} lacks `{path}{missing[0]}`, which another "
                "rank's has. Pass states of one model, saved at the same step"
            )
    return {key: _merge_value([shard[key] for shard in shards], f"{path}{key}") for key in shards[0]}


def _merge_value(values: list[Any], path: str) -> Any:
    if isinstance(values[0], Mapping):
        return _merge(values, f"{path}.")
    if not _is_split(values[0], path):
        return values[0]
    if any(isinstance(value, DTensor) for value in values):
        raise TypeError(
            f"merge_experts: `{path}` is a DTensor, which is all experts already. Save with "
            "`torch.distributed.checkpoint`, or take `get_model_state_dict` with `full_state_dict=True`"
        )
    return torch.cat(values)


def take_experts(state: Mapping[str, Any], rank: int, num_ranks: int) -> dict[str, Any]:
    """The state of one rank out of one with all experts. A checkpoint of N ranks so opens on M:

        layer.load_state_dict(take_experts(merge_experts([torch.load(f) for f in files]), rank, num_ranks))

    Args:
        state: As `merge_experts` makes it.
        rank: The rank.
        num_ranks: How many there are now, a divisor of the experts.

    Raises:
        ValueError: There are no experts in the state, or they do not divide evenly.
    """
    if not 0 <= rank < num_ranks:
        raise ValueError(f"take_experts: `rank` must be in 0..{num_ranks - 1}, got {rank}")
    taken, num_split = _take(state, rank, num_ranks, "")
    if not num_split:
        raise ValueError(
            "take_experts: `state` has no experts: no key of it names `experts`. Pass what `merge_experts` returned"
        )
    return taken


def _take(state: Mapping[str, Any], rank: int, num_ranks: int, path: str) -> tuple[dict[str, Any], int]:
    """A rank's part of a state, and how many tensors of it were split."""
    taken, num_split = dict(state), 0
    for key, value in state.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            taken[key], num_inside = _take(value, rank, num_ranks, f"{name}.")
            num_split += num_inside
        elif _is_split(value, name):
            if value.size(0) % num_ranks:
                raise ValueError(
                    f"take_experts: the {value.size(0)} experts of `{name}` must divide evenly over {num_ranks} ranks"
                )
            taken[key] = value.chunk(num_ranks)[rank].clone()  # not a view that would keep all experts alive
            num_split += 1
    return taken, num_split


def _is_split(value: Any, path: str) -> bool:
    """Whether each rank has a part of it: a tensor of experts, and not a number such as an optimizer's step."""
    return isinstance(value, torch.Tensor) and value.ndim > 0 and _is_expert_name(path)


def _is_expert_name(path: str) -> bool:
    """Whether what has this name, in a layer or in a model around it, is a rank's own.

    Example:
        `blocks.0.moe.experts.up` is. `experts.gate.weight`, of a layer that is itself called so, is not.
    """
    *before, behind = f".{path}.".split(".experts.")
    return bool(before) and behind.split(".")[0] not in _REPLICATED
