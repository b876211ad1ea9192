"""Words of rows on the rail, and what ranks of different nodes learn of each other when they meet."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import all_bases, handshake
from windows import Boards, make_context, synchronize

from deep_ep.kernels import _triton, exchange, rail
from deep_ep.kernels.exchange import Context
from deep_ep.kernels.notify import Nodes, Post, Terms
from deep_ep.kernels.rail import RemoteContext, RemoteRowLayout

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

DOORBELL_WORDS, MOST_CHUNKS, DOORBELLS = 16, 4, 256
ROWS = RemoteRowLayout(piece=3, recv_offset=1000, widths=(16, 0, 4), offsets=(0, 0, 512))


def int32(values: list, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


def two_nodes(device: str, rank: int = 0) -> Context:
    return replace(make_context(rank, 2, device), num_nodes=2)


def remote_of(device: str) -> RemoteContext:
    words = torch.zeros(1024, dtype=torch.int64, device=device)
    return RemoteContext(words, DOORBELLS, DOORBELL_WORDS, 0, MOST_CHUNKS)


def plan_of(lines: list[list[int]], device: str) -> torch.Tensor:
    return torch.tensor([[*line, *[0] * (exchange.PLAN_WORDS - len(line))] for line in lines], device=device)


# Meeting -------------------------------------------------------------------------------------------------------------


class Meeting:
    """Two nodes of one rank: a cached call in which each says how many tokens it sends to each node."""

    def __init__(self, num_tokens: list, device: str, remote_rows: int = 20, mark: int = 7):
        self.plan = torch.zeros(2, exchange.PLAN_WORDS, dtype=torch.int64, device=device)
        self.prefix = int32([0, 0], device)
        self.terms = Terms(2, 1, (5, 6))
        self.post = Post(num_rows=9, bases=all_bases(64), remote_rows=remote_rows)
        self.nodes = Nodes(int32(num_tokens, device), self.plan, self.prefix, int32([mark], device))

    def __call__(self, context: Context) -> None:
        handshake(replace(context, num_nodes=2), self.terms, self.post, nodes=self.nodes)


def test_what_a_rail_sends_where_worked_example(device: str) -> None:
    boards, calls = (
        Boards(2, device),
        [Meeting([3, 4], device), Meeting([[5, 5], [6, 6]], device)],
    )  # as handles have it
    boards.handshake(*calls)
    assert [boards.record(rank) for rank in range(2)] == [None, None]
    # In and where, out and where, where at the other, where the sums go back to.
    assert calls[0].plan[:, :6].tolist() == [[3, 0, 3, 0, 0, 0], [5, 3, 4, 3, 0, 0]]
    assert calls[1].plan[:, :6].tolist() == [[4, 0, 5, 0, 3, 3], [6, 4, 6, 5, 4, 5]]
    assert [call.prefix.tolist() for call in calls] == [[3, 8], [4, 10]]
    for rank in range(2):
        capacities = boards.contexts[rank].table[exchange.TABLE_CAPACITIES].tolist()
        assert capacities == [9 if peer == rank else 0 for peer in range(2)], "no row goes straight to a remote rank"


def test_the_halves_of_a_meeting_are_the_whole(device: str) -> None:
    boards, calls = Boards(2, device), [Meeting([3, 4], device), Meeting([5, 6], device)]
    for sends, receives in ((True, False), (False, True)):
        for context, call in zip(boards.contexts, calls, strict=True):
            where = replace(context, num_nodes=2)
            handshake(where, call.terms, call.post, nodes=call.nodes, sends=sends, receives=receives)
    assert [boards.record(rank) for rank in range(2)] == [None, None]
    assert calls[1].plan[:, :6].tolist() == [[4, 0, 5, 0, 3, 3], [6, 4, 6, 5, 4, 5]]


def test_too_little_remote_memory_somewhere_fails_on_all_ranks(device: str) -> None:
    boards = Boards(2, device)
    boards.handshake(Meeting([3, 4], device), Meeting([5, 6], device, remote_rows=10))
    assert boards.record(0) == [exchange.REMOTE_OVERFLOW, 1, 1, 1, 11, 10, 0], (
        "rank 1 sends 11 rows, and has room for 10"
    )
    assert boards.record(1) == boards.record(0)


def test_handles_of_different_dispatches_disagree(device: str) -> None:
    boards = Boards(2, device)
    boards.handshake(Meeting([3, 4], device), Meeting([5, 6], device, mark=8))
    assert boards.record(0) == [exchange.DISAGREE, 1, 1, 0b10, 0, 0, 0]


# Rows ----------------------------------------------------------------------------------------------------------------


def test_ring_worked_example(device: str) -> None:
    boards, remote = Boards(2, device), remote_of(device)
    context = replace(boards.contexts[0], num_nodes=2)
    context.state[exchange.STATE_EPOCH] = 9
    plan = plan_of([[0, 0, 0, 0, 0, 0], [7, 1, 5, 3, 2, 4]], device)
    rail.ring_doorbell(context, remote, ROWS, plan, 1, 2)
    doorbell = remote.words[DOORBELLS + (MOST_CHUNKS + 1) * DOORBELL_WORDS :][:11].tolist()
    # The epoch, the piece, and from where, to where, how many bytes: rows 2 to 4 of 5.
    assert doorbell == [9, 3, 5 * 16, 1000 + 4 * 16, 48, 0, 1000, 0, 512 + 5 * 4, 1512 + 4 * 4, 12]
    assert int(remote.words.count_nonzero()) == 9, "nothing for this node"
    synchronize(context)
    assert int(context.host[exchange.STATE_RAIL_BYTES]) == 60
    rail.ring_doorbell(context, remote, ROWS, plan, 0, 1, is_back=True)
    doorbell = remote.words[DOORBELLS + MOST_CHUNKS * DOORBELL_WORDS :][:5].tolist()
    assert doorbell == [9, 3, 1 * 16, 1000 + 4 * 16, 7 * 16], "sums lie and go as rows came"


@pytest.mark.parametrize("word", [exchange.STATE_FAILED, exchange.STATE_HELD])
def test_a_failed_or_held_call_rings_nothing_and_waits_for_nothing(device: str, word: int) -> None:
    context, remote = two_nodes(device), remote_of(device)
    context.state[word] = 1
    rail.ring_doorbell(context, remote, ROWS, plan_of([[0] * 6, [1] * 6], device), 0, 1)
    assert not remote.words.any()
    rail.await_arrived(context, remote, 0, 3, 0, 4)


def test_sums_do_not_leave_where_a_rank_has_failed(device: str) -> None:
    """Its caller may have overwritten rows that are in them. Tokens are this rank's own."""
    boards, remote = Boards(2, device), remote_of(device)
    context = replace(boards.contexts[0], num_nodes=2)
    exchange.abort(boards.contexts[1], 3)
    plan = plan_of([[0] * 6, [1] * 6], device)
    context.state[exchange.STATE_EPOCH] = 5
    rail.ring_doorbell(context, remote, ROWS, plan, 0, 1, is_back=True)
    assert not remote.words.any()
    rail.ring_doorbell(context, remote, ROWS, plan, 0, 1)
    assert remote.words[DOORBELLS + MOST_CHUNKS * DOORBELL_WORDS].item() == 5


def test_a_chunk_that_does_not_land_is_waited_for_up_to_the_limit(device: str) -> None:
    boards, remote = Boards(2, device), remote_of(device)
    context = replace(boards.contexts[0], num_nodes=2)
    context.state[exchange.STATE_EPOCH] = 5
    remote.words[MOST_CHUNKS * 8 : MOST_CHUNKS * 8 + 17 : 8] = torch.tensor([5, 6, 5], device=device)  # of node 1
    rail.await_arrived(context, remote, 1, 3, 0, 3)
    assert boards.record(0) is None
    rail.await_arrived(replace(context, limit_ns=1), remote, 1, 3, 2, 2)
    assert boards.record(0) == [exchange.TIMEOUT, 5, 1, 0b10, 3, 0, 0], "chunk 3 of rank 1 is missing"


def test_the_outbox_is_free_when_all_that_was_rung_for_has_left(device: str) -> None:
    boards, remote = Boards(2, device), remote_of(device)
    context, doorbell = replace(boards.contexts[0], num_nodes=2), DOORBELLS + MOST_CHUNKS * DOORBELL_WORDS
    rail.await_left(context, remote, 1, 2, 4)
    remote.words[doorbell], remote.words[doorbell + 15] = 4, 4
    rail.await_left(context, remote, 1, 2, 4)
    assert boards.record(0) is None
    remote.words[doorbell] = 5
    rail.await_left(replace(context, limit_ns=1), remote, 1, 2, 4)
    assert boards.record(0) == [exchange.TIMEOUT, 0, 1, 0b10, 2, 0, 0]


@pytest.mark.parametrize("is_back", [False, True])
def test_meet_rail_worked_example(device: str, is_back: bool) -> None:
    """Rank 0 tells the rank of its rail on node 1, whose word is here already, and counts its rows: 4, or back 7."""
    boards, remote, other = Boards(2, device), remote_of(device), remote_of(device)
    context = replace(boards.contexts[0], num_nodes=2)
    context.state[exchange.STATE_EPOCH] = 5
    remote.words[MOST_CHUNKS * 8] = 5
    words = torch.tensor([0, other.words.data_ptr()], device=device)
    plan = plan_of([[9, 9, 3], [7, 9, 4]], device)
    rail.rail_handshake(context, remote, words, ROWS, plan, 1, 3, is_back)
    assert boards.record(0) is None
    assert other.words.nonzero().tolist() == [[0]]
    assert int(other.words[0]) == 5
    assert int(context.host[exchange.STATE_RAIL_BYTES]) == (16 + 4) * (7 if is_back else 4)


def test_who_does_not_come_to_the_meeting_of_a_rail_is_waited_for_up_to_the_limit(device: str) -> None:
    boards, remote, other = Boards(2, device), remote_of(device), remote_of(device)
    context = replace(boards.contexts[0], num_nodes=2, limit_ns=1)
    context.state[exchange.STATE_EPOCH] = 5
    words = torch.tensor([0, other.words.data_ptr()], device=device)
    rail.rail_handshake(context, remote, words, ROWS, plan_of([[0] * 3, [1] * 3], device), 1, 3)
    assert boards.record(0) == [exchange.TIMEOUT, 5, 1, 0b10, 3, 0, 0]
