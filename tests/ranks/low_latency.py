"""What tests of low-latency mode share: inputs, buffers, and comparing results with the oracle.

Every rank makes all ranks' inputs from their seeds, so each can ask the oracle what it must get. Weights are eighths
and values small integers, so that sums in FP32 are exact, in whatever order they are taken: bits are compared.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import deep_ep
from deep_ep import quant, reference


class Case(NamedTuple):
    """The shape of a call."""

    experts_per_rank: int = 3
    max_tokens: int = 8
    hidden: int = 256
    topk: int = 3
    idx_dtype: torch.dtype = torch.int64
    num_tokens: int = -1  # as many as there may be
    kind: str = "integers"
    seed: int = 0


class Given(NamedTuple):
    """What a rank brings to a call."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def inputs(rank: int, num_ranks: int, case: Case) -> Given:
    """Some ids negative, some too large, some twice in a token; some ranks with fewer tokens."""
    generator = torch.Generator().manual_seed(1000 * case.seed + rank)
    num_experts = case.experts_per_rank * num_ranks
    num_tokens = case.num_tokens if case.num_tokens >= 0 else max(0, case.max_tokens - rank)
    x = torch.randint(-4, 5, (num_tokens, case.hidden), generator=generator)
    if case.kind == "noise":
        x = torch.randn(num_tokens, case.hidden, generator=generator) * 0.2
    topk_idx = torch.randint(-1, num_experts + 1, (num_tokens, case.topk), generator=generator)
    if case.kind == "nothing":
        topk_idx.fill_(-1)
    weights = torch.randint(-8, 9, (num_tokens, case.topk), generator=generator) / 8
    return Given(x.bfloat16(), topk_idx.to(case.idx_dtype), weights.float())


def make_buffer(num_ranks: int, *cases: Case, times: int = 1, **options: Any) -> deep_ep.Buffer:
    """With room for all cases; `times` as much as the hint says."""
    hints = [
        deep_ep.Buffer.get_low_latency_rdma_size_hint(
            case.max_tokens, case.hidden, num_ranks, case.experts_per_rank * num_ranks
        )
        for case in cases
    ]
    secs = options.pop("limit_secs", 60.0)
    return deep_ep.Buffer(
        dist.group.WORLD,
        num_rdma_bytes=times * max(hints),
        low_latency_mode=True,
        explicitly_destroy=True,
        num_cpu_timeout_secs=secs,
        num_gpu_timeout_secs=secs,
        **options,
    )


def dispatch(buffer: deep_ep.Buffer, given: Given, case: Case, **more: Any) -> tuple:
    num_experts = case.experts_per_rank * buffer.group_size
    return buffer.low_latency_dispatch(given.x, given.topk_idx, case.max_tokens, num_experts, **more)


def finish(event: deep_ep.EventOverlap, hook: Any, is_async: bool, has_hook: bool) -> None:
    assert (hook is not None) == has_hook
    assert (event.event is not None) == is_async
    if has_hook:
        hook()
    if is_async:
        event.current_stream_wait()


def expected_rows(
    xs: list[torch.Tensor], form: dict[str, bool]
) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    if not form.get("use_fp8", True):
        return xs, None
    cast = [quant.cast_fp8(x, form.get("round_scale", False), form.get("use_ue8m0", False)) for x in xs]
    return [q for q, _ in cast], [scales for _, scales in cast]


def as_integers(tensor: torch.Tensor) -> torch.Tensor:
    """So that bits are compared."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def check_dispatch(got: tuple, want: reference.LowLatencyDispatched, form: dict[str, bool]) -> torch.Tensor:
    """Compare what is valid; returns the rows as BF16 where invalid ones are NaN, which nobody may read."""
    recv_x, count, handle, *_ = got
    src_info, layout_range = handle[:2]
    num_local, num_rows = src_info.shape
    scales = None
    if form.get("use_fp8", True):
        recv_x, scales = recv_x
        assert scales.stride() == (scales.size(2) * num_rows, 1, num_rows)
    assert count.dtype == torch.int32
    assert torch.equal(count, want.recv_count)
    assert torch.equal(layout_range, want.layout_range)
    rows = torch.full((num_local, num_rows, recv_x.size(2)), float("nan"), dtype=torch.bfloat16)
    for expert, valid in enumerate(count.tolist()):
        assert torch.equal(src_info[expert, :valid], want.src_info[expert, :valid])
        assert torch.equal(as_integers(recv_x[expert, :valid]), as_integers(want.recv_x[expert, :valid]))
        values = recv_x[expert, :valid]
        if scales is not None:
            assert want.recv_scales is not None
            assert torch.equal(as_integers(scales[expert, :valid]), as_integers(want.recv_scales[expert, :valid]))
            values = quant.per_token_cast_back(values.contiguous(), scales[expert, :valid].contiguous())
        rows[expert, :valid] = values
    return rows


def experts_rows(rows: torch.Tensor, rank: int) -> torch.Tensor:
    """What experts make of their rows: another factor for each."""
    num_local = rows.size(0)
    factors = 1 + (torch.arange(num_local) + rank * num_local) % 3
    return rows * factors.view(-1, 1, 1).to(rows.dtype)


def one_call(
    buffer: deep_ep.Buffer,
    rank: int,
    num_ranks: int,
    case: Case,
    form: dict[str, bool],
    *,
    is_async: bool = False,
    has_hook: bool = False,
    zero_copy: bool = False,
    use_logfmt: bool = False,
    with_out: bool = False,
) -> None:
    """A dispatch and a combine, compared with the oracle."""
    every = [inputs(one, num_ranks, case) for one in range(num_ranks)]
    given, num_experts = every[rank], case.experts_per_rank * num_ranks
    sent, scales = expected_rows([one.x for one in every], form)
    ids = [one.topk_idx for one in every]
    want = reference.low_latency_dispatch(sent, ids, case.max_tokens, num_experts, scales)
    stats = torch.ones(case.experts_per_rank, dtype=torch.int32)
    waits = torch.zeros(num_ranks, dtype=torch.int64)
    got = dispatch(
        buffer,
        given,
        case,
        cumulative_local_expert_recv_stats=stats,
        dispatch_wait_recv_cost_stats=waits,
        async_finish=is_async,
        return_recv_hook=has_hook,
        **form,
    )
    finish(got[3], got[4], is_async, has_hook)
    rows = experts_rows(check_dispatch(got, want[rank], form), rank)
    assert torch.equal(stats, want[rank].recv_count + 1)
    assert (waits >= 0).all()
    handle, x = got[2], rows
    if zero_copy:
        x = buffer.get_next_low_latency_combine_buffer(handle)
        assert x.shape == rows.shape
        x.copy_(rows)
    out = torch.full((given.x.size(0), case.hidden), 7.0, dtype=torch.bfloat16) if with_out else None
    waits.fill_(-1)
    combined, event, hook = buffer.low_latency_combine(
        x,
        given.topk_idx,
        given.topk_weights,
        handle,
        use_logfmt=use_logfmt,
        zero_copy=zero_copy,
        async_finish=is_async,
        return_recv_hook=has_hook,
        out=out,
        combine_wait_recv_cost_stats=waits,
    )
    finish(event, hook, is_async, has_hook)
    assert out is None or combined is out
    assert (waits >= -1).all()
    check_combine(combined, every, want, form, rank, use_logfmt)


def check_combine(
    combined: torch.Tensor,
    every: list[Given],
    want: list[reference.LowLatencyDispatched],
    form: dict[str, bool],
    rank: int,
    use_logfmt: bool = False,
    masked: list[set[int]] | None = None,
) -> None:
    ys = []
    for one, received in enumerate(want):
        rows = received.recv_x
        if received.recv_scales is not None:
            rows = quant.per_token_cast_back(rows, received.recv_scales)
        ys.append(experts_rows(rows, one))
    ids, weights = [one.topk_idx for one in every], [one.topk_weights for one in every]
    expected = reference.low_latency_combine(ys, ids, weights, want, masked)[rank]
    if use_logfmt or form.get("use_fp8", True):
        # Not torch.testing: what it imports takes a rank a second.
        assert torch.allclose(combined.float(), expected.float(), rtol=3e-2, atol=3e-2)
    else:
        assert torch.equal(combined, expected)


BF16 = {"use_fp8": False}
SMALL = Case(experts_per_rank=2, max_tokens=3, hidden=40, topk=2)


def masks_of(buffer: deep_ep.Buffer) -> list[int]:
    status = torch.full((buffer.group_size,), -1, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


class Round:
    """A dispatch and its combine, compared with what the oracle makes of the masks that the rank has by then."""

    def __init__(self, buffer: deep_ep.Buffer, seed: int):
        self.buffer, self.rank = buffer, buffer.rank
        self.every = [inputs(one, buffer.group_size, SMALL._replace(seed=seed)) for one in range(buffer.group_size)]

    @property
    def mine(self) -> Given:
        return self.every[self.rank]

    def dispatch(self, **more: Any) -> tuple:
        return dispatch(self.buffer, self.mine, SMALL, **BF16, **more)

    def finish(self, got: tuple) -> list[int]:
        """Receive what a dispatch got, and combine. Returns the ranks that were masked then."""
        rows = experts_rows(check_dispatch(got, self.expected()[0][self.rank], BF16), self.rank)
        combined, *_ = self.buffer.low_latency_combine(rows, self.mine.topk_idx, self.mine.topk_weights, got[2])
        want, masked = self.expected()
        check_combine(combined, self.every, want, BF16, self.rank, masked=masked)
        return sorted(masked[self.rank])

    def expected(self) -> tuple[list[reference.LowLatencyDispatched], list[set[int]]]:
        """Of all ranks, if they had this rank's masks."""
        mine = {rank for rank, is_masked in enumerate(masks_of(self.buffer)) if is_masked}
        masked = [mine - {rank} for rank in range(self.buffer.group_size)]
        xs, ids = [one.x for one in self.every], [one.topk_idx for one in self.every]
        num_experts = SMALL.experts_per_rank * self.buffer.group_size
        return reference.low_latency_dispatch(xs, ids, SMALL.max_tokens, num_experts, masked=masked), masked

    def go(self) -> list[int]:
        return self.finish(self.dispatch())
