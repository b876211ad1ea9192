"""The mesh: links of a rank to all ranks of other nodes, for low-latency calls, and the thread that moves frames.

A send phase must not wait, and between the phases of a call the caller computes. So what the system does not accept at
once is sent by a thread, which also reads what comes, each frame straight into its *receive buffer*. The comm stream
queues frames, and checks what has arrived. `docs/decisions/0011-low-latency-across-nodes.md` has the reasons.
"""

from __future__ import annotations

import os
import threading
import time
from typing import NamedTuple

from ..control import Control
from ..errors import EPTransportError, encoded
from ..topology import Topology
from .arena import Arena
from .board import NUM_SENT_POSTS, Meeting, Refusal
from .link_set import LinkSet, Waker, in_turn
from .links import FAILED, JOIN, REFUSED, SENT, Link, Page, Pool
from .memory import Mapping
from .message import connect
from .sparse import HollowMemory
from .window import Failure

_FAREWELL_SECS = 5.0  # without progress, after which a rank that leaves gives up what is still queued
_PAUSE_SECS = 1e-3


class ReceiveArena:
    """Memory that frames are received in. It is used again when the last reference to a frame is gone.

    Attributes:
        mappings: Where all receive buffers lie. Only grows.
    """

    def __init__(self) -> None:
        self.mappings: list[Mapping] = []
        self._arena = Arena(HollowMemory(), on_map=self.mappings.append)

    def take(self, num_bytes: int) -> Page:
        """Return a receive buffer of `num_bytes`, aligned to 16 bytes.

        Raises:
            EPTransportError: There is too little memory.
        """
        view = self._arena.take(max(1, num_bytes))
        if view is None:
            raise EPTransportError(f"transport message: there is no memory for a message of {num_bytes} bytes")
        return Page(view, num_bytes)

    def trim(self) -> int:
        """Give unused memory back to the system. Returns the bytes given back."""
        return self._arena.trim()


class _ArrivedFrame(NamedTuple):
    """A frame that has arrived: the call, and what came."""

    number: int
    page: Page


class RemoteSender:
    """A rank of another node, and what it has sent.

    The mesh's thread writes, the comm stream reads. A frame is put into its slot before `latest` names its call.

    Args:
        rank: Its rank in the group.
        link: The connection.

    Attributes:
        latest: The last call that has arrived.
        moved_secs: When bytes came last.
    """

    def __init__(self, rank: int, link: Link):
        self.rank = rank
        self.link = link
        self.latest = 0
        self.moved_secs = 0.0
        self.num_received = 0
        self._slots: list[_ArrivedFrame | None] = [None] * NUM_SENT_POSTS
        self._lock = threading.Lock()

    def has_sent(self, number: int) -> bool:
        """Return whether call `number` has arrived."""
        return self.arrived(number) is not None

    def arrived(self, number: int) -> Page | None:
        """Return what it has sent in a call, which stays unchanged for as long as it is held. None: it has not arrived.

        A call that has arrived is lost again if the rank has gone on without this one, by eight calls.
        """
        # Without the lock: what is in a slot is replaced as a whole.
        arrived = self._slots[number % NUM_SENT_POSTS]
        return arrived.page if arrived is not None and arrived.number == number else None

    def forget(self, number: int) -> None:
        """Release the memory of a call that has been read."""
        with self._lock:  # or the slot could be that of another call by the time it is cleared
            if self.has_sent(number):
                self._slots[number % NUM_SENT_POSTS] = None

    def failure(self) -> Failure | None:
        """Return why it has failed; None: it has not."""
        return self.link.failure

    def refusal(self, number: int) -> Refusal:
        """Return its last refusal to make a call."""
        del number
        return self.link.refusal

    def why_not(self, number: int, looks_at_process: bool) -> str | None:
        """Return why call `number` will not come; None: it may."""
        # Frames come in order: a rank that has sent a later call has left this one out.
        if self.latest > number:
            return f", which has gone on without this rank (it is at call {self.latest})"
        return self.why_gone(looks_at_process)

    def why_gone(self, looks_at_process: bool) -> str | None:
        """Return why no call will come any more; None: one may."""
        del looks_at_process
        failure = self.failure()
        if failure is not None and not failure.is_departure:
            return f", which has failed ({failure})"
        if self.link.has_left:
            return ", which has destroyed its buffer"
        if self.link.ending is not None:
            return f", which {self.link.ending}"
        return None

    def is_silent(self, waited_secs: float, limit_secs: float) -> bool:
        """Return whether it has been silent for the limit, which it is not while bytes of a long frame come."""
        return min(waited_secs, time.monotonic() - self.moved_secs) > limit_secs

    def count_wait(self, secs: float) -> None:
        """Add to the time that this rank has waited for it."""
        self.link.wait_secs += secs

    def meeting(self) -> Meeting:
        """Return what it has last sent in an attempt to rejoin."""
        return self.link.meeting

    def read(self) -> None:
        """Read what has come. Only the mesh's thread calls this."""
        before = self.link.bytes_received
        self.link.fill()
        if self.link.bytes_received != before:
            self.moved_secs = time.monotonic()
        while self.link.inbox:
            frame = self.link.inbox.popleft()
            self.num_received += 1
            # Numbers of calls only grow, also where ranks come into step again.
            if frame.topic != SENT or frame.epoch <= self.latest:
                what = f"topic {frame.topic} of call {frame.epoch} behind call {self.latest}"
                self.link.break_off(f"sent a message that cannot be ({what})")
                return
            with self._lock:
                self._slots[frame.epoch % NUM_SENT_POSTS] = _ArrivedFrame(frame.epoch, frame.page)
            self.latest = frame.epoch


class Mesh:
    """All remote ranks of one rank.

    Args:
        links: By rank.
        topology: Where this rank stands.
        pool: Where memory of outgoing frames comes from.
        receive_arena: Where memory of incoming frames comes from.

    Attributes:
        senders: The remote ranks, beginning behind this one, so that not all send to the same one first.
        receive_arena: See the argument.
        num_sent: Messages sent so far.
    """

    def __init__(self, links: dict[int, Link], topology: Topology, pool: Pool, receive_arena: ReceiveArena):
        links = in_turn(links, topology)
        self.senders = {rank: RemoteSender(rank, link) for rank, link in links.items()}
        self.receive_arena = receive_arena
        self.num_sent = 0
        self._pool = pool
        # Guards what both threads touch: the links' queues and the pool. What a link reads is the thread's alone.
        self._lock = threading.Lock()
        self._waker = Waker()
        self._link_set = LinkSet(links, lambda rank: self.senders[rank].read(), self._lock, self._waker)
        self._has_failed = self._is_stopping = self._is_closed = False
        self._pid = os.getpid()
        # A daemon: a process that ends closes its buffers in an exit function, which comes after other threads' ends.
        self._thread = threading.Thread(target=self._run, name=f"deep_ep-mesh-{topology.rank}", daemon=True)
        self._thread.start()

    # By the comm stream ----------------------------------------------------------------------------------------------

    def page(self, num_bytes: int) -> Page:
        """Return memory for a frame to be sent."""
        with self._lock:
            return self._pool.take(num_bytes)

    def send(self, rank: int, number: int, page: Page) -> None:
        """Send a call to a remote rank. Does not wait."""
        self._queue(rank, SENT, number, page)
        self.num_sent += 1

    def drop(self, rank: int) -> None:
        """Drop what is queued for a rank, except for the rest of a frame that is partly sent."""
        with self._lock:
            self.senders[rank].link.drop_queued()

    def refuse(self, refusal: Refusal) -> None:
        """Report to all remote ranks that this rank does not make a call."""
        for rank in self.senders:
            self._queue(rank, REFUSED, refusal.number, self._filled(encoded(refusal.reason)), refusal.times)

    def meet(self, rank: int, meeting: Meeting) -> None:
        """Send a remote rank the words of an attempt to rejoin."""
        self._queue(rank, JOIN, meeting.attempt, self._filled(meeting.following.to_bytes(8, "little")), meeting.echo)

    def fail(self, failure: Failure) -> None:
        """Report to all remote ranks, once, that this rank has failed, in place of what was queued for them."""
        if self._has_failed:
            return
        self._has_failed = True
        for rank in self.senders:
            self.drop(rank)
            self._queue(rank, FAILED, 0, self._filled(encoded(failure.cause)), failure.rank)

    def close(self) -> None:
        """Wait until what is queued is sent, send that this rank leaves, and close the links."""
        if os.getpid() != self._pid or self._is_closed:
            return  # a forked child is not this rank
        is_other = threading.current_thread() is not self._thread  # garbage collection may run on any
        if is_other:
            self._link_set.drain(_FAREWELL_SECS, lambda: time.sleep(_PAUSE_SECS))  # the thread sends meanwhile
        self._is_stopping = True
        self._waker.wake()
        if is_other:
            self._thread.join()
        self._link_set.close()
        self._waker.close()
        self._is_closed = True  # last: what an interrupt cuts short is done when it is closed again

    def stats(self) -> dict[str, int]:
        """Return counters of these links: messages, and bytes, including everything that is added to rows."""
        return {
            "messages_sent": self.num_sent,
            "messages_received": sum(sender.num_received for sender in self.senders.values()),
            **self._link_set.stats(),
        }

    def _filled(self, data: bytes) -> Page:
        with self._lock:
            return self._pool.filled(data)

    def _queue(self, rank: int, topic: int, number: int, page: Page, tag: int = 0) -> None:
        link = self.senders[rank].link
        with self._lock:
            if link.ending is not None:
                self._pool.give(page)
                return
            link.send(topic, number, tag, page)
            is_waiting = link.num_queued > 0
        if is_waiting:
            self._waker.wake()  # the thread sends the rest

    # By the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while not self._is_stopping:
                self._link_set.turn(None)
        except BaseException as error:  # waits must not hang for a thread that is gone
            for sender in self.senders.values():
                sender.link.ending = sender.link.ending or f"is not heard any more ({type(error).__name__}: {error})"


def make_mesh(control: Control, topology: Topology) -> Mesh:
    """Connect this rank to all ranks of other nodes. All ranks of the group call it together, in a joint step.

    Raises:
        EPTransportError: A pair of ranks could not be connected. All ranks raise.
    """
    remote = topology.remote_ranks
    # a call has a page for each, and the next may already be made
    pool, receive_arena = Pool(2 * len(remote)), ReceiveArena()
    connections = connect(control, remote, is_low_latency=True)
    links = {rank: Link(connection, pool, receive_arena) for rank, connection in connections.items()}
    mesh = Mesh(links, topology, pool, receive_arena)
    control.undo(mesh.close)
    return mesh
