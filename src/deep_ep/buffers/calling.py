"""Decorators of the calls of a buffer: the lock, the trace, the report to the peers if a call is left early; names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar, cast

import torch

is_compiling = torch.compiler.is_compiling

F = TypeVar("F", bound=Callable[..., Any])
E = TypeVar("E", bound=BaseException)


def call(method: F) -> F:
    """A method of a buffer that all ranks call together.

    One thread at a time makes it (autograd calls from threads of its own). If an exception leaves it before anything
    was sent, be it a wrong argument or Ctrl-C, that is reported to the peers, so that they do not wait for this rank. A
    trace shows how long the caller was in it. `torch.compile` calls it without tracing inside.
    """
    name = method.__name__

    @functools.wraps(method)
    def made(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            from .untraced import untraced

            return untraced(made, self, *args, **kwargs)
        is_entered = False
        try:
            with self._lock:
                engine, trace = self._engine, self._trace
                engine.expect_call()
                is_entered = True
                try:
                    if trace is None:
                        return method(self, *args, **kwargs)
                    with trace.caller_slice(name):
                        return method(self, *args, **kwargs)
                except BaseException as error:
                    engine.leave(error, name)
                    raise
        except BaseException as error:
            if not is_entered and not isinstance(error, Exception):  # Ctrl-C while another thread was in a call
                refuse(self, name, error)
            raise

    return cast(F, made)


@contextmanager
def preparing(buffer: Any, operation: str) -> Iterator[None]:
    """What a call needs is made in the block. If an exception leaves it, the call is refused."""
    try:
        yield
    except BaseException as error:
        refuse(buffer, operation, error)
        raise


def refuse(buffer: Any, operation: str, error: E) -> E:
    """Report to the peers that this rank does not make a call, because of what went wrong before a method of the buffer
    was called.

    Args:
        buffer: The buffer.
        operation: The name of the method that would have been called.
        error: What went wrong.

    Returns:
        The error, to be raised.
    """
    if not is_compiling():  # a compiler runs the checks where it traces
        with buffer._lock:
            buffer._engine.expect_call()
            buffer._engine.leave(error, operation)
    return error


def across_nodes(method: F) -> F:
    """A call of a buffer under the name that DeepEP gives it across nodes. It is refused inside a node."""
    operation = method.__name__

    @functools.wraps(method)
    def renamed(self: Any, *args: Any, **kwargs: Any) -> Any:
        self._require_nodes(renamed.__name__)
        return getattr(self, operation)(*args, **kwargs)

    renamed.__name__ = f"internode_{operation}"
    renamed.__qualname__ = f"Buffer.{renamed.__name__}"
    renamed.__doc__ = (
        f"`{operation}` under the name that DeepEP gives it across nodes. `{operation}` chooses by itself."
    )
    return cast(F, renamed)
