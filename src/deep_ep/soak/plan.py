"""The plan of a soak: segments, each with buffers of its own, all drawn from the seed alone.

A segment can be played again without those before it, on any machine: nothing here depends on time, on the machine, or
on Python's hash of strings, which differs from process to process.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

_FEWEST_CALLS, _MOST_CALLS = 100, 300
_FIRST_CALLS_PER_SEC = 20.0  # a guess, until there is a rate to go by
_SIZES = ((20, 40), (20, 40), (64, 200), (20, 4000))  # most tokens of a rank, most hidden; small calls find most
_UNEVEN = (0, 4096, 16384, 65536)
_ARENAS = ("free", "tiny", "one page", "uneven")


def mixed(*numbers: int) -> int:
    """One number out of several, 63 bits, the same everywhere."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


@dataclass(frozen=True)
class Segment:
    """Calls over one set of buffers.

    Attributes:
        number: Counted from 0.
        seed: Of its calls.
        num_calls: How many.
        arena: What the limits are like.
        arena_limits: Most bytes of each rank's arena; 0: none.
        num_nvl_bytes: Of the buffers.
        most_tokens: Upper limit of a rank's tokens.
        most_hidden: Upper limit of the hidden size.
        delay_share: How many of the fault points are delayed.
        posted_limits: Most bytes of rows that each rank posts.
    """

    number: int
    seed: int
    num_calls: int
    arena: str
    arena_limits: tuple[int, ...]
    num_nvl_bytes: int
    most_tokens: int
    most_hidden: int
    delay_share: float
    posted_limits: tuple[int, ...]


@dataclass(frozen=True)
class Goal:
    """What a soak was asked for.

    Attributes:
        num_ranks: Processes.
        seed: Of everything.
        secs: When to end; None: when the calls are made.
        num_calls: Calls in all; None: as many as the time allows.
        segment: The only segment to play; None: from the first on.
        device: `cpu` or `cuda`.
        only_low_latency: Make no other calls.
        ranks_per_node: Ranks of a node, of several on this host; 0: all are on one node.
    """

    num_ranks: int
    seed: int
    secs: float | None = None
    num_calls: int | None = None
    segment: int | None = None
    device: str = "cpu"
    only_low_latency: bool = False
    ranks_per_node: int = 0

    @property
    def has_low_latency(self) -> bool:
        """Whether there are low-latency calls among the others: not across nodes."""
        return not self.ranks_per_node

    def command(self, segment: int | None = None, num_calls: int | None = None) -> str:
        """The line that plays a segment, or all of it."""
        line = f"python -m deep_ep soak --ranks {self.num_ranks} --seed {self.seed}"
        if self.device != "cpu":
            line += f" --device {self.device}"
        if self.only_low_latency:
            line += " --low-latency"
        if self.ranks_per_node:
            line += f" --ranks-per-node {self.ranks_per_node}"
        if segment is not None:
            line += f" --segment {segment}"
        return line if num_calls is None else f"{line} --calls {num_calls}"


def plan_segment(goal: Goal, number: int) -> Segment:
    """Segment `number` of a soak. It depends on the seed and the number of ranks only."""
    seed = mixed(goal.seed, number)
    draw = random.Random(seed)
    num_calls = draw.randint(_FEWEST_CALLS, _MOST_CALLS)
    # In turns, so that a short soak has seen them all; the seed says where it begins.
    arena = _ARENAS[(goal.seed + number) % len(_ARENAS)]
    limits = {
        "free": [0] * goal.num_ranks,
        "tiny": [8192] * goal.num_ranks,
        "one page": [4096] * goal.num_ranks,
        "uneven": [draw.choice(_UNEVEN) for _ in range(goal.num_ranks)],
    }[arena]
    most_tokens, most_hidden = draw.choice(_SIZES)
    return Segment(
        number=number,
        seed=seed,
        num_calls=num_calls,
        arena=arena,
        arena_limits=tuple(limits),
        num_nvl_bytes=draw.choice((0, 0, 1 << 20)),
        most_tokens=most_tokens,
        most_hidden=most_hidden,
        delay_share=draw.choice((0.0, 0.02, 0.1)),
        posted_limits=_draw_posted(draw, goal.num_ranks),
    )


def _draw_posted(draw: random.Random, num_ranks: int) -> tuple[int, ...]:
    """No rank posts rows, or all do as usual, or each as far as it likes."""
    choices = draw.choice(((0,), (1 << 18,), (0, 2000, 1 << 18)))
    return tuple(draw.choice(choices) for _ in range(num_ranks))


def calls_to_play(goal: Goal, segment: Segment, num_done: int, secs: float) -> int:
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
