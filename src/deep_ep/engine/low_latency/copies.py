"""Copies of far ranks' low-latency memory: `docs/decisions/0014-low-latency-over-nvshmem.md`.

Behind this rank's own memory, in the same symmetric piece, lie

    copies    [R - P] of them, in the order of ranks: words as in front of a memory, and four sets
    tables    [R, MAX_EXPERTS] int64: tables of a combine as far ranks are to see them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ...kernels._triton import Launch
from ...kernels.low_latency import carry, combine, dispatch
from ...kernels.low_latency.words import Call, Spots
from ...sizing import ALIGNMENT_BYTES, align
from ...topology import Topology
from . import geometry


class FarRanks(NamedTuple):
    """Who the ranks of other nodes are, and how they hear of a failure.

    Attributes:
        topology: Where this rank stands.
        pes: NVSHMEM's number of each rank.
        tell: Launches what carries this rank's failure to far ranks, if there is one by then.
    """

    topology: Topology
    pes: Sequence[int]
    tell: Callable[[], None]


class Carrier(NamedTuple):
    """What goes between the send half of a call and its receive half.

    Attributes:
        rows: Carries the rows; None: there are none.
        num_row_blocks: Its grid.
        posts: Carries the words, and signals.
        num_post_blocks: Its grid.
        takes_layout: What carries the rows takes a combine's `layout_range`.
    """

    rows: Launch | None
    num_row_blocks: int
    posts: Launch
    num_post_blocks: int
    takes_layout: bool = False

    def launch(self, layout_range: torch.Tensor) -> None:
        """Carry a call to the far ranks.

        Args:
            layout_range: Of a combine's handle; otherwise any tensor of words.
        """
        if self.rows is not None:
            self.rows(self.num_row_blocks, (layout_range,) if self.takes_layout else ())
        self.posts(self.num_post_blocks, (layout_range,))


class Copies:
    """This rank's copies of far ranks' memory, and what fills the far ranks' copies of its own.

    Args:
        far: The far ranks.
        board_bytes: Of the words in front of a memory.
        num_bytes: Of low-latency memory, the same on all ranks.
        max_experts: Room of a table.
    """

    def __init__(self, far: FarRanks, board_bytes: int, num_bytes: int, max_experts: int):
        topology = far.topology
        self._far = far
        self._num_ranks, self._num_near = topology.num_ranks, topology.ranks_per_node
        self._memory_bytes = align(board_bytes + num_bytes, ALIGNMENT_BYTES)
        self._copy_bytes = align(board_bytes + geometry.copy_bytes(num_bytes, self._num_ranks), ALIGNMENT_BYTES)
        self._table_bytes = 8 * self._num_ranks * max_experts
        self._couriers: carry.Couriers | None = None

    @property
    def room(self) -> int:
        """Bytes of this rank's memory, with the copies."""
        return self._tables + self._table_bytes

    @property
    def _tables(self) -> int:
        return self._memory_bytes + (self._num_ranks - self._num_near) * self._copy_bytes

    def addresses(self, base: int, near: Sequence[int]) -> list[int]:
        """Where kernels find each rank's memory: of far ranks, the copies.

        Args:
            base: Address of this rank's memory.
            near: Addresses of the ranks' memory; those of far ranks are not looked at.
        """
        node, found = self._far.topology.node, []
        for rank, address in enumerate(near):
            there = rank // self._num_near
            index = rank - (self._num_near if there > node else 0)
            found.append(address if there == node else base + self._memory_bytes + index * self._copy_bytes)
        return found

    def start(self, spots: Spots, base: int) -> None:
        """Know the words, and compile what a barrier needs."""
        pes = torch.tensor(list(self._far.pes), dtype=torch.int32, device=spots.state.device)
        copies, tables = base + self._memory_bytes, base + self._tables
        self._couriers = carry.Couriers(spots, base, copies, self._copy_bytes, tables, pes)
        carry.prepare_all(self._couriers)

    def for_dispatch(self, call: Call, sizes: dispatch.Sizes) -> Carrier:
        """What carries a dispatch. Its rows' kernel takes nothing."""
        rows = carry.dispatch_carrier(self._started, call, sizes)
        return Carrier(*rows, *carry.poster(self._started, call, carry.DISPATCH, sizes))

    def for_combine(self, call: Call, sizes: combine.Sizes) -> Carrier:
        """What carries a combine. Its rows' kernel takes `layout_range`."""
        rows = carry.combine_carrier(self._started, call, sizes)
        return Carrier(*rows, *carry.poster(self._started, call, carry.COMBINE, sizes), takes_layout=True)

    def for_barrier(self, call: Call) -> Carrier:
        """What carries a barrier."""
        return Carrier(None, 0, *carry.poster(self._started, call, carry.BARRIER))

    def tell(self) -> None:
        """Behind a wait: have far ranks hear of it if it has failed."""
        self._far.tell()

    @property
    def _started(self) -> carry.Couriers:
        assert self._couriers is not None
        return self._couriers
