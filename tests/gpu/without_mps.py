"""Programs that kill ranks: MPS does not survive clients that are killed inside kernels, so they run without it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from deep_ep.tools.mps import LOGS, PIPES

LIMIT_SECS = 250


def results_of(program: str, *args: str) -> Any:
    """Run a program of this folder. Returns what it printed last, as JSON."""
    environment = {name: value for name, value in os.environ.items() if name not in (PIPES, LOGS)}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    command = [sys.executable, program, *args]
    done = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=LIMIT_SECS + 30, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])
