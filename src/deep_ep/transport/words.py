"""Words in shared memory: 8 bytes, aligned, one writer each, read by everybody.

A store releases: who loads the new value also sees everything that was written before it. On x86-64 an aligned 8-byte
store is a release and a load an acquire, so plain ctypes access does. Elsewhere libatomic provides both; without it
there is no shared memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
from typing import Any

from ..errors import EPUnsupported

LINE_BYTES = 64  # one word a cache line, so that polling one does not slow the writer of another

_ACQUIRE, _RELEASE = 2, 3  # __ATOMIC_ACQUIRE and __ATOMIC_RELEASE of the C compilers


class Word:
    """One unsigned 64-bit word of a mapping.

    Args:
        memory: The mapping, or an array over memory that somebody else holds.
        offset: Byte offset, a multiple of 8.
    """

    __slots__ = ("_cell",)

    def __init__(self, memory: mmap.mmap | ctypes.Array, offset: int):
        assert offset % 8 == 0, offset
        self._cell = ctypes.c_uint64.from_buffer(memory, offset)

    def store_release(self, value: int) -> None:
        """Store, after everything that this thread wrote before."""
        self._cell.value = value

    def load_acquire(self) -> int:
        """Load, before everything that this thread reads afterwards."""
        return self._cell.value


class AtomicWord(Word):
    """The same where plain loads and stores order nothing (AArch64, POWER): through libatomic."""

    __slots__ = ()

    def store_release(self, value: int) -> None:
        """Store, after everything that this thread wrote before."""
        _atomic("store_8")(ctypes.byref(self._cell), ctypes.c_uint64(value), _RELEASE)

    def load_acquire(self) -> int:
        """Load, before everything that this thread reads afterwards."""
        load = _atomic("load_8")
        load.restype = ctypes.c_uint64
        return load(ctypes.byref(self._cell), _ACQUIRE)


def word_type() -> type[Word]:
    """The kind of word that is right on this machine."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return Word
    _atomic("load_8")
    return AtomicWord


@functools.cache
def _atomic(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL("libatomic.so.1"), f"__atomic_{name}")
    except OSError:
        raise EPUnsupported(
            f"shared memory between ranks on {platform.machine()} needs libatomic.so.1. Install libatomic1"
        ) from None
