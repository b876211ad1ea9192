"""Low-latency calls on a GPU: two halves of kernels in a stream (`docs/low-latency.md`).

A call is `send` (one kernel, whose last block signals and, where there is no hook, waits), `wait_for` (one warp, behind
a hook) and `receive` (one kernel). The host launches and waits for nothing, and which set a call uses is found on the
device: everything can be captured in a graph.

Across nodes a call is `send` without a wait, two kernels that carry it to the far ranks' copies of this rank's memory
(`copies.py`), `wait_for`, `receive`, and one that tells far ranks of a failure. A hook comes behind the carrying.
"""

from __future__ import annotations

import ctypes
import warnings
from typing import Any, NamedTuple

import torch

from ...event import EventHandle
from ...kernels._triton import Launch
from ...kernels.low_latency import combine, dispatch, words
from ...kernels.low_latency.words import Call, Patience, Spots
from ...stream import LaunchStream
from ...transport import MAX_EXPERTS
from ...transport.device import DeviceWindow
from ..call import OPERATIONS, Agreement
from ..digest import pack
from ..signals import Signals
from .calls import BARRIER, COMBINE, DISPATCH, METHODS, Hook, Packed, Rows, Way, agreement_of
from .copies import Carrier, Copies, FarRanks
from .flights import Flights
from .geometry import NUM_ZERO_COPY, Form, Geometry, Plan, plan_sets
from .zero_copy import ZeroCopy, zero_copy_view


class _Setup(NamedTuple):
    """What follows from the sizes of a call.

    Attributes:
        call: The call, for its kernels.
        sizes: Of its rows, likewise.
        num_sets: That it divides the memory into.
        zero_copy_offsets: Of a combine.
    """

    call: Call
    sizes: Any
    num_sets: int
    zero_copy_offsets: tuple[int, ...] = ()


class Kernels(NamedTuple):
    """Of a call, for arguments of one kind. Calls come again and again, so they are looked for once.

    Attributes:
        setup: What follows from the sizes.
        send: Publishes and signals. Without a hook and far ranks its last block waits for the peers.
        wait: Waits for the peers behind a hook, or behind what is carried.
        receive: Fetches.
        num_send_blocks: Of `send`, but for the tokens of a dispatch.
        num_receive_blocks: Of `receive`; of a combine: for each token.
        carrier: Carries what was sent to far ranks, if there are any.
    """

    setup: _Setup
    send: Launch
    wait: Launch
    receive: Launch
    num_send_blocks: int
    num_receive_blocks: int
    carrier: Carrier | None = None


class Work(NamedTuple):
    """What the kernels of a call are given.

    Attributes:
        num_send_blocks: The grid of the send half.
        sent: Its arguments.
        stats: What the nanoseconds waited are added to; where they are not, any tensor.
        num_receive_blocks: The grid of the receive half.
        received: Its arguments, but for the age of the call.
        carried: What `Carrier.launch` takes.
    """

    num_send_blocks: int
    sent: tuple[torch.Tensor | int, ...]
    stats: torch.Tensor
    num_receive_blocks: int
    received: tuple[torch.Tensor, ...]
    carried: tuple[Any, ...]


class StreamedLowLatency:
    """Low-latency calls of one buffer, by kernels.

    Args:
        signals: Of the buffer: limits and failures.
        window: Of the buffer.
        stream: Where kernels are launched.
        num_bytes: Of the low-latency memory, the same on all ranks.
        enable_shrink: Mask ranks that stay silent, instead of failing.
        far: Ranks of other nodes; None: there are none.
    """

    def __init__(
        self,
        signals: Signals,
        window: DeviceWindow,
        stream: LaunchStream,
        num_bytes: int,
        enable_shrink: bool,
        far: FarRanks | None = None,
    ):
        num_ranks, device = window.num_ranks, window.device
        self._signals = signals
        self._stream = stream
        self._num_bytes = num_bytes
        self._can_mask = enable_shrink
        self._board_bytes = Spots.board_bytes(num_ranks, MAX_EXPERTS)
        self._copies = Copies(far, self._board_bytes, num_bytes, MAX_EXPERTS) if far is not None else None
        self._part = window.set_aside(self._copies.room if self._copies is not None else self._board_bytes + num_bytes)
        addresses, base = list(self._part.addresses), self._part.memory.data_ptr()
        if self._copies is not None:
            addresses = self._copies.addresses(base, addresses)
        self._host = torch.zeros(num_ranks + 1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self._masked_word = ctypes.c_int64.from_address(self._host.data_ptr() + 8 * num_ranks)
        self._told = 0
        self.spots = Spots(
            places=signals.places,
            windows=torch.tensor(addresses, dtype=torch.int64, device=device),
            state=torch.zeros(Spots.state_room(num_ranks), dtype=torch.int64, device=device),
            mask=torch.zeros(num_ranks, dtype=torch.int32, device=device),
            seen=torch.zeros(num_ranks, 2, dtype=torch.int64, device=device),
            host=self._host,
            max_experts=MAX_EXPERTS,
        )
        signals.low_latency_words = self.spots.seen
        self._setups: dict[tuple, _Setup] = {}
        self._kernels: dict[tuple, Kernels] = {}
        self._flights = Flights()
        self._zero_copy = ZeroCopy()
        words.prepare_all(self.spots)
        if self._copies is not None:
            self._copies.start(self.spots, base)

    # Calls -----------------------------------------------------------------------------------------------------------

    def dispatch(
        self,
        x: torch.Tensor,
        topk_idx: torch.Tensor,
        geometry: Geometry,
        form: Form,
        way: Way,
        recv_stats: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[Packed, EventHandle | None, Hook | None]:
        """Send each token to its experts; see `LowLatency`."""
        kinds = (geometry, form, way.has_hook, topk_idx.dtype, x.data_ptr() % 16 == 0)
        key = (*kinds, recv_stats is not None, wait_stats is not None)
        kernels = self._kernels.get(key)
        if kernels is None:
            kernels = self._kernels[key] = self._dispatch_kernels(*key)
        packed = _empty_packed(geometry, form, x.device)
        num_tokens, some = x.size(0), packed.num_rows
        work = Work(
            num_tokens + kernels.num_send_blocks,
            (x, topk_idx, self.spots.state if wait_stats is None else wait_stats, num_tokens),
            self.spots.state if wait_stats is None else wait_stats,
            kernels.num_receive_blocks,
            (
                packed.x,
                some if packed.scales is None else packed.scales,
                packed.num_rows,
                packed.src_info,
                packed.layout_range,
                some if recv_stats is None else recv_stats,
            ),
            (self.spots.state,),
        )
        return packed, *self._make(DISPATCH, kernels, way, work)

    def combine(
        self,
        rows: Rows,
        geometry: Geometry,
        way: Way,
        out: torch.Tensor | None,
        wait_stats: torch.Tensor | None,
    ) -> tuple[torch.Tensor, EventHandle | None, Hook | None]:
        """Bring the experts' rows back; see `LowLatency`."""
        topk_idx, num_tokens = rows.topk_idx, rows.topk_idx.size(0)
        combined = out if out is not None else rows.x.new_empty(num_tokens, geometry.hidden)
        kinds = (geometry, rows.use_logfmt, rows.zero_copy, way.has_hook, topk_idx.dtype, wait_stats is not None)
        key = (*kinds, rows.x.data_ptr() % 16 == 0, combined.data_ptr() % 16 == 0)
        kernels = self._kernels.get(key)
        if kernels is None:
            kernels = self._kernels[key] = self._combine_kernels(*key)
        offset = 0
        if rows.zero_copy:
            self._flights.make_way(
                METHODS[COMBINE], kernels.setup.num_sets, self.clean
            )  # a refused call must not take the tensor
            index = self._zero_copy.give(rows.src_info, self._flights.next_number)
            offset = kernels.setup.zero_copy_offsets[index]
        earlier = torch.empty_like(topk_idx, dtype=torch.int32)
        stats = self.spots.state if wait_stats is None else wait_stats
        work = Work(
            kernels.num_send_blocks,
            (rows.x, rows.layout_range, topk_idx, earlier, stats, num_tokens, offset),
            stats,
            num_tokens * kernels.num_receive_blocks,
            (combined, topk_idx, rows.topk_weights, earlier),
            (rows.layout_range, rows.layout_range, offset if rows.zero_copy else -1),
        )
        return combined, *self._make(COMBINE, kernels, way, work)

    def clean(self) -> None:
        """A barrier over the ranks that are not masked. The host does not wait."""
        call = _call(BARRIER, Plan(16, 1), Agreement(BARRIER))
        self._flights.receive(self._flights.send(METHODS[BARRIER], 0))
        with self._signals.contagious(BARRIER), self._stream.entered(None, False):
            self._signals.is_announced = True
            words.signal(self.spots, call)
            if self._copies is not None:
                self._copies.for_barrier(call).launch(self.spots.state)
            words.wait_for(self.spots, call, 0, Patience(can_mask=self._can_mask), is_dispatch=False)
            self._tell()
        self._stream.leave(False)

    def combine_buffer(self, src_info: torch.Tensor, geometry: Geometry) -> torch.Tensor:
        """The zero-copy tensor of a handle."""
        where = "get_next_low_latency_combine_buffer"
        plan = self._plan(where, geometry.combine_bytes, geometry, geometry.copied_combine_bytes)
        offset = self._board_bytes + plan.zero_copy_offset(self._zero_copy.take(src_info, self._flights.num_consumed))
        return zero_copy_view(self._part.memory[offset : offset + geometry.combine_bytes], geometry)

    # Masks -----------------------------------------------------------------------------------------------------------

    def update_mask(self, rank: int, is_masked: bool) -> None:
        """Mask a rank for this rank's calls, or no longer; in the order of the caller's stream."""
        self._warn_of_masks()
        self.spots.mask[rank : rank + 1].fill_(int(is_masked))

    def query_mask(self, status: torch.Tensor) -> None:
        """Write the masks into [R] int32, in the order of the caller's stream."""
        status.copy_(self.spots.mask)
        self._warn_of_masks()

    def clean_mask(self) -> None:
        """Mask nobody."""
        self._warn_of_masks()
        self.spots.mask.zero_()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _dispatch_kernels(
        self,
        geometry: Geometry,
        form: Form,
        has_hook: bool,
        idx_dtype: torch.dtype,
        is_aligned: bool,
        has_recv_stats: bool,
        has_wait_stats: bool,
    ) -> Kernels:
        setup, spots = self._dispatch_setup(geometry, form), self.spots
        call, sizes, patience = (
            setup.call,
            setup.sizes,
            Patience(spots.state if has_wait_stats else None, self._can_mask),
        )
        return Kernels(
            setup,
            dispatch.sender(spots, call, sizes, idx_dtype, is_aligned, self._waiting(has_hook, patience)),
            words.waiter(spots, call, patience, is_dispatch=True),
            dispatch.receiver(spots, call, sizes, form.scale_dtype, has_recv_stats),
            dispatch.num_send_blocks(sizes, 0),
            dispatch.num_receive_blocks(sizes, geometry.num_ranks),
            self._copies.for_dispatch(call, sizes) if self._copies is not None else None,
        )

    def _combine_kernels(
        self,
        geometry: Geometry,
        use_logfmt: bool,
        zero_copy: bool,
        has_hook: bool,
        idx_dtype: torch.dtype,
        has_wait_stats: bool,
        is_aligned: bool,
        is_out_aligned: bool,
    ) -> Kernels:
        setup, spots = self._combine_setup(geometry, use_logfmt), self.spots
        call, sizes, patience = (
            setup.call,
            setup.sizes,
            Patience(spots.state if has_wait_stats else None, self._can_mask),
        )
        waiting = self._waiting(has_hook, patience)
        receive, num_pieces = combine.receiver(spots, sizes, idx_dtype, is_out_aligned)
        return Kernels(
            setup,
            combine.sender(spots, call, sizes, idx_dtype, not zero_copy, is_aligned, waiting),
            words.waiter(spots, call, patience, is_dispatch=False),
            receive,
            combine.num_send_blocks(sizes, not zero_copy),
            num_pieces,
            self._copies.for_combine(call, sizes) if self._copies is not None else None,
        )

    def _waiting(self, has_hook: bool, patience: Patience) -> Patience | None:
        """How a send waits, if it does: far ranks have first to be carried what they wait for themselves."""
        return None if has_hook or self._copies is not None else patience

    def _dispatch_setup(self, geometry: Geometry, form: Form) -> _Setup:
        setup = self._setups.get((geometry, form))
        if setup is None:
            num_bytes = geometry.dispatch_bytes(form)
            plan = self._plan("low_latency_dispatch", num_bytes, geometry, num_bytes)
            row = (geometry.row_bytes(form), geometry.scales_offset, geometry.places_offset(form))
            sizes = dispatch.Sizes(*_sizes_of(geometry), *row, form.use_fp8, form.round_scale)
            agreement = agreement_of(DISPATCH, geometry, form.dtype, form.scale_dtype, int(form.round_scale))
            setup = self._setups[geometry, form] = _Setup(_call(DISPATCH, plan, agreement), sizes, plan.num_sets)
        return setup

    def _combine_setup(self, geometry: Geometry, use_logfmt: bool) -> _Setup:
        setup = self._setups.get((geometry, use_logfmt))
        if setup is None:
            num_bytes, copied_bytes = geometry.combine_bytes, geometry.copied_combine_bytes
            plan = self._plan("low_latency_combine", num_bytes, geometry, copied_bytes)
            sizes = combine.Sizes(*_sizes_of(geometry), geometry.slot_bytes, geometry.ranges_offset, use_logfmt)
            agreement = agreement_of(COMBINE, geometry, torch.bfloat16, None, int(use_logfmt))
            offsets = tuple(plan.zero_copy_offset(index) for index in range(NUM_ZERO_COPY))
            call = _call(COMBINE, plan, agreement)
            setup = self._setups[geometry, use_logfmt] = _Setup(call, sizes, plan.num_sets, offsets)
        return setup

    def _plan(self, where: str, num_bytes: int, geometry: Geometry, copied_bytes: int) -> Plan:
        return plan_sets(
            where, self._num_bytes, num_bytes, geometry, copied_bytes if self._copies is not None else None
        )

    def _make(self, operation: str, kernels: Kernels, way: Way, work: Work) -> tuple[EventHandle | None, Hook | None]:
        """Launch a call: its send half, and its receive half unless there is a hook for that."""
        if self._masked_word.value != self._told:
            self._warn_of_masks()
        num_sets = kernels.setup.num_sets
        self._flights.make_way(METHODS[operation], num_sets, self.clean)
        number = self._flights.send(METHODS[operation], num_sets)
        if not way.has_hook:
            self._flights.receive(number)
        signals, stream = self._signals, self._stream
        signals.begin()
        try:
            way_back = stream.enter(None, way.is_async)
            try:
                if way.is_async:
                    stream.hold(_tensors_of(work), stream.raw)
                with signals.marked(f"{operation} send" if way.has_hook else operation):
                    signals.is_announced = True
                    signals.mark("send")
                    kernels.send(work.num_send_blocks, *work.sent)
                    if kernels.carrier is not None:
                        signals.mark("carry")
                        kernels.carrier.launch(*work.carried)
                        if not way.has_hook:
                            signals.mark("wait")
                            kernels.wait(1, work.stats, 0)
                    if not way.has_hook:
                        signals.mark("receive")
                        kernels.receive(work.num_receive_blocks, *work.received, 0)
                        self._tell()
            finally:
                stream.exit(way_back)
        except BaseException as error:
            signals.spread(operation, error)
            raise
        event = stream.leave(way.is_async)
        return event, self._hook(operation, kernels, work, number) if way.has_hook else None

    def _hook(self, operation: str, kernels: Kernels, work: Work, number: int) -> Hook:
        """The receive half of a call."""
        signals, stream = self._signals, self._stream
        caller = stream.caller()

        def hook() -> None:
            signals.require_working()
            age = self._flights.age(number)
            self._flights.receive(number)
            with stream.behind(caller):
                half = f"{operation} receive"
                with signals.contagious(operation), stream.entered(None, False), signals.marked(half):
                    signals.is_announced = True
                    signals.mark("wait")
                    kernels.wait(1, work.stats, age)
                    signals.mark("receive")
                    kernels.receive(work.num_receive_blocks, *work.received, age)
                    self._tell()
                stream.leave(False)

        return hook

    def _tell(self) -> None:
        """Behind a wait, and what it holds up: have far ranks hear of it if it has failed."""
        if self._copies is not None:
            self._copies.tell()

    def _warn_of_masks(self) -> None:
        """Say once of each rank that a kernel has masked it."""
        newest = self._masked_word.value
        if newest == self._told:
            return
        self._told = newest
        calls = self._host[:-1].tolist()
        self._host[:-1] = 0
        for rank, call in enumerate(calls):
            if call:
                warnings.warn(
                    f"low latency (call {call}): rank {rank} was silent past the limit and is masked from now on "
                    f"(rank {self.spots.places.rank}/{len(calls)}). Its experts' results are missing",
                    RuntimeWarning,
                    stacklevel=4,
                )


def _tensors_of(work: Work) -> list[torch.Tensor]:
    return [one for one in (*work.sent, *work.received) if isinstance(one, torch.Tensor)]


def _empty_packed(geometry: Geometry, form: Form, device: torch.device) -> Packed:
    num_local, num_rows = geometry.num_local_experts, geometry.num_rows
    scales = None
    if form.scale_dtype is not None:
        columns = geometry.num_scales(form)
        shape, strides = (num_local, num_rows, columns), (columns * num_rows, 1, num_rows)
        scales = torch.empty_strided(shape, strides, dtype=form.scale_dtype, device=device)
    return Packed(
        torch.empty((num_local, num_rows, geometry.hidden), dtype=form.dtype, device=device),
        scales,
        torch.empty(num_local, dtype=torch.int32, device=device),
        torch.empty((num_local, num_rows), dtype=torch.int32, device=device),
        torch.empty((num_local, geometry.num_ranks), dtype=torch.int64, device=device),
    )


def _sizes_of(geometry: Geometry) -> tuple[int, int, int, int]:
    """What both kinds of rows have."""
    return geometry.hidden, geometry.num_topk, geometry.num_experts, geometry.max_tokens


def _call(operation: str, plan: Plan, agreement: Agreement) -> Call:
    sizes = (plan.quarter_bytes, plan.set_bytes, plan.sets_per_quarter)
    copied = (plan.copy_quarter_bytes, plan.copy_set_bytes)
    return Call(pack(agreement), *sizes, OPERATIONS.index(operation), *copied)
