"""Waits and failures: what happens when a rank is missing, has failed, or refuses a call. Seen in handshakes, of one
warp and of several.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import ANNOUNCED, Announce
from windows import Boards

from deep_ep.kernels import _triton, exchange
from deep_ep.kernels.exchange import Context

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")


@pytest.fixture(params=["one warp", "several warps"])
def is_numbered(request: pytest.FixtureRequest) -> bool:
    """Whether tokens are numbered by the kernel, which several warps do: one block of them waits."""
    return request.param == "several warps"


def announce_of(num_ranks: int, device: str, is_numbered: bool) -> Announce:
    """Of ranks that send nothing."""
    return Announce([0] * num_ranks, [0] * num_ranks, device, is_numbered=is_numbered)


def test_a_missing_rank_is_named_at_the_limit(device: str, is_numbered: bool) -> None:
    boards = Boards(3, device)
    announce = announce_of(3, device, is_numbered)
    for rank in (0, 2):
        announce(replace(boards.contexts[rank], limit_ns=1))
    assert boards.record(0) == [exchange.TIMEOUT, 1, 0, 0b110, ANNOUNCED, 0, 0], "nobody else had come"
    assert boards.record(2) == boards.record(0)


def test_a_rank_that_gave_up_ends_the_wait_of_the_others(device: str, is_numbered: bool) -> None:
    boards = Boards(2, device)
    exchange.abort(boards.contexts[1], 3)
    announce_of(2, device, is_numbered)(boards.contexts[0])  # with the whole limit: it does not wait for it
    assert boards.record(0) == [exchange.HOST, 0, 3, 0, 0, 0, 1]


def refuse(context: Context, reason: str, device: str) -> None:
    note = exchange.note_words(reason, torch.device(device))
    exchange.refuse(context, 3, exchange.NORMAL, context.state, exchange.REFUSALS, note)


def test_a_rank_that_refuses_the_call_ends_the_wait_of_the_others(device: str, is_numbered: bool) -> None:
    boards = Boards(2, device)
    announce = announce_of(2, device, is_numbered)
    boards.handshake(announce, announce)
    refuse(boards.contexts[1], "a wrong 'x' of 7 rows, \udcff", device)
    word = boards.boards[0].view(torch.int64)[8 * 3].item()
    assert word == 2 << 17 | 1, "call 2, refused once"
    announce(boards.contexts[0])  # with the whole limit: it does not wait for it
    assert boards.record(0) == [exchange.REFUSED, 2, 3, 1, 0, 2, 1]
    assert boards.contexts[0].note(boards.boards[0], 2, 1) == "a wrong 'x' of 7 rows, \\udcff"


@pytest.mark.parametrize(("own", "other"), [(1, 1), (3, 1), (1, 2)])
def test_a_refusal_counts_only_if_this_rank_has_not_refused_as_often(
    device: str, own: int, other: int, is_numbered: bool
) -> None:
    boards = Boards(2, device)
    for _ in range(own):
        refuse(boards.contexts[0], "mine", device)
    for _ in range(other):
        refuse(boards.contexts[1], "the other's", device)
    announce_of(2, device, is_numbered)(replace(boards.contexts[0], limit_ns=1))
    assert boards.record(0)[0] == (exchange.TIMEOUT if own >= other else exchange.REFUSED)


@pytest.mark.parametrize("refuser", [0, 1])
def test_a_rank_that_makes_a_call_after_it_alone_refused_it_makes_another_one(
    device: str, refuser: int, is_numbered: bool
) -> None:
    boards = Boards(2, device)
    announce = announce_of(2, device, is_numbered)
    announce(replace(boards.contexts[1], limit_ns=1))  # it is in call 1 when rank 0 looks, and has not failed
    boards.contexts[1].state.zero_()
    boards.boards[0][8 * 3] = 0
    refuse(boards.contexts[refuser], "a wrong 'x'", device)
    announce(boards.contexts[0])
    assert boards.record(0)[:4] == [exchange.REFUSED, 1, 3 if refuser else 0, refuser]
    assert boards.contexts[0].note(boards.boards[0], 1, refuser) == "a wrong 'x'"


def test_a_refusal_of_an_earlier_call_is_past(device: str, is_numbered: bool) -> None:
    boards = Boards(2, device)
    refuse(boards.contexts[1], "but then it comes", device)
    announce = announce_of(2, device, is_numbered)
    for context in reversed(boards.contexts):  # it has entered call 1 after all, and then call 2
        announce(replace(context, limit_ns=1)) if context.rank else announce(context)
    assert boards.record(0)[0] == exchange.TIMEOUT, "it waited for nobody, and said so: that came first"


def test_a_rank_two_calls_ahead_is_a_fault(device: str, is_numbered: bool) -> None:
    boards = Boards(2, device)
    boards.boards[0][8] = 3 << 24  # rank 1's progress, on rank 0's board
    announce_of(2, device, is_numbered)(boards.contexts[0])
    assert boards.record(0) == [exchange.DESYNC, 1, 0, 0b10, 0, 0, 0]


def test_after_a_failure_nothing_is_said_any_more(device: str, is_numbered: bool) -> None:
    boards = Boards(2, device)
    boards.contexts[0].state[exchange.STATE_FAILED] = 1
    announce_of(2, device, is_numbered)(boards.contexts[0])
    exchange.abort(boards.contexts[0], 0)
    assert all(not board.any() for board in boards.boards)


def test_what_a_wait_of_several_warps_saw_lies_behind_the_words_of_the_state(device: str) -> None:
    boards = Boards(3, device)
    announce = announce_of(3, device, True)
    boards.handshake(announce, announce, announce)
    for one in boards.contexts:
        assert one.state.numel() == exchange.STATE_WORDS + 2 * 3
        assert one.state[exchange.STATE_WORDS :].tolist() == [(1 << 24) + ANNOUNCED] * 3 + [0] * 3
        assert one.state[exchange.STATE_ENDED] == 0
