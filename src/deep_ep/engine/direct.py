"""The one-hop engine: dispatch and combine among ranks that address each other's memory.

Each method queues the communication on the comm stream and returns what the caller gets, with the job that fills it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

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
        self, payload: Payload, routing: Routing, num_channels: int, after: EventHandle | None
    ) -> tuple[Received, list[int], Future]:
        """A full dispatch. Blocks until the counts are known; the rows move on the comm stream.

        Returns:
            What is received, the selections of each local expert, and the job that moves the rows.
        """
        dispatch = Dispatch(self.chain, payload, routing, num_channels=num_channels)
        try:
            num_rows, expert_counts = self.stream.submit(lambda: _after(after, dispatch.exchange_counts)).result()
            received = dispatch.make_room(num_rows)
            return received, expert_counts, self.stream.submit(dispatch.move_rows)
        except BaseException as error:
            # Half a call must not be followed by the next: peers would take its signals for this one's.
            dispatch.abandon(error)
            raise

    def worst_case_dispatch(
        self, payload: Payload, routing: Routing, num_rows: int, num_channels: int, after: EventHandle | None
    ) -> tuple[Received, Future]:
        """A dispatch into room for `num_rows` rows, without waiting for counts."""
        dispatch = Dispatch(self.chain, payload, routing, num_worst_tokens=num_rows, num_channels=num_channels)
        if after is None or after.query():
            dispatch.check_counts()
        received = dispatch.make_room(num_rows)
        return received, self._submit(after, dispatch.move_rows)

    def cached_dispatch(self, payload: Payload, handle: Handle, after: EventHandle | None) -> tuple[Received, Future]:
        """A dispatch along the slots of an earlier one."""
        self._check_handle(handle, after, "dispatch")
        dispatch = Dispatch(self.chain, payload, handle=handle)
        received = dispatch.make_room(handle.num_rows)
        return received, self._submit(after, dispatch.move_rows)

    def combine(
        self,
        x: torch.Tensor,
        handle: Handle,
        topk_weights: torch.Tensor | None,
        biases: Sequence[torch.Tensor],
        after: EventHandle | None,
    ) -> tuple[Combined, Future]:
        """A combine along the slots of an earlier dispatch."""
        self._check_handle(handle, after, "combine")
        combine = Combine(self.chain, x, handle, topk_weights, biases)
        combined = combine.make_room()
        return combined, self._submit(after, combine.sum_rows)

    def _check_handle(self, handle: Handle, after: EventHandle | None, where: str) -> None:
        """Look into a handle, unless the dispatch that fills it may still be under way."""
        if self.stream.query() and (after is None or after.query()):
            check_rows(handle, self.window.rank, where)

    def _submit(self, after: EventHandle | None, work: Callable[[], None]) -> Future:
        """Queue a whole call.

        If it fails, even before it is announced, the calls queued behind it cannot match the peers'.
        """

        def contagious() -> None:
            try:
                _after(after, work)
            except EPOverflow:
                raise
            except BaseException as error:
                self.window.fail(f"{type(error).__name__}: {error}")
                raise

        return self.stream.submit(contagious)


def _after(event: EventHandle | None, work: Callable[[], Any]) -> Any:
    """Wait for an event on the comm stream, then do the work."""
    if event is not None:
        event.current_stream_wait()
    return work()
