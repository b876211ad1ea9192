"""What random calls leave for later ones: handles, results that must not change, and checks that wait for an event."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...buffers.elastic import ElasticBuffer, EPHandle
from ...buffers.legacy import Buffer
from ...errors import EPError
from ...event import EventOverlap
from .checks import Mismatch, same
from .data import Data, Limits
from .program import ProgramCall

_TIMEOUT_SECS = 5.0
_MOST_CALLS_LATER = 5  # an asynchronous call is checked at most so many calls later
_MOST_CALLS_KEPT = 12  # a result is watched for at most so many calls


@dataclass
class KnownDispatch:
    """A dispatch that later calls go back to.

    Attributes:
        handle: Its handle on this rank.
        masks: By rank: [T, R] bool, where its tokens went.
        num_rows: By rank: rows of the handle, worst-case room included.
        sent: [T, H], the rows that this rank sent.
        recv_x: The rows that this rank received, while they are as they came.
        is_settled: Whether it has ended: its handle is filled.
    """

    handle: tuple
    masks: list[torch.Tensor]
    num_rows: list[int]
    sent: torch.Tensor
    recv_x: torch.Tensor | None
    is_settled: bool = False


@dataclass
class KnownElastic:
    """A dispatch of an `ElasticBuffer` that later calls go back to.

    Attributes:
        handle: Its handle on this rank.
        ids: By rank: [T, K].
        num_experts: E.
        alignment: To which the rows of an expert are rounded up.
        is_expanded: A row for each selection.
        num_rows: Rows that a combine takes: of the handle, worst-case room included.
    """

    handle: EPHandle
    ids: list[torch.Tensor]
    num_experts: int
    alignment: int
    is_expanded: bool
    num_rows: int


@dataclass
class SoakReport:
    """What random calls did.

    Attributes:
        calls: By kind.
        stats: As `Buffer.stats` has it, of the last buffer.
        past_stats: The same of those before it.
    """

    calls: Counter[str] = field(default_factory=Counter)
    stats: dict[str, Any] = field(default_factory=dict)
    past_stats: list[dict[str, Any]] = field(default_factory=list)


class _Pending(NamedTuple):
    """An asynchronous call: when and how to wait for it, and what to do then."""

    due: int
    event: EventOverlap
    way: str
    check: Callable[[], None]


class _Watched(NamedTuple):
    """A result that must stay as it is until it is dropped."""

    until: int
    name: str
    result: torch.Tensor
    snapshot: torch.Tensor


def is_direct(buffer: Buffer) -> bool:
    """Whether the engine of a buffer is that of CPU ranks, without kernels."""
    return buffer.device.type == "cpu" and "interpreted" not in buffer.transport


class State:
    """A buffer, and everything that outlives a call.

    Args:
        buffer: This rank's buffer.
        seed: Of the segment.
        limits: How large calls are.
        make_buffer: Makes another one, on all ranks, where a call has been left by an exception; None: it cannot be.

    Attributes:
        has_relays: Kernels relay rows between nodes.
        known: Dispatches by the number of their call.
        known_elastic: Those of an `ElasticBuffer`, likewise.
        fault: Told of fault points of the soak's own.
        barrier: Waits until all ranks are there, outside of the buffer.
    """

    def __init__(self, buffer: Buffer, seed: int, limits: Limits, make_buffer: Callable[[], Buffer] | None = None):
        self.buffer = buffer
        self.rank = buffer.rank
        self.num_ranks = buffer.group_size
        self.num_nodes = buffer.runtime.get_num_rdma_ranks() if buffer.runtime is not None else 1
        self.has_relays = self.num_nodes > 1 and not is_direct(buffer)
        self.limits = limits
        self.call = ProgramCall(0, "")
        self.report = SoakReport()
        self.known: dict[int, KnownDispatch] = {}
        self.known_elastic: dict[int, KnownElastic] = {}
        self.fault: Callable[[str], None] = lambda point: None  # noqa: ARG005 - nothing happens unless asked for
        self.barrier: Callable[[], object] = dist.barrier
        self.make_buffer = make_buffer
        self._seed = seed
        self._watched: list[_Watched] = []
        self._pending: deque[_Pending] = deque()

    def data(self, call: ProgramCall) -> Data:
        """The data of a call."""
        return Data(self._seed, call.number, self.num_ranks, self.num_nodes, self.limits)

    def elastic(self, has_multiple_reduction: bool = True) -> ElasticBuffer:
        """An `ElasticBuffer` over the buffer."""
        return ElasticBuffer.from_buffer(self.buffer, allow_multiple_reduction=has_multiple_reduction)

    # Streams and events ----------------------------------------------------------------------------------------------

    def stream_arguments(self, draw: random.Random, after: EventOverlap | None = None) -> dict[str, Any]:
        """The arguments about events and streams.

        Args:
            draw: Decides.
            after: An event that must come first; None: there is none.
        """
        is_async, has_event = draw.random() < 0.5, draw.random() < 0.5
        event = after
        if after is None and has_event:
            event = self._pending[-1].event if self._pending else Buffer.capture()
        return {
            "async_finish": is_async,
            "previous_event": event,
            "allocate_on_comm_stream": event is not None and is_async and draw.random() < 0.5,
        }

    def made(
        self, draw: random.Random, event: EventOverlap, check: Callable[[], None], results: dict[str, torch.Tensor]
    ) -> None:
        """Check a call: now, or, if it is asynchronous, some calls later. Perhaps watch its results from then on.

        Args:
            draw: Decides how long.
            event: Of the call.
            check: Raises if a result is wrong.
            results: By name.
        """
        call, kept_calls = self.call, draw.randint(0, _MOST_CALLS_KEPT)
        way = draw.choice(("once", "once", "twice", "another thread", "with", "check"))
        due = call.number + draw.randint(0, _MOST_CALLS_LATER)

        def finish() -> None:
            try:
                check()
            except Mismatch as error:
                raise Mismatch(f"call {call.number} ({call.kind}): {error}") from None
            for name, result in results.items() if kept_calls else ():
                part = result[::2].view(torch.uint8)  # a copy of other dtypes need not have their bits
                until = self.call.number + kept_calls
                self._watched.append(_Watched(until, f"{name} of call {call.number}", part, part.clone()))

        if event.event is None:
            finish()
        else:
            self._pending.append(_Pending(due, event, way, finish))

    def forget(self, result: torch.Tensor) -> None:
        """Watch a result no longer: it is about to be overwritten."""
        address = result.data_ptr()
        self._watched = [one for one in self._watched if one.result.data_ptr() != address]

    def settle(self, until: int | None = None) -> None:
        """Wait for the calls that are due, and check them; None: for all."""
        while self._pending and (until is None or self._pending[0].due <= until):
            one = self._pending.popleft()
            _wait(self.buffer, one.event, one.way)
            one.check()

    # Between calls ---------------------------------------------------------------------------------------------------

    def go_on(self, call: ProgramCall, needed: set[int]) -> None:
        """Before a call: check what is due, and drop what nobody needs any more.

        Args:
            call: The call.
            needed: Numbers of the dispatches that it and later calls go back to.
        """
        self.settle(call.number)
        self.call = call
        self._look_at_watched(call.number)
        self.known = {number: one for number, one in self.known.items() if number in needed}
        self.known_elastic = {number: one for number, one in self.known_elastic.items() if number in needed}
        if self.data(call).draw.random() < 0.02:
            self.buffer.trim()

    def _look_at_watched(self, number: int | None = None) -> None:
        """Look at watched results, and drop them, up to a number; None: all."""
        for one in [one for one in self._watched if number is None or one.until <= number]:
            same(f"{one.name}, looked at again before call {self.call.number}", one.result, one.snapshot)
            self._watched.remove(one)

    def renew(self) -> None:
        """Leave a buffer that has failed, and make another."""
        assert self.make_buffer is not None
        for one in self._pending:
            one.event.event = None
        self._pending.clear()
        self._look_at_watched()
        self.known.clear()
        self.known_elastic.clear()
        self.buffer.destroy()
        self.buffer = self.make_buffer()

    def finish(self) -> None:
        """Do the checks that wait, drop what is kept, and check that the arena is empty."""
        self.settle()
        self._look_at_watched()
        self.known.clear()
        self.known_elastic.clear()
        deadline = time.monotonic() + _TIMEOUT_SECS
        while True:
            gc.collect()
            self.report.stats = self.buffer.stats()
            # The comm stream drops what a job held a moment after its event.
            if not self.report.stats["arena"]["used"] or time.monotonic() > deadline:
                break
            time.sleep(0.005)
        if self.report.stats["arena"]["used"]:
            raise Mismatch(f"the arena still holds {self.report.stats['arena']}")


def _wait(buffer: Buffer, event: EventOverlap, way: str) -> None:
    """Wait for an event in one of the ways that callers have."""
    if way == "with":
        with event:
            pass
    elif way == "another thread":
        _wait_elsewhere(buffer, event)
        event.current_stream_wait()
    elif way == "check":
        buffer.check()
        event.current_stream_wait()
    else:
        for _ in range(2 if way == "twice" else 1):
            event.current_stream_wait()


def _wait_elsewhere(buffer: Buffer, event: EventOverlap) -> None:
    errors: list[BaseException] = []

    def wait() -> None:
        try:
            if buffer.device.type == "cuda":
                torch.cuda.set_device(buffer.device)
            event.current_stream_wait()
        except EPError as error:
            errors.append(error)

    thread = threading.Thread(target=wait, name="soak waits")
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
