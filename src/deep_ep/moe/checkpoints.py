"""One file with all experts, out of the states of all ranks, and back: for plain experts, without communication.

Experts that are DTensors need none of this: `torch.distributed.checkpoint` saves and loads them, on other numbers of
ranks too. A state here is any nesting of mappings, such as a model's state dict, or that of an optimizer by parameter
name (`torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`), or both in one.

Files say nothing but names and tensors. A module is taken for the experts of a layer if it is called `experts` and has
one of the parameters that all of them have, `up` and `down`; everything in it is then a rank's own. The name alone says
little: a layer, or a list of layers, may be called so, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

_PARAMETERS = ("experts.up", "experts.down")
_WRAPPERS = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of torch, in names of what they wrap


def merge_experts(shards: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One state with all experts, out of those of all ranks. No communication: shards may come from files.

    Beside FSDP2 take them with `get_state_dict(..., options=StateDictOptions(full_state_dict=True))`, on all ranks, and
    load the result with the same option.

    Args:
        shards: The state of each rank, by rank.

    Returns:
        Experts, and an optimizer's moments of them, [E, ...] joined; everything else as the first rank has it.

    Raises:
        ValueError: A rank's state lacks a key that another has, or nothing says which tensors are experts.
        TypeError: A tensor is a DTensor.
    """
    if not shards:
        raise ValueError("merge_experts: `shards` must be the states of all ranks, got none")
    modules = _find_experts(shards[0])
    unknown = next((path for path, _ in _tensors(shards[0]) if ".experts." in f".{path}"), None)
    if not modules and unknown is not None:
        raise ValueError(
            f"merge_experts: `{unknown}` may be of experts or beside them, and nothing says which: the states have no "
            "`experts.up` or `experts.down`. Pass the model's state in the same mapping"
        )
    return _merge(shards, "", modules)


def _merge(shards: Sequence[Mapping[str, Any]], path: str, modules: set[str]) -> dict[str, Any]:
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
    return {key: _merge_value([shard[key] for shard in shards], f"{path}{key}", modules) for key in shards[0]}


def _merge_value(values: list[Any], path: str, modules: set[str]) -> Any:
    if isinstance(values[0], Mapping):
        return _merge(values, f"{path}.", modules)
    is_split = _is_split(values[0], path, modules)
    if any(isinstance(value, DTensor) for value in values):
        raise TypeError(f"merge_experts: `{path}` is a DTensor, {_OF_EXPERTS if is_split else _OF_OTHERS}")
    return torch.cat(values) if is_split else values[0]


_OF_EXPERTS = (
    "which is all experts already. Save with `torch.distributed.checkpoint`, or take `get_model_state_dict` with "
    "`full_state_dict=True`"
)
_OF_OTHERS = (
    "of which a rank's state has a part. Take whole tensors: `get_state_dict(model, optimizer, "
    "options=StateDictOptions(full_state_dict=True))`, on all ranks, and load with the same options"
)


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
    modules = _find_experts(state)
    if not modules:
        raise ValueError(
            "take_experts: `state` has no experts: no `experts.up` or `experts.down`. Pass what `merge_experts` "
            "returned"
        )
    return _take(state, rank, num_ranks, "", modules)


def _take(state: Mapping[str, Any], rank: int, num_ranks: int, path: str, modules: set[str]) -> dict[str, Any]:
    """A rank's part of a state."""
    taken = dict(state)
    for key, value in state.items():
        name = f"{path}{key}"
        if isinstance(value, Mapping):
            taken[key] = _take(value, rank, num_ranks, f"{name}.", modules)
        elif _is_split(value, name, modules):
            if value.size(0) % num_ranks:
                raise ValueError(
                    f"take_experts: the {value.size(0)} experts of `{name}` must divide evenly over {num_ranks} ranks"
                )
            taken[key] = value.chunk(num_ranks)[rank].clone()  # not a view that would keep all experts alive
    return taken


# Which are experts ---------------------------------------------------------------------------------------------------


def _is_split(value: Any, path: str, modules: set[str]) -> bool:
    """Whether each rank has a part of it: a tensor of experts, and not a number such as an optimizer's step."""
    if not isinstance(value, torch.Tensor) or value.ndim == 0:
        return False
    return not modules.isdisjoint(module for name in _names(path) for module in _modules_around(name))


def _modules_around(name: str) -> Iterator[str]:
    """The modules called `experts` that something is inside of.

    Example:
        `blocks.experts.0.experts.up` is in `blocks.experts` and in `blocks.experts.0.experts`.
    """
    parts = name.split(".")
    return (".".join(parts[: index + 1]) for index, part in enumerate(parts) if part == "experts")


def _find_experts(state: Mapping[str, Any]) -> set[str]:
    """The modules in a state that are the experts of a layer, by their path there and by their name in the model."""
    found = set()
    for path, key in _tensors(state):
        for name in (*_names(path), _unwrapped(key)):
            if f".{name}".endswith(tuple(f".{one}" for one in _PARAMETERS)):
                found.add(name.rpartition(".")[0])
    return found


def _tensors(state: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str]]:
    """The path of each tensor of a state, and its key in the mapping that it lies in."""
    for key, value in state.items():
        if isinstance(value, Mapping):
            yield from _tensors(value, f"{path}{key}.")
        elif isinstance(value, torch.Tensor) and value.ndim > 0:
            yield f"{path}{key}", str(key)


def _names(path: str) -> Iterator[str]:
    """The names by which a tensor may be known: its path, and as an optimizer's moment the name of its parameter.

    Example:
        `optimizer.state.moe.experts.up.exp_avg` is a moment of `moe.experts.up`.
    """
    path = _unwrapped(path)
    yield path
    _, is_moment, behind = f".{path}".partition(".state.")
    if is_moment:
        yield behind.rpartition(".")[0]


def _unwrapped(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
