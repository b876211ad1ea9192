"""What DeepEP V2's buffer has beside dispatch and combine: pipeline sends, all-gathers, and a table of embeddings.

None of it is built here. The sizes are, since programs ask for them before they make a buffer; everything else raises
`EPUnsupported`, with what to use instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NoReturn

import torch
import torch.distributed as dist

from ..elastic_sizing import agrs_buffer_bytes, agrs_session_bytes, engram_bytes, pp_buffer_bytes
from ..errors import EPUnsupported
from . import checks

_PP = "pipeline sends are not built here. Use torch.distributed.send and recv"
_AGRS = "all-gather sessions are not built here. Use torch.distributed.all_gather_into_tensor"
_ENGRAM = "the table of an Engram is not built here. Use torch.distributed.rpc, or a table on every rank"


class UnsupportedFamilies:
    """The methods of `ElasticBuffer` that are not about experts."""

    # Sizes -----------------------------------------------------------------------------------------------------------

    @staticmethod
    def get_engram_storage_size_hint(
        num_entries: int, hidden: int, num_max_tokens_per_rank: int, dtype: torch.dtype = torch.bfloat16
    ) -> tuple[int, int]:
        """Bytes on the GPU and on the host that a table needs.

        Args:
            num_entries: Entries of this rank's part.
            hidden: Elements of an entry.
            num_max_tokens_per_rank: Most entries of one fetch: tokens times entries of a token.
            dtype: Of the entries.
        """
        where = "get_engram_storage_size_hint"
        num_entries = checks.check_int(where, "num_entries", num_entries, 0)
        hidden = checks.check_int(where, "hidden", hidden, 1)
        num_fetched = checks.check_int(where, "num_max_tokens_per_rank", num_max_tokens_per_rank, 0)
        return engram_bytes(num_entries, hidden, num_fetched, _check_dtype(where, dtype).itemsize)

    @staticmethod
    def get_pp_buffer_size_hint(num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> int:
        """Bytes that pipeline sends need.

        Args:
            num_max_tensor_bytes: Size of the largest tensor.
            num_max_inflight_tensors: Tensors that may be on their way in each direction.
        """
        where = "get_pp_buffer_size_hint"
        num_bytes = checks.check_int(where, "num_max_tensor_bytes", num_max_tensor_bytes, 0)
        return pp_buffer_bytes(
            num_bytes, checks.check_int(where, "num_max_inflight_tensors", num_max_inflight_tensors, 0)
        )

    @staticmethod
    def get_agrs_num_max_session_bytes(group: dist.ProcessGroup, shapes: Sequence[Any], dtype: torch.dtype) -> int:
        """Bytes that one session of all-gathers needs.

        Args:
            group: The process group.
            shapes: The shape of what each rank contributes, or a sequence of such shapes.
            dtype: Of all of them.
        """
        where = "get_agrs_num_max_session_bytes"
        is_one = all(not isinstance(size, (tuple, list)) for size in shapes)
        some = [shapes] if is_one else shapes
        sizes = [checks.check_shape(where, "shapes", shape) for shape in some]
        return agrs_session_bytes(dist.get_world_size(group), sizes, _check_dtype(where, dtype).itemsize)

    @staticmethod
    def get_agrs_buffer_size_hint(group: dist.ProcessGroup, num_max_session_bytes: int) -> int:
        """Bytes of a buffer for sessions of this size.

        Args:
            group: The process group; its size makes no difference any more.
            num_max_session_bytes: From `get_agrs_num_max_session_bytes`.
        """
        del group
        where = "get_agrs_buffer_size_hint"
        return agrs_buffer_bytes(checks.check_int(where, "num_max_session_bytes", num_max_session_bytes, 0))

    # Pipeline --------------------------------------------------------------------------------------------------------

    def pp_set_config(self, num_max_tensor_bytes: int, num_max_inflight_tensors: int) -> None:
        """Not built: raises `EPUnsupported`."""
        del num_max_tensor_bytes, num_max_inflight_tensors
        _refuse("pp_set_config", _PP)

    def pp_send(self, t: torch.Tensor, dst_rank_idx: int, num_sms: int = 0) -> None:
        """Not built: raises `EPUnsupported`."""
        del t, dst_rank_idx, num_sms
        _refuse("pp_send", _PP)

    def pp_recv(self, t: torch.Tensor, src_rank_idx: int, num_sms: int = 0) -> None:
        """Not built: raises `EPUnsupported`."""
        del t, src_rank_idx, num_sms
        _refuse("pp_recv", _PP)

    # All-gathers -----------------------------------------------------------------------------------------------------

    def agrs_set_config(self, num_max_session_bytes: int, num_max_all_gathers_per_session: int) -> None:
        """Not built: raises `EPUnsupported`."""
        del num_max_session_bytes, num_max_all_gathers_per_session
        _refuse("agrs_set_config", _AGRS)

    def create_agrs_session(self) -> None:
        """Not built: raises `EPUnsupported`."""
        _refuse("create_agrs_session", _AGRS)

    def destroy_agrs_session(self) -> None:
        """Not built: raises `EPUnsupported`."""
        _refuse("destroy_agrs_session", _AGRS)

    def agrs_new_session(self, enabled: bool = True) -> AbstractContextManager[None]:
        """Return a context that does nothing if `enabled` is False. Otherwise not built: raises `EPUnsupported`."""
        if enabled:
            _refuse("agrs_new_session", _AGRS)
        return nullcontext()

    def agrs_get_inplace_tensor(self, shapes: Sequence[Any], dtype: torch.dtype) -> Any:
        """Not built: raises `EPUnsupported`."""
        del shapes, dtype
        _refuse("agrs_get_inplace_tensor", _AGRS)

    def all_gather(self, t: torch.Tensor | Sequence[torch.Tensor]) -> Any:
        """Not built: raises `EPUnsupported`."""
        del t
        _refuse("all_gather", _AGRS)

    # Engram ----------------------------------------------------------------------------------------------------------

    def engram_write(self, storage: torch.Tensor, sf: torch.Tensor | None = None) -> None:
        """Not built: raises `EPUnsupported`."""
        del storage, sf
        _refuse("engram_write", _ENGRAM)

    def engram_fetch(
        self, indices: torch.Tensor, num_qps: int = 0, use_tma_aligned_col_major_sf: bool = False
    ) -> Callable[[], tuple[torch.Tensor, torch.Tensor | None]]:
        """Not built: raises `EPUnsupported`."""
        del indices, num_qps, use_tma_aligned_col_major_sf
        _refuse("engram_fetch", _ENGRAM)


def _refuse(where: str, why: str) -> NoReturn:
    raise EPUnsupported(f"{where}: {why}")


def _check_dtype(where: str, dtype: Any) -> torch.dtype:
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"{where}: `dtype` must be a torch.dtype, got {type(dtype).__name__}")
    return dtype
