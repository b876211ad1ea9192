"""The comm stream on the CPU: a thread that runs jobs in the order in which they were given.

It stands where DeepEP has a CUDA stream: a call queues its communication here and may return before it has happened.
A process that ends first finishes what is queued, since peers need it; every job has its limit.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import torch

from .event import EventHandle, EventOverlap, event_of


class CommStream:
    """A queue of jobs and the one thread that runs them. The thread starts with the first job and ends with the stream.

    Args:
        name: Of the thread.
    """

    def __init__(self, name: str):
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._last: Future | None = None

    def submit(self, work: Callable[[], Any]) -> Future:
        """Queue `work` behind everything submitted before. Its result, or what it raised, is in the future."""
        self._last = self._executor.submit(_without_autograd, work)
        return self._last

    def run(self, work: Callable[[], Any]) -> Any:
        """Do `work` behind everything submitted before, and wait for it.

        If nothing is queued it runs right here: two changes of threads cost as much as a small call. The caller makes
        sure that nobody submits meanwhile, so jobs still run one after the other.
        """
        if self.query():
            return _without_autograd(work)
        return self.submit(work).result()

    def stop(self) -> None:
        """Let the queued jobs finish, then end the thread."""
        self._executor.shutdown(wait=True)

    def finish_with(self, work: Callable[[], Any]) -> None:
        """Do `work` behind the queued jobs and end the thread, without waiting for either."""
        try:
            self.submit(work)
        except RuntimeError:  # the thread has ended, or the interpreter is ending: nothing is queued any more
            work()
        self._executor.shutdown(wait=False)

    # What a torch.cuda.Stream offers, for callers that use `get_comm_stream()`

    def synchronize(self) -> None:
        """Block until everything submitted so far is done."""
        if self._last is not None:
            wait([self._last])

    def query(self) -> bool:
        """Whether everything submitted so far is done."""
        return self._last is None or self._last.done()

    def record_event(self, event: EventHandle | None = None) -> EventHandle:
        """An event that completes with everything submitted so far."""
        event = event or EventHandle()
        event.completion = self._last
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

    def __enter__(self) -> None:
        with self._lock:
            if self._num_jobs == 0:
                self._usual_secs = sys.getswitchinterval()
                sys.setswitchinterval(min(self._usual_secs, self.INTERVAL_SECS))
            self._num_jobs += 1

    def __exit__(self, *error: object) -> None:
        with self._lock:
            self._num_jobs -= 1
            if self._num_jobs == 0:
                # Python keeps whole microseconds and rounds down: half of one more gives the same number back.
                sys.setswitchinterval(self._usual_secs + 5e-7)


_prompt_switches = _PromptSwitches()
