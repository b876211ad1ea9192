"""The routes of a call across nodes, as a handle has them: how many rows each rank sends over each hop, and where they
go.

A rank's *block* of node b are the tokens that the rank of its rail on b sends to this node; this rank forwards them.
Its own tokens for its own node are a block like the others, which needs no network.
"""

from __future__ import annotations

from functools import cached_property

import torch

from ....handle import RailHandle
from ....topology import Topology


class CpuNodesRoutes:
    """The rows of a call, by hop.

    Args:
        handle: Filled.
        topology: Where this rank stands.

    Attributes:
        num_in: For each node, the rows of its block.
        num_out: For each node, the tokens that this rank sends there.
        blocks: For each node, [num_in, P] int32: where the rows of its block lie at each rank of this node.
    """

    def __init__(self, handle: RailHandle, topology: Topology):
        self._handle = handle
        self._topology = topology
        self.num_in = _differences(handle.recv_rdma_rank_prefix_sum.tolist())
        self.num_out = (handle.send_rdma_head >= 0).sum(0).tolist()
        self.blocks = list(handle.forwarded_slots.split(self.num_in))

    def tokens_to(self, node: int) -> torch.Tensor:
        """The tokens that this rank sends to a node, ascending int64."""
        return (self._handle.send_rdma_head[:, node] >= 0).nonzero()[:, 0]

    @cached_property
    def rows_put(self) -> list[int]:
        """Rows that this rank writes to, or in combine reads from, each rank of the group; over the rail: sends."""
        return self._by_rank(self.num_out, (self._handle.forwarded_slots >= 0).sum(0).tolist())

    @cached_property
    def rows_got(self) -> list[int]:
        """Rows that each rank of the group writes to this one, or in combine reads from it; over the rail: sends it."""
        size = self._topology.ranks_per_node
        by_source = _differences(self._handle.recv_gbl_rank_prefix_sum.tolist())
        return self._by_rank(self.num_in, [sum(by_source[local::size]) for local in range(size)])

    def _by_rank(self, by_node: list[int], by_local_rank: list[int]) -> list[int]:
        rows, topology = [0] * self._topology.num_ranks, self._topology
        for node, count in enumerate(by_node):
            rows[node * topology.ranks_per_node + topology.local_rank] = count
        first = topology.node * topology.ranks_per_node
        rows[first : first + topology.ranks_per_node] = by_local_rank
        return rows


def _differences(ends: list[int]) -> list[int]:
    return [end - start for start, end in zip([0, *ends], ends, strict=False)]
