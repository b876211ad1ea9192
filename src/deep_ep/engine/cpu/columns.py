"""The steps of a V2 combine on the CPU: as those of V1, with the rows of a token added in the order of its columns."""

from __future__ import annotations

import torch

from ...handle import ColumnHandle
from ...kernels.reduce import RowSums, reduce_rows
from ...kernels.rows import as_bytes, row_bytes
from ..protocol import Agreement, Offer, checksum
from ..staging import Staging
from .call import Call
from .combine import CpuCombine


class ColumnCombine(CpuCombine):
    """The steps of one combine, see `ops.CombineSteps`.

    Weights come back by rank, as in V1: each rank gives those of its own columns, and zeros. They are summed as words,
    so that they come back bit by bit.
    """

    _handle: ColumnHandle

    def _check_rows(self, handle: ColumnHandle) -> None:
        super()._check_rows(handle.compact)

    def _is_refused(self, handle: ColumnHandle) -> bool:
        return super()._is_refused(handle.compact)

    def _agreement(self) -> Agreement:
        agreement, plan = super()._agreement(), self._handle.plan
        number = agreement.handle if plan is None else checksum([[agreement.handle, plan.number]])
        reduced, alignment = int(self._handle.is_reduced_once), self._handle.alignment
        return agreement._replace(handle=number, is_reduced_once=reduced, alignment=alignment)

    def _num_given(self) -> int:
        return super()._num_given() if self._handle.expanded_rows is None else self._handle.num_rows

    def _sum_posted(self, call: Call) -> None:
        """Sum the rows that all ranks have posted, where they lie: any of a rank's rows may be a token's."""
        offers = call.offers()
        self._sum_range(offers, self._tables(call, offers), 0, self._handle.num_tokens)

    def _sum_range(self, offers: list[Offer], tables: list[list[torch.Tensor]], start: int, range_tokens: int) -> None:
        """Sum this rank's tokens `[start, start + range_tokens)`."""
        handle, stop = self._handle, min(start + range_tokens, self._handle.num_tokens)
        if start >= stop:
            return
        slots, owners, shifts = handle.given_slots[start:stop], handle.owners[start:stop], [0] * len(offers)
        compact_shifts = self._shifts(offers, start, range_tokens)
        if handle.expanded_rows is None:
            shifts = compact_shifts
        else:
            slots = self._in_cells(offers, slots, owners, range_tokens)
        biases = [bias[start:stop] for bias in self._biases]
        sums = RowSums(tables[0], slots, shifts, biases, owners=owners, scratch=self._chain.scratch)
        sums.sum(self._sums[0][start:stop])
        for weights, table in zip(self._sums[1:], tables[1:], strict=True):
            words, given = weights[start:stop].view(torch.int32), [rows.view(torch.int32) for rows in table]
            reduce_rows(words, given, handle.send_head[start:stop], compact_shifts)

    # Expanded rows through staging: a token has K cells, one for each column, of which those of other ranks stay empty.
    # Its weights are given once, as those of compact rows.

    def _make_staging(self) -> Staging:
        if self._handle.expanded_rows is None:
            return super()._make_staging()
        first, *others = self._widths()
        return Staging(self._window, [self._num_cells() * first, *others])

    def _num_cells(self) -> int:
        return max(1, self._handle.slots.size(1))

    def _tables(self, call: Call, offers: list[Offer]) -> list[list[torch.Tensor]]:
        tables = super()._tables(call, offers)
        if self._handle.expanded_rows is not None and any(offer.is_staged for offer in offers):
            num_cells = self._num_cells()
            wide = [one._replace(num_rows=num_cells * one.num_rows) if one.is_staged else one for one in offers]
            tables[0] = call.peer_rows(wide, 0, self._parts[0].size(1), self._parts[0].dtype)
        return tables

    def _copy_block(self, staging: Staging, source: int, first: int, last: int, start: int, range_tokens: int) -> None:
        if self._handle.expanded_rows is None:
            super()._copy_block(staging, source, first, last, start, range_tokens)
            return
        num_cells = self._num_cells()
        tokens = self._handle.recv_src_idx[first:last].long() - start + source * range_tokens
        rows = self._handle.expanded_rows[first:last]
        cells = tokens[:, None] * num_cells + torch.arange(rows.size(1), device="cpu")
        has_row = rows >= 0
        x, *weights = self._parts
        staged = staging.sections[0].view(-1, row_bytes(x))
        staged.index_copy_(0, cells[has_row], as_bytes(x).index_select(0, rows[has_row]))
        if weights:
            begin = source * range_tokens
            staging.sections[1][begin : begin + last - first] = as_bytes(weights[0][first:last])

    def _in_cells(
        self, offers: list[Offer], slots: torch.Tensor, owners: torch.Tensor, range_tokens: int
    ) -> torch.Tensor:
        """Return the slots of a range of tokens, with those at staged ranks replaced by the cells of staging."""
        is_staged = torch.tensor([offer.is_staged for offer in offers], device="cpu")
        if not bool(is_staged.any()):
            return slots
        num_cells = self._num_cells()
        tokens = torch.arange(slots.size(0), dtype=torch.int32, device="cpu") + self._window.rank * range_tokens
        cells = tokens[:, None] * num_cells + torch.arange(slots.size(1), dtype=torch.int32, device="cpu")
        is_in_cell = (slots >= 0) & is_staged[owners.clamp(min=0).long()]
        return torch.where(is_in_cell, cells, slots)
