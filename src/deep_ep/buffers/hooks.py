"""The receive hooks of low-latency calls, and the warning of one that is dropped without having been called."""

from __future__ import annotations

import sys
import warnings
from functools import partial
from typing import TYPE_CHECKING
from weakref import ReferenceType, ref

from .. import reaper

if TYPE_CHECKING:
    from ..engine.low_latency.calls import Hook
    from .low_latency import LowLatencyMethods


class RecvHook:
    """A function without arguments that receives what a call has sent. It is called once.

    It keeps its buffer alive. A hook that is collected without having been called leaves a call in flight for ever,
    which a warning says, unless the buffer went with it, was destroyed, has failed, or gave the call up.

    Args:
        buffer: The buffer of the call.
        receive: The hook of the engine.
        method: The method that returns the hook.
        is_watched: Whether it should be called at all; those of a graph that is being captured need not be.

    Attributes:
        pending: Has one item until the call is received. Handles have it, too, and not the hook, which must not outlive
            its last reference.
    """

    __slots__ = ("_buffer", "_is_watched", "_num_cleans", "_receive", "pending")

    def __init__(self, buffer: LowLatencyMethods, receive: Hook, method: str, is_watched: bool):
        self._buffer: LowLatencyMethods | None = buffer
        self._receive = receive
        self._num_cleans = buffer._num_cleans
        self._is_watched = is_watched
        self.pending = [method]

    def __call__(self) -> None:
        """Receive what the call has sent."""
        buffer = self._buffer
        assert buffer is not None
        lock, trace = buffer._lock, buffer._trace
        # Where nothing is traced the lock is taken twice: of all blocks that do nothing, the quickest.
        with lock, lock if trace is None else trace.caller_slice("receive hook"):
            if buffer.runtime is None:
                buffer._require_engine("low-latency hook")  # raises: what is not mapped yet cannot be read any more
            self._receive()
        # Not before: of a call that was given up, or has failed, nothing was received.
        self.pending.clear()

    def __del__(self) -> None:
        # As any finalizer it may run between any two instructions: it asks nothing and hands over, see `reaper.py`.
        pending = getattr(self, "pending", ())
        if not (pending and self._is_watched) or sys.is_finalizing() or sys.exc_info()[1] is not None:
            return
        assert self._buffer is not None
        buffer, self._buffer = ref(self._buffer), None
        if buffer() is not None:  # else the buffer has gone with its last hook
            reaper.hand_over(partial(_warn_of_dropped, buffer, pending[0], self._num_cleans))


def _warn_of_dropped(buffer: ReferenceType[LowLatencyMethods], method: str, num_cleans: int) -> None:
    """Warn of a hook that was collected uncalled, if the call could still be received. Runs on the reaper's thread."""
    found = buffer()
    # Of a buffer that is collected together with its hook there may be nothing left but the object.
    left = {} if found is None else dict(vars(found))
    if left.get("runtime") is None or left["_engine"].has_failed():
        return
    if left.get("_num_cleans", 0) != num_cleans:  # `clean_low_latency_buffer` gives up what is in flight
        return
    warnings.warn(
        f"{method}: the hook that it returned was dropped without having been called, so its results never "
        f"arrive and the call stays in flight (rank {left['rank']}/{left['group_size']}). Call each hook once; "
        "without `return_recv_hook` the method receives by itself",
        RuntimeWarning,
        stacklevel=1,
    )
