"""Combine across nodes: a token's rows are summed inside each node, and one row a node goes back over the rail.

Who passed a token on in dispatch sums its rows, in FP32, local ranks ascending, and rounds; the token's own rank adds
biases and nodes, ascending. See `docs/protocol.md` for the steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...config import Config
from ...handle import RailHandle
from ...kernels.reduce import reduce_rows
from ...kernels.rows import row_bytes
from ..call import OFFERED, READY, TAKEN, Agreement, Call, Header
from ..combine import Combine, Supply
from .announce import Announcement, receive_announcements, require_rows, send_announcement
from .chain import RailChain
from .dispatch import no_room
from .routes import Routes
from .traffic import ChunkForm, Chunks, Traffic


class RailsCombine(Combine):
    """One combine of one rank, over two hops.

    Args:
        chain: The calls of the buffer, of which this is the next.
        x: [n, H] rows to give back, contiguous.
        handle: The handle of the dispatch that they came from.
        topk_weights: [n, K] float32 to give back with them, contiguous, or None.
        biases: [T, H] tensors of x's dtype, added first.
        config: How rows are cut into messages.
    """

    def __init__(
        self,
        chain: RailChain,
        x: torch.Tensor,
        handle: RailHandle,
        topk_weights: torch.Tensor | None = None,
        biases: Sequence[torch.Tensor] = (),
        config: Config | None = None,
    ):
        super().__init__(chain, x, handle, topk_weights, biases)
        self._rails = chain
        self._topology = chain.topology
        self._config = config

    def sum_rows(self) -> None:
        """Offer this rank's rows, sum those of its rail's tokens, send the sums, add up what comes back."""
        call = self.call = self._chain.begin(Header(self._agreement(), self._handle.num_tokens))
        routes, rail = Routes(self._handle, self._topology), self._rails.rail
        for node in rail.nodes:
            send_announcement(rail, call, node, Announcement(routes.num_in[node]))
        call.post_header()
        supply = self._supply(self._handle.recv_gbl_rank_prefix_sum.tolist()[-1])
        call.post_offer(supply.offer)
        call.signal(READY)  # rows lie ready as soon as they are offered: nobody is staged
        wait, size = self._rails.waiting(call), self._topology.ranks_per_node
        require_rows(call, rail, receive_announcements(rail, wait, call, size), routes.num_out)
        call.wait(OFFERED)
        call.headers()
        self._sum_nodes(call, routes)
        call.wait(TAKEN)
        bytes_each = sum(row_bytes(part) for part in self._sections())
        self._chain.stats.count("combine", supply.path, 1, routes.rows_got, routes.rows_put, bytes_each)

    def _agreement(self) -> Agreement:
        weights = self._topk_weights
        return Agreement(
            "combine",
            num_topk=weights.size(1) if weights is not None else 0,
            hidden=self._x.size(1),
            dtype=self._x.dtype,
            handle=int(self._handle.recv_rdma_channel_prefix_matrix[0, 0]),
        )

    def _supply(self, num_rows: int) -> Supply:
        supply = super()._supply(num_rows)
        if supply.staging is not None:
            raise no_room("combine", self._x.size(0), self._topology.rank, self._topology.num_ranks)
        return supply

    def _sum_nodes(self, call: Call, routes: Routes) -> None:
        """Sum inside the node for every node, exchange the sums, add them up."""
        offers, sections = call.offers(), self._sections()
        tables = [call.peer_rows(offers, index, part.size(1), part.dtype) for index, part in enumerate(sections)]
        shifts = [0] * self._topology.ranks_per_node
        # By node, the sums of this rank's tokens there.
        sums = [
            [self._chain.result((count, part.size(1)), part.dtype) for part in sections] for count in routes.num_out
        ]

        def pack(node: int, first: int, last: int, views: list[torch.Tensor]) -> None:
            for view, table in zip(views, tables, strict=True):
                reduce_rows(view, table, routes.blocks[node][first:last], shifts)

        def take(node: int, first: int, last: int, views: list[torch.Tensor]) -> None:
            for view, total in zip(views, sums[node], strict=True):
                total[first:last].copy_(view)

        form = ChunkForm([(part.size(1), part.dtype) for part in sections])
        chunks, wait, rail = Chunks.of(self._config, form.row_bytes), self._rails.waiting(call), self._rails.rail
        traffic = Traffic(rail, wait, call.epoch, form, chunks, routes.num_in, routes.num_out, pack, take)
        traffic.start()
        own = self._topology.node
        pack(own, 0, routes.num_in[own], sums[own])
        traffic.finish_packing()
        call.signal(TAKEN)
        traffic.finish()
        self._add_up(sums)

    def _add_up(self, sums: list[list[torch.Tensor]]) -> None:
        """Biases, then nodes ascending."""
        assert self._combined is not None
        outs, biases = [self._combined.x, self._combined.topk_weights], [self._biases, ()]
        for index, (out, bias) in enumerate(zip(outs, biases, strict=True)):
            if out is not None:
                parts = [total[index] for total in sums]
                reduce_rows(out, parts, self._handle.send_rdma_head, [0] * len(parts), bias)
