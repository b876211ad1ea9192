"""The gate: its choices against plain loops, its weights' gradients, balance, and dropping."""

from __future__ import annotations

import itertools

import pytest
import torch

from deep_ep.moe import gate as steps
from deep_ep.moe.gate import Gate, GateOptions
from deep_ep.placement import place_experts

T, H, E, K = 24, 16, 12, 3


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def loop_choice(scores: list[float], topk: int, num_groups: int, topk_groups: int, num_deciding: int) -> list[int]:
    """One token's experts, by sorting."""
    size = len(scores) // num_groups
    groups = [range(start, start + size) for start in range(0, len(scores), size)]
    groups.sort(key=lambda group: -sum(sorted((scores[e] for e in group), reverse=True)[:num_deciding]))
    return sorted(itertools.chain(*groups[:topk_groups]), key=lambda e: -scores[e])[:topk]


@pytest.mark.parametrize("num_deciding", [1, 2, 9])
@pytest.mark.parametrize(("num_groups", "topk_groups"), [(1, 1), (4, 1), (4, 2), (3, 3), (12, 3)])
def test_choice_against_a_loop(num_groups: int, topk_groups: int, num_deciding: int) -> None:
    scores = torch.randn(T, E)  # negative ones too, as a bias makes them
    chosen = steps.choose_experts(scores, K, num_groups, topk_groups, num_deciding)
    assert chosen.tolist() == [
        loop_choice(row, K, num_groups, topk_groups, num_deciding) for row in scores.double().tolist()
    ]


def test_worked_examples() -> None:
    assert steps.choose_experts(torch.tensor([[9.0, 0, 0, 0, 5, 6]]), 2, num_groups=3).tolist() == [[5, 4]]
    ids, weights = torch.tensor([[0], [0], [1]]), torch.tensor([[0.2], [0.5], [0.1]])
    assert steps.drop_beyond_capacity(ids, weights, 2, 1)[0].tolist() == [[-1], [0], [1]]
    assert steps.drop_beyond_capacity(ids, weights, 2, 1, "first")[0].tolist() == [[0], [-1], [1]]


@pytest.mark.parametrize(
    "arguments", [(0,), (13,), (4, 4, 1), (2, 5, 1), (2, 4, 0), (2, 4, 5)], ids=lambda arguments: str(arguments)
)
def test_impossible_choices_are_refused(arguments: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="gate: "):
        steps.choose_experts(torch.randn(T, E), *arguments)


def test_names_are_checked() -> None:
    with pytest.raises(ValueError, match="'sigmoid' or 'softmax', got 'relu'"):
        steps.score(torch.randn(T, E), "relu")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="'heaviest' or 'first', got 'last'"):
        steps.drop_beyond_capacity(torch.zeros(1, 1).long(), torch.ones(1, 1), E, 1, "last")  # type: ignore[arg-type]


@pytest.mark.parametrize("scoring", ["sigmoid", "softmax"])
@pytest.mark.parametrize("is_normalized", [False, True])
def test_weights_and_their_gradients(scoring: steps.Scoring, is_normalized: bool) -> None:
    logits = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    topk_idx = steps.choose_experts(steps.score(logits, scoring), K)
    topk_idx[3, 1] = topk_idx[5] = -1

    def weights_of(logits: torch.Tensor) -> torch.Tensor:
        return steps.weigh(steps.score(logits, scoring), topk_idx, is_normalized, scale=2.5)

    weights = weights_of(logits)
    assert (weights[topk_idx < 0] == 0).all()
    assert (weights[topk_idx >= 0] > 0).all()
    if is_normalized:
        assert torch.allclose(weights.sum(1), torch.where((topk_idx >= 0).any(1), 2.5, 0.0).double())
    assert torch.autograd.gradcheck(weights_of, logits)


def test_scores_are_not_made_in_less_than_fp32() -> None:
    assert steps.score(torch.randn(T, E).bfloat16()).dtype == torch.float32
    gate = Gate(H, E, K).bfloat16()
    assert gate(torch.randn(T, H).bfloat16()).topk_weights.dtype == torch.float32
    assert Gate(H, E, K, dtype=torch.float64)(torch.randn(T, H).double()).topk_weights.dtype == torch.float64


@pytest.mark.parametrize("keep", ["heaviest", "first"])
@pytest.mark.parametrize("capacity", [0, 1, 4, T])
def test_capacity_against_a_loop(keep: steps.Keep, capacity: int) -> None:
    topk_idx = torch.rand(T, E).mul(torch.arange(1, E + 1)).topk(K).indices  # skewed
    topk_idx[torch.rand(T, K) < 0.2] = -1
    topk_weights = torch.rand(T, K).masked_fill(topk_idx < 0, 0).requires_grad_()
    ids, weights = steps.drop_beyond_capacity(topk_idx, topk_weights, E, capacity, keep)
    for expert in range(E):
        slots = (topk_idx == expert).nonzero().tolist()
        if keep == "heaviest":
            slots.sort(key=lambda slot: -topk_weights[slot[0], slot[1]].item())
        for place, (token, k) in enumerate(slots):
            expected = (expert, topk_weights[token, k].item()) if place < capacity else (-1, 0.0)
            assert (ids[token, k].item(), weights[token, k].item()) == expected
    weights.sum().backward()
    assert torch.equal(topk_weights.grad[topk_idx >= 0], (ids >= 0)[topk_idx >= 0].float())


def test_the_bias_steers_and_does_not_weigh() -> None:
    gate = Gate(H, E, K)
    gate.bias[7] = 100
    routes = gate(torch.randn(T, H))
    assert (routes.topk_idx == 7).any(1).all()
    assert torch.allclose(routes.topk_weights.sum(1), torch.ones(T))
    assert (routes.topk_weights <= 1).all()


def test_the_bias_balances() -> None:
    gate = Gate(H, E, K)
    x = torch.randn(512, H) + 2 * gate.weight[0].detach()  # all like expert 0 and its likes
    with torch.no_grad():
        gate(x)
        first = gate.load.clone()
        for _ in range(300):
            gate.update_bias(speed=5e-3)
            assert not gate.load.any()
            gate(x)
    even = 512 * K / E
    assert first.max() > 3 * even
    assert gate.load.max() < 1.3 * even
    assert torch.equal(steps.balanced_bias(torch.zeros(3), torch.tensor([1, 2, 3]), 0.5), torch.tensor([0.5, 0, -0.5]))


def test_load_is_counted_in_training_only_and_before_dropping() -> None:
    gate = Gate(H, E, K, GateOptions(capacity_factor=0.5))
    routes = gate(torch.randn(T, H))
    assert gate.load.sum() == T * K > (routes.topk_idx >= 0).sum()
    assert torch.bincount(routes.topk_idx[routes.topk_idx >= 0]).max() <= T * K / E / 2
    gate.eval()(torch.randn(T, H))
    assert gate.load.sum() == T * K
    assert set(gate.state_dict()) == {"weight", "bias"}


def test_counters_have_values_wherever_parameters_come_from() -> None:
    """No state dict has them: neither after `to_empty`, nor where a state replaces parameters of the meta device."""
    placement = place_experts(torch.arange(E) + 1.0, 2, 2)
    state = Gate(H, E, K).state_dict()
    for is_assigned in (False, True):
        gate = Gate(H, E, K, device="meta")
        gate.set_placement(placement, 1)
        if not is_assigned:
            gate.to_empty(device="cpu")
        gate.load_state_dict(state, assign=is_assigned)
        assert torch.equal(gate.copies, placement.logical_to_physical)
        assert torch.equal(gate.num_copies, placement.num_copies)
        gate(torch.randn(T, H))
        assert gate.load.sum() == T * K
        gate.update_bias()


def test_the_bias_moves_every_few_calls_and_checkpoints_lie_between() -> None:
    options, load = GateOptions(update_every=3), torch.randint(9, (6, E))
    gate, once = Gate(H, E, K, options), Gate(H, E, K)
    for call in range(6):
        gate.load += load[call]
        once.load += load[call]
        gate.update_bias()
        if call % 3 == 2:
            once.update_bias()
        assert torch.equal(gate.bias, once.bias)
        assert not gate.load.any()
        state, gate = gate.state_dict(), Gate(H, E, K, options, device="meta").to_empty(device="cpu")
        gate.load_state_dict(state)
    once.load_state_dict(state)  # which has sums that it does not need
    assert set(once.state_dict()) == {"weight", "bias"}
    gate.sums.fill_(7)
    gate.load_state_dict(once.state_dict())  # which has none
    assert not gate.sums.any()


def test_the_bias_keeps_its_precision() -> None:
    gate = Gate(H, E, K).bfloat16()
    assert gate.weight.dtype == torch.bfloat16
    for _ in range(100):
        gate.load[0] = 9
        gate.update_bias(1e-3)
    assert gate.bias.double() == pytest.approx([-0.1] + [0.1] * (E - 1), rel=1e-4)
    assert Gate(H, E, K, device="meta").half().to_empty(device="cpu").bias.dtype == torch.float32
    assert Gate(H, E, K).double().bias.dtype == torch.float64


def test_sequence_balance_loss_against_a_loop() -> None:
    logits = torch.randn(T, E, dtype=torch.float64, requires_grad=True)
    topk_idx = logits.topk(K).indices
    topk_idx[0], topk_idx[1] = -1, torch.tensor([0, -1, 2])

    def loss_of(logits: torch.Tensor) -> torch.Tensor:
        return steps.sequence_balance_loss(logits.sigmoid(), topk_idx, num_sequences=2)

    scores, expected = logits.detach().sigmoid(), 0.0
    for begin in (0, T // 2):
        tokens = range(begin, begin + T // 2)
        for expert in range(E):
            often = sum(expert in topk_idx[token].tolist() for token in tokens) * E / (K * len(tokens))
            expected += often * sum(float(scores[t, expert] / scores[t].sum()) for t in tokens) / len(tokens) / 2
    assert loss_of(logits).item() == pytest.approx(expected, abs=1e-12)
    assert torch.autograd.gradcheck(loss_of, logits)
    with pytest.raises(ValueError, match="24 tokens must divide evenly"):
        steps.sequence_balance_loss(scores, topk_idx, 5)


def test_balance_loss_of_balanced_and_of_no_tokens() -> None:
    balanced = torch.arange(E).view(E // K, K)
    assert steps.sequence_balance_loss(torch.rand(E // K, E), balanced).item() == pytest.approx(1)
    one_sided = torch.eye(E)[:K].sum(0).expand(E // K, E)
    assert steps.sequence_balance_loss(one_sided, balanced[:1].expand(E // K, K)).item() == pytest.approx(E / K)
    gate = Gate(H, E, K, GateOptions(balance_loss=0.1, capacity_factor=1.0))
    routes = gate(torch.randn(0, H))
    routes.balance_loss.backward()
    assert routes.topk_idx.shape == routes.topk_weights.shape == (0, K)
    assert routes.balance_loss.item() == 0
    assert not gate.weight.grad.any()
