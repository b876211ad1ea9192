"""The low-latency exchange by gloo, with everything preallocated, to compare with on the CPU.

It is `all_to_all_single` at its best: rows are cast, sorted by expert and summed with the product's own functions, a
row travels with its scales and its token in one message, and combine knows the counts from the dispatch. Letters as in
`low_latency_work`; n rows sent, m received.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from ...kernels.low_latency import rows as kernels
from ...kernels.rows import widest_dtype
from ...sizing import align, ceil_div
from .low_latency_work import Delivered, LowLatencyWork

_ROW_ALIGNMENT = 8  # so that rows can be gathered in elements of 8 bytes


class GlooExchange:
    """Dispatch and combine by gloo, into memory that is there.

    Args:
        work: What the rank brings.
    """

    def __init__(self, work: LowLatencyWork):
        setting, x = work.setting, work.drawn.x
        num_tokens, hidden, num_groups = setting.num_tokens, setting.hidden, ceil_div(setting.hidden, 128)
        num_sent = work.num_selections
        num_recv = work.num_rows * min(setting.num_topk, work.num_local)
        self._work = work
        self._caster, self._summer = kernels.Caster(), kernels.WeightedSums()
        self._scales_at = align(hidden, 4)
        self._token_at = self._scales_at + 4 * num_groups
        row_bytes = align(self._token_at + 4, _ROW_ALIGNMENT)
        self._cast = _warm(num_tokens, row_bytes)
        self._cast[:, self._token_at : self._token_at + 4].view(torch.int32)[:, 0] = torch.arange(num_tokens)
        self._send, self._recv = _warm(num_sent, row_bytes), torch.empty(num_recv, row_bytes, dtype=torch.uint8)
        self._recv_counts = torch.empty(work.num_ranks, work.num_local, dtype=torch.int64)
        self._back_send = torch.empty(num_recv, hidden, dtype=torch.bfloat16)
        self._back = _warm(num_sent, 2 * hidden).view(torch.bfloat16)
        self._out = torch.zeros_like(x)
        # Not touched where no row comes: as in the product.
        shape = (work.num_local, work.num_rows)
        self._x = torch.empty(*shape, hidden, dtype=torch.float8_e4m3fn)
        self._scales = torch.empty(*shape, num_groups)
        self._src_info = torch.empty(shape, dtype=torch.int32)

    # Dispatch --------------------------------------------------------------------------------------------------------

    def dispatch(self) -> Delivered:
        """Cast, sort by expert, exchange counts and rows, and pack."""
        work, hidden = self._work, self._work.setting.hidden
        q = self._cast[:, :hidden].view(torch.float8_e4m3fn)
        scales = self._cast[:, self._scales_at : self._token_at].view(torch.float32)
        self._caster.cast(work.drawn.x, q, scales, False)
        self._selections = kernels.select(work.drawn.topk_idx, work.setting.num_experts)
        tokens = self._selections.keys % work.setting.num_tokens
        send = self._send[: tokens.numel()]
        torch.index_select(self._cast.view(torch.int64), 0, tokens, out=send.view(torch.int64))
        recv = self._exchange(send)
        blocks = kernels.Blocks.of(self._recv_counts.t().contiguous())
        self._unpack(recv, blocks)
        return Delivered(self._x, self._scales, self._src_info, blocks.layout_range())

    def _exchange(self, send: torch.Tensor) -> torch.Tensor:
        """Counts, then rows. Returns the rows received, [m, W] uint8, by rank, then expert, then token."""
        counts = self._selections.counts.view(self._work.num_ranks, -1)
        dist.all_to_all_single(self._recv_counts, counts)
        self._send_splits, self._recv_splits = counts.sum(1).tolist(), self._recv_counts.sum(1).tolist()
        recv = self._recv[: sum(self._recv_splits)]
        dist.all_to_all_single(recv, send, self._recv_splits, self._send_splits)
        return recv

    def _unpack(self, recv: torch.Tensor, blocks: kernels.Blocks) -> None:
        hidden, num_rows = self._work.setting.hidden, self._work.num_rows
        rows = kernels.rows_by_rank(blocks)
        arrived = torch.empty_like(rows).scatter_(0, rows, torch.arange(rows.numel()))
        apart = blocks.rows_apart(num_rows)
        self._rows = apart[rows]
        counts = blocks.expert_counts.tolist()
        wide = widest_dtype(hidden, self._x.data_ptr())
        kernels.fetch_rows(self._x.view(wide), recv[:, :hidden].view(wide), arrived, counts)
        scales = recv[:, self._scales_at : self._token_at].view(torch.float32)
        kernels.unpack_rows(self._scales, scales.index_select(0, arrived), counts)
        tokens = recv[:, self._token_at : self._token_at + 4].view(torch.int32)[:, 0]
        self._src_info.view(-1).index_copy_(0, self._rows, tokens)

    # Combine ---------------------------------------------------------------------------------------------------------

    def combine(self, rows: torch.Tensor) -> torch.Tensor:
        """Give the experts' rows back and sum them, weighted; after a dispatch.

        Args:
            rows: [L, R * M, H] bfloat16.

        Returns:
            [T, H] bfloat16, the same memory every time.
        """
        work, hidden = self._work, self._work.setting.hidden
        send = self._back_send[: self._rows.numel()]
        torch.index_select(rows.view(-1, hidden), 0, self._rows, out=send)
        dist.all_to_all_single(self._back, send, self._send_splits, self._recv_splits)
        _, topk_idx, weights = work.drawn
        starts = self._selections.counts.cumsum(0) - self._selections.counts
        grains = starts[topk_idx] + kernels.earlier_tokens(topk_idx, self._selections)
        self._summer.sum(self._out, self._back, grains, weights, torch.zeros_like(topk_idx, dtype=torch.bool))
        return self._out


def _warm(num_rows: int, num_bytes: int) -> torch.Tensor:
    """[num_rows, num_bytes] uint8 whose pages are all there."""
    return torch.empty(num_rows, num_bytes, dtype=torch.uint8).fill_(1)
