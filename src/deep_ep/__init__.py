"""Expert-parallel communication for Mixture-of-Experts models: DeepEP's interface, in Python."""

from importlib import import_module
from typing import Any

from ._C import check_nccl_so, find_cuda_home, init_jit
from .buffers.elastic import ElasticBuffer, EPHandle
from .buffers.legacy import Buffer, topk_idx_t
from .config import Config
from .errors import EPClosed, EPError, EPOverflow, EPPeerFailed, EPTimeout, EPTransportError, EPUnsupported
from .event import EventHandle, EventOverlap
from .launch import RankFailed
from .topology import get_logical_domain_size, get_physical_domain_size

__version__ = "0.1.0"

__all__ = [
    "Buffer",
    "Config",
    "EPClosed",
    "EPError",
    "EPHandle",
    "EPOverflow",
    "EPPeerFailed",
    "EPTimeout",
    "EPTransportError",
    "EPUnsupported",
    "ElasticBuffer",
    "EventHandle",
    "EventOverlap",
    "RankFailed",
    "__version__",
    "check_nccl_so",
    "find_cuda_home",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "init_jit",
    "topk_idx_t",
]

_LAZY = {"buffer", "metrics", "moe", "placement", "planner", "utils"}


def __getattr__(name: str) -> Any:
    """Import a public module when a program names it: `deep_ep.utils` behind `import deep_ep`, as with DeepEP."""
    if name in _LAZY:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
