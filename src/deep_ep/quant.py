"""FP8 with one scale per 128 channels, and UE8M0 scales. Pure torch, on any device, for any hidden size.

Shape letters: H channels of a row, G = ceil(H / 128) groups of channels (the last one perhaps not full),
P = ceil(H / 512) packed scales. `...` stands for any leading dimensions, empty ones included.
"""

from __future__ import annotations

import torch

GROUP_CHANNELS = 128
FP8_MAX = 448.0  # the largest finite E4M3 value
AMAX_FLOOR = 1e-4  # keeps the scale of an all-zero group finite

_MANTISSA_BITS = 23
_MANTISSA_MASK = (1 << _MANTISSA_BITS) - 1
_EXPONENT_MASK = 0xFF
_BYTES_PER_PACK = 4


def per_token_cast_to_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast rows to FP8, each group of 128 channels scaled so that its largest magnitude becomes 448.

    Args:
        x: `[T, H]`, any floating dtype.

    Returns:
        `q` `[T, H]` float8_e4m3fn and `s` `[T, G]` float32, both new, with `x ~ q * s` group by group.

    Raises:
        ValueError: `x` is not two-dimensional.
    """
    if x.dim() != 2:
        raise ValueError(f"per_token_cast_to_fp8: x must have 2 dimensions, got shape {tuple(x.shape)}")
    groups = _split_groups(x)
    # Tensor by tensor below: with a number on either side torch may go by way of a reciprocal.
    amax = groups.abs().amax(dim=-1).clamp(min=AMAX_FLOOR)
    largest = torch.full_like(amax, FP8_MAX)
    return _scaled_to_fp8(groups, largest / amax, x.shape[-1]), amax / largest


def per_token_cast_back(q: torch.Tensor, s: torch.Tensor, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """Undo a cast to FP8.

    Args:
        q: `[..., H]` float8_e4m3fn.
        s: `[..., G]` float32, or `[..., 1]` for one scale per row, or `[..., P]` int32 with packed UE8M0
            scales; any strides. Packed ones may come in another shape, in the same order.
        dtype: Of the result, any floating one.

    Returns:
        `[..., H]` of that dtype, new.

    Raises:
        ValueError: the number of scales does not fit H.
    """
    if q.numel() == 0:
        return q.to(dtype)
    hidden = q.shape[-1]
    num_groups = _num_groups(hidden)
    scales = s
    if s.dtype == torch.int32:
        num_packs = -(-num_groups // _BYTES_PER_PACK)
        if s.numel() == q.numel() // hidden * num_packs:
            scales = unpack_ue8m0(s.reshape(*q.shape[:-1], num_packs))[..., :num_groups]
    elif s.shape[-1] == 1:
        scales = s.expand(*s.shape[:-1], num_groups)
    if scales.dtype == torch.int32 or scales.shape != (*q.shape[:-1], num_groups):
        raise ValueError(
            f"per_token_cast_back: s must hold {num_groups} scales for each row of q {tuple(q.shape)}, "
            f"got {tuple(s.shape)} {s.dtype}"
        )
    return _join_groups(_split_groups(q) * scales.unsqueeze(-1), hidden).to(dtype)


def cast_fp8(x: torch.Tensor, round_scale: bool = False, use_ue8m0: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Cast rows to FP8 as low-latency dispatch does, to the bit.

    All in float32: `amax = max(1e-4, max|x|)` of a group, `scale = 448 / amax`, stored `amax * (1/448)`. With
    `round_scale` the stored scale goes up to the next power of two and `scale` is its inverse. Values beyond
    +-448 become +-448. A NaN stays NaN but does not touch the scale of its group; an infinity makes the scale
    infinite and becomes NaN itself.

    Example: a group whose largest magnitude is 1 stores the scale 1/448; with `round_scale` that goes up to
    1/256 = 2**-8, whose UE8M0 byte is 127 - 8 = 119.

    Args:
        x: `[..., H]`, any floating dtype.
        round_scale: make every scale a power of two.
        use_ue8m0: pack four scales as exponent bytes into an int32; needs `round_scale`.

    Returns:
        `q` `[..., H]` float8_e4m3fn, and the stored scales: `[..., G]` float32, or `[..., P]` int32 with
        `use_ue8m0`. Both are new and contiguous.

    Raises:
        ValueError: `use_ue8m0` without `round_scale`.
    """
    if use_ue8m0 and not round_scale:
        raise ValueError("cast_fp8: use_ue8m0 needs round_scale=True, got round_scale=False")
    groups = _split_groups(x)
    # One NaN must not spoil the scale of its 127 neighbours.
    magnitudes = torch.nan_to_num(groups.abs(), nan=0.0, posinf=float("inf"))
    inverse, scale = scales_of(magnitudes.amax(dim=-1), round_scale)
    q = _scaled_to_fp8(groups, scale, x.shape[-1])
    return q, pack_ue8m0(inverse) if use_ue8m0 else inverse


def scales_of(amax: torch.Tensor, round_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """The scales that `cast_fp8` gives groups.

    Args:
        amax: `[...]` float32, the largest magnitudes; no NaN.
        round_scale: make every scale a power of two.

    Returns:
        What is stored, and what values are multiplied with, `[...]` float32 each.
    """
    amax = amax.clamp(min=AMAX_FLOOR)
    # A product, not a quotient: amax / 448 differs from it in the last bit.
    inverse = amax * (1.0 / FP8_MAX)
    if not round_scale:
        return inverse, torch.full_like(amax, FP8_MAX) / amax
    exponent = _exponent_rounded_up(inverse)
    # 2**-p has the biased exponent 254 minus that of 2**p; only an infinite amax gets below 0.
    return _power_of_two(exponent), _power_of_two((254 - exponent).clamp(min=0))


def pack_ue8m0(scales: torch.Tensor) -> torch.Tensor:
    """Keep only the exponents of scales, four to an integer, the first in the lowest byte.

    Example: scales 1, 2, 0.5, 1 have the bytes 127, 128, 126, 127 and become 0x7F7E807F; a lone 2 gives 0x80.

    Args:
        scales: `[..., G]` float32, powers of two; any strides.

    Returns:
        `[..., ceil(G / 4)]` int32, new; bytes beyond G are 0.
    """
    exponents = (scales.contiguous().view(torch.int32) >> _MANTISSA_BITS) & _EXPONENT_MASK
    padding = -exponents.shape[-1] % _BYTES_PER_PACK
    packs = torch.nn.functional.pad(exponents.to(torch.uint8), (0, padding)).unflatten(-1, (-1, _BYTES_PER_PACK))
    return packs.contiguous().view(torch.int32).squeeze(-1)


def unpack_ue8m0(packed: torch.Tensor) -> torch.Tensor:
    """Undo `pack_ue8m0`.

    Args:
        packed: `[..., P]` int32; any strides.

    Returns:
        `[..., 4 * P]` float32, new: `2**(byte - 127)`; a byte of 0 gives 0.0, one of 255 infinity.
    """
    exponents = torch.stack([(packed >> (8 * i)) & _EXPONENT_MASK for i in range(_BYTES_PER_PACK)], dim=-1)
    return _power_of_two(exponents.flatten(-2))


def _num_groups(hidden: int) -> int:
    return -(-hidden // GROUP_CHANNELS)


def _split_groups(x: torch.Tensor) -> torch.Tensor:
    """`[..., H]` of any dtype to `[..., G, 128]` float32, zeros behind the last channel."""
    padding = -x.shape[-1] % GROUP_CHANNELS
    padded = torch.nn.functional.pad(x.to(torch.float32), (0, padding))
    return padded.unflatten(-1, (_num_groups(x.shape[-1]), GROUP_CHANNELS))


def _join_groups(groups: torch.Tensor, hidden: int) -> torch.Tensor:
    """`[..., G, 128]` to contiguous `[..., H]`, dropping the padding."""
    return groups.flatten(-2)[..., :hidden].contiguous()


def _scaled_to_fp8(groups: torch.Tensor, scale: torch.Tensor, hidden: int) -> torch.Tensor:
    """`groups` `[..., G, 128]` times `scale` `[..., G]`, as `[..., H]` float8_e4m3fn."""
    # What torch's own cast makes of values beyond 448 (NaN or 448) depends on its version: saturate first.
    scaled = (groups * scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX)
    return _join_groups(scaled, hidden).to(torch.float8_e4m3fn)


def _exponent_rounded_up(x: torch.Tensor) -> torch.Tensor:
    """The biased exponent, int32, of the smallest power of two not below `x` (float32, positive, normal)."""
    bits = x.view(torch.int32)
    return (bits >> _MANTISSA_BITS) + ((bits & _MANTISSA_MASK) != 0).to(torch.int32)


def _power_of_two(exponent: torch.Tensor) -> torch.Tensor:
    """The float32 whose exponent bits are `exponent`, int32 in 0..255, and whose other bits are 0."""
    return (exponent << _MANTISSA_BITS).view(torch.float32)
