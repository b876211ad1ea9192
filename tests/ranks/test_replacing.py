"""New processes that take the positions of ranks that have ended: `Buffer.join` and `buffer.replace`.

The processes beyond the last rank are the new ones: they wait until they are needed. All meet over a store in a file;
the process group that `run_ranks` makes is not used, except to make the buffer of generation 0 in the first test.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from low_latency import SMALL, Round

import deep_ep
from common import error_of, run_ranks
from deep_ep import generation
from deep_ep.kernels import _triton

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.cpu_only]

LIMIT_SECS = 60.0  # of what succeeds
INTERPRETED = {"DEEP_EP_TRANSPORT": "interpreted", "DEEP_EP_DEVICE": "cpu"}
interpreted = pytest.mark.skipif(
    not _triton.INTERPRETED, reason="Triton is not there, or not in its interpreter's mode"
)


class Signs:
    """Signs that processes leave for each other, in the store that they meet over."""

    def __init__(self, path: str):
        self.store = dist.FileStore(path)

    def leave(self, name: str) -> None:
        self.store.set(f"sign/{name}", "1")

    def wait(self, *names: str) -> None:
        self.until(lambda: self.store.check([f"sign/{name}" for name in names]), names)

    def until(self, is_so: Callable[[], bool], what: object) -> None:
        deadline = time.monotonic() + LIMIT_SECS
        while not is_so():
            assert time.monotonic() < deadline, f"no {what}"
            time.sleep(0.01)

    def wait_for_joining(self, *ranks: int) -> None:
        self.until(lambda: set(ranks) <= set(deep_ep.Buffer.get_joining_ranks(self.store)), f"joining {ranks}")


def arguments(num_ranks: int, **more: Any) -> dict[str, Any]:
    hint = deep_ep.Buffer.get_low_latency_rdma_size_hint(
        SMALL.max_tokens, SMALL.hidden, num_ranks, SMALL.experts_per_rank * num_ranks
    )
    usual = {
        "num_nvl_bytes": 1 << 20,
        "num_rdma_bytes": hint,
        "low_latency_mode": True,
        "explicitly_destroy": True,
        "enable_shrink": True,
        "num_cpu_timeout_secs": LIMIT_SECS,
        # Kernels do not see that a process has ended. On a GPU they are compiled in the first calls.
        "num_gpu_timeout_secs": 10.0 if torch.ones(1).is_cuda else 1.5,
    }
    return {**usual, **more}


def join(signs: Signs, rank: int, num_ranks: int, timeout_secs: float = LIMIT_SECS, **more: Any) -> deep_ep.Buffer:
    given = arguments(num_ranks, **more)
    return deep_ep.Buffer.join(signs.store, rank, num_ranks, timeout_secs=timeout_secs, **given)


def normal_calls(buffer: deep_ep.Buffer) -> tuple[torch.Tensor, tuple]:
    """A dispatch and a combine. Returns what was received, and the handle."""
    num_experts = 2 * buffer.group_size
    x = torch.arange(10 * 16).view(10, 16).float() + 1000 * buffer.rank
    topk_idx = torch.arange(20).view(10, 2) % num_experts
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    layout = {"num_tokens_per_rank": per_rank, "num_tokens_per_rdma_rank": per_node, "is_token_in_rank": mask}
    received, _, _, _, handle, _ = buffer.dispatch(
        x, **layout, num_tokens_per_expert=per_expert, topk_idx=topk_idx, topk_weights=torch.ones(10, 2)
    )
    combined, _, _ = buffer.combine(received, handle)
    assert torch.equal(combined, x * mask.sum(1, keepdim=True))
    return received, handle


def killed_and_replaced(
    process: int, num_processes: int, path: str, killed: list[int], has_normal_mode: bool
) -> list[str]:
    warnings.simplefilter("ignore", RuntimeWarning)
    signs, num_ranks = Signs(path), num_processes - len(killed)
    group, deaths = dist.new_group(list(range(num_ranks))), [f"killed {rank}" for rank in killed]
    if process >= num_ranks:
        signs.wait(*deaths)
        buffer = join(signs, killed[process - num_ranks], num_ranks)
    else:
        buffer = deep_ep.Buffer(group, **arguments(num_ranks))
        assert Round(buffer, 0).go() == []
        received, _ = normal_calls(buffer) if has_normal_mode else (torch.zeros(1), ())
        before = received.clone()
        if process in killed:
            signs.leave(f"killed {process}")
            os.kill(os.getpid(), signal.SIGKILL)
        signs.wait(*deaths)
        assert Round(buffer, 1).go() == killed  # with masks, without the ranks that have ended
        got = Round(buffer, 2).dispatch(return_recv_hook=True)
        signs.wait_for_joining(*killed)
        buffer.replace(signs.store)
        assert torch.equal(received, before)
        error = error_of(got[4])
        assert error[0] == "EPClosed", error
        assert "generation 1" in error[1]
        assert buffer.group is None
    assert buffer.generation == 1
    for seed in (3, 4):
        assert Round(buffer, seed).go() == []
    if has_normal_mode:
        normal_calls(buffer)
    files = len(os.listdir("/proc/self/fd"))
    points: list[str] = []
    buffer.set_fault_hook(points.append)
    for number in (2, 3, 4):  # without a new process, too
        buffer.replace(signs.store)
        assert buffer.generation == number
        points.clear()
        assert Round(buffer, number).go() == []
        assert points or not has_normal_mode, "hooks are of the buffer, not of a generation"
    signs.until(lambda: len(os.listdir("/proc/self/fd")) <= files, f"end of what {files} descriptors were")
    buffer.destroy()
    return [thread.name for thread in threading.enumerate() if "generation" in thread.name]


@pytest.mark.parametrize(
    ("num_ranks", "killed", "env"),
    [
        (3, [1], {}),
        (4, [1, 2], {"DEEP_EP_RANKS_PER_NODE": "2"}),
        pytest.param(2, [1], INTERPRETED, marks=interpreted),
    ],
    ids=["one node", "two nodes", "kernels"],
)
def test_new_processes_take_the_positions_of_killed_ranks(
    num_ranks: int, killed: list[int], env: dict[str, str], tmp_path: Path
) -> None:
    arguments = (str(tmp_path / "store"), killed, not env.get("DEEP_EP_TRANSPORT"))
    results = run_ranks(killed_and_replaced, num_ranks + len(killed), *arguments, may_die=killed, env=env)
    assert all(threads == [] for threads in results if threads is not None), results


def failing_attempts(process: int, num_processes: int, path: str) -> list[tuple[str, str]]:
    """Rank 2 is killed, and attempts to replace it fail in every way, until one succeeds.

    Processes 3 to 6 are new ones, for rank 2.
    """
    warnings.simplefilter("ignore", RuntimeWarning)
    generation._SILENT_SECS = 1.0
    signs, num_ranks = Signs(path), 3
    errors = []

    def attempt(name: str, timeout_secs: float = LIMIT_SECS) -> None:
        errors.append((name, *error_of(buffer.replace, signs.store, timeout_secs=timeout_secs))[1:])
        assert Round(buffer, 10 + len(errors)).go() == [2]  # the generation before goes on
        signs.leave(f"{name} {process}")

    if process < num_ranks:
        buffer = join(signs, process, num_ranks, num_cpu_timeout_secs=5.0)
        assert Round(buffer, 0).go() == []
        if process == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        assert Round(buffer, 1).go() == [2]
        attempt("nobody", 0.5)
        signs.wait_for_joining(2)
        attempt("dies")
        signs.wait_for_joining(2)
        attempt("other sizes")
        signs.wait_for_joining(2)
        signs.leave(f"seen {process}")
        signs.wait("seen 0", "seen 1")
        attempt("other number", 0.5)
        signs.wait_for_joining(2)
        if process == 0:  # rank 1 does not call it this time
            errors.append(error_of(buffer.replace, signs.store, timeout_secs=0.5))
            signs.leave("alone")
        else:
            signs.wait("alone")
            errors.append(("none", ""))
        assert Round(buffer, 20).go() == [2]
        signs.leave(f"alone {process}")
        signs.wait_for_joining(2)
        buffer.replace(signs.store)
    elif process == 3:
        signs.wait("nobody 0", "nobody 1")
        generation.Generation.exchange = die  # type: ignore[method-assign]
        join(signs, 2, num_ranks)
    elif process == 4:
        signs.wait("dies 0", "dies 1")
        errors.append(error_of(join, signs, 2, num_ranks, num_rdma_bytes=4096))
        signs.wait("other sizes 0", "other sizes 1")
        errors.append(error_of(join, signs, 2, num_ranks + 1))
        signs.leave("wrong")
        return errors
    elif process == 5:
        signs.wait("wrong", "other number 0", "other number 1")
        errors.append(error_of(join, signs, 2, num_ranks))
        signs.wait("alone 0", "alone 1")
        signs.leave("last")
        buffer = join(signs, 2, num_ranks)
    else:  # a second one for the same rank
        signs.wait("last")
        signs.wait_for_joining(2)
        return [error_of(join, signs, 2, num_ranks)]
    assert Round(buffer, 30).go() == []
    errors.append(("generation", str(buffer.generation)))
    buffer.destroy()
    return errors


def die(*_: Any) -> None:
    time.sleep(0.5)  # a beat or two
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_failed_attempt_names_who_is_missing_and_can_be_repeated(tmp_path: Path) -> None:
    results = run_ranks(failing_attempts, 7, str(tmp_path / "store"), may_die=[2, 3])
    first, second, _, _, wrong, last, twice = results
    for rank, survivor in enumerate((first, second)):
        nobody, died, sizes, number, alone, end = survivor
        assert nobody[0] == "EPTimeout", nobody
        assert "no word from rank 2" in nobody[1]
        assert died[0] == "EPTransportError", died
        assert "rank 2 showed no sign of life" in died[1]
        assert sizes[0] == "EPError", sizes
        assert "`num_rdma_bytes` must be the same on all ranks, it is 4096 on rank 2" in sizes[1]
        assert number[0] in ("EPError", "EPTransportError", "EPTimeout"), number  # the later one finds nobody
        if rank == 0:
            assert alone[0] == "EPTimeout", alone
            assert "no word from rank 1" in alone[1]
        assert end == last[-1]
    assert any("is of 4 ranks, rank" in survivor[3][1] for survivor in (first, second)), (first, second)
    assert "4096 on rank 2" in wrong[0][1], wrong
    assert wrong[1][0] in ("EPError", "EPTransportError"), wrong
    assert last[0][0] == "EPTimeout", last
    assert "no word from rank 1" in last[0][1]
    assert twice[0][0] == "EPError", twice
    assert "has been taken: process" in twice[0][1]


def interrupted_at_the_end(rank: int, num_ranks: int, path: str, before: bool) -> list[str]:
    """Ctrl-C on rank 0 when the generation is made, before or after it uses that. Then all call `replace` again."""
    signs = Signs(path)
    buffer: Any = join(signs, rank, num_ranks)
    assert Round(buffer, 0).go() == []
    files, install = len(os.listdir("/proc/self/fd")), buffer._install

    def interrupt(made: Any) -> None:
        buffer._install = install
        if not before:
            install(made)
        raise KeyboardInterrupt

    results = []
    if rank == 0:
        buffer._install = interrupt
    for _ in range(2):
        try:
            buffer.replace(signs.store)
            results.append("replaced")
        except KeyboardInterrupt:
            results.append("interrupted")
        dist.barrier()
    assert Round(buffer, 1).go() == []
    signs.until(lambda: len(os.listdir("/proc/self/fd")) <= files, f"end of what {files} descriptors were")
    dist.barrier()
    buffer.destroy()
    return results


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_is_interrupted_at_the_end_can_repeat(tmp_path: Path, before: bool) -> None:
    path = str(tmp_path / "store")
    assert run_ranks(interrupted_at_the_end, 2, path, before) == [["interrupted", "replaced"], ["replaced"] * 2]


def joins_and_is_killed(process: int, num_processes: int, path: str) -> list[int]:
    signs = Signs(path)
    if process == 1:
        signs.store.set("pid", str(os.getpid()))
        join(signs, 1, 2)
    signs.wait_for_joining(1)
    os.kill(int(signs.store.get("pid")), signal.SIGKILL)
    signs.until(lambda: not deep_ep.Buffer.get_joining_ranks(signs.store), "end of rank 1")
    return deep_ep.Buffer.get_joining_ranks(signs.store)


def test_a_process_that_has_ended_is_not_joining(tmp_path: Path) -> None:
    assert run_ranks(joins_and_is_killed, 2, str(tmp_path / "store"), may_die=[1])[0] == []


def stopped_and_replaced(process: int, num_processes: int, path: str) -> list[tuple[str, str]]:
    """Rank 1 is stopped, taken for ended and replaced. Then it continues."""
    warnings.simplefilter("ignore", RuntimeWarning)
    signs, num_ranks = Signs(path), 2
    if process == 2:
        signs.wait("masked")
        buffer = join(signs, 1, num_ranks)
    else:
        buffer = join(signs, process, num_ranks, num_cpu_timeout_secs=1.0 if process == 0 else LIMIT_SECS)
        assert Round(buffer, 0).go() == []
        if process == 1:
            signs.store.set("pid", str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
            return [error_of(Round(buffer, 1).go), error_of(buffer.replace, signs.store)]
        signs.wait()
        assert Round(buffer, 1).go() == [1]
        signs.leave("masked")
        buffer.replace(signs.store, timeout_secs=LIMIT_SECS)
        os.kill(int(signs.store.get("pid")), signal.SIGCONT)
    assert Round(buffer, 2).go() == []
    buffer.destroy()
    return []


def test_a_process_that_was_replaced_learns_it(tmp_path: Path) -> None:
    _, zombie, _ = run_ranks(stopped_and_replaced, 3, str(tmp_path / "store"))
    (kind, text), (again, reason) = zombie
    assert kind == "EPPeerFailed", zombie
    assert "has gone on in generation 2 of the buffer" in text
    assert again == "EPClosed", zombie
    assert "generation 2 of the buffer was made without this process" in reason


def revived(process: int, num_processes: int, path: str) -> str:
    """A buffer of normal mode fails, since a rank leaves it, and is made anew by the same processes."""
    signs = Signs(path)
    buffer = join(signs, process, num_processes, low_latency_mode=False, enable_shrink=False)
    received, handle = normal_calls(buffer)
    if process == 0:
        with pytest.raises(ValueError, match="tokens"):
            buffer.dispatch(torch.zeros(3, 16), handle)
    error = error_of(buffer.combine, received, handle) if process else ("", "")
    signs.leave(f"failed {process}")
    signs.wait("failed 0", "failed 1")
    buffer.replace(signs.store)
    normal_calls(buffer)
    buffer.destroy()
    return error[0]


def test_a_failed_buffer_is_revived(tmp_path: Path) -> None:
    assert run_ranks(revived, 2, str(tmp_path / "store"))[1] == "EPPeerFailed"


def nodes_are_refused(process: int, num_processes: int, path: str) -> tuple[str, str]:
    """GPU ranks, each a node of its own."""
    return error_of(join, Signs(path), process, num_processes)


def store_that_ends(process: int, num_processes: int, path: str) -> tuple[str, str]:
    """Process 2 hosts the store, and ends while rank 0 waits in `replace`."""
    signs = Signs(path)
    if process == 2:
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        signs.store.set("port", str(host.port))
        signs.wait("waits")
        os.kill(os.getpid(), signal.SIGKILL)
    store = dist.TCPStore("127.0.0.1", int(signs.store.get("port")), is_master=False)
    buffer = deep_ep.Buffer.join(store, process, 2, **arguments(2))
    error = ("", "")
    if process == 0:
        error = error_of(buffer.replace, store)
        signs.leave("raised")
    else:
        signs.until(lambda: deep_ep.Buffer.get_joining_ranks(store) == [0], "rank 0 in replace")
        signs.leave("waits")
        signs.wait("raised")
    assert buffer.generation == 1
    assert Round(buffer, 0).go() == []
    buffer.destroy()
    return error


def test_a_store_that_ends_in_the_middle_is_named(tmp_path: Path) -> None:
    kind, text = run_ranks(store_that_ends, 3, str(tmp_path / "store"), may_die=[2])[0]
    assert kind == "EPTransportError"
    assert "the store does not work" in text
    assert "let a process host it that is no rank" in text


def lonely(process: int, num_processes: int, path: str) -> list[tuple[str, str]]:
    """What is wrong with the arguments alone, and a store whose host has ended."""
    signs = Signs(path)
    given = arguments(1)
    with deep_ep.Buffer.join(signs.store, 0, 1, **given) as buffer:
        buffer.replace(signs.store)
        errors = [
            error_of(deep_ep.Buffer.join, signs.store, 1, 1, **given),
            error_of(deep_ep.Buffer.join, signs.store, 0, 1, group=None, **given),
            error_of(deep_ep.Buffer.join, {}, 0, 1, **given),
            error_of(buffer.replace, signs.store, timeout_secs=-1),
            error_of(deep_ep.Buffer.join, signs.store, 0, 2, timeout_secs=0.2, **arguments(2)),
        ]
        host = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        guest = dist.TCPStore("127.0.0.1", host.port, is_master=False)
        del host
        errors.append(error_of(buffer.replace, guest))
        assert buffer.generation == 2
    return errors


def test_wrong_arguments_and_a_store_that_is_gone(tmp_path: Path) -> None:
    [errors] = run_ranks(lonely, 1, str(tmp_path / "store"))
    kinds = [kind for kind, _ in errors]
    arguments = ["ValueError", "TypeError", "TypeError", "ValueError"]
    assert kinds == [*arguments, "EPTimeout", "EPTransportError"], errors
    for text, part in zip(
        [text for _, text in errors],
        ["`rank` must be below", "`group`", "`store` must be", "`timeout_secs`", "rank 1", "store"],
        strict=True,
    ):
        assert part in text
