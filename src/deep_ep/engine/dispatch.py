"""Dispatch inside one node: rows go straight from the sender to where they stay.

Everyone learns from the headers who sends how much to whom, so everyone knows every slot; each receiver offers the
memory in which its tensors will live, and the senders write there. Rows of a small call lie on the senders' boards
beside their headers, and are fetched. See `docs/protocol.md` for the steps.
"""

from __future__ import annotations

from itertools import accumulate
from operator import add
from typing import Any

import torch

from .. import layout
from ..errors import EPOverflow
from ..handle import mark_refused, require_filled
from ..kernels.rows import Section, as_bytes, lay_rows, put_rows, row_bytes, rows_as, widest_dtype
from ..trace import RECEIVE, SEND
from ..transport import ordinary_tensor
from .call import ANNOUNCED, OFFERED, READY, TAKEN, Call, Chain, Header, Offer, checksum
from .parcel import (
    Payload,
    Received,
    Routing,
    agreement_of,
    empty_handle,
    empty_topk,
    make_local,
    outgoing_parts,
    posted_parts,
    section_columns,
    unpack_records,
)
from .posted import Block, fetch_rows, post_rows, section_starts
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
        is_begun: It may have been announced.
        is_complete: It has ended well.
        is_cancelled: It waits in the queue, and is taken out of it if its caller leaves.
        is_foreign: What it was to come after has failed, which is none of this buffer's calls.
    """

    is_begun = is_complete = is_cancelled = is_foreign = False

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
        self._counts: list[int] = []  # tokens for each peer
        self._ends: list[list[int]] = []  # the call's `rank_prefix_matrix`
        self._is_posted = False
        self._received: Received | None = None
        self.call: Call | None = None

    # By the caller ---------------------------------------------------------------------------------------------------

    def make_room(self, num_rows: int, is_async: bool = False) -> Received:
        """Allocate everything that the call returns: rows in the arena, or elsewhere if it cannot hold them.

        Args:
            num_rows: n.
            is_async: The caller has it before it is filled.
        """
        has_records = self._routing is not None and not self._is_posted
        columns = section_columns(self._payload, self._routing if has_records else None)
        rooms = [self._window.arena.allocate((num_rows, count), dtype) for count, dtype in columns]
        is_staged = any(room is None for room in rooms)
        if is_staged:
            rooms = [ordinary_tensor((num_rows, count), dtype) for count, dtype in columns]
        x = rooms.pop(0)
        assert x is not None
        scales = rooms.pop(0) if self._payload.scales is not None else None
        records = rooms.pop(0) if has_records else None
        topk_idx, topk_weights = empty_topk(self._routing, num_rows)
        received = Received(x, scales, records, topk_idx, topk_weights, self._room_handle(num_rows), is_staged)
        self._received = received
        if is_async:
            self._received = received.apart()
            if self._handle is not None:  # not written, and the dispatch that fills it may still replace a tensor of it
                self._received.handle = self._handle
        return received

    def _room_handle(self, num_rows: int) -> Any:
        if self._handle is not None:
            return self._handle
        assert self._routing is not None
        mask = self._routing.is_token_in_rank
        no_channels = mask.new_zeros(mask.size(1), self._num_channels, dtype=torch.int32)
        if not self._ends:  # they come with the counts
            return empty_handle(self._routing, num_rows, no_channels)
        prefix = mask.new_tensor(self._ends, dtype=torch.int32)
        slots = layout.token_slots(mask, prefix, self._window.rank)
        return empty_handle(self._routing, num_rows, no_channels, prefix, slots)

    # On the comm stream ----------------------------------------------------------------------------------------------

    def exchange_counts(self) -> tuple[int, list[int]]:
        """Announce a full dispatch and learn what comes.

        Returns:
            The number of rows, and the selections of each local expert.
        """
        call = self._announce("dispatch")
        call.signal(ANNOUNCED)
        call.wait(ANNOUNCED)
        self._agree(call)
        expert_counts = self._local_expert_counts(call)
        call.note(experts=expert_counts)
        return self._ends[-1][self._window.rank], expert_counts

    def move_rows(self) -> None:
        """Offer the room, put this rank's rows into the peers', wait for theirs. Posted rows are only fetched."""
        call, is_full = self.call, self.call is not None
        if call is None:
            call = self._announce("cached dispatch" if self._handle else "worst-case dispatch")
        outgoing, staging = [], None
        if not self._is_posted:
            staging = self._offer(call)
            with call.slice("prepare rows", SEND):
                outgoing = outgoing_parts(self._payload, self._routing)  # while the peers make their offers
            call.wait(OFFERED)
        if not is_full:
            self._agree(call)
            if self._handle is None:
                self._fill_handle()
                self._note_experts(call)
        blocks = token_blocks(self._ends)
        if self._is_posted:
            num_rounds = 1
            with call.slice("fetch rows", RECEIVE):
                self._fetch_rows(call, blocks)
        else:
            num_rounds = self._put_in_rounds(call, outgoing, blocks, staging)
            with call.slice("unpack", RECEIVE):
                self._unpack()
        self._count(num_rounds, blocks)

    def _announce(self, operation: str) -> Call:
        """Write the header, and, if they are few, this rank's rows beside it."""
        self.check_counts()
        routing, handle, number = self._routing, self._handle, 0
        if handle is not None:
            require_filled(handle, "dispatch")
            self._ends = handle.rank_prefix_matrix.tolist()
            number = checksum(self._ends)
            self._counts = [stop - start for start, stop in token_blocks(self._ends)[self._window.rank]]
            is_sent = handle.send_head >= 0
        else:
            assert routing is not None
            is_sent = routing.is_token_in_rank
        agreement = agreement_of(operation, self._payload, routing, number)
        parts, num_sent = posted_parts(self._payload, routing), sum(self._counts)
        is_posted = section_starts(num_sent, [row_bytes(part) for part in parts])[-1] <= self._chain.posted_bytes
        header = Header(agreement, self._payload.x.size(0), self._num_worst_tokens, is_posted)
        self.is_begun = True
        call = self.call = self._chain.begin(header)
        if is_posted:
            with call.slice("post rows", SEND, rows=num_sent):
                post_rows(call, num_sent, lay_rows(parts, is_sent, self._counts))
        if routing is None:
            call.post_header()
        else:
            call.post_header(routing.num_tokens_per_rank, routing.num_tokens_per_expert)
        return call

    def check_counts(self) -> None:
        """The caller's counts must be those of its mask, else peers would wait for rows that never come."""
        if self._routing is None or self._counts:
            return
        seen = self._routing.is_token_in_rank.sum(0).tolist()
        told = self._routing.num_tokens_per_rank.tolist()
        if seen != told:
            raise ValueError(
                "dispatch: `num_tokens_per_rank` must be the column sums of `is_token_in_rank`, "
                f"got {told}, the sums are {seen}"
            )
        least = int(self._routing.num_tokens_per_expert.amin())
        if least < 0:
            raise ValueError(f"dispatch: `num_tokens_per_expert` must not be negative, it has a {least}")
        self._counts = told

    def _agree(self, call: Call) -> None:
        """Compare the headers: before, nothing else in them is believed. Then learn from them what comes."""
        headers = call.headers()
        self._is_posted = all(header.is_posted for header in headers)
        if self._routing is not None:
            num_ranks = len(headers)
            counts = [peer.board.read_values(call.epoch, 0, num_ranks) for peer in self._window.peers]
            self._ends = list(accumulate(counts, lambda ends, row: list(map(add, ends, row))))
            self._check_room(headers)

    def _fill_handle(self) -> None:
        """Fill what a worst-case dispatch did not know when it made room."""
        assert self._received is not None
        assert self._routing is not None
        handle, mask = self._received.handle, self._routing.is_token_in_rank
        prefix = handle.rank_prefix_matrix.copy_(mask.new_tensor(self._ends, dtype=torch.int32))
        handle.send_head.copy_(layout.token_slots(mask, prefix, self._window.rank))

    def _local_expert_counts(self, call: Call) -> list[int]:
        assert self._routing is not None
        num_ranks = len(self._window.peers)
        num_local = self._routing.num_experts // num_ranks
        start = num_ranks + self._window.rank * num_local
        counts = [peer.board.read_values(call.epoch, start, start + num_local) for peer in self._window.peers]
        return list(map(sum, zip(*counts, strict=True)))

    def _note_experts(self, call: Call) -> None:
        """A trace shows the load of the experts, also where the caller does not learn it."""
        if self._window.trace is not None:
            call.note(experts=self._local_expert_counts(call))

    def _check_room(self, headers: list[Header]) -> None:
        for rank, (header, num_rows) in enumerate(zip(headers, self._ends[-1], strict=True)):
            if 0 < header.num_worst_tokens < num_rows:
                self._mark_refused()
                raise EPOverflow(
                    f"dispatch: rank {rank} receives {num_rows} rows, more than its "
                    f"num_worst_tokens={header.num_worst_tokens} ({self._window.me()}). "
                    "Raise num_worst_tokens; tokens x ranks always suffices"
                )

    def _mark_refused(self) -> None:
        """Have later calls know that no rows came by this handle, which the caller may have already."""
        if self._received is not None:
            mark_refused(self._received.handle)

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

    def _fetch_rows(self, call: Call, blocks: Blocks) -> None:
        """Take what the ranks posted for this one, in the order of the ranks. A rank posts in that order, too."""
        assert self._received is not None
        rank, num_rows = self._window.rank, self._ends[-1][self._window.rank]
        counts = [[stop - start for start, stop in row] for row in blocks]
        theirs = [Block(sum(row), sum(row[:rank]), row[rank]) for row in counts]
        fetch_rows(call, theirs, self._received.posted_parts(self._routing is not None))
        self._received.records = None  # room for the worst case, made before it was known that all rows are posted
        if self._routing is not None:
            make_local(self._received, num_rows, rank, self._routing.num_experts // len(blocks))

    def _put_in_rounds(
        self,
        call: Call,
        outgoing: list[torch.Tensor],
        blocks: Blocks,
        staging: Staging | None,
    ) -> int:
        """Every round: put, tell, wait, copy out of staging. One round where nobody is staged. Returns their number."""
        assert self._received is not None
        slots = self._received.handle.send_head
        if staging is not None:
            self._chain.warn_staged("dispatch")
        offers = call.offers()
        num_rounds = num_dispatch_rounds(offers, blocks)
        sections = [self._section(call, offers, index, part) for index, part in enumerate(outgoing)]
        rank, num_ranks = self._window.rank, len(offers)
        for index in range(num_rounds):
            lanes = [
                dispatch_lane(offer, blocks[rank][peer], index, rank, num_ranks) for peer, offer in enumerate(offers)
            ]
            with call.slice("put rows", SEND, rows=[lane.end - lane.begin for lane in lanes]):
                put_rows(sections, slots, lanes, first_peer=rank)
            call.signal(READY + 2 * index)
            call.wait(READY + 2 * index)
            if staging is not None:
                with call.slice("copy out", RECEIVE, round=index):
                    self._copy_out(staging, [blocks[source][rank] for source in range(num_ranks)], index)
            if index + 1 < num_rounds:
                call.signal(TAKEN + 2 * index)
                call.wait(TAKEN + 2 * index)
        return num_rounds

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

    def _unpack(self) -> None:
        assert self._received is not None
        rank = self._window.rank
        if self._routing is not None:
            num_local = self._routing.num_experts // len(self._window.peers)
            unpack_records(self._received, self._ends[-1][rank], rank, num_local)

    def _count(self, num_rounds: int, blocks: Blocks) -> None:
        assert self._received is not None
        rank = self._window.rank
        rows_to = [stop - start for start, stop in blocks[rank]]
        rows_from = [stop - start for start, stop in (row[rank] for row in blocks)]
        row_bytes = sum(count * dtype.itemsize for count, dtype in section_columns(self._payload, self._routing))
        path = "posted" if self._is_posted else "staged" if self._received.is_staged else "direct"
        self._chain.stats.count("dispatch", path, num_rounds, rows_to, rows_from, row_bytes)
