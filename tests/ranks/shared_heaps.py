"""A stand-in for NVSHMEM between processes, under Triton's interpreter: all ranks of a host map each other's memory.

A rank's function calls `stand_in()` before it makes a buffer. Then the engine is that of GPUs with NVSHMEM: proxies
that are kernels, local ranks that are addressed, and remote ones that are not.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch

from deep_ep.buffers import engines
from deep_ep.engine.low_latency import geometry
from deep_ep.kernels import _nvshmem, send
from deep_ep.kernels.low_latency import remote_copy as low_latency_copy
from deep_ep.transport.device import Part
from deep_ep.transport.interpreted import InterpretedMemory


class SharedHeaps:
    """Symmetric memory of the ranks of all nodes, and NVSHMEM's functions over it. PEs are ranks.

    Args:
        control: The group, of all nodes.
    """

    num_sharing = 1

    def __init__(self, control: Any):
        self._memory = InterpretedMemory(control)
        self._parts: list[Part] = []

    def grow(self, num_bytes: int) -> Part:
        self._parts.append(self._memory.grow(num_bytes))
        return self._parts[-1]

    def is_capturing(self) -> bool:
        return False

    def at(self, address: int, num_bytes: int, pe: int | None = None) -> int:
        """An address of this rank's memory, where a PE has the same place; None: of its own."""
        for part in self._parts:
            offset = address - part.memory.data_ptr()
            if 0 <= offset <= part.memory.numel() - num_bytes:
                return address if pe is None else part.addresses[pe] + offset
        raise AssertionError(f"{num_bytes} bytes at {address} are not symmetric memory")

    def put(self, target: Any, source: Any, num_bytes: Any, pe: Any) -> None:
        size = _number(num_bytes)
        ctypes.memmove(self.at(_number(target), size, _number(pe)), self.at(_number(source), size), size)

    def put_signal(self, target: Any, source: Any, size: Any, word: Any, value: Any, operation: Any, pe: Any) -> None:
        self.put(target, source, size, pe)
        self.signal(word, value, operation, pe)

    def signal(self, words: Any, values: Any, operation: Any, pes: Any) -> None:
        assert _number(operation) == _nvshmem.SIGNAL_SET
        for word, value, pe in zip(_numbers(words), _numbers(values), _numbers(pes), strict=True):
            ctypes.c_int64.from_address(self.at(word, 8, pe)).value = value


def _numbers(value: Any) -> list[int]:
    """What Triton's interpreter has for a tensor, or a scalar."""
    return value.handle.data.reshape(-1).tolist() if hasattr(value, "handle") else [int(value)]


def _number(value: Any) -> int:
    return _numbers(value)[0]


def stand_in(has_small_copies: bool = True) -> None:
    """From now on buffers of this process are made with it.

    Args:
        has_small_copies: Copies of remote memory are no larger than they are where buffers are large.
    """
    if has_small_copies:
        geometry._LEAST_COPY_BYTES = 0

    def memory(control: Any, group: Any, device: torch.device) -> Any:
        del group, device
        heaps = SharedHeaps(control)
        _nvshmem._put, _nvshmem._put_signal, _nvshmem._signal = heaps.put, heaps.put_signal, heaps.signal
        return engines._Whole(heaps, range(control.num_ranks))

    engines._whole_memory = memory
    for module in (send, low_latency_copy):
        for name in ("fence", "quiet"):
            setattr(module, name, lambda: None)  # a store of this machine is seen behind those before it
