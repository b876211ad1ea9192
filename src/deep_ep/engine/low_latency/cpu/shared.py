"""What the low-latency calls of a rank have in common on the CPU: its memory, its masks, and scratch.

The low-latency memory of a rank begins with the tables, one for each of the last calls; slots and dispatch sets
follow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import torch

from ....errors import EPError, EPUnsupported
from ....kernels.low_latency import rows as kernels
from ....transport import Base, Window
from ....transport.board import MOST_LOW_LATENCY_RANKS, NUM_SENT_POSTS
from ....transport.senders import LocalSender, Sender
from ....transport.spans import Span
from ....transport.sparse import Atlas, SparseSegment
from ....transport.window import SENT_TABLE_BYTES, SENT_TABLES_BYTES, Peer
from ...stats import Stats
from ..geometry import MOST_IN_FLIGHT

if TYPE_CHECKING:  # it needs sockets that other systems do not have
    from ....transport.mesh import Mesh, RemoteSender

_BITS = 32  # of a word of masks: words of posts are signed


class Shared:
    """What the calls of a buffer have in common: the memory, the masks, and scratch.

    Args:
        window: The window of the buffer.
        segment: Its low-latency memory.
        can_mask: Whether ranks that stay silent are masked.
        require_working: Raises if an earlier call of the buffer has failed.
        stats: Where bytes of rows are counted.
        mesh: The links to ranks of other nodes; None: there are none.

    Attributes:
        rank: This rank, as the group counts. So do masks and senders.
        local: The ranks of this node.
        senders: All other ranks.
        masks: The masked ranks, which are posted to the peers, each with the first call that it is masked in: an
            earlier one that is still in flight is received with it.
        lost: Those of them that did not come, so that the peers mask them, too.
        num_attempts: Attempts to get into step with the others again (`rejoin.py`).
        num_calls: Calls that this rank has received, by operation.
    """

    def __init__(
        self,
        window: Window,
        segment: SparseSegment,
        can_mask: bool,
        require_working: Callable[[], None],
        stats: Stats,
        mesh: Mesh | None = None,
    ):
        if window.group_ranks.num_ranks > MOST_LOW_LATENCY_RANKS:
            raise EPUnsupported(
                f"low latency: at most {MOST_LOW_LATENCY_RANKS} ranks on the CPU, there are "
                f"{window.group_ranks.num_ranks}. Use normal mode"
            )
        self.window = window
        self.mesh = mesh
        self.require_working = require_working
        self.stats = stats
        first = window.group_ranks.first_rank
        self.rank = first + window.rank
        self.local = range(first, first + len(window.peers))
        self.senders: dict[int, Sender] = {
            rank: LocalSender(self.peer(rank), rank, self.peer(self.rank)) for rank in self.local if rank != self.rank
        }
        if mesh is not None:
            self.senders.update(mesh.senders)
        self.can_mask = can_mask
        self.masks: dict[int, int] = {}
        self.lost: set[int] = set()
        self.num_attempts = 0
        self.num_calls: Counter[str] = Counter()
        self._done = Done()
        self.atlas = Atlas()
        self.caster = kernels.Caster()
        self.summer = kernels.WeightedSums()
        self._segment = segment
        self._segments: dict[int, Span] = {}
        self.atlas.add(segment.mapping)

    def peer(self, rank: int) -> Peer:
        """Return a rank of this node, as the window has it."""
        return self.window.peers[rank - self.window.group_ranks.first_rank]

    def remote(self, number: int) -> dict[int, RemoteSender]:
        """Return the ranks of other nodes that are not masked in a call."""
        senders = self.mesh.senders if self.mesh is not None else {}
        return {rank: sender for rank, sender in senders.items() if not self.is_masked(rank, number)}

    @property
    def masked(self) -> set[int]:
        """The ranks that are masked in the next call."""
        return set(self.masks)

    def is_masked(self, rank: int, number: int) -> bool:
        """Return whether a rank is masked in a call."""
        return self.masks.get(rank, number + 1) <= number

    def mask(self, ranks: Iterable[int], number: int = 0, *, is_for_all: bool = False) -> None:
        """Mask ranks. What is still queued for them is dropped.

        Args:
            ranks: The ranks.
            number: The number of the first call without them.
            is_for_all: They did not come, so all other ranks are to mask them, too.
        """
        for rank in ranks:
            self.masks[rank] = min(number, self.masks.get(rank, number))
            if is_for_all:
                self.lost.add(rank)
            if self.mesh is not None and rank in self.mesh.senders:
                self.mesh.drop(rank)

    def unmask(self, ranks: Iterable[int]) -> None:
        """Unmask ranks."""
        for rank in ranks:
            self.masks.pop(rank, None)
            self.lost.discard(rank)

    def mask_words(self) -> list[int]:
        """Return as words of a post: the ranks that this rank masks, and those of them that all ranks are to mask."""
        return self.bits_of(self.masks) + self.bits_of(self.lost)

    def bits_of(self, ranks: Iterable[int]) -> list[int]:
        """A bit for each rank of the group, 32 to a word: the same number of words for all sets."""
        words = [0] * self.num_mask_words
        for rank in ranks:
            words[rank // _BITS] |= 1 << rank % _BITS
        return words

    def ranks_of(self, words: Sequence[int]) -> set[int]:
        """Return the ranks of `bits_of`'s words."""
        return {rank for rank in range(self.window.group_ranks.num_ranks) if words[rank // _BITS] >> rank % _BITS & 1}

    @property
    def num_mask_words(self) -> int:
        """The number of words that a set of ranks takes."""
        return -(-self.window.group_ranks.num_ranks // _BITS)

    def is_done(self, number: int) -> bool:
        """Return whether this rank has received a call."""
        return self._done.has(number)

    def end(self, number: int) -> None:
        """Publish that this rank has received a call."""
        self._done.add(number)
        self.window.board.done.store_release(self._done.word)

    def end_all(self, number: int) -> None:
        """Publish that calls up to this one are over for this rank, received or given up."""
        self._done = Done(number)
        self.window.board.done.store_release(self._done.word)

    def go_on_from(self, number: int) -> None:
        """Continue from a call: all ranks have agreed that calls before it are over."""
        self.spend(number - 1)
        self.end_all(number - 1)

    def spend(self, number: int) -> None:
        """Publish that memory of calls up to this number will be overwritten. Must come before the first write.

        A rank that has been masked, and still reads there, must be able to detect it.
        """
        spent = self.window.board.spent
        # Never back: the memory of a zero-copy tensor may be that of an older call than the last one.
        spent.store_before_writes(max(number, spent.load_acquire()))

    @property
    def num_bytes(self) -> int:
        """The bytes of the slots and the dispatch sets."""
        return self._segment.span.num_bytes - SENT_TABLES_BYTES

    def bytes(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return this rank's bytes behind the tables, committed."""
        return self._segment.commit(SENT_TABLES_BYTES + offset, num_bytes)

    def uncommitted_bytes(self, offset: int, num_bytes: int) -> torch.Tensor:
        """Return this rank's bytes behind the tables without committing them."""
        return self._segment.bytes(SENT_TABLES_BYTES + offset, num_bytes)

    def table(self, number: int, size: int) -> torch.Tensor:
        """Return [size] int64: this rank's table of a call."""
        return self._segment.commit(table_offset(number), 8 * size).view(torch.int64)

    def base(self, offset: int) -> Base:
        """Return the base by which a peer addresses bytes behind the tables."""
        span = self._segment.span
        return Base(span, span.start + SENT_TABLES_BYTES + offset)

    def reach(self, rank: int, segment: Span) -> None:
        """Map a rank's low-latency memory into the atlas. This may move grains.

        Raises:
            SpoiledError: Its memory was elsewhere before.
        """
        if self._segments.setdefault(rank, segment) != segment:
            raise SpoiledError(f"window: the low-latency memory of rank {rank} has moved. This is a bug: report it")
        self.atlas.add(self.peer(rank).mapping(Base(segment, segment.start), segment.stop))

    def reach_receive_arena(self) -> None:
        """Map all receive buffers into the atlas. This may move grains."""
        for mapping in self.mesh.receive_arena.mappings if self.mesh is not None else ():
            self.atlas.add(mapping)

    def fault(self, point: str) -> None:
        """Reach a fault point, at which tests stop or delay the rank."""
        if self.window.fault is not None:
            self.window.fault(point)


class Done:
    """Which calls a rank has received: all up to one, and perhaps the one behind the next.

    Args:
        last: Of all calls up to which are done.
    """

    def __init__(self, last: int = 0):
        self._last, self._is_further = last, False

    @classmethod
    def of(cls, word: int) -> Done:
        """Decode a word of `word`."""
        done = cls(word >> 1)
        done._is_further = bool(word & 1)
        return done

    @property
    def word(self) -> int:
        """Encode as a word of a board."""
        return self._last << 1 | self._is_further

    def has(self, number: int) -> bool:
        """Return whether a call is among those received."""
        return number <= self._last or (self._is_further and number == self._last + MOST_IN_FLIGHT)

    def add(self, number: int) -> None:
        """Add a call. At most two are in flight, so there is at most one gap."""
        if number != self._last + 1:
            self._is_further = True
        else:
            self._last, self._is_further = number + self._is_further, False


class SpoiledError(EPError):
    """What a peer has published is inconsistent."""


class ExcludedError(EPError):
    """A peer has no rows for this rank, which it had masked before.

    Args:
        rank: The peer.
        reason: How that is said, behind the rank.
    """

    def __init__(self, rank: int, reason: str):
        super().__init__(f"rank {rank}{reason}")
        self.rank, self.reason = rank, reason


def table_offset(number: int) -> int:
    """Return the offset, in a rank's low-latency memory, of the table of a call."""
    return number % NUM_SENT_POSTS * SENT_TABLE_BYTES
