"""A buffer is made on all ranks or on none: whatever fails, all ranks raise, name the rank, and leave nothing."""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import error_of
from deep_ep.control import Control
from deep_ep.launch import run_ranks

pytestmark = pytest.mark.cpu_only

LIMIT_SECS = 30.0  # that no failure may come near
SOON_SECS = 10.0
NODES = {"DEEP_EP_RANKS_PER_NODE": "2"}


def make_buffer(**more: Any) -> deep_ep.Buffer:
    options = {"num_nvl_bytes": 1 << 20, "num_cpu_timeout_secs": LIMIT_SECS, "explicitly_destroy": True, **more}
    return deep_ep.Buffer(dist.group.WORLD, **options)


def used(options: dict[str, Any], has_calls: bool) -> None:
    """Make a buffer, and a call each way."""
    buffer = make_buffer(**options)
    if has_calls:
        topk_idx = torch.arange(buffer.group_size).repeat(3, 1)
        per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, buffer.group_size)
        recv_x, *_, handle, _ = buffer.dispatch(torch.ones(3, 8), None, per_rank, per_node, mask, per_expert)
        combined, _, _ = buffer.combine(recv_x, handle)
        assert bool((combined == buffer.group_size).all())
    buffer.destroy()


class Held:
    """What this process holds that a buffer could leave: descriptors but for sockets, sockets, mappings, threads."""

    def __init__(self) -> None:
        links = []
        for fd in os.listdir("/proc/self/fd"):
            with contextlib.suppress(OSError):
                links.append(os.readlink(f"/proc/self/fd/{fd}").split(":")[0])
        self.num_sockets = links.count("socket")
        maps = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:deep_ep" in line]
        threads = [thread.name for thread in threading.enumerate() if thread.name.startswith("deep_ep")]
        self.things = sorted(link for link in links if link != "socket"), len(maps), threads

    def is_all(self) -> bool:
        """Whether this process holds nothing more by now. The group closes sockets of its own when it likes."""
        now = Held()
        if now.things != self.things or now.num_sockets > self.num_sockets:
            gc.collect()
            now = Held()
        return now.things == self.things and now.num_sockets <= self.num_sockets


@contextlib.contextmanager
def broken(step: str, make_error: Callable[[], BaseException]) -> Iterator[None]:
    """Inside the block a function or a class, `module:name`, raises instead of doing its work."""
    module, _, name = step.partition(":")
    *owners, last = name.split(".")
    owner: Any = importlib.import_module(f"deep_ep.{module}")
    for one in owners:
        owner = getattr(owner, one)

    def fail(*args: Any, **kwargs: Any) -> None:
        raise make_error()

    with mock.patch.object(owner, last, fail):
        yield


ERRORS: dict[str, Callable[[], BaseException]] = {
    "KeyError": lambda: KeyError("an accident"),
    "EMFILE": lambda: OSError(errno.EMFILE, "an accident"),
    "KeyboardInterrupt": lambda: KeyboardInterrupt("an accident"),
    "MemoryError": lambda: MemoryError("an accident"),
    "EPUnsupported": lambda: deep_ep.EPUnsupported("an accident"),
}
REFUSED = ("transport.shm:_open", lambda: PermissionError("refused"))  # a host where descriptors go over sockets


def attempt(rank: int, victim: int, step: str, kind: str, options: dict[str, Any]) -> tuple[str, str, float]:
    """What a rank gets of a construction in which one fails at a step, and how long it takes."""
    begin = time.monotonic()
    with broken(step, ERRORS[kind]) if rank == victim else contextlib.nullcontext():
        try:
            make_buffer(**options)
        except BaseException as error:
            return type(error).__name__, str(error), time.monotonic() - begin
    return "none", "", time.monotonic() - begin


def fail_at_each(
    rank: int,
    num_ranks: int,
    steps: list[tuple[str, int, str]],
    options: dict[str, Any],
    is_refused: bool = False,
    has_calls: bool = True,
) -> list[tuple[str, str, float]]:
    with contextlib.ExitStack() as stack:
        if is_refused:
            stack.enter_context(broken(*REFUSED))
        used(options, has_calls)  # what a process does only once: it also opens connections of the group
        before, results = Held(), []
        for step, victim, kind in steps:
            results.append(attempt(rank, victim, step, kind, options))
            assert before.is_all(), (step, kind, before.things, Held().things)
            dist.barrier()
        used(options, has_calls)  # the group is as good as before
        assert before.is_all()
    return results


def check_blame(steps: list[tuple[str, int, str]], results: list[list[tuple[str, str, float]]]) -> None:
    own = {"EMFILE": "EPTransportError"}
    for index, (step, victim, kind) in enumerate(steps):
        for rank, said in enumerate(results):
            name, text, secs = said[index]
            where = (step, rank, victim, kind, name, text)
            assert secs < SOON_SECS, where
            assert f"rank {victim}" in text or rank == victim, where
            assert "an accident" in text, where
            expected = own.get(kind, kind) if rank == victim else "EPTransportError"
            assert name == ("EPUnsupported" if kind == "EPUnsupported" else expected), where


def planned(steps: list[str], num_ranks: int) -> list[tuple[str, int, str]]:
    """Each step with one error, by turns, on the first rank or on the last: who connects to whom differs."""
    kinds = list(ERRORS)
    return [(step, (0, num_ranks - 1)[index % 2], kinds[index % len(kinds)]) for index, step in enumerate(steps)]


ONE_NODE = [
    "buffers.legacy:checks.check_int",
    "buffers.legacy:find_device",
    "topology:host_id",
    "topology:arrange",
    "buffers.legacy:open_trace",
    "buffers.engines:choose",
    "transport.shm:SharedMemory.create",
    "transport.memory:SharedMemory.grow",
    "transport.memory:SharedMemory.commit",
    "transport.shm:open_all",
    "transport.shm:Board.__init__",
    "transport.shm:Process.__init__",
    "transport.window:Segment",
    "transport.window:SparseSegment",
    "buffers.engines:CommStream",
    "buffers.engines:CpuEngine",
    "buffers.engines:CpuLowLatency",
    "buffers.legacy:Runtime",
    "buffers.legacy:registry.register",
    "buffers.legacy:Closing",
]
LOW_LATENCY = {"low_latency_mode": True, "num_rdma_bytes": 1 << 20}


def test_one_rank_fails_at_each_step_on_one_node() -> None:
    steps = planned(ONE_NODE, 3)
    check_blame(steps, run_ranks(fail_at_each, 3, steps, LOW_LATENCY, limit_secs=60))


def other_modes(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    odd = rank == 1
    options = [{"low_latency_mode": odd}, {"low_latency_mode": True, "enable_shrink": odd}]
    return [error_of(deep_ep.Buffer, dist.group.WORLD, 1 << 20, 1 << 20, **one) for one in options]


def test_modes_that_differ_are_named() -> None:
    for first, second in run_ranks(other_modes, 2):
        assert first[0] == second[0] == "EPError", (first, second)
        assert "`low_latency_mode` must be the same on all ranks" in first[1]
        assert "`enable_shrink` must be the same on all ranks" in second[1]


SOCKETS = ["transport.fds:_new_socket", "transport.fds:_give", "transport.fds:_take", "transport.fds:SharedMemory"]


def test_one_rank_fails_while_descriptors_go_over_sockets() -> None:
    steps = planned(SOCKETS, 3)
    check_blame(steps, run_ranks(fail_at_each, 3, steps, {}, True, limit_secs=60))


ACROSS_NODES = [
    "transport.rendezvous:own_addresses",
    "transport.rendezvous:_listen",
    "transport.message:service_level",
    "transport.message:mark",
    "transport.message:Link",
    "transport.message:Rail",
    "transport.mesh:ReceiveArena",
    "transport.mesh:connect",
    "transport.mesh:Link",
    "transport.mesh:Mesh",
    "engine.cpu.nodes.engine:CpuNodesChain",
    "buffers.engines:CpuLowLatency",
    "buffers.legacy:registry.register",
]


def test_one_rank_fails_at_each_step_across_nodes() -> None:
    steps = [("transport.shm:_open", 0, "KeyError"), *planned(ACROSS_NODES, 4)]  # an OSError would be a refusal
    # Only the ranks of higher nodes call. While they do, others wait for them.
    steps += [("transport.rendezvous:_call", 2, "KeyError"), ("transport.rendezvous:_call", 3, "KeyboardInterrupt")]
    check_blame(steps, run_ranks(fail_at_each, 4, steps, LOW_LATENCY, env=NODES, limit_secs=60))


def test_a_rank_that_cannot_take_connections_is_named() -> None:
    steps = [("transport.rendezvous:_Callers._accept", victim, "EMFILE") for victim in (0, 1)]
    results = run_ranks(fail_at_each, 4, steps, {}, env=NODES, limit_secs=60)
    for index, (_, victim, _) in enumerate(steps):
        for rank, said in enumerate(results):
            name, text, secs = said[index]
            assert name in ("EPTransportError", "PeerMissing")  # the callers', which know no more
            assert "an accident" in text if rank == victim else f"rank {victim} cannot be reached" in text, (rank, text)
            assert secs < SOON_SECS


INTERPRETED = [
    "transport.interpreted:bytes_tensor",
    "transport.proxy:MessageProxy",  # when others are in a joint step inside of this one
    "engine.cuda.nodes.proxies:_host_memory",
    "buffers.legacy:registry.register",
]


def test_one_rank_fails_where_kernels_are_interpreted() -> None:
    steps, env = planned(INTERPRETED, 2), {"DEEP_EP_RANKS_PER_NODE": "1", "DEEP_EP_TRANSPORT": "interpreted"}
    check_blame(steps, run_ranks(fail_at_each, 2, steps, {}, False, False, env=env, limit_secs=120))


# More than one rank, and the limit -----------------------------------------------------------------------------------


def two_fail(rank: int, num_ranks: int) -> tuple[str, str]:
    error = {1: KeyError("first"), 2: ValueError("second")}.get(rank)
    with broken("transport.shm:SharedMemory.create", lambda: error) if error else contextlib.nullcontext():
        return error_of(make_buffer)


def test_where_two_ranks_fail_at_once_all_others_name_the_same_one() -> None:
    one, two, three, four = run_ranks(two_fail, 4, limit_secs=60)
    assert two == ("KeyError", "'first'")
    assert three == ("ValueError", "second")
    for rank, (kind, text) in ((0, one), (3, four)):
        assert kind == "EPTransportError"
        assert text.startswith(f"Buffer: rank 1 failed: KeyError: 'first' (rank {rank}/4). So did rank 2.")


WRONG = {"num_nvl_bytes": 100, "num_cpu_timeout_secs": -1.0, "num_gpu_timeout_secs": "1", "device": "gpu"}


def wrong_argument(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    told = [error_of(make_buffer, **({name: value} if rank == 1 else {})) for name, value in WRONG.items()]
    if rank == 1:
        os.environ["DEEP_EP_TIMEOUT_SECS"] = "abc"
    told.append(error_of(make_buffer, num_cpu_timeout_secs=None))
    return told


def test_a_wrong_argument_on_one_rank_is_told_to_all() -> None:
    for name, here, there in zip(
        [*WRONG, "DEEP_EP_TIMEOUT_SECS"], *run_ranks(wrong_argument, 2, limit_secs=60), strict=True
    ):
        assert there[0] in ("TypeError", "ValueError")
        assert name in there[1]
        assert here[0] == "EPTransportError"
        assert here[1].startswith(f"Buffer: rank 1 failed: {there[0]}: {there[1]} (rank 0/2)")


def too_large_a_file(rank: int, num_ranks: int) -> tuple[str, str]:
    if rank == 0:  # the window is larger, the board is not
        resource.setrlimit(resource.RLIMIT_FSIZE, (8 << 20, resource.RLIM_INFINITY))
    return error_of(make_buffer)


def test_memory_that_one_rank_cannot_have() -> None:
    here, there = run_ranks(too_large_a_file, 2, limit_secs=60)
    assert here[0] == there[0] == "EPTransportError"
    assert "File too large (rank 0/2)" in here[1]
    assert "rank 0 failed: OSError: [Errno 27] File too large (rank 1/2)" in there[1]


def no_descriptor(rank: int, num_ranks: int, is_refused: bool) -> list[tuple[str, str]]:
    """One rank has fewer and fewer descriptors left, until it can make its buffer in spite of it."""
    results = []
    with broken(*REFUSED) if is_refused else contextlib.nullcontext():
        make_buffer().destroy()
        before = Held()
        for spare in (*range(0, 24, 3), 50):
            with few_descriptors(spare) if rank == 1 else contextlib.nullcontext():
                results.append(error_of(lambda: make_buffer().destroy()))
            dist.barrier()
            assert before.is_all(), (spare, results[-1], before.things, Held().things)
    return results


@contextlib.contextmanager
def few_descriptors(spare: int) -> Iterator[None]:
    """This process may open so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = os.open(os.devnull, os.O_RDONLY)
    os.close(lowest)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in range(lowest, soft) if number not in used)
    limit = next(number for index, number in enumerate(free) if index == spare)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize(("is_refused", "env"), [(False, {}), (True, {}), (False, NODES)])
def test_a_rank_without_descriptors_fails_with_all_others(is_refused: bool, env: dict[str, str]) -> None:
    """However few there are, and wherever that is noticed: no gather is answered by another one."""
    results = run_ranks(no_descriptor, 4, is_refused, env=env, limit_secs=60)
    outcomes = list(zip(*results, strict=True))
    assert {kind for kind, _ in outcomes[0]} == {"EPTransportError"}
    assert {kind for kind, _ in outcomes[-1]} == {"none"}
    for outcome in outcomes:
        assert len({kind for kind, _ in outcome}) == 1, outcome
        for rank, (kind, text) in enumerate(outcome):
            if kind != "none":
                assert "Too many open files" in text or "no descriptor is free" in text, (rank, text)
                assert "rank 1" in text or rank == 1


def limited(rank: int, num_ranks: int) -> tuple[str, str, float]:
    """One rank is late again and again, each time by less than the limit."""
    begin = time.monotonic()
    late = Control.gather

    def gather(self: Control, value: Any, purpose: str) -> Any:
        time.sleep(0.7 if rank == 1 else 0)
        return late(self, value, purpose)

    with mock.patch.object(Control, "gather", gather):
        return (*error_of(make_buffer, num_cpu_timeout_secs=1.5), time.monotonic() - begin)


def test_one_limit_holds_for_all_of_it() -> None:
    for kind, text, secs in run_ranks(limited, 2, limit_secs=60):
        assert kind == "EPTimeout"
        assert "not all ranks came within 1.5 s" in text
        assert secs < 5


def interrupted(rank: int, num_ranks: int) -> tuple[str, str, float]:
    """Ctrl-C in a rank that waits in a gather, to which it has given its part already."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ranks of `run_ranks` ignore it
    make_buffer().destroy()
    before = Held()
    dist.barrier()
    begin = time.monotonic()
    if rank == 0:
        timer = threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        timer.start()
    else:
        time.sleep(0.8)
    try:
        make_buffer()
    except BaseException as error:
        said = (type(error).__name__, str(error), time.monotonic() - begin)
    else:
        said = ("none", "", 0.0)
    if rank == 0:
        timer.join()
    assert before.is_all(), (before.things, Held().things)
    dist.barrier()
    make_buffer().destroy()
    return said


def test_an_interrupted_gather_keeps_the_ranks_in_step() -> None:
    (kind, _, secs), (peer, text, _) = run_ranks(interrupted, 2, limit_secs=60)
    assert kind == "KeyboardInterrupt"
    assert secs < SOON_SECS
    assert peer == "EPTransportError"
    assert "rank 0 failed: KeyboardInterrupt" in text


def one_dispatch(buffer: deep_ep.Buffer) -> None:
    ids = torch.zeros(1, 1, dtype=torch.int64)
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(ids, buffer.group_size)
    buffer.dispatch(torch.zeros(1, 8), None, per_rank, per_node, mask, per_expert)


def interrupted_at_last(rank: int, num_ranks: int, is_begun: bool) -> tuple[str, str]:
    """Ctrl-C in rank 0 at the last gather: before it has given its part, or while it waits for rank 1."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ranks of `run_ranks` ignore it
    original, num_gathers = Control.gather, 0

    def count(control: Control, value: Any, purpose: str) -> list[Any]:
        nonlocal num_gathers
        num_gathers += 1
        return original(control, value, purpose)

    Control.gather = count  # type: ignore[method-assign]
    make_buffer().destroy()
    num_last, num_gathers = num_gathers, 0

    def interrupt(control: Control, value: Any, purpose: str) -> list[Any]:
        if num_gathers + 1 == num_last:
            if rank == 1:
                time.sleep(0.8)
            elif not is_begun:
                raise KeyboardInterrupt
            else:
                threading.Timer(0.3, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT)).start()
        return count(control, value, purpose)

    Control.gather = interrupt  # type: ignore[method-assign]
    buffers = []
    try:
        buffers.append(make_buffer())
    except BaseException as error:
        said = (type(error).__name__, str(error))
    else:
        said = error_of(lambda: one_dispatch(buffers[0]))
        buffers[0].destroy()
    Control.gather = original  # type: ignore[method-assign]
    dist.barrier()
    make_buffer().destroy()
    return said


@pytest.mark.parametrize("is_begun", [False, True])
def test_the_last_gather_is_interrupted(is_begun: bool) -> None:
    (kind, _), (peer, text) = run_ranks(interrupted_at_last, 2, is_begun, limit_secs=60)
    assert kind == "KeyboardInterrupt"
    if is_begun:  # then the peer has a buffer, and its first call finds this rank closed
        assert "rank 0" in text
        assert peer in ("EPError", "EPTimeout")
    else:
        assert peer == "EPTransportError"
        assert "rank 0 failed: KeyboardInterrupt" in text


def ends(rank: int, num_ranks: int, victim: int, how: int, limit_secs: float) -> tuple[str, str, float]:
    if rank == victim:  # after the first gathers
        with broken("transport.shm:open_all", lambda: os.kill(os.getpid(), how) or AssertionError("it lives on")):
            make_buffer()
    begin = time.monotonic()
    return (*error_of(make_buffer, num_cpu_timeout_secs=limit_secs), time.monotonic() - begin)


@pytest.mark.parametrize("env", [{}, NODES])
def test_a_rank_that_is_killed_is_named_at_once(env: dict[str, str]) -> None:
    results = run_ranks(ends, 4, 2, signal.SIGKILL, LIMIT_SECS, may_die=[2], env=env, limit_secs=60)
    for kind, text, secs in results[:2] + results[3:]:
        assert kind == "EPTransportError"
        assert "the group has failed, there is no word from rank 2 (" in text
        assert secs < SOON_SECS


def test_a_rank_that_is_silent_is_named_at_the_limit() -> None:
    results = run_ranks(ends, 3, 1, signal.SIGSTOP, 2.0, may_die=[1], limit_secs=60)
    for kind, text, secs in results[:1] + results[2:]:
        assert "there is no word from rank 1 (" in text, (kind, text)
        assert 1.5 < secs < SOON_SECS


def no_network(rank: int, num_ranks: int) -> tuple[bool, str]:
    os.environ["GLOO_SOCKET_IFNAME"] = "nosuch0"
    before, text = Held(), ""
    for _ in range(20):
        _, text = error_of(make_buffer)
    return before.is_all(), text


def test_twenty_failures_leave_nothing() -> None:
    for is_all, text in run_ranks(no_network, 4, env=NODES, limit_secs=60):
        assert is_all
        assert "no interface of nosuch0 has an IPv4 address" in text


def with_trace(rank: int, num_ranks: int, folder: str) -> list[str]:
    with broken("transport.shm:Board", ERRORS["KeyError"]) if rank == 1 else contextlib.nullcontext():
        assert error_of(make_buffer, trace=folder)[0] != "none"
    dist.barrier()
    left = sorted(os.listdir(folder))
    dist.barrier()
    make_buffer(trace=folder).destroy()
    dist.barrier()
    return [*left, *sorted(os.listdir(folder))]


def test_no_trace_is_left_of_a_buffer_that_was_not_made(tmp_path: Path) -> None:
    names = ["rank0.json", "rank1.json"]
    assert run_ranks(with_trace, 2, str(tmp_path), limit_secs=60) == [names, names]
