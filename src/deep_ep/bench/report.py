"""What a benchmark leaves: table, CSV, JSON, plot, and the table in a README. All from the same `Measured`."""

from __future__ import annotations

import csv
import dataclasses
import json
import os
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from .core import FLOOR, GLOO, GLOO_AS_WRITTEN, PRODUCT, PRODUCT_BF16, Measured, Quartiles, Summary, summarise

LABELS = {
    PRODUCT: "deep_ep",
    FLOOR: "floor: copy of the bytes",
    GLOO: "gloo, preallocated",
    GLOO_AS_WRITTEN: "gloo, as users write it",
    PRODUCT_BF16: "deep_ep in BF16",
}
_COLOURS = {
    PRODUCT: "#1f6f8b",
    FLOOR: "#b8bec4",
    GLOO: "#e0a458",
    GLOO_AS_WRITTEN: "#c8553d",
    PRODUCT_BF16: "#8fbcc9",
}
_PLOT_ORDER = (FLOOR, PRODUCT, PRODUCT_BF16, GLOO, GLOO_AS_WRITTEN)
_DASH = "-"
_CAPTION = (
    "ms: the slowest rank's median. Ratios: median over the rounds [quartiles], slowest rank against slowest rank of "
    "the same round."
)


@dataclass(frozen=True)
class Report:
    """A benchmark that has run.

    Attributes:
        name: `normal`.
        command: The line that runs it again.
        shape: The shape in one line.
        setting: The setting, as numbers by name.
        machine: The machine and its versions.
        titles: Of each case, how a table calls it.
        rows: The cases, in the order to show them.
    """

    name: str
    command: str
    shape: str
    setting: Mapping[str, Any]
    machine: Mapping[str, Any]
    titles: Mapping[str, str]
    rows: Sequence[Measured]

    @property
    def header(self) -> list[str]:
        """Machine, shape and command, a line each."""
        sizes = ", ".join(str(size) for size in dict.fromkeys(row.num_ranks for row in self.rows))
        machine = self.machine
        return [
            f"{machine['cpu']}, {machine['cores']} cores (load {machine['load']:.1f} before the run), "
            f"torch {machine['torch']}, deep_ep {machine['deep_ep']}",
            f"ranks {sizes}; {self.shape}",
            self.command,
        ]


def find_machine(version: str) -> dict[str, Any]:
    """What figures depend on. To be asked before the run: later its own ranks are the load.

    Args:
        version: Of deep_ep.
    """
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load": os.getloadavg()[0],
        "memory_bytes": _meminfo_bytes("MemTotal"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deep_ep": version,
    }


def available_bytes() -> int | None:
    """Memory that new processes can have; None where the system does not tell."""
    return _meminfo_bytes("MemAvailable")


def _cpu_model() -> str:
    for line in _lines_of("/proc/cpuinfo"):
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _meminfo_bytes(name: str) -> int | None:
    for line in _lines_of("/proc/meminfo"):
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    return None


def _lines_of(path: str) -> list[str]:
    try:
        return Path(path).read_text().splitlines()
    except OSError:
        return []


# Tables --------------------------------------------------------------------------------------------------------------


def columns(rows: Sequence[Measured]) -> list[str]:
    """The heads of the table; what no row has is left out."""
    heads = ["case", "ranks", "MB a rank", "ms", "GB/s a rank", "time / floor"]
    heads += [f"faster than {LABELS[name]}" for name in _compared(rows)]
    return heads


def cells(row: Measured, title: str, compared: Sequence[str]) -> list[str]:
    """One line of the table. A skipped case says why, in the place of its figures.

    Args:
        row: The case.
        title: How to call it.
        compared: The peers that have a column.
    """
    if row.skipped is not None:
        return [title, str(row.num_ranks), f"skipped: {row.skipped}", *[""] * (3 + len(compared))]
    summary = summarise(row)
    return [
        title,
        str(row.num_ranks),
        f"{summary.mean_bytes / 1e6:.1f}",
        _three_digits(summary.median_secs[PRODUCT] * 1e3),
        _three_digits(summary.gbs),
        _with_quartiles(summary.over_floor),
        *(_with_quartiles(summary.speedups.get(name), "x") for name in compared),
    ]


def rich_table(report: Report) -> Table:
    """The table for a terminal."""
    table = Table(
        title="\n".join(report.header),
        title_justify="left",
        title_style="dim",
        caption=escape("\n".join([_CAPTION, *_reasons(report.rows)])),  # else rich takes brackets for markup
        caption_justify="left",
    )
    for index, head in enumerate(columns(report.rows)):
        table.add_column(head, justify="right" if index else "left", no_wrap=not index)
    for row in report.rows:
        line = cells(row, report.titles[row.case], _compared(report.rows))
        if row.skipped is not None:
            line[2] = "skipped"  # the reason is too long for a column of numbers: it stands below
        table.add_row(*(Text(cell, no_wrap=True) for cell in line))
    return table


def _reasons(rows: Sequence[Measured]) -> list[str]:
    """Why rows were skipped, each reason once."""
    return list(dict.fromkeys(f"{row.num_ranks} ranks, skipped: {row.skipped}" for row in rows if row.skipped))


def markdown_table(report: Report) -> str:
    """The table for a README, with its machine and command above it."""
    machine, shape, command = report.header
    heads = columns(report.rows)
    lines = [f"{machine}; {shape}. `{command}`", ""]
    lines += [_markdown_line(heads), _markdown_line(["---", *["---:"] * (len(heads) - 1)])]
    lines += [_markdown_line(cells(row, report.titles[row.case], _compared(report.rows))) for row in report.rows]
    return "\n".join(lines)


def _markdown_line(items: Sequence[str]) -> str:
    return "| " + " | ".join(item.replace("|", "\\|") for item in items) + " |"


def _compared(rows: Sequence[Measured]) -> list[str]:
    seen = {name for row in rows for name in row.times}
    return [name for name in LABELS if name in seen and name not in (PRODUCT, FLOOR)]


def _three_digits(value: float) -> str:
    decimals = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 0.1 else 3
    return f"{value:.{decimals}f}"


def _with_quartiles(value: Quartiles | None, unit: str = "") -> str:
    if value is None:
        return _DASH
    return f"{_three_digits(value.median)}{unit} [{_three_digits(value.low)}, {_three_digits(value.high)}]"


# Files ---------------------------------------------------------------------------------------------------------------


def write_csv(report: Report, path: Path) -> None:
    """One line a case: its summary, seconds and ratios by variant."""
    names = [name for name in LABELS if any(name in row.times for row in report.rows)]
    lines = [_csv_line(row, names) for row in report.rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(_csv_line(Measured("", 0, skipped=""), names)))
        writer.writeheader()
        writer.writerows(lines)


def _csv_line(row: Measured, names: Sequence[str]) -> dict[str, object]:
    """Every line has the same fields; what the case has not got stays empty."""
    summary = None if row.skipped is not None else summarise(row)
    line: dict[str, object] = {
        "case": row.case,
        "ranks": row.num_ranks,
        "rounds": len(row.times[PRODUCT][0]) if summary else "",
        "bytes_per_rank": summary.mean_bytes if summary else "",
        "gbs_per_rank": summary.gbs if summary else "",
    }
    for name in names:
        line[f"{name}_secs"] = summary.median_secs.get(name, "") if summary else ""
    for name in names:
        if name != PRODUCT:
            line |= _csv_ratio(name, summary)
    return line | {"skipped": row.skipped or ""}


def _csv_ratio(name: str, summary: Summary | None) -> dict[str, object]:
    key = "time_over_floor" if name == FLOOR else f"speedup_over_{name}"
    ratio = None
    if summary is not None:
        ratio = summary.over_floor if name == FLOOR else summary.speedups.get(name)
    low, median, high = ratio if ratio is not None else ("", "", "")
    return {key: median, f"{key}_q1": low, f"{key}_q3": high}


def write_json(report: Report, path: Path) -> None:
    """Everything: machine, versions, command, setting, the summaries, and each rank's time of each round."""
    cases = []
    for row in report.rows:
        summary = None if row.skipped is not None else dataclasses.asdict(summarise(row))
        cases.append({**dataclasses.asdict(row), "title": report.titles[row.case], "summary": summary})
    content = {
        "bench": report.name,
        "command": report.command,
        "machine": dict(report.machine),
        "setting": dict(report.setting),
        "times_are": "seconds, by variant, [rank][round]",
        "cases": cases,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def replace_table(text: str, name: str, table: str) -> str:
    """Put a table between `<!-- bench NAME -->` and `<!-- /bench NAME -->`, in the place of what is there.

    Raises:
        ValueError: The markers are missing, doubled, or the wrong way round.
    """
    first, last = f"<!-- bench {name} -->", f"<!-- /bench {name} -->"
    if text.count(first) != 1 or text.count(last) != 1 or text.index(first) > text.index(last):
        raise ValueError(f"bench: the file must hold the line {first} and after it the line {last}, once each")
    before, rest = text.split(first)
    after = rest.split(last)[1]
    return f"{before}{first}\n\n{table}\n\n{last}{after}"


def write_readme(report: Report, path: Path) -> None:
    """Replace the table in a README; see `replace_table`."""
    path.write_text(replace_table(path.read_text(), report.name, markdown_table(report)))


# Plot ----------------------------------------------------------------------------------------------------------------


def write_plot(report: Report, path: Path) -> None:
    """Bars of the slowest rank's medians: a panel for each group size, a cluster for each case.

    Raises:
        ImportError: matplotlib is not installed.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    sizes = list(dict.fromkeys(row.num_ranks for row in report.rows))
    panels = [[row for row in report.rows if row.num_ranks == size] for size in sizes]
    heights = [sum(max(1, len(row.times)) for row in panel) + 0.8 * len(panel) for panel in panels]
    figure = Figure(figsize=(10.5, 1.6 + 0.25 * sum(heights) + 0.5 * len(panels)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(len(panels), 1, squeeze=False, gridspec_kw={"height_ratios": heights})[:, 0]
    for axis, size, panel in zip(axes, sizes, panels, strict=True):
        _draw_panel(axis, panel, report.titles)
        axis.set_title(f"{size} ranks" if size != 1 else "1 rank", loc="left", fontsize=11, fontweight="bold")
    axes[-1].set_xlabel("milliseconds: the slowest rank's median (shorter is better)")
    shown = [name for name in _PLOT_ORDER if any(name in row.times for row in report.rows)]
    handles = [_patch(_COLOURS[name], LABELS[name]) for name in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=max(1, len(handles)), frameon=False, fontsize=9)
    machine, shape, _ = report.header
    figure.suptitle(f"{shape.split('; ', 1)[1]}\n{machine}", fontsize=10, color="#444444")
    figure.savefig(path, dpi=130, format="png")


def _draw_panel(axis: Any, rows: Sequence[Measured], titles: Mapping[str, str]) -> None:
    """The first case on top; inside a case the floor, the product, then the peers."""
    position, ticks = 0.0, []
    for row in rows:
        names = [name for name in _PLOT_ORDER if name in row.times]
        ticks.append(position + (max(1, len(names)) - 1) / 2)
        if row.skipped is not None:
            axis.text(0, position, f" skipped: {row.skipped}", va="center", fontsize=8, style="italic")
            position += 1
        for name in names:
            milliseconds = summarise(row).median_secs[name] * 1e3
            axis.barh(position, milliseconds, height=0.86, color=_COLOURS[name])
            label = f" {_three_digits(milliseconds)}"
            axis.text(milliseconds, position, label, va="center", fontsize=8, fontweight=_weight(name))
            position += 1
        position += 0.8
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


def _weight(name: str) -> str:
    return "bold" if name == PRODUCT else "normal"


def _patch(colour: str, label: str) -> Any:
    from matplotlib.patches import Patch

    return Patch(color=colour, label=label)
