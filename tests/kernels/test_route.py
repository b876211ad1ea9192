"""Where the rows of a dispatch across nodes are put, and their records, against the twin."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
import twins
from calls import put_rows
from windows import fail, make_context, offer

from deep_ep.kernels import _triton, exchange, put, relay, route
from deep_ep.kernels.put import LaunchShape
from deep_ep.kernels.route import TokenRoutes

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

SHAPE = LaunchShape(num_blocks=3, words=64, num_warps=2)
UNTOUCHED = -77
FAR = 1 << 40  # what the kernel may not use: if it does, it is off by far


def int32(numbers: list, device: str) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def bits(number: float) -> int:
    return int(torch.tensor(number, device="cpu").view(torch.int32))


def plan_of(counts: list[int], node: int, in_start: int, device: str) -> torch.Tensor:
    """Tokens for each node lie in the outbox one node after the other; those of the own node take no room there."""
    plan = torch.full((len(counts), exchange.PLAN_WORDS), FAR, dtype=torch.int64, device="cpu")
    counted = torch.tensor([0 if other == node else count for other, count in enumerate(counts)], device="cpu")
    plan[:, exchange.PLAN_NUM_OUT] = counted
    plan[:, exchange.PLAN_OUT_START] = counted.cumsum(0) - counted
    plan[node, exchange.PLAN_IN_START] = in_start
    return plan.to(device)


# Worked examples -----------------------------------------------------------------------------------------------------


def test_worked_example(device: str) -> None:
    """Rank 1 of two nodes of two ranks. Token 0 goes to rank 0 and, as the first for node 1, to rank 3; 1 nowhere."""
    context = make_context(1, 4, device)
    window = [int32([[UNTOUCHED] * 8] * 5, device) for _ in range(4)]
    offer(context, [None, None, window], [5] * 4, [4, 0, 0, 7])
    outbox = int32([UNTOUCHED] * 24, device)
    token_routes = TokenRoutes(
        node_slots=int32([[0, 0], [-1, -1]], device),
        numbers=int32([[0, -1, -1, 2], [-1] * 4], device),
        forwarded=int32([[UNTOUCHED] * 2] * 4, device),
        slots=int32([[UNTOUCHED] * 4] * 2, device),
    )
    plan = plan_of([1, 1], 0, 3, device)
    plan[1, exchange.PLAN_OUT_START] = 1
    ids, weights = torch.tensor([[1, 6], [0, 0]], device=device), torch.tensor([[0.5, 0.25], [1, 1]], device=device)
    table = torch.zeros_like(context.table)
    route.route_tokens(context, 3, token_routes, ids, weights, 2, plan, table, outbox.data_ptr(), [16, 16, 32])
    assert token_routes.slots.tolist() == [[0, -1, -1, 0], [-1] * 4]
    assert token_routes.forwarded.tolist() == [[UNTOUCHED] * 2] * 3 + [[4, -1]]
    assert window[0].tolist() == [[UNTOUCHED] * 8] * 4 + [[0, 1, -1, bits(0.5), 0] + [UNTOUCHED] * 3]
    assert all(bool((one == UNTOUCHED).all()) for one in window[1:])
    # A record has 8 words; this one is in row 1 of the third section, which begins at byte 32.
    assert outbox[16:23].tolist() == [0, -1, 9, 1, 6, bits(0.5), bits(0.25)]
    assert bool((outbox[:16] == UNTOUCHED).all())
    assert table[0].tolist() == [0, 0, 0, outbox.data_ptr() + 16]
    assert table[2].tolist() == [one.data_ptr() for one in window[:3]] + [outbox.data_ptr() + 32]
    assert table[exchange.TABLE_CAPACITIES].tolist() == [5, 5, 5, 2]
    assert table[exchange.TABLE_STARTS].tolist() == [4, 0, 0, 1]


# Against the twin ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """A rank of some nodes, with tokens of which about `share` go to any rank."""

    rank: int
    num_nodes: int
    ranks_per_node: int
    num_tokens: int = 11
    num_topk: int = 3
    num_local: int = 2
    share: float = 0.4
    idx_dtype: torch.dtype = torch.int64
    has_handle: bool = False

    @property
    def num_ranks(self) -> int:
        return self.num_nodes * self.ranks_per_node

    @property
    def node(self) -> int:
        return self.rank // self.ranks_per_node


CASES = {
    "two nodes of two": Case(1, 2, 2),
    "32-bit ids": Case(2, 2, 2, idx_dtype=torch.int32),
    "three nodes of three": Case(4, 3, 3, num_topk=2),
    "a rank each": Case(2, 4, 1, num_topk=8),
    "no ids": Case(0, 2, 3, num_topk=0),
    "several tiles": Case(6, 2, 32, num_tokens=80, num_topk=1, share=0.1),
    "everywhere": Case(3, 2, 2, share=1.0),
    "nowhere": Case(3, 2, 2, share=0.0),
    "one token": Case(0, 2, 2, num_tokens=1),
    "no token": Case(0, 2, 2, num_tokens=0),
    "a handle": Case(1, 2, 2, has_handle=True),
    "a handle of three nodes": Case(5, 3, 2, num_tokens=30, has_handle=True),
}


class Given:
    """What `route` reads and writes, for a case."""

    def __init__(self, case: Case, device: str):
        generator = torch.Generator().manual_seed(5)
        num_tokens, num_ranks = case.num_tokens, case.num_ranks
        goes = torch.rand(num_tokens, num_ranks, generator=generator, device="cpu") < case.share
        in_node = goes.view(num_tokens, case.num_nodes, case.ranks_per_node).any(2)
        numbers, node_slots = _numbered(goes).to(device), _numbered(in_node).to(device)
        counts = in_node.sum(0).tolist()
        # What is passed on of other nodes' lies before this rank's own. The room ends within the own.
        self.num_forwarded = 4 + max(0, counts[case.node] - 1)
        forwarded = torch.arange(self.num_forwarded * case.ranks_per_node, dtype=torch.int32, device="cpu")
        forwarded = forwarded.view(-1, case.ranks_per_node).to(device)
        slots = torch.full_like(numbers, UNTOUCHED)
        self.token_routes = TokenRoutes(node_slots, None if case.has_handle else numbers, forwarded, slots)
        self.starts = [3 * rank for rank in range(num_ranks)]
        num_words = put.record_words(case.num_topk)
        # One row too few: what is beyond it is not written.
        self.capacities = [max(0, self.starts[rank] + int(goes[:, rank].sum()) - 1) for rank in range(num_ranks)]
        self.records = [int32([[UNTOUCHED] * num_words] * (capacity + 2), device) for capacity in self.capacities]
        relay_words = relay.relay_record_words(case.ranks_per_node, case.num_topk)
        self.outbox = int32([[UNTOUCHED] * relay_words] * (sum(counts) + 2), device)
        self.plan = plan_of(counts, case.node, 4, device)
        self.num_out = sum(counts) - counts[case.node]
        high = case.num_local * num_ranks + 2
        self.ids = self.weights = None
        if case.num_topk:
            shape = (num_tokens, case.num_topk)
            ids = torch.randint(-2, high, shape, generator=generator, device="cpu")
            self.ids = ids.to(case.idx_dtype).to(device)
            self.weights = torch.rand(shape, generator=generator, device="cpu").to(device)

    def written(self) -> list[torch.Tensor]:
        return [self.token_routes.slots, self.token_routes.forwarded, *self.records, self.outbox]


def _numbered(goes: torch.Tensor) -> torch.Tensor:
    """Number what goes, column by column; -1 for what does not."""
    return torch.where(goes, goes.cumsum(0) - 1, -1).int()


@pytest.mark.parametrize("name", CASES)
def test_what_the_twin_says(device: str, name: str) -> None:
    case = CASES[name]
    got, expected = Given(case, device), Given(case, "cpu")
    context = make_context(case.rank, case.num_ranks, device)
    offer(context, [None, None, got.records], got.capacities, got.starts)
    table = torch.zeros_like(context.table)
    where = (got.plan, table, got.outbox.data_ptr(), [0, 0, 0])
    route.route_tokens(context, 3, got.token_routes, got.ids, got.weights, case.num_local, *where)
    local = range(case.node * case.ranks_per_node, (case.node + 1) * case.ranks_per_node)
    local_records = [expected.records[rank][: expected.capacities[rank]] for rank in local]
    twins.route_tokens(
        expected.token_routes, expected.ids, expected.weights, case.num_local, expected.plan, expected.starts,
        case.node, case.rank % case.ranks_per_node, local_records, expected.outbox,
    )  # fmt: skip
    for one, other in zip(got.written(), expected.written(), strict=True):
        assert torch.equal(one.cpu(), other)
    assert bool((got.token_routes.slots != UNTOUCHED).all())
    assert bool((got.outbox != UNTOUCHED).any()) == (got.num_out > 0 and not case.has_handle)


# With the kernels behind it ------------------------------------------------------------------------------------------


def test_a_relayed_row_is_the_row_that_a_put_would_have_written(device: str) -> None:
    """Rank 1 sends to ranks 2 and 3, once by way of rank 3, once as if they were near."""
    case = Case(1, 2, 2, num_tokens=9, num_topk=3, share=0.7)
    given, num_rows, hidden = Given(case, device), 30, 24
    token_routes, widths = given.token_routes, [2 * hidden, 4, 4 * put.record_words(3)]
    x = torch.randn(9, hidden, device=device).bfloat16()
    scales = torch.randn(1, 9, device=device).t()

    def windows() -> list[list[torch.Tensor]]:
        return [[torch.zeros(num_rows * width, dtype=torch.uint8, device=device) for width in widths] for _ in range(4)]

    def as_sections(ranks: list[list[torch.Tensor]]) -> list[list[torch.Tensor]]:
        return [[rank[section] for rank in ranks] for section in range(3)]

    relayed, direct = windows(), windows()
    starts = [0, 1, 2, 3]
    context = make_context(1, 4, device)
    offer(context, as_sections(relayed), [num_rows] * 4, starts)
    offsets, record = [0, 1024, 2048], 4 * relay.relay_record_words(2, 3)
    outbox = torch.zeros(2048 + num_rows * record, dtype=torch.uint8, device=device)
    aimed = make_context(1, 4, device)
    where = (given.plan, aimed.table, outbox.data_ptr(), offsets)
    route.route_tokens(context, 3, token_routes, given.ids, given.weights, case.num_local, *where)
    put_rows(aimed, SHAPE, x, scales, token_routes.slots, None, None, None, 0)
    there = make_context(3, 4, device)
    offer(there, as_sections(relayed), [num_rows] * 4)
    plan = torch.zeros_like(given.plan)
    plan[0, exchange.PLAN_NUM_IN] = given.plan[1, exchange.PLAN_NUM_OUT]
    slots = int32([[UNTOUCHED] * 2] * num_rows, device)
    for chunk in range(2):
        relay.forward(
            there, SHAPE, plan, outbox, offsets, *widths[:2], slots, True, 3, case.num_local, chunk, 2,
        )  # fmt: skip
    local = make_context(1, 4, device)
    offer(local, as_sections(direct), [num_rows] * 4, starts)
    assert token_routes.numbers is not None
    heads = torch.empty_like(token_routes.numbers)
    put_rows(local, SHAPE, x, scales, token_routes.numbers, heads, given.ids, given.weights, case.num_local)
    for own, other in zip(relayed, direct, strict=True):
        assert all(torch.equal(part, twin) for part, twin in zip(own, other, strict=True))
    crosses = token_routes.node_slots[:, 1] >= 0
    assert torch.equal(slots[: int(crosses.sum())], heads[crosses, 2:])


@pytest.mark.parametrize("is_failed", [True, False])
def test_a_failed_buffer_and_a_held_call_write_nothing(device: str, is_failed: bool) -> None:
    case = CASES["two nodes of two"]
    given, before = Given(case, device), Given(case, device)
    context = make_context(case.rank, case.num_ranks, device)
    offer(context, [None, None, given.records], given.capacities, given.starts)
    if is_failed:
        fail(context)
    else:
        context.state[exchange.STATE_HELD] = 1
    table = torch.zeros_like(context.table)
    where = (given.plan, table, given.outbox.data_ptr(), [0, 0, 0])
    route.route_tokens(context, 3, given.token_routes, given.ids, given.weights, case.num_local, *where)
    assert not table.any()
    assert all(torch.equal(one, other) for one, other in zip(given.written(), before.written(), strict=True))
