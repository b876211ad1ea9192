"""Gates for tests: scores whose top-K sends rank 0 a chosen multiple of what the other ranks get.

Shape letters: T tokens, E experts, R ranks, K top-k width, L = E / R experts of a rank. A token counts once
for a rank, however many of its K picks lie there. Scores are float32 whatever the default dtype is: in
bfloat16 most would tie.
"""

from __future__ import annotations

import math

import torch

_BISECTION_STEPS = 20
_FACTOR_RANGE = (1.0, 100.0)
# Chosen scores lie in [0.905, 0.995), background in [0, 0.9]: the gap outlasts float32 rounding.
_BACKGROUND_BELOW = 0.9
_CHOSEN_FROM, _CHOSEN_SPAN = 0.905, 0.09


def generate_rank_count(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float) -> torch.Tensor:
    """How many of each token's K picks go to each rank, if rank 0 gets `ratio` times any other rank's tokens.

    The number of ranks that a token reaches is drawn as a uniform gate would, and only then are the ranks
    dealt out: rank 0 to as many tokens as the ratio asks for, the others in a fixed cycle, which keeps them
    equal to within one token.

    Args:
        num_tokens: T.
        num_experts: E, a multiple of R.
        num_ranks: R.
        num_topk: K.
        ratio: Tokens of rank 0 over tokens of any other rank.

    Returns:
        `[T, R]`, int32, on the default device; rows sum to K.

    Raises:
        ValueError: If K picks need more ranks than a token may reach at this ratio.
    """
    num_local_experts = _local_experts(num_experts, num_ranks)
    # With rank 0 in every token, and a ranks a token, the ratio is (R - 1) / (a - 1); larger a: less.
    most_ranks = math.floor((num_ranks - 1) / ratio) + 1
    if most_ranks * num_local_experts < num_topk:
        raise ValueError(
            f"generate_rank_count: at ratio {ratio} a token may reach {most_ranks} ranks with {num_local_experts} "
            f"experts each, too few for {num_topk} picks. Lower the ratio or the picks"
        )
    reach = _reach_of_uniform_gate(num_tokens, num_experts, num_ranks, num_topk).clamp(max=most_ranks)
    has_first = _choose_first_rank(reach, num_ranks, ratio)
    counts = _deal_other_ranks(reach, has_first, num_ranks, num_topk)
    return counts[torch.randperm(num_tokens, device=counts.device)]


def generate_topk_idx(
    rank_count: torch.Tensor, num_tokens: int, num_experts: int, num_ranks: int, num_topk: int
) -> torch.Tensor:
    """Random distinct experts, `rank_count[t, r]` of them on rank r, in random order.

    Args:
        rank_count: `[T, R]`, any integer dtype; rows sum to K, entries are at most L.
        num_tokens: T.
        num_experts: E, a multiple of R.
        num_ranks: R.
        num_topk: K.

    Returns:
        `[T, K]`, int64, on the device of `rank_count`.
    """
    shape = (num_tokens, num_ranks, _local_experts(num_experts, num_ranks))
    keys = torch.rand(shape, dtype=torch.float32, device=rank_count.device)
    # The place of each expert in a random order of its rank: the first `rank_count` places are taken.
    place = keys.argsort(dim=-1).argsort(dim=-1)
    chosen = (place < rank_count.unsqueeze(-1)).reshape(num_tokens, num_experts)
    return (keys.reshape(num_tokens, num_experts) + chosen).topk(num_topk, dim=1).indices


def get_precise_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> torch.Tensor:
    """Scores whose top-K are the picks of `generate_rank_count` and `generate_topk_idx`.

    Args:
        num_tokens: T.
        num_experts: E, a multiple of R.
        num_ranks: R.
        num_topk: K.
        ratio: Tokens of rank 0 over tokens of any other rank.

    Returns:
        `[T, E]`, float32, on the default device, inside [0, 1).
    """
    rank_count = generate_rank_count(num_tokens, num_experts, num_ranks, num_topk, ratio)
    topk_idx = generate_topk_idx(rank_count, num_tokens, num_experts, num_ranks, num_topk)
    scores = torch.rand((num_tokens, num_experts), dtype=torch.float32) * _BACKGROUND_BELOW
    chosen = torch.rand((num_tokens, num_topk), dtype=torch.float32) * _CHOSEN_SPAN + _CHOSEN_FROM
    return scores.scatter_(1, topk_idx, chosen)


def get_scores_by_factor(num_tokens: int, num_experts: int, num_ranks: int, factor: float) -> torch.Tensor:
    """Scores uniform in [0, factor) for the experts of rank 0 and in [0, 1) for the others.

    Args:
        num_tokens: T.
        num_experts: E, a multiple of R.
        num_ranks: R.
        factor: The upper bound on rank 0.

    Returns:
        `[T, E]`, float32, on the default device.
    """
    scores = torch.rand((num_tokens, num_experts), dtype=torch.float32)
    scores[:, : _local_experts(num_experts, num_ranks)] *= factor
    return scores


def map_unbalanced_ratio_to_factor(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> float:
    """The factor in [1, 100] for `get_scores_by_factor` that gives `ratio`, by 20 bisections on fresh draws.

    Args:
        num_tokens: T.
        num_experts: E, a multiple of R.
        num_ranks: R.
        num_topk: K.
        ratio: Tokens of rank 0 over the mean tokens of the other ranks.
    """
    low, high = _FACTOR_RANGE
    for _ in range(_BISECTION_STEPS):
        factor = (low + high) / 2
        scores = get_scores_by_factor(num_tokens, num_experts, num_ranks, factor)
        topk_idx = scores.topk(num_topk, dim=1).indices
        if _achieved_ratio(topk_idx, num_experts, num_ranks) < ratio:
            low = factor
        else:
            high = factor
    return (low + high) / 2


def get_random_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float
) -> torch.Tensor:
    """Independent scores whose top-K has the ratio on average; arguments and result as the precise ones."""
    factor = map_unbalanced_ratio_to_factor(num_tokens, num_experts, num_ranks, num_topk, ratio)
    return get_scores_by_factor(num_tokens, num_experts, num_ranks, factor)


def get_unbalanced_scores(
    num_tokens: int, num_experts: int, num_ranks: int, num_topk: int, ratio: float, precise: bool
) -> torch.Tensor:
    """Scores by `get_precise_unbalanced_scores` or, not `precise`, by `get_random_unbalanced_scores`.

    Returns:
        `[T, E]`, float32, on the default device.
    """
    make = get_precise_unbalanced_scores if precise else get_random_unbalanced_scores
    return make(num_tokens, num_experts, num_ranks, num_topk, ratio)


def _local_experts(num_experts: int, num_ranks: int) -> int:
    if num_experts % num_ranks:
        raise ValueError(f"gate: {num_experts} experts must divide evenly over {num_ranks} ranks")
    return num_experts // num_ranks


def _ranks_of_tokens(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> torch.Tensor:
    """Whether each token has a pick on each rank: `[T, K]` int64 to `[T, R]` bool."""
    hit = torch.zeros((topk_idx.size(0), num_ranks), dtype=torch.bool, device=topk_idx.device)
    return hit.scatter_(1, topk_idx // _local_experts(num_experts, num_ranks), True)


def _achieved_ratio(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> float:
    """Tokens of rank 0 over the mean tokens of the others; infinite where those get none or do not exist."""
    first, *others = _ranks_of_tokens(topk_idx, num_experts, num_ranks).sum(dim=0).tolist()
    return first * len(others) / sum(others) if any(others) else math.inf


def _reach_of_uniform_gate(num_tokens: int, num_experts: int, num_ranks: int, num_topk: int) -> torch.Tensor:
    """How many distinct ranks each token reaches under uniform random scores: `[T]` int64."""
    topk_idx = torch.rand((num_tokens, num_experts), dtype=torch.float32).topk(num_topk, dim=1).indices
    return _ranks_of_tokens(topk_idx, num_experts, num_ranks).sum(dim=1)


def _choose_first_rank(reach: torch.Tensor, num_ranks: int, ratio: float) -> torch.Tensor:
    """Which tokens go to rank 0: `[T]` bool for a reach `[T]` int64.

    Of the S (token, rank) pairs, `S / (R - 1 + ratio)` fall to each other rank and the rest, at most `ratio`
    times as many, to rank 0. A token that reaches all ranks has no choice.
    """
    num_pairs = int(reach.sum())
    forced = reach == num_ranks
    normal = math.floor(num_pairs / (num_ranks - 1 + ratio))
    special = min(num_pairs - normal * (num_ranks - 1), math.floor(normal * ratio) + 1)
    special = min(max(special, int(forced.sum())), reach.numel())
    # Forced tokens have keys of 1 and more, the others less: all the forced come first, then a random draw.
    keys = torch.rand(reach.shape, dtype=torch.float32, device=reach.device) + forced
    return torch.zeros_like(forced).scatter_(0, keys.topk(special).indices, True)


def _deal_other_ranks(reach: torch.Tensor, has_first: torch.Tensor, num_ranks: int, num_topk: int) -> torch.Tensor:
    """Deal ranks 1..R-1 to the tokens in one endless cycle, and spread each token's K picks over its ranks.

    Args:
        reach: `[T]`, int64: ranks of each token.
        has_first: `[T]`, bool: whether rank 0 is among them.
        num_ranks: R.
        num_topk: K.

    Returns:
        `[T, R]`, int32: picks of each token on each rank.

    Example:
        R = 4, K = 4, `reach = [2, 3]`, `has_first = [True, False]` and the cycle 3, 1, 2: token 0 takes ranks
        0 and 3 with 2 picks each, token 1 takes ranks 1, 2 and 3 with 2, 1 and 1.
    """
    device = reach.device
    counts = torch.zeros((reach.numel(), num_ranks), dtype=torch.int64, device=device)
    each, extra = num_topk // reach.clamp(min=1), num_topk % reach.clamp(min=1)
    counts[:, 0] = has_first * (each + (extra > 0))
    if num_ranks > 1:
        num_dealt = reach - has_first.long()
        first_place = num_dealt.cumsum(0) - num_dealt
        step = torch.arange(num_ranks - 1, device=device)
        cycle = torch.randperm(num_ranks - 1, device=device) + 1
        ranks = cycle[(first_place.unsqueeze(1) + step) % (num_ranks - 1)]
        slot = has_first.long().unsqueeze(1) + step
        picks = (step < num_dealt.unsqueeze(1)) * (each.unsqueeze(1) + (slot < extra.unsqueeze(1)))
        counts.scatter_(1, ranks, picks)
    return counts.to(torch.int32)
