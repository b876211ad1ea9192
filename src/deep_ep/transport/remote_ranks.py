"""A rank of another node, as a proxy sees it: what is sent to it, and what it sends.

Frames of a proxy, beside `BYE`. Each direction of a link is read in the order in which it was written.

    HEADER   tag:   progress          payload: the header of that call, then to be followed by the progress
    RECORD                            payload: the line of a failure, and the header of its call. What was queued
                                      before it may be missing
    DOORBELL tag:   chunk             payload: piece, and for each section its target offset and bytes
    ROWS     tag:   chunk             payload: one section that has bytes, behind its DOORBELL, in order
"""

from __future__ import annotations

import struct
from collections import deque
from dataclasses import dataclass

from ..errors import EPTransportError
from ..topology import Topology
from .links import DOORBELL, HEADER, RECORD, ROWS, Departure, Frame, Link, Page, Pieces
from .remote import (
    DOORBELL_LEFT,
    DOORBELL_PIECE,
    DOORBELL_SECTIONS,
    HAS_FAILED,
    LINE_WORDS,
    MOST_CHUNKS,
    MOST_SECTIONS,
    STEP_BITS,
)
from .remote_memory import ReceivePages, RemotePieces, RemoteWords
from .words import Word

_MOST_BEHIND = 2  # calls that a proxy may find itself behind at a look
_NUM_DOORBELL_WORDS = DOORBELL_SECTIONS + 3 * MOST_SECTIONS - DOORBELL_PIECE
_DOORBELL_FROM_WORDS = struct.Struct(f"<{_NUM_DOORBELL_WORDS}Q")  # piece, then source, target and bytes of each section
_DOORBELL_IN_FRAME = struct.Struct(f"<{1 + 2 * MOST_SECTIONS}Q")  # piece, then target and bytes of each section


@dataclass
class _Leaving:
    """A chunk of which the system has not yet taken everything.

    Attributes:
        num_frames: Frames that have not left.
        left: The word that is set when none is left.
        epoch: The value that is stored there.
    """

    num_frames: int
    left: Word
    epoch: int


class ToRemoteRank:
    """What is sent to a remote rank.

    Args:
        rank: The remote rank.
        link: The connection.
        topology: Where this rank stands.
        words: The words of this rank's remote memory.
        rows: The rows of this rank's remote memory.

    Attributes:
        num_sent: Frames so far.
        rows_bytes_sent: Bytes of rows in them.
    """

    def __init__(self, rank: int, link: Link, topology: Topology, words: RemoteWords, rows: RemotePieces):
        self.num_sent = self.rows_bytes_sent = 0
        self._rank = rank
        self._me = topology.rank
        self._link = link
        self._words = words
        self._rows = rows
        self._shadow_board = words.layout.shadow_board(rank)
        self._epoch = 0
        self._header: bytes | None = None
        self._has_failed = False
        self._leaving: deque[_Leaving] = deque()
        link.on_departure = self._on_departure

    @property
    def is_listening(self) -> bool:
        """Whether there is any use in sending it something: it is connected, and has not failed."""
        return self._link.ending is None and not self._has_failed

    def tell_progress(self, progress: int) -> None:
        """Send the header of a call, and its progress: whenever that has changed.

        The thread may see a change late, since kernels do not wait for it. What it can have missed:

        - *At most one whole call.* This rank enters e after it saw all ranks in e - 1. They entered that after they saw
          the last of this rank's e - 2, and no rank sees what was not sent. So everything up to e - 2 has been sent by
          then.
        - *The last step of the call before.* This rank leaves e - 1 when it has seen the peers' second offers, whether
          or not they have seen its own. The progress of e would satisfy a rank that waits for that step: so the header
          of e - 1 goes once more, first, if it is not what was sent.

        No torn header is used. The slot of e is written again for e + 2, which this rank enters after all ranks saw it
        in e + 1, which has not been sent yet. The words of a second offer may be written while this copies them; but no
        rank reads them before the step that follows, and that step sends the header again.

        Raises:
            EPTransportError: The progress is not one that can follow.
        """
        if not self.is_listening:
            return
        epoch = progress >> STEP_BITS
        num_behind = epoch - self._epoch
        if not 0 <= num_behind <= _MOST_BEHIND:
            raise EPTransportError(
                f"proxy: rank {self._rank} was told of call {self._epoch}, so the next must be at most "
                f"{_MOST_BEHIND} further, seen {epoch} (rank {self._me})"
            )
        if num_behind == _MOST_BEHIND or (num_behind and self._has_changed(epoch - 1)):
            self._send_header((epoch << STEP_BITS) - 1)  # the last step that there could be
        self._send_header(progress)

    def tell_failure(self, word: int) -> None:
        """Send the line of this rank's failure, once, in place of what is queued; or that of a call that it refuses.

        The header of the call goes with it: it may not have been sent yet, or be dropped here, and the remote rank
        names by it in what two calls differ.
        """
        if not word or not self.is_listening:
            return
        self._has_failed = word == HAS_FAILED
        if self._has_failed:
            self._link.drop_queued()
            self.let_go()  # this rank's kernels pack nothing any more
        line = self._words.read(self._shadow_board + self._words.layout.failure(self._me), LINE_WORDS)
        header = self._read_header(_epoch_of(line))
        self._send(RECORD, 0, 0, memoryview(word.to_bytes(8, "little") + line[8:] + header))

    def tell_rows(self, chunk: int, doorbell: int, epoch: int) -> None:
        """Send a chunk of rows, straight from their memory.

        Args:
            chunk: Its number.
            doorbell: Where its doorbell is.
            epoch: The call.

        Raises:
            EPTransportError: The doorbell names bytes that are not there.
        """
        piece, *numbers = _DOORBELL_FROM_WORDS.unpack(self._words.read(doorbell + DOORBELL_PIECE, _NUM_DOORBELL_WORDS))
        sections = list(zip(numbers[::3], numbers[1::3], numbers[2::3], strict=True))
        payloads = [self._rows.view(piece, source, size) for source, _, size in sections if size]
        leaving = _Leaving(1 + len(payloads), self._words.word(doorbell + DOORBELL_LEFT), epoch)
        self._leaving.append(leaving)
        if not self.is_listening:
            self.let_go()
            return
        fields = [number for _, target, size in sections for number in (target, size)]
        self._send(DOORBELL, epoch, chunk, memoryview(_DOORBELL_IN_FRAME.pack(piece, *fields)))
        for payload in payloads:
            self._send(ROWS, epoch, chunk, payload)
            self.rows_bytes_sent += payload.nbytes

    def let_go(self) -> None:
        """Release chunks that will not be sent any more, so that kernels do not wait for them."""
        while self._leaving:
            leaving = self._leaving.popleft()
            leaving.left.store_release(leaving.epoch)

    def _read_header(self, epoch: int) -> bytes:
        layout = self._words.layout
        return self._words.read(self._shadow_board + layout.header(epoch, self._me), layout.header_words)

    def _has_changed(self, epoch: int) -> bool:
        """Return whether the header of this call that was sent last has changed since."""
        return self._header is not None and self._header != self._read_header(epoch)

    def _send_header(self, progress: int) -> None:
        self._epoch = progress >> STEP_BITS
        self._header = self._read_header(self._epoch)  # a copy: the slot is written again
        self._send(HEADER, self._epoch, progress, memoryview(self._header))

    def _send(self, topic: int, epoch: int, tag: int, payload: memoryview) -> None:
        self.num_sent += 1
        self._link.send(topic, epoch, tag, Pieces([payload]))

    def _on_departure(self, departure: Departure) -> None:
        if departure.topic not in (DOORBELL, ROWS) or not self._leaving:
            return
        leaving = self._leaving[0]
        leaving.num_frames -= 1
        if not leaving.num_frames:
            self._leaving.popleft()
            leaving.left.store_release(leaving.epoch)


class FromRemoteRank:
    """What a remote rank sends: it is written to where this rank's kernels poll, followed by a word.

    Args:
        rank: The remote rank.
        link: The connection.
        topology: Where this rank stands.
        words: The words of this rank's remote memory.
        rows: The rows of this rank's remote memory.

    Attributes:
        num_received: Frames so far.
    """

    def __init__(self, rank: int, link: Link, topology: Topology, words: RemoteWords, rows: RemotePieces):
        self.num_received = 0
        self._rank = rank
        self._link = link
        self._node = rank // topology.ranks_per_node
        self._is_of_rail = rank % topology.ranks_per_node == topology.local_rank
        self._words = words
        self._rows = rows
        self._progress = words.word(words.layout.progress(rank))
        self._coming = (0, 0)  # call and chunk of the rows that are due
        self._record_bytes = 8 * (LINE_WORDS + words.layout.header_words)
        link.allocator = self._pages = ReceivePages(max(self._record_bytes, _DOORBELL_IN_FRAME.size))

    def read(self) -> None:
        """Read what is there.

        Raises:
            EPTransportError: An invalid frame has come.
        """
        self._link.fill()
        while self._link.inbox:
            frame = self._link.inbox.popleft()
            self.num_received += 1
            self._take(frame)
            self._pages.give(frame.page)

    def _take(self, frame: Frame) -> None:
        if frame.topic == RECORD:  # in place of whatever was due
            self._require(frame.page.num_bytes == self._record_bytes, frame)
            self._take_record(frame.page.view())
        elif frame.topic == ROWS:
            self._require(self._pages.was_due(frame.page) and (frame.epoch, frame.tag) == self._coming, frame)
            self._mark_arrived()
        elif frame.topic == DOORBELL:
            self._require(not self._is_amid_rows(frame.page) and self._is_of_rail and frame.tag < MOST_CHUNKS, frame)
            self._expect_rows(frame)
        else:
            self._require(not self._is_amid_rows(frame.page) and frame.topic == HEADER, frame)
            self._take_header(frame)

    def _is_amid_rows(self, page: Page) -> bool:
        return bool(self._pages.due) or self._pages.was_due(page)

    def _take_record(self, data: memoryview) -> None:
        line, header = data[: 8 * LINE_WORDS], data[8 * LINE_WORDS :]
        self._words.write(self._words.layout.header(_epoch_of(line), self._rank), header)
        self._words.write_failure(self._rank, line[8:], int.from_bytes(line[:8], "little"))

    def _take_header(self, frame: Frame) -> None:
        layout = self._words.layout
        is_whole = frame.page.num_bytes == 8 * layout.header_words
        is_next = frame.tag > self._progress.load_acquire()
        self._require(is_whole and is_next and frame.tag >> STEP_BITS == frame.epoch, frame)
        self._words.write(layout.header(frame.epoch, self._rank), frame.page.view())
        self._progress.store_release(frame.tag)

    def _expect_rows(self, frame: Frame) -> None:
        self._require(frame.page.num_bytes == _DOORBELL_IN_FRAME.size, frame)
        piece, *fields = _DOORBELL_IN_FRAME.unpack(frame.page.view())
        sections = zip(fields[::2], fields[1::2], strict=True)
        self._pages.due.extend(self._rows.view(piece, target, size) for target, size in sections if size)
        self._coming = (frame.epoch, frame.tag)
        self._mark_arrived()

    def _mark_arrived(self) -> None:
        if not self._pages.due:
            epoch, chunk = self._coming
            self._words.word(self._words.layout.arrival_word(self._node, chunk)).store_release(epoch)

    def _require(self, is_right: bool, frame: Frame) -> None:
        if not is_right:
            raise EPTransportError(
                f"proxy: rank {self._rank} must send what can follow, seen topic {frame.topic}, call {frame.epoch}, "
                f"tag {frame.tag}, {frame.page.num_bytes} bytes"
            )


def _epoch_of(line: bytes | memoryview) -> int:
    """Return the call of the line of a failure: its word, what happened, the call, and so on."""
    return int.from_bytes(line[16:24], "little")
