"""The comm stream on the CPU: a thread that runs jobs in the order in which they were given.

It stands where DeepEP has a CUDA stream: a call queues its communication here and may return before it has happened.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

from .event import EventHandle, EventOverlap, event_of


class Job:
    """One piece of work of the comm stream: done or not, with a result or an error."""

    def __init__(self, work: Callable[[], Any]):
        self._work: Callable[[], Any] | None = work
        self._done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Do the work, and keep what it returns or raises. Drops the work, and with it the tensors that it holds."""
        work, self._work = self._work, None
        assert work is not None
        try:
            self._result = work()
        except BaseException as error:  # it surfaces where the job is waited for
            self._error = error
        finally:
            del work
            self._done.set()

    def wait(self) -> Any:
        """Block until the job is done. Returns what it returned, or raises what it raised."""
        self._done.wait()
        if self._error is not None:
            raise self._error
        return self._result

    def query(self) -> bool:
        """Whether the job is done."""
        return self._done.is_set()


class CommStream:
    """A thread with a queue. The thread starts with the first job and ends with the stream."""

    def __init__(self, name: str):
        self._name = name
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._last: Job | None = None

    def submit(self, work: Callable[[], Any]) -> Job:
        """Queue `work` behind everything submitted before."""
        if self._thread is None:
            # The thread knows the queue and not the stream, so that a forgotten stream is collected and ends it.
            self._thread = threading.Thread(target=_serve, args=(self._jobs,), name=self._name, daemon=True)
            self._thread.start()
            weakref.finalize(self, self._jobs.put, None).atexit = False
            _running.add(self)
        job = Job(work)
        self._last = job
        self._jobs.put(job)
        return job

    def run(self, work: Callable[[], Any]) -> Any:
        """Queue `work` and wait for it."""
        return self.submit(work).wait()

    def stop(self) -> None:
        """Let the queued jobs finish, then end the thread."""
        thread, self._thread = self._thread, None
        if thread is not None and thread is not threading.current_thread():
            self._jobs.put(None)
            thread.join()

    def finish_with(self, work: Callable[[], Any]) -> None:
        """Do `work` behind the queued jobs and end the thread, without waiting for either."""
        if self._thread is None:
            work()
        else:
            self.submit(work)
            self._jobs.put(None)

    # What a torch.cuda.Stream offers, for callers that use `get_comm_stream()`

    def synchronize(self) -> None:
        """Block until everything submitted so far is done."""
        if self._last is not None:
            self._last._done.wait()

    def query(self) -> bool:
        """Whether everything submitted so far is done."""
        return self._last is None or self._last.query()

    def record_event(self, event: EventHandle | None = None) -> EventHandle:
        """An event that completes with everything submitted so far."""
        if event is None:
            event = EventHandle()
        event._completion = self._last
        return event

    def wait_event(self, event: EventHandle | EventOverlap) -> None:
        """Have later jobs wait for an event."""
        raw = event_of(event)
        if raw is not None and not raw.query():
            self.submit(raw.current_stream_wait)

    def wait_stream(self, stream: Any) -> None:
        """Have later jobs wait for everything submitted to another comm stream so far."""
        if stream is not self and hasattr(stream, "record_event"):
            self.wait_event(stream.record_event())


_running: weakref.WeakSet[CommStream] = weakref.WeakSet()


@atexit.register
def _finish_running() -> None:
    """Peers may still need what is queued: a process ends after its queued communication. Every job has its limit."""
    for stream in list(_running):
        stream.stop()


def _serve(jobs: queue.SimpleQueue[Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.run()
        del job  # the stream must not keep a finished job's tensors alive while it waits for the next
