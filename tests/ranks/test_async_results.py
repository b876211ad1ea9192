"""What an asynchronous call returns before it is filled: under autograd, and if the call is refused."""

from __future__ import annotations

import contextlib
import time
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import NOTHING_POSTED, OneRank, error_of, run_ranks
from deep_ep.event import EventHandle

pytestmark = pytest.mark.cpu_only  # on a GPU kernels write results, and an overflow closes the buffer

TOKENS, HIDDEN, TOPK = 16, 128, 2
NODES = {"DEEP_EP_RANKS_PER_NODE": "1"}


def make_buffer(num_ranks: int, **more: Any) -> deep_ep.Buffer:
    num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, num_ranks, 2 * num_ranks)
    return deep_ep.Buffer(dist.group.WORLD, 1 << 20, 4 * num_bytes, True, num_cpu_timeout_secs=30, **more)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_in(item)] if isinstance(value, (tuple, list)) else []


class Keep(torch.autograd.Function):
    """Saves tensors that are still to be filled, as a layer does that waits later."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *kept: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(*kept)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple:
        return gradient, *([None] * len(ctx.saved_tensors))


def versions(rank: int, num_ranks: int, is_inferring: bool) -> None:
    buffer, num_experts = make_buffer(num_ranks), 2 * num_ranks
    ids = torch.arange(TOKENS * TOPK).view(TOKENS, TOPK) % num_experts
    weights = torch.ones(TOKENS, TOPK)
    x = torch.randn(TOKENS, HIDDEN).bfloat16()

    def watched(**more: Any) -> dict[str, Any]:
        """Behind an event that has not come yet, so that the call returns before it has begun."""
        gate: Future = Future()
        gates.append(gate)
        return {"previous_event": EventHandle(gate), "async_finish": True, **more}

    def check(name: str, results: Any, finish: Any) -> None:
        tensors = [tensor for tensor in tensors_in(results) if tensor is not mask]
        if is_inferring:  # such tensors have no counts
            gates[-1].set_result(None)
            return finish()
        before = [tensor._version for tensor in tensors]
        leaf = torch.ones(1, requires_grad=True)
        out = Keep.apply(leaf, *tensors)
        if gates:
            gates[-1].set_result(None)
        finish()
        assert [tensor._version for tensor in tensors] == before, name
        out.sum().backward()
        return None

    gates: list[Future] = []
    mask = None
    with torch.inference_mode(is_inferring):
        *layout, event = buffer.get_dispatch_layout(ids, num_experts, **watched())
        check("layout", layout, event.current_stream_wait)
        per_rank, per_node, per_expert, mask = layout
        arguments = (None, per_rank, per_node, mask, per_expert, ids, weights)
        for worst in (TOKENS * num_ranks, 0):
            if worst:
                results = buffer.dispatch(x, *arguments, num_worst_tokens=worst, **watched())
            else:
                gates.clear()
                results = buffer.dispatch(x, *arguments, async_finish=True)
            if not gates:
                gates.append(Future())
            check(f"dispatch {worst}", results[:-1], results[-1].current_stream_wait)
        rows, handle = results[0], results[4]
        cached = buffer.dispatch(x, handle, **watched())
        check("cached dispatch", cached[0], cached[-1].current_stream_wait)
        combined = buffer.combine(rows, handle, torch.ones(rows.size(0), TOPK), **watched())
        check("combine", combined[:2], combined[-1].current_stream_wait)
        gates.append(Future())
        stats = torch.zeros(2, dtype=torch.int32)
        low = buffer.low_latency_dispatch(x, ids, TOKENS, num_experts, stats, return_recv_hook=True)
        check("low-latency dispatch", (low[:3], stats), low[4])
        rows = torch.ones_like(low[0][0], dtype=torch.bfloat16)
        out = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16)
        gates.append(Future())
        low = buffer.low_latency_combine(rows, ids, weights, low[2], return_recv_hook=True, out=out)
        check("low-latency combine", low[0], low[2])
        assert int(stats.sum()) > 0


@pytest.mark.parametrize("is_inferring", [False, True], ids=["autograd", "inference"])
@pytest.mark.parametrize("env", [{}, NOTHING_POSTED, NODES], ids=["posted", "put", "nodes"])
def test_results_are_filled_without_a_change_that_autograd_counts(env: dict, is_inferring: bool) -> None:
    run_ranks(versions, 2, is_inferring, env=env)


def overflow(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    buffer = make_buffer(num_ranks)
    ids = torch.arange(TOKENS).view(-1, 1) % num_ranks
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(ids, num_ranks)
    arguments = (None, per_rank, per_node, mask, per_expert, ids, torch.ones(TOKENS, 1))
    x = torch.ones(TOKENS, HIDDEN).bfloat16()

    def dispatch(num_rows: int) -> tuple:
        return buffer.dispatch(x, *arguments, num_worst_tokens=num_rows, async_finish=True)

    said = []
    for is_alike in (True, False):
        *_, handle, event = dispatch(3 if is_alike or rank == 0 else TOKENS * num_ranks)
        rows = torch.ones(handle[3].size(0) if num_ranks == len(handle[0]) else handle[7].size(0), HIDDEN).bfloat16()
        queued = buffer.combine(rows, handle, async_finish=True)[2]
        said += [error_of(queued.current_stream_wait), error_of(event.current_stream_wait)]
        said += [error_of(buffer.combine, rows, handle), error_of(buffer.dispatch, x, handle)]
        buffer.check()
        good = dispatch(TOKENS * num_ranks)  # the buffer goes on
        combined = buffer.combine(torch.ones(good[0].shape).bfloat16(), good[4], previous_event=good[5])[0]
        assert (combined == 1).all()
    return said


def overflow_while_queueing(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    """Rank 1 is late: it finds the overflow before it has queued what rank 0 has queued behind it."""
    buffer = make_buffer(num_ranks)
    ids, x = torch.zeros(TOKENS, 1, dtype=torch.int64), torch.ones(TOKENS, HIDDEN)
    dist.barrier()

    def chain(num_rows: int) -> None:
        event = None
        for batch in range(2):
            order = {"previous_event": event, "async_finish": True}
            per_rank, per_node, per_expert, mask, event = buffer.get_dispatch_layout(ids, num_ranks, **order)
            layout, order = (None, per_rank, per_node, mask, per_expert), {**order, "previous_event": event}
            rows, *_, handle, event = buffer.dispatch(
                x, *layout, ids, torch.ones(TOKENS, 1), num_worst_tokens=num_rows, **order
            )
            if rank == 1 and batch == 0:
                time.sleep(0.5)
        combined, _, event = buffer.combine(rows, handle, previous_event=event, async_finish=True)
        event.current_stream_wait()
        assert (combined == 1).all()

    return [error_of(chain, 3), error_of(chain, TOKENS * num_ranks)]


@pytest.mark.parametrize("env", [{}, NOTHING_POSTED, NODES], ids=["posted", "put", "nodes"])
def test_ranks_that_queue_differently_behind_an_overflow_go_on(env: dict) -> None:
    for (kind, _), after in run_ranks(overflow_while_queueing, 2, env=env):
        assert kind == "EPOverflow"
        assert after == ("none", "")


@pytest.mark.parametrize("env", [{}, NOTHING_POSTED, NODES], ids=["posted", "put", "nodes"])
def test_calls_behind_a_refused_dispatch_say_so_and_the_buffer_goes_on(env: dict) -> None:
    for said in run_ranks(overflow, 2, env=env):
        assert [kind for kind, _ in said] == ["EPOverflow"] * 8
        for behind, first, later, cached in zip(*[iter(text for _, text in said)] * 4, strict=True):
            assert "more than its num_worst_tokens=3" in first
            for text in (behind, later, cached):
                assert "the dispatch that made this handle was refused" in text


def late_layout(buffer: deep_ep.Buffer, ids: torch.Tensor, num_experts: int, event: Any) -> tuple:
    """A layout that is counted on the comm stream, behind an event, as a dispatch takes it."""
    per_rank, per_node, per_expert, mask, counted = buffer.get_dispatch_layout(ids, num_experts, event, True)
    return (None, per_rank, per_node, mask, per_expert, ids, torch.ones(ids.shape)), counted


def queued_layout(rank: int, num_ranks: int) -> None:
    """Dispatches whose layout is queued, and thus not counted yet when they are made."""
    buffer, ids = make_buffer(num_ranks), torch.arange(TOKENS).view(-1, 1) % num_ranks
    x = torch.randn(TOKENS, HIDDEN)
    for previous in (None, deep_ep.Buffer.capture()):
        for worst in (0, TOKENS * num_ranks):
            gate: Future = Future()
            layout, counted = late_layout(buffer, ids, num_ranks, EventHandle(gate))
            if not worst:  # waits for its counts
                gate.set_result(None)
            rows, _, _, _, handle, event = buffer.dispatch(
                x, *layout, num_worst_tokens=worst, previous_event=previous, async_finish=True
            )
            assert gate.done() or not counted.event.query()
            if worst:
                gate.set_result(None)
            assert torch.equal(buffer.combine(rows, handle, previous_event=event)[0], x)


@pytest.mark.parametrize("env", [{}, NODES], ids=["one node", "nodes"])
def test_a_dispatch_may_be_queued_behind_its_layout(env: dict) -> None:
    run_ranks(queued_layout, 2, env=env)


def uncounted_layout(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    """Dispatches whose layout is never counted: what it came after has failed."""
    buffer, ids = make_buffer(num_ranks), torch.arange(TOKENS).view(-1, 1) % num_ranks
    x, said = torch.ones(TOKENS, HIDDEN), []
    counted, _ = late_layout(buffer, ids, num_ranks, None)
    for worst in (0, TOKENS * num_ranks):
        gate: Future = Future()
        after = EventHandle(gate)
        event = buffer.dispatch(x, *counted, num_worst_tokens=3, previous_event=after, async_finish=True)[-1]
        layout, _ = late_layout(buffer, ids, num_ranks, event)
        if worst:  # queued before any of it has run
            queued = buffer.dispatch(x, *layout, num_worst_tokens=worst, async_finish=True)[-1]
            gate.set_result(None)
            said.append(error_of(queued.current_stream_wait))
        else:
            gate.set_result(None)
        said.append(error_of(buffer.dispatch, x, *layout, num_worst_tokens=worst))
    gate = Future()
    layout, event = late_layout(buffer, ids, num_ranks, EventHandle(gate))
    gate.set_exception(MemoryError("elsewhere"))
    said += [error_of(buffer.dispatch, x, *layout), error_of(event.current_stream_wait)]
    rows, _, _, _, handle, _ = buffer.dispatch(x, *counted)  # the buffer goes on
    assert (buffer.combine(rows, handle)[0] == 1).all()
    return said


@pytest.mark.parametrize("env", [{}, NODES], ids=["one node", "nodes"])
def test_a_dispatch_whose_layout_was_never_counted_is_refused(env: dict) -> None:
    for said in run_ranks(uncounted_layout, 2, env=env):
        *behind, after_another, event = said
        for kind, text in behind:
            assert kind == "EPOverflow"
            assert "its layout was not counted" in text
        assert after_another[0] == "EPError"
        assert "its layout was not counted" in after_another[1]
        assert event == ("MemoryError", "elsewhere")


def foreign_overflow(rank: int, num_ranks: int) -> list[str]:
    """A call of all ranks comes, on rank 0, after one of another buffer, which overflows."""
    alone = deep_ep.Buffer(None, 1 << 20, comm=OneRank(), device="cpu")
    ids, weights = torch.zeros(TOKENS, 1, dtype=torch.int64), torch.ones(TOKENS, 1)
    per_rank, _, per_expert, mask, _ = alone.get_dispatch_layout(ids, 1)
    x = torch.ones(TOKENS, 8)
    *_, event = alone.dispatch(
        x, None, per_rank, None, mask, per_expert, ids, weights, num_worst_tokens=3, async_finish=True
    )
    buffer = make_buffer(num_ranks)
    ids = torch.arange(TOKENS).view(-1, 1) % num_ranks
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(ids, num_ranks)
    handle = buffer.dispatch(x, None, per_rank, per_node, mask, per_expert, ids, weights)[4]
    dist.barrier()  # a rank that fails at once would spoil the call before for one that is still in it
    after = {"previous_event": event} if rank == 0 else {}
    waits: list[Any] = []
    for number in (1, 2):
        with contextlib.suppress(deep_ep.EPClosed):  # the first may have failed already
            waits.append(buffer.dispatch(x * number, handle, async_finish=True, **after)[-1].current_stream_wait)
    return [error_of(wait)[0] for wait in waits]


def test_an_overflow_of_another_buffer_is_a_failure() -> None:
    one, other = run_ranks(foreign_overflow, 2)
    assert one[0] == "EPOverflow"
    assert other[0] == "EPPeerFailed"
    assert set(one[1:]) <= {"EPOverflow", "EPClosed"}
    assert set(other[1:]) <= {"EPClosed"}


def somebody_fails(rank: int, num_ranks: int) -> tuple[str, str]:
    """Rank 2 has an error of its own, and rank 1 comes when others have failed already."""
    buffer = make_buffer(num_ranks)
    ids = torch.arange(TOKENS).view(-1, 1) % num_ranks
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(ids, num_ranks)
    arguments = (None, per_rank, per_node, mask, per_expert, ids, torch.ones(TOKENS, 1))
    event = None
    if rank == 2:
        failed: Future = Future()
        failed.set_exception(MemoryError("no room for the experts, in '\udcff'"))
        event = EventHandle(failed)
    group = [one for one in range(num_ranks) if one != 1]
    if rank == 1:
        dist.barrier()
    error = error_of(
        buffer.dispatch, torch.ones(TOKENS, 8), *arguments, num_worst_tokens=TOKENS * num_ranks, previous_event=event
    )
    if rank in group:
        dist.barrier()
    return error


@pytest.mark.parametrize("env", [{}, {"DEEP_EP_RANKS_PER_NODE": "2"}], ids=["one node", "2x2"])
def test_the_first_cause_keeps_the_rank_that_had_it(env: dict) -> None:
    results = run_ranks(somebody_fails, 4, env=env)
    assert results[2][0] == "MemoryError"
    for rank in (0, 1, 3):
        kind, text = results[rank]
        assert kind == "EPPeerFailed"
        assert "rank 2 failed: MemoryError: no room for the experts, in '\\udcff'" in text
        assert f"(rank {rank}/4)" in text
        assert not any(f"rank {other} " in text for other in (0, 1, 3) if other != rank)
