"""Words in shared memory: 8 bytes, aligned, each with one writer, and read by all ranks.

A store releases: a load that sees the new value also sees everything that was written before it. On x86-64 an aligned
8-byte store is a release and a load an acquire, so plain ctypes access does. Elsewhere libatomic provides both; without
it there is no shared memory.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import platform
from typing import Any

from ..errors import EPUnsupported

LINE_BYTES = 64  # one word a cache line, so that polling one does not slow the writer of another

_ACQUIRE, _RELEASE, _IN_ORDER = 2, 3, 5  # __ATOMIC_ACQUIRE, __ATOMIC_RELEASE and __ATOMIC_SEQ_CST of the C compilers


class Word:
    """One unsigned 64-bit word of a mapping.

    Args:
        memory: The mapping, or an array over memory that is kept alive elsewhere.
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

    def store_before_writes(self, value: int) -> None:
        """Store, before everything that this thread writes afterwards: x86-64 keeps stores in order."""
        self.store_release(value)

    def load_behind_reads(self) -> int:
        """Load, after everything that this thread has read before: x86-64 keeps loads in order."""
        return self.load_acquire()


class AtomicWord(Word):
    """A word for machines on which plain loads and stores order nothing (AArch64, POWER): it uses libatomic."""

    __slots__ = ()

    def store_release(self, value: int) -> None:
        """Store, after everything that this thread wrote before."""
        # As a plain number ctypes would pass the value as a C int, of 32 bits.
        _atomic("store_8")(ctypes.byref(self._cell), ctypes.c_uint64(value), _RELEASE)

    def load_acquire(self) -> int:
        """Load, before everything that this thread reads afterwards."""
        load = _atomic("load_8")
        load.restype = ctypes.c_uint64  # otherwise ctypes takes what comes back for a C int
        return load(ctypes.byref(self._cell), _ACQUIRE)

    def store_before_writes(self, value: int) -> None:
        """Store, before everything that this thread writes afterwards: a release alone lets later stores pass."""
        self.store_release(value)
        _fence()

    def load_behind_reads(self) -> int:
        """Load, after everything that this thread has read before: an acquire alone lets earlier loads fall behind."""
        _fence()
        return self.load_acquire()


def word_type() -> type[Word]:
    """Return the class of words that is right on this machine."""
    if platform.machine().lower() in ("x86_64", "amd64"):
        return Word
    # Where libatomic is missing, this raises here, as boards are made, and not in the middle of a call.
    _atomic("load_8")
    return AtomicWord


def _fence() -> None:
    """Have other threads see everything before this before anything behind it."""
    _function("atomic_thread_fence")(_IN_ORDER)


def _atomic(name: str) -> Any:
    return _function(f"__atomic_{name}")


@functools.cache
def _function(name: str) -> Any:
    try:
        return getattr(ctypes.CDLL("libatomic.so.1"), name)
    except OSError:
        raise EPUnsupported(
            f"shared memory between ranks on {platform.machine()} needs libatomic.so.1. Install libatomic1"
        ) from None
