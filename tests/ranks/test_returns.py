"""Ranks that leave low-latency calls and come back, by the two calls that clean masks and buffer."""

from __future__ import annotations

import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from low_latency import BF16, SMALL, Round, check_dispatch, make_buffer, masks_of

import deep_ep
from common import error_of, run_ranks
from deep_ep.kernels import _triton
from deep_ep.tools import cli
from deep_ep.tools.soak import returns

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.cpu_only]

LIMIT_SECS = 3.0
INTERPRETED = {"DEEP_EP_TRANSPORT": "interpreted", "DEEP_EP_DEVICE": "cpu"}
interpreted = pytest.mark.skipif(
    not _triton.INTERPRETED, reason="Triton is not there, or not in its interpreter's mode"
)


def take_all_in(buffer: deep_ep.Buffer) -> None:
    """What vLLM's retry does, on all ranks."""
    buffer.low_latency_clean_mask_buffer()
    num_experts = SMALL.experts_per_rank * buffer.group_size
    buffer.clean_low_latency_buffer(SMALL.max_tokens, SMALL.hidden, num_experts)


def leave_and_return(rank: int, num_ranks: int, goes_on: bool) -> list[str]:
    """Rank 1 leaves with a hook that it has not called, misses some calls, and comes back.

    Args:
        rank: This rank.
        num_ranks: Ranks.
        goes_on: Before that, it goes on where it was. The others have made those calls long ago, without it.
    """
    buffer = make_buffer(num_ranks, SMALL, enable_shrink=True, limit_secs=LIMIT_SECS)
    assert Round(buffer, 0).go() == []
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = Round(buffer, 1).dispatch(return_recv_hook=True)
        if rank != 1:  # rank 1 has sent this one, so it is part of it
            got[4]()
            for seed in (2, 3):
                assert Round(buffer, seed).go() == [1]
        dist.barrier()
        if rank == 1 and goes_on:
            got[4]()
            assert Round(buffer, 2).go() == [0, *range(2, num_ranks)]
        dist.barrier()
        for seed in (4, 6):  # coming back when nobody has left is nothing more than a barrier
            take_all_in(buffer)
            assert Round(buffer, seed).go() == []
        if rank == 1 and not goes_on:
            assert "given up this call" in error_of(got[4])[1]
    buffer.check()
    buffer.destroy()
    return [str(one.message) for one in caught if one.category is RuntimeWarning and "rank" in str(one.message)]


@pytest.mark.parametrize(
    ("num_ranks", "goes_on", "env"),
    [
        (3, True, {}),
        (4, False, {"DEEP_EP_RANKS_PER_NODE": "2"}),
        pytest.param(2, True, INTERPRETED, marks=interpreted),
    ],
    ids=["one node", "two nodes", "kernels"],
)
def test_a_rank_leaves_and_returns(num_ranks: int, goes_on: bool, env: dict[str, str]) -> None:
    for rank, texts in enumerate(run_ranks(leave_and_return, num_ranks, goes_on, env=env)):
        if rank != 1:
            assert len(texts) == 1, texts
            assert "rank 1" in texts[0]
        elif goes_on:
            assert any("rank 0" in text and "without this rank" in text for text in texts), texts


def leave_a_call_out(rank: int, num_ranks: int, num_further: int) -> tuple[list[int], list[int]]:
    """The caller of rank 1 leaves between a dispatch and its combine. The others take it for lost and make some further
    calls; then it goes on with its next dispatch, which has the number of the combine.
    """
    buffer = make_buffer(num_ranks, SMALL, enable_shrink=True, limit_secs=1.5)
    assert Round(buffer, 0).go() == []
    dist.barrier()
    warnings.simplefilter("ignore", RuntimeWarning)
    got = Round(buffer, 1).dispatch()
    if rank != 1:
        assert Round(buffer, 1).finish(got) == [1]
        for seed in range(2, 2 + num_further):
            Round(buffer, seed).dispatch()
    dist.barrier()
    if rank == 1:
        late = Round(buffer, 2)
        check_dispatch(late.dispatch(), late.expected()[0][rank], BF16)
    masks = masks_of(buffer)
    dist.barrier()
    take_all_in(buffer)
    assert Round(buffer, 9).go() == []
    buffer.destroy()
    return masks


@pytest.mark.parametrize("num_further", [0, 1, 3, 4])
def test_a_rank_that_leaves_a_call_out_learns_it_and_can_return(num_further: int) -> None:
    assert run_ranks(leave_a_call_out, 3, num_further) == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]


def late_sender(rank: int, num_ranks: int, seed: int) -> list[int]:
    """Rank 2 is stopped before it sends, and continued when the limit of the first of the others has just passed."""
    limit_secs = 1.5
    buffer = make_buffer(num_ranks, SMALL, enable_shrink=True, limit_secs=limit_secs)
    Round(buffer, 0).go()
    pids: list[Any] = [None] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    window, delay = buffer._engine.window, limit_secs + 0.02 * seed

    def stop(point: str) -> None:
        if point == "low-latency dispatch: before sent":
            window.fault = None
            os.kill(os.getpid(), signal.SIGSTOP)

    if rank == 2:
        window.fault = stop
    time.sleep(0.1 * rank)  # so the limits pass one after the other
    if rank == 0:
        wake(pids[2], delay)
    warnings.simplefilter("ignore", RuntimeWarning)
    got = Round(buffer, 1).dispatch()
    masks = masks_of(buffer)
    Round(buffer, 1).finish(got)
    dist.barrier()
    take_all_in(buffer)
    Round(buffer, 2).go()
    buffer.destroy()
    return masks


def wake(pid: int, secs: float) -> None:
    """Continue a process after so long, without waiting for that here."""
    if os.fork() == 0:
        time.sleep(secs)
        while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
            time.sleep(0.01)
        os.kill(pid, signal.SIGCONT)
        os._exit(0)


@pytest.mark.parametrize("seed", [0, 6])
def test_the_others_agree_on_whether_a_late_rank_is_lost(seed: int) -> None:
    """In the call that it was late for, too: those who remain have all its rows, or none of them."""
    first, second, _, last = run_ranks(late_sender, 4, seed)
    assert first == second == last


@pytest.mark.parametrize("seed", [1, 56])
def test_random_histories(seed: int) -> None:
    """A short one on one node and one across nodes, each with a new process; `soak --returns 200` plays more."""
    topology = [(3, 0), (4, 2)][seed % 2]
    played = returns.play_history(returns.draw_history(seed, *topology), limit_secs=1.5)
    assert not played.error, played.error
    assert played.num_returns
    assert played.num_degraded
    assert played.num_replaced < played.num_returns


def test_the_command_says_what_it_has_played(capsys: pytest.CaptureFixture[str], monkeypatch: Any) -> None:
    plays = iter([("", 12, 3, 2, 0.5, 1), ("a wrong sum", 0, 0, 0, 0.0, 0)])
    monkeypatch.setattr(returns, "play_history", lambda history: returns.Played(history, *next(plays)))
    assert cli.main(["soak", "--returns", "2", "--seed", "4", "--ranks", "3"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("wrong: soak --returns 1 --seed 5 --ranks 3 (rank ")
    assert lines[1] == "a wrong sum"
    assert lines[2] == (
        "2 histories, 1 wrong; 12 rounds compared, 3 of them with masks; 2 returns, 1 of them by new "
        "processes, the slowest 0.50 s to the first full result"
    )
