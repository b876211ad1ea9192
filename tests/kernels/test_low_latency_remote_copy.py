"""What low-latency calls carry to remote ranks' copies over NVSHMEM, with a stand-in for it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from heaps import Heaps
from windows import make_context

from deep_ep.kernels import _triton
from deep_ep.kernels.exchange import STATE_FAILED
from deep_ep.kernels.low_latency import combine, dispatch, remote_copy
from deep_ep.kernels.low_latency.remote_copy import CopyContext
from deep_ep.kernels.low_latency.words import NUM_KEPT, POST_WORDS, KernelCall, LowLatencyContext

pytestmark = pytest.mark.skipif(not _triton.INTERPRETED, reason="it is for Triton's interpreter")

R, P, L, K, M = 6, 2, 2, 4, 5
E = R * L
MAX_EXPERTS = 16
ROW, SLOT = 64, 96
EXPERT_SLOTS = M * ROW
BOARD = LowLatencyContext.board_bytes(R, MAX_EXPERTS)


QUARTER, SET, COPIED_SET = 16384, 4096, 1024  # bytes
CALL = KernelCall((5, 6), QUARTER, SET, 9, False, COPIED_SET)
DISPATCHED = dispatch.DispatchSizes(ROW // 2, K, E, M, ROW, 0, EXPERT_SLOTS, False, False)
COMBINED = combine.CombineSizes(SLOT // 2, K, E, M, SLOT, 0, False)
MEMORY = BOARD + 4 * QUARTER
COPY = BOARD + 4 * COPIED_SET
HEAP = MEMORY + (R - P) * COPY + 8 * R * MAX_EXPERTS
RANK, NUMBER = 3, 14


@pytest.fixture
def heaps(monkeypatch: pytest.MonkeyPatch) -> Heaps:
    """Three nodes of two ranks, with different bytes everywhere."""
    heaps = Heaps([torch.randint(0, 256, (HEAP,), dtype=torch.uint8) for _ in range(R)], pe=R - 1 - RANK)
    heaps.stand_in(monkeypatch, remote_copy)
    return heaps


@pytest.fixture
def remote(heaps: Heaps) -> CopyContext:
    memory = heap_of(heaps, RANK).data_ptr()
    state = torch.zeros(LowLatencyContext.num_state_words(R), dtype=torch.int64)
    state[0] = NUMBER
    buffer = replace(make_context(RANK, R, "cpu"), num_nodes=R // P)
    mask, words = torch.zeros(R, dtype=torch.int32), torch.zeros(2 * R, dtype=torch.int64)
    context = LowLatencyContext(buffer, words, state, mask, words, words, MAX_EXPERTS)
    copies, pes = memory + MEMORY, torch.arange(R - 1, -1, -1, dtype=torch.int32)
    return CopyContext(context, memory, copies, COPY, copies + (R - P) * COPY, pes)


def heap_of(heaps: Heaps, rank: int) -> torch.Tensor:
    return heaps.heaps[R - 1 - rank]


def remote_ranks() -> list[int]:
    return [rank for rank in range(R) if rank // P != RANK // P]


def copy_start(target: int) -> int:
    """Where a remote rank has its copy of this rank."""
    others = [rank for rank in range(R) if rank // P != target // P]
    return MEMORY + others.index(RANK) * COPY


OWN_SET = BOARD + 3 * QUARTER + NUMBER % 4 * SET
COPIED_START = BOARD + NUMBER % 4 * COPIED_SET


def snapshot(heaps: Heaps) -> list[torch.Tensor]:
    return [heap_of(heaps, rank).clone() for rank in range(R)]


def require(heaps: Heaps, expected: list[torch.Tensor]) -> None:
    for rank in range(R):
        assert torch.equal(heap_of(heaps, rank), expected[rank]), rank


def post_offset() -> int:
    return 8 * (8 * R + NUMBER % NUM_KEPT * POST_WORDS)


def table_offset() -> int:
    return 8 * (8 * R + NUM_KEPT * POST_WORDS + NUMBER % NUM_KEPT * MAX_EXPERTS)


def publish(heaps: Heaps, num_tokens: int) -> torch.Tensor:
    """Places and the number of tokens, as a send writes them; returns the experts, [T, K]."""
    mine = heap_of(heaps, RANK)
    experts = torch.stack([torch.randperm(E)[:K] for _ in range(num_tokens)]) if num_tokens else torch.empty(0, K)
    experts[torch.rand(experts.shape) < 0.4] = -1
    expert_slots = torch.where(experts < 0, -1, experts << 16 | 3) if num_tokens else experts
    start = OWN_SET + EXPERT_SLOTS
    mine[start : start + 4 * K * num_tokens] = expert_slots.to(torch.int32).flatten().view(torch.uint8)
    mine.view(torch.int64)[post_offset() // 8 + 2] = num_tokens
    mine.view(torch.int64)[post_offset() // 8 + 4] = OWN_SET
    return experts


def post(
    remote: CopyContext, kind: int, sizes: dispatch.DispatchSizes | combine.CombineSizes | None, *ranges: torch.Tensor
) -> None:
    launch, num_blocks = remote_copy.poster(remote, CALL, kind, sizes)
    launch(num_blocks, ranges or (remote.context.state,))


@pytest.mark.parametrize("num_blocks", [1, 7])
def test_a_token_goes_once_to_each_remote_rank_that_has_an_expert_of_it(
    heaps: Heaps, remote: CopyContext, num_blocks: int
) -> None:
    experts = publish(heaps, M)
    remote.context.mask[0] = 1
    expected = snapshot(heaps)
    num_rows = 0
    for target in remote_ranks():
        for token in range(M):
            if target != 0 and (experts[token] // L == target).any():
                source, offset = OWN_SET + token * ROW, copy_start(target) + COPIED_START + token * ROW
                expected[target][offset : offset + ROW] = expected[RANK][source : source + ROW]
                num_rows += 1
    remote_copy.dispatch_copier(remote, CALL, DISPATCHED)[0](num_blocks, ())
    require(heaps, expected)
    assert [call[0] for call in heaps.calls] == ["put"] * num_rows


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_remote_ranks_are_told_of_a_dispatch_behind_its_rows(
    heaps: Heaps, remote: CopyContext, num_tokens: int
) -> None:
    publish(heaps, num_tokens)
    expected = snapshot(heaps)
    for target in remote_ranks():
        start = copy_start(target)
        for offset, size in ((table_offset(), 8 * E), (post_offset(), 8 * POST_WORDS)):
            expected[target][start + offset : start + offset + size] = expected[RANK][offset : offset + size]
        source, offset = OWN_SET + EXPERT_SLOTS, start + COPIED_START + EXPERT_SLOTS
        size = 4 * K * num_tokens
        expected[target][offset : offset + size] = expected[RANK][source : source + size]
        expected[target].view(torch.int64)[8 * RANK] = NUMBER
    post(remote, remote_copy.DISPATCH, DISPATCHED)
    require(heaps, expected)
    said = ["put"] * (3 if num_tokens else 2) + ["quiet", "set"]
    assert [call[0] for call in heaps.calls] == said * len(remote_ranks())


def test_a_barrier_is_a_post_and_the_word(heaps: Heaps, remote: CopyContext) -> None:
    post(remote, remote_copy.BARRIER, None)
    assert [call[0] for call in heaps.calls] == ["put", "quiet", "set"] * len(remote_ranks())


@pytest.mark.parametrize("slot", [0, 2])
@pytest.mark.parametrize("num_shares", [1, 2, M])
def test_rows_of_a_combine_are_found_by_the_table_that_comes_with_them(
    heaps: Heaps,
    remote: CopyContext,
    monkeypatch: pytest.MonkeyPatch,
    slot: int,
    num_shares: int,
) -> None:
    """As a receive half finds them: from the copy's base by the table's entry, row after row."""
    counts = torch.randint(0, 4, (L, R))
    firsts = torch.cumsum(counts, 1) - counts
    layout_range = counts | firsts << 32
    start = BOARD + slot * QUARTER
    heap_of(heaps, RANK).view(torch.int64)[post_offset() // 8 + 4] = start
    num_pairs = L * (R - P)
    monkeypatch.setattr(remote_copy, "_MOST_BLOCKS", num_shares * num_pairs)
    launch, num_blocks = remote_copy.combine_copier(remote, CALL, COMBINED)
    assert num_blocks == num_shares * num_pairs
    launch(num_blocks, (layout_range,))
    assert {call[0] for call in heaps.calls} <= {"put"}
    post(remote, remote_copy.COMBINE, COMBINED, layout_range)
    for target in remote_ranks():
        base = copy_start(target)
        theirs, mine = heap_of(heaps, target), heap_of(heaps, RANK)
        table = theirs.view(torch.int64)[(base + table_offset()) // 8 :][:E].view(L, R)
        for expert in range(L):
            size = int(counts[expert, target]) * SLOT
            entry = int(table[expert, target])
            assert (entry == 0) == (size == 0)
            source = start + (expert * R * M + int(firsts[expert, target])) * SLOT
            assert torch.equal(theirs[base + entry :][:size], mine[source : source + size])
        assert theirs.view(torch.int64)[8 * RANK] == NUMBER
    touched = {call[3] for call in heaps.calls if len(call) > 1}
    assert touched == {R - 1 - target for target in remote_ranks()}


def test_a_buffer_that_failed_carries_nothing(heaps: Heaps, remote: CopyContext) -> None:
    publish(heaps, M)
    remote.context.buffer.state[STATE_FAILED] = 1
    remote_copy.dispatch_copier(remote, CALL, DISPATCHED)[0](2, ())
    launch, num_blocks = remote_copy.combine_copier(remote, CALL, COMBINED)
    launch(num_blocks, (torch.ones(L, R, dtype=torch.int64),))
    post(remote, remote_copy.DISPATCH, DISPATCHED)
    assert heaps.calls == []
