"""What travels in a dispatch, as rows of bytes: payload, scales, and a record for each token.

A *section* is one matrix of bytes with a row per token. A record is the source index, the ids and the weights of a
token side by side; only a dispatch with routing has them. Payload and scales arrive where they stay; records are
taken apart on arrival.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from ..kernels.rows import rows_as
from .protocol import Agreement


@dataclass(slots=True)
class SendPlan:
    """Which rows of expanded results this rank's selections take.

    A dispatch fills it while it runs, and cached ones follow it.

    Attributes:
        token_idx: For each expert, the tokens that select it, ascending int64.
        first_rows: For each expert, the row of the first of them at the rank of the expert.
        num_rows: Rows of the expanded result of each rank.
        rows_to: Selections that go to each rank.
        rows_from: Selections that come from each rank.
        number: The `checksum` of the counts of all ranks, which tells dispatches apart.
    """

    token_idx: list[torch.Tensor] = field(default_factory=list)
    first_rows: list[int] = field(default_factory=list)
    num_rows: list[int] = field(default_factory=list)
    rows_to: list[int] = field(default_factory=list)
    rows_from: list[int] = field(default_factory=list)
    number: int = 0


@dataclass(slots=True)
class Expansion:
    """A request to put the rows of a dispatch straight into an expanded result, if there is memory for it.

    Attributes:
        alignment: To which the rows of each expert are rounded up.
        num_rows: X, if it is known before the counts are; else 0.
        plan: Filled by a dispatch with routing, followed by a cached one.
        peer_rows: [T, K] int32, filled by a dispatch with routing: the row of each selection at its rank; -1: none.
        weights: [T, K] float32, which travel with a cached dispatch; None: there are none.
        received_weights: [n, K] float32, what comes of them, by compact row.
        is_straight: Set by the steps when they allocate memory: received rows and scales are an expanded result.
    """

    alignment: int
    num_rows: int
    plan: SendPlan
    peer_rows: torch.Tensor | None = None
    weights: torch.Tensor | None = None
    received_weights: torch.Tensor | None = None
    is_straight: bool = False


@dataclass(slots=True)
class Payload:
    """What travels.

    Attributes:
        x: [T, H] any dtype, contiguous.
        scales: [T, S] any dtype and strides, or None.
        expansion: What the steps of a dispatch of V2 must know beside it: an `Expansion`, on a GPU a `DeviceUnfold`;
            None: they are those of V1.
        has_weights: Weights of a cached dispatch of V2 are the last columns of the scales.
    """

    x: torch.Tensor
    scales: torch.Tensor | None = None
    expansion: Any = None
    has_weights: bool = False


@dataclass(slots=True)
class Routing:
    """Which rows go to which ranks.

    Attributes:
        num_tokens_per_rank: [R] int32.
        num_tokens_per_expert: [E] int32.
        is_token_in_rank: [T, R] bool.
        topk_idx: [T, K] int32 or int64, or None.
        topk_weights: [T, K] float32, or None.
        num_tokens_per_node: [nodes] int32; None on one node.
        max_tokens: Most tokens of a rank, which must be the same on all ranks; 0: it was not given.
        has_known_ids: The buffer has made the layout, of these ids.
        keeps_weights: Received weights are those that were sent, also of experts of other ranks; otherwise these are 0.
        has_weights: The caller of V2's dispatch, which may leave them out, has given weights.
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None
    num_tokens_per_node: torch.Tensor | None = None
    max_tokens: int = 0
    has_known_ids: bool = False
    keeps_weights: bool = False
    has_weights: bool = False

    def tensors(self) -> tuple[torch.Tensor | None, ...]:
        """The tensors of the routing; None for each that was not given."""
        per_node, idx, weights = self.num_tokens_per_node, self.topk_idx, self.topk_weights
        return self.num_tokens_per_rank, self.num_tokens_per_expert, self.is_token_in_rank, idx, weights, per_node

    @property
    def num_experts(self) -> int:
        """The number of experts, E."""
        return self.num_tokens_per_expert.numel()

    @property
    def num_topk(self) -> int:
        """The number of selections of a token, K; 0 if ids and weights do not travel."""
        return 0 if self.topk_idx is None else self.topk_idx.size(1)

    @property
    def idx_dtype(self) -> torch.dtype | None:
        """Type of the ids, None where they do not travel."""
        return None if self.topk_idx is None else self.topk_idx.dtype

    @property
    def idx_words(self) -> int:
        """The number of 4-byte words of an id."""
        return 0 if self.topk_idx is None else self.topk_idx.element_size() // 4


@dataclass(slots=True)
class DispatchResult:
    """What a dispatch returns. On the CPU made by the caller's thread, and filled on the comm stream.

    Attributes:
        x: [n, H] in the window (in ordinary memory where the arena cannot hold it).
        scales: [n, S] likewise, or None.
        topk_idx: [n, K] ordinary memory, or None.
        topk_weights: [n, K] ordinary memory, or None.
        handle: The `Handle`, across nodes the `RailHandle`; its tensors are ordinary memory.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: Any


class CombineResult(NamedTuple):
    """What a combine returns, in private memory. On the CPU made by the caller's thread, and filled on the comm stream.

    Attributes:
        x: [T, H] of the input's dtype.
        topk_weights: [T, K] float32, or None.
    """

    x: torch.Tensor
    topk_weights: torch.Tensor | None


make_combined: Callable[[tuple], CombineResult] = partial(tuple.__new__, CombineResult)  # see `notify.make_post`


class Unpacked(NamedTuple):
    """What comes beside the rows of a dispatch, with as many rows as there is memory for.

    Attributes:
        handle: The handle.
        topk_idx: [n, K], local ids, or None.
        topk_weights: [n, K] float32, or None.
    """

    handle: Any
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None


def apart(tensors: Iterable[Any]) -> list[Any]:
    """Return new tensors over the same memory; None stays None.

    Autograd counts the changes of a tensor and of its views, and refuses to go back through one that changed. What an
    asynchronous call writes after it has returned is no change, but the value that its results have. So it is written
    through tensors that are none of those that the caller has, and the counts of the caller's stay as they are.
    """
    return [tensor.data if tensor is not None else None for tensor in tensors]


def empty_topk(routing: Routing | None, num_rows: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Allocate the ids and weights of `num_rows` rows, if they travel."""
    if routing is None or routing.topk_idx is None or routing.topk_weights is None:
        return None, None
    topk_idx, topk_weights = routing.topk_idx, routing.topk_weights
    num_topk = topk_idx.shape[1]
    return topk_idx.new_empty(num_rows, num_topk), topk_weights.new_empty(num_rows, num_topk)


def agreement_of(operation: str, payload: Payload, routing: Routing | None, handle: int = 0) -> Agreement:
    """Return what must be the same on all ranks in a dispatch."""
    x, scales = payload.x, payload.scales
    return Agreement(
        operation,
        num_experts=routing.num_experts if routing is not None else 0,
        num_topk=routing.num_topk if routing is not None else 0,
        hidden=x.size(1),
        dtype=x.dtype,
        num_scales=scales.size(1) if scales is not None else 0,
        scale_dtype=scales.dtype if scales is not None else None,
        idx_dtype=routing.idx_dtype if routing is not None else None,
        # Where the counts are waited for, the largest will do.
        max_tokens=routing.max_tokens if routing is not None and operation != "dispatch" else 0,
        handle=handle,
        has_weights=int(payload.has_weights or (routing is not None and routing.has_weights)),
    )


def section_columns(payload: Payload, routing: Routing | None) -> list[tuple[int, torch.dtype]]:
    """Columns and dtype of each section: x, scales if there are some, records if there is routing."""
    columns = [(payload.x.size(1), payload.x.dtype)]
    if payload.scales is not None:
        columns.append((payload.scales.size(1), payload.scales.dtype))
    if routing is not None:
        columns.append((_record_words(routing), torch.int32))
    return columns


def outgoing_parts(payload: Payload, routing: Routing | None) -> list[torch.Tensor]:
    """What to send, a matrix with a row per token for each section."""
    parts = [payload.x]
    if payload.scales is not None:
        parts.append(payload.scales.contiguous())
    if routing is not None:
        parts.append(_pack_records(routing, payload.x.size(0)))
    return parts


def posted_parts(payload: Payload, routing: Routing | None) -> list[torch.Tensor]:
    """What to post, a matrix with a row per token for each kind: x, scales, ids, weights, source index."""
    parts = [payload.x] if payload.scales is None else [payload.x, payload.scales]
    if routing is None:
        return parts
    if routing.topk_idx is not None and routing.topk_weights is not None:
        parts += [routing.topk_idx, routing.topk_weights]
    return [*parts, torch.arange(payload.x.size(0), dtype=torch.int32, device=payload.x.device).view(-1, 1)]


# A record is ids, weights and the source index, in words of 4 bytes; an even number of them, so that rows of records
# are aligned for ids of 8 bytes and can be read in place. Where a word is left over the index is there twice.


def _record_words(routing: Routing) -> int:
    words = routing.num_topk * (routing.idx_words + 1) + 1
    return words + words % 2


def _pack_records(routing: Routing, num_tokens: int) -> torch.Tensor:
    parts = []
    if routing.topk_idx is not None and routing.topk_weights is not None:
        parts = [rows_as(routing.topk_idx, torch.int32), rows_as(routing.topk_weights, torch.int32)]
    source_idx = torch.arange(num_tokens, dtype=torch.int32, device=routing.is_token_in_rank.device)
    num_words = _record_words(routing) - sum(part.size(1) for part in parts)
    return torch.cat([*parts, source_idx.view(-1, 1).expand(-1, num_words)], 1)


def unpack_records(
    records: torch.Tensor,
    num_rows: int,
    source_idx: torch.Tensor,
    unpacked: Unpacked,
    rank: int,
    num_local: int,
    keeps_weights: bool = False,
) -> None:
    """Take records apart: source indices, ids and weights, which are made local.

    Args:
        records: [n, W] int32.
        num_rows: Rows that came; there may be memory for more.
        source_idx: [n] int32, to be filled.
        unpacked: Its ids and weights are filled.
        rank: This rank.
        num_local: Experts of a rank.
        keeps_weights: See `Routing`.
    """
    records = records[:num_rows]
    source_idx[:num_rows].copy_(records[:, -1])
    ids, weights = unpacked.topk_idx, unpacked.topk_weights
    if ids is None or weights is None:
        return
    num_topk, id_words = ids.size(1), ids.size(1) * ids.element_size() // 4
    ids[:num_rows].copy_(records.view(ids.dtype)[:, :num_topk])
    weights[:num_rows].copy_(records.view(torch.float32)[:, id_words : id_words + num_topk])
    make_local(unpacked, num_rows, rank, num_local, keeps_weights)


def make_local(unpacked: Unpacked, num_rows: int, rank: int, num_local: int, keeps_weights: bool = False) -> None:
    """Make ids local: ids of experts of other ranks become -1, and their weights 0, unless they are kept.

    The arguments are those of `unpack_records`.
    """
    ids, weights = unpacked.topk_idx, unpacked.topk_weights
    if ids is None or weights is None:
        return
    if num_rows < ids.size(0):
        # Rows of the worst case that did not come select nothing.
        ids[num_rows:].fill_(-1)
        ids, weights = ids[:num_rows], weights[:num_rows]
    ids.sub_(rank * num_local)
    is_foreign = ids != ids.clamp(0, num_local - 1)
    ids.masked_fill_(is_foreign, -1)
    if not keeps_weights:
        weights.masked_fill_(is_foreign, 0.0)
