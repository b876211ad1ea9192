"""Low-latency kernels with remote ranks: what is carried, by a stand-in for NVSHMEM, is received as from a local
one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from heaps import Heaps
from phases import receive_combine, receive_dispatch, send_combine, send_dispatch
from test_low_latency_kernels import (
    BF16,
    FP8,
    OPERATION,
    ROUNDED,
    SHORT_NS,
    UE8M0,
    UNTOUCHED,
    Given,
    Group,
    check_packed,
    empty_packed,
    inputs,
    logfmt_rows,
    oracle,
)
from windows import synchronize

from deep_ep.engine.low_latency import geometry as sizes_of_copies
from deep_ep.engine.low_latency.cuda.copies import Copier, Copies, RemoteRanks
from deep_ep.engine.low_latency.geometry import Geometry, RowFormat, SetPlan
from deep_ep.engine.low_latency.slots import zero_copy_view
from deep_ep.kernels import _triton, exchange
from deep_ep.kernels.low_latency import dispatch, remote_copy, words
from deep_ep.kernels.low_latency.words import KernelCall, WaitOptions
from deep_ep.topology import Topology

pytestmark = pytest.mark.skipif(not _triton.INTERPRETED, reason="the stand-in is for Triton's interpreter")


class RemoteGroup(Group):
    """Ranks of several nodes, all in this process: those of another node are reached by the stand-in alone.

    Args:
        geometry: Of the calls.
        num_nodes: How many.
        monkeypatch: For the stand-in.
        times: How many times the hint there is.
        is_small: A set of a copy is smaller than a region of a memory, as it is where buffers are large.
    """

    def __init__(
        self,
        geometry: Geometry,
        num_nodes: int,
        monkeypatch: pytest.MonkeyPatch,
        times: int = 1,
        is_small: bool = True,
    ):
        super().__init__(geometry, "cpu", times)
        if is_small:
            monkeypatch.setattr(sizes_of_copies, "_LEAST_COPY_BYTES", 0)
        ranks, local = range(geometry.num_ranks), geometry.num_ranks // num_nodes
        sizes, max_experts = (self.board_bytes, self.num_bytes), geometry.num_experts + 3
        topologies = [Topology(rank, geometry.num_ranks, local) for rank in ranks]
        self.copies = [Copies(RemoteRanks(one, ranks, lambda: None), *sizes, max_experts) for one in topologies]
        self.memory = [torch.full((one.num_bytes,), UNTOUCHED, dtype=torch.uint8) for one in self.copies]
        self.heaps = Heaps(self.memory)
        self.heaps.stand_in(monkeypatch, remote_copy)
        bases = [one.data_ptr() for one in self.memory]
        self.remote_boards = [torch.zeros_like(board) for board in self.boards.boards]
        for rank, copies in enumerate(self.copies):
            self.memory[rank][: self.board_bytes] = 0
            windows = torch.tensor(copies.addresses(bases[rank], bases))
            for one in ranks:
                if one // local != rank // local:
                    self.copy_of(rank, one)[: self.board_bytes] = 0
            own_boards = self.boards.contexts[rank].own_boards.clone()
            is_remote = torch.arange(geometry.num_ranks) // local != rank // local
            own_boards[is_remote] = self.remote_boards[rank].data_ptr()
            buffer = replace(self.boards.contexts[rank], num_nodes=num_nodes, own_boards=own_boards)
            self.contexts[rank] = replace(self.contexts[rank], buffer=buffer, windows=windows)
            copies.start(self.contexts[rank], bases[rank])

    def copy_of(self, rank: int, remote: int) -> torch.Tensor:
        """What a rank has of a remote one, to the end of its memory."""
        base = self.memory[rank].data_ptr()
        start = self.copies[rank].addresses(base, [base] * len(self.copies))[remote] - base
        return self.memory[rank][start:]

    def plan(self, needed_bytes: int) -> SetPlan:
        set_bytes = sizes_of_copies.copy_bytes(self.num_bytes, self.geometry.num_ranks) // 4
        return super().plan(needed_bytes)._replace(copy_set_bytes=set_bytes)

    def call(self, needed_bytes: int, agreement: tuple[int, int] = (5, 6)) -> KernelCall:
        copied = self.plan(needed_bytes).copy_set_bytes
        return replace(super().call(needed_bytes, agreement), copy_set_bytes=copied)

    def copied(self, rank: int, copier: Copier, *args: torch.Tensor | int) -> None:
        self.heaps.pe = rank
        copier.launch(*args)


class Case(NamedTuple):
    geometry: Geometry
    num_nodes: int
    form: RowFormat
    num_tokens: tuple[int, ...]
    masked: tuple[int, ...] = ()  # by rank 0
    idx_dtype: torch.dtype = torch.int64
    is_small: bool = True


CASES = {
    "two ranks": Case(Geometry(2, 4, 4, 24, 3), 2, BF16, (4, 2)),
    "odd bytes": Case(Geometry(2, 2, 4, 7, 2), 2, FP8, (3, 4), idx_dtype=torch.int32, is_small=False),
    "two nodes of two": Case(Geometry(4, 8, 3, 136, 4), 2, FP8, (3, 2, 0, 3)),
    "three nodes of two, rounded": Case(Geometry(6, 6, 3, 260, 3), 3, ROUNDED, (3, 1, 2, 3, 0, 3)),
    "exponents": Case(Geometry(4, 4, 3, 640, 3), 4, UE8M0, (3, 2, 3, 1)),
    "masked": Case(Geometry(4, 8, 3, 64, 3), 2, BF16, (3, 3, 2, 3), masked=(1, 3)),
    "many columns": Case(Geometry(3, 3, 2, 8, 32), 3, BF16, (2, 2, 1), is_small=False),
    "nobody": Case(Geometry(2, 4, 2, 8, 2), 2, BF16, (0, 0)),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_received_is_what_the_oracle_says(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    case = CASES[name]
    geometry, num_ranks = case.geometry, case.geometry.num_ranks
    group = RemoteGroup(geometry, case.num_nodes, monkeypatch, is_small=case.is_small)
    call, sizes = group.dispatch(case.form)
    assert (call.copy_set_bytes < call.region_bytes) == case.is_small
    every = [inputs(rank, geometry, case.num_tokens[rank], case.idx_dtype) for rank in range(num_ranks)]
    for rank in case.masked:
        group.contexts[0].mask[rank] = 1
    publish(group, call, sizes, every)
    want = oracle(every, geometry, case.form, [set(case.masked), *[set[int]()] * (num_ranks - 1)])
    for rank, context in enumerate(group.contexts):
        packed = empty_packed(geometry, case.form)
        if not case.masked or rank == 0:  # a masked remote rank is sent nothing, and would wait up to its limit
            words.wait_for(context, call, 0, WaitOptions())
            assert group.boards.record(rank) is None
            receive_dispatch(context, call, sizes, 0, *packed, None)
            check_packed(packed, want[rank])


def publish(group: RemoteGroup, call: KernelCall, sizes: dispatch.DispatchSizes, every: list[Given]) -> None:
    for rank, (context, one) in enumerate(zip(group.contexts, every, strict=True)):
        send_dispatch(context, call, sizes, one.x, one.topk_idx)
        group.copied(rank, group.copies[rank].for_dispatch(call, sizes), context.state)


def test_a_receive_of_an_earlier_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eight calls are sent, the last four are fetched, the newest first: copies have as many sets."""
    geometry = Geometry(2, 4, 3, 16, 2)
    group = RemoteGroup(geometry, 2, monkeypatch, times=4)
    call, sizes = group.dispatch(BF16)
    assert not call.takes_slot
    rounds = [[inputs(rank, geometry, 3, seed=seed) for rank in range(2)] for seed in range(8)]
    for every in rounds:
        publish(group, call, sizes, every)
    for age in range(4):
        want = oracle(rounds[7 - age], geometry, BF16)
        for rank, context in enumerate(group.contexts):
            packed = empty_packed(geometry, BF16)
            receive_dispatch(context, call, sizes, age, *packed, None)
            check_packed(packed, want[rank])


@pytest.mark.parametrize("how", ["plain", "zero-copy", "logfmt"])
@pytest.mark.parametrize(
    ("geometry", "num_nodes"),
    [(Geometry(2, 4, 4, 7, 3), 2), (Geometry(4, 8, 3, 130, 4), 2), (Geometry(3, 3, 3, 600, 2), 3)],
    ids=["2x1", "2x2", "3x1"],
)
def test_sums_are_to_the_bit_those_of_one_node(
    monkeypatch: pytest.MonkeyPatch, geometry: Geometry, num_nodes: int, how: str
) -> None:
    """Two calls, so that two sets are used. The kernels of one node are compared with their twins elsewhere."""
    ranks = range(geometry.num_ranks)
    local, remote = Group(geometry, "cpu"), RemoteGroup(geometry, num_nodes, monkeypatch)
    every = [inputs(rank, geometry, geometry.max_tokens - rank % 2) for rank in ranks]
    want = oracle(every, geometry, BF16)
    some = logfmt_rows(geometry.hidden)
    for number in range(2):
        results = []
        for group in (local, remote):
            call, sizes = group.combine(how == "logfmt")
            earlier = [torch.full_like(one.topk_idx, -1, dtype=torch.int32) for one in every]
            for rank, one in enumerate(every):
                num_rows = geometry.num_local_experts * geometry.num_rows
                x = some[(torch.arange(num_rows) + rank + number) % 10].view(
                    geometry.num_local_experts, -1, some.size(1)
                )
                slot = None
                if how == "zero-copy":
                    slot = (rank + number) % 2
                    first = group.board_bytes + group.plan(geometry.combine_bytes).slot_offset(slot)
                    x = zero_copy_view(group.memory[rank][first : first + geometry.combine_bytes], geometry).copy_(x)
                ranges = want[rank].layout_range
                send_combine(
                    group.contexts[rank], call, sizes, x.contiguous(), ranges, one.topk_idx, earlier[rank], slot
                )
                if isinstance(group, RemoteGroup):
                    copier = group.copies[rank].for_combine(call, sizes)
                    group.copied(rank, copier, ranges)
            sums = []
            for rank, one in enumerate(every):
                words.wait_for(group.contexts[rank], call, 0, WaitOptions())
                assert group.boards.record(rank) is None
                out = torch.full((one.x.size(0), geometry.hidden), 7.0).bfloat16()
                receive_combine(group.contexts[rank], sizes, 0, out, one.topk_idx, one.topk_weights, earlier[rank])
                sums.append(out)
            results.append(sums)
        for one, other in zip(*results, strict=True):
            assert torch.equal(one.view(torch.int16), other.view(torch.int16))


# Waits ---------------------------------------------------------------------------------------------------------------

WAITS = Geometry(3, 3, 2, 8, 1)


def barrier(group: RemoteGroup, ranks: tuple[int, ...], agreement: tuple[int, int] = (5, 6)) -> KernelCall:
    call = group.call(16, agreement)
    for rank in ranks:
        words.signal(group.contexts[rank], call)
        group.copied(rank, group.copies[rank].for_barrier(call), group.contexts[rank].state)
    return call


def test_barriers_of_three_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    group = RemoteGroup(WAITS, 3, monkeypatch)
    for number in range(1, 11):
        call = barrier(group, (0, 1, 2))
        for rank, context in enumerate(group.contexts):
            assert group.sent(rank) == [number] * 3
            words.wait_for(context, call, 0, WaitOptions())
            assert group.boards.record(rank) is None


def test_a_remote_rank_that_did_not_carry_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    group = RemoteGroup(WAITS, 3, monkeypatch)
    call = barrier(group, (0, 2))
    words.signal(group.contexts[1], call)
    words.wait_for(group.patient(0, SHORT_NS), call, 0, WaitOptions())
    assert group.boards.record(0) == [exchange.TIMEOUT, 1, OPERATION, 0b010, 0, 0, 0]


def test_a_failure_is_heard_where_remote_ranks_write_it(monkeypatch: pytest.MonkeyPatch) -> None:
    group = RemoteGroup(WAITS, 3, monkeypatch)
    call = barrier(group, (0, 2))
    line = 8 * (3 + 1)
    group.remote_boards[0][line : line + 8] = torch.tensor([1, exchange.HOST, 7, 3, 0, 0, 0, 1])
    words.wait_for(group.patient(0, 3600 * 10**9), call, 0, WaitOptions(None, True))
    assert group.boards.record(0) == [exchange.HOST, 7, 3, 0, 0, 0, 1]


@pytest.mark.parametrize("has_come", [True, False])
def test_what_remote_ranks_said_is_told_if_it_has_come(monkeypatch: pytest.MonkeyPatch, has_come: bool) -> None:
    """Rank 1 has noticed that rank 2 differs, and rank 0 hears of it before, or after, rank 2's own words."""
    group = RemoteGroup(WAITS, 3, monkeypatch)
    call = barrier(group, (0, 1))
    if has_come:
        barrier(group, (2,), (5, 7))
    line = 8 * (3 + 1)
    group.remote_boards[0][line : line + 8] = torch.tensor([1, exchange.DISAGREE, 1, OPERATION, 0b100, 0, 0, 1])
    words.wait_for(group.patient(0, 3600 * 10**9), call, 0, WaitOptions())
    synchronize(group.boards.contexts[0])
    assert group.boards.record(0) == [exchange.DISAGREE, 1, OPERATION, 0b100, 0, 0, 1]
    assert group.contexts[0].seen.tolist() == [[5, 6], [5, 6], [5, 7] if has_come else [5, 6]]
