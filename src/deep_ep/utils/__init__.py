"""Under these names DeepEP's callers and scripts import small things; nothing of ours imports them."""

from ..event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
