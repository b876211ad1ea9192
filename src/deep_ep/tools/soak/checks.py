"""What a soak compares, and what must be gone when buffers are."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import Counter
from contextlib import suppress
from pathlib import Path

import torch

from ... import reaper

_NAME = "deep_ep"  # threads and memfds of ours begin with it
_MEMFD = f"/memfd:{_NAME}"
_LEFT_SECS = 6.0  # for what is about to go: a gather that a stopped rank joins late, say
_TIMEOUT_SECS = 5.0  # for a thread that is about to end, on a machine that is busy with other things


class Mismatch(AssertionError):
    """A result differs from the oracle's, or something was left behind."""


def same(name: str, got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """Compare exactly, bit patterns included, whatever the dtype.

    Args:
        name: Of the result.
        got: What came, or None.
        expected: What the oracle expects, or None.

    Raises:
        Mismatch: They differ; it says where first, and shows both.
    """
    if got is None or expected is None:
        if got is not expected:
            raise Mismatch(f"{name}: got {_kind(got)}, expected {_kind(expected)}")
        return
    if got.shape != expected.shape or got.dtype != expected.dtype:
        raise Mismatch(f"{name}: got {_kind(got)}, expected {_kind(expected)}")
    if not got.numel():
        return
    got, expected = got.cpu(), expected.cpu()
    if torch.equal(_flat_bytes(got), _flat_bytes(expected)):
        return
    different = (_bytes_of(got) != _bytes_of(expected)).any(2)
    if different.any():
        row, column = different.nonzero()[0].tolist()
        one, other = (tensor.reshape(tensor.size(0), -1)[row].tolist() for tensor in (got, expected))
        near = slice(max(0, column - 4), column + 8)
        raise Mismatch(
            f"{name} {_kind(got)}: {int(different.any(1).sum())} of {got.size(0)} rows differ, first in row {row}, "
            f"column {column}: got {one[column]}, expected {other[column]}\n"
            f"around it, got {one[near]}\nexpected       {other[near]}"
        )


def _kind(tensor: torch.Tensor | None) -> str:
    return "nothing" if tensor is None else f"{tensor.dtype} {list(tensor.shape)}"


def same_sums(name: str, got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    """`same`, but any NaN is as good as another: which one a sum gives depends on the processor.

    Raises:
        Mismatch: They differ.
    """
    same(name, *(None if one is None else torch.where(one.isnan(), torch.nan, one) for one in (got, expected)))


def _flat_bytes(tensor: torch.Tensor) -> torch.Tensor:
    # Cloned: the strides of a single element are arbitrary, and `contiguous` leaves them.
    flat = tensor if tensor.dim() == 1 and tensor.stride(0) == 1 else tensor.reshape(-1)
    flat = flat if flat.stride(0) == 1 else flat.clone(memory_format=torch.contiguous_format)
    return flat.view(torch.uint8)


def rows_as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """[T, H] of any dtype and strides as [T, bytes of a row] uint8."""
    return _flat_bytes(tensor).view(tensor.size(0), tensor.size(1) * tensor.itemsize)


def _bytes_of(tensor: torch.Tensor) -> torch.Tensor:
    """[rows, columns, bytes of an element]."""
    return _flat_bytes(tensor).view(tensor.size(0), -1, tensor.itemsize)


def scribble(tensor: torch.Tensor) -> None:
    """Overwrite an input whose call has ended: nobody may read it any more."""
    tensor.view(torch.uint8).fill_(0xA5)


def scribble_input(x: torch.Tensor | tuple[torch.Tensor, ...]) -> None:
    """Overwrite all memory of ordinary tensors, whatever their strides and lazy signs are."""
    for one in x if isinstance(x, tuple) else (x,):
        torch.empty(0, dtype=torch.uint8, device=one.device).set_(one.untyped_storage()).fill_(0xA5)


def padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """A copy of `rows` with room for `num_rows`."""
    padding = torch.full((num_rows - rows.size(0), rows.size(1)), 7.0, dtype=rows.dtype)
    return torch.cat([rows, padding])


def threads_left() -> list[str]:
    """Names of our threads that are still there, but for the reaper's, after a moment for those about to end."""
    deadline = time.monotonic() + _TIMEOUT_SECS
    while True:
        names = [thread.name for thread in threading.enumerate()]
        names = [name for name in names if name.startswith(_NAME) and name != reaper.THREAD]
        if not names or time.monotonic() > deadline:
            return names
        time.sleep(0.005)


def held() -> Counter[str]:
    """Descriptors of memfds, sockets and processes, mappings of our memfds, and children of this process."""
    found: Counter[str] = Counter()
    if not Path("/proc/self/maps").exists():
        return found  # not Linux, which does not tell
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # closed meanwhile, as the descriptor of the listing itself is
            target = os.readlink(f"/proc/self/fd/{name}")
            if target.startswith(("/memfd:", "socket:", "pidfd:", "anon_inode:[pidfd]")):
                found[f"descriptor of {target}"] += 1
    for line in Path("/proc/self/maps").read_text().splitlines():
        found[f"mapping of {_MEMFD}"] += _MEMFD in line
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # a thread that has ended
            found.update(f"child {pid}" for pid in (task / "children").read_text().split())
    return found


def memfds_left() -> int:
    """Descriptors and mappings of our shared memory that this process still has."""
    gc.collect()
    return sum(number for name, number in held().items() if _MEMFD in name)


def require_nothing_left() -> None:
    """After `destroy()`, and with all tensors dropped.

    Raises:
        Mismatch: A thread, a descriptor or a mapping is still there.
    """
    threads, num_memfds = threads_left(), memfds_left()
    if threads or num_memfds:
        raise Mismatch(f"left after destroy(): threads {threads}, {num_memfds} descriptors and mappings of memfds")


def left_since(before: Counter[str]) -> list[str]:
    """What this process holds more than before, and our threads, after a moment for what is about to go."""
    deadline = time.monotonic() + _LEFT_SECS
    while True:
        gc.collect()
        left = [f"{number} x {name}" for name, number in (held() - before).items()]
        if not left or time.monotonic() > deadline:
            return left + [f"thread {name}" for name in threads_left()]
        time.sleep(0.01)
