"""How traffic looks, in the terminal and in the picture alike: colours, and the words in a cell."""

from __future__ import annotations

from collections.abc import Sequence

from .layer import Shape

Matrix = Sequence[Sequence[int]]
"""Tokens, `[from][to]`."""

RAMP = ((239, 246, 253), (165, 204, 238), (79, 148, 208), (23, 92, 158), (10, 48, 94))
"""One hue, from nothing to the most."""


def ramp(share: float) -> tuple[int, int, int]:
    """Red, green and blue for a share between 0 and 1."""
    position = min(max(share, 0.0), 1.0) * (len(RAMP) - 1)
    stop = min(int(position), len(RAMP) - 2)
    part = position - stop
    red, green, blue = (round(low + (high - low) * part) for low, high in zip(RAMP[stop], RAMP[stop + 1], strict=True))
    return red, green, blue


def shares(matrix: Matrix) -> list[list[float]]:
    """Where each count lies between the least (0) and the most (1): a few percent of difference shall be seen."""
    least, most = min(map(min, matrix)), max(map(max, matrix))
    return [[(count - least) / (most - least) if most > least else 0.5 for count in counts] for counts in matrix]


def tokens_and_mb(shape: Shape, num_tokens: int) -> str:
    """Tokens, and below them their megabytes."""
    return f"{num_tokens:,}\n{shape.num_mb(num_tokens):.1f} MB"
