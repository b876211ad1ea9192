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
from ...trace import RECEIVE, SEND
from ..call import OFFERED, READY, TAKEN, Agreement, Call, Header, Offer
from ..combine import Combine
from ..staging import Staging
from .announce import Announcement, receive_announcements, require_rows, send_announcement
from .chain import RailChain
from .rounds import copy_out, lane_of, num_rounds, passed_on, read_passed_on, rows_by_source, staged_slots
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
        call.post_header(passed_on(self._handle))
        with call.slice("supply rows", SEND):
            supply = self._supply(self._handle.recv_gbl_rank_prefix_sum.tolist()[-1])
        call.post_offer(supply.offer)
        # Rows that lie ready need no second signal; staged ones come when all offers, and so the rounds, are known.
        call.signal(READY if supply.staging is None else OFFERED)
        wait, size = self._rails.waiting(call), self._topology.ranks_per_node
        require_rows(call, rail, receive_announcements(rail, wait, call, size), routes.num_out)
        call.wait(OFFERED)
        call.headers()
        tables, rounds = self._collect(call, routes, supply.staging)
        # Rows that were pulled are read until the sums are made: one step after the rounds.
        self._sum_nodes(call, routes, tables, TAKEN + 2 * rounds)
        call.wait(TAKEN + 2 * rounds)
        bytes_each = sum(row_bytes(part) for part in self._sections())
        self._chain.stats.count("combine", supply.path, max(1, rounds), routes.rows_got, routes.rows_put, bytes_each)

    def _agreement(self) -> Agreement:
        weights = self._topk_weights
        return Agreement(
            "combine",
            num_topk=weights.size(1) if weights is not None else 0,
            hidden=self._x.size(1),
            dtype=self._x.dtype,
            handle=int(self._handle.recv_rdma_channel_prefix_matrix[0, 0]),
        )

    def _collect(self, call: Call, routes: Routes, staging: Staging | None) -> tuple[list[list[torch.Tensor]], int]:
        """Where the rows of the node's ranks lie, for each section: theirs, or, of staged ranks, copies made in rounds.

        Returns:
            The tables, and the number of rounds.
        """
        offers, sections, rank = call.offers(), self._sections(), self._window.rank
        tables = [call.peer_rows(offers, index, part.size(1), part.dtype) for index, part in enumerate(sections)]
        is_staged = [offer.is_staged for offer in offers]
        if not any(is_staged):
            return tables, 0
        counts = read_passed_on(call)
        slots, numbers = staged_slots(self._handle, is_staged)
        routes.blocks = list(torch.maximum(slots, numbers).split(routes.num_in))
        copies = {
            local: [self._chain.result((counts[rank][local], part.size(1)), part.dtype) for part in sections]
            for local, staged in enumerate(is_staged)
            if staged
        }
        sources, rounds = rows_by_source(self._handle, self._topology), num_rounds(counts, offers)
        for index in range(rounds):
            if staging is not None:
                copy_out(staging, sections, sources, index, reverse=True)
            if staging is not None or index:
                call.signal(READY + 2 * index)
            call.wait(READY + 2 * index)
            for local, rows in copies.items():
                self._copy_lane(offers[local], index, rows, [table[local] for table in tables])
            call.signal(TAKEN + 2 * index)
            call.wait(TAKEN + 2 * index)
        return [
            [copies[local][section] if local in copies else rows for local, rows in enumerate(table)]
            for section, table in enumerate(tables)
        ], rounds

    def _copy_lane(self, offer: Offer, index: int, copies: list[torch.Tensor], staged: list[torch.Tensor]) -> None:
        """Take this rank's lane of a staged rank."""
        size = self._topology.ranks_per_node
        start = self._window.rank * offer.lane_rows(size)
        for rows, lanes in zip(copies, staged, strict=True):
            first, last = lane_of(offer, rows.size(0), index, size)
            rows[first:last].copy_(lanes[start : start + last - first])

    def _sum_nodes(self, call: Call, routes: Routes, tables: list[list[torch.Tensor]], taken: int) -> None:
        """Sum inside the node for every node, exchange the sums, add them up. `taken` is the step of having read."""
        sections = self._sections()
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
        with call.slice("sum own node", RECEIVE):
            pack(own, 0, routes.num_in[own], sums[own])
        traffic.finish_packing()
        call.signal(taken)
        traffic.finish()
        with call.slice("add up", RECEIVE):
            self._add_up(sums)

    def _add_up(self, sums: list[list[torch.Tensor]]) -> None:
        """Biases, then nodes ascending."""
        assert self._combined is not None
        outs, biases = [self._combined.x, self._combined.topk_weights], [self._biases, ()]
        for index, (out, bias) in enumerate(zip(outs, biases, strict=True)):
            if out is not None:
                parts = [total[index] for total in sums]
                reduce_rows(out, parts, self._handle.send_rdma_head, [0] * len(parts), bias)
