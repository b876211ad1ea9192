"""The names of steps, as the code has them, which models and traces of real ranks share."""

from __future__ import annotations

from ....engine.protocol import READY, TAKEN, step_name
from ....transport import links

# The parts of a call, as a trace of the product names them, that move rows.
ROW_STEPS = ("post rows", "fetch rows", "put rows", "copy out", "provide rows", "copy in", "sum rows")

TOPICS = {getattr(links, name): name for name in ("ANNOUNCE", "VERDICT", "ROWS", "FAILED", "BYE", "REFUSED")}


def step_label(step: int) -> str:
    """A step of `progress`, with its round: `READY(0)`."""
    name = step_name(step).upper()
    return f"{name}({(step - (READY if name == 'READY' else TAKEN)) // 2})" if step >= READY else name


def topic_name(topic: int) -> str:
    """The topic of a frame, as the code names it."""
    return TOPICS.get(topic, f"topic {topic}")
