"""A link: frames over one socket to one rank, in order, never blocking.

A frame is a head and a payload; the head has the length of the payload, so a reader need not know what comes. All
frames of a link are read in the order in which they were sent. A head that no rank can have sent (another topic, or a
payload that is longer than any of its topic) ends the link before memory is taken for it.
"""

from __future__ import annotations

import contextlib
import mmap
import socket
import struct
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, islice
from typing import NamedTuple, Protocol

import torch

from ..errors import MOST_TEXT_BYTES, EPTransportError
from ..sizing import align
from .board import NO_REFUSAL, Meeting, Refusal
from .inherited import close_in_children
from .window import Failure

# Topics of frames: the announcement of a call, whether its rows fit, rows; the last words of a rank; low-latency calls.
ANNOUNCE, VERDICT, ROWS, FAILED, BYE, SENT = 1, 2, 3, 4, 5, 6
# Of proxies, beside rows: a header with the progress that it belongs to, the line of a failure with one, what rows come
# next.
HEADER, RECORD, DOORBELL = 7, 8, 9
REFUSED = 10  # a call that the rank does not make, with the number of times that it has refused it
ALIVE = 11  # the rank is there, and waits for another one
JOIN = 12  # an attempt to rejoin, the echo of the receiver's, and the number that the sender's next call would have

# The longest payload. Rows are cut into chunks that are shorter, an announcement has a bit for each token and rank of a
# node, and a low-latency frame has the rows of one call for one rank: a few hundred megabytes where buffers are large.
# So a longer one is damage. It may be generous, since memory is committed only as bytes come (see `Pool.take`).
MOST_PAYLOAD_BYTES = 1 << 32
_MOST_NUMBERS_BYTES = 1 << 10  # a few numbers; the reader knows how many
_MOST_BYTES = {
    ANNOUNCE: MOST_PAYLOAD_BYTES,
    VERDICT: _MOST_NUMBERS_BYTES,
    ROWS: MOST_PAYLOAD_BYTES,
    FAILED: MOST_TEXT_BYTES,
    BYE: 0,
    SENT: MOST_PAYLOAD_BYTES,
    HEADER: MOST_PAYLOAD_BYTES,  # `ReceivePages` limits the length of headers, as of those with a record
    RECORD: MOST_PAYLOAD_BYTES,
    DOORBELL: _MOST_NUMBERS_BYTES,
    REFUSED: MOST_TEXT_BYTES,
    ALIVE: 0,
    JOIN: 8,
}

_HEAD = struct.Struct("<QQQQ")  # topic, epoch, tag, bytes of the payload
_MOST_AHEAD = 64  # frames that are read ahead of their consumer; then the sender has to wait
_MOST_PIECES = 64  # handed to the system at once
_POOL_UNIT_BYTES = 1 << 16
_MOST_WASTE = 4  # a page may be so many times as large as what it is for, not more: large ones are for rows
_LEAST_LAZY_BYTES = 64 << 20  # from here on a page is mapped: the system commits memory as it is touched
_CLOSED = "has closed the connection"
_WHY_CLOSED = "its process has ended, or the network has failed"


class Frame(NamedTuple):
    """A frame that has been received.

    Attributes:
        topic: What it is.
        epoch: Of the call that it belongs to.
        tag: A number, by topic: the first row of rows.
        page: The payload.
        begun_ns: When its head had been read.
        ended_ns: When all of it had been read.
    """

    topic: int
    epoch: int
    tag: int
    page: Page
    begun_ns: int = 0
    ended_ns: int = 0


class Departure(NamedTuple):
    """A frame that has been handed to the system.

    Attributes:
        topic: What it is.
        num_bytes: Of the payload.
        begun_ns: When it was queued and all frames before it had left.
        ended_ns: When its last byte was handed over.
    """

    topic: int
    num_bytes: int
    begun_ns: int
    ended_ns: int


class Page(NamedTuple):
    """Memory of a payload, accessible as bytes for a socket and as a tensor.

    Attributes:
        memory: Perhaps more than is used. It begins at a multiple of 16.
        num_bytes: The bytes that are used.
    """

    memory: bytearray | memoryview
    num_bytes: int

    def view(self) -> memoryview:
        """The page as bytes."""
        return memoryview(self.memory)[: self.num_bytes]

    def tensor(self) -> torch.Tensor:
        """The page as [num_bytes] uint8."""
        if not self.num_bytes:
            return torch.empty(0, dtype=torch.uint8, device="cpu")
        return torch.frombuffer(self.memory, dtype=torch.uint8, count=self.num_bytes)


class PageAllocator(Protocol):
    """Allocates pages for the payloads of incoming frames."""

    def take(self, num_bytes: int) -> Page:
        """Return an uninitialised page of `num_bytes`.

        Raises:
            EPTransportError: There is no such page.
        """
        ...


class Pool:
    """Pages for payloads. They are used again: memory fresh from the system costs more than to fill it.

    Args:
        most_spare: Pages that are kept.
    """

    def __init__(self, most_spare: int = 16):
        self._most_spare = most_spare
        self._spare: list[bytearray | memoryview] = []

    def take(self, num_bytes: int) -> Page:
        """Return an uninitialised page of `num_bytes`."""
        size = align(max(num_bytes, 1), _POOL_UNIT_BYTES)
        for index in reversed(range(len(self._spare))):  # the last one used is in the cache
            if size <= len(self._spare[index]) <= _MOST_WASTE * size:
                return Page(self._spare.pop(index), num_bytes)
        # A bytearray is written all over when it is made. A length that is damaged must not cost that.
        return Page(bytearray(size) if size < _LEAST_LAZY_BYTES else memoryview(mmap.mmap(-1, size)), num_bytes)

    def filled(self, data: bytes) -> Page:
        """Return a page with a copy of these bytes."""
        page = self.take(len(data))
        page.view()[:] = data
        return page

    def give(self, page: Page) -> None:
        """Give a page back to the pool, for others to take."""
        self._spare.append(page.memory)
        if len(self._spare) > self._most_spare:
            self._spare.pop(0)  # the one that has been of no use for longest


@dataclass
class Pieces:
    """The payload of a frame to be sent, in pieces.

    Attributes:
        pieces: Bytes, in this order.
        page: Goes back to the pool when all is sent; None: there is none.
        owner: Kept alive until then: the memory of pieces that do not lie in the page.
    """

    pieces: list[memoryview]
    page: Page | None = None
    owner: object = None

    @property
    def num_bytes(self) -> int:
        """The bytes of all pieces together."""
        return sum(piece.nbytes for piece in self.pieces)


@dataclass
class _Outgoing:
    """A frame on its way.

    Attributes:
        begin: Where it begins in the stream of bytes of its link.
        stops: Where its pieces end, counted from its beginning.
        pieces: Its head, and the pieces of its payload that are not empty.
        payload: Its payload, the page of which is to be given back.
        num_bytes: Bytes of the payload.
        topic: The topic of the frame.
        queued_ns: When it was queued.
    """

    begin: int
    stops: list[int]
    pieces: list[memoryview]
    payload: Pieces
    num_bytes: int
    topic: int
    queued_ns: int

    @property
    def stop(self) -> int:
        """Where it ends in the stream."""
        return self.begin + self.stops[-1]

    def unsent(self, position: int) -> Iterator[memoryview]:
        """Return what is left of it if the stream was handed to the system up to a position."""
        num_sent = position - self.begin
        if num_sent <= 0:
            return iter(self.pieces)
        first = bisect_right(self.stops, num_sent)
        left = self.pieces[first:]
        if left:
            left[0] = left[0][num_sent - self.stops[first] :]  # counted from its end
        return iter(left)


def _text_of(frame: Frame) -> str:
    return bytes(frame.page.view()).decode(errors="replace")


class Link:
    """The connection to one rank.

    Args:
        connection: A connected socket.
        pool: Where pages of payloads come from.
        allocator: Where pages of incoming payloads come from; None: from the pool, too.

    Attributes:
        allocator: See the argument. It may be replaced only before anything is read.
        inbox: Frames that were received and not yet taken.
        failure: Why the peer has failed, as it has sent it; None: it has not failed.
        refusal: The last call that the peer has refused.
        meeting: What the peer has last sent in an attempt to rejoin.
        has_left: The peer has sent that it leaves.
        ending: Why nothing more will come; None: more may.
        bytes_received: Bytes that were read, including heads.
        wait_secs: Time spent waiting for this rank.
        on_departure: Called with every frame that has been handed to the system; None: not called.
    """

    on_departure: Callable[[Departure], None] | None = None

    def __init__(self, connection: socket.socket, pool: Pool, allocator: PageAllocator | None = None):
        connection.setblocking(False)
        with contextlib.suppress(OSError):  # not TCP
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket = connection
        close_in_children(connection)
        self._pool = pool
        self.allocator: PageAllocator = allocator or pool
        self._outbox: deque[_Outgoing] = deque()
        self._position = deque([0], maxlen=1)  # in the stream of bytes, up to where it was sent: see `flush`
        self._head = bytearray(_HEAD.size)
        self._target = memoryview(self._head)
        self._coming: tuple[int, int, int] | None = None
        self._begun_ns = self._last_departure_ns = 0
        self._page: Page | None = None
        self.inbox: deque[Frame] = deque()
        self.failure: Failure | None = None
        self.refusal = NO_REFUSAL
        self.meeting = Meeting()
        self.has_left = False
        self.ending: str | None = None
        self.bytes_received = 0
        self.wait_secs = 0.0

    def fileno(self) -> int:
        """Return the descriptor of the socket."""
        return self._socket.fileno()

    @property
    def bytes_sent(self) -> int:
        """Bytes that were handed to the system, including heads."""
        return self._position[0]

    @property
    def num_queued(self) -> int:
        """The number of frames that are not yet handed to the system; none, if the connection has ended."""
        return len(self._outbox) if self.ending is None else 0

    @property
    def may_read(self) -> bool:
        """Whether more should be read: not while enough frames are unread, and not after the end."""
        return self.ending is None and len(self.inbox) < _MOST_AHEAD

    def send(self, topic: int, epoch: int, tag: int, what: Page | Pieces) -> None:
        """Queue a frame, and hand to the system what it accepts. A page goes back to the pool when it is sent."""
        payload = Pieces([what.view()], what) if isinstance(what, Page) else what
        num_bytes = payload.num_bytes
        if num_bytes > _MOST_BYTES[topic]:
            raise EPTransportError(f"transport message: {num_bytes} bytes are too many for one message")
        head = memoryview(_HEAD.pack(topic, epoch, tag, num_bytes))
        pieces = [head, *(one for one in payload.pieces if one.nbytes)]
        stops = list(accumulate(piece.nbytes for piece in pieces))
        begin = max(self.bytes_sent, self._outbox[-1].stop if self._outbox else 0)
        self._outbox.append(_Outgoing(begin, stops, pieces, payload, num_bytes, topic, time.monotonic_ns()))
        self.flush()

    def flush(self) -> None:
        """Hand to the system what it accepts.

        A broken connection shows when reading: the peer's last frames may be there.

        An interrupt may leave this between any two instructions, and it is then called again. So the position in the
        stream is all that says what was sent, and it advances in one instruction with the system's answer: a variable
        would lose the answer to an interrupt before the assignment, and the bytes would be sent twice.
        """
        try:
            while self._outbox:
                if self._outbox[0].stop <= self.bytes_sent:
                    # An interrupt between the two costs the pool a page, and a trace a message.
                    self._retire(self._outbox.popleft())
                    continue
                pieces = chain.from_iterable(outgoing.unsent(self.bytes_sent) for outgoing in self._outbox)
                sent = map(self._socket.sendmsg, [list(islice(pieces, _MOST_PIECES))])
                self._position.extend(accumulate(sent, initial=self.bytes_sent))
        except (BlockingIOError, InterruptedError):
            pass
        except OSError:
            self._outbox.clear()

    def _retire(self, outgoing: _Outgoing) -> None:
        """Note that a frame has been handed to the system, and give its page back."""
        if self.on_departure is not None:
            self._tell_departure(outgoing)
        if outgoing.payload.page is not None:
            self._pool.give(outgoing.payload.page)

    def _tell_departure(self, outgoing: _Outgoing) -> None:
        assert self.on_departure is not None
        begun_ns, ended_ns = max(outgoing.queued_ns, self._last_departure_ns), time.monotonic_ns()
        self._last_departure_ns = ended_ns
        self.on_departure(Departure(outgoing.topic, outgoing.num_bytes, begun_ns, ended_ns))

    def fill(self) -> None:
        """Read what is there, but at most one frame for the inbox: it is handed on while it is in the cache."""
        num_before = len(self.inbox)
        try:
            while self.may_read and len(self.inbox) == num_before:
                num_bytes = self._socket.recv_into(self._target)
                if not num_bytes:
                    self.ending = f"{_CLOSED}: {_WHY_CLOSED}"
                    return
                self.bytes_received += num_bytes
                self._target = self._target[num_bytes:]
                while not self._target.nbytes and self.ending is None:
                    self._next_target()
        except (BlockingIOError, InterruptedError):
            pass
        except OSError as error:
            self.ending = f"{_CLOSED} ({error.strerror or error}): {_WHY_CLOSED}"

    def break_off(self, reason: str) -> None:
        """Stop reading from a peer that sends invalid frames, and close the connection for it, too.

        Args:
            reason: What it has sent, for a sentence that begins with the peer.
        """
        self.ending = self.ending or f"{reason}: it runs another version, or what it sends is damaged on the way"
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def _next_target(self) -> None:
        """Set where the next bytes go: after a head its payload, after a payload, which is handed on, the next head."""
        if self._coming is None:
            topic, epoch, tag, num_bytes = _HEAD.unpack(self._head)
            if num_bytes > _MOST_BYTES.get(topic, -1):  # of a topic that there is not, no length is right
                self.break_off(f"sent a message that cannot be (topic {topic}, call {epoch}, {num_bytes} bytes)")
                return
            try:
                self._page = self.allocator.take(num_bytes)
            except (EPTransportError, MemoryError, OSError) as error:
                self.break_off(f"sent a message of {num_bytes} bytes, for which there is no memory ({error})")
                return
            self._coming, self._begun_ns = (topic, epoch, tag), time.monotonic_ns()
            self._target = self._page.view()
            return
        assert self._page is not None
        frame = Frame(*self._coming, self._page, self._begun_ns, time.monotonic_ns())
        if frame.topic == FAILED:
            self.failure = Failure(frame.tag, _text_of(frame))
        elif frame.topic == REFUSED:
            self.refusal = Refusal(frame.epoch, frame.tag, _text_of(frame))
        elif frame.topic == JOIN:
            self.meeting = Meeting(frame.epoch, int.from_bytes(frame.page.view(), "little"), frame.tag)
        elif frame.topic == BYE:
            self.has_left = True
        elif frame.topic != ALIVE:  # it has no content
            self.inbox.append(frame)
        self._coming, self._page = None, None
        self._target = memoryview(self._head)

    def drop_queued(self) -> None:
        """Forget frames of which nothing has been sent: those of a call that has failed."""
        while self._outbox and self._outbox[-1].begin >= self.bytes_sent:
            self._outbox.pop()

    def close(self) -> None:
        """Send that this rank leaves, and close. What the system has accepted still arrives."""
        self.drop_queued()
        if not self._outbox and self.ending is None:
            self.send(BYE, 0, 0, Pieces([]))
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)
        self._socket.close()
        self.ending = self.ending or "is closed here"
