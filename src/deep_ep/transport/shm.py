"""Shared memory between the ranks of one host: each rank maps the memory of the others.

A rank makes a memfd and sends the others its process and descriptor number. They open it through `/proc`, and check by
inode that it is the right one; where `/proc` is refused, the descriptor is handed over a socket. From then on nothing
has to be exchanged: later growth of the file is mapped through the same descriptor.
"""

from __future__ import annotations

import os
import select
import sys
from dataclasses import dataclass, replace

from ..control import Control
from .board import Board
from .fds import OUT_OF_RESOURCES, exchange_fds
from .inherited import close_in_children
from .memory import SharedMemory
from .spans import Span
from .window import GroupRanks, Peer, Window, WindowSizes


@dataclass(frozen=True)
class Address:
    """How a peer finds a rank's memory, and how much of it the rank wants for low-latency calls."""

    pid: int
    fd: int
    identity: tuple[int, int]
    low_latency_bytes: int = 0


class Process(Peer):
    """A peer in another process, whose end is detected by a pidfd."""

    def __init__(self, rank: int, memory: SharedMemory, board: Board, address: Address):
        super().__init__(rank, memory, board)
        self._pidfd = _pidfd(address)
        close_in_children(self)

    def is_alive(self) -> bool:
        """Return whether its process is alive, as far as can be detected."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)  # readable once the process has ended
        return not poll.poll(0)

    def close(self) -> None:
        """Close the memory's descriptor and the pidfd."""
        super().close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def why_not() -> str | None:
    """Return why there is no shared memory here, or None if there is."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, this is {sys.platform}"
    if not hasattr(os, "memfd_create"):
        return "this Python has no os.memfd_create"
    return None


def make_window(control: Control, sizes: WindowSizes) -> Window:
    """Make this rank's window and map its peers' boards. All ranks call it together, in a joint step."""
    memory = new_memory(control)
    board_span = memory.grow(Board.num_bytes(control.num_ranks))
    memory.commit(board_span)  # before any peer touches it
    address = Address(os.getpid(), memory.fd, memory.identity(), sizes.low_latency_bytes)
    addresses = control.gather(address, "making shared memory")
    peers: list[Peer] = []
    for rank, peer_memory in enumerate(open_all(control, addresses, memory)):
        board = Board(peer_memory.map(Span(0, board_span.stop)), control.num_ranks)
        own = rank == control.rank
        peer = Peer(rank, peer_memory, board) if own else Process(rank, peer_memory, board, addresses[rank])
        control.undo(peer.close)
        peers.append(peer)
    # All ranks must divide this memory alike, so the largest request counts for all. Only what is used is committed.
    sizes = replace(sizes, low_latency_bytes=max(address.low_latency_bytes for address in addresses))
    group_ranks = GroupRanks(control.first_rank, control.num_all_ranks)
    window = Window(control.rank, peers, memory, sizes, control.limit_secs, group_ranks)
    control.undo(window.close)  # a peer whose buffer was made all the same finds this rank closed in its first call
    return window


def new_memory(control: Control) -> SharedMemory:
    """Make new shared memory, which is closed if the joint step fails."""
    memory = SharedMemory.create()
    control.undo(memory.close)
    return memory


def open_all(control: Control, addresses: list[Address], memory: SharedMemory) -> list[SharedMemory]:
    """Open every rank's memory: through `/proc`, or, if that is refused anywhere in the group, over sockets on all
    ranks.

    All ranks call it together, in a joint step; where that fails, everything opened here is closed.
    """
    opened: list[SharedMemory] = []
    is_refused = False
    try:
        for rank, address in enumerate(addresses):
            opened.append(memory if rank == control.rank else _open(address))
            control.undo(opened[-1].close)
    except OSError as error:
        if error.errno in OUT_OF_RESOURCES:
            raise  # sockets would need more of them
        is_refused = True
    # Of the whole group: all nodes must go on with the same gathers.
    if not any(control.gather_all(is_refused, "opening shared memory")):
        return opened
    for one in opened:
        if one is not memory:
            one.close()
    fds = exchange_fds(control, memory.fd)
    return [memory if rank == control.rank else fds[rank] for rank in range(control.num_ranks)]


def _open(address: Address) -> SharedMemory:
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    memory = SharedMemory(fd)
    if memory.identity() != address.identity:
        memory.close()
        raise OSError(f"process {address.pid} is another one here: the ranks do not share a process namespace")
    return memory


def _pidfd(address: Address) -> int:
    """Return a descriptor that shows when a peer's process ends; -1: there is none, and its end is noticed at the
    time limit.
    """
    try:
        status = os.stat(f"/proc/{address.pid}/fd/{address.fd}")
        if (status.st_dev, status.st_ino) == address.identity:
            return os.pidfd_open(address.pid)
    except (OSError, AttributeError):
        pass
    return -1  # an old kernel, or another process namespace, where the number is another process's
