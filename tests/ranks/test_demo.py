"""The demo, and the command line around it."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deep_ep import __version__
from deep_ep.errors import EPError
from deep_ep.launch import RankFailed
from deep_ep.tools import cli
from deep_ep.tools.demo import layer, ranks
from deep_ep.tools.demo.traffic import ramp

pytestmark = pytest.mark.cpu_only

_SMALL = ["--tokens", "24", "--hidden", "40", "--topk", "3"]
_SHAPE = layer.Shape(num_ranks=2, num_tokens=16, hidden=24, num_experts=8, num_topk=3, seed=0)


def test_demo_of_three_ranks_as_a_process(tmp_path: Path) -> None:
    picture = tmp_path / "traffic.png"
    done = subprocess.run(
        [sys.executable, "-m", "deep_ep", "demo", "--ranks", "3", *_SMALL, "--plot", str(picture)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert "shm (CPU ranks of one host)" in done.stdout
    assert "top-3 of 66 experts" in done.stdout  # 64 is not a multiple of 3
    for word in ("from \\ to", "rank 0", "rank 2", "receives", "max abs error", "dispatch, cached", "GB/s"):
        assert word in done.stdout
    assert "OK" in done.stdout
    assert "not OK" not in done.stdout
    assert picture.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert picture.stat().st_size > 1000


def test_demo_of_two_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--ranks", "2", "--experts", "6", "--seed", "7", *_SMALL]) == 0
    out = capsys.readouterr().out
    counts = [
        torch.tensor([(layer.make_tokens(shape, rank).topk_idx // 3 == peer).any(1).sum() for peer in range(2)])
        for shape in [layer.Shape(2, 24, 40, 6, 3, 7)]
        for rank in range(2)
    ]
    lines = out.splitlines()
    first = next(place for place, line in enumerate(lines) if "from \\ to" in line) + 1
    for rank, row in enumerate(counts):
        # Two lines a rank: tokens to each rank and in all, and the same in megabytes.
        assert lines[first + 2 * rank].split() == ["rank", str(rank), *map(str, row.tolist()), str(int(row.sum()))]
    assert "OK" in out
    assert "not OK" not in out


def test_demo_says_so_where_the_result_is_wrong(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output = layer.dense_layer(_SHAPE).chunk(2)
    output[1][3, 5] += 0.01
    results = [ranks.RankResult([8, 8], 16, [4] * 4, part, True, [0.1] * 4) for part in output]
    monkeypatch.setattr(ranks, "run_ranks", lambda *_, **__: results)
    argv = ["demo", "--ranks", "2", "--tokens", "16", "--hidden", "24", "--experts", "8", "--topk", "3"]
    assert cli.main(argv) == 1
    assert "not OK" in capsys.readouterr().out
    assert cli.main([*argv, "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["ok"] is False
    assert told["ranks"][1]["num_tokens_to"] == [8, 8]
    assert told["ranks"][0]["median_secs"]["cached_dispatch"] == 0.1


@pytest.mark.parametrize("wrong", [0.01, float("nan"), float("inf")])
def test_compare_sees_one_wrong_number(wrong: float) -> None:
    expected = layer.dense_layer(_SHAPE)
    assert layer.compare(expected.clone(), expected).ok
    output = expected.clone()
    output[5, 7] += wrong
    assert not layer.compare(output, expected).ok


def test_compare_sees_swapped_rows() -> None:
    expected = layer.dense_layer(_SHAPE)
    assert not layer.compare(expected[torch.arange(expected.size(0) - 1, -1, -1)], expected).ok


def test_dense_layer_is_the_weighted_sum_of_experts() -> None:
    tokens = layer.make_tokens(_SHAPE, 1)
    output = layer.dense_layer(_SHAPE)[_SHAPE.num_tokens :]
    expected = sum(
        weight * layer.make_expert(_SHAPE, int(expert))(tokens.x[3:4])[0]
        for expert, weight in zip(tokens.topk_idx[3], tokens.topk_weights[3], strict=True)
    )
    torch.testing.assert_close(output[3], expected)


def test_seed_decides() -> None:
    other = layer.Shape(2, 16, 24, 8, 3, seed=1)
    assert torch.equal(layer.make_tokens(_SHAPE, 1).x, layer.make_tokens(_SHAPE, 1).x)
    assert not torch.equal(layer.make_tokens(_SHAPE, 0).x, layer.make_tokens(_SHAPE, 1).x)
    assert not torch.equal(layer.make_tokens(_SHAPE, 0).x, layer.make_tokens(other, 0).x)


def test_ramp_goes_from_light_to_dark() -> None:
    brightness = [sum(ramp(share)) for share in (-1.0, 0.0, 0.3, 0.6, 1.0, 2.0)]
    assert brightness[0] == brightness[1] > brightness[2] > brightness[3] > brightness[4] == brightness[5]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["demo", "--ranks", "0"], "--ranks must be at least 1"),
        (["demo", "--ranks", "3", "--experts", "64"], "multiple of --ranks (3), got 64"),
        (["demo", "--experts", "0"], "got 0"),
        (["demo", "--topk", "65"], "at most the number of experts (64), got 65"),
        (["demo", "--tokens", "many"], "invalid int value: 'many'"),
        (["demo", "--plot", "traffic.jpg"], "must name a .png file"),
        (["demo", "--plot", "/no/such/folder/traffic.png"], "there is no folder"),
        (["demo", "--nonsense"], "unrecognized arguments: --nonsense"),
        (["nonsense"], "invalid choice: 'nonsense'"),
    ],
)
def test_bad_options_are_one_line_and_status_2(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(argv) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("deep-ep")
    assert said in err


def test_plot_without_matplotlib_says_what_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    assert cli.main(["demo", "--plot", "traffic.png"]) == 2
    assert "pip install deepep-python[plot]" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "status", "said"),
    [
        (EPError("window: too small"), 2, "deep-ep: window: too small\n"),
        (
            RankFailed('rank 1/4: Traceback (most recent call last):\n  File "x"\nValueError: no\n'),
            2,
            "deep-ep: rank 1/4: ValueError: no\n",
        ),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_are_one_line(
    error: BaseException,
    status: int,
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(ranks, "run_ranks", fail)
    assert cli.main(["demo"]) == status
    assert capsys.readouterr().err == said


def test_a_gpu_that_is_not_there_is_told_of(capsys: pytest.CaptureFixture[str]) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    for argv in (["demo"], ["bench", "layer"]):
        assert cli.main([*argv, "--device", "cuda"]) == 2
        assert "--device cuda needs a GPU, and torch sees none here. Pass --device cpu" in capsys.readouterr().err


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"deep_ep {__version__}\n"
    assert cli.main([]) == 0
    assert "doctor" in capsys.readouterr().out
