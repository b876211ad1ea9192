"""Rows that are written into their source's inbox, and the sums there, against their twins."""

from __future__ import annotations

import pytest
import torch
from windows import fail, make_places, offer

from deep_ep.kernels import _triton, exchange, push
from deep_ep.kernels.put import Shape
from deep_ep.kernels.reduce import reduce_rows

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

SHAPE = Shape(num_blocks=3, words=64, num_warps=2)


def int32(values: list, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def make_inboxes(num_tokens: list[int], slot_bytes: int, device: str) -> list[torch.Tensor]:
    num_ranks = len(num_tokens)
    return [torch.full((count * num_ranks, slot_bytes), 7, dtype=torch.uint8, device=device) for count in num_tokens]


def test_push_worked_example(device: str) -> None:
    places, inboxes = make_places(1, 2, device), make_inboxes([5, 2], 16, device)
    offer(places, [None, None, inboxes], [10, 4])
    rows = torch.arange(1, 13, device=device, dtype=torch.float32).view(3, 4)
    push.push(places, SHAPE, rows, int32([0, 4, 1], device), int32([[0, 2], [0, 3]], device), 16, 0)
    seen = [one.view(torch.float32).tolist() for one in inboxes]
    assert (seen[0][1], seen[0][9], seen[1][3]) == ([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    assert sum((one == 7).all(1).sum().item() for one in inboxes) == 14 - 3, "nothing else was touched"


def test_sum_worked_example(device: str) -> None:
    places, inbox = make_places(0, 2, device), make_inboxes([1, 1], 16, device)[0]
    inbox[0, :8] = torch.tensor([1.0, 2.0], device=device).view(torch.uint8)
    out, bias = torch.empty(1, 2, device=device), torch.tensor([[10.0, 10.0]], device=device)
    push.sum_inbox(places, SHAPE, inbox, 16, 0, out, int32([[2, -1]], device), [bias])
    assert out.tolist() == [[11.0, 12.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("num_tokens", "hidden", "num_biases"), [([3], 1, 0), ([5, 0, 4], 200, 2), ([6, 2], 7, 1)])
def test_what_is_pushed_is_summed_as_if_it_were_pulled(
    device: str, dtype: torch.dtype, num_tokens: list[int], hidden: int, num_biases: int
) -> None:
    num_ranks, generator = len(num_tokens), torch.Generator().manual_seed(hidden)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    masks = [(torch.rand(count, num_ranks, generator=generator) < 0.7).to(device) for count in num_tokens]
    prefix = torch.stack([mask.sum(0) for mask in masks]).cumsum(0).int()
    offset = 16  # something else lies in front
    slot_bytes = offset + -(-hidden * dtype.itemsize // 16) * 16
    inboxes, twins = make_inboxes(num_tokens, slot_bytes, device), make_inboxes(num_tokens, slot_bytes, device)
    peers = []
    for rank in range(num_ranks):
        places = make_places(rank, num_ranks, device)
        offer(places, [None, None, inboxes], [count * num_ranks for count in num_tokens])
        source_idx = torch.cat([mask[:, rank].nonzero().flatten() for mask in masks]).int()
        rows = draw(source_idx.numel(), hidden)
        peers.append(rows)
        push.push(places, SHAPE, rows, source_idx, prefix, slot_bytes, offset)
        push.push_torch(twins, rank, rows, source_idx, prefix, offset)
    for inbox, twin in zip(inboxes, twins, strict=True):
        assert torch.equal(inbox, twin)
    for rank, mask in enumerate(masks):
        slots = torch.where(mask, mask.cumsum(0) - 1, -1).int()
        before = (prefix[rank - 1] if rank else torch.zeros_like(prefix[0])).tolist()
        biases = [draw(num_tokens[rank], hidden) for _ in range(num_biases)]
        out, expected = draw(num_tokens[rank], hidden), draw(num_tokens[rank], hidden)
        push.sum_inbox(
            make_places(rank, num_ranks, device), SHAPE, inboxes[rank], slot_bytes, offset, out, slots, biases
        )
        reduce_rows(expected, peers, slots, before, biases)
        assert torch.equal(out, expected)


@pytest.mark.parametrize("why", ["failed", "held", "staged"])
def test_nothing_is_touched_by_a_call_that_does_not_go_this_way(device: str, why: str) -> None:
    places, inboxes = make_places(0, 1, device), make_inboxes([1], 16, device)
    offer(places, [None, None, inboxes], [0 if why == "staged" else 1])  # of a staged rank there is no room to see
    if why == "failed":
        fail(places)
    else:
        places.state[exchange.STATE_HELD if why == "held" else exchange.STATE_STAGED] = 1
    push.push(places, SHAPE, torch.ones(1, 4, device=device), int32([0], device), int32([[1]], device), 16, 0)
    out = torch.full((2, 4), 5.0, device=device)
    push.sum_inbox(places, SHAPE, inboxes[0], 16, 0, out, int32([[0], [-1]], device), ())
    assert (inboxes[0] == 7).all()
    assert (out[0] == 5).all()
    assert (out[1] == (0 if why == "staged" else 5)).all(), "a token without rows was in no round"
