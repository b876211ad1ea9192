"""Two runs side by side: what the page shows of `report A --against B`."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .figures import Figures, Kind
from .parts import section, table
from .text import NOTHING, bytes_text, change_text, share_text, time_text

_Item = tuple[str, Callable[[Figures], float | None], Callable[[float], str]]
_ITEMS: Sequence[_Item] = (
    ("ranks", lambda figures: len(figures.ranks), lambda value: f"{value:,.0f}"),
    ("calls of each rank", lambda figures: figures.num_calls, lambda value: f"{value:,.0f}"),
    ("moved, rows of all ranks", lambda figures: figures.num_bytes, bytes_text),
    ("time span, first call to last", lambda figures: figures.span_us, time_text),
    ("time in calls, all ranks", lambda figures: figures.call_us, time_text),
    ("waiting, of the time in calls", lambda figures: figures.wait_share, lambda value: share_text(value, 1.0)),
    ("busiest expert, over the mean", lambda figures: figures.peak, lambda value: f"{value:.2f}x"),
)


def comparison(figures: Figures, other: Figures, name: str, other_name: str) -> str:
    """A section that compares two runs.

    Args:
        figures: Of the run that the page is about.
        other: Of the one that it is compared with.
        name: What the first one is called.
        other_name: And the second.
    """
    overall = [(label, *_pair(get(figures), get(other), text)) for label, get, text in _ITEMS]
    kinds, others = ({kind.name: kind for kind in one.kinds} for one in (figures, other))
    calls = [_compare_kinds(kind, kinds.get(kind), others.get(kind)) for kind in {**kinds, **others}]
    head = (name, other_name, "change")
    return section(
        "Against another run",
        f"{name}, and {other_name}, which it is compared with; change: the first over the second",
        table(("of the run", *head), overall) + "<h3>Median of a call</h3>" + table(("call", "times", *head), calls),
    )


def _pair(value: float | None, other: float | None, text: Callable[[float], str]) -> tuple[str, str, str]:
    shown = [NOTHING if one is None else text(one) for one in (value, other)]
    return shown[0], shown[1], change_text(value, other)


def _compare_kinds(name: str, mine: Kind | None, theirs: Kind | None) -> tuple[str, ...]:
    times = " / ".join(NOTHING if kind is None else f"{len(kind.durations_us):,}" for kind in (mine, theirs))
    median, other = (None if kind is None else kind.median_us for kind in (mine, theirs))
    return name, times, *_pair(median, other, time_text)
