"""Loops that run without the GIL.

A Python loop takes the GIL again after every operator, and beside a busy Python thread waits milliseconds each time.
TorchScript runs the same source, operators only, without it. Where it is missing the function runs as it is: slower,
not different.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable
from typing import ParamSpec

import torch

P = ParamSpec("P")


def scripted(function: Callable[P, None]) -> Callable[P, None]:
    """Run `function`, which must be valid TorchScript, outside the GIL. It is compiled at its first call."""

    @functools.cache
    def compiled() -> Callable[P, None]:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)
                return torch.jit.script(function)
        except Exception:
            return function

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        # Unoptimised: it would profile, and compile again for every new shape, for a loop that only calls operators.
        with torch.jit.optimized_execution(False):
            compiled()(*args, **kwargs)

    return run
