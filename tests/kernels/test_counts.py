"""Counting kernels against their twins."""

from __future__ import annotations

import pytest
import torch

from deep_ep import layout
from deep_ep.kernels import _triton, counts

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")


def int32(values: list, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def test_layout_worked_example(device: str) -> None:
    ids = torch.tensor([[0, 3], [-1, 2]], device=device)
    per_rank, per_node, per_expert, mask = counts.dispatch_layout(ids, 4, 2, 1)
    assert mask.tolist() == [[True, True], [False, True]]
    assert per_rank.tolist() == [1, 2]
    assert per_node.tolist() == [2]
    assert per_expert.tolist() == [1, 0, 1, 1]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_experts", "num_ranks", "num_nodes"),
    [
        (0, 2, 4, 2, 1),
        (1, 1, 1, 1, 1),
        (7, 3, 15, 3, 1),
        (200, 5, 12, 6, 3),  # more than one tile
        (33, 8, 49, 7, 7),
        (130, 1, 24, 8, 2),
        (5, 4, 300, 100, 4),
    ],
)
def test_layout_is_that_of_the_twin(
    device: str,
    dtype: torch.dtype,
    num_tokens: int,
    num_topk: int,
    num_experts: int,
    num_ranks: int,
    num_nodes: int,
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    ids = torch.randint(-2, num_experts + 2, (num_tokens, num_topk), generator=generator).to(device, dtype)
    expected = layout.dispatch_layout(ids, num_experts, num_ranks, num_ranks // num_nodes)
    for name, got, wanted in zip(
        expected._fields, counts.dispatch_layout(ids, num_experts, num_ranks, num_nodes), expected, strict=True
    ):
        assert got.dtype == wanted.dtype, name
        assert torch.equal(got, wanted), name


@pytest.mark.parametrize("huge", [2**31 + 1, 2**33, -(2**32)])
def test_ids_beyond_32_bits_select_nothing(device: str, huge: int) -> None:
    per_rank, _, per_expert, mask = counts.dispatch_layout(torch.tensor([[huge, 1]], device=device), 4, 2, 1)
    assert mask.tolist() == [[True, False]]
    assert per_rank.tolist() == [1, 0]
    assert per_expert.tolist() == [0, 1, 0, 0]


def test_positions_worked_example(device: str) -> None:
    numbers, num_tokens = counts.positions(torch.tensor([[True], [False], [True]], device=device))
    assert numbers.tolist() == [[0], [-1], [1]]
    assert num_tokens.tolist() == [2]


def test_node_positions_worked_example(device: str) -> None:
    mask = torch.tensor([[True, False], [False, False], [True, True]], device=device)
    node_numbers, node_counts = int32([[9]] * 3, device), int32([[9, 9]], device)
    _, num_tokens = counts.node_positions(mask, node_numbers, node_counts)
    assert num_tokens.tolist() == [2, 1]
    assert node_numbers.tolist() == [[0], [-1], [1]]
    assert node_counts.tolist() == [[2, 2]]


@pytest.mark.parametrize(("num_tokens", "num_ranks"), [(0, 3), (1, 1), (50, 2), (1024, 3), (2500, 5)])
def test_positions_are_those_of_the_twin(device: str, num_tokens: int, num_ranks: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    mask = (torch.rand(num_tokens, num_ranks, generator=generator) < 0.4).to(device)
    for got, wanted in zip(counts.positions(mask), counts.positions_torch(mask), strict=True):
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("num_tokens", "num_ranks", "num_nodes", "num_channels"),
    [(0, 4, 2, 3), (50, 2, 2, 1), (1030, 6, 2, 10), (33, 12, 3, 2), (40, 16, 2, 4)],
)
def test_node_positions_are_those_of_the_twin(
    device: str, num_tokens: int, num_ranks: int, num_nodes: int, num_channels: int
) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    mask = (torch.rand(num_tokens, num_ranks, generator=generator) < 0.2).to(device)
    sizes = ((num_tokens, num_nodes), (num_nodes, num_channels))
    got, wanted = ([torch.empty(size, dtype=torch.int32, device=device) for size in sizes] for _ in range(2))
    got += counts.node_positions(mask, *got)
    wanted += counts.node_positions_torch(mask, *wanted)
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
