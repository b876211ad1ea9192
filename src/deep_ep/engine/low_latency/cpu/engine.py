"""Low-latency calls on the CPU (`docs/low-latency.md`): publish rows in one's own memory, fetch from the peers'.

Ranks of other nodes are sent their part, and fetch it where it has arrived (`remote.py`).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ....errors import named
from ....log import log_event
from ....stream import CommStream
from ....transport import LOW_LATENCY as LOW_LATENCY_CALLS
from ....transport import Arena, ordinary_tensor
from ....transport.sparse import GRAIN_BYTES, HollowMemory
from ....transport.window import SENT_TABLES_BYTES
from ...cpu.call import Chain, recycled
from ...cpu.scope import CpuScope
from ...ops import CallOrder
from ...payload import apart
from ..calls import BARRIER, COMBINE, DISPATCH, METHODS, CombineInputs, CombineKind, DispatchKind, JoinResult, Packed
from ..engine import LowLatencyEngine
from ..geometry import Geometry, RowFormat, SetPlan, plan_combine, plan_dispatch
from .combine import LowLatencyCombine
from .dispatch import LowLatencyDispatch
from .phases import Barrier, warn_of_masks
from .rejoin import meet
from .shared import Shared

if TYPE_CHECKING:  # it needs sockets that other systems do not have
    from ....transport.mesh import Mesh

_NO_PLAN = SetPlan(GRAIN_BYTES, False)  # of a call without rows


class CpuLowLatency(LowLatencyEngine):
    """The low-latency calls of a buffer on the CPU.

    Args:
        chain: The normal calls of the buffer, with which these share their failures.
        stream: Where communication runs.
        num_bytes: Bytes that this rank asks for; the largest number of all ranks is used.
        enable_shrink: Mask ranks that stay silent, instead of failing.
        mesh: The links to ranks of other nodes; None: there are none.
    """

    def __init__(self, chain: Chain, stream: CommStream, num_bytes: int, enable_shrink: bool, mesh: Mesh | None = None):
        super().__init__(stream)
        segment = chain.window.low_latency
        assert segment is not None, "the window has low-latency memory if any rank asks for it"
        assert segment.span.num_bytes >= num_bytes + SENT_TABLES_BYTES
        self._chain = chain
        self._results = Arena(HollowMemory())
        self.shared = Shared(chain.window, segment, enable_shrink, chain.require_working, chain.stats, mesh)

    @property
    def num_calls(self) -> dict[str, int]:
        """How many calls of each kind this rank has received."""
        return dict(self.shared.num_calls)

    # Calls -----------------------------------------------------------------------------------------------------------

    @property
    def _can_join(self) -> bool:
        return self.shared.can_mask

    def _require_working(self) -> None:
        self._chain.require_working()

    def _settle_call(self, error: BaseException | None = None) -> None:
        self._chain.settle(error)

    def _scope(self, operation: str, phase: str, order: CallOrder) -> CpuScope:
        del operation, phase  # the call has its name, and records its phases itself
        return CpuScope(self._chain, self._stream, order)

    def _new_dispatch(
        self,
        kind: DispatchKind,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[Packed, LowLatencyDispatch]:
        geometry, form = kind.geometry, kind.form
        plan = plan_dispatch(METHODS[DISPATCH], self.shared.num_bytes, geometry, form)
        packed = self._empty_packed(geometry, form)
        # What a call fills after it has returned, see `apart`.
        written = packed
        if kind.mode.is_unfinished:
            written = Packed(*apart(packed))
            wait_stats, recv_stats = apart((wait_stats, recv_stats))
        return packed, LowLatencyDispatch(
            self.shared, plan, wait_stats, x, topk_idx, geometry, form, written, recv_stats
        )

    def _new_combine(
        self, kind: CombineKind, rows: CombineInputs, out: torch.Tensor | None, wait_stats: torch.Tensor | None
    ) -> tuple[torch.Tensor, LowLatencyCombine]:
        geometry = kind.geometry
        if self._stream.query():  # else the dispatch that fills it may still be under way
            _check_layout(rows.layout_range, geometry)
        plan = self._plan_combine(METHODS[COMBINE], geometry)
        if out is None:
            out = self._chain.result((rows.topk_idx.size(0), geometry.hidden), torch.bfloat16)
        written, stats = apart((out, wait_stats)) if kind.mode.is_unfinished else (out, wait_stats)
        return out, LowLatencyCombine(self.shared, plan, stats, kind, rows, written)

    def _new_barrier(self) -> Barrier:
        return Barrier(self.shared, _NO_PLAN, None)

    def _join(self, scope: CpuScope) -> JoinResult:
        """Get into step with all ranks that are not masked. Ranks that do not come are masked."""
        shared, following, found = self.shared, self._in_flight.next_number, []

        def join() -> None:
            met = meet(shared, following, shared.window.raise_if_given_up)
            shared.mask(met.lost, is_for_all=True)
            shared.go_on_from(met.number)
            found.append(met)

        scope.launch(join)
        scope.run()
        return found[0]

    def _tell_lost(self, met: JoinResult) -> None:
        me = self.shared.window.me()
        log_event(logging.INFO, f"low latency: in step with all but {len(met.lost)} ranks, at call {met.number} ({me})")
        if met.lost:
            warn_of_masks(f"{METHODS[BARRIER]} (call {met.number})", met.lost, me)

    def _plan_combine(self, where: str, geometry: Geometry) -> SetPlan:
        return plan_combine(where, self.shared.num_bytes, geometry)

    def _settle(self) -> None:
        self._stream.synchronize()  # a queued combine may still have to be read by the peers

    def _slot_memory(self, offset: int, num_bytes: int, last_call: int) -> torch.Tensor:
        """Return memory of a slot. It is committed when it is written: most rows never are."""
        self.shared.spend(last_call)  # from now on the caller writes there
        return self.shared.uncommitted_bytes(offset, num_bytes)

    # Masks -----------------------------------------------------------------------------------------------------------

    def update_mask(self, rank: int, is_masked: bool) -> None:
        """Mask a rank for this rank's calls, or unmask it. It takes effect after what is queued."""
        shared = self.shared
        # From call 0 on: also in calls that are in flight.
        self._stream.run(lambda: shared.masks.update({rank: 0}) if is_masked else shared.unmask([rank]))

    def query_mask(self, status: torch.Tensor) -> None:
        """Write the masks into [R] int32."""

        def write() -> None:
            masks = [int(rank in self.shared.masks) for rank in range(status.numel())]
            status.copy_(torch.tensor(masks, device="cpu"))

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
            refusal = window.refuse(LOW_LATENCY_CALLS, number, reason)
            if mesh is not None:
                mesh.refuse(refusal)

        self._stream.run_in_turn(post)  # remote ranks receive calls in their order

    def trim(self) -> int:
        """Give unused memory of results back to the system. Returns the bytes given back."""
        mesh = self.shared.mesh
        return self._results.trim() + (mesh.receive_arena.trim() if mesh is not None else 0)

    # Results ---------------------------------------------------------------------------------------------------------

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
        return recycled(self._results, shape, dtype)


def _check_layout(layout_range: torch.Tensor, geometry: Geometry) -> None:
    """Check the rows of a handle before anything is sent: a caller's mistake must not close the buffer.

    Raises:
        ValueError: It names rows that a dispatch cannot have brought.
    """
    ranges = layout_range.numpy()
    counts = ranges & 0xFFFFFFFF
    last = int((counts + (ranges >> 32)).max())
    num_rows, most = int(counts.sum()), geometry.num_experts * geometry.max_tokens
    if ranges.min() < 0 or last > geometry.num_rows or num_rows > most:
        raise ValueError(
            f"low_latency_combine: the `handle`'s `packed_recv_layout_range` names {num_rows} rows, up to row {last} "
            f"of an expert: at most {most} rows, and {geometry.num_rows} of an expert, can have come. "
            "Pass the handle as low_latency_dispatch returned it"
        )
