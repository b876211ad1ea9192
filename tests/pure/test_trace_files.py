"""Recording without ranks: clocks, files, slices."""

from __future__ import annotations

import gc
import json
import os
from pathlib import Path

import pytest

from common import OneRank
from deep_ep import Buffer, reaper
from deep_ep.control import Control
from deep_ep.trace import COMM, NO_SLICE, SEND, Clock, Trace
from deep_ep.trace.clock import compare_clocks, estimate
from deep_ep.trace.file import TraceFile


def test_clock_example():
    assert estimate([1000], [1010], [3], [9]) == Clock(999, 8)


def test_more_gathers_narrow_the_bounds():
    # The truth is 500. In the first gather rank 0 is late, in the second the other is.
    clock = estimate([900, 1700], [910, 1800], [0, 1290], [420, 1300])
    assert clock == Clock(495, 15)  # between 480 and 510
    assert abs(clock.offset_ns - 500) <= clock.error_ns


def test_ranks_of_one_host_need_no_comparison():
    assert compare_clocks(Control(None, OneRank(), 1.0), ["here"]) == Clock(0, 0)


def events_of(path: Path) -> list[dict]:
    return json.loads(path.read_text())


def test_a_closed_file_is_json(tmp_path):
    file = TraceFile(tmp_path / "a.json")
    file.add({"ph": "X", "name": "one"})
    file.flush()
    file.flush()
    file.add({"ph": "X", "name": "two"})
    file.close()
    file.close()
    assert [event["name"] for event in events_of(tmp_path / "a.json")] == ["one", "two"]


def test_a_file_without_events_is_closed(tmp_path):
    TraceFile(tmp_path / "a.json").close()
    assert events_of(tmp_path / "a.json") == []


def test_a_full_disk_stops_nothing():
    file = TraceFile(Path("/dev/full"))
    file.add({"ph": "X", "name": "one"})
    file.flush()
    file.add({"ph": "X", "name": "two"})
    file.close()


def test_a_disk_that_is_full_at_the_end_stops_nothing():
    file = TraceFile(Path("/dev/full"))
    file.add({"ph": "X", "name": "one"})
    file.close()


def test_what_was_flushed_only_lacks_the_bracket(tmp_path):
    file = TraceFile(tmp_path / "a.json")
    for name in ("one", "two", "three"):
        file.add({"ph": "X", "name": name})
        file.flush()
    text = (tmp_path / "a.json").read_text()
    assert [event["name"] for event in json.loads(text + "]")] == ["one", "two", "three"]
    file.close()


def test_a_forked_child_writes_nothing(tmp_path):
    file = TraceFile(tmp_path / "a.json")
    file.add({"ph": "X", "name": "parent"})
    child = os.fork()
    if child == 0:
        file.add({"ph": "X", "name": "child"})
        file.flush()
        os._exit(0)
    os.waitpid(child, 0)
    file.close()
    assert [event["name"] for event in events_of(tmp_path / "a.json")] == ["parent"]


def make_trace(folder: Path, clock: Clock = Clock()) -> Trace:  # noqa: B008
    return Trace(TraceFile(folder / "rank3.json"), 3, clock, 0, {"num_ranks": 8})


def test_a_call_and_its_parts(tmp_path):
    trace = make_trace(tmp_path)
    trace.begin_call("dispatch", call=1)
    with trace.slice("put rows", SEND, rows=5) as part:
        part.add(peers=2)
        part.waited({0: 0.5, 1: 2.0, 4: 2.0}, first_rank=8)
    trace.note(experts=[1, 2])
    trace.end_call(path="direct")
    trace.close({"calls": {"dispatch/direct": 1}})
    events = [event for event in events_of(tmp_path / "rank3.json") if event["ph"] != "M"]
    begin, part, end = events
    assert (begin["ph"], begin["name"], begin["pid"], begin["tid"], begin["args"]) == (
        "B",
        "dispatch",
        4,
        COMM,
        {"call": 1},
    )
    assert part["args"]["last"] == [9, 12], "those that came last, as the group counts"
    assert part["args"]["awaited_us"] == {"8": 5e5, "9": 2e6, "12": 2e6}
    assert begin["ts"] <= part["ts"] <= part["ts"] + part["dur"] <= end["ts"]
    assert end["args"] == {"experts": [1, 2], "path": "direct"}


def test_a_call_that_fails_ends_with_its_error(tmp_path):
    trace = make_trace(tmp_path)
    trace.begin_call("dispatch")
    with pytest.raises(KeyError), trace.slice("put rows", SEND):
        raise KeyError("lost")
    trace.end_call(ValueError("no"))
    trace.end_call()  # there is none any more
    trace.close()
    events = [event for event in events_of(tmp_path / "rank3.json") if event["ph"] != "M"]
    assert [event["args"]["error"] for event in events if event["args"]] == ["KeyError: 'lost'", "ValueError: no"]


def test_times_are_those_of_rank_0(tmp_path):
    trace = make_trace(tmp_path, Clock(offset_ns=7_000_000, error_ns=5))
    trace.record("put rows", SEND, 1_000_000, 3_500_000, COMM, {})
    trace.close()
    (event,) = [event for event in events_of(tmp_path / "rank3.json") if event["ph"] == "X"]
    assert event["ts"] == 8000.0
    assert event["dur"] == pytest.approx(2500.0, abs=0.1)


def test_a_begun_call_is_in_the_file_at_once(tmp_path):
    trace = make_trace(tmp_path)
    trace.begin_call("combine")
    assert '"combine"' in (tmp_path / "rank3.json").read_text()
    trace.close()


def test_nothing_is_recorded_by_nothing():
    with NO_SLICE as part:
        part.add(rows=1)
        part.waited({0: 1.0})


# Buffers of one rank -------------------------------------------------------------------------------------------------


def test_a_buffer_records_where_it_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("DEEP_EP_TRACE", str(tmp_path / "env"))
    for trace in (None, tmp_path / "given"):
        Buffer(None, comm=OneRank(), device="cpu", explicitly_destroy=True, trace=trace).destroy()
    Buffer(None, comm=OneRank(), device="cpu", explicitly_destroy=True, trace="").destroy()
    assert [path.name for path in tmp_path.iterdir()].count("env") == 1
    assert {path.parent.name for path in tmp_path.rglob("rank0.json")} == {"env", "given"}


def test_another_buffer_has_another_file(tmp_path):
    for _ in range(2):
        Buffer(None, comm=OneRank(), device="cpu", explicitly_destroy=True, trace=tmp_path).destroy()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank0-2.json", "rank0.json"]


def test_a_forgotten_buffer_closes_its_file(tmp_path):
    buffer = Buffer(None, comm=OneRank(), device="cpu", trace=tmp_path)
    del buffer
    gc.collect()
    reaper.close_all()  # waits for what was handed over
    events = events_of(tmp_path / "rank0.json")
    assert any("stats" in event["args"] for event in events)


def test_a_bad_path_is_said_at_once(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(ValueError, match=r"^Buffer: the trace cannot be written: rank 0: .*file.*DEEP_EP_TRACE"):
        Buffer(None, comm=OneRank(), device="cpu", trace=tmp_path / "file")


def test_a_path_is_a_path():
    with pytest.raises(TypeError, match="`trace` must be the name of a folder, got int"):
        Buffer(None, comm=OneRank(), device="cpu", trace=3)  # type: ignore[arg-type]
