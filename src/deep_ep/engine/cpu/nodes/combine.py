"""Combine across nodes: a token's rows are summed inside each node, and one row a node goes back over the rail.

The rank that forwarded a token in dispatch sums its rows in FP32, by ascending local rank, and rounds; the token's own
rank adds the biases and then the nodes' sums, in ascending order. See `docs/protocol.md` for the steps, and for what
the second rounding changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch

from ....config import Config
from ....handle import check_rail_rows, require_filled
from ....kernels.reduce import RowSums, tokens_per_unit
from ....sizing import ceil_div
from ....trace import RECEIVE, SEND
from ....transport.links import Page
from ...protocol import OFFERED, READY, TAKEN, Header, Offer
from ...staging import Staging, round_rows
from ..call import Call
from ..combine import CpuCombine
from ..scope import CpuScope
from .announce import Announcement, receive_announcements, require_rows, send_announcement
from .chain import CpuNodesChain
from .rounds import copy_out, forwarded, num_rounds, read_forwarded, rows_by_source, staged_slots
from .routes import CpuNodesRoutes
from .totals import Totals
from .traffic import ChunkForm, Chunks, Traffic

_UNITS = 4  # that are summed before the network is looked after again


class CpuNodesCombine(CpuCombine):
    """One combine of one rank, over two hops.

    Args:
        chain: The calls of the buffer, of which this is the next.
        parts: What to give back, see `CpuCombine`.
        biases: [T, H] tensors that are added first.
        config: How rows are cut into messages.
    """

    def __init__(
        self,
        chain: CpuNodesChain,
        parts: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
        config: Config | None,
    ):
        super().__init__(chain, parts, biases)
        self._rails = chain
        self._topology = chain.topology
        self._config = config
        self._routes: CpuNodesRoutes | None = None

    def _check_rows(self, handle: Any) -> None:
        check_rail_rows(handle, "combine")

    def _offer_rows(self, scope: CpuScope) -> None:
        """Announce the combine, to the rail and to the node, and offer this rank's rows."""
        self._leave_scratch()
        require_filled(self._handle, "combine")
        call = scope.begin(Header(self._agreement(), self._handle.num_tokens))
        routes, rail = CpuNodesRoutes(self._handle, self._topology), self._rails.rail
        self._routes = routes
        for node in rail.nodes:
            send_announcement(rail, call, node, Announcement(routes.num_in[node]))
        call.post_header(forwarded(self._handle))
        with call.slice("provide rows", SEND):
            source = self._source = self._find_rows(self._handle.recv_gbl_rank_prefix_sum.tolist()[-1])
        call.post_offer(source.offer)
        # Rows that lie ready need no second signal; staged ones come when all offers, and so the rounds, are known.
        call.signal(READY if source.staging is None else OFFERED)

    def _sum_rows(self, scope: CpuScope) -> None:
        """Sum the rows of the rail's tokens, send the sums, add up what comes back."""
        assert self._source is not None
        assert self._routes is not None
        call, routes, source, rail = scope.call, self._routes, self._source, self._rails.rail
        wait, size = self._rails.waiting(call), self._topology.ranks_per_node
        require_rows(call, rail, receive_announcements(rail, wait, call, size), routes.num_out)
        call.wait(OFFERED)
        call.headers()
        tables, rounds = self._collect(call, routes, source.staging)
        # Rows that were pulled are read until the sums are made: one step after the rounds.
        self._sum_nodes(call, routes, tables, TAKEN + 2 * rounds)
        call.wait(TAKEN + 2 * rounds)
        bytes_each = sum(self._widths())
        self._chain.stats.count("combine", source.path, max(1, rounds), routes.rows_got, routes.rows_put, bytes_each)

    def _handle_number(self) -> int:
        return int(self._handle.recv_rdma_channel_prefix_matrix[0, 0])

    def _collect(
        self, call: Call, routes: CpuNodesRoutes, staging: Staging | None
    ) -> tuple[list[list[torch.Tensor]], int]:
        """Where the rows of the node's ranks lie, for each section: theirs, or, of staged ranks, copies made in rounds.

        Returns:
            The tables, and the number of rounds.
        """
        offers, sections, rank = call.offers(), self._parts, self._window.rank
        tables = self._tables(call, offers)
        is_staged = [offer.is_staged for offer in offers]
        if not any(is_staged):
            return tables, 0
        counts = read_forwarded(call)
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
                self._copy_staged(offers[local], index, rows, [table[local] for table in tables])
            call.signal(TAKEN + 2 * index)
            call.wait(TAKEN + 2 * index)
        return [
            [copies[local][section] if local in copies else rows for local, rows in enumerate(table)]
            for section, table in enumerate(tables)
        ], rounds

    def _copy_staged(self, offer: Offer, index: int, copies: list[torch.Tensor], staged: list[torch.Tensor]) -> None:
        """Copy this rank's rows out of its part of a staged rank's staging."""
        size = self._topology.ranks_per_node
        start = self._window.rank * offer.rows_per_source(size)
        for rows, theirs in zip(copies, staged, strict=True):
            first, last = round_rows(offer, rows.size(0), index, size)
            rows[first:last].copy_(theirs[start : start + last - first])

    def _sum_nodes(self, call: Call, routes: CpuNodesRoutes, tables: list[list[torch.Tensor]], taken: int) -> None:
        """Sum inside the node for every node, exchange the sums, add them up.

        `taken` is the step that says that the rows have been read.
        """
        sections, shifts = self._parts, [0] * self._topology.ranks_per_node
        form, pool = ChunkForm([(part.size(1), part.dtype) for part in sections]), self._rails.rail.pool
        unit = tokens_per_unit(sections[0].size(1), sections[0].dtype)
        chunks, wait, rail = Chunks.of(self._config, form.row_bytes, unit), self._rails.waiting(call), self._rails.rail
        # A part of a sum begins with -0.0, which changes no number and no sign when the nodes' sums are added.
        make = partial(RowSums, scratch=self._chain.scratch, unit=chunks.num_rows, is_part=True)
        blocks = [[make(table, block, shifts) for table in tables] for block in routes.blocks]
        totals = self._totals(routes)

        def pack(node: int, first: int, last: int) -> Page:
            page = pool.take(form.num_bytes(last - first))
            for sums, view in zip(blocks[node], form.views(page.tensor(), last - first), strict=True):
                sums.sum(view, first)
            # A rank that fails sets its failure word before its caller overwrites its rows. The sums are right if none
            # has failed by now. Other nodes could not detect it, and would complete their calls with wrong sums.
            self._window.raise_if_peer_failed(call.epoch, call.operation)
            return page

        def sum_own() -> Iterator[None]:
            # Whole chunks: sums are planned for multiples of one.
            own, count = self._topology.node, chunks.num_rows * ceil_div(_UNITS * unit, chunks.num_rows)
            for first in range(0, routes.num_in[own], count):
                last = min(first + count, routes.num_in[own])
                for sums, out in zip(blocks[own], totals.target(own, first, last), strict=True):
                    sums.sum(out, first)
                totals.note_arrived(own, last)
                yield

        def take(node: int, first: int, last: int, views: list[torch.Tensor]) -> None:
            for view, out in zip(views, totals.target(node, first, last), strict=True):
                out.copy_(view)
            totals.note_arrived(node, last)

        traffic = Traffic(rail, wait, call.epoch, form, chunks, routes.num_in, routes.num_out, pack, take, sum_own())
        traffic.start()
        traffic.finish_packing()
        # All rows of this node are in sums now. Their ranks need not wait for the network.
        call.signal(taken)
        traffic.finish()
        with call.slice("add up the rest", RECEIVE):
            totals.finish()

    def _totals(self, routes: CpuNodesRoutes) -> Totals:
        sections = list(zip(self._sums, (self._biases, ()), strict=False))
        return Totals(self._chain, routes, self._handle.send_rdma_head, sections)
