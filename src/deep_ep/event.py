"""Events: what an asynchronous call returns, and what the next call can wait for.

An `EventHandle` is a point in a stream. On CUDA it is a CUDA event. On the CPU the caller's thread is its own stream,
so an event that the caller records is complete at birth; the events of the comm stream (a thread) complete when their
job does.
`EventOverlap` wraps one with DeepEP's conveniences.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch

from .errors import EPClosed

_num_forks = 0  # between this process and the first of its line that imported us


def _count_fork() -> None:
    global _num_forks
    _num_forks += 1


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_count_fork)


def result_of(job: Future) -> Any:
    """Wait for a job of the comm stream: its result.

    Raises:
        BaseException: A copy of what the job raised. The job may be kept for long, and an error that is raised keeps
            the frames that it passes through, with all tensors in them.
    """
    error = job.exception()
    if error is None:
        return job.result()
    copied = type(error).__new__(type(error), *error.args)
    copied.args = error.args
    copied.__dict__.update(error.__dict__)
    raise copied.with_traceback(error.__traceback__) from error.__cause__


class EventHandle:
    """A point in a stream. `EventHandle()` marks everything the caller has issued so far.

    Args:
        completion: The job of the comm stream that must be done, or the CUDA event that must be reached; None: what
            the caller's CUDA stream holds now, if there is one.
    """

    def __init__(self, completion: Future | torch.cuda.Event | None = None):
        if completion is None and torch.cuda.is_initialized():
            completion = torch.cuda.current_stream().record_event()
        self.completion = completion
        self._num_forks = _num_forks

    def current_stream_wait(self) -> None:
        """Make the caller's stream wait for this point (on the CPU: block), and raise what failed before it."""
        if isinstance(self.completion, Future):
            if self._num_forks != _num_forks and not self.query():
                raise EPClosed(
                    "EventOverlap: the call had not completed when this process was forked from its rank, and the "
                    "thread that completes it does not exist here. Wait for events before the fork, or start processes "
                    "with 'spawn' or 'forkserver'"
                )
            result_of(self.completion)
        elif self.completion is not None:
            torch.cuda.current_stream().wait_event(self.completion)

    def query(self) -> bool:
        """Whether the point has been reached."""
        if isinstance(self.completion, Future):
            if self._num_forks != _num_forks:  # a thread of the parent may have held its lock
                self.completion._condition = threading.Condition()
            return self.completion.done()
        return self.completion is None or self.completion.query()


class EventOverlap:
    """An event (or none, after a synchronous call) in the shape DeepEP's callers know.

    Args:
        event: The event; `None` says that the call was synchronous and there is nothing to wait for.
        extra_tensors: Tensors to keep alive until the event has been waited for.
    """

    hook_after_wait: Callable[[], None] | None = None
    _release_on_exit = False

    def __init__(self, event: EventHandle | None = None, extra_tensors: tuple[Any, ...] | None = None):
        self.event = event
        self.extra_tensors = extra_tensors

    def current_stream_wait(self, release_handle: bool = False) -> None:
        """Wait on the caller's stream, then run the registered hook once.

        Args:
            release_handle: Forget the event afterwards.
        """
        assert self.event is not None, "EventOverlap: nothing to wait for, the call was synchronous"
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if hook is not None:
            hook()
        if release_handle:
            self.event = None

    def register_hook_after_wait(self, hook: Callable[[], None]) -> None:
        """Have `hook` called once, after the next wait."""
        assert self.hook_after_wait is None, "EventOverlap: a hook is already registered"
        self.hook_after_wait = hook

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        """`with event(release_handle=True):` forgets the event when the block ends."""
        self._release_on_exit = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        release, self._release_on_exit = self._release_on_exit, False
        if self.event is not None:
            self.current_stream_wait(release_handle=release)


def event_of(event: EventOverlap | EventHandle | None) -> EventHandle | None:
    """The raw event inside whatever a caller passes as `previous_event`; `None` counts as "not given"."""
    return event.event if isinstance(event, EventOverlap) else event
