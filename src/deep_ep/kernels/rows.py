"""Putting rows into the peers' slots, on the CPU.

Shape letters: T tokens, R ranks. A *section* is one matrix with a row per token (payload, scales, records), in
elements of any type; all sections of a call follow the same slots. A put is complete when the function returns; the
caller signals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import EPError
from .blocks import peer_tokens, tile_bounds
from .script import Scripted

_TILE_BYTES = 1 << 19  # of rows: read once from memory, then from a core's cache for every further peer

_LEAST_BLOCK_ROWS = 16  # of a tile, on average, where there are many blocks: for fewer, an operator costs too much


class Section(NamedTuple):
    """One kind of rows of a call.

    Attributes:
        rows: [T, columns], this rank's rows. `widest_view` says in which elements they are copied fastest.
        peers: R tensors [capacity, columns] of the same dtype, where each peer takes rows of this kind.
    """

    rows: torch.Tensor
    peers: Sequence[torch.Tensor]


class SlotRange(NamedTuple):
    """Which slots of a peer are sent in a round, and how far its rows lie from their slots.

    Attributes:
        begin: First slot of the round.
        end: Slot after its last.
        shift: Slot s is written to row `s + shift`: 0 if rows go straight to their slots.
    """

    begin: int
    end: int
    shift: int


def put_rows(sections: Sequence[Section], slots: torch.Tensor, ranges: Sequence[SlotRange], first_peer: int) -> None:
    """Write each token's rows to every peer that takes it, at its slot.

    Row t goes to peer d if `ranges[d].begin <= slots[t, d] < ranges[d].end`, to row `slots[t, d] + ranges[d].shift`.

    Args:
        sections: What to write.
        slots: [T, R] int32; -1 where a token is not sent. Ascending without gaps down each column.
        ranges: The part of each peer's slots that is due now; all of them are among `slots`.
        first_peer: The peer to begin with, so that not all ranks write to the same one first.

    Raises:
        EPError: The slots do not fill the ranges, or a peer did not offer their rows.

    Example:
        Slots `[[5, 7], [-1, 8]]` and ranges `(5, 6, 0), (8, 9, -8)`: token 0 goes to row 5 of peer 0, token 1 to row 0
        of peer 1.
    """
    token_idx = _tokens_of_ranges(slots, ranges)
    order = [(first_peer + step) % len(ranges) for step in range(len(ranges))]
    order = [peer for peer in order if ranges[peer].end > ranges[peer].begin]
    for section in sections:
        _put_section(section, order, ranges, token_idx)


def put_blocks(rows: torch.Tensor, targets: Sequence[torch.Tensor], token_idx: Sequence[torch.Tensor]) -> None:
    """Write rows of tokens side by side into blocks of the peers' memory, of which there may be many.

    Args:
        rows: [T, columns], this rank's rows.
        targets: For each block [m, columns], where its rows go.
        token_idx: For each block [m] int64, the tokens of its rows, ascending.

    Example:
        Rows `[[5], [6]]`, and a block with tokens `[0, 0, 1]`: it becomes `[[5], [5], [6]]`.
    """
    num_tokens, num_rows = rows.size(0), sum(tokens.numel() for tokens in token_idx)
    if not num_rows:
        return
    # A tile with few rows of each block would be more overhead than copying.
    least = _LEAST_BLOCK_ROWS * len(targets) * num_tokens // num_rows
    tile = max(1, least, _TILE_BYTES // row_bytes(rows))
    _put_tiles(rows, list(targets), list(token_idx), tile_bounds(token_idx, num_tokens, tile))


def lay_rows(
    parts: Sequence[torch.Tensor], is_token_in_rank: torch.Tensor, counts: Sequence[int]
) -> list[torch.Tensor]:
    """Lay each token's rows out once for every peer that takes it: those of peer 0, then those of peer 1, and so on.

    Args:
        parts: For each section [T, columns] of any strides, this rank's rows.
        is_token_in_rank: [T, R] bool.
        counts: How many tokens each peer is to get, m together.

    Returns:
        For each section [m, bytes] uint8.

    Raises:
        EPError: The mask names other numbers of tokens.

    Example:
        Mask `[[1, 1], [0, 1]]` and counts `[1, 2]` lay out the rows of tokens 0, 0, 1.
    """
    columns = is_token_in_rank.t()
    _require_due(counts, columns.sum(1).tolist())
    token_idx = columns.nonzero()[:, 1]
    return [torch.index_select(as_bytes(part.contiguous()), 0, token_idx) for part in parts]


def _tokens_of_ranges(slots: torch.Tensor, ranges: Sequence[SlotRange]) -> list[torch.Tensor]:
    """Return the tokens of each range, ascending."""
    columns, due = slots.t(), [one.end - one.begin for one in ranges]
    token_idx = peer_tokens(columns >= 0)
    if [tokens.numel() for tokens in token_idx] == due:
        return token_idx  # usually ranges are whole: no rank is staged
    limits = slots.new_tensor(ranges)
    token_idx = peer_tokens((columns >= limits[:, :1]) & (columns < limits[:, 1:2]))
    _require_due(due, [tokens.numel() for tokens in token_idx])
    return token_idx


def _require_due(due: Sequence[int], named: Sequence[int]) -> None:
    for peer, (num_rows, num_tokens) in enumerate(zip(due, named, strict=True)):
        if num_tokens != num_rows:
            raise EPError(
                f"dispatch: {num_rows} rows are due for rank {peer}, the slots name {num_tokens}. "
                "Pass the handle as dispatch returned it"
            )


def _put_section(
    section: Section, order: list[int], ranges: Sequence[SlotRange], token_idx: Sequence[torch.Tensor]
) -> None:
    """Put one kind of rows: tile by tile, each tile to all peers, so that a token is read from memory once."""
    rows, targets = section.rows, []
    for peer in order:
        first, last = ranges[peer].begin + ranges[peer].shift, ranges[peer].end + ranges[peer].shift
        targets.append(section.peers[peer][first:last])
        if first < 0 or targets[-1].size(0) != last - first:
            raise EPError(f"dispatch: rows {first} to {last} are not among those that rank {peer} offered")
    tokens = [token_idx[peer] for peer in order]
    num_tokens, tile = rows.size(0), max(1, _TILE_BYTES // row_bytes(rows))
    if num_tokens > tile:
        _put_tiles(rows, targets, tokens, tile_bounds(tokens, num_tokens, tile))
        return
    for target, wanted in zip(targets, tokens, strict=True):
        torch.index_select(rows, 0, wanted, out=target)


@Scripted
def _put_tiles(
    rows: torch.Tensor,
    targets: list[torch.Tensor],
    token_idx: list[torch.Tensor],
    bounds: list[list[int]],
) -> None:
    """For each tile of tokens, for each block: `target[i] = rows[token_idx[i]]`.

    Args:
        rows: [T, columns], all tokens.
        targets: For each block, where its rows go, in their order.
        token_idx: For each block, the tokens of its rows, ascending int64.
        bounds: For each block, the first row of each tile, and the number of rows.
    """
    for tile in range(len(bounds[0]) - 1 if len(bounds) > 0 else 0):
        for block in range(len(targets)):
            first, last = bounds[block][tile], bounds[block][tile + 1]
            if first < last:
                torch.index_select(rows, 0, token_idx[block][first:last], out=targets[block][first:last])


def rows_as(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous [n, columns] rows in elements of another type, without a copy."""
    if rows.dtype == dtype:
        return rows
    columns = rows.size(1) * rows.element_size() // dtype.itemsize
    if rows.size(0) > 1 and rows.size(1) > 1:
        return rows.view(dtype)
    if rows.numel() == 0:
        return rows.new_empty(rows.size(0), columns, dtype=dtype)
    # By way of one dimension: the strides of a matrix of one row, or one column, are arbitrary and stop `view`.
    return rows.view(-1).view(dtype).view(rows.size(0), columns)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Return contiguous [n, columns] rows as [n, W] uint8, without a copy."""
    return rows_as(rows, torch.uint8)


def row_bytes(rows: torch.Tensor) -> int:
    """Return the bytes of a row of [n, columns]."""
    return rows.size(1) * rows.element_size()


def widest_view(rows: torch.Tensor, *offsets: int) -> torch.dtype:
    """Return the widest elements that contiguous rows can be viewed in, if these offsets are multiples of them, too."""
    byte_offset = int(rows.storage_offset()) * rows.element_size()
    return widest_dtype(row_bytes(rows), byte_offset, rows.data_ptr(), *offsets)


def widest_dtype(*num_bytes: int) -> torch.dtype:
    """Return the widest elements that divide all of these lengths and offsets: the cost of a copy is per element."""
    common = math.gcd(8, *num_bytes)
    return {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}[common]
