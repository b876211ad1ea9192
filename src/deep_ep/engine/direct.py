"""The one-hop engine: dispatch and combine among ranks that address each other's memory.

Each method runs the communication on the comm stream and returns what the caller gets; if the call is asynchronous,
with the job that fills it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TypeVar

import torch

from ..errors import EPOverflow
from ..event import EventHandle
from ..handle import Handle, check_rows
from ..stream import CommStream
from ..transport import Window
from .call import Chain
from .combine import Combine, Combined
from .dispatch import Dispatch
from .parcel import Payload, Received, Routing

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
    """

    def __init__(self, window: Window, stream: CommStream):
        self.window = window
        self.stream = stream
        self.chain = Chain(window)

    def dispatch(
        self, payload: Payload, routing: Routing, num_channels: int, order: Order
    ) -> tuple[Received, list[int], Future | None]:
        """A full dispatch. Blocks until the counts are known, also if it is asynchronous.

        Returns:
            What is received, the selections of each local expert, and the job that moves the rows.
        """
        dispatch = Dispatch(self.chain, payload, routing, num_channels=num_channels)
        try:
            num_rows, expert_counts = self.stream.run(lambda: order.begin(dispatch.exchange_counts))
            received = dispatch.make_room(num_rows)
            return received, expert_counts, self._call(Order(None, order.is_async), dispatch.move_rows)
        except BaseException as error:
            # Half a call must not be followed by the next: peers would take its signals for this one's.
            dispatch.abandon(error)
            raise

    def worst_case_dispatch(
        self, payload: Payload, routing: Routing, num_rows: int, num_channels: int, order: Order
    ) -> tuple[Received, Future | None]:
        """A dispatch into room for `num_rows` rows, without waiting for counts."""
        dispatch = Dispatch(self.chain, payload, routing, num_worst_tokens=num_rows, num_channels=num_channels)
        if order.is_due():
            dispatch.check_counts()
        received = dispatch.make_room(num_rows)
        return received, self._call(order, dispatch.move_rows)

    def cached_dispatch(self, payload: Payload, handle: Handle, order: Order) -> tuple[Received, Future | None]:
        """A dispatch along the slots of an earlier one."""
        self._check_handle(handle, order, "dispatch")
        dispatch = Dispatch(self.chain, payload, handle=handle)
        received = dispatch.make_room(handle.num_rows)
        return received, self._call(order, dispatch.move_rows)

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None,
        biases: Sequence[torch.Tensor],
        order: Order,
    ) -> tuple[Combined, Future | None]:
        """A combine along the slots of an earlier dispatch."""
        self._check_handle(handle, order, "combine")
        combine = Combine(self.chain, x, handle, topk_weights, biases)
        combined = combine.make_room()
        return combined, self._call(order, combine.sum_rows)

    def _check_handle(self, handle: Handle, order: Order, where: str) -> None:
        """Look into a handle, unless the dispatch that fills it may still be under way."""
        if self.stream.query() and order.is_due():
            check_rows(handle, self.window.rank, where)

    def _call(self, order: Order, work: Callable[[], None]) -> Future | None:
        """Make a whole call: queue it, or, if it is synchronous, wait for it.

        If it fails, even before it is announced, the calls queued behind it cannot match the peers'.
        """

        def contagious() -> None:
            try:
                order.begin(work)
            except EPOverflow:
                raise
            except BaseException as error:
                self.window.fail(f"{type(error).__name__}: {error}")
                raise

        if order.is_async:
            return self.stream.submit(contagious)
        self.stream.run(contagious)
        return None
