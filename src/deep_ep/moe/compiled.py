"""Dispatch and combine as custom operators, for `torch.compile`.

Shape letters: T tokens of this rank, n rows of the worst case, H hidden size, E experts, K selections of a token, R
ranks, N nodes of P ranks, C channels.

A compiler wants shapes, no Python objects and no side effects. So the number of rows is the caller's; a buffer is its
number, looked up when the operator runs; and the handle travels through the graph as a list of tensors, its `routes`.
Across nodes one of them has as many rows as this rank relays tokens, a size that the compiler knows by name only.
`dispatch` and `combine` are collective, as are their gradients, `sum_back` and `send_back`; all finish before what
follows, and give new memory. `add_rows` puts the experts' results into the window. The rules of `ops.py` hold, except
that nothing makes results require gradients where no input does: tokens or weights must, on all ranks alike, as those
of a gate do.

All ranks must make every exchange, in one order, and a compiler sees only its own rank. Where that rank has no tokens
it finds results of no elements, which nothing reads: the exchange looks dead, and the next layer's looks independent of
it. So the four are registered as effects: a compiler drops none, whatever becomes of its result, and keeps the order in
which the program makes them, side by side or in a row, in the backward pass as well.

What a compiler computes again it chooses by size, and so not alike on all ranks: never an exchange, therefore, under
activation checkpointing neither. Nor could torch repeat one: it fails to compile an effect that it is to repeat.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch._guards import TracingContext
from torch._higher_order_ops.effects import with_effects
from torch._library.effects import EffectType
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from ..buffers import registry
from ..buffers.legacy import Buffer
from ..handle import Handle, RailHandle
from .exchange import Order, Plan, add_into_window, send, send_again, sum_back

NAMESPACE = "deep_ep_moe"
_NOW = Order()
_Tensors = list[torch.Tensor]


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
    recv_x, recv_idx, recv_weights, tie, *routes = torch.ops.deep_ep_moe.dispatch(
        x, topk_weights, topk_idx, buffer.number, num_experts, num_worst_tokens, is_fp8
    )
    return recv_x, recv_idx, recv_weights, [], _unpack(routes), tie


def combine(
    buffer: Buffer, y: torch.Tensor, tie: torch.Tensor, handle: tuple[torch.Tensor, ...], is_fp8: bool
) -> torch.Tensor:
    """[n, H] to [T, H], inside a graph that is being compiled."""
    return torch.ops.deep_ep_moe.combine(tie, y, _pack(handle), buffer.number, is_fp8)


def add_rows(
    buffer: Buffer, values: torch.Tensor, rows: torch.Tensor, handle: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> torch.Tensor:
    """[m, H] to [n, H] in the window, inside a graph that is being compiled."""
    return torch.ops.deep_ep_moe.add_rows(values, rows, _pack(handle), buffer.number, dtype)


def keep_exchanges() -> tuple[contextlib.AbstractContextManager, contextlib.AbstractContextManager]:
    """For `torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=keep_exchanges)` in a compiled graph.

    What dispatch and combine brought is kept for the backward pass, and everything else is computed again: as it is in
    a compiled graph without `context_fn`, too. Outside of a compiler it makes no difference: the exchanges are made
    again, on all ranks alike.
    """
    if TracingContext.try_get() is None:
        return contextlib.nullcontext(), contextlib.nullcontext()
    exchanges = torch.ops.deep_ep_moe
    return create_selective_checkpoint_contexts([exchanges.dispatch.default, exchanges.combine.default])


def _operator(schema: str, fake: Callable[..., Any], is_exchange: bool = True) -> Callable[[Any], Any]:
    """A decorator that makes an operator of a function, by its name.

    Args:
        schema: Its arguments and results.
        fake: Given the arguments without their values, results of the right shapes.
        is_exchange: Whether other ranks make it too, so that a compiler must keep it and its order.
    """

    def register(function: Any) -> Any:
        name = f"{NAMESPACE}::{function.__name__.strip('_')}"
        operator = torch.library.custom_op(name, function, mutates_args=(), schema=schema)
        operator.register_fake(fake)
        if is_exchange:
            operator.register_effect(EffectType.ORDERED)
        return operator

    return register


def _keep_results() -> None:
    """Have the graph that is being traced keep what its exchanges brought, whatever a checkpoint wants repeated.

    Called where gradients are traced: the forward pass is in the graph by then, with the tags of its checkpoints, and
    what the backward pass gets has not been chosen.
    """
    mode = get_proxy_mode()
    if mode is None:
        return
    for node in mode.tracer.graph.nodes:
        if node.target is with_effects and node.args[1].namespace == NAMESPACE:
            for result in (node, *node.users):  # the list of results, and each of them
                if "recompute" in result.meta:
                    result.meta["recompute"] = CheckpointPolicy.MUST_SAVE


# Items of a handle that say nothing: they are zeros of any width, and do not travel through the graph.
_SILENT = {
    "channel_prefix_matrix",
    "recv_channel_prefix_matrix",
    "gbl_channel_prefix_matrix",
    "recv_gbl_channel_prefix_matrix",
}
_KINDS = (Handle, RailHandle)  # of one node, of several


def _telling(kind: type[Handle | RailHandle]) -> list[str]:
    """The names of the items of a handle that travel through the graph."""
    return [name for name in kind._fields if name not in _SILENT]


def _pack(handle: tuple[torch.Tensor, ...]) -> _Tensors:
    """The items of a handle that travel through the graph."""
    kind = next(kind for kind in _KINDS if len(kind._fields) == len(handle))
    return [item for name, item in zip(kind._fields, handle, strict=True) if name not in _SILENT]


def _unpack(routes: _Tensors) -> Handle | RailHandle:
    """The handle that these are the items of, as `_pack` returns them."""
    kind: Any = next(kind for kind in _KINDS if len(_telling(kind)) == len(routes))
    items = dict(zip(_telling(kind), routes, strict=True))
    nothing = routes[0].new_zeros(items["is_token_in_rank"].size(1), 1, dtype=torch.int32)
    return kind(**{name: items.get(name, nothing) for name in kind._fields})


def _fake_routes(buffer: Buffer, num_tokens: int, num_rows: int, like: torch.Tensor) -> _Tensors:
    """Tensors of the shapes that `_pack` finds in the handle of a dispatch."""
    assert buffer.runtime is not None, "MoE operators: the buffer was destroyed"
    num_ranks, num_nodes = buffer.group_size, buffer.runtime.get_num_rdma_ranks()

    def empty(*shape: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return like.new_empty(shape, dtype=dtype)

    mask = empty(num_tokens, num_ranks, dtype=torch.bool)
    if num_nodes == 1:
        # In the order of `_telling`, as the list below.
        return [empty(num_ranks, num_ranks), empty(num_rows), mask, empty(num_tokens, num_ranks)]
    num_channels = buffer.get_dispatch_config(num_ranks).num_channels
    num_relayed = torch.library.get_ctx().new_dynamic_size()
    return [
        mask,
        empty(num_nodes, num_channels),
        empty(num_nodes, num_channels),
        empty(num_nodes),
        empty(num_ranks),
        empty(num_rows, 8, dtype=torch.uint8),
        empty(num_tokens, num_nodes),
        empty(num_relayed, num_ranks // num_nodes),
    ]


# Dispatch ------------------------------------------------------------------------------------------------------------


def _fake_dispatch(
    x: torch.Tensor, topk_weights: torch.Tensor, topk_idx: torch.Tensor, buffer: int, *plan: int
) -> _Tensors:
    (_, num_rows, _), (num_tokens, num_topk) = plan, topk_idx.shape
    rows = x.new_empty(num_rows, x.size(1)), topk_idx.new_empty(num_rows, num_topk)
    routes = _fake_routes(registry.find(buffer), num_tokens, num_rows, x)
    return [*rows, topk_weights.new_empty(num_rows, num_topk), x.new_empty(0), *routes]


@_operator(
    "(Tensor x, Tensor topk_weights, Tensor topk_idx, int buffer, int num_experts, int num_worst_tokens, bool is_fp8)"
    " -> Tensor[]",
    _fake_dispatch,
)
def _dispatch(
    x: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_idx: torch.Tensor,
    buffer: int,
    num_experts: int,
    num_worst_tokens: int,
    is_fp8: bool,
) -> _Tensors:
    """Rows [n, H], local ids [n, K], weights [n, K], the tie [0], and the routes."""
    plan = Plan(num_experts, num_worst_tokens, is_fp8)
    sent = send(registry.find(buffer), x, topk_weights, topk_idx, plan, _NOW)
    rows, weights = sent.land()
    return [rows, sent.topk_idx, weights, x.new_empty(0), *_pack(sent.handle)]


@_operator(
    "(Tensor grad_x, Tensor grad_weights, Tensor topk_idx, Tensor[] routes, int buffer) -> (Tensor, Tensor)",
    lambda grad_x, grad_weights, _idx, routes, _buffer: (
        grad_x.new_empty(_unpack(routes).num_tokens, grad_x.size(1)),
        grad_weights.new_empty(_unpack(routes).num_tokens, grad_weights.size(1)),
    ),
)
def _sum_back(
    grad_x: torch.Tensor, grad_weights: torch.Tensor, topk_idx: torch.Tensor, routes: _Tensors, buffer: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of received rows [n, H] and weights [n, K] to those of tokens [T, H] and weights [T, K]."""
    sums = sum_back(registry.find(buffer), grad_x, grad_weights, _unpack(routes), topk_idx, _NOW)
    if grad_weights.dtype == torch.float64:  # two views of one tensor, and results may not share memory, even if empty
        return sums.x.clone(memory_format=torch.contiguous_format), sums.topk_weights.contiguous()
    return sums.x, sums.topk_weights


def _keep_dispatch(ctx: Any, inputs: tuple[Any, ...], output: _Tensors) -> None:
    _, recv_idx, _, _, *routes = output
    ctx.buffer = inputs[3]
    ctx.save_for_backward(recv_idx, *routes)
    ctx.mark_non_differentiable(recv_idx, *routes)


def _dispatch_backward(ctx: Any, grads: _Tensors) -> tuple:
    _keep_results()
    grad_x, _, grad_weights, *_ = grads
    topk_idx, *routes = ctx.saved_tensors
    sums = torch.ops.deep_ep_moe.sum_back(grad_x.contiguous(), grad_weights, topk_idx, routes, ctx.buffer)
    return *sums, None, None, None, None, None


_dispatch.register_autograd(_dispatch_backward, setup_context=_keep_dispatch)


# Combine -------------------------------------------------------------------------------------------------------------


@_operator(
    "(Tensor tie, Tensor y, Tensor[] routes, int buffer, bool is_fp8) -> Tensor",
    lambda _tie, y, routes, _buffer, _is_fp8: y.new_empty(_unpack(routes).num_tokens, y.size(1)),
)
def _combine(tie: torch.Tensor, y: torch.Tensor, routes: _Tensors, buffer: int, is_fp8: bool) -> torch.Tensor:
    """Rows [n, H] to sums [T, H]."""
    del tie, is_fp8  # for the backward pass
    return registry.find(buffer).combine(y.contiguous(), _unpack(routes))[0]


@_operator(
    "(Tensor grad, Tensor[] routes, int buffer, bool is_fp8) -> Tensor",
    lambda grad, routes, _buffer, _is_fp8: grad.new_empty(_unpack(routes).num_rows, grad.size(1)),
)
def _send_back(grad: torch.Tensor, routes: _Tensors, buffer: int, is_fp8: bool) -> torch.Tensor:
    """Gradients of sums [T, H] to those of rows [n, H]. Rows that never came get anything."""
    return send_again(registry.find(buffer), grad, _unpack(routes), is_fp8, _NOW).unpack()[0]


def _keep_combine(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    tie, _, routes, ctx.buffer, ctx.is_fp8 = inputs
    ctx.save_for_backward(tie, *routes)


def _combine_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    tie, *routes = ctx.saved_tensors  # which computes a checkpoint again
    _keep_results()
    grad_y = torch.ops.deep_ep_moe.send_back(grad.contiguous(), routes, ctx.buffer, ctx.is_fp8)
    return torch.zeros_like(tie), grad_y, [None] * len(routes), None, None


_combine.register_autograd(_combine_backward, setup_context=_keep_combine)


# Into the window -----------------------------------------------------------------------------------------------------


@_operator(
    "(Tensor values, Tensor rows, Tensor[] routes, int buffer, ScalarType dtype) -> Tensor",
    lambda values, _, routes, _buffer, dtype: values.new_empty(_unpack(routes).num_rows, values.size(1), dtype=dtype),
    is_exchange=False,
)
def _add_rows(
    values: torch.Tensor, rows: torch.Tensor, routes: _Tensors, buffer: int, dtype: torch.dtype
) -> torch.Tensor:
    """Values [m, H] added up by row [m]. An operator, so that a compiler does not find other memory for the sums."""
    return add_into_window(registry.find(buffer), values, rows, _unpack(routes), dtype)


def _keep_add_rows(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    del output
    values, rows, routes, _, _ = inputs
    ctx.dtype, ctx.num_routes = values.dtype, len(routes)
    ctx.save_for_backward(rows)


def _add_rows_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    (rows,) = ctx.saved_tensors
    return grad.to(ctx.dtype).index_select(0, rows), None, [None] * ctx.num_routes, None, None


_add_rows.register_autograd(_add_rows_backward, setup_context=_keep_add_rows)
