"""One low-latency call of a rank on the CPU: publish and say so, wait for everybody, fetch.

Everything called `send` or `receive` runs on the comm stream.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import NamedTuple

import torch

from ...errors import EPError, EPTimeout
from ...transport import Base
from ...transport.window import told
from ..call import Agreement, Call, Header
from .calls import BARRIER
from .geometry import Plan
from .shared import Shared, SpoiledError, table_offset


class Post(NamedTuple):
    """What a rank says of a call that it has sent, beside what must agree.

    Attributes:
        num_rows: Rows that it has published.
        base: Where they begin.
    """

    num_rows: int
    base: Base


class LowLatencyCall(ABC):
    """One call of this rank.

    Args:
        shared: Of the buffer.
        plan: How calls of this size divide the memory.
        wait_stats: [R] int64; the nanoseconds waited for each rank are added. Or None.

    Attributes:
        agreement: What all ranks must say alike.
        number: Of the call, from 1.
    """

    agreement: Agreement
    number = 0

    def __init__(self, shared: Shared, plan: Plan, wait_stats: torch.Tensor | None):
        self.shared = shared
        self.plan = plan
        self._wait_stats = wait_stats

    @property
    def name(self) -> Call:
        """The call, for messages."""
        return Call(self.shared.window, self.number, Header(self.agreement, 0))

    def send(self) -> None:
        """Publish, and say so. Waits for nothing."""
        window, operation = self.shared.window, self.agreement.operation
        num_rows, base = self._publish()
        window.board.post_sent(self.number, [*self.agreement.words(), num_rows, *base.words()])
        self.shared.fault(f"{operation}: before sent")
        window.board.sent.store_release(self.number)
        self.shared.fault(f"{operation}: after sent")

    def receive(self) -> None:
        """Wait for everybody who is not masked, and fetch. Again without them, if peers turn out to be far ahead."""
        self.shared.fault(f"{self.agreement.operation}: before receive")
        while True:
            self._wait()
            spoiled = None
            try:
                self._fetch(self._posts())
            except SpoiledError as error:
                spoiled = error
            # Whoever went on without this rank may have written over what was being read.
            ahead = self._ahead()
            if not ahead:
                break
            self._lose(ahead)
        if spoiled is not None:
            raise EPError(str(spoiled))
        self._finish()

    @abstractmethod
    def _publish(self) -> Post:
        """Write rows and table into this rank's memory."""

    def _fetch(self, posts: dict[int, Post]) -> None:
        """Read what the ranks in `posts` have published. Done again, without some of them, if they went on too early.

        Raises:
            SpoiledError: It makes no sense.
        """
        del posts

    def _finish(self) -> None:
        """Do what is done only once."""
        return

    # Peers -----------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        shared = self.shared
        ranks = [rank for rank in range(len(shared.window.peers)) if rank not in shared.masked]
        arrivals = shared.window.wait_sent(self.number, ranks, self.agreement.operation, may_lose=shared.can_mask)
        if self._wait_stats is not None:
            self._wait_stats.add_(torch.tensor(arrivals.waited_ns))
        if arrivals.lost:
            self._mask(arrivals.lost)

    def _posts(self) -> dict[int, Post]:
        """What the unmasked ranks have posted, with their memory within reach.

        Raises:
            SpoiledError: They do not agree; it says who differs in what.
        """
        window, mine = self.shared.window, self.agreement
        expected, posts, clashes = mine.words(), {}, []
        for peer in window.peers:
            # A masked rank's post may be of any call. This rank itself can be masked, too.
            if peer.rank in self.shared.masked:
                continue
            words = peer.board.read_sent(self.number)
            size = len(expected)
            if words[:size] != expected:
                clashes.append(f"rank {peer.rank} has {mine.differences(Agreement.from_words(words[:size]))}")
            posts[peer.rank] = Post(words[size], Base.from_words(words[size + 1 : size + 4]))
        if clashes:
            raise SpoiledError(
                f"{self.name}: all ranks must make the same call, but {'; '.join(clashes)} "
                f"({window.me()}). Make the calls in the same order on all ranks"
            )
        for rank, post in posts.items():
            self.shared.reach(rank, post.base.segment)
        return posts

    def _ahead(self) -> dict[int, str]:
        """Which ranks have sent so much that the set of this call is another's, and how that is said."""
        peers = [peer for peer in self.shared.window.peers if peer.rank not in self.shared.masked]
        sent = {peer.rank: peer.board.sent.load_acquire() for peer in peers}
        # With 2k sets a peer that still waits for this rank is at most 2k - 1 calls further (`docs/low-latency.md`).
        limit = self.number + self.plan.num_sets
        return {
            rank: f", which has gone on without this rank (it is at call {number})"
            for rank, number in sent.items()
            if number >= limit
        }

    def _lose(self, lost: dict[int, str]) -> None:
        """Mask ranks, or fail for them."""
        window = self.shared.window
        if not self.shared.can_mask:
            raise EPTimeout(
                f"{self.name}: {told(lost)} ({window.me()}). This rank was too late; look "
                "at its output, and make a new buffer"
            )
        self._mask(lost)

    def _mask(self, lost: dict[int, str]) -> None:
        window = self.shared.window
        self.shared.masked.update(lost)
        warnings.warn(
            f"{self.name}: {told(lost)}. From now on masked: its experts' results are missing ({window.me()})",
            RuntimeWarning,
            stacklevel=2,
        )

    def _peer_table(self, rank: int, post: Post, size: int) -> torch.Tensor:
        """[size] int64: a peer's table of this call, where it lies."""
        base = Base(post.base.segment, post.base.segment.start + table_offset(self.number))
        mapping = self.shared.window.peers[rank].mapping(base, base.offset + 8 * size)
        return mapping.rows(base.offset, 1, size, torch.int64)[0]

    def _peer_place(self, rank: int, post: Post, num_bytes: int) -> int:
        """The place where a peer's rows begin, of which `num_bytes` will be read."""
        mapping = self.shared.window.peers[rank].mapping(post.base, post.base.offset + num_bytes)
        return self.shared.atlas.place_of(mapping, post.base.offset)


class Barrier(LowLatencyCall):
    """Nothing is sent but the signal."""

    agreement = Agreement(BARRIER)

    def _publish(self) -> Post:
        return Post(0, self.shared.base(0))
