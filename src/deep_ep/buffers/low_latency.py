"""The low-latency methods of `Buffer`: arguments, checks and docstrings. The algorithm is the engine's."""

from __future__ import annotations

import threading
from typing import Any

import torch

from .. import env
from ..engine.low_latency.calls import CallMode, CombineInputs, CombineKind, DispatchKind, Hook
from ..engine.low_latency.engine import LowLatencyEngine
from ..engine.low_latency.geometry import MOST_TOKENS, Geometry, RowFormat
from ..errors import EPUnsupported
from ..event import EventOverlap
from ..handle import require_same_ranks
from ..tensors import is_lazy
from ..trace import Trace
from . import checks
from .calling import call
from .engines import Engine
from .hooks import RecvHook
from .registry import ForkedLock

_MOST_TOPK = 32
_HANDLE_ITEMS = 5  # packed_recv_src_info, packed_recv_layout_range, M, hidden, num_experts

_DISPATCH, _COMBINE = "low_latency_dispatch", "low_latency_combine"
# Exceptions from inspecting an argument that is no tensor, or one without strides, or a handle that is none; and from
# looking it up if it cannot be a key. Such an argument is wrong, and the checks raise the proper error.
_NOT_TENSORS = (AttributeError, RuntimeError, TypeError, ValueError)


class LowLatencyMethods:
    """Methods of `Buffer` for decoding: no exchange of counts, no wait of the host, receive hooks, rank masks."""

    rank: int
    group_size: int
    device: torch.device
    low_latency_mode: bool
    enable_shrink: bool
    runtime: Any
    _lock: threading.RLock | ForkedLock
    _engine: Engine
    _known_dispatches: dict[tuple, DispatchKind]
    _known_combines: dict[tuple, CombineKind]
    _trace: Trace | None
    _num_cleans: int = 0  # calls of `clean_low_latency_buffer` that have given up what was in flight
    _ranks: tuple[int, ...] | None

    def _require_engine(self, where: str) -> Engine:
        raise NotImplementedError

    @call
    def low_latency_dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        num_max_dispatch_tokens_per_rank: int,
        num_experts: int,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        dispatch_wait_recv_cost_stats: torch.Tensor | None = None,
        use_fp8: bool = True,
        round_scale: bool = False,
        use_ue8m0: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
    ) -> tuple[torch.Tensor | tuple[torch.Tensor, torch.Tensor], torch.Tensor, tuple, EventOverlap, Hook | None]:
        """Send each token to each of its experts, packed expert by expert on the other side.

        L experts of this rank, R ranks, M = `num_max_dispatch_tokens_per_rank`. Results are ordinary memory.

        Args:
            x: [T, H] BF16, contiguous, T at most M; any H.
            topk_idx: [T, K] int32 or int64, contiguous, K at most 32; ids outside [0, num_experts) select nothing. An
                expert that a token names twice gets it once.
            num_max_dispatch_tokens_per_rank: M, the same on all ranks; it may change from call to call.
            num_experts: E, a multiple of the number of ranks.
            cumulative_local_expert_recv_stats: [L] int32; the rows of each expert are added to it.
            dispatch_wait_recv_cost_stats: [R] int64; the nanoseconds spent waiting for each rank are added to it.
            use_fp8: Cast to FP8, with one scale for each 128 channels.
            round_scale: Make scales powers of two.
            use_ue8m0: Return scales as exponent bytes, four to an int32; needs `round_scale`.
            async_finish: Return an event instead of waiting.
            return_recv_hook: Only send, and return a function that receives. Not together with `async_finish`.

        Returns:
            `recv_x` [L, R * M, H] (BF16, or FP8 in a tuple with scales [L, R * M, S] whose rows lie side by side in
            memory), `recv_count` [L] int32 (rows from there on are garbage), the handle, the event, the hook or None.
            The handle is (`packed_recv_src_info` [L, R * M] int32, `packed_recv_layout_range` [L, R] int64 with counts
            in the low and first rows in the high 32 bits, M, H, E).
        """
        recv_stats, wait_stats = cumulative_local_expert_recv_stats, dispatch_wait_recv_cost_stats
        # A decoding loop makes the same calls again and again: what was checked once is not checked again.
        try:
            # Types, too: as a key True is 1, and it is no number of tokens.
            key: tuple = (
                num_max_dispatch_tokens_per_rank, num_experts, type(num_max_dispatch_tokens_per_rank),
                type(num_experts), use_fp8, round_scale, use_ue8m0, async_finish, return_recv_hook, type(x), x.shape,
                x.dtype, x.device, x.stride(), x.is_neg(), type(topk_idx), topk_idx.shape, topk_idx.dtype,
                topk_idx.device, topk_idx.stride(), topk_idx.is_neg(),
                recv_stats if recv_stats is None else _look_of(recv_stats),
                wait_stats if wait_stats is None else _look_of(wait_stats),
            )  # fmt: skip
            known = self._known_dispatches.get(key)
        except _NOT_TENSORS:
            key, known = (), None
        if known is None:
            given: tuple = (x, topk_idx, recv_stats, wait_stats)
            options = (use_fp8, round_scale, use_ue8m0, async_finish, return_recv_hook)
            known, tensors = self._check_dispatch(num_max_dispatch_tokens_per_rank, num_experts, *options, *given)
            if key and _are_same(tensors, given):  # else they are made ordinary in every call
                self._known_dispatches[key] = known
            x, topk_idx, recv_stats, wait_stats = tensors
        engine = self._require_low_latency(_DISPATCH)
        packed, event, hook = engine.dispatch(known, x, topk_idx, recv_stats, wait_stats)
        recv_x, num_rows, src_info, layout_range, scales = packed
        src_info._deep_ep_ranks = self._ranks  # type: ignore[attr-defined]  # see `require_same_ranks`
        _, num_experts, max_tokens, hidden, _ = known.geometry
        if hook is not None:
            hook = self._recv_hook(hook, _DISPATCH)
            src_info._deep_ep_pending = hook.pending  # type: ignore[attr-defined]
        return (
            recv_x if scales is None else (recv_x, scales),
            num_rows,
            (src_info, layout_range, max_tokens, hidden, num_experts),
            EventOverlap(event, None if event is None else (x, topk_idx, recv_stats, wait_stats, *packed)),
            hook,
        )

    def _check_dispatch(
        self,
        max_tokens: int,
        num_experts: int,
        use_fp8: bool,
        round_scale: bool,
        use_ue8m0: bool,
        async_finish: bool,
        return_recv_hook: bool,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[DispatchKind, tuple]:
        """Check a dispatch. Returns its kind, and its tensors, made ordinary."""
        where = _DISPATCH
        mode = _check_mode(where, async_finish, return_recv_hook)
        if use_ue8m0 and not round_scale:
            raise ValueError(f"{where}: `use_ue8m0` needs round_scale=True: exponents are all that is kept of a scale")
        form = RowFormat(bool(use_fp8), bool(round_scale and use_fp8), bool(use_ue8m0 and use_fp8))
        x = checks.check_tensor(where, "x", x, ("tokens", "hidden"), (torch.bfloat16,), device=self.device)
        checks.warn_of_lost_gradients(where, x, 2)
        shape = (x.size(0), "top-k")
        topk_idx = checks.check_tensor(where, "topk_idx", topk_idx, shape, checks.IDX_DTYPES, device=self.device)
        geometry = self._geometry(where, max_tokens, x.size(1), num_experts, topk_idx.size(1), x.size(0))
        num_local = geometry.num_local_experts
        recv_stats = self._check_stats(where, "cumulative_local_expert_recv_stats", recv_stats, num_local, torch.int32)
        wait_stats = self._check_stats(where, "dispatch_wait_recv_cost_stats", wait_stats, self.group_size, torch.int64)
        has_stats = (recv_stats is not None, wait_stats is not None)
        kind = DispatchKind(geometry, form, mode, topk_idx.dtype, *has_stats)
        return kind, (x, topk_idx, recv_stats, wait_stats)

    @call
    def low_latency_combine(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        handle: tuple,
        use_logfmt: bool = False,
        zero_copy: bool = False,
        async_finish: bool = False,
        return_recv_hook: bool = False,
        out: torch.Tensor | None = None,
        combine_wait_recv_cost_stats: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, EventOverlap, Hook | None]:
        """Bring the experts' results back, weighted and summed in FP32, k ascending, rounded once.

        Args:
            x: [L, R * M, H] BF16, contiguous: results where dispatch put the inputs.
            topk_idx: [T, K], as dispatched.
            topk_weights: [T, K] float32, contiguous.
            handle: Of the dispatch.
            use_logfmt: Send magnitudes as 10-bit logarithms where a block of channels allows it: lossy, fewer bytes.
            zero_copy: The results are in the tensor of `get_next_low_latency_combine_buffer(handle)`; `x` is not read.
            async_finish: Return an event instead of waiting.
            return_recv_hook: Only send, and return a function that receives. Not together with `async_finish`.
            out: [T, H] BF16 to write into and to return; default: a new one.
            combine_wait_recv_cost_stats: [R] int64; the nanoseconds spent waiting for each rank are added to it.

        Returns:
            `combined_x` [T, H] BF16, the event, the hook or None. A token without experts gives zeros.
        """
        result, wait_stats = out, combine_wait_recv_cost_stats
        try:
            src_info, layout_range, max_tokens, hidden, num_experts = handle
            key: tuple = (
                use_logfmt, zero_copy, async_finish, return_recv_hook, max_tokens, hidden, num_experts,
                type(max_tokens), type(hidden), type(num_experts), type(handle), type(x), x.shape,
                x.dtype, x.device, x.stride(), x.is_neg(), type(topk_idx), topk_idx.shape, topk_idx.dtype,
                topk_idx.device, topk_idx.stride(), topk_idx.is_neg(), type(topk_weights),
                topk_weights.shape, topk_weights.dtype, topk_weights.device, topk_weights.stride(),
                topk_weights.is_neg(), type(src_info), src_info.shape, src_info.dtype, src_info.device,
                src_info.stride(), src_info.is_neg(), type(layout_range), layout_range.shape, layout_range.dtype,
                layout_range.device, layout_range.stride(), layout_range.is_neg(),
                result if result is None else _look_of(result),
                wait_stats if wait_stats is None else _look_of(wait_stats),
            )  # fmt: skip
            known = self._known_combines.get(key)
        except _NOT_TENSORS:
            key, known = (), None
        if known is None:
            given: tuple = (x, topk_idx, topk_weights, result, wait_stats)
            options = (use_logfmt, zero_copy, async_finish, return_recv_hook)
            known, layout_range, tensors = self._check_combine(handle, *options, *given)
            if key and _are_same((*tensors, layout_range), (*given, handle[1])):
                self._known_combines[key] = known
            src_info = handle[0]
            x, topk_idx, topk_weights, result, wait_stats = tensors
        require_same_ranks(_COMBINE, src_info, self._ranks)
        if getattr(src_info, "_deep_ep_pending", None):
            raise ValueError(
                f"{_COMBINE}: the rows of this handle have not been received. Call the hook of its dispatch first; if "
                "that was dropped, or has raised, dispatch again"
            )
        engine = self._require_low_latency(_COMBINE)
        rows = CombineInputs(x, topk_idx, topk_weights, src_info, layout_range)
        combined, event, hook = engine.combine(known, rows, result, wait_stats)
        return (
            combined if out is None else out,
            EventOverlap(event, None if event is None else (*rows, combined)),
            hook if hook is None else self._recv_hook(hook, _COMBINE),
        )

    def _check_combine(
        self,
        handle: Any,
        use_logfmt: bool,
        zero_copy: bool,
        async_finish: bool,
        return_recv_hook: bool,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        topk_weights: torch.Tensor,
        out: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[CombineKind, torch.Tensor, tuple]:
        """Check a combine. Returns its kind, the handle's layout, and its tensors, made ordinary."""
        where, device = _COMBINE, self.device
        mode = _check_mode(where, async_finish, return_recv_hook)
        assert not (use_logfmt and zero_copy), f"{where}: `use_logfmt` and `zero_copy` exclude each other"
        topk_idx = checks.check_tensor(
            where, "topk_idx", topk_idx, ("tokens", "top-k"), checks.IDX_DTYPES, device=device
        )
        shape = num_tokens, num_topk = tuple(topk_idx.shape)
        topk_weights = checks.check_tensor(where, "topk_weights", topk_weights, shape, (torch.float32,), device=device)
        _, layout_range, geometry = self._parse_handle(where, handle, num_topk, num_tokens)
        rows = (geometry.num_local_experts, geometry.num_rows, geometry.hidden)
        if zero_copy and is_lazy(x):
            raise ValueError(
                f"{where}: with `zero_copy` the window's tensor is sent as it is, so `x` must not be lazily negated. "
                "Write the values into the tensor of `get_next_low_latency_combine_buffer`"
            )
        x = checks.check_tensor(where, "x", x, rows, (torch.bfloat16,), contiguous=not zero_copy, device=device)
        checks.warn_of_lost_gradients(where, x, 2)
        if out is not None:
            result = (num_tokens, geometry.hidden)
            out = checks.check_tensor(where, "out", out, result, (torch.bfloat16,), is_written=True, device=device)
        wait_stats = self._check_stats(where, "combine_wait_recv_cost_stats", wait_stats, self.group_size, torch.int64)
        has_stats = wait_stats is not None
        kind = CombineKind(geometry, mode, bool(use_logfmt), bool(zero_copy), topk_idx.dtype, has_stats)
        return kind, layout_range, (x, topk_idx, topk_weights, out, wait_stats)

    def get_next_low_latency_combine_buffer(self, handle: tuple) -> torch.Tensor:
        """Window memory for the experts to write into, so that combine need not copy (`zero_copy=True`).

        It belongs to the handle: two handles may have theirs at the same time.

        Args:
            handle: Of the dispatch whose rows will be combined.

        Returns:
            [L, R * M, H] BF16, uninitialised. Its rows are a few bytes apart, so it is not contiguous.
        """
        where = "get_next_low_latency_combine_buffer"
        src_info, _, geometry = self._parse_handle(where, handle, 0, 0)
        require_same_ranks(where, src_info, self._ranks)
        with self._lock:
            return self._require_low_latency(where).combine_buffer(src_info, geometry)

    @call
    def clean_low_latency_buffer(self, num_max_dispatch_tokens_per_rank: int, hidden: int, num_experts: int) -> None:
        """Make a barrier over all ranks that are not masked. There is nothing to clean: words are never used twice.

        With `enable_shrink` it also brings ranks into step that have made different calls. To take in ranks that were
        masked, all ranks call `low_latency_clean_mask_buffer` and then this, each whenever it can, within the limit of
        one another. Results that are still in flight are given up, and their hooks raise. Over
        NVSHMEM between ranks that cannot address each other's memory it is only a barrier: there a rank that has missed
        calls cannot come back.

        A rank that stays away past the limit is masked (`enable_shrink`), or raises `EPTimeout`.

        Args:
            num_max_dispatch_tokens_per_rank: M of the calls to come.
            hidden: Their H.
            num_experts: Their E.
        """
        where = "clean_low_latency_buffer"
        self._geometry(where, num_max_dispatch_tokens_per_rank, hidden, num_experts, 0, 0)
        self._require_low_latency(where).clean()
        # Without masks nothing is given up.
        self._num_cleans += self.enable_shrink

    # Rank masks ------------------------------------------------------------------------------------------------------

    def low_latency_update_mask_buffer(self, rank_to_mask: int, mask: bool = False) -> None:
        """Mask a rank: it is not waited for, its tokens are not taken, and its experts contribute nothing. Local.

        The masked rank detects that at its next call, and masks this one. A rank that is masked because it is silent is
        masked on all ranks.

        Args:
            rank_to_mask: The rank.
            mask: Whether to mask it, or to take it in again.
        """
        where = "low_latency_update_mask_buffer"
        rank = checks.check_int(where, "rank_to_mask", rank_to_mask, 0)
        if rank >= self.group_size:
            raise ValueError(f"{where}: `rank_to_mask` must be below {self.group_size}, got {rank}")
        with self._lock:
            self._require_masks(where).update_mask(rank, bool(mask))

    def low_latency_query_mask_buffer(self, mask_status: torch.Tensor) -> None:
        """Write this rank's masks.

        Args:
            mask_status: [R] int32, written: 1 where a rank is masked.
        """
        where = "low_latency_query_mask_buffer"
        shape, dtypes = (self.group_size,), (torch.int32,)
        mask_status = checks.check_tensor(
            where, "mask_status", mask_status, shape, dtypes, is_written=True, device=self.device
        )
        with self._lock:
            self._require_masks(where).query_mask(mask_status)

    def low_latency_clean_mask_buffer(self) -> None:
        """Unmask all ranks. If ranks have missed calls, all ranks then call `clean_low_latency_buffer`."""
        with self._lock:
            self._require_masks("low_latency_clean_mask_buffer").clean_mask()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _require_low_latency(self, where: str) -> LowLatencyEngine:
        if self.runtime is None:  # it was destroyed: this raises
            self._require_engine(where)
        engine = self._engine
        engine.require_working()
        if engine.low_latency is None:
            if why := engine.why_no_low_latency:
                raise EPUnsupported(
                    f"{where}: across nodes on GPUs low latency needs NVSHMEM, which is not there ({why}). "
                    f"Set {env.TRANSPORT.name}=nvshmem where torch comes with it, or use normal mode"
                )
            raise ValueError(
                f"{where}: the buffer must be made with low_latency_mode=True and num_rdma_bytes from "
                "Buffer.get_low_latency_rdma_size_hint(...)"
            )
        return engine.low_latency

    def _require_masks(self, where: str) -> LowLatencyEngine:
        if not self.enable_shrink:
            raise ValueError(f"{where}: ranks can be masked only where the buffer was made with enable_shrink=True")
        return self._require_low_latency(where)

    def _geometry(
        self, where: str, max_tokens: int, hidden: int, num_experts: int, num_topk: int, num_tokens: int
    ) -> Geometry:
        max_tokens = checks.check_int(where, "num_max_dispatch_tokens_per_rank", max_tokens, 1)
        hidden = checks.check_int(where, "hidden", hidden, 1)
        num_experts = checks.check_num_experts(where, "num_experts", num_experts, self.group_size)
        if max_tokens > MOST_TOKENS:
            raise ValueError(
                f"{where}: `num_max_dispatch_tokens_per_rank` must be at most {MOST_TOKENS}, got {max_tokens}"
            )
        if num_tokens > max_tokens:
            raise ValueError(
                f"{where}: at most num_max_dispatch_tokens_per_rank={max_tokens} tokens can be sent, "
                f"there are {num_tokens}"
            )
        if num_topk > _MOST_TOPK:
            raise ValueError(
                f"{where}: a token may have at most {_MOST_TOPK} experts, `topk_idx` has {num_topk} columns"
            )
        return Geometry(self.group_size, num_experts, max_tokens, hidden, num_topk)

    def _parse_handle(
        self, where: str, handle: Any, num_topk: int, num_tokens: int
    ) -> tuple[torch.Tensor, torch.Tensor, Geometry]:
        if not isinstance(handle, (tuple, list)) or len(handle) != _HANDLE_ITEMS:
            what = f"{len(handle)} items" if isinstance(handle, (tuple, list)) else type(handle).__name__
            raise ValueError(
                f"{where}: `handle` must be the tuple of {_HANDLE_ITEMS} items that low_latency_dispatch returned, "
                f"got {what}"
            )
        src_info, layout_range, max_tokens, hidden, num_experts = handle
        geometry = self._geometry(where, max_tokens, hidden, num_experts, num_topk, num_tokens)
        shape = (geometry.num_local_experts, geometry.num_rows)
        # Known by its address alone, and for as long as the caller's tensor lives: it stays the caller's.
        checks.check_tensor(where, "handle[0]", src_info, shape, (torch.int32,), device=self.device)
        shape = (geometry.num_local_experts, self.group_size)
        layout_range = checks.check_tensor(where, "handle[1]", layout_range, shape, (torch.int64,), device=self.device)
        return src_info, layout_range, geometry

    def _check_stats(
        self, where: str, name: str, stats: torch.Tensor | None, size: int, dtype: torch.dtype
    ) -> torch.Tensor | None:
        if stats is None:
            return None
        return checks.check_tensor(where, name, stats, (size,), (dtype,), is_written=True, device=self.device)

    def _recv_hook(self, hook: Hook, method: str) -> RecvHook:
        is_captured = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        return RecvHook(self, hook, method, not is_captured)


def _are_same(tensors: tuple, others: tuple) -> bool:
    return all(one is other for one, other in zip(tensors, others, strict=True))


def _look_of(value: torch.Tensor) -> tuple:
    """Return what is checked of an argument, as a key. The contents of a tensor are not part of it."""
    return type(value), value.shape, value.dtype, value.device, value.stride(), value.is_neg()


def _check_mode(where: str, async_finish: bool, return_recv_hook: bool) -> CallMode:
    assert not (async_finish and return_recv_hook), (
        f"{where}: `async_finish` and `return_recv_hook` exclude each other: the hook is the end of the call"
    )
    return CallMode(bool(async_finish), bool(return_recv_hook))
