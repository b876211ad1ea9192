"""`bench normal`: the cases of a device, with each group size, as one report."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import __version__
from ..launch import run_ranks
from ..machine import find_machine
from ..transport.memory import available_bytes
from .cases import CASES, join_cases, run_cases
from .core import Measured
from .gpu import gpu_machine
from .gpu_cases import gpu_titles, join_gpu_cases, run_gpu_cases
from .inputs import Setting, reason_to_skip
from .progress import showing_progress
from .report import Report

_LIMIT_SECS = 3600.0  # for one group size; the default setting takes minutes


class _Suite(NamedTuple):
    """The cases of a device.

    Attributes:
        run: What every rank does.
        join: One case out of what all ranks returned of it.
        free_bytes: Memory that a group of so many ranks may use; None: not known.
    """

    run: Callable[..., list[Any]]
    join: Callable[[str, Sequence[Any]], Measured]
    free_bytes: Callable[[int], int | None]


def titles_of(setting: Setting) -> dict[str, str]:
    """The cases of a setting's device, by name: how a table calls them."""
    if setting.device == "cuda":
        return gpu_titles(setting.num_sms)
    return {name: title for name, (title, _) in CASES.items()}


def measure(setting: Setting, group_sizes: Sequence[int], names: Sequence[str], command: str) -> Report:
    """Run cases with each group size, and show progress on the way.

    Args:
        setting: The setting.
        group_sizes: Numbers of ranks.
        names: Keys of `titles_of(setting)`.
        command: The line that runs it again.

    Raises:
        EPError: There is no such device, or the run failed.
    """
    if setting.device == "cpu":
        suite = _Suite(run_cases, join_cases, lambda _: available_bytes())
        return _measure(setting, group_sizes, names, command, find_machine(__version__), suite)
    with gpu_machine(max(group_sizes)) as machine:
        free_bytes, num_gpus = machine["gpu_free_bytes"], machine["num_gpus"]
        suite = _Suite(run_gpu_cases, join_gpu_cases, lambda num_ranks: free_bytes * min(num_ranks, num_gpus))
        return _measure(setting, group_sizes, names, command, machine, suite)


def _measure(
    setting: Setting,
    group_sizes: Sequence[int],
    names: Sequence[str],
    command: str,
    machine: Mapping[str, Any],
    suite: _Suite,
) -> Report:
    rows: list[Measured] = []
    titles = titles_of(setting)
    rounds_of_group = len(names) * setting.num_rounds
    with showing_progress(len(group_sizes) * rounds_of_group, titles) as (progress, news):
        for num_ranks in group_sizes:
            reason = reason_to_skip(setting, num_ranks, suite.free_bytes(num_ranks))
            if reason is not None:
                progress.skip(num_ranks, reason, rounds_of_group)
                rows += [Measured(name, num_ranks, skipped=reason) for name in names]
                continue
            results = run_ranks(suite.run, num_ranks, setting, list(names), news, limit_secs=_LIMIT_SECS)
            rows += [suite.join(name, [result[index] for result in results]) for index, name in enumerate(names)]
    return Report(
        name="normal",
        command=command,
        shape=_shape(setting),
        setting=dataclasses.asdict(setting),
        machine=machine,
        titles=titles,
        rows=rows,
    )


def _shape(setting: Setting) -> str:
    shape = f"{setting.num_tokens} tokens a rank, hidden {setting.hidden}, top-{setting.num_topk} of "
    shape += f"{setting.num_experts} experts"
    if setting.num_groups:
        shape += f", {setting.num_topk_groups} of {setting.num_groups} groups"
    return f"{shape}, {setting.num_rounds} rounds"
