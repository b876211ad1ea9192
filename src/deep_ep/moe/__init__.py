"""Training with it: a gate."""

from .gate import Gate, GateOptions, Routes

__all__ = ["Gate", "GateOptions", "Routes"]
