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
        for section in sections:
            block = section.peers[peer][first : first + num_rows[peer]]
            if first < 0 or block.size(0) != num_rows[peer]:
                raise EPError(f"dispatch: slots {first}.. are not among the rows that rank {peer} offered")
            dtype = _widest(section.rows, block)
            torch.index_select(rows_as(section.rows, dtype), 0, token_idx, out=rows_as(block, dtype))
    return num_rows


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
