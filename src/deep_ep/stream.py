"""The comm stream on the CPU: a thread that runs jobs in the order in which they were given.

It stands where DeepEP has a CUDA stream: a call queues its communication here and may return before it has happened.
A process that ends first finishes what is queued, since peers need it; every job has its limit.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch

from .errors import EPClosed
from .event import EventHandle, EventOverlap, event_of, result_of

_COMM_STREAM_METHODS = (
    "submit",
    "run",
    "run_in_turn",
    "stop",
    "synchronize",
    "query",
    "record_event",
    "wait_event",
    "wait_stream",
)


class _Worker:
    """The thread of a stream, and its queue.

    It has no reference to the stream, which may be freed while jobs are queued.

    The queue is a `SimpleQueue`, which takes no lock that Python code can hold: so whatever interrupts a thread in a
    put (a signal, garbage collection) may put something there, too.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str):
        self.name = name
        self.jobs: queue.SimpleQueue[tuple[Future, Callable[[], Any]] | None] = queue.SimpleQueue()
        self.unfinished: deque[None] = deque()  # an entry for each job: both ends may change at the same time
        self.is_stopped = False
        self._thread: threading.Thread | None = None
        self._turn = threading.Lock()

    def start(self) -> None:
        """Start the thread, if there is none yet."""
        if self._thread is None:
            # A daemon: an interpreter that ends first waits for other threads, and this one has no end of its own. The
            # owner of the stream stops it before (`reaper.py`).
            thread = threading.Thread(target=self._run, name=self.name, daemon=True)
            thread.start()
            # An interrupt in between leaves a thread too many. They take turns.
            self._thread = thread

    def stop(self) -> None:
        """Have the thread end behind what is queued. Takes no lock and does not wait."""
        if not self.is_stopped:
            self.is_stopped = True
            self.jobs.put(None)

    def join(self) -> None:
        """Wait for the thread to end, which was stopped."""
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        is_stopped = False
        while not is_stopped:
            with self._turn:
                is_stopped = not self._run_next()
        self.jobs.put(None)  # for a thread too many

    def _run_next(self) -> bool:
        """Run the next job. Returns whether there was one, rather than the end."""
        item = self.jobs.get()
        if item is None:
            return False
        job, work = item
        result, error = None, None
        if job.set_running_or_notify_cancel():
            try:
                result = _without_autograd(work)
            except BaseException as raised:
                error = raised
        # What a job holds lives no longer than its caller wants it to. And a caller that sees it done finds it idle,
        # if it was the last one.
        del item, work
        self.unfinished.pop()
        if error is not None:
            job.set_exception(_without_frames(error))
        elif not job.cancelled():
            job.set_result(result)
        del job, result, error  # the error's traceback has this frame
        return True


class JobTraceback(Exception):
    """The traceback of a job that has raised, as text."""


def _without_frames(error: BaseException) -> BaseException:
    """Return the error with its traceback as text: the job may be kept, and with it the error, but not its tensors.

    Clearing the frames of the traceback would not do: a frame that is cleared still has its function, and that has what
    the function was closed over.
    """
    error.__cause__ = JobTraceback("\n" + "".join(traceback.format_exception(error)))
    error.__context__ = None
    return error.with_traceback(None)


class CommStream:
    """A queue of jobs and the one thread that runs them. The thread starts with the first job and ends with the stream.

    Args:
        name: Of the thread.
    """

    is_capturing = False  # the CPU has no graphs

    def __init__(self, name: str):
        self._worker = _Worker(name)
        self._last: Future | None = None
        weakref.finalize(self, self._worker.stop).atexit = False  # it only puts something into the queue

    def submit(self, work: Callable[[], Any]) -> Future:
        """Queue `work` after everything submitted before. The future gets its result, or its exception.

        Raises:
            RuntimeError: The stream has been stopped.
        """
        worker = self._worker
        if worker.is_stopped:
            raise RuntimeError(f"stream {worker.name}: it has been stopped")
        worker.start()
        job: Future = Future()
        job.worker = worker  # type: ignore[attr-defined]
        try:
            worker.unfinished.append(None)
            worker.jobs.put((job, work))
            if worker.is_stopped and job.cancel():  # by another thread, meanwhile: it would never run
                raise RuntimeError(f"stream {worker.name}: it has been stopped")
        except BaseException:
            job.cancel()  # an interrupt: whether it has been queued or not, it shall not run
            raise
        self._last = job
        return job

    def has_made(self, event: EventHandle | None) -> bool:
        """Return whether an event stands for a job of this stream."""
        return event is not None and getattr(event.completion, "worker", None) is self._worker

    def run(self, work: Callable[[], Any], on_abandon: Callable[[BaseException], bool] | None = None) -> Any:
        """Run `work` after everything submitted before, and wait for it.

        If nothing is queued it runs right here: two changes of threads cost as much as a small call. The caller makes
        sure that no thread submits meanwhile, so jobs still run one after the other.

        Args:
            work: What to do.
            on_abandon: Called if an exception (Ctrl-C) ends the wait while the work is under way on the other thread,
                which goes on with it. Work that has not begun by then never will. If it answers True, the work is
                about to end, and the exception leaves this method only then; another one does not wait for it.
        """
        if self.query():
            return _without_autograd(work)
        job = None
        try:
            job = self.submit(work)
            return result_of(job)
        except BaseException as error:
            # Where the job is not known, the thread may have begun it all the same.
            is_left = (job is None or not job.done()) and not (job is not None and job.cancel())
            if is_left and on_abandon is not None and on_abandon(error) and job is not None:
                wait([job])
            raise

    def run_in_turn(self, work: Callable[[], Any]) -> None:
        """Run `work` after everything submitted before, without waiting for it.

        If nothing is queued, it runs right here.
        """
        if self.query():
            work()
        else:
            self.submit(work)

    def stop(self) -> None:
        """Let the queued jobs finish, then end the thread."""
        self._worker.stop()
        self._worker.join()

    def refuse(self, reason: str) -> None:
        """In a forked child, which has no such thread: have every method raise `EPClosed` from now on.

        The stream becomes one of another class, so that calls need not look whether this has happened.
        """

        def refuse(*_: Any) -> Any:
            raise EPClosed(f"CommStream: {reason}")

        methods = dict.fromkeys(_COMM_STREAM_METHODS, refuse)
        self.__class__ = type("CommStream", (CommStream,), {"__slots__": (), **methods})

    # What a torch.cuda.Stream offers, for callers that use `get_comm_stream()`

    def synchronize(self) -> None:
        """Block until everything submitted so far is done."""
        if self._worker.is_stopped:
            self._worker.join()
        elif not self.query():
            self.submit(_nothing).result()

    def query(self) -> bool:
        """Return whether everything submitted so far is done."""
        return not self._worker.unfinished

    def record_event(self, event: EventHandle | None = None) -> EventHandle:
        """Return an event that completes with everything submitted so far, and raises what the last job raised."""
        event = event or EventHandle()
        last = self._last
        if last is not None and last.cancelled():  # it is over, but what was queued before it may not be
            last = self.submit(_nothing) if not self.query() and not self._worker.is_stopped else None
        event.completion = last
        return event

    def wait_event(self, event: EventHandle | EventOverlap) -> None:
        """Have later jobs wait for an event."""
        raw = event_of(event)
        if raw is not None and not raw.query():
            self.submit(raw.current_stream_wait)

    def follow(self, other: Any) -> None:
        """Have the next call come after everything that was queued on the stream of another buffer."""
        if type(other) is CommStream and not other.query():  # one that `refuse` has changed has nothing queued
            self.wait_stream(other)

    def wait_stream(self, stream: Any) -> None:
        """Have later jobs wait for everything submitted to another comm stream so far."""
        if stream is not self and hasattr(stream, "record_event"):
            self.wait_event(stream.record_event())


def _nothing() -> None:
    """Do nothing: a job that only marks a point in the queue."""


def _without_autograd(work: Callable[[], Any]) -> Any:
    """Run a job in inference mode: modes belong to threads, and only this one may write any caller's tensors.

    Communication records no graph (its gradient is communication too), and a caller in inference mode makes tensors
    that cannot be written outside of it.
    """
    with torch.inference_mode(), _prompt_switches:
        return work()


class _PromptSwitches:
    """While communication runs, threads hand the GIL over after 0.1 ms instead of 5.

    A job takes the GIL between its operators. Beside a thread that is busy in pure Python it would wait the whole
    interval each time, and a call of 80 ms would take seconds.
    """

    INTERVAL_SECS = 1e-4

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_jobs = 0
        self._usual_secs = 0.0
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forget_jobs)

    def _forget_jobs(self) -> None:
        """Forget all jobs in a forked child, where none of them runs, and where a lock that was held is never
        released.
        """
        self._lock = threading.Lock()
        if self._num_jobs:
            self._num_jobs = 0
            sys.setswitchinterval(self._usual_secs + 5e-7)

    def __enter__(self) -> None:
        with self._lock:
            if self._num_jobs == 0:
                self._usual_secs = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_secs, self.INTERVAL_SECS))
            self._num_jobs += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_jobs = max(0, self._num_jobs - 1)  # a child that was forked inside a job has forgotten it
            if self._num_jobs == 0:
                # Python keeps whole microseconds and rounds down: half of one more gives the same number back.
                sys.setswitchinterval(self._usual_secs + 5e-7)


_prompt_switches = _PromptSwitches()


class Mark(Protocol):
    """A point in a stream."""

    def reached_ns(self) -> int | None:
        """Return when the stream reached it, as `time.monotonic_ns` counts; None: it has not, yet."""
        ...


class _PassedMark:
    """A point that the stream had passed when the mark was made."""

    def __init__(self) -> None:
        self._at_ns = time.monotonic_ns()

    def reached_ns(self) -> int:
        """Return when the mark was made."""
        return self._at_ns


class SavedStream(NamedTuple):
    """The stream and the device of a caller, to which `exit` returns.

    Attributes:
        caller: The caller's stream.
        is_elsewhere: The call is launched on another one.
        device: The caller's device.
        is_capturing: The caller's stream is being captured.
        is_foreign: The caller's stream is not one of torch's, and may be gone when the next call comes.
    """

    caller: Any
    is_elsewhere: bool
    device: int
    is_capturing: bool
    is_foreign: bool = False


_NOWHERE = SavedStream(None, False, 0, False)


class LaunchStream:
    """The stream on which kernels are launched.

    This one is for the CPU, where Triton's interpreter is done when a launch returns.

    Attributes:
        raw: The comm stream.
        current: The stream that the launches of a call go to.
        is_capturing: The call that is being made is captured in a graph.
    """

    raw: Any = None
    current: Any = None
    is_capturing = False

    @contextmanager
    def entered(self, after: EventHandle | None, is_async: bool) -> Iterator[None]:
        """Launches inside the block come after the caller's work (or just after an event), and after earlier calls."""
        with torch.no_grad():
            saved = self.enter(after, is_async)
            try:
                yield
            finally:
                self.exit(saved)

    def enter(self, after: EventHandle | None, is_async: bool) -> SavedStream:
        """As `entered`, without the block: `exit` must follow, with what this returns."""
        del is_async
        if after is not None:
            after.current_stream_wait()
        return _NOWHERE

    def exit(self, saved: SavedStream) -> None:
        """Return to the caller's stream."""

    def caller(self) -> Any:
        """Return the caller's stream."""
        return None

    def follow(self, other: Any) -> None:
        """Have the caller's stream wait for everything that was launched on the comm stream of another buffer."""

    def behind(self, caller: Any) -> AbstractContextManager:
        """Inside the block, an earlier caller's stream is the caller's."""
        del caller
        return nullcontext()

    def allocation_stream(self, stream: Any) -> AbstractContextManager[None]:
        """Allocations inside the block belong to a stream. The block may be entered again and again during a call."""
        del stream
        return nullcontext()

    def made_for(self, after: EventHandle | None) -> AbstractContextManager:
        """Allocations inside the block are for a call that is yet to be entered, and belong to its stream if it comes
        just after an event: the caller's stream may be behind it.
        """
        del after
        return nullcontext()

    def leave(self, is_async: bool) -> EventHandle | None:
        """Return an event for what was launched; None: the caller's stream waits for it."""
        return EventHandle() if is_async else None

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Launches inside the block wait for nothing that was launched before, and are part of no capture."""
        yield

    def is_on_device(self) -> bool:
        """Whether the stream's device is the current one."""
        return True

    def on_device(self) -> AbstractContextManager:
        """The stream's device is the current one inside the block."""
        return nullcontext()

    def hold(self, tensors: Iterable[torch.Tensor | None], stream: Any) -> None:
        """Keep the memory of tensors until a stream is done with what was launched."""

    def can_mark(self) -> bool:
        """Whether points can be marked now: not in a capture."""
        return True

    def mark(self) -> Mark:
        """Mark the point after everything that was launched."""
        return _PassedMark()

    def await_capture(self) -> bool:
        """Wait until no graph is being captured. The CPU has no graphs."""
        return True

    def stop(self) -> None:
        """Wait for everything that was launched."""


_CAPTURE_LOOK_SECS, _MOST_CAPTURE_SECS = 1e-3, 60.0  # how often, and how long, a forgotten buffer waits for a capture
_POOL_STREAMS = 32  # of each priority, that torch makes
_MOST_CALLERS = 64  # streams that are remembered: making the object takes longer than asking which it is
_MIXED_CALLS = 64  # that are made with an event, after one on another stream than the call before


def _is_capturing(stream: torch.cuda.Stream) -> bool:
    with torch.cuda.stream(stream):
        return torch.cuda.is_current_stream_capturing()


class _CudaClock:
    """The device's time, on the host's clock.

    Args:
        stream: Any stream of the device; it is waited for.
    """

    _MOST_MS = 8192.0  # distances are floats of 24 bits: here they still tell microseconds apart

    def __init__(self, stream: torch.cuda.Stream):
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)
        stream.synchronize()
        self._at_ns = time.monotonic_ns()  # late by the return from the wait: some microseconds

    def time_of(self, event: torch.cuda.Event) -> int:
        """Return when an event, which has completed, happened."""
        distance_ms = self._event.elapsed_time(event)
        at_ns = self._at_ns + round(distance_ms * 1e6)
        if distance_ms > self._MOST_MS:
            self._event, self._at_ns = event, at_ns
        return at_ns


class _CudaMark:
    """A point in a CUDA stream."""

    def __init__(self, clock: _CudaClock, stream: torch.cuda.Stream):
        self._clock = clock
        self._event = torch.cuda.Event(enable_timing=True)
        self._event.record(stream)
        self._at_ns: int | None = None

    def reached_ns(self) -> int | None:
        """Return when the stream reached it; None: it has not, yet."""
        if self._at_ns is None and self._event.query():
            self._at_ns = self._clock.time_of(self._event)
        return self._at_ns


class _AllocationStream:
    """Another stream is the current one inside the block."""

    def __init__(self, inside: torch.cuda.Stream, outside: torch.cuda.Stream):
        self._inside = inside
        self._outside = outside

    def __enter__(self) -> None:
        torch.cuda.set_stream(self._inside)

    def __exit__(self, *error: object) -> None:
        torch.cuda.set_stream(self._outside)


class CudaStream(LaunchStream):
    """A CUDA stream of high priority, beside the caller's.

    A call that is not to overlap with anything (no event before it, none requested) is launched on the caller's own
    stream: the order is the same, and two waits between streams are saved.

    Calls form a chain, so one on another stream waits for the call before it. An event takes as long to record as a
    kernel to launch; so a program whose calls are all on one stream records none. The first call on another stream
    records it then, behind whatever the caller has launched since, and may wait longer than it must. From there on each
    call records its own, until calls have stayed on one stream for some time.

    Args:
        device: The GPU.
    """

    def __init__(self, device: torch.device):
        self._index = device.index
        self.raw = torch.cuda.Stream(device, priority=-1)
        self.current = self.raw
        self._before, self._after, self._last = torch.cuda.Event(), torch.cuda.Event(), torch.cuda.Event()
        self._record_last = super(torch.cuda.Event, self._last).record  # without the function of Python around it
        self._last_stream: torch.cuda.Stream | None = None
        self._is_recorded = False  # `_last`, behind the last call
        self._mixed_left = 0  # calls that are still to record it
        self._callers: dict[tuple, SavedStream] = {}
        self._clock: _CudaClock | None = None

    def enter(self, after: EventHandle | None, is_async: bool) -> SavedStream:
        """As `entered`, without the block: `exit` must follow, with what this returns."""
        saved = self._callers.get(torch._C._cuda_getCurrentStream(self._index)) or self._here()
        device = torch._C._cuda_getDevice()
        # Inside a capture all calls stay on one stream: events from outside could not bring two into order.
        is_capturing = self.is_capturing = torch._C._cuda_isCurrentStreamCapturing()
        is_elsewhere = after is not None or is_async or is_capturing
        self.current = self.raw if is_elsewhere else saved.caller
        if is_elsewhere or device != self._index:
            saved = SavedStream(saved.caller, is_elsewhere, device, is_capturing, saved.is_foreign)
        if is_elsewhere and after is None:
            self._before.record(saved.caller)
            self.raw.wait_event(self._before)
        last = self._last_stream
        # Where two objects stand for one stream it waits for itself, which is no wait; comparing them takes longer.
        if last is not self.current and last is not None and not is_capturing:
            if not self._is_recorded:
                self._last.record(last)
            self.current.wait_event(self._last)
            self._mixed_left = _MIXED_CALLS
        if is_elsewhere or device != self._index:
            torch.cuda.set_stream(self.current)
        if after is not None:
            try:
                after.current_stream_wait()
            except BaseException:
                self.exit(saved)
                raise
        return saved

    def exit(self, saved: SavedStream) -> None:
        """Return to the caller's stream."""
        if saved.is_elsewhere:
            torch.cuda.set_stream(saved.caller)
        if saved.device != self._index:
            torch.cuda.set_device(saved.device)  # setting a stream has set its device, too
        if not saved.is_capturing:
            self._last_stream = self.current
            # On the comm stream nothing but calls is launched: there it can be recorded late.
            is_due = (self._mixed_left > 0 or saved.is_foreign) and self.current is not self.raw
            if is_due:
                self._mixed_left = max(0, self._mixed_left - 1)
                self._record_last(self.current)
            self._is_recorded = is_due

    def caller(self) -> torch.cuda.Stream:
        """Return the caller's stream."""
        return self._here().caller

    def _here(self) -> SavedStream:
        """Return the `SavedStream` of a call that stays on the caller's stream and on this device."""
        key = torch._C._cuda_getCurrentStream(self._index)
        saved = self._callers.get(key)
        if saved is None:
            if len(self._callers) == _MOST_CALLERS:
                self._callers.clear()
            stream = torch.cuda.current_stream(self._index)
            is_foreign = stream.stream_id != 0 and stream.stream_id & 1 == 0  # torch's own have odd numbers
            saved = SavedStream(stream, False, self._index, False, is_foreign)
            self._callers[key] = saved
        return saved

    def follow(self, other: Any) -> None:
        """Have the caller's stream wait for everything that was launched on the comm stream of another buffer.

        Not in a capture, of which the other stream may be no part.
        """
        if isinstance(other, CudaStream) and not torch.cuda.is_current_stream_capturing() and not other.raw.query():
            self.caller().wait_stream(other.raw)

    def behind(self, caller: torch.cuda.Stream) -> AbstractContextManager:
        """Inside the block, an earlier caller's stream is the caller's."""
        return nullcontext() if caller == self.caller() else torch.cuda.stream(caller)

    def allocation_stream(self, stream: torch.cuda.Stream) -> AbstractContextManager[None]:
        """Allocations inside the block belong to a stream. The block may be entered again and again during a call."""
        return _AllocationStream(stream, self.current)

    def made_for(self, after: EventHandle | None) -> AbstractContextManager:
        """Allocations inside the block are for a call that is yet to be entered."""
        return self.on_device() if after is None else torch.cuda.stream(self.raw)

    def leave(self, is_async: bool) -> EventHandle | None:
        """Return an event for what was launched; None: the caller's stream waits for it."""
        if is_async:
            return EventHandle(self.raw.record_event())
        if self.current is self.raw:
            self._after.record(self.raw)
            self.caller().wait_event(self._after)
        return None

    @contextmanager
    def side_stream(self) -> Iterator[None]:
        """Launches inside the block wait for nothing that was launched before, and are part of no capture."""
        with torch.cuda.stream(torch.cuda.Stream(self._index, priority=-1)):
            yield

    def is_on_device(self) -> bool:
        """Whether the stream's device is the current one."""
        return torch._C._cuda_getDevice() == self._index

    def on_device(self) -> AbstractContextManager:
        """The stream's device is the current one inside the block."""
        return nullcontext() if self.is_on_device() else torch.cuda.device(self._index)

    def hold(self, tensors: Iterable[torch.Tensor | None], stream: torch.cuda.Stream) -> None:
        """Keep the memory of tensors until a stream is done with what was launched."""
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)

    def can_mark(self) -> bool:
        """Whether points can be marked now: not in a capture."""
        return not torch.cuda.is_current_stream_capturing()

    def mark(self) -> Mark:
        """Mark the point after everything that was launched."""
        if self._clock is None:
            self._clock = _CudaClock(self.raw)
        return _CudaMark(self._clock, self.current)

    def await_capture(self) -> bool:
        """Wait until no graph is being captured, on any stream of torch's.

        Waiting for a stream would break its capture; and torch waits for the whole device before it frees symmetric
        memory, which no capture survives: the process ends. Returns whether there is none; False: the limit has passed.
        """
        deadline = time.monotonic() + _MOST_CAPTURE_SECS
        while self._is_any_capturing():
            if time.monotonic() > deadline:
                return False
            time.sleep(_CAPTURE_LOOK_SECS)
        return True

    def _is_any_capturing(self) -> bool:
        # Streams come from a pool, one after the other: as many as it has are all there are.
        pool = [torch.cuda.Stream(self._index, priority=priority) for priority in (0, -1) for _ in range(_POOL_STREAMS)]
        return any(_is_capturing(stream) for stream in (self.raw, self._last_stream, *pool) if stream is not None)

    def stop(self) -> None:
        """Wait for everything that was launched."""
        self.raw.synchronize()
        if self._last_stream is not None:
            self._last_stream.synchronize()
