"""The one-hop engine on a GPU: dispatch and combine as kernels in a stream (`docs/protocol.md`).

The protocol is that of `direct.py`, with the words and the waiting in kernels: the host launches, and only a full
dispatch waits, for its counts. A call is

    dispatch, full        positions, meet (counts, a guessed offer), put, finish | the host waits | unpack
                          if the guess was too small somewhere: meet (exact offers), put, finish, unpack
    dispatch, worst case  positions, meet (counts and offers), put, finish, unpack
    dispatch, cached      meet (offers), put, finish
    combine               copy in unless the rows lie in the window, meet (offers), pull, finish
    combine, pushed       meet (inboxes), push, finish, sum

`meet` and `finish` are one small block each, and the only kernels that wait. A rank that finds no room in the window
offers its staging instead; `finish` then brings its rows through it, in rounds (`kernels/staging.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from .. import layout
from ..config import Config
from ..errors import EPClosed, EPUnsupported
from ..event import EventHandle
from ..handle import Handle
from ..kernels import counts, pull, push, put, staging
from ..kernels.exchange import Places, Post
from ..sizing import align
from ..stream import LaunchStream
from ..trace import Trace
from ..transport.device import DeviceWindow
from .call import ANNOUNCED, LEAVE, OFFERED, OPERATIONS, READY, TAKEN, Agreement, warn_staged
from .combine import Combined
from .digest import pack
from .direct import Order
from .low_latency.calls import LowLatency, operation_of
from .marks import Marks
from .parcel import Payload, Received, Routing, agreement_of, section_columns
from .room import NO_SECTIONS, Frame, Lanes, Room, Sections
from .shapes import Shapes
from .signals import Signals
from .stats import Stats

_MOST_SCALE_BYTES = 8  # an integer of a kernel
_kept: list[StreamedEngine] = []  # engines whose memory could not be given back


class StreamedEngine:
    """Dispatch and combine over one window, by kernels.

    Args:
        window: The window.
        stream: Where the kernels are launched.
        limit_secs: Seconds that a wait on the device may take.
        max_experts: Most experts of a call.
        shapes: How bulk kernels are launched.
        num_local_bytes: What the caller may see of the raw buffer.
        is_pushed: In a combine, rows are written to who sums them, instead of being read by him.
        num_nodes: N.

    Attributes:
        low_latency: Low-latency calls; None: the buffer has no memory for them.
    """

    low_latency: LowLatency | None = None

    def __init__(
        self,
        window: DeviceWindow,
        stream: LaunchStream,
        limit_secs: float,
        max_experts: int,
        shapes: Shapes,
        num_local_bytes: int = 0,
        is_pushed: bool = False,
        num_nodes: int = 1,
    ):
        self.window = window
        self.stream = stream
        self.stats = Stats(window.num_ranks)
        self.shapes = shapes
        self.signals = Signals(window, stream, limit_secs, max_experts, num_nodes)
        self._places = self.signals.places
        self._room = Room(window, stream)
        self._guessed_rows = 0
        self._has_warned = False
        self._is_pushed = is_pushed
        self._num_local_bytes = num_local_bytes
        self._local: torch.Tensor | None = None

    # Calls -----------------------------------------------------------------------------------------------------------

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, num_nodes: int, order: Order
    ) -> tuple[layout.DispatchLayout, EventHandle | None]:
        """Count where this rank's tokens go. Local: it takes no part in the order of the calls."""
        sizes = (num_experts, self.window.num_ranks, num_nodes)
        if order.after is None and not order.is_async:
            with self.stream.on_device():
                return layout.DispatchLayout(*counts.dispatch_layout(topk_idx, *sizes)), None
        frame = Frame(order, self.stream.caller())
        with self.stream.entered(order.after, order.is_async):
            self._room.hold_inputs(frame, topk_idx)
            with self._room.outputs(frame):
                tensors = counts.empty_layout(topk_idx, *sizes)
            counted = layout.DispatchLayout(*counts.dispatch_layout(topk_idx, *sizes, tensors))
        self._room.hold_outputs(frame, *counted)
        return counted, self.stream.leave(order.is_async)

    def dispatch(
        self, payload: Payload, routing: Routing, num_channels: int, order: Order, num_sms: int | None = None
    ) -> tuple[Received, list[int], EventHandle | None]:
        """A full dispatch. The host waits for the counts, also if it is asynchronous.

        Returns:
            What is received, the selections of each local expert, and the event of an asynchronous call.
        """
        self._refuse_capture()
        check_scales(payload)
        operation, frame = "dispatch", Frame(order, self.stream.caller())
        with self._calling(operation, order):
            self._hold_inputs(frame, payload, routing)
            sections = self._guess(payload, routing)
            numbers, num_tokens = counts.positions(routing.is_token_in_rank)
            with self._room.outputs(frame):
                handle = self._room.handle(routing, 0, num_channels, self._empty_prefix(numbers))
            prefix, slots = handle.rank_prefix_matrix, (numbers, handle.send_head)
            self._reach(operation, "meet")
            post = self._post(operation, ANNOUNCED, payload, routing, sections)
            free_bytes = self.window.arena.largest_free_bytes()
            post = post._replace(free_bytes=free_bytes, num_tokens=payload.x.size(0))
            self.signals.announce(post, num_tokens, routing.num_tokens_per_rank, routing.num_tokens_per_expert, prefix)
            self._move(operation, payload, routing, slots, prefix, NO_SECTIONS, num_sms)
            told = self.signals.wait_for_counts(routing.num_experts)
            num_rows = told.num_rows[self.window.rank]
            if (marks := self.signals.noting) is not None:
                marks.note(experts=told.expert_counts)
            self._guessed_rows = num_rows + num_rows // 16 + 64
            if not told.fits:
                sections = NO_SECTIONS  # too small, here or elsewhere
            self._room.grow_alike(told, payload, routing, self._is_pushed)
            if sections.parts[0] is None:  # also where nothing was offered, because nothing comes
                sections = self._sections(frame, payload, routing, num_rows)
            if not told.fits:
                self._reach(operation, "offer")
                self.signals.meet(self._post(operation, OFFERED, payload, routing, sections), is_new=False)
                self._move(operation, payload, routing, slots, prefix, sections, num_sms)
            with self._room.outputs(frame):
                handle = handle._replace(recv_src_idx=prefix.new_empty(num_rows))
                received = self._room.received(sections, routing, handle, num_rows)
            self._unpack(received, prefix, handle.recv_src_idx, num_sms)
        return (
            self._dispatched(routing, received, frame),
            told.expert_counts,
            self.stream.leave(order.is_async),
        )

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
        check_scales(payload)
        operation, frame = "worst-case dispatch", Frame(order, self.stream.caller())
        with self._calling(operation, order):
            self._hold_inputs(frame, payload, routing)
            sections = self._sections(frame, payload, routing, num_rows)
            numbers, num_tokens = counts.positions(routing.is_token_in_rank)
            with self._room.outputs(frame):
                handle = self._room.handle(routing, num_rows, num_channels, self._empty_prefix(numbers))
                received = self._room.received(sections, routing, handle, num_rows)
            self._reach(operation, "meet")
            prefix = handle.rank_prefix_matrix
            self.signals.meet(
                self._post(operation, OFFERED, payload, routing, sections),
                num_tokens,
                routing.num_tokens_per_rank,
                routing.num_tokens_per_expert,
                prefix,
            )
            self._move(operation, payload, routing, (numbers, handle.send_head), prefix, sections, num_sms)
            self._unpack(received, prefix, handle.recv_src_idx, num_sms)
        return self._dispatched(routing, received, frame), self.stream.leave(order.is_async)

    def cached_dispatch(
        self, payload: Payload, handle: Any, order: Order, num_sms: int | None = None
    ) -> tuple[Received, EventHandle | None]:
        """A dispatch along the slots of an earlier one."""
        check_scales(payload)
        operation, frame = "cached dispatch", Frame(order, self.stream.caller())
        with self._calling(operation, order):
            self._room.hold_inputs(frame, payload.x, payload.scales, *handle)
            sections = self._sections(frame, payload, None, handle.num_rows)
            post = self._post(operation, OFFERED, payload, None, sections)
            prefix = handle.rank_prefix_matrix.contiguous()
            self._reach(operation, "meet")
            self.signals.meet(post, prefix=prefix)
            self._move(operation, payload, None, (handle.send_head.contiguous(), None), prefix, sections, num_sms)
            received = self._room.received(sections, None, handle, handle.num_rows)
        return self._dispatched(None, received, frame), self.stream.leave(order.is_async)

    def combine(
        self,
        x: torch.Tensor,
        handle: Any,
        topk_weights: torch.Tensor | None,
        biases: Sequence[torch.Tensor],
        order: Order,
        num_sms: int | None = None,
    ) -> tuple[Combined, EventHandle | None]:
        """A combine along the slots of an earlier dispatch."""
        operation = "pushed combine" if self._is_pushed else "combine"
        frame = Frame(order, self.stream.caller())
        parts = [x] if topk_weights is None else [x, topk_weights]
        with self._calling(operation, order):
            self._room.hold_inputs(frame, *parts, *biases, *handle)
            with self._room.outputs(frame):
                sums = [part.new_empty(handle.num_tokens, part.size(1)) for part in parts]
            form = self._push if self._is_pushed else self._pull
            path = form(parts, handle, sums, biases, num_sms)
            self._room.reclaim()
        self._room.hold_outputs(frame, *sums)
        self.stats.count_path("combine", path)
        return Combined(sums[0], sums[1] if topk_weights is not None else None), self.stream.leave(order.is_async)

    def barrier(self) -> None:
        """Have the caller's stream go on when those of all ranks have come here. The host does not wait."""
        with self.signals.contagious("barrier"), self.stream.entered(None, False):
            self.signals.meet(Post(TAKEN, OPERATIONS.index("barrier"), pack(Agreement("barrier"))))
        self.stream.leave(False)

    # Forms of combine ------------------------------------------------------------------------------------------------

    def _pull(
        self,
        parts: list[torch.Tensor],
        handle: Any,
        sums: list[torch.Tensor],
        biases: Sequence[torch.Tensor],
        num_sms: int | None,
    ) -> str:
        """Peers read this rank's rows. Returns the path that it took."""
        operation, prefix = "combine", handle.rank_prefix_matrix.contiguous()
        supply = self._supply(parts, self._places, prefix, num_sms)
        post = self._combine_post(operation, parts, handle)
        post = post._replace(num_rows=parts[0].size(0), lane_rows=supply.lane_rows, bases=supply.bases)
        self._reach(operation, "meet")
        self.signals.meet(post, prefix=prefix)
        self._note_combine(supply.path, parts, prefix)
        self._reach(operation, "pull")
        slots, shape = handle.send_head.contiguous(), self.shapes.for_pull(num_sms)
        for section, out in enumerate(sums):
            pull.pull(self._places, shape, section, out, slots, biases if section == 0 else ())
        self._reach(operation, "finish")
        source_idx = handle.recv_src_idx.contiguous()
        staging.finish_combine(self._places, READY, post.operation, parts, sums, biases, slots, prefix, source_idx)
        return supply.path

    def _push(
        self,
        parts: list[torch.Tensor],
        handle: Handle,
        sums: list[torch.Tensor],
        biases: Sequence[torch.Tensor],
        num_sms: int | None,
    ) -> str:
        """This rank writes its rows into the inboxes of those who sum them. Returns the path that it took.

        Where a rank has no room for an inbox, all ranks pull, by way of their staging.
        """
        operation, prefix = "pushed combine", handle.rank_prefix_matrix.contiguous()
        widths = [part.size(1) * part.element_size() for part in parts]
        offsets = [0, align(widths[0], put.VECTOR_BYTES)]
        slot_bytes = sum(align(width, put.VECTOR_BYTES) for width in widths)
        num_slots = handle.num_tokens * self.window.num_ranks
        inbox = self._room.region((num_slots, slot_bytes), torch.uint8)
        if inbox is None:
            self._warn_staged("combine")
        lanes = self._room.lanes(widths)
        base = 0 if inbox is not None and not num_slots else self._room.base(inbox)  # who has no tokens needs no room
        bases = (*lanes.bases, *(-1,) * (push.INBOX - len(parts)), base)
        post = self._combine_post(operation, parts, handle)
        post = post._replace(num_rows=num_slots, lane_rows=lanes.num_rows, bases=bases, is_pushed=True)
        self._reach(operation, "meet")
        self.signals.meet(post, prefix=prefix)
        path = "pushed" if inbox is not None else "staged"
        self._note_combine(path, parts, prefix)
        self._reach(operation, "push")
        slots, source_idx = handle.send_head.contiguous(), handle.recv_src_idx.contiguous()
        for part, offset in zip(parts, offsets, strict=False):
            push.push(self._places, self.shapes.for_copy(num_sms), part, source_idx, prefix, slot_bytes, offset)
        self._reach(operation, "finish")
        staging.finish_combine(self._places, READY, post.operation, parts, sums, biases, slots, prefix, source_idx)
        self._reach(operation, "sum")
        shape = self.shapes.for_pull(num_sms)
        for out, offset, some in zip(sums, offsets, (biases, ()), strict=False):
            push.sum_inbox(self._places, shape, inbox, slot_bytes, offset, out, slots, some)
        return path

    def _combine_post(self, operation: str, parts: list[torch.Tensor], handle: Any) -> Post:
        """What a rank says in a combine, but for its offer."""
        num_topk = parts[1].size(1) if len(parts) > 1 else 0
        agreement = Agreement(operation, num_topk=num_topk, hidden=parts[0].size(1), dtype=parts[0].dtype)
        return Post(OFFERED, OPERATIONS.index(operation), pack(agreement), num_tokens=handle.num_tokens)

    @contextmanager
    def _calling(self, operation: str, order: Order) -> Iterator[None]:
        """Around the launches of a call."""
        with (
            self.signals.contagious(operation),
            self.stream.entered(order.after, order.is_async),
            self.signals.marked(operation),
        ):
            yield

    # Steps -----------------------------------------------------------------------------------------------------------

    def _refuse_capture(self) -> None:
        """A call in which the host waits cannot be captured."""
        if self.window.is_capturing():
            raise EPUnsupported(
                "dispatch: the host waits for the counts, which cannot be captured in a graph. "
                "Pass `num_worst_tokens`, or the handle of an earlier dispatch"
            )

    def _guess(self, payload: Payload, routing: Routing) -> Sections:
        """Room for a few rows more than the last dispatch received, so that rows can move before counts are known."""
        sections = self._room.sections(payload, routing, self._guessed_rows) if self._guessed_rows else None
        return sections if sections is not None else NO_SECTIONS

    def _sections(self, frame: Frame, payload: Payload, routing: Routing | None, num_rows: int) -> Sections:
        """Room for exactly so many rows: in the window, or elsewhere, by way of the staging.

        Raises:
            EPTransportError: The staging cannot hold a row of every rank.
        """
        sections = self._room.sections(payload, routing, num_rows)
        if sections is None:
            self._warn_staged("dispatch")
            sections = self._room.staged_sections(frame, payload, routing, num_rows)
        return sections

    def _warn_staged(self, operation: str) -> None:
        """Say once that calls are slower than they could be."""
        if not self._has_warned:
            self._has_warned = True
            used_bytes = self.window.arena.num_bytes()["used"]
            warn_staged(operation, used_bytes, self.window.rank, self.window.num_ranks)

    def _hold_inputs(self, frame: Frame, payload: Payload, routing: Routing) -> None:
        given = (routing.num_tokens_per_rank, routing.num_tokens_per_expert, routing.is_token_in_rank)
        self._room.hold_inputs(frame, payload.x, payload.scales, *given, routing.topk_idx, routing.topk_weights)

    def _empty_prefix(self, numbers: torch.Tensor) -> torch.Tensor:
        return numbers.new_empty(self.window.num_ranks, self.window.num_ranks)

    def _post(self, operation: str, step: int, payload: Payload, routing: Routing | None, sections: Sections) -> Post:
        agreement, lanes = agreement_of(operation, payload, routing), sections.lanes
        if lanes is None:
            lanes = Lanes(0, tuple(self._room.base(part) for part in sections.parts))
        index = OPERATIONS.index(operation)
        return Post(step, index, pack(agreement), sections.num_rows, lanes.num_rows, bases=lanes.bases)

    def _move(
        self,
        operation: str,
        payload: Payload,
        routing: Routing | None,
        slots: tuple[torch.Tensor, torch.Tensor | None],
        prefix: torch.Tensor,
        sections: Sections,
        num_sms: int | None,
    ) -> None:
        """Put this rank's rows, and wait for the peers' to be there."""
        topk_idx = routing.topk_idx if routing is not None else None
        topk_weights = routing.topk_weights if routing is not None else None
        num_local = routing.num_experts // self.window.num_ranks if routing is not None else 0
        sent = (payload.x, payload.scales)
        if (marks := self.signals.noting) is not None:
            self._note_dispatch(marks, payload, routing, prefix)
        self._reach(operation, "put")
        put.put(self._places, self.shapes.for_put(num_sms), *sent, *slots, topk_idx, topk_weights, num_local)
        self._reach(operation, "finish")
        outgoing = staging.Outgoing(*sent, slots[0], topk_idx, topk_weights, num_local, routing is not None)
        index = OPERATIONS.index(operation)
        staging.finish_dispatch(self._places, READY, index, outgoing, prefix, sections.parts)

    def _note_combine(self, path: str, parts: list[torch.Tensor], prefix: torch.Tensor) -> None:
        """Have a trace show what comes back."""
        if (marks := self.signals.noting) is not None:
            marks.note(path=path, row_bytes=sum(part.size(1) * part.element_size() for part in parts))
            marks.note_rows(rows_from=_rows_to(prefix, self.window.rank))

    def _note_dispatch(self, marks: Marks, payload: Payload, routing: Routing | None, prefix: torch.Tensor) -> None:
        """Have a trace show what is sent."""
        counts = routing.num_tokens_per_rank if routing is not None else _rows_to(prefix, self.window.rank)
        columns = section_columns(payload, routing)
        marks.note(row_bytes=sum(count * dtype.itemsize for count, dtype in columns))
        marks.note_rows(rows_to=counts)

    def _unpack(
        self,
        received: Received,
        prefix: torch.Tensor,
        sources: torch.Tensor,
        num_sms: int | None,
        ends: torch.Tensor | None = None,
    ) -> None:
        """Take the records apart, which are then of no more use.

        Args:
            received: Holds the records, and room for ids and weights.
            prefix: [R, R] int32, of the meeting.
            sources: [n] or [n, 2] int32, written, see `put.unpack`.
            num_sms: Most blocks.
            ends: [R] int32, written, or None.
        """
        assert received.records is not None
        put.unpack(
            self._places,
            self.shapes.for_put(num_sms).num_blocks,
            received.records,
            prefix,
            sources,
            received.topk_idx,
            received.topk_weights,
            ends,
        )
        received.records = None

    def _dispatched(self, routing: Routing | None, received: Received, frame: Frame) -> Received:
        made = () if routing is None else [item for item in received.handle if item is not routing.is_token_in_rank]
        self._room.hold_outputs(frame, received.x, received.scales, received.topk_idx, received.topk_weights, *made)
        self.stats.count_path("dispatch", "staged" if received.is_staged else "direct")
        return received

    def _supply(self, parts: list[torch.Tensor], places: Places, prefix: torch.Tensor, num_sms: int | None) -> _Supply:
        """The rows to give: found in the arena, or copied there, or, where it has no room, by way of the staging.

        Args:
            parts: The rows of each section.
            places: Which column of `prefix` is this rank's.
            prefix: How many of them came.
            num_sms: Most blocks.
        """
        regions: list[torch.Tensor] = []
        copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        for part in parts:
            # Peers read vectors: a view that begins between two of them is copied like anything outside the window.
            is_whole = part.data_ptr() % put.VECTOR_BYTES == 0
            if part.numel() == 0 or (is_whole and self.window.arena.base_of(part) is not None):
                regions.append(part)
                continue
            region = self._room.region(part.shape, part.dtype)
            if region is None:
                return self._staged_supply(parts, [taken for taken, _ in copies])
            regions.append(region)
            copies.append((region, part))
        for region, part in copies:
            pull.copy_in(places, self.shapes.for_copy(num_sms), region, part, prefix)
        path = "pulled" if regions[0] is parts[0] else "copied_in"
        return _Supply(path, tuple(self._room.base(region) for region in regions), regions)

    def _staged_supply(self, parts: list[torch.Tensor], taken: list[torch.Tensor]) -> _Supply:
        """All parts by way of the staging: what was taken for some of them goes back."""
        self._warn_staged("combine")
        for region in taken:
            self.window.arena.give_up(region)
        lanes = self._room.lanes([part.size(1) * part.element_size() for part in parts])
        return _Supply("staged", lanes.bases, [], lanes.num_rows)

    def _reach(self, operation: str, step: str) -> None:
        """A fault point before a step is launched, and where a trace shows it to begin."""
        self.signals.mark(step)
        if self.window.fault is not None:
            self.window.fault(f"{operation}: before {step}")

    # Beside the calls ------------------------------------------------------------------------------------------------

    def start_trace(self, trace: Trace) -> None:
        """Record calls from now on."""
        self.signals.marks = Marks(trace, self.stream)

    def require_working(self) -> None:
        """Refuse to go on after a failure."""
        self.signals.require_working()

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


class _Supply(NamedTuple):
    """How a rank gives its rows in a combine.

    Attributes:
        path: `pulled`, `copied_in` or `staged`.
        bases: Where peers find them, by section.
        regions: Held until everything is launched.
        lane_rows: Rows of a lane, if staged.
    """

    path: str
    bases: tuple[int, ...]
    regions: list[torch.Tensor]
    lane_rows: int = 0


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
