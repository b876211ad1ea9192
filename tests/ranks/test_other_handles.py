"""A handle of a buffer of other ranks is refused, and one of another buffer of the same ranks is not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import NOTHING_POSTED, error_of, layout_of, run_ranks

TOKENS, HIDDEN, EXPERTS = 4, 128, 4


class Kit:
    """A buffer of two ranks, and one dispatch of each kind."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, 2, EXPERTS)
        self.buffer = deep_ep.Buffer(group, 1 << 20, hint, low_latency_mode=True, num_cpu_timeout_secs=60)
        self.x = torch.ones(TOKENS, HIDDEN, dtype=torch.bfloat16)
        self.ids = torch.arange(2 * TOKENS).view(TOKENS, 2) % EXPERTS
        self.weights = torch.ones(TOKENS, 2)
        per_rank, per_node, per_expert, mask, _ = self.buffer.get_dispatch_layout(self.ids, EXPERTS)
        self.rows, *_, self.handle, _ = self.buffer.dispatch(
            self.x, None, per_rank, per_node, mask, per_expert, self.ids, self.weights
        )
        self.packed, _, self.packed_handle, _, _ = self.buffer.low_latency_dispatch(
            self.x, self.ids, TOKENS, EXPERTS, use_fp8=False
        )

    def calls(self, other: Kit) -> dict[str, Any]:
        """Calls of this buffer with handles of another one."""
        buffer = self.buffer
        return {
            "combine": lambda: buffer.combine(other.rows, other.handle),
            "dispatch": lambda: buffer.dispatch(self.x, other.handle),
            "get_combine_buffer": lambda: buffer.get_combine_buffer(other.handle),
            "low_latency_combine": lambda: buffer.low_latency_combine(
                other.packed, self.ids, self.weights, other.packed_handle
            ),
            "get_next_low_latency_combine_buffer": lambda: buffer.get_next_low_latency_combine_buffer(
                other.packed_handle
            ),
        }


def mix_handles(rank: int, num_ranks: int) -> dict[str, tuple[str, str]]:
    pairs = [[0, 1], [0, 2]]
    groups = [dist.new_group(ranks) for ranks in pairs]
    kits = [Kit(group) for ranks, group in zip(pairs, groups, strict=True) if rank in ranks]
    errors = {}
    if rank == 0:
        errors = {name: error_of(call) for name, call in kits[1].calls(kits[0]).items()}
    dist.barrier()
    return errors


def test_a_handle_of_other_ranks_is_refused(device: str) -> None:
    errors = run_ranks(mix_handles, 3)[0]
    assert len(errors) == 5
    for name, (kind, text) in errors.items():
        assert kind == "ValueError", (name, text)
        assert text.startswith(f"{name}: `handle` was made by a buffer of ranks [0, 1], this one has ranks [0, 2]")


def exchange_handles(rank: int, num_ranks: int) -> dict[str, tuple[str, str]]:
    first, second = Kit(dist.group.WORLD), Kit(dist.group.WORLD)
    errors = {name: error_of(call) for name, call in second.calls(first).items()}
    dist.barrier()
    return errors


@pytest.mark.parametrize("env", [{}, {"DEEP_EP_RANKS_PER_NODE": "1"}], ids=["one node", "2x1"])
def test_a_new_buffer_takes_the_handles_of_the_one_before(device: str, env: dict[str, str]) -> None:
    if device == "cuda" and env:
        pytest.skip("low latency across nodes needs NVSHMEM there")
    for errors in run_ranks(exchange_handles, 2, env=env):
        assert all(error == ("none", "") for error in errors.values()), errors


def confuse_batches(rank: int, num_ranks: int, is_dispatch: bool) -> tuple[tuple[str, str], tuple[str, str]]:
    """Two dispatches of the same counts: rank 1 takes the handle of the other one. Then all take that of one."""
    calls = []
    for confuses in (True, False):
        with deep_ep.Buffer(dist.group.WORLD, 1 << 20) as buffer:
            ids = torch.arange(2 * num_ranks).repeat(8, 1)
            layout = layout_of(buffer, ids, 2 * num_ranks)
            made = [buffer.dispatch(torch.full((8, 64), 1.0 + batch), **layout) for batch in range(2)]
            rows, _, _, _, handle, _ = made[rank if confuses else 0]
            dist.barrier()
            if is_dispatch:
                calls.append(error_of(buffer.dispatch, torch.ones(8, 64), handle))
            else:
                calls.append(error_of(buffer.combine, rows, handle))
            dist.barrier()
    return calls[0], calls[1]


@pytest.mark.cpu_only
@pytest.mark.parametrize("is_dispatch", [True, False])
@pytest.mark.parametrize("env", [{}, NOTHING_POSTED, {"DEEP_EP_RANKS_PER_NODE": "1"}], ids=["posted", "put", "2x1"])
def test_handles_of_dispatches_with_the_same_counts_are_told_apart(is_dispatch: bool, env: dict[str, str]) -> None:
    for (kind, text), alike in run_ranks(confuse_batches, 2, is_dispatch, env=env):
        assert kind in ("EPError", "EPPeerFailed")
        assert "Pass handles of one and the same dispatch" in text or kind == "EPPeerFailed", text
        assert alike == ("none", "")
