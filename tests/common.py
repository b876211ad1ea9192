"""What several tests share."""

from __future__ import annotations

import contextlib
import importlib
import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

NOTHING_POSTED = {"DEEP_EP_POSTED_BYTES": "0"}  # small calls go the way of large ones


class OneRank:
    """An MPI-like communicator of one rank: a buffer without a process group."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, value: Any) -> list[Any]:
        return [value]


def layout_of(buffer: Any, topk_idx: Any, num_experts: int) -> dict[str, Any]:
    """What a dispatch is told of where its tokens go, by name."""
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": mask,
        "num_tokens_per_expert": per_expert,
    }


def error_of(work: Callable[..., Any], *args: Any, **kwargs: Any) -> tuple[str, str]:
    """The kind and the text of what a call raises; `none` if it does not."""
    try:
        work(*args, **kwargs)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def default_device(device: str) -> contextlib.AbstractContextManager:
    """Inside the block tensors are made on a device, unless they say otherwise. On the CPU: nothing changes."""
    return contextlib.nullcontext() if device == "cpu" else _DefaultDevice(device)


class _DefaultDevice(TorchFunctionMode):
    """As `with torch.device(...)`, but numbers that a generator of the CPU draws are drawn there, and then moved.

    So the same seed gives the same inputs on all devices.
    """

    def __init__(self, device: str):
        super().__init__()
        self._device = device

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if function not in _device_constructors() or kwargs.get("device") is not None:
            return function(*args, **kwargs)
        generator = kwargs.get("generator")
        if generator is not None and generator.device.type == "cpu":
            return function(*args, **kwargs).to(self._device)
        return function(*args, **{**kwargs, "device": self._device})


def run_ranks(function: Callable[..., Any], num_ranks: int, *args: Any, **options: Any) -> list[Any]:
    """`deep_ep.launch.run_ranks`, with tensors made on the suite's device unless they say otherwise."""
    from deep_ep import launch  # late: conftest sets the environment that it is imported under

    return launch.run_ranks(on_device, num_ranks, function, *args, **options)


def on_device(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Inside a rank: run its function with tensors on the suite's device."""
    quicken_interpreter()
    with default_device(os.environ.get("DEEP_EP_DEVICE", "cpu")):
        return function(rank, num_ranks, *args)


def quicken_interpreter() -> None:
    """Where this process interprets kernels: let it do so faster.

    Not if `PLAIN_INTERPRETER` is 1: users have the interpreter as it is.
    """
    if os.environ.get("PLAIN_INTERPRETER") == "1":
        return
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        importlib.import_module("quick_interpreter")
