"""Placements: every expert somewhere, balanced, and copies that share what their expert gets."""

from __future__ import annotations

import itertools

import pytest
import torch

from deep_ep.moe.gate import Gate
from deep_ep.placement import Placement, even_placement, move_experts, place_experts


def zipf(num_experts: int, exponent: float, seed: int = 0) -> torch.Tensor:
    order = torch.randperm(num_experts, generator=torch.Generator().manual_seed(seed))
    return (order + 1).double() ** -exponent


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("exponent", "most"), [(0.0, 1.05), (0.5, 1.05), (0.8, 1.05), (1.0, 1.05), (1.2, 1.12)])
def test_replicas_balance_the_ranks(exponent: float, most: float, seed: int) -> None:
    load = zipf(256, exponent, seed)
    placement = place_experts(load, num_ranks=64, num_replicas=64)
    assert placement.num_slots == 5
    assert placement.imbalance(load) <= most
    assert placement.imbalance(load, 8) <= placement.imbalance(load)
    if exponent >= 0.5:
        assert even_placement(256, 64).imbalance(load) > 2  # there was something to balance


def test_small_cases_are_as_good_as_trying_everything() -> None:
    for seed in range(6):
        load = torch.rand(6, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) ** 2
        best = min(
            Placement(torch.tensor(order), 6, 3).imbalance(load) for order in set(itertools.permutations(range(6)))
        )
        assert place_experts(load, 3).imbalance(load) == pytest.approx(best, rel=0.02)


def test_copies_of_an_expert_are_on_different_ranks() -> None:
    load = zipf(32, 1.0)
    placement = place_experts(load, num_ranks=8, num_replicas=16)
    for rank in range(8):
        own = placement.of_rank(rank).tolist()
        assert len(set(own)) == len(own)
    assert int(placement.num_copies.sum()) == 48


def test_more_copies_than_ranks_and_no_load_at_all_are_placed_too() -> None:
    one_hot = torch.tensor([1.0, 0.0])
    assert place_experts(one_hot, num_ranks=2, num_replicas=4).num_copies.tolist() in ([4, 2], [3, 3])
    assert place_experts(torch.zeros(8), num_ranks=4, num_replicas=4).num_slots == 3


def test_a_group_stays_on_one_node() -> None:
    load = zipf(64, 0.7)
    placement = place_experts(load, num_ranks=16, num_replicas=16, num_nodes=4, num_groups=8)
    node = torch.arange(placement.num_physical) // (placement.num_physical // 4)
    for group in range(8):
        is_of_group = placement.physical_to_logical // 8 == group
        assert node[is_of_group].unique().numel() == 1
    plain = even_placement(64, 16)
    assert placement.imbalance(load) < plain.imbalance(load)
    assert placement.imbalance(load, 4) <= plain.imbalance(load, 4)


def test_choices_take_turns_among_copies() -> None:
    placement = Placement(torch.tensor([0, 1, 2, 0, 3, 0]), num_experts=4, num_ranks=2)
    assert placement.logical_to_physical.tolist() == [[0, 3, 5], [1, -1, -1], [2, -1, -1], [4, -1, -1]]
    ids = torch.tensor([[0, 1], [0, 3], [0, -1], [0, 2]])
    assert placement.spread(ids).tolist() == [[0, 1], [3, 4], [5, -1], [0, 2]]
    assert placement.spread(ids, offset=1)[:, 0].tolist() == [3, 5, 0, 3]
    chosen = placement.spread(torch.zeros(300, 1, dtype=torch.int64))
    assert torch.bincount(chosen.flatten(), minlength=6).tolist() == [100, 0, 0, 100, 0, 100]


def test_a_gate_with_a_placement_chooses_copies_of_the_same_experts() -> None:
    torch.manual_seed(0)
    gate, x = Gate(16, 8, 3), torch.randn(50, 16)
    logical = gate(x)
    placement = place_experts(gate.load, num_ranks=4, num_replicas=4)
    gate.set_placement(placement)
    physical = gate(x)
    assert torch.equal(placement.physical_to_logical[physical.topk_idx], logical.topk_idx)
    assert torch.equal(physical.topk_weights, logical.topk_weights)
    assert gate.load.sum() == 2 * 50 * 3  # of logical experts, both times
    assert gate.load.numel() == 8
    assert not {"copies", "num_copies"} & set(gate.state_dict())
    gate.set_placement(None)
    assert torch.equal(gate(x).topk_idx, logical.topk_idx)


def test_one_rank_moves_its_experts_alone() -> None:
    old, new = Placement(torch.tensor([0, 1, 2, 0]), 3, 1), Placement(torch.tensor([2, 1, 1, 0]), 3, 1)
    rows = torch.tensor([[0.0], [1.0], [2.0], [0.0]])
    move_experts([rows], old, new, 0, None)
    assert rows.flatten().tolist() == [2.0, 1.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: place_experts(torch.ones(4), 3), "divide evenly among the ranks"),
        (lambda: place_experts(torch.tensor([1.0, -1.0]), 2), "not negative"),
        (lambda: place_experts(torch.ones(4), 4, 4, num_nodes=3), "num_nodes"),
        (lambda: Placement(torch.tensor([0, 0]), 2, 2), "must be somewhere"),
        (lambda: Placement(torch.tensor([0, 1]), 2, 3), "divide evenly"),
        (lambda: Gate(4, 4, 1).set_placement(even_placement(8, 2)), "must be of 4 experts"),
        (lambda: move_experts([], even_placement(4, 2), even_placement(4, 4), 0, None), "as many experts and ranks"),
    ],
)
def test_what_does_not_fit_is_refused(call: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        call()  # type: ignore[operator]
