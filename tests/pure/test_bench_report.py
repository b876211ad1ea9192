"""The statistics of the benchmark in literal numbers, and what its reports write."""

from __future__ import annotations

import csv
import dataclasses
import datetime
import io
import json
import weakref
from pathlib import Path

import pytest
import torch
from rich.console import Console

from deep_ep.tools.bench import core, report, results
from deep_ep.tools.bench.cases import CASES
from deep_ep.tools.bench.core import FLOOR, GLOO, ONE_HOP, PRODUCT, BenchVariant, Measured, Quartiles
from deep_ep.tools.bench.gpu import CallerClocks, EventStopwatch, script_stopwatch
from deep_ep.tools.bench.gpu_cases import GpuMeasured, gpu_titles, join_gpu_cases
from deep_ep.tools.bench.hop_buffers import find_sizes, hop_bytes
from deep_ep.tools.bench.hop_cases import HopMeasured, hop_titles, join_hop_cases
from deep_ep.tools.bench.inputs import Setting, normal_bytes, reason_to_skip, route
from deep_ep.tools.bench.internode import gpu_variables
from deep_ep.tools.bench.plot import write_plot
from deep_ep.tools.machine import find_machine

# Two ranks, three rounds. Slowest by round: product 2, 4, 3; floor 2, 2, 2; gloo 8, 8, 9.
MEASURED = Measured(
    "cached-bf16",
    2,
    [3_000_000_000, 5_000_000_000],
    {
        PRODUCT: [[1.0, 4.0, 3.0], [2.0, 2.0, 2.0]],
        FLOOR: [[2.0, 1.0, 2.0], [1.0, 2.0, 2.0]],
        GLOO: [[8.0, 8.0, 9.0], [7.0, 8.0, 6.0]],
    },
)
SKIPPED = Measured("cached-bf16", 3, skipped="256 experts cannot be shared by 3 ranks")


def make_report(*rows: Measured) -> report.BenchReport:
    return report.BenchReport(
        name="normal",
        command="python -m deep_ep bench normal --ranks 2",
        shape="16 tokens a rank",
        setting={"num_tokens": 16},
        machine={"cpu": "A CPU", "cores": 2, "load": 0.5, "torch": "2.x", "deep_ep": "0.x"},
        titles={name: title for name, (title, _) in CASES.items()},
        rows=rows or (MEASURED, SKIPPED),
    )


# Statistics ----------------------------------------------------------------------------------------------------------


def test_quartiles_interpolate_between_values():
    assert core.quartiles([4.0, 1.0, 3.0, 2.0]) == Quartiles(1.75, 2.5, 3.25)
    assert core.quartiles([1.0, 2.0, 3.0, 4.0, 5.0]) == Quartiles(2.0, 3.0, 4.0)
    assert core.quartiles([7.0]) == Quartiles(7.0, 7.0, 7.0)


def test_the_slowest_rank_counts():
    times = [[1.0, 4.0, 3.0], [2.0, 2.0, 2.0]]
    assert core.slowest_median(times) == 3.0
    assert core.slowest_by_round(times) == [2.0, 4.0, 3.0]


def test_ratios_are_made_round_by_round():
    assert core.round_ratios(MEASURED.times[GLOO], MEASURED.times[PRODUCT]) == [4.0, 2.0, 3.0]


def test_summary():
    summary = core.summarise(MEASURED)
    assert summary.mean_bytes == 4e9
    assert summary.median_secs == {PRODUCT: 3.0, FLOOR: 2.0, GLOO: 8.0}
    assert summary.gbs == pytest.approx(4 / 3)
    assert summary.over_floor == Quartiles(1.25, 1.5, 1.75)
    assert summary.speedups == {GLOO: Quartiles(2.5, 3.0, 3.5)}
    assert summary.adds == {}


def test_a_case_without_floor_has_no_ratio_to_it():
    measured = Measured("x", 1, [8], {PRODUCT: [[2.0]]})
    assert core.summarise(measured).over_floor is None


def test_the_loop_alternates_behind_a_barrier_and_times_only_the_call():
    now, events = [0.0], []

    def call(name: str, secs: float) -> None:
        events.append(name)
        now[0] += secs

    def barrier() -> None:
        now[0] += 100.0
        events.append("|")

    variants = [BenchVariant("a", lambda: call("a", 1.0)), BenchVariant("b", lambda: call("b", 2.0))]
    done: list[int] = []
    stopwatch = core.HostStopwatch(barrier, clock=lambda: now[0])
    times = core.time_rounds(variants, 3, stopwatch, num_warmup=1, on_round=done.append)
    assert times == {"a": [1.0] * 3, "b": [2.0] * 3}
    assert "".join(events) == "|b|a" + "|a|b" + "|b|a" + "|a|b"
    assert done == [1, 2, 3]


def test_times_of_several_clocks_have_names_of_their_own():
    both = BenchVariant("a", lambda: None, stopwatch=lambda _: {"host": 1.0, "in_a_row": 2.0})
    times = core.time_rounds([both, BenchVariant("a", lambda: None), BenchVariant("b", lambda: None)], 2, lambda _: 3.0)
    assert times == {"a_host": [1.0] * 2, "a_in_a_row": [2.0] * 2, "a": [3.0] * 2, "b": [3.0] * 2}


# Routing -------------------------------------------------------------------------------------------------------------


def test_group_limited_routing_stays_inside_its_groups():
    setting = Setting(num_tokens=64, num_topk=4, num_experts=32, num_groups=8, num_topk_groups=2)
    setting.check()
    idx, weights = route(setting, torch.Generator().manual_seed(1))
    assert idx.shape == weights.shape == (64, 4)
    assert all(len(set((row // 4).tolist())) <= 2 for row in idx)
    assert all(len(set(row.tolist())) == 4 for row in idx)
    assert (weights >= 0).all()


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_tokens": 0}, "num_tokens"),
        ({"num_groups": 8}, "go together"),
        ({"num_groups": 7, "num_topk_groups": 1}, "must divide"),
        ({"num_groups": 8, "num_topk_groups": 9}, "within 1..8"),
        ({"num_topk": 40, "num_groups": 8, "num_topk_groups": 1}, "can reach 32"),
        ({"num_topk": 257}, "can reach 256"),
    ],
)
def test_settings_that_cannot_be_routed(sizes: dict[str, int], message: str):
    with pytest.raises(ValueError, match=message):
        Setting(**sizes).check()


def test_reasons_to_skip():
    assert reason_to_skip(Setting(), 4, 16 << 30, normal_bytes) is None
    assert reason_to_skip(Setting(), 8, None, normal_bytes) is None
    assert "cannot be shared by 3 ranks" in str(reason_to_skip(Setting(), 3, None, normal_bytes))
    assert "1.0 are available" in str(reason_to_skip(Setting(), 4, 1 << 30, normal_bytes))
    assert "20.0 are available" in str(reason_to_skip(Setting(device="cuda"), 8, 20 << 30, normal_bytes))
    assert reason_to_skip(Setting(device="cuda"), 8, 80 << 30, normal_bytes) is None


# Reports -------------------------------------------------------------------------------------------------------------


def test_table_shows_figures_and_skipped_rows():
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(report.rich_table(make_report()))
    text = console.export_text()
    for part in (
        "A CPU, 2 cores (load 0.5",
        "4000.0",
        "1.33",
        "1.50 [1.25, 1.75]",
        "3.00x [2.50, 3.50]",
        "[quartiles]",
    ):
        assert part in text
    assert "3 ranks, skipped: 256 experts cannot be shared by 3 ranks" in text


def test_csv(tmp_path: Path):
    report.write_csv(make_report(), tmp_path / "b.csv")
    with (tmp_path / "b.csv").open() as file:
        ran, skipped = csv.DictReader(file)
    assert (ran["case"], ran["ranks"], ran["rounds"], ran["skipped"]) == ("cached-bf16", "2", "3", "")
    assert (float(ran["deep_ep_secs"]), float(ran["time_over_floor"])) == (3.0, 1.5)
    assert float(ran["speedup_over_gloo_preallocated_q3"]) == 3.5
    assert skipped["skipped"] == SKIPPED.skipped
    assert skipped["deep_ep_secs"] == ""


def test_csv_when_everything_was_skipped(tmp_path: Path):
    report.write_csv(make_report(SKIPPED), tmp_path / "b.csv")
    assert "cannot be shared" in (tmp_path / "b.csv").read_text()


def test_json_holds_the_raw_times(tmp_path: Path):
    report.write_json(make_report(), tmp_path / "b.json")
    content = json.loads((tmp_path / "b.json").read_text())
    assert content["command"].endswith("--ranks 2")
    assert content["machine"]["cores"] == 2
    ran, skipped = content["cases"]
    assert ran["times"] == MEASURED.times
    assert ran["summary"]["over_floor"] == [1.25, 1.5, 1.75]
    assert skipped["skipped"] == SKIPPED.skipped
    assert skipped["summary"] is None


def unwrapped(text: str) -> str:
    return " ".join(text.split())


def test_readme_keeps_everything_around_the_table(tmp_path: Path):
    path = tmp_path / "README.md"
    path.write_text("# Title\n<!-- bench normal -->\nold | table\n<!-- /bench normal -->\nend\n")
    report.write_readme(make_report(), path)
    once = path.read_text()
    assert once.startswith("# Title\n<!-- bench normal -->\n\n")
    assert once.endswith("\n\n<!-- /bench normal -->\nend\n")
    assert "old" not in once
    assert "| cached dispatch, BF16 | 2 | 4000.0 | 3000 | 1.33 | 1.50 [1.25, 1.75] | 3.00x [2.50, 3.50] |" in once
    report.write_readme(make_report(), path)
    assert path.read_text() == once


def test_prose_of_a_table_is_wrapped_and_its_command_stays_whole(tmp_path: Path):
    path = tmp_path / "README.md"
    path.write_text("<!-- bench normal -->\n<!-- /bench normal -->\n")
    made = dataclasses.replace(
        make_report(), shape="4096 tokens a rank, " * 5, command="python -m deep_ep " + "x " * 40
    )
    report.write_readme(made, path)
    prose = [line for line in path.read_text().splitlines() if not line.startswith("|")]
    assert max(map(len, prose)) <= 120
    assert any(f"`{made.command}`" in line for line in prose)


@pytest.mark.parametrize(
    "text",
    [
        "nothing",
        "<!-- bench normal -->",
        "<!-- /bench normal --> <!-- bench normal -->",
        "<!-- bench normal --> <!-- bench normal --> <!-- /bench normal -->",
    ],
)
def test_readme_without_markers_is_refused(text: str):
    with pytest.raises(ValueError, match="<!-- bench normal -->"):
        report.replace_table(text, "normal", "table")


def test_plot_is_a_png(tmp_path: Path):
    pytest.importorskip("matplotlib")
    write_plot(make_report(), tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_the_machine_is_described():
    machine = find_machine("1.2")
    assert machine["cores"] >= 1
    assert machine["deep_ep"] == "1.2"
    assert machine["cpu"]


# On a GPU ------------------------------------------------------------------------------------------------------------

# Ranks 0 and 1 share GPU 0, rank 2 has GPU 1. A copy reads and writes 2 GB on each rank.
GPU_PARTS = [
    GpuMeasured(400_000_000, 1_000_000_000, 0, 1_000_000_000, {PRODUCT: [0.003, 0.002], FLOOR: [0.001, 0.002]}),
    GpuMeasured(400_000_000, 3_000_000_000, 0, 1_000_000_000, {PRODUCT: [0.002, 0.004], FLOOR: [0.002, 0.001]}),
    GpuMeasured(400_000_000, 1_000_000_000, 1, 1_000_000_000, {PRODUCT: [0.001, 0.001], FLOOR: [0.001, 0.001]}),
]
# Slowest medians: 120 and 150 us of a call in a row, 4 us of an add.
CALLERS = {
    "deep_ep_host": [[9e-05, 1e-04, 5e-04], [1.2e-04] * 3, [1e-04] * 3],
    "deep_ep_in_a_row": [[1e-04] * 3, [1.5e-04] * 3, [1e-04] * 3],
    "deep_ep_from_idle": [[2e-04] * 3, [1.8e-04] * 3, [1e-04] * 3],
    "add_host": [[2e-06] * 3] * 3,
    "add_in_a_row": [[3e-06] * 3, [3e-06] * 3, [4e-06, 4e-06, 9e-06]],
    "add_from_idle": [[1e-05] * 3] * 3,
}
GPU = {"gpu": "NVIDIA H200", "num_gpus": 1, "gpu_sms": 132, "mps": True, "cuda": "13.0", "triton": "3.6"}


def make_gpu_report() -> report.BenchReport:
    return report.BenchReport(
        name="normal",
        command="python -m deep_ep bench normal --device cuda --ranks 3",
        shape="16 tokens a rank",
        setting={"num_tokens": 16, "num_in_row": 20},
        machine={"cpu": "A CPU", "cores": 2, "load": 0.5, "torch": "2.x", "deep_ep": "0.x", **GPU},
        titles=gpu_titles(16),
        rows=[
            join_gpu_cases("cached-bf16", GPU_PARTS),
            Measured("layout", 3, [0] * 3, {PRODUCT: [[5e-05]] * 3, **CALLERS}),
        ],
    )


def test_the_floor_of_ranks_that_share_a_gpu():
    measured = join_gpu_cases("cached-bf16", GPU_PARTS)
    # GPU 0: 4 of 4 GB, so as long as the copy. GPU 1: 1 of 2 GB, half as long.
    assert measured.times[FLOOR] == [[0.001, 0.002], [0.002, 0.001], [0.0005, 0.0005]]
    assert core.summarise(measured).over_floor == Quartiles(1.625, 1.75, 1.875)  # 3/2 and 4/2
    assert measured.copy_gbs == pytest.approx(2000)  # 4 GB in 2 ms
    assert measured.bytes_per_rank == [400_000_000] * 3


def test_a_case_without_memory_bytes_has_no_floor():
    measured = join_gpu_cases("layout", [GpuMeasured(0, 0, 0, 8, {PRODUCT: [1.0]})])
    assert set(measured.times) == {PRODUCT}
    assert measured.copy_gbs is None


def test_titles_say_how_many_blocks():
    titles = gpu_titles(16)
    assert titles["cached-bf16"] == "cached dispatch, BF16, 16 blocks"
    assert titles["cached-bf16-free"] == "cached dispatch, BF16, any blocks"
    assert titles["layout"] == "get_dispatch_layout"
    assert gpu_titles(0)["cached-bf16"] == "cached dispatch, BF16, any blocks"
    assert not any(name.endswith("-free") for name in gpu_titles(0))


def test_table_of_a_gpu_says_microseconds_and_mps():
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.rich_table(make_gpu_report()))
    text = console.export_text()
    for part in (
        "NVIDIA H200 (132 SMs, a plain copy reads and writes 2,000 GB/s)",
        "MPS on",
        "MPS was on",
        "3000",
    ):
        assert part in text, part


def test_what_a_caller_waits_for_stands_there_in_adds_too():
    one = make_gpu_report()
    assert core.summarise(one.rows[1]).adds == pytest.approx({"host": 30.0, "in_a_row": 37.5, "from_idle": 50.0})
    times = ["device us", "host us (adds)", "in a row us (adds)", "from idle us"]
    assert report.columns(one) == ["case", "ranks", *times, "GB/s a rank", "time / floor"]
    layout = ["get_dispatch_layout", "3", "50.0", "120 (30.0)", "150 (37.5)", "200", "-", "-"]
    assert report.cells(one, one.rows[1]) == layout
    assert report.cells(one, one.rows[0])[2:6] == ["3000", "-", "-", "-"]
    assert "20 in a row in the same rounds until the device is done: 4.00 us." in " ".join(one.caption)
    # The other clocks are no peers of the product.
    assert core.summarise(one.rows[1]).speedups == {}


def test_what_a_caller_waits_for_in_files(tmp_path: Path):
    report.write_csv(make_gpu_report(), tmp_path / "b.csv")
    with (tmp_path / "b.csv").open() as file:
        cached, layout = csv.DictReader(file)
    assert float(layout["deep_ep_host_secs"]) == pytest.approx(1.2e-04)
    assert (float(layout["add_in_a_row_secs"]), float(layout["host_adds"])) == pytest.approx((4e-06, 30.0))
    assert (cached["deep_ep_host_secs"], cached["in_a_row_adds"]) == ("", "")
    report.write_json(make_gpu_report(), tmp_path / "b.json")
    case = json.loads((tmp_path / "b.json").read_text())["cases"][1]
    assert case["times"]["deep_ep_from_idle"] == CALLERS["deep_ep_from_idle"]
    assert case["summary"]["adds"]["in_a_row"] == pytest.approx(37.5)
    assert case["summary"]["median_secs"]["deep_ep_in_a_row"] == pytest.approx(1.5e-04)


def test_the_table_of_a_gpu_fits_120_columns():
    secs = {PRODUCT: 2.1385e-03, FLOOR: 1.4e-03, "deep_ep_host": 9.2e-05, "deep_ep_in_a_row": 2.3e-03}
    secs |= {"deep_ep_from_idle": 2.5e-03, "add_in_a_row": 5e-06}
    times = {name: [[one, 1.1 * one]] * 8 for name, one in secs.items()}
    rows = [Measured(name, 8, [310_000_000] * 8, times) for name in gpu_titles(16)]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(report.rich_table(dataclasses.replace(make_gpu_report(), rows=rows)))
    text = console.export_text()
    assert "…" not in text
    figures = ["8", "2245", "96.6 (18.4)", "2415 (460)", "2625", "138", "1.53 [1.53, 1.53]"]
    lines = [[cell.strip() for cell in line.split("│")] for line in text.splitlines()]
    assert all([title, *figures] in lines for title in gpu_titles(16).values())


# Across nodes on a GPU -----------------------------------------------------------------------------------------------

# Slowest by round: two hops 3, 4 ms, one hop 2, 2 ms. The copy's 2 ms are those of the 4 GB that must be moved.
HOP_PARTS = [
    HopMeasured(part._replace(times={**part.times, ONE_HOP: one_hop}), {"needed": 100_000_000, "rail": sent})
    for part, one_hop, sent in zip(
        GPU_PARTS[:2], ([0.002, 0.001], [0.001, 0.002]), (101_000_000, 100_000_000), strict=True
    )
]
HOP_LINE = (
    "| cached dispatch, BF16, 16 blocks | 2 x 1 | 3000 | 1500 | 1.75 [1.62, 1.88] | 2000 | 1.75 [1.62, 1.88] "
    "| 100.0 | 100.5 (+0.5%) |"
)


def make_hop_report(num_gpus: int = 1) -> report.BenchReport:
    return report.BenchReport(
        name="internode nvshmem",
        command="python -m deep_ep bench internode --device cuda",
        shape="16 tokens a rank",
        setting={"transport": "nvshmem"},
        machine={**make_gpu_report().machine, "num_gpus": num_gpus},
        titles=hop_titles(16),
        rows=[join_hop_cases(2, "cached-bf16", HOP_PARTS)],
    )


def test_two_hops_stand_beside_one_and_say_that_it_is_no_network(tmp_path: Path):
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench internode nvshmem gpu -->\n<!-- /bench internode nvshmem gpu -->\n")
    report.write_readme(make_hop_report(), readme)
    text = readme.read_text()
    assert HOP_LINE in text
    assert "; ranks 2; several ranks on one GPU as nodes: memory, not a network; 16 tokens a rank" in unwrapped(text)
    assert "| two hops us | one hop us | two hops / one hop | floor us | two hops / floor |" in text
    assert "on one GPU" not in make_hop_report(num_gpus=2).header[1]
    assert "memory, not a network" in make_hop_report(num_gpus=2).header[1]
    console = Console(width=200, record=True, file=io.StringIO())
    console.print(report.rich_table(make_hop_report()))
    assert "memory, not a network" in console.export_text()


def test_two_hops_in_files(tmp_path: Path):
    assert results.file_name(make_hop_report(), datetime.date(2026, 1, 31)) == (
        "2026-01-31-nvidia-h200-internode-nvshmem-2ranks.json"
    )
    report.write_csv(make_hop_report(), tmp_path / "b.csv")
    with (tmp_path / "b.csv").open() as file:
        (line,) = csv.DictReader(file)
    assert (float(line["time_over_one_hop"]), float(line["time_over_one_hop_q1"])) == (1.75, 1.625)
    assert float(line["rail_bytes_per_rank"]) == 100_500_000
    report.write_json(make_hop_report(), tmp_path / "b.json")
    assert report.read_json(tmp_path / "b.json").rows == make_hop_report().rows
    summary = json.loads((tmp_path / "b.json").read_text())["cases"][0]["summary"]
    assert (summary["over_one_hop"], summary["speedups"]) == ([1.625, 1.75, 1.875], {})


def test_two_hops_as_bars(tmp_path: Path):
    pytest.importorskip("matplotlib")
    write_plot(make_hop_report(), tmp_path / "b.png")
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_buffers_of_two_hops_have_room_for_all_rows():
    setting = Setting(device="cuda", num_nodes=2, transport="nvshmem")
    sizes, row_bytes = find_sizes(setting, 4), 2 * 7168
    assert sizes.nvl % 128 == sizes.rdma % 128 == 0
    assert sizes.nvl > 3 * 4 * 4096 * row_bytes  # every token, at one rank
    assert sizes.rdma // 2 > 2 * 4096 * (row_bytes + 80)  # and for every node, with records of 20 words
    assert sizes.heap == 8 << 30
    many = find_sizes(Setting(num_tokens=32768, device="cuda", num_nodes=2, transport="nvshmem"), 4)
    assert many.heap > 2 * many.nvl + many.rdma > 8 << 30
    assert reason_to_skip(setting, 4, 139 << 30, hop_bytes) is None
    assert "needs about" in str(reason_to_skip(setting, 4, 32 << 30, hop_bytes))


def test_variables_of_ranks_that_are_nodes_on_a_gpu():
    setting = Setting(device="cuda", num_nodes=2, transport="message")
    nodes = {"DEEP_EP_RANKS_PER_NODE": "2", "DEEP_EP_TRANSPORT": "message", "GLOO_SOCKET_IFNAME": "lo"}
    assert gpu_variables(setting, 4, 1) == nodes
    setting = Setting(device="cuda", num_nodes=2, transport="nvshmem")
    assert gpu_variables(setting, 4, 1) == {
        "DEEP_EP_RANKS_PER_NODE": "2",
        "DEEP_EP_TRANSPORT": "nvshmem",
        "GLOO_SOCKET_IFNAME": "lo",
        "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "25",
        "NVSHMEM_REMOTE_TRANSPORT": "none",
        "NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME": "lo",
        "NVSHMEM_SYMMETRIC_SIZE": str(8 << 30),
    }
    assert gpu_variables(setting, 4, 4)["CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"] == "100"


# Results that are kept -----------------------------------------------------------------------------------------------


def test_a_results_file_becomes_the_table_of_a_readme(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    name = results.file_name(make_gpu_report(), datetime.date(2026, 1, 31))
    assert name == "2026-01-31-nvidia-h200-normal-3ranks.json"
    report.write_json(make_gpu_report(), tmp_path / name)
    report.write_json(make_report(), tmp_path / "2026-01-30-a-cpu-normal-2ranks.json")
    assert results.newest(tmp_path) == tmp_path / name
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench normal -->\n<!-- /bench normal -->\n<!-- bench gpu -->\nold\n<!-- /bench gpu -->\n")
    results.put_into_readme(tmp_path / name, readme, None)
    text = readme.read_text()
    assert text.startswith("<!-- bench normal -->\n<!-- /bench normal -->\n<!-- bench gpu -->\n\nNVIDIA H200")
    assert "| cached dispatch, BF16, 16 blocks | 3 | 3000 | - | - | - | 133 | 1.75 [1.62, 1.88] |" in text
    assert "Script loop: cached dispatch as DeepEP's own script times it" in unwrapped(text)
    assert "old" not in text
    assert report.read_json(tmp_path / name).rows == make_gpu_report().rows


def test_saving_writes_a_file_and_a_picture(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    pytest.importorskip("matplotlib")
    results.save(make_gpu_report(), tmp_path)
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".png"]
    assert "wrote" in capsys.readouterr().err


def test_saving_without_matplotlib_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    def missing(command: str) -> None:
        raise ValueError(command)

    monkeypatch.setattr(results, "require_matplotlib", missing)
    results.save(make_report(), tmp_path)
    assert [path.suffix for path in tmp_path.iterdir()] == [".json"]
    assert "matplotlib is not installed" in capsys.readouterr().err


def test_other_files_are_no_results(tmp_path: Path):
    (tmp_path / "x.json").write_text("{}")
    with pytest.raises(ValueError, match="holds no results"):
        report.read_json(tmp_path / "x.json")
    with pytest.raises(ValueError, match="cannot read"):
        report.read_json(tmp_path / "y.json")
    with pytest.raises(ValueError, match="there are no results"):
        results.newest(tmp_path)


def test_events_are_recorded_behind_the_barrier_and_the_host_is_ahead(monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            done.append("record")

        def elapsed_time(self, end: Event) -> float:
            assert end is not self
            return 2.0

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda _: done.append("sleep"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    stopwatch = EventStopwatch(lambda: done.append("barrier"))
    assert stopwatch(lambda: done.append("call")) == pytest.approx(0.002)
    assert done == ["sleep", "barrier", "record", "call", "record", "wait"]


def test_the_clocks_of_a_caller():
    now, done = [0.0], []

    class Result:
        pass

    alive: list[weakref.ref[Result]] = []

    def spend(name: str, secs: float) -> None:
        done.append(name)
        now[0] += secs

    def call() -> Result:
        spend("call" if not any(ref() for ref in alive) else "call beside the last one's result", 1.0)
        result = Result()
        alive.append(weakref.ref(result))
        return result

    clocks = CallerClocks(4, lambda: spend("barrier", 100.0), lambda: spend("wait", 10.0), lambda: now[0])
    assert clocks(call) == {"host": 1.0, "in_a_row": (4 * 1.0 + 10.0) / 4, "from_idle": 11.0}
    line_up = ["wait", "barrier"]
    assert done == ["call", *line_up, "call", "wait", *line_up, *["call"] * 4, "wait"]


def test_the_loop_of_the_script_waits_for_nothing_and_drops_the_first_call(monkeypatch: pytest.MonkeyPatch):
    done: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool):
            assert enable_timing

        def record(self) -> None:
            done.append("record")
            self.num_calls = done.count("call")

        def elapsed_time(self, end: Event) -> float:
            assert done[-1] == "wait"
            assert end.num_calls == self.num_calls + 1
            return [3.0, 1.0, 2.0][self.num_calls]

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: done.append("wait"))
    monkeypatch.setattr(torch.distributed, "barrier", lambda: done.append("barrier"))
    stopwatch = script_stopwatch(2, torch.device("cuda"))
    assert stopwatch(lambda: done.append("call")) == pytest.approx(0.0015)
    assert done == ["wait", "barrier", *["record", "call", "record"] * 3, "wait"]
