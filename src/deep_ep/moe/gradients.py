"""Gradients of a model with experts: which parameters are whose, reduction over the ranks, and the norm.

A parameter is in one of three situations: replicated (a plain tensor, the same on all ranks), sharded (a DTensor, of
which each rank has a part), or plain experts (a plain tensor, another one on each rank).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from .experts import Reduction, named_experts, why_elsewhere
from .gate import Gate

Model = TypeVar("Model", bound=nn.Module)


def expert_parameters(module: nn.Module) -> set[nn.Parameter]:
    """The parameters of all experts in a model, for `fully_shard(model, ignored_params=expert_parameters(model))`."""
    return {parameter for _, experts in named_experts(module) for parameter in experts.parameters()}


def ignore_experts(module: Model) -> Model:
    """Have DDP leave the experts alone: `DistributedDataParallel(ignore_experts(model))`. Returns the model.

    Also the counters of the gates' choices, which are each rank's own until `update_bias` sums them: DDP would
    overwrite them with those of rank 0 before each forward.
    """
    names = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    for name, experts in named_experts(module):
        if experts.num_ranks > 1 or isinstance(experts.up, DTensor):  # else every rank has all of them: replicas
            names.update(_join(name, one) for one, _ in experts.named_parameters())
    names.update(_join(name, "load") for name, child in module.named_modules() if isinstance(child, Gate))
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    return module


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def parameter_groups(module: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Parameter groups for an optimizer, one for each device mesh: `AdamW(parameter_groups(model), fused=True)`.

    Optimizers that work on lists of tensors (`foreach`, `fused`) cannot mix DTensors of several meshes, or DTensors and
    plain tensors, in one list.

    Args:
        module: A model.
        options: Such as `weight_decay`, for all groups.
    """
    groups: dict[Any, list[nn.Parameter]] = {}
    for parameter in module.parameters():
        groups.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
    return [{"params": parameters, **options} for parameters in groups.values()]


# Reduction -----------------------------------------------------------------------------------------------------------


def reduce_replicated_gradients(module: nn.Module, group: dist.ProcessGroup, reduction: Reduction = "sum") -> None:
    """Reduce the gradients of everything but the experts over all ranks, in place. All ranks call it together.

    It is for models without DDP and FSDP2, which do it themselves. A parameter that a rank did not use counts as 0.

    Args:
        module: A layer, or a model with layers in it.
        group: The ranks that hold it.
        reduction: What the layers were made with: gradients become those of the sum of all ranks' losses, or of their
            mean.

    Raises:
        ValueError: Experts have gradients of other ranks or on another scale, or FSDP2 has sharded a parameter.
    """
    own = _own_parameters(module, group, reduction)
    named = {name: one for name, one in module.named_parameters() if one.requires_grad and one not in own}
    for name, parameter in named.items():
        if _num_parts(parameter) > 1:
            raise ValueError(
                f"reduce_replicated_gradients: `{name}` must be the same on all ranks, it is a DTensor in "
                f"{_num_parts(parameter)} parts. Where FSDP2 has sharded it, leave this call out: its gradients are "
                "reduced in the backward pass"
            )
    parameters = list(named.values())
    factor = 1.0 if reduction == "sum" else 1 / dist.get_world_size(group)
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    # Experts of one rank may be DTensors, which cannot be mixed with plain tensors: they are what the rank has of them.
    grads = [_local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    for bucket in _buckets(grads):
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat, group=group)
        if factor != 1.0:
            flat *= factor
        for grad, summed in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(summed.view_as(grad))


def _own_parameters(module: nn.Module, group: dist.ProcessGroup, reduction: Reduction) -> set[nn.Parameter]:
    """The parameters of experts that have their gradients already, from all ranks of the group.

    Raises:
        ValueError: They have those of other ranks, or on another scale.
    """
    own: set[nn.Parameter] = set()
    ranks = dist.get_process_group_ranks(group)
    for name, experts in named_experts(module):
        where = f"reduce_replicated_gradients: the experts `{name}`"
        if len(experts.holders) == 1:  # every rank has all of them: replicas
            continue
        own.update(experts.parameters())
        if experts.reduction != reduction:
            raise ValueError(
                f"{where} have gradients of the {experts.reduction} of all ranks' losses, and `reduction` is "
                f"{reduction!r}. Pass reduction={experts.reduction!r}"
            )
        if elsewhere := why_elsewhere(experts, "`group` has", ranks):
            raise ValueError(f"{where} {elsewhere}, and pass the group of all of them")
        if reduction == "sum" and len(experts.holders) != experts.num_ranks:
            raise ValueError(
                f"{where} have replicas, over which FSDP2 averages their gradients, and `reduction` is 'sum'. Make the "
                "layer with `MoELayer(..., reduction='mean')`"
            )
    return own


def _local(grad: torch.Tensor) -> torch.Tensor:
    """What this rank has of a gradient, in the same memory."""
    return grad.to_local() if isinstance(grad, DTensor) else grad


_BUCKET_BYTES = 64 << 20  # of copies at a time


def _buckets(grads: list[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    """Gradients of one dtype each, few enough to be copied: a call for every small one would cost more than its sum."""
    for dtype in dict.fromkeys(grad.dtype for grad in grads):
        bucket: list[torch.Tensor] = []
        for grad in grads:
            if grad.dtype == dtype:
                if bucket and sum(one.nbytes for one in bucket) + grad.nbytes > _BUCKET_BYTES:
                    yield bucket
                    bucket = []
                bucket.append(grad)
        yield bucket


def _num_parts(tensor: torch.Tensor) -> int:
    """In how many parts ranks have a tensor; 1: each rank that has it has all of it."""
    if not isinstance(tensor, DTensor):
        return 1
    sizes = zip(tensor.device_mesh.shape, tensor.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


# The norm ------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def clip_grad_norm_(
    module: nn.Module,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: dist.ProcessGroup | None = None,
    error_if_nonfinite: bool = False,
) -> torch.Tensor:
    """`torch.nn.utils.clip_grad_norm_` over all parameters of all ranks. All ranks call it together.

    Gradients must have been reduced, as they are after a backward pass of DDP or FSDP2, or after
    `reduce_replicated_gradients`; copies of experts by `MoELayer.reduce_replica_gradients`. Powers are summed in FP64
    and the sum is made by one `all_reduce`, so all ranks get the same norm, to the bit. An expert counts once, however
    many copies a placement has of it.

    Args:
        module: A model, held by all ranks of the group: replicated, sharded, or with experts of their own.
        max_norm: The greatest norm that gradients are left with.
        norm_type: p, or `inf`.
        group: Those ranks; default all.
        error_if_nonfinite: Raise where the norm is not finite, on all ranks, instead of scaling by it.

    Returns:
        The norm before clipping, a scalar.
    """
    group = group or dist.group.WORLD
    assert group is not None
    grads = [(local, num_parts) for local, num_parts in _local_gradients(module, group.size()) if local.numel()]
    device = next((grad.device for grad, _ in grads), next(module.parameters()).device)
    # Every rank adds its part. Each element is on `size / num_parts` ranks, which would count it that often.
    sums = torch.zeros((), dtype=torch.float64, device=device)
    for grad, num_parts in grads:
        norm = torch.linalg.vector_norm(grad, norm_type, dtype=torch.float64)
        sums = torch.maximum(sums, norm) if norm_type == math.inf else sums + norm**norm_type * num_parts / group.size()
    total = _max_over(sums, group) if norm_type == math.inf else _sum_over(sums, group) ** (1 / norm_type)
    if error_if_nonfinite and not total.isfinite():
        raise RuntimeError(
            f"clip_grad_norm_: the total norm of order {norm_type} is {total.item()}, nothing was scaled"
        )
    factor = (max_norm / (total + 1e-6)).clamp(max=1.0)  # as torch's own
    for grad, _ in grads:
        grad.mul_(factor.to(grad.dtype))
    return total


def _sum_over(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    dist.all_reduce(value, group=group)
    return value


def _max_over(value: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """The greatest of all ranks' numbers; NaN if one is, of which not every backend takes notice."""
    pair = torch.stack([value.nan_to_num(nan=math.inf, posinf=math.inf), value.isnan().to(value.dtype)])
    dist.all_reduce(pair, dist.ReduceOp.MAX, group)
    return torch.where(pair[1] > 0, math.nan, pair[0])


def _local_gradients(module: nn.Module, num_ranks: int) -> Iterator[tuple[torch.Tensor, float]]:
    """Of each gradient: what this rank has of it, and in how many parts the ranks have it.

    A gradient of experts that have copies comes in pieces, one for each: a copy is a part of a part.

    Raises:
        ValueError: A gradient has not been reduced, or is held by other ranks than the group's.
    """
    raw = {
        parameter: experts
        for _, experts in named_experts(module)
        for parameter in experts.parameters()
        if not isinstance(parameter, DTensor)
    }
    for name, parameter in module.named_parameters():
        grad, experts = parameter.grad, raw.get(parameter)
        num_parts = 1 if experts is None else experts.num_ranks
        if grad is None:
            continue
        if isinstance(grad, DTensor):
            if any(placement.is_partial() for placement in grad.placements):
                raise ValueError(f"clip_grad_norm_: the gradient of `{name}` is a partial sum {grad.placements}")
            num_parts = _num_parts(grad)
            grad = grad.to_local()
        if num_ranks % num_parts:
            raise ValueError(
                f"clip_grad_norm_: `{name}` is split over {num_parts} ranks, which must divide the {num_ranks} of "
                "`group`. Pass the group of all ranks that hold the model"
            )
        num_copies = [] if experts is None else experts.num_copies
        if num_copies and grad.shape[0] == len(num_copies):
            yield from ((one, num_parts / count) for one, count in zip(grad.detach(), num_copies, strict=True))
        else:
            yield grad.detach(), num_parts
