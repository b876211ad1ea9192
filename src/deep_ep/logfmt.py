"""LogFMT: BF16 magnitudes as 10-bit logarithms, for rows that are combined. Pure torch; lossy, 5/8 of the bytes.

A row of H channels is cut into *units* of 1024 (512 where H is no multiple of 1024, the last perhaps shorter), a unit
into *groups* of 128. The *ranges* of a row, the largest and the smallest magnitude of each group, always travel beside
it. A unit is compressed if all its groups have magnitudes below 1, and more than one of them; else it travels as BF16.
So who has the ranges knows how to read the units.

Codes: a sign and 9 bits. With `hi = log2(amax)`, `lo = max(log2(amin), hi - 32)` and `step = (hi - lo) / 510` of a
group, 0 is 0 and c > 0 is `2 ** ((c - 1) * step + lo)`. Rounding goes to the nearest value, not to the nearest
logarithm.

A compressed unit of C channels has the low 8 bits of its codes in C bytes, then the high 2 bits, four codes to a byte.
"""

from __future__ import annotations

import math

import torch

from .quant import GROUP_CHANNELS

_UNIT_CHANNELS, _SHORT_UNIT_CHANNELS = 1024, 512
_SPAN = 32.0  # binary orders of magnitude below the largest that are kept
_STEPS = 510.0  # from the code of the smallest magnitude, 1, to that of the largest, 511
_MOST = 511
_SIGN, _SIGN_SHIFT = 2, 14  # among the high bits of a code; from there to the sign of a BF16
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
    hidden, magnitudes = x.size(1), x.float().abs_()
    amax = _groups(magnitudes, 0.0).amax(-1)
    amin = _groups(magnitudes, float("inf")).amin(-1)
    codes = _codes(magnitudes, amax, amin)
    signs = (x.view(torch.int16) >> _SIGN_SHIFT) & _SIGN
    units = x.clone().view(torch.uint8)
    for first, stop, is_fit in _units(amax, amin, hidden):
        low, high = _planes(units, first, stop)
        code = codes[:, first:stop]
        _replace(low, code.to(torch.uint8), is_fit)
        _replace(high, _pack(((code >> 8) | signs[:, first:stop]).to(torch.uint8)), is_fit)
    return units, torch.stack([amax, amin], dim=-1).to(torch.bfloat16)


def decode(units: torch.Tensor, ranges: torch.Tensor, hidden: int) -> torch.Tensor:
    """Undo `encode`, as far as it can be.

    Args:
        units: [n, 2 * H] uint8, contiguous.
        ranges: [n, G, 2] BF16.
        hidden: H.

    Returns:
        [n, H] float32, new.
    """
    amax, amin = ranges.float().unbind(-1)
    values = units.view(torch.bfloat16).float()
    _, low_log, step_log = _scale(amax, amin)
    step, zeroth = _per_channel(step_log, hidden), _per_channel(low_log - step_log, hidden)
    for first, stop, is_fit in _units(amax, amin, hidden):
        low, packed = _planes(units, first, stop)
        high = _unpack(packed, stop - first)
        code = low.float().add_((high & 1).float(), alpha=256.0)
        is_value = code.clamp(max=1.0)  # code 0 is 0
        value = code.mul_(step[:, first:stop]).add_(zeroth[:, first:stop]).exp2_().mul_(is_value)
        value.mul_(1.0 - (high & _SIGN).float())
        _replace(values[:, first:stop], value, is_fit)
    return values


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
    for first, stop, is_fit in _units(amax, amin, hidden):
        used = 2 * first + (stop - first) + -(-(stop - first) // _CODES_PER_BYTE)
        cuts.append((slice(2 * first, 2 * stop), slice(2 * first, used), is_fit[:, 0]))
    return cuts


def _planes(units: torch.Tensor, first: int, stop: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The bytes of a compressed unit: low bits [n, C], then high bits [n, ceil(C / 4)]."""
    middle = first + stop  # 2 * first and C more
    return units[:, 2 * first : middle], units[:, middle : middle - (first - stop) // _CODES_PER_BYTE]


def _replace(target: torch.Tensor, values: torch.Tensor, is_wanted: torch.Tensor) -> None:
    """Write [n, C] values into the rows where [n, 1] says so. As a rule all rows are of one kind."""
    num_wanted = int(is_wanted.sum())
    if num_wanted == is_wanted.numel():
        target.copy_(values)
    elif num_wanted:
        target.copy_(torch.where(is_wanted, values, target))


def _groups(x: torch.Tensor, padding: float) -> torch.Tensor:
    """[n, H] to [n, G, 128]."""
    missing = -x.size(1) % GROUP_CHANNELS
    padded = torch.nn.functional.pad(x, (0, missing), value=padding) if missing else x
    return padded.unflatten(-1, (-1, GROUP_CHANNELS))


def _per_channel(group: torch.Tensor, hidden: int) -> torch.Tensor:
    """[n, G] to [n, H]."""
    return group.repeat_interleave(GROUP_CHANNELS, -1)[:, :hidden]


def _scale(amax: torch.Tensor, amin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`hi`, `lo` and `step` of groups; the step of a group that has none is 1."""
    high = torch.log2(amax)
    low = torch.maximum(torch.log2(amin), high - _SPAN)
    return high, low, torch.where(low < high, (high - low) / _STEPS, 1.0)


def _units(amax: torch.Tensor, amin: torch.Tensor, hidden: int) -> list[tuple[int, int, torch.Tensor]]:
    """First channel and end of each unit, and which rows compress it, [n, 1] bool. Decided from the ranges alone."""
    high, low, _ = _scale(amax, amin)
    is_fit, unit = (high < 0) & (low < high), unit_channels(hidden)
    groups = unit // GROUP_CHANNELS
    starts = range(0, hidden, unit)
    fits = [is_fit[:, i * groups : (i + 1) * groups].all(-1, keepdim=True) for i in range(len(starts))]
    return [(first, min(first + unit, hidden), fit) for first, fit in zip(starts, fits, strict=True)]


def _codes(magnitudes: torch.Tensor, amax: torch.Tensor, amin: torch.Tensor) -> torch.Tensor:
    """[n, H] int16 codes without signs; meaningless in units that are not compressed."""
    hidden = magnitudes.size(1)
    _, low, step = _scale(amax, amin)
    # Where values, not logarithms, are halfway between two codes.
    middle = 2.0 - torch.log2((1.0 + torch.exp2(step)) / 2.0) / step
    # The natural logarithm: torch has no fast one to base 2 on all CPUs.
    factor, shift = _per_channel(1.0 / (_LN_2 * step), hidden), _per_channel(middle - low / step, hidden)
    exact = torch.log(magnitudes).mul_(factor).add_(shift)
    return exact.clamp_(0.0, _MOST).nan_to_num_(0.0).to(torch.int16)


def _pack(pairs: torch.Tensor) -> torch.Tensor:
    """[n, C] uint8 numbers of two bits to [n, ceil(C / 4)] bytes, the first in the lowest bits."""
    missing = -pairs.size(1) % _CODES_PER_BYTE
    padded = torch.nn.functional.pad(pairs, (0, missing)) if missing else pairs
    quads = padded.unflatten(-1, (-1, _CODES_PER_BYTE))
    return quads[..., 0] | quads[..., 1] << 2 | quads[..., 2] << 4 | quads[..., 3] << 6


def _unpack(packed: torch.Tensor, count: int) -> torch.Tensor:
    """The reverse: [n, count] uint8."""
    return torch.stack([(packed >> (2 * i)) & 3 for i in range(_CODES_PER_BYTE)], -1).flatten(1)[:, :count]
