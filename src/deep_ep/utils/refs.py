"""What DeepEP's V2 test compares against: plain torch and `torch.distributed`, slow and easy to read.

Shape letters: T tokens of this rank, n received rows, K top-k width, H hidden, E experts, R ranks, M most
tokens a rank. All of them use the default process group.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.distributed as dist

from .envs import get_global_seed

Rows = torch.Tensor | tuple[torch.Tensor, ...]
Bias = torch.Tensor | Sequence[torch.Tensor | None] | None

# A Mersenne prime: multiplying by it scatters neighbouring tokens over the whole range of values.
_SCATTER = 131071


def dispatch(
    x: Rows,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    num_max_tokens_per_rank: int,
    num_experts: int,
) -> tuple[Rows, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Send every token once to each rank that owns one of its experts. All ranks call it together.

    Args:
        x: `[T, H]`, any dtype, or a tuple of tensors with T rows each (FP8 values and their scales).
        topk_idx: `[T, K]`, int32 or int64; negative: no expert.
        topk_weights: `[T, K]`, float32.
        num_max_tokens_per_rank: M, at least T on every rank.
        num_experts: E, a multiple of R.

    Returns:
        `recv_x` like `x` with n rows, ordered by source rank, then by token; `recv_topk_idx` `[n, K]`, dtype
        of `topk_idx`, local ids, -1 for experts of other ranks; `recv_topk_weights` `[n, K]`, as sent,
        nothing masked; `recv_src_token_idx` `[n]`, int32, source rank * M + token; `num_recv_tokens_per_rank`
        `[R]`, int32.
    """
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    num_local_experts = num_experts // num_ranks
    if topk_idx.size(0) > num_max_tokens_per_rank:
        raise ValueError(f"dispatch: at most {num_max_tokens_per_rank} tokens a rank, got {topk_idx.size(0)}")

    owner = torch.where(topk_idx < 0, -1, topk_idx // num_local_experts)
    tokens_of_rank = [(owner == peer).any(dim=1).nonzero().flatten() for peer in range(num_ranks)]
    sent_idx = torch.cat(tokens_of_rank)
    num_sent = torch.tensor([tokens.numel() for tokens in tokens_of_rank], device=topk_idx.device)
    num_received = torch.empty_like(num_sent)
    dist.all_to_all_single(num_received, num_sent)

    def move(rows: torch.Tensor) -> torch.Tensor:
        return _exchange_rows(rows, sent_idx, num_sent.tolist(), num_received.tolist())

    recv_x = move(x) if isinstance(x, torch.Tensor) else tuple(move(part) for part in x)
    local_idx = move(topk_idx) - rank * num_local_experts
    elsewhere = (local_idx < 0) | (local_idx >= num_local_experts)
    src_token_idx = torch.arange(topk_idx.size(0), dtype=torch.int32, device=topk_idx.device)
    return (
        recv_x,
        local_idx.masked_fill(elsewhere, -1),
        move(topk_weights),
        move(src_token_idx + rank * num_max_tokens_per_rank),
        num_received.to(torch.int32),
    )


def generate_pre_combine_data(
    src_token_global_idx: torch.Tensor, num_max_tokens_per_rank: int, num_topk: int, hidden: int
) -> torch.Tensor:
    """What the experts return for a token, as a function of the token alone, so any rank can compute it.

    With `s = idx * K + k` and `S = R * M * K`, element h is `sin(((s * 131071 mod S) + 1) / S * (h + 1) +
    sin(global seed))`.

    Args:
        src_token_global_idx: `[n]`, any integer dtype: source rank * M + token.
        num_max_tokens_per_rank: M.
        num_topk: K.
        hidden: H.

    Returns:
        `[n, K, H]`, bfloat16, on the device of the indices.
    """
    device = src_token_global_idx.device
    num_seeds = dist.get_world_size() * num_max_tokens_per_rank * num_topk
    seeds = src_token_global_idx.long().unsqueeze(1) * num_topk + torch.arange(num_topk, device=device)
    # Float32 spelt out: dividing integers gives the default dtype, which init_dist makes bfloat16.
    rates = ((seeds * _SCATTER) % num_seeds + 1).float() / num_seeds
    steps = torch.arange(1, hidden + 1, dtype=torch.float32, device=device)
    angles = rates.unsqueeze(-1) * steps
    return angles.add_(math.sin(get_global_seed())).sin_().to(torch.bfloat16)


def ordered_accumulate(data: torch.Tensor, initial_value: torch.Tensor | None = None) -> torch.Tensor:
    """Sum over K in ascending order, in float32, rounded once at the end.

    Args:
        data: `[n, K, H]`, any float dtype.
        initial_value: `[n, H]`, any float dtype: what the sum starts from; `None` for zero.

    Returns:
        `[n, H]`, dtype of `data`.
    """
    if initial_value is None:
        total = torch.zeros((data.size(0), data.size(2)), dtype=torch.float32, device=data.device)
    else:
        total = initial_value.to(torch.float32, copy=True)
    for k in range(data.size(1)):
        total += data[:, k].float()
    return total.to(data.dtype)


def combine(
    y: torch.Tensor,
    topk_idx: torch.Tensor,
    num_scaleout_ranks: int,
    num_scaleup_ranks: int,
    num_experts: int,
    bias: Bias,
    reduce_in_local: bool,
    reduce_in_scaleup: bool,
) -> torch.Tensor:
    """The sums of a V2 combine, bit for bit: which terms are added first, and what is rounded in between.

    Args:
        y: `[T, K, H]`, bfloat16: the contribution of each token's k-th expert.
        topk_idx: `[T, K]`, any integer dtype; negative: no contribution.
        num_scaleout_ranks: Nodes.
        num_scaleup_ranks: Ranks of a node; rank r is on node `r // num_scaleup_ranks`.
        num_experts: E, a multiple of the number of ranks.
        bias: `[T, H]`, bfloat16, or up to two of them, or `None`.
        reduce_in_local: Whether a rank sums, and rounds, what its experts contribute to a token.
        reduce_in_scaleup: Whether a node sums, and rounds, what its ranks contribute to a token.

    Returns:
        `[T, H]`, bfloat16.
    """
    num_local_experts = num_experts // (num_scaleout_ranks * num_scaleup_ranks)
    absent = topk_idx < 0
    y = y.masked_fill(absent.unsqueeze(-1), 0)
    rank = (topk_idx // num_local_experts).masked_fill(absent, -1)
    if reduce_in_local:
        y = _grouped_reduce(y, rank)
    if reduce_in_scaleup:
        y = _grouped_reduce(y, (rank // num_scaleup_ranks).masked_fill(absent, -1))
    return ordered_accumulate(y, _sum_of_biases(bias))


def _exchange_rows(
    rows: torch.Tensor, sent_idx: torch.Tensor, num_sent: list[int], num_received: list[int]
) -> torch.Tensor:
    """Send `rows[sent_idx]`, split by `num_sent`, to the ranks; return what comes, in the dtype of `rows`."""
    shape, dtype = rows.shape[1:], rows.dtype
    # As bytes: not every group can carry, and not every device index, FP8.
    data = rows.contiguous().view(rows.size(0), math.prod(shape)).view(torch.uint8)
    received = torch.empty((sum(num_received), data.size(1)), dtype=torch.uint8, device=data.device)
    dist.all_to_all_single(received, data[sent_idx], num_received, num_sent)
    return received.view(dtype).view(-1, *shape)


def _sum_of_biases(bias: Bias) -> torch.Tensor | None:
    """The biases added in float32, in order: `[T, H]`, or `None` where there is none."""
    given = [bias] if isinstance(bias, torch.Tensor) else [one for one in bias or () if one is not None]
    if not given:
        return None
    total = given[0].float()
    for one in given[1:]:
        total = total + one.float()
    return total


def _grouped_reduce(y: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
    """Sum a token's columns of equal key in float32, ascending; the rounded sum stays in the last of them.

    Args:
        y: `[T, K, H]`, bfloat16; zero where the key is negative.
        key: `[T, K]`, any integer dtype; negative: in no group.

    Returns:
        `[T, K, H]`, bfloat16: zero in all columns but the last of each group.

    Example:
        Columns `1, 2, 4` with keys `7, 5, 7` become `0, 2, 5`.
    """
    reduced = torch.zeros_like(y)
    for k in range(y.size(1)):
        is_last = (key[:, k] >= 0) & (key[:, k + 1 :] != key[:, k : k + 1]).all(dim=1)
        members = (key[:, : k + 1] == key[:, k : k + 1]) & is_last.unsqueeze(1)
        reduced[:, k] = ordered_accumulate(y[:, : k + 1].masked_fill(~members.unsqueeze(-1), 0))
    return reduced
