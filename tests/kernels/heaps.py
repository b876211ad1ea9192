"""A stand-in for NVSHMEM under Triton's interpreter: symmetric memory of several ranks in one process."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from types import ModuleType

import pytest
import torch

from deep_ep.kernels import _nvshmem


def number(value) -> int:
    """A scalar of Triton's interpreter."""
    return int(value.handle.data.reshape(-1)[0]) if hasattr(value, "handle") else int(value)


@dataclass
class Heaps:
    """Symmetric memory of several ranks in one process, and NVSHMEM's functions as `rank` calls them.

    Attributes:
        heaps: Of each PE, [n] uint8.
        pe: Who calls.
        calls: What was called, in order: name, target offset, bytes or value, PE.
    """

    heaps: list[torch.Tensor]
    pe: int = 0
    calls: list[tuple] = field(default_factory=list)

    def offset(self, address) -> int:
        at = number(address) - self.heaps[self.pe].data_ptr()
        assert 0 <= at < self.heaps[self.pe].numel()
        return at

    def put(self, target, source, num_bytes, pe) -> None:
        at, size, to = self.offset(target), number(num_bytes), number(pe)
        assert self.offset(source) + size <= self.heaps[self.pe].numel(), "sources are symmetric memory, too"
        ctypes.memmove(self.heaps[to].data_ptr() + at, number(source), size)
        self.calls.append(("put", at, size, to))

    def put_signal(self, target, source, num_bytes, word, value, operation, pe) -> None:
        self.put(target, source, num_bytes, pe)
        self.set(self.offset(word), number(value), number(operation), number(pe))

    def signal(self, words, values, operation, pes) -> None:
        columns = (one.handle.data.reshape(-1) for one in (words, values, pes))
        for word, value, pe in zip(*columns, strict=True):
            self.set(int(word) - self.heaps[self.pe].data_ptr(), int(value), number(operation), int(pe))

    def set(self, at: int, value: int, operation: int, pe: int) -> None:
        assert operation == 9
        self.heaps[pe].view(torch.int64)[at // 8] = value
        self.calls.append(("set", at, value, pe))

    def stand_in(self, monkeypatch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """Have the kernels of a module call this."""
        monkeypatch.setattr(_nvshmem, "_put", self.put)
        monkeypatch.setattr(_nvshmem, "_put_signal", self.put_signal)
        monkeypatch.setattr(_nvshmem, "_signal", self.signal)
        for name in ("fence", "quiet"):
            monkeypatch.setattr(module, name, lambda name=name: self.calls.append((name,)), raising=False)
