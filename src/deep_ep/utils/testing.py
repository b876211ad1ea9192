"""Timing: whole calls by events or the wall clock, single kernels by the profiler.

On a machine with a GPU the times are the GPU's. Without one, `bench` reads the wall clock, and `bench_kineto`
reports the profiler's CPU rows: operators and `torch.profiler.record_function` ranges, of all threads. Calls of CPU
ranks are no such rows; for a name that has none, `bench_kineto` reports the wall clock of the whole function.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, redirect_stderr, redirect_stdout
from statistics import fmean
from typing import Any

import torch
import torch.distributed as dist
from torch._C._profiler import _ExperimentalConfig
from torch.autograd import DeviceType

Function = Callable[[], Any]
Seconds = float | list[float]

# More than the L2 cache of any GPU so far.
_FLUSH_BYTES = 256 * 10**6
# Kernels that a call runs twice, to send and to receive.
_IN_HALVES = re.compile(r"low_latency\W*\d?(dispatch|combine)")
# About 10 ms at 2 GHz: long enough for the CPU of every rank to queue the barrier and the call behind it.
_SLEEP_CYCLES = 20_000_000


def flush_l2_cache(enabled: bool = True) -> None:
    """Push everything out of the GPU's L2 cache by zeroing 256 MB. Does nothing without a GPU.

    Args:
        enabled: False makes it do nothing, so that callers can pass their option through.
    """
    if enabled and torch.cuda.is_available():
        torch.zeros(_FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")


def bench(
    fn: Function,
    num_warmups: int = 50,
    num_tests: int = 50,
    post_fn: Function | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Time calls of `fn`: between CUDA events, or by the wall clock on a machine without a GPU.

    Args:
        fn: What to time.
        num_warmups: Untimed calls before.
        num_tests: Timed calls, at least 2; the first one is dropped.
        post_fn: Called after each timed call, not timed.
        flush_l2: Whether to flush the L2 cache before each timed call.

    Returns:
        Mean, least and greatest seconds of a call.
    """
    if num_tests < 2:
        raise ValueError(f"bench: num_tests must be at least 2, as the first is dropped, got {num_tests}")
    for _ in range(num_warmups):
        fn()
    _synchronize()

    stamps = []
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        start = _stamp()
        fn()
        stamps.append((start, _stamp()))
        if post_fn is not None:
            post_fn()
    _synchronize()
    seconds = [_seconds_between(start, end) for start, end in stamps[1:]]
    return fmean(seconds), min(seconds), max(seconds)


@contextmanager
def empty_suppress() -> Iterator[None]:
    """A `with` block that suppresses nothing."""
    yield


@contextmanager
def suppress_stdout_stderr() -> Iterator[None]:
    """A `with` block in which nothing is printed, by Python or by C libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    streams = (1, 2)
    saved = [os.dup(stream) for stream in streams]
    with open(os.devnull, "w") as sink:
        for stream in streams:
            os.dup2(sink.fileno(), stream)
        try:
            # `sys.stdout` need not write to descriptor 1: notebooks and test runners put an object there.
            with redirect_stdout(sink), redirect_stderr(sink):
                yield
        finally:
            for stream, copy in zip(streams, saved, strict=True):
                os.dup2(copy, stream)
                os.close(copy)


def bench_kineto(
    fn: Function,
    kernel_names: str | Sequence[str],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Function | None = None,
) -> Any:
    """Time single kernels inside `fn` with the profiler.

    `fn` runs once, then two rounds of `num_tests` times; the first round warms up, the second one counts.
    `EP_USE_NVIDIA_TOOLS=1` leaves the profiler to Nsight: `fn` runs as often, and all times returned are 1.
    `EP_DISABLE_BARRIER_PROFILING=1` overrides `barrier_comm_profiling`.

    Args:
        fn: What to profile.
        kernel_names: A part of the kernel's name, or several of them. Several kernels that match one and ran
            equally often are parts of one call. Without a GPU: of the name of an operator or a `record_function`
            range.
        num_tests: Calls a round.
        suppress_kineto_output: Print nothing meanwhile.
        trace_path: Where to write a Chrome trace of the second round.
        flush_l2: Whether to flush the L2 cache before each call.
        barrier_comm_profiling: Line the ranks up before each call: a pause of about 10 ms on the GPU, in
            which all ranks queue their work, and a barrier.
        num_kernels_per_period: If `fn` runs a kernel several times, how often: each run is then reported by
            itself. For 2, `dispatch` of low-latency calls is the send and the receive kernel; what waits between them
            behind a hook is `low_latency::wait`. Where more kernels than this are parts of a call, all but the first
            ones are the last phase.
        barrier: The barrier to use; by default an all-reduce in the default group.

    Returns:
        Mean seconds of the kernel (the sum of the means where several are parts of a call, as the two runs of a
        low-latency call are, which have one name), 0 for one that never ran; a list of `num_kernels_per_period` means,
        in order of time, where that is above 1. For several names, a tuple of these. Without a GPU, for a name that
        nothing has: the mean seconds of a call of `fn` by the wall clock, so that CPU ranks have a time to divide by;
        as a list, in equal parts.

    Raises:
        ValueError: If a name matches kernels that ran differently often, or a kernel did not run a multiple of
            `num_kernels_per_period` times.
    """
    is_single = isinstance(kernel_names, str)
    names = [kernel_names] if isinstance(kernel_names, str) else list(kernel_names)
    lines_up = barrier_comm_profiling and not _is_set("EP_DISABLE_BARRIER_PROFILING")
    profiler = None if _is_set("EP_USE_NVIDIA_TOOLS") else _make_profiler()

    with suppress_stdout_stderr() if suppress_kineto_output else empty_suppress():
        fn()
        _synchronize()
        session: AbstractContextManager[Any] = nullcontext() if profiler is None else profiler
        with session:
            for _ in range(2):
                fn_secs = _run_round(fn, num_tests, flush_l2, lines_up, barrier)
                if profiler is not None:
                    profiler.step()
        if profiler is not None and trace_path is not None:
            profiler.export_chrome_trace(trace_path)

    if torch.cuda.is_available():
        fn_secs = 0.0  # a kernel that never ran
    times = [_kernel_seconds(profiler, name, num_kernels_per_period, fn_secs) for name in names]
    return times[0] if is_single else tuple(times)


def _is_set(variable: str) -> bool:
    return bool(int(os.environ.get(variable) or "0"))


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _stamp() -> torch.cuda.Event | float:
    """A point in time: in the current CUDA stream, or now."""
    if not torch.cuda.is_available():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _seconds_between(start: torch.cuda.Event | float, end: torch.cuda.Event | float) -> float:
    if isinstance(start, float) or isinstance(end, float):
        assert isinstance(start, float)
        assert isinstance(end, float)
        return end - start
    return start.elapsed_time(end) / 1e3


def _make_profiler() -> torch.profiler.profile:
    """A profiler that skips the first round, marked by `step()`, and records the second."""
    has_gpu = torch.cuda.is_available()
    activity = torch.profiler.ProfilerActivity.CUDA if has_gpu else torch.profiler.ProfilerActivity.CPU
    return torch.profiler.profile(
        activities=[activity],
        schedule=torch.profiler.schedule(wait=0, warmup=1, active=1, repeat=1),
        # Without a GPU asynchronous calls run on a thread of their own, which the profiler skips unless told.
        experimental_config=None if has_gpu else _ExperimentalConfig(profile_all_threads=True),
        acc_events=True,
    )


def _run_round(fn: Function, num_tests: int, flush_l2: bool, lines_up: bool, barrier: Function | None) -> float:
    """Returns the mean seconds that `fn` took, by the wall clock."""
    fn_secs = 0.0
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        if lines_up:
            _line_up(barrier)
        begin = time.perf_counter()
        fn()
        fn_secs += time.perf_counter() - begin
    # Kernels still queued would be counted in the next round, or not at all.
    _synchronize()
    return fn_secs / max(1, num_tests)


def _line_up(barrier: Function | None) -> None:
    if torch.cuda.is_available():
        torch.cuda._sleep(_SLEEP_CYCLES)
    if barrier is not None:
        barrier()
    else:
        dist.all_reduce(torch.ones(1, dtype=torch.float32))


def _kernel_seconds(
    profiler: torch.profiler.profile | None, name: str, num_kernels_per_period: int, default: float
) -> Seconds:
    """What `bench_kineto` returns for a name; `default` is the time of a call in which nothing has that name."""
    if num_kernels_per_period == 1:
        return 1.0 if profiler is None else _seconds_of_a_call(profiler, name, default)
    if profiler is None:
        return [1.0] * num_kernels_per_period
    return _seconds_of_each_phase(profiler, name, num_kernels_per_period, default)


def _seconds_of_a_call(profiler: torch.profiler.profile, name: str, default: float = 0.0) -> float:
    """The mean of the kernel whose name contains `name`; of several, which are parts of one call, the sum."""
    by_kernel = _runs_by_kernel(profiler, name)
    if not by_kernel:
        return default
    return sum(_num_runs_of_a_call(kernel) * fmean(map(_seconds, runs)) for kernel, runs in by_kernel.items())


def _num_runs_of_a_call(kernel: str) -> int:
    return 2 if _IN_HALVES.search(kernel) else 1


def _seconds_of_each_phase(
    profiler: torch.profiler.profile, name: str, num_phases: int, default: float = 0.0
) -> list[float]:
    """The means of the 1st, 2nd, ... kernel of each call; what is left of a call belongs to its last phase.

    Example:
        Calls of kernels `a`, `b` and `c` in two phases: those of `a`, and those of `b` and `c`.
    """
    by_kernel = _runs_by_kernel(profiler, name)
    runs = [run for runs in by_kernel.values() for run in runs]
    num_per_call = max(len(by_kernel), num_phases)
    if len(runs) % num_per_call:
        raise ValueError(
            f"bench_kineto: {name!r} ran {len(runs)} times, which must be a multiple of "
            f"num_kernels_per_period={num_phases}"
        )
    if not runs:
        return [default / num_phases] * num_phases
    runs.sort(key=lambda run: run.time_range.start)
    means = [fmean(map(_seconds, runs[index::num_per_call])) for index in range(num_per_call)]
    return [*means[: num_phases - 1], sum(means[num_phases - 1 :])]


def _runs_by_kernel(profiler: torch.profiler.profile, name: str) -> dict[str, list[Any]]:
    """The runs of the kernels whose names contain `name`.

    Raises:
        ValueError: Some ran more often than others, so they are no parts of one call.
    """
    events = [event for event in profiler.events() or () if event.device_type == _device_type()]
    # `::dispatch` is a kernel of that name, `dispatch` also a part of other names.
    found = [event for event in events if f"::{name}" in event.name]
    by_kernel: dict[str, list[Any]] = {}
    for event in found or [event for event in events if name in event.name]:
        by_kernel.setdefault(event.name, []).append(event)
    if len({len(runs) for runs in by_kernel.values()}) > 1:
        counts = ", ".join(f"{kernel} ({len(runs)} times)" for kernel, runs in by_kernel.items())
        raise ValueError(
            f"bench_kineto: {name!r} must match kernels that run equally often, matches {counts}. Give more of the name"
        )
    return by_kernel


def _seconds(run: Any) -> float:
    return run.time_range.elapsed_us() * 1e-6


def _device_type() -> DeviceType:
    return DeviceType.CUDA if torch.cuda.is_available() else DeviceType.CPU
