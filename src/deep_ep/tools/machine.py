"""What the machine is: facts that `doctor` shows, and that a benchmark keeps beside its figures."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


def find_machine(version: str) -> dict[str, Any]:
    """What figures depend on. To be asked before the run: later its own ranks are the load.

    Args:
        version: Of deep_ep.
    """
    total_kib = value_in("/proc/meminfo", "MemTotal")
    return {
        "cpu": value_in("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": num_usable_cores(),
        "load": os.getloadavg()[0],
        "memory_bytes": int(total_kib.split()[0]) * 1024 if total_kib else None,
        "system": f"{platform.system()} {platform.release().split('-')[0]} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "deep_ep": version,
    }


def num_usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def value_in(path: str, name: str) -> str:
    """What the first line `name: value` says; nothing where there is no such file or line."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return ""
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(name)), "")
