"""What real ranks did, step by step, as a model names it: so that a test can ask whether it is a path of the model.

A recorder stands around the methods that the models' steps are named after. A step that tells others something is
recorded before it is taken, a wait when it is satisfied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, NamedTuple

from ....engine.cpu.call import Call
from ....engine.low_latency.cpu.phases import LowLatencyCall
from .explore import Model, is_path
from .low_latency import LowLatencyModel
from .one_hop import COMBINE, WORST_CASE, OneHopModel
from .ranks import DIRECT, POSTED, STAGED, DrawnCall
from .steps import ROW_STEPS, step_label, topic_name
from .two_hops import TwoHopsModel


class Event(NamedTuple):
    """A step of a rank.

    Attributes:
        name: As the model names it.
        call: Number of the call.
    """

    name: str
    call: int


class StepTrace(NamedTuple):
    """What one rank did.

    Attributes:
        events: In the rank's order.
        operations: By the number of the call, what it was.
    """

    events: list[Event]
    operations: dict[int, str]


@contextmanager
def recording() -> Iterator[StepTrace]:
    """Record the calls of this process, as long as the context lasts. Only for tests: it replaces methods."""
    trace = StepTrace([], {})
    undo: list[Callable[[], None]] = []

    def replace(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        original = owner.__dict__[name]
        setattr(owner, name, make(original))
        undo.append(lambda: setattr(owner, name, original))

    def told(name: str, call: int, operation: str | None = None) -> None:
        trace.events.append(Event(name, call))
        if operation is not None:
            trace.operations[call] = operation

    _record_calls(replace, told)
    _record_low_latency(replace, told)
    _record_rails(replace, told)
    try:
        yield trace
    finally:
        for restore in reversed(undo):
            restore()


def _record_calls(replace: Any, told: Callable[..., None]) -> None:
    def before(name: str) -> Callable[..., Any]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(self: Call, *args: Any) -> Any:
                told(name, self.epoch, self.operation)
                return original(self, *args)

            return method

        return make

    def signal(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Call, step: int) -> None:
            told(f"signal {step_label(step)}", self.epoch)
            original(self, step)

        return method

    def wait(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Call, step: int) -> None:
            original(self, step)
            told(f"wait {step_label(step)}", self.epoch)

        return method

    def part(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Call, name: str, kind: str, **args: Any) -> Any:
            if name in ROW_STEPS:
                told(name, self.epoch)
            return original(self, name, kind, **args)

        return method

    for name in ("post_header", "post_offer", "headers", "offers"):
        replace(Call, name, before(name))
    replace(Call, "signal", signal)
    replace(Call, "wait", wait)
    replace(Call, "slice", part)


def _record_low_latency(replace: Any, told: Callable[..., None]) -> None:
    def send(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: LowLatencyCall) -> None:
            window, number, operation = self.shared.window, self.number, self.agreement.operation
            fault = window.fault

            def reach(point: str) -> None:
                if point.endswith("before sent"):
                    told("sent", number)
                if fault is not None:
                    fault(point)

            told("publish", number, operation)
            window.fault = reach
            try:
                original(self)
            finally:
                window.fault = fault

        return method

    def around(name: str, is_after: bool) -> Callable[..., Any]:
        def make(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(self: LowLatencyCall) -> Any:
                if not is_after:
                    told(name, self.number)
                result = original(self)
                if is_after:
                    told(name, self.number)
                return result

            return method

        return make

    replace(LowLatencyCall, "send", send)
    replace(LowLatencyCall, "_wait", around("wait sent", True))
    replace(LowLatencyCall, "_posts", around("fetch", False))
    replace(LowLatencyCall, "_ahead", around("ahead", True))


def _record_rails(replace: Any, told: Callable[..., None]) -> None:
    try:
        from ....transport.message import Rail  # it needs what only Linux has
    except ImportError:
        return

    def send(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Rail, node: int, topic: int, epoch: int, *args: Any, **named: Any) -> None:
            told(f"send {topic_name(topic)} to node {node}", epoch)
            original(self, node, topic, epoch, *args, **named)

        return method

    def take(original: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: Rail, node: int) -> Any:
            frame = original(self, node)
            told(f"take {topic_name(frame.topic)} of node {node}", frame.epoch)
            return frame

        return method

    replace(Rail, "send", send)
    replace(Rail, "take", take)


# Whether it is a path -------------------------------------------------------------------------------------------------


def drawn_of(traces: Sequence[StepTrace]) -> list[DrawnCall]:
    """What the calls of these traces were: who posted, who was staged, in how many rounds, and whether all rows fit."""
    operations, calls = traces[0].operations, []
    for call in range(1, len(operations) + 1):
        names = [{event.name for event in trace.events if event.call == call} for trace in traces]
        # A combine whose rows lie ready goes to `READY` at once.
        staged = "signal OFFERED" if operations[call] == COMBINE else "copy out"
        memory = tuple(POSTED if "post rows" in one else STAGED if staged in one else DIRECT for one in names)
        rounds = next(index for index in count(1) if not any(f"signal READY({index})" in one for one in names))
        overflows = operations[call] == WORST_CASE and not names[0] & {"offers", "fetch rows"}
        calls.append(DrawnCall(operations[call], memory, rounds, overflows))
    return calls


def _why_no_path(model: Model, traces: Sequence[StepTrace]) -> str | None:
    return is_path(model, [[(event.name, event.call) for event in trace.events] for trace in traces])


def check_one_hop(traces: Sequence[StepTrace], drawn: Sequence[DrawnCall]) -> str | None:
    """Why these traces, one for each rank of a node, are no path of the model of these calls; None: they are one."""
    return _why_no_path(OneHopModel(len(traces), [[one] for one in drawn], ()), traces)


def check_two_hops(
    traces: Sequence[StepTrace], drawn: Sequence[DrawnCall], ranks_per_node: int, num_chunks: int = 1
) -> str | None:
    """Why these traces, one for each rank of all nodes, are no path of the model; None: they are one.

    Args:
        traces: By rank.
        drawn: The calls.
        ranks_per_node: P.
        num_chunks: That each rank sends to each node in each call.
    """
    model = TwoHopsModel(len(traces), ranks_per_node, [[one] for one in drawn], (), None, num_chunks)
    return _why_no_path(model, traces)


def check_low_latency(traces: Sequence[StepTrace], kinds: Sequence[str]) -> str | None:
    """Why these traces, one for each rank, are no path of the model; None: they are one.

    Args:
        traces: By rank.
        kinds: The calls that were made, as the model names them.
    """
    return _why_no_path(LowLatencyModel(len(traces), kinds, ()), traces)
