"""CUDA graphs: calls that need no host are captured once and replayed with new inputs, beside eager calls."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from moe import Layer, check_combined, check_dispatched, dispatch, make_buffer, make_layer, round_trip

from deep_ep import Buffer, EPUnsupported
from deep_ep.launch import run_ranks

NUM_RANKS = 2


class Captured:
    """A graph of a dispatch, experts that double, and a combine, over inputs that stay where they are.

    Args:
        buffer: The buffer.
        static: Whose tensors on the GPU are the graph's inputs.
        handle: Of a cached dispatch; None: a dispatch with room for the worst case.
    """

    def __init__(self, buffer: Buffer, static: Layer, handle: tuple | None):
        self.static, self.handle = static, handle
        self.results: Any = None

        def calls() -> None:
            ids = weights = None
            if handle is None:
                num_worst_tokens = static.num_ranks * static.x.size(0)
                recv_x, ids, weights, _, used, _ = dispatch(buffer, static, num_worst_tokens=num_worst_tokens)
            else:
                recv_x, used = buffer.dispatch(static.x, handle=handle)[0], handle
            combined, _, _ = buffer.combine(recv_x * 2, used)
            self.results = (recv_x, ids, weights, combined)

        calls()  # kernels are compiled and loaded before the capture
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self.graph):
            calls()

    def replay(self, layer: Layer) -> Callable[[], None]:
        """Copy inputs in and replay, without a wait. Returns what checks the results."""
        self.static.x.copy_(layer.x)
        self.static.topk_idx.copy_(layer.topk_idx)
        self.static.topk_weights.copy_(layer.topk_weights)
        self.graph.replay()
        recv_x, ids, weights, combined = [None if one is None else one.clone() for one in self.results]

        def check() -> None:
            check_dispatched(layer, recv_x, ids, weights)
            check_combined(layer, combined)

        return check


def rerouted(layer: Layer, seed: int) -> Layer:
    """Other rows along the same routes."""
    generator = torch.Generator().manual_seed(seed)
    xs = [torch.randn(x.shape, generator=generator).bfloat16() for x in layer.xs]
    return Layer(layer.rank, xs, layer.ids, layer.weights)


def replayed(rank: int, num_ranks: int, kind: str, has_eager_calls: bool) -> dict[str, Any]:
    buffer, first = make_buffer(), make_layer(rank, num_ranks, 10)
    handle = round_trip(buffer, first)
    captured = Captured(buffer, make_layer(rank, num_ranks, 10), handle if kind == "cached" else None)
    for index in range(3):
        layer = rerouted(first, index) if kind == "cached" else make_layer(rank, num_ranks, 20 + index)
        check = captured.replay(layer)
        if has_eager_calls:
            round_trip(buffer, make_layer(rank, num_ranks, 30 + index))
        check()
    buffer.check()
    numbers = buffer.stats()
    buffer.destroy()
    return numbers


@pytest.mark.parametrize("has_eager_calls", [False, True])
@pytest.mark.parametrize("kind", ["worst case", "cached"])
def test_a_graph_is_replayed_with_new_inputs(kind: str, has_eager_calls: bool) -> None:
    run_ranks(replayed, NUM_RANKS, kind, has_eager_calls)


@pytest.mark.parametrize("has_eager_calls", [False, True])
@pytest.mark.parametrize("kind", ["worst case", "cached"])
def test_captured_calls_may_be_staged(kind: str, has_eager_calls: bool) -> None:
    for numbers in run_ranks(replayed, NUM_RANKS, kind, has_eager_calls, env={"DEEP_EP_ARENA_BYTES": "16384"}):
        assert set(numbers["calls"]) == {"dispatch/staged", "combine/staged"}
        assert numbers["rounds"] > 3 * sum(numbers["calls"].values()), "replays go through rounds, too"


def back_to_back(rank: int, num_ranks: int) -> None:
    """Two graphs by turns, and nobody waits between replays."""
    buffer, first = make_buffer(), make_layer(rank, num_ranks, 11)
    handle = round_trip(buffer, first)
    one = Captured(buffer, make_layer(rank, num_ranks, 11), None)
    other = Captured(buffer, make_layer(rank, num_ranks, 11), handle)
    layers = [make_layer(rank, num_ranks, 40 + index) for index in range(3)]
    same_routes = [rerouted(first, index) for index in range(3)]
    checks = []
    for layer, same in zip(layers, same_routes, strict=True):
        checks += [one.replay(layer), other.replay(same), one.replay(layer)]
    for check in checks:
        check()
    round_trip(buffer, first)
    buffer.check()
    buffer.destroy()


def test_two_graphs_are_replayed_by_turns() -> None:
    run_ranks(back_to_back, NUM_RANKS)


def refused(rank: int, num_ranks: int) -> None:
    buffer, layer = make_buffer(), make_layer(rank, num_ranks, 12)
    handle = round_trip(buffer, layer)
    graph, target = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        target.add_(1)
        with pytest.raises(EPUnsupported, match="num_worst_tokens"):
            dispatch(buffer, layer)
    graph.replay()
    assert target.tolist() == [1.0] * 4, "the capture went on"
    round_trip(buffer, layer)
    check_dispatched(layer, buffer.dispatch(layer.x, handle=handle)[0])
    buffer.destroy()


def test_a_full_dispatch_cannot_be_captured_and_harms_nothing() -> None:
    run_ranks(refused, NUM_RANKS)


def released(rank: int, num_ranks: int) -> tuple[int, int, int]:
    buffer, layer = make_buffer(), make_layer(rank, num_ranks, 13)
    handle = round_trip(buffer, layer)
    gc.collect()
    before = buffer.stats()["arena"]["used"]
    captured = Captured(buffer, make_layer(rank, num_ranks, 13), handle)
    captured.results = None
    gc.collect()
    held = buffer.stats()["arena"]["used"]
    for index in range(3):  # eager calls do not get what the graph writes into
        captured.static.x.copy_(rerouted(layer, index).x)
        captured.graph.replay()
        round_trip(buffer, layer)
    torch.cuda.synchronize()
    del captured
    buffer.release_graphs()
    gc.collect()
    after = buffer.stats()["arena"]["used"]
    round_trip(buffer, layer)
    buffer.destroy()
    return before, held, after


def test_a_graph_keeps_its_memory_until_it_is_released() -> None:
    for before, held, after in run_ranks(released, NUM_RANKS):
        assert before == 0
        assert held > 0
        assert after == 0
