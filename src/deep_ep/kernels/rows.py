"""Putting rows into the peers' slots.

Shape letters: T tokens, R ranks, W bytes of a row. A *section* is one matrix of bytes with a row per token (payload,
scales, records); all sections of a call follow the same slots. Nothing is signalled here: a put is complete when the
launcher returns (on a
stream: in stream order), and the signal is the caller's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ..errors import EPError
from .script import scripted

_TILE_BYTES = 1 << 19  # of rows: read once from memory, then from a core's cache for every further peer


class Section(NamedTuple):
    """One kind of rows of a call.

    Attributes:
        rows: [T, W] uint8, this rank's rows.
        peers: R tensors [capacity, W] uint8, where each peer takes rows of this kind.
    """

    rows: torch.Tensor
    peers: Sequence[torch.Tensor]


class Lane(NamedTuple):
    """Which slots of a peer are sent in a round, and how far its rows lie from their slots.

    Attributes:
        begin: First slot of the round.
        end: Slot after its last.
        shift: Slot s is written to row `s + shift`: 0 where rows go straight to their place.
    """

    begin: int
    end: int
    shift: int


def put_rows(sections: Sequence[Section], slots: torch.Tensor, lanes: Sequence[Lane], first_peer: int) -> list[int]:
    """Write each token's rows to every peer that takes it, at its slot.

    Row t goes to peer d if `lanes[d].begin <= slots[t, d] < lanes[d].end`, to row `slots[t, d] + lanes[d].shift`.

    Args:
        sections: What to write.
        slots: [T, R] int32; -1 where a token is not sent. Ascending without gaps down each column.
        lanes: The part of each peer's slots that is due now.
        first_peer: The peer to begin with, so that not all ranks write to the same one first.

    Returns:
        How many rows each peer got.

    Example:
        Slots `[[5, 7], [-1, 8]]` and lanes `(0, 9, 0), (8, 9, -8)`: token 0 goes to row 5 of peer 0, token 1 to row 0
        of peer 1.
    """
    return _put_rows_torch(sections, slots, lanes, first_peer)


def _put_rows_torch(
    sections: Sequence[Section], slots: torch.Tensor, lanes: Sequence[Lane], first_peer: int
) -> list[int]:
    num_peers = len(lanes)
    num_rows = [0] * num_peers
    blocks = []
    columns = slots.t().contiguous()
    for step in range(num_peers):
        peer = (first_peer + step) % num_peers
        begin, end, shift = lanes[peer]
        column = columns[peer]
        token_idx = ((column >= begin) & (column < end)).nonzero().view(-1)
        if token_idx.numel() == 0:
            continue
        # The slots of a column ascend without gaps, so the rows of a lane are one block at the peer.
        first = int(column[token_idx[0]]) + shift
        num_rows[peer] = token_idx.numel()
        blocks.append((peer, first, token_idx))
    for section in sections:
        _put_section(section, slots.size(0), blocks)
    return num_rows


def _put_section(section: Section, num_tokens: int, blocks: list[tuple[int, int, torch.Tensor]]) -> None:
    """Put one kind of rows: tile by tile, each tile to all peers, so that a token is read from memory once."""
    targets = [section.peers[peer][first : first + token_idx.numel()] for peer, first, token_idx in blocks]
    for target, (peer, first, token_idx) in zip(targets, blocks, strict=True):
        if first < 0 or target.size(0) != token_idx.numel():
            raise EPError(f"dispatch: slots {first}.. are not among the rows that rank {peer} offered")
    dtype = _widest(section.rows, *targets)
    tile = max(1, _TILE_BYTES // section.rows.size(1))
    starts = torch.arange(0, num_tokens + tile, tile, device=section.rows.device)
    _put_tiles(
        rows_as(section.rows, dtype),
        [rows_as(target, dtype) for target in targets],
        [token_idx for _, _, token_idx in blocks],
        [torch.searchsorted(token_idx, starts).tolist() for _, _, token_idx in blocks],
        len(starts) - 1,
    )


@scripted
def _put_tiles(
    rows: torch.Tensor,
    targets: list[torch.Tensor],
    token_idx: list[torch.Tensor],
    bounds: list[list[int]],
    num_tiles: int,
) -> None:
    """For each tile of tokens, for each block: `target[i] = rows[token_idx[i]]`.

    Args:
        rows: [T, columns], all tokens.
        targets: For each block, where its rows go, in their order.
        token_idx: For each block, the tokens of its rows, ascending int64.
        bounds: For each block, the first row of each tile, and the number of rows.
        num_tiles: How many tiles.
    """
    for tile in range(num_tiles):
        for block in range(len(targets)):
            first, last = bounds[block][tile], bounds[block][tile + 1]
            if first < last:
                torch.index_select(rows, 0, token_idx[block][first:last], out=targets[block][first:last])


def rows_as(rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Contiguous [n, columns] rows in elements of another type, without a copy."""
    columns = rows.size(1) * rows.element_size() // dtype.itemsize
    if rows.numel() == 0:
        return rows.new_empty(rows.size(0), columns, dtype=dtype)
    # By way of one dimension: the strides of a matrix of one row, or one column, are arbitrary and stop `view`.
    return rows.view(-1).view(dtype).view(rows.size(0), columns)


def as_bytes(rows: torch.Tensor) -> torch.Tensor:
    """Contiguous [n, columns] rows as [n, W] uint8, without a copy."""
    return rows_as(rows, torch.uint8)


def _widest(*matrices: torch.Tensor) -> torch.dtype:
    """The widest elements that fit all of these [n, W] uint8 matrices: a copy costs by the element."""
    numbers = [n for rows in matrices for n in (rows.size(1), rows.data_ptr(), rows.storage_offset())]
    for dtype in (torch.int64, torch.int32, torch.int16):
        if all(number % dtype.itemsize == 0 for number in numbers):
            return dtype
    return torch.uint8
