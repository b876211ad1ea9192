"""Copies of remote ranks' low-latency memory: `docs/decisions/0014-low-latency-over-nvshmem.md`.

Behind this rank's own memory, in the same symmetric piece, lie

    copies    [R - P] of them, in the order of ranks: words as in front of a memory, and four sets
    tables    [R, MAX_EXPERTS] int64: tables of a combine as remote ranks are to see them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ....kernels._triton import Launch
from ....kernels.low_latency import combine, dispatch, remote_copy
from ....kernels.low_latency.words import KernelCall, LowLatencyContext
from ....sizing import ALIGNMENT_BYTES, align
from ....topology import Topology
from .. import geometry


class RemoteRanks(NamedTuple):
    """The ranks of other nodes, and how a failure is sent to them.

    Attributes:
        topology: Where this rank stands.
        pes: NVSHMEM's number of each rank.
        tell: Launches the kernel that sends this rank's failure to remote ranks, if it has failed by the time the
            kernel runs.
    """

    topology: Topology
    pes: Sequence[int]
    tell: Callable[[], None]


class Copier(NamedTuple):
    """The kernels between the send phase of a call and its receive phase.

    Attributes:
        rows: Copies the rows; None: there are none.
        num_row_blocks: Its grid.
        posts: Copies the words, and signals.
        num_post_blocks: Its grid.
        takes_layout: The kernel that copies the rows takes a combine's `layout_range`.
    """

    rows: Launch | None
    num_row_blocks: int
    posts: Launch
    num_post_blocks: int
    takes_layout: bool = False

    def launch(self, layout_range: torch.Tensor) -> None:
        """Copy a call to the remote ranks.

        Args:
            layout_range: Of a combine's handle; otherwise any tensor of words.
        """
        if self.rows is not None:
            self.rows(self.num_row_blocks, (layout_range,) if self.takes_layout else ())
        self.posts(self.num_post_blocks, (layout_range,))


class Copies:
    """This rank's copies of remote ranks' memory, and the kernels that fill the remote ranks' copies of its own.

    Args:
        remote: The remote ranks.
        board_bytes: Bytes of the words in front of a memory.
        num_bytes: Bytes of low-latency memory, the same on all ranks.
        max_experts: Experts that a table can hold.
    """

    def __init__(self, remote: RemoteRanks, board_bytes: int, num_bytes: int, max_experts: int):
        topology = remote.topology
        self._remote = remote
        self._num_ranks, self._ranks_per_node = topology.num_ranks, topology.ranks_per_node
        self._memory_bytes = align(board_bytes + num_bytes, ALIGNMENT_BYTES)
        self._copy_bytes = align(board_bytes + geometry.copy_bytes(num_bytes, self._num_ranks), ALIGNMENT_BYTES)
        self._table_bytes = 8 * self._num_ranks * max_experts
        self._context: remote_copy.CopyContext | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of this rank's memory, with the copies."""
        return self._tables + self._table_bytes

    @property
    def _tables(self) -> int:
        return self._memory_bytes + (self._num_ranks - self._ranks_per_node) * self._copy_bytes

    def addresses(self, base: int, local: Sequence[int]) -> list[int]:
        """Where kernels find each rank's memory: of remote ranks, the copies.

        Args:
            base: Address of this rank's memory.
            local: Addresses of the ranks' memory; those of remote ranks are not looked at.
        """
        node, found = self._remote.topology.node, []
        for rank, address in enumerate(local):
            there = rank // self._ranks_per_node
            index = rank - (self._ranks_per_node if there > node else 0)
            found.append(address if there == node else base + self._memory_bytes + index * self._copy_bytes)
        return found

    def start(self, context: LowLatencyContext, base: int) -> None:
        """Set the context of the words, and compile what a barrier needs."""
        pes = torch.tensor(list(self._remote.pes), dtype=torch.int32, device=context.state.device)
        copies, tables = base + self._memory_bytes, base + self._tables
        self._context = remote_copy.CopyContext(context, base, copies, self._copy_bytes, tables, pes)
        remote_copy.prepare_all(self._context)

    def for_dispatch(self, call: KernelCall, sizes: dispatch.DispatchSizes) -> Copier:
        """Return the copier of a dispatch. Its kernel for rows takes no further argument."""
        rows = remote_copy.dispatch_copier(self._started, call, sizes)
        return Copier(*rows, *remote_copy.poster(self._started, call, remote_copy.DISPATCH, sizes))

    def for_combine(self, call: KernelCall, sizes: combine.CombineSizes) -> Copier:
        """Return the copier of a combine. Its kernel for rows takes `layout_range`."""
        rows = remote_copy.combine_copier(self._started, call, sizes)
        return Copier(*rows, *remote_copy.poster(self._started, call, remote_copy.COMBINE, sizes), takes_layout=True)

    def for_barrier(self, call: KernelCall) -> Copier:
        """Return the copier of a barrier."""
        return Copier(None, 0, *remote_copy.poster(self._started, call, remote_copy.BARRIER))

    def tell(self) -> None:
        """After a wait: have this rank's failure sent to remote ranks, if the wait has failed."""
        self._remote.tell()

    @property
    def _started(self) -> remote_copy.CopyContext:
        assert self._context is not None
        return self._context
