"""The oracle, against worked examples and properties that do not depend on how it is written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep import reference

BF16 = torch.bfloat16


def ones_for(ranks_of_token: list[list[int]], num_ranks: int) -> torch.Tensor:
    """`[T, R]` bool from the destination ranks of each token."""
    mask = torch.zeros((len(ranks_of_token), num_ranks), dtype=torch.bool)
    for token, ranks in enumerate(ranks_of_token):
        for rank in ranks:
            mask[token, rank] = True
    return mask


def random_case(seed: int, num_ranks: int, num_local_experts: int, num_topk: int, max_tokens: int):
    """Ids of all ranks: some negative, some too large, some ranks without tokens."""
    generator = torch.Generator().manual_seed(seed)
    num_experts = num_ranks * num_local_experts
    topk_idx = []
    for _ in range(num_ranks):
        num_tokens = int(torch.randint(0, max_tokens + 1, (), generator=generator))
        topk_idx.append(torch.randint(-2, num_experts + 2, (num_tokens, num_topk), generator=generator))
    layouts = [reference.layout(ids, num_experts, num_ranks) for ids in topk_idx]
    return generator, num_experts, topk_idx, layouts


cases = st.builds(
    random_case,
    seed=st.integers(0, 2**31),
    num_ranks=st.integers(1, 6),
    num_local_experts=st.integers(1, 3),
    num_topk=st.integers(0, 4),
    max_tokens=st.integers(0, 7),
)


def test_layout_literal():
    # 4 ranks with 2 experts each, 2 ranks per node.
    topk_idx = torch.tensor(
        [
            [0, 1, 7],  # rank 0 twice, rank 3: nodes 0 and 1
            [2, -1, 0],  # ranks 1 and 0: node 0
            [-1, -1, -1],  # nowhere
            [5, 5, 8],  # rank 2 (twice the same expert); 8 does not exist
        ]
    )
    got = reference.layout(topk_idx, num_experts=8, num_ranks=4, ranks_per_node=2)
    assert got.num_tokens_per_rank.tolist() == [2, 1, 1, 1]
    assert got.num_tokens_per_node.tolist() == [2, 2]
    assert got.num_tokens_per_expert.tolist() == [2, 1, 1, 0, 0, 2, 0, 1]
    assert torch.equal(got.is_token_in_rank, ones_for([[0, 3], [0, 1], [], [2]], 4))
    assert {t.dtype for t in got[:3]} == {torch.int32}


def test_layout_docstring_example():
    got = reference.layout(torch.tensor([[0, 1], [1, 3], [-1, 2]]), num_experts=4, num_ranks=2)
    assert got.num_tokens_per_rank.tolist() == [2, 2]
    assert got.num_tokens_per_node.tolist() == [3]
    assert got.num_tokens_per_expert.tolist() == [1, 2, 1, 1]


def test_layout_of_nodes_that_are_not_full():
    got = reference.layout(torch.tensor([[0, 2], [1, 0]]), num_experts=3, num_ranks=3, ranks_per_node=2)
    assert got.num_tokens_per_node.tolist() == [2, 1]


def test_layout_of_no_tokens():
    got = reference.layout(torch.empty((0, 2), dtype=torch.int32), num_experts=4, num_ranks=2)
    assert got.num_tokens_per_rank.tolist() == [0, 0]
    assert got.is_token_in_rank.shape == (0, 2)


@pytest.mark.parametrize("num_experts", [3, None])
def test_experts_must_divide_among_ranks(num_experts):
    with pytest.raises(ValueError, match="multiple of 2 ranks"):
        reference.layout(torch.zeros((1, 1), dtype=torch.int64), num_experts=num_experts, num_ranks=2)


def literal_dispatch() -> list[reference.Dispatched]:
    """Two ranks with two experts each; rank 0 has three tokens, rank 1 one."""
    topk_idx = [torch.tensor([[0, 3], [2, 9], [1, 0]]), torch.tensor([[3, 1]])]
    return reference.dispatch(
        xs=[torch.tensor([[10], [11], [12]]), torch.tensor([[20]])],
        masks=[ones_for([[0, 1], [1], [0]], 2), ones_for([[0, 1]], 2)],
        scales=[torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), torch.tensor([[7.0, 8.0]])],
        topk_idx=topk_idx,
        topk_weights=[torch.tensor([[0.5, 0.25], [1.0, 2.0], [3.0, 4.0]]), torch.tensor([[5.0, 6.0]])],
        num_experts=4,
        expert_alignment=4,
        num_tokens_per_expert=[torch.tensor([2, 1, 1, 1]), torch.tensor([0, 4, 0, 3])],
    )


def test_dispatch_literal_rank_0():
    got = literal_dispatch()[0]
    assert got.recv_x.tolist() == [[10], [12], [20]]
    assert got.recv_scales.tolist() == [[1.0, 2.0], [5.0, 6.0], [7.0, 8.0]]
    assert got.recv_topk_idx.tolist() == [[0, -1], [1, 0], [-1, 1]]
    assert got.recv_topk_weights.tolist() == [[0.5, 0.0], [3.0, 4.0], [0.0, 6.0]]
    assert got.num_recv_tokens_per_expert_list == [4, 8]
    assert (got.src_rank, got.src_token) == ([0, 0, 1], [0, 2, 0])


def test_dispatch_literal_rank_1():
    got = literal_dispatch()[1]
    assert got.recv_x.tolist() == [[10], [11], [20]]
    assert got.recv_scales.tolist() == [[1.0, 2.0], [3.0, 4.0], [7.0, 8.0]]
    assert got.recv_topk_idx.tolist() == [[-1, 1], [0, -1], [1, -1]]
    assert got.recv_topk_weights.tolist() == [[0.0, 0.25], [1.0, 0.0], [5.0, 0.0]]
    assert got.num_recv_tokens_per_expert_list == [4, 4]
    assert (got.src_rank, got.src_token) == ([0, 0, 1], [0, 1, 0])


def test_masks_decide_where_tokens_go():
    # The ids say rank 0, the mask says rank 1: the row goes to rank 1, where none of its ids is local.
    empty = torch.empty((0, 1), dtype=torch.int32)
    rank_0, rank_1 = reference.dispatch(
        xs=[torch.tensor([[1.5]]), torch.empty(0, 1)],
        masks=[ones_for([[1]], 2), ones_for([], 2)],
        topk_idx=[torch.tensor([[0]], dtype=torch.int32), empty],
        topk_weights=[torch.tensor([[0.5]]), torch.empty(0, 1)],
        num_experts=2,
    )
    assert rank_0.recv_x.shape == (0, 1)
    assert rank_1.recv_x.tolist() == [[1.5]]
    assert rank_1.recv_topk_idx.tolist() == [[-1]]
    assert rank_1.recv_topk_idx.dtype == torch.int32
    assert rank_1.recv_topk_weights.tolist() == [[0.0]]
    assert rank_1.num_recv_tokens_per_expert_list is None


def test_dispatch_without_topk():
    (got,) = reference.dispatch([torch.tensor([[1.0]])], [ones_for([[0]], 1)])
    assert (got.recv_scales, got.recv_topk_idx, got.recv_topk_weights) == (None, None, None)


def test_weights_need_ids():
    with pytest.raises(ValueError, match="topk_weights needs topk_idx"):
        reference.dispatch([torch.ones(1, 1)], [ones_for([[0]], 1)], topk_weights=[torch.ones(1, 1)], num_experts=1)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e4m3fn, torch.int32, torch.float64])
def test_payload_is_copied_bit_for_bit(dtype):
    generator = torch.Generator().manual_seed(5)
    raw = [torch.randint(0, 256, (3, 16), dtype=torch.uint8, generator=generator) for _ in range(2)]
    xs = [r.view(dtype) for r in raw]
    before = [r.clone() for r in raw]
    rank_0, rank_1 = reference.dispatch(xs, [ones_for([[0], [1], [0]], 2), ones_for([[0, 1], [], [0]], 2)])
    assert rank_0.recv_x.dtype == dtype
    assert torch.equal(rank_0.recv_x.view(torch.uint8), torch.stack([raw[0][0], raw[0][2], raw[1][0], raw[1][2]]))
    assert torch.equal(rank_1.recv_x.view(torch.uint8), torch.stack([raw[0][1], raw[1][0]]))
    rank_0.recv_x.view(torch.uint8).zero_()
    assert all(torch.equal(r, b) for r, b in zip(raw, before, strict=True))


def test_scales_become_row_major():
    scales = torch.arange(6.0).reshape(2, 3).T.contiguous().T
    assert not scales.is_contiguous()
    (got,) = reference.dispatch([torch.zeros(2, 1)], [ones_for([[0], [0]], 1)], scales=[scales])
    assert got.recv_scales.is_contiguous()
    assert torch.equal(got.recv_scales, scales)


def combine_one_token(
    parts: list[float], dtype: torch.dtype = BF16, bias: reference.Bias = None, ranks_per_node: int | None = None
) -> float:
    """Combine one token of rank 0 to which rank d returns `parts[d]`."""
    num_ranks = len(parts)
    masks = [ones_for([list(range(num_ranks))], num_ranks)] + [ones_for([], num_ranks)] * (num_ranks - 1)
    ys = [torch.tensor([[part]], dtype=dtype) for part in parts]
    biases = [bias] + [None] * (num_ranks - 1)
    return reference.combine(ys, masks, biases, ranks_per_node=ranks_per_node)[0].combined_x.item()


def test_combine_rounds_once_on_one_node():
    # Next to 1 BF16 has a step of 2**-7. Adding 2**-8 in BF16 would round back to 1 both times.
    assert combine_one_token([1.0, 2.0**-8, 2.0**-8]) == 1 + 2.0**-7
    assert combine_one_token([1.0, 2.0**-8, 2.0**-8], ranks_per_node=3) == 1 + 2.0**-7
    assert combine_one_token([1.0, 2.0**-8, 2.0**-8], ranks_per_node=8) == 1 + 2.0**-7


def test_combine_rounds_per_node():
    assert combine_one_token([1.0, 2.0**-8, 2.0**-8], ranks_per_node=2) == 1.0
    # The small ones on one node: their sum survives, and the total needs no rounding.
    assert combine_one_token([1.0, 0.0, 2.0**-8, 2.0**-8], ranks_per_node=2) == 1 + 2.0**-7
    # Node sums 1 + 2**-7 and 2**-8: the last rounding goes to the even neighbour, 1 + 2**-6.
    assert combine_one_token([1.0, 2.0**-7, 2.0**-8], ranks_per_node=2) == 1 + 2.0**-6


def test_combine_adds_ranks_in_ascending_order():
    big = 2.0**24
    # In float32 2**24 + 1 is 2**24.
    assert combine_one_token([big, 1.0, -big], dtype=torch.float32) == 0.0
    assert combine_one_token([big, -big, 1.0], dtype=torch.float32) == 1.0
    assert combine_one_token([1.0, big, -big], dtype=torch.float32) == 0.0
    # Nodes of two: (2**24) + (1 - 2**24) loses nothing that one long sum would.
    assert combine_one_token([big, 0.0, 1.0, -big], dtype=torch.float32, ranks_per_node=2) == 1.0


def test_combine_of_float64_accumulates_in_float64():
    assert combine_one_token([2.0**24, 1.0, -(2.0**24)], dtype=torch.float64) == 1.0


def test_combine_of_float16_rounds_to_float16():
    # The step of FP16 next to 1 is 2**-10.
    assert combine_one_token([1.0, 2.0**-11, 2.0**-11], dtype=torch.float16) == 1 + 2.0**-10
    assert combine_one_token([1.0, 2.0**-11, 2.0**-11], dtype=torch.float16, ranks_per_node=2) == 1.0


def test_biases_come_first():
    def f32(value: float) -> torch.Tensor:
        return torch.tensor([[value]], dtype=torch.float32)

    big = 2.0**24
    assert combine_one_token([-big], torch.float32, bias=(f32(big), f32(1.0))) == 0.0
    assert combine_one_token([1.0], torch.float32, bias=(f32(big), f32(-big))) == 1.0
    assert combine_one_token([1.0, 2.0], torch.float32, bias=f32(4.0)) == 7.0
    assert combine_one_token([1.0, 2.0], torch.float32, bias=(None, f32(8.0))) == 11.0
    assert combine_one_token([1.0, 2.0], torch.float32, bias=(None, None)) == 3.0
    # One node: the ranks' sum is not rounded before the bias joins it. 1 + 2**-8 alone would become 1.
    minus_one = torch.tensor([[-1.0]], dtype=BF16)
    assert combine_one_token([1.0, 2.0**-8], bias=minus_one) == 2.0**-8
    assert combine_one_token([1.0, 2.0**-8, 0.0], bias=minus_one, ranks_per_node=2) == 0.0
    # Several nodes: the biases belong to no node's sum, so they are not rounded to BF16 with it.
    bias = (torch.tensor([[1.0]], dtype=BF16), torch.tensor([[2.0**-8]], dtype=BF16))
    assert combine_one_token([2.0**-8, 0.0], bias=bias, ranks_per_node=1) == 1 + 2.0**-7


def test_token_sent_nowhere_gets_its_bias():
    masks = [ones_for([[], [0]], 1)]
    bias = torch.tensor([[3.0], [4.0]])
    (with_bias,) = reference.combine([torch.tensor([[10.0]])], masks, [bias])
    assert with_bias.combined_x.tolist() == [[3.0], [14.0]]
    (without,) = reference.combine([torch.tensor([[10.0]])], masks)
    assert without.combined_x.tolist() == [[0.0], [10.0]]
    assert without.combined_topk_weights is None


def test_combine_finds_each_tokens_rows():
    # Rank 0 sends token 0 to both and token 1 to rank 1; rank 1 sends its only token to rank 0.
    masks = [ones_for([[0, 1], [1]], 2), ones_for([[0]], 2)]
    ys = [torch.tensor([[1.0], [2.0]]), torch.tensor([[10.0], [20.0], [float("nan")]])]  # one row too many
    weights = [torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[0.0, 4.0], [8.0, 16.0]])]
    rank_0, rank_1 = reference.combine(ys, masks, topk_weights=weights)
    assert rank_0.combined_x.tolist() == [[11.0], [20.0]]
    assert rank_0.combined_topk_weights.tolist() == [[1.0, 4.0], [8.0, 16.0]]
    assert rank_1.combined_x.tolist() == [[2.0]]
    assert rank_1.combined_topk_weights.tolist() == [[0.0, 2.0]]


def test_weights_are_never_rounded_to_the_payloads_dtype():
    masks = [ones_for([[0, 1, 2]], 3), ones_for([], 3), ones_for([], 3)]
    ys = [torch.zeros((1, 1), dtype=BF16)] * 3
    weights = [torch.tensor([[w]]) for w in (1.0, 2.0**-20, 2.0**-20)]
    for ranks_per_node in (None, 2, 1):
        got = reference.combine(ys, masks, topk_weights=weights, ranks_per_node=ranks_per_node)[0]
        assert got.combined_topk_weights.dtype == torch.float32
        assert got.combined_topk_weights.item() == 1 + 2.0**-19


def test_weights_are_summed_per_node_first():
    big = 2.0**24
    masks = [ones_for([[0, 1, 2, 3]], 4)] + [ones_for([], 4)] * 3
    ys = [torch.zeros(1, 1)] * 4
    weights = [torch.tensor([[w]]) for w in (big, 0.0, 1.0, 1.0)]
    one_node = reference.combine(ys, masks, topk_weights=weights)[0].combined_topk_weights
    two_nodes = reference.combine(ys, masks, topk_weights=weights, ranks_per_node=2)[0].combined_topk_weights
    assert one_node.item() == big
    assert two_nodes.item() == big + 2


@given(cases, st.sampled_from([None, 1, 2, 3]))
@settings(max_examples=60, deadline=None)
def test_identity_experts_multiply_by_the_number_of_ranks(case, ranks_per_node):
    generator, _, topk_idx, layouts = case
    masks = [spread.is_token_in_rank for spread in layouts]
    # Small integers: no sum is ever rounded, so one node and several agree.
    xs = [torch.randint(-8, 9, (len(ids), 3), generator=generator).to(BF16) for ids in topk_idx]
    received = reference.dispatch(xs, masks)
    combined = reference.combine([got.recv_x for got in received], masks, ranks_per_node=ranks_per_node)
    for x, mask, got in zip(xs, masks, combined, strict=True):
        assert got.combined_x.dtype == BF16
        assert torch.equal(got.combined_x, x * mask.sum(dim=1, keepdim=True))


@given(cases)
@settings(max_examples=60, deadline=None)
def test_dispatch_agrees_with_layout(case):
    generator, num_experts, topk_idx, layouts = case
    num_ranks = len(topk_idx)
    weights = [torch.rand(ids.shape, generator=generator) + 0.1 for ids in topk_idx]
    received = reference.dispatch(
        xs=[torch.arange(len(ids)).unsqueeze(1) + 1000 * rank for rank, ids in enumerate(topk_idx)],
        masks=[spread.is_token_in_rank for spread in layouts],
        topk_idx=topk_idx,
        topk_weights=weights,
        num_experts=num_experts,
        num_tokens_per_expert=[spread.num_tokens_per_expert for spread in layouts],
    )
    for rank, got in enumerate(received):
        assert len(got.recv_x) == sum(int(spread.num_tokens_per_rank[rank]) for spread in layouts)
        # Rows ascend by (source rank, token), and say truly where they come from.
        tags = got.recv_x[:, 0].tolist()
        assert tags == sorted(set(tags))
        assert tags == [1000 * source + token for source, token in zip(got.src_rank, got.src_token, strict=True)]
        local = got.recv_topk_idx
        selected = [int((local == expert).sum()) for expert in range(num_experts // num_ranks)]
        assert got.num_recv_tokens_per_expert_list == selected
        assert torch.equal(local < 0, got.recv_topk_weights == 0)
        assert (local >= 0).any(dim=1).all()


@given(cases, st.sampled_from([None, 2]))
@settings(max_examples=60, deadline=None)
def test_weights_come_back_where_an_expert_was_selected(case, ranks_per_node):
    generator, num_experts, topk_idx, layouts = case
    masks = [spread.is_token_in_rank for spread in layouts]
    weights = [torch.rand(ids.shape, generator=generator) for ids in topk_idx]
    xs = [torch.zeros((len(ids), 1)) for ids in topk_idx]
    received = reference.dispatch(xs, masks, topk_idx=topk_idx, topk_weights=weights, num_experts=num_experts)
    combined = reference.combine(
        [got.recv_x for got in received],
        masks,
        topk_weights=[got.recv_topk_weights for got in received],
        ranks_per_node=ranks_per_node,
    )
    for ids, weight, got in zip(topk_idx, weights, combined, strict=True):
        valid = (ids >= 0) & (ids < num_experts)
        assert torch.equal(got.combined_topk_weights, torch.where(valid, weight, 0.0))


@given(cases)
@settings(max_examples=30, deadline=None)
def test_sums_are_near_the_exact_ones(case):
    generator, _, topk_idx, layouts = case
    masks = [spread.is_token_in_rank for spread in layouts]
    xs = [torch.randn((len(ids), 4), generator=generator, dtype=torch.float64) for ids in topk_idx]
    received = reference.dispatch(xs, masks)
    scaled = [got.recv_x * (rank + 1) for rank, got in enumerate(received)]
    factors = torch.arange(1, len(xs) + 1, dtype=torch.float64)
    for x, mask, got in zip(xs, masks, reference.combine(scaled, masks), strict=True):
        torch.testing.assert_close(got.combined_x, x * (mask.double() @ factors).unsqueeze(1))
