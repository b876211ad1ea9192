"""Arithmetic that DeepEP's scripts check results with.

Shape letters: T tokens, K top-k width, E experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..quant import per_token_cast_back, per_token_cast_to_fp8

__all__ = [
    "align",
    "calc_diff",
    "ceil_div",
    "count_bytes",
    "create_grouped_scores",
    "hash_tensor",
    "hash_tensors",
    "inplace_unique",
    "per_token_cast_back",
    "per_token_cast_to_fp8",
    "safe_div",
]


def calc_diff(x: torch.Tensor, y: torch.Tensor) -> float:
    """How far `x` is from `y`: 0 for equal tensors, about half the squared relative error for close ones.

    With `a = x + 1` and `b = y + 1` in float64 it is `1 - 2 * sum(a * b) / sum(a * a + b * b)`. The 1 keeps
    tensors near zero from turning noise into a large difference.

    Args:
        x: Any shape and dtype.
        y: The shape of `x`, any dtype.

    Example:
        `x = [0, 1]`, `y = [1, 1]`: `1 - 2 * 6 / 13 = 1 / 13`.
    """
    a, b = x.double() + 1, y.double() + 1
    norm = (a * a + b * b).sum().item()
    # Both empty, or both -1 everywhere: equal, although the quotient has no value.
    return 1 - 2 * (a * b).sum().item() / norm if norm else 0.0


def safe_div(a: float, b: float) -> float:
    """`a / b`, where 0 / 0 is 0; anything else over 0 raises `ZeroDivisionError`."""
    return 0 if a == 0 and b == 0 else a / b


def ceil_div(x: int, y: int) -> int:
    """`x / y`, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """The smallest multiple of `y` that is at least `x`."""
    return ceil_div(x, y) * y


def inplace_unique(x: torch.Tensor, num_slots: int) -> None:
    """Keep each non-negative value of a row once, largest first, and fill the rest with -1, in place.

    Args:
        x: `[T, K]`, any integer dtype, values below `num_slots`; negative ones count as absent.
        num_slots: One more than the largest value allowed.

    Example:
        `[3, 0, -1, 3]` becomes `[3, 0, -1, -1]`.
    """
    if x.numel() and int(x.max()) >= num_slots:
        raise ValueError(f"inplace_unique: values must be below num_slots={num_slots}, found {int(x.max())}")
    ordered = x.sort(dim=1, descending=True).values
    repeated = torch.zeros_like(ordered, dtype=torch.bool)
    repeated[:, 1:] = ordered[:, 1:] == ordered[:, :-1]
    kept = ordered.masked_fill(repeated | (ordered < 0), -1)
    x.copy_(kept.sort(dim=1, descending=True).values)


def create_grouped_scores(scores: torch.Tensor, group_idx: torch.Tensor, num_groups: int) -> torch.Tensor:
    """Zero the scores of all experts outside the groups that a token chose.

    Args:
        scores: `[T, E]`, any float dtype; expert `e` is in group `e // (E / num_groups)`.
        group_idx: `[T, G]`, int64: the groups that each token chose.
        num_groups: Number of groups; divides E.

    Returns:
        `[T, E]`, dtype of `scores`: a new tensor.
    """
    num_tokens, num_experts = scores.shape
    chosen = torch.zeros((num_tokens, num_groups), dtype=torch.bool, device=scores.device)
    chosen.scatter_(1, group_idx, True)
    return scores.masked_fill(~chosen.repeat_interleave(num_experts // num_groups, dim=1), 0)


def hash_tensor(t: torch.Tensor) -> int:
    """The sum of the tensor's bytes read as int32 words: a check value that ignores the order of rows.

    Args:
        t: Any shape and dtype; bytes short of a whole word at the end count as zero.
    """
    data = t.contiguous().flatten().view(torch.uint8)
    missing = -data.numel() % 4
    return int(torch.nn.functional.pad(data, (0, missing)).view(torch.int32).sum(dtype=torch.int64))


def hash_tensors(*ts: Any) -> int:
    """`hash_tensor` of every tensor, exclusive-ored; tuples and lists are walked, `None` is skipped."""
    value = 0
    for tensor in _tensors_in(ts):
        value ^= hash_tensor(tensor)
    return value


def count_bytes(*ts: Any) -> int:
    """The bytes of all tensors together; tuples and lists are walked, `None` is skipped."""
    return sum(tensor.numel() * tensor.element_size() for tensor in _tensors_in(ts))


def _tensors_in(items: Sequence[Any]) -> Iterator[torch.Tensor]:
    for item in items:
        if isinstance(item, (tuple, list)):
            yield from _tensors_in(item)
        elif item is not None:
            yield item
