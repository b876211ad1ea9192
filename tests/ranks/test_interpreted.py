"""The GPU's engine on CPU ranks: kernels in Triton's interpreter, across real processes. Few calls: they are slow."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import error_of, layout_of, run_ranks
from deep_ep import Buffer, EPOverflow, reference
from deep_ep.kernels import _triton
from deep_ep.tools.soak import Limits, SoakReport, soak_rank

pytestmark = [
    pytest.mark.cpu_only,
    pytest.mark.usefixtures("device"),
    pytest.mark.skipif(not _triton.INTERPRETED, reason="Triton is not there, or not in its interpreter's mode"),
]

INTERPRETED = {"DEEP_EP_TRANSPORT": "interpreted", "DEEP_EP_DEVICE": "cpu"}
LIMIT_SECS = 1.5
PATIENCE_SECS = 30.0  # for everything around a limit, on a busy machine


def make_buffer(num_nvl_bytes: int = 0, limit_secs: float = 60.0) -> Buffer:
    return Buffer(dist.group.WORLD, num_nvl_bytes, explicitly_destroy=True, num_gpu_timeout_secs=limit_secs)


def arguments(buffer: Buffer, num_tokens: int = 5, hidden: int = 8, num_topk: int = 2) -> dict[str, Any]:
    """Right arguments of a dispatch: rows hold the number of their rank, from 1, and go everywhere in turns."""
    num_experts = 2 * buffer.group_size
    topk_idx = (torch.arange(num_tokens * num_topk).view(num_tokens, num_topk) * 3 + buffer.rank) % num_experts
    return {
        "x": torch.full((num_tokens, hidden), buffer.rank + 1.0),
        **layout_of(buffer, topk_idx, num_experts),
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(num_tokens, num_topk),
    }


def round_trip(buffer: Buffer, **sizes: int) -> torch.Tensor:
    """Dispatch and combine, checked; returns the rows that came."""
    given = arguments(buffer, **sizes)
    recv_x, _, _, _, handle, _ = buffer.dispatch(**given)
    came = handle[0][:, buffer.rank].diff(prepend=torch.zeros(1, dtype=torch.int32))
    assert recv_x[:, 0].tolist() == [source + 1.0 for source, count in enumerate(came.tolist()) for _ in range(count)]
    combined, _, _ = buffer.combine(recv_x, handle)
    assert torch.equal(combined, given["x"] * given["is_token_in_rank"].sum(1, keepdim=True))
    return recv_x


# Right calls ---------------------------------------------------------------------------------------------------------


def soak(rank: int, num_ranks: int, seed: int, num_calls: int) -> SoakReport:
    return soak_rank(rank, num_ranks, seed, num_calls, Limits(tokens=9, hidden=24, topk=4))


@pytest.mark.parametrize(("num_ranks", "num_calls"), [(1, 15), (2, 25), (3, 12)])
def test_random_calls_are_what_the_oracle_says(num_ranks: int, num_calls: int) -> None:
    for report in run_ranks(soak, num_ranks, 40 + num_ranks, num_calls, env=INTERPRETED):
        assert sum(report.calls.values()) == num_calls
        assert report.stats["calls"].keys() <= {"dispatch/direct", "combine/pulled", "combine/copied_in"}


def lacking_room(rank: int, num_ranks: int) -> dict[str, int]:
    """Combines of rows that lie elsewhere. In the first, rank 1 has no room for a copy; rank 2 has no tokens at all,
    and the first token of the others has no experts.
    """
    buffer = make_buffer()
    num_tokens, num_experts = 0 if rank == 2 else 5, 2 * num_ranks
    topk_idx = torch.arange(2 * num_tokens).view(num_tokens, 2) % num_experts
    topk_idx[:1] = -1
    x = torch.full((num_tokens, 8), rank + 1.0)
    layout = layout_of(buffer, topk_idx, num_experts)
    recv_x, _, _, _, handle, _ = buffer.dispatch(x, **layout)
    elsewhere, weights = recv_x.clone(), torch.ones(recv_x.size(0), 3)
    held = []
    if rank == 1:
        free_bytes = buffer._engine.window.arena.largest_free_bytes()
        held.append(buffer.get_combine_buffer(handle, free_bytes // (4 * recv_x.size(0))))
    for _ in range(2):
        combined, combined_weights, _ = buffer.combine(elsewhere, handle, topk_weights=weights, bias=x)
        num_copies = layout["is_token_in_rank"].sum(1, keepdim=True)
        assert torch.equal(combined, x + x * num_copies)
        assert torch.equal(combined_weights, num_copies.float().expand(-1, 3))
        held.clear()
    return buffer.stats()["calls"]


@pytest.mark.filterwarnings("ignore:combine. the arena has no room")
def test_who_has_no_room_for_a_copy_gives_its_rows_through_staging() -> None:
    calls = run_ranks(lacking_room, 3, env=INTERPRETED)
    assert calls[1]["combine/staged"] == 1
    assert [one["combine/copied_in"] for one in calls] == [2, 1, 2]


def guessed(rank: int, num_ranks: int) -> None:
    """Results of a dispatch whose memory was guessed: tensors of their own, with the rows that came."""
    buffer = make_buffer()
    given = arguments(buffer)
    scales = torch.arange(10.0).view(5, 2) + 10 * rank
    first = buffer.dispatch(**given | {"x": (given["x"], scales)})
    for _ in range(2):
        (recv_x, recv_scales), ids, weights, _, handle, _ = buffer.dispatch(**given | {"x": (given["x"], scales)})
        made, expected = (recv_x, recv_scales, ids, weights, *handle), (*first[0], *first[1:3], *first[4])
        for one, other in zip(made, expected, strict=True):
            assert torch.equal(one, other)
            assert one.is_contiguous()
            assert one._base is None or one is handle.is_token_in_rank
    kept = recv_scales.clone()
    del recv_x, made, one, other
    buffer.dispatch(**given)[0].fill_(-1)
    assert torch.equal(recv_scales, kept), "scales keep their memory, whatever becomes of the rows"
    recv_scales.resize_(1, 2).fill_(3)
    ids.resize_(1, 2)
    assert torch.equal(handle.recv_src_idx, first[4].recv_src_idx)


def test_results_in_guessed_memory_are_tensors_of_their_own() -> None:
    run_ranks(guessed, 2, env=INTERPRETED)


def transport(rank: int, num_ranks: int) -> str:
    buffer = make_buffer()
    round_trip(buffer)
    return buffer.transport


def test_the_transport_says_what_it_is() -> None:
    assert all(text.startswith("interpreted") for text in run_ranks(transport, 2, env=INTERPRETED))


def growth(rank: int, num_ranks: int) -> tuple[int, int]:
    buffer = make_buffer(128)
    recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments(buffer))
    before, kept = buffer.stats()["arena"], recv_x.clone()
    arena = buffer._engine.window.arena
    room = buffer.get_combine_buffer(handle, arena.largest_free_bytes() // (4 * recv_x.size(0)))  # all there is
    assert arena.base_of(room) is not None
    room.fill_(7)
    for _ in range(2):
        again = round_trip(buffer, hidden=1 << 14)
        again.fill_(-1)
    assert torch.equal(recv_x, kept), "what came before stays where it is"
    assert (room == 7).all()
    return before["reserved"], buffer.stats()["arena"]["reserved"]


def test_the_window_grows_and_nothing_moves() -> None:
    for before, after in run_ranks(growth, 2, env=INTERPRETED):
        assert after > before


# Wrong calls ---------------------------------------------------------------------------------------------------------


def wrong_counts(rank: int, num_ranks: int) -> None:
    """The counts are not those of the mask, on all ranks alike. Nothing is sent, and they may call again."""
    buffer = make_buffer()
    right = arguments(buffer)
    wrong = right | {"num_tokens_per_rank": right["num_tokens_per_rank"] + 1}
    with pytest.raises(ValueError, match=r"num_tokens_per_rank.* for rank 0 it says (\d+), the sum is"):
        buffer.dispatch(**wrong)
    round_trip(buffer)
    buffer.check()
    buffer.destroy()


def test_wrong_counts_are_the_callers_mistake_and_the_buffer_goes_on() -> None:
    run_ranks(wrong_counts, 2, env=INTERPRETED)


def disagreement(rank: int, num_ranks: int, how: str) -> list[tuple[str, str]]:
    buffer = make_buffer(limit_secs=PATIENCE_SECS)
    recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments(buffer))

    def call() -> None:
        given = arguments(buffer)
        if rank != 1:
            buffer.dispatch(**given)
        elif how == "hidden":
            buffer.dispatch(**given | {"x": torch.zeros(5, 12)})
        elif how == "dtype":
            buffer.dispatch(**given | {"x": given["x"].half()})
        elif how == "top-k":
            buffer.dispatch(**given | {"topk_idx": None, "topk_weights": None})
        elif how == "operation":
            buffer.combine(recv_x, handle)
        buffer.check()

    return [error_of(call), error_of(lambda: buffer.combine(recv_x, handle))]


@pytest.mark.parametrize(
    ("how", "named"),
    [
        ("hidden", "hidden"),
        ("dtype", "dtype torch.float"),
        ("top-k", "num_topk"),
        ("operation", "has combine, not dispatch"),
    ],
)
def test_ranks_that_disagree_all_raise_and_say_who_and_what(how: str, named: str) -> None:
    for first, later in run_ranks(disagreement, 3, how, env=INTERPRETED):
        assert first[0] == "EPError"
        assert named in first[1]
        assert "rank 1" in first[1]
        assert "all ranks must make the same call" in first[1]
        assert later[0] == "EPClosed"
        assert named in later[1], "the first cause is told again"


def silence(rank: int, num_ranks: int, operation: str) -> tuple[float, list[tuple[str, str]]]:
    buffer = make_buffer(limit_secs=LIMIT_SECS)
    recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments(buffer))
    dist.barrier()
    begin, errors = time.monotonic(), []
    if rank != 1:

        def call() -> None:
            if operation == "combine":
                buffer.combine(recv_x, handle)
            else:
                buffer.dispatch(**arguments(buffer))
            buffer.check()

        errors = [error_of(call), error_of(lambda: buffer.combine(recv_x, handle)), error_of(buffer.check)]
    secs = time.monotonic() - begin
    dist.barrier()
    if rank == 1:  # it comes at last, and is told what has happened
        errors = [error_of(lambda: (buffer.combine(recv_x, handle), buffer.check()))]
    buffer.destroy()
    return secs, errors


@pytest.mark.parametrize("operation", ["dispatch", "combine"])  # a cached dispatch meets as a combine does
@pytest.mark.alone
def test_a_rank_that_never_comes_is_named_at_the_limit(operation: str) -> None:
    for rank, (secs, errors) in enumerate(run_ranks(silence, 3, operation, env=INTERPRETED)):
        assert errors[0][0] == "EPTimeout"
        assert "from rank 1 " in errors[0][1], errors[0]
        assert f"after {LIMIT_SECS:g} s" in errors[0][1]
        if rank != 1:
            assert f"{operation} (call 2)" in errors[0][1]
            assert secs < PATIENCE_SECS
            assert [kind for kind, _ in errors[1:]] == ["EPClosed", "EPClosed"]


def overflow(rank: int, num_ranks: int, look: str) -> list[tuple[str, str]]:
    """Rank 1 made room for one row only."""
    buffer = make_buffer(limit_secs=PATIENCE_SECS)
    round_trip(buffer)
    given = arguments(buffer)

    def calls() -> None:
        buffer.dispatch(**given, num_worst_tokens=1 if rank == 1 else 20)
        if look == "check":
            buffer.check()
        elif look == "next call":
            buffer.dispatch(**given)

    return [error_of(calls), error_of(lambda: buffer.dispatch(**given))]


@pytest.mark.parametrize("look", ["check", "next call"])
def test_more_rows_than_room_are_an_error_on_all_ranks_at_the_next_look(look: str) -> None:
    assert issubclass(EPOverflow, RuntimeError)
    for first, later in run_ranks(overflow, 3, look, env=INTERPRETED):
        assert first[0] == "EPOverflow"
        assert "rank 1 receives" in first[1]
        assert "num_worst_tokens=1" in first[1]
        assert later[0] == "EPClosed"


class Broken(Exception):
    pass


def broken_host(rank: int, num_ranks: int) -> tuple[str, str]:
    """A rank fails between two launches: the others need not wait for the limit."""
    buffer = make_buffer(limit_secs=PATIENCE_SECS)
    recv_x, _, _, _, handle, _ = buffer.dispatch(**arguments(buffer))
    dist.barrier()

    def fault(point: str) -> None:
        raise Broken(point)

    if rank == 1:
        buffer.set_fault_hook(fault)
    begin = time.monotonic()
    error = error_of(lambda: (buffer.combine(recv_x, handle), buffer.check()))
    assert time.monotonic() - begin < PATIENCE_SECS
    assert error_of(lambda: buffer.combine(recv_x, handle))[0] == "EPClosed"
    return error


def test_a_failure_on_one_host_reaches_all_ranks() -> None:
    errors = run_ranks(broken_host, 3, env=INTERPRETED)
    assert errors[1][0] == "Broken"
    for rank in (0, 2):
        assert errors[rank][0] == "EPPeerFailed"
        assert "rank 1 failed" in errors[rank][1]


def empty(rank: int, num_ranks: int) -> None:
    """Nobody has tokens but rank 0, and they go nowhere, or to one rank only."""
    buffer = make_buffer()
    for target in (-1, 0):
        num_tokens = 3 if rank == 0 else 0
        ids = torch.full((num_tokens, 1), target)
        seen = reference.layout(ids, num_ranks, num_ranks)
        x = torch.full((num_tokens, 4), 2.0)
        recv_x, _, _, counts, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=seen.num_tokens_per_rank,
            is_token_in_rank=seen.is_token_in_rank,
            num_tokens_per_expert=seen.num_tokens_per_expert,
        )
        assert recv_x.shape == (3 if target == rank else 0, 4)
        assert counts == [3 if target == rank else 0]
        combined, _, _ = buffer.combine(recv_x, handle)
        assert torch.equal(combined, x if target == 0 else torch.zeros_like(x))


def test_empty_ranks_and_empty_receivers() -> None:
    run_ranks(empty, 2, env=INTERPRETED)
