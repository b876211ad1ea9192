"""Opening a trace: all ranks of a buffer agree on a clock, and each makes its file."""

from __future__ import annotations

import functools
import os
import secrets
import time
from pathlib import Path
from typing import Any

from .. import env
from ..control import Control
from ..topology import host_id
from .clock import compare_clocks
from .file import TraceFile
from .recorder import Trace

_opened: set[Path] = set()  # by this process: later buffers take other names


def open_trace(folder: str | os.PathLike[str] | None, control: Control) -> Trace | None:
    """Open the trace of a new buffer. All ranks call it together, whether they want one or not.

    Args:
        folder: Where this rank writes its file; made if need be. Empty: nowhere. None: as `DEEP_EP_TRACE` says.
        control: The group.

    Returns:
        None: this rank records nothing.

    Raises:
        ValueError: A rank cannot write its file. All ranks raise.
    """
    if folder is not None and not isinstance(folder, (str, os.PathLike)):
        raise TypeError(f"Buffer: `trace` must be the name of a folder, got {type(folder).__name__}")
    wish = os.fspath(folder) if folder is not None else env.TRACE.get()
    file, problem = None, None
    if wish:
        try:
            file = _open(Path(wish), control)
        except OSError as error:
            problem = f"{error.filename or wish}: {error.strerror}"
    answers = control.gather((bool(wish), problem, host_id(), secrets.token_hex(8)), "opening the trace")
    problems = [f"rank {rank}: {said[1]}" for rank, said in enumerate(answers) if said[1]]
    if problems:
        raise ValueError(
            f"Buffer: the trace cannot be written: {'; '.join(problems)}. Give `trace` or {env.TRACE.name} the name of "
            "a folder that can be written, or neither"
        )
    if not any(wants for wants, _, _, _ in answers):
        return None
    clock = compare_clocks(control, [host for _, _, host, _ in answers])
    if file is None:
        return None
    return Trace(file, control.rank, clock, len(_opened) - 1, _facts(control, answers[0][3]))


def _open(folder: Path, control: Control) -> TraceFile:
    folder.mkdir(parents=True, exist_ok=True)
    # The file of a process that has ended stays: the one that takes its position writes another.
    name = f"rank{control.rank}" + (f"-generation{control.generation}" if control.generation else "")
    path = folder.absolute() / f"{name}.json"
    number = 2
    while path in _opened:
        path = folder.absolute() / f"{name}-{number}.json"
        number += 1
    file = TraceFile(path)
    _opened.add(path)
    control.undo(_discard, file)
    return file


def _discard(file: TraceFile) -> None:
    """Remove the file of a buffer that was not made."""
    file.close()
    file.path.unlink(missing_ok=True)
    _opened.discard(file.path)


@functools.cache
def _process(pid: int) -> str:
    """A name that no other process has or had, whatever its number."""
    return f"{pid} {secrets.token_hex(8)}"


def _facts(control: Control, buffer: str) -> dict[str, Any]:
    return {
        "num_ranks": control.num_ranks,
        "host": host_id(),
        "process": _process(os.getpid()),
        "buffer": buffer,  # the same on all ranks: tells files of one run from those of another
        "begun": time.time(),
    }
