"""Traces of real ranks: what every kind of call leaves, who was waited for, and what is left of a killed rank."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import NOTHING_POSTED, error_of, layout_of, run_ranks
from deep_ep import Buffer, Config
from deep_ep.tools.report.figures import count
from deep_ep.tools.report.load import LoadedSlice, LoadedTrace, load
from deep_ep.trace import CALL, COMM, DEVICE
from internode import remote_env

pytestmark = pytest.mark.usefixtures("device")

EXPERTS_PER_RANK, TOPK, HIDDEN = 4, 3, 64
LATE_SECS = 0.4


def inputs(rank: int, num_ranks: int, num_tokens: int = 16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(rank)
    num_experts = EXPERTS_PER_RANK * num_ranks
    x = torch.randn(num_tokens, HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.rand(num_tokens, num_experts, generator=generator).topk(TOPK).indices
    return x, topk_idx, torch.rand(num_tokens, TOPK, generator=generator)


def make_buffer(folder: Path | str | None, **options: Any) -> Buffer:
    return Buffer(dist.group.WORLD, explicitly_destroy=True, num_cpu_timeout_secs=30, trace=folder, **options)


def routing_of(buffer: Buffer, topk_idx: torch.Tensor, topk_weights: torch.Tensor) -> dict[str, Any]:
    return {
        **layout_of(buffer, topk_idx, EXPERTS_PER_RANK * buffer.group_size),
        "topk_idx": topk_idx,
        "topk_weights": topk_weights,
    }


def normal_calls(rank: int, num_ranks: int, folder: Path | str) -> dict[str, Any]:
    """One call of each kind; returns what the buffer has counted."""
    x, topk_idx, topk_weights = inputs(rank, num_ranks)
    buffer = make_buffer(folder)
    routing = routing_of(buffer, topk_idx, topk_weights)
    recv_x, _, _, expert_counts, handle, event = buffer.dispatch(x, **routing, async_finish=True)
    event.current_stream_wait()
    buffer.dispatch(x, handle=handle)
    buffer.dispatch(x, **routing, num_worst_tokens=x.size(0) * num_ranks)
    buffer.combine(recv_x, handle)
    buffer.combine(recv_x.clone(), handle)
    numbers = buffer.stats()
    buffer.destroy()
    return {**numbers, "experts": expert_counts, "rows_to": routing["num_tokens_per_rank"].tolist()}


def calls_of(trace: LoadedTrace, rank: int, track: int = COMM) -> list[LoadedSlice]:
    return [one for one in trace.files[rank].slices if one.kind == CALL and one.track == track]


def parts_of(trace: LoadedTrace, rank: int, call: LoadedSlice) -> list[str]:
    return [
        one.name
        for one in trace.files[rank].slices
        if one.track == call.track and one is not call and call.begin_us <= one.begin_us <= call.end_us
    ]


def partial_overlaps(trace: LoadedTrace) -> Iterator[tuple[LoadedSlice, LoadedSlice]]:
    """Slices of a track that neither follow nor contain each other: the format has no place for them."""
    for file in trace.files:
        for track in file.tracks:
            open_slices: list[LoadedSlice] = []
            for one in (one for one in file.slices if one.track == track):
                while open_slices and open_slices[-1].end_us <= one.begin_us:
                    open_slices.pop()
                if open_slices and one.end_us > open_slices[-1].end_us + 0.002:
                    yield open_slices[-1], one
                open_slices.append(one)


NORMAL_CALLS = ["dispatch", "cached dispatch", "worst-case dispatch", "combine", "combine"]
PATHS = {
    "posted": ({}, ["posted"] * 5),
    "direct": (NOTHING_POSTED, ["direct", "direct", "direct", "pulled", "copied_in"]),
    "staged": ({**NOTHING_POSTED, "DEEP_EP_ARENA_BYTES": "1024"}, ["staged"] * 5),
}


@pytest.mark.cpu_only
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.filterwarnings("ignore:.*staging")
def test_every_call_leaves_its_slices(path: str, tmp_path: Path):
    env, paths = PATHS[path]
    counted = run_ranks(normal_calls, 3, tmp_path, env=env)
    trace = load(tmp_path)
    assert trace.problems == []
    assert list(partial_overlaps(trace)) == []
    for rank, numbers in enumerate(counted):
        calls = calls_of(trace, rank)
        assert [call.name for call in calls] == NORMAL_CALLS
        assert [call.args["call"] for call in calls] == [1, 2, 3, 4, 5]
        assert [call.args["path"] for call in calls] == paths
        assert calls[0].args["rows_to"] == numbers["rows_to"]
        assert calls[0].args["experts"] == calls[2].args["experts"] == numbers["experts"]
        for call in calls:
            parts = parts_of(trace, rank, call)
            assert any(part.startswith("wait: ") for part in parts), (call.name, parts)
            assert {"put rows", "post rows", "provide rows"} & set(parts), (call.name, parts)
            if call.name != "cached dispatch" or path == "posted":  # else rows arrive where they stay
                assert {"fetch rows", "unpack", "sum rows"} & set(parts), (call.name, parts)
        callers = [one.name for one in trace.files[rank].slices if one.track < COMM]
        assert callers == ["dispatch"] * 3 + ["combine"] * 2
    figures = count(trace)
    assert figures.bytes_to == [numbers["bytes_to"] for numbers in counted]
    assert figures.num_calls == 5


def low_latency_calls(rank: int, num_ranks: int, folder: Path, num_tokens: int) -> None:
    num_experts = EXPERTS_PER_RANK * num_ranks
    hint = Buffer.get_low_latency_rdma_size_hint(num_tokens, HIDDEN, num_ranks, num_experts)
    buffer = make_buffer(folder, num_rdma_bytes=hint, low_latency_mode=True)
    x, topk_idx, topk_weights = inputs(rank, num_ranks, num_tokens)
    recv_x, _, handle, _, hook = buffer.low_latency_dispatch(
        x, topk_idx, num_tokens, num_experts, use_fp8=False, return_recv_hook=True
    )
    hook()
    buffer.low_latency_combine(recv_x, topk_idx, topk_weights, handle)
    buffer.destroy()


@pytest.mark.cpu_only
def test_halves_of_low_latency_calls(tmp_path: Path):
    run_ranks(low_latency_calls, 2, tmp_path, 16)
    trace = load(tmp_path)
    assert list(partial_overlaps(trace)) == []
    names = ["low-latency dispatch", "low-latency combine"]
    halves = [f"{name} {half}" for name in names for half in ("send", "receive")]
    for rank in range(2):
        calls = calls_of(trace, rank)
        assert [call.name for call in calls] == halves
        assert [parts_of(trace, rank, call) for call in calls] == [["publish"], ["wait: sent", "fetch"]] * 2
    figures = count(trace)
    assert figures.num_calls == 2
    assert sum(map(sum, figures.rows_to)) == 2 * 2 * 16 * TOPK, "there and back, a row for every selection"
    assert figures.load is not None
    assert sum(figures.load.totals) == 2 * 16 * TOPK


def test_halves_of_low_latency_calls_on_the_device(device: str, tmp_path: Path):
    env = {} if device == "cuda" else {"DEEP_EP_TRANSPORT": "interpreted"}
    run_ranks(low_latency_calls, 2, tmp_path, 4, env=env)
    trace = load(tmp_path)
    assert list(partial_overlaps(trace)) == []
    for rank in range(2):
        calls = calls_of(trace, rank, DEVICE)
        names = ["low-latency dispatch send", "low-latency dispatch receive", "low-latency combine"]
        assert [call.name for call in calls] == names
        assert parts_of(trace, rank, calls[1]) == ["wait", "receive"]
    assert count(trace).num_calls == 2


def rails_calls(rank: int, num_ranks: int, folder: Path, num_chunks: int) -> None:
    x, topk_idx, topk_weights = inputs(rank, num_ranks, num_chunks)
    topk_idx[:, 0] = torch.arange(num_chunks) % EXPERTS_PER_RANK  # on the first node, and so a chunk, each
    topk_idx[:, 1] = EXPERTS_PER_RANK * (num_ranks - 1) + torch.arange(num_chunks) % EXPERTS_PER_RANK
    topk_idx[:, 2] = -1
    buffer = make_buffer(folder)
    config = Config(20, 8, 256, 1, 4)  # one token a message, four messages ahead
    recv_x, *_, handle, _ = buffer.dispatch(x, **routing_of(buffer, topk_idx, topk_weights), config=config)
    buffer.combine(recv_x, handle, config=config)
    buffer.destroy()


@pytest.mark.cpu_only
def test_chunks_on_the_rail(tmp_path: Path):
    num_chunks = 150  # more than a link reads ahead
    run_ranks(rails_calls, 4, tmp_path, num_chunks, env={"DEEP_EP_RANKS_PER_NODE": "2"})
    trace = load(tmp_path)
    assert list(partial_overlaps(trace)) == []
    for rank in range(4):
        dispatch, combine = calls_of(trace, rank)
        assert (dispatch.name, combine.name) == ("dispatch", "combine")
        slices = [one for one in trace.files[rank].slices if dispatch.begin_us <= one.begin_us <= dispatch.end_us]
        by_name = {one.name: one for one in slices}
        for number in range(num_chunks):
            packed, sent = by_name[f"pack chunk {number}"], by_name[f"send chunk {number}"]
            came, taken = by_name[f"chunk {number} arrives"], by_name[f"fan out chunk {number}"]
            assert packed.begin_us <= sent.begin_us
            assert came.end_us <= taken.begin_us
            assert taken.args["peer"] == (rank + 2) % 4
        # A dispatch does not wait for all rows of the rail before it passes on the first.
        assert by_name["fan out chunk 0"].begin_us < by_name[f"chunk {num_chunks - 1} arrives"].end_us
        assert {f"take chunk {number}" for number in range(num_chunks)} <= set(parts_of(trace, rank, combine))


def relayed_calls(rank: int, num_ranks: int, folder: Path) -> None:
    x, topk_idx, topk_weights = inputs(rank, num_ranks, 4)
    buffer = make_buffer(folder)
    recv_x, *_, handle, _ = buffer.dispatch(x, **routing_of(buffer, topk_idx, topk_weights))
    buffer.dispatch(x, handle=handle)
    buffer.combine(recv_x, handle)
    buffer.destroy()


def test_steps_across_nodes_on_the_device(device: str, transport: str, tmp_path: Path):
    """A first dispatch meets twice: it has guessed no room."""
    run_ranks(relayed_calls, 2, tmp_path, env=remote_env(device, transport, 2, 1))
    trace, num_chunks = load(tmp_path), 4 if transport == "message" else 1
    assert list(partial_overlaps(trace)) == []
    relayed, summed = ["rail", "forward"] * num_chunks, ["pull", "rail"] * num_chunks
    for rank in range(2):
        first, cached, combine = calls_of(trace, rank, DEVICE)
        move = ["put", *relayed, "finish"]
        assert parts_of(trace, rank, first) == ["handshake", *move, "offer", *move]
        assert parts_of(trace, rank, cached) == ["handshake", *move]
        assert parts_of(trace, rank, combine) == ["handshake", *summed, "sum", "finish"]


def late_rank(rank: int, num_ranks: int, folder: Path) -> None:
    x, topk_idx, topk_weights = inputs(rank, num_ranks)
    buffer = make_buffer(folder)
    routing = routing_of(buffer, topk_idx, topk_weights)
    buffer.dispatch(x, **routing)  # what a process does only once takes longer
    dist.barrier()
    if rank == 1:
        time.sleep(LATE_SECS)
    buffer.dispatch(x, **routing)
    buffer.destroy()


@pytest.mark.cpu_only
@pytest.mark.parametrize("ranks_per_node", ["0", "1"], ids=["one node", "three nodes"])
def test_the_late_rank_is_named(ranks_per_node: str, tmp_path: Path):
    run_ranks(late_rank, 3, tmp_path, env={"DEEP_EP_RANKS_PER_NODE": ranks_per_node})
    waited_us = count(load(tmp_path)).waited_us
    for rank in (0, 2):
        assert waited_us[rank][1] > 0.5 * LATE_SECS * 1e6
        assert waited_us[rank][1] == max(waited_us[rank])


def on_two_hosts(rank: int, num_ranks: int, folder: Path) -> tuple[int, int]:
    os.environ["DEEP_EP_HOST"] = f"host {rank // 2}"
    late_rank(rank, num_ranks, folder)
    facts = load(folder / f"rank{rank}.json").files[0].facts
    return facts["clock_offset_ns"], facts["clock_error_ns"]


@pytest.mark.cpu_only
def test_clocks_of_hosts_are_compared(tmp_path: Path):
    clocks = run_ranks(on_two_hosts, 4, tmp_path)
    assert clocks[0] == clocks[1] == (0, 0)
    assert clocks[2] == clocks[3], "ranks of a host have one clock"
    offset_ns, error_ns = clocks[2]
    assert abs(offset_ns) <= error_ns < 1e9, "they are one host in truth"


def killed_rank(rank: int, num_ranks: int, folder: Path) -> tuple[str, str]:
    x, topk_idx, topk_weights = inputs(rank, num_ranks)
    buffer = make_buffer(folder)
    routing = routing_of(buffer, topk_idx, topk_weights)
    buffer.dispatch(x, **routing)
    if rank == 1:
        engine: Any = buffer._engine
        engine.window.fault = lambda point: os.kill(os.getpid(), signal.SIGKILL) if "before ready" in point else None
    return error_of(buffer.dispatch, x, **routing)


@pytest.mark.cpu_only
def test_a_killed_rank_leaves_its_trace(tmp_path: Path):
    errors = run_ranks(killed_rank, 3, tmp_path, may_die=[1], env=NOTHING_POSTED)
    assert [kind for kind, _ in (errors[0], errors[2])] != ["none", "none"]
    trace = load(tmp_path)
    assert [file.rank for file in trace.files] == [0, 1, 2]
    # Beside others, perhaps: who has answered may still be writing when the traces are read.
    assert any(re.search(r"ranks? [\d, ]*\b1\b", problem) for problem in trace.problems)
    done, open_call = calls_of(trace, 1)
    assert not done.is_open
    assert open_call.is_open, "one sees where it was"
    figures = count(trace)
    assert figures.ranks[1].is_open
    for rank in (0, 2):
        assert any("rank 1" in error for error in figures.ranks[rank].errors)


def no_trace(rank: int, num_ranks: int) -> list[str]:
    x, topk_idx, topk_weights = inputs(rank, num_ranks)
    buffer = make_buffer(None)
    buffer.dispatch(x, **routing_of(buffer, topk_idx, topk_weights))
    engine: Any = buffer._engine
    assert engine.window.trace is None if buffer.device.type == "cpu" else engine.signals.marks is None
    buffer.destroy()
    return [name for name in os.listdir() if name.startswith("rank")]


def test_off_by_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DEEP_EP_TRACE", raising=False)
    assert run_ranks(no_trace, 2) == [[], []]


def bad_path_of_one(rank: int, num_ranks: int, folder: Path) -> tuple[str, str]:
    return error_of(deep_ep.Buffer, dist.group.WORLD, trace=folder / "file" if rank == 1 else folder)


def test_a_bad_path_of_one_rank_is_said_on_all(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")
    for kind, text in run_ranks(bad_path_of_one, 2, tmp_path):
        assert kind == "ValueError"
        assert "rank 1: " in text
        assert "rank 0: " not in text


def traced_alone(rank: int, num_ranks: int, folder: Path) -> None:
    normal_calls(rank, num_ranks, folder if rank == 0 else "")


@pytest.mark.cpu_only
def test_one_rank_may_record_alone(tmp_path: Path):
    run_ranks(traced_alone, 2, tmp_path)
    trace = load(tmp_path)
    assert [file.rank for file in trace.files] == [0]
    assert any("no file of rank 1" in problem for problem in trace.problems)
    assert count(trace).rows_to[1][0] > 0, "what rank 1 sent is known from rank 0"


def kernel_calls(rank: int, num_ranks: int, folder: Path) -> list[int]:
    x, topk_idx, topk_weights = inputs(rank, num_ranks, 4)
    buffer = make_buffer(folder)
    routing = routing_of(buffer, topk_idx, topk_weights)
    recv_x, *_, handle, _ = buffer.dispatch(x, **routing)
    buffer.combine(recv_x, handle)
    buffer.destroy()
    return routing["num_tokens_per_rank"].tolist()


def test_kernels_are_on_the_device_track(device: str, tmp_path: Path):
    env = {} if device == "cuda" else {"DEEP_EP_TRANSPORT": "interpreted"}
    rows_to = run_ranks(kernel_calls, 2, tmp_path, env=env)
    trace = load(tmp_path)
    assert list(partial_overlaps(trace)) == []
    for rank in range(2):
        dispatch, combine = calls_of(trace, rank, DEVICE)
        assert [dispatch.name, combine.name] == ["dispatch", "combine"]
        assert dispatch.args["rows_to"] == combine.args["rows_from"] == rows_to[rank]
        assert parts_of(trace, rank, dispatch) == ["handshake", "put", "offer", "put"], "it had nothing to guess from"
        assert parts_of(trace, rank, combine) == ["handshake", "pull"]
        waits = [one for one in trace.files[rank].slices if one.name == "wait: counts"]
        assert len(waits) == 1
        begins = [one.begin_us for one in trace.files[rank].slices if one.track == DEVICE]
        assert all(first <= second for first, second in pairwise(begins))
