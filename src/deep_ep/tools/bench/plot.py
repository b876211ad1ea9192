"""The times of a benchmark as bars."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..plotting import new_figure, write_png
from ..terminal import counted
from .core import BUFFER, FLOOR, GLOO, GLOO_AS_WRITTEN, ONE_HOP, PRODUCT, PRODUCT_BF16, Measured, summarise
from .figures import Unit, three_digits
from .report import LABELS, BenchReport

# In the order of the bars of a case.
_COLOURS = {
    FLOOR: "#b8bec4",
    PRODUCT: "#1f6f8b",
    PRODUCT_BF16: "#8fbcc9",
    ONE_HOP: "#7aa974",
    BUFFER: "#b58db6",
    GLOO: "#e0a458",
    GLOO_AS_WRITTEN: "#c8553d",
}
_GAP = 0.8  # between two cases; a bar takes 1


def write_plot(report: BenchReport, path: Path) -> None:
    """Bars of the slowest rank's medians: a panel for each group size, a cluster for each case.

    Raises:
        ValueError: The file cannot be written.
    """
    sizes = list(dict.fromkeys(row.num_ranks for row in report.rows))
    panels = [[row for row in report.rows if row.num_ranks == size] for size in sizes]
    heights = [sum(map(_num_bars, panel)) + _GAP * len(panel) for panel in panels]
    figure = new_figure(10.5, 1.6 + 0.25 * sum(heights) + 0.5 * len(panels), dpi=130)
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, size, panel in zip(axes, sizes, panels, strict=True):
        _draw_panel(axis, panel, report.titles, report.unit)
        axis.set_title(counted(size, "rank"), loc="left", fontsize=11, fontweight="bold")
    axes[-1].set_xlabel(f"{report.unit.word}: the slowest rank's median (shorter is better)")
    _draw_legend(figure, report.rows)
    machine, shape, _ = report.header
    figure.suptitle(f"{shape.split('; ', 1)[1]}\n{machine}", fontsize=10, color="#444444")
    write_png("bench", figure, path)


def _num_bars(row: Measured) -> int:
    """Bars of a case, or one for the reason why there are none. What a caller waits for is not drawn."""
    return max(1, sum(name in row.times for name in _COLOURS))


def _draw_legend(figure: Any, rows: Sequence[Measured]) -> None:
    from matplotlib.patches import Patch

    shown = [name for name in _COLOURS if any(name in row.times for row in rows)]
    handles = [Patch(color=_COLOURS[name], label=LABELS[name]) for name in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), frameon=False, fontsize=9)


def _draw_panel(axis: Any, rows: Sequence[Measured], titles: Mapping[str, str], unit: Unit) -> None:
    """The first case on top; inside a case the floor, the product, then the peers."""
    position, ticks = 0.0, []
    for row in rows:
        num_bars = _num_bars(row)
        ticks.append(position + (num_bars - 1) / 2)
        _draw_case(axis, row, position, unit)
        position += num_bars + _GAP
    axis.set_yticks(ticks, [titles[row.case] for row in rows])
    axis.set_ylim(position - 1.0, -0.8)
    if all(row.skipped is not None for row in rows):
        axis.set_xticks([])
        axis.set_xlim(0, 1)
    else:
        axis.set_xlim(0, 1.08 * axis.get_xlim()[1])  # room for the numbers behind the bars
    axis.spines[["top", "right", "left"]].set_visible(False)
    axis.tick_params(axis="y", length=0)
    axis.grid(axis="x", color="#e6e6e6", linewidth=0.8)
    axis.set_axisbelow(True)


def _draw_case(axis: Any, row: Measured, position: float, unit: Unit) -> None:
    """The bars of a case from `position` on, or, in the place of one, why there are none."""
    if row.skipped is not None:
        axis.text(0, position, f" skipped: {row.skipped}", va="center", fontsize=8, style="italic")
        return
    medians = summarise(row).median_secs
    for index, name in enumerate(name for name in _COLOURS if name in medians):
        length, place = medians[name] * unit.per_sec, position + index
        axis.barh(place, length, height=0.86, color=_COLOURS[name])
        weight = "bold" if name == PRODUCT else "normal"
        axis.text(length, place, f" {three_digits(length)}", va="center", fontsize=8, fontweight=weight)
