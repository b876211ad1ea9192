"""`bench elastic`: DeepEP V2's calls on a device."""

from __future__ import annotations

from functools import partial

from .cases import join_cases, run_cases
from .elastic_cases import ELASTIC_CASES, ELASTIC_GPU_CASES
from .gpu_cases import join_gpu_cases, run_gpu_cases
from .inputs import CONTEXT_BYTES, Setting
from .suite import Suite

NAME = "elastic"


def suite_of(setting: Setting) -> Suite:
    """The cases of a setting's device."""
    if setting.device == "cuda":
        titles = {name: line.title for name, line in ELASTIC_GPU_CASES.items()}
        return Suite(NAME, titles, partial(run_gpu_cases, lines=ELASTIC_GPU_CASES), join_gpu_cases, _rank_bytes)
    titles = {name: title for name, (title, _) in ELASTIC_CASES.items()}
    return Suite(NAME, titles, partial(run_cases, cases=ELASTIC_CASES), join_cases, _rank_bytes)


def _rank_bytes(setting: Setting, num_ranks: int) -> int:
    """About a rank's peak: expanded rows, five times, and a few times its own."""
    del num_ranks
    num_rows = 5 * setting.num_tokens * setting.num_topk + 8 * setting.num_tokens
    return 2 * setting.hidden * num_rows + (CONTEXT_BYTES if setting.device == "cuda" else 0)
