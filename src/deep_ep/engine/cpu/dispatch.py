"""The steps of a dispatch on the CPU, inside one node: rows go straight from the sender to where they stay.

From the headers, every rank computes how many rows each rank sends to each other rank, and from that every slot; each
receiver offers the memory in which its tensors will live, and the senders write there. Rows of a small call lie on the
senders' boards beside their headers, and are fetched. See `docs/protocol.md` for the protocol.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import add
from typing import Any

import torch

from ... import layout
from ...handle import Handle, check_rows, is_refused, mark_refused, require_filled
from ...kernels.rows import Section, SlotRange, as_bytes, lay_rows, put_rows, row_bytes, rows_as, widest_view
from ...trace import RECEIVE, SEND
from ...transport import ordinary_tensor
from ..ops import NO_SECTIONS, Counts, Sections, received_of
from ..payload import (
    DispatchResult,
    Payload,
    Routing,
    Unpacked,
    agreement_of,
    apart,
    empty_topk,
    make_local,
    outgoing_parts,
    posted_parts,
    section_columns,
    unpack_records,
)
from ..protocol import ANNOUNCED, OFFERED, READY, TAKEN, Agreement, Header, Offer, handle_number, overflow
from ..staging import Blocks, Staging, num_staged_rounds, round_rows, round_slots, rows_per_source, token_blocks
from .call import Call, Chain
from .posted import Block, fetch_rows, post_rows, section_starts
from .scope import CpuScope

_MOST_NUMBER = (1 << 31) - 2  # of a handle, whose items are int32


class CpuDispatch:
    """The steps of one dispatch, see `ops.DispatchSteps`.

    Args:
        chain: The calls of the buffer, of which this is the next.
        operation: One of `protocol.OPERATIONS`.
        payload: What this rank sends.
        routing: Where it goes; None: where a handle says.
    """

    def __init__(self, chain: Chain, operation: str, payload: Payload, routing: Routing | None):
        self._chain = chain
        self._window = chain.window
        self._operation = operation
        self._is_full = operation == "dispatch"
        self._payload = payload
        self._routing = routing
        self._num_channels = 0  # columns of the handle's unused items
        self._number = 0  # which the new handle carries in them, see `handle_number`
        self._num_worst_tokens = 0  # rows of memory that was made beforehand; 0: as many as come
        self._counts: list[int] = []  # tokens for each peer
        self._ends: list[list[int]] = []  # the call's `rank_prefix_matrix`
        self._told: Counts | None = None
        self._is_posted = False
        self._num_rounds = 1
        self._handle: Any = None  # that is followed, or filled
        self._unpacked: Unpacked | None = None  # what is filled beside the rows
        self._staging: Staging | None = None  # through which rows come if the arena has no memory for them

    # By the caller ---------------------------------------------------------------------------------------------------

    def route(self, scope: CpuScope, routing: Routing, num_channels: int, num_rows: int) -> None:
        """Make the handle that will be filled, if its number of rows is known already."""
        self._num_channels, self._num_worst_tokens = num_channels, num_rows
        if not self._is_full:
            if not scope.is_under_way():  # otherwise the layout may not be filled yet: see `_announce`
                self._check_counts()
            self._handle = self._make_handle(num_rows)

    def follow(self, scope: CpuScope, handle: Any) -> None:
        """Check the rows of a handle, unless the dispatch that fills it may still be running or was refused."""
        if not scope.is_under_way() and not is_refused(handle):
            self._check_rows(handle)
        self._handle = handle

    def guess(self) -> Sections:
        """Return no guess: on the CPU, the host has the counts as soon as they arrive."""
        return NO_SECTIONS

    def memory(self, scope: CpuScope, num_rows: int) -> Sections:
        """Memory for the rows: in the arena, or elsewhere if it cannot hold them. Posted rows need no records."""
        columns = self._columns()
        arena = self._window.arena
        parts = [arena.allocate((num_rows, count), dtype) for count, dtype in columns]
        source_rows = 0
        if any(part is None for part in parts):
            # All of them, also those that the arena can hold: an offer is staging as a whole, or not at all.
            parts = [ordinary_tensor((num_rows, count), dtype) for count, dtype in columns]
            row_bytes = sum(count * dtype.itemsize for count, dtype in columns)
            source_rows = rows_per_source(len(self._window.peers), row_bytes, arena.limit_bytes)
        x = parts.pop(0)
        scales = parts.pop(0) if self._payload.scales is not None else None
        return Sections(x, scales, parts.pop(0) if parts else None, num_rows, source_rows, ())

    def notify(
        self, scope: CpuScope, payload: Payload, routing: Routing | None, routes: None, sections: Sections
    ) -> None:
        """Exchange counts, or write header and offer, which are waited for with the rows."""
        if self._is_full:
            scope.launch(partial(self._exchange_counts, scope))
        else:
            scope.launch(partial(self._announce, scope))
            scope.launch(partial(self._offer, scope, sections))

    def outputs(
        self, scope: CpuScope, routing: Routing, routes: None, sections: Sections, num_channels: int
    ) -> Unpacked:
        """Allocate ids and weights; the handle is there already."""
        topk_idx, topk_weights = empty_topk(routing, sections.num_rows)
        unpacked = self._unpacked = Unpacked(self._handle, topk_idx, topk_weights)
        if not scope.order.is_async:
            return unpacked
        # The mask is the caller's own tensor, which the call does not write.
        handle = type(self._handle)(*apart(self._handle))._replace(is_token_in_rank=routing.is_token_in_rank)
        return Unpacked(handle, *apart((topk_idx, topk_weights)))

    def move(
        self,
        scope: CpuScope,
        payload: Payload,
        routing: Routing | None,
        routes: None,
        sections: Sections,
        unpacked: Unpacked | None,
    ) -> None:
        """Put this rank's rows into the peers' memory, wait for theirs, and split the records. Posted rows are only
        fetched.
        """
        if sections.x is not None:
            scope.launch(partial(self._move_rows, scope, sections))
            if routing is not None:
                scope.launch(partial(self._unpack, scope, sections))

    def counts(self, scope: CpuScope, routing: Routing) -> Counts:
        """Exchange counts with the peers, and wait for theirs."""
        scope.run()
        assert self._told is not None
        return self._told

    def grow(self, told: Counts) -> None:
        """Do nothing: the arena of a CPU rank grows when memory is allocated."""

    def rerouted(self, scope: CpuScope, routes: None, told: Counts, routing: Routing) -> None:
        """Make the handle, now that its number of rows is known."""
        self._handle = self._make_handle(told.num_rows[self._window.rank])

    def offer(self, scope: CpuScope, payload: Payload, routes: None, sections: Sections) -> None:
        """Offer the memory to the peers. Posted rows are fetched by the receiver, and need no offer."""
        if not self._is_posted:
            scope.launch(partial(self._offer, scope, sections))

    def received(
        self, routes: None, sections: Sections, unpacked: Unpacked, num_rows: int, told: Counts | None
    ) -> DispatchResult:
        """Return the first `num_rows` rows, and the handle."""
        return received_of(sections, num_rows, unpacked.topk_idx, unpacked.topk_weights, unpacked.handle)

    def _columns(self) -> list[tuple[int, torch.dtype]]:
        """Return columns and dtype of each section. Posted rows need no records."""
        # Only a full dispatch knows this before it makes memory.
        return section_columns(self._payload, None if self._is_posted else self._routing)

    def _outgoing(self) -> list[torch.Tensor]:
        """Return the rows of each section that this rank sends."""
        return outgoing_parts(self._payload, self._routing)

    def _agreement(self, number: int) -> Agreement:
        return agreement_of(self._operation, self._payload, self._routing, number)

    def _can_post(self, num_rows: int, parts: Sequence[torch.Tensor]) -> bool:
        """Return whether this rank's rows are few enough to be posted on its board."""
        return section_starts(num_rows, [row_bytes(part) for part in parts])[-1] <= self._chain.posted_bytes

    def _check_rows(self, handle: Any) -> None:
        check_rows(handle, self._window.rank, "dispatch")

    def _make_handle(self, num_rows: int) -> Any:
        """Make the handle of a dispatch that receives so many rows; a worst-case one is filled later."""
        assert self._routing is not None
        mask = self._routing.is_token_in_rank
        (num_tokens, num_ranks), new = mask.shape, mask.new_empty
        no_channels = mask.new_full((num_ranks, self._num_channels), self._number, dtype=torch.int32)
        source_idx = new(num_rows, dtype=torch.int32)
        if self._ends:
            prefix = mask.new_tensor(self._ends, dtype=torch.int32)
            slots = layout.token_slots(mask, prefix, self._window.rank)
        else:  # they come with the counts
            prefix, slots = new(num_ranks, num_ranks, dtype=torch.int32), new(num_tokens, num_ranks, dtype=torch.int32)
        return Handle(prefix, no_channels, no_channels, source_idx, mask, slots)

    # On the comm stream ----------------------------------------------------------------------------------------------

    def _exchange_counts(self, scope: CpuScope) -> None:
        """Announce a full dispatch, and receive the counts of the rows that will come."""
        self._announce(scope)
        call = scope.call
        call.signal(ANNOUNCED)
        call.wait(ANNOUNCED)
        headers = self._agree(call)
        expert_counts = self._local_expert_counts(call)
        call.note(experts=expert_counts)
        assert self._routing is not None
        max_tokens = max(header.max_tokens for header in headers)
        self._told = Counts(self._ends[-1], expert_counts, fits=False, max_tokens=max_tokens)  # nothing was offered

    def _move_rows(self, scope: CpuScope, sections: Sections) -> None:
        """Put rows in rounds, or fetch posted rows."""
        call, outgoing = scope.call, []
        # A full dispatch knows by now whether all have posted; others know it behind the wait.
        if not self._is_posted:
            with call.slice("prepare rows", SEND):
                outgoing = self._outgoing()  # while the peers make their offers
            call.wait(OFFERED)
        if not self._is_full:
            self._agree(call)
            if self._routing is not None:
                self._fill_handle()
                self._note_experts(call)
        blocks = token_blocks(self._ends)
        if self._is_posted:
            with call.slice("fetch rows", RECEIVE):
                self._fetch_rows(call, blocks, sections)
        else:
            self._num_rounds = self._put_in_rounds(call, outgoing, blocks, sections)
        if self._routing is None:  # else there is something to unpack, and the call ends with that
            self._count(sections)

    def _leave_scratch(self) -> None:
        """Copy the inputs that lie in the scratch and are read after the offer: from then on peers may write there.

        Counts are read before. The caller's event may be that of what writes the inputs, so they are copied only here.
        """
        if not self._window.is_scratch_shown:
            return
        out_of_scratch, payload, routing = self._window.out_of_scratch, self._payload, self._routing
        self._payload = replace(payload, x=out_of_scratch(payload.x), scales=out_of_scratch(payload.scales))
        if routing is None:
            self._handle = self._handle._make(map(out_of_scratch, self._handle))
        else:
            read = (routing.is_token_in_rank, routing.topk_idx, routing.topk_weights)
            mask, topk_idx, topk_weights = map(out_of_scratch, read)
            self._routing = replace(routing, is_token_in_rank=mask, topk_idx=topk_idx, topk_weights=topk_weights)

    def _announce(self, scope: CpuScope) -> None:
        """Write the header, and, if they are few, this rank's rows beside it."""
        # First: what is wrong can be refused only as long as the call is not begun.
        self._check_counts()
        self._leave_scratch()
        routing, handle, number = self._routing, self._handle, 0
        if routing is None:
            require_filled(handle, "dispatch")
            self._ends = handle.rank_prefix_matrix.tolist()
            number = handle_number(self._ends, handle)
            self._counts = [stop - start for start, stop in token_blocks(self._ends)[self._window.rank]]
            is_sent = handle.send_head >= 0
        else:
            is_sent = routing.is_token_in_rank
        agreement = self._agreement(number)
        parts, num_sent = posted_parts(self._payload, routing), sum(self._counts)
        is_posted = self._can_post(num_sent, parts)
        max_tokens = routing.max_tokens if routing is not None else 0
        call = scope.begin(Header(agreement, self._payload.x.size(0), self._num_worst_tokens, is_posted, max_tokens))
        # A worst-case handle of V1 may travel through a compiled graph, and these items do not (`moe/compiled.py`).
        if self._is_full or (routing is not None and routing.keeps_weights):
            # Never 0, which is a handle without a number.
            self._number = 1 + call.epoch % _MOST_NUMBER
        if is_posted:
            with call.slice("post rows", SEND, rows=num_sent):
                post_rows(call, num_sent, lay_rows(parts, is_sent, self._counts))
        if routing is None:
            call.post_header()
        else:
            call.post_header(routing.num_tokens_per_rank, routing.num_tokens_per_expert)

    def _check_counts(self) -> None:
        """Check that the caller's counts match its mask. Otherwise peers would wait for rows that never come."""
        if self._routing is None or self._counts:
            return
        seen = self._routing.is_token_in_rank.sum(0).tolist()
        told = self._routing.num_tokens_per_rank.tolist()
        if seen != told:
            # Counts that were never made are not the caller's mistake.
            layout.require_counted(told, self._window.me())
            raise ValueError(
                "dispatch: `num_tokens_per_rank` must be the column sums of `is_token_in_rank`, "
                f"got {told}, the sums are {seen}"
            )
        per_expert, topk_idx = self._routing.num_tokens_per_expert, self._routing.topk_idx
        least = int(per_expert.amin())
        if least < 0:
            raise ValueError(f"dispatch: `num_tokens_per_expert` must not be negative, it has a {least}")
        if topk_idx is not None and not self._routing.has_known_ids:
            num_experts = per_expert.numel()
            selected = torch.bincount(topk_idx[(topk_idx >= 0) & (topk_idx < num_experts)], minlength=num_experts)
            differing = (selected != per_expert).nonzero().flatten().tolist()
            if differing:
                first = differing[0]
                raise ValueError(
                    f"dispatch: `topk_idx` selects expert {first} {int(selected[first])} times, "
                    f"`num_tokens_per_expert` counts {int(per_expert[first])}. Make the layout of these ids: "
                    "`get_dispatch_layout(topk_idx, ...)`"
                )
        self._counts = told

    def _agree(self, call: Call) -> list[Header]:
        """Compare the headers, before anything else in them is used. Then compute from them how many rows will come."""
        headers = call.headers()
        self._is_posted = all(header.is_posted for header in headers)
        if self._routing is not None:
            num_ranks = len(headers)
            counts = [peer.board.read_values(call.epoch, 0, num_ranks) for peer in self._window.peers]
            self._ends = list(accumulate(counts, lambda ends, row: list(map(add, ends, row))))
            self._check_capacity(headers)
        return headers

    def _fill_handle(self) -> None:
        """Fill what a worst-case dispatch did not know when it made the handle."""
        assert self._routing is not None
        handle, mask = self._handle, self._routing.is_token_in_rank
        prefix = handle.rank_prefix_matrix.copy_(mask.new_tensor(self._ends, dtype=torch.int32))
        handle.send_head.copy_(layout.token_slots(mask, prefix, self._window.rank))
        handle.recv_channel_prefix_matrix.fill_(self._number)

    def _local_expert_counts(self, call: Call) -> list[int]:
        assert self._routing is not None
        num_ranks = self._window.group_ranks.num_ranks  # across nodes more than there are peers
        num_local = self._routing.num_experts // num_ranks
        start = num_ranks + self._window.rank * num_local
        counts = [peer.board.read_values(call.epoch, start, start + num_local) for peer in self._window.peers]
        return list(map(sum, zip(*counts, strict=True)))

    def _note_experts(self, call: Call) -> None:
        """A trace shows the load of the experts, also where the caller does not learn it."""
        if self._window.trace is not None:
            call.note(experts=self._local_expert_counts(call))

    def _check_capacity(self, headers: list[Header]) -> None:
        for rank, (header, num_rows) in enumerate(zip(headers, self._ends[-1], strict=True)):
            if 0 < header.num_worst_tokens < num_rows:
                self._mark_refused()
                raise overflow(rank, num_rows, header.num_worst_tokens, self._window.me())

    def _mark_refused(self) -> None:
        """Mark the handle, which the caller may have already, so that later calls raise: no rows came with its
        dispatch.
        """
        if self._handle is not None:
            mark_refused(self._handle)

    def _offer(self, scope: CpuScope, sections: Sections) -> None:
        """Offer the memory in which this rank receives its rows."""
        if sections.rows_per_source:
            self._staging = Staging(self._window, [row_bytes(part) for part in sections.parts()])
            scope.call.post_offer(self._staging.offer)
        else:
            base_of = self._window.arena.base_of
            bases = tuple(base_of(part) if part.numel() else None for part in sections.parts())
            scope.call.post_offer(Offer(sections.num_rows, False, bases, self._is_straight()))
        scope.call.signal(OFFERED)

    def _is_straight(self) -> bool:
        """Return whether peers are to put rows straight into an expanded result."""
        return False

    def _fetch_rows(self, call: Call, blocks: Blocks, sections: Sections) -> None:
        """Fetch the rows that the ranks posted for this rank, by source rank.

        Each rank posts its rows in the order of their destinations.
        """
        rank = self._window.rank
        counts = [[stop - start for start, stop in row] for row in blocks]
        theirs = [Block(sum(row), sum(row[:rank]), row[rank]) for row in counts]
        parts = [sections.x, sections.scales]
        if self._unpacked is not None:
            parts += [*self._unpacked[1:], self._handle.recv_src_idx.view(-1, 1)]
        fetch_rows(call, theirs, [part for part in parts if part is not None])

    def _put_in_rounds(self, call: Call, outgoing: list[torch.Tensor], blocks: Blocks, sections: Sections) -> int:
        """Put the rows round by round: put, signal, wait, copy out of staging. There is one round if no rank is staged.

        Returns:
            The number of rounds.
        """
        staging = self._staging
        if staging is not None:
            self._chain.warn_staged("dispatch")
        offers = call.offers()
        to_ranks = zip(*blocks, strict=True)
        num_rounds = max(1, num_staged_rounds(offers, [max(stop - start for start, stop in one) for one in to_ranks]))
        rows = [self._rows(call, offers, index, part) for index, part in enumerate(outgoing)]
        rank, num_ranks = self._window.rank, len(offers)
        theirs = [row[rank] for row in blocks]

        def put(index: int) -> None:
            ranges = [
                round_slots(offer, blocks[rank][peer], index, rank, num_ranks) for peer, offer in enumerate(offers)
            ]
            with call.slice("put rows", SEND, rows=[one.end - one.begin for one in ranges]):
                self._put_round(offers, rows, ranges, index)

        copy_out = None if staging is None else partial(self._copy_out, staging, sections.parts(), theirs)
        run_rounds(call, num_rounds, put, copy_out)
        return num_rounds

    def _put_round(self, offers: list[Offer], rows: list[Section], ranges: list[SlotRange], index: int) -> None:
        """Put what is due in round `index`."""
        put_rows(rows, self._handle.send_head, ranges, first_peer=self._window.rank)

    def _rows(self, call: Call, offers: list[Offer], index: int, part: torch.Tensor) -> Section:
        """One kind of rows, and where the peers take them, in the widest elements that fit."""
        bases = [offer.bases[index] for offer in offers]
        dtype = widest_view(part, *(base.offset for base in bases if base is not None))
        rows = rows_as(part, dtype)
        return Section(rows, call.peer_rows(offers, index, rows.size(1), dtype))

    def _copy_out(
        self, staging: Staging, parts: Sequence[torch.Tensor], blocks: list[tuple[int, int]], index: int
    ) -> None:
        per_source = staging.offer.rows_per_source(len(blocks))
        for source, (start, stop) in enumerate(blocks):
            first, last = round_rows(staging.offer, stop - start, index, len(blocks))
            for part, staged in zip(parts, staging.sections, strict=True):
                there = staged[source * per_source : source * per_source + last - first]
                as_bytes(part)[start + first : start + last] = there

    def _num_received(self) -> int:
        """Return the number of rows that have come to this rank."""
        return self._ends[-1][self._window.rank]

    def _unpack(self, scope: CpuScope, sections: Sections) -> None:
        """Fill the handle's source indices, ids and weights."""
        assert self._routing is not None
        assert self._unpacked is not None
        ranks = self._window.group_ranks
        rank, num_local = ranks.first_rank + self._window.rank, self._routing.num_experts // ranks.num_ranks
        num_rows, keeps_weights = self._num_received(), self._routing.keeps_weights
        if self._is_posted:
            make_local(self._unpacked, num_rows, rank, num_local, keeps_weights)
        elif sections.records is not None:
            with scope.call.slice("unpack", RECEIVE):
                source_idx = self._handle.recv_src_idx
                unpack_records(sections.records, num_rows, source_idx, self._unpacked, rank, num_local, keeps_weights)
        self._count(sections)

    def _count(self, sections: Sections) -> None:
        """Count the finished call."""
        rank, blocks = self._window.rank, token_blocks(self._ends)
        rows_to = [stop - start for start, stop in blocks[rank]]
        rows_from = [stop - start for start, stop in (row[rank] for row in blocks)]
        row_bytes = sum(count * dtype.itemsize for count, dtype in section_columns(self._payload, self._routing))
        path = "posted" if self._is_posted else "staged" if sections.rows_per_source else "direct"
        self._chain.stats.count("dispatch", path, self._num_rounds, rows_to, rows_from, row_bytes)


def run_rounds(call: Call, num_rounds: int, put: Callable[[int], None], copy_out: Callable[[int], None] | None) -> None:
    """Put rows round by round. Those of a round are put once all ranks have copied out those of the round before.

    Args:
        call: The call.
        num_rounds: The rounds, the same number on all ranks.
        put: Puts this rank's rows of a round.
        copy_out: Copies the rows of a round out of this rank's staging; None: it has none.
    """
    for index in range(num_rounds):
        put(index)
        call.signal(READY + 2 * index)
        call.wait(READY + 2 * index)
        if copy_out is not None:
            with call.slice("copy out", RECEIVE, round=index):
                copy_out(index)
        # Behind the last round the next offer will say that the staging is free again.
        if index + 1 < num_rounds:
            call.signal(TAKEN + 2 * index)
            call.wait(TAKEN + 2 * index)
