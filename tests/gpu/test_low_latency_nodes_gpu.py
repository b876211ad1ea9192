"""Low-latency calls across nodes over NVSHMEM: a GPU's ranks split into nodes, which reach each other by puts alone, or
read each other's memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from low_latency import Case, dispatch, inputs, make_buffer, one_call
from test_low_latency import (
    all_flags,
    hooks_in_flight,
    many_shapes,
    mixed_modes,
    one_empty_rank,
    queued_calls,
    two_zero_copies,
)
from test_low_latency_faults import CASE, FORM, LIMIT_SECS, Round, caller_masks, one_round, silent_peer
from test_low_latency_graphs import many_in_one_graph, replayed

from common import error_of, run_ranks
from deep_ep import Buffer, EPUnsupported, launch, quant
from deep_ep.utils.math import calc_diff
from internode import nodes_of, remote_env

pytestmark = pytest.mark.usefixtures("device")

SHAPES = [(2, 1), (2, 2), (4, 1)]  # nodes, and ranks of each
PATIENCE_SECS = 30.0  # for everything around a limit, on a busy machine


@pytest.fixture(autouse=True)
def _nvshmem() -> None:
    from deep_ep.transport.nvshmem import is_built_in

    if not torch.cuda.is_available() or not is_built_in():
        pytest.skip("torch comes without NVSHMEM")


def run_nodes(
    function: Callable[..., Any], shape: tuple[int, int], *args: Any, how: str = "nvshmem put", **options: Any
) -> list[Any]:
    num_nodes, size = shape
    num_ranks = num_nodes * size
    return run_ranks(function, num_ranks, *args, env=remote_env("cuda", how, num_ranks, size), **options)


# What DeepEP's own test checks ---------------------------------------------------------------------------------------


def own_test(rank: int, num_ranks: int) -> None:
    """Its loops, at its width, with fewer tokens and experts."""
    num_tokens, hidden, num_topk, num_experts = 64, 7168, 8, 12 * num_ranks
    hint = Buffer.get_low_latency_rdma_size_hint(num_tokens, hidden, num_ranks, num_experts)
    group = dist.group.WORLD
    buffer = Buffer(group, 0, hint, low_latency_mode=True, explicitly_destroy=True, num_gpu_timeout_secs=60.0)
    assert buffer.transport.startswith("nvshmem "), buffer.transport
    torch.manual_seed(rank)
    structured = torch.full((num_tokens, hidden), float(rank - 128)).bfloat16()
    structured[:, -128:] = torch.arange(num_tokens).bfloat16().view(-1, 1)
    noise = (torch.randn(num_tokens, hidden) * 0.1).bfloat16()
    topk_idx = torch.randn(num_tokens, num_experts).abs().topk(num_topk, dim=-1).indices
    topk_weights = torch.randn(num_tokens, num_topk).abs()
    for _ in range(10):
        token, k = (int(torch.randint(0, most, (1,))) for most in (num_tokens, num_topk))
        topk_idx[token, k] = -1
    every = [torch.empty_like(topk_idx, device="cpu") for _ in range(num_ranks)]
    dist.all_gather(every, topk_idx.cpu())
    chosen = torch.stack(every)
    is_first = True
    for x in (structured, noise):
        for has_hook in (False, True):
            for form in FORMS:
                for _ in range(2 if is_first else 1):  # so that both quarters are used in turn
                    given = (num_tokens, topk_weights, topk_idx, chosen, num_experts)
                    own_round(buffer, x, given, form, has_hook, x is structured)
                is_first = not is_first
    buffer.check()
    buffer.destroy()


FORMS: list[dict[str, bool]] = [
    {"use_fp8": False},
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
]


def own_round(
    buffer: Buffer, x: torch.Tensor, given: tuple, form: dict[str, bool], has_hook: bool, is_structured: bool
) -> None:
    num_tokens, topk_weights, topk_idx, chosen, num_experts = given
    rank, num_ranks = buffer.rank, buffer.group_size
    num_local = num_experts // num_ranks
    stats = torch.zeros(num_local, dtype=torch.int32)
    options = {"async_finish": not has_hook, "return_recv_hook": has_hook}
    packed, count, handle, event, hook = buffer.low_latency_dispatch(
        x, topk_idx, num_tokens, num_experts, cumulative_local_expert_recv_stats=stats, **form, **options
    )
    hook() if has_hook else event.current_stream_wait()
    rounds = form.get("round_scale", False)
    rows = packed if not form["use_fp8"] else cast_back(*packed)
    src_info, layout_range = handle[:2]
    for expert in range(num_local):
        valid = int(count[expert])
        per_rank = layout_range[expert] & 0xFFFFFFFF
        assert valid == int(stats[expert]) == int(per_rank.sum())
        assert valid == int((chosen == rank * num_local + expert).sum())
        if not valid or not is_structured:
            continue
        got, sources = rows[expert, :valid], src_info[expert, :valid]
        assert torch.equal(got[:, :-128].amin(-1), got[:, :-128].amax(-1))
        if rounds:
            assert calc_diff(got[:, -1].float(), sources.float()) < 0.007
            continue
        assert (got[:, -128:] == sources.view(-1, 1)).all()
        for source in range(num_ranks):
            first, size = int(layout_range[expert, source]) >> 32, int(per_rank[source])
            assert int((got[:, 0] == source - 128).sum()) == size
            assert (got[first : first + size, 0] == source - 128).all()
    for zero_copy in (False, True):
        if zero_copy:
            buffer.get_next_low_latency_combine_buffer(handle)[:] = rows
        out = torch.empty_like(x)
        combined, event, hook = buffer.low_latency_combine(
            rows, topk_idx, topk_weights, handle, zero_copy=zero_copy, out=out, **options
        )
        hook() if has_hook else event.current_stream_wait()
        assert combined is out
        assert not combined.isnan().any()
        if not rounds:
            want = x.float() * topk_weights.masked_fill(topk_idx < 0, 0).sum(1).view(-1, 1)
            assert calc_diff(want, combined) < (9e-4 if form["use_fp8"] else 1e-5)


def cast_back(rows: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As the original's test does it: also what is garbage."""
    flat = quant.per_token_cast_back(rows.flatten(0, 1), scales.contiguous().flatten(0, 1))
    return flat.view(rows.shape)


@pytest.mark.parametrize("how", ["nvshmem put", "nvshmem"])
@pytest.mark.parametrize("shape", SHAPES)
def test_what_deepeps_own_test_checks(shape: tuple[int, int], how: str) -> None:
    run_nodes(own_test, shape, how=how)


# Results, to the bit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("shape", "kind"), [((2, 1), "integers"), ((2, 1), "noise"), ((2, 2), "integers")])
def test_all_combinations_of_flags(shape: tuple[int, int], kind: str) -> None:
    run_nodes(all_flags, shape, kind)


def test_shapes_that_change_from_call_to_call() -> None:
    run_nodes(many_shapes, (2, 1))


def chain(rank: int, num_ranks: int) -> None:
    """Hooks in any order, two zero-copy tensors, calls that queue up, and normal calls between."""
    for part in (hooks_in_flight, two_zero_copies, queued_calls, mixed_modes, one_empty_rank):
        part(rank, num_ranks)


@pytest.mark.parametrize("shape", [(2, 2), (4, 1)])
def test_hooks_zero_copies_and_normal_calls(shape: tuple[int, int]) -> None:
    run_nodes(chain, shape)


def large(rank: int, num_ranks: int) -> None:
    """Copies are smaller than a memory: places of a set differ in the two."""
    case = Case(experts_per_rank=16, max_tokens=128, hidden=2048, topk=8, num_tokens=100)
    buffer = make_buffer(num_ranks, case)
    for seed, form in enumerate(FORMS):
        back: dict[str, bool] = ({}, {"zero_copy": True}, {"use_logfmt": True}, {})[seed]
        one_call(buffer, rank, num_ranks, case._replace(seed=seed), form, has_hook=seed % 2 == 1, **back)
    buffer.destroy()


@pytest.mark.parametrize("shape", SHAPES)
def test_large_calls(shape: tuple[int, int]) -> None:
    run_nodes(large, shape)


# Graphs --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_barriers", [0, 1])
@pytest.mark.parametrize(("has_hook", "zero_copy"), [(False, False), (True, True)])
def test_a_step_is_replayed_with_new_inputs(has_hook: bool, zero_copy: bool, num_barriers: int) -> None:
    launch.run_ranks(replayed, 2, has_hook, zero_copy, num_barriers, env=remote_env("cuda", "nvshmem", 2, 1))


def test_many_steps_in_one_graph() -> None:
    launch.run_ranks(many_in_one_graph, 4, 5, env=remote_env("cuda", "nvshmem", 4, 2))


# Masks, silence, disagreement ----------------------------------------------------------------------------------------


def test_masks_of_the_caller() -> None:
    run_nodes(caller_masks, (3, 1))


@pytest.mark.parametrize(
    ("shape", "how"), [((3, 1), "nvshmem"), ((3, 1), "nvshmem put"), ((2, 2), "nvshmem put"), ((4, 1), "nvshmem put")]
)
def test_a_silent_rank_is_masked_on_all_nodes(shape: tuple[int, int], how: str) -> None:
    num_ranks = shape[0] * shape[1]
    results = run_nodes(silent_peer, shape, True, how=how)
    for rank in range(num_ranks):
        if rank != 1:
            assert results[rank][2] == [int(one == 1) for one in range(num_ranks)]


@pytest.mark.parametrize("shape", [(2, 1), (2, 2), (4, 1)])
def test_a_silent_rank_is_named_on_all_nodes(shape: tuple[int, int]) -> None:
    results = run_nodes(silent_peer, shape, False)
    for rank in range(shape[0] * shape[1]):
        if rank != 1:
            (first, text), (second, again) = results[rank][1]
            assert first == "EPTimeout", text
            assert "low-latency dispatch" in text
            assert f"from rank 1 after {LIMIT_SECS:g} s" in text
            assert second == "EPClosed"
            assert "from rank 1 " in again


def told_by_far(rank: int, num_ranks: int) -> tuple[str, str, float]:
    """Rank 1 has a short limit and waits for rank 0; ranks of other nodes have a long one, and hear of it."""
    one_round(make_buffer(num_ranks, CASE), rank, 0)  # what a process does only once takes longer
    buffer = make_buffer(num_ranks, CASE, limit_secs=2 * LIMIT_SECS if rank == 1 else 100.0)
    this = Round(rank, num_ranks, 1)
    one_round(buffer, rank, 1)
    dist.barrier()
    begin, error = time.monotonic(), ("none", "")
    if rank != 0:
        error = error_of(lambda: (dispatch(buffer, this.mine, CASE, **FORM), torch.cuda.synchronize(), buffer.check()))
    elapsed = time.monotonic() - begin
    dist.barrier()
    return *error, elapsed


def test_remote_ranks_hear_of_a_failure_at_once() -> None:
    for rank, (kind, text, elapsed) in enumerate(run_nodes(told_by_far, (2, 2))):
        if rank:
            assert kind == "EPTimeout", text
            assert "from rank 0 " in text, (rank, text)
            assert elapsed < PATIENCE_SECS


def different(rank: int, num_ranks: int) -> tuple[str, str]:
    buffer, given = make_buffer(num_ranks, CASE, times=2), inputs(rank, num_ranks, CASE)
    one_round(buffer, rank, 0)
    case = CASE._replace(max_tokens=CASE.max_tokens + rank)
    return error_of(lambda: (dispatch(buffer, given, case, **FORM), buffer.check()))


def test_a_remote_rank_that_calls_something_else_is_named() -> None:
    for kind, text in run_nodes(different, (2, 1)):
        assert kind == "EPError"
        assert "all ranks must make the same call" in text
        assert "num_max_dispatch_tokens_per_rank" in text


# Where there is none -------------------------------------------------------------------------------------------------


def without(rank: int, num_ranks: int) -> None:
    buffer = make_buffer(num_ranks, CASE)
    with pytest.raises(EPUnsupported, match="across nodes on GPUs low latency needs NVSHMEM, which is not there"):
        dispatch(buffer, inputs(rank, num_ranks, CASE), CASE, **FORM)
    buffer.destroy()


def test_over_messages_low_latency_says_what_it_needs() -> None:
    run_ranks(without, 2, env=nodes_of(1, DEEP_EP_TRANSPORT="message"))
