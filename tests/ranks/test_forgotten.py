"""Buffers that nobody destroys: their finalizers only hand over, and what peers need of them still happens."""

from __future__ import annotations

import atexit
import gc
import multiprocessing
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from lifetime import (
    INTERPRETED,
    INTERPRETED_NODES,
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


# What a finalizer does -----------------------------------------------------------------------------------------------


def functions_called(work: Callable[[], Any]) -> list[str]:
    """Which functions a piece of code calls on this thread, in Python and in C."""
    called: list[str] = []

    def note(frame: Any, event: str, function: Any) -> None:
        if event == "call":
            called.append(frame.f_code.co_qualname if sys.version_info >= (3, 11) else frame.f_code.co_name)
        elif event == "c_call":
            called.append(function.__name__)

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return called


HANDING_OVER = {
    "finalize.__call__",
    "pop",
    "Closing._hand_over",
    "exc_info",
    "put",
    # The table of buffers forgets it.
    "WeakValueDictionary.__init__.<locals>.remove",
    "_remove_dead_weakref",
    # Where the reaper has closed the buffer before the collection ends, the table of open files forgets them here.
    "WeakSet.__init__.<locals>._remove",
    "discard",
    # And so does this test.
    "finalizers.<locals>.forget",
    "collect",
    "clear",
    "setprofile",
}


def finalizers(rank: int, num_ranks: int, folder: str) -> list[str]:
    """What runs when a buffer, with its trace, is collected."""
    buffers: list[Any] = [make_buffer(num_ranks, low_latency=True, trace=folder)]
    buffer = buffers[0]
    args = arguments(buffer, 1.0)
    handle = buffer.dispatch(**args)[4]
    buffer.dispatch(args["x"], handle=handle, async_finish=True)[-1].current_stream_wait()
    buffer.itself = buffer
    dist.barrier()
    del buffer

    def forget() -> None:
        buffers.clear()
        gc.collect()

    gc.collect()
    gc.disable()
    called = functions_called(forget)
    gc.enable()
    reaper.close_all()  # waits for what was handed over
    return called


@pytest.mark.parametrize("where", {**PLACES, **INTERPRETERS})
def test_a_finalizer_only_hands_over(where: str, tmp_path: Path) -> None:
    env = {**PLACES, **INTERPRETERS}[where]
    for called in run_ranks(finalizers, 2, str(tmp_path), env=env):
        assert "put" in called
        assert set(called) <= HANDING_OVER
    for path in tmp_path.iterdir():
        assert path.read_text().rstrip().endswith("]"), "the trace was closed"
        assert '"stats"' in path.read_text()


# What peers get ------------------------------------------------------------------------------------------------------


def leave_queued(rank: int, num_ranks: int, how: str) -> list[float] | None:
    """Rank 0 queues a call and forgets the buffer; rank 1 comes later."""
    buffer = make_buffer(num_ranks, explicitly_destroy=False)
    args = arguments(buffer, rank + 1.0)
    handle = buffer.dispatch(**args)[4]
    if rank == 0:
        buffer.dispatch(args["x"], handle=handle, async_finish=True)
        if how == "collected":
            del buffer
            gc.collect()
            dist.barrier()
        return None  # or: the process ends
    if how == "collected":
        dist.barrier()
    time.sleep(0.3)
    received = values(buffer.dispatch(args["x"], handle=handle)[0])
    kind, text = error_of(buffer.dispatch, args["x"], handle=handle)
    assert kind == "EPError", text
    assert "rank 0 has destroyed its buffer" in text or "rank 0 (node 0) has destroyed its buffer" in text
    return received


@pytest.mark.parametrize("how", ["collected", "the process ends"])
@pytest.mark.parametrize("where", PLACES)
def test_what_is_queued_is_finished_and_peers_are_told(where: str, how: str) -> None:
    assert run_ranks(leave_queued, 2, how, env=PLACES[where])[1] == [1.0, 2.0]


def leave_half_a_call(rank: int, num_ranks: int) -> list[float] | None:
    """Rank 0 sends a low-latency call, and forgets the buffer before it has received."""
    buffer = make_buffer(num_ranks, low_latency=True, explicitly_destroy=False)
    dist.barrier()
    if rank == 0:
        buffer.low_latency_dispatch(**low_latency_arguments(rank, num_ranks), return_recv_hook=True)
        del buffer
        gc.collect()
        dist.barrier()
        return None
    dist.barrier()
    recv_x, count, *_ = buffer.low_latency_dispatch(**low_latency_arguments(rank, num_ranks))
    return values(recv_x[0, : int(count)])  # type: ignore[call-overload]


@pytest.mark.parametrize("where", PLACES)
def test_what_was_sent_arrives(where: str) -> None:
    assert run_ranks(leave_half_a_call, 2, env=PLACES[where])[1] == [1.0, 2.0]


# Warnings ------------------------------------------------------------------------------------------------------------

MISSED = "destroy() was not called"


def what_is_said(rank: int, num_ranks: int, how: str) -> str:
    return in_a_child(lambda: said_by(ENDINGS[how][0]))


def said_by(work: Callable[[], Any]) -> str:
    """What a piece of code writes to the descriptor of standard error."""
    with tempfile.TemporaryFile("w+") as file:
        os.dup2(file.fileno(), 2)
        sys.stderr = os.fdopen(2, "w", closefd=False)
        warnings.simplefilter("always")
        work()
        sys.stderr.flush()
        file.seek(0)
        return file.read()


def alone() -> deep_ep.Buffer:
    return deep_ep.Buffer(None, comm=OneRank(), explicitly_destroy=True, device="cpu")


def forget() -> None:
    alone()
    reaper.close_all()  # waits for what was handed over


def end() -> None:
    kept = alone()
    atexit._run_exitfuncs()
    del kept


def end_by_exception() -> None:
    kept = alone()
    sys.last_value = ArithmeticError("as the interpreter keeps it")
    atexit._run_exitfuncs()
    del kept


def fail_in_a_process() -> None:
    kept = alone()
    raise ArithmeticError(f"as planned, with {kept}")


def exit_from_a_process(code: int) -> None:
    kept = alone()
    sys.exit(code if kept else 0)


def in_a_process(work: Callable[..., None], *args: Any) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # or it may have no children
    process = multiprocessing.get_context("fork").Process(target=work, args=args)
    process.start()
    process.join()


def fail_in_a_call() -> None:
    buffer = alone()
    buffer.set_fault_hook(_fail)
    assert error_of(buffer.dispatch, **arguments(buffer, 1.0))[0] == "ArithmeticError"
    del buffer
    reaper.close_all()


def _fail(_: str) -> None:
    raise ArithmeticError("as planned")


def destroy() -> None:
    alone().destroy()
    atexit._run_exitfuncs()


ENDINGS: dict[str, tuple[Callable[[], None], bool]] = {
    "forgotten": (forget, True),
    "the interpreter ends": (end, True),
    "the interpreter ends by an exception": (end_by_exception, False),
    "a process ends": (lambda: in_a_process(exit_from_a_process, 0), True),
    "a process ends by an exception": (lambda: in_a_process(fail_in_a_process), False),
    "a process reports a failure": (lambda: in_a_process(exit_from_a_process, 1), False),
    "a call failed": (fail_in_a_call, False),
    "destroyed": (destroy, False),
}


@pytest.mark.parametrize("how", ENDINGS)
def test_who_does_not_destroy_is_warned_but_not_beside_an_error(how: str) -> None:
    (said,) = run_ranks(what_is_said, 1, how)
    assert (MISSED in said) == ENDINGS[how][1], said
    assert "could not be closed" not in said


# Many -----------------------------------------------------------------------------------------------------------------


def forget_many(rank: int, num_ranks: int) -> int:
    """Buffers that come and go, each in a cycle, without a call of `destroy`."""
    num_fds = []
    for _ in range(4):
        buffer: Any = make_buffer(num_ranks, explicitly_destroy=False)
        round_trip(buffer)
        buffer.itself = buffer
        del buffer
        gc.collect()
        reaper.close_all()  # waits for what was handed over
        num_fds.append(len(os.listdir("/proc/self/fd")))
    return num_fds[-1] - num_fds[0]


@pytest.mark.parametrize("where", PLACES)
def test_forgotten_buffers_leave_nothing(where: str) -> None:
    assert max(run_ranks(forget_many, 2, env=PLACES[where])) <= 0
