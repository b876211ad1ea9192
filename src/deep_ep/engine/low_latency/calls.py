"""Arguments and results of low-latency calls, on the CPU and on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ..protocol import LOW_LATENCY, Agreement
from .geometry import Geometry, RowFormat

Hook = Callable[[], None]

DISPATCH, COMBINE, BARRIER = (f"{LOW_LATENCY} {name}" for name in ("dispatch", "combine", "barrier"))
METHODS = {  # as their callers know them
    DISPATCH: "low_latency_dispatch",
    COMBINE: "low_latency_combine",
    BARRIER: "clean_low_latency_buffer",
}


def operation_of(method: str) -> str:
    """Return the operation that a method of a buffer makes."""
    return next((operation for operation, name in METHODS.items() if name == method), method)


def agreement_of(
    operation: str,
    geometry: Geometry,
    dtype: torch.dtype,
    scale_dtype: torch.dtype | None,
    variant: int,
    idx_dtype: torch.dtype | None = None,
) -> Agreement:
    """Return what must be the same on all ranks in a call.

    Args:
        operation: The call.
        geometry: Its sizes.
        dtype: The dtype of the rows.
        scale_dtype: Of their scales, or None.
        variant: 1 where scales are powers of two, or rows compressed.
        idx_dtype: Of the expert ids, where ranks compare it.
    """
    return Agreement(
        operation,
        num_experts=geometry.num_experts,
        num_topk=geometry.num_topk,
        hidden=geometry.hidden,
        dtype=dtype,
        num_scales=variant,
        scale_dtype=scale_dtype,
        idx_dtype=idx_dtype,
        max_tokens=geometry.max_tokens,
    )


class CallMode(NamedTuple):
    """How a call stands to the caller's stream.

    Attributes:
        is_async: The caller gets an event and does not wait.
        has_hook: The call only sends; the caller gets a hook that receives.
    """

    is_async: bool = False
    has_hook: bool = False

    @property
    def is_unfinished(self) -> bool:
        """The caller has the results before they are filled."""
        return self.is_async or self.has_hook


@dataclass(frozen=True)
class DispatchKind:
    """A kind of dispatch of one buffer: what it was asked for, apart from its tensors.

    Attributes:
        geometry: Its sizes.
        form: How rows travel.
        mode: How it is ordered with the caller's stream.
        idx_dtype: The dtype of `topk_idx`.
        has_recv_stats: The rows of each expert are added to a tensor.
        has_wait_stats: The nanoseconds waited for each rank are added to a tensor.
        found: What the engine caches for further calls of this kind. Private to the engine.
    """

    geometry: Geometry
    form: RowFormat
    mode: CallMode
    idx_dtype: torch.dtype
    has_recv_stats: bool
    has_wait_stats: bool
    found: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


@dataclass(frozen=True)
class CombineKind:
    """A kind of combine of one buffer: what it was asked for, apart from its tensors.

    Attributes:
        geometry: Its sizes.
        mode: How it is ordered with the caller's stream.
        use_logfmt: Compress rows on their way.
        zero_copy: The rows lie in the handle's zero-copy tensor, `CombineInputs.x` is not read.
        idx_dtype: The dtype of `topk_idx`.
        has_wait_stats: The nanoseconds waited for each rank are added to a tensor.
        found: What the engine caches for further calls of this kind. Private to the engine.
    """

    geometry: Geometry
    mode: CallMode
    use_logfmt: bool
    zero_copy: bool
    idx_dtype: torch.dtype
    has_wait_stats: bool
    found: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)


class Packed(NamedTuple):
    """What a dispatch returns. R ranks, L local experts, M tokens of a rank at most, H channels, S scales.

    Attributes:
        x: [L, R * M, H], rows of each expert from its first row on.
        num_rows: [L] int32, rows of each expert.
        src_info: [L, R * M] int32, each row's token at its source.
        layout_range: [L, R] int64, `count | first row << 32` of the rows from each rank.
        scales: [L, R * M, S], the rows side by side in memory; None for BF16.
    """

    x: torch.Tensor
    num_rows: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor
    scales: torch.Tensor | None = None


class CombineInputs(NamedTuple):
    """What a combine takes.

    Attributes:
        x: [L, R * M, H] BF16, the experts' rows where dispatch put their inputs.
        topk_idx: [T, K], as dispatched.
        topk_weights: [T, K] float32.
        src_info: `packed_recv_src_info` of the handle.
        layout_range: `packed_recv_layout_range` of the handle.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor


class JoinResult(NamedTuple):
    """How an attempt to get into step with all ranks went (`cpu/rejoin.py`).

    Attributes:
        number: The number of the next call of all ranks that have come.
        lost: The ranks that have not, and why, to follow the rank in a sentence.
    """

    number: int
    lost: dict[int, str]
