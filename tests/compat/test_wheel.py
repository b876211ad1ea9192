"""The wheel alone: what a user gets who installs it, with what it declares and nothing else."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import venv
import zipfile
from collections.abc import Iterable
from email.parser import HeaderParser
from importlib import metadata, util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
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


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree, built without a network."""
    if util.find_spec("hatchling") is None:
        pytest.skip("building the wheel needs hatchling")
    folder = tmp_path_factory.mktemp("wheel")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(folder)]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=120)
    (built,) = folder.glob("*.whl")
    return built


def requirements_of(wheel: Path) -> list[str]:
    """What it declares."""
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return HeaderParser().parsestr(archive.read(name).decode()).get_all("Requires-Dist", [])


def closure(requirements: Iterable[str]) -> dict[str, metadata.Distribution]:
    """The distributions of this environment that these requirements need, and those that they need, by name."""
    from packaging.requirements import Requirement  # hatchling and pytest bring it

    found: dict[str, metadata.Distribution] = {}
    pending = [(Requirement(text), {""}) for text in requirements]
    while pending:
        requirement, extras = pending.pop()
        if requirement.marker and not any(requirement.marker.evaluate({"extra": extra}) for extra in extras):
            continue
        name = re.sub(r"[-_.]+", "-", requirement.name).lower()
        if name not in found:
            found[name] = metadata.distribution(name)
            assert requirement.specifier.contains(found[name].version, prereleases=True), requirement
            wanted = {"", *requirement.extras}
            pending += [(Requirement(text), wanted) for text in found[name].requires or []]
    return found


def link(distribution: metadata.Distribution, site: Path) -> None:
    """Have a distribution in another environment, too."""
    for top in {file.parts[0] for file in distribution.files or []} - {"..", "__pycache__"}:
        target = site / top
        if not target.exists():
            target.symlink_to(Path(str(distribution.locate_file(top))).resolve())


def make_environment(folder: Path, wheel: Path) -> Path:
    """A virtual environment of the wheel and what it declares. Returns its interpreter."""
    venv.create(folder, symlinks=True, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    for distribution in closure(requirements_of(wheel)).values():
        link(distribution, site)
    return folder / "bin" / "python"


def start(python: Path, folder: Path, *command: str) -> subprocess.Popen:
    """A program in that environment, in a folder that knows nothing of this tree."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "TMPDIR", "LANG") if name in os.environ}
    return subprocess.Popen(
        [str(python), *command],
        cwd=folder,
        env={**kept, "PYTHONNOUSERSITE": "1"},
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def test_the_wheel_holds_everything(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    for path in (ROOT / "src").rglob("*"):
        if path.is_file() and "__pycache__" not in path.parts:
            assert str(path.relative_to(ROOT / "src")) in held


def test_nothing_else_brings_numpy(wheel: Path) -> None:
    """So that the test below can fail: an environment without its declaration has none."""
    requirements = requirements_of(wheel)
    assert "numpy" in closure(requirements)
    assert "numpy" not in closure(text for text in requirements if not text.startswith("numpy"))


@pytest.mark.cpu_only  # a GPU's torch declares what only a GPU has
def test_two_ranks_run_with_what_is_declared(wheel: Path, tmp_path: Path) -> None:
    python = make_environment(tmp_path / "env", wheel)
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "program.py").write_text(PROGRAM)
    declared = closure(requirements_of(wheel))
    absent = [name for name in ("triton", "matplotlib", "pytest", "hypothesis") if name not in declared]
    small = ["--ranks", "2", "--tokens", "8", "--hidden", "16", "--experts", "4", "--topk", "2"]
    # Both at once: most of their time is spent on importing torch.
    demo = start(python, folder, "-m", "deep_ep", "demo", *small)
    program = start(python, folder, "program.py", *absent)
    try:
        said, errors = program.communicate(timeout=120)
        assert program.returncode == 0, errors
        results, found = said.strip().rsplit(" ", 1)
        assert found == "[]"
        assert results.count("True") == 2
        assert str(tmp_path / "env") in results
        said, errors = demo.communicate(timeout=120)
        assert demo.returncode == 0, errors
        assert "OK" in said
        assert "not OK" not in said
    finally:
        for process in (demo, program):
            process.kill()
            process.wait()
