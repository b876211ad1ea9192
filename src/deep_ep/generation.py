"""Generations of a buffer: the ranks that make one together, over a `torch.distributed` store instead of a group.

A process that has ended is still a member of its process group, and a new process is not. A store has no members: any
process that can reach it may take part. So when a rank is replaced, all ranks make a new *generation* of the buffer
with it. A generation has a number, which is part of every key, and nothing of an earlier generation is read.

What is written into the store, below `deep_ep/`; `docs/protocol.md` has the state table:

    <generation>/size               how many ranks it has; the first rank says so
    <generation>/member/<rank>      the process that takes part as this rank; the first one that asks for it
    <generation>/beat/<rank>        a number that grows while that process is in a joint step
    <generation>/<gather>/<rank>    what the rank contributes to a gather
    <generation>/<gather>/outcome   `complete`, or why it will never be; the first rank that knows says so
    <generation>/verdict            `made` or `failed`
    decided, made                   the last generation that has a verdict, and the last one that was made

The outcome of a gather is written by `compare_set`, so all ranks have the same one: where one rank continues, all do.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import pickle
import platform
import threading
import time
import uuid
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from .errors import EPClosed, EPError, EPTimeout, EPTransportError, account, named

_PREFIX = "deep_ep"
_COMPLETE, _ABSENT, _SILENT, _GIVEN_UP = "complete", "absent", "silent", "given up"
_MADE, _FAILED = "made", "failed"
_BEAT_SECS = 0.2
_SILENT_SECS = 5.0  # without a beat, after which a process that has taken part is given up
_LOOK_SECS = 1.0  # several beats, also on a busy machine
_MOST_STORE_SECS = 5.0  # that the store may take to answer beyond a deadline
_SHORTEST_PAUSE_SECS, _LONGEST_PAUSE_SECS = 1e-3, 2e-2
_MOST_STEP_SECS = 0.5  # between two looks; a process that was stopped for longer has not observed its peers meanwhile
_MOST_TEXT_CHARS = 2000
STORE_REMEDY = "Its process may have ended: let a process host it that is no rank"

_PROCESS = uuid.uuid4().hex[:8]  # a process number may be given again, also on a host of the same name
_attempts = itertools.count()

T = TypeVar("T")


class Store(Protocol):
    """The part of a `torch.distributed.Store` that is used. No method of it waits for a key."""

    def set(self, key: str, value: str | bytes) -> object:
        """Write a key."""

    def get(self, key: str) -> bytes:
        """Read a key, which exists."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys exist."""

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Write a key if it has the expected value, or, if nothing is expected, does not exist; return its value."""


def check_store(where: str, store: Any) -> Store:
    """Check an argument that must be a store."""
    missing = [name for name in ("set", "get", "check", "compare_set") if not callable(getattr(store, name, None))]
    if missing:
        raise TypeError(
            f"{where}: `store` must be a torch.distributed.Store (TCPStore, FileStore, PrefixStore), it has no "
            f"{', '.join(missing)}, got {type(store).__name__}"
        )
    return store


class _Beats:
    """Tells, for other processes, those that are alive from those that are not: by whether their beats change."""

    def __init__(self, read: Callable[[int], str | None]):
        self._read = read
        self._last: dict[int, tuple[str | None, float]] = {}  # by rank: the beat, and for how long it has been that
        self._looked = time.monotonic()

    def silent(self, ranks: list[int], since_claim: bool = False) -> list[int]:
        """Return those of the ranks that have stopped to beat.

        Args:
            ranks: The ranks to look at.
            since_claim: Also those that have never begun: they are known to be there.
        """
        now = time.monotonic()
        step, self._looked = min(now - self._looked, _MOST_STEP_SECS), now
        silent = []
        for rank in ranks:
            beat = self._read(rank)
            before, secs = self._last.get(rank, (beat, 0.0))
            secs = secs + step if beat == before else 0.0
            self._last[rank] = (beat, secs)
            if secs > _SILENT_SECS and (beat or since_claim):
                silent.append(rank)
        return silent


class Generation:
    """This process's part in one generation of a buffer. `enter` makes it.

    Attributes:
        number: The number of the generation.
        rank: This rank.
        num_ranks: How many ranks there are.
        store: Over which they meet.
        joint_secs: Seconds that a joint step may take; None: the limit of the buffer.
    """

    joint_secs: float | None = None

    def __init__(self, store: Store, number: int, rank: int, num_ranks: int):
        self.number, self.rank, self.num_ranks = number, rank, num_ranks
        self.store = store
        self._num_gathers = 0
        self._missing: list[int] = []
        self._has_ended = threading.Event()
        self._thread: threading.Thread | None = None

    @classmethod
    def enter(
        cls, where: str, store: Store, rank: int, num_ranks: int, limit_secs: float, own: int | None
    ) -> Generation:
        """Take part in the next generation that is not decided yet.

        Args:
            where: The method, for errors.
            store: The store.
            rank: This rank.
            num_ranks: How many ranks there are.
            limit_secs: Seconds to wait where another process has asked for this rank.
            own: The generation that this process is a member of; None: a new process.

        Raises:
            EPClosed: Another process has become this rank since.
            EPError: Another process is about to, or the ranks do not agree on how many they are.
            EPTimeout: It is not decided within the limit whether another process becomes this rank.
            EPTransportError: The store does not answer.
        """
        deadline = time.monotonic() + limit_secs

        def claim() -> Generation:
            return _claim(where, store, rank, num_ranks, deadline, own)

        return _answered(where, claim, limit_secs)

    @staticmethod
    def waiting(where: str, store: Store) -> list[int]:
        """Return the ranks whose processes wait for the generation that is not decided yet, and are alive."""

        def look() -> list[int]:
            number = _next_number(store, 0)
            size = _read(store, f"{number}/size")
            ranks = [rank for rank in range(int(size or 0)) if _read(store, f"{number}/member/{rank}") is not None]
            return _beating(store, number, ranks)

        return _answered(where, look, _LOOK_SECS)

    def settle(self, error: BaseException | None = None) -> None:
        """Record how the generation has ended for this rank, so that the next attempt is another generation.

        Args:
            error: What this rank raises; None: the generation was made.
        """

        def write() -> None:
            key = f"{self.number}/verdict"
            if error is None:
                # Over `failed`, too: a rank that leaves behind the last gather leaves a generation that is made.
                self._set(key, _MADE)
                _raise_number(self.store, "made", self.number)
            else:
                # Peers that wait for this rank in its next gather need not wait for the limit.
                text = f"{_GIVEN_UP} {self.rank} {account(error)}"[:_MOST_TEXT_CHARS]
                self._decide(self._num_gathers, text)
                self.store.compare_set(_key(key), "", _FAILED)
            _raise_number(self.store, "decided", self.number)

        with contextlib.suppress(Exception):  # the caller's error, or its buffer, is what matters
            _answered("settling a generation", write, 0.0)

    # What `Control` calls --------------------------------------------------------------------------------------------

    def begin_gather(self, value: Any, deadline: float) -> StoreGather:
        """Begin a gather of objects. All ranks begin the same ones in the same order."""
        number, self._num_gathers = self._num_gathers, self._num_gathers + 1
        return StoreGather(self, number, pickle.dumps(value), deadline)

    def begin(self) -> None:
        """A joint step begins: other ranks see from now on that this process is alive."""
        self._missing, self._has_ended = [], threading.Event()
        self._thread = threading.Thread(target=self._beat, name="deep_ep-generation", daemon=True)
        self._thread.start()

    def end(self, is_known: bool) -> None:
        """The joint step is over."""
        del is_known  # the outcome of every gather is known
        self._has_ended.set()
        if self._thread is not None:
            self._thread.join(_MOST_STORE_SECS)  # at once: it must not be found running where the interpreter ends

    def missing(self) -> list[int]:
        """Return the ranks because of which the last gather has failed."""
        return list(self._missing)

    # What a gather does, on its thread -------------------------------------------------------------------------------

    def exchange(self, number: int, data: bytes, deadline: Callable[[], float]) -> list[Any]:
        """Contribute to a gather, and wait for the others.

        Raises:
            TimeoutError: A rank did not come.
            RuntimeError: A rank has given up, or shows no sign of life.
        """
        keys = [f"{number}/{rank}" for rank in range(self.num_ranks)]
        self._set(f"{self.number}/{keys[self.rank]}", data)
        beats = _Beats(lambda rank: self._get(f"beat/{rank}"))
        pause, looked = _SHORTEST_PAUSE_SECS, time.monotonic()
        while (outcome := self._get(f"{number}/outcome")) is None:
            if self._has(keys):
                outcome = self._decide(number, _COMPLETE)
                break
            now = time.monotonic()
            # Seldom: it asks the store about every rank that has not come.
            if now - looked > _BEAT_SECS or now > deadline():
                looked = now
                absent = [rank for rank, key in enumerate(keys) if not self._has([key])]
                silent = beats.silent(absent)
                if silent or (absent and now > deadline()):
                    kind, ranks = (_SILENT, silent) if silent else (_ABSENT, absent)
                    outcome = self._decide(number, f"{kind} {' '.join(map(str, ranks))}")
                    break
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECS)
        if outcome != _COMPLETE:
            raise self._failure(outcome)
        return [pickle.loads(self.store.get(_key(f"{self.number}/{key}"))) for key in keys]

    def _failure(self, outcome: str) -> Exception:
        for kind in (_ABSENT, _SILENT):
            if outcome.startswith(kind):
                self._missing = [int(rank) for rank in outcome.removeprefix(kind).split()]
                if kind == _ABSENT:
                    return TimeoutError()
                return RuntimeError(f"{named(self._missing)} showed no sign of life for {_SILENT_SECS:g} s")
        rank, _, text = outcome.removeprefix(f"{_GIVEN_UP} ").partition(" ")
        return RuntimeError(f"rank {rank} has given up: {text}")

    def _decide(self, number: int, outcome: str) -> str:
        """Write the outcome of a gather, unless it has one. Returns the one that it has."""
        return self.store.compare_set(_key(f"{self.number}/{number}/outcome"), "", outcome).decode()

    def _beat(self) -> None:
        with contextlib.suppress(Exception):  # the store is gone; the gathers say so
            beat = 0
            while True:
                beat += 1
                self._set(f"{self.number}/beat/{self.rank}", str(beat))
                if self._has_ended.wait(_BEAT_SECS):
                    break
            # Its next joint step may begin at any time: until then it is not silent, but not there.
            self._set(f"{self.number}/beat/{self.rank}", "")

    def _set(self, key: str, value: str | bytes) -> None:
        self.store.set(_key(key), value)

    def _get(self, key: str) -> str | None:
        return _read(self.store, f"{self.number}/{key}")

    def _has(self, keys: list[str]) -> bool:
        return self.store.check([_key(f"{self.number}/{key}") for key in keys])


class ThreadedWork(Generic[T]):
    """Work that may block for ever and cannot be cancelled: on a thread, so that its caller can go on without it.

    What comes of it stays here, whoever waits for it and however often.

    Args:
        name: Of the thread.
        work: What to do.

    Attributes:
        result: What the work has returned, once it is over.
        error: What it has raised; None: nothing, or it is not over.
    """

    result: T

    def __init__(self, name: str, work: Callable[[], T]):
        self.error: BaseException | None = None
        self._is_over = threading.Event()

        def run() -> None:
            try:
                self.result = work()
            except BaseException as error:  # it goes to the caller, whatever it is
                self.error = error
            self._is_over.set()

        self._thread = threading.Thread(target=run, name=name, daemon=True)
        self._thread.start()

    def wait(self, secs: float) -> bool:
        """Return whether the work is over, after waiting at most so many seconds."""
        if not self._is_over.wait(secs):
            return False
        self._thread.join()  # at once: it must not be found running where the interpreter ends
        return True


class StoreError(RuntimeError):
    """The store cannot be reached any more."""


class StoreGather:
    """A gather over a store, on a thread: a store that does not answer must not hold the caller beyond its limit.

    Args:
        generation: The generation.
        number: The number of the gather.
        data: What this rank contributes.
        deadline: When to give up, as `time.monotonic` counts.
    """

    def __init__(self, generation: Generation, number: int, data: bytes, deadline: float):
        self._deadline = deadline
        self._work = ThreadedWork("deep_ep-gather", lambda: generation.exchange(number, data, lambda: self._deadline))

    def wait(self, deadline: float) -> list[Any]:
        """Return what every rank contributed.

        Raises:
            TimeoutError: Not all ranks came before the deadline.
            StoreError: The store does not work.
            RuntimeError: A rank has failed.
        """
        self._deadline = deadline
        if not self._work.wait(max(0.0, deadline - time.monotonic()) + _MOST_STORE_SECS):
            raise StoreError("the store does not answer")
        error = self._work.error
        if isinstance(error, TimeoutError):
            raise error
        if error is not None and type(error) is not RuntimeError:  # not one of `exchange`
            raise StoreError(f"the store does not work ({account(error)})")
        if error is not None:
            raise RuntimeError(str(error))
        return self._work.result


def _claim(where: str, store: Store, rank: int, num_ranks: int, deadline: float, own: int | None) -> Generation:
    """Become a rank of the next generation; see `Generation.enter`. Runs on a thread."""
    process = f"process {os.getpid()} on {platform.node()} [{_PROCESS}-"
    me = f"{process}{next(_attempts)}]"
    number = _next_number(store, own or 0)
    while True:
        made = int(_read(store, "made") or 0)
        if own is not None and made > own:
            member = _read(store, f"{made}/member/{rank}") or "another"
            # An interrupt may have kept this process from using a generation that it has helped to make.
            if not member.startswith(process):
                raise EPClosed(
                    f"{where}: generation {made} of the buffer was made without this process, which is rank "
                    f"{rank}/{num_ranks} of generation {own}: {member} is in its position. End this process; or, if "
                    "another buffer uses the same store, give each a PrefixStore"
                )
        size = store.compare_set(_key(f"{number}/size"), "", str(num_ranks)).decode()
        if size != str(num_ranks):
            error = EPError(f"{where}: generation {number} is of {size} ranks, rank {rank} has {num_ranks}")
            Generation(store, number, rank, num_ranks).settle(error)
            raise error
        holder = store.compare_set(_key(f"{number}/member/{rank}"), "", me).decode()
        if holder == me and _read(store, f"{number}/verdict") is None:
            return Generation(store, number, rank, num_ranks)
        if holder != me:
            _await_verdict(where, store, number, rank, num_ranks, holder, deadline)
            if _read(store, f"{number}/verdict") == _MADE and own is None:
                raise EPError(
                    f"{where}: rank {rank}/{num_ranks} has been taken: {holder} is that rank since generation "
                    f"{number}. Start one process for each rank that is to be replaced"
                )
        number = _next_number(store, number)


def _await_verdict(
    where: str, store: Store, number: int, rank: int, num_ranks: int, holder: str, deadline: float
) -> None:
    """Wait until it is decided whether another process becomes this rank. If that process has ended, it does not."""
    beats, pause = _Beats(lambda one: _read(store, f"{number}/beat/{one}")), _SHORTEST_PAUSE_SECS
    while _read(store, f"{number}/verdict") is None:
        if beats.silent([rank], since_claim=True):
            store.compare_set(_key(f"{number}/verdict"), "", _FAILED)
            return
        if time.monotonic() > deadline:
            raise EPTimeout(
                f"{where}: generation {number} has not been decided in time, in which {holder} asks to be rank "
                f"{rank}/{num_ranks}. Start one process for each rank that is to be replaced, and try again"
            )
        time.sleep(pause)
        pause = min(2 * pause, _BEAT_SECS)


def _beating(store: Store, number: int, ranks: list[int]) -> list[int]:
    """Return those of the ranks whose beats change while this looks. A process that has ended has left its last one."""

    def beats() -> dict[int, str | None]:
        return {rank: _read(store, f"{number}/beat/{rank}") for rank in ranks}

    before, alive, deadline = beats(), set[int](), time.monotonic() + _LOOK_SECS
    while len(alive) < len(ranks) and time.monotonic() < deadline:
        time.sleep(_LONGEST_PAUSE_SECS)
        alive |= {rank for rank, beat in beats().items() if beat and beat != before[rank]}
    return sorted(alive)


def _next_number(store: Store, after: int) -> int:
    """Return the first generation behind `after` that has no verdict."""
    number = max(after, int(_read(store, "decided") or 0)) + 1
    while _read(store, f"{number}/verdict") is not None:
        number += 1
    return number


def _raise_number(store: Store, name: str, number: int) -> None:
    """Let a number of the store be at least this one. It never decreases, whoever writes it late."""
    last = _read(store, name)
    while last is None or int(last) < number:
        last = store.compare_set(_key(name), last or "", str(number)).decode()


def _read(store: Store, key: str) -> str | None:
    return store.get(_key(key)).decode() if store.check([_key(key)]) else None


def _key(name: str) -> str:
    return f"{_PREFIX}/{name}"


def _answered(where: str, work: Callable[[], T], secs: float) -> T:
    """Do work that asks the store, on a thread, and wait for it so long, and a little more.

    Raises:
        EPTransportError: The store does not answer.
    """
    asked = ThreadedWork("deep_ep-generation", work)
    is_over, error = asked.wait(secs + _MOST_STORE_SECS), asked.error
    if is_over and error is None:
        return asked.result
    if isinstance(error, EPError):
        raise error
    cause = account(error) if error is not None else f"no answer within {secs + _MOST_STORE_SECS:g} s"
    raise EPTransportError(f"{where}: the store does not work ({cause}). {STORE_REMEDY}") from error
