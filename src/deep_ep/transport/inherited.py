"""Descriptors that a forked child inherits and must not keep: sockets to other ranks, and pidfds.

A connection ends when the last process that has it open closes it. A child that kept one would hide from the peers that
its parent has ended. The child closes its copies without `shutdown()`, which would end the connection for the parent,
too. `memory.py` looks after mappings.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Protocol


class Closable(Protocol):
    """An object that can be closed in this process alone."""

    def close(self) -> None:
        """Close it, without an effect on other processes."""


_ours: weakref.WeakSet[Closable] = weakref.WeakSet()


def close_in_children(*things: Closable) -> None:
    """Have forked children close their copies of these."""
    for thing in things:
        _ours.add(thing)


def _close_all() -> None:
    for thing in list(_ours):
        with contextlib.suppress(OSError):
            thing.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_all)
