"""Proxies, as the engine uses them: they move a rank's remote memory to other nodes."""

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

_TELLING_SECS = 1.0  # that a failed rank waits until its failure has been sent to the others


class Transfer(NamedTuple):
    """The rows that a call sends to other nodes.

    Attributes:
        memory: The piece that its rows are in.
        rows: How they lie there.
        plan: [N, PLAN_WORDS] int64, how many go where.
        operation: The operation of the call.
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
    """Moves remote memory to other nodes. Its methods act in stream order, after the work that they refer to.

    Attributes:
        num_chunks: Into how many chunks the rows for a node are cut.
        boards: Addresses of the remote boards of all ranks, where this rank can write to them; None: words are written
            to shadow boards, which the proxy sends.
        sources: [N] int64, addresses of the outboxes of this rail, from which rows are fetched; None: the proxy sends
            them.
    """

    num_chunks: int
    boards: Sequence[int] | None
    sources: torch.Tensor | None

    @property
    def send_words(self) -> Callable[[int], None] | None:
        """Launches the kernel that sends this many words of the shadow boards' headers; None: there is nothing to
        launch.

        A handshake is then split into a send half and a receive half, and this is launched between them.
        """
        ...

    def prepare(self, plan: torch.Tensor) -> None:
        """Compile and load the kernels that wait, so that no peer's time limit passes while a kernel is compiled."""
        ...

    def grow(self, num_bytes: int) -> Part:
        """Allocate a piece of memory for rows on every rank. All ranks call it together, with the same size.

        Raises:
            EPTransportError: Some rank cannot have it; all ranks raise.
        """
        ...

    def await_left(self, operation: int, step: int) -> None:
        """Have later work in the stream wait until the outbox may be written again."""
        ...

    def send(self, transfer: Transfer, chunk: int) -> None:
        """Send the rows of a chunk, which are in the outbox, to the ranks of the rail."""
        ...

    def await_arrived(self, transfer: Transfer, chunk: int, num_chunks: int = 1) -> None:
        """Have later work in the stream wait until chunks [chunk, chunk + num_chunks) of the other nodes have
        arrived.
        """
        ...

    def tell_failure(self) -> None:
        """Have this rank's failure, which is on the shadow boards, sent to the remote ranks."""
        ...

    def stats(self) -> dict[str, int]:
        """Return counters of what was sent so far."""
        ...

    def close(self) -> None:
        """Wait until what is queued has been sent, and close."""
        ...


class ThreadProxy:
    """A thread that sends over TCP, out of and into memory of the host.

    Args:
        thread: The thread.
        context: The words.
        remote: The remote words.
        control: The group, with which memory is allocated together.
    """

    num_chunks = MOST_CHUNKS
    send_words: Callable[[int], None] | None = None  # the thread polls the shadow boards
    boards: Sequence[int] | None = None
    sources: torch.Tensor | None = None

    def __init__(self, thread: MessageProxy, context: Context, remote: RemoteContext, control: Control):
        self._thread = thread
        self._context = context
        self._remote = remote
        self._control = control

    def prepare(self, plan: torch.Tensor) -> None:
        """Compile and load the kernels that ring doorbells and wait."""
        rail.prepare_doorbells(self._context, self._remote, plan)

    def grow(self, num_bytes: int) -> Part:
        """Allocate host memory on every rank, pinned if a GPU's kernels access it."""
        is_pinned = self._context.state.device.type == "cuda"
        with self._control.joint("making remote memory"):
            memory = _host_memory(num_bytes, is_pinned)
        self._thread.add_rows(memory)
        return Part(memory, (), memory)

    def await_left(self, operation: int, step: int) -> None:
        """Wait, in the stream, for the words with which the thread says that the outbox was sent."""
        rail.await_left(self._context, self._remote, operation, step, self.num_chunks)

    def send(self, transfer: Transfer, chunk: int) -> None:
        """Ring the doorbell of a chunk, upon which the thread sends it."""
        rail.ring_doorbell(
            self._context, self._remote, transfer.rows, transfer.plan, chunk, self.num_chunks, transfer.is_back
        )

    def await_arrived(self, transfer: Transfer, chunk: int, num_chunks: int = 1) -> None:
        """Wait, in the stream, for the words with which the thread says that chunks have arrived."""
        rail.await_arrived(self._context, self._remote, transfer.operation, READY, chunk, num_chunks)

    def tell_failure(self) -> None:
        """Wait until the thread has sent the failure.

        It would do so without being asked, but the process may be about to end.
        """
        self._thread.tell_failure(_TELLING_SECS)

    def stats(self) -> dict[str, int]:
        """Return counters of what the thread has sent so far."""
        return self._thread.stats()

    def close(self) -> None:
        """Wait until what is queued has been sent, and close."""
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
    """The methods of proxies that run nothing on the host."""

    def stats(self) -> dict[str, int]:
        """Return no counters: nothing is counted on the host."""
        return {}

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class KernelProxy(_Hostless):
    """Kernels that send over NVSHMEM, out of and into its symmetric memory.

    Args:
        memory: Where memory comes from.
        words: The remote words, and where they are on all ranks.
        layout: The layout of the remote words.
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
        """Compile and load the kernels that ring doorbells, wait and send."""
        rail.prepare_doorbells(self._context, self._remote, plan)
        send.prepare_all(self._send_context)

    def grow(self, num_bytes: int) -> Part:
        """Allocate symmetric memory on every rank."""
        return self._memory.grow(num_bytes)

    def send_words(self, num_words: int) -> None:
        """Launch the kernel that sends the shadow boards."""
        send.send_words(self._send_context, num_words)

    def await_left(self, operation: int, step: int) -> None:
        """Do nothing: the rows of a chunk have left the outbox before its arrival word is set."""

    def send(self, transfer: Transfer, chunk: int) -> None:
        """Launch the kernel that puts the rows, and after it the one that sets their arrival words."""
        rail.ring_doorbell(
            self._context, self._remote, transfer.rows, transfer.plan, chunk, self.num_chunks, transfer.is_back
        )
        doorbell, step = self._layout.doorbell(0, chunk), MOST_CHUNKS * DOORBELL_WORDS
        send.send_rows(self._send_context, doorbell, step, transfer.memory.data_ptr(), transfer.num_blocks)
        send.signal_rows(self._send_context, self._layout.arrival_word(self._node, chunk))

    def await_arrived(self, transfer: Transfer, chunk: int, num_chunks: int = 1) -> None:
        """Wait, in the stream, for the arrival words of the chunks."""
        rail.await_arrived(self._context, self._remote, transfer.operation, READY, chunk, num_chunks)

    def tell_failure(self) -> None:
        """Launch the kernel that sends this rank's failure, if it has failed by the time the kernel runs."""
        send.send_words(self._send_context, 0, is_failure_only=True)


class MemoryProxy(_Hostless):
    """Nothing is sent: all ranks can address each other's memory (one host, or NVLink between hosts).

    Words are written straight to the remote boards. Rows stay in the outbox, from which the relay fetches them.
    Chunks let a network transfer overlap with relaying; here they would only cost launches.

    Args:
        memory: Where memory comes from.
        words: Where the remote words are on all ranks.
        topology: Where this rank stands.
        context: The words of the node.
        remote: The remote words, for kernels.
    """

    num_chunks = 1
    send_words: Callable[[int], None] | None = None  # words are written straight to the remote boards
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
        """Return [N] int64: the addresses of a piece on the ranks of this rail."""
        return torch.tensor(part.addresses[self._members], dtype=torch.int64, device=part.memory.device)

    def prepare(self, plan: torch.Tensor) -> None:
        """Compile and load the handshake of the rail."""
        rail.prepare_rail_handshake(self._context, self._remote, plan)

    def grow(self, num_bytes: int) -> Part:
        """Allocate symmetric memory on every rank, and keep the addresses of the rail's outboxes."""
        part = self._memory.grow(num_bytes)
        self.sources = self._addresses(part)
        self._kept.append(self.sources)  # captured graphs may use the addresses of earlier pieces
        return part

    def await_left(self, operation: int, step: int) -> None:
        """Do nothing: the handshake of this call implies that the rows of the last call have been fetched."""

    def send(self, transfer: Transfer, chunk: int) -> None:
        """Signal that this rank's rows may be fetched, and wait until those of the rail may be.

        With one chunk this is one handshake.
        """
        context, remote, operation = self._context, self._remote, transfer.operation
        rail.rail_handshake(
            context, remote, self._rail, transfer.rows, transfer.plan, operation, READY, transfer.is_back
        )

    def await_arrived(self, transfer: Transfer, chunk: int, num_chunks: int = 1) -> None:
        """Do nothing: `send` has waited already."""

    def tell_failure(self) -> None:
        """Do nothing: remote ranks read the failure word as ranks of the node do."""


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
    """Make the proxy of NVSHMEM memory: one that sends, or `MemoryProxy` if all ranks are addressable and that is
    wanted.

    All ranks call it together, and make the same choice.
    """
    is_wanted = env.NVSHMEM_ROWS.get() == "fetch"
    said = control.gather((all(words.addresses), is_wanted), "looking for a network")
    is_one_memory = all(is_addressable for is_addressable, _ in said)
    if is_one_memory and all(wish for _, wish in said):
        return MemoryProxy(memory, words, topology, context, remote)
    num_chunks = 1 if is_one_memory else MOST_CHUNKS
    return KernelProxy(memory, words, layout, topology, context, remote, pes, num_chunks)
