"""The bytes of a case across nodes, as a table shows them."""

from __future__ import annotations

import statistics

from .core import Measured

# Kinds of bytes; `internode_cases` and `hop_cases` say what they are.
RDMA, NVLINK, NEEDED, RAIL, WIRE = "rdma", "nvlink", "needed", "rail", "wire"

HEADS = ["RDMA MB", "NVLink MB", "needed MB", "sent MB", "on the wire MB"]
SPEEDS = ["RDMA GB/s", "NVLink GB/s"]
CAPTION = (
    "All of a rank, on average. RDMA, NVLink: bytes as DeepEP counts them, a row for each node of a token, its own one "
    "included, and the rows received. Needed: what must cross, a row for each other node of a token, with ids, weights "
    "and scales. Sent: what was handed to sockets. On the wire: what the interface of the rank's node counted, "
    "acknowledgements of what came included. Floor: the needed bytes over plain sockets. gloo: flat, every rank to "
    "every rank."
)


def mean_bytes(row: Measured, kind: str) -> float:
    """Bytes of a rank, on average. What an interface counted is shared by the ranks of its node."""
    if kind not in row.traffic:
        return 0.0
    share = row.num_ranks // row.num_nodes if kind == WIRE else 1
    return statistics.fmean(row.traffic[kind]) / share


def cells(row: Measured) -> list[str]:
    """The bytes of a line of the table: what was sent beside what was needed, in percent."""
    shown = [f"{mean_bytes(row, kind) / 1e6:.1f}" for kind in (RDMA, NVLINK)]
    return [*shown, *payload_cells(row), _sent(row, WIRE)]


def payload_cells(row: Measured) -> list[str]:
    """What had to cross, and what was sent for it."""
    return [f"{mean_bytes(row, NEEDED) / 1e6:.1f}", _sent(row, RAIL)]


def _sent(row: Measured, kind: str) -> str:
    sent, needed = mean_bytes(row, kind), mean_bytes(row, NEEDED)
    return f"{sent / 1e6:.1f} ({100 * (sent / needed - 1):+.1f}%)" if sent and needed else "-"


def speeds(row: Measured, secs: float) -> list[float]:
    """10^9 bytes a second of a rank, as DeepEP counts them."""
    return [mean_bytes(row, kind) / secs / 1e9 for kind in (RDMA, NVLINK)]
