"""A Mixture-of-Experts layer whose experts live on several ranks.

Shape letters: T tokens of this rank, n rows that it received, m selections among them, H hidden size, I inner size of
an expert, E experts, R ranks, L = E / R experts of a rank, K selections of a token.

A layer's parameters are of two kinds. Those of the experts (names with `experts` in them) are a rank's own, and get the
gradients of all ranks' tokens. All others are the same on all ranks, and get those of the rank's own tokens: sum them
with `reduce_replicated_gradients`. Then every gradient is that of the sum of all ranks' losses.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..buffers.legacy import Buffer
from ..placement import Placement, even_placement, move_experts, sum_over_copies
from . import ops
from .gate import Gate, GateOptions, count_ids
from .grouped import grouped_linear, padded_linear


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
        return swiglu(x, self.up, self.down)


class Experts(nn.Module):
    """This rank's blocks.

    Attributes:
        up: [L, 2I, H].
        down: [L, H, I].
    """

    def __init__(
        self, num_local_experts: int, hidden: int, intermediate: int, *, device: torch.device, dtype: torch.dtype
    ):
        super().__init__()
        self.up = nn.Parameter(torch.empty(num_local_experts, 2 * intermediate, hidden, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(num_local_experts, hidden, intermediate, device=device, dtype=dtype))

    def forward(self, x: torch.Tensor, num_rows: list[int]) -> torch.Tensor:
        """Rows through their experts.

        Args:
            x: [m, H], ordered by expert.
            num_rows: Of each expert; they sum to m.

        Returns:
            [m, H], in the same order.
        """
        return grouped_linear(_activate(grouped_linear(x, self.up, num_rows)), self.down, num_rows)

    def forward_padded(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """The same where the host does not know the counts.

        Args:
            x: [m, H], ordered by expert; then rows of nobody.
            ends: [L] int32, where the rows of each expert end.

        Returns:
            [m, H], 0 for rows of nobody.
        """
        return padded_linear(_activate(padded_linear(x, self.up, ends)), self.down, ends)


def _activate(inner: torch.Tensor) -> torch.Tensor:
    """[m, 2I], gate and value side by side, to [m, I]."""
    gate, value = inner.chunk(2, dim=-1)
    return F.silu(gate) * value


def swiglu(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
    """[m, H] through `up` [2I, H] and `down` [H, I] to [m, H]."""
    return F.linear(_activate(F.linear(x, up)), down)


class MoEOutput(NamedTuple):
    """What a layer returns.

    Attributes:
        x: Of the shape and dtype of the input. There is no residual connection in it.
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
        buffer: Or use this one, which layers may share. Exactly one of the two.
        shared_intermediate: Inner size of the shared expert; 0: there is none.
        options: How the gate chooses.
        dtype: Of the experts; the gate's is at least FP32. Default: torch's default dtype.
        num_worst_tokens: Work on this many rows, whoever chooses what; the tokens of all ranks always suffice. Shapes
            are then fixed: the host never waits for counts, and `torch.compile(fullgraph=True)` takes the layer. 0: on
            as many rows as come, which is less work.
        is_fp8: Tokens, and in the backward pass gradients of sums, travel as FP8. Sums travel as they are.
        placement: Which rank has which experts, perhaps several times; None: E / R on each, in order.

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
        shared_intermediate: int = 0,
        options: GateOptions | None = None,
        dtype: torch.dtype | None = None,
        num_worst_tokens: int = 0,
        is_fp8: bool = False,
        placement: Placement | None = None,
    ):
        super().__init__()
        if (group is None) == (buffer is None):
            raise ValueError("MoELayer: `group` or `buffer` must be given, and not both")
        self.buffer = buffer if buffer is not None else Buffer(group)
        if placement is None and num_experts % self.buffer.group_size:
            raise ValueError(
                f"MoELayer: `num_experts` must be a multiple of the {self.buffer.group_size} ranks, got {num_experts}"
            )
        self.placement = placement or even_placement(num_experts, self.buffer.group_size)
        if self.placement.num_ranks != self.buffer.group_size:
            raise ValueError(
                f"MoELayer: `placement` must be for {self.buffer.group_size} ranks, got {self.placement.num_ranks}"
            )
        self.num_experts, self.num_worst_tokens, self.is_fp8 = self.placement.num_physical, num_worst_tokens, is_fp8
        dtype, device = dtype or torch.get_default_dtype(), self.buffer.device
        self.gate = Gate(
            hidden, num_experts, topk, options, device=device, dtype=torch.promote_types(dtype, torch.float32)
        )
        if placement is not None:
            self.gate.set_placement(placement, self.buffer.rank)
        self.experts = Experts(self.placement.num_slots, hidden, intermediate, device=device, dtype=dtype)
        self.shared = None
        if shared_intermediate:
            self.shared = SwiGLU(hidden, shared_intermediate, device=device, dtype=dtype)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw all weights. Collective where the buffer has a process group."""
        seed = _common_seed(self.buffer)
        generator = torch.Generator().manual_seed(seed)
        replicated = [self.gate.weight]
        if self.shared is not None:
            replicated += [self.shared.up, self.shared.down]
        for parameter in replicated:
            _draw(parameter, generator)
        own = self.placement.of_rank(self.buffer.rank).tolist()  # copies of an expert draw the same
        for expert, up, down in zip(own, self.experts.up, self.experts.down, strict=True):
            generator.manual_seed(seed + 1 + expert)
            _draw(up, generator)
            _draw(down, generator)

    def forward(self, x: torch.Tensor, num_sequences: int = 1) -> MoEOutput:
        """The layer.

        Args:
            x: [..., H] float; leading dimensions are tokens.
            num_sequences: How many sequences of equal length the tokens are; for the auxiliary loss.
        """
        tokens = x.reshape(-1, x.size(-1))
        routes = self.gate(tokens, num_sequences)
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
        shared = self.shared(tokens) if self.shared is not None else None  # while the rows are on their way
        received = sending.wait()
        combined = ops.combine(self.buffer, self._run_experts(received), received, is_fp8=self.is_fp8)
        if shared is not None:
            combined = combined + shared
        return MoEOutput(combined.view_as(x), routes.balance_loss)

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
        num_local, (num_rows, num_topk) = self.experts.up.size(0), received.topk_idx.shape
        ids = received.topk_idx.flatten()
        ids = torch.where(ids < 0, num_local, ids)  # behind all others
        # A row's experts are all different, so it cannot have more of them here than there are.
        order = ids.argsort(stable=True)[: num_rows * min(num_topk, num_local)]
        ends = count_ids(ids, num_local + 1)[:num_local].cumsum(0).to(torch.int32)
        rows = order // num_topk
        outputs = self.experts.forward_padded(received.x.index_select(0, rows), ends)
        return rows, received.topk_weights.flatten()[order], outputs

    def update_bias(self, speed: float = 1e-3) -> None:
        """One step of loss-free balancing, over the choices of all ranks since the last. After the backward pass."""
        self.gate.update_bias(speed, self.buffer.group)

    @torch.no_grad()
    def move_experts(self, placement: Placement, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Move the experts to where a placement has them. All ranks call it together, between steps.

        Args:
            placement: With as many physical experts as the layer was made with.
            optimizer: Its state of the experts, tensors of their shape, moves with them.
        """
        parameters = list(self.experts.parameters())
        tensors: list[torch.Tensor] = [*parameters]
        for parameter in parameters:
            state = optimizer.state.get(parameter, {}) if optimizer is not None else {}
            tensors += [one for one in state.values() if torch.is_tensor(one) and one.shape == parameter.shape]
        move_experts(tensors, self.placement, placement, self.buffer.rank, self.buffer.group)
        self.placement = placement
        self.gate.set_placement(placement, self.buffer.rank)

    @torch.no_grad()
    def reduce_replica_gradients(self) -> None:
        """Sum the experts' gradients over their copies, in place. All ranks call it together, before the optimizer.

        Copies then stay alike. Without replicas nothing happens.
        """
        for parameter in self.experts.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            sum_over_copies(parameter.grad, self.placement, self.buffer.rank, self.buffer.group)

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        return f"rank {self.buffer.rank}/{self.buffer.group_size}"


def _common_seed(buffer: Buffer) -> int:
    """A seed from the first rank's default generator. The other ranks' generators move on alike."""
    seed = [int(torch.randint(2**31, ()))]
    if buffer.group is not None and buffer.group_size > 1:
        dist.broadcast_object_list(seed, src=dist.get_global_rank(buffer.group, 0), group=buffer.group)
    return seed[0]


def _draw(weight: torch.Tensor, generator: torch.Generator) -> None:
    """Fill [out, in] with a standard deviation of 1 / sqrt(in), the same on all devices and in all dtypes."""
    values = torch.randn(weight.shape, generator=generator, dtype=torch.float32, device="cpu")
    weight.copy_(values * weight.size(1) ** -0.5)


# Gradients and checkpoints -------------------------------------------------------------------------------------------


def is_expert_name(name: str) -> bool:
    """Whether a parameter of this name, of a layer or of a model around it, is a rank's own."""
    return "experts" in name.split(".")


def reduce_replicated_gradients(module: nn.Module, group: dist.ProcessGroup) -> None:
    """Sum the gradients of everything but the experts over all ranks, in place. All ranks call it together.

    A parameter that a rank did not use counts as 0. Divide the losses by what you like before: sums stay sums.

    Args:
        module: A layer, or a model with layers in it.
        group: The ranks that hold it.
    """
    parameters = [
        parameter
        for name, parameter in module.named_parameters()
        if parameter.requires_grad and not is_expert_name(name)
    ]
    for parameter in parameters:
        if parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    for bucket in _buckets([parameter.grad for parameter in parameters if parameter.grad is not None]):
        flat = torch.cat([grad.flatten() for grad in bucket])
        dist.all_reduce(flat, group=group)
        for grad, summed in zip(bucket, flat.split([grad.numel() for grad in bucket]), strict=True):
            grad.copy_(summed.view_as(grad))


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


def merge_experts(shards: Sequence[Mapping[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """One state dict with all experts, out of those of all ranks. No communication: shards may come from files.

    Args:
        shards: `state_dict()` of each rank, of a layer or of a model around it, by rank.

    Returns:
        Experts [E, ...] joined; everything else as the first rank has it.
    """
    return {
        name: torch.cat([shard[name] for shard in shards]) if is_expert_name(name) else value
        for name, value in shards[0].items()
    }


def take_experts(state: Mapping[str, torch.Tensor], rank: int, num_ranks: int) -> dict[str, torch.Tensor]:
    """The state dict of one rank out of one with all experts. A checkpoint of N ranks so opens on M:

        layer.load_state_dict(take_experts(merge_experts([torch.load(f) for f in files]), rank, num_ranks))

    Args:
        state: As `merge_experts` makes it.
        rank: The rank.
        num_ranks: How many there are now, a divisor of the experts.
    """
    taken = dict(state)
    for name, value in state.items():
        if is_expert_name(name):
            if value.size(0) % num_ranks:
                raise ValueError(
                    f"take_experts: the {value.size(0)} experts of `{name}` must divide evenly over {num_ranks} ranks"
                )
            taken[name] = value.chunk(num_ranks)[rank].clone()  # not a view that would keep all experts alive
    return taken
