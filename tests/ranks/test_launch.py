"""`run_ranks`: results by rank, the first traceback, the limit, and ranks that end with whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, TensorDataset

from deep_ep.launch import RankFailed, run_ranks


def sum_of_ranks(rank: int, num_ranks: int, start: int) -> int:
    total = torch.tensor([start + rank])
    dist.all_reduce(total)
    return int(total)


def test_results_come_back_by_rank() -> None:
    assert run_ranks(sum_of_ranks, 3, 10) == [33, 33, 33]


def failing(rank: int, num_ranks: int) -> None:
    if rank == 1:
        raise ValueError("out of tokens")
    time.sleep(60)


def test_the_first_traceback_comes_with_its_rank() -> None:
    with pytest.raises(RankFailed, match=r"rank 1/3: Traceback[\s\S]*ValueError: out of tokens"):
        run_ranks(failing, 3)


def sleeping(rank: int, num_ranks: int, folder: str) -> None:
    Path(folder, str(rank)).write_text(str(os.getpid()))
    time.sleep(60)


@pytest.mark.alone
def test_the_limit_ends_everything(tmp_path: Path) -> None:
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not end within 3 s.* or pass a larger `limit_secs`"):
        run_ranks(sleeping, 2, str(tmp_path), limit_secs=3)
    for rank in (0, 1):
        assert not is_running(int((tmp_path / str(rank)).read_text()))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


PROGRAM = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs ignore it
sys.path.insert(0, {folder!r})
from test_launch import sleeping
from deep_ep.launch import run_ranks
if __name__ == "__main__":
    run_ranks(sleeping, 2, {tmp!r})
"""


def wait_for_ranks(folder: Path) -> list[int]:
    """The processes of two ranks that sleep."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        found = [folder / str(rank) for rank in (0, 1)]
        pids = [int(path.read_text()) for path in found if path.exists() and path.read_text()]
        if len(pids) == 2:
            return pids
        time.sleep(0.1)
    raise AssertionError("the ranks did not start")


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(Path(__file__).parent), tmp=str(tmp_path)))
    launcher = subprocess.Popen([sys.executable, str(program)])
    pids = wait_for_ranks(tmp_path)
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    deadline = time.monotonic() + 60
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)


def load(rank: int, num_ranks: int) -> int:
    loader = DataLoader(TensorDataset(torch.arange(8)), batch_size=2, num_workers=2)
    return sum(int(batch.sum()) for (batch,) in loader)


def test_a_rank_may_have_workers() -> None:
    assert run_ranks(load, 2) == [28, 28]


def leave(rank: int, num_ranks: int, how: str) -> int:
    if how == "destroys":
        dist.destroy_process_group()
    elif rank == 1:
        os.kill(os.getpid(), signal.SIGSEGV) if how == "crashes" else os._exit(7)
    return rank


def test_how_a_rank_has_ended_is_told() -> None:
    assert run_ranks(leave, 2, "destroys") == [0, 1]  # as programs do at their end
    with pytest.raises(RankFailed, match=r"rank 1/2: the process ended without a word, by SIGSEGV: it was killed"):
        run_ranks(leave, 2, "crashes")
    with pytest.raises(RankFailed, match=r"rank 1/2: the process ended without a word, with exit code 7. It called"):
        run_ranks(leave, 2, "exits")


# What cannot be sent -------------------------------------------------------------------------------------------------


def answer(rank: int, num_ranks: int, value: Any) -> Any:
    return value


def return_lock(rank: int, num_ranks: int) -> Any:
    return threading.Lock()


class Unreadable:
    def __reduce__(self) -> tuple:
        return int, ("no number",)


def return_unreadable(rank: int, num_ranks: int) -> Any:
    return Unreadable()


def adding(more: int) -> Callable[[int, int], int]:
    def function(rank: int, num_ranks: int) -> int:
        return rank + more

    return function


def test_what_cannot_be_pickled_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TypeError, match=r"argument 1 behind `num_ranks` \(lock\) cannot be sent to the ranks: .*lock"):
        run_ranks(answer, 2, 3, threading.Lock())
    with pytest.raises(
        RankFailed, match=r"rank [01]/2: what it returned cannot be pickled: .* Return numbers, tensors"
    ):
        run_ranks(return_lock, 2)
    with pytest.raises(RankFailed, match=r"rank [01]/2: what it returned cannot be unpickled \(ValueError: invalid"):
        run_ranks(return_unreadable, 2)
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(TypeError, match=r"`function` cannot be sent to the ranks: .*local.* or install cloudpickle"):
        run_ranks(adding(3), 2)


def test_a_function_inside_of_a_function_goes_by_value() -> None:
    pytest.importorskip("cloudpickle")
    assert run_ranks(adding(3), 2) == [3, 4]


def run_program(text: str, *command: str) -> str:
    """What a program prints, errors last."""
    done = subprocess.run([sys.executable, *command], input=text, capture_output=True, text=True, timeout=120)
    return done.stdout + done.stderr


UNGUARDED = """
from deep_ep.launch import run_ranks
def main(rank, num_ranks):
    return rank
print(run_ranks(main, 2))
"""


def test_a_program_without_a_guard_is_told_of_it(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(UNGUARDED)
    said = run_program("", str(program))
    assert said.endswith('called run_ranks again in there. Put the call under `if __name__ == "__main__":`\n')
    assert said.count("Traceback") == 1


CONSOLE = """
import dataclasses, functools, sys
from deep_ep.launch import run_ranks
@dataclasses.dataclass
class Point:
    x: int
def twice(x):
    return 2 * x
def main(rank, num_ranks, point):
    return Point(twice(rank) + point.x)
sys.modules["cloudpickle"] = None
try:
    run_ranks(main, 2, Point(10))
except TypeError as error:
    print(error)
print(run_ranks(max, 2, 7, len("__main__")))
print(run_ranks(functools.partial(str.format, "{0} of {1}, not {2}"), 2, "__main__"))
del sys.modules["cloudpickle"]
print(run_ranks(main, 2, Point(10)) == [Point(10), Point(12)])
"""


def test_a_console_sends_its_functions_and_classes_by_value() -> None:
    pytest.importorskip("cloudpickle")
    assert run_program(CONSOLE, "-") == (
        "run_ranks: `function` cannot be sent to the ranks: ranks cannot import it from a notebook, a console or "
        "`python -c`. Define it at the top level of a module that ranks can import, or install cloudpickle\n"
        "[8, 8]\n['0 of 2, not __main__', '1 of 2, not __main__']\nTrue\n"
    )


def test_an_interrupt_ends_all_ranks_quietly(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(Path(__file__).parent), tmp=str(tmp_path)))
    # A session of its own: Ctrl-C reaches all its processes, ranks and forkserver included.
    launcher = subprocess.Popen(
        [sys.executable, str(program)], stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    pids = wait_for_ranks(tmp_path)
    os.killpg(launcher.pid, signal.SIGINT)
    _, said = launcher.communicate(timeout=60)
    assert said.endswith("KeyboardInterrupt: run_ranks: interrupted; all ranks were ended\n")
    assert said.count("Traceback") == 1
    assert not any(is_running(pid) for pid in pids)
