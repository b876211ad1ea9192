"""Forked children of a rank: its buffers refuse to work there, its tensors stay readable, and no peer notices."""

from __future__ import annotations

import atexit
import gc
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lifetime import (
    HIDDEN,
    INTERPRETED,
    INTERPRETED_NODES,
    MAX_TOKENS,
    NODES,
    ONE_NODE,
    arguments,
    in_a_child,
    low_latency_arguments,
    make_buffer,
    round_trip,
    values,
)

import deep_ep
from common import OneRank, error_of, run_ranks
from deep_ep import reaper

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("device")]

PLACES = {"one node": ONE_NODE, "nodes": NODES}
INTERPRETERS = {"interpreted": INTERPRETED, "interpreted nodes": INTERPRETED_NODES}
EVERYWHERE = {**PLACES, **INTERPRETERS}

REFUSAL = "only the process that made it can use a buffer"
NOTICED_SECS = 10.0


# Every method refuses ------------------------------------------------------------------------------------------------


def calls_of(buffer: deep_ep.Buffer, args: dict[str, Any], recv_x: torch.Tensor, handle: tuple) -> dict[str, Any]:
    """A right call of every method, by name."""
    low_latency = low_latency_arguments(buffer.rank, buffer.group_size)
    topk_idx, size = torch.arange(buffer.group_size).repeat(MAX_TOKENS, 1), buffer.group_size
    return {
        "get_dispatch_layout": lambda: buffer.get_dispatch_layout(topk_idx, size),
        "dispatch": lambda: buffer.dispatch(**args),
        "cached dispatch": lambda: buffer.dispatch(args["x"], handle=handle),
        "asynchronous dispatch": lambda: buffer.dispatch(args["x"], handle=handle, async_finish=True),
        "combine": lambda: buffer.combine(recv_x, handle),
        "get_combine_buffer": lambda: buffer.get_combine_buffer(handle),
        "get_local_buffer_tensor": lambda: buffer.get_local_buffer_tensor(torch.uint8),
        "get_comm_stream": buffer.get_comm_stream,
        "record_stream": lambda: buffer.record_stream(recv_x, None),  # type: ignore[arg-type]
        "check": buffer.check,
        "release_graphs": buffer.release_graphs,
        "trim": buffer.trim,
        "stats": buffer.stats,
        "low_latency_dispatch": lambda: buffer.low_latency_dispatch(**low_latency),
        "clean_low_latency_buffer": lambda: buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, size),
        "destroy": buffer.destroy,
    }


def refuse(rank: int, num_ranks: int) -> None:
    buffer = make_buffer(num_ranks, low_latency=True)
    args = arguments(buffer, rank + 1.0)
    recv_x, _, _, _, handle, _ = buffer.dispatch(**args)
    buffer.dispatch(args["x"], handle=handle, async_finish=True)[-1].current_stream_wait()  # where there are threads
    calls = calls_of(buffer, args, recv_x, handle)
    before = os.getpid()

    def call_everything() -> str:
        errors = {name: error_of(call) for name, call in calls.items()}
        return json.dumps({**errors, "pid": [str(before), str(os.getpid())]})

    answer = in_a_child(call_everything)
    errors = json.loads(answer)
    parent, child = errors.pop("pid")
    assert set(errors) == set(calls)
    for name, (kind, text) in errors.items():
        assert kind == "EPClosed", f"{name}: {kind}: {text}"
        assert REFUSAL in text, name
        assert f"process {child} is a fork of that process ({parent}, rank {rank}/{num_ranks})" in text
        assert "'spawn' or 'forkserver'" in text
    grandchild = in_a_child(lambda: in_a_child(lambda: error_of(calls["dispatch"])))
    assert REFUSAL in grandchild
    dist.barrier()
    round_trip(buffer)
    assert buffer.stats()["calls"]
    dist.barrier()
    buffer.destroy()


@pytest.mark.parametrize("where", EVERYWHERE)
def test_every_method_refuses_and_nothing_is_sent(where: str) -> None:
    run_ranks(refuse, 2, env=EVERYWHERE[where])


def fork_beside_a_call(rank: int, num_ranks: int) -> str:
    """Rank 0 forks while one of its threads is in a call, holds the buffer's lock, and waits for rank 1."""
    buffer = make_buffer(num_ranks)
    args = arguments(buffer, rank + 1.0)
    dist.barrier()
    if rank == 1:
        dist.barrier()
        round_trip(buffer)
        return ""
    caller = threading.Thread(target=round_trip, args=(buffer,))
    caller.start()
    time.sleep(0.2)
    answer = in_a_child(lambda: (error_of(buffer.dispatch, **args), error_of(buffer.destroy), own_round_trip()))
    dist.barrier()
    caller.join()
    return answer


def own_round_trip() -> str:
    """A buffer that a forked child makes itself works, and is closed when it is forgotten."""
    buffer = deep_ep.Buffer(None, comm=OneRank(), device="cpu")
    args = arguments(buffer, 5.0)
    recv_x, _, _, _, handle, _ = buffer.dispatch(**args)
    again = buffer.dispatch(args["x"], handle=handle, async_finish=True)
    again[-1].current_stream_wait()
    switch_secs = sys.getswitchinterval()
    assert switch_secs > 1e-3, f"threads of the parent's jobs are waited for: {switch_secs}"
    return f"received {values(recv_x)} and {values(again[0])}"  # type: ignore[arg-type]


@pytest.mark.parametrize("where", PLACES)
def test_locks_that_were_held_at_the_fork_are_not_waited_for(where: str) -> None:
    answer = run_ranks(fork_beside_a_call, 2, env=PLACES[where])[0]
    assert answer.count(REFUSAL) == 2, answer
    assert "received [5.0] and [5.0]" in answer


# Hooks, events and streams -------------------------------------------------------------------------------------------


def call_a_hook(rank: int, num_ranks: int) -> tuple[str, list[float]]:
    buffer = make_buffer(num_ranks, low_latency=True)
    recv_x, count, _, _, hook = buffer.low_latency_dispatch(
        **low_latency_arguments(rank, num_ranks), return_recv_hook=True
    )
    assert hook is not None
    answer = in_a_child(lambda: error_of(hook))
    dist.barrier()
    hook()
    received = values(recv_x[0, : int(count)])  # type: ignore[call-overload]
    dist.barrier()
    buffer.destroy()
    return answer, received


@pytest.mark.parametrize("where", {"one node": 0, "nodes": 0, "interpreted": 0})
def test_receive_hooks_refuse(where: str) -> None:
    for answer, received in run_ranks(call_a_hook, 2, env=EVERYWHERE[where]):
        assert "EPClosed" in answer
        assert REFUSAL in answer
        assert received == [1.0, 2.0]


def wait_for_events(rank: int, num_ranks: int) -> dict[str, str]:
    """Rank 0 forks while a call waits for rank 1 on the comm thread."""
    buffer = make_buffer(num_ranks)
    args = arguments(buffer, rank + 1.0)
    handle = buffer.dispatch(**args)[4]
    stream = buffer.get_comm_stream()
    past = buffer.dispatch(args["x"], handle=handle, async_finish=True)
    past[-1].current_stream_wait()
    if rank == 1:
        dist.barrier()
        buffer.dispatch(args["x"], handle=handle)
        return {}
    pending = buffer.dispatch(args["x"], handle=handle, async_finish=True)
    assert not pending[-1].event.query()  # type: ignore[union-attr]
    answers = {
        "past": in_a_child(lambda: (past[-1].current_stream_wait(), values(past[0]))),  # type: ignore[arg-type]
        "pending": in_a_child(pending[-1].current_stream_wait),
        "context": in_a_child(lambda: leave(pending[-1])),
        "submit": in_a_child(lambda: error_of(stream.submit, len)),  # type: ignore[union-attr]
        "synchronize": in_a_child(lambda: error_of(stream.synchronize)),
        "wait_event": in_a_child(lambda: error_of(stream.wait_event, pending[-1])),  # type: ignore[arg-type]
    }
    dist.barrier()
    pending[-1].current_stream_wait()
    answers["parent"] = str(values(pending[0]))  # type: ignore[arg-type]
    return answers


def leave(event: deep_ep.EventOverlap) -> None:
    with event:
        pass


@pytest.mark.parametrize("where", PLACES)
def test_nothing_waits_for_a_thread_that_is_not_there(where: str) -> None:
    answers = run_ranks(wait_for_events, 2, env=PLACES[where])[0]
    assert answers.pop("past") == "(None, [1.0, 2.0])"
    assert answers.pop("parent") == "[1.0, 2.0]"
    for name in ("pending", "context"):
        assert answers.pop(name).startswith("EPClosed: EventOverlap: the call had not completed when"), answers
    for name, answer in answers.items():
        assert "EPClosed" in answer, name
        assert REFUSAL in answer, name


# Tensors -------------------------------------------------------------------------------------------------------------


def read_and_write(recv_x: torch.Tensor) -> list[list[float]]:
    before = values(recv_x)
    recv_x.fill_(-1)
    return [before, values(recv_x)]


def received_tensors(rank: int, num_ranks: int) -> list[float]:
    buffer = make_buffer(num_ranks)
    args = arguments(buffer, rank + 1.0)
    recv_x, _, _, _, handle, _ = buffer.dispatch(**args)
    assert isinstance(recv_x, torch.Tensor)
    written = buffer.get_combine_buffer(handle)
    written.fill_(7)
    expected = "[[1.0, 2.0], [-1.0]]"
    assert in_a_child(lambda: read_and_write(recv_x)) == expected
    assert in_a_child(lambda: read_and_write(written)) == "[[7.0], [-1.0]]"
    assert values(recv_x) == [1.0, 2.0], "what the child writes is its own"
    assert values(written) == [7.0]
    dist.barrier()
    buffer.destroy()
    assert in_a_child(lambda: read_and_write(recv_x)) == expected
    del buffer
    gc.collect()
    assert in_a_child(lambda: read_and_write(recv_x)) == expected, "without a buffer"
    assert in_a_child(lambda: in_a_child(lambda: read_and_write(recv_x))) == expected
    return values(recv_x)


@pytest.mark.parametrize("where", EVERYWHERE)
def test_received_tensors_stay_readable(where: str) -> None:
    assert run_ranks(received_tensors, 2, env=EVERYWHERE[where]) == [[1.0, 2.0]] * 2


# The parent ----------------------------------------------------------------------------------------------------------


def end_of(how: str, held: list[Any]) -> Callable[[], str]:
    """How a child ends that has inherited everything."""

    def collect() -> str:
        held.clear()
        gc.collect()
        return "ended"

    def exit_interpreter() -> str:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        return "ended"

    return {"collects": collect, "exits": exit_interpreter}[how]


def undisturbed(rank: int, num_ranks: int, how: str, folder: str) -> None:
    held: list[Any] = [make_buffer(num_ranks, low_latency=True, explicitly_destroy=False, trace=folder)]
    round_trip(held[0])
    held.append(held[0].low_latency_dispatch(**low_latency_arguments(rank, num_ranks), return_recv_hook=True))
    dist.barrier()
    assert in_a_child(end_of(how, held)) == "ended"
    dist.barrier()
    held[1][-1]()
    for _ in range(2):
        round_trip(held[0])
    dist.barrier()
    held.clear()
    gc.collect()
    reaper.close_all()  # waits for what was handed over


@pytest.mark.parametrize("how", ["collects", "exits"])
@pytest.mark.parametrize("where", PLACES)
def test_a_child_that_ends_disturbs_nobody(where: str, how: str, tmp_path: Path) -> None:
    run_ranks(undisturbed, 2, how, str(tmp_path), env=PLACES[where])
    for path in tmp_path.iterdir():
        events = json.loads(path.read_text())
        names = [event.get("name") for event in events if event["ph"] == "X"]
        assert names.count("combine") == 3, "one slice for each call of the parent"
        assert sum("stats" in event.get("args", {}) for event in events) == 1


def die_before_the_child(rank: int, num_ranks: int, low_latency: bool) -> tuple[str, str, float]:
    """Rank 1 is killed while a child that it forked lives on."""
    buffer = make_buffer(num_ranks, low_latency=low_latency)
    round_trip(buffer)
    dist.barrier()
    if rank == 1:
        if os.fork() == 0:
            os.closerange(0, 3)
            signal.alarm(60)
            time.sleep(30)
            os._exit(0)
        time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)
    begin = time.monotonic()
    if low_latency:
        error = error_of(buffer.low_latency_dispatch, **low_latency_arguments(rank, num_ranks))
    else:
        error = error_of(buffer.dispatch, **arguments(buffer, 1.0))
    return *error, time.monotonic() - begin


@pytest.mark.parametrize("low_latency", [False, True])
@pytest.mark.parametrize("where", PLACES)
def test_a_rank_that_dies_before_its_child_is_noticed(where: str, low_latency: bool) -> None:
    kind, text, secs = run_ranks(die_before_the_child, 2, low_latency, env=PLACES[where], may_die=[1])[0]
    assert kind.startswith("EP"), text
    assert "rank 1" in text
    assert secs < NOTICED_SECS, text


def descriptors(rank: int, num_ranks: int) -> tuple[list[str], list[str]]:
    """What of ours is open in the parent, and which of it in a child."""

    def ours() -> dict[str, str]:
        links = {}
        for fd in os.listdir("/proc/self/fd"):
            try:
                links[fd] = os.readlink(f"/proc/self/fd/{fd}")
            except OSError:
                continue
        return links

    before = ours()
    buffer = make_buffer(num_ranks, low_latency=True)
    round_trip(buffer)
    after = ours()
    mine = {fd: link for fd, link in after.items() if before.get(fd) != link}
    child = json.loads(in_a_child(lambda: json.dumps(ours())))
    kept = sorted({link for fd, link in mine.items() if child.get(fd) == link})
    dist.barrier()
    buffer.destroy()
    return sorted({link.split(":")[0] for link in mine.values()}), kept


@pytest.mark.parametrize("where", PLACES)
def test_a_child_has_no_descriptor_of_a_buffer(where: str) -> None:
    for mine, kept in run_ranks(descriptors, 2, env=PLACES[where]):
        assert ("anon_inode" if where == "one node" else "socket") in mine
        assert kept == []
