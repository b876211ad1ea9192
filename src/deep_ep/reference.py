"""The oracle: what `dispatch` and `combine` must return, for all ranks at once.

`dispatch` and `combine` take the inputs of all ranks as lists (item r belongs to rank r) and return the
outputs of all ranks. They are written to be read: plain loops over ranks, tokens and top-k slots, no
communication, nothing shared with the rest of the package. Tests compare everything else with them.

Letters: R ranks, E experts, L = E / R experts per rank, T_r tokens of rank r, K top-k slots, H hidden size,
n_d rows that rank d receives. Expert e lives on rank e // L. Rank d's rows are ordered by source rank, then
by token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch

Bias: TypeAlias = torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None


class Layout(NamedTuple):
    """How the tokens of one rank spread.

    Attributes:
        num_tokens_per_rank: `[R]` int32, tokens with at least one expert on that rank.
        num_tokens_per_node: `[nodes]` int32, tokens with at least one expert on that node.
        num_tokens_per_expert: `[E]` int32, selections of that expert.
        is_token_in_rank: `[T, R]` bool.
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_node: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


@dataclass
class Dispatched:
    """What rank d has received.

    Attributes:
        recv_x: `[n_d, H]`, the dtype of the sent rows.
        recv_scales: `[n_d, S]`, the dtype of the sent scales, row-major; None if none were sent.
        recv_topk_idx: `[n_d, K]`, the dtype of the sent ids: local expert, or -1 where it is not this rank's.
        recv_topk_weights: `[n_d, K]` float32: the weight, or 0 where the expert is not this rank's.
        num_recv_tokens_per_expert_list: L counts rounded up to the alignment; None if no counts were given.
        src_rank: n_d source ranks.
        src_token: n_d token indices on their source ranks.
    """

    recv_x: torch.Tensor
    recv_scales: torch.Tensor | None
    recv_topk_idx: torch.Tensor | None
    recv_topk_weights: torch.Tensor | None
    num_recv_tokens_per_expert_list: list[int] | None
    src_rank: list[int]
    src_token: list[int]


class Combined(NamedTuple):
    """What rank r gets back for its own tokens.

    Attributes:
        combined_x: `[T_r, H]`, the dtype of the experts' rows.
        combined_topk_weights: `[T_r, K]` float32; None if no weights were given.
    """

    combined_x: torch.Tensor
    combined_topk_weights: torch.Tensor | None


def layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int, ranks_per_node: int | None = None) -> Layout:
    """Count where the tokens of one rank go.

    Example: 4 experts on 2 ranks, `topk_idx = [[0, 1], [1, 3], [-1, 2]]` gives 2 tokens per rank (the first
    token goes to rank 0 once) and `[1, 2, 1, 1]` selections per expert.

    Args:
        topk_idx: `[T, K]` int32 or int64; ids that are negative or not below `num_experts` select nothing.
        num_experts: E, a multiple of `num_ranks`.
        num_ranks: R.
        ranks_per_node: consecutive ranks that make a node; None for a single node.
    """
    num_local_experts = _num_local_experts(num_experts, num_ranks)
    ranks_per_node = ranks_per_node or num_ranks
    num_nodes = -(-num_ranks // ranks_per_node)
    per_rank, per_node, per_expert = [0] * num_ranks, [0] * num_nodes, [0] * num_experts
    mask = torch.zeros((topk_idx.shape[0], num_ranks), dtype=torch.bool, device=topk_idx.device)
    for token, experts in enumerate(topk_idx.tolist()):
        chosen = [expert for expert in experts if 0 <= expert < num_experts]
        for expert in chosen:
            per_expert[expert] += 1
        ranks = {expert // num_local_experts for expert in chosen}
        for rank in ranks:
            per_rank[rank] += 1
            mask[token, rank] = True
        for node in {rank // ranks_per_node for rank in ranks}:
            per_node[node] += 1
    per_rank_tensor, per_node_tensor, per_expert_tensor = (
        torch.tensor(counts, dtype=torch.int32, device=topk_idx.device) for counts in (per_rank, per_node, per_expert)
    )
    return Layout(per_rank_tensor, per_node_tensor, per_expert_tensor, mask)


def dispatch(
    xs: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    scales: Sequence[torch.Tensor] | None = None,
    topk_idx: Sequence[torch.Tensor] | None = None,
    topk_weights: Sequence[torch.Tensor] | None = None,
    num_experts: int | None = None,
    expert_alignment: int = 1,
    num_tokens_per_expert: Sequence[torch.Tensor] | None = None,
) -> list[Dispatched]:
    """Send every token to the ranks of its mask. Each argument holds one tensor per rank.

    Args:
        xs: `[T_r, H]`, any dtype; rows are copied bit for bit.
        masks: `[T_r, R]` bool: whether the token goes to that rank. Nothing else decides where tokens go.
        scales: `[T_r, S]`, any dtype and strides.
        topk_idx: `[T_r, K]` int32 or int64, global expert ids.
        topk_weights: `[T_r, K]` float32; needs `topk_idx`.
        num_experts: E; needed with `topk_idx` and with `num_tokens_per_expert`.
        expert_alignment: the counts per expert are rounded up to a multiple of it.
        num_tokens_per_expert: `[E]` int32, the selections that each rank reports.

    Returns:
        One `Dispatched` per rank. Inputs are neither changed nor aliased.
    """
    num_ranks = len(xs)
    sources = [_sources(masks, rank) for rank in range(num_ranks)]
    return [
        Dispatched(
            recv_x=_gather(xs, sources[rank]),
            recv_scales=None if scales is None else _gather(scales, sources[rank]),
            recv_topk_idx=_local_idx(topk_idx, sources[rank], rank, num_experts, num_ranks),
            recv_topk_weights=_local_weights(topk_idx, topk_weights, sources[rank], rank, num_experts, num_ranks),
            num_recv_tokens_per_expert_list=_local_counts(
                num_tokens_per_expert, rank, num_experts, num_ranks, expert_alignment
            ),
            src_rank=[source for source, _ in sources[rank]],
            src_token=[token for _, token in sources[rank]],
        )
        for rank in range(num_ranks)
    ]


def combine(
    ys: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    biases: Sequence[Bias] | None = None,
    topk_weights: Sequence[torch.Tensor] | None = None,
    ranks_per_node: int | None = None,
) -> list[Combined]:
    """Return to every token the sum of its rows, to the bit. Each argument holds one item per rank.

    Sums are taken in float32 (float64 for float64) from bias 0 + bias 1 on, ranks ascending, and rounded
    once to the dtype of `ys`. With several nodes the rows of each node are summed and rounded first, then
    added to the biases, nodes ascending.

    Example: three ranks return 1, 2**-8 and 2**-8 in BF16 for a token. On one node the result is 1 + 2**-7,
    which BF16 holds. With two ranks per node the first node's 1 + 2**-8 is halfway between two BF16 numbers
    and becomes 1, and so does the sum with the second node's 2**-8.

    Args:
        ys: `[n_d, H]` BF16, FP16, FP32 or FP64: the rows of rank d in the order it received them. Rows beyond
            (of a worst-case buffer) are ignored.
        masks: `[T_r, R]` bool, those of the dispatch.
        biases: None, `[T_r, H]`, or a pair of which either may be None, in the dtype of `ys`.
        topk_weights: `[n_d, K]` float32, summed in the same order, in float32 throughout.
        ranks_per_node: consecutive ranks that make a node; None for a single node.

    Returns:
        One `Combined` per rank.
    """
    num_ranks = len(ys)
    ranks_per_node = ranks_per_node or num_ranks
    rows = [_row_of_source(masks, rank) for rank in range(num_ranks)]
    combined = []
    for source in range(num_ranks):
        num_tokens = masks[source].shape[0]
        where = [[rows[rank].get((source, token)) for rank in range(num_ranks)] for token in range(num_tokens)]
        bias = _bias_sum(None if biases is None else biases[source], num_tokens, ys[source])
        combined_x = _reduce(ys, where, bias, ranks_per_node, ys[source].dtype)
        combined_weights = None
        if topk_weights is not None:
            zeros = _bias_sum(None, num_tokens, topk_weights[source])
            combined_weights = _reduce(topk_weights, where, zeros, ranks_per_node, torch.float32)
        combined.append(Combined(combined_x, combined_weights))
    return combined


def _sources(masks: Sequence[torch.Tensor], rank: int) -> list[tuple[int, int]]:
    """The (source rank, token) of each row that `rank` receives, in order."""
    return [
        (source, token)
        for source, mask in enumerate(masks)
        for token, is_sent in enumerate(mask[:, rank].tolist())
        if is_sent
    ]


def _row_of_source(masks: Sequence[torch.Tensor], rank: int) -> dict[tuple[int, int], int]:
    return {source: row for row, source in enumerate(_sources(masks, rank))}


def _gather(tensors: Sequence[torch.Tensor], sources: list[tuple[int, int]]) -> torch.Tensor:
    """Copy the rows `tensors[source][token]` into a new tensor, whatever their dtype."""
    gathered = torch.empty((len(sources), *tensors[0].shape[1:]), dtype=tensors[0].dtype, device=tensors[0].device)
    for row, (source, token) in enumerate(sources):
        gathered[row].copy_(tensors[source][token])
    return gathered


def _local_idx(
    topk_idx: Sequence[torch.Tensor] | None,
    sources: list[tuple[int, int]],
    rank: int,
    num_experts: int | None,
    num_ranks: int,
) -> torch.Tensor | None:
    """The received ids, counted from the first expert of `rank`; -1 for those of other ranks."""
    if topk_idx is None:
        return None
    num_local_experts = _num_local_experts(num_experts, num_ranks)
    local = _gather(topk_idx, sources)
    for ids in local:
        for k, expert in enumerate(ids.tolist()):
            local_expert = expert - rank * num_local_experts
            ids[k] = local_expert if 0 <= local_expert < num_local_experts else -1
    return local


def _local_weights(
    topk_idx: Sequence[torch.Tensor] | None,
    topk_weights: Sequence[torch.Tensor] | None,
    sources: list[tuple[int, int]],
    rank: int,
    num_experts: int | None,
    num_ranks: int,
) -> torch.Tensor | None:
    """The received weights; 0 for slots of other ranks."""
    if topk_weights is None:
        return None
    local_idx = _local_idx(topk_idx, sources, rank, num_experts, num_ranks)
    if local_idx is None:
        raise ValueError("reference.dispatch: topk_weights needs topk_idx, got None")
    weights = _gather(topk_weights, sources)
    for row, ids in enumerate(local_idx.tolist()):
        for k, expert in enumerate(ids):
            if expert < 0:
                weights[row, k] = 0.0
    return weights


def _local_counts(
    num_tokens_per_expert: Sequence[torch.Tensor] | None,
    rank: int,
    num_experts: int | None,
    num_ranks: int,
    expert_alignment: int,
) -> list[int] | None:
    """What all ranks together report for each expert of `rank`, rounded up to the alignment."""
    if num_tokens_per_expert is None:
        return None
    num_local_experts = _num_local_experts(num_experts, num_ranks)
    counts = []
    for expert in range(rank * num_local_experts, (rank + 1) * num_local_experts):
        count = sum(int(per_expert[expert]) for per_expert in num_tokens_per_expert)
        counts.append(-(-count // expert_alignment) * expert_alignment)
    return counts


def _reduce(
    tensors: Sequence[torch.Tensor],
    where: list[list[int | None]],
    initial: torch.Tensor,
    ranks_per_node: int,
    node_dtype: torch.dtype,
) -> torch.Tensor:
    """Add up each token's rows.

    Args:
        tensors: `[n_d, W]` for each rank d.
        where: for each token and rank the row to add, or None.
        initial: `[T, W]`, the start of each sum, in the dtype to accumulate in.
        ranks_per_node: ranks summed and rounded to `node_dtype` before they are added to the others.
        node_dtype: also the dtype of the result.
    """
    total = initial.clone()
    num_ranks = len(tensors)
    one_node = ranks_per_node >= num_ranks
    for token, row_of_rank in enumerate(where):
        for first in range(0, num_ranks, ranks_per_node):
            node = range(first, min(first + ranks_per_node, num_ranks))
            parts = [tensors[rank][row] for rank in node if (row := row_of_rank[rank]) is not None]
            if one_node:
                for part in parts:
                    total[token] += part.to(total.dtype)
            elif parts:
                node_sum = torch.zeros_like(total[token])
                for part in parts:
                    node_sum += part.to(total.dtype)
                total[token] += node_sum.to(node_dtype).to(total.dtype)
    return total.to(node_dtype)


def _bias_sum(bias: Bias, num_tokens: int, y: torch.Tensor) -> torch.Tensor:
    """Bias 0 + bias 1, `[T, H]` in the dtype to accumulate in; zeros for what is missing."""
    dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    zeros = torch.zeros((num_tokens, *y.shape[1:]), dtype=dtype, device=y.device)
    bias_0, bias_1 = bias if isinstance(bias, tuple) else (bias, None)
    return (zeros if bias_0 is None else bias_0.to(dtype)) + (zeros if bias_1 is None else bias_1.to(dtype))


def _num_local_experts(num_experts: int | None, num_ranks: int) -> int:
    if num_experts is None or num_experts % num_ranks != 0:
        raise ValueError(f"reference: num_experts must be a multiple of {num_ranks} ranks, got {num_experts}")
    return num_experts // num_ranks
