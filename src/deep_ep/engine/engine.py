"""The engine: one script for all dispatches and one for all combines.

What happens in a step depends on where the ranks are and on what runs there. `cpu/` and `cuda/` have two sets of steps
each: inside one node, and across nodes. The scripts are the same for all of them:

    dispatch, full        notify (counts, on a GPU also a guessed offer), move | the host waits for the counts
                          if nothing was offered, or too little: offer (exact), move
    dispatch, worst case  notify (counts and offers), move
    dispatch, cached      notify (offers), move
    combine               notify (offers), sum

On a GPU a step launches kernels. On the CPU it hands functions to the call, which runs them where the host waits and
where the script ends: on the caller's thread if the call is synchronous and nothing is queued, otherwise on the comm
stream. `docs/protocol.md` has the protocol that the steps follow.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from ..config import Config
from ..errors import EPUnsupported
from ..event import EventHandle
from ..handle import Handle
from ..layout import DispatchLayout
from ..trace import Trace
from ..watch import Watch
from .elastic import ElasticRequest, Unfold
from .low_latency.engine import LowLatencyEngine
from .ops import NO_SECTIONS, CallOrder, CallScope, CombineSteps, Counts, DispatchSteps, received_of
from .payload import CombineResult, DispatchResult, Payload, Routing, make_combined


class Around(NamedTuple):
    """What a call does on this rank alone, before and after it, or in between.

    Attributes:
        prepare: Takes the scope, and returns what the call shall move: the payload of a dispatch, or rows and weights
            of a combine; None: what was given.
        finish: Of a dispatch: takes the scope, what was received, and the counts, and returns what the caller gets;
            None: what was received.
        before_sum: Of a combine: launched between the offers and the sum; None: nothing is.
    """

    prepare: Callable[[Any], Any] | None = None
    finish: Callable[[Any, DispatchResult, Counts | None], Any] | None = None
    before_sum: Callable[[], Any] | None = None


NOTHING_AROUND = Around()


class Engine(ABC):
    """Dispatch and combine of one rank.

    Each call returns what the caller gets; if the call is asynchronous, with the event that completes when it is
    filled.

    Attributes:
        rank: This rank, as an index into `Counts.num_rows`.
        window: The memory of this rank and of its peers.
        stream: Where communication runs.
        low_latency: Low-latency calls; None: the buffer has no memory for them, or they cannot be made.
        why_no_low_latency: Why they cannot be made. Empty: they can be made, or were not requested.
        counts_peers: `stats` has the bytes and the waits of each peer; else kernels move and wait, and they are zeros.
    """

    rank: int
    window: Any
    stream: Any
    low_latency: LowLatencyEngine | None = None
    why_no_low_latency = ""
    counts_peers = False

    # Calls -----------------------------------------------------------------------------------------------------------

    @abstractmethod
    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, num_nodes: int, order: CallOrder
    ) -> tuple[DispatchLayout, EventHandle | None]:
        """Count where this rank's tokens go. Local: it takes no part in the order of the calls."""

    def dispatch(
        self,
        payload: Payload,
        routing: Routing,
        num_channels: int,
        order: CallOrder,
        num_sms: int | None = None,
        around: Around = NOTHING_AROUND,
    ) -> tuple[Any, list[int], EventHandle | None]:
        """A full dispatch. The host waits for the counts, also if the call is asynchronous.

        Returns:
            What is received (or what `around` makes of it), the selections of each local expert, and the event of an
            asynchronous call.

        Raises:
            EPUnsupported: The host cannot wait now.
        """
        self._require_waiting()
        return self._dispatch("dispatch", payload, routing, None, 0, num_channels, order, num_sms, around)

    def worst_case_dispatch(
        self,
        payload: Payload,
        routing: Routing,
        num_rows: int,
        num_channels: int,
        order: CallOrder,
        num_sms: int | None = None,
        around: Around = NOTHING_AROUND,
    ) -> tuple[Any, EventHandle | None]:
        """A dispatch into memory for `num_rows` rows; the host does not wait for counts."""
        received, _, event = self._dispatch(
            "worst-case dispatch", payload, routing, None, num_rows, num_channels, order, num_sms, around
        )
        return received, event

    def cached_dispatch(
        self,
        payload: Payload,
        handle: Any,
        order: CallOrder,
        num_sms: int | None = None,
        around: Around = NOTHING_AROUND,
    ) -> tuple[Any, EventHandle | None]:
        """A dispatch along the slots of an earlier one."""
        operation, num_rows = "cached dispatch", handle.num_rows
        received, _, event = self._dispatch(operation, payload, None, handle, num_rows, 0, order, num_sms, around)
        return received, event

    def _dispatch(
        self,
        operation: str,
        payload: Payload,
        routing: Routing | None,
        handle: Any,
        num_rows: int,
        num_channels: int,
        order: CallOrder,
        num_sms: int | None,
        around: Around,
    ) -> tuple[Any, list[int], EventHandle | None]:
        """The script of all dispatches: full (`num_rows` is 0 before it is known), worst case, and cached."""
        is_full, expert_counts = operation == "dispatch", []
        told: Counts | None = None
        with self._scope(operation, order) as scope:
            scope.hold_inputs((payload.x, payload.scales), handle if routing is None else routing)
            if around.prepare is not None:
                payload = around.prepare(scope)
            steps = self._dispatch_steps(operation, payload, routing, num_sms)
            if routing is None:
                routes = steps.follow(scope, handle)
            else:
                routes = steps.route(scope, routing, num_channels, num_rows)
            sections = steps.guess() if is_full else steps.memory(scope, num_rows)
            steps.notify(scope, payload, routing, routes, sections)
            unpacked = None
            if routing is not None and sections.x is not None:
                unpacked = steps.outputs(scope, routing, routes, sections, num_channels)
            # On a GPU a full dispatch moves rows into what `notify` has offered; the CPU has offered nothing yet.
            steps.move(scope, payload, routing, routes, sections, unpacked)
            if is_full:
                assert routing is not None
                told = steps.counts(scope, routing)
                num_rows, expert_counts = told.num_rows[self.rank], told.expert_counts
                if not told.fits:  # too small, here or elsewhere: it goes back before more is taken
                    sections, unpacked = NO_SECTIONS, None
                # Also where the rows fit: their combine may need more memory than there is, on this rank or another.
                steps.grow(told)
                if not told.fits:
                    sections = steps.memory(scope, num_rows)
                    routes = steps.rerouted(scope, routes, told, routing)
                    steps.offer(scope, payload, routes, sections)
                    unpacked = steps.outputs(scope, routing, routes, sections, num_channels)
                    steps.move(scope, payload, routing, routes, sections, unpacked)
            if routing is None:
                received = received_of(sections, num_rows, None, None, handle)
            else:
                received = steps.received(routes, sections, unpacked, num_rows, told)
            if scope.is_elsewhere:
                received = scope.hold_received(received)
            result = received if around.finish is None else around.finish(scope, received, told)
        # Behind the block, whose end makes the event.
        return result, expert_counts, scope.event

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None,
        biases: Sequence[torch.Tensor],
        order: CallOrder,
        num_sms: int | None = None,
        around: Around = NOTHING_AROUND,
    ) -> tuple[CombineResult, EventHandle | None]:
        """A combine along the slots of an earlier dispatch: the script of all of them."""
        with self._scope("combine", order) as scope:
            scope.hold_inputs((x, topk_weights, *biases), handle)
            if around.prepare is not None:
                x, topk_weights = around.prepare(scope)
            parts = [x] if topk_weights is None else [x, topk_weights]
            steps = self._combine_steps(parts, handle, biases, num_sms)
            # First: a wrong handle, or a lack of memory, can be refused only as long as nothing is announced.
            sums = steps.outputs(scope, parts, handle)
            source = steps.notify(scope, parts, handle)
            if around.before_sum is not None:
                scope.launch(around.before_sum)
            steps.sum(scope, source, parts, handle, sums, biases)
            if scope.is_elsewhere:
                sums = scope.hold_combined(sums)
        return make_combined((sums[0], sums[1] if len(sums) > 1 else None)), scope.event

    @abstractmethod
    def barrier(self) -> None:
        """Have the caller's stream (on the CPU: the caller) go on when all ranks have come here."""

    # What a device has in a form of its own --------------------------------------------------------------------------

    def _require_waiting(self) -> None:
        """Raise if the host cannot wait for the device now."""
        return

    @abstractmethod
    def _scope(self, operation: str, order: CallOrder) -> CallScope:
        """Return what surrounds a call, see `ops.CallScope`."""

    @abstractmethod
    def _dispatch_steps(
        self, operation: str, payload: Payload, routing: Routing | None, num_sms: int | None
    ) -> DispatchSteps:
        """Return the steps of a dispatch.

        Raises:
            ValueError: The device cannot move such rows.
        """

    @abstractmethod
    def _combine_steps(
        self, parts: Sequence[torch.Tensor], handle: Any, biases: Sequence[torch.Tensor], num_sms: int | None
    ) -> CombineSteps:
        """Return the steps of a combine of rows, and perhaps of weights with them."""

    def region(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor for use inside a call, in the window if there is memory for it."""
        return self.allocate(shape, dtype)

    # What V2's calls do on this rank alone ---------------------------------------------------------------------------

    def layout_of_selections(
        self, topk_idx: torch.Tensor, num_experts: int, order: CallOrder
    ) -> tuple[DispatchLayout, CallOrder]:
        """Count where this rank's tokens go in a V2 dispatch.

        Returns:
            The layout, and how the dispatch is to be ordered: the layout may still wait for the caller's event.
        """
        counted, event = self.layout(topk_idx, num_experts, 1, order)
        return counted, order if order.after is None or event is None else CallOrder(event, order.is_async)

    @abstractmethod
    def unfold(self, request: ElasticRequest, num_sms: int | None) -> Unfold:
        """Return a dispatch of V2, which makes its results out of what comes. `num_sms` bounds blocks of a GPU."""

    @abstractmethod
    def fold_rows(
        self, out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, num_sms: int | None
    ) -> None:
        """Sum the expanded rows of each token, columns ascending, in FP32 (FP64 of FP64), rounded once.

        Args:
            out: [n, H] of x's dtype, written.
            x: [X, H].
            rows: [n, K] int32; -1: none. One row alone is forwarded as it is.
            ends: [R] int32, the last of which is how many of the n rows came.
            num_sms: Most blocks of a kernel.
        """

    def require_rows(self, handle: Handle, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Check that a combine is given all expanded rows, where the host did not know them before the call.

        On a GPU it does not know them in the call, either: rows that are not given count as zeros there.

        Args:
            handle: Of the compact rows.
            x: [X, H].
            rows: [n, K] int32, the expanded rows of each compact one; -1: none.

        Raises:
            EPOverflow: The dispatch was refused, so there are no rows.
            ValueError: Rows are missing.
        """
        return

    def can_pull(self, x: torch.Tensor) -> bool:
        """Whether a combine can give expanded rows where they lie, so that no rank sums its own ones first."""
        return False

    # Beside the calls ------------------------------------------------------------------------------------------------

    @abstractmethod
    def start_trace(self, trace: Trace) -> None:
        """Record all further calls in a trace."""

    @abstractmethod
    def require_working(self) -> None:
        """Raise if an earlier call has failed.

        Raises:
            EPError: A call has failed; the message has the reason. `EPClosed` where that was raised before.
        """

    @abstractmethod
    def has_failed(self) -> bool:
        """Whether a call has failed, on this rank or on another."""

    @abstractmethod
    def expect_call(self) -> None:
        """Note that a call begins. If an exception leaves it, `leave` must be called."""

    @abstractmethod
    def leave(self, error: BaseException, method: str) -> None:
        """Report to the peers that an exception has ended a call, unless that has been reported already.

        Args:
            error: The exception.
            method: The name of the method that the caller has called.
        """

    @abstractmethod
    def abandon(self, cause: str) -> None:
        """Report to all peers that this rank has left, and why. This does not wait: queued calls fail by themselves.

        Args:
            cause: The reason, as the part of a sentence that follows the rank.
        """

    @abstractmethod
    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in the window, or in ordinary memory if the arena has none left."""

    @abstractmethod
    def local_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        """Bytes of the raw buffer, free for the caller between calls."""

    @abstractmethod
    def trim(self) -> int:
        """Give unused memory back to the system.

        Returns:
            The number of bytes given back.
        """

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """Return the counters of the calls so far."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for everything that is queued, and raise the error of a call that failed."""

    @abstractmethod
    def stop(self) -> None:
        """Wait for everything that is queued, and close."""

    @abstractmethod
    def forget(self) -> None:
        """Close a buffer that was never destroyed, once everything queued has finished. Only the reaper calls it."""

    def masked_ranks(self) -> set[int] | None:
        """Return the ranks that are masked, without waiting for anything; None: the host does not know."""
        return None

    def start_watch(self, watch: Watch | None) -> None:
        """Count from now on which rank came last in a wait; None: not any more.

        Raises:
            EPUnsupported: Kernels wait here, and the host does not see for whom.
        """
        if watch is not None:
            raise EPUnsupported("metrics.watch: kernels wait here, unseen by the host. Record a trace instead")

    def tune(self, config: Config | None) -> None:
        """Take the chunk sizes of the next call from a config; None: choose them.

        Only CPU ranks across nodes have chunks.
        """
        return

    def record_stream(self, tensor: torch.Tensor, stream: Any) -> None:
        """Note that another stream uses a tensor of the window.

        On the CPU there is no stream but the caller's thread.
        """
        return

    @abstractmethod
    def release_graphs(self) -> None:
        """Release the window memory that captured graphs use."""
