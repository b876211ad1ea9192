"""Low-latency calls of GPUs across nodes over NVSHMEM, on CPU ranks: a stand-in for it, and Triton's interpreter."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from shared_heaps import stand_in
from test_low_latency_interpreted import (
    DIFFERENCES,
    LIMIT_SECS,
    SMALL,
    Round,
    chain,
    compressed,
    disagreements,
    flags,
    make_buffer,
    masks,
    silence,
    two_in_flight,
)
from test_returns import leave_and_return

import deep_ep
from common import error_of, run_ranks
from deep_ep.kernels import _triton
from internode import nodes_of

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(not _triton.INTERPRETED, reason="Triton is not there, or not in its interpreter's mode"),
]


def over_heaps(rank: int, num_ranks: int, function: Callable[..., Any], *args: Any) -> Any:
    """Inside a rank: run its function with buffers whose remote ranks are reached by the stand-in."""
    stand_in(has_small_copies=function is not tight)
    return function(rank, num_ranks, *args)


def run_nodes(
    function: Callable[..., Any], num_ranks: int, ranks_per_node: int, *args: Any, rows: str = "put", **options: Any
) -> list:
    """Run ranks whose words are carried, or with `rows="fetch"` written straight to remote boards."""
    env = nodes_of(ranks_per_node, DEEP_EP_TRANSPORT="interpreted", DEEP_EP_DEVICE="cpu", DEEP_EP_NVSHMEM_ROWS=rows)
    return run_ranks(over_heaps, num_ranks, function, *args, env=env, **options)


# Results, as inside one node -----------------------------------------------------------------------------------------


def every_call(rank: int, num_ranks: int) -> None:
    assert make_buffer(num_ranks, SMALL).transport.startswith("nvshmem")
    for part in (flags, compressed, chain, two_in_flight):
        part(rank, num_ranks)


@pytest.mark.parametrize("rows", ["put", "fetch"])
def test_calls_with_each_pair_of_flags_and_in_one_chain(rows: str) -> None:
    """By copies of remote ranks' memory, and straight out of it."""
    run_nodes(every_call, 2, 1, rows=rows)


@pytest.mark.parametrize("rows", ["put", "fetch"])
def test_calls_of_two_nodes_of_two_ranks(rows: str) -> None:
    run_nodes(flags, 4, 2, rows=rows)


def test_ranks_that_were_masked_come_back_where_memory_can_be_addressed() -> None:
    told = run_nodes(leave_and_return, 2, 1, True, rows="fetch")
    assert "rank 1" in told[0][0]
    assert any("without this rank" in text for text in told[1])


def tight(rank: int, num_ranks: int) -> None:
    """One expert a rank and few channels: the places of a dispatch outweigh its rows, and the hint is enough."""
    case = SMALL._replace(experts_per_rank=1, hidden=8, max_tokens=4, topk=2)
    buffer = make_buffer(num_ranks, case)
    for seed in range(5):
        Round(rank, num_ranks, case._replace(seed=seed)).go(buffer, use_logfmt=seed == 3)
    buffer.destroy()


def test_short_rows_fit_into_copies() -> None:
    run_nodes(tight, 3, 1)


# Masks, silence, disagreement ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rows", ["put", "fetch"])
def test_masks_of_the_caller_and_of_a_silent_remote_rank(rows: str) -> None:
    told = run_nodes(masks, 3, 1, rows=rows)
    for rank in (0, 2):
        (text,) = told[rank]
        assert "rank 1 " in text
        assert "(call 3)" in text
    assert told[1] == []


def test_a_silent_remote_rank_is_named_at_the_limit_without_shrink() -> None:
    for rank, errors in enumerate(run_nodes(silence, 3, 1)):
        assert errors[0][0] == "EPTimeout"
        assert "from rank 1 " in errors[0][1], errors[0]
        if rank != 1:
            assert "low-latency dispatch (call 3)" in errors[0][1]
            assert errors[1][0] == "EPClosed"


def test_ranks_that_disagree_all_raise_and_say_who_and_what() -> None:
    for errors in run_nodes(disagreements, 2, 1):
        for how, word in DIFFERENCES.items():
            kind, text = errors[how]
            assert kind == "EPError", (how, kind, text)
            assert "all ranks must make the same call" in text, how
            assert word in text


def told_by_far(rank: int, num_ranks: int) -> tuple[str, str, float]:
    """Rank 1 has a short limit and waits for rank 0; rank 3, of the other node, has a long one, and hears of it."""
    limit_secs = 2 * LIMIT_SECS if rank == 1 else 250.0
    buffer, this = make_buffer(num_ranks, SMALL, limit_secs=limit_secs), Round(rank, num_ranks)
    this.go(buffer)
    dist.barrier()
    begin, error = time.monotonic(), ("none", "")
    if rank != 0:
        error = error_of(lambda: (this.dispatch(buffer), buffer.check()))
    elapsed = time.monotonic() - begin
    dist.barrier()
    return *error, elapsed


@pytest.mark.parametrize("rows", ["put", "fetch"])
def test_remote_ranks_hear_of_a_failure_at_once(rows: str) -> None:
    for rank, (kind, text, elapsed) in enumerate(run_nodes(told_by_far, 4, 2, rows=rows)):
        if rank:
            assert kind == "EPTimeout", text
            assert "from rank 0 " in text, (rank, text)
            assert elapsed < 100


# Where there is none -------------------------------------------------------------------------------------------------


def without(rank: int, num_ranks: int) -> None:
    """Normal mode works; low-latency calls say what they need."""
    buffer, this = make_buffer(num_ranks, SMALL, enable_shrink=True), Round(rank, num_ranks)
    num_experts = SMALL.experts_per_rank * num_ranks
    rows = torch.zeros(SMALL.experts_per_rank, num_ranks * SMALL.max_tokens, SMALL.hidden).bfloat16()
    src_info = torch.zeros(rows.shape[:2], dtype=torch.int32)
    handle = (src_info, torch.zeros(rows.size(0), num_ranks, dtype=torch.int64), SMALL.max_tokens, SMALL.hidden)
    handle = (*handle, num_experts)
    calls = {
        "low_latency_dispatch": lambda: this.dispatch(buffer),
        "low_latency_combine": lambda: this.combine(buffer, rows, handle),
        "get_next_low_latency_combine_buffer": lambda: buffer.get_next_low_latency_combine_buffer(handle),
        "clean_low_latency_buffer": lambda: buffer.clean_low_latency_buffer(3, SMALL.hidden, num_experts),
        "low_latency_update_mask_buffer": lambda: buffer.low_latency_update_mask_buffer(0, True),
        "low_latency_clean_mask_buffer": buffer.low_latency_clean_mask_buffer,
    }
    for name, call in calls.items():
        with pytest.raises(deep_ep.EPUnsupported) as error:
            call()
        text = str(error.value)
        assert text.startswith(f"{name}: across nodes on GPUs low latency needs NVSHMEM, which is not there ("), text
        assert "Set DEEP_EP_TRANSPORT=nvshmem" in text
        assert text.endswith("or use normal mode")
    ids = this.mine.topk_idx.clamp(-1, num_experts - 1)
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(ids, num_experts)
    recv_x, *_, back, _ = buffer.dispatch(
        this.mine.x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=mask,
        num_tokens_per_expert=per_expert,
        topk_idx=ids,
        topk_weights=this.mine.topk_weights,
    )
    combined = buffer.combine(recv_x, back)[0]
    assert torch.equal(combined.float(), this.mine.x.float() * mask.sum(1, keepdim=True))
    buffer.destroy()


def test_without_nvshmem_a_buffer_has_normal_mode_and_says_what_low_latency_needs() -> None:
    env = nodes_of(1, DEEP_EP_TRANSPORT="interpreted", DEEP_EP_DEVICE="cpu")
    run_ranks(without, 2, env=env)
