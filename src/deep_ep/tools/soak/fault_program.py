"""What each rank of a fault plan runs: a buffer, some calls that are compared exactly, the fault, and what comes after.

The calls of a program are numbered, and the number is in the values, so that rows of another call are noticed.
"""

from __future__ import annotations

import faulthandler
import os
import threading
import time
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ... import env
from ...buffers.elastic import ElasticBuffer, EPHandle
from ...buffers.legacy import Buffer
from ...errors import EPError
from ...event import EventHandle, EventOverlap
from .checks import Mismatch, held, left_since, same
from .faults import Fault
from .low_latency import check_packed
from .plans import ELASTIC_OPERATIONS, HANG_SECS, POINT_NAMES, FaultPlan

_TOKENS, _HIDDEN, _TOPK, _EXPERTS_PER_RANK = 8, 256, 2, 2
_GROWTH_HIDDEN = 1 << 16  # a call receives more than a segment of the arena holds, and the program keeps it
_STEP_VALUE = 16  # between the values of two calls; BF16 has all whole numbers up to 256
_FIRST_STEPS, _STRETCH_STEPS, _LAST_STEPS = 3, 10, 2
_GATE_SECS = 0.05  # that a queued call waits before it starts, and with it what is queued behind it
_GO_ON_LIMIT_SECS = 20.0
_DUMP_SECS = HANG_SECS - 3.0  # a rank that still runs then shows where


@dataclass
class Account:
    """What a rank saw.

    Attributes:
        error: Kind and text of the first error that its program got from the buffer; empty: none.
        is_ep_error: Whether it was one of ours.
        error_secs: When, on the clock that all processes of a host share.
        refusal: Kind of the error of one more call on the buffer that had failed.
        ending: Of the program: `completed`, `failed`, or, where it was interrupted, `left` if it gave its buffer up.
        wrong: Results that differ from what must come, or that changed later, and what else must not happen.
        left: What the process still held when the buffer was closed and its tensors were gone.
    """

    error: str = ""
    is_ep_error: bool = True
    error_secs: float = 0.0
    refusal: str = ""
    ending: str = "completed"
    wrong: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)

    def fail(self, error: BaseException) -> None:
        """Keep an error as text: the object would hold the buffer."""
        self.error, self.error_secs = f"{type(error).__name__}: {error}", time.monotonic()
        self.is_ep_error, self.ending = isinstance(error, EPError), "failed"


class LostResultError(Exception):
    """An interrupted call has ended, and its result is lost: the program cannot make the calls that need it."""


# The calls -----------------------------------------------------------------------------------------------------------


class RankRouting(NamedTuple):
    """Where the tokens of a rank go."""

    topk_idx: torch.Tensor
    num_experts: int
    is_token_in_rank: torch.Tensor


@cache
def routing_of(rank: int, num_ranks: int) -> RankRouting:
    """The routing of a rank, which is that of all its calls."""
    generator = torch.Generator().manual_seed(rank)
    num_experts = _EXPERTS_PER_RANK * num_ranks
    topk_idx = torch.rand(_TOKENS, num_experts, generator=generator).topk(_TOPK).indices
    mask = torch.stack([(topk_idx // _EXPERTS_PER_RANK == one).any(1) for one in range(num_ranks)], 1)
    return RankRouting(topk_idx, num_experts, mask)


def tokens_of(rank: int, step: int, hidden: int) -> torch.Tensor:
    """[T, H]: what a rank sends in a step. Whole numbers, so that sums are exact in any order."""
    generator = torch.Generator().manual_seed(100 + rank)
    return torch.randint(-8, 8, (_TOKENS, hidden), generator=generator).float() + _STEP_VALUE * step


class FaultProgram:
    """The calls of one rank over one buffer, with what must come of them.

    Args:
        buffer: This rank's buffer.
        op: The operation, as plans name it.
        way: How it stands to the caller, likewise.
        is_gated: Whether the calls that others are queued behind wait for a moment before they start.
    """

    def __init__(self, buffer: Buffer, op: str, way: str, is_gated: bool = False):
        self._buffer, self._op, self._way, self._is_gated = buffer, op, way, is_gated
        self._rank, self._num_ranks = buffer.rank, buffer.group_size
        self._hidden = _GROWTH_HIDDEN if op == "growth" else _HIDDEN
        self._routing = routing_of(self._rank, self._num_ranks)
        self._handle: Any = None  # a tuple, or an EPHandle
        self._rows: torch.Tensor | None = None  # in the window, for a combine
        self._kept: list[tuple[str, torch.Tensor, torch.Tensor]] = []

    def step(self, step: int, done: int = 0) -> Callable[[], None]:
        """Make the calls of a step.

        Args:
            step: Its number; step 0 is the dispatch whose handle the others use.
            done: How many of its calls have been made already.

        Returns:
            What waits for them and checks them.
        """
        if self._op.startswith("ll-"):
            return self._low_latency_step(step)
        if step == 0:
            return self._expanded_dispatch(0) if self._op in ELASTIC_OPERATIONS else self._dispatch(0, {})
        if self._handle is None:
            raise LostResultError
        checks = []
        if self._is_queued and not done:
            combine = self._expanded_combine if self._op in ELASTIC_OPERATIONS else self._combine
            checks.append(combine(step, {"async_finish": True, "previous_event": self._gate()}))
        after: dict[str, Any] = {"async_finish": self._way in ("async", "queued")}
        if self._op == "combine":
            checks.append(self._combine(step, after))
        elif self._op == "expanded":
            checks.append(self._expanded_dispatch(step, after["async_finish"]))
        elif self._op == "expanded-combine":
            checks.append(self._expanded_combine(step, after))
        elif self._op == "cached":
            x = tokens_of(self._rank, step, self._hidden)
            recv_x, *_, event = self._buffer.dispatch(x, handle=self._handle, **after)
            checks.append(self._rows_check(step, recv_x, event))
        elif self._op == "worst-case":
            checks.append(self._dispatch(step, {"num_worst_tokens": _TOKENS * self._num_ranks, **after}))
        else:
            checks.append(self._dispatch(step, after))

        def check() -> None:
            for one in checks:
                one()

        return check

    def resume(self, step: int, num_before: int) -> int | None:
        """After an interruption: how many calls of the step have been made. None: all of them.

        Raises:
            LostResultError: The program cannot go on.
        """
        num_made = self.num_made() - num_before
        if num_made and (self._op.startswith("ll-") or step == 0):
            raise LostResultError
        return num_made if num_made < 1 + (self._is_queued and step > 0) else None

    def num_made(self) -> int:
        """Calls that this rank has made and ended, after waiting for what is queued."""
        self._buffer.get_comm_stream().synchronize()
        if self._op.startswith("ll-"):
            return self._buffer._engine.window.board.sent.load_acquire()
        return sum(self._buffer.stats()["calls"].values())

    def check_kept(self) -> None:
        """Compare what was received, and kept, with what it was.

        Raises:
            Mismatch: It has changed.
        """
        for name, tensor, copy in self._kept:
            same(f"{name}, which was kept,", tensor, copy)

    @property
    def _is_queued(self) -> bool:
        return self._way in ("queued", "behind")

    def _gate(self) -> EventHandle | None:
        """An event of the caller that comes in a moment."""
        if not self._is_gated:
            return None
        gate: Future[None] = Future()
        timer = threading.Timer(_GATE_SECS, gate.set_result, [None])
        timer.daemon = True
        timer.start()
        return EventHandle(gate)

    def _dispatch(self, step: int, more: dict[str, Any]) -> Callable[[], None]:
        per_rank, per_node, per_expert, mask, _ = self._buffer.get_dispatch_layout(
            self._routing.topk_idx, self._routing.num_experts
        )
        recv_x, *_, handle, event = self._buffer.dispatch(
            tokens_of(self._rank, step, self._hidden),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=mask,
            num_tokens_per_expert=per_expert,
            topk_idx=self._routing.topk_idx,
            topk_weights=torch.ones(_TOKENS, _TOPK),
            **more,
        )
        if step == 0:
            assert isinstance(recv_x, torch.Tensor)
            self._handle, self._rows = handle, recv_x
        return self._rows_check(step, recv_x, event)

    def _rows_check(self, step: int, recv_x: Any, event: EventOverlap) -> Callable[[], None]:
        def check() -> None:
            _wait(event)
            expected = self._expected_rows(step)
            same(f"recv_x of step {step}", recv_x[: len(expected)], expected)
            if recv_x is not self._rows:  # which combines write
                self._kept.append((f"recv_x of step {step}", recv_x, recv_x.clone()))

        return check

    def _combine(self, step: int, after: dict[str, Any]) -> Callable[[], None]:
        assert self._rows is not None
        assert self._handle is not None
        rows = self._rows.copy_(self._expected_rows(step))
        # In turns the rows lie in the window, where peers read them, and elsewhere, and are copied in.
        sums, _, event = self._buffer.combine(rows if step % 2 else rows.clone(), self._handle, **after)

        def check() -> None:
            _wait(event)
            times = self._routing.is_token_in_rank.sum(1, keepdim=True)
            same(f"combined_x of step {step}", sums, tokens_of(self._rank, step, self._hidden) * times)
            self._kept.append((f"combined_x of step {step}", sums, sums.clone()))

        return check

    def _expected_rows(self, step: int) -> torch.Tensor:
        sources = range(self._num_ranks)
        masks = [routing_of(source, self._num_ranks).is_token_in_rank[:, self._rank] for source in sources]
        return torch.cat(
            [tokens_of(source, step, self._hidden)[mask] for source, mask in zip(sources, masks, strict=True)]
        )

    def _expanded_dispatch(self, step: int, is_async: bool = False) -> Callable[[], None]:
        """A dispatch of an `ElasticBuffer` over the same buffer, with a row for each selection."""
        recv_x, _, _, handle, event = ElasticBuffer.from_buffer(self._buffer, _TOKENS).dispatch(
            tokens_of(self._rank, step, self._hidden),
            self._routing.topk_idx,
            torch.ones(_TOKENS, _TOPK),
            num_experts=self._routing.num_experts,
            do_expand=True,
            async_with_compute_stream=is_async,
        )
        assert isinstance(recv_x, torch.Tensor)
        if step == 0:
            self._handle, self._rows = handle, recv_x

        def check() -> None:
            _wait(event)
            same(f"recv_x of step {step}", recv_x, self._expanded_rows(step))
            if recv_x is not self._rows:
                self._kept.append((f"recv_x of step {step}", recv_x, recv_x.clone()))

        return check

    def _expanded_combine(self, step: int, after: dict[str, Any]) -> Callable[[], None]:
        assert self._rows is not None
        assert isinstance(self._handle, EPHandle)
        rows = self._rows.copy_(self._expanded_rows(step))
        sums, _, event = ElasticBuffer.from_buffer(self._buffer, _TOKENS).combine(
            rows,
            self._handle,
            previous_event=after.get("previous_event"),
            async_with_compute_stream=after["async_finish"],
        )

        def check() -> None:
            _wait(event)
            same(f"combined_x of step {step}", sums, tokens_of(self._rank, step, self._hidden) * _TOPK)
            self._kept.append((f"combined_x of step {step}", sums, sums.clone()))

        return check

    def _expanded_rows(self, step: int) -> torch.Tensor:
        """By expert of this rank, by source, by token."""
        sources = range(self._num_ranks)
        ids = [routing_of(source, self._num_ranks).topk_idx for source in sources]
        first = self._rank * _EXPERTS_PER_RANK
        return torch.cat(
            [
                tokens_of(source, step, self._hidden)[(ids[source] == expert).any(1)]
                for expert in range(first, first + _EXPERTS_PER_RANK)
                for source in sources
            ]
        )

    def _low_latency_step(self, step: int) -> Callable[[], None]:
        """A dispatch and its combine. The combine needs the result of the dispatch, so that is checked here."""
        num_experts = self._routing.num_experts
        xs = [tokens_of(rank, step, self._hidden).bfloat16() for rank in range(self._num_ranks)]
        ids = [routing_of(rank, self._num_ranks).topk_idx for rank in range(self._num_ranks)]
        way: dict[str, Any] = {"async": {"async_finish": True}, "hook": {"return_recv_hook": True}}.get(self._way, {})
        x, idx = xs[self._rank].clone(), self._routing.topk_idx
        got = self._buffer.low_latency_dispatch(x, idx, _TOKENS, num_experts, use_fp8=False, **way)
        _wait(got[3], got[4])
        recv_x = got[0]
        assert isinstance(recv_x, torch.Tensor)
        check_packed(recv_x, None, *got[1:3], xs, None, ids, self._rank)
        weights = torch.ones(_TOKENS, _TOPK)
        sums, event, hook = self._buffer.low_latency_combine(recv_x.clone(), idx, weights, got[2], **way)

        def check() -> None:
            _wait(event, hook)
            same(f"combined_x of step {step}", sums, (_TOPK * xs[self._rank].float()).bfloat16())
            self._kept.append((f"combined_x of step {step}", sums, sums.clone()))

        return check


def _wait(event: EventOverlap, hook: Callable[[], None] | None = None) -> None:
    if hook is not None:
        hook()
    elif event.event is not None:
        event.current_stream_wait()


# A rank --------------------------------------------------------------------------------------------------------------


def play_plan(rank: int, num_ranks: int, plan: FaultPlan, news: Connection, folder: str) -> Account:
    """Play a plan on one rank of the default group; `run_ranks` calls it.

    Args:
        rank: This rank.
        num_ranks: Ranks of the group.
        plan: The plan.
        news: Hears of the fault.
        folder: A rank that hangs writes its threads' stacks into a file there.
    """
    del num_ranks  # the plan has it
    warnings.simplefilter("ignore")  # that calls are staged
    with open(f"{folder}/rank-{rank}", "w") as stacks:
        faulthandler.dump_traceback_later(_DUMP_SECS, file=stacks)
        try:
            return _play(rank, plan, Fault(plan, rank, news))
        finally:
            faulthandler.cancel_dump_traceback_later()


def _play(rank: int, plan: FaultPlan, fault: Fault) -> Account:
    # A group of its own for those that go on: a collective of the other one may be left half way.
    group = dist.new_group(plan.survivors, timeout=timedelta(seconds=_GO_ON_LIMIT_SECS))
    dist.barrier()
    before, account = held(), Account()
    _use_buffer(plan, fault, account)
    fault.wait()  # a rank that is to be killed does not go on
    account.left = left_since(before)
    if rank in plan.survivors:
        try:
            _go_on(group)
        except Exception as error:
            account.wrong.append(f"survivors cannot go on: {type(error).__name__}: {error}")
    return account


def _use_buffer(plan: FaultPlan, fault: Fault, account: Account) -> None:
    """Construct, call, destroy. Nothing of the buffer is held when this returns."""
    try:
        with fault.interruptible(), fault.in_construction():
            buffer = _make_buffer(dist.group.WORLD, plan.limit_secs, plan.is_low_latency)
    except (Exception, KeyboardInterrupt) as error:
        account.fail(error)
        return
    program = FaultProgram(buffer, plan.op, plan.way, fault.is_mine)
    _make_calls(program, plan, fault, account, buffer)
    _check_kept(program, account, "before destroy()")
    if account.error:
        account.refusal = _refusal_of(program)
    _close(buffer, fault, account)
    _check_kept(program, account, "after destroy()")


def _make_buffer(group: Any, limit_secs: float, is_low_latency: bool) -> Buffer:
    num_ranks = dist.get_world_size(group)
    hint = Buffer.get_low_latency_rdma_size_hint(_TOKENS, _HIDDEN, num_ranks, _EXPERTS_PER_RANK * num_ranks)
    return Buffer(
        group,
        0,
        2 * hint if is_low_latency else 0,
        low_latency_mode=is_low_latency,
        explicitly_destroy=True,
        device="cpu",
        num_cpu_timeout_secs=limit_secs,
    )


def _make_calls(program: FaultProgram, plan: FaultPlan, fault: Fault, account: Account, buffer: Buffer) -> None:
    """Make the calls before, during and after the fault, until one fails."""
    name = POINT_NAMES.get(plan.op, plan.op)
    is_armed = False

    def reach(point: str) -> None:
        operation, _, rest = point.partition(": ")
        if is_armed and operation == name:
            fault.reach("call", rest.replace(" ", "-"))

    buffer.set_fault_hook(reach)
    phase = plan.moment.phase
    num_steps = _STRETCH_STEPS if phase == "calls" else _FIRST_STEPS
    try:
        for step in range(num_steps + _LAST_STEPS):
            if step == 1:
                fault.enter("calls")
            if step == num_steps and phase != "destroy":
                fault.wait()  # so that there are calls after the fault, whenever it comes
            is_armed = step == plan.call
            # Calls that are still queued are part of what `destroy` meets.
            is_last = step == num_steps + _LAST_STEPS - 1
            try:
                _make_step(program, step, fault, wait=not (is_last and phase == "destroy"))
            except Mismatch as error:
                account.wrong.append(str(error))  # and on, so that this rank is not taken for one that fails
    except LostResultError:
        account.ending = "left"
    except Exception as error:
        account.fail(error)


def _make_step(program: FaultProgram, step: int, fault: Fault, wait: bool) -> None:
    """Make the calls of a step. After an interruption, make those that have not been made."""
    num_before, done = program.num_made(), 0
    while True:
        try:
            with fault.interruptible():
                check = program.step(step, done)
                if wait:
                    check()
                return
        except KeyboardInterrupt:
            remaining = program.resume(step, num_before)
            if remaining is None:
                return
            done = remaining


def _refusal_of(program: FaultProgram) -> str:
    try:
        program.step(0)()
    except Exception as error:
        return type(error).__name__
    return "none"


def _close(buffer: Buffer, fault: Fault, account: Account) -> None:
    fault.enter("destroy")
    fault.reach("destroy", "before")
    try:
        with fault.interruptible():
            buffer.destroy()
    except KeyboardInterrupt:
        buffer.destroy()
    except Exception as error:
        account.wrong.append(f"destroy() raised {type(error).__name__}: {error}")
    fault.reach("destroy", "after")


def _check_kept(program: FaultProgram, account: Account, when: str) -> None:
    try:
        program.check_kept()
    except Mismatch as error:
        account.wrong.append(f"{when}: {error}")


def _go_on(group: Any) -> None:
    """The ranks that live make a new buffer, and a dispatch and a combine."""
    os.environ[env.RANKS_PER_NODE.name] = "0"  # the ranks that are left may not make whole nodes
    buffer = _make_buffer(group, _GO_ON_LIMIT_SECS, False)
    try:
        program = FaultProgram(buffer, "combine", "sync")
        for step in range(2):
            program.step(step)()
    finally:
        buffer.destroy()
