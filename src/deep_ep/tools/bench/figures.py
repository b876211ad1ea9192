"""Numbers as tables and pictures show them."""

from __future__ import annotations

from typing import NamedTuple

from .core import Quartiles

DASH = "-"


class Unit(NamedTuple):
    """What times are shown in."""

    name: str
    word: str
    per_sec: float


MS, US = Unit("ms", "milliseconds", 1e3), Unit("us", "microseconds", 1e6)


def three_digits(value: float) -> str:
    """A number with about three digits."""
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{decimals}f}"


def with_quartiles(value: Quartiles | None, unit: str = "") -> str:
    """A median with its quartiles behind it."""
    if value is None:
        return DASH
    return f"{three_digits(value.median)}{unit} [{three_digits(value.low)}, {three_digits(value.high)}]"
