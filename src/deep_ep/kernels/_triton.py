"""The one import of Triton. Where it is missing, kernels are plain functions that nobody can launch.

`TRITON_INTERPRET=1` in the environment, before this is imported, makes Triton run kernels in Python, on the CPU.
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

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

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "Launch",
    "Library",
    "Variant",
    "is_usable",
    "jit",
    "launch",
    "next_power_of_2",
    "prepare",
    "tl",
    "triton",
]

INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not below `number`; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()


def is_usable(device_type: str) -> bool:
    """Whether kernels run on tensors of a device: compiled on CUDA, interpreted on the CPU."""
    return HAS_TRITON and (device_type == "cuda") != INTERPRETED


class Library(NamedTuple):
    """Device code that kernels call, which comes with somebody else's program.

    Attributes:
        name: As Triton keeps it apart from others.
        find: Says where its bitcode is.
        on_load: Told of every module (a CUmodule) that has it, before a kernel of that is launched.
    """

    name: str
    find: Callable[[], str]
    on_load: Callable[[int], None]


class Variant:
    """A kernel for one choice of its constants.

    Triton looks at every argument anew at each launch, which takes longer than most of our kernels run. So our kernels
    are compiled for their constants and for nothing else (`jit` below), and get plain numbers.

    Args:
        kernel: A function under `jit`.
        constants: Its constants, in order.
        num_warps: Warps of a block.
        num_registers: Most registers of a thread; 0: as the compiler likes.
        library: What it calls that Triton does not have.

    Attributes:
        values: Of the constants.
    """

    def __init__(
        self,
        kernel: Any,
        constants: dict[str, Any],
        num_warps: int,
        num_registers: int = 0,
        library: Library | None = None,
    ):
        self._kernel = kernel
        self._library = library
        self._constants = constants
        self.values = tuple(constants.values())
        self._options = {"num_warps": num_warps, **({"maxnreg": num_registers} if num_registers else {})}
        self._loaded: dict[int, tuple] = {}

    def __call__(self, num_blocks: int, *args: torch.Tensor | int) -> None:
        """Launch it on the current stream.

        Args:
            num_blocks: The grid.
            args: All its arguments but the constants, in order: tensors of one device, and integers.
        """
        if INTERPRETED:
            self._kernel[(num_blocks,)](*args, **self._constants)
            return
        device = torch._C._cuda_getDevice()
        run, function, metadata = self._loaded.get(device) or self._load(device, args)
        numbers = [arg if type(arg) is int else arg.data_ptr() for arg in args]  # type: ignore[union-attr]
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(num_blocks, 1, 1, stream, function, metadata, None, None, None, *numbers, *self.values)

    def prepare(self, *args: torch.Tensor | int) -> None:
        """Compile and load it for such arguments, without launching it."""
        if not INTERPRETED:
            self._load(torch.cuda.current_device(), args)

    def loaded(self, device: int, args: Sequence[torch.Tensor | int]) -> tuple:
        """What launches it on a device: a function, and what that wants to know of the kernel."""
        return self._loaded.get(device) or self._load(device, args)

    def _load(self, device: int, args: Sequence[torch.Tensor | int]) -> tuple:
        library = self._library
        options = self._options | ({"extern_libs": {library.name: library.find()}} if library else {})
        compiled = self._kernel.warmup(*args, grid=(1,), **options, **self._constants)
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        run = compiled.run  # loads it
        if library:
            library.on_load(compiled.module)
        self._loaded[device] = run, compiled.function, compiled.packed_metadata
        return self._loaded[device]


class Launch:
    """A kernel with most of its arguments, which stay the same from call to call.

    Args:
        variant: The kernel.
        types: Of the arguments that change, in order: what the kernel takes a tensor's memory for; None: as it is.
        fixed: The arguments behind them.
    """

    def __init__(self, variant: Variant, types: tuple[torch.dtype | None, ...], fixed: tuple[torch.Tensor | int, ...]):
        self._variant = variant
        self._types = types
        self._fixed = fixed
        self._numbers = tuple(arg if isinstance(arg, int) else arg.data_ptr() for arg in fixed) + variant.values
        self._loaded: dict[int, tuple] = {}

    def __call__(self, num_blocks: int, *args: torch.Tensor | int) -> None:
        """Launch it on the current stream.

        Args:
            num_blocks: The grid.
            args: The arguments that change.
        """
        if not num_blocks:
            return
        if INTERPRETED:
            self._variant(num_blocks, *self._seen(args), *self._fixed)
            return
        device = torch._C._cuda_getDevice()
        run, function, metadata = self._loaded.get(device) or self._load(device, args)
        numbers = [arg if type(arg) is int else arg.data_ptr() for arg in args]  # type: ignore[union-attr]
        stream = torch._C._cuda_getCurrentRawStream(device)
        run(num_blocks, 1, 1, stream, function, metadata, None, None, None, *numbers, *self._numbers)

    def _load(self, device: int, args: Sequence[torch.Tensor | int]) -> tuple:
        self._loaded[device] = self._variant.loaded(device, (*self._seen(args), *self._fixed))
        return self._loaded[device]

    def _seen(self, args: Sequence[torch.Tensor | int]) -> list[torch.Tensor | int]:
        pairs = zip(args, self._types, strict=True)
        return [arg if kind is None else arg.view(kind) for arg, kind in pairs]  # type: ignore[union-attr]


def launch(
    kernel: Any,
    num_blocks: int,
    args: Sequence[torch.Tensor | int],
    types: tuple[torch.dtype, ...] = (),
    num_warps: int = 4,
    num_registers: int = 0,
    library: Library | None = None,
    **constants: Any,
) -> None:
    """Launch a kernel on the current stream.

    Args:
        kernel: A function under `jit`.
        num_blocks: The grid.
        args: All its arguments but the constants, in order: tensors of one device, and integers.
        types: Of those tensors whose type differs from call to call with the same constants.
        num_warps: Warps of a block.
        num_registers: Most registers of a thread; 0: as the compiler likes.
        library: What it calls that Triton does not have.
        constants: Its constants, in order.
    """
    _variant(kernel, types, num_warps, num_registers, library, constants)(num_blocks, *args)


def prepare(
    kernel: Any,
    num_blocks: int,
    args: Sequence[torch.Tensor | int],
    num_warps: int = 4,
    library: Library | None = None,
    **constants: Any,
) -> None:
    """Compile and load a kernel as `launch` would, without launching it."""
    del num_blocks
    _variant(kernel, (), num_warps, 0, library, constants).prepare(*args)


def _variant(
    kernel: Any,
    types: tuple[torch.dtype, ...],
    num_warps: int,
    num_registers: int,
    library: Library | None,
    constants: dict[str, Any],
) -> Variant:
    key = (id(kernel), num_warps, num_registers, types, *constants.values())
    variant = _variants.get(key)
    if variant is None:
        variant = _variants[key] = Variant(kernel, constants, num_warps, num_registers, library)
    return variant


_variants: dict[tuple, Variant] = {}


def jit(function: Callable) -> Any:
    """Have Triton compile a kernel whose integers have types, regardless of their values and of the pointers'."""
    names = [name for name, kind in function.__annotations__.items() if "constexpr" not in str(kind)]
    pointers = [name for name in inspect.signature(function).parameters if name not in function.__annotations__]
    return triton.jit(do_not_specialize=[*names, *pointers], do_not_specialize_on_alignment=pointers)(function)
