"""The module path of `Buffer` in DeepEP V1."""

from .buffers.legacy import Buffer

__all__ = ["Buffer"]
