"""Service levels: which of the network's classes rows travel in between nodes.

InfiniBand has sixteen service levels, which its switches map to virtual lanes; IP has eight classes, in the upper three
bits of the byte that routers read (`tos`). A level below 8 is the class of the same number; beyond that IP has none.

Sockets of ours are marked one by one, so that normal and low-latency traffic may differ in one process. NVSHMEM reads
its environment when it starts, and a process has one NVSHMEM: there the first buffer decides (`docs/networks.md`).
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import MutableMapping

from .. import env

_NUM_CLASSES, _CLASS_SHIFT = 8, 5

NVSHMEM_LEVEL = "NVSHMEM_IB_SL"
NVSHMEM_TRAFFIC_CLASS = "NVSHMEM_IB_TRAFFIC_CLASS"  # what RoCE has for a level: the byte `tos` of its packets


def service_level(is_low_latency: bool) -> int | None:
    """Return the level of low-latency or of normal traffic; None: the network's default."""
    wish = env.LOW_LATENCY_SERVICE_LEVEL.get() if is_low_latency else None
    return env.SERVICE_LEVEL.get() if wish is None else wish


def type_of_service(level: int) -> int | None:
    """The byte of IP's header for a level: `type_of_service(3)` is 96, class selector 3; None: IP has no such class."""
    return level << _CLASS_SHIFT if level < _NUM_CLASSES else None


def pass_on(level: int | None, variables: MutableMapping[str, str] | None = None) -> None:
    """Set the level in NVSHMEM's environment, before it starts.

    What is set already stays: it is from the operator, or from an earlier buffer.

    Args:
        level: The level of its traffic; None: nothing is set.
        variables: The environment.
    """
    if level is None:
        return
    variables = os.environ if variables is None else variables
    variables.setdefault(NVSHMEM_LEVEL, str(level))
    tos = type_of_service(level)
    if tos is not None:
        variables.setdefault(NVSHMEM_TRAFFIC_CLASS, str(tos))


def mark(connection: socket.socket, level: int | None) -> None:
    """Have a TCP connection send in the class of a level; None: in the default class."""
    if level is None or (tos := type_of_service(level)) is None:
        return
    # A mark is for the network's good: a system that refuses it must not keep ranks from talking.
    with contextlib.suppress(OSError):
        connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, tos)
    with contextlib.suppress(OSError):
        # For queues of this host and priorities of a VLAN. Last: the option before sets it, too. 7 takes privileges.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_PRIORITY, level)
