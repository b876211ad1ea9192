"""Low-latency kernels against their twins: ranks of one process send, wait and receive one after the other."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from phases import receive_combine, receive_dispatch, send_combine, send_dispatch
from windows import Boards, fail, synchronize, with_subnormals

from deep_ep import logfmt, quant, reference
from deep_ep.engine.low_latency.geometry import Geometry, RowFormat, SetPlan
from deep_ep.engine.low_latency.slots import zero_copy_view
from deep_ep.kernels import _triton, exchange
from deep_ep.kernels.low_latency import combine, dispatch, words
from deep_ep.kernels.low_latency.words import NUM_KEPT, POST_WORDS, KernelCall, LowLatencyContext, WaitOptions

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

UNTOUCHED = 0x5A
OPERATION = 9
SHORT_NS = 1000
BF16, FP8 = RowFormat(use_fp8=False), RowFormat()
ROUNDED, UE8M0 = RowFormat(round_scale=True), RowFormat(round_scale=True, use_ue8m0=True)
NAN, INF = float("nan"), float("inf")


class Group:
    """The low-latency memory of several ranks, all in this process. Sets begin as garbage.

    Args:
        geometry: Of the calls; its hint says how much memory there is.
        device: Where it is.
    """

    def __init__(self, geometry: Geometry, device: str, times: int = 1):
        num_ranks, max_experts = geometry.num_ranks, geometry.num_experts + 3
        self.geometry, self.num_bytes = geometry, times * geometry.hint()
        self.boards = Boards(num_ranks, device)
        self.board_bytes = LowLatencyContext.board_bytes(num_ranks, max_experts)
        size = self.board_bytes + self.num_bytes
        self.memory = [torch.full((size,), UNTOUCHED, dtype=torch.uint8) for _ in range(num_ranks)]
        for one in self.memory:
            one[: self.board_bytes] = 0
        addresses = torch.tensor([one.data_ptr() for one in self.memory])
        self.contexts = [
            LowLatencyContext(
                buffer=buffer,
                windows=addresses,
                state=torch.zeros(LowLatencyContext.num_state_words(num_ranks), dtype=torch.int64),
                mask=torch.zeros(num_ranks, dtype=torch.int32),
                seen=torch.zeros(num_ranks, 2, dtype=torch.int64),
                host=torch.zeros(num_ranks + 1, dtype=torch.int64, device="cpu", pin_memory=device == "cuda"),
                max_experts=max_experts,
            )
            for buffer in self.boards.contexts
        ]

    # What is sent ----------------------------------------------------------------------------------------------------

    def plan(self, needed_bytes: int) -> SetPlan:
        plan = SetPlan(self.num_bytes // 4 // 16 * 16, True)
        return plan._replace(takes_slot=needed_bytes > plan.set_bytes)

    def call(self, needed_bytes: int, agreement: tuple[int, int] = (5, 6)) -> KernelCall:
        plan = self.plan(needed_bytes)
        return KernelCall(agreement, plan.region_bytes, plan.set_bytes, OPERATION, plan.takes_slot)

    def dispatch(
        self, form: RowFormat, agreement: tuple[int, int] = (5, 6)
    ) -> tuple[KernelCall, dispatch.DispatchSizes]:
        g = self.geometry
        row = (g.row_bytes(form), g.scales_offset, g.expert_slots_offset(form))
        sizes = dispatch.DispatchSizes(
            g.hidden, g.num_topk, g.num_experts, g.max_tokens, *row, form.use_fp8, form.round_scale
        )
        return self.call(g.dispatch_bytes(form), agreement), sizes

    def combine(self, use_logfmt: bool = False) -> tuple[KernelCall, combine.CombineSizes]:
        g = self.geometry
        sizes = combine.CombineSizes(
            g.hidden, g.num_topk, g.num_experts, g.max_tokens, g.slot_bytes, g.ranges_offset, use_logfmt
        )
        return self.call(g.combine_bytes), sizes

    def patient(self, rank: int, limit_ns: int) -> LowLatencyContext:
        return replace(self.contexts[rank], buffer=replace(self.contexts[rank].buffer, limit_ns=limit_ns))

    # What lies where -------------------------------------------------------------------------------------------------

    def sent(self, rank: int) -> list[int]:
        """The last call of each rank, as this rank has been told."""
        return self.words(rank)[: 8 * self.geometry.num_ranks : 8].tolist()

    def words(self, rank: int) -> torch.Tensor:
        return self.memory[rank][: self.board_bytes].view(torch.int64)

    def post(self, rank: int, number: int) -> list[int]:
        return self.whole_post(rank, number)[:3].tolist()

    def whole_post(self, rank: int, number: int) -> torch.Tensor:
        first = 8 * self.geometry.num_ranks + number % NUM_KEPT * POST_WORDS
        return self.words(rank)[first : first + POST_WORDS]

    def table(self, rank: int, number: int) -> torch.Tensor:
        capacity = self.contexts[rank].max_experts
        first = 8 * self.geometry.num_ranks + NUM_KEPT * POST_WORDS + number % NUM_KEPT * capacity
        return self.words(rank)[first : first + self.geometry.num_experts]

    def set_of(self, rank: int, number: int, num_bytes: int) -> torch.Tensor:
        assert self.whole_post(rank, number)[3] == number
        first = int(self.whole_post(rank, number)[4])  # where its rows begin
        plan = self.plan(num_bytes)
        expected = plan.slot_offset((number - 1) % 3) if plan.takes_slot else plan.offset_of_set(number)
        assert first == self.board_bytes + expected
        return self.memory[rank][first : first + num_bytes]

    def rows(self, rank: int, number: int, form: RowFormat) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Of a dispatch's set: rows [M, row bytes], scales [M, G], places [M, K]."""
        g = self.geometry
        whole, end = self.set_of(rank, number, g.dispatch_bytes(form)), g.expert_slots_offset(form)
        lines = whole[:end].view(g.max_tokens, -1)
        scales = lines[:, g.scales_offset : g.scales_offset + 4 * g.num_groups] if form.use_fp8 else lines[:, :0]
        return lines, scales.contiguous().view(torch.float32), whole[end:].view(torch.int32).view(g.max_tokens, -1)

    def sync(self) -> None:
        synchronize(self.boards.contexts[0])


class Given(NamedTuple):
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


def inputs(
    rank: int, geometry: Geometry, num_tokens: int, idx_dtype: torch.dtype = torch.int64, seed: int = 0
) -> Given:
    """Some ids negative, some too large, some twice in a token. Sums of small integers in FP32 are exact."""
    generator = torch.Generator().manual_seed(100 * seed + rank)
    x = torch.randint(-4, 5, (num_tokens, geometry.hidden), generator=generator).bfloat16()
    size = (num_tokens, geometry.num_topk)
    ids = torch.randint(-2, geometry.num_experts + 2, size, generator=generator).to(idx_dtype)
    return Given(x, ids, torch.randint(-8, 9, size, generator=generator).float() / 8)


def expected_places(topk_idx: torch.Tensor, num_experts: int) -> tuple[list[list[int]], list[int]]:
    counts, buffer = [0] * num_experts, []
    for ids in topk_idx.tolist():
        row = []
        for k, expert in enumerate(ids):
            is_chosen = 0 <= expert < num_experts and expert not in ids[:k]
            row.append(expert << 16 | counts[expert] if is_chosen else -1)
        for expert in {one for one in ids if 0 <= one < num_experts}:
            counts[expert] += 1
        buffer.append(row)
    return buffer, counts


def raw(tensor: torch.Tensor) -> torch.Tensor:
    """So that bits are compared."""
    return tensor.contiguous().view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.element_size()])


def same(got: torch.Tensor, expected: torch.Tensor) -> bool:
    """Bit for bit; one NaN is as good as another."""
    assert got.dtype == expected.dtype
    if not got.is_floating_point():
        return torch.equal(got, expected)
    is_nan = got.float().isnan()
    return torch.equal(is_nan, expected.float().isnan()) and torch.equal(raw(got)[~is_nan], raw(expected)[~is_nan])


# Dispatch, send ------------------------------------------------------------------------------------------------------


def test_dispatch_send_worked_example(device: str) -> None:
    group = Group(Geometry(1, 4, 3, 8, 2), device)
    call, sizes = group.dispatch(BF16)
    ids = torch.tensor([[3, 1], [1, -1], [3, 3]])
    x = torch.arange(24).view(3, 8).bfloat16()
    send_dispatch(group.contexts[0], call, sizes, x, ids)
    lines, _, buffer = group.rows(0, 1, BF16)
    assert buffer.tolist() == [[3 << 16, 1 << 16], [1 << 16 | 1, -1], [3 << 16 | 1, -1]]
    assert group.table(0, 1).tolist() == [0, 2, 0, 2]
    assert torch.equal(lines[:, :16].contiguous().view(torch.bfloat16), x)
    assert group.post(0, 1) == [5, 6, 3]
    assert group.sent(0) == [1]


SELECTIONS = {
    "few": (Geometry(1, 4, 6, 4, 3), 5, torch.int64),
    "one column": (Geometry(1, 3, 20, 4, 1), 20, torch.int32),
    "more tokens than a tile": (Geometry(1, 6, 80, 4, 32), 75, torch.int32),
    "nine columns": (Geometry(1, 20, 12, 4, 9), 12, torch.int64),
    "more experts than blocks": (Geometry(1, 132, 4, 4, 8), 3, torch.int64),
    "no tokens": (Geometry(1, 5, 4, 4, 2), 0, torch.int64),
}


@pytest.mark.parametrize("name", SELECTIONS)
def test_places_and_counts(device: str, name: str) -> None:
    geometry, num_tokens, idx_dtype = SELECTIONS[name]
    if name == "more tokens than a tile":
        assert dispatch.tile_of(32, num_tokens)[1] < num_tokens
    group = Group(geometry, device, times=3)
    given = inputs(0, geometry, num_tokens, idx_dtype)
    send_dispatch(group.contexts[0], *group.dispatch(BF16), given.x, given.topk_idx)
    buffer, counts = expected_places(given.topk_idx, geometry.num_experts)
    assert group.rows(0, 1, BF16)[2][:num_tokens].tolist() == buffer
    assert group.table(0, 1).tolist() == counts


def test_ids_beyond_32_bits_select_nothing(device: str) -> None:
    group = Group(Geometry(1, 2, 2, 4, 2), device)
    ids = torch.tensor([[1 << 32, 1], [-(1 << 40), (1 << 62) + 1]])
    send_dispatch(group.contexts[0], *group.dispatch(BF16), torch.zeros(2, 4).bfloat16(), ids)
    assert group.rows(0, 1, BF16)[2].tolist() == [[-1, 1 << 16], [-1, -1]]
    assert group.table(0, 1).tolist() == [0, 1]


@pytest.mark.parametrize("form", [BF16, FP8], ids=["bf16", "fp8"])
def test_a_send_writes_only_its_set_and_its_words(device: str, form: RowFormat) -> None:
    geometry = Geometry(2, 4, 5, 130, 3)
    group = Group(geometry, device)
    given = inputs(1, geometry, 3)
    before = [one.clone() for one in group.memory]
    send_dispatch(group.contexts[1], *group.dispatch(form), given.x, given.topk_idx)
    lines, _, buffer = group.rows(1, 1, form)
    used = geometry.scales_offset + 4 * geometry.num_groups if form.use_fp8 else 2 * geometry.hidden
    lines[:3, :used] = UNTOUCHED
    if form.use_fp8:  # between the values and the scales there may be bytes of nobody
        assert geometry.scales_offset - geometry.hidden == 2
    buffer[:3] = UNTOUCHED * 0x01010101
    group.table(1, 1).zero_()
    assert group.post(1, 1) == [5, 6, 3]
    assert [group.sent(rank) for rank in range(2)] == [[0, 1], [0, 1]]
    for rank in range(2):
        group.words(rank)[8] = 0  # what rank 1 has sent
    group.whole_post(1, 1).zero_()
    for got, then in zip(group.memory, before, strict=True):
        assert torch.equal(got, then)


def special_rows(hidden: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(hidden)
    x = torch.randn(12, hidden, generator=generator).bfloat16()
    x[1] *= 1e-3
    x[2] *= 1e30
    x[3] = 0.0
    x[4] = 1e-6  # below the floor of a group's largest magnitude
    x[5] *= torch.exp2(torch.randint(-40, 1, (hidden,), generator=generator).float()).bfloat16()  # subnormal as FP8
    x[6, 0] = NAN
    x[7, -1] = INF
    x[8, hidden // 2] = -INF
    x[9, hidden // 3], x[9, 0] = NAN, -INF
    x[10] = 3.3895e38  # the largest BF16
    x[11] = -0.0
    return x


def test_special_rows_reach_every_corner_of_the_format() -> None:
    q, _ = quant.cast_fp8(special_rows(4224)[5])
    magnitudes = q.float().abs()
    assert ((magnitudes > 0) & (magnitudes < 2.0**-6)).any(), "subnormal"
    assert (magnitudes == 0).any()
    assert (magnitudes == 448).any()


@pytest.mark.parametrize("is_aligned", [True, False])
@pytest.mark.parametrize("round_scale", [False, True])
@pytest.mark.parametrize("hidden", [1, 7, 128, 130, 520, 4224])
def test_fp8_is_to_the_bit_what_the_twin_makes(device: str, hidden: int, round_scale: bool, is_aligned: bool) -> None:
    form, geometry = RowFormat(round_scale=round_scale), Geometry(1, 2, 12, hidden, 1)
    group = Group(geometry, device)
    x = special_rows(hidden)
    if not is_aligned:
        x = torch.cat([torch.zeros(1).bfloat16(), x.flatten()])[1:].view(12, hidden)
        assert x.data_ptr() % 16 == 2
    send_dispatch(group.contexts[0], *group.dispatch(form), x, torch.zeros(12, 1, dtype=torch.int64))
    lines, scales, _ = group.rows(0, 1, form)
    q, inverse = quant.cast_fp8(x, round_scale)
    assert same(scales, inverse)
    assert same(lines[:, :hidden].contiguous().view(torch.float8_e4m3fn), q)


def test_fp8_of_every_bf16(device: str) -> None:
    """All BF16 numbers up to 448 and as many more beside a 448: rounding, ties, subnormal numbers, both signs."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    every = torch.where(every.float().abs() <= 448, every, torch.zeros_like(every))
    x = every.view(128, 512).clone()
    x[:, ::128] = 448.0  # the scale of every group is 1
    group = Group(Geometry(1, 1, 128, 512, 1), device)
    send_dispatch(group.contexts[0], *group.dispatch(FP8), x, torch.zeros(128, 1, dtype=torch.int64))
    lines, scales, _ = group.rows(0, 1, FP8)
    q, inverse = quant.cast_fp8(x)
    assert same(lines[:, :512].contiguous().view(torch.float8_e4m3fn), q)
    assert same(scales, inverse)
    assert torch.equal(q.float(), x.float().to(torch.float8_e4m3fn).float()), "the twin itself, by torch's own cast"


@pytest.mark.parametrize("hidden", [1, 7, 64, 4224])
def test_bf16_rows_are_copied_bit_for_bit(device: str, hidden: int) -> None:
    group = Group(Geometry(1, 2, 12, hidden, 1), device)
    x = special_rows(hidden)
    send_dispatch(group.contexts[0], *group.dispatch(BF16), x, torch.zeros(12, 1, dtype=torch.int64))
    lines, _, _ = group.rows(0, 1, BF16)
    assert torch.equal(lines[:, : 2 * hidden].contiguous().view(torch.int16), raw(x))


# Dispatch, receive ---------------------------------------------------------------------------------------------------


class Packed(NamedTuple):
    x: torch.Tensor
    scales: torch.Tensor | None
    count: torch.Tensor
    src_info: torch.Tensor
    layout_range: torch.Tensor


def empty_packed(geometry: Geometry, form: RowFormat) -> Packed:
    num_local, num_rows = geometry.num_local_experts, geometry.num_rows
    x = torch.full((num_local, num_rows, geometry.hidden * form.dtype.itemsize), UNTOUCHED, dtype=torch.uint8)
    scales = None
    if form.scale_dtype is not None:
        scales = torch.full((num_local, geometry.num_scales(form), num_rows), 99, dtype=form.scale_dtype).mT
    return Packed(
        x.view(form.dtype),
        scales,
        torch.full((num_local,), -1, dtype=torch.int32),
        torch.full((num_local, num_rows), -1, dtype=torch.int32),
        torch.full((num_local, geometry.num_ranks), -1, dtype=torch.int64),
    )


def oracle(
    every: list[Given], geometry: Geometry, form: RowFormat, masked: list[set[int]] | None = None
) -> list[reference.LowLatencyDispatched]:
    sent, scales = [one.x for one in every], None
    if form.use_fp8:
        cast = [quant.cast_fp8(one, form.round_scale, form.use_ue8m0) for one in sent]
        sent, scales = [q for q, _ in cast], [s for _, s in cast]
    ids = [one.topk_idx for one in every]
    return reference.low_latency_dispatch(sent, ids, geometry.max_tokens, geometry.num_experts, scales, masked)


def check_packed(got: Packed, want: reference.LowLatencyDispatched) -> None:
    assert torch.equal(got.count, want.recv_count)
    assert torch.equal(got.layout_range, want.layout_range)
    for expert, valid in enumerate(got.count.tolist()):
        assert torch.equal(got.src_info[expert, :valid], want.src_info[expert, :valid])
        assert same(got.x[expert, :valid], want.recv_x[expert, :valid])
        assert (got.src_info[expert, valid:] == -1).all()
        assert (got.x[expert, valid:].view(torch.uint8) == UNTOUCHED).all()
        if got.scales is not None:
            assert want.recv_scales is not None
            assert same(got.scales[expert, :valid], want.recv_scales[expert, :valid])
            assert (got.scales[expert, valid:] == 99).all()


class Case(NamedTuple):
    geometry: Geometry
    num_tokens: tuple[int, ...]
    form: RowFormat
    idx_dtype: torch.dtype = torch.int64
    masked: tuple[int, ...] = ()  # by rank 0


CASES = {
    "one rank": Case(Geometry(1, 3, 5, 24, 2), (5,), BF16),
    "odd halves": Case(Geometry(2, 4, 4, 7, 3), (4, 2), BF16, torch.int32),
    "odd bytes": Case(Geometry(2, 2, 4, 7, 2), (3, 4), FP8),
    "several groups": Case(Geometry(3, 6, 4, 392, 4), (4, 0, 3), FP8, torch.int32),
    "rounded": Case(Geometry(2, 6, 4, 256, 3), (4, 4), ROUNDED),
    "exponents": Case(Geometry(2, 4, 4, 640, 3), (4, 3), UE8M0),
    "one exponent": Case(Geometry(2, 2, 3, 100, 2), (3, 3), UE8M0),
    "nine columns, masked": Case(Geometry(4, 4, 3, 16, 9), (3, 2, 1, 3), BF16, masked=(1, 3)),
    "masks itself": Case(Geometry(2, 4, 3, 64, 3), (3, 3), FP8, masked=(0,)),
    "32 columns": Case(Geometry(2, 64, 2, 8, 32), (2, 2), BF16),
    "several pieces": Case(Geometry(2, 2, 2, 4104, 2), (2, 2), BF16),
    "five ranks": Case(Geometry(5, 10, 2, 12, 3), (1, 2, 0, 2, 1), FP8, masked=(4,)),
    "nobody": Case(Geometry(2, 4, 2, 8, 2), (0, 0), BF16),
}


@pytest.mark.parametrize("name", CASES)
def test_what_is_received_is_what_the_oracle_says(device: str, name: str) -> None:
    case = CASES[name]
    geometry, ranks = case.geometry, range(case.geometry.num_ranks)
    group = Group(geometry, device)
    call, sizes = group.dispatch(case.form)
    every = [inputs(rank, geometry, case.num_tokens[rank], case.idx_dtype) for rank in ranks]
    for context, one in zip(group.contexts, every, strict=True):
        send_dispatch(context, call, sizes, one.x, one.topk_idx)
    for rank in case.masked:
        group.contexts[0].mask[rank] = 1
    want = oracle(every, geometry, case.form, [set(case.masked), *[set[int]()] * (geometry.num_ranks - 1)])
    for rank, context in enumerate(group.contexts):
        packed = empty_packed(geometry, case.form)
        stats = torch.arange(geometry.num_local_experts, dtype=torch.int32)
        is_counted = rank % 2 == 0
        receive_dispatch(context, call, sizes, 0, *packed, stats if is_counted else None)
        check_packed(packed, want[rank])
        if is_counted:
            assert (stats - torch.arange(geometry.num_local_experts)).tolist() == want[rank].recv_count.tolist()


def test_a_receive_of_an_earlier_call(device: str) -> None:
    """Eight calls are sent, the last four are fetched, the newest first."""
    geometry = Geometry(2, 4, 3, 16, 2)
    group = Group(geometry, device, times=4)
    call, sizes = group.dispatch(BF16)
    assert not call.takes_slot
    rounds = [[inputs(rank, geometry, 3, seed=seed) for rank in range(2)] for seed in range(8)]
    for every in rounds:
        for context, one in zip(group.contexts, every, strict=True):
            send_dispatch(context, call, sizes, one.x, one.topk_idx)
    for age in range(4):
        want = oracle(rounds[7 - age], geometry, BF16)
        for rank, context in enumerate(group.contexts):
            packed = empty_packed(geometry, BF16)
            receive_dispatch(context, call, sizes, age, *packed, None)
            check_packed(packed, want[rank])


def test_a_failed_buffer_moves_nothing(device: str) -> None:
    geometry = Geometry(1, 2, 2, 8, 2)
    group = Group(geometry, device)
    fail(group.boards.contexts[0])
    context, given, before = group.contexts[0], inputs(0, geometry, 2), group.memory[0].clone()
    call, sizes = group.dispatch(BF16)
    packed = empty_packed(geometry, BF16)
    send_dispatch(context, call, sizes, given.x, given.topk_idx)
    words.wait_for(context, call, 0, WaitOptions())
    receive_dispatch(context, call, sizes, 0, *packed, None)
    call, sizes_back = group.combine()
    rows, out = torch.zeros(2, 2, 8).bfloat16(), torch.full((2, 8), 7.0).bfloat16()
    earlier = torch.full((2, 2), -1, dtype=torch.int32)
    send_combine(context, call, sizes_back, rows, packed.layout_range, given.topk_idx, earlier, None)
    receive_combine(context, sizes_back, 0, out, given.topk_idx, given.topk_weights, earlier)
    words.signal(context, call)
    assert torch.equal(group.memory[0], before)
    assert not context.state.any()
    assert (out == 7).all()
    for got, then in zip(packed, empty_packed(geometry, BF16), strict=True):
        assert got is None or torch.equal(got.view(torch.uint8), then.view(torch.uint8))


# Combine -------------------------------------------------------------------------------------------------------------


def span(count: int, first: int) -> int:
    return count | first << 32


def test_combine_worked_examples(device: str) -> None:
    """Rows 21 and 22 of a set; experts [1, 0] with weights [0.5, 2]."""
    group = Group(Geometry(2, 4, 8, 2, 2), device)
    call, sizes = group.combine()
    x = torch.zeros(2, 16, 2).bfloat16()
    x[1, 5], x[1, 6] = torch.tensor([4.0, 8.0]).bfloat16(), torch.tensor([6.0, 9.0]).bfloat16()
    x[0, 3] = 1.0
    layout_range = torch.tensor([[span(1, 3), span(0, 4)], [span(2, 5), span(0, 7)]])
    ids, weights = torch.tensor([[1, 0], [1, -1]]), torch.tensor([[0.5, 2.0], [1.0, INF]])
    earlier = torch.full((2, 2), -1, dtype=torch.int32)
    send_combine(group.contexts[0], call, sizes, x, layout_range, ids, earlier, None)
    slots = group.set_of(0, 1, group.geometry.combine_bytes).view(32, -1)
    assert slots[21, :4].contiguous().view(torch.bfloat16).tolist() == [4.0, 8.0]
    assert slots[22, :4].contiguous().view(torch.bfloat16).tolist() == [6.0, 9.0]
    assert slots[3, :4].contiguous().view(torch.bfloat16).tolist() == [1.0, 1.0]
    written = [3, 21, 22]
    assert (slots[[row for row in range(32) if row not in written]] == UNTOUCHED).all()
    first = slots.data_ptr() - group.memory[0].data_ptr()
    rows = [first + row * sizes.slot_bytes for row in (3, 21)]
    assert group.table(0, 1).tolist() == [rows[0], 0, rows[1], 0], "0 where there is no row"
    assert earlier[0].tolist() == [0, 0]
    assert earlier[1, 0].item() == 1
    out = torch.full((2, 2), 7.0).bfloat16()
    receive_combine(group.contexts[0], sizes, 0, out, ids, weights, earlier)
    assert out.tolist() == [[4.0, 6.0], [6.0, 9.0]]


class Back(NamedTuple):
    geometry: Geometry
    num_tokens: tuple[int, ...]
    idx_dtype: torch.dtype = torch.int64
    masked: tuple[int, ...] = ()  # by rank 0
    zero_copy: bool = False
    is_aligned: bool = True


BACKS = {
    "one rank": Back(Geometry(1, 3, 5, 24, 2), (5,)),
    "odd": Back(Geometry(2, 4, 4, 7, 3), (4, 2), torch.int32),
    "odd, zero-copy": Back(Geometry(2, 4, 4, 7, 3), (4, 2), zero_copy=True),
    "zero-copy, masked": Back(Geometry(3, 6, 3, 136, 4), (3, 1, 2), torch.int32, masked=(2,), zero_copy=True),
    "eleven columns": Back(Geometry(2, 16, 4, 16, 11), (4, 3), masked=(1,)),
    "32 columns": Back(Geometry(2, 6, 3, 8, 32), (3, 3), torch.int32),
    "masks itself": Back(Geometry(2, 4, 3, 64, 3), (3, 3), masked=(0,)),
    "several pieces": Back(Geometry(2, 2, 2, 4104, 2), (2, 2)),
    "not aligned": Back(Geometry(2, 2, 3, 16, 2), (3, 2), is_aligned=False),
    "five ranks": Back(Geometry(5, 10, 2, 12, 3), (1, 2, 0, 2, 1), masked=(1, 4)),
    "nobody": Back(Geometry(2, 4, 2, 8, 2), (0, 0)),
}


def skewed(tensor: torch.Tensor) -> torch.Tensor:
    """The same, two bytes behind a border of 16."""
    flat = tensor.new_empty(tensor.numel() + 1)[1:]
    assert flat.data_ptr() % 16 == 2
    return flat.copy_(tensor.flatten()).view(tensor.shape)


@pytest.mark.parametrize("name", BACKS)
def test_what_is_combined_is_what_the_oracle_says(device: str, name: str) -> None:
    case = BACKS[name]
    geometry, ranks = case.geometry, range(case.geometry.num_ranks)
    group = Group(geometry, device)
    call, sizes = group.combine()
    every = [inputs(rank, geometry, case.num_tokens[rank], case.idx_dtype) for rank in ranks]
    for one in every:  # what is not selected, or masked, must not reach the sum
        one.topk_weights[(one.topk_idx < 0) | (one.topk_idx >= geometry.num_experts)] = INF
    for one in case.masked:
        local = every[0].topk_idx // geometry.num_local_experts
        every[0].topk_weights[local == one] = NAN
    want = oracle(every, geometry, BF16)
    ys, earlier = [], []
    for rank, (context, one) in enumerate(zip(group.contexts, every, strict=True)):
        is_row = torch.arange(geometry.num_rows) < want[rank].recv_count[:, None]
        factors = (1 + torch.arange(geometry.num_local_experts) + rank).bfloat16()[:, None, None]
        ys.append(with_subnormals(torch.where(is_row[..., None], want[rank].recv_x * factors, NAN)))
        x, slot = ys[-1], None
        if case.zero_copy:
            slot = rank % 3
            first = group.board_bytes + group.plan(geometry.combine_bytes).slot_offset(slot)
            x = zero_copy_view(group.memory[rank][first : first + geometry.combine_bytes], geometry).copy_(x)
        elif not case.is_aligned:
            x = skewed(x)
        earlier.append(torch.full_like(one.topk_idx, -1, dtype=torch.int32))
        send_combine(context, call, sizes, x, want[rank].layout_range, one.topk_idx, earlier[-1], slot)
    for rank in case.masked:
        group.contexts[0].mask[rank] = 1
    masked = [set(case.masked), *[set[int]()] * (geometry.num_ranks - 1)]
    ids, weights = [one.topk_idx for one in every], [one.topk_weights for one in every]
    expected = reference.low_latency_combine(ys, ids, weights, want, masked)
    for rank, (context, one) in enumerate(zip(group.contexts, every, strict=True)):
        out = torch.full((case.num_tokens[rank], geometry.hidden), 7.0).bfloat16()
        out = out if case.is_aligned else skewed(out)
        receive_combine(context, sizes, 0, out, one.topk_idx, one.topk_weights, earlier[rank])
        assert torch.equal(out, expected[rank])


def test_an_expert_twice_in_a_token_counts_twice_with_its_one_row(device: str) -> None:
    group = Group(Geometry(1, 2, 2, 4, 3), device)
    call, sizes = group.combine()
    ids, weights = torch.tensor([[1, 1, 0], [0, 1, 1]]), torch.tensor([[2.0, 0.5, 1.0], [1.0, 4.0, 0.25]])
    x = torch.tensor([[1.0, 2.0], [8.0, 16.0]]).bfloat16()[..., None].expand(2, 2, 4).contiguous()
    earlier = torch.empty(2, 3, dtype=torch.int32)
    layout_range = torch.tensor([[span(2, 0)], [span(2, 0)]])
    send_combine(group.contexts[0], call, sizes, x, layout_range, ids, earlier, None)
    out = torch.empty(2, 4).bfloat16()
    receive_combine(group.contexts[0], sizes, 0, out, ids, weights, earlier)
    assert out[:, 0].tolist() == [2.5 * 8 + 1, 2 + 4.25 * 16]


def test_sums_are_rounded_once_to_the_nearest_even(device: str) -> None:
    group = Group(Geometry(1, 2, 2, 4, 2), device)
    call, sizes = group.combine()
    x = torch.tensor([[1.0, -1.0, 256.0, 258.0], [1.0, -1.0, 1.0, 1.0]]).bfloat16()[:, None].repeat(1, 2, 1)
    ids, weights = torch.tensor([[0, 1]]), torch.tensor([[1.0, 2.0**-8 + 2.0**-16]])
    earlier, out = torch.empty(1, 2, dtype=torch.int32), torch.empty(1, 4).bfloat16()
    layout_range = torch.tensor([[span(1, 0)], [span(1, 0)]])
    send_combine(group.contexts[0], call, sizes, x, layout_range, ids, earlier, None)
    receive_combine(group.contexts[0], sizes, 0, out, ids, weights, earlier)
    assert out[0, :2].tolist() == [1 + 2.0**-7, -1 - 2.0**-7]
    for weight, expected in ((1.0, [256.0, 260.0]), (1.5, [258.0, 260.0])):  # ties go to the even one
        receive_combine(group.contexts[0], sizes, 0, out, ids, torch.tensor([[1.0, weight]]), earlier)
        assert out[0, 2:].tolist() == expected


# LogFMT --------------------------------------------------------------------------------------------------------------


def logfmt_rows(hidden: int) -> torch.Tensor:
    """All kinds of units: compressed, with a one, constant, with zeros, over a wide range, with what is not finite."""
    generator = torch.Generator().manual_seed(hidden)
    x = (torch.rand(10, hidden, generator=generator) - 0.5).bfloat16()
    x[1, -1] = 1.0  # the last unit is not below 1
    x[2] = 0.25
    x[3, ::3] = 0.0
    x[4] = 0.0
    exponents = torch.randint(-60, 0, (hidden,), generator=generator)
    x[5] *= torch.exp2(exponents.float()).bfloat16()
    x[6] *= 4.0
    x[7] = x[7].abs()
    x[8, hidden // 2] = INF
    x[9, 0] = -0.0
    return x


def codes_of(units: torch.Tensor, first: int, stop: int) -> torch.Tensor:
    """[n, C] codes with signs of one compressed unit of [n, 2 * H] bytes."""
    low = units[:, 2 * first : first + stop].int()
    packed = units[:, first + stop : first + stop + (stop - first + 3) // 4].int()
    high = torch.stack([(packed >> shift) & 3 for shift in (0, 2, 4, 6)], -1).flatten(1)[:, : stop - first]
    return low | high << 8


@pytest.mark.parametrize("hidden", [7, 130, 512, 600, 1024, 1538, 2048])
def test_logfmt_is_what_the_twin_makes_within_one_code(device: str, hidden: int) -> None:
    rows = logfmt_rows(hidden)
    num_rows = rows.size(0)
    geometry = Geometry(1, 1, num_rows, hidden, 1)
    group = Group(geometry, device)
    call, sizes = group.combine(use_logfmt=True)
    ids, earlier = torch.zeros(num_rows, 1, dtype=torch.int64), torch.empty(num_rows, 1, dtype=torch.int32)
    layout_range = torch.tensor([[span(num_rows, 0)]])
    before = group.memory[0].clone()
    send_combine(group.contexts[0], call, sizes, rows[None], layout_range, ids, earlier, None)
    slots = group.set_of(0, 1, geometry.combine_bytes).view(num_rows, -1)
    got, end = slots[:, : 2 * hidden].contiguous(), sizes.ranges_offset + 4 * geometry.num_groups
    ranges = slots[:, sizes.ranges_offset : end].contiguous().view(torch.bfloat16).view(num_rows, -1, 2)
    units, want_ranges = logfmt.encode(rows)
    assert torch.equal(ranges, want_ranges)
    unit, num_compressed = logfmt.unit_channels(hidden), 0
    for first in range(0, hidden, unit):
        stop = min(first + unit, hidden)
        groups = want_ranges[:, first // 128 : -(-stop // 128)].float().log2()
        high, low = groups[..., 0], torch.maximum(groups[..., 1], groups[..., 0] - 32)
        is_fit = ((high < 0) & (low < high)).all(1)
        assert torch.equal(raw(got[~is_fit, 2 * first : 2 * stop]), raw(rows[~is_fit, first:stop].view(torch.uint8)))
        used = first + stop + (stop - first + 3) // 4  # a compressed unit leaves the rest alone
        assert (got[is_fit, used : 2 * stop] == UNTOUCHED).all()
        mine, twins = codes_of(got[is_fit], first, stop), codes_of(units[is_fit], first, stop)
        if mine.numel():
            off = ((mine & 511) - (twins & 511)).abs()
            assert off.max() <= 1
            assert off.float().mean() < 0.01
            is_value = (mine & 511) > 0
            assert torch.equal((mine >> 9)[is_value], (rows[is_fit, first:stop] < 0).int()[is_value])
        num_compressed += int(is_fit.sum())
    assert num_compressed >= 4, "rows 0, 3, 5 and 7 at least"
    # Decoded: the values of the codes, rounded to BF16.
    out = torch.full((num_rows, hidden), 7.0).bfloat16()
    receive_combine(group.contexts[0], sizes, 0, out, ids, torch.ones(num_rows, 1), earlier)
    expected = logfmt.decode(got, ranges, hidden)
    assert torch.equal(out.isinf(), expected.isinf())
    finite = expected.isfinite()
    assert torch.allclose(out.float()[finite], expected[finite], rtol=2.0**-8 + 1e-4, atol=0)
    whole = torch.tensor([2, 4, 6])  # rows whose units all travel as they are
    assert torch.equal(out[whole], rows[whole])
    assert torch.equal(out[1, -1], rows[1, -1])
    # Outside of units and ranges nothing was written.
    slots[:, : 2 * hidden] = UNTOUCHED
    slots[:, sizes.ranges_offset : end] = UNTOUCHED
    assert torch.equal(group.memory[0][group.board_bytes :], before[group.board_bytes :])


def test_logfmt_sums_rows_of_all_kinds_in_their_order(device: str) -> None:
    """More rows than are loaded at once: eight that are compressed and without zeros, then such and others."""
    hidden = 1024
    usual = (torch.rand(9, hidden, generator=torch.Generator().manual_seed(3)) - 0.5).bfloat16()
    usual[usual.abs() < 2.0**-20] = 0.25
    usual[1] *= 2.0**-120  # and below what is a normal number
    rows = torch.cat([usual, logfmt_rows(hidden)[1:7]])
    num_rows = rows.size(0)
    group = Group(Geometry(1, num_rows, 1, hidden, num_rows), device)
    call, sizes = group.combine(use_logfmt=True)
    ids, earlier = torch.arange(num_rows)[None], torch.empty(1, num_rows, dtype=torch.int32)
    layout_range = torch.full((num_rows, 1), span(1, 0))
    send_combine(group.contexts[0], call, sizes, rows[:, None], layout_range, ids, earlier, None)
    values = logfmt.decode(*logfmt.encode(rows), hidden)
    for weights in (torch.linspace(0.5, 2.0, num_rows), torch.eye(num_rows)[1], torch.eye(num_rows)[-1]):
        out = torch.empty(1, hidden).bfloat16()
        receive_combine(group.contexts[0], sizes, 0, out, ids, weights[None], earlier)
        expected, reach = weights @ values, weights @ values.abs()
        # A code may be off by one, of a group's 511.
        assert ((out[0].float() - expected).abs() <= 0.05 * reach).all()
        assert torch.equal(out[0] == 0, expected.bfloat16() == 0)


@pytest.mark.parametrize("hidden", [130, 1024])
def test_a_nan_survives_logfmt_and_touches_nobody(device: str, hidden: int) -> None:
    rows = logfmt_rows(hidden)[:2].clone()
    rows[0, 5] = NAN
    group = Group(Geometry(1, 1, 2, hidden, 1), device)
    call, sizes = group.combine(use_logfmt=True)
    ids, earlier = torch.zeros(2, 1, dtype=torch.int64), torch.empty(2, 1, dtype=torch.int32)
    send_combine(group.contexts[0], call, sizes, rows[None], torch.tensor([[span(2, 0)]]), ids, earlier, None)
    out = torch.empty(2, hidden).bfloat16()
    receive_combine(group.contexts[0], sizes, 0, out, ids, torch.ones(2, 1), earlier)
    assert out.isnan().nonzero().tolist() == [[0, 5]]
    assert torch.allclose(out.float().nan_to_num(), rows.float().nan_to_num(), rtol=4e-2, atol=1e-4)


def test_logfmt_sums_skip_what_is_masked(device: str) -> None:
    geometry = Geometry(2, 2, 2, 256, 2)
    group = Group(geometry, device)
    call, sizes = group.combine(use_logfmt=True)
    rows = [torch.full((1, 4, 256), value).bfloat16() for value in (0.5, 0.25)]
    ids, layout_range = torch.tensor([[0, 1], [1, -1]]), torch.tensor([[span(2, 0), span(2, 2)]])
    weights = torch.tensor([[1.0, 2.0], [4.0, INF]])
    out = torch.empty(2, 256).bfloat16()
    for context, x in zip(group.contexts, rows, strict=True):
        x[..., ::2] *= 0.5
        earlier = torch.empty(2, 2, dtype=torch.int32)
        send_combine(context, call, sizes, x, layout_range, ids, earlier, None)
    for is_masked, expected in ((0, [1.0, 1.0]), (1, [0.5, 0.0])):
        group.contexts[0].mask[1] = is_masked
        receive_combine(group.contexts[0], sizes, 0, out, ids, weights, earlier)
        assert out[:, 1].tolist() == expected, "the largest and the smallest of a group are exact"
        assert out[:, 0].tolist() == [one / 2 for one in expected]


# Waits ---------------------------------------------------------------------------------------------------------------

WAITS = Geometry(3, 3, 2, 8, 1)


def signals(group: Group, ranks: tuple[int, ...], agreement: tuple[int, int] = (5, 6)) -> KernelCall:
    call = group.call(16, agreement)
    for rank in ranks:
        words.signal(group.contexts[rank], call)
    return call


def test_a_satisfied_wait_changes_nothing(device: str) -> None:
    group = Group(WAITS, device)
    for number in range(1, 11):
        call = signals(group, (0, 1, 2))
        assert group.sent(1) == [number] * 3
        for rank, context in enumerate(group.contexts):
            stats = torch.arange(3)
            words.wait_for(context, call, 0, WaitOptions(stats))
            assert group.boards.record(rank) is None
            assert not context.mask.any()
            assert stats.tolist() == [0, 1, 2], "nobody was waited for"
    assert [one.state[0].item() for one in group.contexts] == [10, 10, 10]


@pytest.mark.parametrize("is_inside", [True, False], ids=["in the send", "its own kernel"])
@pytest.mark.parametrize("can_mask", [True, False])
def test_a_silent_rank_is_masked_or_fails_the_call(device: str, can_mask: bool, is_inside: bool) -> None:
    group = Group(WAITS, device)
    given, (call, sizes) = inputs(0, WAITS, 2), group.dispatch(BF16)
    stats = torch.full((3,), 100)
    context, wait_options = group.patient(0, SHORT_NS), WaitOptions(stats, can_mask)
    send_dispatch(group.contexts[2], call, sizes, given.x, given.topk_idx)
    send_dispatch(context, call, sizes, given.x, given.topk_idx, wait_options if is_inside else None)
    if not is_inside:
        words.wait_for(context, call, 0, wait_options)
    group.sync()
    assert stats[[0, 2]].tolist() == [100, 100]
    assert stats[1].item() >= 100 + SHORT_NS
    if can_mask:
        assert group.boards.record(0) is None
        assert context.mask.tolist() == [0, words.LOST, 0]
        told = [0, 1 << words.REASON_BITS | words.SILENT, 0, 1]
        assert context.host.tolist() == told, "the call in which it was masked, why, and that somebody was"
        packed = empty_packed(WAITS, BF16)
        receive_dispatch(context, call, sizes, 0, *packed, None)
        want = oracle([given, given, given], WAITS, BF16, [{1}] * 3)
        check_packed(packed, want[0])
        # It is not waited for again.
        long = group.patient(0, 60 * 10**9)
        send_dispatch(group.contexts[2], call, sizes, given.x, given.topk_idx)
        send_dispatch(long, call, sizes, given.x, given.topk_idx, wait_options)
        group.sync()
        assert context.host.tolist() == told
        assert group.boards.record(0) is None
        return
    assert group.boards.record(0) == [exchange.TIMEOUT, 1, OPERATION, 0b010, 0, 0, 0]
    assert not context.mask.any()
    assert group.boards.boards[1][8 * 3].item() == 1, "peers are told"


def test_who_waits_for_a_failed_peer_fails_at_once_with_its_record(device: str) -> None:
    group = Group(WAITS, device)
    call = signals(group, (0, 1))
    exchange.abort(group.boards.contexts[1], 3)
    words.wait_for(group.patient(0, 3600 * 10**9), call, 0, WaitOptions(None, True))
    assert group.boards.record(0) == [exchange.HOST, 0, 3, 0, 0, 0, 1]
    assert not group.contexts[0].mask.any()


@pytest.mark.parametrize("can_mask", [True, False])
def test_who_waits_for_a_rank_that_refuses_fails_at_once_or_masks_it(device: str, can_mask: bool) -> None:
    group = Group(WAITS, device)
    call = signals(group, (0, 2))
    context = group.contexts[1]
    note = exchange.note_words("a wrong argument", context.state.device)
    for _ in range(2):
        exchange.refuse(context.buffer, 3, exchange.LOW_LATENCY, context.state, words.REFUSALS, note)
    if can_mask:
        words.wait_for(group.patient(0, 3600 * 10**9), call, 0, WaitOptions(None, True))
        assert group.boards.record(0) is None
        assert group.contexts[0].mask.tolist() == [0, words.LOST, 0]
        assert group.contexts[0].host.tolist() == [0, 1 << words.REASON_BITS | words.HAS_REFUSED, 0, 1]
        return
    words.wait_for(group.patient(0, 3600 * 10**9), call, 0, WaitOptions())
    assert group.boards.record(0) == [exchange.REFUSED, 1, 3, 1, 0, 1, 1]


def test_others_are_waited_for_beside_a_rank_that_refuses_and_is_masked(device: str) -> None:
    group = Group(WAITS, device)
    call = signals(group, (0,))
    context, stats = group.contexts[1], torch.zeros(3, dtype=torch.int64, device=device)
    note = exchange.note_words("a wrong argument", context.state.device)
    exchange.refuse(context.buffer, 3, exchange.LOW_LATENCY, context.state, words.REFUSALS, note)
    words.wait_for(group.patient(0, SHORT_NS), call, 0, WaitOptions(stats, True))
    assert group.contexts[0].mask.tolist() == [0, words.LOST, words.LOST]
    assert stats[2] >= SHORT_NS


@pytest.mark.parametrize("can_mask", [True, False])
@pytest.mark.parametrize("refuser", [0, 1])
def test_a_rank_that_makes_a_call_after_it_alone_refused_it_makes_another_one(
    device: str, refuser: int, can_mask: bool
) -> None:
    group = Group(WAITS, device)
    context = group.contexts[refuser]
    note = exchange.note_words("a wrong argument", context.state.device)
    exchange.refuse(context.buffer, 3, exchange.LOW_LATENCY, context.state, words.REFUSALS, note)
    call = signals(group, (0, 1, 2))
    words.wait_for(group.contexts[0], call, 0, WaitOptions(None, can_mask))
    if not can_mask:
        assert group.boards.record(0)[:4] == [exchange.REFUSED, 1, OPERATION if refuser == 0 else 3, refuser]
        assert group.contexts[0].buffer.note(group.boards.boards[0], 1, refuser) == "a wrong argument"
        return
    assert group.boards.record(0) is None
    masks = {0: [0, words.MASKED, words.MASKED], 1: [0, words.LOST, 0]}
    assert group.contexts[0].mask.tolist() == masks[refuser]


def test_a_refusal_counts_as_often_also_if_later_calls_were_refused(device: str) -> None:
    group = Group(WAITS, device)
    note = exchange.note_words("a wrong argument", group.contexts[0].state.device)

    def refuse(rank: int) -> None:
        context = group.contexts[rank]
        exchange.refuse(context.buffer, 3, exchange.LOW_LATENCY, context.state, words.REFUSALS, note)

    for rank in range(3):
        refuse(rank)
    call = signals(group, (0, 2))  # ranks 0 and 2 have corrected call 1; rank 1 will
    refuse(0)
    words.wait_for(group.patient(0, 1), call, 0, WaitOptions())
    assert group.boards.record(0) == [exchange.TIMEOUT, 1, OPERATION, 0b010, 0, 0, 0]


def test_a_satisfied_wait_sees_failures_too(device: str) -> None:
    group = Group(WAITS, device)
    call = signals(group, (0, 1, 2))
    exchange.abort(group.boards.contexts[2], 4)
    words.wait_for(group.contexts[1], call, 0, WaitOptions())
    assert group.boards.record(1) == [exchange.HOST, 0, 4, 0, 0, 0, 2]


@pytest.mark.parametrize("can_mask", [True, False])
def test_a_rank_whose_set_is_another_calls_has_gone_on_without_this_one(device: str, can_mask: bool) -> None:
    group = Group(WAITS, device)
    call = signals(group, (0, 1, 2))
    wait_options = WaitOptions(None, can_mask)
    group.words(0)[8 * 1] = 1 + 3  # with four sets, this one is still there
    words.wait_for(group.contexts[0], call, 0, wait_options)
    assert group.boards.record(0) is None
    assert not group.contexts[0].mask.any()
    group.words(0)[8 * 1] = 1 + 4
    words.wait_for(group.contexts[0], call, 0, wait_options)
    if can_mask:
        assert group.boards.record(0) is None
        assert group.contexts[0].mask.tolist() == [0, words.MASKED, 0]
        assert group.contexts[0].host.tolist() == [0, 1 << words.REASON_BITS | words.GONE_ON, 0, 1]
    else:
        assert group.boards.record(0) == [exchange.DESYNC, 1, OPERATION, 0b010, 0, 0, 0]


def test_whoever_masks_this_rank_is_masked_and_what_is_lost_is_lost_for_all(device: str) -> None:
    """Rank 1 has lost rank 2; rank 3 does without rank 0, to which that is rank 3's own affair."""
    group = Group(Geometry(40, 40, 1, 8, 1), device)
    group.contexts[1].mask[[2, 33]] = words.LOST
    group.contexts[3].mask[0] = words.MASKED
    call = signals(group, tuple(range(40)))
    for rank, context in enumerate(group.contexts[:5]):
        words.wait_for(context, call, 0, WaitOptions(None, True))
        assert group.boards.record(rank) is None
    masks = [{rank: one for rank, one in enumerate(context.mask.tolist()) if one} for context in group.contexts[:5]]
    lost = {2: words.LOST, 33: words.LOST}
    assert masks[0] == {3: words.MASKED, **lost}
    assert masks[1] == masks[4] == lost
    assert masks[2] == {1: words.MASKED}, "what a rank says that masks this one is not believed"
    assert masks[3] == {0: words.MASKED, **lost}
    assert group.contexts[4].host[33] == 1 << words.REASON_BITS | words.TOLD


def test_ranks_agree_on_the_number_of_the_next_call(device: str) -> None:
    """The words of one rank are there already, as its kernel would write them; those of an earlier attempt are not."""
    group = Group(WAITS, device)
    context = group.contexts[0]
    context.state[0], context.mask[2] = 11, words.MASKED
    line = group.words(0)[8:16]
    line[1:4] = torch.tensor([4, 18, 1])  # attempt, next number, echo
    words.join(context)
    assert int(context.state[0]) + 1 == 18
    assert group.words(1)[1:4].tolist() == [1, 12, 4], "and rank 1 finds this rank's"
    assert context.mask.tolist() == [0, 0, words.MASKED]
    words.join(group.patient(0, SHORT_NS))
    assert int(context.state[0]) + 1 == 18, "numbers do not go back"
    assert context.mask.tolist() == [0, words.LOST, words.MASKED], "an echo of another attempt does not count"


@pytest.mark.parametrize("other", [(5, 7), (4, 6)])
def test_ranks_that_differ_are_named_with_what_they_said(device: str, other: tuple[int, int]) -> None:
    group = Group(WAITS, device)
    call = signals(group, (0, 1))
    signals(group, (2,), other)
    words.wait_for(group.contexts[1], call, 0, WaitOptions(None, True))
    assert group.boards.record(1) == [exchange.DISAGREE, 1, OPERATION, 0b100, 0, 0, 1]
    assert group.contexts[1].seen.tolist() == [[5, 6], [5, 6], list(other)]


def test_what_a_masked_rank_says_is_not_looked_at(device: str) -> None:
    group = Group(WAITS, device)
    call = signals(group, (0, 1))
    signals(group, (2,), (1, 1))
    group.contexts[0].mask[2] = 1
    words.wait_for(group.contexts[0], call, 0, WaitOptions())
    assert group.boards.record(0) is None


def test_a_wait_for_an_earlier_call(device: str) -> None:
    """Rank 1 has sent one call only: enough for the first, not for the second."""
    group = Group(WAITS, device)
    call = signals(group, (0, 1, 2))
    signals(group, (0, 2), (8, 9))
    words.wait_for(group.patient(0, SHORT_NS), call, 1, WaitOptions())
    assert group.boards.record(0) is None, "posts of the first call are compared"
    words.wait_for(group.patient(0, SHORT_NS), replace(call, agreement=(8, 9)), 0, WaitOptions())
    assert group.boards.record(0) == [exchange.TIMEOUT, 2, OPERATION, 0b010, 0, 0, 0]


@pytest.mark.parametrize("num_ranks", [1, 2, 5, 33])
def test_signals_of_any_number_of_ranks(device: str, num_ranks: int) -> None:
    group = Group(Geometry(num_ranks, num_ranks, 1, 8, 1), device)
    call = signals(group, tuple(range(num_ranks)))
    for rank in range(num_ranks):
        assert group.sent(rank) == [1] * num_ranks
        words.wait_for(group.contexts[rank], call, 0, WaitOptions())
        assert group.boards.record(rank) is None


@pytest.mark.parametrize("is_inside", [True, False])
def test_a_combine_waits_likewise(device: str, is_inside: bool) -> None:
    group = Group(WAITS, device)
    call, sizes = group.combine()
    given, stats = inputs(0, WAITS, 2), torch.zeros(3, dtype=torch.int64)
    x, layout_range = torch.zeros(1, 6, 8).bfloat16(), torch.zeros(1, 3, dtype=torch.int64)
    earlier = torch.empty(2, 1, dtype=torch.int32)
    wait_options = WaitOptions(stats, True)
    for rank in (1, 2):
        send_combine(group.contexts[rank], call, sizes, x, layout_range, given.topk_idx, earlier, None)
    if is_inside:
        send_combine(group.contexts[0], call, sizes, x, layout_range, given.topk_idx, earlier, None, wait_options)
    else:
        send_combine(group.contexts[0], call, sizes, x, layout_range, given.topk_idx, earlier, 0)
        words.wait_for(group.contexts[0], call, 0, wait_options)
    assert group.boards.record(0) is None
    assert not group.contexts[0].mask.any()
    assert stats.tolist() == [0, 0, 0]
    assert group.post(0, 1) == [5, 6, 2]
