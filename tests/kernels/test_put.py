"""Rows and records that are put into peers' windows, against the twins that the CPU's engine uses."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from calls import positions, put_rows, unpack
from windows import fail, make_context, offer

from deep_ep import layout
from deep_ep.engine.payload import Payload, Routing, Unpacked, empty_topk, outgoing_parts, unpack_records
from deep_ep.kernels import _triton, put, rows
from deep_ep.kernels.put import LaunchShape

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

SHAPE = LaunchShape(num_blocks=3, words=64, num_warps=2)
UNTOUCHED = 0x5A


def bits(number: float) -> int:
    return int(torch.tensor(number, device="cpu").view(torch.int32))


def test_put_worked_example(device: str) -> None:
    context = make_context(0, 2, device)
    peers = [torch.zeros(9, 2, device=device) for _ in range(2)]
    offer(context, [peers], [9, 9], [5, 7])
    x = torch.tensor([[11.0, 12.0]], device=device)
    slots = torch.tensor([[0, 1]], dtype=torch.int32, device=device)
    put_rows(context, SHAPE, x, None, slots, None, None, None, 0)
    assert peers[0][5].tolist() == [11.0, 12.0]
    assert peers[1][8].tolist() == [11.0, 12.0]
    assert float(peers[0].sum() + peers[1].sum()) == 46.0, "nothing else was written"


def test_unpack_worked_example(device: str) -> None:
    context = make_context(0, 1, device)
    records = torch.zeros(2, put.record_words(2), dtype=torch.int32, device=device)
    records[0, :5] = torch.tensor([4, 1, -1, bits(0.5), bits(0.0)], dtype=torch.int32, device=device)
    source = torch.full((2,), -7, dtype=torch.int32, device=device)
    ids, weights = torch.full((2, 2), 9, device=device), torch.full((2, 2), 9.0, device=device)
    unpack(context, 4, records, torch.tensor([[1]], dtype=torch.int32, device=device), source, ids, weights)
    assert source.tolist() == [4, -7]
    assert ids.tolist() == [[1, -1], [-1, -1]], "rows beyond those that came have no ids"
    assert weights[0].tolist() == [0.5, 0.0]


def test_unpack_writes_no_more_rows_than_were_guessed(device: str) -> None:
    """Four rows came where there is memory for one: what lies behind it stays as it is."""
    records = torch.zeros(4, put.record_words(2), dtype=torch.int32, device=device)
    source = torch.full((4,), -7, dtype=torch.int32, device=device)
    ids, weights = torch.full((4, 2), 9, device=device), torch.full((4, 2), 9.0, device=device)
    prefix = torch.tensor([[4]], dtype=torch.int32, device=device)
    unpack(make_context(0, 1, device), 4, records[:1], prefix, source[:1], ids[:1], weights[:1])
    assert source.tolist() == [0, -7, -7, -7]
    assert ids.tolist() == [[0, 0], [9, 9], [9, 9], [9, 9]]
    assert weights.tolist() == [[0.0, 0.0], [9.0, 9.0], [9.0, 9.0], [9.0, 9.0]]


@pytest.mark.parametrize("is_well", [True, False])
def test_unpack_across_nodes_worked_example(device: str, is_well: bool) -> None:
    context = make_context(1, 2, device)
    records = torch.tensor([[4, 0, 0, 0], [5, 0, 0, 0]], dtype=torch.int32, device=device)
    sources = torch.full((2, 2), -7, dtype=torch.int32, device=device)
    prefix = torch.tensor([[8, 0], [9, 1]], dtype=torch.int32, device=device)
    ends = torch.full((2,), -7, dtype=torch.int32, device=device)
    if not is_well:
        fail(context)
    unpack(context, 4, records, prefix, sources, None, None, ends)
    assert sources.tolist() == [[1, 4] if is_well else [2, -1], [2, -1]], "rows that did not come are nobody's"
    assert ends.tolist() == [0, 1]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 8, 20])
@pytest.mark.parametrize("num_rows", [0, 1, 5000])
def test_each_row_is_told_its_source(device: str, num_ranks: int, num_rows: int) -> None:
    """Some ranks send nothing, and some rows do not come."""
    generator = torch.Generator().manual_seed(num_ranks)
    sent = torch.randint(0, 2 * num_rows // num_ranks + 1, (num_ranks,), generator=generator)
    sent = torch.where(torch.rand(num_ranks, generator=generator) < 0.3, 0, sent)
    ends = sent.cumsum(0).clamp(max=num_rows).to(device, torch.int32)
    num_came, rank = int(ends[-1]), num_ranks // 2
    prefix = torch.zeros(num_ranks, num_ranks, dtype=torch.int32, device=device)
    prefix[:, rank] = ends
    records = torch.arange(num_rows, dtype=torch.int32, device=device)[:, None].repeat(1, 4)
    sources, seen = records.new_full((num_rows, 2), -7), torch.full_like(ends, -7)
    unpack(make_context(rank, num_ranks, device), 2, records, prefix, sources, None, None, seen)
    rows = torch.arange(num_rows, dtype=torch.int32, device=device)
    assert torch.equal(seen, ends)
    assert torch.equal(sources[:, 0], torch.searchsorted(ends, rows, right=True, out_int32=True))
    assert torch.equal(sources[:, 1], torch.where(rows < num_came, rows, -1))


@pytest.mark.parametrize(("num_topk", "num_words"), [(0, 4), (1, 4), (2, 8), (8, 20)])
def test_records_are_whole_vectors(num_topk: int, num_words: int) -> None:
    assert put.record_words(num_topk) == num_words


@dataclass(frozen=True)
class Case:
    num_ranks: int
    num_tokens: tuple[int, ...]
    hidden: int
    dtype: torch.dtype
    num_topk: int
    experts_per_rank: int
    idx_dtype: torch.dtype = torch.int64
    scale_dtype: torch.dtype | None = None
    num_scales: int = 3
    spare_rows: int = 0
    keeps_weights: bool = False


CASES = {
    "one rank": Case(1, (5,), 8, torch.float32, 2, 3),
    "odd bytes": Case(3, (4, 0, 6), 13, torch.uint8, 3, 2, torch.int32),
    "odd halves": Case(2, (9, 4), 33, torch.bfloat16, 1, 1, scale_dtype=torch.float32, num_scales=1),
    "vectors, several pieces": Case(2, (6, 7), 300, torch.bfloat16, 8, 4, scale_dtype=torch.int32, num_scales=5),
    "wide": Case(2, (3, 2), 70, torch.float64, 2, 2, torch.int32, torch.bfloat16),
    "no ids": Case(3, (4, 4, 4), 16, torch.float16, 0, 1),
    "more room than rows": Case(2, (3, 5), 24, torch.float32, 4, 2, scale_dtype=torch.float32, spare_rows=7),
    "all weights": Case(3, (6, 2, 5), 8, torch.float32, 4, 2, keeps_weights=True),
    "five ranks": Case(5, (1, 2, 3, 0, 2), 20, torch.float8_e4m3fn, 3, 1, scale_dtype=torch.float32),
}


def values(case: Case, rank: int, device: str) -> tuple[Payload, Routing]:
    generator = torch.Generator().manual_seed(rank)
    count, num_experts = case.num_tokens[rank], case.num_ranks * case.experts_per_rank
    raw = torch.randint(0, 120, (count, case.hidden * case.dtype.itemsize), generator=generator, dtype=torch.uint8)
    x = rows.rows_as(raw, case.dtype)
    scales = None
    if case.scale_dtype is not None:  # column-major, as callers have them
        scales = torch.rand(case.num_scales, count, generator=generator).mul(99).to(case.scale_dtype).t().to(device)
    ids = torch.randint(-1, num_experts + 1, (count, max(1, case.num_topk)), generator=generator)
    ids, weights = ids.to(device, case.idx_dtype), torch.rand(ids.shape, generator=generator).to(device)
    counted = layout.dispatch_layout(ids, num_experts, case.num_ranks, case.num_ranks)
    topk = (ids, weights) if case.num_topk else (None, None)
    routing = Routing(counted.num_tokens_per_rank, counted.num_tokens_per_expert, counted.is_token_in_rank, *topk)
    return Payload(x.to(device), scales), routing


def capacity(num_rows: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    raw = torch.full((num_rows, columns * dtype.itemsize), UNTOUCHED, dtype=torch.uint8, device=device)
    return rows.rows_as(raw, dtype)


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit, whatever the dtype."""
    return got.shape == expected.shape and torch.equal(rows.as_bytes(got), rows.as_bytes(expected))


@pytest.mark.parametrize("name", CASES)
def test_what_arrives_is_what_the_twins_deliver(device: str, name: str) -> None:
    """All ranks put, then all unpack: the kernels into one set of windows, the twins into another."""
    case = CASES[name]
    num_ranks, ranks = case.num_ranks, range(case.num_ranks)
    inputs = [values(case, rank, device) for rank in ranks]
    sent = torch.stack([routing.num_tokens_per_rank for _, routing in inputs])
    prefix = layout.rank_prefix_matrix(sent)
    came = prefix[-1].tolist()
    num_rows = [rows_of + case.spare_rows for rows_of in came]

    def peers(columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
        return [capacity(num_rows[rank], columns, dtype, device) for rank in ranks]

    x, twin_x = peers(case.hidden, case.dtype), peers(case.hidden, case.dtype)
    scales = twin_scales = None
    if case.scale_dtype is not None:
        scales, twin_scales = peers(case.num_scales, case.scale_dtype), peers(case.num_scales, case.scale_dtype)
    records = peers(put.record_words(case.num_topk), torch.int32)
    twin_records = peers(outgoing_parts(*inputs[0])[-1].size(1), torch.int32)
    context = [make_context(rank, num_ranks, device) for rank in ranks]

    for rank, (payload, routing) in enumerate(inputs):
        numbers, _ = positions(routing.is_token_in_rank)
        offer(context[rank], [x, scales, records], num_rows, (prefix - sent)[rank].tolist())
        send_head = torch.full_like(numbers, -9)
        put_rows(
            context[rank], SHAPE, payload.x, payload.scales, numbers, send_head, routing.topk_idx, routing.topk_weights,
            case.experts_per_rank, case.keeps_weights,
        )  # fmt: skip
        slots = layout.token_slots(routing.is_token_in_rank, prefix, rank)
        assert torch.equal(send_head, slots)
        targets = [twin_x, *([twin_scales] if twin_scales is not None else []), twin_records]
        sections = [
            rows.Section(rows.as_bytes(part), [rows.as_bytes(peer) for peer in to])
            for part, to in zip(outgoing_parts(payload, routing), targets, strict=True)
        ]
        ends = prefix[rank].tolist()
        lanes = [rows.SlotRange(end - count, end, 0) for end, count in zip(ends, sent[rank].tolist(), strict=True)]
        rows.put_rows(sections, slots, lanes, 0)

    for rank, (_, routing) in enumerate(inputs):
        assert same(x[rank], twin_x[rank])
        assert scales is None or twin_scales is None or same(scales[rank], twin_scales[rank])
        twin = Unpacked(None, *empty_topk(routing, num_rows[rank]))
        source, twin_source = torch.empty(2, num_rows[rank], dtype=torch.int32, device=device)
        keeps = (case.experts_per_rank, case.keeps_weights)
        unpack_records(twin_records[rank], came[rank], twin_source, twin, rank, *keeps)
        ids, weights = empty_topk(routing, num_rows[rank])
        unpack(context[rank], 2, records[rank], prefix, source, ids, weights)
        assert torch.equal(source[: came[rank]], twin_source[: came[rank]])
        if ids is not None and weights is not None:
            assert torch.equal(ids, twin.topk_idx)
            assert torch.equal(weights[: came[rank]], twin.topk_weights[: came[rank]])


@pytest.mark.parametrize("is_whole", [True, False])
def test_slots_of_a_handle_are_put_as_they_are(device: str, is_whole: bool) -> None:
    """A cached dispatch: no records, first slots 0."""
    context = make_context(1, 2, device)
    peers = [capacity(4, 6, torch.int16, device) for _ in range(2)]
    offer(context, [peers], [4, 4])
    x = torch.arange(12, dtype=torch.int16, device=device).view(2, 6)
    slots = torch.tensor([[3, -1], [2, 0 if is_whole else -1]], dtype=torch.int32, device=device)
    put_rows(context, SHAPE, x, None, slots, None, None, None, 0)
    assert torch.equal(peers[0][2:], x.flip(0))
    assert same(peers[0][:2], capacity(2, 6, torch.int16, device))
    assert torch.equal(peers[1][0], x[1]) == is_whole
    assert same(peers[1][1:], capacity(3, 6, torch.int16, device))


def test_nothing_is_written_past_the_rows_that_were_offered(device: str) -> None:
    context = make_context(0, 1, device)
    window = capacity(4, 8, torch.uint8, device)
    offer(context, [[window[:2]]], [2])
    slots = torch.tensor([[0], [1], [2], [3]], dtype=torch.int32, device=device)
    put_rows(context, SHAPE, torch.ones(4, 8, dtype=torch.uint8, device=device), None, slots, None, None, None, 0)
    assert window[:2].tolist() == [[1] * 8] * 2
    assert window[2:].tolist() == [[UNTOUCHED] * 8] * 2


def test_a_failed_buffer_moves_nothing(device: str) -> None:
    context = make_context(0, 1, device)
    window = capacity(1, 8, torch.uint8, device)
    offer(context, [[window], None, [window]], [1])
    fail(context)
    slots = torch.tensor([[0]], dtype=torch.int32, device=device)
    put_rows(context, SHAPE, torch.ones(1, 8, dtype=torch.uint8, device=device), None, slots, None, None, None, 0)
    assert window.tolist() == [[UNTOUCHED] * 8]
    source = torch.full((1,), -7, dtype=torch.int32, device=device)
    records = torch.zeros(1, 4, dtype=torch.int32, device=device)
    unpack(context, 1, records, torch.ones(1, 1, dtype=torch.int32, device=device), source, None, None)
    assert source.tolist() == [-7]


def test_words_are_as_wide_as_lengths_and_places_allow(device: str) -> None:
    whole = torch.zeros(4, 64, dtype=torch.uint8, device=device)
    assert put.word_of(whole) == (torch.int32, True)
    assert put.word_of(whole.view(-1)[4:36].view(2, 16)) == (torch.int32, False)
    assert put.word_of(whole.view(-1)[:24].view(2, 12)) == (torch.int32, False)
    assert put.word_of(whole.view(-1)[2:14].view(2, 6)) == (torch.int16, False)
    assert put.word_of(whole, whole.view(-1)[:6].view(2, 3)) == (torch.int8, False)
