"""Calls that their caller leaves by an exception (Ctrl-C, a watchdog), at any point: they end, or the buffer fails."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from concurrent.futures import Future
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
