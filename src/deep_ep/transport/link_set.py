"""The links of a rank to several others, and the one loop that moves their frames.

`Rail` turns it while a call waits; `Mesh` and `MessageProxy` have a thread that does.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

from ..topology import Topology
from .inherited import close_in_children
from .links import Link


class Waker:
    """Wakes a thread that waits in `LinkSet.turn`."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        close_in_children(self._reader, self._writer)
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def fileno(self) -> int:
        """Return the descriptor that becomes readable."""
        return self._reader.fileno()

    def wake(self) -> None:
        """Wake the thread, or have its next wait end at once."""
        with contextlib.suppress(OSError):  # it has been woken already, or is closed
            self._writer.send(b"!")

    def clear(self) -> None:
        """Forget all wake-ups so far."""
        with contextlib.suppress(BlockingIOError):
            while self._reader.recv(64):
                pass

    def close(self) -> None:
        """Close both ends."""
        self._reader.close()
        self._writer.close()


class LinkSet:
    """The links of a rank to several others.

    Args:
        links: By rank, or by node.
        on_readable: Called with the key of a link from which more can be read; None: `Link.fill` reads it.
        guard: Held while bytes leave, if another thread queues frames; None: none does.
        waker: Ends a wait of `turn` early; None: nothing does.

    Attributes:
        links: See the argument.
    """

    def __init__(
        self,
        links: Mapping[int, Link],
        on_readable: Callable[[int], None] | None = None,
        guard: AbstractContextManager | None = None,
        waker: Waker | None = None,
    ):
        self.links = links
        self._on_readable = on_readable if on_readable is not None else lambda key: links[key].fill()
        self._guard = guard if guard is not None else contextlib.nullcontext()
        self._waker = waker
        self._poll = select.poll()
        self._events: dict[int, int] = {}  # what is polled for, by key
        self._keys: dict[int, int] = {}  # by descriptor: a link that is closed has none any more
        if waker is not None:
            self._poll.register(waker.fileno(), select.POLLIN)

    @property
    def has_queued(self) -> bool:
        """Whether there are frames that are not yet handed to the system."""
        return any(link.num_queued for link in self.links.values())

    def turn(self, secs: float | None) -> bool:
        """Send and read what is possible.

        Args:
            secs: How long to wait until something is; None: as long as it takes.

        Returns:
            Whether anything was.
        """
        self._choose_events()
        if not self._events and self._waker is None:
            time.sleep(secs or 0)  # all are closed, or have enough unread frames
            return False
        ready = self._poll.poll(None if secs is None else secs * 1000)
        for number, events in ready:
            key = self._keys.get(number)
            if key is None:
                if self._waker is not None:
                    self._waker.clear()
                continue
            if events & select.POLLOUT:
                with self._guard:
                    self.links[key].flush()
            # Also errors and hang-ups, which `poll` reports unasked: reading finds out what has happened.
            if events & ~select.POLLOUT:
                self._on_readable(key)
        return bool(ready)

    def drain(self, secs: float, go_on: Callable[[], object]) -> None:
        """Repeat a step until the system has accepted everything that was queued, or nothing has left for some time.

        Args:
            secs: How long that is.
            go_on: The step. It must not return at once if nothing could be sent.
        """
        last, moved_secs = -1, time.monotonic()
        while self.has_queued:
            sent = self.stats()["bytes_sent"]
            if sent != last:
                last, moved_secs = sent, time.monotonic()
            elif time.monotonic() - moved_secs > secs:
                return
            go_on()

    def stats(self) -> dict[str, int]:
        """Return the bytes of these links, including everything that is added to rows."""
        return {
            "bytes_sent": sum(link.bytes_sent for link in self.links.values()),
            "bytes_received": sum(link.bytes_received for link in self.links.values()),
        }

    def close(self) -> None:
        """Send that this rank leaves, and close the links."""
        for link in self.links.values():
            link.close()

    def _choose_events(self) -> None:
        """Poll for what each link can do."""
        # Without the guard: whoever queues a frame behind this look wakes the thread.
        for key, link in self.links.items():
            wanted = (select.POLLIN if link.may_read else 0) | (select.POLLOUT if link.num_queued else 0)
            if wanted == self._events.get(key, 0):
                continue
            if wanted:
                self._keys[link.fileno()] = key
                self._poll.register(link.fileno(), wanted)
                self._events[key] = wanted
            else:
                self.forget(key)

    def forget(self, key: int) -> None:
        """Stop polling a link. It must be called before a link is closed; its descriptor may be used again."""
        if self._events.pop(key, 0):
            number = next(number for number, one in self._keys.items() if one == key)
            del self._keys[number]
            self._poll.unregister(number)


def in_turn(links: Mapping[int, Link], topology: Topology) -> dict[int, Link]:
    """Return links by rank in an order that begins behind this rank, so that not all send to the same one first."""
    order = sorted(links, key=lambda rank: (rank - topology.rank) % topology.num_ranks)
    return {rank: links[rank] for rank in order}
