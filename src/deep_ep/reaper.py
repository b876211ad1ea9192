"""The reaper: a thread that closes what its owner has left open.

A finalizer may run on any thread and between any two instructions of it: inside `ThreadPoolExecutor.submit`, which
holds a lock, or inside the capture of a CUDA graph. So a finalizer of ours takes no lock, starts no thread, waits for
nothing and warns of nothing. It hands over to this thread with `SimpleQueue.put`, which may be interrupted by another
`put` of the same thread. The reaper drains and closes, in the order in which things were handed over.

The thread starts when the first owner is made, and lives as long as the process. When the process ends, everything
that is still open is closed first, since peers need what is queued; the limits of the calls bound how long that takes.
A forked child has neither the thread nor anything that its parent has open.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import multiprocessing.util
import os
import queue
import sys
import threading
import weakref
from collections.abc import Callable

import torch

THREAD = "deep_ep-reaper"  # its name; it stays as long as the process
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_EXIT_PRIORITY = 10  # any number that is not negative: with the first exit functions of a `multiprocessing` child

_log = logging.getLogger(__name__)


class Closing:
    """What is left to do when an owner goes.

    Args:
        owner: When it has died, and at the latest when the process ends, `close` runs on the reaper's thread.
        close: Must hold no reference to the owner. It is told whether warnings should be left out, because the owner
            went with an exception, which they would hide.
    """

    def __init__(self, owner: object, close: Callable[[bool], None]):
        self._close = close
        self._is_quiet = False
        _start()
        self._finalizer = weakref.finalize(owner, self._hand_over)
        self._finalizer.atexit = False  # `close_all` has its own order, and waits
        _open[id(self)] = self  # last: a fork on another thread finds only whole ones there

    def detach(self) -> Callable[[bool], None] | None:
        """Take over from the reaper: the caller closes. None: it is closed already, or about to be."""
        self._finalizer.detach()
        return self._close if _open.pop(id(self), None) is not None else None

    def close_soon(self) -> None:
        """Have the reaper close, without a warning, though the owner lives on. Waits for nothing."""
        self._is_quiet = True
        _handed_over.put(self)

    def _hand_over(self) -> None:
        """The finalizer, which may run anywhere."""
        self._is_quiet = self._is_quiet or sys.exc_info()[1] is not None
        _handed_over.put(self)

    def run(self) -> None:
        """Close, unless somebody else does. Only the reaper calls it."""
        close = self.detach()
        if close is not None:
            close(self._is_quiet or _is_failing)


class _Errand:
    """Something that a finalizer has left to the reaper."""

    def __init__(self, work: Callable[[], None]):
        self._work = work

    def run(self) -> None:
        """Do the work. Only the reaper calls it."""
        if not _is_failing:
            self._work()


def hand_over(work: Callable[[], None]) -> None:
    """Have the reaper's thread do what a finalizer must not do itself, unless the process ends by an exception.

    Args:
        work: Called soon, in the order in which things were handed over; not at all if the thread has ended.
    """
    _handed_over.put(_Errand(work))


_handed_over: queue.SimpleQueue[Closing | _Errand | None] = queue.SimpleQueue()
_open: dict[int, Closing] = {}
_start_lock = threading.Lock()  # for the thread alone: no finalizer takes it
_thread: threading.Thread | None = None
_is_failing = False  # whether the process ends by an exception


def is_normal_end(error: BaseException) -> bool:
    """Whether an exception is how a program, or a generator, ends that has nothing to complain of."""
    return isinstance(error, GeneratorExit) or (isinstance(error, SystemExit) and not error.code)


def leave_quietly() -> None:
    """Say that this process is about to end because of an exception: what is still open is closed without warnings."""
    global _is_failing
    _is_failing = True


def close_all() -> None:
    """Close everything that is open, and end the thread. For the end of the process; a second call does nothing."""
    global _thread
    # The interpreter keeps an exception that nobody has handled in `last_value`. A `multiprocessing` child is here
    # while its exception is on the way; SystemExit is one only if it reports a failure.
    error = sys.exc_info()[1] or getattr(sys, "last_value", None)
    if error is not None and not is_normal_end(error):
        leave_quietly()
    for closing in reversed(list(_open.values())):  # buffers before the traces that they write to
        _handed_over.put(closing)
    with _start_lock:
        thread, _thread = _thread, None
    if thread is not None:
        _handed_over.put(None)
        thread.join()


def _start() -> None:
    """Start the thread, if it does not run yet."""
    global _thread
    with _start_lock:
        if _thread is None:
            _thread = threading.Thread(target=_run, args=(_handed_over,), name=THREAD, daemon=True)
            _thread.start()
            # A `multiprocessing` child ends without `atexit` functions, but runs these.
            multiprocessing.util.Finalize(None, close_all, exitpriority=_EXIT_PRIORITY)


def _run(handed_over: queue.SimpleQueue[Closing | _Errand | None]) -> None:
    while (closing := handed_over.get()) is not None:
        try:
            _relax_captures()
            closing.run()
        except BaseException:
            _log.exception("deep_ep: what was forgotten could not be closed")
        del closing  # its memory goes now, not when the next one comes


def _relax_captures() -> None:
    """Let this thread wait for streams and free memory while another thread captures a CUDA graph.

    A capture in global mode, which is the default, fails if any other thread does so, unless that thread's own mode
    is relaxed.
    """
    if torch.cuda.is_initialized():
        with contextlib.suppress(OSError, AttributeError):  # a driver of another kind, or an old one
            mode = ctypes.c_int(_RELAXED)
            ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def _forget() -> None:
    """In a forked child: everything that is open is the parent's, and so is the thread."""
    global _handed_over, _open, _start_lock, _thread, _is_failing
    inherited, _open = _open, {}
    # The parent's threads may have held these locks, that inside the queue included.
    _handed_over, _start_lock = queue.SimpleQueue(), threading.Lock()
    _thread, _is_failing = None, False
    for closing in inherited.values():
        closing._finalizer.detach()


atexit.register(close_all)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
