"""What `bench low-latency` times: whole calls, calls in a CUDA graph, and their halves.

On a GPU whole calls are timed by the clocks of a caller, too (`gpu.CallerClocks`), with adds of a small tensor beside.

On a GPU the floor is the time that a plain copy would take for the bytes that the call moves where rows go by way of
slots (`low_latency_calls.bytes_of`): a copy of 256 MB by all ranks at once is timed in the same rounds, and its time is
scaled. On the CPU it is a plain copy of the rows that travel, and gloo does the same work beside it.

All results are judged before anything is timed. Letters as in `low_latency_work`.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

from ...buffers.legacy import Buffer
from ...engine.cpu.engine import CpuEngine
from ...errors import EPError
from ..terminal import teller
from .cases import Note, RankMeasured
from .core import FLOOR, GLOO, GLOO_AS_WRITTEN, PRODUCT, BenchVariant, HostStopwatch, Stopwatch, time_rounds
from .gpu import caller_variants, device_stopwatch, enter_device
from .gpu_cases import COPY_BYTES, GpuMeasured
from .inputs import Setting
from .low_latency_calls import (
    OPERATIONS,
    Calls,
    Captured,
    bytes_of,
    of_each_in_graph,
    of_receive,
    of_send,
)
from .low_latency_peers import GlooExchange
from .low_latency_work import LowLatencyWork, is_combined, is_sent, make_buffer, make_work
from .low_latency_written import WrittenExchange
from .peers import WarmPair

_NUM_WARMUP = 3
_HALVES = {"send": ": send half", "receive": ": receive half"}
_HAVE_HALVES = ("dispatch", "combine")


def low_latency_titles(device: str) -> dict[str, str]:
    """The cases of a device, by name: how a table calls them."""
    halves = {f"{name}-{half}": OPERATIONS[name] + title for name in _HAVE_HALVES for half, title in _HALVES.items()}
    if device == "cpu":
        return OPERATIONS | halves
    graphs = {f"{name}-graph": f"{title}, in a graph" for name, title in OPERATIONS.items()}
    return OPERATIONS | graphs | halves


_Peer = GlooExchange | WrittenExchange


@dataclass(frozen=True)
class _Case:
    """One line of the table, ready to be timed on this rank.

    Attributes:
        num_bytes: Rows that this rank sends; 0: not counted.
        memory_bytes: What its floor moves through memory; 0: there is no floor.
        variants: The product, and perhaps a peer or adds.
        checks: Whether they deliver what they must.
    """

    num_bytes: int
    memory_bytes: int
    variants: list[BenchVariant]
    checks: list[Callable[[], bool]] = field(default_factory=list)


class _Rank:
    """What a rank times its cases with.

    Args:
        work: What it brings.
        gpu: The index of its GPU.
        copy_bytes: Size of the copy that bandwidth is measured with, where kernels move rows.
    """

    def __init__(self, work: LowLatencyWork, gpu: int, copy_bytes: int):
        self._work = work
        self._gpu, self._copy_bytes = gpu, copy_bytes
        self._calls = Calls(work)
        self._has_kernels = not isinstance(work.buffer._engine, CpuEngine)
        self._stopwatch: Stopwatch
        if self._has_kernels:
            pair = [torch.ones(copy_bytes, dtype=torch.uint8, device=work.buffer.device) for _ in range(2)]
            self._copy = BenchVariant(FLOOR, partial(pair[0].copy_, pair[1]))
            self._stopwatch = device_stopwatch(work.buffer)
        else:
            self._peers: dict[str, _Peer] = {GLOO: GlooExchange(work), GLOO_AS_WRITTEN: WrittenExchange(work)}
            for peer in self._peers.values():
                peer.dispatch()  # a combine needs one before it
            self._stopwatch = HostStopwatch(dist.barrier)

    def run(self, name: str, tell: Callable[[Note], object]) -> GpuMeasured | RankMeasured:
        """Check and time a case."""
        work, case = self._work, self._case(name)
        are_right = [check() for check in case.checks]  # every one of them, even behind a wrong one: all ranks call it
        if not all(are_right):
            raise EPError(
                f"bench {name}: what was delivered is wrong (rank {work.rank}/{work.num_ranks}). Nothing was timed"
            )
        is_interpreted = self._has_kernels and work.buffer.device.type == "cpu"
        times = time_rounds(
            [*case.variants, *self._floor(case)],
            work.setting.num_rounds,
            self._stopwatch,
            num_warmup=0 if is_interpreted else _NUM_WARMUP,
            on_round=lambda done: tell(Note(work.num_ranks, name, done)),
        )
        if not self._has_kernels:
            return RankMeasured(case.num_bytes, times)
        return GpuMeasured(case.num_bytes, case.memory_bytes, self._gpu, self._copy_bytes, times)

    def _floor(self, case: _Case) -> list[BenchVariant]:
        if self._has_kernels:
            return [self._copy] if case.memory_bytes else []
        return [WarmPair(1, [case.num_bytes]).floor(case.num_bytes)] if case.num_bytes else []

    def _case(self, name: str) -> _Case:
        operation, _, way = name.rpartition("-")
        if way in _HALVES:
            return self._half(operation, way)
        if way == "graph":
            return self._whole(operation, Captured(self._calls.of(operation)), of_each_in_graph(self._stopwatch))
        call = self._calls.of(name)
        case = self._whole(name, call)
        if not self._has_kernels:
            return case
        callers = caller_variants(call, self._work.setting.num_in_row, self._work.buffer.device)
        return replace(case, variants=[*case.variants, *callers])

    def _whole(self, operation: str, call: Callable[[], tuple], stopwatch: Stopwatch | None = None) -> _Case:
        moved = bytes_of(operation, self._work)
        variants = [BenchVariant(PRODUCT, call, stopwatch=stopwatch)]
        checks: list[Callable[[], bool]] = [partial(self._calls.is_right, operation, call)]
        if not self._has_kernels:
            for name, exchange in self._peers.items():
                peer, is_right = self._peer(operation, exchange)
                variants.append(BenchVariant(name, peer))
                checks.append(is_right)
        return _Case(moved.rows, moved.send + moved.receive, variants, checks)

    def _half(self, operation: str, half: str) -> _Case:
        call = partial(self._calls.send_half, operation)
        moved = bytes_of(operation, self._work)
        memory_bytes = moved.send if half == "send" else moved.receive
        stopwatch = of_send(self._stopwatch) if half == "send" else of_receive(self._stopwatch)

        def in_halves() -> tuple:
            result, hook = call()
            hook()
            return result

        is_right = partial(self._calls.is_right, operation, in_halves)
        return _Case(0, memory_bytes, [BenchVariant(PRODUCT, call, stopwatch=stopwatch)], [is_right])

    def _peer(self, operation: str, exchange: _Peer) -> tuple[Callable[[], object], Callable[[], bool]]:
        """The same by gloo, and whether it delivers what it must."""
        work, rows = self._work, self._calls.rows
        if operation == "dispatch":
            return exchange.dispatch, lambda: is_sent(work, exchange.dispatch())

        def peer() -> torch.Tensor:
            if operation.startswith("both"):
                exchange.dispatch()
            return exchange.combine(rows)

        return peer, lambda: is_combined(work, peer())


def run_low_latency_cases(
    rank: int,
    num_ranks: int,
    setting: Setting,
    names: Sequence[str],
    news: Connection,
    copy_bytes: int = COPY_BYTES,
) -> list[GpuMeasured | RankMeasured]:
    """Check and time cases, one after the other. Runs on every rank.

    Args:
        rank: This rank.
        num_ranks: R.
        setting: The setting.
        names: Keys of `low_latency_titles`.
        news: Where rank 0 sends a `Note` when a case begins and after each round.
        copy_bytes: Size of the copy that bandwidth is measured with on a GPU.
    """
    tell = teller(rank, news)
    gpu = enter_device(rank, setting.device)
    buffer = make_buffer(setting, num_ranks)
    try:
        return _run_all(make_work(setting, rank, num_ranks, buffer), names, tell, gpu, copy_bytes)
    finally:
        _destroy(buffer)


def _run_all(
    work: LowLatencyWork, names: Sequence[str], tell: Callable[[Note], object], gpu: int, copy_bytes: int
) -> list[GpuMeasured | RankMeasured]:
    results, here = [], _Rank(work, gpu, copy_bytes)
    for name in names:
        tell(Note(work.num_ranks, name, 0))
        results.append(here.run(name, tell))
        gc.collect()  # a graph's memory, before the next one is captured
    work.buffer.check()
    return results


def _destroy(buffer: Buffer) -> None:
    gc.collect()  # graphs and tensors over the window end before it does
    buffer.destroy()
