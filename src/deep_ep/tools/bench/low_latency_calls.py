"""The calls that `bench low-latency` times, and the bytes that they move. Letters as in `low_latency_work`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ...engine.low_latency.geometry import NUM_SLOTS
from .core import Stopwatch
from .low_latency_work import Delivered, LowLatencyWork, RowBytes, is_combined, is_sent, valid_rows

NUM_IN_GRAPH = 20

OPERATIONS = {
    "dispatch": "dispatch, FP8",
    "combine": "combine, BF16",
    "combine-zero": "combine, BF16, zero-copy",
    "combine-logfmt": "combine, LogFMT",
    "both": "dispatch + combine",
    "both-zero": "dispatch + combine, zero-copy",
}
"""By name: how a table calls them."""

_PARTS = {"both": ("dispatch", "combine"), "both-zero": ("dispatch", "combine-zero")}
"""Operations that are several."""


# Bytes ---------------------------------------------------------------------------------------------------------------


class Bytes(NamedTuple):
    """What an operation of one rank moves.

    Attributes:
        rows: Rows that it sends, in the form in which they travel.
        send: Read and written through memory before slots are read.
        receive: The same from then on.
    """

    rows: int
    send: int
    receive: int


def bytes_of(operation: str, work: LowLatencyWork) -> Bytes:
    """What an operation moves, with slots; the bytes that must be moved without any are fewer, in a dispatch."""
    if operation in _PARTS:
        return Bytes(*map(sum, zip(*(bytes_of(part, work) for part in _PARTS[operation]), strict=True)))
    row, num_sent = RowBytes.of(work.setting.hidden), work.num_selections
    tokens = work.setting.num_tokens * row.bf16
    if operation == "dispatch":
        return Bytes(num_sent * row.fp8, tokens + num_sent * row.fp8, 2 * num_sent * row.fp8)
    if operation == "combine-logfmt":
        return Bytes(num_sent * row.logfmt, num_sent * (row.bf16 + row.logfmt), num_sent * row.logfmt + tokens)
    copied = 0 if operation == "combine-zero" else 2 * num_sent * row.bf16
    return Bytes(num_sent * row.bf16, copied, num_sent * row.bf16 + tokens)


# Calls ---------------------------------------------------------------------------------------------------------------


class Calls:
    """The product's calls of one rank, warm: results are where combine expects them.

    Args:
        work: What the rank brings.
    """

    def __init__(self, work: LowLatencyWork):
        self._work = work
        self._out = torch.empty_like(work.drawn.x)
        result = self.dispatch()
        self._handle = result[2]
        self.rows = work.experts(sent_of(result))
        self._valid = valid_rows(sent_of(result))

    def _fill_slots(self) -> None:
        """Have the rows in every slot that may be a zero-copy tensor. Other combines have written there."""
        for _ in range(2):  # behind these, everybody has read what was there
            self.dispatch()
        for _ in range(NUM_SLOTS):
            room = self._work.buffer.get_next_low_latency_combine_buffer(self._handle)
            room[self._valid] = self.rows[self._valid]
            self.combine(zero_copy=True)

    def dispatch(self, **more: Any) -> tuple:
        """An FP8 dispatch."""
        setting, drawn = self._work.setting, self._work.drawn
        return self._work.buffer.low_latency_dispatch(
            drawn.x, drawn.topk_idx, setting.num_tokens, setting.num_experts, **more
        )

    def combine(self, handle: tuple | None = None, **more: Any) -> tuple:
        """A combine of the experts' rows."""
        drawn = self._work.drawn
        return self._work.buffer.low_latency_combine(
            self.rows, drawn.topk_idx, drawn.topk_weights, handle or self._handle, out=self._out, **more
        )

    def zero_copy_combine(self, handle: tuple | None = None) -> tuple:
        """The same, of rows that lie in the zero-copy tensor already."""
        handle = handle or self._handle
        self._work.buffer.get_next_low_latency_combine_buffer(handle)
        return self.combine(handle, zero_copy=True)

    def both(self, *, zero_copy: bool) -> tuple:
        """A dispatch, and a combine along its handle."""
        handle = self.dispatch()[2]
        return self.zero_copy_combine(handle) if zero_copy else self.combine(handle)

    def of(self, operation: str) -> Callable[[], tuple]:
        """The call of an operation. Its zero-copy tensors are filled: no other combine may come between its calls."""
        if "zero" in operation:
            self._fill_slots()
        calls: dict[str, Callable[[], tuple]] = {
            "dispatch": self.dispatch,
            "combine": self.combine,
            "combine-zero": self.zero_copy_combine,
            "combine-logfmt": partial(self.combine, use_logfmt=True),
            "both": partial(self.both, zero_copy=False),
            "both-zero": partial(self.both, zero_copy=True),
        }
        return calls[operation]

    def send_half(self, operation: str) -> tuple[tuple, Callable[[], None]]:
        """Only send. Returns what the call returned, and the hook that receives."""
        result = (
            self.dispatch(return_recv_hook=True) if operation == "dispatch" else self.combine(return_recv_hook=True)
        )
        return result, result[-1]

    def is_right(self, operation: str, call: Callable[[], tuple]) -> bool:
        """Make a call of an operation, and judge what it delivered."""
        self._out.fill_(float("nan"))
        result = call()
        if operation == "dispatch":
            return is_sent(self._work, sent_of(result))
        return is_combined(self._work, result[0], is_lossy=operation == "combine-logfmt")


def sent_of(result: tuple) -> Delivered:
    """What a dispatch of the product delivered."""
    (x, scales), _, handle, *_ = result
    return Delivered(x, scales, *handle[:2])


class Captured:
    """Calls back to back in a CUDA graph.

    Args:
        call: What it calls, `NUM_IN_GRAPH` times.
    """

    def __init__(self, call: Callable[[], tuple]):
        for _ in range(3):
            call()
        _line_up()
        self._graph = torch.cuda.CUDAGraph()
        self._result: tuple | None = None
        with torch.cuda.graph(self._graph):
            for _ in range(NUM_IN_GRAPH):
                self._result = None  # its memory is the next call's
                self._result = call()
        _line_up()

    def __call__(self) -> tuple:
        """Replay. Returns what the last call of the graph delivers."""
        self._graph.replay()
        assert self._result is not None
        return self._result


def _line_up() -> None:
    torch.cuda.synchronize()
    dist.barrier()


# Clocks --------------------------------------------------------------------------------------------------------------


def of_each_in_graph(stopwatch: Stopwatch) -> Stopwatch:
    """Seconds of one call of a graph."""
    return lambda call: stopwatch(call) / NUM_IN_GRAPH


def of_send(stopwatch: Stopwatch) -> Stopwatch:
    """Seconds of a call that returns its hook; the hook is called, too, but later."""

    def measure(send: Callable[[], Any]) -> float:
        sent: list[Any] = []
        elapsed = stopwatch(lambda: sent.append(send()))
        sent[0][1]()
        return elapsed

    return measure


def of_receive(stopwatch: Stopwatch) -> Stopwatch:
    """Seconds of the hook, when all ranks have sent."""

    def measure(send: Callable[[], Any]) -> float:
        result, hook = send()
        elapsed = stopwatch(hook)
        del result
        return elapsed

    return measure
