"""Where devices sit on the PCI bus, by what `/sys` shows, and what two of them have in common."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

# What is nearest to both of two devices; the less of the machine a transfer crosses, the earlier in this list.
SWITCH, ROOT, NUMA, FAR, UNKNOWN = DISTANCES = ("switch", "root", "numa", "far", "?")

_ROOT_NAME = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}")
_BUS_ID = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")


@dataclass(frozen=True)
class Slot:
    """Where a device sits.

    Attributes:
        path: The PCIe root, the bridges from there on, and the device itself: `pci0000:40`, `0000:40:01.1`, ...
        numa_node: Which one the device belongs to; None: the system does not say.
    """

    path: tuple[str, ...]
    numa_node: int | None

    @property
    def bus_id(self) -> str:
        """The device's own name on the bus."""
        return self.path[-1]


def slot_of(device: Path) -> Slot | None:
    """Where a device of `/sys` sits, itself or what it is a part of; None where that is not on a PCI bus."""
    whole = Path(os.path.realpath(device))
    folders = [*reversed(whole.parents), whole]
    roots = [index for index, folder in enumerate(folders) if _ROOT_NAME.fullmatch(folder.name)]
    if not roots:
        return None
    on_bus = [folder for folder in folders[roots[0] + 1 :] if _BUS_ID.fullmatch(folder.name)]
    if not on_bus:
        return None
    path = (folders[roots[0]].name, *(folder.name for folder in on_bus))
    return Slot(path, _numa_node(on_bus[-1]))


def text_of(path: Path) -> str:
    """What a small file says; nothing where it cannot be read, as that of a link that is down."""
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""


def distance(one: Slot | None, other: Slot | None) -> str:
    """What two devices have in common: one of `DISTANCES`."""
    if one is None or other is None:
        return UNKNOWN
    if one.path[:2] == other.path[:2]:  # a root port has one link: two devices behind it are at a switch, or one card
        return SWITCH
    if one.path[0] == other.path[0]:
        return ROOT
    if one.numa_node is None or other.numa_node is None:
        return UNKNOWN
    return NUMA if one.numa_node == other.numa_node else FAR


def nearest(slot: Slot | None, others: list[Slot | None]) -> list[int]:
    """Indices of those that are nearest; none where nothing is known of any."""
    found = [DISTANCES.index(distance(slot, other)) for other in others]
    least = min(found, default=DISTANCES.index(UNKNOWN))
    return [index for index, one in enumerate(found) if one == least != DISTANCES.index(UNKNOWN)]


def _numa_node(folder: Path) -> int | None:
    text = text_of(folder / "numa_node")
    return int(text) if text.isdecimal() else None  # -1: there is one node, or the firmware does not say
