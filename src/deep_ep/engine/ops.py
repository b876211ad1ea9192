"""The steps of a call, as the scripts of `engine.py` take them, and the data that passes between them.

There are four sets of steps, for one node and for several, on the CPU and on a GPU. Those of a GPU hold nothing of a
call: they are made once for each signature. Those of the CPU are made for each call, and keep what the call finds out;
so are those of V2's dispatches on a GPU, over a plan that is made once for each signature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Any, NamedTuple, Protocol

import torch

from ..event import EventHandle
from .payload import DispatchResult, Payload, Routing


@dataclass(frozen=True)
class CallOrder:
    """How a call is ordered with the caller's stream.

    Attributes:
        after: What the call waits for on the comm stream; None: nothing.
        is_async: The caller does not wait for the call.
    """

    after: EventHandle | None
    is_async: bool

    def is_due(self) -> bool:
        """Return whether the event to wait for has completed."""
        return self.after is None or self.after.query()


class Counts(NamedTuple):
    """What the ranks exchange in a full dispatch.

    Attributes:
        num_rows: Rows that each rank receives (on the CPU across nodes: each rank of this node).
        expert_counts: Selections of each expert of this rank.
        fits: The rows fit into what was offered, on all ranks.
        max_tokens: The largest M that a rank gave; 0: no rank gave one.
        num_tokens: Tokens that each rank has. This and what follows is for GPUs only.
        free_bytes: The largest region that each rank could take.
        remote_rows: Rows that each rank relays, its own ones for its node included; on one node, if the result is
            expanded, the rows of each rank's result; else anything.
    """

    num_rows: list[int]
    expert_counts: list[int]
    fits: bool
    max_tokens: int = 0
    num_tokens: Sequence[int] = ()
    free_bytes: Sequence[int] = ()
    remote_rows: Sequence[int] = ()


class Sections(NamedTuple):
    """Memory for the rows of a dispatch.

    Attributes:
        x: [n, H]; None: there is none yet.
        scales: [n, S], or None.
        records: Memory for n records, or None.
        num_rows: n.
        rows_per_source: If the memory is not in the window: rows of a source that its part of the staging holds; else
            0.
        bases: Where peers write, a base for each section; empty on the CPU, which looks when it makes its offer.
        expanded_rows: On a GPU: X, if x and scales are an expanded result; 0: they are n compact rows; less than 0: the
            same, of which an expanded result of so many rows may be made.
    """

    x: torch.Tensor | None
    scales: torch.Tensor | None
    records: torch.Tensor | None
    num_rows: int
    rows_per_source: int
    bases: tuple[Any, ...]
    expanded_rows: int = 0

    def parts(self) -> list[torch.Tensor]:
        """The sections that travel, as a list."""
        return [part for part in (self.x, self.scales, self.records) if part is not None]


make_sections: Callable[[tuple], Sections] = partial(tuple.__new__, Sections)  # see `notify.make_post`
NO_SECTIONS = Sections(None, None, None, 0, 0, (-1, -1, -1))  # kernels take -1 for no memory


def received_of(
    sections: Sections,
    num_rows: int,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    handle: Any,
) -> DispatchResult:
    """What a dispatch returns: `num_rows` rows of what there is memory for are the caller's."""
    x, scales = sections.x, sections.scales
    assert x is not None
    if num_rows != sections.num_rows:
        x, scales = x[:num_rows], scales[:num_rows] if scales is not None else None
        if topk_idx is not None and topk_weights is not None:
            topk_idx, topk_weights = topk_idx[:num_rows], topk_weights[:num_rows]
    return DispatchResult(x, scales, topk_idx, topk_weights, handle)


class CallScope(Protocol):
    """What surrounds a call: it comes after the caller's work (or just after an event) and after earlier calls.

    Autograd does not record inside, and an exception that leaves the call is reported to the peers.

    Attributes:
        outputs: A context manager, inside of which ordinary tensors for the caller are allocated.
        is_elsewhere: The call does not run on the caller's stream: what the caller gets must be held.
        event: After the call: its event, if it is asynchronous.
    """

    outputs: Any
    is_elsewhere: bool
    event: EventHandle | None

    def __enter__(self) -> Any:
        """Begin the call."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """End the call. On the CPU, run the functions that the steps have handed over, or queue them."""
        ...

    def hold_inputs(self, tensors: Sequence[torch.Tensor | None], ordinary: Any) -> None:
        """Keep what a call reads until the device has read it.

        It is called before the first step, so it holds however the call ends.

        Args:
            tensors: Those that may lie in the window.
            ordinary: A routing or a handle, whose `tensors()` do not.
        """
        ...

    def hold_received(self, received: DispatchResult) -> DispatchResult:
        """Keep what a dispatch returns until the streams that use it are done. Returns what the caller gets."""
        ...

    def hold_combined(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Keep the sums of a combine, as `hold_received` keeps rows. Returns what the caller gets."""
        ...

    def hold_outputs(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Keep other tensors that the caller gets, as `hold_received` keeps rows."""
        ...

    def launch(self, step: Callable[[], Any]) -> None:
        """Have a function that works with tensors called in stream order: on a GPU at once, on the CPU when its turn
        comes.
        """
        ...

    def apart(self, tensors: Sequence[torch.Tensor | None]) -> Sequence[Any]:
        """Return tensors of the caller as functions of `launch` should write them; see `payload.apart`."""
        ...


class OpenCall:
    """The call that a rank is making, so that it is never left incomplete: the base of what orders calls.

    Attributes:
        is_calling: The engine is responsible for the call: whatever exception leaves it, the engine reports to the
            peers.
        scope: Of the call, until it has ended, was refused or has failed; None: there is no such call.
    """

    is_calling = False
    scope: CallScope | None = None

    def settle(self, error: BaseException | None = None) -> None:
        """End the call that the caller has left, if its scope could not. Runs on the caller's thread.

        An interrupt may come where a scope begins to end its call, and a second one while it reports the first.

        Args:
            error: What has left the call; None: the next call begins, and that is not known any more.
        """
        if self.scope is not None:
            error = error if error is not None else RuntimeError("an exception has left the call incomplete")
            self.scope.__exit__(type(error), error, None)


class DispatchSteps(Protocol):
    """The steps of a dispatch, in the order in which a call takes them."""

    def route(self, scope: Any, routing: Routing, num_channels: int, num_rows: int) -> Any:
        """Allocate the routes of a dispatch with routing, for `num_rows` received rows; 0: their number is not known
        yet.
        """
        ...

    def follow(self, scope: Any, handle: Any) -> Any:
        """Return the routes of a dispatch that follows a handle."""
        ...

    def guess(self) -> Sections:
        """Allocate memory to offer before the counts are known; `NO_SECTIONS`: no offer is made before."""
        ...

    def memory(self, scope: Any, num_rows: int) -> Sections:
        """Allocate memory for exactly `num_rows` rows: in the window, or in ordinary memory, which rows reach through
        staging.

        Raises:
            EPTransportError: There is none, and no staging, or the staging cannot hold a row of every rank.
        """
        ...

    def notify(self, scope: Any, payload: Payload, routing: Routing | None, routes: Any, sections: Sections) -> None:
        """Exchange with the peers what each rank sends and offers."""
        ...

    def outputs(self, scope: Any, routing: Routing, routes: Any, sections: Sections, num_channels: int) -> Any:
        """Allocate what comes beside the rows: the handle, ids and weights, for as many rows as there is memory for."""
        ...

    def move(
        self,
        scope: Any,
        payload: Payload,
        routing: Routing | None,
        routes: Any,
        sections: Sections,
        unpacked: Any,
    ) -> None:
        """Move the rows, wait until the peers' rows have arrived, and split their records into what `outputs` has
        allocated.

        Does nothing while nothing, or too little, is offered.
        """
        ...

    def counts(self, scope: Any, routing: Routing) -> Counts:
        """Wait on the host until the ranks have exchanged their counts.

        Raises:
            ValueError: The caller's counts are wrong; nothing was announced.
            EPError: A peer failed, was silent, or makes another call.
        """
        ...

    def grow(self, told: Counts) -> None:
        """Add memory to the window on all ranks, if any rank lacks it for this call or for its combine."""
        ...

    def rerouted(self, scope: Any, routes: Any, told: Counts, routing: Routing) -> Any:
        """Return the routes with memory of the exact size, now that the counts are known."""
        ...

    def offer(self, scope: Any, payload: Payload, routes: Any, sections: Sections) -> None:
        """Exchange with the peers where each rank receives its rows, now that the counts are known."""
        ...

    def received(
        self, routes: Any, sections: Sections, unpacked: Any, num_rows: int, told: Counts | None
    ) -> DispatchResult:
        """Return the result of a dispatch: `num_rows` rows and the handle. Only a full dispatch has counts."""
        ...


class CombineSteps(Protocol):
    """The steps of a combine, in the order in which a call takes them."""

    def outputs(self, scope: Any, parts: Sequence[torch.Tensor], handle: Any) -> list[torch.Tensor]:
        """Allocate the sums of each part, [T, columns]."""
        ...

    def notify(self, scope: Any, parts: Sequence[torch.Tensor], handle: Any) -> Any:
        """Exchange offers of rows with the peers, after copying this rank's rows to where peers can read them.

        Returns:
            How this rank gives its rows, for `sum`.
        """
        ...

    def sum(
        self,
        scope: Any,
        source: Any,
        parts: Sequence[torch.Tensor],
        handle: Any,
        sums: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> None:
        """Sum the peers' rows of this rank's tokens, and wait until the peers have summed the rows of this rank."""
        ...
