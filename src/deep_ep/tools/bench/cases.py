"""What `bench normal` times on the CPU: dispatch and combine, beside gloo doing the same work, and beside a plain copy.

Rules that hold for all cases:

- Everyone starts from `is_token_in_rank` (DeepEP's `get_dispatch_layout` is a call of its own) and from rows that lie
  ready. Rows that stay on their rank count, for all variants.
- `gloo_preallocated` is `all_to_all_single` at its best: splits known, all memory made and touched beforehand, rows
  gathered in the widest elements. It never exchanges counts, not even beside a full dispatch, which does.
- `gloo_as_written` is the same as users write it: index by destination, exchange counts, make tensors in the call.
- The floor copies as many bytes as the case declares, between two warm buffers, on all ranks at once. Those two
  buffers are gloo's preallocated ones too: at DeepEP's setting each is hundreds of megabytes.
- Dispatch declares the bytes that a rank receives, combine those that it reads.

Shape letters: T tokens, H hidden, K top-k, E experts, R ranks, n rows received, m rows sent.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...buffers.legacy import Buffer
from ...errors import EPError
from ...kernels.rows import as_bytes, rows_as
from ...quant import per_token_cast_to_fp8
from ..terminal import teller
from .core import PRODUCT, PRODUCT_BF16, BenchVariant, HostStopwatch, Measured, time_rounds
from .inputs import Inputs, Setting, make_buffer, make_inputs
from .peers import WarmPair, bytes_of_row, combine_peers, dispatch_pair, dispatch_peers

_BF16_STEP = 2.0**-7  # two sums that round to neighbouring BF16 values differ by this part of themselves


@dataclass(frozen=True)
class Case:
    """One line of the table, ready to be timed on this rank.

    Attributes:
        num_bytes: What this rank moves.
        variants: Product, peers and floor.
        same: Whether two delivered tensors agree.
    """

    num_bytes: int
    variants: list[BenchVariant]
    same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal


def dispatch_case(inputs: Inputs, buffer: Buffer, *, fp8: bool, cached: bool) -> Case:
    """Full dispatch (counts exchanged, ids and weights sent along), or cached dispatch (layout known, rows only).

    FP8: E4M3 rows and [T, H / 128] float32 scales; the same call in BF16 is timed beside it.
    """
    payload = per_token_cast_to_fp8(inputs.x) if fp8 else inputs.x
    parts = list(payload) if isinstance(payload, tuple) else [payload]
    if not cached:
        parts += [inputs.topk_idx, inputs.topk_weights]
    variants = [
        BenchVariant(PRODUCT, _product_dispatch(inputs, buffer, payload, cached), _dispatched),
        *dispatch_peers(inputs, parts, not cached, dispatch_pair(inputs, parts)),
    ]
    if fp8:
        variants.append(BenchVariant(PRODUCT_BF16, _product_dispatch(inputs, buffer, inputs.x, cached)))
    return Case(inputs.routes.num_recv * sum(map(bytes_of_row, parts)), variants)


def _product_dispatch(
    inputs: Inputs, buffer: Buffer, payload: torch.Tensor | tuple[torch.Tensor, torch.Tensor], cached: bool
) -> Callable[[], Any]:
    if cached:
        handle = buffer.dispatch(payload, **inputs.layout)[4]
        return partial(buffer.dispatch, payload, handle=handle)
    return partial(
        buffer.dispatch, payload, **inputs.layout, topk_idx=inputs.topk_idx, topk_weights=inputs.topk_weights
    )


def _dispatched(result: tuple) -> list[torch.Tensor]:
    """What a dispatch of the product delivered: rows, scales, ids, weights, as far as it has them."""
    recv_x, recv_topk_idx, recv_topk_weights = result[:3]
    rows = list(recv_x) if isinstance(recv_x, tuple) else [recv_x]
    parts = [*rows, recv_topk_idx, recv_topk_weights]
    return [as_bytes(part) for part in parts if part is not None]


def combine_case(inputs: Inputs, buffer: Buffer, *, in_window: bool) -> Case:
    """Combine of BF16 rows that lie in the window (`get_combine_buffer`), or elsewhere."""
    recv_x, _, _, _, handle, _ = buffer.dispatch(inputs.x, **inputs.layout)
    assert isinstance(recv_x, torch.Tensor)
    assert handle is not None
    num_recv, num_sent, row_bytes = recv_x.size(0), inputs.routes.num_sent, bytes_of_row(recv_x)
    pair = WarmPair(max(num_recv, num_sent), [row_bytes])
    rows = buffer.get_combine_buffer(handle) if in_window else rows_as(pair.near(num_recv)[0], recv_x.dtype)
    # Another factor on each rank: a row summed from the wrong rank must show.
    torch.mul(recv_x, inputs.rank + 1, out=rows)
    product = BenchVariant(PRODUCT, partial(buffer.combine, rows, handle), lambda result: [result[0]])
    return Case(num_sent * row_bytes, [product, *combine_peers(inputs, rows, pair)], _same_sums)


def round_trip_case(inputs: Inputs, buffer: Buffer) -> Case:
    """Full dispatch, and combine of the received rows in place: what a layer pays for its communication."""
    recv_x, _, _, _, _, _ = buffer.dispatch(inputs.x, **inputs.layout)
    assert isinstance(recv_x, torch.Tensor)
    rows, parts = recv_x, [inputs.x, inputs.topk_idx, inputs.topk_weights]
    pair = dispatch_pair(inputs, parts)  # one for both ways: together they would not fit into memory
    there, back = dispatch_peers(inputs, parts, True, pair), combine_peers(inputs, rows, pair)
    dispatch = _product_dispatch(inputs, buffer, inputs.x, cached=False)

    def product() -> torch.Tensor:
        received = dispatch()
        return buffer.combine(received[0], received[4])[0]

    num_bytes = inputs.routes.num_recv * sum(map(bytes_of_row, parts)) + inputs.routes.num_sent * bytes_of_row(rows)
    peers = [_in_turn(one, other) for one, other in zip(there, back, strict=True)]
    return Case(num_bytes, [BenchVariant(PRODUCT, product, lambda sums: [sums]), *peers], _same_sums)


def _in_turn(there: BenchVariant, back: BenchVariant) -> BenchVariant:
    """A dispatch and then a combine of the same peer, as one."""

    def call() -> Any:
        there.call()
        return back.call()

    return BenchVariant(back.name, call, back.outputs)


def _same_sums(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=_BF16_STEP, atol=1e-3)


CASES: dict[str, tuple[str, Callable[[Inputs, Buffer], Case]]] = {
    "dispatch-bf16": ("dispatch, BF16", partial(dispatch_case, fp8=False, cached=False)),
    "cached-bf16": ("cached dispatch, BF16", partial(dispatch_case, fp8=False, cached=True)),
    "dispatch-fp8": ("dispatch, FP8", partial(dispatch_case, fp8=True, cached=False)),
    "cached-fp8": ("cached dispatch, FP8", partial(dispatch_case, fp8=True, cached=True)),
    "combine-window": ("combine, BF16, in window", partial(combine_case, in_window=True)),
    "combine-elsewhere": ("combine, BF16, elsewhere", partial(combine_case, in_window=False)),
    "round-trip": ("dispatch + combine, BF16", round_trip_case),
}
"""By name: how a table calls it, and how a rank makes it."""


# A rank's work -------------------------------------------------------------------------------------------------------


class RankMeasured(NamedTuple):
    """One rank's part of a case: the bytes that it moves, and its seconds of each variant."""

    num_bytes: int
    times: dict[str, list[float]]


class Note(NamedTuple):
    """What rank 0 says on its way: so many rounds of a case are done."""

    num_ranks: int
    case: str
    num_done: int


def run_cases(
    rank: int,
    num_ranks: int,
    setting: Setting,
    names: Sequence[str],
    news: Connection,
    cases: Mapping[str, tuple[str, Callable[[Inputs, Buffer], Case]]] = CASES,
) -> list[RankMeasured]:
    """Check and time cases, one after the other. Runs on every rank.

    Args:
        rank: This rank.
        num_ranks: R.
        setting: The setting.
        names: Keys of `cases`.
        news: Where rank 0 sends a `Note` when a case begins and after each round.
        cases: By name, as `CASES` has them.
    """
    tell = teller(rank, news)
    results = []
    for name in names:
        tell(Note(num_ranks, name, 0))
        results.append(_run_case(rank, num_ranks, setting, name, cases[name][1], tell))
        gc.collect()  # hundreds of megabytes that the next case would come on top of
    return results


def join_cases(name: str, parts: Sequence[RankMeasured]) -> Measured:
    """One case out of all ranks' parts of it."""
    times = {variant: [part.times[variant] for part in parts] for variant in parts[0].times}
    return Measured(name, len(parts), [part.num_bytes for part in parts], times)


def _run_case(
    rank: int,
    num_ranks: int,
    setting: Setting,
    name: str,
    make: Callable[[Inputs, Buffer], Case],
    tell: Callable[[Note], object],
) -> RankMeasured:
    buffer = make_buffer(setting, num_ranks)
    try:
        case = make(make_inputs(setting, rank, num_ranks, buffer), buffer)
        check_outputs(case, name, rank, num_ranks)
        times = time_rounds(
            case.variants,
            setting.num_rounds,
            HostStopwatch(dist.barrier),
            on_round=lambda done: tell(Note(num_ranks, name, done)),
        )
    finally:
        buffer.destroy()
    return RankMeasured(case.num_bytes, times)


def check_outputs(case: Case, name: str, rank: int, num_ranks: int) -> None:
    """Call every variant once, and refuse to time what does not deliver the same.

    Raises:
        EPError: A peer delivered something else than the product.
    """
    expected: list[torch.Tensor] = []
    for variant in case.variants:
        result = variant.call()
        if variant.outputs is None:
            continue
        outputs = variant.outputs(result)
        if variant.name == PRODUCT:
            expected = outputs
            continue
        pairs_agree = [case.same(one, other) for one, other in zip(expected, outputs, strict=True)]
        if not all(pairs_agree):
            raise EPError(
                f"bench {name}: {variant.name} and {PRODUCT} must deliver the same, but they differ in tensors "
                f"{[index for index, agrees in enumerate(pairs_agree) if not agrees]} of {len(expected)} "
                f"(rank {rank}/{num_ranks}). One of them is wrong: nothing was timed"
            )
