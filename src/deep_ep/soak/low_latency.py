"""Random low-latency calls, compared exactly. A round, a dispatch and its combine, counts as one call."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .. import quant, reference
from ..buffers.legacy import Buffer
from ..event import EventOverlap
from .checks import same, scribble
from .state import State

MOST_TOKENS, MOST_HIDDEN, MOST_EXPERTS_PER_RANK, MOST_TOPK = 12, 300, 4, 5

Given = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # x, ids, weights


def hint(num_ranks: int) -> int:
    """Bytes that a buffer needs for these calls, for two results in flight."""
    num_experts = MOST_EXPERTS_PER_RANK * num_ranks
    return 2 * Buffer.get_low_latency_rdma_size_hint(MOST_TOKENS, MOST_HIDDEN, num_ranks, num_experts)


def low_latency_round(state: State) -> None:
    """A dispatch, new rows from every expert, and a combine."""
    draw, rank, num_ranks = state.draw, state.rank, state.buffer.group_size
    max_tokens, hidden = draw.randint(1, MOST_TOKENS), draw.randint(1, MOST_HIDDEN)
    num_experts, num_topk = num_ranks * draw.randint(1, MOST_EXPERTS_PER_RANK), draw.randint(1, MOST_TOPK)
    form: dict[str, Any] = draw.choice(
        (
            {"use_fp8": False},
            {"use_fp8": True},
            {"use_fp8": True, "round_scale": True},
            {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
        )
    )
    every = [_given(state, one, max_tokens, hidden, num_experts, num_topk) for one in range(num_ranks)]
    sent, scales = _as_sent([x for x, _, _ in every], form)
    ids, weights = [one for _, one, _ in every], [one for _, _, one in every]
    want = reference.low_latency_dispatch(sent, ids, max_tokens, num_experts, scales)
    x, own_ids, own_weights = (state.sent(part) for part in every[rank])
    got = state.buffer.low_latency_dispatch(x, own_ids, max_tokens, num_experts, **form, **_way(state))
    _settle(state, got[3], got[4])
    scribble(x)
    check_received(got, want[rank])
    handle, num_local = got[2], num_experts // num_ranks
    ys = [
        _integers(state, one, (num_local, num_ranks * max_tokens, hidden), "rows").bfloat16()
        for one in range(num_ranks)
    ]
    expected = reference.low_latency_combine(ys, ids, weights, want)[rank]
    zero_copy = draw.random() < 0.3
    y = state.sent(ys[rank])
    if zero_copy:
        state.buffer.get_next_low_latency_combine_buffer(handle).copy_(y)
    out = state.sent(torch.zeros_like(every[rank][0])) if draw.random() < 0.5 else None
    combined, event, hook = state.buffer.low_latency_combine(
        y, own_ids, own_weights, handle, zero_copy=zero_copy, out=out, **_way(state)
    )
    _settle(state, event, hook)
    scribble(y)
    same("combined_x", combined, expected)
    if draw.random() < 0.05:
        state.buffer.clean_low_latency_buffer(max_tokens, hidden, num_experts)
    state.report.count("low-latency round (zero-copy)" if zero_copy else "low-latency round")


def _given(state: State, rank: int, max_tokens: int, hidden: int, num_experts: int, num_topk: int) -> Given:
    """What a rank brings: small integers and weights of eighths, so that sums in FP32 are exact in any order."""
    generator = state.inputs.seeded(rank, "low-latency routes")
    num_tokens = int(torch.randint(0, max_tokens + 1, (), generator=generator))
    ids = torch.randint(-1, num_experts + 1, (num_tokens, num_topk), generator=generator)
    weights = torch.randint(-8, 9, (num_tokens, num_topk), generator=generator) / 8
    return _integers(state, rank, (num_tokens, hidden), "tokens").bfloat16(), ids, weights


def _integers(state: State, rank: int, shape: tuple[int, ...], purpose: str) -> torch.Tensor:
    return torch.randint(-8, 9, shape, generator=state.inputs.seeded(rank, purpose))


def _as_sent(xs: list[torch.Tensor], form: dict[str, Any]) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    if not form["use_fp8"]:
        return xs, None
    cast = [quant.cast_fp8(x, form.get("round_scale", False), form.get("use_ue8m0", False)) for x in xs]
    return [values for values, _ in cast], [scales for _, scales in cast]


def _way(state: State) -> dict[str, Any]:
    """How a call stands to the caller's stream."""
    way = state.draw.choice(("plain", "async_finish", "return_recv_hook"))
    return {} if way == "plain" else {way: True}


def _settle(state: State, event: EventOverlap, hook: Callable[[], None] | None) -> None:
    """Wait for a call, or receive it."""
    if hook is not None:
        state.disturb("before a hook")
        hook()
    if event.event is not None:
        event.current_stream_wait()


def check_received(got: tuple, want: reference.LowLatencyDispatched) -> None:
    """Compare what is valid.

    Raises:
        Mismatch: It is not what the oracle expects.
    """
    recv, count, handle, *_ = got
    recv_x, scales = recv if isinstance(recv, tuple) else (recv, None)
    same("recv_count", count, want.recv_count)
    same("layout_range", handle[1], want.layout_range)
    for expert, num_rows in enumerate(want.recv_count.tolist()):
        rows = slice(None, num_rows)
        same("recv_x", recv_x[expert, rows], want.recv_x[expert, rows])
        same("src_info", handle[0][expert, rows], want.src_info[expert, rows])
        expected: Any = None if want.recv_scales is None else want.recv_scales[expert, rows]
        same("recv_scales", None if scales is None else scales[expert, rows].contiguous(), expected)
