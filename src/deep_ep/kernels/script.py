"""Loops that run without the GIL.

A Python loop takes the GIL again after every operator, and beside a busy Python thread waits milliseconds each time.
TorchScript runs the same source, operators only, without it. Where it is missing the function runs as it is: slower,
not different.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import Generic, ParamSpec

import torch

P = ParamSpec("P")


class Scripted(Generic[P]):
    """A function, compiled to TorchScript at its first call.

    Args:
        plain: The function, valid as TorchScript. For one turn of a loop, plain operators are quicker.
    """

    def __init__(self, plain: Callable[P, None]):
        self._plain = plain

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> None:
        """Run the function without holding the GIL."""
        # Unoptimised: it would profile, and compile again for every new shape, for a loop that only calls operators.
        with torch.jit.optimized_execution(False):
            self._compiled(*args, **kwargs)

    @functools.cached_property
    def _compiled(self) -> Callable[P, None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return torch.jit.script(self._plain)
        except Exception:  # whatever a torch without TorchScript raises
            return self._plain
