"""What a rank of the models of normal calls is made of: its words, its memory, and the calls that it makes."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeVar

from ....transport.board import progress_of
from .explore import Label

T = TypeVar("T")

RUNS, LEFT, RAISED, DEAD = range(4)  # how a rank stands: it makes calls, or it has ended
ENDS = {LEFT: "has left", RAISED: "has raised", DEAD: "is dead"}

# What may go wrong, once, with one rank, at any step.
KILL, RAISE, GIVE_UP, DESTROY, REFUSE = "is killed", "raises", "gives up", "destroys its buffer", "refuses"
FAULTS = (KILL, RAISE, GIVE_UP, DESTROY, REFUSE)

DIRECT, STAGED, POSTED = "direct", "staged", "posted"  # how rows go; the model's memory kinds
GARBAGE = -1  # what nobody may read: not written yet, or written over

_ROUND_BITS = 4
_TIMES_BITS = 2  # of a refusal


def tag(call: int, index: int) -> int:
    """What rows of round `index` of a call are in the model."""
    return call << _ROUND_BITS | index


def tag_text(value: int) -> str:
    """Rows, for a sentence."""
    if value == GARBAGE:
        return "rows that are nobody's"
    return f"rows of round {value % (1 << _ROUND_BITS)} of call {value >> _ROUND_BITS}"


class Rank(NamedTuple):
    """A rank: where it is, its words, and its memory.

    Attributes:
        call: The call that it makes, or makes next.
        position: The operation of the call that comes next; 0: the call has not begun.
        look: In a wait: 0: it polls; 1: all have come; from 2 on: the peer whose reason it looks at.
        status: Whether it makes calls.
        progress: As on the board.
        failed: As on the board.
        closed: As on the board.
        is_alive: Whether its process lives.
        refused: As on the board: call and times.
        given_up: Its caller has left the call in which the comm stream still is.
        is_overwritten: And it has overwritten what it gave.
        header: The calls of the two slots.
        offer: The calls of the two slots.
        posted: The calls of the two slots of posted rows.
        opened: The call in which its region is offered; 0: it is not.
        region: What lies there, by source (dispatch), or for each reader (combine).
        staging: What lies in its staging, likewise.
        spoiled: What it has read is not what it should be; a call that ends well with it is a violation.
        queued: Across nodes: frames that are not yet handed to the system, by link.
        inbox: Across nodes: frames that came and were not taken, by link.
        moved: Across nodes: chunks packed and taken, by link, and whether the own block is done.
    """

    call: int
    position: int
    look: int
    status: int
    progress: int
    failed: int
    closed: int
    is_alive: int
    refused: int
    given_up: int
    is_overwritten: int
    header: tuple[int, ...]
    offer: tuple[int, ...]
    posted: tuple[int, ...]
    opened: int
    region: tuple[int, ...]
    staging: tuple[int, ...]
    spoiled: int
    queued: tuple[tuple[int, ...], ...] = ()
    inbox: tuple[tuple[int, ...], ...] = ()
    moved: tuple[int, ...] = ()

    @property
    def has_refused(self) -> bool:
        """Whether it has refused the call that it is about to make."""
        return self.refused >> _TIMES_BITS == self.call

    def is_refused_by(self, peer: Rank) -> bool:
        """Whether this rank, in its call, must heed a peer's refusal (`Refusal.follows`)."""
        if peer.refused >> _TIMES_BITS != self.call:
            return False
        own = self.refused % (1 << _TIMES_BITS) if self.has_refused else 0
        return peer.refused % (1 << _TIMES_BITS) > own and peer.progress <= progress_of(self.call, 0)

    def refuse(self) -> Rank:
        """Refuse the next call once more."""
        times = self.refused % (1 << _TIMES_BITS) + 1 if self.has_refused else 1
        return self._replace(refused=self.call << _TIMES_BITS | times)

    def scribble(self) -> Rank:
        """What the caller does when a call is over for it."""
        nothing = (GARBAGE,) * len(self.region)
        return self._replace(opened=0, region=nothing, staging=nothing)


def new_rank(num_ranks: int, num_links: int = 0) -> Rank:
    """A rank of a new buffer."""
    nothing, empty = (GARBAGE,) * num_ranks, ((),) * num_links
    return Rank(
        1, 0, 0, RUNS, 0, 0, 0, 1, 0, 0, 0, (0, 0), (0, 0), (0, 0), 0, nothing, nothing, 0, empty, empty
    )  # fmt: skip


class DrawnCall(NamedTuple):
    """A call, as all ranks make it.

    Attributes:
        kind: One of `OPERATIONS` of the engine.
        memory: For each rank, how its rows go.
        rounds: If somebody is staged.
        overflows: More rows come than somebody has room for (worst case).
        is_refused: Every rank refuses it once, before it makes it.
    """

    kind: str
    memory: tuple[str, ...]
    rounds: int = 1
    overflows: bool = False
    is_refused: bool = False

    def __str__(self) -> str:
        more = [f"{self.rounds} rounds"] if STAGED in self.memory else []
        more += ["too many rows"] if self.overflows else []
        more += ["refused first"] if self.is_refused else []
        return ", ".join([f"{self.kind} ({' '.join(self.memory)})", *more])


Act = Callable[[list[Rank], int], None]


class Operation(NamedTuple):
    """One step of a rank's call.

    Attributes:
        label: As a path shows it.
        act: What it does: it changes the list of ranks, told which one acts.
        target: The progress that it waits for; 0: it does not wait.
        kind: Another kind of step, of which a model knows; empty: one of these two.
        argument: What such a step needs.
    """

    label: Label
    act: Act | None = None
    target: int = 0
    kind: str = ""
    argument: int = 0


def changed(values: tuple[T, ...], index: int, value: T) -> tuple[T, ...]:
    """A tuple with another value in one place."""
    return (*values[:index], value, *values[index + 1 :])
