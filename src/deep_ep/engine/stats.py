"""What a buffer counts: which path each call took, and the bytes that went to and came from each peer."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..trace import Trace


class Stats:
    """Counters of one buffer. Only the comm stream writes them.

    Attributes:
        trace: The trace in which a counted call ends, too; None: none is recorded.
    """

    trace: Trace | None = None

    def __init__(self, num_ranks: int):
        self.calls: Counter[str] = Counter()
        self.num_rounds = 0
        self.bytes_to = [0] * num_ranks
        self.bytes_from = [0] * num_ranks

    def count(
        self, operation: str, path: str, rounds: int, rows_to: list[int], rows_from: list[int], row_bytes: int
    ) -> None:
        """Count one finished call, its path and its bytes."""
        self.calls[f"{operation}/{path}"] += 1
        self.num_rounds += rounds
        self.count_rows(rows_to, rows_from, row_bytes)
        if self.trace is not None:
            self.trace.note(rows_to=rows_to, rows_from=rows_from, row_bytes=row_bytes)
            self.trace.end_call(path=path, rounds=rounds)

    def count_rows(self, rows_to: list[int], rows_from: list[int], row_bytes: int) -> None:
        """Count the bytes of a finished call, whose rows to and from each rank these are."""
        self.bytes_to = [total + rows * row_bytes for total, rows in zip(self.bytes_to, rows_to, strict=True)]
        self.bytes_from = [total + rows * row_bytes for total, rows in zip(self.bytes_from, rows_from, strict=True)]

    def count_path(self, path: str) -> None:
        """Count one call whose rows only the device has counted, by `operation/path`."""
        self.calls[path] += 1
        self.num_rounds += 1

    def as_dict(self) -> dict[str, Any]:
        """The counters, as `Buffer.stats` shows them."""
        return {
            "calls": dict(self.calls),
            "rounds": self.num_rounds,
            "bytes_to": self.bytes_to,
            "bytes_from": self.bytes_from,
        }
