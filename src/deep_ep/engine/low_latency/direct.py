"""Low-latency calls on the CPU (`docs/low-latency.md`): publish rows in one's own memory, fetch from the peers'.

Ranks of other nodes are sent their part, and fetch it where it has arrived (`remote.py`).
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from ...errors import named
from ...event import EventHandle
from ...log import log_event
from ...stream import CommStream
from ...transport import LOW_LATENCY as REFUSED
from ...transport import Arena, ordinary_tensor
from ...transport.board import NUM_SENT_POSTS
from ...transport.sparse import GRAIN_BYTES, HollowMemory
from ...transport.window import SENT_TABLES_BYTES
from ..cpu.call import Chain
from ..payload import apart
from ..protocol import LOW_LATENCY
from .calls import BARRIER, COMBINE, METHODS, CallMode, CombineInputs, Combining, Dispatching, Hook, Packed
from .combine import LowLatencyCombine
from .dispatch import LowLatencyDispatch
from .geometry import NUM_SETS, Geometry, RowFormat, SetPlan, bytes_for_two, plan_combine, plan_dispatch
from .in_flight import InFlight
from .phases import Barrier, LowLatencyCall, warn_of_masks
from .rejoin import Met, meet
from .shared import Shared
from .slots import FREE_SLOT, NO_SLOT, OWN_SLOT, Slots, zero_copy_view

if TYPE_CHECKING:  # it needs sockets that other systems do not have
    from ...transport.mesh import Mesh

_LEAST_RECYCLED_BYTES = 1 << 20  # below, torch's own allocation is as good
_NO_PLAN = SetPlan(GRAIN_BYTES, False)  # of a call without rows


class DirectLowLatency:
    """Low-latency calls of one buffer.

    Args:
        chain: The normal calls of the buffer, with which these share their failures.
        stream: Where communication runs.
        num_bytes: Bytes that this rank asks for; the largest number of all ranks is used.
        enable_shrink: Mask ranks that stay silent, instead of failing.
        mesh: The links to ranks of other nodes; None: there are none.
    """

    def __init__(self, chain: Chain, stream: CommStream, num_bytes: int, enable_shrink: bool, mesh: Mesh | None = None):
        segment = chain.window.low_latency
        assert segment is not None, "the window has low-latency memory if any rank asks for it"
        assert segment.span.num_bytes >= num_bytes + SENT_TABLES_BYTES
        self._chain = chain
        self._stream = stream
        self._slots = Slots()
        self._in_flight = InFlight(self._slots)
        self._results = Arena(HollowMemory())
        self._num_calls: Counter[str] = Counter()
        self.shared = Shared(chain.window, segment, enable_shrink, mesh)

    @property
    def num_calls(self) -> dict[str, int]:
        """How many calls of each kind this rank has received."""
        return dict(self._num_calls)

    # Calls -----------------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        kind: Dispatching,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[Packed, EventHandle | None, Hook | None]:
        """Send each token to its experts; see `LowLatencyEngine`."""
        geometry, form = kind.geometry, kind.form
        plan = plan_dispatch("low_latency_dispatch", self.shared.num_bytes, geometry, form)
        packed = self._empty_packed(geometry, form)
        # What a call fills after it has returned, see `apart`.
        written = packed
        if kind.mode.is_unfinished:
            written = Packed(*apart(packed))
            wait_stats, recv_stats = apart((wait_stats, recv_stats))
        call = LowLatencyDispatch(self.shared, plan, wait_stats, x, topk_idx, geometry, form, written, recv_stats)
        slot, wide_bytes = (FREE_SLOT, bytes_for_two(geometry, form)) if plan.takes_slot else (NO_SLOT, 0)
        return packed, *self._make(call, kind.mode, slot, wide_bytes)

    def combine(
        self,
        kind: Combining,
        rows: CombineInputs,
        out: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[torch.Tensor, EventHandle | None, Hook | None]:
        """Bring the experts' rows back; see `LowLatencyEngine`."""
        geometry = kind.geometry
        if self._stream.query():  # else the dispatch that fills it may still be under way
            _check_layout(rows.layout_range, geometry)
        plan = plan_combine("low_latency_combine", self.shared.num_bytes, geometry)
        if out is None:
            out = self._chain.result((rows.topk_idx.size(0), geometry.hidden), torch.bfloat16)
        slot = OWN_SLOT if kind.zero_copy or self._slots.has_lease(rows.src_info) else FREE_SLOT
        if slot == OWN_SLOT:
            self._chain.require_working()
            self._in_flight.require_capacity(METHODS[COMBINE], slot)  # a refused call must not take the tensor
        written, stats = apart((out, wait_stats)) if kind.mode.is_unfinished else (out, wait_stats)
        call = LowLatencyCombine(self.shared, plan, stats, kind, rows, written)
        if slot == OWN_SLOT:
            call.slot = self._slots.give_back(rows.src_info, self._in_flight.next_number)
        return out, *self._make(call, kind.mode, slot)

    def clean(self) -> None:
        """Make a barrier over the ranks that are not masked. If ranks may be masked, they first agree on its number."""
        self._chain.require_working()
        barrier = Barrier(self.shared, _NO_PLAN, None)
        if self.shared.can_mask:
            self._rejoin(barrier)
        self._make(barrier, CallMode(), NO_SLOT)

    def _rejoin(self, barrier: Barrier) -> None:
        """Get into step with all ranks that are not masked. Ranks that do not come are masked."""
        shared, window = self.shared, self.shared.window
        self._in_flight.abandon()

        def join() -> Met:
            met = meet(shared, self._in_flight.next_number, window.raise_if_given_up)
            shared.mask(met.lost, is_for_all=True)
            shared.go_on_from(met.number)
            return met

        with self._calling(barrier):
            met = self._stream.run(join, on_abandon=lambda error: self._abandon(error, barrier))
            self._in_flight.go_on_from(met.number)
            barrier.num_ended += 1
        log_event(
            logging.INFO,
            f"low latency: in step with all but {len(met.lost)} ranks, at call {met.number} ({window.me()})",
        )
        if met.lost:
            warn_of_masks(f"{METHODS[BARRIER]} (call {met.number})", met.lost, window.me())

    def combine_buffer(self, src_info: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """Return the zero-copy tensor of a handle. Memory is committed when it is written: most rows never are."""
        where = "get_next_low_latency_combine_buffer"
        plan = plan_combine(where, self.shared.num_bytes, geometry)
        self._stream.synchronize()  # a queued combine may still have to be read by the peers
        index, last_call = self._slots.lease(src_info, self._in_flight.num_consumed)
        self.shared.spend(last_call)  # from now on the caller writes there
        offset = plan.slot_offset(index)
        return zero_copy_view(self.shared.uncommitted_bytes(offset, geometry.combine_bytes), geometry)

    # Masks -----------------------------------------------------------------------------------------------------------

    def update_mask(self, rank: int, is_masked: bool) -> None:
        """Mask a rank for this rank's calls, or unmask it. It takes effect after what is queued."""
        shared = self.shared
        self._stream.run(lambda: shared.masks.update({rank: 0}) if is_masked else shared.unmask([rank]))

    def query_mask(self, status: torch.Tensor) -> None:
        """Write the masks into [R] int32."""

        def write() -> None:
            status.copy_(torch.tensor([int(rank in self.shared.masks) for rank in range(status.numel())]))

        self._stream.run(write)

    def clean_mask(self) -> None:
        """Unmask all ranks."""
        masked = sorted(self.shared.masked)
        self._stream.run(lambda: self.shared.unmask(self.shared.masked))
        if masked:
            log_event(logging.INFO, f"low latency: {named(masked)} unmasked ({self.shared.window.me()})")

    def refuse(self, reason: str) -> None:
        """Report to the peers that this rank does not make the next call."""
        window, mesh = self.shared.window, self.shared.mesh
        number = self._in_flight.next_number

        def post() -> None:
            refusal = window.refuse(REFUSED, number, reason)
            if mesh is not None:
                mesh.refuse(refusal)

        self._stream.run_in_turn(post)  # remote ranks receive calls in their order

    def trim(self) -> int:
        """Give unused memory of results back to the system. Returns the bytes given back."""
        mesh = self.shared.mesh
        return self._results.trim() + (mesh.receive_arena.trim() if mesh is not None else 0)

    # Inside ----------------------------------------------------------------------------------------------------------

    def _make(
        self, call: LowLatencyCall, mode: CallMode, slot: int, wide_bytes: int = 0
    ) -> tuple[EventHandle | None, Hook | None]:
        """Make a call: its send phase, and its receive phase unless a hook does that.

        Args:
            call: The call.
            mode: How it stands to the caller's stream.
            slot: What it takes of the slots. Its own one it has already.
            wide_bytes: Of a dispatch that takes a slot: the `num_rdma_bytes` with which it would take none.
        """
        self._chain.require_working()
        operation = call.agreement.operation
        where = METHODS[operation]
        self._in_flight.require_capacity(where, slot)
        send, receive = (
            self._propagating_failure(call, call.send, "send"),
            self._propagating_failure(call, call.receive, "receive"),
        )
        with self._calling(call):
            call.number = self._in_flight.send(where, slot, wide_bytes)
            call.newest_spent = self._newest_spent(call, slot)
            call.own_refusal = self.shared.window.refusals[REFUSED]
            if mode.has_hook:
                self._run(call, send)
                return None, self._hook(call, receive)

            def both() -> None:
                send()
                receive()

            self._in_flight.receive(call.number)
            if mode.is_async:
                return EventHandle(self._stream.submit(both)), None
            self._run(call, both)
            return None, None

    def _newest_spent(self, call: LowLatencyCall, slot: int) -> int:
        """Return the newest call whose rows, or post and table, this call overwrites. A free slot is taken here."""
        spent = call.number - NUM_SENT_POSTS
        if slot == FREE_SLOT:
            call.slot, last_call = self._slots.take(call.number)
            spent = max(spent, last_call)
        elif slot == NO_SLOT and not isinstance(call, Barrier):
            spent = max(spent, call.number - NUM_SETS)
        return max(spent, 0)

    def _hook(self, call: LowLatencyCall, receive: Callable[[], None]) -> Hook:
        def hook() -> None:
            self._chain.require_working()
            self._in_flight.require_pending(call.number)
            with self._calling(call):
                self._in_flight.receive(call.number)
                self._run(call, receive)

        return hook

    @contextmanager
    def _calling(self, call: LowLatencyCall) -> Iterator[None]:
        """A context manager around a phase of a call.

        Whatever exception leaves it, the phase has ended, or the buffer has failed.

        A number that was given to a call, and never sent, would be taken for sent as soon as the next one is; a call
        that was never received would be taken for read.
        """
        self._chain.is_calling = True
        num_ended = call.num_ended
        try:
            yield
        except BaseException as error:
            if call.num_ended == num_ended and self.shared.window.failure is None:
                if self._stream.query():
                    self._chain.fail(error, call.name)
                else:
                    self._abandon(error, call)
            raise

    def _run(self, call: LowLatencyCall, work: Callable[[], None]) -> None:
        """Run work of a call on the comm stream, and wait for it. If the wait is interrupted, the call fails."""
        self._stream.run(work, on_abandon=lambda error: self._abandon(error, call))

    def _abandon(self, error: BaseException, call: LowLatencyCall) -> bool:
        """Fail a call that the comm stream may be in the middle of. Returns what `CpuScope._abandon` does."""
        self._chain.give_up(error, call.name)
        with suppress(RuntimeError):  # the thread has ended, and has reported to all peers that this rank leaves
            self._stream.submit(self._chain.tell_failure)  # links are the comm stream's alone
        return self._chain.is_told_late

    def _propagating_failure(self, call: LowLatencyCall, work: Callable[[], None], name: str) -> Callable[[], None]:
        """A context manager that reports an error in a phase to all ranks."""

        def phase() -> None:
            self._chain.require_working()
            trace = self.shared.window.trace
            try:
                if trace is not None:
                    trace.begin_call(f"{call.agreement.operation} {name}", call=call.number)
                work()
                if trace is not None:
                    trace.end_call(path=LOW_LATENCY)
            except BaseException as error:
                self._chain.fail(error, call.name)
                raise
            call.num_ended += 1
            if name == "receive":
                self._num_calls[call.agreement.operation] += 1

        return phase

    def _empty_packed(self, geometry: Geometry, form: RowFormat) -> Packed:
        num_local, num_rows = geometry.num_local_experts, geometry.num_rows
        scales = None
        if form.scale_dtype is not None:
            scales = self._result((num_local, geometry.num_scales(form), num_rows), form.scale_dtype).transpose(1, 2)
        return Packed(
            self._result((num_local, num_rows, geometry.hidden), form.dtype),
            ordinary_tensor((num_local,), torch.int32),
            ordinary_tensor((num_local, num_rows), torch.int32),
            ordinary_tensor((num_local, geometry.num_ranks), torch.int64),
            scales,
        )

    def _result(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor, most of which is never touched. Memory of large ones is recycled."""
        large = math.prod(shape) * dtype.itemsize >= _LEAST_RECYCLED_BYTES
        region = self._results.allocate(shape, dtype) if large else None
        return region if region is not None else ordinary_tensor(shape, dtype)


def _check_layout(layout_range: torch.Tensor, geometry: Geometry) -> None:
    """Check the rows of a handle before anything is sent: a caller's mistake must not close the buffer.

    Raises:
        ValueError: It names rows that a dispatch cannot have brought.
    """
    counts = layout_range & 0xFFFFFFFF
    last = int((counts + (layout_range >> 32)).amax())
    num_rows, most = int(counts.sum()), geometry.num_experts * geometry.max_tokens
    if int(layout_range.amin()) < 0 or last > geometry.num_rows or num_rows > most:
        raise ValueError(
            f"low_latency_combine: the `handle`'s `packed_recv_layout_range` names {num_rows} rows, up to row {last} "
            f"of an expert: at most {most} rows, and {geometry.num_rows} of an expert, can have come. "
            "Pass the handle as low_latency_dispatch returned it"
        )
