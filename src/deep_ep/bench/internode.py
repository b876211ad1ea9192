"""`bench internode`: the cases across nodes as one report, over loopback or between network namespaces."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial

from .. import __version__, env
from ..machine import find_machine
from ..namespaces import Hosts, making_hosts
from ..transport.memory import available_bytes
from .inputs import Setting, reason_to_skip
from .internode_cases import RAIL_CASES, join_rail_cases, run_rail_cases
from .report import Report
from .suite import Suite, measure_suite

NAME = "internode"
UNLIMITED = "unlimited"  # namespaces without a rate
MOST_TOPK_GROUPS = 4  # as DeepEP's benchmark has it


def name_of(link: str) -> str:
    """What a report is called: figures over loopback and over a link are kept apart."""
    return f"{NAME} {link}" if link else NAME


def titles() -> dict[str, str]:
    """The cases, by name: how a table calls them."""
    return {name: title for name, (title, _) in RAIL_CASES.items()}


def measure(setting: Setting, num_ranks: int, names: Sequence[str], command: str) -> Report:
    """Run cases, and show progress on the way.

    Args:
        setting: The setting, with its nodes and the link between them.
        num_ranks: R.
        names: Keys of `titles`.
        command: The line that runs it again.

    Raises:
        EPUnsupported: Namespaces were asked for, and cannot be had.
        EPError: The run failed.
    """
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
        name_of(setting.link),
        titles(),
        run_rail_cases,
        partial(join_rail_cases, setting.num_nodes),
        reason,
        variables,
        hosts.enter if hosts is not None else None,
    )
