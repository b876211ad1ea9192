"""Low-latency rows on the CPU: routing by its worked examples, sums against one operator for each k."""

from __future__ import annotations

import pytest
import torch

from deep_ep import logfmt
from deep_ep.kernels.low_latency import rows


def test_routing_worked_examples() -> None:
    ids = torch.tensor([[1, 0], [1, -1]])
    selections = rows.select(ids, 2)
    assert selections.keys.tolist() == [0, 2, 3]
    assert selections.counts.tolist() == [1, 2]
    assert rows.earlier_tokens(ids, selections)[:, 0].tolist() == [0, 1]
    blocks = rows.Blocks.of(torch.tensor([[1, 2], [0, 3]]))
    assert blocks.starts.tolist() == [[0, 1], [3, 3]]
    assert blocks.layout_range().tolist() == [[1, 2 | 1 << 32], [0, 3]]
    assert blocks.rows_apart(10).tolist() == [0, 1, 2, 10, 11, 12]
    assert rows.rows_by_rank(blocks).tolist() == [0, 1, 2, 3, 4, 5]
    again, indices = rows.rows_of_layout(blocks.layout_range(), 10)
    assert again.counts.tolist() == blocks.counts.tolist()
    assert indices.tolist() == [0, 1, 2, 10, 11, 12]


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_an_expert_that_a_token_names_twice_is_selected_once(dtype: torch.dtype) -> None:
    selections = rows.select(torch.tensor([[2, 2, 7], [2, 0, -5]], dtype=dtype), 3)
    assert selections.keys.tolist() == [1, 4, 5]  # expert 0: token 1; expert 2: tokens 0 and 1
    assert selections.counts.tolist() == [1, 0, 2]
    assert rows.select(torch.empty(0, 4, dtype=dtype), 3).counts.tolist() == [0, 0, 0]


def test_rows_are_unpacked_to_their_experts() -> None:
    out = torch.zeros(3, 2, 4).transpose(1, 2)  # rows side by side in memory, as scales are
    rows.unpack_rows(out, torch.arange(6.0).view(3, 2), [1, 0, 2])
    assert out[0, 0].tolist() == [0, 1]
    assert out[2, :2].tolist() == [[2, 3], [4, 5]]
    assert not out[1].any()


@pytest.mark.parametrize("use_logfmt", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(1, 16), (70, 4096), (5, 40)])
def test_sums_skip_rows_and_have_one_order(num_tokens: int, hidden: int, share: float, use_logfmt: bool) -> None:
    generator = torch.Generator().manual_seed(hidden)
    num_topk, num_rows = 6, 90
    source = (torch.randn(num_rows, hidden, generator=generator) / 64).bfloat16()
    grains = torch.randint(num_rows, (num_tokens, num_topk), generator=generator)
    weights = torch.rand(num_tokens, num_topk, generator=generator)
    is_skipped = torch.rand(num_tokens, num_topk, generator=generator) < share
    values, ranges = source.float(), None
    if use_logfmt:
        units, pairs = logfmt.encode(source)
        values, ranges, source = logfmt.decode(units, pairs, hidden), pairs.flatten(1), units.view(torch.bfloat16)
    # An infinite weight of a row that is skipped must not count, nor a row that is not there.
    grains[is_skipped], given = 0, weights.masked_fill(is_skipped, float("inf"))
    want = torch.zeros(num_tokens, hidden)
    for k in range(num_topk):
        kept = ~is_skipped[:, k]
        # One rounding for a product and its sum: exact in float64, where hardly any sum has to be rounded before.
        exact = want[kept].double() + values[grains[kept, k]].double() * weights[kept, k, None].double()
        want[kept] = exact.float()
    out = torch.full((num_tokens, hidden), float("nan"), dtype=torch.bfloat16)
    rows.WeightedSums().sum(out, source, grains, given, is_skipped, ranges)
    assert torch.equal(out, want.bfloat16())


@pytest.mark.parametrize("hidden", [7, 130, 600, 1538, 2048])
def test_logfmt_of_a_row_does_not_depend_on_its_neighbours(hidden: int) -> None:
    x = torch.randn(9, hidden, generator=torch.Generator().manual_seed(hidden)).bfloat16() / 64
    x[3] *= 1000  # not compressed
    units, ranges = logfmt.encode(x)
    values = logfmt.decode(units, ranges, hidden)
    for row in range(x.size(0)):
        one, pairs = logfmt.encode(x[row : row + 1])
        assert torch.equal(one[0], units[row])
        assert torch.equal(pairs[0], ranges[row])
        assert torch.equal(logfmt.decode(one, pairs, hidden)[0], values[row])
