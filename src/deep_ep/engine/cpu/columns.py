"""The steps of a V2 combine on the CPU: as those of V1, with the rows of a token added in the order of its columns."""

from __future__ import annotations

import torch

from ...handle import ColumnHandle
from ...kernels.reduce import reduce_columns, reduce_rows
from ..protocol import Offer
from .combine import CpuCombine


class ColumnCombine(CpuCombine):
    """The steps of one combine, see `ops.CombineSteps`.

    Weights come back by rank, as in V1: each rank gives those of its own columns, and zeros.
    """

    _handle: ColumnHandle

    def _check_rows(self, handle: ColumnHandle) -> None:
        super()._check_rows(handle.compact)

    def _is_refused(self, handle: ColumnHandle) -> bool:
        return super()._is_refused(handle.compact)

    def _num_given(self) -> int:
        return super()._num_given() if self._handle.has_compact_rows else self._handle.num_rows

    def _can_post(self, num_rows: int) -> bool:
        del num_rows
        return False

    def _sum_range(self, offers: list[Offer], tables: list[list[torch.Tensor]], start: int, range_tokens: int) -> None:
        """Sum this rank's tokens `[start, start + range_tokens)`."""
        handle, stop = self._handle, min(start + range_tokens, self._handle.num_tokens)
        if start >= stop:
            return
        shifts = self._shifts(offers, start, range_tokens)
        biases = [bias[start:stop] for bias in self._biases]
        out, owners, slots = self._sums[0][start:stop], handle.owners[start:stop], handle.slots[start:stop]
        reduce_columns(out, tables[0], owners, slots, shifts, biases)
        for weights, table in zip(self._sums[1:], tables[1:], strict=True):
            reduce_rows(weights[start:stop], table, handle.send_head[start:stop], shifts)
