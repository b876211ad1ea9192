"""What crosses between nodes: tokens, as the routes say, and bytes, as they are counted around calls."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch.distributed as dist

from ... import env
from ...control import Control
from ...topology import Topology, find_topology


class Crossing(NamedTuple):
    """Tokens between a rank and the others of its rail.

    Attributes:
        topology: Where the rank stands.
        num_out: For each node, its own one included, the rank's tokens that go there.
        num_in: For each node, the tokens of its rank of the rail that come here.
    """

    topology: Topology
    num_out: list[int]
    num_in: list[int]

    def to_others(self, counts: Sequence[int], row_bytes: int) -> dict[int, int]:
        """Bytes of rows by rank of the rail, without the own one."""
        size, local = self.topology.ranks_per_node, self.topology.local_rank
        nodes = (node for node in range(self.topology.num_nodes) if node != self.topology.node)
        return {node * size + local: counts[node] * row_bytes for node in nodes}


def find_crossing(layout: dict[str, Any]) -> Crossing:
    """Tell the ranks how many tokens cross.

    Args:
        layout: The layout arguments of a dispatch across nodes.
    """
    topology = find_topology(Control(dist.group.WORLD, None, env.TIMEOUT_SECS.get()))
    mine = layout["num_tokens_per_rdma_rank"].tolist()
    counts: list[Any] = [None] * topology.num_ranks
    dist.all_gather_object(counts, mine)
    rail = range(topology.local_rank, topology.num_ranks, topology.ranks_per_node)
    return Crossing(topology, mine, [counts[rank][topology.node] for rank in rail])


def count_bytes(read: Callable[[], dict[str, int]], call: Callable[[], Any], num_calls: int) -> dict[str, int]:
    """Bytes of a call by kind, the median of several calls.

    Args:
        read: Reads the counters of this rank, by kind.
        call: What is counted.
        num_calls: How many.
    """
    seen: list[dict[str, int]] = []
    for _ in range(num_calls):
        before = _read_quiet(read)
        call()
        after = _read_quiet(read)
        seen.append({kind: after[kind] - before[kind] for kind in before})
    return {kind: int(statistics.median(one[kind] for one in seen)) for kind in seen[0]}


def _read_quiet(read: Callable[[], dict[str, int]]) -> dict[str, int]:
    dist.barrier()  # nobody is in a call
    counters = read()
    dist.barrier()
    return counters
