"""Programs change torch's default dtype and device: results are the same whatever these are."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import NOTHING_POSTED, layout_of, run_ranks
from deep_ep import Buffer, ElasticBuffer

pytestmark = pytest.mark.usefixtures("device")

TOKENS, HIDDEN, TOPK, PER_RANK = 24, 128, 3, 2


@contextlib.contextmanager
def odd_defaults() -> Iterator[None]:
    """What is made here without a dtype or a device is useless."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float16)
    try:
        with torch.device("meta"):
            yield
    finally:
        torch.set_default_dtype(usual)


class Odd:
    """A buffer whose methods are called under odd defaults."""

    def __init__(self, buffer: Any):
        self._buffer = buffer

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._buffer, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with odd_defaults():
                return value(*args, **kwargs)

        return call if callable(value) else value


def inputs_of(rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(rank)
    x = torch.randn(TOKENS - rank, HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.rand(TOKENS - rank, PER_RANK * num_ranks, generator=generator).topk(TOPK)[1]
    return x, topk_idx, torch.rand(topk_idx.shape, generator=generator)


def tensors_of(value: Any) -> list[torch.Tensor]:
    """The tensors among results, and in tuples of them."""
    if isinstance(value, torch.Tensor):
        return [value.clone()]
    return [one for item in value for one in tensors_of(item)] if isinstance(value, (tuple, list)) else []


def normal(buffer: Any, rank: int, num_ranks: int) -> list[Any]:
    x, topk_idx, weights = inputs_of(rank, num_ranks)
    layout = layout_of(buffer, topk_idx, PER_RANK * num_ranks)
    routing = {"topk_idx": topk_idx, "topk_weights": weights, **layout}
    received = buffer.dispatch((x.to(torch.float8_e4m3fn), x[:, :4].float()), **routing)
    again = buffer.dispatch(x, handle=received[4])
    combined = buffer.combine(again[0], received[4], topk_weights=received[2], bias=(x, x))
    worst = buffer.dispatch(x, num_worst_tokens=TOKENS * num_ranks, **routing)
    later = buffer.combine(worst[0], worst[4], async_finish=True)
    later[2].current_stream_wait()
    num_rows = received[0][0].size(0)
    rows, scales = received[0]
    return [rows.view(torch.uint8), scales, received[1:3], again[0], combined[:2], worst[0][:num_rows], later[0]]


def low_latency(buffer: Any, rank: int, num_ranks: int) -> list[Any]:
    x, topk_idx, weights = inputs_of(rank, num_ranks)
    results, masks, waited = [], torch.ones(num_ranks, dtype=torch.int32), torch.zeros(num_ranks, dtype=torch.int64)
    for use_fp8 in (False, True):
        rows, counts, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, TOKENS, PER_RANK * num_ranks, use_fp8=use_fp8, dispatch_wait_recv_cost_stats=waited
        )
        values, *scales = rows if use_fp8 else (rows,)
        came = [one[expert, :count].view(torch.uint8) for one in (values,) for expert, count in enumerate(counts)]
        y = torch.nan_to_num(values.float()).clamp(-0.9, 0.9).bfloat16()
        combined = [
            buffer.low_latency_combine(y, topk_idx, weights, handle, use_logfmt=one)[0] for one in (False, True)
        ]
        results += [came, [one[expert, :count] for one in scales for expert, count in enumerate(counts)], combined]
    buffer.low_latency_query_mask_buffer(masks)
    return [*results, masks]


def elastic(buffer: Any, rank: int, num_ranks: int) -> list[Any]:
    x, topk_idx, weights = inputs_of(rank, num_ranks)
    results = []
    for is_expanded in (False, True):
        for has_waited in (True, False):
            received = buffer.dispatch(
                x, topk_idx, weights, num_experts=PER_RANK * num_ranks, do_expand=is_expanded, do_cpu_sync=has_waited,
                do_zero_padding=is_expanded,
            )  # fmt: skip
            again = buffer.dispatch(x, handle=received[3], do_zero_padding=is_expanded)
            combined = buffer.combine(received[0], received[3], received[2])
            num_rows = int(received[3].psum_num_recv_tokens_per_expert[-1 if is_expanded else 0]) if is_expanded else 0
            num_rows = num_rows or int(received[3].psum_num_recv_tokens_per_scaleup_rank[-1])
            results += [received[0][:num_rows], received[2][:num_rows], again[0][:num_rows], combined[:2]]
    return results


KINDS = {"normal": normal, "low latency": low_latency, "elastic": elastic, "whole": elastic}


def make_buffer(kind: str, num_ranks: int) -> Any:
    group = dist.group.WORLD
    if kind in ("elastic", "whole"):
        return ElasticBuffer(group, 1 << 21, 0, TOKENS, allow_multiple_reduction=kind == "elastic")
    if kind == "normal":
        return Buffer(group, 1 << 20)
    size = Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, num_ranks, PER_RANK * num_ranks)
    return Buffer(group, 0, size, low_latency_mode=True, enable_shrink=True)


def compare(rank: int, num_ranks: int, kind: str) -> int:
    expected = tensors_of(KINDS[kind](make_buffer(kind, num_ranks), rank, num_ranks))
    with odd_defaults():
        buffer = make_buffer(kind, num_ranks)
    found = tensors_of(KINDS[kind](Odd(buffer), rank, num_ranks))
    assert [one.dtype for one in found] == [one.dtype for one in expected]
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    return len(found)


WAYS = {
    "posted": (2, {}),
    "direct": (2, NOTHING_POSTED),
    "staged": (2, {**NOTHING_POSTED, "DEEP_EP_ARENA_BYTES": "4096"}),
    "nodes": (4, {**NOTHING_POSTED, "DEEP_EP_RANKS_PER_NODE": "2"}),
}


@pytest.mark.parametrize(
    ("kind", "way"),
    [
        *[("normal", way) for way in WAYS],
        *[("low latency", way) for way in ("direct", "nodes")],
        *[(kind, way) for kind in ("elastic", "whole") for way in ("posted", "direct", "staged")],
    ],
)
@pytest.mark.cpu_only
def test_defaults_change_nothing(kind: str, way: str) -> None:
    num_ranks, env = WAYS[way]
    assert min(run_ranks(compare, num_ranks, kind, env=env)) > 5


@pytest.mark.parametrize(
    "kind",
    ["normal", "low latency", *(pytest.param(one, marks=pytest.mark.exhaustive) for one in ("elastic", "whole"))],
)
def test_kernels_do_not_care_either(kind: str, device: str) -> None:
    env = {} if device == "cuda" else {"DEEP_EP_TRANSPORT": "interpreted", "TRITON_INTERPRET": "1"}
    assert min(run_ranks(compare, 2, kind, env=env)) > 5
