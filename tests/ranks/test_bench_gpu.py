"""What ranks do in the benchmark of a GPU: on the CPU its kernels run in Triton's interpreter, with tiny sizes."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from multiprocessing import Pipe
from multiprocessing.connection import Connection

import pytest

from deep_ep.kernels.put import LaunchShape
from deep_ep.launch import RankFailed, run_ranks
from deep_ep.tools.bench.cases import Note
from deep_ep.tools.bench.core import ADD, FLOOR, PRODUCT, WAITS, clock_name
from deep_ep.tools.bench.gpu_cases import GPU_CASES, join_gpu_cases, run_gpu_cases
from deep_ep.tools.bench.inputs import Setting
from deep_ep.tools.bench.tune import TuneNote, tune_rank

INTERPRETED = {"DEEP_EP_TRANSPORT": "interpreted", "TRITON_INTERPRET": "1"}
NUM_TOKENS, HIDDEN = 4, 128


def setting(device: str) -> Setting:
    sizes = (NUM_TOKENS, HIDDEN, 2, 4)
    return Setting(*sizes, num_rounds=2, num_in_row=1, device=device, num_sms=2)


def env(device: str) -> dict[str, str]:
    return INTERPRETED if device == "cpu" else {}


@pytest.fixture
def news() -> Iterator[tuple[Connection, Connection]]:
    here, there = Pipe(duplex=False)
    with here, there:
        yield here, there


def heard(here: Connection) -> list:
    notes = []
    while here.poll():
        notes.append(here.recv())
    return notes


def variants_of(name: str) -> set[str]:
    if name.startswith("script-loop"):
        return {PRODUCT, FLOOR}
    callers = {clock_name(variant, clock) for variant in (PRODUCT, ADD) for clock in WAITS}
    return {PRODUCT} | callers | (set() if name == "layout" else {FLOOR})


def test_all_cases_with_two_ranks(device: str, news: tuple[Connection, Connection]):
    here, there = news
    names = list(GPU_CASES)
    results = run_ranks(run_gpu_cases, 2, setting(device), names, there, 1 << 20, env=env(device))
    parts = {name: [result[index] for result in results] for index, name in enumerate(names)}
    for name, of_ranks in parts.items():
        assert set(of_ranks[0].times) == variants_of(name)
        assert all(len(times) == 2 for part in of_ranks for times in part.times.values())
        assert join_gpu_cases(name, of_ranks).num_ranks == 2
    row, sent_row = 2 * HIDDEN, 2 * HIDDEN + 2 * (8 + 4)
    for rank in range(2):
        num_rows = parts["cached-bf16"][rank].num_bytes // row
        moved = {name: (one[rank].num_bytes, one[rank].memory_bytes) for name, one in parts.items()}
        assert moved["layout"] == (0, 0)
        assert moved["cached-bf16"] == moved["cached-bf16-free"] == (num_rows * row, (NUM_TOKENS + num_rows) * row)
        assert moved["dispatch-bf16"] == (num_rows * row, (NUM_TOKENS + num_rows) * sent_row)
        assert (
            moved["cached-fp8"]
            == moved["script-loop-fp8"]
            == (num_rows * (HIDDEN + 4), (NUM_TOKENS + num_rows) * (HIDDEN + 4))
        )
        assert moved["combine-window"] == (num_rows * row, (NUM_TOKENS + num_rows) * row)
        assert moved["combine-elsewhere"] == (num_rows * row, (NUM_TOKENS + 3 * num_rows) * row)
        assert moved["layer"] == (2 * num_rows * row, (NUM_TOKENS + num_rows) * (sent_row + row))
    assert heard(here) == [Note(2, name, done) for name in names for done in range(3)]


@pytest.mark.parametrize("name", ["cached-bf16", "layer"])
def test_wrong_rows_are_not_timed(device: str, news: tuple[Connection, Connection], name: str):
    with pytest.raises(RankFailed, match=f"{name}: what was delivered is wrong"):
        run_ranks(_run_with_wrong_rows, 2, setting(device), news[1], name, env=env(device))


def _run_with_wrong_rows(rank: int, num_ranks: int, setting: Setting, news: Connection, name: str) -> None:
    from deep_ep.kernels.put import Put

    right = Put.__call__

    def wrong(self, x, *rest) -> None:
        right(self, x.roll(1, 0), *rest)

    Put.__call__ = wrong
    run_gpu_cases(rank, num_ranks, setting, [name], news, 1 << 20)


def test_shapes_are_tried_in_the_calls_that_use_them(device: str, news: tuple[Connection, Connection]):
    here, there = news
    plan = {field: [LaunchShape(1, 32, 1), LaunchShape(2, 64, 2)] for field in ("put", "bounded_pull", "copy")}
    few = dataclasses.replace(setting(device), num_rounds=1)
    results = run_ranks(tune_rank, 2, few, plan, there, env=env(device))
    for result in results:
        assert set(result) == set(plan)
        assert all(set(times) == {"1 x 32 x 1", "2 x 64 x 2"} for times in result.values())
        assert all(len(secs) == 1 for times in result.values() for secs in times.values())
    assert heard(here) == [TuneNote(field) for field in plan for _ in range(2 * 2)]
