"""Low-latency calls: one script for both devices (`docs/low-latency.md`).

A call has two *phases*: it sends, and it receives. A device has both in a form of its own (`LowLatencyPhases`), and a
scope for each (`ops.CallScope`): on the CPU they run on the comm stream, on a GPU they are launched. Which calls may be
in flight, and which memory they take, does not depend on the device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

import torch

from ...event import EventHandle
from ..ops import CallOrder
from .calls import (
    BARRIER,
    COMBINE,
    METHODS,
    CallMode,
    CombineInputs,
    CombineKind,
    DispatchKind,
    Hook,
    JoinResult,
    Packed,
)
from .geometry import Geometry, SetPlan
from .in_flight import InFlight
from .slots import FREE_SLOT, OWN_SLOT, Slots, zero_copy_view

_SYNC, _ASYNC = CallOrder(None, False), CallOrder(None, True)


class LowLatencyPhases(Protocol):
    """One call, as a device makes it.

    Attributes:
        operation: One of `METHODS`.
        takes: What it takes of the slots, see `slots.py`.
        wide_bytes: Of a dispatch that takes a slot: the `num_rdma_bytes` with which it would take none.
        number: Of the call, once it is made.
        age: How many calls were sent after it, once it is received.
    """

    @property
    def operation(self) -> str: ...  # noqa: D102

    takes: int
    wide_bytes: int
    number: int
    age: int

    def take_slot(self, slot: int, last_call: int) -> None:
        """Take a free slot, which another call used last."""
        ...

    def send(self) -> None:
        """Publish this rank's rows, and signal. Does not wait for another rank, unless `receive` follows at once."""
        ...

    def receive(self) -> None:
        """Wait for all ranks that are not masked, and fetch."""
        ...


class LowLatencyEngine(ABC):
    """The low-latency calls of a buffer.

    Args:
        stream: Where communication runs.
    """

    def __init__(self, stream: Any):
        self._stream = stream
        self._slots = Slots()
        self._in_flight = InFlight(self._slots)

    # Calls -----------------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        kind: DispatchKind,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[Packed, EventHandle | None, Hook | None]:
        """Send each token to its experts.

        Args:
            kind: The kind of dispatch.
            x: [T, H] BF16.
            topk_idx: [T, K] int32 or int64.
            recv_stats: [L] int32; the rows of each expert are added. Or None.
            wait_stats: [R] int64; the nanoseconds waited for each rank are added. Or None.
        """
        packed, call = self._new_dispatch(kind, x, topk_idx, recv_stats, wait_stats)
        return packed, *self._make(call, kind.mode)

    def combine(
        self,
        kind: CombineKind,
        rows: CombineInputs,
        out: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[torch.Tensor, EventHandle | None, Hook | None]:
        """Bring the experts' rows back: weighted sums in FP32, k ascending, rounded once. `out` is [T, H] BF16."""
        combined, call = self._new_combine(kind, rows, out, wait_stats)
        if kind.zero_copy or self._slots.has_lease(rows.src_info):
            call.takes = OWN_SLOT
            # A call that is refused must not take the tensor.
            self._require_working()
            self._in_flight.require_capacity(METHODS[COMBINE], OWN_SLOT)
            # 0: what the slot held before was spent when the tensor was handed out.
            call.take_slot(self._slots.give_back(rows.src_info, self._in_flight.next_number), 0)
        return combined, *self._make(call, kind.mode)

    def clean(self) -> None:
        """Make a barrier over the ranks that are not masked. If ranks may be masked, they first agree on its number."""
        call = self._new_barrier()
        self._require_working()
        if self._can_join:
            # A caller that has left a call by an exception will not call its hook any more.
            self._in_flight.abandon()
            with self._scope(BARRIER, " join", _SYNC) as scope:
                call.number = self._in_flight.next_number  # for messages: the ranks are still to agree on it
                scope.announce(call)
                met = self._join(scope)
                self._in_flight.go_on_from(met.number)
            self._tell_lost(met)
        self._make(call, CallMode())

    def combine_buffer(self, src_info: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """Return the zero-copy tensor of a handle."""
        plan = self._plan_combine("get_next_low_latency_combine_buffer", geometry)
        self._settle()
        in_flight = self._in_flight
        slot, last_call = self._slots.lease(src_info, in_flight.num_consumed, in_flight.bytes_for_two)
        memory = self._slot_memory(plan.slot_offset(slot), geometry.combine_bytes, last_call)
        return zero_copy_view(memory, geometry)

    def _make(self, call: LowLatencyPhases, mode: CallMode) -> tuple[EventHandle | None, Hook | None]:
        """Make a call: its send phase, and its receive phase unless a hook does that."""
        self._require_working()
        is_async, has_hook = mode
        in_flight, operation, takes = self._in_flight, call.operation, call.takes
        in_flight.require_capacity(METHODS[operation], takes, call.wide_bytes)
        with self._scope(operation, " send" if has_hook else "", _ASYNC if is_async else _SYNC) as scope:
            scope.announce(call)  # a number that is given to a call must be sent
            call.number = in_flight.send(takes)
            if takes == FREE_SLOT:
                if self._stream.is_capturing:
                    # A replay takes a slot anew, and the host does not see it.
                    self._slots.is_exact = False
                call.take_slot(*self._slots.take(call.number))
            scope.launch(call.send)
            if not has_hook:
                # Already now: whatever is queued later comes behind its receive phase.
                in_flight.receive(call.number)
                scope.launch(call.receive)
        return scope.event, self._hook(call) if has_hook else None

    def _hook(self, call: LowLatencyPhases) -> Hook:
        """Return the hook of a call, which makes its receive phase."""

        def hook() -> None:
            self._settle_call()
            self._require_working()
            self._in_flight.require_pending(call.number)
            try:
                self._receive(call)
            except BaseException as error:
                self._settle_call(error)
                raise

        return hook

    def _receive(self, call: LowLatencyPhases) -> None:
        with self._scope(call.operation, " receive", _SYNC) as scope:
            scope.announce(call)
            call.age = self._in_flight.receive(call.number)
            scope.launch(call.receive)

    # What a device has in a form of its own --------------------------------------------------------------------------

    @property
    @abstractmethod
    def _can_join(self) -> bool:
        """Whether ranks that have missed calls can come back."""

    @abstractmethod
    def _require_working(self) -> None:
        """Raise if an earlier call has failed."""

    @abstractmethod
    def _settle_call(self, error: BaseException | None = None) -> None:
        """End a phase that an exception has left before its scope could, see `OpenCall.settle`. For hooks: the methods
        of a buffer have `calling.call` around them.
        """

    @abstractmethod
    def _scope(self, operation: str, phase: str, order: CallOrder) -> Any:
        """Return what surrounds a phase, see `ops.CallScope`. Its `announce` is called with the call before peers can
        see anything of the phase: from then on, what goes wrong goes wrong for all ranks.

        Args:
            operation: One of `METHODS`.
            phase: What a trace adds to it; empty: both phases.
            order: How it stands to the caller's stream.
        """

    @abstractmethod
    def _new_dispatch(
        self,
        kind: DispatchKind,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[Packed, LowLatencyPhases]:
        """Return the results of a dispatch, still to be filled, and its phases."""

    @abstractmethod
    def _new_combine(
        self, kind: CombineKind, rows: CombineInputs, out: torch.Tensor | None, wait_stats: torch.Tensor | None
    ) -> tuple[torch.Tensor, LowLatencyPhases]:
        """Return the result of a combine, still to be filled, and its phases."""

    @abstractmethod
    def _new_barrier(self) -> LowLatencyPhases:
        """Return the phases of a call without rows."""

    @abstractmethod
    def _join(self, scope: Any) -> JoinResult:
        """Get into step with all ranks that are not masked."""

    def _tell_lost(self, met: JoinResult) -> None:
        """Warn of the ranks that did not come. On a GPU the host learns of them later."""
        return

    @abstractmethod
    def _plan_combine(self, where: str, geometry: Geometry) -> SetPlan:
        """Return where the rows of a combine lie."""

    @abstractmethod
    def _settle(self) -> None:
        """Wait until everything that is queued on the host has been made."""

    @abstractmethod
    def _slot_memory(self, offset: int, num_bytes: int, last_call: int) -> torch.Tensor:
        """Return memory of a slot, which call `last_call` used last, for the caller to write. [num_bytes] uint8."""

    @abstractmethod
    def update_mask(self, rank: int, is_masked: bool) -> None:
        """Mask a rank for this rank's calls, or unmask it. It takes effect after what is queued."""

    @abstractmethod
    def query_mask(self, status: torch.Tensor) -> None:
        """Write the masks into [R] int32: 1 where a rank is masked."""

    @abstractmethod
    def clean_mask(self) -> None:
        """Unmask all ranks."""
