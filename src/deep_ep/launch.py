"""`run_ranks`: N processes with a process group, their results back, and the first traceback with its rank.

Processes come from a forkserver that has torch loaded, so that starting four ranks takes a fraction of a second.

Functions travel by name, as everywhere in multiprocessing. What a rank cannot import, because it was defined in a
notebook, in `python -c`, on standard input or inside another function, travels by value if cloudpickle is installed.
That is an extra, not a dependency: only interactive work needs it, and there the alternative, to write each cell to a
module by `%%writefile` and to reload it after every change, is what users forget.
"""

from __future__ import annotations

import io
import multiprocessing
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.process
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import ForkingPickler
from types import FunctionType
from typing import Any, NamedTuple

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


class _Work(NamedTuple):
    """What a rank does.

    Attributes:
        function: Encoded, see `_encode`, as is `enter`.
        args: Of the function; bytes: encoded, because there are objects among them whose classes ranks cannot import.
        is_by_value: Whether results are encoded, too: ranks cannot import the main module.
        store: The file by which the ranks meet.
        variables: The environment.
        enter: What is called first, or None.
        launcher: The process that called `run_ranks`.
    """

    function: bytes
    args: Any
    is_by_value: bool
    store: str
    variables: dict[str, str]
    enter: bytes | None
    launcher: int


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

    In a program, call it under `if __name__ == "__main__":`, since ranks import the program. In a notebook, in
    `python -c` and for functions inside of functions it needs cloudpickle (`pip install cloudpickle`). Ranks may start
    processes of their own, such as the workers of a DataLoader. Ctrl-C ends all ranks.

    Args:
        function: Defined at the top level of a module; anywhere if cloudpickle is installed.
        num_ranks: How many processes.
        args: Passed on; they are pickled.
        limit_secs: Seconds for all of it; what runs then is killed.
        may_die: Ranks that may end without an answer (tests kill them); their result is None.
        env: Environment variables for the ranks, beside those of this process.
        enter: `enter(rank)` is called on each rank before its group is made, to move it to another host; as `function`.

    Returns:
        What each rank returned, by rank; it is pickled.

    Raises:
        RankFailed: A rank raised or died; the message carries the first one's traceback. The others are ended.
        TypeError: The function or an argument cannot be sent to a rank.
    """
    _refuse_in_import()
    _check(num_ranks, limit_secs, env)
    start = _forkserver()
    has_main = _has_main()
    variables = {**os.environ, **(env or {})}  # the forkserver has those of the time when it started
    encoded, encoded_args = _encode("function", function), None if has_main else _encode_args(args)
    with tempfile.TemporaryDirectory(prefix="deep_ep-") as folder:
        work = _Work(
            encoded,
            args if encoded_args is None else encoded_args,
            not has_main,
            f"{folder}/store",
            variables,
            None if enter is None else _encode("enter", enter),
            os.getpid(),
        )
        processes: list[Any] = []
        pipes: list[Connection] = []
        try:
            for rank in range(num_ranks):
                here, there = start.Pipe(duplex=False)
                target = (rank, num_ranks, work, there)
                process = start.Process(target=_run_rank, args=target, name=f"{_NAME} {rank}", daemon=True)
                with _without_main_file(not has_main):
                    _start(process, args)
                there.close()  # otherwise the end of the rank would not be the end of its pipe
                processes.append(process)
                pipes.append(here)
            return _collect(pipes, processes, set(may_die), time.monotonic() + limit_secs, limit_secs)
        except KeyboardInterrupt:
            raise KeyboardInterrupt("run_ranks: interrupted; all ranks were ended") from None
        finally:
            for process in processes:
                if process.is_alive():
                    process.kill()
                process.join()


# What is sent to ranks -----------------------------------------------------------------------------------------------

_NAME = "rank"  # of the processes
_NO_GUARD = 113  # the exit code of a rank that has found a call of `run_ranks` while it imported the main module
_GUARD = 'Put the call under `if __name__ == "__main__":`'


def _refuse_in_import() -> None:
    """End a process that is about to start processes because it imports the main module of its launcher."""
    process = multiprocessing.process.current_process()
    if getattr(process, "_inheriting", False):  # as multiprocessing itself asks
        if process.name.startswith(_NAME):
            os._exit(_NO_GUARD)  # the launcher says it, once
        raise RuntimeError(f"run_ranks: it was called while a process imported the main module. {_GUARD}")


def _check(num_ranks: int, limit_secs: float, env: dict[str, str] | None) -> None:
    """Refuse arguments that would fail inside, or be taken for something else."""
    if isinstance(num_ranks, bool) or not isinstance(num_ranks, int):
        raise TypeError(f"run_ranks: `num_ranks` must be an int, got {type(num_ranks).__name__}")
    if num_ranks < 1:
        raise ValueError(f"run_ranks: `num_ranks` must be at least 1, got {num_ranks}")
    if isinstance(limit_secs, bool) or not isinstance(limit_secs, (int, float)):
        raise TypeError(f"run_ranks: `limit_secs` must be a number of seconds, got {type(limit_secs).__name__}")
    for name, value in (env or {}).items():
        if not isinstance(value, str):
            raise TypeError(f"run_ranks: `env` must have strings for values, `{name}` is {type(value).__name__}")


def _has_main() -> bool:
    """Return whether ranks can import the main module. They cannot in a notebook, a console or `python -c`."""
    main = sys.modules["__main__"]
    return getattr(main, "__spec__", None) is not None or os.path.isfile(getattr(main, "__file__", None) or "")


def _encode(name: str, value: Any) -> bytes:
    """Pickle something for the ranks: by name if they can import it, else by value."""
    reason = "ranks cannot import it from a notebook, a console or `python -c`"
    try:
        if _has_main() or not _is_of_main(value):
            return pickle.dumps(value)
    except Exception as error:
        reason = str(error) or type(error).__name__
    dumps = _dumps_by_value()
    if dumps is None:
        raise TypeError(
            f"run_ranks: `{name}` cannot be sent to the ranks: {reason}. Define it at the top level of a module that "
            "ranks can import, or install cloudpickle"
        )
    try:
        return dumps(value)
    except Exception as error:
        raise TypeError(
            f"run_ranks: `{name}` cannot be sent to the ranks: {error}. Make what cannot be pickled inside the rank"
        ) from None


def _encode_args(args: tuple[Any, ...]) -> bytes | None:
    """Pickle the arguments if that has to be by value. None: they go as they are, as pipes and the like must."""
    try:
        needs_value = _is_of_main(args)
    except Exception:
        needs_value = False
    return _encode("args", args) if needs_value else None


class _MainFinder(pickle.Pickler):
    """Finds whether anything that is pickled is defined in the main module."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO())
        self.has_found = False

    def persistent_id(self, value: Any) -> None:
        """Look at what is pickled next; called for everything, classes of objects included."""
        is_named = isinstance(value, (type, FunctionType))
        self.has_found = self.has_found or (is_named and value.__module__ == "__main__")


def _is_of_main(value: Any) -> bool:
    finder = _MainFinder()
    finder.dump(value)
    return finder.has_found


def _dumps_by_value() -> Callable[[Any], bytes] | None:
    """Return `cloudpickle.dumps`; None where it is not installed."""
    try:
        import cloudpickle
    except ImportError:
        return None
    return cloudpickle.dumps


@contextmanager
def _without_main_file(is_missing: bool) -> Iterator[None]:
    """Keep multiprocessing from importing a main module whose file does not exist, as `<stdin>`."""
    main = sys.modules["__main__"]
    file = getattr(main, "__file__", None)
    if not is_missing or file is None:
        yield
        return
    del main.__file__
    try:
        yield
    finally:
        main.__file__ = file


def _start(process: Any, args: tuple[Any, ...]) -> None:
    """Start a rank.

    Args:
        process: It.
        args: What the caller has passed on, to find which of them cannot be pickled.
    """
    try:
        process.start()
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        for index, arg in enumerate(args):
            try:
                ForkingPickler.dumps(arg)
            except Exception as reason:
                raise TypeError(
                    f"run_ranks: argument {index} behind `num_ranks` ({type(arg).__name__}) cannot be sent to the "
                    f"ranks: {reason}. Pass what it is made of, and make it inside the rank"
                ) from None
        raise error


def _forkserver() -> multiprocessing.context.ForkServerContext:
    """The forkserver, running. It ignores SIGINT: the process that launches handles Ctrl-C, and ends the ranks."""
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
    except ProcessLookupError:  # it has ended already
        os._exit(1)
    except (OSError, AttributeError):
        return
    poll = select.poll()
    poll.register(launcher, select.POLLIN)  # readable once the process has ended

    def watch() -> None:
        poll.poll()
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher", daemon=True).start()


def _collect(
    pipes: list[Connection], processes: list[Any], may_die: set[int], deadline: float, limit_secs: float
) -> list[Any]:
    results: list[Any] = [None] * len(pipes)
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    while set(waiting.values()) - may_die:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RankFailed(
                f"run_ranks: ranks {sorted(waiting.values())} did not end within {limit_secs:g} s, and were killed. "
                "Find out what they wait for, or pass a larger `limit_secs`"
            )
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            answer = _receive(pipe)
            if answer.error == _NO_WORD:
                processes[rank].join(timeout=5.0)  # its pipe is closed, so it is about to end
                if processes[rank].exitcode == _NO_GUARD:
                    raise RankFailed(
                        f"run_ranks: ranks import the main module, which called run_ranks again in there. {_GUARD}"
                    )
                if rank not in may_die:
                    raise RankFailed(f"rank {rank}/{len(pipes)}: {_ending(processes[rank].exitcode)}")
            elif answer.error is not None:
                raise RankFailed(f"rank {rank}/{len(pipes)}: {answer.error}")
            results[rank] = answer.value
    return results


_NO_WORD = "the process ended without a word"


def _ending(exit_code: int | None) -> str:
    """How a rank that has said nothing has ended."""
    if exit_code is None:
        return f"{_NO_WORD}, and is still running"
    if exit_code >= 0:
        return f"{_NO_WORD}, with exit code {exit_code}. It called `os._exit`, or failed while it imported the program"
    try:
        name = signal.Signals(-exit_code).name
    except ValueError:
        name = f"signal {-exit_code}"
    return f"{_NO_WORD}, by {name}: it was killed, or crashed"


def _receive(pipe: Connection) -> _Answer:
    try:
        data = pipe.recv_bytes()
    except EOFError:
        return _Answer(error=_NO_WORD)
    try:
        return pickle.loads(data)
    except Exception as error:
        return _Answer(error=f"what it returned cannot be unpickled ({type(error).__name__}: {error}). {_PLAIN}")


_PLAIN = "Return numbers, tensors, or other plain values"


def _run_rank(rank: int, num_ranks: int, work: _Work, pipe: Connection) -> None:
    _end_with(work.launcher)
    # The launcher ends its daemons when it exits, which is right for ranks; but daemons may have no children.
    multiprocessing.process.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    os.environ.clear()
    os.environ.update(work.variables)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    try:
        function, args, enter = _decode(work)
        if enter is not None:
            enter(rank)
        dist.init_process_group(
            "gloo", init_method=f"file://{work.store}", rank=rank, world_size=num_ranks, timeout=timedelta(seconds=60)
        )
        dist.barrier()  # a rank that ends before the others have connected would break their connections
        answer = _Answer(function(rank, num_ranks, *args))
    except _UndecodedError as error:
        answer = _Answer(error=str(error))
        reaper.leave_quietly()
    except BaseException:
        answer = _Answer(error=traceback.format_exc())
        reaper.leave_quietly()  # what is told is the error
    pipe.send_bytes(_encode_answer(answer, work.is_by_value))
    pipe.close()
    if answer.error is None and num_ranks > 1 and dist.is_initialized():  # the function may have destroyed it
        dist.destroy_process_group()


class _UndecodedError(Exception):
    """A rank cannot make of what it was sent what the launcher had."""


def _decode(work: _Work) -> tuple[Callable[..., Any], tuple[Any, ...], Callable[[int], object] | None]:
    """Return the function, its arguments, and what is called before it."""
    try:
        function = pickle.loads(work.function)
        args = pickle.loads(work.args) if isinstance(work.args, bytes) else work.args
        return function, args, None if work.enter is None else pickle.loads(work.enter)
    except Exception as error:
        raise _UndecodedError(
            f"the function, or what it needs, cannot be imported here: {error}. Define it at the top level of a "
            'module, not under `if __name__ == "__main__":`'
        ) from None


def _encode_answer(answer: _Answer, is_by_value: bool) -> bytes:
    try:
        dumps = _dumps_by_value() if is_by_value else None
        return (dumps or pickle.dumps)(answer)
    except Exception as error:
        return pickle.dumps(_Answer(error=f"what it returned cannot be pickled: {error}. {_PLAIN}"))
