"""Zeros with a sign, and sums that leave their dtype: one node and several, to the bit of the oracle."""

from __future__ import annotations

import math

import pytest
import torch
import torch.distributed as dist

from common import NOTHING_POSTED, run_ranks
from deep_ep import Buffer, reference
from deep_ep.kernels.reduce import RowSums

pytestmark = pytest.mark.usefixtures("device")

NUM_RANKS = 4
NONE = math.nan  # no row there

# A token of rank 0 each: the biases, and the row of each rank.
TOKENS = [
    ((), (-0.0, NONE, NONE, NONE)),
    ((), (-0.0, -0.0, -0.0, NONE)),
    ((), (NONE, NONE, NONE, -0.0)),
    ((-0.0,), (-0.0, -0.0, -0.0, -0.0)),
    ((-0.0,), (NONE, -0.0, NONE, NONE)),
    ((-0.0,), (NONE, NONE, -0.0, NONE)),
    ((-0.0,), (NONE, NONE, NONE, NONE)),
    ((-0.0,), (-0.0, 0.0, -0.0, NONE)),
    ((0.0,), (-0.0, NONE, NONE, -0.0)),
    ((-0.0, -0.0), (-0.0, -0.0, NONE, -0.0)),
    ((-0.0, 0.0), (-0.0, NONE, NONE, NONE)),
    ((-60000.0,), (60000.0, 10000.0, NONE, NONE)),  # the rows alone are beyond FP16
    ((), (60000.0, 10000.0, -60000.0, NONE)),
    ((1.0, 2.0), (3.0, 4.0, 5.0, 6.0)),
]


def inputs(num_biases: int, dtype: torch.dtype) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Of the tokens with so many biases: the mask, each rank's rows of them, and the biases; three columns each."""
    chosen = [token for token in TOKENS if len(token[0]) == num_biases]
    mask = torch.tensor([[not math.isnan(row) for row in rows] for _, rows in chosen])
    columns = [[rows[rank] for _, rows in chosen if not math.isnan(rows[rank])] for rank in range(NUM_RANKS)]
    rows = [torch.tensor(column).view(-1, 1).expand(-1, 3).to(dtype).contiguous() for column in columns]
    biases = [torch.tensor([biases[index] for biases, _ in chosen]) for index in range(num_biases)]
    return mask, rows, [bias.view(-1, 1).expand(-1, 3).to(dtype).contiguous() for bias in biases]


def combine(rank: int, num_ranks: int, ranks_per_node: int, dtypes: list[torch.dtype]) -> bool:
    buffer = Buffer(dist.group.WORLD, 1 << 20, num_cpu_timeout_secs=60)
    for dtype in dtypes:
        for num_biases in range(3):
            mask, rows, biases = inputs(num_biases, dtype)
            empty = torch.zeros(0, num_ranks, dtype=torch.bool)
            masks = [mask, *(empty for _ in range(num_ranks - 1))]
            given = [(*biases, None)[:2] if rank == 0 else None for rank in range(num_ranks)]
            expected = reference.combine(rows, masks, None if not biases else given, ranks_per_node=ranks_per_node)[
                rank
            ].combined_x
            is_sent = masks[rank]
            per_node = (
                is_sent.view(is_sent.size(0), num_ranks // ranks_per_node, ranks_per_node)
                .any(2)
                .sum(0, dtype=torch.int32)
            )
            _, _, _, _, handle, _ = buffer.dispatch(
                torch.zeros(is_sent.size(0), 3, dtype=dtype),
                num_tokens_per_rank=is_sent.sum(0, dtype=torch.int32),
                num_tokens_per_rdma_rank=per_node,
                is_token_in_rank=is_sent,
                num_tokens_per_expert=torch.zeros(num_ranks, dtype=torch.int32),
            )
            bias = (tuple(biases) if num_biases == 2 else biases[0]) if rank == 0 and biases else None
            combined, _, _ = buffer.combine(rows[rank], handle, bias=bias)
            bits = torch.int32 if dtype == torch.float32 else torch.int16
            assert torch.equal(combined.view(bits), expected.view(bits)), (dtype, num_biases, combined, expected)
    return True


@pytest.mark.parametrize(
    ("ranks_per_node", "env"),
    [
        (4, {}),
        (4, NOTHING_POSTED),
        (4, {"DEEP_EP_TRANSPORT": "interpreted"}),
        (2, {}),
        (2, {"DEEP_EP_TRANSPORT": "interpreted"}),
        (1, {}),
    ],
    ids=["posted", "pulled", "kernels", "two nodes", "kernels of two nodes", "four nodes"],
)
def test_every_way_to_the_bit(ranks_per_node: int, env: dict[str, str], device: str) -> None:
    if device == "cuda" and "DEEP_EP_TRANSPORT" in env:
        pytest.skip("a GPU does not interpret kernels")
    more = {"DEEP_EP_RANKS_PER_NODE": str(ranks_per_node)} if ranks_per_node < NUM_RANKS else {}
    dtypes = [torch.float16, torch.bfloat16, torch.float32]
    if "DEEP_EP_TRANSPORT" in env:
        dtypes = dtypes[:1]  # in the interpreter every launch costs milliseconds
    assert all(run_ranks(combine, NUM_RANKS, ranks_per_node, dtypes, env={**env, **more}))


def oracle(num_biases: int, dtype: torch.dtype, ranks_per_node: int | None) -> torch.Tensor:
    mask, rows, biases = inputs(num_biases, dtype)
    masks = [mask, *(torch.zeros(0, NUM_RANKS, dtype=torch.bool) for _ in range(NUM_RANKS - 1))]
    given = [(*biases, None)[:2] if biases and rank == 0 else None for rank in range(NUM_RANKS)]
    return reference.combine(rows, masks, given, ranks_per_node=ranks_per_node)[0].combined_x[:, 0].cpu()


@pytest.mark.parametrize("ranks_per_node", [None, 2, 1])
def test_the_sign_of_a_zero_does_not_depend_on_nodes(ranks_per_node: int | None) -> None:
    signs = {num: oracle(num, torch.bfloat16, ranks_per_node).signbit().tolist() for num in range(3)}
    assert signs[0][:3] == [False, False, False]
    assert signs[1][:6] == [True, True, True, True, False, False]
    assert signs[2][:2] == [True, False]


def test_a_node_beyond_the_range_of_its_dtype_stays_there() -> None:
    """As `docs/protocol.md` says: what crosses is rounded to the dtype of the rows."""
    assert oracle(1, torch.float16, None)[-1] == oracle(0, torch.float16, None)[-1] == 10000
    assert oracle(1, torch.float16, 2)[-1] == oracle(0, torch.float16, 2)[-1] == math.inf
    assert oracle(1, torch.bfloat16, 2).isfinite().all()


@pytest.mark.parametrize("num_peers", [1, 2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_part_of_a_sum_keeps_the_sign_of_a_zero(num_peers: int, dtype: torch.dtype) -> None:
    """Large sums, which are made in tiles; two rows each in one addition."""
    peers = [torch.full((4, 1 << 14), -0.0, dtype=dtype, device="cpu") for _ in range(num_peers)]
    slots = torch.arange(4, dtype=torch.int32, device="cpu").view(-1, 1).expand(-1, num_peers).contiguous()
    for is_part in (True, False):
        out = torch.empty_like(peers[0])
        RowSums(peers, slots, [0] * num_peers, is_part=is_part).sum(out)
        assert bool((out.signbit() == is_part).all())
        assert bool((out == 0).all())
