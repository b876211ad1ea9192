"""Low-latency calls on a GPU: two halves of kernels in a stream (`docs/low-latency.md`).

A call is `send` (one kernel, whose last block signals and, where there is no hook, waits), `wait_for` (one warp, behind
a hook) and `receive` (one kernel). The host launches and waits for nothing, and which set a call uses is found on the
device: everything can be captured in a graph.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...event import EventHandle
from ...kernels.low_latency import combine, dispatch, words
from ...kernels.low_latency.words import Call, Patience, Spots
from ...stream import LaunchStream
from ...transport import MAX_EXPERTS
from ...transport.device import DeviceWindow
from ..call import OPERATIONS, Agreement
from ..digest import pack
from ..signals import Signals
from .calls import BARRIER, COMBINE, DISPATCH, METHODS, Hook, Packed, Rows, Way, agreement_of
from .flights import Flights
from .geometry import NUM_ZERO_COPY, Form, Geometry, Plan, plan_sets
from .zero_copy import ZeroCopy, zero_copy_view


class _Setup(NamedTuple):
    """What follows from the sizes of a call. Calls come again and again, so it is worked out once.

    Attributes:
        call: The call, for its kernels.
        sizes: Of its rows, likewise.
        num_sets: That it divides the memory into.
        zero_copy_offsets: Of a combine.
    """

    call: Call
    sizes: Any
    num_sets: int
    zero_copy_offsets: tuple[int, ...]


class Halves(NamedTuple):
    """How a call is launched.

    Attributes:
        send: Publishes and signals; with a patience, its last block waits for the peers.
        wait: Waits for the peers, in a kernel of its own. Takes the age of the call.
        receive: Fetches. Takes the age of the call.
        patience: With which `send` may wait; None: it cannot.
        held: Tensors that the call uses.
    """

    send: Callable[..., None]
    wait: Callable[[int], None]
    receive: Callable[[int], None]
    patience: Patience | None
    held: tuple[torch.Tensor | None, ...]


class StreamedLowLatency:
    """Low-latency calls of one buffer, by kernels.

    Args:
        signals: Of the buffer: limits and failures.
        window: Of the buffer.
        stream: Where kernels are launched.
        num_bytes: Of the low-latency memory, the same on all ranks.
        enable_shrink: Mask ranks that stay silent, instead of failing.
    """

    def __init__(
        self, signals: Signals, window: DeviceWindow, stream: LaunchStream, num_bytes: int, enable_shrink: bool
    ):
        num_ranks, device = window.num_ranks, window.device
        self._signals = signals
        self._stream = stream
        self._num_bytes = num_bytes
        self._can_mask = enable_shrink
        self._board_bytes = Spots.board_bytes(num_ranks, MAX_EXPERTS)
        self._part = window.set_aside(self._board_bytes + num_bytes)
        self._host = torch.zeros(num_ranks + 1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._masked_word = ctypes.c_int64.from_address(self._host.data_ptr() + 8 * num_ranks)
        self._told = 0
        self.spots = Spots(
            places=signals.places,
            windows=torch.tensor(self._part.addresses, dtype=torch.int64, device=device),
            state=torch.zeros(Spots.state_room(num_ranks), dtype=torch.int64, device=device),
            mask=torch.zeros(num_ranks, dtype=torch.int32, device=device),
            seen=torch.zeros(num_ranks, 2, dtype=torch.int64, device=device),
            host=self._host,
            max_experts=MAX_EXPERTS,
        )
        signals.low_latency_words = self.spots.seen
        self._setups: dict[tuple, _Setup] = {}
        self._flights = Flights()
        self._zero_copy = ZeroCopy()
        words.prepare_all(self.spots)

    # Calls -----------------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        geometry: Geometry,
        form: Form,
        way: Way,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[Packed, EventHandle | None, Hook | None]:
        """Send each token to its experts; see `LowLatency`."""
        setup = self._dispatch_setup(geometry, form)
        call, sizes, spots = setup.call, setup.sizes, self.spots
        packed = _empty_packed(geometry, form, x.device)

        patience = Patience(wait_stats, self._can_mask)
        halves = Halves(
            send=functools.partial(dispatch.send, spots, call, sizes, x, topk_idx),
            wait=functools.partial(words.wait_for, spots, call, patience=patience, is_dispatch=True),
            receive=lambda age: dispatch.receive(spots, call, sizes, age, *packed, recv_stats),
            patience=patience,
            held=(x, topk_idx, *packed, recv_stats, wait_stats),
        )
        return packed, *self._make(DISPATCH, setup.num_sets, way, halves)

    def combine(
        self,
        rows: Rows,
        geometry: Geometry,
        way: Way,
        out: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[torch.Tensor, EventHandle | None, Hook | None]:
        """Bring the experts' rows back; see `LowLatency`."""
        setup = self._combine_setup(geometry, rows.use_logfmt)
        call, sizes, spots = setup.call, setup.sizes, self.spots
        topk_idx, topk_weights = rows.topk_idx, rows.topk_weights
        combined = out if out is not None else rows.x.new_empty(topk_idx.size(0), geometry.hidden)
        earlier = torch.empty_like(topk_idx, dtype=torch.int32)
        offset = None
        if rows.zero_copy:
            self._make_way(COMBINE, setup.num_sets)  # a refused call must not take the tensor
            offset = setup.zero_copy_offsets[self._zero_copy.give(rows.src_info, self._flights.next_number)]

        patience = Patience(wait_stats, self._can_mask)
        given = (rows.x, rows.layout_range, topk_idx, earlier, offset)
        halves = Halves(
            send=functools.partial(combine.send, spots, call, sizes, *given),
            wait=functools.partial(words.wait_for, spots, call, patience=patience, is_dispatch=False),
            receive=lambda age: combine.receive(spots, sizes, age, combined, topk_idx, topk_weights, earlier),
            patience=patience,
            held=(rows.x, topk_idx, topk_weights, rows.layout_range, earlier, combined, wait_stats),
        )
        return combined, *self._make(COMBINE, setup.num_sets, way, halves)

    def clean(self) -> None:
        """A barrier over the ranks that are not masked. The host does not wait."""
        patience = Patience(None, self._can_mask)
        call = _call(BARRIER, Plan(16, 1), Agreement(BARRIER))
        halves = Halves(
            send=lambda patience: words.signal(self.spots, call),  # noqa: ARG005 - it is one warp, and never waits
            wait=functools.partial(words.wait_for, self.spots, call, patience=patience, is_dispatch=False),
            receive=lambda age: None,  # noqa: ARG005
            patience=None,
            held=(),
        )
        self._make(BARRIER, 0, Way(), halves)

    def combine_buffer(self, src_info: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """The zero-copy tensor of a handle."""
        where = "get_next_low_latency_combine_buffer"
        plan = plan_sets(where, self._num_bytes, geometry.combine_bytes, geometry)
        offset = self._board_bytes + plan.zero_copy_offset(self._zero_copy.take(src_info, self._flights.num_consumed))
        return zero_copy_view(self._part.memory[offset : offset + geometry.combine_bytes], geometry)

    # Masks -----------------------------------------------------------------------------------------------------------

    def update_mask(self, rank: int, is_masked: bool) -> None:
        """Mask a rank for this rank's calls, or no longer; in the order of the caller's stream."""
        self._warn_of_masks()
        self.spots.mask[rank : rank + 1].fill_(int(is_masked))

    def query_mask(self, status: torch.Tensor) -> None:
        """Write the masks into [R] int32, in the order of the caller's stream."""
        status.copy_(self.spots.mask)
        self._warn_of_masks()

    def clean_mask(self) -> None:
        """Mask nobody."""
        self._warn_of_masks()
        self.spots.mask.zero_()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _dispatch_setup(self, geometry: Geometry, form: Form) -> _Setup:
        setup = self._setups.get((geometry, form))
        if setup is None:
            plan = plan_sets("low_latency_dispatch", self._num_bytes, geometry.dispatch_bytes(form), geometry)
            row = (geometry.row_bytes(form), geometry.scales_offset, geometry.places_offset(form))
            sizes = dispatch.Sizes(*_sizes_of(geometry), *row, form.use_fp8, form.round_scale)
            agreement = agreement_of(DISPATCH, geometry, form.dtype, form.scale_dtype, int(form.round_scale))
            setup = self._setups[geometry, form] = _Setup(_call(DISPATCH, plan, agreement), sizes, plan.num_sets, ())
        return setup

    def _combine_setup(self, geometry: Geometry, use_logfmt: bool) -> _Setup:
        setup = self._setups.get((geometry, use_logfmt))
        if setup is None:
            plan = plan_sets("low_latency_combine", self._num_bytes, geometry.combine_bytes, geometry)
            sizes = combine.Sizes(*_sizes_of(geometry), geometry.slot_bytes, geometry.ranges_offset, use_logfmt)
            agreement = agreement_of(COMBINE, geometry, torch.bfloat16, None, int(use_logfmt))
            offsets = tuple(plan.zero_copy_offset(index) for index in range(NUM_ZERO_COPY))
            call = _call(COMBINE, plan, agreement)
            setup = self._setups[geometry, use_logfmt] = _Setup(call, sizes, plan.num_sets, offsets)
        return setup

    def _make(self, operation: str, num_sets: int, way: Way, halves: Halves) -> tuple[EventHandle | None, Hook | None]:
        """Launch a call: its send half, and its receive half unless there is a hook for that."""
        if self._masked_word.value != self._told:
            self._warn_of_masks()
        self._make_way(operation, num_sets)
        flight = self._flights.send(METHODS[operation], num_sets)
        caller = self._stream.caller()
        signals, stream = self._signals, self._stream
        half = f"{operation} send" if way.has_hook else operation
        with signals.contagious(operation), stream.entered(None, way.is_async), signals.marked(half):
            if way.is_async:
                self._stream.hold(halves.held, self._stream.raw)
            self._signals.is_announced = True
            signals.mark("send")
            if way.has_hook:
                halves.send(patience=None)
            else:
                self._flights.receive(flight)
                halves.send(patience=halves.patience)
                if halves.patience is None:
                    signals.mark("wait")
                    halves.wait(0)
                signals.mark("receive")
                halves.receive(0)
        event = self._stream.leave(way.is_async)
        if not way.has_hook:
            return event, None

        def hook() -> None:
            self._signals.require_working()
            age = self._flights.age(flight)
            self._flights.receive(flight)
            with self._stream.behind(caller):
                half = f"{operation} receive"
                with signals.contagious(operation), stream.entered(None, False), signals.marked(half):
                    self._signals.is_announced = True
                    signals.mark("wait")
                    halves.wait(age)
                    signals.mark("receive")
                    halves.receive(age)
                self._stream.leave(False)

        return None, hook

    def _make_way(self, operation: str, num_sets: int) -> None:
        """Have everybody read what the next call writes over, or refuse it."""
        if self._flights.needs_barrier(num_sets):
            self.clean()
        self._flights.require_room(METHODS[operation], num_sets)

    def _warn_of_masks(self) -> None:
        """Say once of each rank that a kernel has masked it."""
        newest = self._masked_word.value
        if newest == self._told:
            return
        self._told = newest
        calls = self._host[:-1].tolist()
        self._host[:-1] = 0
        for rank, call in enumerate(calls):
            if call:
                warnings.warn(
                    f"low latency (call {call}): rank {rank} was silent past the limit and is masked from now on "
                    f"(rank {self.spots.places.rank}/{len(calls)}). Its experts' results are missing",
                    RuntimeWarning,
                    stacklevel=4,
                )


def _empty_packed(geometry: Geometry, form: Form, device: torch.device) -> Packed:
    num_local, num_rows = geometry.num_local_experts, geometry.num_rows
    scales = None
    if form.scale_dtype is not None:
        columns = geometry.num_scales(form)
        scales = torch.empty(num_local, columns, num_rows, dtype=form.scale_dtype, device=device).transpose(1, 2)
    numbers = torch.empty(num_local * (num_rows + 1), dtype=torch.int32, device=device)
    return Packed(
        torch.empty(num_local, num_rows, geometry.hidden, dtype=form.dtype, device=device),
        scales,
        numbers[:num_local],
        numbers[num_local:].view(num_local, num_rows),
        torch.empty(num_local, geometry.num_ranks, dtype=torch.int64, device=device),
    )


def _sizes_of(geometry: Geometry) -> tuple[int, int, int, int]:
    """What both kinds of rows have."""
    return geometry.hidden, geometry.num_topk, geometry.num_experts, geometry.max_tokens


def _call(operation: str, plan: Plan, agreement: Agreement) -> Call:
    sizes = (plan.quarter_bytes, plan.set_bytes, plan.sets_per_quarter)
    return Call(pack(agreement), *sizes, OPERATIONS.index(operation))
