"""Fast checks whether arguments are as they are in nearly every call.

`checks.py` finds out what is wrong with an argument, or makes an ordinary tensor of an unusual one; for a dozen tensors
that takes longer than to launch a call's kernels. So calls first check here. Usual arguments need neither; for all
others the result is negative, and the checks decide. Nothing is refused here, so nothing here may raise.
"""

from __future__ import annotations

from typing import Any
from weakref import ReferenceType

import torch

from ..engine.payload import Payload, Routing
from ..handle import Handle
from ..transport import MAX_EXPERTS

_Tensor = torch.Tensor
_strided = torch.strided
_int32, _int64, _float32, _bool = torch.int32, torch.int64, torch.float32, torch.bool
_has_transform = torch._C._functorch.peek_interpreter_stack
_is_grad_enabled = torch.is_grad_enabled

_USUAL = frozenset(
    {torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8, torch.int32}
)


def payload(x: Any, device: torch.device) -> Payload | None:
    """The payload of a dispatch: a matrix, or one with scales of any strides.

    Args:
        x: What the caller gave.
        device: The buffer's.
    """
    scales = None
    if type(x) is tuple and len(x) == 2:
        x, scales = x
        if not is_matrix(scales, device):
            return None
    is_usual = is_matrix(x, device) and x.is_contiguous() and not loses_gradients(x)
    is_usual = is_usual and (scales is None or scales.shape[0] == x.shape[0])
    return Payload(x, scales) if is_usual else None


def loses_gradients(x: torch.Tensor) -> bool:
    """Whether autograd would follow `x` further than a buffer does. Not inside of an `autograd.Function`."""
    return x.requires_grad and _is_grad_enabled()


def is_matrix(x: Any, device: torch.device) -> bool:
    """Whether it is a tensor of two dimensions whose bytes are its values, with more than one row and column."""
    if (
        type(x) is not _Tensor
        or x.is_nested
        or x.layout is not _strided
        or x.device != device
        or (x.dtype not in _USUAL)
    ):
        return False
    # With one row or column, or none, strides may be anything: `tensors.ordinary` gives those of a fresh tensor.
    shape = x.shape
    return len(shape) == 2 and shape[0] > 1 and shape[1] > 1 and not x.is_neg() and _has_transform() is None


def is_ids(topk_idx: Any, device: torch.device) -> bool:
    """Whether it is a contiguous matrix of expert ids, with more than one row and column."""
    if type(topk_idx) is not _Tensor or topk_idx.is_nested or topk_idx.layout is not _strided:
        return False
    shape, dtype = topk_idx.shape, topk_idx.dtype
    return (
        (dtype is _int64 or dtype is _int32)
        and len(shape) == 2
        and shape[0] > 1
        and shape[1] > 1
        and topk_idx.device == device
        and topk_idx.is_contiguous()
        and _has_transform() is None
    )


def routing(
    num_tokens: int,
    num_ranks: int,
    device: torch.device,
    per_rank: Any,
    mask: Any,
    per_expert: Any,
    topk_idx: Any,
    topk_weights: Any,
    known: tuple[ReferenceType, ...] | None,
    known_ids: ReferenceType | None,
) -> Routing | None:
    """The routing of a dispatch inside one node, with ids and weights. It is called after `payload`.

    Args:
        num_tokens: T, above 1.
        num_ranks: R.
        device: The buffer's.
        per_rank: The caller's `num_tokens_per_rank`.
        mask: The caller's `is_token_in_rank`.
        per_expert: The caller's `num_tokens_per_expert`.
        topk_idx: The caller's.
        topk_weights: The caller's.
        known: To `per_rank`, `mask` and `per_expert` of the last layout that the buffer made; None: there is none.
        known_ids: To the ids that it was made of.
    """
    is_known = is_known_layout(known, per_rank, mask, per_expert)
    if not is_known and not _is_layout(num_ranks, device, per_rank, mask, per_expert):
        return None
    has_known_ids = known_ids is not None and known_ids() is topk_idx is not None
    # A mask of one column may have any strides, too.
    if num_ranks == 1 or not (topk_idx.is_contiguous() if has_known_ids else is_ids(topk_idx, device)):
        return None
    if (
        type(topk_weights) is not _Tensor
        or topk_weights.is_nested
        or topk_weights.layout is not _strided
        or topk_weights.dtype is not _float32
        or topk_weights.device != device
        or topk_weights.is_neg()
        or not topk_weights.is_contiguous()
    ):
        return None
    shape = topk_idx.shape
    is_usual = shape[0] == num_tokens and topk_weights.shape == shape and mask.shape == (num_tokens, num_ranks)
    if not is_usual:
        return None
    return Routing(per_rank, per_expert, mask, topk_idx, topk_weights, has_known_ids=is_known and has_known_ids)


def version_of(one: torch.Tensor, other: torch.Tensor) -> int | None:
    """Return a number that grows where torch writes to one of the tensors; None: it does not count that."""
    return None if one.is_inference() or other.is_inference() else one._version + other._version


def is_known_layout(known: tuple[ReferenceType, ...] | None, per_rank: Any, mask: Any, per_expert: Any) -> bool:
    """Whether these are the counts and the mask of the last layout that the buffer made, see `routing`."""
    return (
        known is not None
        and known[0]() is per_rank is not None
        and known[1]() is mask is not None
        and known[2]() is per_expert is not None
    )


def _is_layout(num_ranks: int, device: torch.device, per_rank: Any, mask: Any, per_expert: Any) -> bool:
    """Whether these are counts and a mask as `get_dispatch_layout` makes them; the shape of the mask is not checked."""
    for tensor in (per_rank, mask, per_expert):
        if type(tensor) is not _Tensor or tensor.is_nested or tensor.layout is not _strided or tensor.device != device:
            return False
        if not tensor.is_contiguous():
            return False
    if per_rank.dtype is not _int32 or per_expert.dtype is not _int32 or mask.dtype is not _bool:
        return False
    num_experts = per_expert.numel()
    return (
        per_rank.shape == (num_ranks,)
        and len(per_expert.shape) == 1
        and 1 < num_experts <= MAX_EXPERTS
        and num_experts % num_ranks == 0
    )


def handle(given: Any, num_ranks: int, device: torch.device) -> Handle | None:
    """The handle of a dispatch inside one node, as it was returned.

    A handle of this library's type was made by it, or by code that maps a function over one: so only what kernels
    depend on is checked.
    """
    if type(given) is not Handle:
        return None
    prefix, _, _, source_idx, _, send_head = given
    is_ours = (
        prefix.dtype is _int32
        and source_idx.dtype is _int32
        and send_head.dtype is _int32
        and prefix.shape == (num_ranks, num_ranks)
        and send_head.shape[1:] == (num_ranks,)
        and len(source_idx.shape) == 1
        and prefix.device == source_idx.device == send_head.device == device
        and prefix.is_contiguous()
        and send_head.is_contiguous()
        and source_idx.is_contiguous()
    )
    return given if is_ours else None
