"""Meetings: headers, counts, offers, and what happens when a rank is missing, differs, or has failed."""

from __future__ import annotations

import pytest
import torch
from windows import Boards, synchronize

from deep_ep.kernels import _triton, exchange
from deep_ep.kernels.exchange import NUM_SECTIONS, SEGMENT_BITS, STATE_EPOCH, STATE_WORDS, Places, Post

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

ANNOUNCED, OFFERED = 1, 2
SAME = (17, 4)


def int32(values: list, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


class Announce:
    """A full dispatch's first meeting."""

    def __init__(self, counts: list[int], per_expert: list[int], device: str, **changes):
        self.counts, self.per_expert = int32(counts, device), int32(per_expert, device)
        self.given = int32(changes.pop("given", counts), device)
        self.prefix = int32([[-1] * len(counts)] * len(counts), device)
        self.post = Post(ANNOUNCED, 0, changes.pop("agreement", SAME), ticket=1, **changes)

    def __call__(self, places: Places) -> None:
        exchange.meet(places, self.post, self.counts, self.given, self.per_expert, self.prefix)
        synchronize(places)


def test_counts_worked_example(device: str) -> None:
    boards = Boards(2, device)
    calls = [
        Announce([1, 2], [1, 0, 2, 0], device, free_bytes=100, num_tokens=7),
        Announce([3, 4], [0, 3, 2, 2], device, free_bytes=200, num_tokens=8),
    ]
    boards.meet(*calls)
    for rank, call in enumerate(calls):
        assert boards.record(rank) is None
        assert call.prefix.tolist() == [[1, 2], [4, 6]]
        host = boards.places[rank].host.tolist()
        assert host[STATE_EPOCH] == 1, "the ticket is echoed"
        assert host[STATE_WORDS : STATE_WORDS + 2] == [100, 200]
        assert host[STATE_WORDS + 2 : STATE_WORDS + 4] == [7, 8], "tokens"
        assert host[STATE_WORDS + 6 : STATE_WORDS + 10] == [1, 2, 4, 6]
        assert host[STATE_WORDS + 10 : STATE_WORDS + 12] == [[1, 3], [4, 2]][rank], "selections of the rank's experts"
    assert boards.places[0].table[NUM_SECTIONS + 1].tolist() == [0, 0]
    assert boards.places[1].table[NUM_SECTIONS + 1].tolist() == [1, 2]


@pytest.mark.parametrize("num_ranks", [1, 3, 5])
def test_counts_of_any_number_of_ranks(device: str, num_ranks: int) -> None:
    boards = Boards(num_ranks, device)
    sent = torch.randint(0, 9, (num_ranks, num_ranks), generator=torch.Generator().manual_seed(1))
    calls = [Announce(row, [1] * num_ranks, device) for row in sent.tolist()]
    for epoch in (1, 2, 3):
        boards.meet(*calls)
        for rank, call in enumerate(calls):
            assert boards.record(rank) is None
            assert torch.equal(call.prefix, sent.cumsum(0).int())
            assert boards.places[rank].state[STATE_EPOCH] == epoch


def test_wrong_counts_are_told_to_the_host_alone(device: str) -> None:
    boards = Boards(2, device)
    Announce([1, 2], [1, 0, 2, 0], device, given=[1, 3])(boards.places[0])
    host = boards.places[0].host.tolist()
    assert host[0] == 1, "the ticket is echoed"
    assert host[exchange.STATE_RECORD : exchange.STATE_RECORD + 6] == [exchange.COUNTS, 1, 0, 1, 2, 3]
    assert all(not board.any() for board in boards.boards), "nothing was said"
    assert boards.places[0].state[:2].tolist() == [0, 0], "the call was not made, and the buffer goes on"


class Offer:
    """A meeting with offers: of a cached dispatch, or with counts of a worst-case one."""

    def __init__(self, num_rows: int, bases: tuple[int, ...], prefix: torch.Tensor, counts: torch.Tensor | None = None):
        self.post = Post(OFFERED, 1, SAME, num_rows, bases=bases)
        self.prefix, self.counts = prefix, counts
        self.per_expert = None if counts is None else torch.zeros_like(counts)

    def __call__(self, places: Places) -> None:
        exchange.meet(places, self.post, self.counts, self.counts, self.per_expert, self.prefix)
        synchronize(places)


def test_offers_become_addresses(device: str) -> None:
    boards = Boards(2, device)
    for one in boards.places:
        one.table.fill_(-5)
    prefix = int32([[1, 2], [4, 6]], device)
    boards.meet(Offer(7, (64, -1, 128), prefix), Offer(9, (256, 0 << SEGMENT_BITS | 512), prefix))
    first, second = (board.data_ptr() for board in boards.boards)
    for one in boards.places:
        assert one.table[0].tolist() == [first + 64, second + 256]
        assert one.table[1, 1].item() == second + 512
        assert one.table[2, 0].item() == first + 128
        assert one.table[NUM_SECTIONS].tolist() == [7, 9]
        assert one.table[NUM_SECTIONS + 1].tolist() == [0, 0], "the slots of a handle are whole"


def test_a_base_names_its_segment(device: str) -> None:
    boards = Boards(1, device)
    boards.places[0] = exchange.Places(
        **{**vars(boards.places[0]), "windows": torch.cat([boards.places[0].windows, torch.tensor([[1 << 30]])])}
    )
    Offer(1, (1 << SEGMENT_BITS | 77,), int32([[1]], device))(boards.places[0])
    assert boards.places[0].table[0].tolist() == [(1 << 30) + 77]


def test_more_rows_than_room_fail_on_all_ranks(device: str) -> None:
    boards = Boards(2, device)
    empty = int32([[0, 0], [0, 0]], device)
    boards.meet(
        Offer(4, (0,), empty.clone(), int32([1, 2], device)), Offer(5, (0,), empty.clone(), int32([3, 4], device))
    )
    assert boards.record(0) == [exchange.OVERFLOW, 1, 1, 1, 6, 5, 0], "rank 1 gets 6 rows and has room for 5"
    assert boards.record(1) == [exchange.OVERFLOW, 1, 1, 1, 6, 5, 0], "the first cause is passed on"


@pytest.mark.parametrize("agreement", [(16, 4), (17, 5)])
def test_ranks_that_differ_are_named(device: str, agreement: tuple[int, int]) -> None:
    boards = Boards(3, device)
    calls = [Announce([0, 0, 0], [0, 0, 0], device, agreement=agreement if rank == 1 else SAME) for rank in range(3)]
    boards.meet(*calls)
    assert boards.record(0) == [exchange.DISAGREE, 1, 0, 0b010, 0, 0, 0]
    assert boards.record(2) == boards.record(0), "the first cause is passed on"


def test_handles_of_different_dispatches_disagree(device: str) -> None:
    boards = Boards(2, device)
    boards.meet(Offer(1, (0,), int32([[1, 2], [4, 6]], device)), Offer(1, (0,), int32([[1, 2], [4, 7]], device)))
    assert boards.record(0) == [exchange.DISAGREE, 1, 1, 0b10, 0, 0, 0]


def test_a_missing_rank_is_named_at_the_limit(device: str) -> None:
    boards = Boards(3, device)
    announce = Announce([0, 0, 0], [0, 0, 0], device)
    for rank in (0, 2):
        announce(exchange.Places(**{**vars(boards.places[rank]), "limit_ns": 1}))
    assert boards.record(0) == [exchange.TIMEOUT, 1, 0, 0b110, ANNOUNCED, 0, 0], "nobody else had come"
    assert boards.record(2) == boards.record(0)


def test_a_rank_that_gave_up_ends_the_wait_of_the_others(device: str) -> None:
    boards = Boards(2, device)
    exchange.abort(boards.places[1], 3)
    Announce([0, 0], [0, 0], device)(boards.places[0])  # with the whole limit: it does not wait for it
    assert boards.record(0) == [exchange.HOST, 0, 3, 0, 0, 0, 1]


def refuse(places: Places, reason: str, device: str) -> None:
    note = exchange.note_words(reason, torch.device(device))
    exchange.refuse(places, 3, exchange.NORMAL, places.state, exchange.REFUSALS, note)


def test_a_rank_that_refuses_the_call_ends_the_wait_of_the_others(device: str) -> None:
    boards = Boards(2, device)
    announce = Announce([0, 0], [0, 0], device)
    boards.meet(announce, announce)
    refuse(boards.places[1], "a wrong 'x' of 7 rows, \udcff", device)
    word = boards.boards[0].view(torch.int64)[8 * 3].item()
    assert word == 2 << 17 | 1, "call 2, refused once"
    announce(boards.places[0])  # with the whole limit: it does not wait for it
    assert boards.record(0) == [exchange.REFUSED, 2, 3, 1, 0, 2, 1]
    assert boards.places[0].note(boards.boards[0], 2, 1) == "a wrong 'x' of 7 rows, \\udcff"


@pytest.mark.parametrize(("own", "other"), [(1, 1), (3, 1), (1, 2)])
def test_a_refusal_counts_only_if_this_rank_has_not_refused_as_often(device: str, own: int, other: int) -> None:
    boards = Boards(2, device)
    for _ in range(own):
        refuse(boards.places[0], "mine", device)
    for _ in range(other):
        refuse(boards.places[1], "the other's", device)
    Announce([0, 0], [0, 0], device)(exchange.Places(**{**vars(boards.places[0]), "limit_ns": 1}))
    assert boards.record(0)[0] == (exchange.TIMEOUT if own >= other else exchange.REFUSED)


def test_a_refusal_of_an_earlier_call_is_past(device: str) -> None:
    boards = Boards(2, device)
    refuse(boards.places[1], "but then it comes", device)
    announce = Announce([0, 0], [0, 0], device)
    for places in reversed(boards.places):  # it has entered call 1 after all, and then call 2
        announce(exchange.Places(**{**vars(places), "limit_ns": 1})) if places.rank else announce(places)
    assert boards.record(0)[0] == exchange.TIMEOUT, "it waited for nobody, and said so: that came first"


def test_staged_ranks_have_no_room_but_lanes(device: str) -> None:
    boards = Boards(3, device)
    prefix = int32([[1, 2, 0], [4, 6, 0], [4, 6, 1]], device)
    offers = [Offer(7, (64,), prefix), Offer(9, (256, 512), prefix), Offer(5, (64,), prefix)]
    offers[1].post = offers[1].post._replace(lane_rows=2)
    for rank, one in enumerate(offers):
        one.post = one.post._replace(num_tokens=10 + rank)
    boards.meet(*offers)
    for one in boards.places:
        assert one.table[0, 1].item() == boards.boards[1].data_ptr() + 256
        assert one.table[exchange.TABLE_ROOMS].tolist() == [7, 0, 5]
        assert one.table[exchange.TABLE_LANES].tolist() == [0, 2, 0]
        assert one.state[exchange.STATE_STAGED] == 1
        assert one.state[exchange.STATE_TOKENS] == 12, "the most of any rank"
    offers[1].post = offers[1].post._replace(lane_rows=0)
    boards.meet(*offers)
    assert boards.places[0].table[exchange.TABLE_ROOMS].tolist() == [7, 9, 5]
    assert boards.places[0].state[exchange.STATE_STAGED] == 0


def test_a_rank_two_calls_ahead_is_a_fault(device: str) -> None:
    boards = Boards(2, device)
    boards.boards[0][8] = 3 << 24  # rank 1's progress, on rank 0's board
    Announce([0, 0], [0, 0], device)(boards.places[0])
    assert boards.record(0) == [exchange.ASTRAY, 1, 0, 0b10, 0, 0, 0]


def test_after_a_failure_nothing_is_said_any_more(device: str) -> None:
    boards = Boards(2, device)
    boards.places[0].state[exchange.STATE_FAILED] = 1
    Announce([0, 0], [0, 0], device)(boards.places[0])
    exchange.abort(boards.places[0], 0)
    assert all(not board.any() for board in boards.boards)


@pytest.mark.parametrize("lacking", [None, 0, 1])
def test_lanes_are_for_all_ranks_or_for_none_where_rows_are_pushed(device: str, lacking: int | None) -> None:
    boards = Boards(2, device)

    def say(rank: int):
        base = -1 if rank == lacking else 64
        post = Post(OFFERED, 8, SAME, 6, 3, 3, bases=(128, -1, base), is_pushed=True)

        def call(places: Places) -> None:
            exchange.meet(places, post, prefix=int32([[1, 1], [2, 2]], device))
            synchronize(places)

        return call

    boards.meet(say(0), say(1))
    for rank, places in enumerate(boards.places):
        assert boards.record(rank) is None
        rooms, lanes = places.table[exchange.TABLE_ROOMS].tolist(), places.table[exchange.TABLE_LANES].tolist()
        assert (rooms, lanes) == (([6, 6], [0, 0]) if lacking is None else ([0, 0], [3, 3]))
        if lacking is None:
            assert places.table[2].tolist() == [one.data_ptr() + 64 for one in boards.boards]
