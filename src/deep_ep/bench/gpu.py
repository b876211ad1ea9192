"""Measuring on a GPU: what it is, which rank works on which, and clocks."""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from .. import __version__, env
from ..buffers.legacy import Buffer
from ..engine.streamed import StreamedEngine
from ..errors import EPUnsupported
from ..launch import run_ranks
from ..machine import find_machine
from ..mps import shared_gpu
from .core import HostStopwatch, Stopwatch

_AHEAD_CYCLES = 6_000_000  # about 3 ms that the device sleeps, so that the host has launched all before it is timed
_NUM_HOST_CALLS = 200


@contextmanager
def gpu_machine(num_ranks: int) -> Iterator[dict[str, Any]]:
    """The machine with its GPUs, ready for ranks that are started inside. This process itself stays away from CUDA.

    Args:
        num_ranks: The most ranks of a group.

    Yields:
        Facts as those of `find_machine`, and of the GPUs.

    Raises:
        EPUnsupported: There is no GPU.
    """
    if torch.cuda.device_count() == 0:
        raise EPUnsupported("bench: torch sees no GPU. Run it where it does, or pass --device cpu")
    with shared_gpu(num_ranks) as is_mps_on:
        facts = {"mps": is_mps_on, "tuning_file": env.TUNING_FILE.get() or None}
        yield {**find_machine(__version__), **run_ranks(_look, 1)[0], **facts}


def _look(rank: int, num_ranks: int) -> dict[str, Any]:
    """Facts of the GPUs, from a rank: the process that starts ranks has no context."""
    del rank, num_ranks
    properties = torch.cuda.get_device_properties(0)
    return {
        "gpu": properties.name,
        "num_gpus": torch.cuda.device_count(),
        "gpu_sms": properties.multi_processor_count,
        "gpu_free_bytes": torch.cuda.mem_get_info(0)[0],
        "cuda": torch.version.cuda,
        "triton": _triton_version(),
    }


def _triton_version() -> str | None:
    if importlib.util.find_spec("triton") is None:
        return None
    import triton

    return triton.__version__


def enter_device(rank: int, device: str) -> int:
    """Have this rank work on its GPU; ranks share if there are more of them. Returns the GPU's index."""
    if device != "cuda":
        return 0
    index = rank % torch.cuda.device_count()
    torch.cuda.set_device(index)
    return index


# Clocks --------------------------------------------------------------------------------------------------------------


def streamed(buffer: Buffer) -> StreamedEngine:
    """A buffer's engine, which must be one of kernels."""
    engine = buffer._engine
    assert isinstance(engine, StreamedEngine)
    return engine


def device_stopwatch(buffer: Buffer) -> Stopwatch:
    """Measures from the moment when the streams of all ranks have come, to the end of what the call has launched."""
    barrier = streamed(buffer).barrier
    return EventStopwatch(barrier) if buffer.device.type == "cuda" else HostStopwatch(barrier)


class EventStopwatch:
    """Measures by events in the current stream. The host's own time counts only where the device waits for it.

    Args:
        barrier: Has the current stream go on when those of all ranks have come; the host does not wait.
    """

    def __init__(self, barrier: Callable[[], object]):
        self._barrier = barrier
        self._start, self._end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def __call__(self, call: Callable[[], Any]) -> float:
        """Seconds of one call."""
        torch.cuda._sleep(_AHEAD_CYCLES)
        self._barrier()
        self._start.record()
        result = call()
        self._end.record()
        torch.cuda.synchronize()
        del result
        return self._start.elapsed_time(self._end) * 1e-3


def host_seconds(call: Callable[[], Any]) -> float:
    """A stopwatch of the host's own time of one call: the mean of many, and the device is not waited for."""
    synchronize()
    dist.barrier()
    start = time.perf_counter()
    for _ in range(_NUM_HOST_CALLS):
        call()
    elapsed = time.perf_counter() - start
    synchronize()
    return elapsed / _NUM_HOST_CALLS


def launch_seconds(call: Callable[[], Any]) -> float:
    """A stopwatch of the host's own time of a single call, with nothing queued before it.

    Behind a barrier a process has slept and its caches are cold. A loop is not like that: one call comes first.
    """
    dist.barrier()
    call()
    synchronize()
    start = time.perf_counter()
    result = call()
    elapsed = time.perf_counter() - start
    synchronize()
    del result
    return elapsed


def synchronize() -> None:
    """Wait for the GPU, where there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
