"""A call of some system on some hardware, what of it the time model looks at, and published figures of such calls.

Rows: normal modes send a token once to each rank (and across nodes once to each node, where it is handed on); low
latency sends it once for each expert. `Work` has the numbers of the model, per rank, on average or of the busiest.
"""

from __future__ import annotations

import csv
import functools
import math
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from .formats import FORMATS, row_bytes
from .hardware import find_gpu, is_proxied, network_speed
from .routing import Routing, uniform_reach

DEFAULT_SMS = 24  # of DeepEP's normal kernels, and of those like them
_MORI_BLOCKS = 80  # about what its tuned configurations use

# What publications leave out is most often DeepSeek-V3's shape.
_USUAL_HIDDEN, _USUAL_TOPK, _USUAL_EXPERTS, _USUAL_TOKENS = 7168, 8, 256, 128


@dataclass(frozen=True)
class Call:
    """One dispatch, combine, or both.

    Attributes:
        system: Whose kernels, as in the table of constants.
        version: Of the system; empty: any.
        gpu: A name of `hardware.GPUS`.
        network: As in the table of constants.
        mode: `normal`, `low_latency`, `a2a`, `hybrid` or `v2`.
        op: `dispatch`, `combine` or `both`.
        dtype: A name of `formats.FORMATS`; of `both`, that of dispatch.
        num_tokens: Of each rank.
        hidden: Channels.
        routing: The router; only what is uniform of it.
        num_ranks: R.
        ranks_per_node: Ranks that fast links join.
        num_sms: SMs that the kernels use; 0: as the system does by itself.
        link_GBps: Nominal speed of the links; 0: the GPU's.
        network_GBps: Nominal speed of a GPU's share of the network; 0: by its name.
        rank_load: Rows of the busiest rank over the mean of a uniform router.
        network_load: Bytes of the busiest network interface over the mean of a uniform router.
        is_expanded: The receiver writes a row for each expert, not for each token.
    """

    system: str
    gpu: str
    network: str
    mode: str
    op: str
    dtype: str
    num_tokens: int
    hidden: int
    routing: Routing
    num_ranks: int
    ranks_per_node: int
    version: str = ""
    num_sms: int = 0
    link_GBps: float = 0.0
    network_GBps: float = 0.0
    rank_load: float = 1.0
    network_load: float = 1.0
    is_expanded: bool = False

    @property
    def num_nodes(self) -> int:
        """Nodes, the last perhaps not full."""
        return -(-self.num_ranks // self.ranks_per_node)

    @property
    def family(self) -> tuple[str, str, str]:
        """What a figure belongs to: system, GPU and network."""
        return self.system, self.gpu, self.network

    @property
    def is_per_expert(self) -> bool:
        """Whether a token travels once for each expert."""
        return sends_per_expert(self.system, self.mode)


def sends_per_expert(system: str, mode: str) -> bool:
    """Whether a system's mode sends a token once for each expert; MORI's low latency sends it once to each rank."""
    return system.startswith("pplx") or (mode == "low_latency" and not system.startswith("MORI"))


class Work(NamedTuple):
    """What the time model looks at.

    Attributes:
        is_multi_node: 1 for several nodes, else 0.
        num_ranks: R.
        num_experts: E in low latency, whose kernels visit every expert; else 0.
        row_KB: 1000 bytes of a row.
        link_us: Time of the bytes of the links inside a node, at their nominal speed.
        network_us: The same of the network.
        sm_tokens_KB: 1000 bytes of the rank's own tokens, for each SM.
        sm_rows: Rows for each SM.
        sm_rows_KB: 1000 bytes of these.
    """

    is_multi_node: float
    num_ranks: float
    num_experts: float
    row_KB: float
    link_us: float
    network_us: float
    sm_tokens_KB: float
    sm_rows: float
    sm_rows_KB: float


def find_work(call: Call) -> Work:
    """Count what a call does. See `Call` for what is counted once and what for each expert."""
    num_nodes, per_node = call.num_nodes, min(call.ranks_per_node, call.num_ranks)
    topk, num_experts = call.routing.topk, call.routing.num_experts
    size_KB = _bytes_of(call) / 1e3
    is_pure_rdma = "pure RDMA" in call.version  # no links inside a node
    if call.is_per_expert:
        rows = float(call.num_tokens * topk)
        network_rows = rows if is_pure_rdma else rows * (1 - per_node / call.num_ranks)
    else:
        rows = call.num_tokens * call.num_ranks * _reach(call.routing, call.num_ranks)
        network_rows = call.num_tokens * (num_nodes - 1) * _reach(call.routing, num_nodes)
    link_rows = rows - network_rows if call.is_per_expert else rows
    link_rows *= (per_node - 1) / per_node  # its own rows stay
    sms = sms_of(call)
    written = float(call.num_tokens * topk) if call.is_expanded else rows
    return Work(
        is_multi_node=float(num_nodes > 1),
        num_ranks=float(call.num_ranks),
        num_experts=float(num_experts if call.mode == "low_latency" else 0),
        row_KB=size_KB,
        link_us=link_rows * size_KB * call.rank_load / _link_speed(call, per_node),
        network_us=network_rows * size_KB * call.network_load / (call.network_GBps or network_speed(call.network)),
        sm_tokens_KB=call.num_tokens * size_KB / sms,
        sm_rows=written * call.rank_load / sms,
        sm_rows_KB=written * size_KB * call.rank_load / sms,
    )


def _bytes_of(call: Call) -> float:
    size = row_bytes(call.dtype, call.hidden)
    return size + row_bytes("bf16", call.hidden) if call.op == "both" else size


@functools.lru_cache(maxsize=4096)
def _reach(routing: Routing, num_units: int) -> float:
    return uniform_reach(routing, num_units)


def _link_speed(call: Call, per_node: int) -> float:
    """KB per microsecond, which is the same number as GB/s; of a mesh, of as many links as there are peers."""
    gpu = find_gpu(call.gpu)
    speed = call.link_GBps or gpu.link_GBps
    return speed * max(1, min(per_node - 1, gpu.num_links)) / gpu.num_links if gpu.num_links else speed


def sms_of(call: Call) -> int:
    """SMs that share the rows. Low latency uses a whole number of experts for each of them, so few experts use few."""
    if call.num_sms:
        return call.num_sms
    num_sms = find_gpu(call.gpu).num_sms
    if call.is_per_expert:
        per_sm = math.ceil(call.routing.num_experts / num_sms)
        return math.ceil(call.routing.num_experts / per_sm)
    if call.system.startswith("MORI"):
        return min(_MORI_BLOCKS, num_sms)
    return num_sms if call.mode == "a2a" else DEFAULT_SMS


# Levels at which constants are kept, from what everything shares to a version of a system on some hardware.

Key = tuple[str, ...]
LEVELS = ("kind", "system", "hardware", "version")


def keys_of(call: Call) -> dict[str, Key]:
    """The keys of a call, by level. Inside a node the network does not matter.

    Combine of rows that are not BF16 is a call of its own: how a system converts them differs more than the bytes.
    """
    scope = "nodes" if call.num_nodes > 1 else "node"
    kind = call.mode if call.mode in ("low_latency", "a2a") else "normal"
    proxied = "proxy" if scope == "nodes" and is_proxied(call.system, call.version, call.network) else "direct"
    op = f"{call.op} {call.dtype}" if call.op == "combine" and call.dtype != "bf16" else call.op
    system = _algorithm(call)
    network = call.network if scope == "nodes" else ""
    return {
        "kind": (kind, call.op, scope, proxied),
        "system": (system, call.mode, op, scope, proxied),
        "hardware": (system, call.mode, op, scope, proxied, call.gpu, network),
        "version": (system, call.mode, op, scope, proxied, call.gpu, network, call.version),
    }


def _algorithm(call: Call) -> str:
    """A system's name, and which of its algorithms where a version names another one."""
    for word in ("AsyncLL", "pure RDMA"):
        if word in call.version:
            return f"{call.system} {word}"
    return call.system


# Published figures ---------------------------------------------------------------------------------------------------


class Point(NamedTuple):
    """A published figure.

    Attributes:
        call: What was called.
        latency_us: How long it took.
        id: Of the figure.
        source: Where it was published.
        is_from_bandwidth: Only a bandwidth was published; the latency follows from the bytes that it counts.
    """

    call: Call
    latency_us: float
    id: str
    source: str
    is_from_bandwidth: bool = False


class Points(NamedTuple):
    """A file of figures.

    Attributes:
        points: Those that can be used.
        left_out: How many cannot, by the reason.
    """

    points: list[Point]
    left_out: dict[str, int]

    def with_latency(self) -> list[Point]:
        """Those whose latency was published."""
        return [point for point in self.points if not point.is_from_bandwidth]


OPS = ("dispatch", "combine", "both")
_COLUMNS = [
    *("id", "system", "version", "source", "gpu", "network", "nodes", "ranks", "ranks_per_node", "mode", "op", "dtype"),
    *("tokens_per_rank", "hidden", "topk", "num_experts", "topk_groups", "num_groups", "sms"),
    *("latency_us", "bandwidth_GBps", "bandwidth_counts", "notes"),
]

_DTYPES = {
    "": "bf16",
    "fp8 (no scales)": "fp8-unscaled",
    "bf16 (fp8_direct_cast on the wire)": "fp8-unscaled",
    "low precision (wire format not stated)": "fp8",
    "fp8 dispatch + bf16 combine": "fp8",
    "bf16 dispatch + bf16 combine": "bf16",
}


def read_points(path: Path) -> Points:
    """Read a CSV file of published figures.

    Raises:
        ValueError: It cannot be read, or lacks a column.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            missing = [name for name in _COLUMNS if name not in (reader.fieldnames or [])]
            if missing:
                raise ValueError(f"planner: {path} lacks the columns {', '.join(missing)}")
            return _usable(reader)
    except OSError as error:
        raise ValueError(f"planner: {path} cannot be read ({error.strerror})") from None


def _usable(rows: Iterable[dict[str, str]]) -> Points:
    """Figures that can be used; one that makes no sense is counted, and does not keep the others out."""
    points: list[Point] = []
    left_out: dict[str, int] = defaultdict(int)
    for row in rows:
        if row["op"] not in OPS:
            left_out[f"the operation {row['op']!r}"] += 1
            continue
        try:
            call = _call_of(row)
            latency_us, is_from_bandwidth = _latency_of(row, call)
        except ValueError as error:
            left_out[f"numbers that make no sense ({error})"] += 1
            continue
        if latency_us is not None:
            points.append(Point(call, latency_us, row["id"], row["source"], is_from_bandwidth))
        elif row["bandwidth_GBps"]:
            left_out["a bandwidth whose bytes are not said"] += 1
        else:
            left_out["neither latency nor bandwidth"] += 1
    return Points(points, dict(left_out))


def _call_of(row: dict[str, str]) -> Call:
    num_ranks = _number(row["ranks"]) or _number(row["ranks_per_node"]) or (4 if row["gpu"] == "GB200" else 8)
    num_experts = _number(row["num_experts"]) or max(_USUAL_EXPERTS, num_ranks)
    num_groups = _number(row["num_groups"]) or 1
    topk_groups = min(_number(row["topk_groups"]) or num_groups, num_groups)
    if num_experts % num_groups:
        num_groups, topk_groups = 1, 1
    reachable = num_experts // num_groups * topk_groups
    routing = Routing(
        num_experts,
        min(_number(row["topk"]) or _USUAL_TOPK, reachable),
        num_groups,
        topk_groups,
        is_balanced="balanced" in row["notes"],
    )
    routing.check()
    return Call(
        system=row["system"],
        version=row["version"],
        gpu=row["gpu"],
        network=row["network"],
        mode=row["mode"],
        op=row["op"],
        dtype=_format_of(row["dtype"].strip()),
        num_tokens=_number(row["tokens_per_rank"]) or _USUAL_TOKENS,
        hidden=_number(row["hidden"]) or _USUAL_HIDDEN,
        routing=routing,
        num_ranks=num_ranks,
        ranks_per_node=_number(row["ranks_per_node"]) or max(1, num_ranks // (_number(row["nodes"]) or 1)),
        num_sms=_number(row["sms"]),
    )


def _format_of(dtype: str) -> str:
    """A name of `FORMATS`; of what publications call otherwise, the one that it names, else BF16."""
    if dtype in _DTYPES or dtype in FORMATS:
        return _DTYPES.get(dtype, dtype)
    return next((name for name in ("nvfp4", "fp4", "mxfp8", "fp8", "int8", "logfmt") if name in dtype.lower()), "bf16")


def _number(text: str) -> int:
    """0 where nothing is written."""
    number = float(text) if text.strip() else 0.0
    if not 0 <= number < math.inf:
        raise ValueError(f"a size must not be negative, got {text}")
    return int(number)


def _latency_of(row: dict[str, str], call: Call) -> tuple[float | None, bool]:
    """The published latency, or that of a published bandwidth; None where it counts what is not known."""
    if row["latency_us"]:
        latency_us = float(row["latency_us"])
        if not 0 < latency_us < math.inf:
            raise ValueError(f"latency_us must be above 0, got {latency_us}")
        return latency_us, False
    counted = _counted_bytes(row["bandwidth_counts"].split(":")[0], call)
    if not row["bandwidth_GBps"] or counted is None:
        return None, True
    return counted / float(row["bandwidth_GBps"]) / 1e3, True


def _counted_bytes(counts: str, call: Call) -> float | None:
    """The bytes of a call in the way that a publication counts them."""
    routing, tokens = call.routing, call.num_tokens
    element = 2 if call.dtype == "bf16" else 1
    size = row_bytes("fp8" if counts == "ll_logical" and element == 1 else call.dtype, call.hidden)
    bare = call.hidden * element
    to_ranks = tokens * call.num_ranks * _reach(routing, call.num_ranks)
    to_nodes = tokens * call.num_nodes * _reach(routing, call.num_nodes)
    return {
        "nvl_recv": to_ranks * size,
        "nvl_recv_noscale": to_ranks * bare,
        "rdma_incl_local": to_nodes * size,
        "rdma_incl_local_noscale": to_nodes * bare,
        "rdma_phys": to_nodes * (call.num_nodes - 1) / call.num_nodes * size,
        "ll_logical": tokens * routing.topk * (size + 16 * (call.op == "dispatch")),
        "ll_noscale": tokens * routing.topk * bare,
        "balanced_logical": tokens * min(call.num_ranks, routing.topk) * size,
    }.get(counts)
