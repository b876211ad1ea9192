"""What a benchmark leaves in words: table, CSV, JSON, and the table in a README. All from the same `Measured`."""

from __future__ import annotations

import csv
import dataclasses
import json
import statistics
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from . import hops, traffic, waits
from .core import (
    BUFFER,
    FLOOR,
    GLOO,
    GLOO_AS_WRITTEN,
    ONE_HOP,
    PEERS,
    PRODUCT,
    PRODUCT_BF16,
    Measured,
    Summary,
    summarise,
)
from .figures import DASH, MS, US, Unit, three_digits, with_quartiles

LABELS = {
    PRODUCT: "deep_ep",
    FLOOR: "floor: copy of the bytes",
    GLOO: "gloo, preallocated",
    GLOO_AS_WRITTEN: "gloo, as users write it",
    PRODUCT_BF16: "deep_ep in BF16",
    ONE_HOP: "deep_ep, one hop",
    BUFFER: "Buffer and torch",
}
_PROSE_WIDTH = 120  # of lines of a page
_UNBROKEN = "\N{NO-BREAK SPACE}"  # stands for a space where no line may end
_NORMAL = "normal"
_GPU_CAPTION = (
    "Floor: the least bytes that the call must read and write through the GPU's memory, those of all ranks on it, at "
    "the speed of a plain copy by all of them in the same rounds."
)
_GPU_CASES_CAPTION = (
    "Layer: get_dispatch_layout, dispatch, and combine of the received rows as they are; its device time is between "
    "events around all three. Script loop: cached dispatch as DeepEP's own script times it, in a loop that waits for "
    "nothing; its device time is the mean distance of the events around a call."
)
_LOW_LATENCY = "low-latency"
_TAIL_CAPTION = "p50, p99: over all ranks and rounds."
_LOW_LATENCY_CAPTION = (
    "Floor: a plain copy of the rows that a rank sends, by all ranks at once. Preallocated gloo casts, sorts and sums "
    "with deep_ep's own functions, and sends each row with its scales in one message: only the exchange differs."
)
_LOW_LATENCY_GPU_CAPTION = (
    "Floor: bytes that the calls of all ranks on the GPU move through its memory where rows go by way of slots, at the "
    "speed of a plain copy by all of them in the same rounds. With T tokens and S selections of all ranks, dispatch "
    "reads T rows of BF16 and moves S rows of FP8 with scales three times (into slots, out of them, packed): "
    "2TH + 3S(H + 4ceil(H/128)) bytes. Combine moves S rows of BF16 three times (read, into slots, out of them) and "
    "writes T: 6SH + 2TH; zero-copy once: 2SH + 2TH. A send half is what comes before the slots are read. Ours writes "
    "a dispatched row once, however many experts it has, so it may be faster than the floor."
)
_CAPTION = (
    "{unit}: the slowest rank's median. Ratios: median over the rounds [quartiles], slowest rank against slowest rank "
    "of the same round."
)


@dataclass(frozen=True)
class BenchReport:
    """A benchmark that has run.

    Attributes:
        name: `normal`, `low-latency` or `internode`, the last with its link, or on a GPU its transport.
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
    def is_gpu(self) -> bool:
        """Whether it ran on a GPU."""
        return "gpu" in self.machine

    @property
    def marker(self) -> str:
        """What the markers around its table in a README say."""
        return marker_of(self.name, self.is_gpu)

    @property
    def has_tail(self) -> bool:
        """Whether its table has p50, p99 and the floor's own time: where calls are so short that they vary."""
        return self.name == _LOW_LATENCY

    @property
    def is_internode(self) -> bool:
        """Whether its ranks were on several nodes."""
        return any(row.num_nodes > 1 for row in self.rows)

    @property
    def has_hops(self) -> bool:
        """Whether they were so on a GPU, where two hops are measured beside one."""
        return self.is_gpu and self.is_internode

    @property
    def has_waits(self) -> bool:
        """Whether its table has the times that a caller waits for."""
        return any(waits.are_in(row) for row in self.rows)

    @property
    def compared(self) -> list[str]:
        """The peers that have a column."""
        return [name for name in PEERS if any(name in row.times for row in self.rows)]

    @property
    def unit(self) -> Unit:
        """What times are shown in."""
        return US if self.is_gpu else MS

    @property
    def header(self) -> list[str]:
        """Machine, shape and command, a line each."""
        sizes = ", ".join(str(size) for size in dict.fromkeys(row.num_ranks for row in self.rows))
        machine = self._gpu_line() if self.is_gpu else self._cpu_line()
        shape = f"{hops.where(self.machine['num_gpus'])}; {self.shape}" if self.has_hops else self.shape
        return [machine, f"ranks {sizes}; {shape}", self.command]

    @property
    def caption(self) -> list[str]:
        """What the figures mean, and why some are missing."""
        lines = [_CAPTION.format(unit=self.unit.name)]
        if self.has_waits:
            lines.append(waits.caption(self.rows, self.setting["num_in_row"], self.unit))
            lines += [_GPU_CASES_CAPTION] if self.name == _NORMAL else []
        if self.has_tail:
            lines += [_TAIL_CAPTION, _LOW_LATENCY_GPU_CAPTION if self.is_gpu else _LOW_LATENCY_CAPTION]
        elif self.has_hops:
            lines.append(hops.caption(self.setting["transport"]))
        elif self.is_gpu:
            lines.append(_GPU_CAPTION)
        elif self.is_internode:
            lines.append(traffic.CAPTION)
        if self.is_gpu:
            lines[-1] += f" MPS was {'on' if self.machine['mps'] else 'off'}."
        return lines + _reasons(self.rows)

    def _cpu_line(self) -> str:
        machine = self.machine
        return (
            f"{machine['cpu']}, {machine['cores']} cores (load {machine['load']:.1f} before the run), "
            f"torch {machine['torch']}, deep_ep {machine['deep_ep']}"
        )

    def _gpu_line(self) -> str:
        machine = self.machine
        count = f"{machine['num_gpus']} x " if machine["num_gpus"] > 1 else ""
        copies = [row.copy_gbs for row in self.rows if row.copy_gbs is not None]
        copied = f", a plain copy reads and writes {statistics.median(copies):,.0f} GB/s" if copies else ""
        return (
            f"{count}{machine['gpu']} ({machine['gpu_sms']} SMs{copied}), MPS {'on' if machine['mps'] else 'off'}, "
            f"torch {machine['torch']}, CUDA {machine['cuda']}, Triton {machine['triton']}, "
            f"deep_ep {machine['deep_ep']}"
        )


def marker_of(name: str, is_gpu: bool) -> str:
    """What the markers around a table in a README say: `normal`, `gpu`, `low-latency` or `low-latency gpu`, ..."""
    if not is_gpu:
        return name
    return "gpu" if name == _NORMAL else f"{name} gpu"


# Tables --------------------------------------------------------------------------------------------------------------


def columns(report: BenchReport) -> list[str]:
    """The heads of the table; what no row has is left out."""
    unit = report.unit.name
    if any(ONE_HOP in row.times for row in report.rows):
        heads = ["case", "nodes x ranks", *hops.heads(report.unit)]
    elif report.is_internode:
        heads = ["case", "nodes x ranks", *traffic.HEADS, unit, *traffic.SPEEDS, "time / floor"]
    else:
        # Bytes are left to the files where there are many times: the table is to fit a terminal.
        heads = ["case", "ranks", *([f"device {unit}"] if report.has_waits else ["MB a rank", unit])]
        heads += ["p50", "p99", "floor"] if report.has_tail else []
        heads += waits.heads(report.unit) if report.has_waits else []
        heads += ["GB/s a rank", "time / floor"]
    return heads + [f"faster than {LABELS[name]}" for name in report.compared]


def cells(report: BenchReport, row: Measured) -> list[str]:
    """One line of the table. A skipped case says why, in the place of its figures."""
    title, unit = report.titles[row.case], report.unit
    if row.skipped is not None:
        return [title, _ranks(row), f"skipped: {row.skipped}", *[""] * (len(columns(report)) - 3)]
    summary = summarise(row)
    if ONE_HOP in row.times:
        return [title, _ranks(row), *hops.cells(row, summary, unit)]
    ratios = [with_quartiles(summary.over_floor)]
    ratios += [with_quartiles(summary.speedups.get(name), "x") for name in report.compared]
    secs = summary.median_secs[PRODUCT]
    if row.num_nodes > 1:
        speeds = [three_digits(speed) for speed in traffic.speeds(row, secs)]
        return [title, _ranks(row), *traffic.cells(row), three_digits(secs * unit.per_sec), *speeds, *ratios]
    mean_bytes = f"{summary.mean_bytes / 1e6:.1f}" if summary.mean_bytes else DASH
    return [
        title,
        _ranks(row),
        *([] if report.has_waits else [mean_bytes]),
        three_digits(secs * unit.per_sec),
        *(_tail(summary, unit) if report.has_tail else []),
        *(waits.cells(summary, unit) if report.has_waits else []),
        three_digits(summary.gbs) if summary.mean_bytes else DASH,
        *ratios,
    ]


def _ranks(row: Measured) -> str:
    return str(row.num_ranks) if row.num_nodes == 1 else f"{row.num_nodes} x {row.num_ranks // row.num_nodes}"


def _tail(summary: Summary, unit: Unit) -> list[str]:
    floor = summary.median_secs.get(FLOOR)
    values = (summary.p50_secs, summary.p99_secs, floor)
    return [DASH if secs is None else three_digits(secs * unit.per_sec) for secs in values]


def rich_table(report: BenchReport) -> Table:
    """The table for a terminal."""
    table = Table(
        title="\n".join(report.header),
        title_justify="left",
        title_style="dim",
        caption=escape("\n".join(report.caption)),  # else rich takes brackets for markup
        caption_justify="left",
        show_edge=False,
        pad_edge=False,
    )
    lines = [cells(report, row) for row in report.rows]
    for row, line in zip(report.rows, lines, strict=True):
        if row.skipped is not None:
            line[2] = "skipped"  # the reason is too long for a column of numbers: it stands below
    for index, (head, *below) in enumerate(zip(columns(report), *lines, strict=True)):
        table.add_column(_wrapped(head, below), justify="right" if index else "left", no_wrap=True)
    for line in lines:
        table.add_row(*(Text(cell) for cell in line))
    return table


def _wrapped(head: str, below: Sequence[str]) -> str:
    """A head in lines that are no longer than what stands below it, as far as its words are not."""
    return textwrap.fill(head, max(map(len, (*head.split(), *below))))


def _reasons(rows: Sequence[Measured]) -> list[str]:
    """Why rows were skipped, each reason once."""
    return list(dict.fromkeys(f"{row.num_ranks} ranks, skipped: {row.skipped}" for row in rows if row.skipped))


def markdown_table(report: BenchReport) -> str:
    """The table for a README, with its machine and command above it."""
    machine, shape, command = report.header
    heads = columns(report)
    whole = f"`{command}`".replace(" ", _UNBROKEN)
    lines = [_prose(f"{machine}; {shape}. {whole}"), ""]
    lines += [_markdown_line(heads), _markdown_line(["---", *["---:"] * (len(heads) - 1)])]
    lines += [_markdown_line(cells(report, row)) for row in report.rows]
    if report.has_tail or report.is_internode or report.has_waits:
        lines += ["", _prose(" ".join(report.caption))]
    return "\n".join(lines)


def _prose(text: str) -> str:
    """Text for a page, wrapped as all prose of this project is."""
    filled = textwrap.fill(text, _PROSE_WIDTH, break_long_words=False, break_on_hyphens=False)
    return filled.replace(_UNBROKEN, " ")


def _markdown_line(items: Sequence[str]) -> str:
    return "| " + " | ".join(item.replace("|", "\\|") for item in items) + " |"


# Files ---------------------------------------------------------------------------------------------------------------


def write_csv(report: BenchReport, path: Path) -> None:
    """One line a case: its summary, seconds and ratios by variant."""
    names = [name for name in LABELS if any(name in row.times for row in report.rows)]
    kinds = list(dict.fromkeys(kind for row in report.rows for kind in row.traffic))
    lines = [_csv_line(row, names, kinds, report.has_waits) for row in report.rows]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, fieldnames=list(lines[0]))
        writer.writeheader()
        writer.writerows(lines)


def _csv_line(row: Measured, names: Sequence[str], kinds: Sequence[str], has_waits: bool) -> dict[str, object]:
    """Every line has the same fields; what the case has not got stays empty."""
    summary = None if row.skipped is not None else summarise(row)
    line: dict[str, object] = {
        "case": row.case,
        "ranks": row.num_ranks,
        "rounds": len(row.times[PRODUCT][0]) if summary else "",
        "bytes_per_rank": summary.mean_bytes if summary else "",
        "gbs_per_rank": summary.gbs if summary else "",
    }
    if kinds:
        line |= {"nodes": row.num_nodes}
        line |= {f"{kind}_bytes_per_rank": traffic.mean_bytes(row, kind) if summary else "" for kind in kinds}
    line |= {"p50_secs": summary.p50_secs if summary else "", "p99_secs": summary.p99_secs if summary else ""}
    for name in names:
        line[f"{name}_secs"] = summary.median_secs.get(name, "") if summary else ""
    line |= waits.csv_fields(summary) if has_waits else {}
    for name in names:
        if name != PRODUCT:
            line |= _csv_ratio(name, summary)
    return line | {"skipped": row.skipped or ""}


def _csv_ratio(name: str, summary: Summary | None) -> dict[str, object]:
    key = f"speedup_over_{name}"
    ratio = summary.speedups.get(name) if summary is not None else None
    if name == FLOOR:
        key, ratio = "time_over_floor", summary.over_floor if summary is not None else None
    if name == ONE_HOP:
        key, ratio = "time_over_one_hop", summary.over_one_hop if summary is not None else None
    low, median, high = ratio if ratio is not None else ("", "", "")
    return {key: median, f"{key}_q1": low, f"{key}_q3": high}


def write_json(report: BenchReport, path: Path) -> None:
    """Everything: machine, versions, command, setting, the summaries, and each rank's time of each round."""
    cases = []
    for row in report.rows:
        summary = None if row.skipped is not None else dataclasses.asdict(summarise(row))
        cases.append({**dataclasses.asdict(row), "title": report.titles[row.case], "summary": summary})
    content = {
        "bench": report.name,
        "command": report.command,
        "machine": dict(report.machine),
        "shape": report.shape,
        "setting": dict(report.setting),
        "times_are": "seconds, by variant or by clock of a variant, [rank][round]",
        "cases": cases,
    }
    path.write_text(json.dumps(content, indent=1) + "\n")


def read_json(path: Path) -> BenchReport:
    """The report that `write_json` wrote.

    Raises:
        ValueError: There is no such file, or it is another one.
    """
    try:
        content = json.loads(path.read_text())
        fields = [field.name for field in dataclasses.fields(Measured)]
        return BenchReport(
            name=content["bench"],
            command=content["command"],
            shape=content["shape"],
            setting=content["setting"],
            machine=content["machine"],
            titles={case["case"]: case["title"] for case in content["cases"]},
            # Files from before a field was thought of do without it.
            rows=[Measured(**{name: case[name] for name in fields if name in case}) for case in content["cases"]],
        )
    except OSError as error:
        raise ValueError(f"bench: cannot read {path} ({error.strerror})") from None
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"bench: {path} holds no results of a bench ({error}). Make it with --save or --json"
        ) from None


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


def write_readme(report: BenchReport, path: Path) -> None:
    """Replace the table in a README; see `replace_table`."""
    path.write_text(replace_table(path.read_text(), report.marker, markdown_table(report)))
