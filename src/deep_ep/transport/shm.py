"""Shared memory between the ranks of one host: each rank maps what the others made.

A rank makes a memfd and tells the others its process and descriptor number. They open it through `/proc`, and check
by inode that it is the right one; where `/proc` is refused, the descriptor is handed over a socket. From then on
nobody asks anybody: later growth of the file is mapped through the same descriptor.
"""

from __future__ import annotations

import os
import select
import sys
from dataclasses import dataclass, replace

from ..control import Control
from ..errors import EPTransportError, EPUnsupported
from .board import Board
from .fds import exchange_fds
from .inherited import close_in_children
from .memory import SharedMemory
from .spans import Span
from .window import Peer, Place, Window, WindowSizes


@dataclass(frozen=True)
class Address:
    """How a peer finds a rank's memory, and how much of it the rank wants for low-latency calls."""

    pid: int
    fd: int
    identity: tuple[int, int]
    low_latency_bytes: int = 0


class Process(Peer):
    """A peer in another process, whose end is noticed by a pidfd."""

    def __init__(self, rank: int, memory: SharedMemory, board: Board, pidfd: int):
        super().__init__(rank, memory, board)
        self._pidfd = pidfd
        close_in_children(self)

    def is_alive(self) -> bool:
        """Whether its process lives, as far as can be told."""
        if self._pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self._pidfd, select.POLLIN)  # readable once the process has ended
        return not poll.poll(0)

    def close(self) -> None:
        """Let go of the memory's descriptor and the process."""
        super().close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1


def why_not() -> str | None:
    """Why there is no shared memory here, or None where there is."""
    if not sys.platform.startswith("linux"):
        return f"it needs Linux, this is {sys.platform}"
    if not hasattr(os, "memfd_create"):
        return "this Python has no os.memfd_create"
    return None


def make_window(control: Control, sizes: WindowSizes) -> Window:
    """Make this rank's window and map its peers' boards. All ranks call it together."""
    reason = why_not()
    if reason is not None:
        raise EPUnsupported(f"transport shm: {reason}. A group of one rank works")
    board_bytes = Board.num_bytes(control.num_ranks)
    memory, problem = None, None
    try:
        memory = SharedMemory.create()
        board_span = memory.grow(board_bytes)
        memory.commit(board_span)
        address = Address(os.getpid(), memory.fd, memory.identity(), sizes.low_latency_bytes)
    except (OSError, EPTransportError) as error:
        problem, address = str(error), None
    addresses = all_well(control, address, problem, "making shared memory")
    assert memory is not None
    peers: list[Peer] = []
    problem = None
    try:
        for rank, peer_memory in enumerate(open_all(control, addresses, memory)):
            board = Board(peer_memory.map(Span(0, board_span.stop)), control.num_ranks)
            own = rank == control.rank
            peers.append(
                Peer(rank, peer_memory, board) if own else Process(rank, peer_memory, board, _pidfd(addresses[rank]))
            )
    except (OSError, EPTransportError) as error:
        problem = str(error)
    all_well(control, None, problem, "mapping shared memory")
    # Everybody must divide this memory alike: the largest wish is everybody's. Only what is used is taken.
    sizes = replace(sizes, low_latency_bytes=max(address.low_latency_bytes for address in addresses))
    place = Place(control.first_rank, control.num_all_ranks)
    return Window(control.rank, peers, memory, sizes, control.limit_secs, place)


def open_all(control: Control, addresses: list[Address], memory: SharedMemory) -> list[SharedMemory]:
    """Every rank's memory: through `/proc`, or, if that fails anywhere in the group, over sockets on all ranks."""
    opened: list[SharedMemory] = []
    refused = None
    for rank, address in enumerate(addresses):
        try:
            opened.append(memory if rank == control.rank else _open(address))
        except OSError as error:
            refused = f"rank {rank}'s memory: {error}"
            break
    if not any(control.gather_all(refused, "opening shared memory")):
        return opened
    fds = exchange_fds(control, memory.fd)
    return [memory if rank == control.rank else SharedMemory(fd) for rank, fd in enumerate(fds)]


def all_well(control: Control, value: object, problem: str | None, purpose: str) -> list:
    """Gather `value`, or everybody's problems: all ranks of all nodes go on, or all raise."""
    answers = control.gather_all((value, problem), purpose)
    problems = [f"rank {rank}: {problem}" for rank, (_, problem) in enumerate(answers) if problem]
    if problems:
        raise EPTransportError(
            f"{purpose}: {'; '.join(problems)}. `python -m deep_ep doctor` shows what this host allows"
        )
    return [value for value, _ in answers[control.first_rank : control.first_rank + control.num_ranks]]


def _open(address: Address) -> SharedMemory:
    fd = os.open(f"/proc/{address.pid}/fd/{address.fd}", os.O_RDWR | os.O_CLOEXEC)
    memory = SharedMemory(fd)
    if memory.identity() != address.identity:
        memory.close()
        raise OSError(f"process {address.pid} is another one here: the ranks do not share a process namespace")
    return memory


def _pidfd(address: Address) -> int:
    """A descriptor that tells when a peer's process ends; -1: there is none, and its end is noticed at the limit."""
    try:
        status = os.stat(f"/proc/{address.pid}/fd/{address.fd}")
        if (status.st_dev, status.st_ino) == address.identity:
            return os.pidfd_open(address.pid)
    except (OSError, AttributeError):
        pass
    return -1  # an old kernel, or another process namespace, where the number is somebody else's
