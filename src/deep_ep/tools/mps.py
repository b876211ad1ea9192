"""MPS, for ranks that share a GPU.

Without CUDA's multi-process service their kernels take turns: all is right, but every wait of one rank for another
costs milliseconds, and times mean nothing.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import torch

from ..launch import RankFailed, run_ranks

CONTROL = "nvidia-cuda-mps-control"
PIPES, LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"

_TIMEOUT_SECS = 20.0  # for the daemon to answer, and to end
_FIRST_SECS = 120.0  # for the first client, which waits for the server to start


@contextmanager
def shared_gpu(num_ranks: int | None = None) -> Iterator[bool]:
    """Have processes that are started inside share a GPU well: with MPS, where it can be had.

    A daemon that is configured already (`CUDA_MPS_PIPE_DIRECTORY`) is left alone. One that is started here lives in a
    folder of its own and ends with the block, leaving nothing. This process must not have used CUDA: it would stay
    outside, and take turns with those that are inside.

    Args:
        num_ranks: Start it only if so many ranks are more than the GPUs. None: start it anyway.

    Yields:
        Whether MPS is on.
    """
    if os.environ.get(PIPES):
        yield _ask("get_server_list") is not None
        return
    is_shared = num_ranks is None or num_ranks > torch.cuda.device_count()  # asks NVML: no context is made
    if not is_shared or shutil.which(CONTROL) is None:
        yield False
        return
    with tempfile.TemporaryDirectory(prefix="deep_ep-mps-", ignore_cleanup_errors=True) as name:
        folder = Path(name)
        reason = None
        with _environment({PIPES: str(folder / "pipes"), LOGS: str(folder / "logs")}):
            try:
                reason = _start(folder)
                if reason is None:
                    yield True
            finally:
                _stop(folder / "pipes")
        if reason is not None:
            warnings.warn(f"MPS could not be started: {reason}. Ranks take turns on the GPU", stacklevel=3)
            yield False


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set environment variables that are not set."""
    os.environ.update(variables)
    try:
        yield
    finally:
        for name in variables:
            os.environ.pop(name, None)


def _start(folder: Path) -> str | None:
    """Start the daemon and its server. Returns what went wrong, or None."""
    for name in ("pipes", "logs"):
        (folder / name).mkdir()
    said = folder / "said"  # not a pipe: the daemon may keep it open
    with said.open("wb") as output:
        try:
            subprocess.run([CONTROL, "-d"], check=True, timeout=_TIMEOUT_SECS, stdout=output, stderr=output)
        except (OSError, subprocess.SubprocessError) as error:
            return f"{error} {said.read_text(errors='replace').strip()}".strip()
    try:
        run_ranks(_touch, 1, limit_secs=_FIRST_SECS)  # the first client starts the server; let it be in no hurry
    except RankFailed as error:
        return str(error).strip().splitlines()[-1]
    return None


def _touch(rank: int, num_ranks: int) -> None:
    """A small CUDA program."""
    del rank, num_ranks
    torch.ones(1, device="cuda").sum().item()


def _stop(pipes: Path) -> None:
    """End the daemon and its servers: by asking, and those that do not hear by force."""
    pids = _pids(pipes)
    _ask("quit")
    deadline = time.monotonic() + _TIMEOUT_SECS
    while (left := [pid for pid in pids if _is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.05)
    for pid in left:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _pids(pipes: Path) -> list[int]:
    """The daemon that was started in a folder, and its servers."""
    texts = (_ask("get_server_list") or "").split()
    with suppress(OSError):
        texts += (pipes / f"{CONTROL}.pid").read_text().split()
    return [int(text) for text in texts if text.isdecimal()]


def _is_running(pid: int) -> bool:
    """Whether a process is there, and not only waiting for its parent to notice its end (a container may have none)."""
    try:
        return ") Z" not in Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False


def _ask(command: str) -> str | None:
    """What the daemon answers, or None where there is none."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            [CONTROL], input=command + "\n", text=True, capture_output=True, timeout=_TIMEOUT_SECS, check=True
        )
        return done.stdout
    return None
