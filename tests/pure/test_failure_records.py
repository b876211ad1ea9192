"""What a rank raises for a failure that a kernel has recorded."""

from __future__ import annotations

import pytest

from deep_ep.engine.cuda.failure import Record
from deep_ep.engine.protocol import OPERATIONS, Agreement
from deep_ep.kernels import exchange


def text_of(code: int, ranks: list[int], num_ranks: int, differing: int = -1) -> str:
    """The message on rank 0; one rank has another hidden size."""
    mask = sum(1 << bit for bit in {min(rank, 62) for rank in ranks})  # as `exchange.mask_of`
    record = Record(code, 7, OPERATIONS.index("combine"), mask, 0, 0, 0)
    error = record.error(
        0, num_ranks, 3.0, lambda rank: Agreement("combine", hidden=128 if rank == differing else 64), lambda: ""
    )
    return str(error)


@pytest.mark.parametrize("rank", [5, 62, 70, 127])
def test_a_rank_that_differs_is_named_in_large_groups(rank: int) -> None:
    assert f"rank {rank} has hidden 128 not 64" in text_of(exchange.DISAGREE, [rank], 128, differing=rank)


def test_ranks_that_share_a_bit_are_all_named() -> None:
    assert "no signal from ranks 3, 62, 63" in text_of(exchange.TIMEOUT, [3, 63], 64)
    assert "no signal from rank 62 " in text_of(exchange.TIMEOUT, [62], 63)


def test_a_rank_that_is_ahead_is_named() -> None:
    assert "combine (call 7): rank 2 went on without the others" in text_of(exchange.DESYNC, [2], 4)
