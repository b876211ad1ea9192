"""README as a stranger meets it: its programs and commands, pasted into an empty folder, with the wheel installed."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from installed import ROOT, start

README = (ROOT / "README.md").read_text()
PROGRAMS = {
    re.findall(r"^def (\w+)", block, re.M)[0]: block for block in re.findall(r"```python\n(.*?)```", README, re.S)
}
COMMANDS = [
    line.split("#")[0].strip() for block in re.findall(r"```sh\n(.*?)```", README, re.S) for line in block.splitlines()
]
NOT_RUN = {
    "pip install .": "it needs a network for what the wheel declares; the fixture installs the wheel without one",
    "python -m deep_ep demo": "the line that traces it runs the same",
    "python -m deep_ep demo --device cuda": "it needs a GPU",
}


def output_of(command: list[str], folder: Path, python: Path) -> str:
    """What a command says, in an environment whose `python` is that of the wheel."""
    process = start(command, folder, {"PATH": f"{python.parent}:/usr/bin:/bin"})
    try:
        said, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said + errors
    return said


@pytest.mark.parametrize(  # the loop of training is in tests/ranks/test_examples.py, too, where all is imported already
    "name", [pytest.param(name, marks=pytest.mark.exhaustive if name == "train" else ()) for name in PROGRAMS]
)
@pytest.mark.cpu_only
def test_a_program_runs_when_it_is_pasted(name: str, installed: Path, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAMS[name])
    results = ast.literal_eval(output_of(["python", "program.py"], tmp_path, installed))
    if name == "train":
        assert results[0] == 0.0  # a rank without tokens
        assert all(0 < loss < 100 for loss in results[1:])
    else:
        assert results == [True, True, True, True]


@pytest.mark.cpu_only
def test_commands_run_when_they_are_pasted(installed: Path, tmp_path: Path) -> None:
    assert set(NOT_RUN) <= set(COMMANDS)
    said = [output_of(["sh", "-c", command], tmp_path, installed) for command in COMMANDS if command not in NOT_RUN]
    assert len(said) == len(COMMANDS) - len(NOT_RUN)
    assert all(said[0].count(word) for word in ("Who sends what to whom", "OK"))
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")
    assert "tokens/s" in said[-1]


def test_it_is_short() -> None:
    """One screen to understand it, one to run it."""
    assert set(PROGRAMS) == {"main", "train", "decode"}
    assert len(README.splitlines()) <= 150
    assert len([line for line in PROGRAMS["main"].splitlines() if line]) <= 17
