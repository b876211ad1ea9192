"""Calls that their caller leaves by an exception (Ctrl-C, a watchdog), at any point: they end, or the buffer fails."""

from __future__ import annotations

import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import FrameType
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import NOTHING_POSTED, run_ranks
from deep_ep.event import EventHandle

pytestmark = pytest.mark.cpu_only  # calls that wait behind others, on the thread of the comm stream

TOKENS, HIDDEN = 64, 32
NODES = {"DEEP_EP_RANKS_PER_NODE": "1"}


class Kit:
    """A buffer, and calls whose rows say which call of which rank they are of."""

    def __init__(self, rank: int, num_ranks: int):
        num_bytes = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, 128, num_ranks, num_ranks)
        self.buffer = deep_ep.Buffer(
            dist.group.WORLD, 1 << 20, num_bytes, True, explicitly_destroy=True, num_cpu_timeout_secs=20
        )
        self.rank, self.num_ranks = rank, num_ranks
        self.ids = torch.arange(TOKENS).view(-1, 1) % num_ranks
        self.weights = torch.ones(TOKENS, 1)
        per_rank, per_node, per_expert, mask, _ = self.buffer.get_dispatch_layout(self.ids, num_ranks)
        self.layout = (per_rank, per_node, mask, per_expert, self.ids, self.weights)

    def x(self, number: int) -> torch.Tensor:
        return torch.full((TOKENS, HIDDEN), float(10 * number + self.rank))

    def dispatch(self, number: int, **more: Any) -> tuple:
        return self.buffer.dispatch(self.x(number), None, *self.layout, **more)

    def is_right(self, rows: torch.Tensor, number: int) -> bool:
        """Whether rows are those of a dispatch: from each rank as many."""
        sent = torch.arange(self.num_ranks).repeat_interleave(len(rows) // self.num_ranks) + 10.0 * number
        return torch.equal(rows, sent.view(-1, 1).expand_as(rows))


def attempt(work: Any) -> str:
    try:
        work()
    except KeyboardInterrupt:
        return "KeyboardInterrupt"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "none"


def interrupt_soon() -> None:
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()


def behind_a_queued_call(rank: int, num_ranks: int, name: str) -> list[str]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kit = Kit(rank, num_ranks)
    kept = [kit.dispatch(number) for number in (1, 2)]
    rows, handle = kept[0][0], kept[0][4]
    work = {
        "dispatch": lambda: kit.dispatch(3),
        "worst case": lambda: kit.dispatch(3, num_worst_tokens=TOKENS * num_ranks),
        "cached": lambda: kit.buffer.dispatch(kit.x(3), handle),
        "combine": lambda: kit.buffer.combine(rows, handle),
    }[name]
    copies = [one[0].clone() for one in kept]
    dist.barrier()
    said = []
    if rank == 0:
        gate: Future = Future()
        event = kit.buffer.combine(rows, handle, async_finish=True, previous_event=EventHandle(gate))[2]
        interrupt_soon()
        said.append(attempt(work))
        gate.set_result(None)
        said.append(attempt(event.current_stream_wait))  # it was queued before, and is whole
        dist.barrier()  # it makes the call when its peer has given up
    else:
        said.append(attempt(lambda: kit.buffer.combine(rows, handle)))
        said.append(attempt(work))
        dist.barrier()
    said.append(attempt(work))
    assert all(torch.equal(one[0], copy) for one, copy in zip(kept, copies, strict=True)), "a kept result has changed"
    kit.buffer.destroy()
    return said


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("dispatch", {}),
        ("dispatch", NOTHING_POSTED),
        ("dispatch", NODES),
        ("worst case", NOTHING_POSTED),
        ("cached", {}),
        ("combine", NODES),
    ],
)
def test_a_call_that_is_left_before_it_began_never_begins(name: str, env: dict) -> None:
    one, other = run_ranks(behind_a_queued_call, 2, name, env=env)
    assert one[:2] == ["KeyboardInterrupt", "none"]
    assert other[0] == "none", "the call before is whole"
    for said in (one[2], other[1]):
        assert said.startswith("EPPeerFailed")
        assert "rank 0 refused this call, of which nothing was sent: KeyboardInterrupt" in said
    assert other[2].startswith("EPClosed")


def in_the_middle(rank: int, num_ranks: int, name: str, is_queued: bool) -> list[str]:
    """Rank 0 is interrupted while it waits for rank 1, which comes late."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    kit = Kit(rank, num_ranks)
    x = torch.ones(TOKENS, 128, dtype=torch.bfloat16)
    kept = kit.dispatch(1)
    hook = None
    if name == "hook":
        *_, hook = (
            kit.buffer.low_latency_dispatch(x, kit.ids, TOKENS, num_ranks, use_fp8=False, return_recv_hook=True)
            if rank == 0
            else (None,)
        )
    work = {
        "dispatch": lambda: kit.dispatch(2),
        "combine": lambda: kit.buffer.combine(kept[0], kept[4]),
        "low latency": lambda: kit.buffer.low_latency_dispatch(x, kit.ids, TOKENS, num_ranks, use_fp8=False),
        "hook": lambda: hook(),
    }[name]
    dist.barrier()
    said = []
    if rank == 0:
        gate: Future = Future()
        if is_queued:  # so that the work is done on the other thread
            threading.Timer(0.1, gate.set_result, (None,)).start()
            kit.buffer.get_comm_stream().wait_event(EventHandle(gate))
        interrupt_soon()
        said.append(attempt(work))
        dist.barrier()
    else:
        dist.barrier()
        work = (lambda: kit.buffer.low_latency_dispatch(x, kit.ids, TOKENS, num_ranks)) if name == "hook" else work
    said.append(attempt(work))
    if rank == 1 and name == "low latency" and said[0] == "none":
        # Rank 0 had sent all of its part when it was interrupted: for this rank the call is whole, and the next is not.
        said = [attempt(work)]
    kit.buffer.destroy()
    return said


@pytest.mark.parametrize(
    ("name", "is_queued", "env"),
    [
        ("dispatch", False, NOTHING_POSTED),
        ("dispatch", True, {}),
        ("dispatch", True, NODES),
        ("combine", True, NOTHING_POSTED),
        ("low latency", False, {}),
        ("low latency", True, NODES),
        ("hook", False, {}),
        ("hook", True, {}),
    ],
)
def test_a_call_that_is_left_in_the_middle_fails_on_all_ranks(name: str, is_queued: bool, env: dict) -> None:
    one, other = run_ranks(in_the_middle, 2, name, is_queued, env=env)
    assert one[0] == "KeyboardInterrupt"
    assert one[1].startswith("EPClosed")
    assert "KeyboardInterrupt" in one[1]
    assert other[0].startswith("EPPeerFailed")
    assert "rank 0 failed: " in other[0]
    assert "KeyboardInterrupt" in other[0]


def at_any_moment(rank: int, num_ranks: int, seed: int, num_rounds: int) -> None:
    """A timer interrupts rank 0 after a random time, wherever it is."""
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    generator = random.Random(seed)
    for _ in range(num_rounds):
        kit, kept, count = Kit(rank, num_ranks), [], 0
        dist.barrier()
        delay = generator.uniform(2e-4, 0.05)
        try:
            if rank == 0:
                signal.setitimer(signal.ITIMER_REAL, delay)
            while count < 400:
                count += 1
                rows, _, _, _, handle, event = kit.dispatch(count, async_finish=count % 2 == 0)
                combined, _, _ = kit.buffer.combine(rows, handle, previous_event=event if count % 2 == 0 else None)
                if not kit.is_right(rows, count) or not torch.equal(combined, kit.x(count)):
                    raise AssertionError(f"call {count} is wrong")
                kept = [*kept[-3:], (rows, rows.clone())]
        except KeyboardInterrupt:
            said = attempt(lambda: kit.dispatch(count))  # noqa: B023
            # It may have come between two calls: then this is not the one that the peer makes.
            assert said == "none" or said.startswith(("EPClosed", "EPPeerFailed")) or "the same call" in said, said
        except deep_ep.EPError:
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        assert all(torch.equal(rows, copy) for rows, copy in kept), "a kept result has changed"
        kit.buffer.destroy()
        dist.barrier()


@pytest.mark.parametrize("env", [{}, NOTHING_POSTED, NODES], ids=["posted", "put", "nodes"])
def test_whenever_an_interrupt_comes_no_result_is_wrong(env: dict) -> None:
    begin = time.monotonic()
    run_ranks(at_any_moment, 2, 7, 15, env=env)
    assert time.monotonic() - begin < 100  # no wait has come to its limit of 20 s, let alone several


SCRIPTS = ("engine/cpu/scope.py", "engine/engine.py", "low_latency/engine.py")


class InterruptAt:
    """Inside the block KeyboardInterrupt is raised as the n-th function of `SCRIPTS` is entered.

    That is where Python delivers signals, beside the ends of loops and of functions in C.
    """

    def __init__(self, num_before: int):
        self._num_left = num_before
        self.where = ""

    def __enter__(self) -> InterruptAt:
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _trace(self, frame: FrameType, event: str, _arg: object) -> None:
        if event != "call" or not frame.f_code.co_filename.endswith(SCRIPTS):
            return
        self._num_left -= 1
        if self._num_left < 0:
            self.where = frame.f_code.co_name
            sys.settrace(None)
            raise KeyboardInterrupt


def low_latency_rows(kit: Kit, number: int, **more: Any) -> tuple:
    """A dispatch whose rows say which call of which rank they are of."""
    x = torch.full((TOKENS, 128), float(10 * number + kit.rank), dtype=torch.bfloat16)
    return kit.buffer.low_latency_dispatch(x, kit.ids, TOKENS, kit.num_ranks, use_fp8=False, **more)


def check_low_latency(kit: Kit, number: int, result: tuple) -> None:
    if result[4] is not None:
        result[4]()
    rows, counts = result[0][0], int(result[1][0])
    assert counts == TOKENS, f"{counts} rows of call {number}"
    assert kit.is_right(rows[:counts].float(), number), f"call {number} is wrong"


def check_rows(kit: Kit, number: int, result: tuple) -> None:
    assert kit.is_right(result[0], number), f"call {number} is wrong"


def check_sums(kit: Kit, number: int, result: tuple) -> None:
    assert torch.equal(result[0], kit.x(number)), f"call {number} is wrong"


def hooked(kit: Kit, number: int, kept: Any) -> tuple:
    kept[0][4]()
    return (*kept[0][:4], None)


# What is made before, the call that is interrupted, and how its result is checked.
Made = tuple[Callable[..., Any], Callable[..., Any], Callable[..., None]]
CALLS: dict[str, Made] = {
    "dispatch": (lambda _kit, _number: None, lambda kit, number, _kept: kit.dispatch(number), check_rows),
    "combine": (
        lambda kit, number: kit.dispatch(number),
        lambda kit, _number, kept: kit.buffer.combine(kept[0], kept[4]),
        check_sums,
    ),
    "low latency": (
        lambda _kit, _number: None,
        lambda kit, number, _kept: low_latency_rows(kit, number),
        check_low_latency,
    ),
    "low latency, send": (
        lambda _kit, _number: None,
        lambda kit, number, _kept: low_latency_rows(kit, number, return_recv_hook=True),
        check_low_latency,
    ),
    "hook": (
        lambda kit, number: [low_latency_rows(kit, number, return_recv_hook=True)],
        hooked,
        check_low_latency,
    ),
}


def at_every_step(rank: int, num_ranks: int, name: str) -> list[tuple[str, str]]:
    """Rank 1 is interrupted, catches it, and makes the call again. Returns where, and what it then got."""
    before, make, check = CALLS[name]
    found = []
    for step in range(100):
        kit, number = Kit(rank, num_ranks), 9
        for earlier in range(1, number):  # so that every place for posts and rows holds something old
            check_low_latency(kit, earlier, low_latency_rows(kit, earlier))
            kit.dispatch(earlier)
        kept = before(kit, number)
        dist.barrier()
        said, interrupt = "none", InterruptAt(step if rank == 1 else sys.maxsize)
        try:
            try:
                with interrupt:
                    result = make(kit, number, kept)
            except KeyboardInterrupt:
                result = make(kit, number, kept)
            check(kit, number, result)
        except deep_ep.EPError as error:
            said = f"{type(error).__name__}: {error}"
        kit.buffer.destroy()  # a rank that has made the call twice is told that this one does not
        wheres: list[Any] = [None] * num_ranks
        dist.all_gather_object(wheres, interrupt.where)
        if not wheres[1]:
            return found
        found.append((wheres[1], said))
    raise AssertionError("the call never ends")


@pytest.mark.parametrize(
    ("name", "env"),
    [
        ("dispatch", NOTHING_POSTED),
        ("combine", NOTHING_POSTED),
        pytest.param("dispatch", NODES, marks=pytest.mark.exhaustive),
        pytest.param("low latency", {}, marks=pytest.mark.exhaustive),
        ("low latency, send", {}),
        ("low latency, send", NODES),
        ("hook", {}),
    ],
)
def test_an_interrupt_at_any_step_of_a_scope_leaves_no_half_call(name: str, env: dict) -> None:
    found, _ = run_ranks(at_every_step, 2, name, env=env)
    assert {"__enter__", "__exit__"} <= {where for where, _ in found}
    for where, said in found:
        # It has ended, or was not begun: then it was made again. Or all ranks are told at once, not at the limit.
        assert said == "none" or (said.startswith("EP") and "rank 1" in said), (where, said)
        assert not said.startswith("EPTimeout"), (where, said)


def interrupted_at_the_lock(rank: int, num_ranks: int) -> str:
    """Rank 1 is interrupted where it waits for a call that another thread of it makes, for which rank 0 is late."""
    kit = Kit(rank, num_ranks)
    dist.barrier()
    if rank == 0:
        time.sleep(1)
        kit.dispatch(1)
        told = attempt(lambda: kit.dispatch(2))
        dist.barrier()
        return told
    other = threading.Thread(target=kit.dispatch, args=(1,))
    other.start()
    time.sleep(0.2)

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    seen = attempt(lambda: kit.dispatch(2))
    other.join()
    dist.barrier()
    return seen


def test_an_interrupt_behind_a_call_of_another_thread_is_reported() -> None:
    told, seen = run_ranks(interrupted_at_the_lock, 2)
    assert seen == "KeyboardInterrupt"
    assert "rank 1 refused this call" in told, "not named at the limit"
