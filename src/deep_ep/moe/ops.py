"""Dispatch and combine with gradients.

Shape letters: T tokens of this rank, n rows that it received, H hidden size, E experts, K selections of a token.

Each is the other's backward: the gradient of a token that was sent to several ranks is the sum of the rows' gradients,
which is a combine; the gradient of a row that was summed into a token is the token's, which is a dispatch along the
same routes. So backward passes communicate, and all ranks must make them:

- Whatever a rank's tokens and rows are, none included, its results require gradients whenever gradients are enabled.
- `combine` takes what `dispatch` returned, and with it an edge of the graph (`tie`): where the backward of a combine
  runs, that of its dispatch follows, also on a rank whose experts never touched the received rows.
- The result of `combine` must reach the loss on all ranks, or on none. A sum over no tokens does.
- Graphs of the same shape are walked in the same order on all ranks, so any number of buffers and layers will do.

Routes are kept in the graph. Activation checkpointing (`use_reentrant=False`) makes the dispatch again, on all ranks at
the same place; the combine only where something behind it needs its result.

Not here yet: custom operators for `torch.compile`, FP8 payloads, gradients of gradients.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..buffers.legacy import Buffer
from ..event import EventHandle, EventOverlap

_DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


class Received(NamedTuple):
    """What `dispatch` brings. With `async_finish`, wait for `event` before looking into the first three.

    Attributes:
        x: [n, H] of the tokens' dtype, in the window; ordered by source rank and then by token.
        topk_idx: [n, K] of the ids' dtype, local ids, -1 where the expert is elsewhere.
        topk_weights: [n, K] float32, or float64 where x and the weights are; 0 where the expert is elsewhere.
        num_tokens_per_expert: Rows of each local expert.
        handle: The routes, as `Buffer.dispatch` returns them.
        event: When the rows are there.
        tie: [0], the edge from `combine` back to its dispatch.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens_per_expert: list[int]
    handle: tuple[torch.Tensor, ...]
    event: EventOverlap
    tie: torch.Tensor


class _Order(NamedTuple):
    """How a forward call stands to the caller's stream."""

    previous_event: EventOverlap | EventHandle | None
    async_finish: bool

    def arguments(self) -> dict[str, Any]:
        on_comm_stream = self.async_finish and self.previous_event is not None
        return {**self._asdict(), "allocate_on_comm_stream": on_comm_stream}


def dispatch(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    *,
    previous_event: EventOverlap | EventHandle | None = None,
    async_finish: bool = False,
) -> Received:
    """Send each token to the ranks that own its experts. All ranks of the buffer call it together.

    Backward: the rows' gradients are summed per token, and each weight gets its gradient from its expert's rank.

    Args:
        buffer: The buffer.
        x: [T, H] BF16, FP16, FP32 or FP64.
        topk_idx: [T, K] int32 or int64; -1 selects nothing.
        topk_weights: [T, K] float. They travel as float32; as float64 where x is float64 too.
        num_experts: E, of all ranks.
        previous_event: Wait for it first.
        async_finish: Return before the rows are there. FP64 weights are waited for all the same.
    """
    if x.dtype not in _DTYPES:
        raise TypeError(f"moe.dispatch: `x` must be BF16, FP16, FP32 or FP64, it is {x.dtype}")
    is_wide = x.dtype == topk_weights.dtype == torch.float64
    weights = topk_weights.to(torch.float64 if is_wide else torch.float32)
    # Something that requires gradients among the inputs makes the outputs do so, on all ranks alike.
    anchor = x.new_empty(0).requires_grad_(torch.is_grad_enabled())
    order = _Order(previous_event, async_finish)
    return Received(*_Dispatch.apply(anchor, x, weights, topk_idx, num_experts, buffer, order))


def combine(
    buffer: Buffer,
    y: torch.Tensor,
    received: Received,
    *,
    previous_event: EventOverlap | EventHandle | None = None,
    async_finish: bool = False,
) -> tuple[torch.Tensor, EventOverlap]:
    """Bring the experts' rows back and sum them per token. All ranks of the buffer call it together.

    Backward: each row gets the gradient of its token.

    Args:
        buffer: The buffer of the dispatch.
        y: [n, H], weighted: row i belongs to `received.x[i]`. No copy is made of it where it lies in the window, as
            `buffer.get_combine_buffer(received.handle)` does.
        received: What `dispatch` returned.
        previous_event: Wait for it first.
        async_finish: Return before the sums are there.

    Returns:
        [T, H], and the event to wait for if `async_finish`.
    """
    return _Combine.apply(received.tie, y, received.handle, buffer, _Order(previous_event, async_finish))


class _Dispatch(torch.autograd.Function):
    """See `dispatch`."""

    @staticmethod
    def forward(
        ctx: Any,
        _anchor: torch.Tensor,
        x: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_idx: torch.Tensor,
        num_experts: int,
        buffer: Buffer,
        order: _Order,
    ) -> tuple[Any, ...]:
        ctx.buffer = buffer
        received = _send(buffer, x.detach(), topk_weights.detach(), topk_idx, num_experts, order)
        ctx.mark_non_differentiable(received.topk_idx)
        # As saved tensors: recomputation under checkpointing stops at the last of them, and must get as far as this
        # on a rank whose experts save nothing.
        ctx.save_for_backward(*map(_alias, (*received.handle, received.topk_idx)))
        return tuple(received)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: torch.Tensor, _idx: Any, grad_weights: torch.Tensor, *_rest: Any) -> tuple[Any, ...]:
        *handle, topk_idx = ctx.saved_tensors
        # A weight whose expert is elsewhere was received as a constant 0; its gradient must not be summed with the
        # one that the expert's rank found.
        grad_weights = grad_weights.masked_fill(topk_idx < 0, 0.0)
        grads = _sum_back(ctx.buffer, grad_x, grad_weights, tuple(handle))
        return None, *grads, None, None, None, None


class _Combine(torch.autograd.Function):
    """See `combine`."""

    @staticmethod
    def forward(
        ctx: Any, tie: torch.Tensor, y: torch.Tensor, handle: tuple, buffer: Buffer, order: _Order
    ) -> tuple[torch.Tensor, EventOverlap]:
        # Not as saved tensors: recomputation would go through this communication only to make the routes again.
        ctx.buffer, ctx.handle, ctx.tie_like = buffer, handle, (tie.dtype, tie.device)
        combined, _, event = buffer.combine(y.detach().contiguous(), handle, **order.arguments())
        return _alias(combined), event

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor, _event: None) -> tuple[Any, ...]:
        grad_y, *_ = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)
        dtype, device = ctx.tie_like
        return torch.zeros(0, dtype=dtype, device=device), grad_y, None, None, None


def _send(
    buffer: Buffer,
    x: torch.Tensor,
    weights: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    order: _Order,
) -> Received:
    """The two calls of a dispatch."""
    topk_idx = topk_idx.contiguous()
    per_rank, per_node, per_expert, mask, event = buffer.get_dispatch_layout(topk_idx, num_experts, **order.arguments())
    is_wide = weights.dtype == torch.float64
    recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
        # The buffer's weights are float32. Wider ones go beside the rows, as scales of any dtype may.
        (x.contiguous(), weights) if is_wide else x.contiguous(),
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=mask,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=weights.float().contiguous(),
        **_Order(event if order.async_finish else order.previous_event, order.async_finish).arguments(),
    )
    assert recv_idx is not None
    assert recv_weights is not None
    assert counts is not None
    assert handle is not None
    if isinstance(recv_x, tuple):
        if order.async_finish:
            event.current_stream_wait()
        recv_x, recv_weights = recv_x
        recv_weights = recv_weights.masked_fill(recv_idx < 0, 0.0)
    rows = (_alias(recv_x), _alias(recv_idx), _alias(recv_weights))
    return Received(*rows, counts, handle, event, x.new_empty(0))


def _sum_back(
    buffer: Buffer, grad_x: torch.Tensor, grad_weights: torch.Tensor, handle: tuple
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients of received rows [n, H] and weights [n, K], summed to those of tokens [T, H] and weights [T, K]."""
    if grad_weights.dtype == torch.float64:  # as columns of the rows, since combine sums weights in float32
        combined, _, _ = buffer.combine(torch.cat([grad_x, grad_weights], dim=1), handle)
        return combined[:, : grad_x.size(1)], combined[:, grad_x.size(1) :]
    combined, weights, _ = buffer.combine(grad_x.contiguous(), handle, topk_weights=grad_weights)
    assert weights is not None
    return combined, weights


def _alias(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory as a tensor that autograd may own.

    After an asynchronous call the comm stream still fills the tensor that the buffer returned. On the CPU it does so
    with torch operations: these must meet no tensor that requires gradients, nor count as changes of a saved one,
    which `detach` would let them.
    """
    return tensor.data
