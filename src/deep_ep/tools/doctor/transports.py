"""Every transport: whom it serves, and whether it would be used here. Each is asked itself why it cannot be."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
import torch.distributed as dist

from ... import env
from ...buffers.engines import INTERPRETED, INTERPRETED_MEMORY, NVSHMEM
from ...errors import EPError
from ...transport import MESSAGE, choose, nvshmem, symm
from .report import TransportReport

_SOME_RANKS = 2  # what holds for two holds for more


class TransportProbe(NamedTuple):
    """A transport, as it is asked.

    Attributes:
        name: Of the transport.
        serves: Who reaches whom by it.
        why_not: Why it would not be used, given a process group to ask with, or None where it would.
        how: What there is to say where it would.
    """

    name: str
    serves: str
    why_not: Callable[[dist.ProcessGroup | None], str | None]
    how: Callable[[], str] = str


def look_at_transports() -> list[TransportReport]:
    """Ask all of them."""
    with _some_group() as group:
        return [_look(way, group) for way in WAYS]


def _look(way: TransportProbe, group: dist.ProcessGroup | None) -> TransportReport:
    try:
        reason = way.why_not(group)
        return TransportReport(way.name, way.serves, reason is None, way.how() if reason is None else reason)
    except (EPError, ValueError) as error:  # a setting that nothing fits, or that cannot be read
        return TransportReport(way.name, way.serves, False, str(error))


@contextlib.contextmanager
def _some_group() -> Iterator[dist.ProcessGroup | None]:
    """A process group: the caller's, or one of this process alone. Only GPUs' transports ask for it."""
    can_make = torch.cuda.is_available() and dist.is_available() and dist.is_gloo_available()
    if can_make and dist.is_initialized():
        yield dist.group.WORLD
    elif can_make:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        try:
            yield dist.group.WORLD
        finally:
            dist.destroy_process_group()
    else:
        yield None


def _why_not_shm(group: dist.ProcessGroup | None) -> str | None:
    del group
    wish = env.TRANSPORT.get()
    if wish in (MESSAGE, INTERPRETED, INTERPRETED_MEMORY):
        return f"{env.TRANSPORT.name}={wish} asks for another"
    choose(_SOME_RANKS)
    return None


def _why_not_symm(group: dist.ProcessGroup | None) -> str | None:
    if env.DEVICE.get() == "cpu":
        return f"{env.DEVICE.name}=cpu"
    return symm.why_not(group, _SOME_RANKS)


def _why_not_message(group: dist.ProcessGroup | None) -> str | None:
    del group
    if sys.platform != "linux":
        return "it needs Linux"
    from ...transport.rendezvous import own_addresses  # other systems lack what it imports

    return own_addresses()[1]


def _own_addresses() -> str:
    from ...transport.rendezvous import own_addresses

    return f"to this host at {', '.join(own_addresses()[0])}"


def _why_not_nvshmem(group: dist.ProcessGroup | None) -> str | None:
    if env.DEVICE.get() == "cpu":
        return f"{env.DEVICE.name}=cpu"
    if env.TRANSPORT.get() == MESSAGE:
        return f"{env.TRANSPORT.name}={MESSAGE} asks for another"
    return nvshmem.why_not(group, _SOME_RANKS)


WAYS: tuple[TransportProbe, ...] = (
    TransportProbe("solo", "a group of one rank", lambda _: None),
    TransportProbe("shm", "CPU ranks of one host", _why_not_shm),
    TransportProbe("symm", "GPU ranks of one host", _why_not_symm),
    TransportProbe(NVSHMEM, "GPU ranks of different hosts", _why_not_nvshmem),
    TransportProbe(MESSAGE, "ranks of different hosts, over TCP", _why_not_message, _own_addresses),
)
