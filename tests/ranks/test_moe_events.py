"""Events on both passes: what lies between the beginning of a call and its `wait()` does not wait for peers.

Neither forward nor backward: rank 0 has something to do between the two, which the other rank must have seen before it
comes to the call at all. A call that waited too early would never end.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import run_ranks
from deep_ep import moe

T, H = 5, 16
LIMIT_SECS = 20.0


class Meet(torch.autograd.Function):
    """All ranks meet here, on one pass or on both. Values pass unchanged."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, is_forward: bool, is_backward: bool) -> torch.Tensor:
        ctx.is_backward = is_backward
        if is_forward:
            dist.barrier()
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        if ctx.is_backward:
            dist.barrier()
        return grad, None, None


def meet_between(rank: int, num_ranks: int, is_fp8: bool) -> tuple[torch.Tensor, ...]:
    """Rank 0 meets the others while its call is under way; they meet it before they begin theirs."""
    buffer = deep_ep.Buffer(dist.group.WORLD, num_cpu_timeout_secs=LIMIT_SECS, num_gpu_timeout_secs=LIMIT_SECS)
    # The first time nobody meets: a GPU loads a kernel when it is first used, and for that waits until none runs.
    both_passes(buffer, is_fp8, is_meeting=False)
    return both_passes(buffer, is_fp8, is_meeting=True)


def both_passes(buffer: deep_ep.Buffer, is_fp8: bool, is_meeting: bool) -> tuple[torch.Tensor, ...]:
    num_ranks, is_first = buffer.group_size, buffer.rank == 0
    x = torch.full((T, H), 1.0 + buffer.rank, requires_grad=True)
    topk_idx, weights = torch.arange(num_ranks).expand(T, -1), torch.full((T, num_ranks), 0.5)

    def meet(tensor: torch.Tensor, is_forward: bool, is_backward: bool) -> torch.Tensor:
        return Meet.apply(tensor, is_forward and is_meeting, is_backward and is_meeting)

    sending = moe.dispatch(
        buffer,
        x if is_first else meet(x, True, False),
        topk_idx,
        weights,
        num_ranks,
        num_worst_tokens=T * num_ranks,  # otherwise the host waits for counts
        is_fp8=is_fp8,
        async_finish=True,
    )
    beside = meet(x, True, True) if is_first else x
    received = sending.wait()
    rows = received.x if is_first else meet(received.x, False, True)

    y = rows * 3 if is_first else meet(rows * 3, True, False)
    bringing = moe.combine(buffer, y, received, is_fp8=is_fp8, async_finish=True)
    beside = meet(beside, True, True) if is_first else beside
    combined = bringing.wait()
    combined = combined if is_first else meet(combined, False, True)

    (combined + beside).sum().backward()
    return combined.detach(), x.detach(), x.grad


@pytest.mark.parametrize("is_fp8", [False, True])
def test_calls_are_waited_for_where_the_caller_says(device: str, is_fp8: bool) -> None:
    for combined, x, grad in run_ranks(meet_between, 2, is_fp8):
        assert torch.allclose(combined, 6 * x, rtol=1e-6)
        assert torch.allclose(grad, torch.full_like(x, 7.0), rtol=1e-6)


def waited_twice(rank: int, num_ranks: int) -> bool:
    buffer = deep_ep.Buffer(dist.group.WORLD)
    x, topk_idx, weights = torch.ones(T, H), torch.zeros(T, 1, dtype=torch.int64), torch.ones(T, 1)
    sending = moe.dispatch(buffer, x, topk_idx, weights, num_ranks, async_finish=True)
    assert sending.event is not None
    sending.wait()
    try:
        sending.wait()
    except AssertionError as error:
        return "may be called once" in str(error)
    return False


def test_a_second_wait_is_refused(device: str) -> None:
    assert all(run_ranks(waited_twice, 2))
