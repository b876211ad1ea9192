"""From a router to how many tokens reach each rank and each node: by formula where it is uniform, else by sampling.

Letters: E experts, G groups of E / G neighbouring experts, g groups of a token, K selections of a token, R ranks,
N nodes. Experts are spread evenly over ranks and ranks over nodes, so a *unit*, a rank or a node, has
E / units experts.

A token goes to a unit once, however many of its experts are there. With K of n experts drawn without replacement, a
unit of m of them is missed with probability C(n - m, K) / C(n, K). With group limits, g of the G groups are drawn
first, j of them among those of the unit, and K of their experts next:

    reach = sum over j of P(j of the unit's c groups are drawn) * (1 - C((g - j) E / G, K) / C(g E / G, K))

A gate that judges groups by their best experts spreads a token over its groups more evenly than chance does;
`sample_routes` draws as such a gate would, and so reaches a few percent more nodes than the formula.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

MOST_SAMPLED = 1 << 18  # tokens: below one percent of error for the busiest of 2,048 ranks
_MOST_SCORES = 1 << 24  # of a chunk of tokens, with a score for each expert: 64 MiB


@dataclass(frozen=True)
class Routing:
    """How a router chooses.

    Attributes:
        num_experts: E.
        topk: K.
        num_groups: G; 1: no groups.
        topk_groups: g.
        num_deciding: A group is judged by the sum of this many of its best experts; 0: groups are drawn by chance.
        zipf: Exponent of a Zipf distribution of the experts' popularity; 0: uniform.
        load: Popularity of each expert, as a trace has it; None: by `zipf`.
        is_balanced: Every token goes to as many different ranks and nodes as it can, as some benchmarks have it.
    """

    num_experts: int
    topk: int
    num_groups: int = 1
    topk_groups: int = 1
    num_deciding: int = 0
    zipf: float = 0.0
    load: tuple[float, ...] | None = None
    is_balanced: bool = False

    def check(self) -> None:
        """Refuse what cannot be routed, with `ValueError`."""
        if self.num_experts < 1 or self.num_groups < 1 or self.num_experts % self.num_groups:
            raise ValueError(
                f"planner: {self.num_experts} experts must divide evenly into `num_groups`, got {self.num_groups}"
            )
        if not 1 <= self.topk_groups <= self.num_groups:
            raise ValueError(f"planner: `topk_groups` must be within 1..{self.num_groups}, got {self.topk_groups}")
        most = self.num_experts // self.num_groups * self.topk_groups
        if not 1 <= self.topk <= most:
            raise ValueError(f"planner: `topk` must be within 1..{most}, a token's experts, got {self.topk}")
        if self.zipf < 0:
            raise ValueError(f"planner: `zipf` must not be negative, got {self.zipf}")
        if self.load is not None:
            self._check_load(self.load)

    def _check_load(self, load: Sequence[float]) -> None:
        if len(load) != self.num_experts:
            raise ValueError(f"planner: `load` must have {self.num_experts} numbers, one an expert, got {len(load)}")
        if not all(0 <= one < math.inf for one in load) or sum(one > 0 for one in load) < self.topk:
            raise ValueError(f"planner: `load` must be finite, and above 0 for at least {self.topk} experts")

    @property
    def is_uniform(self) -> bool:
        """Whether all experts are equally popular."""
        return self.load is None and self.zipf == 0

    def popularity(self) -> torch.Tensor:
        """[E] float64, sums to 1. Zipf's ranks are shuffled, always in the same way: hot experts have no neighbours."""
        if self.load is not None:
            shares = torch.tensor(self.load, dtype=torch.float64)
        else:
            order = torch.randperm(self.num_experts, generator=torch.Generator().manual_seed(0))
            shares = (order + 1).double() ** -self.zipf
        return shares / shares.sum()


class Reach(NamedTuple):
    """Where a token goes, on average over tokens.

    Attributes:
        ranks: [R] float64, the probability that it goes to each rank.
        nodes: [N] float64, the same of each node.
        selections: [R] float64, how many of its K selections each rank has.
        is_sampled: The numbers come from sampled tokens, not from the formula.
    """

    ranks: torch.Tensor
    nodes: torch.Tensor
    selections: torch.Tensor
    is_sampled: bool = False


def missed(num_experts: float, num_own: float, topk: int) -> float:
    """The probability that none of K experts, drawn of n without replacement, is one of m: C(n - m, K) / C(n, K)."""
    rest = num_experts - num_own
    if rest <= topk - 1:
        return 0.0
    return math.exp(
        math.lgamma(rest + 1)
        - math.lgamma(rest - topk + 1)
        - math.lgamma(num_experts + 1)
        + math.lgamma(num_experts - topk + 1)
    )


def uniform_reach(routing: Routing, num_units: int) -> float:
    """The probability that a token of a uniform router goes to a given unit.

    Args:
        routing: The router; `zipf` and `load` are not looked at.
        num_units: Ranks or nodes. With more units than experts, an expert has several, each with its share of tokens.
            A unit of several groups counts as a whole number of them.

    Example:
        Top-2 of 4 experts on 2 ranks: both selections miss a rank in 1 of 6 cases, so it is 5/6.
    """
    if routing.is_balanced:
        return min(num_units, routing.topk) / num_units
    own = routing.num_experts / num_units
    group = routing.num_experts // routing.num_groups
    chosen = routing.topk_groups
    if chosen == routing.num_groups or own <= group:  # the unit lies inside one group, or groups do not matter
        return chosen / routing.num_groups * (1 - missed(chosen * group, own, routing.topk))
    own_groups = round(own / group)
    total = math.comb(routing.num_groups, chosen)
    reach = 0.0
    for drawn in range(1, min(own_groups, chosen) + 1):
        ways = math.comb(own_groups, drawn) * math.comb(routing.num_groups - own_groups, chosen - drawn)
        reach += ways / total * (1 - missed(chosen * group, drawn * group, routing.topk))
    return reach


def find_reach(
    routing: Routing,
    num_ranks: int,
    num_nodes: int,
    num_tokens: int = MOST_SAMPLED,
    logical_to_rank: torch.Tensor | None = None,
) -> Reach:
    """How often each rank and each node is reached.

    Args:
        routing: The router.
        num_ranks: R.
        num_nodes: N, a divisor of R.
        num_tokens: How many tokens are sampled where there is no formula, at most `MOST_SAMPLED`.
        logical_to_rank: [E, copies] int64, the ranks that have a copy of each expert, padded with -1; each token takes
            one of them by chance. None: experts in order, E / R on each rank.

    Raises:
        ValueError: The router is none, or experts do not divide among the ranks.
    """
    routing.check()
    if num_ranks < 1 or num_nodes < 1 or num_ranks % num_nodes:
        raise ValueError(f"planner: {num_ranks} ranks must divide evenly among the nodes, got {num_nodes}")
    if _has_formula(routing, num_ranks, num_nodes) and logical_to_rank is None:
        even = torch.ones(num_ranks, dtype=torch.float64)
        nodes = torch.full((num_nodes,), uniform_reach(routing, num_nodes), dtype=torch.float64)
        return Reach(even * uniform_reach(routing, num_ranks), nodes, even * (routing.topk / num_ranks))
    topk_idx = sample_routes(routing, min(num_tokens, MOST_SAMPLED))
    if logical_to_rank is None:
        ranks = topk_idx * num_ranks // routing.num_experts
        if num_ranks > routing.num_experts:
            raise ValueError(
                f"planner: {routing.num_experts} experts are too few for {num_ranks} ranks and a skewed router. Give "
                f"replicas, so that every rank has an expert"
            )
    else:
        ranks = _copies_by_chance(topk_idx, logical_to_rank)
    return count_reach(ranks, num_ranks, num_nodes)


def _has_formula(routing: Routing, num_ranks: int, num_nodes: int) -> bool:
    """Whether the router is uniform, and no rank or node has a group and a part of another."""
    group = routing.num_experts / routing.num_groups
    own = [routing.num_experts / num_units for num_units in (num_ranks, num_nodes)]
    is_whole = all(one <= group or (one / group).is_integer() for one in own)
    return routing.is_uniform and not routing.num_deciding and (routing.topk_groups == routing.num_groups or is_whole)


def _copies_by_chance(topk_idx: torch.Tensor, logical_to_rank: torch.Tensor) -> torch.Tensor:
    num_copies = (logical_to_rank >= 0).sum(1)
    generator = torch.Generator().manual_seed(1)
    which = (torch.rand(topk_idx.shape, generator=generator) * num_copies[topk_idx]).long()
    return logical_to_rank[topk_idx, which]


def count_reach(ranks: torch.Tensor, num_ranks: int, num_nodes: int) -> Reach:
    """Count tokens that were routed.

    Args:
        ranks: [T, K] int64, the rank of each selection; -1: nothing.
        num_ranks: R.
        num_nodes: N.
    """
    num_tokens = max(1, ranks.size(0))
    nodes = ranks.div(num_ranks // num_nodes, rounding_mode="floor")  # -1 stays -1
    selections = torch.bincount(ranks[ranks >= 0], minlength=num_ranks).double()
    once = [_count_once(*units) / num_tokens for units in ((ranks, num_ranks), (nodes, num_nodes))]
    return Reach(once[0], once[1], selections / num_tokens, True)


def _count_once(units: torch.Tensor, num_units: int) -> torch.Tensor:
    """[units] float64, rows of [T, K] that have each unit at least once. No mask of T times all units is made."""
    units = units.sort(dim=1).values
    is_first = torch.ones_like(units, dtype=torch.bool)
    is_first[:, 1:] = units[:, 1:] != units[:, :-1]
    return torch.bincount(units[is_first & (units >= 0)], minlength=num_units).double()


def sample_routes(routing: Routing, num_tokens: int, seed: int = 0) -> torch.Tensor:
    """Draw selections: K different experts of a token, one after another, each in proportion to its popularity.

    Returns:
        [num_tokens, K] int64.
    """
    routing.check()
    generator = torch.Generator().manual_seed(seed)
    if routing.topk_groups < routing.num_groups:
        return _sample_in_groups(routing, num_tokens, generator)
    return _sample_distinct(routing.popularity(), routing.topk, num_tokens, generator)


def _sample_distinct(popularity: torch.Tensor, topk: int, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Draw with replacement, and keep the first K that differ: the same distribution, without a score for each expert.

    Twice as many draws as needed are made at once; the few tokens that these do not suffice for go on one by one.
    """
    bounds, last = popularity.cumsum(0), int(popularity.nonzero()[-1])

    def draw(*shape: int) -> torch.Tensor:
        points = torch.rand(shape, generator=generator, dtype=torch.float64)
        return torch.searchsorted(bounds, points, right=True).clamp_(max=last)

    drawn = draw(num_tokens, 2 * topk)
    is_new = torch.ones_like(drawn, dtype=torch.bool)
    for index in range(1, drawn.size(1)):
        is_new[:, index] = (drawn[:, :index] != drawn[:, index : index + 1]).all(1)
    number = is_new.cumsum(1)
    rows, columns = (is_new & (number <= topk)).nonzero(as_tuple=True)
    chosen = torch.full((num_tokens, topk), -1)
    chosen[rows, number[rows, columns] - 1] = drawn[rows, columns]
    num_chosen = number[:, -1].clamp(max=topk)
    left = (num_chosen < topk).nonzero().view(-1)
    while left.numel():
        more = draw(left.numel())
        fits = (chosen[left] != more.unsqueeze(1)).all(1)
        chosen[left[fits], num_chosen[left[fits]]] = more[fits]
        num_chosen[left[fits]] += 1
        left = left[num_chosen[left] < topk]
    return chosen


def _sample_in_groups(routing: Routing, num_tokens: int, generator: torch.Generator) -> torch.Tensor:
    """Score every expert: the largest of log popularity plus Gumbel noise are a draw without replacement."""
    size = max(1, _MOST_SCORES // routing.num_experts)
    num_tokens = min(num_tokens, 2 * size)  # as many as take a second or two
    chunks = []
    log_popularity = routing.popularity().log().float()
    for start in range(0, num_tokens, size):
        shape = (min(size, num_tokens - start), routing.num_experts)
        scores = log_popularity - torch.empty(shape).exponential_(generator=generator).log_()
        groups = scores.view(shape[0], routing.num_groups, -1)
        if routing.num_deciding:
            # Judged by shares of the token, as a gate's scores are, not by their logarithms: these add up to nothing.
            judged = groups.sigmoid().topk(min(routing.num_deciding, groups.size(2)), dim=2).values.sum(2)
        else:
            judged = torch.rand(groups.shape[:2], generator=generator)
        best = judged.topk(routing.topk_groups, dim=1).indices
        is_out = torch.ones(groups.shape[:2], dtype=torch.bool).scatter_(1, best, False)
        chunks.append(groups.masked_fill(is_out.unsqueeze(2), -math.inf).flatten(1).topk(routing.topk).indices)
    return torch.cat(chunks)
