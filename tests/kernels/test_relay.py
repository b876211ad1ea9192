"""Rows that are laid into the outbox, and rows that are passed on where they landed, against their twins."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from windows import fail, make_places, offer

from deep_ep.kernels import _triton, exchange, put, relay, rows
from deep_ep.kernels.put import Shape
from deep_ep.sizing import align

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

SHAPE = Shape(num_blocks=3, words=64, num_warps=2)
UNTOUCHED = 0x5A
FAR = 1 << 40  # what no kernel may use: whoever does is off by far


def bits(number: float) -> int:
    return int(torch.tensor(number, device="cpu").view(torch.int32))


def poisoned(num_bytes: int, device: str) -> torch.Tensor:
    return torch.full((num_bytes,), UNTOUCHED, dtype=torch.uint8, device=device)


def int32(numbers: list, device: str) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def plan_out(counts: list[int], device: str) -> torch.Tensor:
    """A plan of tokens that leave; what is about those that come is far off."""
    plan = torch.full((len(counts), relay.PLAN_WORDS), FAR, dtype=torch.int64, device="cpu")
    plan[:, relay.PLAN_NUM_OUT] = torch.tensor(counts, device="cpu")
    plan[:, relay.PLAN_OUT_START] = plan[:, relay.PLAN_NUM_OUT].cumsum(0) - plan[:, relay.PLAN_NUM_OUT]
    return plan.to(device)


def plan_in(counts: list[int], device: str) -> torch.Tensor:
    """A plan of rows that come; what is about those that leave is far off."""
    plan = torch.full((len(counts), relay.PLAN_WORDS), FAR, dtype=torch.int64, device="cpu")
    plan[:, relay.PLAN_NUM_IN] = torch.tensor(counts, device="cpu")
    plan[:, relay.PLAN_IN_START] = plan[:, relay.PLAN_NUM_IN].cumsum(0) - plan[:, relay.PLAN_NUM_IN]
    return plan.to(device)


# Worked examples -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("chunk", "num_chunks", "expected"), [(0, 1, [1, 3]), (0, 2, [1, 0]), (1, 2, [0, 3])])
def test_pack_worked_example(device: str, chunk: int, num_chunks: int, expected: list[int]) -> None:
    places = make_places(0, 2, device)
    x = torch.tensor([[1.0], [2.0], [3.0]], device=device)
    node_slots = int32([[0, 0], [1, -1], [-1, 1]], device)
    outbox = torch.zeros(5 * 4, dtype=torch.uint8, device=device)
    plan = plan_out([2, 2], device)
    relay.pack(places, SHAPE, x, None, node_slots, None, None, None, plan, outbox, [0], 0, 1, 0, chunk, num_chunks)
    assert outbox.view(torch.float32).tolist() == [0, 0, *expected, 0]


def test_relay_record_worked_example(device: str) -> None:
    """Rank 1 of two nodes of two ranks: token 1 goes to row 6 of rank 2 and to row 9 of rank 3."""
    places = make_places(1, 4, device)
    x = torch.tensor([[1.0], [2.0]], device=device)
    node_slots = int32([[0, -1], [-1, 0]], device)
    send_head = int32([[3, -1, -1, -1], [-1, -1, 6, 9]], device)
    ids = torch.tensor([[0, 1], [7, (1 << 32) + 4]], device=device)  # no expert is that far
    weights = torch.tensor([[0.125, 0.25], [0.5, 1.0]], device=device)
    outbox = poisoned(16 + 3 * 32, device)
    plan = plan_out([1, 1], device)
    relay.pack(
        places, SHAPE, x, None, node_slots, send_head, ids, weights, plan, outbox, [0, 0, 16], 0, 2, 8, 0, 1
    )  # fmt: skip
    assert outbox[:12].view(torch.float32)[1].item() == 2.0
    record = outbox[16 + 32 :].view(torch.int32)
    assert record[:7].tolist() == [1, 6, 9, 7, -1, bits(0.5), bits(1.0)]
    outbox[4:8] = outbox[48 : 48 + 28] = UNTOUCHED
    assert torch.equal(outbox, poisoned(16 + 3 * 32, device)), "nothing else was written"


def test_forward_worked_example(device: str) -> None:
    places = make_places(0, 4, device)
    window = [torch.zeros(6, 1, device=device) for _ in range(4)]
    records = [int32([[0] * 4] * 6, device) for _ in range(4)]
    offer(places, [window, None, records], [6] * 4)
    landing = poisoned(32 + 5 * 32, device)
    landing[16:20].view(torch.float32).fill_(2.5)
    # One selection: expert 2, which is the last one of rank 0's three.
    landing[32 + 4 * 32 :].view(torch.int32)[:5] = int32([7, 5, -1, 2, bits(0.5)], device)
    slots = int32([[-9, -9]] * 6, device)
    plan = plan_in([4, 1], device)
    relay.forward(
        places, SHAPE, plan, landing, [0, 0, 32], 4, 0, slots, places.table, 0, 2, 0, True, 1, 3, 0, 1
    )  # fmt: skip
    assert window[0].tolist() == [[0], [0], [0], [0], [0], [2.5]]
    assert records[0].tolist() == [[0] * 4] * 5 + [[7, 2, bits(0.5), 0]]
    assert slots.tolist() == [[-9, -9]] * 4 + [[5, -1], [-9, -9]]
    assert not any(peer.any() for peer in (*window[1:], *records[1:])), "nothing else was written"


@pytest.mark.parametrize(("num_topk", "num_words"), [(0, 12), (1, 12), (2, 16), (8, 28)])
def test_relay_records_are_whole_vectors(num_topk: int, num_words: int) -> None:
    assert relay.relay_record_words(8, num_topk) == num_words


# Against the twins ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`counts` has, for each node, the rows that come from it; as many tokens may go to it, of `num_tokens`."""

    ranks_per_node: int
    node: int
    counts: tuple[int, ...]
    hidden: int
    dtype: torch.dtype
    num_topk: int = 0
    experts_per_rank: int = 2
    idx_dtype: torch.dtype = torch.int64
    scale_dtype: torch.dtype | None = None
    num_scales: int = 3
    has_records: bool = True
    num_chunks: int = 1
    shape: Shape = SHAPE

    @property
    def num_nodes(self) -> int:
        return len(self.counts)

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def num_experts(self) -> int:
        return self.num_ranks * self.experts_per_rank

    @property
    def widths(self) -> tuple[int, int, int]:
        scales = self.num_scales * self.scale_dtype.itemsize if self.scale_dtype is not None else 0
        record = 4 * relay.relay_record_words(self.ranks_per_node, self.num_topk) if self.has_records else 0
        return self.hidden * self.dtype.itemsize, scales, record


CASES = {
    "vectors": Case(2, 0, (5, 9), 64, torch.bfloat16, 2, scale_dtype=torch.float32, num_scales=4),
    "vectors, several pieces": Case(4, 1, (6, 3, 7), 300, torch.float32, 8, scale_dtype=torch.int32, num_chunks=3),
    "odd bytes": Case(3, 1, (4, 3, 6), 13, torch.uint8, 3, 1, torch.int32, torch.uint8, num_chunks=3),
    "odd halves": Case(1, 1, (9, 4), 133, torch.bfloat16, 1, scale_dtype=torch.float16, num_scales=1),
    "wide": Case(2, 1, (3, 2), 9, torch.float64, 2, 3, torch.int32, torch.float64, num_chunks=3),
    "no ids": Case(2, 2, (4, 0, 4, 5), 16, torch.float16, scale_dtype=torch.float32),
    "empty nodes": Case(2, 0, (0, 0, 5, 0, 1), 20, torch.float8_e4m3fn, 3, scale_dtype=torch.float32, num_chunks=3),
    "a handle's slots": Case(2, 0, (2, 5, 3), 24, torch.bfloat16, has_records=False, num_chunks=3),
    "a handle's, with scales": Case(3, 1, (7, 2), 7, torch.uint8, scale_dtype=torch.float32, has_records=False),
    "more blocks than rows": Case(2, 0, (3, 8, 2), 40, torch.float32, 2, shape=replace(SHAPE, num_blocks=40)),
    "one node": Case(4, 0, (3,), 8, torch.float32, 2),
    "no rows": Case(2, 0, (0, 0), 8, torch.float32, 2, num_chunks=3),
}


def sections(case: Case, num_rows: int) -> tuple[list[int], int]:
    """Where sections begin if there are so many rows, with a gap before each, and where the last one ends."""
    offsets, end = [], 0
    for width in case.widths:
        offsets.append(align(end, 16) + 16)
        end = offsets[-1] + num_rows * width
    return offsets, align(end, 16) + 32


def outgoing(case: Case, num_tokens: int, device: str, seed: int = 0) -> dict[str, torch.Tensor | None]:
    """Tokens for other nodes: `counts` of them, or as many as there are; those of the own node, too."""
    generator = torch.Generator().manual_seed(seed)

    def some(high: int, *shape: int, low: int = 0) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator, device="cpu")

    raw = some(120, num_tokens, case.widths[0]).to(torch.uint8)
    scales = None
    if case.scale_dtype is not None:  # column-major, as callers have them
        scales = some(99, case.num_scales, num_tokens).to(case.scale_dtype).to(device).t()
    node_slots = torch.full((num_tokens, case.num_nodes), -1, dtype=torch.int32, device="cpu")
    for other, count in enumerate(case.counts):
        tokens = torch.randperm(num_tokens, generator=generator, device="cpu")[:count].sort().values
        node_slots[tokens, other] = torch.arange(tokens.numel(), dtype=torch.int32, device="cpu")
    ids = some(case.num_experts + 2, num_tokens, case.num_topk, low=-2).to(case.idx_dtype)
    weights = torch.rand(ids.shape, generator=generator, device="cpu")
    has_topk = case.num_topk > 0 and case.has_records
    return {
        "x": rows.rows_as(raw, case.dtype).to(device),
        "scales": scales,
        "node_slots": node_slots.to(device),
        "send_head": some(1000, num_tokens, case.num_ranks, low=-1).int().to(device) if case.has_records else None,
        "topk_idx": ids.to(device) if has_topk else None,
        "topk_weights": weights.to(device) if has_topk else None,
    }


@pytest.mark.parametrize("num_tokens", [0, 11])
@pytest.mark.parametrize("name", CASES)
def test_pack_lays_out_what_its_twin_does(device: str, name: str, num_tokens: int) -> None:
    case = CASES[name]
    sent = outgoing(case, num_tokens, device)
    places = make_places(case.node * case.ranks_per_node, case.num_ranks, device)
    plan = plan_out([min(count, num_tokens) for count in case.counts], device)
    offsets, num_bytes = sections(case, sum(case.counts))
    got, expected = poisoned(num_bytes, device), poisoned(num_bytes, device)
    numbers = (case.node, case.ranks_per_node, case.num_experts)
    for chunk in range(case.num_chunks):
        part = (*numbers, chunk, case.num_chunks)
        relay.pack(places, case.shape, *sent.values(), plan, got, offsets, *part)
        relay.pack_torch(*sent.values(), plan, expected, offsets, *part)
        assert torch.equal(got, expected), f"chunk {chunk}"
    others = sum(min(count, num_tokens) for other, count in enumerate(case.counts) if other != case.node)
    assert bool((got != UNTOUCHED).any()) == (others > 0)


class Node:
    """The windows of a node's ranks, with spare rows behind those that they offer, and a table that leads to them."""

    def __init__(self, case: Case, rooms: list[int], device: str):
        row_bytes, scale_bytes, record_bytes = case.widths
        widths = [row_bytes, scale_bytes, record_bytes and 4 * put.record_words(case.num_topk)]
        self.memory = [[poisoned((room + 3) * width, device) for width in widths] for room in rooms]
        self.sections = [
            [part[: room * width].view(room, width) if width else None for part, width in zip(own, widths, strict=True)]
            for own, room in zip(self.memory, rooms, strict=True)
        ]
        self.places = make_places(case.node * case.ranks_per_node, case.num_ranks, device)
        first, none = case.node * case.ranks_per_node, poisoned(0, device)
        peers = [[none] * case.num_ranks for _ in range(exchange.NUM_SECTIONS)]
        every = [0] * case.num_ranks
        for peer, own in enumerate(self.memory):
            every[first + peer] = rooms[peer]
            for section, part in enumerate(own):
                peers[section][first + peer] = part
        offer(self.places, peers, every, [FAR] * case.num_ranks)


def landed(case: Case, num_rows: int, device: str) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """A landing full of rows, where its sections begin, and the rows' slots: some none, some more than are offered."""
    generator = torch.Generator().manual_seed(7)
    offsets, num_bytes = sections(case, num_rows)
    landing = torch.randint(0, 120, (num_bytes,), generator=generator, dtype=torch.uint8, device="cpu")
    orders = [torch.randperm(num_rows + 2, generator=generator, device="cpu") for _ in range(case.ranks_per_node)]
    slots = torch.stack([order[:num_rows] for order in orders], 1).int() - 1
    if case.has_records:
        width = case.widths[2]
        records = landing[offsets[2] : offsets[2] + num_rows * width].view(torch.int32).view(num_rows, width // 4)
        records[:, 1 : 1 + case.ranks_per_node] = slots
        ids = records[:, 1 + case.ranks_per_node :][:, : case.num_topk]
        ids.copy_(torch.randint(-1, case.num_experts, ids.shape, generator=generator, device="cpu"))
    return landing.to(device), offsets, slots.to(device)


def pass_on(
    case: Case,
    node: Node,
    plan: torch.Tensor,
    landing: torch.Tensor,
    offsets: list[int],
    slots: torch.Tensor,
    chunk: int,
    sources: torch.Tensor | None = None,
) -> None:
    relay.forward(
        node.places, case.shape, plan, landing, offsets, *case.widths[:2], slots, node.places.table,
        case.node * case.ranks_per_node, case.ranks_per_node, case.node, case.has_records, case.num_topk,
        case.experts_per_rank, chunk, case.num_chunks, sources,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_may_be_fetched_from_the_outboxes_that_they_lie_in(device: str, name: str) -> None:
    """Those of node n lie n + 1 rows further on there than they would in the landing."""
    case, slots = CASES[name], []
    num_rows, num_nodes = sum(case.counts), len(case.counts)
    landing, offsets, true_slots = landed(case, num_rows, device)
    far_offsets, num_bytes = sections(case, num_rows + num_nodes)
    plan = plan_in(list(case.counts), device)
    plan[:, exchange.PLAN_BACK_START] = plan[:, relay.PLAN_IN_START] + torch.arange(1, num_nodes + 1, device=device)
    outboxes = [poisoned(num_bytes, device) for _ in range(num_nodes)]
    for node, outbox in enumerate(outboxes):
        for offset, far_offset, width in zip(offsets, far_offsets, case.widths, strict=False):
            begin, size = far_offset + (node + 1) * width, num_rows * width
            outbox[begin : begin + size] = landing[offset : offset + size]
    sources = torch.tensor([outbox.data_ptr() for outbox in outboxes], device="cpu").to(device)
    rooms = [num_rows + 2] * case.ranks_per_node
    fetched, expected = Node(case, rooms, device), Node(case, rooms, device)
    for node, is_fetched in ((fetched, True), (expected, False)):
        memory = torch.full((num_rows, case.ranks_per_node), -9, dtype=torch.int32, device=device)
        memory = memory if case.has_records else true_slots.clone()
        for chunk in range(case.num_chunks):
            where = (landing, far_offsets if is_fetched else offsets)
            pass_on(case, node, plan, *where, memory, chunk, sources if is_fetched else None)
        slots.append(memory)
    for own, others in zip(fetched.memory, expected.memory, strict=True):
        assert all(torch.equal(part, other) for part, other in zip(own, others, strict=True))
    assert torch.equal(*slots)


@pytest.mark.parametrize("name", CASES)
def test_forward_delivers_what_its_twin_does(device: str, name: str) -> None:
    """What is beyond the rooms is not written. The handle is short by a row: nor is what is beyond it."""
    case = CASES[name]
    num_rows = sum(case.counts)
    landing, offsets, true_slots = landed(case, num_rows, device)
    before, plan = landing.clone(), plan_in(list(case.counts), device)
    rooms = [max(0, num_rows - 1 - peer) for peer in range(case.ranks_per_node)]
    got, expected = Node(case, rooms, device), Node(case, rooms, device)
    memory = torch.full((num_rows + 4, case.ranks_per_node), -9, dtype=torch.int32, device=device)
    if not case.has_records:
        memory[:num_rows] = true_slots
    twin_memory = memory.clone()
    num_slots = max(0, num_rows - 1)
    for chunk in range(case.num_chunks):
        pass_on(case, got, plan, landing, offsets, memory[:num_slots], chunk)
        relay.forward_torch(
            plan, landing, offsets, twin_memory[:num_slots], expected.sections, case.node * case.ranks_per_node,
            case.node, case.has_records, case.num_topk, case.experts_per_rank, chunk, case.num_chunks,
        )  # fmt: skip
        for own, twins in zip(got.memory, expected.memory, strict=True):
            assert all(torch.equal(part, twin) for part, twin in zip(own, twins, strict=True)), f"chunk {chunk}"
        assert torch.equal(memory, twin_memory)
    assert torch.equal(landing, before)
    others = num_rows - case.counts[case.node]
    assert any(bool((part != UNTOUCHED).any()) for own in got.memory for part in own) == (others > 0)


def test_a_relayed_row_is_the_row_that_a_put_would_have_written(device: str) -> None:
    """Rank 1 sends to ranks 2 and 3, once by way of rank 3, once as if they were near."""
    case = Case(2, 0, (4, 6), 24, torch.bfloat16, 3, 2, torch.int32, torch.float32, num_chunks=2)
    sent, far = outgoing(case, 9, device), replace(case, node=1)
    sent["send_head"] = torch.full((9, 4), -1, dtype=torch.int32, device=device)
    for rank in (2, 3):
        goes = (sent["node_slots"][:, 1] >= 0).nonzero()[rank - 2 :, 0]
        sent["send_head"][goes, rank] = torch.arange(goes.numel(), dtype=torch.int32, device=device).flip(0)
    offsets, num_bytes = sections(case, 6)
    outbox, landing = poisoned(num_bytes, device), poisoned(num_bytes, device)
    relayed, near = Node(far, [6, 6], device), Node(far, [6, 6], device)
    plan, plan_there = plan_out([4, 6], device), plan_in([6, 0], device)
    plan[:, relay.PLAN_OUT_START] = 0  # the own node's rows never come: its block may lie anywhere
    slots = torch.full((6, 2), -9, dtype=torch.int32, device=device)
    for chunk in range(2):
        relay.pack(make_places(1, 4, device), SHAPE, *sent.values(), plan, outbox, offsets, 0, 2, 8, chunk, 2)
        landing.copy_(outbox)
        pass_on(far, relayed, plan_there, landing, offsets, slots, chunk)
    offer(near.places, [[part[s] for part in (*near.memory, *near.memory)] for s in range(3)], [0, 0, 6, 6])
    x, scales, _, send_head, ids, weights = sent.values()
    put.put(near.places, SHAPE, x, scales, send_head, torch.empty_like(send_head), ids, weights, 2)
    for own, direct in zip(relayed.memory, near.memory, strict=True):
        assert all(torch.equal(part, other) for part, other in zip(own, direct, strict=True))
    assert torch.equal(slots, send_head[sent["node_slots"][:, 1] >= 0, 2:])


@pytest.mark.parametrize("is_failed", [True, False])
def test_a_failed_buffer_and_a_held_call_move_nothing(device: str, is_failed: bool) -> None:
    case = CASES["vectors"]
    num_rows = sum(case.counts)
    landing, offsets, _ = landed(case, num_rows, device)
    node = Node(case, [num_rows] * 2, device)
    if is_failed:
        fail(node.places)
    else:
        node.places.state[exchange.STATE_HELD] = 1
    slots = torch.full((num_rows, 2), -9, dtype=torch.int32, device=device)
    pass_on(case, node, plan_in(list(case.counts), device), landing, offsets, slots, 0)
    assert bool((slots == -9).all())
    assert all(bool((part == UNTOUCHED).all()) for own in node.memory for part in own)
    outbox, plan = poisoned(sections(case, num_rows)[1], device), plan_out(list(case.counts), device)
    sent = outgoing(case, 11, device).values()
    relay.pack(node.places, SHAPE, *sent, plan, outbox, offsets, 0, 2, case.num_experts, 0, 1)
    assert bool((outbox == UNTOUCHED).all())
