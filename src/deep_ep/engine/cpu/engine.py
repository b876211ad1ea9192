"""The engine on the CPU, inside one node: ranks write and read each other's memory."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import torch

from ... import layout
from ...errors import EPClosed, EPOverflow, account
from ...event import EventHandle
from ...handle import ColumnHandle, Handle, require_filled
from ...stream import CommStream
from ...trace import Trace
from ...transport import Window, ordinary_tensor
from ...watch import Watch
from ..elastic import ElasticRequest, Unfold, fold_rows, require_rows
from ..engine import Engine
from ..low_latency.calls import operation_of
from ..low_latency.cpu.engine import CpuLowLatency
from ..ops import CallOrder
from ..payload import Expansion, Payload, Routing, SendPlan, apart
from ..protocol import ANNOUNCED, LOW_LATENCY, Agreement, Header
from .call import Chain
from .columns import ColumnCombine
from .combine import CpuCombine
from .dispatch import CpuDispatch
from .expanded import ExpandedDispatch
from .scope import CpuScope


class CpuEngine(Engine):
    """Dispatch and combine over one window.

    Args:
        window: The window.
        stream: Where communication runs.
    """

    low_latency: CpuLowLatency | None = None
    counts_peers = True

    def __init__(self, window: Window, stream: CommStream):
        self.rank = window.rank
        self.window = window
        self.stream = stream
        self.chain = Chain(window)

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, num_nodes: int, order: CallOrder
    ) -> tuple[layout.DispatchLayout, EventHandle | None]:
        """Count where this rank's tokens go.

        Local. It runs at once, unless it has to wait for an event that is not yet complete: then on the comm stream.
        """
        num_ranks, after = self.window.group_ranks.num_ranks, order.after
        sizes = (num_experts, num_ranks, num_ranks // num_nodes)
        if after is not None and order.is_async and not order.is_due():
            counts = layout.uncounted_layout(topk_idx, *sizes)
            written = layout.DispatchLayout(*apart(counts))

            def count() -> None:
                try:
                    after.current_stream_wait()
                    for target, source in zip(written, layout.dispatch_layout(topk_idx, *sizes), strict=True):
                        target.copy_(source)
                except EPOverflow:  # the caller has the layout already, and need not look at its event
                    layout.mark_refused(written)
                    raise

            return counts, EventHandle(self.stream.submit(count))
        if after is not None:
            after.current_stream_wait()
        return layout.dispatch_layout(topk_idx, *sizes), EventHandle() if order.is_async else None

    def barrier(self) -> None:
        """Wait until all ranks have called this."""
        with self._scope("barrier", CallOrder(None, False)) as scope:
            scope.launch(partial(self._make_barrier, scope))

    def _make_barrier(self, scope: CpuScope) -> None:
        """Make a call that consists of a header only. Runs on the comm stream."""
        call = scope.begin(Header(Agreement("barrier"), 0))
        call.post_header()
        call.signal(ANNOUNCED)
        call.wait(ANNOUNCED)
        call.headers()
        self.chain.stats.count_path("barrier")

    # Beside the calls ------------------------------------------------------------------------------------------------

    def start_trace(self, trace: Trace) -> None:
        """Record all further calls in a trace."""
        self.window.trace = self.chain.stats.trace = trace

    def require_working(self) -> None:
        """Raise if an earlier call has failed."""
        self.chain.require_working()

    def expect_call(self) -> None:
        """Note that a call begins. If an exception leaves it, `leave` must be called."""
        chain = self.chain
        if chain.scope is not None:
            chain.settle()
        chain.is_calling = False

    def leave(self, error: BaseException, method: str) -> None:
        """Report to the peers that an exception has ended a call, unless the engine has reported it already.

        Args:
            error: The exception.
            method: The name of the method that the caller has called.
        """
        if self.chain.is_calling:
            self.chain.settle(error)
            return
        # An overflow is seen by all ranks, each behind as many calls as it had queued.
        if isinstance(error, (EPClosed, EPOverflow)) or self.window.failure is not None:
            return
        # Nothing was begun: also a caller that was interrupted may make the call after all.
        if operation_of(method).startswith(LOW_LATENCY) and self.low_latency is not None:
            self.low_latency.refuse(account(error))
        else:
            self.stream.run_in_turn(partial(self.chain.refuse, account(error)))

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in the window, or in ordinary memory if the arena has none left."""
        region = self.window.arena.allocate(shape, dtype)
        return region if region is not None else ordinary_tensor(shape, dtype)

    def local_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        """Bytes of the raw buffer, free for the caller between calls."""
        self.window.is_scratch_shown = True
        return self.window.scratch_bytes(start, num_bytes)

    def trim(self) -> int:
        """Give unused memory back to the system.

        Returns:
            The number of bytes given back.
        """
        results = self.low_latency.trim() if self.low_latency is not None else 0
        return self.window.arena.trim() + self.chain.results.trim() + results

    def stats(self) -> dict[str, Any]:
        """Return the counters of the calls so far."""
        return {
            **self.chain.stats.as_dict(),
            "wait_secs": [peer.wait_secs for peer in self.window.peers],
            "arena": self.window.arena.num_bytes(),
            **({"low_latency": self.low_latency.num_calls} if self.low_latency is not None else {}),
        }

    def masked_ranks(self) -> set[int] | None:
        """Return the ranks that are masked, without waiting for anything; None: there are no masks."""
        return self.low_latency.shared.masked if self.low_latency is not None else None

    def start_watch(self, watch: Watch | None) -> None:
        """Count from now on which rank came last in a wait; None: not any more."""
        self.window.watch = watch

    def release_graphs(self) -> None:
        """Do nothing: there are no graphs on the CPU."""

    def synchronize(self) -> None:
        """Wait for everything that is queued."""
        self.stream.synchronize()

    def stop(self) -> None:
        """Wait for everything that is queued, and close."""
        self.stream.stop()
        # Behind what is queued: a peer that still waits for this rank must not find it closed.
        self.window.close()

    def forget(self) -> None:
        """Close a buffer that was never destroyed, once everything queued has finished. Only the reaper calls it."""
        self.stop()

    def has_failed(self) -> bool:
        """Return whether a call has failed, on this rank or on another."""
        return self.window.failure is not None

    def abandon(self, cause: str) -> None:
        """Report to all peers that this rank has left, and why. This does not wait: queued calls fail by themselves.

        Args:
            cause: The reason, as the part of a sentence that follows the rank.
        """
        self.window.fail(cause)  # ranks of this node see it at once
        with suppress(RuntimeError):  # the thread has ended: nothing is queued, and no job waits for it
            self.stream.submit(self.chain.tell_failure)  # links are the comm stream's alone

    # Overridden by the engine across nodes

    def _scope(self, operation: str, order: CallOrder) -> CpuScope:
        return CpuScope(self.chain, self.stream, order)

    def _dispatch_steps(
        self, operation: str, payload: Payload, routing: Routing | None, num_sms: int | None
    ) -> CpuDispatch:
        """Return the steps of one dispatch. `num_sms` has an effect on GPUs only."""
        if payload.expansion is not None:
            return ExpandedDispatch(self.chain, operation, payload, routing, payload.expansion)
        return CpuDispatch(self.chain, operation, payload, routing)

    def _combine_steps(
        self, parts: Sequence[torch.Tensor], handle: Any, biases: Sequence[torch.Tensor], num_sms: int | None
    ) -> CpuCombine:
        """Return the steps of one combine."""
        kind = ColumnCombine if isinstance(handle, ColumnHandle) else CpuCombine
        return kind(self.chain, parts, biases)

    def unfold(self, request: ElasticRequest, num_sms: int | None) -> Unfold:
        """Return a dispatch of V2: expanded rows are put straight where there is memory for them."""
        form, layout = request.form, request.layout
        expansion = None
        if layout is not None and layout.plan is not None:
            weights = request.topk_weights
            expansion = Expansion(form.alignment, layout.num_expanded, layout.plan, weights=weights)
        elif layout is None and form.is_expanded:
            num_expanded = 0 if request.is_synchronised else form.most_expanded(request.num_ranks)
            peer_rows = request.topk_idx.new_empty(request.topk_idx.shape, dtype=torch.int32)
            expansion = Expansion(form.alignment, num_expanded, SendPlan(), peer_rows)
        return Unfold(request, expansion)

    def fold_rows(
        self, out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, num_sms: int | None
    ) -> None:
        """Sum expanded rows that belong to one compact row."""
        fold_rows(out, x, rows)

    def require_rows(self, handle: Handle, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Check that a combine is given all expanded rows: by now the tables of the dispatch are filled."""
        require_filled(handle, "combine")
        require_rows(x.shape[0], 1 + int(rows.max()) if rows.numel() else 0)
