"""`deep_ep.utils.testing` on a machine without a GPU: what is called how often, and which rows are reported."""

import json
import os
import queue
import sys
import threading
from types import SimpleNamespace

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import record_function

from common import OneRank
from deep_ep import Buffer
from deep_ep.utils import testing


@pytest.fixture(autouse=True)
def _without_gpu(monkeypatch):
    # The same path wherever the test runs.
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("EP_USE_NVIDIA_TOOLS", raising=False)
    monkeypatch.delenv("EP_DISABLE_BARRIER_PROFILING", raising=False)


class Calls:
    """A function that counts its calls and runs some named ranges."""

    def __init__(self, *ranges):
        self.ranges = ranges
        self.count = 0

    def __call__(self):
        self.count += 1
        for name in self.ranges:
            with record_function(name):
                torch.ones(10).sum()


def test_bench_calls_and_orders():
    log = []
    mean, least, most = testing.bench(
        lambda: log.append("fn"), num_warmups=2, num_tests=3, post_fn=lambda: log.append("post")
    )
    assert log == ["fn", "fn"] + ["fn", "post"] * 3
    assert 0 < least <= mean <= most


def test_bench_drops_the_first_sample(monkeypatch):
    clock = iter([0.0, 100.0, 200.0, 201.0, 300.0, 303.0])
    monkeypatch.setattr(testing.time, "perf_counter", lambda: next(clock))
    assert testing.bench(lambda: None, num_warmups=0, num_tests=3) == (2.0, 1.0, 3.0)


def test_bench_needs_two_samples():
    with pytest.raises(ValueError, match="at least 2"):
        testing.bench(lambda: None, num_tests=1)


def test_flush_does_nothing_here():
    assert testing.flush_l2_cache() is None
    assert testing.flush_l2_cache(enabled=False) is None


def test_suppress_stdout_stderr_silences_python_and_descriptors(capfd):
    with testing.suppress_stdout_stderr():
        print("python")
        print("python", file=sys.stderr)
        os.write(1, b"descriptor\n")
        os.write(2, b"descriptor\n")
    print("after")
    os.write(2, b"after\n")
    assert capfd.readouterr() == ("after\n", "after\n")


def test_suppress_stdout_stderr_ends_with_an_error(capfd):
    with pytest.raises(KeyError), testing.suppress_stdout_stderr():
        raise KeyError
    os.write(1, b"after\n")
    assert capfd.readouterr().out == "after\n"


def test_empty_suppress_suppresses_nothing(capfd):
    with testing.empty_suppress():
        print("shown")
    assert capfd.readouterr().out == "shown\n"


def test_bench_kineto_reports_ranges_by_name():
    fn = Calls("my_dispatch", "my_combine")
    times = testing.bench_kineto(fn, ("dispatch", "my_combine", "absent"), num_tests=4)
    assert isinstance(times, tuple)
    assert times[0] > 0
    assert times[1] > 0
    assert times[2] > 0  # nothing has this name: the whole function
    assert fn.count == 1 + 2 * 4


def test_bench_kineto_of_calls_of_a_cpu_rank():
    size = Buffer.get_low_latency_rdma_size_hint(4, 128, 1, 4)
    buffer = Buffer(None, 0, size, low_latency_mode=True, comm=OneRank(), device="cpu")
    x, ids, weights = torch.ones(4, 128, dtype=torch.bfloat16), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)

    def calls():
        rows, _, handle, _, _ = buffer.low_latency_dispatch(x, ids, 4, 4, use_fp8=False)
        buffer.low_latency_combine(rows, ids, weights, handle)

    assert all(seconds > 0 for seconds in testing.bench_kineto(calls, ("dispatch", "combine"), num_tests=2))
    for phases in testing.bench_kineto(calls, ("dispatch", "combine"), num_tests=2, num_kernels_per_period=2):
        assert len(phases) == 2
        assert all(seconds > 0 for seconds in phases)


def test_bench_kineto_of_one_name_is_a_number():
    seconds = testing.bench_kineto(Calls("my_dispatch"), "my_dispatch", num_tests=2)
    assert isinstance(seconds, float)
    assert 0 < seconds < 10


def test_bench_kineto_sees_other_threads():
    jobs, done = queue.Queue(), queue.Queue()

    def work():
        for job in iter(jobs.get, None):
            job()
            done.put(None)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        run = Calls("threaded_dispatch")
        seconds = testing.bench_kineto(lambda: (jobs.put(run), done.get()), "threaded_dispatch", num_tests=2)
    finally:
        jobs.put(None)
        thread.join()
    assert seconds > 0


def test_bench_kineto_refuses_kernels_that_ran_differently_often():
    fn = Calls("dispatch_a", "dispatch_b", "dispatch_b")
    for num_phases in (1, 3):
        with pytest.raises(ValueError, match=r"dispatch_a \(2 times\), dispatch_b \(4 times\)"):
            testing.bench_kineto(fn, "dispatch", num_tests=2, num_kernels_per_period=num_phases)


LL_DISPATCH, LL_COMBINE, LL_WAIT = (f"low_latency::{name}" for name in ("dispatch", "combine", "wait"))


def test_bench_kineto_of_low_latency_calls():
    whole = Calls(LL_DISPATCH, LL_DISPATCH, LL_COMBINE, LL_COMBINE)
    assert all(seconds > 0 for seconds in testing.bench_kineto(whole, ("dispatch", "combine"), num_tests=2))
    halves = Calls(LL_DISPATCH, LL_WAIT, LL_DISPATCH, LL_COMBINE, LL_WAIT, LL_COMBINE)
    calls = testing.bench_kineto(halves, ("dispatch", "combine"), num_tests=2, num_kernels_per_period=2)
    for phases in calls:
        assert len(phases) == 2
        assert all(seconds > 0 for seconds in phases)


def test_bench_kineto_by_phase():
    times = testing.bench_kineto(
        Calls("step", "other", "step"), ("step", "other"), num_tests=3, num_kernels_per_period=1
    )
    assert all(seconds > 0 for seconds in times)
    phases = testing.bench_kineto(Calls("step", "step"), "step", num_tests=3, num_kernels_per_period=2)
    assert len(phases) == 2
    assert all(seconds > 0 for seconds in phases)
    with pytest.raises(ValueError, match="ran 9 times"):
        testing.bench_kineto(Calls("step", "step", "step"), "step", num_tests=3, num_kernels_per_period=2)


def fake_profile(*events):
    """A profile of (name, start, microseconds)."""
    return SimpleNamespace(
        events=lambda: [
            SimpleNamespace(
                name=name,
                device_type=DeviceType.CPU,
                time_range=SimpleNamespace(start=start, elapsed_us=lambda us=us: us),
            )
            for name, start, us in events
        ]
    )


def test_phases_are_taken_in_order_of_time():
    profile = fake_profile(("dispatch", 30, 7), ("dispatch", 0, 1), ("dispatch", 20, 3), ("dispatch", 10, 5))
    # in time: 1, 5, 3, 7 us; first of each call: 1 and 3, second: 5 and 7
    assert testing._seconds_of_each_phase(profile, "dispatch", 2) == pytest.approx([2e-6, 6e-6])


@pytest.mark.parametrize("name", [LL_DISPATCH, "_ZN11low_latency8dispatchE"], ids=["demangled", "mangled"])
def test_the_halves_of_a_low_latency_call_are_parts_of_it(name):
    """They have one name; without the sum a call would seem to take half as long as it does."""
    calls = [(name, 0, 1), (name, 5, 10), (name, 20, 3), (name, 25, 20), (LL_COMBINE, 50, 99), (LL_WAIT, 4, 50)]
    profile = fake_profile(*calls)
    assert testing._seconds_of_a_call(profile, "dispatch") == pytest.approx(2e-6 + 15e-6)
    assert testing._seconds_of_each_phase(profile, "dispatch", 2) == pytest.approx([2e-6, 15e-6])
    assert testing._seconds_of_a_call(profile, "wait") == pytest.approx(50e-6)


SEND, WAIT, RECEIVE = "my_dispatch_send", "my_dispatch_wait", "my_dispatch_receive"


def test_kernels_that_ran_equally_often_are_parts_of_a_call():
    profile = fake_profile((SEND, 0, 1), (RECEIVE, 5, 10), (SEND, 20, 3), (RECEIVE, 25, 20), ("combine", 50, 99))
    assert testing._seconds_of_a_call(profile, "dispatch") == pytest.approx(2e-6 + 15e-6)
    assert testing._seconds_of_a_call(profile, "dispatch_receive") == pytest.approx(15e-6)
    assert testing._seconds_of_a_call(profile, "absent") == 0
    assert testing._seconds_of_each_phase(profile, "dispatch", 2) == pytest.approx([2e-6, 15e-6])


def test_the_last_phase_is_what_is_left_of_a_call():
    calls = [(SEND, 0, 1), (WAIT, 5, 2), (RECEIVE, 8, 10), (SEND, 20, 3), (WAIT, 25, 4), (RECEIVE, 30, 20)]
    profile = fake_profile(*calls)
    assert testing._seconds_of_each_phase(profile, "dispatch", 2) == pytest.approx([2e-6, 3e-6 + 15e-6])
    assert testing._seconds_of_each_phase(profile, "dispatch", 3) == pytest.approx([2e-6, 3e-6, 15e-6])
    assert testing._seconds_of_a_call(profile, "dispatch") == pytest.approx(20e-6)
    with pytest.raises(ValueError, match="ran 6 times"):
        testing._seconds_of_each_phase(profile, "dispatch", 4)
    with pytest.raises(ValueError, match=r"dispatch_send \(2 times\), my_dispatch_wait \(1 times\)"):
        testing._seconds_of_a_call(fake_profile(*calls[:2], calls[3]), "dispatch")


def test_phases_prefer_the_qualified_name():
    profile = fake_profile(("ep::notify_dispatch<8>", 0, 100), ("ep::dispatch<8>", 1, 1), ("ep::dispatch<8>", 2, 5))
    assert testing._seconds_of_each_phase(profile, "dispatch", 2) == pytest.approx([1e-6, 5e-6])
    assert testing._seconds_of_each_phase(profile, "absent", 2) == [0, 0]


def test_bench_kineto_writes_a_trace(tmp_path):
    path = tmp_path / "trace.json"
    testing.bench_kineto(Calls("traced_dispatch"), "traced_dispatch", num_tests=2, trace_path=str(path))
    names = [event.get("name") for event in json.loads(path.read_text())["traceEvents"]]
    assert names.count("traced_dispatch") == 2, "the warm-up round is not in it"


def test_bench_kineto_lines_up(monkeypatch):
    barrier = Calls()
    testing.bench_kineto(Calls("lined_up"), "lined_up", num_tests=3, barrier_comm_profiling=True, barrier=barrier)
    assert barrier.count == 6
    testing.bench_kineto(Calls("lined_up"), "lined_up", num_tests=3, barrier=barrier)
    assert barrier.count == 6
    monkeypatch.setenv("EP_DISABLE_BARRIER_PROFILING", "1")
    testing.bench_kineto(Calls("lined_up"), "lined_up", num_tests=3, barrier_comm_profiling=True, barrier=barrier)
    assert barrier.count == 6


def test_bench_kineto_leaves_the_profiler_to_nvidia_tools(monkeypatch):
    monkeypatch.setenv("EP_USE_NVIDIA_TOOLS", "1")
    fn = Calls("a")
    assert testing.bench_kineto(fn, "a", num_tests=3) == 1
    assert fn.count == 7
    assert testing.bench_kineto(fn, ("a", "b"), num_tests=3) == (1, 1)
    assert testing.bench_kineto(fn, ("a", "b"), num_tests=3, num_kernels_per_period=2) == ([1, 1], [1, 1])


def test_bench_kineto_prints_nothing_if_told(capfd):
    testing.bench_kineto(lambda: print("noise"), "absent", num_tests=2, suppress_kineto_output=True)
    assert capfd.readouterr() == ("", "")
