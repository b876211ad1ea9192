"""What several tests share."""

from __future__ import annotations

from typing import Any


class OneRank:
    """An MPI-like communicator of one rank: a buffer without a process group."""

    def Get_rank(self) -> int:
        return 0

    def Get_size(self) -> int:
        return 1

    def allgather(self, value: Any) -> list[Any]:
        return [value]
