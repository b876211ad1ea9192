"""The soak: short ones through the command line, one with a wrong result, and what it is made of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch

from deep_ep import Buffer
from deep_ep.tools import cli
from deep_ep.tools.soak import parent
from deep_ep.tools.soak.faults import Stops
from deep_ep.tools.soak.memory import Sample, growth_of
from deep_ep.tools.soak.plan import Goal, plan_segment
from deep_ep.tools.soak.rank import RankReport, play_rank

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize("num_ranks", [3])
def test_a_short_soak(device: str, num_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "soak.json", tmp_path / "soak.png"
    # Seed 1 begins with a segment whose arenas are tiny and whose fault points are delayed.
    argv = ["soak", "--ranks", str(num_ranks), "--seed", "1", "--minutes", "0.07", "--json", str(path)]
    assert cli.main([*argv, "--plot", str(picture)]) == 0
    out, err = capsys.readouterr()
    for word in ("worst-case dispatch", "low-latency", "dispatch/staged", "Memory: flat", "OK: 0 errors", "empty"):
        assert word in out
    assert "Replay" not in out
    assert "segment 0 (arena tiny)" in err
    assert picture.read_bytes().startswith(b"\x89PNG")
    content = json.loads(path.read_text())
    assert content["num_errors"] == 0
    assert content["num_stops"] > 0
    assert len(content["reports"]) == num_ranks
    for report in content["reports"]:
        assert sum(report["calls"].values()) == content["num_calls"] > 20
        assert report["samples"][0]["private_bytes"] > 1 << 20
        assert report["num_bytes"] > 0
        assert report["num_delays"] > 0
        assert (report["arena_used_bytes"], report["threads_left"], report["memfds_left"]) == (0, [], 0)


def test_calls_go_on_over_segments_and_one_can_be_played_alone(
    device: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "soak.json"
    goal = Goal(num_ranks=2, seed=3)
    number = next(number for number in range(20) if plan_segment(goal, number).num_calls < 130)
    assert cli.main(["soak", "--ranks", "2", "--seed", "3", "--segment", str(number), "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["num_calls"] == plan_segment(goal, number).num_calls
    assert content["last_segment"] == number
    first = plan_segment(goal, 0).num_calls
    assert cli.main(["soak", "--ranks", "2", "--seed", "3", "--calls", str(first + 5), "--json", str(path)]) == 0
    content = json.loads(path.read_text())
    assert content["num_calls"] == first + 5
    assert content["reports"][0]["num_segments"] == 2


# Something goes wrong ------------------------------------------------------------------------------------------------


def wrong_rank(rank: int, num_ranks: int, goal: Goal, news: Connection) -> RankReport:
    """On rank 1, the first combine of more than a row returns one wrong number."""
    right = Buffer.combine

    def wrong(self: Buffer, *args: Any, **kwargs: Any) -> tuple:
        out, weights, event = right(self, *args, **kwargs)
        if event.event is not None:
            event.current_stream_wait()
        if out.size(0) > 1:
            out.view(torch.uint8)[1, 0] ^= 1
        return out, weights, event

    if rank == 1:
        Buffer.combine = wrong  # type: ignore[method-assign]
    return play_rank(rank, num_ranks, goal, news)


def killed_rank(rank: int, num_ranks: int, goal: Goal, news: Connection) -> RankReport:
    right = Buffer.combine

    def die(self: Buffer, *args: Any, **kwargs: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Buffer.combine = die if rank == 1 else right  # type: ignore[method-assign, assignment]
    return play_rank(rank, num_ranks, goal, news)


def grown_rank(rank: int, num_ranks: int, goal: Goal, news: Connection) -> RankReport:
    report = play_rank(rank, num_ranks, goal, news)
    last = report.samples[-1]
    report.samples.append(Sample(last.secs + 1, last.num_calls, last.private_bytes + (60 << 20), 0))
    return report


@pytest.mark.parametrize(
    ("rank_function", "said", "replay"),
    [
        (
            wrong_rank,
            [
                "rank 1, segment 0, call ",
                ": Mismatch: call ",
                " (combine): combined_x",
                "first in row 1, column 0: got ",
                " calls to 2, in ",
                "dispatch), ",
                " (combine of ",
            ],
            "--ranks 3 --seed 8 --segment 0 --only ",
        ),
        (killed_rank, ["rank 1/3: the process ended without a word"], "--ranks 3 --seed 8 --segment 0"),
        (grown_rank, ["Memory: not flat"], "--ranks 3 --seed 8 --calls 60"),
    ],
)
def test_a_failure_is_shown_with_the_line_that_replays_it(
    device: str,
    rank_function: Callable[..., RankReport],
    said: list[str],
    replay: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(parent, "play_rank", rank_function)
    assert cli.main(["soak", "--ranks", "3", "--seed", "8", "--calls", "60"]) == 1
    out = capsys.readouterr().out
    for words in (*said, "not OK"):
        assert words in out
    (line,) = [line for line in out.splitlines() if line.startswith("Replay: ")]
    assert line.startswith(f"Replay: python -m deep_ep soak {replay}")


# What it is made of --------------------------------------------------------------------------------------------------


def test_growth_is_from_the_first_tenth_to_the_end() -> None:
    def samples(*megabytes: int) -> list[Sample]:
        return [Sample(float(secs), 0, number << 20, 0) for secs, number in enumerate(megabytes)]

    assert growth_of(samples(10, 300, *[300] * 8, 310)).is_flat
    assert growth_of(samples(10, 300, *[300] * 8, 310)).num_bytes == 10 << 20
    assert not growth_of(samples(10, 300, *[300] * 8, 351)).is_flat
    assert growth_of(samples(10, 1000, *[900] * 8, 1090)).is_flat
    assert growth_of(samples(700)).is_flat


def test_who_was_stopped_runs_in_the_end() -> None:
    with subprocess.Popen(["sleep", "100"]) as process:
        try:
            with Stops(seed=0) as stops:
                stops.add(process.pid)
                deadline = time.monotonic() + 30
                while stops.num_stops < 2 and time.monotonic() < deadline:
                    time.sleep(0.001)
                assert stops.num_stops >= 2
            assert Path(f"/proc/{process.pid}/stat").read_text().split()[2] != "T"
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--ranks", "0"], "--ranks must be at least 1, got 0"),
        (["--minutes", "0"], "--minutes must be greater than 0"),
        (["--calls", "0"], "--calls must be at least 1"),
        (["--segment", "-1"], "--segment must be at least 0"),
        (["--segment", "1", "--only", "3,x"], "must be numbers with commas between them, got '3,x'"),
        (["--only", "3,4"], "--only is about the calls of a segment; give --segment, too"),
        (["--segment", "1", "--minutes", "1"], "leave --minutes out"),
        (["--plot", "memory.jpg"], "must name a .png file"),
        (["--json", "/no/such/folder/soak.json"], "there is no folder"),
    ],
)
def test_bad_options(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["soak", *argv]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_across_nodes(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["soak", "--ranks", "4", "--ranks-per-node", "3"]) == 2
    assert "--ranks-per-node must divide the 4 ranks" in capsys.readouterr().err
    assert cli.main(["soak", "--ranks", "4", "--ranks-per-node", "2", "--low-latency", "--device", "cuda"]) == 2
    assert "--low-latency with --ranks-per-node is for CPU ranks" in capsys.readouterr().err
    assert cli.main(["soak", "--ranks", "4", "--ranks-per-node", "2", "--calls", "20", "--seed", "2"]) == 0
    out, _ = capsys.readouterr()
    assert "4 CPU ranks on 2 nodes" in out
    assert "OK: 0 errors, 20 calls" in out
    assert Goal(4, 2, ranks_per_node=2).command(1) == (
        "python -m deep_ep soak --ranks 4 --seed 2 --ranks-per-node 2 --segment 1"
    )
