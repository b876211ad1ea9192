"""What the low-latency calls of a rank have in common on the CPU: its memory, its masks, and scratch.

The low-latency memory of a rank begins with the tables, one for each of the last calls; the quarters follow.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from ...errors import EPError
from ...kernels import low_latency_rows as kernels
from ...transport import Base, Window
from ...transport.board import NUM_SENT_POSTS
from ...transport.senders import NearSender, Sender
from ...transport.spans import Span
from ...transport.sparse import Atlas, SparseSegment
from ...transport.window import SENT_TABLE_BYTES, SENT_TABLES_BYTES, Peer

if TYPE_CHECKING:  # it needs sockets that other systems do not have
    from ...transport.mesh import FarSender, Mesh


class Shared:
    """What the calls of a buffer have in common: the memory, the masks, and scratch.

    Args:
        window: Of the buffer.
        segment: Its low-latency memory.
        can_mask: Whether ranks that stay silent are masked.
        mesh: The links to ranks of other nodes; None: there are none.

    Attributes:
        rank: This rank, as the group counts. So do masks and senders.
        near: The ranks of this node.
        senders: All other ranks.
    """

    def __init__(self, window: Window, segment: SparseSegment, can_mask: bool, mesh: Mesh | None = None):
        self.window = window
        self.mesh = mesh
        first = window.place.first_rank
        self.rank = first + window.rank
        self.near = range(first, first + len(window.peers))
        self.senders: dict[int, Sender] = {
            rank: NearSender(self.peer(rank), rank) for rank in self.near if rank != self.rank
        }
        if mesh is not None:
            self.senders.update(mesh.senders)
        self.can_mask = can_mask
        self.masked: set[int] = set()
        self.atlas = Atlas()
        self.caster = kernels.Caster()
        self.summer = kernels.Summer()
        self._segment = segment
        self._segments: dict[int, Span] = {}
        self.atlas.add(segment.mapping)

    def peer(self, rank: int) -> Peer:
        """A rank of this node, as the window sees it."""
        return self.window.peers[rank - self.window.place.first_rank]

    @property
    def far(self) -> dict[int, FarSender]:
        """The ranks of other nodes that are not masked."""
        senders = self.mesh.senders if self.mesh is not None else {}
        return {rank: sender for rank, sender in senders.items() if rank not in self.masked}

    def lose(self, ranks: Iterable[int]) -> None:
        """Mask ranks that did not come. What is still queued for them is forgotten."""
        for rank in ranks:
            self.masked.add(rank)
            if self.mesh is not None and rank in self.mesh.senders:
                self.mesh.drop(rank)

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
        self.atlas.add(self.peer(rank).mapping(Base(segment, segment.start), segment.stop))

    def reach_landings(self) -> None:
        """Have all landings in the atlas. Places move with it."""
        for mapping in self.mesh.grounds.mappings if self.mesh is not None else ():
            self.atlas.add(mapping)

    def fault(self, point: str) -> None:
        """Reach a fault point."""
        if self.window.fault is not None:
            self.window.fault(point)


class SpoiledError(EPError):
    """What a peer has published does not fit."""


def table_offset(number: int) -> int:
    """Where, from the beginning of a rank's low-latency memory, the table of a call lies."""
    return number % NUM_SENT_POSTS * SENT_TABLE_BYTES
