"""LogFMT: BF16 magnitudes as 10-bit logarithms, for rows that are combined. Pure torch; lossy, 5/8 of the bytes.

A row of H channels is cut into *units* of 1024 (512 where H is no multiple of 1024, the last perhaps shorter), a unit
into *groups* of 128. The *ranges* of a row, the largest and the smallest magnitude of each group, always travel beside
it. A unit is compressed if all its groups have magnitudes below 1, and more than one of them; else it travels as BF16.
So the ranges say how to read the units.

Codes: a sign and 9 bits. With `hi = log2(amax)`, `lo = max(log2(amin), hi - 32)` and `step = (hi - lo) / 510` of a
group, 0 is 0 and c > 0 is `2 ** ((c - 1) * step + lo)`. Rounding goes to the nearest value, not to the nearest
logarithm.

A compressed unit of C channels has the low 8 bits of its codes in C bytes, then the high 2 bits, four codes to a byte.
"""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

import torch

from .quant import GROUP_CHANNELS

_UNIT_CHANNELS, _SHORT_UNIT_CHANNELS = 1024, 512
_SPAN = 32.0  # binary orders of magnitude below the largest that are kept
_STEPS = 510.0  # from the code of the smallest magnitude, 1, to that of the largest, 511
_MOST = 511
_SIGN, _SIGN_SHIFT = 2, 14  # among the high bits of a code; from there to the sign of a BF16
_SIGN_BIT = -(1 << 31)  # of a float32, as int32
_LN_2 = math.log(2.0)
_CODES_PER_BYTE = 4


def unit_channels(hidden: int) -> int:
    """Channels of a unit, of rows of `hidden`."""
    return _UNIT_CHANNELS if hidden % _UNIT_CHANNELS == 0 else _SHORT_UNIT_CHANNELS


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Compress rows.

    Args:
        x: [n, H] BF16, contiguous.

    Returns:
        `units` [n, 2 * H] uint8, of which compressed units use only the first 5/8, and `ranges` [n, G, 2] BF16: the
        largest and the smallest magnitude of each group. Both are new.
    """
    units = x.clone().view(torch.uint8)
    ranges = x.new_empty(x.size(0), -(-x.size(1) // GROUP_CHANNELS), 2)
    encode_into(x, units, ranges)
    return units, ranges


def encode_into(x: torch.Tensor, units: torch.Tensor, ranges: torch.Tensor) -> None:
    """Compress rows into memory that is there, as `encode` does. What compressed units do not use stays as it is.

    Args:
        x: [n, H] BF16, contiguous.
        units: [n, 2 * H] uint8, written; rows may be apart.
        ranges: [n, G, 2] BF16, written; rows may be apart.
    """
    hidden, magnitudes = x.size(1), x.float().abs_()
    amax = _groups(magnitudes, 0.0).amax(-1)
    amin = _groups(magnitudes, float("inf")).amin(-1)
    ranges.copy_(torch.stack([amax, amin], dim=-1))
    codes = _codes(magnitudes, amax, amin)
    high = codes >> 8
    high[:, :hidden] |= (x.view(torch.int16) >> _SIGN_SHIFT) & _SIGN
    packed = _pack(high)
    for block in _blocks(amax, amin, hidden):
        low_plane, high_plane = block.planes(units)
        _replace(low_plane, block.of(codes), block.is_fit)
        _replace(high_plane, block.of(packed, _CODES_PER_BYTE), block.is_fit)
        _replace(block.of(units.view(torch.bfloat16)), block.of(x), ~block.is_fit)


def decode(units: torch.Tensor, ranges: torch.Tensor, hidden: int) -> torch.Tensor:
    """Undo `encode`, as far as it can be.

    Args:
        units: [n, 2 * H] uint8, contiguous.
        ranges: [n, G, 2] BF16.
        hidden: H.

    Returns:
        [n, H] float32, new.
    """
    values = units.new_empty(units.size(0), hidden, dtype=torch.float32)
    decode_into(values, units, ranges)
    return values


def decode_into(values: torch.Tensor, units: torch.Tensor, ranges: torch.Tensor) -> None:
    """Undo `encode` in memory that is there.

    Args:
        values: [n, H] float32, written.
        units: [n, 2 * H] uint8; rows may be apart.
        ranges: [n, G, 2] BF16.
    """
    amax, amin = ranges.float().unbind(-1)
    _, low_log, step_log = _scale(amax, amin)
    step, zeroth = step_log.unsqueeze(-1), (low_log - step_log).unsqueeze(-1)
    for block in _blocks(amax, amin, values.size(1)):
        low, packed = block.planes(units)
        words = _words(low, packed)
        code = _groups((words & _MOST).float().flatten(1), 0.0)
        # Code 0 is 0: the factor of a value is 0 or 1, with the sign, which the words have where int32 has it, too.
        factor = code.clamp(max=1.0).flatten(1)[:, : words[0].numel()].view(words.shape)
        factor.view(torch.int32).bitwise_or_(words.int().bitwise_and_(_SIGN_BIT))
        groups = slice(block.first // GROUP_CHANNELS, block.first // GROUP_CHANNELS + code.size(1))
        value = code.mul_(step[:, groups]).add_(zeroth[:, groups]).exp2_().flatten(1)[:, : words[0].numel()]
        target = block.of(values)
        _replace(target, value.reshape(words.shape).mul_(factor), block.is_fit)
        _replace(target, block.of(units.view(torch.bfloat16)), ~block.is_fit)


def pack_units(units: torch.Tensor, ranges: torch.Tensor) -> torch.Tensor:
    """Units without what compressed ones do not use, for a wire.

    Args:
        units: [n, 2 * H] uint8, of `encode`.
        ranges: [n, G, 2] BF16, of `encode`.

    Returns:
        [bytes] uint8, new: unit by unit, first those of the rows that compress it, then the others.
    """
    parts = []
    for whole, used, is_fit in _unit_bytes(ranges, units.size(1) // 2):
        parts += [units[is_fit, used].flatten(), units[~is_fit, whole].flatten()]
    return torch.cat(parts)


def unpack_units(packed: torch.Tensor, ranges: torch.Tensor, units: torch.Tensor) -> None:
    """Undo `pack_units`. What compressed units do not use stays as it is.

    Args:
        packed: [bytes] uint8.
        ranges: [n, G, 2] BF16.
        units: [n, 2 * H] uint8, written; rows may be apart.

    Raises:
        ValueError: There are more or fewer bytes than the ranges say.
    """
    cuts = _unit_bytes(ranges, units.size(1) // 2)
    sizes: list[int] = []
    for whole, used, is_fit in cuts:
        num_fit = int(is_fit.sum())
        sizes += [num_fit * (used.stop - used.start), (is_fit.numel() - num_fit) * (whole.stop - whole.start)]
    if sum(sizes) != packed.numel():
        raise ValueError(f"logfmt: {packed.numel()} bytes of packed units, the ranges say {sum(sizes)}")
    parts = iter(packed.split(sizes))
    for whole, used, is_fit in cuts:
        units[is_fit, used] = next(parts).view(-1, used.stop - used.start)
        units[~is_fit, whole] = next(parts).view(-1, whole.stop - whole.start)


def _unit_bytes(ranges: torch.Tensor, hidden: int) -> list[tuple[slice, slice, torch.Tensor]]:
    """The bytes of each unit, those that a compressed one uses, and which rows compress it, [n] bool."""
    amax, amin = ranges.float().unbind(-1)
    cuts = []
    for block in _blocks(amax, amin, hidden):
        size = block.channels
        for index in range(block.num_units):
            first = 2 * (block.first + index * size)
            used = slice(first, first + size + -(-size // _CODES_PER_BYTE))
            cuts.append((slice(first, first + 2 * size), used, block.is_fit[:, index, 0]))
    return cuts


class _Block(NamedTuple):
    """Units of one size, side by side in each row.

    Attributes:
        first: Their first channel.
        num_units: U.
        channels: C, channels of a unit.
        is_fit: [n, U, 1] bool, which rows compress them.
    """

    first: int
    num_units: int
    channels: int
    is_fit: torch.Tensor

    def of(self, rows: torch.Tensor, channels_per_element: int = 1) -> torch.Tensor:
        """The part of rows [n, >= H / channels_per_element] that has these units: [n, U, elements of a unit]."""
        first, size = self.first // channels_per_element, -(-self.channels // channels_per_element)
        return rows[:, first : first + self.num_units * size].unflatten(1, (self.num_units, size))

    def planes(self, units: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The bytes of compressed units: low bits [n, U, C], then high bits [n, U, ceil(C / 4)]."""
        stop = 2 * (self.first + self.num_units * self.channels)
        whole = units[:, 2 * self.first : stop].unflatten(1, (self.num_units, 2 * self.channels))
        used = self.channels + -(-self.channels // _CODES_PER_BYTE)
        return whole[..., : self.channels], whole[..., self.channels : used]


def _replace(target: torch.Tensor, values: torch.Tensor, is_wanted: torch.Tensor) -> None:
    """Write [n, U, C] values into the units that [n, U, 1] names. As a rule all units are of one kind."""
    num_wanted = int(is_wanted.sum())
    if num_wanted == is_wanted.numel():
        target.copy_(values)
    elif num_wanted:
        target.copy_(torch.where(is_wanted, values.to(target.dtype), target))


def _groups(x: torch.Tensor, padding: float) -> torch.Tensor:
    """[n, H] to [n, G, 128]."""
    missing = -x.size(1) % GROUP_CHANNELS
    padded = torch.nn.functional.pad(x, (0, missing), value=padding) if missing else x
    return padded.unflatten(-1, (-1, GROUP_CHANNELS))


def _scale(amax: torch.Tensor, amin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`hi`, `lo` and `step` of groups; the step of a group that has none is 1."""
    high = torch.log2(amax)
    low = torch.maximum(torch.log2(amin), high - _SPAN)
    return high, low, torch.where(low < high, (high - low) / _STEPS, 1.0)


def _blocks(amax: torch.Tensor, amin: torch.Tensor, hidden: int) -> list[_Block]:
    """The units of rows: the full ones, then one that is shorter. What is compressed is decided by the ranges alone."""
    high, low, _ = _scale(amax, amin)
    is_fit, unit = (high < 0) & (low < high), unit_channels(hidden)
    groups, num_full, blocks = unit // GROUP_CHANNELS, hidden // unit, []
    if num_full:
        fits = is_fit[:, : num_full * groups].unflatten(1, (num_full, groups)).all(-1, keepdim=True)
        blocks.append(_Block(0, num_full, unit, fits))
    if hidden % unit:
        fits = is_fit[:, num_full * groups :].all(-1).view(-1, 1, 1)
        blocks.append(_Block(num_full * unit, 1, hidden % unit, fits))
    return blocks


def _codes(magnitudes: torch.Tensor, amax: torch.Tensor, amin: torch.Tensor) -> torch.Tensor:
    """[n, 128 * G] int16 codes without signs; meaningless in units that are not compressed. Overwrites magnitudes."""
    _, low, step = _scale(amax, amin)
    # Where values, not logarithms, are halfway between two codes.
    middle = 2.0 - torch.log2((1.0 + torch.exp2(step)) / 2.0) / step
    # The natural logarithm: torch has no fast one to base 2 on all CPUs.
    factor, shift = (1.0 / (_LN_2 * step)).unsqueeze(-1), (middle - low / step).unsqueeze(-1)
    exact = _groups(magnitudes.log_(), -float("inf")).mul_(factor).add_(shift)
    return exact.clamp_(0.0, _MOST).to(torch.int16).flatten(1)


def _pack(pairs: torch.Tensor) -> torch.Tensor:
    """[n, C] int16 numbers of two bits to [n, C / 4] int32, of which the low byte counts: the first in its lowest bits.

    Example:
        `[1, 0, 0, 2]` is `1 | 2 << 6`.
    """
    quads = pairs.to(torch.uint8).view(torch.int32)  # the first of four is in the lowest byte
    return quads | quads >> 6 | quads >> 12 | quads >> 18


def _words(low: torch.Tensor, packed: torch.Tensor) -> torch.Tensor:
    """Codes as int16: 9 bits, and the sign as int16 has it.

    Args:
        low: [n, U, C] uint8.
        packed: [n, U, ceil(C / 4)] uint8.
    """
    quads = _quads().to(packed.device).index_select(0, packed.int().flatten())
    high = quads.view(torch.int16).view(*packed.shape[:-1], -1)
    return low.to(torch.int16).bitwise_or_(high[..., : low.size(-1)])


@functools.cache
def _quads() -> torch.Tensor:
    """[256] int64: for each byte of four pairs of bits, four int16, each with a pair where a word has it."""
    pairs = (torch.arange(256, device="cpu").unsqueeze(1) >> torch.tensor([0, 2, 4, 6], device="cpu")) & 3
    words = (pairs & 1) << 8 | (pairs & _SIGN) << _SIGN_SHIFT
    return words.to(torch.int16).view(torch.int64).flatten()
