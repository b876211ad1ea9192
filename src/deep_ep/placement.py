"""Which rank has which expert, so that all ranks have as much to do: from a histogram of the experts' load.

Experts of a model are *logical*; what ranks hold are *physical* experts: each logical expert once, hot ones several
times (*replicas*). Letters: E logical experts, P physical ones, R ranks with P / R slots each, N nodes, C the most
copies of an expert, K selections of a token. Physical expert p lives on rank `p // (P / R)`, as `Buffer` has it.

    placement = place_experts(load, num_ranks=64, num_replicas=64)
    topk_idx = placement.spread(topk_idx)  # from logical ids to physical ones; each copy gets its share of tokens

Everything here is deterministic, so ranks that know the same load find the same placement without talking.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist

_MOST_SWAPS = 4096  # of copies between ranks, after the first distribution


@dataclass(frozen=True)
class Placement:
    """Where experts are.

    Attributes:
        physical_to_logical: [P] int64.
        num_experts: E.
        num_ranks: R, a divisor of P.
    """

    physical_to_logical: torch.Tensor
    num_experts: int
    num_ranks: int

    def __post_init__(self) -> None:
        table = self.physical_to_logical.cpu()  # a table of the host's, whatever it was made from
        object.__setattr__(self, "physical_to_logical", table)
        if table.dim() != 1 or table.dtype != torch.int64:
            raise ValueError(
                f"Placement: `physical_to_logical` must be [P] int64, got {table.dtype} {list(table.shape)}"
            )
        if self.num_ranks < 1 or table.numel() % self.num_ranks:
            raise ValueError(
                f"Placement: {table.numel()} physical experts must divide evenly among `num_ranks`, "
                f"got {self.num_ranks}"
            )
        if not torch.equal(table.unique(), torch.arange(self.num_experts, device="cpu")):
            raise ValueError(
                f"Placement: each of the {self.num_experts} logical experts must be somewhere, and no other"
            )

    @property
    def num_physical(self) -> int:
        """P, the number of physical experts."""
        return self.physical_to_logical.numel()

    @property
    def num_slots(self) -> int:
        """P / R, physical experts of a rank."""
        return self.num_physical // self.num_ranks

    @property
    def num_copies(self) -> torch.Tensor:
        """[E] int64, how often each logical expert is there."""
        return torch.bincount(self.physical_to_logical, minlength=self.num_experts)

    @property
    def logical_to_physical(self) -> torch.Tensor:
        """[E, C] int64, the physical experts of each logical one, ascending; then -1."""
        num_copies = self.num_copies
        order = self.physical_to_logical.argsort(stable=True)
        number = (
            torch.arange(self.num_physical, device="cpu")
            - (num_copies.cumsum(0) - num_copies)[self.physical_to_logical[order]]
        )
        table = torch.full((self.num_experts, int(num_copies.max())), -1, device="cpu")
        table[self.physical_to_logical[order], number] = order
        return table

    def of_rank(self, rank: int) -> torch.Tensor:
        """[P / R] int64, the logical experts of a rank, by slot."""
        return self.physical_to_logical[rank * self.num_slots : (rank + 1) * self.num_slots]

    def spread(self, topk_idx: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """Turn logical ids into physical ones; see `spread_choices`, which this is with the tables made anew."""
        table = self.logical_to_physical.to(topk_idx.device)
        return spread_choices(topk_idx, table, self.num_copies.to(topk_idx.device), offset)

    def rank_load(self, load: torch.Tensor) -> torch.Tensor:
        """[R] float64, what each rank has to do where copies share the load of their expert evenly.

        Args:
            load: [E], of the logical experts.
        """
        each = load.double() / self.num_copies
        return each[self.physical_to_logical].view(self.num_ranks, self.num_slots).sum(1)

    def imbalance(self, load: torch.Tensor, num_units: int = 0) -> float:
        """The load of the busiest rank over the mean; with `num_units` nodes, that of the busiest node."""
        loads = self.rank_load(load).view(num_units or self.num_ranks, -1).sum(1)
        return float(loads.max() / loads.mean())


def spread_choices(
    topk_idx: torch.Tensor, logical_to_physical: torch.Tensor, num_copies: torch.Tensor, offset: int = 0
) -> torch.Tensor:
    """Choose a copy for each selection: neighbouring tokens take turns.

    The choice depends on the number of the token alone, so recomputing a forward pass makes the same one.

    Args:
        topk_idx: [T, K] int64 logical ids; -1: nothing.
        logical_to_physical: [E, C] int64.
        num_copies: [E] int64.
        offset: Added to the number of a token; different on each rank, so that not all begin with the same copy.

    Returns:
        [T, K] int64 physical ids, -1 where nothing was chosen.

    Example:
        With copies `[[0, 3], [1, -1]]` the ids `[[0], [0], [1]]` become `[[0], [3], [1]]`.
    """
    ids = topk_idx.clamp(min=0)
    token = torch.arange(offset, offset + topk_idx.size(0), device=topk_idx.device).unsqueeze(1)
    return logical_to_physical[ids, token % num_copies[ids]].masked_fill(topk_idx < 0, -1)


def even_placement(num_experts: int, num_ranks: int) -> Placement:
    """Experts in order, without replicas, as `Buffer` has them by itself."""
    return Placement(torch.arange(num_experts, device="cpu"), num_experts, num_ranks)


def place_experts(
    load: torch.Tensor, num_ranks: int, num_replicas: int = 0, num_nodes: int = 1, num_groups: int = 1
) -> Placement:
    """Find a placement that balances ranks, and with them nodes.

    The next replica always goes to the expert whose copies have most to do. Copies are then given to ranks, heaviest
    first, each to the rank with the least load that has a free slot and no copy of the expert; and swapped between the
    busiest rank and another as long as that helps.

    With several groups (group-limited routing) whose number the nodes divide, a group stays on one node, copies
    included, since a token may go to few groups and so to few nodes; ranks are then balanced inside each node.

    Args:
        load: [E], how often each logical expert is chosen; any scale.
        num_ranks: R.
        num_replicas: Physical experts beyond E; E plus these must divide evenly among the ranks.
        num_nodes: N, a divisor of R.
        num_groups: Groups of neighbouring experts.

    Raises:
        ValueError: An argument does not fit.
    """
    load = load.detach().double().cpu()
    _check(load, num_ranks, num_replicas, num_nodes, num_groups)
    num_experts = load.numel()
    if num_groups == 1 or num_nodes == 1 or num_groups % num_nodes:
        slots = _fill_ranks(load.tolist(), list(range(num_experts)), num_ranks, num_replicas)
        return Placement(torch.tensor(slots, device="cpu").flatten(), num_experts, num_ranks)
    size = num_experts // num_groups
    groups = _pack(load.view(num_groups, size).sum(1).tolist(), list(range(num_groups)), num_nodes)
    slots = []
    for members in groups:
        experts = [group * size + expert for group in sorted(members) for expert in range(size)]
        own = [float(load[expert]) for expert in experts]
        slots += _fill_ranks(own, experts, num_ranks // num_nodes, num_replicas // num_nodes)
    return Placement(torch.tensor(slots, device="cpu").flatten(), num_experts, num_ranks)


def _check(load: torch.Tensor, num_ranks: int, num_replicas: int, num_nodes: int, num_groups: int) -> None:
    if load.dim() != 1 or not load.numel() or not bool(torch.isfinite(load).all()) or bool((load < 0).any()):
        raise ValueError(f"place_experts: `load` must be [E], finite and not negative, got {list(load.shape)}")
    num_physical = load.numel() + num_replicas
    if num_ranks < 1 or num_replicas < 0 or num_physical % num_ranks:
        raise ValueError(
            f"place_experts: {load.numel()} experts and {num_replicas} replicas must divide evenly among the ranks, "
            f"got {num_ranks}"
        )
    if num_nodes < 1 or num_ranks % num_nodes or num_replicas % num_nodes:
        raise ValueError(f"place_experts: `num_nodes` must divide the ranks and the replicas, got {num_nodes}")
    if num_groups < 1 or load.numel() % num_groups:
        raise ValueError(f"place_experts: `num_groups` must divide the {load.numel()} experts, got {num_groups}")


def _fill_ranks(load: list[float], names: list[int], num_ranks: int, num_replicas: int) -> list[list[int]]:
    """The experts of each rank, each with as many; `names` are what experts are called in the result."""
    num_copies = _replicate(load, num_ranks, num_replicas)
    copies = [expert for expert, number in enumerate(num_copies) for _ in range(number)]
    shares = [one / number for one, number in zip(load, num_copies, strict=True)]
    ranks = _pack([shares[expert] for expert in copies], copies, num_ranks)
    _swap(ranks, shares)
    return [[names[expert] for expert in sorted(members)] for members in ranks]


def _replicate(load: list[float], num_ranks: int, num_replicas: int) -> list[int]:
    """How many copies each expert gets; not more than ranks, as long as another expert can take one."""
    num_copies = [1] * len(load)
    heap = [(-one, expert) for expert, one in enumerate(load)]
    heapq.heapify(heap)
    full: list[tuple[float, int]] = []
    for _ in range(num_replicas):
        if not heap:
            heap, full = full, []
        _, expert = heapq.heappop(heap)
        num_copies[expert] += 1
        entry = (-load[expert] / (num_copies[expert]), expert)
        if num_copies[expert] % num_ranks:
            heapq.heappush(heap, entry)
        else:
            full.append(entry)
    return num_copies


def _pack(shares: Sequence[float], names: Sequence[int], num_bins: int) -> list[list[int]]:
    """Heaviest first, each into the lightest bin that has a free slot and not yet the same name."""
    size = len(shares) // num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, number) for number in range(num_bins)]
    for item in sorted(range(len(shares)), key=lambda item: -shares[item]):
        passed = []
        while heap:
            entry = heapq.heappop(heap)
            if names[item] not in bins[entry[1]]:
                break
            passed.append(entry)
        else:  # every bin with a free slot has it: two copies share a bin
            entry = passed.pop(0)
        load, number = entry
        bins[number].append(names[item])
        if len(bins[number]) < size:
            heapq.heappush(heap, (load + shares[item], number))
        for other in passed:
            heapq.heappush(heap, other)
    return bins


def _swap(ranks: list[list[int]], shares: list[float]) -> None:
    """Swap copies of the busiest rank for lighter ones of others, in place, while that makes the busier one lighter."""
    held = torch.tensor(ranks, device="cpu")
    share = torch.tensor(shares, dtype=torch.float64, device="cpu")
    for _ in range(_MOST_SWAPS):
        loads = share[held].sum(1)
        busiest = int(loads.argmax())
        # gain[i, r, j]: what slot i of the busiest rank weighs more than slot j of rank r.
        gain = share[held[busiest]].view(-1, 1, 1) - share[held].unsqueeze(0)
        result = torch.maximum(loads[busiest] - gain, loads.view(1, -1, 1) + gain)
        has_mine = (held.unsqueeze(0) == held[busiest].view(-1, 1, 1)).any(2, keepdim=True)
        is_here = torch.isin(held, held[busiest]).unsqueeze(0)
        result.masked_fill_(has_mine | is_here, torch.inf)
        result[:, busiest] = torch.inf
        best = int(result.argmin())
        # A gain that is only rounding is none.
        if not result.view(-1)[best] < loads[busiest] * (1 - 1e-9):
            break
        slot, rank, other = torch.unravel_index(torch.tensor(best, device="cpu"), result.shape)
        mine, theirs = int(held[busiest, slot]), int(held[rank, other])
        held[busiest, slot], held[rank, other] = theirs, mine
    ranks[:] = held.tolist()


# Moving --------------------------------------------------------------------------------------------------------------


class _Moves(NamedTuple):
    """What a rank sends and keeps: the slots to send, by rank; and for each of its slots, where the rows come from."""

    send_slots: list[list[int]]
    recv_slots: list[list[int]]
    kept: list[tuple[int, int]]


def _find_moves(old: Placement, new: Placement, rank: int) -> _Moves:
    """Each slot takes its expert from the rank itself if it has a copy, else from one of the copies, in turns."""
    send_slots: list[list[int]] = [[] for _ in range(old.num_ranks)]
    recv_slots: list[list[int]] = [[] for _ in range(old.num_ranks)]
    kept = []
    copies = [[one for one in row if one >= 0] for row in old.logical_to_physical.tolist()]
    for target in range(new.num_ranks):
        for slot, expert in enumerate(new.of_rank(target).tolist()):
            own = [one for one in copies[expert] if one // old.num_slots == target]
            physical = own[0] if own else copies[expert][(target + slot) % len(copies[expert])]
            source, index = divmod(physical, old.num_slots)
            if source == target == rank:
                kept.append((index, slot))
            elif source == rank and source != target:
                # In the order of the target's slots, in which that rank lists what it receives.
                send_slots[target].append(index)
            elif target == rank:
                recv_slots[source].append(slot)
    return _Moves(send_slots, recv_slots, kept)


def move_experts(
    tensors: Iterable[torch.Tensor], old: Placement, new: Placement, rank: int, group: dist.ProcessGroup | None
) -> None:
    """Bring the experts to where a new placement has them, in place. All ranks call it together.

    Args:
        tensors: Of this rank, each [P / R, ...]: parameters of its experts, and what an optimizer keeps for them.
        old: Where experts are; its copies hold the same numbers.
        new: Where they should be, with as many slots.
        rank: This rank.
        group: All ranks; None: there is only one.

    Raises:
        ValueError: The placements are of different sizes, or a tensor is not of this many slots.
    """
    if (old.num_experts, old.num_physical, old.num_ranks) != (new.num_experts, new.num_physical, new.num_ranks):
        raise ValueError(
            f"move_experts: both placements must have as many experts and ranks, got {old.num_physical} of "
            f"{old.num_experts} on {old.num_ranks} and {new.num_physical} of {new.num_experts} on {new.num_ranks}"
        )
    moves = _find_moves(old, new, rank)
    for tensor in tensors:
        if tensor.size(0) != old.num_slots:
            raise ValueError(f"move_experts: a tensor must have {old.num_slots} experts, got {tensor.size(0)}")
        _move(tensor, moves, group)


def _move(tensor: torch.Tensor, moves: _Moves, group: dist.ProcessGroup | None) -> None:
    sent = tensor[[slot for slots in moves.send_slots for slot in slots]].contiguous()
    received = tensor.new_empty((sum(map(len, moves.recv_slots)), *tensor.shape[1:]))
    if group is not None and dist.get_world_size(group) > 1:
        recv_splits, send_splits = list(map(len, moves.recv_slots)), list(map(len, moves.send_slots))
        dist.all_to_all_single(received, sent, recv_splits, send_splits, group=group)
    result = torch.empty_like(tensor)
    for index, slot in moves.kept:
        result[slot] = tensor[index]
    result[[slot for slots in moves.recv_slots for slot in slots]] = received
    tensor.copy_(result)


def sum_over_copies(tensor: torch.Tensor, placement: Placement, rank: int, group: dist.ProcessGroup | None) -> None:
    """Sum what the copies of each expert have, in place: gradients. All ranks call it together.

    Args:
        tensor: [P / R, ...] of this rank.
        placement: Where experts are.
        rank: This rank.
        group: All ranks; None: there is only one.
    """
    several = (placement.num_copies > 1).nonzero().view(-1)
    if not several.numel():
        return
    row_of = torch.full((placement.num_experts,), -1, device="cpu").scatter_(
        0, several, torch.arange(several.numel(), device="cpu")
    )
    row = row_of[placement.of_rank(rank)].to(tensor.device)
    is_copy = row >= 0
    sums = tensor.new_zeros((several.numel(), *tensor.shape[1:])).index_add_(0, row[is_copy], tensor[is_copy])
    if group is not None and dist.get_world_size(group) > 1:
        dist.all_reduce(sums, group=group)
    tensor[is_copy] = sums[row[is_copy]]
