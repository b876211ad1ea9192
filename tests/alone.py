"""Tests beside each other, and tests alone: workers of one run that share a machine take turns.

A test that is marked `alone` is about a limit of a second or so, and would see ranks miss it on a busy machine.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


def is_alone(test: pytest.Item) -> bool:
    """Whether a test must be."""
    return test.get_closest_marker("alone") is not None


@contextmanager
def turn(is_alone: bool) -> Iterator[None]:
    """Inside the block no other worker runs a test, or none that must be alone.

    Who waits to be alone holds the door shut, so that those before it leave and nobody else comes in.
    """
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    if run is None:  # there are no other workers
        yield
        return
    folder = Path(tempfile.gettempdir())
    with open(folder / f"{run}.door", "w") as door, open(folder / f"{run}.room", "w") as room:
        fcntl.flock(door, fcntl.LOCK_EX)
        fcntl.flock(room, fcntl.LOCK_EX if is_alone else fcntl.LOCK_SH)
        fcntl.flock(door, fcntl.LOCK_UN)
        yield


def forget() -> None:
    """At the end of a run: remove what it took turns by."""
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID")
    for name in ("door", "room"):
        if run is not None:
            (Path(tempfile.gettempdir()) / f"{run}.{name}").unlink(missing_ok=True)
