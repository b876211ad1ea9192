"""The reaper: what finalizers hand over is closed on its thread, once, whatever happens there."""

from __future__ import annotations

import atexit
import concurrent.futures.thread
import gc
import logging
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest

from deep_ep import reaper
from deep_ep.reaper import Closing

PATIENCE_SECS = 20.0


class Owner:
    """Anything."""


class Closed:
    """What was closed, by whom, and whether quietly."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str, bool]] = []
        self.event = threading.Event()

    def close(self, name: str) -> Callable[[bool], None]:
        def close(is_quiet: bool) -> None:
            self.told.append((name, threading.current_thread().name, is_quiet))
            self.event.set()

        return close

    @property
    def names(self) -> list[str]:
        return [name for name, _, _ in self.told]


@pytest.fixture
def closed() -> Closed:
    return Closed()


def forget_in_a_cycle(closed: Closed) -> None:
    owner: Any = Owner()
    owner.itself = owner
    Closing(owner, closed.close("it"))


def test_what_dies_is_closed_by_the_thread(closed: Closed) -> None:
    owner = Owner()
    Closing(owner, closed.close("it"))
    assert not closed.told
    del owner
    assert closed.event.wait(PATIENCE_SECS)
    assert closed.told == [("it", "deep_ep-reaper", False)]


def test_whoever_detaches_closes(closed: Closed) -> None:
    owner, other = Owner(), Owner()
    closing = Closing(owner, closed.close("it"))
    assert closing.detach() is not None
    assert closing.detach() is None
    del owner
    Closing(other, closed.close("the other"))
    del other
    assert closed.event.wait(PATIENCE_SECS)
    assert closed.names == ["the other"]


def test_a_finalizer_waits_for_no_lock(closed: Closed) -> None:
    """It runs while its own thread holds any lock of the library and of those that it used to need."""
    forget_in_a_cycle(closed)
    locks = [reaper._start_lock, concurrent.futures.thread._global_shutdown_lock, logging._lock]  # type: ignore[attr-defined]
    for lock in locks:
        lock.acquire()
    try:
        collector = threading.Thread(target=gc.collect, daemon=True)
        collector.start()
        collector.join(PATIENCE_SECS)
        assert not collector.is_alive()
    finally:
        for lock in locks:
            lock.release()
    assert closed.event.wait(PATIENCE_SECS)


def test_what_goes_wrong_is_logged_and_harms_no_other(closed: Closed, caplog: pytest.LogCaptureFixture) -> None:
    def fail(_: bool) -> None:
        raise SystemExit("as planned")

    owner = Owner()
    Closing(owner, fail)
    with caplog.at_level(logging.ERROR):
        del owner
        owner = Owner()
        Closing(owner, closed.close("it"))
        del owner
        assert closed.event.wait(PATIENCE_SECS)
    assert "could not be closed" in caplog.text
    assert "as planned" in caplog.text


def test_what_dies_while_an_exception_is_handled_is_quiet(closed: Closed) -> None:
    owner = Owner()
    Closing(owner, closed.close("it"))
    try:
        raise ArithmeticError
    except ArithmeticError:
        del owner
    assert closed.event.wait(PATIENCE_SECS)
    assert closed.told[0][2]


def test_everything_is_closed_at_the_end_the_last_first(closed: Closed) -> None:
    owners = [Owner(), Owner()]
    for index, owner in enumerate(owners):
        Closing(owner, closed.close(str(index)))
    reaper.close_all()
    assert closed.names == ["1", "0"]
    reaper.close_all()
    owner = Owner()
    Closing(owner, closed.close("2"))  # there is a thread again
    closed.event.clear()
    del owner, owners
    assert closed.event.wait(PATIENCE_SECS)
    assert closed.names == ["1", "0", "2"]


def test_a_forked_child_closes_only_what_is_its_own(closed: Closed) -> None:
    owner = Owner()
    Closing(owner, closed.close("the parent's"))
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        own = Owner()
        Closing(own, closed.close("the child's"))
        del owner
        gc.collect()
        atexit._run_exitfuncs()
        os.write(write, repr(closed.names).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        assert pipe.read() == '["the child\'s"]'
    os.waitpid(pid, 0)
    assert not closed.told
    del owner
    assert closed.event.wait(PATIENCE_SECS)
