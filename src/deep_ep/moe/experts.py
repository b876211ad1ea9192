"""The experts of a rank as torch's own tools see them.

Shape letters: m rows of local experts, H hidden size, I inner size of an expert, E experts, R ranks, L = E / R experts
of a rank.

Every rank has other experts under the same names. As DTensors, `Shard(0)` over a dimension of a device mesh, they say
so themselves: FSDP2, optimizers and `torch.distributed.checkpoint` then know that there are E of them. As plain tensors
they look like replicas, and a tool that averages, broadcasts, shards or saves replicas would destroy them without a
word. Plain experts of several ranks therefore refuse the tools that would (decision 19 has each hook and why).
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor, Shard
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from .gate import without_autocast
from .grouped import grouped_linear, padded_linear

Reduction = Literal["sum", "mean"]

_THE_WAY = "Make the layer with `MoELayer(..., mesh=mesh['ep'])`, whose experts are DTensors"
_THE_OTHER_WAY = "Leave them out: `replicate(model, ignored_modules={layer.experts})`, those of all layers"


class SwiGLU(nn.Module):
    """One block, the same on all ranks: `down(silu(gate) * value)`.

    Attributes:
        up: [2I, H], gate and value below each other.
        down: [H, I].
    """

    def __init__(self, hidden: int, intermediate: int, *, device: torch.device, dtype: torch.dtype):
        super().__init__()
        self.up = nn.Parameter(torch.empty(2 * intermediate, hidden, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(hidden, intermediate, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H] to [T, H]."""
        return F.linear(_activate(F.linear(x, self.up)), self.down)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """Draw both weights."""
        draw(self.up, generator)
        draw(self.down, generator)


def _activate(inner: torch.Tensor) -> torch.Tensor:
    """[m, 2I], gate and value side by side, to [m, I]."""
    gate, value = inner.chunk(2, dim=-1)
    return F.silu(gate) * value


class Experts(nn.Module):
    """This rank's blocks.

    Args:
        num_experts: E.
        hidden: H.
        intermediate: I.
        rank: Of this rank among those that share the experts.
        ranks: Those R ranks, numbered as in the world.
        mesh: A mesh of one dimension, those R ranks: parameters are DTensors. None: they are plain tensors.
        reduction: Whether gradients are those of the sum of the R ranks' losses, or of their mean.
        device: Of the parameters.
        dtype: Of the parameters.

    Attributes:
        up: [L, 2I, H]; as a DTensor [E, 2I, H].
        down: [L, H, I]; as a DTensor [E, H, I].
        num_local: L.
        mesh: The mesh of the DTensors; after `fully_shard` with the dimension of their replicas. None: there is none.
        num_copies: How many ranks have a copy of each of them, if a placement says so; empty: one each.
    """

    num_copies: Sequence[int] = ()
    mesh: DeviceMesh | None = None
    up: torch.Tensor
    down: torch.Tensor

    def __init__(
        self,
        num_experts: int,
        hidden: int,
        intermediate: int,
        rank: int,
        ranks: Sequence[int],
        *,
        mesh: DeviceMesh | None,
        reduction: Reduction,
        device: torch.device,
        dtype: torch.dtype,
    ):
        super().__init__()
        self.rank, self.num_ranks, self._ranks = rank, len(ranks), tuple(ranks)
        self.num_local = num_experts // self.num_ranks
        self.reduction = reduction
        for name, shape in {"up": (2 * intermediate, hidden), "down": (hidden, intermediate)}.items():
            weight: torch.Tensor = torch.empty(self.num_local, *shape, device=device, dtype=dtype)
            if mesh is not None:
                weight = DTensor.from_local(weight, mesh, [Shard(0)], run_check=False)
            self.register_parameter(name, nn.Parameter(weight))
        # Of several ranks, and not known to torch as such.
        self._is_raw = mesh is None and self.num_ranks > 1
        self._distributed = ("up", "down") if mesh is not None and self.num_ranks > 1 else ()
        if self._is_raw:
            self.register_state_dict_post_hook(_mark_state)
            self.register_load_state_dict_pre_hook(_unmark_state)
            self._mark_gradients()

    def forward(self, x: torch.Tensor, num_rows: list[int] | torch.Tensor) -> torch.Tensor:
        """Apply the experts to their rows. Under autocast in its dtype, as linear layers do.

        Args:
            x: [m, H], ordered by expert; where the host does not know the counts, rows of no expert may follow.
            num_rows: Of each expert, which sum to m; or [L] int32, where the rows of each expert end.

        Returns:
            [m, H], in the same order; 0 for rows of no expert.
        """
        if self._is_raw and torch.is_grad_enabled() and not torch.compiler.is_compiling():
            self._mark_gradients()  # of parameters that were replaced, added or unfrozen
        up, down = (cast_as_autocast(self._local(weight)) for weight in (self.up, self.down))
        linear: Callable[..., torch.Tensor] = padded_linear if isinstance(num_rows, torch.Tensor) else grouped_linear
        x = cast_as_autocast(x)
        with without_autocast(x.device):  # it is cast, also for operators that autocast does not know
            return linear(_activate(linear(x, up, num_rows)), down, num_rows)

    def _local(self, weight: torch.Tensor) -> torch.Tensor:
        """[L, ...], this rank's part of a parameter, with gradients of the mean where those are wanted."""
        if isinstance(weight, DTensor):
            weight = weight.to_local(grad_placements=[Shard(0)])
        if self.reduction == "sum" or self.num_ranks == 1:
            return weight
        return _ScaledGradient.apply(weight, 1 / self.num_ranks)

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks from whose tokens their gradients come: those that share them, and those FSDP2 averages over."""
        return self._ranks if self.mesh is None else tuple(self.mesh.mesh.flatten().tolist())

    @torch.no_grad()
    def draw(self, seed: int, experts: Sequence[int]) -> None:
        """Draw each expert from a generator of its own, so that it does not depend on the number of ranks.

        Args:
            seed: The same on all ranks.
            experts: The number of each of this rank's experts in the model.
        """
        generator = torch.Generator()
        first = self.rank * self.num_local
        parts = [_local_part(weight, first) for weight in (self.up, self.down)]
        for index, expert in enumerate(experts, first):
            generator.manual_seed(seed + 1 + expert)
            for (local, offset), weight in zip(parts, (self.up, self.down), strict=True):
                values = _random(weight.shape[1:], generator)
                row = index - offset[0]
                if 0 <= row < local.size(0):  # FSDP may have cut it further
                    _copy_part(local[row], values, offset[1:])

    # What tools would do to plain experts ----------------------------------------------------------------------------

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)  # FSDP2 calls a module's own one, and goes past that of `nn.Module`

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Called for every parameter that is put in, by assignment too: by `fully_shard` and `distribute_module`."""
        is_sharded = isinstance(param, DTensor)
        if is_sharded and self.__dict__.get("_is_raw"):
            raise ValueError(
                f"fully_shard, distribute_module: the experts `{name}` are plain tensors, other ones on each of the "
                f"{self.num_ranks} ranks, and would be distributed as if they were replicas. {_THE_WAY}, or with "
                "`MoELayer(..., reduction='mean')`; and leave them out, in both cases: "
                "`fully_shard(model, ignored_params=deep_ep.moe.expert_parameters(model))`"
            )
        if param is not None and not is_sharded and name in self.__dict__.get("_distributed", ()):
            raise ValueError(
                f"replicate: the experts `{name}` must stay DTensors, as plain tensors they would be taken for "
                f"replicas. {_THE_OTHER_WAY}"
            )
        super().register_parameter(name, param)
        # FSDP2 adds a dimension when it shards them, and takes it away where they are gathered.
        if isinstance(param, DTensor) and (self.mesh is None or param.device_mesh.ndim > self.mesh.ndim):
            self.mesh = param.device_mesh

    def _apply(self, fn: Any, recurse: bool = True) -> Experts:
        super()._apply(fn, recurse)  # `to`, `to_empty` and the like, which may make new parameters
        self._mark_gradients()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # of a copy
        self._mark_gradients()

    def _mark_gradients(self) -> None:
        """Have the gradients of plain experts refuse norms over one rank's experts."""
        if not self._is_raw:
            return
        for parameter in self.parameters():
            if parameter.requires_grad and not _is_marked(parameter):
                parameter.register_post_accumulate_grad_hook(_mark_gradient)
                parameter._has_marked_gradient = True  # type: ignore[attr-defined]


def cast_as_autocast(x: torch.Tensor) -> torch.Tensor:
    """The input of a linear layer as autocast casts it; without autocast, and in FP64, the same tensor."""
    kind = x.device.type
    is_cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
    return x.to(torch.get_autocast_dtype(kind)) if is_cast else x


def named_experts(module: nn.Module) -> Iterator[tuple[str, Experts]]:
    """All experts in a model, with their names there."""
    return ((name, child) for name, child in module.named_modules() if isinstance(child, Experts))


class _ScaledGradient(torch.autograd.Function):
    """The same tensor, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: float) -> torch.Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad * ctx.factor, None


# Initialisation ------------------------------------------------------------------------------------------------------


def draw(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill [out, in] with a standard deviation of 1 / sqrt(in), the same on all devices, dtypes and shardings."""
    values = _random(weight.shape, generator)
    local, offset = _local_part(weight)
    _copy_part(local, values, offset)


def _random(shape: torch.Size, generator: torch.Generator) -> torch.Tensor:
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu") * shape[-1] ** -0.5


def _local_part(weight: torch.Tensor, first: int = 0) -> tuple[torch.Tensor, tuple[int, ...]]:
    """What this process holds of a parameter, and the indices of its first element there.

    Args:
        weight: The parameter.
        first: Its first index, if it is a plain tensor.
    """
    if not isinstance(weight, DTensor):
        return weight, (first,) + (0,) * (weight.ndim - 1)
    (chunk,) = weight.__create_chunk_list__()
    return weight.to_local(), tuple(chunk.offsets)


def _copy_part(local: torch.Tensor, values: torch.Tensor, offset: tuple[int, ...]) -> None:
    """Copy the part of full `values` that `local` is, which begins at `offset`."""
    window = tuple(slice(start, start + size) for start, size in zip(offset, local.shape, strict=True))
    local.copy_(values[window])


# Refusals ------------------------------------------------------------------------------------------------------------


class RankTensor(torch.Tensor):
    """The state or the gradient of plain experts: under this name every rank has another tensor.

    It is an ordinary tensor in all operations, except that it refuses norms over it and to be saved as a replica.
    Copies of it refuse the same, such as those by which `torch.distributed.checkpoint.async_save` stages a state, in
    this process or for another one. Other results, and what `torch.save` writes, are ordinary tensors; so is what
    `detach()` returns.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Do what was asked for, unless ranks would draw different conclusions from it."""
        del types
        if func in _NORMS:
            raise RuntimeError(
                "clip_grad_norm_: this is the gradient of plain experts, of which every rank has others: each rank "
                "would find another norm, and ranks would drift apart. Use `deep_ep.moe.clip_grad_norm_(model, ...)`; "
                "for this rank's norm alone, take that of `grad.detach()`"
            )
        if func is torch._amp_foreach_non_finite_check_and_unscale_:
            raise RuntimeError(
                "GradScaler: this is the gradient of plain experts, of which every rank has others: ranks would skip "
                f"different steps, and drift apart. {_THE_WAY}; or train in BF16, which needs no scaler"
            )
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **(kwargs or {}))
            return _mark(result) if func in _COPIES else result

    def __create_write_items__(self, fqn: str, _object: Any) -> Any:
        """Called by `torch.distributed.checkpoint` to save it."""
        raise ValueError(
            f"torch.distributed.checkpoint: `{fqn}` are plain experts, other ones on each rank, and would be saved as "
            f"if they were replicas. {_THE_WAY}; or save one file with `deep_ep.moe.merge_experts`"
        )

    def __create_chunk_list__(self) -> Any:
        """Called by `torch.distributed.checkpoint` to load into it."""
        raise RuntimeError(  # ValueError would be taken for a fault of the checkpoint
            "torch.distributed.checkpoint: these are plain experts, other ones on each rank, and all ranks would load "
            f"the same. {_THE_WAY}; or load one file with `deep_ep.moe.take_experts`"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return _mark(copy.deepcopy(self.detach(), memo))


_NORMS = frozenset({torch._foreach_norm, torch.linalg.vector_norm})  # by which torch finds a total norm
_COPIES = frozenset(
    {
        torch.clone,
        torch.Tensor.clone,
        torch.Tensor.contiguous,
        torch.Tensor.cpu,
        torch.Tensor.cuda,
        torch.Tensor.new_empty,  # which the stager of `async_save` fills
        torch.Tensor.pin_memory,
        torch.Tensor.to,
    }
)


def _mark(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(RankTensor)


# `async_save` may save in another process, which receives the state by this pickler. `torch.save` uses another one.
ForkingPickler.register(RankTensor, lambda tensor: (_mark, (tensor.detach(),)))


def _is_marked(parameter: Any) -> bool:
    """Whether it is a parameter of plain experts, of which every rank has others."""
    return getattr(parameter, "_has_marked_gradient", False)


def _mark_gradient(parameter: torch.Tensor) -> None:
    if parameter.grad is not None and not isinstance(parameter.grad, RankTensor):
        parameter.grad = _mark(parameter.grad)


def _mark_state(module: nn.Module, state: dict[str, Any], prefix: str, _metadata: Any) -> None:
    for name, parameter in module.named_parameters():
        value = state[prefix + name]
        if value is not parameter:  # with `keep_vars` the parameter itself
            state[prefix + name] = _mark(value)


def _unmark_state(module: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    for name, _ in module.named_parameters():
        value = state.get(prefix + name)
        if isinstance(value, RankTensor):
            state[prefix + name] = value.detach()


def _refuse_wrappers(parent: nn.Module, _name: str, child: nn.Module | None) -> None:
    """Called by torch whenever a module becomes part of another one, as a model does of DDP."""
    if child is None or not isinstance(parent, (DistributedDataParallel, FullyShardedDataParallel)):
        return
    if isinstance(child, nn.ParameterList) and any(_is_marked(parameter) for parameter in child):
        raise ValueError(  # `replicate` gives DDP the parameters of a model in a list
            "replicate: the experts are plain tensors, other ones on each rank: rank 0 would overwrite those of all "
            f"ranks. {_THE_OTHER_WAY}"
        )
    for name, experts in named_experts(child):
        if isinstance(parent, DistributedDataParallel):
            _check_ddp(parent, name, experts)
        elif experts.num_ranks > 1:
            raise ValueError(
                f"FullyShardedDataParallel: `{name}` has other experts on each of {experts.num_ranks} ranks, and would "
                f"be sharded as if they were replicas. Use `torch.distributed.fsdp.fully_shard`. {_THE_WAY}"
            )


def _check_ddp(ddp: DistributedDataParallel, name: str, experts: Experts) -> None:
    """Refuse a model whose experts DDP would overwrite, or whose gradients it would not make comparable.

    Raises:
        ValueError: It would.
    """
    names = [f"{name}.{one}" if name else one for one, _ in experts.named_parameters()]
    if experts.num_ranks == 1 and ddp.parameters_to_ignore.isdisjoint(names):
        return  # every rank has all of them: replicas, as DDP takes them to be
    ranks, wrong = dist.get_process_group_ranks(ddp.process_group), []
    if not ddp.parameters_to_ignore.issuperset(names):
        wrong.append(
            f"are other ones on each of {experts.num_ranks} ranks: rank 0 would overwrite those of all ranks. Leave "
            "them out: `DistributedDataParallel(deep_ep.moe.ignore_experts(model))`"
        )
    if experts.reduction != "mean":
        wrong.append(
            "have gradients of the sum of all ranks' losses, and DDP makes those of the mean. Make the layer with "
            "`MoELayer(..., reduction='mean')`"
        )
    if elsewhere := why_elsewhere(experts, "DDP is on", ranks):
        wrong.append(f"{elsewhere}, and give DDP the group of all of them")
    if wrong:
        raise ValueError(f"DistributedDataParallel: the experts `{name}` {'. They '.join(wrong)}")


def why_elsewhere(experts: Experts, others: str, ranks: Sequence[int]) -> str | None:
    """Return why gradients of experts do not come from the ranks that all others come from, and what would do, but for
    the group that belongs to it; None: they do.

    Args:
        experts: The experts.
        others: Whose ranks these are, as a sentence has it before them.
        ranks: The ranks, numbered as in the world.
    """
    if sorted(ranks) == sorted(experts.holders):
        return None
    return (
        f"are on {_name_ranks(experts.holders)}, and {others} {_name_ranks(ranks)}: all gradients must come from the "
        "same ranks, or replicas of experts would drift apart. Where experts have replicas, call "
        "`fully_shard(layer.experts, mesh=mesh['dp'])` before, over the other dimension of their mesh"
    )


def _name_ranks(ranks: Sequence[int]) -> str:
    """How many ranks, and which.

    Example:
        `2 ranks (0, 2)`, `16 ranks (0, 1, ..., 15)`.
    """
    names = [str(rank) for rank in ranks]
    if len(names) > 8:
        names[2:-1] = ["..."]
    return f"{len(ranks)} ranks ({', '.join(names)})"


register_module_module_registration_hook(_refuse_wrappers)


def _refuse_sharded_steps(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    """Called by torch before every step of an optimizer."""
    zero = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")  # imported by those who use it
    if zero is None or not isinstance(optimizer, zero.ZeroRedundancyOptimizer):
        return
    if any(_is_marked(parameter) for group in optimizer.param_groups for parameter in group["params"]):
        raise ValueError(
            "ZeroRedundancyOptimizer: it has plain experts, other ones on each rank: the rank that steps them would "
            "overwrite those of all ranks. Give it all parameters but `deep_ep.moe.expert_parameters(model)`, and "
            "those to an optimizer of their own"
        )


register_optimizer_step_pre_hook(_refuse_sharded_steps)
