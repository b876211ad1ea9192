"""`deep_ep.layout` against the oracle's loops, and the numbers of its docstrings."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from deep_ep import layout, reference

ID_DTYPES = (torch.int32, torch.int64)


@st.composite
def routings(draw: st.DrawFn) -> tuple[torch.Tensor, int, int, int]:
    """`topk_idx`, experts, ranks, ranks per node. Ids repeat, and some are negative or too large."""
    num_ranks = draw(st.integers(1, 8))
    num_experts = num_ranks * draw(st.integers(1, 4))
    ranks_per_node = draw(st.sampled_from([size for size in range(1, num_ranks + 1) if num_ranks % size == 0]))
    num_tokens, num_topk = draw(st.integers(0, 12)), draw(st.integers(1, 6))
    far = st.sampled_from([-(2**31), -2, num_experts, num_experts + 1, 2**31 - 1])
    ids = st.one_of(st.integers(-1, num_experts - 1), st.integers(0, num_experts - 1), far)
    rows = draw(st.lists(st.lists(ids, min_size=num_topk, max_size=num_topk), min_size=num_tokens, max_size=num_tokens))
    dtype = draw(st.sampled_from(ID_DTYPES))
    topk_idx = torch.tensor(rows, dtype=dtype).view(num_tokens, num_topk)
    return topk_idx, num_experts, num_ranks, ranks_per_node


@given(routings())
def test_the_layout_is_the_oracles(routing: tuple[torch.Tensor, int, int, int]):
    topk_idx, num_experts, num_ranks, ranks_per_node = routing
    before = topk_idx.clone()
    found = layout.dispatch_layout(topk_idx, num_experts, num_ranks, ranks_per_node)
    expected = reference.layout(topk_idx, num_experts, num_ranks, ranks_per_node)
    for name in layout.DispatchLayout._fields:
        ours, theirs = getattr(found, name), getattr(expected, name)
        assert ours.dtype == theirs.dtype, name
        assert ours.shape == theirs.shape, name
        assert torch.equal(ours, theirs), name
        assert ours.is_contiguous(), name
    assert torch.equal(topk_idx, before)


@given(routings())
def test_counts_follow_from_the_mask(routing: tuple[torch.Tensor, int, int, int]):
    topk_idx, num_experts, num_ranks, ranks_per_node = routing
    found = layout.dispatch_layout(topk_idx, num_experts, num_ranks, ranks_per_node)
    sent = found.is_token_in_rank.tolist()
    assert found.num_tokens_per_rank.tolist() == [sum(row[rank] for row in sent) for rank in range(num_ranks)]
    chosen = [expert for row in topk_idx.tolist() for expert in row if 0 <= expert < num_experts]
    assert int(found.num_tokens_per_expert.sum()) == len(chosen)


@pytest.mark.parametrize("dtype", ID_DTYPES)
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_no_tokens_give_zeros(num_ranks: int, dtype: torch.dtype):
    found = layout.dispatch_layout(torch.empty(0, 4, dtype=dtype), 2 * num_ranks, num_ranks, num_ranks)
    assert found.num_tokens_per_rank.tolist() == [0] * num_ranks
    assert found.num_tokens_per_node.tolist() == [0]
    assert found.num_tokens_per_expert.tolist() == [0] * (2 * num_ranks)
    assert found.is_token_in_rank.shape == (0, num_ranks)


def test_a_token_counts_once_per_rank_and_once_per_node_but_each_selection_counts():
    # Experts 0 and 1 on rank 0, 2 and 3 on rank 1 (one node), 4 to 7 on the ranks of the other node.
    found = layout.dispatch_layout(torch.tensor([[0, 1, 1, 2], [5, 6, -1, 8]]), 8, 4, 2)
    assert found.num_tokens_per_rank.tolist() == [1, 1, 1, 1]
    assert found.num_tokens_per_node.tolist() == [1, 1]
    assert found.num_tokens_per_expert.tolist() == [1, 2, 1, 0, 0, 1, 1, 0]
    assert found.is_token_in_rank.tolist() == [[True, True, False, False], [False, False, True, True]]


@pytest.mark.parametrize("dtype", ID_DTYPES)
def test_example_of_dispatch_layout(dtype: torch.dtype):
    found = layout.dispatch_layout(torch.tensor([[0, 3], [-1, 2]], dtype=dtype), 4, 2, 2)
    assert found.num_tokens_per_rank.tolist() == [1, 2]
    assert found.num_tokens_per_node.tolist() == [2]
    assert found.num_tokens_per_expert.tolist() == [1, 0, 1, 1]
    assert found.is_token_in_rank.tolist() == [[True, True], [False, True]]


# Slots ---------------------------------------------------------------------------------------------------------------


@st.composite
def masks_of_all_ranks(draw: st.DrawFn) -> list[torch.Tensor]:
    num_ranks = draw(st.integers(1, 8))
    masks = []
    for _ in range(num_ranks):
        num_tokens = draw(st.integers(0, 6))
        row = st.lists(st.booleans(), min_size=num_ranks, max_size=num_ranks)
        rows = draw(st.lists(row, min_size=num_tokens, max_size=num_tokens))
        masks.append(torch.tensor(rows, dtype=torch.bool).view(num_tokens, num_ranks))
    return masks


def counts_of(masks: list[torch.Tensor]) -> torch.Tensor:
    return torch.stack([mask.sum(0, dtype=torch.int32) for mask in masks])


@given(masks_of_all_ranks())
def test_the_prefix_matrix_counts_rows_up_to_each_source(masks: list[torch.Tensor]):
    num_tokens = counts_of(masks)
    prefix = layout.rank_prefix_matrix(num_tokens)
    assert prefix.dtype == torch.int32
    for source in range(len(masks)):
        for rank in range(len(masks)):
            assert int(prefix[source, rank]) == sum(int(num_tokens[s, rank]) for s in range(source + 1))


@given(masks_of_all_ranks())
@example([torch.ones(3, 2, dtype=torch.bool), torch.zeros(0, 2, dtype=torch.bool)])
def test_slots_are_handed_out_by_source_rank_then_token(masks: list[torch.Tensor]):
    num_ranks = len(masks)
    prefix = layout.rank_prefix_matrix(counts_of(masks))
    next_slot = [0] * num_ranks
    for source, mask in enumerate(masks):
        slots = layout.token_slots(mask, prefix, source)
        assert slots.dtype == torch.int32
        assert slots.shape == mask.shape
        for token, row in enumerate(mask.tolist()):
            for rank, is_sent in enumerate(row):
                assert int(slots[token, rank]) == (next_slot[rank] if is_sent else -1)
                next_slot[rank] += is_sent
    assert next_slot == prefix[-1].tolist()


def test_the_prefix_matrix_of_two_ranks():
    num_tokens = torch.tensor([[5, 7], [1, 2]], dtype=torch.int32)
    assert layout.rank_prefix_matrix(num_tokens).tolist() == [[5, 7], [6, 9]]


def test_example_of_token_slots():
    mask = torch.tensor([[1, 1], [0, 1]], dtype=torch.bool)
    prefix = torch.tensor([[5, 7], [6, 9]], dtype=torch.int32)
    assert layout.token_slots(mask, prefix, 1).tolist() == [[5, 7], [-1, 8]]


def test_the_first_rank_starts_at_slot_zero():
    mask = torch.tensor([[1, 0], [1, 1]], dtype=torch.bool)
    prefix = torch.tensor([[2, 1], [6, 9]], dtype=torch.int32)
    assert layout.token_slots(mask, prefix, 0).tolist() == [[0, -1], [1, 0]]
