"""The one import of Triton. Where it is missing, kernels are plain functions that cannot be launched.

`TRITON_INTERPRET=1` in the environment, before this is imported, makes Triton run kernels in Python, on the CPU.
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
from collections.abc import Callable, Mapping, Sequence
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

    triton = SimpleNamespace(jit=_jit)
    tl = SimpleNamespace(constexpr=lambda value: value)

__all__ = [
    "HAS_TRITON",
    "INTERPRETED",
    "OPTIONS",
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

_address_of = torch.Tensor.data_ptr  # of the class: to call it for many tensors takes no Python in between
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"

# A product that is added is rounded once, as by nvcc and on the CPU. The default of Triton depends on its version and
# on the environment, and the sums of low-latency combines with it.
OPTIONS = {"enable_fp_fusion": True}


def next_power_of_2(number: int) -> int:
    """Return the smallest power of two that is not below `number`; 1 for 0."""
    return 1 << max(0, number - 1).bit_length()


def is_usable(device_type: str) -> bool:
    """Return whether kernels run on tensors of a device: compiled on CUDA, interpreted on the CPU."""
    return HAS_TRITON and (device_type == "cuda") != INTERPRETED


class Library(NamedTuple):
    """Device code that kernels call, from another software package.

    Attributes:
        name: The name by which Triton distinguishes it from others.
        find: Returns the path of its bitcode.
        on_load: Called with every module (a CUmodule) that contains it, before a kernel of that module is launched.
    """

    name: str
    find: Callable[[], str]
    on_load: Callable[[int], None]


class Loaded(NamedTuple):
    """A kernel on a device, with direct access to the C function that Triton's launcher calls.

    At every launch Triton's launcher checks whether the kernel needs scratch memory, and then passes everything to a
    function in C. For kernels that need none, such as those here, that function is called directly, as Triton calls it.

    Attributes:
        call: Launches it. It takes the grid and a stream first, and the kernel's arguments last.
        between: The arguments between these.
        is_packed: It takes the kernel's arguments in a tuple.
    """

    call: Callable[..., None]
    between: tuple[Any, ...]
    is_packed: bool

    def start(self, num_blocks: int, stream: int, args: tuple[int, ...]) -> None:
        """Launch the kernel with all its arguments."""
        if self.is_packed:
            self.call(num_blocks, 1, 1, stream, *self.between, args)
        else:
            self.call(num_blocks, 1, 1, stream, *self.between, *args)


_NO_GRID, _NO_STREAM = 6, 7  # of a launch that cannot happen


def find_launcher(run: Any, function: Any, metadata: Any, num_args: int) -> Loaded:
    """Return the C function that Triton's launcher calls; if it is not found, the launcher itself.

    Args:
        run: Triton's launcher of a kernel.
        function: The kernel's function, as the launcher takes it.
        metadata: The kernel's metadata, as the launcher takes it.
        num_args: How many arguments the kernel has, its constants included.
    """
    usual = Loaded(run, (function, metadata, None, None, None), False)
    sizes = [getattr(run, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    if sizes != [0, 0] or not hasattr(run, "launch"):
        return usual
    # The launcher is given a launch that cannot happen: neither the kernel nor the arguments are real.
    no_function, args = object(), tuple(object() for _ in range(num_args))
    seen: list[tuple] = []
    shown = copy.copy(run)  # other threads may be launching the kernel
    shown.launch = lambda *given: seen.append(given)
    try:
        shown(_NO_GRID, 1, 1, _NO_STREAM, no_function, metadata, None, None, None, *args)
    except Exception:
        return usual
    given = seen[0] if len(seen) == 1 else ()
    is_packed = given[-1:] == (args,)
    if given[:5] != (_NO_GRID, 1, 1, _NO_STREAM, no_function) or not (is_packed or given[-num_args:] == args):
        return usual
    between = given[5:-1] if is_packed else given[5:-num_args]
    return Loaded(run.launch, (function, *between), is_packed)


class Variant:
    """A kernel for one choice of its constants.

    Triton inspects every argument at each launch, which takes longer than most of these kernels run. So kernels are
    compiled for their constants and for nothing else (`jit` below), and get plain numbers.

    Args:
        kernel: A function under `jit`.
        constants: Its constants, in order.
        num_warps: Warps of a block.
        num_registers: Most registers of a thread; 0: the compiler decides.
        library: The library that it calls.

    Attributes:
        values: The values of the constants.
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
        self._options = OPTIONS | {"num_warps": num_warps} | ({"maxnreg": num_registers} if num_registers else {})
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
        """Return the kernel on a device, and compile and load it if needed.

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
        run = compiled.run  # loads it
        num_args = len(args) + len(self.values)
        loaded = self._loaded[device] = find_launcher(run, compiled.function, compiled.packed_metadata, num_args)
        if library:
            library.on_load(compiled.module)
        return loaded


class Launch:
    """A kernel with most of its arguments, which stay the same from call to call, on one device.

    Args:
        variant: The kernel.
        types: Of the arguments that change, in order: the type of the memory that the kernel takes an address for;
            None: the argument itself, a tensor or a number, has it.
        fixed: The arguments behind them.
    """

    def __init__(self, variant: Variant, types: tuple[torch.dtype | None, ...], fixed: tuple[torch.Tensor | int, ...]):
        self._variant = variant
        self._types = types
        self._fixed = fixed
        self._numbers = tuple(arg if isinstance(arg, int) else arg.data_ptr() for arg in fixed) + variant.values
        self._loaded: Loaded | None = None
        self._device = -1

    def __call__(self, num_blocks: int, tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...] = ()) -> None:
        """Launch it on the current stream.

        Args:
            num_blocks: The grid; 0: there is nothing to do.
            tensors: The tensors among the arguments that change from call to call; they come first.
            numbers: The integers among them, which follow.
        """
        if not num_blocks:
            return
        if INTERPRETED:
            self._variant(num_blocks, *self._seen((*tensors, *numbers)), *self._fixed)
            return
        call, between, is_packed = self._loaded or self._load((*tensors, *numbers))
        args = (*map(_address_of, tensors), *numbers, *self._numbers)
        stream = torch._C._cuda_getCurrentRawStream(self._device)
        if is_packed:  # as in `Loaded.start`, which would be one function more
            call(num_blocks, 1, 1, stream, *between, args)
        else:
            call(num_blocks, 1, 1, stream, *between, *args)

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
        return [arg if kind is None else _viewed(arg, kind) for arg, kind in zip(args, self._types, strict=True)]  # type: ignore[arg-type]


def _viewed(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the same memory as another type. One without elements may begin where none of that type could."""
    if tensor.dtype == dtype:
        return tensor
    return tensor.view(dtype) if tensor.numel() else tensor.new_empty(0, dtype=dtype)


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
        num_registers: Most registers of a thread; 0: the compiler decides.
        library: The library that it calls.
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
    """Return the one variant of a kernel for these constants. The arguments are those of `launch`."""
    key = (id(kernel), num_warps, num_registers, types, *constants.values())
    known = _variants.get(key)
    if known is None:
        known = _variants[key] = Variant(kernel, constants, num_warps, num_registers, library)
    return known


_variants: dict[tuple, Variant] = {}


def jit(function: Callable | None = None, *, name: str | Callable[[Mapping[str, Any]], str] | None = None) -> Any:
    """Have Triton compile a kernel whose integers have types, regardless of their values and of the pointers'.

    Args:
        function: The kernel; None: return a decorator.
        name: The kernel's name in a profile, which several kernels may share, or a function that returns it for the
            constants of a variant; by default the function's. `a::b` is mangled as in C++: profilers show it as it was
            given. Triton's cache knows a kernel by its source alone: change the function's name, too, or a kernel that
            was compiled before keeps its name.
    """
    if function is None:
        return functools.partial(jit, name=name)
    types = function.__annotations__
    numbers = [argument for argument, kind in types.items() if "constexpr" not in str(kind)]
    pointers = [argument for argument in inspect.signature(function).parameters if argument not in types]

    def symbol(specialization: Any) -> str:
        chosen = name if isinstance(name, str) else name(specialization.constants)  # type: ignore[misc]
        return f"_ZN{''.join(f'{len(part)}{part}' for part in chosen.split('::'))}E" if "::" in chosen else chosen

    return triton.jit(
        do_not_specialize=[*numbers, *pointers],
        do_not_specialize_on_alignment=pointers,
        repr=None if name is None else symbol,
    )(function)
