"""What doctor found, as plain data. `--json` prints it as it is."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        value: What was seen.
        status: `ok`; `note`, where something optional is missing; `problem`, where something needed is.
        advice: What to do about it, or nothing.
    """

    name: str
    value: str
    status: str = OK
    advice: str = ""


@dataclass(frozen=True)
class VariableReport:
    """An environment variable: whether it is set, and the value in force."""

    name: str
    is_set: bool
    value: str
    status: str
    help: str


@dataclass(frozen=True)
class TransportReport:
    """A transport: whom it serves, whether they would get it here, and why not, or how."""

    name: str
    serves: str
    is_used: bool
    reason: str


@dataclass(frozen=True)
class GpuReport:
    """A GPU.

    Attributes:
        index: In torch.
        name: Of its model.
        memory_bytes: All that it has.
        bus_id: On the PCI bus.
        numa_node: None: the system does not say.
        links: How it reaches the memory of each GPU: `self`, `nvlink`, `peer`, `none`.
        distances: What it has in common with each network device: `switch`, `root`, `numa`, `far`, `?`.
        nearest: Network devices at the least distance.
    """

    index: int
    name: str
    memory_bytes: int
    bus_id: str
    numa_node: int | None
    links: list[str]
    distances: list[str]
    nearest: list[str]


@dataclass(frozen=True)
class NicReport:
    """A network device, or a port of one.

    Attributes:
        name: Of the RDMA device, where it is one, else of the interface.
        interfaces: Network interfaces of the same device.
        state: As the system has it.
        gbit_per_sec: None: the system does not say.
        link_layer: `InfiniBand`, `RoCE`, `Ethernet`, ...
        bus_id: On the PCI bus, where it is on one.
        numa_node: None: the system does not say.
        nearest: GPUs at the least distance.
    """

    name: str
    interfaces: list[str]
    state: str
    gbit_per_sec: float | None
    link_layer: str
    bus_id: str | None
    numa_node: int | None
    nearest: list[int]


@dataclass(frozen=True)
class RoundTrip:
    """How the round trip went. Times are None where it did not."""

    ok: bool
    num_ranks: int
    total_secs: float
    dispatch_ms: float | None = None
    combine_ms: float | None = None
    problem: str = ""
    advice: str = ""


@dataclass(frozen=True)
class DoctorReport:
    """All that doctor found."""

    version: str
    ok: bool
    findings: list[Finding]
    gpus: list[GpuReport]
    nics: list[NicReport]
    variables: list[VariableReport]
    transports: list[TransportReport]
    round_trip: RoundTrip
