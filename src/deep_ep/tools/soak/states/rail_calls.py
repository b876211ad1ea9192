"""The operations of a call across nodes: `engine/cpu/nodes/dispatch.py` and `combine.py`, and the frames of a link."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ....engine.protocol import ANNOUNCED, OFFERED, READY, TAKEN
from ....transport.links import ANNOUNCE, ROWS, VERDICT
from .explore import Label, Violation
from .one_hop import COMBINE, FULL, WORST_CASE, Program
from .ranks import DIRECT, GARBAGE, STAGED, Act, DrawnCall, Operation, Rank, changed, tag
from .steps import topic_name

if TYPE_CHECKING:
    from .two_hops import TwoHopsModel


class ModelFrame(NamedTuple):
    """A frame of a link, packed into a number where it is kept.

    Attributes:
        topic: As the code numbers it.
        call: Of the frame.
        chunk: Its number, of rows.
        is_spoiled: Rows that are not what they should be.
    """

    topic: int
    call: int = 0
    chunk: int = 0
    is_spoiled: int = 0

    def number(self) -> int:
        """As a number."""
        return self.topic << 12 | self.call << 5 | self.chunk << 1 | self.is_spoiled


def frame_of(number: int) -> ModelFrame:
    """The reverse of `ModelFrame.number`."""
    return ModelFrame(number >> 12, number >> 5 & 127, number >> 1 & 15, number & 1)


class RailProgram(Program):
    """The operations of one rank in one call across nodes.

    Args:
        model: The ranks and their links.
        call: Its number.
        drawn: What it is.
        rank: The rank.
    """

    def __init__(self, model: TwoHopsModel, call: int, drawn: DrawnCall, rank: int):
        super().__init__(call, drawn, rank, model.defect)
        self.model = model
        self.links = range(model.num_nodes - 1)
        self.node = model.node_ranks[rank]
        self.some_staged = any(drawn.memory[peer] == STAGED for peer in self.node)

    def _dispatch(self) -> list[Operation]:
        """`CpuNodesDispatch._exchange_counts` and `_move_rows`."""
        operations = [*self._send(ANNOUNCE), *self._receive(ANNOUNCE), self.does("post_header", self._post_header)]
        headers = self.does("headers", self._read_headers)
        if self.drawn.kind == FULL:
            operations += [self.signal(ANNOUNCED), self.wait(ANNOUNCED), headers]
        operations += [self.does("post_offer", self._post_offer), self.signal(OFFERED)]
        if self.drawn.kind == WORST_CASE:
            operations += [self.wait(OFFERED), headers]
            if self.defect != "no verdict":
                operations += [*self._send(VERDICT), *self._receive(VERDICT)]
            if self.drawn.overflows and (self.defect != "no verdict" or self.rank in self.model.node_ranks[0]):
                return operations
        operations += [self._traffic("start"), self.wait(OFFERED), headers, self.does("offers", self._read_offers)]
        finish = self._traffic("finish")
        if self.some_staged:
            return [*operations, finish, *self._staged_rounds()]
        ready = self.signal(READY)
        operations += [ready, finish] if self.defect == "signal before data" else [finish, ready]
        return [*operations, self.wait(READY)]

    def _staged_rounds(self) -> list[Operation]:
        operations = []
        for index in range(self.rounds):
            operations += [self.does("put rows", self._put_rows(index)), self.signal(READY + 2 * index)]
            operations.append(self.wait(READY + 2 * index))
            if self.memory == STAGED:
                operations.append(self.does("copy out", self._copy_out(index)))
            if index + 1 < self.rounds:
                operations += [self.signal(TAKEN + 2 * index), self.wait(TAKEN + 2 * index)]
        return operations

    def _combine(self) -> list[Operation]:
        """`CpuNodesCombine._sum_rows`."""
        is_staged, rounds = self.memory == STAGED, self.rounds if self.some_staged else 0
        operations = [
            *self._send(ANNOUNCE),
            self.does("post_header", self._post_header),
            self.does("provide rows", self._provide_rows),
            self.does("post_offer", self._post_offer),
            self.signal(OFFERED if is_staged else READY),
            *self._receive(ANNOUNCE),
            self.wait(OFFERED),
            self.does("headers", self._read_headers),
            self.does("offers", self._read_offers),
        ]
        for index in range(rounds):
            operations += [self.silently("copy in", self._copy_in(index))] if is_staged else []
            operations += [self.signal(READY + 2 * index)] if is_staged or index else []
            operations.append(self.wait(READY + 2 * index))
            operations += [self.silently("copy staging", self._copy_staging(index)), self.signal(TAKEN + 2 * index)]
            operations.append(self.wait(TAKEN + 2 * index))
        taken = TAKEN + 2 * rounds
        operations += [self._traffic("start"), self._traffic("finish_packing"), self.signal(taken)]
        return [*operations, self._traffic("finish"), self.wait(taken)]

    # Operations ------------------------------------------------------------------------------------------------------

    def silently(self, name: str, act: Act) -> Operation:
        """An operation that a trace does not show."""
        return Operation(Label(self.rank, name, self.call, True), act)

    def _send(self, topic: int) -> list[Operation]:
        def sending(link: int) -> Act:
            return lambda ranks, rank: self.model.send(ranks, rank, link, ModelFrame(topic, self.call))

        return [
            self.does(f"send {topic_name(topic)} to node {self.model.node_of(self.rank, link)}", sending(link))
            for link in self.links
        ]

    def _receive(self, topic: int) -> list[Operation]:
        operations: list[Operation] = []
        if topic == ANNOUNCE and self.defect == "announcement not waited for":
            return operations
        for link in self.links:
            name = f"take {topic_name(topic)} of node {self.model.node_of(self.rank, link)}"
            operations.append(Operation(Label(self.rank, name, self.call), kind="take", argument=topic * 8 + link))
        return operations

    def _traffic(self, kind: str) -> Operation:
        return Operation(Label(self.rank, kind, self.call, True), self.own_block, kind=kind)

    def moved(self, me: Rank) -> tuple[tuple[int, ...], tuple[int, ...], int]:
        """Chunks packed and taken, by link, and whether the own block is done."""
        moved, count = me.moved or (0,) * (2 * len(self.links) + 1), len(self.links)
        return moved[:count], moved[count : 2 * count], moved[-1]

    def _count(self, ranks: list[Rank], rank: int, index: int) -> int:
        """Count one more. Returns how many there were."""
        moved = ranks[rank].moved or (0,) * (2 * len(self.links) + 1)
        ranks[rank] = ranks[rank]._replace(moved=changed(moved, index, moved[index] + 1))
        return moved[index]

    def pack(self, link: int) -> Act:
        """Send the next chunk: rows of this rank (dispatch), or sums of the rows of its node (combine)."""

        def act(ranks: list[Rank], rank: int) -> None:
            index = self._count(ranks, rank, link)
            is_spoiled = ranks[rank].is_overwritten if self.drawn.kind != COMBINE else self._is_sum_spoiled(ranks, rank)
            self.model.send(ranks, rank, link, ModelFrame(ROWS, self.call, index, int(is_spoiled)))

        return act

    def take_rows(self, link: int) -> Act:
        """Take the next chunk, and write it to the ranks of the node (dispatch), or add it up (combine)."""

        def act(ranks: list[Rank], rank: int) -> None:
            frame = self.model.take(ranks, rank, link)
            index = self._count(ranks, rank, len(self.links) + link)
            if frame[:3] != ModelFrame(ROWS, self.call, index)[:3]:
                raise Violation(f"rank {rank} takes {topic_name(frame.topic)} of call {frame.call} for its rows")
            source, _ = self.model.other_end(rank, link)
            rows = GARBAGE if frame.is_spoiled else tag(self.call, index)
            if self.drawn.kind == COMBINE:
                self._take(ranks, rank, (rows,), tag(self.call, index))
            else:
                self._put_block(ranks, rank, source, rows)

        return act

    def own_block(self, ranks: list[Rank], rank: int) -> None:
        """The rows of this rank for its own node."""
        self._count(ranks, rank, -1 % (2 * len(self.links) + 1))
        if self.drawn.kind != COMBINE:
            last = self.model.num_chunks - 1
            self._put_block(ranks, rank, rank, self.rows(ranks, rank, last))
        elif self._is_sum_spoiled(ranks, rank):
            ranks[rank] = ranks[rank]._replace(spoiled=GARBAGE)

    def _put_block(self, ranks: list[Rank], rank: int, source: int, rows: int) -> None:
        for peer in self.node:
            if self.drawn.memory[peer] == DIRECT:
                self.write(ranks, rank, peer, "region", rows, source)

    def _is_sum_spoiled(self, ranks: list[Rank], rank: int) -> bool:
        """What lies in the regions of the node, of ranks that are not staged: the others' rows were copied."""
        rows = [ranks[peer].region[rank] for peer in self.node if self.drawn.memory[peer] == DIRECT]
        return bool(ranks[rank].spoiled) or any(one != tag(self.call, 0) for one in rows)

    def _put_rows(self, index: int) -> Act:
        def act(ranks: list[Rank], rank: int) -> None:
            for peer in self.node:
                if self.drawn.memory[peer] == STAGED:
                    self.write(ranks, rank, peer, "staging", self.rows(ranks, rank, index))

        return act

    def _copy_out(self, index: int) -> Act:
        def act(ranks: list[Rank], rank: int) -> None:
            staging = [ranks[rank].staging[peer] for peer in self.node]
            self._take(ranks, rank, staging, tag(self.call, index))

        return act

    def _copy_staging(self, index: int) -> Act:
        def act(ranks: list[Rank], rank: int) -> None:
            staged = [peer for peer in self.node if self.drawn.memory[peer] == STAGED]
            self._take(ranks, rank, [ranks[peer].staging[rank] for peer in staged], tag(self.call, index))

        return act

    def _read_headers(self, ranks: list[Rank], rank: int) -> None:
        super()._read_headers([ranks[peer] for peer in self.node], rank)

    def _read_offers(self, ranks: list[Rank], rank: int) -> None:
        super()._read_offers([ranks[peer] for peer in self.node], rank)
