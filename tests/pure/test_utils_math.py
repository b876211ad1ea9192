"""`deep_ep.utils.math`: worked examples, and what must hold for any input."""

import pytest
import torch

from deep_ep import quant
from deep_ep.utils import math as ep_math


def test_calc_diff_of_worked_example():
    # a = [1, 2], b = [2, 2]: 1 - 2 * (2 + 4) / (1 + 4 + 4 + 4) = 1/13
    assert ep_math.calc_diff(torch.tensor([0.0, 1.0]), torch.tensor([1.0, 1.0])) == pytest.approx(1 / 13, abs=1e-15)


def test_calc_diff_sees_what_float32_would_lose():
    x = torch.full((1000,), 1.0, dtype=torch.float64)
    y = x.clone()
    y[0] += 1e-4
    # half the squared relative error: 1e-8 / (2 * 1000 * 4), far below float32's resolution around 1
    assert ep_math.calc_diff(x, y) == pytest.approx(1.25e-12, rel=1e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.int64])
def test_calc_diff_of_equal_tensors_is_zero(dtype):
    x = torch.arange(-6, 6).to(dtype).view(3, 4)
    assert ep_math.calc_diff(x, x) == pytest.approx(0, abs=1e-15)


def test_calc_diff_of_empty_tensors_is_zero():
    assert ep_math.calc_diff(torch.empty(0, 7), torch.empty(0, 7)) == 0


def test_safe_div():
    assert ep_math.safe_div(6, 4) == 1.5
    assert ep_math.safe_div(0, 0) == 0
    assert ep_math.safe_div(0, 3) == 0
    with pytest.raises(ZeroDivisionError):
        ep_math.safe_div(1, 0)


@pytest.mark.parametrize(
    ("x", "y", "quotient", "aligned"), [(0, 8, 0, 0), (1, 8, 1, 8), (8, 8, 1, 8), (9, 8, 2, 16), (7168, 128, 56, 7168)]
)
def test_ceil_div_and_align(x, y, quotient, aligned):
    assert ep_math.ceil_div(x, y) == quotient
    assert ep_math.align(x, y) == aligned


def test_fp8_casts_are_the_ones_of_quant():
    assert ep_math.per_token_cast_to_fp8 is quant.per_token_cast_to_fp8
    assert ep_math.per_token_cast_back is quant.per_token_cast_back


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_inplace_unique_of_worked_example(dtype):
    x = torch.tensor([[3, 0, -1, 3], [-1, -1, -1, -1], [1, 2, 0, 3], [2, 2, 2, 2], [-5, 0, -5, 0]], dtype=dtype)
    assert ep_math.inplace_unique(x, 4) is None
    assert x.tolist() == [[3, 0, -1, -1], [-1, -1, -1, -1], [3, 2, 1, 0], [2, -1, -1, -1], [0, -1, -1, -1]]


def test_inplace_unique_against_python_sets():
    generator = torch.Generator().manual_seed(1)
    x = torch.randint(-2, 6, (200, 9), generator=generator)
    expected = []
    for row in x.tolist():
        kept = sorted({value for value in row if value >= 0}, reverse=True)
        expected.append(kept + [-1] * (9 - len(kept)))
    ep_math.inplace_unique(x, 6)
    assert x.tolist() == expected


def test_inplace_unique_writes_through_a_view():
    whole = torch.tensor([[1, 1, 7], [0, 1, 7]])
    ep_math.inplace_unique(whole[:, :2], 2)
    assert whole.tolist() == [[1, -1, 7], [1, 0, 7]]


def test_inplace_unique_of_no_rows_and_of_too_large_values():
    ep_math.inplace_unique(torch.empty((0, 4), dtype=torch.int64), 4)
    with pytest.raises(ValueError, match="below num_slots=4"):
        ep_math.inplace_unique(torch.tensor([[4]]), 4)


def test_create_grouped_scores():
    scores = torch.tensor([[0.1, 0.2, 0.3, 0.4, 0.5, 0.6], [0.6, 0.5, 0.4, 0.3, 0.2, 0.1]])
    grouped = ep_math.create_grouped_scores(scores, torch.tensor([[0, 2], [1, 1]]), 3)
    expected = torch.tensor([[0.1, 0.2, 0, 0, 0.5, 0.6], [0, 0, 0.4, 0.3, 0, 0]])
    assert torch.equal(grouped, expected)
    assert scores[0, 2] == pytest.approx(0.3), "the input stays as it was"


def test_hash_tensor_of_worked_example():
    assert ep_math.hash_tensor(torch.tensor([1, -3], dtype=torch.int32)) == -2
    # 1.0 is 0x3F80 in bfloat16: two of them are the word 0x3F803F80
    assert ep_math.hash_tensor(torch.ones((2, 2), dtype=torch.bfloat16)) == 2 * 0x3F803F80
    # more words than an int32 sum could hold
    assert ep_math.hash_tensor(torch.full((4,), 2**31 - 1, dtype=torch.int32)) == 4 * (2**31 - 1)


def test_hash_tensor_ignores_the_order_of_rows_and_sees_a_bit():
    x = torch.randn((64, 32), generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    assert ep_math.hash_tensor(x.flip(0)) == ep_math.hash_tensor(x)
    changed = x.clone()
    changed.view(torch.int16)[3, 5] ^= 1
    assert ep_math.hash_tensor(changed) != ep_math.hash_tensor(x)


def test_hash_tensor_takes_any_number_of_bytes():
    assert ep_math.hash_tensor(torch.tensor([1, 2, 3, 4, 5], dtype=torch.uint8)) == 0x04030201 + 5
    assert ep_math.hash_tensor(torch.empty((0, 3), dtype=torch.bfloat16)) == 0
    assert ep_math.hash_tensor(torch.arange(6, dtype=torch.int32).view(2, 3).t()) == 15


def test_hash_tensors_xors_and_recurses():
    a, b, c = (torch.tensor([value], dtype=torch.int32) for value in (0b0110, 0b0011, 0b1000))
    assert ep_math.hash_tensors(a, (b, [c, None])) == 0b1101
    assert ep_math.hash_tensors(a, a) == 0


def test_count_bytes():
    x, scales = torch.empty((3, 256), dtype=torch.float8_e4m3fn), torch.empty((3, 2), dtype=torch.float32)
    assert ep_math.count_bytes(x) == 768
    assert ep_math.count_bytes((x, scales), None, [torch.empty(5, dtype=torch.int64), (None,)]) == 768 + 24 + 40
    assert ep_math.count_bytes() == 0
