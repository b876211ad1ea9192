"""Many matrices, each with rows of its own: `y[i] = weight[e] @ x[i]` for the rows i of expert e.

Shape letters: m rows ordered by expert, L experts, I channels in, O channels out.

On a GPU torch has one kernel for all experts (`torch._grouped_mm`), which takes the ends of the experts' rows from the
device, so nobody waits for counts. Elsewhere, and for what that kernel does not take, it is a product for each expert.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F

_ALIGNED = 8  # BF16 channels in 16 bytes, which the kernel reads at once
_LEAST_CAPABILITY = (9, 0)  # of the GPUs that it is written for


def grouped_linear(x: torch.Tensor, weight: torch.Tensor, num_rows: list[int]) -> torch.Tensor:
    """Rows through their experts, where the host knows how many each has.

    Args:
        x: [m, I], ordered by expert.
        weight: [L, O, I].
        num_rows: Of each expert; they sum to m.

    Returns:
        [m, O] of x's dtype.
    """
    if _has_kernel(x, weight):
        ends = torch.tensor(num_rows, dtype=torch.int32, device="cpu").cumsum(0, dtype=torch.int32)
        return torch._grouped_mm(x, weight.transpose(1, 2), offs=ends.to(x.device, non_blocking=True))
    # An expert without rows is computed too, so that its gradient is 0 and not missing. `unbind` and not `weight[e]`:
    # the gradients of L slices are then stacked once, instead of L times added to a full-sized zero.
    return torch.cat([F.linear(*pair) for pair in zip(x.split(num_rows), weight.unbind(), strict=True)])


def padded_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Apply the experts to their rows where only the device knows how many each has, and shapes must not depend on it.

    Args:
        x: [m, I], ordered by expert. Rows beyond the last expert's may hold anything.
        weight: [L, O, I].
        ends: [L] int32, where the rows of each expert end.

    Returns:
        [m, O] of x's dtype, 0 beyond the last expert's rows. Gradients of such rows are 0, too.
    """
    return torch.ops.deep_ep_moe.padded_linear(x, weight, ends)


def _has_kernel(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether torch's kernel takes these [m, I] and [L, O, I]."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or not x.size(0):
        return False
    is_aligned = x.size(1) % _ALIGNED == 0 and weight.size(1) % _ALIGNED == 0
    return is_aligned and torch.cuda.get_device_capability(x.device) >= _LEAST_CAPABILITY


def _spans(ends: torch.Tensor) -> list[tuple[int, int]]:
    """First and last row of each expert. The host waits for the device."""
    return list(pairwise([0, *ends.tolist()]))


def _clear_rest(rows: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Zeros for rows [m, O] beyond the last expert's, in place."""
    is_rest = torch.arange(rows.size(0), device=rows.device) >= ends[-1]
    return rows.masked_fill_(is_rest.unsqueeze(1), 0.0)


@torch.library.custom_op(
    "deep_ep_moe::padded_linear", mutates_args=(), schema="(Tensor x, Tensor weight, Tensor ends) -> Tensor"
)
def _padded_linear(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    if _has_kernel(x, weight):
        return _clear_rest(torch._grouped_mm(x.contiguous(), weight.transpose(1, 2), offs=ends), ends)
    out = x.new_zeros(x.size(0), weight.size(1))
    for (start, stop), matrix in zip(_spans(ends), weight, strict=True):
        torch.mm(x[start:stop], matrix.T, out=out[start:stop])
    return out


@_padded_linear.register_fake
def _(x: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    del ends
    return x.new_empty(x.size(0), weight.size(1))


@torch.library.custom_op(
    "deep_ep_moe::padded_outer", mutates_args=(), schema="(Tensor grad, Tensor x, Tensor ends) -> Tensor"
)
def _padded_outer(grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """The gradient of the weights: of each expert, the rows of `grad` [m, O] times those of `x` [m, I]."""
    out = x.new_empty(ends.size(0), grad.size(1), x.size(1))
    if _has_kernel(x, out):
        # Rows of no expert take no part. An expert without rows gets zeros.
        return torch._grouped_mm(grad.contiguous().T, x.contiguous(), offs=ends)
    for (start, stop), matrix in zip(_spans(ends), out, strict=True):
        torch.mm(grad[start:stop].T, x[start:stop], out=matrix)
    return out


@_padded_outer.register_fake
def _(grad: torch.Tensor, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    return x.new_empty(ends.size(0), grad.size(1), x.size(1))


def _keep(ctx: Any, inputs: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
    del output
    ctx.save_for_backward(*inputs)


def _padded_backward(ctx: Any, grad: torch.Tensor) -> tuple:
    x, weight, ends = ctx.saved_tensors
    grad_x = torch.ops.deep_ep_moe.padded_linear(grad, weight.transpose(1, 2), ends)
    return grad_x, torch.ops.deep_ep_moe.padded_outer(grad, x, ends), None


_padded_linear.register_autograd(_padded_backward, setup_context=_keep)
