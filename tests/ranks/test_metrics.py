"""Live diagnosis: OpenMetrics text and its endpoint, verdicts on waits, and what the logger is told."""

from __future__ import annotations

import logging
import os
import re
import signal
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from low_latency import SMALL, Round, inputs, make_buffer

import deep_ep
from common import OneRank, error_of, run_ranks
from deep_ep import metrics
from deep_ep.watch import Watch

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.cpu_only]

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} (\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
SUFFIXES = {"counter": "_total", "info": "_info", "gauge": ""}

Families = dict[str, dict[tuple[tuple[str, str], ...], float]]


def parse(text: str) -> Families:
    """Parse OpenMetrics text as strictly as its specification asks for, as far as we use it."""
    assert text.endswith("# EOF\n")
    families: Families = {}
    kind = name = ""
    for line in text.splitlines()[:-1]:
        described = re.fullmatch(rf"# (TYPE|UNIT|HELP) ({NAME}) (.+)", line)
        if described is not None:
            what, described_name, value = described.groups()
            if what == "TYPE":  # it comes first, and a family is not interrupted by another
                assert described_name not in families, line
                assert value in SUFFIXES, line
                name, kind = described_name, value
                families[name] = {}
            assert described_name == name, line
            assert not families[name], "descriptions come before samples"
            if what == "UNIT":
                assert name.endswith(f"_{value}"), line
            continue
        sample = SAMPLE.fullmatch(line)
        assert sample is not None, line
        assert sample[1] == name + SUFFIXES[kind], line
        labels = tuple(sorted(re.findall(r'([a-zA-Z0-9_]+)="((?:[^"\\]|\\.)*)"', sample[2])))
        assert len({label for label, _ in labels}) == len(labels), line
        assert labels not in families[name], f"twice: {line}"
        families[name][labels] = float(sample[3])
    assert all(families.values()), "a family without samples"
    return families


def value_of(families: Families, name: str, **labels: str) -> float:
    [value] = [value for key, value in families[name].items() if set(labels.items()) <= set(key)]
    return value


def fetch(url: str) -> tuple[str, str]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def expected_bytes(rank: int, num_ranks: int, seeds: list[int]) -> tuple[list[int], list[int]]:
    """The bytes to and from each peer in rounds of all ranks, of which rank 1 has missed the last."""
    dispatched, combined = 2 * SMALL.hidden, 96  # bytes of a row: behind 40 channels there is a range, and a gap
    sent, received = ([0] * num_ranks for _ in range(2))
    for seed in seeds:
        every = [inputs(one, num_ranks, SMALL._replace(seed=seed)).topk_idx.tolist() for one in range(num_ranks)]
        # The owner of each row: a token that selects an expert twice has one there.
        owners = [[expert // SMALL.experts_per_rank for ids in tokens for expert in set(ids)] for tokens in every]
        for peer in range(num_ranks):
            if peer == 1 and seed == seeds[-1]:
                continue
            there, here = owners[rank].count(peer), owners[peer].count(rank)
            sent[peer] += there * dispatched + here * combined
            received[peer] += here * dispatched + there * combined
    return sent, received


def measured(rank: int, num_ranks: int) -> list[str]:
    warnings.simplefilter("ignore", RuntimeWarning)
    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(f"{record.levelname} {record.getMessage()}")  # type: ignore[method-assign]
    logging.getLogger("deep_ep").addHandler(handler)
    logging.getLogger("deep_ep").setLevel(logging.INFO)
    buffer = make_buffer(num_ranks, SMALL, enable_shrink=True, limit_secs=30.0)
    metrics.watch(buffer, num_waits=6, interval_secs=3600.0)
    for seed in range(12):
        lateness = 0.15 if rank == 1 else 0.0  # longer than a busy machine keeps the others waiting
        this = Round(buffer, seed)
        time.sleep(lateness)
        got = this.dispatch()
        time.sleep(lateness)
        assert this.finish(got) == []
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    assert Round(buffer, 20).go() == [1]
    endpoint = metrics.serve(buffer)
    kind, text = fetch(endpoint.url)
    assert kind == metrics.CONTENT_TYPE
    families = parse(text)
    calls = [value_of(families, "deep_ep_calls", path=f"low-latency {one}") for one in ("dispatch", "combine")]
    assert calls == [13, 13]
    sent, received = expected_bytes(rank, num_ranks, [*range(12), 20])
    assert [value_of(families, "deep_ep_sent_bytes", peer=str(peer)) for peer in range(num_ranks)] == sent
    assert [value_of(families, "deep_ep_received_bytes", peer=str(peer)) for peer in range(num_ranks)] == received
    assert [value_of(families, "deep_ep_masked", peer=str(peer)) for peer in range(num_ranks)] == [0, 1, 0]
    assert value_of(families, "deep_ep_wait_seconds", peer="1") > 0.2
    assert value_of(families, "deep_ep_waits_last", peer="1") >= 10
    assert value_of(families, "deep_ep_working") == 1
    assert value_of(families, "deep_ep_generation") == 0
    assert {label for label, _ in next(iter(families["deep_ep_buffer"]))} >= {"transport", "rank", "num_ranks"}
    with pytest.raises(urllib.error.HTTPError, match="404"):
        fetch(endpoint.url + "/other")
    metrics.watch(buffer, 0)
    assert "deep_ep_waits_last" not in parse(metrics.openmetrics(buffer))
    buffer.low_latency_clean_mask_buffer()
    buffer.clean_low_latency_buffer(SMALL.max_tokens, SMALL.hidden, SMALL.experts_per_rank * num_ranks)
    buffer.destroy()
    deadline = time.monotonic() + 10
    while any(thread.name.startswith("deep_ep-metrics") for thread in threading.enumerate()):
        assert time.monotonic() < deadline, "the endpoint outlives its buffer"
        time.sleep(0.02)
    endpoint.close()
    assert error_of(metrics.openmetrics, buffer)[0] == "EPClosed"
    assert error_of(metrics.serve, buffer)[0] == "EPClosed"
    return records


def test_metrics_verdicts_and_events_of_ranks() -> None:
    results = run_ranks(measured, 3, may_die=[1])
    for rank in (0, 2):
        records = results[rank]
        verdicts = [one for one in records if "rank 1 came last" in one]  # a busy machine may make another late, too
        assert len(verdicts) == 1, "the same verdict twice within an hour"
        assert re.match(r"WARNING rank 1 came last in \d+% of the last 6 waits: .* \(rank \d/3\)", verdicts[0])
        masks = [one for one in records if "From now on masked" in one]
        assert len(masks) == 2, records  # when it was killed, and when it did not come back
        assert all(one.startswith("WARNING") for one in masks)
        assert any(one.startswith("INFO low latency: rank 1 unmasked") for one in records)
        assert any(one.startswith("INFO low latency: in step with all but 1 ranks") for one in records)


def measured_anew(rank: int, num_ranks: int, path: str) -> list[float]:
    buffer = make_buffer(num_ranks, SMALL, enable_shrink=True)
    metrics.watch(buffer, num_waits=100)
    counted = []
    for generation in range(2):
        if generation:
            buffer.replace(dist.FileStore(path))
        for seed in range(2 - generation):
            assert Round(buffer, seed).go() == []
        families = parse(metrics.openmetrics(buffer))
        assert value_of(families, "deep_ep_generation") == generation
        counted.append(value_of(families, "deep_ep_waits"))
    buffer.destroy()
    return counted


def test_counters_begin_anew_with_a_generation(tmp_path: Path) -> None:
    assert run_ranks(measured_anew, 2, str(tmp_path / "store")) == [[4, 2], [4, 2]]


def test_a_failed_buffer_is_measured_too(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = deep_ep.Buffer(None, 1 << 20, comm=OneRank(), device="cpu", explicitly_destroy=True)
    assert value_of(parse(metrics.openmetrics(buffer)), "deep_ep_working") == 1
    monkeypatch.setattr(buffer, "transport", 'a "quoted"\\ name\nof two lines')
    buffer._engine.window.fail("was told to")
    families = parse(metrics.openmetrics(buffer))
    assert value_of(families, "deep_ep_working") == 0
    assert ("transport", r"a \"quoted\"\\ name\nof two lines") in next(iter(families["deep_ep_buffer"]))
    buffer.destroy()


def test_a_client_that_breaks_off_is_ignored(capfd: pytest.CaptureFixture[str]) -> None:
    buffer = deep_ep.Buffer(None, 1 << 20, comm=OneRank(), device="cpu", explicitly_destroy=True)
    endpoint = metrics.serve(buffer, 0)
    with socket.create_connection(("127.0.0.1", endpoint.port)) as client:
        client.sendall(b"GET /metr")
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # it resets the connection
    assert "# EOF" in fetch(endpoint.url)[1]  # requests are accepted in their order
    while any("process_request" in thread.name for thread in threading.enumerate()):
        time.sleep(0.01)
    buffer.destroy()
    assert capfd.readouterr() == ("", "")


def test_an_endpoint_does_not_keep_its_buffer_alive() -> None:
    buffer = deep_ep.Buffer(None, 1 << 20, comm=OneRank(), device="cpu")
    endpoint = metrics.serve(buffer, 0)
    assert "# EOF" in fetch(endpoint.url)[1]
    thread = endpoint._thread
    del buffer
    thread.join(10)
    assert not thread.is_alive()


def verdicts(caplog: pytest.LogCaptureFixture, waits: list[dict[int, float]], **more: Any) -> list[str]:
    caplog.clear()
    watch = Watch(0, 4, more.pop("num_waits", 10), more.pop("interval_secs", 0.0))
    for waited in waits:
        watch.note(waited)
    return [record.getMessage() for record in caplog.records if record.name == "deep_ep"]


def test_verdicts(caplog: pytest.LogCaptureFixture) -> None:
    often, balanced = [{1: 0.1, 2: 2.0}, {2: 3.0}, {1: 1.0}], [{1: 1.0}, {2: 1.0}, {3: 1.0}, {}]
    [text] = verdicts(caplog, often * 4)  # 10 of the 12
    assert text.startswith("rank 2 came last in 70% of the last 10 waits")
    assert verdicts(caplog, balanced * 5) == []
    assert len(verdicts(caplog, often * 10)) == 3
    assert len(verdicts(caplog, often * 10, interval_secs=3600.0)) == 1
    [text] = verdicts(caplog, [{2: 1.0}, {1: 0.01}, {3: 0.01}] * 4)  # late for every dispatch, say
    assert text.startswith("rank 2 came last in 40% of the last 10 waits")
    assert verdicts(caplog, [{2: 1e-9}] * 10) == []  # not worth a line
    assert verdicts(caplog, [{2: 1.0}] * 9) == []


def test_arguments(caplog: pytest.LogCaptureFixture) -> None:
    with deep_ep.Buffer(None, 1 << 20, comm=OneRank(), device="cpu") as buffer:
        assert error_of(metrics.serve, buffer, 70000)[0] == "ValueError"
        assert error_of(metrics.serve, buffer, "80")[0] == "TypeError"
        assert error_of(metrics.watch, buffer, -1)[0] == "ValueError"
        assert error_of(metrics.watch, buffer, 10, -1.0)[0] == "ValueError"
