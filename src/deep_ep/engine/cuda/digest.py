"""Agreements in two words: kernels compare words, and the host can still find out in which items a rank differs."""

from __future__ import annotations

import functools

from ..protocol import OPERATIONS, Agreement

# Bits of each item of an `Agreement` in its word. The handle has a word of its own, which a kernel computes; without a
# handle, the alignment of expanded rows is in it.
_BITS = (
    {"operation": 4, "num_experts": 20, "dtype": 8, "scale_dtype": 8, "idx_dtype": 8, "num_topk": 12, "has_weights": 1},
    {"hidden": 28, "num_scales": 17, "max_tokens": 17, "is_reduced_once": 1},
)
_ELSEWHERE = {"handle", "alignment"}
_WITHOUT_HANDLE = (OPERATIONS.index("dispatch"), OPERATIONS.index("worst-case dispatch"))
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


def unpack(first: int, second: int, third: int) -> Agreement:
    """Decode the two words of `pack`, and that of the handle."""
    values = {"handle": third, "alignment": 0}
    for bits, word in zip(_BITS, (first, second), strict=True):
        for name, width in bits.items():
            values[name] = word & ((1 << width) - 1)
            word >>= width
    if values["operation"] in _WITHOUT_HANDLE:
        values |= {"handle": 0, "alignment": third}
    return Agreement.from_words([values[name] for name in Agreement._fields])
