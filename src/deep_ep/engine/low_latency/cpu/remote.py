"""The frames of a low-latency call: a rank of another node gets one, with just its part of the publication.

A frame begins with what must agree, how often its rank had refused the call, its masks, and two numbers: its rows, and
its *extent* (selections of a dispatch, bytes of the rows of a combine). Sections follow, each at a multiple of 16.
`docs/low-latency.md` has the state table.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from ....sizing import align
from ....transport.links import Page
from ....transport.sparse import GRAIN_BYTES
from ...protocol import Agreement
from .shared import SpoiledError

if TYPE_CHECKING:  # it needs sockets that other systems do not have
    from ....transport.mesh import Mesh

_NUM_AGREED = len(Agreement._fields)


@functools.cache
def _words(num_masks: int) -> struct.Struct:
    """What a frame begins with."""
    return struct.Struct(f"<{_NUM_AGREED + 1 + num_masks + 2}q")


class Outgoing(NamedTuple):
    """A frame to be filled and sent.

    Attributes:
        page: All of it.
        sections: Its sections, uint8.
    """

    page: Page
    sections: list[torch.Tensor]


def new_frame(mesh: Mesh, said: Sequence[int], num_rows: int, extent: int, sizes: Sequence[int]) -> Outgoing:
    """Make a frame, with its words written.

    Args:
        mesh: The mesh that will send it.
        said: The words of what must agree, how often this rank had refused the call, and its masks.
        num_rows: Rows in it.
        extent: A number, by call.
        sizes: Bytes of each section.
    """
    words = _words(len(said) - _NUM_AGREED - 1)
    page = mesh.page(_total(words.size, sizes))
    words.pack_into(page.view(), 0, *said, num_rows, extent)
    return Outgoing(page, _cut(page.tensor(), words.size, sizes))


class RemotePost(NamedTuple):
    """What a remote rank has sent.

    Attributes:
        rank: The rank that has sent it.
        agreed: Its words of what must agree.
        times: How often it had refused the call before.
        masks: Those of its masks.
        num_rows: Rows in the frame.
        extent: A number, by call.
        page: The frame, where it has arrived.
    """

    rank: int
    agreed: list[int]
    times: int
    masks: list[int]
    num_rows: int
    extent: int
    page: Page

    @classmethod
    def of(cls, rank: int, page: Page, num_masks: int) -> RemotePost:
        """Read the words of a frame, of which so many are masks.

        Raises:
            SpoiledError: There are none.
        """
        words = _words(num_masks)
        if page.num_bytes < words.size:
            raise spoiled(rank)
        *said, num_rows, extent = words.unpack_from(page.view())
        agreed, times, masks = said[:_NUM_AGREED], said[_NUM_AGREED], said[_NUM_AGREED + 1 :]
        return cls(rank, agreed, times, masks, num_rows, extent, page)

    def sections(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """Return the sections, uint8, in place.

        Args:
            sizes: Bytes of each, as the numbers of the frame have it.

        Raises:
            SpoiledError: The frame is of another length.
        """
        num_bytes = _words(len(self.masks)).size
        if min(self.num_rows, self.extent) < 0 or _total(num_bytes, sizes) != self.page.num_bytes:
            raise spoiled(self.rank)
        return _cut(self.page.tensor(), num_bytes, sizes)

    def require(self, is_right: torch.Tensor) -> None:
        """Refuse a frame whose numbers are impossible, before they become addresses."""
        if not bool(is_right.all()):
            raise spoiled(self.rank)


def spoiled(rank: int) -> SpoiledError:
    """Return the error for a remote rank's frame that is inconsistent."""
    return SpoiledError(f"low-latency call: the message of rank {rank} is inconsistent. This is a bug: report it")


def _total(words_bytes: int, sizes: Sequence[int]) -> int:
    return sum(align(size, GRAIN_BYTES) for size in (words_bytes, *sizes))


def _cut(memory: torch.Tensor, words_bytes: int, sizes: Sequence[int]) -> list[torch.Tensor]:
    parts = memory.split([align(size, GRAIN_BYTES) for size in (words_bytes, *sizes)])
    return [part[:size] for part, size in zip(parts[1:], sizes, strict=True)]
