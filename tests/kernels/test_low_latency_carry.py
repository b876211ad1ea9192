"""What low-latency calls carry to far ranks' copies over NVSHMEM, with a stand-in for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from heaps import Heaps
from windows import make_places

from deep_ep.kernels import _triton
from deep_ep.kernels.exchange import STATE_FAILED
from deep_ep.kernels.low_latency import carry, combine, dispatch
from deep_ep.kernels.low_latency.carry import Couriers
from deep_ep.kernels.low_latency.words import NUM_KEPT, POST_WORDS, Call, Spots

pytestmark = pytest.mark.skipif(not _triton.INTERPRETED, reason="it is for Triton's interpreter")

R, P, L, K, M = 6, 2, 2, 4, 5
E = R * L
MAX_EXPERTS = 16
ROW, SLOT = 64, 96
PLACES = M * ROW
BOARD = Spots.board_bytes(R, MAX_EXPERTS)


QUARTER, SET, COPIED_SET = 16384, 4096, 1024  # bytes
CALL = Call((5, 6), QUARTER, SET, 9, False, COPIED_SET)
DISPATCHED = dispatch.Sizes(ROW // 2, K, E, M, ROW, 0, PLACES, False, False)
COMBINED = combine.Sizes(SLOT // 2, K, E, M, SLOT, 0, False)
MEMORY = BOARD + 4 * QUARTER
COPY = BOARD + 4 * COPIED_SET
HEAP = MEMORY + (R - P) * COPY + 8 * R * MAX_EXPERTS
RANK, NUMBER = 3, 14


@pytest.fixture
def heaps(monkeypatch: pytest.MonkeyPatch) -> Heaps:
    """Three nodes of two ranks, with different bytes everywhere."""
    heaps = Heaps([torch.randint(0, 256, (HEAP,), dtype=torch.uint8) for _ in range(R)], pe=R - 1 - RANK)
    heaps.stand_in(monkeypatch, carry)
    return heaps


@pytest.fixture
def couriers(heaps: Heaps) -> Couriers:
    memory = heap_of(heaps, RANK).data_ptr()
    state = torch.zeros(Spots.state_room(R), dtype=torch.int64)
    state[0] = NUMBER
    places = replace(make_places(RANK, R, "cpu"), num_nodes=R // P)
    mask, words = torch.zeros(R, dtype=torch.int32), torch.zeros(2 * R, dtype=torch.int64)
    spots = Spots(places, words, state, mask, words, words, MAX_EXPERTS)
    copies, pes = memory + MEMORY, torch.arange(R - 1, -1, -1, dtype=torch.int32)
    return Couriers(spots, memory, copies, COPY, copies + (R - P) * COPY, pes)


def heap_of(heaps: Heaps, rank: int) -> torch.Tensor:
    return heaps.heaps[R - 1 - rank]


def far_ranks() -> list[int]:
    return [rank for rank in range(R) if rank // P != RANK // P]


def copy_start(target: int) -> int:
    """Where a far rank has its copy of this rank."""
    others = [rank for rank in range(R) if rank // P != target // P]
    return MEMORY + others.index(RANK) * COPY


OWN_SET = BOARD + 3 * QUARTER + NUMBER % 4 * SET
COPIED_START = BOARD + NUMBER % 4 * COPIED_SET


def snapshot(heaps: Heaps) -> list[torch.Tensor]:
    return [heap_of(heaps, rank).clone() for rank in range(R)]


def require(heaps: Heaps, expected: list[torch.Tensor]) -> None:
    for rank in range(R):
        assert torch.equal(heap_of(heaps, rank), expected[rank]), rank


def post_place() -> int:
    return 8 * (8 * R + NUMBER % NUM_KEPT * POST_WORDS)


def table_place() -> int:
    return 8 * (8 * R + NUM_KEPT * POST_WORDS + NUMBER % NUM_KEPT * MAX_EXPERTS)


def publish(heaps: Heaps, num_tokens: int) -> torch.Tensor:
    """Places and the number of tokens, as a send writes them; returns the experts, [T, K]."""
    mine = heap_of(heaps, RANK)
    experts = torch.stack([torch.randperm(E)[:K] for _ in range(num_tokens)]) if num_tokens else torch.empty(0, K)
    experts[torch.rand(experts.shape) < 0.4] = -1
    places = torch.where(experts < 0, -1, experts << 16 | 3) if num_tokens else experts
    start = OWN_SET + PLACES
    mine[start : start + 4 * K * num_tokens] = places.to(torch.int32).flatten().view(torch.uint8)
    mine.view(torch.int64)[post_place() // 8 + 2] = num_tokens
    mine.view(torch.int64)[post_place() // 8 + 4] = OWN_SET
    return experts


def post(couriers: Couriers, kind: int, sizes: dispatch.Sizes | combine.Sizes | None, *ranges: torch.Tensor) -> None:
    launch, num_blocks = carry.poster(couriers, CALL, kind, sizes)
    launch(num_blocks, ranges or (couriers.spots.state,))


@pytest.mark.parametrize("num_blocks", [1, 7])
def test_a_token_goes_once_to_each_far_rank_that_has_an_expert_of_it(
    heaps: Heaps, couriers: Couriers, num_blocks: int
) -> None:
    experts = publish(heaps, M)
    couriers.spots.mask[0] = 1
    expected = snapshot(heaps)
    num_rows = 0
    for target in far_ranks():
        for token in range(M):
            if target != 0 and (experts[token] // L == target).any():
                source, place = OWN_SET + token * ROW, copy_start(target) + COPIED_START + token * ROW
                expected[target][place : place + ROW] = expected[RANK][source : source + ROW]
                num_rows += 1
    carry.dispatch_carrier(couriers, CALL, DISPATCHED)[0](num_blocks, ())
    require(heaps, expected)
    assert [call[0] for call in heaps.calls] == ["put"] * num_rows


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_far_ranks_are_told_of_a_dispatch_behind_its_rows(heaps: Heaps, couriers: Couriers, num_tokens: int) -> None:
    publish(heaps, num_tokens)
    expected = snapshot(heaps)
    for target in far_ranks():
        start = copy_start(target)
        for place, size in ((table_place(), 8 * E), (post_place(), 8 * POST_WORDS)):
            expected[target][start + place : start + place + size] = expected[RANK][place : place + size]
        source, place = OWN_SET + PLACES, start + COPIED_START + PLACES
        size = 4 * K * num_tokens
        expected[target][place : place + size] = expected[RANK][source : source + size]
        expected[target].view(torch.int64)[8 * RANK] = NUMBER
    post(couriers, carry.DISPATCH, DISPATCHED)
    require(heaps, expected)
    said = ["put"] * (3 if num_tokens else 2) + ["quiet", "set"]
    assert [call[0] for call in heaps.calls] == said * len(far_ranks())


def test_a_barrier_is_a_post_and_the_word(heaps: Heaps, couriers: Couriers) -> None:
    post(couriers, carry.BARRIER, None)
    assert [call[0] for call in heaps.calls] == ["put", "quiet", "set"] * len(far_ranks())


@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("num_shares", [1, 2, M])
def test_rows_of_a_combine_are_found_by_the_table_that_comes_with_them(
    heaps: Heaps,
    couriers: Couriers,
    monkeypatch: pytest.MonkeyPatch,
    slot: int,
    num_shares: int,
) -> None:
    """As a receive half finds them: from the copy's base by the table's entry, row after row."""
    counts = torch.randint(0, 4, (L, R))
    firsts = torch.cumsum(counts, 1) - counts
    layout_range = counts | firsts << 32
    start = BOARD + slot * QUARTER
    heap_of(heaps, RANK).view(torch.int64)[post_place() // 8 + 4] = start
    num_pairs = L * (R - P)
    monkeypatch.setattr(carry, "_MOST_BLOCKS", num_shares * num_pairs)
    launch, num_blocks = carry.combine_carrier(couriers, CALL, COMBINED)
    assert num_blocks == num_shares * num_pairs
    launch(num_blocks, (layout_range,))
    assert {call[0] for call in heaps.calls} <= {"put"}
    post(couriers, carry.COMBINE, COMBINED, layout_range)
    for target in far_ranks():
        base = copy_start(target)
        theirs, mine = heap_of(heaps, target), heap_of(heaps, RANK)
        table = theirs.view(torch.int64)[(base + table_place()) // 8 :][:E].view(L, R)
        for expert in range(L):
            size = int(counts[expert, target]) * SLOT
            entry = int(table[expert, target])
            assert (entry == 0) == (size == 0)
            source = start + (expert * R * M + int(firsts[expert, target])) * SLOT
            assert torch.equal(theirs[base + entry :][:size], mine[source : source + size])
        assert theirs.view(torch.int64)[8 * RANK] == NUMBER
    touched = {call[3] for call in heaps.calls if len(call) > 1}
    assert touched == {R - 1 - target for target in far_ranks()}


def test_a_buffer_that_failed_carries_nothing(heaps: Heaps, couriers: Couriers) -> None:
    publish(heaps, M)
    couriers.spots.places.state[STATE_FAILED] = 1
    carry.dispatch_carrier(couriers, CALL, DISPATCHED)[0](2, ())
    launch, num_blocks = carry.combine_carrier(couriers, CALL, COMBINED)
    launch(num_blocks, (torch.ones(L, R, dtype=torch.int64),))
    post(couriers, carry.DISPATCH, DISPATCHED)
    assert heaps.calls == []
