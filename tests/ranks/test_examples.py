"""The programs that users paste: the examples, under torchrun and under run_ranks, and those of the pages of docs/."""

from __future__ import annotations

import contextlib
import io
import os
import re
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from shutil import copytree
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import run_ranks
from deep_ep import Buffer, launch
from deep_ep.tools import plotting

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import decode  # noqa: E402
import overlap  # noqa: E402
import serve_moe  # noqa: E402
import train_moe  # noqa: E402
import train_moe_gloo  # noqa: E402
import training_step  # noqa: E402
import two_nodes  # noqa: E402


def run(*command: str) -> str:
    """What a program says that is started as users do."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def said_by(program: ModuleType, *arguments: str) -> str:
    """What a program says whose ranks come from the suite's forkserver, which has everything imported."""
    out = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
        patch.setattr(sys, "argv", [str(program.__file__), *arguments])
        program.main()
    return out.getvalue()


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 5, 8])
def test_training_step_under_run_ranks(device: str, num_ranks: int) -> None:
    assert max(run_ranks(training_step.step, num_ranks)) < 1e-3


@pytest.mark.parametrize(  # more sizes are under run_ranks, above
    "num_ranks", [pytest.param(1, marks=pytest.mark.exhaustive), 3]
)
@pytest.mark.cpu_only
def test_training_step_under_torchrun(device: str, num_ranks: int) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    out = run(*launcher, "examples/training_step.py")
    assert f"{num_ranks} ranks: forward and backward right" in out


@pytest.mark.cpu_only
def test_training_step_alone(device: str) -> None:
    assert "3 ranks: forward and backward right" in run("examples/training_step.py", "--ranks", "3")


def test_train_moe_does_not_depend_on_the_ranks(device: str) -> None:
    options = train_moe.Options(steps=20, sequences=12, length=32)
    alone, *_ = launch.run_ranks(train_moe.train, 1, options)
    many = launch.run_ranks(train_moe.train, 4, options)
    assert all(result.losses == many[0].losses for result in many)
    assert many[0].losses == pytest.approx(alone.losses, rel=1e-4)
    assert torch.equal(many[0].loads, alone.loads)
    assert alone.losses[-1] < 0.7 * train_moe.unigram_entropy(options.length)


def train_in_all_ways(rank: int, num_ranks: int) -> list[list[float]]:
    """In one process each: an optimizer takes seconds to import."""
    options = train_moe.Options(steps=4, sequences=num_ranks - 1, length=32)
    compiled = replace(options, compiler="aot_eager")
    ways = (options, replace(options, checkpoint=True), replace(options, exchange="gloo"), compiled)
    return [train_moe.train(rank, num_ranks, way).losses for way in ways]


def test_train_moe_checkpointed_and_over_gloo_and_compiled(device: str) -> None:
    """On three ranks, over which experts do not divide evenly, and one of which has no sequences."""
    plain, *others = launch.run_ranks(train_in_all_ways, 3)[0]
    for losses in others:
        assert losses == pytest.approx(plain, rel=1e-4)


def train_ways(rank: int, num_ranks: int, *ways: train_moe.Options) -> list[list[float]]:
    return [train_moe.train(rank, num_ranks, way).losses for way in ways]


@pytest.mark.cpu_only  # ranks that share a GPU have no FSDP2
def test_train_moe_goes_on_with_another_number_of_ranks(tmp_path: Path) -> None:
    options = train_moe.Options(steps=8, sequences=8, length=32, ep=2, device="cpu")
    begun = replace(options, steps=5, state=tmp_path / "state", save_every=3)
    expected, _ = run_ranks(train_ways, 4, options, begun)[0]
    copytree(tmp_path / "state", tmp_path / "other")
    for num_ranks, folder in ((2, "state"), (1, "other")):
        rest = replace(options, ep=0, state=tmp_path / folder)
        (losses,) = run_ranks(train_ways, num_ranks, rest)[0]
        assert losses == pytest.approx(expected[5:], rel=1e-5)


def measure(rank: int, num_ranks: int) -> list[float]:
    buffer = Buffer(dist.group.WORLD)
    shapes = [train_moe_gloo.Shape(30, 16, 4 * num_ranks, 3, dtype) for dtype in (torch.float32, torch.bfloat16)]
    return [number for shape in shapes for number in train_moe_gloo.measure_exchange(buffer, shape)]


@pytest.mark.cpu_only
def test_gloo_does_the_same_work_where_it_is_measured(device: str) -> None:
    """`measure_exchange` compares the results itself."""
    for numbers in run_ranks(measure, 2):
        assert min(numbers) > 0


def steps_told(rank: int, num_ranks: int, options: train_moe.Options) -> str:
    """What a rank says as it trains."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        train_moe.train(rank, num_ranks, options)
    return out.getvalue()


@pytest.mark.parametrize("launcher", [pytest.param("torchrun", marks=pytest.mark.exhaustive), "run_ranks"])
@pytest.mark.cpu_only
def test_train_moe_by_its_command(device: str, launcher: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "examples/train_moe.py")
    picture = tmp_path / "loss.png"
    options = ("--steps", "3", "--sequences", "4", "--plot", str(picture))
    if launcher == "torchrun":
        out = run(*torchrun, *options)
    else:
        out = said_by(train_moe, "--ranks", "2", *options)
        out += run_ranks(steps_told, 2, train_moe.Options(steps=3, sequences=4))[0]
    for word in (
        "step    3/3  loss",
        "tokens/s on 2 ranks",
        "unigram entropy of the text is 2.4",
    ):
        assert word in out
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.cpu_only
def test_train_moe_says_where_it_goes_on(device: str, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / ".metadata").touch()  # of somebody else
    options = train_moe.Options(steps=1, sequences=2, state=tmp_path, device="cpu")
    assert "goes on" not in run_ranks(steps_told, 2, options)[0]
    assert "goes on from the checkpoint of step 1" in run_ranks(steps_told, 2, replace(options, steps=2))[0]
    assert "is of step 1 or later" in said_by(
        train_moe, "--ranks", "2", "--steps", "1", "--sequences", "2", "--state", str(tmp_path)
    )


@pytest.mark.cpu_only
def test_train_moe_interrupted(device: str, tmp_path: Path) -> None:
    command = [sys.executable, "examples/train_moe.py", "--ranks", "1", "--steps", "9999", "--state", str(tmp_path)]
    with subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell's background jobs ignore it
    ) as process:
        assert process.stdout is not None
        assert "step    1/9999" in process.stdout.readline()
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert error == f"train_moe: interrupted. The same command goes on from the last checkpoint in {tmp_path}\n"


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_decode(device: str, num_ranks: int) -> None:
    results = run_ranks(decode.decode, num_ranks, decode.Options(device, tokens=5, hidden=64, layers=2, steps=3))
    assert all(speed > 0 and error < 2e-2 for speed, error in results)


@pytest.mark.cpu_only
def test_decode_alone(device: str) -> None:
    assert "2 ranks on cpu" in said_by(decode, "--steps", "3", "--tokens", "4")


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_overlap(device: str, num_ranks: int) -> None:
    results = run_ranks(overlap.work, num_ranks, overlap.Options(device, layers=2, ms=1.0))
    for without, with_hooks, error in results:
        assert error < 2e-2
        assert [span.what for span in without.spans[:4]] == ["dispatch A", "attention B", "dispatch B", "experts A"]
        assert [span.what for span in with_hooks.spans[-3:]] == [
            "combine B: send",
            "attention A",
            "combine B: receive",
        ]
        assert all(span.start <= span.end for run in (without, with_hooks) for span in run.spans)
        assert min(without.wait_secs, with_hooks.wait_secs) >= 0


@pytest.mark.cpu_only
def test_overlap_alone(device: str, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    out = said_by(overlap, "--layers", "2", "--ms", "1", "--plot", str(tmp_path / "o.png"))
    assert "rank 0 with hooks" in out
    assert "waits:" in out
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


def programs_of(page: str) -> list[str]:
    """The programs of a page that can be pasted: blocks that begin with their imports."""
    return re.findall(r"```python\n(import.*?)```", (ROOT / page).read_text(), flags=re.DOTALL)


def run_pasted(rank: int, num_ranks: int, programs: list[str], name: str) -> list[Any]:
    """A function of pasted programs, on a rank whose process has everything imported."""
    results = []
    for program in programs:
        names: dict[str, Any] = {"__name__": "pasted"}
        exec(program, names)
        results.append(names[name](rank, num_ranks))
    return results


@pytest.mark.cpu_only
def test_the_training_loops_of_pages(device: str) -> None:
    """As they are pasted: one of their ranks has no tokens."""
    programs = [program for page in ("README.md", "docs/training.md") for program in programs_of(page)]
    loops = [program for program in programs if "def train(" in program]
    assert len(loops) == 2
    nothing, *losses = run_ranks(run_pasted, 4, loops, "train")
    assert nothing == [0.0, 0.0]
    assert all(0 < loss < 100 for rank in losses for loss in rank)


@pytest.mark.cpu_only
def test_programs_that_migrate(device: str) -> None:
    """From DeepEP V1, from V2, and from `all_to_all_single`."""
    programs = programs_of("docs/migrating.md")
    assert len(programs) == 3
    assert run_ranks(run_pasted, 4, programs, "main") == [[True, True, True]] * 4


@pytest.mark.cpu_only
def test_serve_moe_survives_a_killed_rank(device: str, tmp_path: Path) -> None:
    sizes = ("--ranks", "3", "--seconds", "2", "--step-ms", "10")
    out = said_by(serve_moe, *sizes, "--kill", "1", "--revive", "--plot", str(tmp_path / "serve.png"))
    for event in ("rank 1 is killed", "rank 1 is started again", "rank 1 serves again"):
        assert event in out
    found = re.search(r"(\d+) answers: (\d+) right, (\d+) flagged as degraded, 0 wrong", out)
    assert found, out
    assert all(int(number) > 0 for number in found.groups()), out
    assert (tmp_path / "serve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(SystemExit):
        said_by(serve_moe, "--revive")


# Ctrl-C while the second rank is started: before, or behind, the moment from which on its process is there.
INTERRUPTED = """
import sys
sys.path.insert(0, "examples")
import multiprocessing.popen_forkserver as popen
import serve_moe

def interrupt(frame, event, arg):
    global num_left
    if event == EVENT and frame.f_code is popen.Popen._launch.__code__:
        num_left -= 1
        if num_left == 0:
            sys.setprofile(None)
            raise KeyboardInterrupt

num_left = 2
sys.argv = ["serve_moe"]
sys.setprofile(interrupt)
serve_moe.main()
"""


@pytest.mark.parametrize("event", ["call", pytest.param("return", marks=pytest.mark.exhaustive)])
@pytest.mark.cpu_only
def test_serve_moe_leaves_no_process_where_its_start_is_interrupted(device: str, event: str) -> None:
    program = INTERRUPTED.replace("EVENT", repr(event))
    # Every process of it inherits the pipe, which ends with the last of them.
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=15, check=False
    )
    assert "KeyboardInterrupt" in done.stderr
    assert "AttributeError" not in done.stderr, done.stderr


@pytest.mark.cpu_only
def test_examples_say_what_they_need(device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if torch.cuda.is_available():
        pytest.skip("a GPU is here")
    for program in (decode, overlap, train_moe):
        with pytest.raises(SystemExit, match="--device cuda needs a GPU, and torch sees none here"):
            said_by(program, "--device", "cuda")
    for program in (overlap, train_moe):
        with pytest.raises(SystemExit, match="there is no folder"):
            said_by(program, "--plot", str(tmp_path / "none" / "picture.png"))
    (tmp_path / "file").touch()
    for options, sentence in {
        ("--ep", "3"): "--ep must divide the 4 ranks, got 3",
        ("--ep", "-1"): "--ep must be at least 1, got -1",
        ("--ep", "2", "--exchange", "gloo"): "leave --ep out",
        ("--state", str(tmp_path / "file")): "--state must be a folder",
    }.items():
        with pytest.raises(SystemExit, match=sentence):
            said_by(train_moe, *options)
    monkeypatch.setattr(plotting.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(SystemExit, match="--plot needs matplotlib, which is not installed"):
        said_by(overlap, "--plot", str(tmp_path / "picture.png"))
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(SystemExit, match="its ranks come from torchrun: DEEP_EP_RANKS_PER_NODE=2 torchrun"):
        two_nodes.main()
