"""A rank's memory over time, and whether it stays the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..machine import value_in

_FLAT_SHARE, _FLAT_BYTES = 0.10, 50 << 20  # growth of either is none


@dataclass(frozen=True)
class Sample:
    """A rank's memory at one moment.

    Attributes:
        secs: Since the rank began.
        num_calls: Calls that it has made until then.
        private_bytes: Memory of its own; windows, which are shared, are not in it.
        committed_bytes: Memory that stands behind its arena.
    """

    secs: float
    num_calls: int
    private_bytes: int
    committed_bytes: int


@dataclass(frozen=True)
class Growth:
    """How a rank's own memory grew, from the first tenth of the time, when it is warm, to the end."""

    early_bytes: int
    last_bytes: int

    @property
    def num_bytes(self) -> int:
        """What was added."""
        return self.last_bytes - self.early_bytes

    @property
    def is_flat(self) -> bool:
        """Whether that is nothing to speak of."""
        return self.num_bytes <= max(_FLAT_SHARE * self.early_bytes, _FLAT_BYTES)


def growth_of(samples: Sequence[Sample]) -> Growth:
    """The growth over a rank's samples, of which there is at least one."""
    first_tenth = samples[0].secs + 0.1 * (samples[-1].secs - samples[0].secs)
    early = next(sample for sample in samples if sample.secs >= first_tenth)
    return Growth(early.private_bytes, samples[-1].private_bytes)


def private_bytes() -> int:
    """Resident memory of this process that is its own: neither files nor shared. 0 where the system does not tell."""
    text = value_in("/proc/self/status", "RssAnon")
    return int(text.split()[0]) * 1024 if text else 0
