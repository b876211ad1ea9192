"""The one-hop engine: dispatch and combine among ranks that address each other's memory.

Each method runs the communication on the comm stream and returns what the caller gets; if the call is asynchronous,
with the event that says when it is filled. `num_sms` is for GPUs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from .. import layout
from ..config import Config
from ..errors import EPClosed, EPOverflow, account
from ..event import EventHandle
from ..handle import Handle, check_rows, is_refused
from ..stream import CommStream
from ..trace import Trace
from ..transport import Window, ordinary_tensor
from .call import LOW_LATENCY, Chain, is_refusal
from .combine import Combine, Combined
from .dispatch import Dispatch
from .low_latency.calls import operation_of
from .low_latency.direct import DirectLowLatency
from .parcel import Payload, Received, Routing, apart

T = TypeVar("T")


@dataclass(frozen=True)
class Order:
    """How a call stands to the caller's stream.

    Attributes:
        after: What the call waits for on the comm stream; None: nothing.
        is_async: The caller does not wait for the call.
    """

    after: EventHandle | None
    is_async: bool

    def is_due(self) -> bool:
        """Whether there is nothing to wait for any more."""
        return self.after is None or self.after.query()

    def begin(self, work: Callable[[], T]) -> T:
        """On the comm stream: wait, then do the work."""
        if self.after is not None:
            self.after.current_stream_wait()
        return work()


class DirectEngine:
    """Dispatch and combine over one window.

    Args:
        window: The window.
        stream: Where communication runs.

    Attributes:
        low_latency: Low-latency calls; None: the buffer has no memory for them.
    """

    low_latency: DirectLowLatency | None = None
    why_no_low_latency = ""  # they can be made wherever there is memory for them

    def __init__(self, window: Window, stream: CommStream):
        self.window = window
        self.stream = stream
        self.chain = Chain(window)

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, num_nodes: int, order: Order
    ) -> tuple[layout.DispatchLayout, EventHandle | None]:
        """Count where this rank's tokens go. Local: it is queued only behind an event that is still to come."""
        return count_layout(self.stream, topk_idx, num_experts, len(self.window.peers), num_nodes, order)

    def dispatch(
        self, payload: Payload, routing: Routing, num_channels: int, order: Order, num_sms: int | None = None
    ) -> tuple[Received, list[int], EventHandle | None]:
        """A full dispatch. Blocks until the counts are known, also if it is asynchronous.

        Returns:
            What is received, the selections of each local expert, and the job that moves the rows.
        """
        dispatch = self._new_dispatch(payload, routing, num_channels=num_channels)
        with self._calling(dispatch):
            begin = partial(self._begin, order, dispatch, dispatch.exchange_counts)
            num_rows, expert_counts = self._run(dispatch, begin)
            received = dispatch.make_room(num_rows, order.is_async)
            return received, expert_counts, self._call(Order(None, order.is_async), dispatch, dispatch.move_rows)

    def worst_case_dispatch(
        self,
        payload: Payload,
        routing: Routing,
        num_rows: int,
        num_channels: int,
        order: Order,
        num_sms: int | None = None,
    ) -> tuple[Received, EventHandle | None]:
        """A dispatch into room for `num_rows` rows, without waiting for counts."""
        dispatch = self._new_dispatch(payload, routing, num_worst_tokens=num_rows, num_channels=num_channels)
        with self._calling(dispatch):
            if order.is_due():
                dispatch.check_counts()
            received = dispatch.make_room(num_rows, order.is_async)
            return received, self._call(order, dispatch, dispatch.move_rows)

    def cached_dispatch(
        self, payload: Payload, handle: Handle, order: Order, num_sms: int | None = None
    ) -> tuple[Received, EventHandle | None]:
        """A dispatch along the slots of an earlier one."""
        dispatch = self._new_dispatch(payload, handle=handle)
        with self._calling(dispatch):
            self._check_handle(handle, order, "dispatch")
            received = dispatch.make_room(handle.num_rows, order.is_async)
            return received, self._call(order, dispatch, dispatch.move_rows)

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None,
        biases: Sequence[torch.Tensor],
        order: Order,
        num_sms: int | None = None,
    ) -> tuple[Combined, EventHandle | None]:
        """A combine along the slots of an earlier dispatch."""
        combine = self._new_combine(x, handle, topk_weights, biases)
        with self._calling(combine):
            self._check_handle(handle, order, "combine")
            combined = combine.make_room(order.is_async)
            return combined, self._call(order, combine, combine.sum_rows)

    # Beside the calls ------------------------------------------------------------------------------------------------

    def start_trace(self, trace: Trace) -> None:
        """Record calls from now on."""
        self.window.trace = self.chain.stats.trace = trace

    def require_working(self) -> None:
        """Refuse to go on after a failure."""
        self.chain.require_working()

    def expect_call(self) -> None:
        """A call will be made, or left by an exception, of which `leave` is told."""
        self.chain.is_calling = False

    def leave(self, error: BaseException, method: str) -> None:
        """Say to the peers that an exception has ended a call, unless the engine has done so already.

        Args:
            error: The exception.
            method: The call, as its caller knows it.
        """
        if self.chain.is_calling or isinstance(error, EPClosed) or self.window.failure is not None:
            return
        # Nothing was begun: also a caller that was interrupted may make the call after all.
        if operation_of(method).startswith(LOW_LATENCY) and self.low_latency is not None:
            self.low_latency.refuse(account(error))
        else:
            self.stream.run_in_turn(partial(self.chain.refuse, account(error)))

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in the window; in ordinary memory where the arena has no room."""
        region = self.window.arena.allocate(shape, dtype)
        return region if region is not None else ordinary_tensor(shape, dtype)

    def local_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        """Bytes of the raw buffer, free for the caller between calls."""
        return self.window.scratch_bytes(start, num_bytes)

    def trim(self) -> int:
        """Give memory that nobody uses back to the system. Returns the bytes given back."""
        results = self.low_latency.trim() if self.low_latency is not None else 0
        return self.window.arena.trim() + self.chain.results.trim() + results

    def numbers(self) -> dict[str, Any]:
        """What was counted so far."""
        return {
            **self.chain.stats.numbers(),
            "wait_secs": [peer.wait_secs for peer in self.window.peers],
            "arena": self.window.arena.num_bytes(),
        }

    def record_stream(self, tensor: torch.Tensor, stream: object) -> None:
        """The CPU has no streams but the caller's thread."""

    def release_graphs(self) -> None:
        """The CPU has no graphs."""

    def synchronize(self) -> None:
        """Wait for everything that was queued."""
        self.stream.synchronize()

    def stop(self) -> None:
        """Let what is queued finish, and close."""
        self.stream.stop()
        self.window.close()

    def forget(self) -> None:
        """Close a buffer that nobody has destroyed, when what is queued has finished. Only the reaper calls it."""
        self.stop()

    def has_failed(self) -> bool:
        """Whether a call has failed, on this rank or on another."""
        return self.window.failure is not None

    def abandon(self, cause: str) -> None:
        """Tell all peers that this rank has left, and why. Waits for nothing: what is queued fails by itself.

        Args:
            cause: As it follows the rank in a sentence.
        """
        self.window.fail(cause)  # ranks of this node see it at once
        with suppress(RuntimeError):  # the thread has ended: nothing is queued, and nobody waits for it
            self.stream.submit(self.chain.tell_failure)  # links are the comm stream's alone

    def tune(self, config: Config | None) -> None:
        """Take the chunks of the next call from a config. One hop has none."""

    # What the engine across nodes has in another form

    def _new_dispatch(
        self,
        payload: Payload,
        routing: Routing | None = None,
        handle: Any = None,
        num_worst_tokens: int = 0,
        num_channels: int = 1,
    ) -> Dispatch:
        return Dispatch(self.chain, payload, routing, handle, num_worst_tokens, num_channels)

    def _new_combine(
        self, x: torch.Tensor, handle: Any, topk_weights: torch.Tensor | None, biases: Sequence[torch.Tensor]
    ) -> Combine:
        return Combine(self.chain, x, handle, topk_weights, biases)

    def _check_rows(self, handle: Any, where: str) -> None:
        check_rows(handle, self.window.rank, where)

    def _check_handle(self, handle: Handle, order: Order, where: str) -> None:
        """Look into a handle, unless the dispatch that fills it may still be under way, or has been refused."""
        if self.stream.query() and order.is_due() and not is_refused(handle):
            self._check_rows(handle, where)

    @contextmanager
    def _calling(self, half: Dispatch | Combine) -> Iterator[None]:
        """Around a call. Whatever exception leaves it, at whatever point, the call has ended, or was refused or failed.

        Half a call must not be followed by the next: peers would take its signals for this one's.
        """
        self.chain.is_calling = True
        try:
            yield
        except BaseException as error:
            if half.is_complete or self.window.failure is not None:
                pass
            elif half.is_foreign:
                self.stream.run_in_turn(partial(self.chain.fail, error, None, is_foreign=True))
            elif half.is_cancelled or (not half.is_begun and is_refusal(error)):
                self.stream.run_in_turn(partial(self.chain.refuse, account(error)))
            elif self.stream.query():
                self.chain.fail(error, half.call)
            else:
                self._abandon(error, half)
            raise

    def _call(self, order: Order, half: Dispatch | Combine, work: Callable[[], None]) -> EventHandle | None:
        """Make a call to its end: queue it, or, if it is synchronous, wait for it."""

        def make() -> None:
            self._begin(order, half, work)
            half.is_complete = True

        def queued() -> None:
            try:
                make()
            except BaseException as error:
                # All ranks refuse what is behind an overflow alike. After other mistakes the calls that are queued
                # behind this one cannot match the peers'.
                if isinstance(error, EPOverflow) and not half.is_begun and not half.is_foreign:
                    self.chain.refuse(account(error))
                else:
                    self.chain.fail(error, half.call, is_foreign=half.is_foreign)
                raise

        if order.is_async:
            return EventHandle(self.stream.submit(queued))
        self._run(half, make)
        return None

    def _begin(self, order: Order, half: Dispatch | Combine, work: Callable[[], T]) -> T:
        """On the comm stream: wait for what the call comes after, then do its work."""
        half.is_cancelled = False
        if order.after is not None:
            try:
                order.after.current_stream_wait()
            except BaseException:
                half.is_foreign = not self.stream.has_made(order.after)
                raise
        return work()

    def _run(self, half: Dispatch | Combine, work: Callable[[], T]) -> T:
        """Have work of a call done on the comm stream, and wait for it. If the wait is interrupted, the call fails."""
        half.is_cancelled = not half.is_begun and not self.stream.query()  # unless it begins
        return self.stream.run(work, on_abandon=lambda error: self._abandon(error, half))

    def _abandon(self, error: BaseException, half: Dispatch | Combine) -> bool:
        """Fail a call that the comm stream may be in the middle of.

        Returns:
            Whether the caller must not go on before the comm stream has left the call, which it does at its next wait.
        """
        half.is_cancelled = False
        self.chain.give_up(error, half.call)
        with suppress(RuntimeError):  # the thread has ended, and has told everybody that this rank leaves
            self.stream.submit(self.chain.tell_failure)  # links are the comm stream's alone
        # Inside a node, who reads what the caller overwrites now looks at `failed` behind it. Other nodes cannot look:
        # what leaves for them must be right. Before the call is begun nothing leaves.
        return self.chain.is_told_late and half.is_begun


def count_layout(
    stream: CommStream | None, topk_idx: torch.Tensor, num_experts: int, num_ranks: int, num_nodes: int, order: Order
) -> tuple[layout.DispatchLayout, EventHandle | None]:
    """The layout now, or, if the event before it is still to come, on the comm stream (if there is one)."""
    sizes = (num_experts, num_ranks, num_ranks // num_nodes)
    if stream is not None and order.is_async and not order.is_due():
        counts = layout.dispatch_layout(torch.empty_like(topk_idx).fill_(-1), *sizes)
        written = apart(counts)

        def fill() -> None:
            for target, source in zip(written, layout.dispatch_layout(topk_idx, *sizes), strict=True):
                target.copy_(source)

        return counts, EventHandle(stream.submit(lambda: order.begin(fill)))
    if order.after is not None:
        order.after.current_stream_wait()
    return layout.dispatch_layout(topk_idx, *sizes), EventHandle() if order.is_async else None
