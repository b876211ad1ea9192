"""Kernels in a profile: DeepEP's scripts find them by `dispatch`, `combine` and `notify`, each in exactly one name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from moe import Layer, make_buffer, make_layer
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity

from common import layout_of
from deep_ep import Buffer
from deep_ep.launch import run_ranks
from deep_ep.utils.testing import bench_kineto

NUM_RANKS, NUM_CALLS = 2, 3
WORDS = ("dispatch", "combine", "notify")
HIDDEN, NUM_TOKENS, NUM_TOPK, EXPERTS_PER_RANK = 512, 16, 3, 4

Call = Callable[[], Any]


def profiled(call: Call) -> torch.profiler.profile:
    """Some calls, without the first one, which compiles."""
    call()
    torch.cuda.synchronize()
    dist.barrier()
    with torch.profiler.profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(NUM_CALLS):
            call()
        torch.cuda.synchronize()
    return profiler


def runs_of(profiler: torch.profiler.profile) -> list[str]:
    """The name of each kernel that ran, once for each run."""
    return [event.name for event in profiler.events() or () if event.device_type == DeviceType.CUDA]


def check_names(call: Call, **num_names: int) -> list[str]:
    """Check how many names have each word; words that are not given may be in none. Returns all runs."""
    profiler = profiled(call)
    runs = runs_of(profiler)
    for word in WORDS:
        names = {name for name in runs if word in name}
        assert len(names) == num_names.get(word, 0), (word, sorted(set(runs)))
    # As DeepEP's script does it.
    lines = profiler.key_averages().table(sort_by="cuda_time_total", max_name_column_width=100).split("\n")
    for word in num_names:
        assert len([line for line in lines if word in line]) == 1, lines
    return runs


def seconds(call: Call, *words: str, **options: Any) -> tuple:
    lined_up = {"barrier_comm_profiling": True, "barrier": dist.barrier}
    return bench_kineto(call, words, num_tests=NUM_CALLS, suppress_kineto_output=True, **lined_up, **options)


# Normal mode ---------------------------------------------------------------------------------------------------------


def full_dispatch(buffer: Buffer, layer: Layer) -> Call:
    """A full dispatch, whose layout is computed before it is profiled."""
    layout = layout_of(buffer, layer.topk_idx, layer.num_experts)
    return lambda: buffer.dispatch(
        layer.x,
        **layout,
        topk_idx=layer.topk_idx,
        topk_weights=layer.topk_weights,
    )


def normal_calls(rank: int, num_ranks: int) -> None:
    buffer, layer = make_buffer(), make_layer(rank, num_ranks, 0)
    full = full_dispatch(buffer, layer)
    recv_x, _, recv_weights, _, handle, _ = full()
    for dispatch in (full, lambda: buffer.dispatch(layer.x, handle=handle)):
        check_names(dispatch, dispatch=1, notify=1)
        assert all(one > 0 for one in seconds(dispatch, "dispatch", "notify"))
    rows = recv_x.clone()
    for weights in (None, recv_weights.clone()):
        combine = lambda weights=weights: buffer.combine(rows, handle, topk_weights=weights)  # noqa: E731
        check_names(combine, combine=1, notify=1)
        assert all(one > 0 for one in seconds(combine, "combine", "notify"))
    buffer.destroy()


def test_normal_calls_notify_and_then_dispatch_or_combine() -> None:
    run_ranks(normal_calls, NUM_RANKS)


# Low latency ---------------------------------------------------------------------------------------------------------


class LowLatencyCalls:
    """A dispatch and a combine, with the hooks called if there are any."""

    def __init__(self, rank: int, num_ranks: int, has_hook: bool):
        torch.cuda.set_device(0)
        self.num_experts, self.options = EXPERTS_PER_RANK * num_ranks, {"return_recv_hook": has_hook}
        hint = Buffer.get_low_latency_rdma_size_hint(NUM_TOKENS, HIDDEN, num_ranks, self.num_experts)
        self.buffer = Buffer(dist.group.WORLD, 64 << 20, hint, low_latency_mode=True, explicitly_destroy=True)
        generator = torch.Generator().manual_seed(rank)
        self.x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator).bfloat16().cuda()
        self.ids = torch.randint(-1, self.num_experts, (NUM_TOKENS, NUM_TOPK), generator=generator).cuda()
        self.weights = torch.rand(NUM_TOKENS, NUM_TOPK, generator=generator).cuda()
        *_, self.handle = self.dispatch()
        num_rows = num_ranks * NUM_TOKENS
        self.rows = torch.ones(EXPERTS_PER_RANK, num_rows, HIDDEN, dtype=torch.bfloat16, device="cuda")

    def dispatch(self) -> tuple:
        *result, _, hook = self.buffer.low_latency_dispatch(
            self.x, self.ids, NUM_TOKENS, self.num_experts, **self.options
        )
        if hook is not None:
            hook()
        return tuple(result)

    def combine(self) -> None:
        _, _, hook = self.buffer.low_latency_combine(self.rows, self.ids, self.weights, self.handle, **self.options)
        if hook is not None:
            hook()

    def both(self) -> None:
        self.dispatch()
        self.combine()


def low_latency_calls(rank: int, num_ranks: int, has_hook: bool, folder: str) -> None:
    calls = LowLatencyCalls(rank, num_ranks, has_hook)
    for word, call in (("dispatch", calls.dispatch), ("combine", calls.combine)):
        runs = check_names(call, **{word: 1})
        assert len([name for name in runs if word in name]) == 2 * NUM_CALLS, "the send and the receive kernel"
        assert len([name for name in runs if "wait" in name]) == NUM_CALLS * has_hook
    profiler = profiled(calls.both)
    path = Path(folder) / f"{rank}.json"
    profiler.export_chrome_trace(str(path))
    names = [event.get("name", "") for event in json.loads(path.read_text())["traceEvents"]]
    for word in ("dispatch", "combine"):  # what DeepEP's script makes phases of
        assert len([name for name in names if f"::{word}" in name]) == 2 * NUM_CALLS, sorted(set(names))
    calls.buffer.check()
    calls.buffer.destroy()


@pytest.mark.parametrize("has_hook", [False, True], ids=["whole", "hook"])
def test_the_kernels_of_a_low_latency_call_have_one_name(has_hook: bool, tmp_path: Path) -> None:
    run_ranks(low_latency_calls, NUM_RANKS, has_hook, str(tmp_path))


def timed(rank: int, num_ranks: int, has_hook: bool) -> None:
    calls = LowLatencyCalls(rank, num_ranks, has_hook)
    halves = seconds(calls.both, "dispatch", "combine", num_kernels_per_period=2)
    for half in halves:
        assert len(half) == 2
        assert all(one > 0 for one in half)
    if not has_hook:
        assert all(one > 0 for one in seconds(calls.both, "dispatch", "combine"))
    calls.buffer.check()
    calls.buffer.destroy()


@pytest.mark.parametrize("has_hook", [False, True], ids=["whole", "hook"])
def test_low_latency_calls_are_timed_whole_and_by_halves(has_hook: bool) -> None:
    run_ranks(timed, NUM_RANKS, has_hook)
