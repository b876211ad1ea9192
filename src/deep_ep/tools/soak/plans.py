"""Fault plans as data: which rank gets which signal at which moment of which operation, and what must hold afterwards.

A plan is one line of text, which replays it:

    KILL rank=2 at=call:before-offered op=dispatch way=sync path=direct call=3 ranks=4 per_node=2

`fault_program` is what every rank of a plan runs, `fault_runs` starts the ranks and compares.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

from ... import env
from .plan import mixed

SIGNALS = ("KILL", "TERM", "STOP", "PAUSE", "INT", "RAISE")
PHASES = {"make": "construction", "call": "a call", "calls": "a stretch of calls", "destroy": "destroy"}
OPERATIONS = ("dispatch", "cached", "worst-case", "combine", "growth")
ELASTIC_OPERATIONS = ("expanded", "expanded-combine")  # of an ElasticBuffer, inside one node
LOW_LATENCY_OPERATIONS = ("ll-dispatch", "ll-combine")
WAYS = ("sync", "async", "queued", "behind")
LOW_LATENCY_WAYS = ("sync", "async", "hook")
PATHS = ("direct", "posted", "staged")
TOPOLOGIES = ((2, 0), (3, 0), (4, 0), (2, 1), (4, 2))  # ranks, ranks of a node (0: all)

# The fault points of a call are on either side of these steps. A small call whose rows are posted takes the first only.
_STEPS = {
    "dispatch": ("announced", "offered", "ready"),
    "growth": ("announced", "offered", "ready"),
    "cached": ("offered", "ready"),
    "worst-case": ("offered", "ready"),
    "combine": ("ready", "taken"),
    "expanded": ("announced", "offered", "ready"),
    "expanded-combine": ("ready", "taken"),
}
_LOW_LATENCY_POINTS = ("before-sent", "local-sent", "after-sent", "before-receive")
POINT_NAMES = {  # as `Window.fault` is told of the operations
    "growth": "dispatch",
    "cached": "cached dispatch",
    "worst-case": "worst-case dispatch",
    "expanded": "dispatch",
    "expanded-combine": "combine",
    "ll-dispatch": "low-latency dispatch",
    "ll-combine": "low-latency combine",
}
_MOST_CONSTRUCTION_STEPS = 6

# A killed rank must be named long before the limit, so plans that kill have one that is far away. The others are about
# the limit, or may reach it.
_REMOTE_LIMIT_SECS, _LOCAL_LIMIT_SECS = 12.0, 2.5
PAUSE_SECS = 0.6
_GRACE_SHARE = 0.5  # a wait that crosses nodes has so much more than the limit
_SLACK_SECS = 4.0  # for a machine that is busy with other things
HANG_SECS = 45.0  # a plan takes a few seconds

_STAGED_ARENA_BYTES = 4096  # less than a call receives on any rank


class Moment(NamedTuple):
    """When a fault comes.

    Attributes:
        phase: One of `PHASES`.
        point: The fault point, `before-offered`, or `before-2`, the second gather of construction; empty: a delay.
        delay_secs: Since the phase began.
    """

    phase: str
    point: str
    delay_secs: float

    @classmethod
    def parse(cls, text: str) -> Moment:
        """`make:before-2`, `call:after-ready`, `calls+25ms`.

        Raises:
            ValueError: It is no moment.
        """
        phase, colon, point = text.partition(":")
        delay = ""
        if not colon:
            phase, _, delay = text.partition("+")
        is_delay = delay.endswith("ms") and delay[:-2].isdecimal()
        if phase not in PHASES or not (point or is_delay):
            raise ValueError(f"`at` must be PHASE:POINT or PHASE+Nms, with a phase of {', '.join(PHASES)}, got {text}")
        return cls(phase, point, int(delay[:-2]) / 1e3 if is_delay else 0.0)


class Expectation(NamedTuple):
    """What must hold when a plan has been played.

    Attributes:
        raises: `all`: every survivor raises an `EPError` that names the faulty rank and no other. `none`: no rank
            raises. `alike`: the faulty rank carries on and no rank raises, or it cannot and all others raise so.
        within_secs: From the fault until the last survivor has raised.
    """

    raises: str
    within_secs: float


@dataclass(frozen=True)
class FaultPlan:
    """One fault, and the program that it comes into.

    Attributes:
        signal: `KILL`; `TERM`, with its default action; `STOP`, past the limit; `PAUSE`, a stop that is shorter;
            `INT`, which the program catches as `KeyboardInterrupt`; `RAISE`, an exception at a fault point.
        rank: The rank that gets it.
        at: The moment; see `Moment`.
        op: The operation that the program makes: one of `OPERATIONS`, `ELASTIC_OPERATIONS` or `LOW_LATENCY_OPERATIONS`.
        way: `sync`; `async`; `queued`, asynchronous behind a queued call; `behind`, synchronous behind one; `hook`.
        path: Whether rows go straight into the peers' memory, are posted, or are staged.
        call: The call, from 1, of a moment that is a fault point of a call.
        ranks: Ranks of the group.
        per_node: Ranks of a node; 0: all ranks are one node.
    """

    signal: str
    rank: int
    at: str
    op: str = "dispatch"
    way: str = "sync"
    path: str = "direct"
    call: int = 2
    ranks: int = 3
    per_node: int = 0

    def __post_init__(self) -> None:
        moment = Moment.parse(self.at)
        is_low_latency = self.op in LOW_LATENCY_OPERATIONS
        for name, value, choices in (
            ("signal", self.signal, SIGNALS),
            ("op", self.op, OPERATIONS + ELASTIC_OPERATIONS + LOW_LATENCY_OPERATIONS),
            ("way", self.way, LOW_LATENCY_WAYS if is_low_latency else WAYS),
            ("path", self.path, PATHS),
            ("rank", self.rank, range(self.ranks)),
            ("call", self.call, range(1, 4)),
        ):
            if value not in choices:
                raise ValueError(f"`{name}` must be one of {', '.join(map(str, choices))}, got {value}")
        if self.ranks < 2 or self.per_node < 0 or (self.per_node and self.ranks % self.per_node):
            raise ValueError(f"`per_node` must divide the ranks, of which there are 2 or more, got {self}")
        if self.per_node and self.op in ELASTIC_OPERATIONS:
            raise ValueError(f"op={self.op} is for one node, got per_node={self.per_node}")
        if self.signal == "RAISE" and not (moment.point and moment.phase in ("make", "call")):
            raise ValueError(f"RAISE needs a fault point of construction or of a call, got at={self.at}")
        if moment.phase == "call" and moment.point not in points_of(self.op, self.path):
            points = ", ".join(points_of(self.op, self.path))
            raise ValueError(f"a call of op={self.op} path={self.path} has the points {points}, got {moment.point}")

    @classmethod
    def parse(cls, text: str) -> FaultPlan:
        """The plan of a line.

        Raises:
            ValueError: It is none.
        """
        signal, *pairs = text.split() or [""]
        values: dict[str, str | int] = {}
        kinds = {field.name: field.type for field in fields(cls)}
        for pair in pairs:
            name, equals, value = pair.partition("=")
            if not equals or name not in kinds or name == "signal" or name in values:
                raise ValueError(
                    f"soak: --plan: {pair!r} must be one of {', '.join(list(kinds)[1:])}, with a value, once"
                )
            if kinds[name] == "int" and not value.isdecimal():
                raise ValueError(f"soak: --plan: `{name}` must be a number, got {value!r}")
            values[name] = int(value) if kinds[name] == "int" else value
        try:
            return cls(signal, **values)  # type: ignore[arg-type]
        except TypeError:
            raise ValueError('soak: --plan must be a signal and pairs, as "KILL rank=1 at=calls+20ms"') from None
        except ValueError as error:
            raise ValueError(f"soak: --plan: {error}") from None

    def __str__(self) -> str:
        values = [f"{field.name}={getattr(self, field.name)}" for field in fields(self)[1:]]
        return " ".join([self.signal, *values])

    @property
    def command(self) -> str:
        """The line that plays it again."""
        return f'python -m deep_ep soak --plan "{self}"'

    @property
    def moment(self) -> Moment:
        """When the fault comes."""
        return Moment.parse(self.at)

    @property
    def kind(self) -> str:
        """What the plan is counted as."""
        is_growth = self.op == "growth" and self.moment.phase in ("call", "calls")
        return f"{self.signal} in {'growth' if is_growth else PHASES[self.moment.phase]}"

    @property
    def is_low_latency(self) -> bool:
        """Whether the program makes low-latency calls."""
        return self.op in LOW_LATENCY_OPERATIONS

    @property
    def is_deadly(self) -> bool:
        """Whether the rank's process ends."""
        return self.signal in ("KILL", "TERM")

    @property
    def survivors(self) -> list[int]:
        """The ranks that go on afterwards."""
        return [rank for rank in range(self.ranks) if rank != self.rank or not self.is_deadly]

    @property
    def limit_secs(self) -> float:
        """The buffer's limit of a wait for a peer."""
        return _REMOTE_LIMIT_SECS if self.is_deadly or self.signal == "RAISE" else _LOCAL_LIMIT_SECS

    @property
    def stopped_secs(self) -> float:
        """How long the rank is stopped; 0: it is not."""
        # Past the limit is past that of the slowest wait, too, which may begin some time after the stop.
        past_secs = (1 + _GRACE_SHARE) * self.limit_secs + 1.5
        return {"STOP": past_secs, "PAUSE": PAUSE_SECS}.get(self.signal, 0.0)

    @property
    def expectation(self) -> Expectation:
        """What must hold afterwards."""
        at_limit_secs = (1 + _GRACE_SHARE) * self.limit_secs + _SLACK_SECS
        if self.signal == "INT":
            return Expectation("alike", at_limit_secs)
        # Leaving is local: no rank waits for one that is gone when its own calls have ended.
        if self.signal == "PAUSE" or self.moment.phase == "destroy":
            return Expectation("none", at_limit_secs)
        return Expectation("all", at_limit_secs if self.signal == "STOP" else 1.0 + _SLACK_SECS)

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables of the ranks: they decide topology and path."""
        return {
            env.RANKS_PER_NODE.name: str(self.per_node),
            env.POSTED_BYTES.name: str(1 << 18 if self.path == "posted" else 0),
            env.ARENA_BYTES.name: str(_STAGED_ARENA_BYTES if self.path == "staged" else 0),
        }


def points_of(op: str, path: str) -> list[str]:
    """The fault points that every call of an operation passes."""
    if op in LOW_LATENCY_OPERATIONS:
        return list(_LOW_LATENCY_POINTS)
    steps = _STEPS[op]
    if path == "posted":
        steps = steps[:1]
    elif path == "staged" and op in ("combine", "expanded-combine"):
        steps = ("offered", *steps)
    return [f"{side}-{step}" for step in steps for side in ("before", "after")]


def draw_plans(
    num_plans: int, seed: int, topologies: Sequence[tuple[int, int]] = TOPOLOGIES, only_low_latency: bool = False
) -> list[FaultPlan]:
    """Random plans. Signals, phases and topologies come in turns, so that few plans have seen most of them.

    Args:
        num_plans: How many.
        seed: Of everything; plan number i is the same however many there are.
        topologies: Pairs of ranks and ranks of a node.
        only_low_latency: Programs make low-latency calls, and no others.
    """
    kinds = [
        (signal, phase)
        for signal in SIGNALS
        for phase in ("make", "call", "call", "calls", "growth", "destroy")
        if signal != "RAISE" or phase in ("make", "call", "growth")
    ]
    random.Random(mixed(seed)).shuffle(kinds)
    return [
        _draw_plan(random.Random(mixed(seed, idx)), *kinds[idx % len(kinds)], topologies, only_low_latency)
        for idx in range(num_plans)
    ]


def _draw_plan(
    draw: random.Random, signal: str, phase: str, topologies: Sequence[tuple[int, int]], only_low_latency: bool
) -> FaultPlan:
    ranks, per_node = draw.choice(topologies)
    ops: tuple[str, ...] = OPERATIONS[:-1]
    if only_low_latency:
        ops = LOW_LATENCY_OPERATIONS
    elif not per_node:
        ops += ELASTIC_OPERATIONS
    op = "growth" if phase == "growth" and not only_low_latency else draw.choice(ops)
    way = draw.choice(LOW_LATENCY_WAYS if only_low_latency else WAYS)
    if signal == "INT" and phase == "calls" and not only_low_latency:
        way = draw.choice(("queued", "behind"))  # an interruption finds a program where it waits
    # Rows are posted, or staged by this limit, inside a node only.
    path = "direct" if op == "growth" or only_low_latency or per_node else draw.choice(PATHS)
    has_point = signal == "RAISE" or draw.random() < 0.5
    if phase == "growth":
        phase = "call" if has_point else "calls"
    if phase == "make":
        point, most_ms = f"{draw.choice(('before', 'after'))}-{draw.randint(1, _MOST_CONSTRUCTION_STEPS)}", 60
    elif phase == "destroy":
        point = draw.choice(("before", "after"))
        most_ms = 40 if way == "queued" else 4  # with something queued it takes as long as that
    else:
        has_point, point, most_ms = phase == "call", draw.choice(points_of(op, path)), 60
    at = f"{phase}:{point}" if has_point else f"{phase}+{draw.randint(0, most_ms)}ms"
    return FaultPlan(signal, draw.randrange(ranks), at, op, way, path, draw.randint(1, 3), ranks, per_node)
