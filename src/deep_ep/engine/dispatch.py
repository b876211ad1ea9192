"""Dispatch inside one node: rows go straight from the sender to where they stay.

Everyone learns from the headers who sends how much to whom, so everyone knows every slot; each receiver offers the
memory in which its tensors will live, and the senders write there. See `docs/protocol.md` for the steps.
"""

from __future__ import annotations

from typing import Any

import torch

from .. import layout
from ..errors import EPOverflow
from ..kernels.rows import Section, as_bytes, put_rows, row_bytes, rows_as, widest_dtype
from ..transport import ordinary_tensor
from .call import ANNOUNCED, OFFERED, READY, TAKEN, Call, Chain, Header, Offer, checksum
from .parcel import (
    Payload,
    Received,
    Routing,
    agreement_of,
    empty_handle,
    empty_topk,
    outgoing_parts,
    section_columns,
    unpack_records,
)
from .staging import Blocks, Staging, dispatch_lane, num_dispatch_rounds, token_blocks


class Dispatch:
    """One dispatch of one rank.

    Full: `exchange_counts` on the comm stream, `make_room` by the caller who now knows how many rows come,
    `move_rows` on the comm stream. Worst case and cached: `make_room` first, then `move_rows`, which announces and
    offers at once.

    Args:
        chain: The calls of the buffer, of which this is the next.
        payload: What this rank sends.
        routing: Where it goes; None: where `handle` says.
        handle: The handle of an earlier dispatch.
        num_worst_tokens: Rows to make room for; 0: as many as come.
        num_channels: Columns of the handle's unused items.

    Attributes:
        call: The call, once it is announced.
    """

    def __init__(
        self,
        chain: Chain,
        payload: Payload,
        routing: Routing | None = None,
        handle: Any = None,
        num_worst_tokens: int = 0,
        num_channels: int = 1,
    ):
        self._chain = chain
        self._window = chain.window
        self._payload = Payload(
            self._window.out_of_scratch(payload.x),
            self._window.out_of_scratch(payload.scales) if payload.scales is not None else None,
        )
        self._routing = routing
        self._handle: Any = handle
        self._num_worst_tokens = num_worst_tokens
        self._num_channels = num_channels
        self._has_checked_counts = False
        self._prefix: torch.Tensor | None = None
        self._received: Received | None = None
        self.call: Call | None = None

    # By the caller ---------------------------------------------------------------------------------------------------

    def make_room(self, num_rows: int) -> Received:
        """Allocate everything that the call returns: rows in the arena, or elsewhere if it cannot hold them."""
        allocate, is_staged = self._window.arena.allocate, False
        columns = section_columns(self._payload, self._routing)
        rooms = [allocate((num_rows, count), dtype) for count, dtype in columns]
        if any(room is None for room in rooms):
            is_staged = True
            self._chain.warn_staged("dispatch")
            rooms = [ordinary_tensor((num_rows, count), dtype) for count, dtype in columns]
        x = rooms.pop(0)
        assert x is not None
        scales = rooms.pop(0) if self._payload.scales is not None else None
        records = rooms.pop(0) if self._routing is not None else None
        topk_idx, topk_weights = empty_topk(self._routing, num_rows)
        self._received = Received(x, scales, records, topk_idx, topk_weights, self._room_handle(num_rows), is_staged)
        return self._received

    def _room_handle(self, num_rows: int) -> Any:
        if self._handle is not None:
            return self._handle
        assert self._routing is not None
        mask = self._routing.is_token_in_rank
        no_channels = mask.new_zeros(mask.size(1), self._num_channels, dtype=torch.int32)
        return empty_handle(self._routing, num_rows, no_channels)

    # On the comm stream ----------------------------------------------------------------------------------------------

    def exchange_counts(self) -> tuple[int, list[int]]:
        """Announce a full dispatch and learn what comes.

        Returns:
            The number of rows, and the selections of each local expert.
        """
        call = self._announce("dispatch")
        call.signal(ANNOUNCED)
        call.wait(ANNOUNCED)
        call.headers()
        self._prefix = self._read_counts(call)
        return self._prefix.tolist()[-1][self._window.rank], self._local_expert_counts(call)

    def move_rows(self) -> None:
        """Offer the room, put this rank's rows into the peers', wait for theirs."""
        assert self._received is not None
        call = self.call or self._announce("cached dispatch" if self._handle else "worst-case dispatch")
        staging = self._offer(call)
        outgoing = outgoing_parts(self._payload, self._routing)  # while the peers make their offers
        call.wait(OFFERED)
        prefix = self._agreed_prefix(call)
        slots = self._slots(prefix)
        offers, blocks = call.offers(), token_blocks(prefix)
        num_rounds = num_dispatch_rounds(offers, blocks)
        sections = [self._section(call, offers, index, part) for index, part in enumerate(outgoing)]
        self._put_in_rounds(call, offers, sections, slots, blocks, staging, num_rounds)
        self._unpack(num_rows=blocks[-1][self._window.rank][1])
        self._count(num_rounds, blocks)

    def _announce(self, operation: str) -> Call:
        self.check_counts()
        routing, handle = self._routing, self._handle
        number = checksum(handle.rank_prefix_matrix) if handle is not None else 0
        agreement = agreement_of(operation, self._payload, routing, number)
        call = self.call = self._chain.begin(Header(agreement, self._payload.x.size(0), self._num_worst_tokens))
        if routing is None:
            call.post_header()
        else:
            call.post_header(routing.num_tokens_per_rank, routing.num_tokens_per_expert)
        return call

    def check_counts(self) -> None:
        """The caller's counts must be those of its mask, else peers would wait for rows that never come."""
        if self._routing is None or self._has_checked_counts:
            return
        seen = self._routing.is_token_in_rank.sum(0).tolist()
        told = self._routing.num_tokens_per_rank.tolist()
        if seen != told:
            raise ValueError(
                "dispatch: `num_tokens_per_rank` must be the column sums of `is_token_in_rank`, "
                f"got {told}, the sums are {seen}"
            )
        self._has_checked_counts = True

    def _agreed_prefix(self, call: Call) -> torch.Tensor:
        """The call's `rank_prefix_matrix`, when all headers agree: before, nothing else in them is believed."""
        if self._prefix is not None:
            return self._prefix  # a full dispatch compared them when it learned the counts
        headers = call.headers()
        if self._handle is not None:
            return self._handle.rank_prefix_matrix
        prefix = self._read_counts(call)
        self._check_room(headers, prefix)
        return prefix

    def _slots(self, prefix: torch.Tensor) -> torch.Tensor:
        """The row of every token at every destination, which a new handle gets too."""
        assert self._received is not None
        handle: Any = self._received.handle
        if self._routing is not None:
            slots = layout.token_slots(self._routing.is_token_in_rank, prefix, self._window.rank)
            handle.rank_prefix_matrix.copy_(prefix)
            handle.send_head.copy_(slots)
        return handle.send_head

    def _read_counts(self, call: Call) -> torch.Tensor:
        num_ranks = len(self._window.peers)
        counts = [peer.board.read_values(call.epoch, 0, num_ranks) for peer in self._window.peers]
        return layout.rank_prefix_matrix(torch.stack(counts))

    def _local_expert_counts(self, call: Call) -> list[int]:
        assert self._routing is not None
        num_ranks = len(self._window.peers)
        num_local = self._routing.num_experts // num_ranks
        start = num_ranks + self._window.rank * num_local
        counts = [peer.board.read_values(call.epoch, start, start + num_local) for peer in self._window.peers]
        return torch.stack(counts).sum(0).tolist()

    def _check_room(self, headers: list[Header], prefix: torch.Tensor) -> None:
        for rank, (header, num_rows) in enumerate(zip(headers, prefix.tolist()[-1], strict=True)):
            if 0 < header.num_worst_tokens < num_rows:
                raise EPOverflow(
                    f"dispatch: rank {rank} receives {num_rows} rows, more than its "
                    f"num_worst_tokens={header.num_worst_tokens} (rank {self._window.rank}/{len(headers)}). "
                    "Raise num_worst_tokens; tokens x ranks always suffices"
                )

    def _offer(self, call: Call) -> Staging | None:
        assert self._received is not None
        parts, staging = self._received.parts(), None
        if self._received.is_staged:
            staging = Staging(self._window, [row_bytes(part) for part in parts])
            call.post_offer(staging.offer)
        else:
            bases = tuple(self._window.arena.base_of(part) if part.numel() else None for part in parts)
            call.post_offer(Offer(self._received.x.size(0), False, bases))
        call.signal(OFFERED)
        return staging

    def _put_in_rounds(
        self,
        call: Call,
        offers: list[Offer],
        sections: list[Section],
        slots: torch.Tensor,
        blocks: Blocks,
        staging: Staging | None,
        num_rounds: int,
    ) -> None:
        """Every round: put, tell, wait, copy out of staging. One round where nobody is staged."""
        rank, num_ranks = self._window.rank, len(offers)
        for index in range(num_rounds):
            lanes = [
                dispatch_lane(offer, blocks[rank][peer], index, rank, num_ranks) for peer, offer in enumerate(offers)
            ]
            put_rows(sections, slots, lanes, first_peer=rank)
            call.signal(READY + 2 * index)
            call.wait(READY + 2 * index)
            if staging is not None:
                self._copy_out(staging, [blocks[source][rank] for source in range(num_ranks)], index)
            if index + 1 < num_rounds:
                call.signal(TAKEN + 2 * index)
                call.wait(TAKEN + 2 * index)

    def _section(self, call: Call, offers: list[Offer], index: int, part: torch.Tensor) -> Section:
        """One kind of rows, and where the peers take them, in the widest elements that fit."""
        width = row_bytes(part)
        bases = [offer.bases[index] for offer in offers]
        place = int(part.storage_offset()) * part.element_size()
        dtype = widest_dtype(width, place, part.data_ptr(), *(base.offset for base in bases if base is not None))
        return Section(rows_as(part, dtype), call.peer_rows(offers, index, width // dtype.itemsize, dtype))

    def _copy_out(self, staging: Staging, blocks: list[tuple[int, int]], index: int) -> None:
        assert self._received is not None
        lane = staging.offer.lane_rows(len(blocks))
        for source, (start, stop) in enumerate(blocks):
            first, last = min(start + index * lane, stop), min(start + (index + 1) * lane, stop)
            for part, staged in zip(self._received.parts(), staging.sections, strict=True):
                as_bytes(part)[first:last] = staged[source * lane : source * lane + last - first]

    def _unpack(self, num_rows: int) -> None:
        assert self._received is not None
        if self._routing is not None:
            num_local = self._routing.num_experts // len(self._window.peers)
            unpack_records(self._received, num_rows, self._window.rank, num_local)

    def _count(self, num_rounds: int, blocks: Blocks) -> None:
        assert self._received is not None
        rank = self._window.rank
        rows_to = [stop - start for start, stop in blocks[rank]]
        rows_from = [stop - start for start, stop in (row[rank] for row in blocks)]
        row_bytes = sum(count * dtype.itemsize for count, dtype in section_columns(self._payload, self._routing))
        path = "staged" if self._received.is_staged else "direct"
        self._chain.stats.count("dispatch", path, num_rounds, rows_to, rows_from, row_bytes)
