"""What doctor reads from `/sys` of machines that are not here: a made-up tree, and two made-up GPUs."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from deep_ep.tools.doctor import gpus
from deep_ep.tools.doctor.gpus import Gpu
from deep_ep.tools.doctor.hardware import compare
from deep_ep.tools.doctor.hardware_tables import show_hardware
from deep_ep.tools.doctor.network import find_nics
from deep_ep.tools.doctor.pci import FAR, NUMA, ROOT, SWITCH, UNKNOWN, Slot, distance, nearest, slot_of
from deep_ep.tools.doctor.report import GpuReport, NicReport

SWITCH_PATH = "pci0000:40/0000:40:01.1/0000:41:00.0"  # a root port, and the upper side of a switch


class FakeSys:
    """A tree as sysfs has it: devices by their place, classes of links to them."""

    def __init__(self, root: Path):
        self.root = root

    def device(self, path: str, numa_node: int = -1) -> Path:
        folder = self.root / "devices" / path
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "numa_node").write_text(f"{numa_node}\n")
        _link(self.root / "bus/pci/devices" / folder.name, folder)
        return folder

    def interface(self, name: str, device: Path | None, **files: str) -> Path:
        folder = (device or self.root / "devices/virtual") / "net" / name
        _write(folder, {"type": "1", "operstate": "up", **files})
        if device is not None:
            _link(folder / "device", device)
        _link(self.root / "class/net" / name, folder)
        return folder

    def rdma(self, name: str, device: Path, *ports: dict[str, str], node_type: str = "1: CA") -> None:
        folder = device / "infiniband" / name
        _write(folder, {"node_type": node_type})
        for number, files in enumerate(ports, start=1):
            _write(folder / "ports" / str(number), files)
        _link(folder / "device", device)
        _link(self.root / "class/infiniband" / name, folder)

    def gpu(self, bus_id: str) -> Gpu:
        return Gpu("NVIDIA H200", 141 * 10**9, bus_id, slot_of(self.root / "bus/pci/devices" / bus_id))


def _write(folder: Path, files: dict[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name).write_text(text + "\n")


def _link(at: Path, to: Path) -> None:
    at.parent.mkdir(parents=True, exist_ok=True)
    at.symlink_to(os.path.relpath(to, at.parent))


@pytest.fixture
def fake(tmp_path: Path) -> FakeSys:
    return FakeSys(tmp_path)


def infiniband(
    state: str = "4: ACTIVE", rate: str = "400 Gb/sec (4X NDR)", layer: str = "InfiniBand"
) -> dict[str, str]:
    return {"state": state, "rate": rate, "link_layer": layer}


def shown(gpus: list[GpuReport], nics: list[NicReport]) -> list[str]:
    """The tables, as a terminal of eighty columns has them."""
    text = io.StringIO()
    show_hardware(Console(width=80, file=text), gpus, nics)
    return text.getvalue().splitlines()


def test_a_machine_without_anything(fake: FakeSys) -> None:
    assert find_nics(fake.root) == []
    assert compare([], [], []) == ([], [])


def test_a_laptop(fake: FakeSys) -> None:
    """A card by way of virtio, one that is down and has no speed; no loopback, no ends of containers' cables."""
    fake.interface("eth0", fake.device("pci0000:00/0000:00:03.0/virtio2"), speed="1000")
    fake.interface("wlan0", fake.device("pci0000:00/0000:00:14.3"), operstate="down", speed="-1")
    fake.interface("lo", None, type="772", operstate="unknown")
    fake.interface("ifb0", None, operstate="down")
    fake.interface("bond0", None, speed="25000")
    _link(fake.interface("veth1", None) / "master", fake.root / "class/net/bond0")
    nics = {nic.name: nic for nic in find_nics(fake.root)}
    assert list(nics) == ["bond0", "eth0", "wlan0"]
    assert (nics["eth0"].gbit_per_sec, nics["eth0"].link_layer, nics["eth0"].state) == (1.0, "Ethernet", "up")
    assert nics["eth0"].slot == Slot(("pci0000:00", "0000:00:03.0"), None)
    assert (nics["wlan0"].gbit_per_sec, nics["wlan0"].state) == (None, "down")
    assert (nics["bond0"].gbit_per_sec, nics["bond0"].slot) == (25.0, None)


def test_rdma_devices(fake: FakeSys) -> None:
    """One with its IP interface beside it, one of two ports, one over Ethernet; by number, not by letter."""
    first = fake.device(f"{SWITCH_PATH}/0000:42:00.0/0000:43:00.0", numa_node=0)
    fake.rdma("mlx5_2", first, infiniband())
    fake.interface("ib0", first, type="32")
    second = fake.device("pci0000:80/0000:80:01.1/0000:81:00.0", numa_node=1)
    fake.rdma("mlx5_10", second, infiniband(state="1: DOWN", rate="10 Gb/sec (4X SDR)"), infiniband())
    third = fake.device("pci0000:80/0000:80:02.1/0000:82:00.0", numa_node=1)
    fake.rdma("mlx5_11", third, infiniband(layer="Ethernet"))
    fake.rdma("irdma0", third, infiniband(layer="Ethernet"), node_type="4: RNIC")
    nics = find_nics(fake.root)
    assert [nic.name for nic in nics] == ["irdma0", "mlx5_2", "mlx5_10:1", "mlx5_10:2", "mlx5_11"]
    assert [nic.link_layer for nic in nics] == ["iWARP", "InfiniBand", "InfiniBand", "InfiniBand", "RoCE"]
    assert [nic.state for nic in nics[1:4]] == ["active", "down", "active"]
    assert [nic.gbit_per_sec for nic in nics[1:4]] == [400.0, 10.0, 400.0]
    assert nics[1].interfaces == ("ib0",)  # and it is not listed a second time
    assert nics[1].slot is not None
    assert (nics[1].slot.bus_id, nics[1].slot.numa_node) == ("0000:43:00.0", 0)


def test_distances() -> None:
    behind_switch = Slot(("pci0000:40", "0000:40:01.1", "0000:41:00.0", "0000:42:00.0", "0000:43:00.0"), 0)
    beside_it = Slot(("pci0000:40", "0000:40:01.1", "0000:41:00.0", "0000:42:01.0", "0000:44:00.0"), 0)
    other_port = Slot(("pci0000:40", "0000:40:03.1", "0000:45:00.0"), 0)
    other_root = Slot(("pci0000:60", "0000:60:01.1", "0000:61:00.0"), 0)
    other_node = Slot(("pci0000:80", "0000:80:01.1", "0000:81:00.0"), 1)
    nowhere = Slot(("pci0000:a0", "0000:a0:01.1"), None)
    others: list[Slot | None] = [beside_it, other_port, other_root, other_node, nowhere, None]
    assert [distance(behind_switch, other) for other in others] == [SWITCH, ROOT, NUMA, FAR, UNKNOWN, UNKNOWN]
    assert nearest(behind_switch, others) == [0]
    assert nearest(other_root, [other_node, behind_switch, other_port]) == [1, 2]  # two at the same distance
    assert nearest(nowhere, others[:4]) == []
    assert nearest(behind_switch, []) == []


def test_two_gpus_and_their_networks(fake: FakeSys) -> None:
    """The first GPU has a network behind its switch; the second one, on the other NUMA node, at its root."""
    fake.device(f"{SWITCH_PATH}/0000:42:01.0/0000:44:00.0", numa_node=0)
    fake.rdma("mlx5_0", fake.device(f"{SWITCH_PATH}/0000:42:00.0/0000:43:00.0", numa_node=0), infiniband())
    fake.device("pci0000:80/0000:80:03.1/0000:83:00.0", numa_node=1)
    fake.rdma("mlx5_1", fake.device("pci0000:80/0000:80:01.1/0000:81:00.0", numa_node=1), infiniband())
    known = [fake.gpu("0000:44:00.0"), fake.gpu("0000:83:00.0"), fake.gpu("0000:ff:00.0")]  # `/sys` shows no third
    links = [["self", "nvlink", "none"], ["nvlink", "self", "none"], ["none", "none", "self"]]
    gpu_reports, nic_reports = compare(known, links, find_nics(fake.root))
    assert [gpu.distances for gpu in gpu_reports] == [[SWITCH, FAR], [FAR, ROOT], [UNKNOWN, UNKNOWN]]
    assert [gpu.nearest for gpu in gpu_reports] == [["mlx5_0"], ["mlx5_1"], []]
    assert [gpu.numa_node for gpu in gpu_reports] == [0, 1, None]
    assert [nic.nearest for nic in nic_reports] == [[0], [1]]
    lines = [line.split() for line in shown(gpu_reports, nic_reports)]
    assert ["GPU", "0", "NVIDIA", "H200", "141", "GB", "0000:44:00.0", "0", "mlx5_0"] in lines
    assert ["mlx5_0", "active", "400", "InfiniBand", "0000:43:00.0", "0", "0"] in lines
    assert ["GPU", "0", "self", "nvlink", "none"] in lines
    assert ["mlx5_1", "far", "root", "?"] in lines


def test_gpus_as_torch_has_them(fake: FakeSys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their names on the bus, and how they reach each other: also where torch knows nothing of NVLink."""
    fake.device("pci0000:40/0000:40:01.1/0000:9b:00.0", numa_node=1)

    def properties(index: int) -> SimpleNamespace:
        bus = SimpleNamespace(pci_domain_id=0, pci_bus_id=0x9B + index, pci_device_id=0)
        return SimpleNamespace(name="NVIDIA H200", total_memory=141 << 30, **vars(bus))

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda one, other: 2 not in (one, other))
    monkeypatch.setitem(sys.modules, "torch._C._distributed_c10d", None)
    found = gpus.find_gpus(fake.root)
    assert [gpu.bus_id for gpu in found] == ["0000:9b:00.0", "0000:9c:00.0", "0000:9d:00.0"]
    assert [gpu.slot and gpu.slot.numa_node for gpu in found] == [1, None, None]
    assert gpus.find_links(3) == [["self", "peer", "none"], ["peer", "self", "none"], ["none", "none", "self"]]
    monkeypatch.setattr(gpus, "_count_nvlinks", lambda _: [[0, 18, 18], [18, 0, 18], [18, 18, 0]])
    assert gpus.find_links(3)[0] == ["self", "nvlink", "none"]


def test_a_full_machine_fits_a_terminal(fake: FakeSys) -> None:
    """Eight GPUs and ten networks, in eighty columns: no line is broken."""
    for index in range(10):
        fake.rdma(f"mlx5_{index}", fake.device(f"pci0000:{index}0/0000:{index}0:01.0", numa_node=0), infiniband())
    eight = [Gpu("NVIDIA H100 80GB HBM3", 80 * 10**9, f"0000:{index}b:00.0", None) for index in range(8)]
    lines = shown(*compare(eight, [["nvlink"] * 8] * 8, find_nics(fake.root)))
    assert max(map(len, lines)) <= 80
    assert sum(line.startswith("mlx5_") for line in lines) == 2 * 10
    assert sum(line.split()[2:] == ["nvlink"] * 8 for line in lines if line.startswith("GPU")) == 8
