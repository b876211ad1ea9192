"""Low-latency combine on the CPU: the experts' rows go back to their tokens.

Rows that are copied in are packed without gaps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from .... import logfmt
from ....errors import EPError
from ....kernels.low_latency import rows as kernels
from ....transport import ordinary_tensor
from ....transport.sparse import GRAIN_BYTES
from ..calls import COMBINE, CombineInputs, CombineKind, agreement_of
from ..geometry import SetPlan
from ..slots import FREE_SLOT, zero_copy_view
from . import remote_rows
from .phases import LocalPost, LowLatencyCall, Posts
from .remote import Outgoing, RemotePost
from .remote_rows import RemoteRows
from .shared import ExcludedError, Shared, SpoiledError

if TYPE_CHECKING:  # it needs sockets that other systems do not have
    from ....transport.mesh import Mesh


class LowLatencyCombine(LowLatencyCall):
    """A low-latency combine: the experts' rows go back to their tokens.

    The table has, for each local expert and rank, the number of rows and the first of them: [L, R] int64, `count
    | first row << 32`.
    """

    takes = FREE_SLOT

    def __init__(
        self,
        shared: Shared,
        plan: SetPlan,
        wait_stats: torch.Tensor | None,
        kind: CombineKind,
        rows: CombineInputs,
        out: torch.Tensor,
    ):
        super().__init__(shared, plan, wait_stats)
        self._rows = rows
        self._geometry = kind.geometry
        self._use_logfmt = kind.use_logfmt
        self._out = out
        self._is_zero_copy = kind.zero_copy
        self.agreement = agreement_of(
            COMBINE, kind.geometry, torch.bfloat16, None, int(kind.use_logfmt), kind.idx_dtype
        )

    def _publish(self) -> LocalPost:
        geometry = self._geometry
        table = self.shared.table(self.number, geometry.num_experts).view(geometry.num_local_experts, -1)
        layout = self._local_layout()
        if self._is_zero_copy:
            firsts = (layout >> 32) + self._expert_rows()
            torch.bitwise_or(layout & 0xFFFFFFFF, firsts << 32, out=table)
            return LocalPost(table.size(0) * geometry.num_rows, self.shared.base(self._offset))
        blocks, rows = kernels.rows_of_layout(layout, geometry.num_rows)
        np.bitwise_or(blocks.counts, blocks.starts << 32, out=table.numpy())
        offset = self._offset
        self._require_possible(rows, geometry.num_experts)
        slots = self.shared.bytes(offset, rows.numel() * geometry.slot_bytes).view(-1, geometry.slot_bytes)
        self._write(rows, slots)
        return LocalPost(rows.numel(), self.shared.base(offset))

    def _frame_to(self, mesh: Mesh, rank: int) -> Outgoing:
        """Make the frame for a remote rank: the rows of each of this rank's experts for it."""
        geometry = self._geometry
        blocks, rows = kernels.rows_of_layout(self._rows.layout_range[:, rank : rank + 1], geometry.num_rows)
        self._require_possible(rows, geometry.num_local_experts)
        counts = torch.from_numpy(blocks.expert_counts)
        if self._use_logfmt:
            slots = ordinary_tensor((rows.numel(), geometry.slot_bytes), torch.uint8)
            self._write(rows, slots)
            return remote_rows.logfmt_frame(mesh, self._said, geometry, counts, slots)
        frame, slots = remote_rows.plain_frame(mesh, self._said, geometry, counts)
        self._write(rows, slots)
        return frame

    def _local_layout(self) -> torch.Tensor:
        """Return the handle's [L, R], without rows for ranks of other nodes."""
        layout, local = self._rows.layout_range, self.shared.local
        if self.shared.mesh is None:
            return layout
        mine = torch.zeros_like(layout)
        mine[:, local.start : local.stop] = layout[:, local.start : local.stop]
        return mine

    def _require_possible(self, rows: torch.Tensor, num_experts: int) -> None:
        if rows.numel() > num_experts * self._geometry.max_tokens:
            raise EPError(f"{self.name}: the handle counts {rows.numel()} rows, more than dispatch can bring")

    def _write(self, rows: torch.Tensor, slots: torch.Tensor) -> None:
        """Write some of the experts' rows, numbered over all experts, into [n, pitch] uint8."""
        geometry = self._geometry
        if self._use_logfmt:
            self._compress(self._rows.x.view(-1, geometry.hidden), rows, slots)
            return
        torch.index_select(self._source_rows(), 0, rows, out=slots.view(torch.bfloat16)[:, : geometry.hidden])

    def _source_rows(self) -> torch.Tensor:
        """Return [L * rows, H] BF16: the experts' rows, wherever they are."""
        geometry = self._geometry
        if not self._is_zero_copy:
            return self._rows.x.view(-1, geometry.hidden)
        memory = self.shared.uncommitted_bytes(self._offset, geometry.combine_bytes)
        return zero_copy_view(memory, geometry).view(-1, geometry.hidden)

    def _expert_rows(self) -> torch.Tensor:
        """Return [L, 1]: the first row of each local expert."""
        geometry = self._geometry
        return (torch.arange(geometry.num_local_experts, device="cpu") * geometry.num_rows).unsqueeze(1)

    def _compress(self, x: torch.Tensor, rows: torch.Tensor, slots: torch.Tensor) -> None:
        geometry = self._geometry
        first, stop = geometry.ranges_offset, geometry.ranges_offset + 4 * geometry.num_groups
        for wanted, part in zip(rows.split(kernels.LOGFMT_ROWS), slots.split(kernels.LOGFMT_ROWS), strict=True):
            ranges = part[:, first:stop].view(torch.bfloat16).unflatten(1, (-1, 2))
            logfmt.encode_into(x.index_select(0, wanted), part[:, : 2 * geometry.hidden], ranges)

    def _fetch(self, posts: Posts) -> None:
        geometry, topk_idx = self._geometry, self._rows.topk_idx
        selections = kernels.select(topk_idx, geometry.num_experts)
        # First: mapping receive buffers may move the grains of all ranks.
        remote = self._remote_rows(posts.remote)
        starts, pitches = self._expert_grains(posts.local, remote, selections)
        ids = topk_idx.numpy()
        experts = ids.clip(0, geometry.num_experts - 1)
        grains = starts[experts]
        is_skipped = ~kernels.is_selection(ids, geometry.num_experts) | (grains < 0)
        grains += kernels.earlier_tokens(topk_idx, selections).numpy() * pitches[experts]
        chosen = torch.from_numpy(grains), self._rows.topk_weights, torch.from_numpy(is_skipped)
        atlas, ranges = self.shared.atlas.rows(geometry.hidden, torch.bfloat16), None
        if self._use_logfmt:
            ranges = self.shared.atlas.rows(2 * geometry.num_groups, torch.bfloat16, geometry.ranges_offset)
        self.shared.summer.sum(self._out, atlas, *chosen, ranges)
        rows_to = (self._rows.layout_range.numpy() & 0xFFFFFFFF).sum(0)
        rows_from = selections.counts.numpy().reshape(geometry.num_ranks, -1).sum(1)
        self._note(posts, rows_to, rows_from, geometry.slot_bytes)

    def _remote_rows(self, posts: dict[int, RemotePost]) -> dict[int, RemoteRows]:
        """Return the rows that ranks of other nodes have sent, after mapping them in the atlas.

        This may move grains.
        """
        geometry, mesh = self._geometry, self.shared.mesh
        if not self._use_logfmt or mesh is None:
            return {rank: remote_rows.plain_rows(post, geometry) for rank, post in posts.items()}
        rows = {rank: remote_rows.logfmt_rows(post, geometry, mesh.receive_arena) for rank, post in posts.items()}
        self.shared.reach_receive_arena()
        return rows

    def _expert_grains(
        self, posts: dict[int, LocalPost], remote: dict[int, RemoteRows], selections: kernels.Selections
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return where this rank's rows lie at each expert, after checking what the peers have published.

        Returns:
            [E] int64: the grain of its first row, -1 if there is none. [E] int64: grains from one row to the next.
        """
        geometry, num_local = self._geometry, self._geometry.num_local_experts
        starts = np.full((geometry.num_ranks, num_local), -1, dtype=np.int64)
        pitches = np.full_like(starts, geometry.slot_bytes // GRAIN_BYTES)
        wanted = selections.counts.view(geometry.num_ranks, num_local).numpy()
        for rank, post in posts.items():
            # A copy, which a peer that has gone on cannot change.
            table = self._peer_table(rank, post, geometry.num_experts).numpy().reshape(num_local, -1)
            blocks = table[:, self.shared.rank].copy()
            counts, firsts = blocks & 0xFFFFFFFF, blocks >> 32
            is_right = (counts == wanted[rank]) & (firsts >= 0) & (firsts + counts <= post.num_rows)
            start = self._peer_grain(rank, post, post.num_rows * geometry.slot_bytes)
            grains = start + firsts * (geometry.slot_bytes // GRAIN_BYTES)
            starts[rank] = self._wanted_grains(rank, is_right, grains, has_none=not counts.any())
        for rank, (amounts, slots) in remote.items():
            pitches[rank] = pitch = slots.size(1) // GRAIN_BYTES
            counts = amounts.numpy()
            grains = self.shared.atlas.grain_at(slots.data_ptr()) + (counts.cumsum() - counts) * pitch
            starts[rank] = self._wanted_grains(rank, counts == wanted[rank], grains, has_none=not counts.any())
        return starts.ravel(), pitches.ravel()

    def _wanted_grains(self, rank: int, is_right: np.ndarray, grains: np.ndarray, *, has_none: bool) -> np.ndarray:
        """Return the grains at which a rank has the rows that are wanted.

        Raises:
            SpoiledError: It has other rows than are wanted.
            ExcludedError: It has none, and ranks may be masked.
        """
        if is_right.all():
            return grains
        if self.shared.can_mask and has_none:
            raise ExcludedError(rank, ", which had masked this rank at the dispatch and has no rows for it")
        raise SpoiledError(
            f"{self.name}: rank {rank} has other rows for this rank than its tokens select. Pass the "
            "`topk_idx` and the handle of one dispatch"
        )
