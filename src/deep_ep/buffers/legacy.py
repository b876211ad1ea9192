"""`Buffer`: DeepEP's V1 interface. Arguments, checks and docstrings; the algorithm is the engine's."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import warnings
from collections.abc import Callable
from types import TracebackType
from typing import Any
from weakref import ReferenceType, ref

import torch
import torch.distributed as dist

from .. import env
from ..config import Config, combine_config, dispatch_config
from ..control import Comm, Control, group_ranks
from ..engine.ops import CallOrder
from ..engine.payload import Routing
from ..errors import EPClosed, EPUnsupported, account
from ..event import EventHandle, EventOverlap
from ..generation import Generation
from ..handle import Handle, RailHandle, parse_handle, require_same_ranks
from ..reaper import Closing, is_normal_end
from ..sizing import low_latency_buffer_bytes
from ..stream import CommStream
from ..topology import Topology, find_topology
from ..trace import Trace, open_trace
from ..transport import WindowSizes
from ..watch import Watch
from . import checks, registry, usual
from .calling import across_nodes, call, is_compiling
from .engines import Engine, find_device, forced_ranks_per_node, make_engine
from .low_latency import LowLatencyMethods
from .replacing import Generated, ReplacingMethods

topk_idx_t = torch.int64
"""The dtype in which DeepEP's callers make expert ids; int32 works as well."""

_inherited: list[Engine] = []  # by a fork, and kept alive: their tensors are a GPU's, which a child must not free
_AT_ONCE = CallOrder(None, False)  # of calls without events, which come again and again
_MARKED = (Handle._fields.index("send_head"), RailHandle._fields.index("send_rdma_head"))  # on one node, on several
_LEAST_SCRATCH_BYTES = 64 << 20  # reserved, not committed: staging needs a row of every rank to fit


class Runtime:
    """What `buffer.runtime` offers: where a buffer's rank stands in its group."""

    def __init__(self, topology: Topology, device: torch.device):
        self._topology = topology
        self._device = device

    def is_available(self) -> bool:
        """Return whether the buffer can be used."""
        return True

    def get_num_rdma_ranks(self) -> int:
        """Return the number of nodes."""
        return self._topology.num_nodes

    def get_rdma_rank(self) -> int:
        """Return this rank's node."""
        return self._topology.node

    def get_root_rdma_rank(self, is_global: bool) -> int:
        """Return the first rank of this rank's rail: its own local index, or 0."""
        return self._topology.local_rank if is_global else 0

    def get_local_device_id(self) -> int:
        """Return the index of the device; the CPU is device 0."""
        return self._device.index or 0


class Buffer(LowLatencyMethods, ReplacingMethods):
    """The expert-parallel communication buffer of one rank: dispatch tokens to experts, combine their results.

    All ranks of the group construct it together, and then make the same calls in the same order.

    A buffer belongs to the process that made it. In a forked child every method raises `EPClosed` and does nothing;
    tensors that were received before the fork stay readable there (`docs/protocol.md`).

    `with Buffer(...) as buffer:` closes it at the end of the block, whatever `explicitly_destroy` is, as `destroy()`
    does. If an exception leaves the block, nothing is waited for: what is queued fails, and all peers raise at once and
    name this rank (on the CPU also its exception; where ranks may be masked, they go on without it).

    Args:
        group: The process group, of any kind. None: use `comm`.
        num_nvl_bytes: Size of the window inside a node, a multiple of 128, at most 2**40. It is reserved at once, used
            as needed, and grows.
        num_rdma_bytes: Size of the window across nodes, a multiple of 128, at most 2**40.
        low_latency_mode: Whether low-latency calls will be made, in memory of `num_rdma_bytes`.
        num_qps_per_rank: Accepted for DeepEP's callers; there are no queue pairs here.
        allow_nvlink_for_low_latency_mode: Accepted likewise.
        allow_mnnvl: Accepted likewise.
        explicitly_destroy: The caller will call `destroy()`; without it the buffer goes with its last reference.
        enable_shrink: Whether ranks may be masked (low latency).
        comm: An mpi4py communicator, or anything with its `Get_rank`, `Get_size` and `allgather`.
        use_fabric: Accepted for DeepEP's callers.
        device: Where tensors live; default `DEEP_EP_DEVICE`, else the current GPU, else the CPU.
        num_cpu_timeout_secs: Seconds that a wait for a peer may take, at most a million; default
            `DEEP_EP_TIMEOUT_SECS`.
        num_gpu_timeout_secs: The same for waits on a GPU.
        trace: A folder in which this rank records its calls, for `python -m deep_ep report` and Perfetto; default
            `DEEP_EP_TRACE`, empty: none.

    Attributes:
        number: The key of this buffer in `registry`, by which custom operators find it; unique in this process.
        generation: How often the ranks have made it anew over a store (`join`, `replace`); 0: it was made over a group.
    """

    num_sms: int = 20
    _trace: Trace | None = None
    _watch: Watch | None = None  # which rank came last, see `metrics.watch`
    _fault_hook: Callable[[str], None] | None = None  # see `set_fault_hook`
    _known_layout: tuple[ReferenceType, ...] | None = None  # to the last layout that was made here, see `usual.py`
    _known_ids: ReferenceType | None = None  # to the ids that it was made of
    _known_version: int | None = None  # of the ids and of the counts of experts, see `usual.version_of`
    _known_head: ReferenceType | None = None  # to the `send_head` of the last handle that was made here
    _refusal: str | None = None  # why no method works in this process, which is a fork of the rank's
    _is_bounded = False  # whether `set_num_sms` was called: then configs made by default bound the blocks too

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        num_nvl_bytes: int = 0,
        num_rdma_bytes: int = 0,
        low_latency_mode: bool = False,
        num_qps_per_rank: int = 24,
        allow_nvlink_for_low_latency_mode: bool = True,
        allow_mnnvl: bool = False,
        explicitly_destroy: bool = False,
        enable_shrink: bool = False,
        comm: Comm | Generation | None = None,
        *,
        use_fabric: bool = False,
        device: torch.device | str | None = None,
        num_cpu_timeout_secs: float | None = None,
        num_gpu_timeout_secs: float | None = None,
        trace: str | os.PathLike[str] | None = None,
    ):
        del allow_nvlink_for_low_latency_mode, allow_mnnvl, use_fabric
        # With the default limit: the caller's is set inside the joint step, so that peers learn if it is wrong.
        control = Control(group, comm, env.TIMEOUT_SECS.default)
        self._process_group = group
        self.group = group
        if group is None and not control.generation:
            self.group = comm  # as DeepEP has it
        self.generation = control.generation
        self.rank = control.rank
        self.group_size = control.num_ranks
        self._ranks = group_ranks(group)
        self.low_latency_mode = low_latency_mode
        self.explicitly_destroy = explicitly_destroy
        self.enable_shrink = enable_shrink
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._last_rows: tuple[int, torch.dtype] | None = None
        self._channels: dict[int, int] = {}  # of handles, by the SMs that configs are made with
        # All of it on all ranks, or none of it on any: what is made here is undone where any rank fails.
        with control.joint("making the buffer"):
            self._limit_secs = checks.check_secs("Buffer", "num_cpu_timeout_secs", num_cpu_timeout_secs)
            control.set_limit(self._limit_secs)
            env.warn_of_unknown()
            self.num_nvl_bytes = checks.check_bytes("Buffer", "num_nvl_bytes", num_nvl_bytes)
            self.num_rdma_bytes = checks.check_bytes("Buffer", "num_rdma_bytes", num_rdma_bytes)
            checks.check_int("Buffer", "num_qps_per_rank", num_qps_per_rank, 0)
            self._gpu_limit_secs = checks.check_secs("Buffer", "num_gpu_timeout_secs", num_gpu_timeout_secs)
            self.device = find_device(device)
            self._compares_ids = self.device.type == "cpu"  # with the counts of experts; kernels do not
            self._trace_folder = trace
            made = self._make(control)
            self.number = registry.register(self)
            self._install(made)
            # If a rank fails, the step undoes what was made: the reaper has nothing to close.
            control.undo(self._finalizer.detach)

    def _make(self, control: Control) -> Generated:
        """Make what a generation of the buffer consists of. All ranks call it together, in a joint step."""
        topology = find_topology(control, forced_ranks_per_node(self.device))
        self._require_same_terms(control)
        trace = open_trace(self._trace_folder, control)
        engine, transport = self._make_engine(control, topology)
        if trace is not None:
            trace.describe(transport=transport, device=str(self.device))
            engine.start_trace(trace)
        return Generated(control.generation, topology, engine, transport, trace)

    def _install(self, made: Generated) -> None:
        """Use a generation from now on."""
        self.generation, self._topology, self._engine, self.transport, self._trace = made
        self._num_nodes = self._topology.num_nodes
        # What was learnt of earlier calls holds launches that are bound to the memory of their generation.
        self._known_dispatches, self._known_combines = {}, {}
        self._known_layout = self._known_ids = self._known_head = None
        self.runtime: Runtime | None = Runtime(self._topology, self.device)
        if self._num_nodes > 1 or self.low_latency_mode:
            self.nvshmem_qp_depth = env.QP_DEPTH.get()
        if self._watch is not None:
            self._watch = self._watch.anew()
            self._engine.start_watch(self._watch)
        self._engine.window.fault = self._fault_hook
        missed = f"Buffer (rank {self.rank}/{self.group_size})" if self.explicitly_destroy else None
        self._finalizer = Closing(self, functools.partial(_release, self._engine, self._trace, missed))

    def _make_engine(self, control: Control, topology: Topology) -> tuple[Engine, str]:
        sizes = WindowSizes(
            arena_bytes=self.num_nvl_bytes,
            arena_limit_bytes=env.ARENA_BYTES.get(),
            # Twice what `get_local_buffer_tensor` shows: its length does not shrink with its offset.
            scratch_bytes=max(2 * (self.num_nvl_bytes + self.num_rdma_bytes), _LEAST_SCRATCH_BYTES),
            low_latency_bytes=self.num_rdma_bytes if self.low_latency_mode else 0,
            remote_bytes=self.num_rdma_bytes,
        )
        group = None if control.generation else self._process_group  # of a generation the group may have dead members
        limit_secs, shrinks = self._gpu_limit_secs, self.enable_shrink
        return make_engine(control, group, self.device, sizes, limit_secs, topology, shrinks)

    def __deepcopy__(self, memo: dict[int, Any]) -> Buffer:
        """The same buffer: a copy of a model, such as one of averaged weights, shares it with the model."""
        return self

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Called by `pickle` and `torch.save`, with the model that has the buffer."""
        raise TypeError(
            f"Buffer: a buffer cannot be pickled, it is memory of running processes (rank {self.rank}/"
            f"{self.group_size}). To save a model that has one, save its `state_dict()`"
        )

    def __repr__(self) -> str:
        return f"Buffer(rank {self.rank}/{self.group_size}, {self.device}, transport {self.transport})"

    # Static ----------------------------------------------------------------------------------------------------------

    @staticmethod
    def set_num_sms(new_num_sms: int) -> None:
        """Set the number of SMs that configs are made with. It must be even."""
        where, name = "Buffer.set_num_sms", "new_num_sms"
        is_odd = checks.check_int(where, name, new_num_sms) % 2
        assert not is_odd, f"{where}: `{name}` must be even, got {new_num_sms}"
        Buffer.num_sms = checks.check_int(where, name, new_num_sms, 0)
        Buffer._is_bounded = True

    @staticmethod
    def _bound(config: Config | None) -> int | None:
        """Return the most blocks of a call, from the config or `set_num_sms`; None: neither was given."""
        if config is not None:
            return config.num_sms
        return Buffer.num_sms if Buffer._is_bounded else None

    @staticmethod
    def is_sm90_compiled() -> bool:
        """Whether FP8 payloads are supported. They always are."""
        return True

    @staticmethod
    def capture() -> EventOverlap:
        """An event that marks everything the caller has issued so far."""
        return EventOverlap(EventHandle())

    @staticmethod
    def get_low_latency_rdma_size_hint(
        num_max_dispatch_tokens_per_rank: int, hidden: int, num_ranks: int, num_experts: int
    ) -> int:
        """Bytes that low-latency calls of this size need."""
        sizes = {
            "num_max_dispatch_tokens_per_rank": num_max_dispatch_tokens_per_rank,
            "hidden": hidden,
            "num_ranks": num_ranks,
            "num_experts": num_experts,
        }
        for name, size in sizes.items():
            checks.check_int("get_low_latency_rdma_size_hint", name, size, 0)
        return low_latency_buffer_bytes(num_max_dispatch_tokens_per_rank, hidden, num_ranks, num_experts)

    @staticmethod
    def get_dispatch_config(num_ranks: int) -> Config:
        """The default config of dispatch for a group size."""
        return dispatch_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def get_combine_config(num_ranks: int) -> Config:
        """The default config of combine for a group size."""
        return combine_config(num_ranks, Buffer.num_sms)

    @staticmethod
    def _unpack_bias(bias: Any) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """A bias argument as two biases, either of which may be None."""
        if isinstance(bias, torch.Tensor):
            return bias, None
        if isinstance(bias, tuple):
            if len(bias) != 2:
                raise ValueError(f"combine: `bias` must be a tensor or a pair of tensors, got {len(bias)} items")
            return bias
        return None, None

    # Layout ----------------------------------------------------------------------------------------------------------

    def get_dispatch_layout(
        self,
        topk_idx: torch.Tensor,
        num_experts: int,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor, EventOverlap]:
        """Count where this rank's tokens go. Purely local.

        Args:
            topk_idx: [T, K] int32 or int64 expert ids, contiguous; an id outside [0, num_experts) selects nothing.
            num_experts: E, a multiple of the number of ranks.
            previous_event: Wait for it first.
            async_finish: Return an event instead of waiting.
            allocate_on_comm_stream: Needs both of the above; no difference on the CPU.

        Returns:
            `num_tokens_per_rank` [R] int32, `num_tokens_per_rdma_rank` [nodes] int32 (None on one node),
            `num_tokens_per_expert` [E] int32, `is_token_in_rank` [T, R] bool, and the event.
        """
        if is_compiling():
            from .untraced import untraced

            stream = (previous_event, async_finish, allocate_on_comm_stream)
            return untraced(self.get_dispatch_layout, topk_idx, num_experts, *stream)
        where, order = "get_dispatch_layout", _AT_ONCE
        if previous_event is not None or async_finish or allocate_on_comm_stream:
            order = self._order(where, previous_event, async_finish, allocate_on_comm_stream, topk_idx)
        if not usual.is_ids(topk_idx, self.device):
            dtypes, device = checks.IDX_DTYPES, self.device
            topk_idx = checks.check_tensor(where, "topk_idx", topk_idx, ("tokens", "top-k"), dtypes, device=device)
        num_experts = checks.check_num_experts(where, "num_experts", num_experts, self.group_size)
        self._require_open(where)
        num_nodes = self._num_nodes
        with self._lock:
            counts, event = self._engine.layout(topk_idx, num_experts, num_nodes, order)
        per_rank, per_node, per_expert, mask = counts
        if num_nodes == 1:
            self._known_layout = (ref(per_rank), ref(mask), ref(per_expert))
            self._known_ids = ref(topk_idx)
            if self._compares_ids:
                self._known_version = usual.version_of(topk_idx, per_expert)
            return per_rank, None, per_expert, mask, EventOverlap(event)
        return per_rank, per_node, per_expert, mask, EventOverlap(event)

    # Dispatch and combine --------------------------------------------------------------------------------------------

    @call
    def dispatch(
        self,
        x: torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        handle: tuple | None = None,
        num_tokens_per_rank: torch.Tensor | None = None,
        num_tokens_per_rdma_rank: torch.Tensor | None = None,
        is_token_in_rank: torch.Tensor | None = None,
        num_tokens_per_expert: torch.Tensor | None = None,
        topk_idx: torch.Tensor | None = None,
        topk_weights: torch.Tensor | None = None,
        expert_alignment: int = 1,
        num_worst_tokens: int = 0,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[
        torch.Tensor | tuple[torch.Tensor, torch.Tensor],
        torch.Tensor | None,
        torch.Tensor | None,
        list[int] | None,
        tuple | None,
        EventOverlap,
    ]:
        """Send each token to the ranks that own its experts.

        Received rows are ordered by source rank and then by token. They lie in the window: no copy is made of them,
        and their memory is free again when the last view of the tensor, and of the scales that came with it, is gone.
        All other results are ordinary memory.

        Args:
            x: [T, H] any dtype, contiguous; or a tuple of that and scales [T, S] of any dtype and strides.
            handle: Of an earlier dispatch, to send along the same routes; the layout and top-k arguments are then not
                used.
            num_tokens_per_rank: [R] int32, from `get_dispatch_layout`, as the next three.
            num_tokens_per_rdma_rank: [nodes] int32, or None on one node.
            is_token_in_rank: [T, R] bool; what is sent follows it.
            num_tokens_per_expert: [E] int32.
            topk_idx: [T, K] int32 or int64 expert ids, or None: those of the layout, in the same order, since rows go
                where `is_token_in_rank` says. On the CPU the number of selections of each expert is compared.
            topk_weights: [T, K] float32, or None; both or neither.
            expert_alignment: The counts per expert are rounded up to a multiple of it, which is below 2**31.
            num_worst_tokens: Make room for this many rows, below 2**31, and do not wait for the counts; needs top-k.
            config: Across nodes, how many tokens a message holds and how many messages are queued; without one the
                buffer chooses. Inside a node the CPU needs no tuning.
            previous_event: Wait for it first.
            async_finish: Return an event instead of waiting for the rows.
            allocate_on_comm_stream: Needs both of the above; no difference on the CPU.

        Returns:
            `recv_x` [n, H] (or a tuple with scales [n, S]), `recv_topk_idx` [n, K] (local ids, -1 elsewhere),
            `recv_topk_weights` [n, K] (0 elsewhere), the aligned counts per local expert (empty with
            `num_worst_tokens`), the handle, the event. With a handle: only `recv_x` and the event, None between.
        """
        where, order = "dispatch", _AT_ONCE
        if previous_event is not None or async_finish or allocate_on_comm_stream:
            layout = (num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert)
            stream = (previous_event, async_finish, allocate_on_comm_stream)
            order = self._order(where, *stream, x, handle, layout, topk_idx, topk_weights)
        given = checks.check_config(where, config) if config is not None else None
        num_sms = Buffer._bound(given)
        payload = usual.payload(x, self.device) or checks.check_payload(where, x, self.device)
        assert handle is None or (topk_idx is None and topk_weights is None), (
            "dispatch: `handle` and top-k arguments exclude each other: a cached dispatch moves only x"
        )
        engine = self._require_engine(where)
        if self._num_nodes > 1:
            engine.tune(given)
        num_tokens = payload.x.shape[0]
        if handle is not None:
            parsed = self._parse(handle, where)
            if parsed.num_tokens != num_tokens:
                raise ValueError(f"{where}: `x` must have the handle's {parsed.num_tokens} tokens, it has {num_tokens}")
            received, event = engine.cached_dispatch(payload, parsed, order, num_sms)
            recv_x = received.x if received.scales is None else (received.x, received.scales)
            return recv_x, None, None, None, None, EventOverlap(event)
        routing = self._routing(
            where, num_tokens, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert,
            topk_idx, topk_weights,
        )  # fmt: skip
        most, num_channels = checks.MOST_ROWS, self._num_channels(given)
        if expert_alignment != 1 or type(expert_alignment) is not int:
            expert_alignment = checks.check_int(where, "expert_alignment", expert_alignment, 1, most)
        if num_worst_tokens != 0 or type(num_worst_tokens) is not int:
            num_worst_tokens = checks.check_int(where, "num_worst_tokens", num_worst_tokens, 0, most)
        expert_list: list[int] = []
        if num_worst_tokens:
            if topk_idx is None:
                raise ValueError(f"{where}: `num_worst_tokens` needs `topk_idx` and `topk_weights`")
            received, event = engine.worst_case_dispatch(
                payload, routing, num_worst_tokens, num_channels, order, num_sms
            )
        else:
            received, expert_list, event = engine.dispatch(payload, routing, num_channels, order, num_sms)
            if expert_alignment > 1:
                expert_list = [-(-count // expert_alignment) * expert_alignment for count in expert_list]
        self._last_rows = (payload.x.shape[1], payload.x.dtype)
        if self._num_nodes == 1:
            self._known_head = ref(received.handle.send_head)
        received.handle[_MARKED[self._num_nodes > 1]]._deep_ep_ranks = self._ranks  # see `require_same_ranks`
        return (
            received.x if received.scales is None else (received.x, received.scales),
            received.topk_idx,
            received.topk_weights,
            expert_list,
            received.handle,
            EventOverlap(event),
        )

    def _routing(
        self,
        where: str,
        num_tokens: int,
        per_rank: Any,
        per_node: Any,
        mask: Any,
        per_expert: Any,
        topk_idx: Any,
        topk_weights: Any,
    ) -> Routing:
        """Check where the tokens of a dispatch go. Arguments that are as usual are only recognised."""
        known, known_ids, num_nodes = self._known_layout, self._known_ids, self._num_nodes
        routing = None
        if num_nodes == 1:
            routing = usual.routing(
                num_tokens, self.group_size, self.device, per_rank, mask, per_expert, topk_idx, topk_weights, known,
                known_ids,
            )  # fmt: skip
        if routing is None:
            routing = checks.check_routing(
                where, num_tokens, self.group_size, per_rank, mask, per_expert, topk_idx, topk_weights, self.device,
                num_nodes, per_node,
            )  # fmt: skip
            is_known = usual.is_known_layout(known, per_rank, mask, per_expert)
            routing.has_known_ids = is_known and known_ids is not None and known_ids() is topk_idx is not None
        if self._compares_ids and routing.has_known_ids:  # they may have been written to since
            version = usual.version_of(topk_idx, per_expert)
            routing.has_known_ids = version is not None and version == self._known_version
        return routing

    @call
    def combine(
        self,
        x: torch.Tensor,
        handle: tuple,
        topk_weights: torch.Tensor | None = None,
        bias: torch.Tensor | tuple[torch.Tensor | None, torch.Tensor | None] | None = None,
        config: Config | None = None,
        previous_event: EventOverlap | EventHandle | None = None,
        async_finish: bool = False,
        allocate_on_comm_stream: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None, EventOverlap]:
        """Bring the experts' rows back and sum them per token, unweighted.

        Fastest where `x` lies in the window: rows received by dispatch and changed in place, or `get_combine_buffer`.
        Other input is copied into the window first.

        Sums are taken in FP32 (FP64 in FP64): biases, then rows by rank ascending, and rounded once to x's dtype.
        Across nodes the rows of each node are summed and rounded to x's dtype on their way, then added to the biases,
        nodes ascending, and rounded again. So results of one node and of several may differ in the last bit; and where
        the rows of one node alone exceed x's dtype (65504 in FP16) the result is infinite or NaN across nodes, although
        a bias, or another node's rows, would have brought it back into range. A sum of zeros is 0.0; with a bias it is
        -0.0 if all that is added is -0.0, and a token that was sent nowhere gets its bias, to the bit. Where a
        NaN is added the result is NaN; its bits are not defined.

        Args:
            x: [n, H] BF16, FP16, FP32 or FP64, contiguous: row i belongs to row i of the dispatch.
            handle: Of the dispatch.
            topk_weights: [n, K] float32 to sum in the same way, contiguous, or None.
            bias: One or two [T, H] tensors of x's dtype, contiguous, added first.
            config: Across nodes, how many tokens a message holds and how many messages are queued; without one the
                buffer chooses. Inside a node the CPU needs no tuning.
            previous_event: Wait for it first.
            async_finish: Return an event instead of waiting. `x` must stay as it is until then.
            allocate_on_comm_stream: Needs both of the above; no difference on the CPU.

        Returns:
            `combined_x` [T, H], `combined_topk_weights` [T, K] float32 or None, the event. Ordinary memory.
        """
        where, order = "combine", _AT_ONCE
        if previous_event is not None or async_finish or allocate_on_comm_stream:
            stream = (previous_event, async_finish, allocate_on_comm_stream)
            order = self._order(where, *stream, x, handle, topk_weights, bias)
        given = checks.check_config(where, config) if config is not None else None
        num_sms = Buffer._bound(given)
        engine = self._require_engine(where)
        if self._num_nodes > 1:
            engine.tune(given)
        parsed = self._parse(handle, where)
        shape, device = (parsed.num_rows, "columns"), self.device
        if (
            not usual.is_matrix(x, device)
            or x.shape[0] != shape[0]
            or x.dtype not in checks.COMBINE_DTYPES
            or (not x.is_contiguous())
        ):
            x = checks.check_tensor(where, "x", x, shape, checks.COMBINE_DTYPES, device=device)
        if x.requires_grad:
            checks.warn_of_lost_gradients(where, x)
        if topk_weights is not None:
            dtypes = (torch.float32,)
            topk_weights = checks.check_tensor(where, "topk_weights", topk_weights, shape, dtypes, device=device)
        biases = checks.check_biases(where, bias, x, parsed.num_tokens) if bias is not None else []
        combined, event = engine.combine(x, parsed, topk_weights, biases, order, num_sms)
        return combined.x, combined.topk_weights, EventOverlap(event)

    internode_dispatch = across_nodes(dispatch)
    internode_combine = across_nodes(combine)

    # Memory, streams, statistics -------------------------------------------------------------------------------------

    def get_combine_buffer(
        self, handle: tuple, hidden: int | None = None, dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """Window memory for the experts to write into, so that combine need not copy.

        Args:
            handle: Of the dispatch whose rows will be combined.
            hidden: H; default that of the last dispatch.
            dtype: Default that of the last dispatch, BF16 if that cannot be combined (FP8).

        Returns:
            [n, H], uninitialised. Ordinary memory where the arena has no room; combine then copies.
        """
        where = "get_combine_buffer"
        with self._lock:
            engine = self._require_engine(where)
            parsed = self._parse(handle, where)
            hidden, dtype = checks.check_combine_rows(where, hidden, dtype, self._last_rows)
            return engine.allocate((parsed.num_rows, hidden), dtype)

    def get_local_buffer_tensor(
        self,
        dtype: torch.dtype,
        size: torch.Size | None = None,
        offset: int = 0,
        use_rdma_buffer: bool = False,
    ) -> torch.Tensor:
        """A view of the raw buffer, which is free for the caller between calls. It holds no result and no signal.

        All views show the same memory. On the CPU it is taken only for what a view shows; on a GPU the first view takes
        all of it.

        Args:
            dtype: Of the view.
            size: Its shape; default: one dimension, as many elements as the whole buffer has.
            offset: In bytes. Without `size` the view has as many elements as the whole buffer, whatever the offset.
            use_rdma_buffer: The buffer across nodes instead of the one inside a node.
        """
        where = "get_local_buffer_tensor"
        if not isinstance(dtype, torch.dtype):
            raise TypeError(f"{where}: `dtype` must be a torch.dtype, got {type(dtype).__name__}")
        with self._lock:
            engine = self._require_engine(where)
            num_bytes = self.num_rdma_bytes if use_rdma_buffer else self.num_nvl_bytes
            offset = checks.check_int(where, "offset", offset, 0)
            if offset > num_bytes or offset % dtype.itemsize:
                raise ValueError(
                    f"{where}: `offset` must be a multiple of {dtype.itemsize} within {num_bytes} bytes, got {offset}"
                )
            most = num_bytes // dtype.itemsize
            shape = (most,) if size is None else tuple(checks.check_shape(where, "size", size))
            if math.prod(shape) > most:
                raise ValueError(f"{where}: `size` {list(shape)} does not fit into the buffer's {most} elements")
            # Twice: see the scratch in `_make_engine`.
            start = offset + (2 * self.num_nvl_bytes if use_rdma_buffer else 0)
            return engine.local_bytes(start, math.prod(shape) * dtype.itemsize).view(dtype).view(shape)

    def get_comm_stream(self) -> torch.cuda.Stream | CommStream:
        """The stream that communication runs on: on the CPU a thread, with `synchronize`, `wait_event` and the like."""
        self._require_open("get_comm_stream")
        stream = self._engine.stream  # also that of a buffer that has failed
        return stream if isinstance(stream, CommStream) else stream.raw

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Say that another stream works with a tensor of the window, as `Tensor.record_stream` does for ordinary ones.

        Torch ignores `recv_x.record_stream(stream)` silently: its allocator does not own window memory. Tell the
        buffer instead, and the memory is not given to a later call before that stream is done with it. The stream
        that was current when a call returned the tensor is known already.

        Args:
            tensor: From `dispatch` or `get_combine_buffer`, or a view of one.
            stream: A stream other than that of the call.
        """
        with self._lock:
            self._require_engine("record_stream").record_stream(tensor, stream)

    def check(self) -> None:
        """Wait for everything that was launched, and raise what has gone wrong. On a GPU errors come late otherwise."""
        with self._lock:
            self._require_engine("check").synchronize()

    def set_fault_hook(self, hook: Callable[[str], None] | None) -> None:
        """Have a function called at the steps of every call, to test how a program copes with failures.

        The function may sleep, raise, or end the process. On the CPU it runs on the thread that communicates, before
        and after each signal to the peers; on a GPU on the caller's, before each launch.

        Args:
            hook: Called with the operation and the step, as in `dispatch: before offered`; None: no function any more.
        """
        if hook is not None and not callable(hook):
            raise TypeError(f"set_fault_hook: `hook` must be a function or None, got {type(hook).__name__}")
        self._require_engine("set_fault_hook").window.fault = self._fault_hook = hook

    def release_graphs(self) -> None:
        """Let go of the window memory that captured CUDA graphs use. They must not be replayed any more."""
        with self._lock:
            self._require_engine("release_graphs").release_graphs()

    def trim(self) -> int:
        """Give unused memory back to the system. Returns the bytes given back."""
        with self._lock:
            return self._require_engine("trim").trim()

    def stats(self) -> dict[str, Any]:
        """What this buffer has done so far.

        Returns:
            `calls`: how many calls took which path (`dispatch/direct`, `dispatch/posted`, `dispatch/staged`, of an
            `ElasticBuffer` also `dispatch/expanded`: rows were put straight into an expanded result;
            `combine/pulled`, `combine/posted`, `combine/copied_in`, `combine/staged`); `rounds`: how many rounds they
            took (one a call, unless some rank was staged); `bytes_to` and `bytes_from`: bytes of rows, by peer,
            on the CPU also those of low-latency calls, a row for each expert of a token;
            `wait_secs`: time waited, by peer; `arena`: bytes `used`, `committed` and `reserved`. Across nodes also
            `rail`: messages and bytes sent and received between nodes, with everything that is added to rows; a token
            that is forwarded inside a node counts there as a row of the rank that forwarded it. In low-latency mode
            also `mesh`: the same of the links that low-latency calls use. On the CPU also `low_latency`: how many
            low-latency calls of which kind. `replace` begins anew.
        """
        return self._require_engine("stats").stats()

    def destroy(self) -> None:
        """Let the queued communication finish and close the buffer. Local: no other rank is waited for.

        Received tensors stay valid. A second call does nothing. A buffer that was not destroyed is closed in the same
        way when its last reference is gone, by a background thread, and at the latest when the process ends.
        """
        assert self.explicitly_destroy, (
            "Buffer.destroy: make the buffer with explicitly_destroy=True, or use it in a `with` block"
        )
        self._close()

    def __enter__(self) -> Buffer:
        self._require_open("Buffer")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._refusal is not None:
            return  # a forked child, which is not the rank
        if error is None or is_normal_end(error):
            self._close()
        else:
            self._leave(error)

    # Inside ----------------------------------------------------------------------------------------------------------

    def _watch_waits(self, num_waits: int, interval_secs: float) -> None:
        """Begin, or with 0 waits end, what `metrics.watch` is for."""
        watch = Watch(self.rank, self.group_size, num_waits, interval_secs) if num_waits else None
        with self._lock:
            self._require_engine("metrics.watch").start_watch(watch)
            self._watch = watch

    def _close(self) -> None:
        """Close the buffer, once what is queued has finished."""
        with self._lock:
            if self.runtime is None:
                return
            try:
                self.runtime = None
                self._engine.stop()
                if self._trace is not None:
                    self._trace.close(self._engine.stats())
            except BaseException:  # Ctrl-C, while what is queued finishes: the rest is done without the caller
                self._finalizer.close_soon()
                raise
            self._finalizer.detach()

    def _leave(self, error: BaseException) -> None:
        """Close without waiting, because of an error that is being raised to the caller: nothing here may hide it.

        The error is reported to the peers, so that they raise at once and name this rank. If ranks may be masked it is
        not: they go on without this one. No lock is taken: another thread may hold it, inside of a call that waits.
        """
        if self.runtime is None:
            return
        self.runtime = None
        with contextlib.suppress(Exception):  # a device that has failed accepts no launches
            if not self.enable_shrink:
                self._engine.abandon(f"left its `with` block by {account(error)}")
        self._finalizer.close_soon()

    def refuse_in_child(self) -> None:
        """In a forked child: have every method raise from now on. The rank is the process that made the buffer."""
        if self.runtime is None:  # it was destroyed before, or by an earlier fork
            self._lock = self._lock if self._refusal is not None else threading.RLock()
            return
        self._refusal = (
            f"only the process that made it can use a buffer, and process {os.getpid()} is a fork of that process "
            f"({self._pid}, rank {self.rank}/{self.group_size}). Make buffers after the fork, or start processes with "
            "'spawn' or 'forkserver'"
        )
        self._lock = registry.ForkedLock(self._refusal)
        self.runtime = None
        if isinstance(self._engine.stream, CommStream):
            self._engine.stream.refuse(self._refusal)
        if self.device.type == "cuda":
            _inherited.append(self._engine)

    def _require_open(self, where: str) -> None:
        if self._refusal is not None:
            raise EPClosed(f"{where}: {self._refusal}")
        if self.runtime is None:
            raise EPClosed(f"{where}: the buffer was destroyed (rank {self.rank}/{self.group_size}). Make a new one")

    @staticmethod
    def _order(where: str, previous_event: Any, async_finish: bool, *arguments: Any) -> CallOrder:
        """How a call stands to the caller's stream, see `checks.check_event`."""
        return CallOrder(checks.check_event(where, previous_event, async_finish, *arguments), async_finish)

    def _num_channels(self, config: Config | None) -> int:
        """Return C of the handle that a dispatch makes."""
        if config is not None:
            return config.num_channels
        num_channels = self._channels.get(Buffer.num_sms)
        if num_channels is None:
            num_channels = Buffer.get_dispatch_config(self.group_size).num_channels
            self._channels[Buffer.num_sms] = num_channels
        return num_channels

    def _parse(self, handle: Any, where: str) -> Any:
        parsed, num_nodes, known = None, self._num_nodes, self._known_head
        # Item 5 is `send_head`, as in `_MARKED`.
        if known is not None and type(handle) is Handle and known() is handle[5]:
            return handle  # the last one that this buffer has made
        if num_nodes == 1:
            parsed = usual.handle(handle, self.group_size, self.device)
        if parsed is None:
            parsed = parse_handle(handle, self.group_size, self.device, where, num_nodes)
        require_same_ranks(where, handle[_MARKED[num_nodes > 1]], self._ranks)
        return parsed

    def _require_nodes(self, where: str) -> None:
        if self._topology.num_nodes == 1:
            raise EPUnsupported(f"{where}: the group is on one node. Call `{where.removeprefix('internode_')}`")

    def _require_engine(self, where: str) -> Engine:
        if self.runtime is None:
            self._require_open(where)
        self._engine.require_working()
        return self._engine


def _release(engine: Engine, trace: Trace | None, missed: str | None, is_quiet: bool) -> None:
    """Close a buffer that was never destroyed. Runs on the reaper's thread.

    Args:
        engine: The engine of the buffer.
        trace: The trace of the buffer.
        missed: The name of a buffer whose `destroy()` should have been called; None: it need not have been.
        is_quiet: The buffer went with an exception. That is the error to be seen, as is the failure of a call.
    """
    engine.forget()
    if trace is not None:
        trace.close(engine.stats())
    # Last: where warnings are errors, this raises.
    if missed is not None and not is_quiet and not engine.has_failed():
        warnings.warn(f"{missed}: explicitly_destroy=True, but destroy() was not called", RuntimeWarning, stacklevel=1)
