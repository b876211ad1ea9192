"""DeepEP's search for libraries to compile against. Nothing is compiled here; the names stay for imports."""

from __future__ import annotations

from typing import NoReturn

from ..errors import EPUnsupported


def _refuse(name: str) -> NoReturn:
    raise EPUnsupported(
        f"utils.find_pkgs.{name}: this package is pure Python and links against no library. Drop the call"
    )


def find_pkg_root(name: str, lib_name: str | None = None, optional: bool = False) -> str:  # noqa: ARG001
    """Raises `EPUnsupported`."""
    _refuse("find_pkg_root")


def find_nccl_root(optional: bool = False) -> str:  # noqa: ARG001 (DeepEP's signature)
    """Raises `EPUnsupported`."""
    _refuse("find_nccl_root")


def find_nvshmem_root(optional: bool = False) -> str:  # noqa: ARG001 (DeepEP's signature)
    """Raises `EPUnsupported`."""
    _refuse("find_nvshmem_root")
