"""A buffer, or the last tensor of one, that goes while a CUDA graph is captured: the capture goes on, and what must not
be done meanwhile is done later.
"""

from __future__ import annotations

import gc
import time
from typing import Any

import pytest
import torch
from moe import dispatch, make_layer, round_trip

import deep_ep
from deep_ep import reaper
from deep_ep.launch import run_ranks

NUM_RANKS = 2
PAUSE_SECS = 0.3  # in which the reaper would do what breaks a capture


def make_forgettable() -> Any:
    """A buffer in a cycle, which only garbage collection frees."""
    buffer: Any = deep_ep.Buffer(torch.distributed.group.WORLD, 64 << 20, device="cuda")
    buffer.itself = buffer
    return buffer


def forgotten(rank: int, num_ranks: int, is_captured: bool) -> None:
    kept, layer = make_forgettable(), make_layer(rank, num_ranks, 14)
    round_trip(kept, layer)
    other = make_forgettable()
    round_trip(other, layer)
    num_worst_tokens = num_ranks * layer.x.size(0)
    dispatch(other, layer, num_worst_tokens=num_worst_tokens)  # kernels are compiled and loaded before the capture
    torch.cuda.synchronize()
    graph, target = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):  # in global mode: unsafe calls of any thread would break it
        target.add_(1)
        if is_captured:
            dispatch(other, layer, num_worst_tokens=num_worst_tokens)
        del other
        gc.collect()
        time.sleep(PAUSE_SECS)
        target.add_(1)
    if not is_captured:  # else the graph uses memory that goes with the buffer
        graph.replay()
        assert target.tolist() == [2.0] * 4
    deadline = time.monotonic() + 30
    while len(reaper._open) > 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert len(reaper._open) == 1, "the forgotten buffer is closed, the other one is not"
    round_trip(kept, layer)
    kept.check()


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_buffer_is_forgotten_inside_a_capture(is_captured: bool) -> None:
    run_ranks(forgotten, NUM_RANKS, is_captured)


def dropped(rank: int, num_ranks: int) -> None:
    layer = make_layer(rank, num_ranks, 14)
    buffer = deep_ep.Buffer(torch.distributed.group.WORLD, 64 << 20, device="cuda", explicitly_destroy=True)
    received = dispatch(buffer, layer)[0]
    buffer.destroy()
    del buffer
    gc.collect()
    torch.cuda.synchronize()
    graph, target = torch.cuda.CUDAGraph(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        target.add_(1)
        del received  # and with it the memory of the buffer
        time.sleep(PAUSE_SECS)
        target.add_(1)
    graph.replay()
    assert target.tolist() == [2.0] * 4


def test_the_last_tensor_of_a_buffer_goes_inside_a_capture() -> None:
    run_ranks(dropped, NUM_RANKS)
