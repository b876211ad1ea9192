"""Low-latency calls as a model: `engine/low_latency/halves.py` step for step, with the rules of `flights.py` in it.

Which call may be made while which results are in flight, and whether a barrier comes first, is asked of `Flights`, and
where a set lies is asked of `Plan`. So calls of different sizes lie over each other in the model as they do in memory.
Ranks call their hooks in any order, and as late as they like.

Posts and tables are scaled down: as many as there are sets of the smallest calls in the model, instead of 8, which is
the largest number of sets. A post is written with its set, so that the argument of the page about sets is the one about
posts, with equality.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import NamedTuple

from ....engine.low_latency.flights import Flights
from ....engine.low_latency.geometry import Plan
from ....errors import EPError
from ....sizing import SLOT_ALIGNMENT_BYTES
from .explore import Interner, Label, State, Step, Violation
from .ranks import DEAD, DESTROY, ENDS, GARBAGE, KILL, LEFT, RAISE, RAISED, REFUSE, RUNS

SILENT = "is silent past the limit"  # and its peers mask it, though it lives
FAULTS = (KILL, RAISE, DESTROY, REFUSE)

DEFECTS = (
    "signal before data",
    "set reused too early",
    "posts reused too early",
    "call off by one",
    "masked rank read all the same",
    "no barrier between sizes",
    "set written before it is said",
)

# Where a rank is in a half of a call.
IDLE, PUBLISHED, WAITS, ARRIVED, FETCHES, FETCHED = range(6)


class Kind(NamedTuple):
    """A call.

    Attributes:
        num_sets: That calls of its size divide the memory into; 0: it is a barrier.
    """

    num_sets: int


class Rank(NamedTuple):
    """A rank: where it is, its words, and its memory.

    Attributes:
        status: Whether it makes calls.
        num_made: Of the calls that its caller wants, how many it has made.
        chain: The sizes of the calls that it has sent, barriers among them.
        pending: Those that it has not received.
        phase: Where it is in a half.
        number: The call of that half.
        sent: As on the board.
        spent: As on the board.
        failed: As on the board.
        is_gone: It has destroyed its buffer, or its process has ended.
        refused: As on the board: the number of a call.
        masked: The ranks that it has masked, as bits.
        units: What lies in its sets: for each unit of memory the call that wrote it.
        posts: The calls that wrote its posts.
        spoiled: What it has fetched is not what it should be: the rank that it is from, plus 1.
    """

    status: int
    num_made: int
    chain: tuple[int, ...]
    pending: tuple[int, ...]
    phase: int
    number: int
    sent: int
    spent: int
    failed: int
    is_gone: int
    refused: int
    masked: int
    units: tuple[int, ...]
    posts: tuple[int, ...]
    spoiled: int


class LowLatency:
    """Ranks that make low-latency calls, and at most one thing that goes wrong.

    Args:
        num_ranks: R.
        kinds: The calls, alike on all ranks.
        faults: What may go wrong, once.
        can_mask: Ranks that are gone are masked; else all others raise.
        defect: One of `DEFECTS`.
    """

    name = "low-latency"

    def __init__(
        self,
        num_ranks: int,
        kinds: Sequence[Kind],
        faults: Iterable[str] = FAULTS,
        can_mask: bool = False,
        defect: str | None = None,
    ):
        self.num_ranks, self.num_calls = num_ranks, len(kinds)
        self._kinds = kinds
        self._faults = tuple(faults)
        self._can_mask = can_mask
        self._defect = defect
        most = max(kind.num_sets for kind in kinds)
        self._num_posts = most // 2 if defect == "posts reused too early" else most
        self._quarter_bytes = most // 2 * SLOT_ALIGNMENT_BYTES
        self._ranks: Interner[Rank] = Interner()

    # For the explorer ------------------------------------------------------------------------------------------------

    def initial(self) -> Iterable[State]:
        """All ranks have made their buffers."""
        units = (GARBAGE,) * (2 * self._quarter_bytes // SLOT_ALIGNMENT_BYTES)
        posts = (GARBAGE,) * self._num_posts
        number = self._ranks.number(Rank(RUNS, 0, (), (), IDLE, 0, 0, 0, 0, 0, 0, 0, units, posts, 0))
        return [(*[number] * self.num_ranks, 0)]

    def steps(self, state: State) -> Iterator[Step]:
        """The steps that a state allows."""
        ranks = [self._ranks.values[number] for number in state[:-1]]
        for rank, me in enumerate(ranks):
            if me.status != RUNS:
                continue
            if state[-1] == 0:
                yield from self._fault_steps(ranks, rank, state)
            if me.phase == IDLE:
                yield from self._idle_steps(ranks, rank, state)
            elif me.phase == PUBLISHED:
                yield self._sent(ranks, rank, state)
            elif me.phase in (WAITS, ARRIVED):
                yield from self._wait_steps(ranks, rank, state)
            elif me.phase == FETCHES:
                yield self._fetch(ranks, rank, state)
            else:
                yield self._ahead(ranks, rank, state)

    def blocked(self, state: State) -> list[str]:
        """Who waits for ever."""
        ranks = [self._ranks.values[number] for number in state[:-1]]
        return [
            f"rank {rank} is in call {one.number or one.num_made + 1}"
            for rank, one in enumerate(ranks)
            if one.status == RUNS
        ]

    def check_end(self, state: State) -> None:
        """Where nothing went wrong every rank has made all its calls, and masked nobody."""
        for rank in range(self.num_ranks):
            one = self._ranks.values[state[rank]]
            if state[-1] == 0 and (one.status != LEFT or one.num_made < self.num_calls or one.masked):
                raise Violation(f"rank {rank} {ENDS[one.status]} with masks {one.masked:b}, and nothing went wrong")

    # Send halves -----------------------------------------------------------------------------------------------------

    def _idle_steps(self, ranks: list[Rank], rank: int, state: State) -> Iterator[Step]:
        """Make the next call, if `Flights` lets it; call a hook; leave when all is done."""
        me = ranks[rank]
        for number in me.pending:
            changed = me._replace(phase=WAITS, number=number)
            yield Label(rank, "before receive", number, True), self._packed(rank, changed, state)
        if me.num_made < self.num_calls:
            num_sets = self._kinds[me.num_made].num_sets
            answer = self._may_send(me.chain, me.pending, num_sets)
            if answer is not None:
                yield self._publish(ranks, rank, state, 0 if answer and num_sets else num_sets)
        elif not me.pending:
            yield Label(rank, DESTROY, 0, True), self._packed(rank, me._replace(status=LEFT, is_gone=1), state)

    def _may_send(self, chain: tuple[int, ...], pending: tuple[int, ...], num_sets: int) -> bool | None:
        """What `Flights.make_way` does: None: the call is refused now; True: a barrier comes first."""
        if self._defect == "set reused too early":
            return False if len(pending) < max(1, num_sets) else None
        answer = _make_way(chain, pending, num_sets)
        return False if answer and self._defect == "no barrier between sizes" else answer

    def _publish(self, ranks: list[Rank], rank: int, state: State, num_sets: int) -> Step:
        me = ranks[rank]
        number = len(me.chain) + 1
        is_wanted = bool(num_sets) or not self._kinds[me.num_made].num_sets
        spent = max(me.spent, _newest_spent(me.chain, num_sets), number - self._num_posts)
        me = me._replace(
            spent=0 if self._defect == "set written before it is said" else spent,
            num_made=me.num_made + is_wanted,
            chain=(*me.chain, num_sets),
            pending=(*me.pending, number),
            phase=PUBLISHED,
            number=number,
        )
        is_early = self._defect == "signal before data"
        me = me._replace(sent=number) if is_early else self._written(me, number, num_sets)
        return Label(rank, "publish", number), self._packed(rank, me, state)

    def _written(self, me: Rank, number: int, num_sets: int) -> Rank:
        units, posts = list(me.units), list(me.posts)
        for unit in self._set_units(number, num_sets):
            units[unit] = number
        posts[number % self._num_posts] = number
        return me._replace(units=tuple(units), posts=tuple(posts))

    def _set_units(self, number: int, num_sets: int) -> range:
        if not num_sets:
            return range(0)
        plan = Plan(self._quarter_bytes, num_sets // 2)
        first = plan.set_offset(number) // SLOT_ALIGNMENT_BYTES
        return range(first, first + plan.set_bytes // SLOT_ALIGNMENT_BYTES)

    def _sent(self, ranks: list[Rank], rank: int, state: State) -> Step:
        me, number = ranks[rank], ranks[rank].number
        if self._defect == "signal before data":
            me = self._written(me, number, me.chain[number - 1])
        is_barrier = not me.chain[number - 1]
        me = me._replace(sent=number, phase=WAITS if is_barrier else IDLE, number=number if is_barrier else 0)
        return Label(rank, "sent", number), self._packed(rank, me, state)

    # Receive halves --------------------------------------------------------------------------------------------------

    def _wait_steps(self, ranks: list[Rank], rank: int, state: State) -> Iterator[Step]:
        """The looks of `wait_sent`. Reasons first and words second are one look at the time of the second."""
        me = ranks[rank]
        number = me.number - (self._defect == "call off by one")
        label = Label(rank, "wait sent", me.number)
        senders = [(peer, one) for peer, one in enumerate(ranks) if peer != rank and not me.masked >> peer & 1]
        failed = next((peer for peer, one in senders if one.failed), None)
        if failed is not None:
            yield self._raised(ranks, rank, state, label, f"rank {failed} has failed")
        if me.phase == ARRIVED:
            if failed is None:
                yield label, self._packed(rank, me._replace(phase=FETCHES), state)
            return
        late = [(peer, one) for peer, one in senders if one.sent < number]
        if not late:
            shown = label._replace(name="wait sent (all there)", is_silent=True)
            yield shown, self._packed(rank, me._replace(phase=ARRIVED), state)
        for peer, one in late:
            is_silent = self._can_mask and state[-1] == 2 + peer
            if one.is_gone or one.refused == me.number or is_silent:
                why = f"rank {peer} is gone, has refused the call, or is silent"
                if not self._can_mask:
                    yield self._raised(ranks, rank, state, label, why)
                    continue
                changed = me._replace(masked=me.masked | 1 << peer)
                yield label._replace(name=f"mask rank {peer}"), self._masking(rank, changed, state, why)

    def _fetch(self, ranks: list[Rank], rank: int, state: State) -> Step:
        """Posts, tables and rows of everybody who is not masked."""
        me = ranks[rank]
        number, spoiled = me.number, 0
        num_sets = me.chain[number - 1]
        for peer, one in enumerate(ranks):
            if me.masked >> peer & 1 and self._defect != "masked rank read all the same":
                continue
            units = [one.units[unit] for unit in self._set_units(number, num_sets)]
            if one.posts[number % self._num_posts] != number or any(unit != number for unit in units):
                spoiled = peer + 1
            elif one.chain[number - 1] != num_sets:
                text = f"call {number} has {num_sets} sets at rank {rank}, {one.chain[number - 1]} at rank {peer}"
                return Label(rank, "fetch", number), Violation(text)
        changed = me._replace(phase=FETCHED, spoiled=spoiled)
        return Label(rank, "fetch", number), self._packed(rank, changed, state)

    def _ahead(self, ranks: list[Rank], rank: int, state: State) -> Step:
        """Look at the words again: whoever went on without this rank may have written over what was read."""
        me = ranks[rank]
        limit = me.number + (me.chain[me.number - 1] or 2)
        label = Label(rank, "ahead", me.number)
        unmasked = [(peer, one) for peer, one in enumerate(ranks) if not me.masked >> peer & 1]
        ahead = [peer for peer, one in unmasked if one.sent >= limit or one.spent >= me.number]
        if ahead:
            why = f"rank {ahead[0]} has gone on without this rank"
            if not self._can_mask:
                return self._raised(ranks, rank, state, label, why)
            masked = me.masked | sum(1 << peer for peer in ahead)
            changed = me._replace(masked=masked, phase=WAITS, spoiled=0)
            return label._replace(name=f"mask rank {ahead[0]}"), self._masking(rank, changed, state, why)
        if me.spoiled:
            text = (
                f"rank {rank} ends call {me.number} with rows of rank {me.spoiled - 1} that are not those of the call"
            )
            return label, Violation(text)
        pending = tuple(number for number in me.pending if number != me.number)
        return label, self._packed(rank, me._replace(phase=IDLE, number=0, pending=pending), state)

    # Ends ------------------------------------------------------------------------------------------------------------

    def _packed(self, rank: int, me: Rank, state: State, fault: int | None = None) -> State:
        numbers = [*state[:-1]]
        numbers[rank] = self._ranks.number(me)
        return (*numbers, state[-1] if fault is None else fault)

    def _masking(self, rank: int, me: Rank, state: State, why: str) -> State | Violation:
        if state[-1] == 0:
            return Violation(f"rank {rank} masks a rank, and nothing went wrong: {why}")
        return self._packed(rank, me, state)

    def _raised(self, ranks: list[Rank], rank: int, state: State, label: Label, why: str) -> Step:
        label = label._replace(name=f"{label.name} raises: {why}")
        if state[-1] == 0:
            return label, Violation(f"rank {rank} raises in call {label.call}, and nothing went wrong: {why}")
        return label, self._packed(rank, self._scribbled(ranks[rank])._replace(status=RAISED, failed=1), state)

    def _scribbled(self, me: Rank) -> Rank:
        """A rank that fails writes no set again. But a half that it was in may be half written."""
        if me.phase != PUBLISHED:
            return me
        units = list(me.units)
        for unit in self._set_units(me.number, me.chain[me.number - 1]):
            units[unit] = GARBAGE
        return me._replace(units=tuple(units))

    def _fault_steps(self, ranks: list[Rank], rank: int, state: State) -> Iterator[Step]:
        me = ranks[rank]
        for fault in self._faults:
            if fault in (DESTROY, REFUSE) and (me.phase != IDLE or me.num_made == self.num_calls):
                continue
            changed, used = me, 1
            if fault == KILL:
                changed = me._replace(status=DEAD, is_gone=1)
            elif fault == DESTROY:
                changed = me._replace(status=LEFT, is_gone=1)
            elif fault == REFUSE:
                changed = me._replace(refused=len(me.chain) + 1)
            elif fault == SILENT:
                used = 2 + rank
            else:
                changed = self._scribbled(me)._replace(status=RAISED, failed=1)
            yield Label(rank, fault, me.number), self._packed(rank, changed, state, used)


def _flights(chain: tuple[int, ...], pending: tuple[int, ...]) -> Flights:
    flights = Flights()
    for number, sets in enumerate(chain, 1):
        flights.send("model", sets)
        if number not in pending:
            flights.receive(number)
    return flights


@cache
def _newest_spent(chain: tuple[int, ...], num_sets: int) -> int:
    return _flights(chain, ()).newest_spent(num_sets)


@cache
def _make_way(chain: tuple[int, ...], pending: tuple[int, ...], num_sets: int) -> bool | None:
    flights = _flights(chain, pending)
    try:
        if pending:
            flights.require_room("model", num_sets)
            return False
    except EPError:
        return None
    return flights.needs_barrier(num_sets)
