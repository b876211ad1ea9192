"""Histories of ranks that leave low-latency calls and come back: `soak --returns`.

A history follows from its seed. In each of its episodes one rank leaves: it is stopped past the limit, at any point of
a call; or its caller's code raises between calls; or it is late, and then goes on where it was, out of step; or it is
killed. The others go on without it. Then all ranks make the two calls that take it in again; a rank that was killed is
replaced by a new process, which joins over a store. Whatever happens, every result must be what the oracle makes of the
ranks that are not masked, and behind a return nobody is.

The new processes are started with the ranks, and wait until they are needed.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ... import env
from ...buffers.legacy import Buffer
from ...launch import RankFailed, run_ranks
from ...transport import Window
from .data import Limits
from .low_latency import Round, Sizes, hint
from .program import ProgramCall
from .state import State

STOP, RAISE, LATE, KILL, REPLACE = "is stopped", "raises", "is late", "is killed", "is killed and replaced"
TOPOLOGIES = ((2, 0), (3, 0), (4, 0), (2, 1), (4, 2))  # ranks, ranks per node; 0: one node
LIMIT_SECS = 1.0
_POINTS = ("before sent", "local sent", "after sent", "before receive")
_OPERATIONS = ("low-latency dispatch", "low-latency combine")
_REPLACED_SHARE = 0.35  # of episodes
_MOST_TRIES = 3  # of a return, on a machine that is too busy for the limit
_MEETING_SECS = 60.0
_PAUSE_SECS = 0.005


class Episode(NamedTuple):
    """A rank leaves, and comes back.

    Attributes:
        rank: Who.
        way: How it leaves.
        point: The fault point where it is stopped or killed.
        num_before: Rounds of all ranks before.
        num_missed: Rounds without it.
        num_own: Rounds that it makes out of step, before it comes back.
    """

    rank: int
    way: str
    point: str
    num_before: int
    num_missed: int
    num_own: int


class History(NamedTuple):
    """What happens, as all ranks know it."""

    num_ranks: int
    ranks_per_node: int
    seed: int
    episodes: tuple[Episode, ...]

    def processes(self) -> list[tuple[int, int]]:
        """The rank of every process, and the first episode that it takes part in: the ranks, then the new ones."""
        replaced = [(one.rank, number + 1) for number, one in enumerate(self.episodes) if one.way == REPLACE]
        return [(rank, 0) for rank in range(self.num_ranks)] + replaced

    def mortal(self) -> list[int]:
        """The processes that are killed."""
        holders, dead, num_processes = list(range(self.num_ranks)), [], self.num_ranks
        for one in self.episodes:
            if one.way in (KILL, REPLACE):
                dead.append(holders[one.rank])
            if one.way == REPLACE:
                holders[one.rank], num_processes = num_processes, num_processes + 1
        return dead

    def __str__(self) -> str:
        """For a line: how to play it again."""
        episodes = "; ".join(f"rank {one.rank} {one.way}" for one in self.episodes)
        nodes = f" --ranks-per-node {self.ranks_per_node}" if self.ranks_per_node else ""
        return f"--returns 1 --seed {self.seed} --ranks {self.num_ranks}{nodes} ({episodes})"


class Played(NamedTuple):
    """What came of a history.

    Attributes:
        history: Which.
        error: What went wrong; empty: nothing.
        num_rounds: That all ranks together have made, each compared with the oracle.
        num_degraded: Those of them that had masks.
        num_returns: How often a rank came back.
        return_secs: From the return to the first full result, at most.
        num_replaced: How many of the returns were those of new processes.
    """

    history: History
    error: str
    num_rounds: int = 0
    num_degraded: int = 0
    num_returns: int = 0
    return_secs: float = 0.0
    num_replaced: int = 0


def draw_history(seed: int, num_ranks: int, ranks_per_node: int) -> History:
    """The history of a seed."""
    draw, episodes = random.Random(f"returns {seed}"), []
    for _ in range(draw.randint(1, 3)):
        way = draw.choice((STOP, STOP, RAISE, LATE))
        point = f"{draw.choice(_OPERATIONS)}: {draw.choice(_POINTS)}"
        numbers = (draw.randint(1, 2), draw.randint(1, 5), draw.randint(0, 2))
        episodes.append(Episode(draw.randrange(num_ranks), way, point, *numbers))
    if num_ranks > 2 and draw.random() < 0.3:
        episodes.append(episodes[-1]._replace(rank=draw.randrange(num_ranks), way=KILL))
    # Drawn apart, so that a seed otherwise means what it meant before there were replacements.
    draw = random.Random(f"replacements {seed}")
    for number, one in enumerate(episodes):
        if draw.random() < _REPLACED_SHARE and one.way != KILL:
            episodes[number] = one._replace(way=REPLACE)
    return History(num_ranks, ranks_per_node, seed, tuple(episodes))


def play_histories(histories: Sequence[History], on_played: Callable[[Played], None]) -> list[Played]:
    """Play histories, one after the other.

    Args:
        histories: Which.
        on_played: Told of each.
    """
    results = []
    for history in histories:
        results.append(play_history(history))
        on_played(results[-1])
    return results


def play_history(history: History, limit_secs: float = LIMIT_SECS) -> Played:
    """Play a history with real processes."""
    variables = {env.RANKS_PER_NODE.name: str(history.ranks_per_node)}
    num_processes, may_die = len(history.processes()), history.mortal()
    with tempfile.TemporaryDirectory(prefix="deep_ep-returns-") as folder:
        try:
            args = (history, folder, limit_secs)
            said = run_ranks(_run, num_processes, *args, env=variables, may_die=may_die, limit_secs=180)
        except RankFailed as error:
            return Played(history, str(error))
    numbers = [one for one in said if one is not None]
    rounds, degraded = (sum(one[index] for one in numbers) for index in range(2))
    secs = [secs for one in numbers for secs in one[2]]
    num_returns = len([one for one in history.episodes if one.way != KILL])
    num_replaced = num_processes - history.num_ranks
    return Played(history, "", rounds, degraded, num_returns, max(secs, default=0.0), num_replaced)


# On a rank -----------------------------------------------------------------------------------------------------------


class _LiveRound(Round):
    """A round whose results are those of the masks that the rank has when it gets them."""

    def look_at_masks(self) -> None:
        """Ask the buffer."""
        self.masked = _masked(self.state.buffer)


class _Rank:
    """One rank of a history.

    Args:
        history: The history.
        folder: Where ranks leave signs for each other, outside of the buffer, and the store that they meet over.
        limit_secs: Of waits for a rank that is silent.
        rank: The rank of this process.
        first: The first episode that it takes part in; 0: it is there from the beginning.
        group: The group of the ranks that are.
    """

    def __init__(
        self, history: History, folder: str, limit_secs: float, rank: int, first: int, group: dist.ProcessGroup
    ):
        self._history, self._folder, self._limit_secs = history, Path(folder), limit_secs
        self._rank, self._first = rank, first
        self._store = dist.FileStore(str(self._folder / "store"))
        self._alive = list(range(history.num_ranks))
        arguments: dict[str, Any] = {
            "num_rdma_bytes": hint(history.num_ranks),
            "low_latency_mode": True,
            "explicitly_destroy": True,
            "enable_shrink": True,
        }
        if first:
            episode = first - 1
            self._await(f"missed {episode}", [one for one in self._alive if one != rank])
            self._mark("pid", str(os.getpid()))
            self._buffer = Buffer.join(self._store, rank, history.num_ranks, **arguments)
        else:
            self._mark("pid", str(os.getpid()))
            self._buffer = Buffer(group, **arguments)
        self._shorten_limit()
        self._state = State(self._buffer, history.seed, Limits())
        self.num_rounds = self.num_degraded = 0
        self.return_secs: list[float] = []

    def play(self) -> None:
        """All episodes that this process takes part in."""
        if self._first:
            self._return(self._first - 1, is_in_step=True)
        for number, episode in list(enumerate(self._history.episodes))[self._first :]:
            first = 100 * number
            for index in range(episode.num_before):
                self._round(first + index)
            if self._rank == episode.rank:
                self._leave(number, episode, first + episode.num_before)
            else:
                for index in range(episode.num_missed):
                    self._round(first + episode.num_before + index)
                self._mark(f"missed {number}")
            if episode.way == KILL:
                self._alive.remove(episode.rank)
                continue
            if episode.way == REPLACE:
                self._buffer.replace(self._store)
                self._shorten_limit()
                self._return(number, is_in_step=True)
                continue
            self._meet(number, episode)
            self._return(number)
        self._buffer.destroy()

    def _shorten_limit(self) -> None:
        """Construction takes longer on a busy machine, so the buffer is made with the usual limit."""
        window = self._buffer._engine.window
        assert isinstance(window, Window)
        window.limit_secs = self._limit_secs

    def _leave(self, number: int, episode: Episode, index: int) -> None:
        """Leave, and come back as far as this rank can by itself."""
        if episode.way in (STOP, KILL, REPLACE):
            with _At(self._buffer, episode.point, signal.SIGSTOP if episode.way == STOP else signal.SIGKILL):
                self._round(index)
        elif episode.way == RAISE:
            if "dispatch" in episode.point:  # and never calls the hook
                self._new_round(index).dispatch({"return_recv_hook": True})
            else:
                one = self._new_round(index)
                one.dispatch({})
                assert one.settle is not None
                one.settle()
        self._await(f"missed {number}", [rank for rank in self._alive if rank != episode.rank])
        # It goes on with its program where it was, behind the others.
        for own in range(episode.num_own if episode.way != RAISE else 0):
            self._round(index + (episode.way == STOP) + own)

    def _return(self, number: int, *, is_in_step: bool = False) -> None:
        """The two calls that take everybody in again, and a round of all.

        Args:
            number: Of the episode.
            is_in_step: A new generation has been made, in which nobody is masked, and the first attempt is the round.
        """
        one = Sizes(random.Random(0), self._history.num_ranks, None)
        begun = time.monotonic()
        for attempt in range(_MOST_TRIES):
            if attempt or not is_in_step:
                self._buffer.low_latency_clean_mask_buffer()
                self._buffer.clean_low_latency_buffer(one.max_tokens, one.hidden, one.num_experts)
            self._round(100 * number + 90 + attempt)
            self._mark(f"tried {number} {attempt}", str(sorted(_masked(self._buffer))))
            said = self._await(f"tried {number} {attempt}", self._alive)
            gone = [rank for rank in range(self._history.num_ranks) if rank not in self._alive]
            if set(said) == {str(gone)}:
                self.return_secs.append(time.monotonic() - begun)
                return
        raise AssertionError(f"after {_MOST_TRIES} returns ranks are still masked: {said}")

    def _round(self, index: int) -> None:
        one = self._new_round(index)
        for send in (one.dispatch, one.combine):
            send(one.data.draw.choice(({}, {"return_recv_hook": True})))
            assert one.settle is not None
            one.settle()
        self.num_rounds += 1
        self.num_degraded += bool(one.masked)

    def _new_round(self, index: int) -> _LiveRound:
        data = self._state.data(ProgramCall(index, "round"))
        return _LiveRound(self._state, data, Sizes(data.draw, self._history.num_ranks, None))

    # Signs -----------------------------------------------------------------------------------------------------------

    def _mark(self, name: str, text: str = "") -> None:
        path = self._folder / f"{name}.{self._rank}"
        path.with_suffix(".new" + path.suffix).write_text(text)
        path.with_suffix(".new" + path.suffix).rename(path)

    def _await(self, name: str, ranks: Sequence[int], look: Callable[[], None] = lambda: None) -> list[str]:
        """Wait for the signs of ranks. Returns what they say."""
        paths, deadline = [self._folder / f"{name}.{rank}" for rank in ranks], time.monotonic() + _MEETING_SECS
        while not all(path.exists() for path in paths):
            look()
            if time.monotonic() > deadline:
                raise AssertionError(f"no sign '{name}' from all of ranks {list(ranks)}")
            time.sleep(_PAUSE_SECS)
        return [path.read_text() for path in paths]

    def _meet(self, number: int, episode: Episode) -> None:
        """Wait for all ranks that live. Whoever is stopped is continued when all others are here."""
        self._mark(f"here {number}")
        others = [rank for rank in self._alive if rank != episode.rank]
        self._await(f"here {number}", others)
        wake = lambda: None  # noqa: E731 - one of two
        if self._rank == others[0] and episode.way == STOP:
            [pid] = self._await("pid", [episode.rank])
            wake = lambda: os.kill(int(pid), signal.SIGCONT)  # noqa: E731
        self._await(f"here {number}", self._alive, wake)


class _At:
    """Send this process a signal when it comes to a fault point, once.

    Args:
        buffer: Of the rank.
        point: The fault point.
        number: The signal.
    """

    def __init__(self, buffer: Buffer, point: str, number: signal.Signals):
        self._window, self._point, self._number = buffer._engine.window, point, number

    def __enter__(self) -> None:
        self._window.fault = self._reach

    def __exit__(self, *error: object) -> None:
        self._window.fault = None

    def _reach(self, point: str) -> None:
        if point == self._point:
            self._window.fault = None
            os.kill(os.getpid(), self._number)


def _masked(buffer: Buffer) -> set[int]:
    status = torch.zeros(buffer.group_size, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return set(status.nonzero()[:, 0].tolist())


def _run(
    process: int, num_processes: int, history: History, folder: str, limit_secs: float
) -> tuple[int, int, list[float]]:
    """The function of a process: a rank, or a new process that becomes one."""
    del num_processes
    warnings.simplefilter("ignore", RuntimeWarning)  # masks are looked at
    rank, first = history.processes()[process]
    group = dist.new_group(list(range(history.num_ranks)))
    one = _Rank(history, folder, limit_secs, rank, first, group)
    one.play()
    return one.num_rounds, one.num_degraded, one.return_secs
