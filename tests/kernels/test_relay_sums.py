"""Sums of a combine across nodes, against the twin that sums inside one node, applied twice."""

from __future__ import annotations

import pytest
import torch
from windows import fail, make_context, offer, reduce_on_cpu, with_subnormals

from deep_ep.kernels import _triton, exchange, relay_sums
from deep_ep.kernels.put import LaunchShape

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

SHAPE = LaunchShape(num_blocks=3, words=64, num_warps=2)
POISON = 77.0
FIRST = 2  # of a node's sums, the first one of this rank's tokens


def int32(values: list, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def plan_of(counts: list[int], device: str) -> torch.Tensor:
    """Of the rows that a rank passes on: so many of each node, node after node."""
    plan = torch.full((len(counts), exchange.PLAN_WORDS), 1 << 40, dtype=torch.int64, device="cpu")
    plan[:, exchange.PLAN_NUM_IN] = torch.tensor(counts, device="cpu")
    plan[:, exchange.PLAN_IN_START] = plan[:, exchange.PLAN_NUM_IN].cumsum(0) - plan[:, exchange.PLAN_NUM_IN]
    return plan.to(device)


def node_of(number: int, local: exchange.Context, plan: torch.Tensor) -> relay_sums.Node:
    """A node whose ranks have what `local` offers, in a wider table."""
    rows, size = local.table.shape
    wide = torch.full((rows, size + 3), 1 << 40, dtype=torch.int64, device=plan.device)
    wide[:, 1 : 1 + size] = local.table
    return relay_sums.Node(number, wide[:, 1 : 1 + size], plan, local.state)


def fetched(plan: torch.Tensor, sums: list[torch.Tensor], number: int, first: int) -> relay_sums.RemoteSums:
    """Sums that lie where the nodes made them: those of this rank from row `first` on."""
    plan[:, exchange.PLAN_TARGET_START] = first
    plan[:, exchange.PLAN_NUM_OUT] = torch.tensor([one.size(0) - first for one in sums], device=plan.device)
    addresses = [0 if node == number else one.data_ptr() - 8 for node, one in enumerate(sums)]
    return relay_sums.RemoteSums(8, torch.tensor(addresses, dtype=torch.int64, device=plan.device))


def arrived(plan: torch.Tensor, sums: list[torch.Tensor]) -> tuple[relay_sums.RemoteSums, torch.Tensor]:
    """Sums that have arrived, node after node, behind one row of nothing; and the memory that they are in."""
    memory = torch.cat([torch.full_like(sums[0][:1], POISON), *sums])
    sizes = torch.tensor([one.size(0) for one in sums], device=plan.device)
    plan[:, exchange.PLAN_OUT_START] = sizes.cumsum(0) - sizes
    plan[:, exchange.PLAN_NUM_OUT] = sizes
    return relay_sums.RemoteSums(memory[1:].data_ptr(), None), memory


def test_sum_for_rail_worked_example(device: str) -> None:
    """Rows 0 to 3 are this node's own, row 4 is node 1's."""
    local = make_context(0, 2, device)
    first, second = torch.arange(6.0, device=device).view(6, 1), torch.arange(10.0, 16.0, device=device).view(6, 1)
    offer(local, [[first, second]], [6, 6])
    out = torch.full((6, 1), POISON, device=device)
    forwarded = int32([[0, 0]] * 4 + [[2, 5]], device)
    relay_sums.sum_for_rail(node_of(0, local, plan_of([4, 1], device)), SHAPE, 0, out, forwarded, 0, 1)
    assert out.flatten().tolist() == [POISON] * 4 + [17.0, POISON]


def test_sum_nodes_worked_example(device: str) -> None:
    local, plan = make_context(0, 1, device), plan_of([4, 3], device)
    mine, theirs = torch.arange(8.0, device=device).view(8, 1), torch.arange(100.0, 108.0, device=device).view(8, 1)
    offer(local, [[mine]], [8])
    forwarded = int32([[0]] * 6 + [[7]], device)
    out, bias = torch.empty(1, 1, device=device), torch.tensor([[1000.0]], device=device)
    remote = fetched(plan, [theirs, theirs], 1, 0)
    relay_sums.sum_nodes(node_of(1, local, plan), remote, SHAPE, 0, out, int32([[3, 2]], device), forwarded, [bias])
    assert out.tolist() == [[1000.0 + 103.0 + 7.0]]


class Layer:
    """A rank's tokens, the rows of its node, and what the other nodes have summed."""

    def __init__(self, num_nodes: int, size: int, node: int, hidden: int, dtype: torch.dtype, device: str):
        generator = torch.Generator().manual_seed(hidden + num_nodes)

        def draw(*shape: int) -> torch.Tensor:
            return with_subnormals(torch.randn(*shape, generator=generator).to(device, dtype))

        num_tokens, self.node = 7, node
        goes = (torch.rand(num_tokens, num_nodes, generator=generator) < 0.7).to(device)
        self.node_slots = torch.where(goes, goes.cumsum(0) - 1, -1).int()
        own = int((self.node_slots[:, node] >= 0).sum())
        self.counts = [own if one == node else 2 + one for one in range(num_nodes)]
        num_rows = sum(self.counts)
        has_row = (torch.rand(num_rows, size, generator=generator) < 0.6).to(device)
        self.forwarded = torch.where(has_row, has_row.cumsum(0) - 1, -1).int()
        self.rows = [draw(num_rows, hidden) for _ in range(size)]
        self.sums = [draw(FIRST + num_tokens, hidden) for _ in range(num_nodes)]
        self.biases = [draw(num_tokens, hidden) for _ in range(2)]
        self.plan = plan_of(self.counts, device)
        self.local = make_context(0, size, device)
        offer(self.local, [None, self.rows], [num_rows] * size)
        self.here = node_of(node, self.local, self.plan)

    def node_sums(self) -> torch.Tensor:
        """What this node has of every row that is passed on, by the twin."""
        out = torch.empty_like(self.rows[0])
        reduce_on_cpu(out, self.rows, self.forwarded, [])
        return out


DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64]
CASES = [(2, 2, 0, 16), (2, 1, 1, 7), (3, 2, 1, 200), (5, 3, 4, 24), (2, 9, 1, 24), (9, 2, 3, 24)]


@pytest.mark.parametrize(
    ("num_nodes", "size", "node", "hidden", "dtype"),
    [(*case, dtype) for case in CASES[:2] for dtype in DTYPES] + [(*case, torch.bfloat16) for case in CASES[2:]],
)
def test_sums_are_those_of_the_twin(
    device: str, num_nodes: int, size: int, node: int, hidden: int, dtype: torch.dtype
) -> None:
    layer = Layer(num_nodes, size, node, hidden, dtype, device)
    by_node = layer.node_sums()
    for num_chunks in (1, 3):
        out = torch.full_like(by_node, POISON)
        for chunk in range(num_chunks):
            relay_sums.sum_for_rail(layer.here, SHAPE, 1, out, layer.forwarded, chunk, num_chunks)
        first = sum(layer.counts[:node])
        own = slice(first, first + layer.counts[node])
        expected = by_node.clone()
        expected[own] = POISON  # nobody needs them there
        assert torch.equal(out, expected)

    expected = torch.empty_like(layer.biases[0])
    mine = torch.zeros_like(expected)
    mine[: layer.counts[node]] = by_node[own]
    sums = [mine if one == node else layer.sums[one][FIRST:] for one in range(num_nodes)]
    reduce_on_cpu(expected, sums, layer.node_slots, layer.biases)
    slots = (layer.node_slots, layer.forwarded)
    there = fetched(layer.plan, layer.sums, node, FIRST)
    tokens = torch.full_like(expected, POISON)
    relay_sums.sum_nodes(layer.here, there, SHAPE, 1, tokens, *slots, layer.biases)
    assert torch.equal(tokens, expected)
    here, memory = arrived(layer.plan, [one[FIRST:] for one in layer.sums])
    tokens = torch.full_like(expected, POISON)
    relay_sums.sum_nodes(layer.here, here, SHAPE, 1, tokens, *slots, layer.biases)
    assert torch.equal(tokens, expected)
    assert bool((memory[0] == POISON).all())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_what_is_not_there_changes_no_sum(device: str, dtype: torch.dtype) -> None:
    """Not even that of a negative zero."""
    layer = Layer(3, 2, 1, 16, dtype, device)
    bias = torch.zeros_like(layer.biases[0]).neg_()
    tokens = torch.empty_like(bias)
    slots, remote = (torch.full_like(layer.node_slots, -1), layer.forwarded), fetched(layer.plan, layer.sums, 1, FIRST)
    relay_sums.sum_nodes(layer.here, remote, SHAPE, 1, tokens, *slots, [bias])
    assert bool(tokens.signbit().all())


def test_a_handle_that_is_short_is_not_read_beyond_its_end(device: str) -> None:
    layer = Layer(2, 2, 0, 16, torch.float32, device)
    short = layer.forwarded[: layer.counts[0] + 1].clone()
    out = torch.full_like(layer.rows[0], POISON)
    relay_sums.sum_for_rail(layer.here, SHAPE, 1, out, short, 0, 1)
    assert (out[layer.counts[0] + 1 :] == POISON).all()
    assert not (out[layer.counts[0]] == POISON).any()


def test_nothing_is_summed_after_a_failure(device: str) -> None:
    layer = Layer(2, 2, 0, 16, torch.float32, device)
    out, tokens = torch.full_like(layer.rows[0], POISON), torch.full_like(layer.biases[0], POISON)
    fail(layer.local)
    relay_sums.sum_for_rail(layer.here, SHAPE, 1, out, layer.forwarded, 0, 1)
    remote = fetched(layer.plan, layer.sums, 0, FIRST)
    relay_sums.sum_nodes(layer.here, remote, SHAPE, 1, tokens, layer.node_slots, layer.forwarded, [])
    assert (out == POISON).all()
    assert (tokens == POISON).all()
