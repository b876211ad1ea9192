"""DeepEP's access to raw NCCL communicators. There are none here; the names stay for imports."""

from __future__ import annotations

from typing import Any, NoReturn

import torch.distributed as dist

from ..errors import EPUnsupported


def _refuse(name: str) -> NoReturn:
    raise EPUnsupported(
        f"utils.comm.{name}: there is no NCCL communicator here, tokens move without one. Pass the process group itself"
    )


class NCCLCommHandle:
    """A raw NCCL communicator in the original; here making one raises `EPUnsupported`."""

    def __init__(self, nccl_comm: Any, managed: bool) -> None:  # noqa: ARG002 (DeepEP's signature)
        _refuse("NCCLCommHandle")

    def get(self) -> NoReturn:
        """Raises `EPUnsupported`."""
        _refuse("NCCLCommHandle.get")


def get_nccl_comm_handle(group: dist.ProcessGroup, force_new_comm: bool = False) -> NCCLCommHandle:  # noqa: ARG001
    """Raises `EPUnsupported`."""
    _refuse("get_nccl_comm_handle")


def destroy_all_managed_nccl_comm() -> None:
    """Raises `EPUnsupported`."""
    _refuse("destroy_all_managed_nccl_comm")
