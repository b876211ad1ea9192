"""`bench internode --device cuda`: two hops between ranks of this machine's GPUs, as one report."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from ... import env
from ...buffers.engines import NVSHMEM
from .gpu import gpu_machine
from .hop_buffers import find_sizes
from .hop_cases import hop_titles, join_hop_cases, run_hop_cases
from .inputs import Setting, reason_to_skip
from .report import BenchReport
from .suite import Suite, measure_suite


def measure_on_gpu(name: str, setting: Setting, num_ranks: int, names: Sequence[str], command: str) -> BenchReport:
    """Run cases, and show progress on the way.

    Args:
        name: What the report is called.
        setting: The setting, with its nodes and the transport between them.
        num_ranks: R.
        names: Keys of `hop_titles`.
        command: The line that runs it again.

    Raises:
        EPUnsupported: There is no GPU, or no such transport.
        EPError: The run failed.
    """
    with gpu_machine(num_ranks) as machine:
        num_gpus = machine["num_gpus"]
        free_bytes = machine["gpu_free_bytes"] * min(num_ranks, num_gpus)

        def reason(num_ranks: int) -> str | None:
            return reason_to_skip(setting, num_ranks, free_bytes, find_sizes(setting, num_ranks).gpu)

        suite = Suite(
            name,
            hop_titles(setting.num_sms),
            run_hop_cases,
            partial(join_hop_cases, setting.num_nodes),
            reason,
            variables_of(setting, num_ranks, num_gpus),
        )
        return measure_suite(suite, setting, [num_ranks], names, command, machine)


def variables_of(setting: Setting, num_ranks: int, num_gpus: int) -> dict[str, str]:
    """Environment variables of ranks whose machine is split into nodes. They must be there before CUDA starts.

    Args:
        setting: The setting.
        num_ranks: R.
        num_gpus: GPUs of the machine.
    """
    variables = {
        env.RANKS_PER_NODE.name: str(num_ranks // setting.num_nodes),
        env.TRANSPORT.name: setting.transport,
        env.SOCKET_IFNAME.name: "lo",
    }
    if setting.transport != NVSHMEM:
        return variables
    ranks_per_gpu = -(-num_ranks // num_gpus)
    return {
        **variables,
        # NVSHMEM starts on a shared GPU only if each rank has its part of it.
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks_per_gpu),
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
        "NVSHMEM_SYMMETRIC_SIZE": str(find_sizes(setting, num_ranks).heap),
    }
