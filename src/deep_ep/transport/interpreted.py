"""Shared memory for kernels that Triton interprets: the GPU's engine on CPU ranks. Slow; for tests and debugging."""

from __future__ import annotations

import os

from ..control import Control
from .device import Part
from .memory import Mapping, bytes_tensor
from .shm import Address, new_memory, open_all


class InterpretedMemory:
    """Memory of CPU ranks, whose kernels run in Triton's interpreter.

    Args:
        control: The group.
    """

    num_sharing = 1

    def __init__(self, control: Control):
        self._control = control

    def grow(self, num_bytes: int) -> Part:
        """Allocate a piece of `num_bytes` zeros on every rank. All ranks call it together, with the same size.

        Raises:
            EPTransportError: Some rank cannot have it; all ranks raise.
        """
        control = self._control
        mappings: list[Mapping] = []
        with control.joint("making shared memory"):
            memory = new_memory(control)
            span = memory.grow(num_bytes)
            memory.commit(span)
            address = Address(os.getpid(), memory.fd, memory.identity())
            for peer in open_all(control, control.gather(address, "making shared memory"), memory):
                mappings.append(peer.map(span))
                peer.close()  # the mapping stays valid, and nothing more of this file will be mapped
        own = mappings[control.rank]
        return Part(bytes_tensor(own.view(span))[:num_bytes], tuple(one.address for one in mappings), mappings)

    def is_capturing(self) -> bool:
        """Return False: there are no graphs on the CPU."""
        return False
