"""Calls that a compiler makes without tracing them. Imported only inside a compiler: decorating imports half of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@torch.compiler.disable(
    reason="deep_ep: calls of a buffer are not traced. `deep_ep.moe.dispatch` and `deep_ep.moe.combine` with "
    "`num_worst_tokens` are operators, which a full graph takes"
)
def untraced(function: Callable[..., Result], *args: Any, **kwargs: Any) -> Result:
    """Call a function: one graph break, whose reason says what to use instead."""
    return function(*args, **kwargs)
