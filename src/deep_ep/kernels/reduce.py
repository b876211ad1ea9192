"""Summing the rows of a token out of the peers' memory.

Shape letters: T tokens, R ranks, H elements of a row, K columns of a table of slots, S tensors that rows are taken
from, m rows that are added. FP32 accumulation (FP64 for FP64 rows), biases first, then columns in ascending order, one
rounding at the end: the result does not depend on tiles, threads or timing.

A sum without biases begins with 0.0, so that a token whose rows are all -0.0 gets 0.0. A *part* of a sum, which will be
added to something, begins with -0.0: that changes no number, not even the sign of a zero.

There are three ways, which give the same bits:

    _sum_few          few tokens: all sums are widened at once, and each source is added by one operator
    _sum_in_turn      few sources, whose rows lie side by side: one source after the other, in small tiles of tokens
    sum_in_registers  everything else, in larger tiles: rows are widened, source by source, and `embedding_bag` adds
                      them, which keeps the sum of a token in registers

`reduce_rows` and `sum_rows` choose the first, or `RowSums`, which plans the other two.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch

from ..errors import EPError
from .blocks import peer_tokens
from .script import Scripted

_TILE_BYTES = 1 << 22  # of the rows of a tile: fewer tiles cost less than rows that leave a core's cache
_UNIT_BYTES = 1 << 19  # of widened sums, which are worth a step of their own
_MOST_IN_TURN = 2  # sources; with so few, small tiles that stay in a core's own cache save more than registers do
_ALL = torch.empty(0, dtype=torch.int64, device="cpu")  # stands for the indices of rows that lie side by side


def reduce_rows(
    out: torch.Tensor,
    peers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    shifts: Sequence[int],
    biases: Sequence[torch.Tensor] = (),
    scratch: Scratch | None = None,
) -> None:
    """Sum each token's rows.

    `out[t] = sum(biases[t]) + sum(peers[d][slots[t, d] + shifts[d]] for d with slots[t, d] >= 0)`

    Args:
        out: [T, H], written.
        peers: R tensors [rows, H] of out's dtype, the peers' rows.
        slots: [T, R] int32; -1 where a peer has no row of the token. Ascending without gaps down each column.
        shifts: What to add to the slots of each peer.
        biases: Tensors [T, H] of out's dtype, added first and in order.
        scratch: Working memory, which calls use again; None: it is allocated.

    Raises:
        EPError: A peer has no such rows.

    Example:
        One token, slots `[[2, -1]]`, shifts `[-2, 0]`, peer 0's row 0 is `[1, 2]`, bias `[[10, 10]]`: out is `[[11,
        12]]`.
    """
    if not out.numel():
        return
    if out.size(0) > tokens_per_unit(out.size(1), out.dtype):
        RowSums(peers, slots, shifts, biases, scratch=scratch).sum(out)
        return
    columns = slots.t()
    token_idx, blocks = peer_tokens(columns >= 0), []
    for rows, tokens, last, shift in zip(peers, token_idx, columns.amax(1).tolist(), shifts, strict=True):
        stop = last + 1 + shift if tokens.numel() else 0
        blocks.append(_block(rows, stop - tokens.numel(), stop))
    _sum_few(out, blocks, token_idx, biases)


def sum_rows(
    out: torch.Tensor,
    rows: torch.Tensor,
    token_idx: torch.Tensor,
    counts: Sequence[int],
    biases: Sequence[torch.Tensor] = (),
) -> None:
    """Sum each token's rows, as `reduce_rows` does, where all rows lie together: those of peer 0, then those of peer 1,
    and so on. For few tokens it takes few operators.

    Args:
        out: [T, H], written.
        rows: [m, H] of out's dtype.
        token_idx: [m] int64, their tokens, ascending within a peer.
        counts: R numbers of rows, m together.
        biases: Tensors [T, H] of out's dtype, added first and in order.
    """
    if out.size(0) > tokens_per_unit(out.size(1), out.dtype):
        slots = token_idx.new_full((out.size(0), len(counts)), -1)
        for column, tokens in zip(slots.unbind(1), token_idx.split(list(counts)), strict=True):
            column[tokens] = torch.arange(tokens.numel(), device="cpu")
        RowSums(rows.split(list(counts)), slots, [0] * len(counts), biases).sum(out)
        return
    _sum_few(out, [rows], [token_idx], biases)


def _sum_few(
    out: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    token_idx: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
) -> None:
    """Sum the rows of blocks that follow on each other in the order of addition. All sums are widened at once."""
    wide = _accumulator(out.dtype)
    total = biases[0].to(wide, copy=True) if biases else torch.zeros_like(out, dtype=wide)
    for bias in biases[1:]:
        total.add_(bias)
    for rows, tokens in zip(blocks, token_idx, strict=True):
        total.index_add_(0, tokens, rows.to(wide))  # on the CPU in the order of the rows, one after the other
    out.copy_(total)


def _block(rows: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """Return rows [first, stop) of a peer."""
    if not 0 <= first <= stop <= rows.size(0):
        raise EPError(f"combine: rows {first} to {stop} are not among the {rows.size(0)} that a peer offered")
    return rows[first:stop]


def tokens_per_unit(hidden: int, dtype: torch.dtype) -> int:
    """Return how many tokens of sums [T, H] are worth a step of their own, see `RowSums`."""
    return max(1, _UNIT_BYTES // max(1, hidden * _accumulator(dtype).itemsize))


def _accumulator(dtype: torch.dtype) -> torch.dtype:
    """Return the type to add in.

    Words (int32, weights that must keep their bits) are added in FP64, which is exact: where one peer gives a word and
    all others give 0, the sum is that word.
    """
    return torch.float64 if dtype in (torch.float64, torch.int32) else torch.float32


class Scratch:
    """Working memory that is used again: to touch fresh pages costs more than to add in them."""

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._last: tuple[object, tuple[torch.Tensor, torch.Tensor]] | None = None

    def pair(self, num_rows: int, hidden: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two uninitialised tensors [num_rows, hidden]: of the type to add in, and of `dtype`."""
        asked = num_rows, hidden, dtype
        if self._last is None or self._last[0] != asked:
            dtypes = _accumulator(dtype), dtype
            sizes = [num_rows * hidden * one.itemsize for one in dtypes]
            if self._memory.numel() < sum(sizes):
                self._memory = self._memory.new_empty(sum(sizes))
            wide, narrow = self._memory[: sum(sizes)].split(sizes)
            pair = wide.view(dtypes[0]).view(num_rows, hidden), narrow.view(dtype).view(num_rows, hidden)
            self._last = asked, pair
        return self._last[1]


class SumPlan(NamedTuple):
    """Which rows are added for which token, by tiles of tokens.

    Rows are in the order of tokens, those of a token in the order in which they are added.

    Attributes:
        cuts: The first token of each tile, and T.
        firsts: The first row of each tile, and m.
        starts: [T] int64, the first row of each token, counted from the first of its tile.
        order: [m] int64, where each row lies among those of its tile, if they lie by source.
        bounds: For each source, the first of its rows of each tile, and the number of its rows.
    """

    cuts: list[int]
    firsts: list[int]
    starts: torch.Tensor
    order: torch.Tensor
    bounds: list[list[int]]

    @classmethod
    def of(
        cls, counts: np.ndarray, source_idx: np.ndarray, grouped: np.ndarray, num_sources: int, cuts: list[int]
    ) -> SumPlan:
        """Plan the sums.

        Args:
            counts: [T] int64, the rows of each token.
            source_idx: [m] int64, the source of each row.
            grouped: [m] int64, the order that brings the rows together by source.
            num_sources: S.
            cuts: The first token of each tile, and T.

        Example:
            Two tokens of a tile, with a row of source 0 and 1 each: `firsts` is `[0, 4]`, `starts` `[0, 2]`, `order`
            `[0, 2, 1, 3]`, `bounds` `[[0, 2], [0, 2]]`.
        """
        ends = np.concatenate([[0], counts.cumsum()])
        firsts = ends[cuts]
        num_tiles, sizes = len(cuts) - 1, np.diff(firsts)
        starts = ends[:-1] - firsts[:-1].repeat(np.diff(cuts))
        order = np.arange(len(source_idx))
        tile_idx = np.arange(num_tiles).repeat(sizes)
        numbers = np.bincount(source_idx * num_tiles + tile_idx, minlength=num_sources * num_tiles)
        numbers = numbers.reshape(num_sources, num_tiles)
        bounds = np.zeros((num_sources, num_tiles + 1), dtype=np.int64)
        numbers.cumsum(1, out=bounds[:, 1:])
        # By source and tile lie the rows that the tile has side by side, behind those of the sources before.
        behind = numbers.cumsum(0) - numbers
        places = (behind - numbers.cumsum().reshape(numbers.shape) + numbers).ravel().repeat(numbers.ravel())
        order[grouped] = places + np.arange(len(source_idx))
        return cls(cuts, firsts.tolist(), torch.from_numpy(starts), torch.from_numpy(order), bounds.tolist())


class RowSums:
    """The sums of all tokens, planned once and made for ranges of tokens; see `reduce_rows`.

    Args:
        peers: R tensors [rows, H], the peers' rows, read when a sum is made.
        slots: [T, K] int32 or int64, the row of each column; -1 where a column has none.
        shifts: What to add to the slots of each peer.
        biases: Tensors [T, H] of the same dtype, added first and in order.
        owners: [T, K] int32, the peer of each column. None: column d is peer d's.
        scratch: Working memory, which calls use again; None: it is allocated.
        unit: Sums are made of so many tokens at a time, or of a multiple of them. None: of all tokens at once.
        is_part: The sums will be added to something; a token without rows or biases gets -0.0.

    Raises:
        EPError: A peer has no such rows.

    Example:
        One token, slots `[[0, 2]]`, owners `[[1, 0]]`: its sum is row 0 of peer 1, and row 2 of peer 0 added to it.
    """

    def __init__(
        self,
        peers: Sequence[torch.Tensor],
        slots: torch.Tensor,
        shifts: Sequence[int],
        biases: Sequence[torch.Tensor] = (),
        *,
        owners: torch.Tensor | None = None,
        scratch: Scratch | None = None,
        unit: int | None = None,
        is_part: bool = False,
    ):
        self._scratch = scratch or Scratch()
        self._zero = -0.0 if is_part or biases else 0.0
        table = slots.numpy()
        is_added = table >= 0
        columns = is_added.nonzero()[1]
        peer_idx = columns if owners is None else owners.numpy()[is_added]
        row_idx = table[is_added] + np.asarray(shifts, dtype=np.int64)[peer_idx]
        counts = is_added.sum(1)
        source_idx = peer_idx + len(biases)
        if biases:
            row_idx, source_idx = _with_biases(len(biases), counts, row_idx, source_idx)
            counts += len(biases)
        grouped = source_idx.astype(np.int16).argsort(kind="stable")  # of 16 bits it takes a tenth of the time
        self._sources, self._row_idx = _rows_of_sources([*biases, *peers], row_idx[grouped], source_idx)
        hidden, dtype = peers[0].size(1), peers[0].dtype
        lie_together = all(rows is _ALL for rows in self._row_idx)
        self._in_turn = owners is None and len(self._sources) <= _MOST_IN_TURN and lie_together
        most = int(counts.max(initial=1))
        tile = (
            tokens_per_unit(hidden, dtype) if self._in_turn else tokens_per_tile(hidden, dtype, most, not lie_together)
        )
        cuts = tile_cuts(len(table), tile, unit)
        self._plan = SumPlan.of(counts, source_idx, grouped, len(self._sources), cuts)
        self._tile_idx = _tile_idx(counts, grouped, self._plan) if self._in_turn else []

    def sum(self, out: torch.Tensor, first: int = 0) -> None:
        """Sum the rows of some tokens.

        Args:
            out: [n, H], written: the sums of tokens `first` to `first + n`.
            first: The first token. It, and the token behind the last one, are multiples of `unit`, or the end.
        """
        if not out.numel():
            return
        cuts, firsts, starts, order, bounds = self._plan
        begin, end = bisect_left(cuts, first), bisect_left(cuts, first + out.size(0))
        assert (cuts[begin], cuts[end]) == (first, first + out.size(0)), (cuts, first, out.size(0))
        tiles = slice(begin, end + 1)
        cuts, firsts, bounds = cuts[tiles], firsts[tiles], [one[tiles] for one in bounds]
        if self._in_turn:
            tokens = max(stop - start for start, stop in pairwise(cuts))
            both, _ = self._scratch.pair(2 * tokens, out.size(1), out.dtype)
            _sum_in_turn(out, self._sources, self._tile_idx, cuts, bounds, self._zero, both[:tokens], both[tokens:])
            return
        rows = max(stop - start for start, stop in pairwise(firsts))
        scratch = self._scratch.pair(rows, out.size(1), out.dtype)
        sum_in_registers(
            out, self._sources, self._row_idx, cuts, firsts, starts, order, bounds, None, self._zero, *scratch
        )


def _tile_idx(counts: np.ndarray, grouped: np.ndarray, plan: SumPlan) -> list[torch.Tensor]:
    """Return, for each source, the tokens of its rows, counted from the first of their tile."""
    inside = np.arange(len(counts)) - np.asarray(plan.cuts[:-1]).repeat(np.diff(plan.cuts))
    tokens = torch.from_numpy(inside.repeat(counts)[grouped])
    return list(tokens.split([bounds[-1] for bounds in plan.bounds]))


def _with_biases(
    num_biases: int, counts: np.ndarray, row_idx: np.ndarray, source_idx: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Put the biases of each token before its rows: source s has its row number t for token t."""
    ends = counts.cumsum()
    before = (ends - counts).repeat(num_biases)
    tokens = np.arange(len(counts)).repeat(num_biases)
    biases = np.tile(np.arange(num_biases), len(counts))
    return np.insert(row_idx, before, tokens), np.insert(source_idx, before, biases)


def _rows_of_sources(
    sources: Sequence[torch.Tensor], row_idx: np.ndarray, source_idx: np.ndarray
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return the rows of each source, and which of them are added: all of them where they lie side by side.

    Args:
        sources: S tensors.
        row_idx: [m] int64, by source.
        source_idx: [m] int64, in any order.
    """
    rows, indices, start = [], [], 0
    for source, count in zip(sources, np.bincount(source_idx, minlength=len(sources)).tolist(), strict=True):
        wanted = row_idx[start : start + count]
        start += count
        first, stop = (int(wanted.min()), int(wanted.max()) + 1) if count else (0, 0)
        block = _block(source, first, stop)
        lies_together = bool((np.diff(wanted) == 1).all())
        rows.append(block if lies_together else source)
        indices.append(_ALL if lies_together else torch.from_numpy(wanted))
    return rows, indices


def tokens_per_tile(hidden: int, dtype: torch.dtype, most: int, are_gathered: bool) -> int:
    """Return the tokens of a tile.

    Args:
        hidden: H.
        dtype: The type of the rows.
        most: Most rows of a token.
        are_gathered: Rows are gathered before they are widened, which takes memory, too.
    """
    element_bytes = _accumulator(dtype).itemsize + (dtype.itemsize if are_gathered else 0)
    return max(1, _TILE_BYTES // max(1, hidden * most * element_bytes))


def tile_cuts(num_tokens: int, tile: int, unit: int | None = None) -> list[int]:
    """Cut tokens into units, and units into tiles.

    Example:
        7 tokens in tiles of 3 and units of 4: `[0, 3, 4, 7]`.
    """
    unit = max(1, unit or num_tokens)
    units = range(0, num_tokens, unit)
    return [first for start in units for first in range(start, min(start + unit, num_tokens), tile)] + [num_tokens]


@Scripted
def _sum_in_turn(
    out: torch.Tensor,
    sources: list[torch.Tensor],
    tile_idx: list[torch.Tensor],
    cuts: list[int],
    bounds: list[list[int]],
    zero: float,
    total: torch.Tensor,
    wide: torch.Tensor,
) -> None:
    """Tile by tile: add the rows of one source after the other, round the sums. For few sources.

    Args:
        out: [T, H] of the tokens of these tiles.
        sources: Of each source its rows, of each token one at most.
        tile_idx: Of each source the tokens of its rows, counted from the first of their tile.
        cuts: See `SumPlan`, of these tiles.
        bounds: Likewise.
        zero: What a sum begins with, 0.0 or -0.0.
        total: Scratch for the sums of a tile.
        wide: The same, for rows.
    """
    for index in range(len(cuts) - 1):
        tokens = cuts[index + 1] - cuts[index]
        part = out[cuts[index] - cuts[0] : cuts[index + 1] - cuts[0]]
        if len(sources) == 2:
            one, other = bounds[0][index], bounds[1][index]
            if bounds[0][index + 1] - one == tokens and bounds[1][index + 1] - other == tokens:
                # Two rows each: one addition in their own type rounds as a wide one would. The sum is a negative zero
                # only if both are, and then `zero` decides.
                torch.add(sources[0][one : one + tokens], sources[1][other : other + tokens], out=part)
                if out.is_floating_point():
                    part.add_(zero)
                continue
        total[:tokens].fill_(zero)
        for source, rows in enumerate(sources):
            start, stop = bounds[source][index], bounds[source][index + 1]
            if start < stop:
                total[:tokens].index_add_(0, tile_idx[source][start:stop], wide[: stop - start].copy_(rows[start:stop]))
        part.copy_(total[:tokens])


@Scripted
def sum_in_registers(
    out: torch.Tensor,
    sources: list[torch.Tensor],
    row_idx: list[torch.Tensor],
    cuts: list[int],
    firsts: list[int],
    starts: torch.Tensor,
    order: torch.Tensor,
    bounds: list[list[int]],
    weights: torch.Tensor | None,
    zero: float,
    wide: torch.Tensor,
    narrow: torch.Tensor,
) -> None:
    """Tile by tile: widen the rows, sum them, round the sums.

    Args:
        out: [T, H] of the tokens of these tiles.
        sources: Of each source its rows, in order, or the rows that it takes some of.
        row_idx: Of each source which rows, int64; empty: all of them.
        cuts: See `SumPlan`, of these tiles.
        firsts: Likewise.
        starts: Likewise, of all tiles.
        order: Likewise.
        bounds: Likewise, of these tiles.
        weights: [m] float32, what each row is multiplied by: a product and its sum are rounded once. None: nothing.
        zero: What a sum of nothing is. If -0.0, so is a sum of negative zeros alone, which is 0.0 otherwise.
        wide: Scratch for the widened rows of a tile.
        narrow: The same, of out's dtype.
    """
    keeps_zeros = math.copysign(1.0, zero) < 0  # TorchScript takes its own -0.0 and 0.0 for one constant
    words = torch.int64 if wide.dtype == torch.float64 else torch.int32
    negative_zero = wide.new_full([1], zero).view(dtype=words)  # the least of all words
    for index in range(len(cuts) - 1):
        first, last = firsts[index], firsts[index + 1]
        begin, end = cuts[index], cuts[index + 1]
        part = out[begin - cuts[0] : end - cuts[0]]
        if first == last:
            part.fill_(zero)
        else:
            filled = 0
            for source, rows in enumerate(sources):
                start, stop = bounds[source][index], bounds[source][index + 1]
                if start < stop:
                    space = wide[filled : filled + stop - start]
                    filled += stop - start
                    if row_idx[source].numel() == 0:
                        space.copy_(rows[start:stop])
                    else:
                        wanted = row_idx[source][start:stop]
                        space.copy_(torch.index_select(rows, 0, wanted, out=narrow[: stop - start]))
            widened, bags = wide[:filled], starts[begin:end]
            sums = sum_tile(widened, order[first:last], bags, None if weights is None else weights[first:last])
            if keeps_zeros:
                numbers = torch.diff(bags, append=bags.new_full([1], last - first))
                has_negative_zero = widened.view(dtype=words).amin() == negative_zero
                if bool((has_negative_zero | (numbers.amin() == 0)).item()):
                    # Sums begin with 0.0. One of rows that all have a sign is 0.0 only if all of them are -0.0.
                    signs = torch.copysign(torch.ones_like(wide[0]), widened, out=widened)
                    are_negative = sum_tile(signs, order[first:last], bags, None) == -numbers.unsqueeze(1)
                    sums.masked_fill_((sums == 0).logical_and(are_negative), zero)
            part.copy_(sums)


def sum_tile(
    rows: torch.Tensor, order: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor | None
) -> torch.Tensor:
    """Sum the rows of each token of a tile, see `SumPlan`: weighted, if there are weights, beginning with 0.0."""
    return torch.embedding_bag(rows, order, starts, False, 0, False, weights)[0]
