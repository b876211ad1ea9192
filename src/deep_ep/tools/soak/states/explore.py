"""A small explicit-state explorer: every state that a model can reach, breadth first, so that a path is a shortest one.

A model says in which states its ranks begin and which steps a state allows. What is wrong shows in one of three ways:
a step that finds what it must not find (a `Violation` in the place of its next state), a state in which nobody can go
on although not every rank has ended (a deadlock), or an end that is not one of those that are right.

Two things keep the number of states small, in all models:

- *A step is what lies between two accesses that others can see.* What a rank does with its own memory belongs to the
  step before it. A series of accesses to several peers, one after the other, is one step where a violation needs only
  one of them: the step may be taken at the time of that access, since the rank does nothing else that is visible in
  between. So is a series of reads of words that only grow and that ends at the first one which is set: at the first
  read if none is set, at the last one if one is.
- *A wait is no loop.* A look that finds nothing changes nothing, so it is no step; a wait is a state whose steps are
  the looks that would find something. A rank that waits for ever has no step.

Writes and reads of rows are one step each, though they take a while. If a write overlaps a read in time, then both
orders of the two steps are explored, and the value that is read in one of them is not the one that was meant.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Generic, NamedTuple, Protocol, TypeVar

T = TypeVar("T", bound=Hashable)

State = tuple[int, ...]  # as compact as can be: what is larger is a number of an `Interner`


class Violation(Exception):
    """What a step found, or did, that must never be."""


class Label(NamedTuple):
    """A step, as a path shows it.

    Attributes:
        rank: The rank that takes it; -1: none does (a call is drawn).
        name: As the code names it.
        call: Number of the call that it belongs to; 0: none.
        is_silent: A trace of real ranks does not show it.
    """

    rank: int
    name: str
    call: int
    is_silent: bool = False

    def __str__(self) -> str:
        who = f"rank {self.rank}: " if self.rank >= 0 else ""
        return f"{who}{self.name}" + (f" of call {self.call}" if self.call else "")


Step = tuple[Label, "State | Violation"]


class Model(Protocol):
    """What the explorer needs of a model.

    Attributes:
        name: For tables.
        num_ranks: R.
        num_calls: Calls that each rank makes.
    """

    name: str
    num_ranks: int
    num_calls: int

    def initial(self) -> Iterable[State]:
        """The states in which the ranks may begin."""
        ...

    def steps(self, state: State) -> Iterable[Step]:
        """The steps that a state allows."""
        ...

    def blocked(self, state: State) -> list[str]:
        """For a state without steps: who has not ended, and where; empty: all ranks have ended."""
        ...

    def check_end(self, state: State) -> None:
        """For a state without steps in which all ranks have ended.

        Raises:
            Violation: It is not one of the ends that are right.
        """
        ...


class SearchResult(NamedTuple):
    """What an exploration found.

    Attributes:
        model: Its name.
        num_ranks: R.
        num_calls: Calls of each rank.
        num_states: Different states.
        num_steps: Steps between them.
        depth: Steps of the longest shortest path.
        secs: How long it took.
        violation: What is wrong; None: nothing.
        path: The steps that lead there.
        is_complete: All states were seen.
    """

    model: str
    num_ranks: int
    num_calls: int
    num_states: int
    num_steps: int
    depth: int
    secs: float
    violation: str | None = None
    path: tuple[Label, ...] = ()
    is_complete: bool = True

    @property
    def verdict(self) -> str:
        """In a word."""
        return "violated" if self.violation else "holds" if self.is_complete else "holds so far"


class Interner(Generic[T]):
    """Numbers for values: equal values have one number, so that states are short and quickly compared."""

    def __init__(self) -> None:
        self.values: list[T] = []
        self._numbers: dict[T, int] = {}

    def number(self, value: T) -> int:
        """The number of a value."""
        number = self._numbers.get(value)
        if number is None:
            number = self._numbers[value] = len(self.values)
            self.values.append(value)
        return number


class _Seen:
    """The states so far, and the step by which each was first reached."""

    def __init__(self) -> None:
        self.numbers: dict[State, int] = {}
        self._before: list[int] = []
        self._labels: list[Label | None] = []

    def add(self, state: State, before: int, label: Label | None) -> bool:
        """Whether it is new."""
        if state in self.numbers:
            return False
        self.numbers[state] = len(self._before)
        self._before.append(before)
        self._labels.append(label)
        return True

    def path(self, number: int) -> Iterator[Label]:
        """The steps to a state, the last one first."""
        while number >= 0:
            label = self._labels[number]
            if label is not None:
                yield label
            number = self._before[number]


def explore(model: Model, most_states: int = 0, on_level: Callable[[int, int], None] | None = None) -> SearchResult:
    """Look at every state that a model can reach, until something is wrong.

    Args:
        model: The model.
        most_states: Stop behind so many; 0: there is no limit.
        on_level: Told after each level of the search: its depth, and the states so far.
    """
    begin, seen, num_steps, depth = time.monotonic(), _Seen(), 0, 0

    def result(
        violation: str | None = None, number: int = -1, last: Label | None = None, done: bool = True
    ) -> SearchResult:
        path = (*reversed([*seen.path(number)]), *([last] if last is not None else ()))
        secs = time.monotonic() - begin
        sizes = (model.num_ranks, model.num_calls, len(seen.numbers), num_steps)
        return SearchResult(model.name, *sizes, max(depth, len(path)), secs, violation, path, done)

    level = [state for state in model.initial() if seen.add(state, -1, None)]
    while level:
        following = []
        for state in level:
            number, is_stuck = seen.numbers[state], True
            for label, after in model.steps(state):
                is_stuck = False
                num_steps += 1
                if isinstance(after, Violation):
                    return result(str(after), number, label)
                if seen.add(after, number, label):
                    following.append(after)
            if is_stuck:
                if waiting := model.blocked(state):
                    return result(f"nobody can go on: {'; '.join(waiting)}", number)
                try:
                    model.check_end(state)
                except Violation as violation:
                    return result(str(violation), number)
        if most_states and len(seen.numbers) > most_states:
            return result(done=False)
        level, depth = following, depth + bool(following)
        if on_level is not None:
            on_level(depth, len(seen.numbers))
    return result()


def is_path(model: Model, traces: list[list[tuple[str, int]]]) -> str | None:
    """Whether what each rank did, one step after the other, can be interleaved to a path of a model.

    Args:
        model: The model, without faults.
        traces: For each rank the names of its steps, and their calls.

    Returns:
        None if there is such a path, to an end of the model and of all traces. Otherwise how far the furthest one gets.
    """
    start = (0,) * len(traces)
    todo = [(state, start) for state in model.initial()]
    seen, furthest = set(todo), start
    while todo:
        state, positions = todo.pop()
        furthest = max(furthest, positions, key=sum)
        is_stuck = True
        for label, after in model.steps(state):
            is_stuck, rank = False, label.rank
            following = positions
            if not label.is_silent:
                position = positions[rank]
                if position == len(traces[rank]) or traces[rank][position] != (label.name, label.call):
                    continue
                following = (*positions[:rank], position + 1, *positions[rank + 1 :])
            if not isinstance(after, Violation) and (after, following) not in seen:
                seen.add((after, following))
                todo.append((after, following))
        is_whole = all(position == len(trace) for position, trace in zip(positions, traces, strict=True))
        if is_stuck and is_whole and not model.blocked(state):
            return None
    told = []
    for rank, (position, trace) in enumerate(zip(furthest, traces, strict=True)):
        step = "{} of call {}".format(*trace[position]) if position < len(trace) else "its end"
        told.append(f"rank {rank} gets to {step} (step {position + 1} of {len(trace)})")
    return f"no path of {model.name}: {'; '.join(told)}"
