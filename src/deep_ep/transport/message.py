"""Messages between the ranks of a rail, over TCP.

Only the comm stream uses a rail. Nothing blocks: a wait polls the links, checks whether a peer of the node has failed,
and has a time limit. `docs/decisions/0008-rails.md` says why these are sockets of our own.
"""

from __future__ import annotations

import functools
import os
import socket
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

from ..control import Control, PeerMissing
from ..errors import EPError, EPPeerFailed, EPTimeout, EPTransportError, encoded
from ..topology import Topology
from ..trace import NETWORK, NO_SLICE, WAIT, Slice, Trace, from_track, to_track
from .board import NO_REFUSAL, Refusal
from .link_set import LinkSet
from .links import ALIVE, ANNOUNCE, FAILED, REFUSED, ROWS, Departure, Frame, Link, Page, Pieces, Pool
from .rendezvous import UnreachedError, connect_rail
from .service import mark, service_level
from .window import Failure, Waiting, require_same_refusals

_LOOK_SECS = 0.02  # how often a wait looks at the node
_FAREWELL_SECS = 0.5  # without progress, after which a rank that fails gives up its last words
# A wait on a rail is longer than one inside a node: if a rank is silent, its own node should report it first, and
# name it, before another node complains of the rank that waits for it.
_GRACE_SHARE, _MOST_GRACE_SECS = 0.2, 2.0
_ALIVE_SHARE = 0.2  # of the limit, between two messages that this rank is still waiting


class Rail:
    """The links of one rank, one to each other node.

    Args:
        links: By node, none for the own one.
        topology: Where this rank stands.
        limit_secs: Seconds that a wait may take, without anything coming or going.
        pool: Where pages of payloads come from.

    Attributes:
        num_sent: Messages sent so far.
        num_received: Messages taken so far.
        trace: The trace in which waits and messages are recorded; None: none is.
    """

    trace: Trace | None = None

    def __init__(self, links: dict[int, Link], topology: Topology, limit_secs: float, pool: Pool):
        self.links = links
        self._link_set = LinkSet(links)
        self.pool = pool
        self.num_sent = self.num_received = 0
        self.topology = topology
        self.limit_secs = limit_secs
        self._pid = os.getpid()
        self._has_failed = False
        self._own_refusal = NO_REFUSAL
        self._next_alive = 0.0
        self._num_departed: Counter[int] = Counter()  # chunks of the call, by track; only while they are recorded

    @property
    def nodes(self) -> list[int]:
        """The other nodes, beginning with the next, so that not all send to the same one first."""
        num_nodes, node = self.topology.num_nodes, self.topology.node
        return [(node + step) % num_nodes for step in range(1, num_nodes)]

    def rank_of(self, node: int) -> int:
        """Return the rank of this rail on a node."""
        return node * self.topology.ranks_per_node + self.topology.local_rank

    def name(self, node: int) -> str:
        """Return the name of the rank of this rail on a node, for a message."""
        return f"rank {self.rank_of(node)} (node {node})"

    def send(self, node: int, topic: int, epoch: int, what: Page | Pieces, tag: int = 0) -> None:
        """Queue a message: a page, or pieces. A page goes back to the pool when it is sent."""
        self.links[node].send(topic, epoch, tag, what)
        self.num_sent += 1

    def receive(self, node: int, wait: Wait) -> Frame:
        """Wait for the next message of one node, and return it."""
        wait.until(lambda: bool(self.links[node].inbox), [node])
        # `until` has not looked if the message was there already.
        wait.require_working()
        return self.take(node)

    def take(self, node: int) -> Frame:
        """Return the next message of one node, which has arrived."""
        self.num_received += 1
        return self.links[node].inbox.popleft()

    def start_trace(self, trace: Trace) -> None:
        """Record all further waits and messages in a trace."""
        self.trace = trace
        for node, link in self.links.items():
            link.on_departure = functools.partial(self._record_departure, trace, to_track(self.rank_of(node)))

    def _record_departure(self, trace: Trace, track: int, gone: Departure) -> None:
        if gone.topic == ANNOUNCE:
            self._num_departed[track] = 0  # a call begins
        name = f"send chunk {self._num_departed[track]}" if gone.topic == ROWS else "send message"
        self._num_departed[track] += gone.topic == ROWS
        trace.record(name, NETWORK, gone.begun_ns, gone.ended_ns, track, {"bytes": gone.num_bytes})

    def record_arrival(self, node: int, frame: Frame, name: str) -> None:
        """Record in the trace when a message came, if there is a trace."""
        if self.trace is not None:
            track, args = from_track(self.rank_of(node)), {"bytes": frame.page.num_bytes}
            self.trace.record(name, NETWORK, frame.begun_ns, frame.ended_ns, track, args)

    def slice(self, name: str, kind: str) -> Slice:
        """Return a context manager that records its block as a slice of the call in a trace."""
        return self.trace.slice(name, kind) if self.trace is not None else NO_SLICE

    def turn(self, secs: float) -> bool:
        """Send and read what is possible, after waiting at most so many seconds. Returns whether anything was."""
        return self._link_set.turn(secs)

    def look(self, where: str, waited_secs: float) -> None:
        """For waits that are not the rail's: raise if a rank of the rail has reported a failure.

        In a long wait, messages to the rail show that this rank is alive: a rank on another node that waits for it has
        about the same limit as this wait, and must not blame this rank for the one that it waits for itself.

        Args:
            where: The call, for errors.
            waited_secs: How long it has waited.
        """
        pause_secs, now = _ALIVE_SHARE * self.limit_secs, time.monotonic()
        if waited_secs > pause_secs and now >= self._next_alive:
            self._next_alive = now + pause_secs
            for link in self.links.values():
                if link.ending is None and not link.num_queued:
                    link.send(ALIVE, 0, 0, Pieces([]))
        self.turn(0)
        self.raise_if_failed(where)

    def raise_if_failed(self, where: str) -> None:
        """Raise if a rank of the rail has reported a failure."""
        failure = self.last_words()
        if failure is not None:
            raise EPPeerFailed(*failure, where, self.me())

    def me(self) -> str:
        """The name of this rank in messages."""
        return f"rank {self.topology.rank}/{self.topology.num_ranks}"

    def require_same_refusals(self, node: int, epoch: int, where: str, *, has_come: bool) -> None:
        """Do what the function does for a node's rank. Refusals come before the frames of a call."""
        theirs, own = (self.rank_of(node), self.links[node].refusal), (self.topology.rank, self._own_refusal)
        require_same_refusals(epoch, theirs, own, where, self.me, has_come=has_come)

    def last_words(self) -> Failure | None:
        """Return why a rank of the rail has failed, as it has reported it; None: none has."""
        return next((link.failure for link in self.links.values() if link.failure is not None), None)

    def refuse(self, refusal: Refusal) -> None:
        """Report to the rail that this rank does not make a call."""
        self._own_refusal = refusal
        for link in self.links.values():
            if link.ending is None:
                link.send(REFUSED, refusal.number, refusal.times, self.pool.filled(encoded(refusal.reason)))

    def fail(self, failure: Failure) -> None:
        """Report to the rail, once, that this rank has failed. The links stay open: peers may still be sending."""
        if self._has_failed:
            return
        self._has_failed = True
        for link in self.links.values():
            link.drop_queued()
            if link.ending is None:
                link.send(FAILED, 0, failure.rank, self.pool.filled(encoded(failure.cause)))
        self._link_set.drain(_FAREWELL_SECS, lambda: self.turn(_LOOK_SECS))

    def close(self) -> None:
        """Send that this rank leaves, and close the links."""
        if os.getpid() == self._pid:
            self._link_set.close()

    def stats(self) -> dict[str, int]:
        """Return counters of the rail: messages, and bytes, including everything that is added to rows."""
        return {
            "messages_sent": self.num_sent,
            "messages_received": self.num_received,
            **self._link_set.stats(),
        }


class Wait:
    """The waits of one call on a rail.

    Args:
        rail: The rail.
        where: The call, for errors.
        epoch: Its number.
        look: Raises if a peer of the node has failed.
        tell: Publishes to the node whether this rank waits on its rail.
    """

    def __init__(self, rail: Rail, where: str, epoch: int, look: Callable[[], None], tell: Callable[[bool], None]):
        self._rail = rail
        self.where = where
        self._epoch = epoch
        self._look = look
        self._tell = tell
        self._timeout_secs = rail.limit_secs + min(_MOST_GRACE_SECS, _GRACE_SHARE * rail.limit_secs)

    def until(self, is_done: Callable[[], bool], nodes: Collection[int]) -> None:
        """Poll the links until a condition holds.

        Args:
            is_done: The condition.
            nodes: The nodes that it depends on.

        Raises:
            EPTimeout: Nothing moved for the limit.
            EPError: A rank of the rail, or of the node, failed or left.
        """
        if is_done():
            return
        self._tell(True)
        with self._rail.slice("wait: rail", WAIT) as waiting:
            begin = time.monotonic()
            self._until(is_done, nodes)
            # A node that has sent something ended the wait; if none has, the system accepted what was queued for them.
            came = [node for node in nodes if self._rail.links[node].inbox] or nodes
            waiting.waited({self._rail.rank_of(node): time.monotonic() - begin for node in came})
        self._tell(False)  # not if it fails: the node must not blame this rank before it has reported why

    def _until(self, is_done: Callable[[], bool], nodes: Collection[int]) -> None:
        waiting = Waiting()
        while not is_done():
            before, has_moved = waiting.secs, self._rail.turn(_LOOK_SECS)
            for node in nodes:
                self._rail.links[node].wait_secs += waiting.look() - before
            if has_moved:
                # The limit is for a rail on which nothing moves: a slow link is no silent rank.
                waiting = Waiting()
            # A node that has done its part may have left since.
            self.require_working(() if is_done() else nodes)
            if waiting.look() > self._timeout_secs:
                raise EPTimeout(
                    f"{self.where}: no message from {self._names(nodes)} after {self._rail.limit_secs:g} s "
                    f"({self._rail.me()}). It exited, hangs, or called in another order; look at its output"
                )

    def require_working(self, nodes: Iterable[int] = ()) -> None:
        """Raise if a rank has failed, or if one of the nodes that are waited for is gone."""
        self._rail.raise_if_failed(self.where)
        self._look()
        for node in nodes:
            link = self._rail.links[node]
            self._rail.require_same_refusals(node, self._epoch, self.where, has_come=bool(link.inbox))
            # What a rank has sent before it left, or ended, is still to be taken.
            if link.has_left and not link.inbox:
                raise EPError(
                    f"{self.where}: {self._rail.name(node)} has destroyed its buffer ({self._rail.me()}). "
                    "All ranks of a buffer must make the same calls"
                )
            if link.ending is not None and not link.inbox:
                raise EPError(
                    f"{self.where}: {self._rail.name(node)} {link.ending} ({self._rail.me()}). "
                    "Look at its output, and make a new buffer over the ranks that live"
                )

    def _names(self, nodes: Collection[int]) -> str:
        return ", ".join(self._rail.name(node) for node in nodes)


def make_rail(control: Control, topology: Topology) -> Rail:
    """Connect this rank to its rail. All ranks of the group call it together, in a joint step.

    Raises:
        EPTransportError: A pair of ranks could not be connected. All ranks raise.
    """
    size = topology.ranks_per_node
    rail = [node * size + topology.local_rank for node in range(topology.num_nodes)]
    pool, connections = Pool(), connect(control, rail)
    links = {rank // size: Link(connection, pool) for rank, connection in sorted(connections.items())}
    made = Rail(links, topology, control.limit_secs, pool)
    control.undo(made.close)
    return made


def connect(control: Control, ranks: list[int], is_low_latency: bool = False) -> dict[int, socket.socket]:
    """Connect this rank to some others, which must also name this rank. All ranks of the group call it together.

    Args:
        control: The group. The connections are closed if its joint step fails.
        ranks: The ranks to be connected; this one may be among them.
        is_low_latency: Which traffic goes over it: each has its service level.

    Raises:
        EPTransportError: This rank could not be connected to one of them.
    """
    level = service_level(is_low_latency)
    connections, problem = connect_rail(control, ranks, control.deadline)
    if problem is not None:
        kind = PeerMissing if isinstance(problem, UnreachedError) else EPTransportError
        raise kind(f"transport message: {problem}") from problem
    for connection in connections.values():
        control.undo(connection.close)
    for connection in connections.values():
        mark(connection, level)
    return connections
