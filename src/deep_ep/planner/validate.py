"""How far predictions are from published latencies, by family, and by cross-validation.

Relative errors are |predicted / actual - 1|. Within a family (system, GPU, network) first, then the median over the
families of at least ten points: so a laboratory that prints thousands of figures counts once.

In cross-validation the points that are predicted were not in the fit at all:

- shapes: a fifth of the shapes (tokens, hidden, topk, experts) of each family, all calls of a shape together;
- models: a fifth of the (hidden, topk, experts) of each family, with any number of tokens;
- ranks: all points of a family with some number of ranks, of families that have two numbers or more;
- hardware: all points of a GPU and a network, of all systems.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from .calls import Call, Point
from .table import Prediction, Prepared, Table, fit_table, prepare

FEWEST_POINTS = 10  # of a family that counts
_NUM_FOLDS = 5
_FEWEST_SHAPES = 2  # that a call must have been measured with: of one, nothing can be learned from the others

Family = tuple[str, str, str]


class Checked(NamedTuple):
    """A figure beside its prediction."""

    point: Point
    prediction: Prediction

    @property
    def error(self) -> float:
        """The relative error of the prediction."""
        return abs(self.prediction.us / self.point.latency_us - 1)

    @property
    def is_inside(self) -> bool:
        """Whether the interval contains the figure."""
        return self.prediction.low_us <= self.point.latency_us <= self.prediction.high_us


class Score(NamedTuple):
    """Errors of a family, or medians over families.

    Attributes:
        num_points: How many figures.
        median: Median of the relative errors.
        p90: Their 90th percentile.
        coverage: Share of the figures inside their 80% intervals.
    """

    num_points: int
    median: float
    p90: float
    coverage: float


def check_points(table: Table, points: Sequence[Point]) -> list[Checked]:
    """Predict figures."""
    return [Checked(point, table.predict(point.call)) for point in points]


def score(checked: Sequence[Checked]) -> Score:
    """The errors of some figures."""
    errors = [one.error for one in checked]
    inside = sum(one.is_inside for one in checked) / len(checked)
    return Score(len(checked), float(np.median(errors)), float(np.quantile(errors, 0.9)), inside)


def score_families(checked: Sequence[Checked]) -> dict[Family, Score]:
    """The errors of each family, largest first."""
    families: dict[Family, list[Checked]] = defaultdict(list)
    for one in checked:
        families[one.point.call.family].append(one)
    return {family: score(group) for family, group in sorted(families.items(), key=lambda item: -len(item[1]))}


def over_families(scores: dict[Family, Score]) -> tuple[int, Score]:
    """How many families have enough points, and the medians over these; all others where none has."""
    counted = [one for one in scores.values() if one.num_points >= FEWEST_POINTS] or list(scores.values())
    medians = [float(np.median([getattr(one, name) for one in counted])) for name in ("median", "p90", "coverage")]
    return len(counted), Score(sum(one.num_points for one in counted), *medians)


# Cross-validation ----------------------------------------------------------------------------------------------------


def cross_validate(points: Sequence[Point], kind: str) -> list[Checked]:
    """Predict each figure from the others.

    Args:
        points: Those with a published latency are predicted; the others only help to fit.
        kind: One of `KINDS`; see the top.
    """
    prepared = prepare(points)
    checked = []
    for is_left_out in KINDS[kind](prepared):
        held = [one for one in prepared if is_left_out(one.point.call)]
        table = fit_table([one for one in prepared if not is_left_out(one.point.call)], held)
        checked += check_points(table, [one.point for one in held if not one.point.is_from_bandwidth])
    return checked


Fold = Callable[[Call], bool]


def _shape(call: Call) -> Hashable:
    return (call.num_tokens, *_model(call))


def _model(call: Call) -> tuple[int, int, int]:
    return call.hidden, call.routing.topk, call.routing.num_experts


def _by_shape(shape: Callable[[Call], Hashable]) -> Callable[[Sequence[Prepared]], Iterator[Fold]]:
    def folds(prepared: Sequence[Prepared]) -> Iterator[Fold]:
        seen: dict[Hashable, set[Hashable]] = defaultdict(set)
        for one in prepared:
            seen[one.keys["version"]].add(shape(one.point.call))
        enough = {one.point.call for one in prepared if len(seen[one.keys["version"]]) >= _FEWEST_SHAPES}

        def is_in_fold(number: int, call: Call) -> bool:
            return call in enough and _fold(call.family, shape(call)) == number

        for number in range(_NUM_FOLDS):
            yield partial(is_in_fold, number)

    return folds


def _fold(*parts: Hashable) -> int:
    return zlib.crc32(repr(parts).encode()) % _NUM_FOLDS


def _by_ranks(prepared: Sequence[Prepared]) -> Iterator[Fold]:
    numbers: dict[Family, set[int]] = defaultdict(set)
    for one in prepared:
        numbers[one.point.call.family].add(one.point.call.num_ranks)
    for family, all_ranks in numbers.items():
        for ranks in sorted(all_ranks) if len(all_ranks) > 1 else ():
            yield partial(_has_ranks, family, ranks)


def _has_ranks(family: Family, num_ranks: int, call: Call) -> bool:
    return call.family == family and call.num_ranks == num_ranks


def _by_hardware(prepared: Sequence[Prepared]) -> Iterator[Fold]:
    for hardware in sorted({one.point.call.family[1:] for one in prepared}):
        yield partial(_has_hardware, hardware)


def _has_hardware(hardware: tuple[str, ...], call: Call) -> bool:
    return call.family[1:] == hardware


KINDS: dict[str, Callable[[Sequence[Prepared]], Iterator[Fold]]] = {
    "shapes": _by_shape(_shape),
    "models": _by_shape(_model),
    "ranks": _by_ranks,
    "hardware": _by_hardware,
}
