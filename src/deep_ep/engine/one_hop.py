"""The steps of calls inside one node: every rank reaches every other rank's memory.

    dispatch   notify (tokens are numbered, headers and offers exchanged), put, finish, unpack
    combine    notify (rows outside the window are copied in first), pull, finish

`notify` and `finish` are the only kernels in which a block waits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ..handle import Handle
from ..kernels.notify import CopyingHandshake, Form, Post, Terms, can_share_a_wait
from ..kernels.pull import Pull, copy_in
from ..kernels.put import VECTOR_BYTES, Put, Rows, Unpack, record_words, widest_word, word_of
from ..kernels.staging import FinishCombine, FinishDispatch
from .call import ANNOUNCED, OFFERED, OPERATIONS, READY, Agreement
from .digest import pack
from .memory import ROOM_TO_SPARE, Columns, Memory, Sections
from .ops import CombineSignature, DispatchSignature, Supply
from .parcel import Payload, Received, Routing, empty_topk
from .scope import Scope
from .shapes import Shapes
from .signals import Counts, Signals


class OneHop:
    """Where the steps of calls inside one node come from.

    Args:
        signals: Of the buffer.
        memory: Likewise.
        shapes: How bulk kernels are launched.
    """

    can_stage = True

    def __init__(self, signals: Signals, memory: Memory, shapes: Shapes):
        self.signals = signals
        self.memory = memory
        self.shapes = shapes
        # What a kernel counts, and reads itself: calls follow one another, so there need be only one.
        self.counts = signals.places.state.new_empty(signals.places.num_ranks, dtype=torch.int32)

    def dispatch(self, signature: DispatchSignature) -> OneHopDispatch:
        """The steps of dispatches with one signature."""
        return OneHopDispatch(self, signature)

    def combine(self, signature: CombineSignature) -> OneHopCombine:
        """The steps of combines with one signature."""
        return OneHopCombine(self, signature)

    def numbers(self) -> dict[str, Any]:
        """Nothing beside the engine."""
        return {}

    def close(self) -> None:
        """It holds nothing."""


class Routes(NamedTuple):
    """Which slot each token takes at each rank.

    Attributes:
        slots: [T, R] int32, relative to the first slot of this rank, or those of a handle.
        send_head: [T, R] int32, written with the slots as a handle has them; None: there is a handle.
        prefix: [R, R] int32.
    """

    slots: torch.Tensor
    send_head: torch.Tensor | None
    prefix: torch.Tensor


class Unpacked(NamedTuple):
    """What came beside the rows of a dispatch, with as many rows as there is room for.

    Attributes:
        handle: The handle.
        topk_idx: [n, K], local ids, or None.
        topk_weights: [n, K] float32, or None.
    """

    handle: Any
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None


_make_unpacked: Callable[[tuple], Unpacked] = partial(tuple.__new__, Unpacked)
_make_handle: Callable[[tuple], Handle] = partial(tuple.__new__, Handle)
_make_routes: Callable[[tuple], Routes] = partial(tuple.__new__, Routes)  # see `notify.make_post`


def rows_of(signature: DispatchSignature) -> Rows:
    """What the rows of a dispatch are made of, for the kernels that move them."""
    row_bytes = signature.hidden * signature.dtype.itemsize
    word, is_aligned = widest_word(row_bytes, signature.alignment)
    scale_bytes = signature.scale_dtype.itemsize if signature.scale_dtype is not None else 0
    has_records = signature.num_experts > 0
    idx_dtype = signature.idx_dtype or torch.int32
    return Rows(
        row_bytes, word, is_aligned, signature.num_scales, scale_bytes, has_records, signature.num_topk, idx_dtype
    )


def columns_of(signature: DispatchSignature) -> Columns:
    """The same for whoever makes room for them."""
    num_words = record_words(signature.num_topk) if signature.num_experts else 0
    return Columns(signature.hidden, signature.dtype, signature.num_scales, signature.scale_dtype, num_words)


def terms_of(signature: DispatchSignature, step: int, num_ranks: int) -> Terms:
    """What a rank says in all dispatches of a signature."""
    operation, hidden, dtype, _, num_scales, scale_dtype, num_topk, idx_dtype, num_experts, _ = signature
    agreement = Agreement(operation, num_experts, num_topk, hidden, dtype, num_scales, scale_dtype, idx_dtype)
    return Terms(step, OPERATIONS.index(operation), pack(agreement), num_experts // num_ranks)


def combine_terms(signature: CombineSignature) -> Terms:
    """What a rank says in all combines of a signature."""
    agreement = Agreement("combine", num_topk=signature.num_topk, hidden=signature.hidden, dtype=signature.dtype)
    return Terms(OFFERED, OPERATIONS.index("combine"), pack(agreement))


class OneHopDispatch:
    """The steps of dispatches with one signature, see `ops.DispatchSteps`."""

    def __init__(self, ops: OneHop, signature: DispatchSignature):
        signals, places = ops.signals, ops.signals.places
        operation, num_topk = signature.operation, signature.num_topk
        has_routing = signature.num_experts > 0
        self._ops, self._num_topk = ops, num_topk
        self.columns = columns_of(signature)
        self._back_bytes = self.columns.back_bytes(num_topk)
        num_ranks = places.num_ranks
        terms = terms_of(signature, ANNOUNCED if operation == "dispatch" else OFFERED, num_ranks)
        form = Form(has_counts=has_routing, has_prefix=True, is_numbered=has_routing)
        self._notify = signals.handshake(terms, form)
        self._offer = signals.handshake(terms._replace(step=OFFERED), Form(is_new=False))
        shape, rows, num_local = ops.shapes.for_put(signature.num_sms), rows_of(signature), terms.num_local
        self._put = Put(places, shape, rows, num_local)
        self._finish = FinishDispatch(places, READY, terms.operation, rows, num_local)
        self._unpack = Unpack(places, shape.num_blocks, num_topk, rows.idx_dtype)

    def route(self, scope: Scope, routing: Routing, num_channels: int, num_rows: int) -> Routes:
        """Memory for slots and prefix sums."""
        del num_channels, num_rows
        num_tokens, num_ranks = routing.is_token_in_rank.shape
        like = self._ops.counts
        with scope.outputs:
            send_head, prefix = like.new_empty((num_tokens, num_ranks)), like.new_empty((num_ranks, num_ranks))
        return _make_routes((self._ops.memory.scratch(num_tokens * num_ranks), send_head, prefix))

    def follow(self, handle: Handle) -> Routes:
        """The slots of a handle."""
        return _make_routes((handle.send_head.contiguous(), None, handle.rank_prefix_matrix.contiguous()))

    def notify(self, scope: Scope, post: Post, payload: Payload, routing: Routing | None, routes: Routes) -> None:
        """Number the tokens, and exchange counts and offers."""
        del payload
        if scope.reach is not None:
            scope.reach("meet")
        self._ops.signals.is_announced = True
        if routing is None:
            self._notify(post, None, routes.prefix)
            return
        counted = (self._ops.counts, routing.num_tokens_per_rank, routing.num_tokens_per_expert)
        self._notify(post, counted, routes.prefix, None, (routing.is_token_in_rank, routes.slots, None))

    def offer(self, scope: Scope, post: Post, payload: Payload, routes: Routes) -> None:
        """Exchange offers once more."""
        del payload, routes
        if scope.reach is not None:
            scope.reach("offer")
        self._offer(post)

    def move(self, scope: Scope, payload: Payload, routing: Routing | None, routes: Routes, sections: Sections) -> None:
        """Put this rank's rows, and wait for the peers' to be there."""
        topk_idx = topk_weights = None
        if routing is not None:
            topk_idx, topk_weights = routing.topk_idx, routing.topk_weights
        x, scales = payload.x, payload.scales
        slots, send_head, prefix = routes
        if scope.reach is not None:
            scope.reach("put")
        self._put(x, scales, slots, send_head, topk_idx, topk_weights)
        if scope.reach is not None:
            scope.reach("finish")
        if sections.lane_rows:
            staged = (sections.num_rows, sections.rooms())
            self._finish(x, scales, slots, topk_idx, topk_weights, prefix, *staged)
        else:
            self._finish(x, scales, slots, topk_idx, topk_weights, prefix)

    def grow(self, told: Counts, payload: Payload, routing: Routing) -> None:
        """Add a segment where some rank lacks room."""
        del payload, routing
        # What every rank surely has room for need not be worked out.
        if not told.fits or max(told.num_rows) * self._back_bytes + ROOM_TO_SPARE > min(told.free_bytes):
            self._ops.memory.grow_alike(told, self.columns, self._num_topk)

    def rerouted(self, scope: Scope, routes: Routes, told: Counts, routing: Routing) -> Routes:
        """They do not depend on what was guessed."""
        del scope, told, routing
        return routes

    def unpack(self, scope: Scope, routing: Routing, routes: Routes, sections: Sections, num_channels: int) -> Unpacked:
        """Take the records apart."""
        assert sections.records is not None
        num_rows = sections.num_rows
        with scope.outputs:
            source_idx = routes.prefix.new_empty(num_rows)
            topk_idx, topk_weights = empty_topk(routing, num_rows)
        self._unpack(sections.records, num_rows, routes.prefix, source_idx, topk_idx, topk_weights)
        nothing = self._ops.memory.no_channels(num_channels)
        assert routes.send_head is not None
        handle = (routes.prefix, nothing, nothing, source_idx, routing.is_token_in_rank, routes.send_head)
        return _make_unpacked((_make_handle(handle), topk_idx, topk_weights))

    def received(
        self,
        routing: Routing,
        routes: Routes,
        sections: Sections,
        unpacked: Unpacked,
        num_rows: int,
        told: Counts | None,
    ) -> Received:
        """As many rows as came, of what was unpacked."""
        del routing, routes, told
        handle, topk_idx, topk_weights = unpacked
        if num_rows != sections.num_rows:
            prefix, nothing, none, source_idx, mask, send_head = handle
            handle = _make_handle((prefix, nothing, none, source_idx[:num_rows], mask, send_head))
        return received_of(sections, num_rows, topk_idx, topk_weights, handle)


def received_of(
    sections: Sections,
    num_rows: int,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    handle: Any,
) -> Received:
    """What a dispatch returns: `num_rows` rows of what there is room for are the caller's."""
    x, scales, _, num_there, lane_rows, _ = sections
    assert x is not None
    if num_rows != num_there:
        x, scales = x[:num_rows], scales[:num_rows] if scales is not None else None
        if topk_idx is not None and topk_weights is not None:
            topk_idx, topk_weights = topk_idx[:num_rows], topk_weights[:num_rows]
    return Received(x, scales, None, topk_idx, topk_weights, handle, lane_rows > 0)


class OneHopCombine:
    """The steps of combines with one signature, see `ops.CombineSteps`."""

    def __init__(self, ops: OneHop, signature: CombineSignature):
        places, shapes = ops.signals.places, ops.shapes
        hidden, dtype, num_topk, num_biases, is_aligned, num_sms = signature
        self._signals, self._places = ops.signals, places
        self._terms = combine_terms(signature)
        self._handshake = ops.signals.handshake(self._terms, Form(has_prefix=True))
        self._copy_shape = shapes.for_copy(num_sms)
        self._copying: dict[tuple, CopyingHandshake] = {}
        self._can_copy_and_notify = can_share_a_wait(places)
        shape = shapes.for_pull(num_sms)
        is_whole = is_aligned and hidden * dtype.itemsize % VECTOR_BYTES == 0
        self._pulls = [Pull(places, shape, 0, hidden, dtype, num_biases, is_whole)]
        if num_topk:
            self._pulls.append(Pull(places, shape, 1, num_topk, torch.float32, 0, 4 * num_topk % VECTOR_BYTES == 0))
        self._finish = FinishCombine(places, READY, self._terms.operation, hidden, dtype, num_topk)

    def notify(self, scope: Scope, supply: Supply, handle: Handle) -> None:
        """Copy in what must be, and exchange offers: the last block of the copy does it, or a block of its own."""
        prefix = handle.rank_prefix_matrix.contiguous()
        copies = supply.copies
        if not self._can_copy_and_notify:
            for region, part in copies:
                copy_in(self._places, self._copy_shape, region, part, prefix)
            copies = []
        if not copies:
            if scope.reach is not None:
                scope.reach("meet")
            self._signals.is_announced = True
            self._handshake(supply.post, None, prefix)
            return
        (target, rows), *others = copies  # the first one are the rows: it has most to copy
        for region, part in others:
            copy_in(self._places, self._copy_shape, region, part, prefix)
        key = (rows.shape[1], rows.data_ptr() % VECTOR_BYTES)
        copying = self._copying.get(key)
        if copying is None:
            num_bytes, (word, is_aligned) = rows.shape[1] * rows.element_size(), word_of(target, rows)
            shape = self._copy_shape
            copying = CopyingHandshake(self._places, self._terms, shape, num_bytes, word, is_aligned)
            self._copying[key] = copying
        if scope.reach is not None:
            scope.reach("meet")
        self._signals.is_announced = True
        copying(supply.post, prefix, target, rows)

    def sum(
        self,
        scope: Scope,
        parts: Sequence[torch.Tensor],
        handle: Handle,
        sums: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
    ) -> None:
        """Sum rows out of the peers' windows, and wait until they have summed those of this rank."""
        slots = handle.send_head.contiguous()
        if scope.reach is not None:
            scope.reach("pull")
        self._pulls[0](sums[0], slots, biases)
        if len(sums) > 1:
            self._pulls[1](sums[1], slots)
        if scope.reach is not None:
            scope.reach("finish")
        prefix, source_idx = handle.rank_prefix_matrix.contiguous(), handle.recv_src_idx.contiguous()
        self._finish(parts, sums, biases, slots, prefix, source_idx)
