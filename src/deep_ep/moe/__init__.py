"""Training with it: a gate, dispatch and combine with gradients, and a Mixture-of-Experts layer made of them."""

from .compiled import keep_exchanges
from .gate import Gate, GateOptions, Routes
from .layer import MoELayer, MoEOutput, merge_experts, reduce_replicated_gradients, take_experts
from .ops import InFlight, Received, add_rows, combine, dispatch

__all__ = [
    "Gate",
    "GateOptions",
    "InFlight",
    "MoELayer",
    "MoEOutput",
    "Received",
    "Routes",
    "add_rows",
    "combine",
    "dispatch",
    "keep_exchanges",
    "merge_experts",
    "reduce_replicated_gradients",
    "take_experts",
]
