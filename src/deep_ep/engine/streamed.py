"""The engine on a GPU: dispatch and combine as kernels in a stream (`docs/protocol.md`).

The protocol is that of `direct.py`, with the words and the waiting in kernels: the host launches, and only a full
dispatch waits, for its counts. There is one script for all dispatches and one for all combines; what is launched in
each step, inside one node or across nodes, is said by `one_hop.py` and `relays/two_hops.py`:

    dispatch, full        notify (counts, a guessed offer), move, unpack | the host waits
                          if the guess was too small somewhere: offer (exact), move, unpack
    dispatch, worst case  notify (counts and offers), move, unpack
    dispatch, cached      notify (offers), move
    combine               notify (offers), sum

A rank that finds no room in the window offers its staging instead; the end of `move`, or of `sum`, then brings its rows
through it, in rounds (`kernels/staging.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from .. import layout
from ..config import Config
from ..errors import EPClosed, EPTransportError, EPUnsupported
from ..event import EventHandle
from ..kernels import counts
from ..kernels.notify import Form, Post, Terms, make_post
from ..kernels.put import VECTOR_BYTES
from ..stream import LaunchStream
from ..trace import Trace
from ..transport.device import DeviceWindow
from .call import LEAVE, OPERATIONS, TAKEN, Agreement, warn_staged
from .combine import Combined
from .digest import pack
from .direct import Order
from .low_latency.calls import LowLatency, operation_of
from .marks import Marks
from .memory import NO_SECTIONS, Columns, Memory, Sections
from .one_hop import received_of
from .ops import CombineSignature, CombineSteps, DispatchSignature, DispatchSteps, Ops, Supply
from .parcel import Payload, Received, Routing
from .scope import Scope
from .shapes import Shapes
from .signals import Counts, Signals
from .stats import Stats

_MOST_SCALE_BYTES = 8  # an integer of a kernel
_MOST_SIGNATURES = 1024  # that are remembered, of each operation
_COMBINE_PATHS = {path: f"combine/{path}" for path in ("pulled", "copied_in", "staged")}
_make_supply: Callable[[tuple], Supply] = partial(tuple.__new__, Supply)  # see `notify.make_post`
_make_combined: Callable[[tuple], Combined] = partial(tuple.__new__, Combined)
_kept: list[StreamedEngine] = []  # engines whose memory could not be given back


class StreamedEngine:
    """Dispatch and combine over one window, by kernels.

    Args:
        window: The window.
        stream: Where the kernels are launched.
        signals: The words of the window.
        memory: Its memory.
        ops: The steps of calls.
        num_local_bytes: What the caller may see of the raw buffer.

    Attributes:
        low_latency: Low-latency calls; None: the buffer has no memory for them, or they cannot be made.
        why_no_low_latency: Why they cannot: there is no NVSHMEM. Empty: nobody asked for them, or they can.
    """

    low_latency: LowLatency | None = None
    why_no_low_latency = ""

    def __init__(
        self,
        window: DeviceWindow,
        stream: LaunchStream,
        signals: Signals,
        memory: Memory,
        ops: Ops,
        num_local_bytes: int = 0,
    ):
        self.window = window
        self.stream = stream
        self.signals = signals
        self.stats = Stats(window.num_ranks)
        self.require_working = signals.require_working  # every call asks it
        self._is_capturing = window.memory.is_capturing
        self._memory = memory
        self._ops = ops
        self._dispatches: dict[tuple, DispatchSteps] = {}  # by signature, of which a plain tuple is made faster
        self._combines: dict[tuple, CombineSteps] = {}
        self._guessed_rows = 0
        self._has_warned = False
        self._num_local_bytes = num_local_bytes
        self._local: torch.Tensor | None = None
        terms = Terms(TAKEN, OPERATIONS.index("barrier"), pack(Agreement("barrier")))
        self._barrier = signals.handshake(terms, Form())

    # Calls -----------------------------------------------------------------------------------------------------------

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, num_nodes: int, order: Order
    ) -> tuple[layout.DispatchLayout, EventHandle | None]:
        """Count where this rank's tokens go. Local: it takes no part in the order of the calls."""
        sizes = (num_experts, self.window.num_ranks, num_nodes)
        if order.after is None and not order.is_async:
            with self.stream.on_device():
                return layout.DispatchLayout(*counts.dispatch_layout(topk_idx, *sizes)), None
        caller = self.stream.caller()
        with self.stream.entered(order.after, order.is_async):
            if order.is_async:
                self.stream.hold([topk_idx], self.stream.raw)
            with self.stream.lent(caller if order.after is None else self.stream.raw):
                tensors = counts.empty_layout(topk_idx, *sizes)
            counted = layout.DispatchLayout(*counts.dispatch_layout(topk_idx, *sizes, tensors))
        self.stream.hold(counted, self.stream.raw if order.after is None else caller)
        return counted, self.stream.leave(order.is_async)

    def dispatch(
        self, payload: Payload, routing: Routing, num_channels: int, order: Order, num_sms: int | None = None
    ) -> tuple[Received, list[int], EventHandle | None]:
        """A full dispatch. The host waits for the counts, also if it is asynchronous.

        Returns:
            What is received, the selections of each local expert, and the event of an asynchronous call.
        """
        if self._is_capturing():
            raise EPUnsupported(
                "dispatch: the host waits for the counts, which cannot be captured in a graph. "
                "Pass `num_worst_tokens`, or the handle of an earlier dispatch"
            )
        return self._dispatch("dispatch", payload, routing, None, 0, num_channels, order, num_sms)

    def worst_case_dispatch(
        self,
        payload: Payload,
        routing: Routing,
        num_rows: int,
        num_channels: int,
        order: Order,
        num_sms: int | None = None,
    ) -> tuple[Received, EventHandle | None]:
        """A dispatch into room for `num_rows` rows; the host waits for nothing."""
        operation = "worst-case dispatch"
        received, _, event = self._dispatch(operation, payload, routing, None, num_rows, num_channels, order, num_sms)
        return received, event

    def cached_dispatch(
        self, payload: Payload, handle: Any, order: Order, num_sms: int | None = None
    ) -> tuple[Received, EventHandle | None]:
        """A dispatch along the slots of an earlier one."""
        operation, num_rows = "cached dispatch", handle.num_rows
        received, _, event = self._dispatch(operation, payload, None, handle, num_rows, 0, order, num_sms)
        return received, event

    def _dispatch(
        self,
        operation: str,
        payload: Payload,
        routing: Routing | None,
        handle: Any,
        num_rows: int,
        num_channels: int,
        order: Order,
        num_sms: int | None,
    ) -> tuple[Received, list[int], EventHandle | None]:
        """The script of all dispatches: full (`num_rows` is 0 before it is known), worst case, and cached."""
        x, signals, is_full, expert_counts = payload.x, self.signals, False, []
        told: Counts | None = None
        key = _dispatch_key(operation, payload, routing, num_sms)
        steps = self._dispatches.get(key) or self._plan_dispatch(key, payload)
        with Scope(operation, order, signals, self.stream, self.window.arena) as scope:
            if scope.is_elsewhere:
                scope.hold_inputs((x, payload.scales), handle if routing is None else routing.tensors())
            else:
                self.window.arena.used_by(x, self.stream.current)
                if payload.scales is not None:
                    self.window.arena.used_by(payload.scales, self.stream.current)
            num_tokens = free_bytes = ticket = 0
            if operation == "dispatch":
                is_full = True
                sections = self._guess(steps.columns)
                free_bytes = self.window.arena.largest_free_bytes()
                num_tokens, ticket = x.shape[0], signals.next_ticket()
            else:
                sections = self._sections(scope, steps.columns, num_rows)
            routes = steps.follow(handle) if routing is None else steps.route(scope, routing, num_channels, num_rows)
            offer = (sections.num_rows, sections.lane_rows, num_tokens, free_bytes, sections.bases, 0, ticket)
            steps.notify(scope, make_post(offer), payload, routing, routes)
            if signals.marks is not None:
                self._note_dispatch(steps.columns, routing, handle)
            steps.move(scope, payload, routing, routes, NO_SECTIONS if is_full else sections)
            unpacked = None
            if routing is not None and sections.x is not None:  # all that needs no counts, before they are waited for
                unpacked = self._unpack(scope, steps, routing, routes, sections, num_channels)
            if is_full:
                assert routing is not None
                told = signals.wait_for_counts(routing.num_experts)
                num_rows, expert_counts = told.num_rows[self.window.rank], told.expert_counts
                if signals.marks is not None:
                    signals.marks.note(experts=expert_counts)
                self._guessed_rows = num_rows + num_rows // 16 + 64
                if not told.fits:  # too small, here or elsewhere: it goes back before more is taken
                    sections, unpacked = NO_SECTIONS, None
                steps.grow(told, payload, routing)
                if sections.x is None:  # also where nothing was offered, because nothing comes
                    sections = self._sections(scope, steps.columns, num_rows)
                if not told.fits:
                    routes = steps.rerouted(scope, routes, told, routing)
                    post = Post(sections.num_rows, sections.lane_rows, bases=sections.bases)
                    steps.offer(scope, post, payload, routes)
                    steps.move(scope, payload, routing, routes, sections)
            if routing is None:
                received = received_of(sections, num_rows, None, None, handle)
            else:
                if unpacked is None:
                    unpacked = self._unpack(scope, steps, routing, routes, sections, num_channels)
                received = steps.received(routing, routes, sections, unpacked, num_rows, told)
            if scope.is_elsewhere:
                scope.hold_outputs((received.x, received.scales))
        self.stats.count_path("dispatch/staged" if received.is_staged else "dispatch/direct")
        return received, expert_counts, scope.event() if scope.is_elsewhere or order.is_async else None

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None,
        biases: Sequence[torch.Tensor],
        order: Order,
        num_sms: int | None = None,
    ) -> tuple[Combined, EventHandle | None]:
        """A combine along the slots of an earlier dispatch: the script of all of them."""
        key = _combine_key(x, topk_weights, biases, num_sms)
        steps = self._combines.get(key) or self._plan_combine(key)
        parts = [x] if topk_weights is None else [x, topk_weights]
        with Scope("combine", order, self.signals, self.stream, self.window.arena) as scope:
            if scope.is_elsewhere:
                scope.hold_inputs((*parts, *biases), handle)
            else:
                for tensor in (*parts, *biases):
                    self.window.arena.used_by(tensor, self.stream.current)
            num_tokens = handle.num_tokens
            with scope.outputs:
                sums = [part.new_empty((num_tokens, part.shape[1])) for part in parts]
            supply = self._supply(parts, num_tokens)
            steps.notify(scope, supply, handle)
            if self.signals.marks is not None:
                self._note_combine(supply.path, parts, handle)
            steps.sum(scope, parts, handle, sums, biases)
            path, has_copied = supply.path, len(supply.copies) > 0
            del supply  # with the regions that were copied to
            if has_copied:
                self._memory.reclaim()
            if scope.is_elsewhere:
                scope.hold_outputs(sums)
        self.stats.count_path(_COMBINE_PATHS[path])
        event = scope.event() if scope.is_elsewhere or order.is_async else None
        return _make_combined((sums[0], sums[1] if topk_weights is not None else None)), event

    def barrier(self) -> None:
        """Have the caller's stream go on when those of all ranks have come here. The host does not wait."""
        self.require_working()
        with Scope("barrier", Order(None, False), self.signals, self.stream, self.window.arena) as scope:
            self.signals.is_announced = True
            self._barrier(Post())
        scope.event()

    # Steps -----------------------------------------------------------------------------------------------------------

    def _plan_dispatch(self, key: tuple, payload: Payload) -> DispatchSteps:
        """Make the steps of a signature that has not come yet.

        Raises:
            ValueError: Kernels cannot move such scales.
        """
        check_scales(payload)
        if len(self._dispatches) == _MOST_SIGNATURES:
            self._dispatches.clear()
        steps = self._dispatches[key] = self._ops.dispatch(DispatchSignature(*key))
        return steps

    def _plan_combine(self, key: tuple) -> CombineSteps:
        """Likewise."""
        if len(self._combines) == _MOST_SIGNATURES:
            self._combines.clear()
        steps = self._combines[key] = self._ops.combine(CombineSignature(*key))
        return steps

    def _guess(self, columns: Columns) -> Sections:
        """Room for a few rows more than the last dispatch received, so that rows can move before counts are known."""
        sections = self._memory.sections(columns, self._guessed_rows) if self._guessed_rows else None
        return sections if sections is not None else NO_SECTIONS

    def _sections(self, scope: Scope, columns: Columns, num_rows: int) -> Sections:
        """Room for exactly so many rows: in the window, or elsewhere, by way of the staging.

        Raises:
            EPTransportError: There is no room, and no staging, or the staging cannot hold a row of every rank.
        """
        sections = self._memory.sections(columns, num_rows)
        if sections is None:
            self._require_staging("dispatch")
            sections = self._memory.staged_sections(scope, columns, num_rows)
        return sections

    def _unpack(
        self, scope: Scope, steps: DispatchSteps, routing: Routing, routes: Any, sections: Sections, num_channels: int
    ) -> Any:
        """Take the records apart, and hold what is written: it may be dropped before the device has come here."""
        unpacked = steps.unpack(scope, routing, routes, sections, num_channels)
        if scope.is_elsewhere:
            handle, topk_idx, topk_weights = unpacked
            made = [item for item in handle if item is not routing.is_token_in_rank]
            scope.hold_outputs((topk_idx, topk_weights, *made))
        return unpacked

    def _supply(self, parts: list[torch.Tensor], num_tokens: int) -> Supply:
        """The rows to give: found in the arena, or to be copied there, or, where it has no room, by way of staging."""
        memory = self._memory
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        bases = [-1, -1, -1]
        for section, part in enumerate(parts):
            bases[section] = memory.base(part)
            # Peers read vectors: a view that begins between two of them is copied like anything outside the window.
            if bases[section] % VECTOR_BYTES and part.numel():
                region = memory.region(part.shape, part.dtype)
                if region is None:
                    return self._staged_supply(parts, [taken for taken, _ in copies], num_tokens)
                copies.append((region, part))
                bases[section] = memory.base(region)
        path = "copied_in" if copies and copies[0][1] is parts[0] else "pulled"
        post = make_post((parts[0].shape[0], 0, num_tokens, 0, (bases[0], bases[1], bases[2]), 0, 0))
        return _make_supply((path, post, copies))

    def _staged_supply(self, parts: list[torch.Tensor], taken: list[torch.Tensor], num_tokens: int) -> Supply:
        """All parts by way of the staging: what was taken for some of them goes back."""
        self._require_staging("combine")
        for region in taken:
            self.window.arena.give_up(region)
        lane_rows, bases = self._memory.lanes([part.shape[1] * part.element_size() for part in parts])
        return Supply("staged", Post(parts[0].shape[0], lane_rows, num_tokens, bases=bases), [])

    def _require_staging(self, operation: str) -> None:
        """Say once that calls are slower than they could be.

        Raises:
            EPTransportError: Across nodes there is no staging.
        """
        sizes = self.window.arena.num_bytes()
        if not self._ops.can_stage:
            raise EPTransportError(
                f"{operation}: the arena has no room for the rows ({sizes['used']} of {sizes['reserved']} bytes are in "
                f"use, rank {self.window.rank}/{self.window.num_ranks}). Drop received tensors, or make the buffer "
                "with a larger num_nvl_bytes; it grows by itself only in a dispatch without handle or num_worst_tokens"
            )
        if not self._has_warned:
            self._has_warned = True
            warn_staged(operation, sizes["used"], self.window.rank, self.window.num_ranks)

    def _note_dispatch(self, columns: Columns, routing: Routing | None, handle: Any) -> None:
        """Have a trace show what is sent."""
        if (marks := self.signals.noting) is not None:
            marks.note(row_bytes=sum(columns.widths()))
            if routing is not None:
                marks.note_rows(rows_to=routing.num_tokens_per_rank)
            elif hasattr(handle, "rank_prefix_matrix"):
                marks.note_rows(rows_to=_rows_to(handle.rank_prefix_matrix, self.window.rank))

    def _note_combine(self, path: str, parts: list[torch.Tensor], handle: Any) -> None:
        """Have a trace show what comes back."""
        if (marks := self.signals.noting) is not None:
            marks.note(path=path, row_bytes=sum(part.size(1) * part.element_size() for part in parts))
            if hasattr(handle, "rank_prefix_matrix"):
                marks.note_rows(rows_from=_rows_to(handle.rank_prefix_matrix, self.window.rank))

    # Beside the calls ------------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> Shapes:
        """How bulk kernels are launched."""
        return self._ops.shapes

    @shapes.setter
    def shapes(self, shapes: Shapes) -> None:
        self._ops.shapes = shapes
        self._dispatches.clear()
        self._combines.clear()

    def start_trace(self, trace: Trace) -> None:
        """Record calls from now on."""
        self.signals.marks = Marks(trace, self.stream)

    def expect_call(self) -> None:
        """A call will be made, or left by an exception, of which `leave` is told."""
        self.signals.is_announced = self.signals.is_calling = False

    def leave(self, error: BaseException, method: str) -> None:
        """Say to the peers that an exception has ended a call, unless that was done already.

        Args:
            error: The exception.
            method: The call, as its caller knows it.
        """
        if not self.signals.is_calling and not isinstance(error, EPClosed):
            self.signals.spread(operation_of(method), error)

    def room(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """An uninitialised tensor in the window; in ordinary memory where the arena has no room."""
        region = self.window.allocate(shape, dtype, self.stream.caller())
        return region if region is not None else torch.empty(*shape, dtype=dtype, device=self.window.device)

    def local_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        """Bytes of the raw buffer, free for the caller between calls. We do not use them: they are made on demand.

        All views show the same memory, so the first one takes all of it: a GPU's memory is not taken page by page.
        """
        if self._local is None:
            self._local = torch.zeros(self._num_local_bytes, dtype=torch.uint8, device=self.window.device)
        return self._local[start : start + num_bytes]

    def tune(self, config: Config | None) -> None:
        """Take the chunks of the next call from a config. One hop has none."""
        del config

    def trim(self) -> int:
        """Memory that peers have mapped stays: only all ranks together could give it back."""
        return 0

    def numbers(self) -> dict[str, Any]:
        """What was counted so far. Bytes and waits are the device's, and not counted."""
        counted = self.stats.numbers()
        return {
            **counted,
            **self._ops.numbers(),
            "rounds": counted["rounds"] + self.signals.num_more_rounds(),
            "wait_secs": [0.0] * self.window.num_ranks,
            "arena": self.window.arena.num_bytes(),
        }

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Note that another stream works with a tensor of the window."""
        self.window.arena.used_by(tensor, stream)

    def release_graphs(self) -> None:
        """Let go of the window memory that captured graphs use."""
        self.window.arena.release_captured()

    def synchronize(self) -> None:
        """Wait for everything that was launched, and raise what failed."""
        self.stream.stop()
        self.signals.raise_if_failed()

    def stop(self) -> None:
        """Wait for everything that was launched."""
        self.stream.stop()
        if self.signals.marks is not None:
            self.signals.marks.record()
        self._ops.close()

    def abandon(self, cause: str) -> None:
        """Tell all peers that this rank has left. Waits for nothing: what is launched fails by itself."""
        self.signals.give_up(LEAVE, cause)

    def forget(self) -> None:
        """Wait for everything that was launched: memory under a running kernel cannot be unmapped.

        Only the reaper calls it, for a buffer that nobody has destroyed.
        """
        with self.stream.on_device():
            if self.stream.await_capture():
                self.stop()
            else:  # freeing what is under a capture would end the process
                _kept.append(self)

    def has_failed(self) -> bool:
        """Whether a call has failed, on this rank or on another."""
        return self.signals.has_failed()


def _rows_to(prefix: torch.Tensor, rank: int) -> torch.Tensor:
    """[R] int32: the rows that a rank sends to each, from a `rank_prefix_matrix`."""
    return prefix[rank] - prefix[rank - 1] if rank else prefix[0]


def check_scales(payload: Payload) -> None:
    """Refuse scales that kernels cannot move.

    Raises:
        ValueError: Their elements are too wide.
    """
    if payload.scales is not None and payload.scales.element_size() > _MOST_SCALE_BYTES:
        raise ValueError(
            f"dispatch: `scales` must have elements of at most {_MOST_SCALE_BYTES} bytes on a GPU, they are "
            f"{payload.scales.dtype}. Pass them as two columns of a smaller type each"
        )


def _dispatch_key(operation: str, payload: Payload, routing: Routing | None, num_sms: int | None) -> tuple:
    """What `DispatchSignature` has."""
    x, scales = payload.x, payload.scales
    num_topk = num_experts = num_scales = 0
    idx_dtype = scale_dtype = None
    if routing is not None:
        num_experts = routing.num_tokens_per_expert.shape[0]
        if (topk_idx := routing.topk_idx) is not None:
            num_topk, idx_dtype = topk_idx.shape[1], topk_idx.dtype
    if scales is not None:
        num_scales, scale_dtype = scales.shape[1], scales.dtype
    address = x.data_ptr()
    alignment = VECTOR_BYTES if address % VECTOR_BYTES == 0 else address & -address
    hidden = x.shape[1]
    return operation, hidden, x.dtype, alignment, num_scales, scale_dtype, num_topk, idx_dtype, num_experts, num_sms


def _combine_key(
    x: torch.Tensor, topk_weights: torch.Tensor | None, biases: Sequence[torch.Tensor], num_sms: int | None
) -> tuple:
    """What `CombineSignature` has."""
    num_topk = topk_weights.shape[1] if topk_weights is not None else 0
    is_aligned = not any(bias.data_ptr() % VECTOR_BYTES for bias in biases) if biases else True
    return x.shape[1], x.dtype, num_topk, len(biases), is_aligned, num_sms
