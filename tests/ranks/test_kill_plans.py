"""Kill plans: each rank is killed, or stopped, at each fault point of each operation; who lives must say who died.

A plan needs processes of its own, since a killed rank is gone. Ranks that are forked from one process, and meet over
files instead of a process group, start in a few milliseconds: so all plans can be run.
"""

from __future__ import annotations

import atexit
import os
import pickle
import shutil
import signal
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import deep_ep
from common import layout_of
from deep_ep.launch import run_ranks

pytestmark = pytest.mark.cpu_only

TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 8, 256, 3, 2
STAGED_BYTES_PER_RANK = 4096  # of arena, so small that a call is staged and takes several rounds
POSTED_BYTES = 1 << 18

LIMIT_SECS = 60.0  # of a buffer: who notices a dead peer only now is too late
NOTICED_SECS = 10.0  # the most that any survivor may take, on a machine that is busy with other things
USUALLY_NOTICED_SECS = 1.0
STOPPED_SECS = 0.3

# What the protocol page says each operation signals, (rounds) -> steps.
STEPS: dict[str, Callable[[int], list[str]]] = {
    "full dispatch": lambda rounds: ["announced", "offered", "ready", *["taken", "ready"] * (rounds - 1)],
    "cached dispatch": lambda rounds: ["offered", "ready", *["taken", "ready"] * (rounds - 1)],
    "worst-case dispatch": lambda rounds: ["offered", "ready", *["taken", "ready"] * (rounds - 1)],
    "pulled combine": lambda rounds: ["ready", "taken"] * rounds,
    "copied-in combine": lambda rounds: ["ready", "taken"] * rounds,
    "staged dispatch": lambda rounds: ["announced", "offered", "ready", *["taken", "ready"] * (rounds - 1)],
    "staged combine": lambda rounds: ["offered", *["ready", "taken"] * rounds],
    "posted dispatch": lambda _: ["announced"],
    "posted cached dispatch": lambda _: ["offered"],
    "posted worst-case dispatch": lambda _: ["offered"],
    "posted combine": lambda _: ["ready"],
}
NAMES = {  # as errors and fault points name them
    "full dispatch": "dispatch",
    "staged dispatch": "dispatch",
    "pulled combine": "combine",
    "copied-in combine": "combine",
    "staged combine": "combine",
    "posted dispatch": "dispatch",
    "posted cached dispatch": "cached dispatch",
    "posted worst-case dispatch": "worst-case dispatch",
    "posted combine": "combine",
}


def name_of(operation: str) -> str:
    return NAMES.get(operation, operation)


# Calls with known results --------------------------------------------------------------------------------------------


@dataclass
class Given:
    """The input of a rank. Whole numbers: sums are exact in any order."""

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    num_experts: int
    is_token_in_rank: torch.Tensor

    @classmethod
    def of(cls, rank: int, num_ranks: int) -> Given:
        generator = torch.Generator().manual_seed(rank)
        num_experts = EXPERTS_PER_RANK * num_ranks
        num_topk = min(TOPK, num_experts)
        topk_idx = torch.rand(TOKENS, num_experts, generator=generator).topk(num_topk).indices
        return cls(
            torch.randint(-8, 8, (TOKENS, HIDDEN), generator=generator).float(),
            topk_idx,
            torch.ones(TOKENS, num_topk),
            num_experts,
            torch.stack([(topk_idx // EXPERTS_PER_RANK == rank).any(1) for rank in range(num_ranks)], 1),
        )


class Caller:
    """A rank that makes one kind of call over and over, and checks what comes of it.

    Construction makes calls 1 and 2 of the buffer, a dispatch and a combine.
    """

    def __init__(self, buffer: deep_ep.Buffer, operation: str, is_async: bool = False):
        self.buffer = buffer
        self.operation = operation
        self.is_async = is_async
        rank, num_ranks = buffer.rank, buffer.group_size
        everybody = [Given.of(source, num_ranks) for source in range(num_ranks)]
        self.given = everybody[rank]
        self.expected_rows = torch.cat([given.x[given.is_token_in_rank[:, rank]] for given in everybody])
        self.expected_sums = self.given.x * self.given.is_token_in_rank.sum(1, keepdim=True)
        self.recv_x, *_, self.handle, _ = self._dispatch()
        self._check_rows(self.recv_x)
        self._check_sums(buffer.combine(self.recv_x, self.handle)[0])

    def call(self) -> None:
        """Make the call, wait for it, check its result."""
        after = {"async_finish": self.is_async}
        if self.operation.endswith("combine"):
            rows = self.recv_x if self.operation != "copied-in combine" else self.recv_x.clone()
            sums, _, event = self.buffer.combine(rows, self.handle, **after)
            self._wait(event)
            self._check_sums(sums)
            return
        if self.operation.endswith("cached dispatch"):
            recv_x, *_, event = self.buffer.dispatch(self.given.x, handle=self.handle, **after)
        elif self.operation.endswith("worst-case dispatch"):
            recv_x, *_, event = self._dispatch(num_worst_tokens=TOKENS * self.buffer.group_size, **after)
        else:
            recv_x, *_, event = self._dispatch(**after)
        self._wait(event)
        self._check_rows(recv_x[: len(self.expected_rows)])

    def _dispatch(self, **more: Any) -> tuple:
        given = self.given
        layout = layout_of(self.buffer, given.topk_idx, given.num_experts)
        return self.buffer.dispatch(
            given.x,
            **layout,
            topk_idx=given.topk_idx,
            topk_weights=given.topk_weights,
            **more,
        )

    def _wait(self, event: deep_ep.EventOverlap) -> None:
        if self.is_async:
            event.current_stream_wait()

    def _check_rows(self, rows: torch.Tensor) -> None:
        assert torch.equal(rows, self.expected_rows)

    def _check_sums(self, sums: torch.Tensor) -> None:
        assert torch.equal(sums, self.expected_sums)


class Fault:
    """Counts the fault points that a rank passes, and does something at one of them."""

    def __init__(self, at: int, action: Callable[[], None]):
        self.points: list[str] = []
        self._at = at
        self._action = action

    def __call__(self, point: str) -> None:
        self.points.append(point)
        if len(self.points) == self._at + 1:
            self._action()


# Ranks that are forked -----------------------------------------------------------------------------------------------


class FolderComm:
    """An MPI-like communicator over files."""

    def __init__(self, folder: Path, rank: int, num_ranks: int):
        self._folder, self._rank, self._num_ranks, self._round = folder, rank, num_ranks, 0

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._num_ranks

    def allgather(self, value: Any) -> list[Any]:
        self._round += 1
        write(self._folder / f"{self._round}-{self._rank}", value)
        return [self._read(rank) for rank in range(self._num_ranks)]

    def _read(self, rank: int) -> Any:
        path = self._folder / f"{self._round}-{rank}"
        while not path.exists():
            time.sleep(5e-4)
        return pickle.loads(path.read_bytes())


def write(path: Path, value: Any) -> None:
    """So that a reader sees all of it, or no file."""
    fresh = path.with_name(f"{path.name}.fresh")
    fresh.write_bytes(pickle.dumps(value))
    fresh.rename(path)


@dataclass
class Ending:
    """How a forked rank ended: by a signal, or with a value."""

    killed_by: int | None
    value: Any
    num_stops: int


def run_forked(
    function: Callable[..., Any], num_ranks: int, folder: Path, *args: Any, stopped_secs: float = STOPPED_SECS
) -> list[Ending]:
    """Run `function(comm, folder, *args)` in forked processes. One that stops itself goes on after a while.

    Nothing of torch may have run in this process: a forked child has none of its threads.
    """
    pids = [_fork(function, FolderComm(folder, rank, num_ranks), folder, *args) for rank in range(num_ranks)]
    endings: list[Ending | None] = [None] * num_ranks
    num_stops = [0] * num_ranks
    deadline = time.monotonic() + 1.5 * LIMIT_SECS
    try:
        while None in endings and time.monotonic() < deadline:
            time.sleep(1e-3)
            for rank, pid in enumerate(pids):
                if endings[rank] is None:
                    endings[rank] = _look(pid, folder / f"answer-{rank}", num_stops, rank, stopped_secs)
    finally:
        for rank, pid in enumerate(pids):
            if endings[rank] is None:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
    return [ending or Ending(None, "it did not end", 0) for ending in endings]


def _fork(function: Callable[..., Any], comm: FolderComm, folder: Path, *args: Any) -> int:
    pid = os.fork()
    if pid:
        return pid
    torch.set_num_threads(1)
    try:
        answer = function(comm, folder, *args)
    except BaseException:
        answer = traceback.format_exc()
    finally:
        write(folder / f"answer-{comm.Get_rank()}", answer)
        os._exit(0)


def _look(pid: int, answer: Path, num_stops: list[int], rank: int, stopped_secs: float) -> Ending | None:
    found, status = os.waitpid(pid, os.WNOHANG | os.WUNTRACED)
    if not found:
        return None
    if os.WIFSTOPPED(status):
        num_stops[rank] += 1
        time.sleep(stopped_secs)
        os.kill(pid, signal.SIGCONT)
        return None
    killed_by = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    value = pickle.loads(answer.read_bytes()) if answer.exists() else None
    return Ending(killed_by, value, num_stops[rank])


def set_limits(operation: str, num_ranks: int) -> None:
    """Have the buffers that are made from now on take the operation's path."""
    os.environ["DEEP_EP_ARENA_BYTES"] = str(STAGED_BYTES_PER_RANK * num_ranks * operation.startswith("staged"))
    os.environ["DEEP_EP_POSTED_BYTES"] = str(POSTED_BYTES * operation.startswith("posted"))


@contextmanager
def folder_of(operation: str, num_ranks: int) -> Iterator[Path]:
    """A folder to meet in, while the arena is as the operation needs it."""
    set_limits(operation, num_ranks)
    folder = Path(tempfile.mkdtemp(prefix="kill_plans-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder)


# Which points there are ----------------------------------------------------------------------------------------------


def record(comm: FolderComm, folder: Path, operation: str) -> tuple[list[str], int]:
    """The points of a call, and its rounds."""
    buffer = deep_ep.Buffer(None, comm=comm, explicitly_destroy=True, num_cpu_timeout_secs=LIMIT_SECS)
    caller = Caller(buffer, operation)
    before = buffer.stats()["rounds"]
    fault = Fault(-1, lambda: None)
    buffer.set_fault_hook(fault)
    caller.call()
    rounds = buffer.stats()["rounds"] - before
    buffer.destroy()
    return fault.points, rounds


def find_points(operation: str, num_ranks: int) -> list[str]:
    """Make the call once without a fault. All ranks pass the same points, and they are those of the protocol."""
    with folder_of(operation, num_ranks) as folder:
        endings = run_forked(record, num_ranks, folder, operation)
    points, rounds = endings[0].value
    assert all(ending.value == (points, rounds) for ending in endings), endings
    assert (rounds > 1) == operation.startswith("staged"), f"{rounds} rounds"
    name = name_of(operation)
    expected = [f"{name}: {side} {step}" for step in STEPS[operation](rounds) for side in ("before", "after")]
    # A combine whose rows lie ready signals that twice: with its offer, and in the first round.
    once = [pair for index, pair in enumerate(pairs(points)) if pair not in pairs(points)[index - 1 : index]]
    assert [point for pair in once for point in pair] == expected
    return points


def pairs(points: list[str]) -> list[tuple[str, str]]:
    return [pair for index, pair in enumerate(pairwise(points)) if index % 2 == 0]


def find_all_points(rank: int, num_ranks: int, size: int) -> dict[str, list[str]]:
    return {operation: find_points(operation, size) for operation in STEPS}


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
def test_the_fault_points_are_the_steps_of_the_protocol(device: str, num_ranks: int) -> None:
    (found,) = run_ranks(find_all_points, 1, num_ranks)
    assert found.keys() == STEPS.keys()


# Killed at a point ---------------------------------------------------------------------------------------------------


@dataclass
class Account:
    """What a survivor saw.

    Attributes:
        attempt: The call that raised: 0 that of the kill, 1 the next; 2: none did.
        kind: Of the error.
        text: Its message.
        time: When it was raised.
        afterwards: Errors of the calls after it: on the failed buffer, on the destroyed one.
    """

    attempt: int = 2
    kind: str = "none"
    text: str = ""
    time: float = 0.0
    afterwards: list[tuple[str, str]] = field(default_factory=list)


def error_of(work: Callable[[], Any]) -> tuple[str, str]:
    try:
        work()
    except deep_ep.EPError as error:
        return type(error).__name__, str(error)
    return "none", ""


def die_at(comm: FolderComm, folder: Path, operation: str, victim: int, at: int, is_async: bool) -> Account:
    """The victim kills itself at a point; the others see what comes of it, at the latest in the next call."""
    buffer = deep_ep.Buffer(None, comm=comm, explicitly_destroy=True, num_cpu_timeout_secs=LIMIT_SECS)
    caller = Caller(buffer, operation, is_async)

    def die() -> None:
        write(folder / "killed", time.monotonic())
        os.kill(os.getpid(), signal.SIGKILL)

    if comm.Get_rank() == victim:
        buffer.set_fault_hook(Fault(at, die))
    comm.allgather(None)  # who is still in the call before would hear of the failure there
    account = Account()
    for attempt in range(2):
        kind, text = error_of(caller.call)
        if kind != "none":
            account = Account(attempt, kind, text, time.monotonic())
            break
    account.afterwards.append(error_of(caller.call))
    buffer.destroy()
    buffer.destroy()
    account.afterwards.append(error_of(caller.call))
    return account


def verdict(endings: list[Ending], operation: str, victim: int, is_last: bool, killed_at: float) -> list[str]:
    """What is wrong with the endings of a plan."""
    wrong = []
    if endings[victim].killed_by != signal.SIGKILL:
        wrong.append(f"the victim was not killed: {endings[victim]}")
    for rank, ending in enumerate(endings):
        if rank == victim:
            continue
        seen = ending.value
        if not isinstance(seen, Account):
            wrong.append(f"rank {rank}: {ending}")
            continue
        # A victim that had done its part is missed only in the next call. A peer that is already there may then pull
        # the others out of the call before.
        if seen.attempt > is_last:
            wrong.append(f"rank {rank}: raised too late, or not at all: {seen}")
            continue
        where = {f"{name_of(operation)} (call {call}): the process of rank {victim} has ended" for call in (3, 4)}
        if not any(text in seen.text for text in where) or seen.kind not in ("EPError", "EPPeerFailed"):
            wrong.append(f"rank {rank}: {seen.kind}: {seen.text}")
        if seen.time - killed_at > NOTICED_SECS:
            wrong.append(f"rank {rank}: noticed after {seen.time - killed_at:.1f} s")
        (kind, text), (destroyed_kind, destroyed_text) = seen.afterwards
        if kind != "EPClosed" or f"process of rank {victim} has ended" not in text:
            wrong.append(f"rank {rank}: a failed buffer says {kind}: {text}")
        if destroyed_kind != "EPClosed" or "was destroyed" not in destroyed_text:
            wrong.append(f"rank {rank}: a destroyed buffer says {destroyed_kind}: {destroyed_text}")
    return wrong


def run_plans(
    rank: int, num_ranks: int, operation: str, size: int, victims: list[int], is_async: bool
) -> tuple[int, list[str], list[float]]:
    """Every victim at every point. Returns the number of plans, what went wrong, and how long noticing took."""
    points = find_points(operation, size)
    wrong, delays = [], []
    for victim in victims:
        for at, point in enumerate(points):
            with folder_of(operation, size) as folder:
                endings = run_forked(die_at, size, folder, operation, victim, at, is_async)
                killed = folder / "killed"
                killed_at = pickle.loads(killed.read_bytes()) if killed.exists() else 0.0
            is_last = at == len(points) - 1
            for text in verdict(endings, operation, victim, is_last, killed_at):
                wrong.append(f"{operation}, rank {victim}/{size} killed at point {at} ({point}): {text}")
            delays += [ending.value.time - killed_at for ending in endings if isinstance(ending.value, Account)]
    return len(points) * len(victims), wrong, delays


STAGED = ("staged dispatch", "staged combine")  # they have the most points
PLANS = [
    # operation, ranks, victims, is_async
    ("pulled combine", 2, [0, 1], False),
    *[(operation, 3, [0, 1, 2], False) for operation in STEPS if operation not in STAGED],
    *[(operation, 3, [1], False) for operation in STAGED],
    ("worst-case dispatch", 4, [3], False),
    ("posted dispatch", 4, [0, 3], False),
    *[(operation, 3, [1], True) for operation in ("full dispatch", "cached dispatch", "pulled combine")],
    *[(operation, 3, [1], True) for operation in ("posted dispatch", "posted cached dispatch", "posted combine")],
]
MORE_PLANS = [
    *[(operation, 2, [0, 1], False) for operation in ("full dispatch", "staged dispatch")],
    *[(operation, 3, [0, 2], False) for operation in STAGED],
    *[(operation, 4, [0, 3], False) for operation in ("full dispatch", "cached dispatch", "pulled combine")],
    *[(operation, 4, [3], False) for operation in STAGED],
    ("posted combine", 4, [0, 3], False),
]
PLANS += [pytest.param(*plan, marks=pytest.mark.exhaustive) for plan in MORE_PLANS]


@pytest.mark.parametrize(("operation", "num_ranks", "victims", "is_async"), PLANS)
def test_a_rank_killed_at_any_point_is_named_by_all_others(
    device: str, operation: str, num_ranks: int, victims: list[int], is_async: bool
) -> None:
    ((num_plans, wrong, delays),) = run_ranks(run_plans, 1, operation, num_ranks, victims, is_async)
    assert not wrong, "\n".join(wrong)
    assert len(delays) == num_plans * (num_ranks - 1)
    assert statistics.median(delays) < USUALLY_NOTICED_SECS, f"a dead rank must be named within a second: {delays}"


# Stopped at a point --------------------------------------------------------------------------------------------------


def stop_at_each(comm: FolderComm, folder: Path, operation: str, num_points: int) -> list[str]:
    """In call k rank k modulo R stops at point k; somebody lets it go on. Results are checked by the caller."""
    buffer = deep_ep.Buffer(None, comm=comm, explicitly_destroy=True, num_cpu_timeout_secs=LIMIT_SECS)
    caller = Caller(buffer, operation)
    stopped_at = []
    for at in range(num_points):
        is_mine = at % comm.Get_size() == comm.Get_rank()
        fault = Fault(at if is_mine else -1, lambda: os.kill(os.getpid(), signal.SIGSTOP))
        buffer.set_fault_hook(fault)
        caller.call()
        if is_mine:
            stopped_at.append(fault.points[at])
    buffer.destroy()
    return stopped_at


def run_stops(rank: int, num_ranks: int, operation: str, size: int) -> tuple[list[str], list[Ending]]:
    points = find_points(operation, size)
    with folder_of(operation, size) as folder:
        return points, run_forked(stop_at_each, size, folder, operation, len(points))


@pytest.mark.parametrize("operation", STEPS)
def test_a_rank_stopped_at_any_point_delays_the_call_and_nothing_else(device: str, operation: str) -> None:
    size = 3
    ((points, endings),) = run_ranks(run_stops, 1, operation, size)
    for rank, ending in enumerate(endings):
        assert ending.value == points[rank::size]
        assert ending.num_stops == len(points[rank::size]), "it never stopped"


# Silent, or gone by an exception -------------------------------------------------------------------------------------

SHORT_LIMIT_SECS = 0.5


def silent(rank: int, num_ranks: int) -> dict[str, tuple[str, str, float]]:
    """Rank 1 does not make the call, of each operation in turn."""
    seen = {}
    for operation in STEPS:
        set_limits(operation, num_ranks)
        buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True, num_cpu_timeout_secs=LIMIT_SECS)
        caller = Caller(buffer, operation)
        dist.barrier()
        buffer._engine.window.limit_secs = SHORT_LIMIT_SECS
        begin = time.monotonic()
        if rank != 1:
            kind, text = error_of(caller.call)
            seen[operation] = (kind, text, time.monotonic() - begin)
        dist.barrier()
        buffer.destroy()
    return seen


@pytest.mark.alone
def test_a_silent_rank_is_named_at_the_limit_with_operation_and_call(device: str) -> None:
    results = run_ranks(silent, 3)
    for rank in (0, 2):
        assert results[rank].keys() == STEPS.keys()
        for operation, (kind, text, secs) in results[rank].items():
            assert kind in ("EPTimeout", "EPPeerFailed"), text
            assert f"{name_of(operation)} (call 3): no signal from rank 1 after {SHORT_LIMIT_SECS:g} s" in text
            assert 0.8 * SHORT_LIMIT_SECS < secs < NOTICED_SECS


def stop_for_long(comm: FolderComm, folder: Path, operation: str) -> tuple[str, str]:
    buffer = deep_ep.Buffer(None, comm=comm, explicitly_destroy=True, num_cpu_timeout_secs=LIMIT_SECS)
    caller = Caller(buffer, operation)
    buffer._engine.window.limit_secs = SHORT_LIMIT_SECS
    if comm.Get_rank() == 1:
        # Before its second signal: a call of any kind has at least two, and peers wait for it.
        buffer.set_fault_hook(Fault(2, lambda: os.kill(os.getpid(), signal.SIGSTOP)))
    comm.allgather(None)
    error = error_of(caller.call)
    buffer.destroy()
    return error


def run_stop_for_long(rank: int, num_ranks: int, operation: str) -> list[Ending]:
    with folder_of(operation, 3) as folder:
        return run_forked(stop_for_long, 3, folder, operation, stopped_secs=4 * SHORT_LIMIT_SECS)


@pytest.mark.parametrize("operation", ["full dispatch", "pulled combine"])
@pytest.mark.alone
def test_a_rank_stopped_past_the_limit_is_named_and_learns_it(device: str, operation: str) -> None:
    (endings,) = run_ranks(run_stop_for_long, 1, operation)
    assert endings[1].num_stops == 1
    for rank, ending in enumerate(endings):
        kind, text = ending.value
        assert kind in ("EPTimeout", "EPPeerFailed"), ending
        assert f"{name_of(operation)} (call 3): no signal from rank 1 after {SHORT_LIMIT_SECS:g} s" in text
        assert rank != 1 or kind == "EPPeerFailed"


def leave(comm: FolderComm, folder: Path, how: str) -> tuple[str, str]:
    buffer = deep_ep.Buffer(None, comm=comm, num_cpu_timeout_secs=LIMIT_SECS)
    caller = Caller(buffer, "pulled combine")
    comm.allgather(None)
    if comm.Get_rank() != 1:
        return error_of(caller.call)
    try:
        raise RuntimeError("the model is broken")
    finally:
        if how == "the interpreter ends":
            atexit._run_exitfuncs()


def run_leave(rank: int, num_ranks: int, how: str) -> tuple[list[Ending], float]:
    begin = time.monotonic()
    with folder_of("pulled combine", 3) as folder:
        return run_forked(leave, 3, folder, how), time.monotonic() - begin


@pytest.mark.parametrize("how", ["the interpreter ends", "the process just ends"])
def test_a_rank_that_left_by_an_exception_is_named(device: str, how: str) -> None:
    ((endings, secs),) = run_ranks(run_leave, 1, how)
    assert "the model is broken" in endings[1].value
    for rank in (0, 2):
        kind, text = endings[rank].value
        assert kind in ("EPError", "EPPeerFailed")
        assert "combine (call 3)" in text
        assert "the process of rank 1 has ended" in text or "rank 1 has destroyed its buffer" in text
    assert secs < NOTICED_SECS


# Survivors go on -----------------------------------------------------------------------------------------------------


def go_on(rank: int, num_ranks: int, victim: int, at: int) -> tuple[str, str]:
    set_limits("pulled combine", num_ranks)
    survivors = [other for other in range(num_ranks) if other != victim]
    group = dist.new_group(survivors)
    buffer = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True, num_cpu_timeout_secs=LIMIT_SECS)
    caller = Caller(buffer, "pulled combine")
    if rank == victim:
        buffer.set_fault_hook(Fault(at, lambda: os.kill(os.getpid(), signal.SIGKILL)))
    dist.barrier()
    error = error_of(caller.call)
    expected = caller.recv_x.clone()
    buffer.destroy()
    smaller = deep_ep.Buffer(group, explicitly_destroy=True, num_cpu_timeout_secs=LIMIT_SECS)
    for operation in STEPS:
        if not operation.startswith("staged"):
            Caller(smaller, operation).call()
    assert torch.equal(caller.recv_x, expected), "what was received before is still there"
    assert smaller.group_size == num_ranks - 1
    smaller.destroy()
    return error


@pytest.mark.parametrize(("num_ranks", "victim"), [(2, 1), (3, 0), (4, 2)])
def test_survivors_make_a_new_buffer_and_go_on(device: str, num_ranks: int, victim: int) -> None:
    results = run_ranks(go_on, num_ranks, victim, 2, may_die=[victim], limit_secs=50)
    for rank in set(range(num_ranks)) - {victim}:
        kind, text = results[rank]
        assert kind in ("EPError", "EPPeerFailed")
        assert f"the process of rank {victim} has ended" in text
