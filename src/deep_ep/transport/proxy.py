"""A proxy over TCP: a thread that moves remote memory between ranks of different nodes.

Kernels write shadow boards and ring doorbells in memory of the host; this thread polls them, sends them, and writes
what comes to where the remote rank's kernels poll. It makes no CUDA calls, so it works beside graphs, and it handles
words only, not calls. `remote.py` has the words, `remote_ranks.py` the frames, `docs/decisions/0013-relays.md` the
reasons.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from functools import partial

import torch

from ..control import Control
from ..errors import EPTransportError, account
from ..topology import Topology
from .link_set import LinkSet, in_turn
from .links import Link, Pool
from .message import connect
from .remote import DOORBELL_EPOCH, MOST_CHUNKS, RemoteLayout
from .remote_memory import RemotePieces, RemoteWords
from .remote_ranks import FromRemoteRank, ToRemoteRank

_FAREWELL_SECS = 5.0  # without progress, after which a rank that leaves gives up what is still queued
_LEAST_PAUSE_SECS, _MOST_PAUSE_SECS = 20e-6, 1e-3


class MessageProxy:
    """A thread that moves remote memory over TCP.

    Everything but the list of pieces of rows is used by the thread alone, so there is no lock.

    Args:
        links: To all ranks of other nodes, by rank. Nothing must have been read from them.
        topology: Where this rank stands.
        layout: Where the words are.
        words: [layout.num_words] int64 on the CPU, zeros, or what kernels have already written.

    Attributes:
        failure: Why the thread has ended before `close()`; None: it has not.
    """

    failure: str | None = None

    def __init__(self, links: dict[int, Link], topology: Topology, layout: RemoteLayout, words: torch.Tensor):
        self._links = in_turn(links, topology)
        self._link_set = LinkSet(self._links, self._read)
        self._topology = topology
        self._words = RemoteWords(layout, words)
        self._rows = RemotePieces()
        shared = (topology, self._words, self._rows)
        self._to = {rank: ToRemoteRank(rank, link, *shared) for rank, link in self._links.items()}
        self._from = {rank: FromRemoteRank(rank, link, *shared) for rank, link in self._links.items()}
        self._looks: list[Callable[[], int]] = []
        self._tells: list[Callable[[int], None]] = []
        self._watch_words(layout)
        self._seen = [0] * len(self._looks)
        self._is_closing = False
        self._pid = os.getpid()
        # A daemon: a process that ends closes its buffers in an exit function, which comes after other threads' ends.
        self._thread = threading.Thread(target=self._run, name=f"deep_ep-proxy-{topology.rank}", daemon=True)
        self._thread.start()

    def add_rows(self, memory: torch.Tensor) -> None:
        """Add a piece of rows. All ranks add the same pieces, before any of them rings a doorbell for it.

        Args:
            memory: [2 B] uint8 on the CPU. It stays until the proxy is closed.
        """
        self._rows.add(memory)

    def close(self) -> None:
        """Send what kernels have written so far, send that this rank leaves, and close the links."""
        if os.getpid() != self._pid:
            return  # a forked child is not this rank
        self._is_closing = True
        if threading.current_thread() is not self._thread:  # garbage collection may run on any
            self._thread.join()

    def tell_failure(self, limit_secs: float) -> None:
        """Wait until this rank's failure has been sent to remote ranks, so that it may end; but only for a short
        time.
        """
        deadline = time.monotonic() + limit_secs
        while self._thread.is_alive() and time.monotonic() < deadline:
            is_told = not any(to.is_listening for to in self._to.values())
            if is_told and not self._link_set.has_queued:
                return
            time.sleep(_MOST_PAUSE_SECS)

    def stats(self) -> dict[str, int]:
        """Return counters of the links: messages, bytes including everything that is added to rows, and bytes of
        rows.
        """
        return {
            "messages_sent": sum(one.num_sent for one in self._to.values()),
            "messages_received": sum(one.num_received for one in self._from.values()),
            **self._link_set.stats(),
            "rows_bytes_sent": sum(one.rows_bytes_sent for one in self._to.values()),
        }

    def _watch_words(self, layout: RemoteLayout) -> None:
        """List the words that are polled, and what to do when one has changed. Failures first: they end all else."""
        me, size = self._topology.rank, self._topology.ranks_per_node
        for rank, to in self._to.items():
            self._watch(layout.shadow_board(rank) + layout.failure(me), to.tell_failure)
        for rank, to in self._to.items():
            self._watch(layout.shadow_board(rank) + layout.progress(me), to.tell_progress)
        for rank in (rank for rank in self._to if rank % size == self._topology.local_rank):
            for chunk in range(MOST_CHUNKS):
                doorbell = layout.doorbell(rank // size, chunk)
                self._watch(doorbell + DOORBELL_EPOCH, partial(self._to[rank].tell_rows, chunk, doorbell))

    def _watch(self, index: int, tell: Callable[[int], None]) -> None:
        self._looks.append(self._words.word(index).load_acquire)
        self._tells.append(tell)

    # By the thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._serve()
            self._tell_changes()  # what was written before `close`
            self._link_set.drain(_FAREWELL_SECS, self._send_on)
        except BaseException as error:  # neither this rank nor its peers may wait for a thread that is gone
            self.failure = account(error)
            for rank in self._links:
                self._lose(rank, self.failure)
        self._link_set.close()

    def _serve(self) -> None:
        pause_secs = _LEAST_PAUSE_SECS
        while not self._is_closing:
            is_idle = pause_secs > _MOST_PAUSE_SECS
            if self._turn(_MOST_PAUSE_SECS if is_idle else 0):
                pause_secs = _LEAST_PAUSE_SECS
            elif not is_idle:
                time.sleep(pause_secs)
                pause_secs *= 2

    def _turn(self, pause_secs: float = 0) -> bool:
        """Poll the words and the sockets. Returns whether there was anything to do.

        Args:
            pause_secs: In whole milliseconds; what comes ends it early.
        """
        has_changed = self._tell_changes()
        return self._link_set.turn(0 if has_changed else pause_secs) or has_changed

    def _tell_changes(self) -> bool:
        values = [look() for look in self._looks]
        if values == self._seen:
            return False
        for tell, value, seen in zip(self._tells, values, self._seen, strict=True):
            if value != seen:
                tell(value)
        self._seen = values
        return True

    def _send_on(self) -> None:
        """Poll once more, before the thread ends."""
        if not self._turn():
            time.sleep(_LEAST_PAUSE_SECS)

    def _read(self, rank: int) -> None:
        """Read what has come from a rank, and let it go if it is gone."""
        link = self._links[rank]
        try:
            self._from[rank].read()
        except EPTransportError as error:
            link.ending = str(error)
        if link.has_left:
            self._to[rank].let_go()
        elif link.ending is not None:
            self._lose(rank, link.ending)

    def _lose(self, rank: int, reason: str) -> None:
        """Show kernels that a rank is gone, and close its connection, so that it finds out."""
        self._words.write_gone(rank, self._topology.rank)
        link = self._links[rank]
        link.ending = link.ending or reason  # so closing says no farewell
        self._to[rank].let_go()
        self._link_set.forget(rank)
        link.close()


def make_proxy(control: Control, topology: Topology, layout: RemoteLayout, words: torch.Tensor) -> MessageProxy:
    """Connect this rank to all ranks of other nodes. All ranks of the group call it together, in a joint step.

    Raises:
        EPTransportError: A pair of ranks could not be connected. All ranks raise.
    """
    connections = connect(control, topology.remote_ranks)
    links = {rank: Link(connection, Pool()) for rank, connection in connections.items()}
    proxy = MessageProxy(links, topology, layout, words)
    control.undo(proxy.close)
    return proxy
