"""Low-latency rows on the CPU: which token goes to which expert, cast, gathered from all ranks at once, summed.

Shape letters: R ranks, E experts, L of each rank, T tokens of this rank, K selections of a token, H channels, n rows
that come. A *grain* is a row of the atlas (`transport/sparse.py`): 16 bytes in the memory of any rank. The
GPU's kernels are beside this file.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from ... import logfmt, quant
from ..script import Scripted

_TILE_BYTES = 1 << 18  # of float32 rows: they and what they are made of stay in a core's cache
_NOWHERE = (1 << 63) - 1  # the key of what selects nothing: behind all others
_MAGNITUDE = 0x7FFF  # bits of a BF16 without its sign: as integers, magnitudes are in order
_INFINITY = 0x7F80


# Routing -------------------------------------------------------------------------------------------------------------


class Selections(NamedTuple):
    """The selections of a rank's tokens, each expert of a token once.

    Attributes:
        keys: [n] int64, `expert * T + token`, ascending.
        counts: [E] int64, tokens of each expert.
    """

    keys: torch.Tensor
    counts: torch.Tensor


def select(topk_idx: torch.Tensor, num_experts: int) -> Selections:
    """Sort the selections by expert, then token.

    Args:
        topk_idx: [T, K]; ids outside [0, E) select nothing.
        num_experts: E.

    Example:
        Ids `[[1, 0], [1, -1]]` of 2 experts: keys `[0, 2, 3]`, counts `[1, 2]`.
    """
    num_tokens = topk_idx.size(0)
    # Not torch.unique, which takes many times as long where hardly anything occurs twice.
    keys, _ = _keys(topk_idx).masked_fill_(~is_selection(topk_idx, num_experts), _NOWHERE).flatten().sort()
    is_first = keys != _NOWHERE
    is_first[1:] &= keys[1:] != keys[:-1]
    keys = keys[is_first]
    return Selections(keys, torch.bincount(keys // max(1, num_tokens), minlength=num_experts))


def is_selection(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Return [T, K] bool: whether an id names an expert."""
    return (topk_idx >= 0) & (topk_idx < num_experts)


def earlier_tokens(topk_idx: torch.Tensor, selections: Selections) -> torch.Tensor:
    """Return [T, K] int64: how many tokens before this one chose its expert. Arbitrary if an id names none."""
    experts = topk_idx.clamp(0, selections.counts.numel() - 1).long()
    starts = selections.counts.cumsum(0) - selections.counts
    return torch.searchsorted(selections.keys, _keys(topk_idx)) - starts[experts]


def _keys(topk_idx: torch.Tensor) -> torch.Tensor:
    num_tokens = topk_idx.size(0)
    return topk_idx.long() * num_tokens + torch.arange(num_tokens, device="cpu").unsqueeze(1)


class Blocks(NamedTuple):
    """Rows in blocks, one for each local expert and rank, packed without gaps: by expert, then rank.

    Attributes:
        counts: [L, R] int64, rows of each block.
        starts: [L, R] int64, the first row of each, counted over all blocks.
        expert_counts: [L] int64, rows of each expert.
        expert_starts: [L] int64, the first row of each.
    """

    counts: torch.Tensor
    starts: torch.Tensor
    expert_counts: torch.Tensor
    expert_starts: torch.Tensor

    @classmethod
    def of(cls, counts: torch.Tensor) -> Blocks:
        """Make the blocks from the counts [L, R] alone.

        Example:
            Counts `[[1, 2], [0, 3]]` start at `[[0, 1], [3, 3]]`.
        """
        starts = (counts.flatten().cumsum(0) - counts.flatten()).view_as(counts)
        return cls(counts, starts, counts.sum(1), starts[:, 0])

    def layout_range(self) -> torch.Tensor:
        """Return [L, R] int64: `count | first row of its expert << 32`."""
        return self.counts | (self.starts - self.expert_starts.unsqueeze(1)) << 32

    def repeat(self, values: torch.Tensor) -> torch.Tensor:
        """Return [n]: for each row, the value of its block in [L, R] `values`."""
        return torch.repeat_interleave(values.flatten(), self.counts.flatten())

    def rows_apart(self, num_rows: int) -> torch.Tensor:
        """Return [n] int64: where each row lies among [L * num_rows], if every expert has `num_rows`."""
        apart = torch.arange(self.expert_counts.numel(), device="cpu") * num_rows - self.expert_starts
        return torch.arange(int(self.expert_counts.sum()), device="cpu") + torch.repeat_interleave(
            apart, self.expert_counts
        )


def rows_of_layout(layout_range: torch.Tensor, num_rows: int) -> tuple[Blocks, torch.Tensor]:
    """Return the blocks of a handle, and where among [L * num_rows] their rows lie, [n] int64."""
    blocks = Blocks.of(layout_range & 0xFFFFFFFF)
    firsts = (layout_range >> 32) + (torch.arange(layout_range.size(0), device="cpu") * num_rows).unsqueeze(1)
    rows = blocks.repeat(firsts - blocks.starts)
    return blocks, rows.add_(torch.arange(rows.numel(), device="cpu"))


def rows_by_rank(blocks: Blocks) -> torch.Tensor:
    """Return [n] int64: for rows in the order (rank, expert, token), which row each is in the order of the blocks.

    Example:
        Counts `[[1, 2], [0, 3]]`: rank 0 has row 0, rank 1 rows 1 and 2 of expert 0 and 3 to 5 of expert 1.
    """
    sizes, starts = blocks.counts.t().flatten(), blocks.starts.t().flatten()
    rows = torch.repeat_interleave(starts - (sizes.cumsum(0) - sizes), sizes)
    return rows.add_(torch.arange(rows.numel(), device="cpu"))


# Rows ----------------------------------------------------------------------------------------------------------------


def fetch_rows(out: torch.Tensor, atlas: torch.Tensor, grains: torch.Tensor, counts: list[int]) -> None:
    """Gather rows: `out[e, i]` is the row at the next grain, for each expert e and i < counts[e].

    Args:
        out: [L, rows, columns], written.
        atlas: [grains, columns] of the same dtype.
        grains: [n] int64, by expert.
        counts: L numbers.
    """
    _fetch_rows(out, atlas, grains, counts)


@Scripted
def _fetch_rows(out: torch.Tensor, atlas: torch.Tensor, grains: torch.Tensor, counts: list[int]) -> None:
    start = 0
    for expert, count in enumerate(counts):
        if count > 0:
            torch.index_select(atlas, 0, grains[start : start + count], out=out[expert][:count])
            start += count


def unpack_rows(out: torch.Tensor, rows: torch.Tensor, counts: list[int]) -> None:
    """Copy rows: `out[e, i]` is the next row, for each expert e and i < counts[e].

    Args:
        out: [L, rows, columns], written; any strides.
        rows: [n, columns] of the same dtype.
        counts: L numbers.
    """
    _unpack_rows(out, rows, counts)


@Scripted
def _unpack_rows(out: torch.Tensor, rows: torch.Tensor, counts: list[int]) -> None:
    start = 0
    for expert, count in enumerate(counts):
        if count > 0:
            out[expert][:count].copy_(rows[start : start + count])
            start += count


class Caster:
    """Casts BF16 rows to FP8 as `quant.cast_fp8` does, bit for bit, into given memory and in fewer passes."""

    def __init__(self) -> None:
        self._wide = torch.empty(0, dtype=torch.float32, device="cpu")
        self._magnitudes = torch.empty(0, dtype=torch.int16, device="cpu")

    def cast(self, x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, round_scale: bool) -> None:
        """Cast rows, with scales for each group of 128 channels.

        Args:
            x: [T, H] BF16, contiguous.
            q: [T, H] float8_e4m3fn, written; rows may be apart.
            scales: [T, ceil(H / 128)] float32, written likewise.
            round_scale: Make scales powers of two.
        """
        num_tokens, hidden = x.shape
        if x.numel() == 0:
            return
        if hidden % quant.GROUP_CHANNELS:
            self._cast_plainly(x, q, scales, round_scale)
            return
        groups = x.view(num_tokens, -1, quant.GROUP_CHANNELS)
        self._magnitudes = _at_least(self._magnitudes, x.numel())
        magnitudes = self._magnitudes[: x.numel()].view_as(groups)
        amax = torch.bitwise_and(groups.view(torch.int16), _MAGNITUDE, out=magnitudes).amax(-1)
        if int(amax.max()) > _INFINITY:  # a NaN, which must not count
            self._cast_plainly(x, q, scales, round_scale)
            return
        stored, factors = quant.scales_of(amax.view(torch.bfloat16).float(), round_scale)
        scales.copy_(stored)
        tile = min(num_tokens, max(1, _TILE_BYTES // (4 * hidden)))
        self._wide = _at_least(self._wide, tile * hidden)
        wide = self._wide[: tile * hidden].view(tile, -1, quant.GROUP_CHANNELS)
        # No value is beyond 448 by more than a rounding, which the cast takes back: nothing to clamp.
        _scale_and_cast(groups, factors.unsqueeze(-1), q, wide)

    def _cast_plainly(self, x: torch.Tensor, q: torch.Tensor, scales: torch.Tensor, round_scale: bool) -> None:
        cast, stored = quant.cast_fp8(x, round_scale)
        q.copy_(cast)
        scales.copy_(stored)


@Scripted
def _scale_and_cast(groups: torch.Tensor, factors: torch.Tensor, q: torch.Tensor, wide: torch.Tensor) -> None:
    tile, num_tokens = wide.size(0), groups.size(0)
    for start in range(0, num_tokens, tile):
        stop = min(start + tile, num_tokens)
        part = wide[: stop - start]
        part.copy_(groups[start:stop])
        part.mul_(factors[start:stop])
        q[start:stop].copy_(part.flatten(1))


def _at_least(scratch: torch.Tensor, size: int) -> torch.Tensor:
    """Return scratch of at least that many elements."""
    return scratch if scratch.numel() >= size else scratch.new_empty(size)


# Sums ----------------------------------------------------------------------------------------------------------------


class Summer:
    """Sums each token's rows, weighted: FP32, k ascending, one rounding."""

    def __init__(self) -> None:
        self._wide = torch.empty(0, dtype=torch.float32, device="cpu")

    def sum(
        self,
        out: torch.Tensor,
        atlas: torch.Tensor,
        grains: torch.Tensor,
        weights: torch.Tensor,
        is_skipped: torch.Tensor,
        ranges: torch.Tensor | None = None,
    ) -> None:
        """Compute `out[t] = sum(weights[t, k] * row at grains[t, k] for k that is not skipped)`.

        Args:
            out: [T, H] BF16, written.
            atlas: [grains, H] BF16.
            grains: [T, K] int64; readable, if meaningless, where a selection is skipped.
            weights: [T, K] float32.
            is_skipped: [T, K] bool.
            ranges: [grains, 2 * G] BF16, the ranges of the rows, which are LogFMT; None: they are BF16.
        """
        num_tokens, hidden = out.shape
        if out.numel() == 0:
            return
        tile = min(num_tokens, max(1, _TILE_BYTES // (4 * hidden)))
        self._wide = _at_least(self._wide, 2 * tile * hidden)
        total, wide = self._wide[: 2 * tile * hidden].view(2, tile, hidden)
        # Also the weight: an infinite one times the nothing of a skipped row would be NaN.
        weights = weights.masked_fill(is_skipped, 0.0).t().contiguous().unsqueeze(-1)
        columns = grains.t().contiguous()
        skipped = is_skipped.t().contiguous().unsqueeze(-1)
        has_skipped = is_skipped.any(0).tolist()
        if ranges is not None:
            _sum_logfmt(out, atlas, ranges, columns, weights, skipped, total)
        else:
            narrow = out.new_empty(tile, hidden)
            _sum_tiles(out, atlas, columns, weights, skipped, has_skipped, total, wide, narrow)


@Scripted
def _sum_tiles(
    out: torch.Tensor,
    atlas: torch.Tensor,
    grains: torch.Tensor,
    weights: torch.Tensor,
    skipped: torch.Tensor,
    has_skipped: list[bool],
    total: torch.Tensor,
    wide: torch.Tensor,
    narrow: torch.Tensor,
) -> None:
    """Tile by tile of tokens, k by k: gather, widen, add.

    Args:
        out: [T, H].
        atlas: [grains, H].
        grains: [K, T].
        weights: [K, T, 1].
        skipped: [K, T, 1].
        has_skipped: K times, whether any token skips it.
        total: [tile, H] float32 scratch.
        wide: [tile, H] float32 scratch.
        narrow: [tile, H] scratch of out's dtype.
    """
    tile, num_tokens = total.size(0), out.size(0)
    for start in range(0, num_tokens, tile):
        stop = min(start + tile, num_tokens)
        size = stop - start
        part, rows, gathered = total[:size], wide[:size], narrow[:size]
        part.zero_()
        for k in range(len(has_skipped)):
            torch.index_select(atlas, 0, grains[k, start:stop], out=gathered)
            rows.copy_(gathered)
            if has_skipped[k]:
                rows.masked_fill_(skipped[k, start:stop], 0.0)
            part.addcmul_(rows, weights[k, start:stop])
        out[start:stop].copy_(part)


def _sum_logfmt(
    out: torch.Tensor,
    atlas: torch.Tensor,
    ranges: torch.Tensor,
    grains: torch.Tensor,
    weights: torch.Tensor,
    skipped: torch.Tensor,
    total: torch.Tensor,
) -> None:
    """Do what `_sum_tiles` does, with rows that are LogFMT.

    Decoding takes most of the time, so this is not optimised.
    """
    tile, (num_tokens, hidden) = total.size(0), out.shape
    for start in range(0, num_tokens, tile):
        stop = min(start + tile, num_tokens)
        part = total[: stop - start].zero_()
        for k in range(grains.size(0)):
            wanted = grains[k, start:stop]
            units = atlas.index_select(0, wanted).view(torch.uint8)
            rows = logfmt.decode(units, ranges.index_select(0, wanted).unflatten(-1, (-1, 2)), hidden)
            part.addcmul_(rows.masked_fill_(skipped[k, start:stop], 0.0), weights[k, start:stop])
        out[start:stop].copy_(part)
