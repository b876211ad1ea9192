"""Random calls of normal mode, each with what the oracle expects of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...errors import EPOverflow
from ...event import EventOverlap
from . import oracle
from .checks import Mismatch, padded, rows_as_bytes, same, same_sums, scribble, scribble_input
from .data import BIAS, ROW_WEIGHTS, ROWS, SECOND_BIAS, Data, GroupRouting, PayloadForm, RankPayload
from .layouts import SUMMABLE, laid_out_scales, laid_out_x
from .program import CACHED, COMBINE, DISPATCH, OVERFLOW, WORST_CASE, ProgramCall
from .state import KnownDispatch, State

# Dispatch ------------------------------------------------------------------------------------------------------------


def full_dispatch(state: State, call: ProgramCall) -> None:
    """A dispatch that makes room for what comes."""
    data = state.data(call)
    dispatch(state, call, data, None)


def worst_case_dispatch(state: State, call: ProgramCall) -> None:
    """A dispatch with room made beforehand: exactly what is needed, or more."""
    data = state.data(call)
    spare = [data.draw.choice((0, 0, data.draw.randint(1, 5))) for _ in range(state.num_ranks)]
    dispatch(state, call, data, spare)


def dispatch(state: State, call: ProgramCall, data: Data, spare: list[int] | None) -> None:
    """A dispatch along new routes.

    Args:
        state: Of the segment.
        call: The call.
        data: Its data.
        spare: By rank: rows of room beyond those that come; None: the dispatch makes room itself.
    """
    draw, rank = data.draw, state.rank
    num_tokens = data.num_tokens()
    form, routing = data.form(), data.routing(num_tokens)
    has_topk = spare is not None or draw.random() < 0.7
    alignment = draw.choice((1, 4, 128))
    payloads = [data.payload(form, count, source) for source, count in enumerate(num_tokens)]
    num_rows = [oracle.num_received(routing.masks, one) for one in range(state.num_ranks)]
    capacity = num_rows if spare is None else [max(1, rows + more) for rows, more in zip(num_rows, spare, strict=True)]
    if spare is not None and state.has_relays:
        capacity = [max(capacity)] * state.num_ranks  # from which ranks take how many rows they may have to relay
    is_overflow = any(had < needed for had, needed in zip(capacity, num_rows, strict=True))
    arguments, event = _layout_arguments(state, data, routing)
    x = _sent(payloads[rank], form, state.buffer.device)
    arguments |= state.stream_arguments(draw, event)
    if has_topk:
        arguments["topk_idx"] = routing.ids[rank].to(state.buffer.device, copy=True)
        arguments["topk_weights"] = routing.weights[rank].to(state.buffer.device, copy=True)
    if spare is not None:
        arguments["num_worst_tokens"] = capacity[rank]
    if is_overflow:
        expect_overflow(
            state, capacity[rank], lambda: state.buffer.dispatch(x, expert_alignment=alignment, **arguments)
        )
        return
    result = state.buffer.dispatch(x, expert_alignment=alignment, **arguments)
    recv, *_, handle, event = result
    assert handle is not None
    recv_x = recv[0] if isinstance(recv, tuple) else recv
    known = KnownDispatch(handle, routing.masks, capacity, payloads[rank].values, recv_x)
    if call.kind != OVERFLOW:
        state.known[call.number] = known

    def check() -> None:
        known.is_settled = True
        _check_rows(recv, payloads, form, routing.masks, rank)
        _check_records(result[1:3], routing if has_topk else None, num_rows[rank], rank)
        same("recv_src_idx", _source_idx(handle)[: num_rows[rank]], oracle.source_tokens(routing.masks, rank))
        num_local = routing.num_experts // state.num_ranks
        first = rank * num_local
        selections = sum(one.per_expert for one in routing.layouts)[first : first + num_local].tolist()  # type: ignore[index]
        counts = [] if spare is not None else [-(-count // alignment) * alignment for count in selections]
        if result[3] != counts:
            raise Mismatch(f"num_recv_tokens_per_expert_list: got {result[3]}, expected {counts}")
        scribble_input(x)

    state.made(draw, event, check, {"recv_x": recv_x})


def _layout_arguments(state: State, data: Data, routing: GroupRouting) -> tuple[dict[str, Any], EventOverlap | None]:
    """The layout of a dispatch, from the oracle or, checked, from the buffer, and the event to wait for."""
    rank, device = state.rank, state.buffer.device
    layout, mask = routing.layouts[rank], routing.masks[rank]
    event = None
    is_free = mask is not layout.mask
    per_rank, per_node = (mask.sum(0, dtype=torch.int32), layout.per_node)
    if is_free:
        per_node = mask.view(-1, state.num_nodes, state.num_ranks // state.num_nodes).any(2).sum(0, dtype=torch.int32)
    elif data.draw.random() < 0.5:
        ids = routing.ids[rank].to(device, copy=True)
        *got, overlap = state.buffer.get_dispatch_layout(ids, routing.num_experts, **state.stream_arguments(data.draw))
        if overlap.event is not None:
            overlap.current_stream_wait()
            event = overlap
        expected = (layout.per_rank, layout.per_node if state.num_nodes > 1 else None, layout.per_expert, layout.mask)
        for name, one, other in zip(oracle.TokenLayout._fields, got, expected, strict=True):
            same(f"layout, {name}", one, other)
    arguments = {
        "num_tokens_per_rank": per_rank.to(device, copy=True),
        "num_tokens_per_rdma_rank": per_node.to(device, copy=True) if state.num_nodes > 1 else None,
        "is_token_in_rank": mask.to(device, copy=True),
        "num_tokens_per_expert": layout.per_expert.to(device, copy=True),
    }
    return arguments, event


def _sent(payload: RankPayload, form: PayloadForm, device: torch.device) -> Any:
    """The `x` of a dispatch."""
    x = laid_out_x(payload.values, form.x_layout, device)
    if payload.scales is None:
        return x
    return x, laid_out_scales(payload.scales, form.scale_layout, device)


def _check_rows(
    recv: Any, payloads: list[RankPayload], form: PayloadForm, masks: list[torch.Tensor], rank: int
) -> None:
    """Compare received rows and scales."""
    recv_x, recv_scales = recv if isinstance(recv, tuple) else (recv, None)
    _check_part("recv_x", recv_x, [one.values for one in payloads], masks, rank)
    if (recv_scales is None) != (form.scale_dtype is None):
        raise Mismatch(f"recv_scales: got {type(recv_scales).__name__}, sent {form.scale_dtype}")
    if form.scale_dtype is not None:
        _check_part("recv_scales", recv_scales, [one.scales for one in payloads], masks, rank)  # type: ignore[misc]


def _check_part(name: str, got: torch.Tensor, parts: list[torch.Tensor], masks: list[torch.Tensor], rank: int) -> None:
    # As bytes: torch cannot index all dtypes.
    expected = oracle.received([rows_as_bytes(part) for part in parts], masks, rank)
    same(name, got[: expected.size(0)], expected.view(parts[0].dtype))


def _check_records(got: tuple, routing: GroupRouting | None, num_rows: int, rank: int) -> None:
    """Compare received ids and weights; behind the rows there are none."""
    idx, weights = got
    if routing is None:
        same("recv_topk_idx", idx, None)
        same("recv_topk_weights", weights, None)
        return
    ids, row_weights = (oracle.received(part, routing.masks, rank) for part in (routing.ids, routing.weights))
    num_local = routing.num_experts // len(routing.masks)
    expected_idx, expected_weights = oracle.local_selections(ids, row_weights, rank, num_local)
    same("recv_topk_idx", idx[:num_rows], expected_idx)
    same("recv_topk_weights", weights[:num_rows], expected_weights)
    behind = idx[num_rows:]
    same("recv_topk_idx behind the rows", behind, torch.full_like(behind, -1))


def _source_idx(handle: tuple) -> torch.Tensor:
    """The source index of each row: an item of its own, or, across nodes, beside the source rank."""
    if len(handle) == 6:
        return handle[3]
    return handle[7].view(torch.int32)[:, 1].clone(memory_format=torch.contiguous_format)


def cached_dispatch(state: State, call: ProgramCall) -> None:
    """A dispatch along the routes of an earlier one."""
    assert call.source is not None
    data, known, rank = state.data(call), state.known[call.source], state.rank
    form = data.form()
    payloads = [data.payload(form, mask.size(0), source) for source, mask in enumerate(known.masks)]
    x = _sent(payloads[rank], form, state.buffer.device)
    # A handle is all there is: clones of its tensors do as well, once the dispatch has filled them.
    is_cloned = known.is_settled and data.draw.random() < 0.5
    handle = tuple(item.clone() for item in known.handle) if is_cloned else known.handle
    recv, *nothing, event = state.buffer.dispatch(x, handle=handle, **state.stream_arguments(data.draw))
    recv_x = recv[0] if isinstance(recv, tuple) else recv

    def check() -> None:
        if nothing != [None] * 4:
            raise Mismatch(f"a cached dispatch returned {nothing}")
        _check_rows(recv, payloads, form, known.masks, rank)
        scribble_input(x)

    state.made(data.draw, event, check, {"recv_x": recv_x})


def expect_overflow(state: State, num_rows: int, dispatch: Callable[[], tuple]) -> None:
    """All ranks raise `EPOverflow`: where the call is made, or where it is waited for, and then its handle is void."""
    try:
        *_, handle, event = dispatch()
        if event.event is None:
            raise Mismatch("a dispatch without room returned")
        try:
            event.current_stream_wait()
        except EPOverflow:
            state.buffer.combine(torch.zeros(num_rows, 1, device=state.buffer.device), handle)
    except EPOverflow:
        return
    raise Mismatch("a dispatch without room, or a combine of its rows, went well")


# Combine -------------------------------------------------------------------------------------------------------------


def combine(state: State, call: ProgramCall) -> None:
    """A combine of rows that lie in the window or elsewhere, with and without weights and biases."""
    assert call.source is not None
    data, known, rank = state.data(call), state.known[call.source], state.rank
    draw, device, mask = data.draw, state.buffer.device, known.masks[state.rank]
    place, dtype, hidden = (
        draw.choice(("received", "combine buffer", "elsewhere")),
        draw.choice(SUMMABLE),
        data.hidden(),
    )
    num_topk = data.num_topk() if draw.random() < 0.4 else 0
    kind = draw.choice(("none", "one", "two", "second"))
    is_spoiled = draw.random() < 0.7
    if place == "received" and known.recv_x is not None and known.recv_x.dtype in SUMMABLE:
        x, dtype = known.recv_x, known.recv_x.dtype
        rows = [known.sent] * state.num_ranks  # every rank gives back what it was sent
        known.recv_x = None if is_spoiled else known.recv_x
    else:
        x, rows = _given_back(data, known, (hidden, dtype), ROWS, rank)
        if place == "combine buffer":
            x = state.buffer.get_combine_buffer(known.handle, hidden=hidden, dtype=dtype).copy_(x)
        x = x.to(device)
    weights, weight_rows = None, None
    if num_topk:
        weights, weight_rows = _given_back(data, known, (num_topk, torch.float32), ROW_WEIGHTS, rank)
    shape = (mask.size(0), x.size(1))
    first, second = (data.numbers(shape, dtype, rank, purpose) for purpose in (BIAS, SECOND_BIAS))
    biases = {"none": (), "one": (first,), "two": (first, second), "second": (second,)}[kind]
    bias = {"none": None, "one": first, "two": (first, second), "second": (None, second)}[kind]
    out, out_weights, event = state.buffer.combine(
        x,
        known.handle,
        topk_weights=None if weights is None else weights.to(device, copy=True),
        bias=_moved(bias, device),
        **state.stream_arguments(draw),
    )

    def check() -> None:
        same_sums("combined_x", out, oracle.combined(rows, mask, biases, state.num_nodes))
        expected_weights = None
        if weight_rows is not None:
            expected_weights = oracle.combined(weight_rows, mask, (), state.num_nodes, rounds=False)
        same_sums("combined_topk_weights", out_weights, expected_weights)
        if is_spoiled:  # the call has ended, so nobody reads the rows any more; but checks of other calls do
            state.settle()
            state.forget(x)
            scribble(x)

    state.made(draw, event, check, {"combined_x": out})


def _moved(bias: Any, device: torch.device) -> Any:
    if isinstance(bias, tuple):
        return tuple(_moved(one, device) for one in bias)
    return None if bias is None else bias.to(device, copy=True)


def _given_back(
    data: Data, known: KnownDispatch, like: tuple[int, torch.dtype], purpose: int, rank: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What ranks give back, of so many columns and such a dtype.

    Returns:
        This rank's, with whatever room its handle has; and, by rank, what each of this rank's tokens gets from there.
    """
    columns, dtype = like
    given = [
        data.numbers((oracle.num_received(known.masks, one), columns), dtype, one, purpose)
        for one in range(len(known.masks))
    ]
    rows = [_rows_for(part, known.masks, rank, one) for one, part in enumerate(given)]
    return padded(given[rank], known.num_rows[rank]), rows


def _rows_for(given: torch.Tensor, masks: list[torch.Tensor], source: int, rank: int) -> torch.Tensor:
    """[T, ...]: what tokens of `source` get of what `rank` gives; anything for those that it has not seen."""
    if not given.size(0):
        return given.new_zeros(masks[source].size(0), given.size(1))
    return given[oracle.rows_of_tokens(masks, source, rank).clamp(max=given.size(0) - 1)]


PLAYERS: dict[str, Callable[[State, ProgramCall], None]] = {
    DISPATCH: full_dispatch,
    WORST_CASE: worst_case_dispatch,
    CACHED: cached_dispatch,
    COMBINE: combine,
}
