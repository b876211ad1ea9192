"""What the product is compared with: gloo at its best, gloo as users write it, and a plain copy, the floor.

Letters and rules as in `cases`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist

from ...kernels.rows import as_bytes, rows_as
from .core import FLOOR, GLOO, GLOO_AS_WRITTEN, BenchVariant
from .inputs import GlooRoutes, Inputs, find_routes

_LINE_BYTES = 64


class WarmPair:
    """Two buffers whose pages are all there: the floor copies from `near` to `far`, and gloo works in the same two.

    Args:
        num_rows: The most rows that either holds.
        row_bytes: Bytes of a row, for each part of a payload.
    """

    def __init__(self, num_rows: int, row_bytes: Sequence[int]):
        self._row_bytes = row_bytes
        num_bytes = sum(num_rows * width + _LINE_BYTES for width in row_bytes)
        # `zeros` would leave the pages to the first one who writes.
        self._near, self._far = (torch.empty(num_bytes, dtype=torch.uint8).fill_(1) for _ in range(2))

    def near(self, num_rows: int) -> list[torch.Tensor]:
        """Of each part, [num_rows, W] uint8 in the one buffer."""
        return self._carve(self._near, num_rows)

    def far(self, num_rows: int) -> list[torch.Tensor]:
        """The same in the other."""
        return self._carve(self._far, num_rows)

    def floor(self, num_bytes: int) -> BenchVariant:
        """A plain copy of as many bytes."""
        return BenchVariant(FLOOR, partial(self._far[:num_bytes].copy_, self._near[:num_bytes]))

    def _carve(self, memory: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
        """Matrices one after the other, each on a cache line of its own."""
        start, carved = 0, []
        for width in self._row_bytes:
            carved.append(memory[start : start + num_rows * width].view(num_rows, width))
            start += -(-num_rows * width // _LINE_BYTES) * _LINE_BYTES
        return carved


def bytes_of_row(rows: torch.Tensor) -> int:
    """Bytes of one row of a matrix."""
    return rows.size(1) * rows.element_size()


# Dispatch ------------------------------------------------------------------------------------------------------------


def dispatch_pair(inputs: Inputs, parts: Sequence[torch.Tensor]) -> WarmPair:
    """Two buffers that hold what a rank sends, and what it receives, of matrices with one row a token."""
    num_rows = max(inputs.routes.num_recv, inputs.routes.num_sent)
    return WarmPair(num_rows, [bytes_of_row(part) for part in parts])


def dispatch_peers(inputs: Inputs, parts: Sequence[torch.Tensor], has_topk: bool, pair: WarmPair) -> list[BenchVariant]:
    """What a dispatch is compared with.

    Args:
        inputs: The rank's inputs.
        parts: Matrices to send, one row a token.
        has_topk: Whether the last two parts are ids and weights.
        pair: Rows go from the near one to the far one.
    """
    parts = [as_bytes(part) if part.element_size() == 1 else part for part in parts]  # gloo knows no FP8
    row_bytes = [bytes_of_row(part) for part in parts]
    num_sent, num_recv = inputs.routes.num_sent, inputs.routes.num_recv
    preallocated = partial(
        _exchange_preallocated,
        [as_bytes(part) for part in parts],
        pair.near(num_sent),
        pair.far(num_recv),
        inputs.routes,
    )
    outputs = partial(_exchanged, inputs, has_topk)
    return [
        BenchVariant(GLOO, preallocated, outputs),
        BenchVariant(GLOO_AS_WRITTEN, partial(_exchange_as_written, parts, inputs.is_token_in_rank), outputs),
        pair.floor(num_recv * sum(row_bytes)),
    ]


def _exchange_preallocated(
    parts: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], routes: GlooRoutes
) -> Sequence[torch.Tensor]:
    """Dispatch by gloo into memory that is there, along known routes.

    Args:
        parts: Matrices of bytes, one row a token.
        sends: [m, W] uint8 for each part, written.
        recvs: [n, W] uint8 for each part, written.
        routes: Where the rows go.
    """
    for part, send, recv in zip(parts, sends, recvs, strict=True):
        torch.index_select(_wide(part), 0, routes.token_idx, out=_wide(send))
        dist.all_to_all_single(recv, send, routes.recv_splits, routes.send_splits)
    return recvs


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """The same rows [n, W] uint8 in the widest elements that fit: gathering costs by the element."""
    fitting = (dtype for dtype in (torch.int64, torch.int32, torch.int16) if rows.size(1) % dtype.itemsize == 0)
    return rows_as(rows, next(fitting, torch.uint8))


def _exchange_as_written(parts: Sequence[torch.Tensor], is_token_in_rank: torch.Tensor) -> list[torch.Tensor]:
    """Dispatch by gloo as users write it.

    Args:
        parts: Matrices, one row a token.
        is_token_in_rank: [T, R] bool.

    Returns:
        Of each part, the rows received.
    """
    routes = find_routes(is_token_in_rank)
    received = []
    for part in parts:
        recv = torch.empty(routes.num_recv, part.size(1), dtype=part.dtype)
        dist.all_to_all_single(recv, part[routes.token_idx], routes.recv_splits, routes.send_splits)
        received.append(recv)
    return received


def _exchanged(inputs: Inputs, has_topk: bool, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What gloo delivered, with the ids made local as the product does it."""
    parts = list(received)
    if has_topk:
        num_local = inputs.setting.num_experts // inputs.num_ranks
        ids = rows_as(parts[-2], torch.int64) - inputs.rank * num_local
        is_local = (ids >= 0) & (ids < num_local)
        parts[-2] = torch.where(is_local, ids, -1)
        parts[-1] = torch.where(is_local, rows_as(parts[-1], torch.float32), 0.0)
    return [as_bytes(part) for part in parts]


# Combine -------------------------------------------------------------------------------------------------------------


def combine_peers(inputs: Inputs, rows: torch.Tensor, pair: WarmPair) -> list[BenchVariant]:
    """What a combine is compared with.

    Args:
        inputs: The rank's inputs.
        rows: [n, H] bfloat16 to give back.
        pair: Rows come back into the far one.
    """
    num_sent = inputs.routes.num_sent
    back = rows_as(pair.far(num_sent)[0], rows.dtype)
    as_written = partial(_combine_as_written, rows, inputs.routes, inputs.x.size(0))
    return [
        BenchVariant(GLOO, _PreallocatedCombine(rows, back, inputs), lambda sums: [sums]),
        BenchVariant(GLOO_AS_WRITTEN, as_written, lambda sums: [sums]),
        pair.floor(num_sent * bytes_of_row(rows)),
    ]


class _PreallocatedCombine:
    """Combine by gloo into memory that is there: rows back, then sums in FP32, one source after the other.

    Args:
        rows: [n, H] bfloat16 to give back.
        back: [m, H] bfloat16, where rows come back to.
        inputs: The rank's inputs.
    """

    def __init__(self, rows: torch.Tensor, back: torch.Tensor, inputs: Inputs):
        self._rows = rows
        self._back = back
        self._routes = inputs.routes
        self._sums = torch.zeros(inputs.x.shape, dtype=torch.float32)
        self._one_source = torch.zeros(max(inputs.routes.send_splits), rows.size(1), dtype=torch.float32)
        self._out = torch.zeros_like(inputs.x)

    def __call__(self) -> torch.Tensor:
        """Returns the sums, [T, H] bfloat16."""
        token_idx, send_splits, recv_splits = self._routes
        dist.all_to_all_single(self._back, self._rows, send_splits, recv_splits)
        self._sums.zero_()
        for rows, tokens in zip(self._back.split(send_splits), token_idx.split(send_splits), strict=True):
            self._sums.index_add_(0, tokens, self._one_source[: rows.size(0)].copy_(rows))
        return self._out.copy_(self._sums)


def _combine_as_written(rows: torch.Tensor, routes: GlooRoutes, num_tokens: int) -> torch.Tensor:
    """Combine by gloo as users write it.

    Args:
        rows: [n, H] to give back.
        routes: Those of the dispatch.
        num_tokens: T.

    Returns:
        [T, H] of the rows' dtype.
    """
    back = torch.empty(routes.num_sent, rows.size(1), dtype=rows.dtype)
    dist.all_to_all_single(back, rows, routes.send_splits, routes.recv_splits)
    sums = torch.zeros(num_tokens, rows.size(1), dtype=torch.float32)
    sums.index_add_(0, routes.token_idx, back.float())
    return sums.to(rows.dtype)
