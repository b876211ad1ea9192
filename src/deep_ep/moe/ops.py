"""Dispatch and combine with gradients.

Shape letters: T tokens of this rank, n rows that it received (or the worst case), H hidden size, E experts, K
selections of a token.

Each is the other's backward: the gradient of a token that was sent to several ranks is the sum of the rows' gradients,
which is a combine; the gradient of a row that was summed into a token is the token's, which is a dispatch along the
same routes. So backward passes communicate, and all ranks must make them:

- Whatever a rank's tokens and rows are, none included, its results require gradients whenever gradients are enabled.
- `combine` takes what `dispatch` returned, and with it an edge of the graph (`tie`): where the backward of a combine
  runs, that of its dispatch follows, also on a rank whose experts never touched the received rows.
- The result of `combine` must reach the loss on all ranks, or on none. A sum over no tokens does.
- Graphs of the same shape are walked in the same order on all ranks, so any number of buffers and layers will do.

With `async_finish` a call is two nodes of the graph, where it begins and where `wait()` is called. The backward pass
meets them the other way round: at the second one the gradients set out, at the first one they are waited for. What was
computed between the two while tokens travelled, is so differentiated while gradients do.

Routes are kept in the graph. Activation checkpointing (`use_reentrant=False`) makes the dispatch again, on all ranks at
the same place; the combine only where something behind it needs its result. Policies of selective checkpointing, and
other dispatch modes, see no operator of an exchange.

Under `torch.compile` both are custom operators (`compiled.py`): with `num_worst_tokens` every shape is known and there
is no graph break. They finish before what follows; `async_finish` makes no difference there. Checkpointing inside a
compiled graph makes neither again. Without `num_worst_tokens` each call, and each `wait()`, is one graph break, and
nothing inside of it is traced.

Not here: gradients of gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Literal, NamedTuple, TypeVar, overload

import torch
from torch.autograd.function import once_differentiable

from ..buffers.calling import refuse
from ..buffers.legacy import Buffer
from ..event import EventHandle, EventOverlap
from . import compiled
from .exchange import (
    DTYPES,
    Function,
    Order,
    Plan,
    Rows,
    Sent,
    Sums,
    add_into_window,
    is_wide,
    opaque,
    send,
    send_again,
    sum_back,
)

Result = TypeVar("Result")
Event = EventOverlap | EventHandle


_AS_MANY_AS_COME = (
    "receives as many rows as come, a number that is known only when it runs. Pass `num_worst_tokens` for fixed shapes "
    "and a full graph; the tokens of all ranks always suffice"
)


def untraced(function: Function, why: str = _AS_MANY_AS_COME) -> Function:
    """The same function, which a compiler calls as it is: one graph break, with the way around it as its reason."""
    return torch.compiler.disable(function, reason=f"deep_ep.moe: `{function.__qualname__}` {why}")


@opaque
def _land(land: Callable[[], Result]) -> Result:
    return land()


_land_untraced = untraced(_land)


def check_buffer(where: str, buffer: Any) -> None:
    """Check that this is a `Buffer`: only then there are peers to tell of any other mistake."""
    if not isinstance(buffer, Buffer):
        raise TypeError(f"{where}: `buffer` must be a Buffer, got {type(buffer).__name__}")


def check_rows(where: str, buffer: Buffer, **tensors: Any) -> None:
    """Check that these are tensors, and `x` of a type that has gradients. Shapes are for the buffer to check.

    Args:
        where: The function that was called, for messages.
        buffer: The buffer whose peers are told of a mistake.
        tensors: `x`, and what else goes with it, by name.
    """
    wrong = None
    for name, value in tensors.items():
        if not isinstance(value, torch.Tensor):
            wrong = f"`{name}` must be a tensor, got {type(value).__name__}"
    if wrong is None and tensors["x"].dtype not in DTYPES:
        wrong = f"`x` must be BF16, FP16, FP32 or FP64, it is {tensors['x'].dtype}"
    if wrong is not None:
        raise refuse(buffer, "dispatch", TypeError(f"{where}: {wrong}"))


def check_outputs(where: str, buffer: Buffer, y: Any, received: Any, kind: type[Any]) -> None:
    """Check what is combined: a row of outputs for each received row.

    Args:
        where: The function that was called, for messages.
        buffer: The buffer whose peers are told of a mistake.
        y: The outputs.
        received: The result of the dispatch.
        kind: The type that it must have.
    """
    wrong = None
    if not isinstance(y, torch.Tensor):
        wrong = f"`y` must be a tensor, got {type(y).__name__}"
    elif not isinstance(received, kind):
        function = where.rpartition(".")[2].replace("combine", "dispatch")
        wrong = f"`received` must be what `{function}` returned, got {type(received).__name__}"
    if wrong is not None:
        raise refuse(buffer, "combine", TypeError(f"{where}: {wrong}"))
    if not torch.compiler.is_compiling() and (y.dim() != 2 or y.size(0) != received.x.size(0)):
        shape = f"[{received.x.size(0)}, hidden], a row for each of `received.x`"
        error = ValueError(f"{where}: `y` must have shape {shape}, it has {list(y.shape)}")
        raise refuse(buffer, "combine", error)


class Received(NamedTuple):
    """What `dispatch` brings.

    Attributes:
        x: [n, H] of the tokens' dtype, ordered by source rank and then by token; in the window, unless it came as FP8.
            In the worst case rows beyond those that came hold anything.
        topk_idx: [n, K] of the ids' dtype, local ids, -1 where the expert is elsewhere or no row came.
        topk_weights: [n, K] float32, or float64 where x and the weights are; 0 where the id is -1.
        num_tokens_per_expert: Rows of each local expert; empty in the worst case, where the host does not know.
        handle: The routes, as `Buffer.dispatch` returns them.
        tie: [0], the edge from `combine` back to its dispatch.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_tokens_per_expert: list[int]
    handle: tuple[torch.Tensor, ...]
    tie: torch.Tensor

    @property
    def is_fixed(self) -> bool:
        """Whether there are as many rows as the caller said, and not as many as came."""
        return not self.num_tokens_per_expert


class InFlight(Generic[Result]):
    """A call that has begun.

    Attributes:
        event: When it is done; None under `torch.compile`, where it is.
    """

    def __init__(self, event: EventOverlap | None, land: Callable[[], Result]):
        self.event = event
        self._land = land

    def wait(self) -> Result:
        """What the call brings; the caller's stream waits for it. Once."""
        if torch.compiler.is_compiling():
            return self._land() if self.event is None else _land_untraced(self._land)
        return _land(self._land)


# Dispatch ------------------------------------------------------------------------------------------------------------


@overload
def dispatch(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    *,
    num_worst_tokens: int = 0,
    is_fp8: bool = False,
    previous_event: Event | None = None,
    async_finish: Literal[False] = False,
) -> Received: ...
@overload
def dispatch(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    *,
    num_worst_tokens: int = 0,
    is_fp8: bool = False,
    previous_event: Event | None = None,
    async_finish: Literal[True],
) -> InFlight[Received]: ...
def dispatch(
    buffer: Buffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    *,
    num_worst_tokens: int = 0,
    is_fp8: bool = False,
    previous_event: Event | None = None,
    async_finish: bool = False,
) -> Received | InFlight[Received]:
    """Send each token to the ranks that own its experts. All ranks of the buffer call it together.

    Backward: the rows' gradients are summed per token, and each weight gets its gradient from its expert's rank.

    Args:
        buffer: The buffer.
        x: [T, H] BF16, FP16, FP32 or FP64.
        topk_idx: [T, K] int32 or int64; -1 selects nothing.
        topk_weights: [T, K] float. They travel as float32; as float64 where x is float64 too and not sent as FP8.
        num_experts: E, of all ranks.
        num_worst_tokens: n: make room for this many rows, and have the host wait for no counts. The tokens of all
            ranks always suffice. 0: as many as come.
        is_fp8: Rows travel as FP8, with a scale for each 128 channels; their gradients come back as they are.
        previous_event: Wait for it first.
        async_finish: Return before the rows are there: `wait()` brings them.
    """
    check_buffer("moe.dispatch", buffer)
    check_rows("moe.dispatch", buffer, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    weights = topk_weights.to(torch.float64 if is_wide(x, topk_weights, is_fp8) else torch.float32)
    plan, order = Plan(num_experts, num_worst_tokens, is_fp8), Order(previous_event, async_finish)
    if torch.compiler.is_compiling() and not num_worst_tokens:
        return _dispatch_untraced(buffer, x, weights, topk_idx, plan, order)
    if torch.compiler.is_compiling():
        received = Received(*compiled.dispatch(buffer, x, weights, topk_idx, num_experts, num_worst_tokens, is_fp8))
        return InFlight(None, lambda: received) if async_finish else received
    return _dispatch(buffer, x, weights, topk_idx, plan, order)


@opaque
def _dispatch(
    buffer: Buffer, x: torch.Tensor, weights: torch.Tensor, topk_idx: torch.Tensor, plan: Plan, order: Order
) -> Received | InFlight[Received]:
    flight = _Dispatch(buffer, topk_idx, plan, order)
    # Something that requires gradients among the inputs makes the outputs do so, on all ranks alike.
    anchor = x.new_empty(0).requires_grad_(torch.is_grad_enabled())
    promise = _DispatchBegin.apply(anchor, x, weights, flight)
    begun = InFlight(flight.event, lambda: Received(*_DispatchEnd.apply(promise, flight)))
    return begun if order.is_async else begun.wait()


_dispatch_untraced = untraced(_dispatch)


class _Dispatch:
    """What the two nodes of a dispatch have in common, and what is on its way between them."""

    def __init__(self, buffer: Buffer, topk_idx: torch.Tensor, plan: Plan, order: Order):
        self.buffer = buffer
        self.is_async = order.is_async
        self.event: EventOverlap | None = None
        self._call: tuple[torch.Tensor, Plan, Order] | None = (topk_idx, plan, order)
        self._sent: Sent | None = None
        self._sums: Sums | None = None

    def begin(self, x: torch.Tensor, weights: torch.Tensor) -> None:
        assert self._call is not None
        topk_idx, plan, order = self._call
        self._sent = send(self.buffer, x, weights, topk_idx, plan, order)
        self.event, self._call = self._sent.rows.event, None

    def end(self) -> Sent:
        sent, self._sent, self.event = self._sent, None, None  # it must not keep window memory alive
        assert sent is not None, "moe.dispatch: `wait()` may be called once"
        return _waited(sent, sent.rows.event, self.is_async)

    def begin_backward(
        self, grad_x: torch.Tensor, grad_weights: torch.Tensor, handle: tuple, topk_idx: torch.Tensor
    ) -> None:
        order = Order(None, self.is_async)
        self._sums = sum_back(self.buffer, grad_x, grad_weights, handle, topk_idx, order)

    def end_backward(self) -> Sums:
        sums, self._sums = self._sums, None
        assert sums is not None
        return _waited(sums, sums.event, self.is_async)


class _DispatchBegin(torch.autograd.Function):
    """Where tokens set out, and where their gradients arrive."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, x: torch.Tensor, topk_weights: torch.Tensor, flight: _Dispatch
    ) -> torch.Tensor:
        ctx.flight = flight
        flight.begin(x.detach(), topk_weights.detach())
        return anchor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _promise: torch.Tensor) -> tuple[Any, ...]:
        sums = ctx.flight.end_backward()
        return None, sums.x, sums.topk_weights, None


class _DispatchEnd(torch.autograd.Function):
    """Where rows arrive, and where their gradients set out."""

    @staticmethod
    def forward(ctx: Any, promise: torch.Tensor, flight: _Dispatch) -> tuple[Any, ...]:
        ctx.flight = flight
        sent = flight.end()
        x, topk_weights = sent.land()
        ctx.mark_non_differentiable(sent.topk_idx)
        # As saved tensors: recomputation under checkpointing stops at the last of them, and must get as far as this
        # on a rank whose experts save nothing.
        ctx.save_for_backward(*sent.handle, sent.topk_idx)
        counts, handle = sent.num_tokens_per_expert, sent.handle
        return x, sent.topk_idx, topk_weights, counts, handle, promise.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: torch.Tensor, _idx: Any, grad_weights: torch.Tensor, *_rest: Any) -> tuple[Any, ...]:
        *handle, topk_idx = ctx.saved_tensors
        ctx.flight.begin_backward(grad_x, grad_weights, tuple(handle), topk_idx)
        return grad_x.new_zeros(0), None


# Combine -------------------------------------------------------------------------------------------------------------


@overload
def combine(
    buffer: Buffer,
    y: torch.Tensor,
    received: Received,
    *,
    is_fp8: bool = False,
    previous_event: Event | None = None,
    async_finish: Literal[False] = False,
) -> torch.Tensor: ...
@overload
def combine(
    buffer: Buffer,
    y: torch.Tensor,
    received: Received,
    *,
    is_fp8: bool = False,
    previous_event: Event | None = None,
    async_finish: Literal[True],
) -> InFlight[torch.Tensor]: ...
def combine(
    buffer: Buffer,
    y: torch.Tensor,
    received: Received,
    *,
    is_fp8: bool = False,
    previous_event: Event | None = None,
    async_finish: bool = False,
) -> torch.Tensor | InFlight[torch.Tensor]:
    """Bring the experts' rows back and sum them per token. All ranks of the buffer call it together.

    Backward: each row gets the gradient of its token.

    Args:
        buffer: The buffer of the dispatch.
        y: [n, H], weighted: row i belongs to `received.x[i]`. No copy is made of it where it lies in the window, as
            `buffer.get_combine_buffer(received.handle)` does. With `async_finish` it must stay as it is until then.
        received: What `dispatch` returned.
        is_fp8: In the backward pass, which is a dispatch, gradients travel as FP8. The rows here do not.
        previous_event: Wait for it first.
        async_finish: Return before the sums are there: `wait()` brings them.

    Returns:
        [T, H].
    """
    check_buffer("moe.combine", buffer)
    check_outputs("moe.combine", buffer, y, received, Received)
    order = Order(previous_event, async_finish)
    if torch.compiler.is_compiling() and not received.is_fixed:
        return _combine_untraced(buffer, y, received, is_fp8, order)
    if torch.compiler.is_compiling():
        combined = compiled.combine(buffer, y, received.tie, received.handle, is_fp8)
        return InFlight(None, lambda: combined) if async_finish else combined
    return _combine(buffer, y, received, is_fp8, order)


@opaque
def _combine(
    buffer: Buffer, y: torch.Tensor, received: Received, is_fp8: bool, order: Order
) -> torch.Tensor | InFlight[torch.Tensor]:
    flight = _Combine(buffer, received.handle, is_fp8, order)
    promise = _CombineBegin.apply(received.tie, y, flight)
    begun = InFlight(flight.event, lambda: _CombineEnd.apply(promise, flight))
    return begun if order.is_async else begun.wait()


_combine_untraced = untraced(_combine)


def add_rows(
    buffer: Buffer, values: torch.Tensor, rows: torch.Tensor, received: Received, dtype: torch.dtype
) -> torch.Tensor:
    """Add up the experts' results by the row that they belong to, in the window: what `combine` takes. Local.

    Args:
        buffer: The buffer of the dispatch.
        values: [m, H] float, weighted.
        rows: [m] int64, rows of `received.x`.
        received: What `dispatch` returned.
        dtype: Of the sums. If it is not that of the values, they are added up before they are cast.

    Returns:
        [n, H].
    """
    call = add_into_window
    if torch.compiler.is_compiling():
        call = compiled.add_rows if received.is_fixed else _add_rows_untraced
    return call(buffer, values, rows, received.handle, dtype)


_add_rows_untraced = untraced(add_into_window)


class _Combine:
    """What the two nodes of a combine have in common, and what is on its way between them."""

    def __init__(self, buffer: Buffer, handle: tuple[torch.Tensor, ...], is_fp8: bool, order: Order):
        self.buffer = buffer
        # Not as saved tensors: recomputation would go through this communication only to make the routes again.
        self._handle = handle
        self._is_fp8 = is_fp8
        self.event: EventOverlap | None = None
        self._order = order
        self._combined: torch.Tensor | None = None
        self._rows: Rows | None = None

    def begin(self, y: torch.Tensor) -> None:
        order = self._order if y.is_contiguous() else self._order.now()
        self._combined, _, self.event = self.buffer.combine(y.contiguous(), self._handle, **order.arguments())
        self._order = Order(None, order.is_async)

    def end(self) -> torch.Tensor:
        combined, event, self._combined, self.event = self._combined, self.event, None, None
        assert combined is not None, "moe.combine: `wait()` may be called once"
        return _waited(combined, event, self._order.is_async)

    def begin_backward(self, grad: torch.Tensor) -> None:
        self._rows = send_again(self.buffer, grad, self._handle, self._is_fp8, self._order)

    def end_backward(self) -> torch.Tensor:
        rows, self._rows = self._rows, None
        assert rows is not None
        return _waited(rows, rows.event, self._order.is_async).unpack()[0]


class _CombineBegin(torch.autograd.Function):
    """Where rows set out, and where their gradients arrive."""

    @staticmethod
    def forward(ctx: Any, tie: torch.Tensor, y: torch.Tensor, flight: _Combine) -> torch.Tensor:
        ctx.flight, ctx.tie_like = flight, (tie.dtype, tie.device)
        flight.begin(y.detach())
        return y.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _promise: torch.Tensor) -> tuple[Any, ...]:
        dtype, device = ctx.tie_like
        return torch.zeros(0, dtype=dtype, device=device), ctx.flight.end_backward(), None


class _CombineEnd(torch.autograd.Function):
    """Where sums arrive, and where their gradients set out."""

    @staticmethod
    def forward(ctx: Any, _promise: torch.Tensor, flight: _Combine) -> torch.Tensor:
        ctx.flight = flight
        return flight.end()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        ctx.flight.begin_backward(grad)
        return grad.new_zeros(0), None


def _waited(result: Result, event: EventOverlap | None, is_async: bool) -> Result:
    """Return a result once it is there."""
    if is_async:
        assert event is not None
        event.current_stream_wait()
    return result
