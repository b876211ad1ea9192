"""Joint steps of ranks that are threads: which failure is reported, by whom, and what is undone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from deep_ep.control import Control, NodeControl, PeerMissing
from deep_ep.errors import EPTransportError, EPUnsupported

pytestmark = pytest.mark.cpu_only

LIMIT_SECS = 20.0  # that nothing here may come near


class ThreadComm:
    """A communicator between threads of this process.

    Args:
        rank: This rank.
        met: Where all of them meet.
        values: What they contribute, shared by all.
    """

    def __init__(self, rank: int, met: threading.Barrier, values: dict[int, Any]):
        self._rank, self._met, self._values = rank, met, values

    def Get_rank(self) -> int:
        return self._rank

    def Get_size(self) -> int:
        return self._met.parties

    def allgather(self, value: Any) -> list[Any]:
        self._values[self._rank] = value
        self._met.wait(LIMIT_SECS)
        answer = [self._values[rank] for rank in range(self._met.parties)]
        self._met.wait(LIMIT_SECS)
        return answer


def together(num_ranks: int, work: Callable[[Control], Any], limit_secs: float = LIMIT_SECS) -> list[Any]:
    """What each rank returns or raises. It must not take long."""
    met, values, results = threading.Barrier(num_ranks), {}, [None] * num_ranks

    def run(rank: int) -> None:
        control = Control(None, ThreadComm(rank, met, values), limit_secs)
        try:
            results[rank] = work(control)
        except BaseException as error:
            results[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    begin = time.monotonic()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.monotonic() - begin < LIMIT_SECS / 2
    return results


def fail(control: Control, errors: dict[int, BaseException]) -> None:
    if control.rank in errors:
        raise errors[control.rank]


def test_what_is_no_consequence_is_reported() -> None:
    """Rank 0 fails because of rank 1, which says why."""
    errors = {0: PeerMissing("rank 1 does not answer"), 1: KeyError("why")}

    def work(control: Control) -> None:
        with control.joint("a step"):
            control.gather(1, "something")
            fail(control, errors)
            control.gather(2, "something else")

    zero, one, two = together(3, work)
    assert one is errors[1]
    for rank, error in ((0, zero), (2, two)):
        assert type(error) is EPTransportError
        assert str(error).startswith(f"Buffer: rank 1 failed: KeyError: 'why' (rank {rank}/3).")
    assert zero.__cause__ is errors[0]


def test_where_all_are_consequences_one_is_reported() -> None:
    def work(control: Control) -> None:
        with control.joint("a step"):
            fail(control, {1: PeerMissing("rank 2 does not answer")})

    for rank, error in enumerate(together(3, work)):
        assert type(error) is EPTransportError
        assert "rank 2 does not answer" in str(error)
        assert f"(rank {rank}/3)" in str(error)


def test_what_was_made_is_undone_the_last_first_and_only_where_it_failed() -> None:
    def work(control: Control) -> list[str]:
        undone: list[str] = []
        with control.joint("a step that does not fail"):
            control.undo(undone.append, "never")
        try:
            with control.joint("a step"):
                control.undo(undone.append, "first")
                with control.joint("a step inside"):
                    control.undo(undone.append, "inside")
                    control.undo(lambda: 1 / 0)  # undoing goes on
                control.undo(undone.append, "last")
                fail(control, {1: EPUnsupported("not here")})
        except EPUnsupported:
            undone.append("raised")
        control.undo(undone.append, "outside")
        return undone

    assert together(2, work) == [["last", "inside", "first", "raised"]] * 2


@pytest.mark.parametrize("error", [EPTransportError("too little"), KeyError("an accident"), OSError(27, "too large")])
def test_a_step_inside_fails_and_its_caller_goes_on(error: BaseException) -> None:
    """All ranks may, or only those that have heard of it: then the others say it again."""

    def work(control: Control) -> str:
        with control.joint("a step"):
            try:
                with control.joint("a step inside"):
                    fail(control, {1: error})
            except EPTransportError:
                pass
            assert control.gather(control.rank, "going on") == [0, 1, 2]
        return "made"

    results = together(3, work)
    if isinstance(error, KeyError):
        assert results[1] is error
        assert [type(results[rank]) for rank in (0, 2)] == [EPTransportError] * 2
        assert all("rank 1 failed: KeyError" in str(results[rank]) for rank in (0, 2))
    else:
        assert results == ["made"] * 3


def test_a_failure_outside_is_heard_inside_and_cannot_be_passed_over() -> None:
    def work(control: Control) -> None:
        with control.joint("a step"):
            fail(control, {1: KeyError("an accident")})
            try:
                with control.joint("a step inside"):
                    control.gather(1, "something")
            except EPTransportError:
                pass
            control.gather(2, "something else")

    zero, one, two = together(3, work)
    assert type(one) is KeyError
    for error in (zero, two):
        assert type(error) is EPTransportError
        assert "rank 1 failed: KeyError: 'an accident'" in str(error)


def test_ranks_of_a_node_fail_with_those_of_others() -> None:
    def work(control: Control) -> list[int]:
        node = NodeControl(control, control.rank // 2 * 2, 2)
        with node.joint("a step"):
            assert node.gather(control.rank, "something") == [control.rank // 2 * 2, control.rank // 2 * 2 + 1]
            assert node.deadline == control.deadline
            fail(control, {3: MemoryError()})
            node.gather(1, "something else")
        return []

    results = together(4, work)
    assert type(results[3]) is MemoryError
    assert all("rank 3 failed: MemoryError (rank" in str(error) for error in results[:3])


def test_work_of_its_own_may_take_a_rank_longer_than_the_limit() -> None:
    """All ranks compile kernels, one of them for longer than the others, and than a wait may take."""

    def work(control: Control) -> list[int]:
        with control.joint("a step"):
            control.renew_deadline("compiling", LIMIT_SECS)
            time.sleep(1.0 + control.rank)
            return control.gather(control.rank, "something")

    assert together(2, work, limit_secs=0.5) == [[0, 1]] * 2


def test_a_group_of_one_rank_needs_nobody() -> None:
    undone: list[int] = []

    def work(control: Control) -> None:
        with control.joint("a step"):
            control.undo(undone.append, 1)
            assert control.gather("mine", "something") == ["mine"]
            raise KeyError("an accident")

    (error,) = together(1, work)
    assert type(error) is KeyError
    assert undone == [1]
