"""Ranks of a node as a model: their boards, their memory, their waits, and what may go wrong with one of them.

A rank's call is a list of operations, which follows from what was drawn for the call: what a rank learns from headers
and offers is what their owners wrote there, or else the read is a violation. So the *contents* of headers and offers
are not modelled, but the number of the call that wrote them; and rows are the number of their call and round.

The caller of a rank does its worst as soon as it may: when a call ends, well or by an exception, it has written over
what it gave and dropped what it got, so that the next call has the same memory. To do so later, or not at all, shows
no more: whatever reads or writes too late finds memory that is no longer the call's in either case.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ....transport.board import progress_of
from .explore import Interner, Label, State, Step, Violation
from .ranks import (
    DEAD,
    DESTROY,
    ENDS,
    GIVE_UP,
    KILL,
    LEFT,
    RAISE,
    RAISED,
    REFUSE,
    RUNS,
    DrawnCall,
    Operation,
    Rank,
    new_rank,
    tag_text,
)


class NodeModel:
    """Ranks that make calls one after the other, and at most one thing that goes wrong.

    Args:
        choices: For each call what may be drawn.
        faults: Those of `FAULTS` that may happen, one of them, once.
        defect: What is wrong with the protocol; None: nothing. For showing that the check can fail.
        peers: For each rank the other ranks of its node.
        num_links: Links of a rank to other nodes.
    """

    name = "node"
    waits_for_comm_stream = False  # a caller that gives a call up goes on only when the comm stream has left it

    def __init__(
        self,
        choices: Sequence[Sequence[DrawnCall]],
        faults: Iterable[str],
        defect: str | None,
        peers: Sequence[Sequence[int]],
        num_links: int = 0,
    ):
        self.num_ranks, self.num_calls = len(peers), len(choices)
        self.defect = defect
        self.peers = peers
        self._choices = choices
        self._faults = tuple(faults)
        self._num_links = num_links
        self._ranks: Interner[Rank] = Interner()
        self._plans: Interner[tuple[int, ...]] = Interner()
        self._programs: dict[tuple[int, int, int], tuple[Operation, ...]] = {}

    # What a model of this kind adds ----------------------------------------------------------------------------------

    def program(self, call: int, drawn: DrawnCall, rank: int) -> list[Operation]:
        """What a rank does in a call."""
        raise NotImplementedError

    def end_call(self, ranks: list[Rank], rank: int, drawn: DrawnCall) -> None:
        """Look at what a call gives its caller; a rank that has read something else is marked `spoiled`."""
        raise NotImplementedError

    def other_steps(self, ranks: list[Rank], rank: int, operation: Operation, state: State) -> Iterator[Step]:
        """Steps of kinds that this class does not know."""
        raise NotImplementedError

    def raise_reason(self, ranks: list[Rank], rank: int) -> str | None:
        """Why a wait inside the node raises, beside what the node's words say."""
        del ranks, rank
        return None

    def tell_end(self, ranks: list[Rank], rank: int, why: str) -> None:
        """A rank ends: `why` is one of `FAULTS`. Tell those that do not see its board."""

    # For the explorer ------------------------------------------------------------------------------------------------

    def initial(self) -> Iterable[State]:
        """All ranks have made their buffers."""
        number = self._ranks.number(new_rank(self.num_ranks, self._num_links))
        return [(*[number] * self.num_ranks, 0, self._plans.number((0,) * self.num_calls))]

    def steps(self, state: State) -> Iterator[Step]:
        """The steps that a state allows. A draw comes before all others: nobody sees it."""
        ranks = [self._ranks.values[number] for number in state[: self.num_ranks]]
        plan = self._plans.values[state[-1]]
        running = [rank for rank, one in enumerate(ranks) if one.status == RUNS]
        for rank in running:
            call = ranks[rank].call
            if call <= self.num_calls and not plan[call - 1]:
                yield from self._draws(state, plan, call)
                return
        for rank in running:
            if state[-2] == 0:
                yield from self._fault_steps(ranks, rank, state)
            yield from self._rank_steps(ranks, rank, plan, state)
        for rank, one in enumerate(ranks):
            if one.status == LEFT and one.is_alive:
                gone = one._replace(is_alive=0)
                yield Label(rank, "exits", 0, True), self.packed([*ranks[:rank], gone, *ranks[rank + 1 :]], state)

    def blocked(self, state: State) -> list[str]:
        """Who waits for ever."""
        ranks = [self._ranks.values[number] for number in state[: self.num_ranks]]
        plan = self._plans.values[state[-1]]
        waiting = []
        for rank, one in enumerate(ranks):
            if one.status == RUNS:
                operation = self._program(one.call, plan[one.call - 1], rank)[one.position]
                waiting.append(f"rank {rank} is at {operation.label.name} of call {one.call}")
        return waiting

    def check_end(self, state: State) -> None:
        """Where nothing went wrong every rank has made all its calls."""
        for rank in range(self.num_ranks):
            one = self._ranks.values[state[rank]]
            if state[-2] == 0 and not (one.status == LEFT and one.call > self.num_calls):
                raise Violation(f"rank {rank} {ENDS[one.status]}, and nothing went wrong")

    # Steps -----------------------------------------------------------------------------------------------------------

    def packed(self, ranks: Sequence[Rank], before: State, fault: int | None = None) -> State:
        """A state. Draws of calls that no rank makes any more are forgotten, so that their states are the same."""
        plan = self._plans.values[before[-1]]
        first = min((one.call for one in ranks if one.status == RUNS), default=self.num_calls + 1)
        if any(plan[: first - 1]):
            plan = (0,) * (first - 1) + plan[first - 1 :]
        numbers = [self._ranks.number(one) for one in ranks]
        return (*numbers, before[-2] if fault is None else fault, self._plans.number(plan))

    def _draws(self, state: State, plan: tuple[int, ...], call: int) -> Iterator[Step]:
        for index, drawn in enumerate(self._choices[call - 1], 1):
            after = self._plans.number((*plan[: call - 1], index, *plan[call:]))
            yield Label(-1, f"call {call} is drawn: {drawn}", 0, True), (*state[:-1], after)

    def _program(self, call: int, choice: int, rank: int) -> tuple[Operation, ...]:
        key = (call, choice, rank)
        if key not in self._programs:
            self._programs[key] = tuple(self.program(call, self._choices[call - 1][choice - 1], rank))
        return self._programs[key]

    def _rank_steps(self, ranks: list[Rank], rank: int, plan: tuple[int, ...], state: State) -> Iterator[Step]:
        me = ranks[rank]
        if me.call > self.num_calls:
            ranks = list(ranks)
            ranks[rank] = me._replace(closed=1, status=LEFT)
            self.tell_end(ranks, rank, DESTROY)
            yield Label(rank, DESTROY, 0, True), self.packed(ranks, state)
            return
        if me.position == 0 and me.has_refused:  # it may leave instead of correcting its mistake
            changed = list(ranks)
            changed[rank] = me._replace(closed=1, status=LEFT)
            self.tell_end(changed, rank, DESTROY)
            yield Label(rank, DESTROY, me.call), self.packed(changed, state)
        operation = self._program(me.call, plan[me.call - 1], rank)[me.position]
        if operation.kind:
            yield from self.other_steps(ranks, rank, operation, state)
        elif operation.target:
            yield from self._wait_steps(ranks, rank, operation, state)
        else:
            yield operation.label, self.after(ranks, rank, operation, state)

    def after(
        self, ranks: list[Rank], rank: int, operation: Operation, state: State, is_done: bool = True
    ) -> State | Violation:
        """The state behind an operation.

        Args:
            ranks: All ranks, as they were.
            rank: The one that acts.
            operation: What it does.
            state: As it was.
            is_done: The rank goes on to its next operation, and behind the last one the call ends.
        """
        ranks = list(ranks)
        try:
            if operation.act is not None:
                operation.act(ranks, rank)
            if is_done:
                self._go_on(ranks, rank, state)
        except Violation as violation:
            return violation
        return self.packed(ranks, state)

    def _go_on(self, ranks: list[Rank], rank: int, state: State) -> None:
        me = ranks[rank] = ranks[rank]._replace(position=ranks[rank].position + 1, look=0)
        choice = self._plans.values[state[-1]][me.call - 1]
        if me.position < len(self._program(me.call, choice, rank)):
            return
        if me.given_up:  # nobody takes what the comm stream has finished
            ranks[rank] = me.scribble()._replace(status=RAISED)
            self.tell_end(ranks, rank, RAISE)
            return
        drawn = self._choices[me.call - 1][choice - 1]
        if not drawn.overflows:
            self.end_call(ranks, rank, drawn)
        if ranks[rank].spoiled:
            raise Violation(f"rank {rank} ends call {me.call} well, with {tag_text(ranks[rank].spoiled)} in its result")
        ranks[rank] = ranks[rank].scribble()._replace(call=me.call + 1, position=0, moved=())

    def raised(self, ranks: list[Rank], rank: int, operation: Operation, state: State, why: str) -> Step:
        """A rank raises, because of what it found: its caller does its worst, and its peers are told."""
        label = Label(rank, f"{operation.label.name} raises: {why}", operation.label.call)
        if state[-2] == 0:
            return label, Violation(f"rank {rank} raises in call {ranks[rank].call}, and nothing went wrong: {why}")
        ranks = list(ranks)
        ranks[rank] = ranks[rank].scribble()._replace(status=RAISED, failed=1)
        self.tell_end(ranks, rank, RAISE)
        return label, self.packed(ranks, state)

    def _wait_steps(self, ranks: list[Rank], rank: int, operation: Operation, state: State) -> Iterator[Step]:
        """The looks of `Window.wait`.

        `closed` first and progress second, as the code does it, is the same as both at the time of the second: `closed`
        stays. So is a refusal. The other order is two steps, which is what a defect shows.
        """
        me, target, label = ranks[rank], operation.target, operation.label
        peers = [(number, ranks[number]) for number in self.peers[rank]]
        failed = self.failed_peer(ranks, rank)
        silent = label._replace(is_silent=True)
        if me.look == 1:
            if failed is not None:
                yield self.raised(ranks, rank, operation, state, failed)
                return
            desynced = [number for number, one in peers if one.progress >= progress_of(me.call + 2, 0)]
            if desynced:
                yield label, Violation(f"rank {desynced[0]} is more than one call ahead of rank {rank}")
                return
            yield label, self.after(ranks, rank, operation, state)
            return
        if me.look:
            peer = ranks[me.look - 2]
            if peer.closed or not peer.is_alive:
                yield self.raised(ranks, rank, operation, state, f"rank {me.look - 2} is gone")
            yield silent._replace(name=f"{label.name} (again)"), self._looking(ranks, rank, 0, state)
            return
        if failed is not None:
            yield self.raised(ranks, rank, operation, state, failed)
        late = [(number, one) for number, one in peers if one.progress < target]
        if not late:
            if self.defect == "failure not looked at after the wait":
                yield label, self.after(ranks, rank, operation, state)
            else:
                yield silent._replace(name=f"{label.name} (all there)"), self._looking(ranks, rank, 1, state)
        for number, one in late:
            if me.is_refused_by(one):
                yield self.raised(ranks, rank, operation, state, f"rank {number} has refused the call")
            if self.defect == "progress looked at before closed":
                name = f"{label.name} (progress of rank {number})"
                yield silent._replace(name=name), self._looking(ranks, rank, 2 + number, state)
            elif one.closed or not one.is_alive:
                yield self.raised(ranks, rank, operation, state, f"rank {number} is gone")
        if late and (why := self.raise_reason(ranks, rank)) is not None:
            yield self.raised(ranks, rank, operation, state, why)

    def failed_peer(self, ranks: list[Rank], rank: int) -> str | None:
        """What `Window._raise_if_failed` finds."""
        if ranks[rank].given_up:
            return "its caller has given up"
        return next((f"rank {number} has failed" for number in self.peers[rank] if ranks[number].failed), None)

    def _looking(self, ranks: list[Rank], rank: int, look: int, state: State) -> State:
        return self.packed([*ranks[:rank], ranks[rank]._replace(look=look), *ranks[rank + 1 :]], state)

    # Faults ----------------------------------------------------------------------------------------------------------

    def _fault_steps(self, ranks: list[Rank], rank: int, state: State) -> Iterator[Step]:
        me = ranks[rank]
        is_between = me.position == 0
        for fault in self._faults:
            if fault in (DESTROY, REFUSE) and (not is_between or me.call > self.num_calls):
                continue
            if fault == GIVE_UP and (is_between or me.given_up):
                continue
            changed = list(ranks)
            if fault == KILL:
                changed[rank] = me._replace(status=DEAD, is_alive=0)
            elif fault == DESTROY:
                changed[rank] = me._replace(status=LEFT, closed=1)
            elif fault == REFUSE:
                changed[rank] = me.refuse()
            elif fault == RAISE:
                changed[rank] = me.scribble()._replace(failed=1, status=RAISED)
            elif self.waits_for_comm_stream:
                changed[rank] = me._replace(failed=1, given_up=1)
            else:
                changed[rank] = me.scribble()._replace(failed=1, given_up=1, is_overwritten=1)
            self.tell_end(changed, rank, fault)
            yield Label(rank, fault, me.call), self.packed(changed, state, 1)
