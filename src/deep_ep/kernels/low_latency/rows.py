"""Low-latency rows on the CPU: which token goes to which expert, cast, gathered from all ranks at once, summed.

Shape letters: R ranks, E experts, L of each rank, T tokens of this rank, K selections of a token, H channels, n rows
that come. A *grain* is a row of the atlas (`transport/sparse.py`): 16 bytes in the memory of any rank. The
GPU's kernels are beside this file.

Routing is computed by NumPy, whose operators take a third of the time of torch's where there are few numbers.
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
import torch

from ... import logfmt, quant
from ..reduce import Scratch, SumPlan, sum_in_registers, sum_tile, tile_cuts, tokens_per_tile
from ..script import Scripted

_TILE_BYTES = 1 << 18  # of float32 rows: they and what they are made of stay in a core's cache
LOGFMT_ROWS = 32  # compressed, or decoded, at a time: what is made on the way stays in a core's cache
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
    ids, num_tokens = topk_idx.numpy(), topk_idx.size(0)
    # A flag for each key, not a sort: it takes a third of the time, and what occurs twice is there once.
    is_selected = np.zeros(num_experts * num_tokens, dtype=np.bool_)
    is_selected[_keys(ids)[is_selection(ids, num_experts)]] = True
    keys = is_selected.nonzero()[0]
    counts = np.bincount(keys // max(1, num_tokens), minlength=num_experts)
    return Selections(torch.from_numpy(keys), torch.from_numpy(counts))


def is_selection(ids: np.ndarray, num_experts: int) -> np.ndarray:
    """Return [T, K] bool: whether an id names an expert."""
    return (ids >= 0) & (ids < num_experts)


def earlier_tokens(topk_idx: torch.Tensor, selections: Selections) -> torch.Tensor:
    """Return [T, K] int64: how many tokens before this one chose its expert. Arbitrary if an id names none."""
    keys, counts = selections.keys.numpy(), selections.counts.numpy()
    experts = topk_idx.numpy().clip(0, counts.size - 1)
    places = np.empty(counts.size * topk_idx.size(0), dtype=np.int64)
    places[keys] = np.arange(keys.size)
    return torch.from_numpy(places[_keys(experts)] - (counts.cumsum() - counts)[experts])


def _keys(ids: np.ndarray) -> np.ndarray:
    num_tokens = ids.shape[0]
    return ids.astype(np.int64) * num_tokens + np.arange(num_tokens)[:, None]


class Blocks(NamedTuple):
    """Rows in blocks, one for each local expert and rank, packed without gaps: by expert, then rank.

    Attributes:
        counts: [L, R] int64, rows of each block.
        starts: [L, R] int64, the first row of each, counted over all blocks.
        expert_counts: [L] int64, rows of each expert.
        expert_starts: [L] int64, the first row of each.
    """

    counts: np.ndarray
    starts: np.ndarray
    expert_counts: np.ndarray
    expert_starts: np.ndarray

    @classmethod
    def of(cls, counts: torch.Tensor) -> Blocks:
        """Make the blocks from the counts [L, R] alone.

        Example:
            Counts `[[1, 2], [0, 3]]` start at `[[0, 1], [3, 3]]`.
        """
        numbers = counts.numpy()
        starts = numbers.cumsum().reshape(numbers.shape) - numbers
        return cls(numbers, starts, numbers.sum(1), starts[:, 0])

    def layout_range(self) -> torch.Tensor:
        """Return [L, R] int64: `count | first row of its expert << 32`."""
        return torch.from_numpy(self.counts | (self.starts - self.expert_starts[:, None]) << 32)

    def rows_apart(self, num_rows: int) -> torch.Tensor:
        """Return [n] int64: where each row lies among [L * num_rows], if every expert has `num_rows`."""
        apart = np.arange(self.expert_counts.size) * num_rows - self.expert_starts
        return torch.from_numpy(_counted(apart, self.expert_counts))


def rows_of_layout(layout_range: torch.Tensor, num_rows: int) -> tuple[Blocks, torch.Tensor]:
    """Return the blocks of a handle, and where among [L * num_rows] their rows lie, [n] int64."""
    blocks = Blocks.of(layout_range & 0xFFFFFFFF)
    firsts = (layout_range.numpy() >> 32) + (np.arange(layout_range.size(0)) * num_rows)[:, None]
    return blocks, torch.from_numpy(_counted(firsts - blocks.starts, blocks.counts))


def rows_by_rank(blocks: Blocks) -> torch.Tensor:
    """Return [n] int64: for rows in the order (rank, expert, token), which row each is in the order of the blocks.

    Example:
        Counts `[[1, 2], [0, 3]]`: rank 0 has row 0, rank 1 rows 1 and 2 of expert 0 and 3 to 5 of expert 1.
    """
    sizes, starts = blocks.counts.T.ravel(), blocks.starts.T.ravel()
    return torch.from_numpy(_counted(starts - (sizes.cumsum() - sizes), sizes))


def _counted(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Return [n]: each value as often as it is counted, plus 0, 1, ... over all of them.

    Example:
        Values `[10, 20]`, counted `[1, 2]`: `[10, 21, 22]`.
    """
    repeated = values.ravel().repeat(counts.ravel())
    repeated += np.arange(repeated.size)
    return repeated


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
    # One operator for all experts: there are few numbers to copy.
    experts = np.arange(len(counts)).repeat(counts)
    first_rows = np.cumsum(counts) - counts
    out.numpy()[experts, _counted(-first_rows, np.asarray(counts))] = rows.numpy()


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


class WeightedSums:
    """Sums each token's rows, weighted: FP32, k ascending, each product and its sum in one rounding, the result in one.

    `reduce.sum_in_registers` does this; `addcmul_` for each k would read and write the sums K times.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

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
            grains: [T, K] int64; not read where a selection is skipped.
            weights: [T, K] float32.
            is_skipped: [T, K] bool.
            ranges: [grains, 2 * G] BF16, the ranges of the rows, which are LogFMT; None: they are BF16.
        """
        (num_tokens, hidden), num_topk = out.shape, grains.size(1)
        if out.numel() == 0 or num_topk == 0:
            out.zero_()
            return
        # Not weights of zero for what is skipped: an infinity times zero would be NaN.
        is_kept = is_skipped.logical_not()
        grains, weights = grains[is_kept], weights[is_kept]
        counts, m = is_kept.numpy().sum(1), grains.numel()
        cuts = tile_cuts(num_tokens, tokens_per_tile(hidden, out.dtype, num_topk, are_gathered=True))
        plan = SumPlan.of(counts, np.zeros(m, dtype=np.int64), np.arange(m), 1, cuts)
        scratch = self._scratch.pair((cuts[1] - cuts[0]) * num_topk, hidden, out.dtype)
        if ranges is not None:
            _sum_logfmt(out, atlas, ranges, grains, weights, plan, *scratch)
        else:
            sum_in_registers(out, [atlas], [grains], *plan, weights, 0.0, *scratch)


def _sum_logfmt(
    out: torch.Tensor,
    atlas: torch.Tensor,
    ranges: torch.Tensor,
    grains: torch.Tensor,
    weights: torch.Tensor,
    plan: SumPlan,
    wide: torch.Tensor,
    narrow: torch.Tensor,
) -> None:
    """Do what `sum_in_registers` does, with LogFMT rows. Its operators are few and long: there is no script."""
    tiles = zip(itertools.pairwise(plan.cuts), itertools.pairwise(plan.firsts), strict=True)
    for (start, stop), (first, last) in tiles:
        part, rows = out[start:stop], wide[: last - first]
        if first == last:
            part.zero_()
            continue
        for begin in range(first, last, LOGFMT_ROWS):
            wanted = grains[begin : min(begin + LOGFMT_ROWS, last)]
            units = torch.index_select(atlas, 0, wanted, out=narrow[: wanted.numel()]).view(torch.uint8)
            decoded = rows[begin - first : begin - first + wanted.numel()]
            logfmt.decode_into(decoded, units, ranges.index_select(0, wanted).unflatten(-1, (-1, 2)))
        part.copy_(sum_tile(rows, plan.order[first:last], plan.starts[start:stop], weights[first:last]))
