"""GPUs that torch sees: what they are, where they sit, and how they reach each other's memory."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .pci import Slot, slot_of

SELF, NVLINK, PEER, NO_PEER = "self", "nvlink", "peer", "none"


@dataclass(frozen=True)
class Gpu:
    """A GPU, by its index in torch.

    Attributes:
        name: Of its model.
        memory_bytes: All that it has.
        bus_id: Its name on the PCI bus.
        slot: Where it sits; None: `/sys` does not show it.
    """

    name: str
    memory_bytes: int
    bus_id: str
    slot: Slot | None


def find_gpus(sys: Path) -> list[Gpu]:
    """All that torch sees.

    Args:
        sys: Where sysfs is mounted.
    """
    if not torch.cuda.is_available():
        return []
    found = []
    for index in range(torch.cuda.device_count()):
        properties: Any = torch.cuda.get_device_properties(index)  # torch's stubs do not know all of it
        bus_id = f"{properties.pci_domain_id:04x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
        found.append(Gpu(properties.name, properties.total_memory, bus_id, slot_of(sys / "bus/pci/devices" / bus_id)))
    return found


def find_links(num_gpus: int) -> list[list[str]]:
    """How each GPU reaches the memory of each: `nvlink`, `peer` (by another way, or unknown by which), or `none`."""
    nvlinks = _count_nvlinks(num_gpus)

    def link(one: int, other: int) -> str:
        if one == other:
            return SELF
        if not torch.cuda.can_device_access_peer(one, other):
            return NO_PEER
        return NVLINK if nvlinks[one][other] else PEER

    return [[link(one, other) for other in range(num_gpus)] for one in range(num_gpus)]


def _count_nvlinks(num_gpus: int) -> list[list[int]]:
    """NVLinks between GPUs; zeros where torch cannot tell."""
    none = [[0] * num_gpus for _ in range(num_gpus)]
    if num_gpus < 2:
        return none
    try:
        c10d: Any = importlib.import_module("torch._C._distributed_c10d")
        counts = c10d._detect_dma_connectivity(torch._C._autograd.DeviceType.CUDA, "nvlink").matrix
    except Exception:  # nothing promises it: a build, a driver or a container may be without what it asks
        return none
    return counts if len(counts) == num_gpus else none
