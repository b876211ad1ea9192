"""`bench internode`: the cases across nodes. On the CPU over loopback or between network namespaces."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial

import torch

from ... import env
from ...buffers.engines import NVSHMEM
from ..namespaces import Hosts, making_hosts
from . import suite
from .hop_buffers import find_sizes, hop_bytes
from .hop_cases import hop_titles, join_hop_cases, run_hop_cases
from .inputs import Setting, normal_bytes
from .internode_cases import RAIL_CASES, join_rail_cases, run_rail_cases
from .report import BenchReport
from .suite import Suite

NAME = "internode"
UNLIMITED = "unlimited"  # namespaces without a rate
MOST_TOPK_GROUPS = 4  # as DeepEP's benchmark has it


def name_of(setting: Setting) -> str:
    """What a report is called: figures over loopback, over a link and of each transport are kept apart."""
    way = setting.transport or setting.link
    return f"{NAME} {way}" if way else NAME


def titles_of(setting: Setting) -> Mapping[str, str]:
    """The cases of a setting's device, by name: how a table calls them."""
    if setting.device == "cuda":
        return hop_titles(setting.num_sms)
    return {name: title for name, (title, _) in RAIL_CASES.items()}


def measure(setting: Setting, num_ranks: int, names: Sequence[str], command: str) -> BenchReport:
    """Run cases, and show progress on the way.

    Args:
        setting: The setting, with its nodes and what is between them.
        num_ranks: R.
        names: Keys of `titles_of(setting)`.
        command: The line that runs it again.

    Raises:
        EPUnsupported: Namespaces, a GPU or a transport were asked for, and cannot be had.
        EPError: The run failed.
    """
    if setting.device == "cuda":
        return suite.measure(_gpu_suite(setting, num_ranks), setting, [num_ranks], names, command)
    rate = "" if setting.link == UNLIMITED else setting.link
    per_node = num_ranks // setting.num_nodes
    making = making_hosts(setting.num_nodes, per_node, rate) if setting.link else nullcontext()
    with making as hosts:
        return suite.measure(_cpu_suite(setting, per_node, hosts), setting, [num_ranks], names, command)


def _cpu_suite(setting: Setting, ranks_per_node: int, hosts: Hosts | None) -> Suite:
    # A host of its own is a node; on one host the variable splits it, and loopback is the network.
    variables = {env.RANKS_PER_NODE.name: str(ranks_per_node)}
    if hosts is None:
        variables[env.SOCKET_IFNAME.name] = "lo"
    join = partial(join_rail_cases, setting.num_nodes)
    enter = hosts.enter if hosts is not None else None
    return Suite(name_of(setting), titles_of(setting), run_rail_cases, join, normal_bytes, variables, enter)


def _gpu_suite(setting: Setting, num_ranks: int) -> Suite:
    variables = gpu_variables(setting, num_ranks, torch.cuda.device_count())
    join = partial(join_hop_cases, setting.num_nodes)
    return Suite(name_of(setting), titles_of(setting), run_hop_cases, join, hop_bytes, variables)


def gpu_variables(setting: Setting, num_ranks: int, num_gpus: int) -> dict[str, str]:
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
    ranks_per_gpu = -(-num_ranks // max(1, num_gpus))
    return {
        **variables,
        # NVSHMEM starts on a shared GPU only if each rank has its part of it.
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // ranks_per_gpu),
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
        "NVSHMEM_SYMMETRIC_SIZE": str(find_sizes(setting, num_ranks).heap),
    }
