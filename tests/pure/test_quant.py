"""FP8 and UE8M0 casts, against literal numbers and an independent scalar model."""

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deep_ep import quant
from deep_ep.quant import cast_fp8, pack_ue8m0, per_token_cast_back, per_token_cast_to_fp8, unpack_ue8m0

E4M3 = torch.float8_e4m3fn
# All finite non-negative E4M3 numbers by definition: 4 exponent bits (bias 7), 3 mantissa bits.
E4M3_VALUES = [m * 2.0**-9 for m in range(8)] + [
    (8 + m) * 2.0 ** (e - 10) for e in range(1, 16) for m in range(8) if (e, m) != (15, 7)
]


def nearest_e4m3(value: float) -> float:
    """Round to nearest, ties to the even code, beyond the largest to the largest."""
    magnitude = min(abs(value), 448.0)
    code = min(range(len(E4M3_VALUES)), key=lambda c: (abs(E4M3_VALUES[c] - magnitude), c % 2))
    return math.copysign(E4M3_VALUES[code], value)


def power_of_two_not_below(value: np.float32) -> float:
    mantissa, exponent = math.frexp(float(value))
    return math.ldexp(1.0, exponent - 1 if mantissa == 0.5 else exponent)


def cast_model(row: list[float], round_scale: bool) -> tuple[list[float], list[float]]:
    """The cast of one row, number by number in NumPy's float32."""
    values, scales = [], []
    for start in range(0, len(row), 128):
        group = [np.float32(v) for v in row[start : start + 128]]
        amax = max(np.float32(1e-4), *(abs(v) for v in group))
        inverse = amax * np.float32(1 / 448)
        scale = np.float32(448) / amax
        if round_scale:
            inverse = np.float32(power_of_two_not_below(inverse))
            scale = np.float32(1) / inverse
        values += [nearest_e4m3(float(v * scale)) for v in group]
        scales.append(float(inverse))
    return values, scales


def test_e4m3_values_are_torchs():
    codes = torch.arange(127, dtype=torch.uint8).view(E4M3).float()
    assert codes.tolist() == E4M3_VALUES


@pytest.mark.parametrize("round_scale", [False, True])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_cast_fp8_to_the_bit(round_scale, data):
    hidden = data.draw(st.sampled_from([1, 5, 127, 128, 129, 300]))
    magnitude = data.draw(st.sampled_from([0.0, 1e-6, 1e-4, 0.3, 1.0, 448.0, 1e30]))
    seed = data.draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    x = (torch.randn((2, hidden), generator=generator) * magnitude).to(torch.bfloat16)
    q, scales = cast_fp8(x, round_scale=round_scale)
    for row in range(2):
        expected_q, expected_scales = cast_model(x[row].tolist(), round_scale)
        assert q[row].float().tolist() == expected_q
        assert scales[row].tolist() == expected_scales


def test_cast_fp8_literal():
    # Largest magnitude 2: scale 224. 224 * [2, 1, -0.5, 0.3, 0] = 448, 224, -112, 67.2 -> 64 (spacing 8), 0.
    x = torch.tensor([[2.0, 1.0, -0.5, 0.3, 0.0]])
    q, scales = cast_fp8(x)
    assert q.dtype == E4M3
    assert scales.dtype == torch.float32
    assert q.float().tolist() == [[448.0, 224.0, -112.0, 64.0, 0.0]]
    assert scales.item() == pytest.approx(2 / 448, rel=1e-7)
    # Rounded: 2/448 goes up to 1/128, and 128 * 0.3 = 38.4 -> 40 (spacing 4).
    q, scales = cast_fp8(x, round_scale=True)
    assert q.float().tolist() == [[256.0, 128.0, -64.0, 40.0, 0.0]]
    assert scales.item() == 2.0**-7


def test_round_scale_keeps_exact_powers_of_two():
    # 448 * 2**-3 over 448 is 2**-3 already; the next float above it goes up to 2**-2.
    for amax, expected in [(56.0, 2.0**-3), (np.nextafter(np.float32(56), np.float32(57)).item(), 2.0**-2)]:
        assert cast_fp8(torch.tensor([amax]), round_scale=True)[1].item() == expected


def test_zero_rows():
    q, scales = cast_fp8(torch.zeros(2, 256))
    assert torch.equal(q.float(), torch.zeros(2, 256))
    assert torch.equal(scales, torch.full((2, 2), 1e-4) * (1 / 448))
    assert torch.equal(cast_fp8(torch.zeros(2, 256), round_scale=True)[1], torch.full((2, 2), 2.0**-22))
    q, scales = per_token_cast_to_fp8(torch.zeros(2, 256))
    assert torch.equal(per_token_cast_back(q, scales), torch.zeros(2, 256, dtype=torch.bfloat16))


def test_beyond_448_saturates_instead_of_becoming_nan():
    groups = torch.zeros(1, 1, 128)
    groups[0, 0, :4] = torch.tensor([500.0, -1e9, float("inf"), 440.0])
    # No public cast gets here, since scales fit their group; torch's own cast gave NaN in some versions.
    q = quant._scaled_to_fp8(groups, torch.ones(1, 1), 4)
    assert q.float().tolist() == [[448.0, -448.0, 448.0, 448.0]]


def test_largest_magnitude_becomes_448():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((5000, 128), generator=generator)
    q, _ = cast_fp8(x)
    assert torch.equal(q.float().abs().amax(dim=-1), torch.full((5000,), 448.0))
    assert not q.float().isnan().any()


def test_groups_do_not_see_each_other():
    x = torch.cat([torch.full((1, 128), 1000.0), torch.full((1, 128), 0.001), torch.full((1, 44), 1.0)], dim=1)
    q, scales = cast_fp8(x)
    assert torch.equal(q.float(), torch.full((1, 300), 448.0))
    torch.testing.assert_close(scales, torch.tensor([[1000.0, 0.001, 1.0]]) / 448)


@pytest.mark.parametrize("round_scale", [False, True])
def test_nan_and_infinity(round_scale):
    x = torch.ones(1, 384)
    x[0, 0], x[0, 130] = float("nan"), float("inf")
    q, scales = cast_fp8(x, round_scale=round_scale)
    plain_q, plain_scales = cast_fp8(torch.ones(1, 384), round_scale=round_scale)
    nans = q.float().isnan().nonzero()[:, 1].tolist()
    assert nans == [0, 130]
    assert scales[0, 0] == plain_scales[0, 0]
    assert scales[0, 1] == float("inf")
    assert torch.equal(q[0, 1:128].float(), plain_q[0, 1:128].float())


def test_pack_literal():
    packed = pack_ue8m0(torch.tensor([1.0, 2.0, 0.5, 1.0, 2.0]))
    assert packed.dtype == torch.int32
    assert packed.tolist() == [0x7F7E807F, 0x80]
    assert pack_ue8m0(torch.tensor([1.0, 1.0, 1.0, 4.0])).tolist() == [0x817F7F7F - 2**32]
    assert unpack_ue8m0(packed).tolist() == [1.0, 2.0, 0.5, 1.0, 2.0, 0.0, 0.0, 0.0]


def test_packed_bytes_lie_in_channel_order():
    # Largest magnitudes 1, 448, 1000, 1e-9 (floor 1e-4), 1: scales 2**-8, 1, 4, 2**-22, 2**-8.
    maxima = [1.0, 448.0, 1000.0, 1e-9, 1.0]
    x = torch.zeros(1, 640)
    for group, value in enumerate(maxima):
        x[0, group * 128 + 7] = value
    q, packed = cast_fp8(x, round_scale=True, use_ue8m0=True)
    assert struct.pack("<2i", *packed[0].tolist()) == bytes([119, 127, 129, 105, 119, 0, 0, 0])
    assert torch.equal(q.float(), cast_fp8(x, round_scale=True)[0].float())


@given(st.lists(st.integers(0, 255), min_size=1, max_size=9))
def test_ue8m0_round_trip(exponents):
    scales = (torch.tensor(exponents, dtype=torch.int32) << 23).view(torch.float32)
    unpacked = unpack_ue8m0(pack_ue8m0(scales))
    assert unpacked.shape[0] == -(-len(exponents) // 4) * 4
    assert unpacked[: len(exponents)].tolist() == scales.tolist()
    assert unpacked[len(exponents) :].tolist() == [0.0] * (-len(exponents) % 4)


def test_ue8m0_of_any_strides():
    scales = torch.tensor([[1.0, 2.0, 4.0, 8.0], [16.0, 32.0, 64.0, 128.0]])
    packed = pack_ue8m0(scales.T.contiguous().T)
    assert torch.equal(packed, pack_ue8m0(scales))
    wide = torch.stack([packed, packed], dim=-1)[..., 0]
    assert not wide.is_contiguous()
    assert torch.equal(unpack_ue8m0(wide), scales)


@pytest.mark.parametrize("shape", [(0, 128), (3, 0), (0, 0), (4,), (2, 3, 130), (2, 3, 1024), (1, 513)])
def test_shapes(shape):
    x = torch.ones(shape)
    groups, packs = -(-shape[-1] // 128), -(-shape[-1] // 512)
    q, scales = cast_fp8(x)
    assert (q.shape, scales.shape) == (shape, (*shape[:-1], groups))
    assert q.is_contiguous()
    assert scales.is_contiguous()
    q, packed = cast_fp8(x, round_scale=True, use_ue8m0=True)
    assert (packed.shape, packed.dtype) == ((*shape[:-1], packs), torch.int32)
    back = per_token_cast_back(q, packed)
    assert (back.dtype, back.shape) == (torch.bfloat16, shape)
    assert torch.equal(back, x.to(torch.bfloat16))


def test_ue8m0_needs_rounded_scales():
    with pytest.raises(ValueError, match="round_scale"):
        cast_fp8(torch.ones(1, 128), use_ue8m0=True)


def test_per_token_cast_literal():
    q, scales = per_token_cast_to_fp8(torch.tensor([[2.0, 1.0, -0.5, 0.3]]).to(torch.bfloat16))
    assert q.float().tolist() == [[448.0, 224.0, -112.0, 64.0]]
    assert scales.tolist() == [[float(np.float32(2) / np.float32(448))]]
    # 64 * 2/448 = 0.2857..., in BF16 0.28515625.
    assert per_token_cast_back(q, scales).tolist() == [[2.0, 1.0, -0.5, 0.28515625]]


def test_per_token_scale_is_a_quotient():
    x = torch.rand((1000, 1), generator=torch.Generator().manual_seed(1)) + 0.5
    _, scales = per_token_cast_to_fp8(x)
    assert np.array_equal(scales.numpy(), x.numpy() / np.float32(448))


def test_per_token_cast_takes_two_dimensions():
    with pytest.raises(ValueError, match="2 dimensions"):
        per_token_cast_to_fp8(torch.ones(2, 3, 128))


@pytest.mark.parametrize("hidden", [1, 64, 128, 200, 512, 1000])
@pytest.mark.parametrize("cast", ["per_token", "plain", "rounded", "packed"])
def test_round_trip(hidden, cast):
    x = torch.randn((17, hidden), generator=torch.Generator().manual_seed(hidden)).to(torch.bfloat16)
    q, scales = {
        "per_token": lambda: per_token_cast_to_fp8(x),
        "plain": lambda: cast_fp8(x),
        "rounded": lambda: cast_fp8(x, round_scale=True),
        "packed": lambda: cast_fp8(x, round_scale=True, use_ue8m0=True),
    }[cast]()
    # Three mantissa bits: half a step is 1/16 of the value, and BF16 adds 2**-9. Small values: half the
    # smallest step.
    amax = torch.nn.functional.pad(x.float().abs(), (0, -hidden % 128)).unflatten(-1, (-1, 128)).amax(-1)
    floor = (amax * 2.0 / 448 * 2.0**-10).repeat_interleave(128, dim=-1)[:, :hidden]
    error = (per_token_cast_back(q, scales).float() - x.float()).abs()
    assert (error <= x.float().abs() * (1 / 16 + 1 / 256) + floor).all()
    assert hidden < 64 or error.max() > 0


def test_cast_back_takes_column_major_scales():
    x = torch.randn((6, 1024), generator=torch.Generator().manual_seed(3))
    for q, scales in [cast_fp8(x), cast_fp8(x, round_scale=True, use_ue8m0=True)]:
        column_major = scales.T.contiguous().T
        assert not column_major.is_contiguous()
        assert torch.equal(per_token_cast_back(q, column_major), per_token_cast_back(q, scales))


def test_cast_back_with_one_scale_per_row():
    q = torch.ones(2, 256).to(E4M3)
    back = per_token_cast_back(q, torch.tensor([[2.0], [0.5]]))
    assert torch.equal(back.float(), torch.tensor([[2.0], [0.5]]).expand(2, 256))


def test_cast_back_takes_packed_scales_in_another_shape():
    """DeepEP's own test of low latency gives them `H // 128` to a row, as it gives those that are not packed."""
    q, packed = cast_fp8(torch.randn(8, 1024), round_scale=True, use_ue8m0=True)
    assert packed.shape == (8, 2)
    assert torch.equal(per_token_cast_back(q, packed.view(-1, 8)), per_token_cast_back(q, packed))


_INT32 = {"dtype": torch.int32}


@pytest.mark.parametrize(
    "scales", [torch.ones(2, 3), torch.ones(3, 2), torch.ones(3, 2, **_INT32), torch.ones(2, 2, **_INT32)]
)
def test_cast_back_refuses_scales_that_do_not_fit(scales):
    with pytest.raises(ValueError, match=r"2 scales for each row of q \(2, 256\)"):
        per_token_cast_back(torch.ones(2, 256).to(E4M3), scales)
