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


def num_staged_rounds(offers: Sequence[Offer], most_rows: Sequence[int]) -> int:
    """Return the rounds in which rows go to staged ranks; 0 if no rank is staged.

    All ranks compute the same number, from the same counts.

    Args:
        offers: Of the ranks.
        most_rows: By destination, the most rows that any source has for it.
    """
    staged = [(offer, most) for offer, most in zip(offers, most_rows, strict=True) if offer.is_staged]
    # At least 1 for a staged rank, also if no row comes to it: 0 says that no rank is staged.
    return max((max(1, -(-most // offer.rows_per_source(len(offers)))) for offer, most in staged), default=0)


def round_rows(offer: Offer, count: int, index: int, num_ranks: int) -> tuple[int, int]:
    """Return which of a source's `count` rows go through its part of staging in round `index`, as [first, last)."""
    rows = offer.rows_per_source(num_ranks)
    return min(index * rows, count), min((index + 1) * rows, count)


def round_slots(offer: Offer, block: tuple[int, int], index: int, rank: int, num_ranks: int) -> SlotRange:
    """Return what this rank sends to one peer in round `index`: a part of its block, or, if the peer is not staged,
    all of it in round 0.
    """
    start, stop = block
    if not offer.is_staged:
        return SlotRange(start, stop, 0) if index == 0 else SlotRange(0, 0, 0)
    first, last = round_rows(offer, stop - start, index, num_ranks)
    # The shift brings slot `start + first` to the first row of this rank's part.
    return SlotRange(start + first, start + last, rank * offer.rows_per_source(num_ranks) - start - first)
