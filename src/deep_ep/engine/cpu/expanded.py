"""The steps of an expanded V2 dispatch on the CPU: each selection's row goes straight to its place at the receiver.

A row's place follows from the counts of all sources for all experts, which are on the boards. Records travel compactly,
one for each (token, rank), and so do weights of a cached dispatch. A receiver without memory for an expanded result
takes compact rows, as do all ranks of a small call, whose rows are posted; they are unfolded locally.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...kernels.rows import Section, SlotRange, put_blocks, put_rows, row_bytes
from ...sizing import align
from ..elastic import expanded_rows
from ..ops import Sections
from ..payload import Expansion, Payload, Routing, SendPlan
from ..protocol import Agreement, Header, Offer, checksum, expanded_overflow
from ..staging import Blocks
from .call import Call, Chain
from .dispatch import CpuDispatch
from .scope import CpuScope

_NO_SLOTS = SlotRange(0, 0, 0)


class ExpandedDispatch(CpuDispatch):
    """The steps of one expanded dispatch, see `ops.DispatchSteps`.

    Args:
        chain: The calls of the buffer, of which this is the next.
        operation: One of `protocol.OPERATIONS`.
        payload: What this rank sends.
        routing: Where it goes; None: where the plan of the expansion says.
        expansion: How rows are expanded.
    """

    def __init__(self, chain: Chain, operation: str, payload: Payload, routing: Routing | None, expansion: Expansion):
        super().__init__(chain, operation, payload, routing)
        self._expansion = expansion
        self._expert_counts: list[list[int]] = []  # [R][E], how often each rank selects each expert
        self._num_wide = 1 if payload.scales is None else 2  # sections with a row for each selection

    # By the caller ---------------------------------------------------------------------------------------------------

    def memory(self, scope: CpuScope, num_rows: int) -> Sections:
        """Memory for an expanded result and compact records, if the arena can hold it; else for compact rows."""
        expansion = self._expansion
        sections = None if self._is_posted else self._straight_memory(num_rows)
        expansion.is_straight = sections is not None
        if sections is None:
            sections = super().memory(scope, num_rows)
        if expansion.weights is not None:
            expansion.received_weights = sections.records
        return sections

    def _straight_memory(self, num_rows: int) -> Sections | None:
        num_expanded = self._expansion.num_rows
        if self._told is not None:
            num_expanded = sum(align(count, self._expansion.alignment) for count in self._told.expert_counts)
        parts = [
            self._window.arena.allocate((num_expanded if index < self._num_wide else num_rows, count), dtype)
            for index, (count, dtype) in enumerate(self._columns())
        ]
        if any(part is None for part in parts):
            return None
        scales = parts[1] if self._num_wide == 2 else None
        records = parts[self._num_wide] if len(parts) > self._num_wide else None
        return Sections(parts[0], scales, records, num_rows, 0, ())

    def _columns(self) -> list[tuple[int, torch.dtype]]:
        weights = self._expansion.weights
        more = [] if weights is None else [(weights.size(1), weights.dtype)]
        return super()._columns() + more

    def _outgoing(self) -> list[torch.Tensor]:
        weights = self._expansion.weights
        return super()._outgoing() + ([] if weights is None else [weights])

    def _agreement(self, number: int) -> Agreement:
        if self._routing is None:  # where rows go depends on more than what compact rows agree on
            number = checksum([[number, self._expansion.plan.number]])
        agreement, weights = super()._agreement(number), self._expansion.weights
        if weights is not None:
            agreement = agreement._replace(num_topk=weights.size(1), has_weights=1)
        return agreement._replace(alignment=self._expansion.alignment)

    def _can_post(self, num_rows: int, parts: Sequence[torch.Tensor]) -> bool:
        """Only in a full dispatch: in others there is memory for an expanded result before this is known."""
        return self._is_full and super()._can_post(num_rows, parts)

    # On the comm stream ----------------------------------------------------------------------------------------------

    def _is_straight(self) -> bool:
        return self._expansion.is_straight

    def _fetch_rows(self, call: Call, blocks: Blocks, sections: Sections) -> None:
        super()._fetch_rows(call, blocks, sections)
        self._make_plan()

    def _put_in_rounds(self, call: Call, outgoing: list[torch.Tensor], blocks: Blocks, sections: Sections) -> int:
        self._make_plan()
        return super()._put_in_rounds(call, outgoing, blocks, sections)

    def _agree(self, call: Call) -> list[Header]:
        """Also check that the expanded results fit, where their sizes were fixed beforehand."""
        headers = super()._agree(call)
        if self._routing is not None:
            num_ranks = len(headers)
            stop = num_ranks + self._routing.num_experts
            self._expert_counts = [peer.board.read_values(call.epoch, num_ranks, stop) for peer in self._window.peers]
            if self._num_worst_tokens:
                self._check_expanded()
        return headers

    def _check_expanded(self) -> None:
        """The worst case has room for tokens that name each expert once."""
        totals = [align(sum(one), self._expansion.alignment) for one in zip(*self._expert_counts, strict=True)]
        num_local = len(totals) // len(self._expert_counts)
        for rank in range(len(self._expert_counts)):
            num_rows = sum(totals[rank * num_local : (rank + 1) * num_local])
            if num_rows > self._expansion.num_rows:
                self._mark_refused()
                raise expanded_overflow(rank, num_rows, self._expansion.num_rows, self._window.me())

    def _make_plan(self) -> None:
        """Find the rows that this rank's selections take, from the counts of all ranks. A handle has them already."""
        if self._routing is None:
            return
        assert self._routing.topk_idx is not None
        expansion = self._expansion
        where = (self._window.rank, expansion.alignment, expansion.peer_rows)
        fill_plan(expansion.plan, self._expert_counts, self._routing.topk_idx, *where)

    def _put_round(self, offers: list[Offer], rows: list[Section], ranges: list[SlotRange], index: int) -> None:
        """Put compact rows and records as in any dispatch, and expanded rows in the first round."""
        slots, rank = self._handle.send_head, self._window.rank
        wide, others = rows[: self._num_wide], rows[self._num_wide :]
        compact = [_NO_SLOTS if offer.is_expanded else one for offer, one in zip(offers, ranges, strict=True)]
        if not all(offer.is_expanded for offer in offers):
            put_rows(wide, slots, compact, first_peer=rank)
        if others:
            put_rows(others, slots, ranges, first_peer=rank)
        # Expanded rows are offered in the arena alone, never in staging, which has rounds.
        if index == 0:
            for number, section in enumerate(wide):
                self._put_expanded(offers, number, section)

    def _put_expanded(self, offers: list[Offer], number: int, section: Section) -> None:
        """Put a row for each selection to the ranks that take them so, beginning with this rank."""
        plan, rank, num_ranks = self._expansion.plan, self._window.rank, len(offers)
        num_local = len(plan.first_rows) // num_ranks
        targets: list[torch.Tensor] = []
        token_idx: list[torch.Tensor] = []
        for turn in range(num_ranks):
            peer = (rank + turn) % num_ranks
            base = offers[peer].bases[number]
            if not offers[peer].is_expanded or base is None:
                continue
            like = section.rows
            memory = self._window.peers[peer].rows(base, plan.num_rows[peer], like.size(1), like.dtype)
            for expert in range(peer * num_local, (peer + 1) * num_local):
                tokens, first = plan.token_idx[expert], plan.first_rows[expert]
                if tokens.numel():
                    targets.append(memory[first : first + tokens.numel()])
                    token_idx.append(tokens)
        put_blocks(section.rows, targets, token_idx)

    def _count(self, sections: Sections) -> None:
        """Count the finished call: of expanded rows those of the selections, without records."""
        if not self._expansion.is_straight:
            super()._count(sections)
            return
        plan, parts = self._expansion.plan, sections.parts()[: self._num_wide]
        bytes_each = sum(row_bytes(part) for part in parts)
        self._chain.stats.count("dispatch", "expanded", self._num_rounds, plan.rows_to, plan.rows_from, bytes_each)


def fill_plan(
    plan: SendPlan,
    counts: list[list[int]],
    topk_idx: torch.Tensor,
    rank: int,
    alignment: int,
    peer_rows: torch.Tensor | None = None,
) -> None:
    """Find the row of each selection at the rank of its expert: by expert, source rank, token, column.

    The receiver finds the same rows from the ids that come.

    Args:
        plan: Written.
        counts: [R][E], how often each rank selects each expert.
        topk_idx: [T, K], this rank's selections.
        rank: This rank.
        alignment: To which the rows of each expert are rounded up.
        peer_rows: [T, K] int32, written with the row of each selection, -1: none; or None.

    Example:
        Two ranks with an expert each, counts `[[1, 2], [3, 0]]`, alignment 4: the rows of rank 1 for expert 0 begin at
        row 1, those of rank 0 for expert 1 at row 0, and both results have 4 rows.
    """
    each, num_ranks = np.array(counts), len(counts)
    aligned = -(-each.sum(0) // alignment) * alignment
    by_rank = aligned.reshape(num_ranks, -1)
    # Behind the rows of earlier experts of that rank, and those of earlier source ranks for the same expert.
    first = (by_rank.cumsum(1) - by_rank).ravel() + each[:rank].sum(0)
    selections, rows = expanded_rows(topk_idx, each[rank], first)
    tokens = torch.from_numpy(selections // max(1, topk_idx.size(1)))
    plan.token_idx = list(torch.split_with_sizes(tokens, counts[rank]))
    plan.first_rows = first.tolist()
    plan.num_rows = by_rank.sum(1).tolist()
    plan.rows_to = each[rank].reshape(num_ranks, -1).sum(1).tolist()
    plan.rows_from = each.reshape(num_ranks, num_ranks, -1)[:, rank].sum(1).tolist()
    plan.number = checksum(counts)
    if peer_rows is not None:
        peer_rows.fill_(-1).numpy().reshape(-1)[selections] = rows
