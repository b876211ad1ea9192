"""What a dispatch leaves for its combine and for cached dispatches: a tuple of ordinary tensors.

Callers keep handles, clone them, and look into them by position, so a handle is a plain tuple, pins no window memory,
and is all there is: no state is kept beside it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch


class Handle(NamedTuple):
    """The handle of a dispatch inside one node. T tokens sent, n rows received, R ranks, C channels.

    Attributes:
        rank_prefix_matrix: [R, R] int32, `[s, d]` rows that rank d receives from ranks 0..s.
        channel_prefix_matrix: [R, C] int32; we have no channels: zeros, kept for its shape.
        recv_channel_prefix_matrix: [R, C] int32; likewise.
        recv_src_idx: [n] int32, token index at its source of each received row.
        is_token_in_rank: [T, R] bool, the caller's.
        send_head: [T, R] int32, the row that each token takes at each destination; -1: it is not sent there.
    """

    rank_prefix_matrix: torch.Tensor
    channel_prefix_matrix: torch.Tensor
    recv_channel_prefix_matrix: torch.Tensor
    recv_src_idx: torch.Tensor
    is_token_in_rank: torch.Tensor
    send_head: torch.Tensor

    @property
    def num_tokens(self) -> int:
        """T, the tokens that were dispatched."""
        return self.send_head.size(0)

    @property
    def num_rows(self) -> int:
        """n, the rows that were received (or `num_worst_tokens`)."""
        return self.recv_src_idx.size(0)


def parse_handle(handle: Any, num_ranks: int, device: torch.device, where: str) -> Handle:
    """Check a handle that a caller hands back.

    Raises:
        TypeError: It is not a tuple of six tensors.
        ValueError: A tensor has the wrong shape, dtype or device.
    """
    if not isinstance(handle, (tuple, list)) or not all(isinstance(item, torch.Tensor) for item in handle):
        raise TypeError(
            f"{where}: `handle` must be the tuple of tensors that dispatch returned, got {type(handle).__name__}"
        )
    if len(handle) != len(Handle._fields):
        raise ValueError(
            f"{where}: `handle` must have {len(Handle._fields)} items (one node), this one has {len(handle)}. "
            "Pass the handle of a dispatch on this buffer"
        )
    parsed = Handle(*handle)
    num_tokens = parsed.send_head.size(0) if parsed.send_head.dim() else 0
    shapes = {
        "rank_prefix_matrix": ((num_ranks, num_ranks), torch.int32),
        "recv_src_idx": ((parsed.recv_src_idx.numel(),), torch.int32),
        "is_token_in_rank": ((num_tokens, num_ranks), torch.bool),
        "send_head": ((num_tokens, num_ranks), torch.int32),
    }
    for name, (shape, dtype) in shapes.items():
        tensor = getattr(parsed, name)
        if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"{where}: the `handle`'s `{name}` must be {dtype} {list(shape)} on {device}, "
                f"it is {tensor.dtype} {list(tensor.shape)} on {tensor.device}. "
                "Pass the handle of a dispatch on this buffer"
            )
    return parsed


def check_rows(handle: Handle, rank: int, where: str) -> None:
    """Check that a handle has room for the rows that it counts. Its tensors must have been filled.

    Raises:
        ValueError: It has not.
    """
    num_rows = handle.rank_prefix_matrix.tolist()[-1][rank]
    if num_rows > handle.num_rows:
        raise ValueError(
            f"{where}: the `handle` counts {num_rows} received rows, but its `recv_src_idx` has {handle.num_rows}. "
            "Pass the handle as dispatch returned it"
        )
