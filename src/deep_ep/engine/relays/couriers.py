"""Couriers as the engine uses them: who carries a rank's far memory to other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from ... import env
from ...control import Control
from ...errors import EPTransportError
from ...kernels import carry, rail
from ...kernels.exchange import Places
from ...kernels.rail import FarPlaces
from ...topology import Topology
from ...transport.courier import MessageCourier
from ...transport.device import DeviceMemory, Part
from ...transport.far import DOORBELL_WORDS, MOST_CHUNKS, FarLayout

_TELLING_SECS = 1.0  # that a rank which has failed waits for the others to be told


class Courier(Protocol):
    """Who carries far memory. Its methods are called in the stream, behind what they are about.

    Attributes:
        num_chunks: Into how many chunks the rows for a node are cut.
        has_kernels: It is launched: a meeting has two halves, and the courier goes between them.
        sources: [N] int64, addresses of the outboxes of this rail, from which rows are fetched; None: they are carried.
    """

    num_chunks: int
    has_kernels: bool
    sources: torch.Tensor | None

    def grow(self, num_bytes: int) -> Part | None:
        """A piece of memory for rows, on every rank. All ranks call it together, with the same number.

        Returns:
            None: some rank cannot have it.
        """
        ...

    def carry_words(self, num_words: int) -> None:
        """Carry what the mirrors say: so many words of the header."""
        ...

    def await_left(self, operation: int, step: int) -> None:
        """Have what follows wait until the outbox may be written again."""
        ...

    def carry_rows(self, memory: torch.Tensor, chunk: int, num_blocks: int) -> None:
        """Carry the rows for which the doorbells of a chunk were rung.

        Args:
            memory: Where they are.
            chunk: Which chunk.
            num_blocks: Most blocks of a kernel.
        """
        ...

    def tell_failure(self) -> None:
        """Have far ranks told that this rank has failed: the mirrors say so."""
        ...

    def numbers(self) -> dict[str, int]:
        """What was carried so far."""
        ...

    def close(self) -> None:
        """Let what is queued leave."""
        ...


class ThreadCourier:
    """A thread that carries over TCP, out of and into memory of the host.

    Args:
        thread: The thread.
        places: The words.
        far: The far words.
        control: To grow together.
    """

    num_chunks = MOST_CHUNKS
    has_kernels = False
    sources: torch.Tensor | None = None

    def __init__(self, thread: MessageCourier, places: Places, far: FarPlaces, control: Control):
        self._thread = thread
        self._places = places
        self._far = far
        self._control = control

    def grow(self, num_bytes: int) -> Part | None:
        """Pinned memory, if kernels are to reach it."""
        memory: torch.Tensor | None = None
        try:
            is_pinned = self._places.state.device.type == "cuda"
            memory = torch.zeros(num_bytes, dtype=torch.uint8, device="cpu", pin_memory=is_pinned)
        except RuntimeError:
            pass
        if not all(self._control.gather(memory is not None, "making far memory")):
            return None
        assert memory is not None
        self._thread.add_rows(memory)
        return Part(memory, (), memory)

    def carry_words(self, num_words: int) -> None:
        """It looks by itself."""

    def await_left(self, operation: int, step: int) -> None:
        """It says so."""
        rail.await_left(self._places, self._far, operation, step, self.num_chunks)

    def carry_rows(self, memory: torch.Tensor, chunk: int, num_blocks: int) -> None:
        """It looks by itself."""

    def tell_failure(self) -> None:
        """It looks by itself, but the process may be about to end."""
        self._thread.tell_failure(_TELLING_SECS)

    def numbers(self) -> dict[str, int]:
        """What was carried so far."""
        return self._thread.numbers()

    def close(self) -> None:
        """Let what is queued leave."""
        self._thread.close()


class KernelCourier:
    """Kernels that carry over NVSHMEM, out of and into its symmetric memory.

    Where all ranks can address each other's memory (one host, or NVLink between hosts), rows stay in the outbox, and
    who relays them fetches them there: only words are carried.

    Args:
        memory: Where memory comes from.
        words: The far words, and where they are on all ranks.
        layout: Of them.
        topology: Where this rank stands.
        places: The words of the node.
        control: To settle on chunks.
        pes: NVSHMEM's number of each rank.
    """

    has_kernels = True
    sources: torch.Tensor | None = None

    def __init__(
        self,
        memory: DeviceMemory,
        words: Part,
        layout: FarLayout,
        topology: Topology,
        places: Places,
        control: Control,
        pes: Sequence[int],
    ):
        self._memory = memory
        self._kept: list[torch.Tensor] = []
        self._layout = layout
        self._node = topology.node
        self._carry = carry.Courier(
            rank=topology.rank,
            num_ranks=topology.num_ranks,
            ranks_per_node=topology.ranks_per_node,
            header_words=layout.header_words,
            words=words.memory.data_ptr(),
            mirrors=layout.mirrors,
            state=places.state,
            pes=torch.tensor(list(pes), dtype=torch.int32, device=places.state.device),
        )
        # Chunks are for a network, which works while rows are relayed. Where all is one memory they only cost launches.
        is_fetched = env.NVSHMEM_ROWS.get() == "fetch"
        said = control.gather((all(words.addresses), is_fetched), "looking for a network")
        is_one_memory = all(addressable for addressable, _ in said)
        self.num_chunks = 1 if is_one_memory else MOST_CHUNKS
        self._is_fetched = is_one_memory and all(wish for _, wish in said)
        self._rail = slice(topology.local_rank, None, topology.ranks_per_node)
        carry.prepare_all(self._carry)

    def grow(self, num_bytes: int) -> Part | None:
        """Symmetric memory."""
        try:
            part = self._memory.grow(num_bytes)
        except EPTransportError:
            return None
        if self._is_fetched:  # those of a piece before stay: graphs may know them
            self.sources = torch.tensor(part.addresses[self._rail], dtype=torch.int64, device=part.memory.device)
            self._kept.append(self.sources)
        return part

    def carry_words(self, num_words: int) -> None:
        """Launch what carries the mirrors."""
        carry.carry_words(self._carry, num_words)

    def await_left(self, operation: int, step: int) -> None:
        """What was carried has arrived, before its word was set."""

    def carry_rows(self, memory: torch.Tensor, chunk: int, num_blocks: int) -> None:
        """Launch what puts the rows, unless they are fetched, and, behind it, what says that they are there."""
        if self.sources is None:
            bell, step = self._layout.doorbell(0, chunk), MOST_CHUNKS * DOORBELL_WORDS
            carry.carry_rows(self._carry, bell, step, memory.data_ptr(), num_blocks)
        carry.signal_rows(self._carry, self._layout.landed_word(self._node, chunk))

    def tell_failure(self) -> None:
        """Launch what carries a failure, if there is one by then."""
        carry.carry_words(self._carry, 0, is_failure_only=True)

    def numbers(self) -> dict[str, int]:
        """Nothing is counted on the host."""
        return {}

    def close(self) -> None:
        """There is nothing to close."""
