"""`run_ranks`: N processes with a process group, their results back, and the first traceback with its rank.

Processes come from a forkserver that has torch loaded, so that starting four ranks takes a fraction of a second.
"""

from __future__ import annotations

import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import os
import pickle
import select
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from . import reaper
from .errors import EPError

PRELOADED = ["torch", "torch.distributed", "deep_ep"]
"""Modules that ranks find imported. More may be added before the first ranks are started."""


class RankFailed(EPError):
    """A rank raised, or ended without a word. The message holds its traceback."""


@dataclass(frozen=True)
class _Answer:
    value: Any = None
    error: str | None = None


def run_ranks(
    function: Callable[..., Any],
    num_ranks: int,
    *args: Any,
    limit_secs: float = 300.0,
    may_die: Sequence[int] = (),
    env: dict[str, str] | None = None,
    enter: Callable[[int], object] | None = None,
) -> list[Any]:
    """Run `function(rank, num_ranks, *args)` in `num_ranks` processes with a gloo process group around them.

    Args:
        function: Importable by name, as multiprocessing needs it.
        num_ranks: How many processes.
        args: Passed on; they are pickled.
        limit_secs: Seconds for all of it; what runs then is killed.
        may_die: Ranks that may end without an answer (tests kill them); their result is None.
        env: Environment variables for the ranks, beside those of this process.
        enter: `enter(rank)` is called on each rank before its group is made, to move it to another host; importable.

    Returns:
        What each rank returned, by rank.

    Raises:
        RankFailed: A rank raised or died; the message carries the first one's traceback. The others are ended.
    """
    start = _forkserver()
    variables = {**os.environ, **(env or {})}  # the forkserver has those of the time when it started
    with tempfile.TemporaryDirectory(prefix="deep_ep-") as folder:
        processes, pipes = [], []
        try:
            for rank in range(num_ranks):
                here, there = start.Pipe(duplex=False)
                work = (function, rank, num_ranks, args, f"{folder}/store", there, variables, enter, os.getpid())
                process = start.Process(target=_run_rank, args=work, name=f"rank {rank}", daemon=True)
                process.start()
                there.close()
                processes.append(process)
                pipes.append(here)
            return _collect(pipes, set(may_die), time.monotonic() + limit_secs, limit_secs)
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


def _forkserver() -> multiprocessing.context.ForkServerContext:
    """The forkserver, running. It starts with SIGINT ignored: Ctrl-C is for the caller, who then ends the ranks."""
    start = multiprocessing.get_context("forkserver")
    start.set_forkserver_preload(PRELOADED)
    if threading.current_thread() is threading.main_thread():
        previous = signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            multiprocessing.forkserver.ensure_running()
        finally:
            signal.signal(signal.SIGINT, previous)
    return start


def _end_with(pid: int) -> None:
    """Kill this rank when the process that called `run_ranks` ends.

    The system could do that for a parent, but the parent is the forkserver, which lives as long as any rank does.
    """
    try:
        launcher = os.pidfd_open(pid)
    except (OSError, AttributeError):
        return
    poll = select.poll()
    poll.register(launcher, select.POLLIN)  # readable once the process has ended

    def watch() -> None:
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _collect(pipes: list[Connection], may_die: set[int], deadline: float, limit_secs: float) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while set(waiting.values()) - may_die:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(f"run_ranks: ranks {sorted(waiting.values())} did not end within {limit_secs:g} s")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            answer = _receive(pipe)
            if answer.error is not None and not (rank in may_die and answer.error == _NO_WORD):
                raise RankFailed(f"rank {rank}/{len(pipes)}: {answer.error}")
            results[rank] = answer.value
    return results


_NO_WORD = "the process ended without a word (it was killed, or crashed)"


def _receive(pipe: Connection) -> _Answer:
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return _Answer(error=_NO_WORD)


def _run_rank(
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    args: tuple[Any, ...],
    store: str,
    pipe: Connection,
    variables: dict[str, str],
    enter: Callable[[int], object] | None,
    launcher: int,
) -> None:
    _end_with(launcher)
    os.environ.clear()
    os.environ.update(variables)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        if enter is not None:
            enter(rank)
        dist.init_process_group(
            "gloo", init_method=f"file://{store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
        )
        answer = _Answer(function(rank, num_ranks, *args))
    except BaseException:
        answer = _Answer(error=traceback.format_exc())
        reaper.leave_quietly()  # what is told is the error
    pipe.send_bytes(pickle.dumps(answer))
    pipe.close()
    if answer.error is None and num_ranks > 1:
        dist.destroy_process_group()
