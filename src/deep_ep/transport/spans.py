"""Sets of byte spans: which memory is free, committed or populated. Only numbers; `memory.py` has the memory."""

from __future__ import annotations

from dataclasses import dataclass

UNIT_BYTES = 4096  # spans are whole pages, so that memory can be committed and given back span by span


def whole_units(num_bytes: int) -> int:
    """`num_bytes`, rounded up to whole units."""
    return -(-num_bytes // UNIT_BYTES) * UNIT_BYTES


@dataclass(frozen=True, order=True)
class Span:
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
            overlap = Span(max(span.start, other.start), min(span.stop, other.stop))
            if overlap.num_bytes <= 0:
                kept.append(other)
                continue
            removed.append(overlap)
            rests = (Span(other.start, overlap.start), Span(overlap.stop, other.stop))
            kept += [rest for rest in rests if rest.num_bytes]
        self._spans = kept
        return removed

    def take(self, num_bytes: int) -> Span | None:
        """Remove and return the lowest span of that length, in whole units; None where there is none.

        First fit from the bottom gives a program that repeats its calls the same memory again. That matters: a page
        touched for the first time costs three times a copy.
        """
        num_bytes = whole_units(num_bytes)
        for span in self._spans:
            if span.num_bytes >= num_bytes:
                taken = Span(span.start, span.start + num_bytes)
                self.remove(taken)
                return taken
        return None

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._spans)

    @property
    def num_bytes(self) -> int:
        """The length of all its spans together."""
        return sum(span.num_bytes for span in self._spans)
