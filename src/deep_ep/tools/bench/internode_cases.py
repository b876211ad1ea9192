"""What `bench internode` times: dispatch and combine across nodes, beside flat gloo, and beside plain sockets.

Rules, beside those of `cases`:

- Flat gloo is `gloo_preallocated` of one node: every rank sends to every rank, and a token crosses to a node once for
  each of its ranks that takes it.
- The floor sends what must cross, once for each token and node, over plain sockets: one for each pair of ranks of a
  rail, both directions at once, all rails at once. Nothing is packed, and nothing is handed on inside a node.
- `rdma` and `nvlink` are bytes as DeepEP's own benchmark counts them: of a token, a row for each node that it goes to,
  its own one included; and the rows that a rank receives. FP8 counts scales, nothing counts ids and weights.
- `needed` are the bytes that must leave a rank's node for the rank's tokens: rows, scales, ids, weights. `rail` are
  those that the rank handed to its sockets in one call, and `wire` those that the node's interface counted.

Letters as in `cases`; N nodes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import NamedTuple

import torch.distributed as dist

from ...buffers.legacy import Buffer
from ...quant import per_token_cast_to_fp8
from .. import namespaces
from ..terminal import teller
from .cases import Case, Note, check_outputs, combine_case, dispatch_case
from .core import FLOOR, GLOO_AS_WRITTEN, PRODUCT, PRODUCT_BF16, BenchVariant, HostStopwatch, Measured, time_rounds
from .crossing import Crossing, count_bytes, find_crossing
from .inputs import Inputs, Setting, make_buffer, make_inputs
from .peers import bytes_of_row
from .sockets import PlainSockets
from .traffic import NEEDED, NVLINK, RAIL, RDMA, WIRE

_NUM_COUNTED = 3  # calls whose bytes are counted; between them only what the network sends again differs


class RailCase(NamedTuple):
    """A case across nodes on one rank.

    Attributes:
        case: Product, peer and floor.
        rdma_bytes: Of the rank's tokens, as DeepEP counts.
        nvlink_bytes: Of the rows that it receives, likewise.
        needed_bytes: What must leave the node.
    """

    case: Case
    rdma_bytes: int
    nvlink_bytes: int
    needed_bytes: int


def rail_dispatch(inputs: Inputs, buffer: Buffer, sockets: PlainSockets, *, fp8: bool, cached: bool) -> RailCase:
    """Full or cached dispatch of BF16 rows, or of FP8 rows with scales."""
    crossing = find_crossing(inputs.layout)
    row_bytes = sum(map(bytes_of_row, per_token_cast_to_fp8(inputs.x[:1]) if fp8 else [inputs.x]))
    sent_bytes = row_bytes
    if not cached:
        sent_bytes += sum(map(bytes_of_row, (inputs.topk_idx, inputs.topk_weights)))
    case = dispatch_case(inputs, buffer, fp8=fp8, cached=cached)
    return _across(case, inputs, crossing, sockets, (crossing.num_out, crossing.num_in), row_bytes, sent_bytes)


def rail_combine(inputs: Inputs, buffer: Buffer, sockets: PlainSockets) -> RailCase:
    """Combine of BF16 rows that lie in the window."""
    crossing = find_crossing(inputs.layout)
    case = combine_case(inputs, buffer, in_window=True)
    row_bytes = bytes_of_row(inputs.x)
    return _across(case, inputs, crossing, sockets, (crossing.num_in, crossing.num_out), row_bytes, row_bytes)


def _across(
    case: Case,
    inputs: Inputs,
    crossing: Crossing,
    sockets: PlainSockets,
    counts: tuple[Sequence[int], Sequence[int]],
    row_bytes: int,
    sent_bytes: int,
) -> RailCase:
    """A case of one node as one across nodes: with the floor of the network.

    Args:
        case: Of one node.
        inputs: The rank's inputs.
        crossing: Tokens by node.
        sockets: Of the floor.
        counts: For each node, rows that leave for it, and rows that come from it.
        row_bytes: Of a row with its scales.
        sent_bytes: The same with ids and weights, where they are sent.
    """
    there, back = (crossing.to_others(one, sent_bytes) for one in counts)
    variants = [one for one in case.variants if one.name not in (FLOOR, GLOO_AS_WRITTEN, PRODUCT_BF16)]
    variants.append(BenchVariant(FLOOR, sockets.copying(there, back)))
    return RailCase(
        Case(case.num_bytes, variants, case.same),
        rdma_bytes=sum(crossing.num_out) * row_bytes,
        nvlink_bytes=inputs.routes.num_recv * row_bytes,
        needed_bytes=sum(there.values()),
    )


RAIL_CASES: dict[str, tuple[str, Callable[[Inputs, Buffer, PlainSockets], RailCase]]] = {
    "dispatch-bf16": ("dispatch, BF16", partial(rail_dispatch, fp8=False, cached=False)),
    "dispatch-fp8": ("dispatch, FP8", partial(rail_dispatch, fp8=True, cached=False)),
    "cached-bf16": ("cached dispatch, BF16", partial(rail_dispatch, fp8=False, cached=True)),
    "combine-window": ("combine, BF16, in window", rail_combine),
}
"""By name: how a table calls it, and how a rank makes it."""


# A rank's work -------------------------------------------------------------------------------------------------------


class RankTraffic(NamedTuple):
    """One rank's part of a case: bytes by what they are, and its seconds of each variant."""

    traffic: dict[str, int]
    times: dict[str, list[float]]


def run_rail_cases(
    rank: int, num_ranks: int, setting: Setting, names: Sequence[str], news: Connection
) -> list[RankTraffic]:
    """Check, count and time cases, one after the other. Runs on every rank; see `cases.run_cases`."""
    tell = teller(rank, news)
    sockets, results = PlainSockets(), []
    for name in names:
        tell(Note(num_ranks, name, 0))
        results.append(_run_case(rank, num_ranks, setting, name, sockets, tell))
        gc.collect()  # hundreds of megabytes that the next case would come on top of
    sockets.close()
    return results


def join_rail_cases(num_nodes: int, name: str, parts: Sequence[RankTraffic]) -> Measured:
    """One case out of all ranks' parts of it."""
    times = {variant: [part.times[variant] for part in parts] for variant in parts[0].times}
    traffic = {kind: [part.traffic[kind] for part in parts] for kind in parts[0].traffic}
    return Measured(name, len(parts), traffic[RDMA], times, num_nodes=num_nodes, traffic=traffic)


def _run_case(
    rank: int, num_ranks: int, setting: Setting, name: str, sockets: PlainSockets, tell: Callable[[Note], object]
) -> RankTraffic:
    buffer = make_buffer(setting, num_ranks)
    try:
        made = RAIL_CASES[name][1](make_inputs(setting, rank, num_ranks, buffer), buffer, sockets)
        check_outputs(made.case, name, rank, num_ranks)
        traffic = {RDMA: made.rdma_bytes, NVLINK: made.nvlink_bytes, NEEDED: made.needed_bytes}
        product = next(one for one in made.case.variants if one.name == PRODUCT)
        traffic |= count_bytes(partial(_counters, buffer, bool(setting.link)), product.call, _NUM_COUNTED)
        times = time_rounds(
            made.case.variants,
            setting.num_rounds,
            HostStopwatch(dist.barrier),
            on_round=lambda done: tell(Note(num_ranks, name, done)),
        )
    finally:
        buffer.destroy()
    return RankTraffic(traffic, times)


def _counters(buffer: Buffer, has_wire: bool) -> dict[str, int]:
    """What this rank has handed to its sockets so far, and what its node's interface has sent."""
    counters = {RAIL: buffer.stats()["rail"]["bytes_sent"]}
    return {**counters, WIRE: namespaces.sent_bytes()} if has_wire else counters
