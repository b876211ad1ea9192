"""Nominal speeds of GPUs, of the links inside a node, and of networks; and clusters by name.

These are data sheets' numbers, per GPU and direction; what calls make of them is in the table of constants.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_GBPS_OF_400G = 50.0


@dataclass(frozen=True)
class Gpu:
    """A GPU by its data sheet.

    Attributes:
        link_GBps: To all other GPUs of its node together, in one direction.
        num_sms: Streaming multiprocessors or compute units.
        bf16_tflops: Dense.
        fp8_tflops: Dense; that of BF16 where there is no FP8.
        memory_GBps: Of its memory.
        memory_GB: Size of its memory.
        num_links: Of a full mesh: links to single peers, so that few ranks have few of them; 0: a switch.
    """

    link_GBps: float
    num_sms: int
    bf16_tflops: float
    fp8_tflops: float
    memory_GBps: float
    memory_GB: float
    num_links: int = 0


_HOPPER = Gpu(450, 132, 989, 1979, 3350, 80)
GPUS: dict[str, Gpu] = {
    "H100": _HOPPER,
    "H200": Gpu(450, 132, 989, 1979, 4800, 141),
    "H800": Gpu(200, 132, 989, 1979, 3350, 80),
    "H20": Gpu(450, 78, 148, 296, 4000, 96),
    "B200": Gpu(900, 148, 2250, 4500, 8000, 180),
    "B300": Gpu(900, 148, 2250, 4500, 8000, 270),
    "GB200": Gpu(900, 152, 2500, 5000, 8000, 186),
    "GB300": Gpu(900, 152, 2500, 5000, 8000, 279),
    "MI300X": Gpu(448, 304, 1307, 2615, 5300, 192, num_links=7),
    "MI308X": Gpu(448, 80, 342, 684, 5300, 192, num_links=7),
    "MI325X": Gpu(448, 304, 1307, 2615, 6000, 256, num_links=7),
    "MI355X": Gpu(537, 256, 2500, 5000, 8000, 288, num_links=7),
    "MI350X": Gpu(537, 256, 2300, 4600, 8000, 288, num_links=7),
    "A800": Gpu(200, 108, 312, 312, 2039, 80),
    "A100": Gpu(300, 108, 312, 312, 2039, 80),
    "L4": Gpu(24, 58, 121, 242, 300, 24),
    "Ascend A2": Gpu(196, 24, 376, 376, 1600, 64),
    "Ascend A3": Gpu(196, 48, 752, 752, 3200, 128),
    "MUSA (not stated)": Gpu(400, 132, 400, 400, 1600, 80),
    "SM100 (model not stated)": Gpu(900, 148, 2250, 4500, 8000, 180),
    "Ascend (not stated)": Gpu(196, 48, 752, 752, 3200, 128),
}
"""Nominal speeds of GPUs, by the names that `plan --gpu` takes."""


def find_gpu(name: str) -> Gpu:
    """A GPU by its name; a name that is not known stands for a Hopper GPU, which most published figures are of."""
    return GPUS.get(name, _HOPPER)


def network_speed(name: str) -> float:
    """GB/s of a GPU's share of a network, from how publications name it; one port of 400 Gbit/s where it is not said.

    Example:
        `network_speed("10x400G RoCE per node")` is 62.5: ten ports of 50 GB/s for eight GPUs.
    """
    if "CX8" in name:
        return 2 * _GBPS_OF_400G
    if "CX6" in name or "4 per node" in name:
        return _GBPS_OF_400G / 2
    ports = re.search(r"(\d+)x(\d+)G\b.* per node", name)
    if ports:
        return int(ports[1]) * int(ports[2]) / 8 / 8
    own = re.search(r"(?:(\d+)x)?(\d+)G\b", name)
    if own:
        return int(own[1] or 1) * int(own[2]) / 8
    return _GBPS_OF_400G


def is_proxied(system: str, version: str, network: str) -> bool:
    """Whether a CPU thread posts the messages to the network (or EFA does not let a GPU do it), not the GPU itself."""
    words = f"{system} {version} {network}"
    return any(word in words for word in ("EFA", "UCCL", "IBRC", "AsyncLL", "pplx-garden"))


def usual_system(gpu: str) -> str:
    """Whose kernels one would run on a GPU."""
    if gpu.startswith("MI"):
        return "MORI-EP"
    return "DeepEP-Ascend" if gpu.startswith("Ascend") else "DeepEP"


@dataclass(frozen=True)
class Cluster:
    """The hardware of a cluster.

    Attributes:
        gpu: A name of `GPUS`.
        network: As in the table of constants; empty: one node.
        ranks_per_node: GPUs that the fast links join.
        link_GBps: Of a GPU to its node; None: the data sheet's.
        network_GBps: Of a GPU's share of the network; None: by the network's name.
    """

    gpu: str
    network: str
    ranks_per_node: int
    link_GBps: float | None = None
    network_GBps: float | None = None

    def check(self) -> None:
        """Refuse what is not known, with `ValueError`."""
        if self.gpu not in GPUS and self.link_GBps is None:
            raise ValueError(f"planner: there is no GPU {self.gpu!r}. Give --link-gbps, or one of {', '.join(GPUS)}")
        if self.ranks_per_node < 1:
            raise ValueError(f"planner: a node must have at least 1 rank, got {self.ranks_per_node}")

    def num_nodes(self, num_ranks: int) -> int:
        """Nodes of so many ranks; nodes are full where there are several."""
        if num_ranks > self.ranks_per_node and num_ranks % self.ranks_per_node:
            raise ValueError(
                f"planner: {num_ranks} ranks do not fill nodes of {self.ranks_per_node}. Give a multiple of that"
            )
        return max(1, num_ranks // self.ranks_per_node)


CLUSTERS: dict[str, Cluster] = {
    "h100-ib": Cluster("H100", "CX7 IB 400G", 8),
    "h200-ib": Cluster("H200", "CX7 IB 400G", 8),
    "h800-ib": Cluster("H800", "CX7 IB 400G", 8),
    "h100-efa": Cluster("H100", "EFA 32x per node (p5)", 8),
    "h200-efa": Cluster("H200", "EFA 2x200G", 8),
    "b200-ib": Cluster("B200", "CX7 IB 400G", 8),
    "b200-efa": Cluster("B200", "EFA 8x per node (p6-b200)", 8),
    "b300-ib": Cluster("B300", "CX8 IB 800G", 8),
    "gb200-nvl72": Cluster("GB200", "CX7 IB 400G", 72),
    "gb300-nvl72": Cluster("GB300", "CX8 IB 800G", 72),
    "mi300x-ib": Cluster("MI300X", "CX7 400G", 8),
    "mi355x-ainic": Cluster("MI355X", "AINIC", 8),
}
"""Clusters by the names that `plan --cluster` takes."""
