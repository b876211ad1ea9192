"""Low-latency combine on the CPU: the experts' rows back. What is copied in is packed without gaps."""

from __future__ import annotations

import torch

from ... import logfmt
from ...errors import EPError
from ...kernels import low_latency_rows as kernels
from ...transport.sparse import GRAIN_BYTES
from .calls import COMBINE, Rows, agreement_of
from .geometry import Geometry, Plan
from .halves import LowLatencyCall, Post
from .shared import Shared, SpoiledError

_LOGFMT_ROWS = 64  # compressed at a time


class Combine(LowLatencyCall):
    """The experts' rows back.

    The table says, for each local expert and rank, how many rows there are and which is the first: [L, R] int64, `count
    | first row << 32`.
    """

    def __init__(
        self,
        shared: Shared,
        plan: Plan,
        wait_stats: torch.Tensor | None,
        rows: Rows,
        geometry: Geometry,
        out: torch.Tensor,
        zero_copy_offset: int | None,
    ):
        super().__init__(shared, plan, wait_stats)
        self._rows = rows
        self._geometry = geometry
        self._out = out
        self._zero_copy_offset = zero_copy_offset
        self.agreement = agreement_of(
            COMBINE, geometry, torch.bfloat16, None, int(rows.use_logfmt), rows.topk_idx.dtype
        )

    def _publish(self) -> Post:
        geometry = self._geometry
        table = self.shared.table(self.number, geometry.num_experts).view(geometry.num_local_experts, -1)
        blocks, rows = kernels.rows_of_layout(self._rows.layout_range, geometry.num_rows)
        if self._zero_copy_offset is not None:
            firsts = (self._rows.layout_range >> 32) + self._expert_rows()
            torch.bitwise_or(blocks.counts, firsts << 32, out=table)
            return Post(table.size(0) * geometry.num_rows, self.shared.base(self._zero_copy_offset))
        torch.bitwise_or(blocks.counts, blocks.starts << 32, out=table)
        offset = self.plan.set_offset(self.number)
        if rows.numel() > geometry.num_experts * geometry.max_tokens:
            raise EPError(f"{self.name}: the handle speaks of {rows.numel()} rows, more than dispatch can bring")
        slots = self.shared.bytes(offset, rows.numel() * geometry.slot_bytes).view(-1, geometry.slot_bytes)
        x = self._rows.x.view(-1, geometry.hidden)
        if self._rows.use_logfmt:
            self._compress(x, rows, slots)
        else:
            torch.index_select(x, 0, rows, out=slots.view(torch.bfloat16)[:, : geometry.hidden])
        return Post(rows.numel(), self.shared.base(offset))

    def _expert_rows(self) -> torch.Tensor:
        """[L, 1]: the first row of each local expert."""
        geometry = self._geometry
        return (torch.arange(geometry.num_local_experts) * geometry.num_rows).unsqueeze(1)

    def _compress(self, x: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        geometry = self._geometry
        first, stop = geometry.ranges_offset, geometry.ranges_offset + 4 * geometry.num_groups
        for wanted, part in zip(rows.split(_LOGFMT_ROWS), slots.split(_LOGFMT_ROWS), strict=True):
            units, ranges = logfmt.encode(x.index_select(0, wanted))
            part[:, : 2 * geometry.hidden] = units
            part[:, first:stop] = ranges.flatten(1).view(torch.uint8)

    def _fetch(self, posts: dict[int, Post]) -> None:
        geometry, topk_idx = self._geometry, self._rows.topk_idx
        selections = kernels.select(topk_idx, geometry.num_experts)
        places = self._expert_places(posts, selections)
        experts = topk_idx.clamp(0, geometry.num_experts - 1).long()
        first = places[experts]
        is_skipped = ~kernels.is_selection(topk_idx, geometry.num_experts) | (first < 0)
        pitch = geometry.slot_bytes // GRAIN_BYTES
        first += kernels.earlier_tokens(topk_idx, selections) * pitch
        first.masked_fill_(is_skipped, self.shared.own_place())
        atlas, ranges = self.shared.atlas.rows(geometry.hidden, torch.bfloat16), None
        if self._rows.use_logfmt:
            ranges = self.shared.atlas.rows(2 * geometry.num_groups, torch.bfloat16, geometry.ranges_offset)
        self.shared.summer.sum(self._out, atlas, first, self._rows.topk_weights, is_skipped, ranges)

    def _expert_places(self, posts: dict[int, Post], selections: kernels.Selections) -> torch.Tensor:
        """[E] int64: the place of this rank's first row at each expert; -1 where there is none. Checked."""
        geometry, me = self._geometry, self.shared.window.rank
        num_local = geometry.num_local_experts
        places = torch.full((geometry.num_ranks, num_local), -1)
        for rank, post in posts.items():
            # A copy, which does not change any more.
            blocks = self._peer_table(rank, post, geometry.num_experts).view(num_local, -1)[:, me].clone()
            counts, firsts = blocks & 0xFFFFFFFF, blocks >> 32
            wanted = selections.counts[rank * num_local : (rank + 1) * num_local]
            is_right = (counts == wanted) & (firsts >= 0) & (firsts + counts <= post.num_rows)
            if not self.shared.can_mask and not bool(is_right.all()):
                raise SpoiledError(
                    f"{self.name}: rank {rank} has other rows for this rank than its tokens select. Pass the "
                    "`topk_idx` and the handle of one dispatch"
                )
            start = self._peer_place(rank, post, post.num_rows * geometry.slot_bytes)
            # A rank that had masked this one at the dispatch has nothing for it.
            places[rank] = torch.where(is_right, start + firsts * (geometry.slot_bytes // GRAIN_BYTES), -1)
        return places.flatten()
