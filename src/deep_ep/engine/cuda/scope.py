"""One call of the engine on a GPU, from its first check to its last launch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

import torch

from ...event import EventHandle
from ...stream import LaunchStream
from ...transport.device import DeviceArena
from ..ops import CallOrder
from ..payload import DispatchResult, Routing
from .signals import Signals

_is_grad_enabled, _set_grad_enabled = torch.is_grad_enabled, torch._C._set_grad_enabled


class CudaScope:
    """The scope of a call on a GPU, see `ops.CallScope`.

    The launches of the call come after the caller's work (or just after an event) and after earlier calls. Autograd
    does not record inside, and an error on the host is reported to the peers. The buffer must not have failed. The
    signals have the scope until it has ended its call, as a chain has it on the CPU (`CpuScope`).

    Args:
        operation: One of `protocol.OPERATIONS`.
        order: How the call stands to the caller's stream.
        signals: The signals of the buffer.
        stream: Where calls are launched.
        arena: The arena of the window.
        phase: What a trace adds to the operation.

    Attributes:
        is_elsewhere: The call is not launched on the caller's stream.
        outputs: Ordinary tensors that are made inside are the caller's, unless its stream may be behind the call (an
            event came before). Memory only: what is launched inside would be on the caller's stream.
        reach: Called with each step before it is launched; None: neither a trace nor a fault point needs it.
        path: How the rows go, which is counted when the call has been launched.
        event: See `ops.CallScope`.
    """

    is_elsewhere = False
    path = ""
    event: EventHandle | None = None
    outputs: AbstractContextManager[None] = nullcontext()
    reach: Callable[[str], None] | None = None
    _marked: AbstractContextManager[None] | None = None

    def __init__(
        self,
        operation: str,
        order: CallOrder,
        signals: Signals,
        stream: LaunchStream,
        arena: DeviceArena,
        phase: str = "",
    ):
        self._operation = operation
        self._phase = phase
        self._order = order
        self._signals = signals
        self._stream = stream
        self._arena = arena

    def __enter__(self) -> CudaScope:
        signals, stream, order = self._signals, self._stream, self._order
        signals.is_announced, signals.is_calling = False, True
        saved, self._grad = None, _is_grad_enabled()
        try:
            if self._grad:
                _set_grad_enabled(False)
            saved = self._saved = stream.enter(order.after, order.is_async)
            caller = saved.caller
            self.is_elsewhere = stream.current is not caller
            if self.is_elsewhere:
                self.outputs = stream.allocation_stream(caller if order.after is None else stream.raw)
            if signals.marks is not None or signals.window.fault is not None:
                self.reach = partial(signals.reach, self._operation)
            if signals.marks is not None:
                marked = signals.marks.call(self._operation + self._phase)
                marked.__enter__()
                self._marked = marked
        except BaseException as error:
            if saved is not None:
                stream.exit(saved)
            if self._grad:
                _set_grad_enabled(True)
            signals.propagate_failure(self._operation, error)
            raise
        signals.scope = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        marked, self._marked = self._marked, None
        try:
            if marked is not None:
                marked.__exit__(kind, error, traceback)
        finally:
            self._stream.exit(self._saved)
            if self._grad:
                _set_grad_enabled(True)
            if error is not None:
                self._signals.propagate_failure(self._operation, error)
            else:
                if self.path:
                    self._signals.stats.count_path(self.path)
                if self.is_elsewhere or self._order.is_async:  # otherwise the caller's stream has all that was launched
                    self.event = self._stream.leave(self._order.is_async)
            self._signals.scope = None

    def announce(self, call: Any) -> None:
        """Note that peers may see the call from here on: an error in it is an error of all ranks."""
        self._signals.is_announced = True

    def hold_inputs(self, tensors: Sequence[torch.Tensor | None], ordinary: Any) -> None:
        """Keep what a call reads until the device has read it, see `ops.CallScope`."""
        stream, used_by = self._stream, self._arena.used_by
        current = stream.current
        for tensor in tensors:
            if tensor is not None:
                used_by(tensor, current)
        if self.is_elsewhere and self._order.is_async:
            stream.hold(tensors, stream.raw)
            stream.hold(ordinary.tensors(), stream.raw)

    def hold_received(self, received: DispatchResult) -> DispatchResult:
        """Keep the rows of a dispatch; `hold_unpacked` has kept the rest."""
        self.hold_outputs((received.x, received.scales))
        return received

    def hold_unpacked(self, routing: Routing, unpacked: Any) -> None:
        """Keep what comes beside the rows: it may be dropped before the device has come to write it."""
        if self.is_elsewhere:
            handle, topk_idx, topk_weights = unpacked
            made = [item for item in handle if item is not routing.is_token_in_rank]
            self.hold_outputs((topk_idx, topk_weights, *made))

    def hold_combined(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Keep the sums of a combine until the streams that use them are done."""
        self.hold_outputs(sums)
        return sums

    def hold_outputs(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Keep what a call returns until the streams that use it are done: the caller's, and the call's.

        Where the call is on the caller's stream, there is nothing to do.
        """
        stream, order, caller = self._stream, self._order, self._saved.caller
        for tensor in tensors:
            if tensor is not None:
                self._arena.used_by(tensor, caller)
        if order.after is not None:
            stream.hold(tensors, caller)
        elif order.is_async:
            stream.hold(tensors, stream.raw)

    def empty(self, like: torch.Tensor, num_rows: int, num_columns: int) -> torch.Tensor:
        """Allocate an ordinary matrix for the caller, with dtype and device of `like`, as inside of `outputs`.

        Sizes are passed one by one: torch takes a third less time for them than for a tuple.
        """
        if not self.is_elsewhere:
            return like.new_empty(num_rows, num_columns)
        with self.outputs:
            return like.new_empty(num_rows, num_columns)

    def launch(self, step: Callable[[], Any]) -> None:
        """Call a function at once: the call's stream is current, so its work comes after what was launched before."""
        step()

    def apart(self, tensors: Sequence[torch.Tensor | None]) -> Sequence[Any]:
        """Return the same tensors: autograd does not record inside a call."""
        return tensors
