"""What a rank sends over the network is damaged: those that read it say so, and name the rank, before the limit."""

from __future__ import annotations

import struct
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import low_latency
import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import error_of
from deep_ep.engine.protocol import Agreement
from deep_ep.launch import run_ranks
from deep_ep.transport.links import ANNOUNCE, ROWS, SENT, VERDICT, Link, Pieces

pytestmark = pytest.mark.cpu_only

LIMIT_SECS, SOON_SECS = 40.0, 10.0
CASE = low_latency.Case()
_NUM_AGREED = len(Agreement._fields)  # words that begin an announcement and a low-latency message


def dispatch(buffer: deep_ep.Buffer, num_worst_tokens: int = 0) -> None:
    topk_idx = torch.arange(2).repeat(16, 1)
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, 2)
    topk = {"topk_idx": topk_idx, "topk_weights": torch.ones(16, 2)}
    layout = (None, per_rank, per_node, mask, per_expert)
    buffer.dispatch(torch.ones(16, 64), *layout, **topk, num_worst_tokens=num_worst_tokens)


def worst_case(buffer: deep_ep.Buffer) -> None:
    dispatch(buffer, num_worst_tokens=64)


def low_latency_dispatch(buffer: deep_ep.Buffer) -> None:
    low_latency.dispatch(buffer, low_latency.inputs(buffer.rank, 2, CASE), CASE)


def put(offset: int, *numbers: int) -> Callable[[bytes], bytes]:
    """Write other numbers into a message."""

    def change(data: bytes) -> bytes:
        return data[:offset] + struct.pack(f"<{len(numbers)}q", *numbers) + data[offset + 8 * len(numbers) :]

    return change


def wrapped(data: bytes) -> bytes:
    """Three counts that add up as 64 bits do."""
    (extent,) = struct.unpack_from("<q", data, LOW_LATENCY_ROWS_AT + 8)
    return put(COUNTS_AT, (1 << 63) - 1, (1 << 63) - 1, extent + 2)(data)


ROWS_AT = 8 * _NUM_AGREED
LOW_LATENCY_ROWS_AT = ROWS_AT + 8 * 2  # behind the masks, a word of each kind
COUNTS_AT = -(-(LOW_LATENCY_ROWS_AT + 8 * 2) // 16) * 16  # behind rows and extent, and padding

# By name: the call, the topic that is damaged, and what becomes of its payload.
DAMAGES: dict[str, tuple[Callable[[deep_ep.Buffer], None], int, Callable[[bytes], bytes]]] = {
    "a cut announcement": (dispatch, ANNOUNCE, lambda data: data[:24]),
    "an announcement of too many rows": (dispatch, ANNOUNCE, put(ROWS_AT, 1 << 40)),
    "counts that do not add up": (dispatch, ANNOUNCE, put(ROWS_AT + 8, 7)),
    "a verdict of some bytes": (worst_case, VERDICT, lambda data: data + b"abcde"),
    "rows cut short": (dispatch, ROWS, lambda data: data[:-16]),
    "a cut low-latency message": (low_latency_dispatch, SENT, lambda data: data[:24]),
    "too many low-latency rows": (low_latency_dispatch, SENT, put(LOW_LATENCY_ROWS_AT, 1 << 60, 1 << 60)),
    "rows below zero": (low_latency_dispatch, SENT, put(LOW_LATENCY_ROWS_AT, -1, -1)),
    "counts beyond all tokens": (low_latency_dispatch, SENT, put(COUNTS_AT, 1 << 62)),
    "counts whose sum wraps round": (low_latency_dispatch, SENT, wrapped),
    "counts below zero": (low_latency_dispatch, SENT, put(COUNTS_AT, -1)),
}


def damaged(rank: int, num_ranks: int) -> dict[str, tuple[str, str, float]]:
    said = {}
    for name, (call, topic, change) in DAMAGES.items():
        buffer = low_latency.make_buffer(num_ranks, CASE, limit_secs=LIMIT_SECS, num_nvl_bytes=1 << 20)
        send = Link.send

        def other(self: Link, one: int, epoch: int, tag: int, what: Any, topic=topic, change=change, send=send) -> None:
            if one == topic:
                pieces = what.pieces if isinstance(what, Pieces) else [what.view()]
                what = Pieces([memoryview(change(b"".join(bytes(piece) for piece in pieces)))])
            send(self, one, epoch, tag, what)

        begin = time.monotonic()
        with mock.patch.object(Link, "send", other) if rank == 1 else mock.MagicMock():
            said[name] = (*error_of(call, buffer), time.monotonic() - begin)
        dist.barrier()
        buffer.destroy()
    return said


def test_what_is_damaged_on_the_way_is_an_error_that_names_its_rank() -> None:
    here, _ = run_ranks(damaged, 2, env={"DEEP_EP_RANKS_PER_NODE": "1"}, limit_secs=90)
    for name, (kind, text, secs) in here.items():
        assert kind == "EPError", (name, kind, text)
        assert "rank 1" in text, (name, text)
        assert secs < SOON_SECS, name
