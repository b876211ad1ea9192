"""Dispatch across nodes: a token crosses to a node once, and is written there straight into its final rows.

The rank of the rail that receives a token computes its slot at every rank of the node from counts that were exchanged
before, over the rail and then inside the node. See `docs/protocol.md` for the steps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from functools import partial

import torch

from .... import layout
from ....config import Config
from ....handle import RailHandle, check_rail_rows, require_filled
from ....kernels.rows import Section, SlotRange, put_rows, row_bytes, rows_as, widest_view
from ....trace import SEND
from ....transport.links import VERDICT, Pieces
from ...ops import Counts, Sections
from ...payload import Payload, Routing, Unpacked, agreement_of, outgoing_parts, section_columns
from ...protocol import ANNOUNCED, OFFERED, READY, Header, Offer, overflow
from ...staging import round_slots
from ..call import Call
from ..dispatch import CpuDispatch, run_rounds
from ..scope import CpuScope
from .announce import (
    Announcement,
    announcement_to,
    receive_announcements,
    require_rows,
    require_topic,
    send_announcement,
    spoiled,
)
from .chain import CpuNodesChain
from .hops import FanOut, Packer
from .rounds import copy_out, forwarded, num_rounds, read_forwarded, rows_by_source, staged_slots
from .routes import CpuNodesRoutes
from .traffic import ChunkForm, Chunks, Traffic

_TILES = 4  # that are put before the network is looked after again
_TILE_BYTES = 1 << 19  # of rows: read once from memory, then from a core's cache for every further rank
_OVERFLOW = struct.Struct("<3q")  # rank, rows, num_worst_tokens


class CpuNodesDispatch(CpuDispatch):
    """One dispatch of one rank, over two hops.

    Args:
        chain: The calls of the buffer, of which this is the next.
        operation: One of `protocol.OPERATIONS`.
        payload: What this rank sends.
        routing: Where it goes; None: where a handle says.
        config: How rows are cut into messages.
    """

    def __init__(
        self,
        chain: CpuNodesChain,
        operation: str,
        payload: Payload,
        routing: Routing | None,
        config: Config | None = None,
    ):
        super().__init__(chain, operation, payload, routing)
        self._rails = chain
        self._topology = chain.topology
        self._config = config
        self._routes: CpuNodesRoutes | None = None
        self._prefix: torch.Tensor | None = None  # [R, P] int32, what this node's ranks receive
        self._tables: list[list[torch.Tensor]] = []
        self._fan_outs: dict[int, FanOut] = {}  # by node, its block
        self._held: list[torch.Tensor] = []  # if a rank is staged: the rows to forward, for each section
        self._numbers: torch.Tensor | None = None
        self._announcements: dict[int, Announcement] = {}  # by node, what its rank of the rail sends to this node
        self._returned_head: torch.Tensor | None = None  # the caller's `send_nvl_head`

    # By the caller ---------------------------------------------------------------------------------------------------

    def outputs(
        self, scope: CpuScope, routing: Routing, routes: None, sections: Sections, num_channels: int
    ) -> Unpacked:
        """Allocate ids and weights, see `CpuDispatch`."""
        unpacked = super().outputs(scope, routing, routes, sections, num_channels)
        self._returned_head = unpacked.handle.send_nvl_head
        return unpacked

    def _check_rows(self, handle: RailHandle) -> None:
        check_rail_rows(handle, "dispatch")

    def _make_handle(self, num_rows: int) -> RailHandle:
        assert self._routing is not None
        mask, topology = self._routing.is_token_in_rank, self._topology
        num_channels, num_nodes, num_ranks = self._num_channels, topology.num_nodes, topology.num_ranks
        new, zeros = mask.new_empty, mask.new_zeros
        # A worst-case dispatch makes its handle before it has the counts: it forwards at most what its node receives.
        num_forwarded = self._num_worst_tokens * topology.ranks_per_node or self._num_forwarded()
        return RailHandle(
            is_token_in_rank=mask,
            rdma_channel_prefix_matrix=new(num_nodes, num_channels, dtype=torch.int32),
            gbl_channel_prefix_matrix=zeros(num_ranks, num_channels, dtype=torch.int32),
            recv_rdma_channel_prefix_matrix=zeros(num_nodes, num_channels, dtype=torch.int32),
            recv_rdma_rank_prefix_sum=new(num_nodes, dtype=torch.int32),
            recv_gbl_channel_prefix_matrix=zeros(num_ranks, num_channels, dtype=torch.int32),
            recv_gbl_rank_prefix_sum=new(num_ranks, dtype=torch.int32),
            recv_src_meta=new(num_rows, 8, dtype=torch.uint8),
            send_rdma_head=new(mask.size(0), num_nodes, dtype=torch.int32),
            send_nvl_head=new(num_forwarded, topology.ranks_per_node, dtype=torch.int32),
        )

    def _num_forwarded(self) -> int:
        return sum(announcement.num_rows for announcement in self._announcements.values())

    # On the comm stream ----------------------------------------------------------------------------------------------

    def _check_counts(self) -> None:
        """Check that the caller's counts match its mask, per rank and per node."""
        if self._routing is None or self._counts:
            return
        super()._check_counts()
        mask, told = self._routing.is_token_in_rank, self._routing.num_tokens_per_node
        assert told is not None
        seen = mask.unflatten(1, (self._topology.num_nodes, -1)).any(2).sum(0).tolist()
        if seen != told.tolist():
            self._counts = []
            raise ValueError(
                "dispatch: `num_tokens_per_rdma_rank` must count the tokens of `is_token_in_rank` for each node, "
                f"got {told.tolist()}, there are {seen}"
            )

    def _exchange_counts(self, scope: CpuScope) -> None:
        """Announce a full dispatch to the rail and then to the node, and receive the counts of the rows that will
        come.
        """
        self._announce(scope)
        call = scope.call
        call.signal(ANNOUNCED)
        call.wait(ANNOUNCED)
        call.headers()
        self._prefix = self._read_counts(call)
        expert_counts = self._local_expert_counts(call)
        call.note(experts=expert_counts)
        self._told = Counts(self._prefix.tolist()[-1], expert_counts, fits=False)  # nothing was offered

    def _move_rows(self, scope: CpuScope, sections: Sections) -> None:
        """Send this rank's rows, forward those that come over the rail, and wait for the rows of this node's ranks."""
        call = scope.call
        if self._num_worst_tokens:
            call.wait(OFFERED)
            self._prefix = self._agreed_counts(call)
            self._note_experts(call)
        if self._routing is not None:
            with call.slice("find slots", SEND):
                self._fill_rail_handle(call)
        routes = self._routes = CpuNodesRoutes(self._handle, self._topology)
        if self._routing is None:
            require_rows(call, self._rails.rail, self._announcements, routes.num_in)
        outgoing = outgoing_parts(self._payload, self._routing)
        traffic = self._traffic(call, routes, outgoing)
        # The first chunks travel while the ranks of the node make their offers.
        traffic.start()
        call.wait(OFFERED)
        call.headers()
        offers = call.offers()
        self._open(call, offers, outgoing, routes)
        traffic.finish()
        rounds = self._put_staged(call, offers, sections) if self._held else 0
        # Rounds signal `READY`, and wait for it, themselves.
        if not rounds:
            call.signal(READY)
            call.wait(READY)
        self._num_rounds = max(1, rounds)
        if self._routing is None:  # else there is something to unpack, and the call ends with that
            self._count(sections)

    def _announce(self, scope: CpuScope) -> None:
        """Begin the call: exchange announcements with the rail, and write the header for the node."""
        self._check_counts()
        self._leave_scratch()
        handle, rail, topology, number = self._handle, self._rails.rail, self._topology, 0
        num_out: list[int] = []
        if self._routing is None:
            require_filled(handle, "dispatch")
            number = int(handle.recv_rdma_channel_prefix_matrix[0, 0])
            num_out = (handle.send_rdma_head >= 0).sum(0).tolist()
        agreement = agreement_of(self._operation, self._payload, self._routing, number)
        call = scope.begin(Header(agreement, self._payload.x.size(0), self._num_worst_tokens))
        # All are sent before any is waited for, so no two ranks wait for each other.
        for node in [*rail.nodes, topology.node]:
            if self._routing is not None:
                announcement = announcement_to(self._routing, node, topology.num_nodes)
            else:
                announcement = Announcement(num_out[node])
            if node == topology.node:
                self._announcements[node] = announcement
            else:
                send_announcement(rail, call, node, announcement)
        self._receive_all(call)
        self._post_header(call)

    def _receive_all(self, call: Call) -> None:
        """Receive the announcements of the rail."""
        num_experts = self._routing.num_experts // self._topology.num_nodes if self._routing is not None else 0
        wait, size = self._rails.waiting(call), self._topology.ranks_per_node
        self._announcements.update(receive_announcements(self._rails.rail, wait, call, size, num_experts))

    def _post_header(self, call: Call) -> None:
        """Write the header for the node: the rows that this rank will forward, and the rail's selections of this node's
        experts.
        """
        if self._routing is None:
            call.post_header(forwarded(self._handle))
            return
        announcements = [self._announcements[node] for node in range(self._topology.num_nodes)]
        counts = [one.num_tokens for one in announcements if one.num_tokens is not None]
        selected = [one.num_selected for one in announcements if one.num_selected is not None]
        call.post_header(torch.cat(counts), torch.stack(selected).sum(0, dtype=torch.int32))

    def _read_counts(self, call: Call) -> torch.Tensor:
        """[R, P] int32, rows that each rank of this node receives from the group's ranks up to another."""
        num_ranks, size = self._topology.num_ranks, self._topology.ranks_per_node
        # A peer has posted, for each node, the rows that the rank of its rail there sends to each rank of this node.
        sent = [peer.board.read_values(call.epoch, 0, num_ranks) for peer in self._window.peers]
        counts = torch.tensor(sent, device="cpu")
        counts = counts.to(torch.int32).view(size, -1, size).transpose(0, 1)
        return layout.rank_prefix_matrix(counts.reshape(num_ranks, size))

    def _agreed_counts(self, call: Call) -> torch.Tensor:
        """Return the counts of a worst-case dispatch, if the rows fit on every rank.

        All nodes exchange whether they do.
        """
        headers, first = call.headers(), self._window.group_ranks.first_rank
        prefix = self._read_counts(call)
        rows = zip(headers, prefix.tolist()[-1], strict=True)
        seen = [
            (first + local, num_rows, header.num_worst_tokens)
            for local, (header, num_rows) in enumerate(rows)
            if num_rows > header.num_worst_tokens
        ]
        rail, wait = self._rails.rail, self._rails.waiting(call)
        # Also where all rows fit: no rank sends rows before it knows that they fit everywhere.
        for node in rail.nodes:
            rail.send(node, VERDICT, call.epoch, rail.pool.filled(_OVERFLOW.pack(*seen[0]) if seen else b""))
        for node in rail.nodes:
            frame = rail.receive(node, wait)
            require_topic(call, rail, node, frame, VERDICT)
            if frame.page.num_bytes not in (0, _OVERFLOW.size):
                raise spoiled(call, rail, node, f"a verdict of {frame.page.num_bytes} bytes")
            if frame.page.num_bytes:
                seen.append(_OVERFLOW.unpack(frame.page.view()))
            rail.pool.give(frame.page)
        if seen:
            self._mark_refused()
            # The lowest of all nodes' lowest: all ranks name the same one.
            rank, num_rows, limit = min(seen)
            raise overflow(rank, num_rows, limit, rail.me())
        return prefix

    def _fill_rail_handle(self, call: Call) -> None:
        """Fill the handle, except for the source indices, which come with the rows."""
        assert self._routing is not None
        assert self._prefix is not None
        handle, prefix, topology = self._handle, self._prefix, self._topology
        assert isinstance(handle, RailHandle)
        size, mask = topology.ranks_per_node, self._routing.is_token_in_rank
        announcements = [self._announcements[node] for node in range(topology.num_nodes)]
        slots = [
            layout.token_slots(one.mask, prefix, node * size + topology.local_rank)
            for node, one in enumerate(announcements)
            if one.mask is not None
        ]
        forwarded = torch.cat(slots)
        if forwarded.size(0) <= handle.send_nvl_head.size(0):
            handle.send_nvl_head[: forwarded.size(0)].copy_(forwarded)
            handle.send_nvl_head[forwarded.size(0) :].fill_(-1)
        else:  # a peer has a larger `num_worst_tokens`. The caller may have the handle, so its tensor stays
            assert self._returned_head is not None
            _replace(self._returned_head, forwarded)
            handle = self._handle = handle._replace(send_nvl_head=forwarded)
        handle.recv_rdma_channel_prefix_matrix.fill_(self._rails.mark(call.epoch))
        handle.recv_rdma_rank_prefix_sum.copy_(prefix.new_tensor([one.num_rows for one in announcements]).cumsum(0))
        received = prefix[:, topology.local_rank]
        handle.recv_gbl_rank_prefix_sum.copy_(received)
        in_node = mask.unflatten(1, (topology.num_nodes, size)).any(2)
        # As if for rank 0, to whose slots nothing is added: positions among this rank's own tokens.
        handle.send_rdma_head.copy_(layout.token_slots(in_node, prefix, 0))
        handle.rdma_channel_prefix_matrix.copy_(in_node.sum(0)[:, None])
        num_rows = received.tolist()[-1]
        sources = torch.arange(topology.num_ranks, dtype=torch.int32, device=prefix.device)
        counts = received.diff(prepend=received.new_zeros(1))
        handle.recv_src_rank[:num_rows].copy_(sources.repeat_interleave(counts.long()))

    # Rows ------------------------------------------------------------------------------------------------------------

    def _traffic(self, call: Call, routes: CpuNodesRoutes, outgoing: Sequence[torch.Tensor]) -> Traffic:
        rail = self._rails.rail
        rows = [rows_as(part, widest_view(part)) for part in outgoing]
        tokens = {node: routes.tokens_to(node) for node in rail.nodes}
        names = {node: one.tolist() for node, one in tokens.items()}
        form = ChunkForm([(part.size(1), part.dtype) for part in rows])
        packer = Packer(rows, form, rail.pool)

        def pack(node: int, first: int, last: int) -> Pieces:
            return packer.pack(tokens[node][first:last], names[node][first:last])

        def take(node: int, first: int, last: int, views: list[torch.Tensor]) -> None:
            self._fan_outs[node].put(first, last, views)
            before = sum(routes.num_in[:node])
            for held, view in zip(self._held, views, strict=False):
                held[before + first : before + last].copy_(rows_as(view, held.dtype))

        chunks, wait = Chunks.of(self._config, form.row_bytes), self._rails.waiting(call)
        spare, sizes = self._put_own(outgoing, routes), (routes.num_out, routes.num_in)
        return Traffic(rail, wait, call.epoch, form, chunks, *sizes, pack, take, spare, "fan out")

    def _open(self, call: Call, offers: list[Offer], outgoing: Sequence[torch.Tensor], routes: CpuNodesRoutes) -> None:
        """Open the memory in which the ranks of the node receive rows: tensors for each section."""
        self._tables = [list(self._rows(call, offers, index, part).peers) for index, part in enumerate(outgoing)]
        is_staged = [offer.is_staged for offer in offers]
        if any(is_staged):
            slots, self._numbers = staged_slots(self._handle, is_staged)
            # Rows for staged ranks are not written as they come: they are held, and put in rounds.
            routes.blocks = list(slots.split(routes.num_in))
            # All rows that this rank forwards, until they have gone through staging.
            shapes = [(slots.size(0), table[0].size(1), table[0].dtype) for table in self._tables]
            self._held = [self._chain.result((count, columns), dtype) for count, columns, dtype in shapes]
        rank = self._window.rank
        self._fan_outs = {node: FanOut(routes.blocks[node], self._tables, rank) for node in self._rails.rail.nodes}

    def _put_own(self, outgoing: Sequence[torch.Tensor], routes: CpuNodesRoutes) -> Iterator[None]:
        """Write this rank's rows to the ranks of its own node, a tile at a time."""
        own = self._topology.node
        tokens = routes.tokens_to(own)
        fan_out = FanOut(routes.blocks[own], self._tables, self._window.rank, tokens)
        tile = max(1, _TILE_BYTES // max(1, row_bytes(outgoing[0])))
        for index, first in enumerate(range(0, tokens.numel(), tile)):
            fan_out.put(first, first + tile, outgoing)
            if index % _TILES == _TILES - 1:
                yield
        first = sum(routes.num_in[:own])
        for held, part in zip(self._held, outgoing, strict=False):
            torch.index_select(rows_as(part, held.dtype), 0, tokens, out=held[first : first + tokens.numel()])

    def _put_staged(self, call: Call, offers: list[Offer], sections: Sections) -> int:
        """Put the rows for staged ranks round by round: put, signal, wait, copy out. Returns the number of rounds."""
        numbers = self._numbers
        assert numbers is not None
        size, rank, staging = len(offers), self._window.rank, self._staging
        counts = self._counts_by_source(call)
        held = [Section(rows, table) for rows, table in zip(self._held, self._tables, strict=True)]
        sources = rows_by_source(self._handle, self._topology)
        rounds = num_rounds(counts, offers)

        def put(index: int) -> None:
            ranges = [
                round_slots(offer, (0, count), index, rank, size) if offer.is_staged else SlotRange(0, 0, 0)
                for offer, count in zip(offers, counts[rank], strict=True)
            ]
            with call.slice("put rows", SEND, round=index):
                put_rows(held, numbers, ranges, first_peer=rank)

        copy = None if staging is None else partial(copy_out, staging, sections.parts(), sources, reverse=False)
        run_rounds(call, rounds, put, copy)
        return rounds

    def _counts_by_source(self, call: Call) -> list[list[int]]:
        """`[i][d]` rows that local rank i forwards to local rank d."""
        if self._prefix is None:
            return read_forwarded(call)
        counts = self._prefix.diff(dim=0, prepend=self._prefix.new_zeros(1, self._prefix.size(1)))
        size = self._topology.ranks_per_node
        return counts.view(-1, size, size).sum(0).tolist()

    def _num_received(self) -> int:
        return self._handle.recv_gbl_rank_prefix_sum.tolist()[-1]

    def _count(self, sections: Sections) -> None:
        """Count the finished call."""
        assert self._routes is not None
        columns, routes = section_columns(self._payload, self._routing), self._routes
        bytes_each = sum(count * dtype.itemsize for count, dtype in columns)
        path = "staged" if sections.rows_per_source else "direct"
        self._chain.stats.count("dispatch", path, self._num_rounds, routes.rows_put, routes.rows_got, bytes_each)


def _replace(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor another shape, without incrementing the version counter of autograd."""
    with torch.inference_mode(tensor.is_inference()):  # a tensor stays what it was made as
        tensor.data = torch.empty_like(value).copy_(value)
