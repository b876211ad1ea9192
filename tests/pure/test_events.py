"""Events, and the comm stream whose points they mark."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future

import pytest
import torch

from deep_ep import Buffer, EPPeerFailed, EventHandle, EventOverlap
from deep_ep.event import event_of
from deep_ep.stream import CommStream

pytestmark = pytest.mark.cpu_only  # where the caller's thread is its stream; tests/gpu has the events of CUDA

PATIENCE_SECS = 30  # how long a test waits for what must come


@pytest.fixture
def stream() -> Iterator[CommStream]:
    stream = CommStream("test-stream")
    yield stream
    stream.stop()


class Gate:
    """A job that ends when the test says so."""

    def __init__(self) -> None:
        self.entered = threading.Event()
        self._open = threading.Event()

    def __call__(self) -> None:
        self.entered.set()
        assert self._open.wait(PATIENCE_SECS)

    def open(self) -> None:
        self._open.set()


class Waits(Future):
    """A finished job that counts how often it was waited for."""

    def __init__(self) -> None:
        super().__init__()
        self.num_waits = 0
        self.set_result(None)

    def result(self, timeout: float | None = None) -> None:
        self.num_waits += 1
        super().result(timeout)


def fail() -> None:
    raise ZeroDivisionError("the job's own error")


def in_thread(work) -> threading.Thread:
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread


# EventHandle ---------------------------------------------------------------------------------------------------------


def test_an_event_of_the_caller_is_complete_at_birth():
    event = EventHandle()
    assert event.query()
    event.current_stream_wait()


def test_capture_marks_what_the_caller_has_issued():
    captured = Buffer.capture()
    assert isinstance(captured, EventOverlap)
    assert isinstance(captured.event, EventHandle)
    assert captured.event.query()
    captured.current_stream_wait()


# EventOverlap --------------------------------------------------------------------------------------------------------


def test_an_overlap_keeps_what_it_is_given():
    event, tensors = EventHandle(), (torch.zeros(1), torch.zeros(2))
    overlap = EventOverlap(event, tensors)
    assert overlap.event is event
    assert overlap.extra_tensors is tensors
    assert EventOverlap().event is None
    assert EventOverlap().extra_tensors is None


def test_waiting_for_nothing_is_an_assertion():
    overlap = EventOverlap(None)
    with pytest.raises(AssertionError, match="EventOverlap"):
        overlap.current_stream_wait()


def test_waiting_waits_for_the_event_and_keeps_it():
    waits = Waits()
    overlap = EventOverlap(EventHandle(waits))
    overlap.current_stream_wait()
    overlap.current_stream_wait()
    assert waits.num_waits == 2
    assert overlap.event is not None


def test_release_handle_forgets_the_event_after_the_wait():
    waits = Waits()
    overlap = EventOverlap(EventHandle(waits))
    overlap.current_stream_wait(release_handle=True)
    assert waits.num_waits == 1
    assert overlap.event is None
    with pytest.raises(AssertionError):
        overlap.current_stream_wait()


def test_a_hook_runs_once_and_after_the_wait():
    waits, seen = Waits(), []
    overlap = EventOverlap(EventHandle(waits))
    overlap.register_hook_after_wait(lambda: seen.append(waits.num_waits))
    assert seen == []
    overlap.current_stream_wait()
    assert seen == [1]
    assert overlap.hook_after_wait is None
    overlap.current_stream_wait()
    assert seen == [1]


def test_a_second_hook_is_an_assertion_until_the_first_has_run():
    overlap, seen = EventOverlap(EventHandle()), []
    overlap.register_hook_after_wait(lambda: seen.append("first"))
    with pytest.raises(AssertionError, match="hook"):
        overlap.register_hook_after_wait(lambda: seen.append("second"))
    overlap.current_stream_wait()
    overlap.register_hook_after_wait(lambda: seen.append("third"))
    overlap.current_stream_wait()
    assert seen == ["first", "third"]


def test_a_hook_that_registers_another_is_followed_by_it_at_the_next_wait():
    overlap, seen = EventOverlap(EventHandle()), []

    def hook() -> None:
        seen.append("first")
        overlap.register_hook_after_wait(lambda: seen.append("second"))

    overlap.register_hook_after_wait(hook)
    overlap.current_stream_wait()
    assert seen == ["first"]
    overlap.current_stream_wait()
    assert seen == ["first", "second"]


def test_a_with_block_waits_at_its_end():
    waits = Waits()
    overlap = EventOverlap(EventHandle(waits))
    with overlap:
        assert waits.num_waits == 0
    assert waits.num_waits == 1
    assert overlap.event is not None


def test_a_with_block_runs_the_hook():
    overlap, seen = EventOverlap(EventHandle()), []
    overlap.register_hook_after_wait(lambda: seen.append("hook"))
    with overlap:
        seen.append("body")
    assert seen == ["body", "hook"]


def test_a_with_block_without_an_event_does_nothing():
    overlap, seen = EventOverlap(None), []
    overlap.register_hook_after_wait(lambda: seen.append("hook"))
    with overlap:
        pass
    assert seen == []


def test_calling_it_returns_it_and_holds_for_one_block():
    waits = Waits()
    event = EventHandle(waits)
    overlap = EventOverlap(event)
    assert overlap(release_handle=True) is overlap
    assert overlap.event is event
    with overlap:
        assert overlap.event is event
    assert overlap.event is None

    overlap.event = event
    with overlap:  # the wish was for the last block only
        pass
    assert overlap.event is event
    assert waits.num_waits == 2


def test_calling_it_without_the_wish_takes_the_wish_back():
    overlap = EventOverlap(EventHandle())
    overlap(release_handle=True)
    with overlap():
        pass
    assert overlap.event is not None


def test_an_error_in_a_with_block_comes_through_and_the_event_is_waited_for():
    waits = Waits()
    with pytest.raises(KeyError, match="body"), EventOverlap(EventHandle(waits)):
        raise KeyError("body")
    assert waits.num_waits == 1


def test_extra_tensors_live_as_long_as_the_overlap():
    tensor = torch.zeros(3)
    overlap = EventOverlap(EventHandle(), (tensor,))
    alive = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert alive() is not None
    del overlap
    gc.collect()
    assert alive() is None


def test_either_kind_of_event_is_taken_and_an_empty_one_is_none():
    event = EventHandle()
    assert event_of(event) is event
    assert event_of(EventOverlap(event)) is event
    assert event_of(EventOverlap(None)) is None
    assert event_of(None) is None


# Jobs of the comm stream ---------------------------------------------------------------------------------------------


def test_jobs_run_in_order_on_one_other_thread(stream: CommStream):
    seen = []
    for number in range(100):
        stream.submit(lambda number=number: seen.append((number, threading.get_ident())))
    stream.synchronize()
    assert [number for number, _ in seen] == list(range(100))
    assert len({thread for _, thread in seen}) == 1
    assert seen[0][1] != threading.get_ident()


def test_a_job_carries_what_the_work_returns(stream: CommStream):
    assert stream.submit(lambda: 42).result() == 42


def test_an_error_surfaces_at_every_wait_and_not_before(stream: CommStream):
    job = stream.submit(fail)
    event = stream.record_event()
    stream.synchronize()
    assert job.done()
    assert event.query()
    for _ in range(2):
        with pytest.raises(ZeroDivisionError, match="own error"):
            job.result()
        with pytest.raises(ZeroDivisionError, match="own error"):
            event.current_stream_wait()
        with pytest.raises(ZeroDivisionError, match="own error"):
            EventOverlap(event).current_stream_wait()


def test_jobs_behind_a_failed_one_still_run(stream: CommStream):
    stream.submit(fail)
    assert stream.submit(lambda: "next").result() == "next"


def test_even_an_exit_inside_a_job_reaches_the_waiter_and_not_the_thread(stream: CommStream):
    with pytest.raises(SystemExit):
        stream.submit(sys.exit).result()
    assert stream.submit(lambda: 1).result() == 1


def test_a_finished_job_lets_go_of_its_tensors(stream: CommStream):
    tensor = torch.zeros(3)
    alive = weakref.ref(tensor)
    job = stream.submit(lambda tensor=tensor: tensor.add_(1) is None)
    job.result()
    del tensor
    gc.collect()
    assert alive() is None


def test_a_failed_job_lets_go_of_its_tensors_and_of_those_of_whoever_waited(stream: CommStream):
    """The stream keeps its last job for `record_event`, and the job its error."""

    def fail_with(tensor: torch.Tensor) -> None:
        def inner() -> None:
            raise ZeroDivisionError(tensor.sum())

        inner()

    def wait() -> tuple[weakref.ref, weakref.ref]:
        in_job, in_caller = torch.zeros(3), torch.zeros(3)
        event = EventHandle(stream.submit(lambda: fail_with(in_job)))
        with pytest.raises(ZeroDivisionError) as raised:
            event.current_stream_wait()
        assert "fail_with(in_job)" in str(raised.value.__cause__), "where the job raised is told"
        return weakref.ref(in_job), weakref.ref(in_caller)

    alive = wait()
    gc.collect()
    assert [one() for one in alive] == [None, None]


def test_a_copy_of_an_error_has_what_the_error_has(stream: CommStream):
    def fail() -> None:
        raise EPPeerFailed(3, "left", "dispatch (call 2)", "rank 0/4")

    job = stream.submit(fail)
    errors = []
    for _ in range(2):
        with pytest.raises(EPPeerFailed, match=r"dispatch \(call 2\): rank 3 left \(rank 0/4\)") as raised:
            EventHandle(job).current_stream_wait()
        errors.append(raised.value)
    assert [(error.rank, error.cause) for error in errors] == [(3, "left")] * 2
    assert errors[0] is not errors[1]


# Points of the comm stream -------------------------------------------------------------------------------------------


def test_query_and_events_follow_the_jobs(stream: CommStream):
    gate = Gate()
    assert stream.query()
    job = stream.submit(gate)
    event = stream.record_event()
    assert gate.entered.wait(PATIENCE_SECS)
    assert not stream.query()
    assert not job.done()
    assert not event.query()
    gate.open()
    event.current_stream_wait()
    assert event.query()
    assert job.done()
    assert stream.query()


def test_synchronize_blocks_until_everything_is_done(stream: CommStream):
    gate, seen = Gate(), []
    stream.submit(gate)
    stream.submit(lambda: seen.append("job"))
    waiter = in_thread(lambda: (stream.synchronize(), seen.append("synchronized")))
    assert gate.entered.wait(PATIENCE_SECS)
    assert seen == []
    gate.open()
    waiter.join(PATIENCE_SECS)
    assert seen == ["job", "synchronized"]


def test_waiting_for_an_overlap_blocks_until_its_job_is_done_then_runs_the_hook(stream: CommStream):
    gate, seen = Gate(), []
    overlap = EventOverlap(EventHandle(stream.submit(gate)))
    overlap.register_hook_after_wait(lambda: seen.append("hook"))
    assert gate.entered.wait(PATIENCE_SECS)
    waiter = in_thread(overlap.current_stream_wait)
    assert seen == []
    gate.open()
    waiter.join(PATIENCE_SECS)
    assert not waiter.is_alive()
    assert seen == ["hook"]


def test_an_event_marks_its_point_and_not_what_comes_later(stream: CommStream):
    gate = Gate()
    stream.submit(lambda: None)
    event = stream.record_event()
    stream.submit(gate)
    event.current_stream_wait()
    assert event.query()
    assert not stream.query()
    gate.open()


def test_an_event_of_an_idle_stream_is_complete(stream: CommStream):
    event = stream.record_event()
    assert event.query()
    event.current_stream_wait()


def test_record_event_can_move_an_event(stream: CommStream):
    gate, event = Gate(), EventHandle()
    stream.submit(gate)
    assert stream.record_event(event) is event
    assert not event.query()
    gate.open()
    event.current_stream_wait()
    assert event.query()


@pytest.mark.parametrize("wrap", [lambda event: event, EventOverlap], ids=["handle", "overlap"])
def test_wait_event_holds_later_jobs_only(stream: CommStream, wrap):
    other, gate, seen = CommStream("other-stream"), Gate(), []
    other.submit(gate)
    stream.submit(lambda: seen.append("before"))
    before = stream.record_event()
    stream.wait_event(wrap(other.record_event()))
    behind = stream.submit(lambda: seen.append("behind"))
    before.current_stream_wait()
    assert seen == ["before"]
    assert not behind.done()
    gate.open()
    behind.result()
    assert seen == ["before", "behind"]
    other.stop()


def test_wait_event_of_a_complete_or_empty_event_holds_nothing(stream: CommStream):
    stream.wait_event(EventHandle())
    stream.wait_event(EventOverlap(None))
    assert stream.submit(lambda: 1).result() == 1


def test_wait_stream_holds_later_jobs(stream: CommStream):
    other, gate, seen = CommStream("other-stream"), Gate(), []
    other.submit(gate)
    other.submit(lambda: seen.append("other"))
    stream.wait_stream(other)
    behind = stream.submit(lambda: seen.append("behind"))
    assert gate.entered.wait(PATIENCE_SECS)
    assert not behind.done()
    gate.open()
    behind.result()
    assert seen == ["other", "behind"]
    other.stop()


def test_a_stream_that_waits_for_itself_goes_on(stream: CommStream):
    stream.submit(lambda: None)
    stream.wait_stream(stream)
    assert stream.submit(lambda: 1).result() == 1


# Its end -------------------------------------------------------------------------------------------------------------


def thread_of(stream: CommStream) -> threading.Thread:
    return stream.submit(threading.current_thread).result()


def test_there_is_no_thread_before_the_first_job():
    before = set(threading.enumerate())
    stream = CommStream("test-stream-without-jobs")
    assert set(threading.enumerate()) == before
    assert thread_of(stream).name.startswith("test-stream-without-jobs")
    stream.stop()


def test_stop_finishes_the_queue_and_ends_the_thread_and_can_be_repeated():
    stream, seen = CommStream("test-stream"), []
    thread = thread_of(stream)
    for number in range(10):
        stream.submit(lambda number=number: seen.append(number))
    stream.stop()
    assert seen == list(range(10))
    assert not thread.is_alive()
    stream.stop()
    assert stream.query()
    stream.synchronize()


def test_stop_of_an_unused_stream_does_nothing():
    stream = CommStream("test-stream")
    stream.stop()
    stream.stop()


def test_a_forgotten_stream_ends_its_thread_after_its_jobs():
    stream, gate, seen = CommStream("test-stream"), Gate(), []
    thread = thread_of(stream)
    stream.submit(gate)
    stream.submit(lambda: seen.append("job"))
    forgotten = weakref.ref(stream)
    del stream
    gc.collect()
    assert forgotten() is None
    assert thread.is_alive()
    gate.open()
    thread.join(PATIENCE_SECS)
    assert not thread.is_alive()
    assert seen == ["job"]
