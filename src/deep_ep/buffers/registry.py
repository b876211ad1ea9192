"""Buffers by number, for custom operators: their arguments are tensors and numbers.

The table holds nothing alive: a buffer that nobody else has is gone from it.
"""

from __future__ import annotations

import itertools
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
    """The buffer of a number.

    Raises:
        EPClosed: It is gone.
    """
    buffer = _buffers.get(number)
    if buffer is None:
        raise EPClosed(f"operator: buffer {number} is gone. Keep the buffer as long as a compiled model uses it")
    return buffer
