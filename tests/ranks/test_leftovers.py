"""Nothing stays behind: no file, memory, process or thread, however ranks end; and no more memory than is needed."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import json
import multiprocessing
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

import deep_ep
from common import layout_of
from deep_ep.launch import RankFailed, run_ranks
from deep_ep.transport import memory

pytestmark = pytest.mark.cpu_only

MEMFD = "/memfd:deep_ep"
MIB = 1 << 20


def make_buffer(num_nvl_bytes: int = 0, **more: Any) -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, num_nvl_bytes, explicitly_destroy=True, **more)


def dispatch(buffer: deep_ep.Buffer, tokens: int = 32, hidden: int = 64, **more: Any) -> tuple:
    """Rank-constant rows; every token goes to every rank."""
    num_ranks = buffer.group_size
    topk_idx = torch.arange(num_ranks).repeat(tokens, 1)
    layout = layout_of(buffer, topk_idx, num_ranks)
    return buffer.dispatch(
        torch.full((tokens, hidden), float(buffer.rank + 1)),
        **layout,
        **more,
    )


def check_rows(recv_x: torch.Tensor, handle: tuple, rank: int) -> None:
    ends = [0, *handle[0][:, rank].tolist()]
    assert recv_x.size(0) == ends[-1] > 0
    for source, (begin, end) in enumerate(pairwise(ends)):
        assert bool((recv_x[begin:end] == source + 1).all())


def round_trip(buffer: deep_ep.Buffer) -> None:
    recv_x, _, _, _, handle, _ = dispatch(buffer)
    check_rows(recv_x, handle, buffer.rank)
    combined, _, _ = buffer.combine(recv_x, handle)
    assert bool((combined == buffer.group_size * (buffer.rank + 1)).all())


def error_of(work: Callable[..., Any], *args: Any, **more: Any) -> tuple[str, str]:
    try:
        work(*args, **more)
    except deep_ep.EPError as error:
        return f"EPError:{type(error).__name__}", str(error)
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


# What a process holds ------------------------------------------------------------------------------------------------


def open_memory(pid: int | str = "self") -> dict[str, int]:
    """Descriptors of a process that are memory of ours, and their inodes."""
    found = {}
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/{pid}/fd/{fd}").startswith(MEMFD):
                found[fd] = os.stat(f"/proc/{pid}/fd/{fd}").st_ino
    return found


def mapped_memory(pid: int | str = "self", kinds: str = "sp") -> list[tuple[str, int]]:
    """Mappings of a process that are memory of ours, shared (s) or private (p): addresses and inode."""
    lines = [line.split() for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if MEMFD in line]
    return [(fields[0], int(fields[4])) for fields in lines if fields[1][3] in kinds]


def holders(inodes: set[int]) -> list[str]:
    """Processes of this machine that hold any of this memory."""
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):
            held = {*open_memory(pid).values(), *(inode for _, inode in mapped_memory(pid))}
            if held & inodes:
                found.append(pid)
    return found


def threads_of_ours() -> list[str]:
    """Threads of buffers. The reaper is one of the process."""
    names = [thread.name for thread in threading.enumerate()]
    return [name for name in names if name.startswith("deep_ep") and name != "deep_ep-reaper"]


def children(pid: int | str = "self") -> set[str]:
    """Children of all threads. Where one ends meanwhile, its children are another's: all are asked again."""
    for _ in range(100):
        found: set[str] = set()
        try:
            for task in Path(f"/proc/{pid}/task").iterdir():
                found.update((task / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            if not Path(f"/proc/{pid}").exists():
                raise
            continue
        return found
    raise AssertionError(f"the threads of process {pid} do not settle")


def eventually(condition: Callable[[], bool], secs: float = 10.0) -> bool:
    deadline = time.monotonic() + secs
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.01)
    return condition()


def note_down(folder: str, rank: int) -> None:
    """Leave word of the memory that this rank holds, and see that it would be found."""
    inodes = sorted(set(open_memory().values()))
    assert inodes
    assert str(os.getpid()) in holders(set(inodes))
    Path(folder, f"rank-{rank}").write_text(json.dumps({"pid": os.getpid(), "inodes": inodes}))


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Descendants whose parent ends become children of this process, instead of vanishing from sight."""
    prctl, set_child_subreaper = ctypes.CDLL(None, use_errno=True).prctl, 36
    assert prctl(set_child_subreaper, 1, 0, 0, 0) == 0
    try:
        yield
    finally:
        prctl(set_child_subreaper, 0, 0, 0, 0)


# However ranks end ---------------------------------------------------------------------------------------------------


def end(rank: int, num_ranks: int, how: str, notes: str) -> None:
    buffer = make_buffer() if how == "destroyed" else deep_ep.Buffer(dist.group.WORLD)
    recv_x, _, _, _, handle, _ = dispatch(buffer)
    buffer.combine(recv_x, handle, async_finish=True)[-1].current_stream_wait()  # so that there is a thread
    assert threads_of_ours()
    note_down(notes, rank)
    dist.barrier()
    if how == "destroyed":
        buffer.destroy()
        assert eventually(lambda: not threads_of_ours())
        assert children() == set()
    elif how == "exception" and rank == 1:
        raise ArithmeticError("as planned")
    elif how == "one killed" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "killed in a call" and rank == 1:
        buffer.set_fault_hook(lambda _: os.kill(os.getpid(), signal.SIGKILL))
    elif how == "all killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if how in ("one killed", "killed in a call"):
        kind, text = error_of(dispatch, buffer)
        assert kind.startswith("EPError")
        assert "rank 1 has ended" in text


ENDINGS = {
    "destroyed": None,
    "forgotten": None,
    "exception": "as planned",
    "one killed": None,
    "killed in a call": None,
    "all killed": "ended without a word",
}


@pytest.mark.parametrize("how", ENDINGS)
def test_nothing_is_left_however_ranks_end(
    device: str, how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_ranks = 3
    notes, temporary = tmp_path / "notes", tmp_path / "tmp"
    notes.mkdir()
    temporary.mkdir()
    run_ranks(len_of_nothing, 1)  # the forkserver is running, and stays
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    monkeypatch.setenv("TMPDIR", str(temporary))
    shm_before = set(os.listdir("/dev/shm"))
    children_before = children()
    with adopting_orphans():
        failure = ENDINGS[how]
        if failure is None:
            run_ranks(end, num_ranks, how, str(notes), may_die=[1] if "killed" in how else [])
        else:
            with pytest.raises(RankFailed, match=failure):
                run_ranks(end, num_ranks, how, str(notes))
        said = [json.loads((notes / f"rank-{rank}").read_text()) for rank in range(num_ranks)]
        inodes = {inode for word in said for inode in word["inodes"]}
        assert len(inodes) == num_ranks
        assert eventually(lambda: not holders(inodes)), f"held by {holders(inodes)}"
        assert eventually(lambda: children() <= children_before), "a process outlived its rank"
        assert eventually(lambda: not any(is_running(word["pid"]) for word in said))
    assert os.listdir(temporary) == []
    assert not {name for name in set(os.listdir("/dev/shm")) - shm_before if "deep_ep" in name}


def len_of_nothing(rank: int, num_ranks: int) -> int:
    return 0


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


SCRIPT = """
    import os, sys, threading
    import torch, torch.distributed as dist
    import deep_ep

    rank, store = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    buffer = deep_ep.Buffer(dist.group.WORLD)
    idx = torch.arange(2).repeat(4, 1)
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(idx, 2)
    given = dict(num_tokens_per_rank=per_rank, is_token_in_rank=mask, num_tokens_per_expert=per_expert)
    recv_x, *_, handle, _ = buffer.dispatch(torch.ones(4, 8), **given)
    buffer.dispatch(torch.ones(4, 8), handle=handle, async_finish=True)[-1].current_stream_wait()  # a thread runs
    pid = os.fork()
    if pid == 0:
        sys.exit(0)  # a child that inherits the buffer and ends as any interpreter does
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0, "the forked child crashed"
    combined, _, event = buffer.combine(recv_x, handle)
    assert bool((combined == 2).all())
    buffer.dispatch(torch.ones(4, 8), handle=handle, async_finish=True)  # nobody waits, nobody destroys
    print("fine")
"""


def test_interpreters_end_by_themselves_and_cleanly(device: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    command = [sys.executable, str(script)]
    ranks = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store")],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=120) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, outputs, strict=True):
        assert rank.returncode == 0, err
        assert "fine" in out
        for word in ("Traceback", "Exception ignored", "leaked"):
            assert word not in err, err


# Forked children -----------------------------------------------------------------------------------------------------


def in_a_child(work: Callable[[], str]) -> str:
    """What `work` returns in a forked child, or how the child died."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            answer = work()
        except BaseException as error:
            answer = repr(error)
        os.write(write, answer.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    return answer if code == 0 else f"exit code {code}: {answer}"


def held() -> str:
    """What a process shares with the ranks. A forked child may have private mappings, for as long as it has tensors."""
    return f"{len(open_memory())} descriptors, {len(mapped_memory(kinds='s'))} shared mappings"


NOTHING = "0 descriptors, 0 shared mappings"


def fork_with_a_buffer(rank: int, num_ranks: int, with_thread: bool) -> None:
    buffer = make_buffer()
    everything = [dispatch(buffer)]
    recv_x, _, _, _, handle, _ = everything[0]
    if with_thread:
        buffer.combine(recv_x, handle, async_finish=True)[-1].current_stream_wait()
    assert (len(threads_of_ours()) > 0) == with_thread
    assert not held().startswith("0 ")
    assert in_a_child(held) == NOTHING

    def forget_everything() -> str:
        nonlocal buffer, recv_x
        del buffer, recv_x
        everything.clear()
        gc.collect()
        return f"{held()}, {len(mapped_memory())} in all"

    def end_as_interpreters_do() -> str:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        return held()

    assert in_a_child(forget_everything) == f"{NOTHING}, 0 in all"
    assert in_a_child(end_as_interpreters_do) == NOTHING
    assert in_a_child(lambda: in_a_child(held)) == NOTHING
    # A descriptor that the child opens must not be mistaken for one of ours when the inherited objects go.
    assert in_a_child(lambda: opened_survives(everything)) == "still there"
    check_rows(recv_x, handle, rank)
    round_trip(buffer)
    dist.barrier()
    buffer.destroy()
    assert in_a_child(held) == NOTHING


def opened_survives(everything: list) -> str:
    with tempfile.TemporaryFile() as file:
        everything.clear()
        gc.collect()
        file.write(b"still there")
        file.seek(0)
        return file.read().decode()


@pytest.mark.parametrize("with_thread", [False, True])
def test_a_forked_child_holds_nothing_and_harms_nobody(device: str, with_thread: bool) -> None:
    run_ranks(fork_with_a_buffer, 2, with_thread)


class WhatAWorkerHolds(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[int, str, int]:
        gc.collect()
        return os.getpid(), held(), index


def load_data(rank: int, num_ranks: int) -> None:
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]  # or no workers
    buffer = make_buffer()
    kept = dispatch(buffer)
    loader = DataLoader(
        WhatAWorkerHolds(), batch_size=4, num_workers=2, collate_fn=list, multiprocessing_context="fork"
    )
    for _ in range(2):
        items = []
        for batch in loader:
            items += batch
            round_trip(buffer)  # while the workers live
        assert [index for _, _, index in items] == list(range(24))
        assert {text for _, text, _ in items} == {NOTHING}
        assert len({pid for pid, _, _ in items} - {os.getpid()}) == 2
    check_rows(kept[0], kept[4], rank)
    dist.barrier()
    buffer.destroy()


def test_workers_of_a_data_loader_hold_nothing(device: str) -> None:
    run_ranks(load_data, 2)


# Received tensors ----------------------------------------------------------------------------------------------------


def outlive(rank: int, num_ranks: int) -> None:
    buffer = make_buffer()
    recv_x, _, _, _, handle, _ = dispatch(buffer, tokens=2000)
    again = buffer.dispatch(recv_x[:2000] * 0 + rank + 1, handle=handle)[0]
    pids: list[Any] = [None] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    if rank != 0:
        os.kill(os.getpid(), signal.SIGKILL)
    assert eventually(lambda: not any(is_running(pid) for pid in pids[1:]))
    buffer.destroy()
    del buffer
    gc.collect()
    for rows in (recv_x, again):
        check_rows(rows, handle, rank)
        rows.mul_(2).sub_(rows / 2)
        check_rows(rows, handle, rank)
    view = recv_x[-1]
    del recv_x, rows
    gc.collect()
    assert bool((view == num_ranks).all())


def test_received_tensors_survive_buffer_and_killed_peers(device: str) -> None:
    run_ranks(outlive, 3, may_die=[1, 2])


# Memory --------------------------------------------------------------------------------------------------------------


def own_blocks(buffer: deep_ep.Buffer) -> int:
    """Bytes that the system has given to this rank's memfd."""
    return os.fstat(buffer._engine.window.peers[buffer.rank]._memory.fd).st_blocks * 512  # type: ignore[union-attr]


def status_bytes(name: str, pid: int | str = "self") -> int:
    return int(Path(f"/proc/{pid}/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def trim(rank: int, num_ranks: int) -> None:
    buffer = make_buffer()
    kept = dispatch(buffer)
    before = own_blocks(buffer)
    big = dispatch(buffer, tokens=4000, hidden=1000)
    num_bytes = big[0].nbytes
    assert num_bytes == 4000 * 1000 * 4 * num_ranks
    assert own_blocks(buffer) >= before + num_bytes
    buffer.combine(big[0], big[4])
    dist.barrier()
    assert buffer.trim() < num_bytes, "what is in use stays"
    check_rows(big[0], big[4], rank)
    del big
    gc.collect()
    dist.barrier()
    assert own_blocks(buffer) >= num_bytes, "free memory is kept for the next call"
    assert buffer.trim() >= num_bytes
    assert own_blocks(buffer) <= before + MIB
    dist.barrier()
    check_rows(kept[0], kept[4], rank)
    again = dispatch(buffer, tokens=4000, hidden=1000)
    check_rows(again[0], again[4], rank)
    dist.barrier()


def test_trim_gives_blocks_back_to_the_system(device: str) -> None:
    run_ranks(trim, 2)


def repeat(rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    buffer = make_buffer()
    blocks, anonymous = [], []
    descriptors = 0
    for index in range(360):
        recv_x, _, _, _, handle, _ = dispatch(buffer, tokens=400, hidden=512)
        is_async = bool(index % 2)
        combined, _, event = buffer.combine(recv_x if index % 3 else recv_x.clone(), handle, async_finish=is_async)
        if is_async:
            event.current_stream_wait()
        if index == 59:
            descriptors = len(os.listdir("/proc/self/fd"))
        if index >= 59 and index % 60 == 59:
            blocks.append(own_blocks(buffer))
            anonymous.append(status_bytes("RssAnon"))
    assert len(os.listdir("/proc/self/fd")) <= descriptors
    assert len(threads_of_ours()) <= 1
    del recv_x, combined, event
    gc.collect()
    assert buffer.stats()["arena"]["used"] == 0
    buffer.destroy()
    return blocks, anonymous


def test_300_more_calls_take_no_more_memory(device: str) -> None:
    for blocks, anonymous in run_ranks(repeat, 2):
        assert max(blocks) == blocks[0], blocks
        assert max(anonymous) - anonymous[0] < 4 * MIB, anonymous  # a call receives 1.6 MiB


def rebuild(rank: int, num_ranks: int) -> tuple[list[int], list[int]]:
    descriptors, anonymous = [], []
    for _ in range(15):
        buffer = make_buffer()
        round_trip(buffer)
        dist.barrier()
        buffer.destroy()
        del buffer
        gc.collect()
        assert open_memory() == {}
        assert mapped_memory() == []
        descriptors.append(len(os.listdir("/proc/self/fd")))
        anonymous.append(status_bytes("RssAnon"))
    return descriptors, anonymous


def test_buffers_made_and_destroyed_leave_nothing(device: str) -> None:
    for descriptors, anonymous in run_ranks(rebuild, 2):
        assert max(descriptors[1:]) == descriptors[1], descriptors
        assert anonymous[-1] - anonymous[4] < 4 * MIB, anonymous


# Memory that cannot be had -------------------------------------------------------------------------------------------


def scarce(rank: int, num_ranks: int, available: int, short_ranks: list[int]) -> tuple[tuple[str, str], dict]:
    buffer = make_buffer()
    round_trip(buffer)
    dist.barrier()
    if rank in short_ranks:
        memory.available_bytes = lambda: available
    result: list[Any] = []
    error = error_of(lambda: result.append(dispatch(buffer, tokens=2000, hidden=2000)))
    calls = {}
    if error[0] == "none":
        recv_x, _, _, _, handle, _ = result[0]
        check_rows(recv_x, handle, rank)
        combined, _, _ = buffer.combine(recv_x, handle)
        assert bool((combined == num_ranks * (rank + 1)).all())
        calls = buffer.stats()["calls"]
    buffer.destroy()
    return error, calls


@pytest.mark.parametrize("short_ranks", [[1], [0, 1, 2]])
def test_with_little_memory_a_call_is_staged(device: str, short_ranks: list[int]) -> None:
    for rank, (error, calls) in enumerate(run_ranks(scarce, 3, 8 * MIB, short_ranks)):
        assert error == ("none", "")
        assert ("dispatch/staged" in calls) == (rank in short_ranks)
        assert ("combine/staged" in calls) == (rank in short_ranks)


@pytest.mark.parametrize("short_ranks", [[1], [0, 1, 2]])
def test_without_memory_all_ranks_say_so_with_numbers(device: str, short_ranks: list[int]) -> None:
    for (kind, text), _ in run_ranks(scarce, 3, 12345, short_ranks):
        assert kind.startswith("EPError"), text
        assert "bytes of memory are needed, 12345 are available" in text


def no_room_for_a_buffer(rank: int, num_ranks: int) -> tuple[str, str]:
    if rank == 1:
        memory.available_bytes = lambda: 123
    return error_of(make_buffer)


def test_a_buffer_that_finds_no_memory_says_so_on_all_ranks(device: str) -> None:
    for kind, text in run_ranks(no_room_for_a_buffer, 3):
        assert kind.startswith("EPError"), text
        assert "rank 1" in text
        assert "123 are available" in text


def little_address_space(rank: int, num_ranks: int, extra: int, operation: str) -> tuple[str, str]:
    """Rank 1 may take only so many more bytes of addresses. A dispatch receives 72 MB, a combine returns as many."""
    tokens, hidden = 6000, 3000 if operation == "combine" else 1500
    buffer = make_buffer(num_cpu_timeout_secs=20)
    recv_x, _, _, _, handle, _ = dispatch(buffer, tokens=tokens, hidden=16)
    x, rows = torch.full((tokens, hidden), float(rank + 1)), torch.ones(recv_x.size(0), hidden)
    topk = {"topk_idx": torch.arange(num_ranks).repeat(tokens, 1), "topk_weights": torch.ones(tokens, num_ranks)}

    def call() -> None:
        if operation == "combine":
            assert bool((buffer.combine(rows, handle)[0] == num_ranks).all())
        elif operation == "cached dispatch":
            check_rows(buffer.dispatch(x, handle=handle)[0], handle, rank)
        elif operation == "worst-case dispatch":
            received = dispatch(buffer, tokens, hidden, num_worst_tokens=num_ranks * tokens, **topk)
            check_rows(received[0], handle, rank)
        else:
            check_rows(dispatch(buffer, tokens, hidden)[0], handle, rank)

    dist.barrier()
    limits = resource.getrlimit(resource.RLIMIT_AS)
    if rank == 1:
        x_bytes = x.nbytes if operation in ("dispatch", "worst-case dispatch") else 0  # `dispatch` makes its input
        resource.setrlimit(resource.RLIMIT_AS, (status_bytes("VmSize") + x_bytes + extra, limits[1]))
    try:
        return error_of(call)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
        buffer.destroy()


OPERATIONS = ["dispatch", "cached dispatch", "worst-case dispatch", "combine"]


@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("extra", [16 * MIB, 100 * MIB])
def test_too_few_addresses_are_an_error_with_numbers_on_all_ranks(device: str, extra: int, operation: str) -> None:
    mine, other = reversed(run_ranks(little_address_space, 2, extra, operation))
    assert mine[0].startswith("EPError"), mine
    assert any(int(word) > MIB for word in mine[1].split() if word.isdigit()), mine
    assert other[0].startswith("EPError"), other
    assert "rank 1" in other[1]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_enough_addresses_are_enough(device: str, operation: str) -> None:
    assert run_ranks(little_address_space, 2, 600 * MIB, operation) == [("none", ""), ("none", "")]


# Peak memory ---------------------------------------------------------------------------------------------------------


class Sampler:
    """A process that watches another one's private memory and the blocks of its memfd, and keeps the most."""

    def __init__(self, pid: int, fd: int):
        self._stop_read, self._stop = os.pipe()
        self._answer, answer = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            os.set_blocking(self._stop_read, False)
            most = samples = 0
            while True:
                most = max(most, bytes_taken(pid, fd))
                samples += 1
                with contextlib.suppress(BlockingIOError):
                    os.read(self._stop_read, 1)
                    break
            os.write(answer, json.dumps([most, samples]).encode())
            os._exit(0)
        os.close(answer)

    def stop(self) -> tuple[int, int]:
        """The most bytes, and how often was looked."""
        os.write(self._stop, b"x")
        most, samples = json.loads(os.read(self._answer, 1000))
        os.waitpid(self._pid, 0)
        return most, samples


def bytes_taken(pid: int | str, fd: int) -> int:
    return status_bytes("RssAnon", pid) + os.stat(f"/proc/{pid}/fd/{fd}").st_blocks * 512


def peak(rank: int, num_ranks: int, kind: str) -> tuple[int, int, int]:
    """Received bytes, the most bytes taken beside inputs and outputs, and samples."""
    tokens, hidden = 7500, 1000
    buffer = make_buffer()
    fd = buffer._engine.window.peers[rank]._memory.fd  # type: ignore[union-attr]
    topk_idx = torch.arange(num_ranks).repeat(tokens, 1)
    given = layout_of(buffer, topk_idx, num_ranks)
    topk = {"topk_idx": topk_idx, "topk_weights": torch.ones(tokens, num_ranks)}
    x = torch.full((tokens, hidden), float(rank + 1))
    handle = buffer.dispatch(x[:, :1].contiguous(), **given, **topk)[4]
    assert handle is not None
    gc.collect()
    buffer.trim()
    dist.barrier()
    sampler = Sampler(os.getpid(), fd)
    time.sleep(0.1)
    before = bytes_taken("self", fd)
    if kind == "cached":
        results = buffer.dispatch(x, handle=handle)
    elif kind == "full":
        results = buffer.dispatch(x, **given, **topk)
    else:
        results = buffer.dispatch(x, **given, **topk, num_worst_tokens=num_ranks * tokens)
    dist.barrier()
    most, samples = sampler.stop()
    check_rows(results[0], results[4] or handle, rank)
    outputs = [item for item in (*results, *(results[4] or ())) if isinstance(item, torch.Tensor)]
    mask = given["is_token_in_rank"]
    assert mask.data_ptr() in {item.data_ptr() for item in outputs} or kind == "cached"
    made = sum(item.nbytes for item in outputs if item.data_ptr() != mask.data_ptr())
    buffer.destroy()
    return results[0].nbytes, most - before - made, samples


@pytest.mark.parametrize("kind", ["full", "cached", "worst case"])
def test_a_dispatch_takes_little_beside_its_inputs_and_outputs(device: str, kind: str) -> None:
    for received, extra, samples in run_ranks(peak, 2, kind):
        assert received == 60_000_000
        assert samples > 50, "it was hardly looked at"
        assert extra < 0.1 * received, f"{extra} bytes beside {received}"


# A small /dev/shm ----------------------------------------------------------------------------------------------------


def dispatch_much(rank: int, num_ranks: int) -> tuple[int, int]:
    buffer = make_buffer()
    recv_x, _, _, _, handle, _ = dispatch(buffer, tokens=12_000, hidden=1000)
    check_rows(recv_x, handle, rank)
    combined, _, _ = buffer.combine(recv_x, handle)
    assert bool((combined == num_ranks * (rank + 1)).all())
    assert buffer.stats()["calls"] == {"dispatch/direct": 1, "combine/pulled": 1}
    shm = os.statvfs("/dev/shm")
    dist.barrier()
    buffer.destroy()
    return shm.f_blocks * shm.f_frsize, recv_x.nbytes


IN_A_SMALL_SHM = """
    import os, sys
    sys.path[:0] = {paths!r}
    from test_leftovers import dispatch_much
    from deep_ep.launch import run_ranks

    if __name__ == "__main__":
        print(run_ranks(dispatch_much, 2), os.listdir("/dev/shm"))
"""


def test_a_small_dev_shm_changes_nothing(device: str, tmp_path: Path) -> None:
    unshare = shutil.which("unshare")
    if unshare is None:
        pytest.skip("there is no `unshare` here")
    as_root = [] if os.geteuid() == 0 else ["--user", "--map-root-user"]
    inside = [unshare, *as_root, "--mount", "sh", "-c", 'mount -t tmpfs -o size=64m tmpfs /dev/shm && "$@"', "sh"]
    trial = subprocess.run([*inside, "true"], capture_output=True, text=True)
    if trial.returncode:
        pytest.skip(f"a mount namespace is not permitted: {trial.stderr.strip()}")
    script = tmp_path / "script.py"
    here = Path(__file__).parent
    script.write_text(textwrap.dedent(IN_A_SMALL_SHM.format(paths=[str(here), str(here.parent)])))
    done = subprocess.run([*inside, sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    received = 12_000 * 1000 * 4 * 2
    assert received > 64 * MIB
    assert done.stdout.strip() == f"{[(64 * MIB, received)] * 2} []", done.stderr
