"""Bytes of each rank's links and of each node, from how often a router reaches them.

Normal mode: a token crosses the network once to each other node that it goes to, to the rank of its rail there (the
one with its sender's local number), which hands it on inside the node. Low latency: it goes straight to the rank of
each of its experts, once for each.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from .formats import metadata_bytes, row_bytes
from .routing import Reach


class Traffic(NamedTuple):
    """Expected numbers of one call, where each rank has as many tokens.

    Attributes:
        rank_rows: [R] float64, rows that each rank receives, its own included.
        node_rows: [N] float64, rows that come to each node from others; of a combine, that go back.
        link_bytes: [R] float64, what each rank receives over the links of its node.
        network_in_bytes: [R] float64, what each rank receives from other nodes.
        network_out_bytes: [R] float64, what each rank sends to other nodes.
    """

    rank_rows: torch.Tensor
    node_rows: torch.Tensor
    link_bytes: torch.Tensor
    network_in_bytes: torch.Tensor
    network_out_bytes: torch.Tensor

    @property
    def rank_load(self) -> float:
        """Rows of the busiest rank over the mean."""
        return _imbalance(self.rank_rows)

    @property
    def network_load(self) -> float:
        """Bytes of the busiest network interface over the mean, of the busier direction."""
        return max(_imbalance(self.network_in_bytes), _imbalance(self.network_out_bytes))


def _imbalance(values: torch.Tensor) -> float:
    mean = float(values.mean())
    return float(values.max()) / mean if mean else 1.0


def find_traffic(reach: Reach, mode: str, op: str, dtype: str, num_tokens: int, hidden: int, topk: int) -> Traffic:
    """Count the bytes of a dispatch. A combine sends the same rows the other way: in and out change places.

    Args:
        reach: Where tokens go.
        mode: `low_latency`, or any other for rows that are sent once to each rank.
        op: `dispatch` or `combine`.
        dtype: Of the rows.
        num_tokens: T, of each rank.
        hidden: H.
        topk: K.
    """
    num_ranks, num_nodes = reach.ranks.numel(), reach.nodes.numel()
    per_node = num_ranks // num_nodes
    size = row_bytes(dtype, hidden) + metadata_bytes(mode, op, topk)
    if mode == "low_latency":
        rank_rows = num_tokens * num_ranks * reach.selections
        from_others = rank_rows * (1 - per_node / num_ranks)
        link_rows = (rank_rows - from_others) * (per_node - 1) / per_node
        to_node = reach.selections.view(num_nodes, per_node).sum(1)
        network_in = from_others
    else:
        rank_rows = num_tokens * num_ranks * reach.ranks
        link_rows = rank_rows * (per_node - 1) / per_node
        to_node = reach.nodes
        network_in = (num_tokens * (num_nodes - 1) * to_node).repeat_interleave(per_node)
    network_out = (num_tokens * (to_node.sum() - to_node)).repeat_interleave(per_node)
    node_rows = network_in.view(num_nodes, per_node).sum(1)
    if op == "combine":
        network_in, network_out = network_out, network_in
    return Traffic(rank_rows, node_rows, link_rows * size, network_in * size, network_out * size)
