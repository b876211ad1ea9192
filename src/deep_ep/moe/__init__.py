"""Training with it: a gate, dispatch and combine with gradients, and a Mixture-of-Experts layer made of them."""

from .checkpoints import merge_experts, take_experts
from .compiled import keep_exchanges
from .expanded import ExpandedRows, combine_expanded, dispatch_expanded
from .gate import Gate, GateOptions, Routes
from .gradients import clip_grad_norm_, expert_parameters, ignore_experts, parameter_groups, reduce_replicated_gradients
from .layer import MoELayer, MoEOutput
from .ops import InFlight, Received, add_rows, combine, dispatch

__all__ = [
    "ExpandedRows",
    "Gate",
    "GateOptions",
    "InFlight",
    "MoELayer",
    "MoEOutput",
    "Received",
    "Routes",
    "add_rows",
    "clip_grad_norm_",
    "combine",
    "combine_expanded",
    "dispatch",
    "dispatch_expanded",
    "expert_parameters",
    "ignore_experts",
    "keep_exchanges",
    "merge_experts",
    "parameter_groups",
    "reduce_replicated_gradients",
    "take_experts",
]
