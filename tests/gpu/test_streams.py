"""Streams and events: memory is used again in stream order, and calls overlap with what they need not wait for."""

from __future__ import annotations

import gc
import time

import pytest
import torch
import torch.distributed as dist
from moe import HIDDEN, check_combined, check_dispatched, dispatch, make_buffer, make_layer, round_trip, sleep

from deep_ep import EventHandle, EventOverlap
from deep_ep.launch import run_ranks

NUM_RANKS = 2
PATIENCE_SECS = 30.0


def wait_until(is_true) -> bool:
    deadline = time.monotonic() + PATIENCE_SECS
    while not is_true() and time.monotonic() < deadline:
        time.sleep(1e-3)
    return is_true()


# Memory that another stream still reads ------------------------------------------------------------------------------


def read_beside(rank: int, num_ranks: int, is_recorded: bool) -> tuple[bool, bool, bool]:
    """A side stream is slow to read rows that the caller has dropped; the next dispatch takes their memory."""
    buffer = make_buffer()
    first, second = make_layer(rank, num_ranks, 0), make_layer(rank, num_ranks, 0)
    handle = round_trip(buffer, first)
    second.x.neg_()
    recv_x = buffer.dispatch(first.x, handle=handle)[0]
    address = recv_x.data_ptr()
    copy = torch.empty_like(recv_x)
    torch.cuda.synchronize()
    dist.barrier()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        sleep(1500)
        copy.copy_(recv_x)
        is_read = side.record_event()
    if is_recorded:
        buffer.record_stream(recv_x, side)
    del recv_x
    gc.collect()
    again = buffer.dispatch(second.x, handle=handle)[0]
    is_reused = again.data_ptr() == address
    torch.cuda.current_stream().synchronize()
    came_first = not is_read.query()
    torch.cuda.synchronize()
    assert torch.equal(again.cpu(), -first.received.recv_x)
    buffer.destroy()
    return is_reused, came_first, torch.equal(copy.cpu(), first.received.recv_x)


def test_a_recorded_stream_reads_what_was_there() -> None:
    for is_reused, came_first, is_right in run_ranks(read_beside, NUM_RANKS, True):
        assert is_reused, "the memory was used again"
        assert not came_first, "the dispatch waited for the side stream"
        assert is_right


def test_without_record_stream_the_rows_are_overwritten() -> None:
    """The control: it shows that the test above can fail."""
    for is_reused, came_first, is_right in run_ranks(read_beside, NUM_RANKS, False):
        assert is_reused
        assert came_first
        assert not is_right


def torch_ignores(rank: int, num_ranks: int) -> None:
    buffer = make_buffer()
    recv_x = dispatch(buffer, make_layer(rank, num_ranks, 0))[0]
    recv_x.record_stream(torch.cuda.Stream())  # silently without effect, but harmless
    buffer.record_stream(recv_x[3:, ::2], torch.cuda.Stream())
    buffer.record_stream(torch.zeros(3, device="cuda"), torch.cuda.Stream())  # not ours: harmless
    del recv_x
    gc.collect()
    assert buffer.stats()["arena"]["used"] == 0
    buffer.destroy()


def test_views_and_other_tensors_may_be_recorded() -> None:
    run_ranks(torch_ignores, NUM_RANKS)


# Inputs that are overwritten at once ---------------------------------------------------------------------------------


def overwritten(rank: int, num_ranks: int, late: int, where: str) -> None:
    """The caller's stream overwrites an input right behind the call, while a peer comes late."""
    buffer, layer = make_buffer(), make_layer(rank, num_ranks, 1)
    handle = round_trip(buffer, layer)
    rows = 2 * layer.received.recv_x.cuda()
    for _ in range(3):
        torch.cuda.synchronize()
        dist.barrier()
        if rank == late:
            sleep(400)
        given = buffer.get_combine_buffer(handle) if where == "window" else torch.empty_like(rows)
        given.copy_(rows)
        combined, _, _ = buffer.combine(given, handle)
        given.fill_(float("nan"))
        if rank == late:
            sleep(400)
        x = layer.x.clone()
        recv_x = buffer.dispatch(x, handle=handle)[0]
        x.fill_(float("nan"))
        check_combined(layer, combined)
        check_dispatched(layer, recv_x)
        del given
    buffer.destroy()


@pytest.mark.parametrize("where", ["window", "elsewhere"])
@pytest.mark.parametrize("late", [0, 1, 2])
def test_an_input_may_be_overwritten_behind_a_synchronous_call(late: int, where: str) -> None:
    run_ranks(overwritten, 3, late, where)


# Events --------------------------------------------------------------------------------------------------------------


def returns_early(rank: int, num_ranks: int) -> None:
    buffer, layer = make_buffer(), make_layer(rank, num_ranks, 2)
    handle = round_trip(buffer, layer)
    rows = 2 * layer.received.recv_x.cuda()
    buffer.dispatch(layer.x, handle=handle, async_finish=True)[-1].current_stream_wait()
    buffer.combine(rows, handle, async_finish=True)[-1].current_stream_wait()
    torch.cuda.synchronize()
    with torch.cuda.stream(buffer.get_comm_stream()):
        sleep(1500)
    recv_x, *_, dispatched = buffer.dispatch(layer.x, handle=handle, async_finish=True)
    combined, _, summed = buffer.combine(rows, handle, async_finish=True)
    assert not dispatched.event.query()
    assert not summed.event.query()
    end = torch.cuda.Event()
    summed.current_stream_wait()
    end.record()
    assert not end.query(), "it is the stream that waits, not the host"
    check_combined(layer, combined)
    check_dispatched(layer, recv_x)
    assert summed.event.query()
    buffer.destroy()


def test_asynchronous_calls_return_before_the_work_is_done() -> None:
    run_ranks(returns_early, NUM_RANKS)


def after_an_event(rank: int, num_ranks: int) -> None:
    """The input is written late, on another stream; its event alone says when."""
    buffer, layer = make_buffer(), make_layer(rank, num_ranks, 3)
    handle = round_trip(buffer, layer)
    x = torch.full_like(layer.x, float("nan"))
    side = torch.cuda.Stream()
    torch.cuda.synchronize()
    for is_async in (True, False):
        x.fill_(float("nan"))
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            sleep(300)
            x.copy_(layer.x)
            event = EventOverlap(EventHandle(side.record_event()))
        recv_x, *_, after = buffer.dispatch(x, handle=handle, previous_event=event, async_finish=is_async)
        if is_async:
            after.current_stream_wait()
        check_dispatched(layer, recv_x)
    buffer.destroy()


def test_a_call_waits_for_the_event_before_it() -> None:
    run_ranks(after_an_event, NUM_RANKS)


def beside_the_caller(rank: int, num_ranks: int, on_comm_stream: bool) -> None:
    """Only the event is waited for: what the caller's stream does meanwhile may take longer."""
    buffer, layer = make_buffer(), make_layer(rank, num_ranks, 4)
    handle = round_trip(buffer, layer)
    more = {"async_finish": True, "allocate_on_comm_stream": on_comm_stream}
    buffer.dispatch(layer.x, handle=handle, previous_event=buffer.capture(), **more)[-1].current_stream_wait()
    round_trip(buffer, layer)
    torch.cuda.synchronize()
    dist.barrier()
    before = buffer.capture()
    sleep(4000)
    is_awake = torch.cuda.current_stream().record_event()
    recv_x, *_, after = buffer.dispatch(layer.x, handle=handle, previous_event=before, **more)
    assert wait_until(after.event.query)
    assert not is_awake.query(), "the call waited for the caller's stream"
    after.current_stream_wait()
    check_dispatched(layer, recv_x)
    buffer.destroy()


@pytest.mark.parametrize("on_comm_stream", [False, True])
def test_a_call_behind_an_event_overlaps_with_the_callers_stream(on_comm_stream: bool) -> None:
    run_ranks(beside_the_caller, NUM_RANKS, on_comm_stream)


def many_on_comm_stream(rank: int, num_ranks: int) -> None:
    """Results are allocated on the comm stream, read late on the caller's, and dropped before they were read."""
    buffer, layer = make_buffer(), make_layer(rank, num_ranks, 5)
    handle = round_trip(buffer, layer)
    rows = 2 * layer.received.recv_x.cuda()
    copies = []
    for index in range(20):
        more = {"previous_event": buffer.capture(), "async_finish": True, "allocate_on_comm_stream": True}
        recv_x, *_, _ = buffer.dispatch(layer.x * (index + 1), handle=handle, **more)
        combined, _, event = buffer.combine(rows * (index + 1), handle, **more)
        event.current_stream_wait()
        sleep(5)
        copies.append((recv_x.clone(), combined.clone()))
        del recv_x, combined
    for index, (recv_x, combined) in enumerate(copies):
        assert torch.equal(recv_x.cpu(), layer.received.recv_x * (index + 1))
        if index in (0, 1, 3, 7, 15):  # scaling by a power of two changes no rounding
            assert torch.equal(combined.cpu(), layer.doubled() * (index + 1))
    buffer.destroy()


def test_results_allocated_on_the_comm_stream_live_long_enough() -> None:
    run_ranks(many_on_comm_stream, NUM_RANKS)


# Ranks that are late -------------------------------------------------------------------------------------------------


def late(rank: int, num_ranks: int, how: str) -> None:
    buffer, layer = make_buffer(), make_layer(rank, num_ranks, 6)
    handle = round_trip(buffer, layer)
    for operation in ("full", "cached", "combine"):
        if rank == 1:
            time.sleep(5) if how == "host" else sleep(5000)
        if operation == "full":
            round_trip(buffer, layer)
        elif operation == "cached":
            check_dispatched(layer, buffer.dispatch(layer.x, handle=handle)[0])
        else:
            check_combined(layer, buffer.combine(2 * layer.received.recv_x.cuda(), handle)[0])
    buffer.check()
    buffer.destroy()


@pytest.mark.parametrize("how", ["host", "stream"])
def test_a_rank_that_is_seconds_late_breaks_nothing(how: str) -> None:
    run_ranks(late, 3, how)


def other_streams(rank: int, num_ranks: int) -> None:
    """Calls come from several streams of the caller, with no wait in between but the buffer's own."""
    buffer, layer = make_buffer(), make_layer(rank, num_ranks, 7)
    handle = round_trip(buffer, layer)
    streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for index in range(12):
        with torch.cuda.stream(streams[index % 3]):
            x = torch.full((layer.x.size(0), HIDDEN), index + 1.0, device="cuda")
            if index % 4 == 3:
                sleep(20)
            recv_x, *_, event = buffer.dispatch(x, handle=handle, async_finish=index % 2 == 1)
            if event.event is not None:
                event.current_stream_wait()
            results.append(recv_x.clone())
    torch.cuda.synchronize()
    for index, recv_x in enumerate(results):
        assert (recv_x == index + 1.0).all()
    buffer.destroy()


def test_calls_from_several_streams_keep_their_order() -> None:
    run_ranks(other_streams, NUM_RANKS)


def overflow(rank: int, num_ranks: int) -> tuple[str, str]:
    buffer, layer = make_buffer(limit_secs=20), make_layer(rank, num_ranks, 8)
    round_trip(buffer, layer)
    try:
        dispatch(buffer, layer, num_worst_tokens=1 if rank == 1 else 4 * layer.num_rows)
        buffer.check()
    except Exception as error:
        return type(error).__name__, str(error)
    return "none", ""


def test_more_rows_than_room_are_an_error_on_all_ranks() -> None:
    for kind, text in run_ranks(overflow, 3):
        assert kind == "EPOverflow"
        assert "num_worst_tokens=1" in text
