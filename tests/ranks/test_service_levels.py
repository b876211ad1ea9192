"""Service levels on the connections of real buffers: normal traffic has one, low-latency traffic another."""

from __future__ import annotations

import socket

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import run_ranks
from deep_ep import env

pytestmark = pytest.mark.cpu_only  # TCP between CPU ranks

LEVELS = {env.SERVICE_LEVEL.name: "2", env.LOW_LATENCY_SERVICE_LEVEL.name: "5", env.RANKS_PER_NODE.name: "1"}


def marks_of_links(rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    """What the links of a rank are marked with: those of its rail, and those of low-latency calls."""
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(4, 64, num_ranks, num_ranks)
    buffer = deep_ep.Buffer(dist.group.WORLD, 1 << 20, hint, low_latency_mode=True, explicitly_destroy=True)
    try:
        ids = torch.full((4, 1), 1 - rank)
        buffer.low_latency_dispatch(torch.ones(4, 64, dtype=torch.bfloat16), ids, 4, num_ranks, use_fp8=False)
        rail = [_mark(link) for link in buffer._engine.rail.links.values()]
        mesh = [_mark(sender.link) for sender in buffer._engine.mesh.senders.values()]
    finally:
        buffer.destroy()
    return rail, mesh


def _mark(link: object) -> int:
    return link._socket.getsockopt(socket.IPPROTO_IP, socket.IP_TOS)


def test_each_kind_of_traffic_has_its_level() -> None:
    assert run_ranks(marks_of_links, 2, env=LEVELS) == [([2 << 5], [5 << 5])] * 2
