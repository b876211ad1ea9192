"""DeepEP V2's buffer: `ElasticBuffer`, and the handle of its dispatches, `EPHandle`.

Shape letters: R ranks, E experts, L = E / R experts of a rank, T tokens of this rank, K top-k, H hidden size, M most
tokens of a rank, n rows received, one for each (token, this rank), X expanded rows, one for each (token, local expert).
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist

from .. import env
from ..control import Control, require_member
from ..elastic_sizing import SIZE_UNIT_BYTES, Domains, Rates, elastic_buffer_bytes, theoretical_num_sms
from ..engine.elastic import Arrived, ElasticRequest, Extras, Form, Layout, fold_weights, own_columns, require_rows
from ..engine.engine import Around, Engine
from ..engine.ops import CallOrder
from ..engine.payload import Payload, Routing
from ..errors import EPUnsupported
from ..event import EventHandle, EventOverlap, event_of
from ..handle import ColumnHandle, require_same_ranks
from ..sizing import align
from ..topology import find_topology
from . import checks
from .calling import call
from .elastic_families import UnsupportedFamilies
from .engines import find_device, forced_ranks_per_node
from .legacy import Buffer

_MOST_BYTES = env.MOST_BYTES // 2  # of a buffer, whose window is twice as large
_QPS_HYBRID, _QPS_DIRECT, _DIRECT_QPS_PER_CALL = 129, 17, 9  # DeepEP's: there are no queue pairs here
_NVLINK_GBS, _NVLINK_GBS_SM100, _RDMA_GBS = 405.0, 810.0, 50.0  # where nothing else is known
_SM_READ_GBS, _SM_WRITE_GBS = 200.0, 50.0
_SMS_WITHOUT_GPU = 132  # those of an H200
_ONE_NODE = "ElasticBuffer works inside one node so far, and this group spans {num}. Use `Buffer` across nodes"

_domains_of: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()  # ranks of a node, by group
_streams: weakref.WeakSet[Any] = weakref.WeakSet()  # of all buffers of this process that have made calls


class EPHandle:
    """What a dispatch leaves for its combine and for cached dispatches. Its tensors are ordinary memory.

    Attributes:
        do_expand: One row for each (token, local expert).
        num_experts: E.
        expert_alignment: To which the counts of each expert are rounded up.
        num_max_tokens_per_rank: M.
        num_sms: SMs that the dispatch used.
        topk_idx: [T, K], this rank's selections.
        num_recv_tokens: n; R * M if the host did not wait for the counts.
        num_expanded_tokens: Sum of the aligned counts; the worst case if the host did not wait.
        num_recv_tokens_per_expert_list: Aligned counts; empty if the host did not wait.
        psum_num_recv_tokens_per_scaleup_rank: [R] int32, rows received from ranks 0..s. The last one is n.
        psum_num_recv_tokens_per_expert: [L] int32. Compact: inclusive prefix sums of the aligned counts. Expanded: the
            end of the rows of expert i, without its padding.
        num_unaligned_recv_tokens_per_expert: [L] int32, counts.
        recv_src_metadata: [n, 2 + K] int32: source rank * M + token; source rank * K + its highest column on this rank;
            and the row of each column in an expanded result, -1: none. Rows beyond n are undefined.
        dst_buffer_slot_idx: [T, K] int32, the row of the token at the rank of each column, in the highest column of
            that rank; -1 in others.
        token_metadata_at_forward: None.
        channel_linked_list: None.
    """

    _layout: Layout
    _deep_ep_ranks: tuple[int, ...] | None  # see `require_same_ranks`

    def __init__(
        self,
        do_expand: bool,
        num_experts: int,
        expert_alignment: int,
        num_max_tokens_per_rank: int,
        num_sms: int,
        topk_idx: torch.Tensor,
        num_recv_tokens: int,
        num_expanded_tokens: int,
        num_recv_tokens_per_expert_list: list[int],
        psum_num_recv_tokens_per_scaleup_rank: torch.Tensor,
        psum_num_recv_tokens_per_expert: torch.Tensor,
        num_unaligned_recv_tokens_per_expert: torch.Tensor,
        recv_src_metadata: torch.Tensor,
        dst_buffer_slot_idx: torch.Tensor,
        token_metadata_at_forward: torch.Tensor | None = None,
        channel_linked_list: torch.Tensor | None = None,
    ):
        self.do_expand = do_expand
        self.num_experts = num_experts
        self.expert_alignment = expert_alignment
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.num_sms = num_sms
        self.topk_idx = topk_idx
        self.num_recv_tokens = num_recv_tokens
        self.num_expanded_tokens = num_expanded_tokens
        self.num_recv_tokens_per_expert_list = num_recv_tokens_per_expert_list
        self.psum_num_recv_tokens_per_scaleup_rank = psum_num_recv_tokens_per_scaleup_rank
        self.psum_num_recv_tokens_per_expert = psum_num_recv_tokens_per_expert
        self.num_unaligned_recv_tokens_per_expert = num_unaligned_recv_tokens_per_expert
        self.recv_src_metadata = recv_src_metadata
        self.dst_buffer_slot_idx = dst_buffer_slot_idx
        self.token_metadata_at_forward = token_metadata_at_forward
        self.channel_linked_list = channel_linked_list

    @classmethod
    def _of(cls, layout: Layout, num_experts: int, num_sms: int, ranks: tuple[int, ...] | None) -> EPHandle:
        """Make the handle of a dispatch by a buffer of these ranks; None: they are not known."""
        form = layout.form
        handle = cls(
            form.is_expanded,
            num_experts,
            form.alignment,
            form.max_tokens,
            num_sms,
            layout.topk_idx,
            layout.num_rows,
            layout.num_expanded,
            layout.aligned_counts,
            layout.rank_ends,
            layout.ends,
            layout.num_per_expert,
            layout.sources,
            layout.slots,
        )
        handle._layout = layout
        handle._deep_ep_ranks = ranks
        return handle


class ElasticBuffer(UnsupportedFamilies):
    """The communication buffer of one rank, in the interface of DeepEP V2.

    All ranks of the group construct it together, and then make the same calls in the same order. It works inside one
    node, on the CPU and on GPUs. The window grows, so a call may be larger than the buffer was made for. Rows come in a
    fixed order: by source rank, then by token.

    Args:
        group: The process group, of any kind; None: the default one.
        num_bytes: Size of the window; None: as `num_max_tokens_per_rank` and `hidden` say.
        num_cpu_bytes: Accepted for DeepEP's callers; at most `num_bytes`.
        num_max_tokens_per_rank: M, which is also the default of dispatches.
        hidden: H.
        num_topk: K; 0: not known.
        use_fp8_dispatch: Dispatches will move FP8. Nothing is cast.
        deterministic: Accepted: results always are.
        allow_hybrid_mode: Whether calls know of nodes. No difference inside one node.
        allow_multiple_reduction: Whether a rank sums, and rounds, what its experts contribute to a token. Without it
            every contribution is added once, at the token's rank, at the price of traffic.
        prefer_overlap_with_compute: Use as few SMs as keep the links busy.
        sl_idx: Accepted for DeepEP's callers.
        num_allocated_qps: Accepted likewise; 0: the default.
        num_cpu_timeout_secs: Seconds that a wait for a peer may take.
        num_gpu_timeout_secs: The same for waits on a GPU.
        explicitly_destroy: The caller may call `destroy()`. Without it the buffer goes with its last reference.
        device: Where tensors live; default `DEEP_EP_DEVICE`, else the current GPU, else the CPU.
        trace: A folder in which this rank records its calls; default `DEEP_EP_TRACE`.

    Attributes:
        group: See the argument.
        rank_idx: This rank.
        num_ranks: R.
        num_bytes: Size of the window, a multiple of 2 MiB.
        num_max_tokens_per_rank: M.
        num_rdma_ranks: Nodes.
        num_nvlink_ranks: Ranks of a node.
        num_scaleout_ranks: Nodes, as calls see them.
        num_scaleup_ranks: Ranks of a node, likewise.
        scaleout_rank_idx: This rank's node.
        scaleup_rank_idx: This rank's index inside of it.
        nccl_comm_handle: None.
    """

    group: dist.ProcessGroup | None
    _last_rows: tuple[int, torch.dtype] | None = None  # hidden size and dtype of the last dispatch

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_bytes: int | None = None,
        num_cpu_bytes: int = 0,
        num_max_tokens_per_rank: int = 0,
        hidden: int = 0,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        deterministic: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
        prefer_overlap_with_compute: bool = True,
        sl_idx: int = 3,
        num_allocated_qps: int = 0,
        num_cpu_timeout_secs: float = 300,
        num_gpu_timeout_secs: float = 100,
        explicitly_destroy: bool = False,
        *,
        device: torch.device | str | None = None,
        trace: str | os.PathLike[str] | None = None,
    ):
        del sl_idx
        group = self.group = _group_of("ElasticBuffer", group)
        with _checked_for_all(group):
            sizes = num_max_tokens_per_rank, hidden, num_topk
            _check_sizes(num_bytes, num_cpu_bytes, sizes)
            checks.check_int("ElasticBuffer", "num_allocated_qps", num_allocated_qps, 0)
            if num_bytes is None:
                # Without asking the others where they are: on several nodes the buffer is refused below.
                domains = Domains(group.size(), group.size(), bool(allow_hybrid_mode))
                num_bytes = elastic_buffer_bytes(
                    domains, *sizes, bool(use_fp8_dispatch), bool(allow_multiple_reduction)
                )
                checks.check_int("ElasticBuffer", "num_bytes", num_bytes, 1, _MOST_BYTES)
        self.num_max_tokens_per_rank = num_max_tokens_per_rank
        self.deterministic = bool(deterministic)
        self.allow_hybrid_mode = bool(allow_hybrid_mode)
        self.allow_multiple_reduction = bool(allow_multiple_reduction)
        self.prefer_overlap_with_compute = bool(prefer_overlap_with_compute)
        self.num_allocated_qps = num_allocated_qps or (_QPS_HYBRID if allow_hybrid_mode else _QPS_DIRECT)
        self.explicitly_destroy = bool(explicitly_destroy)
        self.nccl_comm_handle = None
        self.num_bytes = align(num_bytes, SIZE_UNIT_BYTES)
        self._buffer = Buffer(
            group,
            2 * self.num_bytes,  # rows that came, and rows that go back, may be there at once
            device=device,
            num_cpu_timeout_secs=num_cpu_timeout_secs,
            num_gpu_timeout_secs=num_gpu_timeout_secs,
            trace=trace,
        )
        # On all ranks, as what `_find_domains` then raises.
        if self._buffer._topology.num_nodes > 1:
            self._buffer._close()
        self._find_domains()

    @classmethod
    def from_buffer(
        cls, buffer: Buffer, num_max_tokens_per_rank: int = 0, allow_multiple_reduction: bool = True
    ) -> ElasticBuffer:
        """Return an `ElasticBuffer` over the window of a `Buffer`, for programs that make calls of both.

        All calls of both belong to one order, which must be the same on all ranks. Closing one closes the other.

        Args:
            buffer: The buffer, inside one node.
            num_max_tokens_per_rank: M, the default of dispatches.
            allow_multiple_reduction: See `ElasticBuffer`.
        """
        if not isinstance(buffer, Buffer):
            raise TypeError(f"ElasticBuffer.from_buffer: `buffer` must be a Buffer, got {type(buffer).__name__}")
        made = cls.__new__(cls)
        made.group = buffer.group
        made.num_max_tokens_per_rank = checks.check_int(
            "ElasticBuffer.from_buffer", "num_max_tokens_per_rank", num_max_tokens_per_rank, 0, checks.MOST_ROWS
        )
        made.deterministic, made.allow_hybrid_mode, made.prefer_overlap_with_compute = False, True, True
        made.allow_multiple_reduction = bool(allow_multiple_reduction)
        made.num_allocated_qps, made.nccl_comm_handle = _QPS_HYBRID, None
        made.explicitly_destroy, made.num_bytes = buffer.explicitly_destroy, buffer.num_nvl_bytes
        made._buffer = buffer
        made._find_domains()
        return made

    def _find_domains(self) -> None:
        """Find how the ranks are grouped.

        Raises:
            EPUnsupported: They are on several nodes.
        """
        topology = self._buffer._topology
        if topology.num_nodes > 1:
            raise EPUnsupported(_ONE_NODE.format(num=f"{topology.num_nodes} nodes"))
        self.rank_idx, self.num_ranks = self._buffer.rank, self._buffer.group_size
        self._domains = Domains(self.num_ranks, topology.ranks_per_node, self.allow_hybrid_mode)
        self.num_rdma_ranks, self.num_nvlink_ranks = self._domains.physical
        self.num_scaleout_ranks, self.num_scaleup_ranks = self._domains.logical
        self.scaleout_rank_idx, self.scaleup_rank_idx = divmod(self.rank_idx, self.num_scaleup_ranks)
        self._known_sms: dict[tuple, int] = {}

    def __deepcopy__(self, memo: dict[int, Any]) -> ElasticBuffer:
        """The same buffer: a copy of a model shares it with the model."""
        return self

    def __repr__(self) -> str:
        return f"Elastic{self._buffer!r}"

    @property
    def device(self) -> torch.device:
        """Where tensors live."""
        return self._buffer.device

    @property
    def transport(self) -> str:
        """How rows travel, in words."""
        return self._buffer.transport

    @property
    def runtime(self) -> Any:
        """The runtime of the buffer, see `legacy.Runtime`; None after `destroy`."""
        return self._buffer.runtime

    # What `call` looks for
    @property
    def _lock(self) -> Any:
        return self._buffer._lock

    @property
    def _engine(self) -> Any:
        return self._buffer._engine

    @property
    def _trace(self) -> Any:
        return self._buffer._trace

    # Static ----------------------------------------------------------------------------------------------------------

    @staticmethod
    def get_buffer_size_hint(
        group: dist.ProcessGroup | None,
        num_max_tokens_per_rank: int,
        hidden: int,
        num_topk: int = 0,
        use_fp8_dispatch: bool = False,
        allow_hybrid_mode: bool = True,
        allow_multiple_reduction: bool = True,
    ) -> int:
        """Bytes that calls of this size need. The first time for a group, all its ranks call it together.

        Args:
            group: The process group.
            num_max_tokens_per_rank: M.
            hidden: H.
            num_topk: K; 0: not known.
            use_fp8_dispatch: Dispatches will move FP8.
            allow_hybrid_mode: As the buffer's.
            allow_multiple_reduction: As the buffer's.
        """
        where, most = "get_buffer_size_hint", checks.MOST_ROWS
        max_tokens = checks.check_int(where, "num_max_tokens_per_rank", num_max_tokens_per_rank, 1, most)
        hidden = checks.check_int(where, "hidden", hidden, 1, most)
        num_topk = checks.check_int(where, "num_topk", num_topk, 0, most)
        group = _group_of(where, group)
        domains = Domains(group.size(), _ranks_per_node(group), bool(allow_hybrid_mode))
        return elastic_buffer_bytes(
            domains, max_tokens, hidden, num_topk, bool(use_fp8_dispatch), bool(allow_multiple_reduction)
        )

    @staticmethod
    def capture() -> EventHandle:
        """An event that marks everything the caller has issued so far."""
        return EventHandle()

    # The buffer ------------------------------------------------------------------------------------------------------

    def destroy(self) -> None:
        """Let the queued communication finish and close the buffer. Local: no other rank is waited for.

        Received tensors stay valid. A second call does nothing.
        """
        assert self.explicitly_destroy, "ElasticBuffer.destroy: make the buffer with explicitly_destroy=True"
        self._buffer._close()

    def __enter__(self) -> ElasticBuffer:
        self._buffer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._buffer.__exit__(kind, error, traceback)

    @call
    def barrier(self, use_comm_stream: bool = True, with_cpu_sync: bool = False, sequential: bool = True) -> None:
        """Make a barrier over the streams of all ranks.

        Args:
            use_comm_stream: On the comm stream, which first waits for the caller's; that one then waits for it.
            with_cpu_sync: The host waits, too, before and after.
            sequential: Accepted for DeepEP's callers.
        """
        del use_comm_stream, sequential  # either way the caller's stream goes on when all ranks' have come here
        engine = self._buffer._require_engine("barrier")
        self._follow_others()
        if with_cpu_sync:
            engine.synchronize()
        engine.barrier()
        if with_cpu_sync:
            engine.synchronize()

    def get_comm_stream(self) -> Any:
        """The stream that communication runs on."""
        return self._buffer.get_comm_stream()

    def _follow_others(self) -> None:
        """Have the next call come after those that other buffers of this process have queued.

        V2 has one comm stream in a process. Here each buffer has its own, and they keep that order.
        """
        mine = self._engine.stream
        _streams.add(mine)
        if len(_streams) > 1:
            for other in list(_streams):
                if other is not mine:
                    mine.follow(other)

    def get_physical_domain_size(self) -> tuple[int, int]:
        """Return the number of nodes, and of ranks of a node."""
        return self._domains.physical

    def get_logical_domain_size(self) -> tuple[int, int]:
        """Return the number of scale-out and of scale-up ranks."""
        return self._domains.logical

    def get_theoretical_num_sms(
        self,
        num_experts: int,
        num_topk: int,
        num_scaleout_topk: int = 0,
        rdma_gbs: float = 0,
        nvlink_gbs: float = 0,
        sm_read_gbs: float = 200,
        sm_write_gbs: float = 50,
    ) -> int:
        """SMs that keep the links busy, if the router is balanced.

        Args:
            num_experts: E.
            num_topk: K.
            num_scaleout_topk: Must be 0.
            rdma_gbs: GB/s of the network; 0: 50.
            nvlink_gbs: GB/s of NVLink; 0: 405, and 810 from SM100 on.
            sm_read_gbs: What one SM reads; 0: 200.
            sm_write_gbs: What one SM writes; 0: 50.
        """
        where = "get_theoretical_num_sms"
        if num_scaleout_topk != 0:
            raise ValueError(f"{where}: `num_scaleout_topk` must be 0, got {num_scaleout_topk}")
        checks.check_num_experts(where, "num_experts", num_experts, self.num_ranks)
        checks.check_int(where, "num_topk", num_topk, 1, num_experts)
        key = (num_experts, num_topk, rdma_gbs, nvlink_gbs, sm_read_gbs, sm_write_gbs)
        known = self._known_sms.get(key)
        if known is None:
            num_sms, is_new = _SMS_WITHOUT_GPU, False
            if self._buffer.device.type == "cuda":
                properties = torch.cuda.get_device_properties(self._buffer.device)
                num_sms, is_new = properties.multi_processor_count, properties.major >= 10
            nvlink_gbs = nvlink_gbs or (_NVLINK_GBS_SM100 if is_new else _NVLINK_GBS)
            of_sm = (sm_read_gbs or _SM_READ_GBS, sm_write_gbs or _SM_WRITE_GBS)
            rates = Rates(rdma_gbs or _RDMA_GBS, nvlink_gbs, *of_sm)
            known = self._known_sms[key] = theoretical_num_sms(
                self._domains, num_experts, num_topk, rates, num_sms, self.prefer_overlap_with_compute
            )
        return known

    def get_theoretical_num_qps(self, num_sms: int) -> int:
        """Queue pairs that go with so many SMs. There are none here."""
        wanted = 16 * num_sms + 1 if self.allow_hybrid_mode else min(num_sms, _DIRECT_QPS_PER_CALL)
        return min(wanted, self.num_allocated_qps)

    # Memory and statistics -------------------------------------------------------------------------------------------

    def get_combine_buffer(
        self, handle: EPHandle, hidden: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Window memory for the experts to write into, so that a combine need not copy or sum rows before it starts.
        (On the CPU it sums expanded rows in any case.)

        Args:
            handle: Of the dispatch whose rows will be combined.
            hidden: H; default that of the last dispatch.
            dtype: Default that of the last dispatch, BF16 if that cannot be combined (FP8).

        Returns:
            [n, H], of an expanded dispatch [X, H]; uninitialised. Ordinary memory where the window has none left.
        """
        where = "get_combine_buffer"
        self._check_handle(where, handle)
        hidden, dtype = checks.check_combine_rows(where, hidden, dtype, self._last_rows)
        num_rows = handle.num_expanded_tokens if handle.do_expand else handle.recv_src_metadata.shape[0]
        with self._lock:
            return self._buffer._require_engine(where).allocate((num_rows, hidden), dtype)

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Say that another stream works with a tensor of the window, see `Buffer.record_stream`."""
        self._buffer.record_stream(tensor, stream)

    def check(self) -> None:
        """Wait for everything that was launched, and raise what has gone wrong. On a GPU errors come late otherwise."""
        self._buffer.check()

    def stats(self) -> dict[str, Any]:
        """What this buffer has done so far, see `Buffer.stats`."""
        return self._buffer.stats()

    def trim(self) -> int:
        """Give unused memory back to the system. Returns the bytes given back."""
        return self._buffer.trim()

    def release_graphs(self) -> None:
        """Let go of the window memory that captured CUDA graphs use. They must not be replayed any more."""
        self._buffer.release_graphs()

    def set_fault_hook(self, hook: Callable[[str], None] | None) -> None:
        """Have a function called at the steps of every call, see `Buffer.set_fault_hook`."""
        self._buffer.set_fault_hook(hook)

    # Dispatch --------------------------------------------------------------------------------------------------------

    @call
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        cumulative_local_expert_recv_stats: torch.Tensor | None = None,
        num_experts: int | None = None,
        num_max_tokens_per_rank: int | None = None,
        expert_alignment: int | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | EventHandle | None = None,
        previous_event_before_epilogue: EventOverlap | EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
        handle: EPHandle | None = None,
        do_handle_copy: bool = True,
        do_cpu_sync: bool | None = None,
        do_expand: bool = False,
        do_zero_padding: bool = False,
        use_tma_aligned_col_major_sf: bool = False,
    ) -> tuple[Any, torch.Tensor | None, torch.Tensor | None, EPHandle, EventOverlap]:
        """Send tokens to the ranks of their experts.

        Args:
            x: [T, H] contiguous, any dtype, or a tuple with scales [T, S], elements of 4 bytes, of any strides.
            topk_idx: [T, K] int32 or int64 expert ids, contiguous; an id outside [0, E) selects nothing. Not with
                `handle`.
            topk_weights: [T, K] float32, contiguous, or None.
            cumulative_local_expert_recv_stats: [L] int32, to which the selections of each local expert are added.
            num_experts: E, a multiple of R.
            num_max_tokens_per_rank: M, the same on all ranks; default the buffer's.
            expert_alignment: Counts of each expert are rounded up to it; default 1.
            num_sms: Most blocks of a kernel; 0: `get_theoretical_num_sms`. No effect on the CPU.
            num_qps: Accepted for DeepEP's callers.
            previous_event: Wait for it first; default: for what the caller has issued.
            previous_event_before_epilogue: The last step waits for it, too.
            async_with_compute_stream: Return an event instead of waiting.
            allocate_on_comm_stream: Accepted for DeepEP's callers.
            handle: Of an earlier dispatch: every row lands where it did then.
            do_handle_copy: The handle has a copy of `topk_idx`, and not the tensor itself.
            do_cpu_sync: Whether the host waits for the counts, so that shapes are exact; default: without a handle.
                Without it shapes are those of the worst case, and the call can be captured in a CUDA graph.
            do_expand: One row for each (token, local expert), grouped by expert, instead of one for each token.
            do_zero_padding: Rows between the experts' become zero. Only with `do_expand`.
            use_tma_aligned_col_major_sf: Received scales have strides (1, rows aligned to 4).

        Returns:
            `recv_x` (or a tuple with scales), `recv_topk_idx` [n, K] (local ids, -1 elsewhere; None if expanded),
            `recv_topk_weights` [n, K] as sent (if expanded [X], of each row), the handle, and the event.
        """
        where, device = "dispatch", self._buffer.device
        payload = checks.check_payload(where, x, device)
        num_tokens = payload.x.shape[0]
        if payload.scales is not None and payload.scales.element_size() != 4:
            raise ValueError(f"{where}: scales must have elements of 4 bytes, they are {payload.scales.dtype}")
        self._check_num_qps(where, num_qps)
        checks.check_int(where, "num_sms", num_sms, 0)
        order = _order(where, previous_event, async_with_compute_stream)
        after = _event(where, "previous_event_before_epilogue", previous_event_before_epilogue)
        engine = self._buffer._require_engine(where)
        self._follow_others()
        del allocate_on_comm_stream  # results belong to the stream that fills them where an event came before
        if handle is not None:
            assert topk_idx is None, f"{where}: `handle` and `topk_idx` exclude each other"
            assert not do_cpu_sync, f"{where}: the host does not wait in a dispatch with a handle: `do_cpu_sync`"
            self._check_cached(handle, num_tokens, num_experts, num_max_tokens_per_rank, expert_alignment, do_expand)
            if cumulative_local_expert_recv_stats is not None:
                raise ValueError(f"{where}: `cumulative_local_expert_recv_stats` is for dispatches without a handle")
            form, selected, num_sms = handle._layout.form, handle.topk_idx, num_sms or handle.num_sms
        else:
            num_experts = checks.check_num_experts(where, "num_experts", num_experts, self.num_ranks)
            selected = checks.check_tensor(
                where, "topk_idx", topk_idx, (num_tokens, "top-k"), checks.IDX_DTYPES, device=device
            )
            if selected.shape[1] == 0:
                raise ValueError(f"{where}: `topk_idx` must have at least one column")
            form = self._form(num_tokens, selected, num_experts, num_max_tokens_per_rank, expert_alignment, do_expand)
            num_sms = num_sms or self.get_theoretical_num_sms(num_experts, max(1, min(form.num_topk, num_experts)))
        if do_zero_padding and not form.is_expanded:
            raise ValueError(f"{where}: `do_zero_padding` needs `do_expand`")
        if topk_weights is not None:
            shape = (num_tokens, form.num_topk)
            topk_weights = checks.check_tensor(
                where, "topk_weights", topk_weights, shape, (torch.float32,), device=device
            )
        stats = cumulative_local_expert_recv_stats
        if stats is not None:
            stats = checks.check_tensor(
                where, "cumulative_local_expert_recv_stats", stats, (form.num_local,), (torch.int32,),
                is_written=True, device=device,
            )  # fmt: skip
        extras = Extras(bool(do_zero_padding), bool(use_tma_aligned_col_major_sf), stats, after)
        scale_dtype = payload.scales.dtype if payload.scales is not None else None
        self._last_rows = (payload.x.shape[1], payload.x.dtype)
        is_synchronised = handle is None and (do_cpu_sync or do_cpu_sync is None)
        request = ElasticRequest(
            form, selected, self.num_ranks, self.rank_idx, topk_weights, scale_dtype, extras,
            None if handle is None else handle._layout, bool(is_synchronised), bool(do_handle_copy),
        )  # fmt: skip
        arrived, event = self._send(engine, payload, request, order, num_sms)
        if handle is None:
            assert num_experts is not None
            handle = EPHandle._of(arrived.layout, num_experts, num_sms, self._buffer._ranks)
        return *_results(arrived), handle, EventOverlap(event)

    def _send(
        self, engine: Engine, payload: Payload, request: ElasticRequest, order: CallOrder, num_sms: int
    ) -> tuple[Arrived, EventHandle | None]:
        """Make the call that a request asks for."""
        unfold = engine.unfold(request, num_sms)
        unfold.attach(payload)
        form, selected, topk_weights = request.form, request.topk_idx, request.topk_weights
        if request.layout is not None:
            around = Around(
                partial(unfold.prepare, payload=payload), lambda scope, received, _: unfold.again(scope, received)
            )
            return engine.cached_dispatch(payload, request.layout.compact, order, num_sms, around)
        around = Around(finish=unfold.new)
        counts, order = engine.layout_of_selections(selected, form.num_local * self.num_ranks, order)
        weights = topk_weights if topk_weights is not None else selected.new_empty(selected.shape, dtype=torch.float32)
        routing = Routing(
            counts.num_tokens_per_rank, counts.num_tokens_per_expert, counts.is_token_in_rank, selected, weights,
            max_tokens=form.max_tokens, has_known_ids=True, keeps_weights=True, has_weights=topk_weights is not None,
        )  # fmt: skip
        if request.is_synchronised:
            arrived, _, event = engine.dispatch(payload, routing, 1, order, num_sms, around)
            return arrived, event
        num_rows = self.num_ranks * form.max_tokens
        return engine.worst_case_dispatch(payload, routing, num_rows, 1, order, num_sms, around)

    def _form(
        self,
        num_tokens: int,
        topk_idx: torch.Tensor,
        num_experts: int,
        max_tokens: int | None,
        alignment: int | None,
        is_expanded: bool,
    ) -> Form:
        where = "dispatch"
        max_tokens = self.num_max_tokens_per_rank if max_tokens is None else max_tokens
        most = checks.MOST_ROWS // self.num_ranks
        max_tokens = checks.check_int(where, "num_max_tokens_per_rank", max_tokens, 0, most)
        if num_tokens > max_tokens:
            raise ValueError(
                f"{where}: `x` has {num_tokens} tokens, more than num_max_tokens_per_rank={max_tokens}. Raise it, here "
                "or where the buffer is made (of a MoELayer its num_worst_tokens, which the ranks share); it must be "
                "the same on all ranks"
            )
        alignment = (
            1 if alignment is None else checks.check_int(where, "expert_alignment", alignment, 1, checks.MOST_ROWS)
        )
        num_local = num_experts // self.num_ranks
        if num_local * alignment > checks.MOST_ROWS:
            raise ValueError(
                f"{where}: `expert_alignment` must be at most {checks.MOST_ROWS // num_local} with {num_local} experts "
                f"of a rank, got {alignment}: rows are counted in int32"
            )
        return Form(num_local, topk_idx.shape[1], max_tokens, alignment, bool(is_expanded))

    def _check_cached(
        self,
        handle: Any,
        num_tokens: int,
        num_experts: int | None,
        max_tokens: int | None,
        alignment: int | None,
        do_expand: bool,
    ) -> None:
        """Check a handle, and that other arguments do not contradict it."""
        where = "dispatch"
        self._check_handle(where, handle)
        for name, given, known in (
            ("num_experts", num_experts, handle.num_experts),
            ("num_max_tokens_per_rank", max_tokens, handle.num_max_tokens_per_rank),
            ("expert_alignment", alignment, handle.expert_alignment),
        ):
            assert given is None or given == known, f"{where}: `{name}` is {given}, the handle's is {known}"
        if do_expand and not handle.do_expand:
            raise ValueError(f"{where}: `do_expand` with the handle of a compact dispatch. Dispatch without a handle")
        if handle.topk_idx.shape[0] != num_tokens:
            raise ValueError(
                f"{where}: `x` must have the handle's {handle.topk_idx.shape[0]} tokens, it has {num_tokens}"
            )

    def _check_handle(self, where: str, handle: Any) -> None:
        if not isinstance(handle, EPHandle) or not hasattr(handle, "_layout"):
            made = "one that a caller has made" if isinstance(handle, EPHandle) else type(handle).__name__
            raise TypeError(f"{where}: `handle` must be the EPHandle that dispatch returned, got {made}")
        require_same_ranks(where, handle, self._buffer._ranks)

    def _check_num_qps(self, where: str, num_qps: int) -> None:
        assert checks.check_int(where, "num_qps", num_qps, 0) <= self.num_allocated_qps, (
            f"{where}: `num_qps` is {num_qps}, the buffer has {self.num_allocated_qps}"
        )

    # Combine ---------------------------------------------------------------------------------------------------------

    @call
    def combine(
        self,
        x: torch.Tensor,
        handle: EPHandle,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor, torch.Tensor] | None = None,
        num_sms: int = 0,
        num_qps: int = 0,
        previous_event: EventOverlap | EventHandle | None = None,
        previous_event_before_epilogue: EventOverlap | EventHandle | None = None,
        async_with_compute_stream: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring the experts' rows back and sum them per token, unweighted.

        Contributions are added in the order of the token's columns, in FP32 (FP64 of FP64), biases first. Compact rows,
        and the sums that a rank makes of expanded rows, stand at the rank's highest column.

        Args:
            x: BF16, FP16, FP32 or FP64, contiguous. Compact: [n, H], as dispatch returned. Expanded: [any, H], rows as
                dispatch returned them; padding is not read, and what is behind the last row in use may be left out.
            handle: Of the dispatch.
            topk_weights: float32, contiguous; compact [n, K], expanded [rows of x].
            bias: [T, H] of x's dtype, contiguous, or a tuple of two.
            num_sms: Most blocks of a kernel; 0: the handle's. No effect on the CPU.
            num_qps: Accepted for DeepEP's callers.
            previous_event: Wait for it first; default: for what the caller has issued.
            previous_event_before_epilogue: The sum waits for it, too. This rank's rows are offered before, but peers
                read them where they lie: no rank ends the call before all have summed, unless all have posted their
                rows.
            async_with_compute_stream: Return an event instead of waiting. `x` must stay as it is until then.
            allocate_on_comm_stream: Accepted for DeepEP's callers.

        Returns:
            `combined_x` [T, H], `combined_topk_weights` [T, K] or None, and the event. Column k of the weights is what
            the rank of expert k supplied for it; 0 where nothing was selected.
        """
        where, device = "combine", self._buffer.device
        self._check_handle(where, handle)
        self._check_num_qps(where, num_qps)
        checks.check_int(where, "num_sms", num_sms, 0)
        del allocate_on_comm_stream
        layout, sources = handle._layout, handle.recv_src_metadata
        if sources is not layout.sources:  # callers may cut it to the rows that came
            name, columns = "handle.recv_src_metadata", 2 + layout.form.num_topk
            sources = checks.check_tensor(
                where, name, sources, ("rows", columns), (torch.int32,), contiguous=False, device=device
            )
        num_rows: int | str = "rows" if handle.do_expand else sources.shape[0]
        x = checks.check_tensor(where, "x", x, (num_rows, "hidden"), checks.COMBINE_DTYPES, device=device)
        if layout.num_used is not None:
            require_rows(x.shape[0], layout.num_used)
        checks.warn_of_lost_gradients(where, x)
        if topk_weights is not None:
            shape = (x.shape[0],) if handle.do_expand else (sources.shape[0], layout.form.num_topk)
            topk_weights = checks.check_tensor(
                where, "topk_weights", topk_weights, shape, (torch.float32,), device=device
            )
        if isinstance(bias, list):
            raise TypeError(f"{where}: `bias` must be a tensor or a tuple of two, got a list")
        if isinstance(bias, tuple):
            assert len(bias) == 2, f"{where}: `bias` must be a tensor or a tuple of two, got {len(bias)}"
            if any(one is None for one in bias):
                raise TypeError(f"{where}: `bias` must be a tensor or a tuple of two, and one of the two is None")
        biases = checks.check_biases(where, bias, x, layout.topk_idx.shape[0])
        order = _order(where, previous_event, async_with_compute_stream)
        after = _event(where, "previous_event_before_epilogue", previous_event_before_epilogue)
        engine, num_sms = self._buffer._require_engine(where), num_sms or handle.num_sms
        self._follow_others()
        is_reduced_once = handle.do_expand and not self.allow_multiple_reduction
        is_pulled = handle.do_expand and engine.can_pull(x)
        is_compact = not (is_reduced_once or is_pulled)
        num_given = sources.shape[0] if is_compact else x.shape[0]
        given = ColumnHandle(
            layout.compact, layout.owners, layout.slots, num_given, None if is_compact else sources[:, 2:],
            is_reduced_once, layout.peer_rows, layout.form.alignment if handle.do_expand else 0, layout.plan,
        )  # fmt: skip
        is_given = is_pulled or not handle.do_expand
        give = None if is_given else partial(_give, engine, layout, sources, x, is_compact, num_sms)
        prepare = partial(_prepare, engine, layout, sources, x, topk_weights, give)
        around = Around(prepare, before_sum=None if after is None else after.current_stream_wait)
        combined, event = engine.combine(x, given, topk_weights, biases, order, num_sms, around)
        return combined.x, combined.topk_weights, EventOverlap(event)


def _give(
    engine: Any, layout: Layout, sources: torch.Tensor, x: torch.Tensor, is_compact: bool, num_sms: int, scope: Any
) -> torch.Tensor:
    """Return the rows of a combine of expanded rows that cannot be pulled where they lie: sums by token, or a copy."""
    if is_compact:
        given = engine.region((sources.shape[0], x.shape[1]), x.dtype)
        scope.launch(partial(engine.fold_rows, given, x, sources[:, 2:], layout.rank_ends, num_sms))
    else:
        given = engine.region(tuple(x.shape), x.dtype)
        scope.launch(partial(given.copy_, x))
    return given


def _prepare(
    engine: Any,
    layout: Layout,
    sources: torch.Tensor,
    x: torch.Tensor,
    topk_weights: torch.Tensor | None,
    give: Callable[[Any], torch.Tensor] | None,
    scope: Any,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What a combine gives: rows as they are, or what `give` makes of them; and weights by token."""
    if layout.form.is_expanded and layout.num_used is None:
        scope.launch(partial(engine.require_rows, layout.compact, x, sources[:, 2:]))
    given = x if give is None else give(scope)
    if topk_weights is None:
        return given, None
    num_rows, form = sources.shape[0], layout.form
    weights = engine.region((max(num_rows, given.shape[0]), form.num_topk), torch.float32)
    if form.is_expanded:
        scope.launch(partial(fold_weights, weights[:num_rows], topk_weights, sources[:, 2:]))
    else:
        assert layout.ids is not None
        scope.launch(partial(own_columns, weights, topk_weights, layout.ids[:num_rows]))
    return given, weights


def _results(arrived: Arrived) -> tuple[Any, torch.Tensor | None, torch.Tensor | None]:
    """Return the first three results of a dispatch."""
    x = arrived.x if arrived.scales is None else (arrived.x, arrived.scales)
    return x, arrived.topk_idx, arrived.topk_weights


def _event(where: str, name: str, event: Any) -> EventHandle | None:
    if event is not None and not isinstance(event, (EventOverlap, EventHandle)):
        raise TypeError(f"{where}: `{name}` must be an EventOverlap or an EventHandle, got {type(event).__name__}")
    return event_of(event)


def _order(where: str, previous_event: Any, is_async: bool) -> CallOrder:
    return CallOrder(_event(where, "previous_event", previous_event), bool(is_async))


def _check_sizes(num_bytes: int | None, num_cpu_bytes: int, sizes: tuple[int, int, int]) -> None:
    """Check the bytes that a buffer is made with, or the sizes from which they follow."""
    where, most = "ElasticBuffer", checks.MOST_ROWS
    for name, value in zip(("num_max_tokens_per_rank", "hidden", "num_topk"), sizes, strict=True):
        checks.check_int(where, name, value, 0, most)
    if num_bytes is None and not (sizes[0] and sizes[1]):
        raise ValueError(f"{where}: pass `num_bytes`, or `num_max_tokens_per_rank` and `hidden`")
    if num_bytes is None and num_cpu_bytes:
        raise ValueError(f"{where}: `num_cpu_bytes` is a part of `num_bytes`, which must be given with it")
    if num_bytes is not None:
        checks.check_int(where, "num_bytes", num_bytes, 1, _MOST_BYTES)
    checks.check_int(where, "num_cpu_bytes", num_cpu_bytes, 0, num_bytes)


@contextmanager
def _checked_for_all(group: dist.ProcessGroup) -> Iterator[None]:
    """What is raised in the block is reported to the peers, which make a `Buffer` already."""
    try:
        yield
    except BaseException:
        with Control(group, None, env.TIMEOUT_SECS.default).joint("making the buffer"):
            raise


def _group_of(where: str, group: Any) -> dist.ProcessGroup:
    """The group that was given; for None the default one."""
    if group is None and not dist.is_initialized():
        raise ValueError(f"{where}: there is no process group. Call `torch.distributed.init_process_group` first")
    require_member(where, group)
    group = dist.group.WORLD if group is None else group
    if not (hasattr(group, "rank") and hasattr(group, "size")):
        raise TypeError(f"{where}: `group` must be a process group, got {type(group).__name__}")
    return group


def _ranks_per_node(group: dist.ProcessGroup) -> int:
    """Ranks of a node. The first time for a group, all its ranks call it together."""
    known = _domains_of.get(group)
    if known is None:
        control = Control(group, None, checks.check_secs("ElasticBuffer", "num_cpu_timeout_secs", None))
        with control.joint("get_buffer_size_hint"):
            known = find_topology(control, forced_ranks_per_node(find_device(None))).ranks_per_node
        _domains_of[group] = known
    return known
