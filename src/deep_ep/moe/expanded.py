"""Dispatch and combine with gradients whose rows come grouped by expert: calls of `ElasticBuffer` (`docs/elastic.md`).

Shape letters: T tokens of this rank, H hidden size, K selections of a token, L experts of this rank, X rows, one for
each (token, local expert), grouped by expert.

The host waits in each call, and the backward passes are the calls of the other direction: that of a dispatch is a
combine, that of a combine a cached dispatch. Weights travel as float32. Of FP64 tokens they are further columns of the
rows instead, and so are their gradients.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch.autograd.function import once_differentiable

from ..buffers.elastic import ElasticBuffer, EPHandle
from ..buffers.legacy import Buffer
from .exchange import opaque
from .ops import check_outputs, check_rows, untraced

_untraced = functools.partial(
    untraced,
    why="is a call of `ElasticBuffer`, which is no operator of a compiled graph, with or without `num_worst_tokens`. "
    "For a full graph make the layer with `num_worst_tokens` and without `expanded`",
)


class ExpandedRows(NamedTuple):
    """What `dispatch_expanded` brings.

    Attributes:
        x: [X, H] of the tokens' dtype. Rows beyond the last expert's hold anything.
        weights: [X] float32, or float64 where x is.
        num_rows: Rows of each local expert; without CPU sync [L] int32, where the rows of each expert end.
        handle: Of the dispatch.
        tie: [0], the edge from `combine_expanded` back to its dispatch.
    """

    x: torch.Tensor
    weights: torch.Tensor
    num_rows: list[int] | torch.Tensor
    handle: EPHandle
    tie: torch.Tensor


@_untraced
@opaque
def dispatch_expanded(
    buffer: ElasticBuffer,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_experts: int,
    max_tokens: int = 0,
) -> ExpandedRows:
    """Send each token to each of its experts. All ranks of the buffer call it together.

    Args:
        buffer: The buffer.
        x: [T, H] BF16, FP16, FP32 or FP64.
        topk_idx: [T, K] int32 or int64; -1 selects nothing. A token's experts are all different.
        topk_weights: [T, K] float.
        num_experts: E, of all ranks.
        max_tokens: Most tokens of a rank, the same on all ranks: the result has rows for the worst case, and the host
            waits for no counts. 0: as many rows as come.
    """
    where = "moe.dispatch_expanded"
    _check_buffer(where, buffer)
    check_rows(where, buffer._buffer, x=x, topk_idx=topk_idx, topk_weights=topk_weights)
    call = _Call(buffer, topk_idx, num_experts, max_tokens)
    # Something that requires gradients among the inputs makes the outputs do so, on all ranks alike.
    anchor = x.new_empty(0).requires_grad_(torch.is_grad_enabled())
    weights = topk_weights.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    rows, row_weights, tie = _Dispatch.apply(anchor, x, weights, call)
    assert call.handle is not None
    counts = call.handle.num_recv_tokens_per_expert_list
    ends = call.handle.psum_num_recv_tokens_per_expert
    return ExpandedRows(rows, row_weights, ends if max_tokens else counts, call.handle, tie)


@_untraced
@opaque
def combine_expanded(buffer: ElasticBuffer, y: torch.Tensor, received: ExpandedRows) -> torch.Tensor:
    """Bring the experts' rows back, and sum them per token. All ranks of the buffer call it together.

    Args:
        buffer: The buffer of the dispatch.
        y: [X, H], weighted: row i belongs to `received.x[i]`.
        received: What `dispatch_expanded` returned.

    Returns:
        [T, H].
    """
    where = "moe.combine_expanded"
    _check_buffer(where, buffer)
    check_outputs(where, buffer._buffer, y, received, ExpandedRows)
    return _Combine.apply(received.tie, y, buffer, received.handle)


def _check_buffer(where: str, buffer: Any) -> None:
    if not isinstance(buffer, ElasticBuffer):
        made = "ElasticBuffer.from_buffer(buffer) makes one" if isinstance(buffer, Buffer) else "Make one"
        raise TypeError(f"{where}: `buffer` must be an ElasticBuffer, got {type(buffer).__name__}. {made}")


class _Call:
    """The arguments of a dispatch, and the handle that it leaves."""

    def __init__(self, buffer: ElasticBuffer, topk_idx: torch.Tensor, num_experts: int, max_tokens: int):
        self.buffer, self.topk_idx = buffer, topk_idx.contiguous()
        self.num_experts, self.max_tokens = num_experts, max_tokens
        self.handle: EPHandle | None = None

    def send(self, x: torch.Tensor, weights: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        rows, _, row_weights, self.handle, _ = self.buffer.dispatch(
            x,
            self.topk_idx,
            weights,
            num_experts=self.num_experts,
            num_max_tokens_per_rank=self.max_tokens or max(1, x.shape[0] if x.dim() else 0),
            do_cpu_sync=not self.max_tokens,
            do_expand=True,
        )
        assert isinstance(rows, torch.Tensor)
        return rows, row_weights


class _Dispatch(torch.autograd.Function):
    """Tokens to rows; in the backward pass gradients of rows to those of tokens and weights."""

    @staticmethod
    def forward(
        ctx: Any, anchor: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, call: _Call
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        idx = call.topk_idx
        is_whole = x.dim() == idx.dim() == 2 and weights.shape == idx.shape and x.shape[0] == idx.shape[0]
        # The buffer says what is wrong otherwise, and tells the peers.
        ctx.call, ctx.hidden, ctx.num_topk = call, x.shape[-1] if x.dim() else 0, idx.shape[-1] if idx.dim() else 0
        if x.dtype != torch.float64 or not is_whole:
            weights = weights.float()
            rows, row_weights = call.send(x.detach().contiguous(), weights.detach().contiguous())
            assert row_weights is not None
        else:
            both, _ = call.send(torch.cat([x.detach(), weights.detach()], 1), None)
            columns = _columns_of_rows(call.handle)
            rows, every = both[:, : ctx.hidden].contiguous(), both[:, ctx.hidden :]
            row_weights = torch.where(columns >= 0, every.gather(1, columns.clamp(min=0)[:, None])[:, 0], 0.0)
        # As a saved tensor: recomputation under checkpointing stops at the last of them, and must get as far as this
        # on a rank whose experts save nothing.
        assert call.handle is not None
        ctx.save_for_backward(call.handle.recv_src_metadata)
        return rows, row_weights, anchor.new_empty(0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_rows: torch.Tensor, grad_weights: torch.Tensor, _tie: Any) -> tuple[Any, ...]:
        _ = ctx.saved_tensors  # which computes a checkpoint again, on this rank as on all others
        call, handle = ctx.call, ctx.call.handle
        if grad_rows.dtype != torch.float64:
            weights = grad_weights.float().contiguous()
            sums, weight_sums, _ = call.buffer.combine(grad_rows.contiguous(), handle, weights)
            return None, sums, weight_sums, None
        columns = _columns_of_rows(handle)[:, None]
        is_column = columns == torch.arange(ctx.num_topk, device=columns.device)
        spread = torch.where(is_column, grad_weights[:, None], 0.0)
        sums, _, _ = call.buffer.combine(torch.cat([grad_rows, spread], 1), handle)
        return None, sums[:, : ctx.hidden], sums[:, ctx.hidden :], None


class _Combine(torch.autograd.Function):
    """Rows to sums; in the backward pass gradients of sums to those of rows."""

    @staticmethod
    def forward(ctx: Any, tie: torch.Tensor, y: torch.Tensor, buffer: ElasticBuffer, handle: EPHandle) -> torch.Tensor:
        # Not as saved tensors: recomputation would go through this communication only to make the handle again.
        ctx.buffer, ctx.handle, ctx.tie_like = buffer, handle, (tie.dtype, tie.device)
        return buffer.combine(y.detach().contiguous(), handle)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        dtype, device = ctx.tie_like
        rows = ctx.buffer.dispatch(grad.contiguous(), handle=ctx.handle)[0]
        return torch.zeros(0, dtype=dtype, device=device), rows, None, None


def _columns_of_rows(handle: EPHandle | None) -> torch.Tensor:
    """[X] int64, the column of its token that each row belongs to; -1: none."""
    assert handle is not None
    num_rows = handle.num_expanded_tokens
    num_came = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
    rows = handle.recv_src_metadata[:, 2:]
    is_row = (rows >= 0) & (torch.arange(rows.size(0), device=rows.device) < num_came)[:, None]
    # One element more than there are rows: it takes the columns without any.
    found = torch.full((num_rows + 1,), -1, device=rows.device, dtype=torch.int64)
    columns = torch.arange(rows.size(1), device=rows.device).expand_as(rows)
    found.scatter_(0, torch.where(is_row, rows, num_rows).flatten().long(), columns.flatten())
    return found[:-1]
