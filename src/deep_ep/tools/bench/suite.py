"""The cases of a benchmark, with each group size, as one report: what all benchmarks of calls share."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from ...launch import run_ranks
from .core import Measured
from .inputs import Setting
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
        reason_to_skip: Why a group of so many ranks cannot run here, or None.
        env: Environment variables of the ranks.
        enter: What moves a rank to its host; None: all stay on this one.
    """

    name: str
    titles: Mapping[str, str]
    run: Callable[..., list[Any]]
    join: Callable[[str, Sequence[Any]], Measured]
    reason_to_skip: Callable[[int], str | None]
    env: dict[str, str] | None = None
    enter: Callable[[int], object] | None = None


def measure_suite(
    suite: Suite,
    setting: Setting,
    group_sizes: Sequence[int],
    names: Sequence[str],
    command: str,
    machine: Mapping[str, Any],
) -> BenchReport:
    """Run cases with each group size, and show progress on the way.

    Args:
        suite: The cases.
        setting: The setting.
        group_sizes: Numbers of ranks.
        names: Keys of the suite's titles.
        command: The line that runs it again.
        machine: What it runs on.

    Raises:
        EPError: The run failed.
    """
    rows: list[Measured] = []
    rounds_of_group = len(names) * setting.num_rounds
    with showing_progress(len(group_sizes) * rounds_of_group, suite.titles) as (progress, news):
        for num_ranks in group_sizes:
            reason = suite.reason_to_skip(num_ranks)
            if reason is not None:
                progress.skip(num_ranks, reason, rounds_of_group)
                rows += [Measured(name, num_ranks, skipped=reason) for name in names]
                continue
            work = (setting, list(names), news)
            where, limit = suite.env, _LIMIT_SECS
            results = run_ranks(suite.run, num_ranks, *work, limit_secs=limit, env=where, enter=suite.enter)
            rows += [suite.join(name, [result[index] for result in results]) for index, name in enumerate(names)]
    return BenchReport(
        name=suite.name,
        command=command,
        shape=_shape(setting),
        setting=dataclasses.asdict(setting),
        machine=machine,
        titles=suite.titles,
        rows=rows,
    )


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
