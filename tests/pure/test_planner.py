"""The planner: expected rows against counting all cases, the time model against hand-made work, and the command."""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from deep_ep.planner import CLUSTERS, MODELS, Call, Cluster, Question, Routing, find_reach, load_table, make_plan
from deep_ep.planner.calls import Point, find_work, keys_of, read_points
from deep_ep.planner.formats import FORMATS, metadata_bytes, row_bytes
from deep_ep.planner.hardware import find_gpu, network_speed
from deep_ep.planner.layer import Compute, find_compute, time_layer
from deep_ep.planner.model import Constants, log_times, parts_of
from deep_ep.planner.routing import count_reach, sample_routes, uniform_reach
from deep_ep.planner.table import fit_table, prepare
from deep_ep.planner.traffic import find_traffic
from deep_ep.planner.validate import KINDS, cross_validate, over_families, score_families
from deep_ep.tools.bench.core import PRODUCT, Measured
from deep_ep.tools.bench.inputs import Setting
from deep_ep.tools.bench.report import BenchReport, write_json
from deep_ep.tools.cli import main

COLUMNS = [
    *("id", "system", "version", "source", "gpu", "network", "nodes", "ranks", "ranks_per_node", "mode", "op", "dtype"),
    *("tokens_per_rank", "hidden", "topk", "num_experts", "topk_groups", "num_groups", "sms", "bottleneck"),
    *("latency_us", "bandwidth_GBps", "bandwidth_counts", "notes"),
]

# Routing -------------------------------------------------------------------------------------------------------------


def reach_by_counting(routing: Routing, num_units: int) -> float:
    """Every choice of groups and of experts inside them, counted."""
    size, own = routing.num_experts // routing.num_groups, routing.num_experts // num_units
    hits = total = 0
    for groups in itertools.combinations(range(routing.num_groups), routing.topk_groups):
        experts = [group * size + one for group in groups for one in range(size)]
        for chosen in itertools.combinations(experts, routing.topk):
            hits += any(expert < own for expert in chosen)
            total += 1
    return hits / total


@pytest.mark.parametrize(
    ("routing", "num_units"),
    [
        (Routing(8, 3), 4),
        (Routing(8, 3), 2),
        (Routing(6, 6), 3),
        (Routing(12, 2, 4, 2), 12),
        (Routing(12, 3, 4, 2), 4),
        (Routing(12, 3, 4, 2), 2),
        (Routing(12, 2, 6, 2), 3),
        (Routing(12, 4, 4, 4), 3),
    ],
)
def test_the_formula_is_what_counting_gives(routing: Routing, num_units: int) -> None:
    assert uniform_reach(routing, num_units) == pytest.approx(reach_by_counting(routing, num_units), abs=1e-12)
    found = find_reach(routing, num_units, 1)
    assert not found.is_sampled
    assert found.ranks.tolist() == pytest.approx([reach_by_counting(routing, num_units)] * num_units)


def test_sampling_agrees_with_the_formula() -> None:
    for routing in (Routing(64, 6), Routing(64, 6, 8, 3)):
        sampled = count_reach(sample_routes(routing, 1 << 15) // 4, 16, 8)
        formula = find_reach(routing, 16, 8)
        assert float((sampled.ranks / formula.ranks - 1).abs().max()) < 0.05
        assert float(sampled.ranks.mean() / formula.ranks.mean() - 1) == pytest.approx(0, abs=0.005)
        assert float(sampled.nodes.mean() / formula.nodes.mean() - 1) == pytest.approx(0, abs=0.005)
        assert torch.equal(sampled.selections.sum().round(), torch.tensor(6.0, dtype=torch.float64))


def test_popular_experts_are_drawn_without_replacement() -> None:
    routing = Routing(4, 2, load=(5.0, 3.0, 2.0, 0.0))
    drawn = sample_routes(routing, 100_000)
    assert (drawn[:, 0] != drawn[:, 1]).all()
    shares = torch.tensor([0.5, 0.3, 0.2])
    second = torch.stack([shares[other] * shares[one] / (1 - shares[other]) for one, other in _pairs(3)]).view(3, 2)
    expected = shares + second.sum(1)  # drawn first, or second after each of the others
    counted = torch.bincount(drawn.flatten(), minlength=4)[:3] / 100_000
    assert counted.tolist() == pytest.approx(expected.tolist(), abs=0.01)
    assert int((drawn == 3).sum()) == 0


def _pairs(number: int) -> list[tuple[int, int]]:
    return [(one, other) for one in range(number) for other in range(number) if one != other]


def test_a_gate_that_judges_groups_reaches_them_more_evenly_than_chance() -> None:
    by_chance, judged = Routing(64, 4, 8, 4), Routing(64, 4, 8, 4, num_deciding=2)
    evenly = find_reach(judged, 8, 8, num_tokens=1 << 14).nodes.sum()
    assert float(evenly) > 1.02 * float(find_reach(by_chance, 8, 8).nodes.sum())


def test_groups_that_do_not_divide_are_sampled_and_replicas_share_their_tokens() -> None:
    assert find_reach(Routing(24, 2, 8, 2), 6, 3).is_sampled
    routing = Routing(4, 1, load=(1.0, 1.0, 1.0, 5.0))
    copies = torch.tensor([[0, -1], [1, -1], [2, -1], [2, 3]])
    found = find_reach(routing, 4, 2, 1 << 15, copies)
    assert found.ranks.tolist() == pytest.approx([1 / 8, 1 / 8, 3.5 / 8, 2.5 / 8], abs=0.01)


def test_two_thousand_ranks_and_a_skewed_router() -> None:
    reach = find_reach(Routing(2048, 8, zipf=1.0), 2048, 256, num_tokens=1 << 15)
    assert reach.ranks.numel() == 2048
    assert float(reach.selections.sum()) == pytest.approx(8)
    assert float(reach.ranks.max() / reach.ranks.mean()) > 50


@pytest.mark.parametrize(
    ("routing", "words"),
    [
        (Routing(10, 2, 3, 1), "num_groups"),
        (Routing(8, 2, 4, 5), "topk_groups"),
        (Routing(8, 5, 4, 2), "topk"),
        (Routing(8, 2, zipf=-1.0), "zipf"),
        (Routing(3, 2, load=(1.0, 0.0, 0.0)), "load"),
        (Routing(3, 2, load=(1.0, 1.0)), "load"),
    ],
)
def test_routers_that_cannot_be_are_refused(routing: Routing, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        find_reach(routing, 1, 1)


# Bytes ---------------------------------------------------------------------------------------------------------------


def test_bytes_of_rows() -> None:
    assert row_bytes("bf16", 7168) == 14336
    assert row_bytes("fp8", 7168) == 7168 + 56 * 4
    assert row_bytes("fp8", 100) == 104
    assert row_bytes("logfmt", 1024) == 1024 * 10 / 8 + 32
    assert all(0 < row_bytes(name, 512) <= 1024 for name in FORMATS)
    assert (metadata_bytes("normal", "dispatch", 8), metadata_bytes("normal", "combine", 8)) == (96, 0)
    with pytest.raises(ValueError, match="fp3"):
        row_bytes("fp3", 512)


def test_traffic_of_four_ranks_on_two_nodes() -> None:
    # Every token selects experts 0 and 3 of 4: ranks 0 and 3, so both nodes.
    reach = count_reach(torch.tensor([[0, 3]]), 4, 2)
    normal = find_traffic(reach, "normal", "dispatch", "bf16", 10, 100, 2)
    size = 200 + 2 * 12
    assert normal.rank_rows.tolist() == [40, 0, 0, 40]  # ten tokens of each of four ranks
    assert normal.link_bytes.tolist() == [20 * size, 0, 0, 20 * size]  # half of them come to its rail
    assert normal.network_in_bytes.tolist() == [10 * size] * 4
    assert normal.network_out_bytes.tolist() == [10 * size] * 4
    assert (normal.rank_load, normal.network_load) == (2, 1)
    straight = find_traffic(reach, "low_latency", "combine", "bf16", 10, 100, 2)
    assert straight.network_in_bytes.tolist() == [10 * 200] * 4  # each rank's ten rows on the other node come back
    assert straight.network_out_bytes.tolist() == [20 * 200, 0, 0, 20 * 200]
    assert straight.network_load == 2  # of the ranks that send
    assert straight.link_bytes.tolist() == [10 * 200, 0, 0, 10 * 200]


def test_networks_by_their_names() -> None:
    assert network_speed("CX7 IB 400G") == 50
    assert network_speed("EFA 2x200G") == 50
    assert network_speed("10x400G RoCE per node") == 62.5
    assert network_speed("CX6 RoCE 200G") == 25
    assert network_speed("not stated") == 50


# Times ---------------------------------------------------------------------------------------------------------------


def call(**changes: Any) -> Call:
    fields: dict[str, Any] = {
        "system": "DeepEP", "gpu": "H100", "network": "CX7 IB 400G", "mode": "normal", "op": "dispatch",
        "dtype": "bf16", "num_tokens": 1000, "hidden": 500, "routing": Routing(64, 4), "num_ranks": 16,
        "ranks_per_node": 8, "num_sms": 20,
    }  # fmt: skip
    return Call(**(fields | changes))


def test_work_of_a_call() -> None:
    work = find_work(call())
    to_rank, to_node = uniform_reach(Routing(64, 4), 16), uniform_reach(Routing(64, 4), 2)
    assert (work.is_multi_node, work.num_ranks, work.num_experts, work.row_KB) == (1, 16, 0, 1)
    assert work.sm_rows == pytest.approx(1000 * 16 * to_rank / 20)
    assert work.link_us == pytest.approx(1000 * 16 * to_rank * 7 / 8 / 450)
    assert work.network_us == pytest.approx(1000 * to_node / 50)  # one other node
    skewed = find_work(call(rank_load=2.0, network_load=3.0))
    assert skewed.sm_rows == pytest.approx(2 * work.sm_rows)
    assert skewed.network_us == pytest.approx(3 * work.network_us)
    assert find_work(call(is_expanded=True)).sm_rows == pytest.approx(1000 * 4 / 20)


def test_low_latency_counts_selections_and_is_limited_by_the_experts() -> None:
    few = find_work(call(mode="low_latency", num_sms=0, routing=Routing(8, 2), num_ranks=8))
    assert few.sm_rows == pytest.approx(1000 * 2 / 8)  # eight experts, so eight SMs
    many = find_work(call(mode="low_latency", num_sms=0, routing=Routing(288, 2), num_ranks=8))
    assert many.sm_rows == pytest.approx(1000 * 2 / 96)  # three experts to each of 96, not of 132
    assert (few.num_experts, many.num_experts) == (8, 288)
    across = find_work(call(mode="low_latency"))
    assert across.network_us == pytest.approx(1000 * 4 * 0.5 / 50)


def test_a_mesh_has_a_link_for_each_peer() -> None:
    two = find_work(call(gpu="MI300X", network="xGMI", num_ranks=2, ranks_per_node=2))
    reach = uniform_reach(Routing(64, 4), 2)
    assert two.link_us == pytest.approx(1000 * 2 * reach / 2 / (448 / 7))


def test_time_is_latency_and_the_largest_of_what_overlaps() -> None:
    constants = Constants(10, 5, 0.5, 0.1, 2, 1e-9, 0.5, 0.25, 1e-9, 1e-9, 1e-9)
    work = find_work(call(num_tokens=100_000))
    parts = parts_of(constants, work)
    assert parts["latency"] == pytest.approx(10 + 5 + 8 + 2)
    assert parts["link"] == pytest.approx(work.link_us / 0.5)
    assert parts["network"] == pytest.approx(work.network_us / 0.25)
    us = math.exp(log_times(np.log(constants), np.array([work]))[0])
    bodies = sorted((parts["link"], parts["network"]))
    assert parts["latency"] + bodies[1] <= us <= parts["latency"] + sum(bodies)


TRUE = Constants(20, 8, 0.4, 0.01, 0.5, 3, 0.7, 0.8, 0.02, 0.2, 0.03)


def synthetic(system: str = "DeepEP", gpu: str = "H100", factor: float = 1.0, noise: float = 0.0) -> list[Point]:
    generator = np.random.default_rng(0)
    points = []
    for tokens, num_ranks, hidden in itertools.product((1, 16, 128, 1024, 4096), (16, 32, 64), (2048, 7168)):
        one = call(system=system, gpu=gpu, num_tokens=tokens, num_ranks=num_ranks, hidden=hidden, dtype="fp8")
        us = factor * math.exp(log_times(np.log(TRUE), np.array([find_work(one)]))[0] + noise * generator.normal())
        points.append(Point(one, us, f"{system}-{gpu}-{len(points)}", "made up"))
    return points


def test_a_fit_finds_the_times_again_also_of_what_it_has_not_seen() -> None:
    points = synthetic()
    table = fit_table(prepare(points[::2]))
    for point in points[1::2]:
        predicted = table.predict(point.call)
        assert predicted.us == pytest.approx(point.latency_us, rel=0.08)
        assert predicted.low_us < predicted.us < predicted.high_us


def test_an_odd_figure_does_not_turn_a_fit() -> None:
    points = synthetic()
    odd = points[5]._replace(latency_us=30 * points[5].latency_us)
    table = fit_table(prepare([*points[:5], odd, *points[6:]]))
    errors = [abs(table.predict(point.call).us / point.latency_us - 1) for point in points]
    assert np.median(errors) < 0.03


def test_constants_come_from_the_closest_that_is_known() -> None:
    table = fit_table(prepare(synthetic()))
    seen = table.predict(call(dtype="fp8"))
    other_gpu = table.predict(call(dtype="fp8", gpu="B200"))
    other_system = table.predict(call(dtype="fp8", system="new"))
    nothing = table.predict(call(mode="a2a"))
    assert [one.level for one in (seen, other_gpu, other_system, nothing)] == ["hardware", "system", "kind", "usual"]
    widths = [one.high_us / one.us for one in (seen, other_gpu, other_system)]
    assert widths == sorted(widths)
    assert other_gpu.us < seen.us  # of the same constants, on faster links
    far = table.predict(call(dtype="fp8", num_ranks=1024))
    assert far.high_us / far.us > seen.high_us / seen.us


def test_a_table_is_the_same_after_it_was_written(tmp_path: Path) -> None:
    table = fit_table(prepare(synthetic(noise=0.1)))
    table.save(tmp_path / "table.json")
    again = load_table(tmp_path / "table.json")
    assert again.predict(call()).us == pytest.approx(table.predict(call()).us, rel=1e-3)
    assert again.entries.keys() == table.entries.keys()
    (tmp_path / "table.json").write_text("{}")
    with pytest.raises(ValueError, match="is not a table"):
        load_table(tmp_path / "table.json")


def test_every_set_of_constants_of_the_package_has_its_origin() -> None:
    table = load_table()
    assert len(table.entries) > 100
    for key, entry in table.entries.items():
        assert all(value > 0 for value in entry.constants), key
        assert entry.num_points >= 1, key
        assert entry.sources, key
        assert entry.ranks, key
        assert 0 < entry.half < 3, key


# Published figures ---------------------------------------------------------------------------------------------------


def write_figures(path: Path, rows: list[dict[str, Any]]) -> Path:
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, restval="")
        writer.writeheader()
        writer.writerows(rows)
    return path


def figure(point: Point, **changes: Any) -> dict[str, Any]:
    one = point.call
    row = {
        "id": point.id, "system": one.system, "gpu": one.gpu, "network": one.network, "nodes": one.num_nodes,
        "ranks": one.num_ranks, "ranks_per_node": one.ranks_per_node, "mode": one.mode, "op": one.op,
        "dtype": one.dtype, "tokens_per_rank": one.num_tokens, "hidden": one.hidden, "topk": one.routing.topk,
        "num_experts": one.routing.num_experts, "sms": one.num_sms, "latency_us": point.latency_us, "source": "made up",
    }  # fmt: skip
    return row | changes


def test_figures_are_read_and_bandwidths_become_latencies(tmp_path: Path) -> None:
    point = synthetic()[-1]
    one = point.call
    size = row_bytes("fp8", one.hidden)
    reach = one.num_ranks * uniform_reach(one.routing, one.num_ranks)
    bandwidth = one.num_tokens * reach * size / 500 / 1e3  # GB/s of 500 us
    rows = [
        figure(point),
        figure(point, latency_us="", bandwidth_GBps=bandwidth, bandwidth_counts="nvl_recv: rows received per rank"),
        figure(point, latency_us="", bandwidth_GBps=bandwidth, bandwidth_counts="something else"),
        figure(point, latency_us=""),
        figure(point, hidden="", topk="", num_experts="", notes="perfect (balanced) router"),
    ]
    figures = read_points(write_figures(tmp_path / "points.csv", rows))
    assert figures.points[0].call == one
    assert figures.points[1].latency_us == pytest.approx(500)
    assert [point.is_from_bandwidth for point in figures.points] == [False, True, False]
    assert len(figures.with_latency()) == 2
    assert sum(figures.left_out.values()) == 2
    assert figures.points[2].call.routing == Routing(256, 8, is_balanced=True)


def test_files_that_are_no_figures_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "points.csv"
    path.write_text("id,system\n1,2\n")
    with pytest.raises(ValueError, match="lacks the columns version"):
        read_points(path)


def test_figures_that_make_no_sense_are_counted_and_left_out(tmp_path: Path) -> None:
    good = synthetic()[0]
    wrong = [{"ranks": "many"}, {"latency_us": "-1"}, {"hidden": "x"}, {"tokens_per_rank": "-5"}, {"op": "gather"}]
    rows = [figure(good, **changes) for changes in wrong]
    rows += [
        figure(good, dtype="FP8 (E5M2)"),
        figure(good, num_groups="8"),
        figure(good, topk_groups="9", num_groups="4"),
    ]
    figures = read_points(write_figures(tmp_path / "points.csv", rows))
    assert sum(figures.left_out.values()) == len(wrong)
    assert [point.call.dtype for point in figures.points] == ["fp8"] * 3
    assert [point.call.routing.topk_groups for point in figures.points] == [1, 8, 4]


def test_cross_validation_leaves_out_what_it_says() -> None:
    points = synthetic() + synthetic(gpu="B200", factor=1.1) + synthetic(system="UCCL-EP", factor=1.5)
    for kind in KINDS:
        prepared = prepare(points)
        for is_left_out in KINDS[kind](prepared):
            held = [one.point.call for one in prepared if is_left_out(one.point.call)]
            kept = [one.point.call for one in prepared if not is_left_out(one.point.call)]
            known = {
                "shapes": lambda one: (one.family, one.num_tokens, one.hidden),
                "models": lambda one: (one.family, one.hidden),
                "ranks": lambda one: (one.family, one.num_ranks),
                "hardware": lambda one: one.family[1:],
            }[kind]
            assert not {known(one) for one in held} & {known(one) for one in kept}
    checked = cross_validate(points, "ranks")
    assert {one.point.id for one in checked} == {point.id for point in points}
    _, over = over_families(score_families(checked))
    assert over.median < 0.10
    assert cross_validate(points, "hardware")[0].prediction.level in ("system", "kind")


def test_a_different_algorithm_and_a_quantized_combine_have_their_own_constants() -> None:
    plain = keys_of(call())
    assert keys_of(call(version="AsyncLL tuned"))["system"] != plain["system"]
    assert keys_of(call(op="combine", dtype="logfmt"))["system"] != keys_of(call(op="combine"))["system"]
    assert keys_of(call(network="EFA 400G"))["kind"] != plain["kind"]
    one_node = {"num_ranks": 8, "ranks_per_node": 8}
    assert keys_of(call(network="EFA 400G", **one_node))["hardware"] == keys_of(call(**one_node))["hardware"]


# Layers and plans ----------------------------------------------------------------------------------------------------


def test_a_layer_overlaps_with_two_micro_batches() -> None:
    model, h100, compute = MODELS["deepseek-v3"], find_gpu("H100"), Compute(100.0, 60.0, 50.0)
    serial = time_layer(model, h100, "prefill", compute, 30, 40, 0, 1, 1000)
    assert serial.us == pytest.approx(230)
    assert serial.bound == "attention"
    overlapped = time_layer(model, h100, "prefill", compute, 30, 40, 0, 2, 1000)
    assert overlapped.us == pytest.approx(2 * 160)
    assert overlapped.tokens_per_s == pytest.approx(1000 / (2 * (58 * 160 + 3 * 50)) * 1e6)
    training = time_layer(model, h100, "training", compute, 60, 40, 0, 2, 1000)
    assert (training.us, training.bound) == (pytest.approx(400), "communication")  # rows travel twice more, back
    taxed = time_layer(model, h100, "prefill", compute, 30, 40, 66, 2, 1000)
    assert taxed.us == pytest.approx(2 * 320)  # half of the SMs move rows


def test_decoding_is_bound_by_memory_and_prefill_by_operations() -> None:
    model, gpu = MODELS["deepseek-v3"], find_gpu("H100")
    one = find_compute(model, gpu, "decoding", 1, 1, 4, 1.0)
    assert one.experts_us == pytest.approx(4 * 3 * 7168 * 2048 / (3350e3 * 0.8), rel=1e-6)
    long = find_compute(model, gpu, "prefill", 8192, 4096, 4, 1.0)
    assert long.experts_us == pytest.approx(8192 * 8 * 6 * 7168 * 2048 / (1979e6 * 0.6), rel=1e-6)
    assert find_compute(model, gpu, "prefill", 8192, 4096, 4, 2.0).experts_us == pytest.approx(2 * long.experts_us)


def question(**changes: Any) -> Question:
    fields: dict[str, Any] = {"model": MODELS["deepseek-v3"], "cluster": CLUSTERS["h100-ib"], "sizes": (8, 64)}
    return Question(**(fields | changes))


def test_plans_recommend_what_is_quickest_and_fits() -> None:
    table = load_table()
    plan = make_plan(question(phase="decoding", num_tokens=128), table)
    for size in plan.sizes:
        assert {one.mode for one in size.modes} == {"normal", "low_latency"}
        assert size.best.layer.us == min(one.layer.us for one in size.modes if one.is_possible)
        for one in size.modes:
            for predicted in (one.dispatch, one.combine):
                assert 0 < predicted.low_us < predicted.us < predicted.high_us
    large = make_plan(question(phase="decoding", num_tokens=8192), table)
    assert all(size.best.mode == "normal" for size in large.sizes)  # low latency would need too large buffers
    training = make_plan(question(), table)
    assert [one.mode for size in training.sizes for one in size.modes] == ["normal", "normal"]


def test_group_limits_lower_the_bytes_between_nodes() -> None:
    table = load_table()
    free = make_plan(question(sizes=(64,)), table).sizes[0]
    limited = make_plan(question(sizes=(64,), num_groups=8, topk_groups=4), table).sizes[0]
    before, after = (size.best.dispatch_traffic.network_out_bytes.sum() for size in (free, limited))
    expected = 4 * (1 - math.comb(96, 8) / math.comb(128, 8)) / (8 * (1 - math.comb(224, 8) / math.comb(256, 8)))
    assert float(after / before) == pytest.approx(expected)
    assert limited.group_gain > 1


def test_replicas_lower_the_load_of_the_busiest_rank() -> None:
    table = load_table()
    plan = make_plan(question(sizes=(64,), num_tokens=512, zipf=1.0, num_replicas=64), table).sizes[0]
    assert plan.rank_load < 1.1 < 3 < plan.rank_load_before
    bare = make_plan(question(sizes=(64,), num_tokens=512, zipf=1.0), table).sizes[0]
    assert bare.rank_load == pytest.approx(plan.rank_load_before, rel=0.05)
    assert plan.best.layer.tokens_per_s > 1.5 * bare.best.layer.tokens_per_s


def test_sizes_without_an_answer_are_told_with_the_reason() -> None:
    plan = make_plan(question(cluster=CLUSTERS["gb200-nvl72"], sizes=(64, 100, 144)), load_table())
    assert [size.num_ranks for size in plan.sizes] == [64, 144]
    assert plan.left_out[0][0] == 100
    with pytest.raises(ValueError, match="do not fill nodes"):
        make_plan(question(cluster=CLUSTERS["gb200-nvl72"], sizes=(100,)), load_table())
    with pytest.raises(ValueError, match="no GPU 'H900'"):
        make_plan(question(cluster=Cluster("H900", "", 8)), load_table())


# The command ---------------------------------------------------------------------------------------------------------


def test_the_command_prints_plans_and_compares_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    words = ["plan", "--phase", "decoding", "--sizes", "8", "64", "--compare", "cluster=gb200-nvl72"]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "low-latency*" in printed
    assert "second: tokens/s" in printed
    assert main([*words, "--json"]) == 0
    plans = json.loads(capsys.readouterr().out)
    assert [plan["gpu"] for plan in plans] == ["H100", "GB200"]
    assert plans[0]["sizes"][1]["modes"][0]["dispatch"]["num_points"] > 0
    assert main(["plan", "--sizes", "8", "16", "--plot", str(tmp_path / "plan.svg")]) == 0
    assert "<svg" in (tmp_path / "plan.svg").read_text()


def test_the_command_fits_validates_and_cross_validates(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    points = synthetic(noise=0.05) + synthetic(gpu="B200", noise=0.05)
    path = write_figures(tmp_path / "points.csv", [figure(point) for point in points])
    table = str(tmp_path / "table.json")
    assert main(["plan", "--fit", str(path), "-o", table]) == 0
    assert main(["plan", "--validate", str(path), "--table", table]) == 0
    assert "medians over 2 families" in capsys.readouterr().out
    picture = tmp_path / "scatter.svg"
    assert main(["plan", "--validate", str(path), "--cross", "--json", "--plot", str(picture)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told.keys() == {f"unseen {kind}" for kind in KINDS}
    assert told["unseen shapes"]["over_families"]["median"] < 0.1
    assert picture.is_file()


def test_the_command_calibrates_from_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Calls of a made-up machine, whose times grow with the bytes that share its memory."""
    paths = []
    for tokens in (64, 256, 1024, 4096):
        setting = Setting(num_tokens=tokens, hidden=1024, num_experts=64)
        rows = []
        for case, num_ranks in itertools.product(("dispatch-bf16", "combine-window", "round-trip"), (2, 4)):
            secs = 1e-3 * num_ranks + 2e-6 * tokens * num_ranks
            rows.append(Measured(case, num_ranks, [1] * num_ranks, {PRODUCT: [[secs] * 3] * num_ranks}))
        path = tmp_path / f"{tokens}.json"
        titles = {row.case: row.case for row in rows}
        write_json(BenchReport("normal", "made up", "", dataclasses.asdict(setting), {}, titles, rows), path)
        paths.append(str(path))
    table = tmp_path / "table.json"
    assert main(["plan", "--calibrate", "--results", *paths, "-o", str(table)]) == 0
    told = capsys.readouterr().out
    assert "16 of 16 calls" in told  # a round trip is two calls, and not among them
    error = float(told.split("median error ")[1].split("%")[0])
    assert error < 25
    machine = load_table(table)
    assert any("deep_ep" in key for key in machine.entries)
    assert machine.entries.keys() > load_table().entries.keys()
    assert machine.predict(call(system="new")) == load_table().predict(call(system="new"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "gpt"], "no model 'gpt'"),
        (["--cluster", "mine"], "no cluster 'mine'"),
        (["--compare", "colour=red"], "--compare takes"),
        (["--compare", "zipf=much"], "must be a number"),
        (["--cross"], "--cross needs --validate"),
        (["--fit", "x.csv"], "--fit needs -o"),
        (["--validate", "nowhere.csv"], "cannot be read"),
        (["--phase", "training", "--modes", "low_latency"], "low latency is for decoding"),
        (["--topk", "0"], "at least 1"),
        (["--trace", "nowhere"], "there is no nowhere"),
    ],
)
def test_the_command_says_what_is_wrong(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--sizes", "8", *words]) == 2
    assert said in capsys.readouterr().err
