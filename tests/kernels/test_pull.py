"""Sums out of peers' windows, and the copy into one's own, against their twins."""

from __future__ import annotations

import pytest
import torch
from calls import pull_rows
from windows import fail, make_context, offer, reduce_on_cpu, with_subnormals

from deep_ep.kernels import _triton, pull
from deep_ep.kernels.put import LaunchShape

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

SHAPE = LaunchShape(num_blocks=3, words=64, num_warps=2)


def test_pull_worked_example(device: str) -> None:
    context = make_context(0, 2, device)
    rows = torch.tensor([[0.0, 0.0], [0.0, 0.0], [1.0, 2.0]], device=device)
    offer(context, [[rows, rows]], [3, 0])
    out = torch.empty(1, 2, device=device)
    slots = torch.tensor([[2, -1]], dtype=torch.int32, device=device)
    pull_rows(context, SHAPE, out, slots, [torch.tensor([[10.0, 10.0]], device=device)])
    assert out.tolist() == [[11.0, 12.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("num_ranks", "num_tokens", "hidden", "num_biases"),
    [(1, 1, 1, 0), (2, 5, 16, 1), (3, 4, 7, 2), (3, 6, 200, 0), (9, 3, 24, 2)],
)
def test_sums_are_those_of_the_twin(
    device: str, dtype: torch.dtype, num_ranks: int, num_tokens: int, hidden: int, num_biases: int
) -> None:
    generator = torch.Generator().manual_seed(hidden)

    def draw(*shape: int) -> torch.Tensor:
        return with_subnormals(torch.randn(*shape, generator=generator).to(device, dtype))

    mask = (torch.rand(num_tokens, num_ranks, generator=generator) < 0.7).to(device)
    slots = torch.where(mask, mask.cumsum(0) - 1, -1).int()
    peers = [draw(num_tokens, hidden) for _ in range(num_ranks)]
    biases = [draw(num_tokens, hidden) for _ in range(num_biases)]
    num_topk = num_biases and hidden % 5 + 1
    peer_weights = [draw(num_tokens, max(1, num_topk)).float() for _ in range(num_ranks)]
    context = make_context(0, num_ranks, device)
    offer(context, [peers, peer_weights], [num_tokens] * num_ranks)
    out, expected = draw(num_tokens, hidden), draw(num_tokens, hidden)
    weights, expected_weights = (draw(num_tokens, max(1, num_topk)).float() for _ in range(2))
    pull_rows(context, SHAPE, out, slots, biases, weights if num_topk else None)
    reduce_on_cpu(expected, peers, slots, biases)
    assert torch.equal(out, expected)
    if num_topk:
        reduce_on_cpu(expected_weights, peer_weights, slots, [])
        assert torch.equal(weights, expected_weights)


def test_a_token_without_rows_gets_its_bias(device: str) -> None:
    context = make_context(0, 2, device)
    rows = torch.full((1, 3), float("nan"), device=device)
    offer(context, [[rows, rows]], [1, 1])
    slots = torch.full((1, 2), -1, dtype=torch.int32, device=device)
    bias = torch.tensor([[-0.0, 1.5, 2.0]], device=device)
    out = torch.empty(1, 3, device=device)
    pull_rows(context, SHAPE, out, slots, [bias])
    assert torch.equal(out, bias)
    assert out.signbit().tolist() == [[True, False, False]]
    pull_rows(context, SHAPE, out, slots, [])
    assert out.tolist() == [[0.0, 0.0, 0.0]]


def test_rows_that_were_not_offered_are_not_read(device: str) -> None:
    context = make_context(0, 1, device)
    rows = torch.tensor([[1.0], [float("nan")]], device=device)
    offer(context, [[rows]], [1])
    out = torch.empty(2, 1, device=device)
    pull_rows(context, SHAPE, out, torch.tensor([[0], [1]], dtype=torch.int32, device=device), [])
    assert out.tolist() == [[1.0], [0.0]]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("num_rows", "num_came", "columns"), [(4, 4, 5), (6, 2, 300), (3, 0, 8)])
def test_rows_that_came_are_copied_in(
    device: str, dtype: torch.dtype, num_rows: int, num_came: int, columns: int
) -> None:
    context = make_context(1, 2, device)
    generator = torch.Generator().manual_seed(columns)
    rows = torch.rand(num_rows, columns, generator=generator).mul(100).to(device, dtype)
    target = torch.full_like(rows, 7)
    prefix = torch.tensor([[0, num_came // 2], [0, num_came]], dtype=torch.int32, device=device)
    pull.copy_in(context, SHAPE, target, rows, prefix)
    assert torch.equal(target[:num_came], rows[:num_came])
    assert (target[num_came:] == 7).all()


def test_a_failed_buffer_sums_and_copies_nothing(device: str) -> None:
    context = make_context(0, 1, device)
    rows = torch.ones(1, 4, device=device)
    offer(context, [[rows]], [1])
    fail(context)
    out = torch.full((1, 4), 7.0, device=device)
    pull_rows(context, SHAPE, out, torch.zeros(1, 1, dtype=torch.int32, device=device), [])
    pull.copy_in(context, SHAPE, out, rows, torch.ones(1, 1, dtype=torch.int32, device=device))
    assert out.tolist() == [[7.0] * 4]
