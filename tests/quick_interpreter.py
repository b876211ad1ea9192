"""Make Triton's interpreter faster: most of its time went into doing things again.

It patches its language around every launch, and anew at every call of one kernel function by another. Nothing is
compiled in processes that interpret, so once is enough, and nobody needs the originals back. It makes a table of all
types to look one up, and types of blocks, with their names and checked shapes, for every value. It compares shapes by
way of a type for each. And it computes whether integers overflow, which it tells nobody unless it debugs.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from triton.language import core
from triton.language.semantic import TritonSemantic
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


def _quickly_unwrapped(unwrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`unwrap` of a constant, at once for what is none."""
    plain = {int, float, bool, str, type(None), core.dtype, core.pointer_type, core.block_type, core.tensor}

    def unwrapped(one: Any) -> Any:
        if type(one) in plain:
            return one
        return one.value if type(one) is core.constexpr else unwrap(one)

    return unwrapped


def _made_like(make: Callable[..., None]) -> Callable[..., None]:
    """A tensor's `__init__`: tensors of one type have the same of everything but the handle."""
    known: dict[str, dict[str, Any]] = {}

    @functools.wraps(make)
    def quick_make(self: Any, handle: Any, type: Any) -> None:
        found = known.get(type.name)
        if found is None:
            make(self, handle, type)
            known[type.name] = dict(self.__dict__)
            return
        self.__dict__.update(found)
        self.handle = handle
        self.type = type
        self.dtype = type.scalar

    return quick_make


def _shaped_like(make: Callable[..., None]) -> Callable[..., None]:
    """A block type's `__init__`: the name and the checked shape, once for each."""
    known: dict[tuple, dict[str, Any]] = {}

    @functools.wraps(make)
    def quick_make(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *(getattr(one, "value", one) for one in shape))
        found = known.get(key)
        if found is None:
            make(self, element_ty, shape)
            found = known[key] = dict(self.__dict__)
        self.__dict__.update(found)
        self.element_ty = element_ty

    return quick_make


def _with_element(make: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """A block type's `with_element_ty`: the same type for the same elements."""

    @functools.wraps(make)
    def quick_make(self: Any, scalar_ty: Any) -> Any:
        known = self.__dict__.setdefault("_with", {})
        found = known.get(id(scalar_ty))  # the found type keeps it alive
        if found is None:
            found = known[id(scalar_ty)] = make(self, scalar_ty)
        return found

    return quick_make


def _or_itself(equal: Callable[[Any, Any], bool]) -> Callable[[Any, Any], bool]:
    """A type's `__eq__`, at once for itself."""

    @functools.wraps(equal)
    def quick_equal(self: Any, other: Any) -> bool:
        return True if self is other else equal(self, other)

    return quick_equal


def _of_one_shape(broadcast: Callable[..., tuple]) -> Callable[..., tuple]:
    """What makes shapes the same, where they are not yet."""

    @functools.wraps(broadcast)
    def quick_broadcast(self: Any, lhs: Any, rhs: Any) -> tuple:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block() and list(left.shape) == list(right.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    return quick_broadcast


def _promoted(promote: Callable[..., Any]) -> Callable[..., Any]:
    """The type to compute two types in, once for each pair."""
    known: dict[tuple, Any] = {}

    @functools.wraps(promote)
    def quick_promote(self: Any, a_ty: Any, a_is_scalar: bool, b_ty: Any, b_is_scalar: bool, div_or_mod: bool) -> Any:
        key = (a_ty.name, a_is_scalar, b_ty.name, b_is_scalar, div_or_mod)
        found = known.get(key)
        if found is None:
            found = known[key] = promote(self, a_ty, a_is_scalar, b_ty, b_is_scalar, div_or_mod)
        return found

    return quick_promote


def _splat(builder: Any, ret_ty: Any, arg: Any) -> Any:
    """A scalar in all places of a block.

    Of the dtype that the interpreter gives it, which for the result of a comparison is that of what was compared: a
    block of such booleans is no mask there, and so must not be one here.
    """
    handle = interpreter.TensorHandle(
        np.empty(tuple(ret_ty.shape), interpreter._get_np_dtype(arg.dtype)), arg.dtype.scalar
    )
    handle.data.fill(arg.data.item())
    return handle


def _with_semantic(owner: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """Have a function of the language know what it means in the interpreter, whoever calls it."""
    del builder
    function = getattr(member, "__wrapped__", member)  # without the check that it is told
    semantic = interpreter.interpreter_semantic

    def told(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(owner, name, told)


def _quicken(owner: Any, name: str, how: Callable[[Any], Any]) -> None:
    """In other versions the suite may just be slower."""
    if name in vars(owner):
        setattr(owner, name, how(vars(owner)[name]))


_quicken(interpreter, "_patch_lang", _once)
if list(inspect.signature(getattr(interpreter, "_patch_attr", len)).parameters)[-1] == "scope":
    interpreter._patch_attr = _with_semantic
_quicken(interpreter, "_get_np_dtype", _remembered)
_quicken(interpreter.InterpreterBuilder, "create_splat", lambda _: _splat)
_quicken(core, "_unwrap_if_constexpr", _quickly_unwrapped)
_quicken(core.tensor, "__init__", _made_like)
_quicken(core.block_type, "__init__", _shaped_like)
_quicken(core.block_type, "with_element_ty", _with_element)
_quicken(core.block_type, "__eq__", _or_itself)
_quicken(core.dtype, "__eq__", _or_itself)
_quicken(TritonSemantic, "broadcast_impl_value", _of_one_shape)
_quicken(TritonSemantic, "computation_type_impl", _promoted)
if hasattr(interpreter, "interpreter_builder"):
    builder = interpreter.interpreter_builder
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=builder.options.debug)
