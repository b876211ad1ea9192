"""GPUs and network devices together: what they are, and how far they are from one another."""

from __future__ import annotations

from pathlib import Path

from .gpus import Gpu, find_gpus, find_links
from .network import Nic, find_nics
from .pci import distance, nearest
from .report import GpuReport, NicReport

SYS = Path("/sys")


def look_at_hardware() -> tuple[list[GpuReport], list[NicReport]]:
    """What this machine has."""
    gpus = find_gpus(SYS)
    return compare(gpus, find_links(len(gpus)), find_nics(SYS))


def compare(gpus: list[Gpu], links: list[list[str]], nics: list[Nic]) -> tuple[list[GpuReport], list[NicReport]]:
    """Put down each device with its distances to the others.

    Args:
        gpus: By their index in torch.
        links: How each reaches each.
        nics: Network devices.
    """
    gpu_slots, nic_slots = [gpu.slot for gpu in gpus], [nic.slot for nic in nics]
    gpu_reports = [
        GpuReport(
            index,
            gpu.name,
            gpu.memory_bytes,
            gpu.bus_id,
            gpu.slot.numa_node if gpu.slot else None,
            links[index],
            [distance(gpu.slot, slot) for slot in nic_slots],
            [nics[number].name for number in nearest(gpu.slot, nic_slots)],
        )
        for index, gpu in enumerate(gpus)
    ]
    nic_reports = [
        NicReport(
            nic.name,
            list(nic.interfaces),
            nic.state,
            nic.gbit_per_sec,
            nic.link_layer,
            nic.slot.bus_id if nic.slot else None,
            nic.slot.numa_node if nic.slot else None,
            nearest(nic.slot, gpu_slots),
        )
        for nic in nics
    ]
    return gpu_reports, nic_reports
