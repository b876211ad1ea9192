"""The wheel alone: what a user gets who installs it, with what it declares and nothing else."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from installed import ROOT, closure, requirements_of, start

PROGRAM = """
import importlib.util
import sys

import torch
import torch.distributed as dist

import deep_ep
import deep_ep_cpp
from deep_ep.launch import run_ranks


def main(rank, num_ranks):
    with deep_ep.Buffer(dist.group.WORLD, 1 << 20, device="cpu") as buffer:
        topk_idx = torch.arange(6).view(3, 2) % num_ranks
        per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, num_ranks)
        x = torch.full((3, 8), float(rank))
        recv_x, _, _, _, handle, _ = buffer.dispatch(x, None, per_rank, None, mask, per_expert)
        combined, _, _ = buffer.combine(recv_x, handle)
        return torch.equal(combined, x * mask.sum(1, keepdim=True)), deep_ep.__file__


if __name__ == "__main__":
    optional = [name for name in sys.argv[1:] if importlib.util.find_spec(name) is not None]
    print(run_ranks(main, 2), optional)
"""

CLIENT = """
import torch
import torch.distributed as dist

from deep_ep import Buffer
from deep_ep.launch import run_ranks


def main(rank: int, num_ranks: int) -> list[int] | None:
    buffer = Buffer(dist.group.WORLD, 1 << 20)
    counts: list[int] | None = buffer.dispatch(torch.ones(1, 1))[3]
    buffer.dispatch(1)
    return counts


run_ranks(main, num_ranks=2)
"""


def test_the_wheel_holds_everything(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    for path in (ROOT / "src").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT / "src")) in held
    assert "deep_ep/py.typed" in held


@pytest.mark.exhaustive  # mypy reads torch for ten seconds
def test_type_checkers_see_the_types(installed: Path, tmp_path: Path) -> None:
    (tmp_path / "client.py").write_text(CLIENT)
    checker = [sys.executable, "-m", "mypy", "--strict", f"--python-executable={installed}", "client.py"]
    said = subprocess.run(checker, cwd=tmp_path, capture_output=True, text=True, timeout=200).stdout
    assert "Found 1 error in 1 file" in said
    assert 'Argument 1 to "dispatch" of "Buffer" has incompatible type "int"' in said


def test_nothing_else_brings_numpy(wheel: Path) -> None:
    """So that the test below can fail: an environment without its declaration has none."""
    requirements = requirements_of(wheel)
    assert "numpy" in closure(requirements)
    assert "numpy" not in closure(text for text in requirements if not text.startswith("numpy"))


@pytest.mark.cpu_only  # a GPU's torch declares what only a GPU has
def test_two_ranks_run_with_what_is_declared(wheel: Path, installed: Path, tmp_path: Path) -> None:
    python = str(installed)
    (tmp_path / "program.py").write_text(PROGRAM)
    declared = closure(requirements_of(wheel))
    absent = [name for name in ("triton", "matplotlib", "pytest", "hypothesis") if name not in declared]
    process = start([python, "program.py", *absent], tmp_path)
    try:
        said, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, errors
    results, found = said.strip().rsplit(" ", 1)
    assert found == "[]"
    assert results.count("True") == 2
    assert str(installed.parents[1]) in results
