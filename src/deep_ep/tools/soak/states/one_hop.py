"""The calls of one node as a model: `engine/cpu/dispatch.py` and `engine/cpu/combine.py`, operation for operation.

Every rank has one region, which each of its calls takes (regions are reused last in, first out, and the caller drops
them at once), its staging, which every staged call uses, and its board.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import combinations_with_replacement, product

from ....engine.protocol import ANNOUNCED, OFFERED, READY, TAKEN
from ....transport.board import progress_of
from .explore import Label, Violation
from .node import NodeModel
from .ranks import (
    DIRECT,
    FAULTS,
    GARBAGE,
    POSTED,
    RUNS,
    STAGED,
    Act,
    DrawnCall,
    Operation,
    Rank,
    changed,
    tag,
    tag_text,
)
from .steps import step_label

FULL, WORST_CASE, CACHED, COMBINE = "dispatch", "worst-case dispatch", "cached dispatch", "combine"
KINDS = (FULL, WORST_CASE, CACHED, COMBINE)

DEFECTS = (
    "signal before data",
    "offer reused too early",
    "epoch off by one",
    "read-done left out",
    "one slot instead of two",
    "failure not looked at after the wait",
    "progress looked at before closed",
    "overflow not seen by all",
)

_ROUNDS = 2  # enough for a lane to be written again, and for a step behind `TAKEN(0)`


class OneHopModel(NodeModel):
    """Ranks of one node.

    Args:
        num_ranks: R.
        choices: For each call what may be drawn.
        faults: What may go wrong, once.
        defect: One of `DEFECTS`.
    """

    name = "one-hop"

    def __init__(
        self,
        num_ranks: int,
        choices: Sequence[Sequence[DrawnCall]],
        faults: Iterable[str] = FAULTS,
        defect: str | None = None,
    ):
        everyone = range(num_ranks)
        super().__init__(choices, faults, defect, [[peer for peer in everyone if peer != rank] for rank in everyone])

    def program(self, call: int, drawn: DrawnCall, rank: int) -> list[Operation]:
        """What a rank does in a call."""
        return Program(call, drawn, rank, self.defect).operations()

    def end_call(self, ranks: list[Rank], rank: int, drawn: DrawnCall) -> None:
        """The rows that a dispatch delivered straight must be those of all sources."""
        me = ranks[rank]
        if drawn.kind != COMBINE and not is_posted(drawn) and drawn.memory[rank] != STAGED:
            wrong = [rows for rows in me.region if rows != tag(me.call, 0)]
            if wrong:
                ranks[rank] = me._replace(spoiled=wrong[0])


def is_posted(drawn: DrawnCall) -> bool:
    """Whether all ranks' rows are posted."""
    return set(drawn.memory) == {POSTED}


class Program:
    """The operations of one rank in one call.

    Args:
        call: Its number.
        drawn: What it is.
        rank: The rank.
        defect: What is wrong with the protocol.
    """

    def __init__(self, call: int, drawn: DrawnCall, rank: int, defect: str | None = None):
        self.call = call
        self.drawn = drawn
        self.rank = rank
        self.defect = defect
        self.memory = drawn.memory[rank]
        self.slot = 0 if defect == "one slot instead of two" else call & 1
        self.rounds = drawn.rounds if STAGED in drawn.memory else 1

    def operations(self) -> list[Operation]:
        """From the first to the last."""
        refused = [self.does("refuse", self._refuse)] if self.drawn.is_refused else []
        return refused + (self._combine() if self.drawn.kind == COMBINE else self._dispatch())

    # Dispatch.exchange_counts, Dispatch.move_rows --------------------------------------------------------------------

    def _dispatch(self) -> list[Operation]:
        """As `Dispatch` does it, full or with an offer that comes with the header."""
        announced = [self.does("post rows", self._post_rows)] if self.memory == POSTED else []
        announced.append(self.does("post_header", self._post_header))
        fetched = [self.does("fetch rows", self._fetch_rows)]
        offered = [self.does("post_offer", self._post_offer), self.signal(OFFERED), self.wait(OFFERED)]
        agreed = [self.does("headers", self._read_headers)]
        if self.drawn.kind == FULL:
            announced += [self.signal(ANNOUNCED), self.wait(ANNOUNCED), *agreed]
            return [*announced, *(fetched if is_posted(self.drawn) else offered + self._put_in_rounds())]
        announced += [*offered, *agreed]
        if self.drawn.overflows and not (self.defect == "overflow not seen by all" and self.rank):
            return announced
        return [*announced, *(fetched if is_posted(self.drawn) else self._put_in_rounds())]

    def _put_in_rounds(self) -> list[Operation]:
        operations = [self.does("offers", self._read_offers)]
        for index in range(self.rounds):
            put, signal = self.does("put rows", self._put_rows(index)), self.signal(READY + 2 * index)
            operations += [signal, put] if self.defect == "signal before data" else [put, signal]
            operations.append(self.wait(READY + 2 * index))
            if self.memory == STAGED:
                operations.append(self.does("copy out", self._copy_out(index)))
            if index + 1 < self.rounds:
                operations.append(self.signal(TAKEN + 2 * index))
                if self.defect != "offer reused too early":
                    operations.append(self.wait(TAKEN + 2 * index))
        return operations

    # Combine.sum_rows ------------------------------------------------------------------------------------------------

    def _combine(self) -> list[Operation]:
        """As `Combine` does it."""
        is_staged, some_staged = self.memory == STAGED, STAGED in self.drawn.memory
        provide = ("post rows", self._post_rows) if self.memory == POSTED else ("provide rows", self._provide_rows)
        operations = [
            self.does("post_header", self._post_header),
            self.does(*provide),
            self.does("post_offer", self._post_offer),
            self.signal(OFFERED if is_staged else READY),
            self.wait(OFFERED),
            self.does("headers", self._read_headers),
        ]
        if is_posted(self.drawn):
            return [*operations, self.does("sum rows", self._sum_rows(0))]
        operations.append(self.does("offers", self._read_offers))
        for index in range(self.rounds):
            operations += self._copied_in(index, is_staged)
            if some_staged:
                operations.append(self.wait(READY + 2 * index))
            operations += [self.does("sum rows", self._sum_rows(index)), self.signal(TAKEN + 2 * index)]
            if self.defect != "read-done left out":
                operations.append(self.wait(TAKEN + 2 * index))
        return operations

    def _copied_in(self, index: int, is_staged: bool) -> list[Operation]:
        copy = [self.does("copy in", self._copy_in(index))] if is_staged else []
        signal = [self.signal(READY + 2 * index)] if is_staged or index else []
        return signal + copy if self.defect == "signal before data" else copy + signal

    # Operations ------------------------------------------------------------------------------------------------------

    def does(self, name: str, act: Act) -> Operation:
        """An operation that waits for nobody."""
        return Operation(Label(self.rank, name, self.call), act)

    def signal(self, step: int) -> Operation:
        """`Call.signal`."""
        progress = progress_of(self.call, step)

        def act(ranks: list[Rank], rank: int) -> None:
            ranks[rank] = ranks[rank]._replace(progress=progress)

        return self.does(f"signal {step_label(step)}", act)

    def wait(self, step: int) -> Operation:
        """`Call.wait`."""
        call = self.call - 1 if self.defect == "epoch off by one" else self.call
        return Operation(Label(self.rank, f"wait {step_label(step)}", self.call), target=progress_of(call, step))

    def rows(self, ranks: list[Rank], rank: int, index: int) -> int:
        """Rows of this rank: what its caller has written over, if it has given the call up."""
        return GARBAGE if ranks[rank].is_overwritten else tag(self.call, index)

    def _refuse(self, ranks: list[Rank], rank: int) -> None:
        ranks[rank] = ranks[rank].refuse()

    def _post_header(self, ranks: list[Rank], rank: int) -> None:
        ranks[rank] = ranks[rank]._replace(header=self._slots(ranks[rank].header, self.call))

    def _post_offer(self, ranks: list[Rank], rank: int) -> None:
        """A dispatch offers its region, or its staging; a combine offers rows, and nobody may write there."""
        opened = self.call if self.drawn.kind != COMBINE else 0
        ranks[rank] = ranks[rank]._replace(offer=self._slots(ranks[rank].offer, self.call), opened=opened)

    def _post_rows(self, ranks: list[Rank], rank: int) -> None:
        rows = self.rows(ranks, rank, 0)
        ranks[rank] = ranks[rank]._replace(posted=self._slots(ranks[rank].posted, rows))

    def _slots(self, slots: tuple[int, ...], value: int) -> tuple[int, ...]:
        return (value, slots[1]) if self.slot == 0 else (slots[0], value)

    def _read_headers(self, ranks: list[Rank], rank: int) -> None:
        """What a rank that fails leaves on its board stays: so headers are right even then, or something is wrong."""
        for number, one in enumerate(ranks):
            self._require(one.header[self.slot], self.call, f"rank {rank} reads the header of rank {number}")

    def _read_offers(self, ranks: list[Rank], rank: int) -> None:
        for number, one in enumerate(ranks):
            self._require(one.offer[self.slot], self.call, f"rank {rank} reads the offer of rank {number}")

    def _require(self, seen: int, expected: int, what: str) -> None:
        if seen != expected:
            raise Violation(f"{what} in call {self.call}, and finds that of call {seen}")

    def _fetch_rows(self, ranks: list[Rank], rank: int) -> None:
        """Posted rows stay on the board of a rank that fails, like its header."""
        for number, one in enumerate(ranks):
            if one.posted[self.slot] != tag(self.call, 0):
                found = tag_text(one.posted[self.slot])
                raise Violation(f"rank {rank} fetches what rank {number} posted in call {self.call}, and finds {found}")

    def _put_rows(self, index: int) -> Act:
        def act(ranks: list[Rank], rank: int) -> None:
            rows = self.rows(ranks, rank, index)
            for number, memory in enumerate(self.drawn.memory):
                if memory == STAGED:
                    self.write(ranks, rank, number, "staging", rows)
                elif index == 0:
                    self.write(ranks, rank, number, "region", rows)

        return act

    def write(self, ranks: list[Rank], rank: int, peer: int, where: str, rows: int, source: int | None = None) -> None:
        """Write rows into a peer's memory, which it must have offered. What a rank that has ended had is nobody's."""
        one = ranks[peer]
        if one.status == RUNS and not one.given_up and one.opened != self.call:
            raise Violation(f"rank {rank} writes rows of call {self.call} to rank {peer}, which does not offer memory")
        source = rank if source is None else source
        if where == "staging":
            ranks[peer] = one._replace(staging=changed(one.staging, source, rows))
        else:
            ranks[peer] = one._replace(region=changed(one.region, source, rows))

    def _copy_out(self, index: int) -> Act:
        def act(ranks: list[Rank], rank: int) -> None:
            self._take(ranks, rank, ranks[rank].staging, tag(self.call, index))

        return act

    def _provide_rows(self, ranks: list[Rank], rank: int) -> None:
        """Pulled, or copied in: either way they lie in the region until the call ends. Staged ones come in rounds."""
        if self.memory == DIRECT:
            rows = self.rows(ranks, rank, 0)
            ranks[rank] = ranks[rank]._replace(region=(rows,) * len(ranks[rank].region))

    def _copy_in(self, index: int) -> Act:
        def act(ranks: list[Rank], rank: int) -> None:
            rows = self.rows(ranks, rank, index)
            ranks[rank] = ranks[rank]._replace(staging=(rows,) * len(ranks[rank].staging))

        return act

    def _sum_rows(self, index: int) -> Act:
        def act(ranks: list[Rank], rank: int) -> None:
            for number, memory in enumerate(self.drawn.memory):
                one = ranks[number]
                if memory == POSTED:
                    self._take(ranks, rank, (one.posted[self.slot],), tag(self.call, 0))
                elif memory == STAGED:
                    self._take(ranks, rank, (one.staging[rank],), tag(self.call, index))
                else:
                    self._take(ranks, rank, (one.region[rank],), tag(self.call, 0))

        return act

    def _take(self, ranks: list[Rank], rank: int, found: Iterable[int], expected: int) -> None:
        """Read rows. Those of a peer that fails may be anything: then this rank must not end its call well."""
        wrong = [rows for rows in found if rows != expected]
        if wrong:
            ranks[rank] = ranks[rank]._replace(spoiled=wrong[0])


def memories(num_ranks: int, is_first: bool = False, kinds: Sequence[str] = (DIRECT, STAGED, POSTED)) -> list:
    """Ways in which the ranks' rows may go.

    Args:
        num_ranks: R.
        is_first: Of the first call: those that differ by the numbers of the ranks alone are left out. This is sound,
            since ranks are alike until then, and whatever follows, faults included, is drawn for every rank.
        kinds: Of memory.
    """
    return list(combinations_with_replacement(kinds, num_ranks) if is_first else product(kinds, repeat=num_ranks))


def draws(kinds: Iterable[str], memories: Sequence[tuple[str, ...]], with_overflow: bool = True) -> list[DrawnCall]:
    """Calls of some kinds, with these ways of rows; of worst-case dispatches also those with too many rows."""
    drawn = [DrawnCall(kind, memory, _ROUNDS) for kind in kinds for memory in memories]
    return drawn + [one._replace(overflows=True) for one in drawn if with_overflow and one.kind == WORST_CASE]
