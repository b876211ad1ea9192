"""The GPU's low-latency engine on CPU ranks: kernels in Triton's interpreter, across real processes. It is slow."""

from __future__ import annotations

import itertools
import warnings
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from low_latency import (
    Case,
    Given,
    check_dispatch,
    dispatch,
    expected_rows,
    experts_rows,
    finish,
    inputs,
    make_buffer,
)

import deep_ep
from common import error_of, layout_of, run_ranks
from deep_ep import logfmt, quant, reference
from deep_ep.kernels import _triton

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(not _triton.INTERPRETED, reason="Triton is not there, or not in its interpreter's mode"),
]

INTERPRETED = {"DEEP_EP_TRANSPORT": "interpreted", "DEEP_EP_DEVICE": "cpu"}
LIMIT_SECS = 3.0
SMALL = Case(experts_per_rank=2, max_tokens=3, hidden=136, topk=2)
BF16 = {"use_fp8": False}

FORMS: list[dict[str, bool]] = [
    BF16,
    {"use_fp8": True},
    {"use_fp8": True, "round_scale": True},
    {"use_fp8": True, "round_scale": True, "use_ue8m0": True},
]
WAYS = [{}, {"is_async": True}, {"has_hook": True}]
COMBINES = [{}, {"zero_copy": True}, {"use_logfmt": True}]
IDS = [torch.int64, torch.int32]


class Round:
    """All ranks' inputs of a dispatch and its combine, and what the oracle makes of them."""

    def __init__(
        self,
        rank: int,
        num_ranks: int,
        case: Case = SMALL,
        form: dict[str, bool] = BF16,
        masked: list[set[int]] | None = None,
    ):
        self.rank, self.case, self.form, self.masked = rank, case, form, masked
        self.every = [inputs(one, num_ranks, case) for one in range(num_ranks)]
        sent, scales = expected_rows([one.x for one in self.every], form)
        ids, num_experts = [one.topk_idx for one in self.every], case.experts_per_rank * num_ranks
        self.want = reference.low_latency_dispatch(sent, ids, case.max_tokens, num_experts, scales, masked)

    @property
    def mine(self) -> Given:
        return self.every[self.rank]

    def dispatch(self, buffer: deep_ep.Buffer, **more: Any) -> tuple:
        return dispatch(buffer, self.mine, self.case, **self.form, **more)

    def rows(self, got: tuple) -> torch.Tensor:
        """What this rank's experts make of what came, which is checked."""
        return experts_rows(check_dispatch(got, self.want[self.rank], self.form), self.rank)

    def combine(self, buffer: deep_ep.Buffer, rows: torch.Tensor, handle: tuple, **more: Any) -> tuple:
        return buffer.low_latency_combine(rows, self.mine.topk_idx, self.mine.topk_weights, handle, **more)

    def check(self, combined: torch.Tensor) -> None:
        """To the bit: rows hold a few small numbers, so that sums of them are exact, and LogFMT leaves them alone."""
        ys = []
        for rank, received in enumerate(self.want):
            rows = received.recv_x
            if received.recv_scales is not None:
                rows = quant.per_token_cast_back(rows, received.recv_scales)
            ys.append(experts_rows(rows, rank))
        ids, weights = [one.topk_idx for one in self.every], [one.topk_weights for one in self.every]
        assert torch.equal(combined, reference.low_latency_combine(ys, ids, weights, self.want, self.masked)[self.rank])

    def go(self, buffer: deep_ep.Buffer, **more: Any) -> None:
        """Dispatch and combine."""
        got = self.dispatch(buffer)
        combined, *_ = self.combine(buffer, self.rows(got), got[2], **more)
        self.check(combined)


# Flags ---------------------------------------------------------------------------------------------------------------


class Flags(NamedTuple):
    form: int
    way: int
    combine: int
    ids: int


# Twelve calls, in which each two of the four choices meet in every way.
CALLS = [Flags(form, way, (form + way) % 3, (form + way) % 2) for form, way in itertools.product(range(4), range(3))]


def test_each_pair_of_flags_is_there() -> None:
    sizes = Flags(len(FORMS), len(WAYS), len(COMBINES), len(IDS))
    for one, other in itertools.combinations(range(4), 2):
        assert len({(call[one], call[other]) for call in CALLS}) == sizes[one] * sizes[other]


def flags(rank: int, num_ranks: int) -> None:
    small = SMALL if num_ranks == 2 else SMALL._replace(experts_per_rank=1)
    buffer = make_buffer(num_ranks, small)
    assert buffer.transport.split()[0] in ("interpreted", "nvshmem")  # the latter is a stand-in
    for seed, flags in enumerate(CALLS):
        case = small._replace(seed=seed, idx_dtype=IDS[flags.ids])
        this, way, how = Round(rank, num_ranks, case, FORMS[flags.form]), WAYS[flags.way], COMBINES[flags.combine]
        is_async, has_hook = way.get("is_async", False), way.get("has_hook", False)
        waits = torch.zeros(num_ranks, dtype=torch.int64)
        stats = torch.ones(case.experts_per_rank, dtype=torch.int32)
        got = this.dispatch(
            buffer,
            async_finish=is_async,
            return_recv_hook=has_hook,
            cumulative_local_expert_recv_stats=stats,
            dispatch_wait_recv_cost_stats=waits if seed % 2 else None,
        )
        finish(got[3], got[4], is_async, has_hook)
        rows = x = this.rows(got)
        assert torch.equal(stats, this.want[rank].recv_count + 1)
        if how.get("zero_copy"):
            x = buffer.get_next_low_latency_combine_buffer(got[2]).copy_(rows)
        out = torch.full((this.mine.x.size(0), case.hidden), 7.0).bfloat16() if seed % 3 == 0 else None
        combined, event, hook = this.combine(
            buffer, x, got[2], **how, async_finish=is_async, return_recv_hook=has_hook, out=out,
            combine_wait_recv_cost_stats=waits if seed % 2 else None,
        )  # fmt: skip
        finish(event, hook, is_async, has_hook)
        assert out is None or combined is out
        assert (waits >= 0).all()
        this.check(combined)
    buffer.check()
    buffer.destroy()


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_calls_with_each_pair_of_flags(num_ranks: int) -> None:
    run_ranks(flags, num_ranks, env=INTERPRETED)


def compressed(rank: int, num_ranks: int) -> None:
    """Values below 1: LogFMT is lossy, and what comes is what the codes of the twin say, or next to it."""
    case = SMALL._replace(hidden=640, kind="noise", topk=1)
    buffer, this = make_buffer(num_ranks, case), Round(rank, num_ranks, case)
    got = this.dispatch(buffer)
    combined, *_ = this.combine(buffer, this.rows(got), got[2], use_logfmt=True)
    for token, expert in enumerate(this.mine.topk_idx[:, 0].tolist()):
        row = torch.zeros(case.hidden)
        if 0 <= expert < case.experts_per_rank * num_ranks:
            y = this.mine.x[token] * (1 + expert % 3)
            row = logfmt.decode(*logfmt.encode(y[None]), case.hidden)[0] * this.mine.topk_weights[token, 0]
        assert torch.allclose(combined[token].float(), row, rtol=3e-2, atol=1e-6)
    buffer.destroy()


def test_compressed_rows_are_close() -> None:
    run_ranks(compressed, 2, env=INTERPRETED)


# The chain of calls --------------------------------------------------------------------------------------------------


def hooks(buffer: deep_ep.Buffer, rank: int, num_ranks: int) -> None:
    """Two in flight, received the other way round; one too many; one twice."""
    first, second = (Round(rank, num_ranks, SMALL._replace(seed=seed)) for seed in range(2))
    got = [one.dispatch(buffer, return_recv_hook=True) for one in (first, second)]
    got[1][4]()
    got[0][4]()
    with pytest.raises(deep_ep.EPError, match="called once"):
        got[1][4]()
    rows = [first.rows(got[0]), second.rows(got[1])]
    buffer.clean_low_latency_buffer(SMALL.max_tokens, SMALL.hidden, SMALL.experts_per_rank * num_ranks)
    sent = [
        one.combine(buffer, mine, each[2], return_recv_hook=True)
        for one, mine, each in zip((first, second), rows, got, strict=True)
    ]
    with pytest.raises(deep_ep.EPError, match="3 results would be in flight, the window has room for 2"):
        second.combine(buffer, rows[1], got[1][2])
    for one, (combined, _, hook) in reversed(list(zip((first, second), sent, strict=True))):
        hook()
        one.check(combined)


def sizes(buffer: deep_ep.Buffer, rank: int, num_ranks: int) -> None:
    """From call to call another M, H, K or E; ranks without tokens."""
    cases = [
        SMALL._replace(max_tokens=1, seed=3),
        SMALL._replace(hidden=7, topk=1, seed=4),
        SMALL._replace(max_tokens=2, num_tokens=0),
        SMALL._replace(max_tokens=2, experts_per_rank=1, topk=5, seed=5),
        SMALL._replace(kind="nothing"),
    ]
    for index, case in enumerate(cases):
        Round(rank, num_ranks, case, FORMS[index % 4]).go(buffer)


def zero_copies(buffer: deep_ep.Buffer, rank: int, num_ranks: int) -> None:
    rounds = [Round(rank, num_ranks, SMALL._replace(seed=seed)) for seed in (6, 7)]
    for _ in range(2):
        got = [one.dispatch(buffer) for one in rounds]
        rooms = [buffer.get_next_low_latency_combine_buffer(each[2]) for each in got]
        assert rooms[0].data_ptr() != rooms[1].data_ptr()
        for one, each, room in zip(rounds, got, rooms, strict=True):
            room.copy_(one.rows(each))
        unread = torch.full_like(rooms[0], float("nan"), memory_format=torch.contiguous_format)
        more = rounds[1].dispatch(buffer, return_recv_hook=True)
        combined, _, hook = rounds[1].combine(buffer, unread, got[1][2], zero_copy=True, return_recv_hook=True)
        with pytest.raises(deep_ep.EPError, match="would be in flight"):
            rounds[0].combine(buffer, unread, got[0][2], zero_copy=True)
        more[4]()
        hook()
        rounds[1].check(combined)
        combined, *_ = rounds[0].combine(buffer, unread, got[0][2], zero_copy=True)  # refused before, and not lost
        rounds[0].check(combined)
        buffer.clean_low_latency_buffer(SMALL.max_tokens, SMALL.hidden, SMALL.experts_per_rank * num_ranks)


def mixed(buffer: deep_ep.Buffer, rank: int, num_ranks: int) -> None:
    """A normal dispatch and combine while a low-latency result is in flight."""
    this = Round(rank, num_ranks, SMALL._replace(seed=8))
    got = this.dispatch(buffer, return_recv_hook=True)
    num_experts = SMALL.experts_per_rank * num_ranks
    ids = this.mine.topk_idx.clamp(-1, num_experts - 1)
    given = layout_of(buffer, ids, num_experts)
    weights = (
        {"topk_idx": ids, "topk_weights": this.mine.topk_weights}
        if given["num_tokens_per_rdma_rank"] is not None
        else {}
    )
    recv_x, *_, handle, _ = buffer.dispatch(this.mine.x, **given, **weights)
    got[4]()
    combined, _, hook = this.combine(buffer, this.rows(got), got[2], return_recv_hook=True)
    back, *_ = buffer.combine(recv_x, handle)
    assert torch.equal(back.float(), this.mine.x.float() * given["is_token_in_rank"].sum(1, keepdim=True))
    hook()
    this.check(combined)


def chain(rank: int, num_ranks: int) -> None:
    buffer = make_buffer(num_ranks, SMALL)
    for part in (hooks, sizes, zero_copies, mixed):
        part(buffer, rank, num_ranks)
        buffer.check()
    buffer.destroy()


def test_hooks_sizes_zero_copies_and_normal_calls_in_one_chain() -> None:
    run_ranks(chain, 2, env=INTERPRETED)


def two_in_flight(rank: int, num_ranks: int) -> None:
    buffer = make_buffer(num_ranks, SMALL)
    rounds = [Round(rank, num_ranks, SMALL._replace(seed=seed, max_tokens=2)) for seed in range(5)]
    got = [one.dispatch(buffer, return_recv_hook=True) for one in rounds[:2]]
    for number in range(2, 5):
        with pytest.raises(deep_ep.EPError, match="3 results would be in flight, the window has room for 2"):
            rounds[number].dispatch(buffer, return_recv_hook=True)
        got[number - 2][4]()
        got += [rounds[number].dispatch(buffer, return_recv_hook=True)]
    for index in (3, 4) if rank == 0 else (4, 3):  # not even the same on all ranks
        got[index][4]()
    for one, each in zip(rounds, got, strict=True):
        one.rows(each)
    buffer.check()
    buffer.destroy()


def test_two_results_in_flight() -> None:
    run_ranks(two_in_flight, 2, env=INTERPRETED)


def one_between(rank: int, num_ranks: int) -> None:
    """A whole combine between the halves of another: what the halves of one leave each other is its own."""
    buffer = make_buffer(num_ranks, SMALL)
    rounds = [Round(rank, num_ranks, SMALL._replace(seed=seed, max_tokens=2)) for seed in range(2)]
    got = [one.dispatch(buffer) for one in rounds]
    rows = [one.rows(each) for one, each in zip(rounds, got, strict=True)]
    first, _, hook = rounds[0].combine(buffer, rows[0], got[0][2], return_recv_hook=True)
    combined, *_ = rounds[1].combine(buffer, rows[1], got[1][2])
    rounds[1].check(combined)
    hook()
    rounds[0].check(first)
    buffer.destroy()


def test_a_whole_call_between_the_halves_of_others() -> None:
    run_ranks(one_between, 2, env=INTERPRETED)


# Masks, silence, disagreement ----------------------------------------------------------------------------------------


def mask_of(buffer: deep_ep.Buffer) -> list[int]:
    status = torch.full((buffer.group_size,), -1, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def masks(rank: int, num_ranks: int) -> list[str]:
    """Masks of the caller first; then rank 1 stays silent."""
    buffer = make_buffer(num_ranks, SMALL, enable_shrink=True)
    masked = [{2}, {2}, {0, 1}]
    for other in masked[rank]:
        buffer.low_latency_update_mask_buffer(other, True)
    assert mask_of(buffer) == [int(one in masked[rank]) for one in range(num_ranks)]
    Round(rank, num_ranks, masked=masked).go(buffer)
    Round(rank, num_ranks, SMALL._replace(seed=1), FORMS[1], masked).go(buffer, use_logfmt=True)
    dist.barrier()
    buffer.low_latency_clean_mask_buffer()
    assert mask_of(buffer) == [0] * num_ranks
    Round(rank, num_ranks, SMALL._replace(seed=2)).go(buffer)
    buffer.destroy()
    buffer = make_buffer(num_ranks, SMALL, enable_shrink=True, limit_secs=LIMIT_SECS)
    Round(rank, num_ranks).go(buffer)
    dist.barrier()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank != 1:
            masked = [{1}] * num_ranks
            Round(rank, num_ranks, SMALL._replace(seed=3), masked=masked).go(buffer)
            waits, this = torch.zeros(num_ranks, dtype=torch.int64), Round(rank, num_ranks, masked=masked)
            this.rows(this.dispatch(buffer, dispatch_wait_recv_cost_stats=waits))
            assert waits[1] == 0, "it is not waited for again"
            assert mask_of(buffer) == [0, 1, 0]
            buffer.clean_low_latency_buffer(SMALL.max_tokens, SMALL.hidden, SMALL.experts_per_rank * num_ranks)
            buffer.check()
    dist.barrier()
    buffer.destroy()
    return [str(one.message) for one in caught if one.category is RuntimeWarning and "rank" in str(one.message)]


def test_masks_of_the_caller_and_of_a_silent_rank() -> None:
    told = run_ranks(masks, 3, env=INTERPRETED)
    for rank in (0, 2):
        (text,) = told[rank]
        assert "rank 1 " in text
        assert "masked" in text
        assert "(call 3)" in text
        assert f"(rank {rank}/3)" in text
    assert told[1] == []


def silence(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    buffer, this = make_buffer(num_ranks, SMALL, limit_secs=LIMIT_SECS), Round(rank, num_ranks)
    this.go(buffer)
    dist.barrier()
    errors = []
    if rank != 1:
        got = this.dispatch(buffer, return_recv_hook=True)  # a send half waits for nothing
        errors = [error_of(lambda: (got[4](), buffer.check())), error_of(this.dispatch, buffer)]
    dist.barrier()
    if rank == 1:  # it comes at last, and is told what has happened
        errors = [error_of(lambda: (this.dispatch(buffer), buffer.check()))]
    buffer.destroy()
    return errors


def test_a_silent_rank_is_named_at_the_limit_without_shrink() -> None:
    for rank, errors in enumerate(run_ranks(silence, 3, env=INTERPRETED)):
        assert errors[0][0] == "EPTimeout"
        assert "from rank 1 " in errors[0][1], errors[0]
        assert f"after {LIMIT_SECS:g} s" in errors[0][1]
        if rank != 1:
            assert "low-latency dispatch (call 3)" in errors[0][1]
            assert errors[1][0] == "EPClosed"


def disagreements(rank: int, num_ranks: int) -> dict[str, tuple[str, str]]:
    """One rank makes another call than the others: a new buffer for each way to differ."""
    odd, errors = rank == 1, {}
    for how in DIFFERENCES:
        buffer, this = make_buffer(num_ranks, SMALL, times=2), Round(rank, num_ranks)
        got, mine = this.dispatch(buffer), this.mine

        def call(how: str = how, buffer: Any = buffer, this: Round = this, got: tuple = got, mine: Any = mine) -> None:
            if how == "combine" and odd:
                this.combine(buffer, got[0], got[2])
            elif how == "barrier" and odd:
                buffer.clean_low_latency_buffer(SMALL.max_tokens, SMALL.hidden, SMALL.experts_per_rank * num_ranks)
            elif how == "most tokens" and odd:
                dispatch(buffer, mine, SMALL._replace(max_tokens=4), **BF16)
            elif how == "top-k" and odd:
                dispatch(buffer, mine._replace(topk_idx=mine.topk_idx[:, :1].contiguous()), SMALL, **BF16)
            elif how == "dtype" and odd:
                dispatch(buffer, mine, SMALL)
            elif how == "logfmt":
                this.combine(buffer, got[0], got[2], use_logfmt=odd)
            else:
                this.dispatch(buffer)
            buffer.check()

        errors[how] = error_of(call)
        assert error_of(this.dispatch, buffer)[0] == "EPClosed"
        dist.barrier()
        buffer.destroy()
    return errors


DIFFERENCES = {
    "combine": "low-latency combine",
    "barrier": "low-latency barrier",
    "most tokens": "num_max_dispatch_tokens_per_rank",
    "top-k": "num_topk",
    "dtype": "dtype",
    "logfmt": "",
}


def test_ranks_that_disagree_all_raise_and_say_who_and_what() -> None:
    for errors in run_ranks(disagreements, 3, env=INTERPRETED):
        for how, word in DIFFERENCES.items():
            kind, text = errors[how]
            assert kind == "EPError", (how, kind, text)
            assert "all ranks must make the same call" in text, how
            assert "rank 1" in text
            assert word in text
