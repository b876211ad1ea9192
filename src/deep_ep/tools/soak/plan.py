"""The plan of a soak: segments, each with buffers of its own, all drawn from the seed alone.

A segment can be played again without those before it, on any machine: nothing here depends on time, on the machine, or
on Python's hash of strings, which differs from process to process.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

from .data import Limits, Palette
from .program import Features, ProgramCall, draw_program, kept
from .seeds import mixed

_FEWEST_CALLS, _MOST_CALLS = 100, 300
_FIRST_CALLS_PER_SEC = 20.0  # a guess, until there is a rate to go by
# How large the calls of a segment are; small calls find most.
_LIMITS = (
    Limits(),
    Limits(tokens=12, hidden=24, topk=64),
    Limits(tokens=64, hidden=200, experts_per_rank=64),
    Limits(tokens=20, hidden=4000, scales=40),
    Limits(tokens=10, hidden=16, topk=64, experts_per_rank=2000),
)
_GPU_LIMITS = (Limits(tokens=40), Limits(tokens=300, experts_per_rank=64), Limits(tokens=20, experts_per_rank=2000))
_INTERPRETED_LIMITS = (
    Limits(tokens=9, hidden=24, topk=4),
    Limits(tokens=5, hidden=16, topk=12, experts_per_rank=40),
)
_UNEVEN = (0, 4096, 16384, 65536)
_ARENAS = ("free", "tiny", "one page", "uneven")
_ELASTIC_BYTES = 64 << 20  # of the window, where kernels make calls of an ElasticBuffer


@dataclass(frozen=True)
class PlanSegment:
    """Calls over one set of buffers.

    Attributes:
        number: Counted from 0.
        seed: Of its calls.
        num_calls: How many.
        arena: What the limits are like.
        arena_limits: Most bytes of each rank's arena; 0: none.
        num_nvl_bytes: Of the buffers.
        limits: How large calls are.
        has_masks: Ranks may be masked in low-latency calls.
        delay_share: How many of the fault points are delayed.
        posted_limits: Most bytes of rows that each rank posts.
        has_elastic: Calls of `ElasticBuffer` are among them.
    """

    number: int
    seed: int
    num_calls: int
    arena: str
    arena_limits: tuple[int, ...]
    num_nvl_bytes: int
    limits: Limits
    has_masks: bool
    delay_share: float
    posted_limits: tuple[int, ...]
    has_elastic: bool = False


@dataclass(frozen=True)
class Goal:
    """What a soak was asked for.

    Attributes:
        num_ranks: Processes.
        seed: Of everything.
        secs: When to end; None: when the calls are made.
        num_calls: Calls in all; None: as many as the time allows.
        segment: The only segment to play; None: from the first on.
        only: Numbers of the only calls of that segment to make; None: all.
        device: `cpu`, `cuda`, or `interpreter`: CPU ranks with the kernels of GPUs in Triton's interpreter.
        only_low_latency: Make no other calls.
        ranks_per_node: Ranks of a node, of several on this host; 0: all are on one node.
        limit_secs: Of a wait for a peer; delays and stops together stay far below.
    """

    num_ranks: int
    seed: int
    secs: float | None = None
    num_calls: int | None = None
    segment: int | None = None
    only: tuple[int, ...] | None = None
    device: str = "cpu"
    only_low_latency: bool = False
    ranks_per_node: int = 0
    limit_secs: float = 60.0

    @property
    def is_cpu(self) -> bool:
        """Whether the engine is that of CPU ranks."""
        return self.device == "cpu"

    @property
    def has_low_latency(self) -> bool:
        """Whether there are low-latency calls. Across nodes the kernels need NVSHMEM for them."""
        return self.is_cpu or not self.ranks_per_node

    def command(
        self, segment: int | None = None, num_calls: int | None = None, only: tuple[int, ...] | None = None
    ) -> str:
        """The line that plays a segment, or some calls of it, or everything."""
        line = f"python -m deep_ep soak --ranks {self.num_ranks} --seed {self.seed}"
        if self.device != "cpu":
            line += f" --device {self.device}"
        if self.only_low_latency:
            line += " --low-latency"
        if self.ranks_per_node:
            line += f" --ranks-per-node {self.ranks_per_node}"
        if segment is not None:
            line += f" --segment {segment}"
        only = only or self.only
        if only is not None:
            line += f" --only {','.join(map(str, only))}"
        return line if num_calls is None else f"{line} --calls {num_calls}"


def plan_segment(goal: Goal, number: int) -> PlanSegment:
    """Segment `number` of a soak. It depends on the seed and the number of ranks only."""
    seed = mixed(goal.seed, number)
    draw = random.Random(seed)
    num_calls = draw.randint(_FEWEST_CALLS, _MOST_CALLS)
    # In turns, so that a short soak has seen them all; the seed says where it begins.
    arena = _ARENAS[(goal.seed + number) % len(_ARENAS)]
    if goal.ranks_per_node and not goal.is_cpu:
        arena = "free"  # kernels do not stage across nodes: too little room is an error there
    limits = {
        "free": [0] * goal.num_ranks,
        "tiny": [8192] * goal.num_ranks,
        "one page": [4096] * goal.num_ranks,
        "uneven": [draw.choice(_UNEVEN) for _ in range(goal.num_ranks)],
    }[arena]
    # Kernels cannot stage the sums of an ElasticBuffer: with too little memory they raise.
    has_elastic = not goal.ranks_per_node and (goal.is_cpu or (arena == "free" and number % 8 < 4))
    sizes = {"cpu": _LIMITS, "cuda": _GPU_LIMITS, "interpreter": _INTERPRETED_LIMITS}[goal.device]
    return PlanSegment(
        number=number,
        seed=seed,
        num_calls=num_calls,
        arena=arena,
        arena_limits=tuple(limits),
        num_nvl_bytes=draw.choice((0, 0, 1 << 20)) if goal.is_cpu or not has_elastic else _ELASTIC_BYTES,
        limits=replace(draw.choice(sizes), palette=Palette.draw(goal.seed) if goal.device == "cuda" else None),
        has_masks=draw.random() < 0.5,
        delay_share=draw.choice((0.0, 0.02, 0.1)),
        posted_limits=_draw_posted(draw, goal.num_ranks),
        has_elastic=has_elastic,
    )


def _draw_posted(draw: random.Random, num_ranks: int) -> tuple[int, ...]:
    """No rank posts rows, or all do as usual, or each as far as it likes."""
    choices = draw.choice(((0,), (1 << 18,), (0, 2000, 1 << 18)))
    return tuple(draw.choice(choices) for _ in range(num_ranks))


def plan_calls(goal: Goal, segment: PlanSegment, num_calls: int) -> list[ProgramCall]:
    """The calls of a segment, as far as they are to be made."""
    features = Features(
        has_normal=not goal.only_low_latency,
        has_low_latency=goal.has_low_latency,
        has_masks=segment.has_masks,
        has_elastic=segment.has_elastic,
        survives_mistakes=goal.is_cpu,
        has_exceptions=goal.is_cpu,
    )
    calls = draw_program(segment.seed, num_calls, goal.num_ranks, features)
    return calls if goal.only is None else kept(calls, goal.only)


def calls_to_play(goal: Goal, segment: PlanSegment, num_done: int, secs: float) -> int:
    """How many calls of a segment there is still time for; 0 ends the soak.

    Args:
        goal: What was asked for.
        segment: The segment that would be next.
        num_done: Calls made so far.
        secs: Time that they took.
    """
    num_calls = segment.num_calls
    if goal.num_calls is not None:
        num_calls = min(num_calls, goal.num_calls - num_done)
    if goal.secs is not None:
        rate = num_done / secs if num_done else _FIRST_CALLS_PER_SEC
        num_calls = min(num_calls, math.ceil((goal.secs - secs) * rate))
    return max(0, num_calls)
