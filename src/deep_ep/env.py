"""Every environment variable that `deep_ep` reads, once: name, type, default, meaning."""

from __future__ import annotations

import difflib
import os
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")

# The largest limit and the largest sizes that can be asked for, by a variable or by an argument of a buffer. Beyond
# them some part of the machine has no number for it: `poll` takes 2**31 milliseconds, a wait of the host is up to twice
# the limit, and kernels address 2**40 bytes of a segment. Both are far beyond any use: eleven days, a tebibyte.
MOST_SECS = 1_000_000
MOST_BYTES = 1 << 40


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable. It is read when it is needed, so a test or a program may set it late."""

    name: str
    parse: Callable[[str], T]
    default: T
    help: str

    def get(self) -> T:
        """The value in force; `ValueError` naming the variable where the text cannot be read."""
        text = os.environ.get(self.name, "").strip()
        if not text:
            return self.default
        try:
            return self.parse(text)
        except ValueError as error:
            raise ValueError(f"{self.name}: cannot read {text!r} ({error}). {self.help}") from None


def _secs(text: str) -> float:
    value = float(text)
    if not 0 < value <= MOST_SECS:  # `nan` is neither
        raise ValueError(f"must be greater than 0 and at most {MOST_SECS}")
    return value


def _non_negative_int(text: str) -> int:
    value = _whole(float(text)) if "e" in text.lower() else int(text)
    if not 0 <= value <= MOST_BYTES:
        raise ValueError(f"must not be negative, and at most {MOST_BYTES}")
    return value


def _whole(value: float) -> int:
    """A number as `1e9` is one. What no integer is (`1e400` is infinite) is out of range in any case."""
    return int(value) if abs(value) < MOST_BYTES else MOST_BYTES + 1


def _service_level(text: str) -> int | None:
    value = int(text)
    if not 0 <= value <= 15:
        raise ValueError("must be 0 to 15")
    return value


TIMEOUT_SECS = Variable(
    "DEEP_EP_TIMEOUT_SECS", _secs, 100.0, "Seconds that a call, or construction, waits for a peer; at most 1000000."
)
DEVICE = Variable(
    "DEEP_EP_DEVICE", str, "", "Device of new buffers: `cpu` or `cuda`; unset: a GPU where torch sees one."
)
TRANSPORT = Variable(
    "DEEP_EP_TRANSPORT",
    str,
    "auto",
    "Transport of CPU ranks: `auto`, `solo`, `shm`, `message` (TCP, also between ranks of one host), or `interpreted` "
    "(the GPU's kernels; for debugging; `interpreted-memory`: nodes share the host's memory, as with NVSHMEM on one "
    "host). Of GPU ranks of different nodes: `auto`, `message` or `nvshmem`.",
)
RANKS_PER_NODE = Variable(
    "DEEP_EP_RANKS_PER_NODE",
    _non_negative_int,
    0,
    "Split each host into nodes of this many ranks (0: one node).",
)
HOST = Variable("DEEP_EP_HOST", str, "", "Name of this host, where hostname and boot id do not tell hosts apart.")
SOCKET_IFNAME = Variable(
    "GLOO_SOCKET_IFNAME",
    str,
    "",
    "Network interfaces between nodes, by name, with commas between; torch.distributed's gloo reads it, too.",
)
MASTER_ADDR = Variable(
    "MASTER_ADDR", str, "", "Where torch.distributed's ranks meet; the way there is tried first between nodes."
)
ARENA_BYTES = Variable(
    "DEEP_EP_ARENA_BYTES",
    _non_negative_int,
    0,
    "Most bytes that the arena of received tensors may take on a rank (0: as many as are needed; at most 2**40).",
)
POSTED_BYTES = Variable(
    "DEEP_EP_POSTED_BYTES",
    _non_negative_int,
    1 << 18,
    "Most bytes of rows that a CPU rank posts with a small call, for peers to fetch (0: none; never more than 262144).",
)


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in choices:
            raise ValueError(f"must be {' or '.join(choices)}")
        return text

    return parse


NVSHMEM_ROWS = Variable(
    "DEEP_EP_NVSHMEM_ROWS",
    _one_of("fetch", "put"),
    "fetch",
    "With NVSHMEM, whether rows between nodes are read where they lie, if all ranks can (`fetch`), or sent (`put`).",
)
TUNING_FILE = Variable(
    "DEEP_EP_TUNING_FILE",
    str,
    "",
    "File of launch shapes and configs measured on this machine, as `python -m deep_ep bench tune` writes it.",
)

TRACE = Variable(
    "DEEP_EP_TRACE",
    str,
    "",
    "Folder in which every rank records its calls, for `python -m deep_ep report` and for Perfetto; unset: none.",
)
SERVICE_LEVEL = Variable(
    "DEEP_EP_SERVICE_LEVEL",
    _service_level,
    None,
    "Service level of traffic between nodes, 0 to 15; below 8 also IP's class. Unset: the network's default.",
)
LOW_LATENCY_SERVICE_LEVEL = Variable(
    "DEEP_EP_LOW_LATENCY_SERVICE_LEVEL",
    _service_level,
    None,
    "The same for buffers made with `low_latency_mode`, and there for low-latency calls; unset: the same level.",
)
QP_DEPTH = Variable(
    "NVSHMEM_QP_DEPTH", _non_negative_int, 1024, "Depth of a queue pair, as DeepEP's callers ask for it; unused here."
)

_PREFIX = "DEEP_EP_"

VARIABLES: tuple[Variable, ...] = (
    TIMEOUT_SECS,
    DEVICE,
    TRANSPORT,
    RANKS_PER_NODE,
    HOST,
    SOCKET_IFNAME,
    MASTER_ADDR,
    ARENA_BYTES,
    POSTED_BYTES,
    NVSHMEM_ROWS,
    TUNING_FILE,
    TRACE,
    SERVICE_LEVEL,
    LOW_LATENCY_SERVICE_LEVEL,
    QP_DEPTH,
)


def unknown() -> dict[str, str]:
    """Return the variables that look like ours and are none, with what may have been meant, as a sentence."""
    known = [variable.name for variable in VARIABLES if variable.name.startswith(_PREFIX)]
    found = {}
    for name in sorted(os.environ):
        if name.startswith(_PREFIX) and name not in known:
            close = difflib.get_close_matches(
                name.removeprefix(_PREFIX), [one.removeprefix(_PREFIX) for one in known], n=1
            )
            all_of_them = "`python -m deep_ep doctor --env` lists those that there are"
            found[name] = f"Did you mean {_PREFIX}{close[0]}?" if close else all_of_them
    return found


def warn_of_unknown() -> None:
    """Warn once of each variable that looks like one of ours and is none: a name with a mistake has no effect."""
    for name, meant in unknown().items():
        if name not in _warned:
            _warned.add(name)
            warnings.warn(f"{name}: there is no such variable, so it has no effect. {meant}", stacklevel=3)


_warned: set[str] = set()
