"""Ranks, nodes and rails: which ranks share a host, and which pairs of ranks talk across hosts.

A node is a host (hostname and boot id), or a part of it where `DEEP_EP_RANKS_PER_NODE` says so. The *rail* of a rank
is the set of ranks with its local index, one on every node.
"""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist

from . import env
from .control import Control
from .errors import EPError


@dataclass(frozen=True)
class Topology:
    """Where a rank stands. Ranks of a node are consecutive, and all nodes have as many.

    Attributes:
        rank: This rank.
        num_ranks: Ranks of the group.
        ranks_per_node: Ranks of each node.
    """

    rank: int
    num_ranks: int
    ranks_per_node: int

    @property
    def num_nodes(self) -> int:
        """How many nodes the group spans."""
        return self.num_ranks // self.ranks_per_node

    @property
    def node(self) -> int:
        """This rank's node."""
        return self.rank // self.ranks_per_node

    @property
    def local_rank(self) -> int:
        """This rank's index inside its node, which is its rail."""
        return self.rank % self.ranks_per_node

    @property
    def remote_ranks(self) -> list[int]:
        """The ranks of other nodes."""
        return [rank for rank in range(self.num_ranks) if rank // self.ranks_per_node != self.node]


def host_id() -> str:
    """A name that two processes share just if they run on one host."""
    if env.HOST.get():
        return env.HOST.get()
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()}:{boot_id.read_text().strip() if boot_id.exists() else ''}"


def find_topology(control: Control, ranks_per_node: int | None = None) -> Topology:
    """Gather the hosts of all ranks and derive the nodes. All ranks call it together.

    Args:
        control: The group.
        ranks_per_node: Ranks of a node; None: as the environment says.
    """
    wish = env.RANKS_PER_NODE.get() if ranks_per_node is None else ranks_per_node
    answers = control.gather((host_id(), wish), "finding the nodes")
    hosts = [host for host, _ in answers]
    wishes = {wish for _, wish in answers}
    if len(wishes) > 1:
        names = f"{env.RANKS_PER_NODE.name} and {env.TRANSPORT.name}"  # with `message` each rank is a node
        raise EPError(f"topology: {names} must be the same on all ranks, seen nodes of {sorted(wishes)} ranks")
    return arrange(control.rank, hosts, wishes.pop())


def arrange(rank: int, hosts: list[str], ranks_per_node: int = 0) -> Topology:
    """The topology of ranks on the given hosts.

    Args:
        rank: This rank.
        hosts: The host of every rank.
        ranks_per_node: Ranks of a node; 0: all the ranks of a host.

    Example:
        `arrange(3, ["a", "a", "b", "b"])` is two nodes of two ranks, rank 3 on node 1 with local rank 1.
    """
    blocks: list[tuple[str, int]] = []
    for host in hosts:
        if blocks and blocks[-1][0] == host:
            blocks[-1] = (host, blocks[-1][1] + 1)
        else:
            blocks.append((host, 1))
    sizes = {size for _, size in blocks}
    size = ranks_per_node or blocks[0][1]
    scattered = len({host for host, _ in blocks}) < len(blocks)
    if not scattered and len(sizes) == 1 and blocks[0][1] % size:
        raise EPError(
            f"topology: {env.RANKS_PER_NODE.name}={ranks_per_node} must divide the {blocks[0][1]} ranks of a host. "
            "Set it to a divisor, or leave it out: then all ranks of a host are a node"
        )
    if scattered or len(sizes) > 1:
        placement = ", ".join(f"{count} on {host}" for host, count in blocks)
        raise EPError(
            "topology: the ranks of a node must be consecutive and equally many on every node "
            f"({env.RANKS_PER_NODE.name}={ranks_per_node}), found in rank order: {placement}. "
            "Start the ranks host by host"
        )
    return Topology(rank, len(hosts), size)


def get_physical_domain_size(group: dist.ProcessGroup) -> tuple[int, int]:
    """`(num_rdma_ranks, num_nvlink_ranks)`: how many nodes the group spans, and how many ranks each has."""
    topology = find_topology(Control(group, None, env.TIMEOUT_SECS.get()))
    return topology.num_nodes, topology.ranks_per_node


def get_logical_domain_size(group: dist.ProcessGroup, allow_hybrid_mode: bool = True) -> tuple[int, int]:
    """`(num_scaleout_ranks, num_scaleup_ranks)`: the physical sizes, or one domain of all without hybrid mode."""
    return get_physical_domain_size(group) if allow_hybrid_mode else (1, group.size())
