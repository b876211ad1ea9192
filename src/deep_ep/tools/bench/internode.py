"""`bench internode`: the cases across nodes as one report. On the CPU over loopback or between network namespaces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from ... import __version__, env
from ...transport.memory import available_bytes
from ..machine import find_machine
from ..namespaces import Hosts, making_hosts
from .hop_cases import hop_titles
from .inputs import Setting, reason_to_skip
from .internode_cases import RAIL_CASES, join_rail_cases, run_rail_cases
from .internode_gpu import measure_on_gpu
from .report import BenchReport
from .suite import Suite, measure_suite

NAME = "internode"
UNLIMITED = "unlimited"  # namespaces without a rate
MOST_TOPK_GROUPS = 4  # as DeepEP's benchmark has it


def name_of(setting: Setting) -> str:
    """What a report is called: figures over loopback, over a link and of each transport are kept apart."""
    way = setting.transport or setting.link
    return f"{NAME} {way}" if way else NAME


def titles_of(setting: Setting) -> dict[str, str]:
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
        return measure_on_gpu(name_of(setting), setting, num_ranks, names, command)
    machine = find_machine(__version__)
    rate = "" if setting.link == UNLIMITED else setting.link
    per_node = num_ranks // setting.num_nodes
    making = making_hosts(setting.num_nodes, per_node, rate) if setting.link else nullcontext()
    with making as hosts:
        suite = _suite(setting, per_node, hosts)
        return measure_suite(suite, setting, [num_ranks], names, command, machine)


def _suite(setting: Setting, ranks_per_node: int, hosts: Hosts | None) -> Suite:
    def reason(num_ranks: int) -> str | None:
        return reason_to_skip(setting, num_ranks, available_bytes())

    # A host of its own is a node; on one host the variable splits it, and loopback is the network.
    variables = {env.RANKS_PER_NODE.name: str(ranks_per_node)}
    if hosts is None:
        variables[env.SOCKET_IFNAME.name] = "lo"
    return Suite(
        name_of(setting),
        titles_of(setting),
        run_rail_cases,
        partial(join_rail_cases, setting.num_nodes),
        reason,
        variables,
        hosts.enter if hosts is not None else None,
    )
