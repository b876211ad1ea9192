"""The steps of V2's calls inside one node, by kernels: a row may travel for each selection of a token.

    dispatch, compact    notify, put (V1's), describe
    dispatch, expanded   notify, place, put, describe (a cached one without the last)
    combine              notify, arrange, pull; rows outside of the window are folded or copied into it before

`kernels/selections.py` has the kernels. A rank takes expanded rows where they stay if its window has memory for them;
otherwise it takes compact rows and unfolds them, which it says in its offer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from ...handle import ColumnHandle, Handle
from ...kernels.notify import HandshakeForm, Post, Selected, SelectionHandshake, make_post
from ...kernels.pull import copy_in
from ...kernels.put import VECTOR_BYTES, End, Put, record_words
from ...kernels.selections import (
    Arrange,
    Describe,
    Place,
    PullSelections,
    PutSelections,
    address_rows,
    num_tiles,
    zero_gaps,
)
from ..elastic import Arrived, ElasticRequest, Layout, Unfold
from ..ops import Counts, Sections, make_sections
from ..payload import DispatchResult, Payload, Routing, Unpacked
from ..protocol import ANNOUNCED, OFFERED, READY
from .memory import CombineSource, Memory, next_guess
from .scope import CudaScope
from .shapes import Shapes
from .signals import Signals
from .steps import (
    CombineSignature,
    DeviceCombine,
    DispatchSignature,
    columns_of,
    combine_terms,
    rows_of,
    shrink,
    terms_of,
)

_MOST_COPIES = 256  # kernels that are remembered
_UNLIMITED = 1 << 40  # rows of an expanded result that is made locally, in memory that is allocated when they are known


class SelectionForm(NamedTuple):
    """What distinguishes V2's dispatches from V1's, as part of a signature.

    Attributes:
        num_topk: K.
        num_local: L.
        alignment: To which the rows of an expert are rounded up.
        is_expanded: One row for each selection.
    """

    num_topk: int
    num_local: int
    alignment: int
    is_expanded: bool


class SelectionOps:
    """What the steps of V2's calls of one buffer share.

    Args:
        signals: The signals of the buffer.
        memory: The memory of the buffer.
        shapes: How bulk kernels are launched.
        counts: [R] int32, which a handshake writes and reads itself.
    """

    def __init__(self, signals: Signals, memory: Memory, shapes: Shapes, counts: torch.Tensor):
        self.signals, self.memory, self.shapes, self.counts = signals, memory, shapes, counts
        self.guessed_rows = 0  # of an expanded result, see `Memory.guess_from`
        self._copies: dict[tuple, Any] = {}  # kernels of `unfold` and `fold`, by what they depend on

    def unfold(
        self, x: torch.Tensor, scales: torch.Tensor | None, rows: torch.Tensor, ends: torch.Tensor,
        outputs: Sequence[torch.Tensor | None], num_sms: int | None,
    ) -> None:  # fmt: skip
        """Write each compact row to all rows of an expanded result that are copies of it.

        Args:
            x: [n, H], in contiguous rows.
            scales: [n, S], or None.
            rows: [n, K] int32, the rows of each; -1: none.
            ends: [R] int32, the last of which is how many of the n rows came.
            outputs: [X, H] and [X, S] contiguous, written; None: without scales.
            num_sms: Most blocks; None: nothing bounds them.
        """
        num_rows, num_topk = rows.shape
        if not num_rows:
            return
        addresses = self.memory.scratch(4 * num_rows * num_topk, "targets")
        for index, output in enumerate(outputs):
            if output is not None:
                address_rows(addresses.view(torch.int64), rows, output, ends, index)
        alignment = VECTOR_BYTES if x.data_ptr() % VECTOR_BYTES == 0 else x.element_size()
        num_scales, scale_dtype = (0, None) if scales is None else (scales.shape[1], scales.dtype)
        signature = DispatchSignature(
            "cached dispatch", x.shape[1], x.dtype, alignment, num_scales, scale_dtype, 0, None, 0, 0, False, num_sms,
            False,
        )  # fmt: skip
        shape = self.shapes.for_put(num_sms)

        def make() -> PutSelections:
            return PutSelections(self.signals.context, shape, rows_of(signature), num_topk, None)

        put = self._known((signature, num_topk, shape), make)
        put(x, scales, addresses)

    def fold(
        self, out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, num_sms: int | None
    ) -> None:
        """Sum the expanded rows of each compact row, columns ascending, rounded once. The arguments are as above."""
        num_rows, num_topk = rows.shape
        if not num_rows or not x.shape[0]:
            return
        addresses = self.memory.scratch(2 * num_rows * num_topk, "targets")
        address_rows(addresses.view(torch.int64), rows, x, ends)
        hidden, dtype = x.shape[1], x.dtype
        numbers = (x.data_ptr(), out.data_ptr(), hidden * dtype.itemsize)
        is_aligned = all(number % VECTOR_BYTES == 0 for number in numbers)
        shape = self.shapes.for_pull(num_sms)

        def make() -> PullSelections:
            context = self.signals.context
            return PullSelections(context, shape, hidden, dtype, num_topk, is_aligned=is_aligned)

        pull = self._known((hidden, dtype, num_topk, is_aligned, shape), make)
        pull(out, addresses)

    def _known(self, key: tuple, make: Callable[[], Any]) -> Any:
        """Return a kernel that was made before, or make it."""
        kernel = self._copies.get(key)
        if kernel is None:
            if len(self._copies) == _MOST_COPIES:
                self._copies.clear()
            kernel = self._copies[key] = make()
        return kernel


class SelectionPlan:
    """The kernels of V2's dispatches with one signature.

    Args:
        ops: What all signatures share.
        signature: The signature, which has a `SelectionForm`.
    """

    def __init__(self, ops: SelectionOps, signature: DispatchSignature):
        form, context = signature.selections, ops.signals.context
        assert form is not None
        num_topk, num_local, alignment, is_expanded = form
        self.ops, self.form, self.is_full = ops, form, signature.operation == "dispatch"
        self.num_experts = signature.num_experts
        has_routing = signature.num_experts > 0
        terms = terms_of(signature, ANNOUNCED if self.is_full else OFFERED, context.num_ranks)
        rows, idx_dtype = rows_of(signature), signature.idx_dtype or torch.int32
        agreed = (alignment, is_expanded, num_topk, idx_dtype)
        first = HandshakeForm(has_counts=has_routing, has_prefix=True)
        self.handshake = SelectionHandshake(context, terms, first, *agreed)
        second = HandshakeForm(is_new=False)
        self.second_handshake = SelectionHandshake(context, terms._replace(step=OFFERED, num_local=0), second, *agreed)
        shape, end = ops.shapes.for_put(signature.num_sms), End(READY, terms.operation)
        self.place = Place(context, rows, num_topk, num_local, idx_dtype, has_routing)
        self.put: Put | PutSelections
        if is_expanded:
            self.put = PutSelections(context, shape, rows, num_topk, end)
        else:
            self.put = Put(context, shape, rows, num_local, end)
        self.describe = Describe(context, shape.num_blocks, num_topk, num_local, idx_dtype, is_expanded)
        words = record_words(num_topk, has_rows=is_expanded) if has_routing else 0
        self.columns = replace(columns_of(signature), record_words=words)
        self.wide_columns = replace(self.columns, record_words=0)


class SelectionRoutes(NamedTuple):
    """Where the selections of a call go.

    Attributes:
        numbers: [T, R] int32, see `notify.Selected`, or the slots of a handle.
        send_head: [T, R] int32, see `Handle`; None: there is a handle.
        prefix: [R, R] int32.
        selected: See `notify.Selected`; None: there is a handle.
    """

    numbers: torch.Tensor
    send_head: torch.Tensor | None
    prefix: torch.Tensor
    selected: Selected | None


class SelectionDispatch:
    """The steps of one dispatch, see `ops.DispatchSteps`.

    Args:
        plan: The kernels of its signature.
        call: What is asked for, and where the results of the call are noted.
    """

    def __init__(self, plan: SelectionPlan, call: DeviceUnfold):
        self._plan, self._call = plan, call
        self._ops, self._memory, self._signals = plan.ops, plan.ops.memory, plan.ops.signals
        self._told: Counts | None = None

    def route(self, scope: CudaScope, routing: Routing, num_channels: int, num_rows: int) -> SelectionRoutes:
        """Allocate what the handle consists of, but for what depends on the rows that come."""
        call, memory, like, topk_idx = self._call, self._memory, self._ops.counts, routing.topk_idx
        num_topk, num_local, _, is_expanded = self._plan.form
        num_tokens, num_ranks = routing.is_token_in_rank.shape
        assert topk_idx is not None
        with scope.outputs:
            send_head, prefix = like.new_empty((num_tokens, num_ranks)), like.new_empty((num_ranks, num_ranks))
            call.experts, call.rank_ends = like.new_empty(2 * num_local + 1), like.new_empty(num_ranks)
            tables = like.new_empty((3 if is_expanded else 2, num_tokens, num_topk)).unbind(0)
            call.copied_idx = torch.empty_like(topk_idx) if call.is_topk_copied else None
        call.owners, call.slots, call.rows = tables if is_expanded else (*tables, None)
        tiles = numbers = first = like
        if is_expanded:
            tile_words = 2 * (self._plan.num_experts + num_ranks)
            tiles = memory.scratch(max(1, num_tiles(num_tokens, num_topk)) * tile_words, "tiles")
        else:
            numbers = memory.scratch(num_tokens * num_ranks)
        first = memory.scratch(self._plan.num_experts, "first")
        selected = Selected(
            topk_idx, routing.is_token_in_rank, numbers, routing.num_tokens_per_rank, routing.num_tokens_per_expert,
            tiles, first, call.experts, call.stats,
        )  # fmt: skip
        return SelectionRoutes(numbers, send_head, prefix, selected)

    def follow(self, scope: CudaScope, handle: Handle) -> SelectionRoutes:
        """Return the routes of a handle."""
        return SelectionRoutes(handle.send_head, None, handle.rank_prefix_matrix, None)

    # Memory ----------------------------------------------------------------------------------------------------------

    def guess(self) -> Sections:
        """Allocate memory for a few rows more than the last dispatch received."""
        form = self._plan.form
        sections = self._sections(self._memory.guessed_rows, self._ops.guessed_rows, _UNLIMITED)
        # If expanded rows do not fit, nothing is offered: the window grows once the counts are known.
        if sections is None or self._call.is_straight != form.is_expanded:
            self._call.is_straight = form.is_expanded
            sections = self._memory.no_rows(self._plan.columns)
        return sections

    def memory(self, scope: CudaScope, num_rows: int) -> Sections:
        """Allocate memory for exactly `num_rows` compact rows, or for the expanded rows that belong to them."""
        num_expanded = self._call.num_expanded(self._told)
        limit = _UNLIMITED if self._told is not None else num_expanded
        sections = self._sections(num_rows, num_expanded, limit, is_worst_case=self._is_worst_case)
        scope.path = "dispatch/direct"
        if sections is None:
            if self._plan.form.is_expanded:
                raise self._memory.lack_of_rows("dispatch")
            sections = self._memory.staged_sections(scope, self._plan.columns, num_rows)
            scope.path = "dispatch/staged"
        return sections

    @property
    def _is_worst_case(self) -> bool:
        """Whether the host does not know how many rows come, nor knew it when a handle was made."""
        return self._told is None and not self._call.knows_counts

    def _sections(self, num_rows: int, num_expanded: int, limit: int, is_worst_case: bool = False) -> Sections | None:
        """Allocate an expanded result, or, if there is no memory for it or none is wanted, compact rows.

        Args:
            num_rows: Compact rows.
            num_expanded: Expanded rows.
            limit: Most of them, if they are to be made out of compact rows.
            is_worst_case: The numbers are those of the worst case: what is received may be a small part of it, so most
                of the window is left to other calls.
        """
        memory, columns, call = self._memory, self._plan.columns, self._call
        call.is_straight = False
        if not self._plan.form.is_expanded:
            return memory.sections(columns, num_rows)
        row_bytes, scale_bytes, record_bytes = columns.widths()
        if not is_worst_case or 2 * num_expanded * (row_bytes + scale_bytes) <= memory.reserved_bytes:
            wide = memory.sections(self._plan.wide_columns, num_expanded)
            records = None if wide is None or not record_bytes else memory.records(num_rows * record_bytes)
            if wide is not None and (records is not None or not record_bytes):
                call.is_straight = True
                bases = (*wide.bases[:2], -1 if records is None else memory.base(records))
                return make_sections((wide.x, wide.scales, records, num_rows, 0, bases, num_expanded))
            if wide is not None and wide.x is not None:
                memory.give_up(wide.x)
            wide = None  # before compact rows are allocated, for which its memory may be needed
        sections = memory.sections(columns, num_rows)
        return None if sections is None else sections._replace(expanded_rows=-limit)

    def grow(self, told: Counts) -> None:
        """Add a segment if any rank lacks memory for its rows, or for as many that a combine gives."""
        row_bytes, scale_bytes, record_bytes = self._plan.columns.widths()
        num_topk, _, _, is_expanded = self._plan.form
        wide = told.remote_rows if is_expanded else told.num_rows
        come_bytes, back_bytes = row_bytes + scale_bytes, self._plan.columns.back_bytes(num_topk)
        sizes = [
            (rows * back_bytes,) if told.fits else (rows * back_bytes, rows * come_bytes, 2 * compact * record_bytes)
            for rows, compact in zip(wide, told.num_rows, strict=True)
        ]
        self._memory.grow_for(told, sizes)

    # Launches --------------------------------------------------------------------------------------------------------

    def notify(
        self, scope: CudaScope, payload: Payload, routing: Routing | None, routes: SelectionRoutes, sections: Sections
    ) -> None:
        """Number tokens, count selections, and exchange counts and offers."""
        num_tokens = free_bytes = ticket = 0
        if routing is not None:
            num_tokens = routing.max_tokens
        if self._plan.is_full:
            free_bytes, ticket = self._memory.largest_free_bytes(), self._signals.next_ticket()
        scope.path = "dispatch/expanded" if self._call.is_straight else scope.path or "dispatch/direct"
        offer = (sections.num_rows, sections.rows_per_source, num_tokens, free_bytes, sections.bases, 0, ticket)
        if scope.reach is not None:
            scope.reach("handshake")
        self._signals.is_announced = True
        self._plan.handshake(make_post(offer), sections.expanded_rows, routes.prefix, routes.selected)
        if (marks := self._signals.noting) is not None:
            marks.note(row_bytes=sum(self._plan.columns.widths()))
            if routing is not None:
                marks.note_rows(rows_to=routing.num_tokens_per_rank)

    def offer(self, scope: CudaScope, payload: Payload, routes: SelectionRoutes, sections: Sections) -> None:
        """Exchange offers a second time, now that the counts are known."""
        if scope.reach is not None:
            scope.reach("offer")
        scope.path = "dispatch/expanded" if self._call.is_straight else scope.path
        post = Post(sections.num_rows, sections.rows_per_source, bases=sections.bases)
        self._plan.second_handshake(post, sections.expanded_rows, routes.prefix)

    def outputs(
        self, scope: CudaScope, routing: Routing, routes: SelectionRoutes, sections: Sections, num_channels: int
    ) -> Unpacked:
        """Allocate what describes the rows."""
        call, num_rows, num_topk = self._call, sections.num_rows, self._plan.form.num_topk
        assert routing.topk_idx is not None
        assert routes.send_head is not None
        topk_idx = call.ids = None
        num_expanded = abs(sections.expanded_rows)
        if num_expanded == _UNLIMITED:
            num_expanded = call.num_expanded(self._told)
        with scope.outputs:
            source_idx = routes.prefix.new_empty(num_rows)
            call.sources = routes.prefix.new_empty((num_rows, 2 + num_topk))
            shape = (num_expanded,) if self._plan.form.is_expanded else (num_rows, num_topk)
            weights = routes.prefix.new_empty(shape, dtype=torch.float32)
            if not self._plan.form.is_expanded:
                topk_idx = routing.topk_idx.new_empty((num_rows, num_topk))
                call.ids = routing.topk_idx.new_empty((num_rows, num_topk))
        nothing = self._memory.no_channels(num_channels)
        handle = Handle(routes.prefix, nothing, nothing, source_idx, routing.is_token_in_rank, routes.send_head)
        unpacked = Unpacked(handle, topk_idx, weights)
        scope.hold_unpacked(routing, unpacked)
        if scope.is_elsewhere:
            made = (call.experts, call.rank_ends, call.owners, call.sources, call.ids, call.copied_idx)
            scope.hold_outputs(made)
        return unpacked

    def move(
        self,
        scope: CudaScope,
        payload: Payload,
        routing: Routing | None,
        routes: SelectionRoutes,
        sections: Sections,
        unpacked: Unpacked | None,
    ) -> None:
        """Put this rank's rows, wait until the peers' rows have arrived, and describe them."""
        x, scales, plan = payload.x, payload.scales, self._plan
        if scope.reach is not None:
            scope.reach("put")
        if isinstance(plan.put, PutSelections):
            plan.put(x, scales, self._place(x.shape[0], routing, routes))
        else:
            assert routing is not None  # a cached dispatch of compact rows is V1's
            assert sections.x is not None
            staged = (0, 0)
            if sections.rows_per_source:
                staged = (sections.x.data_ptr(), 0 if sections.scales is None else sections.scales.data_ptr())
            received = (routes.prefix, sections.records, None, None, None, sections.num_rows, *staged)
            plan.put(x, scales, routes.numbers, routes.send_head, routing.topk_idx, routing.topk_weights, received)
        if unpacked is not None:
            self._describe(routes, sections, unpacked)

    def _place(self, num_tokens: int, routing: Routing | None, routes: SelectionRoutes) -> torch.Tensor:
        """Find the rows of this rank's selections, and the addresses that they are put to. Put the records."""
        call, plan = self._call, self._plan
        assert call.owners is not None
        assert call.slots is not None
        assert call.rows is not None
        targets = self._memory.scratch(4 * num_tokens * plan.form.num_topk, "targets")
        topk_idx = weights = tiles = first = send_head = self._ops.counts
        if routing is not None and routes.selected is not None and routes.send_head is not None:
            assert routing.topk_weights is not None
            topk_idx, weights, send_head = routes.selected.topk_idx, routing.topk_weights, routes.send_head
            tiles, first = routes.selected.tiles, routes.selected.first
        found = (call.owners, call.slots, call.rows, targets)
        plan.place(num_tokens, topk_idx, call.copied_idx, weights, tiles, first, send_head, *found)
        return targets

    def _describe(self, routes: SelectionRoutes, sections: Sections, unpacked: Unpacked) -> None:
        """Split the records into what describes the rows. It is the last step, so it waits for what that waits for."""
        call, (handle, topk_idx, weights) = self._call, unpacked
        assert sections.records is not None
        assert routes.selected is not None
        assert call.experts is not None
        assert call.rank_ends is not None
        assert call.sources is not None
        assert weights is not None
        if call.after is not None:
            call.after.current_stream_wait()
        sent: tuple = ()
        if not self._plan.form.is_expanded:  # nothing has needed them yet
            sent = (routes.selected.topk_idx, call.copied_idx, routes.numbers, call.owners, call.slots)
        self._plan.describe(
            sections.records, sections.num_rows, routes.prefix, call.experts, call.rank_ends, handle.recv_src_idx,
            call.sources, topk_idx, call.ids, weights, sent,
        )  # fmt: skip

    # Counts ----------------------------------------------------------------------------------------------------------

    def counts(self, scope: CudaScope, routing: Routing) -> Counts:
        """Wait for the counts, and keep the numbers of rows for the next dispatch's guess."""
        told = self._signals.wait_for_counts(self._plan.num_experts)
        if self._signals.marks is not None:
            self._signals.marks.note(experts=told.expert_counts)
        self._told = told = told._replace(max_tokens=max(told.num_tokens))
        self._memory.guess_from(told.num_rows[self._signals.context.rank])
        if self._plan.form.is_expanded:
            self._ops.guessed_rows = next_guess(self._ops.guessed_rows, self._call.num_expanded(told))
        return told

    def rerouted(self, scope: CudaScope, routes: SelectionRoutes, told: Counts, routing: Routing) -> SelectionRoutes:
        """Return the same routes: inside one node they do not depend on the guessed number of rows."""
        return routes

    def received(
        self, routes: SelectionRoutes, sections: Sections, unpacked: Unpacked, num_rows: int, told: Counts | None
    ) -> DispatchResult:
        """Return the result, with as many rows as were received."""
        call, x, scales = self._call, sections.x, sections.scales
        handle, topk_idx, weights = unpacked
        assert x is not None
        assert call.sources is not None
        if told is not None and num_rows != sections.num_rows:
            handle.recv_src_idx.resize_(num_rows)
            shrink((call.sources, topk_idx, call.ids), num_rows)
        if told is not None and weights is not None:
            num_there = num_rows
            if self._plan.form.is_expanded:
                num_expanded = call.num_expanded(told)
                weights.resize_(num_expanded)
                num_there = num_expanded if call.is_straight else num_rows
            else:
                shrink((weights,), num_rows)
            if num_there != x.shape[0]:
                shrink((x, scales), num_there)
        return DispatchResult(x, scales, topk_idx, weights, handle)


class DeviceUnfold(Unfold):
    """A V2 dispatch on a GPU: what is asked for, what its kernels make, and what is left to do with that.

    Args:
        ops: What V2's calls of the buffer share.
        request: What is asked for.
        num_sms: Most blocks of a kernel; None: nothing bounds them.

    Attributes:
        form: Its part of the signature; None: a cached dispatch of compact rows, which is as V1's.
        stats: See `Extras`.
        after: See `Extras`.
        is_straight: Received rows and scales are an expanded result. Set where memory is allocated.
        owners: [T, K] int32, see `selections.Place`.
        slots: [T, K] int32, likewise.
        rows: [T, K] int32, likewise; None: the result is compact.
        experts: [2 L + 1] int32, see `notify.Selected`.
        rank_ends: [R] int32, rows that came from ranks 0..s.
        sources: [n, 2 + K] int32, see `EPHandle.recv_src_metadata`.
        ids: [n, K], local ids; None: the result is expanded.
        copied_idx: [T, K], a copy of this rank's selections; None: none is wanted.
    """

    owners: torch.Tensor | None = None
    slots: torch.Tensor | None = None
    rows: torch.Tensor | None = None
    experts: torch.Tensor | None = None
    rank_ends: torch.Tensor | None = None
    sources: torch.Tensor | None = None
    ids: torch.Tensor | None = None
    copied_idx: torch.Tensor | None = None

    def __init__(self, ops: SelectionOps, request: ElasticRequest, num_sms: int | None):
        super().__init__(request)
        self._ops, self._num_sms = ops, num_sms
        form, layout = request.form, request.layout
        self.stats, self.after = request.extras.stats, request.extras.after
        self.form: SelectionForm | None = None
        if layout is None or form.is_expanded:
            self.form = SelectionForm(form.num_topk, form.num_local, form.alignment, form.is_expanded)
        if layout is not None:
            self.owners, self.slots, self.rows = layout.owners, layout.slots, layout.peer_rows

    @property
    def is_topk_copied(self) -> bool:
        """Whether the handle gets a copy of this rank's selections."""
        return self._request.layout is None and self._request.is_topk_copied

    @property
    def knows_counts(self) -> bool:
        """Whether it follows a dispatch whose host has waited for the counts."""
        return self._request.layout is not None and bool(self._request.layout.aligned_counts)

    def attach(self, payload: Payload) -> None:
        """Have the steps of the call find this, if they are not as those of V1."""
        payload.expansion = None if self.form is None else self

    def num_expanded(self, told: Counts | None) -> int:
        """Return the rows of the expanded result: exactly, if the counts are known, else those of the worst case."""
        if self._request.layout is not None:
            return self._request.layout.num_expanded
        if told is None:
            return self._form.most_expanded(self._request.num_ranks)
        return sum(self._form.aligned_counts(told))

    def _make_layout(self, scope: Any, received: DispatchResult, told: Counts | None) -> Layout:
        """Return what the kernels have made."""
        form, experts, num_local = self._form, self.experts, self._form.num_local
        assert experts is not None
        assert self.sources is not None
        assert self.rank_ends is not None
        assert self.owners is not None
        assert self.slots is not None
        topk_idx = self._request.topk_idx if self.copied_idx is None else self.copied_idx
        num_per_expert, ends, _ = experts.split_with_sizes((num_local, num_local, 1))
        return Layout(
            form=form,
            compact=received.handle,
            topk_idx=topk_idx,
            ids=self.ids,
            sources=self.sources,
            selections=None,
            slots=self.slots,
            owners=self.owners,
            num_per_expert=num_per_expert,
            ends=ends,
            rank_ends=self.rank_ends,
            num_rows=received.handle.num_rows,
            num_expanded=self.num_expanded(told),
            aligned_counts=form.aligned_counts(told),
            num_used=form.num_used(told),
            peer_rows=self.rows,
        )

    def _new_results(self, scope: Any, received: DispatchResult, layout: Layout) -> Arrived:
        """Make the results of a dispatch with routing: the weights are where they stay already."""
        weights = received.topk_weights if self._has_weights else None
        arrived = self._arrive(scope, received, layout, received.scales, None)
        if weights is not None and self._form.is_expanded and self._extras.has_zero_padding:
            zero_gaps(weights, layout.ends, self._form.alignment)
        return arrived._replace(topk_idx=received.topk_idx, topk_weights=weights)

    def _wait(self) -> None:
        if self._request.layout is not None:  # with routing, `_describe` has waited
            super()._wait()

    def _unfold_rows(self, layout: Layout, sent: Sequence[Any], outputs: Sequence[Any]) -> None:
        x, scales = outputs[:2]
        # Column-major scales are put as rows first.
        rows = scales if scales is None or scales.is_contiguous() else scales.new_empty(scales.shape)
        self._ops.unfold(sent[0], sent[1], layout.sources[:, 2:], layout.rank_ends, (x, rows), self._num_sms)
        if rows is not scales:
            scales.copy_(rows)
        if self._extras.has_zero_padding:
            for out in (x, scales):
                if out is not None:
                    self._zero_gaps(layout, out)

    def _unfold_weights(self, layout: Layout, weights: torch.Tensor, out: torch.Tensor) -> None:
        rows = layout.sources[:, 2:]
        if self.is_straight and weights.shape[0]:  # those of a cached dispatch came by expanded row
            columns = torch.arange(rows.shape[1], device=rows.device)
            weights = weights[rows.clamp(min=0).long(), columns]
        # One element more takes the weights of the columns that have no row.
        targets, found = (
            torch.where(rows >= 0, rows, layout.num_expanded).long(),
            out.new_zeros(layout.num_expanded + 1),
        )
        out.copy_(found.scatter_(0, targets.flatten(), weights.reshape(-1))[:-1])

    def _zero_gaps(self, layout: Layout, out: torch.Tensor) -> None:
        zero_gaps(out, layout.ends, self._form.alignment)


class SelectionCombine(DeviceCombine):
    """The steps of V2's combines with one signature, see `ops.CombineSteps`.

    Args:
        ops: What all signatures share.
        signature: The signature.
    """

    def __init__(self, ops: SelectionOps, signature: CombineSignature):
        super().__init__(ops.signals, ops.memory)
        context, shapes = ops.signals.context, ops.shapes
        hidden, dtype, num_columns, num_topk, num_biases, is_aligned, num_sms, is_reduced_once, alignment = signature
        self._context, self._num_columns = context, num_columns
        terms = combine_terms(signature)
        is_expanded = alignment > 0
        form = HandshakeForm(has_prefix=True)
        self._handshake = SelectionHandshake(context, terms, form, alignment, is_expanded, num_columns)
        self._copy_shape = shapes.for_copy(num_sms)
        is_grouped = is_expanded and not is_reduced_once
        self._arrange = Arrange(context, num_columns, hidden * dtype.itemsize, is_expanded, is_grouped)
        shape = shapes.for_pull(num_sms)
        is_whole = is_aligned and hidden * dtype.itemsize % VECTOR_BYTES == 0
        self._pull = PullSelections(
            context, shape, hidden, dtype, num_columns, num_biases, is_whole, is_grouped, num_topk,
            End(READY, terms.operation),
        )  # fmt: skip

    def _notify(self, scope: CudaScope, source: CombineSource, handle: ColumnHandle) -> None:
        prefix = handle.rank_prefix_matrix.contiguous()
        for region, part in source.copies:
            if handle.expanded_rows is None:
                copy_in(self._context, self._copy_shape, region, part, prefix)
            else:
                region.copy_(part)
        if scope.reach is not None:
            scope.reach("handshake")
        self._signals.is_announced = True
        self._handshake(source.post, 0 if handle.expanded_rows is None else handle.num_rows, prefix)

    def sum(
        self,
        scope: CudaScope,
        source: CombineSource,
        parts: Sequence[torch.Tensor],
        handle: ColumnHandle,
        sums: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> None:
        """Sum rows out of the peers' windows, and wait until the peers have summed those of this rank."""
        if scope.reach is not None:
            scope.reach("pull")
        sources = self._memory.scratch(2 * handle.num_tokens * self._num_columns, "targets")
        self._arrange(handle.owners.contiguous(), handle.slots.contiguous(), handle.rows, sources)
        weights = sums[1] if len(sums) > 1 else None
        self._pull(sums[0], sources, biases, weights, handle.send_head.contiguous())
        if source.copies:
            self._release(source)
