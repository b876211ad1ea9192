"""`Buffer.join` and `Buffer.replace`: a new process takes the position of a rank that has ended."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist

from ..control import Control
from ..errors import EPError, account, named
from ..generation import Generation, check_store
from ..log import log_event
from ..reaper import Closing
from ..topology import Topology
from ..trace import Trace
from ..transport.window import GONE_ON
from . import checks
from .engines import Engine
from .registry import ForkedLock

B = TypeVar("B", bound="ReplacingMethods")


class Generated(NamedTuple):
    """What a generation of a buffer consists of, on one rank.

    Attributes:
        number: The number of the generation.
        topology: Where this rank stands.
        engine: The engine, with all memory and all links.
        transport: A line that describes how it reaches its peers.
        trace: Where calls are recorded; None: nowhere.
    """

    number: int
    topology: Topology
    engine: Engine
    transport: str
    trace: Trace | None


class Terms(NamedTuple):
    """The arguments of a buffer in which all ranks must agree; in the sizes only if they make a generation of it."""

    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_mode: bool
    enable_shrink: bool
    device: str


class ReplacingMethods:
    """Methods of `Buffer` that make a new generation of it over a store."""

    rank: int
    group_size: int
    group: Any
    _process_group: dist.ProcessGroup | None
    generation: int
    device: torch.device
    num_nvl_bytes: int
    num_rdma_bytes: int
    low_latency_mode: bool
    enable_shrink: bool
    _limit_secs: float
    _lock: threading.RLock | ForkedLock
    _engine: Engine
    _trace: Trace | None
    _finalizer: Closing

    @classmethod
    def join(
        cls: type[B],
        store: dist.Store,
        rank: int,
        num_ranks: int,
        *,
        timeout_secs: float | None = None,
        **arguments: Any,
    ) -> B:
        """Make a buffer over a store instead of a group: in a new process that takes the position of a rank.

        The ranks that live call `replace` meanwhile. All ranks may also call this at the start of a job; then no
        process group is needed at all.

        Have everything ready before: weights are loaded first, since the other ranks stand still in `replace`.
        `get_joining_ranks` tells them when to call it.

        Args:
            store: A `TCPStore`, `FileStore` or `PrefixStore` that all ranks reach. Its host should be no rank: a store
                ends with its host. Buffers that share a store need a `PrefixStore` each. No other thread may wait for
                a key in it meanwhile: a connection serves one request at a time.
            rank: The rank that this process becomes.
            num_ranks: How many ranks there are.
            timeout_secs: Seconds to wait for the other ranks; default: `num_cpu_timeout_secs`.
            arguments: Those of `Buffer`, except `group` and `comm`. The sizes, `low_latency_mode`, `enable_shrink` and
                the device must be as on the other ranks.

        Returns:
            The buffer, in step with all ranks: the next call of each is its first.

        Raises:
            EPTimeout: Not all ranks came; the message names them. Call it again: the next attempt is another
                generation.
            EPError: The rank has been taken by another process, or the arguments do not agree.
            EPUnsupported: The ranks are GPUs of several nodes.
        """
        where = "Buffer.join"
        num_ranks = checks.check_int(where, "num_ranks", num_ranks, 1)
        rank = checks.check_int(where, "rank", rank, 0)
        if rank >= num_ranks:
            raise ValueError(f"{where}: `rank` must be below num_ranks={num_ranks}, got {rank}")
        for name in ("group", "comm"):
            if name in arguments:
                raise TypeError(f"{where}: `{name}` cannot be given: the ranks meet over `store`")
        own_store = check_store(where, store)
        limit_secs = checks.check_secs(where, "num_cpu_timeout_secs", arguments.get("num_cpu_timeout_secs"))
        if timeout_secs is not None:
            limit_secs = checks.check_secs(where, "timeout_secs", timeout_secs)
        generation = Generation.enter(where, own_store, rank, num_ranks, limit_secs, None)
        generation.joint_secs = limit_secs
        with _settling(where, generation):
            return cast(Any, cls)(None, comm=generation, **arguments)

    def replace(self, store: dist.Store, *, timeout_secs: float | None = None) -> None:
        """Make a new generation of this buffer, together with new processes that call `join`.

        All ranks that live call it, between calls. The buffer then has new memory, words and links; numbers of calls,
        masks and statistics begin anew. Tensors that were received before stay valid. Handles and hooks of earlier
        calls do not: make those calls again. CUDA graphs hold the memory of their generation: capture them anew. A
        buffer that has failed works again. `group` becomes None.

        If it raises, the buffer is as it was before: with masks, calls can go on without the rank that has ended.
        All ranks raise then; call it again, and the next attempt is another generation.

        Args:
            store: As in `join`.
            timeout_secs: Seconds to wait for the other ranks; default: the limit of the buffer.

        Raises:
            EPTimeout: Not all ranks came; the message names them.
            EPClosed: The buffer was destroyed, or another process has taken the position of this one.
            EPError: The arguments of a rank do not agree with those of the others.
            EPUnsupported: The ranks are GPUs of several nodes.
        """
        where = "replace"
        with self._lock:
            self._require_open(where)
            own_store = check_store(where, store)
            limit_secs = self._limit_secs
            if timeout_secs is not None:
                limit_secs = checks.check_secs(where, "timeout_secs", timeout_secs)
            generation = Generation.enter(where, own_store, self.rank, self.group_size, limit_secs, self.generation)
            generation.joint_secs = limit_secs
            with _settling(where, generation):
                control = Control(None, generation, self._limit_secs)
                with control.joint("replace: making the buffer anew"):
                    made = self._make(control)
                self._go_on_in(made)

    @staticmethod
    def get_joining_ranks(store: dist.Store) -> list[int]:
        """Return the ranks whose processes wait in `join`, or in `replace`, for the others.

        It does not wait for a rank, but takes up to a second, since it looks for signs of life, of which a process that
        waits gives five in a second. One that has ended is not returned. Call it where nothing waits: not in a step.

        Args:
            store: As in `join`.

        Raises:
            EPTransportError: The store does not answer.
        """
        where = "Buffer.get_joining_ranks"
        return Generation.waiting(where, check_store(where, store))

    # Inside ----------------------------------------------------------------------------------------------------------

    def _require_open(self, where: str) -> None:
        raise NotImplementedError

    def _make(self, control: Control) -> Generated:
        raise NotImplementedError

    def _install(self, made: Generated) -> None:
        raise NotImplementedError

    def _go_on_in(self, made: Generated) -> None:
        """Leave the generation before, for good, and use a new one."""
        engine, trace, finalizer = self._engine, self._trace, self._finalizer
        try:
            self._install(made)
            self.group = self._process_group = None  # a member of it has ended
            # A process that was taken for ended, and still waits in a call, learns it. Nothing is waited for here.
            engine.abandon(f"{GONE_ON} generation {made.number} of the buffer: earlier ones are not used any more")
        finally:  # an interrupt may have come before the new generation was installed
            left: tuple[Engine, Trace | None] = (made.engine, made.trace)
            if self._engine is made.engine:
                left = (engine, trace)
                finalizer.detach()
            Closing(self, functools.partial(_close_generation, *left)).close_soon()

    def _require_same_terms(self, control: Control) -> None:
        """Compare the arguments of all ranks.

        Raises:
            EPError: They differ; the message names the argument, the ranks and the values.
        """
        sizes = (self.num_nvl_bytes, self.num_rdma_bytes) if control.generation else (0, 0)
        mine = Terms(*sizes, bool(self.low_latency_mode), bool(self.enable_shrink), self.device.type)
        terms = [Terms(*one) for one in control.gather(tuple(mine), "comparing arguments")]
        for name, values in zip(Terms._fields, zip(*terms, strict=True), strict=True):
            if len(set(values)) > 1:
                raise EPError(f"Buffer: `{name}` must be the same on all ranks, {_differing(values)}")


@contextlib.contextmanager
def _settling(where: str, generation: Generation) -> Iterator[None]:
    """A context manager around the making of a generation: how it ends is recorded in the store, and logged."""
    me, begun = f"rank {generation.rank}/{generation.num_ranks}", time.monotonic()
    try:
        yield
    except BaseException as error:
        generation.settle(error)
        log_event(logging.WARNING, f"{where}: generation {generation.number} was not made: {account(error)} ({me})")
        raise
    generation.settle()
    secs = time.monotonic() - begun
    log_event(logging.INFO, f"{where}: generation {generation.number} is made, after {secs:.2g} s ({me})")


def _differing(values: Sequence[Any]) -> str:
    """Return which ranks have another value than most, for a sentence."""
    usual, _ = Counter(values).most_common(1)[0]
    others = [
        f"it is {value} on {named([rank for rank, one in enumerate(values) if one == value])}"
        for value in dict.fromkeys(values)
        if value != usual
    ]
    return f"{', '.join(others)}, and {usual} on the others"


def _close_generation(engine: Engine, trace: Trace | None, is_quiet: bool) -> None:
    """Close what a generation has left behind. Runs on the reaper's thread."""
    del is_quiet
    engine.forget()
    if trace is not None:
        trace.close(engine.stats())
