"""Tensor arguments as the engines take them: ordinary strided tensors whose bytes are their values.

Every engine and every kernel works on bytes: it copies memory by address, views it in another dtype, and passes
pointers to kernels. So an argument must be what its bytes say. `ordinary` refuses what is not (sparse, quantized and
nested tensors, wrapper subclasses), and mends what costs nothing or is rare:

- A tensor that torch calls contiguous may have any stride in a dimension of size 1, or anywhere if it is empty, and
  then `view(dtype)` refuses it. The view that is returned has the strides of a fresh tensor.
- A lazily negated or conjugated tensor (`is_neg()`, `is_conj()`) shares its bytes with the tensor that it was made
  from. It is resolved, which copies it.
"""

from __future__ import annotations

from typing import Any

import torch

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
_is_transformed = torch._C._functorch.is_functorch_wrapped_tensor

# Everything that is looked for here is a dispatch key of the tensor: its layout, what wraps it, a lazy sign. So a set
# of keys that was found to be ordinary once is so for every tensor, and a call looks at one number for each of its
# dozen tensors. Only what is not known goes through the questions below.
_dispatch_keys = torch._C._dispatch_keys
_plain_keys: set[int] = set()


def is_lazy(value: Any) -> bool:
    """Whether a value is a tensor that must be resolved, which reads it: its bytes are not yet its values."""
    return isinstance(value, torch.Tensor) and (value.is_neg() or value.is_conj())


def ordinary(where: str, name: str, value: torch.Tensor, is_written: bool = False) -> torch.Tensor:
    """The same values as an ordinary tensor: the argument itself, a view of it, or, if it is lazy, a copy.

    Args:
        where: The method.
        name: The argument.
        value: What was passed.
        is_written: The method writes into it, so that a copy will not do.

    Raises:
        ValueError: There is no such tensor, or only a copy.
    """
    if type(value) not in _PLAIN_TYPES or _dispatch_keys(value).raw_repr() not in _plain_keys:
        value = _resolved(where, name, _unwrapped(where, name, value), is_written)
        _plain_keys.add(_dispatch_keys(value).raw_repr())
    shape = value.shape
    if (1 in shape or 0 in shape) and value.is_contiguous():
        strides = _fresh_strides(shape)
        if value.stride() != strides:
            value = value.as_strided(shape, strides)
    return value


def _resolved(where: str, name: str, value: torch.Tensor, is_written: bool) -> torch.Tensor:
    """The tensor, or a copy of it whose bytes are its values."""
    if not is_lazy(value):
        return value
    if is_written:
        raise ValueError(
            f"{where}: `{name}` is written, so it must not be lazily negated or conjugated. "
            f"Pass `{name}.resolve_conj().resolve_neg()`"
        )
    return value.resolve_conj().resolve_neg()


def _unwrapped(where: str, name: str, value: torch.Tensor) -> torch.Tensor:
    """A tensor that behaves like any other, which an instance of a subclass becomes.

    Raises:
        ValueError: It has no memory of its own, or its memory is not its values.
    """
    seen, remedy = "", "the tensor that it stands for"
    if value.is_nested:
        seen, remedy = "a nested one", f"`{name}.to_padded_tensor(0)`"
    elif value.layout is not torch.strided:
        seen, remedy = str(value.layout).removeprefix("torch."), f"`{name}.to_dense()`"
    elif value.is_quantized:
        seen, remedy = "a quantized one", f"`{name}.int_repr()`, or `{name}.dequantize()`"
    elif _is_transformed(value):
        seen = "inside a function transform (vmap, grad)"
    elif type(value).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
        seen = f"a {type(value).__name__}, which wraps other tensors"
        remedy = f"`{name}.to_local()`" if hasattr(value, "to_local") else remedy
    if seen:
        raise ValueError(f"{where}: `{name}` must be an ordinary strided tensor, it is {seen}. Pass {remedy}")
    # What a subclass does to operators is no part of communication.
    return value if type(value) in _PLAIN_TYPES else value.as_subclass(torch.Tensor)


def _fresh_strides(shape: torch.Size) -> tuple[int, ...]:
    """The strides of a new contiguous tensor."""
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(1, size)
    return tuple(reversed(strides))
