"""The file of a trace: a JSON array of events, which can be read however early its writer ends."""

from __future__ import annotations

import json
import os
import threading
import weakref
from pathlib import Path
from typing import Any

_MOST_PENDING = 1024  # events in memory
# Made once: that costs more than to use it.
_encode = json.JSONEncoder(separators=(",", ":"), check_circular=False).encode
_FIRST, _NEXT = "[\n", ",\n"  # what comes before events


class TraceFile:
    """Events on their way to a file, one a line.

    The format allows the closing bracket to be missing, so what was flushed is a trace, also after `kill -9`.

    Args:
        path: Overwritten.

    Raises:
        OSError: It cannot be written.
    """

    def __init__(self, path: Path):
        self.path = path
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        self._lock = threading.Lock()
        self._pending: list[str] = []
        self._start = _FIRST
        _files.add(self)

    def add(self, event: dict[str, Any]) -> None:
        """Add an event. Any thread may."""
        line = _encode(event)
        with self._lock:
            self._pending.append(line)
            if len(self._pending) >= _MOST_PENDING:
                self._write()

    def flush(self) -> None:
        """Hand everything to the system."""
        with self._lock:
            self._write()

    def close(self) -> None:
        """Write what is left, and close the array. A second call does nothing."""
        with self._lock:
            if self._fd >= 0:
                self._write("\n]\n")
            self._close()

    def _close(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _write(self, end: str = "") -> None:
        lines, self._pending = self._pending, []
        if self._fd < 0 or not (lines or end):
            return
        start = self._start if lines or self._start == _FIRST else ""
        data = (start + ",\n".join(lines) + end).encode()
        self._start = _NEXT
        try:
            while data:
                data = data[os.write(self._fd, data) :]
        except OSError:
            self._close()  # a full disk must not stop the communication that it was to tell of

    def _forget(self) -> None:
        """In a forked child, which is not the rank that the file tells of: let go of it."""
        self._lock = threading.Lock()  # a thread of the parent may have held it
        self._pending.clear()
        self._close()


_files: weakref.WeakSet[TraceFile] = weakref.WeakSet()


def _forget_all() -> None:
    for file in list(_files):
        file._forget()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_all)
