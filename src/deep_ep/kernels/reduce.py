"""Summing the rows of a token out of the peers' memory.

Shape letters: T tokens, R ranks, H elements of a row. FP32 accumulation (FP64 for FP64 rows), biases first, then
peers in ascending order, one rounding at the end: the result does not depend on tiles, threads or timing.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..errors import EPError
from .blocks import peer_tokens, tile_bounds
from .script import Scripted

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
    _reduce_rows_torch(out, peers, slots, shifts, biases)


def _reduce_rows_torch(
    out: torch.Tensor,
    peers: Sequence[torch.Tensor],
    slots: torch.Tensor,
    shifts: Sequence[int],
    biases: Sequence[torch.Tensor],
) -> None:
    if out.numel():
        token_idx, blocks = _blocks(peers, slots, shifts)
        _sum_blocks(out, blocks, token_idx, biases)


def sum_rows(
    out: torch.Tensor,
    rows: torch.Tensor,
    token_idx: torch.Tensor,
    counts: Sequence[int],
    biases: Sequence[torch.Tensor] = (),
) -> None:
    """The same where all rows lie together: those of peer 0, then those of peer 1, and so on.

    Args:
        out: [T, H], written.
        rows: [m, H] of out's dtype.
        token_idx: [m] int64, their tokens, ascending within a peer.
        counts: R numbers of rows, m together.
        biases: Tensors [T, H] of out's dtype, added first and in order.
    """
    accumulate = _accumulator(out)
    if out.size(0) > _tile_tokens(out, accumulate):
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
) -> None:
    """Sum each peer's rows of these tokens: in tiles, or, where there is only one, with fewer operators."""
    accumulate = _accumulator(out)
    num_tokens, tile = out.size(0), _tile_tokens(out, accumulate)
    if num_tokens <= tile:
        total = _sum_biases(out, biases, accumulate)
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
        out.new_empty(tile, out.size(1), dtype=accumulate),
        out.new_empty(tile, out.size(1), dtype=accumulate),
    )


def _accumulator(out: torch.Tensor) -> torch.dtype:
    return torch.float64 if out.dtype == torch.float64 else torch.float32


def _tile_tokens(out: torch.Tensor, accumulate: torch.dtype) -> int:
    return max(1, _TILE_BYTES // max(1, out.size(1) * accumulate.itemsize))


def _sum_biases(out: torch.Tensor, biases: Sequence[torch.Tensor], accumulate: torch.dtype) -> torch.Tensor:
    total = biases[0].to(accumulate, copy=True) if biases else torch.zeros_like(out, dtype=accumulate)
    for bias in biases[1:]:
        total.add_(bias.to(accumulate))
    return total


@Scripted
def _sum_tiles(
    out: torch.Tensor,
    blocks: list[torch.Tensor],
    places: list[torch.Tensor],
    bounds: list[list[int]],
    biases: list[torch.Tensor],
    total: torch.Tensor,
    wide: torch.Tensor,
) -> None:
    """Tile by tile: sum biases and blocks in `total`, round into `out`.

    Args:
        out: [T, H].
        blocks: For each peer, its rows of these tokens, in their order.
        places: For each peer, the place in its tile of each row's token, int64.
        bounds: For each peer, the first row of each tile, and the number of rows.
        biases: [T, H] each.
        total: [tile, H] scratch, the accumulators.
        wide: [tile, H] scratch, rows in the accumulators' type.
    """
    tile = total.size(0)
    for index in range(len(bounds[0]) - 1):
        start = index * tile
        stop = min(start + tile, out.size(0))
        part = total[: stop - start]
        if len(biases) == 0:
            part.zero_()
        for order, bias in enumerate(biases):
            if order == 0:
                part.copy_(bias[start:stop])
            else:
                part.add_(wide[: stop - start].copy_(bias[start:stop]))
        for peer in range(len(blocks)):
            first, last = bounds[peer][index], bounds[peer][index + 1]
            if first < last:
                part.index_add_(0, places[peer][first:last], wide[: last - first].copy_(blocks[peer][first:last]))
        out[start:stop].copy_(part)
