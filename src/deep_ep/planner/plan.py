"""Plans: for each number of ranks the modes, their times and bytes, and which of them to take.

A `Question` has everything that an answer depends on; `make_plan` answers it. Nothing here prints.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from .. import sizing
from ..config import combine_config, dispatch_config
from ..placement import Placement, place_experts
from .calls import DEFAULT_SMS, Call, sends_per_expert, sms_of
from .hardware import Cluster, find_gpu, usual_system
from .layer import PHASES, Compute, LayerTime, find_compute, time_layer
from .models import Model
from .routing import Reach, Routing, find_reach, sample_routes, uniform_reach
from .table import Prediction, Table
from .traffic import Traffic, find_traffic

MODES = ("normal", "low_latency")
SIZES = (8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_SMS = (8, 12, 16, 20, 24, 32)  # that a normal call may use; published figures are of 4 to 64
_WITH_SMS = ("DeepEP", "UCCL-EP", "Hybrid-EP")  # whose callers choose SMs
_CLOSE = 1.03  # a layer that is so little slower is as good, if it leaves SMs to others
_WORTH_A_LIMIT = 1.05  # from this gain on a group limit is recommended
_MEMORY_FOR_BUFFERS = 0.1  # of a GPU


@dataclass(frozen=True)
class Question:
    """The arguments of a plan.

    Attributes:
        model: The model.
        cluster: The hardware.
        phase: One of `layer.PHASES`.
        num_tokens: Of each rank in a step; in decoding, its sequences.
        context: Tokens of a sequence.
        sizes: Numbers of ranks.
        modes: Of `MODES`; low latency is for decoding only.
        system: Whose kernels, as in the table of constants; empty: those that are usual on the GPU.
        dtype: Of dispatched rows; combined ones are BF16, or LogFMT if `is_logfmt`.
        num_sms: SMs of normal calls; 0: chosen.
        num_micro_batches: 2: one computes while the other communicates.
        zipf: Exponent of the experts' popularity; 0: uniform.
        load: Popularity as a trace has it; None: by `zipf`.
        num_replicas: Physical experts beyond the model's; placed by `deep_ep.placement`.
        num_groups: Groups of experts; 1: no limits.
        topk_groups: Groups of a token.
        is_logfmt: Combined rows travel as LogFMT, in low latency.
        is_expanded: A row for each expert at the receiver.
    """

    model: Model
    cluster: Cluster
    phase: str = "training"
    num_tokens: int = 4096
    context: int = 4096
    sizes: Sequence[int] = SIZES
    modes: Sequence[str] = MODES
    system: str = ""
    dtype: str = "fp8"
    num_sms: int = 0
    num_micro_batches: int = 2
    zipf: float = 0.0
    load: tuple[float, ...] | None = None
    num_replicas: int = 0
    num_groups: int = 1
    topk_groups: int = 1
    is_logfmt: bool = False
    is_expanded: bool = False

    def check(self) -> None:
        """Refuse inconsistent values, with `ValueError`."""
        self.cluster.check()
        self.routing().check()
        if self.phase not in PHASES:
            raise ValueError(f"planner: `phase` must be one of {', '.join(PHASES)}, got {self.phase!r}")
        for mode in self.modes:
            if mode not in MODES:
                raise ValueError(f"planner: `modes` must be of {', '.join(MODES)}, got {mode!r}")
        for name in ("num_tokens", "context", "num_micro_batches"):
            if getattr(self, name) < 1:
                raise ValueError(f"planner: `{name}` must be at least 1, got {getattr(self, name)}")
        if self.num_replicas < 0:
            raise ValueError(f"planner: `num_replicas` must not be negative, got {self.num_replicas}")
        if not self.sizes:
            raise ValueError("planner: `sizes` must have at least one number of ranks")

    @property
    def kernels(self) -> str:
        """The system."""
        return self.system or usual_system(self.cluster.gpu)

    def routing(self) -> Routing:
        """The router."""
        model = self.model
        return Routing(model.num_experts, model.topk, self.num_groups, self.topk_groups, zipf=self.zipf, load=self.load)


class ModePlan(NamedTuple):
    """A mode at some number of ranks.

    Attributes:
        mode: One of `MODES`.
        num_sms: That move rows; 0: none while rows travel.
        dispatch: Its time, of a micro-batch.
        combine: Its time.
        dispatch_traffic: Bytes of a dispatch.
        combine_traffic: Bytes of a combine.
        layer: The whole layer.
        buffer_bytes: Of a rank's buffers.
        is_possible: Whether these fit into a GPU.
    """

    mode: str
    num_sms: int
    dispatch: Prediction
    combine: Prediction
    dispatch_traffic: Traffic
    combine_traffic: Traffic
    layer: LayerTime
    buffer_bytes: int
    is_possible: bool

    @property
    def us(self) -> float:
        """Microseconds of dispatch and combine together."""
        return self.dispatch.us + self.combine.us


class SizePlan(NamedTuple):
    """An answer for one number of ranks.

    Attributes:
        num_ranks: R.
        num_nodes: N.
        modes: The modes that were looked at.
        best: The recommended one.
        placement: Where experts are, if some have replicas; else None.
        rank_load: Selections of the busiest rank over the mean.
        rank_load_before: The same without replicas.
        group_gain: How much slower a layer is without its group limit, or how much quicker with a limit of half of
            the nodes; 1: groups do not matter.
        weight_bytes: Of the model, in FP8.
        reasons: Why, in sentences.
    """

    num_ranks: int
    num_nodes: int
    modes: list[ModePlan]
    best: ModePlan
    placement: Placement | None
    rank_load: float
    rank_load_before: float
    group_gain: float
    weight_bytes: float
    reasons: list[str]


class Plan(NamedTuple):
    """The result of `make_plan`.

    Attributes:
        question: What was asked.
        sizes: An answer for each number of ranks.
        left_out: Numbers of ranks without an answer, and why.
    """

    question: Question
    sizes: list[SizePlan]
    left_out: list[tuple[int, str]]


def make_plan(question: Question, table: Table) -> Plan:
    """Predict calls and layers for each number of ranks.

    Raises:
        ValueError: The question is inconsistent.
    """
    question.check()
    systems = table.systems()
    if question.system and question.system not in systems:
        raise ValueError(f"planner: there is no system {question.system!r}. There are {', '.join(sorted(systems))}")
    sizes: list[SizePlan] = []
    left_out: list[tuple[int, str]] = []
    for num_ranks in question.sizes:
        try:
            sizes.append(_plan_size(question, table, num_ranks))
        except ValueError as error:
            left_out.append((num_ranks, str(error)))
    if not sizes:
        raise ValueError("; ".join(dict.fromkeys(reason for _, reason in left_out)))
    return Plan(question, sizes, left_out)


# One size ------------------------------------------------------------------------------------------------------------


class _Spread(NamedTuple):
    """How tokens spread over ranks: with replicas, and as they would without."""

    reach: Reach
    placement: Placement | None
    load: float
    load_before: float


def _plan_size(question: Question, table: Table, num_ranks: int) -> SizePlan:
    if num_ranks < 2:
        raise ValueError(f"planner: a plan is for at least 2 ranks, got {num_ranks}")
    num_nodes = question.cluster.num_nodes(num_ranks)
    spread = _find_spread(question, num_ranks, num_nodes)
    modes = [
        _plan_mode(question, table, num_ranks, mode, spread)
        for mode in question.modes
        if mode != "low_latency" or question.phase == "decoding"
    ]
    if not modes:
        raise ValueError("planner: low latency is for decoding. Ask for --modes normal, or for --phase decoding")
    possible = [one for one in modes if one.is_possible] or modes
    best = min(possible, key=lambda one: one.layer.us)
    gain = _group_gain(question, table, num_ranks, spread, best)
    plan = SizePlan(
        num_ranks, num_nodes, modes, best, spread.placement, spread.load, spread.load_before, gain,
        question.model.weight_bytes(num_ranks, _num_replicas(question, num_ranks)), [],
    )  # fmt: skip
    plan.reasons.extend(_reasons(question, plan))
    return plan


def _num_replicas(question: Question, num_ranks: int) -> int:
    """As many as were asked for, and more until each rank has as many experts."""
    wanted = question.model.num_experts + question.num_replicas
    return math.ceil(wanted / num_ranks) * num_ranks - question.model.num_experts


def _find_spread(question: Question, num_ranks: int, num_nodes: int) -> _Spread:
    routing, num_replicas = question.routing(), _num_replicas(question, num_ranks)
    num_tokens = question.num_tokens * num_ranks
    if not num_replicas or (routing.is_uniform and not question.num_replicas):
        reach = find_reach(routing, num_ranks, num_nodes, num_tokens)
        load = _imbalance(reach.selections)
        return _Spread(reach, None, load, load)
    selected = _selections(routing)
    num_groups = question.num_groups if num_replicas % num_nodes == 0 else 1
    placement = place_experts(selected, num_ranks, num_replicas, num_nodes if num_groups > 1 else 1, num_groups)
    table = placement.logical_to_physical
    to_rank = torch.where(table < 0, -1, table // placement.num_slots)
    reach = find_reach(routing, num_ranks, num_nodes, num_tokens, to_rank)
    before = torch.zeros(num_ranks, dtype=torch.float64)
    before.index_add_(0, torch.arange(routing.num_experts) * num_ranks // routing.num_experts, selected)
    return _Spread(reach, placement, _imbalance(reach.selections), _imbalance(before))


def _selections(routing: Routing) -> torch.Tensor:
    """How often each expert is chosen: not in proportion to popularity, since a token chooses none twice."""
    if routing.is_uniform:
        return torch.ones(routing.num_experts, dtype=torch.float64)
    return torch.bincount(sample_routes(routing, 1 << 16).flatten(), minlength=routing.num_experts).double()


def _imbalance(values: torch.Tensor) -> float:
    return float(values.max() / values.mean())


def _plan_mode(question: Question, table: Table, num_ranks: int, mode: str, spread: _Spread) -> ModePlan:
    if mode == "low_latency":
        return _plan_sms(question, table, num_ranks, mode, 0, spread)
    choices = _SMS if question.kernels in _WITH_SMS and not question.num_sms else (question.num_sms,)
    plans = [_plan_sms(question, table, num_ranks, mode, num_sms, spread) for num_sms in choices]
    least = min(plan.layer.us for plan in plans)
    return next(plan for plan in plans if plan.layer.us <= _CLOSE * least)


def _plan_sms(question: Question, table: Table, num_ranks: int, mode: str, num_sms: int, spread: _Spread) -> ModePlan:
    model, gpu = question.model, find_gpu(question.cluster.gpu)
    tokens = max(1, question.num_tokens // question.num_micro_batches)
    combine_dtype = "logfmt" if question.is_logfmt and mode == "low_latency" else "bf16"
    way = "low_latency" if sends_per_expert(question.kernels, mode) else "normal"
    traffic = [
        find_traffic(spread.reach, way, op, dtype, tokens, model.hidden, model.topk)
        for op, dtype in (("dispatch", question.dtype), ("combine", combine_dtype))
    ]
    call = _dispatch_call(question, num_ranks, mode, num_sms, tokens, _loads(question, way, spread.reach, traffic[0]))
    dispatch, combine = table.predict(call), table.predict(replace(call, op="combine", dtype=combine_dtype))
    local = (model.num_experts + _num_replicas(question, num_ranks)) / num_ranks
    compute: Compute = find_compute(model, gpu, question.phase, tokens, question.context, local, spread.load)
    moving = 0 if mode == "low_latency" else sms_of(call)
    layer = time_layer(
        model, gpu, question.phase, compute, dispatch.us, combine.us, moving, question.num_micro_batches,
        tokens * question.num_micro_batches * num_ranks,
    )  # fmt: skip
    buffer_bytes = _buffer_bytes(question, num_ranks, mode, num_sms, tokens)
    is_possible = buffer_bytes <= _MEMORY_FOR_BUFFERS * gpu.memory_GB * 1e9
    return ModePlan(mode, moving, dispatch, combine, traffic[0], traffic[1], layer, buffer_bytes, is_possible)


def _loads(question: Question, way: str, reach: Reach, traffic: Traffic) -> tuple[float, float]:
    """Rows of the busiest rank, and bytes of the busiest interface, over the means of a uniform router.

    A skewed router sends a token to fewer ranks: its mean is less, and only what the busiest has counts.
    """
    if way == "low_latency":
        return traffic.rank_load, traffic.network_load
    routing = question.routing()
    ranks, nodes = (float(units.mean()) / uniform_reach(routing, units.numel()) for units in (reach.ranks, reach.nodes))
    return traffic.rank_load * ranks, traffic.network_load * nodes


def _dispatch_call(
    question: Question, num_ranks: int, mode: str, num_sms: int, num_tokens: int, loads: tuple[float, float]
) -> Call:
    cluster, routing = question.cluster, question.routing()
    return Call(
        system=question.kernels,
        gpu=cluster.gpu,
        network=cluster.network,
        mode=mode,
        op="dispatch",
        dtype=question.dtype,
        num_tokens=num_tokens,
        hidden=question.model.hidden,
        routing=replace(routing, zipf=0.0, load=None),
        num_ranks=num_ranks,
        ranks_per_node=min(cluster.ranks_per_node, num_ranks),
        num_sms=num_sms,
        link_GBps=cluster.link_GBps or 0.0,
        network_GBps=cluster.network_GBps or 0.0,
        rank_load=loads[0],
        network_load=loads[1],
        is_expanded=question.is_expanded,
    )


def _buffer_bytes(question: Question, num_ranks: int, mode: str, num_sms: int, num_tokens: int) -> int:
    """What `Buffer` is to be made with: the size hints that DeepEP's users take."""
    model = question.model
    if mode == "low_latency":
        num_experts = model.num_experts + _num_replicas(question, num_ranks)
        return sizing.low_latency_buffer_bytes(num_tokens, model.hidden, num_ranks, num_experts)
    configs = [make(num_ranks, num_sms or DEFAULT_SMS) for make in (dispatch_config, combine_config)]
    nvl = max(config.get_nvl_buffer_size_hint(2 * model.hidden, num_ranks) for config in configs)
    if question.cluster.num_nodes(num_ranks) == 1:
        return nvl
    return nvl + max(config.get_rdma_buffer_size_hint(2 * model.hidden, num_ranks) for config in configs)


def _group_gain(question: Question, table: Table, num_ranks: int, spread: _Spread, best: ModePlan) -> float:
    """The layer without group limits over the one with them; those asked for, or half of the nodes."""
    num_nodes = spread.reach.nodes.numel()
    if num_nodes == 1 or best.mode != "normal" or spread.placement is not None:
        return 1.0
    limited = question
    if question.num_groups == 1:
        if question.model.num_experts % num_nodes or num_nodes < 3:
            return 1.0
        most = max(math.ceil(num_nodes / 2), math.ceil(question.model.topk * num_nodes / question.model.num_experts))
        limited = replace(question, num_groups=num_nodes, topk_groups=most)
    times = []
    for one in (limited, replace(question, num_groups=1, topk_groups=1)):
        even = replace(one, zipf=0.0, load=None)  # the gain hardly depends on skew, and has a formula without
        reach = find_reach(even.routing(), num_ranks, num_nodes)
        other = spread._replace(reach=reach, load=1.0)
        times.append(_plan_sms(even, table, num_ranks, "normal", best.num_sms, other).layer.us)
    return times[1] / times[0]


def _reasons(question: Question, plan: SizePlan) -> list[str]:
    best, others = plan.best, [one for one in plan.modes if one is not plan.best]
    bound = best.layer.bound
    if bound == "communication":
        slower = max((best.dispatch, best.combine), key=lambda one: one.us)
        bound = f"communication, which is bound by the {slower.bound.replace('latency', 'latency of a call')}"
    reasons = [f"a layer is bound by {bound}"]
    for other in others:
        if not other.is_possible:
            reasons.append(f"{_words(other.mode)} would need {other.buffer_bytes / 1e9:.0f} GB of buffers")
        else:
            reasons.append(f"{_words(other.mode)} makes a layer {other.layer.us / best.layer.us:.2f}x as long")
    if plan.group_gain >= _WORTH_A_LIMIT:
        if question.num_groups > 1:
            reasons.append(f"without its group limit a layer would take {plan.group_gain:.2f}x as long")
        else:
            reasons.append(f"a limit to half of the nodes would make a layer {plan.group_gain:.2f}x as quick")
    if plan.rank_load > 1.1:
        reasons.append(f"the busiest rank has {plan.rank_load:.2f}x the mean load: see --replicas")
    gpu = find_gpu(question.cluster.gpu)
    if question.phase != "training" and plan.weight_bytes > 0.9 * gpu.memory_GB * 1e9:
        reasons.append(f"the weights ({plan.weight_bytes / 1e9:.0f} GB a rank in FP8) do not fit into a GPU")
    return reasons


def _words(mode: str) -> str:
    return mode.replace("_", "-") + " mode"
