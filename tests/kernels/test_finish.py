"""The ends of calls: one signal and one wait, or rounds through staging, here of one rank that sends to itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import COMBINE, DISPATCH, READY, TAKEN, int32, pull_rows, put_rows
from windows import Boards, offer, synchronize

from deep_ep.kernels import _triton, exchange, put
from deep_ep.kernels.exchange import Context
from deep_ep.kernels.finish import Finish
from deep_ep.kernels.pull import Given
from deep_ep.kernels.put import LaunchShape, Received
from deep_ep.kernels.reduce import reduce_rows
from deep_ep.kernels.rows import as_bytes

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

SHAPE = LaunchShape(num_blocks=3, words=64, num_warps=2)


def one_rank(device: str) -> tuple[Boards, Context]:
    boards = Boards(1, device)
    return boards, boards.contexts[0]


def step_of(boards: Boards) -> int:
    return int(boards.boards[0][0]) & 0xFFFFFF


def bare(context: Context) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of a call without tokens: rows, slots, and prefix sums."""
    device, num_ranks = context.state.device.type, context.num_ranks
    slots = torch.zeros(0, num_ranks, dtype=torch.int32, device=device)
    return torch.zeros(0, 4, device=device), slots, int32([[0] * num_ranks] * num_ranks, device)


# Nobody is staged ----------------------------------------------------------------------------------------------------


def end_bare_dispatch(context: Context) -> None:
    x, slots, prefix = bare(context)
    put_rows(context, SHAPE, x, None, slots, None, None, None, 0, received=Received(prefix))


def end_bare_combine(context: Context) -> None:
    x, slots, prefix = bare(context)
    pull_rows(context, SHAPE, x, slots, (), given=Given(prefix, prefix.new_empty(0), x))


def end_by_itself(context: Context) -> None:
    Finish(context, READY, DISPATCH)()


ENDS = {
    "dispatch": (end_bare_dispatch, DISPATCH, READY),
    "combine": (end_bare_combine, COMBINE, TAKEN),
    "across nodes": (end_by_itself, DISPATCH, READY),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_call_ends_with_one_step_of_all(device: str, name: str) -> None:
    end, operation, step = ENDS[name]
    boards = Boards(2, device)
    boards.handshake(*[end] * 2)
    assert [boards.record(rank) for rank in range(2)] == [None, None]
    assert [int(board[0]) for board in boards.boards] == [step, step], "one step, and the same on every board"
    late = replace(boards.contexts[1], limit_ns=1)
    late.state[exchange.STATE_EPOCH] = 1
    end(late)
    assert boards.record(1) == [exchange.TIMEOUT, 1, operation, 0b01, step, 0, 1]


def test_only_ranks_of_the_node_are_waited_for(device: str) -> None:
    """Rank 2 of 2x2: it needs rank 3 alone."""
    boards = Boards(4, device)
    context = replace(boards.contexts[2], num_nodes=2, limit_ns=1)
    boards.boards[2][8 * 3] = READY
    Finish(context, READY, DISPATCH)()
    assert boards.record(2) is None
    assert [int(board[8 * 2]) for board in boards.boards] == [0, 0, READY, READY]


@pytest.mark.parametrize("name", ENDS)
@pytest.mark.parametrize("word", [exchange.STATE_FAILED, exchange.STATE_HELD])
def test_a_failed_or_held_call_does_not_end(device: str, word: int, name: str) -> None:
    boards, context = one_rank(device)
    context.state[word] = 1
    context.state[exchange.STATE_STAGED] = 1
    ENDS[name][0](context)
    assert not boards.boards[0].any()


@pytest.mark.parametrize("num_rows", [0, 1, 700])
def test_few_records_are_split_by_the_last_block(device: str, num_rows: int) -> None:
    """Of tokens that a rank sends to itself; memory for two rows more than come."""
    _, context = one_rank(device)
    x = torch.arange(2.0 * num_rows, device=device).view(num_rows, 2)
    slots = torch.arange(num_rows, dtype=torch.int32, device=device).view(-1, 1)
    ids = torch.stack([slots[:, 0] % 4 - 1, slots[:, 0] % 3], 1).long()
    weights = torch.rand(num_rows, 2, device=device)
    window, records = torch.zeros(num_rows + 2, 2, device=device), int32([[-9] * 8] * (num_rows + 2), device)
    offer(context, [[window], None, [records]], [num_rows + 2])
    source, recv_ids = int32([-9] * (num_rows + 2), device), torch.full((num_rows + 2, 2), -9, device=device)
    recv_weights = torch.full((num_rows + 2, 2), 9.0, device=device)
    received = Received(int32([[num_rows]], device), records, source, recv_ids, recv_weights, num_rows + 2)
    put_rows(context, SHAPE, x, None, slots, torch.empty_like(slots), ids, weights, 3, received=received)
    assert torch.equal(window[:num_rows], x)
    assert source.tolist() == [*range(num_rows), -9, -9]
    assert recv_ids.tolist() == [*ids.tolist(), [-1, -1], [-1, -1]]
    assert torch.equal(recv_weights[:num_rows], torch.where(ids >= 0, weights, 0.0))


# Dispatch ------------------------------------------------------------------------------------------------------------


def staged(prefix: torch.Tensor, stays: list[torch.Tensor | None]) -> Received:
    """Of a staged rank: where rows, scales and records stay."""
    x, scales, records = stays
    assert x is not None
    return Received(
        prefix, records, num_rows=x.size(0), x=x.data_ptr(), scales=0 if scales is None else scales.data_ptr()
    )


def test_staged_dispatch_worked_example(device: str) -> None:
    """Tokens 0, 3 and 4 go to the rank itself, by staging of 2 rows for each source: tokens 0 and 3 in round 0."""
    boards, context = one_rank(device)
    part, stays = torch.zeros(2, 2, device=device), torch.zeros(4, 2, device=device)
    offer(context, [[part]], [0], rows_per_source=[2])
    x = torch.arange(10.0, device=device).view(5, 2)
    slots, prefix = int32([[0], [-1], [-1], [1], [2]], device), int32([[3]], device)
    put_rows(context, SHAPE, x, None, slots, None, None, None, 0, received=staged(prefix, [stays, None, None]))
    synchronize(context)
    assert boards.record(0) is None
    assert stays.tolist() == [[0.0, 1.0], [6.0, 7.0], [8.0, 9.0], [0.0, 0.0]]
    assert part.tolist() == [[8.0, 9.0], [6.0, 7.0]], "token 4 is the first of round 1"
    assert step_of(boards) == READY + 2
    assert context.state[exchange.STATE_ROUNDS] == 1
    assert context.host[exchange.STATE_ROUNDS] == 1


@pytest.mark.parametrize("num_local", [0, 3])
@pytest.mark.parametrize(
    ("dtype", "hidden", "num_topk", "idx_dtype", "scale_dtype"),
    [
        (torch.uint8, 13, 3, torch.int64, torch.float64),
        (torch.bfloat16, 8, 0, torch.int64, None),
        (torch.float32, 1100, 35, torch.int32, torch.float32),
        (torch.float8_e4m3fn, 300, 8, torch.int64, torch.float16),
    ],
)
def test_what_comes_through_staging_is_what_comes_straight(
    device: str,
    dtype: torch.dtype,
    hidden: int,
    num_topk: int,
    idx_dtype: torch.dtype,
    scale_dtype: torch.dtype | None,
    num_local: int,
) -> None:
    """Into one window straight, into another by parts of three rows. Without experts: along the slots of a handle."""
    _, context = one_rank(device)
    generator = torch.Generator().manual_seed(hidden)
    num_tokens, num_rows, rows_per_source = 9, 8, 3
    mask = torch.tensor([1, 1, 0, 1, 1, 1, 0, 1, 1], device=device).bool().view(-1, 1)
    slots = torch.where(mask, mask.cumsum(0) - 1, -1).int()
    raw = torch.randint(0, 120, (num_tokens, hidden * dtype.itemsize), generator=generator, dtype=torch.uint8)
    x = raw.to(device).view(dtype)
    scales = None
    if scale_dtype is not None:  # column-major
        scales = torch.rand(5, num_tokens, generator=generator).mul(99).to(scale_dtype).t().to(device)
    ids = weights = None
    if num_local and num_topk:
        ids = torch.randint(-2, 6, (num_tokens, num_topk), generator=generator).to(device, idx_dtype)
        if idx_dtype == torch.int64:
            ids[0, 0] = 1 << 32  # no expert, though its low word is 0
        weights = torch.rand(num_tokens, num_topk, generator=generator).to(device)
    words = put.record_words(num_topk) if num_local else 0

    def memory(count: int) -> list[torch.Tensor | None]:
        to_scales = None if scales is None else torch.zeros(count, 5, dtype=scale_dtype, device=device)
        records = torch.zeros(count, words, dtype=torch.int32, device=device) if words else None
        return [torch.zeros(count, hidden * dtype.itemsize, dtype=torch.uint8, device=device), to_scales, records]

    straight, through, parts = memory(num_rows), memory(num_rows), memory(rows_per_source)
    prefix, keeps_weights = int32([[7]], device), num_topk == 8
    heads = []
    for sections, offered, received in (
        (straight, ([num_rows], None), Received(prefix)),
        (parts, ([0], [rows_per_source]), staged(prefix, through)),
    ):
        offer(context, [part if part is None else [part] for part in sections], offered[0], rows_per_source=offered[1])
        heads.append(torch.full_like(slots, -9) if num_local else None)
        put_rows(context, SHAPE, x, scales, slots, heads[-1], ids, weights, num_local, keeps_weights, received)
        assert context.state[exchange.STATE_FAILED] == 0
    assert all(head is None or torch.equal(head, slots) for head in heads)
    for got, expected in zip(through, straight, strict=True):
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert torch.equal(as_bytes(got), as_bytes(expected))
    assert straight[0] is not None
    assert straight[0][:7].any()


def test_nothing_is_written_beyond_a_part_nor_copied_beyond_the_memory(device: str) -> None:
    """A handle whose counts and slots do not fit each other."""
    boards, context = one_rank(device)
    memory, stays = torch.zeros(8, 4, device=device), torch.zeros(8, 4, device=device)
    offer(context, [[memory[:2]]], [0], rows_per_source=[2])
    x = torch.ones(4, 4, device=device)
    slots, prefix = int32([[0], [90], [1], [91]], device), int32([[6]], device)
    put_rows(context, SHAPE, x, None, slots, None, None, None, 0, received=staged(prefix, [stays[:3], None, None]))
    assert boards.record(0) is None
    assert not memory[2:].any()
    assert not stays[3:].any()


# Combine -------------------------------------------------------------------------------------------------------------


def combine(context: Context, rows, sums, biases, slots: torch.Tensor, num_rows: int, source: torch.Tensor) -> None:
    weights, row_weights = (sums[1], rows[1]) if len(sums) > 1 else (None, None)
    given = Given(slots.new_tensor([[num_rows]]), source, rows[0], row_weights)
    pull_rows(context, SHAPE, sums[0], slots, biases, weights, given)
    synchronize(context)


def test_staged_combine_worked_example(device: str) -> None:
    """5 tokens by staging of 2 rows for each source: 3 rounds, for tokens 0 and 1, 2 and 3, 4."""
    boards, context = one_rank(device)
    part = torch.zeros(2, 2, device=device)
    offer(context, [[part]], [0], rows_per_source=[2])
    context.state[exchange.STATE_TOKENS] = 5
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=device)
    slots, source = int32([[0], [-1], [-1], [1], [2]], device), int32([0, 3, 4], device)
    out = torch.full((5, 2), 7.0, device=device)
    combine(context, [rows], [out], [], slots, 3, source)
    assert boards.record(0) is None
    assert out.tolist() == [[1.0, 2.0], [0.0, 0.0], [0.0, 0.0], [3.0, 4.0], [5.0, 6.0]]
    assert part.tolist() == [[5.0, 6.0], [3.0, 4.0]], "token 4 is the first of its range, token 3 the second"
    assert step_of(boards) == TAKEN + 4
    assert context.host[exchange.STATE_ROUNDS] == 2


@pytest.mark.parametrize("num_biases", [0, 1, 2])
@pytest.mark.parametrize(
    ("dtype", "hidden", "num_topk"),
    [(torch.bfloat16, 8, 0), (torch.float16, 33, 3), (torch.float32, 1100, 0), (torch.float64, 600, 40)],
)
def test_sums_of_staged_rows_are_those_of_the_twin(
    device: str, dtype: torch.dtype, hidden: int, num_topk: int, num_biases: int
) -> None:
    _, context = one_rank(device)
    generator = torch.Generator().manual_seed(hidden)

    def draw(*shape: int, kind: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(device, kind)

    num_tokens, num_rows = 7, 5
    mask = torch.tensor([1, 0, 1, 1, 1, 0, 1], device=device).bool().view(-1, 1)
    slots = torch.where(mask, mask.cumsum(0) - 1, -1).int()
    source = mask.view(-1).nonzero().view(-1).int()
    parts = [draw(num_rows + 1, hidden)]
    if num_topk:
        parts.append(draw(num_rows + 1, num_topk, kind=torch.float32))
    parts[0][0, 0] = -0.0
    biases = [draw(num_tokens, hidden) for _ in range(num_biases)]
    staging = [torch.zeros(3, part.size(1), dtype=part.dtype, device=device) for part in parts]
    offer(context, [[one] for one in staging], [0], rows_per_source=[3])
    context.state[exchange.STATE_TOKENS] = num_tokens
    outs = [torch.full((num_tokens, part.size(1)), 7.0, device=device).to(part.dtype) for part in parts]
    combine(context, parts, outs, biases, slots, num_rows, torch.cat([source, source.new_tensor([77])]))
    assert context.state[exchange.STATE_FAILED] == 0
    for index, (out, part) in enumerate(zip(outs, parts, strict=True)):
        expected = torch.zeros_like(out)
        reduce_rows(expected, [part], slots, [0], biases if index == 0 else [])
        assert torch.equal(as_bytes(out), as_bytes(expected))
