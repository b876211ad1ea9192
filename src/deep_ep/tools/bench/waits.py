"""What a caller waits for, as a table shows it: microseconds, and how many adds take as long."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from .core import ADD, HOST, IN_A_ROW, PRODUCT, WAITS, Measured, Summary, clock_name, slowest_median
from .figures import DASH, Unit, three_digits

_CAPTION = (
    "Device: between events behind a barrier of all ranks' streams; where the device waits for the host, that counts. "
    "Host: {num} calls in a row until the host has made the last one, divided by {num}. In a row: the same calls until "
    "the device is done, divided likewise. From idle: one call, the ranks lined up by a barrier of the process group "
    "and the device idle, until torch.cuda.synchronize() returns. Adds: the median over that of an add, torch.add(z, "
    "1, out=z) of a small tensor, {num} in a row in the same rounds until the device is done: {add} {unit}."
)
_ADD = clock_name(ADD, IN_A_ROW)


def are_in(row: Measured) -> bool:
    """Whether a case has these times."""
    return clock_name(PRODUCT, HOST) in row.times


def heads(unit: Unit) -> list[str]:
    """The heads of the columns."""
    return [f"host {unit.name} (adds)", f"in a row {unit.name} (adds)", f"from idle {unit.name}"]


def cells(summary: Summary, unit: Unit) -> list[str]:
    """What stands below them; a case may have none of it."""
    if not summary.adds:
        return [DASH] * 3
    host, in_a_row, from_idle = (
        three_digits(summary.median_secs[clock_name(PRODUCT, clock)] * unit.per_sec) for clock in WAITS
    )
    in_adds = {clock: three_digits(adds) for clock, adds in summary.adds.items()}
    return [f"{host} ({in_adds[HOST]})", f"{in_a_row} ({in_adds[IN_A_ROW]})", from_idle]


def csv_fields(summary: Summary | None) -> dict[str, object]:
    """Seconds of each clock and of an add, and adds; empty where the case has none, or did not run."""
    fields: dict[str, object] = {}
    for name in (*(clock_name(PRODUCT, clock) for clock in WAITS), _ADD):
        fields[f"{name}_secs"] = summary.median_secs.get(name, "") if summary else ""
    for clock in WAITS:
        fields[f"{clock}_adds"] = summary.adds.get(clock, "") if summary else ""
    return fields


def caption(rows: Sequence[Measured], num_in_row: int, unit: Unit) -> str:
    """What the figures mean, and what an add took.

    Args:
        rows: The cases, some with these times.
        num_in_row: Calls in a row.
        unit: What times are shown in.
    """
    add_secs = statistics.median(slowest_median(row.times[_ADD]) for row in rows if are_in(row))
    return _CAPTION.format(num=num_in_row, add=three_digits(add_secs * unit.per_sec), unit=unit.name)
