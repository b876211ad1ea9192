"""Low-latency calls of a buffer that cannot make them: each says why."""

from __future__ import annotations

from typing import NoReturn

import torch

from ... import env
from ...errors import EPUnsupported
from .calls import BARRIER, COMBINE, DISPATCH, METHODS, Combining, Dispatching, Rows
from .geometry import Geometry


class AbsentLowLatency:
    """Across nodes, on GPUs, without NVSHMEM. Normal mode has another way there, low latency has not.

    Args:
        why: There is no NVSHMEM.
    """

    def __init__(self, why: str):
        self._why = why

    def dispatch(
        self,
        kind: Dispatching,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> NoReturn:
        """Refuse."""
        del kind, x, topk_idx, recv_stats, wait_stats
        self._refuse(METHODS[DISPATCH])

    def combine(
        self, kind: Combining, rows: Rows, out: torch.Tensor | None, wait_stats: torch.Tensor | None
    ) -> NoReturn:
        """Refuse."""
        del kind, rows, out, wait_stats
        self._refuse(METHODS[COMBINE])

    def combine_buffer(self, src_info: torch.Tensor, geometry: Geometry) -> NoReturn:
        """Refuse."""
        del src_info, geometry
        self._refuse("get_next_low_latency_combine_buffer")

    def clean(self) -> NoReturn:
        """Refuse."""
        self._refuse(METHODS[BARRIER])

    def update_mask(self, rank: int, is_masked: bool) -> NoReturn:
        """Refuse."""
        del rank, is_masked
        self._refuse("low_latency_update_mask_buffer")

    def query_mask(self, status: torch.Tensor) -> NoReturn:
        """Refuse."""
        del status
        self._refuse("low_latency_query_mask_buffer")

    def clean_mask(self) -> NoReturn:
        """Refuse."""
        self._refuse("low_latency_clean_mask_buffer")

    def _refuse(self, where: str) -> NoReturn:
        raise EPUnsupported(
            f"{where}: across nodes on GPUs low latency needs NVSHMEM, which is not there ({self._why}). "
            f"Set {env.TRANSPORT.name}=nvshmem where torch comes with it, or use normal mode"
        )
