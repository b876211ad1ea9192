"""The two hops of a row: out of this rank's memory into a chunk, and out of a chunk into the ranks of the node."""

from __future__ import annotations

import ctypes
from bisect import bisect_left
from collections.abc import Sequence

import torch

from ....errors import EPError
from ....kernels.blocks import peer_tokens
from ....kernels.rows import row_bytes, rows_as
from ....transport.links import Pieces, Pool
from .traffic import ChunkForm

# Rows of at least this length are sent from where they lie: a copy of them would cost more than to name each.
_LEAST_PIECE_BYTES = 4096
_NOTHING = bytes(16)  # between sections of a chunk there is less than this


class Packer:
    """Makes the chunks of this rank's tokens.

    Args:
        parts: For each section, [T, columns] contiguous.
        form: Of the chunks.
        pool: Where what must be copied goes.
    """

    def __init__(self, parts: Sequence[torch.Tensor], form: ChunkForm, pool: Pool):
        self._parts = parts
        self._form = form
        self._pool = pool
        self._is_named = [row_bytes(part) >= _LEAST_PIECE_BYTES for part in parts]
        self._memory = [bytes_of(part) if named else None for part, named in zip(parts, self._is_named, strict=True)]

    def pack(self, tokens: torch.Tensor, names: Sequence[int]) -> Pieces:
        """Return the chunk of some tokens.

        Args:
            tokens: [n] int64, ascending.
            names: The same numbers, as a list.
        """
        sizes, runs = self._form.sizes(len(names)), runs_of(names)
        page = self._pool.take(sum(size for size, named in zip(sizes, self._is_named, strict=True) if not named))
        copied, pieces, start = page.tensor(), [], 0
        for part, memory, size, width in zip(self._parts, self._memory, sizes, self._form.widths, strict=True):
            if memory is not None:
                pieces += [memory[first * width : last * width] for first, last in runs]
                pieces.append(memoryview(_NOTHING)[: size - len(names) * width])
                continue
            rows = copied[start : start + len(names) * width].view(part.dtype).view(len(names), part.size(1))
            torch.index_select(part, 0, tokens, out=rows)
            pieces.append(page.view()[start : start + size])
            start += size
        # With the parts, whose memory must stay until all of it is sent.
        return Pieces(pieces, page, self._parts)


class FanOut:
    """Writes the rows of a block to the ranks of the node, piece after piece.

    Args:
        slots: [n, P] int32; -1 where a row does not go. Ascending without gaps down each column.
        tables: For each section, P tensors [capacity, columns]: where the ranks take rows.
        rows: [n] int64, for each row of the block its index in what `put` is given; None: `put` is given the block.
        first_peer: The rank to begin with, so that not all write to the same one first.

    Raises:
        EPError: A rank did not offer the slots.
    """

    def __init__(
        self,
        slots: torch.Tensor,
        tables: Sequence[Sequence[torch.Tensor]],
        first_peer: int,
        rows: torch.Tensor | None = None,
    ):
        columns = slots.t()
        self._tokens = peer_tokens(columns >= 0)
        self._names = [tokens.tolist() for tokens in self._tokens]
        self._rows = [tokens if rows is None else rows[tokens] for tokens in self._tokens]
        self._is_relative = rows is None
        self._targets: list[list[torch.Tensor]] = []
        ends = columns.amax(1).tolist() if slots.size(0) else [-1] * slots.size(1)
        self._order = [(first_peer + step) % len(ends) for step in range(len(ends))]
        self._order = [peer for peer in self._order if self._names[peer]]
        for peer, end in enumerate(ends):
            count = len(self._names[peer])
            # Slots of a column ascend without gaps: the last one and their number say which they are.
            first = end + 1 - count
            self._targets.append([table[peer][first : end + 1] for table in tables])
            if first < 0 or any(target.size(0) != count for target in self._targets[-1]):
                raise EPError(f"dispatch: rows {first} to {end + 1} are not among those that rank {peer} offered")

    def put(self, first: int, last: int, parts: Sequence[torch.Tensor]) -> None:
        """Write rows [first, last) of the block, to all ranks that take them.

        Args:
            first: The first row.
            last: The row after the last.
            parts: For each section, the rows; with `rows`, what they are rows of.
        """
        for peer in self._order:
            names = self._names[peer]
            begin, end = bisect_left(names, first), bisect_left(names, last)
            if begin == end:
                continue
            rows = self._rows[peer][begin:end]
            rows = rows - first if self._is_relative else rows
            for part, target in zip(parts, self._targets[peer], strict=True):
                torch.index_select(rows_as(part, target.dtype), 0, rows, out=target[begin:end])


def runs_of(names: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as [first, last) of those that follow each other.

    Example:
        `[3, 4, 5, 9]` is `[(3, 6), (9, 10)]`.
    """
    if names and names[-1] - names[0] == len(names) - 1:
        return [(names[0], names[-1] + 1)]
    runs: list[tuple[int, int]] = []
    for name in names:
        if runs and runs[-1][1] == name:
            runs[-1] = (runs[-1][0], name + 1)
        else:
            runs.append((name, name + 1))
    return runs


def bytes_of(part: torch.Tensor) -> memoryview:
    """The bytes of a contiguous tensor in ordinary memory, in place. It must outlive them."""
    num_bytes = part.numel() * part.element_size()
    if not num_bytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * num_bytes).from_address(part.data_ptr())).cast("B")
