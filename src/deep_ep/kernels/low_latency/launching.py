"""Launches that take the host little time: less than such a kernel runs.

Triton's launcher looks, at every launch, whether a kernel needs scratch memory, and then hands everything to a function
in C. For a kernel that needs none that function is called at once, in the way in which Triton calls it.
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch

from .._triton import INTERPRETED, Launch

_address_of = torch.Tensor.data_ptr  # of the class: between two calls of it there is no Python
_GRID, _STREAM = 6, 7  # of no launch


class Way(NamedTuple):
    """How a kernel is launched.

    Attributes:
        call: Launches it. It takes the grid and a stream first, and last the kernel's arguments.
        between: What it takes between these.
        is_packed: It takes the kernel's arguments in a tuple.
    """

    call: Any
    between: tuple
    is_packed: bool


class DirectLaunch(Launch):
    """A kernel with most of its arguments. Those that change are tensors first, and then integers."""

    _way: tuple[int, Way] | tuple[None, None] = (None, None)

    def launch(self, num_blocks: int, tensors: tuple[torch.Tensor, ...], numbers: tuple[int, ...]) -> None:
        """Launch it on the current stream.

        Args:
            num_blocks: The grid; 0: it is not launched.
            tensors: Those of the arguments that change.
            numbers: The other ones of them.
        """
        device, way = self._way
        if way is None or not num_blocks or device != torch._C._cuda_getDevice():
            self(num_blocks, *tensors, *numbers)
            if num_blocks and not INTERPRETED:
                self._find_way(len(tensors) + len(numbers))
            return
        stream = torch._C._cuda_getCurrentRawStream(device)
        call, between, is_packed = way
        args = (*map(_address_of, tensors), *numbers, *self._numbers)
        if is_packed:
            call(num_blocks, 1, 1, stream, *between, args)
        else:
            call(num_blocks, 1, 1, stream, *between, *args)

    def _find_way(self, num_changing: int) -> None:
        """Remember how to launch it on this device, where it was launched before."""
        device = torch._C._cuda_getDevice()
        run, function, metadata = self._loaded[device]
        self._way = device, find_way(run, function, metadata, num_changing + len(self._numbers))


def find_way(run: Any, function: Any, metadata: Any, num_args: int) -> Way:
    """The way past Triton's launcher to what it calls; where that is not found, the launcher.

    Args:
        run: Triton's launcher of a kernel.
        function: What it wants to know of the kernel.
        metadata: Likewise.
        num_args: How many arguments the kernel has.
    """
    usual = Way(run, (function, metadata, None, None, None), False)
    sizes = [getattr(run, name, None) for name in ("global_scratch_size", "profile_scratch_size")]
    if sizes != [0, 0] or not hasattr(run, "launch"):
        return usual
    # It is shown a launch that cannot happen: neither kernel nor arguments are any.
    no_function, args = object(), tuple(object() for _ in range(num_args))
    seen: list[tuple] = []
    shown = copy.copy(run)  # other threads may be launching the kernel
    shown.launch = lambda *given: seen.append(given)
    try:
        shown(_GRID, 1, 1, _STREAM, no_function, metadata, None, None, None, *args)
    except Exception:
        return usual
    given = seen[0] if len(seen) == 1 else ()
    is_packed = given[-1:] == (args,)
    if given[:5] != (_GRID, 1, 1, _STREAM, no_function) or not (is_packed or given[-num_args:] == args):
        return usual
    between = given[5:-1] if is_packed else given[5:-num_args]
    return Way(run.launch, (function, *between), is_packed)
