"""Staging: scratch memory of the window, divided among the sources, for calls whose rows the arena cannot hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..kernels.rows import SlotRange
from ..sizing import align
from ..transport import Base, Window
from .protocol import Offer

MOST_BYTES = 4 << 20  # what a staged call uses, unless one row of every rank needs more

_LINE_BYTES = 64

Blocks = list[list[tuple[int, int]]]  # `[s][d]` the slots [start, stop) that source s fills at destination d


class Staging:
    """Memory for some rows of every section, in the scratch of the window.

    Args:
        window: The window.
        row_bytes: Bytes of a row of each section.
    """

    def __init__(self, window: Window, row_bytes: Sequence[int]):
        num_ranks = len(window.peers)
        self.num_rows = num_ranks * rows_per_source(num_ranks, sum(row_bytes), window.arena.limit_bytes)
        sizes = [align(self.num_rows * width, _LINE_BYTES) for width in row_bytes]
        scratch, memory = window.scratch(sum(sizes))
        bases: list[Base] = []
        self.sections: list[torch.Tensor] = []
        start = 0
        for width, size in zip(row_bytes, sizes, strict=True):
            bases.append(Base(scratch.segment, scratch.offset + start))
            self.sections.append(memory[start : start + self.num_rows * width].view(self.num_rows, width))
            start += size
        self.offer = Offer(self.num_rows, True, tuple(bases))


def rows_per_source(num_ranks: int, row_bytes: int, limit_bytes: int) -> int:
    """Return the rows of staging that each source has: at least one.

    Args:
        num_ranks: R.
        row_bytes: Bytes of a row of all sections together.
        limit_bytes: Bytes of the arena; 0: no limit. Staging is no larger, unless one row of every rank needs more.
    """
    return max(1, min(MOST_BYTES, limit_bytes or MOST_BYTES) // (num_ranks * max(1, row_bytes)))


def token_blocks(ends: list[list[int]]) -> Blocks:
    """`[s][d]` the slots [start, stop) that source s fills at destination d, from a `rank_prefix_matrix`."""
    starts = [[0] * len(ends), *ends[:-1]]
    return [list(zip(start, end, strict=True)) for start, end in zip(starts, ends, strict=True)]


def num_dispatch_rounds(offers: list[Offer], blocks: Blocks) -> int:
    """Return the rounds of a dispatch. All ranks compute the same number, from the same counts."""
    rounds = 1
    for peer, offer in enumerate(offers):
        if offer.is_staged:
            largest = max(stop - start for start, stop in (row[peer] for row in blocks))
            rounds = max(rounds, -(-largest // offer.rows_per_source(len(offers))))
    return rounds


def round_slots(offer: Offer, block: tuple[int, int], index: int, rank: int, num_ranks: int) -> SlotRange:
    """Return what this rank sends to one peer in round `index`: a part of its block, or, if the peer is not staged,
    all of it in round 0.
    """
    start, stop = block
    if not offer.is_staged:
        return SlotRange(start, stop, 0) if index == 0 else SlotRange(0, 0, 0)
    rows = offer.rows_per_source(num_ranks)
    begin = min(start + index * rows, stop)
    return SlotRange(begin, min(begin + rows, stop), rank * rows - begin)
