"""What each rank of the demo does: the MoE layer once, for the check, then the communication alone, for its times.

Letters as in `layer`.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ...buffers.legacy import Buffer
from ...launch import run_ranks
from ..terminal import hearing_ranks, teller
from .layer import Shape, Tokens, make_expert, make_tokens

NUM_ROUNDS = 5
_NUM_WARMUPS = 1

STEPS = ("dispatch", "experts", "combine", *(["timing"] * (_NUM_WARMUPS + NUM_ROUNDS)))
"""What rank 0 says, after its transport."""


@dataclass(frozen=True)
class RankResult:
    """What one rank has to tell.

    Attributes:
        num_tokens_to: Tokens sent to each rank, itself included.
        num_rows: n.
        num_tokens_per_expert: Rows that each local expert worked on.
        output: [T, H] float32, the layer's output for the rank's own tokens.
        agrees: Whether cached dispatch and both ways to combine gave the same bits.
        median_secs: Of full dispatch, cached dispatch, combine from inside the window and from elsewhere.
    """

    num_tokens_to: list[int]
    num_rows: int
    num_tokens_per_expert: list[int]
    output: torch.Tensor
    agrees: bool
    median_secs: list[float]


def run_layer(shape: Shape, on_news: Callable[[str], object]) -> list[RankResult]:
    """Run the layer on its ranks. `on_news` hears rank 0's transport, then each of `STEPS` as it begins."""
    with hearing_ranks(on_news) as news:
        return run_ranks(_run_rank, shape.num_ranks, shape, news)


def _run_rank(rank: int, num_ranks: int, shape: Shape, news: Connection) -> RankResult:
    tell = teller(rank, news)
    if shape.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())
    num_nvl_bytes = Buffer.get_dispatch_config(num_ranks).get_nvl_buffer_size_hint(shape.hidden * 2, num_ranks)
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes, explicitly_destroy=True, device=shape.device)
    try:
        tell(buffer.transport)
        return _run_layer(buffer, shape, make_tokens(shape, rank).to(buffer.device), tell)
    finally:
        buffer.destroy()


def _run_layer(buffer: Buffer, shape: Shape, tokens: Tokens, tell: Callable[[str], None]) -> RankResult:
    tell("dispatch")
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(tokens.topk_idx, shape.num_experts)
    routing: dict[str, Any] = {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "num_tokens_per_expert": per_expert,
        "is_token_in_rank": mask,
        "topk_idx": tokens.topk_idx,
        "topk_weights": tokens.topk_weights,
    }
    recv_x, recv_topk_idx, recv_topk_weights, expert_counts, handle, _ = buffer.dispatch(tokens.x, **routing)
    assert isinstance(recv_x, torch.Tensor)
    assert recv_topk_idx is not None
    assert recv_topk_weights is not None
    assert expert_counts is not None
    assert handle is not None

    tell("experts")
    # The experts write into the window, where combine finds their rows without a copy.
    rows = buffer.get_combine_buffer(handle, dtype=torch.float32).zero_()
    _run_experts(shape, buffer.rank, recv_x, recv_topk_idx, recv_topk_weights, rows)

    tell("combine")
    output, _, _ = buffer.combine(rows, handle)
    del rows

    agrees = _is_consistent(buffer, tokens.x, recv_x, handle)
    num_rows = recv_x.size(0)
    del recv_x  # its memory is what the timed dispatches reuse
    median_secs = _time_operations(buffer, tokens.x, routing, handle, tell)
    return RankResult(per_rank.tolist(), num_rows, expert_counts, output.cpu(), agrees, median_secs)


def _run_experts(
    shape: Shape,
    rank: int,
    recv_x: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    recv_topk_weights: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Add the weighted results of this rank's experts to `output`, [n, H] float32. Combine itself does not weight."""
    for local_expert in range(shape.num_local_experts):
        rows, slots = (recv_topk_idx == local_expert).nonzero(as_tuple=True)
        expert = make_expert(shape, rank * shape.num_local_experts + local_expert).to(output.device)
        output.index_add_(0, rows, recv_topk_weights[rows, slots, None] * expert(recv_x[rows]))


def _is_consistent(buffer: Buffer, x: torch.Tensor, recv_x: torch.Tensor, handle: tuple) -> bool:
    """Whether a cached dispatch gives the same rows, and combine the same sums from either place."""
    again, *_ = buffer.dispatch(x, handle=handle)
    assert isinstance(again, torch.Tensor)
    from_window, _, _ = buffer.combine(recv_x, handle)
    from_elsewhere, _, _ = buffer.combine(recv_x.clone(), handle)
    return torch.equal(again, recv_x) and torch.equal(from_window, from_elsewhere)


def _time_operations(
    buffer: Buffer, x: torch.Tensor, routing: dict[str, Any], handle: tuple, tell: Callable[[str], None]
) -> list[float]:
    """Median seconds of the operations, which take turns."""
    inside = buffer.get_combine_buffer(handle).fill_(1)
    outside = inside.clone()
    operations: list[Callable[[], Any]] = [
        lambda: buffer.dispatch(x, **routing),
        lambda: buffer.dispatch(x, handle=handle),
        lambda: buffer.combine(inside, handle),
        lambda: buffer.combine(outside, handle),
    ]
    rounds = []
    for _ in range(_NUM_WARMUPS + NUM_ROUNDS):
        tell("timing")
        rounds.append([_time(operation) for operation in operations])
    return [statistics.median(times) for times in zip(*rounds[_NUM_WARMUPS:], strict=True)]


def _time(operation: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    result = operation()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    del result
    return time.perf_counter() - start
