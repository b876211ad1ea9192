"""`bench low-latency`: the cases of a device."""

from __future__ import annotations

from ...buffers.legacy import Buffer
from .cases import join_cases
from .gpu_cases import COPY_BYTES, join_gpu_cases
from .inputs import CONTEXT_BYTES, Setting
from .low_latency_cases import low_latency_titles, run_low_latency_cases
from .suite import Suite

NAME = "low-latency"


def suite_of(setting: Setting) -> Suite:
    """The cases of a setting's device."""
    join = join_gpu_cases if setting.device == "cuda" else join_cases
    return Suite(NAME, low_latency_titles(setting.device), run_low_latency_cases, join, rank_bytes)


def rank_bytes(setting: Setting, num_ranks: int) -> int:
    """About a rank's peak.

    On the CPU what it touches: its rows in the window, in results, in the zero-copy tensors and in gloo's buffers. On a
    GPU, where nothing is sparse: the window, two results, the experts' rows, the copy.
    """
    if setting.device == "cpu":
        return setting.hidden * setting.num_tokens * (20 * setting.num_topk + 16)
    sizes = (setting.num_tokens, setting.hidden, num_ranks, setting.num_experts)
    results = setting.num_experts * setting.num_tokens * setting.hidden
    return CONTEXT_BYTES + Buffer.get_low_latency_rdma_size_hint(*sizes) + 4 * results + 2 * COPY_BYTES
