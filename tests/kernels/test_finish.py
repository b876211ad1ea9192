"""The ends of calls: one signal and one wait, or rounds through staging, here of one rank that sends to itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import finish_combine, finish_dispatch, int32, put_rows
from windows import Boards, offer, synchronize

from deep_ep.kernels import _triton, exchange, put
from deep_ep.kernels.exchange import Context
from deep_ep.kernels.put import LaunchShape
from deep_ep.kernels.reduce import reduce_rows
from deep_ep.kernels.rows import as_bytes

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

READY, TAKEN = 3, 4
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


def finish_bare_dispatch(context: Context) -> None:
    x, slots, prefix = bare(context)
    finish_dispatch(context, READY, 0, x, None, slots, None, None, 0, False, prefix)


def finish_bare_combine(context: Context) -> None:
    x, slots, prefix = bare(context)
    finish_combine(context, READY, 3, [x], [x], (), slots, prefix, prefix.new_empty(0))


@pytest.mark.parametrize(
    ("finish", "operation", "step"), [(finish_bare_dispatch, 0, READY), (finish_bare_combine, 3, TAKEN)]
)
def test_finish_waits_for_one_step_of_all(device: str, finish, operation: int, step: int) -> None:
    boards = Boards(2, device)
    boards.handshake(*[finish] * 2)
    assert [boards.record(rank) for rank in range(2)] == [None, None]
    assert [int(board[0]) for board in boards.boards] == [step, step], "one step, and the same on every board"
    late = replace(boards.contexts[1], limit_ns=1)
    late.state[exchange.STATE_EPOCH] = 1
    finish(late)
    assert boards.record(1) == [exchange.TIMEOUT, 1, operation, 0b01, step, 0, 1]


@pytest.mark.parametrize("word", [exchange.STATE_FAILED, exchange.STATE_HELD])
def test_a_failed_or_held_call_does_not_finish(device: str, word: int) -> None:
    boards, context = one_rank(device)
    context.state[word] = 1
    context.state[exchange.STATE_STAGED] = 1
    finish_bare_dispatch(context)
    finish_bare_combine(context)
    assert not boards.boards[0].any()


# Dispatch ------------------------------------------------------------------------------------------------------------


def test_staged_dispatch_worked_example(device: str) -> None:
    boards, context = one_rank(device)
    lane, capacity = torch.zeros(2, 2, device=device), torch.zeros(4, 2, device=device)
    offer(context, [[lane]], [0], rows_per_source=[2])
    x = torch.arange(10.0, device=device).view(5, 2)
    slots, prefix = int32([[0], [-1], [-1], [1], [2]], device), int32([[3]], device)
    finish_dispatch(context, READY, 0, x, None, slots, None, None, 0, False, prefix, [capacity, None, None])
    assert boards.record(0) is None
    assert capacity.tolist() == [[0.0, 1.0], [6.0, 7.0], [8.0, 9.0], [0.0, 0.0]]
    assert lane.tolist() == [[8.0, 9.0], [6.0, 7.0]], "token 4 is the first of round 1"
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
def test_what_comes_through_staging_is_what_put_delivers(
    device: str,
    dtype: torch.dtype,
    hidden: int,
    num_topk: int,
    idx_dtype: torch.dtype,
    scale_dtype: torch.dtype | None,
    num_local: int,
) -> None:
    """Into one window straight, into another by lanes of three rows. Without experts: along the slots of a handle."""
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

    def capacities(count: int) -> list[torch.Tensor | None]:
        room_scales = None if scales is None else torch.zeros(count, 5, dtype=scale_dtype, device=device)
        records = torch.zeros(count, words, dtype=torch.int32, device=device) if words else None
        return [torch.zeros(count, hidden * dtype.itemsize, dtype=torch.uint8, device=device), room_scales, records]

    straight, through, lanes = capacities(num_rows), capacities(num_rows), capacities(rows_per_source)
    offer(context, [part if part is None else [part] for part in straight], [num_rows])
    send_head = slots.clone() if num_local else None
    keeps_weights = num_topk == 8
    put_rows(context, SHAPE, x, scales, slots, send_head, ids, weights, num_local, keeps_weights)
    offer(context, [part if part is None else [part] for part in lanes], [0], rows_per_source=[rows_per_source])
    prefix = int32([[7]], device)
    finish_dispatch(
        context, READY, 0, x, scales, slots, ids, weights, num_local, num_local > 0, prefix, through, keeps_weights
    )
    assert context.state[exchange.STATE_FAILED] == 0
    for got, expected in zip(through, straight, strict=True):
        assert (got is None) == (expected is None)
        if got is not None and expected is not None:
            assert torch.equal(as_bytes(got), as_bytes(expected))
    assert straight[0] is not None
    assert straight[0][:7].any()


def test_nothing_is_laid_beyond_a_lane_nor_copied_beyond_the_room(device: str) -> None:
    """A handle whose counts and slots do not fit each other."""
    boards, context = one_rank(device)
    memory, memory_room = torch.zeros(8, 4, device=device), torch.zeros(8, 4, device=device)
    offer(context, [[memory[:2]]], [0], rows_per_source=[2])
    x = torch.ones(4, 4, device=device)
    slots, prefix = int32([[0], [90], [1], [91]], device), int32([[6]], device)
    finish_dispatch(context, READY, 0, x, None, slots, None, None, 0, False, prefix, [memory_room[:3], None, None])
    assert boards.record(0) is None
    assert not memory[2:].any()
    assert not memory_room[3:].any()


# Combine -------------------------------------------------------------------------------------------------------------


def combine(context: Context, rows, sums, biases, slots: torch.Tensor, num_rows: int, source: torch.Tensor) -> None:
    prefix = slots.new_tensor([[num_rows]])
    finish_combine(context, READY, 3, rows, sums, biases, slots, prefix, source)
    synchronize(context)


def test_staged_combine_worked_example(device: str) -> None:
    boards, context = one_rank(device)
    lane = torch.zeros(2, 2, device=device)
    offer(context, [[lane]], [0], rows_per_source=[2])
    context.state[exchange.STATE_TOKENS] = 5
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]], device=device)
    slots, source = int32([[0], [-1], [-1], [1], [2]], device), int32([0, 3, 4], device)
    out = torch.full((5, 2), 7.0, device=device)
    combine(context, [rows], [out], [], slots, 3, source)
    assert boards.record(0) is None
    untouched = [7.0, 7.0]
    assert out.tolist() == [[1.0, 2.0], untouched, untouched, [3.0, 4.0], [5.0, 6.0]], "`pull` sums the others"
    assert lane.tolist() == [[5.0, 6.0], [3.0, 4.0]], "token 4 is the first of its range, token 3 the second"
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
    lanes = [torch.zeros(3, part.size(1), dtype=part.dtype, device=device) for part in parts]
    offer(context, [[lane] for lane in lanes], [0], rows_per_source=[3])
    context.state[exchange.STATE_TOKENS] = num_tokens
    outs = [torch.zeros(num_tokens, part.size(1), dtype=part.dtype, device=device) for part in parts]
    combine(context, parts, outs, biases, slots, num_rows, torch.cat([source, source.new_tensor([77])]))
    assert context.state[exchange.STATE_FAILED] == 0
    for index, (out, part) in enumerate(zip(outs, parts, strict=True)):
        expected = torch.zeros_like(out)
        reduce_rows(expected, [part], slots, [0], biases if index == 0 else [])
        kept = mask.view(-1)
        assert torch.equal(as_bytes(out[kept]), as_bytes(expected[kept]))
        assert not out[~kept].any(), "tokens without a staged row are not touched"
