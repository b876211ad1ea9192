"""Software, machine and settings."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist

from ... import env
from ...transport.memory import available_bytes
from ..machine import num_usable_cores
from ..plotting import INSTALL
from .report import NOTE, OK, PROBLEM, Finding, VariableReport

_LEAST_MEMORY_BYTES = 1 << 30
_UNKNOWN_MEMORY_BYTES = 1 << 60


def look_at_software() -> Iterator[Finding]:
    """Python and the packages."""
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("torch", torch.__version__)
    if dist.is_available() and dist.is_gloo_available():
        yield Finding("torch.distributed", "with gloo")
    else:
        advice = "`deep-ep demo` and this round trip need gloo: install a torch build that has it"
        yield Finding("torch.distributed", "without gloo", PROBLEM, advice)
    yield _optional_package("triton", "Only GPU kernels need it; CPU ranks do not. pip install triton")
    yield _optional_package("matplotlib", f"Only `--plot` of demo and bench needs it. {INSTALL}")


def _optional_package(name: str, advice: str) -> Finding:
    try:
        importlib.import_module(name)
        return Finding(name, importlib.metadata.version(name))
    except ImportError as error:
        reason = "not installed" if isinstance(error, ModuleNotFoundError) and error.name == name else str(error)
        return Finding(name, reason, NOTE, advice)
    except Exception as error:  # a broken installation may raise anything; it is a finding all the same
        return Finding(name, f"cannot be imported: {error}", NOTE, advice)


def look_at_machine() -> Iterator[Finding]:
    """GPUs, system, cores and memory."""
    yield _cuda()
    advice = "Linux is needed for more than one rank; a group of one rank works" if sys.platform != "linux" else ""
    yield Finding("platform", platform.platform(), PROBLEM if advice else OK, advice)
    num_usable = num_usable_cores()
    few = "" if num_usable > 1 else "Ranks take turns on one core: results are right, times mean little"
    yield Finding("CPU cores", f"{num_usable} usable of {os.cpu_count() or 1}", NOTE if few else OK, few)
    yield _memory(available_bytes())


def _cuda() -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("CUDA", f"{len(names)} visible: {', '.join(sorted(set(names)))}")
    if torch.version.cuda is None:
        return Finding("CUDA", "this torch is built without it", NOTE, "CPU ranks work. GPUs need torch's CUDA build")
    advice = "CPU ranks work. For GPUs check `nvidia-smi`, CUDA_VISIBLE_DEVICES and the container's device options"
    return Finding("CUDA", f"torch has CUDA {torch.version.cuda}, but no GPU is visible", NOTE, advice)


def _memory(num_bytes: int) -> Finding:
    value = f"{num_bytes / 1e9:.1f} GB available" if num_bytes < _UNKNOWN_MEMORY_BYTES else "unknown"
    if num_bytes >= _LEAST_MEMORY_BYTES:
        return Finding("memory", value)
    advice = "Received tensors may not fit. Use fewer ranks or tokens, or raise the container's memory limit"
    return Finding("memory", value, NOTE, advice)


def settings() -> dict[str, str]:
    """Our environment variables that are set, as they are written."""
    return {variable.name: text for variable in env.VARIABLES if (text := os.environ.get(variable.name, "").strip())}


def look_at_names() -> list[Finding]:
    """Variables with a mistake in their names, which have no effect."""
    return [Finding(name, "there is no such variable", NOTE, advice) for name, advice in env.unknown().items()]


def look_at_variables() -> list[VariableReport]:
    """Every environment variable of ours."""
    return [_variable(variable) for variable in env.VARIABLES]


def _variable(variable: env.Variable) -> VariableReport:
    try:
        found, status = variable.get(), OK
        value = "" if found is None else str(found)
    except ValueError as error:
        value, status = str(error), PROBLEM
    return VariableReport(variable.name, variable.name in settings(), value, status, variable.help)
