"""CUDA memory that the ranks of a node map into each other: `torch.distributed._symmetric_memory`.

It rendezvouses over any process group, gloo included. Ranks may share a GPU.
"""

from __future__ import annotations

import importlib.util
import os

import torch
import torch.distributed as dist

from ..control import Control
from ..errors import EPTransportError
from .device import Part
from .shm import all_well


def why_not(group: dist.ProcessGroup | None, num_ranks: int) -> str | None:
    """Why there is no symmetric memory here, or None where there is."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if num_ranks > 1 and importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return f"torch {torch.__version__} has no symmetric memory"
    if num_ranks > 1 and group is None:
        return "it needs a torch.distributed process group, a communicator alone does not do"
    return None


class SymmMemory:
    """Symmetric memory of the ranks of one node.

    Args:
        control: The group.
        group: The same, as torch knows it; None for one rank.
        device: This rank's GPU.
    """

    def __init__(self, control: Control, group: dist.ProcessGroup | None, device: torch.device):
        self._control = control
        self._group = group
        self._device = device
        if control.num_ranks > 1:
            uuid = str(torch.cuda.get_device_properties(device).uuid)
            uuids = control.gather(uuid, "finding the GPUs")
            if len(set(uuids)) < len(uuids):
                # Torch refuses ranks that share a GPU unless it is told that this is meant.
                os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")

    def grow(self, num_bytes: int) -> Part:
        """A piece of `num_bytes` zeros on every rank. All ranks call it together, with the same number.

        Raises:
            EPTransportError: Some rank cannot have it; all ranks raise.
        """
        if self._control.num_ranks == 1:
            alone = _allocated(lambda: torch.zeros(num_bytes, dtype=torch.uint8, device=self._device), num_bytes)
            return Part(alone, (alone.data_ptr(),), alone)
        import torch.distributed._symmetric_memory as symm_mem

        memory: torch.Tensor | None = None
        problem: str | None = None
        try:
            memory = _allocated(
                lambda: symm_mem.empty(num_bytes, dtype=torch.uint8, device=self._device), num_bytes
            ).zero_()
            torch.cuda.synchronize(self._device)  # peers may write as soon as they have the address
        except EPTransportError as error:
            problem = str(error)
        all_well(self._control, None, problem, "making symmetric memory")
        assert memory is not None
        assert self._group is not None
        handle = symm_mem.rendezvous(memory, self._group)
        return Part(memory, tuple(handle.buffer_ptrs), (memory, handle))

    def is_capturing(self) -> bool:
        """Whether the current stream is being captured in a graph."""
        return torch.cuda.is_current_stream_capturing()


def _allocated(allocate, num_bytes: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    try:
        return allocate()
    except RuntimeError as error:
        raise EPTransportError(
            f"window: {num_bytes} bytes of GPU memory are needed, the system refuses them "
            f"({str(error).splitlines()[0]}). Make the buffer smaller, or free memory"
        ) from None
