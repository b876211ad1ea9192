"""What V2's calls add to a dispatch and a combine: rows grouped by expert, metadata, sums in the order of columns.

A *compact* result has a row for each (token, rank), the same as V1's. An *expanded* one has a row for each (token,
local expert); its rows are put straight to their places (`cpu/expanded.py`, `cuda/selections.py`), or compact rows come
and are unfolded. A combine of expanded rows folds them first, and then sums compact rows; or they are pulled as they
are.

`Unfold` is what a CPU rank does with the rows that came, by torch's operations: layout and counts follow from the ids.
On a GPU kernels of the dispatch have made both already, and `cuda.selections.DeviceUnfold` uses them.

Shape letters: T tokens of this rank, K top-k, R ranks, L experts of a rank, N rows that there is memory for, n of which
came, X rows of an expanded result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch

from ..event import EventHandle
from ..handle import Handle
from ..kernels.reduce import RowSums
from ..sizing import align
from .ops import Counts
from .payload import DispatchResult, Expansion, Payload, SendPlan

_WEIGHTS = 2  # among rows, scales and weights


class Form(NamedTuple):
    """How a V2 dispatch lays out what comes.

    Attributes:
        num_local: L.
        num_topk: K.
        max_tokens: M, most tokens of a rank.
        alignment: To which the rows of each expert are rounded up.
        is_expanded: One row for each (token, local expert), grouped by expert.
    """

    num_local: int
    num_topk: int
    max_tokens: int
    alignment: int
    is_expanded: bool

    def most_expanded(self, num_ranks: int) -> int:
        """Most rows X of an expanded result: those of the worst case."""
        # A token names an expert once. Each expert's rows have less padding than the alignment.
        num_rows = num_ranks * self.max_tokens * min(self.num_topk, self.num_local)
        return align(num_rows + (self.alignment - 1) * self.num_local, self.alignment)

    def aligned_counts(self, told: Counts | None) -> list[int]:
        """Rows of each expert, rounded up; empty: the host does not know them."""
        return [] if told is None else [align(count, self.alignment) for count in told.expert_counts]

    def num_used(self, told: Counts | None) -> int | None:
        """Rows of an expanded result up to the last one that is no padding; None: see `Layout`.

        Example:
            Counts `[5, 0, 2, 0]` with alignment 4: experts begin at rows 0, 8, 8 and 12, so rows 0 to 9.
        """
        if told is None or not self.is_expanded:
            return None
        end = used = 0
        for count, aligned in zip(told.expert_counts, self.aligned_counts(told), strict=True):
            used = end + count if count else used
            end += aligned
        return used


@dataclass
class Layout:
    """Where the rows of a dispatch lie, on this rank and at its peers: what a V2 handle consists of.

    Attributes:
        form: How they were asked for.
        compact: The handle of the compact rows.
        topk_idx: [T, K], this rank's selections.
        ids: [N, K] the local ids of each compact row; -1: none. On a GPU None, if the result is expanded.
        sources: [N, 2 + K] int32, see `EPHandle.recv_src_metadata`.
        selections: [X] int64, the selection of each expanded row, as an index into the flattened `ids`; -1: padding.
            Empty if it is not expanded; None on a GPU.
        slots: [T, K] int32, the compact row of each token at the rank of column k, in the highest column of that rank;
            -1 in others.
        owners: [T, K] int32, the rank of column k; -1: it selects nothing.
        num_per_expert: [L] int32, selections of each local expert.
        ends: [L] int32, see `EPHandle.psum_num_recv_tokens_per_expert`.
        rank_ends: [R] int32, compact rows received from ranks 0..s.
        num_rows: n; the memory's N where the host does not know it.
        num_expanded: X.
        aligned_counts: Rows of each expert, rounded up; empty where the host does not know them.
        num_used: Rows of an expanded result up to the last one that is no padding; None where the host does not know
            it, or the result is compact.
        plan: Which rows this rank's selections take; None: only compact rows are sent.
        peer_rows: [T, K] int32, the same as a table; -1: none.
    """

    form: Form
    compact: Handle
    topk_idx: torch.Tensor
    ids: torch.Tensor | None
    sources: torch.Tensor
    selections: torch.Tensor | None
    slots: torch.Tensor
    owners: torch.Tensor
    num_per_expert: torch.Tensor
    ends: torch.Tensor
    rank_ends: torch.Tensor
    num_rows: int
    num_expanded: int
    aligned_counts: list[int]
    num_used: int | None = None
    plan: SendPlan | None = None
    peer_rows: torch.Tensor | None = None

    def apart(self, scope: Any) -> Layout:
        """Return the same layout with tensors that functions of a call may write, see `CallScope.apart`."""
        written = (
            "topk_idx",
            "ids",
            "sources",
            "selections",
            "slots",
            "owners",
            "num_per_expert",
            "ends",
            "rank_ends",
        )
        tensors = scope.apart([getattr(self, name) for name in written])
        return replace(self, **dict(zip(written, tensors, strict=True)))


class Extras(NamedTuple):
    """What a caller may want beside the rows.

    Attributes:
        has_zero_padding: Padding of an expanded result becomes zero.
        has_column_scales: Scales lie column after column, columns aligned for a TMA.
        stats: [L] int32, to which the selections of each local expert are added; None: nothing is.
        after: What the last step waits for; None: nothing.
    """

    has_zero_padding: bool = False
    has_column_scales: bool = False
    stats: torch.Tensor | None = None
    after: EventHandle | None = None


class Arrived(NamedTuple):
    """What a V2 dispatch returns.

    Attributes:
        x: [N or X, H].
        scales: [N or X, S], or None.
        topk_idx: [N, K] local ids; None if it is expanded.
        topk_weights: [N, K], or [X] if it is expanded; None: there are none.
        layout: Where the rows lie.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    layout: Layout


class ElasticRequest(NamedTuple):
    """What a V2 dispatch is asked for.

    Attributes:
        form: How the rows are wanted.
        topk_idx: [T, K], this rank's selections.
        num_ranks: R.
        rank: This rank.
        topk_weights: [T, K] float32, or None.
        scale_dtype: Type of the scales; None: there are none.
        extras: What else is wanted.
        layout: Of the dispatch that a cached one follows; None: the dispatch has routing.
        is_synchronised: The host waits for the counts.
        is_topk_copied: The layout gets a copy of this rank's selections.
    """

    form: Form
    topk_idx: torch.Tensor
    num_ranks: int
    rank: int
    topk_weights: torch.Tensor | None
    scale_dtype: torch.dtype | None
    extras: Extras
    layout: Layout | None = None
    is_synchronised: bool = False
    is_topk_copied: bool = False


# Dispatch ------------------------------------------------------------------------------------------------------------


class Unfold:
    """A V2 dispatch: makes what it returns out of the rows that came.

    Args:
        request: What is asked for.
        expansion: With it rows may be put straight into an expanded result; None: compact rows come.

    Attributes:
        is_straight: Rows and scales came as an expanded result.
    """

    is_straight = False

    def __init__(self, request: ElasticRequest, expansion: Expansion | None = None):
        self._request = request
        self._form = request.form
        self._extras = request.extras
        self._has_weights = request.topk_weights is not None
        self._expansion = expansion

    def attach(self, payload: Payload) -> None:
        """Have the steps of the call find what they must know beside the payload."""
        payload.expansion = self._expansion

    def prepare(self, scope: Any, payload: Payload) -> Payload:
        """Return what a cached dispatch moves: weights as columns behind the scales, both have elements of 4 bytes.

        With routing weights travel in the records, which a cached dispatch does not have.
        """
        scales, weights = payload.scales, self._request.topk_weights
        if weights is None or self._expansion is not None:  # with which they travel beside the rows
            return payload
        if scales is None:
            return Payload(payload.x, weights, payload.expansion, has_weights=True)
        num_scales = scales.shape[1]
        both = weights.new_empty((weights.shape[0], num_scales + weights.shape[1]), dtype=torch.int32)

        def fill() -> None:
            both[:, :num_scales].copy_(scales.view(torch.int32) if scales.dtype != torch.int32 else scales)
            both[:, num_scales:].copy_(weights.view(torch.int32))

        scope.launch(fill)
        return Payload(payload.x, both, payload.expansion, has_weights=True)

    def new(self, scope: Any, received: DispatchResult, told: Counts | None) -> Arrived:
        """Finish a dispatch that has routing: make its layout, and its results.

        Args:
            scope: The scope of the call.
            received: The rows.
            told: The counts; None: the host does not know them.
        """
        if told is not None and told.max_tokens != self._form.max_tokens:
            self._form = self._form._replace(max_tokens=told.max_tokens)
        if self._expansion is not None:
            self.is_straight = self._expansion.is_straight
        return self._new_results(scope, received, self._make_layout(scope, received, told))

    def again(self, scope: Any, received: DispatchResult) -> Arrived:
        """Finish a cached dispatch: rows lie where those of the earlier dispatch did."""
        layout = self._request.layout
        assert layout is not None
        sent_scales, sent_weights = received.scales, None
        if self._expansion is not None:
            self.is_straight = self._expansion.is_straight
            sent_weights = self._expansion.received_weights
        elif sent_scales is not None and self._has_weights:
            split = sent_scales.shape[1] - self._form.num_topk
            sent_scales, sent_weights = sent_scales[:, :split], sent_scales[:, split:].view(torch.float32)
        arrived = self._arrive(scope, received, layout, sent_scales, sent_weights)
        if self._form.is_expanded:
            return arrived
        ids = layout.ids
        assert ids is not None
        with scope.outputs:
            topk_idx = torch.empty_like(ids)
        job_ids = scope.apart((topk_idx,))[0]
        scope.launch(lambda: job_ids.copy_(ids))
        return arrived._replace(topk_idx=topk_idx)

    # Memory ----------------------------------------------------------------------------------------------------------

    def _make_layout(self, scope: Any, received: DispatchResult, told: Counts | None) -> Layout:
        """Make the layout of a dispatch, and launch the step that fills it."""
        layout = self._empty_layout(scope, received, told)
        if self._expansion is not None:
            layout.plan, layout.peer_rows = self._expansion.plan, self._expansion.peer_rows
        if self._request.is_topk_copied:
            with scope.outputs:
                layout.topk_idx = torch.empty_like(self._request.topk_idx)
        job_layout = layout.apart(scope)
        if self._request.is_topk_copied:
            scope.launch(lambda: job_layout.topk_idx.copy_(self._request.topk_idx))
        scope.launch(lambda: self._fill_layout(job_layout, received))
        return layout

    def _new_results(self, scope: Any, received: DispatchResult, layout: Layout) -> Arrived:
        """Make the results of a dispatch with routing."""
        sent_weights = received.topk_weights if self._has_weights else None
        arrived = self._arrive(scope, received, layout, received.scales, sent_weights)
        return arrived._replace(topk_idx=None if self._form.is_expanded else received.topk_idx)

    def _empty_layout(self, scope: Any, received: DispatchResult, told: Counts | None) -> Layout:
        """Allocate the tensors of a layout."""
        form, handle, like = self._form, received.handle, received.handle.rank_prefix_matrix
        topk_idx = self._request.topk_idx
        num_tokens, num_topk = topk_idx.shape
        num_rows = handle.num_rows
        aligned = form.aligned_counts(told)
        num_expanded = form.most_expanded(self._request.num_ranks) if told is None else sum(aligned)
        with scope.outputs:
            new = like.new_empty
            return Layout(
                form=form,
                compact=handle,
                topk_idx=topk_idx,
                ids=new((num_rows, num_topk), dtype=topk_idx.dtype),
                sources=new((num_rows, 2 + num_topk)),
                selections=new(num_expanded if form.is_expanded else 0, dtype=torch.int64),
                slots=new((num_tokens, num_topk)),
                owners=new((num_tokens, num_topk)),
                num_per_expert=new(form.num_local),
                ends=new(form.num_local),
                rank_ends=new(self._request.num_ranks),
                num_rows=num_rows,
                num_expanded=num_expanded,
                aligned_counts=aligned,
                num_used=form.num_used(told),
            )

    def _arrive(
        self,
        scope: Any,
        received: DispatchResult,
        layout: Layout,
        sent_scales: torch.Tensor | None,
        sent_weights: torch.Tensor | None,
    ) -> Arrived:
        """Allocate the results that are not there yet, and launch the step that fills them.

        Args:
            scope: The scope of the call.
            received: The compact rows.
            layout: Where they lie.
            sent_scales: Scales of the compact rows, perhaps as columns of something wider and of another type.
            sent_weights: [N, K] weights of the compact rows, likewise.
        """
        form, like = self._form, received.x
        num_rows = layout.num_expanded if form.is_expanded else received.x.shape[0]
        x, scales, weights = received.x, None, sent_weights
        with scope.outputs:
            if form.is_expanded and not self.is_straight:
                x = like.new_empty((num_rows, like.shape[1]))
            if sent_weights is not None and (form.is_expanded or not _is_packed(sent_weights)):
                shape = (num_rows,) if form.is_expanded else (num_rows, form.num_topk)
                weights = like.new_empty(shape, dtype=torch.float32)
            if sent_scales is not None and (scale_dtype := self._request.scale_dtype) is not None:
                sent_scales = sent_scales.view(scale_dtype)
                scales = self._empty_scales(sent_scales, num_rows)
        outputs = scope.apart(
            (
                None if x is received.x else x,
                None if scales is sent_scales else scales,
                None if weights is sent_weights else weights,
            )
        )
        sent = [*scope.apart((received.x, sent_scales)), sent_weights]
        scope.launch(lambda: self._fill(layout, sent, outputs))
        scope.hold_outputs([tensor for tensor in (x, scales, weights) if tensor is not received.x])
        return Arrived(x, scales, None, weights, layout)

    def _empty_scales(self, sent: torch.Tensor, num_rows: int) -> torch.Tensor:
        """Memory for the scales: those that came, if they lie already as they are wanted."""
        has_columns, num_scales = self._extras.has_column_scales, sent.shape[1]
        if (self.is_straight or not self._form.is_expanded) and not has_columns and _is_packed(sent):
            return sent
        strides = (1, align(num_rows, 4)) if has_columns else (num_scales, 1)
        return torch.empty_strided((num_rows, num_scales), strides, dtype=sent.dtype, device=sent.device)

    # Values ----------------------------------------------------------------------------------------------------------

    def _fill_layout(self, layout: Layout, received: DispatchResult) -> None:
        """Fill the layout: where each row of the dispatch lies."""
        form, ids = self._form, received.topk_idx
        assert ids is not None
        assert layout.ids is not None
        layout.ids.copy_(ids)
        prefix, rank = received.handle.rank_prefix_matrix, self._request.rank
        layout.rank_ends.copy_(prefix[:, rank])
        count_experts(ids, layout.num_per_expert)
        if self._extras.stats is not None:
            self._extras.stats.add_(layout.num_per_expert)
        aligned = layout.num_per_expert + (form.alignment - 1)
        aligned -= aligned % form.alignment
        torch.cumsum(aligned, 0, dtype=torch.int32, out=layout.ends)
        starts = layout.ends - aligned
        if form.is_expanded:
            torch.add(starts, layout.num_per_expert, out=layout.ends)
        self._fill_sources(layout, ids, received.handle.recv_src_idx, starts)
        self._fill_slots(layout, received.handle.send_head)

    def _fill_sources(self, layout: Layout, ids: torch.Tensor, tokens: torch.Tensor, starts: torch.Tensor) -> None:
        """Fill where each row comes from, and which expanded rows its selections take."""
        form, sources = self._form, layout.sources
        row_idx = torch.arange(ids.shape[0], dtype=torch.int32, device=ids.device)
        ranks = torch.searchsorted(layout.rank_ends, row_idx, right=True, out_int32=True)
        sources[:, 0] = ranks * form.max_tokens + tokens
        sources[:, 1] = ranks * form.num_topk + _highest_columns(ids)
        sources[:, 2:] = -1
        if form.is_expanded:
            assert layout.selections is not None
            selections, rows = expanded_rows(ids, layout.num_per_expert.numpy(), starts.numpy())
            layout.selections.fill_(-1).numpy()[rows] = selections
            compact_rows, columns = np.divmod(selections, max(1, form.num_topk))
            sources.numpy()[compact_rows, 2 + columns] = rows

    def _fill_slots(self, layout: Layout, send_head: torch.Tensor) -> None:
        """Fill the slots of this rank's tokens: at each column's rank, in the highest column of that rank."""
        form, topk_idx = self._form, self._request.topk_idx
        is_valid = (topk_idx >= 0) & (topk_idx < form.num_local * self._request.num_ranks)
        owners = torch.where(is_valid, topk_idx // form.num_local, -1).to(torch.int32)
        layout.owners.copy_(owners)
        slots = send_head.gather(1, owners.clamp(min=0).long()) if form.num_topk else layout.slots
        is_highest = is_valid.clone()
        for column in range(1, form.num_topk):
            # Columns of the same rank before this one are not its highest.
            is_highest[:, :column] &= owners[:, :column] != owners[:, column : column + 1]
        layout.slots.copy_(torch.where(is_highest, slots, -1))

    def _fill(
        self, layout: Layout, sent: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor | None]
    ) -> None:
        """Copy rows, scales and weights to where they stay.

        Args:
            layout: Where the rows lie.
            sent: The compact rows, their scales, and their weights.
            outputs: What is filled, for each of them; None: it lies where it stays.
        """
        self._wait()
        if self._form.is_expanded and not self.is_straight:
            self._unfold_rows(layout, sent, outputs)
        for index, (source, target) in enumerate(zip(sent, outputs, strict=True)):
            if source is None:
                continue
            if index == _WEIGHTS and self._form.is_expanded and target is not None:
                self._unfold_weights(layout, source, target)
            elif self.is_straight or not self._form.is_expanded:
                if target is not None:
                    target.copy_(source)
                if self.is_straight and self._extras.has_zero_padding:
                    self._zero_gaps(layout, source if target is None else target)

    def _wait(self) -> None:
        """Wait for the event that the last step is to come after, if there is one."""
        if self._extras.after is not None:
            self._extras.after.current_stream_wait()

    def _unfold_rows(
        self, layout: Layout, sent: Sequence[torch.Tensor | None], outputs: Sequence[torch.Tensor | None]
    ) -> None:
        """Copy compact rows and scales to their expanded rows. The arguments are those of `_fill`."""
        for source, target in zip(sent[:_WEIGHTS], outputs[:_WEIGHTS], strict=True):
            if source is not None and target is not None:
                self._unfold(layout, source, target)

    def _zero_gaps(self, layout: Layout, out: torch.Tensor) -> None:
        """Set the rows between experts to zero."""
        out = _as_integers(out)
        for end in layout.ends.tolist():
            out[end : align(end, self._form.alignment)].zero_()

    def _unfold(self, layout: Layout, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Each expanded row is a copy of its compact one."""
        assert layout.selections is not None
        if not out.numel() or not rows.shape[0]:  # without compact rows all experts are empty
            return
        rows, out = _as_integers(rows), _as_integers(out)
        row_idx = layout.selections.clamp(min=0).div_(self._form.num_topk, rounding_mode="floor")
        if out.is_contiguous():
            torch.index_select(rows, 0, row_idx, out=out)
        else:
            out.copy_(rows.index_select(0, row_idx))
        if self._extras.has_zero_padding:
            out.masked_fill_((layout.selections < 0)[:, None], 0)

    def _unfold_weights(self, layout: Layout, weights: torch.Tensor, out: torch.Tensor) -> None:
        """The weight of each expanded row is that of its selection."""
        assert layout.selections is not None
        if not weights.numel():  # without compact rows all experts are empty
            out.zero_()
            return
        torch.index_select(weights.reshape(-1), 0, layout.selections.clamp(min=0), out=out)
        out.masked_fill_(layout.selections < 0, 0)


def _as_integers(rows: torch.Tensor) -> torch.Tensor:
    """The same memory in a dtype that every operator takes: not all take FP8, unsigned or complex numbers."""
    kinds = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    return rows.view(kinds.get(rows.dtype.itemsize, torch.int64))


def _is_packed(columns: torch.Tensor) -> bool:
    """Whether [n, columns] are no part of something wider. Fewer than two rows are contiguous either way."""
    return columns.stride() == (columns.shape[1], 1)


def count_experts(ids: torch.Tensor, out: torch.Tensor) -> None:
    """Count the selections of each local expert.

    Args:
        ids: [N, K] local ids; -1: none.
        out: [L] int32, written.

    Example:
        `[[0, -1], [2, 0]]` with three experts is `[2, 0, 1]`.
    """
    out.copy_(torch.bincount(ids.flatten() + 1, minlength=out.shape[0] + 1)[1:])


def _highest_columns(ids: torch.Tensor) -> torch.Tensor:
    """Return the highest column of each row that selects something, of [n, K] local ids; K - 1 if none does."""
    num_topk = ids.shape[1]
    if not num_topk:
        return ids.new_full((ids.shape[0],), -1)
    return torch.from_numpy(num_topk - 1 - (ids.numpy() >= 0)[:, ::-1].argmax(1))


def expanded_rows(ids: torch.Tensor, counts: np.ndarray, starts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Find the rows that selections take: experts ascending, then rows, then columns.

    Sender and receiver of an expanded dispatch find the same ones. `kernels.selections.Place` agrees.

    Args:
        ids: [n, K]; a selection outside of [0, experts) takes no row.
        counts: [experts], the selections of each expert.
        starts: [experts], the first row of each expert.

    Returns:
        [m] selections in the order of their experts, as indices into the flattened ids, and the row of each.

    Example:
        `[[1, 0], [1, -1]]`, counts `[1, 2]`, starts `[0, 4]`: selections `[1, 0, 2]` take rows `[0, 4, 5]`.
    """
    flat = ids.numpy().ravel()
    chosen = ((flat >= 0) & (flat < len(counts))).nonzero()[0]
    # There are at most 16,384 experts, and 16 bits are sorted in a tenth of the time that 64 bits take.
    in_order = chosen[flat[chosen].astype(np.int16).argsort(kind="stable")]
    shifts = starts - (counts.cumsum() - counts)
    return in_order, np.arange(len(in_order)) + shifts.repeat(counts)


# Combine -------------------------------------------------------------------------------------------------------------


def require_rows(num_given: int, num_used: int) -> None:
    """Check that a combine of expanded rows is given all of them; padding behind the last one may be left out.

    Args:
        num_given: Rows of `x`.
        num_used: Rows up to the last one that is no padding.

    Raises:
        ValueError: There are fewer.
    """
    if num_given < num_used:
        raise ValueError(
            f"combine: `x` must have the first {num_used} rows of the dispatch (behind them is only padding), it has "
            f"{num_given}. Pass all rows that the dispatch returned"
        )


def fold_rows(out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor) -> None:
    """Sum the expanded rows of each token, columns ascending, in FP32 (FP64 of FP64), rounded once.

    Args:
        out: [N, H] of x's dtype, written.
        x: [X, H].
        rows: [N, K] int32; -1: none. One row alone is forwarded as it is.
    """
    RowSums([x], rows, [0], owners=torch.zeros_like(rows), is_part=True).sum(out)


def fold_weights(out: torch.Tensor, weights: torch.Tensor, rows: torch.Tensor) -> None:
    """The weights of each token's own columns, 0 in others.

    Args:
        out: [N, K] float32, written.
        weights: [X] float32. Of rows that it does not have the weight is 0, see `Engine.require_rows`.
        rows: [N, K] int32; -1: none.
    """
    num_given = weights.shape[0]
    if not num_given:
        out.zero_()
        return
    found = weights.index_select(0, rows.flatten().clamp(0, num_given - 1)).view(rows.shape)
    out.copy_(torch.where((rows >= 0) & (rows < num_given), found, 0.0))


def own_columns(out: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> None:
    """Weights [N, K] of the columns that select an expert of this rank, 0 in others: so that a sum is a gather."""
    out.copy_(torch.where(ids >= 0, weights, 0.0))
