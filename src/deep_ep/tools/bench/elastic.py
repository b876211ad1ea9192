"""`bench elastic`: DeepEP V2's calls on a device, with each group size, as one report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ... import __version__
from ...transport.memory import available_bytes
from ..machine import find_machine
from .cases import join_cases, run_cases
from .elastic_cases import ELASTIC_CASES, ELASTIC_GPU_CASES
from .gpu import gpu_machine
from .gpu_cases import join_gpu_cases, run_gpu_cases
from .inputs import CONTEXT_BYTES, Setting, reason_to_skip
from .report import BenchReport
from .suite import Suite, measure_suite

NAME = "elastic"


def titles_of(setting: Setting) -> dict[str, str]:
    """The cases of a setting's device, by name: how a table calls them."""
    if setting.device == "cuda":
        return {name: line.title for name, line in ELASTIC_GPU_CASES.items()}
    return {name: title for name, (title, _) in ELASTIC_CASES.items()}


def _rank_bytes(setting: Setting) -> int:
    """About a rank's peak: expanded rows, five times, and a few times its own."""
    num_rows = 5 * setting.num_tokens * setting.num_topk + 8 * setting.num_tokens
    return 2 * setting.hidden * num_rows + (CONTEXT_BYTES if setting.device == "cuda" else 0)


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
    titles, rank_bytes = titles_of(setting), _rank_bytes(setting)
    if setting.device == "cpu":

        def reason_on_cpu(num_ranks: int) -> str | None:
            return reason_to_skip(setting, num_ranks, available_bytes(), rank_bytes)

        suite = Suite(NAME, titles, partial(run_cases, cases=ELASTIC_CASES), join_cases, reason_on_cpu)
        return measure_suite(suite, setting, group_sizes, names, command, find_machine(__version__))
    with gpu_machine(max(group_sizes)) as machine:
        free_bytes, num_gpus = machine["gpu_free_bytes"], machine["num_gpus"]

        def reason_on_gpu(num_ranks: int) -> str | None:
            return reason_to_skip(setting, num_ranks, free_bytes * min(num_ranks, num_gpus), rank_bytes)

        run = partial(run_gpu_cases, lines=ELASTIC_GPU_CASES)
        suite = Suite(NAME, titles, run, join_gpu_cases, reason_on_gpu)
        return measure_suite(suite, setting, group_sizes, names, command, machine)
