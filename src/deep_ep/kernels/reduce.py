"""Summing the rows of a token out of the peers' memory.

Shape letters: T tokens, R ranks, H elements of a row. FP32 accumulation (FP64 for FP64 rows), biases first, then
peers in ascending order, one rounding at the end: the result does not depend on tiles, threads or timing.

A sum without biases begins with 0.0, so that a token whose rows are all -0.0 gets 0.0. A *part* of a sum, which will be
added to something, begins with -0.0: that changes no number, not even the sign of a zero.

`reduce_rows` also sums words, in their own type: of a column that all peers but one give as 0, that one's bits.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import torch

from ..errors import EPError
from .blocks import peer_tokens, tile_bounds
from .script import Scripted

_SMALL_ELEMENTS = 1 << 14  # of sums: for fewer, memory is quickly had
_TILE_BYTES = 1 << 19  # of accumulators: they and the rows being added stay in a core's cache


def reduce_rows(
    out: torch.Tensor,
    peers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    shifts: Sequence[int],
    biases: Sequence[torch.Tensor] = (),
) -> None:
    """Sum each token's rows.

    `out[t] = sum(biases[t]) + sum(peers[d][slots[t, d] + shifts[d]] for d with slots[t, d] >= 0)`

    Args:
        out: [T, H], written.
        peers: R tensors [rows, H] of out's dtype, the peers' rows.
        slots: [T, R] int32; -1 where a peer has no row of the token. Ascending without gaps down each column.
        shifts: What to add to the slots of each peer.
        biases: Tensors [T, H] of out's dtype, added first and in order.

    Example:
        One token, slots `[[2, -1]]`, shifts `[-2, 0]`, peer 0's row 0 is `[1, 2]`, bias `[[10, 10]]`: out is `[[11,
        12]]`.
    """
    if out.numel():
        RowSums(peers, slots, shifts).sum(out, 0, biases)


def reduce_columns(
    out: torch.Tensor,
    peers: Sequence[torch.Tensor],
    owners: torch.Tensor,
    slots: torch.Tensor,
    shifts: Sequence[int],
    biases: Sequence[torch.Tensor] = (),
    zero: float = 0.0,
) -> None:
    """Sum each token's rows in the order of its columns.

    `out[t] = sum(biases[t]) + sum(peers[d][slots[t, k] + shifts[d]] for k with slots[t, k] >= 0)`, d = `owners[t, k]`

    Args:
        out: [T, H], written.
        peers: R tensors [rows, H] of out's dtype, the peers' rows.
        owners: [T, K] int32, the peer of each column.
        slots: [T, K] int32; -1 where a column has no row.
        shifts: What to add to the slots of each peer.
        biases: Tensors [T, H] of out's dtype, added first and in order.
        zero: What a sum without biases begins with, 0.0 or -0.0.

    Raises:
        EPError: A peer has no such rows.

    Example:
        One token, owners `[[1, 0]]`, slots `[[0, 2]]`: out is row 0 of peer 1, and row 2 of peer 0 added to it.
    """
    if not out.numel():
        return
    slots, owners = _without_gaps(slots, owners)
    token_idx: list[torch.Tensor] = []
    row_idx: list[torch.Tensor] = []
    sources: list[torch.Tensor] = []
    for column in range(slots.size(1)):
        for peer, rows in enumerate(peers):
            tokens = ((slots[:, column] >= 0) & (owners[:, column] == peer)).nonzero()[:, 0]
            if not tokens.numel():
                continue
            wanted = slots[tokens, column].long() + shifts[peer]
            if int(wanted.min()) < 0 or int(wanted.max()) >= rows.size(0):
                raise EPError(
                    f"combine: rows {int(wanted.min())} to {int(wanted.max())} are not among the {rows.size(0)} "
                    "that a peer offered"
                )
            token_idx.append(tokens)
            row_idx.append(wanted)
            sources.append(rows)
    tile = min(out.size(0), tile_tokens(out))
    bounds = tile_bounds(token_idx, out.size(0), tile)
    total = out.new_empty((tile, out.size(1)), dtype=_accumulator(out))
    _sum_column_tiles(out, sources, row_idx, [one % tile for one in token_idx], bounds, list(biases), zero, total)


def _without_gaps(slots: torch.Tensor, owners: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The columns of each token that have rows, side by side and in their order: [T, most of a token].

    Example:
        Slots `[[-1, 4, -1], [2, -1, 3]]` become `[[4, -1], [2, 3]]`.
    """
    has_row = slots >= 0
    most = int(has_row.sum(1).amax())
    if most == slots.size(1):
        return slots, owners
    order = (~has_row).to(torch.uint8).argsort(dim=1, stable=True)[:, :most]
    return slots.gather(1, order), owners.gather(1, order)


class Scratch:
    """Accumulators that are used again: memory fresh from the system costs more than to add in it."""

    def __init__(self) -> None:
        self._pairs: dict[tuple[int, int, torch.dtype], tuple[torch.Tensor, torch.Tensor]] = {}

    def pair(self, like: torch.Tensor, num_tokens: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return two uninitialised tensors [num_tokens, H], for rows like these."""
        key = (num_tokens, like.size(1), dtype)
        if key not in self._pairs:
            one, other = (like.new_empty(key[:2], dtype=dtype) for _ in range(2))
            self._pairs[key] = (one, other)
        return self._pairs[key]


class RowSums:
    """The sums of tokens, for callers that want them a few tokens at a time; see `reduce_rows`.

    Args:
        peers: R tensors [rows, H]: the peers' rows, read when a sum is made.
        slots: [T, R] int32.
        shifts: What to add to the slots of each peer.
        scratch: Where to add.
        is_part: The sums will be added to something; a token without rows or biases gets -0.0.

    Raises:
        EPError: A peer has no such rows.
    """

    def __init__(
        self,
        peers: Sequence[torch.Tensor],
        slots: torch.Tensor,
        shifts: Sequence[int],
        scratch: Scratch | None = None,
        is_part: bool = False,
    ):
        self._scratch = scratch
        self._zero = -0.0 if is_part else 0.0
        self._num_tokens = slots.size(0)
        self._token_idx, self._blocks = _blocks(peers, slots, shifts) if self._num_tokens else ([], [])
        self._names: list[list[int]] | None = None
        self._tiles: tuple[list[torch.Tensor], list[list[int]]] | None = None  # index and bounds for `_sum_tiles`

    def sum(self, out: torch.Tensor, first: int, biases: Sequence[torch.Tensor] = ()) -> None:
        """Sum the rows of some tokens.

        Args:
            out: [n, H], written: the sums of tokens `first` to `first + n`.
            first: The first token.
            biases: Tensors [n, H] of out's dtype, added first and in order.
        """
        last = first + out.size(0)
        if not out.numel():
            return
        if (first, last) == (0, self._num_tokens):
            _sum_blocks(out, self._blocks, self._token_idx, biases, self._scratch, self._zero)
        elif (
            self._scratch is not None
            and first % (tile := tile_tokens(out)) == 0
            and (last % tile == 0 or last == self._num_tokens)
        ):
            self._sum_whole_tiles(out, first // tile, -(-last // tile), biases, self._scratch)
        else:
            self._sum_some(out, first, last, biases)

    def _sum_whole_tiles(
        self, out: torch.Tensor, first: int, last: int, biases: Sequence[torch.Tensor], scratch: Scratch
    ) -> None:
        """Sum tiles [first, last) of all tokens' tiles: their indices are computed once for all of them."""
        tile = tile_tokens(out)
        if self._tiles is None:
            tile_idx = [tokens % tile for tokens in self._token_idx]
            self._tiles = tile_idx, tile_bounds(self._token_idx, self._num_tokens, tile)
        tile_idx, bounds = self._tiles
        bounds = [one[first : last + 1] for one in bounds]
        pair = scratch.pair(out, tile, _accumulator(out))
        _sum_tiles(out, self._blocks, tile_idx, bounds, list(biases), self._zero, *pair)

    def _sum_some(self, out: torch.Tensor, first: int, last: int, biases: Sequence[torch.Tensor]) -> None:
        """Sum tokens [first, last), wherever tiles begin."""
        if self._names is None:
            self._names = [tokens.tolist() for tokens in self._token_idx]
        spans = [slice(bisect_left(names, first), bisect_left(names, last)) for names in self._names]
        blocks = [rows[span] for rows, span in zip(self._blocks, spans, strict=True)]
        token_idx = [tokens[span] - first for tokens, span in zip(self._token_idx, spans, strict=True)]
        _sum_blocks(out, blocks, token_idx, biases, self._scratch, self._zero)


def sum_rows(
    out: torch.Tensor,
    rows: torch.Tensor,
    token_idx: torch.Tensor,
    counts: Sequence[int],
    biases: Sequence[torch.Tensor] = (),
) -> None:
    """Sum each token's rows, as `reduce_rows` does, where all rows lie together: those of peer 0, then those of peer 1,
    and so on.

    Args:
        out: [T, H], written.
        rows: [m, H] of out's dtype.
        token_idx: [m] int64, their tokens, ascending within a peer.
        counts: R numbers of rows, m together.
        biases: Tensors [T, H] of out's dtype, added first and in order.
    """
    accumulate = _accumulator(out)
    if out.size(0) > tile_tokens(out):
        _sum_blocks(out, rows.split(list(counts)), token_idx.split(list(counts)), biases)
        return
    total = _sum_biases(out, biases, accumulate)
    total.index_add_(0, token_idx, rows.to(accumulate))  # on the CPU in the order of the rows, one after the other
    out.copy_(total)


def _blocks(
    peers: Sequence[torch.Tensor], slots: torch.Tensor, shifts: Sequence[int]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """For each peer, the tokens that have a row there, and these rows, which lie side by side."""
    columns = slots.t()
    token_idx, blocks = peer_tokens(columns >= 0), []
    last_slots = columns.amax(1).tolist()
    for rows, tokens, last, shift in zip(peers, token_idx, last_slots, shifts, strict=True):
        count = tokens.numel()
        first = last + 1 - count + shift if count else 0
        blocks.append(rows[first : first + count])
        if first < 0 or blocks[-1].size(0) != count:
            raise EPError(
                f"combine: rows {first} to {first + count} are not among the {rows.size(0)} that a peer offered"
            )
    return token_idx, blocks


def _sum_blocks(
    out: torch.Tensor,
    blocks: Sequence[torch.Tensor],
    token_idx: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor],
    scratch: Scratch | None = None,
    zero: float = 0.0,
) -> None:
    """Sum each peer's rows of these tokens: in tiles, or, where there is only a small one, with fewer operators."""
    accumulate = _accumulator(out)
    num_tokens, tile = out.size(0), tile_tokens(out)
    if num_tokens <= tile and (scratch is None or out.numel() < _SMALL_ELEMENTS):
        total = _sum_biases(out, biases, accumulate, zero)
        for rows, tokens in zip(blocks, token_idx, strict=True):
            total.index_add_(0, tokens, rows.to(accumulate))
        out.copy_(total)
        return
    _sum_tiles(
        out,
        list(blocks),
        [tokens % tile for tokens in token_idx],
        tile_bounds(token_idx, num_tokens, tile),
        list(biases),
        zero,
        *(scratch or Scratch()).pair(out, tile, accumulate),
    )


def _accumulator(out: torch.Tensor) -> torch.dtype:
    return out.dtype if out.dtype in (torch.float64, torch.int32) else torch.float32


def tile_tokens(out: torch.Tensor) -> int:
    """Return the tokens of a tile of sums [T, H]. Callers that sum a few tokens at a time should use whole tiles."""
    return max(1, _TILE_BYTES // max(1, out.size(1) * _accumulator(out).itemsize))


def _sum_biases(
    out: torch.Tensor, biases: Sequence[torch.Tensor], accumulate: torch.dtype, zero: float = 0.0
) -> torch.Tensor:
    total = biases[0].to(accumulate, copy=True) if biases else torch.full_like(out, zero, dtype=accumulate)
    for bias in biases[1:]:
        total.add_(bias.to(accumulate))
    return total


@Scripted
def _sum_tiles(
    out: torch.Tensor,
    blocks: list[torch.Tensor],
    tile_idx: list[torch.Tensor],
    bounds: list[list[int]],
    biases: list[torch.Tensor],
    zero: float,
    total: torch.Tensor,
    wide: torch.Tensor,
) -> None:
    """Tile by tile: sum biases and blocks in `total`, round into `out`.

    Args:
        out: [T, H].
        blocks: For each peer, its rows of these tokens, in their order.
        tile_idx: For each peer, the index in its tile of each row's token, int64.
        bounds: For each peer, the first row of each tile, and the number of rows.
        biases: [T, H] each.
        zero: What a sum without biases begins with, 0.0 or -0.0.
        total: [tile, H] scratch, the accumulators.
        wide: [tile, H] scratch, rows in the accumulators' type.
    """
    tile = total.size(0)
    for index in range(len(bounds[0]) - 1):
        start = index * tile
        stop = min(start + tile, out.size(0))
        part = total[: stop - start]
        if len(blocks) == 2 and len(biases) == 0:
            one, other = bounds[0][index], bounds[1][index]
            if bounds[0][index + 1] - one == stop - start and bounds[1][index + 1] - other == stop - start:
                # Two rows each: one addition in their own type rounds as a wide one would. The sum is a negative zero
                # only if both are, and then `zero` decides.
                torch.add(
                    blocks[0][one : one + stop - start], blocks[1][other : other + stop - start], out=out[start:stop]
                )
                if out.is_floating_point():
                    out[start:stop].add_(zero)
                continue
        if len(biases) == 0:
            part.fill_(zero)
        for order, bias in enumerate(biases):
            if order == 0:
                part.copy_(bias[start:stop])
            else:
                part.add_(wide[: stop - start].copy_(bias[start:stop]))
        for peer in range(len(blocks)):
            first, last = bounds[peer][index], bounds[peer][index + 1]
            if first < last:
                part.index_add_(0, tile_idx[peer][first:last], wide[: last - first].copy_(blocks[peer][first:last]))
        out[start:stop].copy_(part)


@Scripted
def _sum_column_tiles(
    out: torch.Tensor,
    sources: list[torch.Tensor],
    row_idx: list[torch.Tensor],
    tile_idx: list[torch.Tensor],
    bounds: list[list[int]],
    biases: list[torch.Tensor],
    zero: float,
    total: torch.Tensor,
) -> None:
    """Tile by tile: sum biases and blocks in `total`, round into `out`. A block has each token once.

    Args:
        out: [T, H].
        sources: For each block, the rows that it takes some of.
        row_idx: For each block, which ones, int64.
        tile_idx: For each block, the index in its tile of each row's token, int64.
        bounds: For each block, the first row of each tile, and the number of rows.
        biases: [T, H] each.
        zero: What a sum without biases begins with.
        total: [tile, H] scratch, the accumulators.
    """
    tile = total.size(0)
    for index in range((out.size(0) + tile - 1) // tile):
        start = index * tile
        stop = min(start + tile, out.size(0))
        part = total[: stop - start]
        if len(biases) > 0:
            part.copy_(biases[0][start:stop])
        else:
            part.fill_(zero)
        for number in range(1, len(biases)):
            part.add_(biases[number][start:stop].to(total.dtype))
        for block in range(len(sources)):
            first, last = bounds[block][index], bounds[block][index + 1]
            if first < last:
                found = torch.index_select(sources[block], 0, row_idx[block][first:last])
                part.index_add_(0, tile_idx[block][first:last], found.to(total.dtype))
        out[start:stop].copy_(part)
