"""The raw buffer that callers may look at takes memory only for what they look at."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from common import run_ranks
from deep_ep import Buffer

pytestmark = pytest.mark.usefixtures("device")


def shared_bytes() -> int:
    """Memory that the system has set aside for the windows that this process has open."""
    sizes = {}
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            if "memfd:deep_ep" in os.readlink(fd):
                sizes[fd.stat().st_ino] = 512 * fd.stat().st_blocks
    return sum(sizes.values())


def look(rank: int, num_ranks: int) -> int:
    buffer = Buffer(dist.group.WORLD, 1 << 30, 1 << 30, num_cpu_timeout_secs=30)
    before = shared_bytes()
    dist.barrier()
    if rank == 0:
        view = buffer.get_local_buffer_tensor(torch.float32, torch.Size([200, 1000]), use_rdma_buffer=True)
        view.fill_(3)
        again = buffer.get_local_buffer_tensor(torch.float32, torch.Size([1000]), 4000, use_rdma_buffer=True)
        assert bool((again == 3).all())
    dist.barrier()
    return shared_bytes() - before


@pytest.mark.cpu_only
def test_a_view_of_the_raw_buffer_takes_no_more_memory_than_it_shows() -> None:
    for taken in run_ranks(look, 2):
        assert 800_000 <= taken < 1_000_000
