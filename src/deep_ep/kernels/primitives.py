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
    def to_fp8(values):
        """FP32 values of at most 448 as FP8 E4M3, rounded to the nearest, ties to even."""
        return values.to(tl.float8e4nv)


@triton.jit
def words_at(address):
    """Return addresses as pointers to int64 words."""
    return address.to(tl.pointer_type(tl.int64))
