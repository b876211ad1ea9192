"""Far memory as the engine uses it: the words and the rows of this rank, and how a call lays rows there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....errors import EPTransportError
from ....kernels.rail import FarPlaces, FarRows
from ....sizing import align
from ....transport.device import Part
from ....transport.far import DOORBELL_WORDS, MOST_CHUNKS, MOST_SECTIONS, FarLayout
from .couriers import Courier

_SECTION_BYTES = 16  # sections begin at multiples of this
_GROWTH_BYTES = 1 << 20


class Far:
    """The far memory of a rank.

    Args:
        layout: Of the words.
        words: [n] int64.
        num_bytes: Of rows, of outbox and landing together. All ranks say the same.

    Attributes:
        places: Where the words are, for kernels.
        courier: Set once it is there.
    """

    courier: Courier

    def __init__(self, layout: FarLayout, words: torch.Tensor, num_bytes: int):
        self.layout = layout
        self.places = FarPlaces(words, layout.doorbells, DOORBELL_WORDS, layout.landed, MOST_CHUNKS)
        self._first_bytes = num_bytes
        self._pieces: list[Part] = []

    def start(self, courier: Courier) -> None:
        """Begin with the first piece of rows. All ranks call it together.

        Raises:
            EPTransportError: Some rank has no memory for it; all ranks raise.
        """
        self.courier = courier
        self._add_piece(self._first_bytes // 2)

    @property
    def half_bytes(self) -> int:
        """Bytes of the outbox, and of the landing."""
        return self._pieces[-1].memory.numel() // 2

    @property
    def memory(self) -> torch.Tensor:
        """[2 B] uint8, the rows."""
        return self._pieces[-1].memory

    def rows(self, widths: Sequence[int]) -> FarRows:
        """How rows of these widths are laid: as many of them as there is room for, so that all ranks do it alike.

        Args:
            widths: Bytes of a row of each section; 0: it does not travel.
        """
        capacity, offsets, start = self.capacity(widths), [], 0
        for width in widths:
            offsets.append(start)
            start += align(capacity * width, _SECTION_BYTES)
        zeros = (0,) * (MOST_SECTIONS - len(widths))
        first, second, third = (*offsets, *zeros)
        return FarRows(len(self._pieces) - 1, self.half_bytes, (*widths, *zeros), (first, second, third))  # type: ignore[arg-type]

    def capacity(self, widths: Sequence[int]) -> int:
        """Rows of these widths that the outbox holds, and the landing."""
        return max(0, self.half_bytes - MOST_SECTIONS * _SECTION_BYTES) // max(1, sum(widths))

    def make_room(self, num_rows: int, row_bytes: int) -> bool:
        """Have room for so many rows. All ranks call it together, with the same numbers; never inside a capture."""
        needed = num_rows * row_bytes + MOST_SECTIONS * _SECTION_BYTES
        return needed <= self.half_bytes or self._grow(needed)

    def _grow(self, half_bytes: int) -> bool:
        try:
            self._add_piece(half_bytes)
        except EPTransportError:
            return False
        return True

    def _add_piece(self, half_bytes: int) -> None:
        """Add a piece. Those before stay: graphs that were captured know them."""
        self._pieces.append(self.courier.grow(2 * align(max(1, half_bytes), _GROWTH_BYTES)))
