"""The cases of a benchmark, with each group size, as one report: what all benchmarks of calls share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

from ... import __version__
from ...launch import run_ranks
from ...transport.memory import available_bytes
from ..machine import find_machine
from .core import Measured
from .gpu import gpu_machine
from .inputs import Setting, reason_to_skip
from .progress import showing_progress
from .report import BenchReport

_LIMIT_SECS = 3600.0  # for one group size; the default settings take minutes


class Suite(NamedTuple):
    """The cases of a benchmark on a device.

    Attributes:
        name: Of the benchmark.
        titles: The cases, by name: how a table calls them.
        run: What every rank does.
        join: One case out of what all ranks returned of it.
        rank_bytes: Memory that a rank takes in a group of so many ranks.
        env: Environment variables of the ranks.
        enter: What moves a rank to its host; None: all stay on this one.
    """

    name: str
    titles: Mapping[str, str]
    run: Callable[..., list[Any]]
    join: Callable[[str, Sequence[Any]], Measured]
    rank_bytes: Callable[[Setting, int], int]
    env: dict[str, str] | None = None
    enter: Callable[[int], object] | None = None


def measure(
    suite: Suite, setting: Setting, group_sizes: Sequence[int], names: Sequence[str], command: str
) -> BenchReport:
    """Run cases with each group size, and show progress on the way.

    Args:
        suite: The cases.
        setting: The setting.
        group_sizes: Numbers of ranks.
        names: Keys of the suite's titles.
        command: The line that runs it again.

    Raises:
        EPUnsupported: There is no such device.
        EPError: The run failed.
    """
    is_gpu = setting.device == "cuda"
    with gpu_machine(max(group_sizes)) if is_gpu else nullcontext(find_machine(__version__)) as machine:
        rows = _measure_groups(suite, setting, group_sizes, names, machine)
    return BenchReport(
        name=suite.name,
        command=command,
        shape=_shape(setting),
        setting=dataclasses.asdict(setting),
        machine=machine,
        titles=suite.titles,
        rows=rows,
    )


def _measure_groups(
    suite: Suite, setting: Setting, group_sizes: Sequence[int], names: Sequence[str], machine: Mapping[str, Any]
) -> list[Measured]:
    rows: list[Measured] = []
    rounds_of_group = len(names) * setting.num_rounds
    with showing_progress(len(group_sizes) * rounds_of_group, suite.titles) as (progress, news):
        for num_ranks in group_sizes:
            reason = reason_to_skip(setting, num_ranks, free_bytes_of(machine, num_ranks), suite.rank_bytes)
            if reason is not None:
                progress.skip(num_ranks, reason, rounds_of_group)
                rows += [Measured(name, num_ranks, skipped=reason) for name in names]
                continue
            work = (setting, list(names), news)
            where, limit = suite.env, _LIMIT_SECS
            results = run_ranks(suite.run, num_ranks, *work, limit_secs=limit, env=where, enter=suite.enter)
            rows += [suite.join(name, [result[index] for result in results]) for index, name in enumerate(names)]
    return rows


def free_bytes_of(machine: Mapping[str, Any], num_ranks: int) -> int | None:
    """Memory for a group: that of its GPUs, or of the machine; None if that is not known."""
    if "gpu_free_bytes" in machine:
        return machine["gpu_free_bytes"] * min(num_ranks, machine["num_gpus"])
    return available_bytes()


def _shape(setting: Setting) -> str:
    shape = ""
    if setting.num_nodes > 1:
        shape = f"{setting.num_nodes} nodes {_way(setting)}, "
    shape += f"{setting.num_tokens} tokens a rank, hidden {setting.hidden}, top-{setting.num_topk} of "
    shape += f"{setting.num_experts} experts"
    if setting.num_groups:
        shape += f", {setting.num_topk_groups} of {setting.num_groups} groups"
    return f"{shape}, {setting.num_rounds} rounds"


def _way(setting: Setting) -> str:
    """How ranks of different nodes reach each other."""
    if setting.transport:
        return f"by {setting.transport}"
    return f"over links of {setting.link}" if setting.link else "over loopback"
