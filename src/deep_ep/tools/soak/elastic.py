"""Random calls of `ElasticBuffer`, over the same buffer as the others, each with what the oracle expects of it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from ...errors import EPOverflow
from . import oracle
from .checks import Mismatch, padded, rows_as_bytes, same, same_sums, scribble_input
from .data import BIAS, ROW_WEIGHTS, ROWS, SECOND_BIAS, WEIGHTS, Data, GroupRouting, PayloadForm, RankPayload
from .layouts import SUMMABLE, laid_out_scales, laid_out_x
from .program import ELASTIC, ELASTIC_CACHED, ELASTIC_COMBINE, ELASTIC_NO_SYNC, ProgramCall
from .state import KnownElastic, State, is_direct

_SCALE_DTYPE = torch.int32  # V2 takes scales of 4 bytes


# Dispatch ------------------------------------------------------------------------------------------------------------


def new_dispatch(state: State, call: ProgramCall) -> None:
    """A dispatch with ids: compact or expanded, with the counts on the host or without."""
    data, rank, has_sync = state.data(call), state.rank, call.kind == ELASTIC
    draw, device = data.draw, state.buffer.device
    num_tokens = data.num_tokens()
    form, routing = _form(data), data.routing(num_tokens)
    is_expanded, alignment, has_weights = draw.random() < 0.6, draw.choice((1, 1, 2, 16)), draw.random() < 0.7
    max_tokens = max(1, *num_tokens) + draw.choice((0, 0, 3))
    is_overflow = is_expanded and not has_sync and _is_overflow(routing, max_tokens, alignment)
    if is_overflow and not is_direct(state.buffer):
        is_expanded = is_overflow = False  # there it would close the buffer
    payloads = [data.payload(form, count, source) for source, count in enumerate(num_tokens)]
    x = _sent(payloads[rank], form, device)
    num_local = routing.num_experts // state.num_ranks
    stats = torch.full((num_local,), 7, dtype=torch.int32, device=device) if draw.random() < 0.5 else None
    dispatch = partial(
        state.elastic().dispatch,
        x,
        routing.ids[rank].to(device, copy=True),
        routing.weights[rank].to(device, copy=True) if has_weights else None,
        stats,
        routing.num_experts,
        max_tokens,
        alignment,
        do_handle_copy=draw.random() < 0.5,
        do_cpu_sync=has_sync,
        use_tma_aligned_col_major_sf=draw.random() < 0.3,
        **_stream_arguments(state, draw),
    )
    if is_overflow:
        _expect_overflow(partial(dispatch, do_expand=True))
        is_expanded = False
    is_zeroed = is_expanded and draw.random() < 0.5
    got = dispatch(do_expand=is_expanded, do_zero_padding=is_zeroed)
    handle, event = got[3:]
    num_rows = handle.num_expanded_tokens if is_expanded else handle.num_recv_tokens
    known = KnownElastic(handle, routing.ids, routing.num_experts, alignment, is_expanded, num_rows)
    state.known_elastic[call.number] = known

    def check() -> None:
        _check_rows(got[0], payloads, known, rank, is_zeroed)
        _check_ids(got[1], known, rank)
        _check_weights(got[2], routing.weights if has_weights else None, known, rank, is_zeroed)
        _check_handle(known, rank, max_tokens, has_sync)
        if stats is not None:
            counts = oracle.expanded(known.ids, rank, num_local, 1).counts
            same("stats", stats, 7 + torch.tensor(counts, dtype=torch.int32))
        scribble_input(x)

    state.made(draw, event, check, {"recv_x": _data_of(got[0])})


def _is_overflow(routing: GroupRouting, max_tokens: int, alignment: int) -> bool:
    """Whether tokens name experts so often more than once that the worst case has too few rows."""
    num_ranks, num_topk = len(routing.ids), routing.ids[0].size(1)
    num_local = routing.num_experts // num_ranks
    most = num_ranks * max_tokens * min(num_topk, num_local) + (alignment - 1) * num_local
    sizes = [oracle.expanded(routing.ids, rank, num_local, alignment).sources.numel() for rank in range(num_ranks)]
    return max(sizes) > -(-most // alignment) * alignment


def _expect_overflow(make: Callable[[], tuple]) -> None:
    """All ranks raise `EPOverflow`: where the call is made, or where it is waited for."""
    try:
        *_, event = make()
        if event.event is not None:
            event.current_stream_wait()
    except EPOverflow:
        return
    raise Mismatch("a dispatch without room went well")


def cached_dispatch(state: State, call: ProgramCall) -> None:
    """A dispatch along the rows of an earlier one, with or without weights."""
    assert call.source is not None
    data, known, rank = state.data(call), state.known_elastic[call.source], state.rank
    draw, device, form = data.draw, state.buffer.device, _form(data)
    payloads = [data.payload(form, ids.size(0), source) for source, ids in enumerate(known.ids)]
    weights = None
    if draw.random() < 0.5:
        shapes = [tuple(ids.shape) for ids in known.ids]
        weights = [data.bits(shape, torch.float32, source, WEIGHTS) for source, shape in enumerate(shapes)]
    x = _sent(payloads[rank], form, device)
    is_zeroed = known.is_expanded and draw.random() < 0.5
    got = state.elastic().dispatch(
        x,
        topk_weights=None if weights is None else weights[rank].to(device, copy=True),
        handle=known.handle,
        do_expand=known.is_expanded and draw.random() < 0.5,
        do_zero_padding=is_zeroed,
        **_stream_arguments(state, draw),
    )
    if got[3] is not known.handle:
        raise Mismatch("a cached dispatch returned another handle")

    def check() -> None:
        _check_rows(got[0], payloads, known, rank, is_zeroed)
        _check_ids(got[1], known, rank)
        _check_weights(got[2], weights, known, rank, is_zeroed)
        scribble_input(x)

    state.made(draw, got[4], check, {"recv_x": _data_of(got[0])})


def _form(data: Data) -> PayloadForm:
    form = data.form()
    return form if form.scale_dtype is None else replace(form, scale_dtype=_SCALE_DTYPE)


def _sent(payload: RankPayload, form: PayloadForm, device: torch.device) -> Any:
    x = laid_out_x(payload.values, form.x_layout, device)
    if payload.scales is None:
        return x
    return x, laid_out_scales(payload.scales, form.scale_layout, device)


def _stream_arguments(state: State, draw: random.Random) -> dict[str, Any]:
    given = state.stream_arguments(draw)
    return {
        "async_with_compute_stream": given["async_finish"],
        "previous_event": given["previous_event"],
        "previous_event_before_epilogue": given["previous_event"] if draw.random() < 0.2 else None,
        "allocate_on_comm_stream": given["allocate_on_comm_stream"],
    }


def _data_of(recv: Any) -> torch.Tensor:
    return recv[0] if isinstance(recv, tuple) else recv


# What must come ------------------------------------------------------------------------------------------------------


def _num_local(known: KnownElastic) -> int:
    return known.num_experts // len(known.ids)


def _masks(known: KnownElastic) -> list[torch.Tensor]:
    """By rank: [T, R] bool, where its tokens go."""
    return [oracle.layout(ids, known.num_experts, len(known.ids), 1).mask for ids in known.ids]


def _placed(parts: list[torch.Tensor], known: KnownElastic, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """What a rank receives of [T, bytes] tensors of all ranks.

    Returns:
        [rows, bytes]; and [rows] bool, whether a row is there: the others are padding.
    """
    if not known.is_expanded:
        rows = oracle.received(parts, _masks(known), rank)
        return rows, torch.ones(rows.size(0), dtype=torch.bool)
    told = oracle.expanded(known.ids, rank, _num_local(known), known.alignment)
    rows = parts[0].new_zeros(told.sources.numel(), parts[0].size(1))
    for source, part in enumerate(parts):
        is_here = told.sources == source
        rows[is_here] = part[told.tokens[is_here]]
    return rows, told.sources >= 0


def _check_rows(recv: Any, payloads: list[RankPayload], known: KnownElastic, rank: int, is_zeroed: bool) -> None:
    recv_x, recv_scales = recv if isinstance(recv, tuple) else (recv, None)
    _check_part("recv_x", recv_x, [one.values for one in payloads], known, rank, is_zeroed)
    if (recv_scales is None) != (payloads[0].scales is None):
        raise Mismatch("recv_scales: there are some, or none, where it should be otherwise")
    if recv_scales is not None:
        scales = [one.scales for one in payloads if one.scales is not None]
        _check_part("recv_scales", recv_scales, scales, known, rank, is_zeroed)


def _check_part(
    name: str, got: torch.Tensor, parts: list[torch.Tensor], known: KnownElastic, rank: int, is_zeroed: bool
) -> None:
    if got.size(0) != known.num_rows:
        raise Mismatch(f"{name}: got {got.size(0)} rows, expected {known.num_rows}")
    expected, is_there = _placed([rows_as_bytes(part) for part in parts], known, rank)
    rows = rows_as_bytes(got.cpu()[: expected.size(0)])
    same(name, rows[is_there], expected[is_there])
    if is_zeroed:
        same(f"padding of {name}", rows[~is_there], expected[~is_there])


def _check_ids(got: torch.Tensor | None, known: KnownElastic, rank: int) -> None:
    if known.is_expanded:
        same("recv_topk_idx", got, None)
        return
    assert got is not None
    ids = oracle.received(known.ids, _masks(known), rank)
    local, _ = oracle.local_selections(ids, torch.zeros(ids.shape), rank, _num_local(known))
    same("recv_topk_idx", got[: ids.size(0)], local)
    behind = got[ids.size(0) :]
    same("recv_topk_idx behind the rows", behind, torch.full_like(behind, -1))


def _check_weights(
    got: torch.Tensor | None, weights: list[torch.Tensor] | None, known: KnownElastic, rank: int, is_zeroed: bool
) -> None:
    if weights is None:
        same("recv_topk_weights", got, None)
        return
    assert got is not None
    if not known.is_expanded:
        expected = oracle.received(weights, _masks(known), rank)
        same("recv_topk_weights", got[: expected.size(0)], expected)
        return
    told = oracle.expanded(known.ids, rank, _num_local(known), known.alignment)
    bits = [one.view(torch.int32) for one in weights]
    expected = torch.zeros(told.sources.numel(), dtype=torch.int32)
    for source, part in enumerate(bits):
        is_here = told.sources == source
        expected[is_here] = part[told.tokens[is_here], told.columns[is_here]]
    is_there, rows = told.sources >= 0, got.cpu()[: expected.numel()].view(torch.int32)
    same("recv_topk_weights", rows[is_there], expected[is_there])
    if is_zeroed:
        same("padding of recv_topk_weights", rows[~is_there], expected[~is_there])


def _check_handle(known: KnownElastic, rank: int, max_tokens: int, has_sync: bool) -> None:
    """Compare counts, prefix sums and source indices."""
    handle, num_local, masks = known.handle, _num_local(known), _masks(known)
    counts = oracle.expanded(known.ids, rank, num_local, 1).counts
    aligned = [-(-count // known.alignment) * known.alignment for count in counts]
    ends = torch.tensor(aligned).cumsum(0)
    if known.is_expanded:
        ends = ends - torch.tensor(aligned) + torch.tensor(counts)
    same("psum_num_recv_tokens_per_expert", handle.psum_num_recv_tokens_per_expert, ends.int())
    same("counts", handle.num_unaligned_recv_tokens_per_expert, torch.tensor(counts, dtype=torch.int32))
    from_each = torch.tensor([int(mask[:, rank].sum()) for mask in masks])
    same("psum by rank", handle.psum_num_recv_tokens_per_scaleup_rank, from_each.cumsum(0).int())
    if handle.num_recv_tokens_per_expert_list != (aligned if has_sync else []):
        raise Mismatch(f"num_recv_tokens_per_expert_list: got {handle.num_recv_tokens_per_expert_list}")
    num_rows, num_topk = int(from_each.sum()), known.ids[0].size(1)
    sources = torch.repeat_interleave(torch.arange(len(masks)), from_each)
    ids = oracle.received(known.ids, masks, rank)
    is_local = oracle.owners(ids, known.num_experts, len(masks)) == rank
    highest = torch.where(is_local, torch.arange(num_topk), -1).amax(1)
    metadata = handle.recv_src_metadata[:num_rows]
    same("source index", metadata[:, 0], (sources * max_tokens + oracle.source_tokens(masks, rank)).int())
    same("highest column", metadata[:, 1], (sources * num_topk + highest).int())
    if known.is_expanded:
        told = oracle.expanded(known.ids, rank, num_local, known.alignment)
        expected = torch.full((num_rows, num_topk), -1, dtype=torch.int32)
        for source in range(len(masks)):
            row_of = oracle.rows_of_tokens(masks, source, rank)
            here = (told.sources == source).nonzero()[:, 0]
            expected[row_of[told.tokens[here]], told.columns[here]] = here.int()
        same("expanded rows", metadata[:, 2:], expected)


# Combine -------------------------------------------------------------------------------------------------------------


def combine(state: State, call: ProgramCall) -> None:
    """A combine of compact or expanded rows, with and without sums on the way, weights and biases."""
    assert call.source is not None
    data, known, rank = state.data(call), state.known_elastic[call.source], state.rank
    draw, device = data.draw, state.buffer.device
    ids, hidden, dtype = known.ids[rank], data.hidden(), draw.choice(SUMMABLE)
    has_multiple_reduction, has_weights = draw.random() < 0.7, draw.random() < 0.5
    kind = draw.choice(("none", "one", "two"))
    buffer = state.elastic(has_multiple_reduction)
    x, columns = _given(data, known, (hidden, dtype), ROWS, rank)
    x = x.to(device)
    if draw.random() < 0.3:
        x = buffer.get_combine_buffer(known.handle, hidden, dtype).copy_(x)
    weights, weight_columns = None, None
    if has_weights:
        num_columns = 1 if known.is_expanded else ids.size(1)
        given, weight_columns = _given(data, known, (num_columns, torch.float32), ROW_WEIGHTS, rank)
        weights = given.flatten() if known.is_expanded else given
    first, second = (data.numbers((ids.size(0), hidden), dtype, rank, purpose) for purpose in (BIAS, SECOND_BIAS))
    biases = {"none": (), "one": (first,), "two": (first, second)}[kind]
    moved: Any = tuple(bias.to(device, copy=True) for bias in biases)
    bias = {"none": None, "one": moved and moved[0], "two": moved}[kind]
    out, out_weights, event = buffer.combine(
        x,
        known.handle,
        None if weights is None else weights.to(device, copy=True),
        bias,
        **_stream_arguments(state, draw),
    )
    owner = oracle.owners(ids, known.num_experts, state.num_ranks)

    def check() -> None:
        if known.is_expanded and not has_multiple_reduction:
            terms, is_given = columns, owner >= 0
        else:
            sums, is_given = oracle.summed_by_rank(columns, owner)
            terms = sums if known.is_expanded else columns  # compact rows are sums already
        expected = oracle.sums_of_columns(terms, list(is_given.unbind(1)), biases)
        same_sums("combined_x", out, expected)
        same_sums("combined_topk_weights", out_weights, _expected_weights(weight_columns, owner, known.is_expanded))

    state.made(draw, event, check, {"combined_x": out})


def _expected_weights(
    columns: list[torch.Tensor] | None, owner: torch.Tensor, is_expanded: bool
) -> torch.Tensor | None:
    """[T, K]: what the rank of each column gives for it; 0 where there is none."""
    if columns is None:
        return None
    values = torch.stack([column[:, 0 if is_expanded else k] for k, column in enumerate(columns)], 1)
    return torch.where(owner >= 0, values, 0.0) + 0.0  # a sum with zeros: it has no negative one


def _given(
    data: Data, known: KnownElastic, like: tuple[int, torch.dtype], purpose: int, rank: int
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What ranks give back, of so many columns and such a dtype.

    Returns:
        This rank's, with whatever room its handle has; and for each column of this rank's tokens what it gets: [T, H],
        anything where it gets nothing.
    """
    width, dtype = like
    ids, num_ranks, num_local, masks = known.ids[rank], len(known.ids), _num_local(known), _masks(known)
    owner = oracle.owners(ids, known.num_experts, num_ranks)
    columns = [torch.zeros(ids.size(0), width, dtype=dtype) for _ in range(ids.size(1))]
    mine = None
    for peer in range(num_ranks):
        told = oracle.expanded(known.ids, peer, num_local, known.alignment)
        num_rows = told.sources.numel() if known.is_expanded else oracle.num_received(masks, peer)
        given = data.numbers((num_rows, width), dtype, peer, purpose)
        if peer == rank:
            mine = padded(given, known.num_rows)
        row_of = oracle.rows_of_tokens(masks, rank, peer)
        for k, column in enumerate(columns):
            if known.is_expanded:
                here = ((told.sources == rank) & (told.columns == k)).nonzero()[:, 0]
                column[told.tokens[here]] = given[here]
            else:
                tokens = (owner[:, k] == peer).nonzero()[:, 0]
                column[tokens] = given[row_of[tokens]]
    assert mine is not None
    return mine, columns


PLAYERS: dict[str, Callable[[State, ProgramCall], None]] = {
    ELASTIC: new_dispatch,
    ELASTIC_NO_SYNC: new_dispatch,
    ELASTIC_CACHED: cached_dispatch,
    ELASTIC_COMBINE: combine,
}
