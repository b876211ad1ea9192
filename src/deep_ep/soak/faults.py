"""What disturbs a soak: delays, on the ranks, and stops, from the process that started them."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from contextlib import suppress

import torch

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
            _send(pidfd, signal.SIGCONT)  # a second time costs nothing, a rank that stays stopped a process
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
                self.num_stops += _send(pidfd, signal.SIGSTOP)
            self._ended.wait(self._draw.uniform(*limits))
        finally:
            for pidfd in pidfds:
                _send(pidfd, signal.SIGCONT)


def _send(pidfd: int, number: signal.Signals) -> bool:
    """Send a signal. Returns whether there was still somebody to get it."""
    try:
        signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return False
    return True
