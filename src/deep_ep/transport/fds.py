"""Descriptors handed over Unix sockets: for hosts where `/proc/<pid>/fd` of a peer cannot be opened.

That is so between containers with process namespaces of their own. Sockets in the abstract namespace leave no file
behind.

No rank blocks on a socket. A gather separates what one rank does from what another rank needs of it: all listen; all
connect, which needs no answer; all accept and send; all read what has been sent. So a rank that cannot do its part
reports that in the next gather, and no rank waits for it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import struct
import uuid

from ..control import Control, PeerMissing
from .memory import SharedMemory

OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS)  # what a second attempt does not mend
_PEERCRED = struct.Struct("3i")  # pid, uid, gid


def exchange_fds(control: Control, fd: int) -> dict[int, SharedMemory]:
    """Give `fd` to every peer and get theirs. All ranks call it together, in a joint step.

    Returns:
        The memory of each peer, by rank. It is closed if the joint step fails.

    Raises:
        OSError: A peer could not be reached, or did not send one.
    """
    name = f"\0deep_ep-{uuid.uuid4().hex}"
    memories: dict[int, SharedMemory] = {}
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_new_socket())
        server.bind(name)
        server.listen(2 * control.num_ranks)  # no rank accepts while the peers connect; strangers may connect, too
        names = control.gather(name, "exchanging socket addresses")
        connections: dict[int, socket.socket] = {}
        for rank in (one for one in range(control.num_ranks) if one != control.rank):
            connections[rank] = stack.enter_context(_new_socket())
            try:
                connections[rank].connect(names[rank])
            except OSError as error:
                raise PeerMissing(
                    f"transport shm: rank {control.first_rank + rank} cannot be reached: {error}"
                ) from error
        control.gather(None, "connecting Unix sockets")
        _give(server, fd)
        control.gather(None, "exchanging descriptors")
        for rank, connection in connections.items():
            memories[rank] = _take(connection, control.first_rank + rank)
            control.undo(memories[rank].close)
    return memories


def _new_socket() -> socket.socket:
    new = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    new.setblocking(False)
    return new


def _give(server: socket.socket, fd: int) -> None:
    """Send `fd` to every peer that has connected. What was sent stays readable when the connection is closed."""
    while True:
        try:
            connection, _ = server.accept()
        except BlockingIOError:  # that was all: every peer had connected before the last gather
            return
        with connection:
            credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEERCRED.size)
            if _PEERCRED.unpack(credentials)[1] == os.getuid():  # abstract names are open to all users of the host
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # a stranger that has left
                    socket.send_fds(connection, [b"fd"], [fd])


def _take(connection: socket.socket, rank: int) -> SharedMemory:
    try:
        _, fds, flags, _ = socket.recv_fds(connection, 2, 1)
    except BlockingIOError:  # behind the last gather what is not here was never sent
        fds, flags = [], 0
    if not fds and flags & socket.MSG_CTRUNC:  # the system had one for this process, and could not number it
        raise OSError(errno.EMFILE, f"no descriptor is free for the memory of rank {rank}")
    if not fds:
        raise OSError(f"rank {rank} sent no descriptor; do all ranks belong to one user?")
    try:
        os.set_inheritable(fds[0], False)
        return SharedMemory(fds[0])
    except BaseException:
        os.close(fds[0])
        raise
