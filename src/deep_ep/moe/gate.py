"""The gate: which experts a token goes to, and with what weights. Plain torch, local, differentiable in the weights.

Shape letters: T tokens of this rank, H hidden size, E experts, G groups of E / G experts each, K selections of a token.
The functions are the steps; `Gate` does them in order:

    scores = score(logits)                                     softmax or sigmoid
    topk_idx = choose_experts(scores + bias)                   best groups, then best experts inside them
    topk_weights = weigh(scores, topk_idx)                     without the bias: it steers, it does not weigh
    drop_beyond_capacity(topk_idx, topk_weights)               on request
    spread_choices(topk_idx)                                   where experts have replicas: ids of physical experts
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from ..buffers.checks import check_int
from ..placement import Placement, spread_choices
from .exchange import opaque

Scoring = Literal["sigmoid", "softmax"]
Keep = Literal["heaviest", "first"]

_TINY = 1e-20  # against 0 / 0 where all scores of a token have underflown


# The steps -----------------------------------------------------------------------------------------------------------


def score(logits: torch.Tensor, scoring: Scoring = "sigmoid") -> torch.Tensor:
    """How much each token likes each expert: [T, E] to [T, E], in at least FP32."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if scoring == "sigmoid":
        return logits.sigmoid()
    if scoring == "softmax":
        return logits.softmax(dim=-1)
    raise ValueError(f"score: `scoring` must be 'sigmoid' or 'softmax', got {scoring!r}")


def choose_experts(
    scores: torch.Tensor, topk: int, num_groups: int = 1, topk_groups: int = 1, num_deciding: int = 2
) -> torch.Tensor:
    """The best experts of each token inside its best groups.

    Args:
        scores: [T, E] float; with the balancing bias, if there is one.
        topk: K.
        num_groups: G, a divisor of E. Experts of a group are neighbours, so that a group can be a node's.
        topk_groups: How many groups a token may go to.
        num_deciding: A group is as good as the sum of this many of its best experts (1: DeepSeek-V2, 2: V3).

    Returns:
        [T, K] int64, best first, all different.

    Example:
        `choose_experts(tensor([[9., 0, 0, 0, 5, 6]]), 2, num_groups=3)` is `[[5, 4]]`: the last group has 11, the
        first only 9.
    """
    num_experts = scores.size(-1)
    check_choice(num_experts, topk, num_groups, topk_groups)
    scores = scores.detach()
    if topk_groups < num_groups:
        by_group = scores.reshape(*scores.shape[:-1], num_groups, num_experts // num_groups)
        group_scores = by_group.topk(min(num_deciding, by_group.size(-1)), dim=-1).values.sum(-1)
        best = group_scores.topk(topk_groups, dim=-1).indices
        is_out = torch.ones_like(group_scores, dtype=torch.bool).scatter(-1, best, False)
        scores = by_group.masked_fill(is_out.unsqueeze(-1), -math.inf).flatten(-2)
    return scores.topk(topk, dim=-1).indices


def check_choice(num_experts: int, topk: int, num_groups: int, topk_groups: int) -> None:
    """Check that K experts can be chosen.

    Raises:
        ValueError: They cannot.
        TypeError: A number is no integer.
    """
    for name, value in (("topk", topk), ("num_groups", num_groups), ("topk_groups", topk_groups)):
        check_int("gate", name, value)
    if num_groups < 1 or num_experts % num_groups:
        raise ValueError(f"gate: {num_experts} experts must divide evenly into `num_groups`, got {num_groups}")
    if not 1 <= topk_groups <= num_groups:
        raise ValueError(f"gate: `topk_groups` must be between 1 and the {num_groups} groups, got {topk_groups}")
    most = topk_groups * (num_experts // num_groups)
    if not 1 <= topk <= most:
        raise ValueError(f"gate: `topk` must be between 1 and the {most} experts of a token's groups, got {topk}")


def weigh(scores: torch.Tensor, topk_idx: torch.Tensor, is_normalized: bool = True, scale: float = 1.0) -> torch.Tensor:
    """The weights of the chosen experts; gradients flow into the scores.

    Args:
        scores: [T, E] float32 or float64, without bias.
        topk_idx: [T, K] int64 expert ids; -1: nothing.
        is_normalized: Whether the weights of a token sum to `scale`.
        scale: Factor on all weights.

    Returns:
        [T, K] of the dtype of `scores`, 0 where the id is -1.
    """
    weights = scores.gather(-1, topk_idx.clamp(min=0)).masked_fill(topk_idx < 0, 0.0)
    if is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + _TINY)
    return weights * scale


def drop_beyond_capacity(
    topk_idx: torch.Tensor, topk_weights: torch.Tensor, num_experts: int, capacity: int, keep: Keep = "heaviest"
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let each expert keep at most so many of this rank's selections.

    Args:
        topk_idx: [T, K] int64; -1: nothing.
        topk_weights: [T, K] float.
        num_experts: E.
        capacity: The most selections of an expert.
        keep: Which stay: those of the greatest weights, or those of the first tokens. Ties: the first.

    Returns:
        The ids with -1 and the weights with 0 where a selection was dropped. Other weights do not change.

    Example:
        Ids `[[0], [0], [1]]`, weights `[[.2], [.5], [.1]]`, capacity 1: ids `[[-1], [0], [1]]`; with `keep="first"`
        `[[0], [-1], [1]]`.
    """
    if keep not in ("heaviest", "first"):
        raise ValueError(f"drop_beyond_capacity: `keep` must be 'heaviest' or 'first', got {keep!r}")
    ids = topk_idx.flatten()
    ids = torch.where(ids < 0, num_experts, ids)  # selections of nothing go behind all others
    if keep == "first":
        order = torch.arange(ids.numel(), device=ids.device)
    else:
        order = topk_weights.detach().flatten().argsort(descending=True, stable=True)
    order = order[ids[order].argsort(stable=True)]  # by expert, the most deserving first
    counts = count_ids(ids, num_experts + 1)
    starts = counts.cumsum(0) - counts
    place = torch.arange(ids.numel(), device=ids.device) - starts[ids[order]]
    is_dropped = torch.empty_like(ids, dtype=torch.bool).scatter(0, order, place >= capacity).view_as(topk_idx)
    return topk_idx.masked_fill(is_dropped, -1), topk_weights.masked_fill(is_dropped, 0.0)


def count_selections(topk_idx: torch.Tensor, num_experts: int) -> torch.Tensor:
    """How often each expert was chosen: [T, K] to [E] int64."""
    ids = topk_idx.flatten()
    return count_ids(torch.where(ids < 0, num_experts, ids), num_experts + 1)[:num_experts]


def count_ids(ids: torch.Tensor, num_ids: int) -> torch.Tensor:
    """How often each id occurs: [m] to [num_ids] int64. Unlike `bincount`, of a shape that a compiler knows."""
    ids = ids.to(torch.int64)
    return torch.zeros(num_ids, dtype=torch.int64, device=ids.device).scatter_add(0, ids, torch.ones_like(ids))


# Balance -------------------------------------------------------------------------------------------------------------


def balanced_bias(bias: torch.Tensor, load: torch.Tensor, speed: float) -> torch.Tensor:
    """One step of loss-free balancing: experts that were chosen too often get less, the others more.

    Args:
        bias: [E] float.
        load: [E], how often each expert was chosen, on all ranks.
        speed: The size of the step.

    Returns:
        [E], the next bias.
    """
    load = load.to(torch.float64)  # exact for all counts
    return bias + speed * (load.mean() - load).sign().to(bias.dtype)


def sequence_balance_loss(scores: torch.Tensor, topk_idx: torch.Tensor, num_sequences: int = 1) -> torch.Tensor:
    """The sequence-wise auxiliary loss of DeepSeek-V3, without its factor; 1 for a sequence that is balanced.

    For each sequence `sum(f * p)` over the experts: f is E / K times the share of its tokens that chose the expert, p
    the mean of the expert's share of a token's scores. Gradients flow through p.

    Args:
        scores: [T, E] float, without bias.
        topk_idx: [T, K] int64, before anything is dropped.
        num_sequences: S, a divisor of T; tokens of a sequence are neighbours.

    Returns:
        A scalar of the dtype of `scores`: the mean over the sequences; 0 without tokens.
    """
    (num_tokens, num_experts), topk = scores.shape, topk_idx.size(1)
    if num_sequences < 1 or num_tokens % num_sequences:
        raise ValueError(
            f"sequence_balance_loss: {num_tokens} tokens must divide evenly into `num_sequences`, got {num_sequences}"
        )
    if num_tokens == 0:
        return scores.sum()  # 0, and still in the graph
    shape = (num_sequences, num_tokens // num_sequences)
    is_chosen = torch.zeros_like(scores).scatter_add(1, topk_idx.clamp(min=0), (topk_idx >= 0).to(scores.dtype))
    share = scores / (scores.sum(-1, keepdim=True) + _TINY)
    often = is_chosen.unflatten(0, shape).mean(1) * (num_experts / topk)
    return (often * share.unflatten(0, shape).mean(1)).sum(-1).mean()


@opaque
def _add_choices(topk_idx: torch.Tensor, load: torch.Tensor) -> None:
    """Add to the load of a gate, which selective activation checkpointing must not take for a result to be kept."""
    load += count_selections(topk_idx, load.shape[0])


@torch.library.custom_op("deep_ep_moe::count_choices", mutates_args=())
def _count_choices(topk_idx: torch.Tensor, load: torch.Tensor) -> torch.Tensor:
    """Add to the load of a gate, in a compiled graph. Returns a copy of the ids, so that the graph keeps the count.

    It does not declare that it changes the load: under activation checkpointing a graph may change nothing, and no
    graph reads the load.
    """
    _add_choices(topk_idx, load)
    return topk_idx.clone()


_count_choices.register_fake(lambda topk_idx, _load: torch.empty_like(topk_idx))


def without_autocast(device: torch.device) -> contextlib.AbstractContextManager:
    """Inside the block operators compute in the dtype of their inputs. Where that is so already, it costs nothing."""
    is_enabled = torch.is_autocast_enabled(device.type)
    return torch.autocast(device.type, enabled=False) if is_enabled else contextlib.nullcontext()


# The module ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GateOptions:
    """How a gate chooses.

    Attributes:
        scoring: `sigmoid` or `softmax`.
        num_groups: G, a divisor of the experts.
        topk_groups: How many groups a token may go to.
        num_deciding: How many of its best experts a group is judged by.
        is_normalized: Whether the weights of a token sum to `scale`.
        scale: Factor on all weights.
        capacity_factor: Each expert keeps at most this many times its even share of this rank's selections; None: all.
        keep: Which selections it keeps.
        balance_loss: Factor of the sequence-wise auxiliary loss; 0: none is computed.
        update_every: The bias moves with every so many calls of `update_bias`; those between only add up the choices of
            all ranks. The sums are then part of the state dict, so a checkpoint may be saved between two moves.
    """

    scoring: Scoring = "sigmoid"
    num_groups: int = 1
    topk_groups: int = 1
    num_deciding: int = 2
    is_normalized: bool = True
    scale: float = 1.0
    capacity_factor: float | None = None
    keep: Keep = "heaviest"
    balance_loss: float = 0.0
    update_every: int = 1

    def __post_init__(self) -> None:
        check_int("GateOptions", "num_deciding", self.num_deciding, 1)
        check_int("GateOptions", "update_every", self.update_every, 1)
        if self.scoring not in ("sigmoid", "softmax"):
            raise ValueError(f"GateOptions: `scoring` must be 'sigmoid' or 'softmax', got {self.scoring!r}")
        if self.keep not in ("heaviest", "first"):
            raise ValueError(f"GateOptions: `keep` must be 'heaviest' or 'first', got {self.keep!r}")
        if self.capacity_factor is not None and not self.capacity_factor > 0:
            raise ValueError(
                f"GateOptions: `capacity_factor` must be greater than 0, got {self.capacity_factor}. None: no limit"
            )


class Routes(NamedTuple):
    """What a gate decides.

    Attributes:
        topk_idx: [T, K] int64 expert ids, -1 where dropped; of physical experts where the gate has a placement.
        topk_weights: [T, K] float32 (float64 for float64 tokens), 0 where dropped.
        balance_loss: Scalar, with its factor; 0 where none was asked for.
    """

    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    balance_loss: torch.Tensor


def _before_loading(gate: nn.Module, state: dict[str, Any], prefix: str, *_rest: Any) -> None:
    """Called before a state is loaded, which may be one of a gate with another `update_every`."""
    assert isinstance(gate, Gate)
    name, bias = f"{prefix}sums", state.get(f"{prefix}bias")
    if gate.sums is None:
        state.pop(name, None)
    elif bias is not None:
        state.setdefault(name, torch.zeros(gate.sums.shape, dtype=torch.int64, device=bias.device))


def _after_loading(gate: nn.Module, _incompatible_keys: Any) -> None:
    """Called when a state has been loaded; with `assign=True` it may have replaced parameters of the meta device."""
    assert isinstance(gate, Gate)
    if gate.load.is_meta:
        gate._make_counters(gate.weight.device)


class Gate(nn.Module):
    """A linear router with everything above. The same on all ranks.

    In training it counts its choices, for `update_bias`. Under activation checkpointing every choice counts twice,
    which changes nothing: only the experts' order relative to the mean matters. The bias must stay as it is between a
    forward and its recomputation, so update it after the backward pass.

    Args:
        hidden: H.
        num_experts: E.
        topk: K.
        options: How it chooses.
        device: Of the parameters.
        dtype: Of the weight; default FP32, and scores are never made in less.
        is_in_layer: A `MoELayer` draws the weight with its own: it has no values yet, and `reset_parameters` leaves it
            alone.

    Attributes:
        weight: [E, H].
        bias: [E] float32, added to the scores for the choice only. It stays float32, whatever the gate is cast to.
        load: [E] int64, choices of this rank since the last call of `update_bias`. Not in the state dict.
        sums: [E + 1] int64, choices of all ranks that `update_bias` has added up since the bias last moved, and how
            many calls have. The same on all ranks, and in the state dict. None where the bias moves in every call.
        copies: [E, C] int64, the physical experts of each expert; None without a placement. Not in the state dict.
        num_copies: [E] int64, how many these are; None likewise.
    """

    bias: torch.Tensor
    load: torch.Tensor
    sums: torch.Tensor | None
    copies: torch.Tensor | None
    num_copies: torch.Tensor | None

    def __init__(
        self,
        hidden: int,
        num_experts: int,
        topk: int,
        options: GateOptions | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.float32,
        is_in_layer: bool = False,
    ):
        super().__init__()
        self.options = GateOptions() if options is None else options
        if not isinstance(self.options, GateOptions):
            raise TypeError(f"Gate: `options` must be a GateOptions, got {type(options).__name__}")
        check_int("Gate", "hidden", hidden, 1)
        check_int("Gate", "num_experts", num_experts, 1)
        check_choice(num_experts, topk, self.options.num_groups, self.options.topk_groups)
        self.topk = topk
        self._is_in_layer = is_in_layer
        self.weight = nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        self.register_buffer("bias", torch.zeros(num_experts, device=device, dtype=torch.float32))
        self.register_buffer("load", torch.zeros(num_experts, device=device, dtype=torch.int64), persistent=False)
        has_sums = self.options.update_every > 1
        self.register_buffer(
            "sums", torch.zeros(num_experts + 1, device=device, dtype=torch.int64) if has_sums else None
        )
        self.register_buffer("copies", None, persistent=False)
        self.register_buffer("num_copies", None, persistent=False)
        self._placement: Placement | None = None
        self._offset = 0
        self.register_load_state_dict_pre_hook(_before_loading)
        self.register_load_state_dict_post_hook(_after_loading)
        self.reset_parameters()

    def set_placement(self, placement: Placement | None, offset: int = 0) -> None:
        """Choose physical experts from now on, the copies of an expert in turns. `load` still counts logical ones.

        Args:
            placement: Where experts are; None: ids are those of the logical experts again.
            offset: Which copy the first token begins with; the rank.
        """
        num_experts, device = self.weight.size(0), self.load.device
        if placement is not None and placement.num_experts != num_experts:
            raise ValueError(f"Gate: `placement` must be of {num_experts} experts, got {placement.num_experts}")
        self.copies = None if placement is None else placement.logical_to_physical.to(device)
        self.num_copies = None if placement is None else placement.num_copies.to(device)
        self._placement, self._offset = placement, offset

    def _apply(self, fn: Any, recurse: bool = True) -> Gate:
        """Called by `to`, `to_empty` and the like."""
        bias, was_meta = self.bias, self.load.is_meta
        super()._apply(fn, recurse)
        if self.bias.dtype.itemsize < torch.float32.itemsize:  # its steps are too small for BF16
            device = self.bias.device
            self.bias = torch.empty_like(bias, device=device) if bias.is_meta else bias.to(device)
        if was_meta:
            self._make_counters(self.load.device)
        return self

    def _make_counters(self, device: torch.device) -> None:
        """Make what no state dict has, on a device where it has no values yet."""
        if device.type != "meta":
            self.load = torch.zeros(self.load.shape, dtype=torch.int64, device=device)
            self.set_placement(self._placement, self._offset)

    def reset_parameters(self, generator: torch.Generator | None = None) -> None:
        """Draw the weight, with a standard deviation of 1 / sqrt(H), and forget the balance.

        In a `MoELayer` nothing happens without a generator, since the layer's own `reset_parameters` does both. A loop
        over all modules of a model, the usual one after `to_empty`, would otherwise draw the weight a second time, from
        each rank's own generator.
        """
        if self._is_in_layer and generator is None:
            return
        nn.init.normal_(self.weight, std=self.weight.size(1) ** -0.5, generator=generator)
        self.forget_balance()

    @torch.no_grad()
    def forget_balance(self) -> None:
        """Begin with a bias of 0, and count anew."""
        for buffer in (self.bias, self.load, self.sums):
            if buffer is not None:
                buffer.zero_()

    def forward(self, x: torch.Tensor, num_sequences: int = 1) -> Routes:
        """Choose experts for tokens.

        Args:
            x: [T, H] float.
            num_sequences: How many sequences of equal length the tokens are; for the auxiliary loss.
        """
        options, num_experts = self.options, self.weight.size(0)
        dtype = torch.promote_types(torch.promote_types(x.dtype, self.weight.dtype), torch.float32)
        with without_autocast(x.device):
            scores = score(F.linear(x.to(dtype), self.weight.to(dtype)), options.scoring)
        topk_idx = choose_experts(
            scores + self.bias.to(dtype), self.topk, options.num_groups, options.topk_groups, options.num_deciding
        )
        if self.training and torch.compiler.is_compiling():
            topk_idx = torch.ops.deep_ep_moe.count_choices(topk_idx, self.load)
        elif self.training:
            _add_choices(topk_idx, self.load)
        loss = scores.new_zeros(())
        if options.balance_loss:
            loss = options.balance_loss * sequence_balance_loss(scores, topk_idx, num_sequences)
        topk_weights = weigh(scores, topk_idx, options.is_normalized, options.scale)
        if options.capacity_factor is not None:
            capacity = math.ceil(options.capacity_factor * topk_idx.numel() / num_experts)
            topk_idx, topk_weights = drop_beyond_capacity(topk_idx, topk_weights, num_experts, capacity, options.keep)
        if self.copies is not None and self.num_copies is not None:
            topk_idx = spread_choices(topk_idx, self.copies, self.num_copies, self._offset)
        return Routes(topk_idx, topk_weights, loss)

    @torch.no_grad()
    def update_bias(self, speed: float = 1e-3, group: dist.ProcessGroup | None = None) -> None:
        """Make one step towards balance, and count anew. With a group: all its ranks together, over all their choices.

        With `options.update_every` it makes one every so many calls, and adds up choices otherwise.

        Args:
            speed: The size of the step.
            group: Ranks that share the gate; None: this rank alone.
        """
        if group is not None:
            dist.all_reduce(self.load, group=group)
        if self.sums is None:
            self.bias.copy_(balanced_bias(self.bias, self.load, speed))
        else:
            self.sums[:-1] += self.load
            self.sums[-1] += 1
            is_due = self.sums[-1] >= self.options.update_every  # on the device: the host waits for nothing
            self.bias.copy_(torch.where(is_due, balanced_bias(self.bias, self.sums[:-1], speed), self.bias))
            self.sums.masked_fill_(is_due, 0)
        self.load.zero_()

    def extra_repr(self) -> str:
        """Shown by `print(layer)`."""
        num_experts, hidden = self.weight.shape
        return f"{hidden}, top-{self.topk} of {num_experts} experts, {self.options}"
