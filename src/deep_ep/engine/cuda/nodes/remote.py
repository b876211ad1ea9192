"""Remote memory as the engine uses it: the words and the rows of this rank, and how a call lays rows there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ....errors import EPTransportError
from ....kernels.rail import RemoteContext, RemoteRowLayout
from ....sizing import align
from ....transport.device import Part
from ....transport.remote import DOORBELL_WORDS, MOST_CHUNKS, MOST_SECTIONS, RemoteLayout
from .proxies import Proxy

_SECTION_BYTES = 16  # sections begin at multiples of this
_GROWTH_BYTES = 1 << 20


class RemoteMemory:
    """The remote memory of a rank.

    Args:
        layout: The layout of the words.
        words: [n] int64.
        num_bytes: Bytes of rows, of outbox and receive buffer together; the same on all ranks.

    Attributes:
        context: Where the words are, for kernels.
        proxy: Set once it is there.
    """

    proxy: Proxy

    def __init__(self, layout: RemoteLayout, words: torch.Tensor, num_bytes: int):
        self.layout = layout
        self.context = RemoteContext(words, layout.doorbells, DOORBELL_WORDS, layout.arrived, MOST_CHUNKS)
        self._first_bytes = num_bytes
        self._pieces: list[Part] = []

    def start(self, proxy: Proxy) -> None:
        """Begin with the first piece of rows. All ranks call it together.

        Raises:
            EPTransportError: Some rank has no memory for it; all ranks raise.
        """
        self.proxy = proxy
        self._add_piece(self._first_bytes // 2)

    @property
    def outbox_bytes(self) -> int:
        """Bytes of the outbox, and of the receive buffer."""
        return self._pieces[-1].memory.numel() // 2

    @property
    def memory(self) -> torch.Tensor:
        """The rows, [2 B] uint8: outbox and receive buffer of B bytes each."""
        return self._pieces[-1].memory

    def rows(self, widths: Sequence[int]) -> RemoteRowLayout:
        """Return the layout of rows of these widths.

        It is for as many rows as fit, so that it is the same on all ranks.

        Args:
            widths: Bytes of a row of each section; 0: it does not travel.
        """
        capacity, offsets, start = self.capacity(widths), [], 0
        for width in widths:
            offsets.append(start)
            start += align(capacity * width, _SECTION_BYTES)
        zeros = (0,) * (MOST_SECTIONS - len(widths))
        first, second, third = (*offsets, *zeros)
        return RemoteRowLayout(len(self._pieces) - 1, self.outbox_bytes, (*widths, *zeros), (first, second, third))  # type: ignore[arg-type]

    def capacity(self, widths: Sequence[int]) -> int:
        """Rows of these widths that the outbox holds, and the receive buffer."""
        return max(0, self.outbox_bytes - MOST_SECTIONS * _SECTION_BYTES) // max(1, sum(widths))

    def reserve(self, num_rows: int, row_bytes: int) -> bool:
        """Have memory for at least `num_rows` rows.

        All ranks call it together, with the same numbers; never inside a capture.
        """
        needed = num_rows * row_bytes + MOST_SECTIONS * _SECTION_BYTES
        return needed <= self.outbox_bytes or self._grow(needed)

    def _grow(self, outbox_bytes: int) -> bool:
        try:
            self._add_piece(outbox_bytes)
        except EPTransportError:
            return False
        return True

    def _add_piece(self, outbox_bytes: int) -> None:
        """Add a piece of memory. Earlier pieces stay allocated: captured graphs may use them."""
        self._pieces.append(self.proxy.grow(2 * align(max(1, outbox_bytes), _GROWTH_BYTES)))
