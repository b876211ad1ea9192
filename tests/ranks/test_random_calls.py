"""A thousand random calls of mixed kinds on four ranks, against the oracle, exact."""

from __future__ import annotations

import os
from collections import Counter

import pytest

from deep_ep.launch import run_ranks
from deep_ep.tools.soak import SoakReport, soak_rank

# Arena limits of the four ranks, in bytes (0: none). Small ones force staging, on all ranks or on some.
ARENAS = {
    "free": (0, 0, 0, 0),
    "tiny": (8192, 8192, 8192, 8192),
    "uneven": (0, 4096, 0, 16384),
    "one page": (4096, 4096, 4096, 4096),
}


# Most bytes of rows that the four ranks post: all small calls are posted, none is, or only some ranks' rows are.
POSTED = {"all": (1 << 18,) * 4, "none": (0,) * 4, "some": (1 << 18, 600, 0, 6000)}

SMALL = [name for name in ARENAS if name != "free"]  # only the CPU stages


def limited_soak(
    rank: int, num_ranks: int, limits: tuple[int, ...], posted: tuple[int, ...], seed: int, num_calls: int
) -> SoakReport:
    os.environ["DEEP_EP_ARENA_BYTES"] = str(limits[rank % len(limits)])
    os.environ["DEEP_EP_POSTED_BYTES"] = str(posted[rank % len(posted)])
    return soak_rank(rank, num_ranks, seed, num_calls)


@pytest.mark.parametrize("arena", ["free", *(pytest.param(name, marks=pytest.mark.cpu_only) for name in SMALL)])
def test_150_calls_on_four_ranks(device: str, arena: str) -> None:
    reports = run_ranks(limited_soak, 4, ARENAS[arena], POSTED["none"], 1234 + list(ARENAS).index(arena), 150)
    made = Counter(reports[0].calls)
    assert sum(made.values()) == 150
    assert min(made[kind] for kind in ("dispatch", "worst-case dispatch", "cached dispatch", "combine")) > 5, made
    paths = sum((Counter(report.stats["calls"]) for report in reports), Counter())
    staged = paths["dispatch/staged"] + paths["combine/staged"]
    assert (staged > 0) == (arena != "free"), paths
    assert (reports[0].stats["rounds"] > 150) == (arena != "free"), reports[0].stats
    assert paths["dispatch/direct"] > 0
    assert paths["combine/pulled"] > 0


@pytest.mark.parametrize(
    ("posted", "arena"),
    [
        ("all", "free"),
        ("some", "uneven"),
        pytest.param("all", "uneven", marks=pytest.mark.exhaustive),
        pytest.param("some", "free", marks=pytest.mark.exhaustive),
    ],
)
@pytest.mark.cpu_only
def test_150_small_calls_on_four_ranks(device: str, arena: str, posted: str) -> None:
    reports = run_ranks(limited_soak, 4, ARENAS[arena], POSTED[posted], 4321, 150)
    paths = sum((Counter(report.stats["calls"]) for report in reports), Counter())
    assert paths["dispatch/posted"] > 0
    assert paths["combine/posted"] > 0
    if arena == "free":  # where there is memory, only expanded rows are never posted
        assert (paths["dispatch/direct"] > 0) == (posted == "some"), paths


@pytest.mark.parametrize(
    ("num_ranks", "posted"),
    [
        (1, "none"),
        (2, "none"),
        (3, "all"),
        (8, "none"),
        *(
            pytest.param(*one, marks=pytest.mark.exhaustive)
            for one in ((1, "all"), (2, "all"), (3, "none"), (8, "all"))
        ),
    ],
)
def test_other_group_sizes(device: str, num_ranks: int, posted: str) -> None:
    arena = ARENAS["uneven" if device == "cpu" else "free"]
    run_ranks(limited_soak, num_ranks, arena, POSTED[posted], 99 + num_ranks, 40)
