"""Dispatch and combine across nodes: a host split into nodes by `DEEP_EP_RANKS_PER_NODE`."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
import warnings
from collections import Counter
from concurrent.futures import Future
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import error_of, run_ranks
from deep_ep import Buffer, Config, EventHandle, EventOverlap
from deep_ep.engine.cpu.nodes.traffic import Traffic
from deep_ep.tools.soak import soak_rank
from internode import (
    EXPERTS_PER_RANK,
    HIDDEN,
    combined,
    dispatch,
    edges,
    equal,
    layout_arguments,
    make_buffer,
    make_world,
    nodes_here,
    nodes_of,
    round_trip,
    several,
    topk_arguments,
    whole_test,
)

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.cpu_only]

LIMIT_SECS = 1.0
STUCK_LIMIT_SECS = 3.0


def test_everything_that_deepeps_own_test_checks_on_2x2() -> None:
    run_ranks(whole_test, 4, 2, torch.int64, list(product((False, True), repeat=2)), env=nodes_of(2))


def test_the_same_on_2x4_and_4x2_and_groups_of_their_own() -> None:
    steps = [(whole_test, 4), (whole_test, 2), (own_groups,)]
    run_ranks(several, 8, *steps, env=nodes_of(2))


def test_the_same_on_3x2_and_random_calls_on_2x3() -> None:
    steps = [(whole_test, 2, torch.int32), (random_calls, 3, 17, 25)]
    run_ranks(several, 6, *steps, env=nodes_of(2))


def random_calls(rank: int, num_ranks: int, ranks_per_node: int, seed: int, num_calls: int) -> None:
    with nodes_here(ranks_per_node):
        calls = soak_rank(rank, num_ranks, seed, num_calls).calls
    assert sum(calls.values()) == num_calls
    assert len(calls) > 4, calls


def limited_calls(rank: int, num_ranks: int, limits: tuple[int, ...], seed: int) -> dict[str, Any]:
    os.environ["DEEP_EP_ARENA_BYTES"] = str(limits[rank % len(limits)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        stats = soak_rank(rank, num_ranks, seed, 40).stats
    del os.environ["DEEP_EP_ARENA_BYTES"]
    return stats


def test_random_calls_straight_and_through_staging() -> None:
    steps = [(limited_calls, (4096,), 32), (limited_calls, (0, 4096, 16384, 0), 35), (random_calls, 2, 15, 100)]
    results = run_ranks(several, 4, *steps, env=nodes_of(2))
    for index in (0, 1):
        stats = [result[index] for result in results]
        paths = sum((Counter(one["calls"]) for one in stats), Counter())
        assert paths["dispatch/staged"] > 0
        assert paths["combine/staged"] > 0
        assert max(one["rounds"] for one in stats) > 40


# Shapes that are all edge --------------------------------------------------------------------------------------------


def no_columns(rank: int, num_ranks: int) -> None:
    world, buffer = make_world(num_ranks, 1, num_tokens=5), make_buffer()
    recv_x, _, weights, _, handle, _ = dispatch(buffer, world)
    empty_x, summed, _ = buffer.combine(recv_x[:, :0].contiguous(), handle, topk_weights=weights)
    combined_x, empty_weights, _ = buffer.combine(recv_x, handle, topk_weights=weights[:, :0].contiguous())
    assert empty_x.shape == empty_weights.shape == (len(world.xs[rank]), 0)
    equal(combined_x, combined(world, rank))
    equal(summed, buffer.combine(recv_x, handle, topk_weights=weights)[1])
    buffer.destroy()


def test_a_rank_on_each_node() -> None:
    run_ranks(several, 3, (edges, 1), (no_columns,), (random_calls, 1, 14, 25), env=nodes_of(1))


# What callers see ----------------------------------------------------------------------------------------------------


def face(rank: int, num_ranks: int) -> None:
    world = make_world(num_ranks, 2, num_tokens=60)
    buffer = make_buffer(num_rdma_bytes=1024, low_latency_mode=True)
    layout, topk = layout_arguments(buffer, world), topk_arguments(world, buffer)

    def messages(num_tokens: int) -> dict[str, int]:
        before = buffer.stats()["rail"]
        config = Config(20, 6, 256, num_tokens, 2 * num_tokens)
        recv_x, *_, handle, _ = buffer.internode_dispatch(world.xs[rank], **layout, **topk, config=config)
        buffer.internode_combine(recv_x, handle, config=config)
        return {name: count - before[name] for name, count in buffer.stats()["rail"].items()}

    fine, coarse = messages(1), messages(1000)
    assert "shm inside a node" in buffer.transport
    assert "message between 2 nodes" in repr(buffer)
    crossing = int(world.layouts[rank].num_tokens_per_node[1 - rank // 2])
    back = int(world.layouts[(rank + 2) % 4].num_tokens_per_node[rank // 2])
    assert fine["messages_sent"] == 2 + crossing + back  # one to announce each call, and a row each
    assert coarse["messages_sent"] == 2 + 2
    assert fine["messages_received"] == 2 + crossing + back
    # Rows cross once for each node, whatever ranks of it they go to.
    least = (crossing + back) * HIDDEN * 2
    assert least < coarse["bytes_sent"] < 1.3 * least + 1000
    recv_x, *_, handle, _ = dispatch(buffer, world)
    six = [torch.zeros(1)] * 6
    for call in (lambda: buffer.combine(recv_x, six), lambda: buffer.dispatch(world.xs[rank], handle=six)):
        with pytest.raises(ValueError, match=r"`handle` must have 10 items \(2 nodes\), this one has 6"):
            call()
    cut = (handle[0], handle[1][:, 1:], *handle[2:])
    with pytest.raises(ValueError, match="the `handle`'s `rdma_channel_prefix_matrix` must be"):
        buffer.combine(recv_x, cut)
    wrong = {**layout, **topk, "num_tokens_per_rdma_rank": layout["num_tokens_per_rdma_rank"] + 1}
    with pytest.raises(ValueError, match="`num_tokens_per_rdma_rank` must count the tokens"):
        buffer.dispatch(world.xs[rank], **wrong)
    missing = {**layout, **topk, "num_tokens_per_rdma_rank": None}
    with pytest.raises(ValueError, match="`num_tokens_per_rdma_rank` must be given"):
        buffer.dispatch(world.xs[rank], **missing)
    with pytest.raises(ValueError, match=r"experts need num_rdma_bytes=\d+"):
        buffer.low_latency_dispatch(world.xs[rank][:, :128].contiguous(), world.ids[rank], 128, world.num_experts)
    buffer.combine(recv_x, handle)  # and the buffer still works
    buffer.destroy()


def own_groups(rank: int, num_ranks: int) -> None:
    """Two groups of two nodes each, and another buffer after the first is gone."""
    groups = [dist.new_group([0, 1, 2, 3]), dist.new_group([4, 5, 6, 7])]
    world = make_world(4, 2)
    expected = world.dispatched()
    for _ in range(2):
        buffer = Buffer(groups[rank // 4], explicitly_destroy=True)
        recv_x, *_ = dispatch(buffer, world)
        equal(recv_x, expected[rank % 4].recv_x)
        buffer.destroy()


def over_comm(rank: int, num_ranks: int) -> None:
    class Comm:
        def Get_rank(self) -> int:
            return rank

        def Get_size(self) -> int:
            return num_ranks

        def allgather(self, value: Any) -> list[Any]:
            values: list[Any] = [None] * num_ranks
            dist.all_gather_object(values, value)
            return values

    world = make_world(num_ranks, 2)
    buffer = Buffer(None, comm=Comm(), explicitly_destroy=True)
    equal(dispatch(buffer, world)[0], world.dispatched()[rank].recv_x)
    buffer.destroy()


def wide(rank: int, num_ranks: int) -> None:
    """Rows so wide that two are a tile of sums, and eight a message: tokens are added up while others travel."""
    world = make_world(num_ranks, 2, num_tokens=20, hidden=1 << 16)
    buffer, biases = make_buffer(), [torch.ones_like(x) for x in world.xs]
    for config in (None, Config(20, 6, 256, 3, 6)):  # chunks of whole tiles, and others
        recv_x, *_, handle, _ = dispatch(buffer, world, config=config)
        equal(recv_x, world.dispatched()[rank].recv_x)
        equal(buffer.combine(recv_x, handle, config=config)[0], combined(world, rank))
        sums, _, _ = buffer.combine(recv_x, handle, bias=biases[rank], config=config)
        equal(sums, combined(world, rank, biases))
    buffer.destroy()


def forced(rank: int, num_ranks: int) -> None:
    """`DEEP_EP_TRANSPORT=message`: TCP also between ranks of a host, each of which is a node of its own then."""
    os.environ["DEEP_EP_TRANSPORT"] = "message"
    buffer = make_buffer()
    del os.environ["DEEP_EP_TRANSPORT"]
    assert "solo inside a node" in buffer.transport
    assert f"message between {num_ranks} nodes (TCP on the rail: DEEP_EP_TRANSPORT=message)" in buffer.transport
    round_trip(buffer, make_world(num_ranks, 1))
    buffer.destroy()


def queued_behind_a_worst_case(rank: int, num_ranks: int, is_uneven: bool) -> None:
    """The handle of an asynchronous worst-case dispatch is complete at once, and so may be detached.

    If rank 0 has a smaller `num_worst_tokens` than what it forwards, its handle gets a larger tensor when the dispatch
    is made: calls behind it have to find that.
    """
    world = make_world(num_ranks, 2)
    for ids in world.ids if is_uneven else []:
        ids.fill_(EXPERTS_PER_RANK)  # of rank 1, on whose node rank 0 forwards rows
    buffer = make_buffer()
    arguments = {**layout_arguments(buffer, world), **topk_arguments(world, buffer), "num_worst_tokens": 200}
    if is_uneven and rank == 0:
        arguments["num_worst_tokens"] = 1
    gate: Future = Future()
    stream = {"previous_event": EventHandle(gate), "async_finish": True}
    *_, handle, _ = buffer.internode_dispatch(world.xs[rank], **arguments, **stream)
    if not is_uneven:
        handle = tuple(tensor.detach() for tensor in handle)
    recv_x, *_ = buffer.dispatch(world.xs[rank], handle=handle, async_finish=True)
    out, _, event = buffer.combine(recv_x, handle, async_finish=True)
    gate.set_result(None)
    event.current_stream_wait()
    expected = world.dispatched()[rank].recv_x
    equal(recv_x[: len(expected)], expected)
    equal(out, combined(world, rank))
    buffer.destroy()


def test_calls_queued_behind_a_worst_case_dispatch() -> None:
    run_ranks(several, 4, *((queued_behind_a_worst_case, is_uneven) for is_uneven in (False, True)), env=nodes_of(2))


# Faults --------------------------------------------------------------------------------------------------------------


def overflow(rank: int, num_ranks: int) -> None:
    world = make_world(num_ranks, 2)
    buffer = make_buffer()
    kind, text = error_of(dispatch, buffer, world, num_worst_tokens=3 if rank == 1 else 200)
    assert kind == "EPOverflow"
    assert "rank 1 receives" in text
    assert "num_worst_tokens=3" in text
    equal(dispatch(buffer, world)[0], world.dispatched()[rank].recv_x)  # nothing was lost
    buffer.destroy()


def stuck_on_its_rail(rank: int, num_ranks: int) -> str:
    """Rank 0 stops in a dispatch when it has sent everything, and says that it waits for its rail.

    Node 1 has all rows, and goes on: there rank 3, first, waits for rank 1, which waits for rank 0.
    """
    world = make_world(num_ranks, 2)
    buffer = make_buffer(limit_secs=STUCK_LIMIT_SECS)
    round_trip(buffer, world)

    def stop(point: str) -> None:
        if point == "dispatch: before ready":
            buffer._engine.window.board.waiting.store_release(1)
            time.sleep(2 * STUCK_LIMIT_SECS)

    if rank == 0:
        buffer.set_fault_hook(stop)

    def calls() -> None:
        recv_x, *_, handle, _ = dispatch(buffer, world)
        time.sleep(0.3 if rank == 2 else 0.0)  # else it would be the first to notice, and would name the right one
        buffer.combine(recv_x, handle)

    return error_of(calls)[1]


def test_a_rank_that_waits_for_another_one_of_its_node_is_not_blamed_by_its_rail() -> None:
    texts = run_ranks(stuck_on_its_rail, 4, env=nodes_of(2))
    assert all("from rank 0 (node 0)" in text or "from rank 0 after" in text for text in texts), texts


def last_call(rank: int, num_ranks: int) -> None:
    world = make_world(num_ranks, 2)
    buffer = make_buffer()
    time.sleep(0.05 * rank)
    recv_x, *_, handle, _ = dispatch(buffer, world)
    if rank == 0:
        buffer.combine(recv_x, handle, async_finish=True)
        return  # and leaves; the others still get its rows
    time.sleep(0.1 * rank)
    equal(buffer.combine(recv_x, handle)[0], combined(world, rank))
    buffer.destroy()


def test_what_callers_see() -> None:
    """Edges, groups by other means, too little room; and at the end a rank that leaves after its last call."""
    steps = [(edges, 2), (face,), (wide,), (over_comm,), (forced,), (overflow,), (last_call,)]
    run_ranks(several, 4, *steps, env=nodes_of(2))


def broken(rank: int, num_ranks: int, how: str, victim: int) -> tuple[str, str, float]:
    world = make_world(num_ranks, 2)
    make_buffer().destroy()  # what a process does only once takes longer
    buffer = make_buffer(LIMIT_SECS if how == "silent" else 20.0)
    recv_x, *_, handle, _ = dispatch(buffer, world)
    buffer.combine(recv_x, handle)
    dist.barrier()
    begin = time.monotonic()
    if rank == victim:
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "killed inside":
            buffer.set_fault_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
        elif how == "raises":
            buffer.set_fault_hook(_raise)
        elif how == "silent":
            time.sleep(3 * LIMIT_SECS)
        elif how == "destroys":
            buffer.destroy()
            return "none", "", 0.0
        else:
            return (*error_of(buffer.combine, recv_x, handle), time.monotonic() - begin)
    kind, text = error_of(dispatch, buffer, world)
    secs = time.monotonic() - begin
    again = error_of(dispatch, buffer, world)
    assert again[0] == "EPClosed", again
    buffer.destroy()
    if how in ("silent", "raises"):
        dist.barrier()
        round_trip(make_buffer(), world)  # the world goes on with a new buffer
    return kind, text, secs


def _raise(point: str) -> None:
    raise KeyError("an accident")


SAID = {
    "killed": r"(the process of rank {0} has ended|rank {0} \(node \d\) has closed the connection)",
    "killed inside": r"(the process of rank {0} has ended|rank {0} \(node \d\) has closed the connection)",
    "silent": r"no (signal|message) from rank {0}( \(node \d\))? after 1 s",
    "raises": "'an accident'",
    "destroys": r"rank {0}( \(node \d\))? has destroyed its buffer",
    "another call": "all ranks must make the same call",
}


@pytest.mark.parametrize(("how", "victim"), [("killed", 1), ("killed inside", 3)])
def test_a_rank_that_is_killed_is_named_on_all_nodes(how: str, victim: int) -> None:
    results = run_ranks(broken, 4, how, victim, may_die=[victim], limit_secs=60, env=nodes_of(2))
    check_blame(results, how, victim, [rank for rank in range(4) if rank != victim])


@pytest.mark.alone
def test_all_ranks_of_all_nodes_name_who_is_to_blame() -> None:
    faults = {"silent": 1, "raises": 3, "destroys": 1, "another call": 3}
    steps = [(broken, how, victim) for how, victim in faults.items()]
    results = run_ranks(several, 4, *steps, limit_secs=60, env=nodes_of(2))
    for index, (how, victim) in enumerate(faults.items()):
        ranks = [rank for rank in range(4) if rank != victim or how != "destroys"]
        check_blame([result[index] for result in results], how, victim, ranks)


def check_blame(results: list[Any], how: str, victim: int, ranks: list[int]) -> None:
    for rank in ranks:
        kind, text, secs = results[rank]
        assert kind in ("EPError", "EPPeerFailed", "EPTimeout", "KeyError"), (rank, kind, text)
        assert re.search(SAID[how].format(victim), text), (rank, text)
        assert secs < (4 * LIMIT_SECS if how == "silent" else 5), (rank, secs, text)


# A rank that fails while others sum its rows -------------------------------------------------------------------------


def overwritten(rank: int, num_ranks: int) -> tuple[str, bool]:
    """Rank 3 fails and overwrites its rows before rank 2 sums them for rank 0, and rank 1 says nothing of it in time.

    Returns:
        The error of this rank, and whether what it got is right.
    """
    world = make_world(num_ranks, 2, num_tokens=40)
    buffer = make_buffer(20.0)
    recv_x, *_, handle, _ = dispatch(buffer, world)
    engine, start, sums = buffer._engine, Traffic.start, []

    def fail(point: str) -> None:
        if point == "combine: after ready":
            dist.barrier(group)
            raise KeyError("an accident")

    def be_late(point: str) -> None:
        if point == "combine: after taken":
            time.sleep(1.0)

    def sum_late(traffic: Traffic) -> None:
        dist.barrier(group)  # it has seen everybody in the call, and nobody has failed
        dist.barrier(group)  # now somebody has
        start(traffic)

    group = dist.new_group([2, 3])
    if rank == 3:
        engine.window.fault = fail
    elif rank == 1:
        engine.window.fault = be_late
    elif rank == 2:
        Traffic.start = sum_late  # type: ignore[method-assign]
    kind, _ = error_of(lambda: sums.append(buffer.combine(recv_x, handle)[0]))
    if rank == 3:
        recv_x.fill_(77)
        dist.barrier(group)
    Traffic.start = start  # type: ignore[method-assign]
    is_right = not sums or torch.equal(sums[0], combined(world, rank))
    buffer.destroy()
    return kind, is_right


def test_sums_of_rows_that_a_failed_rank_has_overwritten_do_not_leave_the_node() -> None:
    results = run_ranks(overwritten, 4, env=nodes_of(2))
    assert all(is_right for _, is_right in results), results
    assert [kind for kind, _ in results] == ["EPPeerFailed", "EPPeerFailed", "EPPeerFailed", "KeyError"]


# A caller that leaves a call which the comm stream is making --------------------------------------------------------


def interrupted(rank: int, num_ranks: int, hidden: int) -> tuple[str, bool]:
    """Rank 0 is interrupted in a dispatch that waits behind a queued one, and overwrites its tokens at once.

    Returns:
        The error of this rank, and whether what it got is right.
    """
    world = make_world(num_ranks, 1, hidden=hidden)
    buffer = make_buffer(20.0)
    x, gate = world.xs[rank].clone(), Future()
    recv_x, *_, handle, _ = dispatch(buffer, world)
    num_offered, got, is_overwritten = [0], [], threading.Event()

    def fault(point: str) -> None:
        num_offered[0] += point == "cached dispatch: after offered"
        if num_offered[0] == 2 and "after offered" in point:
            os.kill(os.getpid(), signal.SIGINT)
            is_overwritten.wait(0.5)  # before anything is sent, if it may

    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        buffer.set_fault_hook(fault)
        first = EventOverlap(EventHandle(gate))
        buffer.dispatch(x.clone(), handle=handle, previous_event=first, async_finish=True)
        threading.Timer(0.1, gate.set_result, [None]).start()
    else:
        buffer.dispatch(x, handle=handle)
    error = "none"
    try:
        got.append(buffer.dispatch(x, handle=handle)[0])
    except (Exception, KeyboardInterrupt) as raised:
        error = type(raised).__name__
    if rank == 0:
        x.fill_(77)
        is_overwritten.set()
    buffer.destroy()
    return error, not got or torch.equal(got[0], recv_x)


@pytest.mark.parametrize("hidden", [HIDDEN, 4096])  # rows that are copied into chunks, and rows that are not
def test_an_interrupted_caller_cannot_spoil_what_other_nodes_get(hidden: int) -> None:
    (error, _), (_, is_right) = run_ranks(interrupted, 2, hidden, env=nodes_of(1))
    assert error == "KeyboardInterrupt"
    assert is_right
