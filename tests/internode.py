"""What tests across nodes share: inputs of all ranks, the oracle's answers, and calls with them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any

import torch
import torch.distributed as dist

from common import layout_of
from deep_ep import Buffer, Config, reference
from deep_ep.utils.math import calc_diff, per_token_cast_back, per_token_cast_to_fp8

HIDDEN, TOPK, EXPERTS_PER_RANK = 256, 4, 4


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
    num_ranks: int,
    ranks_per_node: int,
    num_tokens: int = 10,
    idx_dtype: torch.dtype = torch.int64,
    seed: int = 0,
    hidden: int = HIDDEN,
) -> World:
    """Rank r has `num_tokens + r` tokens, routed to a few nodes at most, as a group-limited gate does."""
    random = torch.Generator().manual_seed(seed)
    num_nodes, num_experts = num_ranks // ranks_per_node, EXPERTS_PER_RANK * num_ranks
    xs, ids, weights = [], [], []
    for rank in range(num_ranks):
        count = num_tokens + rank if num_tokens else 0
        xs.append(torch.randn(count, hidden, generator=random, device="cpu").bfloat16())
        scores = torch.rand(count, num_experts, generator=random, device="cpu")
        by_node = scores.view(count, num_nodes, num_experts // num_nodes)
        best = by_node.amax(2).topk(min(num_nodes, 2), dim=1).indices
        allowed = torch.zeros(count, num_nodes, dtype=torch.bool, device="cpu").scatter_(1, best, True)
        scores = by_node.masked_fill(~allowed.unsqueeze(2), -1).reshape(count, num_experts)
        chosen = scores.topk(TOPK, dim=1).indices
        chosen[torch.rand(chosen.shape, generator=random, device="cpu") < 0.1] = -1
        ids.append(chosen.to(idx_dtype))
        weights.append(torch.rand(count, TOPK, generator=random, device="cpu"))
    return World(num_ranks, ranks_per_node, xs, ids, weights)


def make_buffer(limit_secs: float | None = None, **more: Any) -> Buffer:
    limits = {"num_cpu_timeout_secs": limit_secs, "num_gpu_timeout_secs": limit_secs}
    return Buffer(dist.group.WORLD, explicitly_destroy=True, **limits, **more)


def layout_arguments(buffer: Buffer, world: World) -> dict[str, Any]:
    return {
        **layout_of(buffer, world.ids[buffer.rank].to(buffer.device), world.num_experts),
    }


def topk_arguments(world: World, buffer: Buffer) -> dict[str, Any]:
    rank, device = buffer.rank, buffer.device
    return {"topk_idx": world.ids[rank].to(device), "topk_weights": world.weights[rank].to(device)}


def dispatch(buffer: Buffer, world: World, x: Any = None, **more: Any) -> tuple:
    arguments = {**layout_arguments(buffer, world), **topk_arguments(world, buffer), **more}
    return buffer.dispatch(world.xs[buffer.rank].to(buffer.device) if x is None else x, **arguments)


def equal(got: torch.Tensor | None, expected: torch.Tensor | None) -> None:
    assert got is not None
    assert expected is not None
    assert got.dtype == expected.dtype
    assert got.shape == expected.shape
    assert torch.equal(got.cpu().contiguous().view(torch.uint8), expected.cpu().contiguous().view(torch.uint8))


def combined(world: World, rank: int, biases: Any = None) -> torch.Tensor:
    """What a combine of the received rows gives a rank, by the oracle."""
    rows = [one.recv_x for one in world.dispatched()]
    return reference.combine(rows, world.masks, biases, ranks_per_node=world.ranks_per_node)[rank].combined_x


def round_trip(buffer: Buffer, world: World) -> None:
    """A dispatch and a combine, checked."""
    recv_x, *_, handle, _ = dispatch(buffer, world)
    equal(recv_x, world.dispatched()[buffer.rank].recv_x)
    equal(buffer.combine(recv_x, handle)[0], combined(world, buffer.rank))


# The checks of DeepEP's internode test, with every one of them asserted ---------------------------------------------


def nodes_of(ranks_per_node: int, **more: str) -> dict[str, str]:
    return {"DEEP_EP_RANKS_PER_NODE": str(ranks_per_node), "DEEP_EP_TIMEOUT_SECS": "30", **more}


def remote_env(device: str, transport: str, num_ranks: int, ranks_per_node: int) -> dict[str, str]:
    """Ranks that share a GPU under NVSHMEM each need their part of it, and no network."""
    if device == "cpu":
        name = "interpreted" if transport == "message" else "interpreted-memory"
        return nodes_of(ranks_per_node, DEEP_EP_TRANSPORT=name)
    alone = {
        "DEEP_EP_NVSHMEM_ROWS": "put" if transport == "nvshmem put" else "fetch",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": str(100 // num_ranks),
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
    }
    name = transport.split()[0]
    return nodes_of(ranks_per_node, DEEP_EP_TRANSPORT=name, **(alone if name == "nvshmem" else {}))


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
    rank: int,
    num_ranks: int,
    ranks_per_node: int,
    idx_dtype: torch.dtype = torch.int64,
    ways: Any = None,
    most_cases: int | None = None,
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
    cases = list(product((world.xs, constant), (True, False), (True, False)))[:most_cases]
    for xs, is_fp8, has_topk in cases:
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
    x = payload[rank].to(buffer.device)
    x = x if scales is None else (x, scales[rank].to(buffer.device))
    expected = world.dispatched(scales, payload, align=4)
    mine = expected[rank]
    previous = Buffer.capture() if has_previous else None
    arguments = {"config": config, "async_finish": is_async, "previous_event": previous}
    on_stream = is_async and has_previous
    topk = topk_arguments(world, buffer) if has_topk else {}
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
    forwarded = handle[9].size(0)
    assert forwarded == int(handle[4][-1]), "the rows of all nodes that this rank passes on"
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
        (forwarded, world.ranks_per_node),
    ]
    assert [tuple(item.shape) for item in handle] == shapes
    assert [item.dtype for item in handle] == [torch.bool, *[torch.int32] * 6, torch.uint8, *[torch.int32] * 2]
    assert handle[1].tolist() == [[count] * 12 for count in world.layouts[rank].num_tokens_per_node.tolist()]
    assert not handle[2].any()
    assert not handle[5].any()
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
    biases = [(torch.ones_like(x), torch.randn(x.shape, generator=random, device="cpu").to(x.dtype)) for x in xs]
    rows = [row.bfloat16() for row in rows]
    expected = reference.combine(rows, world.masks, biases, weights, world.ranks_per_node)[rank]
    in_window = buffer.get_combine_buffer(handle, hidden=HIDDEN, dtype=torch.bfloat16)
    in_window.copy_(rows[rank])
    bias = tuple(one.to(buffer.device) for one in biases[rank])
    for x in (rows[rank].to(buffer.device, copy=True), in_window):
        sums, summed_weights, event = buffer.combine(
            x, handle, topk_weights=weights[rank].to(buffer.device), bias=bias, **arguments
        )
        event.current_stream_wait() if arguments["async_finish"] else None
        equal(sums, expected.combined_x)
        equal(summed_weights, expected.combined_topk_weights)
        # And what DeepEP's own test compares: without the biases, the input times its ranks.
        bare = sums.cpu().float() - biases[rank][0].float() - biases[rank][1].float()
        whole = xs[rank].float() * world.masks[rank].sum(1, keepdim=True)
        assert calc_diff(bare, whole) < limit


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
        again, *_ = buffer.dispatch(world.xs[rank].to(buffer.device), handle=handle)
        equal(again, expected[rank].recv_x)
