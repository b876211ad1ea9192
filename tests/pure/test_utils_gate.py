"""`deep_ep.utils.gate`: the ratio is reached, the other ranks are even, the picks are legal."""

import pytest
import torch

from deep_ep.utils import gate

SHAPES = [(256, 8, 8), (256, 8, 6), (64, 4, 4), (256, 64, 8), (32, 2, 4)]
"""(experts, ranks, top-k)."""


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(7)


def tokens_per_rank(topk_idx, num_experts, num_ranks):
    """Count tokens, not picks, with a loop of its own."""
    owner = topk_idx // (num_experts // num_ranks)
    return [int((owner == rank).any(dim=1).sum()) for rank in range(num_ranks)]


@pytest.mark.parametrize("ratio", [1.0, 1.3, 2.0, 3.5])
@pytest.mark.parametrize(("num_experts", "num_ranks", "num_topk"), SHAPES)
def test_precise_scores_reach_the_ratio(num_experts, num_ranks, num_topk, ratio):
    scores = gate.get_precise_unbalanced_scores(4096, num_experts, num_ranks, num_topk, ratio)
    assert scores.shape == (4096, num_experts)
    assert scores.dtype == torch.float32
    first, *others = tokens_per_rank(scores.topk(num_topk, dim=1).indices, num_experts, num_ranks)
    mean = sum(others) / len(others)
    assert abs(first / mean / ratio - 1) < 0.1
    assert max(others) / min(others) < 1.02


@pytest.mark.parametrize("ratio", [1.0, 2.0])
def test_random_scores_come_near_the_ratio(ratio):
    scores = gate.get_random_unbalanced_scores(4096, 256, 8, 8, ratio)
    first, *others = tokens_per_rank(scores.topk(8, dim=1).indices, 256, 8)
    assert abs(first / (sum(others) / 7) / ratio - 1) < 0.1


def test_unbalanced_scores_choose_by_precise(monkeypatch):
    monkeypatch.setattr(gate, "get_precise_unbalanced_scores", lambda *args: ("precise", args))
    monkeypatch.setattr(gate, "get_random_unbalanced_scores", lambda *args: ("random", args))
    assert gate.get_unbalanced_scores(16, 8, 2, 2, 1.5, True) == ("precise", (16, 8, 2, 2, 1.5))
    assert gate.get_unbalanced_scores(16, 8, 2, 2, 1.5, False) == ("random", (16, 8, 2, 2, 1.5))


@pytest.mark.parametrize(("num_experts", "num_ranks", "num_topk"), [*SHAPES, (16, 1, 4), (12, 6, 5)])
def test_rank_count_is_legal(num_experts, num_ranks, num_topk):
    rank_count = gate.generate_rank_count(500, num_experts, num_ranks, num_topk, 1.0)
    assert rank_count.shape == (500, num_ranks)
    assert rank_count.dtype == torch.int32
    assert (rank_count.sum(dim=1) == num_topk).all()
    assert rank_count.min() >= 0
    assert rank_count.max() <= num_experts // num_ranks
    spread = torch.where(rank_count > 0, rank_count, rank_count.amax(dim=1, keepdim=True))
    assert (rank_count.amax(dim=1) - spread.amin(dim=1)).max() <= 1, "picks are spread evenly over a token's ranks"


def test_topk_idx_follows_the_rank_count():
    rank_count = torch.tensor([[2, 0, 1], [0, 3, 0], [1, 1, 1]], dtype=torch.int32).repeat(100, 1)
    topk_idx = gate.generate_topk_idx(rank_count, 300, 12, 3, 3)
    assert topk_idx.shape == (300, 3)
    assert topk_idx.dtype == torch.int64
    for row, counts in zip(topk_idx.tolist(), rank_count.tolist(), strict=True):
        assert len(set(row)) == 3
        assert [sum(expert // 4 == rank for expert in row) for rank in range(3)] == counts
    assert set(topk_idx.flatten().tolist()) == set(range(12)), "every expert is drawn sooner or later"
    assert len(set(topk_idx[1::3, 0].tolist())) > 1, "in no fixed order"


def test_first_rank_goes_to_whom_it_must():
    # S = 2 + 1 + 2 + 1 = 6 pairs on 2 ranks; a ratio of 1 gives 3 to each, of which the two full tokens are forced
    reach = torch.tensor([2, 1, 2, 1])
    for _ in range(20):
        has_first = gate._choose_first_rank(reach, 2, 1.0)
        assert has_first[[0, 2]].all()
        assert int(has_first.sum()) == 3


def test_dealing_of_worked_example(monkeypatch):
    monkeypatch.setattr(gate.torch, "randperm", lambda *_, **__: torch.tensor([2, 0, 1]))
    counts = gate._deal_other_ranks(torch.tensor([2, 3]), torch.tensor([True, False]), 4, 4)
    assert counts.tolist() == [[2, 0, 0, 2], [0, 2, 1, 1]]


def test_scores_by_factor():
    scores = gate.get_scores_by_factor(2000, 32, 4, 5.0)
    assert scores.dtype == torch.float32
    assert 4.5 < scores[:, :8].max() < 5
    assert 0.9 < scores[:, 8:].max() < 1
    assert scores.min() >= 0


def test_factor_grows_with_the_ratio():
    low, high = (gate.map_unbalanced_ratio_to_factor(2048, 64, 8, 4, ratio) for ratio in (1.0, 2.5))
    assert 1 <= low < 1.2
    assert low < high <= 100


def test_precise_scores_keep_their_top_k_in_a_bfloat16_program():
    torch.set_default_dtype(torch.bfloat16)
    try:
        scores = gate.get_precise_unbalanced_scores(512, 64, 8, 4, 2.0)
    finally:
        torch.set_default_dtype(torch.float32)
    assert scores.dtype == torch.float32
    assert ((scores > 0.9).sum(dim=1) == 4).all()
    assert scores.max() < 1


def test_no_tokens():
    assert gate.get_precise_unbalanced_scores(0, 16, 4, 2, 2.0).shape == (0, 16)


def test_out_of_reach_is_an_error():
    # ratio 100 leaves one rank a token, whose 2 experts cannot hold 4 picks
    with pytest.raises(ValueError, match="too few for 4 picks"):
        gate.generate_rank_count(16, 16, 8, 4, 100.0)
    with pytest.raises(ValueError, match="divide evenly"):
        gate.generate_rank_count(16, 10, 4, 2, 1.0)
