"""CUDA graphs of calls across nodes: captured once, replayed with new inputs, beside eager calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from common import layout_of, run_ranks
from deep_ep import Buffer
from internode import (
    World,
    combined,
    dispatch,
    equal,
    layout_arguments,
    make_buffer,
    make_world,
    remote_env,
    topk_arguments,
)

NUM_RANKS, RANKS_PER_NODE, NUM_TOKENS = 4, 2, 24


def world_of(seed: int) -> World:
    """As many tokens as in every other world, so that they fit into a graph's inputs."""
    return make_world(NUM_RANKS, RANKS_PER_NODE, num_tokens=NUM_TOKENS, seed=seed)


class Captured:
    """A graph of a dispatch and a combine over inputs that stay where they are; the layout is captured, too."""

    def __init__(self, buffer: Buffer, world: World, handle: tuple | None):
        rank = buffer.rank
        self.x = world.xs[rank].to(buffer.device)
        self.topk = topk_arguments(world, buffer)
        self.results: Any = None

        def calls() -> None:
            if handle is None:
                layout = layout_of(buffer, self.topk["topk_idx"], world.num_experts)
                recv_x, ids, _, _, used, _ = buffer.dispatch(
                    self.x,
                    **layout,
                    num_worst_tokens=NUM_RANKS * (NUM_TOKENS + NUM_RANKS),
                    **self.topk,
                )
            else:
                recv_x, ids, used = buffer.dispatch(self.x, handle=handle)[0], None, handle
            self.results = (recv_x, ids, buffer.combine(recv_x, used)[0])

        calls()  # kernels are compiled and loaded before the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            calls()

    def replay(self, buffer: Buffer, world: World) -> None:
        self.x.copy_(world.xs[buffer.rank])
        for name, tensor in topk_arguments(world, buffer).items():
            self.topk[name].copy_(tensor)
        self.graph.replay()
        recv_x, ids, sums = (None if one is None else one.clone() for one in self.results)
        expected = world.dispatched()[buffer.rank]
        num_rows = expected.recv_x.size(0)
        equal(recv_x[:num_rows], expected.recv_x)
        if ids is not None:
            equal(ids[:num_rows], expected.recv_topk_idx)
            assert (ids[num_rows:] == -1).all()
        equal(sums, combined(world, buffer.rank))


def replayed(rank: int, num_ranks: int, kind: str) -> None:
    buffer = make_buffer(num_nvl_bytes=1 << 22, num_rdma_bytes=1 << 22)
    first = world_of(0)
    recv_x, *_, handle, _ = dispatch(buffer, first)
    buffer.combine(recv_x, handle)
    captured = Captured(buffer, first, handle if kind == "cached" else None)
    for seed in range(4):
        world = world_of(seed)
        if kind == "cached":  # other rows along the same routes
            world = World(first.num_ranks, first.ranks_per_node, world.xs, first.ids, first.weights)
        captured.replay(buffer, world)
        if seed % 2:
            layout_arguments(buffer, world)
            recv_x, *_ = dispatch(buffer, world)
            equal(recv_x, world.dispatched()[rank].recv_x)
    buffer.check()
    buffer.destroy()


@pytest.mark.parametrize("kind", ["worst case", "cached"])
def test_a_graph_across_nodes_is_replayed_with_new_inputs(device: str, transport: str, kind: str) -> None:
    run_ranks(replayed, NUM_RANKS, kind, env=remote_env(device, transport, NUM_RANKS, RANKS_PER_NODE))
