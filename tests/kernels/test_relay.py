"""Rows that are passed on where they landed, against their twin."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import twins
from windows import fail, make_context, offer

from deep_ep.kernels import _triton, exchange, put, relay
from deep_ep.kernels.put import LaunchShape
from deep_ep.sizing import align

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

SHAPE = LaunchShape(num_blocks=3, words=64, num_warps=2)
UNTOUCHED = 0x5A
FAR = 1 << 40  # what no kernel may use: whoever does is off by far


def bits(number: float) -> int:
    return int(torch.tensor(number, device="cpu").view(torch.int32))


def poisoned(num_bytes: int, device: str) -> torch.Tensor:
    return torch.full((num_bytes,), UNTOUCHED, dtype=torch.uint8, device=device)


def int32(numbers: list, device: str) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def plan_in(counts: list[int], device: str) -> torch.Tensor:
    """A plan of rows that come; what is about those that leave is far off."""
    plan = torch.full((len(counts), relay.PLAN_WORDS), FAR, dtype=torch.int64, device="cpu")
    plan[:, relay.PLAN_NUM_IN] = torch.tensor(counts, device="cpu")
    plan[:, relay.PLAN_IN_START] = plan[:, relay.PLAN_NUM_IN].cumsum(0) - plan[:, relay.PLAN_NUM_IN]
    return plan.to(device)


# Worked examples -----------------------------------------------------------------------------------------------------


def test_forward_worked_example(device: str) -> None:
    context = make_context(0, 4, device)
    window = [torch.zeros(6, 1, device=device) for _ in range(4)]
    records = [int32([[0] * 4] * 6, device) for _ in range(4)]
    offer(context, [window, None, records], [6] * 4)
    recv_buffer = poisoned(32 + 5 * 32, device)
    recv_buffer[16:20].view(torch.float32).fill_(2.5)
    # One selection: expert 2, which is the last one of rank 0's three.
    recv_buffer[32 + 4 * 32 :].view(torch.int32)[:5] = int32([7, 5, -1, 2, bits(0.5)], device)
    slots = int32([[-9, -9]] * 6, device)
    plan = plan_in([4, 1], device)
    relay.forward(context, SHAPE, plan, recv_buffer, [0, 0, 32], 4, 0, slots, True, 1, 3, 0, 1)
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
    shape: LaunchShape = SHAPE

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


class Node:
    """The windows of a node's ranks, with spare rows behind those that they offer, and a table that leads to them."""

    def __init__(self, case: Case, capacities: list[int], device: str):
        row_bytes, scale_bytes, record_bytes = case.widths
        widths = [row_bytes, scale_bytes, record_bytes and 4 * put.record_words(case.num_topk)]
        self.memory = [[poisoned((capacity + 3) * width, device) for width in widths] for capacity in capacities]
        self.sections = [
            [
                part[: capacity * width].view(capacity, width) if width else None
                for part, width in zip(own, widths, strict=True)
            ]
            for own, capacity in zip(self.memory, capacities, strict=True)
        ]
        self.context = make_context(case.node * case.ranks_per_node, case.num_ranks, device)
        first, none = case.node * case.ranks_per_node, poisoned(0, device)
        peers = [[none] * case.num_ranks for _ in range(exchange.NUM_SECTIONS)]
        every = [0] * case.num_ranks
        for peer, own in enumerate(self.memory):
            every[first + peer] = capacities[peer]
            for section, part in enumerate(own):
                peers[section][first + peer] = part
        offer(self.context, peers, every, [FAR] * case.num_ranks)


def arrived(case: Case, num_rows: int, device: str) -> tuple[torch.Tensor, list[int], torch.Tensor]:
    """A receive buffer full of rows, where its sections begin, and the rows' slots: some none, some more than are
    offered.
    """
    generator = torch.Generator().manual_seed(7)
    offsets, num_bytes = sections(case, num_rows)
    recv_buffer = torch.randint(0, 120, (num_bytes,), generator=generator, dtype=torch.uint8, device="cpu")
    orders = [torch.randperm(num_rows + 2, generator=generator, device="cpu") for _ in range(case.ranks_per_node)]
    slots = torch.stack([order[:num_rows] for order in orders], 1).int() - 1
    if case.has_records:
        width = case.widths[2]
        records = recv_buffer[offsets[2] : offsets[2] + num_rows * width].view(torch.int32).view(num_rows, width // 4)
        records[:, 1 : 1 + case.ranks_per_node] = slots
        ids = records[:, 1 + case.ranks_per_node :][:, : case.num_topk]
        ids.copy_(torch.randint(-1, case.num_experts, ids.shape, generator=generator, device="cpu"))
    return recv_buffer.to(device), offsets, slots.to(device)


def pass_on(
    case: Case,
    node: Node,
    plan: torch.Tensor,
    recv_buffer: torch.Tensor,
    offsets: list[int],
    slots: torch.Tensor,
    chunk: int,
    sources: torch.Tensor | None = None,
) -> None:
    relay.forward(
        node.context, case.shape, plan, recv_buffer, offsets, *case.widths[:2], slots, case.has_records, case.num_topk,
        case.experts_per_rank, chunk, case.num_chunks, sources,
    )  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_rows_may_be_fetched_from_the_outboxes_that_they_lie_in(device: str, name: str) -> None:
    """Those of node n lie n + 1 rows further on there than they would in the receive buffer."""
    case, slots = CASES[name], []
    num_rows, num_nodes = sum(case.counts), len(case.counts)
    recv_buffer, offsets, true_slots = arrived(case, num_rows, device)
    remote_offsets, num_bytes = sections(case, num_rows + num_nodes)
    plan = plan_in(list(case.counts), device)
    plan[:, exchange.PLAN_BACK_START] = plan[:, relay.PLAN_IN_START] + torch.arange(1, num_nodes + 1, device=device)
    outboxes = [poisoned(num_bytes, device) for _ in range(num_nodes)]
    for node, outbox in enumerate(outboxes):
        for offset, remote_offset, width in zip(offsets, remote_offsets, case.widths, strict=False):
            begin, size = remote_offset + (node + 1) * width, num_rows * width
            outbox[begin : begin + size] = recv_buffer[offset : offset + size]
    sources = torch.tensor([outbox.data_ptr() for outbox in outboxes], device="cpu").to(device)
    capacities = [num_rows + 2] * case.ranks_per_node
    fetched, expected = Node(case, capacities, device), Node(case, capacities, device)
    for node, is_fetched in ((fetched, True), (expected, False)):
        memory = torch.full((num_rows, case.ranks_per_node), -9, dtype=torch.int32, device=device)
        memory = memory if case.has_records else true_slots.clone()
        for chunk in range(case.num_chunks):
            where = (recv_buffer, remote_offsets if is_fetched else offsets)
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
    recv_buffer, offsets, true_slots = arrived(case, num_rows, device)
    before, plan = recv_buffer.clone(), plan_in(list(case.counts), device)
    capacities = [max(0, num_rows - 1 - peer) for peer in range(case.ranks_per_node)]
    got, expected = Node(case, capacities, device), Node(case, capacities, device)
    memory = torch.full((num_rows + 4, case.ranks_per_node), -9, dtype=torch.int32, device=device)
    if not case.has_records:
        memory[:num_rows] = true_slots
    twin_memory = memory.clone()
    num_slots = max(0, num_rows - 1)
    for chunk in range(case.num_chunks):
        pass_on(case, got, plan, recv_buffer, offsets, memory[:num_slots], chunk)
        twins.forward(
            plan, recv_buffer, offsets, twin_memory[:num_slots], expected.sections, case.node * case.ranks_per_node,
            case.node, case.has_records, case.num_topk, case.experts_per_rank, chunk, case.num_chunks,
        )  # fmt: skip
        for own, other in zip(got.memory, expected.memory, strict=True):
            assert all(torch.equal(part, twin) for part, twin in zip(own, other, strict=True)), f"chunk {chunk}"
        assert torch.equal(memory, twin_memory)
    assert torch.equal(recv_buffer, before)
    others = num_rows - case.counts[case.node]
    assert any(bool((part != UNTOUCHED).any()) for own in got.memory for part in own) == (others > 0)


@pytest.mark.parametrize("is_failed", [True, False])
def test_a_failed_buffer_and_a_held_call_move_nothing(device: str, is_failed: bool) -> None:
    case = CASES["vectors"]
    num_rows = sum(case.counts)
    recv_buffer, offsets, _ = arrived(case, num_rows, device)
    node = Node(case, [num_rows] * 2, device)
    if is_failed:
        fail(node.context)
    else:
        node.context.state[exchange.STATE_HELD] = 1
    slots = torch.full((num_rows, 2), -9, dtype=torch.int32, device=device)
    pass_on(case, node, plan_in(list(case.counts), device), recv_buffer, offsets, slots, 0)
    assert bool((slots == -9).all())
    assert all(bool((part == UNTOUCHED).all()) for own in node.memory for part in own)
