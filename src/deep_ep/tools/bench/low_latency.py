"""`bench low-latency`: the cases of a device, with each group size, as one report."""

from __future__ import annotations

from collections.abc import Sequence

from ... import __version__
from ...buffers.legacy import Buffer
from ...transport.memory import available_bytes
from ..machine import find_machine
from .cases import join_cases
from .gpu import gpu_machine
from .gpu_cases import COPY_BYTES, join_gpu_cases
from .inputs import CONTEXT_BYTES, Setting
from .low_latency_cases import low_latency_titles, run_low_latency_cases
from .report import BenchReport
from .suite import Suite, measure_suite

NAME = "low-latency"


def measure(setting: Setting, group_sizes: Sequence[int], names: Sequence[str], command: str) -> BenchReport:
    """Run cases with each group size, and show progress on the way.

    Args:
        setting: The setting.
        group_sizes: Numbers of ranks.
        names: Keys of `low_latency_titles(setting.device)`.
        command: The line that runs it again.

    Raises:
        EPError: There is no such device, or the run failed.
    """
    titles = low_latency_titles(setting.device)
    if setting.device == "cpu":

        def reason_on_cpu(num_ranks: int) -> str | None:
            return reason_to_skip(setting, num_ranks, available_bytes())

        suite = Suite(NAME, titles, run_low_latency_cases, join_cases, reason_on_cpu)
        return measure_suite(suite, setting, group_sizes, names, command, find_machine(__version__))
    with gpu_machine(max(group_sizes)) as machine:
        free_bytes, num_gpus = machine["gpu_free_bytes"], machine["num_gpus"]

        def reason_on_gpu(num_ranks: int) -> str | None:
            return reason_to_skip(setting, num_ranks, free_bytes * min(num_ranks, num_gpus))

        suite = Suite(NAME, titles, run_low_latency_cases, join_gpu_cases, reason_on_gpu)
        return measure_suite(suite, setting, group_sizes, names, command, machine)


def reason_to_skip(setting: Setting, num_ranks: int, free_bytes: int | None) -> str | None:
    """Why this group size cannot run here, or None.

    Args:
        setting: The setting.
        num_ranks: R.
        free_bytes: Memory that is free; None if that is not known.
    """
    if num_ranks < 1:
        return f"there is no group of {num_ranks} ranks"
    if setting.num_experts % num_ranks:
        return f"{setting.num_experts} experts cannot be shared by {num_ranks} ranks"
    needed = num_ranks * (_cpu_bytes(setting) if setting.device == "cpu" else _gpu_bytes(setting, num_ranks))
    if free_bytes is not None and needed > free_bytes:
        return f"needs about {needed / 2**30:.1f} GiB of memory, {free_bytes / 2**30:.1f} are available"
    return None


def _cpu_bytes(setting: Setting) -> int:
    """About what a rank touches: its rows in the window, in results, in the zero-copy tensors and in gloo's buffers."""
    return setting.hidden * setting.num_tokens * (20 * setting.num_topk + 16)


def _gpu_bytes(setting: Setting, num_ranks: int) -> int:
    """About a rank's peak on a GPU, where nothing is sparse: the window, two results, the experts' rows, the copy."""
    sizes = (setting.num_tokens, setting.hidden, num_ranks, setting.num_experts)
    results = setting.num_experts * setting.num_tokens * setting.hidden
    return CONTEXT_BYTES + Buffer.get_low_latency_rdma_size_hint(*sizes) + 4 * results + 2 * COPY_BYTES
