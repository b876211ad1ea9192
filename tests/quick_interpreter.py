"""Make Triton's interpreter faster: half of its time went into doing things again.

It patches its language around every launch, and anew at every call of one kernel function by another. Nothing is
compiled in processes that interpret, so once is enough, and nobody needs the originals back. It makes a table of all
types to look one up. And it computes whether integers overflow, which it tells nobody unless it debugs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from triton.runtime import interpreter


class _Kept:
    """What an interpreter's call takes back at its end: nothing."""

    def restore(self) -> None:
        """Leave the language as it is."""


def _once(patch: Callable[[Any], Any]) -> Callable[[Any], _Kept]:
    """`patch` for the first function of each module, which decides what of the language it sees."""
    seen: set[int] = set()

    def patch_module(function: Any) -> _Kept:
        names = function.__globals__
        if id(names) not in seen:
            seen.add(id(names))
            patch(function)
        return _Kept()

    return patch_module


def _remembered(look_up: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`look_up` of a type, once for each name."""
    known: dict[str, Any] = {}

    def look_up_name(one: Any) -> Any:
        found = known.get(one.name)
        if found is None:
            found = known[one.name] = look_up(one)
        return found

    return look_up_name


if hasattr(interpreter, "_patch_lang"):  # in other versions the suite may just be slower
    interpreter._patch_lang = _once(interpreter._patch_lang)
if hasattr(interpreter, "_get_np_dtype"):
    interpreter._get_np_dtype = _remembered(interpreter._get_np_dtype)
if hasattr(interpreter, "interpreter_builder"):
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
