"""The two buffers of `bench internode --device cuda`: one across nodes, and one that has all ranks for one node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch.distributed as dist

from ... import env
from ...buffers.engines import NVSHMEM
from ...buffers.legacy import Buffer
from ...errors import EPUnsupported
from ...kernels.relay import relay_record_words
from ...sizing import ALIGNMENT_BYTES, align
from .inputs import CONTEXT_BYTES, Setting

# A dispatch guesses a sixteenth more rows than it received before, its combine needs as many beside them, and what is
# free may lie in pieces.
_NUM_ROW_SETS = 3
_SPARE_BYTES = 8 << 20  # records, scales, and what is rounded up
_LEAST_HEAP_BYTES = 8 << 30
_GIB = 1 << 30


class HopSizes(NamedTuple):
    """Bytes that a rank asks for, so that nothing grows in a timed call.

    Attributes:
        nvl: `num_nvl_bytes` of either buffer.
        rdma: `num_rdma_bytes` of the one across nodes.
        heap: Of NVSHMEM's symmetric memory, from which all of it comes.
        gpu: About all that a rank takes on its GPU.
    """

    nvl: int
    rdma: int
    heap: int
    gpu: int


def find_sizes(setting: Setting, num_ranks: int) -> HopSizes:
    """Room for the most rows that any routes bring: of all tokens, at every rank and on the way to every node."""
    row_bytes, num_topk = 2 * setting.hidden, setting.num_topk
    nvl = _NUM_ROW_SETS * setting.num_tokens * num_ranks * row_bytes + _SPARE_BYTES
    record_bytes = 4 * relay_record_words(num_ranks // setting.num_nodes, num_topk)
    crossing = setting.num_tokens * setting.num_nodes * (row_bytes + record_bytes)
    rdma = 2 * (crossing + _SPARE_BYTES)  # as much goes as comes
    nvl, rdma = (align(size, ALIGNMENT_BYTES) for size in (nvl, rdma))
    heap = max(_LEAST_HEAP_BYTES, align(2 * nvl + rdma + _GIB, _GIB))
    shared = heap if setting.transport == NVSHMEM else 2 * nvl  # with messages far memory is the host's
    inputs = 8 * setting.num_tokens * row_bytes
    return HopSizes(nvl, rdma, heap, CONTEXT_BYTES + shared + inputs)


def hop_bytes(setting: Setting, num_ranks: int) -> int:
    """About all that a rank takes on its GPU."""
    return find_sizes(setting, num_ranks).gpu


@contextmanager
def making_hops(setting: Setting, num_ranks: int) -> Iterator[tuple[Buffer, Buffer]]:
    """Both buffers of this rank. The environment has its nodes; all ranks call it together.

    Yields:
        The one across nodes, and the one of one node.

    Raises:
        EPUnsupported: The transport that was asked for cannot be had.
    """
    sizes = find_sizes(setting, num_ranks)
    # This one first: with NVSHMEM it decides where all symmetric memory of the process comes from.
    two = _make(setting, sizes.nvl, sizes.rdma)
    try:
        _require(setting.transport, two)
        with _one_node():
            one = _make(setting, sizes.nvl, 0)
        try:
            yield two, one
        finally:
            one.destroy()
    finally:
        two.destroy()


def _make(setting: Setting, num_nvl_bytes: int, num_rdma_bytes: int) -> Buffer:
    return Buffer(dist.group.WORLD, num_nvl_bytes, num_rdma_bytes, explicitly_destroy=True, device=setting.device)


@contextmanager
def _one_node() -> Iterator[None]:
    """Buffers that are made now have all ranks of a host for one node."""
    name = env.RANKS_PER_NODE.name
    before = os.environ.pop(name)
    try:
        yield
    finally:
        os.environ[name] = before


def _require(transport: str, buffer: Buffer) -> None:
    """A buffer falls back to messages with a warning; figures of another transport than the table's would mislead."""
    if buffer.transport.startswith(NVSHMEM) != (transport == NVSHMEM):
        raise EPUnsupported(
            f"bench internode: transport {transport} was asked for, the buffer has {buffer.transport}. "
            "Pass another --transport"
        )
