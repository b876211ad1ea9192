"""What an event of a trace may hold.

A file may come from anywhere, and may be damaged: what the other modules read of it is checked here, once. Behind this
every number is finite and of a size that sums stay finite with, every list holds what it should, and a group has so
many ranks that their matrices can be made.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

MOST_RANKS = 4096  # of a group that a page can show: its matrices have a cell for each pair
_MOST = float(1 << 63)  # of any number: what a trace counts and measures is smaller
_LAST_SECOND = 253402300799  # of the year 9999, beyond which there is no calendar

Event = dict[str, Any]


def check_facts(facts: dict[str, Any]) -> None:
    """Check what a file says of itself. Raises `ValueError` with half a sentence."""
    num_ranks, rank = facts["num_ranks"], facts["rank"]
    if not 1 <= num_ranks <= MOST_RANKS:
        raise ValueError(f"it says that there are {_short(num_ranks)} ranks; a report shows 1 to {MOST_RANKS}")
    if not 0 <= rank < num_ranks:
        raise ValueError(f"it says that it is of rank {_short(rank)} of {num_ranks}")
    _require(_is_number(facts.get("begun", 0)) and 0 <= facts.get("begun", 0) <= _LAST_SECOND, "begun", facts)
    _require(_is_number(facts.get("clock_error_ns", 0)), "clock_error_ns", facts)
    for name in ("buffer", "process", "host", "device", "transport"):
        _require(isinstance(facts.get(name, ""), (str, int)), name, facts)
    stats = facts.get("stats", {})
    _require(isinstance(stats, dict) and isinstance(stats.get("arena", {}), dict), "stats", facts)
    _require(_is_number(stats.get("arena", {}).get("committed", 0)), "stats", facts)


def check_event(event: Event) -> None:
    """Check what the report reads of an event. Raises `ValueError` with half a sentence."""
    for name, is_right in _FIELDS.items():
        if name in event:
            _require(is_right(event[name]), name, event)
    for name, is_right in _ARGS.items():
        if name in event.get("args", {}):
            _require(is_right(event["args"][name]), name, event["args"])


def _require(is_right: bool, name: str, holder: dict[str, Any]) -> None:
    if not is_right:
        raise ValueError(f"its `{name}` is {_short(holder.get(name))}")


def _short(value: Any) -> str:
    """A value for a message, whatever its size."""
    if isinstance(value, int) and abs(value) >= 1 << 64:
        return f"a number of {value.bit_length()} bits"
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__}"
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < _MOST


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < _MOST


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_counts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_count, value))


def _may_be_counts(value: Any) -> bool:
    return value is None or _are_counts(value)


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "ph": _is_text,
    "name": _is_text,
    "cat": _is_text,
    "tid": lambda value: isinstance(value, int) and abs(value) < _MOST,
    "ts": _is_number,
    "dur": _is_number,
    "args": lambda value: isinstance(value, dict),
}
_ARGS: dict[str, Callable[[Any], bool]] = {
    "path": _is_text,
    "error": _is_text,
    "call": _is_count,
    "tokens": _is_count,
    "hidden": _is_count,
    "rounds": _is_count,
    "row_bytes": _is_count,
    "rows_to": _may_be_counts,
    "rows_from": _may_be_counts,
    "experts": _are_counts,
    "last": _are_counts,
    "awaited_us": lambda value: isinstance(value, dict) and all(map(_is_number, value.values())),
    "bytes": _is_count,
    "rows": lambda value: _is_count(value) or _are_counts(value),
}
