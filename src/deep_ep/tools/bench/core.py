"""The timing loop, and what is made of its times. It knows no tokens: `cases` says what is called.

A *variant* is one thing to time: the product, a peer that does the same work by other means, or the floor (a plain
copy of the bytes). The variants of a case take turns inside each round, so that whatever else the machine does meets
them alike, and every comparison is one of times from the same round.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

PRODUCT = "deep_ep"
FLOOR = "copy"
GLOO = "gloo_preallocated"
GLOO_AS_WRITTEN = "gloo_as_written"
PRODUCT_BF16 = "deep_ep_bf16"
ONE_HOP = "one_hop"
BUFFER = "buffer"
ADD = "add"

PEERS = (GLOO, GLOO_AS_WRITTEN, PRODUCT_BF16, BUFFER)

HOST = "host"
IN_A_ROW = "in_a_row"
FROM_IDLE = "from_idle"
WAITS = (HOST, IN_A_ROW, FROM_IDLE)
"""The clocks of a caller; see `gpu.CallerClocks`."""

Stopwatch = Callable[[Callable[[], Any]], float]
"""Calls something when all ranks are ready to, and says how many seconds it took."""

Clocks = Callable[[Callable[[], Any]], Mapping[str, float]]
"""The same with several clocks at once: seconds by the name of the clock."""

RankTimes = Sequence[Sequence[float]]
"""Seconds, `[rank][round]`."""


@dataclass(frozen=True)
class BenchVariant:
    """One thing to time.

    Attributes:
        name: `PRODUCT`, `FLOOR`, `ONE_HOP`, `ADD` or the name of a peer.
        call: What is timed. What it returns is dropped after the clock has stopped.
        outputs: The delivered tensors, in an order and form that all variants of the case share, from what `call`
            returned; None where there is nothing to compare.
        stopwatch: What to measure it with; None: as the others of the case. The times of several clocks have names of
            their own, see `clock_name`.
    """

    name: str
    call: Callable[[], Any]
    outputs: Callable[[Any], list[torch.Tensor]] | None = None
    stopwatch: Stopwatch | Clocks | None = None


def clock_name(variant: str, clock: str) -> str:
    """What the times of one of several clocks are called: `deep_ep_host`."""
    return f"{variant}_{clock}"


@dataclass(frozen=True)
class Measured:
    """The raw times of one case in a group of one size.

    Attributes:
        case: Its name.
        num_ranks: Ranks of the group.
        bytes_per_rank: What the case declares to move, of each rank.
        times: Of each variant, or of each of its clocks, seconds `[rank][round]`.
        skipped: Why it did not run; None if it did.
        copy_gbs: On a GPU, 10^9 bytes a second that a plain copy read and wrote in the same rounds.
        num_nodes: Nodes that the ranks are on.
        traffic: Across nodes, bytes of each rank by what they are; see `internode_cases` and `hop_cases`.
    """

    case: str
    num_ranks: int
    bytes_per_rank: list[int] = field(default_factory=list)
    times: dict[str, list[list[float]]] = field(default_factory=dict)
    skipped: str | None = None
    copy_gbs: float | None = None
    num_nodes: int = 1
    traffic: dict[str, list[int]] = field(default_factory=dict)


class Quartiles(NamedTuple):
    """A median between its quartiles."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class Summary:
    """The headline figures of a case.

    Attributes:
        mean_bytes: Bytes of a rank, on average.
        median_secs: Of each variant or clock, the slowest rank's median; of the floor, the median of each round's
            slowest.
        adds: Of each clock of a caller, how many adds in a row take as long as the product; empty where those were not
            measured.
        gbs: 10^9 bytes a second that a rank moves in the product.
        over_floor: Product's time over the floor's, round by round; None where the case has no floor.
        over_one_hop: Product's time over that of one hop, round by round; None where the case has no such variant.
        speedups: Of each peer, its time over the product's, round by round.
        p50_secs: The product's median over all ranks and rounds.
        p99_secs: Of a hundred of its calls on any rank, the slowest but one takes this long.
    """

    mean_bytes: float
    median_secs: dict[str, float]
    adds: dict[str, float]
    gbs: float
    over_floor: Quartiles | None
    over_one_hop: Quartiles | None
    speedups: dict[str, Quartiles]
    p50_secs: float
    p99_secs: float


class HostStopwatch:
    """Measures by the host's clock, for calls that are done when they return.

    Args:
        barrier: Called before each call, so that all ranks start together.
        clock: Seconds.
    """

    def __init__(self, barrier: Callable[[], object], clock: Callable[[], float] = time.perf_counter):
        self._barrier = barrier
        self._clock = clock

    def __call__(self, call: Callable[[], Any]) -> float:
        """Seconds of one call."""
        self._barrier()
        start = self._clock()
        result = call()
        elapsed = self._clock() - start
        # Giving the memory back belongs to the caller's next step, not to the call.
        del result
        return elapsed


def time_rounds(
    variants: Sequence[BenchVariant],
    num_rounds: int,
    stopwatch: Stopwatch,
    *,
    num_warmup: int = 1,
    on_round: Callable[[int], object] = lambda _: None,
) -> dict[str, list[float]]:
    """Time every variant once a round.

    Args:
        variants: What to call. The order turns from round to round, so that none always follows the same other one.
        num_rounds: Rounds that count.
        stopwatch: What calls and measures, where a variant has none of its own.
        num_warmup: Rounds before those, not counted.
        on_round: Told the number of rounds done, after each of them.

    Returns:
        This rank's seconds of each variant, or of each of its clocks, by round.
    """
    times: dict[str, list[float]] = {}
    for index in range(-num_warmup, num_rounds):
        for variant in rotated(variants, index):
            elapsed = (variant.stopwatch or stopwatch)(variant.call)
            if index < 0:
                continue
            if isinstance(elapsed, Mapping):
                named = {clock_name(variant.name, clock): secs for clock, secs in elapsed.items()}
            else:
                named = {variant.name: elapsed}
            for name, secs in named.items():
                times.setdefault(name, []).append(secs)
        if index >= 0:
            on_round(index + 1)
    return times


def rotated(items: Sequence[BenchVariant], by: int) -> list[BenchVariant]:
    """The same items in a circle, beginning with item `by`."""
    start = by % len(items)
    return [*items[start:], *items[:start]]


def quartiles(values: Sequence[float]) -> Quartiles:
    """Median and quartiles; between two values it interpolates, and a lone value is all three."""
    if len(values) == 1:
        return Quartiles(values[0], values[0], values[0])
    return Quartiles(*statistics.quantiles(values, n=4, method="inclusive"))


def percentile(values: Sequence[float], percent: int) -> float:
    """What so many percent of the values are not above; between two values it interpolates."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = ordered[int(place)]
    return low + (ordered[min(int(place) + 1, len(ordered) - 1)] - low) * (place - int(place))


def slowest_median(times: RankTimes) -> float:
    """Each rank's median over the rounds, of the rank where it is largest."""
    return max(statistics.median(rank_times) for rank_times in times)


def slowest_by_round(times: RankTimes) -> list[float]:
    """Of each round the time of the rank that took longest: the round is over when that rank is done."""
    return [max(round_times) for round_times in zip(*times, strict=True)]


def round_ratios(times: RankTimes, other_times: RankTimes) -> list[float]:
    """Of each round, the slowest rank's time over the slowest rank's time of the other variant."""
    pairs = zip(slowest_by_round(times), slowest_by_round(other_times), strict=True)
    return [time / other for time, other in pairs]


def summarise(measured: Measured) -> Summary:
    """The headline figures of a case that ran."""
    product = measured.times[PRODUCT]
    floor, one_hop = measured.times.get(FLOOR), measured.times.get(ONE_HOP)
    peers = {name: times for name, times in measured.times.items() if name in PEERS}
    medians = {name: slowest_median(times) for name, times in measured.times.items()}
    if FLOOR in medians:
        # In a copy nobody waits for anybody: another rank may be the last in every round, and the last one counts.
        medians[FLOOR] = statistics.median(slowest_by_round(measured.times[FLOOR]))
    mean_bytes = statistics.fmean(measured.bytes_per_rank)
    every = [secs for rank_times in product for secs in rank_times]
    return Summary(
        mean_bytes=mean_bytes,
        median_secs=medians,
        adds=_in_adds(medians),
        gbs=mean_bytes / medians[PRODUCT] / 1e9,
        over_floor=quartiles(round_ratios(product, floor)) if floor is not None else None,
        over_one_hop=quartiles(round_ratios(product, one_hop)) if one_hop is not None else None,
        speedups={name: quartiles(round_ratios(times, product)) for name, times in peers.items()},
        p50_secs=statistics.median(every),
        p99_secs=percentile(every, 99),
    )


def _in_adds(medians: Mapping[str, float]) -> dict[str, float]:
    """The product's times by the clocks of a caller, over that of an add in a row: both are slowest medians."""
    add_secs = medians.get(clock_name(ADD, IN_A_ROW))
    if add_secs is None:
        return {}
    named = {clock: medians.get(clock_name(PRODUCT, clock)) for clock in WAITS}
    return {clock: secs / add_secs for clock, secs in named.items() if secs is not None}
