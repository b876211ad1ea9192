"""The announcements that the ranks of a rail exchange at the beginning of a call."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch

from .... import layout
from ....errors import EPError
from ....sizing import ceil_div
from ....transport.links import ANNOUNCE, Frame
from ....transport.message import Rail, Wait
from ...payload import Routing
from ...protocol import Agreement, disagreement
from ..call import Call

_NUM_AGREED = len(Agreement._fields)
_WORDS = struct.Struct(f"<{_NUM_AGREED + 1}q")  # what must agree, and the rows that will come


class Announcement(NamedTuple):
    """What one node's rank of the rail sends to this node.

    Attributes:
        num_rows: Rows that it sends.
        num_tokens: [P] int32, how many of them go to each rank of this node; None: as the handle says.
        num_selected: [E / N] int32, its selections of this node's experts, likewise.
        mask: [num_rows, P] bool, which go to which, likewise.
    """

    num_rows: int
    num_tokens: torch.Tensor | None = None
    num_selected: torch.Tensor | None = None
    mask: torch.Tensor | None = None


def announcement_to(routing: Routing, node: int, num_nodes: int) -> Announcement:
    """Return the announcement of a dispatch with routing for one node."""
    size = routing.is_token_in_rank.size(1) // num_nodes
    mask = routing.is_token_in_rank[:, node * size : (node + 1) * size]
    mask = mask[mask.any(1)]
    num_tokens = routing.num_tokens_per_rank[node * size : (node + 1) * size]
    num_experts = routing.num_experts // num_nodes
    selected = routing.num_tokens_per_expert[node * num_experts : (node + 1) * num_experts]
    return Announcement(mask.size(0), num_tokens, selected, mask)


def send_announcement(rail: Rail, call: Call, node: int, announcement: Announcement) -> None:
    """Send one node the announcement of this call."""
    parts = []
    if announcement.num_tokens is not None and announcement.num_selected is not None and announcement.mask is not None:
        numbers = torch.cat([announcement.num_tokens, announcement.num_selected])
        parts = [numbers.view(torch.uint8), layout.pack_bits(announcement.mask).flatten()]
    page = rail.pool.take(_WORDS.size + sum(part.numel() for part in parts))
    page.view()[: _WORDS.size] = _WORDS.pack(*call.header.agreement.words(), announcement.num_rows)
    if parts:
        torch.cat(parts, out=page.tensor()[_WORDS.size :])
    rail.send(node, ANNOUNCE, call.epoch, page)


def receive_announcements(
    rail: Rail, wait: Wait, call: Call, num_local_ranks: int, num_experts: int = 0
) -> dict[int, Announcement]:
    """Receive the announcements of the other nodes.

    Args:
        rail: The rail.
        wait: How the call waits.
        call: The call.
        num_local_ranks: P.
        num_experts: Of a node, in a dispatch with routing; 0: there are no counts.

    Raises:
        EPError: A rank makes a different call; the message names the items that differ.
    """
    announcements, clashes = {}, []
    mine = call.header.agreement
    for node in rail.nodes:
        frame = rail.receive(node, wait)
        rail.require_same_refusals(node, call.epoch, str(call), has_come=True)
        require_topic(call, rail, node, frame, ANNOUNCE)
        if frame.page.num_bytes < _WORDS.size:
            raise spoiled(call, rail, node, f"an announcement of {frame.page.num_bytes} bytes")
        words = _WORDS.unpack_from(frame.page.view())
        if list(words[:_NUM_AGREED]) != mine.words():
            clashes.append((rail.name(node), mine, Agreement.from_words(words)))
            continue
        # A copy: the page goes back to the pool.
        data = frame.page.tensor()[_WORDS.size :].clone()
        announcement = _parse(data, words[_NUM_AGREED], num_local_ranks, num_experts)
        if announcement is None:
            raise spoiled(call, rail, node, f"an announcement of {words[_NUM_AGREED]} rows whose counts do not add up")
        announcements[node] = announcement
        rail.pool.give(frame.page)
    if clashes:
        raise disagreement(str(call), call.window.me(), clashes)
    return announcements


def _parse(data: torch.Tensor, num_rows: int, num_local_ranks: int, num_experts: int) -> Announcement | None:
    """Parse an announcement; None: it contradicts itself. Its counts become sizes and slots, so they are checked."""
    width = ceil_div(num_local_ranks, 8)
    num_bytes = 4 * (num_local_ranks + num_experts) if num_experts else 0
    if num_rows < 0 or data.numel() != num_bytes + (num_rows * width if num_experts else 0):
        return None
    if not num_experts:
        return Announcement(num_rows)
    numbers = data[:num_bytes].view(torch.int32)
    mask = layout.unpack_bits(data[num_bytes:].view(num_rows, width), num_local_ranks)
    announcement = Announcement(num_rows, numbers[:num_local_ranks], numbers[num_local_ranks:], mask)
    adds_up = torch.equal(mask.sum(0, dtype=torch.int32), numbers[:num_local_ranks]) and bool(mask.any(1).all())
    return announcement if adds_up and int(numbers.min()) >= 0 else None


def spoiled(call: Call, rail: Rail, node: int, what: str) -> EPError:
    """Return the error for a message of the rail that cannot be what the peer meant to send."""
    return EPError(
        f"{call}: {rail.name(node)} sent {what} ({call.window.me()}). "
        "It runs another version, or what it sends is damaged on the way"
    )


def require_rows(call: Call, rail: Rail, announcements: dict[int, Announcement], expected: Sequence[int]) -> None:
    """Check that the handles of both ends count the same rows.

    Raises:
        EPError: They do not.
    """
    for node, announcement in announcements.items():
        if announcement.num_rows != expected[node]:
            raise EPError(
                f"{call}: {rail.name(node)} sends {announcement.num_rows} rows, the handle counts {expected[node]} "
                f"({call.window.me()}). Pass the handle as dispatch returned it"
            )


def require_topic(call: Call, rail: Rail, node: int, frame: Frame, topic: int) -> None:
    """Check that a message is what this call expects next.

    Raises:
        EPError: It is not.
    """
    if frame.epoch == call.epoch and frame.topic != topic:
        raise spoiled(call, rail, node, f"a message of topic {frame.topic}, expected topic {topic}")
    if frame.epoch != call.epoch:
        raise EPError(
            f"{call}: {rail.name(node)} is in call {frame.epoch} ({call.window.me()}). "
            "Make the calls in the same order on all ranks"
        )
