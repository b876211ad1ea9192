"""Dispatch across nodes: a token crosses to a node once, and is written there straight into its final rows.

The rank of the rail that receives a token knows its slot at every rank of the node, from counts that were exchanged
before: over the rail, and then inside the node. See `docs/protocol.md` for the steps.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import torch

from ... import layout
from ...config import Config
from ...errors import EPOverflow
from ...handle import RailHandle, require_filled
from ...kernels.rows import Lane, Section, put_rows, row_bytes, rows_as, widest_dtype
from ...trace import RECEIVE, SEND
from ...transport.links import VERDICT, Pieces
from ..call import ANNOUNCED, OFFERED, READY, TAKEN, Call, Header, Offer
from ..dispatch import Dispatch
from ..parcel import Payload, Received, Routing, agreement_of, outgoing_parts, section_columns, unpack_records
from ..staging import Staging
from .announce import (
    Announcement,
    announcement_to,
    receive_announcements,
    require_rows,
    require_topic,
    send_announcement,
    spoiled,
)
from .chain import RailChain
from .hops import FanOut, Packer
from .rounds import copy_out, lane_of, num_rounds, passed_on, read_passed_on, rows_by_source, staged_slots
from .routes import Routes
from .traffic import ChunkForm, Chunks, Traffic

_TILES = 4  # that are put before the network is looked after again
_TILE_BYTES = 1 << 19  # of rows: read once from memory, then from a core's cache for every further rank
_OVERFLOW = struct.Struct("<3q")  # rank, rows, num_worst_tokens


class RailsDispatch(Dispatch):
    """One dispatch of one rank, over two hops.

    Args:
        chain: The calls of the buffer, of which this is the next.
        payload: What this rank sends.
        routing: Where it goes; None: where `handle` says.
        handle: The handle of an earlier dispatch.
        num_worst_tokens: Rows to make room for; 0: as many as come.
        num_channels: Columns of the handle's unused items.
        config: How rows are cut into messages.
    """

    def __init__(
        self,
        chain: RailChain,
        payload: Payload,
        routing: Routing | None = None,
        handle: RailHandle | None = None,
        num_worst_tokens: int = 0,
        num_channels: int = 1,
        config: Config | None = None,
    ):
        super().__init__(chain, payload, routing, handle, num_worst_tokens, num_channels)
        self._rails = chain
        self._topology = chain.topology
        self._config = config
        self._prefix: torch.Tensor | None = None  # [R, P] int32, what this node's ranks receive
        self._tables: list[list[torch.Tensor]] = []
        self._fan_outs: dict[int, FanOut] = {}  # by node, its block
        self._held: list[torch.Tensor] = []  # where somebody is staged: the rows to pass on, for each section
        self._numbers: torch.Tensor | None = None
        self._said: dict[int, Announcement] = {}  # by node, what its rank of the rail sends to this node
        self._returned_head: torch.Tensor | None = None  # the caller's `send_nvl_head`

    # By the caller ---------------------------------------------------------------------------------------------------

    def make_room(self, num_rows: int, is_async: bool = False) -> Received:
        """Allocate everything that the call returns, see `Dispatch`."""
        received = super().make_room(num_rows, is_async)
        self._returned_head = received.handle.send_nvl_head
        return received

    def _room_handle(self, num_rows: int) -> RailHandle:
        if self._handle is not None:
            return self._handle
        assert self._routing is not None
        mask, topology = self._routing.is_token_in_rank, self._topology
        num_channels, num_nodes, num_ranks = self._num_channels, topology.num_nodes, topology.num_ranks
        new, zeros = mask.new_empty, mask.new_zeros
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
            # Of a size that the counts tell. A worst-case dispatch makes its handle before it knows them.
            send_nvl_head=new(self._num_passed_on(), topology.ranks_per_node, dtype=torch.int32),
        )

    def _num_passed_on(self) -> int:
        return sum(said.num_rows for said in self._said.values())

    # On the comm stream ----------------------------------------------------------------------------------------------

    def check_counts(self) -> None:
        """The caller's counts must be those of its mask, per rank and per node."""
        if self._routing is None or self._counts:
            return
        super().check_counts()
        mask, told = self._routing.is_token_in_rank, self._routing.num_tokens_per_node
        assert told is not None
        seen = mask.unflatten(1, (self._topology.num_nodes, -1)).any(2).sum(0).tolist()
        if seen != told.tolist():
            self._counts = []
            raise ValueError(
                "dispatch: `num_tokens_per_rdma_rank` must count the tokens of `is_token_in_rank` for each node, "
                f"got {told.tolist()}, there are {seen}"
            )

    def exchange_counts(self) -> tuple[int, list[int]]:
        """Announce a full dispatch, to the rail and then to the node, and learn what comes.

        Returns:
            The number of rows, and the selections of each local expert.
        """
        call = self._announce("dispatch")
        self._hear(call)
        self._post_header(call)
        call.signal(ANNOUNCED)
        call.wait(ANNOUNCED)
        call.headers()
        self._prefix = self._read_counts(call)
        expert_counts = self._local_expert_counts(call)
        call.note(experts=expert_counts)
        return self._prefix.tolist()[-1][self._window.rank], expert_counts

    def move_rows(self) -> None:
        """Offer the room, send this rank's rows, pass on those of the rail, wait for the node's."""
        assert self._received is not None
        call = self.call
        if call is None:
            call = self._announce("cached dispatch" if self._handle is not None else "worst-case dispatch")
            self._hear(call)
            self._post_header(call)
        staging = self._offer(call)
        if self._num_worst_tokens:
            call.wait(OFFERED)
            self._prefix = self._agreed_counts(call)
            self._note_experts(call)
        if self._handle is None:
            with call.slice("find slots", SEND):
                self._fill_rail_handle(call)
        routes = Routes(self._received.handle, self._topology)
        if self._handle is not None:
            require_rows(call, self._rails.rail, self._said, routes.num_in)
        outgoing = outgoing_parts(self._payload, self._routing)
        traffic = self._traffic(call, routes, outgoing)
        traffic.start()
        call.wait(OFFERED)
        call.headers()
        offers = call.offers()
        self._open(call, offers, outgoing, routes)
        traffic.finish()
        rounds = self._put_in_lanes(call, offers, staging) if self._held else 0
        if not rounds:
            call.signal(READY)
            call.wait(READY)
        with call.slice("unpack", RECEIVE):
            self._unpack()
        self._end(routes, max(1, rounds))

    def _announce(self, operation: str) -> Call:
        """Begin the call, and tell the rail."""
        self.check_counts()
        handle, rail, topology = self._handle, self._rails.rail, self._topology
        if handle is not None:
            require_filled(handle, "dispatch")
        number = int(handle.recv_rdma_channel_prefix_matrix[0, 0]) if handle is not None else 0
        agreement = agreement_of(operation, self._payload, self._routing, number)
        self.is_begun = True
        call = self.call = self._chain.begin(Header(agreement, self._payload.x.size(0), self._num_worst_tokens))
        num_out = (handle.send_rdma_head >= 0).sum(0).tolist() if handle is not None else []
        for node in [*rail.nodes, topology.node]:
            if self._routing is not None:
                said = announcement_to(self._routing, node, topology.num_nodes)
            else:
                said = Announcement(num_out[node])
            if node == topology.node:
                self._said[node] = said
            else:
                send_announcement(rail, call, node, said)
        return call

    def _hear(self, call: Call) -> None:
        """What the rail sends to this node."""
        num_experts = self._routing.num_experts // self._topology.num_nodes if self._routing is not None else 0
        wait, size = self._rails.waiting(call), self._topology.ranks_per_node
        self._said.update(receive_announcements(self._rails.rail, wait, call, size, num_experts))

    def _post_header(self, call: Call) -> None:
        """Tell the node, too: what this rank will pass on, and what the rail selected of the node's experts."""
        if self._routing is None:
            call.post_header(passed_on(self._handle))
            return
        said = [self._said[node] for node in range(self._topology.num_nodes)]
        counts = [one.num_tokens for one in said if one.num_tokens is not None]
        selected = [one.num_selected for one in said if one.num_selected is not None]
        call.post_header(torch.cat(counts), torch.stack(selected).sum(0, dtype=torch.int32))

    def _read_counts(self, call: Call) -> torch.Tensor:
        """[R, P] int32, rows that each rank of this node receives from the group's ranks up to another."""
        num_ranks, size = self._topology.num_ranks, self._topology.ranks_per_node
        # A peer has posted, for each node, what the rank of its rail there sends to each rank of this node.
        counts = torch.tensor([peer.board.read_values(call.epoch, 0, num_ranks) for peer in self._window.peers])
        counts = counts.to(torch.int32).view(size, -1, size).transpose(0, 1)
        return layout.rank_prefix_matrix(counts.reshape(num_ranks, size))

    def _local_expert_counts(self, call: Call) -> list[int]:
        assert self._routing is not None
        num_local = self._routing.num_experts // self._topology.num_ranks
        start = self._topology.num_ranks + self._window.rank * num_local
        counts = [peer.board.read_values(call.epoch, start, start + num_local) for peer in self._window.peers]
        return list(map(sum, zip(*counts, strict=True)))

    def _agreed_counts(self, call: Call) -> torch.Tensor:
        """The counts of a worst-case dispatch, if they fit everywhere: all nodes tell each other."""
        headers, first = call.headers(), self._window.place.first_rank
        prefix = self._read_counts(call)
        rows = zip(headers, prefix.tolist()[-1], strict=True)
        seen = [
            (first + local, num_rows, header.num_worst_tokens)
            for local, (header, num_rows) in enumerate(rows)
            if num_rows > header.num_worst_tokens
        ]
        rail, wait = self._rails.rail, self._rails.waiting(call)
        for node in rail.nodes:
            rail.send(node, VERDICT, call.epoch, rail.pool.filled(_OVERFLOW.pack(*seen[0]) if seen else b""))
        for node in rail.nodes:
            frame = rail.receive(node, wait)
            require_topic(call, rail, node, frame, VERDICT)
            if frame.page.num_bytes not in (0, _OVERFLOW.size):
                raise spoiled(call, rail, node, f"a verdict of {frame.page.num_bytes} bytes")
            if frame.page.num_bytes:
                seen.append(_OVERFLOW.unpack(frame.page.view()))
        if seen:
            self._mark_refused()
            rank, num_rows, limit = min(seen)
            raise EPOverflow(
                f"dispatch: rank {rank} receives {num_rows} rows, more than its num_worst_tokens={limit} "
                f"(rank {self._topology.rank}/{self._topology.num_ranks}). "
                "Raise num_worst_tokens; tokens x ranks always suffices"
            )
        return prefix

    def _fill_rail_handle(self, call: Call) -> None:
        """All but the source indices, which come with the rows."""
        assert self._received is not None
        assert self._routing is not None
        assert self._prefix is not None
        handle, prefix, topology = self._received.handle, self._prefix, self._topology
        assert isinstance(handle, RailHandle)
        size, mask = topology.ranks_per_node, self._routing.is_token_in_rank
        said = [self._said[node] for node in range(topology.num_nodes)]
        slots = [
            layout.token_slots(one.mask, prefix, node * size + topology.local_rank)
            for node, one in enumerate(said)
            if one.mask is not None
        ]
        passed_on = torch.cat(slots)
        if passed_on.shape == handle.send_nvl_head.shape:
            handle.send_nvl_head.copy_(passed_on)
        else:  # a worst-case dispatch, whose caller may have the handle already: it stays the caller's tensor
            assert self._returned_head is not None
            _replace(self._returned_head, passed_on)
            handle = self._received.handle = handle._replace(send_nvl_head=self._returned_head)
        handle.recv_rdma_channel_prefix_matrix.fill_(self._rails.mark(call.epoch))
        handle.recv_rdma_rank_prefix_sum.copy_(prefix.new_tensor([one.num_rows for one in said]).cumsum(0))
        received = prefix[:, topology.local_rank]
        handle.recv_gbl_rank_prefix_sum.copy_(received)
        in_node = mask.unflatten(1, (topology.num_nodes, size)).any(2)
        handle.send_rdma_head.copy_(layout.token_slots(in_node, prefix, 0))
        handle.rdma_channel_prefix_matrix.copy_(in_node.sum(0)[:, None])
        num_rows = received.tolist()[-1]
        sources = torch.arange(topology.num_ranks, dtype=torch.int32, device=prefix.device)
        counts = received.diff(prepend=received.new_zeros(1))
        handle.recv_src_rank[:num_rows].copy_(sources.repeat_interleave(counts.long()))

    # Rows ------------------------------------------------------------------------------------------------------------

    def _traffic(self, call: Call, routes: Routes, outgoing: Sequence[torch.Tensor]) -> Traffic:
        rail = self._rails.rail
        rows = [rows_as(part, widest_dtype(row_bytes(part), _place(part), part.data_ptr())) for part in outgoing]
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

    def _open(self, call: Call, offers: list[Offer], outgoing: Sequence[torch.Tensor], routes: Routes) -> None:
        """Look where the ranks of the node take rows: tensors for each section, in the widest elements that fit."""
        self._tables = []
        for index, part in enumerate(outgoing):
            width = row_bytes(part)
            offsets = [base.offset for offer in offers if (base := offer.bases[index]) is not None]
            dtype = widest_dtype(width, _place(part), part.data_ptr(), *offsets)
            self._tables.append(call.peer_rows(offers, index, width // dtype.itemsize, dtype))
        is_staged = [offer.is_staged for offer in offers]
        if any(is_staged):
            assert self._received is not None
            slots, self._numbers = staged_slots(self._received.handle, is_staged)
            routes.blocks = list(slots.split(routes.num_in))
            # All rows that this rank passes on, until the lanes have taken them.
            shapes = [(slots.size(0), table[0].size(1), table[0].dtype) for table in self._tables]
            self._held = [self._chain.result((count, columns), dtype) for count, columns, dtype in shapes]
        rank = self._window.rank
        self._fan_outs = {node: FanOut(routes.blocks[node], self._tables, rank) for node in self._rails.rail.nodes}

    def _put_own(self, outgoing: Sequence[torch.Tensor], routes: Routes) -> Iterator[None]:
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

    def _put_in_lanes(self, call: Call, offers: list[Offer], staging: Staging | None) -> int:
        """Every round: put what goes to staged ranks, tell, wait, copy out. Returns the number of rounds."""
        assert self._received is not None
        assert self._numbers is not None
        size, rank = len(offers), self._window.rank
        counts = self._counts_by_source(call)
        sections = [Section(held, table) for held, table in zip(self._held, self._tables, strict=True)]
        sources = rows_by_source(self._received.handle, self._topology)
        rounds = num_rounds(counts, offers)
        for index in range(rounds):
            lanes = []
            for local, offer in enumerate(offers):
                first, last = lane_of(offer, counts[rank][local], index, size) if offer.is_staged else (0, 0)
                lanes.append(Lane(first, last, rank * offer.lane_rows(size) - first if last > first else 0))
            with call.slice("put rows", SEND, round=index):
                put_rows(sections, self._numbers, lanes, first_peer=rank)
            call.signal(READY + 2 * index)
            call.wait(READY + 2 * index)
            if staging is not None:
                with call.slice("copy out", RECEIVE, round=index):
                    copy_out(staging, self._received.parts(), sources, index, reverse=False)
            if index + 1 < rounds:
                call.signal(TAKEN + 2 * index)
                call.wait(TAKEN + 2 * index)
        return rounds

    def _counts_by_source(self, call: Call) -> list[list[int]]:
        """`[i][d]` rows that local rank i passes on to local rank d."""
        if self._prefix is None:
            return read_passed_on(call)
        counts = self._prefix.diff(dim=0, prepend=self._prefix.new_zeros(1, self._prefix.size(1)))
        size = self._topology.ranks_per_node
        return counts.view(-1, size, size).sum(0).tolist()

    def _unpack(self) -> None:
        assert self._received is not None
        if self._routing is not None:
            num_rows = self._received.handle.recv_gbl_rank_prefix_sum.tolist()[-1]
            num_local = self._routing.num_experts // self._topology.num_ranks
            unpack_records(self._received, num_rows, self._topology.rank, num_local)

    def _end(self, routes: Routes, rounds: int) -> None:
        assert self._received is not None
        columns = section_columns(self._payload, self._routing)
        bytes_each = sum(count * dtype.itemsize for count, dtype in columns)
        path = "staged" if self._received.is_staged else "direct"
        self._chain.stats.count("dispatch", path, rounds, routes.rows_put, routes.rows_got, bytes_each)
        self._tables, self._held, self._fan_outs = [], [], {}


def _replace(tensor: torch.Tensor, value: torch.Tensor) -> None:
    """Give a tensor another shape, without a change that autograd counts."""
    with torch.inference_mode(tensor.is_inference()):  # a tensor stays what it was made as
        tensor.data = torch.empty_like(value).copy_(value)


def _place(part: torch.Tensor) -> int:
    return int(part.storage_offset()) * part.element_size()
