"""One call on the CPU, from its first check to its last step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import torch

from ...errors import EPOverflow, account
from ...event import EventHandle
from ...stream import CommStream
from ..ops import CallOrder
from ..payload import DispatchResult, apart
from ..protocol import Header, is_refusal
from .call import Call, Chain


class CpuScope:
    """The scope of a call, see `ops.CallScope`.

    The steps hand over functions, which run one after the other on the comm stream.

    Whatever exception leaves a call, at whatever point, the call has ended, or was refused or failed. Half a call must
    not be followed by the next: peers would take its signals for this one's. An interrupt may come before the first
    instruction of `__exit__`, or while an earlier one is reported. So the chain has the scope until it has ended its
    call, and `OpenCall.settle` ends one that is still there: where the exception leaves the method of the buffer, or
    where the next call begins.

    Args:
        chain: The calls of the buffer, of which this is the next.
        stream: Where communication runs.
        order: How the call stands to the caller's stream.

    Attributes:
        order: See the argument.
        outputs: See `ops.CallScope`: the CPU has one kind of memory.
        is_elsewhere: The caller goes on before the call is made.
        event: See `ops.CallScope`.
    """

    _call: Call | None = None  # once it is announced
    _phases: Any = None  # of a low-latency call, once it is announced
    _is_begun = False  # it may have been announced
    _is_complete = False  # it has ended well
    _is_cancelled = False  # it waits in the queue, and is taken out of it if its caller leaves
    _is_foreign = False  # what it was to come after has failed, which is none of this buffer's calls
    event: EventHandle | None = None
    outputs: AbstractContextManager[None] = nullcontext()

    def __init__(self, chain: Chain, stream: CommStream, order: CallOrder):
        self.order = order
        self.is_elsewhere = order.is_async
        self._chain = chain
        self._stream = stream
        self._after = order.after
        self._steps: list[Callable[[], Any]] = []

    def __enter__(self) -> CpuScope:
        # First: whatever comes between this and the end of the call, `settle` finds the scope.
        self._chain.scope = self
        self._chain.is_calling = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is None:
            try:
                self._finish()
            except BaseException as raised:
                self._end(raised)
                raise
            self._chain.scope = None
        else:
            self._end(error)

    # For the steps ---------------------------------------------------------------------------------------------------

    def launch(self, step: Callable[[], Any]) -> None:
        """Have a function run behind those that were handed over before, at the latest when the script ends."""
        self._steps.append(step)

    def begin(self, header: Header) -> Call:
        """On the comm stream: enter the call. From here on, what goes wrong goes wrong for all ranks."""
        self._is_begun = True
        self._call = self._chain.begin(header)
        return self._call

    def announce(self, call: Any) -> None:
        """Begin a phase of a low-latency call, which can neither be refused nor taken out of the queue any more."""
        self._is_begun = True
        self._phases = call

    @property
    def call(self) -> Call:
        """The call that `begin` has entered."""
        assert self._call is not None
        return self._call

    def run(self) -> None:
        """Run the functions that were handed over, and wait for them."""
        self._run(self._work())

    def is_under_way(self) -> bool:
        """Whether something that comes before this call has not happened yet, so that handles may not be filled."""
        return not (self._stream.query() and self.order.is_due())

    # For the script --------------------------------------------------------------------------------------------------

    def hold_inputs(self, tensors: Sequence[torch.Tensor | None], ordinary: Any) -> None:
        """Do nothing: the functions that are handed over hold references to what they read."""

    def hold_received(self, received: DispatchResult) -> DispatchResult:
        """What the caller gets: see `apart`. The steps have done the same with handle, ids and weights."""
        x, scales = apart((received.x, received.scales))
        return replace(received, x=x, scales=scales)

    def hold_combined(self, sums: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return the sums of a combine for the caller, see `apart`."""
        return apart(sums)

    def hold_outputs(self, tensors: Sequence[torch.Tensor | None]) -> None:
        """Do nothing: the functions that are handed over hold references to what they write."""

    def apart(self, tensors: Sequence[torch.Tensor | None]) -> Sequence[Any]:
        """The same memory as other tensors, if the caller has them before they are written."""
        return apart(tensors) if self.order.is_async else tensors

    # How a call runs, and how it ends --------------------------------------------------------------------------------

    def _work(self, *, is_last: bool = False) -> Callable[[], None]:
        """What was handed over, as one job, behind what the call comes after."""
        # A full dispatch is two jobs: what the first has done, or waited for, is not done again by the second.
        (steps, self._steps), (after, self._after) = (self._steps, []), (self._after, None)

        def work() -> None:
            # It is executed now, so it cannot be taken out of the queue any more.
            self._is_cancelled = False
            if after is not None:
                try:
                    after.current_stream_wait()
                except BaseException:
                    self._is_foreign = not self._stream.has_made(after)
                    raise
            for step in steps:
                step()
            self._is_complete = is_last

        return work

    def _finish(self) -> None:
        """Make the call to its end: queue the rest, or, if the call is synchronous, run it."""
        work = self._work(is_last=True)
        if self.order.is_async:
            self.event = EventHandle(self._stream.submit(partial(self._run_queued, work)))
        else:
            self._run(work)

    def _run_queued(self, work: Callable[[], None]) -> None:
        """Run the last job of an asynchronous call. The caller has gone on: what goes wrong is dealt with here."""
        try:
            work()
        except BaseException as error:
            # After other mistakes than one of all ranks the calls that are queued behind this one cannot match the
            # peers'.
            if self._is_foreign or not self._is_shared_overflow(error):
                self._chain.fail(error, self._name(), is_foreign=self._is_foreign)
            raise

    def _run(self, work: Callable[[], None]) -> None:
        """Have a job done on the comm stream, and wait for it. If the wait is interrupted, the call fails."""
        self._is_cancelled = not self._is_begun and not self._stream.query()  # unless it begins
        self._stream.run(work, on_abandon=self._abandon)

    def _end(self, error: BaseException) -> None:
        """Tell the peers of an exception that leaves the call, as far as the call has come.

        What another exception cuts short is done when this is called again.
        """
        chain, stream = self._chain, self._stream
        if self._is_complete:
            pass
        elif chain.window.failure is not None:
            with suppress(RuntimeError):  # the thread has ended, and has reported to all peers that this rank leaves
                stream.run_in_turn(chain.tell_failure)
        elif self._is_foreign:
            stream.run_in_turn(partial(chain.fail, error, None, is_foreign=True))
        elif self._is_shared_overflow(error):
            pass
        elif self._is_cancelled or (not self._is_begun and is_refusal(error)):
            stream.run_in_turn(partial(chain.refuse, account(error)))
        elif stream.query():  # nothing runs on the comm stream, so this thread may use its links
            chain.fail(error, self._name())
        else:
            self._abandon(error)
        chain.scope = None

    def _is_shared_overflow(self, error: BaseException) -> bool:
        """Return whether the call is not made because of an overflow before it, which all ranks see.

        That is not reported as a refusal: how many calls a rank has queued behind it, and thus refuses, is chance.
        """
        return isinstance(error, EPOverflow) and not self._is_begun

    def _name(self) -> Call | None:
        """Return the call, for messages; None: it has not been announced."""
        return self._call if self._phases is None else self._phases.name

    def _abandon(self, error: BaseException) -> bool:
        """Fail a call that the comm stream may be in the middle of.

        Returns:
            Whether the caller must not go on before the comm stream has left the call, which it does at its next wait.
        """
        self._is_cancelled = False
        self._chain.give_up(error, self._name())
        with suppress(RuntimeError):  # the thread has ended, and has reported to all peers that this rank leaves
            self._stream.submit(self._chain.tell_failure)  # links are the comm stream's alone
        # In a node, a peer that reads what the caller overwrites checks `failed` afterwards. Other nodes cannot,
        # and what leaves for them must be right. Before the call is begun nothing leaves.
        return self._chain.is_told_late and self._is_begun
