"""The order of the calls of a CPU buffer across nodes, and how their failures are reported."""

from __future__ import annotations

import zlib

from ....topology import Topology
from ....transport import Refusal, Window
from ....transport.mesh import Mesh
from ....transport.message import Rail, Wait
from ..call import Call, Chain


class CpuNodesChain(Chain):
    """The calls of a buffer across nodes, one after the other.

    Args:
        window: The node's window.
        rail: The links to other nodes.
        topology: Where this rank stands.
        number: Tells buffers apart; the same on all ranks.
        mesh: The links of low-latency calls; None: there are none.
    """

    is_told_late = True

    def __init__(self, window: Window, rail: Rail, topology: Topology, number: int, mesh: Mesh | None = None):
        super().__init__(window)
        self.rail = rail
        self.mesh = mesh
        window.look = rail.look  # other nodes' failures come over the rail, also while this node is waited for
        self.topology = topology
        self._number = number

    def refuse(self, reason: str) -> Refusal:
        """Report to the peers and to the rail that this rank does not make the next call. Runs on the comm stream."""
        refusal = super().refuse(reason)
        self.rail.refuse(refusal)
        return refusal

    def fail(self, error: BaseException, call: Call | None, *, is_foreign: bool = False) -> None:
        """Report a failed call to the node, the mesh and the rail, and close: a call that fails on one rank fails on
        all ranks.
        """
        super().fail(error, call, is_foreign=is_foreign)
        self.tell_failure()

    def tell_failure(self) -> None:
        """Report to the node, and to the ranks of other nodes, that this rank has failed, if it has."""
        super().tell_failure()
        if self.window.failure is not None:
            if self.mesh is not None:
                self.mesh.fail(self.window.failure)
            # Last: it waits until its messages have left.
            self.rail.fail(self.window.failure)

    def waiting(self, call: Call) -> Wait:
        """Return how a call waits on the rail: its time limit, and what else is checked meanwhile."""
        window = self.window
        return Wait(
            self.rail,
            str(call),
            call.epoch,
            lambda: window.raise_if_peer_failed(call.epoch, call.operation),
            lambda is_waiting: window.board.waiting.store_release(int(is_waiting)),
        )

    def mark(self, epoch: int) -> int:
        """Return a number that identifies a dispatch among those of all buffers.

        It is the same on all ranks, and never 0.
        """
        # Of 30 bits: handles have it as int32, where -1 marks a dispatch that was refused.
        return zlib.crc32(f"{self._number} {epoch}".encode()) >> 2 | 1
