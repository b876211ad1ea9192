"""Network devices, by what `/sys` shows: ports that do RDMA, and interfaces that do not."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .pci import Slot, slot_of, text_of

_ETHERNET, _INFINIBAND, _LOOPBACK = "1", "32", "772"  # what an interface is, as /sys/class/net/*/type has it
_LINK_LAYERS = {_ETHERNET: "Ethernet", _INFINIBAND: "InfiniBand (IP)"}


@dataclass(frozen=True)
class Nic:
    """A port that data can leave by.

    Attributes:
        name: Of the RDMA device, with its port if it has several; else of the interface.
        interfaces: Network interfaces of the same device.
        state: As the system has it: `active`, `up`, `down`, ...
        gbit_per_sec: Of the link; None: the system does not say.
        link_layer: `InfiniBand`, `RoCE`, `iWARP`; `Ethernet` or `InfiniBand (IP)` where there is no RDMA.
        slot: Where it sits; None: not on a PCI bus.
    """

    name: str
    interfaces: tuple[str, ...]
    state: str
    gbit_per_sec: float | None
    link_layer: str
    slot: Slot | None


def find_nics(sys: Path) -> list[Nic]:
    """All of them, those with RDMA first.

    Args:
        sys: Where sysfs is mounted.
    """
    rdma = list(_rdma_ports(sys))
    taken = {interface for nic in rdma for interface in nic.interfaces}
    return [*rdma, *_interfaces(sys, taken)]


def _rdma_ports(sys: Path) -> Iterator[Nic]:
    for device in _listed(sys / "class/infiniband"):
        interfaces = tuple(one.name for one in _listed(device / "device/net"))
        ports = _listed(device / "ports")
        for port in ports:
            name = device.name if len(ports) == 1 else f"{device.name}:{port.name}"
            state = text_of(port / "state").partition(":")[2].strip().lower() or "?"  # `4: ACTIVE`
            rate = re.match(r"[\d.]+(?= Gb/sec)", text_of(port / "rate"))  # `400 Gb/sec (4X NDR)`
            speed = float(rate.group()) if rate else None
            yield Nic(name, interfaces, state, speed, _rdma_layer(device, port), slot_of(device / "device"))


def _rdma_layer(device: Path, port: Path) -> str:
    layer = text_of(port / "link_layer")
    if layer == "Ethernet":
        return "iWARP" if text_of(device / "node_type").startswith("4") else "RoCE"
    return layer or "?"


def _interfaces(sys: Path, taken: set[str]) -> Iterator[Nic]:
    for interface in _listed(sys / "class/net"):
        kind = text_of(interface / "type")
        if interface.name in taken or kind == _LOOPBACK or not _is_of_use(interface):
            continue
        mbit = text_of(interface / "speed")
        speed = int(mbit) / 1000 if mbit.isdecimal() and int(mbit) else None  # -1: unknown
        layer = _LINK_LAYERS.get(kind, f"type {kind or '?'}")
        state = text_of(interface / "operstate") or "?"
        yield Nic(interface.name, (interface.name,), state, speed, layer, slot_of(interface / "device"))


def _is_of_use(interface: Path) -> bool:
    """Whether it is a device, or something made of devices that leads somewhere itself, as a bond does."""
    if (interface / "device").exists():
        return True
    return text_of(interface / "operstate") == "up" and not (interface / "master").exists()


def _listed(folder: Path) -> list[Path]:
    """What is in a folder, `mlx5_2` before `mlx5_10`; nothing where there is no such folder."""
    try:
        found = list(folder.iterdir())
    except OSError:
        return []
    return sorted(found, key=lambda one: re.sub(r"\d+", lambda digits: digits.group().zfill(9), one.name))
