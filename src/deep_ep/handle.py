"""What a dispatch leaves for its combine and for cached dispatches: a tuple of ordinary tensors.

Callers keep handles, clone them, and look into them by position, so a handle is a tuple (with names), pins no window
memory, and is all there is: no state is kept beside it. A plain tuple of the same tensors does as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from operator import gt
from typing import Any, NamedTuple

import torch

from .errors import EPOverflow
from .tensors import ordinary


class Handle(NamedTuple):
    """The handle of a dispatch inside one node. T tokens sent, n rows received, R ranks, C channels.

    Attributes:
        rank_prefix_matrix: [R, R] int32, `[s, d]` rows that rank d receives from ranks 0..s.
        channel_prefix_matrix: [R, C] int32, kept for its shape: we have no channels. On the CPU all elements are the
            number of the dispatch, or 0; on a GPU 0.
        recv_channel_prefix_matrix: [R, C] int32, the same as `channel_prefix_matrix`.
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

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the handle."""
        return self

    @property
    def num_tokens(self) -> int:
        """T, the tokens that were dispatched."""
        return self.send_head.shape[0]

    @property
    def num_rows(self) -> int:
        """n, the rows that were received (or `num_worst_tokens`)."""
        return self.recv_src_idx.shape[0]


class ColumnHandle(NamedTuple):
    """The handle of a combine of V2, which adds the rows of a token in the order of its columns. Callers never see one.

    Attributes:
        compact: The handle of the dispatch.
        owners: [T, K] int32, the rank of each column; anything where `slots` is -1.
        slots: [T, K] int32, the compact row of the token at that rank, in the highest column of the rank; -1: none.
        num_rows: Rows that this rank gives.
        expanded_rows: [n, K] int32, which of them belong to each row of the dispatch; -1: none. None: they are the rows
            of the dispatch.
        is_reduced_once: See `Agreement`.
        rows: [T, K] int32, the expanded row of each column at that rank; -1: none. None: the dispatch was compact.
        alignment: To which the rows of an expert are rounded up; 0: the dispatch was compact.
        plan: Of an expanded dispatch on the CPU, its `SendPlan`, whose number tells dispatches apart; else None.
    """

    compact: Handle
    owners: torch.Tensor
    slots: torch.Tensor
    num_rows: int
    expanded_rows: torch.Tensor | None = None
    is_reduced_once: bool = False
    rows: torch.Tensor | None = None
    alignment: int = 0
    plan: Any = None

    @property
    def given_slots(self) -> torch.Tensor:
        """[T, K] int32, the row of each column at its rank, if all ranks give rows as this one does."""
        return self.slots if self.expanded_rows is None or self.rows is None else self.rows

    @property
    def num_tokens(self) -> int:
        """T, the tokens that were dispatched."""
        return self.slots.shape[0]

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the handle."""
        others = [one for one in (self.expanded_rows, self.rows) if one is not None]
        return (*self.compact, self.owners, self.slots, *others)

    @property
    def rank_prefix_matrix(self) -> torch.Tensor:
        """`rank_prefix_matrix` of the dispatch's handle."""
        return self.compact.rank_prefix_matrix

    @property
    def recv_channel_prefix_matrix(self) -> torch.Tensor:
        """`recv_channel_prefix_matrix` of the dispatch's handle."""
        return self.compact.recv_channel_prefix_matrix

    @property
    def send_head(self) -> torch.Tensor:
        """`send_head` of the dispatch's handle."""
        return self.compact.send_head

    @property
    def recv_src_idx(self) -> torch.Tensor:
        """`recv_src_idx` of the dispatch's handle."""
        return self.compact.recv_src_idx


class RailHandle(NamedTuple):
    """The handle of a dispatch across nodes.

    T tokens sent, n rows received, R ranks on N nodes of P, C channels, F tokens that this rank forwards inside its
    node: those that the ranks of its rail, itself included, send to the node, by node and then by token.

    Attributes:
        is_token_in_rank: [T, R] bool, the caller's.
        rdma_channel_prefix_matrix: [N, C] int32, tokens sent to each node, the same number for each channel: we have no
            channels, so it is as if all went through channel 0.
        gbl_channel_prefix_matrix: [R, C] int32; zeros, kept for its shape.
        recv_rdma_channel_prefix_matrix: [N, C] int32, all the same number, which tells dispatches apart.
        recv_rdma_rank_prefix_sum: [N] int32, rows forwarded from nodes 0..b.
        recv_gbl_channel_prefix_matrix: [R, C] int32; zeros, kept for its shape.
        recv_gbl_rank_prefix_sum: [R] int32, rows received from ranks 0..s.
        recv_src_meta: [n, 8] uint8, source rank and token index there of each received row, both int32.
        send_rdma_head: [T, N] int32, the position of each token among those that go to a node; -1: it does not.
        send_nvl_head: [F, P] int32, the row that each forwarded token takes at each rank of the node; -1: none. With
            `num_worst_tokens` it has as many rows as F may be; those beyond F are -1.
    """

    is_token_in_rank: torch.Tensor
    rdma_channel_prefix_matrix: torch.Tensor
    gbl_channel_prefix_matrix: torch.Tensor
    recv_rdma_channel_prefix_matrix: torch.Tensor
    recv_rdma_rank_prefix_sum: torch.Tensor
    recv_gbl_channel_prefix_matrix: torch.Tensor
    recv_gbl_rank_prefix_sum: torch.Tensor
    recv_src_meta: torch.Tensor
    send_rdma_head: torch.Tensor
    send_nvl_head: torch.Tensor

    def tensors(self) -> tuple[torch.Tensor, ...]:
        """All tensors of the handle."""
        return self

    @property
    def num_tokens(self) -> int:
        """T, the tokens that were dispatched."""
        return self.send_rdma_head.size(0)

    @property
    def num_rows(self) -> int:
        """n, the rows that were received (or `num_worst_tokens`)."""
        return self.recv_src_meta.size(0)

    @property
    def forwarded_slots(self) -> torch.Tensor:
        """[F, P] int32, a view: the rows of `send_nvl_head` that are in use. The handle must have been filled."""
        return self.send_nvl_head[: int(self.recv_rdma_rank_prefix_sum[-1])]

    @property
    def recv_src_rank(self) -> torch.Tensor:
        """[n] int32, a view: the source rank of each row."""
        return self.recv_src_meta.view(torch.int32)[:, 0]

    @property
    def recv_src_idx(self) -> torch.Tensor:
        """[n] int32, a view: the token index at its source of each row."""
        return self.recv_src_meta.view(torch.int32)[:, 1]


def require_same_ranks(where: str, marked: Any, ranks: tuple[int, ...] | None) -> None:
    """Refuse a handle of a buffer of other ranks. One of another buffer of the same ranks is as good as an own one.

    A dispatch writes the ranks of its group to the attribute `_deep_ep_ranks` of one tensor of the handle, or of an
    `EPHandle` itself. A copy of that tensor has no such attribute, and neither have handles of groups whose ranks are
    not known: they are accepted.

    Args:
        where: The method.
        marked: What has the attribute.
        ranks: The ranks of the buffer's group; None: they are not known.

    Raises:
        ValueError: The handle was made by other ranks.
    """
    made_by = getattr(marked, "_deep_ep_ranks", ranks)
    if made_by is not ranks and made_by is not None and ranks is not None and made_by != ranks:
        raise ValueError(
            f"{where}: `handle` was made by a buffer of ranks {list(made_by)}, this one has ranks {list(ranks)}. "
            "Pass the handle of a dispatch on this buffer"
        )


_ITEMS = [f"handle[{index}]" for index in range(len(RailHandle._fields))]  # as messages name them


def parse_handle(handle: Any, num_ranks: int, device: torch.device, where: str, num_nodes: int = 1) -> Any:
    """Check a handle that a caller hands back.

    Returns:
        A `Handle` on one node, else a `RailHandle`.

    Raises:
        TypeError: It is not a tuple of tensors.
        ValueError: It is of another kind, or a tensor has the wrong shape, dtype or device.
    """
    if not isinstance(handle, (tuple, list)) or not all(isinstance(item, torch.Tensor) for item in handle):
        raise TypeError(
            f"{where}: `handle` must be the tuple of tensors that dispatch returned, got {type(handle).__name__}"
        )
    kind: Any = Handle if num_nodes == 1 else RailHandle
    if len(handle) != len(kind._fields):
        nodes = "one node" if num_nodes == 1 else f"{num_nodes} nodes"
        raise ValueError(
            f"{where}: `handle` must have {len(kind._fields)} items ({nodes}), this one has {len(handle)}. "
            "Pass the handle of a dispatch on this buffer"
        )
    parsed = kind(*(ordinary(where, name, item) for name, item in zip(_ITEMS, handle, strict=False)))
    # Looked at once: a worst-case dispatch across nodes may give a tensor of its handle another size while it runs.
    seen = kind(*(item.shape for item in parsed))
    shapes = _direct_shapes(seen, num_ranks) if num_nodes == 1 else _rail_shapes(seen, num_ranks, num_nodes)
    for name, (shape, dtype) in shapes.items():
        tensor, found = getattr(parsed, name), getattr(seen, name)
        if found != shape or tensor.dtype != dtype or tensor.device != device:
            raise ValueError(
                f"{where}: the `handle`'s `{name}` must be {dtype} {list(shape)} on {device}, "
                f"it is {tensor.dtype} {list(found)} on {tensor.device}. "
                "Pass the handle of a dispatch on this buffer"
            )
    return parsed


def _length(shape: torch.Size) -> int:
    return shape[0] if shape else 0


def _direct_shapes(seen: Any, num_ranks: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What the tensors of a `Handle` must be, given their shapes."""
    num_tokens = _length(seen.send_head)
    return {
        "rank_prefix_matrix": ((num_ranks, num_ranks), torch.int32),
        "recv_src_idx": ((seen.recv_src_idx.numel(),), torch.int32),
        "is_token_in_rank": ((num_tokens, num_ranks), torch.bool),
        "send_head": ((num_tokens, num_ranks), torch.int32),
    }


def _rail_shapes(seen: Any, num_ranks: int, num_nodes: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """What the tensors of a `RailHandle` must be, given their shapes."""
    num_tokens, marks = _length(seen.send_rdma_head), seen.recv_rdma_channel_prefix_matrix
    num_channels = max(1, marks[-1] if marks else 0)
    return {
        "is_token_in_rank": ((num_tokens, num_ranks), torch.bool),
        "rdma_channel_prefix_matrix": ((num_nodes, num_channels), torch.int32),
        "recv_rdma_channel_prefix_matrix": ((num_nodes, num_channels), torch.int32),
        "recv_rdma_rank_prefix_sum": ((num_nodes,), torch.int32),
        "recv_gbl_rank_prefix_sum": ((num_ranks,), torch.int32),
        "recv_src_meta": ((_length(seen.recv_src_meta), 8), torch.uint8),
        "send_rdma_head": ((num_tokens, num_nodes), torch.int32),
        "send_nvl_head": ((_length(seen.send_nvl_head), num_ranks // num_nodes), torch.int32),
    }


_REFUSED = -1  # in the place of a count, or of the number that tells dispatches apart


def mark_refused(handle: Handle | RailHandle) -> None:
    """Mark the handle of a dispatch that all ranks have refused: its caller may have it already."""
    _mark_of(handle).fill_(_REFUSED)


def is_refused(handle: Handle | RailHandle) -> bool:
    """Whether a handle is of a dispatch that was refused. Its tensors must have been filled."""
    return bool(_mark_of(handle)[0, 0] == _REFUSED)


def require_filled(handle: Handle | RailHandle, where: str) -> None:
    """Refuse a call that follows the handle of a dispatch that was refused.

    Raises:
        EPOverflow: The dispatch was refused.
    """
    if is_refused(handle):
        raise refusal(where)


def refusal(where: str) -> EPOverflow:
    """Return the error of a call that follows the handle of a dispatch that was refused."""
    return EPOverflow(
        f"{where}: the dispatch that made this handle was refused, since more rows came than it had memory for: none "
        "were sent. Dispatch again with a larger `num_worst_tokens` (tokens x ranks always suffices), or, if it is one "
        "of an ElasticBuffer, with `do_cpu_sync=True`"
    )


def _mark_of(handle: Handle | RailHandle) -> torch.Tensor:
    return handle.rank_prefix_matrix if isinstance(handle, Handle) else handle.recv_rdma_channel_prefix_matrix


def check_rows(handle: Handle, rank: int, where: str) -> None:
    """Check that a handle counts rows as a dispatch does, and has room for them. Its tensors must have been filled.

    Raises:
        ValueError: It does not.
    """
    prefix = handle.rank_prefix_matrix.tolist()
    _check_ascending(where, "rank_prefix_matrix", prefix)
    _check_count(where, "received rows", prefix[-1][rank], "recv_src_idx", handle.num_rows)
    ends, starts = prefix[rank], prefix[rank - 1] if rank else [0] * len(prefix)
    # Down a column the slots are `start` to `end - 1`, and -1 for all other tokens. The sum of all tells whether they
    # can be: a wrong one among thousands shows, and adding is what a call can spend on it.
    pairs = zip(starts, ends, strict=True)
    # One more than each slot, less 1 for every element: those that are no slots are -1.
    expected = sum((end - start) * (start + end + 1) // 2 for start, end in pairs) - handle.send_head.numel()
    if int(handle.send_head.sum()) != expected:
        raise ValueError(
            f"{where}: the `handle` counts rows {starts} to {ends} of the ranks as those of this rank, its `send_head` "
            "names others. Pass the handle as dispatch returned it"
        )


def check_rail_rows(handle: RailHandle, where: str) -> None:
    """Check the handle of a dispatch across nodes as `check_rows` checks that of one inside a node."""
    rows = handle.recv_gbl_rank_prefix_sum.tolist()
    forwarded = handle.recv_rdma_rank_prefix_sum.tolist()
    _check_ascending(where, "recv_gbl_rank_prefix_sum", [[count] for count in rows])
    _check_ascending(where, "recv_rdma_rank_prefix_sum", [[count] for count in forwarded])
    _check_count(where, "received rows", rows[-1], "recv_src_meta", handle.num_rows)
    _check_count(where, "rows to forward", forwarded[-1], "send_nvl_head", handle.send_nvl_head.size(0))


def _check_ascending(where: str, name: str, rows: Sequence[Sequence[int]]) -> None:
    """Prefix sums of counts, one row below the other, begin at 0 or more and never fall."""
    if min(rows[0]) < 0 or any(any(map(gt, above, below)) for above, below in pairwise(rows)):
        raise ValueError(
            f"{where}: the `handle`'s `{name}` must be prefix sums of counts, it falls, or begins below 0. "
            "Pass the handle as dispatch returned it"
        )


def _check_count(where: str, what: str, counted: int, name: str, num_rows: int) -> None:
    if counted > num_rows:
        raise ValueError(
            f"{where}: the `handle` counts {counted} {what}, but its `{name}` has {num_rows}. "
            "Pass the handle as dispatch returned it"
        )
