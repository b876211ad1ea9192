"""The programs that users paste: README's first one, and the examples, under torchrun and under run_ranks."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from common import run_ranks

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "examples"))

import decode  # noqa: E402
import overlap  # noqa: E402
import train_moe  # noqa: E402
import training_step  # noqa: E402


def run(*command: str) -> str:
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, timeout=240, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_training_step_under_run_ranks(device: str, num_ranks: int) -> None:
    assert max(run_ranks(training_step.step, num_ranks)) < 1e-3


@pytest.mark.parametrize("num_ranks", [1, 2, 6])  # every size is under run_ranks, above
@pytest.mark.cpu_only
def test_training_step_under_torchrun(device: str, num_ranks: int) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks))
    out = run(*launcher, "examples/training_step.py")
    assert f"{num_ranks} ranks: forward and backward right" in out


@pytest.mark.cpu_only
def test_training_step_alone(device: str) -> None:
    assert "3 ranks: forward and backward right" in run("examples/training_step.py", "--ranks", "3")


def test_train_moe(device: str) -> None:
    options = train_moe.Options(steps=8, sequences=2, length=24)
    losses, same = run_ranks(train_moe.train, 2, options)
    assert losses == same
    assert losses[-1] < 0.9 * losses[0]
    assert run_ranks(train_moe.train, 2, replace(options, checkpoint=True))[0] == pytest.approx(losses, rel=1e-3)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_decode(device: str, num_ranks: int) -> None:
    results = run_ranks(decode.decode, num_ranks, decode.Options(device, tokens=5, hidden=64, layers=2, steps=3))
    assert all(speed > 0 and error < 2e-2 for speed, error in results)


@pytest.mark.cpu_only
def test_decode_alone(device: str) -> None:
    assert "2 ranks on cpu" in run("examples/decode.py", "--steps", "3", "--tokens", "4")


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
    out = run("examples/overlap.py", "--layers", "2", "--ms", "1", "--plot", str(tmp_path / "o.png"))
    assert "rank 0 with hooks" in out
    assert "waits:" in out
    assert (tmp_path / "o.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.cpu_only
def test_the_program_in_the_readme(device: str, tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    program = tmp_path / "first.py"
    program.write_text(blocks[0])
    assert len([line for line in blocks[0].splitlines() if line]) <= 17
    assert run(str(program)).strip() == "[True, True, True, True]"
