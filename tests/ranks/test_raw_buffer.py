"""The raw buffer that callers may look at: it takes memory only for what they look at, and inputs may lie there."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import NOTHING_POSTED, run_ranks
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


STAGED = {"DEEP_EP_ARENA_BYTES": "4096", **NOTHING_POSTED}
TOKENS, HIDDEN, TOPK = 64, 64, 2


def keep_inputs(rank: int, num_ranks: int) -> None:
    """Let each input in turn lie where the other rank's rows are staged, and be overwritten as early as it can be."""
    warnings.simplefilter("ignore")
    torch.manual_seed(rank)
    buffer, num_calls = Buffer(dist.group.WORLD, 1 << 20, num_cpu_timeout_secs=30), 0
    store = dist.distributed_c10d._get_default_store()

    def let_rank_1_put_first(step: str) -> None:
        if rank == 0 and step.endswith("dispatch: after offered"):
            store.wait([f"put/{num_calls}"])
        elif rank == 1 and step.endswith("dispatch: before ready"):
            store.set(f"put/{num_calls}", "")

    def in_raw(tensor: torch.Tensor) -> torch.Tensor:
        # The second half of the staging is that of rank 1. An input that is larger covers all of it.
        offset = 0 if tensor.numel() * tensor.element_size() > 2048 else 2048
        return buffer.get_local_buffer_tensor(tensor.dtype, tensor.shape, offset).copy_(tensor)

    def check(call: Callable[..., Any], *inputs: Any) -> None:
        nonlocal num_calls
        results = []
        for index in [None, *(index for index, one in enumerate(inputs) if one is not None)]:
            moved = [in_raw(one) if number == index else one for number, one in enumerate(inputs)]
            num_calls += 1
            results.append(call(*moved))
            assert all(map(torch.equal, results[-1], results[0])), (call.__name__, index)

    ids = torch.rand(TOKENS, 2 * num_ranks).topk(TOPK).indices
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(ids, 2 * num_ranks)
    x, scales, weights = torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, 2), torch.rand(TOKENS, TOPK)
    inputs = (x, scales, per_rank, mask, per_expert, ids, weights, per_node)

    def dispatch(*given: Any, worst: int = 0) -> list[torch.Tensor]:
        x, scales, per_rank, mask, per_expert, ids, weights, per_node = given
        layout = (per_rank, per_node, mask, per_expert, ids, weights)
        rows, *topk, _, handle, _ = buffer.dispatch((x, scales), None, *layout, num_worst_tokens=worst)
        num_rows = int(handle[0][-1, rank]) if len(handle) == 6 else int(handle[6][-1])
        return [one[:num_rows].clone() for one in (*rows, *topk)]

    def worst_case_dispatch(*given: Any) -> list[torch.Tensor]:
        return dispatch(*given, worst=num_ranks * TOKENS)

    buffer.set_fault_hook(let_rank_1_put_first)
    check(dispatch, *inputs)
    check(worst_case_dispatch, *inputs)
    rows, _, _, _, handle, _ = buffer.dispatch(x, None, per_rank, per_node, mask, per_expert)
    rows, biases = rows.clone(), (torch.randn(TOKENS, HIDDEN), torch.randn(TOKENS, HIDDEN))

    def cached_dispatch(x: torch.Tensor, *handle: torch.Tensor) -> list[torch.Tensor]:
        return [buffer.dispatch(x, handle)[0].clone()]

    def combine(x: torch.Tensor, weights: torch.Tensor, bias: Any, other: Any, *handle: torch.Tensor) -> list:
        return list(buffer.combine(x, handle, weights, (bias, other))[:2])

    num_calls += 1
    check(cached_dispatch, x, *handle)
    check(combine, rows, torch.rand(rows.size(0), TOPK), *biases, *handle)
    assert set(buffer.stats()["calls"]) == {"dispatch/staged", "combine/staged"}


@pytest.mark.cpu_only
@pytest.mark.parametrize("num_nodes", [1, 2])
def test_inputs_may_lie_in_the_raw_buffer(num_nodes: int) -> None:
    """A staged call writes there; on a GPU the raw buffer is memory that no call uses."""
    run_ranks(keep_inputs, 2 * num_nodes, env={**STAGED, "DEEP_EP_RANKS_PER_NODE": "2"})
