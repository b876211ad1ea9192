"""What random calls leave for later ones: handles, kept results, and checks that wait for an event."""

from __future__ import annotations

import gc
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..buffers.legacy import Buffer
from ..event import EventOverlap
from .checks import Mismatch
from .inputs import Inputs

_PATIENCE_SECS = 5.0


@dataclass
class Dispatched:
    """A dispatch that later calls can refer to: its handle here, and what the oracle knows of all ranks."""

    handle: tuple
    masks: list[torch.Tensor]
    num_rows: list[int]  # rows of the handle on every rank, worst-case room included
    recv_x: torch.Tensor | None  # this rank's rows, while it still holds them
    rows: list[torch.Tensor]  # every rank's rows, as the oracle has them


@dataclass
class Report:
    """What random calls did."""

    calls: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)

    def count(self, kind: str) -> None:
        """Count one call."""
        self.calls[kind] = self.calls.get(kind, 0) + 1


class State:
    """A buffer, where the inputs come from, and everything that outlives a call.

    Args:
        buffer: This rank's buffer.
        inputs: The same on all ranks.
    """

    def __init__(self, buffer: Buffer, inputs: Inputs):
        self.buffer = buffer
        self.rank = buffer.rank
        self.num_nodes = buffer.runtime.get_num_rdma_ranks() if buffer.runtime is not None else 1
        self.inputs = inputs
        self.draw = inputs.draw
        self.report = Report()
        self.known: list[Dispatched] = []
        self.disturb: Callable[[str], None] = lambda point: None  # noqa: ARG005 - nothing is disturbed unless asked for
        self._kept: list[torch.Tensor] = []
        self._pending: deque[tuple[EventOverlap, Callable[[], None]]] = deque()

    @property
    def has_pending(self) -> bool:
        """Whether a check is still to come."""
        return bool(self._pending)

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy of an input on the buffer's device, with its strides."""
        return tensor.to(self.buffer.device, copy=True)

    def sent_biases(self, biases: Any) -> Any:
        """The same for biases, in whatever form they are."""
        if isinstance(biases, tuple):
            return tuple(None if one is None else self.sent(one) for one in biases)
        return self.sent(biases)

    def stream_arguments(self) -> dict[str, Any]:
        """The arguments about events and streams."""
        async_finish = self.draw.random() < 0.5
        previous = self.draw.random() < 0.5
        event = None
        if previous:
            event = self._pending[-1][0] if self._pending else Buffer.capture()
        return {
            "async_finish": async_finish,
            "previous_event": event,
            "allocate_on_comm_stream": previous and async_finish and self.draw.random() < 0.5,
        }

    def made(self, kind: str, event: EventOverlap, check: Callable[[], None], result: torch.Tensor) -> None:
        """Count a call and check it: now, or, if it was asynchronous, some calls later. Perhaps keep its result."""
        self.report.count(kind)
        where = f"call {self.inputs.call_idx} ({kind})"

        def check_named() -> None:
            try:
                check()
            except Mismatch as error:
                raise Mismatch(f"{where}: {error}") from None

        if self.draw.random() < 0.5:
            self._kept.append(result[::2])
        if event.event is None:
            check_named()
        else:
            self._pending.append((event, check_named))

    def drop_some(self) -> None:
        """Do some of the checks that wait, forget some handles and results, and perhaps trim."""
        while self._pending and self.draw.random() < 0.6:
            self._settle()
        while len(self.known) > 4 or (self.known and self.draw.random() < 0.2):
            self.known.pop(self.draw.randrange(len(self.known)))
        while len(self._kept) > 8 or (self._kept and self.draw.random() < 0.3):
            self._kept.pop(self.draw.randrange(len(self._kept)))
        if self.draw.random() < 0.02:
            self.buffer.trim()

    def finish(self) -> None:
        """Do the checks that wait, drop what is kept, and check that the arena is empty."""
        while self._pending:
            self._settle()
        self.known.clear()
        self._kept.clear()
        deadline = time.monotonic() + _PATIENCE_SECS
        while True:
            gc.collect()
            self.report.stats = self.buffer.stats()
            # The comm stream drops what a job held a moment after its event.
            if not self.report.stats["arena"]["used"] or time.monotonic() > deadline:
                break
            time.sleep(0.005)
        if self.report.stats["arena"]["used"]:
            raise Mismatch(f"the arena still holds {self.report.stats['arena']}")

    def _settle(self) -> None:
        event, check = self._pending.popleft()
        event.current_stream_wait()
        check()
