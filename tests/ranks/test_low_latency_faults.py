"""Low-latency ranks that are masked, late, stopped, killed or gone."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from low_latency import Case, Given, check_combine, check_dispatch, dispatch, experts_rows, inputs, make_buffer

import deep_ep
from common import error_of, layout_of, run_ranks
from deep_ep import reference

LIMIT_SECS = 3.0  # ranks that take part must not be later than that, on any machine
CASE = Case()
FORM = {"use_fp8": False}
NUM_TOKENS = CASE.max_tokens


class Round:
    """All ranks' inputs of a dispatch and its combine, and what the oracle makes of them under masks."""

    def __init__(self, rank: int, num_ranks: int, seed: int = 0, masked: list[set[int]] | None = None):
        self.rank, self.num_experts = rank, CASE.experts_per_rank * num_ranks
        self.every = [inputs(one, num_ranks, CASE._replace(seed=seed)) for one in range(num_ranks)]
        self.masked = masked

    @property
    def mine(self) -> Given:
        return self.every[self.rank]

    def received(self) -> list[reference.LowLatencyDispatched]:
        ids = [one.topk_idx for one in self.every]
        return reference.low_latency_dispatch(
            [one.x for one in self.every], ids, NUM_TOKENS, self.num_experts, masked=self.masked
        )

    def check_dispatch(self, got: tuple) -> torch.Tensor:
        return experts_rows(check_dispatch(got, self.received()[self.rank], FORM), self.rank)

    def check_combine(self, combined: torch.Tensor, masked: list[set[int]] | None = None) -> None:
        check_combine(combined, self.every, self.received(), FORM, self.rank, masked=masked or self.masked)


def mask_of(buffer: deep_ep.Buffer) -> list[int]:
    status = torch.full((buffer.group_size,), -1, dtype=torch.int32)
    buffer.low_latency_query_mask_buffer(status)
    return status.tolist()


def combine(buffer: deep_ep.Buffer, rows: torch.Tensor, mine: Given, handle: tuple, **more: Any) -> tuple:
    return buffer.low_latency_combine(rows, mine.topk_idx, mine.topk_weights, handle, **more)


def one_round(buffer: deep_ep.Buffer, rank: int, seed: int, masked: list[set[int]] | None = None) -> None:
    this = Round(rank, buffer.group_size, seed, masked)
    got = dispatch(buffer, this.mine, CASE, **FORM)
    combined, *_ = combine(buffer, this.check_dispatch(got), this.mine, got[2])
    this.check_combine(combined)


# Masks of the caller -------------------------------------------------------------------------------------------------


def caller_masks(rank: int, num_ranks: int) -> None:
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True)
    assert mask_of(buffer) == [0] * num_ranks
    one_round(buffer, rank, 0)
    dist.barrier()  # who is masked while it still fetches may find rows overwritten
    # Ranks 0 and 1 do without rank 2, and it without them: the masks of a rank are its own affair.
    masked = [{2}, {2}, {0, 1}]
    for other in masked[rank]:
        buffer.low_latency_update_mask_buffer(other, True)
    assert mask_of(buffer) == [int(one in masked[rank]) for one in range(num_ranks)]
    for seed in (1, 2, 3):
        one_round(buffer, rank, seed, masked)
    buffer.clean_low_latency_buffer(CASE.max_tokens, CASE.hidden, CASE.experts_per_rank * num_ranks)
    dist.barrier()
    for other in masked[rank]:
        buffer.low_latency_update_mask_buffer(other, False)
    one_round(buffer, rank, 4)
    buffer.low_latency_update_mask_buffer((rank + 1) % num_ranks, True)
    buffer.low_latency_clean_mask_buffer()
    assert mask_of(buffer) == [0] * num_ranks
    one_round(buffer, rank, 5)
    assert error_of(buffer.low_latency_update_mask_buffer, num_ranks, True)[0] == "ValueError"
    buffer.destroy()


def test_masks_of_the_caller(device: str) -> None:
    run_ranks(caller_masks, 3)


def one_sided_mask(rank: int, num_ranks: int) -> None:
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True)
    # Rank 1 finds that rank 0 does without it, and does without rank 0. To rank 2 that is nothing.
    this = Round(rank, num_ranks, 0, [{1}, {0}, set()])
    if rank == 0:
        buffer.low_latency_update_mask_buffer(1, True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = dispatch(buffer, this.mine, CASE, **FORM)
        combined, *_ = combine(buffer, this.check_dispatch(got), this.mine, got[2])
    this.check_combine(combined)
    assert mask_of(buffer) == [int(one in this.masked[rank]) for one in range(num_ranks)]
    texts = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert len(texts) == (rank == 1), texts
    assert all("rank 0, which has masked this rank: they are out of step" in text for text in texts)
    buffer.destroy()


@pytest.mark.cpu_only
def test_a_mask_of_one_side_only(device: str) -> None:
    run_ranks(one_sided_mask, 3)


def all_masked(rank: int, num_ranks: int) -> None:
    """Every rank does without all others, and, in the second round, without itself."""
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True)
    masked = [{one for one in range(num_ranks) if one != me} for me in range(num_ranks)]
    for round_number in range(2):
        for other in masked[rank]:
            buffer.low_latency_update_mask_buffer(other, True)
        one_round(buffer, rank, round_number, masked)
        masked = [set(range(num_ranks))] * num_ranks
    buffer.destroy()


@pytest.mark.cpu_only
@pytest.mark.parametrize("env", [{}, {"DEEP_EP_RANKS_PER_NODE": "1"}], ids=["one node", "2x1"])
def test_ranks_that_do_without_all_others(device: str, env: dict[str, str]) -> None:
    run_ranks(all_masked, 2, env=env)


def other_ids(rank: int, num_ranks: int) -> tuple[str, str]:
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True)
    this = Round(rank, num_ranks, 0)
    got = dispatch(buffer, this.mine, CASE, **FORM)
    given = this.mine
    if rank == 0:
        given = given._replace(topk_idx=torch.zeros_like(given.topk_idx))
    error = error_of(combine, buffer, this.check_dispatch(got), given, got[2])
    dist.barrier()
    return error


@pytest.mark.cpu_only
def test_ids_of_another_dispatch_are_no_lost_rank(device: str) -> None:
    kind, text = run_ranks(other_ids, 2)[0]
    assert kind == "EPError", text
    assert "Pass the `topk_idx` and the handle of one dispatch" in text


def two_kinds(rank: int, num_ranks: int) -> tuple[str, str]:
    """Rank 0 makes a normal call where the others make a low-latency one, after calls whose hooks come in any order."""
    buffer, mine = make_buffer(num_ranks, CASE), inputs(rank, num_ranks, CASE)
    layout = layout_of(buffer, mine.topk_idx, CASE.experts_per_rank * num_ranks)
    for _ in range(20):
        *_, hook = dispatch(buffer, mine, CASE, return_recv_hook=True, **FORM)
        steps = [hook, lambda: buffer.dispatch(mine.x, **layout)]
        for step in steps if rank else reversed(steps):
            step()
    dist.barrier()  # a rank that fails ends the calls of those that are still in the one before
    error = error_of(steps[1] if rank == 0 else lambda: dispatch(buffer, mine, CASE, **FORM))
    buffer.destroy()
    return error


@pytest.mark.cpu_only
def test_a_normal_call_beside_low_latency_calls_is_named() -> None:
    for _, text in run_ranks(two_kinds, 3):
        assert "all ranks must make the same call, but rank 0 has dispatch, not low-latency dispatch" in text


# Silent peers --------------------------------------------------------------------------------------------------------


def silent_peer(rank: int, num_ranks: int, enable_shrink: bool) -> tuple[list[str], list[tuple[str, str]], list[int]]:
    one_round(make_buffer(num_ranks, CASE), rank, 0)  # what a process does only once takes longer
    buffer = make_buffer(num_ranks, CASE, enable_shrink=enable_shrink, limit_secs=LIMIT_SECS)
    one_round(buffer, rank, 1)
    errors, mask = [], [0] * num_ranks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank != 1 and enable_shrink:
            for seed in (2, 3):
                one_round(buffer, rank, seed, [{1}] * num_ranks)
            mask = mask_of(buffer)
        elif rank != 1:
            this = Round(rank, num_ranks, 2)
            for _ in range(2):
                errors.append(error_of(lambda: (dispatch(buffer, this.mine, CASE, **FORM), buffer.check())))
    dist.barrier()
    buffer.destroy()
    return [str(one.message) for one in caught if one.category is RuntimeWarning], errors, mask


def test_a_silent_peer_is_masked_and_told_once(device: str) -> None:
    results = run_ranks(silent_peer, 3, True)
    for rank in (0, 2):
        assert results[rank][2] == [0, 1, 0]
        if device == "cpu":
            (text,) = results[rank][0]
            assert f"low-latency dispatch (call 3): no signal from rank 1 after {LIMIT_SECS:g} s" in text
            assert f"(rank {rank}/3)" in text


def test_a_silent_peer_closes_a_buffer_without_shrink(device: str) -> None:
    results = run_ranks(silent_peer, 3, False)
    for rank in (0, 2):
        (first, text), (second, again) = results[rank][1]
        assert first in ("EPTimeout", "EPPeerFailed")
        assert "low-latency dispatch" in text
        assert f"from rank 1 after {LIMIT_SECS:g} s" in text
        assert second == "EPClosed"
        assert f"from rank 1 after {LIMIT_SECS:g} s" in again


def late_peer(rank: int, num_ranks: int) -> list[int]:
    buffer, this = make_buffer(num_ranks, CASE, enable_shrink=True), Round(rank, num_ranks)
    one_round(buffer, rank, 0)
    waits = torch.zeros(num_ranks, dtype=torch.int64)
    if rank == 1:
        time.sleep(0.6)
    got = dispatch(buffer, this.mine, CASE, dispatch_wait_recv_cost_stats=waits, **FORM)
    if rank == 1:
        time.sleep(0.6)
    combined, *_ = combine(buffer, this.check_dispatch(got), this.mine, got[2], combine_wait_recv_cost_stats=waits)
    this.check_combine(combined)
    assert mask_of(buffer) == [0] * num_ranks
    buffer.destroy()
    return waits.tolist()


@pytest.mark.alone
def test_a_late_peer_is_waited_for_and_accounted(device: str) -> None:
    results = run_ranks(late_peer, 3)
    for punctual in (0, 2):
        waits = results[punctual]
        assert waits[1] > 8e8  # nanoseconds, of two waits
        assert waits[punctual] < 1e8


# Killed peers --------------------------------------------------------------------------------------------------------


def killed_peer(rank: int, num_ranks: int, victim: int, moment: str) -> list[str]:
    """The victim dies at a moment; the others make the calls to their end, and two rounds more."""
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True)
    one_round(buffer, rank, 0)
    told: list[str] = []
    masked = [{victim}] * num_ranks
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        is_victim = rank == victim
        if is_victim and moment == "before sent":
            die_at(buffer, "low-latency dispatch: before sent")
        if is_victim and moment == "before dispatch":
            os.kill(os.getpid(), signal.SIGKILL)
        # Who has sent before it died has sent: its rows are good.
        this = Round(rank, num_ranks, 1, masked if moment in ("before dispatch", "before sent") else None)
        got = dispatch(buffer, this.mine, CASE, return_recv_hook=moment == "before hook", **FORM)
        if is_victim and moment in ("before hook", "between"):
            os.kill(os.getpid(), signal.SIGKILL)
        if got[4] is not None:
            got[4]()
        rows = this.check_dispatch(got)
        if is_victim and moment == "combine sent":
            die_at(buffer, "low-latency combine: before sent")
        combined, *_ = combine(buffer, rows, this.mine, got[2])
        this.check_combine(combined, masked)
        for seed in (2, 3):
            one_round(buffer, rank, seed, masked)
        told = [str(one.message) for one in caught if one.category is RuntimeWarning]
    assert mask_of(buffer) == [int(one == victim) for one in range(num_ranks)]
    buffer.destroy()
    return told


def die_at(buffer: deep_ep.Buffer, point: str) -> None:
    def fault(reached: str) -> None:
        if reached == point:
            os.kill(os.getpid(), signal.SIGKILL)

    buffer.set_fault_hook(fault)


@pytest.mark.parametrize("moment", ["before dispatch", "before sent", "before hook", "between", "combine sent"])
@pytest.mark.cpu_only
def test_the_others_go_on_without_a_killed_rank(device: str, moment: str) -> None:
    victim = {"between": 0, "before hook": 3}.get(moment, 2)
    results = run_ranks(killed_peer, 4, victim, moment, may_die=[victim], limit_secs=40)
    operation = "dispatch (call 3)" if moment in ("before dispatch", "before sent") else "combine (call 4)"
    for rank in {0, 1, 2, 3} - {victim}:
        (text,) = results[rank]
        assert f"low-latency {operation}: no signal from rank {victim}, whose process has ended" in text


def interrupted_peer(rank: int, num_ranks: int, point: str) -> list[str]:
    """Rank 1 is interrupted in a call, and its caller goes on; the others make three rounds without it."""
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True)
    one_round(buffer, rank, 0)
    masked = [{1}] * num_ranks
    if rank == 1:
        buffer.set_fault_hook(interrupt_at(point))
        with pytest.raises(KeyboardInterrupt):
            one_round(buffer, rank, 1)
        assert error_of(one_round, buffer, rank, 2)[0] == "EPClosed"
        dist.barrier()  # its process has not ended, nor is its buffer destroyed
        return []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        # What a rank has sent before it was interrupted is used.
        this = Round(rank, num_ranks, 1, None if "receive" in point else masked)
        got = dispatch(buffer, this.mine, CASE, **FORM)
        combined, *_ = combine(buffer, this.check_dispatch(got), this.mine, got[2])
        this.check_combine(combined, masked)
        one_round(buffer, rank, 2, masked)
        buffer.low_latency_clean_mask_buffer()
        buffer.clean_low_latency_buffer(CASE.max_tokens, CASE.hidden, CASE.experts_per_rank * num_ranks)
        one_round(buffer, rank, 3, masked)
    assert mask_of(buffer) == [int(one == 1) for one in range(num_ranks)]
    dist.barrier()
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


def interrupt_at(point: str) -> Any:
    def fault(reached: str) -> None:
        if reached == point:
            raise KeyboardInterrupt

    return fault


@pytest.mark.parametrize(
    ("point", "env"),
    [("before sent", {}), ("before receive", {}), ("before sent", {"DEEP_EP_RANKS_PER_NODE": "2"})],
    ids=["before sent", "before receive", "nodes"],
)
@pytest.mark.cpu_only
def test_the_others_go_on_without_an_interrupted_rank(device: str, point: str, env: dict[str, str]) -> None:
    results = run_ranks(interrupted_peer, 4, f"low-latency dispatch: {point}", env=env, limit_secs=40)
    for rank in (0, 2, 3):
        first, again = results[rank]
        if (
            "or word that it has gone, at rank" not in first
        ):  # a rank of the other node, which was the first to learn it
            assert "no signal from rank 1, which has failed (rank 1 failed: low-latency dispatch (call 3)" in first
            assert "KeyboardInterrupt" in first
        assert "no signal from rank 1, which has failed" in again


def warned(rank: int, num_ranks: int) -> list[str]:
    """Warnings are errors, and rank 1 leaves. Returns what is logged."""
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True)
    dist.barrier()
    if rank == 1:
        buffer.destroy()
        return []
    texts: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("deep_ep").addHandler(handler)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one_round(buffer, rank, 0, [{1}, {1}])
    assert mask_of(buffer) == [0, 1]
    buffer.destroy()
    return texts


@pytest.mark.cpu_only
def test_a_warning_that_is_an_error_ends_no_call(device: str) -> None:
    (text,), _ = run_ranks(warned, 2)
    assert "no signal from rank 1, which has destroyed its buffer" in text


def killed_without_shrink(rank: int, num_ranks: int, has_hook: bool) -> tuple[str, str]:
    buffer, this = make_buffer(num_ranks, CASE), Round(rank, num_ranks, 1)
    one_round(buffer, rank, 0)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    if not has_hook:
        return error_of(dispatch, buffer, this.mine, CASE, **FORM)
    *_, hook = dispatch(buffer, this.mine, CASE, return_recv_hook=True, **FORM)
    error = error_of(hook)
    assert error_of(dispatch, buffer, this.mine, CASE)[0] == "EPClosed"
    return error


@pytest.mark.parametrize("has_hook", [False, True])
@pytest.mark.cpu_only
def test_a_killed_rank_is_a_timeout_without_shrink(device: str, has_hook: bool) -> None:
    results = run_ranks(killed_without_shrink, 4, has_hook, may_die=[2], limit_secs=25)
    kinds = [results[rank][0] for rank in (0, 1, 3)]
    assert set(kinds) <= {"EPTimeout", "EPPeerFailed"}
    assert "EPTimeout" in kinds
    for rank in (0, 1, 3):
        assert "low-latency dispatch (call 3): no signal from rank 2, whose process has ended" in results[rank][1]


# Peers that stop, or leave -------------------------------------------------------------------------------------------


def let_go_on(pid: int) -> None:
    """Let a process go on that stops itself, once it has."""
    while Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "T":
        time.sleep(0.01)
    os.kill(pid, signal.SIGCONT)


def stopped_peer(rank: int, num_ranks: int) -> list[int]:
    """Rank 1 is stopped until the others have masked it and made many calls more. It must not take their new rows."""
    one_round(make_buffer(num_ranks, CASE), rank, 0)
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True, limit_secs=LIMIT_SECS)
    one_round(buffer, rank, 0)
    pids: list[Any] = [None] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    masked = [{1}, {0, 2}, {1}]
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        one_round(buffer, rank, 1, masked)
    else:
        for seed in range(1, 6):
            one_round(buffer, rank, seed, masked)
    if rank == 0:
        let_go_on(pids[1])
    dist.barrier()
    mask = mask_of(buffer)
    buffer.destroy()
    return mask


@pytest.mark.cpu_only
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_stopped_rank_is_left_behind_and_notices(device: str) -> None:
    assert run_ranks(stopped_peer, 3) == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]


def leaver(rank: int, num_ranks: int, enable_shrink: bool) -> tuple[tuple[str, str], list[int]]:
    buffer = make_buffer(num_ranks, CASE, enable_shrink=enable_shrink)
    one_round(buffer, rank, 0)
    dist.barrier()  # a rank that is still in the round would hear that another one misses rank 0 in the next
    if rank == 0:
        buffer.destroy()
        return ("none", ""), []
    if not enable_shrink:
        return error_of(one_round, buffer, rank, 1), []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        one_round(buffer, rank, 1, [{0}] * num_ranks)
    return ("none", ""), mask_of(buffer)


@pytest.mark.cpu_only
def test_a_rank_that_destroyed_its_buffer_is_masked(device: str) -> None:
    results = run_ranks(leaver, 3, True)
    assert [mask for _, mask in results[1:]] == [[1, 0, 0], [1, 0, 0]]


@pytest.mark.cpu_only
def test_a_rank_that_destroyed_its_buffer_is_named(device: str) -> None:
    for (kind, text), _ in run_ranks(leaver, 3, False)[1:]:
        assert kind in ("EPTimeout", "EPPeerFailed")
        assert "no signal from rank 0, which has destroyed its buffer" in text


def barrier_alone(rank: int, num_ranks: int) -> list[int]:
    one_round(make_buffer(num_ranks, CASE), rank, 0)
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True, limit_secs=LIMIT_SECS)
    clean = (CASE.max_tokens, CASE.hidden, CASE.experts_per_rank * num_ranks)
    buffer.clean_low_latency_buffer(*clean)
    if rank != 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            buffer.clean_low_latency_buffer(*clean)
            one_round(buffer, rank, 1, [{1}] * num_ranks)
    mask = mask_of(buffer)
    dist.barrier()
    return mask


def test_a_barrier_masks_who_stays_away(device: str) -> None:
    assert run_ranks(barrier_alone, 3) == [[0, 1, 0], [0, 0, 0], [0, 1, 0]]


# A rank that is masked while it fetches ------------------------------------------------------------------------------


def fetch_late(rank: int, num_ranks: int, later: list[int]) -> tuple[list[float], list[int]]:
    """Rank 1 masks rank 0 and goes on, until it has begun to write over a call that rank 0 is still to fetch.

    Args:
        rank: This rank.
        num_ranks: Ranks.
        later: Most tokens of the calls that rank 1 makes without rank 0. In the last one it is stopped.

    Returns:
        Of rank 0: what it finds in the rows that it received, and its masks.
    """
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True)

    def send(max_tokens: int, value: int) -> tuple:
        x = torch.full((1, CASE.hidden), float(value)).bfloat16()
        ids = torch.tensor([[0, CASE.experts_per_rank, 1]])
        return dispatch(
            buffer, Given(x, ids, x), CASE._replace(max_tokens=max_tokens), use_fp8=False, return_recv_hook=True
        )

    def fault(point: str) -> None:
        if point == "low-latency dispatch: before sent" and value == len(later) + 1:
            dist.barrier()  # rank 0 may fetch
            dist.barrier()  # and has

    value = 1
    recv_x, counts, *_, hook = send(1, value)
    if rank == 0:
        dist.barrier()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            hook()
        dist.barrier()
    else:
        hook()
        mask_rank(buffer, 0)  # as if it had been silent past the limit
        buffer.set_fault_hook(fault)
        for value, max_tokens in enumerate(later, 2):
            *_, hook = send(max_tokens, value)
            hook()
    found = sorted({float(row[0]) for rows, count in zip(recv_x, counts, strict=True) for row in rows[:count]})
    masks = mask_of(buffer)
    buffer.destroy()
    return found, masks


def mask_rank(buffer: deep_ep.Buffer, rank: int) -> None:
    buffer.low_latency_update_mask_buffer(rank, True)


@pytest.mark.parametrize("later", [[1] * 8, [1, *[NUM_TOKENS] * 3]], ids=["one size", "larger calls"])
@pytest.mark.cpu_only
def test_a_masked_rank_notices_a_set_that_is_written_again_and_not_yet_sent(device: str, later: list[int]) -> None:
    found, masks = run_ranks(fetch_late, 2, later)[0]
    assert (found, masks) == ([1.0], [0, 1])
