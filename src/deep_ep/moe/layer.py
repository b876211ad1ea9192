"""A Mixture-of-Experts layer whose experts live on several ranks.

Shape letters: T tokens of this rank, n rows that it received, m selections among them, H hidden size, I inner size of
an expert, E experts, R ranks, L = E / R experts of a rank, K selections of a token.

A layer's parameters are of two kinds. Those of the experts (names with `experts` in them) are a rank's own, and get the
gradients of all ranks' tokens. All others are the same on all ranks, and get those of the rank's own tokens: DDP, FSDP2
or `reduce_replicated_gradients` reduces them over the ranks. `docs/training.md` has the rule and what composes.
"""

from __future__ import annotations

import warnings
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ..buffers.checks import check_int
from ..buffers.elastic import ElasticBuffer
from ..buffers.legacy import Buffer
from ..control import group_ranks
from ..placement import Placement, even_placement, move_experts, sum_over_copies
from . import ops
from .expanded import combine_expanded, dispatch_expanded
from .experts import Experts, Reduction, SwiGLU, cast_as_autocast, draw
from .gate import Gate, GateOptions, Routes, count_ids


class MoEOutput(NamedTuple):
    """What a layer returns.

    Attributes:
        x: Of the shape and dtype of the input (autocast's dtype under autocast). There is no residual connection in it.
        balance_loss: Scalar, to be added to the loss; 0 where none was asked for.
    """

    x: torch.Tensor
    balance_loss: torch.Tensor


class MoELayer(nn.Module):
    """Gate, dispatch, this rank's experts, combine; and a shared expert that computes while tokens travel.

    All ranks construct it together, and call it together with any number of tokens each, none included. Weights are
    drawn from the first rank's default generator and do not depend on the number of ranks.

    Args:
        hidden: H.
        intermediate: I.
        num_experts: E, a multiple of the ranks where there is no placement.
        topk: K.
        group: Make a buffer for this process group.
        buffer: Or use this one, which layers may share.
        mesh: A device mesh of one dimension (`mesh["ep"]` of a larger one): the experts are DTensors, `Shard(0)` over
            it, which FSDP2, optimizers and `torch.distributed.checkpoint` know how to treat. With `buffer`, the same
            ranks as the buffer's; without, a buffer is made for its group.
        shared_intermediate: Inner size of the shared expert; 0: there is none.
        options: How the gate chooses.
        dtype: Of the experts; the gate's is at least FP32, so FSDP2 must shard it by itself where this one is not.
            Default: torch's default dtype.
        device: Of the parameters: the buffer's, which is the default, or `meta` (default inside
            `with torch.device("meta")`). After `to_empty`, call `reset_parameters` or load a checkpoint.
        reduction: Whether experts' gradients are those of the sum of the ranks' losses, or of their mean, which is what
            DDP and FSDP2 make of all others. Default: the mean with `mesh`, the sum without.
        num_worst_tokens: Work on this many rows, whatever gates choose; the tokens of all ranks always suffice. Shapes
            are then fixed: the host never waits for counts, and `torch.compile(fullgraph=True)` takes the layer. 0: on
            as many rows as come, which is less work; in a compiled graph the exchange is then a graph break.
        is_fp8: Tokens, and in the backward pass gradients of sums, travel as FP8. Sums travel as they are.
        placement: Which rank has which experts, perhaps several times; None: E / R on each, in order.
        expanded: Rows come grouped by expert (`ElasticBuffer`), so that nothing is permuted around the experts. Inside
            one node, without FP8, and with two graph breaks under `torch.compile`. `num_worst_tokens` is then the ranks
            times the most tokens of any of them.

    Attributes:
        gate: `Gate`, replicated.
        experts: `Experts`, of this rank.
        shared: `SwiGLU` or None, replicated.
        buffer: The buffer.
        placement: Where experts are. `num_experts` counts the physical ones.
    """

    def __init__(
        self,
        hidden: int,
        intermediate: int,
        num_experts: int,
        topk: int,
        *,
        group: dist.ProcessGroup | None = None,
        buffer: Buffer | None = None,
        mesh: DeviceMesh | None = None,
        shared_intermediate: int = 0,
        options: GateOptions | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        reduction: Reduction | None = None,
        num_worst_tokens: int = 0,
        is_fp8: bool = False,
        placement: Placement | None = None,
        expanded: bool = False,
    ):
        super().__init__()
        for name, value, least in (
            ("hidden", hidden, 1),
            ("intermediate", intermediate, 1),
            ("num_experts", num_experts, 1),
            ("shared_intermediate", shared_intermediate, 0),
            ("num_worst_tokens", num_worst_tokens, 0),
        ):
            check_int("MoELayer", name, value, least)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"MoELayer: `dtype` must be a torch dtype of floating-point numbers, got {dtype!r}")
        self.buffer = buffer = _find_buffer(group, buffer, mesh)
        if expanded and is_fp8:
            raise ValueError("MoELayer: `expanded` and `is_fp8` exclude each other. Pass one of them")
        if expanded and 0 < num_worst_tokens < buffer.group_size:
            raise ValueError(
                f"MoELayer: with `expanded`, `num_worst_tokens` must be at least the {buffer.group_size} ranks, which "
                f"share them, got {num_worst_tokens}"
            )
        self._elastic = ElasticBuffer.from_buffer(buffer) if expanded else None
        if placement is None and num_experts % buffer.group_size:
            raise ValueError(
                f"MoELayer: `num_experts` must be a multiple of the {buffer.group_size} ranks, got {num_experts}"
            )
        if placement is not None and mesh is not None:
            raise ValueError("MoELayer: `placement` and `mesh` exclude each other: DTensors have every expert once")
        self.placement = placement or even_placement(num_experts, buffer.group_size)
        if self.placement.num_ranks != buffer.group_size:
            raise ValueError(
                f"MoELayer: `placement` must be for {buffer.group_size} ranks, got {self.placement.num_ranks}"
            )
        reduction = reduction or ("sum" if mesh is None else "mean")
        if reduction not in ("sum", "mean"):
            raise ValueError(f"MoELayer: `reduction` must be 'sum' or 'mean', got {reduction!r}")
        self.num_experts, self.num_worst_tokens, self.is_fp8 = self.placement.num_physical, num_worst_tokens, is_fp8
        dtype, parameter_device = dtype or torch.get_default_dtype(), _find_device(device, buffer)
        # Nothing is drawn here: all weights follow from the one number that `reset_parameters` draws, now or after
        # `to_empty`.
        wide = torch.promote_types(dtype, torch.float32)
        self.gate = Gate(hidden, num_experts, topk, options, device=parameter_device, dtype=wide, is_in_layer=True)
        self.experts = Experts(
            self.placement.num_physical,
            hidden,
            intermediate,
            buffer.rank,
            _ranks_of(buffer),
            mesh=mesh,
            reduction=reduction,
            device=parameter_device,
            dtype=dtype,
        )
        if placement is not None:
            self._set_placement(placement)
        self.shared = None
        if shared_intermediate:
            self.shared = SwiGLU(hidden, shared_intermediate, device=parameter_device, dtype=dtype)
        if parameter_device.type != "meta":
            self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights, and forget the balance. Collective where the buffer has a process group.

        Loops that call `reset_parameters` of every module that has it give the same: of the parts of a layer none draws
        by itself.
        """
        seed = _common_seed(self.buffer)
        generator = torch.Generator().manual_seed(seed)
        draw(self.gate.weight, generator)
        if self.shared is not None:
            self.shared.draw(generator)
        self.experts.draw(seed, self.placement.of_rank(self.buffer.rank).tolist())  # copies of an expert draw the same
        self.gate.forget_balance()

    def __setattr__(self, name: str, value: Any) -> None:
        super().__setattr__(name, value)
        if name == "_is_fsdp_managed_module":  # set by FSDP2 when it has sharded the layer, or a module around it
            self._check_shards()

    def _check_shards(self) -> None:
        """Refuse parameters of two dtypes in one group of FSDP2, which would fail in the first forward pass.

        Raises:
            ValueError: The gate and the shared expert are in one.
        """
        gate, shared = self.gate, self.shared
        if shared is None or isinstance(gate, FSDPModule) or isinstance(shared, FSDPModule):
            return
        if gate.weight.dtype != shared.up.dtype and gate.weight.requires_grad and shared.up.requires_grad:
            gate_dtype, dtype = (str(one.dtype).removeprefix("torch.") for one in (gate.weight, shared.up))
            raise ValueError(
                f"fully_shard: the gate is {gate_dtype} and the shared expert {dtype}, and FSDP2 needs one dtype in "
                "all parameters that it shards together. Shard the gate before, by itself and over the same mesh: "
                "`fully_shard(layer.gate, mesh=mesh)`"
            )

    def forward(self, x: torch.Tensor, num_sequences: int = 1) -> MoEOutput:
        """Return what the experts make of the tokens, and the balance loss.

        Args:
            x: [..., H] float; leading dimensions are tokens.
            num_sequences: How many sequences of equal length the tokens are; for the auxiliary loss.
        """
        self._check(x)
        tokens = x.reshape(-1, x.size(-1))
        routes = self.gate(tokens, num_sequences)
        tokens = cast_as_autocast(tokens)  # before they travel: the experts would cast them
        is_opaque = torch.compiler.is_compiling() and not self.num_worst_tokens
        if self._elastic is not None:
            combined = self._exchange_expanded(self._elastic, tokens, routes)
        else:
            combined = (self._exchange_untraced if is_opaque else self._exchange)(tokens, routes)
        # Not a view where none is needed: FSDP2 warns of views that leave a module.
        return MoEOutput(combined if x.dim() == 2 else combined.view_as(x), routes.balance_loss)

    def _check(self, x: torch.Tensor) -> None:
        """Refuse what is no input of this layer, before anything is sent."""
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"MoELayer: `x` must be a tensor, got {type(x).__name__}")
        hidden = self.gate.weight.size(1)
        if x.dim() == 0 or x.size(-1) != hidden:
            raise ValueError(
                f"MoELayer: `x` must have shape [..., {hidden}], the last dimension the layer's hidden size, "
                f"it has {list(x.shape)}"
            )
        # Autocast casts both, and FSDP2 may cast the experts when they are called.
        is_cast = torch.is_autocast_enabled(x.device.type) or isinstance(self.experts, FSDPModule)
        if not x.is_floating_point() or (x.dtype != self.experts.up.dtype and not is_cast):
            dtype, given = (str(tensor.dtype).removeprefix("torch.") for tensor in (self.experts.up, x))
            remedy = f"Pass `x.to(torch.{dtype})`, or make the layer with another `dtype`"
            if x.is_floating_point() and x.element_size() < self.experts.up.element_size():
                remedy += (
                    "; where a `mp_policy` of FSDP2 has cast it, the experts need that, too: call `fully_shard("
                    "layer.experts, mesh=mesh['dp'], mp_policy=...)`, over a dimension of one rank without replicas"
                )
            raise ValueError(f"MoELayer: `x` must be {dtype} as the experts are, it is {given}. {remedy}")

    def _exchange(self, tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
        """[T, H], what the experts make of the tokens, and the shared one while they travel."""
        sending = ops.dispatch(
            self.buffer,
            tokens,
            routes.topk_idx,
            routes.topk_weights,
            self.num_experts,
            num_worst_tokens=self.num_worst_tokens,
            is_fp8=self.is_fp8,
            async_finish=True,
        )
        shared = self.shared(tokens) if self.shared is not None else None
        received = sending.wait()
        combined = ops.combine(self.buffer, self._run_experts(received), received, is_fp8=self.is_fp8)
        return combined if shared is None else combined + shared

    @ops.untraced
    def _exchange_untraced(self, tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
        return self._exchange(tokens, routes)

    def _exchange_expanded(self, buffer: ElasticBuffer, tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
        """The same with rows that come grouped by expert: the experts take them as they are."""
        max_tokens = self.num_worst_tokens // self.buffer.group_size  # checked by the dispatch, which tells the peers
        idx, weights = routes.topk_idx, routes.topk_weights
        received = dispatch_expanded(buffer, tokens, idx, weights, self.num_experts, max_tokens)
        outputs = self.experts(received.x, received.num_rows)
        weighted = (outputs * received.weights.unsqueeze(1)).to(outputs.dtype)
        combined = combine_expanded(buffer, weighted, received)
        return combined if self.shared is None else combined + self.shared(tokens)

    def _run_experts(self, received: ops.Received) -> torch.Tensor:
        """[n, H], each row the weighted sum of what this rank's experts make of it; in the window."""
        select = self._select_padded if self.num_worst_tokens else self._select
        rows, weights, outputs = select(received)
        weighted = outputs * weights.unsqueeze(1)  # FP32 from here, also for BF16 rows
        return ops.add_rows(self.buffer, weighted, rows, received, outputs.dtype)

    def _select(self, received: ops.Received) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of each selection of a local expert, by expert: its row [m], its weight [m], the expert's output [m, H]."""
        num_rows, ids = received.num_tokens_per_expert, received.topk_idx.flatten()
        order = ids.argsort(stable=True)[ids.numel() - sum(num_rows) :]  # selections of nothing (-1) come first
        rows = order // received.topk_idx.size(1)
        outputs = self.experts(received.x.index_select(0, rows), num_rows)
        return rows, received.topk_weights.flatten()[order], outputs

    def _select_padded(self, received: ops.Received) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The same with as many selections as there could be; the last ones are of nothing, with output 0."""
        num_local, (num_rows, num_topk) = self.experts.num_local, received.topk_idx.shape
        ids = received.topk_idx.flatten()
        ids = torch.where(ids < 0, num_local, ids)  # behind all others
        # A row's experts are all different, so it cannot have more of them here than there are.
        order = ids.argsort(stable=True)[: num_rows * min(num_topk, num_local)]
        ends = count_ids(ids, num_local + 1)[:num_local].cumsum(0).to(torch.int32)
        rows = order // num_topk
        outputs = self.experts(received.x.index_select(0, rows), ends)
        return rows, received.topk_weights.flatten()[order], outputs

    def update_bias(self, speed: float = 1e-3, group: dist.ProcessGroup | None = None) -> None:
        """One step of loss-free balancing, over the choices of all ranks since the last. After the backward pass.

        Args:
            speed: The size of the step.
            group: The ranks that share the gate; default those of the experts' mesh, with the replicas over which
                FSDP2 has sharded them, and without a mesh those of the buffer.
        """
        *others, last = [group] if group is not None else self._gate_groups()
        for one in others:
            dist.all_reduce(self.gate.load, group=one)
        self.gate.update_bias(speed, last)

    def _gate_groups(self) -> list[dist.ProcessGroup | None]:
        """The groups to sum over, one after the other, for a sum over all ranks that are known to share the gate."""
        mesh = self.experts.mesh
        if mesh is not None and mesh.ndim > 1:
            return [mesh.get_group(dim) for dim in range(mesh.ndim)]
        num_ranks = self.buffer.group_size
        if self.buffer._process_group is not None and num_ranks < dist.get_world_size():
            warnings.warn(
                f"MoELayer.update_bias: choices are summed over the {num_ranks} ranks of the buffer, and there are "
                f"{dist.get_world_size()}. If others hold replicas of the layer, biases drift apart: pass `group`, the "
                "ranks that share the gate. If none do, pass `group=layer.buffer.group`",
                RuntimeWarning,
                stacklevel=3,
            )
        return [self.buffer._process_group]

    @torch.no_grad()
    def move_experts(self, placement: Placement, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Move the experts to where a placement has them. All ranks call it together, between steps.

        Args:
            placement: With as many physical experts as the layer was made with.
            optimizer: Its state of the experts moves with them: tensors whose first dimension is the experts.
        """
        tensors: list[torch.Tensor] = []
        for parameter in self.experts.parameters():
            tensors.append(parameter)
            state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            for name, value in state.items():
                if not torch.is_tensor(value) or value.numel() == 1:
                    continue  # such as the number of steps
                if value.dim() != parameter.dim() or value.size(0) != parameter.size(0):
                    raise ValueError(
                        f"move_experts: the optimizer's `{name}` of the experts has shape {list(value.shape)}, which "
                        f"does not say what belongs to each of {parameter.size(0)} experts. Use another optimizer"
                    )
                tensors.append(value)
        move_experts(tensors, self.placement, placement, self.buffer.rank, self.buffer._process_group)
        self._set_placement(placement)

    def _set_placement(self, placement: Placement) -> None:
        self.placement = placement
        self.gate.set_placement(placement, self.buffer.rank)
        self.experts.num_copies = placement.num_copies[placement.of_rank(self.buffer.rank)].tolist()

    @torch.no_grad()
    def reduce_replica_gradients(self) -> None:
        """Sum the experts' gradients over their copies, in place. All ranks call it together, before the optimizer.

        Copies then stay alike. Without replicas nothing happens.
        """
        for parameter in self.experts.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sum_over_copies(parameter.grad, self.placement, self.buffer.rank, self.buffer._process_group)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"rank {self.buffer.rank}/{self.buffer.group_size}"


def _find_buffer(group: dist.ProcessGroup | None, buffer: Buffer | None, mesh: DeviceMesh | None) -> Buffer:
    """The buffer that was given, or one for the ranks that were."""
    for name, given, kind in (("buffer", buffer, Buffer), ("mesh", mesh, DeviceMesh)):
        if given is not None and not isinstance(given, kind):
            raise TypeError(f"MoELayer: `{name}` must be a {kind.__name__}, got {type(given).__name__}")
    if mesh is None:
        if (group is None) == (buffer is None):
            raise ValueError("MoELayer: `group`, `buffer` or `mesh` must be given, and not both of the first two")
        return buffer if buffer is not None else Buffer(group)
    if group is not None:
        raise ValueError("MoELayer: `group` and `mesh` exclude each other: the mesh has a group")
    if mesh.ndim != 1:
        raise ValueError(
            f"MoELayer: `mesh` must have one dimension, over which experts are split, this one has {mesh.ndim}. Pass "
            "one of them, such as `mesh['ep']`"
        )
    buffer = buffer if buffer is not None else Buffer(mesh.get_group(), device=mesh.device_type)
    ranks = _ranks_of(buffer)
    if ranks != mesh.mesh.tolist():
        raise ValueError(f"MoELayer: `mesh` must have the buffer's ranks {ranks}, it has {mesh.mesh.tolist()}")
    if mesh.device_type != buffer.device.type:
        raise ValueError(
            f"MoELayer: `mesh` must be of the buffer's device {buffer.device}, it is of {mesh.device_type}"
        )
    return buffer


def _ranks_of(buffer: Buffer) -> list[int]:
    """The ranks of a buffer, numbered as in the world; without a process group the world is the buffer's ranks."""
    return list(group_ranks(buffer._process_group) or range(buffer.group_size))


def _find_device(device: torch.device | str | None, buffer: Buffer) -> torch.device:
    """Where parameters are made."""
    if device is None:
        return torch.device("meta") if torch.get_default_device().type == "meta" else buffer.device
    try:
        given = torch.device(device)
    except RuntimeError:  # torch knows no such device
        given = None
    if given is None or given.type not in ("meta", buffer.device.type):
        raise ValueError(f"MoELayer: `device` must be the buffer's {buffer.device} or meta, got {device}")
    return given if given.type == "meta" else buffer.device


def _common_seed(buffer: Buffer) -> int:
    """A seed from the first rank's default generator. The other ranks' generators move on alike."""
    seed = [int(torch.randint(2**31, (), device="cpu"))]
    group = buffer._process_group
    if group is not None and buffer.group_size > 1:
        dist.broadcast_object_list(seed, src=dist.get_global_rank(group, 0), group=group)
    return seed[0]
