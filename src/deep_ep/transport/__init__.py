"""Transports: how ranks of a node reach each other's memory. A new one is a file here and a line in `choose`."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from .. import env
from ..control import Control
from ..errors import EPUnsupported
from . import shm, solo
from .arena import Arena, Base
from .board import HEADER, LOW_LATENCY, MAX_EXPERTS, NORMAL, OFFER, POSTED_BYTES, Refusal
from .memory import PrivateMemory, ordinary_tensor
from .window import Window, WindowSizes

__all__ = [
    "HEADER",
    "LOW_LATENCY",
    "MAX_EXPERTS",
    "MESSAGE",
    "NORMAL",
    "OFFER",
    "POSTED_BYTES",
    "Arena",
    "Base",
    "Choice",
    "PrivateMemory",
    "Refusal",
    "Window",
    "WindowSizes",
    "choose",
    "ordinary_tensor",
]


MESSAGE = "message"  # between nodes: the transport that needs no memory in common; see `message.py`


class Choice(NamedTuple):
    """A transport, and the reason for which it was chosen."""

    name: str
    reason: str
    make_window: Callable[[Control, WindowSizes], Window]


def choose(num_ranks: int) -> Choice:
    """Return the transport for the CPU ranks of one node.

    If `message` is requested, every rank is a node of its own, and needs only `solo` inside it.

    Raises:
        EPUnsupported: There is none, or the one that `DEEP_EP_TRANSPORT` requests is not available.
    """
    wish = env.TRANSPORT.get()
    if wish == MESSAGE and num_ranks == 1:
        wish = "auto"
    choices = {
        "solo": Choice("solo", "a group of one rank", solo.make_window),
        "shm": Choice("shm", "CPU ranks of one host", shm.make_window),
    }
    reasons = {
        "solo": None if num_ranks == 1 else f"it is for one rank, the group has {num_ranks}",
        "shm": shm.why_not(),
    }
    if wish not in ("auto", *choices):
        raise ValueError(
            f"{env.TRANSPORT.name}: {wish!r} is not one of auto, {', '.join(choices)}, {MESSAGE}, interpreted and "
            "interpreted-memory, for CPU ranks"
        )
    for name, choice in choices.items():
        if wish in ("auto", name) and reasons[name] is None:
            return choice if wish == "auto" else choice._replace(reason=f"{env.TRANSPORT.name}={wish}")
    said = "; ".join(f"{name}: {reason}" for name, reason in reasons.items() if reason and wish in ("auto", name))
    raise EPUnsupported(f"transport: none for {num_ranks} ranks on this host ({said})")
