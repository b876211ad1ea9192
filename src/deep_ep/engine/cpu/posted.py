"""Small calls: a rank posts its rows on its board, beside its header, so a peer that can read the header can read the
rows.

The sections follow each other, each aligned to a cache line. How many rows a rank posts follows from the counts,
so their offsets need not be sent. `docs/protocol.md` says why a call that all ranks post ends with its first wait.
Bytes are moved by address: with so few of them, the overhead of every operator matters.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ...errors import EPError
from ...kernels.rows import row_bytes
from ...sizing import align
from .call import Call

_LINE_BYTES = 64


class Block(NamedTuple):
    """Rows side by side among those that a rank posts.

    Attributes:
        num_posted: How many it posts.
        first: The first of the block.
        num_rows: Rows of the block.
    """

    num_posted: int
    first: int
    num_rows: int


def section_starts(num_rows: int, widths: Sequence[int]) -> list[int]:
    """The first byte of each section of posted rows, and at the end the bytes of all.

    Args:
        num_rows: Rows that are posted.
        widths: Bytes of a row of each section.

    Example:
        3 rows of 10 bytes, and of 30: `[0, 64, 192]`.
    """
    starts = [0]
    for width in widths:
        starts.append(starts[-1] + align(num_rows * width, _LINE_BYTES))
    return starts


def post_rows(call: Call, num_rows: int, parts: Sequence[torch.Tensor]) -> None:
    """Post the first `num_rows` rows of contiguous matrices, one for each section."""
    _require_rows(call, num_rows, parts)
    widths = [row_bytes(part) for part in parts]
    for part, start, width in zip(parts, section_starts(num_rows, widths), widths, strict=False):
        call.window.board.write_rows(call.epoch, start, part.data_ptr(), num_rows * width)


def fetch_rows(call: Call, blocks: Sequence[Block], outs: Sequence[torch.Tensor]) -> None:
    """Fetch a block from each rank's board.

    Args:
        call: The call.
        blocks: One for each rank.
        outs: For each section a contiguous matrix, whose first rows are written, block behind block.
    """
    _require_rows(call, sum(block.num_rows for block in blocks), outs)
    widths = [row_bytes(out) for out in outs]
    addresses = [out.data_ptr() for out in outs]
    num_before = 0
    for peer, block in zip(call.window.peers, blocks, strict=True):
        starts = section_starts(block.num_posted, widths)
        for start, width, address in zip(starts, widths, addresses, strict=False):
            target = address + num_before * width
            peer.board.read_rows(call.epoch, start + block.first * width, target, block.num_rows * width)
        num_before += block.num_rows


def _require_rows(call: Call, num_rows: int, parts: Sequence[torch.Tensor]) -> None:
    """Check that the rows lie inside a board: they are moved by address, and a handle may have any content."""
    if any(part.size(0) < num_rows for part in parts):
        raise EPError(
            f"{call}: the handle counts {num_rows} rows, there are {min(part.size(0) for part in parts)}. "
            "Pass the handle as dispatch returned it"
        )
