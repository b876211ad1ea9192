"""The engine of GPUs across nodes: a host split into nodes. On the CPU its kernels run in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from itertools import product
from typing import Any

import pytest
import torch

from common import error_of, layout_of, run_ranks
from deep_ep import Buffer
from deep_ep.kernels import _triton, relay
from internode import (
    HIDDEN,
    TOPK,
    World,
    combined,
    dispatch,
    edges,
    equal,
    make_buffer,
    make_world,
    remote_env,
    round_trip,
    several,
    whole_test,
)

pytestmark = [
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed"),
]

PATIENCE_SECS = 60.0  # for everything around a limit, on a busy machine


def carried(rank: int, num_ranks: int, transport: str) -> None:
    """The transport that was asked for, and the bytes on the rail: every token once for each other node, and back."""
    buffer = make_buffer(num_nvl_bytes=1 << 20)
    name = "interpreted-memory" if buffer.device.type == "cpu" and transport != "message" else transport.split()[0]
    assert f"{name} " in buffer.transport, buffer.transport
    world = make_world(num_ranks, num_ranks // 2, num_tokens=7)
    node = rank // (num_ranks // 2)
    sent = int(world.layouts[rank].num_tokens_per_node[1 - node])
    relayed = int(world.layouts[(rank + num_ranks // 2) % num_ranks].num_tokens_per_node[node])
    there = 2 * HIDDEN + 4 * relay.relay_record_words(num_ranks // 2, TOPK)
    seen = []
    for step in range(2):  # the second one has guessed its room
        recv_x, *_, handle, _ = dispatch(buffer, world)
        buffer.check()
        seen.append(buffer.stats()["rail"]["rows_bytes_sent"])
        equal(buffer.combine(recv_x, handle)[0], combined(world, rank))
        buffer.check()
        seen.append(buffer.stats()["rail"]["rows_bytes_sent"])
        assert seen[2 * step] - (seen[2 * step - 1] if step else 0) == sent * there
        assert seen[2 * step + 1] - seen[2 * step] == relayed * 2 * HIDDEN
    buffer.destroy()


def test_every_token_crosses_once(device: str, transport: str) -> None:
    run_ranks(carried, 4, transport, env=remote_env(device, transport, 4, 2))


@pytest.mark.cpu_only
@pytest.mark.exhaustive  # the suite's own interpreter is as strict
def test_tritons_own_interpreter_makes_the_same_calls() -> None:
    command = [sys.executable, "-m", "pytest", "-q", f"{__file__}::test_every_token_crosses_once[nvshmem]"]
    ran = subprocess.run(command, env={**os.environ, "PLAIN_INTERPRETER": "1"}, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout + ran.stderr


@pytest.mark.parametrize("shape", [(2, 2), (2, 4), (4, 2), (4, 1)])
def test_everything_that_deepeps_own_test_checks(device: str, transport: str, shape: tuple[int, int]) -> None:
    num_nodes, size = shape
    num_ranks = num_nodes * size
    if device == "cpu" and shape != (2, 2):
        pytest.skip("it takes minutes in the interpreter")
    if transport != "message" and num_ranks > 4:
        pytest.skip("as many ranks do not start NVSHMEM on one GPU")
    ways: Any = list(product((False, True), repeat=2)) if device == "cuda" and shape == (2, 2) else None
    most_cases = 1 if device == "cpu" else None
    environment = remote_env(device, transport, num_ranks, size)
    run_ranks(whole_test, num_ranks, size, torch.int64, ways, most_cases, env=environment)


def test_edges(device: str, transport: str) -> None:
    run_ranks(several, 2, (edges, 1), env=remote_env(device, transport, 2, 1))


def tight(rank: int, num_ranks: int) -> None:
    """Rank 0 alone has tokens, 3 for each rank of the other node: rank 2 relays 6, and has made room to receive 3."""
    buffer = make_buffer(num_nvl_bytes=1 << 20)
    ids = torch.tensor([[2 + token % 2] for token in range(6 if rank == 0 else 0)], dtype=torch.int64).view(-1, 1)
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(ids, num_ranks)
    x, weights = torch.arange(len(ids) * 8.0).view(-1, 8), torch.ones(len(ids), 1)
    layout = (per_rank, per_node, mask, per_expert)
    recv_x, *_, handle, _ = buffer.dispatch(x, None, *layout, ids, weights, num_worst_tokens=3)
    combined_x, *_ = buffer.combine(recv_x, handle)
    buffer.check()
    if rank >= 2:
        equal(recv_x, torch.arange(48.0).view(-1, 8)[rank - 2 :: 2].contiguous())
    equal(combined_x, x)
    buffer.destroy()


def test_a_rank_relays_more_rows_than_it_makes_room_for(device: str, transport: str) -> None:
    run_ranks(tight, 4, env=remote_env(device, transport, 4, 2))


def growing(rank: int, num_ranks: int) -> None:
    """Rows that do not fit into remote memory: a full dispatch makes room for them, other calls say what to do."""
    buffer = make_buffer(limit_secs=60.0, num_nvl_bytes=64 << 20)
    half = buffer._engine._ops.remote.outbox_bytes
    narrow = make_world(num_ranks, 1, num_tokens=3)
    round_trip(buffer, narrow)
    assert buffer._engine._ops.remote.outbox_bytes == half
    hidden = half // 2 // 5
    wide = make_world(num_ranks, 1, num_tokens=9, hidden=hidden)
    recv_x, *_, handle, _ = dispatch(buffer, wide)
    equal(recv_x, wide.dispatched()[rank].recv_x)
    assert buffer._engine._ops.remote.outbox_bytes > half
    equal(buffer.combine(recv_x, handle)[0], combined(wide, rank))
    round_trip(buffer, narrow)
    wider = make_world(num_ranks, 1, num_tokens=9, hidden=4 * hidden)
    kind, text = error_of(lambda: (buffer.dispatch(wider.xs[rank].to(buffer.device), handle=handle), buffer.check()))
    assert (kind, "rows that cross between nodes" in text) == ("EPOverflow", True), text
    assert error_of(lambda: round_trip(buffer, narrow))[0] == "EPClosed"


def test_remote_memory_grows(device: str, transport: str) -> None:
    if device == "cpu":
        pytest.skip("it takes a minute in the interpreter")
    run_ranks(growing, 2, env=remote_env(device, transport, 2, 1))


def widening(rank: int, num_ranks: int) -> None:
    """Rows of BF16 come, and rows of FP32 go back. Both are more than remote memory holds at first."""
    buffer = make_buffer(limit_secs=60.0)
    num_tokens, hidden = 24, buffer._engine._ops.remote.outbox_bytes // 48
    ids = torch.arange(num_ranks, device=buffer.device).repeat(num_tokens, 1)
    x = torch.ones(num_tokens, hidden, dtype=torch.bfloat16, device=buffer.device)
    recv_x, *_, handle, _ = buffer.dispatch(x, **layout_of(buffer, ids, num_ranks))
    equal(buffer.combine(recv_x.float() / 3, handle)[0], num_ranks * x.float() / 3)
    buffer.check()
    buffer.destroy()


def test_a_combine_brings_back_wider_elements(device: str, transport: str) -> None:
    run_ranks(widening, 2, env=remote_env(device, transport, 2, 1))


# When something goes wrong -------------------------------------------------------------------------------------------


def different(rank: int, num_ranks: int) -> tuple[str, str]:
    buffer = make_buffer(limit_secs=60.0)
    world = make_world(num_ranks, 1)
    round_trip(buffer, world)
    other = world if rank else make_world(num_ranks, 1, hidden=HIDDEN + 8)
    return error_of(lambda: dispatch(buffer, other))


def test_a_rank_of_another_node_that_calls_something_else_is_named(device: str, transport: str) -> None:
    for kind, text in run_ranks(different, 2, env=remote_env(device, transport, 2, 1)):
        assert kind == "EPError"
        assert "all ranks must make the same call" in text
        assert "hidden" in text


def patient_buffer(limit_secs: float) -> Buffer:
    """A short limit for the calls, not for making the buffer."""
    limits = {"num_gpu_timeout_secs": limit_secs, "num_cpu_timeout_secs": PATIENCE_SECS}
    return Buffer(torch.distributed.group.WORLD, explicitly_destroy=True, **limits)


def silent(rank: int, num_ranks: int, when: str, limit_secs: float) -> tuple[str, str, float]:
    """Rank 3 says nothing any more: in the next call, after the handshake of this one, or after its rows have left."""
    buffer = patient_buffer(limit_secs)
    world = make_world(num_ranks, 2)
    round_trip(buffer, world)

    def fault(point: str) -> None:
        if point == {"inside": "dispatch: before put", "at the end": "dispatch: before finish"}[when]:
            time.sleep(2 * limit_secs)

    kind, text, begin = "none", "", time.monotonic()
    if rank == 3 and when != "before":
        buffer.set_fault_hook(fault)
    if rank != 3 or when != "before":
        kind, text = error_of(lambda: [unchecked(buffer, world) for _ in range(2)])
    elapsed = time.monotonic() - begin
    torch.distributed.barrier()  # it is there all the time
    return kind, text, elapsed


def unchecked(buffer: Buffer, world: World) -> None:
    """A dispatch and a combine, whatever comes: a GPU says late that something went wrong."""
    recv_x, *_, handle, _ = dispatch(buffer, world)
    buffer.combine(recv_x, handle)
    buffer.check()


@pytest.mark.parametrize("when", ["before", "inside", pytest.param("at the end", marks=pytest.mark.exhaustive)])
def test_a_silent_rank_is_named_on_all_nodes(device: str, transport: str, when: str) -> None:
    if device == "cpu" and when == "inside":
        pytest.skip("the limit would have to be long in the interpreter")
    if device == "cpu" and transport != "message":
        pytest.skip("a rank that is killed is silent, too, where there is no connection: below")
    limit_secs = 8.0 if device == "cpu" else 4.0
    results = run_ranks(silent, 4, when, limit_secs, env=remote_env(device, transport, 4, 2))
    for rank, (kind, text, elapsed) in enumerate(results[:3]):
        assert kind == "EPTimeout", text
        assert "rank 3 " in text or "ranks 3" in text, (rank, text)
        if when == "at the end":  # rank 2 waits for it in this call, ranks 0 and 1 for both in the next one
            assert "from rank 3 after" in text, (rank, text)
        assert elapsed < PATIENCE_SECS


def killed(rank: int, num_ranks: int) -> tuple[str, str]:
    buffer = patient_buffer(8.0)
    world = make_world(num_ranks, 2)
    round_trip(buffer, world)
    if rank == 3:
        os._exit(3)
    return error_of(lambda: [unchecked(buffer, world) for _ in range(2)])


def test_a_killed_rank_is_named_on_all_nodes(device: str, transport: str) -> None:
    results = run_ranks(killed, 4, env=remote_env(device, transport, 4, 2), may_die=[3])
    for kind, text in results[:3]:
        assert kind in ("EPTimeout", "EPError"), text
        assert "rank 3" in text, text
        if transport == "message":
            assert "closed the connection" in text, "the network tells before the limit does"


def no_room(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    """The window is full, and may not grow: an error says what to do, on all ranks."""
    buffer = Buffer(torch.distributed.group.WORLD, explicitly_destroy=True, num_gpu_timeout_secs=60.0)
    world: World = make_world(num_ranks, 1, num_tokens=40)
    first = error_of(lambda: dispatch(buffer, world))
    return [first, error_of(lambda: dispatch(buffer, world))]


def test_a_full_window_is_an_error_on_all_ranks(device: str, transport: str) -> None:
    limited = {**remote_env(device, transport, 2, 1), "DEEP_EP_ARENA_BYTES": "8192"}
    results = run_ranks(no_room, 2, env=limited)
    assert any(first[0] == "EPTransportError" and "larger num_nvl_bytes" in first[1] for first, _ in results)
    for first, second in results:
        assert first[0] in ("EPTransportError", "EPError", "EPPeerFailed"), first
        assert second[0] == "EPClosed"
