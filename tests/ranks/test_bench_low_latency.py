"""The benchmark of low-latency calls end to end, with tiny sizes. It checks by itself that all variants are right."""

from __future__ import annotations

import argparse
import csv
import io
import json
from dataclasses import replace
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from rich.console import Console

from deep_ep.launch import RankFailed, run_ranks
from deep_ep.tools.bench import cli, core, report
from deep_ep.tools.bench.cases import Note
from deep_ep.tools.bench.core import ADD, FLOOR, GLOO, GLOO_AS_WRITTEN, PRODUCT, WAITS, Measured, clock_name
from deep_ep.tools.bench.gpu_cases import GpuMeasured, join_gpu_cases
from deep_ep.tools.bench.inputs import Setting, reason_to_skip
from deep_ep.tools.bench.low_latency import rank_bytes
from deep_ep.tools.bench.low_latency_calls import OPERATIONS, Bytes, bytes_of, of_receive, of_send
from deep_ep.tools.bench.low_latency_cases import low_latency_titles, run_low_latency_cases
from deep_ep.tools.bench.low_latency_work import LowLatencyWork

TINY = ["--tokens", "6", "--hidden", "264", "--topk", "3", "--experts", "8", "--rounds", "2"]
INTERPRETED = {"DEEP_EP_TRANSPORT": "interpreted", "TRITON_INTERPRET": "1"}
MARKERS = "<!-- bench {name} -->\nold\n<!-- /bench {name} -->\n"


def run(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(["low-latency", *words]))


def variants_of(name: str, device: str) -> set[str]:
    if device == "cuda":
        callers = {clock_name(variant, clock) for variant in (PRODUCT, ADD) for clock in WAITS}
        return {PRODUCT, FLOOR} | (callers if name in OPERATIONS else set())
    return {PRODUCT} if name.endswith(("-send", "-receive")) else {PRODUCT, FLOOR, GLOO, GLOO_AS_WRITTEN}


def test_all_cases_with_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str):
    marker = "low-latency" if device == "cpu" else "low-latency gpu"
    readme = tmp_path / "README.md"
    readme.write_text(MARKERS.format(name=marker) + MARKERS.format(name="normal"))
    files = ["--csv", str(tmp_path / "b.csv"), "--json", str(tmp_path / "b.json"), "--readme", str(readme)]
    assert run("--ranks", "2", "3", *TINY, *files, "--device", device) == 0

    content = json.loads((tmp_path / "b.json").read_text())
    ran = {case["case"]: case for case in content["cases"] if case["num_ranks"] == 2}
    assert list(ran) == list(low_latency_titles(device))
    for name, case in ran.items():
        assert set(case["times"]) == variants_of(name, device)
        assert all(len(times) == 2 and len(times[0]) == len(times[1]) == 2 for times in case["times"].values())
    # 18 rows: 264 bytes and 3 scales, or 528 bytes.
    assert ran["dispatch"]["bytes_per_rank"] == [18 * (264 + 12)] * 2
    assert ran["both"]["bytes_per_rank"] == [18 * (264 + 12 + 528)] * 2
    assert all(case["skipped"] for case in content["cases"] if case["num_ranks"] == 3)

    with (tmp_path / "b.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 2 * len(ran)
    assert 0 < float(lines[0]["p50_secs"]) <= float(lines[0]["p99_secs"])
    text = readme.read_text()
    assert "| p50 | p99 | floor |" in text
    assert text.count("old") == 1, "the other table stays"
    out, err = capsys.readouterr()
    assert "combine, BF16: receive half" in out
    assert "2 ranks: dispatch + combine, zero-copy" in err


def test_what_cannot_be_met_is_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(ValueError, match="dispatch-graph is no case here"):
        run("--cases", "dispatch-graph")
    (tmp_path / "README.md").write_text(MARKERS.format(name="normal"))
    with pytest.raises(ValueError, match="<!-- bench low-latency -->"):
        run("--readme", str(tmp_path / "README.md"))
    assert "cannot be shared by 3 ranks" in str(reason_to_skip(Setting(num_tokens=128), 3, None, rank_bytes))
    assert "1.0 are available" in str(reason_to_skip(Setting(num_tokens=128, device="cuda"), 8, 1 << 30, rank_bytes))
    assert reason_to_skip(Setting(num_tokens=128, device="cuda"), 8, 139 << 30, rank_bytes) is None
    assert reason_to_skip(Setting(num_tokens=128), 4, 4 << 30, rank_bytes) is None


# What ranks do -------------------------------------------------------------------------------------------------------


@pytest.mark.cpu_only
def test_kernels_are_timed_like_those_of_a_gpu(device: str):
    # The interpreter is slow.
    setting = Setting(2, 128, num_topk=1, num_experts=2, num_rounds=1, num_in_row=1, device=device)
    names = ["dispatch", "combine-send", "combine-receive"]
    here, there = Pipe(duplex=False)
    with here, there:
        results = run_ranks(run_low_latency_cases, 2, setting, names, there, 1 << 20, env=INTERPRETED)
        notes = [here.recv() for _ in range(2 * len(names))]
    assert notes == [Note(2, name, done) for name in names for done in range(2)]
    for index, name in enumerate(names):
        parts = [result[index] for result in results]
        variants = variants_of(name, "cuda")
        assert all(isinstance(part, GpuMeasured) and set(part.times) == variants for part in parts)
        assert join_gpu_cases(name, parts).num_ranks == 2
    # A row of each of 2 tokens: 128 bytes and a scale, or 256 bytes.
    assert [part.memory_bytes for part in results[0]] == [2 * 256 + 3 * 2 * 132, 2 * 2 * 256, 2 * 256 + 2 * 256]


@pytest.mark.cpu_only
def test_wrong_rows_are_not_timed(device: str):
    setting = Setting(6, 128, num_topk=2, num_experts=4, num_rounds=1, device=device)
    here, there = Pipe(duplex=False)
    with here, there, pytest.raises(RankFailed, match="dispatch: what was delivered is wrong"):
        run_ranks(_run_with_wrong_rows, 2, setting, there)


def _run_with_wrong_rows(rank: int, num_ranks: int, setting: Setting, news: Connection) -> None:
    from deep_ep.kernels.low_latency import rows

    right = rows.fetch_rows

    def wrong(out, atlas, places, counts) -> None:
        right(out, atlas, places.roll(1), counts)

    rows.fetch_rows = wrong
    run_low_latency_cases(rank, num_ranks, setting, ["dispatch"], news)


# In literal numbers --------------------------------------------------------------------------------------------------


def test_the_floor_in_bytes():
    work = LowLatencyWork(Setting(num_tokens=128), 0, 8, None, None)  # type: ignore[arg-type]
    tokens, fp8, bf16 = 128 * 14336, 1024 * (7168 + 4 * 56), 1024 * 14336
    assert bytes_of("dispatch", work) == Bytes(fp8, tokens + fp8, 2 * fp8)
    assert bytes_of("combine", work) == Bytes(bf16, 2 * bf16, bf16 + tokens)
    assert bytes_of("combine-zero", work) == Bytes(bf16, 0, bf16 + tokens)
    assert bytes_of("both", work) == Bytes(fp8 + bf16, tokens + fp8 + 2 * bf16, 2 * fp8 + bf16 + tokens)
    # At 4,250 GB/s, of 8 ranks: 46 and 86 us, as the design says.
    microseconds = [8 * sum(bytes_of(name, work)[1:]) / 4250e9 * 1e6 for name in ("dispatch", "combine")]
    assert [round(one) for one in microseconds] == [46, 86]
    logfmt = 1024 * (7168 * 10 // 8 + 4 * 56)
    assert bytes_of("combine-logfmt", work) == Bytes(logfmt, bf16 + logfmt, logfmt + tokens)


def test_percentiles():
    assert core.percentile([4.0, 1.0, 3.0, 2.0, 5.0], 50) == 3.0
    assert core.percentile([0.0, 100.0], 99) == pytest.approx(99.0)
    assert core.percentile([7.0], 99) == 7.0


def test_halves_are_timed_apart():
    done: list[str] = []

    def stopwatch(call) -> float:
        done.append("start")
        call()
        done.append("stop")
        return 1.0

    def send() -> tuple:
        done.append("send")
        return (), lambda: done.append("receive")

    assert of_send(stopwatch)(send) == 1.0
    assert done == ["start", "send", "stop", "receive"]
    done.clear()
    assert of_receive(stopwatch)(send) == 1.0
    assert done == ["send", "start", "receive", "stop"]


def test_the_table_shows_the_tail_and_says_what_the_floor_is():
    machine = {"cpu": "A CPU", "cores": 2, "load": 0.5, "torch": "2.x", "deep_ep": "0.x", "gpu": "NVIDIA H200"}
    machine |= {"num_gpus": 1, "gpu_sms": 132, "mps": True, "cuda": "13.0", "triton": "3.6"}
    times = {PRODUCT: [[1e-4, 2e-4], [3e-4, 2e-4]], FLOOR: [[5e-5, 5e-5], [5e-5, 5e-5]]}
    in_graph = Measured("dispatch-graph", 2, [7_000_000] * 2, times, copy_gbs=4000.0)
    callers = {"deep_ep_host": 4e-5, "deep_ep_in_a_row": 3e-4, "deep_ep_from_idle": 6e-4, "add_in_a_row": 5e-6}
    eager = replace(in_graph, case="dispatch", times={**times, **{name: [[s]] for name, s in callers.items()}})
    rows = [eager, in_graph, Measured("both", 3, skipped="no")]
    titles = low_latency_titles("cuda")
    one = report.BenchReport("low-latency", "command", "shape", {"num_in_row": 20}, machine, titles, rows)
    assert one.marker == "low-latency gpu"
    tail, end = "250 | 200 | 297 | 50.0", "28.0 | 5.00 [4.50, 5.50] |"
    markdown = report.markdown_table(one)
    assert f"| dispatch, FP8 | 2 | {tail} | 40.0 (8.00) | 300 (60.0) | 600 | {end}" in markdown
    assert f"| dispatch, FP8, in a graph | 2 | {tail} | - | - | - | {end}" in markdown
    assert "| dispatch + combine | 3 | skipped: no | |" in " ".join(markdown.split())
    # Results of before a caller's clocks were read, and their table.
    before = report.markdown_table(replace(one, setting={}, rows=[in_graph]))
    assert f"| dispatch, FP8, in a graph | 2 | 7.0 | {tail} | {end}" in before
    assert "2TH + 3S(H + 4ceil(H/128)) bytes" in report.markdown_table(one)
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.rich_table(one))
    assert "zero-copy once: 2SH + 2TH" in " ".join(console.export_text().split())
