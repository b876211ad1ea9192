"""Low-latency calls across nodes: a host split into nodes by `DEEP_EP_RANKS_PER_NODE`, straight from rank to rank."""

from __future__ import annotations

import itertools
import os
import re
import signal
import threading
import time
import warnings
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
from low_latency import Case, check_dispatch, dispatch, experts_rows, inputs, make_buffer, one_call
from test_low_latency import (
    COMBINES,
    FORMS,
    WAYS,
    few_flags,
    hooks_in_flight,
    many_shapes,
    mixed_modes,
    one_empty_rank,
    queued_calls,
    two_zero_copies,
)
from test_low_latency_faults import (
    CASE,
    FORM,
    LIMIT_SECS,
    Round,
    barrier_alone,
    caller_masks,
    combine,
    die_at,
    killed_peer,
    killed_without_shrink,
    leaver,
    let_go_on,
    mask_of,
    one_round,
    silent_peer,
)

import deep_ep
from common import error_of, layout_of, run_ranks
from deep_ep import reference
from deep_ep.tools.soak import low_latency, play

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.cpu_only]


def run_nodes(function: Any, num_ranks: int, ranks_per_node: int, *args: Any, **options: Any) -> list[Any]:
    env = {"DEEP_EP_RANKS_PER_NODE": str(ranks_per_node), "DEEP_EP_TIMEOUT_SECS": "30"}
    return run_ranks(function, num_ranks, *args, env=env, limit_secs=90, **options)


# Results, as inside one node -----------------------------------------------------------------------------------------


def every_flag(rank: int, num_ranks: int) -> None:
    case = Case(kind="noise", hidden=256, seed=3)
    buffer = make_buffer(num_ranks, case)
    for index, (form, way, back) in enumerate(itertools.product(FORMS, WAYS, COMBINES)):
        one_call(buffer, rank, num_ranks, case, form, **way, **back, with_out=index % 3 == 0)
    buffer.destroy()


def unequal_wishes(rank: int, num_ranks: int) -> None:
    """The largest `num_rdma_bytes` of all nodes is everybody's: all divide their memory alike."""
    buffer = make_buffer(num_ranks, CASE, times=4 if rank == num_ranks - 1 else 1)
    this = Round(rank, num_ranks)
    got = [dispatch(buffer, this.mine, CASE, return_recv_hook=True, **FORM) for _ in range(2)]
    for one in got:
        one[4]()
        this.check_dispatch(one)
    buffer.destroy()


def chain_of_calls(rank: int, num_ranks: int) -> None:
    """What the tests of one node check, in one group of processes."""
    together = (hooks_in_flight, queued_calls, two_zero_copies, mixed_modes, unequal_wishes)
    for checks in (few_flags, one_empty_rank, *together):
        checks(rank, num_ranks)


@pytest.mark.parametrize(
    ("checks", "num_ranks", "ranks_per_node"),
    [(every_flag, 2, 1), (chain_of_calls, 4, 2), (many_shapes, 3, 1), (few_flags, 8, 4)],
)
def test_results_are_those_of_one_node(checks: Any, num_ranks: int, ranks_per_node: int) -> None:
    run_nodes(checks, num_ranks, ranks_per_node)


def bits(rank: int, num_ranks: int) -> list[Any]:
    """What calls give whose sums and roundings are not exact."""
    case = Case(kind="noise", hidden=1100, topk=5)
    buffer, given, results = make_buffer(num_ranks, case), inputs(rank, num_ranks, case), []
    weights = torch.rand(given.topk_weights.shape, generator=torch.Generator().manual_seed(rank))
    for use_fp8, use_logfmt in itertools.product((False, True), repeat=2):
        recv, count, handle, *_ = dispatch(buffer, given, case, use_fp8=use_fp8)
        parts = recv if use_fp8 else (recv,)
        rows = parts[0].bfloat16() * 0.1
        for expert, num_rows in enumerate(count.tolist()):
            results += [part[expert, :num_rows].contiguous().view(torch.uint8).tolist() for part in parts]
            rows[expert, num_rows:] = float("nan")
        combined, *_ = buffer.low_latency_combine(rows, given.topk_idx, weights, handle, use_logfmt=use_logfmt)
        results.append(combined.view(torch.uint8).tolist())
    buffer.destroy()
    return results


def test_bits_are_those_of_one_node() -> None:
    assert run_nodes(bits, 3, 1) == run_nodes(bits, 3, 3)


def random_calls(rank: int, num_ranks: int, num_calls: int) -> dict[str, int]:
    hint = low_latency.hint(num_ranks)
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, hint, low_latency_mode=True, explicitly_destroy=True)
    report = play(buffer, 7, num_calls)
    buffer.destroy()
    return report.calls


def test_normal_and_low_latency_calls_at_random() -> None:
    calls = run_nodes(random_calls, 4, 2, 60)[0]
    assert sum(calls.values()) == 60
    assert len(calls) > 4, calls
    assert any(name.startswith("low-latency") for name in calls)


# What crosses --------------------------------------------------------------------------------------------------------


def crossing(rank: int, num_ranks: int) -> tuple[list[int], dict[str, list[int]]]:
    """Calls whose tokens have several experts on a remote rank; how many rows must cross there and back, and what
    did.
    """
    case = Case(experts_per_rank=4, max_tokens=32, hidden=2048, topk=6, num_tokens=32, kind="noise")
    buffer = make_buffer(num_ranks, case)
    every = [inputs(one, num_ranks, case) for one in range(num_ranks)]
    given, num_experts = every[rank], case.experts_per_rank * num_ranks
    crossed = {"messages": [0], "bytes": [0]}

    def count() -> None:
        mesh = buffer.stats()["mesh"]
        crossed["messages"].append(mesh["messages_sent"])
        crossed["bytes"].append(mesh["bytes_sent"])

    got = dispatch(buffer, given, case, use_fp8=False)
    count()
    rows = got[0].clone().clamp_(-0.9, 0.9)
    for use_logfmt in (False, True):
        buffer.low_latency_combine(rows, given.topk_idx, given.topk_weights, got[2], use_logfmt=use_logfmt)
        count()
    assert buffer.stats()["rail"]["messages_sent"] == 0
    buffer.destroy()
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("deep_ep-mesh")]
    far = [one for one in range(num_ranks) if one // 2 != rank // 2]
    ranks = [torch.where(one.topk_idx < num_experts, one.topk_idx, -9) // case.experts_per_rank for one in every]
    there = sum(int((ranks[rank] == one).any(1).sum()) for one in far)
    # Each expert of a token once, also if the token names it twice.
    back = sum(len({*row} & {*range(4 * rank, 4 * rank + 4)}) for one in far for row in every[one].topk_idx.tolist())
    return [there, back], {name: [b - a for a, b in pairwise(values)] for name, values in crossed.items()}


def test_a_token_crosses_once_for_each_remote_rank() -> None:
    for (there, back), crossed in run_nodes(crossing, 4, 2):
        assert crossed["messages"] == [2, 2, 2]
        dispatched, combined, compressed = crossed["bytes"]
        assert there * 4096 < dispatched < 1.05 * there * 4096 + 2000
        assert back * 4096 < combined < 1.01 * back * 4096 + 1000
        assert compressed < 0.66 * combined  # 10 bits of 16, and two ranges for each 128 channels


LARGE = Case(experts_per_rank=1, max_tokens=512, hidden=8192, topk=1, num_tokens=512)  # 8 MB, more than sockets hold


def large_calls(rank: int, num_ranks: int) -> None:
    """Rank 0 is in a normal call while rank 1 is in its hook, which needs what rank 0 has still queued."""
    buffer = make_buffer(num_ranks, LARGE, CASE)
    every = [inputs(one, num_ranks, LARGE) for one in range(num_ranks)]
    for given in every:
        given.topk_idx.random_(0, 2, generator=torch.Generator().manual_seed(5))
    want = reference.low_latency_dispatch([one.x for one in every], [one.topk_idx for one in every], 512, 2)
    given = every[rank]
    layout = layout_of(buffer, given.topk_idx, 2)

    def normal_call() -> None:
        buffer.dispatch(
            given.x,
            **layout,
        )

    got = dispatch(buffer, given, LARGE, return_recv_hook=True, **FORM)
    for step in (normal_call, got[4]) if rank == 0 else (got[4], normal_call):
        step()
    rows = experts_rows(check_dispatch(got, want[rank], FORM), rank)
    mine = (given.topk_idx, given.topk_weights, got[2])
    combined, _, hook = buffer.low_latency_combine(rows, *mine, return_recv_hook=True)
    if rank == 0:
        hook()
        buffer.destroy()  # and leaves; the other still gets its rows
        return
    time.sleep(0.3)
    hook()
    ys = [experts_rows(one.recv_x, index) for index, one in enumerate(want)]
    weights = [one.topk_weights for one in every]
    expected = reference.low_latency_combine(ys, [one.topk_idx for one in every], weights, want)
    assert torch.equal(combined, expected[rank])
    buffer.destroy()


def test_what_is_queued_leaves_whatever_its_rank_does() -> None:
    run_nodes(large_calls, 2, 1)


# Masks ---------------------------------------------------------------------------------------------------------------


def one_sided_mask(rank: int, num_ranks: int) -> list[str]:
    """Rank 0 sends nothing to the others, which notice as soon as it takes them in again."""
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if rank == 0:
            for other in range(1, num_ranks):
                buffer.low_latency_update_mask_buffer(other, True)
            one_round(buffer, rank, 0, [{1, 2}] * num_ranks)
            buffer.low_latency_clean_mask_buffer()
            sent = dispatch(buffer, inputs(rank, num_ranks, CASE), CASE, return_recv_hook=True)
        else:
            sent = one_round(buffer, rank, 0, [{0}] * num_ranks)
    dist.barrier()
    buffer.destroy()
    del sent  # not before: a hook that is dropped while the call could be received is a warning, too
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


def masks_and_leavers(rank: int, num_ranks: int) -> tuple[list[str], Any, Any]:
    caller_masks(rank, num_ranks)
    told = one_sided_mask(rank, num_ranks)
    return told, leaver(rank, num_ranks, True), leaver(rank, num_ranks, False)


def test_masks_and_ranks_that_leave() -> None:
    told, *_ = (results := run_nodes(masks_and_leavers, 3, 1))[0]
    assert told == []
    for told, (_, mask), ((kind, text), _) in results[1:]:
        (warning,) = told
        assert "no signal from rank 0, which has gone on without this rank (it is at call 3)" in warning
        assert mask == [1, 0, 0]
        assert kind in ("EPTimeout", "EPPeerFailed")
        assert "no signal from rank 0, which has destroyed its buffer" in text


def stopped_peer(rank: int, num_ranks: int) -> list[int]:
    """Remote rank 1 is stopped until the others have masked it. What they sent before is good, and nothing comes
    later.
    """
    one_round(make_buffer(num_ranks, CASE), rank, 0)  # what a process does only once takes longer
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True, limit_secs=LIMIT_SECS)
    one_round(buffer, rank, 0)
    pids: list[Any] = [None] * num_ranks
    dist.all_gather_object(pids, os.getpid())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
        this = Round(rank, num_ranks, 1)
        got = dispatch(buffer, this.mine, CASE, **FORM)
        combined, *_ = combine(buffer, this.check_dispatch(got), this.mine, got[2])
        this.check_combine(combined, [{1}, {0, 2}, {1}])
    else:
        for seed in range(1, 6):
            one_round(buffer, rank, seed, [{1}] * num_ranks)
    if rank == 0:
        let_go_on(pids[1])
    dist.barrier()
    mask = mask_of(buffer)
    buffer.destroy()
    return mask


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_stopped_rank_keeps_what_it_was_sent_and_gets_no_more() -> None:
    assert run_nodes(stopped_peer, 3, 1) == [[0, 1, 0], [1, 0, 1], [0, 1, 0]]


def quiet(rank: int, num_ranks: int) -> tuple[Any, Any, list[int]]:
    return (
        silent_peer(rank, num_ranks, True),
        silent_peer(rank, num_ranks, False),
        barrier_alone(rank, num_ranks),
    )


def test_a_silent_rank_is_masked_or_named_on_all_nodes() -> None:
    results = run_nodes(quiet, 4, 2)
    for rank in (0, 2, 3):
        (told, _, mask), (_, errors, _), barrier_mask = results[rank]
        (text,) = told
        assert f"low-latency dispatch (call 3): no signal from rank 1 after {LIMIT_SECS:g} s" in text
        assert mask == barrier_mask == [0, 1, 0, 0]
        (first, text), (second, again) = errors
        assert first in ("EPTimeout", "EPPeerFailed")
        assert f"from rank 1 after {LIMIT_SECS:g} s" in text
        assert second == "EPClosed"
        assert f"from rank 1 after {LIMIT_SECS:g} s" in again


# Ranks that are killed -----------------------------------------------------------------------------------------------

SEEN_GONE = r"no signal from rank {0}, (whose process has ended|which has closed the connection)"
TOLD_GONE = r"no signal from rank {0} after \S+ s, or word that it has gone, at rank"


def check_gone(texts: dict[int, str], victim: int) -> None:
    """On each node a rank says why the victim is gone; another one may have been told by it first."""
    for ranks in ({0, 1}, {2, 3}):
        told = {rank: texts[rank] for rank in ranks - {victim}}
        assert any(re.search(SEEN_GONE.format(victim), text) for text in told.values()), told
        for text in told.values():
            assert re.search(f"{SEEN_GONE}|{TOLD_GONE}".format(victim), text), text


@pytest.mark.parametrize("moment", ["before dispatch", "before hook", "between"])
def test_the_others_go_on_without_a_killed_rank(moment: str) -> None:
    victim = {"between": 0, "before hook": 3}.get(moment, 2)
    results = run_nodes(killed_peer, 4, 2, victim, moment, may_die=[victim])
    operation = "dispatch (call 3)" if moment == "before dispatch" else "combine (call 4)"
    assert all(len(results[rank]) == 1 for rank in {0, 1, 2, 3} - {victim}), results
    texts = {rank: results[rank][0] for rank in {0, 1, 2, 3} - {victim}}
    assert all(f"low-latency {operation}: " in text for text in texts.values()), texts
    check_gone(texts, victim)


def killed_halfway(rank: int, num_ranks: int) -> list[str]:
    """Rank 1 dies when its node has its rows and the other one has not."""
    buffer = make_buffer(num_ranks, CASE, enable_shrink=True)
    one_round(buffer, rank, 0)
    if rank == 1:
        die_at(buffer, "low-latency dispatch: local sent")
    masked = [set(), set(), {1}, {1}]
    this = Round(rank, num_ranks, 1, masked)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        got = dispatch(buffer, this.mine, CASE, **FORM)
        combined, *_ = combine(buffer, this.check_dispatch(got), this.mine, got[2])
        this.check_combine(combined, [{1}] * num_ranks)
        one_round(buffer, rank, 2, [{1}] * num_ranks)
    buffer.destroy()
    return [str(one.message) for one in caught if one.category is RuntimeWarning]


def test_a_rank_that_is_killed_between_its_node_and_the_others() -> None:
    results = run_nodes(killed_halfway, 4, 2, may_die=[1])
    texts = {rank: results[rank][0] for rank in (0, 2, 3)}
    for rank, operation in ((0, "combine (call 4)"), (2, "dispatch (call 3)"), (3, "dispatch (call 3)")):
        assert f"low-latency {operation}: " in texts[rank]
    check_gone(texts, 1)


def test_a_killed_rank_is_named_on_all_nodes_without_shrink() -> None:
    results = run_nodes(killed_without_shrink, 4, 2, True, may_die=[2])
    assert all(results[rank][0] in ("EPTimeout", "EPPeerFailed") for rank in (0, 1, 3)), results
    check_gone({rank: results[rank][1] for rank in (0, 1, 3)}, 2)


def accidents(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    """A rank that makes another call, and one that raises: everybody hears why."""
    errors = []
    for how in ("another call", "raises"):
        buffer, this = make_buffer(num_ranks, CASE), Round(rank, num_ranks)
        one_round(buffer, rank, 0)
        dist.barrier()  # a failure ends what a later rank still waits for
        if how == "raises" and rank == 3:
            buffer.set_fault_hook(_raise)
        form = {"use_fp8": how == "another call" and rank == 3}
        errors.append(error_of(dispatch, buffer, this.mine, CASE, **form))
        assert error_of(dispatch, buffer, this.mine, CASE)[0] == "EPClosed"
        buffer.destroy()
        dist.barrier()
    return errors


def _raise(point: str) -> None:
    raise KeyError("an accident")


def test_what_goes_wrong_on_a_remote_rank_goes_wrong_for_all() -> None:
    for rank, ((kind, text), (accident, why)) in enumerate(run_nodes(accidents, 4, 2)):
        assert kind in ("EPError", "EPPeerFailed")
        assert "all ranks must make the same call" in text
        assert accident == ("KeyError" if rank == 3 else "EPPeerFailed")
        assert "an accident" in why
