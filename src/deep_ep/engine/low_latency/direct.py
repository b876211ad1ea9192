"""Low-latency calls on the CPU (`docs/low-latency.md`): publish rows in one's own memory, fetch from the peers'.

Ranks of other nodes are sent their part, and fetch it where it has landed (`far.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import torch

from ...event import EventHandle
from ...stream import CommStream
from ...transport import LOW_LATENCY as REFUSED
from ...transport import Arena, ordinary_tensor
from ...transport.sparse import GRAIN_BYTES, HollowMemory
from ...transport.window import SENT_TABLES_BYTES
from ..cpu.call import Chain
from ..parcel import apart
from ..protocol import LOW_LATENCY
from .calls import COMBINE, METHODS, Combining, Dispatching, Hook, Packed, Rows, Way
from .combine import Combine
from .dispatch import Dispatch
from .flights import Flights
from .geometry import Form, Geometry, Plan, plan_sets
from .halves import Barrier, LowLatencyCall
from .shared import Shared
from .zero_copy import ZeroCopy, zero_copy_view

if TYPE_CHECKING:  # it needs sockets that other systems do not have
    from ...transport.mesh import Mesh

_LEAST_RECYCLED_BYTES = 1 << 20  # below, torch's own allocation is as good
_NO_PLAN = Plan(GRAIN_BYTES, 1)  # of a call without rows


class DirectLowLatency:
    """Low-latency calls of one buffer.

    Args:
        chain: The normal calls of the buffer, with which these share their failures.
        stream: Where communication runs.
        num_bytes: That this rank asked for; the largest wish of all ranks counts.
        enable_shrink: Mask ranks that stay silent, instead of failing.
        mesh: The links to ranks of other nodes; None: there are none.
    """

    def __init__(self, chain: Chain, stream: CommStream, num_bytes: int, enable_shrink: bool, mesh: Mesh | None = None):
        segment = chain.window.low_latency
        assert segment is not None, "the window has low-latency memory if any rank asks for it"
        assert segment.span.num_bytes >= num_bytes + SENT_TABLES_BYTES
        self._chain = chain
        self._stream = stream
        self._flights = Flights()
        self._zero_copy = ZeroCopy()
        self._results = Arena(HollowMemory())
        self.shared = Shared(chain.window, segment, enable_shrink, mesh)

    # Calls -----------------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        kind: Dispatching,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[Packed, EventHandle | None, Hook | None]:
        """Send each token to its experts; see `LowLatency`."""
        geometry, form = kind.geometry, kind.form
        plan = plan_sets("low_latency_dispatch", self.shared.num_bytes, geometry.dispatch_bytes(form), geometry)
        packed = self._empty_packed(geometry, form)
        # What a call fills after it has returned, see `apart`.
        written = packed
        if kind.way.is_unfinished:
            written = Packed(*apart(packed))
            wait_stats, recv_stats = apart((wait_stats, recv_stats))
        call = Dispatch(self.shared, plan, wait_stats, x, topk_idx, geometry, form, written, recv_stats)
        return packed, *self._make(call, kind.way)

    def combine(
        self,
        kind: Combining,
        rows: Rows,
        out: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[torch.Tensor, EventHandle | None, Hook | None]:
        """Bring the experts' rows back; see `LowLatency`."""
        geometry = kind.geometry
        if self._stream.query():  # else the dispatch that fills it may still be under way
            _check_layout(rows.layout_range, geometry)
        plan = plan_sets("low_latency_combine", self.shared.num_bytes, geometry.combine_bytes, geometry)
        if out is None:
            out = self._chain.result((rows.topk_idx.size(0), geometry.hidden), torch.bfloat16)
        zero_copy_offset = None
        if kind.zero_copy:
            self._make_way(METHODS[COMBINE], plan.num_sets)  # a refused call must not take the tensor
            index = self._zero_copy.give(rows.src_info, self._flights.next_number)
            zero_copy_offset = plan.zero_copy_offset(index)
        written, stats = apart((out, wait_stats)) if kind.way.is_unfinished else (out, wait_stats)
        call = Combine(self.shared, plan, stats, kind, rows, written, zero_copy_offset)
        return out, *self._make(call, kind.way)

    def clean(self) -> None:
        """A barrier over the ranks that are not masked."""
        self._make(Barrier(self.shared, _NO_PLAN, None), Way())

    def combine_buffer(self, src_info: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """The zero-copy tensor of a handle. Memory comes as it is written: most rows never are."""
        where = "get_next_low_latency_combine_buffer"
        plan = plan_sets(where, self.shared.num_bytes, geometry.combine_bytes, geometry)
        self._stream.synchronize()  # a queued combine may still have to be read by the peers
        offset = plan.zero_copy_offset(self._zero_copy.take(src_info, self._flights.num_consumed))
        return zero_copy_view(self.shared.uncommitted_bytes(offset, geometry.combine_bytes), geometry)

    # Masks -----------------------------------------------------------------------------------------------------------

    def update_mask(self, rank: int, is_masked: bool) -> None:
        """Mask a rank for this rank's calls, or no longer. Behind what is queued."""
        change = self.shared.masked.add if is_masked else self.shared.masked.discard
        self._stream.run(lambda: change(rank))

    def query_mask(self, status: torch.Tensor) -> None:
        """Write the masks into [R] int32."""

        def write() -> None:
            status.copy_(torch.tensor([int(rank in self.shared.masked) for rank in range(status.numel())]))

        self._stream.run(write)

    def clean_mask(self) -> None:
        """Mask nobody."""
        self._stream.run(self.shared.masked.clear)

    def refuse(self, reason: str) -> None:
        """Tell the peers that this rank does not make the next call."""
        window, mesh = self.shared.window, self.shared.mesh
        number = self._flights.next_number

        def post() -> None:
            refusal = window.refuse(REFUSED, number, reason)
            if mesh is not None:
                mesh.refuse(refusal)

        self._stream.run_in_turn(post)  # far ranks hear of calls in their order

    def trim(self) -> int:
        """Give memory of results that nobody uses back to the system. Returns the bytes given back."""
        mesh = self.shared.mesh
        return self._results.trim() + (mesh.grounds.trim() if mesh is not None else 0)

    # Inside ----------------------------------------------------------------------------------------------------------

    def _make(self, call: LowLatencyCall, way: Way) -> tuple[EventHandle | None, Hook | None]:
        """Make a call: its send half, and its receive half unless there is a hook for that."""
        self._chain.require_working()
        operation = call.agreement.operation
        num_sets = 0 if isinstance(call, Barrier) else call.plan.num_sets
        self._make_way(METHODS[operation], num_sets)
        send, receive = self._contagious(call, call.send, "send"), self._contagious(call, call.receive, "receive")
        with self._calling(call):
            call.newest_spent = self._flights.newest_spent(num_sets)
            call.number = self._flights.send(METHODS[operation], num_sets)
            call.own_refusal = self.shared.window.refusals[REFUSED]
            if way.has_hook:
                self._run(call, send)
                return None, self._hook(call, receive)

            def both() -> None:
                send()
                receive()

            self._flights.receive(call.number)
            if way.is_async:
                return EventHandle(self._stream.submit(both)), None
            self._run(call, both)
            return None, None

    def _make_way(self, where: str, num_sets: int) -> None:
        """As `Flights.make_way`, with a barrier that is a call by itself."""
        self._flights.make_way(where, num_sets, self.clean)
        self._chain.is_calling = False

    def _hook(self, call: LowLatencyCall, receive: Callable[[], None]) -> Hook:
        def hook() -> None:
            self._chain.require_working()
            self._flights.require_pending(call.number)
            with self._calling(call):
                self._flights.receive(call.number)
                self._run(call, receive)

        return hook

    @contextmanager
    def _calling(self, call: LowLatencyCall) -> Iterator[None]:
        """Around a half of a call. Whatever exception leaves it, the half has ended, or the buffer has failed.

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
        """Have work of a call done on the comm stream, and wait for it. If the wait is interrupted, the call fails."""
        self._stream.run(work, on_abandon=lambda error: self._abandon(error, call))

    def _abandon(self, error: BaseException, call: LowLatencyCall) -> bool:
        """Fail a call that the comm stream may be in the middle of; the answer is that of `CpuScope._abandon`."""
        self._chain.give_up(error, call.name)
        with suppress(RuntimeError):  # the thread has ended, and has told everybody that this rank leaves
            self._stream.submit(self._chain.tell_failure)  # links are the comm stream's alone
        return self._chain.is_told_late

    def _contagious(self, call: LowLatencyCall, work: Callable[[], None], name: str) -> Callable[[], None]:
        """Whatever goes wrong in a half goes wrong for all ranks."""

        def half() -> None:
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

        return half

    def _empty_packed(self, geometry: Geometry, form: Form) -> Packed:
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
        """An uninitialised tensor, most of which is never touched: recycled if it is large."""
        large = math.prod(shape) * dtype.itemsize >= _LEAST_RECYCLED_BYTES
        region = self._results.allocate(shape, dtype) if large else None
        return region if region is not None else ordinary_tensor(shape, dtype)


def _check_layout(layout_range: torch.Tensor, geometry: Geometry) -> None:
    """Check what a handle says of rows before anything is sent: a mistake must not close the buffer.

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
