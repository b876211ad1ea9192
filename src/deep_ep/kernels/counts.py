"""From `topk_idx` to counts and mask, on the device. The twin is in `layout.py`.

Shape letters: T tokens, K selections of a token, E experts, R ranks, N nodes.
"""

from __future__ import annotations

import functools

import torch

from ._triton import Launch, Variant, jit, next_power_of_2, tl

_int32, _bool = torch.int32, torch.bool
_TILE_ELEMENTS = 4096  # of the largest matrix that a program holds
_MOST_TOKENS_ALONE = 1024  # of one program that does it all: clearing the sums before takes longer than it does
_MOST_TOKENS = 128  # of a program: enough programs to fill a GPU from a few thousand tokens


def empty_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate what `dispatch_layout` computes: counts [R + N + E] int32, and mask [T, R] bool."""
    counts = topk_idx.new_empty(num_ranks + num_nodes + num_experts, dtype=_int32)
    return counts, topk_idx.new_empty(topk_idx.shape[0], num_ranks, dtype=_bool)


def dispatch_layout(
    topk_idx: torch.Tensor,
    num_experts: int,
    num_ranks: int,
    num_nodes: int,
    out: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Count tokens per rank, node and expert, and mark which token goes to which rank. Twin: `layout.dispatch_layout`.

    Args:
        topk_idx: [T, K] int32 or int64, contiguous.
        num_experts: E.
        num_ranks: R.
        num_nodes: N.
        out: From `empty_layout`, if it is there already.

    Returns:
        Counts [R], [N] and [E] int32, mask [T, R] bool.
    """
    num_tokens, num_topk = topk_idx.shape
    counts, mask = out or empty_layout(topk_idx, num_experts, num_ranks, num_nodes)
    is_alone = num_tokens <= _MOST_TOKENS_ALONE
    device = topk_idx.get_device()
    count, tile = _layout_launch(device, topk_idx.dtype, num_topk, num_experts, num_ranks, num_nodes, is_alone)
    if is_alone:
        count(1, (topk_idx, counts, mask), (num_tokens,))
    else:
        counts.zero_()
        count(-(-num_tokens // tile), (topk_idx, counts, mask), (num_tokens,))
    per_rank, per_node, per_expert = torch.split_with_sizes(counts, (num_ranks, num_nodes, num_experts))
    return per_rank, per_node, per_expert, mask


@functools.cache
def _layout_launch(
    device: int,
    idx_dtype: torch.dtype,
    num_topk: int,
    num_experts: int,
    num_ranks: int,
    num_nodes: int,
    is_alone: bool,
) -> tuple[Launch, int]:
    """Return the launch of the kernel on a device, and the tokens of a block."""
    del device  # on which it is launched first, and from then on
    lanes = next_power_of_2(num_ranks)
    tile = max(1, min(_MOST_TOKENS, _TILE_ELEMENTS // max(lanes, next_power_of_2(num_topk))))
    constants = {
        "TILE": tile,
        "LANES": lanes,
        "NODES": next_power_of_2(num_nodes),
        "BINS": next_power_of_2(num_experts),
        "IS_ALONE": is_alone,
    }
    types = (idx_dtype, None, torch.uint8, None)
    return Launch(
        Variant(_layout_kernel, constants, num_warps=4), types, (num_topk, num_experts, num_ranks, num_nodes)
    ), tile


@jit
def _layout_kernel(
    topk_idx,
    counts,
    mask,
    num_tokens: tl.int32,
    num_topk: tl.int32,
    num_experts: tl.int32,
    num_ranks: tl.int32,
    num_nodes: tl.int32,
    TILE: tl.constexpr,
    LANES: tl.constexpr,
    NODES: tl.constexpr,
    BINS: tl.constexpr,
    IS_ALONE: tl.constexpr,
):
    """Each block computes counts and mask of a tile of tokens. Sums are of integers, so their order does not matter.

    A single block processes all tiles, and stores its sums, so that they need not be cleared before.

    Example: ids `[[0, 3], [-1, 2]]` of 4 experts on 2 ranks of one node: mask `[[1, 1], [0, 1]]`, counts `[1, 2]`,
    `[2]`, `[1, 0, 1, 1]`.
    """
    ranks = tl.arange(0, LANES)
    nodes = tl.arange(0, NODES)
    bins = tl.arange(0, BINS)
    per_rank = tl.zeros([LANES], tl.int32)
    per_node = tl.zeros([NODES], tl.int32)
    chosen = tl.zeros([BINS], tl.int32)
    for first in range(tl.program_id(0) * TILE, num_tokens, tl.num_programs(0) * TILE):
        tokens = first + tl.arange(0, TILE)
        is_token = tokens < num_tokens
        in_rank = tl.zeros([TILE, LANES], tl.int32)
        in_node = tl.zeros([TILE, NODES], tl.int32)
        for k in range(num_topk):
            ids = tl.load(topk_idx + tokens.to(tl.int64) * num_topk + k, mask=is_token, other=-1)
            is_id = (ids >= 0) & (ids < num_experts)
            ids = tl.where(is_id, ids, 0).to(tl.int32)
            rank = tl.where(is_id, ids // (num_experts // num_ranks), -1)
            node = tl.where(is_id, ids // (num_experts // num_nodes), -1)
            in_rank = in_rank | (rank[:, None] == ranks[None, :]).to(tl.int32)
            in_node = in_node | (node[:, None] == nodes[None, :]).to(tl.int32)
            chosen += tl.histogram(ids, BINS, mask=is_id)
        cells = tokens.to(tl.int64)[:, None] * num_ranks + ranks[None, :]
        tl.store(mask + cells, in_rank.to(tl.int8), mask=is_token[:, None] & (ranks < num_ranks)[None, :])
        per_rank += tl.sum(in_rank, 0)
        per_node += tl.sum(in_node, 0)
    node_counts = counts + num_ranks
    expert_counts = node_counts + num_nodes
    if IS_ALONE:
        tl.store(counts + ranks, per_rank, mask=ranks < num_ranks)
        tl.store(node_counts + nodes, per_node, mask=nodes < num_nodes)
        tl.store(expert_counts + bins, chosen, mask=bins < num_experts)
    else:
        tl.atomic_add(counts + ranks, per_rank, mask=ranks < num_ranks, sem="relaxed")
        tl.atomic_add(node_counts + nodes, per_node, mask=nodes < num_nodes, sem="relaxed")
        tl.atomic_add(expert_counts + bins, chosen, mask=(bins < num_experts) & (chosen > 0), sem="relaxed")
