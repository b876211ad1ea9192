"""Seeds made of seeds, the same on every machine and in every process."""

from __future__ import annotations

import hashlib


def mixed(*numbers: int) -> int:
    """One number out of several, 63 bits. Python's own `hash` is no use: that of strings differs between processes."""
    digest = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
