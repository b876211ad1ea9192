"""CUDA memory that the ranks of a node map into each other: `torch.distributed._symmetric_memory`.

It rendezvouses over any process group, gloo included, and over the store of a generation. Ranks may share a GPU.
"""

from __future__ import annotations

import importlib.util
import os
import time
import uuid
from typing import Any, Final

import torch
import torch.distributed as dist

from ..control import Control
from ..errors import EPTimeout, EPTransportError, named
from ..generation import Store
from ..topology import Topology
from .device import DeviceMemory, Part

NVSHMEM: Final = "NVSHMEM"  # torch's name of the backend

# Pieces that are never let go of, see `shared_piece`.
_kept: list[Any] = []
_POLL_SECS = 0.001  # between two looks at a store
_used_backend: str | None = None
_num_pieces = 0  # that this process has made together with others


def why_not(group: dist.ProcessGroup | None, num_ranks: int, has_store: bool = False) -> str | None:
    """Return why there is no symmetric memory here, or None if there is.

    Args:
        group: The ranks, as torch knows them.
        num_ranks: How many there are.
        has_store: They also meet over a store, see `Control.store`.
    """
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    if num_ranks > 1 and importlib.util.find_spec("torch.distributed._symmetric_memory") is None:
        return f"torch {torch.__version__} has no symmetric memory"
    if num_ranks > 1 and group is None and not has_store:
        return "it needs a torch.distributed process group, a communicator alone does not do"
    if num_ranks > 1 and backend() == NVSHMEM:
        if group is None:
            return "this process has it from NVSHMEM, which needs the process group of the job"
        if num_ranks < dist.get_world_size():
            return f"this process has it from NVSHMEM, which needs {all_of_job(num_ranks)}"
    return None


def all_of_job(num_ranks: int) -> str:
    """Return what NVSHMEM needs and a smaller group does not have, for a message."""
    return f"all {dist.get_world_size()} ranks of the job in the group, which has {num_ranks}"


def backend() -> str | None:
    """Return the backend of this process's symmetric memory: CUDA unless set otherwise, used or not."""
    try:
        from torch.distributed._symmetric_memory import get_backend

        return get_backend(torch.device("cuda"))
    except (ImportError, RuntimeError):
        return None


def used_backend() -> str | None:
    """Return the backend from which this library has allocated in this process.

    Torch itself only shows it by refusing another.
    """
    return _used_backend


def allow_shared_gpus(control: Control, device: torch.device) -> int:
    """Let ranks have symmetric memory on one GPU, if they share one. All ranks call it.

    Returns:
        How many ranks of the group share this rank's GPU, itself included.
    """
    uuid = str(torch.cuda.get_device_properties(device).uuid)
    uuids = control.gather_all(uuid, "finding the GPUs")
    if len(set(uuids)) < len(uuids):
        # Torch refuses ranks that share a GPU unless an environment variable allows it.
        os.environ.setdefault("TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES", "1")
    return uuids.count(uuid)


def shared_piece(control: Control, group: dist.ProcessGroup | None, device: torch.device, num_bytes: int) -> Part:
    """Allocate a piece of `num_bytes` zeros on every rank, from whichever backend is set. All ranks call it together.

    It is a joint step: symmetric memory is made by collectives of torch, which cannot report a failure of one rank and
    have no time limit. So there is a gather before each: no rank enters one unless all ranks are about to.

    A piece of NVSHMEM's lives as long as the process: freeing one is collective over all ranks of the job, without a
    limit, and ranks drop their last tensor when they like, in a finalizer. Torch also remembers a rendezvous by its
    address, so that memory that came there a second time would be given the addresses of the first.

    Raises:
        EPTransportError: Some rank cannot have it; all ranks raise.
    """
    import torch.distributed._symmetric_memory as symm_mem

    global _used_backend, _num_pieces
    with control.joint("making symmetric memory"):
        _used_backend = backend()
        control.gather_all(None, "meeting to make symmetric memory")  # NVSHMEM allocates with all ranks of the job
        memory = _allocated(lambda: symm_mem.empty(num_bytes, dtype=torch.uint8, device=device), num_bytes)
        if _used_backend == NVSHMEM:
            _kept.append(memory)
        memory.zero_()
        torch.cuda.synchronize(device)  # peers may write as soon as they have the address
        made = control.gather_all((_num_pieces, str(uuid.uuid4())), "meeting to map symmetric memory")
        _num_pieces += 1
        is_even = len({num_pieces for num_pieces, _ in made}) == 1
        if group is not None and is_even:
            name: Any = group.group_name
        else:
            name = _renumbering_group(control, group, made[0][1])
        handle = symm_mem.rendezvous(memory, name)
        if _used_backend == NVSHMEM:
            _kept.append(handle)
    return Part(memory, _addresses(memory, handle.buffer_ptrs, control.rank), (memory, handle))


class RenumberingStore(dist.Store):
    """A store for ranks that have made symmetric memory unequally often: of groups that overlap, or of a generation.

    Torch (2.11 to 2.13) numbers all exchanges of a process, whatever their group, and looks for what peers have written
    under its own numbers: such ranks would wait for ever. Here numbers begin anew, and waits have a limit.

    Args:
        store: Where values are kept.
        name: Of the exchanges: no others in this store have it.
        deadline: Until when values are waited for, as `time.monotonic` counts.
    """

    def __init__(self, store: Store, name: str, deadline: float):
        super().__init__()
        self._store, self._name, self._deadline = store, name, deadline
        self._numbers: dict[str, int] = {}

    def _key(self, key: str) -> str:
        prefix, number, rank = key.rsplit("/", 2)
        return f"{self._name}/{prefix}/{self._numbers.setdefault(number, len(self._numbers))}/{rank}"

    def set(self, key: str, value: Any) -> None:
        """Write what this rank has for an exchange."""
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """Read what a rank has for an exchange, once it is there."""
        self.wait([key])
        return self._store.get(self._key(key))

    def wait(self, keys: list[str], *timeout: Any) -> None:
        """Wait for what ranks have for exchanges.

        Raises:
            EPTimeout: It is not there at the deadline.
        """
        del timeout
        while missing := [key for key in keys if not self._store.check([self._key(key)])]:
            if time.monotonic() > self._deadline:
                ranks = sorted({int(key.rpartition("/")[2]) for key in missing})
                raise EPTimeout(
                    f"mapping symmetric memory: {named(ranks)} did not say where its memory is within the limit. Look "
                    "at its output, and make the buffer again"
                )
            time.sleep(_POLL_SECS)


def _renumbering_group(control: Control, group: dist.ProcessGroup | None, name: str) -> str:
    """Return the name of a group by which torch finds the same ranks, and a store that numbers exchanges anew."""
    from torch._C._distributed_c10d import _register_process_group, _SymmetricMemory

    below: Any = control.store if group is None else group.get_group_store()
    store = RenumberingStore(below, name, control.deadline)
    # Torch 2.11 looks the name up among process groups, and takes their store; others know what was set for the name.
    ranks: Any = dist.ProcessGroup(store, control.rank, control.num_ranks)
    registered: Any = name  # a type of its own to torch, which is a string
    _register_process_group(registered, ranks)
    _kept.extend((store, ranks))  # torch keeps what is below it alone
    _SymmetricMemory.set_group_info(name, control.rank, control.num_ranks, store)
    return name


def node_group(group: dist.ProcessGroup, topology: Topology) -> dist.ProcessGroup:
    """Return the ranks of this rank's node as a group of torch. All ranks of the node call it together.

    It is made once: torch names such groups by their ranks, and two groups of one name would receive each other's
    messages.
    """
    ranks = dist.get_process_group_ranks(group)
    first = topology.node * topology.ranks_per_node
    local = tuple(ranks[first : first + topology.ranks_per_node])
    if local not in _node_groups:
        made = dist.new_group(list(local), backend="gloo", use_local_synchronization=True)
        assert made is not None
        _node_groups[local] = made
    return _node_groups[local]


_node_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}


class NodeMemory:
    """Memory of a node's ranks, as the whole group numbers them: of other nodes' ranks there are no addresses.

    Args:
        memory: The memory of the node's ranks, or of all nodes' ranks.
        topology: Where this rank stands.
    """

    def __init__(self, memory: DeviceMemory, topology: Topology):
        self._memory = memory
        self.num_sharing = memory.num_sharing
        self._first = topology.node * topology.ranks_per_node
        self._ranks_per_node, self._num_ranks = topology.ranks_per_node, topology.num_ranks

    def grow(self, num_bytes: int) -> Part:
        """Allocate a piece of `num_bytes` zeros on every rank. All ranks call it together, with the same size."""
        part = self._memory.grow(num_bytes)
        local = part.addresses
        if len(local) == self._num_ranks:  # of all nodes: also those that can be addressed are written to by proxies
            local = local[self._first : self._first + self._ranks_per_node]
        before, behind = self._first, self._num_ranks - self._first - self._ranks_per_node
        return part._replace(addresses=(*(0,) * before, *local, *(0,) * behind))

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured in a graph."""
        return self._memory.is_capturing()


class SymmMemory:
    """Symmetric memory of the ranks of one node.

    Args:
        control: The group.
        group: The same, as torch knows it; None for one rank, and in a generation.
        device: This rank's GPU.
    """

    def __init__(self, control: Control, group: dist.ProcessGroup | None, device: torch.device):
        self._control = control
        self._group = group
        self._device = device
        self.num_sharing = allow_shared_gpus(control, device) if control.num_ranks > 1 else 1

    def grow(self, num_bytes: int) -> Part:
        """Allocate a piece of `num_bytes` zeros on every rank. All ranks call it together, with the same size.

        Raises:
            EPTransportError: Some rank cannot have it; all ranks raise.
        """
        if self._control.num_ranks == 1:
            alone = _allocated(lambda: torch.zeros(num_bytes, dtype=torch.uint8, device=self._device), num_bytes)
            return Part(alone, (alone.data_ptr(),), alone)
        return shared_piece(self._control, self._group, self._device, num_bytes)

    def is_capturing(self) -> bool:
        """Return whether the current stream is being captured in a graph."""
        return torch.cuda.is_current_stream_capturing()


def _addresses(memory: torch.Tensor, bases: list[int], rank: int) -> tuple[int, ...]:
    """Return the address of each rank's piece; 0: not addressable.

    A handle has the addresses of allocations. Where torch takes tensors from a pool, a piece may begin further in, and
    it does so on all ranks alike.
    """
    offset = memory.data_ptr() - bases[rank]
    return tuple(base + offset if base else 0 for base in bases)


def _allocated(allocate, num_bytes: int) -> torch.Tensor:  # type: ignore[no-untyped-def]
    try:
        memory: torch.Tensor = allocate()
        if num_bytes and not memory.data_ptr():
            raise RuntimeError("it gave no address")
        return memory
    except RuntimeError as error:
        raise EPTransportError(
            f"window: {num_bytes} bytes of GPU memory are needed, the system refuses them "
            f"({str(error).splitlines()[0]}). Make the buffer smaller, or free memory"
        ) from None
