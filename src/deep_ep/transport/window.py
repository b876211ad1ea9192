"""The window of a rank: memory that peers can address, and the signals that go with it.

It moves bytes and knows nothing of tokens. `shm.py` and `solo.py` make windows; the engine uses them:

    region = window.arena.allocate(shape, dtype)  # a tensor over window memory, with which the region is freed
    base = window.arena.base_of(region)           # what a peer needs to address it
    window.board.post(OFFER, epoch, base.words()); window.signal(epoch, OFFERED)
    window.wait(epoch, OFFERED, "dispatch")       # all peers, with a limit
    window.peers[rank].rows(base, num_rows, num_columns, dtype)  # a tensor over the peer's memory
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from ..errors import EPClosed, EPError, EPPeerFailed, EPTimeout, EPTransportError, named
from ..trace import Trace
from ..watch import Watch
from .arena import GROWTH_BYTES, Arena, Base, Segment
from .board import MAX_EXPERTS, MOST_TIMES, NO_REFUSAL, NORMAL, NUM_SENT_POSTS, Board, Refusal, progress_of
from .memory import Mapping, Memory, bytes_tensor
from .spans import Span
from .sparse import SparseSegment

# Between two looks of a wait. A small call is over in a few milliseconds, and long pauses would be most of it; a rank
# that waits longer than that polls less often.
_SHORTEST_PAUSE_SECS, _SHORT_PAUSE_SECS, _LONGEST_PAUSE_SECS = 20e-6, 80e-6, 1e-3
_SHORT_WAIT_SECS = 4e-3
SENT_TABLE_BYTES = 8 * MAX_EXPERTS  # of a low-latency call: a number for each expert
SENT_TABLES_BYTES = NUM_SENT_POSTS * SENT_TABLE_BYTES  # at the beginning of the low-latency memory

# How much longer a wait takes for a peer that waits on its rail; longer than the grace of a rail's own waits.
_GRACE_SHARE, _MOST_GRACE_SECS = 0.5, 5.0
_MOST_STEP_SECS = 0.5  # between two looks of a wait, also on a machine that is busy with other things
_LIVENESS_SECS = 0.02  # how often a wait checks whether the peers' processes are alive
GONE_ON = "has gone on in"  # how the cause begins of a rank that has left for a later generation of the buffer


class Waiting:
    """How long a wait has lasted, and how it is paced.

    Time in which this process did not run (it was stopped, or its machine was asleep) does not count: a process that
    resumes has not seen what its peers wrote meanwhile, and must not blame them for its own absence.
    """

    def __init__(self) -> None:
        self._last = time.monotonic()
        self._pause = _SHORTEST_PAUSE_SECS
        self._checked_secs = 0.0
        self.secs = 0.0

    def look(self) -> float:
        """Return the seconds so far. Must be called at every poll, a few milliseconds apart."""
        now = time.monotonic()
        # Looks are a few milliseconds apart: in the rest of a longer gap this process did not run.
        self.secs += min(now - self._last, _MOST_STEP_SECS)
        self._last = now
        return self.secs

    def sleep(self) -> float:
        """Sleep until the next look, and return the seconds so far.

        Each time sleeps twice as long as the one before, up to what suits the time that the wait has lasted already.
        """
        time.sleep(self._pause)
        secs = self.look()
        self._pause = min(2 * self._pause, _SHORT_PAUSE_SECS if secs < _SHORT_WAIT_SECS else _LONGEST_PAUSE_SECS)
        return secs

    def begin_liveness_check(self) -> bool:
        """Begin a check of the peers' processes if the last one is long enough ago, since it costs more than a look.

        Returns:
            Whether one has begun: the caller makes it.
        """
        if self.secs - self._checked_secs <= _LIVENESS_SECS:
            return False
        self._checked_secs = self.secs
        return True


class Peer:
    """Another rank, or this one, as a window sees it: its board, and its memory mapped on demand."""

    def __init__(self, rank: int, memory: Memory, board: Board):
        self.rank = rank
        self.board = board
        self.wait_secs = 0.0
        self._memory = memory
        self._mappings: dict[int, Mapping] = {board.mapping.span.start: board.mapping}

    def adopt(self, mapping: Mapping) -> None:
        """Use a mapping that exists already (this rank's own)."""
        self._mappings[mapping.span.start] = mapping

    def rows(self, base: Base, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a [num_rows, num_columns] tensor over the peer's memory behind a base."""
        stop = base.offset + num_rows * num_columns * dtype.itemsize
        mapping = self.mapping(base, stop)
        mapping.populate(Span(base.offset, stop))
        return mapping.rows(base.offset, num_rows, num_columns, dtype)

    def mapping(self, base: Base, stop: int) -> Mapping:
        """Return the mapping of the peer's segment behind a base, and map it if needed.

        Args:
            base: What the peer offered.
            stop: Where the bytes end that begin there.
        """
        segment, offset = base
        if not segment.start <= offset <= stop <= segment.stop:
            raise EPTransportError(
                f"window: rank {self.rank} offered bytes {offset} to {stop}, not inside its {segment}"
            )
        # Segments never move and never overlap, so where one starts is enough to know it.
        mapping = self._mappings.get(segment.start)
        if mapping is None:
            mapping = self._mappings[segment.start] = self._memory.map(segment)
        return mapping

    def is_alive(self) -> bool:
        """Return whether its process is alive, as far as can be detected."""
        return True

    def failure(self) -> Failure | None:
        """Why the peer has failed; None: it has not."""
        # The word first: the text was written before it. It is 1 + the rank, since 0 is no failure.
        failed = self.board.failed.load_acquire()
        return Failure(failed - 1, self.board.read_text()) if failed else None

    def close(self) -> None:
        """Close what is needed for new mappings only. Existing mappings stay valid."""
        self._memory.close()


@dataclass(frozen=True)
class WindowSizes:
    """How large a window is made. Nothing of it is committed before it is used.

    Attributes:
        arena_bytes: The first arena segment.
        arena_limit_bytes: All arena segments together; 0: no limit.
        scratch_bytes: The scratch.
        low_latency_bytes: Memory of low-latency calls.
        remote_bytes: Memory of rows between GPUs of different nodes.
    """

    arena_bytes: int
    arena_limit_bytes: int
    scratch_bytes: int
    low_latency_bytes: int = 0
    remote_bytes: int = 0


class GroupRanks(NamedTuple):
    """Where the ranks of a window stand in their group: errors name ranks as the group does.

    Attributes:
        first_rank: The group's rank of peer 0.
        num_ranks: Ranks of the group.
    """

    first_rank: int
    num_ranks: int


class Window:
    """A rank's memory, its peers', and the signals between them.

    Args:
        rank: This rank, counted inside the node.
        peers: All ranks by rank, this one included.
        memory: This rank's memory, with its board already mapped.
        sizes: How large to make it.
        limit_secs: Seconds that a wait may take.
        group_ranks: Where the peers stand in the group.

    Attributes:
        is_scratch_shown: The caller has, or had, a view of the scratch: inputs of calls may lie there.
        low_latency: Memory of low-latency calls; None: there is none.
        failure: Why this rank has failed; None: it has not.
        refusals: The last call of each kind that this rank has refused.
        look: Raises if something else than the window has failed, called with the call that waits and the seconds so
            far; None: there is nothing.
        trace: The trace in which calls are recorded; None: none is.
        watch: Counts which peer came last in a wait; None: nothing does.
        fault: Called at every fault point, where tests stop, kill or delay the rank; None: there is none.
    """

    is_scratch_shown = False

    def __init__(
        self,
        rank: int,
        peers: list[Peer],
        memory: Memory,
        sizes: WindowSizes,
        limit_secs: float,
        group_ranks: GroupRanks,
    ):
        self.rank = rank
        self.peers = peers
        self.group_ranks = group_ranks
        self.board = peers[rank].board
        self.limit_secs = limit_secs
        self.failure: Failure | None = None
        self.refusals = [NO_REFUSAL, NO_REFUSAL]
        self._failing = threading.Lock()
        self.look: Callable[[str, float], None] | None = None
        self.trace: Trace | None = None
        self.watch: Watch | None = None
        self.fault: Callable[[str], None] | None = None
        self._pid = os.getpid()
        self._others = [peer for peer in peers if peer.rank != rank]
        self._scratch = Segment(memory, max(sizes.scratch_bytes, GROWTH_BYTES))
        peers[rank].adopt(self._scratch.mapping)
        self.arena = Arena(memory, sizes.arena_bytes, sizes.arena_limit_bytes, peers[rank].adopt)
        self.low_latency: SparseSegment | None = None
        if sizes.low_latency_bytes:
            self.low_latency = SparseSegment(memory, SENT_TABLES_BYTES + sizes.low_latency_bytes)
            peers[rank].adopt(self.low_latency.mapping)

    def scratch(self, num_bytes: int) -> tuple[Base, torch.Tensor]:
        """Return the first bytes of the scratch: `(base, uint8 tensor)`. They are valid until the call ends."""
        return Base(self._scratch.span, self._scratch.span.start), self.scratch_bytes(0, num_bytes)

    def scratch_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        """Commit bytes `[start, start + num_bytes)` of the scratch, and return them as a uint8 tensor.

        Raises:
            EPTransportError: The scratch, or the memory, is too small.
        """
        span = self._scratch.span
        part = Span(span.start + start, span.start + start + num_bytes)
        if part.stop > span.stop:
            raise EPTransportError(
                f"window: {start + num_bytes} bytes of staging are needed, {span.num_bytes} are there. "
                "Make the buffer with a larger num_nvl_bytes"
            )
        self._scratch.commit(part)
        return bytes_tensor(self._scratch.mapping.view(part))

    def out_of_scratch(self, item: Any) -> Any:
        """Return a tensor, or a copy of it if it lies in the scratch, which a staged call overwrites.

        Anything else is returned as it is.
        """
        if not isinstance(item, torch.Tensor) or self._scratch.mapping.offset_of(item.data_ptr()) is None:
            return item
        return item.clone()

    # Peers ----------------------------------------------------------------------------------------------------------

    def signal(self, epoch: int, step: int) -> None:
        """Signal to all peers that this rank has completed `step` of call `epoch`, and everything before it."""
        self.board.progress.store_release(progress_of(epoch, step))

    def wait(self, epoch: int, step: int, operation: str) -> dict[int, float]:
        """Wait until every peer has completed `step` of call `epoch`.

        Returns:
            Seconds waited for each peer that was not there yet.

        Raises:
            EPTimeout: A peer was silent past the limit.
            EPError: A peer failed, its process ended, or it destroyed its buffer.
        """
        target, where = progress_of(epoch, step), Where(operation, epoch)
        # A peer that is already in the next call has done this step, too.
        pending = [peer for peer in self._others if peer.board.progress.load_acquire() < target]
        waited: dict[int, float] = {}
        waiting = Waiting()
        while pending:
            secs = waiting.sleep()
            arrived = [peer for peer in pending if peer.board.progress.load_acquire() >= target]
            for peer in arrived:
                waited[peer.rank] = secs
                peer.wait_secs += secs
                pending.remove(peer)
            if pending:
                # Failures first: a rank that has failed may have closed or ended since, and its own reason says more.
                self._raise_if_failed(where)
                self._require_same_refusals(where, pending, have_come=False)
                self._raise_if_closed(where, pending, target)
                if waiting.begin_liveness_check():
                    self._raise_if_dead(where, pending, target)
                    if self.look is not None:
                        self.look(str(where), secs)
                if secs > self.limit_secs and (silent := self._silent(pending, secs)):
                    raise EPTimeout(
                        f"{where}: no signal from {self._named(silent)} after {self.limit_secs:g} s ({self.me()}). "
                        "It exited, hangs, or called in another order; look at its output"
                    )
        # A peer that failed may have let its caller overwrite what this rank has just read: progress alone proves
        # nothing.
        self._raise_if_failed(where)
        # Only now that they have come: a rank stores `refused` before the `progress` of its next call.
        self._require_same_refusals(where, self._others, have_come=True)
        self._raise_if_desynced(where)
        if self.watch is not None:
            self.watch.note(waited, self.group_ranks.first_rank)
        return waited

    def _silent(self, pending: list[Peer], waited_secs: float) -> list[Peer]:
        """Return the ranks to blame at the limit: not those that wait for another node themselves, which will name
        the rank.
        """
        if waited_secs > self.limit_secs + min(_MOST_GRACE_SECS, _GRACE_SHARE * self.limit_secs):
            return pending
        return [peer for peer in pending if not peer.board.waiting.load_acquire()]

    # Failure --------------------------------------------------------------------------------------------------------

    def fail(self, cause: str, rank: int | None = None) -> None:
        """Report to all peers that this rank has failed, for good. The first cause stays. Any thread may call it.

        Args:
            cause: What happened, as it follows the rank in a sentence.
            rank: The rank where it happened, as the group counts; None: this one.
        """
        with self._failing:  # the comm stream, and a caller that leaves: one text, and the word behind it
            if self.failure is None:
                rank = self.group_ranks.first_rank + self.rank if rank is None else rank
                self.failure = Failure(rank, cause)
                self.board.write_text(cause)
            # Also if the failure is known already: an interrupt may have come between the two.
            self.board.failed.store_release(self.failure.rank + 1)

    def refuse(self, kind: int, number: int, reason: str) -> Refusal:
        """Report to all peers that this rank does not make a call, of which nothing was sent.

        Args:
            kind: Of calls: `NORMAL` or `LOW_LATENCY`.
            number: The number of the call.
            reason: Why.
        """
        last = self.refusals[kind]
        refusal = Refusal(number, min(last.times_of(number) + 1, MOST_TIMES), reason)
        self.refusals[kind] = refusal
        self.board.post_refusal(kind, refusal)
        return refusal

    def raise_if_given_up(self, where: object) -> None:
        """Raise if the caller has given up, on its own thread, the call in which this thread still waits."""
        if self.failure is not None:
            raise EPClosed(f"{where}: given up, since {self.failure} ({self.me()})")

    def raise_if_peer_failed(self, epoch: int, operation: str) -> None:
        """For waits that are not the window's: raise if a peer has failed, or does not make the call."""
        where = Where(operation, epoch)
        self._raise_if_failed(where)
        self._require_same_refusals(where, self._others, have_come=False)

    def close(self) -> None:
        """Publish that this rank is gone, and close what new mappings need. Tensors stay valid."""
        if os.getpid() != self._pid:
            return  # a forked child does not have the mappings, and is not this rank
        self.board.closed.store_release(1)
        for peer in self.peers:
            peer.close()

    def _raise_if_failed(self, where: Where) -> None:
        self.raise_if_given_up(where)
        for peer in self._others:
            failure = peer.failure()
            if failure is not None:
                raise EPPeerFailed(*failure, str(where), self.me())

    def _require_same_refusals(self, where: Where, peers: list[Peer], *, have_come: bool) -> None:
        """See `require_same_refusals`."""
        number, first = where.epoch, self.group_ranks.first_rank
        own = (first + self.rank, self.refusals[NORMAL])
        for peer in peers:
            theirs = (first + peer.rank, peer.board.read_refusal(NORMAL, number))
            require_same_refusals(number, theirs, own, where, self.me, has_come=have_come)

    def _raise_if_closed(self, where: Where, pending: list[Peer], target: int) -> None:
        for peer in pending:
            # Closed first, progress second: a peer may have done its part and then left.
            if peer.board.closed.load_acquire() and peer.board.progress.load_acquire() < target:
                raise EPError(
                    f"{where}: {self._named([peer])} has destroyed its buffer ({self.me()}). "
                    "All ranks of a buffer must make the same calls"
                )

    def _raise_if_desynced(self, where: Where) -> None:
        """Ranks are at most one call apart (`docs/protocol.md`); more means that the board is not what it should be."""
        limit = progress_of(where.epoch + 2, 0)
        desynced = [peer for peer in self._others if peer.board.progress.load_acquire() >= limit]
        if desynced:
            raise EPError(
                f"{where}: {self._named(desynced)} is more than one call ahead ({self.me()}). This is a bug: report it"
            )

    def _raise_if_dead(self, where: Where, pending: list[Peer], target: int) -> None:
        # Alive first, progress second, as above: a peer may have done its part and then ended.
        dead = [peer for peer in pending if not peer.is_alive() and peer.board.progress.load_acquire() < target]
        if dead:
            raise EPError(
                f"{where}: the process of {self._named(dead)} has ended ({self.me()}). "
                "Look at its output, and make a new buffer over the ranks that live"
            )

    def me(self) -> str:
        """The name of this rank in messages: its rank in the group, also if the window is one node of several."""
        return f"rank {self.group_ranks.first_rank + self.rank}/{self.group_ranks.num_ranks}"

    def _named(self, peers: list[Peer]) -> str:
        return named([self.group_ranks.first_rank + peer.rank for peer in peers])


def require_same_refusals(
    number: int,
    theirs: tuple[int, Refusal],
    own: tuple[int, Refusal],
    where: object,
    me: Callable[[], str],
    *,
    has_come: bool,
) -> None:
    """Raise if a peer refuses a call, or makes it after more, or fewer, refusals of it than this rank.

    A mistake of one rank alone is followed by another call of that rank in the place of the one that the others make.

    Args:
        number: The number of the call.
        theirs: The peer, and its last refusal.
        own: This rank, and its last refusal.
        where: The call, for the error.
        me: Returns the name of this rank, for the error.
        has_come: The peer has entered the call, before which it would have refused it.
    """
    if theirs[1].follows(number, own[1]):
        raise refused_by(*theirs, str(where), me())
    if has_come and theirs[1].falls_behind(number, own[1]):
        raise refused_by(*own, str(where), me())


def refused_by(rank: int, refusal: Refusal, where: str, me: str) -> EPPeerFailed:
    """Return the error of a rank that waits for a call which another rank has refused to make."""
    return EPPeerFailed(rank, f"refused this call, of which nothing was sent: {refusal.reason}", where, me)


class Failure(NamedTuple):
    """Why a buffer has failed.

    Attributes:
        rank: The rank that failed first, or that first noticed that another one has ended or is silent, as the group
            counts.
        cause: What happened there, as it follows the rank in a sentence.
    """

    rank: int
    cause: str

    @property
    def is_departure(self) -> bool:
        """Whether nothing is wrong there: the rank has left this generation of the buffer for a later one."""
        return self.cause.startswith(GONE_ON)

    def __str__(self) -> str:
        return f"rank {self.rank} {self.cause}"


class Where(NamedTuple):
    """The call that waits, for messages: its text is made only if a message is needed."""

    operation: str
    epoch: int

    def __str__(self) -> str:
        return f"{self.operation} (call {self.epoch})"
