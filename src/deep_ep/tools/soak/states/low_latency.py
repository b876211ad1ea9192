"""Low-latency calls as a model: `engine/low_latency/` of the CPU step for step, on one node.

Which call may be made while which results are in flight, and which slot it takes, is asked of `InFlight` and `Slots`.
Ranks call their hooks in any order, and as late as they like. Where ranks may be masked, the ranks of the model agree
on who is lost (`agreement.py`), tell it in their posts, and come into step again at every barrier (`rejoin.py`), before
which they unmask everybody, as the callers do that want a rank back.

Posts and verdicts are scaled down: four instead of eight, which is as many as there are dispatch sets. A post is
written with its set, so that the argument of the page about sets is the one about posts, with equality.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from ....engine.low_latency.cpu.shared import Done
from ....engine.low_latency.geometry import NUM_SETS, NUM_SLOTS
from ....engine.low_latency.in_flight import InFlight
from ....engine.low_latency.slots import FREE_SLOT, NO_SLOT, Slots
from ....errors import EPError
from .explore import Interner, Label, State, Step, Violation
from .ranks import DEAD, DESTROY, ENDS, GARBAGE, KILL, LEFT, RAISE, RAISED, REFUSE, RUNS

SILENT = "is silent past the limit"  # and its peers may mask it, though it lives; it may leave calls out
FAULTS = (KILL, RAISE, DESTROY, REFUSE)

DISPATCH, COMBINE, BARRIER = "dispatch", "combine", "barrier"  # the kinds of calls

KIND_OF = {"d": DISPATCH, "c": COMBINE, "b": BARRIER}

DEFECTS = (
    "signal before data",
    "set reused too early",
    "slot reused too early",
    "posts reused too early",
    "call off by one",
    "masked rank read all the same",
    "set written before it is said",
    "masks are not in posts",
    "masked at once",
    "verdicts on different calls",
    "numbers are not agreed on",
    "call given up in silence",
)

# Where a rank is in a half of a call, or before a barrier.
IDLE, PUBLISHED, WAITS, AGREES, ARRIVED, FETCHES, FETCHED, JOINS = range(8)
_NUM_POSTS = NUM_SETS
NEVER = 1 << 30  # as the number of a call


class Made(NamedTuple):
    """A call that a rank has made.

    Attributes:
        number: Of the call.
        kind: Of the call.
        unit: Where its rows lie: a dispatch set, or behind those a slot; -1: it has none.
    """

    number: int
    kind: str
    unit: int


class Post(NamedTuple):
    """What a rank says of a call.

    Attributes:
        made: The call.
        masked: Its masks.
        lost: Those that all are to mask.
        does_without: Its masks, as they are: with a defect it does not say so.
    """

    made: Made
    masked: int
    lost: int
    does_without: int


class LowLatencyRank(NamedTuple):
    """A rank: where it is, its words, and its memory. Sets of ranks are bits.

    Attributes:
        status: Whether it makes calls.
        num_wanted: Of the calls that its caller wants, how many it has made or left out.
        made: The calls that it has made.
        pending: The numbers of those that it has not received.
        phase: Where it is in a half.
        number: The call of that half.
        sent: As on the board.
        spent: As on the board.
        done: As on the board.
        failed: As on the board, where no ranks are masked.
        is_gone: It has destroyed its buffer, its process has ended, or, where ranks are masked, it has failed.
        refused: As on the board: the number of a call.
        masks: Of each rank: the first call that it is masked in; `NEVER`: it is not masked.
        lost: The ranks of those that all are to mask.
        missed: In `AGREES`: its verdict.
        verdicts: As on the board: calls and sets.
        units: What lies in its sets and slots: the call that wrote it.
        posts: As on the board.
        spoiled: What it has fetched is not what it should be: the rank that it is from, plus 1.
        sums: The last calls that it has received, with the ranks whose rows it has.
        attempt: As on the board.
        following: As on the board.
        echoes: As on the board.
        joined: In `JOINS`: who has come.
    """

    status: int
    num_wanted: int
    made: tuple[Made, ...]
    pending: tuple[int, ...]
    phase: int
    number: int
    sent: int
    spent: int
    done: int
    failed: int
    is_gone: int
    refused: int
    masks: tuple[int, ...]
    lost: int
    missed: int
    verdicts: tuple[tuple[int, int], ...]
    units: tuple[int, ...]
    posts: tuple[Post | None, ...]
    spoiled: int
    sums: tuple[tuple[int, int], ...]
    attempt: int
    following: int
    echoes: tuple[int, ...]
    joined: int

    def masked(self, number: int = NEVER) -> int:
        """The ranks that it has masked; in a call, or at all."""
        return sum(1 << rank for rank, first in enumerate(self.masks) if first <= number and first < NEVER)

    def masking(self, ranks: int, number: int) -> LowLatencyRank:
        """With more ranks masked, from a call on."""
        masks = [min(first, number) if ranks >> rank & 1 else first for rank, first in enumerate(self.masks)]
        return self._replace(masks=tuple(masks))


class LowLatencyModel:
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
        kinds: Sequence[str],
        faults: Iterable[str] = FAULTS,
        can_mask: bool = False,
        defect: str | None = None,
    ):
        self.num_ranks, self.num_calls = num_ranks, len(kinds)
        self._kinds = kinds
        self._faults = tuple(faults)
        self._can_mask = can_mask
        self._defect = defect
        self._num_posts = _NUM_POSTS // 2 if defect == "posts reused too early" else _NUM_POSTS
        self._num_sets = NUM_SETS // 2 if defect == "set reused too early" else NUM_SETS
        self._ranks: Interner[LowLatencyRank] = Interner()

    # For the explorer ------------------------------------------------------------------------------------------------

    def initial(self) -> Iterable[State]:
        """All ranks have made their buffers."""
        units, posts = (GARBAGE,) * (NUM_SETS + NUM_SLOTS), (None,) * self._num_posts
        words = dict.fromkeys(LowLatencyRank._fields, 0)
        lists: dict[str, Any] = {
            "made": (),
            "pending": (),
            "sums": (),
            "echoes": (0,) * self.num_ranks,
            "masks": (NEVER,) * self.num_ranks,
        }
        lists |= {"verdicts": ((0, 0),) * _NUM_POSTS, "units": units, "posts": posts}
        first = LowLatencyRank(**{**words, **lists})
        number = self._ranks.number(first._replace(status=RUNS))
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
            elif me.phase == AGREES:
                yield from self._agree_steps(ranks, rank, state)
            elif me.phase == JOINS:
                yield from self._join_steps(ranks, rank, state)
            elif me.phase == FETCHES:
                yield self._fetch(ranks, rank, state)
            else:
                yield self._ahead(ranks, rank, state)

    def blocked(self, state: State) -> list[str]:
        """Who waits for ever."""
        ranks = [self._ranks.values[number] for number in state[:-1]]
        return [
            f"rank {rank} is in call {one.number or one.sent + 1}, phase {one.phase}"
            for rank, one in enumerate(ranks)
            if one.status == RUNS
        ]

    def check_end(self, state: State) -> None:
        """Where nothing went wrong every rank has made all its calls, and masked nobody."""
        for rank in range(self.num_ranks):
            one = self._ranks.values[state[rank]]
            if state[-1] == 0 and (one.status != LEFT or one.num_wanted < self.num_calls or one.masked()):
                raise Violation(f"rank {rank} {ENDS[one.status]} with masks {one.masked():b}, and nothing went wrong")

    # Send halves -----------------------------------------------------------------------------------------------------

    def _idle_steps(self, ranks: list[LowLatencyRank], rank: int, state: State) -> Iterator[Step]:
        """Make the next call, if `InFlight` lets it; call a hook; leave when all is done."""
        me = ranks[rank]
        for number in me.pending:
            changed = me._replace(phase=WAITS, number=number)
            yield Label(rank, "before receive", number, True), self._packed(rank, changed, state)
        if me.num_wanted < self.num_calls:
            kind = self._kinds[me.num_wanted]
            if kind == BARRIER and self._can_mask:
                yield self._join(ranks, rank, state)
            else:
                yield from self._publish(rank, me, state, kind)
            rest = self._kinds[me.num_wanted :]
            if state[-1] == 2 + rank and BARRIER in rest[1:]:
                left_out = me._replace(num_wanted=me.num_wanted + rest.index(BARRIER))
                yield Label(rank, "leaves calls out", 0), self._packed(rank, left_out, state)
        elif not me.pending:
            yield Label(rank, DESTROY, 0, True), self._packed(rank, me._replace(status=LEFT, is_gone=1), state)

    def _publish(self, rank: int, me: LowLatencyRank, state: State, kind: str) -> Iterator[Step]:
        taken = _next_call(me.made, me.pending, kind)
        if taken is None and self._defect == "slot reused too early" and len(me.pending) < 2:
            taken = (0, 0)
        if taken is None:
            return
        slot, last_call = taken
        number = (me.made[-1].number if me.made else 0) + 1
        unit = {DISPATCH: number % self._num_sets, COMBINE: NUM_SETS + slot, BARRIER: -1}[kind]
        spent = max(me.spent, number - self._num_posts, last_call if kind == COMBINE else 0)
        if kind == DISPATCH:
            spent = max(spent, number - self._num_sets)
        made = Made(number, kind, unit)
        me = me._replace(
            spent=0 if self._defect == "set written before it is said" else spent,
            num_wanted=me.num_wanted + 1,
            made=(*me.made, made),
            pending=(*me.pending, number),
            phase=PUBLISHED,
            number=number,
        )
        me = me._replace(sent=number) if self._defect == "signal before data" else self._written(me, made)
        yield Label(rank, "publish", number), self._packed(rank, me, state)

    def _written(self, me: LowLatencyRank, made: Made) -> LowLatencyRank:
        units, posts = list(me.units), list(me.posts)
        if made.unit >= 0:
            units[made.unit] = made.number
        has_masks = self._defect != "masks are not in posts"
        posts[made.number % self._num_posts] = Post(made, me.masked() * has_masks, me.lost * has_masks, me.masked())
        return me._replace(units=tuple(units), posts=tuple(posts))

    def _sent(self, ranks: list[LowLatencyRank], rank: int, state: State) -> Step:
        me, number = ranks[rank], ranks[rank].number
        made = me.made[-1]
        if self._defect == "signal before data":
            me = self._written(me, made)
        is_barrier = made.kind == BARRIER
        me = me._replace(sent=number, phase=WAITS if is_barrier else IDLE, number=number if is_barrier else 0)
        return Label(rank, "sent", number), self._packed(rank, me, state)

    # Receive halves --------------------------------------------------------------------------------------------------

    def _unmasked(self, ranks: list[LowLatencyRank], rank: int) -> list[tuple[int, LowLatencyRank]]:
        masked = ranks[rank].masked(ranks[rank].number)
        return [(peer, one) for peer, one in enumerate(ranks) if not masked >> peer & 1]

    def _others(self, ranks: list[LowLatencyRank], rank: int) -> list[tuple[int, LowLatencyRank]]:
        return [(peer, one) for peer, one in self._unmasked(ranks, rank) if peer != rank]

    def _wait_steps(self, ranks: list[LowLatencyRank], rank: int, state: State) -> Iterator[Step]:
        """The looks of `wait_sent`. Reasons first and words second are one look at the time of the second."""
        me = ranks[rank]
        number = me.number - (self._defect == "call off by one")
        label = Label(rank, "wait sent", me.number)
        others = self._others(ranks, rank)
        failed = next((peer for peer, one in others if one.failed), None)
        if failed is not None:
            yield self._raised(ranks, rank, state, label, f"rank {failed} has failed")
        if me.phase == ARRIVED:
            if failed is None:
                yield label, self._heard(ranks, rank, state)
            return
        late = [(peer, one) for peer, one in others if one.sent < number]
        if not late:
            shown = label._replace(name="wait sent (all there)", is_silent=True)
            yield shown, self._packed(rank, me._replace(phase=ARRIVED), state)
            return
        told = self._told_lost(ranks, rank) if self._can_mask else 0
        if told:
            yield self._agree(ranks, rank, state, told, "others miss them")
        for peer, one in late:
            is_silent = self._can_mask and state[-1] == 2 + peer
            is_joining = one.phase == JOINS and one.attempt != me.echoes[peer]
            if one.is_gone or one.refused == me.number or is_silent or is_joining:
                why = f"rank {peer} is gone, has refused the call, or is silent"
                if self._can_mask:
                    yield self._agree(ranks, rank, state, told | 1 << peer, why)
                else:
                    yield self._raised(ranks, rank, state, label, why)

    def _heard(self, ranks: list[LowLatencyRank], rank: int, state: State) -> State | Violation:
        """Whether all count on this rank, and whom they have lost, as `_take_over_masks` finds it."""
        me = ranks[rank]
        gone = told = 0
        for peer, one in self._others(ranks, rank):
            post = one.posts[me.number % self._num_posts]
            if not self._can_mask or post is None:
                continue
            if post.made.number != me.number or post.masked >> rank & 1:
                gone |= 1 << peer
            else:
                told |= post.lost & ~me.masked(me.number) & ~(1 << rank)
        if not gone and not told:
            return self._packed(rank, me._replace(phase=FETCHES), state)
        changed = me.masking(gone | told, me.number)._replace(lost=me.lost | (told & ~gone), phase=WAITS)
        return self._masking(rank, changed, state, "of what others have posted")

    def _fetch(self, ranks: list[LowLatencyRank], rank: int, state: State) -> Step:
        """Posts, tables and rows of everybody who is not masked."""
        me = ranks[rank]
        mine, spoiled = self._made(me, me.number), 0
        for peer, one in enumerate(ranks):
            if me.masked(me.number) >> peer & 1 and self._defect != "masked rank read all the same":
                continue
            post = one.posts[me.number % self._num_posts]
            if post is None or post.made.number != me.number:
                spoiled = peer + 1
            elif post.made.kind != mine.kind:
                text = f"call {me.number} is a {mine.kind} at rank {rank}, a {post.made.kind} at rank {peer}"
                return Label(rank, "fetch", me.number), Violation(text)
            elif post.made.unit >= 0 and one.units[post.made.unit] != me.number:
                spoiled = peer + 1
        changed = me._replace(phase=FETCHED, spoiled=spoiled)
        return Label(rank, "fetch", me.number), self._packed(rank, changed, state)

    def _ahead(self, ranks: list[LowLatencyRank], rank: int, state: State) -> Step:
        """Look at the words again: whoever went on without this rank may have written over what was read."""
        me = ranks[rank]
        label = Label(rank, "ahead", me.number)
        unmasked = self._unmasked(ranks, rank)
        ahead = [peer for peer, one in unmasked if one.sent >= me.number + NUM_SETS or one.spent >= me.number]
        if ahead:
            why = f"rank {ahead[0]} has gone on without this rank"
            if not self._can_mask:
                return self._raised(ranks, rank, state, label, why)
            gone = sum(1 << peer for peer in ahead)
            changed = me.masking(gone, me.number)._replace(phase=WAITS, spoiled=0)
            return label._replace(name=f"mask rank {ahead[0]}"), self._masking(rank, changed, state, why)
        if me.spoiled:
            text = (
                f"rank {rank} ends call {me.number} with rows of rank {me.spoiled - 1} that are not those of the call"
            )
            return label, Violation(text)
        here = sum(1 << peer for peer, _ in unmasked)
        for peer, one in unmasked:
            post = one.posts[me.number % self._num_posts]
            if self._can_mask and post is not None and post.does_without >> rank & 1:
                text = f"rank {rank} ends call {me.number} with rank {peer}, which does without it, and has no mask"
                return label, Violation(text)
            theirs = dict(one.sums).get(me.number, here)
            # A rank that was too slow may find rows written over, and does without them.
            is_about_survivors = self._can_mask and state[-1] not in (2 + rank, 2 + peer)
            if is_about_survivors and theirs != here and theirs >> rank & 1:
                text = f"in call {me.number} rank {rank} has summed {here:b}, rank {peer} {theirs:b}"
                return label, Violation(text)
        done = Done.of(me.done)
        done.add(me.number)
        pending = tuple(number for number in me.pending if number != me.number)
        sums = (*me.sums, (me.number, here))[-_NUM_POSTS:]
        changed = me._replace(phase=IDLE, number=0, pending=pending, done=done.word, sums=sums)
        return label, self._packed(rank, changed, state)

    # Agreeing on who is lost -----------------------------------------------------------------------------------------

    def _said(self, one: LowLatencyRank, number: int) -> int:
        said, ranks = one.verdicts[number % _NUM_POSTS]
        return ranks if said == number else 0

    def _told_lost(self, ranks: list[LowLatencyRank], rank: int) -> int:
        me, told = ranks[rank], 0
        for number in (me.number - 1, me.number):
            if not Done.of(me.done).has(number):
                for _, one in self._voters(ranks, rank):
                    told |= self._said(one, number) & ~me.masked(number)
        return told & ~(1 << rank)

    def _voters(self, ranks: list[LowLatencyRank], rank: int) -> list[tuple[int, LowLatencyRank]]:
        masked = ranks[rank].masked() | 1 << rank
        return [(peer, one) for peer, one in enumerate(ranks) if not masked >> peer & 1]

    def _agree(self, ranks: list[LowLatencyRank], rank: int, state: State, missed: int, why: str) -> Step:
        """Write the verdict; or, with a defect, mask at once."""
        me = ranks[rank]
        label = Label(rank, f"misses {missed:b}: {why}", me.number)
        if self._defect == "masked at once":
            changed = me.masking(missed, me.number)._replace(lost=me.lost | missed)
            return label, self._masking(rank, changed, state, why)
        number = me.number - self._is_missed_earlier(ranks, rank)
        changed = self._with_verdict(me, number, missed)._replace(phase=AGREES)
        if state[-1] == 0:
            return label, Violation(f"rank {rank} misses ranks, and nothing went wrong: {why}")
        return label, self._packed(rank, changed, state)

    def _is_missed_earlier(self, ranks: list[LowLatencyRank], rank: int) -> bool:
        """Whether others miss ranks in the call before, which this rank has not received."""
        me = ranks[rank]
        earlier = me.number - 1
        if Done.of(me.done).has(earlier) or self._defect == "verdicts on different calls":
            return False
        return any(self._said(one, earlier) for _, one in self._voters(ranks, rank))

    def _with_verdict(self, me: LowLatencyRank, number: int, missed: int) -> LowLatencyRank:
        verdicts = list(me.verdicts)
        verdicts[number % _NUM_POSTS] = (number, missed)
        return me._replace(verdicts=tuple(verdicts), missed=missed)

    def _agree_steps(self, ranks: list[LowLatencyRank], rank: int, state: State) -> Iterator[Step]:
        """A look of `Verdict.agree`."""
        me = ranks[rank]
        done = Done.of(me.done)
        open_calls = [number for number in (me.number - 1, me.number) if not done.has(number)]
        number = next(number for number in open_calls if self._said(me, number) == me.missed)
        label = Label(rank, f"agrees on {me.missed:b}", me.number)
        voters = [(peer, one) for peer, one in self._voters(ranks, rank) if not me.missed >> peer & 1]
        if number == me.number and self._is_missed_earlier(ranks, rank):
            yield label, self._packed(rank, self._with_verdict(me, number - 1, me.missed), state)
            return
        said = {peer: self._said(one, number) for peer, one in voters}
        more = sum(1 << peer for peer, ranks_said in said.items() if ranks_said >> rank & 1)
        for ranks_said in said.values():
            if ranks_said >> rank & 1:
                continue  # it takes this rank for lost
            more |= ranks_said & ~me.missed & ~me.masked(number) & ~(1 << rank)
        if more:
            yield label, self._packed(rank, self._with_verdict(me, number, me.missed | more), state)
            return
        undecided = [(peer, one) for peer, one in voters if said[peer] != me.missed]
        have_done = [peer for peer, one in undecided if Done.of(one.done).has(number) and not said[peer]]
        are_there = all(one.sent >= number for peer, one in enumerate(ranks) if me.missed >> peer & 1)
        if have_done and are_there:
            dropped = self._with_verdict(me, number, 0)._replace(phase=WAITS)
            yield label._replace(name="drops its verdict"), self._packed(rank, dropped, state)
            return
        undecided = [(peer, one) for peer, one in undecided if peer not in have_done]
        if not undecided:
            changed = me.masking(me.missed, number)._replace(lost=me.lost | me.missed, missed=0, phase=WAITS)
            yield label, self._masking(rank, changed, state, "all agree")
        for peer, one in undecided:
            if (one.is_gone or state[-1] == 2 + peer) and not Done.of(one.done).has(number):
                yield label, self._packed(rank, self._with_verdict(me, number, me.missed | 1 << peer), state)

    # Coming into step ------------------------------------------------------------------------------------------------

    def _join(self, ranks: list[LowLatencyRank], rank: int, state: State) -> Step:
        """Unmask everybody, give up what is in flight, and tell all peers the attempt."""
        me = ranks[rank]
        last = me.made[-1].number if me.made else 0
        changed = me._replace(
            masks=(NEVER,) * self.num_ranks,
            lost=0,
            pending=(),
            phase=JOINS,
            number=0,
            attempt=me.attempt + 1,
            following=last + 1,
            done=me.done if self._defect == "call given up in silence" else Done(last).word,
            echoes=tuple(one.attempt for one in ranks),
            joined=1 << rank,
        )
        return Label(rank, "joins", changed.following), self._packed(rank, changed, state)

    def _join_steps(self, ranks: list[LowLatencyRank], rank: int, state: State) -> Iterator[Step]:
        """A look at each peer; when all have come, or are lost, the barrier gets its number."""
        me = ranks[rank]
        label = Label(rank, "meets", me.following)
        if me.joined | me.lost == (1 << self.num_ranks) - 1:
            yield from self._met(ranks, rank, state)
            return
        for peer, one in enumerate(ranks):
            if (me.joined | me.lost) >> peer & 1:
                continue
            echoes = tuple(one.attempt if index == peer else echo for index, echo in enumerate(me.echoes))
            if one.echoes[rank] == me.attempt:
                changed = me._replace(echoes=echoes, joined=me.joined | 1 << peer, number=max(me.number, one.following))
                yield label, self._packed(rank, changed, state)
            else:
                if echoes != me.echoes:
                    yield label, self._packed(rank, me._replace(echoes=echoes), state)
                if one.is_gone or state[-1] == 2 + peer:
                    changed = me.masking(1 << peer, 0)._replace(echoes=echoes, lost=me.lost | 1 << peer)
                    yield label, self._masking(rank, changed, state, f"rank {peer} does not come")

    def _met(self, ranks: list[LowLatencyRank], rank: int, state: State) -> Iterator[Step]:
        me = ranks[rank]
        number = max(me.number, me.following)
        if self._defect == "numbers are not agreed on":
            number = me.following
        done, made = Done(number - 1).word, (*me.made, Made(number - 1, "", -1))
        me = me._replace(made=made, spent=max(me.spent, number - 1), done=done, phase=IDLE, number=0, joined=0)
        yield from self._publish(rank, me, state, BARRIER)

    # Ends ------------------------------------------------------------------------------------------------------------

    def _made(self, me: LowLatencyRank, number: int) -> Made:
        return next(made for made in reversed(me.made) if made.number == number)

    def _packed(self, rank: int, me: LowLatencyRank, state: State, fault: int | None = None) -> State:
        numbers = [*state[:-1]]
        numbers[rank] = self._ranks.number(me)
        return (*numbers, state[-1] if fault is None else fault)

    def _masking(self, rank: int, me: LowLatencyRank, state: State, why: str) -> State | Violation:
        if state[-1] == 0:
            return Violation(f"rank {rank} masks a rank, and nothing went wrong: {why}")
        return self._packed(rank, me, state)

    def _raised(self, ranks: list[LowLatencyRank], rank: int, state: State, label: Label, why: str) -> Step:
        label = label._replace(name=f"{label.name} raises: {why}")
        if state[-1] == 0:
            return label, Violation(f"rank {rank} raises in call {label.call}, and nothing went wrong: {why}")
        return label, self._packed(rank, self._failed(ranks[rank]), state)

    def _failed(self, me: LowLatencyRank) -> LowLatencyRank:
        """A rank that has failed. Where ranks are masked, its peers go on without it as without one that has ended."""
        failed, is_gone = int(not self._can_mask), int(self._can_mask)
        return self._scribbled(me)._replace(status=RAISED, failed=failed, is_gone=is_gone)

    def _scribbled(self, me: LowLatencyRank) -> LowLatencyRank:
        """A rank that fails writes no set again. But a half that it was in may be half written."""
        if me.phase != PUBLISHED or me.made[-1].unit < 0:
            return me
        units = list(me.units)
        units[me.made[-1].unit] = GARBAGE
        return me._replace(units=tuple(units))

    def _fault_steps(self, ranks: list[LowLatencyRank], rank: int, state: State) -> Iterator[Step]:
        me = ranks[rank]
        for fault in self._faults:
            if fault in (DESTROY, REFUSE) and (me.phase != IDLE or me.num_wanted == self.num_calls):
                continue
            changed, used = me, 1
            if fault == KILL:
                changed = me._replace(status=DEAD, is_gone=1)
            elif fault == DESTROY:
                changed = me._replace(status=LEFT, is_gone=1)
            elif fault == REFUSE:
                changed = me._replace(refused=(me.made[-1].number if me.made else 0) + 1)
            elif fault == SILENT:
                used = 2 + rank
            else:
                changed = self._failed(me)
            yield Label(rank, fault, me.number), self._packed(rank, changed, state, used)


@cache
def _next_call(made: tuple[Made, ...], pending: tuple[int, ...], kind: str) -> tuple[int, int] | None:
    """What `InFlight` and `Slots` say of the next call: its slot, and the call that used it last; None: refused."""
    slots = Slots()
    in_flight = InFlight(slots)
    for one in made:
        if not one.kind:  # numbers were agreed on
            in_flight.abandon()
            in_flight.go_on_from(one.number + 1)
            continue
        try:
            in_flight.require_capacity("model", _slot_of(one.kind))
            number = in_flight.send(_slot_of(one.kind))
        except EPError:  # it was sent all the same: a defect
            return None
        if one.kind == COMBINE:
            slots.take(number)
        if number not in pending:
            in_flight.receive(number)
    try:
        in_flight.require_capacity("model", _slot_of(kind))
    except EPError:
        return None
    return slots.take(in_flight.next_number) if kind == COMBINE else (0, 0)


def _slot_of(kind: str) -> int:
    return FREE_SLOT if kind == COMBINE else NO_SLOT
