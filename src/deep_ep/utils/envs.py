"""Starting ranks, seeds, printing, and what the machine's links can do.

A script of N local ranks calls `init_dist(local_rank, N)` in each process. It works with a GPU for every rank, with
fewer GPUs than ranks, and with none.
"""

from __future__ import annotations

import functools
import os
import random
import re
import subprocess
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from ..errors import EPUnsupported
from ..topology import get_logical_domain_size, get_physical_domain_size

__all__ = [
    "check_fast_rdma_atomic_support",
    "check_nvlink_connections",
    "check_torch_deterministic",
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_nvlink_gbs",
    "get_physical_domain_size",
    "get_rdma_gbs",
    "init_dist",
    "init_seed",
]

# The device id of the NICs whose atomics are fast, as ibstat prints it.
_FAST_ATOMIC_CA_TYPE = "MT4131"
_PROBE_TIMEOUT_SECS = 30


@dataclass
class _State:
    """What this process was told by `init_seed` and `init_dist`."""

    global_seed: int = 0
    local_seed: int = 0
    local_rank: int | None = None


_state = _State()


def init_seed(global_seed: int) -> None:
    """Seed `torch` and `random` with `global_seed` + rank (0 where no group exists), and remember both."""
    _state.global_seed = global_seed
    _state.local_seed = global_seed + (dist.get_rank() if dist.is_initialized() else 0)
    torch.manual_seed(_state.local_seed)
    random.seed(_state.local_seed)


def get_local_seed() -> int:
    """The seed of this rank; 0 before any `init_seed`."""
    return _state.local_seed


def get_global_seed() -> int:
    """The seed that all ranks share; 0 before any `init_seed`."""
    return _state.global_seed


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print on every rank, or once a node, then wait for all. All ranks call it together, after `init_dist`.

    Args:
        s: The text.
        once_in_node: Print only where the local rank is 0.
    """
    if _state.local_rank is None:
        raise ValueError("dist_print: init_dist must be called first")
    if not once_in_node or _state.local_rank == 0:
        print(s, flush=True)
    dist.barrier()


def init_dist(local_rank: int, num_local_ranks: int, seed: int = 0) -> tuple[int, int, dist.ProcessGroup]:
    """Join the group, bind the device, set the defaults that DeepEP's scripts rely on, and seed.

    Reads `MASTER_ADDR` (127.0.0.1), `MASTER_PORT` (8361), `WORLD_SIZE` (number of nodes, 1) and `RANK` (this node, 0).
    The default dtype becomes bfloat16. With a GPU, `cuda:{local_rank % GPUs}` becomes the current and `cuda` the
    default device; without one the default device stays as it is. The group is NCCL where every rank has a GPU of its
    own, and gloo otherwise, since NCCL refuses two ranks on one GPU; both take tensors of the default device. With
    gloo, `torch.distributed.all_gather_into_tensor` is replaced by one that takes stacked outputs, too, as NCCL's does.

    Args:
        local_rank: This rank's index on its node.
        num_local_ranks: Ranks of each node.
        seed: Seed that all ranks share; see `init_seed`.

    Returns:
        This rank, the number of ranks, and a group of all of them.
    """
    num_nodes, node = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    num_ranks, rank = num_nodes * num_local_ranks, node * num_local_ranks + local_rank
    address, port = os.environ.get("MASTER_ADDR", "127.0.0.1"), int(os.environ.get("MASTER_PORT", "8361"))

    device = _bind_device(local_rank)
    store = dist.TCPStore(address, port, num_ranks, is_master=rank == 0)
    if _is_gpu_per_rank(_gather_gpu_ids(store, rank, num_ranks, device)):
        # Naming the device lets barriers run on it without a guess from the rank.
        dist.init_process_group("nccl", store=store, rank=rank, world_size=num_ranks, device_id=device)
    else:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
        _accept_stacked_gathers()

    torch.set_default_dtype(torch.bfloat16)
    if device is not None:
        torch.set_default_device("cuda")
    _state.local_rank = local_rank
    init_seed(seed)
    group = dist.new_group(list(range(num_ranks)))
    assert isinstance(group, dist.ProcessGroup)
    return rank, num_ranks, group


def _accept_stacked_gathers() -> None:
    """Have `all_gather_into_tensor` take outputs of [R, *shape], as DeepEP's scripts do; gloo takes [R * n, ...]."""
    gather = dist.all_gather_into_tensor
    if getattr(gather, "takes_stacked", False):
        return

    @functools.wraps(gather)
    def stacked(output_tensor: torch.Tensor, input_tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        is_stacked = output_tensor.dim() == input_tensor.dim() + 1 and input_tensor.dim() > 0
        flat = output_tensor.view(-1, *input_tensor.shape[1:]) if is_stacked else output_tensor
        return gather(flat, input_tensor, *args, **kwargs)

    stacked.takes_stacked = True  # type: ignore[attr-defined]
    dist.all_gather_into_tensor = stacked


def check_nvlink_connections(group: dist.ProcessGroup) -> None:
    """On PCIe cards, check that the group's GPUs are one, or a pair with NVLink. All ranks call it together.

    Other cards have NVLink by construction, and ranks on one GPU need none.

    Raises:
        EPUnsupported: If they are not.
    """
    if not torch.cuda.is_available() or "PCIE" not in torch.cuda.get_device_name():
        return
    gathered: list[str] = [""] * group.size()
    dist.all_gather_object(gathered, _gpu_id(torch.device("cuda", torch.cuda.current_device())), group=group)
    gpus = sorted(set(gathered))
    if len(gpus) > 2:
        raise EPUnsupported(f"check_nvlink_connections: NVLink joins PCIe cards in pairs, the group has {len(gpus)}")
    if len(gpus) == 2 and not _are_nvlinked(gpus[0], gpus[1]):
        raise EPUnsupported(f"check_nvlink_connections: no NVLink between the PCIe cards {gpus[0]} and {gpus[1]}")


def check_torch_deterministic() -> None:
    """Raise `AssertionError` where torch would fill new tensors behind the buffers' back.

    With deterministic algorithms on, torch by default writes a pattern into every uninitialised tensor: one more kernel
    for each received tensor, on whichever stream allocates it.
    """
    fills = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    assert not (torch.are_deterministic_algorithms_enabled() and fills), (
        "check_torch_deterministic: deterministic algorithms must not fill uninitialised memory. "
        "Set torch.utils.deterministic.fill_uninitialized_memory = False"
    )


@functools.cache
def get_nvlink_gbs(factor: float = 0.9) -> float:
    """The NVLink GB/s of the first GPU, each way, times `factor`; 0, with a line printed, if unknown."""
    try:
        rates = _link_rates(_output_of("nvidia-smi", "nvlink", "-s"))
    except (OSError, subprocess.SubprocessError) as error:
        print(f"get_nvlink_gbs: cannot ask nvidia-smi: {error}")
        return 0.0
    if not rates:
        print("get_nvlink_gbs: nvidia-smi reports no active NVLink")
    return sum(rates) * factor


def check_fast_rdma_atomic_support(nic_name: str | None = None) -> bool:
    """Whether the NIC (default: `EP_NIC_NAME`, or mlx5_0) has fast RDMA atomics; false if unknown."""
    return _ibstat(nic_name or _default_nic()).get("CA type") == _FAST_ATOMIC_CA_TYPE


def get_rdma_gbs(nic_name: str | None = None) -> float:
    """The GB/s of the NIC (default: `EP_NIC_NAME`, or mlx5_0); 0, with a line printed, if unknown."""
    nic_name = nic_name or _default_nic()
    rate = _ibstat(nic_name).get("Rate")
    if rate is None:
        print(f"get_rdma_gbs: ibstat reports no rate for {nic_name}")
        return 0.0
    return float(rate) / 8


def _bind_device(local_rank: int) -> torch.device | None:
    """Make this rank's GPU the current device; surplus ranks share GPUs. `None` without a GPU."""
    if not torch.cuda.is_available():
        return None
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _gpu_id(device: torch.device) -> str:
    """The GPU's UUID: indices say nothing across processes, where each may see other GPUs."""
    return str(torch.cuda.get_device_properties(device).uuid).removeprefix("GPU-")


def _gather_gpu_ids(store: dist.Store, rank: int, num_ranks: int, device: torch.device | None) -> list[str]:
    """The UUID of every rank's GPU, empty where there is none; through the store, as no group exists yet."""
    store.set(f"deep_ep/gpu/{rank}", "" if device is None else _gpu_id(device))
    return [store.get(f"deep_ep/gpu/{peer}").decode() for peer in range(num_ranks)]


def _is_gpu_per_rank(gpu_ids: list[str]) -> bool:
    return dist.is_nccl_available() and all(gpu_ids) and len(set(gpu_ids)) == len(gpu_ids)


def _output_of(*command: str) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=_PROBE_TIMEOUT_SECS).stdout


def _link_rates(text: str) -> list[float]:
    """The GB/s of each active link of the first GPU in the output of `nvidia-smi nvlink -s`.

    Lines are `GPU 0: name`, then one `Link 3: 26.562 GB/s` (or `<inactive>`) for each link.
    """
    first = re.split(r"^GPU \d+:", text, flags=re.MULTILINE)[1:2]
    return [float(rate) for part in first for rate in re.findall(r"Link \d+:\s*([\d.]+) GB/s", part)]


def _are_nvlinked(gpu: str, other: str) -> bool:
    """Whether NVLink joins the GPUs with these UUIDs."""
    try:
        listing = _output_of("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")
        matrix = _p2p_matrix(_output_of("nvidia-smi", "topo", "-p2p", "n"))
    except (OSError, subprocess.SubprocessError) as error:
        raise EPUnsupported(f"check_nvlink_connections: cannot ask nvidia-smi: {error}") from error
    index_of = {uuid: int(index) for index, uuid in re.findall(r"(\d+)\s*,\s*(?:GPU-)?(\S+)", listing)}
    return matrix[index_of[gpu]][index_of[other]] == "OK"


def _p2p_matrix(text: str) -> dict[int, list[str]]:
    """The rows of `nvidia-smi topo -p2p n`: each GPU's NVLink status towards every GPU (`X` for itself)."""
    plain = re.sub(r"\x1b\[[\d;]*m", "", text)
    # The head line also starts with GPU0, but a GPU follows and not a status.
    rows = re.findall(r"^\s*GPU(\d+)[ \t]+(?!GPU)(\S.*)$", plain, flags=re.MULTILINE)
    return {int(index): cells.split() for index, cells in rows}


def _default_nic() -> str:
    return os.environ.get("EP_NIC_NAME") or "mlx5_0"


@functools.cache
def _ibstat(nic_name: str) -> dict[str, str]:
    """The `name: value` lines of ibstat for a NIC, its first port's for repeated names; empty on failure."""
    try:
        text = _output_of("ibstat", nic_name)
    except (OSError, subprocess.SubprocessError):
        return {}
    fields: dict[str, str] = {}
    for name, value in re.findall(r"^\s*([^:\n]+):[ \t]*(\S.*)$", text, flags=re.MULTILINE):
        fields.setdefault(name.strip(), value.strip())
    return fields
