"""Low-latency calls on a GPU: a send phase and a receive phase of kernels in a stream (`docs/low-latency.md`).

A call is `send` (one kernel, whose last block signals and, where there is no hook, waits), `wait_for` (one warp, behind
a hook) and `receive` (one kernel). The host launches and does not wait, and the set of a call is chosen on the device,
so everything can be captured in a graph.

Across nodes a call is `send` without a wait, two kernels that copy it to the remote ranks' copies of this rank's memory
(`copies.py`), `wait_for`, `receive`, and one that sends a failure to remote ranks. A hook comes after the copies.
"""

from __future__ import annotations

import ctypes
import logging
from typing import Any, NamedTuple

import torch

from ....errors import EPUnsupported
from ....kernels._triton import Launch
from ....kernels.exchange import WARP_LANES
from ....kernels.low_latency import combine, dispatch, words
from ....kernels.low_latency.words import KernelCall, LowLatencyContext, WaitOptions
from ....log import log_event, warn
from ....stream import LaunchStream
from ....transport import MAX_EXPERTS
from ....transport.device import DeviceMemory, DeviceWindow
from ....transport.spans import whole_units
from ...cuda.digest import pack
from ...cuda.scope import CudaScope
from ...cuda.signals import Signals
from ...ops import CallOrder
from ...protocol import OPERATIONS, Agreement
from ..calls import (
    BARRIER,
    COMBINE,
    DISPATCH,
    CallMode,
    CombineInputs,
    CombineKind,
    DispatchKind,
    JoinResult,
    Packed,
    agreement_of,
)
from ..engine import LowLatencyEngine, LowLatencyPhases
from ..geometry import Geometry, RowFormat, SetPlan, bytes_for_two, plan_combine, plan_dispatch
from ..slots import ALL_SLOTS, FREE_SLOT, NO_SLOT
from .copies import Copier, Copies, RemoteRanks


class _Setup(NamedTuple):
    """What follows from the sizes of a call.

    Attributes:
        call: The call, for its kernels.
        sizes: The sizes of its rows, for its kernels.
        wide_bytes: Of a dispatch that takes a slot: the `num_rdma_bytes` with which it would take none.
        results: What a dispatch returns, as `Packed` has it, but without memory.
    """

    call: KernelCall
    sizes: Any
    wide_bytes: int = 0
    results: tuple[torch.Tensor, ...] = ()


class Kernels(NamedTuple):
    """The kernels of a call, for arguments of one kind. They are looked up once, since calls repeat.

    Attributes:
        operation: The call.
        setup: What follows from the sizes.
        takes: What it takes of the slots.
        send: Publishes and signals. Without a hook and remote ranks its last block waits for the peers.
        wait: Waits for the peers after a hook, or after the copies; None: `send` has waited.
        receive: Fetches.
        num_send_blocks: Of `send`, but for the tokens of a dispatch.
        num_receive_blocks: Of `receive`; of a combine: for each token.
        copier: Copies what was sent to remote ranks, if there are any.
        is_async: The caller's stream does not wait for it.
        scratch: [M * K] int32, for what a combine's send phase leaves for its receive phase if no other call comes
            between them; None: each call has its own.
    """

    operation: str
    setup: _Setup
    takes: int
    send: Launch
    wait: Launch | None
    receive: Launch
    num_send_blocks: int
    num_receive_blocks: int
    copier: Copier | None
    is_async: bool
    scratch: torch.Tensor | None = None


_REASONS = {
    words.SILENT: "was silent past the limit",
    words.GONE_ON: "goes on without this rank, which is out of step or masked there",
    words.TOLD: "was silent past the limit of another rank",
    words.HAS_REFUSED: "refused this call, as its output says",
}
_Tensors = tuple[torch.Tensor, ...]


class _KernelPhases:
    """The phases of a call that moves rows, see `LowLatencyPhases`.

    Args:
        engine: The calls of the buffer.
        kernels: The kernels of the call.
        num_tokens: T.
        slot: What `send` is told of the slots: those that it may not take, as bits; of a zero-copy combine its slot.
        sent: The grid of the send, and its tensors. The last one is what the nanoseconds waited are added to, or any.
        received: The grid of the receive, and its tensors.
        copied: What the copier is launched with, if there is one.
        is_zero_copy: The rows lie in the slot already.
    """

    number = age = 0

    def __init__(
        self,
        engine: CudaLowLatency,
        kernels: Kernels,
        num_tokens: int,
        slot: int,
        sent: tuple[int, _Tensors],
        received: tuple[int, _Tensors],
        copied: torch.Tensor,
        is_zero_copy: bool = False,
    ):
        self._engine = engine
        self._kernels = kernels
        self.operation = kernels.operation
        self.takes = kernels.takes
        self.wide_bytes = kernels.setup.wide_bytes
        self._num_tokens = num_tokens
        self._slot = slot
        self._sent = sent
        self._received = received
        self._copied = copied
        self._is_zero_copy = is_zero_copy
        self.caller = engine.caller()

    def take_slot(self, slot: int, last_call: int) -> None:
        """Take a slot. A kernel that takes a free one chooses it by the same rule as the host (`words.free_slot`)."""
        if self.takes == FREE_SLOT:
            return
        # If rows are copied into a handle's own slot, that is the only one that is left to the kernel.
        self._slot = slot if self._is_zero_copy else ALL_SLOTS & ~(1 << slot)

    def send(self) -> None:
        """Launch the send, and the copies to remote ranks."""
        engine, kernels, (num_blocks, tensors) = self._engine, self._kernels, self._sent
        if kernels.is_async:
            engine.hold((*tensors, *self._received[1]))
        marks = engine.signals.marks
        if marks is not None:
            marks.step("send")
        kernels.send(num_blocks, tensors, (self._num_tokens, self._slot))
        if kernels.copier is not None:
            if marks is not None:
                marks.step("copy")
            kernels.copier.launch(self._copied)

    def receive(self) -> None:
        """Launch the wait, if the send has not waited, and the receive."""
        engine, kernels, (num_blocks, tensors), age = self._engine, self._kernels, self._received, (self.age,)
        marks = engine.signals.marks
        if kernels.wait is not None:
            if marks is not None:
                marks.step("wait")
            kernels.wait(1, self._sent[1][-1:], age)
        if marks is not None:
            marks.step("receive")
        kernels.receive(num_blocks, tensors, age)
        if kernels.copier is not None:
            engine.tell_failure()


class _BarrierPhases:
    """The phases of a call without rows, see `LowLatencyPhases`.

    Args:
        engine: The calls of the buffer.
        call: The kernel of the call.
        copier: Copies the signal to remote ranks, if there are any.
        options: How it waits.
    """

    operation, takes, wide_bytes = BARRIER, NO_SLOT, 0
    number = age = 0

    def __init__(self, engine: CudaLowLatency, call: KernelCall, copier: Copier | None, options: WaitOptions):
        self._engine = engine
        self._call = call
        self._copier = copier
        self._options = options

    def take_slot(self, slot: int, last_call: int) -> None:
        """Take no slot."""

    def send(self) -> None:
        """Launch the signal."""
        words.signal(self._engine.context, self._call)
        if self._copier is not None:
            self._copier.launch(self._engine.context.state)

    def receive(self) -> None:
        """Launch the wait."""
        words.wait_for(self._engine.context, self._call, 0, self._options)
        self._engine.tell_failure()


class CudaLowLatency(LowLatencyEngine):
    """The low-latency calls of a buffer on a GPU, by kernels.

    Args:
        signals: The signals of the buffer: limits and failures.
        window: The window of the buffer.
        stream: Where kernels are launched.
        num_bytes: Bytes of the low-latency memory, the same on all ranks.
        enable_shrink: Mask ranks that stay silent, instead of failing.
        remote: Ranks of other nodes whose memory cannot be addressed; None: there are none.
        memory: Where low-latency memory comes from, if ranks of other nodes can address it, too; None: from the window,
            which is that of one node.
    """

    def __init__(
        self,
        signals: Signals,
        window: DeviceWindow,
        stream: LaunchStream,
        num_bytes: int,
        enable_shrink: bool,
        remote: RemoteRanks | None = None,
        memory: DeviceMemory | None = None,
    ):
        num_ranks, device = window.num_ranks, window.device
        if num_ranks > words.MOST_RANKS:
            raise EPUnsupported(
                f"low latency: at most {words.MOST_RANKS} ranks on GPUs, there are {num_ranks}. Use normal mode"
            )
        super().__init__(stream)
        self.signals = signals
        self._arena = window.arena
        self._num_bytes = num_bytes
        self._device = device
        self._can_mask = enable_shrink
        self._has_copies = remote is not None
        self._board_bytes = LowLatencyContext.board_bytes(num_ranks, MAX_EXPERTS)
        self._copies = Copies(remote, self._board_bytes, num_bytes, MAX_EXPERTS) if remote is not None else None
        # The call must first be copied to remote ranks, which wait for it as well; and the block of a send has several
        # warps.
        self._can_send_wait = self._copies is None and signals.context.num_ranks <= WARP_LANES
        part_bytes = self._copies.num_bytes if self._copies is not None else self._board_bytes + num_bytes
        self._part = (memory or window.memory).grow(whole_units(part_bytes))
        addresses, base = list(self._part.addresses), self._part.memory.data_ptr()
        if self._copies is not None:
            addresses = self._copies.addresses(base, addresses)
        self._host = torch.zeros(num_ranks + 1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._masked_word = ctypes.c_int64.from_address(self._host.data_ptr() + 8 * num_ranks)
        self._told = 0
        self.context = LowLatencyContext(
            buffer=signals.context,
            windows=torch.tensor(addresses, dtype=torch.int64, device=device),
            state=torch.zeros(LowLatencyContext.num_state_words(num_ranks), dtype=torch.int64, device=device),
            mask=torch.zeros(num_ranks, dtype=torch.int32, device=device),
            seen=torch.zeros(num_ranks, 2, dtype=torch.int64, device=device),
            host=self._host,
            max_experts=MAX_EXPERTS,
        )
        self._state = self.context.state
        self._is_capturing = window.is_capturing
        signals.low_latency_words, signals.low_latency_state = self.context.seen, self.context.state
        self._kernels: dict[tuple, Kernels] = {}
        self.caller = stream.caller
        words.prepare_all(self.context)
        if self._copies is not None:
            self._copies.start(self.context, base)

    # Calls -----------------------------------------------------------------------------------------------------------

    @property
    def _can_join(self) -> bool:
        return self._can_mask and not self._has_copies

    def _require_working(self) -> None:
        self.signals.require_working()
        if self._masked_word.value != self._told:
            self._warn_of_masks()

    def _settle_call(self, error: BaseException | None = None) -> None:
        self.signals.settle(error)

    def _scope(self, operation: str, phase: str, order: CallOrder) -> CudaScope:
        return CudaScope(operation, order, self.signals, self._stream, self._arena, phase)

    def _new_dispatch(
        self,
        kind: DispatchKind,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[Packed, _KernelPhases]:
        is_aligned = x.data_ptr() % 16 == 0
        kernels = kind.found.get(is_aligned) or self._kernels_of(kind, is_aligned)
        packed = Packed(*map(torch.empty_like, kernels.setup.results))
        rows, num_rows, src_info, layout_range, scales = packed
        state, num_tokens = self._state, x.shape[0]
        received = (
            rows,
            num_rows if scales is None else scales,
            num_rows,
            src_info,
            layout_range,
            num_rows if recv_stats is None else recv_stats,
        )
        return packed, _KernelPhases(
            self,
            kernels,
            num_tokens,
            self._slots.leased,
            (num_tokens + kernels.num_send_blocks, (x, topk_idx, state if wait_stats is None else wait_stats)),
            (kernels.num_receive_blocks, received),
            state,
        )

    def _new_combine(
        self, kind: CombineKind, rows: CombineInputs, out: torch.Tensor | None, wait_stats: torch.Tensor | None
    ) -> tuple[torch.Tensor, _KernelPhases]:
        x, topk_idx, topk_weights, _, layout_range = rows
        num_tokens = topk_idx.shape[0]
        combined = out if out is not None else x.new_empty(num_tokens, kind.geometry.hidden)
        are_aligned = x.data_ptr() % 16 == 0, combined.data_ptr() % 16 == 0
        kernels = kind.found.get(are_aligned) or self._kernels_of(kind, are_aligned)
        earlier = kernels.scratch
        if earlier is None:
            earlier = torch.empty_like(topk_idx, dtype=torch.int32)
        sent = (x, layout_range, topk_idx, earlier, self._state if wait_stats is None else wait_stats)
        return combined, _KernelPhases(
            self,
            kernels,
            num_tokens,
            self._slots.leased,
            (kernels.num_send_blocks, sent),
            (num_tokens * kernels.num_receive_blocks, (combined, topk_idx, topk_weights, earlier)),
            layout_range,
            kind.zero_copy,
        )

    def _new_barrier(self) -> _BarrierPhases:
        call = _call(BARRIER, SetPlan(16, False), Agreement(BARRIER))
        copier = self._copies.for_barrier(call) if self._copies is not None else None
        return _BarrierPhases(self, call, copier, WaitOptions(can_mask=self._can_mask))

    def _join(self, scope: CudaScope) -> JoinResult:
        """Launch an attempt to get into step. The kernels agree on the number, see `words.join`."""
        scope.launch(lambda: words.join(self.context))
        return JoinResult(self._in_flight.next_number, {})

    def _receive(self, call: LowLatencyPhases) -> None:
        """Launch the receive phase behind the caller's stream of the send phase, wherever the hook is called."""
        caller = call.caller  # type: ignore[attr-defined]
        if self.caller() is caller:
            super()._receive(call)
        else:
            with self._stream.behind(caller):
                super()._receive(call)

    def _plan_combine(self, where: str, geometry: Geometry) -> SetPlan:
        return plan_combine(where, self._num_bytes, geometry, self._has_copies)

    def _settle(self) -> None:
        """Do nothing: calls are launched when they are made."""

    def _slot_memory(self, offset: int, num_bytes: int, last_call: int) -> torch.Tensor:
        del last_call  # kernels do not look whether it is spent
        first = self._board_bytes + offset
        return self._part.memory[first : first + num_bytes]

    # For the phases --------------------------------------------------------------------------------------------------

    def hold(self, tensors: _Tensors) -> None:
        """Keep the memory of tensors until the comm stream is done with what is launched there."""
        self._stream.hold(tensors, self._stream.raw)

    def tell_failure(self) -> None:
        """After a wait and the work that depends on it: have this rank's failure sent to remote ranks, if the wait
        has failed.
        """
        if self._copies is not None:
            self._copies.tell()

    # Masks -----------------------------------------------------------------------------------------------------------

    def update_mask(self, rank: int, is_masked: bool) -> None:
        """Mask a rank for this rank's calls, or unmask it, in the order of the caller's stream."""
        self._warn_of_masks()
        self.context.mask[rank : rank + 1].fill_(int(is_masked))

    def query_mask(self, status: torch.Tensor) -> None:
        """Write the masks into [R] int32, in the order of the caller's stream."""
        torch.ne(self.context.mask, 0, out=status)
        self._warn_of_masks()

    def clean_mask(self) -> None:
        """Unmask all ranks, in the order of the caller's stream."""
        self._warn_of_masks()
        log_event(logging.INFO, f"low latency: all ranks are unmasked (rank {self.context.buffer.rank})")
        self.context.mask.zero_()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _kernels_of(self, kind: DispatchKind | CombineKind, alignment: Any) -> Kernels:
        """Return the kernels of a kind of call, and of every equal kind.

        They are cached in the kind for its next call.
        """
        kernels = self._kernels.get((kind, alignment))
        if kernels is None:
            if isinstance(kind, DispatchKind):
                kernels = self._dispatch_kernels(kind, alignment)
            else:
                kernels = self._combine_kernels(kind, *alignment)
            self._kernels[kind, alignment] = kernels
        kind.found[alignment] = kernels
        return kernels

    def _dispatch_kernels(self, kind: DispatchKind, is_aligned: bool) -> Kernels:
        setup, context = self._dispatch_setup(kind.geometry, kind.form), self.context
        call, sizes, wait_options = setup.call, setup.sizes, self._wait_options(kind)
        waiting = self._waiting(kind.mode, wait_options)
        return Kernels(
            DISPATCH,
            setup,
            FREE_SLOT if call.takes_slot else NO_SLOT,
            dispatch.sender(context, call, sizes, kind.idx_dtype, is_aligned, waiting),
            words.waiter(context, call, wait_options) if waiting is None else None,
            dispatch.receiver(context, call, sizes, kind.form.scale_dtype, kind.has_recv_stats),
            dispatch.num_send_blocks(sizes, 0),
            dispatch.num_receive_blocks(sizes, kind.geometry.num_ranks),
            self._copies.for_dispatch(call, sizes) if self._copies is not None else None,
            kind.mode.is_async,
        )

    def _combine_kernels(self, kind: CombineKind, is_aligned: bool, is_out_aligned: bool) -> Kernels:
        setup, context = self._combine_setup(kind.geometry, kind.use_logfmt), self.context
        call, sizes, wait_options = setup.call, setup.sizes, self._wait_options(kind)
        waiting, is_copied = self._waiting(kind.mode, wait_options), not kind.zero_copy
        receive, num_pieces = combine.receiver(context, sizes, kind.idx_dtype, is_out_aligned, self._can_mask)
        scratch = None
        # Before a hook, other calls may come between the phases. Memory that is allocated in a capture is the graph's.
        if not kind.mode.has_hook and not self._is_capturing():
            size = max(1, sizes.max_tokens * sizes.num_topk)
            scratch = torch.empty(size, dtype=torch.int32, device=self._device)
        return Kernels(
            COMBINE,
            setup,
            FREE_SLOT,
            combine.sender(context, call, sizes, kind.idx_dtype, is_copied, is_aligned, waiting),
            words.waiter(context, call, wait_options) if waiting is None else None,
            receive,
            combine.num_send_blocks(sizes, is_copied),
            num_pieces,
            self._copies.for_combine(call, sizes) if self._copies is not None else None,
            kind.mode.is_async,
            scratch,
        )

    def _wait_options(self, kind: DispatchKind | CombineKind) -> WaitOptions:
        """Return how a call waits."""
        return WaitOptions(self.context.state if kind.has_wait_stats else None, self._can_mask)

    def _waiting(self, mode: CallMode, wait_options: WaitOptions) -> WaitOptions | None:
        """Return how a send waits; None: it does not."""
        return wait_options if self._can_send_wait and not mode.has_hook else None

    def _dispatch_setup(self, geometry: Geometry, form: RowFormat) -> _Setup:
        plan = plan_dispatch("low_latency_dispatch", self._num_bytes, geometry, form, self._has_copies)
        row = (geometry.row_bytes(form), geometry.scales_offset, geometry.expert_slots_offset(form))
        sizes = dispatch.DispatchSizes(*_sizes_of(geometry), *row, form.use_fp8, form.round_scale)
        agreement = agreement_of(DISPATCH, geometry, form.dtype, form.scale_dtype, int(form.round_scale))
        call, results = _call(DISPATCH, plan, agreement), _results(geometry, form, self._device)
        return _Setup(call, sizes, bytes_for_two(geometry, form) if plan.takes_slot else 0, results)

    def _combine_setup(self, geometry: Geometry, use_logfmt: bool) -> _Setup:
        plan = self._plan_combine("low_latency_combine", geometry)
        sizes = combine.CombineSizes(*_sizes_of(geometry), geometry.slot_bytes, geometry.ranges_offset, use_logfmt)
        agreement = agreement_of(COMBINE, geometry, torch.bfloat16, None, int(use_logfmt))
        return _Setup(_call(COMBINE, plan, agreement), sizes)

    def _warn_of_masks(self) -> None:
        """Warn, once for each rank, that a kernel has masked it."""
        newest = self._masked_word.value
        if newest == self._told:
            return
        self._told = newest
        calls, size = self._host[:-1].tolist(), self._host.numel() - 1
        for rank, word in enumerate(calls):
            if word:
                self._host[rank] = 0  # no other: a kernel may be writing one that has not been read yet
                call, reason = word >> words.REASON_BITS, word & ((1 << words.REASON_BITS) - 1)
                text = (
                    f"low latency (call {call}): rank {rank} {_REASONS[reason]}, and is masked from now on "
                    f"(rank {self.context.buffer.rank}/{size}). Its experts' results are missing"
                )
                warn(text, stacklevel=5)


def _results(geometry: Geometry, form: RowFormat, device: torch.device) -> tuple[torch.Tensor, ...]:
    """What a dispatch returns, as `Packed` has it, but without memory.

    `empty_like` of them takes little more than half as long as `empty` with a shape, a type and a device.
    """
    num_local, num_rows = geometry.num_local_experts, geometry.num_rows
    results = [
        torch.empty((num_local, num_rows, geometry.hidden), dtype=form.dtype, device=device),
        torch.empty(num_local, dtype=torch.int32, device=device),
        torch.empty((num_local, num_rows), dtype=torch.int32, device=device),
        torch.empty((num_local, geometry.num_ranks), dtype=torch.int64, device=device),
    ]
    if form.scale_dtype is not None:
        shape = (num_local, geometry.num_scales(form), num_rows)
        results.append(torch.empty(shape, dtype=form.scale_dtype, device=device).transpose(1, 2))
    for result in results:
        result.untyped_storage().resize_(0)
    return tuple(results)


def _sizes_of(geometry: Geometry) -> tuple[int, int, int, int]:
    """Return the sizes that dispatched and combined rows have in common."""
    return geometry.hidden, geometry.num_topk, geometry.num_experts, geometry.max_tokens


def _call(operation: str, plan: SetPlan, agreement: Agreement) -> KernelCall:
    sizes = (plan.region_bytes, plan.set_bytes, OPERATIONS.index(operation))
    return KernelCall(pack(agreement), *sizes, plan.takes_slot, plan.copy_set_bytes)
