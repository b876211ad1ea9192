"""From `topk_idx` to counts, mask and positions, on the device. The twins are in `layout.py`.

Shape letters: T tokens, K selections of a token, E experts, R ranks, N nodes, C channels of a handle.
"""

from __future__ import annotations

import functools

import torch

from ._triton import Launch, Variant, jit, launch, next_power_of_2, tl, triton
from .put import widest_word

_TILE_ELEMENTS = 4096  # of the largest matrix that a program holds
_MOST_TOKENS = 128  # of a program: enough programs to fill a GPU from a few thousand tokens
_SCAN_TOKENS = 1024


def empty_layout(
    topk_idx: torch.Tensor, num_experts: int, num_ranks: int, num_nodes: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for what `dispatch_layout` finds: counts [R + N + E] int32, and mask [T, R] bool."""
    counts = topk_idx.new_empty(num_ranks + num_nodes + num_experts, dtype=torch.int32)
    return counts, topk_idx.new_empty(topk_idx.size(0), num_ranks, dtype=torch.bool)


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
    counts.zero_()
    count, tile = _layout_launch(topk_idx.dtype, num_topk, num_experts, num_ranks, num_nodes)
    count(-(-num_tokens // tile), topk_idx, counts, mask, num_tokens)
    return *counts.split([num_ranks, num_nodes, num_experts]), mask


@functools.cache
def _layout_launch(
    idx_dtype: torch.dtype, num_topk: int, num_experts: int, num_ranks: int, num_nodes: int
) -> tuple[Launch, int]:
    """The kernel, and the tokens of a block."""
    lanes = next_power_of_2(num_ranks)
    tile = max(1, min(_MOST_TOKENS, _TILE_ELEMENTS // max(lanes, next_power_of_2(num_topk))))
    constants = {
        "TILE": tile,
        "LANES": lanes,
        "NODES": next_power_of_2(num_nodes),
        "BINS": next_power_of_2(num_experts),
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
):
    """Counts and mask of a tile of tokens. Sums are of integers, so their order does not matter.

    Example: ids `[[0, 3], [-1, 2]]` of 4 experts on 2 ranks of one node: mask `[[1, 1], [0, 1]]`, counts `[1, 2]`,
    `[2]`, `[1, 0, 1, 1]`.
    """
    tokens = tl.program_id(0) * TILE + tl.arange(0, TILE)
    is_token = tokens < num_tokens
    ranks = tl.arange(0, LANES)
    nodes = tl.arange(0, NODES)
    bins = tl.arange(0, BINS)
    in_rank = tl.zeros([TILE, LANES], tl.int32)
    in_node = tl.zeros([TILE, NODES], tl.int32)
    chosen = tl.zeros([BINS], tl.int32)
    for k in range(num_topk):
        ids = tl.load(topk_idx + tokens.to(tl.int64) * num_topk + k, mask=is_token, other=-1)
        is_id = (ids >= 0) & (ids < num_experts)
        ids = tl.where(is_id, ids, 0).to(tl.int32)
        rank = tl.where(is_id, ids // (num_experts // num_ranks), -1)
        node = tl.where(is_id, ids // (num_experts // num_nodes), -1)
        in_rank = in_rank | (rank[:, None] == ranks[None, :]).to(tl.int32)
        in_node = in_node | (node[:, None] == nodes[None, :]).to(tl.int32)
        chosen += tl.histogram(ids, BINS, mask=is_id)
    places = tokens.to(tl.int64)[:, None] * num_ranks + ranks[None, :]
    tl.store(mask + places, in_rank.to(tl.int8), mask=is_token[:, None] & (ranks < num_ranks)[None, :])
    tl.atomic_add(counts + ranks, tl.sum(in_rank, 0), mask=ranks < num_ranks, sem="relaxed")
    tl.atomic_add(counts + num_ranks + nodes, tl.sum(in_node, 0), mask=nodes < num_nodes, sem="relaxed")
    tl.atomic_add(
        counts + num_ranks + num_nodes + bins, chosen, mask=(bins < num_experts) & (chosen > 0), sem="relaxed"
    )


def positions(is_token_in_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the tokens of each destination.

    Args:
        is_token_in_rank: [T, R] bool, contiguous.

    Returns:
        [T, R] int32, how many tokens before this one go there, -1 where it does not; and [R] int32, how many go.
    """
    num_tokens, num_ranks = is_token_in_rank.shape
    numbers, counts = _empty_positions(is_token_in_rank)
    args = (is_token_in_rank.view(torch.uint8), numbers, counts, num_tokens, num_ranks)
    launch(_positions_kernel, num_ranks, args, TILE=_SCAN_TOKENS)
    return numbers, counts


def positions_torch(is_token_in_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `positions`."""
    numbers = is_token_in_rank.cumsum(0, dtype=torch.int32) - 1
    return torch.where(is_token_in_rank, numbers, -1).int(), is_token_in_rank.sum(0, dtype=torch.int32)


def node_positions(
    is_token_in_rank: torch.Tensor, node_numbers: torch.Tensor, node_counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the tokens of each rank and of each node, to which goes what goes to any of its ranks.

    Args:
        is_token_in_rank: [T, R] bool, contiguous.
        node_numbers: [T, N] int32, written: as the numbers of ranks.
        node_counts: [N, C] int32, contiguous, written: how many go there, the same in every channel.

    Returns:
        Numbers [T, R] and counts [R], as of `positions`.
    """
    (num_tokens, num_ranks), (num_nodes, num_channels) = is_token_in_rank.shape, node_counts.shape
    numbers, counts = _empty_positions(is_token_in_rank)
    word, _ = widest_word(num_ranks // num_nodes, is_token_in_rank.data_ptr())
    num_words = num_ranks // word.itemsize
    masks = (is_token_in_rank.view(torch.uint8), is_token_in_rank.view(word))
    args = (*masks, numbers, counts, node_numbers, node_counts, num_tokens, num_ranks, num_words, num_channels)
    num_blocks = num_ranks + num_nodes
    launch(_node_positions_kernel, num_blocks, args, (word,), WORDS=num_words // num_nodes, TILE=_SCAN_TOKENS)
    return numbers, counts


def node_positions_torch(
    is_token_in_rank: torch.Tensor, node_numbers: torch.Tensor, node_counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of `node_positions`."""
    numbers, counts = positions_torch(is_token_in_rank.unflatten(1, (node_counts.size(0), -1)).any(2))
    node_numbers.copy_(numbers)
    node_counts.copy_(counts[:, None])
    return positions_torch(is_token_in_rank)


def _empty_positions(is_token_in_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Room for numbers [T, R] and counts [R] int32."""
    num_tokens, num_ranks = is_token_in_rank.shape
    new = is_token_in_rank.new_empty
    return new(num_tokens, num_ranks, dtype=torch.int32), new(num_ranks, dtype=torch.int32)


@jit
def _positions_kernel(mask, numbers, counts, num_tokens: tl.int32, num_ranks: tl.int32, TILE: tl.constexpr):
    """One destination a program.

    Example: the column `[1, 0, 1]` gives numbers `[0, -1, 1]` and count 2.
    """
    _number(mask, numbers, counts, tl.program_id(0), num_tokens, num_ranks, 1, 1, TILE)


@jit
def _node_positions_kernel(
    mask,
    words,
    numbers,
    counts,
    node_numbers,
    node_counts,
    num_tokens: tl.int32,
    num_ranks: tl.int32,
    num_words: tl.int32,
    num_channels: tl.int32,
    WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """One rank a program, and then one node, whose ranks are looked at by the word: the mask is also `words`.

    Example: the ranks `[[1, 0], [0, 0], [1, 1]]` of one node have counts `[2, 1]`; its numbers are `[0, -1, 1]`, and in
    two channels its count is `[2, 2]`.
    """
    program = tl.program_id(0)
    if program < num_ranks:
        _number(mask, numbers, counts, program, num_tokens, num_ranks, 1, 1, TILE)
    else:
        node = program - num_ranks
        _number(words, node_numbers, node_counts, node, num_tokens, num_words, num_channels, WORDS, TILE)


@triton.jit
def _number(
    mask, numbers, counts, group, num_tokens, num_words, num_channels, SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Number the tokens with a mark in a group of `SIZE` words, tile by tile, and count them, for all channels."""
    count = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < num_tokens
        cells = mask + tokens.to(tl.int64) * num_words + group * SIZE
        marks = tl.load(cells, mask=is_token, other=0)
        for word in tl.static_range(1, SIZE):  # unrolled: no look waits for another
            marks = marks | tl.load(cells + word, mask=is_token, other=0)
        goes = (marks != 0).to(tl.int32)
        sums = tl.cumsum(goes, 0)
        places = tokens.to(tl.int64) * (num_words // SIZE) + group
        tl.store(numbers + places, tl.where(goes > 0, count + sums - 1, -1), mask=is_token)
        count += tl.sum(goes)
    for channel in range(num_channels):
        tl.store(counts + group * num_channels + channel, count)
