"""Calls as their callers see them, in a trace."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

F = TypeVar("F", bound=Callable[..., Any])


def traced(method: F) -> F:
    """A method of a buffer whose `_trace` shows how long the caller was in it, if there is one."""
    name = method.__name__

    @functools.wraps(method)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self._trace is None:
            return method(self, *args, **kwargs)
        with self._trace.caller_slice(name):
            return method(self, *args, **kwargs)

    return cast(F, call)
