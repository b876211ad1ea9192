"""From `topk_idx` to the row of every token at every destination: pure arithmetic, no communication.

Shape letters: T tokens of this rank, K selections of a token, E experts, R ranks, L = E / R experts of a rank.
Expert `e` lives on rank `e // L`. An id outside `[0, E)` selects nothing.

A *slot* is the row that a token takes at a destination. Rows are ordered by source rank and then by token, so with
`num_tokens[s, d]` known for all ranks, every slot follows without communication:

    slot[t, d] = sum(num_tokens[s, d] for s < me) + how many tokens before t go to d
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .errors import EPError, EPOverflow

# In the place of counts that are still to be computed, and of those that never will be: behind an overflow.
_UNCOUNTED, _REFUSED = -1, -2


class DispatchLayout(NamedTuple):
    """What a rank sends where.

    Attributes:
        num_tokens_per_rank: [R] int32, tokens bound for each rank, each counted once.
        num_tokens_per_node: [nodes] int32, tokens bound for each node, each counted once.
        num_tokens_per_expert: [E] int32, selections of each expert, duplicates counted.
        is_token_in_rank: [T, R] bool.
    """

    num_tokens_per_rank: torch.Tensor
    num_tokens_per_node: torch.Tensor
    num_tokens_per_expert: torch.Tensor
    is_token_in_rank: torch.Tensor


def dispatch_layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int, ranks_per_node: int) -> DispatchLayout:
    """Count tokens per rank, node and expert, and mark which token goes to which rank.

    Args:
        topk_idx: [T, K] integer expert ids.
        num_experts: E, a multiple of `num_ranks`.
        num_ranks: R.
        ranks_per_node: Ranks of a node, a divisor of R.

    Example:
        `dispatch_layout(tensor([[0, 3], [-1, 2]]), 4, 2, 2)`: token 0 goes to both ranks, token 1 to rank 1; counts
        per rank `[1, 2]`, per node `[2]`, per expert `[1, 0, 1, 1]`.
    """
    num_tokens = topk_idx.size(0)
    ids = topk_idx.long()
    selected = (ids >= 0) & (ids < num_experts)
    # One column more takes the selections of nothing, and is cut off again.
    rank_of = torch.where(selected, ids.div(num_experts // num_ranks, rounding_mode="floor"), num_ranks)
    is_token_in_rank = torch.zeros(num_tokens, num_ranks + 1, dtype=torch.bool, device=ids.device)
    is_token_in_rank = is_token_in_rank.scatter_(1, rank_of, True)[:, :num_ranks].contiguous()
    in_node = is_token_in_rank.view(num_tokens, num_ranks // ranks_per_node, ranks_per_node).any(2)
    return DispatchLayout(
        is_token_in_rank.sum(0, dtype=torch.int32),
        in_node.sum(0, dtype=torch.int32),
        torch.bincount(ids[selected], minlength=num_experts).int(),
        is_token_in_rank,
    )


def uncounted_layout(topk_idx: torch.Tensor, num_experts: int, num_ranks: int, ranks_per_node: int) -> DispatchLayout:
    """The tensors of `dispatch_layout`, which are filled later.

    Their counts are those of no layout: one that is never filled must not be taken for that of a rank without tokens.
    """
    num_tokens, new = topk_idx.size(0), topk_idx.new_full
    return DispatchLayout(
        new((num_ranks,), _UNCOUNTED, dtype=torch.int32),
        new((num_ranks // ranks_per_node,), _UNCOUNTED, dtype=torch.int32),
        new((num_experts,), _UNCOUNTED, dtype=torch.int32),
        new((num_tokens, num_ranks), False, dtype=torch.bool),
    )


def mark_refused(layout: DispatchLayout) -> None:
    """Mark a layout that is not filled, since it was to come after a dispatch that all ranks have refused."""
    layout.num_tokens_per_rank.fill_(_REFUSED)


def require_counted(num_tokens_per_rank: list[int], me: str) -> None:
    """Refuse a dispatch whose layout was never filled.

    Args:
        num_tokens_per_rank: The counts of the layout.
        me: This rank, for messages.

    Raises:
        EPOverflow: The layout was to come after a dispatch that all ranks have refused.
        EPError: The layout was to come after something else that has failed.
    """
    if set(num_tokens_per_rank) == {_REFUSED}:
        raise EPOverflow(
            "dispatch: its layout was not counted, since `get_dispatch_layout` came after a dispatch that received "
            f"more rows than its num_worst_tokens allows ({me}). Make the layout again"
        )
    if set(num_tokens_per_rank) == {_UNCOUNTED}:
        raise EPError(
            "dispatch: its layout was not counted, since what `get_dispatch_layout` came after has failed "
            f"({me}). Wait for the event of the layout, which says what it was, and make the layout again"
        )


def pack_bits(mask: torch.Tensor) -> torch.Tensor:
    """Bits of a [n, P] bool mask: [n, ceil(P / 8)] uint8, column 0 the lowest bit.

    Example:
        `[[1, 0, 1]]` is `[[5]]`.
    """
    num_bytes = -(-mask.size(1) // 8)
    padded = mask.new_zeros(mask.size(0), 8 * num_bytes, dtype=torch.uint8)
    padded[:, : mask.size(1)] = mask
    powers = torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=mask.device)
    return (padded.view(-1, num_bytes, 8) * powers).sum(2, dtype=torch.uint8)


def unpack_bits(bits: torch.Tensor, num_columns: int) -> torch.Tensor:
    """The reverse of `pack_bits`: [n, num_columns] bool."""
    bits_idx = torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (bits.unsqueeze(2) >> bits_idx & 1).view(bits.size(0), 8 * bits.size(1))[:, :num_columns].bool()


def rank_prefix_matrix(num_tokens: torch.Tensor) -> torch.Tensor:
    """Rows that each rank receives from the ranks up to and including another.

    Args:
        num_tokens: [R, R] int32, `[s, d]` tokens that rank s sends to rank d; or some columns of it.

    Returns:
        The same shape, int32, `[s, d] = sum(num_tokens[:s + 1, d])`.
    """
    return num_tokens.cumsum(0, dtype=torch.int32)


def token_slots(is_token_in_rank: torch.Tensor, prefix: torch.Tensor, rank: int) -> torch.Tensor:
    """The row of every token at every destination.

    Args:
        is_token_in_rank: [T, R] bool, or some columns of it.
        prefix: [R, R] int32, from `rank_prefix_matrix`, the same columns.
        rank: The source rank.

    Returns:
        [T, R] int32, the same columns, -1 where the token is not sent.

    Example:
        With mask `[[1, 1], [0, 1]]` on rank 1 and prefix `[[5, 7], [6, 9]]` the slots are `[[5, 7], [-1, 8]]`.
    """
    slots = is_token_in_rank.cumsum(0, dtype=torch.int32).sub_(1)
    if rank:
        slots += prefix[rank - 1]
    return slots.masked_fill_(~is_token_in_rank, -1)
