"""LogFMT on a GPU: magnitudes as 10-bit logarithms. The CPU's twin is `deep_ep.logfmt`, where numbers are explained.

A row is cut into units of 1024 channels (512 where H is no multiple of that), a unit into groups of 128. The *ranges*
of a row, the largest and the smallest magnitude of each group as BF16, always travel. A unit whose groups all have
magnitudes below 1, and more than one of them, is compressed: a code of one sign bit and 9 bits for each channel, its
low 8 bits in one plane of bytes, its high 2 bits in a second, four to a byte. Any other unit travels as it is.
"""

from __future__ import annotations

from .._triton import tl, triton

_GROUP = tl.constexpr(128)
_SPAN = tl.constexpr(32.0)  # binary orders of magnitude below the largest that are kept
_STEPS = tl.constexpr(510.0)


def unit_of(hidden: int) -> int:
    """Return the channels of a unit."""
    return 1024 if hidden % 1024 == 0 else 512


@triton.jit
def _logs(amax, amin):
    """Return the logarithms of a group's range, and whether it can be compressed."""
    high = tl.log2(amax)
    low = tl.maximum(tl.log2(amin), high - _SPAN)
    is_fit = (high < 0) & (low < high)
    return high, low, is_fit


@triton.jit
def encode_row(source, slot, hidden, ranges_offset, UNIT: tl.constexpr):
    """Compress one row of BF16 into its slot."""
    GROUPS: tl.constexpr = UNIT // 128
    ranges = (slot + ranges_offset).to(tl.pointer_type(tl.bfloat16))
    for first in range(0, hidden, UNIT):
        groups = first // _GROUP + tl.arange(0, GROUPS)
        offsets = tl.arange(0, GROUPS)[:, None] * _GROUP + tl.arange(0, _GROUP)[None, :]
        is_channel = first + offsets < hidden
        values = tl.load(source + first + offsets, mask=is_channel, other=0.0)
        wide = values.to(tl.float32)
        # A NaN is no magnitude below 1, but would not be seen by the maximum: its unit must travel as it is.
        magnitudes = tl.where(wide == wide, tl.abs(wide), float("inf"))
        amax = tl.max(magnitudes, 1)
        amin = tl.min(tl.where(is_channel, magnitudes, float("inf")), 1)
        is_group = groups * _GROUP < hidden
        tl.store(ranges + 2 * groups, amax.to(tl.bfloat16), mask=is_group)
        tl.store(ranges + 2 * groups + 1, amin.to(tl.bfloat16), mask=is_group)
        high, low, is_fit = _logs(amax, amin)
        num_unfit = tl.sum((is_group & (is_fit == 0)).to(tl.int32))
        if num_unfit == 0:
            codes = _codes(wide, magnitudes, high, low)
            plane = tl.multiple_of((slot + 2 * first).to(tl.pointer_type(tl.uint8)), 16)
            tl.store(plane + offsets, (codes & 0xFF).to(tl.uint8), mask=is_channel)
            shifted = (codes >> 8) << ((offsets % 4) * 2)
            packed = tl.sum(tl.reshape(shifted, [GROUPS * 32, 4]), 1)
            quads = tl.arange(0, GROUPS * 32)
            num_here = tl.minimum(hidden - first, UNIT)
            tl.store(plane + num_here + quads, packed.to(tl.uint8), mask=quads * 4 < num_here)
        else:
            plain = tl.multiple_of((slot + 2 * first).to(tl.pointer_type(tl.bfloat16)), 16)
            tl.store(plain + offsets, values, mask=is_channel)


@triton.jit
def _codes(values, magnitudes, high, low):
    """Return 10-bit codes of a unit's channels. Midpoints are those of the values, not of their logarithms."""
    step = tl.where(low < high, (high - low) / _STEPS, 1.0)
    middle = 2.0 - tl.log2((1.0 + tl.exp2(step)) * 0.5) / step
    exact = tl.log2(magnitudes) / step[:, None] + (middle - low / step)[:, None]
    code = tl.floor(tl.maximum(exact, 0.0)).to(tl.int32)
    code = tl.where(magnitudes > 0, tl.minimum(code, 511), 0)
    return code | tl.where(values < 0, 512, 0)


@triton.jit
def decode(slot, first, hidden, ranges_offset, UNIT: tl.constexpr):
    """Decode one unit of a row, [UNIT] float32, from channel `first` on."""
    GROUPS: tl.constexpr = UNIT // 128
    offsets = tl.arange(0, UNIT)
    groups = first // _GROUP + tl.arange(0, GROUPS)
    is_group = groups * _GROUP < hidden
    ranges = (slot + ranges_offset).to(tl.pointer_type(tl.bfloat16))
    amax = tl.load(ranges + 2 * groups, mask=is_group, other=0.0).to(tl.float32)
    amin = tl.load(ranges + 2 * groups + 1, mask=is_group, other=0.0).to(tl.float32)
    high, low, is_fit = _logs(amax, amin)
    num_unfit = tl.sum((is_group & (is_fit == 0)).to(tl.int32))
    is_channel = first + offsets < hidden
    if num_unfit == 0:
        plane = tl.multiple_of((slot + 2 * first).to(tl.pointer_type(tl.uint8)), 16)
        code = tl.load(plane + offsets, mask=is_channel, other=0).to(tl.int32)
        above = tl.load(plane + tl.minimum(hidden - first, UNIT) + offsets // 4, mask=is_channel, other=0).to(tl.int32)
        code = code | (((above >> ((offsets % 4) * 2)) & 3) << 8)
        step = tl.where(low < high, (high - low) / _STEPS, 1.0)
        spread = tl.zeros([GROUPS, _GROUP], tl.float32)
        steps = tl.reshape(spread + step[:, None], [UNIT])
        lows = tl.reshape(spread + low[:, None], [UNIT])
        magnitude = tl.exp2(((code & 511) - 1).to(tl.float32) * steps + lows)
        magnitude = tl.where((code & 511) == 0, 0.0, magnitude)
        value = tl.where(code >= 512, -magnitude, magnitude)
    else:
        pointer = tl.multiple_of((slot + 2 * first).to(tl.pointer_type(tl.bfloat16)), 16)
        value = tl.load(pointer + offsets, mask=is_channel, other=0.0).to(tl.float32)
    return value
