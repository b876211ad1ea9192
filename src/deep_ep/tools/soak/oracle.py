"""What a rank must get, computed densely from the inputs of all ranks.

This is not `deep_ep.reference`, and shares nothing with it or with the library: no slots, no prefix sums, no tables of
addresses. A token is chosen by a boolean mask over all tokens of a rank, and a sum goes over all ranks, with those left
out that the token was not sent to. Rows are compared as bytes, so that every dtype is alike.

Shape letters: R ranks, T tokens of a rank, K selections of a token, E experts, L = E / R experts of a rank, H channels,
B bytes of a row, n rows that this rank receives.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import NamedTuple

import torch

_FP8_MAX, _LEAST_MAGNITUDE, _GROUP = 448.0, 1e-4, 128


# Layout --------------------------------------------------------------------------------------------------------------


class TokenLayout(NamedTuple):
    """Where the tokens of one rank go.

    Attributes:
        per_rank: [R] int32.
        per_node: [nodes] int32.
        per_expert: [E] int32.
        mask: [T, R] bool.
    """

    per_rank: torch.Tensor
    per_node: torch.Tensor
    per_expert: torch.Tensor
    mask: torch.Tensor


def layout(ids: torch.Tensor, num_experts: int, num_ranks: int, num_nodes: int) -> TokenLayout:
    """Count the selections of each expert by each token, [T, E], and add up."""
    ids = ids.long()
    # Ids that select nothing are counted in a column of their own, which is dropped.
    columns = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts)
    selections = torch.zeros(ids.size(0), num_experts + 1, dtype=torch.int32)
    selections.scatter_add_(1, columns, torch.ones_like(columns, dtype=torch.int32))
    selections = selections[:, :num_experts]
    mask = selections.view(-1, num_ranks, num_experts // num_ranks).amax(2) > 0
    node_mask = mask.view(-1, num_nodes, num_ranks // num_nodes).any(2)
    return TokenLayout(
        mask.sum(0, dtype=torch.int32),
        node_mask.sum(0, dtype=torch.int32),
        selections.sum(0, dtype=torch.int32),
        mask,
    )


# Normal mode ---------------------------------------------------------------------------------------------------------


def received(parts: Sequence[torch.Tensor], masks: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """What a rank receives of [T, ...] tensors of all ranks: by source rank, then by token."""
    return torch.cat([part[mask[:, rank]] for part, mask in zip(parts, masks, strict=True)])


def num_received(masks: Sequence[torch.Tensor], rank: int) -> int:
    """n: how many rows a rank receives."""
    return sum(int(mask[:, rank].sum()) for mask in masks)


def local_selections(
    ids: torch.Tensor, weights: torch.Tensor, rank: int, num_local: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Received [n, K] ids and weights as their rank sees them: its own experts from 0 on, -1 and 0.0 elsewhere."""
    first = rank * num_local
    # Compared, not subtracted: a difference of ids at the ends of their range would wrap around.
    is_local = (ids >= first) & (ids < first + num_local)
    local = torch.where(is_local, ids, first) - first
    return torch.where(is_local, local, -1), torch.where(is_local, weights, 0.0)


def source_tokens(masks: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """[n] int32: the token of each received row, at its source."""
    return received([torch.arange(mask.size(0), dtype=torch.int32) for mask in masks], masks, rank)


def rows_of_tokens(masks: Sequence[torch.Tensor], source: int, rank: int) -> torch.Tensor:
    """[T] int64: the row that each token of `source` has at `rank`; anything where it has none."""
    before = num_received(masks[:source], rank)
    return (before + masks[source][:, rank].cumsum(0) - 1).clamp(min=0)


def combined(
    rows: Sequence[torch.Tensor],
    mask: torch.Tensor,
    biases: Sequence[torch.Tensor],
    num_nodes: int,
    rounds: bool = True,
) -> torch.Tensor:
    """The sum of each token's rows.

    Args:
        rows: By rank: [T, H], the row that the rank gives back for each token; anything where it gives none.
        mask: [T, R] bool, whether it gives one.
        biases: [T, H] each, added first.
        num_nodes: The rows of each node are summed, and rounded, first, if there are several.
        rounds: Round the sums of nodes. Weights are not rounded.
    """
    dtype, shape = rows[0].dtype, rows[0].shape
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def add(total: torch.Tensor, row: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        return torch.where(where.unsqueeze(1), total + row.to(wide), total)

    total = torch.zeros(shape, dtype=wide)
    for index, bias in enumerate(biases):
        total = total + bias.to(wide) if index else bias.to(wide)
    ranks_per_node = len(rows) // num_nodes
    for node in range(num_nodes):
        ranks = range(node * ranks_per_node, (node + 1) * ranks_per_node)
        if num_nodes == 1:
            for rank in ranks:
                total = add(total, rows[rank], mask[:, rank])
            continue
        part = torch.full(shape, -0.0, dtype=wide)
        for rank in ranks:
            part = add(part, rows[rank], mask[:, rank])
        total = add(total, part.to(dtype) if rounds else part, mask[:, ranks.start : ranks.stop].any(1))
    return total.to(dtype)


# DeepEP V2 -----------------------------------------------------------------------------------------------------------


class Expanded(NamedTuple):
    """Which selection each row of an expanded result belongs to; -1 everywhere in padding.

    Attributes:
        sources: [X] int64, source ranks.
        tokens: [X] int64, tokens there.
        columns: [X] int64, columns of the tokens.
        counts: Selections of each local expert.
    """

    sources: torch.Tensor
    tokens: torch.Tensor
    columns: torch.Tensor
    counts: list[int]


def expanded(ids: Sequence[torch.Tensor], rank: int, num_local: int, alignment: int) -> Expanded:
    """The rows of a rank: by expert, source rank, token, column; then padding up to the alignment."""
    parts, counts = [], []
    for expert in range(rank * num_local, (rank + 1) * num_local):
        found = [
            torch.cat([torch.full((pairs.size(0), 1), source), pairs], 1)
            for source, pairs in ((source, (one == expert).nonzero()) for source, one in enumerate(ids))
        ]
        rows = torch.cat(found)
        counts.append(rows.size(0))
        parts += [rows, torch.full((-rows.size(0) % alignment, 3), -1)]
    every = torch.cat(parts)
    return Expanded(every[:, 0], every[:, 1], every[:, 2], counts)


def owners(ids: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """[T, K] int64: the rank of each selection; -1: it selects nothing."""
    is_valid = (ids >= 0) & (ids < num_experts)
    return torch.where(is_valid, torch.where(is_valid, ids, 0).long() // (num_experts // num_ranks), -1)


def sums_of_columns(
    columns: Sequence[torch.Tensor], is_given: Sequence[torch.Tensor], biases: Sequence[torch.Tensor]
) -> torch.Tensor:
    """[T, H]: biases, and then what each column gives, ascending, rounded once.

    Args:
        columns: For each column [T, H].
        is_given: For each column [T] bool.
        biases: [T, H] each.
    """
    dtype = columns[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    total = torch.zeros(columns[0].shape, dtype=wide)
    for index, bias in enumerate(biases):
        total = total + bias.to(wide) if index else bias.to(wide)
    for values, given in zip(columns, is_given, strict=True):
        total = torch.where(given.unsqueeze(1), total + values.to(wide), total)
    return total.to(dtype)


def summed_by_rank(columns: Sequence[torch.Tensor], owner: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """Columns with what the columns of one rank give summed, and rounded, into the highest of them.

    Args:
        columns: For each column [T, H].
        owner: [T, K], ranks; -1: the column gives nothing.

    Returns:
        For each column [T, H]; and [T, K] bool, whether it is the highest of its rank.
    """
    dtype = columns[0].dtype
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    later = owner.unsqueeze(1) == owner.unsqueeze(2)  # [T, k, j]: columns k and j are of one rank
    is_highest = (owner >= 0) & ~torch.triu(later, 1).any(2)
    sums = []
    for k in range(len(columns)):
        total = torch.full(columns[0].shape, -0.0, dtype=wide)
        for j in range(k + 1):
            total = torch.where(later[:, k, j].unsqueeze(1), total + columns[j].to(wide), total)
        sums.append(total.to(dtype))
    return sums, is_highest


# Low latency ---------------------------------------------------------------------------------------------------------


class PackedExpert(NamedTuple):
    """What one expert of a rank receives.

    Attributes:
        sources: [m] int64, the source rank of each row.
        tokens: [m] int64, the token of each row at its source.
        counts: By source: rows that came from it.
    """

    sources: torch.Tensor
    tokens: torch.Tensor
    counts: list[int]


def packed(ids: Sequence[torch.Tensor], expert: int, masked: Collection[int]) -> PackedExpert:
    """The tokens that name an expert, by source rank, then by token. Each names it once, however often it does so."""
    tokens = [
        (one == expert).any(1).nonzero()[:, 0] if source not in masked else torch.empty(0, dtype=torch.int64)
        for source, one in enumerate(ids)
    ]
    counts = [one.numel() for one in tokens]
    return PackedExpert(
        torch.repeat_interleave(torch.arange(len(ids)), torch.tensor(counts)), torch.cat(tokens), counts
    )


def fp8(x: torch.Tensor, round_scale: bool, use_ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """[T, H] BF16 as FP8 and scales, in FP32: 448 over the largest magnitude of each 128 channels."""
    num_tokens, hidden = x.shape
    num_groups = -(-hidden // _GROUP)
    padded = torch.zeros(num_tokens, num_groups * _GROUP)
    padded[:, :hidden] = x
    groups = padded.view(num_tokens, num_groups, _GROUP)
    largest = groups.abs().amax(2).clamp(min=_LEAST_MAGNITUDE)
    stored = largest * (1.0 / _FP8_MAX)
    scale = torch.full_like(largest, _FP8_MAX) / largest
    if round_scale:
        mantissa, exponent = torch.frexp(stored)
        # frexp's mantissa is in [0.5, 1): 0.5 itself is a power of two already.
        exponent = torch.where(mantissa == 0.5, exponent - 1, exponent)
        stored, scale = torch.ldexp(torch.ones_like(stored), exponent), torch.ldexp(torch.ones_like(stored), -exponent)
    values = (groups * scale.unsqueeze(2)).clamp(-_FP8_MAX, _FP8_MAX).flatten(1)[:, :hidden]
    if use_ue8m0:
        stored = _packed_exponents(stored)
    return values.contiguous().to(torch.float8_e4m3fn), stored


def _packed_exponents(scales: torch.Tensor) -> torch.Tensor:
    """The exponents of powers of two as bytes, biased by 127, four to an int32, the first in the lowest byte."""
    _, exponent = torch.frexp(scales)
    num_bytes = -(-scales.size(1) // 4) * 4
    out = torch.zeros(scales.size(0), num_bytes, dtype=torch.uint8)
    out[:, : scales.size(1)] = (exponent + 126).to(torch.uint8)
    return out.view(torch.int32)


def weighted_sum(
    experts: torch.Tensor,
    tokens: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    num_local: int,
    masked: Collection[int],
) -> torch.Tensor:
    """[T, H] BF16: what a rank's tokens get back from experts that give `experts[e] + tokens[t]` for token t.

    Args:
        experts: [E, H] float32.
        tokens: [T, H] float32.
        ids: [T, K].
        weights: [T, K] float32.
        num_local: L.
        masked: Ranks whose experts give nothing.
    """
    total = torch.zeros(tokens.shape)
    ids = ids.long()
    for k in range(ids.size(1)):
        chosen = (ids[:, k] >= 0) & (ids[:, k] < experts.size(0))
        expert = torch.where(chosen, ids[:, k], 0)
        for rank in masked:
            chosen &= expert.div(num_local, rounding_mode="floor") != rank
        row = weights[:, k : k + 1] * (experts[expert] + tokens)
        total = torch.where(chosen.unsqueeze(1), total + row, total)
    return total.bfloat16()
