"""CUDA memory that the ranks of all nodes share: torch's symmetric memory with NVSHMEM behind it.

A kernel puts bytes into a remote rank's piece by the address of its own (`kernels/send.py`); local ranks' pieces have
addresses besides. Torch starts NVSHMEM when the first piece is made, over the job's default group, whatever group asks:
so a PE, NVSHMEM's number of a process, is the rank in the job, and making memory takes all ranks of the job.

Which symmetric memory a process has is chosen once for all: after NVSHMEM's, local memory comes from NVSHMEM, too.

Ranks that share a GPU need `CUDA_MPS_ACTIVE_THREAD_PERCENTAGE` = 100 / ranks in their environment, and ranks of one
host without a network for it `NVSHMEM_REMOTE_TRANSPORT=none` and `NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME=lo`; all of them
before CUDA starts.
"""

from __future__ import annotations

import importlib.util

import torch
import torch.distributed as dist

from ..control import Control
from ..errors import EPTransportError
from . import symm
from .device import Part


def why_not(group: dist.ProcessGroup | None, num_ranks: int) -> str | None:
    """Return why NVSHMEM cannot be used here, or None if it seems possible. It changes nothing; ranks may differ."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if not is_built_in():
        return f"torch {torch.__version__} comes without NVSHMEM, or cannot load it"
    if group is None:
        return "it needs a torch.distributed process group, a communicator alone does not do"
    if num_ranks < dist.get_world_size():
        return f"it needs {symm.all_of_job(num_ranks)}"
    return _why_no_library() or _why_no_choice()


def pe_of(group: dist.ProcessGroup, rank: int) -> int:
    """Return the PE of a rank of a group: its rank in the job, by which torch starts NVSHMEM."""
    return dist.get_global_rank(group, rank)


class NvshmemMemory:
    """Symmetric memory of all ranks of a group, which are all ranks of the job. All ranks make it together.

    Args:
        control: The group, of all nodes.
        group: The same, as torch knows it.
        device: This rank's GPU.

    Raises:
        EPTransportError: Some process has symmetric memory of another kind already; all ranks raise.
    """

    def __init__(self, control: Control, group: dist.ProcessGroup, device: torch.device):
        self._control = control
        self._group = group
        self._device = device
        self.num_sharing = symm.allow_shared_gpus(control, device)
        reason = _choose()
        if reason is not None:
            raise EPTransportError(f"transport nvshmem: torch does not choose it ({reason})")

    def grow(self, num_bytes: int) -> Part:
        """Allocate a piece of `num_bytes` zeros on every rank. All ranks call it together, with the same size.

        An address of a rank that cannot be addressed is 0: only puts reach it.

        Raises:
            EPTransportError: Some rank cannot have it; all ranks raise.
            EPTimeout: Not all ranks came.
        """
        return symm.shared_piece(self._control, self._group, self._device, num_bytes)

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured in a graph."""
        return torch.cuda.is_current_stream_capturing()


def is_built_in() -> bool:
    """Return whether torch has NVSHMEM, and could load it."""
    if importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return False
    import torch.distributed._symmetric_memory as symm_mem

    return symm_mem.is_nvshmem_available()


def _why_no_library() -> str | None:
    """Return why kernels cannot be compiled against NVSHMEM; None: they can."""
    try:
        from torch.distributed._symmetric_memory._nvshmem_triton import NvshmemLibFinder

        NvshmemLibFinder.find_device_library()
    except (ImportError, AttributeError, RuntimeError, OSError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        return f"its device library is missing ({reason}); NVSHMEM_LIB_DIR may name its folder"
    return None


def _why_no_choice() -> str | None:
    """Why this process cannot have NVSHMEM's memory any more, as far as can be told without choosing it."""
    used, chosen = symm.used_backend(), symm.backend()
    if used not in (None, symm.NVSHMEM):
        return f"this process has symmetric memory from {used} already, and torch allows one kind"
    if chosen not in (None, "CUDA", symm.NVSHMEM):  # CUDA is the default before a backend is chosen
        return f"this process has chosen {chosen} for its symmetric memory, and torch allows one kind"
    return None


def _choose() -> str | None:
    """Have torch take symmetric memory from NVSHMEM from now on; the reason where it will not."""
    import torch.distributed._symmetric_memory as symm_mem

    if symm.backend() == symm.NVSHMEM:
        return None
    try:
        symm_mem.set_backend(symm.NVSHMEM)
    except RuntimeError as error:
        return str(error).splitlines()[0]
    return None
