"""Device primitives: the only inline PTX, each with a form for Triton's interpreter.

Everything is of system scope. A narrower scope would work for ranks that share a GPU, but not for ranks on different
GPUs.
"""

from __future__ import annotations

import time

from ._triton import INTERPRETED, tl, triton

if INTERPRETED:

    def clock_ns(lanes):
        """Nanoseconds of a clock that all ranks of a host share; one value a lane."""
        time.sleep(1e-3)  # between two polls: the peers' interpreters need the core
        return lanes.to(tl.int64) * 0 + time.monotonic_ns()

    @triton.jit
    def load_acquire(pointers):
        """Load int64 words, before everything that is read afterwards."""
        return tl.atomic_add(pointers, 0, sem="acquire", scope="sys")

    @triton.jit
    def store_release(pointers, values, mask):
        """Store int64 words, after everything that this block wrote before."""
        tl.atomic_xchg(pointers, values, mask=mask, sem="release", scope="sys")

    @triton.jit
    def tell_host(pointer, value):
        """Store an int64 word in the host's memory, after everything that this block wrote before."""
        tl.atomic_xchg(pointer, value, sem="release", scope="sys")

    @triton.jit
    def rounded(values, dtype):
        """Round to the nearest, ties to even. The interpreter's own conversion to BF16 truncates."""
        if dtype == tl.bfloat16:
            bits = values.to(tl.int32, bitcast=True)
            bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
            return bits.to(tl.int16).to(tl.bfloat16, bitcast=True)
        return values.to(dtype)

    @triton.jit
    def widened(values, dtype):
        """Convert to a type that has all values of the present one.

        The interpreter's own conversion makes other numbers of subnormal BF16 numbers.
        """
        if values.dtype == tl.bfloat16:
            values = (values.to(tl.int16, bitcast=True).to(tl.int32) << 16).to(tl.float32, bitcast=True)
        return values.to(dtype)

    @triton.jit
    def to_fp8(values):
        """FP32 values of at most 448 as FP8 E4M3, to the nearest, ties to even.

        The interpreter's own conversion truncates.
        """
        bits = tl.abs(values).to(tl.int32, bitcast=True)
        normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
        # The spacing of FP32 numbers at 2**14 is 2**-9, as that of the smallest FP8 numbers.
        small = (tl.abs(values) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
        code = tl.where(bits < 0x3C800000, small, normal)
        code = tl.where(values == values, code, 0x7F) | tl.where(values.to(tl.int32, bitcast=True) < 0, 0x80, 0)
        return code.to(tl.uint8).to(tl.float8e4nv, bitcast=True)

    @triton.jit
    def fast_log2(values):
        """Logarithms to base 2 of FP32 values."""
        return tl.log2(values)

    @triton.jit
    def fast_exp2(values):
        """Powers of 2, of FP32 exponents."""
        return tl.exp2(values)

    @triton.jit
    def bytes_of(first, second, SELECTOR: tl.constexpr):
        """Four bytes of two int32 words, see the compiled form."""
        word = first & 0
        for index in tl.static_range(4):
            source = first if (SELECTOR >> 4 * index) & 4 == 0 else second
            byte = (source >> 8 * ((SELECTOR >> 4 * index) & 3)) & 0xFF
            byte = byte if (SELECTOR >> 4 * index) & 8 == 0 else (byte >> 7) * 0xFF
            word = word | byte << 8 * index
        return word

    @triton.jit
    def byte_of(words, index):
        """The bytes of int32 words that an index from 0 to 3 names."""
        return (words >> 8 * index) & 0xFF

    @triton.jit
    def scaled_magnitude(values, FACTOR: tl.constexpr):
        """Magnitudes of FP32 values times a factor."""
        return tl.abs(values) * FACTOR

    @triton.jit
    def larger_pairs(first, second):
        """The larger of two pairs of BF16 magnitudes, each pair an int32; a NaN is larger than all others."""
        return (
            tl.maximum(first & 0xFFFF, second & 0xFFFF)
            | tl.maximum((first >> 16) & 0xFFFF, (second >> 16) & 0xFFFF) << 16
        )

    @triton.jit
    def smaller_pairs(first, second):
        """The smaller of two pairs of BF16 magnitudes, each pair an int32; a NaN is larger than all others."""
        return (
            tl.minimum(first & 0xFFFF, second & 0xFFFF)
            | tl.minimum((first >> 16) & 0xFFFF, (second >> 16) & 0xFFFF) << 16
        )

    @triton.jit
    def largest_pairs(words, axis):
        """Reduce pairs of BF16 magnitudes by `larger_pairs`."""
        return tl.max(words & 0xFFFF, axis) | tl.max((words >> 16) & 0xFFFF, axis) << 16

    @triton.jit
    def smallest_pairs(words, axis):
        """Reduce pairs of BF16 magnitudes by `smaller_pairs`."""
        return tl.min(words & 0xFFFF, axis) | tl.min((words >> 16) & 0xFFFF, axis) << 16

else:

    @triton.jit
    def clock_ns(lanes):
        """Nanoseconds of a clock that all ranks of a host share; one value a lane."""
        return tl.inline_asm_elementwise(
            "{ .reg .b32 %unused; mov.b32 %unused, $1; mov.u64 $0, %globaltimer; }",
            "=l,r",
            [lanes],
            dtype=tl.int64,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def load_acquire(pointers):
        """Load int64 words, before everything that is read afterwards."""
        return tl.inline_asm_elementwise(
            "ld.acquire.sys.global.b64 $0, [$1];", "=l,l", [pointers], dtype=tl.int64, is_pure=False, pack=1
        )

    @triton.jit
    def store_release(pointers, values, mask):
        """Store int64 words, after everything that this block wrote before.

        It is a store and not an atomic exchange: the words may be in the host's memory, where not every machine
        supports atomics. Each word has one writer, so a store is enough.
        """
        # The barrier orders the writes of the block's other threads before the release of the one that stores.
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            """{
                .reg .pred %stored;
                setp.ne.b32 %stored, $3, 0;
                @%stored st.release.sys.global.b64 [$1], $2;
                mov.b32 $0, 0;
            }""",
            "=r,l,l,r",
            [pointers, values, mask.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def tell_host(pointer, value):
        """Store an int64 word in the host's memory, after everything that this block wrote before.

        All threads store the same.
        """
        tl.debug_barrier()
        tl.inline_asm_elementwise(
            "{ st.release.sys.global.b64 [$1], $2; mov.b32 $0, 0; }",
            "=r,l,l",
            [pointer, value],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )

    @triton.jit
    def rounded(values, dtype):
        """Round to the nearest value, ties to even."""
        return values.to(dtype)

    @triton.jit
    def widened(values, dtype):
        """Convert to a type that has all values of the present one."""
        return values.to(dtype)

    @triton.jit
    def to_fp8(values):
        """FP32 values of at most 448 as FP8 E4M3, rounded to the nearest, ties to even."""
        return values.to(tl.float8e4nv)

    @triton.jit
    def fast_log2(values):
        """Logarithms to base 2 of FP32 values, to 2**-22: one instruction. What is below 2**-126 counts as 0."""
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def fast_exp2(values):
        """Powers of 2, of FP32 exponents, to 2**-22 of them: one instruction. What is below 2**-126 becomes 0."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [values], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def bytes_of(first, second, SELECTOR: tl.constexpr):
        """Four bytes of two int32 words.

        Each hexadecimal digit of the selector, from the last on, names the source of one byte of the result, from the
        lowest on: 0 to 3 a byte of the first word, 4 to 7 one of the second, and 8 more, its highest bit eight times.
        """
        selector = tl.full([], SELECTOR, tl.int32)
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, $2, $3;", "=r,r,r,r", [first, second, selector], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def byte_of(words, index):
        """The bytes of int32 words that an index from 0 to 3 names."""
        return tl.inline_asm_elementwise(
            "prmt.b32 $0, $1, 0, $2;", "=r,r,r", [words, 0x4440 + index], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def scaled_magnitude(values, FACTOR: tl.constexpr):
        """Magnitudes of FP32 values times a factor: one instruction, where `tl.abs` takes another one."""
        factor = tl.full([], FACTOR, tl.float32)
        return tl.inline_asm_elementwise(
            "{ .reg .f32 %magnitude; abs.f32 %magnitude, $1; mul.f32 $0, %magnitude, $2; }",
            "=f,f,f",
            [values, factor],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )

    @triton.jit
    def larger_pairs(first, second):
        """The larger of two pairs of BF16 magnitudes, each pair an int32; a NaN is larger than all others."""
        return tl.inline_asm_elementwise(
            "max.NaN.bf16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def smaller_pairs(first, second):
        """The smaller of two pairs of BF16 magnitudes, each pair an int32; a NaN is larger than all others."""
        return tl.inline_asm_elementwise(
            "min.bf16x2 $0, $1, $2;", "=r,r,r", [first, second], dtype=tl.int32, is_pure=True, pack=1
        )

    @triton.jit
    def largest_pairs(words, axis: tl.constexpr):
        """Reduce pairs of BF16 magnitudes by `larger_pairs`."""
        return tl.reduce(words, axis, larger_pairs)

    @triton.jit
    def smallest_pairs(words, axis: tl.constexpr):
        """Reduce pairs of BF16 magnitudes by `smaller_pairs`."""
        return tl.reduce(words, axis, smaller_pairs)


@triton.jit
def words_at(address):
    """Return addresses as pointers to int64 words."""
    return address.to(tl.pointer_type(tl.int64))
