"""`bench normal`: the cases of a device, with each group size, as one report."""

from __future__ import annotations

from collections.abc import Sequence

from ... import __version__
from ...transport.memory import available_bytes
from ..machine import find_machine
from .cases import CASES, join_cases, run_cases
from .gpu import gpu_machine
from .gpu_cases import gpu_titles, join_gpu_cases, run_gpu_cases
from .inputs import Setting, reason_to_skip
from .report import BenchReport
from .suite import Suite, measure_suite

NAME = "normal"


def titles_of(setting: Setting) -> dict[str, str]:
    """The cases of a setting's device, by name: how a table calls them."""
    if setting.device == "cuda":
        return gpu_titles(setting.num_sms)
    return {name: title for name, (title, _) in CASES.items()}


def measure(setting: Setting, group_sizes: Sequence[int], names: Sequence[str], command: str) -> BenchReport:
    """Run cases with each group size, and show progress on the way.

    Args:
        setting: The setting.
        group_sizes: Numbers of ranks.
        names: Keys of `titles_of(setting)`.
        command: The line that runs it again.

    Raises:
        EPError: There is no such device, or the run failed.
    """
    titles = titles_of(setting)
    if setting.device == "cpu":

        def reason_on_cpu(num_ranks: int) -> str | None:
            return reason_to_skip(setting, num_ranks, available_bytes())

        suite = Suite(NAME, titles, run_cases, join_cases, reason_on_cpu)
        return measure_suite(suite, setting, group_sizes, names, command, find_machine(__version__))
    with gpu_machine(max(group_sizes)) as machine:
        free_bytes, num_gpus = machine["gpu_free_bytes"], machine["num_gpus"]

        def reason_on_gpu(num_ranks: int) -> str | None:
            return reason_to_skip(setting, num_ranks, free_bytes * min(num_ranks, num_gpus))

        suite = Suite(NAME, titles, run_gpu_cases, join_gpu_cases, reason_on_gpu)
        return measure_suite(suite, setting, group_sizes, names, command, machine)
