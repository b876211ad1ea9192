"""Numbers and names as the page shows them."""

from __future__ import annotations

from typing import NamedTuple

NOTHING = "-"

_BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
_MICROSECONDS = ((1e6, "s"), (1e3, "ms"), (1.0, "µs"))


class TableUnit(NamedTuple):
    """A unit that fits a whole table.

    Attributes:
        size: What one of it is.
        name: What it is called.
    """

    size: float
    name: str

    def text(self, value: float) -> str:
        """A value in this unit, without its name."""
        return digits(value / self.size)


def bytes_unit(most: float) -> TableUnit:
    """For bytes up to `most`."""
    return _unit(_BYTES, most)


def time_unit(most_us: float) -> TableUnit:
    """For times up to `most_us`."""
    return _unit(_MICROSECONDS, most_us)


def _unit(units: tuple[tuple[float, str], ...], most: float) -> TableUnit:
    return next((TableUnit(size, name) for size, name in units if most >= size), TableUnit(*units[-1]))


def digits(value: float) -> str:
    """Three digits, as a person writes them: `0`, `0.042`, `1.25`, `31.4`, `5,120`."""
    if value == 0:
        return "0"
    if abs(value) >= 99.95:
        return f"{value:,.0f}"
    if abs(value) >= 9.995:
        return f"{value:.1f}"
    return f"{value:.2f}" if abs(value) >= 0.095 else f"{value:.1g}"


def bytes_text(num_bytes: float) -> str:
    """`3.98 MB`."""
    unit = bytes_unit(num_bytes)
    return f"{num_bytes:.0f} B" if unit.name == "B" else f"{unit.text(num_bytes)} {unit.name}"


def time_text(us: float) -> str:
    """`13.1 ms`."""
    unit = time_unit(us)
    return f"{unit.text(us)} {unit.name}"


def share_text(part: float, whole: float) -> str:
    """`37 %`."""
    return f"{100 * part / whole:.0f} %" if whole else NOTHING


def change_text(value: float | None, other: float | None) -> str:
    """`1.25x`, how large a value is beside another; nothing where one of them is missing."""
    return f"{digits(value / other)}x" if value is not None and other else NOTHING
