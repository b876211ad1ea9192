"""GPUs and network devices as tables."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from ..terminal import plain_table
from .report import GpuReport, NicReport

_LEGEND = (
    "nvlink, peer: how one GPU reaches the other's memory (peer: by PCIe, or torch cannot tell). "
    "switch, root, numa: what a GPU and a network device share, the nearest first; far: not even a NUMA node"
)


def show_hardware(console: Console, gpus: list[GpuReport], nics: list[NicReport]) -> None:
    """Print what there is, and the distances where there is something to compare."""
    if gpus:
        console.print("\n[bold]GPUs[/]")
        console.print(_gpu_table(gpus))
    if nics:
        console.print("\n[bold]Networks[/]")
        console.print(_nic_table(nics, bool(gpus)))
    if gpus and len(gpus) + len(nics) > 1:
        console.print("\n[bold]Distances[/]  [dim](from each GPU)[/]")
        console.print(_distance_table(gpus, nics))
        console.print(_LEGEND, style="dim")


def _gpu_table(gpus: list[GpuReport]) -> Table:
    table = _table("", "", "memory", "PCI", "NUMA", "nearest network")
    for gpu in gpus:
        memory = f"{gpu.memory_bytes / 1e9:.0f} GB"
        table.add_row(f"GPU {gpu.index}", gpu.name, memory, gpu.bus_id, _number(gpu.numa_node), ", ".join(gpu.nearest))
    return table


def _nic_table(nics: list[NicReport], has_gpus: bool) -> Table:
    table = _table("", "state", "Gbit/s", "link", "PCI", "NUMA", *(["nearest GPU"] if has_gpus else []))
    for nic in nics:
        others = [name for name in nic.interfaces if name != nic.name]
        name = f"{nic.name} ({', '.join(others)})" if others else nic.name
        speed = "" if nic.gbit_per_sec is None else f"{nic.gbit_per_sec:g}"
        where = (nic.bus_id or "", _number(nic.numa_node), ", ".join(map(str, nic.nearest)))
        table.add_row(name, nic.state, speed, nic.link_layer, *where[: 3 if has_gpus else 2])
    return table


def _distance_table(gpus: list[GpuReport], nics: list[NicReport]) -> Table:
    table = _table("", *(str(gpu.index) for gpu in gpus))
    for gpu in gpus:
        table.add_row(f"GPU {gpu.index}", *(other.links[gpu.index] for other in gpus))
    for number, nic in enumerate(nics):
        table.add_row(nic.name, *(gpu.distances[number] for gpu in gpus))
    return table


def _table(first: str, *titles: str) -> Table:
    table = plain_table(header_style="dim")
    table.add_column(first, style="bold", no_wrap=True)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _number(value: int | None) -> str:
    return "" if value is None else str(value)
