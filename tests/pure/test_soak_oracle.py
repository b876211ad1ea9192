"""The dense oracle of the soak: worked examples, and the same answers as the oracle of the tests, which is loops."""

from __future__ import annotations

import pytest
import torch

from deep_ep import quant, reference
from deep_ep.tools.soak import oracle
from deep_ep.tools.soak.checks import same
from deep_ep.tools.soak.data import Data, Limits

NUM_RANKS = 4


def inputs(number: int, num_nodes: int = 1) -> Data:
    return Data(3, number, NUM_RANKS, num_nodes, Limits(tokens=9, hidden=6))


def test_a_worked_example() -> None:
    """Two ranks with two experts each. Token 0 of rank 0 goes to both ranks, all others go to rank 1."""
    ids = [torch.tensor([[0, 3], [-1, 2]]), torch.tensor([[2, 2]])]
    seen = oracle.layout(ids[0], 4, 2, 1)
    assert [one.tolist() for one in seen] == [[1, 2], [2], [1, 0, 1, 1], [[True, True], [False, True]]]
    masks = [seen.mask, oracle.layout(ids[1], 4, 2, 1).mask]
    rows = oracle.received([torch.tensor([[1], [2]]), torch.tensor([[3]])], masks, 1)
    assert rows.tolist() == [[1], [2], [3]]
    assert oracle.source_tokens(masks, 1).tolist() == [0, 1, 0]
    assert oracle.rows_of_tokens(masks, 1, 1).tolist() == [2]
    idx, weights = oracle.local_selections(torch.tensor([[0, 3], [-1, 2]]), torch.tensor([[5.0, 6], [7, 8]]), 1, 2)
    assert (idx.tolist(), weights.tolist()) == ([[-1, 1], [-1, 0]], [[0.0, 6.0], [0.0, 8.0]])
    got = oracle.combined([torch.tensor([[10.0], [0.0]]), torch.tensor([[4.0], [5.0]])], seen.mask, (), 1)
    assert got.tolist() == [[14.0], [5.0]]


def test_ids_at_the_ends_of_their_range_are_nobodys() -> None:
    limits = torch.iinfo(torch.int64)
    ids = torch.tensor([[limits.min, limits.max, limits.min + 5]])
    assert not oracle.layout(ids, 4, 2, 1).mask.any()
    idx, _ = oracle.local_selections(ids, torch.ones(1, 3), 1, 2)
    assert idx.tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize("num_nodes", [1, 2, 4])
@pytest.mark.parametrize("number", range(12))
def test_both_oracles_agree_on_normal_calls(number: int, num_nodes: int) -> None:
    data = inputs(number, num_nodes)
    num_tokens = data.num_tokens()
    routing = data.routing(num_tokens)
    size = NUM_RANKS // num_nodes
    xs = [data.bits((count, 6), torch.float32, rank, 0) for rank, count in enumerate(num_tokens)]
    expected = reference.dispatch(
        xs,
        routing.masks,
        None,
        routing.ids,
        routing.weights,
        routing.num_experts,
        1,
        [o.per_expert for o in routing.layouts],
    )
    for rank, want in enumerate(expected):
        for got, other in zip(
            routing.layouts[rank],
            reference.layout(routing.ids[rank], routing.num_experts, NUM_RANKS, size),
            strict=True,
        ):
            same("layout", got, other)
        same("recv_x", oracle.received(xs, routing.masks, rank), want.recv_x)
        idx, weights = (oracle.received(part, routing.masks, rank) for part in (routing.ids, routing.weights))
        idx, weights = oracle.local_selections(idx, weights, rank, routing.num_experts // NUM_RANKS)
        same("recv_topk_idx", idx, want.recv_topk_idx)
        same("recv_topk_weights", weights, want.recv_topk_weights)
    ys = [data.numbers((one.recv_x.size(0), 6), torch.bfloat16, rank, 5) for rank, one in enumerate(expected)]
    biases = [data.numbers((count, 6), torch.bfloat16, rank, 7) for rank, count in enumerate(num_tokens)]
    ranks = range(NUM_RANKS)
    for bias in (None, biases):
        sums = reference.combine(ys, routing.masks, bias, ranks_per_node=size)
        for source in ranks:
            rows = [_rows(ys[rank], routing.masks, source, rank) for rank in ranks]
            own = () if bias is None else (bias[source],)
            got = oracle.combined(rows, routing.masks[source], own, num_nodes)
            same("combined_x", got.nan_to_num(7.0), sums[source].combined_x.nan_to_num(7.0))


def _rows(given: torch.Tensor, masks: list[torch.Tensor], source: int, rank: int) -> torch.Tensor:
    where = oracle.rows_of_tokens(masks, source, rank)
    return torch.cat([given, given.new_zeros(1, given.size(1))])[where.clamp(max=given.size(0))]


@pytest.mark.parametrize("options", [(False, False), (True, False), (True, True)])
@pytest.mark.parametrize("hidden", [1, 100, 128, 700])
def test_fp8_is_cast_as_the_library_casts_it(hidden: int, options: tuple[bool, bool]) -> None:
    x = (torch.randn(9, hidden) * torch.logspace(-7, 6, 9)[:, None]).bfloat16()
    x[3] = 0
    for got, expected in zip(oracle.fp8(x, *options), quant.cast_fp8(x, *options), strict=True):
        same("fp8", got, expected)
    assert oracle.fp8(x[:0], *options)[0].shape == (0, hidden)


def test_low_latency_rows_and_sums() -> None:
    ids = [torch.tensor([[0, 0], [1, -1]]), torch.tensor([[0, 1]])]
    want = oracle.packed(ids, 0, ())
    assert (want.sources.tolist(), want.tokens.tolist(), want.counts) == ([0, 1], [0, 0], [1, 1])
    assert oracle.packed(ids, 0, {0}).counts == [0, 1]
    experts, tokens = torch.tensor([[1.0], [10.0]]), torch.tensor([[2.0], [3.0]])
    weights = torch.tensor([[0.5, 1.0], [2.0, 4.0]])
    # Token 0: 0.5 * 3 + 1 * 3, of expert 0 twice; token 1: 2 * 13.
    assert oracle.weighted_sum(experts, tokens, ids[0], weights, 1, ()).tolist() == [[4.5], [26.0]]
    assert oracle.weighted_sum(experts, tokens, ids[0], weights, 1, {1}).tolist() == [[4.5], [0.0]]
