"""Dispatch and combine across nodes: a host split into nodes by `DEEP_EP_RANKS_PER_NODE`."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import error_of, run_ranks
from deep_ep import Buffer, Config, reference
from deep_ep.soak import soak_rank
from deep_ep.utils.math import calc_diff, per_token_cast_back, per_token_cast_to_fp8
from internode import (
    EXPERTS_PER_RANK,
    HIDDEN,
    World,
    combined,
    dispatch,
    equal,
    layout_arguments,
    make_buffer,
    make_world,
    round_trip,
    topk_arguments,
)

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.cpu_only]

LIMIT_SECS = 1.0


def nodes_of(ranks_per_node: int, **more: str) -> dict[str, str]:
    return {"DEEP_EP_RANKS_PER_NODE": str(ranks_per_node), "DEEP_EP_TIMEOUT_SECS": "30", **more}


# The checks of DeepEP's internode test, with every one of them asserted ---------------------------------------------


def several(rank: int, num_ranks: int, *steps: tuple) -> list[Any]:
    """One step after the other, in processes that are started once: starting them takes longer than most steps."""
    return [step(rank, num_ranks, *args) for step, *args in steps]


@contextmanager
def nodes_here(ranks_per_node: int) -> Iterator[None]:
    """Inside a rank: buffers that are made now find nodes of this size."""
    before = os.environ["DEEP_EP_RANKS_PER_NODE"]
    os.environ["DEEP_EP_RANKS_PER_NODE"] = str(ranks_per_node)
    yield
    os.environ["DEEP_EP_RANKS_PER_NODE"] = before


def whole_test(
    rank: int, num_ranks: int, ranks_per_node: int, idx_dtype: torch.dtype = torch.int64, ways: Any = None
) -> None:
    """Every kind of payload, with and without top-k; `ways` are the pairs of async and previous event to try."""
    world = make_world(num_ranks, ranks_per_node, num_tokens=3, idx_dtype=idx_dtype)
    with nodes_here(ranks_per_node):
        buffer = make_buffer()
    config = Config(24, 8, 512, 16, 128)
    layout = layout_arguments(buffer, world)
    for name, expected in zip(reference.Layout._fields, world.layouts[rank], strict=True):
        equal(layout[name.replace("per_node", "per_rdma_rank")], expected)
    constant = [torch.full_like(x, float(source)) for source, x in enumerate(world.xs)]
    num_cases = 0
    for xs, is_fp8, has_topk in product((world.xs, constant), (False, True), (False, True)):
        for is_async, has_previous in ways or [(is_fp8 == has_topk, is_fp8 == has_topk)]:
            check_case(buffer, world, xs, layout, config, is_fp8, has_topk, is_async, has_previous)
            num_cases += 1
    calls = buffer.stats()["calls"]
    assert calls["combine/pulled"] == calls["combine/copied_in"] == num_cases
    buffer.destroy()


def sent(xs: list[torch.Tensor], is_fp8: bool) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
    if not is_fp8:
        return xs, None
    pairs = [per_token_cast_to_fp8(x) for x in xs]
    return [x for x, _ in pairs], [scales.t().contiguous().t() for _, scales in pairs]  # column-major, as callers do


def check_case(
    buffer: Buffer,
    world: World,
    xs: list[torch.Tensor],
    layout: dict[str, Any],
    config: Config,
    is_fp8: bool,
    has_topk: bool,
    is_async: bool,
    has_previous: bool,
) -> None:
    rank = buffer.rank
    payload, scales = sent(xs, is_fp8)
    x = payload[rank] if scales is None else (payload[rank], scales[rank])
    expected = world.dispatched(scales, payload, align=4)
    mine = expected[rank]
    previous = Buffer.capture() if has_previous else None
    arguments = {"config": config, "async_finish": is_async, "previous_event": previous}
    on_stream = is_async and has_previous
    topk = topk_arguments(world, rank) if has_topk else {}
    recv, idx, weights, counts, handle, event = buffer.dispatch(
        x, **layout, **topk, expert_alignment=4, allocate_on_comm_stream=on_stream, **arguments
    )
    event.current_stream_wait() if is_async else None
    recv_x, recv_scales = recv if scales is not None else (recv, None)
    equal(recv_x, mine.recv_x)
    if scales is not None:
        equal(recv_scales, mine.recv_scales)
    assert counts == mine.num_recv_tokens_per_expert_list
    check_handle(handle, mine, world, rank)
    if has_topk:
        equal(idx, mine.recv_topk_idx)
        equal(weights, mine.recv_topk_weights)
        check_worst_case(buffer, x, layout, topk, mine, arguments)
    else:
        assert idx is None
        assert weights is None

    # Cached, also along a handle that was rebuilt from clones.
    for kept in (handle, tuple(item.clone() for item in handle)):
        again, *nothing, event = buffer.dispatch(x, handle=kept, **arguments)
        event.current_stream_wait() if is_async else None
        assert nothing == [None] * 4
        equal(again[0] if scales is not None else again, mine.recv_x)
        if scales is not None:
            equal(again[1], mine.recv_scales)

    limit = 5e-4 if is_fp8 else 5e-6
    rows = [per_token_cast_back(one.recv_x, one.recv_scales) if is_fp8 else one.recv_x for one in expected]
    check_combine(buffer, world, rows, handle, [one.recv_topk_weights for one in expected], xs, arguments, limit)


def check_handle(handle: tuple, expected: reference.Dispatched, world: World, rank: int) -> None:
    assert len(handle) == 10
    num_nodes, num_tokens = world.num_ranks // world.ranks_per_node, world.xs[rank].size(0)
    passed_on = handle[9].size(0)
    shapes = [
        (num_tokens, world.num_ranks),
        (num_nodes, 12),
        (world.num_ranks, 12),
        (num_nodes, 12),
        (num_nodes,),
        (world.num_ranks, 12),
        (world.num_ranks,),
        (len(expected.src_rank), 8),
        (num_tokens, num_nodes),
        (passed_on, world.ranks_per_node),
    ]
    assert [tuple(item.shape) for item in handle] == shapes
    assert [item.dtype for item in handle] == [torch.bool, *[torch.int32] * 6, torch.uint8, *[torch.int32] * 2]
    ends = [sum(source <= one for source in expected.src_rank) for one in range(world.num_ranks)]
    assert handle[-4].tolist() == ends
    sources = handle[7].view(torch.int32)
    assert sources.tolist() == [list(pair) for pair in zip(expected.src_rank, expected.src_token, strict=True)]


def check_worst_case(buffer, x, layout, topk, mine, arguments) -> None:
    num_rows = mine.recv_x.size(0)
    recv, idx, weights, counts, handle, event = buffer.dispatch(
        x, **layout, **topk, num_worst_tokens=num_rows + 7, **arguments
    )
    event.current_stream_wait() if arguments["async_finish"] else None
    recv_x = recv[0] if isinstance(recv, tuple) else recv
    assert recv_x.size(0) == num_rows + 7
    assert counts == []
    equal(recv_x[:num_rows], mine.recv_x)
    equal(idx[:num_rows], mine.recv_topk_idx)
    equal(weights[:num_rows], mine.recv_topk_weights)
    assert (idx[num_rows:] == -1).all()
    assert handle[7].size(0) == num_rows + 7


def check_combine(buffer, world, rows, handle, weights, xs, arguments, limit) -> None:
    rank = buffer.rank
    random = torch.Generator().manual_seed(77)
    biases = [(torch.ones_like(x), torch.randn(x.shape, generator=random).to(x.dtype)) for x in xs]
    rows = [row.bfloat16() for row in rows]
    expected = reference.combine(rows, world.masks, biases, weights, world.ranks_per_node)[rank]
    in_window = buffer.get_combine_buffer(handle, hidden=HIDDEN, dtype=torch.bfloat16)
    in_window.copy_(rows[rank])
    for x in (rows[rank].clone(), in_window):
        sums, summed_weights, event = buffer.combine(
            x, handle, topk_weights=weights[rank], bias=biases[rank], **arguments
        )
        event.current_stream_wait() if arguments["async_finish"] else None
        equal(sums, expected.combined_x)
        equal(summed_weights, expected.combined_topk_weights)
        # And what DeepEP's own test compares: without the biases, the input times its ranks.
        bare = sums.float() - biases[rank][0].float() - biases[rank][1].float()
        whole = xs[rank].float() * world.masks[rank].sum(1, keepdim=True)
        assert calc_diff(bare, whole) < limit


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
    assert min(calls.values()) > num_calls // 50, calls


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


def edges(rank: int, num_ranks: int, ranks_per_node: int) -> None:
    buffer = make_buffer(num_nvl_bytes=128)
    whole = make_world(num_ranks, ranks_per_node, num_tokens=5)
    nothing = make_world(num_ranks, ranks_per_node, num_tokens=0)
    half = range(num_ranks // 2)  # a node, or two, without tokens
    empty_nodes = World(
        num_ranks,
        ranks_per_node,
        *(
            [getattr(whole if one in half else nothing, name)[one] for one in range(num_ranks)]
            for name in ("xs", "ids", "weights")
        ),
    )
    one_rank = make_world(num_ranks, ranks_per_node, num_tokens=5)
    for ids in one_rank.ids:
        ids.fill_(EXPERTS_PER_RANK * (num_ranks - 1))
    nowhere = make_world(num_ranks, ranks_per_node, num_tokens=5)
    for ids in nowhere.ids:
        ids.fill_(-1)
    for world in (nothing, empty_nodes, one_rank, nowhere, whole):
        recv_x, idx, _, _, handle, _ = dispatch(buffer, world)
        expected = world.dispatched()
        equal(recv_x, expected[rank].recv_x)
        equal(idx, expected[rank].recv_topk_idx)
        equal(buffer.combine(recv_x, handle)[0], combined(world, rank))
        again, *_ = buffer.dispatch(world.xs[rank], handle=handle)
        equal(again, expected[rank].recv_x)


def test_a_rank_on_each_node() -> None:
    run_ranks(several, 3, (edges, 1), (random_calls, 1, 14, 25), env=nodes_of(1))


# What callers see ----------------------------------------------------------------------------------------------------


def face(rank: int, num_ranks: int) -> None:
    world = make_world(num_ranks, 2, num_tokens=60)
    buffer = make_buffer(num_rdma_bytes=1024, low_latency_mode=True)
    layout, topk = layout_arguments(buffer, world), topk_arguments(world, rank)

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
            buffer._engine.window.fault = lambda _: os.kill(os.getpid(), signal.SIGKILL)
        elif how == "raises":
            buffer._engine.window.fault = _raise
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
