"""Under these names DeepEP's callers and scripts import small things; nothing of ours imports them."""

from importlib import import_module
from typing import Any

from ..event import EventHandle, EventOverlap

__all__ = ["EventHandle", "EventOverlap"]

_LAZY = {"comm", "envs", "event", "find_pkgs", "gate", "math", "refs", "semantic", "testing"}


def __getattr__(name: str) -> Any:
    """Import a module of this folder when a program names it: `deep_ep.utils.math` behind `import deep_ep`."""
    if name in _LAZY:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
