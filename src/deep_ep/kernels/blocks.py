"""From slots to blocks: the tokens of each peer, and where tiles of tokens cut them.

The slots of a column ascend without gaps, so the rows of a rank's tokens lie side by side at a peer: one block each.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def peer_tokens(is_wanted: torch.Tensor) -> list[torch.Tensor]:
    """The tokens of each peer, ascending int64.

    Args:
        is_wanted: [R, T] bool.

    Example:
        `[[1, 0, 1], [0, 0, 0]]` gives `[[0, 2], []]`.
    """
    counts = is_wanted.sum(1).tolist()
    return list(torch.split_with_sizes(is_wanted.nonzero()[:, 1], counts))


def tile_bounds(token_idx: Sequence[torch.Tensor], num_tokens: int, tile: int) -> list[list[int]]:
    """For each peer, the first row of each tile of tokens, and at the end the number of rows.

    Args:
        token_idx: The tokens of each peer, ascending.
        num_tokens: T.
        tile: Tokens of a tile.

    Example:
        Tokens `[0, 2, 5]` of 6 in tiles of 2 are cut at `[0, 1, 2, 3]`.
    """
    if num_tokens <= tile or not token_idx:
        return [[0, one.numel()] for one in token_idx]
    # One search for all peers, of which there may be hundreds: the tokens of each follow on those of the one before.
    device = token_idx[0].device
    counts = torch.tensor([one.numel() for one in token_idx], device=device)
    starts = torch.arange(0, num_tokens + tile, tile, device=device)
    firsts = torch.arange(len(token_idx), device=device) * int(starts[-1])
    keys = torch.cat(list(token_idx)) + torch.repeat_interleave(firsts, counts)
    cuts = torch.searchsorted(keys, firsts[:, None] + starts) - (counts.cumsum(0) - counts)[:, None]
    return cuts.tolist()
