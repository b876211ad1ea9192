"""Low-latency dispatch on the CPU: tokens go to experts."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from .... import quant
from ....kernels.low_latency import rows as kernels
from ....kernels.rows import widest_dtype
from ....transport import Base
from ....transport.sparse import GRAIN_BYTES
from ..calls import DISPATCH, Packed, agreement_of
from ..geometry import NUM_SETS, Geometry, RowFormat, SetPlan, bytes_for_two
from ..slots import FREE_SLOT
from .phases import LocalPost, LowLatencyCall, Posts
from .remote import Outgoing, RemotePost, new_frame
from .shared import Shared, SpoiledError

if TYPE_CHECKING:  # it needs sockets that other systems do not have
    from ....transport.mesh import Mesh


class LowLatencyDispatch(LowLatencyCall):
    """A low-latency dispatch: tokens go to experts.

    A set holds T rows, and behind them the tokens of each expert: [n] int32, by expert.
    """

    def __init__(
        self,
        shared: Shared,
        plan: SetPlan,
        wait_stats: torch.Tensor | None,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        geometry: Geometry,
        form: RowFormat,
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
        self._sent: _Published | None = None
        if plan.takes_slot:
            self.takes, self.wide_bytes = FREE_SLOT, bytes_for_two(geometry, form)
        self.agreement = agreement_of(
            DISPATCH, geometry, form.dtype, form.scale_dtype, int(form.round_scale), topk_idx.dtype
        )

    def _newest_spent(self) -> int:
        newest = super()._newest_spent()
        return newest if self.slot is not None else max(newest, self.number - NUM_SETS)

    def _publish(self) -> LocalPost:
        geometry, form, x = self._geometry, self._form, self._x
        offset, row_bytes = self._offset, geometry.row_bytes(form)
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
        tokens = self.shared.bytes(offset + geometry.expert_slots_offset(form), 4 * num_sent).view(torch.int32)
        # A key is `expert * T + token`.
        tokens.copy_(selections.keys % max(1, x.size(0)))
        self._sent = _Published(rows, selections)
        return LocalPost(x.size(0), self.shared.base(offset))

    def _frame_to(self, mesh: Mesh, rank: int) -> Outgoing:
        """Make the frame for a remote rank: each token that selects one of its experts, once, and the tokens of each
        expert.
        """
        assert self._sent is not None
        geometry, row_bytes, (rows, selections) = self._geometry, self._geometry.row_bytes(self._form), self._sent
        first = rank * geometry.num_local_experts
        counts = selections.counts[first : first + geometry.num_local_experts]
        start, size = int(selections.counts[:first].sum()), int(counts.sum())
        tokens = selections.keys[start : start + size] % max(1, rows.size(0))
        is_wanted = torch.zeros(rows.size(0), dtype=torch.bool, device="cpu")
        is_wanted[tokens] = True
        wanted = is_wanted.nonzero()[:, 0]
        sizes = (counts.numel() * 8, size * 4, size * 4, wanted.numel() * row_bytes)
        frame = new_frame(mesh, self._said, wanted.numel(), size, sizes)
        numbers, listed, indices, data = frame.sections
        numbers.view(torch.int64).copy_(counts)
        listed.view(torch.int32).copy_(tokens)
        indices.view(torch.int32).copy_(is_wanted.cumsum(0)[tokens] - 1)
        torch.index_select(rows, 0, wanted, out=data.view(-1, row_bytes))
        return frame

    def _fetch(self, posts: Posts) -> None:
        geometry, packed = self._geometry, self._packed
        arrivals = self._arrivals(posts)
        blocks, tokens = arrivals.blocks, arrivals.tokens
        counts = blocks.expert_counts.tolist()
        columns, atlas = self._atlas_rows()
        kernels.fetch_rows(packed.x.view(columns), atlas, arrivals.grains, counts)
        if packed.scales is not None:
            self._fetch_scales(packed.scales, arrivals.grains, counts)
        packed.src_info.view(-1).numpy()[blocks.rows_apart(geometry.num_rows).numpy()] = tokens
        packed.num_rows.numpy()[:] = blocks.expert_counts
        packed.layout_range.copy_(blocks.layout_range())
        assert self._sent is not None
        rows_to = self._sent.selections.counts.numpy().reshape(geometry.num_ranks, -1).sum(1)
        self._note(posts, rows_to, blocks.counts.sum(0), geometry.row_bytes(self._form), experts=counts)

    def _finish(self) -> None:
        if self._recv_stats is not None:
            self._recv_stats.add_(self._packed.num_rows)

    def _atlas_rows(self) -> tuple[torch.dtype, torch.Tensor]:
        """Return the widest elements that rows can be fetched in, and the atlas in them."""
        num_bytes = self._geometry.hidden * self._form.dtype.itemsize
        dtype = widest_dtype(num_bytes, self._packed.x.data_ptr())
        return dtype, self.shared.atlas.rows(num_bytes // dtype.itemsize, dtype)

    def _fetch_scales(self, scales: torch.Tensor, grains: torch.Tensor, counts: list[int]) -> None:
        geometry = self._geometry
        atlas = self.shared.atlas.rows(geometry.num_groups, torch.float32, geometry.scales_offset)
        values = atlas.index_select(0, grains)
        kernels.unpack_rows(scales, quant.pack_ue8m0(values) if self._form.use_ue8m0 else values, counts)

    # What each rank sends to this rank's experts ----------------------------------------------------------------------

    def _arrivals(self, posts: Posts) -> _Arrivals:
        """Return what comes, from local ranks' tables and remote ranks' frames.

        It is checked, as it becomes addresses.
        """
        geometry, row_bytes = self._geometry, self._geometry.row_bytes(self._form)
        counts = np.zeros((geometry.num_ranks, geometry.num_local_experts), dtype=np.int64)
        parts = dict(
            sorted({**self._local_parts(posts.local, counts), **self._remote_parts(posts.remote, counts)}.items())
        )
        blocks = kernels.Blocks.of(torch.from_numpy(counts.T.copy()))
        sizes = counts.sum(1)[list(parts)]
        nothing = np.empty(0, dtype=np.int32)  # comes where all ranks are masked
        tokens = np.concatenate([nothing, *(part.tokens for part in parts.values())])
        indices = np.concatenate([nothing, *(part.rows for part in parts.values())]) if posts.remote else tokens
        limits = np.array([part.num_rows for part in parts.values()], dtype=np.int64)
        if not ((indices >= 0) & (indices < limits.repeat(sizes))).all():
            raise self._spoiled()
        bases = np.array([part.grain for part in parts.values()], dtype=np.int64)
        grains = bases.repeat(sizes) + indices.astype(np.int64) * (row_bytes // GRAIN_BYTES)
        # From the order of ranks to that of experts.
        rows, packed_tokens, packed_grains = kernels.rows_by_rank(blocks).numpy(), tokens.copy(), grains.copy()
        packed_tokens[rows], packed_grains[rows] = tokens, grains
        return _Arrivals(blocks, packed_tokens, torch.from_numpy(packed_grains))

    def _local_parts(self, posts: dict[int, LocalPost], counts: np.ndarray) -> dict[int, _Part]:
        """Return what ranks of this node send, by rank. Writes their `counts` [R, L]."""
        if not posts:
            return {}
        geometry, row_bytes = self._geometry, self._geometry.row_bytes(self._form)
        first, num_local = self.shared.rank * geometry.num_local_experts, geometry.num_local_experts
        # Copies, of which everything here is made: a peer that went on may write into its table meanwhile.
        tables = np.stack([self._peer_table(rank, post, geometry.num_experts).numpy() for rank, post in posts.items()])
        mine = tables[:, first : first + num_local]
        counts[list(posts)] = mine
        if (mine < 0).any():
            raise self._spoiled()
        sizes, starts = mine.sum(1).tolist(), tables[:, :first].sum(1).tolist()
        parts = {}
        for (rank, post), start, size in zip(posts.items(), starts, sizes, strict=True):
            tokens = self._peer_tokens(rank, post, start, start + size).numpy()
            grain = self._peer_grain(rank, post, post.num_rows * row_bytes)
            parts[rank] = _Part(tokens, tokens, post.num_rows, grain)
        return parts

    def _remote_parts(self, posts: dict[int, RemotePost], counts: np.ndarray) -> dict[int, _Part]:
        """Return what ranks of other nodes have sent, by rank. Writes their `counts` [R, L]."""
        geometry, row_bytes, parts = self._geometry, self._geometry.row_bytes(self._form), {}
        for rank, post in posts.items():
            sizes = (8 * geometry.num_local_experts, 4 * post.extent, 4 * post.extent)
            numbers, tokens, indices, rows = post.sections((*sizes, post.num_rows * row_bytes))
            amounts, tokens = numbers.view(torch.int64), tokens.view(torch.int32)
            post.require((amounts >= 0) & (amounts <= geometry.max_tokens) & (amounts.sum() == post.extent))
            counts[rank] = amounts.numpy()
            post.require((tokens >= 0) & (tokens < geometry.max_tokens))
            grain = self.shared.atlas.grain_at(rows.data_ptr())
            parts[rank] = _Part(tokens.numpy(), indices.view(torch.int32).numpy(), post.num_rows, grain)
        return parts

    def _spoiled(self) -> SpoiledError:
        return SpoiledError(f"{self.name}: a peer's table is inconsistent. This is a bug: report it")

    def _peer_tokens(self, rank: int, post: LocalPost, start: int, stop: int) -> torch.Tensor:
        """Return some of the tokens that a peer has listed, int32, in place."""
        geometry = self._geometry
        if not 0 <= start <= stop <= post.num_rows * geometry.num_topk:
            raise self._spoiled()
        segment, offset = post.base
        base = Base(segment, offset + geometry.expert_slots_offset(self._form) + 4 * start)
        mapping = self.shared.peer(rank).mapping(base, base.offset + 4 * (stop - start))
        return mapping.rows(base.offset, 1, stop - start, torch.int32)[0]


class _Published(NamedTuple):
    """What was published: the set's rows [T, row_bytes] uint8, and the ranks that get them."""

    rows: torch.Tensor
    selections: kernels.Selections


class _Part(NamedTuple):
    """What one rank sends to this rank's experts.

    Attributes:
        tokens: [n] int32, the token of each selection at its source, by expert.
        rows: [n] int32, its row among those of the rank that are within reach.
        num_rows: How many these are.
        grain: The grain of the first row.
    """

    tokens: np.ndarray
    rows: np.ndarray
    num_rows: int
    grain: int


class _Arrivals(NamedTuple):
    """What comes to this rank's experts.

    Attributes:
        blocks: How many rows for which expert from which rank.
        tokens: [n] int32, the token of each row at its source.
        grains: [n] int64, the grain of each row.
    """

    blocks: kernels.Blocks
    tokens: np.ndarray
    grains: torch.Tensor
