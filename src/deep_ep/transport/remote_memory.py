"""Remote memory as a proxy reads and writes it: its words, its rows, and where incoming rows are written."""

from __future__ import annotations

import ctypes
import struct
from collections import deque

import torch

from ..errors import EPTransportError
from .links import Page, Pool
from .remote import GONE, HAS_FAILED, RemoteLayout
from .words import Word, word_type

_WORD_BYTES = 8
_RECORD = struct.Struct("<7Q")  # of a failure: code, epoch, operation, subject, seen, expected, origin


class RemoteWords:
    """The words of a rank's remote memory.

    Args:
        layout: Where they are.
        words: [layout.num_words] int64 in memory of the host.
    """

    def __init__(self, layout: RemoteLayout, words: torch.Tensor):
        if words.dtype != torch.int64 or words.device.type != "cpu" or words.shape != (layout.num_words,):
            raise ValueError(f"proxy: words must be [{layout.num_words}] int64 on the CPU, got {words.shape}")
        self.layout = layout
        self._words = words  # held: everything below is an address
        self._array = (ctypes.c_ubyte * words.nbytes).from_address(words.data_ptr())
        self._view = memoryview(self._array).cast("B")
        self._word_type = word_type()

    def word(self, index: int) -> Word:
        """Return a word that is stored with release and loaded with acquire."""
        return self._word_type(self._array, _WORD_BYTES * index)

    def read(self, index: int, num_words: int) -> bytes:
        """Return a copy of some words."""
        return bytes(self._view[_WORD_BYTES * index : _WORD_BYTES * (index + num_words)])

    def write(self, index: int, data: bytes | memoryview) -> None:
        """Overwrite some words, in no particular order. A word that publishes them must be stored afterwards."""
        self._view[_WORD_BYTES * index : _WORD_BYTES * index + len(data)] = data

    def write_failure(self, rank: int, record: bytes | memoryview, word: int = HAS_FAILED) -> None:
        """Show kernels that wait that a rank has failed, or refused a call. The first cause of a failure stays.

        Args:
            rank: The rank.
            record: What happened.
            word: The word that goes with it.
        """
        line = self.layout.failure(rank)
        told = self.word(line)
        if told.load_acquire() != HAS_FAILED:
            self.write(line + 1, record)
            told.store_release(word)

    def write_gone(self, rank: int, origin: int) -> None:
        """Show kernels that wait that the connection to a rank is gone."""
        self.write_failure(rank, _RECORD.pack(GONE, 0, 0, 1 << min(rank, 62), 0, 0, origin))


class RemotePieces:
    """The rows of a rank's remote memory. Pieces are added by one thread and used by another."""

    def __init__(self) -> None:
        self._pieces: list[tuple[torch.Tensor, memoryview]] = []

    def add(self, memory: torch.Tensor) -> None:
        """Add the next piece.

        Raises:
            ValueError: It is not a contiguous byte tensor on the CPU.
        """
        if (
            memory.dtype != torch.uint8
            or memory.device.type != "cpu"
            or not memory.is_contiguous()
            or not memory.numel()
        ):
            raise ValueError(f"proxy: rows must be some uint8 on the CPU, got {memory.dtype} {tuple(memory.shape)}")
        array = (ctypes.c_ubyte * memory.numel()).from_address(memory.data_ptr())
        self._pieces.append((memory, memoryview(array).cast("B")))

    def view(self, piece: int, start: int, num_bytes: int) -> memoryview:
        """Return bytes of a piece, in place.

        Raises:
            EPTransportError: There are no such bytes.
        """
        # The numbers may come from another rank: none is negative, since all were read as unsigned.
        available = self._pieces[piece][1].nbytes if piece < len(self._pieces) else 0
        if start + num_bytes > available:
            raise EPTransportError(
                f"proxy: rows must lie in a piece, seen bytes [{start}, {start + num_bytes}) of piece {piece}, "
                f"which has {available}"
            )
        return self._pieces[piece][1][start : start + num_bytes]


class ReceivePages:
    """Memory for the payloads of a link: rows that are due are received straight into remote memory, all else in pages.

    Only a frame's length is known when its page is taken. So the reader of the frame has to check `was_due`.

    Args:
        most_bytes: The longest payload that is not rows.

    Attributes:
        due: Where the next rows go, in this order.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self.due: deque[memoryview] = deque()
        self._latest: memoryview | None = None
        self._pool = Pool(2)

    def take(self, num_bytes: int) -> Page:
        """Return an uninitialised page of `num_bytes`.

        Raises:
            EPTransportError: There are no rows of that length due, and nothing else is that long.
        """
        self._latest = self.due.popleft() if self.due and self.due[0].nbytes == num_bytes else None
        if self._latest is not None:
            return Page(self._latest, num_bytes)
        if num_bytes > self._most_bytes:
            raise EPTransportError(f"proxy: at most {self._most_bytes} bytes can follow, or rows that are due")
        return self._pool.take(num_bytes)

    def was_due(self, page: Page) -> bool:
        """Return whether the page taken last is that of rows that were due."""
        return page.memory is self._latest

    def give(self, page: Page) -> None:
        """Take back a page that has been read, and that was not due."""
        if not self.was_due(page):
            self._pool.give(page)
