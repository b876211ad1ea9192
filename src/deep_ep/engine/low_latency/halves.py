"""One low-latency call of a rank on the CPU: publish and say so, wait for everybody, fetch.

Everything called `send` or `receive` runs on the comm stream.
"""

from __future__ import annotations

import warnings
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ...errors import EPError, EPTimeout
from ...trace import NO_SLICE, RECEIVE, SEND, WAIT, Slice
from ...transport import Base
from ...transport.board import NO_REFUSAL
from ...transport.senders import told, wait_sent
from ..cpu.call import Call
from ..protocol import Agreement, Header
from .calls import BARRIER
from .far import FarPost, Outgoing, new_frame
from .geometry import Plan
from .shared import Shared, SpoiledError, table_offset

if TYPE_CHECKING:  # it needs sockets that other systems do not have
    from ...transport.mesh import Mesh


class Post(NamedTuple):
    """What a rank says of a call that it has sent, beside what must agree.

    Attributes:
        num_rows: Rows that it has published.
        base: Where they begin.
    """

    num_rows: int
    base: Base


class Posts(NamedTuple):
    """What the ranks that are not masked have sent in a call, by rank.

    Attributes:
        near: Of this node: what they say, and where their rows are.
        far: Of other nodes: what has landed of them.
    """

    near: dict[int, Post]
    far: dict[int, FarPost]


class LowLatencyCall(ABC):
    """One call of this rank.

    Args:
        shared: Of the buffer.
        plan: How calls of this size divide the memory.
        wait_stats: [R] int64; the nanoseconds waited for each rank are added. Or None.

    Attributes:
        agreement: What all ranks must say alike.
        number: Of the call, from 1.
        num_ended: Halves that have ended well.
        own_refusal: What this rank had refused last when it made the call.
        newest_spent: The newest call over which this one writes.
    """

    agreement: Agreement
    number = num_ended = newest_spent = 0
    own_refusal = NO_REFUSAL

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
        # Before anything is written: who has been masked, and still reads there, must be able to notice.
        spent = window.board.spent
        spent.store_before_writes(max(self.newest_spent, spent.load_acquire()))
        with self._slice("publish", SEND):
            num_rows, base = self._publish()
        window.board.post_sent(self.number, [*self.agreement.words(), num_rows, *base.words()])
        self.shared.fault(f"{operation}: before sent")
        window.board.sent.store_release(self.number)
        self.shared.fault(f"{operation}: near sent")
        if self.shared.mesh is not None:
            with self._slice("send to other nodes", SEND):
                self._send_far(self.shared.mesh)
        self.shared.fault(f"{operation}: after sent")

    def receive(self) -> None:
        """Wait for everybody who is not masked, and fetch. Again without them, if peers turn out to be far ahead."""
        self.shared.fault(f"{self.agreement.operation}: before receive")
        while True:
            self._wait()
            spoiled = None
            try:
                with self._slice("fetch", RECEIVE):
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
        for sender in self.shared.far.values():
            sender.forget(self.number)

    def _send_far(self, mesh: Mesh) -> None:
        """Send each rank of another node its part."""
        for rank in self.shared.far:
            mesh.send(rank, self.number, self._frame_to(mesh, rank).page)

    @abstractmethod
    def _publish(self) -> Post:
        """Write rows and table into this rank's memory."""

    def _frame_to(self, mesh: Mesh, rank: int) -> Outgoing:
        """What a rank of another node gets of what was published."""
        del rank
        return new_frame(mesh, self.agreement, 0, 0, ())

    def _fetch(self, posts: Posts) -> None:
        """Read what the ranks in `posts` have published. Done again, without some of them, if they went on too early.

        Raises:
            SpoiledError: It makes no sense.
        """
        del posts

    def _finish(self) -> None:
        """Do what is done only once."""
        return

    # What a trace shows ----------------------------------------------------------------------------------------------

    def _slice(self, name: str, kind: str) -> Slice:
        """A part of the call."""
        trace = self.shared.window.trace
        return trace.slice(name, kind) if trace is not None else NO_SLICE

    def _note(self, counts: torch.Tensor, row_bytes: int, **more: Any) -> None:
        """The rows from each rank, and whatever else there is to say of the call."""
        trace = self.shared.window.trace
        assert trace is not None
        trace.note(rows_from=counts.tolist(), row_bytes=row_bytes, **more)

    # Peers -----------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        shared, window = self.shared, self.shared.window
        senders = [sender for rank, sender in shared.senders.items() if rank not in shared.masked]
        operation, may_lose = self.agreement.operation, shared.can_mask
        with self._slice("wait: sent", WAIT) as waiting:
            own, me = self.own_refusal, window.me()
            limits = (window.limit_secs, own, window.raise_if_given_up)
            arrivals = wait_sent(senders, self.number, operation, me, *limits, may_lose=may_lose)
            waiting.waited({rank: ns * 1e-9 for rank, ns in arrivals.waited_ns.items() if ns})
        if self._wait_stats is not None:
            waited_ns = [arrivals.waited_ns.get(rank, 0) for rank in range(window.place.num_ranks)]
            self._wait_stats.add_(torch.tensor(waited_ns))
        if arrivals.lost:
            self._mask(arrivals.lost)

    def _posts(self) -> Posts:
        """What the unmasked ranks have posted, with their memory within reach.

        Raises:
            SpoiledError: They do not agree; it says who differs in what.
        """
        shared, mine = self.shared, self.agreement
        expected, said = mine.words(), {}
        size, posts = len(expected), Posts({}, {})
        for rank in shared.near:
            # A masked rank's post may be of any call. This rank itself can be masked, too.
            if rank in shared.masked:
                continue
            words = shared.peer(rank).board.read_sent(self.number)
            said[rank] = words[:size]
            posts.near[rank] = Post(words[size], Base.from_words(words[size + 1 : size + 4]))
        for rank, sender in shared.far.items():
            page = sender.landed(self.number)
            if page is not None:  # else it has gone on meanwhile, which `_ahead` notices
                posts.far[rank] = FarPost.of(rank, page)
                said[rank] = posts.far[rank].agreed
        clashes = [
            f"rank {rank} has {mine.differences(Agreement.from_words(words))}"
            for rank, words in sorted(said.items())
            if words != expected
        ]
        if clashes:
            raise SpoiledError(
                f"{self.name}: all ranks must make the same call, but {'; '.join(clashes)} "
                f"({shared.window.me()}). Make the calls in the same order on all ranks"
            )
        for rank, post in posts.near.items():
            shared.reach(rank, post.base.segment)
        shared.reach_landings()
        return posts

    def _ahead(self) -> dict[int, str]:
        """Which ranks have begun to write over what they had in this call, or are further, and how that is said."""
        shared = self.shared
        boards = {rank: shared.peer(rank).board for rank in shared.near if rank not in shared.masked}
        sent = {rank: board.sent.load_acquire() for rank, board in boards.items()}
        spent = {rank for rank, board in boards.items() if board.spent.load_behind_reads() >= self.number}
        # With 2k sets a peer that still waits for this rank is at most 2k - 1 calls further (`docs/low-latency.md`).
        limit = self.number + self.plan.num_sets
        ahead = {rank: number for rank, number in sent.items() if number >= limit or rank in spent}
        ahead.update({rank: far.latest for rank, far in shared.far.items() if not far.has_sent(self.number)})
        return {
            rank: f", which has gone on without this rank (it is at call {number})" for rank, number in ahead.items()
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
        self.shared.lose(lost)
        warnings.warn(
            f"{self.name}: {told(lost)}. From now on masked: its experts' results are missing ({window.me()})",
            RuntimeWarning,
            stacklevel=2,
        )

    def _peer_table(self, rank: int, post: Post, size: int) -> torch.Tensor:
        """[size] int64: a peer's table of this call, where it lies."""
        base = Base(post.base.segment, post.base.segment.start + table_offset(self.number))
        mapping = self.shared.peer(rank).mapping(base, base.offset + 8 * size)
        return mapping.rows(base.offset, 1, size, torch.int64)[0]

    def _peer_place(self, rank: int, post: Post, num_bytes: int) -> int:
        """The place where a peer's rows begin, of which `num_bytes` will be read."""
        mapping = self.shared.peer(rank).mapping(post.base, post.base.offset + num_bytes)
        return self.shared.atlas.place_of(mapping, post.base.offset)


class Barrier(LowLatencyCall):
    """Nothing is sent but the signal."""

    agreement = Agreement(BARRIER)

    def _publish(self) -> Post:
        return Post(0, self.shared.base(0))
