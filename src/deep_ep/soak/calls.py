"""The random calls, each with what the oracle expects of it. Everything is compared exactly."""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import reference
from ..buffers.legacy import Buffer
from .checks import Mismatch, padded, same, scribble
from .inputs import SUMMABLE, Inputs
from .low_latency import low_latency_round
from .state import Dispatched, Report, State


def play(buffer: Buffer, seed: int, num_calls: int, most_tokens: int = 20, most_hidden: int = 40) -> Report:
    """Make `num_calls` calls, check them all, drop everything.

    Args:
        buffer: This rank's buffer.
        seed: The plan; the same on all ranks.
        num_calls: How many.
        most_tokens: Upper limit of a rank's tokens.
        most_hidden: Upper limit of the hidden size.

    Raises:
        Mismatch: A result is wrong.
    """
    state = State(buffer, Inputs(seed, buffer.group_size, most_tokens, most_hidden))
    for _ in range(num_calls):
        make_call(state)
    state.finish()
    return state.report


def make_call(state: State, only_low_latency: bool = False) -> None:
    """One call, and perhaps the drop of something that was kept."""
    state.inputs.call_idx += 1
    kinds: list[Callable[[State], None]] = [] if only_low_latency else [full_dispatch, worst_case_dispatch]
    if state.known:
        kinds += [cached_dispatch, combine, combine]
    if state.buffer.low_latency_mode:
        kinds.append(low_latency_round)
    state.draw.choice(kinds)(state)
    state.drop_some()


def full_dispatch(state: State) -> None:
    """A dispatch that makes room for what comes."""
    _dispatch(state, worst_case=False)


def worst_case_dispatch(state: State) -> None:
    """A dispatch with room made beforehand."""
    _dispatch(state, worst_case=True)


def _dispatch(state: State, worst_case: bool) -> None:
    inputs, draw, rank = state.inputs, state.draw, state.rank
    num_tokens = inputs.num_tokens()
    xs, scales = inputs.payload(num_tokens)
    routing = inputs.routing(num_tokens)
    has_topk = worst_case or draw.random() < 0.7
    alignment = draw.choice((1, 4))
    extra_rows = [draw.randint(0, 5) for _ in num_tokens]
    expected = reference.dispatch(
        xs,
        routing["masks"],
        scales=scales,
        topk_idx=routing["ids"] if has_topk else None,
        topk_weights=routing["weights"] if has_topk else None,
        num_experts=routing["num_experts"],
        expert_alignment=alignment,
        num_tokens_per_expert=routing["per_expert"],
    )
    num_rows = [one.recv_x.size(0) for one in expected]
    if worst_case:
        num_rows = [max(1, rows + extra) for rows, extra in zip(num_rows, extra_rows, strict=True)]
    x, mask = state.sent(xs[rank]), state.sent(routing["masks"][rank])
    result = state.buffer.dispatch(
        (x, state.sent(scales[rank])) if scales is not None else x,
        num_tokens_per_rank=mask.sum(0, dtype=torch.int32),
        num_tokens_per_rdma_rank=_tokens_per_node(mask, state.num_nodes),
        is_token_in_rank=mask,
        num_tokens_per_expert=state.sent(routing["per_expert"][rank]),
        topk_idx=state.sent(routing["ids"][rank]) if has_topk else None,
        topk_weights=state.sent(routing["weights"][rank]) if has_topk else None,
        expert_alignment=alignment,
        num_worst_tokens=num_rows[rank] if worst_case else 0,
        **state.stream_arguments(),
    )
    recv, *_, handle, event = result
    assert handle is not None
    recv_x = recv[0] if isinstance(recv, tuple) else recv
    state.known.append(Dispatched(handle, routing["masks"], num_rows, recv_x, [one.recv_x for one in expected]))

    def check() -> None:
        check_dispatched(result, expected[rank], worst_case)
        scribble(x)

    state.made("worst-case dispatch" if worst_case else "full dispatch", event, check, recv_x)


def check_dispatched(result: tuple, expected: reference.Dispatched, worst_case: bool) -> None:
    """Compare what a dispatch returned.

    Raises:
        Mismatch: It is not what the oracle expects.
    """
    recv, idx, weights, counts, handle, _ = result
    rows = expected.recv_x.size(0)
    recv_x, recv_scales = recv if isinstance(recv, tuple) else (recv, None)
    same("recv_x", recv_x[:rows], expected.recv_x)
    same("recv_scales", _first(recv_scales, rows), expected.recv_scales)
    same("recv_topk_idx", _first(idx, rows), expected.recv_topk_idx)
    same("recv_topk_weights", _first(weights, rows), expected.recv_topk_weights)
    if idx is not None:
        same("recv_topk_idx beyond the rows", idx[rows:], torch.full_like(idx[rows:], -1))
    same("recv_src_idx", _source_idx(handle)[:rows], torch.tensor(expected.src_token, dtype=torch.int32))
    expected_counts = [] if worst_case else expected.num_recv_tokens_per_expert_list
    if counts != expected_counts:
        raise Mismatch(f"counts {counts}, expected {expected_counts}")


def _tokens_per_node(mask: torch.Tensor, num_nodes: int) -> torch.Tensor | None:
    if num_nodes == 1:
        return None
    return mask.unflatten(1, (num_nodes, -1)).any(2).sum(0, dtype=torch.int32)


def _source_idx(handle: tuple) -> torch.Tensor:
    """The source index of each row: an item of its own, or, across nodes, beside the source rank."""
    return (
        handle[3]
        if len(handle) == 6
        else handle[7].view(torch.int32)[:, 1].clone(memory_format=torch.contiguous_format)
    )


def _first(tensor: torch.Tensor | None, num_rows: int) -> torch.Tensor | None:
    return None if tensor is None else tensor[:num_rows]


def cached_dispatch(state: State) -> None:
    """A dispatch along the routes of an earlier one."""
    known = state.draw.choice(state.known)
    xs, scales = state.inputs.payload([mask.size(0) for mask in known.masks])
    expected = reference.dispatch(xs, known.masks, scales=scales)[state.rank]
    x = state.sent(xs[state.rank])
    sent = (x, state.sent(scales[state.rank])) if scales is not None else x
    # A handle is all there is: clones of its tensors do as well, once the dispatch has filled them.
    is_cloned = state.draw.random() < 0.5 and not state.has_pending
    handle = tuple(item.clone() for item in known.handle) if is_cloned else known.handle
    recv, *nothing, event = state.buffer.dispatch(sent, handle=handle, **state.stream_arguments())
    recv_x, recv_scales = recv if isinstance(recv, tuple) else (recv, None)

    def check() -> None:
        if nothing != [None] * 4:
            raise Mismatch(f"a cached dispatch returned {nothing}")
        num_rows = expected.recv_x.size(0)
        same("recv_x", recv_x[:num_rows], expected.recv_x)
        same("recv_scales", _first(recv_scales, num_rows), expected.recv_scales)
        scribble(x)

    state.made("cached dispatch", event, check, recv_x)


def combine(state: State) -> None:
    """A combine of rows that lie in the window or elsewhere, with and without weights and biases."""
    inputs, draw, rank = state.inputs, state.draw, state.rank
    known = draw.choice(state.known)
    source = draw.choice(("received", "combine buffer", "elsewhere"))
    dtype, hidden = draw.choice(SUMMABLE), inputs.hidden()
    in_place = source == "received" and known.recv_x is not None and known.rows[0].dtype in SUMMABLE
    in_place = in_place and not state.has_pending  # a check that is still to come would find the rows overwritten
    counts = [one.size(0) for one in known.rows]
    ys = known.rows if in_place else inputs.rows(counts, hidden, dtype)
    x = known.recv_x if in_place else _combine_input(state, known, ys[rank], source)
    assert x is not None
    num_topk = draw.randint(1, 4) if draw.random() < 0.4 else 0
    weights = inputs.row_weights(counts, num_topk) if num_topk else None
    biases = inputs.biases([mask.size(0) for mask in known.masks], x.size(1), x.dtype)
    size = inputs.num_ranks // state.num_nodes
    expected = reference.combine(ys, known.masks, biases=biases, topk_weights=weights, ranks_per_node=size)[rank]
    out, out_weights, event = state.buffer.combine(
        x,
        known.handle,
        topk_weights=state.sent(padded(weights[rank], x.size(0))) if weights is not None else None,
        bias=state.sent_biases(biases[rank]) if biases is not None else None,
        **state.stream_arguments(),
    )
    if in_place:
        known.recv_x = None  # it is overwritten below

    def check() -> None:
        same("combined_x", out, expected.combined_x)
        same("combined_topk_weights", out_weights, expected.combined_topk_weights)
        scribble(x)

    state.made(f"combine ({'received' if in_place else source})", event, check, out)


def _combine_input(state: State, known: Dispatched, y: torch.Tensor, source: str) -> torch.Tensor:
    num_rows = known.num_rows[state.rank]
    if source != "combine buffer":
        return state.sent(padded(y, num_rows))
    x = state.buffer.get_combine_buffer(known.handle, hidden=y.size(1), dtype=y.dtype)
    x[: y.size(0)] = state.sent(y)
    return x
