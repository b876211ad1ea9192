"""What the low-latency calls of a rank have in common on the CPU: its memory, its masks, and scratch.

The low-latency memory of a rank begins with the tables, one for each of the last calls; the quarters follow.
"""

from __future__ import annotations

import torch

from ...errors import EPError
from ...kernels import low_latency_rows as kernels
from ...transport import Base, Window
from ...transport.board import NUM_SENT_POSTS
from ...transport.spans import Span
from ...transport.sparse import Atlas, SparseSegment
from ...transport.window import SENT_TABLE_BYTES, SENT_TABLES_BYTES


class Shared:
    """What the calls of a buffer have in common: the memory, the masks, and scratch.

    Args:
        window: Of the buffer.
        segment: Its low-latency memory.
        can_mask: Whether ranks that stay silent are masked.
    """

    def __init__(self, window: Window, segment: SparseSegment, can_mask: bool):
        self.window = window
        self.can_mask = can_mask
        self.masked: set[int] = set()
        self.atlas = Atlas()
        self.caster = kernels.Caster()
        self.summer = kernels.Summer()
        self._segment = segment
        self._segments: dict[int, Span] = {}
        self.atlas.add(segment.mapping)

    @property
    def num_bytes(self) -> int:
        """Of the sets and the zero-copy tensors."""
        return self._segment.span.num_bytes - SENT_TABLES_BYTES

    def bytes(self, offset: int, num_bytes: int) -> torch.Tensor:
        """This rank's bytes behind the tables, committed."""
        return self._segment.commit(SENT_TABLES_BYTES + offset, num_bytes)

    def uncommitted_bytes(self, offset: int, num_bytes: int) -> torch.Tensor:
        """The same, as they are."""
        return self._segment.bytes(SENT_TABLES_BYTES + offset, num_bytes)

    def table(self, number: int, size: int) -> torch.Tensor:
        """[size] int64: this rank's table of a call."""
        return self._segment.commit(table_offset(number), 8 * size).view(torch.int64)

    def base(self, offset: int) -> Base:
        """What a peer needs to find bytes behind the tables."""
        span = self._segment.span
        return Base(span, span.start + SENT_TABLES_BYTES + offset)

    def own_place(self) -> int:
        """A place in this rank's own memory, which can always be read."""
        return self.atlas.place_of(self._segment.mapping, self._segment.span.start + SENT_TABLES_BYTES)

    def reach(self, rank: int, segment: Span) -> None:
        """Have a rank's low-latency memory in the atlas. Places move with it.

        Raises:
            SpoiledError: Its memory was elsewhere before.
        """
        if self._segments.setdefault(rank, segment) != segment:
            raise SpoiledError(f"window: the low-latency memory of rank {rank} has moved. This is a bug: report it")
        self.atlas.add(self.window.peers[rank].mapping(Base(segment, segment.start), segment.stop))

    def fault(self, point: str) -> None:
        """Reach a fault point."""
        if self.window.fault is not None:
            self.window.fault(point)


class SpoiledError(EPError):
    """What a peer has published does not fit."""


def table_offset(number: int) -> int:
    """Where, from the beginning of a rank's low-latency memory, the table of a call lies."""
    return number % NUM_SENT_POSTS * SENT_TABLE_BYTES
