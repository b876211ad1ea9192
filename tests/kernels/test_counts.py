"""The layout of a dispatch against its twin."""

from __future__ import annotations

import pytest
import torch

from deep_ep import layout
from deep_ep.kernels import _triton, counts

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")


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
