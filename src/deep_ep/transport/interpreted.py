"""Shared memory for kernels that Triton interprets: the GPU's engine on CPU ranks. Slow; for tests and debugging."""

from __future__ import annotations

import os

from ..control import Control
from ..errors import EPTransportError
from .device import Part
from .memory import Mapping, SharedMemory, bytes_tensor
from .shm import Address, all_well, open_all


class InterpretedMemory:
    """Memory of CPU ranks, whose kernels run in Triton's interpreter.

    Args:
        control: The group.
    """

    def __init__(self, control: Control):
        self._control = control

    def grow(self, num_bytes: int) -> Part:
        """A piece of `num_bytes` zeros on every rank. All ranks call it together, with the same number.

        Raises:
            EPTransportError: Some rank cannot have it; all ranks raise.
        """
        memory, address, problem = SharedMemory.create(), None, None
        try:
            span = memory.grow(num_bytes)
            memory.commit(span)
            address = Address(os.getpid(), memory.fd, memory.identity())
        except EPTransportError as error:
            problem = str(error)
        addresses = all_well(self._control, address, problem, "making shared memory")
        mappings: list[Mapping] = []
        for peer in open_all(self._control, addresses, memory):
            mappings.append(peer.map(span))
            peer.close()
        own = mappings[self._control.rank]
        return Part(bytes_tensor(own.view(span))[:num_bytes], tuple(one.address for one in mappings), mappings)

    def is_capturing(self) -> bool:
        """The CPU has no graphs."""
        return False
