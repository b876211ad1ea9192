"""The steps of calls inside one node: every rank reaches every other rank's memory.

    dispatch   notify (tokens are numbered, headers and offers exchanged), put; if many rows come, unpack
    combine    notify (rows outside the window are copied in first), pull

The last block of `notify`, `put` and `pull` waits for the peers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...handle import Handle
from ...kernels.notify import CopyingHandshake, HandshakeForm, Post
from ...kernels.pull import Pull, copy_in
from ...kernels.put import MOST_SPLIT, VECTOR_BYTES, End, Put, Unpack, word_of
from ..ops import Counts, Sections
from ..payload import DispatchResult, Payload, Routing, Unpacked, empty_topk
from ..protocol import ANNOUNCED, OFFERED, READY
from .memory import MARGIN_BYTES, CombineSource, Memory
from .scope import CudaScope
from .selections import SelectionCombine, SelectionOps, SelectionPlan
from .shapes import Shapes
from .signals import Signals
from .steps import (
    CombineSignature,
    DeviceCombine,
    DeviceDispatch,
    DispatchSignature,
    combine_terms,
    rows_of,
    rows_to_each,
    shrink,
    terms_of,
)


class OneHopOps:
    """Where the steps of calls inside one node come from.

    Args:
        signals: The signals of the buffer.
        memory: The memory of the buffer.
        shapes: How bulk kernels are launched.
    """

    def __init__(self, signals: Signals, memory: Memory, shapes: Shapes):
        self.signals = signals
        self.memory = memory
        # Counts that a kernel writes and reads itself: calls follow one another, so they share one tensor.
        self.counts = signals.context.state.new_empty(signals.context.num_ranks, dtype=torch.int32)
        self.selections = SelectionOps(signals, memory, shapes, self.counts)

    @property
    def shapes(self) -> Shapes:
        """How bulk kernels are launched, of steps that are made from now on."""
        return self.selections.shapes

    @shapes.setter
    def shapes(self, shapes: Shapes) -> None:
        self.selections.shapes = shapes

    def dispatch(self, signature: DispatchSignature) -> OneHopDispatch | SelectionPlan:
        """Make the steps of dispatches with one signature; of V2 what the steps of each call need."""
        if signature.selections is not None:
            return SelectionPlan(self.selections, signature)
        return OneHopDispatch(self, signature)

    def combine(self, signature: CombineSignature) -> OneHopCombine | SelectionCombine:
        """Make the steps of combines with one signature."""
        if signature.num_columns:
            return SelectionCombine(self.selections, signature)
        return OneHopCombine(self, signature)

    def stats(self) -> dict[str, Any]:
        """Return no counters beyond those of the engine."""
        return {}

    def close(self) -> None:
        """Do nothing: there is nothing to close inside one node."""


class OneHopRoutes(NamedTuple):
    """Which slot each token takes at each rank.

    Attributes:
        slots: [T, R] int32, relative to the first slot of this rank, or those of a handle.
        prefix: [R, R] int32.
    """

    slots: torch.Tensor
    prefix: torch.Tensor


_make_routes: Callable[[tuple], OneHopRoutes] = partial(tuple.__new__, OneHopRoutes)
_make_unpacked: Callable[[tuple], Unpacked] = partial(tuple.__new__, Unpacked)  # see `notify.make_post`
_make_handle: Callable[[tuple], Handle] = partial(tuple.__new__, Handle)


class OneHopDispatch(DeviceDispatch):
    """The steps of dispatches with one signature, see `ops.DispatchSteps`."""

    def __init__(self, ops: OneHopOps, signature: DispatchSignature):
        super().__init__(ops.signals, ops.memory, signature)
        signals, context = ops.signals, ops.signals.context
        operation, num_topk = signature.operation, signature.num_topk
        has_routing = signature.num_experts > 0
        self._ops, self._num_topk = ops, num_topk
        self._back_bytes = self._columns.back_bytes(num_topk)
        num_ranks = context.num_ranks
        terms = terms_of(signature, ANNOUNCED if operation == "dispatch" else OFFERED, num_ranks)
        form = HandshakeForm(has_counts=has_routing, has_prefix=True, is_numbered=has_routing)
        self._handshake = signals.handshake(terms, form)
        self._second_handshake = signals.handshake(terms._replace(step=OFFERED), HandshakeForm(is_new=False))
        shape, rows, num_local = ops.shapes.for_put(signature.num_sms), rows_of(signature), terms.num_local
        self._put = Put(context, shape, rows, num_local, End(READY, terms.operation))
        self._unpack = Unpack(context, shape.num_blocks, num_topk, rows.idx_dtype)

    def route(self, scope: CudaScope, routing: Routing, num_channels: int, num_rows: int) -> OneHopRoutes:
        """Allocate slots and prefix sums."""
        num_tokens, num_ranks = routing.is_token_in_rank.shape
        slots = self._memory.scratch(num_tokens * num_ranks)
        return _make_routes((slots, scope.empty(self._ops.counts, num_ranks, num_ranks)))

    def follow(self, scope: CudaScope, handle: Handle) -> OneHopRoutes:
        """Return the slots and prefix sums of a handle."""
        return _make_routes((handle.send_head.contiguous(), handle.rank_prefix_matrix.contiguous()))

    def _notify(
        self, scope: CudaScope, post: Post, payload: Payload, routing: Routing | None, routes: OneHopRoutes
    ) -> None:
        """Number the tokens, and exchange counts and offers."""
        if scope.reach is not None:
            scope.reach("handshake")
        self._ops.signals.is_announced = True
        if routing is None:
            self._handshake(post, None, routes.prefix)
            return
        counted = (self._ops.counts, routing.num_tokens_per_rank, routing.num_tokens_per_expert)
        self._handshake(post, counted, routes.prefix, None, (routing.is_token_in_rank, routes.slots, None))

    def _rows_to(self, routes: OneHopRoutes) -> torch.Tensor:
        """Return the rows to each rank, from the prefix sums of the handle."""
        return rows_to_each(routes.prefix, self._signals.context.rank)

    def _offer(self, post: Post, payload: Payload, routes: OneHopRoutes) -> None:
        """Exchange offers a second time, now that the counts are known."""
        self._second_handshake(post)

    def outputs(
        self, scope: CudaScope, routing: Routing, routes: OneHopRoutes, sections: Sections, num_channels: int
    ) -> Unpacked:
        """Allocate the handle, ids and weights."""
        num_rows, prefix, mask = sections.num_rows, routes.prefix, routing.is_token_in_rank
        if scope.is_elsewhere:
            with scope.outputs:
                send_head, source_idx = prefix.new_empty(mask.shape), prefix.new_empty(num_rows)
                topk_idx, topk_weights = empty_topk(routing, num_rows)
        else:
            send_head, source_idx = prefix.new_empty(*mask.shape), prefix.new_empty(num_rows)
            topk_idx, topk_weights = empty_topk(routing, num_rows)
        nothing = self._memory.no_channels(num_channels)
        handle = _make_handle((prefix, nothing, nothing, source_idx, mask, send_head))
        unpacked = _make_unpacked((handle, topk_idx, topk_weights))
        if scope.is_elsewhere:
            scope.hold_unpacked(routing, unpacked)
        return unpacked

    def move(
        self,
        scope: CudaScope,
        payload: Payload,
        routing: Routing | None,
        routes: OneHopRoutes,
        sections: Sections,
        unpacked: Unpacked | None,
    ) -> None:
        """Put this rank's rows, wait until the peers' rows have arrived, and split their records."""
        x, scales, (slots, prefix) = payload.x, payload.scales, routes
        recv_x, recv_scales, records, num_rows, rows_per_source, _, _ = sections
        if scope.reach is not None:
            scope.reach("put")
        staged = (0, 0)
        if rows_per_source:
            assert recv_x is not None
            staged = (recv_x.data_ptr(), 0 if recv_scales is None else recv_scales.data_ptr())
        if routing is None or unpacked is None:
            self._put(x, scales, slots, None, None, None, (prefix, None, None, None, None, num_rows, *staged))
            return
        (_, _, _, source_idx, _, send_head), recv_idx, recv_weights = unpacked
        is_split = num_rows <= MOST_SPLIT
        beside = (source_idx, recv_idx, recv_weights) if is_split else (None, None, None)
        received = (prefix, records, *beside, num_rows, *staged)
        self._put(x, scales, slots, send_head, routing.topk_idx, routing.topk_weights, received)
        if not is_split:
            assert records is not None
            self._unpack(records, num_rows, prefix, source_idx, recv_idx, recv_weights)

    def grow(self, told: Counts) -> None:
        """Add a segment if any rank lacks memory for its rows."""
        # A cheap bound: if the rows surely fit on every rank, the exact sizes need not be computed.
        if not told.fits or max(told.num_rows) * self._back_bytes + MARGIN_BYTES > min(told.free_bytes):
            self._memory.grow_alike(told, self._columns, self._num_topk)

    def rerouted(self, scope: CudaScope, routes: OneHopRoutes, told: Counts, routing: Routing) -> OneHopRoutes:
        """Return the same routes: inside one node they do not depend on the guessed number of rows."""
        return routes

    def received(
        self, routes: OneHopRoutes, sections: Sections, unpacked: Unpacked, num_rows: int, told: Counts | None
    ) -> DispatchResult:
        """Return the result, with as many of the unpacked rows as were received."""
        handle, topk_idx, topk_weights = unpacked
        x, scales = sections.x, sections.scales
        assert x is not None
        if num_rows != sections.num_rows:
            handle[3].resize_(num_rows)  # `recv_src_idx`
            shrink((x, scales, topk_idx, topk_weights), num_rows)
        return DispatchResult(x, scales, topk_idx, topk_weights, handle)


class OneHopCombine(DeviceCombine):
    """The steps of combines with one signature, see `ops.CombineSteps`."""

    def __init__(self, ops: OneHopOps, signature: CombineSignature):
        super().__init__(ops.signals, ops.memory)
        context, shapes = ops.signals.context, ops.shapes
        hidden, dtype, _, num_topk, num_biases, is_aligned, num_sms, *_ = signature
        self._context = context
        self._terms = combine_terms(signature)
        self._handshake = ops.signals.handshake(self._terms, HandshakeForm(has_prefix=True))
        self._copy_shape = shapes.for_copy(num_sms)
        self._copying: dict[tuple, CopyingHandshake] = {}
        is_whole = is_aligned and hidden * dtype.itemsize % VECTOR_BYTES == 0
        shape, end = shapes.for_pull(num_sms), End(READY, self._terms.operation)
        self._pull = Pull(context, shape, hidden, dtype, num_biases, is_whole, num_topk, end)

    def _notify(self, scope: CudaScope, source: CombineSource, handle: Handle) -> None:
        """Copy rows into the window where that is needed, and exchange offers: the last block of the copy does the
        handshake, or, without a copy, a block of its own.
        """
        prefix = handle.rank_prefix_matrix.contiguous()
        copies = source.copies
        if not copies:
            if scope.reach is not None:
                scope.reach("handshake")
            self._signals.is_announced = True
            self._handshake(source.post, None, prefix)
            return
        (target, rows), *others = copies  # the first pair is the rows, which have most bytes
        for region, part in others:
            copy_in(self._context, self._copy_shape, region, part, prefix)
        key = (rows.shape[1], rows.data_ptr() % VECTOR_BYTES)
        copying = self._copying.get(key)
        if copying is None:
            num_bytes, (word, is_aligned) = rows.shape[1] * rows.element_size(), word_of(target, rows)
            shape = self._copy_shape
            copying = CopyingHandshake(self._context, self._terms, shape, num_bytes, word, is_aligned)
            self._copying[key] = copying
        if scope.reach is not None:
            scope.reach("handshake")
        self._signals.is_announced = True
        copying(source.post, prefix, target, rows)

    def sum(
        self,
        scope: CudaScope,
        source: CombineSource,
        parts: Sequence[torch.Tensor],
        handle: Handle,
        sums: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> None:
        """Sum rows out of the peers' windows, and wait until the peers have summed those of this rank."""
        if scope.reach is not None:
            scope.reach("pull")
        weights, row_weights = (sums[1], parts[1]) if len(sums) > 1 else (None, None)
        prefix, source_idx = handle.rank_prefix_matrix.contiguous(), handle.recv_src_idx.contiguous()
        given = (prefix, source_idx, parts[0], row_weights)
        self._pull(sums[0], weights, handle.send_head.contiguous(), biases, given)
        if source.copies:
            self._release(source)
