"""Measuring on a GPU: what it is, which rank works on which, and clocks."""

from __future__ import annotations

import importlib.util
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ... import __version__, env
from ...buffers.legacy import Buffer
from ...engine.cuda.engine import CudaEngine
from ...errors import EPUnsupported
from ...launch import run_ranks
from ..machine import find_machine
from ..mps import shared_gpu
from .core import ADD, FROM_IDLE, HOST, IN_A_ROW, PRODUCT, BenchVariant, HostStopwatch, Stopwatch

_AHEAD_CYCLES = 6_000_000  # about 3 ms that the device sleeps, so that the host has launched all before it is timed


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


def streamed(buffer: Buffer) -> CudaEngine:
    """A buffer's engine, which must be one of kernels."""
    engine = buffer._engine
    assert isinstance(engine, CudaEngine)
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


class CallerClocks:
    """Measures what a caller waits for, by the host's clock:

    - `HOST`: calls in a row until the host has made the last one, divided by their number. Where a call waits for the
      device, as a full dispatch does for its counts, that is part of it.
    - `IN_A_ROW`: the same calls until the device is done, divided likewise.
    - `FROM_IDLE`: one call when the device is idle, until the device is done.

    Args:
        num_in_row: Calls in a row.
        barrier: Lines the ranks up; the host waits.
        wait: Waits for the device.
        clock: Seconds.
    """

    def __init__(
        self,
        num_in_row: int,
        barrier: Callable[[], object],
        wait: Callable[[], object],
        clock: Callable[[], float] = time.perf_counter,
    ):
        self._num_in_row = num_in_row
        self._barrier = barrier
        self._wait = wait
        self._clock = clock

    def __call__(self, call: Callable[[], Any]) -> dict[str, float]:
        """Seconds of a call by each clock."""
        call()  # behind other work its code is cold
        self._line_up()
        start = self._clock()
        result = call()
        self._wait()
        from_idle = self._clock() - start
        del result
        self._line_up()
        start = self._clock()
        for _ in range(self._num_in_row):
            call()  # what it returns is dropped at once, or the results of all calls would be alive together
        host = self._clock() - start
        self._wait()
        in_a_row = self._clock() - start
        return {HOST: host / self._num_in_row, IN_A_ROW: in_a_row / self._num_in_row, FROM_IDLE: from_idle}

    def _line_up(self) -> None:
        self._wait()
        self._barrier()


def caller_variants(call: Callable[[], Any], num_in_row: int, device: torch.device) -> list[BenchVariant]:
    """The product by a caller's clocks, and an add of a small tensor beside it: the unit that these are shown in.

    Args:
        call: The product's call.
        num_in_row: Calls in a row.
        device: Where its tensors live.
    """
    small = torch.zeros(4, device=device)
    clocks = CallerClocks(num_in_row, dist.barrier, _waiting_for(device))
    add = partial(torch.add, small, 1, out=small)
    return [BenchVariant(PRODUCT, call, stopwatch=clocks), BenchVariant(ADD, add, stopwatch=clocks)]


def script_stopwatch(num_in_row: int, device: torch.device) -> Stopwatch:
    """Measures as DeepEP's own script does: a loop that waits for nothing, with an event before and after each call.

    Where the host is slower than the device, the time of a call is the host's.

    Args:
        num_in_row: Calls that count; one more comes first.
        device: Where the tensors of a call live.
    """
    is_cuda, wait = device.type == "cuda", _waiting_for(device)

    def measure(call: Callable[[], Any]) -> float:
        wait()
        dist.barrier()
        read_all = []
        for _ in range(num_in_row + 1):
            read_all.append(_between_events(call) if is_cuda else _between_clocks(call))
        wait()
        return statistics.fmean(read() for read in read_all[1:])

    return measure


def _between_events(call: Callable[[], Any]) -> Callable[[], float]:
    """Have a call between two events. Returns what reads their distance, in seconds, when the device is done."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    return lambda: start.elapsed_time(end) * 1e-3


def _between_clocks(call: Callable[[], Any]) -> Callable[[], float]:
    """The same where calls are done when they return."""
    start = time.perf_counter()
    call()
    elapsed = time.perf_counter() - start
    return lambda: elapsed


def _waiting_for(device: torch.device) -> Callable[[], None]:
    """What waits for a device; without one there is nothing to wait for."""
    return torch.cuda.synchronize if device.type == "cuda" else lambda: None
