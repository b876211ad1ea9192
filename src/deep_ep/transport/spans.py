"""Sets of byte spans: which memory is free, committed or populated. Only numbers; `memory.py` has the memory."""

from __future__ import annotations

from typing import NamedTuple

UNIT_BYTES = 4096  # spans are whole pages, so that memory can be committed and given back span by span


def whole_units(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole units."""
    return -(-num_bytes // UNIT_BYTES) * UNIT_BYTES


class Span(NamedTuple):
    """Bytes `[start, stop)` of a rank's memory."""

    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        """Its length."""
        return self.stop - self.start


class SpanSet:
    """Disjoint spans in ascending order, neighbours joined."""

    def __init__(self, *spans: Span):
        self._spans = sorted(spans)

    def add(self, span: Span) -> None:
        """Add a span that does not overlap any in the set."""
        joined: list[Span] = []
        for other in sorted([*self._spans, span]):
            if joined and joined[-1].stop == other.start:
                joined[-1] = Span(joined[-1].start, other.stop)
            else:
                joined.append(other)
        self._spans = joined

    def remove(self, span: Span) -> list[Span]:
        """Remove a span.

        Returns:
            The parts of it that were in the set.

        Example:
            Removing `[4, 9)` from `{[0, 5), [8, 12)}` returns `[4, 5), [8, 9)` and leaves `{[0, 4), [9, 12)}`.
        """
        kept: list[Span] = []
        removed: list[Span] = []
        for other in self._spans:
            start, stop = max(span.start, other.start), min(span.stop, other.stop)
            if start >= stop:
                kept.append(other)
                continue
            removed.append(Span(start, stop))
            if other.start < start:
                kept.append(Span(other.start, start))
            if stop < other.stop:
                kept.append(Span(stop, other.stop))
        self._spans = kept
        return removed

    def take(self, num_bytes: int) -> Span | None:
        """Remove and return the lowest span of that length, in whole units; None where there is none.

        First fit from the bottom gives a program that repeats its calls the same memory again. That matters: a page
        touched for the first time costs three times a copy.
        """
        num_bytes = whole_units(num_bytes)
        for index, span in enumerate(self._spans):
            middle = span.start + num_bytes
            if middle <= span.stop:
                self._spans[index : index + 1] = [Span(middle, span.stop)] if middle < span.stop else []
                return Span(span.start, middle)
        return None

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._spans)

    @property
    def num_bytes(self) -> int:
        """The length of all its spans together."""
        return sum(span.num_bytes for span in self._spans)
