"""Routes across nodes on a GPU: which token goes to which node, and where the rows that a rank relays go.

Letters: R ranks are N nodes of P; T tokens, n rows received, F rows that this rank forwards inside its node.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from ....handle import RailHandle
from ....kernels.exchange import PLAN_WORDS
from ....kernels.notify import Nodes
from ....kernels.route import TokenRoutes
from ....topology import Topology
from ...payload import Routing
from ..memory import Memory
from ..scope import CudaScope


@dataclass(frozen=True)
class TwoHopRoutes:
    """The routes of a call's rows, as a dispatch computes them or a handle has them.

    Attributes:
        token_routes: The routes of this rank's tokens.
        prefix: [R, R] int32, rows by source and destination, written by the handshake; None: there is a handle.
        nodes: What ranks of different nodes exchange.
    """

    token_routes: TokenRoutes
    prefix: torch.Tensor | None
    nodes: Nodes

    def with_forwarded(self, forwarded: torch.Tensor) -> TwoHopRoutes:
        """Return the same routes with other memory for the rows that are forwarded."""
        return replace(self, token_routes=self.token_routes._replace(forwarded=forwarded))


class Router:
    """Makes the routes of calls.

    Args:
        topology: Where this rank stands.
        memory: Where memory comes from.
        device: The device of the memory.

    Attributes:
        plan: [N, PLAN_WORDS] int64, of the call that is being made.
        local: The ranks of this node.
    """

    def __init__(self, topology: Topology, memory: Memory, device: torch.device):
        num_nodes, ranks_per_node = topology.num_nodes, topology.ranks_per_node
        first = topology.node * ranks_per_node
        self._topology = topology
        self._memory = memory
        self.local = slice(first, first + ranks_per_node)
        self.plan = torch.zeros(num_nodes, PLAN_WORDS, dtype=torch.int64, device=device)
        self._prefix = torch.zeros(num_nodes, dtype=torch.int32, device=device)  # of calls that need none

    def of_routing(self, scope: CudaScope, routing: Routing, num_channels: int, num_forwarded: int) -> TwoHopRoutes:
        """Allocate the routes of a dispatch, for so many relayed rows; the dispatch's handshake and `route` fill
        them.
        """
        mask, num_nodes = routing.is_token_in_rank, self._topology.num_nodes
        with scope.outputs:
            node_slots = mask.new_empty(mask.size(0), num_nodes, dtype=torch.int32)
            node_tokens = node_slots.new_empty(num_nodes, num_channels)
            mark = torch.empty_like(node_tokens)
            node_prefix = node_slots.new_empty(num_nodes)
            prefix = node_slots.new_empty(mask.size(1), mask.size(1))
        numbers = mask.new_empty(mask.shape, dtype=torch.int32)
        forwarded = self.empty_forwarded(scope, mask, num_forwarded)
        token_routes = TokenRoutes(node_slots, numbers, forwarded, torch.empty_like(numbers))
        return TwoHopRoutes(token_routes, prefix, Nodes(node_tokens, self.plan, node_prefix, mark))

    def empty_forwarded(self, scope: CudaScope, is_token_in_rank: torch.Tensor, num_forwarded: int) -> torch.Tensor:
        """Allocate the slots of so many relayed rows, and of as many as this rank may send: one bound serves both."""
        num_rows = max(num_forwarded, is_token_in_rank.size(0) * self._topology.num_nodes)
        with scope.outputs:
            return is_token_in_rank.new_empty(num_rows, self._topology.ranks_per_node, dtype=torch.int32)

    def of_handle(self, handle: RailHandle) -> TwoHopRoutes:
        """Return the routes that a handle has."""
        node_slots, forwarded = handle.send_rdma_head.contiguous(), handle.send_nvl_head.contiguous()
        slots = node_slots.new_empty(handle.num_tokens, self._topology.num_ranks)
        return TwoHopRoutes(TokenRoutes(node_slots, None, forwarded, slots), None, self.nodes_of(handle))

    def nodes_of(self, handle: RailHandle) -> Nodes:
        """Return what a rank that follows a handle sends to other nodes in the handshake."""
        node_tokens, mark = handle.rdma_channel_prefix_matrix, handle.recv_rdma_channel_prefix_matrix
        return Nodes(node_tokens, self.plan, self._prefix, mark.contiguous())

    def empty_handle(self, routing: Routing, routes: TwoHopRoutes, num_rows: int, num_channels: int) -> RailHandle:
        """Return a handle, in which `unpack` is to fill where rows came from."""
        mask, num_ranks, nodes = routing.is_token_in_rank, self._topology.num_ranks, routes.nodes
        nothing = self._memory.no_channels(num_channels)
        return RailHandle(
            is_token_in_rank=mask,
            rdma_channel_prefix_matrix=nodes.num_tokens,
            gbl_channel_prefix_matrix=nothing,
            recv_rdma_channel_prefix_matrix=nodes.mark,
            recv_rdma_rank_prefix_sum=nodes.prefix,
            recv_gbl_channel_prefix_matrix=nothing,
            recv_gbl_rank_prefix_sum=mask.new_empty(num_ranks, dtype=torch.int32),
            recv_src_meta=mask.new_empty(num_rows, 8, dtype=torch.uint8),
            send_rdma_head=routes.token_routes.node_slots,
            send_nvl_head=routes.token_routes.forwarded,
        )
