"""Rows of selections: found, put, unpacked, folded and summed, against plain loops and the examples of docstrings."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from calls import ANNOUNCED, COMBINE, DISPATCH, OFFERED, READY, SAME, all_bases, int32, require_rewound, rows_of
from windows import Boards, fail, make_context, offer, synchronize, with_subnormals

from deep_ep import reference
from deep_ep.kernels import _triton, exchange, selections
from deep_ep.kernels.exchange import STATE_EPOCH, STATE_HELD, STATE_WORDS, TABLE_EXPANDED, TABLE_STARTS, Context
from deep_ep.kernels.notify import HandshakeForm, Post, Selected, SelectionHandshake, Terms
from deep_ep.kernels.put import End, LaunchShape, RowSpec, record_words, word_of
from deep_ep.kernels.rows import as_bytes, rows_as
from deep_ep.kernels.selections import Arrange, Describe, Place, PullSelections, PutSelections
from deep_ep.sizing import align

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

SHAPE = LaunchShape(num_blocks=3, words=64, num_warps=2)
PUT_END, PULL_END = End(READY, DISPATCH), End(READY, COMBINE)
UNTOUCHED = -9


def filled(shape: Sequence[int], device: str, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Memory in which one sees what was written."""
    return torch.full(tuple(shape), UNTOUCHED, dtype=dtype, device=device)


def memory_of(num_rows: int, columns: int, dtype: torch.dtype, device: str) -> torch.Tensor:
    """The same, of a dtype that may not have that number."""
    return rows_as(torch.full((num_rows, columns * dtype.itemsize), 0x5A, dtype=torch.uint8, device=device), dtype)


def require_same(got: torch.Tensor, expected: torch.Tensor) -> None:
    """Bit for bit, whatever the dtype."""
    assert got.shape == expected.shape
    assert got.dtype == expected.dtype
    assert torch.equal(as_bytes(got), as_bytes(expected))


def bits(weights: Any) -> Any:
    """Numbers as the words of a record have them."""
    return torch.as_tensor(weights, dtype=torch.float32, device="cpu").view(torch.int32).tolist()


def hold(context: Context) -> None:
    """Have the call held: no row may move."""
    context.state[STATE_HELD] = 1


def draw_ids(num_tokens: Sequence[int], num_topk: int, num_experts: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Ids of all ranks: some select nothing, also if all but their lowest bits are cut off; some tokens select an
    expert several times.
    """
    generator = torch.Generator().manual_seed(num_topk)
    ids = [torch.randint(-1, num_experts + 1, (count, num_topk), generator=generator) for count in num_tokens]
    outside = ((1 << 32) + 1, -(1 << 32) + 1) if dtype == torch.int64 else ((1 << 31) - 1, -(1 << 31))
    for one in ids:
        for other in outside:
            one[torch.rand(one.shape, generator=generator) < 0.1] = other
        one[1:2] = num_experts - 1
        one[2:3] = -1
    return [one.to(dtype) for one in ids]


class World:
    """The selections of all ranks, and where their rows lie, found by loops.

    Args:
        ids: [T, K] of each rank.
        num_local: L.
        alignment: To which the rows of an expert are rounded up.
    """

    def __init__(self, ids: Sequence[torch.Tensor], num_local: int, alignment: int = 1):
        self.ids, self.num_local, self.alignment = ids, num_local, alignment
        self.num_ranks, self.num_experts, self.num_topk = len(ids), len(ids) * num_local, ids[0].size(1)
        selected, ranks = [one.tolist() for one in ids], range(len(ids))
        self.owners = [
            [[one // num_local if 0 <= one < self.num_experts else -1 for one in token] for token in of_rank]
            for of_rank in selected
        ]
        # Compact rows: by source rank, then by token.
        self.came = [
            [(source, token) for source in ranks for token, owners in enumerate(self.owners[source]) if rank in owners]
            for rank in ranks
        ]
        number = [{pair: index for index, pair in enumerate(came)} for came in self.came]
        self.send_head = [
            [[number[rank].get((source, token), -1) for rank in ranks] for token in range(len(selected[source]))]
            for source in ranks
        ]
        self.slots = [
            [
                [
                    number[owner][source, token] if owner >= 0 and owner not in owners[column + 1 :] else -1
                    for column, owner in enumerate(owners)
                ]
                for token, owners in enumerate(self.owners[source])
            ]
            for source in ranks
        ]
        # Expanded rows: by expert, source rank, token and column.
        self.rows = [[[-1] * self.num_topk for _ in of_rank] for of_rank in selected]
        self.first = [[-1] * self.num_experts for _ in ranks]
        self.counts: list[list[int]] = [[] for _ in ranks]
        self.ends: list[list[int]] = [[] for _ in ranks]
        self.num_expanded = [0 for _ in ranks]
        for expert in range(self.num_experts):
            rank = expert // num_local
            start = row = self.num_expanded[rank]
            for source in ranks:
                self.first[source][expert] = row
                for token, column in (ids[source] == expert).nonzero().tolist():
                    self.rows[source][token][column] = row
                    row += 1
            self.counts[rank].append(row - start)
            self.ends[rank].append(row)
            self.num_expanded[rank] = align(row, alignment)

    def sent(self) -> torch.Tensor:
        """[R, R]: tokens that each rank sends to each."""
        return torch.tensor(
            [[sum(s == source for s, _ in came) for came in self.came] for source in range(len(self.ids))]
        )

    def starts(self, rank: int) -> list[int]:
        """The first slots of a rank's tokens."""
        return self.sent()[:rank].sum(0).tolist()

    def mask(self, rank: int) -> torch.Tensor:
        """[T, R]: where the tokens of a rank go."""
        return torch.tensor(self.send_head[rank], dtype=torch.int32).view(-1, self.num_ranks) >= 0

    def numbers(self, rank: int, device: str) -> torch.Tensor:
        """[T, R]: the tokens of a rank, numbered for each destination; -1: they do not go there."""
        mask = self.mask(rank)
        return torch.where(mask, mask.cumsum(0) - 1, -1).to(device, torch.int32)

    def per_expert(self, rank: int) -> list[int]:
        """[E]: how often a rank selects each expert."""
        return [int((self.ids[rank] == expert).sum()) for expert in range(self.num_experts)]

    def tiles(self, rank: int) -> list[list[int]]:
        """The same of each tile of the rank's tokens, and how many of the tokens go to each rank. And then of all tiles
        before each.
        """
        size = selections.tile_tokens(self.num_topk)
        parts, masks = self.ids[rank].split(size), self.mask(rank).split(size)
        counts = [
            [*(int((part == expert).sum()) for expert in range(self.num_experts)), *mask.sum(0).tolist()]
            for part, mask in zip(parts, masks, strict=True)
        ]
        before = [[sum(column) for column in zip(*counts[:tile], strict=True)] for tile in range(1, len(counts))]
        return [*counts, [0] * len(counts[0]), *before]

    def local_ids(self, rank: int, source: int, token: int) -> list[int]:
        """A token's ids, as a rank counts them."""
        local = [one - rank * self.num_local for one in self.ids[source][token].tolist()]
        return [one if 0 <= one < self.num_local else -1 for one in local]

    def records(self, rank: int, weights: Sequence[torch.Tensor], has_rows: bool, device: str) -> torch.Tensor:
        """The records of a rank's rows, untouched behind what they consist of."""
        records = filled((len(self.came[rank]), record_words(self.num_topk, has_rows)), "cpu")
        for record, (source, token) in zip(records, self.came[rank], strict=True):
            words = [token, *self.local_ids(rank, source, token), *bits(weights[source][token])]
            words += self.rows[source][token] if has_rows else []
            record[: len(words)] = torch.tensor(words, dtype=torch.int32)
        return records.to(device)


def table(values: list, device: str, columns: int) -> torch.Tensor:
    """An int32 matrix that may have no rows."""
    return int32(values, device).view(-1, columns)


# Counting and placing ------------------------------------------------------------------------------------------------


class Placed(NamedTuple):
    """What `Place` writes, in the order of its arguments."""

    send_head: torch.Tensor
    owners: torch.Tensor
    slots: torch.Tensor
    rows: torch.Tensor
    targets: torch.Tensor


def place(
    context: Context,
    spec: RowSpec,
    world: World,
    weights: torch.Tensor,
    is_new: bool = True,
    copied_idx: torch.Tensor | None = None,
) -> Placed:
    """Place the selections of a rank, with the numbers of the world; if they are not new, along its tables."""
    rank, device, num_topk = context.rank, context.state.device.type, world.num_topk
    ids = world.ids[rank].to(device)
    num_tokens = ids.size(0)
    tables = [filled(ids.shape, device) for _ in range(3)]
    if not is_new:
        tables = [table(one[rank], device, num_topk) for one in (world.owners, world.slots, world.rows)]
    targets = filled((2, *ids.shape), device, torch.int64)
    placed = Placed(filled((num_tokens, world.num_ranks), device), *tables, targets)
    step = Place(context, spec, num_topk, world.num_local, ids.dtype, is_new)
    columns = world.num_experts + world.num_ranks
    tiles, first = table(world.tiles(rank), device, columns), int32(world.first[rank], device)
    step(num_tokens, ids, copied_idx, weights, tiles, first, *placed)
    return placed


def test_place_worked_example(device: str) -> None:
    """Two experts on two ranks, first rows 3 and 5. Rank 1 takes expanded rows."""
    context = make_context(0, 2, device)
    world = World([torch.tensor([[1, 0], [1, -1]]), torch.tensor([[-1, -1]])], 1)
    world.first[0] = [3, 5]
    weights = torch.tensor([[0.5, 0.25], [0.75, 0.125]], device=device)
    x, records = [torch.zeros(9, 4, device=device) for _ in range(2)], [filled((9, 8), device) for _ in range(2)]
    offer(context, [x, None, records], [9, 9], [2, 4], expanded=[0, 9])
    placed = place(context, rows_of(x[0], None, None, True), world, weights)
    assert placed.owners.tolist() == [[1, 0], [1, -1]]
    assert placed.rows.tolist() == [[5, 3], [6, -1]]
    assert placed.slots.tolist() == [[4, 2], [5, -1]]
    assert placed.send_head.tolist() == [[2, 4], [-1, 5]]
    to_first, to_second = (one.data_ptr() for one in x)
    assert placed.targets[0].tolist() == [
        [to_second + 5 * 16, to_first + 2 * 16],
        [to_second + 6 * 16, 0],
    ], "token 1 goes to row 6 of rank 1; rank 0 has compact rows"
    assert (placed.targets[1] == UNTOUCHED).all(), "there are no scales"
    assert records[0][2].tolist() == [0, -1, 0, *bits([0.5, 0.25]), 5, 3, UNTOUCHED]
    assert records[1][4].tolist() == [0, 0, -1, *bits([0.5, 0.25]), 5, 3, UNTOUCHED]
    assert records[1][5].tolist() == [1, 0, -1, *bits([0.75, 0.125]), 6, -1, UNTOUCHED]
    written = [(one != UNTOUCHED).any(1).nonzero().flatten().tolist() for one in records]
    assert written == [[2], [4, 5]], "nothing else was written"


class Case(NamedTuple):
    """A dispatch of all ranks: tokens of each, K, L, who takes expanded rows, how many rows are not offered."""

    num_tokens: tuple[int, ...]
    num_topk: int
    num_local: int
    is_expanded: tuple[bool, ...]
    idx_dtype: torch.dtype = torch.int64
    alignment: int = 1
    num_cut: int = 0
    hidden: int = 8
    dtype: torch.dtype = torch.float32
    num_scales: int = 0


CASES = {
    "one token, one rank": Case((1,), 1, 1, (True,), torch.int32),
    "no tokens somewhere": Case((0, 5), 3, 2, (True, True), alignment=4),
    "compact": Case((7, 6), 3, 3, (False, False), torch.int32, num_scales=3),
    "mixed": Case((9, 4, 6), 3, 2, (False, True, True), torch.int32, 2, hidden=13, dtype=torch.uint8, num_scales=1),
    "one column, two tiles": Case((300, 2), 1, 2, (True, False), num_scales=5),
    "many tiles": Case((330, 33), 8, 3, (True, False), alignment=16, num_cut=5, num_scales=2),
    "twelve columns": Case((17, 16, 1), 12, 2, (True, True, False), torch.int32, 8, dtype=torch.bfloat16),
    "twelve columns, cut": Case((35, 3), 12, 5, (False, True), num_cut=20, num_scales=7),
    "nothing offered": Case((3, 4), 3, 2, (True, False), num_cut=99, num_scales=1),
}


@pytest.mark.parametrize("is_expanded", [True, False])
@pytest.mark.parametrize("name", CASES)
def test_selections_are_counted(device: str, name: str, is_expanded: bool) -> None:
    """By the first half of a handshake: by tiles, or by ranks, with the tokens numbered."""
    case = CASES[name]
    ids = draw_ids(case.num_tokens, case.num_topk, case.num_local * len(case.num_tokens), case.idx_dtype)
    world = World(ids, case.num_local)
    boards = Boards(world.num_ranks, device)
    call = Select(world, 0, device, Post(), 0, receives=False, is_expanded=is_expanded)
    call(boards.contexts[0])
    assert boards.record(0) is None
    *tiles, behind = call.selected.tiles.tolist()
    if is_expanded and case.num_tokens[0]:
        assert tiles == world.tiles(0)
    unwritten = [behind] if is_expanded else [*tiles, behind]
    assert {word for row in unwritten for word in row} == {UNTOUCHED}
    if not is_expanded:
        assert torch.equal(call.selected.numbers, world.numbers(0, device))
    assert torch.equal(call.selected.mask, world.mask(0).to(device))
    assert call.selected.per_rank.tolist() == world.sent()[0].tolist()
    assert call.selected.per_expert.tolist() == world.per_expert(0)


class Dispatch:
    """A case with memory of all ranks. Behind what is offered there is more, in which one sees what was written."""

    def __init__(self, case: Case, device: str):
        self.case, self.device, self.ranks = case, device, range(len(case.num_tokens))
        ids = draw_ids(case.num_tokens, case.num_topk, case.num_local * len(self.ranks), case.idx_dtype)
        self.world = World(ids, case.num_local, case.alignment)
        generator = torch.Generator().manual_seed(0)
        wide = case.hidden * case.dtype.itemsize
        self.x, self.scales, self.weights = [], [], []
        for count in case.num_tokens:
            raw = torch.randint(0, 120, (count, wide), generator=generator, dtype=torch.uint8)
            self.x.append(rows_as(raw, case.dtype).to(device))
            scales = torch.rand(case.num_scales, 2 * count, generator=generator).to(device)
            self.scales.append(scales[:, ::2].t() if case.num_scales else None)  # every other element of columns
            self.weights.append(torch.rand(count, case.num_topk, generator=generator).to(device))
        self.spec = rows_of(self.x[0], self.scales[0], None, True)
        came, num_expanded = [len(one) for one in self.world.came], self.world.num_expanded
        self.there = [num_expanded[rank] if case.is_expanded[rank] else came[rank] for rank in self.ranks]
        self.num_rows = [max(0, rows - case.num_cut) for rows in came]
        self.offered = [max(0, rows - case.num_cut) for rows in self.there]
        self.to_x = [memory_of(rows, case.hidden, case.dtype, device) for rows in self.there]
        self.to_scales = [memory_of(rows, case.num_scales, torch.float32, device) for rows in self.there]
        self.records = [filled((rows, record_words(case.num_topk, True)), device) for rows in came]

    def context(self, rank: int) -> Context:
        """The words of a rank, with the offers of all."""
        context = make_context(rank, len(self.ranks), self.device)
        # Ranks with compact rows say how many expanded rows they could make of them.
        expanded = [rows if self.case.is_expanded[peer] else -77 for peer, rows in enumerate(self.offered)]
        sections = [self.to_x, self.to_scales if self.case.num_scales else None, self.records]
        offer(context, sections, self.num_rows, self.world.starts(rank), expanded=expanded)
        return context

    def target(self, source: int, token: int, column: int) -> tuple[int, int]:
        """The rank and row that a selection goes to; -1 if nothing goes there."""
        world, peer = self.world, self.world.owners[source][token][column]
        if peer < 0:
            return peer, -1
        is_expanded = self.case.is_expanded[peer] and self.offered[peer] > 0
        row = (world.rows if is_expanded else world.slots)[source][token][column]
        limit = self.offered[peer] if is_expanded else self.num_rows[peer]
        return peer, row if row < limit else -1

    def expected_targets(self, source: int) -> torch.Tensor:
        """[2, T, K]: the addresses of a rank's selections."""
        targets = torch.zeros(2, *self.world.ids[source].shape, dtype=torch.int64)
        for token in range(targets.size(1)):
            for column in range(targets.size(2)):
                peer, row = self.target(source, token, column)
                if row >= 0:
                    targets[0, token, column] = self.to_x[peer].data_ptr() + row * self.spec.row_bytes
                    targets[1, token, column] = self.to_scales[peer].data_ptr() + row * 4 * self.case.num_scales
        if not self.case.num_scales:
            targets[1] = UNTOUCHED
        return targets.to(self.device)


@pytest.mark.parametrize("name", CASES)
def test_selections_go_where_loops_find_their_rows(device: str, name: str) -> None:
    """All ranks place and put. Rows and records lie where they belong, and nothing was written elsewhere."""
    case = CASES[name]
    made = Dispatch(case, device)
    world = made.world
    expected_x, expected_scales = [one.clone() for one in made.to_x], [one.clone() for one in made.to_scales]
    for rank in made.ranks:
        context = made.context(rank)
        copied_idx = filled(world.ids[rank].shape, device, case.idx_dtype) if rank else None
        placed = place(context, made.spec, world, made.weights[rank], copied_idx=copied_idx)
        if copied_idx is not None:
            assert torch.equal(copied_idx, world.ids[rank].to(device))
        if case.num_tokens[rank]:
            for got, wanted in ((placed.owners, world.owners), (placed.slots, world.slots), (placed.rows, world.rows)):
                assert got.tolist() == wanted[rank]
            assert placed.send_head.tolist() == world.send_head[rank]
        assert torch.equal(placed.targets, made.expected_targets(rank))
        x, scales = made.x[rank], made.scales[rank]
        PutSelections(context, SHAPE, made.spec, case.num_topk, PUT_END)(x, scales, placed.targets)
        require_rewound(context)
        for token, owners in enumerate(world.owners[rank]):
            for column in range(len(owners)):
                peer, row = made.target(rank, token, column)
                if row >= 0:
                    expected_x[peer][row] = x[token]
                    if scales is not None:
                        expected_scales[peer][row] = scales[token]
    for rank in made.ranks:
        require_same(made.to_x[rank], expected_x[rank])
        require_same(made.to_scales[rank], expected_scales[rank])
        records = world.records(rank, made.weights, True, device)
        records[made.num_rows[rank] :] = UNTOUCHED
        assert torch.equal(made.records[rank], records)


@pytest.mark.parametrize("name", ["mixed", "many tiles", "twelve columns", "nothing offered"])
def test_selections_of_tables_go_where_they_went(device: str, name: str) -> None:
    """A cached dispatch: what was found before is read, and there are no records."""
    made = Dispatch(CASES[name], device)
    for rank in made.ranks:
        placed = place(made.context(rank), made.spec, made.world, made.weights[rank], is_new=False)
        assert torch.equal(placed.targets, made.expected_targets(rank))
        assert placed.rows.tolist() == made.world.rows[rank]
        assert (placed.send_head == UNTOUCHED).all()
    assert all((one == UNTOUCHED).all() for one in made.records)


def test_records_wait_while_a_call_is_held(device: str) -> None:
    """Rows are found, but offers may be too small: the records come with the second try."""
    made = Dispatch(CASES["mixed"], device)
    context = made.context(0)
    hold(context)
    placed = place(context, made.spec, made.world, made.weights[0])
    assert placed.rows.tolist() == made.world.rows[0]
    assert (placed.send_head == UNTOUCHED).all()
    assert all((one == UNTOUCHED).all() for one in made.records)


@pytest.mark.parametrize("is_new", [True, False])
def test_a_failed_buffer_places_nothing(device: str, is_new: bool) -> None:
    made = Dispatch(CASES["mixed"], device)
    context = made.context(0)
    fail(context)
    placed = place(context, made.spec, made.world, made.weights[0], is_new=is_new)
    tables = (placed.owners, placed.slots, placed.rows) if is_new else ()
    for untouched in (placed.send_head, placed.targets, *tables, *made.records):
        assert (untouched == UNTOUCHED).all()


# Putting -------------------------------------------------------------------------------------------------------------


def test_put_worked_example(device: str) -> None:
    """One token with targets a, none, b."""
    memory = torch.zeros(4, 2, device=device)
    a, b = memory[3].data_ptr(), memory[1].data_ptr()
    x = torch.tensor([[11.0, 12.0]], device=device)
    context = make_context(0, 1, device)
    put = PutSelections(context, SHAPE, rows_of(x, None, None, False), 3, PUT_END)
    put(x, None, torch.tensor([[[a, 0, b]]], device=device))
    assert memory.tolist() == [[0.0, 0.0], [11.0, 12.0], [0.0, 0.0], [11.0, 12.0]]


@pytest.mark.parametrize("is_unfold", [False, True])
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "hidden", "dtype", "num_scales", "scale_dtype"),
    [
        (1, 1, 1, torch.uint8, 0, None),
        (5, 2, 13, torch.uint8, 0, None),
        (4, 3, 33, torch.bfloat16, 1, torch.float32),
        (7, 8, 300, torch.bfloat16, 3, torch.int32),  # three pieces
        (3, 9, 7, torch.int16, 5, torch.bfloat16),
        (6, 12, 1030, torch.float8_e4m3fn, 9, torch.float32),  # pieces of 16-bit words, the last one short
        (2, 12, 20, torch.float64, 2, torch.float64),
        (0, 4, 8, torch.float32, 0, None),
    ],
)
def test_rows_are_put_to_addresses_and_nowhere_else(
    device: str,
    num_tokens: int,
    num_topk: int,
    hidden: int,
    dtype: torch.dtype,
    num_scales: int,
    scale_dtype: torch.dtype | None,
    is_unfold: bool,
) -> None:
    generator = torch.Generator().manual_seed(hidden)
    raw = torch.randint(0, 120, (num_tokens, hidden * dtype.itemsize), generator=generator, dtype=torch.uint8)
    x, scales, scale_memory = rows_as(raw, dtype).to(device), None, None
    num_cells = num_tokens * num_topk
    memory = memory_of(2 * num_cells + 1, hidden, dtype, device)
    cells = torch.randperm(2 * num_cells + 1, generator=generator)[:num_cells].view(num_tokens, num_topk)
    goes = torch.rand(num_tokens, num_topk, generator=generator) < 0.7
    targets = torch.zeros(2, num_tokens, num_topk, dtype=torch.int64)
    targets[0] = torch.where(goes, memory.data_ptr() + cells * hidden * dtype.itemsize, 0)
    if scale_dtype is not None:
        # Some of the columns of a matrix that is stored by columns, longer than it must be.
        drawn = torch.rand(2 * num_scales, num_tokens + 3, generator=generator).mul(99).to(device, scale_dtype)
        scales, scale_memory = drawn.t()[:num_tokens, ::2], memory_of(len(memory), num_scales, scale_dtype, device)
        targets[1] = torch.where(goes, scale_memory.data_ptr() + cells * num_scales * scale_dtype.itemsize, 0)
    expected = [None if one is None else one.clone() for one in (memory, scale_memory)]
    for token, column in goes.nonzero().tolist():
        for one, rows in zip(expected, (x, scales), strict=True):
            if one is not None and rows is not None:
                one[cells[token, column]] = rows[token]
    context = make_context(0, 1, device)
    put = PutSelections(context, SHAPE, rows_of(x, scales, None, False), num_topk, None if is_unfold else PUT_END)
    put(x, scales, targets.to(device))
    require_rewound(context)
    for got, wanted in zip((memory, scale_memory), expected, strict=True):
        if got is not None and wanted is not None:
            require_same(got, wanted)


@pytest.mark.parametrize("is_unfold", [False, True])
def test_what_is_held_or_failed_puts_no_rows(device: str, is_unfold: bool) -> None:
    """Unfolding is no part of the exchange that is held."""
    memory, x = torch.zeros(1, 4, device=device), torch.ones(1, 4, device=device)
    context = make_context(0, 1, device)
    put = PutSelections(context, SHAPE, rows_of(x, None, None, False), 1, None if is_unfold else PUT_END)
    targets = torch.tensor([[[memory.data_ptr()]]], device=device)
    hold(context)
    put(x, None, targets)
    assert memory.tolist() == [[float(is_unfold)] * 4]
    context.state[STATE_HELD] = 0
    memory.zero_()
    fail(context)
    put(x, None, targets)
    assert memory.tolist() == [[0.0] * 4]


# Describing ----------------------------------------------------------------------------------------------------------


class Described:
    """What `Describe` makes of records, and, if `sent` are the selections of a world, of them."""

    def __init__(
        self,
        context: Context,
        records: torch.Tensor,
        prefix: torch.Tensor,
        max_tokens: int,
        num_local: int,
        num_topk: int,
        num_weights: int | None,
        idx_dtype: torch.dtype = torch.int64,
        num_blocks: int = 2,
        sent: World | None = None,
    ):
        device, num_rows, is_expanded = records.device.type, records.size(0), num_weights is not None
        experts = int32([UNTOUCHED] * (2 * num_local) + [max_tokens], device)
        self.rank_ends, self.source_idx = filled((context.num_ranks,), device), filled((num_rows,), device)
        self.sources = filled((num_rows, 2 + num_topk), device)
        self.topk_idx, self.ids = (filled((num_rows, num_topk), device, idx_dtype) for _ in range(2))
        shape = (num_rows, num_topk) if num_weights is None else (num_weights,)
        self.weights = filled(shape, device, torch.float32)
        describe = Describe(context, num_blocks, num_topk, num_local, idx_dtype, is_expanded)
        ids = (None, None) if is_expanded else (self.topk_idx, self.ids)
        own: tuple[torch.Tensor | None, ...] = ()
        if sent is not None:
            topk_idx = sent.ids[context.rank].to(device)
            self.owners, self.slots = (filled(topk_idx.shape, device) for _ in range(2))
            self.copied_idx = filled(topk_idx.shape, device, idx_dtype) if context.rank else None
            own = (topk_idx, self.copied_idx, sent.numbers(context.rank, device), self.owners, self.slots)
        described = (self.rank_ends, self.source_idx, self.sources, *ids, self.weights, own)
        describe(records, num_rows, prefix, experts, *described)


def test_unpack_worked_example(device: str) -> None:
    """K = 2 and M = 16; the row came from rank 1."""
    records = int32([[4, 1, -1, bits(0.5), bits(0.2), 7, 3, UNTOUCHED]], device)
    prefix = int32([[0, 5], [1, 5]], device)
    got = Described(make_context(0, 2, device), records, prefix, 16, 2, 2, 9)
    assert got.sources.tolist() == [[20, 2, 7, -1]]
    assert got.weights.tolist() == [UNTOUCHED] * 7 + [0.5, UNTOUCHED], "the weight of row 7"
    assert got.source_idx.tolist() == [4]
    assert got.rank_ends.tolist() == [0, 1]


def test_unpack_example_of_the_contract(device: str) -> None:
    """`topk_idx` is [0, 3, -1, 1] with two experts a rank: token 6 of rank 1, at rank 0, M = 16."""
    ids = torch.full((7, 4), -1)
    ids[6] = torch.tensor([0, 3, -1, 1])
    world = World([torch.full((1, 4), -1), ids], 2)
    weights = [torch.zeros(1, 4), torch.rand(7, 4)]
    records, prefix = world.records(0, weights, True, device), int32([[0, 0], [1, 1]], device)
    got = Described(make_context(0, 2, device), records, prefix, 16, 2, 4, 2)
    assert got.sources.tolist() == [[22, 7, 0, -1, -1, 1]]
    assert got.weights.tolist() == [weights[1][6, 0].item(), weights[1][6, 3].item()]


@pytest.mark.parametrize("is_expanded", [True, False])
@pytest.mark.parametrize("spare_rows", [0, 3])
@pytest.mark.parametrize(
    "name", ["one token, one rank", "no tokens somewhere", "mixed", "many tiles", "twelve columns"]
)
def test_rows_are_described_as_loops_find_them(device: str, name: str, spare_rows: int, is_expanded: bool) -> None:
    case = CASES[name]
    made = Dispatch(case, device)
    world, num_topk = made.world, case.num_topk
    prefix = world.sent().cumsum(0).to(device, torch.int32)
    for rank in made.ranks:
        came, max_tokens = len(world.came[rank]), 1000 + rank
        records = world.records(rank, made.weights, is_expanded, device)
        # What lies behind the rows that came must not be read.
        records = torch.cat([records, records.new_zeros(spare_rows, records.size(1))])
        num_weights = world.num_expanded[rank] if is_expanded else None
        context = made.context(rank)
        got = Described(
            context, records, prefix, max_tokens, case.num_local, num_topk, num_weights, case.idx_dtype, num_blocks=1,
            sent=None if is_expanded else world,
        )  # fmt: skip
        if not is_expanded:
            assert got.owners.tolist() == table(world.owners[rank], "cpu", num_topk).tolist()
            assert got.slots.tolist() == table(world.slots[rank], "cpu", num_topk).tolist()
            if got.copied_idx is not None:
                assert torch.equal(got.copied_idx, world.ids[rank].to(device))
        assert got.rank_ends.tolist() == prefix[:, rank].tolist()
        assert got.source_idx.tolist() == [token for _, token in world.came[rank]] + [-1] * spare_rows
        expected, expected_ids, expected_weights = [], [], got.weights.new_full(got.weights.shape, UNTOUCHED)
        for index, (source, token) in enumerate(world.came[rank]):
            ids, rows, weights = world.local_ids(rank, source, token), world.rows[source][token], made.weights[source]
            highest = max(column for column, one in enumerate(ids) if one >= 0)
            placed = [row if one >= 0 and is_expanded else -1 for one, row in zip(ids, rows, strict=True)]
            expected.append([source * max_tokens + token, source * num_topk + highest, *placed])
            expected_ids.append(ids)
            if not is_expanded:
                expected_weights[index] = weights[token]
                continue
            for column, row in enumerate(placed):
                if row >= 0:
                    expected_weights[row] = weights[token, column]
        assert got.sources.tolist() == expected + [[-1] * (2 + num_topk)] * spare_rows
        assert torch.equal(got.weights, expected_weights)
        beyond = [[-1] * num_topk] * spare_rows
        for one in (got.topk_idx, got.ids):
            assert one.tolist() == (filled(one.shape, "cpu").tolist() if is_expanded else expected_ids + beyond)
        assert len(got.sources) == came + spare_rows


def test_rows_of_several_tiles_are_described(device: str) -> None:
    """More rows than a block splits at once, by one block and by several."""
    num_rows, num_topk = 600, 12
    token = torch.arange(num_rows, dtype=torch.int32)
    records = torch.zeros(num_rows, record_words(num_topk), dtype=torch.int32)
    records[:, 0], records[:, 1:13] = token, token[:, None] % 5 - 1
    prefix = int32([[200, 0, 0], [200, 0, 0], [590, 0, 0]], device)
    expected = torch.where(token < 200, token, 2 * 1000 + token).where(token < 590, -1)
    for num_blocks in (1, 2, 5):
        context = make_context(0, 3, device)
        got = Described(context, records.to(device), prefix, 1000, 4, num_topk, None, num_blocks=num_blocks)
        assert got.sources[:, 0].tolist() == expected.tolist()
        assert got.topk_idx[:590].tolist() == records[:590, 1:13].tolist()
        assert (got.topk_idx[590:] == -1).all()


def test_weights_are_written_inside_their_memory(device: str) -> None:
    records = int32([[0, 0, 1, bits(0.5), bits(0.25), 1, 2, 0]], device)
    memory = filled((4,), device, torch.float32)
    experts, outputs = int32([0, 0, 0, 0, 1], device), [filled((n,), device) for n in (1, 1)]
    context = make_context(0, 1, device)
    describe = Describe(context, 1, 2, 2, torch.int64, True)
    sources = filled((1, 4), device)
    describe(records, 1, int32([[1]], device), experts, *outputs, sources, None, None, memory[:2])
    assert memory.tolist() == [UNTOUCHED, 0.5, UNTOUCHED, UNTOUCHED]
    assert sources.tolist() == [[0, 1, 1, 2]], "the row is known all the same"


@pytest.mark.parametrize("is_expanded", [True, False])
def test_rows_of_a_failed_buffer_are_nobodys(device: str, is_expanded: bool) -> None:
    context = make_context(0, 1, device)
    fail(context)
    records, prefix = int32([[0] * record_words(2, is_expanded)] * 2, device), int32([[2]], device)
    got = Described(context, records, prefix, 16, 2, 2, 3 if is_expanded else None)
    assert got.source_idx.tolist() == [-1, -1]
    assert got.sources.tolist() == [[-1] * 4] * 2
    assert (got.weights == UNTOUCHED).all()
    assert (got.topk_idx == (UNTOUCHED if is_expanded else -1)).all()


# Gaps ----------------------------------------------------------------------------------------------------------------


def test_gaps_worked_example(device: str) -> None:
    out = torch.ones(4, device=device)
    selections.zero_gaps(out, int32([1, 4], device), 2)
    assert out.tolist() == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("columns", [None, 1, 5, 1500])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.bfloat16, torch.int32, torch.float64])
@pytest.mark.parametrize("is_column_major", [False, True])
def test_rows_between_experts_become_zero(
    device: str, columns: int | None, dtype: torch.dtype, is_column_major: bool
) -> None:
    """The ends of counts [5, 0, 2], rounded up to 4; the rows behind the last expert's stay as they are."""
    shape = (14,) if columns is None else (columns, 16) if is_column_major else (14, columns)
    memory = torch.ones(shape, device=device).to(dtype)
    out = memory.t()[:14] if is_column_major and columns is not None else memory
    expected = out.float()
    expected[5:8] = expected[10:12] = 0
    selections.zero_gaps(out, int32([5, 8, 10], device), 4)
    assert torch.equal(out.float(), expected)
    if out.shape != memory.shape:
        assert (memory[:, 14:].float() == 1).all()


def test_there_are_no_gaps_without_alignment(device: str) -> None:
    out = torch.ones(3, 2, device=device)
    selections.zero_gaps(out, int32([1, 3], device), 1)
    selections.zero_gaps(out[:0], int32([0, 0], device), 4)
    assert (out == 1).all()
    selections.zero_gaps(out, int32([2, 2], device), 128)
    assert out.tolist() == [[1.0, 1.0], [1.0, 1.0], [0.0, 0.0]], "no more rows than there are"


# Folding -------------------------------------------------------------------------------------------------------------


def test_addresses_worked_example(device: str) -> None:
    """Rows of 16 bytes, at 1000."""
    memory: Any = SimpleNamespace(stride=lambda _: 4, element_size=lambda: 4, data_ptr=lambda: 1000, shape=(2, 4))
    addresses = filled((1, 2), device, torch.int64)
    selections.address_rows(addresses, int32([[-1, 1]], device), memory, int32([1], device))
    assert addresses.tolist() == [[1016, 0]]


@pytest.mark.parametrize("num_topk", [1, 3, 8, 12])
@pytest.mark.parametrize(("num_rows", "num_came"), [(1, 1), (40, 33), (300, 0)])
def test_addresses_of_own_rows(device: str, num_topk: int, num_rows: int, num_came: int) -> None:
    """Rows are columns of the metadata; those that did not come, and those outside of the memory, have no address.

    Addresses are in the order of their columns, and zeros behind them.
    """
    memory = torch.zeros(50, 6, dtype=torch.int16, device=device)
    generator = torch.Generator().manual_seed(num_topk)
    sources = torch.randint(-1, 60, (num_rows, 2 + num_topk), generator=generator, dtype=torch.int32)
    rows = sources[:, 2:]
    addresses = filled((3, num_rows, num_topk), device, torch.int64)
    selections.address_rows(addresses, sources.to(device)[:, 2:], memory, int32([0, num_came], device), first=1)
    expected = torch.where((rows >= 0) & (rows < 50), memory.data_ptr() + rows.long() * 12, 0)
    expected[num_came:] = 0
    expected = expected.gather(1, (expected == 0).int().argsort(stable=True))
    assert addresses[1].tolist() == expected.tolist()
    assert (addresses[::2] == UNTOUCHED).all(), "the other matrices stay as they are"


def draw(shape: Sequence[int], dtype: torch.dtype, device: str, seed: int = 0) -> torch.Tensor:
    """Numbers of many magnitudes, so that sums depend on their order, and on every rounding."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(*shape, generator=generator, dtype=torch.float64)
    numbers = numbers * 2.0 ** torch.randint(-8, 9, tuple(shape), generator=generator)
    return with_subnormals(numbers.to(device, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("num_topk", "hidden"), [(1, 1), (3, 7), (8, 200), (12, 24)])
def test_fold_adds_columns_in_order(device: str, dtype: torch.dtype, num_topk: int, hidden: int) -> None:
    """Compact rows out of their expanded rows, rounded once. Two of them did not come."""
    num_rows, num_came = 9, 7
    generator = torch.Generator().manual_seed(hidden)
    rows = torch.randperm(num_rows * num_topk, generator=generator).view(num_rows, num_topk).int()
    rows[torch.rand(rows.shape, generator=generator) < 0.3] = -1
    rows[:, -1] = torch.arange(num_rows)  # some row at least
    rows[0, :-1] = -1
    x = draw((num_rows * num_topk, hidden), dtype, device)
    x[rows[0, -1]] = -0.0
    addresses = filled((num_rows, num_topk), device, torch.int64)
    selections.address_rows(addresses, rows.to(device), x, int32([num_came], device))
    out = memory_of(num_rows, hidden, dtype, device)
    context = make_context(0, 1, device)
    pull = PullSelections(context, SHAPE, hidden, dtype, num_topk, is_aligned=word_of(x, out)[1])
    hold(context)  # by the call before: this one has not begun
    pull(out, addresses)
    wide = torch.promote_types(dtype, torch.float32)
    for index in range(num_came):
        first, *others = [x[row].to(wide) for row in rows[index].tolist() if row >= 0]
        for other in others:
            first = first + other
        require_same(out[index : index + 1], first.to(dtype)[None])
    assert out[0].signbit().all(), "the sum of one row is that row"
    assert (out[num_came:] == 0).all()


# Sums ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_grouped", [True, False])
def test_arrange_worked_example(device: str, is_grouped: bool) -> None:
    """All give expanded rows: a, c of rank 0, b of rank 1. The sum of rank 0 stands at its highest column."""
    context = make_context(1, 2, device)
    peers = [torch.zeros(4, 4, device=device) for _ in range(2)]
    offer(context, [peers], [4, 4], expanded=[4, 4])
    owners, slots = int32([[0, 1, -1, 0]], device), int32([[-1, 0, -1, 0]], device)
    rows, sources = int32([[2, 3, -1, 1]], device), filled((1, 4), device, torch.int64)
    Arrange(context, 4, 16, True, is_grouped)(owners, slots, rows, sources)
    a, b, c = peers[0][2].data_ptr(), peers[1][3].data_ptr(), peers[0][1].data_ptr()
    assert sources.tolist() == [[b + 1, a, c + 1, 0] if is_grouped else [a + 1, b + 1, c + 1, 0]]


@pytest.mark.parametrize("has_rows", [True, False])
def test_arrange_leaves_out_what_was_not_offered(device: str, has_rows: bool) -> None:
    """Compact rows of rank 0, of which it gives two, and expanded ones of rank 1, if there are any, of which three."""
    context = make_context(0, 2, device)
    peers = [torch.zeros(4, 4, device=device) for _ in range(2)]
    offer(context, [peers], [2, 2], expanded=[0, 3 if has_rows else 0])
    owners, slots = int32([[0, 0, 1], [1, 0, 1]], device), int32([[-1, 1, 1], [-1, 2, 0]], device)
    rows, sources = int32([[0, 1, 2], [3, 0, 1]], device) if has_rows else None, filled((2, 3), device, torch.int64)
    Arrange(context, 3, 16, has_rows, has_rows)(owners, slots, rows, sources)
    first, second = (one.data_ptr() for one in peers)
    if has_rows:
        assert sources.tolist() == [[first + 17, second + 33, 0], [second + 17, 0, 0]]
    else:
        assert sources.tolist() == [[first + 17, second + 17, 0], [second + 1, 0, 0]]


def test_a_group_ends_with_the_last_row_that_was_offered(device: str) -> None:
    """Rank 0 gives four rows, and the highest column would be its sixth: what is left of its group stays by itself."""
    context = make_context(0, 2, device)
    peers = [torch.zeros(8, 4, device=device) for _ in range(2)]
    offer(context, [peers], [8, 8], expanded=[4, 8])
    owners, slots = int32([[0, 0, 1], [1, 0, 0]], device), int32([[-1, 0, 0], [1, -1, 1]], device)
    rows, sources = int32([[1, 5, 2], [3, 2, 6]], device), filled((2, 3), device, torch.int64)
    Arrange(context, 3, 16, True, True)(owners, slots, rows, sources)
    first, second = (one.data_ptr() for one in peers)
    assert sources.tolist() == [[first + 17, second + 33, 0], [second + 49, first + 33, 0]]


def test_pull_worked_example(device: str) -> None:
    """`round(round(a + b) + c)` with sources a, b + 1, c + 1: the sum of a group is rounded by itself."""
    x = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16, device=device)
    a, b, c = (one.data_ptr() for one in x)
    out = torch.zeros(1, 1, dtype=torch.bfloat16, device=device)
    context = make_context(0, 1, device)
    pull = PullSelections(context, SHAPE, 1, out.dtype, 3, is_aligned=False, is_grouped=True, end=PULL_END)
    pull(out, torch.tensor([[a, b + 1, c + 1]], device=device))
    assert out.item() == 256.0, "258 if it was rounded once"
    pull(out, torch.tensor([[b, c + 1, a + 1]], device=device))
    assert out.item() == 258.0


def test_pull_example_of_the_contract(device: str) -> None:
    """Ids [0, 3, -1, 1] with two experts a rank: `round((bias + y1) + round(y0 + y3))`, rank 1 first."""
    world = World([torch.tensor([[0, 3, -1, 1]]), torch.full((1, 4), -1)], 2)
    y = torch.tensor([[[256.0], [2.0**-18], [7.0], [1.0]]], dtype=torch.bfloat16, device=device)
    bias = torch.tensor([[-256.0]], dtype=torch.bfloat16, device=device)
    out = combined(Combine(world, y, (True, True), device), [bias], True)
    assert out.item() == 0.0, "2 ** -18 with rank 0 first, and 1 more if its rows were not rounded together"


class Combine:
    """What all ranks give of one rank's selections. Rows that must not be read are NaN.

    Args:
        world: The selections.
        y: [T, K, H] of rank 0, the contribution of each column.
        is_expanded: Which ranks give expanded rows; the others have summed theirs.
        device: Where they are.
    """

    def __init__(self, world: World, y: torch.Tensor, is_expanded: Sequence[bool], device: str):
        self.world, self.y, self.device = world, y, device
        ranks, hidden = range(world.num_ranks), y.size(2)
        came = [len(one) for one in world.came]
        sizes = [world.num_expanded[rank] if is_expanded[rank] else came[rank] for rank in ranks]
        self.peers = [torch.full((size, hidden), torch.nan, dtype=y.dtype, device=device) for size in sizes]
        wide = torch.promote_types(y.dtype, torch.float32)
        for token, owners in enumerate(world.owners[0]):
            for rank in set(owners) - {-1}:
                columns = [column for column, owner in enumerate(owners) if owner == rank]
                if is_expanded[rank]:
                    for column in columns:
                        self.peers[rank][world.rows[0][token][column]] = y[token, column]
                    continue
                total = y[token, columns[0]].to(wide)
                for column in columns[1:]:
                    total = total + y[token, column].to(wide)
                self.peers[rank][world.slots[0][token][columns[-1]]] = total.to(y.dtype)
        self.context = make_context(0, world.num_ranks, device)
        expanded = [size if is_expanded[rank] else 0 for rank, size in enumerate(sizes)]
        offer(self.context, [self.peers], came, expanded=expanded)
        self.has_rows = any(is_expanded)


def odd_words(shape: tuple[int, int], device: str) -> torch.Tensor:
    """Words that are any FP32 numbers: -0.0, signalling NaNs and a denormal among them."""
    words = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int32, generator=torch.Generator().manual_seed(0))
    odd = torch.tensor([-(1 << 31), 0x7F800001, 0x7F800001 - (1 << 31), 1], dtype=torch.int32)
    words.view(-1)[: len(odd)] = odd[: words.numel()]
    return words.to(device)


def combined(given: Combine, biases: Sequence[torch.Tensor], is_grouped: bool) -> torch.Tensor:
    """Sum the rows of rank 0's tokens."""
    world, y, device = given.world, given.y, given.device
    num_tokens, num_topk, hidden = y.shape
    owners, slots, rows = (table(one[0], device, num_topk) for one in (world.owners, world.slots, world.rows))
    sources = filled((num_tokens, num_topk), device, torch.int64)
    row_bytes = hidden * y.element_size()
    arrange = Arrange(given.context, num_topk, row_bytes, given.has_rows, is_grouped)
    arrange(owners, slots, rows if given.has_rows else None, sources)
    out = memory_of(num_tokens, hidden, y.dtype, device)
    is_aligned = word_of(out, *given.peers, *biases)[1]
    # Each rank gives the weights of its own columns, by the compact row, and zeros in the others.
    num_rows = 1 + max((one for token in world.send_head[0] for one in token), default=-1)
    send_head, words = table(world.send_head[0], device, world.num_ranks), odd_words((num_tokens, num_topk), device)
    peer_weights = [torch.zeros(num_rows, num_topk, dtype=torch.int32, device=device) for _ in range(world.num_ranks)]
    for rank, given_words in enumerate(peer_weights):
        is_sent = send_head[:, rank] >= 0
        given_words[send_head[is_sent, rank].long()] = torch.where(owners == rank, words, 0)[is_sent]
    given.context.table[1].copy_(torch.tensor([one.data_ptr() for one in peer_weights], device="cpu"))
    capacities = given.context.table[exchange.TABLE_CAPACITIES].clone()
    given.context.table[exchange.TABLE_CAPACITIES] = num_rows
    weights = torch.full((num_tokens, num_topk), 7.0, device=device)
    pull = PullSelections(
        given.context, SHAPE, hidden, y.dtype, num_topk, len(biases), is_aligned, is_grouped, num_topk, PULL_END
    )
    pull(out, sources, biases, weights, send_head)
    require_rewound(given.context)
    given.context.table[exchange.TABLE_CAPACITIES] = capacities
    assert torch.equal(weights.view(torch.int32), torch.where(owners >= 0, words, 0)), "bit for bit"
    return out


KINDS = {
    "expanded": (True, True, True),
    "compact": (False, False, False),
    "mixed": (True, False, True),
    "reduced once": (True, True, True),
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "hidden", "num_biases"),
    [(1, 1, 1, 0), (6, 3, 7, 1), (40, 8, 16, 2), (5, 8, 300, 0), (20, 12, 24, 1)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_sums_are_those_of_the_reference(
    device: str, kind: str, num_tokens: int, num_topk: int, hidden: int, num_biases: int, dtype: torch.dtype
) -> None:
    """Rank 0's tokens, of which some select nothing; the ranks beside it send, too. Bit for bit."""
    is_grouped = kind != "reduced once"
    ids = draw_ids((num_tokens, 3, 5), num_topk, 6, torch.int64)
    y = draw((num_tokens, num_topk, hidden), dtype, device)
    biases = [draw((num_tokens, hidden), dtype, device, seed) for seed in range(1, 1 + num_biases)]
    given = Combine(World(ids, 2, 4), y, KINDS[kind], device)
    expected = reference.elastic_combine(y, ids[0], 6, 3, biases, is_summed_by_rank=is_grouped)
    require_same(combined(given, biases, is_grouped), expected)


@pytest.mark.parametrize("is_grouped", [True, False])
def test_a_token_without_rows_gets_its_bias(device: str, is_grouped: bool) -> None:
    ids = torch.full((1, 3), -1)
    y = torch.full((1, 3, 2), torch.nan, device=device)
    given = Combine(World([ids], 1), y, (True,), device)
    require_same(combined(given, [], is_grouped), torch.zeros(1, 2, device=device))
    bias = torch.tensor([[-0.0, 1.5]], device=device)
    require_same(combined(given, [bias], is_grouped), bias)


@pytest.mark.parametrize("is_grouped", [True, False])
def test_zeros_keep_their_sign(device: str, is_grouped: bool) -> None:
    """A group of one, then one of two, all -0.0: so is their sum with a bias of -0.0. Without it, sums begin at 0."""
    ids = torch.tensor([[0, 1, 0]])
    y, bias = torch.full((1, 3, 1), -0.0, device=device), torch.full((1, 1), -0.0, device=device)
    given = Combine(World([ids, torch.full((1, 3), -1)], 1), y, (True, True), device)
    require_same(combined(given, [bias], is_grouped), bias)
    require_same(combined(given, [], is_grouped), torch.zeros(1, 1, device=device))


@pytest.mark.parametrize("is_fold", [False, True])
def test_what_is_held_or_failed_sums_nothing(device: str, is_fold: bool) -> None:
    """Folding is no part of the exchange that is held."""
    context = make_context(0, 1, device)
    x, out = torch.ones(1, 4, device=device), torch.zeros(1, 4, device=device)
    pull = PullSelections(context, SHAPE, 4, out.dtype, 1, end=None if is_fold else PULL_END)
    sources = torch.tensor([[x.data_ptr()]], device=device)
    hold(context)
    pull(out, sources)
    assert out.tolist() == [[float(is_fold)] * 4]
    context.state[STATE_HELD] = 0
    out.zero_()
    fail(context)
    pull(out, sources)
    assert out.tolist() == [[0.0] * 4]


# Handshakes ----------------------------------------------------------------------------------------------------------


class Select:
    """The handshake of a dispatch of selections of one rank, with counts."""

    def __init__(
        self,
        world: World,
        rank: int,
        device: str,
        post: Post,
        expanded_rows: int,
        is_expanded: bool = True,
        alignment: int | None = None,
        receives: bool = True,
    ):
        self.terms, self.post = Terms(ANNOUNCED, 0, SAME, world.num_local), post
        self.form = HandshakeForm(has_counts=True, has_prefix=True, receives=receives)
        self.expanded_rows, self.num_topk = expanded_rows, world.num_topk
        self.agreed = (world.alignment if alignment is None else alignment, is_expanded)
        ids, num_ranks, num_experts = world.ids[rank].to(device), world.num_ranks, world.num_experts
        self.prefix = filled((num_ranks, num_ranks), device)
        self.stats = filled((world.num_local,), device)
        mask = torch.zeros(len(ids), num_ranks, dtype=torch.bool, device=device)
        numbers, per_rank = filled(mask.shape, device), filled((num_ranks,), device)
        num_tiles = max(1, selections.num_tiles(len(mask), world.num_topk))
        tiles = filled((2 * num_tiles + 1, num_experts + num_ranks), device)
        per_expert, first = (filled((num_experts,), device) for _ in range(2))
        experts = filled((2 * world.num_local + 1,), device)
        self.selected = Selected(ids, mask, numbers, per_rank, per_expert, tiles, first, experts, self.stats)

    def __call__(self, context: Context) -> None:
        self.stats.fill_(100)  # `Boards.handshake` comes twice
        ids = self.selected.topk_idx.dtype
        step = SelectionHandshake(context, self.terms, self.form, *self.agreed, self.num_topk, ids)
        step(self.post, self.expanded_rows, self.prefix, self.selected)
        synchronize(context)


class Follow:
    """A handshake without counts: along a handle, or the second one of a call."""

    def __init__(
        self,
        post: Post,
        expanded_rows: int,
        prefix: torch.Tensor,
        is_new: bool,
        alignment: int = 4,
        is_expanded: bool = True,
    ):
        self.post, self.expanded_rows, self.prefix = post, expanded_rows, prefix
        self.form, self.agreed = HandshakeForm(has_prefix=is_new, is_new=is_new), (alignment, is_expanded, 3)

    def __call__(self, context: Context) -> None:
        context.state[STATE_HELD] = 1  # as the call before, or the first handshake, may have left it
        step = SelectionHandshake(context, Terms(OFFERED, 1, SAME), self.form, *self.agreed)
        step(self.post, self.expanded_rows, self.prefix)
        synchronize(context)


def counts_world(counts: list[list[int]], num_local: int, alignment: int) -> World:
    """Ranks that select each expert so often, one for each token."""
    ids = [[[expert] for expert, count in enumerate(of_rank) for _ in range(count)] for of_rank in counts]
    return World([torch.tensor(one) for one in ids], num_local, alignment)


def selecting(world: World, device: str, expanded: Sequence[int], ticket: int = 0, **said: Any) -> list[Select]:
    """The handshakes of all ranks, with memory for all compact rows."""
    return [
        Select(world, rank, device, Post(num_rows=1000, num_tokens=10 + rank, ticket=ticket), rows, **said)
        for rank, rows in enumerate(expanded)
    ]


def test_handshake_worked_example(device: str) -> None:
    """Two ranks with an expert each, counts [1, 2] and [3, 0], alignment 4: both results have 4 rows."""
    boards = Boards(2, device)
    calls = selecting(counts_world([[1, 2], [3, 0]], 1, 4), device, (4, 4), ticket=5)
    boards.handshake(*calls)
    assert calls[1].selected.first.tolist() == [1, 2]
    assert calls[0].selected.first.tolist() == [0, 0]
    for rank, call in enumerate(calls):
        assert boards.record(rank) is None
        host = boards.contexts[rank].host.tolist()
        assert host[STATE_EPOCH] == 5
        assert host[STATE_WORDS + 4 : STATE_WORDS + 6] == [4, 4], "rows of both results"
        assert host[STATE_HELD] == boards.contexts[rank].state[STATE_HELD] == 0, "they fit"
        assert call.selected.experts.tolist() == [[4, 4, 11], [2, 2, 11]][rank], "count, end, the largest M"


@pytest.mark.parametrize("is_expanded", [True, False])
def test_ends_of_the_contract(device: str, is_expanded: bool) -> None:
    """Counts [5, 0, 2] with alignment 4."""
    boards = Boards(1, device)
    (call,) = selecting(counts_world([[5, 0, 2]], 3, 4), device, (12,), is_expanded=is_expanded)
    boards.handshake(call)
    assert boards.record(0) is None
    assert call.selected.experts.tolist() == [5, 0, 2, *([5, 8, 10] if is_expanded else [8, 8, 12]), 10]
    assert call.selected.first.tolist() == [0, 8, 8]


@pytest.mark.parametrize("is_expanded", [True, False])
@pytest.mark.parametrize(
    ("num_tokens", "num_topk", "num_local", "alignment"),
    [((40, 0, 7), 12, 3, 8), ((5, 9), 3, 1, 1), ((300,), 8, 5, 128), ((9, 30), 3, 20, 2)],
)
def test_handshakes_find_what_loops_find(
    device: str, num_tokens: tuple[int, ...], num_topk: int, num_local: int, alignment: int, is_expanded: bool
) -> None:
    """Call after call, by both halves of the boards."""
    world = World(draw_ids(num_tokens, num_topk, num_local * len(num_tokens), torch.int64), num_local, alignment)
    boards = Boards(world.num_ranks, device)
    calls = selecting(world, device, world.num_expanded, is_expanded=is_expanded)
    for _ in range(3):
        boards.handshake(*calls)
        for rank, call in enumerate(calls):
            assert boards.record(rank) is None
            context, counts, ends = boards.contexts[rank], world.counts[rank], world.ends[rank]
            assert call.selected.first.tolist() == world.first[rank]
            aligned = torch.tensor(counts).add(alignment - 1).div(alignment, rounding_mode="floor").mul(alignment)
            ends = ends if is_expanded else aligned.cumsum(0).tolist()
            assert call.selected.experts.tolist() == [*counts, *ends, 9 + world.num_ranks]
            assert call.stats.tolist() == [100 + count for count in counts]
            assert call.prefix.tolist() == world.sent().cumsum(0).tolist()
            if not is_expanded:
                assert torch.equal(call.selected.numbers, world.numbers(rank, device))
            assert torch.equal(call.selected.mask, world.mask(rank).to(device))
            assert call.selected.per_expert.tolist() == world.per_expert(rank)
            assert context.table[TABLE_STARTS].tolist() == world.starts(rank)
            assert context.table[TABLE_EXPANDED].tolist() == world.num_expanded
            assert context.state[STATE_HELD] == 0


def test_counts_stay_while_a_peer_is_a_call_ahead(device: str) -> None:
    """Rank 0 has said what it selects in the next call before rank 1 has read what it selects in this one."""
    world = counts_world([[1, 2], [3, 0]], 1, 4)
    boards = Boards(2, device)
    calls = selecting(world, device, (99, 99))
    boards.handshake(*calls)
    Select(counts_world([[7, 7], [3, 0]], 1, 4), 0, device, Post(), 99, receives=False)(boards.contexts[0])
    boards.contexts[1].state[STATE_EPOCH] = 0
    calls[1](boards.contexts[1])
    assert boards.record(1) is None
    assert calls[1].selected.first.tolist() == [1, 2]
    assert calls[1].selected.experts.tolist() == [2, 2, 11]


def test_handshakes_without_stats(device: str) -> None:
    boards = Boards(1, device)
    (call,) = selecting(counts_world([[2, 1]], 2, 1), device, (3,))
    call.selected = call.selected._replace(stats=None)
    boards.handshake(call)
    assert boards.record(0) is None
    assert call.stats.tolist() == [100, 100]
    assert boards.contexts[0].state[STATE_EPOCH] == 1, "what stands for the stats is not written"
    assert call.selected.experts.tolist() == [2, 1, 2, 3, 10]


# Rank 1 needs 4 rows, and takes fewer expanded ones, or makes fewer of compact ones, or has not offered any.
@pytest.mark.parametrize("offered", [3, -3, 0])
def test_a_call_whose_expanded_rows_do_not_fit_is_held(device: str, offered: int) -> None:
    """If the host waits for the counts: on all ranks."""
    boards = Boards(2, device)
    boards.handshake(*selecting(counts_world([[1, 2], [3, 0]], 1, 4), device, (4, offered), ticket=5))
    for rank, context in enumerate(boards.contexts):
        assert boards.record(rank) is None
        assert context.state[STATE_HELD] == 1
        assert context.host[STATE_HELD] == 1, "the host is told that the rows do not fit"
        assert context.host[STATE_WORDS + 4 : STATE_WORDS + 6].tolist() == [4, 4], "and how many there are"
        assert context.table[TABLE_EXPANDED].tolist() == [4, offered]


@pytest.mark.parametrize("offered", [3, -3, 0])
def test_expanded_rows_that_do_not_fit_fail_on_all_ranks(device: str, offered: int) -> None:
    boards = Boards(2, device)
    boards.handshake(*selecting(counts_world([[1, 2], [3, 0]], 1, 4), device, (4, offered)))
    record = [exchange.EXPANDED_OVERFLOW, 1, 0, 1, 4, abs(offered), 0]
    assert boards.record(0) == record, "rank 1 gets 4 rows"
    assert boards.record(1) == record, "the first cause is passed on"
    assert boards.contexts[0].state[STATE_HELD] == 1, "no row moves"


@pytest.mark.parametrize("offered", [4, -4])
def test_expanded_rows_that_just_fit(device: str, offered: int) -> None:
    boards = Boards(2, device)
    boards.handshake(*selecting(counts_world([[1, 2], [3, 0]], 1, 4), device, (4, offered)))
    assert [boards.record(rank) for rank in range(2)] == [None, None]
    assert [one.state[STATE_HELD].item() for one in boards.contexts] == [0, 0]


def test_compact_results_need_no_expanded_rows(device: str) -> None:
    boards = Boards(2, device)
    boards.handshake(*selecting(counts_world([[1, 2], [3, 0]], 1, 4), device, (0, 0), is_expanded=False))
    assert [boards.record(rank) for rank in range(2)] == [None, None]


def test_compact_rows_that_do_not_fit_are_named_as_such(device: str) -> None:
    boards = Boards(2, device)
    calls = selecting(counts_world([[1, 2], [3, 0]], 1, 4), device, (4, 4))
    calls[0].post = calls[0].post._replace(num_rows=3)
    boards.handshake(*calls)
    assert boards.record(0) == [exchange.OVERFLOW, 1, 0, 0, 4, 3, 0]


@pytest.mark.parametrize("is_new", [True, False])
def test_offers_of_handshakes_without_counts(device: str, is_new: bool) -> None:
    """Of a cached dispatch or a combine, whose slots are whole; or the second ones of a call, which keeps its slots."""
    boards = Boards(2, device)
    if not is_new:
        boards.handshake(*selecting(counts_world([[1, 2], [3, 0]], 1, 4), device, (0, 0), ticket=1))
    prefix = int32([[1, 2], [4, 2]], device)
    boards.handshake(
        Follow(Post(7, bases=all_bases(64)), 12, prefix, is_new),
        Follow(Post(9, bases=all_bases(128)), -16, prefix, is_new),
    )
    for rank, one in enumerate(boards.contexts):
        assert boards.record(rank) is None
        assert one.table[TABLE_EXPANDED].tolist() == [12, -16]
        assert one.table[exchange.TABLE_CAPACITIES].tolist() == [7, 9]
        assert one.table[0].tolist() == [boards.boards[0].data_ptr() + 64, boards.boards[1].data_ptr() + 128]
        assert one.table[TABLE_STARTS].tolist() == ([1, 2] if rank and not is_new else [0, 0])
        assert one.state[STATE_HELD] == 0


@pytest.mark.parametrize("said", [{"alignment": 8}, {"is_expanded": False}])
@pytest.mark.parametrize("has_counts", [True, False])
def test_ranks_that_differ_in_alignment_are_named(device: str, has_counts: bool, said: dict[str, Any]) -> None:
    world = counts_world([[1, 2, 0], [3, 0, 1], [1, 1, 1]], 1, 4)
    boards = Boards(3, device)
    if has_counts:
        calls: list[Any] = selecting(world, device, (99, 99, 99))
        calls[1] = selecting(world, device, (99, 99, 99), **said)[1]
    else:
        prefix = int32([[1, 2, 0], [4, 2, 1], [5, 3, 2]], device)
        calls = [Follow(Post(9), 99, prefix, True, **(said if rank == 1 else {})) for rank in range(3)]
    boards.handshake(*calls)
    operation = 0 if has_counts else 1
    assert boards.record(0) == [exchange.DISAGREE, 1, operation, 0b010, 0, 0, 0]
    assert boards.record(2) == boards.record(0), "the first cause is passed on"
