"""Buffers by number, for custom operators: their arguments are tensors and numbers.

The table has weak references only: a buffer that is not referenced elsewhere is removed from it.
"""

from __future__ import annotations

import itertools
import os
import weakref
from typing import Any

from ..errors import EPClosed

_numbers = itertools.count()
_buffers: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()


def register(buffer: Any) -> int:
    """Give a buffer a number of this process, which no other ever gets."""
    number = next(_numbers)
    _buffers[number] = buffer
    return number


def find(number: int) -> Any:
    """Return the buffer of a number.

    Raises:
        EPClosed: It is gone.
    """
    buffer = _buffers.get(number)
    if buffer is None:
        raise EPClosed(f"operator: buffer {number} is gone. Keep the buffer as long as a compiled model uses it")
    return buffer


class ForkedLock:
    """The lock of a buffer in a forked child. Every method acquires it, which raises, and so none goes further.

    Calls need not check whether they are in the process that made the buffer, and a lock that another thread of the
    parent held at the fork is not waited for.

    Args:
        reason: The sentence to raise.
    """

    def __init__(self, reason: str):
        self._reason = reason

    def __enter__(self) -> None:
        raise EPClosed(f"Buffer: {self._reason}")

    def __exit__(self, *error: object) -> None:
        pass


def _refuse_all() -> None:
    for buffer in list(_buffers.values()):
        buffer.refuse_in_child()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_refuse_all)
