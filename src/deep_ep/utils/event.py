"""Events, under DeepEP's module path."""

from ..event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]
