"""Rounds inside a node, for calls across nodes whose rows some rank's arena cannot hold.

A staged rank divides its staging among the ranks of its node. The rows that one rank forwards to another are numbered
consecutively over all blocks. These numbers take the role of slots, and a round moves as many of them as one part of
staging holds.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ....handle import RailHandle
from ....kernels.rows import as_bytes
from ....topology import Topology
from ...protocol import Offer
from ...staging import Staging, num_staged_rounds, round_rows
from ..call import Call

ForwardedCounts = list[list[int]]  # `[i][d]` rows that local rank i forwards to local rank d


def forwarded(handle: RailHandle) -> torch.Tensor:
    """Return [P] int32: the rows that this rank forwards to each rank of its node."""
    return (handle.forwarded_slots >= 0).sum(0, dtype=torch.int32)


def read_forwarded(call: Call) -> ForwardedCounts:
    """Return what every rank of the node has posted as `forwarded`."""
    peers = call.window.peers
    return [peer.board.read_values(call.epoch, 0, len(peers)) for peer in peers]


def num_rounds(counts: ForwardedCounts, offers: Sequence[Offer]) -> int:
    """Return the rounds of a call; 0 if no rank is staged."""
    return num_staged_rounds(offers, [max(to_rank) for to_rank in zip(*counts, strict=True)])


def staged_slots(handle: RailHandle, is_staged: Sequence[bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Split slots into those at ranks that are not staged, and row numbers for those at staged ranks.

    Returns:
        Two [F, P] int32 tables, -1 where the other one counts, or a token does not go.
    """
    slots = handle.forwarded_slots
    staged = torch.tensor(is_staged, dtype=torch.bool, device=slots.device)
    numbers = (slots >= 0).cumsum(0, dtype=torch.int32).sub_(1)
    return slots.masked_fill(staged, -1), numbers.masked_fill_((slots < 0) | ~staged, -1)


def rows_by_source(handle: RailHandle, topology: Topology) -> list[torch.Tensor]:
    """Return, for each rank of the node, the rows of this rank that it forwards, in the order of their numbers;
    int64.
    """
    ends, size = handle.recv_gbl_rank_prefix_sum.tolist(), topology.ranks_per_node
    spans = [torch.arange(start, end, device=handle.send_nvl_head.device) for start, end in pairwise([0, *ends])]
    return [torch.cat(spans[local::size]) for local in range(size)]


def copy_out(
    staging: Staging, parts: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], index: int, *, reverse: bool
) -> None:
    """Copy a round's rows from staging to their final rows, or the reverse.

    Args:
        staging: This rank's staging.
        parts: [n, columns], what the rows belong to, for each section.
        sources: From `rows_by_source`.
        index: The round.
        reverse: Copy from the final rows to staging.
    """
    per_source = staging.offer.rows_per_source(len(sources))
    for source, rows in enumerate(sources):
        first, last = round_rows(staging.offer, rows.numel(), index, len(sources))
        for part, staged in zip(parts, staging.sections, strict=True):
            there = staged[source * per_source : source * per_source + last - first]
            if reverse:
                there.copy_(as_bytes(part)[rows[first:last]])
            else:
                as_bytes(part)[rows[first:last]] = there
