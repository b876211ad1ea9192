"""Agreements in two words: kernels compare words, and the host can still find out in which items a rank differs."""

from __future__ import annotations

import functools

from ..protocol import Agreement

# Bits of each item of an `Agreement` in its word; the handle has a word of its own, which a kernel computes.
_BITS = (
    {"operation": 4, "num_experts": 20, "dtype": 8, "scale_dtype": 8, "idx_dtype": 8, "num_topk": 12, "has_weights": 1},
    {"hidden": 28, "num_scales": 17, "max_tokens": 17, "is_reduced_once": 1},
)
_ELSEWHERE = {"handle", "alignment"}  # kernels lay expanded rows out by themselves: ranks need not agree in alignment
assert {name for bits in _BITS for name in bits} | _ELSEWHERE == set(Agreement._fields)


@functools.lru_cache(maxsize=64)
def pack(agreement: Agreement) -> tuple[int, int]:
    """Encode an agreement in two words."""
    values = dict(zip(agreement._fields, agreement.words(), strict=True))
    words = []
    for bits in _BITS:
        word = shift = 0
        for name, width in bits.items():
            if values[name] >> width:
                raise ValueError(f"`{name}` must be less than {1 << width}, got {values[name]}")
            word |= values[name] << shift
            shift += width
        words.append(word)
    return words[0], words[1]


def unpack(first: int, second: int, handle: int) -> Agreement:
    """Decode the two words of `pack`."""
    values = {"handle": handle, "alignment": 0}
    for bits, word in zip(_BITS, (first, second), strict=True):
        for name, width in bits.items():
            values[name] = word & ((1 << width) - 1)
            word >>= width
    return Agreement.from_words([values[name] for name in Agreement._fields])
