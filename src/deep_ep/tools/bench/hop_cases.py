"""What `bench internode --device cuda` times: two hops, beside one hop of the same routes on the same GPU.

Cases are those of `gpu_cases`, by the device's clock; the buffer across nodes is the product, and the buffer that has
all ranks for one node a second variant of each case, in the same rounds, both behind the second one's barrier. The
floor is the least that two hops move through memory:

    dispatch            reads T rows, writes n rows, and writes and reads c rows of the landing
    combine, in window  reads n rows, writes T rows, and writes and reads c rows of the landing

c: rows of other nodes that land in this rank's memory. In a dispatch those are tokens that it relays, in a combine sums
of its own tokens. Bytes are those of the memory that they go through: a row counts at the rank that receives it.

`needed` are the bytes of payload and scales that must leave a rank's node, once for each token and node; `rail` those
that the rank gave to its rail in one call, records included.

Letters as in `cases`.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

from ...buffers.legacy import Buffer
from ..terminal import teller
from .cases import Note
from .core import ONE_HOP, PRODUCT, BenchVariant, Measured
from .crossing import Crossing, count_bytes, find_crossing
from .gpu import device_stopwatch, enter_device
from .gpu_cases import (
    COPY_BYTES,
    GPU_CASES,
    GpuCase,
    GpuMeasured,
    Work,
    check_case,
    copy_floor,
    gpu_titles,
    join_gpu_cases,
    make_work,
    time_case,
)
from .hop_buffers import making_hops
from .inputs import Setting, find_layout
from .traffic import NEEDED, RAIL

HOP_CASES = ("cached-bf16", "dispatch-bf16", "cached-fp8", "combine-window")
"""Keys of `GPU_CASES`."""


def hop_titles(num_sms: int) -> dict[str, str]:
    """How a table calls the cases."""
    titles = gpu_titles(num_sms)
    return {name: titles[name] for name in HOP_CASES}


class HopCase(NamedTuple):
    """A case across nodes on one rank.

    Attributes:
        two: Two hops; its bytes include those of the landing.
        one: One hop.
        needed_bytes: What must leave the node.
    """

    two: GpuCase
    one: GpuCase
    needed_bytes: int


class Works(NamedTuple):
    """What one rank brings to every case, with either buffer."""

    two: Work
    one: Work


def hop_case(name: str, works: Works, crossing: Crossing) -> HopCase:
    """A case with both buffers, each of which must deliver what it should.

    Raises:
        EPError: One of them does not.
    """
    two, one = (GPU_CASES[name].make(work) for work in works)
    for case, work in ((two, works.two), (one, works.one)):
        check_case(case, name, work)
    sent, arrived = crossing.num_out, crossing.num_in
    if name.startswith("combine"):
        sent, arrived = arrived, sent
    arrived_bytes = sum(crossing.to_others(arrived, two.moved_bytes).values())
    two = dataclasses.replace(two, memory_bytes=two.memory_bytes + 2 * arrived_bytes)
    return HopCase(two, one, sum(crossing.to_others(sent, two.row_bytes).values()))


# A rank's work -------------------------------------------------------------------------------------------------------


class HopMeasured(NamedTuple):
    """One rank's part of a case: as on one node, and bytes by what they are."""

    measured: GpuMeasured
    traffic: dict[str, int]


def run_hop_cases(
    rank: int,
    num_ranks: int,
    setting: Setting,
    names: Sequence[str],
    news: Connection,
    copy_bytes: int = COPY_BYTES,
) -> list[HopMeasured]:
    """Check, count and time cases, one after the other. Runs on every rank; see `gpu_cases.run_gpu_cases`."""
    tell = teller(rank, news)
    gpu = enter_device(rank, setting.device)
    with making_hops(setting, num_ranks) as buffers:
        works, floor = _make_works(setting, rank, *buffers), copy_floor(copy_bytes, buffers[0].device)
        crossing, results = find_crossing(works.two.layout), []
        for name in names:
            tell(Note(num_ranks, name, 0))
            results.append(_run_case(name, works, crossing, gpu, floor, copy_bytes, tell))
            gc.collect()  # what a case held in the windows is room for the next
        for buffer in buffers:
            buffer.check()
    return results


def _make_works(setting: Setting, rank: int, two: Buffer, one: Buffer) -> Works:
    work = make_work(setting, rank, two)
    layout = find_layout(work.drawn, setting.num_experts, one)
    return Works(work, dataclasses.replace(work, buffer=one, layout=layout))


def _run_case(
    name: str,
    works: Works,
    crossing: Crossing,
    gpu: int,
    floor: BenchVariant,
    copy_bytes: int,
    tell: Callable[[Note], object],
) -> HopMeasured:
    two, one, needed_bytes = hop_case(name, works, crossing)
    traffic = {NEEDED: needed_bytes, **count_bytes(partial(_given_to_rail, works.two.buffer), two.call, num_calls=1)}
    variants = [BenchVariant(PRODUCT, two.call), BenchVariant(ONE_HOP, one.call), floor]
    # A barrier across nodes lets the nodes go at different times; through one memory all ranks start together.
    times = time_case(name, variants, device_stopwatch(works.one.buffer), works.two, tell)
    return HopMeasured(GpuMeasured(two.num_bytes, two.memory_bytes, gpu, copy_bytes, times), traffic)


def _given_to_rail(buffer: Buffer) -> dict[str, int]:
    buffer.check()  # the device counts
    return {RAIL: buffer.stats()["rail"]["rows_bytes_sent"]}


# All ranks' work -----------------------------------------------------------------------------------------------------


def join_hop_cases(num_nodes: int, name: str, parts: Sequence[HopMeasured]) -> Measured:
    """One case out of all ranks' parts of it."""
    joined = join_gpu_cases(name, [part.measured for part in parts])
    traffic = {kind: [part.traffic[kind] for part in parts] for kind in parts[0].traffic}
    return dataclasses.replace(joined, num_nodes=num_nodes, traffic=traffic)
