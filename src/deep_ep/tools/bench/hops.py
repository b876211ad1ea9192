"""Two hops on a GPU beside one hop, as a table shows them."""

from __future__ import annotations

from ...transport import MESSAGE
from . import traffic
from .core import FLOOR, ONE_HOP, PRODUCT, Measured, Summary
from .figures import Unit, three_digits, with_quartiles

_CAPTION = (
    "Two hops: each token crosses once to a node, where the rank of its rail relays it. One hop: the same routes in a "
    "buffer that has all ranks for one node. Floor: the least bytes that two hops must read and write through the "
    "GPU's memory (every token, every received row, and every crossing row twice more, into the receive buffer and "
    "out of it), those of all ranks on it, at the speed of a plain copy by all of them in the same rounds. Payload: "
    "rows with scales that must cross, once for each other node of a token; of a rank, on average. Given to the rail: "
    "what did, in one call, with ids, weights and slots."
)
_MESSAGE_CAPTION = (
    " With message a crossing row goes through the host's memory and TCP, of which the floor knows nothing."
)


def heads(unit: Unit) -> list[str]:
    """The heads of the table, behind those of the case and its ranks."""
    times = [f"two hops {unit.name}", f"one hop {unit.name}", "two hops / one hop", f"floor {unit.name}"]
    return [*times, "two hops / floor", "payload MB", "given to the rail MB"]


def cells(row: Measured, summary: Summary, unit: Unit) -> list[str]:
    """What stands below them."""
    two, one, floor = (three_digits(summary.median_secs[name] * unit.per_sec) for name in (PRODUCT, ONE_HOP, FLOOR))
    to_one, to_floor = (with_quartiles(ratio) for ratio in (summary.over_one_hop, summary.over_floor))
    return [two, one, to_one, floor, to_floor, *traffic.payload_cells(row)]


def caption(transport: str) -> str:
    """What the figures mean.

    Args:
        transport: Between nodes.
    """
    return _CAPTION + (_MESSAGE_CAPTION if transport == MESSAGE else "")


def where(num_gpus: int) -> str:
    """What the nodes are, for the head of a report: nobody may take it for a network's speed."""
    ranks = "several ranks on one GPU as nodes" if num_gpus == 1 else "ranks of one machine as nodes"
    return f"{ranks}: memory, not a network"
