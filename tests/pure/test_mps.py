"""MPS is started and ended, and leaves nothing: with a program in the place of NVIDIA's that notes how it is called."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from deep_ep.tools import mps

# Like the real one: `-d` leaves a process with a .pid file, and commands come on stdin, refused if there is none.
DAEMON = """#!/bin/sh
file="$CUDA_MPS_PIPE_DIRECTORY/nvidia-cuda-mps-control.pid"
if [ "$1" = "-d" ]; then
    echo start >> "$NOTES"
    if [ -n "$BROKEN" ]; then echo "no device" >&2; exit 1; fi
    sleep 600 >/dev/null 2>&1 &
    echo $! > "$file"
    exit 0
fi
[ -e "$file" ] || exit 1
read -r command
echo "$command" >> "$NOTES"
if [ "$command" = quit ] && [ -z "$DEAF" ]; then kill "$(cat "$file")"; rm "$file"; fi
"""


@pytest.fixture(autouse=True)
def notes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two GPUs and the program; where it writes what it was asked."""
    program = tmp_path / "bin" / mps.CONTROL
    program.parent.mkdir()
    program.write_text(DAEMON)
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    for name in (mps.PIPES, mps.LOGS):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(mps, "run_ranks", lambda *_, **__: [None])
    monkeypatch.setattr(mps.torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(mps, "_TIMEOUT_SECS", 1.0)
    return tmp_path / "notes"


def is_on_and_configured() -> bool:
    with mps.shared_gpu() as is_on:
        assert is_on == (mps.PIPES in os.environ)
        return is_on


def left_over(tmp_path: Path) -> list[str]:
    return [path.name for path in tmp_path.iterdir() if path.name not in ("bin", "notes")]


def test_it_is_on_inside_and_gone_after(tmp_path: Path, notes: Path):
    with mps.shared_gpu() as is_on:
        assert is_on
        pipes = Path(os.environ[mps.PIPES])
        assert Path(os.environ[mps.LOGS]).is_dir()
        pid = int((pipes / f"{mps.CONTROL}.pid").read_text())
        assert Path(f"/proc/{pid}").exists()
    assert mps.PIPES not in os.environ
    assert mps.LOGS not in os.environ
    assert notes.read_text().split() == ["start", "get_server_list", "quit"]
    assert left_over(tmp_path) == []


def test_it_ends_also_when_the_block_fails(tmp_path: Path, notes: Path):
    with pytest.raises(KeyboardInterrupt), mps.shared_gpu():
        raise KeyboardInterrupt
    assert "quit" in notes.read_text()
    assert mps.PIPES not in os.environ
    assert left_over(tmp_path) == []


def test_one_that_does_not_hear_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEAF", "1")
    with mps.shared_gpu():
        pid = int((Path(os.environ[mps.PIPES]) / f"{mps.CONTROL}.pid").read_text())
    deadline = time.monotonic() + 5.0
    while mps._is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not mps._is_running(pid)
    assert left_over(tmp_path) == []


def test_ranks_that_do_not_share_need_none(notes: Path, tmp_path: Path):
    with mps.shared_gpu(2) as is_on:
        assert not is_on
    assert not notes.exists()
    with mps.shared_gpu(3) as is_on:
        assert is_on
    assert left_over(tmp_path) == []


def test_one_that_is_configured_is_left_alone(notes: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv(mps.PIPES, str(tmp_path))
    with mps.shared_gpu() as is_on:
        assert not is_on  # nobody answers there
    (tmp_path / f"{mps.CONTROL}.pid").write_text("1")
    with mps.shared_gpu() as is_on:
        assert is_on
    assert notes.read_text().split() == ["get_server_list"]
    assert os.environ[mps.PIPES] == str(tmp_path)


def test_a_machine_without_the_program(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with mps.shared_gpu() as is_on:
        assert not is_on


def test_one_that_cannot_start_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("BROKEN", "1")
    with pytest.warns(UserWarning, match=r"MPS could not be started: .*no device"):
        assert not is_on_and_configured()
    assert left_over(tmp_path) == []


def test_one_that_serves_nobody_is_done_without(tmp_path: Path, notes: Path, monkeypatch: pytest.MonkeyPatch):
    def fail(*args: object, **options: object) -> None:
        raise mps.RankFailed("rank 0/1: Traceback\nRuntimeError: CUDA error 805")

    monkeypatch.setattr(mps, "run_ranks", fail)
    with pytest.warns(UserWarning, match="CUDA error 805"):
        assert not is_on_and_configured()
    assert "quit" in notes.read_text()
    assert left_over(tmp_path) == []
