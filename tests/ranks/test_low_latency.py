"""Low-latency dispatch and combine of real ranks, against the oracle."""

from __future__ import annotations

import itertools
import os

import pytest
import torch
import torch.distributed as dist
from low_latency import (
    Case,
    Given,
    check_combine,
    check_dispatch,
    dispatch,
    expected_rows,
    experts_rows,
    inputs,
    make_buffer,
    one_call,
)

import deep_ep
from common import error_of, run_ranks
from deep_ep import logfmt, reference

# Flags ---------------------------------------------------------------------------------------------------------------

FORMS: list[dict[str, bool]] = [
    {"use_fp8": False},
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
]
WAYS = [{}, {"is_async": True}, {"has_hook": True}]
COMBINES = [{}, {"zero_copy": True}, {"use_logfmt": True}]


def all_flags(rank: int, num_ranks: int, kind: str) -> None:
    case = Case(kind=kind, hidden=640, seed=3)
    buffer = make_buffer(num_ranks, case)
    for index, (form, way, combine) in enumerate(itertools.product(FORMS, WAYS, COMBINES)):
        for _ in range(1 + index % 2):  # both quarters for every combination
            one_call(buffer, rank, num_ranks, case, form, **way, **combine, with_out=index % 3 == 0)
    buffer.destroy()


@pytest.mark.parametrize(("num_ranks", "kind"), [(2, "integers"), (2, "noise"), (4, "integers")])
def test_all_combinations_of_flags(device: str, num_ranks: int, kind: str) -> None:
    run_ranks(all_flags, num_ranks, kind)


def few_flags(rank: int, num_ranks: int) -> None:
    case = Case(experts_per_rank=2, max_tokens=num_ranks + 1, hidden=128)
    buffer = make_buffer(num_ranks, case)
    for form, way, combine in zip(FORMS, [*WAYS, {}], [*COMBINES, {}], strict=True):
        one_call(buffer, rank, num_ranks, case, form, **way, **combine)
    buffer.destroy()


@pytest.mark.parametrize("num_ranks", [1, 3, 6, 8])
def test_other_group_sizes(device: str, num_ranks: int) -> None:
    run_ranks(few_flags, num_ranks)


# Shapes --------------------------------------------------------------------------------------------------------------

SHAPES = [
    Case(hidden=7),
    Case(hidden=1, max_tokens=1, topk=1, experts_per_rank=1),
    Case(hidden=130, idx_dtype=torch.int32),
    Case(hidden=512, topk=1),
    Case(hidden=1024, kind="noise"),
    Case(hidden=1100, kind="noise", topk=5),
    Case(hidden=64, topk=32, experts_per_rank=40, idx_dtype=torch.int32),
    Case(hidden=33, topk=9, experts_per_rank=1),
    Case(num_tokens=0),
    Case(kind="nothing"),
    Case(topk=0),
    Case(max_tokens=40, num_tokens=3),
    Case(max_tokens=100, hidden=16, experts_per_rank=20),
]


def many_shapes(rank: int, num_ranks: int) -> None:
    buffer = make_buffer(num_ranks, *SHAPES)
    order = [*SHAPES, *reversed(SHAPES)]
    for index, case in enumerate(order):
        form, combine = FORMS[index % 4], COMBINES[(index + index // 12) % 3]
        one_call(buffer, rank, num_ranks, case._replace(seed=index), form, has_hook=index % 5 == 0, **combine)
    buffer.destroy()


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_shapes_that_change_from_call_to_call(device: str, num_ranks: int) -> None:
    run_ranks(many_shapes, num_ranks)


def one_empty_rank(rank: int, num_ranks: int) -> None:
    case = Case()
    buffer = make_buffer(num_ranks, case)
    for empty in range(num_ranks):
        every = [inputs(one, num_ranks, case._replace(num_tokens=0 if one == empty else 8)) for one in range(num_ranks)]
        want = reference.low_latency_dispatch(
            [one.x for one in every], [one.topk_idx for one in every], 8, case.experts_per_rank * num_ranks
        )
        got = dispatch(buffer, every[rank], case, use_fp8=False)
        rows = experts_rows(check_dispatch(got, want[rank], {"use_fp8": False}), rank)
        combined, *_ = buffer.low_latency_combine(rows, every[rank].topk_idx, every[rank].topk_weights, got[2])
        check_combine(combined, every, want, {"use_fp8": False}, rank)
    buffer.destroy()


def test_one_rank_without_tokens(device: str) -> None:
    run_ranks(one_empty_rank, 3)


def special_values(rank: int, num_ranks: int) -> None:
    case = Case(hidden=256, max_tokens=8, num_tokens=8)
    buffer = make_buffer(num_ranks, case)
    every = [inputs(one, num_ranks, case) for one in range(num_ranks)]
    for one in every:
        one.x[0, 3], one.x[1, 130], one.x[2, 0] = float("nan"), float("inf"), 3e38
        one.x[3], one.x[4] = 0.0, 1e-6
        one.topk_weights[5] = float("inf")
    for form in FORMS:
        sent, scales = expected_rows([one.x for one in every], form)
        want = reference.low_latency_dispatch(
            sent, [one.topk_idx for one in every], 8, case.experts_per_rank * num_ranks, scales
        )
        got = dispatch(buffer, every[rank], case, **form)
        check_dispatch(got, want[rank], form)
    given = every[rank]
    given.topk_idx.fill_(-1)
    got = dispatch(buffer, given, case)
    x = torch.full((case.experts_per_rank, 8 * num_ranks, 256), float("nan"), dtype=torch.bfloat16)
    combined, *_ = buffer.low_latency_combine(x, given.topk_idx, given.topk_weights, got[2])
    assert torch.equal(combined, torch.zeros_like(combined))  # nothing selected: zeros, whatever the weights
    buffer.destroy()


def test_special_values(device: str) -> None:
    run_ranks(special_values, 2)


@pytest.mark.parametrize("hidden", [7, 130, 512, 1024, 1664])
def test_logfmt_keeps_values_close(hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x = (torch.rand(6, hidden, generator=generator) - 0.5).bfloat16()
    x[1, -1] = 1.0  # the last unit cannot be compressed
    x[2] = 0.0
    x[3, 0] = 0.0
    x[4, -1] = -1e-30  # too small to be kept
    units, ranges = logfmt.encode(x)
    back = logfmt.decode(units, ranges, hidden)
    assert ranges.shape == (6, -(-hidden // 128), 2)
    assert torch.equal(ranges[0, 0, 0], x[0, :128].abs().max())
    first = (hidden - 1) // logfmt.unit_channels(hidden) * logfmt.unit_channels(hidden)
    assert torch.equal(back[1, first:], x[1, first:].float())
    assert torch.equal(back[2], x[2].float())
    assert back[3, 0] == 0.0
    assert back[4, -1] == 0.0
    assert torch.allclose(back, x.float(), rtol=4e-2, atol=1e-4)
    assert torch.equal(units[1, 2 * first :].view(torch.bfloat16), x[1, first:])


@pytest.mark.parametrize("hidden", [7, 130, 512, 1024, 1664])
def test_packed_logfmt_is_the_same(hidden: int) -> None:
    generator = torch.Generator().manual_seed(hidden)
    x = (torch.rand(6, hidden, generator=generator) - 0.5).bfloat16()
    x[1, -1], x[2], x[3, 0] = 1.0, 0.0, 3.0  # units that are not compressed
    units, ranges = logfmt.encode(x)
    packed = logfmt.pack_units(units, ranges)
    assert packed.numel() < units.numel()
    slots = torch.zeros(6, 2 * hidden + 16, dtype=torch.uint8)
    logfmt.unpack_units(packed, ranges, slots[:, : 2 * hidden])
    back = slots[:, : 2 * hidden].contiguous()
    assert torch.equal(logfmt.decode(back, ranges, hidden), logfmt.decode(units, ranges, hidden))
    for wrong in (packed[:-1], torch.cat([packed, packed[:1]])):
        with pytest.raises(ValueError, match="bytes of packed units"):
            logfmt.unpack_units(wrong, ranges, slots[:, : 2 * hidden])


# The chain of calls --------------------------------------------------------------------------------------------------


def mixed_modes(rank: int, num_ranks: int) -> None:
    case = Case()
    buffer = make_buffer(num_ranks, case)
    for index in range(4):
        one_call(buffer, rank, num_ranks, case._replace(seed=index), FORMS[index])
        given = inputs(rank, num_ranks, case)
        topk_idx = given.topk_idx.clamp(max=case.experts_per_rank * num_ranks - 1)
        got = dispatch(buffer, given, case, use_fp8=False, return_recv_hook=index % 2 == 0)
        layout = buffer.get_dispatch_layout(topk_idx, case.experts_per_rank * num_ranks)
        recv_x, *_, normal_handle, _ = buffer.dispatch(
            given.x,
            num_tokens_per_rank=layout[0],
            num_tokens_per_rdma_rank=layout[1],
            is_token_in_rank=layout[3],
            num_tokens_per_expert=layout[2],
            topk_idx=topk_idx,
            topk_weights=given.topk_weights,
        )
        if got[4] is not None:
            got[4]()
        back, *_ = buffer.combine(recv_x, normal_handle)
        times = layout[3].sum(1, keepdim=True)
        assert torch.equal(back.float(), given.x.float() * times)
        rows = got[0].clone()
        combined, *_ = buffer.low_latency_combine(rows, given.topk_idx, given.topk_weights, got[2])
        valid = (given.topk_idx >= 0) & (given.topk_idx < case.experts_per_rank * num_ranks)
        total = (given.topk_weights * valid).sum(1, keepdim=True)
        assert torch.equal(combined, (given.x.float() * total).bfloat16())
        buffer.clean_low_latency_buffer(case.max_tokens, case.hidden, case.experts_per_rank * num_ranks)
    buffer.destroy()


def test_normal_calls_and_barriers_in_between(device: str) -> None:
    run_ranks(mixed_modes, 3)


def hooks_in_flight(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    case, form = Case(), {"use_fp8": False}
    buffer = make_buffer(num_ranks, case)
    num_experts, seeds = case.experts_per_rank * num_ranks, range(6)
    every = [[inputs(one, num_ranks, case._replace(seed=seed)) for one in range(num_ranks)] for seed in seeds]
    want = [
        reference.low_latency_dispatch([one.x for one in them], [one.topk_idx for one in them], 8, num_experts)
        for them in every
    ]
    errors = []
    for pair in ((0, 1), (2, 3)):
        got = {i: dispatch(buffer, every[i][rank], case, use_fp8=False, return_recv_hook=True) for i in pair}
        errors = [error_of(dispatch, buffer, every[4][rank], case, use_fp8=False, return_recv_hook=True)]
        for index in reversed(pair):  # in any order
            got[index][4]()
        errors.append(error_of(got[pair[0]][4]))
        for index in pair:
            check_dispatch(got[index], want[index][rank], form)
    first = dispatch(buffer, every[4][rank], case, use_fp8=False, return_recv_hook=True)
    second = dispatch(buffer, every[5][rank], case, use_fp8=False, return_recv_hook=True)
    second[4]()
    first[4]()
    check_dispatch(second, want[5][rank], form)
    rows = experts_rows(check_dispatch(first, want[4][rank], form), rank)
    mine = every[4][rank]
    combined, _, hook = buffer.low_latency_combine(
        rows, mine.topk_idx, mine.topk_weights, first[2], return_recv_hook=True
    )
    hook()
    check_combine(combined, every[4], want[4], form, rank)
    buffer.destroy()
    return errors


def hook_after_destroy(rank: int, num_ranks: int) -> tuple[str, str]:
    buffer = make_buffer(num_ranks, Case())
    hook = dispatch(buffer, inputs(rank, num_ranks, Case()), Case(), return_recv_hook=True)[-1]
    dist.barrier()  # all have sent
    buffer.destroy()
    return error_of(hook)


def test_a_hook_of_a_destroyed_buffer_raises(device: str) -> None:
    for kind, text in run_ranks(hook_after_destroy, 2):
        assert kind == "EPClosed"
        assert "low-latency hook: the buffer was destroyed" in text


def test_two_results_in_flight_in_any_order(device: str) -> None:
    for (too_many, text), (twice, again) in run_ranks(hooks_in_flight, 3):
        assert too_many == "EPError"
        assert "3 results would be in flight, the window has room for 2" in text
        assert twice == "EPError"
        assert "once" in again


def one_too_many(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    case = Case()
    buffer, given = make_buffer(num_ranks, case), inputs(rank, num_ranks, case)
    got = dispatch(buffer, given, case, use_fp8=False)
    rows = got[0].clone()
    mine = (given.topk_idx, given.topk_weights, got[2])
    sent = [buffer.low_latency_combine(rows, *mine, return_recv_hook=True) for _ in range(2)]
    errors = [error_of(buffer.low_latency_combine, rows, *mine, return_recv_hook=True)]
    for _, _, hook in sent:
        hook()
    # Three combines in a row took all slots; whoever has only received the first may not send a fourth.
    sent += [buffer.low_latency_combine(rows, *mine, return_recv_hook=True)]
    errors.append(error_of(buffer.low_latency_combine, rows, *mine, return_recv_hook=True))
    sent[2][2]()
    sent += [buffer.low_latency_combine(rows, *mine)]
    for combined, *_ in sent:
        assert torch.equal(combined, sent[0][0])
    one_call(buffer, rank, num_ranks, case, FORMS[1])
    buffer.destroy()
    return errors


def test_one_result_too_many_raises_and_nothing_is_lost(device: str) -> None:
    for (kind, text), (again, reason) in run_ranks(one_too_many, 2):
        assert kind == again == "EPError"
        assert "3 results would be in flight, the window has room for 2" in text
        assert (
            "2 results would be in flight, the window has room for 1, since the calls before took its 3 slots" in reason
        )


def queued_calls(rank: int, num_ranks: int) -> None:
    case = Case()
    buffer = make_buffer(num_ranks, case)
    given = inputs(rank, num_ranks, case)
    want, *_ = buffer.low_latency_combine(
        (got := dispatch(buffer, given, case, use_fp8=False))[0].clone(), given.topk_idx, given.topk_weights, got[2]
    )
    results = []
    for _ in range(5):
        recv_x, _, handle, event, _ = dispatch(buffer, given, case, use_fp8=False, async_finish=True)
        combined, after, _ = buffer.low_latency_combine(
            recv_x, given.topk_idx, given.topk_weights, handle, async_finish=True
        )
        results.append((combined, event, after))
    for combined, event, after in results:
        event.current_stream_wait()
        after.current_stream_wait()
        assert torch.equal(combined, want)
    buffer.destroy()


def test_calls_queued_behind_each_other(device: str) -> None:
    run_ranks(queued_calls, 3)


# Zero copy -----------------------------------------------------------------------------------------------------------


def two_zero_copies(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    form, errors = {"use_fp8": False}, []
    cases = [Case(seed=one) for one in range(3)]
    buffer = make_buffer(num_ranks, *cases)
    every = [[inputs(one, num_ranks, case) for one in range(num_ranks)] for case in cases]
    num_experts = cases[0].experts_per_rank * num_ranks
    want = [
        reference.low_latency_dispatch([one.x for one in them], [one.topk_idx for one in them], 8, num_experts)
        for them in every
    ]
    for _ in range(3):
        got = [dispatch(buffer, them[rank], case, **form) for them, case in zip(every, cases, strict=True)]
        rows = [experts_rows(check_dispatch(one, then[rank], form), rank) for one, then in zip(got, want, strict=True)]
        rooms = [buffer.get_next_low_latency_combine_buffer(one[2]) for one in got[:2]]
        assert buffer.get_next_low_latency_combine_buffer(got[0][2]).data_ptr() == rooms[0].data_ptr()
        assert rooms[0].stride(1) * 2 == 528  # 256 channels of 2 bytes and 4 for each 128, in steps of 16
        errors.append(error_of(buffer.get_next_low_latency_combine_buffer, got[2][2]))
        for index in (1, 0):
            rooms[index].copy_(rows[index])
            mine = every[index][rank]
            combined, *_ = buffer.low_latency_combine(
                rooms[index], mine.topk_idx, mine.topk_weights, got[index][2], zero_copy=True
            )
            check_combine(combined, every[index], want[index], form, rank)
        mine = every[0][rank]
        errors.append(
            error_of(buffer.low_latency_combine, rows[0], mine.topk_idx, mine.topk_weights, got[0][2], zero_copy=True)
        )
    buffer.destroy()
    return errors


def test_two_zero_copy_tensors_at_once(device: str) -> None:
    for errors in run_ranks(two_zero_copies, 2):
        for (kind, text), (again, reason) in zip(errors[::2], errors[1::2], strict=True):
            assert kind == again == "EPError"
            assert "all 2 buffers belong to handles" in text
            assert "get_next_low_latency_combine_buffer" in reason


def little_memory(rank: int, num_ranks: int) -> tuple[int, int]:
    case = Case(experts_per_rank=32, max_tokens=128, hidden=1024, num_tokens=6)
    buffer = make_buffer(num_ranks, case)
    for index, combine in enumerate([*COMBINES, *COMBINES]):
        one_call(buffer, rank, num_ranks, case._replace(seed=index), FORMS[index % 4], **combine)
    memory = buffer._engine.window.low_latency._memory
    taken = os.fstat(memory.fd).st_blocks * 512
    buffer.destroy()
    return buffer.num_rdma_bytes, taken


@pytest.mark.cpu_only
def test_only_what_is_used_is_taken(device: str) -> None:
    for reserved, taken in run_ranks(little_memory, 2):
        assert reserved > 60 << 20
        # The zero-copy tensor alone has 2 MB of each of 32 experts; its rows are all written by this test.
        assert taken < 48 << 20


# Wrong calls ---------------------------------------------------------------------------------------------------------


def wrong_arguments(rank: int, num_ranks: int) -> dict[str, tuple[str, str]]:
    case = Case()
    buffer, given = make_buffer(num_ranks, case), inputs(rank, num_ranks, case)
    plain = deep_ep.Buffer(dist.group.WORLD, explicitly_destroy=True)
    num_experts = case.experts_per_rank * num_ranks
    got = dispatch(buffer, given, case, use_fp8=False)
    rows, mine = got[0].clone(), (given.topk_idx, given.topk_weights)
    send, back = buffer.low_latency_dispatch, buffer.low_latency_combine
    many = Given(given.x.repeat(9, 1), given.topk_idx.repeat(9, 1), given.topk_weights.repeat(9, 1))
    errors = {
        "tokens": error_of(dispatch, buffer, many, case),
        "size": error_of(send, given.x, given.topk_idx, 800, num_experts),
        "combine size": error_of(back, rows, *mine, (got[2][0], got[2][1], 800, case.hidden, num_experts)),
        "experts": error_of(send, given.x, given.topk_idx, 8, num_experts + 1),
        "dtype": error_of(send, given.x.float(), given.topk_idx, 8, num_experts),
        "list": error_of(send, given.x.tolist(), given.topk_idx, 8, num_experts),
        "listed": error_of(back, rows, *mine, (*got[2][:2], [8], *got[2][3:])),
        "ue8m0": error_of(dispatch, buffer, given, case, use_ue8m0=True),
        "both": error_of(dispatch, buffer, given, case, async_finish=True, return_recv_hook=True),
        "stats": error_of(dispatch, buffer, given, case, cumulative_local_expert_recv_stats=torch.zeros(1)),
        "handle": error_of(back, rows, *mine, got[2][:4]),
        "rows": error_of(back, rows[:, :-1], *mine, got[2]),
        "out": error_of(back, rows, *mine, got[2], out=torch.zeros(1, 2).bfloat16()),
        "logfmt": error_of(back, rows, *mine, got[2], use_logfmt=True, zero_copy=True),
        "mode": error_of(dispatch, plain, given, case),
        "mask": error_of(buffer.low_latency_clean_mask_buffer),
    }
    one_call(buffer, rank, num_ranks, case, FORMS[0])  # nothing was sent
    buffer.destroy()
    plain.destroy()
    return errors


WRONG = {
    "tokens": ("ValueError", "at most num_max_dispatch_tokens_per_rank=8 tokens can be sent, there are "),
    "size": ("ValueError", "num_rdma_bytes="),
    "combine size": ("ValueError", ""),
    "experts": ("ValueError", ""),
    "dtype": ("ValueError", ""),
    "list": ("TypeError", "`x` must be a tensor, got list"),
    "listed": ("TypeError", "must be an integer, got [8] (list)"),
    "ue8m0": ("ValueError", "round_scale=True"),
    "both": ("AssertionError", "exclude each other"),
    "stats": ("ValueError", "cumulative_local_expert_recv_stats"),
    "handle": ("ValueError", "5 items"),
    "rows": ("ValueError", "x"),
    "out": ("ValueError", "out"),
    "logfmt": ("AssertionError", "exclude each other"),
    "mode": ("ValueError", "low_latency_mode=True"),
    "mask": ("ValueError", "enable_shrink=True"),
}


def test_wrong_arguments_raise_and_send_nothing(device: str) -> None:
    for errors in run_ranks(wrong_arguments, 2):
        for name, (kind, part) in WRONG.items():
            assert errors[name][0] == kind, (name, errors[name])
            assert part in errors[name][1], (name, errors[name])
        text = errors["size"][1]  # both numbers: what is needed, and what is there
        needed, there = (int(text.split(mark)[1].split()[0].strip(",.")) for mark in ("num_rdma_bytes=", "buffer has "))
        assert needed > there > 0


def disagree(rank: int, num_ranks: int, how: str) -> tuple[str, str]:
    case = Case(num_tokens=4)
    buffer, given = make_buffer(num_ranks, case, times=4), inputs(rank, num_ranks, case)
    got = dispatch(buffer, given, case, use_fp8=False)
    odd, num_experts = rank == num_ranks - 1, case.experts_per_rank * num_ranks

    def call() -> None:
        if how == "operation" and odd:
            buffer.low_latency_combine(got[0], given.topk_idx, given.topk_weights, got[2])
        elif how == "experts" and odd:
            buffer.low_latency_dispatch(given.x, given.topk_idx, case.max_tokens, 2 * num_experts, use_fp8=False)
        elif how == "hidden" and odd:
            dispatch(buffer, given._replace(x=given.x[:, :200].contiguous()), case, use_fp8=False)
        elif how == "most tokens" and odd:
            dispatch(buffer, given, case._replace(max_tokens=9), use_fp8=False)
        elif how == "top-k" and odd:
            dispatch(buffer, given._replace(topk_idx=given.topk_idx[:, :2].contiguous()), case, use_fp8=False)
        elif how == "dtype" and odd:
            dispatch(buffer, given, case)
        elif how == "ids" and odd:
            dispatch(buffer, given._replace(topk_idx=given.topk_idx.int()), case, use_fp8=False)
        else:
            dispatch(buffer, given, case, use_fp8=False)
        buffer.check()

    error = error_of(call)
    assert error_of(dispatch, buffer, given, case)[0] == "EPClosed"
    return error


DIFFERENCES = {
    "operation": "low-latency combine, not low-latency dispatch",
    "experts": "num_experts 18 not 9",
    "hidden": "hidden 200 not 256",
    "most tokens": "num_max_dispatch_tokens_per_rank 9 not 8",
    "top-k": "num_topk 2 not 3",
    "dtype": "dtype torch.float8_e4m3fn not torch.bfloat16",
    "ids": "idx_dtype torch.int32 not torch.int64",
}


@pytest.mark.parametrize(
    "how", [pytest.param(how, marks=pytest.mark.cpu_only if how == "ids" else ()) for how in DIFFERENCES]
)
def test_ranks_that_disagree_all_raise(device: str, how: str) -> None:
    results = run_ranks(disagree, 3, how)
    assert all(kind in ("EPError", "EPPeerFailed") for kind, _ in results), results
    word = DIFFERENCES[how].split()[0]
    assert all("all ranks must make the same call" in text and word in text for _, text in results), results
    assert all(f"rank 2 has {DIFFERENCES[how]}" in text and "rank 0 has" not in text for _, text in results), results
