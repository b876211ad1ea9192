"""The last step of a combine across nodes: the sums of all nodes are added as they come."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from ....kernels.reduce import RowSums, tokens_per_unit
from ..call import Chain
from .routes import CpuNodesRoutes

_LEAST_UNITS = 2  # worth adding up at once


class Totals:
    """The sums of a rank's tokens: one for each node, which come in order, and the total.

    Args:
        chain: Where memory comes from.
        routes: The rows that each rank sends.
        slots: [T, nodes] int32, where a token's sum lies among those of its node; -1: it was not there.
        sections: For each section the tensor [T, columns] to fill, and its biases.
    """

    def __init__(
        self,
        chain: Chain,
        routes: CpuNodesRoutes,
        slots: torch.Tensor,
        sections: Sequence[tuple[torch.Tensor, Sequence[torch.Tensor]]],
    ):
        counts = routes.num_out
        self._sections = sections
        self._sums = [[chain.result((count, out.size(1)), out.dtype) for out, _ in sections] for count in counts]
        self._tokens = [routes.tokens_to(node).tolist() for node in range(len(counts))]
        self._num_there = [0] * len(counts)
        self._num_tokens, self._num_done = slots.size(0), 0
        shifts = [0] * len(counts)
        self._unit = tokens_per_unit(sections[0][0].size(1), sections[0][0].dtype)
        make = partial(RowSums, scratch=chain.scratch, unit=self._unit)
        self._totals = [
            make([sums[index] for sums in self._sums], slots, shifts, biases)
            for index, (_, biases) in enumerate(sections)
        ]

    def target(self, node: int, first: int, last: int) -> list[torch.Tensor]:
        """Return, for each section, where sums [first, last) of a node are to be written."""
        return [sums[first:last] for sums in self._sums[node]]

    def note_arrived(self, node: int, count: int) -> None:
        """Note that the first sums of a node have arrived, and add up the tokens whose sums are complete."""
        self._num_there[node] = count
        # The first token that still lacks the sum of a node.
        ready = min(
            tokens[there] if there < len(tokens) else self._num_tokens
            for tokens, there in zip(self._tokens, self._num_there, strict=True)
        )
        ready -= ready % self._unit  # sums are planned for whole units
        if ready - self._num_done >= _LEAST_UNITS * self._unit:
            self._add_up(ready)

    def finish(self) -> None:
        """Add up the remaining tokens. All sums must have arrived."""
        self._add_up(self._num_tokens)

    def _add_up(self, end: int) -> None:
        """Add the biases and then the nodes' sums, in ascending order of nodes."""
        begin, self._num_done = self._num_done, end
        for totals, (out, _) in zip(self._totals, self._sections, strict=True):
            totals.sum(out[begin:end], begin)
