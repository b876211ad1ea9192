"""What the steps of one hop and of two hops have in common on a GPU: signatures, terms, offers, counts.

A call has a *signature*: everything about it but its tensors' memory and the number of its tokens. What follows from it
(which kernels, how they are launched, the words that must agree, the widths of rows) is computed once and cached: the
steps of a signature. A call then checks little, allocates memory, and passes addresses to launches that are bound
already.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import torch

from ...handle import ColumnHandle
from ...kernels.notify import Post, Terms, make_post
from ...kernels.put import RowSpec, record_words, widest_word
from ..ops import CombineSteps, Counts, Sections
from ..payload import Payload, Routing
from ..protocol import OFFERED, OPERATIONS, Agreement
from .digest import pack
from .memory import Columns, CombineSource, Memory
from .scope import CudaScope
from .shapes import Shapes
from .signals import Signals


class DispatchSignature(NamedTuple):
    """The signature of a dispatch: what distinguishes it from others.

    Attributes:
        operation: One of `protocol.OPERATIONS`.
        hidden: H.
        dtype: Of the payload.
        alignment: The payload begins at a multiple of so many bytes, at most 16.
        num_scales: Scales of a row.
        scale_dtype: Their type; None: there are none.
        num_topk: K; 0: ids and weights do not travel.
        idx_dtype: Type of the ids; None: there are none.
        num_experts: E; 0: there is a handle.
        max_tokens: Most tokens of a rank, which must be the same on all ranks; 0: it was not given.
        keeps_weights: Weights of experts of other ranks travel as they are, see `payload.Routing`.
        num_sms: Most blocks of a kernel; None: nothing bounds them.
        has_weights: See `Agreement`.
        selections: What a dispatch of V2 is more than that; None: it is as one of V1.
    """

    operation: str
    hidden: int
    dtype: torch.dtype
    alignment: int
    num_scales: int
    scale_dtype: torch.dtype | None
    num_topk: int
    idx_dtype: torch.dtype | None
    num_experts: int
    max_tokens: int
    keeps_weights: bool
    num_sms: int | None
    has_weights: bool
    selections: Any = None


class CombineSignature(NamedTuple):
    """The signature of a combine: what distinguishes it from others.

    Attributes:
        hidden: H.
        dtype: The dtype of the rows.
        num_columns: K, if rows are added in the order of columns; 0: in that of ranks.
        num_topk: K, of the weights that come back with the rows; 0: none do.
        num_biases: At most two.
        is_aligned: Sums and biases begin at multiples of 16 bytes.
        num_sms: Most blocks of a kernel; None: nothing bounds them.
        is_reduced_once: See `Agreement`.
        alignment: Of the rows of an expert, if rows are those of an expanded result, or sums of them; else 0.
    """

    hidden: int
    dtype: torch.dtype
    num_columns: int
    num_topk: int
    num_biases: int
    is_aligned: bool
    num_sms: int | None
    is_reduced_once: bool
    alignment: int = 0


class Ops(Protocol):
    """Makes the steps of calls: of one hop (`one_hop.py`), or of two (`nodes/two_hops.py`).

    Attributes:
        shapes: How bulk kernels are launched, of steps that are made from now on.
        memory: The memory of the buffer.
        selections: What V2's calls need, a `SelectionOps`; None: they cannot be made.
    """

    shapes: Shapes
    memory: Memory
    selections: Any

    def dispatch(self, signature: DispatchSignature) -> Any:
        """Make the steps of dispatches with a signature; of V2's dispatches their `SelectionPlan`."""
        ...

    def combine(self, signature: CombineSignature) -> CombineSteps:
        """Make the steps of combines with a signature."""
        ...

    def stats(self) -> dict[str, Any]:
        """Return counters beyond those of the engine."""
        ...

    def close(self) -> None:
        """Release what it holds, once everything that was launched is done."""
        ...


def rows_of(signature: DispatchSignature) -> RowSpec:
    """Return what the rows of a dispatch consist of, for the kernels that move them."""
    row_bytes = signature.hidden * signature.dtype.itemsize
    word, is_aligned = widest_word(row_bytes, signature.alignment)
    scale_bytes = signature.scale_dtype.itemsize if signature.scale_dtype is not None else 0
    has_records = signature.num_experts > 0
    idx_dtype = signature.idx_dtype or torch.int32
    return RowSpec(
        row_bytes, word, is_aligned, signature.num_scales, scale_bytes, has_records, signature.num_topk, idx_dtype,
        signature.keeps_weights,
    )  # fmt: skip


def columns_of(signature: DispatchSignature) -> Columns:
    """Return what the rows of a dispatch consist of, for the allocation of memory."""
    num_words = record_words(signature.num_topk) if signature.num_experts else 0
    return Columns(signature.hidden, signature.dtype, signature.num_scales, signature.scale_dtype, num_words)


def terms_of(signature: DispatchSignature, step: int, num_ranks: int) -> Terms:
    """Return what a rank posts in all dispatches of a signature."""
    operation, hidden, dtype, _, num_scales, scale_dtype, num_topk, idx_dtype, num_experts, max_tokens, *_ = signature
    agreement = Agreement(
        operation, num_experts, num_topk, hidden, dtype, num_scales, scale_dtype, idx_dtype, max_tokens,
        has_weights=int(signature.has_weights),
    )  # fmt: skip
    return Terms(step, OPERATIONS.index(operation), pack(agreement), num_experts // num_ranks)


def combine_terms(signature: CombineSignature) -> Terms:
    """Return what a rank posts in all combines of a signature."""
    agreement = Agreement(
        "combine",
        num_topk=signature.num_topk,
        hidden=signature.hidden,
        dtype=signature.dtype,
        is_reduced_once=int(signature.is_reduced_once),
    )
    return Terms(OFFERED, OPERATIONS.index("combine"), pack(agreement))


class DeviceDispatch(ABC):
    """The steps of dispatches with one signature that one hop and two take alike, see `ops.DispatchSteps`.

    Args:
        signals: The signals of the buffer.
        memory: The memory of the buffer.
        signature: The signature of the dispatches.
    """

    def __init__(self, signals: Signals, memory: Memory, signature: DispatchSignature):
        self._signals = signals
        self._memory = memory
        self._columns = columns_of(signature)
        self._is_full = signature.operation == "dispatch"
        self._num_experts = signature.num_experts

    def guess(self) -> Sections:
        """Allocate memory for a few rows more than the last dispatch received, so that rows can move before counts
        are known.
        """
        return self._memory.guess(self._columns)

    def memory(self, scope: CudaScope, num_rows: int) -> Sections:
        """Allocate memory for exactly `num_rows` rows."""
        sections = self._memory.sections(self._columns, num_rows)
        scope.path = "dispatch/direct"
        if sections is None:
            sections = self._memory.staged_sections(scope, self._columns, num_rows)
            scope.path = "dispatch/staged"
        return sections

    def notify(
        self, scope: CudaScope, payload: Payload, routing: Routing | None, routes: Any, sections: Sections
    ) -> None:
        """Exchange counts and offers with the peers."""
        num_tokens = free_bytes = ticket = 0
        if self._is_full:
            scope.path = "dispatch/direct"  # what is guessed lies in the window
            free_bytes = self._memory.largest_free_bytes()
            num_tokens, ticket = payload.x.shape[0], self._signals.next_ticket()
            if routing is not None and routing.max_tokens:  # tokens are of use only across nodes
                num_tokens = routing.max_tokens
        offer = (sections.num_rows, sections.rows_per_source, num_tokens, free_bytes, sections.bases, 0, ticket)
        self._notify(scope, make_post(offer), payload, routing, routes)
        if self._signals.marks is not None:
            self._note(routing, routes)

    @abstractmethod
    def _notify(self, scope: CudaScope, post: Post, payload: Payload, routing: Routing | None, routes: Any) -> None:
        """Launch the handshake."""

    @abstractmethod
    def _rows_to(self, routes: Any) -> torch.Tensor | None:
        """Return [R] int32: the rows that a dispatch along a handle sends to each rank; None: the handle does not
        have them.
        """

    def _note(self, routing: Routing | None, routes: Any) -> None:
        """Note the rows to each rank in the trace."""
        if (marks := self._signals.noting) is not None:
            marks.note(row_bytes=sum(self._columns.widths()))
            rows_to = routing.num_tokens_per_rank if routing is not None else self._rows_to(routes)
            if rows_to is not None:
                marks.note_rows(rows_to=rows_to)

    def counts(self, scope: CudaScope, routing: Routing) -> Counts:
        """Wait for the counts, and keep the number of rows for the next dispatch's guess."""
        told = self._signals.wait_for_counts(self._num_experts)
        if self._signals.marks is not None:
            self._signals.marks.note(experts=told.expert_counts)
        self._memory.guess_from(told.num_rows[self._signals.context.rank])
        return told._replace(max_tokens=max(told.num_tokens)) if routing.max_tokens else told

    def offer(self, scope: CudaScope, payload: Payload, routes: Any, sections: Sections) -> None:
        """Exchange offers a second time, now that the counts are known."""
        if scope.reach is not None:
            scope.reach("offer")
        self._offer(Post(sections.num_rows, sections.rows_per_source, bases=sections.bases), payload, routes)

    @abstractmethod
    def _offer(self, post: Post, payload: Payload, routes: Any) -> None:
        """Launch the second handshake."""


class DeviceCombine(ABC):
    """The steps of combines with one signature that one hop and two take alike, see `ops.CombineSteps`.

    Args:
        signals: The signals of the buffer.
        memory: The memory of the buffer.
    """

    def __init__(self, signals: Signals, memory: Memory):
        self._signals = signals
        self._memory = memory

    def outputs(self, scope: CudaScope, parts: Sequence[torch.Tensor], handle: Any) -> list[torch.Tensor]:
        """Allocate ordinary memory for the sums."""
        num_tokens = handle.num_tokens
        if len(parts) == 1:  # as most often
            return [scope.empty(parts[0], num_tokens, parts[0].shape[1])]
        return [scope.empty(part, num_tokens, part.shape[1]) for part in parts]

    def notify(self, scope: CudaScope, parts: Sequence[torch.Tensor], handle: Any) -> CombineSource:
        """Copy rows into the window where that is needed, and exchange offers."""
        # The kernel that sums staged rows adds them in the order of ranks.
        source = self._memory.source(parts, handle.num_tokens, can_stage=not isinstance(handle, ColumnHandle))
        scope.path = source.path
        self._notify(scope, source, handle)
        if self._signals.marks is not None:
            self._note(source.path, parts, handle)
        return source

    @abstractmethod
    def _notify(self, scope: CudaScope, source: CombineSource, handle: Any) -> None:
        """Launch the copies and the handshake."""

    def _rows_from(self, handle: Any) -> torch.Tensor | None:
        """Return [R] int32: the compact rows that come back from each rank, as many as the dispatch sent there; None:
        the handle does not have them.
        """
        return rows_to_each(handle.rank_prefix_matrix, self._signals.context.rank)

    def _note(self, path: str, parts: Sequence[torch.Tensor], handle: Any) -> None:
        """Note the rows from each rank in the trace."""
        if (marks := self._signals.noting) is not None:
            row_bytes = sum(part.size(1) * part.element_size() for part in parts)
            marks.note(path=path.partition("/")[2], row_bytes=row_bytes)
            if (rows_from := self._rows_from(handle)) is not None:
                marks.note_rows(rows_from=rows_from)

    def _release(self, source: CombineSource) -> None:
        """Release the regions that rows were copied to, after everything that has been launched."""
        source.copies.clear()
        self._memory.reclaim()


def shrink(matrices: Sequence[torch.Tensor | None], num_rows: int) -> None:
    """Leave matrices of a full dispatch, for which there is more memory than was needed, their first rows.

    No other code has these tensors yet, so they are resized in place, which takes a third of the time that a view
    takes: the caller waits for what is done after the counts have come.
    """
    for matrix in matrices:
        if matrix is not None:
            matrix.resize_(num_rows, matrix.shape[1])


def rows_to_each(prefix: torch.Tensor, rank: int) -> torch.Tensor:
    """Return [R] int32: the rows that a rank sends to each rank, from a `rank_prefix_matrix`."""
    return prefix[rank] - prefix[rank - 1] if rank else prefix[0]
