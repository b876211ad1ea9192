"""The table of constants: how it is fitted to published figures, kept in the package, and asked.

Constants are fitted from the general to the particular (`calls.LEVELS`), each level to the points below it, with the
level above as what is expected where they say nothing: so a family of five points gets the constants that these can
tell, and the others from its system; and hardware without points gets those of its system, or of the kind of call,
with its own nominal speeds. Errors count as logarithms, and beyond a tenth only in proportion (Huber): one odd figure
does not turn a fit.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from .calls import LEVELS, Call, Key, Point, find_work, keys_of
from .model import BOUNDS, SPREAD, USUAL, Constants, log_times, parts_of, slopes

_HUBER = 0.08  # a relative error that is still ordinary
_TIGHTER = {"kind": 1.0, "system": 0.6, "hardware": 0.4, "version": 0.3}  # of `SPREAD`, by level
# Above a level of hardware, each family counts as at most this many points: laboratories that print thousands of
# figures do not outvote those that print ten.
_MOST_POINTS = {"kind": 40, "system": 60}
_MOST_STEPS = 40
_ENOUGH = 1e-5  # relative gain of a step below which the fit ends

# Half widths of 80% intervals, as logarithms: what is expected of a level before its own errors are known, how many
# points (above a level of hardware: families) that expectation counts for, and what a doubling of ranks adds.
_USUAL_HALF = {"kind": 0.65, "system": 0.42, "hardware": 0.20, "version": 0.12}
_WEIGHT_OF_USUAL = 4
_HALF_PER_DOUBLING = 0.17
_INFLATION = 1.1  # errors of points that were fitted are smaller than those of new ones
_QUANTILE = 0.8


class Entry(NamedTuple):
    """Constants of a key.

    Attributes:
        constants: Of the model.
        num_points: Figures behind them.
        num_families: Families behind them.
        error: Median of their relative errors.
        half: Half width of an 80% interval, as a logarithm.
        ranks: Numbers of ranks that were seen.
        sources: Where the figures were published.
    """

    constants: Constants
    num_points: int
    num_families: int
    error: float
    half: float
    ranks: tuple[int, ...]
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Prediction:
    """What a call takes.

    Attributes:
        us: Microseconds.
        low_us: Lower end of the 80% interval.
        high_us: Upper end.
        bound: What takes most of it: one of `model.BOUNDS`.
        parts: Microseconds of each of these; they overlap, so they do not add up.
        level: Where the constants come from: one of `calls.LEVELS`, or `usual`.
        entry: The constants with their origin; None where there are none.
    """

    us: float
    low_us: float
    high_us: float
    bound: str
    parts: dict[str, float]
    level: str
    entry: Entry | None


class Table:
    """Constants by key.

    Args:
        entries: By the key of a level.
    """

    def __init__(self, entries: dict[Key, Entry]):
        self.entries = entries

    def systems(self) -> set[str]:
        """Names of the systems that there are constants of."""
        num_of_kind = 4  # names of a kind of call, the one level without a system
        return {key[0] for key in self.entries if len(key) > num_of_kind}

    def find(self, call: Call) -> tuple[str, Entry | None]:
        """The most particular constants for a call, and their level."""
        keys = keys_of(call)
        for level in reversed(LEVELS):
            if keys[level] in self.entries:
                return level, self.entries[keys[level]]
        return "usual", None

    def predict(self, call: Call) -> Prediction:
        """How long a call takes."""
        level, entry = self.find(call)
        if entry is None and call.op == "both":
            return _both(*(self.predict(replace(call, op=op, dtype=dtype)) for op, dtype in _halves(call)))
        constants = entry.constants if entry else USUAL
        work = find_work(call)
        us = math.exp(log_times(np.log(constants), np.array([work]))[0])
        half = _half_width(call, entry)
        parts = parts_of(constants, work)
        return Prediction(
            us, us * math.exp(-half), us * math.exp(half), max(BOUNDS, key=parts.__getitem__), parts, level, entry
        )

    def save(self, path: Path) -> None:
        """Write the table as JSON, an entry a line."""
        sources = sorted({source for entry in self.entries.values() for source in entry.sources})
        number = {source: index for index, source in enumerate(sources)}
        lines = [
            json.dumps([list(key), [_short(one) for one in entry.constants], entry.num_points, entry.num_families,
                        _short(entry.error), _short(entry.half), list(entry.ranks),
                        [number[source] for source in entry.sources]])
            for key, entry in sorted(self.entries.items())
        ]  # fmt: skip
        fields = ["key", list(Constants._fields), *Entry._fields[1:]]
        text = (
            f'{{"fields": {json.dumps(fields)},\n"sources": {json.dumps(sources, indent=0)},\n"entries": [\n'
            + ",\n".join(lines)
            + "\n]}\n"
        )
        try:
            path.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ValueError(f"planner: cannot write {path} ({error.strerror})") from None


def _halves(call: Call) -> tuple[tuple[str, str], ...]:
    return ("dispatch", call.dtype), ("combine", "bf16")


def _both(dispatch: Prediction, combine: Prediction) -> Prediction:
    """A dispatch and a combine after it, where no figure is of the two together."""
    longer = max((dispatch, combine), key=lambda one: one.us)
    parts = {name: us + combine.parts[name] for name, us in dispatch.parts.items()}
    low_us, high_us = dispatch.low_us + combine.low_us, dispatch.high_us + combine.high_us
    return replace(longer, us=dispatch.us + combine.us, low_us=low_us, high_us=high_us, parts=parts)


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def load_table(path: Path | None = None) -> Table:
    """Read a table; default: the package's own.

    Raises:
        ValueError: The file is not a table.
    """
    if path is None:
        return _own_table()
    try:
        return _parse(json.loads(path.read_text(encoding="utf-8")))
    except OSError as error:
        raise ValueError(f"planner: cannot read the table {path} ({error.strerror})") from None
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ValueError(f"planner: {path} is not a table of constants ({error}). `plan --fit` makes one") from None


@lru_cache(maxsize=1)
def _own_table() -> Table:
    return _parse(json.loads(resources.files(__package__).joinpath("table.json").read_text(encoding="utf-8")))


def _parse(data: Any) -> Table:
    sources = data["sources"]
    entries = {}
    for key, constants, num_points, num_families, error, half, ranks, numbers in data["entries"]:
        found = tuple(sources[number] for number in numbers)
        entries[tuple(key)] = Entry(Constants(*constants), num_points, num_families, error, half, tuple(ranks), found)
    return Table(entries)


def _half_width(call: Call, entry: Entry | None) -> float:
    """Half an 80% interval: the entry's, and more where the number of ranks is far from those that were seen."""
    if entry is None:
        return _USUAL_HALF["kind"]
    doublings = min(abs(math.log2(call.num_ranks / ranks)) for ranks in entry.ranks)
    return math.hypot(entry.half, _HALF_PER_DOUBLING * doublings)


# The fit -------------------------------------------------------------------------------------------------------------


class Prepared(NamedTuple):
    """A figure, its keys, and its work."""

    point: Point
    keys: dict[str, Key]
    work: Sequence[float]


def prepare(points: Iterable[Point]) -> list[Prepared]:
    """What a fit needs of points; made once for several fits."""
    return [Prepared(point, keys_of(point.call), find_work(point.call)) for point in points]


def fit_table(points: Sequence[Prepared], wanted: Iterable[Prepared] | None = None, usual: Constants = USUAL) -> Table:
    """Fit a table to figures.

    Args:
        points: From `prepare`.
        wanted: Calls that the table will be asked for; what these do not need is left out. None: everything.
        usual: What is expected where no figure says anything.
    """
    entries: dict[Key, Entry] = {}
    needed = None if wanted is None else {key for one in wanted for key in one.keys.values()}
    above: str | None = None
    for level in LEVELS:
        groups: dict[Key, list[Prepared]] = defaultdict(list)
        for one in points:
            if needed is None or one.keys[level] in needed:
                groups[one.keys[level]].append(one)
        for key, group in groups.items():
            parent = entries[group[0].keys[above]] if above else None
            if level == "version" and parent is not None and parent.num_points == len(group):
                continue  # the only version of this hardware: the level above is the same
            entries[key] = _fit_entry(level, group, parent.constants if parent else usual)
        above = level
    return Table(entries)


def _fit_entry(level: str, group: list[Prepared], parent: Constants) -> Entry:
    works = np.array([one.work for one in group])
    actual = np.log([one.point.latency_us for one in group])
    families = [one.point.call.family for one in group]
    counts = {family: families.count(family) for family in set(families)}
    most = _MOST_POINTS.get(level, len(group))
    weights = np.array([min(1.0, most / counts[family]) for family in families])
    constants = _fit(works, actual, weights, np.log(parent), np.array(SPREAD) * _TIGHTER[level])
    errors = np.abs(log_times(constants, works) - actual)
    return Entry(
        Constants(*map(float, np.exp(constants))),
        len(group),
        len(counts),
        float(np.median(np.expm1(errors))),
        _half_of(level, errors, weights, len(counts)),
        tuple(sorted({one.point.call.num_ranks for one in group})),
        tuple(sorted({one.point.source for one in group})),
    )


def _half_of(level: str, errors: np.ndarray, weights: np.ndarray, num_families: int) -> float:
    order = np.argsort(errors)
    share = np.cumsum(weights[order]) / weights.sum()
    seen = _INFLATION * errors[order][np.searchsorted(share, _QUANTILE).clip(max=len(errors) - 1)]
    number = num_families if level in _MOST_POINTS else len(errors)
    usual = _USUAL_HALF[level]
    return float(math.sqrt((number * seen**2 + _WEIGHT_OF_USUAL * usual**2) / (number + _WEIGHT_OF_USUAL)))


def _fit(
    works: np.ndarray, actual: np.ndarray, weights: np.ndarray, expected: np.ndarray, spread: np.ndarray
) -> np.ndarray:
    """Levenberg-Marquardt on Huber's loss of log errors, and the squared distance from what is expected."""

    def loss(errors: np.ndarray, at: np.ndarray) -> float:
        size = np.abs(errors) / _HUBER
        huber = np.where(size < 1, 0.5 * size**2, size - 0.5)
        return float((weights * huber).sum() + 0.5 * (((at - expected) / spread) ** 2).sum())

    at, damping = expected.copy(), 1e-2
    times = log_times(at, works)
    least = loss(times - actual, at)
    for _ in range(_MOST_STEPS):
        errors, jacobian = times - actual, slopes(at, works, times)
        size = np.maximum(np.abs(errors) / _HUBER, 1.0)
        factors = weights / size / _HUBER**2
        gradient = jacobian.T @ (factors * errors) + (at - expected) / spread**2
        curvature = (jacobian * factors[:, None]).T @ jacobian + np.diag(spread**-2)
        for _ in range(8):
            step = -np.linalg.solve(curvature + damping * np.diag(np.diag(curvature)), gradient).clip(-1, 1)
            moved_times = log_times(at + step, works)
            moved = loss(moved_times - actual, at + step)
            if moved < least:
                break
            damping *= 4
        else:
            break
        gain, at, times, least = least - moved, at + step, moved_times, moved
        damping = max(damping / 3, 1e-8)
        if gain < _ENOUGH * least:
            break
    return at
