"""The names of DeepEP's compiled module that have a meaning here."""

import os

from .buffers.legacy import Buffer as _Buffer
from .buffers.legacy import topk_idx_t
from .config import Config
from .elastic_sizing import SIZE_UNIT_BYTES
from .event import EventHandle

__all__ = [
    "Config",
    "EventHandle",
    "check_nccl_so",
    "find_cuda_home",
    "get_elastic_buffer_alignment",
    "get_low_latency_rdma_size_hint",
    "init_jit",
    "is_sm90_compiled",
    "topk_idx_t",
]

get_low_latency_rdma_size_hint = _Buffer.get_low_latency_rdma_size_hint
is_sm90_compiled = _Buffer.is_sm90_compiled


def check_nccl_so() -> None:
    """Nothing to check: NCCL is torch's."""


def find_cuda_home() -> str | None:
    """Where a CUDA toolkit is, as far as the environment says; none is needed."""
    return os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")


def get_elastic_buffer_alignment() -> int:
    """Bytes of which the sizes of `ElasticBuffer` are multiples."""
    return SIZE_UNIT_BYTES


def init_jit(*args: object) -> None:
    """Nothing to do: kernels are compiled by Triton when they are first needed."""
