"""`run_ranks`: results by rank, the first traceback, the limit, and ranks that end with whoever started them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

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
    with pytest.raises(RankFailed, match=r"ranks \[0, 1\] did not end within 3 s"):
        run_ranks(sleeping, 2, str(tmp_path), limit_secs=3)
    for rank in (0, 1):
        assert not is_running(int((tmp_path / str(rank)).read_text()))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


PROGRAM = """
import sys
sys.path.insert(0, {folder!r})
from test_launch import sleeping
from deep_ep.launch import run_ranks
if __name__ == "__main__":
    run_ranks(sleeping, 2, {tmp!r})
"""


def test_ranks_end_with_a_launcher_that_is_killed(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(folder=str(Path(__file__).parent), tmp=str(tmp_path)))
    launcher = subprocess.Popen([sys.executable, str(program)])
    pids: list[int] = []
    deadline = time.monotonic() + 60
    while len(pids) < 2 and time.monotonic() < deadline:
        time.sleep(0.1)
        found = [tmp_path / str(rank) for rank in (0, 1)]
        pids = [int(path.read_text()) for path in found if path.exists() and path.read_text()]
    launcher.send_signal(signal.SIGKILL)
    launcher.wait()
    assert len(pids) == 2
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(is_running(pid) for pid in pids)
