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

from deep_ep import Buffer, cli
from deep_ep.soak import parent
from deep_ep.soak.checks import Mismatch, same
from deep_ep.soak.faults import Stops
from deep_ep.soak.inputs import Inputs
from deep_ep.soak.memory import Sample, growth_of
from deep_ep.soak.plan import Goal, calls_to_play, plan_segment
from deep_ep.soak.rank import RankReport, play_rank

pytestmark = pytest.mark.cpu_only

GOAL = Goal(num_ranks=2, seed=5, num_calls=40)


@pytest.mark.parametrize("num_ranks", [3])
def test_a_short_soak(device: str, num_ranks: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, picture = tmp_path / "soak.json", tmp_path / "soak.png"
    # Seed 1 begins with a segment whose arenas are tiny and whose fault points are delayed.
    argv = ["soak", "--ranks", str(num_ranks), "--seed", "1", "--minutes", "0.07", "--json", str(path)]
    assert cli.main([*argv, "--plot", str(picture)]) == 0
    out, err = capsys.readouterr()
    for word in ("full dispatch", "combine (received)", "dispatch/staged", "Memory: flat", "OK: 0 errors", "empty"):
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
            out[1, 0] += 1
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
                " (combine (",
                "combined_x",
                "first in row 1, column 0: got ",
            ],
            "--ranks 3 --seed 8 --segment 0 --calls 60",
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


def test_the_plan_follows_from_the_seed() -> None:
    assert [plan_segment(GOAL, number) for number in range(9)] == [plan_segment(GOAL, number) for number in range(9)]
    assert plan_segment(GOAL, 1) != plan_segment(Goal(2, seed=6), 2)
    # In literal numbers: a line that replays a failure must do so on another machine, and in a later Python.
    segment = plan_segment(GOAL, 3)
    assert (segment.seed, segment.num_calls, segment.arena) == (1846387575634471010, 210, "free")
    inputs = [Inputs(segment.seed, 2, 20, 40) for _ in range(2)]
    first, again = (one.payload(one.num_tokens()) for one in inputs)
    for x, y in zip(first[0], again[0], strict=True):
        same("x", x, y)


def test_every_kind_of_arena_comes() -> None:
    segments = [plan_segment(GOAL, number) for number in range(8)]
    assert {segment.arena for segment in segments} == {"free", "tiny", "one page", "uneven"}
    assert all(len(segment.arena_limits) == 2 for segment in segments)


def test_how_many_calls_are_next() -> None:
    segment = plan_segment(GOAL, 0)
    assert calls_to_play(Goal(2, 5), segment, 1000, 10.0) == segment.num_calls
    assert calls_to_play(GOAL, segment, 33, 10.0) == 7
    assert calls_to_play(GOAL, segment, 40, 10.0) == 0
    assert calls_to_play(Goal(2, 5, secs=10.0), segment, 80, 8.0) == 20  # 10 a second, for 2 seconds more
    assert calls_to_play(Goal(2, 5, secs=10.0), segment, 80, 11.0) == 0


def test_same_sees_a_bit() -> None:
    x = torch.randn(3, 4).bfloat16()
    same("x", x, x.clone())
    same("x", None, None)
    y = x.clone()
    y.view(torch.int16)[2, 1] ^= 1
    with pytest.raises(Mismatch, match="1 of 3 rows differ, first in row 2, column 1"):
        same("x", y, x)
    with pytest.raises(Mismatch, match="got nothing"):
        same("x", None, x)
    with pytest.raises(Mismatch, match=r"expected torch\.float32"):
        same("x", x, x.float())
    with pytest.raises(Mismatch, match="row 1, column 0: got 7, expected 5"):
        same("counts", torch.tensor([4, 7]), torch.tensor([4, 5]))


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
    assert cli.main(["soak", "--ranks", "4", "--ranks-per-node", "2", "--low-latency"]) == 2
    assert "for normal calls on the CPU" in capsys.readouterr().err
    assert cli.main(["soak", "--ranks", "4", "--ranks-per-node", "2", "--calls", "20", "--seed", "2"]) == 0
    out, _ = capsys.readouterr()
    assert "4 CPU ranks on 2 nodes" in out
    assert "OK: 0 errors, 20 calls" in out
    assert Goal(4, 2, ranks_per_node=2).command(1) == (
        "python -m deep_ep soak --ranks 4 --seed 2 --ranks-per-node 2 --segment 1"
    )
