"""Low-latency dispatch on the CPU: tokens to experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import quant
from ...kernels import low_latency_rows as kernels
from ...kernels.rows import widest_dtype
from ...transport import Base
from ...transport.sparse import GRAIN_BYTES
from .calls import DISPATCH, Packed, agreement_of
from .geometry import Form, Geometry, Plan
from .halves import LowLatencyCall, Post
from .shared import Shared, SpoiledError


class Dispatch(LowLatencyCall):
    """Tokens to experts. A set holds T rows, and behind them the tokens of each expert: [n] int32, by expert."""

    def __init__(
        self,
        shared: Shared,
        plan: Plan,
        wait_stats: torch.Tensor | None,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        geometry: Geometry,
        form: Form,
        packed: Packed,
        recv_stats: torch.Tensor | None,
    ):
        super().__init__(shared, plan, wait_stats)
        self._x = x
        self._topk_idx = topk_idx
        self._geometry = geometry
        self._form = form
        self._packed = packed
        self._recv_stats = recv_stats
        self.agreement = agreement_of(
            DISPATCH, geometry, form.dtype, form.scale_dtype, int(form.round_scale), topk_idx.dtype
        )

    def _publish(self) -> Post:
        geometry, form, x = self._geometry, self._form, self._x
        offset, row_bytes = self.plan.set_offset(self.number), geometry.row_bytes(form)
        rows = self.shared.bytes(offset, x.size(0) * row_bytes).view(-1, row_bytes)
        if form.use_fp8:
            first, stop = geometry.scales_offset, geometry.scales_offset + 4 * geometry.num_groups
            q = rows[:, : geometry.hidden].view(torch.float8_e4m3fn)
            self.shared.caster.cast(x, q, rows[:, first:stop].view(torch.float32), form.round_scale)
        else:
            rows.view(torch.bfloat16)[:, : geometry.hidden] = x
        selections = kernels.select(self._topk_idx, geometry.num_experts)
        self.shared.table(self.number, geometry.num_experts).copy_(selections.counts)
        num_sent = selections.keys.numel()
        tokens = self.shared.bytes(offset + geometry.places_offset(form), 4 * num_sent).view(torch.int32)
        tokens.copy_(selections.keys % max(1, x.size(0)))
        return Post(x.size(0), self.shared.base(offset))

    def _fetch(self, posts: dict[int, Post]) -> None:
        geometry, packed = self._geometry, self._packed
        arrivals = self._arrivals(posts)
        blocks, tokens = arrivals.blocks, arrivals.tokens
        counts = blocks.expert_counts.tolist()
        columns, atlas = self._atlas_rows()
        kernels.fetch_rows(packed.x.view(columns), atlas, arrivals.places, counts)
        if packed.scales is not None:
            self._fetch_scales(packed.scales, arrivals.places, counts)
        packed.src_info.view(-1).index_copy_(0, blocks.rows_apart(geometry.num_rows), tokens.int())
        packed.num_rows.copy_(blocks.expert_counts)
        packed.layout_range.copy_(blocks.layout_range())

    def _finish(self) -> None:
        if self._recv_stats is not None:
            self._recv_stats.add_(self._packed.num_rows)

    def _atlas_rows(self) -> tuple[torch.dtype, torch.Tensor]:
        """The widest elements that rows can be fetched in, and the atlas in them."""
        num_bytes = self._geometry.hidden * self._form.dtype.itemsize
        dtype = widest_dtype(num_bytes, self._packed.x.data_ptr())
        return dtype, self.shared.atlas.rows(num_bytes // dtype.itemsize, dtype)

    def _fetch_scales(self, scales: torch.Tensor, places: torch.Tensor, counts: list[int]) -> None:
        geometry = self._geometry
        atlas = self.shared.atlas.rows(geometry.num_groups, torch.float32, geometry.scales_offset)
        values = atlas.index_select(0, places)
        kernels.spread_rows(scales, quant.pack_ue8m0(values) if self._form.use_ue8m0 else values, counts)

    def _arrivals(self, posts: dict[int, Post]) -> _Arrivals:
        """Who sends what to this rank's experts, out of the peers' tables. Checked: it becomes addresses."""
        geometry, row_bytes = self._geometry, self._geometry.row_bytes(self._form)
        num_local, ranks = geometry.num_local_experts, list(posts)
        first = self.shared.window.rank * num_local
        tables = torch.stack([self._peer_table(rank, post, geometry.num_experts) for rank, post in posts.items()])
        counts = torch.zeros(geometry.num_ranks, num_local, dtype=torch.int64)
        counts[ranks] = tables[:, first : first + num_local]
        blocks = kernels.Blocks.of(counts.t().contiguous())
        starts, sizes = tables[:, :first].sum(1).tolist(), counts.sum(1)
        listed = [
            self._peer_tokens(rank, post, start, start + size)
            for (rank, post), start, size in zip(posts.items(), starts, sizes[ranks].tolist(), strict=True)
        ]
        tokens, limits = torch.cat(listed).long(), sizes.new_zeros(geometry.num_ranks)
        limits[ranks] = limits.new_tensor([post.num_rows for post in posts.values()])
        if not bool(((tokens >= 0) & (tokens < limits.repeat_interleave(sizes))).all()):
            raise self._spoiled()
        bases = torch.zeros_like(limits)
        bases[ranks] = bases.new_tensor(
            [self._peer_place(rank, post, post.num_rows * row_bytes) for rank, post in posts.items()]
        )
        places = bases.repeat_interleave(sizes).add_(tokens, alpha=row_bytes // GRAIN_BYTES)
        rows = kernels.rows_by_rank(blocks)
        return _Arrivals(
            blocks,
            torch.empty_like(tokens).scatter_(0, rows, tokens),
            torch.empty_like(places).scatter_(0, rows, places),
        )

    def _spoiled(self) -> SpoiledError:
        return SpoiledError(f"{self.name}: a peer's table makes no sense. This is a bug: report it")

    def _peer_tokens(self, rank: int, post: Post, start: int, stop: int) -> torch.Tensor:
        """Some of the tokens that a peer has listed, int32, where they lie."""
        geometry = self._geometry
        if not 0 <= start <= stop <= post.num_rows * geometry.num_topk:
            raise self._spoiled()
        segment, offset = post.base
        base = Base(segment, offset + geometry.places_offset(self._form) + 4 * start)
        mapping = self.shared.window.peers[rank].mapping(base, base.offset + 4 * (stop - start))
        return mapping.rows(base.offset, 1, stop - start, torch.int32)[0]


class _Arrivals(NamedTuple):
    """What comes to this rank's experts.

    Attributes:
        blocks: How many rows for which expert from which rank.
        tokens: [n] int64, the token of each row at its source.
        places: [n] int64, the place of each row.
    """

    blocks: kernels.Blocks
    tokens: torch.Tensor
    places: torch.Tensor
