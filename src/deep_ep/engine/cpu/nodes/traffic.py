"""Rows over the rail: cut into chunks, several on their way at a time, both directions at once.

A chunk holds a few rows of every section, section after section. The sender packs the next chunk while earlier ones are
in flight; the receiver hands each chunk on as soon as it has arrived.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from ....config import Config
from ....errors import EPError
from ....sizing import align, ceil_div
from ....trace import RECEIVE, SEND, Slice
from ....transport.links import MOST_PAYLOAD_BYTES, ROWS, Frame, Page, Pieces
from ....transport.message import Rail, Wait

_SECTION_UNIT_BYTES = 16  # sections of a chunk begin at multiples of this: any element is aligned
_COUNT_BITS = 24  # of a frame's tag: rows of the chunk; the rest is the first row
_CHUNK_BYTES = 1 << 20  # if no config gives a size: a message costs 0.1 ms of Python, however long it is
_AHEAD = 4
_DONE = object()


class Chunks(NamedTuple):
    """How rows are cut.

    Attributes:
        num_rows: Most rows of a chunk.
        num_ahead: Chunks that are queued before the first has left.
    """

    num_rows: int
    num_ahead: int

    @classmethod
    def of(cls, config: Config | None, row_bytes: int, unit: int = 1) -> Chunks:
        """Take chunk sizes from a config; without one, choose chunks large enough to be worth a message.

        Args:
            config: The config, or None.
            row_bytes: Bytes of a row.
            unit: Rows that are best packed together.
        """
        # Half of what a message may be: there is room between sections.
        most = min((1 << _COUNT_BITS) - 1, max(1, MOST_PAYLOAD_BYTES // 2 // max(1, row_bytes)))
        if config is None:
            num_rows = ceil_div(_CHUNK_BYTES, max(1, row_bytes))
            return cls(min(max(num_rows - num_rows % unit, 1), most), _AHEAD)
        send, receive = config.num_max_rdma_chunked_send_tokens, config.num_max_rdma_chunked_recv_tokens
        return cls(min(send, most), max(1, receive // send))


class ChunkForm:
    """Where the sections of a chunk lie.

    Args:
        columns: Columns and dtype of each section.
    """

    def __init__(self, columns: Sequence[tuple[int, torch.dtype]]):
        self._columns = list(columns)
        self.widths = [count * dtype.itemsize for count, dtype in columns]
        self.row_bytes = sum(self.widths)

    def num_bytes(self, num_rows: int) -> int:
        """Return the bytes of a chunk of `num_rows` rows."""
        return sum(self.sizes(num_rows))

    def sizes(self, num_rows: int) -> list[int]:
        """Return the bytes of each section of such a chunk, with the padding before the next section."""
        return [align(num_rows * width, _SECTION_UNIT_BYTES) for width in self.widths]

    def views(self, payload: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
        """The sections of a chunk: [num_rows, columns] each, in place."""
        views, start = [], 0
        for (count, dtype), width, size in zip(self._columns, self.widths, self.sizes(num_rows), strict=True):
            views.append(payload[start : start + num_rows * width].view(dtype).view(num_rows, count))
            start += size
        return views


class Traffic:
    """The rows of one call on this rank's rail.

    Args:
        rail: The rail.
        wait: How the call waits.
        epoch: The number of the call.
        form: Of the chunks.
        chunks: How rows are cut.
        num_out: For each node, the rows to send.
        num_in: For each node, the rows to come.
        pack: `pack(node, first, last)` is a chunk with rows [first, last) for a node.
        take: `take(node, first, last, views)` hands on rows [first, last) of a node.
        spare: Work that needs no network, a step at a time: it is done while nothing can be packed or taken.
        taking: What a trace calls it when rows are handed on.
    """

    def __init__(
        self,
        rail: Rail,
        wait: Wait,
        epoch: int,
        form: ChunkForm,
        chunks: Chunks,
        num_out: Sequence[int],
        num_in: Sequence[int],
        pack: Callable[[int, int, int], Page | Pieces],
        take: Callable[[int, int, int, list[torch.Tensor]], None],
        spare: Iterator[None] | None = None,
        taking: str = "take",
    ):
        self._rail = rail
        self._wait = wait
        self._epoch = epoch
        self._form = form
        self._chunks = chunks
        self._pack = pack
        self._take = take
        self._spare = spare
        self._num_out, self._num_in = num_out, num_in
        self._taking = taking
        self._num_chunks: Counter[tuple[str, int]] = Counter()  # so far, by direction and node
        self._packed = dict.fromkeys(rail.nodes, 0)
        self._taken = dict.fromkeys(rail.nodes, 0)

    def start(self) -> None:
        """Queue the first chunks for every node."""
        while self._pack_some():
            pass

    def finish_packing(self) -> None:
        """Run until all chunks are packed and the spare work is done. Chunks that arrive meanwhile are taken."""
        self._run(self._unpacked)

    def finish(self) -> None:
        """Run until everything is sent and taken, and the spare work is done."""
        self._run(lambda: [*self._unpacked(), *self._untaken(), *self._unsent()])

    def _unpacked(self) -> list[int]:
        return [node for node, count in self._packed.items() if count < self._num_out[node]]

    def _untaken(self) -> list[int]:
        return [node for node, count in self._taken.items() if count < self._num_in[node]]

    def _unsent(self) -> list[int]:
        return [node for node in self._rail.nodes if self._rail.links[node].num_queued]

    def _run(self, pending: Callable[[], list[int]]) -> None:
        while (nodes := pending()) or self._spare is not None:
            self._rail.turn(0)
            has_packed, has_taken = self._pack_some(), self._take_some()
            if not has_packed and not has_taken and not self._work_some():
                # A rank that has failed sends nothing more: this raises. Closed links are found by `until`.
                self._wait.require_working()
                self._wait.until(self._can_go_on, nodes)

    def _work_some(self) -> bool:
        """Do one step of the spare work."""
        if self._spare is None:
            return False
        with self._rail.slice("own node", RECEIVE):
            if next(self._spare, _DONE) is _DONE:
                self._spare = None
        return True

    def _can_go_on(self) -> bool:
        """Return whether there is a chunk to pack or to take, or nothing left to wait for."""
        is_idle = not self._unpacked() and not self._untaken() and not self._unsent()
        return is_idle or bool(self._packable()) or any(self._rail.links[node].inbox for node in self._untaken())

    def _packable(self) -> list[int]:
        most, links = self._chunks.num_ahead, self._rail.links
        return [node for node in self._unpacked() if links[node].num_queued < most]

    def _pack_some(self) -> bool:
        """Pack a chunk for every node whose queue is not full."""
        nodes = self._packable()
        for node in nodes:
            first = self._packed[node]
            last = min(first + self._chunks.num_rows, self._num_out[node])
            with self._slice("pack", node, SEND):
                chunk = self._pack(node, first, last)
            self._rail.send(node, ROWS, self._epoch, chunk, first << _COUNT_BITS | (last - first))
            self._packed[node] = last
        return bool(nodes)

    def _take_some(self) -> bool:
        """Take a chunk of every node that has sent one."""
        nodes = [node for node in self._untaken() if self._rail.links[node].inbox]
        for node in nodes:
            frame = self._rail.take(node)
            first, last = self._rows_of(node, frame)
            with self._slice(self._taking, node, RECEIVE) as taking:
                taking.add(rows=last - first, arrived_us_before=(time.monotonic_ns() - frame.ended_ns) / 1000)
                self._take(node, first, last, self._form.views(frame.page.tensor(), last - first))
            self._rail.record_arrival(node, frame, f"chunk {self._num_chunks[self._taking, node] - 1} arrives")
            self._taken[node] = last
            self._rail.pool.give(frame.page)
        return bool(nodes)

    def _slice(self, what: str, node: int, kind: str) -> Slice:
        """Return a trace slice for the next chunk of a node."""
        number = self._num_chunks[what, node]
        self._num_chunks[what, node] += 1
        slice = self._rail.slice(f"{what} chunk {number}", kind)
        slice.add(chunk=number, peer=self._rail.rank_of(node))
        return slice

    def _rows_of(self, node: int, frame: Frame) -> tuple[int, int]:
        """Return which rows a chunk holds. A chunk that does not fit the call is refused before anything is written."""
        first, count = frame.tag >> _COUNT_BITS, frame.tag & ((1 << _COUNT_BITS) - 1)
        is_next = frame.topic == ROWS and frame.epoch == self._epoch and first == self._taken[node]
        fits = first + count <= self._num_in[node] and frame.page.num_bytes == self._form.num_bytes(count)
        if not (is_next and fits and count):
            raise EPError(
                f"{self._wait.where}: {self._rail.name(node)} sends {count} rows from {first} on of call {frame.epoch} "
                f"({frame.page.num_bytes} bytes), expected rows from {self._taken[node]} on of {self._num_in[node]} "
                f"of call {self._epoch}. Make the calls in the same order on all ranks"
            )
        return first, first + count
