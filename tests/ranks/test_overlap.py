"""Asynchronous calls: they return before rows have moved, finish beside the caller, and say later what went wrong."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import NOTHING_POSTED, error_of, layout_of, run_ranks

TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 24, 64, 3, 2
PATIENCE_SECS = 30.0  # far more than anything here takes; less than a buffer's limit
LIMIT_SECS = 40.0


def make_buffer() -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True, num_cpu_timeout_secs=LIMIT_SECS)


def full_dispatch(buffer: deep_ep.Buffer, seed: int = 0, **more: Any) -> tuple:
    """Rows that hold the number of their source rank, from 1."""
    num_experts = EXPERTS_PER_RANK * buffer.group_size
    generator = torch.Generator().manual_seed(1000 * seed + buffer.rank)
    topk_idx = torch.rand(TOKENS, num_experts, generator=generator).topk(TOPK).indices
    layout = layout_of(buffer, topk_idx, num_experts)
    return buffer.dispatch(
        torch.full((TOKENS, HIDDEN), buffer.rank + 1.0),
        **layout,
        **more,
    )


def sources(handle: tuple, rank: int) -> torch.Tensor:
    """[n, 1] the source rank of each received row, from 1."""
    ends = [0, *handle[0][:, rank].tolist()]
    return torch.cat([torch.full((end - begin, 1), s + 1.0) for s, (begin, end) in enumerate(pairwise(ends))])


def num_copies(handle: tuple) -> torch.Tensor:
    """[T, 1] to how many ranks each of this rank's tokens goes."""
    return handle[4].sum(1, keepdim=True).float()


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + PATIENCE_SECS
    while not condition() and time.monotonic() < deadline:
        time.sleep(1e-3)
    return condition()


def is_done(event: deep_ep.EventOverlap) -> bool:
    assert event.event is not None
    return event.event.query()


def wait_on(stream: Any, event: deep_ep.EventOverlap) -> None:
    """Have a comm stream wait for an event: ours takes our events, one of CUDA takes CUDA's."""
    assert event.event is not None
    stream.wait_event(event.event.completion if isinstance(stream, torch.cuda.Stream) else event)


def is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


# While a peer is stopped ---------------------------------------------------------------------------------------------


def start_calls(buffer: deep_ep.Buffer, recv_x: torch.Tensor, handle: tuple, order: tuple[str, ...]) -> list[tuple]:
    results = []
    for operation in order:
        if operation == "combine":
            results.append(buffer.combine(recv_x, handle, async_finish=True))
        else:
            x = torch.full((TOKENS, HIDDEN), 10.0 * (buffer.rank + 1))
            results.append(buffer.dispatch(x, handle=handle, async_finish=True))
    return results


def compute() -> float:
    a = torch.ones(300, 300)
    return float((a @ a).sum())


def beside_a_stopped_peer(rank: int, num_ranks: int, stopped: int, order: tuple[str, ...]) -> dict[str, Any]:
    awake = [other for other in range(num_ranks) if other != stopped]
    group = dist.new_group(awake)
    buffer = make_buffer()
    recv_x, _, _, _, handle, _ = full_dispatch(buffer)
    compute()  # a GPU loads a kernel when it is first used, and for that waits until those that run have ended
    for result in start_calls(buffer, recv_x, handle, order):
        result[-1].current_stream_wait()
    pids: list[Any] = [None] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    if rank == stopped:
        os.kill(os.getpid(), signal.SIGSTOP)
    else:
        assert eventually(lambda: is_stopped(pids[stopped]))
    begin = time.monotonic()
    results = start_calls(buffer, recv_x, handle, order)
    seen: dict[str, Any] = {}
    if rank != stopped:
        seen["matmul"] = compute()
        time.sleep(0.2)
        seen["complete"] = [is_done(result[-1]) for result in results]
        seen["is_stopped"] = is_stopped(pids[stopped])
        seen["secs"] = time.monotonic() - begin
        dist.barrier(group)
    if rank == awake[0]:
        os.kill(pids[stopped], signal.SIGCONT)
    for result in reversed(results):
        result[-1].current_stream_wait()
    seen["right"] = [
        torch.equal(result[0], ((rank + 1.0) * num_copies(handle)).expand(TOKENS, HIDDEN))
        if operation == "combine"
        else torch.equal(result[0], 10 * sources(handle, rank).expand(-1, HIDDEN))
        for operation, result in zip(order, results, strict=True)
    ]
    seen["complete_after"] = [is_done(result[-1]) for result in results]
    buffer.destroy()
    return seen


@pytest.mark.parametrize("order", [("dispatch",), ("combine",), ("dispatch", "combine", "dispatch")])
@pytest.mark.parametrize(("num_ranks", "stopped"), [(2, 1), (3, 0)])
@pytest.mark.alone
def test_calls_return_while_a_peer_is_stopped(
    device: str, num_ranks: int, stopped: int, order: tuple[str, ...]
) -> None:
    for rank, seen in enumerate(run_ranks(beside_a_stopped_peer, num_ranks, stopped, order)):
        assert seen["right"] == [True] * len(order)
        assert seen["complete_after"] == [True] * len(order)
        if rank != stopped:
            assert seen["complete"] == [False] * len(order), "an event was complete before the rows had moved"
            assert seen["is_stopped"]
            assert seen["matmul"] == 300.0**3
            assert seen["secs"] < PATIENCE_SECS


# What goes wrong on the comm stream ----------------------------------------------------------------------------------


class Broken(Exception):
    pass


def broken_job(rank: int, num_ranks: int, operation: str, point: str) -> dict[str, tuple[str, str]]:
    buffer = make_buffer()
    recv_x, _, _, _, handle, _ = full_dispatch(buffer)

    def fault(reached: str) -> None:
        if reached == point:
            raise Broken("a wire came off")

    dist.barrier()  # who is still in the call before would hear of the failure there
    if rank == 1:
        buffer.set_fault_hook(fault)
    if operation == "combine":
        event = buffer.combine(recv_x, handle, async_finish=True)[-1]
    elif operation == "full dispatch":
        event = full_dispatch(buffer, async_finish=True)[-1]
    else:
        event = buffer.dispatch(torch.zeros(TOKENS, HIDDEN), handle=handle, async_finish=True)[-1]
    seen = {"wait": error_of(event.current_stream_wait)}
    seen["wait again"] = error_of(event.current_stream_wait)
    with pytest.raises(Exception, match="a wire came off"), event:
        pass
    buffer.get_comm_stream().synchronize()  # does not care
    seen["next"] = error_of(lambda: full_dispatch(buffer))
    seen["next combine"] = error_of(lambda: buffer.combine(recv_x, handle, async_finish=True))
    assert torch.equal(recv_x, sources(handle, rank).expand(-1, HIDDEN)), "what came before is unharmed"
    buffer.destroy()
    seen["destroyed"] = error_of(lambda: full_dispatch(buffer))
    dist.barrier()
    fresh = make_buffer()
    full_dispatch(fresh)
    fresh.destroy()
    return seen


@pytest.mark.parametrize(
    ("operation", "point"),
    [
        ("combine", "combine: before ready"),
        ("combine", "combine: before taken"),
        ("cached dispatch", "cached dispatch: before offered"),
        ("cached dispatch", "cached dispatch: before ready"),
        ("full dispatch", "dispatch: before ready"),
    ],
)
@pytest.mark.cpu_only
def test_what_a_job_raises_comes_out_at_the_wait_and_at_the_next_call(device: str, operation: str, point: str) -> None:
    for rank, seen in enumerate(run_ranks(broken_job, 3, operation, point, env=NOTHING_POSTED)):
        expected = ("Broken", "a wire came off") if rank == 1 else None
        assert expected is None or seen["wait"] == expected
        if expected is None:
            assert seen["wait"][0] == "EPPeerFailed"
            assert "rank 1 failed" in seen["wait"][1] or "failed: " in seen["wait"][1]
            assert "Broken: a wire came off" in seen["wait"][1]
        assert seen["wait again"] == seen["wait"]
        for name in ("next", "next combine"):
            assert seen[name][0] == "EPClosed"
            assert "Broken: a wire came off" in seen[name][1]
        assert seen["destroyed"][0] == "EPClosed"


def unwaited(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    """Nobody waits for a job that fails, nor for those queued behind it."""
    buffer = make_buffer()
    recv_x, _, _, _, handle, _ = full_dispatch(buffer)

    def fault(reached: str) -> None:
        raise Broken("a wire came off")

    dist.barrier()
    if rank == 0:
        buffer.set_fault_hook(fault)
    events = []
    for _ in range(3):
        try:
            events.append(buffer.combine(recv_x, handle, async_finish=True)[-1])
        except deep_ep.EPClosed:  # the first has failed by now
            break
    assert eventually(lambda: all(is_done(event) for event in events))
    errors = [error_of(lambda: buffer.dispatch(torch.zeros(TOKENS, HIDDEN), handle=handle))]
    errors += [error_of(event.current_stream_wait) for event in events]
    buffer.destroy()
    return errors


@pytest.mark.cpu_only
def test_a_failure_that_nobody_waited_for_comes_out_at_the_next_call(device: str) -> None:
    results = run_ranks(unwaited, 2)
    for rank, (following, first, *queued) in enumerate(results):
        assert following[0] == "EPClosed"
        assert first[0] == ("Broken" if rank == 0 else "EPPeerFailed")
        assert all(kind == "EPClosed" for kind, _ in queued)
        assert all("a wire came off" in text for _, text in results[rank])


# Beside the caller ---------------------------------------------------------------------------------------------------


def busy(rank: int, num_ranks: int) -> tuple[float, bool]:
    """The caller never leaves Python, and never sleeps, until its calls are done."""
    buffer = make_buffer()
    _, _, _, _, handle, _ = full_dispatch(buffer)
    results, begin = [], time.monotonic()
    for _ in range(5):
        recv_x, *_, event = buffer.dispatch(torch.full((TOKENS, HIDDEN), rank + 1.0), handle=handle, async_finish=True)
        results.append(buffer.combine(recv_x, handle, previous_event=event, async_finish=True))
    while not is_done(results[-1][-1]) and time.monotonic() - begin < PATIENCE_SECS:
        for _ in range(10_000):
            pass
    secs = time.monotonic() - begin
    expected = ((rank + 1.0) * num_copies(handle)).expand(TOKENS, HIDDEN)
    right = all(is_done(result[-1]) and torch.equal(result[0], expected) for result in results)
    buffer.destroy()
    return secs, right


@pytest.mark.alone
def test_a_busy_caller_does_not_keep_communication_from_finishing(device: str) -> None:
    for secs, right in run_ranks(busy, 2):
        assert secs < PATIENCE_SECS
        assert right


def intervals(rank: int, num_ranks: int) -> list[tuple[str, float, float]]:
    """What `sys.getswitchinterval()` is, and what it should be, after calls of each kind."""
    first, second = make_buffer(), make_buffer()
    seen = []
    for usual in (5e-3, 2e-3, 5e-5):
        sys.setswitchinterval(usual)
        recv_x, _, _, _, handle, _ = full_dispatch(first)
        seen.append(("full dispatch", sys.getswitchinterval(), usual))
        first.combine(recv_x, handle)
        seen.append(("combine", sys.getswitchinterval(), usual))
        events = []
        for _ in range(5):
            for buffer in (first, second):  # two comm threads at once
                events.append(buffer.dispatch(torch.zeros(TOKENS, HIDDEN), handle=handle, async_finish=True)[-1])
        for event in events:
            event.current_stream_wait()
        seen.append(("asynchronous", sys.getswitchinterval(), usual))
        kind, _ = error_of(lambda: first.dispatch(torch.zeros(TOKENS + 1, HIDDEN), handle=handle))  # noqa: B023
        assert kind == "ValueError"
        seen.append(("wrong argument", sys.getswitchinterval(), usual))

    def fault(reached: str) -> None:
        raise Broken("a wire came off")

    dist.barrier()
    first.set_fault_hook(fault)
    assert error_of(lambda: full_dispatch(first))[0] in ("Broken", "EPPeerFailed")
    seen.append(("failure", sys.getswitchinterval(), usual))
    first.destroy()
    second.destroy()
    seen.append(("destroy", sys.getswitchinterval(), usual))
    return seen


@pytest.mark.cpu_only
def test_the_switch_interval_is_what_it_was(device: str) -> None:
    for seen in run_ranks(intervals, 2):
        for when, found, usual in seen:
            # Python keeps whole microseconds and rounds down: reading and setting a value can cost one.
            assert abs(found - usual) < 2.5e-6, f"after {when}: {found}, not {usual}"


# Many calls, buffers and threads -------------------------------------------------------------------------------------


def queue_many(rank: int, num_ranks: int) -> list[bool]:
    """Inputs and handles may be forgotten at once; results are waited for from the last to the first."""
    buffer = make_buffer()
    *_, handle, _ = full_dispatch(buffer)
    copies, from_whom = num_copies(handle), sources(handle, rank)
    results = []
    for index in range(50):
        if index % 2 == 0:
            x = torch.full((TOKENS, HIDDEN), 100.0 * index + rank + 1)
            results.append(buffer.dispatch(x, handle=handle, async_finish=True))
        else:
            rows = torch.full((len(from_whom), HIDDEN), float(index))
            results.append(buffer.combine(rows, handle, async_finish=True))
            del rows
    right = []
    for index, result in reversed(list(enumerate(results))):
        result[-1].current_stream_wait()
        expected = 100 * index + from_whom if index % 2 == 0 else index * copies
        right.append(torch.equal(result[0], expected.expand(-1, HIDDEN)))
    buffer.destroy()
    return right


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_fifty_queued_calls_waited_for_in_reverse(device: str, num_ranks: int) -> None:
    assert run_ranks(queue_many, num_ranks) == [[True] * 50] * num_ranks


def two_buffers(rank: int, num_ranks: int) -> list[bool]:
    buffers = [make_buffer(), make_buffer()]
    handles = [full_dispatch(buffer, seed)[4] for seed, buffer in enumerate(buffers)]
    assert not torch.equal(handles[0][4], handles[1][4])
    right = []
    for index in range(15):
        sent = []
        for which, buffer in enumerate(buffers):
            x = torch.full((TOKENS, HIDDEN), 10.0 * index + which + 1)
            recv_x, *_, event = buffer.dispatch(x, handle=handles[which], async_finish=True)
            sent.append((recv_x, event))
        # Each waits, on its comm stream, for the dispatch of the *other* buffer too.
        returned = []
        for which, buffer in enumerate(buffers):
            recv_x, event = sent[which]
            wait_on(buffer.get_comm_stream(), sent[1 - which][1])
            returned.append(buffer.combine(recv_x, handles[which], previous_event=event, async_finish=True))
        for which in (1, 0):
            sums, _, event = returned[which]
            event.current_stream_wait()
            right.append(torch.equal(sums, ((10.0 * index + which + 1) * num_copies(handles[which])).expand_as(sums)))
        # A synchronous call on one, while the other's is under way.
        event = buffers[0].dispatch(torch.zeros(TOKENS, HIDDEN), handle=handles[0], async_finish=True)[-1]
        again = buffers[1].dispatch(torch.full((TOKENS, HIDDEN), rank + 1.0), handle=handles[1])[0]
        right.append(torch.equal(again, sources(handles[1], rank).expand(-1, HIDDEN)))
        event.current_stream_wait()
    for buffer in buffers:
        buffer.destroy()
    return right


def test_two_buffers_used_by_turns(device: str) -> None:
    assert run_ranks(two_buffers, 3) == [[True] * 45] * 3


class Exchange(torch.autograd.Function):
    """Dispatch; its gradient is combine, which autograd calls from whatever thread it likes."""

    threads: ClassVar[list[int]] = []

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, buffer: deep_ep.Buffer, handle: tuple) -> torch.Tensor:
        ctx.buffer, ctx.handle = buffer, handle
        return buffer.dispatch(x, handle=handle)[0].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # type: ignore[override]
        Exchange.threads.append(threading.get_ident())
        combined, _, event = ctx.buffer.combine(gradient.contiguous(), ctx.handle, async_finish=True)
        event.current_stream_wait()
        return combined, None, None


def other_threads(rank: int, num_ranks: int) -> list[bool]:
    buffer = make_buffer()
    *_, handle, _ = full_dispatch(buffer)
    right, problems = [], []

    def backward(loss: torch.Tensor) -> None:
        try:
            loss.backward()
        except BaseException as error:
            problems.append(error)

    for index in range(10):
        x = torch.full((TOKENS, HIDDEN), rank + 1.0, requires_grad=True)
        rows = Exchange.apply(x, buffer, handle)
        right.append(torch.equal(rows.detach(), sources(handle, rank).expand(-1, HIDDEN)))
        thread = threading.Thread(target=backward, args=((index * rows).sum(),))
        thread.start()
        thread.join(PATIENCE_SECS)
        assert not thread.is_alive()
        assert not problems, problems
        assert x.grad is not None
        right.append(torch.equal(x.grad, (index * num_copies(handle)).expand_as(x)))
    assert threading.get_ident() not in Exchange.threads
    assert len(Exchange.threads) == 10
    buffer.destroy()
    return right


def test_gradients_are_exchanged_from_other_threads(device: str) -> None:
    assert run_ranks(other_threads, 3) == [[True] * 20] * 3


def handed_over(rank: int, num_ranks: int) -> list[bool]:
    """A thread queues calls, another waits for them; the buffer is destroyed by a third."""
    buffer = make_buffer()
    *_, handle, _ = full_dispatch(buffer)
    expected = sources(handle, rank).expand(-1, HIDDEN)
    results: list[tuple] = []

    def send() -> None:
        for index in range(10):
            x = torch.full((TOKENS, HIDDEN), 10.0 * index + rank + 1, device=buffer.device)
            results.append(buffer.dispatch(x, handle=handle, async_finish=True))

    right: list[bool] = []

    def receive() -> None:
        for index, (recv_x, *_, event) in enumerate(results):
            event.current_stream_wait()
            right.append(torch.equal(recv_x, 10 * index + expected))

    for work in (send, receive, buffer.destroy):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join(PATIENCE_SECS)
        assert not thread.is_alive()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("deep_ep-comm")]
    return right


def test_threads_hand_a_buffer_over(device: str) -> None:
    assert run_ranks(handed_over, 2) == [[True] * 10] * 2
