"""Descriptors handed over Unix sockets: for hosts where `/proc/<pid>/fd` of a peer cannot be opened.

That is so between containers with process namespaces of their own. Sockets in the abstract namespace leave no file
behind.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct
import threading
import uuid

from ..control import Control

_PEERCRED = struct.Struct("3i")  # pid, uid, gid


def exchange_fds(control: Control, fd: int) -> list[int]:
    """Give `fd` to every peer and get theirs. All ranks call it together.

    Returns:
        A descriptor for each rank, open in this process; -1 for this rank.

    Raises:
        OSError: A peer could not be reached, or did not send one.
    """
    address = f"\0deep_ep-{uuid.uuid4().hex}"
    problem: OSError | None = None
    fds: list[int] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(address)
        server.listen(control.num_ranks)
        server.settimeout(control.limit_secs)
        addresses = control.gather(address, "exchanging socket addresses")
        giver = threading.Thread(target=_give, args=(server, fd, control.num_ranks - 1), daemon=True)
        giver.start()
        try:
            for rank, peer in enumerate(addresses):
                fds.append(-1 if rank == control.rank else _take(peer, control.limit_secs))
        except OSError as error:
            problem = error
        control.gather(None, "exchanging descriptors")  # the sockets must stay until all have what they need
    if problem is not None:
        for taken in fds:
            with contextlib.suppress(OSError):
                os.close(taken)
        raise problem
    return fds


def _give(server: socket.socket, fd: int, num_peers: int) -> None:
    given = 0
    while given < num_peers:
        try:
            connection, _ = server.accept()
        except OSError:  # the limit, or the server was closed: who still waits will say so
            return
        with connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
            if _PEERCRED.unpack(credentials)[1] == os.getuid():  # abstract names are open to all users of the host
                socket.send_fds(connection, [b"fd"], [fd])
                given += 1


def _take(address: str, limit_secs: float) -> int:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(limit_secs)
        connection.connect(address)
        _, fds, _, _ = socket.recv_fds(connection, 2, 1)
    if not fds:
        raise OSError("the peer sent no descriptor; do all ranks belong to one user?")
    os.set_inheritable(fds[0], False)
    return fds[0]
