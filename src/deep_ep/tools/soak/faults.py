"""What disturbs a soak: delays, on the ranks, stops, from the process that started them, and the fault of a plan."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from ...control import Control
from .plans import FaultPlan

_DELAY_SECS, _LONG_DELAY_SECS, _LONG_SHARE = 0.002, 0.05, 0.02
_PAUSE_SECS = (0.05, 1.0)  # between two stops
_CYCLES_PER_SEC = 1.5e9  # about, on any GPU
_STOP_SECS, _LONG_STOP_SECS = (0.001, 0.15), (0.3, 1.0)


class Delays:
    """Sleeps now and then; what `Window.fault` calls at every fault point, on whatever thread gets there.

    Args:
        share: How many of the points are delayed.
        seed: Its own: the plan of the calls does not depend on how many points there are.
    """

    def __init__(self, share: float, seed: int):
        self.num_delays = 0
        self._share = share
        self._draw = random.Random(seed)

    def __call__(self, _point: str) -> None:
        """Perhaps sleep: as a rule for a few milliseconds, now and then longer than peers poll without a pause."""
        if self._draw.random() < self._share:
            self.num_delays += 1
            most = _LONG_DELAY_SECS if self._draw.random() < _LONG_SHARE else _DELAY_SECS
            secs = self._draw.uniform(0.0, most)
            if torch.cuda.is_initialized() and self._draw.random() < 0.5:
                torch.cuda._sleep(int(secs * _CYCLES_PER_SEC))  # the host goes on, the stream does not
            else:
                time.sleep(secs)


class Stops:
    """Stops ranks (SIGSTOP) and continues them, from a thread of its own. All of them run when it has been left.

    Args:
        seed: Decides whom and for how long, not when: the thread runs beside the ranks.
    """

    def __init__(self, seed: int):
        self.num_stops = 0
        self._draw = random.Random(seed)
        self._pidfds: dict[int, int] = {}
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="soak stops", daemon=True)

    def add(self, pid: int) -> None:
        """Stop this process, too, from now on. A descriptor names it: its number may one day be another's."""
        if not hasattr(os, "pidfd_open"):
            return  # not Linux: a soak without stops
        with self._lock, suppress(ProcessLookupError):
            if pid not in self._pidfds:
                self._pidfds[pid] = os.pidfd_open(pid)

    def __enter__(self) -> Stops:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._thread.join()
        with self._lock:
            pidfds, self._pidfds = list(self._pidfds.values()), {}
        for pidfd in pidfds:
            send_signal(pidfd, signal.SIGCONT)  # a second time costs nothing, a rank that stays stopped a process
            os.close(pidfd)

    def _run(self) -> None:
        while not self._ended.wait(self._draw.uniform(*_PAUSE_SECS)):
            with self._lock:
                known = list(self._pidfds.values())
            if known:
                self._stop(self._draw.sample(known, self._draw.randint(1, len(known))))

    def _stop(self, pidfds: list[int]) -> None:
        limits = _LONG_STOP_SECS if self._draw.random() < 0.05 else _STOP_SECS
        try:
            for pidfd in pidfds:
                self.num_stops += send_signal(pidfd, signal.SIGSTOP)
            self._ended.wait(self._draw.uniform(*limits))
        finally:
            for pidfd in pidfds:
                send_signal(pidfd, signal.SIGCONT)


def send_signal(pidfd: int, number: signal.Signals) -> bool:
    """Send a signal. Returns whether there was still somebody to get it."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True


class Fired(NamedTuple):
    """The faulty rank's last word: the fault comes now."""

    pid: int
    at_secs: float


class PlannedError(RuntimeError):
    """The exception of a `RAISE` plan."""


class Fault:
    """Brings the fault on the plan's rank; does nothing on the others.

    Args:
        plan: The plan.
        rank: This rank.
        news: Where the rank tells that the fault comes.
    """

    def __init__(self, plan: FaultPlan, rank: int, news: Connection):
        self.is_mine = rank == plan.rank
        self._plan, self._moment, self._news = plan, plan.moment, news
        self._has_fired = False
        self._is_interruptible = False
        self._timer: threading.Timer | None = None
        self._num_gathers = 0
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, self._interrupt)

    def enter(self, phase: str) -> None:
        """A phase begins: the delay until the fault runs from now on."""
        if self.is_mine and phase == self._moment.phase and not self._moment.point:
            self._timer = threading.Timer(self._moment.delay_secs, self._fire)
            self._timer.daemon = True
            self._timer.start()

    def reach(self, phase: str, point: str) -> None:
        """The rank passes a fault point."""
        if self.is_mine and (phase, point) == (self._moment.phase, self._moment.point) and not self._has_fired:
            self._fire()

    def wait(self) -> None:
        """Wait until a delay is over."""
        if self._timer is not None:
            self._timer.join()

    @contextmanager
    def in_construction(self) -> Iterator[None]:
        """Count the gathers of construction, which are its steps. If there are too few, the fault comes at the end."""
        original = Control.gather

        def gather(control: Control, value: Any, purpose: str) -> list[Any]:
            self._num_gathers += 1
            step = self._num_gathers
            self.reach("make", f"before-{step}")
            answer = original(control, value, purpose)
            self.reach("make", f"after-{step}")
            return answer

        self.enter("make")
        Control.gather = gather  # type: ignore[method-assign, assignment]
        try:
            yield
            if self._moment.phase == "make" and self._moment.point:
                self.reach("make", self._moment.point)
        finally:
            Control.gather = original  # type: ignore[method-assign]

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Where the program is ready for a `KeyboardInterrupt`. Elsewhere one is ignored."""
        self._is_interruptible = True
        try:
            yield
        finally:
            self._is_interruptible = False

    def _interrupt(self, *_: object) -> None:
        if self._is_interruptible:
            self._is_interruptible = False
            raise KeyboardInterrupt

    def _fire(self) -> None:
        self._has_fired = True
        self._news.send(Fired(os.getpid(), time.monotonic()))
        if self._plan.signal == "RAISE":
            raise PlannedError("a planned fault")
        name = "STOP" if self._plan.signal == "PAUSE" else self._plan.signal
        os.kill(os.getpid(), getattr(signal, f"SIG{name}"))
