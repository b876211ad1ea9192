"""`bench normal`: the cases of a device."""

from __future__ import annotations

from .cases import CASES, join_cases, run_cases
from .gpu_cases import gpu_titles, join_gpu_cases, run_gpu_cases
from .inputs import Setting, normal_bytes
from .suite import Suite

NAME = "normal"


def suite_of(setting: Setting) -> Suite:
    """The cases of a setting's device."""
    if setting.device == "cuda":
        return Suite(NAME, gpu_titles(setting.num_sms), run_gpu_cases, join_gpu_cases, normal_bytes)
    return Suite(NAME, {name: title for name, (title, _) in CASES.items()}, run_cases, join_cases, normal_bytes)
