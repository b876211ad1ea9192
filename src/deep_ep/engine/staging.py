"""Staging: the scratch of the window, cut into lanes, for calls whose rows the arena cannot hold."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..sizing import align
from ..transport import Base, Window
from .call import Offer

_MOST_BYTES = 4 << 20  # what a staged call uses, unless one row of every rank needs more

_LINE_BYTES = 64


class Staging:
    """Room for some rows of every section, in the scratch.

    Args:
        window: The window.
        row_bytes: Bytes of a row of each section.
    """

    def __init__(self, window: Window, row_bytes: Sequence[int]):
        num_ranks = len(window.peers)
        room = min(_MOST_BYTES, window.arena.limit_bytes or _MOST_BYTES)
        lane_rows = max(1, room // (num_ranks * sum(row_bytes)))
        self.num_rows = num_ranks * lane_rows
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
