"""Rows of a combine in a frame: BF16 without the space for ranges, LogFMT without what compressed units do not use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from .... import logfmt
from ....sizing import align
from ....transport.sparse import GRAIN_BYTES
from ..geometry import Geometry
from .remote import Outgoing, RemotePost, new_frame, spoiled

if TYPE_CHECKING:  # it needs sockets that other systems do not have
    from ....transport.mesh import Mesh, ReceiveArena


class RemoteRows(NamedTuple):
    """The rows that a remote rank's experts have for this rank.

    Attributes:
        counts: [L] int64, rows of each of its experts.
        slots: [n, pitch] uint8: the rows, by expert, each at a multiple of 16.
    """

    counts: torch.Tensor
    slots: torch.Tensor


def plain_frame(
    mesh: Mesh, said: Sequence[int], geometry: Geometry, counts: torch.Tensor
) -> tuple[Outgoing, torch.Tensor]:
    """Make a frame for BF16 rows. Returns it, and where they are to be written: [n, pitch] uint8."""
    num_rows, pitch = int(counts.sum()), _pitch(geometry)
    frame = new_frame(mesh, said, num_rows, num_rows * pitch, (8 * counts.numel(), num_rows * pitch))
    frame.sections[0].view(torch.int64).copy_(counts)
    return frame, frame.sections[1].view(-1, pitch)


def plain_rows(post: RemotePost, geometry: Geometry) -> RemoteRows:
    """Return the BF16 rows of a frame, in place, after checking it."""
    pitch = _pitch(geometry)
    numbers, rows = post.sections((8 * geometry.num_local_experts, post.num_rows * pitch))
    return RemoteRows(_counts(post, numbers), rows.view(-1, pitch))


def logfmt_frame(
    mesh: Mesh, said: Sequence[int], geometry: Geometry, counts: torch.Tensor, slots: torch.Tensor
) -> Outgoing:
    """Make a frame with LogFMT rows.

    Args:
        mesh: The mesh that will send it.
        said: The words of what must agree, and the masks of this rank.
        geometry: The sizes of the call.
        counts: [L] int64, rows of each expert.
        slots: [n, slot_bytes] uint8, as local ranks get them.
    """
    units, ranges = _parts(geometry, slots)
    packed = logfmt.pack_units(units, ranges)
    sizes = (8 * counts.numel(), 2 * ranges.numel(), packed.numel())
    frame = new_frame(mesh, said, slots.size(0), packed.numel(), sizes)
    numbers, beside, rows = frame.sections
    numbers.view(torch.int64).copy_(counts)
    beside.view(torch.bfloat16).view(ranges.shape).copy_(ranges)
    rows.copy_(packed)
    return frame


def logfmt_rows(post: RemotePost, geometry: Geometry, receive_arena: ReceiveArena) -> RemoteRows:
    """Return the LogFMT rows of a frame, as local ranks get them, in a new receive buffer, after checking it."""
    ranges_bytes = 4 * geometry.num_groups * post.num_rows
    numbers, beside, packed = post.sections((8 * geometry.num_local_experts, ranges_bytes, post.extent))
    counts = _counts(post, numbers)
    slots = receive_arena.take(post.num_rows * geometry.slot_bytes).tensor().view(-1, geometry.slot_bytes)
    units, ranges = _parts(geometry, slots)
    ranges.copy_(beside.view(torch.bfloat16).view(ranges.shape))
    try:
        logfmt.unpack_units(packed, ranges, units)
    except ValueError:
        raise spoiled(post.rank) from None
    return RemoteRows(counts, slots)


def _pitch(geometry: Geometry) -> int:
    return align(2 * geometry.hidden, GRAIN_BYTES)


def _parts(geometry: Geometry, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the units [n, 2 * H] and the ranges [n, G, 2] of slots, in place."""
    first, stop = geometry.ranges_offset, geometry.ranges_offset + 4 * geometry.num_groups
    return slots[:, : 2 * geometry.hidden], slots[:, first:stop].view(torch.bfloat16).unflatten(-1, (-1, 2))


def _counts(post: RemotePost, numbers: torch.Tensor) -> torch.Tensor:
    counts = numbers.view(torch.int64)
    post.require((counts >= 0) & (counts <= post.num_rows) & (counts.sum() == post.num_rows))
    return counts
