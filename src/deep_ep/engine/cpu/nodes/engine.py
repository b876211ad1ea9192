"""The engine of a CPU buffer across nodes: the interface of the one-hop engine, with two-hop calls behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ....config import Config
from ....stream import CommStream
from ....topology import Topology
from ....trace import Trace
from ....transport import Window
from ....transport.mesh import Mesh
from ....transport.message import Rail
from ...payload import Payload, Routing
from ..engine import CpuEngine
from .chain import CpuNodesChain
from .combine import CpuNodesCombine
from .dispatch import CpuNodesDispatch


class CpuNodesEngine(CpuEngine):
    """Dispatch and combine over a node's window and the rail.

    Args:
        window: The node's window.
        rail: The links to other nodes.
        topology: Where this rank stands.
        number: Tells buffers apart; the same on all ranks.
        stream: Where communication runs.
        mesh: The links of low-latency calls; None: there are none.
    """

    def __init__(
        self,
        window: Window,
        rail: Rail,
        topology: Topology,
        number: int,
        stream: CommStream,
        mesh: Mesh | None = None,
    ):
        super().__init__(window, stream)
        self.rail = rail
        self.mesh = mesh
        self._topology = topology
        self._rail_chain = self.chain = CpuNodesChain(window, rail, topology, number, mesh)
        self._config: Config | None = None

    def tune(self, config: Config | None) -> None:
        """Take the chunk sizes of the next call from a config; None: choose them by the size of the rows."""
        self._config = config

    def start_trace(self, trace: Trace) -> None:
        """Record all further calls in a trace, and the messages of the rail."""
        super().start_trace(trace)
        self.rail.start_trace(trace)

    def stats(self) -> dict[str, Any]:
        """Return the counters of the calls so far, and of the rail."""
        wait_secs, first = [0.0] * self._topology.num_ranks, self.window.group_ranks.first_rank
        for node, link in self.rail.links.items():
            wait_secs[self.rail.rank_of(node)] = link.wait_secs
        for peer in self.window.peers:
            wait_secs[first + peer.rank] = peer.wait_secs
        numbers = {**super().stats(), "wait_secs": wait_secs, "rail": self.rail.stats()}
        if self.mesh is not None:
            for rank, sender in self.mesh.senders.items():
                wait_secs[rank] += sender.link.wait_secs
            numbers["mesh"] = self.mesh.stats()
        return numbers

    def stop(self) -> None:
        """Wait for everything that is queued, and close."""
        self.stream.stop()
        self.window.close()
        self.rail.close()
        if self.mesh is not None:
            self.mesh.close()  # last: it waits until what is queued has left

    def _dispatch_steps(
        self, operation: str, payload: Payload, routing: Routing | None, num_sms: int | None
    ) -> CpuNodesDispatch:
        return CpuNodesDispatch(self._rail_chain, operation, payload, routing, self._config)

    def _combine_steps(
        self, parts: Sequence[torch.Tensor], handle: Any, biases: Sequence[torch.Tensor], num_sms: int | None
    ) -> CpuNodesCombine:
        return CpuNodesCombine(self._rail_chain, parts, biases, self._config)
