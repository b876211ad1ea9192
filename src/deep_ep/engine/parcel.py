"""What travels in a dispatch, as rows of bytes: payload, scales, and a record for each token.

A *section* is one matrix of bytes with a row per token. A record is the source index, the ids and the weights of a
token side by side; only a dispatch with routing has them. Payload and scales arrive where they stay; records are
taken apart on arrival.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..handle import Handle
from ..kernels.rows import as_bytes


@dataclass(frozen=True)
class Payload:
    """What travels.

    Attributes:
        x: [T, H] any dtype, contiguous.
        scales: [T, S] any dtype and strides, or None.
    """

    x: torch.Tensor
    scales: torch.Tensor | None = None


@dataclass(frozen=True)
class Routing:
    """Who gets what.

    Attributes:
        num_tokens_per_rank: [R] int32.
        num_tokens_per_expert: [E] int32.
        is_token_in_rank: [T, R] bool.
        topk_idx: [T, K] int32 or int64, or None.
        topk_weights: [T, K] float32, or None.
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor
    topk_idx: torch.Tensor | None = None
    topk_weights: torch.Tensor | None = None

    @property
    def num_experts(self) -> int:
        """E."""
        return self.num_tokens_per_expert.numel()

    @property
    def num_topk(self) -> int:
        """K, 0 where ids and weights do not travel."""
        return 0 if self.topk_idx is None else self.topk_idx.size(1)

    @property
    def idx_dtype(self) -> torch.dtype | None:
        """Type of the ids, None where they do not travel."""
        return None if self.topk_idx is None else self.topk_idx.dtype

    @property
    def idx_words(self) -> int:
        """Words of 4 bytes of an id."""
        return 0 if self.topk_idx is None else self.topk_idx.element_size() // 4


@dataclass
class Received:
    """Where the rows of a dispatch arrive. Made by the caller's thread, filled on the comm stream.

    Attributes:
        x: [n, H] in the window (in ordinary memory where the arena cannot hold it).
        scales: [n, S] likewise, or None.
        records: [n, W] int32, ids, weights and source index side by side; dropped when the call ends.
        topk_idx: [n, K] ordinary memory, or None.
        topk_weights: [n, K] ordinary memory, or None.
        handle: The handle; its tensors are ordinary memory.
        is_staged: The arena could not hold the rows.
    """

    x: torch.Tensor
    scales: torch.Tensor | None
    records: torch.Tensor | None
    topk_idx: torch.Tensor | None
    topk_weights: torch.Tensor | None
    handle: Handle
    is_staged: bool

    def sections(self) -> list[torch.Tensor]:
        """The bytes of what arrives, a matrix for each section."""
        return [as_bytes(part) for part in (self.x, self.scales, self.records) if part is not None]


def section_columns(payload: Payload, routing: Routing | None) -> list[tuple[int, torch.dtype]]:
    """Columns and dtype of each section: x, scales if there are some, records if there is routing."""
    columns = [(payload.x.size(1), payload.x.dtype)]
    if payload.scales is not None:
        columns.append((payload.scales.size(1), payload.scales.dtype))
    if routing is not None:
        columns.append((_record_words(routing), torch.int32))
    return columns


def outgoing_sections(payload: Payload, routing: Routing | None) -> list[torch.Tensor]:
    """The bytes to send, [T, W] uint8 for each section."""
    sections = [as_bytes(payload.x)]
    if payload.scales is not None:
        sections.append(as_bytes(payload.scales.contiguous()))
    if routing is not None:
        sections.append(as_bytes(_pack_records(routing, payload.x.size(0))))
    return sections


# A record is ids, weights and the source index, in words of 4 bytes; an even number of them, so that rows of records
# are
# aligned for ids of 8 bytes and can be read in place.


def _record_words(routing: Routing) -> int:
    words = routing.num_topk * (routing.idx_words + 1) + 1
    return words + words % 2


def _pack_records(routing: Routing, num_tokens: int) -> torch.Tensor:
    records = routing.is_token_in_rank.new_empty(num_tokens, _record_words(routing), dtype=torch.int32)
    torch.arange(num_tokens, dtype=torch.int32, device=records.device, out=records[:, -1])
    if routing.topk_idx is not None and routing.topk_weights is not None:
        num_topk, id_words = routing.num_topk, routing.num_topk * routing.idx_words
        records.view(routing.topk_idx.dtype)[:, :num_topk] = routing.topk_idx
        records.view(torch.float32)[:, id_words : id_words + num_topk] = routing.topk_weights
    return records


def unpack_records(received: Received, num_rows: int, rank: int, num_local_experts: int) -> None:
    """Take the records apart: source indices into the handle, ids made local, weights of other ranks' experts 0.

    Args:
        received: Holds the records, and what is filled from them.
        num_rows: Rows that came; there may be room for more.
        rank: This rank.
        num_local_experts: Experts of a rank.
    """
    if received.records is None:
        return
    records, received.records = received.records[:num_rows], None
    received.handle.recv_src_idx[:num_rows] = records[:, -1]
    if received.topk_idx is None or received.topk_weights is None:
        return
    num_topk, dtype = received.topk_idx.size(1), received.topk_idx.dtype
    id_words = num_topk * dtype.itemsize // 4
    ids = records.view(dtype)[:, :num_topk] - rank * num_local_experts
    weights = records.view(torch.float32)[:, id_words : id_words + num_topk]
    is_foreign = (ids < 0) | (ids >= num_local_experts)
    received.topk_idx[:num_rows] = ids.masked_fill_(is_foreign, -1)
    received.topk_idx[num_rows:] = -1
    received.topk_weights[:num_rows] = weights.masked_fill(is_foreign, 0.0)
