"""One low-latency call of a rank on the CPU: publish and signal, wait for all ranks, fetch.

Everything called `send` or `receive` runs on the comm stream.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ....errors import EPError, EPTimeout
from ....log import warn
from ....trace import NO_SLICE, RECEIVE, SEND, WAIT, Slice
from ....transport import LOW_LATENCY as LOW_LATENCY_CALLS
from ....transport import Base
from ....transport.board import HEADER, MOST_WORDS_BEFORE_MASKS, NO_REFUSAL, NUM_SENT_POSTS, STEP_BITS, Refusal
from ....transport.senders import told, wait_sent
from ....transport.window import Where, refused_by
from ...cpu.call import Call
from ...protocol import LOW_LATENCY, Agreement, Header, clashes_among, disagreement
from ..calls import BARRIER
from ..geometry import NUM_SETS, SetPlan
from ..slots import NO_SLOT
from .agreement import Verdict
from .remote import Outgoing, RemotePost, new_frame
from .shared import ExcludedError, Shared, SpoiledError, table_offset

if TYPE_CHECKING:  # it needs sockets that other systems do not have
    from ....transport.mesh import Mesh


# Behind what must agree: rows and base of a `LocalPost`, the number of the call, how often it was refused before.
_NUM_POST_WORDS = 1 + 3 + 1 + 1
assert len(Agreement._fields) + _NUM_POST_WORDS <= MOST_WORDS_BEFORE_MASKS


class LocalPost(NamedTuple):
    """What a rank posts with a call that it has sent, besides what must agree.

    Attributes:
        num_rows: Rows that it has published.
        base: Where they begin.
    """

    num_rows: int
    base: Base


class Standing(NamedTuple):
    """How a rank stands to the others in a call that it has sent.

    Attributes:
        number: The number of the call that it has posted.
        times: How often it had refused that call before.
        masks: The words of its masks.
    """

    number: int
    times: int
    masks: list[int]


class Posts(NamedTuple):
    """What the ranks that are not masked have sent in a call, by rank.

    Attributes:
        local: Ranks of this node: their posts, and where their rows are.
        remote: Ranks of other nodes: their frames.
    """

    local: dict[int, LocalPost]
    remote: dict[int, RemotePost]


def warn_of_masks(where: str, lost: dict[int, str], me: str) -> None:
    """Warn that ranks are masked, and why."""
    text = f"{where}: {told(lost)}. From now on masked: its experts' results are missing ({me})"
    warn(text, stacklevel=3)


class LowLatencyCall(ABC):
    """One call of this rank.

    Args:
        shared: The state that the calls of the buffer share.
        plan: Where its rows lie.
        wait_stats: [R] int64; the nanoseconds waited for each rank are added. Or None.

    Attributes:
        agreement: What must be the same on all ranks.
        takes: What it takes of the slots, see `slots.py`.
        wide_bytes: Of a dispatch that takes a slot: the `num_rdma_bytes` with which it would take none.
        number: Of the call, once it is made.
        age: How many calls were sent after it; not used on the CPU.
        slot: The slot of its rows; None: they are in a dispatch set, or there are none.
    """

    agreement: Agreement
    takes = NO_SLOT
    wide_bytes = number = age = 0
    slot: int | None = None
    _last_call = 0  # that used the slot
    _own_refusal = NO_REFUSAL  # the last one of this rank, at the time of the call
    _moved: tuple[list[int], list[int], int] | None = None  # rows to and from each rank, and their bytes

    def __init__(self, shared: Shared, plan: SetPlan, wait_stats: torch.Tensor | None):
        self.shared = shared
        self.plan = plan
        self._wait_stats = wait_stats

    @property
    def operation(self) -> str:
        """What the call does."""
        return self.agreement.operation

    def take_slot(self, slot: int, last_call: int) -> None:
        """Take a slot for the rows of the call, which another call used last."""
        self.slot, self._last_call = slot, last_call

    @property
    def name(self) -> Call:
        """The name of the call, for messages."""
        return Call(self.shared.window, self.number, Header(self.agreement, 0))

    def send(self) -> None:
        """Publish this rank's rows, and signal. Does not wait."""
        with self._phase("send"):
            self._send()

    def receive(self) -> None:
        """Wait for all ranks that are not masked, and fetch.

        Fetch again without some, if they turn out to be too far ahead.
        """
        with self._phase("receive"):
            self._receive()
        self.shared.num_calls[self.operation] += 1

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        """The block is a phase of the call, unless a call before it has failed."""
        self.shared.require_working()
        trace = self.shared.window.trace
        if trace is not None:
            trace.begin_call(f"{self.operation} {name}", call=self.number)
        yield
        if trace is not None:
            trace.end_call(path=LOW_LATENCY)

    def _send(self) -> None:
        window, operation = self.shared.window, self.operation
        # As it is now: a later call may be refused before this one is received.
        self._own_refusal = window.refusals[LOW_LATENCY_CALLS]
        self.shared.spend(self._newest_spent())
        with self._slice("publish", SEND):
            num_rows, base = self._publish()
        times, masks = self._own_refusal.times_of(self.number), self.shared.mask_words()
        words = [*self.agreement.words(), num_rows, *base.words(), self.number, times, *masks]
        window.board.post_sent(self.number, words)
        self.shared.fault(f"{operation}: before sent")
        # A caller that has left may have overwritten what was published. With masks peers use whatever was sent.
        window.raise_if_given_up(Where(operation, self.number))
        window.board.sent.store_release(self.number)
        self.shared.fault(f"{operation}: local sent")
        if self.shared.mesh is not None:
            with self._slice("send to other nodes", SEND):
                self._send_remote(self.shared.mesh)
        self.shared.fault(f"{operation}: after sent")

    def _newest_spent(self) -> int:
        """Return the newest call whose rows, or post and table, this call overwrites."""
        return max(0, self.number - NUM_SENT_POSTS, self._last_call)

    def _receive(self) -> None:
        self.shared.fault(f"{self.agreement.operation}: before receive")
        while True:
            self._wait()
            if self._take_over_masks():
                continue
            spoiled = None
            try:
                with self._slice("fetch", RECEIVE):
                    self._fetch(self._posts())
            except ExcludedError as error:
                self._mask({error.rank: error.reason}, self.number)
                continue
            except SpoiledError as error:
                spoiled = error
            # A rank that went on without this one may have overwritten what was being read, or made another call.
            ahead = self._ahead()
            # A difference is no mistake of the program if the other rank has received the call without this one.
            if spoiled is not None and not ahead:
                ahead = self._excluding()
            if not ahead:
                break
            self._lose(ahead)
        if spoiled is not None:
            raise EPError(str(spoiled))
        self._finish()
        if self._moved is not None:
            self.shared.stats.count_rows(*self._moved)
        for sender in self.shared.remote(self.number).values():
            sender.forget(self.number)
        # Last: from here on peers that agree on lost ranks find that this rank has received the call.
        self.shared.end(self.number)

    def _send_remote(self, mesh: Mesh) -> None:
        """Send each rank of another node its part."""
        for rank in self.shared.remote(self.number):
            mesh.send(rank, self.number, self._frame_to(mesh, rank).page)

    @abstractmethod
    def _publish(self) -> LocalPost:
        """Write rows and table into this rank's memory."""

    def _frame_to(self, mesh: Mesh, rank: int) -> Outgoing:
        """Make the frame with the part of the publication that is for a rank of another node."""
        return new_frame(mesh, self._said, 0, 0, ())

    @property
    def _said(self) -> list[int]:
        """Return the words that a frame begins with: what must agree, refusals, and this rank's masks."""
        return [*self.agreement.words(), self._own_refusal.times_of(self.number), *self.shared.mask_words()]

    def _fetch(self, posts: Posts) -> None:
        """Read what the ranks in `posts` have published.

        It is repeated without some of them, if they went on too early.

        Raises:
            SpoiledError: What a rank has published is inconsistent.
        """
        return

    def _finish(self) -> None:
        """Do what must be done only once, after the last fetch."""
        return

    # What a trace shows ----------------------------------------------------------------------------------------------

    def _slice(self, name: str, kind: str) -> Slice:
        """Return a context manager that records its block as a slice of the call in a trace."""
        trace = self.shared.window.trace
        return trace.slice(name, kind) if trace is not None else NO_SLICE

    def _note(self, posts: Posts, rows_to: Any, rows_from: Any, row_bytes: int, **more: Any) -> None:
        """Note the rows to and from each rank, [R]; those of masked ranks do not count. A trace shows further facts."""
        if len(posts.local) + len(posts.remote) < rows_to.size:
            masked = [rank for rank in range(rows_to.size) if rank not in posts.local and rank not in posts.remote]
            rows_to[masked] = rows_from[masked] = 0
        self._moved = rows_to.tolist(), rows_from.tolist(), row_bytes
        trace = self.shared.window.trace
        if trace is not None:
            trace.note(rows_from=self._moved[1], row_bytes=row_bytes, **more)

    # Peers -----------------------------------------------------------------------------------------------------------

    def _wait(self) -> None:
        while lost := self._missing():
            gone = {rank: reason for rank, reason in lost.items() if self._has_gone_on(rank)}
            self._mask(gone, self.number)
            missed = {rank: reason for rank, reason in lost.items() if rank not in gone}
            if missed:
                agreed, number = self._verdict().agree(missed)
                self._mask(agreed, number, is_for_all=True)

    def _missing(self) -> dict[int, str]:
        """Wait for all ranks that are not masked. Returns the ranks that did not come, each with a reason."""
        shared, window = self.shared, self.shared.window
        senders = [sender for rank, sender in shared.senders.items() if not shared.is_masked(rank, self.number)]
        operation, may_lose = self.agreement.operation, shared.can_mask
        told_lost = self._verdict().told_lost if may_lose else dict
        with self._slice("wait: sent", WAIT) as waiting:
            own, me = self._own_refusal, window.me()
            limits = (window.limit_secs, own, self._look)
            arrivals = wait_sent(senders, self.number, operation, me, *limits, may_lose=may_lose, told_lost=told_lost)
            waiting.waited({rank: ns * 1e-9 for rank, ns in arrivals.waited_ns.items() if ns})
        if self._wait_stats is not None:
            waited_ns = [arrivals.waited_ns.get(rank, 0) for rank in range(window.group_ranks.num_ranks)]
            self._wait_stats.add_(torch.tensor(waited_ns, device="cpu"))
        if window.watch is not None:
            window.watch.note({rank: ns * 1e-9 for rank, ns in arrivals.waited_ns.items()})
        return arrivals.lost

    def _look(self, where: object) -> None:
        """Raise if this rank has given the call up, or if a rank of this node will not send it: it is in a call of
        normal mode, in which it waits for this rank.

        With masks such a rank is lost at the limit, as a silent one is.
        """
        shared, window = self.shared, self.shared.window
        window.raise_if_given_up(where)
        if shared.can_mask:
            return
        entered = window.board.progress.load_acquire() >> STEP_BITS
        for rank in shared.local:
            board = shared.peer(rank).board
            # Progress first, `sent` second: a peer may have sent this call and then entered the other one.
            epoch = board.progress.load_acquire() >> STEP_BITS
            if epoch > entered and board.sent.load_acquire() < self.number:
                theirs = Agreement.from_words(board.read(HEADER, epoch))
                raise disagreement(str(where), window.me(), [(f"rank {rank}", self.agreement, theirs)])

    def _verdict(self) -> Verdict:
        where, window = Where(self.agreement.operation, self.number), self.shared.window
        return Verdict(self.shared, self.number, lambda: window.raise_if_given_up(where))

    def _has_gone_on(self, rank: int) -> bool:
        """Return whether a rank of another node makes its calls without this one: it has sent a later call and not this
        one.
        """
        remote = self.shared.remote(self.number).get(rank)
        return remote is not None and remote.latest > self.number

    def _take_over_masks(self) -> bool:
        """Check whether all ranks that have sent the call include this rank, and which ranks they have lost; and
        whether all had refused it equally often before.

        Returns:
            Whether ranks were masked for it. Then the other ranks are to be checked again.
        """
        shared = self.shared
        if not shared.can_mask:
            return False
        size, times, gone, told, refused = shared.num_mask_words, self._own_refusal.times_of(self.number), {}, {}, {}
        for rank, theirs in self._standing_of_others().items():
            # First: nothing else in the post of another call is about this one.
            if theirs.number != self.number:
                gone[rank] = f", which has gone on without this rank (it is at call {theirs.number})"
            elif shared.rank in shared.ranks_of(theirs.masks[:size]):
                gone[rank] = ", which has masked this rank: they are out of step"
            elif theirs.times < times:
                gone[rank] = ", which made the call that this rank had refused: they are out of step"
            elif theirs.times > times:
                refused[rank] = f", which had refused the call before: {self._why_refused(rank)}"
            else:
                lost = [one for one in shared.ranks_of(theirs.masks[size:]) if not shared.is_masked(one, self.number)]
                told.update(dict.fromkeys(lost, f", which rank {rank} has lost"))
        self._mask(gone, self.number)
        self._mask({rank: why for rank, why in told.items() if rank not in gone}, self.number, is_for_all=True)
        if refused:
            agreed, number = self._verdict().agree(refused)
            self._mask(agreed, number, is_for_all=True)
        return bool(gone or told or refused)

    def _standing_of_others(self) -> dict[int, Standing]:
        """Return the standing of each rank that is not masked."""
        shared, first = self.shared, len(Agreement._fields) + _NUM_POST_WORDS - 2
        last = first + 2 + 2 * shared.num_mask_words
        said = {}
        for rank in shared.local:
            if rank != shared.rank and not shared.is_masked(rank, self.number):
                number, times, *masks = shared.peer(rank).board.read_sent(self.number, last)[first:]
                said[rank] = Standing(number, times, masks)
        for rank, sender in shared.remote(self.number).items():
            page = sender.arrived(self.number)
            if page is not None:  # else it has gone on meanwhile, which `_ahead` notices
                post = RemotePost.of(rank, page, 2 * shared.num_mask_words)
                said[rank] = Standing(self.number, post.times, post.masks)
        return said

    def _require_same_refusals(self, times: dict[int, int]) -> None:
        """Check that all ranks had refused the call equally often before they made it.

        A rank that has corrected a mistake of its own alone makes another call than the others do.

        Args:
            times: How often each rank had.

        Raises:
            EPPeerFailed: A rank had refused it more often, or less often than this one.
        """
        own, me = self._own_refusal.times_of(self.number), self.shared.window.me()
        more = [rank for rank, theirs in times.items() if theirs > own]
        if more or any(theirs < own for theirs in times.values()):
            rank = min(more, default=self.shared.rank)
            refusal = Refusal(self.number, max(times.values()), self._why_refused(rank))
            raise refused_by(rank, refusal, str(self.name), me)

    def _why_refused(self, rank: int) -> str:
        """Return why a rank has refused the call before, if it has not refused a later one since."""
        own = rank == self.shared.rank
        refusal = self._own_refusal if own else self.shared.senders[rank].refusal(self.number)
        return refusal.reason if refusal.number == self.number else "look at its output"

    def _posts(self) -> Posts:
        """Return what the unmasked ranks have posted, after mapping their memory.

        Raises:
            SpoiledError: A post is of another call, or they do not agree. The message names the rank that differs, and
                the items in which it does.
            EPPeerFailed: Ranks had not refused the call equally often, and none may be masked.
        """
        shared, expected, said, times = self.shared, self.agreement.words(), {}, {}
        size, posts = len(expected), Posts({}, {})
        for rank in shared.local:
            # A masked rank's post may be of any call. This rank itself can be masked, too.
            if shared.is_masked(rank, self.number):
                continue
            words = shared.peer(rank).board.read_sent(self.number, size + _NUM_POST_WORDS)
            *_, number, times[rank] = words
            if number != self.number:
                raise SpoiledError(
                    f"{self.name}: rank {rank} must have sent this call, but in its place is call {number} "
                    f"({shared.window.me()}). It has left a call out: look at its output, and make a new buffer"
                )
            said[rank] = words[:size]
            posts.local[rank] = LocalPost(words[size], Base.from_words(words[size + 1 : size + 4]))
        for rank, sender in shared.remote(self.number).items():
            page = sender.arrived(self.number)
            if page is not None:  # else it has gone on meanwhile, which `_ahead` notices
                posts.remote[rank] = RemotePost.of(rank, page, 2 * shared.num_mask_words)
                said[rank], times[rank] = posts.remote[rank].agreed, posts.remote[rank].times
        if not shared.can_mask:
            self._require_same_refusals(times)
        if any(words != expected for words in said.values()):
            clashes = clashes_among({**said, shared.rank: expected}, expected)
            raise SpoiledError(str(disagreement(str(self.name), shared.window.me(), clashes)))
        # Only now: as headers, posts are compared before anything else in them is used.
        for rank, post in posts.local.items():
            shared.reach(rank, post.base.segment)
        shared.reach_receive_arena()
        return posts

    def _ahead(self) -> dict[int, str]:
        """Return the ranks that have begun to overwrite the memory of this call, or are further, each with a reason."""
        shared = self.shared
        boards = {rank: shared.peer(rank).board for rank in shared.local if not shared.is_masked(rank, self.number)}
        sent = {rank: board.sent.load_acquire() for rank, board in boards.items()}
        # Behind the reads of rows: a rank stores it before it writes there again.
        spent = {rank for rank, board in boards.items() if board.spent.load_behind_reads() >= self.number}
        # A peer that still waits for this rank is at most 3 calls further (`docs/low-latency.md`).
        limit = self.number + NUM_SETS
        ahead = {rank: number for rank, number in sent.items() if number >= limit or rank in spent}
        ahead.update(
            {
                rank: remote.latest
                for rank, remote in shared.remote(self.number).items()
                if not remote.has_sent(self.number)
            }
        )
        return {
            rank: f", which has gone on without this rank (it is at call {number})" for rank, number in ahead.items()
        }

    def _excluding(self) -> dict[int, str]:
        """Return the ranks of this node that have received the call without this rank, each with a reason."""
        shared, verdict = self.shared, self._verdict()
        others = [rank for rank in shared.local if rank != shared.rank and not shared.is_masked(rank, self.number)]
        return {
            rank: ", which took this rank for lost, and has gone on without it"
            for rank in others
            if verdict.excludes_this_rank(rank)
        }

    def _lose(self, lost: dict[int, str]) -> None:
        """Mask ranks, or fail because of them."""
        window = self.shared.window
        if not self.shared.can_mask:
            raise EPTimeout(
                f"{self.name}: {told(lost)} ({window.me()}). This rank was too late; look "
                "at its output, and make a new buffer"
            )
        self._mask(lost, self.number)

    def _mask(self, lost: dict[int, str], number: int, *, is_for_all: bool = False) -> None:
        """Mask ranks from a call on, and warn of it. Reasons are phrased to follow the rank in a sentence."""
        if not lost:
            return
        window = self.shared.window
        self.shared.mask(lost, number, is_for_all=is_for_all)
        warn_of_masks(str(self.name), lost, window.me())

    @property
    def _offset(self) -> int:
        """Return where this rank's rows of the call begin."""
        return self.plan.offset_of_set(self.number) if self.slot is None else self.plan.slot_offset(self.slot)

    def _peer_table(self, rank: int, post: LocalPost, size: int) -> torch.Tensor:
        """Return [size] int64: a peer's table of this call, in place."""
        base = Base(post.base.segment, post.base.segment.start + table_offset(self.number))
        mapping = self.shared.peer(rank).mapping(base, base.offset + 8 * size)
        return mapping.rows(base.offset, 1, size, torch.int64)[0]

    def _peer_grain(self, rank: int, post: LocalPost, num_bytes: int) -> int:
        """Return the grain at which a peer's rows begin, of which `num_bytes` will be read."""
        mapping = self.shared.peer(rank).mapping(post.base, post.base.offset + num_bytes)
        return self.shared.atlas.grain_of(mapping, post.base.offset)


class Barrier(LowLatencyCall):
    """A call that sends nothing but the signal."""

    agreement = Agreement(BARRIER)

    def _publish(self) -> LocalPost:
        return LocalPost(0, self.shared.base(0))
