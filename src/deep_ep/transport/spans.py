"""Sets of byte spans: which memory is free, committed or populated. Only numbers; `memory.py` has the memory."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from typing import NamedTuple

UNIT_BYTES = 4096  # spans are whole pages, so that memory can be committed and given back span by span


def whole_units(num_bytes: int) -> int:
    """Return `num_bytes`, rounded up to whole units."""
    return -(-num_bytes // UNIT_BYTES) * UNIT_BYTES


class Span(NamedTuple):
    """Bytes `[start, stop)` of a rank's memory."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """The length of the span."""
        return self.stop - self.start


class SpanSet:
    """Disjoint spans in ascending order, neighbours joined."""

    def __init__(self, *spans: Span):
        # Where each span starts and stops, one after the other: even indices are starts. Every change is one operation
        # of the list, which no interrupt can leave half done.
        self._ends: list[int] = []
        for span in spans:
            self.add(span)

    def add(self, span: Span) -> None:
        """Add a span that does not overlap any in the set."""
        start, stop = span
        ends = self._ends
        index = bisect_left(ends, start)
        if index % 2:  # the span before it stops where this one starts
            if index + 1 < len(ends) and ends[index + 1] == stop:
                del ends[index : index + 2]
            else:
                ends[index] = stop
        elif index < len(ends) and ends[index] == stop:
            ends[index] = start
        else:
            ends[index:index] = span

    def remove(self, span: Span) -> list[Span]:
        """Remove a span.

        Returns:
            The parts of it that were in the set.

        Example:
            Removing `[4, 9)` from `{[0, 5), [8, 12)}` returns `[4, 5), [8, 9)` and leaves `{[0, 4), [9, 12)}`.
        """
        kept: list[int] = []
        removed: list[Span] = []
        for other in self:
            start, stop = max(span.start, other.start), min(span.stop, other.stop)
            if start >= stop:
                kept += other
                continue
            removed.append(Span(start, stop))
            if other.start < start:
                kept += other.start, start
            if stop < other.stop:
                kept += stop, other.stop
        self._ends = kept
        return removed

    def take(self, num_bytes: int) -> Span | None:
        """Remove and return the lowest span of that length, in whole units; None if there is none.

        First fit from the bottom gives a program that repeats its calls the same memory again. That matters: a page
        touched for the first time costs three times a copy.
        """
        num_bytes = whole_units(num_bytes)
        ends = self._ends
        for index in range(0, len(ends), 2):
            start, stop = ends[index], ends[index + 1]
            middle = start + num_bytes
            if middle < stop:
                ends[index] = middle
                return Span(start, middle)
            if middle == stop:
                del ends[index : index + 2]
                return Span(start, stop)
        return None

    def has_below(self, limit: int, num_bytes: int) -> bool:
        """Whether a span that starts below a limit has so many bytes, or would have, with those from the limit on."""
        ends = self._ends
        for index in range(0, len(ends), 2):
            start, stop = ends[index], ends[index + 1]
            if start >= limit:
                return False
            if stop - start >= num_bytes or stop == limit:
                return True
        return False

    def __iter__(self) -> Iterator[Span]:
        return map(Span, self._ends[::2], self._ends[1::2])

    def largest_bytes(self) -> int:
        """The length of the longest span; 0 if there is none."""
        ends, largest = self._ends, 0
        for index in range(0, len(ends), 2):
            num_bytes = ends[index + 1] - ends[index]
            if num_bytes > largest:
                largest = num_bytes
        return largest

    @property
    def num_bytes(self) -> int:
        """The length of all spans together."""
        return sum(self._ends[1::2]) - sum(self._ends[::2])
