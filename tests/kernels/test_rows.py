"""The primitives' twins, on the worked examples of their docstrings and on random shapes."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from deep_ep.errors import EPError
from deep_ep.kernels.blocks import peer_tokens, tile_bounds
from deep_ep.kernels.reduce import RowSums, SumPlan, reduce_rows, sum_rows, tile_cuts
from deep_ep.kernels.rows import Section, SlotRange, as_bytes, lay_rows, put_rows, row_bytes, rows_as, widest_dtype


def test_put_rows_worked_example() -> None:
    rows = torch.tensor([[11, 12], [21, 22]], dtype=torch.uint8)
    peers = [torch.zeros(9, 2, dtype=torch.uint8), torch.zeros(3, 2, dtype=torch.uint8)]
    slots = torch.tensor([[5, 7], [-1, 8]], dtype=torch.int32)
    put_rows([Section(rows, peers)], slots, [SlotRange(5, 6, 0), SlotRange(8, 9, -8)], first_peer=1)
    assert peers[0][5].tolist() == [11, 12]
    assert peers[1][0].tolist() == [21, 22]
    assert int(peers[0].sum()) + int(peers[1].sum()) == 23 + 43, "nothing else was written"


def test_put_rows_refuses_rows_that_were_not_offered() -> None:
    rows = torch.zeros(2, 4, dtype=torch.uint8)
    slots = torch.tensor([[0], [1]], dtype=torch.int32)
    with pytest.raises(EPError, match="rows 0 to 2 are not among those that rank 0 offered"):
        put_rows([Section(rows, [rows[:1]])], slots, [SlotRange(0, 2, 0)], 0)
    with pytest.raises(EPError, match="rows -1 to 1 are not"):
        put_rows([Section(rows, [rows])], slots, [SlotRange(0, 2, -1)], 0)


def test_put_rows_refuses_slots_that_do_not_fill_the_lane() -> None:
    rows = torch.zeros(2, 4, dtype=torch.uint8)
    with pytest.raises(EPError, match="3 rows are due for rank 0, the slots name 2"):
        put_rows([Section(rows, [rows])], torch.tensor([[0], [1]], dtype=torch.int32), [SlotRange(0, 3, 0)], 0)


def test_lay_rows_worked_example() -> None:
    mask = torch.tensor([[1, 1], [0, 1]], dtype=torch.bool)
    parts = [torch.tensor([[1.5], [2.5]]), torch.tensor([[7, 8], [9, 10]], dtype=torch.int16)]
    first, second = lay_rows(parts, mask, [1, 2])
    assert rows_as(first, torch.float32).tolist() == [[1.5], [1.5], [2.5]]
    assert rows_as(second, torch.int16).tolist() == [[7, 8], [7, 8], [9, 10]]
    with pytest.raises(EPError, match="2 rows are due for rank 0, the slots name 1"):
        lay_rows(parts, mask, [2, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_tokens", [0, 1, 33, 400])
@pytest.mark.parametrize("num_biases", [0, 2])
def test_sum_rows_adds_one_peer_after_the_other(dtype: torch.dtype, num_tokens: int, num_biases: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden, num_ranks = 700, 5  # 400 tokens are several tiles
    is_here = torch.rand(num_ranks, num_tokens, generator=generator) < 0.7
    token_idx, counts = is_here.nonzero()[:, 1], is_here.sum(1).tolist()
    rows = torch.randn(sum(counts), hidden, generator=generator).mul(100).to(dtype)
    biases = [torch.randn(num_tokens, hidden, generator=generator).to(dtype) for _ in range(num_biases)]
    out = torch.full((num_tokens, hidden), torch.nan, dtype=dtype)
    sum_rows(out, rows, token_idx, counts, biases)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(num_tokens, hidden, dtype=wide)
    for bias in biases:
        total += bias
    for row, token in zip(rows, token_idx.tolist(), strict=True):
        total[token] += row
    assert torch.equal(out, total.to(dtype))


def test_sums_of_many_tokens_with_few_rows_are_not_widened_at_once() -> None:
    out = torch.empty(20_000, 1024, dtype=torch.bfloat16)
    token_idx = torch.tensor([1, 19_999, 1])
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as seen:
        sum_rows(out, torch.ones(3, 1024, dtype=torch.bfloat16), token_idx, [2, 1])
    assert out[:, 0].count_nonzero() == 2
    assert out[1].eq(2).all()
    assert max(event.self_cpu_memory_usage for event in seen.key_averages()) < out.nbytes // 2


def test_blocks_worked_examples() -> None:
    tokens = peer_tokens(torch.tensor([[1, 0, 1], [0, 0, 0]], dtype=torch.bool))
    assert [one.tolist() for one in tokens] == [[0, 2], []]
    assert tile_bounds([torch.tensor([0, 2, 5])], 6, 2) == [[0, 1, 2, 3]]
    assert tile_bounds([torch.tensor([0, 2, 5])], 6, 6) == [[0, 3]]
    assert tile_bounds([], 6, 2) == []


def test_put_rows_of_several_tiles_to_nobody() -> None:
    rows = torch.zeros(3, 1 << 19, dtype=torch.uint8)
    put_rows([Section(rows, [rows[:0]])], torch.full((3, 1), -1, dtype=torch.int32), [SlotRange(0, 0, 0)], 0)


def test_reduce_rows_worked_example() -> None:
    out = torch.empty(1, 2)
    peers = [torch.tensor([[1.0, 2.0]]), torch.empty(0, 2)]
    reduce_rows(out, peers, torch.tensor([[2, -1]], dtype=torch.int32), [-2, 0], [torch.tensor([[10.0, 10.0]])])
    assert out.tolist() == [[11.0, 12.0]]


def test_reduce_rows_refuses_rows_that_were_not_offered() -> None:
    with pytest.raises(EPError, match="rows 0 to 2 are not among the 1 that a peer offered"):
        reduce_rows(torch.empty(2, 1), [torch.ones(1, 1)], torch.tensor([[0], [1]], dtype=torch.int32), [0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize(("num_tokens", "hidden"), [(0, 3), (1, 1), (70, 5), (300, 2049)])
def test_reduce_rows_sums_in_order(dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    mask = torch.rand(num_tokens, 3, generator=generator) < 0.7
    slots = torch.where(mask, mask.cumsum(0) - 1 + 2, -1).int()
    peers = [torch.randn(num_tokens + 4, hidden, generator=generator).to(dtype) for _ in range(3)]
    biases = [torch.randn(num_tokens, hidden, generator=generator).to(dtype) for _ in range(2)]
    out = torch.empty(num_tokens, hidden, dtype=dtype)
    reduce_rows(out, peers, slots, [0, 1, -2], biases)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    for token in range(num_tokens):
        total = biases[0][token].to(wide) + biases[1][token].to(wide)
        for peer, shift in enumerate([0, 1, -2]):
            if mask[token, peer]:
                total = total + peers[peer][slots[token, peer] + shift].to(wide)
        assert torch.equal(out[token], total.to(dtype))


def test_sum_plan_worked_examples() -> None:
    counts, sources, grouped = np.array([2, 2]), np.array([0, 1, 0, 1]), np.array([0, 2, 1, 3])
    together = SumPlan.of(counts, sources, grouped, 2, [0, 2])
    assert (together.cuts, together.firsts, together.bounds) == ([0, 2], [0, 4], [[0, 2], [0, 2]])
    assert (together.starts.tolist(), together.order.tolist()) == ([0, 2], [0, 2, 1, 3])
    apart = SumPlan.of(counts, sources, grouped, 2, [0, 1, 2])
    assert (apart.firsts, apart.bounds) == ([0, 2, 4], [[0, 1, 2], [0, 1, 2]])
    assert (apart.starts.tolist(), apart.order.tolist()) == ([0, 0], [0, 1, 0, 1])
    assert tile_cuts(7, 3, 4) == [0, 3, 4, 7]
    assert tile_cuts(7, 3) == [0, 3, 6, 7]
    assert tile_cuts(0, 3) == [0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("num_biases", [0, 1, 2])
@pytest.mark.parametrize("is_part", [False, True])
def test_sums_by_columns_have_the_order_of_the_columns(dtype: torch.dtype, num_biases: int, is_part: bool) -> None:
    """Rows in any order, several of a token in one peer's memory, and zeros of both signs."""
    generator = torch.Generator().manual_seed(num_biases)
    num_tokens, num_topk, num_peers, num_rows, hidden = 70, 5, 3, 40, 6000  # three tiles or more
    is_here = torch.rand(num_tokens, num_topk, generator=generator) < 0.6
    slots = torch.where(is_here, torch.randint(num_rows, is_here.shape, generator=generator), -1).int()
    owners = torch.randint(num_peers, is_here.shape, generator=generator, dtype=torch.int32)

    def draw(num_rows: int) -> torch.Tensor:
        rows = torch.randn(num_rows, hidden, generator=generator).mul(100)
        rows[:, ::2] = torch.where(torch.rand(rows[:, ::2].shape, generator=generator) < 0.6, -0.0, 0.0)
        return rows.to(dtype)

    peers, biases = [draw(num_rows) for _ in range(num_peers)], [draw(num_tokens) for _ in range(num_biases)]
    out = torch.full((num_tokens, hidden), torch.nan, dtype=dtype)
    RowSums(peers, slots, [0] * num_peers, biases, owners=owners, is_part=is_part).sum(out)
    wide, zero = torch.float64 if dtype == torch.float64 else torch.float32, -0.0 if is_part or biases else 0.0
    for token in range(num_tokens):
        total = torch.full((hidden,), zero, dtype=wide)
        for bias in biases:
            total += bias[token]
        for owner, slot in zip(owners[token].tolist(), slots[token].tolist(), strict=True):
            if slot >= 0:
                total += peers[owner][slot]
        assert torch.equal(out[token], total.to(dtype))
        assert torch.equal(out[token].signbit(), total.signbit()), "also of zeros"


@pytest.mark.parametrize("num_tokens", [1, 9])  # a part of a tile, and several
@pytest.mark.parametrize("num_peers", [2, 3])
def test_words_that_one_peer_gives_keep_their_bits(num_tokens: int, num_peers: int) -> None:
    words = torch.randint(-(1 << 31), 1 << 31, (num_tokens, 1 << 15), dtype=torch.int32)
    owners = torch.randint(0, num_peers, words.shape)
    slots = torch.arange(num_tokens, dtype=torch.int32)[:, None].expand(-1, num_peers)
    out = torch.empty_like(words)
    reduce_rows(out, [words * (owners == peer) for peer in range(num_peers)], slots, [0] * num_peers)
    assert torch.equal(out, words)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, 8, 12, 100])
def test_rows_of_any_width_and_alignment(width: int) -> None:
    flat = torch.arange(3 * width + 1, dtype=torch.uint8)
    rows = flat[1:].view(3, width)  # deliberately not aligned
    target = torch.zeros(5, width, dtype=torch.uint8)
    put_rows([Section(rows, [target])], torch.tensor([[1], [-1], [2]], dtype=torch.int32), [SlotRange(1, 3, 0)], 0)
    assert torch.equal(target[1:3], rows[[0, 2]])
    assert torch.equal(rows_as(as_bytes(rows), torch.uint8), rows)


def test_rows_are_copied_in_the_widest_elements_that_fit() -> None:
    assert widest_dtype(2048, 64, 0) == torch.int64
    assert widest_dtype(2048, 4) == torch.int32
    assert widest_dtype(6, 8) == torch.int16
    assert widest_dtype(2048, 1) == torch.uint8
    rows = torch.arange(12, dtype=torch.int16).view(3, 4)
    target = torch.zeros(3, 1, dtype=torch.int64)
    assert row_bytes(rows) == row_bytes(target) == 8
    slots = torch.tensor([[-1], [1], [2]], dtype=torch.int32)
    put_rows([Section(rows_as(rows, torch.int64), [target])], slots, [SlotRange(1, 3, 0)], 0)
    assert torch.equal(rows_as(target, torch.int16)[1:], rows[1:])


def test_a_part_of_the_slots_is_put() -> None:
    rows = torch.arange(4, dtype=torch.uint8).view(4, 1)
    target = torch.full((2, 1), 9, dtype=torch.uint8)
    put_rows(
        [Section(rows, [target])], torch.tensor([[5], [6], [-1], [7]], dtype=torch.int32), [SlotRange(6, 8, -6)], 0
    )
    assert target.tolist() == [[1], [3]]


def test_one_row_with_odd_strides_is_still_bytes() -> None:
    assert as_bytes(torch.zeros(5, 1).t()).shape == (1, 20)
    assert as_bytes(torch.zeros(1, 5).t()).shape == (5, 4)


@pytest.mark.parametrize("num_peers", [2, 3])
@pytest.mark.parametrize("step", [2, 3, 4])  # a tile of these sums is two tokens
def test_sums_of_a_few_tokens_at_a_time_are_those_of_all(num_peers: int, step: int) -> None:
    random = torch.Generator().manual_seed(num_peers)
    hidden = (1 << 22) // 4 // num_peers // 2
    mask = torch.rand(9, num_peers, generator=random) < 0.7
    mask[2:6] = True  # whole tiles of tokens that all have rows
    slots = torch.where(mask, mask.cumsum(0) - 1, -1).int()
    peers = [torch.randn(9, hidden, generator=random).bfloat16() for _ in range(num_peers)]
    for rows in peers:
        rows[:, 0] = -0.0  # sums begin with a positive zero
    biases = [torch.randn(9, hidden, generator=random).bfloat16()]
    for some in ([], biases):
        expected, got = torch.empty(9, hidden).bfloat16(), torch.empty(9, hidden).bfloat16()
        for token in range(9):
            total = some[0][token].float() if some else torch.zeros(hidden)
            for peer in range(num_peers):
                if mask[token, peer]:
                    total = total + peers[peer][slots[token, peer]].float()
            expected[token] = total.bfloat16()
        sums = RowSums(peers, slots, [0] * num_peers, some, unit=step)
        for first in range(0, 9, step):
            sums.sum(got[first : first + step], first)
        assert torch.equal(got.view(torch.int16), expected.view(torch.int16))
