"""What each rank of a soak does: segment after segment, with buffers of its own for each."""

from __future__ import annotations

import functools
import os
import time
import traceback
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from ... import env
from ...buffers.legacy import Buffer
from ...errors import EPError
from . import low_latency
from .checks import Mismatch, memfds_left, require_nothing_left, threads_left
from .faults import Delays
from .memory import Sample, private_bytes
from .plan import Goal, PlanSegment, calls_to_play, plan_calls, plan_segment
from .play import play_calls
from .seeds import mixed
from .state import State

_REMOTE_BYTES = {"cpu": 0, "interpreter": 4 << 20, "cuda": 128 << 20}  # for rows between nodes, where kernels send them
_SAMPLE_SECS, _MOST_SAMPLES = 0.5, 1000
_MOST_TEXT = 2000  # a note must fit into PIPE_BUF (4 KB): all ranks write into one pipe, and so each note stays whole


@dataclass(frozen=True)
class SoakFailure:
    """What went wrong on a rank.

    Attributes:
        rank: Where.
        segment: In which segment.
        call_idx: At which of its calls; a result of an earlier one may have been looked at only then.
        num_calls: Calls that the segment was to have; None: all that are planned.
        is_cause: Whether this rank saw a wrong result, and did not just hear from others.
        text: What happened.
    """

    rank: int
    segment: int
    call_idx: int
    num_calls: int | None
    is_cause: bool
    text: str


@dataclass(frozen=True)
class SoakNote:
    """What a rank tells while it runs."""

    rank: int
    pid: int
    segment: int
    num_bytes: int
    sample: Sample
    failure: SoakFailure | None = None


@dataclass
class RankReport:
    """What a rank did.

    Attributes:
        calls: By kind.
        paths: Calls by the path they took, as `Buffer.stats` has them.
        num_rounds: Of all calls.
        num_bytes: Of rows that it sent.
        num_segments: That it began.
        num_delays: That it made.
        samples: Its memory over time.
        arena_used_bytes: Left in the arena of the last buffer, when everything had been dropped.
        threads_left: Names of our threads at the end.
        memfds_left: Our descriptors and mappings at the end.
        failure: Why it ended early, if it did.
    """

    calls: Counter[str] = field(default_factory=Counter)
    paths: Counter[str] = field(default_factory=Counter)
    num_rounds: int = 0
    num_bytes: int = 0
    num_segments: int = 0
    num_delays: int = 0
    samples: list[Sample] = field(default_factory=list)
    arena_used_bytes: int = 0
    threads_left: list[str] = field(default_factory=list)
    memfds_left: int = 0
    failure: SoakFailure | None = None


def play_rank(rank: int, num_ranks: int, goal: Goal, news: Connection) -> RankReport:
    """Play a soak on one rank of the default group; `run_ranks` calls it."""
    del num_ranks  # the goal has it
    return _Player(rank, goal, news).play()


class _Player:
    def __init__(self, rank: int, goal: Goal, news: Connection):
        self.rank = rank
        self.goal = goal
        self.news = news
        self.report = RankReport()
        self.segment = goal.segment or 0
        self.call_idx = 0
        self.is_over = False  # a rank has failed, and all know
        self.begin = time.monotonic()
        self.next_sample_secs = 0.0
        self.pause_secs = max(_SAMPLE_SECS, (goal.secs or 0.0) / _MOST_SAMPLES)
        if goal.device == "cuda":
            torch.cuda.set_device(rank % torch.cuda.device_count())
        elif goal.device == "interpreter":
            Buffer.set_num_sms(2)  # the interpreter takes as long for a block that has nothing to do

    def play(self) -> RankReport:
        self.sample(None)
        while (num_calls := self.agree()) > 0:
            segment = self.next_segment()
            self.segment, self.call_idx = segment.number, 0
            self.report.num_segments += 1
            try:
                self.play_segment(segment, num_calls)
            except Exception as error:
                is_cut = num_calls < segment.num_calls
                self.fail(error, num_calls if is_cut else None)
        self.sample(None)
        self.report.threads_left, self.report.memfds_left = threads_left(), memfds_left()
        return self.report

    def next_segment(self) -> PlanSegment:
        return plan_segment(self.goal, (self.goal.segment or 0) + self.report.num_segments)

    def agree(self) -> int:
        """How many calls come next; 0 where time is up, or a rank has failed. Rank 0 looks at the clock for all."""
        if self.is_over:
            return 0
        num_done = self.report.calls.total()
        if self.goal.segment is not None and self.report.num_segments:
            wanted = 0
        else:
            wanted = calls_to_play(self.goal, self.next_segment(), num_done, self.secs())
        return self.gather(wanted)

    def gather(self, wanted: int) -> int:
        """Gather what all ranks want; that of rank 0, or 0 where a rank has failed."""
        answers: list[Any] = [None] * self.goal.num_ranks
        # A rank that cannot be met hangs or is dead. What this one raises then ends them all.
        dist.all_gather_object(answers, (self.report.failure is None, wanted))
        return answers[0][1] if all(is_well for is_well, _ in answers) else 0

    def barrier(self) -> None:
        """Wait for all ranks in the middle of a segment. One that has failed meets the others in `agree` instead."""
        if not self.gather(1):
            self.is_over = True
            raise EPError("soak: another rank has failed")

    def play_segment(self, segment: PlanSegment, num_calls: int) -> None:
        os.environ[env.ARENA_BYTES.name] = str(segment.arena_limits[self.rank])
        os.environ[env.POSTED_BYTES.name] = str(segment.posted_limits[self.rank])
        delays = Delays(segment.delay_share, mixed(segment.seed, self.rank))
        make_buffer = functools.partial(self.make_buffer, segment, delays)
        state = State(make_buffer(), segment.seed, segment.limits, make_buffer)
        state.fault, state.barrier = delays, self.barrier
        try:
            self.make_calls(state, segment, num_calls, delays)
        finally:
            state.buffer.destroy()
        del state
        require_nothing_left()

    def make_buffer(self, segment: PlanSegment, delays: Delays) -> Buffer:
        has_low_latency = self.goal.has_low_latency
        num_rdma_bytes = low_latency.hint(self.goal.num_ranks) if has_low_latency else 0
        if self.goal.ranks_per_node:
            num_rdma_bytes += _REMOTE_BYTES[self.goal.device]
        buffer = Buffer(
            dist.group.WORLD,
            segment.num_nvl_bytes,
            num_rdma_bytes,
            low_latency_mode=has_low_latency,
            explicitly_destroy=True,
            enable_shrink=has_low_latency and segment.has_masks,
            device="cuda" if self.goal.device == "cuda" else "cpu",
            num_cpu_timeout_secs=self.goal.limit_secs,
            num_gpu_timeout_secs=self.goal.limit_secs,
        )
        buffer.set_fault_hook(delays)
        return buffer

    def make_calls(self, state: State, segment: PlanSegment, num_calls: int, delays: Delays) -> None:
        self.next_sample_secs = 0.0  # each segment is told of at once
        try:
            for call in play_calls(state, plan_calls(self.goal, segment, num_calls)):
                self.call_idx = call.number
                delays("before a call")
                if self.secs() >= self.next_sample_secs:
                    self.sample(state)
            state.finish()
        finally:
            self.report.num_delays += delays.num_delays
            self.count(state)

    def count(self, state: State) -> None:
        """Add a segment to the report, as far as it came."""
        self.report.calls.update(state.report.calls)
        every = state.report.past_stats
        with suppress(EPError):  # a buffer that has failed tells nothing any more
            every.append(state.buffer.stats())
            self.report.arena_used_bytes = every[-1]["arena"]["used"]
        for stats in every:
            self.report.paths.update(stats["calls"])
            self.report.num_rounds += stats["rounds"]
            self.report.num_bytes += sum(stats["bytes_to"])

    def sample(self, state: State | None) -> None:
        """Look at the memory, and tell of it."""
        num_calls, num_bytes, committed_bytes = self.report.calls.total(), self.report.num_bytes, 0
        if state is not None:
            stats = state.buffer.stats()
            num_calls += sum(state.report.calls.values())
            num_bytes += sum(stats["bytes_to"])
            committed_bytes = stats["arena"]["committed"]
        sample = Sample(self.secs(), num_calls, private_bytes(), committed_bytes)
        self.report.samples.append(sample)
        self.news.send(SoakNote(self.rank, os.getpid(), self.segment, num_bytes, sample))
        self.next_sample_secs = self.secs() + self.pause_secs

    def fail(self, error: Exception, num_calls: int | None) -> None:
        """Keep what went wrong, and tell of it at once: another rank may hang, and then no report comes."""
        is_known = isinstance(error, Mismatch | EPError)
        # Of a traceback the end says most.
        text = f"{type(error).__name__}: {error}"[:_MOST_TEXT] if is_known else traceback.format_exc()[-_MOST_TEXT:]
        is_cause = not isinstance(error, EPError)
        failure = SoakFailure(self.rank, self.segment, self.call_idx, num_calls, is_cause, text)
        self.report.failure = failure
        self.news.send(SoakNote(self.rank, os.getpid(), self.segment, 0, self.report.samples[-1], failure))

    def secs(self) -> float:
        return time.monotonic() - self.begin
