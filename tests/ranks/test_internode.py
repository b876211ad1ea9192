"""Dispatch and combine across nodes: a host split into nodes by `DEEP_EP_RANKS_PER_NODE`."""

from __future__ import annotations

import os
import re
import signal
import time
import warnings
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import error_of, run_ranks
from deep_ep import Buffer, Config, reference
from deep_ep.soak import soak_rank
from deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.cpu_only]

SHAPES = {"2x2": (4, 2), "2x4": (8, 4), "3x2": (6, 2), "4x2": (8, 2)}
HIDDEN, TOPK, EXPERTS_PER_RANK = 256, 4, 4
LIMIT_SECS = 1.0


def nodes_of(ranks_per_node: int, **more: str) -> dict[str, str]:
    return {"DEEP_EP_RANKS_PER_NODE": str(ranks_per_node), "DEEP_EP_TIMEOUT_SECS": "30", **more}


@dataclass
class World:
    """The inputs of all ranks, the same on each, and what the oracle makes of them."""

    num_ranks: int
    ranks_per_node: int
    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]

    @property
    def num_experts(self) -> int:
        return EXPERTS_PER_RANK * self.num_ranks

    @cached_property
    def layouts(self) -> list[reference.Layout]:
        return [reference.layout(ids, self.num_experts, self.num_ranks, self.ranks_per_node) for ids in self.ids]

    @cached_property
    def masks(self) -> list[torch.Tensor]:
        return [one.is_token_in_rank for one in self.layouts]

    def dispatched(
        self, scales: list[torch.Tensor] | None = None, xs: list[torch.Tensor] | None = None, align: int = 1
    ):
        return reference.dispatch(
            xs or self.xs,
            self.masks,
            scales=scales,
            topk_idx=self.ids,
            topk_weights=self.weights,
            num_experts=self.num_experts,
            expert_alignment=align,
            num_tokens_per_expert=[one.num_tokens_per_expert for one in self.layouts],
        )


def make_world(
    num_ranks: int, ranks_per_node: int, num_tokens: int = 10, idx_dtype: torch.dtype = torch.int64, seed: int = 0
) -> World:
    """Rank r has `num_tokens + r` tokens, routed to a few nodes at most, as a group-limited gate does."""
    random = torch.Generator().manual_seed(seed)
    num_nodes, num_experts = num_ranks // ranks_per_node, EXPERTS_PER_RANK * num_ranks
    xs, ids, weights = [], [], []
    for rank in range(num_ranks):
        count = num_tokens + rank if num_tokens else 0
        xs.append(torch.randn(count, HIDDEN, generator=random).bfloat16())
        scores = torch.rand(count, num_experts, generator=random)
        by_node = scores.view(count, num_nodes, num_experts // num_nodes)
        best = by_node.amax(2).topk(min(num_nodes, 2), dim=1).indices
        allowed = torch.zeros(count, num_nodes, dtype=torch.bool).scatter_(1, best, True)
        scores = by_node.masked_fill(~allowed.unsqueeze(2), -1).reshape(count, num_experts)
        chosen = scores.topk(TOPK, dim=1).indices
        chosen[torch.rand(chosen.shape, generator=random) < 0.1] = -1
        ids.append(chosen.to(idx_dtype))
        weights.append(torch.rand(count, TOPK, generator=random))
    return World(num_ranks, ranks_per_node, xs, ids, weights)


def make_buffer(limit_secs: float | None = None, **more: Any) -> Buffer:
    return Buffer(dist.group.WORLD, explicitly_destroy=True, num_cpu_timeout_secs=limit_secs, **more)


def layout_arguments(buffer: Buffer, world: World) -> dict[str, Any]:
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(world.ids[buffer.rank], world.num_experts)
    return {
        "num_tokens_per_rank": per_rank,
        "num_tokens_per_rdma_rank": per_node,
        "is_token_in_rank": mask,
        "num_tokens_per_expert": per_expert,
    }


def topk_arguments(world: World, rank: int) -> dict[str, Any]:
    return {"topk_idx": world.ids[rank], "topk_weights": world.weights[rank]}


def dispatch(buffer: Buffer, world: World, x: Any = None, **more: Any) -> tuple:
    arguments = {**layout_arguments(buffer, world), **topk_arguments(world, buffer.rank), **more}
    return buffer.dispatch(world.xs[buffer.rank] if x is None else x, **arguments)


def equal(got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))


# The checks of DeepEP's internode test, with every one of them asserted ---------------------------------------------


def whole_test(rank: int, num_ranks: int, ranks_per_node: int, idx_dtype: torch.dtype) -> dict[str, Any]:
    world = make_world(num_ranks, ranks_per_node, num_tokens=6, idx_dtype=idx_dtype)
    buffer = make_buffer()
    config = Config(24, 8, 512, 16, 128)
    layout = layout_arguments(buffer, world)
    for name, expected in zip(reference.Layout._fields, world.layouts[rank], strict=True):
        equal(layout[name.replace("per_node", "per_rdma_rank")], expected)
    constant = [torch.full_like(x, float(source)) for source, x in enumerate(world.xs)]
    for xs in (world.xs, constant):
        for is_fp8 in (False, True):
            for has_topk, is_async in ((True, is_fp8), (False, not is_fp8)):
                check_case(buffer, world, xs, layout, config, is_fp8, has_topk, is_async)
    stats = buffer.stats()
    buffer.destroy()
    return stats


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
) -> None:
    rank = buffer.rank
    payload, scales = sent(xs, is_fp8)
    x = payload[rank] if scales is None else (payload[rank], scales[rank])
    expected = world.dispatched(scales, payload, align=4)
    mine = expected[rank]
    arguments = {"config": config, "async_finish": is_async, "previous_event": Buffer.capture() if is_async else None}
    topk = topk_arguments(world, rank) if has_topk else {}
    recv, idx, weights, counts, handle, event = buffer.dispatch(
        x, **layout, **topk, expert_alignment=4, allocate_on_comm_stream=is_async, **arguments
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

    rows = [per_token_cast_back(one.recv_x, one.recv_scales) if is_fp8 else one.recv_x for one in expected]
    check_combine(buffer, world, rows, handle, [one.recv_topk_weights for one in expected], xs, arguments)


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


def check_combine(buffer, world, rows, handle, weights, xs, arguments) -> None:
    rank = buffer.rank
    random = torch.Generator().manual_seed(77)
    biases = [(torch.ones_like(x), torch.randn(x.shape, generator=random).to(x.dtype)) for x in xs]
    rows = [row.bfloat16() for row in rows]
    expected = reference.combine(rows, world.masks, biases, weights, world.ranks_per_node)[rank]
    in_window = buffer.get_combine_buffer(handle, hidden=HIDDEN, dtype=torch.bfloat16)
    in_window.copy_(rows[rank])
    for x in (rows[rank].clone(), in_window):
        combined, combined_weights, event = buffer.combine(
            x, handle, topk_weights=weights[rank], bias=biases[rank], **arguments
        )
        event.current_stream_wait() if arguments["async_finish"] else None
        equal(combined, expected.combined_x)
        equal(combined_weights, expected.combined_topk_weights)


@pytest.mark.parametrize("shape", SHAPES)
def test_everything_that_deepeps_own_test_checks(shape: str) -> None:
    num_ranks, ranks_per_node = SHAPES[shape]
    idx_dtype = torch.int32 if shape == "3x2" else torch.int64
    for stats in run_ranks(whole_test, num_ranks, ranks_per_node, idx_dtype, env=nodes_of(ranks_per_node)):
        assert stats["calls"]["combine/pulled"] == stats["calls"]["combine/copied_in"] == 8


def random_calls(rank: int, num_ranks: int, seed: int, num_calls: int) -> dict[str, int]:
    return soak_rank(rank, num_ranks, seed, num_calls).calls


@pytest.mark.parametrize(("num_ranks", "ranks_per_node", "num_calls"), [(4, 2, 100), (3, 1, 25), (6, 3, 25)])
def test_random_calls(num_ranks: int, ranks_per_node: int, num_calls: int) -> None:
    calls = run_ranks(random_calls, num_ranks, 11 + num_ranks, num_calls, env=nodes_of(ranks_per_node))[0]
    assert sum(calls.values()) == num_calls
    assert min(calls.values()) > num_calls // 50, calls


def limited_calls(rank: int, num_ranks: int, limits: tuple[int, ...], seed: int) -> dict[str, Any]:
    os.environ["DEEP_EP_ARENA_BYTES"] = str(limits[rank % len(limits)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        return soak_rank(rank, num_ranks, seed, 40).stats


@pytest.mark.parametrize("limits", [(4096,), (0, 4096, 16384, 0)])
def test_random_calls_through_staging(limits: tuple[int, ...]) -> None:
    stats = run_ranks(limited_calls, 4, limits, 31 + len(limits), env=nodes_of(2))
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
        combined, _, _ = buffer.combine(recv_x, handle)
        rows = [one.recv_x for one in expected]
        equal(combined, reference.combine(rows, world.masks, ranks_per_node=ranks_per_node)[rank].combined_x)
        again, *_ = buffer.dispatch(world.xs[rank], handle=handle)
        equal(again, expected[rank].recv_x)


@pytest.mark.parametrize(("num_ranks", "ranks_per_node"), [(4, 2), (2, 1)])
def test_empty_ranks_and_empty_nodes(num_ranks: int, ranks_per_node: int) -> None:
    run_ranks(edges, num_ranks, ranks_per_node, env=nodes_of(ranks_per_node))


# What callers see ----------------------------------------------------------------------------------------------------


def face(rank: int, num_ranks: int) -> tuple[str, dict[str, int], dict[str, int]]:
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
    return buffer.transport, fine, coarse


def test_what_callers_see() -> None:
    world = make_world(4, 2, num_tokens=60)
    for rank, (transport, fine, coarse) in enumerate(run_ranks(face, 4, env=nodes_of(2))):
        assert "shm inside a node" in transport
        assert "message between 2 nodes" in transport
        crossing = int(world.layouts[rank].num_tokens_per_node[1 - rank // 2])
        back = int(world.layouts[(rank + 2) % 4].num_tokens_per_node[rank // 2])
        assert fine["messages_sent"] == 2 + crossing + back  # one to announce each call, and a row each
        assert coarse["messages_sent"] == 2 + 2
        assert fine["messages_received"] == 2 + crossing + back
        # Rows cross once for each node, whatever ranks of it they go to.
        least = (crossing + back) * HIDDEN * 2
        assert least < coarse["bytes_sent"] < 1.3 * least + 1000


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


def test_groups_of_their_own() -> None:
    run_ranks(own_groups, 8, env=nodes_of(2))


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


def test_an_mpi_like_communicator_does_as_well() -> None:
    run_ranks(over_comm, 4, env=nodes_of(2))


# Faults --------------------------------------------------------------------------------------------------------------


def overflow(rank: int, num_ranks: int) -> tuple[str, str]:
    world = make_world(num_ranks, 2)
    buffer = make_buffer()
    error = error_of(dispatch, buffer, world, num_worst_tokens=3 if rank == 1 else 200)
    equal(dispatch(buffer, world)[0], world.dispatched()[rank].recv_x)  # nothing was lost
    return error


def test_too_few_worst_tokens_raise_on_all_ranks_and_lose_nothing() -> None:
    for kind, text in run_ranks(overflow, 4, env=nodes_of(2)):
        assert kind == "EPOverflow"
        assert "rank 1 receives" in text
        assert "num_worst_tokens=3" in text


def last_call(rank: int, num_ranks: int) -> None:
    world = make_world(num_ranks, 2)
    buffer = make_buffer()
    time.sleep(0.05 * rank)
    recv_x, *_, handle, _ = dispatch(buffer, world)
    if rank == 0:
        buffer.combine(recv_x, handle, async_finish=True)
        return  # and leaves; the others still get its rows
    time.sleep(0.1 * rank)
    rows = [one.recv_x for one in world.dispatched()]
    expected = reference.combine(rows, world.masks, ranks_per_node=2)[rank].combined_x
    equal(buffer.combine(recv_x, handle)[0], expected)
    buffer.destroy()


def test_leaving_after_the_last_call_harms_nobody() -> None:
    run_ranks(last_call, 4, env=nodes_of(2))


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


def round_trip(buffer: Buffer, world: World) -> None:
    recv_x, *_, handle, _ = dispatch(buffer, world)
    equal(recv_x, world.dispatched()[buffer.rank].recv_x)
    buffer.combine(recv_x, handle)


SAID = {
    "killed": r"(the process of rank {0} has ended|rank {0} \(node \d\) has closed the connection)",
    "killed inside": r"(the process of rank {0} has ended|rank {0} \(node \d\) has closed the connection)",
    "silent": r"no (signal|message) from rank {0}( \(node \d\))? after 1 s",
    "raises": "'an accident'",
    "destroys": r"rank {0}( \(node \d\))? has destroyed its buffer",
    "another call": "all ranks must make the same call",
}


@pytest.mark.parametrize(("how", "victim"), [(how, 1 + 2 * (index % 2)) for index, how in enumerate(SAID)])
def test_all_ranks_of_all_nodes_name_who_is_to_blame(how: str, victim: int) -> None:
    may_die = [victim] if "killed" in how else []
    results = run_ranks(broken, 4, how, victim, may_die=may_die, limit_secs=60, env=nodes_of(2))
    for rank in range(4):
        if rank == victim and (may_die or how == "destroys"):
            continue
        kind, text, secs = results[rank]
        assert kind in ("EPError", "EPPeerFailed", "EPTimeout", "KeyError"), (rank, kind, text)
        assert re.search(SAID[how].format(victim), text), (rank, text)
        assert secs < (4 * LIMIT_SECS if how == "silent" else 5), (rank, secs, text)
