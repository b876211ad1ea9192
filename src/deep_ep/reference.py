"""The oracle: what `dispatch` and `combine` must return, for all ranks at once.

`dispatch` and `combine`, and their low-latency forms, take the inputs of all ranks as lists (item r belongs
to rank r) and return the outputs of all ranks. They are written to be read: plain loops over ranks, tokens
and top-k slots, no communication, nothing shared with the rest of the package. Tests compare everything else with them.

Letters: R ranks, E experts, L = E / R experts per rank, T_r tokens of rank r, K top-k slots, H hidden size,
n_d rows that rank d receives. Expert e lives on rank e // L. Rank d's rows are ordered by source rank, then
by token.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
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


class LowLatencyDispatched(NamedTuple):
    """What the experts of rank d have received in low-latency mode. Rows beyond an expert's count are zeros here.

    Attributes:
        recv_x: `[L, R * M, H]`, by expert, then source rank, then token.
        recv_scales: `[L, R * M, S]`; None if none were sent.
        recv_count: `[L]` int32, rows of each expert.
        src_info: `[L, R * M]` int32, the token of each row at its source.
        layout_range: `[L, R]` int64, rows from each rank in the low and the first of them in the high 32 bits.
    """

    recv_x: torch.Tensor
    recv_scales: torch.Tensor | None
    recv_count: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor


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
    added to the biases, nodes ascending. A sum without biases begins with 0.0, that of a node with -0.0, which
    changes no number.

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


def low_latency_dispatch(
    xs: Sequence[torch.Tensor],
    topk_idx: Sequence[torch.Tensor],
    max_tokens: int,
    num_experts: int,
    scales: Sequence[torch.Tensor] | None = None,
    masked: Sequence[Collection[int]] | None = None,
) -> list[LowLatencyDispatched]:
    """Send every token to each of its experts once. Each argument holds one item per rank.

    Example: 2 ranks with an expert each, M = 2. Ids `[[0, 0], [1, -1]]` and `[[0, 1]]`: expert 0 gets token 0 of rank 0
    in row 0 and token 0 of rank 1 in row 1, expert 1 gets token 1 of rank 0 and token 0 of rank 1.

    Args:
        xs: `[T_r, H]`, any dtype; rows are copied bit for bit.
        topk_idx: `[T_r, K]`, global expert ids; others select nothing.
        max_tokens: M, the most tokens of a rank.
        num_experts: E.
        scales: `[T_r, S]`, copied likewise.
        masked: for each rank the ranks that it takes nothing from.

    Returns:
        One `LowLatencyDispatched` per rank.
    """
    num_ranks = len(xs)
    return [
        _received(rank, xs, topk_idx, max_tokens, num_experts, scales, masked[rank] if masked else ())
        for rank in range(num_ranks)
    ]


def low_latency_combine(
    ys: Sequence[torch.Tensor],
    topk_idx: Sequence[torch.Tensor],
    topk_weights: Sequence[torch.Tensor],
    dispatched: Sequence[LowLatencyDispatched],
    masked: Sequence[Collection[int]] | None = None,
) -> list[torch.Tensor]:
    """Return to every token the weighted sum of its experts' rows, in float32, k ascending, rounded once.

    Args:
        ys: `[L, R * M, H]` BF16: the results of rank d's experts, where they received the tokens.
        topk_idx: `[T_r, K]`, those of the dispatch.
        topk_weights: `[T_r, K]` float32.
        dispatched: what `low_latency_dispatch` returned.
        masked: for each rank the ranks whose experts it skips.

    Returns:
        `[T_r, H]` in the dtype of `ys`, per rank.
    """
    num_local = ys[0].shape[0]
    combined = []
    for source, (ids, weights) in enumerate(zip(topk_idx, topk_weights, strict=True)):
        total = torch.zeros((ids.shape[0], ys[0].shape[-1]), dtype=torch.float32, device=ys[0].device)
        for token, experts in enumerate(ids.tolist()):
            for k, expert in enumerate(experts):
                owner, local = expert // num_local, expert % num_local
                if not 0 <= owner < len(ys) or (masked and owner in masked[source]):
                    continue
                row = _row_of_token(dispatched[owner], local, source, token)
                if row is not None:  # else the owner had masked this rank, and has nothing for it
                    total[token] += weights[token, k] * ys[owner][local, row].to(torch.float32)
        combined.append(total.to(ys[0].dtype))
    return combined


def _received(
    rank: int,
    xs: Sequence[torch.Tensor],
    topk_idx: Sequence[torch.Tensor],
    max_tokens: int,
    num_experts: int,
    scales: Sequence[torch.Tensor] | None,
    masked: Collection[int],
) -> LowLatencyDispatched:
    """What `rank` receives in a low-latency dispatch."""
    num_ranks, device = len(xs), xs[0].device
    num_local, num_rows = _num_local_experts(num_experts, num_ranks), num_ranks * max_tokens
    recv_x = torch.zeros((num_local, num_rows, xs[0].shape[1]), dtype=torch.float32, device=device).to(xs[0].dtype)
    recv_scales = None
    if scales is not None:
        shape = (num_local, num_rows, scales[0].shape[1])
        recv_scales = torch.zeros(shape, dtype=scales[0].dtype, device=device)
    count = torch.zeros(num_local, dtype=torch.int32, device=device)
    src_info = torch.zeros((num_local, num_rows), dtype=torch.int32, device=device)
    layout_range = torch.zeros((num_local, num_ranks), dtype=torch.int64, device=device)
    chosen = [[set(ids) for ids in tokens.tolist()] for tokens in topk_idx]
    for local in range(num_local):
        row = 0
        for source in range(num_ranks):
            first = row
            for token, experts in enumerate(chosen[source]):
                if rank * num_local + local in experts and source not in masked:
                    recv_x[local, row].copy_(xs[source][token])
                    if recv_scales is not None and scales is not None:
                        recv_scales[local, row].copy_(scales[source][token])
                    src_info[local, row] = token
                    row += 1
            layout_range[local, source] = (row - first) | first << 32
        count[local] = row
    return LowLatencyDispatched(recv_x, recv_scales, count, src_info, layout_range)


def _row_of_token(dispatched: LowLatencyDispatched, local: int, source: int, token: int) -> int | None:
    """Which row of a local expert is a source's token, if any."""
    span = int(dispatched.layout_range[local, source])
    count, first = span & 0xFFFFFFFF, span >> 32
    tokens = dispatched.src_info[local, first : first + count].tolist()
    return first + tokens.index(token) if token in tokens else None


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
                node_sum = torch.full_like(total[token], -0.0)
                for part in parts:
                    node_sum += part.to(total.dtype)
                total[token] += node_sum.to(node_dtype).to(total.dtype)
    return total.to(node_dtype)


def _bias_sum(bias: Bias, num_tokens: int, y: torch.Tensor) -> torch.Tensor:
    """Bias 0 + bias 1, `[T, H]` in the dtype to accumulate in; zeros where there is neither."""
    dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    biases = [one.to(dtype) for one in (bias if isinstance(bias, tuple) else (bias,)) if one is not None]
    if not biases:
        return torch.zeros((num_tokens, *y.shape[1:]), dtype=dtype, device=y.device)
    return biases[0] + biases[1] if len(biases) == 2 else biases[0].clone()


def _num_local_experts(num_experts: int | None, num_ranks: int) -> int:
    if num_experts is None or num_experts % num_ranks != 0:
        raise ValueError(f"reference: num_experts must be a multiple of {num_ranks} ranks, got {num_experts}")
    return num_experts // num_ranks


# DeepEP V2 -----------------------------------------------------------------------------------------------------------


class ElasticDispatched(NamedTuple):
    """What one rank has after a V2 dispatch. L experts, K top-k, R ranks.

    Attributes:
        rows: (source rank, token) of each row; None: padding.
        columns: The column that each row belongs to, if it is expanded; None: padding.
        topk_idx: [n, K] local ids of the compact rows, -1 elsewhere.
        sources: [n, 2 + K], as `recv_src_metadata`.
        counts: Selections of each local expert.
        ends: As `psum_num_recv_tokens_per_expert`.
        rank_ends: Compact rows from ranks 0..s.
    """

    rows: list[tuple[int, int] | None]
    columns: list[int | None]
    topk_idx: torch.Tensor
    sources: torch.Tensor
    counts: list[int]
    ends: list[int]
    rank_ends: list[int]


def elastic_dispatch(
    topk_idx: Sequence[torch.Tensor],
    rank: int,
    num_experts: int,
    max_tokens: int,
    alignment: int = 1,
    is_expanded: bool = False,
) -> ElasticDispatched:
    """Where the rows of a V2 dispatch lie at one rank.

    Args:
        topk_idx: [T, K] of every rank.
        rank: The rank.
        num_experts: E.
        max_tokens: M.
        alignment: To which the rows of each expert are rounded up.
        is_expanded: One row for each (token, local expert).
    """
    num_local, num_topk = num_experts // len(topk_idx), topk_idx[0].size(1)
    first = rank * num_local
    compact: list[tuple[int, int]] = []
    ids: list[list[int]] = []
    rank_ends: list[int] = []
    for source, idx in enumerate(topk_idx):
        for token, selected in enumerate(idx.tolist()):
            local = [expert - first if first <= expert < first + num_local else -1 for expert in selected]
            if any(expert >= 0 for expert in local):
                compact.append((source, token))
                ids.append(local)
        rank_ends.append(len(compact))
    counts = [sum(row.count(expert) for row in ids) for expert in range(num_local)]
    aligned = [-(-count // alignment) * alignment for count in counts]
    starts = [sum(aligned[:expert]) for expert in range(num_local)]
    found: list[list[int]] = [[-1] * num_topk for _ in ids]
    rows: list[tuple[int, int] | None] = [None] * sum(aligned)
    columns: list[int | None] = [None] * sum(aligned)
    taken = list(starts)
    for row, local in enumerate(ids):
        for column, expert in enumerate(local):
            if expert >= 0:
                found[row][column] = taken[expert]
                rows[taken[expert]], columns[taken[expert]] = compact[row], column
                taken[expert] += 1
    sources = [
        [source * max_tokens + token, source * num_topk + max(k for k in range(num_topk) if local[k] >= 0), *where]
        for (source, token), local, where in zip(compact, ids, found, strict=True)
    ]
    return ElasticDispatched(
        rows if is_expanded else list(compact),
        columns if is_expanded else [None] * len(compact),
        torch.tensor(ids, dtype=topk_idx[0].dtype, device="cpu").view(-1, num_topk),
        torch.tensor(sources, dtype=torch.int32, device="cpu").view(-1, 2 + num_topk),
        counts,
        [start + count for start, count in zip(starts, counts, strict=True)]
        if is_expanded
        else [start + size for start, size in zip(starts, aligned, strict=True)],
        rank_ends,
    )


def elastic_combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_experts: int,
    num_ranks: int,
    biases: Sequence[torch.Tensor] = (),
    is_summed_by_rank: bool = True,
) -> torch.Tensor:
    """The sums of a V2 combine inside one node, bit for bit.

    Args:
        y: [T, K, H], the contribution of each column.
        topk_idx: [T, K]; an id outside [0, E) contributes nothing.
        num_experts: E.
        num_ranks: R.
        biases: [T, H] each, added first.
        is_summed_by_rank: Each rank sums, and rounds, its columns; the sum stands at its highest one.
    """
    wide = torch.float64 if y.dtype == torch.float64 else torch.float32
    num_local, out = num_experts // num_ranks, torch.empty(y.size(0), y.size(2), dtype=y.dtype, device=y.device)
    for token, selected in enumerate(topk_idx.tolist()):
        owners = [expert // num_local if 0 <= expert < num_experts else -1 for expert in selected]
        terms: list[torch.Tensor] = []
        for column, owner in enumerate(owners):
            if owner < 0 or (is_summed_by_rank and owner in owners[column + 1 :]):
                continue
            members = [k for k, other in enumerate(owners) if other == owner] if is_summed_by_rank else [column]
            total = y[token, members[0]].to(wide)
            for k in members[1:]:
                total = total + y[token, k].to(wide)
            terms.append(total.to(y.dtype))
        total = torch.zeros(y.size(2), dtype=wide, device=y.device)
        for index, bias in enumerate(biases):
            total = bias[token].to(wide) if index == 0 else total + bias[token].to(wide)
        for term in terms:
            total = total + term.to(wide)
        out[token] = total.to(y.dtype)
    return out
