"""The memory of a rank: a file that only grows, mapped piece by piece, by its owner and by its peers.

`SharedMemory` is a memfd: it has no name in any file system, needs no `/dev/shm`, and the kernel frees it with the last
process that maps it, however that process ends. `PrivateMemory` has the same interface for a group of one rank, on any
system.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import math
import mmap
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from ..errors import EPClosed, EPTransportError
from .spans import UNIT_BYTES, Span, SpanSet, whole_units

_MADV_POPULATE_WRITE = 23  # Linux 5.14: fault pages in at once instead of one by one
_MADV_DONTNEED, _MADV_REMOVE = 4, 9  # give pages back: of private memory, of a file
_MAP_FIXED = 0x10  # at that address, in place of what is mapped there
_MOST_BYTES = 1 << 47  # a process has no more addresses; more than the offset of a file can say is beyond it, too
_MAP_NORESERVE = 0x4000 if sys.platform == "linux" else 0  # reserve addresses only; memory is taken as it is touched


class Mapping:
    """A span of a rank's memory in this process's address space.

    It lives as long as any tensor over it, and is never unmapped explicitly.
    """

    def __init__(self, memory: mmap.mmap, span: Span, is_private: bool = False):
        self.memory = memory
        self.span = span
        self._is_private = is_private
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        self._view = memoryview(memory)
        self._elements: dict[torch.dtype, torch.Tensor] = {}
        self._populated_until = span.start

    def view(self, span: Span) -> memoryview:
        """Return a new memoryview of a part of the mapping, which can have a finalizer of its own."""
        return self._view[span.start - self.span.start : span.stop - self.span.start]

    def rows(self, start: int, num_rows: int, num_columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a [num_rows, num_columns] tensor over a part, which keeps only the mapping alive.

        Args:
            start: Its offset in the rank's memory.
            num_rows: Rows.
            num_columns: Elements of a row.
            dtype: Their type.

        Raises:
            EPTransportError: `start` is not a multiple of the elements' size.
        """
        # One tensor over all of the mapping for each dtype: so the rows of a peer are a single view (decision 5).
        if dtype not in self._elements:
            self._elements[dtype] = torch.frombuffer(self._view, dtype=dtype)
        first, misfit = divmod(start - self.span.start, dtype.itemsize)
        if misfit:
            raise EPTransportError(f"window: there can be no {dtype} at byte {start}")
        return self._elements[dtype].as_strided((num_rows, num_columns), (num_columns, 1), first)

    def populate(self, span: Span) -> None:
        """Fault in the pages of a span, so that the first copy into them does not do so one by one.

        Only what lies beyond all earlier spans: as a rule memory is used from the bottom up, and one comparison is all
        that a call can spend on it. What lies below is left out even if it was never faulted in: doing so would take
        memory that its owner has not set aside.
        """
        if span.stop > self._populated_until:
            start = max(self._populated_until, span.start // UNIT_BYTES * UNIT_BYTES)
            self._populated_until = whole_units(span.stop)
            self.fault_in(Span(start, self._populated_until))

    def fault_in(self, span: Span) -> None:
        """Fault in the pages of a span of whole units, whether they are there or not."""
        self._advise(_MADV_POPULATE_WRITE, span)

    def discard(self, span: Span) -> None:
        """Give the pages of a part back to the system; the span stays mapped and reads as zeros."""
        self._advise(_MADV_DONTNEED if self._is_private else _MADV_REMOVE, span)

    def offset_of(self, address: int) -> int | None:
        """Return the offset in the rank's memory of an address of this process, if it lies in this mapping."""
        offset = self.span.start + address - self.address
        return offset if self.span.start <= offset < self.span.stop else None

    def _advise(self, advice: int, span: Span) -> None:
        # Advice is a matter of speed: an old kernel, or another system, does without.
        with contextlib.suppress(OSError, AttributeError):
            self.memory.madvise(advice, span.start - self.span.start, span.num_bytes)


def bytes_tensor(view: memoryview) -> torch.Tensor:
    """Return a uint8 tensor over `view`, which stays alive exactly as long as the tensor's storage, views included."""
    if not view.nbytes:
        return ordinary_tensor((0,), torch.uint8)  # torch.frombuffer refuses nothing at all
    return torch.frombuffer(view, dtype=torch.uint8)


_NAME = "deep_ep"


_LINK = f"/memfd:{_NAME}"  # what the system calls our memory in /proc
_own_inodes: set[int] = set()  # of the memory that this process has made, and not one of its peers


@functools.cache
def _separate_children() -> None:
    """Have forked children (such as the workers of a DataLoader) share no memory with the ranks any more."""
    libc_mmap = ctypes.CDLL(None, use_errno=True).mmap  # looked up here: a child may not be able to
    libc_mmap.restype = ctypes.c_void_p
    libc_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    os.register_at_fork(after_in_child=functools.partial(_separate, libc_mmap))


def _separate(libc_mmap: Callable[..., int | None]) -> None:
    """In a forked child: replace shared mappings by private ones, and let go of the descriptors.

    Tensors that were received stay readable where they are, and what the child writes is its own. Memory of peers
    holds no tensor of a caller: zeros take its addresses, so that the child does not keep that memory alive.

    Mappings are inherited and then replaced, which the system does in one step. `MADV_DONTFORK` would leave a hole
    until this runs: whatever was mapped there in between (by an earlier handler, or by the C library) would be
    destroyed by `MAP_FIXED`, and a pointer into the hole would crash.
    """
    fds: dict[int, list[int]] = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}").startswith(_LINK):
                fds.setdefault(os.fstat(int(name)).st_ino, []).append(int(name))
    protection, private = mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | _MAP_FIXED | _MAP_NORESERVE
    for line in Path("/proc/self/maps").read_text().splitlines():
        if _LINK not in line:
            continue
        addresses, permissions, offset, _, inode = line.split(maxsplit=5)[:5]
        if permissions[3] != "s":
            continue  # of an earlier fork
        start, stop = (int(address, 16) for address in addresses.split("-"))
        given = fds.get(int(inode), ()) if int(inode) in _own_inodes else ()
        if given:
            found = libc_mmap(start, stop - start, protection, private, given[0], int(offset, 16))
        else:
            found = libc_mmap(start, stop - start, protection, private | mmap.MAP_ANONYMOUS, -1, 0)
        if found != start:
            raise OSError(ctypes.get_errno(), "inherited shared memory could not be replaced")
    # Every mapping has a descriptor of its own, inside Python's mmap object, which will close it by its number. So the
    # number stays in use, for /dev/null.
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for number in (number for numbers in fds.values() for number in numbers):
        os.dup2(null, number, inheritable=False)
    os.close(null)


def ordinary_tensor(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    """Return an uninitialised tensor outside of any window.

    Raises:
        EPTransportError: There is not enough memory.
    """
    try:
        return torch.empty(*shape, dtype=dtype, device="cpu")
    except (RuntimeError, OverflowError):  # also a size that no 64 bits can hold
        raise _too_little(math.prod(shape) * dtype.itemsize, "the system refuses them") from None


def commit_fresh(memory: Memory, uncommitted: SpanSet, span: Span) -> list[Span]:
    """Commit the parts of a span that are not committed yet; spans of the set are whole units.

    Args:
        memory: The rank's memory.
        uncommitted: What is not committed yet. It loses the span, but for what could not be committed.
        span: The span.

    Returns:
        Its parts that were not committed before.

    Raises:
        EPTransportError: There is too little memory.
    """
    fresh = uncommitted.remove(Span(span.start // UNIT_BYTES * UNIT_BYTES, whole_units(span.stop)))
    for index, part in enumerate(fresh):
        try:
            memory.commit(part)
        except BaseException:  # an interrupt, too: what is touched without being committed may end the process
            for left in fresh[index:]:
                uncommitted.add(left)
            raise
    return fresh


class SharedMemory:
    """A memfd, seen by its owner or by a peer.

    Args:
        fd: An open file descriptor, which this object owns from now on.
    """

    def __init__(self, fd: int):
        self.fd = fd
        self.num_bytes = os.fstat(fd).st_size

    @classmethod
    def create(cls) -> SharedMemory:
        """Create new, empty shared memory."""
        _separate_children()  # before there is memory that a child could inherit
        memory = cls(os.memfd_create(_NAME, os.MFD_CLOEXEC))
        _own_inodes.add(memory.identity()[1])
        return memory

    def identity(self) -> tuple[int, int]:
        """Return device and inode, by which a peer checks that it has opened the right file."""
        status = os.fstat(self.fd)
        return status.st_dev, status.st_ino

    def grow(self, num_bytes: int) -> Span:
        """Add `num_bytes`, none of which is committed yet."""
        span = _grown(self.num_bytes, num_bytes)
        os.ftruncate(self.fd, span.stop)
        self.num_bytes = span.stop
        return span

    def commit(self, span: Span) -> None:
        """Commit memory for a span, so that touching it cannot fail.

        Raises:
            EPClosed: Another thread has closed the buffer: the process ends in the middle of a call.
            EPTransportError: There is not enough memory.
        """
        _require_available(span)
        self._require_open()
        try:
            os.posix_fallocate(self.fd, span.start, span.num_bytes)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.ENOMEM):
                raise
            raise _too_little(span.num_bytes, f"the system says: {error.strerror}") from None

    def map(self, span: Span) -> Mapping:
        """Map a span. Forked children have a private copy of it, or zeros if it is a peer's.

        Raises:
            EPClosed: See `commit`.
            EPTransportError: The system refuses it.
        """
        self._require_open()  # without a descriptor this would be memory of zeros
        return Mapping(_mapped(span, self.fd, offset=span.start), span)

    def _require_open(self) -> None:
        if self.fd < 0:
            raise EPClosed("window: the buffer was closed during the call, since its process ends")

    def close(self) -> None:
        """Close the descriptor. Mappings stay valid."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


class PrivateMemory:
    """Anonymous memory without peers, with the interface of `SharedMemory`, on every system.

    For a group of one rank, and for recycled results.
    """

    def __init__(self) -> None:
        self.num_bytes = 0

    def grow(self, num_bytes: int) -> Span:
        """Add `num_bytes`."""
        span = _grown(self.num_bytes, num_bytes)
        self.num_bytes = span.stop
        return span

    def commit(self, span: Span) -> None:
        """Check that there is enough memory for a span."""
        _require_available(span)

    def map(self, span: Span) -> Mapping:
        """Map a span. Each span is mapped once."""
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        return Mapping(_mapped(span, -1, flags=flags), span, is_private=True)

    def close(self) -> None:
        """Do nothing: there is no descriptor."""


Memory = SharedMemory | PrivateMemory


def _grown(start: int, num_bytes: int) -> Span:
    """Return the span of `num_bytes` behind `start`.

    Raises:
        EPTransportError: It is larger than any address space.
    """
    span = Span(start, start + whole_units(num_bytes))
    if span.stop > _MOST_BYTES:
        raise _too_little(num_bytes, "a process has no addresses for them")
    return span


def _mapped(span: Span, fd: int, **options: Any) -> mmap.mmap:
    try:
        return mmap.mmap(fd, span.num_bytes, **options)
    except OSError as error:
        raise EPTransportError(f"window: {span.num_bytes} bytes cannot be mapped: {error.strerror}") from None


def available_bytes() -> int:
    """Return the bytes that this process may still allocate: the system's, or what is left of its control group's
    limit.
    """
    system = _read_number(Path("/proc/meminfo"), _mem_available)
    group = Path("/sys/fs/cgroup")
    limit = _read_number(group / "memory.max", int)
    used = _read_number(group / "memory.current", int)
    left = limit - used if limit is not None and used is not None else None
    return min((number for number in (system, left) if number is not None), default=1 << 62)


def _mem_available(text: str) -> int:
    return int(text.split("MemAvailable:")[1].split()[0]) * 1024


def _read_number(path: Path, parse: Callable[[str], int]) -> int | None:
    try:
        return parse(path.read_text())
    except (OSError, ValueError, IndexError):  # another system, or a group without a limit
        return None


def _require_available(span: Span) -> None:
    available = available_bytes()
    if span.num_bytes > available:
        raise _too_little(span.num_bytes, f"{available} are available")


def _too_little(num_bytes: int, seen: str) -> EPTransportError:
    return EPTransportError(
        f"window: {num_bytes} bytes of memory are needed, {seen}. "
        "Drop received tensors, call `trim()`, send fewer tokens a call or use fewer ranks on this host"
    )
