"""The engine on a GPU: the steps are kernels in a stream, which do the waiting (`docs/protocol.md`).

The host launches, and only a full dispatch waits, for its counts. A rank that has no memory left in the window offers
its staging instead; the end of `move`, or of `sum`, then brings its rows through it, in rounds (`kernels/finish.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from ...errors import EPClosed, EPUnsupported
from ...event import EventHandle
from ...handle import ColumnHandle
from ...kernels import counts
from ...kernels.notify import HandshakeForm, Post, Terms
from ...kernels.put import VECTOR_BYTES
from ...kernels.selections import MOST_TOPK
from ...layout import DispatchLayout
from ...stream import LaunchStream
from ...trace import Trace
from ...transport.device import DeviceWindow
from ..elastic import ElasticRequest
from ..engine import Engine
from ..low_latency.calls import operation_of
from ..ops import CallOrder, CombineSteps, DispatchSteps
from ..payload import Payload, Routing
from ..protocol import LEAVE, OPERATIONS, TAKEN, Agreement
from .digest import pack
from .scope import CudaScope
from .selections import DeviceUnfold, SelectionDispatch
from .shapes import Shapes
from .signals import Signals
from .steps import CombineSignature, DispatchSignature, Ops
from .trace_marks import TraceMarks

_MOST_SCALE_BYTES = 8  # an integer of a kernel
_MOST_AGREED_TOKENS = 1 << 17  # of a word, see `digest.py`: larger numbers are not compared
_MOST_SIGNATURES = 1024  # that are remembered, of each operation
_make_layout: Callable[[tuple], DispatchLayout] = partial(tuple.__new__, DispatchLayout)
_kept: list[CudaEngine] = []  # engines whose memory could not be given back


class CudaEngine(Engine):
    """Dispatch and combine over one window, by kernels.

    Args:
        window: The window.
        stream: Where the kernels are launched.
        signals: The words of the window.
        ops: The steps of calls.
        num_local_bytes: What the caller may see of the raw buffer.
    """

    def __init__(
        self,
        window: DeviceWindow,
        stream: LaunchStream,
        signals: Signals,
        ops: Ops,
        num_local_bytes: int = 0,
    ):
        self.rank = window.rank
        self.window = window
        self.stream = stream
        self.signals = signals
        self._is_capturing = window.memory.is_capturing
        self.require_working = signals.require_working  # type: ignore[method-assign]  # saves a Python call in each call
        self._ops = ops
        self._dispatches: dict[tuple, Any] = {}  # by signature, as a plain tuple, which is made faster
        self._combines: dict[tuple, CombineSteps] = {}
        self._num_local_bytes = num_local_bytes
        self._local: torch.Tensor | None = None
        terms = Terms(TAKEN, OPERATIONS.index("barrier"), pack(Agreement("barrier")))
        self._barrier = signals.handshake(terms, HandshakeForm())

    # Calls -----------------------------------------------------------------------------------------------------------

    def layout(
        self, topk_idx: torch.Tensor, num_experts: int, num_nodes: int, order: CallOrder
    ) -> tuple[DispatchLayout, EventHandle | None]:
        """Count where this rank's tokens go. Local: it takes no part in the order of the calls."""
        sizes = (num_experts, self.window.num_ranks, num_nodes)
        if order.after is None and not order.is_async:
            if self.stream.is_on_device():  # as nearly always, and without a context
                return _make_layout(counts.dispatch_layout(topk_idx, *sizes)), None
            with self.stream.on_device():
                return _make_layout(counts.dispatch_layout(topk_idx, *sizes)), None
        caller = self.stream.caller()
        with self.stream.entered(order.after, order.is_async):
            if order.is_async:
                self.stream.hold([topk_idx], self.stream.raw)
            with self.stream.allocation_stream(caller if order.after is None else self.stream.raw):
                tensors = counts.empty_layout(topk_idx, *sizes)
            counted = _make_layout(counts.dispatch_layout(topk_idx, *sizes, tensors))
        self.stream.hold(counted, self.stream.raw if order.after is None else caller)
        return counted, self.stream.leave(order.is_async)

    def layout_of_selections(
        self, topk_idx: torch.Tensor, num_experts: int, order: CallOrder
    ) -> tuple[DispatchLayout, CallOrder]:
        """Return the layout of a V2 dispatch, which its handshake fills, and how the dispatch is to be ordered."""
        num_ranks = self.window.num_ranks
        with self.stream.made_for(order.after):
            made, mask = counts.empty_layout(topk_idx, num_experts, num_ranks, 1)
        return _make_layout((*torch.split_with_sizes(made, (num_ranks, 1, num_experts)), mask)), order

    def _require_waiting(self) -> None:
        if self._is_capturing():
            raise EPUnsupported(
                "dispatch: the host waits for the counts, which cannot be captured in a graph. Pass "
                "`num_worst_tokens` (of an ElasticBuffer: `do_cpu_sync=False`), or the handle of an earlier dispatch"
            )

    def barrier(self) -> None:
        """Have the caller's stream go on when those of all ranks have come here. The host does not wait."""
        self.require_working()
        with self._scope("barrier", CallOrder(None, False)):
            self.signals.is_announced = True
            self._barrier(Post())

    # Steps -----------------------------------------------------------------------------------------------------------

    def _scope(self, operation: str, order: CallOrder) -> CudaScope:
        return CudaScope(operation, order, self.signals, self.stream, self.window.arena)

    def _dispatch_steps(
        self, operation: str, payload: Payload, routing: Routing | None, num_sms: int | None
    ) -> DispatchSteps:
        """Return the steps of the dispatch's signature, which are made when the signature occurs for the first time."""
        key = _dispatch_key(operation, payload, routing, num_sms)
        steps = self._dispatches.get(key)
        if steps is None:
            check_scales(payload)
            if len(self._dispatches) == _MOST_SIGNATURES:
                self._dispatches.clear()
            steps = self._dispatches[key] = self._ops.dispatch(DispatchSignature(*key))
        return steps if payload.expansion is None else SelectionDispatch(steps, payload.expansion)

    def _combine_steps(
        self, parts: Sequence[torch.Tensor], handle: Any, biases: Sequence[torch.Tensor], num_sms: int | None
    ) -> CombineSteps:
        num_columns, is_reduced_once, alignment = 0, False, 0
        if isinstance(handle, ColumnHandle):
            num_columns, is_reduced_once, alignment = handle.slots.shape[1], handle.is_reduced_once, handle.alignment
        key = _combine_key(parts, num_columns, biases, num_sms, is_reduced_once, alignment)
        steps = self._combines.get(key)
        if steps is None:
            if len(self._combines) == _MOST_SIGNATURES:
                self._combines.clear()
            steps = self._combines[key] = self._ops.combine(CombineSignature(*key))
        return steps

    def region(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor of the window that the call uses first, or of ordinary memory if the window has none left."""
        region = self._ops.memory.region(shape, dtype)
        return region if region is not None else torch.empty(shape, dtype=dtype, device=self.window.device)

    def unfold(self, request: ElasticRequest, num_sms: int | None) -> DeviceUnfold:
        """Return a dispatch of V2.

        Raises:
            ValueError: Tokens have too many columns.
        """
        if request.form.num_topk > MOST_TOPK:
            raise ValueError(
                f"dispatch: `topk_idx` must have at most {MOST_TOPK} columns on a GPU, it has {request.form.num_topk}"
            )
        return DeviceUnfold(self._ops.selections, request, num_sms)

    def fold_rows(
        self, out: torch.Tensor, x: torch.Tensor, rows: torch.Tensor, ends: torch.Tensor, num_sms: int | None
    ) -> None:
        """Sum expanded rows that belong to one compact row."""
        self._ops.selections.fold(out, x, rows, ends, num_sms)

    def can_pull(self, x: torch.Tensor) -> bool:
        """Whether peers can read rows where they lie."""
        base = self._ops.memory.base(x)
        return base >= 0 and base % VECTOR_BYTES == 0

    # Beside the calls ------------------------------------------------------------------------------------------------

    @property
    def shapes(self) -> Shapes:
        """The launch shapes of the bulk kernels."""
        return self._ops.shapes

    @shapes.setter
    def shapes(self, shapes: Shapes) -> None:
        self._ops.shapes = shapes
        self._dispatches.clear()
        self._combines.clear()

    def start_trace(self, trace: Trace) -> None:
        """Record all further calls in a trace."""
        self.signals.marks = TraceMarks(trace, self.stream)

    def require_working(self) -> None:
        """Raise if an earlier call has failed."""
        self.signals.require_working()

    def expect_call(self) -> None:
        """Note that a call begins. If an exception leaves it, `leave` must be called."""
        signals = self.signals
        if signals.scope is not None:
            signals.settle()
        signals.is_announced = signals.is_calling = False

    def leave(self, error: BaseException, method: str) -> None:
        """Report to the peers that an exception has ended a call, unless that has been reported already.

        Args:
            error: The exception.
            method: The name of the method that the caller has called.
        """
        if self.signals.is_calling:
            self.signals.settle(error)
        elif not isinstance(error, EPClosed):
            self.signals.propagate_failure(operation_of(method), error)

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return an uninitialised tensor in the window, or in ordinary memory if the arena has none left."""
        region = self.window.allocate(shape, dtype, self.stream.caller())
        return region if region is not None else torch.empty(*shape, dtype=dtype, device=self.window.device)

    def local_bytes(self, start: int, num_bytes: int) -> torch.Tensor:
        """Bytes of the raw buffer, free for the caller between calls. We do not use them: they are made on demand.

        All views show the same memory, so the first one takes all of it: a GPU's memory is not taken page by page.
        """
        if self._local is None:
            self._local = torch.zeros(self._num_local_bytes, dtype=torch.uint8, device=self.window.device)
        return self._local[start : start + num_bytes]

    def trim(self) -> int:
        """Do nothing: peers have mapped the memory, so only all ranks together could give it back."""
        return 0

    def stats(self) -> dict[str, Any]:
        """Return the counters of the calls so far. Bytes and waits are the device's, and not counted."""
        counted = self.signals.stats.as_dict()
        return {
            **counted,
            **self._ops.stats(),
            "rounds": counted["rounds"] + self.signals.num_more_rounds(),
            "wait_secs": [0.0] * self.window.num_ranks,
            "arena": self.window.arena.num_bytes(),
        }

    def record_stream(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Note that another stream uses a tensor of the window."""
        self.window.arena.used_by(tensor, stream)

    def release_graphs(self) -> None:
        """Release the window memory that captured graphs use."""
        self.window.arena.release_captured()

    def synchronize(self) -> None:
        """Wait for everything that was launched, and raise the error of a call that failed."""
        self.stream.stop()
        self.signals.raise_if_failed()

    def stop(self) -> None:
        """Wait for everything that was launched, and close."""
        self.stream.stop()
        if self.signals.marks is not None:
            self.signals.marks.record()
        self._ops.close()

    def abandon(self, cause: str) -> None:
        """Report to all peers that this rank has left. This does not wait: launched calls fail by themselves."""
        self.signals.give_up(LEAVE, cause)

    def forget(self) -> None:
        """Wait for everything that was launched: memory under a running kernel cannot be unmapped.

        Only the reaper calls it, for a buffer that was never destroyed.
        """
        with self.stream.on_device():
            if self.stream.await_capture():
                self.stop()
            else:  # freeing what is under a capture would end the process
                _kept.append(self)

    def has_failed(self) -> bool:
        """Return whether a call has failed, on this rank or on another."""
        return self.signals.has_failed()


def check_scales(payload: Payload) -> None:
    """Refuse scales that kernels cannot move.

    Raises:
        ValueError: Their elements are too wide.
    """
    if payload.scales is not None and payload.scales.element_size() > _MOST_SCALE_BYTES:
        raise ValueError(
            f"dispatch: `scales` must have elements of at most {_MOST_SCALE_BYTES} bytes on a GPU, they are "
            f"{payload.scales.dtype}. Pass them as two columns of a smaller type each"
        )


def _dispatch_key(operation: str, payload: Payload, routing: Routing | None, num_sms: int | None) -> tuple:
    """Return the fields of a `DispatchSignature` as a plain tuple, in the same order."""
    x, scales = payload.x, payload.scales
    num_topk = num_experts = num_scales = max_tokens = 0
    idx_dtype = scale_dtype = None
    keeps_weights, has_weights = False, payload.has_weights
    if routing is not None:
        keeps_weights, has_weights = routing.keeps_weights, routing.has_weights
        num_experts = routing.num_tokens_per_expert.shape[0]
        if routing.max_tokens and operation != "dispatch" and routing.max_tokens < _MOST_AGREED_TOKENS:
            max_tokens = routing.max_tokens
        if (topk_idx := routing.topk_idx) is not None:
            num_topk, idx_dtype = topk_idx.shape[1], topk_idx.dtype
    if scales is not None:
        num_scales, scale_dtype = scales.shape[1], scales.dtype
    address = x.data_ptr()
    alignment = VECTOR_BYTES if address % VECTOR_BYTES == 0 else address & -address
    hidden = x.shape[1]
    return (
        operation, hidden, x.dtype, alignment, num_scales, scale_dtype, num_topk, idx_dtype, num_experts, max_tokens,
        keeps_weights, num_sms, has_weights, None if payload.expansion is None else payload.expansion.form,
    )  # fmt: skip


def _combine_key(
    parts: Sequence[torch.Tensor],
    num_columns: int,
    biases: Sequence[torch.Tensor],
    num_sms: int | None,
    is_reduced_once: bool,
    alignment: int,
) -> tuple:
    """Return the fields of a `CombineSignature` as a plain tuple, in the same order."""
    x, num_topk = parts[0], parts[1].shape[1] if len(parts) > 1 else 0
    is_aligned = not any(bias.data_ptr() % VECTOR_BYTES for bias in biases) if biases else True
    return x.shape[1], x.dtype, num_columns, num_topk, len(biases), is_aligned, num_sms, is_reduced_once, alignment
