"""The one import of Triton. Where it is missing, kernels are plain functions that nobody can launch.

`TRITON_INTERPRET=1` in the environment, before this is imported, makes Triton run kernels in Python, on the CPU.
"""

from __future__ import annotations

import functools
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
    "variant",
]

_VERSION = tuple(map(int, triton.__version__.split(".")[:2])) if HAS_TRITON else ()
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


class Loaded(NamedTuple):
    """A kernel on a device, as Triton's launcher takes it.

    Triton's own call of its launcher looks for scratch memory and hooks each time, which takes as long as a third of a
    launch. Our kernels need neither.

    Attributes:
        launch: The launcher.
        function: The kernel, a CUfunction.
        head: What comes before the kernel's arguments.
        is_flat: These come one by one; otherwise as one tuple.
    """

    launch: Callable[..., None]
    function: int
    head: tuple[Any, ...]
    is_flat: bool

    @classmethod
    def of(cls, compiled: Any) -> Loaded:
        """A kernel that was compiled, and is loaded now."""
        run, metadata = compiled.run, compiled.packed_metadata  # `run` loads it
        has_more = getattr(run, "global_scratch_size", 1) or getattr(run, "profile_scratch_size", 1)
        is_known = not has_more and not getattr(run, "gsan_enabled", False)
        if is_known and hasattr(run, "kernel_signature"):  # Triton 3.7 to 3.9
            head = (run.launch_cooperative_grid, run.launch_pdl, metadata, *(None,) * 5)
            return cls(run.launch, compiled.function, (*head, run.arg_annotations, run.kernel_signature), False)
        if is_known and _VERSION == (3, 6):
            head = (run.launch_cooperative_grid, run.launch_pdl, None, None, metadata, *(None,) * 3)
            return cls(run.launch, compiled.function, head, True)
        return cls(run, compiled.function, (metadata, None, None, None), True)

    def start(self, num_blocks: int, stream: int, args: tuple[int, ...]) -> None:
        """Launch it, with all its arguments."""
        if self.is_flat:
            self.launch(num_blocks, 1, 1, stream, self.function, *self.head, *args)
        else:
            self.launch(num_blocks, 1, 1, stream, self.function, *self.head, args)


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
        self._loaded: dict[int, Loaded] = {}

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
        loaded = self._loaded.get(device) or self._load(device, args)
        numbers = [arg if type(arg) is int else arg.data_ptr() for arg in args]  # type: ignore[union-attr]
        loaded.start(num_blocks, torch._C._cuda_getCurrentRawStream(device), (*numbers, *self.values))

    def prepare(self, *args: torch.Tensor | int) -> None:
        """Compile and load it for such arguments, without launching it."""
        if not INTERPRETED:
            self._load(torch.cuda.current_device(), args)

    def loaded(self, device: int, args: Sequence[torch.Tensor | torch.dtype | int]) -> Loaded:
        """The kernel on a device.

        Args:
            device: Its index.
            args: As for a launch; for a tensor its type will do.
        """
        return self._loaded.get(device) or self._load(device, args)

    def _load(self, device: int, args: Sequence[torch.Tensor | torch.dtype | int]) -> Loaded:
        library = self._library
        options = self._options | ({"extern_libs": {library.name: library.find()}} if library else {})
        compiled = self._kernel.warmup(*args, grid=(1,), **options, **self._constants)
        compiled = compiled.result() if hasattr(compiled, "result") else compiled
        loaded = self._loaded[device] = Loaded.of(compiled)
        if library:
            library.on_load(compiled.module)
        return loaded


class Launch:
    """A kernel with most of its arguments, which stay the same from call to call, on one device.

    Args:
        variant: The kernel.
        types: Of the arguments that change, in order: the type of the memory that the kernel takes an address for;
            None: the argument says it, a number or a tensor.
        fixed: The arguments behind them.
    """

    def __init__(self, variant: Variant, types: tuple[torch.dtype | None, ...], fixed: tuple[torch.Tensor | int, ...]):
        self._variant = variant
        self._types = types
        self._fixed = fixed
        self._numbers = tuple(arg if isinstance(arg, int) else arg.data_ptr() for arg in fixed) + variant.values
        self._loaded: Loaded | None = None
        self._device = -1

    def __call__(self, num_blocks: int, *args: torch.Tensor | int) -> None:
        """Launch it on the current stream.

        Args:
            num_blocks: The grid; 0: there is nothing to do.
            args: The arguments that change: numbers, tensors, and, but for the interpreter, addresses.
        """
        if not num_blocks:
            return
        if INTERPRETED:
            self._variant(num_blocks, *self._seen(args), *self._fixed)
            return
        launch, function, head, is_flat = self._loaded or self._load(args)
        numbers = [arg if type(arg) is int else arg.data_ptr() for arg in args]  # type: ignore[union-attr]
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if is_flat:  # as in `Loaded.start`, which would be one function more
            launch(num_blocks, 1, 1, stream, function, *head, *numbers, *self._numbers)
        else:
            launch(num_blocks, 1, 1, stream, function, *head, (*numbers, *self._numbers))

    def prepare(self) -> None:
        """Compile and load it, without launching it. Arguments without a type must be numbers."""
        if not INTERPRETED:
            self._load([0] * len(self._types))

    def _load(self, args: Sequence[torch.Tensor | int]) -> Loaded:
        kinds = [arg if kind is None else kind for arg, kind in zip(args, self._types, strict=True)]
        self._device = torch.cuda.current_device()
        loaded = self._loaded = self._variant.loaded(self._device, (*kinds, *self._fixed))
        return loaded

    def _seen(self, args: Sequence[torch.Tensor | int]) -> list[torch.Tensor | int]:
        pairs = zip(args, self._types, strict=True)
        return [arg if kind is None or arg.dtype == kind else arg.view(kind) for arg, kind in pairs]  # type: ignore[union-attr]


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
    variant(kernel, num_warps, constants, types, num_registers, library)(num_blocks, *args)


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
    variant(kernel, num_warps, constants, library=library).prepare(*args)


def variant(
    kernel: Any,
    num_warps: int,
    constants: dict[str, Any],
    types: tuple[torch.dtype, ...] = (),
    num_registers: int = 0,
    library: Library | None = None,
) -> Variant:
    """The one variant of a kernel for these constants. Arguments as those of `launch`."""
    key = (id(kernel), num_warps, num_registers, types, *constants.values())
    known = _variants.get(key)
    if known is None:
        known = _variants[key] = Variant(kernel, constants, num_warps, num_registers, library)
    return known


_variants: dict[tuple, Variant] = {}


def jit(function: Callable | None = None, *, name: str | None = None) -> Any:
    """Have Triton compile a kernel whose integers have types, regardless of their values and of the pointers'.

    Args:
        function: The kernel; None: return a decorator.
        name: The kernel's name in a profile, which several kernels may share; by default the function's. `a::b` is
            mangled as in C++: profilers show it as it was given. Triton's cache knows a kernel by its source alone:
            change the function's name, too, or a kernel that was compiled before keeps its name.
    """
    if function is None:
        return functools.partial(jit, name=name)
    types = function.__annotations__
    numbers = [argument for argument, kind in types.items() if "constexpr" not in str(kind)]
    pointers = [argument for argument in inspect.signature(function).parameters if argument not in types]
    symbol = name
    if name is not None and "::" in name:
        symbol = f"_ZN{''.join(f'{len(part)}{part}' for part in name.split('::'))}E"
    return triton.jit(
        do_not_specialize=[*numbers, *pointers],
        do_not_specialize_on_alignment=pointers,
        repr=None if symbol is None else lambda _: symbol,
    )(function)
