"""Dispatch and combine as custom operators, for `torch.compile`.

Shape letters: T tokens of this rank, n rows of the worst case, H hidden size, E experts, K selections of a token, R
ranks.

A compiler wants shapes, no Python objects and no side effects. So the number of rows is the caller's; a buffer is its
number, looked up when the operator runs; and the handle travels through the graph as the four tensors of it that say
something. `dispatch` and `combine` are collective, as are their gradients, `sum_back` and `send_back`; all finish
before what follows, and give new memory. `add_rows` puts the experts' results into the window. The rules of `ops.py`
hold, except that nothing makes results require gradients where no input does: tokens or weights must, on all ranks
alike, as those of a gate do.

All ranks must make every exchange, in one order, and a compiler sees only its own rank. Where that rank has no tokens
it finds results of no elements, which nothing reads: the exchange looks dead, and the next layer's looks independent of
it. So the four are registered as effects: a compiler drops none, whatever becomes of its result, and keeps the order in
which the program makes them, side by side or in a row, in the backward pass as well.

What a compiler computes again it chooses by size, and so not alike on all ranks: never an exchange, therefore. Under
activation checkpointing that takes `context_fn=keep_exchanges`; torch fails to compile an effect that it is to repeat.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._guards import TracingContext
from torch._library.effects import EffectType
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from ..buffers import registry
from ..buffers.legacy import Buffer
from ..errors import EPUnsupported
from ..handle import Handle
from .exchange import Order, Plan, add_into_window, send, send_again, sum_back

NAMESPACE = "deep_ep_moe"
_ROUTES = "Tensor rank_prefix_matrix, Tensor recv_src_idx, Tensor is_token_in_rank, Tensor send_head"
_NOW = Order()


def dispatch(
    buffer: Buffer,
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    num_worst_tokens: int,
    is_fp8: bool,
) -> tuple[Any, ...]:
    """The fields of `ops.Received`, inside a graph that is being compiled."""
    if not num_worst_tokens:
        raise EPUnsupported(
            "moe.dispatch: under torch.compile the number of rows must be known. Pass `num_worst_tokens`; "
            "the tokens of all ranks always suffice"
        )
    recv_x, recv_idx, recv_weights, tie, *routes = torch.ops.deep_ep_moe.dispatch(
        x, topk_weights, topk_idx, buffer.number, num_experts, num_worst_tokens, is_fp8
    )
    return recv_x, recv_idx, recv_weights, [], _handle(*routes), tie


def combine(
    buffer: Buffer, y: torch.Tensor, tie: torch.Tensor, handle: tuple[torch.Tensor, ...], is_fp8: bool
) -> torch.Tensor:
    """[n, H] to [T, H], inside a graph that is being compiled."""
    return torch.ops.deep_ep_moe.combine(tie, y, *_routes(handle), buffer.number, is_fp8)


def add_rows(
    buffer: Buffer, values: torch.Tensor, rows: torch.Tensor, handle: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> torch.Tensor:
    """[m, H] to [n, H] in the window, inside a graph that is being compiled."""
    return torch.ops.deep_ep_moe.add_rows(values, rows, *_routes(handle), buffer.number, dtype)


def keep_exchanges() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=keep_exchanges)` in a compiled graph.

    What dispatch and combine brought is kept for the backward pass, and everything else is computed again. Outside of a
    compiler it makes no difference: the exchanges are made again, too, on all ranks alike.
    """
    if TracingContext.try_get() is None:
        return contextlib.nullcontext(), contextlib.nullcontext()
    exchanges = torch.ops.deep_ep_moe
    return create_selective_checkpoint_contexts([exchanges.dispatch.default, exchanges.combine.default])


def _handle(
    rank_prefix_matrix: torch.Tensor,
    recv_src_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    send_head: torch.Tensor,
) -> tuple[torch.Tensor, ...]:
    """A handle of one node. Its two items about channels say nothing here: they are zeros of any width."""
    no_channels = rank_prefix_matrix.new_zeros(rank_prefix_matrix.size(0), 1)
    return (rank_prefix_matrix, no_channels, no_channels, recv_src_idx, is_token_in_rank, send_head)


def _routes(handle: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """The items of a handle that say something."""
    rank_prefix_matrix, _, _, recv_src_idx, is_token_in_rank, send_head = handle
    return rank_prefix_matrix, recv_src_idx, is_token_in_rank, send_head


# Dispatch ------------------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    f"{NAMESPACE}::dispatch",
    mutates_args=(),
    schema="(Tensor x, Tensor topk_weights, Tensor topk_idx, int buffer, int num_experts, int num_worst_tokens, "
    "bool is_fp8) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _dispatch(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_idx: torch.Tensor,
    buffer: int,
    num_experts: int,
    num_worst_tokens: int,
    is_fp8: bool,
) -> tuple[torch.Tensor, ...]:
    """Rows [n, H], local ids [n, K], weights [n, K], the tie [0], and the routes."""
    plan = Plan(num_experts, num_worst_tokens, is_fp8)
    sent = send(registry.find(buffer), x, topk_weights, topk_idx, plan, _NOW)
    if len(sent.handle) != len(Handle._fields):
        raise EPUnsupported(
            "moe.dispatch: under torch.compile, all ranks must be on one node: across nodes a handle's shape is known "
            "only when tokens have travelled. Leave the layer out of the compiled graph"
        )
    rows, weights = sent.land()
    return rows, sent.topk_idx, weights, x.new_empty(0), *_routes(sent.handle)


@_dispatch.register_fake
def _(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_idx: torch.Tensor,
    buffer: int,
    num_experts: int,
    num_worst_tokens: int,
    is_fp8: bool,
) -> tuple[torch.Tensor, ...]:
    del num_experts, is_fp8
    num_ranks, (num_tokens, num_topk), num_rows = registry.find(buffer).group_size, topk_idx.shape, num_worst_tokens
    return (
        x.new_empty(num_rows, x.size(1)),
        topk_idx.new_empty(num_rows, num_topk),
        topk_weights.new_empty(num_rows, num_topk),
        x.new_empty(0),
        x.new_empty(num_ranks, num_ranks, dtype=torch.int32),
        x.new_empty(num_rows, dtype=torch.int32),
        x.new_empty(num_tokens, num_ranks, dtype=torch.bool),
        x.new_empty(num_tokens, num_ranks, dtype=torch.int32),
    )


@torch.library.custom_op(
    f"{NAMESPACE}::sum_back",
    mutates_args=(),
    schema=f"(Tensor grad_x, Tensor grad_weights, Tensor topk_idx, {_ROUTES}, int buffer) -> (Tensor, Tensor)",
)
def _sum_back(
    grad_x: torch.Tensor,
    grad_weights: torch.Tensor,
    topk_idx: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    recv_src_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    send_head: torch.Tensor,
    buffer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of received rows [n, H] and weights [n, K] to those of tokens [T, H] and weights [T, K]."""
    handle = _handle(rank_prefix_matrix, recv_src_idx, is_token_in_rank, send_head)
    sums = sum_back(registry.find(buffer), grad_x, grad_weights, handle, topk_idx, _NOW)
    if grad_weights.dtype == torch.float64:  # two views of one tensor, and results may not share memory
        return sums.x.contiguous(), sums.topk_weights.contiguous()
    return sums.x, sums.topk_weights


@_sum_back.register_fake
def _(
    grad_x: torch.Tensor,
    grad_weights: torch.Tensor,
    topk_idx: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    recv_src_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    send_head: torch.Tensor,
    buffer: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    del topk_idx, rank_prefix_matrix, recv_src_idx, is_token_in_rank, buffer
    num_tokens = send_head.size(0)
    return grad_x.new_empty(num_tokens, grad_x.size(1)), grad_weights.new_empty(num_tokens, grad_weights.size(1))


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, ...]) -> None:
    _, recv_idx, _, _, *routes = output
    ctx.buffer = inputs[3]
    ctx.save_for_backward(recv_idx, *routes)
    ctx.mark_non_differentiable(recv_idx, *routes)


def _dispatch_backward(ctx: Any, grad_x: torch.Tensor, _idx: Any, grad_weights: torch.Tensor, *_rest: Any) -> tuple:
    grads = torch.ops.deep_ep_moe.sum_back(grad_x.contiguous(), grad_weights, *ctx.saved_tensors, ctx.buffer)
    return *grads, None, None, None, None, None


_dispatch.register_autograd(_dispatch_backward, setup_context=_keep_dispatch)


# Combine -------------------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    f"{NAMESPACE}::combine",
    mutates_args=(),
    schema=f"(Tensor tie, Tensor y, {_ROUTES}, int buffer, bool is_fp8) -> Tensor",
)
def _combine(
    tie: torch.Tensor,
    y: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    recv_src_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    send_head: torch.Tensor,
    buffer: int,
    is_fp8: bool,
) -> torch.Tensor:
    """Rows [n, H] to sums [T, H]."""
    del tie, is_fp8  # for the backward pass
    handle = _handle(rank_prefix_matrix, recv_src_idx, is_token_in_rank, send_head)
    return registry.find(buffer).combine(y.contiguous(), handle)[0]


@_combine.register_fake
def _(
    tie: torch.Tensor,
    y: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    recv_src_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    send_head: torch.Tensor,
    buffer: int,
    is_fp8: bool,
) -> torch.Tensor:
    del tie, rank_prefix_matrix, recv_src_idx, is_token_in_rank, buffer, is_fp8
    return y.new_empty(send_head.size(0), y.size(1))


@torch.library.custom_op(
    f"{NAMESPACE}::send_back",
    mutates_args=(),
    schema=f"(Tensor grad, {_ROUTES}, int buffer, bool is_fp8) -> Tensor",
)
def _send_back(
    grad: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    recv_src_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    send_head: torch.Tensor,
    buffer: int,
    is_fp8: bool,
) -> torch.Tensor:
    """Gradients of sums [T, H] to those of rows [n, H]. Rows that never came get anything."""
    handle = _handle(rank_prefix_matrix, recv_src_idx, is_token_in_rank, send_head)
    return send_again(registry.find(buffer), grad, handle, is_fp8, _NOW).unpack()[0]


@_send_back.register_fake
def _(
    grad: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    recv_src_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    send_head: torch.Tensor,
    buffer: int,
    is_fp8: bool,
) -> torch.Tensor:
    del rank_prefix_matrix, is_token_in_rank, send_head, buffer, is_fp8
    return grad.new_empty(recv_src_idx.size(0), grad.size(1))


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    tie, _, *routes, ctx.buffer, ctx.is_fp8 = inputs
    ctx.save_for_backward(tie, *routes)


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    tie, *routes = ctx.saved_tensors
    grad_y = torch.ops.deep_ep_moe.send_back(grad.contiguous(), *routes, ctx.buffer, ctx.is_fp8)
    return torch.zeros_like(tie), grad_y, None, None, None, None, None, None


_combine.register_autograd(_combine_backward, setup_context=_keep_combine)


for _exchange in (_dispatch, _sum_back, _combine, _send_back):
    _exchange.register_effect(EffectType.ORDERED)


# Into the window -----------------------------------------------------------------------------------------------------


@torch.library.custom_op(
    f"{NAMESPACE}::add_rows",
    mutates_args=(),
    schema=f"(Tensor values, Tensor rows, {_ROUTES}, int buffer, ScalarType dtype) -> Tensor",
)
def _add_rows(
    values: torch.Tensor,
    rows: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    recv_src_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    send_head: torch.Tensor,
    buffer: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Values [m, H] added up by row [m]. An operator, so that a compiler does not find other memory for the sums."""
    handle = _handle(rank_prefix_matrix, recv_src_idx, is_token_in_rank, send_head)
    return add_into_window(registry.find(buffer), values, rows, handle, dtype)


@_add_rows.register_fake
def _(
    values: torch.Tensor,
    rows: torch.Tensor,
    rank_prefix_matrix: torch.Tensor,
    recv_src_idx: torch.Tensor,
    is_token_in_rank: torch.Tensor,
    send_head: torch.Tensor,
    buffer: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    del rows, rank_prefix_matrix, is_token_in_rank, send_head, buffer
    return values.new_empty(recv_src_idx.size(0), values.size(1), dtype=dtype)


def _keep_add_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    ctx.dtype = inputs[0].dtype
    ctx.save_for_backward(inputs[1])


def _add_rows_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    (rows,) = ctx.saved_tensors
    return grad.to(ctx.dtype).index_select(0, rows), None, None, None, None, None, None, None


_add_rows.register_autograd(_add_rows_backward, setup_context=_keep_add_rows)
