"""What can be counted in a trace: traffic, waiting, load of the experts, calls by kind."""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from typing import Any

from ...trace import CALL, WAIT
from .load import LoadedSlice, LoadedTrace, RankFile, is_comm

Matrix = list[list[float]]


@dataclass
class RankFigures:
    """What one rank did.

    Attributes:
        rank: Which.
        num_calls: Calls; halves of low-latency calls count as one.
        call_us: Time in calls.
        wait_us: Time waited in them.
        errors: What went wrong.
        is_open: It was in a call when the trace ended.
    """

    rank: int
    num_calls: int = 0
    call_us: float = 0.0
    wait_us: float = 0.0
    errors: list[str] = field(default_factory=list)
    is_open: bool = False


@dataclass
class Kind:
    """Calls of one kind.

    Attributes:
        name: Operation and path.
        durations_us: Of each.
        wait_us: Waited in them.
        num_bytes: Bytes of rows that they sent, or, where only that is known, received.
    """

    name: str
    durations_us: list[float] = field(default_factory=list)
    wait_us: float = 0.0
    num_bytes: float = 0.0

    @property
    def median_us(self) -> float:
        """The usual duration."""
        return statistics.median(self.durations_us)


@dataclass
class Load:
    """Tokens that came to each expert.

    Attributes:
        num_experts: Of the group.
        num_local: Of a rank.
        totals: By expert.
        over_time: By dispatch, in the order of time, and expert.
        num_skipped: Calls that are not in it, since they have another number of experts.
    """

    num_experts: int
    num_local: int
    totals: list[int]
    over_time: list[list[int]]
    num_skipped: int = 0

    @property
    def peak(self) -> float:
        """The busiest expert's tokens, over the mean of all."""
        total = sum(self.totals)
        return max(self.totals) * len(self.totals) / total if total else 0.0


@dataclass
class Figures:
    """All of it.

    Attributes:
        num_ranks: Of the group.
        ranks: Of those whose file is there.
        begin_us: When the first slice begins.
        span_us: From there to the end of the last.
        bytes_to: Bytes of rows, from rank to rank.
        rows_to: Rows, likewise.
        waited_us: Time that a rank waited for another. A wait for several counts for those that came last.
        kinds: Calls by kind.
        load: Of the experts; None: no call told.
    """

    num_ranks: int
    ranks: dict[int, RankFigures]
    begin_us: float
    span_us: float
    bytes_to: Matrix
    rows_to: Matrix
    waited_us: Matrix
    kinds: list[Kind]
    load: Load | None

    @property
    def num_calls(self) -> int:
        """Calls of the rank that made most."""
        return max((one.num_calls for one in self.ranks.values()), default=0)

    @property
    def num_bytes(self) -> float:
        """Bytes of rows between ranks."""
        return sum(map(sum, self.bytes_to))

    @property
    def call_us(self) -> float:
        """Time in calls, of all ranks."""
        return sum(one.call_us for one in self.ranks.values())

    @property
    def wait_share(self) -> float | None:
        """The part of it that was spent waiting; None: there was no call."""
        return sum(one.wait_us for one in self.ranks.values()) / self.call_us if self.call_us else None

    @property
    def peak(self) -> float | None:
        """The busiest expert's tokens, over the mean of all; None: no call told."""
        return self.load.peak if self.load is not None and self.load.peak else None

    def as_dict(self) -> dict[str, Any]:
        """All of it as JSON has it, times in microseconds."""
        return {
            "num_ranks": self.num_ranks,
            "num_calls": self.num_calls,
            "span_us": self.span_us,
            "num_bytes": self.num_bytes,
            "wait_share": self.wait_share,
            "bytes_to": self.bytes_to,
            "rows_to": self.rows_to,
            "waited_us": self.waited_us,
            "ranks": [asdict(one) for _, one in sorted(self.ranks.items())],
            "calls": [
                {
                    "name": kind.name,
                    "times": len(kind.durations_us),
                    "median_us": kind.median_us,
                    "longest_us": max(kind.durations_us),
                    "wait_us": kind.wait_us,
                    "num_bytes": kind.num_bytes,
                }
                for kind in self.kinds
            ],
            "tokens_per_expert": None if self.load is None else self.load.totals,
        }


def count(trace: LoadedTrace) -> Figures:
    """Count everything."""
    num_ranks = max(file.facts["num_ranks"] for file in trace.files)
    slices = [one for file in trace.files for one in file.slices]
    begin_us = min((one.begin_us for one in slices), default=0.0)
    end_us = max((one.end_us for one in slices), default=0.0)
    bytes_to, rows_to, waited_us = ([[0.0] * num_ranks for _ in range(num_ranks)] for _ in range(3))
    load = _load(trace, num_ranks)
    figures = Figures(num_ranks, {}, begin_us, end_us - begin_us, bytes_to, rows_to, waited_us, [], load)
    kinds: dict[str, Kind] = {}
    present = {file.rank for file in trace.files}
    for file in trace.files:
        mine = figures.ranks.setdefault(file.rank, RankFigures(file.rank))
        _count_file(file, figures, mine, kinds, present)
    figures.kinds = sorted(kinds.values(), key=lambda kind: -sum(kind.durations_us))
    return figures


def _count_file(file: RankFile, figures: Figures, mine: RankFigures, kinds: dict[str, Kind], present: set[int]) -> None:
    kind, call_end_us = None, 0.0
    for one in file.slices:
        if "error" in one.args and one.args["error"] not in mine.errors:
            mine.errors.append(str(one.args["error"]))
        if not is_comm(one):
            continue
        if one.kind == CALL:
            path = one.args.get("path")
            name = f"{one.name}, {path.replace('_', ' ')}" if path and path != "low-latency" else one.name
            kind = kinds.setdefault(name, Kind(name))
            call_end_us = one.end_us
            kind.durations_us.append(one.dur_us)
            mine.num_calls += not one.name.endswith(" receive")
            mine.call_us += one.dur_us
            mine.is_open |= one.is_open
            kind.num_bytes += _count_rows(one, file.rank, figures, present)
        elif one.kind == WAIT:
            mine.wait_us += one.dur_us
            if kind is not None and one.begin_us < call_end_us:
                kind.wait_us += one.dur_us
            last = [rank for rank in one.args.get("last", []) if 0 <= rank < figures.num_ranks]
            for rank in last:
                figures.waited_us[file.rank][rank] += one.dur_us / len(last)


def _count_rows(one: LoadedSlice, rank: int, figures: Figures, present: set[int]) -> float:
    """Add the rows of a call to the matrices: who sends counts them, or, where there is no word of it, who receives."""
    row_bytes, rows_to, rows_from = (one.args.get(name) for name in ("row_bytes", "rows_to", "rows_from"))
    if row_bytes is None or len(rows_to or rows_from or []) != figures.num_ranks:
        return 0.0
    for peer, num_rows in enumerate(rows_to or []):
        figures.rows_to[rank][peer] += num_rows
        figures.bytes_to[rank][peer] += num_rows * row_bytes
    for peer, num_rows in enumerate(rows_from or []):
        if rows_to is None or peer not in present:
            figures.rows_to[peer][rank] += num_rows
            figures.bytes_to[peer][rank] += num_rows * row_bytes
    return float(sum(rows_to or rows_from or []) * row_bytes)


def _load(trace: LoadedTrace, num_ranks: int) -> Load | None:
    calls: dict[tuple, dict[int, list[int]]] = defaultdict(dict)
    times: dict[tuple, float] = {}
    for file in trace.files:
        numbers: Counter[str] = Counter()
        for one in file.slices:
            if one.kind == CALL and is_comm(one) and "experts" in one.args:
                numbers[one.name] += 1  # all ranks make the same calls
                key = (file.facts.get("buffer"), one.name, one.args.get("call", numbers[one.name]))
                calls[key][file.rank] = one.args["experts"]
                times[key] = min(one.begin_us, times.get(key, one.begin_us))
    sizes = Counter(len(counts) for by_rank in calls.values() for counts in by_rank.values())
    if not sizes:
        return None
    num_local = sizes.most_common(1)[0][0]
    fitting = [key for key in sorted(calls, key=lambda key: times[key]) if _all_of_size(calls[key], num_local)]
    over_time = [_by_expert(calls[key], num_ranks, num_local) for key in fitting]
    totals = [sum(column) for column in zip(*over_time, strict=True)]
    return Load(num_local * num_ranks, num_local, totals, over_time, len(calls) - len(fitting))


def _all_of_size(by_rank: dict[int, list[int]], size: int) -> bool:
    return all(len(counts) == size for counts in by_rank.values())


def _by_expert(by_rank: dict[int, list[int]], num_ranks: int, num_local: int) -> list[int]:
    return [count for rank in range(num_ranks) for count in by_rank.get(rank, [0] * num_local)]
