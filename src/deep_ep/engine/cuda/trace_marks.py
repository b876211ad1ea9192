"""Calls of a GPU in a trace: when the device reached each step.

The host puts marks into the stream and goes on; once the device has passed them, they are recorded. Calls that are
captured in a graph are not marked, and so neither are their replays.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ...stream import LaunchStream, Mark
from ...trace import CALL, DEVICE, RECEIVE, SEND, WAIT, Slice, Trace

_KINDS = {"put": SEND, "send": SEND}  # those that are in neither list wait for peers
_KINDS |= dict.fromkeys(("pull", "receive", "forward", "sum"), RECEIVE)


class _Marked:
    """A call that was launched: its steps, each with where it begins, and what is to be shown with it."""

    def __init__(self, operation: str):
        self.operation = operation
        self.steps: list[tuple[str, Mark]] = []
        self.args: dict[str, Any] = {}
        self.rows: dict[str, torch.Tensor] = {}


class TraceMarks:
    """The calls of a buffer that were launched and not yet recorded.

    Args:
        trace: Where they go.
        stream: Where they are launched.
    """

    def __init__(self, trace: Trace, stream: LaunchStream):
        self._trace = trace
        self._stream = stream
        self._open: _Marked | None = None
        self._launched: deque[_Marked] = deque()
        with stream.on_device():
            stream.mark()  # the first one waits for the stream, which has nothing to do yet

    @property
    def is_open(self) -> bool:
        """Return whether a call is being marked."""
        return self._open is not None

    def host_wait(self, name: str) -> Slice:
        """Return a context manager that records its block as a slice in which the host waits."""
        return self._trace.caller_slice(name, WAIT)

    @contextmanager
    def call(self, operation: str) -> Iterator[None]:
        """A context manager around the launches of a call, inside the stream."""
        if not self._stream.can_mark():
            yield  # in a capture not even a look at earlier events is allowed
            return
        self.record()
        self._open = _Marked(operation)
        self.step("begin")
        try:
            yield
            self.step("end")
            self._launched.append(self._open)
        finally:
            self._open = None

    def step(self, name: str) -> None:
        """Mark that a step of the call is launched from here on."""
        if self._open is not None:
            self._open.steps.append((name, self._stream.mark()))

    def note(self, **args: Any) -> None:
        """Attach facts to the call in the trace."""
        if self._open is not None:
            self._open.args.update(args)

    def note_rows(self, **rows: torch.Tensor) -> None:
        """Attach row counts for each rank, [R] on the device, to the call in the trace.

        They are copied in stream order.
        """
        if self._open is not None:
            for name, counts in rows.items():
                pinned = torch.empty(counts.shape, dtype=counts.dtype, device="cpu", pin_memory=counts.is_cuda)
                self._open.rows[name] = pinned.copy_(counts, non_blocking=True)

    def record(self) -> None:
        """Record the calls that the device has finished. Does not wait."""
        while self._launched and self._launched[0].steps[-1][1].reached_ns() is not None:
            marked = self._launched.popleft()
            times = [mark.reached_ns() or 0 for _, mark in marked.steps]
            rows = {name: counts.tolist() for name, counts in marked.rows.items()}
            args = {**marked.args, **rows}
            self._trace.record(marked.operation, CALL, times[0], times[-1], DEVICE, args)
            for (name, _), begin, end in zip(marked.steps, times, times[1:], strict=False):
                if name != "begin":
                    self._trace.record(name, _KINDS.get(name, WAIT), begin, end, DEVICE, {})
