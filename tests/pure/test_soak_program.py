"""What a soak plays: programs as data, the data of calls, and how a failing program is cut down."""

from __future__ import annotations

import pytest
import torch

from deep_ep.tools.soak.checks import Mismatch, same, same_sums
from deep_ep.tools.soak.data import PAYLOADS, ROWS, Data, Limits, PayloadForm, X
from deep_ep.tools.soak.layouts import SUMMABLE, laid_out_scales, laid_out_x
from deep_ep.tools.soak.plan import Goal, calls_to_play, plan_calls, plan_segment
from deep_ep.tools.soak.program import (
    CACHED,
    COMBINE,
    FOLLOWERS,
    LEFT,
    MASKED,
    OVERFLOW,
    Features,
    ProgramCall,
    draw_program,
    kept,
)
from deep_ep.tools.soak.shrink import shrink, without

GOAL = Goal(num_ranks=2, seed=5, num_calls=40)
EVERYTHING = Features(has_low_latency=True, has_masks=True, has_exceptions=True, has_elastic=True)
CPU = torch.device("cpu")


def data(number: int = 3, **limits: int) -> Data:
    return Data(seed=7, number=number, num_ranks=3, num_nodes=1, limits=Limits(**limits))


# Programs ------------------------------------------------------------------------------------------------------------


def test_the_plan_follows_from_the_seed() -> None:
    assert [plan_segment(GOAL, number) for number in range(9)] == [plan_segment(GOAL, number) for number in range(9)]
    assert plan_segment(GOAL, 1) != plan_segment(Goal(2, seed=6), 2)
    # In literal numbers: a line that replays a failure must do so on another machine, and in a later Python.
    segment = plan_segment(GOAL, 3)
    assert (segment.seed, segment.num_calls, segment.arena) == (1846387575634471010, 210, "free")
    calls = plan_calls(GOAL, segment, 4)
    assert [(call.kind, call.source) for call in calls] == [
        ("elastic dispatch", None),
        ("elastic combine", 1),
        ("worst-case dispatch", None),
        ("cached dispatch", 3),
    ]
    bits = Data(segment.seed, 1, 2, 1, segment.limits).bits((2, 3), torch.uint8, 1, X)
    assert bits.tolist() == [[129, 67, 191], [41, 108, 63]]


def test_every_kind_of_arena_and_of_sizes_comes() -> None:
    segments = [plan_segment(GOAL, number) for number in range(30)]
    assert {segment.arena for segment in segments[:8]} == {"free", "tiny", "one page", "uneven"}
    assert all(len(segment.arena_limits) == 2 for segment in segments)
    assert {segment.limits.topk for segment in segments} == {8, 64}
    assert max(segment.limits.experts_per_rank for segment in segments) == 2000
    assert {segment.has_masks for segment in segments} == {False, True}


def test_how_many_calls_are_next() -> None:
    segment = plan_segment(GOAL, 0)
    assert calls_to_play(Goal(2, 5), segment, 1000, 10.0) == segment.num_calls
    assert calls_to_play(GOAL, segment, 33, 10.0) == 7
    assert calls_to_play(GOAL, segment, 40, 10.0) == 0
    assert calls_to_play(Goal(2, 5, secs=10.0), segment, 80, 8.0) == 20  # 10 a second, for 2 seconds more
    assert calls_to_play(Goal(2, 5, secs=10.0), segment, 80, 11.0) == 0


def test_every_kind_of_call_comes_and_goes_back_to_a_dispatch_before_it() -> None:
    calls = draw_program(11, 800, 3, EVERYTHING)
    assert len({call.kind for call in calls}) == 14
    kinds = {call.number: call.kind for call in calls}
    renewed = 0
    for call in calls:
        if call.kind == LEFT:
            renewed = call.number
        if call.kind in (CACHED, COMBINE):
            assert call.source is not None
            assert renewed < call.source < call.number
            assert kinds[call.source] in ("dispatch", "worst-case dispatch")
        elif call.kind in FOLLOWERS:
            assert call.source is not None
            assert renewed < call.source < call.number
            assert kinds[call.source] in ("elastic dispatch", "elastic dispatch without sync")
        else:
            assert call.source is None


def test_a_program_has_only_what_the_buffer_can_do() -> None:
    on_gpu = draw_program(11, 400, 2, Features(has_low_latency=True, survives_mistakes=False))
    assert not {OVERFLOW, LEFT, MASKED} & {call.kind for call in on_gpu}
    alone = draw_program(11, 400, 1, EVERYTHING)
    assert not {LEFT, MASKED} & {call.kind for call in alone}
    low_latency = draw_program(11, 100, 2, Features(has_normal=False, has_low_latency=True))
    assert {call.kind for call in low_latency} == {"low-latency round", "low-latency micro-batches"}


def test_a_shorter_program_is_the_beginning_of_a_longer_one() -> None:
    assert draw_program(3, 50, 3, EVERYTHING) == draw_program(3, 90, 3, EVERYTHING)[:50]


def test_calls_without_their_dispatch_are_dropped() -> None:
    calls = [
        ProgramCall(1, "dispatch"),
        ProgramCall(2, "dispatch"),
        ProgramCall(3, "combine", 1),
        ProgramCall(4, "combine", 2),
    ]
    assert kept(calls, {2, 3, 4}) == [calls[1], calls[3]]
    assert without(calls, [calls[0]]) == [calls[1], calls[3]]


# Shrinking -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("needed", [{17}, {3, 30}, {1, 2, 29, 30}])
def test_only_the_calls_that_matter_are_left(needed: set[int]) -> None:
    played: list[tuple[int, ...]] = []
    every = {call.number: call for call in plan_calls(GOAL, plan_segment(GOAL, 2), 30)}
    closure = needed | {every[number].source for number in needed if every[number].source is not None}

    def fails(goal: Goal) -> bool:
        assert goal.segment == 2
        assert goal.only is not None
        assert [call.number for call in plan_calls(goal, plan_segment(goal, 2), 30)] == list(goal.only)
        played.append(goal.only)
        return needed <= set(goal.only)

    shrunk = shrink(GOAL, 2, 30, fails, 60.0)
    assert shrunk is not None
    assert set(shrunk.numbers) == closure
    assert (shrunk.num_before, shrunk.num_played) == (30, len(played))
    line = GOAL.command(2, only=shrunk.numbers)
    assert line.endswith(f"--seed 5 --segment 2 --only {','.join(map(str, sorted(closure)))}")


def test_what_does_not_fail_again_is_not_shrunk_and_time_ends() -> None:
    assert shrink(GOAL, 0, 30, lambda _: False, 60.0) is None
    whole = shrink(GOAL, 0, 30, lambda _: True, 0.0)
    assert whole is not None
    assert len(whole.calls) == 30


# Data ----------------------------------------------------------------------------------------------------------------


def test_data_of_calls_ranks_and_purposes_differ() -> None:
    one = data().bits((64,), torch.uint8, 0, X)
    assert torch.equal(one, data().bits((64,), torch.uint8, 0, X))
    for other in (data(4).bits((64,), torch.uint8, 0, X), data().bits((64,), torch.uint8, 1, X)):
        assert not torch.equal(one, other)
    assert not torch.equal(one, data().bits((64,), torch.uint8, 0, ROWS))
    assert data().bits((3 << 20, 4), torch.uint8, 0, X).shape == (3 << 20, 4), "more than the pool has"


@pytest.mark.parametrize("dtype", PAYLOADS, ids=str)
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 7)])
def test_x_has_its_values_in_every_layout(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    for layout in ("fresh", "offset", "odd strides", "lazy"):
        values = data().payload(PayloadForm(dtype, shape[1], layout), shape[0], 1).values
        x = laid_out_x(values, layout, CPU)
        assert x.is_contiguous()
        same(layout, x.resolve_conj().resolve_neg(), values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32, torch.uint8, torch.float8_e8m0fnu, torch.bfloat16])
@pytest.mark.parametrize("shape", [(0, 3), (1, 1), (5, 7)])
def test_scales_have_their_values_in_every_layout(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    strides = set()
    for layout in ("rows", "columns", "padded columns", "gaps", "expanded", "offset"):
        form = PayloadForm(torch.uint8, 4, "fresh", dtype, shape[1], layout)
        scales = data().payload(form, shape[0], 0).scales
        assert scales is not None
        laid_out = laid_out_scales(scales, layout, CPU)
        same(layout, laid_out, scales)
        strides.add(laid_out.stride())
    assert len(strides) > 3 or shape != (5, 7)


def test_ids_reach_the_extremes_of_their_dtype() -> None:
    seen: set[int] = set()
    for number in range(40):
        routing = data(number).routing([20, 20, 20])
        for ids, mask, layout in zip(routing.ids, routing.masks, routing.layouts, strict=True):
            seen.update(ids.flatten().tolist())
            assert mask.shape == layout.mask.shape
    for dtype in (torch.int32, torch.int64):
        assert {torch.iinfo(dtype).min, torch.iinfo(dtype).max} <= seen


def test_numbers_are_of_any_magnitude_or_such_whose_sums_are_rounded() -> None:
    kinds = set()
    for number in range(20):
        rows = data(number).numbers((40, 8), torch.float32, 0, ROWS)
        kinds.add(bool((rows.abs() < 257).all()))
    assert kinds == {False, True}


# Comparing -----------------------------------------------------------------------------------------------------------


def test_same_sees_a_bit() -> None:
    x = torch.randn(3, 4).bfloat16()
    same("x", x, x.clone())
    same("x", None, None)
    y = x.clone()
    y.view(torch.int16)[2, 1] ^= 1
    with pytest.raises(Mismatch, match="1 of 3 rows differ, first in row 2, column 1"):
        same("x", y, x)
    with pytest.raises(Mismatch, match="got nothing"):
        same("x", None, x)
    with pytest.raises(Mismatch, match=r"expected torch\.float32"):
        same("x", x, x.float())
    with pytest.raises(Mismatch, match="row 1, column 0: got 7, expected 5"):
        same("counts", torch.tensor([4, 7]), torch.tensor([4, 5]))


@pytest.mark.parametrize("dtype", SUMMABLE, ids=str)
def test_a_nan_is_as_good_as_another_in_a_sum_and_nothing_else_is(dtype: torch.dtype) -> None:
    got, expected = (torch.tensor([[sign * torch.nan, 0.0]]).to(dtype) for sign in (1, -1))
    same_sums("sum", got, expected)
    with pytest.raises(Mismatch):
        same_sums("sum", got, torch.tensor([[torch.nan, -0.0]]).to(dtype))
    with pytest.raises(Mismatch):
        same_sums("sum", got, torch.tensor([[1.0, 0.0]]).to(dtype))
