"""LogFMT on a GPU: magnitudes as 10-bit logarithms. The CPU's twin is `deep_ep.logfmt`, where numbers are explained.

A row is cut into units of 1024 channels (512 where H is no multiple of that), a unit into groups of 128. The *ranges*
of a row, the largest and the smallest magnitude of each group as BF16, always travel. A unit whose groups all have
magnitudes below 1, and more than one of them, is compressed: a code of one sign bit and 9 bits for each channel, its
low 8 bits in one plane of bytes, its high 2 bits in a second, four to a byte. Any other unit travels as it is.

These kernels are bound by instructions, not by memory, so they spend few on a channel. Channels are taken in *quads*,
four to a 64-bit word of BF16, and a thread has quads of one group only. Integers are not converted: the FP32 number
2**15 + c has the low 8 bits of code c in its byte 1, and the ninth one in byte 2, where bytes are picked to encode.
Decoding puts them there, without 2**15: this is the FP32 number c * 2**-141.
"""

from __future__ import annotations

from .._triton import tl, triton
from ..primitives import (
    byte_of,
    bytes_of,
    fast_exp2,
    fast_log2,
    larger_pairs,
    largest_pairs,
    rounded,
    scaled_magnitude,
    smaller_pairs,
    smallest_pairs,
)

_GROUP = tl.constexpr(128)
_SPAN = tl.constexpr(32.0)  # binary orders of magnitude below the largest that are kept
_SPAN_FACTOR = tl.constexpr(2.0**32)
_STEPS = tl.constexpr(510.0)
_ONE = tl.constexpr(0x3F80)  # as BF16
_MAGNITUDES = tl.constexpr(0x7FFF7FFF)  # bits of two BF16 values without their signs
_SIGN = tl.constexpr(-(2**31))  # the highest bit of an int32
_PAIR_BITS = tl.constexpr(0x80800101 - 2**32)  # of an int32: ninth bits and signs of two codes, one to a byte
_BASE = tl.constexpr(32768.0)  # 2**15, to which codes are added
_RAISE = tl.constexpr(2.0**126)  # makes codes that are bits of FP32 normal numbers,
_CODES_TO_ONE = tl.constexpr(2.0**15)  # so many to 1
# Half a step between values is log2((1 + 2**step) / 2), and step / 2 + step**2 * this, to 1e-6 of a step.
_BEND = tl.constexpr(0.08664339757)  # log(2) / 8
# Values are decoded times this, and weights divided by it: BF16 has numbers below 2**-126, fast functions have not.
_LIFT = tl.constexpr(256.0)


def unit_of(hidden: int) -> int:
    """Return the channels of a unit."""
    return 1024 if hidden % 1024 == 0 else 512


# Encode --------------------------------------------------------------------------------------------------------------


@triton.jit
def encode_row(source, slot, hidden, ranges_offset, UNIT: tl.constexpr):
    """Compress one row into its slot.

    Args:
        source: The row: int64 words of four channels if it consists of whole groups and is aligned, else int16.
        slot: The address of the slot.
        hidden: H.
        ranges_offset: Where in the slot the ranges are.
        UNIT: The channels of a unit.
    """
    IS_WHOLE: tl.constexpr = source.dtype.element_ty == tl.int64
    GROUPS: tl.constexpr = UNIT // 128
    # 32 groups at once. A tile has two dimensions, so that all compilers lay it out alike: the second one is two quads
    # of a thread, the first one goes over the four threads of a group, over groups, and then over what is left of them.
    groups = tl.arange(0, 32)
    index = tl.arange(0, 512)
    starts = ((index // 4 % 32) * 32 + (index // 128) * 8 + (index % 4) * 2)[:, None]
    quads = starts + tl.arange(0, 2)[None, :]
    units = (index // 4 % 32 // GROUPS)[:, None]
    ranges = (slot + ranges_offset).to(tl.pointer_type(tl.int32))
    for first in range(0, hidden, 32 * _GROUP):
        is_group = groups * _GROUP < hidden - first
        is_there = starts * 4 < hidden - first
        values, absent = _load_quads(source, first, quads, is_there, hidden, IS_WHOLE)
        one, other = values.to(tl.int32), (values >> 32).to(tl.int32)
        a, b = one & _MAGNITUDES, other & _MAGNITUDES
        large = larger_pairs(a, b)
        small = smaller_pairs(a | absent.to(tl.int32), b | (absent >> 32).to(tl.int32))
        large = largest_pairs(largest_pairs(tl.reshape(largest_pairs(large, 1), [4, 32, 4]), 0), 1)
        small = smallest_pairs(smallest_pairs(tl.reshape(smallest_pairs(small, 1), [4, 32, 4]), 0), 1)
        amax = tl.maximum(large & 0xFFFF, large >> 16)
        amin = tl.minimum(small & 0xFFFF, small >> 16)
        # By the first thread of each group: to hand them to others first would have the warps wait for each other.
        is_first = (index % 4 == 0) & (index < 128) & (index // 4 * _GROUP < hidden - first)
        target = ranges + first // _GROUP + (index // 4)[:, None]
        tl.store(target, _per_quad(amax | amin << 16), mask=is_first[:, None])
        # A NaN is larger than all others, as bits. A group that is not there fits.
        is_fit = tl.where(is_group & ((amax >= _ONE) | (amin >= amax)), 0, 1)
        is_fit = tl.min(tl.reshape(is_fit, [32 // GROUPS, GROUPS]), 1)[:, None]
        is_fit = tl.reshape(tl.broadcast_to(is_fit, [32 // GROUPS, GROUPS]), [32])
        scale, factor, summand = _terms(amax, amin)
        codes = _codes(a, b, _per_quad(scale), _per_quad(factor), _per_quad(summand))
        low, high = _planes(*codes, bytes_of(one, other, 0x7531))
        is_packed = _per_quad(is_fit) != 0
        target = slot + 2 * first
        _store_codes(low, high, target, units, quads, hidden - first, is_there & is_packed, UNIT, IS_WHOLE)
        target = tl.multiple_of(target.to(source.dtype), 16 if IS_WHOLE else 2)
        _store_quads(values, target, quads, hidden - first, is_there & (is_packed == 0), IS_WHOLE)


@triton.jit
def _per_quad(groups):
    """[32] of groups to [512, 1]."""
    return tl.reshape(tl.broadcast_to(groups[None, :, None], [4, 32, 4]), [512])[:, None]


@triton.jit
def _load_quads(source, first, quads, is_there, hidden, IS_WHOLE: tl.constexpr):
    """Load quads, int64; and where they lack channels, bits for these."""
    if IS_WHOLE:
        values = tl.load(tl.multiple_of(source + first // 4, 16) + quads, mask=is_there, other=0)
        absent = tl.zeros_like(values)
    else:
        values = tl.zeros(quads.shape, tl.int64)
        absent = tl.zeros(quads.shape, tl.int64)
        for index in tl.static_range(4):
            is_channel = quads * 4 + index < hidden - first
            value = tl.load(source + first + quads * 4 + index, mask=is_channel, other=0).to(tl.int64)
            values |= (value & 0xFFFF) << 16 * index
            absent |= tl.where(is_channel, 0, 0x7FFF).to(tl.int64) << 16 * index
    return values, absent


@triton.jit
def _terms(amax, amin):
    """What the codes of a group are found with: a scale for its values, a factor and a summand for their logarithms.

    The scale takes the largest magnitude to between 1 and 2: no number that a code stands for is too small for fast
    logarithms, and none of these is large.
    """
    scale = ((254 - (amax >> 7)) << 23).to(tl.float32, bitcast=True)
    high = fast_log2((amax << 16).to(tl.float32, bitcast=True) * scale)
    low = tl.maximum(fast_log2((amin << 16).to(tl.float32, bitcast=True) * scale), high - _SPAN)
    factor = _STEPS / (high - low)
    middle = 1.5 - (high - low) * (_BEND / _STEPS)
    return scale, factor, (middle + _BASE) - low * factor


@triton.jit
def _codes(one, other, scale, factor, summand):
    """Return 2**15 + code for each channel of quads, as bits of FP32. The quads have no signs, and are two int32."""
    a = _code(one << 16, scale, factor, summand)
    b = _code(one & -0x10000, scale, factor, summand)
    c = _code(other << 16, scale, factor, summand)
    d = _code(other & -0x10000, scale, factor, summand)
    return a, b, c, d


@triton.jit
def _code(magnitude, scale, factor, summand):
    """Return 2**15 + code. The largest magnitude of the group has the largest code, so that none is too large."""
    logarithm = fast_log2(magnitude.to(tl.float32, bitcast=True) * scale)
    return tl.maximum(tl.fma(logarithm, factor, summand), _BASE).to(tl.int32, bitcast=True)


@triton.jit
def _planes(a, b, c, d, signs):
    """Return the low bits of quads, int32, and the high ones, in the lowest byte; signs come in the bytes' highest."""
    ab, cd = bytes_of(a, b, 0x6251), bytes_of(c, d, 0x6251)
    above = bytes_of(ab, cd, 0x7632) | ((signs >> 6) & 0x02020202)
    # The product has two bits of each byte side by side in its highest byte.
    return bytes_of(ab, cd, 0x5410), (above * 0x01041040) >> 24


@triton.jit
def _store_codes(low, high, target, units, quads, num_left, mask, UNIT: tl.constexpr, IS_WHOLE: tl.constexpr):
    """Store the planes of units, with so many channels left from the address on."""
    num_channels = tl.minimum(num_left - units * UNIT, UNIT)
    plane = target.to(tl.pointer_type(tl.uint8))
    if IS_WHOLE:
        words = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
        tl.store(words + units * (UNIT // 4) + quads, low, mask=mask)
        plane = tl.multiple_of(plane, 16)
        num_channels = num_channels // 8 * 8  # which tells the compiler so
    else:
        for index in tl.static_range(4):
            is_channel = mask & (quads * 4 + index < num_left)
            tl.store(plane + units * UNIT + quads * 4 + index, (low >> 8 * index).to(tl.uint8), mask=is_channel)
        mask = mask & (quads * 4 < num_left)
    tl.store(plane + (units * (2 * UNIT - UNIT // 4) + num_channels + quads), high.to(tl.uint8), mask=mask)


@triton.jit
def _store_quads(values, target, quads, num_left, mask, IS_WHOLE: tl.constexpr):
    """Store quads as they are."""
    if IS_WHOLE:
        tl.store(target + quads, values, mask=mask)
    else:
        for index in tl.static_range(4):
            value = (values >> 16 * index).to(tl.int16)
            tl.store(target + quads * 4 + index, value, mask=mask & (quads * 4 + index < num_left))


# Decode --------------------------------------------------------------------------------------------------------------


@triton.jit
def sum_rows(
    rows, weights, num_rows, first, hidden, ranges_offset, UNIT: tl.constexpr, WHOLE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Sum a unit of some rows with weights, in their order.

    Args:
        rows: [K] addresses of slots; 0: there is no row.
        weights: [K], 0 where there is no row.
        num_rows: From this one on there is no row.
        first: The first channel of the unit.
        hidden: H.
        ranges_offset: Where in a slot the ranges are.
        UNIT: The channels of a unit.
        WHOLE: A divisor of H: 8 or 1.
        AT_ONCE: Rows whose loads are issued before the first is waited for.

    Returns:
        Four tiles of float32: of each quad of `quads_of` the first channels, the second ones, and so on.
    """
    a = tl.zeros([UNIT // 16, 4], tl.float32)
    b, c, d = a + 0.0, a + 0.0, a + 0.0
    if rows.shape[0] <= AT_ONCE:  # without a loop, across which the compiler would not issue loads early
        a, b, c, d = _add_rows(a, b, c, d, rows, weights, 0, first, hidden, ranges_offset, UNIT, WHOLE, AT_ONCE)
    else:
        for start in range(0, num_rows, AT_ONCE):
            a, b, c, d = _add_rows(a, b, c, d, rows, weights, start, first, hidden, ranges_offset, UNIT, WHOLE, AT_ONCE)
    return a, b, c, d


@triton.jit
def quads_of(UNIT: tl.constexpr):
    """The quads of a unit, as `sum_rows` has them, 4 in a row; and the first of each row.

    A thread of the warp has only quads of one group.
    """
    SHARES: tl.constexpr = 4096 // UNIT  # threads that have a group
    index = tl.arange(0, UNIT // 16)
    starts = (index % 32 // SHARES) * 32 + (index // 32) * (4 * SHARES) + (index % SHARES) * 4
    return starts[:, None], starts[:, None] + tl.arange(0, 4)[None, :]


@triton.jit
def _per_thread(threads, UNIT: tl.constexpr):
    """[32] of threads to all quads."""
    return tl.reshape(tl.broadcast_to(threads[None, :], [UNIT // 512, 32]), [UNIT // 16])[:, None]


@triton.jit
def _add_rows(
    a, b, c, d, rows, weights, start, first, hidden, ranges_offset, UNIT: tl.constexpr, WHOLE: tl.constexpr,
    AT_ONCE: tl.constexpr,
):  # fmt: skip
    """Add some rows, from the `start`-th on. All loads are issued before any of them is waited for.

    They are those of compressed units, before it is known that these are. Where one is not, or has codes of 0, which
    the short way does not look for, all of these rows are taken one by one.
    """
    ks = tl.arange(0, rows.shape[0])
    ranges = ()
    lows = ()
    highs = ()
    for turn in tl.static_range(AT_ONCE):
        row = tl.sum(tl.where(ks == start + turn, rows, 0))
        ranges = ranges + (_load_ranges(row, first, hidden, ranges_offset, UNIT),)  # type: ignore[assignment]
        low, high = _load_codes(row, first, hidden, UNIT, WHOLE)
        lows, highs = lows + (low,), highs + (high,)  # type: ignore[assignment]
    # Code 0 is 0, or what is 32 orders of magnitude below the largest.
    is_usual = tl.full([32], 1, tl.int32)
    for turn in tl.static_range(AT_ONCE):
        amax, amin = _limits(ranges[turn])
        is_usual = tl.where(_is_fit(amax, amin) & (amin * _SPAN_FACTOR >= amax), is_usual, 0)
    if tl.min(is_usual) != 0:
        for turn in tl.static_range(AT_ONCE):
            weight = tl.sum(tl.where(ks == start + turn, weights, 0.0)) / _LIFT
            e, f, g, h = _values(lows[turn], highs[turn], ranges[turn], UNIT, False)
            a, b, c, d = tl.fma(e, weight, a), tl.fma(f, weight, b), tl.fma(g, weight, c), tl.fma(h, weight, d)
    else:
        for k in range(start, start + AT_ONCE):
            row = tl.sum(tl.where(ks == k, rows, 0))
            if row != 0:
                weight = tl.sum(tl.where(ks == k, weights, 0.0))
                e, f, g, h = _any_values(row, first, hidden, ranges_offset, UNIT, WHOLE)
                a, b, c, d = tl.fma(e, weight, a), tl.fma(f, weight, b), tl.fma(g, weight, c), tl.fma(h, weight, d)
    return a, b, c, d


@triton.jit
def _any_values(row, first, hidden, ranges_offset, UNIT: tl.constexpr, WHOLE: tl.constexpr):
    """The values of a unit, whether it is compressed or not."""
    ranges = _load_ranges(row, first, hidden, ranges_offset, UNIT)
    amax, amin = _limits(ranges)
    if tl.min(_is_fit(amax, amin).to(tl.int32)) != 0:
        low, high = _load_codes(row, first, hidden, UNIT, WHOLE)
        a, b, c, d = _values(low, high, ranges, UNIT, True)
        a, b, c, d = a / _LIFT, b / _LIFT, c / _LIFT, d / _LIFT
    else:
        _, quads = quads_of(UNIT)
        source = tl.multiple_of((row + 2 * first).to(tl.pointer_type(tl.int64)), 16)
        values = tl.load(source + quads, mask=quads * 4 < hidden - first, other=0)
        one, other = values.to(tl.int32), (values >> 32).to(tl.int32)
        a, b = (one << 16).to(tl.float32, bitcast=True), (one & -0x10000).to(tl.float32, bitcast=True)
        c, d = (other << 16).to(tl.float32, bitcast=True), (other & -0x10000).to(tl.float32, bitcast=True)
    return a, b, c, d


@triton.jit
def _load_ranges(row, first, hidden, ranges_offset, UNIT: tl.constexpr):
    """The ranges of the threads' groups, [32] int32; where there is no group or no row, one that fits."""
    groups = tl.arange(0, 32) // (4096 // UNIT)
    source = (row + ranges_offset).to(tl.pointer_type(tl.int32))
    is_group = groups * _GROUP < tl.where(row != 0, hidden - first, 0)
    return tl.load(source + first // _GROUP + groups, mask=is_group, other=0x3E803F00)  # from 0.25 to 0.5


@triton.jit
def _limits(ranges):
    """The largest and the smallest magnitude."""
    return (ranges << 16).to(tl.float32, bitcast=True), (ranges & -0x10000).to(tl.float32, bitcast=True)


@triton.jit
def _is_fit(amax, amin):
    """Whether a group can be compressed. With a NaN it cannot."""
    return (amax < 1.0) & (amin < amax)


@triton.jit
def _load_codes(row, first, hidden, UNIT: tl.constexpr, WHOLE: tl.constexpr):
    """The codes of a unit, if it is compressed: low bits of each quad, high ones of 4 quads in a row. No row: zeros."""
    starts, quads = quads_of(UNIT)
    num_channels = tl.minimum(hidden - first, UNIT)
    # What is read behind the unit lies in the slot and is not used. With a mask by quad each would be loaded by itself.
    mask = starts * 4 < tl.where(row != 0, num_channels, 0)
    plane = tl.multiple_of((row + 2 * first).to(tl.pointer_type(tl.int32)), 16)
    low = tl.load(plane + quads, mask=mask, other=0)
    plane = row + 2 * first + num_channels
    if WHOLE % 4 == 0:
        words = tl.multiple_of(plane.to(tl.pointer_type(tl.int32)), 4)
        high = tl.load(words + starts // 4, mask=mask, other=0)
    else:
        high = tl.zeros(starts.shape, tl.int32)
        for index in tl.static_range(4):
            byte = tl.load(plane.to(tl.pointer_type(tl.uint8)) + starts + index, mask=mask, other=0)
            high |= byte.to(tl.int32) << 8 * index
    return low, high


@triton.jit
def _values(low, high, ranges, UNIT: tl.constexpr, HAS_ZEROS: tl.constexpr):
    """The values of quads times `_LIFT`: four tiles. Without zeros, code 0 does not come."""
    amax, amin = _limits(ranges)
    above = fast_log2(amax * _LIFT)
    least = tl.maximum(fast_log2(amin * _LIFT), above - _SPAN)
    step = (above - least) * (1.0 / _STEPS)
    zeroth, step = _per_thread(least - step, UNIT), _per_thread(step * _CODES_TO_ONE, UNIT)
    # Four bits of two channels, spread: the highest of their codes to bytes 0 and 1, the signs to bytes 2 and 3.
    index = tl.arange(0, 4)[None, :]
    one = (byte_of(high & 0x0F0F0F0F, index) * 0x10400041) & _PAIR_BITS
    other = (byte_of((high >> 4) & 0x0F0F0F0F, index) * 0x10400041) & _PAIR_BITS
    a = _value(bytes_of(low, one, 0x640C).to(tl.float32, bitcast=True), step, zeroth, HAS_ZEROS)
    b = _value(bytes_of(low, one, 0x751C).to(tl.float32, bitcast=True), step, zeroth, HAS_ZEROS)
    c = _value(bytes_of(low, other, 0x642C).to(tl.float32, bitcast=True), step, zeroth, HAS_ZEROS)
    d = _value(bytes_of(low, other, 0x753C).to(tl.float32, bitcast=True), step, zeroth, HAS_ZEROS)
    return a, b, c, d


@triton.jit
def _value(bits, step, zeroth, HAS_ZEROS: tl.constexpr):
    """The value of a code, which is given as bits of FP32 with a sign: a number below 2**-126, code * 2**-141."""
    code = scaled_magnitude(bits, _RAISE)
    magnitude = fast_exp2(tl.fma(code, step, zeroth))
    if HAS_ZEROS:
        magnitude = tl.where(code > 0, magnitude, 0.0)
    sign = bits.to(tl.int32, bitcast=True) & _SIGN
    return (magnitude.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
def store_sums(out, first, hidden, sums, IS_WHOLE: tl.constexpr, UNIT: tl.constexpr):
    """Store the sums of a unit into their row, as BF16.

    Args:
        out: The row.
        first: The first channel of the unit.
        hidden: H.
        sums: Of `sum_rows`.
        IS_WHOLE: The row begins at a multiple of 16 bytes, and consists of quads.
        UNIT: The channels of a unit.
    """
    _, quads = quads_of(UNIT)
    if IS_WHOLE:
        values = tl.zeros(quads.shape, tl.int64)
        for index in tl.static_range(4):
            bits = rounded(sums[index], tl.bfloat16).to(tl.int16, bitcast=True).to(tl.int64)
            values |= (bits & 0xFFFF) << 16 * index
        target = tl.multiple_of(out.to(tl.pointer_type(tl.int64)), 16)
        tl.store(target + first // 4 + quads, values, mask=quads // 2 * 8 < hidden - first)
    else:
        for index in tl.static_range(4):
            is_channel = quads * 4 + index < hidden - first
            tl.store(out + first + quads * 4 + index, rounded(sums[index], tl.bfloat16), mask=is_channel)
