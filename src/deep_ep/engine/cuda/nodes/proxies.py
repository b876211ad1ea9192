"""Proxies as the engine uses them: who brings a rank's remote memory to other nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import torch

from .... import env
from ....control import Control
from ....errors import EPTransportError
from ....kernels import rail, send
from ....kernels.exchange import Context
from ....kernels.rail import RemoteContext, RemoteRowLayout
from ....topology import Topology
from ....transport.device import DeviceMemory, Part
from ....transport.proxy import MessageProxy
from ....transport.remote import DOORBELL_WORDS, MOST_CHUNKS, RemoteLayout
from ...protocol import READY

_TELLING_SECS = 1.0  # that a rank which has failed waits for the others to be told


class Transfer(NamedTuple):
    """What a call has for other nodes.

    Attributes:
        memory: The piece that its rows are in.
        rows: How they lie there.
        plan: [N, PLAN_WORDS] int64, how many go where.
        operation: Of the call.
        num_blocks: Most blocks of a kernel.
        is_back: The rows are sums, on their way back.
    """

    memory: torch.Tensor
    rows: RemoteRowLayout
    plan: torch.Tensor
    operation: int
    num_blocks: int
    is_back: bool = False


class Proxy(Protocol):
    """Who brings remote memory to other nodes. Its methods are called in the stream, behind what they are about.

    Attributes:
        num_chunks: Into how many chunks the rows for a node are cut.
        boards: Addresses of the remote boards of all ranks, where this rank can write to them; None: words are written
            to shadow boards, and carried.
        sources: [N] int64, addresses of the outboxes of this rail, from which rows are fetched; None: they are carried.
    """

    num_chunks: int
    boards: Sequence[int] | None
    sources: torch.Tensor | None

    @property
    def send_words(self) -> Callable[[int], None] | None:
        """Launches what carries so many words of the header that the shadow boards have; None: there is nothing to
        launch.

        A handshake then has two halves, and this goes between them.
        """
        ...

    def prepare(self, plan: torch.Tensor) -> None:
        """Compile and load what waits, so that no peer's limit passes while a kernel is compiled."""
        ...

    def grow(self, num_bytes: int) -> Part:
        """A piece of memory for rows, on every rank. All ranks call it together, with the same number.

        Raises:
            EPTransportError: Some rank cannot have it; all ranks raise.
        """
        ...

    def await_left(self, operation: int, step: int) -> None:
        """Have what follows wait until the outbox may be written again."""
        ...

    def send(self, transfer: Transfer, chunk: int) -> None:
        """Have the rows of a chunk, which are in the outbox, brought to the ranks of the rail."""
        ...

    def await_arrived(self, transfer: Transfer, chunk: int, num_chunks: int = 1) -> None:
        """Have what follows wait for chunks [chunk, chunk + num_chunks) of the other nodes."""
        ...

    def tell_failure(self) -> None:
        """Have remote ranks told that this rank has failed: the shadow boards say so."""
        ...

    def stats(self) -> dict[str, int]:
        """What was carried so far."""
        ...

    def close(self) -> None:
        """Let what is queued leave."""
        ...


class ThreadProxy:
    """A thread that carries over TCP, out of and into memory of the host.

    Args:
        thread: The thread.
        context: The words.
        remote: The remote words.
        control: To grow together.
    """

    num_chunks = MOST_CHUNKS
    send_words: Callable[[int], None] | None = None  # it looks by itself
    boards: Sequence[int] | None = None
    sources: torch.Tensor | None = None

    def __init__(self, thread: MessageProxy, context: Context, remote: RemoteContext, control: Control):
        self._thread = thread
        self._context = context
        self._remote = remote
        self._control = control

    def prepare(self, plan: torch.Tensor) -> None:
        """Bells, and waits."""
        rail.prepare_doorbells(self._context, self._remote, plan)

    def grow(self, num_bytes: int) -> Part:
        """Pinned memory, if kernels are to reach it."""
        is_pinned = self._context.state.device.type == "cuda"
        with self._control.joint("making remote memory"):
            memory = _host_memory(num_bytes, is_pinned)
        self._thread.add_rows(memory)
        return Part(memory, (), memory)

    def await_left(self, operation: int, step: int) -> None:
        """It says so."""
        rail.await_left(self._context, self._remote, operation, step, self.num_chunks)

    def send(self, transfer: Transfer, chunk: int) -> None:
        """Ring for it."""
        rail.ring_doorbell(
            self._context, self._remote, transfer.rows, transfer.plan, chunk, self.num_chunks, transfer.is_back
        )

    def await_arrived(self, transfer: Transfer, chunk: int, num_chunks: int = 1) -> None:
        """It says so."""
        rail.await_arrived(self._context, self._remote, transfer.operation, READY, chunk, num_chunks)

    def tell_failure(self) -> None:
        """It looks by itself, but the process may be about to end."""
        self._thread.tell_failure(_TELLING_SECS)

    def stats(self) -> dict[str, int]:
        """What was carried so far."""
        return self._thread.stats()

    def close(self) -> None:
        """Let what is queued leave."""
        self._thread.close()


def _host_memory(num_bytes: int, is_pinned: bool) -> torch.Tensor:
    try:
        return torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
        raise EPTransportError(
            f"window: {num_bytes} bytes of host memory for rows between nodes are needed, the system refuses them "
            f"({reason}). Make the buffer with a smaller num_rdma_bytes"
        ) from None


class _Hostless:
    """What proxies have of which nothing runs on the host."""

    def stats(self) -> dict[str, int]:
        """Nothing is counted there."""
        return {}

    def close(self) -> None:
        """There is nothing to close."""


class KernelProxy(_Hostless):
    """Kernels that carry over NVSHMEM, out of and into its symmetric memory.

    Args:
        memory: Where memory comes from.
        words: The remote words, and where they are on all ranks.
        layout: Of them.
        topology: Where this rank stands.
        context: The words of the node.
        remote: The remote words, for kernels.
        pes: NVSHMEM's number of each rank.
        num_chunks: Into how many chunks the rows for a node are cut.
    """

    boards: Sequence[int] | None = None
    sources: torch.Tensor | None = None

    def __init__(
        self,
        memory: DeviceMemory,
        words: Part,
        layout: RemoteLayout,
        topology: Topology,
        context: Context,
        remote: RemoteContext,
        pes: Sequence[int],
        num_chunks: int,
    ):
        self.num_chunks = num_chunks
        self._memory = memory
        self._layout = layout
        self._node = topology.node
        self._context = context
        self._remote = remote
        self._send_context = send.SendContext(
            rank=topology.rank,
            num_ranks=topology.num_ranks,
            ranks_per_node=topology.ranks_per_node,
            header_words=layout.header_words,
            words=words.memory.data_ptr(),
            shadow_boards=layout.shadow_boards,
            state=context.state,
            pes=torch.tensor(list(pes), dtype=torch.int32, device=context.state.device),
        )

    def prepare(self, plan: torch.Tensor) -> None:
        """Bells, waits, and what carries."""
        rail.prepare_doorbells(self._context, self._remote, plan)
        send.prepare_all(self._send_context)

    def grow(self, num_bytes: int) -> Part:
        """Symmetric memory."""
        return self._memory.grow(num_bytes)

    def send_words(self, num_words: int) -> None:
        """Launch what carries the shadow boards."""
        send.send_words(self._send_context, num_words)

    def await_left(self, operation: int, step: int) -> None:
        """What was carried has arrived, before its word was set."""

    def send(self, transfer: Transfer, chunk: int) -> None:
        """Launch what puts the rows and, behind it, what says that they are there."""
        rail.ring_doorbell(
            self._context, self._remote, transfer.rows, transfer.plan, chunk, self.num_chunks, transfer.is_back
        )
        doorbell, step = self._layout.doorbell(0, chunk), MOST_CHUNKS * DOORBELL_WORDS
        send.send_rows(self._send_context, doorbell, step, transfer.memory.data_ptr(), transfer.num_blocks)
        send.signal_rows(self._send_context, self._layout.arrival_word(self._node, chunk))

    def await_arrived(self, transfer: Transfer, chunk: int, num_chunks: int = 1) -> None:
        """Wait for their words."""
        rail.await_arrived(self._context, self._remote, transfer.operation, READY, chunk, num_chunks)

    def tell_failure(self) -> None:
        """Launch what carries a failure, if there is one by then."""
        send.send_words(self._send_context, 0, is_failure_only=True)


class MemoryProxy(_Hostless):
    """Nobody carries anything: all ranks can address each other's memory (one host, or NVLink between hosts).

    Words are written straight to the remote boards. Rows stay in the outbox, and who relays them fetches them there.
    Chunks are for a network, which works while rows are relayed: here they would only cost launches.

    Args:
        memory: Where memory comes from.
        words: Where the remote words are on all ranks.
        topology: Where this rank stands.
        context: The words of the node.
        remote: The remote words, for kernels.
    """

    num_chunks = 1
    send_words: Callable[[int], None] | None = None  # they are there
    sources: torch.Tensor | None = None

    def __init__(self, memory: DeviceMemory, words: Part, topology: Topology, context: Context, remote: RemoteContext):
        self.boards: Sequence[int] | None = words.addresses
        self._words = words  # which has the peers' memory mapped
        self._memory = memory
        self._context = context
        self._remote = remote
        self._members = slice(topology.local_rank, None, topology.ranks_per_node)
        self._rail = self._addresses(words)
        self._kept: list[torch.Tensor] = []

    def _addresses(self, part: Part) -> torch.Tensor:
        """[N] int64, where the ranks of this rail have a piece."""
        return torch.tensor(part.addresses[self._members], dtype=torch.int64, device=part.memory.device)

    def prepare(self, plan: torch.Tensor) -> None:
        """Handshakes of the rail."""
        rail.prepare_rail_handshake(self._context, self._remote, plan)

    def grow(self, num_bytes: int) -> Part:
        """Symmetric memory."""
        part = self._memory.grow(num_bytes)
        self.sources = self._addresses(part)
        self._kept.append(self.sources)  # those of a piece before stay: graphs may know them
        return part

    def await_left(self, operation: int, step: int) -> None:
        """Who has met all ranks in this call knows that they have fetched what was there in the last one."""

    def send(self, transfer: Transfer, chunk: int) -> None:
        """Say that rows may be fetched, and wait until those of the rail may be: with one chunk it is one handshake."""
        del chunk
        context, remote, operation = self._context, self._remote, transfer.operation
        rail.rail_handshake(
            context, remote, self._rail, transfer.rows, transfer.plan, operation, READY, transfer.is_back
        )

    def await_arrived(self, transfer: Transfer, chunk: int, num_chunks: int = 1) -> None:
        """`send` has."""

    def tell_failure(self) -> None:
        """They are told as the ranks of the node are."""


def make_nvshmem_proxy(
    control: Control,
    memory: DeviceMemory,
    words: Part,
    layout: RemoteLayout,
    topology: Topology,
    context: Context,
    remote: RemoteContext,
    pes: Sequence[int],
) -> KernelProxy | MemoryProxy:
    """Who carries over NVSHMEM, if anybody must. All ranks call it together, and find the same."""
    is_wanted = env.NVSHMEM_ROWS.get() == "fetch"
    said = control.gather((all(words.addresses), is_wanted), "looking for a network")
    is_one_memory = all(is_addressable for is_addressable, _ in said)
    if is_one_memory and all(wish for _, wish in said):
        return MemoryProxy(memory, words, topology, context, remote)
    num_chunks = 1 if is_one_memory else MOST_CHUNKS
    return KernelProxy(memory, words, layout, topology, context, remote, pes, num_chunks)
