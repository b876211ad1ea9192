"""The calls of a segment as data: what each is, and which earlier dispatch it goes back to.

Everything else about a call is drawn from the segment's seed and the number of the call alone (`data.py`). So a call
does the same thing whether or not those before it are made, and a failing segment can be cut down to the few calls that
matter: see `kept` and `shrink.py`.
"""

from __future__ import annotations

import random
from collections.abc import Collection
from dataclasses import dataclass

from .seeds import mixed

# Kinds of calls. A weight says how often one comes, relative to the others that are possible.
DISPATCH, WORST_CASE, OVERFLOW = "dispatch", "worst-case dispatch", "overflow"
CACHED, COMBINE = "cached dispatch", "combine"
REFUSED, LEFT = "refused call", "call left by an exception"
ELASTIC, ELASTIC_NO_SYNC = "elastic dispatch", "elastic dispatch without sync"
ELASTIC_CACHED, ELASTIC_COMBINE = "cached elastic dispatch", "elastic combine"
ROUND, MICRO_BATCHES, MASKED = "low-latency round", "low-latency micro-batches", "low-latency masked rounds"

_NORMAL = {DISPATCH: 5, WORST_CASE: 4, CACHED: 4, COMBINE: 8}
_ELASTIC = {ELASTIC: 3, ELASTIC_NO_SYNC: 3, ELASTIC_CACHED: 3, ELASTIC_COMBINE: 5}
_MISTAKES = {OVERFLOW: 1, REFUSED: 1}
_LOW_LATENCY = {ROUND: 4, MICRO_BATCHES: 2}
_LEFT_SHARE = 0.01  # of the calls; each costs a buffer
_MASKED_WEIGHT = 1

_SOURCES, _ELASTIC_SOURCES = (DISPATCH, WORST_CASE), (ELASTIC, ELASTIC_NO_SYNC)
FOLLOWERS = (CACHED, COMBINE, ELASTIC_CACHED, ELASTIC_COMBINE)  # calls that go back to a dispatch
_MOST_SOURCES = 5  # dispatches whose handles are kept


@dataclass(frozen=True)
class ProgramCall:
    """One call, which all ranks make together.

    Attributes:
        number: Counted from 1 in its segment.
        kind: One of the kinds above.
        source: Number of the dispatch whose handle it uses; None: it uses none.
    """

    number: int
    kind: str
    source: int | None = None


@dataclass(frozen=True)
class Features:
    """What the calls of a segment may do.

    Attributes:
        has_normal: Make normal calls.
        has_low_latency: Make low-latency calls.
        has_masks: Mask ranks in low-latency calls.
        survives_mistakes: Make calls that are refused, or that overflow. On a GPU an overflow closes the buffer.
        has_exceptions: Leave calls by exceptions, each of which costs a buffer.
        has_elastic: Make calls of `ElasticBuffer` as well.
    """

    has_normal: bool = True
    has_low_latency: bool = False
    has_masks: bool = False
    survives_mistakes: bool = True
    has_exceptions: bool = False
    has_elastic: bool = False


def draw_program(seed: int, num_calls: int, num_ranks: int, features: Features) -> list[ProgramCall]:
    """The calls of a segment. The first calls of a longer program are those of a shorter one."""
    calls: list[ProgramCall] = []
    sources: list[int] = []
    elastic_sources: list[int] = []
    for number in range(1, num_calls + 1):
        draw = random.Random(mixed(seed, number, 0))
        kind = _draw_kind(draw, num_ranks, features, bool(sources), bool(elastic_sources))
        source = None
        if kind in FOLLOWERS:
            source = draw.choice(sources if kind in (CACHED, COMBINE) else elastic_sources)
        calls.append(ProgramCall(number, kind, source))
        if kind in _SOURCES:
            sources = [*sources, number][-_MOST_SOURCES:]
        elif kind in _ELASTIC_SOURCES:
            elastic_sources = [*elastic_sources, number][-_MOST_SOURCES:]
        elif kind == LEFT:
            sources, elastic_sources = [], []  # the buffer is another one from here on
    return calls


def _draw_kind(
    draw: random.Random, num_ranks: int, features: Features, has_sources: bool, has_elastic_sources: bool
) -> str:
    if features.has_exceptions and features.has_normal and num_ranks > 1 and draw.random() < _LEFT_SHARE:
        return LEFT
    weights: dict[str, int] = {}
    if features.has_normal:
        weights |= _NORMAL if has_sources else {kind: _NORMAL[kind] for kind in _SOURCES}
        if features.has_elastic:
            weights |= _ELASTIC if has_elastic_sources else {kind: _ELASTIC[kind] for kind in _ELASTIC_SOURCES}
        if features.survives_mistakes:
            weights |= _MISTAKES
    if features.has_low_latency:
        weights |= _LOW_LATENCY
        if features.has_masks and num_ranks > 1:
            weights[MASKED] = _MASKED_WEIGHT
    return draw.choices(list(weights), list(weights.values()))[0]


def kept(calls: list[ProgramCall], numbers: Collection[int]) -> list[ProgramCall]:
    """The calls with these numbers, without those whose dispatch is not among them."""
    chosen = set(numbers)
    return [call for call in calls if call.number in chosen and (call.source is None or call.source in chosen)]
