"""The calls behind dispatch, combine and their gradients, without autograd: launch one, and take what it brought.

Shape letters: T tokens of this rank, n rows that it received (or the worst case), H hidden size, E experts, K
selections of a token, R ranks, S = ceil(H / 128) scales of a row.

What is dispatched, tokens or gradients, may travel as FP8 with a scale for each 128 channels. It is cast here and cast
back on arrival; sums travel as they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..buffers.calling import preparing
from ..buffers.legacy import Buffer
from ..event import EventHandle, EventOverlap
from ..quant import per_token_cast_back, per_token_cast_to_fp8

Function = TypeVar("Function", bound=Callable[..., Any])

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


def opaque(function: Function) -> Function:
    """The same function, whose operators no dispatch mode sees.

    Selective activation checkpointing keeps or repeats single operators. Those of an exchange are not for it to choose:
    they write into memory that is shared with other ranks, and all ranks must make them or none. They are repeated
    together, as without a policy.
    """

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch._C._len_torch_dispatch_stack():  # as a rule: then it costs nothing
            return function(*args, **kwargs)
        with _disable_current_modes():
            return function(*args, **kwargs)

    return call  # type: ignore[return-value]


class Order(NamedTuple):
    """How a call stands to the caller's stream.

    Attributes:
        previous_event: What it waits for; None: everything that the caller has issued.
        is_async: The caller does not wait for it.
    """

    previous_event: EventOverlap | EventHandle | None = None
    is_async: bool = False

    def arguments(self) -> dict[str, Any]:
        """As the buffer's methods take them."""
        previous = self.previous_event
        if self.is_async and previous is None:
            previous = Buffer.capture()
        return {
            "previous_event": previous,
            "async_finish": self.is_async,
            "allocate_on_comm_stream": self.is_async,
        }

    def now(self) -> Order:
        """The same for inputs that are made right now, on the caller's stream, which waits instead of the call."""
        if self.previous_event is not None:
            self.previous_event.current_stream_wait()
        return Order(None, self.is_async)


@dataclass(frozen=True)
class Plan:
    """What a dispatch is, beside its tensors.

    Attributes:
        num_experts: E.
        num_worst_tokens: Rows to make room for, without waiting for counts; 0: as many as come.
        is_fp8: Whether rows travel as FP8.
    """

    num_experts: int
    num_worst_tokens: int = 0
    is_fp8: bool = False


class Rows(NamedTuple):
    """Rows on their way.

    Attributes:
        payload: [n, H], or FP8 with scales [n, S], or FP64 with weights [n, K] float64 beside them.
        is_fp8: Whether it is the second.
        dtype: Of the rows, once they are there.
        event: When they are.
    """

    payload: Any
    is_fp8: bool
    dtype: torch.dtype
    event: EventOverlap

    def unpack(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """[n, H], and what travelled beside them. They must be there."""
        if not isinstance(self.payload, tuple):
            return self.payload, None
        x, beside = self.payload
        return (per_token_cast_back(x, beside, self.dtype), None) if self.is_fp8 else (x, beside)


class Sent(NamedTuple):
    """A dispatch on its way.

    Attributes:
        rows: Its rows.
        topk_idx: [n, K], local ids.
        topk_weights: [n, K] float32.
        num_tokens_per_expert: Rows of each local expert; empty in the worst case.
        handle: The routes.
    """

    rows: Rows
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens_per_expert: list[int]
    handle: tuple[torch.Tensor, ...]

    def land(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The rows [n, H] and their weights [n, K], float32 or float64. They must be there."""
        x, wide = self.rows.unpack()
        # Wide weights came as scales, of which the buffer clears none: those of other ranks' experts must become 0.
        return x, self.topk_weights if wide is None else wide.masked_fill(self.topk_idx < 0, 0.0)


def is_wide(x: torch.Tensor, topk_weights: torch.Tensor, is_fp8: bool) -> bool:
    """Whether weights travel as FP64: beside rows of FP64."""
    return not is_fp8 and x.dtype == topk_weights.dtype == torch.float64


def send(
    buffer: Buffer, x: torch.Tensor, weights: torch.Tensor, topk_idx: torch.Tensor, plan: Plan, order: Order
) -> Sent:
    """Dispatch tokens: the layout, and then the rows.

    Args:
        buffer: The buffer.
        x: [T, H].
        weights: [T, K] float32, or float64 where `is_wide` says so.
        topk_idx: [T, K] int32 or int64.
        plan: How.
        order: When.
    """
    is_made_here = plan.is_fp8 or weights.dtype != torch.float32
    if is_made_here or not all(part.is_contiguous() for part in (x, weights, topk_idx)):
        # What is made here is made on the caller's stream, which must wait for the event instead of the call.
        order = order.now()
    with preparing(buffer, "dispatch"):
        payload: Any = _cast(x, plan.is_fp8)
        if weights.dtype == torch.float64:
            payload = (payload, weights)  # the buffer's weights are float32; beside the rows any dtype may travel
        topk_idx, narrow = topk_idx.contiguous(), weights.float().contiguous()
        layout = buffer.get_dispatch_layout(topk_idx, plan.num_experts, **order.arguments())
    per_rank, per_node, per_expert, mask, event = layout
    recv_x, recv_idx, recv_weights, counts, handle, event = buffer.dispatch(
        payload,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=mask,
        num_tokens_per_expert=per_expert,
        topk_idx=topk_idx,
        topk_weights=narrow,
        num_worst_tokens=plan.num_worst_tokens,
        **(Order(event, True) if order.is_async else order).arguments(),
    )
    assert recv_idx is not None
    assert recv_weights is not None
    assert counts is not None
    assert handle is not None
    return Sent(Rows(recv_x, plan.is_fp8, x.dtype, event), recv_idx, recv_weights, counts, handle)


def send_again(buffer: Buffer, x: torch.Tensor, handle: tuple, is_fp8: bool, order: Order) -> Rows:
    """Dispatch [T, H] along the routes of an earlier dispatch."""
    recv_x, *_, event = buffer.dispatch(_cast(x, is_fp8), handle=handle, **order.arguments())
    return Rows(recv_x, is_fp8, x.dtype, event)


class Sums(NamedTuple):
    """Gradients of tokens on their way.

    Attributes:
        x: [T, H].
        topk_weights: [T, K] float32 or float64.
        event: When they are there.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor
    event: EventOverlap


def sum_back(
    buffer: Buffer,
    grad_x: torch.Tensor,
    grad_weights: torch.Tensor,
    handle: tuple,
    topk_idx: torch.Tensor,
    order: Order,
) -> Sums:
    """Sum the gradients of received rows and weights to those of the tokens.

    Args:
        buffer: The buffer.
        grad_x: [n, H].
        grad_weights: [n, K] float32 or float64.
        handle: Of the dispatch.
        topk_idx: [n, K], the local ids that it brought.
        order: When.
    """
    # A weight whose expert is elsewhere was received as a constant 0; its gradient must not be summed with the one
    # that the expert's rank found.
    grad_weights = grad_weights.masked_fill(topk_idx < 0, 0.0)
    if grad_weights.dtype == torch.float64:  # as columns of the rows, since combine sums weights in float32
        both, _, event = buffer.combine(torch.cat([grad_x, grad_weights], dim=1), handle, **order.arguments())
        return Sums(both[:, : grad_x.size(1)], both[:, grad_x.size(1) :], event)
    combined, weights, event = buffer.combine(
        grad_x.contiguous(), handle, topk_weights=grad_weights, **order.arguments()
    )
    assert weights is not None
    return Sums(combined, weights, event)


@opaque
def add_into_window(
    buffer: Buffer, values: torch.Tensor, rows: torch.Tensor, handle: tuple[torch.Tensor, ...], dtype: torch.dtype
) -> torch.Tensor:
    """Add up the experts' results by the row that they belong to, where combine needs no copy of them.

    Args:
        buffer: The buffer.
        values: [m, H] float.
        rows: [m] int64, in 0..n-1.
        handle: Of the dispatch.
        dtype: Of the sums. If it is not that of the values, they are added up before they are cast.

    Returns:
        [n, H], in the window.
    """
    memory = buffer.get_combine_buffer(handle, values.size(1), dtype)
    if values.dtype == dtype:
        return memory.zero_().index_add_(0, rows, values)
    return memory.copy_(values.new_zeros(memory.shape).index_add_(0, rows, values))


def _cast(x: torch.Tensor, is_fp8: bool) -> Any:
    return per_token_cast_to_fp8(x) if is_fp8 else x.contiguous()
