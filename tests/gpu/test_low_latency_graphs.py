"""Low-latency calls in CUDA graphs: any number of them, with new inputs at every replay, beside eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_ep import Buffer
from deep_ep.launch import run_ranks

HIDDEN, NUM_TOPK, EXPERTS_PER_RANK, NUM_TOKENS = 512, 3, 4, 12


def inputs(rank: int, num_ranks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Whose sums are exact in FP32."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randint(-4, 5, (NUM_TOKENS, HIDDEN), generator=generator).bfloat16()
    ids = torch.randint(-1, EXPERTS_PER_RANK * num_ranks, (NUM_TOKENS, NUM_TOPK), generator=generator)
    weights = torch.randint(-8, 9, (NUM_TOKENS, NUM_TOPK), generator=generator) / 8
    return x, ids, weights


def make_buffer(num_ranks: int) -> Buffer:
    torch.cuda.set_device(0)
    hint = Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, num_ranks, EXPERTS_PER_RANK * num_ranks)
    return Buffer(
        dist.group.WORLD, 64 << 20, hint, low_latency_mode=True, explicitly_destroy=True, num_gpu_timeout_secs=60
    )


def expected(rank: int, num_ranks: int, seed: int) -> torch.Tensor:
    """What a rank gets back where experts double their rows."""
    x, ids, weights = inputs(rank, num_ranks, seed)
    return (2 * x.float() * weights.masked_fill(ids < 0, 0).sum(1, keepdim=True)).bfloat16()


class Step:
    """A dispatch, experts that double, and a combine, over inputs that stay where they are."""

    def __init__(self, buffer: Buffer, has_hook: bool, zero_copy: bool, num_barriers: int):
        self.buffer, self.has_hook, self.zero_copy, self.num_barriers = buffer, has_hook, zero_copy, num_barriers
        self.given = [one.cuda() for one in inputs(buffer.rank, buffer.group_size, 0)]
        self.result: Any = None

    def __call__(self) -> None:
        buffer, (x, ids, weights) = self.buffer, self.given
        num_experts = EXPERTS_PER_RANK * buffer.group_size
        options = {"return_recv_hook": self.has_hook}
        recv_x, _, handle, _, hook = buffer.low_latency_dispatch(
            x, ids, NUM_TOKENS, num_experts, use_fp8=False, **options
        )
        if self.has_hook:
            hook()
        rows = recv_x * 2
        if self.zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle).copy_(rows)
        self.result, _, hook = buffer.low_latency_combine(
            rows, ids, weights, handle, zero_copy=self.zero_copy, **options
        )
        if self.has_hook:
            hook()
        for _ in range(self.num_barriers):  # each is one call more: graphs of an odd number of calls
            buffer.clean_low_latency_buffer(NUM_TOKENS, HIDDEN, num_experts)

    def load(self, seed: int) -> None:
        for target, source in zip(self.given, inputs(self.buffer.rank, self.buffer.group_size, seed), strict=True):
            target.copy_(source)


def replayed(rank: int, num_ranks: int, has_hook: bool, zero_copy: bool, num_barriers: int) -> None:
    buffer = make_buffer(num_ranks)
    step = Step(buffer, has_hook, zero_copy, num_barriers)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    captured = step.result
    for seed in range(1, 8):
        step.load(seed)
        graph.replay()
        got = captured.clone()
        if seed % 3 == 0:
            step()  # an eager call between replays
            assert torch.equal(step.result.cpu(), expected(rank, num_ranks, seed))
        assert torch.equal(got.cpu(), expected(rank, num_ranks, seed)), f"replay {seed}"
    buffer.check()
    buffer.destroy()


@pytest.mark.parametrize("num_barriers", [0, 1])
@pytest.mark.parametrize(("has_hook", "zero_copy"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_step_is_replayed_with_new_inputs(has_hook: bool, zero_copy: bool, num_barriers: int) -> None:
    run_ranks(replayed, 2, has_hook, zero_copy, num_barriers)


def many_in_one_graph(rank: int, num_ranks: int, num_steps: int) -> None:
    buffer = make_buffer(num_ranks)
    step = Step(buffer, True, False, 0)
    step()
    torch.cuda.synchronize()
    graph, results = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(num_steps):
            step()
            results.append(step.result)
    for seed in range(1, 5):
        step.load(seed)
        graph.replay()
        for result in results:
            assert torch.equal(result.cpu(), expected(rank, num_ranks, seed))
    buffer.check()
    buffer.destroy()


def test_many_steps_in_one_graph() -> None:
    run_ranks(many_in_one_graph, 4, 5)
