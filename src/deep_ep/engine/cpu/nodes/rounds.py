"""Rounds inside a node, for calls across nodes whose rows some rank's arena cannot hold.

A staged rank has a lane of its scratch for each rank of its node. What one rank forwards to another is numbered
through, over all blocks: these numbers stand for slots, and a round moves a lane's worth of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch

from ....handle import RailHandle
from ....kernels.rows import as_bytes
from ....topology import Topology
from ...protocol import Offer
from ...staging import Staging
from ..call import Call

Counts = list[list[int]]  # `[i][d]` rows that local rank i forwards to local rank d


def forwarded(handle: RailHandle) -> torch.Tensor:
    """[P] int32, rows that this rank forwards to each rank of its node."""
    return (handle.send_nvl_head >= 0).sum(0, dtype=torch.int32)


def read_forwarded(call: Call) -> Counts:
    """What every rank of the node has posted as `forwarded`."""
    peers = call.window.peers
    return [peer.board.read_values(call.epoch, 0, len(peers)) for peer in peers]


def num_rounds(counts: Counts, offers: Sequence[Offer]) -> int:
    """Rounds of a call; 0 where nobody is staged. All ranks of a node find the same number."""
    rounds = 0
    for local, offer in enumerate(offers):
        if offer.is_staged:
            largest = max(row[local] for row in counts)
            rounds = max(rounds, 1, -(-largest // offer.rows_per_source(len(offers))))
    return rounds


def round_rows(offer: Offer, count: int, index: int, num_ranks: int) -> tuple[int, int]:
    """Which of a rank's `count` rows go through its lane in round `index`: [first, last)."""
    rows = offer.rows_per_source(num_ranks)
    return min(index * rows, count), min((index + 1) * rows, count)


def staged_slots(handle: RailHandle, is_staged: Sequence[bool]) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots at the ranks that are not staged, and numbers in place of slots at those that are.

    Returns:
        Two [F, P] int32 tables, -1 where the other one counts, or a token does not go.
    """
    slots = handle.send_nvl_head
    staged = torch.tensor(is_staged, dtype=torch.bool, device=slots.device)
    numbers = (slots >= 0).cumsum(0, dtype=torch.int32).sub_(1)
    return slots.masked_fill(staged, -1), numbers.masked_fill_((slots < 0) | ~staged, -1)


def rows_by_source(handle: RailHandle, topology: Topology) -> list[torch.Tensor]:
    """For each rank of the node, the rows of this one that it forwards, in the order of their numbers; int64."""
    ends, size = handle.recv_gbl_rank_prefix_sum.tolist(), topology.ranks_per_node
    spans = [torch.arange(start, end, device=handle.send_nvl_head.device) for start, end in pairwise([0, *ends])]
    return [torch.cat(spans[local::size]) for local in range(size)]


def copy_out(
    staging: Staging, parts: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], index: int, *, reverse: bool
) -> None:
    """Move a round's rows from the lanes to their places, or the reverse.

    Args:
        staging: This rank's.
        parts: [n, columns], what the rows belong to, for each section.
        sources: From `rows_by_source`.
        index: The round.
        reverse: From their places to the lanes.
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
