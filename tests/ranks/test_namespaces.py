"""Several hosts on one machine: network namespaces with cables between them, and real sockets."""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import error_of, run_ranks
from deep_ep import Buffer, Config, EPUnsupported, reference
from deep_ep.engine.cpu.nodes.hops import FanOut
from deep_ep.tools.namespaces import INTERFACE, Hosts, making_hosts, sent_bytes
from deep_ep.transport.links import ROWS, Link
from internode import TOPK, World, combined, dispatch, equal, make_buffer, make_world, round_trip

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.cpu_only]

ROOT = Path(__file__).parents[2]
HIDDEN = 4096
LIMIT_SECS, DOWN_SECS = 1.5, 2.0
NODES = {"DEEP_EP_TIMEOUT_SECS": "30"}


@contextmanager
def hosts_of(num_hosts: int, ranks_per_host: int, rate: str = "") -> Iterator[Hosts]:
    """Hosts, or a skipped test where the system refuses them."""
    try:
        with making_hosts(num_hosts, ranks_per_host, rate) as hosts:
            yield hosts
    except EPUnsupported as error:
        pytest.skip(str(error))


# What crosses, and when ----------------------------------------------------------------------------------------------


class Watched(deque):
    """An inbox that writes down when chunks come."""

    def __init__(self, events: list[tuple[str, int]]):
        super().__init__()
        self.events = events

    def append(self, frame: Any) -> None:
        if frame.topic == ROWS:
            self.events.append(("arrived", frame.tag >> 24))
        super().append(frame)


@contextmanager
def watching(buffer: Buffer) -> Iterator[list[tuple[str, int]]]:
    """Write down the first row of every chunk that arrives from the other node, and of every one that is handed on."""
    events: list[tuple[str, int]] = []
    put = FanOut.put

    def watched_put(self: FanOut, first: int, last: int, parts: Any) -> None:
        put(self, first, last, parts)
        if self._is_relative:  # rows of a chunk, not the rank's own
            events.append(("handed on", first))

    links = buffer._engine.rail.links.values()
    for link in links:
        link.inbox = Watched(events)
    FanOut.put = watched_put
    try:
        yield events
    finally:
        FanOut.put = put
        for link in links:
            link.inbox = deque(link.inbox)


def crossing(rank: int, num_ranks: int, hosts: Hosts) -> dict[str, Any]:
    world = make_world(num_ranks, hosts.ranks_per_host, num_tokens=48, hidden=HIDDEN)
    buffer, size = make_buffer(), hosts.ranks_per_host
    round_trip(buffer, world)
    counters = [counter()]
    recv_x, *_, handle, _ = dispatch(buffer, world)
    counters.append(counter())
    sums, _, _ = buffer.combine(recv_x, handle)
    counters.append(counter())
    equal(recv_x, world.dispatched()[rank].recv_x)
    equal(sums, combined(world, rank))
    with watching(buffer) as events:
        dispatch(buffer, world, config=Config(20, 6, 256, 2, 8))
    buffer.destroy()
    node, peer = rank // size, (rank + size) % num_ranks
    there = int(world.layouts[rank].num_tokens_per_node[1 - node])
    back = int(world.layouts[peer].num_tokens_per_node[node])
    return {
        "dispatch": (there * (2 * HIDDEN + TOPK * (8 + 4)), counters[1] - counters[0]),
        "combine": (back * 2 * HIDDEN, counters[2] - counters[1]),
        "events": events,
        "coming": int(world.layouts[peer].num_tokens_per_node[node]),
    }


def counter() -> int:
    """What the interface has sent, when nobody is in a call."""
    dist.barrier()
    value = sent_bytes()
    dist.barrier()
    return value


@pytest.mark.alone
def test_a_token_crosses_once_and_is_handed_on_while_others_travel() -> None:
    with hosts_of(2, 4, "40mbit") as hosts:  # so slow that ranks which take turns on few cores are quicker
        told = run_ranks(crossing, 8, hosts, enter=hosts.enter, env=NODES)
    for call in ("dispatch", "combine"):
        for ranks in (told[:4], told[4:]):
            needed, wire = sum(one[call][0] for one in ranks), ranks[0][call][1]
            assert needed < wire < 1.03 * needed + 4000, (call, needed, wire)  # 4000: what the barriers send
    for one in told:
        firsts = [first for event, first in one["events"] if event == "arrived"]
        assert firsts == list(range(0, one["coming"], 2))  # as many messages as chunks of two rows
        begun = one["events"].index(("handed on", 0))
        assert begun < one["events"].index(("arrived", firsts[-1]))
        for index, first in enumerate(firsts[:-2]):
            handed_on, later = one["events"].index(("handed on", first)), ("arrived", firsts[index + 2])
            assert handed_on < one["events"].index(later) or one["events"].index(later) < begun


def crossing_straight(rank: int, num_ranks: int, hosts: Hosts) -> dict[str, tuple[int, int]]:
    """Low-latency calls: a token crosses once for each rank that it goes to, and all its experts' results come back."""
    world, size = make_world(num_ranks, hosts.ranks_per_host, num_tokens=48, hidden=HIDDEN), hosts.ranks_per_host
    num_tokens, num_experts = max(map(len, world.xs)), world.num_experts
    hint = Buffer.get_low_latency_rdma_size_hint(num_tokens, HIDDEN, num_ranks, num_experts)
    buffer = Buffer(dist.group.WORLD, num_rdma_bytes=hint, low_latency_mode=True, explicitly_destroy=True)
    xs, ids = [x.bfloat16() for x in world.xs], world.ids
    weights = [torch.ones(one.shape) for one in ids]  # products in FP32 are exact: bits can be compared
    expected = reference.low_latency_dispatch(xs, ids, num_tokens, num_experts)
    counters = [counter()]
    recv_x, count, handle, _, _ = buffer.low_latency_dispatch(
        xs[rank], ids[rank], num_tokens, num_experts, use_fp8=False
    )
    counters.append(counter())
    sums, _, _ = buffer.low_latency_combine(recv_x, ids[rank], weights[rank], handle)
    counters.append(counter())
    equal(count, expected[rank].recv_count)
    for expert, num_rows in enumerate(count.tolist()):
        equal(recv_x[expert, :num_rows], expected[rank].recv_x[expert, :num_rows])
    equal(sums, reference.low_latency_combine([one.recv_x for one in expected], ids, weights, expected)[rank])
    buffer.destroy()
    owners, far = [one // (num_experts // num_ranks) for one in ids], 1 - rank // size
    there = sum(int((owners[rank] == one).any(1).sum()) for one in range(far * size, (far + 1) * size))
    back = sum(int((owners[one] == rank).sum()) for one in range(far * size, (far + 1) * size))
    return {
        "dispatch": (there * 2 * HIDDEN, counters[1] - counters[0]),
        "combine": (back * 2 * HIDDEN, counters[2] - counters[1]),
    }


def test_low_latency_calls_cross_straight() -> None:
    with hosts_of(2, 2) as hosts:
        told = run_ranks(crossing_straight, 4, hosts, enter=hosts.enter, env=NODES)
    for call in ("dispatch", "combine"):
        for ranks in (told[:2], told[2:]):
            needed, wire = sum(one[call][0] for one in ranks), ranks[0][call][1]
            assert needed < wire < 1.1 * needed + 4000, (call, needed, wire)


# Links that fail -----------------------------------------------------------------------------------------------------


def outages(rank: int, num_ranks: int, hosts: Hosts) -> tuple[str, str, float]:
    world = make_world(num_ranks, hosts.ranks_per_host, num_tokens=48, hidden=HIDDEN)
    buffer = make_buffer(20.0)
    round_trip(buffer, world)
    survive_outage(buffer, world, hosts)
    survive_late_chunks(buffer, world)
    buffer.destroy()
    answer = give_up(make_buffer(LIMIT_SECS), world, hosts)
    round_trip(make_buffer(), world)  # with the link up again
    return answer


def survive_outage(buffer: Buffer, world: World, hosts: Hosts) -> None:
    """The cable of host 1 is out for a while, from when rank 0 has its second chunk."""
    down = threading.Thread(target=unplug_for, args=(hosts, 1, DOWN_SECS))
    if buffer.rank == 0:
        link = buffer._engine.rail.links[1]
        link.inbox = Trigger(2, down.start)
    dist.barrier()
    begin = time.monotonic()
    recv_x, *_, handle, _ = dispatch(buffer, world, config=Config(20, 6, 256, 1, 2))
    if buffer.rank == 0:
        assert time.monotonic() - begin > DOWN_SECS
        down.join()
    equal(recv_x, world.dispatched()[buffer.rank].recv_x)
    equal(buffer.combine(recv_x, handle)[0], combined(world, buffer.rank))


class Trigger(deque):
    """An inbox that does something when so many chunks have come."""

    def __init__(self, count: int, action: Any):
        super().__init__()
        self.count, self.action = count, action

    def append(self, frame: Any) -> None:
        super().append(frame)
        if frame.topic == ROWS:
            self.count -= 1
            if self.count == 0:
                self.action()


def unplug_for(hosts: Hosts, host: int, secs: float) -> None:
    hosts.unplug(host)
    time.sleep(secs)
    hosts.plug(host)


def survive_late_chunks(buffer: Buffer, world: World) -> None:
    """Every rank's messages leave late, each of them by another time."""
    draw, flush = random.Random(buffer.rank), Link.flush

    def late(self: Link) -> None:
        if draw.random() < 0.5:
            time.sleep(0.002)
        else:
            flush(self)

    Link.flush = late
    try:
        for _ in range(2):
            recv_x, *_, handle, _ = dispatch(buffer, world, config=Config(20, 6, 256, 3, 6))
            equal(recv_x, world.dispatched()[buffer.rank].recv_x)
            equal(buffer.combine(recv_x, handle)[0], combined(world, buffer.rank))
    finally:
        Link.flush = flush


def give_up(buffer: Buffer, world: World, hosts: Hosts) -> tuple[str, str, float]:
    """The cable is out, and stays out until everybody has raised."""
    round_trip(buffer, world)
    dist.barrier()
    if buffer.rank == 0:
        hosts.unplug(1)
    else:
        time.sleep(0.3)  # nobody's rows are there before the cable is out
    begin = time.monotonic()
    error = error_of(dispatch, buffer, world)
    secs = time.monotonic() - begin
    buffer.destroy()
    if buffer.rank == 0:
        time.sleep(LIMIT_SECS)
        hosts.plug(1)
    dist.barrier()
    return (*error, secs)


@pytest.mark.alone
def test_a_link_that_comes_back_changes_nothing_and_one_that_does_not_is_named() -> None:
    with hosts_of(2, 2, "50mbit") as hosts:
        told = run_ranks(outages, 4, hosts, enter=hosts.enter, env=NODES, limit_secs=60)
    for rank, (kind, text, secs) in enumerate(told):
        assert kind in ("EPTimeout", "EPPeerFailed"), (rank, kind, text)
        assert re.search(rf"no message from rank \d \(node {1 - rank // 2}\) after 1.5 s", text), (rank, text)
        assert secs < 2 * LIMIT_SECS, (rank, secs)


# Four hosts ----------------------------------------------------------------------------------------------------------


def four_hosts(rank: int, num_ranks: int, victim: int) -> tuple[str, str]:
    world = make_world(num_ranks, 1)
    buffer = make_buffer()
    for _ in range(2):
        round_trip(buffer, world)
    if rank == victim:
        os.kill(os.getpid(), signal.SIGKILL)
    return error_of(dispatch, buffer, world)


def test_four_hosts_and_a_rank_that_is_killed_on_one() -> None:
    with hosts_of(4, 1) as hosts:
        told = run_ranks(four_hosts, 4, 2, enter=hosts.enter, env=NODES, may_die=[2])
    for rank in (0, 1, 3):
        kind, text = told[rank]
        assert kind in ("EPError", "EPPeerFailed"), (rank, kind, text)
        assert re.search(r"rank 2 \(node 2\) has closed the connection", text), (rank, text)


# What users start ----------------------------------------------------------------------------------------------------


def test_torchrun_on_two_hosts() -> None:
    """The lines of `examples/two_nodes.py`, a launcher on each host."""
    with hosts_of(2, 2) as hosts:
        launchers = [start_torchrun(hosts, host) for host in range(2)]
        try:
            said = [launcher.communicate(timeout=90) for launcher in launchers]
        finally:
            for launcher in launchers:
                launcher.kill()
                launcher.wait()
    for launcher, (_, errors) in zip(launchers, said, strict=True):
        assert launcher.returncode == 0, errors[-3000:]
    assert "2 nodes of 2 ranks: all sums are right" in said[0][0]
    assert "message between 2 nodes" in said[0][0]


def start_torchrun(hosts: Hosts, host: int) -> subprocess.Popen:
    lines = (ROOT / "examples" / "two_nodes.py").read_text().splitlines()
    line = next(line.strip() for line in lines if line.strip().startswith("torchrun "))
    words = line.replace("$NODE", str(host)).replace("$FIRST_HOST", hosts.address(0)).split()
    command = ["ip", "netns", "exec", hosts.names[host], sys.executable, "-m", "torch.distributed.run", *words[1:]]
    variables = {
        **os.environ,
        "PYTHONPATH": str(ROOT / "src"),
        "DEEP_EP_HOST": hosts.names[host],  # namespaces share their name and their boot
        "GLOO_SOCKET_IFNAME": INTERFACE,
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT)


def test_a_command_that_is_terminated_leaves_no_host() -> None:
    with hosts_of(1, 1):
        pass  # or skipped
    command = [sys.executable, "-m", "deep_ep", "bench", "internode", "--quick", "--link", "1mbit"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    assert "ranks" in process.stdout.readline()  # the first case has begun
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    left = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    assert f"deep-ep-{process.pid}-" not in left


def test_what_namespaces_refuse() -> None:
    with pytest.raises(ValueError, match="the rate must be one that tc knows"), hosts_of(2, 1, "fast"):
        pass
    with pytest.raises(ValueError, match="1 to 200 hosts"), hosts_of(0, 1):
        pass
