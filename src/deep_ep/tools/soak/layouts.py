"""How callers lay tensors out in memory: everything that the interface takes."""

from __future__ import annotations

import torch

SUMMABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
X_LAYOUTS = ("fresh", "fresh", "fresh", "offset", "odd strides", "lazy")
SCALE_LAYOUTS = ("rows", "columns", "padded columns", "gaps", "expanded", "offset")

_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def without_nan(values: torch.Tensor) -> torch.Tensor:
    """A GPU that negates a NaN gives another one, so lazily negated tensors have none."""
    if not (values.dtype.is_floating_point or values.dtype.is_complex) or values.dtype.itemsize == 1:
        return values
    parts = torch.view_as_real(values) if values.dtype.is_complex else values
    parts = torch.where(parts.isnan(), 1.0, parts)
    return torch.view_as_complex(parts) if values.dtype.is_complex else parts


def resolved(values: torch.Tensor) -> torch.Tensor:
    """What a lazily negated, or conjugated, tensor of these values holds."""
    if values.dtype.is_complex:
        return values.conj().resolve_conj()
    return torch.neg(values) if values.dtype in SUMMABLE else values


def integers_of(tensor: torch.Tensor) -> torch.Tensor:
    """The same bits in a dtype that torch has all operations for."""
    return tensor.view(_SAME_SIZE[tensor.dtype.itemsize])


def laid_out_x(values: torch.Tensor, layout: str, device: torch.device) -> torch.Tensor:
    """A new contiguous tensor of these values, as a caller may have it.

    Args:
        values: [T, H].
        layout: `fresh`; `offset`: inside a larger tensor; `odd strides`: any stride where a dimension has size 1;
            `lazy`: lazily negated or conjugated, where the dtype has that.
        device: Where it is.
    """
    if layout == "lazy" and values.dtype in (*SUMMABLE, torch.complex64, torch.complex128):
        x = resolved(values).to(device, copy=True)  # twice is not at all
        return x.conj() if values.dtype.is_complex else torch._neg_view(x)
    if layout == "offset" and values.numel():
        memory = torch.empty(values.numel() + 3, dtype=values.dtype, device=device)
        x = memory[3:].view(values.shape)
        x.copy_(values)
        return x
    x = values.to(device, copy=True)
    if layout == "odd strides" and 1 in values.shape:
        strides = tuple(7 if size == 1 else stride for size, stride in zip(x.shape, x.stride(), strict=True))
        return x.as_strided(x.shape, strides)
    return x


def laid_out_scales(values: torch.Tensor, layout: str, device: torch.device) -> torch.Tensor:
    """A new tensor of these values with some strides, as a caller may have it.

    Args:
        values: [T, S] contiguous.
        layout: `rows`; `columns`; `padded columns`: further apart than there are rows; `gaps`: every second column of a
            larger tensor; `expanded`: one row for all; `offset`: inside a larger tensor.
        device: Where it is.
    """
    bits = integers_of(values)
    num_rows, num_columns = bits.shape
    if layout == "expanded" and num_rows:
        return bits[:1].to(device, copy=True).expand(num_rows, -1).view(values.dtype)
    memory: torch.Tensor
    if layout == "columns":
        memory = torch.empty(num_columns, num_rows, dtype=bits.dtype, device=device).t()
    elif layout == "padded columns":
        memory = torch.empty(num_columns, num_rows + 3, dtype=bits.dtype, device=device).t()[:num_rows]
    elif layout == "gaps":
        memory = torch.empty(num_rows, 2 * num_columns, dtype=bits.dtype, device=device)[:, ::2]
    elif layout == "offset":
        memory = torch.empty(bits.numel() + 1, dtype=bits.dtype, device=device)[1:].view(bits.shape)
    else:
        memory = torch.empty(bits.shape, dtype=bits.dtype, device=device)
    memory.copy_(bits)
    return memory.view(values.dtype)
