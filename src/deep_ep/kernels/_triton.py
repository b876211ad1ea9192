"""The one import of Triton. Where it is missing, kernels are plain functions that nobody can launch.

`TRITON_INTERPRET=1` in the environment, before this is imported, makes Triton run kernels in Python, on the CPU.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch

try:
    import triton
    import triton.language as tl

    HAS_TRITON = True
except ImportError:
    HAS_TRITON = False

    def _jit(function: Callable | None = None, **_: Any) -> Any:
        return function if function is not None else _jit

    triton = SimpleNamespace(jit=_jit, next_power_of_2=lambda number: 1 << (number - 1).bit_length())
    tl = SimpleNamespace(constexpr=lambda value: value)

__all__ = ["HAS_TRITON", "INTERPRETED", "is_usable", "jit", "launch", "next_power_of_2", "prepare", "tl", "triton"]

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()


def is_usable(device_type: str) -> bool:
    """Whether kernels run on tensors of a device: compiled on CUDA, interpreted on the CPU."""
    return HAS_TRITON and (device_type == "cuda") != INTERPRETED


def launch(
    kernel: Any,
    num_blocks: int,
    args: Sequence[torch.Tensor | int],
    types: tuple[torch.dtype, ...] = (),
    num_warps: int = 4,
    num_registers: int = 0,
    **constants: Any,
) -> None:
    """Launch a kernel on the current stream.

    Triton looks at every argument anew at each launch, which takes longer than most of our kernels run. So our kernels
    are compiled for their constants and for nothing else (`jit` below), looked up by those, and get plain numbers.

    Args:
        kernel: A function under `jit`.
        num_blocks: The grid.
        args: All its arguments but the constants, in order: tensors of one device, and integers.
        types: Of those tensors whose type differs from call to call with the same constants.
        num_warps: Warps of a block.
        num_registers: Most registers of a thread; 0: as the compiler likes.
        constants: Its constants, in order.
    """
    if INTERPRETED:
        kernel[(num_blocks,)](*args, **constants)
        return
    compiled = _compile(kernel, args, types, num_warps, num_registers, constants)
    numbers = [arg if type(arg) is int else arg.data_ptr() for arg in args]  # type: ignore[union-attr]
    compiled[(num_blocks, 1, 1)](*numbers, *constants.values())


def prepare(
    kernel: Any, num_blocks: int, args: Sequence[torch.Tensor | int], num_warps: int = 4, **constants: Any
) -> None:
    """Compile and load a kernel as `launch` would, without launching it."""
    if not INTERPRETED:
        _compile(kernel, args, (), num_warps, 0, constants)[(num_blocks, 1, 1)]


def _compile(
    kernel: Any,
    args: Sequence[torch.Tensor | int],
    types: tuple[torch.dtype, ...],
    num_warps: int,
    num_registers: int,
    constants: dict[str, Any],
) -> Any:
    key = (id(kernel), torch.cuda.current_device(), num_warps, num_registers, types, *constants.values())
    compiled = _compiled.get(key)
    if compiled is None:
        options = {"num_warps": num_warps, **({"maxnreg": num_registers} if num_registers else {})}
        compiled = kernel.warmup(*args, grid=(1,), **options, **constants)
        compiled = _compiled[key] = compiled.result() if hasattr(compiled, "result") else compiled
    return compiled


_compiled: dict[tuple, Any] = {}


def jit(function: Callable) -> Any:
    """Have Triton compile a kernel whose integers have types, regardless of their values and of the pointers'."""
    names = [name for name, kind in function.__annotations__.items() if "constexpr" not in str(kind)]
    pointers = [name for name in inspect.signature(function).parameters if name not in function.__annotations__]
    return triton.jit(do_not_specialize=[*names, *pointers], do_not_specialize_on_alignment=pointers)(function)
