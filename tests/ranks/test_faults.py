"""Ranks that are late, early, empty, stopped, killed, or that call something else."""

from __future__ import annotations

import os
import re
import signal
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import error_of, layout_of, run_ranks

LIMIT_SECS = 1.0
EXPERTS_PER_RANK, TOPK, HIDDEN = 4, 3, 16


def make_buffer(limit_secs: float = 30.0) -> deep_ep.Buffer:
    return deep_ep.Buffer(
        dist.group.WORLD, explicitly_destroy=True, num_cpu_timeout_secs=limit_secs, num_gpu_timeout_secs=limit_secs
    )


def inputs(rank: int, num_ranks: int, num_tokens: int = 8, hidden: int = HIDDEN) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(rank)
    num_experts = EXPERTS_PER_RANK * num_ranks
    return {
        "x": torch.randn(num_tokens, hidden, generator=generator).bfloat16(),
        "topk_idx": torch.rand(num_tokens, num_experts, generator=generator).topk(TOPK).indices,
        "topk_weights": torch.rand(num_tokens, TOPK, generator=generator),
        "num_experts": num_experts,
    }


def dispatch(buffer: deep_ep.Buffer, given: dict[str, Any], **more: Any) -> tuple:
    layout = layout_of(buffer, given["topk_idx"], given["num_experts"])
    return buffer.dispatch(
        given["x"],
        **layout,
        topk_idx=given["topk_idx"],
        topk_weights=given["topk_weights"],
        **more,
    )


def round_trip(buffer: deep_ep.Buffer, given: dict[str, Any]) -> None:
    """Dispatch and combine with identity experts: every token comes back once for each rank that it was sent to."""
    recv_x, _, _, _, handle, _ = dispatch(buffer, given)
    combined, _, _ = buffer.combine(recv_x, handle)
    times = handle[4].sum(1, keepdim=True)
    torch.testing.assert_close(combined.float(), given["x"].float() * times, rtol=1e-2, atol=1e-2)


# A peer that never calls ---------------------------------------------------------------------------------------------


def silent_peer(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    given = inputs(rank, num_ranks)
    round_trip(make_buffer(), given)  # what a process does only once takes longer
    buffer = make_buffer(LIMIT_SECS)
    round_trip(buffer, given)
    errors = []
    if rank != 1:
        errors = [error_of(dispatch, buffer, given), error_of(dispatch, buffer, given)]
    else:
        time.sleep(3 * LIMIT_SECS)
        errors = [error_of(dispatch, buffer, given)]
    buffer.destroy()
    dist.barrier()
    round_trip(make_buffer(), given)  # the world goes on with a new buffer
    return errors


@pytest.mark.alone
def test_a_silent_peer_is_named_and_the_buffer_is_closed(device: str) -> None:
    results = run_ranks(silent_peer, 3)
    for rank in (0, 2):
        (first, text), (second, again) = results[rank]
        assert first in ("EPTimeout", "EPPeerFailed")
        assert re.search(r"dispatch \(call 3\): no signal( \(\w+\))? from rank 1 after 1 s", text)
        assert second == "EPClosed"
        assert "from rank 1 after 1 s" in again
    (kind, text) = results[1][0]
    assert kind in ("EPTimeout", "EPPeerFailed")
    assert "from rank 1 after 1 s" in text


def nobody_constructs(rank: int, num_ranks: int) -> tuple[str, str]:
    if rank == 0:
        return error_of(make_buffer, LIMIT_SECS)
    time.sleep(2 * LIMIT_SECS)
    return "none", ""


@pytest.mark.alone
def test_construction_has_the_same_limit(device: str) -> None:
    kind, text = run_ranks(nobody_constructs, 2)[0]
    assert kind == "EPTimeout"
    assert "not all ranks came within 1 s" in text


# A peer that is killed -----------------------------------------------------------------------------------------------


def killed_peer(rank: int, num_ranks: int, victim: int, in_combine: bool) -> tuple[str, str]:
    buffer, given = make_buffer(), inputs(rank, num_ranks)
    recv_x, _, _, _, handle, _ = dispatch(buffer, given)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    error = error_of(buffer.combine, recv_x, handle) if in_combine else error_of(dispatch, buffer, given)
    buffer.destroy()
    os._exit(3) if error[0] == "none" else None
    return error


@pytest.mark.parametrize("in_combine", [False, True])
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.cpu_only
def test_a_killed_peer_is_named(device: str, victim: int, in_combine: bool) -> None:
    results = run_ranks(killed_peer, 3, victim, in_combine, may_die=[victim], limit_secs=25)
    for rank in {0, 1, 2} - {victim}:
        kind, text = results[rank]
        assert kind in ("EPError", "EPPeerFailed")
        assert f"the process of rank {victim} has ended" in text
        assert ("combine (call 2)" if in_combine else "dispatch (call 2)") in text


def forgotten_job(rank: int, num_ranks: int) -> float:
    buffer, given = make_buffer(), inputs(rank, num_ranks)
    *_, handle, _ = dispatch(buffer, given)
    if rank == 0:
        buffer.dispatch(given["x"], handle=handle, async_finish=True)
        return 0.0  # and leaves; its peers still get its rows
    time.sleep(0.3)
    return float(buffer.dispatch(given["x"], handle=handle)[0].float().sum())


def test_a_rank_that_leaves_after_an_asynchronous_call_finishes_it(device: str) -> None:
    results = run_ranks(forgotten_job, 2)
    assert results[1] != 0.0


# A peer that is late, or stopped -------------------------------------------------------------------------------------


def late_peer(rank: int, num_ranks: int) -> list[float]:
    buffer, given = make_buffer(), inputs(rank, num_ranks)
    round_trip(buffer, given)
    before = buffer.stats()["wait_secs"]
    if rank == 1:
        time.sleep(1.5)
    round_trip(buffer, given)
    return [after - then for after, then in zip(buffer.stats()["wait_secs"], before, strict=True)]


@pytest.mark.cpu_only
@pytest.mark.alone
def test_a_late_peer_is_waited_for_and_accounted(device: str) -> None:
    results = run_ranks(late_peer, 3)
    for punctual in (0, 2):
        assert results[punctual][1] > 0.5
        assert results[punctual][1] > results[1][punctual]


def stopped_peer(rank: int, num_ranks: int) -> tuple[bool, bool]:
    buffer, given = make_buffer(), inputs(rank, num_ranks)
    recv_x, _, _, _, handle, _ = dispatch(buffer, given)
    torch.randn(200, 200) @ torch.randn(200, 200)  # a GPU loads what is new only when no kernel runs, none that waits
    buffer.dispatch(given["x"], handle=handle, async_finish=True)[-1].current_stream_wait()
    pids: list[Any] = [None] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    is_early = False
    if rank == 0:
        os.kill(pids[1], signal.SIGSTOP)
    else:
        time.sleep(0.3)  # it must not have done its part before it is stopped
    again, *_, event = buffer.dispatch(given["x"], handle=handle, async_finish=True)
    if rank == 0:
        torch.randn(200, 200) @ torch.randn(200, 200)
        is_early = event.event.query()
        os.kill(pids[1], signal.SIGCONT)
    event.current_stream_wait()
    return is_early, torch.equal(again, recv_x)


@pytest.mark.alone
def test_a_stopped_peer_delays_the_event_and_not_the_caller(device: str) -> None:
    assert run_ranks(stopped_peer, 2) == [(False, True), (False, True)]


def slow_reader(rank: int, num_ranks: int) -> tuple[int, int]:
    """In turns a rank sleeps behind its signal, while the others go on to the next call, as far as they can."""
    buffer, given = make_buffer(), inputs(rank, num_ranks)
    *_, mask, _ = buffer.get_dispatch_layout(given["topk_idx"], given["num_experts"])
    calls = [0]

    def fault(point: str) -> None:
        if "after" in point:
            calls[0] += 1
            if calls[0] % num_ranks == rank:
                time.sleep(0.02)

    buffer.set_fault_hook(fault)
    for turn in range(12):
        given["x"].fill_(100 * rank + turn)
        recv_x, _, _, _, handle, _ = dispatch(buffer, given)
        ends = [0, *handle[0][:, rank].tolist()]
        sources = [source for source in range(num_ranks) for _ in range(ends[source + 1] - ends[source])]
        assert recv_x[:, 0].tolist() == [100 * source + turn for source in sources]
        recv_x.fill_(turn + 1)
        combined, _, _ = buffer.combine(recv_x, handle)
        recv_x.fill_(-1)  # peers may still be reading what was posted, and not this
        assert torch.equal(combined[:, 0].float(), mask.sum(1).float() * (turn + 1))
    paths = buffer.stats()["calls"]
    buffer.destroy()  # others may still be reading
    return paths["dispatch/posted"], paths["combine/posted"]


@pytest.mark.cpu_only
def test_rows_that_were_posted_stay_until_a_slow_peer_has_read_them(device: str) -> None:
    assert run_ranks(slow_reader, 3) == [(12, 12)] * 3


# Peers that disagree -------------------------------------------------------------------------------------------------


def disagree(rank: int, num_ranks: int, how: str) -> tuple[str, str]:
    buffer, given = make_buffer(), inputs(rank, num_ranks)
    recv_x, _, _, _, handle, _ = dispatch(buffer, given)
    other = inputs(rank + 7, num_ranks)
    *_, other_handle, _ = dispatch(buffer, other)
    odd = rank == num_ranks - 1

    def call() -> None:
        if how == "operation" and odd:
            buffer.combine(recv_x, handle)
        elif how == "cached" and odd:
            buffer.dispatch(given["x"], handle=handle)
        elif how == "worst case" and odd:
            dispatch(buffer, given, num_worst_tokens=100)
        elif how == "handle":
            buffer.dispatch(given["x"], handle=other_handle if odd else handle)
        elif how == "combine handle":
            rows = recv_x.new_zeros(len(other_handle[3]), HIDDEN) if odd else recv_x
            buffer.combine(rows, other_handle if odd else handle)
        elif how == "hidden" and odd:
            dispatch(buffer, inputs(rank, num_ranks, hidden=HIDDEN + 1))
        elif how == "dtype" and odd:
            dispatch(buffer, {**given, "x": given["x"].half()})
        elif how == "experts" and odd:
            dispatch(buffer, {**given, "num_experts": 2 * given["num_experts"]})
        elif how == "ids" and odd:
            dispatch(buffer, {**given, "topk_idx": given["topk_idx"].int()})
        else:
            dispatch(buffer, given)
        buffer.check()

    return error_of(call)


DIFFERENCES = {
    "operation": "combine, not dispatch",
    "cached": "cached dispatch, not dispatch",
    "worst case": "worst-case dispatch, not dispatch",
    "handle": "handle",
    "combine handle": "handle",
    "hidden": f"hidden {HIDDEN + 1} not {HIDDEN}",
    "dtype": "dtype torch.float16 not torch.bfloat16",
    "experts": "num_experts 24 not 12",
    "ids": "idx_dtype torch.int32 not torch.int64",
}


@pytest.mark.parametrize("how", DIFFERENCES)
def test_ranks_that_disagree_all_raise(device: str, how: str) -> None:
    results = run_ranks(disagree, 3, how)
    assert all(kind in ("EPError", "EPPeerFailed") for kind, _ in results), results
    # Whichever rank notices first names the odd one, also if it is that one.
    assert all("all ranks must make the same call" in text for _, text in results), results
    assert all(f"rank 2 has {DIFFERENCES[how]}" in text and "rank 0 has" not in text for _, text in results), results


# Room that is too small ----------------------------------------------------------------------------------------------


def overflow(rank: int, num_ranks: int, is_async: bool) -> tuple[str, str]:
    buffer, given = make_buffer(), inputs(rank, num_ranks)
    num_rows = 3 if rank == 1 else 100

    def call() -> None:
        *_, event = dispatch(buffer, given, num_worst_tokens=num_rows, async_finish=is_async)
        if is_async:
            event.current_stream_wait()

    error = error_of(call)
    round_trip(buffer, given)  # nothing was lost
    return error


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.cpu_only
def test_too_few_worst_tokens_raise_on_all_ranks_and_lose_nothing(device: str, is_async: bool) -> None:
    for kind, text in run_ranks(overflow, 3, is_async):
        assert kind == "EPOverflow"
        assert "rank 1 receives" in text
        assert "num_worst_tokens=3" in text


# Leaving -------------------------------------------------------------------------------------------------------------


def early_leaver(rank: int, num_ranks: int) -> tuple[str, str]:
    buffer, given = make_buffer(), inputs(rank, num_ranks)
    round_trip(buffer, given)
    dist.barrier()  # or a rank may still be in it when another has failed for the one that left
    if rank == 0:
        buffer.destroy()
        buffer.destroy()
        return error_of(dispatch, buffer, given)
    return error_of(dispatch, buffer, given)


@pytest.mark.cpu_only
def test_a_rank_that_destroyed_its_buffer_is_named(device: str) -> None:
    results = run_ranks(early_leaver, 3)
    assert results[0][0] == "EPClosed"
    for kind, text in results[1:]:
        assert kind in ("EPError", "EPPeerFailed")
        assert "rank 0 has destroyed its buffer" in text


def last_call(rank: int, num_ranks: int) -> None:
    buffer, given = make_buffer(), inputs(rank, num_ranks)
    if rank == 0:
        recv_x, _, _, _, handle, _ = dispatch(buffer, given)
        buffer.combine(recv_x, handle)
        buffer.destroy()
        return
    time.sleep(0.05 * rank)
    recv_x, _, _, _, handle, _ = dispatch(buffer, given)
    time.sleep(0.05 * rank)
    buffer.combine(recv_x, handle)


def test_leaving_after_the_last_call_harms_nobody(device: str) -> None:
    run_ranks(last_call, 4)


def wrong_then_right(rank: int, num_ranks: int) -> tuple[str, str]:
    buffer, given = make_buffer(), inputs(rank, num_ranks)
    error = error_of(dispatch, buffer, {**given, "x": given["x"].t()})
    round_trip(buffer, given)
    return error


def test_a_wrong_argument_sends_nothing(device: str) -> None:
    results = run_ranks(wrong_then_right, 2)
    assert [kind for kind, _ in results] == ["ValueError"] * 2


def empty_ranks(rank: int, num_ranks: int) -> None:
    buffer = make_buffer()
    for empty in (rank % 2, 1 - rank % 2, 1, 0):
        given = inputs(rank, num_ranks, num_tokens=0 if empty else 5)
        round_trip(buffer, given)
    given = inputs(rank, num_ranks, num_tokens=5)
    given["topk_idx"].fill_(-1)
    round_trip(buffer, given)  # nobody receives anything
    given["topk_idx"].fill_(0)
    round_trip(buffer, given)  # everything goes to one rank


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
def test_empty_ranks_and_empty_receivers(device: str, num_ranks: int) -> None:
    run_ranks(empty_ranks, num_ranks)
