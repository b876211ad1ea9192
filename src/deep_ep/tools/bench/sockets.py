"""The floor across nodes: bytes over plain sockets, one between each two ranks of a rail."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Mapping

import torch.distributed as dist

from ... import env
from ...control import Control
from ...errors import EPError
from ...topology import find_topology
from ...transport.rendezvous import connect_rail


class PlainSockets:
    """Connections to the other ranks of the rail. All ranks make them together."""

    def __init__(self) -> None:
        control = Control(dist.group.WORLD, None, env.TIMEOUT_SECS.get())
        topology = find_topology(control)
        rail = list(range(topology.local_rank, topology.num_ranks, topology.ranks_per_node))
        self._connections, problem = connect_rail(control, rail)
        if problem is not None:
            raise EPError(f"bench internode: the floor's sockets cannot be made: {problem}")
        for connection in self._connections.values():
            connection.settimeout(None)

    def copying(self, num_out: Mapping[int, int], num_in: Mapping[int, int]) -> Callable[[], None]:
        """What sends and receives so many bytes, by rank, all at once.

        Args:
            num_out: Bytes to send.
            num_in: Bytes to receive.
        """
        near = _warm(max(num_out.values(), default=0))
        far = {rank: _warm(num_bytes) for rank, num_bytes in num_in.items()}

        def copy() -> None:
            threads = []
            for rank, connection in self._connections.items():
                threads.append(threading.Thread(target=connection.sendall, args=(near[: num_out[rank]],)))
                threads.append(threading.Thread(target=_receive, args=(connection, far[rank])))
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()

        return copy

    def close(self) -> None:
        """Close them."""
        for connection in self._connections.values():
            connection.close()


def _warm(num_bytes: int) -> memoryview:
    """Memory whose pages are all there: zeros would be left to the first one who writes."""
    return memoryview(bytearray(b"\1") * num_bytes)


def _receive(connection: socket.socket, target: memoryview) -> None:
    while target.nbytes:
        num_bytes = connection.recv_into(target)
        if not num_bytes:
            raise EPError("bench internode: the other end of a plain socket has gone")
        target = target[num_bytes:]
