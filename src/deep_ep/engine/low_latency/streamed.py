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
import warnings
from typing import Any, NamedTuple

import torch

from ...errors import EPUnsupported
from ...event import EventHandle
from ...kernels._triton import Launch
from ...kernels.low_latency import combine, dispatch, words
from ...kernels.low_latency.words import KernelCall, LowLatencyContext, WaitOptions
from ...kernels.notify import can_share_a_wait
from ...log import log_event
from ...stream import LaunchStream
from ...transport import MAX_EXPERTS
from ...transport.device import DeviceWindow
from ..cuda.digest import pack
from ..cuda.signals import Signals
from ..protocol import OPERATIONS, Agreement
from .calls import (
    BARRIER,
    COMBINE,
    DISPATCH,
    METHODS,
    CallMode,
    CombineInputs,
    Combining,
    Dispatching,
    Hook,
    Packed,
    agreement_of,
)
from .copies import Copier, Copies, RemoteRanks
from .geometry import Geometry, RowFormat, SetPlan, bytes_for_two, plan_combine, plan_dispatch
from .in_flight import InFlight
from .slots import ALL_SLOTS, FREE_SLOT, NO_SLOT, OWN_SLOT, Slots, zero_copy_view


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
        mode: How it stands to the caller's stream.
        setup: What follows from the sizes.
        slot: What it takes of the slots.
        send: Publishes and signals. Without a hook and remote ranks its last block waits for the peers.
        wait: Waits for the peers after a hook, or after the copies.
        receive: Fetches.
        num_send_blocks: Of `send`, but for the tokens of a dispatch.
        num_receive_blocks: Of `receive`; of a combine: for each token.
        copier: Copies what was sent to remote ranks, if there are any.
        is_plain: `send` and `receive` are all there is, and the caller's stream waits for them.
        scratch: [M * K] int32, for what a combine's send phase leaves for its receive phase if no other call comes
            between them; None: each call has its own.
    """

    operation: str
    mode: CallMode
    setup: _Setup
    slot: int
    send: Launch
    wait: Launch
    receive: Launch
    num_send_blocks: int
    num_receive_blocks: int
    copier: Copier | None
    is_plain: bool
    scratch: torch.Tensor | None = None


_REASONS = {
    words.SILENT: "was silent past the limit",
    words.GONE_ON: "goes on without this rank, which is out of step or masked there",
    words.TOLD: "was silent past the limit of another rank",
}
_NO_AGE = (0,)  # of a call that is received before another is sent
_Tensors = tuple[torch.Tensor, ...]
# The arguments of the phases of a call: the grid of the send, its tensors and its numbers, the grid of the receive,
# and its tensors. The last tensor of the send is what the nanoseconds waited are added to, or any tensor.
_Work = tuple[int, _Tensors, tuple[int, ...], int, _Tensors]


class StreamedLowLatency:
    """Low-latency calls of one buffer, by kernels.

    Args:
        signals: The signals of the buffer: limits and failures.
        window: The window of the buffer.
        stream: Where kernels are launched.
        num_bytes: Bytes of the low-latency memory, the same on all ranks.
        enable_shrink: Mask ranks that stay silent, instead of failing.
        remote: Ranks of other nodes; None: there are none.
    """

    def __init__(
        self,
        signals: Signals,
        window: DeviceWindow,
        stream: LaunchStream,
        num_bytes: int,
        enable_shrink: bool,
        remote: RemoteRanks | None = None,
    ):
        num_ranks, device = window.num_ranks, window.device
        if num_ranks > words.MOST_RANKS:
            raise EPUnsupported(
                f"low latency: at most {words.MOST_RANKS} ranks on GPUs, there are {num_ranks}. Use normal mode"
            )
        self._signals = signals
        self._stream = stream
        self._num_bytes = num_bytes
        self._device = device
        self._can_mask = enable_shrink
        self._has_copies = remote is not None
        self._can_join = enable_shrink and remote is None
        self._board_bytes = LowLatencyContext.board_bytes(num_ranks, MAX_EXPERTS)
        self._copies = Copies(remote, self._board_bytes, num_bytes, MAX_EXPERTS) if remote is not None else None
        # The call must first be copied to remote ranks, which wait for it as well; and the block of a send has several
        # warps.
        self._can_send_wait = self._copies is None and can_share_a_wait(signals.context)
        self._part = window.new_part(
            self._copies.num_bytes if self._copies is not None else self._board_bytes + num_bytes
        )
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
        self._setups: dict[tuple, _Setup] = {}
        self._kernels: dict[tuple, Kernels] = {}
        self._slots = Slots()
        self._in_flight = InFlight(self._slots)
        words.prepare_all(self.context)
        if self._copies is not None:
            self._copies.start(self.context, base)

    # Calls -----------------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        kind: Dispatching,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[Packed, EventHandle | None, Hook | None]:
        """Send each token to its experts; see `LowLatencyEngine`."""
        is_aligned = x.data_ptr() % 16 == 0
        kernels = kind.found.get(is_aligned) or self._kernels_of(kind, is_aligned)
        packed = Packed(*map(torch.empty_like, kernels.setup.results))
        rows, num_rows, src_info, layout_range, scales = packed
        state, num_tokens = self._state, x.shape[0]
        work = (
            num_tokens + kernels.num_send_blocks,
            (x, topk_idx, state if wait_stats is None else wait_stats),
            (num_tokens, self._slots.leased),
            kernels.num_receive_blocks,
            (
                rows,
                num_rows if scales is None else scales,
                num_rows,
                src_info,
                layout_range,
                num_rows if recv_stats is None else recv_stats,
            ),
        )
        event, hook = self._make(kernels, work, (state,), kernels.slot)
        return packed, event, hook

    def combine(
        self,
        kind: Combining,
        rows: CombineInputs,
        out: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[torch.Tensor, EventHandle | None, Hook | None]:
        """Bring the experts' rows back; see `LowLatencyEngine`."""
        x, topk_idx, topk_weights, src_info, layout_range = rows
        num_tokens = topk_idx.shape[0]
        combined = out if out is not None else x.new_empty(num_tokens, kind.geometry.hidden)
        are_aligned = x.data_ptr() % 16 == 0, combined.data_ptr() % 16 == 0
        kernels = kind.found.get(are_aligned) or self._kernels_of(kind, are_aligned)
        takes, slot = kernels.slot, self._slots.leased
        if kind.zero_copy or (slot and self._slots.has_lease(src_info)):
            takes = OWN_SLOT
            # Before the tensor is given, or a call that is refused would take it.
            self._in_flight.require_capacity(METHODS[COMBINE], takes)
            slot = self._slots.give_back(src_info, self._in_flight.next_number)
            if not kind.zero_copy:  # the kernel takes the only slot that is left to it
                slot = ALL_SLOTS & ~(1 << slot)
        earlier = kernels.scratch
        if earlier is None:
            earlier = torch.empty_like(topk_idx, dtype=torch.int32)
        work = (
            kernels.num_send_blocks,
            (x, layout_range, topk_idx, earlier, self._state if wait_stats is None else wait_stats),
            (num_tokens, slot),
            num_tokens * kernels.num_receive_blocks,
            (combined, topk_idx, topk_weights, earlier),
        )
        event, hook = self._make(kernels, work, (layout_range,), takes)
        return combined, event, hook

    def clean(self) -> None:
        """Launch a barrier over the ranks that are not masked. The host does not wait.

        If ranks may be masked, they first agree on its number, see `words.join`.
        """
        call = _call(BARRIER, SetPlan(16, False), Agreement(BARRIER))
        with self._signals.propagating_failure(BARRIER), self._stream.entered(None, False):
            self._signals.is_announced = True
            if self._can_join:
                self._in_flight.abandon()
                self._in_flight.go_on_from(self._in_flight.next_number)
                words.join(self.context)
            self._in_flight.receive(self._in_flight.send(METHODS[BARRIER], NO_SLOT))
            words.signal(self.context, call)
            if self._copies is not None:
                self._copies.for_barrier(call).launch(self.context.state)
            words.wait_for(self.context, call, 0, WaitOptions(can_mask=self._can_mask))
            self._tell()
        self._stream.leave(False)

    def combine_buffer(self, src_info: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """Return the zero-copy tensor of a handle."""
        plan = plan_combine("get_next_low_latency_combine_buffer", self._num_bytes, geometry, self._has_copies)
        slot, _ = self._slots.lease(src_info, self._in_flight.num_consumed)
        offset = self._board_bytes + plan.slot_offset(slot)
        return zero_copy_view(self._part.memory[offset : offset + geometry.combine_bytes], geometry)

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

    def _kernels_of(self, kind: Dispatching | Combining, alignment: Any) -> Kernels:
        """Return the kernels of a kind of call, and of every equal kind.

        They are cached in the kind for its next call.
        """
        kernels = self._kernels.get((kind, alignment))
        if kernels is None:
            if isinstance(kind, Dispatching):
                kernels = self._dispatch_kernels(kind, alignment)
            else:
                kernels = self._combine_kernels(kind, *alignment)
            self._kernels[kind, alignment] = kernels
        kind.found[alignment] = kernels
        return kernels

    def _dispatch_kernels(self, kind: Dispatching, is_aligned: bool) -> Kernels:
        setup, context = self._dispatch_setup(kind.geometry, kind.form), self.context
        call, sizes, wait_options = setup.call, setup.sizes, self._wait_options(kind)
        waiting = self._waiting(kind.mode, wait_options)
        return Kernels(
            DISPATCH,
            kind.mode,
            setup,
            FREE_SLOT if call.takes_slot else NO_SLOT,
            dispatch.sender(context, call, sizes, kind.idx_dtype, is_aligned, waiting),
            words.waiter(context, call, wait_options),
            dispatch.receiver(context, call, sizes, kind.form.scale_dtype, kind.has_recv_stats),
            dispatch.num_send_blocks(sizes, 0),
            dispatch.num_receive_blocks(sizes, kind.geometry.num_ranks),
            self._copies.for_dispatch(call, sizes) if self._copies is not None else None,
            self._is_plain(kind.mode),
        )

    def _combine_kernels(self, kind: Combining, is_aligned: bool, is_out_aligned: bool) -> Kernels:
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
            kind.mode,
            setup,
            FREE_SLOT if is_copied else OWN_SLOT,
            combine.sender(context, call, sizes, kind.idx_dtype, is_copied, is_aligned, waiting),
            words.waiter(context, call, wait_options),
            receive,
            combine.num_send_blocks(sizes, is_copied),
            num_pieces,
            self._copies.for_combine(call, sizes) if self._copies is not None else None,
            self._is_plain(kind.mode),
            scratch,
        )

    def _wait_options(self, kind: Dispatching | Combining) -> WaitOptions:
        """Return how a call waits."""
        return WaitOptions(self.context.state if kind.has_wait_stats else None, self._can_mask)

    def _waiting(self, mode: CallMode, wait_options: WaitOptions) -> WaitOptions | None:
        """Return how a send waits; None: it does not."""
        return wait_options if self._can_send_wait and not mode.has_hook else None

    def _is_plain(self, mode: CallMode) -> bool:
        return not any(mode) and self._can_send_wait

    def _dispatch_setup(self, geometry: Geometry, form: RowFormat) -> _Setup:
        setup = self._setups.get((geometry, form))
        if setup is None:
            plan = plan_dispatch("low_latency_dispatch", self._num_bytes, geometry, form, self._has_copies)
            row = (geometry.row_bytes(form), geometry.scales_offset, geometry.expert_slots_offset(form))
            sizes = dispatch.DispatchSizes(*_sizes_of(geometry), *row, form.use_fp8, form.round_scale)
            agreement = agreement_of(DISPATCH, geometry, form.dtype, form.scale_dtype, int(form.round_scale))
            call, results = _call(DISPATCH, plan, agreement), _results(geometry, form, self._device)
            wide_bytes = bytes_for_two(geometry, form) if plan.takes_slot else 0
            setup = self._setups[geometry, form] = _Setup(call, sizes, wide_bytes, results)
        return setup

    def _combine_setup(self, geometry: Geometry, use_logfmt: bool) -> _Setup:
        setup = self._setups.get((geometry, use_logfmt))
        if setup is None:
            plan = plan_combine("low_latency_combine", self._num_bytes, geometry, self._has_copies)
            sizes = combine.CombineSizes(*_sizes_of(geometry), geometry.slot_bytes, geometry.ranges_offset, use_logfmt)
            agreement = agreement_of(COMBINE, geometry, torch.bfloat16, None, int(use_logfmt))
            call = _call(COMBINE, plan, agreement)
            setup = self._setups[geometry, use_logfmt] = _Setup(call, sizes)
        return setup

    def _make(
        self, kernels: Kernels, work: _Work, copier_args: tuple[Any, ...], slot: int
    ) -> tuple[EventHandle | None, Hook | None]:
        """Launch a call: its send phase, and its receive phase unless a hook does that.

        The caller has checked that the buffer works.

        Args:
            kernels: The kernels of the call.
            work: The arguments of its phases.
            copier_args: The arguments of its copier, if it has one.
            slot: What it takes of the slots.
        """
        if self._masked_word.value != self._told:
            self._warn_of_masks()
        signals, stream, in_flight = self._signals, self._stream, self._in_flight
        is_async, has_hook = kernels.mode
        number = 0
        try:
            signals.is_calling = signals.is_announced = True  # a number that was given to a call must be sent
            if has_hook or not in_flight.try_complete(slot):
                signals.is_announced = False
                number = in_flight.send(METHODS[kernels.operation], slot, kernels.setup.wide_bytes)
                signals.is_announced = True
                if not has_hook:
                    in_flight.receive(number)
            saved = stream.enter(None, is_async)
            try:
                if slot == FREE_SLOT:
                    if stream.is_capturing:
                        self._slots.is_exact = False
                    self._slots.take(in_flight.next_number - 1)
                if kernels.is_plain and signals.marks is None:
                    num_send_blocks, sent, numbers, num_receive_blocks, received = work
                    kernels.send(num_send_blocks, sent, numbers)
                    kernels.receive(num_receive_blocks, received, _NO_AGE)
                else:
                    self._launch(kernels, work, copier_args)
            finally:
                stream.exit(saved)
        except BaseException as error:
            signals.propagate_failure(kernels.operation, error)
            raise
        event = stream.leave(is_async)
        return event, self._hook(kernels, work, number) if has_hook else None

    def _launch(self, kernels: Kernels, work: _Work, copier_args: tuple[Any, ...]) -> None:
        """Launch the kernels of a call, except for those of a hook."""
        marks, (is_async, has_hook) = self._signals.marks, kernels.mode
        if is_async:
            self._stream.hold((*work[1], *work[4]), self._stream.raw)
        if marks is None:
            self._launch_steps(kernels, work, copier_args, has_hook)
        else:
            with marks.call(f"{kernels.operation} send" if has_hook else kernels.operation):
                self._launch_steps(kernels, work, copier_args, has_hook)

    def _launch_steps(self, kernels: Kernels, work: _Work, copier_args: tuple[Any, ...], has_hook: bool) -> None:
        """Launch the kernels of a call, except for those of a hook, after the trace, if there is one, has begun the
        call.
        """
        marks, copier = self._signals.marks, kernels.copier
        num_send_blocks, sent, numbers, num_receive_blocks, received = work
        if marks is not None:
            marks.step("send")
        kernels.send(num_send_blocks, sent, numbers)
        if copier is not None:
            if marks is not None:
                marks.step("copy")
            copier.launch(*copier_args)
        if not has_hook:
            stats = None if self._can_send_wait else sent[-1]
            self._launch_receive(kernels, num_receive_blocks, received, stats, 0)

    def _launch_receive(
        self, kernels: Kernels, num_blocks: int, received: _Tensors, stats: torch.Tensor | None, age: int
    ) -> None:
        """Launch the receive phase.

        Args:
            kernels: The kernels of the call.
            num_blocks: The grid.
            received: Its tensors.
            stats: What the waiting kernel before it adds to, or any tensor; None: the send phase has waited.
            age: How many calls were sent since.
        """
        marks = self._signals.marks
        if stats is not None:
            if marks is not None:
                marks.step("wait")
            kernels.wait(1, (stats,), (age,))
        if marks is not None:
            marks.step("receive")
        kernels.receive(num_blocks, received, (age,))
        self._tell()

    def _hook(self, kernels: Kernels, work: _Work, number: int) -> Hook:
        """Return the hook of a call, which launches its receive phase."""
        signals, stream, in_flight, operation = self._signals, self._stream, self._in_flight, kernels.operation
        _, (*_, stats), _, num_blocks, received = work
        caller = stream.caller()

        def receive() -> None:
            try:
                signals.is_calling = signals.is_announced = True
                age = in_flight.receive(number)
                saved = stream.enter(None, False)
                try:
                    if signals.marks is None:
                        self._launch_receive(kernels, num_blocks, received, stats, age)
                    else:
                        with signals.marks.call(f"{operation} receive"):
                            self._launch_receive(kernels, num_blocks, received, stats, age)
                finally:
                    stream.exit(saved)
            except BaseException as error:
                signals.propagate_failure(operation, error)
                raise
            stream.leave(False)

        def hook() -> None:
            signals.require_working()
            in_flight.require_pending(number)
            if stream.caller() is caller:
                receive()
            else:
                with stream.behind(caller):
                    receive()

        return hook

    def _tell(self) -> None:
        """After a wait and the work that depends on it: have this rank's failure sent to remote ranks, if the wait
        has failed.
        """
        if self._copies is not None:
            self._copies.tell()

    def _warn_of_masks(self) -> None:
        """Warn, once for each rank, that a kernel has masked it."""
        newest = self._masked_word.value
        if newest == self._told:
            return
        self._told = newest
        calls, size = self._host[:-1].tolist(), self._host.numel() - 1
        self._host[:-1] = 0
        for rank, word in enumerate(calls):
            if word:
                call, reason = word >> words.REASON_BITS, word & ((1 << words.REASON_BITS) - 1)
                text = (
                    f"low latency (call {call}): rank {rank} {_REASONS[reason]}, and is masked from now on "
                    f"(rank {self.context.buffer.rank}/{size}). Its experts' results are missing"
                )
                log_event(logging.WARNING, text)
                warnings.warn(text, RuntimeWarning, stacklevel=4)


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
