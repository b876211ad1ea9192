"""What peers are told of a failure, whatever its text is."""

from __future__ import annotations

import time
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist

from common import run_ranks
from deep_ep import Buffer, EPError, EventHandle
from deep_ep.errors import account, encoded


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")


FAILURES: dict[Exception, str] = {  # and what a peer reads of it
    RuntimeError("bad file name '\udcff'"): r"RuntimeError: bad file name '\udcff'",
    RuntimeError("é" * 1_000_000): "RuntimeError: éééé",
    Unspeakable(): "Unspeakable (its text could not be made: RuntimeError)",
}


def fail_with(rank: int, num_ranks: int) -> list[tuple[str, float]]:
    """Rank 0's dispatch fails on the comm stream, before it is announced. What its peer reads, and after how long."""
    size = Buffer.get_low_latency_rdma_size_hint(4, 8, num_ranks, num_ranks)
    topk_idx, texts = torch.zeros(4, 1, dtype=torch.int64), []
    for error in FAILURES:
        buffer = Buffer(dist.group.WORLD, 1 << 20, size, low_latency_mode=True, num_cpu_timeout_secs=60)
        per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, num_ranks)
        before: Future = Future()
        if rank == 0:
            before.set_exception(error)
        else:
            before.set_result(None)
        begin = time.monotonic()
        with pytest.raises(type(error) if rank == 0 else EPError) as caught:
            buffer.dispatch(
                torch.randn(4, 8),
                None,
                per_rank,
                per_node,
                mask,
                per_expert,
                topk_idx,
                torch.ones(4, 1),
                num_worst_tokens=20,
                previous_event=EventHandle(before),
            )
        texts.append(("" if rank == 0 else str(caught.value), time.monotonic() - begin))
    return texts


@pytest.mark.cpu_only  # the text of a failure does not travel between kernels
@pytest.mark.parametrize("ranks_per_node", [2, 1])
def test_any_text_reaches_the_peers(ranks_per_node: int) -> None:
    _, seen = run_ranks(fail_with, 2, env={"DEEP_EP_RANKS_PER_NODE": str(ranks_per_node)})
    for (text, secs), told in zip(seen, FAILURES.values(), strict=True):
        assert "rank 0" in text
        assert told in text
        assert secs < 30


def test_a_text_for_peers() -> None:
    assert encoded("a\udcffb") == rb"a\udcffb"
    assert encoded("x" * 100, 10) == b"x" * 10
    assert account(ValueError("why")) == "ValueError: why"
    assert account(Unspeakable()) == "Unspeakable (its text could not be made: RuntimeError)"
