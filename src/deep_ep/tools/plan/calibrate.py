"""Constants of this machine: short benches of this library's own calls, or results files of longer ones.

The ranks of a host share its cores and its memory, and ranks of one GPU share that, so "links" are the memory, whose
nominal speed each rank has a share of; between namespaces, the network is their interface, which a node's ranks share.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from ...planner.calls import Call, Point
from ...planner.model import USUAL, Constants
from ...planner.routing import Routing
from ...planner.table import Table, fit_table, prepare
from ..bench import internode, low_latency, normal
from ..bench.core import PRODUCT, slowest_median
from ..bench.inputs import Setting
from ..bench.report import BenchReport, read_json
from ..bench.suite import measure

SYSTEM = "deep_ep"
_CPU = "CPU"
_CPU_MEMORY_GBPS = 10.0  # of all ranks of a host; only the scale of a constant depends on it
_LOOPBACK_GBPS = 2.0
_UNITS = {"k": 1e3, "m": 1e6, "g": 1e9}

# What is expected of CPU ranks before anything is measured: ranks that share cores wait for each other's turns, so that
# every rank more costs a call most of a millisecond.
_USUAL_ON_CPU = Constants(200, 500, 500, 1, 5, 100, 0.5, 0.7, 0.01, 0.1, 0.01)

# Cases of benches that are one call, by what they are. Layers, round trips, halves and graphs are not.
_CASES = {
    "dispatch-bf16": ("dispatch", "bf16"),
    "dispatch-fp8": ("dispatch", "fp8"),
    "cached-bf16": ("dispatch", "bf16"),
    "cached-fp8": ("dispatch", "fp8"),
    "combine-window": ("combine", "bf16"),
    "combine-elsewhere": ("combine", "bf16"),
    "dispatch": ("dispatch", "fp8"),
    "combine": ("combine", "bf16"),
}
_SHORT = (64, 256, 1024)  # tokens of the short benches
_SHORT_SETTING = Setting(hidden=2048, num_experts=64, num_rounds=7)
_LOW_LATENCY_TOKENS = (8, 32, 128)
LAYOUTS = ((2, 4), (4, 2), (8, 1))
"""Nodes and ranks of each that `plan --calibrate --namespaces` measures."""


class Trial(NamedTuple):
    """A measured call beside what the others predict of it.

    Attributes:
        point: The measurement.
        us: Predicted, without it.
        low_us: Lower end of the interval.
        high_us: Upper end.
    """

    point: Point
    us: float
    low_us: float
    high_us: float


def measure_here(device: str, sizes: Sequence[int]) -> list[BenchReport]:
    """Short benches on this machine, some minutes."""
    reports = []
    for num_tokens in _SHORT:
        setting = dataclasses.replace(_SHORT_SETTING, num_tokens=num_tokens, device=device)
        if device == "cuda":
            setting = dataclasses.replace(setting, num_sms=16)
        suite = normal.suite_of(setting)
        reports.append(measure(suite, setting, sizes, [name for name in suite.titles if name in _CASES], ""))
    for num_tokens in _LOW_LATENCY_TOKENS:
        setting = dataclasses.replace(_SHORT_SETTING, num_tokens=num_tokens, device=device)
        reports.append(measure(low_latency.suite_of(setting), setting, sizes, ["dispatch", "combine"], ""))
    return reports


def measure_nodes(layouts: Iterable[tuple[int, int]], link: str) -> list[BenchReport]:
    """Short benches between network namespaces; needs root.

    Args:
        layouts: Nodes and ranks of each.
        link: Rate of a node's interface, as `tc` has it.
    """
    reports = []
    for num_nodes, per_node in layouts:
        for num_tokens in _SHORT:
            setting = dataclasses.replace(
                _SHORT_SETTING,
                num_tokens=num_tokens,
                num_nodes=num_nodes,
                num_groups=num_nodes,
                num_topk_groups=min(num_nodes, internode.MOST_TOPK_GROUPS),
                link=link,
                num_rounds=5,
            )
            cases = list(internode.titles_of(setting))
            reports.append(internode.measure(setting, num_nodes * per_node, cases, ""))
    return reports


def read_results(paths: Sequence[Path]) -> list[BenchReport]:
    """Reports that `bench --json` or `--save` wrote."""
    return [read_json(path) for path in paths]


def points_of(reports: Iterable[BenchReport]) -> list[Point]:
    """The measured calls of reports."""
    points = []
    for report in reports:
        setting = Setting(**report.setting)
        for row in report.rows:
            if row.case in _CASES and row.skipped is None and PRODUCT in row.times:
                call = _call_of(report, setting, row.case, row.num_ranks, row.copy_gbs)
                secs = slowest_median(row.times[PRODUCT])
                points.append(Point(call, 1e6 * secs, f"{report.name} {row.case}", report.command or "this machine"))
    return points


def _call_of(report: BenchReport, setting: Setting, case: str, num_ranks: int, copy_gbs: float | None) -> Call:
    op, dtype = _CASES[case]
    is_gpu = setting.device == "cuda"
    per_node = num_ranks // setting.num_nodes
    shared = (copy_gbs or 4000.0) / 2 if is_gpu else _CPU_MEMORY_GBPS
    return Call(
        system=SYSTEM,
        version=case,
        gpu=str(report.machine.get("gpu", "GPU")) if is_gpu else _CPU,
        network=setting.transport or setting.link or ("loopback" if setting.num_nodes > 1 else ""),
        mode="low_latency" if report.name.startswith(low_latency.NAME) else "normal",
        op=op,
        dtype=dtype,
        num_tokens=setting.num_tokens,
        hidden=setting.hidden,
        routing=Routing(setting.num_experts, setting.num_topk, setting.num_groups or 1, setting.num_topk_groups or 1),
        num_ranks=num_ranks,
        ranks_per_node=per_node,
        num_sms=setting.num_sms or (132 if is_gpu else 1),
        link_GBps=shared / num_ranks,
        network_GBps=(_rate(setting.link) or _LOOPBACK_GBPS) / per_node,
    )


def _rate(link: str) -> float:
    """GB/s of a rate as `tc` writes it; 0 where there is none."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)([kmg])bit", link.lower())
    return float(found[1]) * _UNITS[found[2]] / 8e9 if found else 0.0


def fit_machine(points: Sequence[Point], table: Table) -> Table:
    """A table with this machine's constants beside those of another."""
    if not points:
        raise ValueError("planner: there is no measured call to calibrate with. Give results of `bench normal`")
    fitted = fit_table(prepare(points), usual=_usual(points)).entries
    # Kinds of calls stay as they were: they are for systems that nobody has measured, not for this machine.
    return Table({**table.entries, **{key: entry for key, entry in fitted.items() if key[0] == SYSTEM}})


def try_points(points: Sequence[Point]) -> list[Trial]:
    """Predict each measured call from the others: all with its tokens and ranks are left out together."""
    trials = []
    prepared = prepare(points)
    for left in sorted({_setting_of(point.call) for point in points}):
        held = [one for one in prepared if _setting_of(one.point.call) == left]
        rest = [one for one in prepared if _setting_of(one.point.call) != left]
        table = fit_table(rest, held, _usual(points))
        for one in held:
            predicted = table.predict(one.point.call)
            if predicted.entry is not None:
                trials.append(Trial(one.point, predicted.us, predicted.low_us, predicted.high_us))
    return trials


def _usual(points: Sequence[Point]) -> Constants:
    return _USUAL_ON_CPU if points[0].call.gpu == _CPU else USUAL


def _setting_of(call: Call) -> tuple[str, str, int, int, int]:
    return call.network, call.mode, call.num_nodes, call.num_ranks, call.num_tokens
