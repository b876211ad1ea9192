"""The handshake that a call begins with: numbers of tokens, headers, counts and offers; and the copy in front of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from calls import OFFERED, SAME, Announce, Offer, all_bases, copy_and_handshake, handshake, int32, positions
from windows import Boards, fail, synchronize

from deep_ep.kernels import _triton, exchange, notify, pull
from deep_ep.kernels.exchange import HEADER_WORDS, NUM_SECTIONS, SEGMENT_BITS, STATE_EPOCH, STATE_WORDS, Context
from deep_ep.kernels.notify import Nodes, Numbered, Post, Terms
from deep_ep.kernels.put import LaunchShape, word_of
from deep_ep.kernels.rows import as_bytes

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

SHAPE = LaunchShape(num_blocks=3, words=64, num_warps=2)
UNTOUCHED = 0x5A


# Counts and offers ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_numbered", [False, True])
def test_counts_worked_example(device: str, is_numbered: bool) -> None:
    boards = Boards(2, device)
    calls = [
        Announce([1, 2], [1, 0, 2, 0], device, is_numbered=is_numbered, free_bytes=100, num_tokens=7),
        Announce([3, 4], [0, 3, 2, 2], device, is_numbered=is_numbered, free_bytes=200, num_tokens=8),
    ]
    boards.handshake(*calls)
    for rank, call in enumerate(calls):
        assert boards.record(rank) is None
        assert call.prefix.tolist() == [[1, 2], [4, 6]]
        host = boards.contexts[rank].host.tolist()
        assert host[STATE_EPOCH] == 1, "the ticket is echoed"
        assert host[STATE_WORDS : STATE_WORDS + 2] == [100, 200]
        assert host[STATE_WORDS + 2 : STATE_WORDS + 4] == [7, 8], "tokens"
        assert host[STATE_WORDS + 6 : STATE_WORDS + 10] == [1, 2, 4, 6]
        assert host[STATE_WORDS + 10 : STATE_WORDS + 12] == [[1, 3], [4, 2]][rank], "selections of the rank's experts"
    assert boards.contexts[0].table[NUM_SECTIONS + 1].tolist() == [0, 0]
    assert boards.contexts[1].table[NUM_SECTIONS + 1].tolist() == [1, 2]


@pytest.mark.parametrize("is_numbered", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 3, 5])
def test_counts_of_any_number_of_ranks(device: str, num_ranks: int, is_numbered: bool) -> None:
    boards = Boards(num_ranks, device)
    sent = torch.randint(0, 9, (num_ranks, num_ranks), generator=torch.Generator().manual_seed(1))
    calls = [Announce(row, [1] * num_ranks, device, is_numbered=is_numbered) for row in sent.tolist()]
    for epoch in (1, 2, 3):
        boards.handshake(*calls)
        for rank, call in enumerate(calls):
            assert boards.record(rank) is None
            assert torch.equal(call.prefix, sent.cumsum(0).int())
            assert torch.equal(call.counts, sent[rank].int())
            assert boards.contexts[rank].state[STATE_EPOCH] == epoch


@pytest.mark.parametrize("is_numbered", [False, True])
def test_wrong_counts_are_told_to_the_host_alone(device: str, is_numbered: bool) -> None:
    boards = Boards(2, device)
    Announce([1, 2], [1, 0, 2, 0], device, given=[1, 3], is_numbered=is_numbered)(boards.contexts[0])
    host = boards.contexts[0].host.tolist()
    assert host[0] == 1, "the ticket is echoed"
    assert host[exchange.STATE_RECORD : exchange.STATE_RECORD + 6] == [exchange.COUNTS, 1, 0, 1, 2, 3]
    assert all(not board.any() for board in boards.boards), "nothing was said"
    assert boards.contexts[0].state[:2].tolist() == [0, 0], "the call was not made, and the buffer goes on"


def test_offers_become_addresses(device: str) -> None:
    boards = Boards(2, device)
    for one in boards.contexts:
        one.table.fill_(-5)
    prefix = int32([[1, 2], [4, 6]], device)
    boards.handshake(Offer(7, (64, -1, 128), prefix), Offer(9, (256, 0 << SEGMENT_BITS | 512), prefix))
    first, second = (board.data_ptr() for board in boards.boards)
    for one in boards.contexts:
        assert one.table[0].tolist() == [first + 64, second + 256]
        assert one.table[1, 1].item() == second + 512
        assert one.table[2, 0].item() == first + 128
        assert one.table[NUM_SECTIONS].tolist() == [7, 9]
        assert one.table[NUM_SECTIONS + 1].tolist() == [0, 0], "the slots of a handle are whole"


def test_a_base_names_its_segment(device: str) -> None:
    boards = Boards(1, device)
    segments = torch.cat([boards.contexts[0].windows, torch.tensor([[1 << 30]])])
    boards.contexts[0] = replace(boards.contexts[0], windows=segments)
    Offer(1, (1 << SEGMENT_BITS | 77,), int32([[1]], device))(boards.contexts[0])
    assert boards.contexts[0].table[0].tolist() == [(1 << 30) + 77]


def test_more_rows_than_room_fail_on_all_ranks(device: str) -> None:
    boards = Boards(2, device)
    empty = int32([[0, 0], [0, 0]], device)
    boards.handshake(
        Offer(4, (0,), empty.clone(), int32([1, 2], device)), Offer(5, (0,), empty.clone(), int32([3, 4], device))
    )
    assert boards.record(0) == [exchange.OVERFLOW, 1, 1, 1, 6, 5, 0], "rank 1 gets 6 rows and has room for 5"
    assert boards.record(1) == [exchange.OVERFLOW, 1, 1, 1, 6, 5, 0], "the first cause is passed on"


@pytest.mark.parametrize("is_numbered", [False, True])
@pytest.mark.parametrize("agreement", [(16, 4), (17, 5)])
def test_ranks_that_differ_are_named(device: str, agreement: tuple[int, int], is_numbered: bool) -> None:
    boards = Boards(3, device)
    said = [SAME, agreement, SAME]
    calls = [Announce([0] * 3, [0] * 3, device, agreement=one, is_numbered=is_numbered) for one in said]
    boards.handshake(*calls)
    assert boards.record(0) == [exchange.DISAGREE, 1, 0, 0b010, 0, 0, 0]
    assert boards.record(2) == boards.record(0), "the first cause is passed on"


def test_handles_of_different_dispatches_disagree(device: str) -> None:
    boards = Boards(2, device)
    boards.handshake(Offer(1, (0,), int32([[1, 2], [4, 6]], device)), Offer(1, (0,), int32([[1, 2], [4, 7]], device)))
    assert boards.record(0) == [exchange.DISAGREE, 1, 1, 0b10, 0, 0, 0]


def test_staged_ranks_have_no_room_but_lanes(device: str) -> None:
    boards = Boards(3, device)
    prefix = int32([[1, 2, 0], [4, 6, 0], [4, 6, 1]], device)
    offers = [Offer(7, (64,), prefix), Offer(9, (256, 512), prefix), Offer(5, (64,), prefix)]
    offers[1].post = offers[1].post._replace(rows_per_source=2)
    for rank, one in enumerate(offers):
        one.post = one.post._replace(num_tokens=10 + rank)
    boards.handshake(*offers)
    for one in boards.contexts:
        assert one.table[0, 1].item() == boards.boards[1].data_ptr() + 256
        assert one.table[exchange.TABLE_CAPACITIES].tolist() == [7, 0, 5]
        assert one.table[exchange.TABLE_SOURCE_ROWS].tolist() == [0, 2, 0]
        assert one.state[exchange.STATE_STAGED] == 1
        assert one.state[exchange.STATE_TOKENS] == 12, "the most of any rank"
    offers[1].post = offers[1].post._replace(rows_per_source=0)
    boards.handshake(*offers)
    assert boards.contexts[0].table[exchange.TABLE_CAPACITIES].tolist() == [7, 9, 5]
    assert boards.contexts[0].state[exchange.STATE_STAGED] == 0


@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("has_counts", [False, True])
def test_a_rank_says_so_many_words_of_its_header(device: str, has_counts: bool, num_nodes: int) -> None:
    """What a proxy carries to other nodes: up to the last word that says something."""
    boards = Boards(2, device)
    context, terms = replace(boards.contexts[1], num_nodes=num_nodes), Terms(OFFERED, 1, SAME, num_local=3 * has_counts)
    counts, per_expert = (int32([5, 5], device), int32([6] * 6, device)) if has_counts else (None, None)
    nodes = None
    if num_nodes > 1:
        nothing = int32([7], device)
        nodes = Nodes(int32([8, 8], device), context.state, nothing, nothing)
    handshake(context, terms, Post(1), counts, counts, per_expert, nodes=nodes, receives=False)
    said = boards.boards[0][2 * 8 * 2 + 3 * context.header_words :][: context.header_words]
    num_words = notify.num_words_sent(context, terms, has_counts)
    assert num_words == HEADER_WORDS + num_nodes + (2 + 3) * has_counts
    assert not said[num_words:].any()
    assert bool(said[num_words - 1]) == (has_counts or num_nodes > 1)


# Numbers -------------------------------------------------------------------------------------------------------------


def positions_torch(is_token_in_rank: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of numbering: [T, R] int32, how many tokens before this one go there, -1 where it does not; and [R]."""
    numbers = is_token_in_rank.cumsum(0, dtype=torch.int32) - 1
    return torch.where(is_token_in_rank, numbers, -1).int(), is_token_in_rank.sum(0, dtype=torch.int32)


def node_positions_torch(
    is_token_in_rank: torch.Tensor, node_numbers: torch.Tensor, node_counts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """The twin of numbering across nodes: numbers [T, N] and counts [N, C] of nodes are written."""
    numbers, counts = positions_torch(is_token_in_rank.unflatten(1, (node_counts.size(0), -1)).any(2))
    node_numbers.copy_(numbers)
    node_counts.copy_(counts[:, None])
    return positions_torch(is_token_in_rank)


def draw_mask(num_tokens: int, num_ranks: int, share: float, device: str) -> torch.Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return (torch.rand(num_tokens, num_ranks, generator=generator) < share).to(device)


def require_same(got: list[torch.Tensor], wanted: list[torch.Tensor]) -> None:
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_positions_worked_example(device: str) -> None:
    numbers, num_tokens = positions(torch.tensor([[True], [False], [True]], device=device))
    assert numbers.tolist() == [[0], [-1], [1]]
    assert num_tokens.tolist() == [2]


def test_node_positions_worked_example(device: str) -> None:
    mask = torch.tensor([[True, False], [False, False], [True, True]], device=device)
    node_numbers, node_counts = int32([[9]] * 3, device), int32([[9, 9]], device)
    _, num_tokens = positions(mask, node_numbers, node_counts)
    assert num_tokens.tolist() == [2, 1]
    assert node_numbers.tolist() == [[0], [-1], [1]]
    assert node_counts.tolist() == [[2, 2]]


@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@pytest.mark.parametrize(("num_tokens", "num_ranks"), [(0, 3), (1, 1), (50, 2), (1024, 3), (1025, 2), (2500, 5)])
def test_positions_are_those_of_the_twin(device: str, num_tokens: int, num_ranks: int, share: float) -> None:
    mask = draw_mask(num_tokens, num_ranks, share, device)
    require_same([*positions(mask)], [*positions_torch(mask)])


WORDS = [torch.uint8, torch.int8, torch.int16, torch.int32]


@pytest.mark.parametrize(
    ("num_tokens", "num_ranks", "num_nodes", "num_channels", "word"),
    [
        (0, 4, 2, 3, None),
        (50, 2, 2, 1, None),
        (1030, 6, 2, 10, None),
        (33, 12, 3, 2, None),
        (40, 16, 2, 4, None),
        (2500, 8, 1, 1, None),
        *((60, 16, 2, 3, word) for word in WORDS),
        *((1100, 4, 1, 2, word) for word in WORDS),
        *((0, 8, 2, 2, word) for word in WORDS),
    ],
)
def test_node_positions_are_those_of_the_twin(
    device: str, num_tokens: int, num_ranks: int, num_nodes: int, num_channels: int, word: torch.dtype | None
) -> None:
    mask = draw_mask(num_tokens, num_ranks, 0.2, device)
    sizes = ((num_tokens, num_nodes), (num_nodes, num_channels))
    got, wanted = ([torch.full(size, -9, dtype=torch.int32, device=device) for size in sizes] for _ in range(2))
    got += positions(mask, *got, word=word)
    wanted += node_positions_torch(mask, *wanted)
    require_same(got, wanted)


@pytest.mark.parametrize(
    ("ranks_per_node", "offset", "word"),
    [
        (8, 0, torch.int32),
        (4, 4, torch.int32),
        (4, 2, torch.int16),
        (2, 0, torch.int16),
        (8, 1, torch.int8),
        (3, 0, torch.int8),
    ],
)
def test_ranks_of_a_node_are_looked_at_by_the_widest_word_that_fits(
    device: str, ranks_per_node: int, offset: int, word: torch.dtype
) -> None:
    """Whatever its place, a mask is numbered as its twin is."""
    context = replace(Boards(2 * ranks_per_node, device).contexts[0], num_nodes=2)
    memory = torch.zeros(offset + 20 * 2 * ranks_per_node, dtype=torch.bool, device=device)
    mask = memory[offset:].view(20, 2 * ranks_per_node)
    mask.copy_(draw_mask(20, 2 * ranks_per_node, 0.2, device))
    assert notify.node_word(context, mask) == word
    got, wanted = ([int32([[-9] * 2] * rows, device) for rows in (20, 2)] for _ in range(2))
    got += positions(mask, *got)
    wanted += node_positions_torch(mask, *wanted)
    require_same(got, wanted)


class NumberedMeeting:
    """A full dispatch of two nodes: tokens are numbered, and counts of ranks and of nodes exchanged."""

    def __init__(self, mask: torch.Tensor, num_channels: int, remote_rows: int = 1000):
        device, (num_tokens, num_ranks) = mask.device.type, mask.shape
        self.mask = mask
        self.terms = Terms(1, 0, SAME)
        self.post = Post(num_rows=1000, num_tokens=num_tokens, remote_rows=remote_rows, ticket=3)
        self.counts, self.given = int32([-9] * num_ranks, device), mask.sum(0, dtype=torch.int32)
        self.per_expert = self.given.clone()
        self.prefix = int32([[-9] * num_ranks] * num_ranks, device)
        self.node_counts = int32([[-9] * num_channels] * 2, device)
        self.plan = torch.zeros(2, exchange.PLAN_WORDS, dtype=torch.int64, device=device)
        self.node_prefix, self.mark = int32([-9] * 2, device), int32([-9] * 3, device)
        self.numbers = torch.full(mask.shape, -9, dtype=torch.int32, device=device)
        self.node_numbers = torch.full((num_tokens, 2), -9, dtype=torch.int32, device=device)

    def __call__(self, context: Context, sends: bool = True, receives: bool = True) -> None:
        nodes = Nodes(self.node_counts, self.plan, self.node_prefix, self.mark)
        handshake(
            replace(context, num_nodes=2), self.terms, self.post, self.counts, self.given, self.per_expert, self.prefix,
            nodes=nodes, numbered=Numbered(self.mask, self.numbers, self.node_numbers) if sends else None,
            sends=sends, receives=receives,
        )  # fmt: skip
        synchronize(context)


@pytest.mark.parametrize("has_halves", [False, True])
@pytest.mark.parametrize("num_tokens", [(0, 0, 0, 0), (9, 0, 30, 1200)])
def test_what_is_numbered_is_exchanged(device: str, num_tokens: tuple[int, ...], has_halves: bool) -> None:
    boards = Boards(4, device)
    calls = [NumberedMeeting(draw_mask(count, 4, 0.3, device), 2) for count in num_tokens]
    if has_halves:
        for sends, receives in ((True, False), (False, True)):
            for one, call in zip(boards.contexts, calls, strict=True):
                call(one, sends, receives)
    else:
        boards.handshake(*calls)
    sent = torch.stack([call.given for call in calls])
    for rank, call in enumerate(calls):
        assert boards.record(rank) is None
        wanted = [torch.empty_like(call.node_numbers), torch.empty_like(call.node_counts)]
        wanted += node_positions_torch(call.mask, *wanted)
        require_same([call.node_numbers, call.node_counts, call.numbers, call.counts], wanted)
        assert torch.equal(call.prefix, sent.cumsum(0).int())
        assert call.mark.tolist() == [2] * 3, "of the first call"
        rail = [calls[rank % 2 + 2 * node].node_counts[rank // 2, 0] for node in range(2)]
        assert call.plan[:, exchange.PLAN_NUM_IN].tolist() == rail
        assert call.plan[:, exchange.PLAN_NUM_OUT].tolist() == call.node_counts[:, 0].tolist()
        assert call.node_prefix.tolist() == torch.stack(rail).cumsum(0).tolist()
        assert boards.contexts[rank].host[STATE_EPOCH] == 3, "the ticket is echoed"
        assert boards.contexts[rank].state[exchange.STATE_ENDED] == 0


def test_too_little_remote_memory_holds_a_call_that_the_host_waits_for(device: str) -> None:
    boards = Boards(4, device)
    calls = [
        NumberedMeeting(draw_mask(40, 4, 0.9, device), 1, remote_rows=3 if rank == 2 else 1000) for rank in range(4)
    ]
    boards.handshake(*calls)
    for rank, one in enumerate(boards.contexts):
        assert boards.record(rank) is None
        assert one.state[exchange.STATE_HELD] == 1
        assert one.host[exchange.STATE_HELD] == 1


# The copy in front ---------------------------------------------------------------------------------------------------


class Given:
    """Two ranks, whose rows came in a dispatch: half of them from each. Both lie outside of the window."""

    def __init__(self, dtype: torch.dtype, num_rows: int, num_came: int, columns: int, device: str, offset: int = 0):
        generator = torch.Generator().manual_seed(columns)
        size = num_rows * columns * dtype.itemsize
        self.boards = Boards(2, device)
        self.prefix = int32([[num_came // 2] * 2, [num_came] * 2], device)
        self.rows, self.targets = [], []
        for _ in range(2):
            raw = torch.randint(0, 120, (size,), generator=generator, dtype=torch.uint8).to(device)
            self.rows.append(raw.view(dtype).view(num_rows, columns))
            memory = torch.full((offset + size,), UNTOUCHED, dtype=torch.uint8, device=device)
            self.targets.append(memory[offset:].view(dtype).view(num_rows, columns))
        self.terms = Terms(OFFERED, 3, SAME)
        self.posts = [Post(num_rows + 5, num_tokens=rank, bases=all_bases(64 * rank)) for rank in range(2)]

    def copying(self, shape: LaunchShape) -> None:
        """Copy and meet at once."""
        self.boards.handshake(
            *(
                lambda context, rank=rank: copy_and_handshake(
                    context, self.terms, shape, self.posts[rank], self.prefix, self.targets[rank], self.rows[rank]
                )
                for rank in range(2)
            )
        )

    def apart(self, shape: LaunchShape) -> None:
        """Copy, then meet."""
        for context, target, rows in zip(self.boards.contexts, self.targets, self.rows, strict=True):
            pull.copy_in(context, shape, target, rows, self.prefix)
        self.boards.handshake(
            *(
                lambda context, rank=rank: handshake(context, self.terms, self.posts[rank], prefix=self.prefix)
                for rank in range(2)
            )
        )

    def handed_over(self) -> list[list[int]]:
        """All that a handshake leaves, addresses counted from the boards that they point into."""
        first = [board.data_ptr() for board in self.boards.boards]
        words = [board.tolist() for board in self.boards.boards]
        for one in self.boards.contexts:
            table = one.table.tolist()
            words.append([place - start for place, start in zip(table[0], first, strict=True)])
            words += [*table[NUM_SECTIONS:], one.state[:STATE_WORDS].tolist(), one.host.tolist()]
        return words


COPIES = {
    "odd bytes": (torch.uint8, 4, 4, 13, 0),
    "odd bytes, a few": (torch.uint8, 7, 3, 1, 0),
    "odd halves": (torch.bfloat16, 9, 6, 33, 0),
    "vectors": (torch.bfloat16, 6, 6, 64, 0),
    "several pieces a block": (torch.float32, 6, 5, 300, 0),
    "wide": (torch.float64, 3, 3, 70, 0),
    "an odd place": (torch.float32, 5, 5, 24, 4),
    "a place of bytes": (torch.uint8, 5, 4, 24, 3),
    "nothing came": (torch.float32, 3, 0, 8, 0),
    "no rows": (torch.bfloat16, 0, 0, 16, 0),
    "no rows of odd bytes": (torch.uint8, 0, 0, 7, 0),
    "more came than there is room for": (torch.float32, 3, 10, 8, 0),
}


@pytest.mark.parametrize("shape", [SHAPE, LaunchShape(num_blocks=40, words=16, num_warps=1), LaunchShape(1, 32, 16)])
@pytest.mark.parametrize("name", COPIES)
def test_a_copy_that_meets_is_a_copy_and_then_a_handshake(device: str, name: str, shape: LaunchShape) -> None:
    dtype, num_rows, num_came, columns, offset = COPIES[name]
    at_once, apart = (Given(dtype, num_rows, num_came, columns, device, offset) for _ in range(2))
    at_once.copying(shape)
    apart.apart(shape)
    num_copied = min(num_rows, num_came)
    for rank in range(2):
        assert at_once.boards.record(rank) is None
        target, rows = as_bytes(at_once.targets[rank]), as_bytes(at_once.rows[rank])
        assert torch.equal(target[:num_copied], rows[:num_copied])
        assert (target[num_copied:] == UNTOUCHED).all()
        assert torch.equal(target, as_bytes(apart.targets[rank]))
        context = at_once.boards.contexts[rank]
        assert context.state[STATE_EPOCH] == 1
        assert context.state[exchange.STATE_ENDED] == 0, "the next kernel counts its blocks anew"
        assert context.table[exchange.TABLE_CAPACITIES].tolist() == [num_rows + 5] * 2
    assert at_once.handed_over() == apart.handed_over()


def test_copies_that_meet_one_after_the_other(device: str) -> None:
    """Blocks are counted in the state, which all kernels of a buffer share."""
    given = Given(torch.float32, 6, 6, 300, device)
    for epoch in range(1, 4):
        for target in given.targets:
            target.zero_()
        given.copying(SHAPE)
        for rank, one in enumerate(given.boards.contexts):
            assert given.boards.record(rank) is None
            assert one.state[STATE_EPOCH] == epoch
            assert torch.equal(given.targets[rank], given.rows[rank])


def test_what_was_held_before_is_over(device: str) -> None:
    given = Given(torch.float32, 4, 4, 8, device)
    for one in given.boards.contexts:
        one.state[exchange.STATE_HELD] = 1
    copy_and_handshake(
        replace(given.boards.contexts[0], limit_ns=1), given.terms, SHAPE, given.posts[0], given.prefix,
        given.targets[0], given.rows[0],
    )  # fmt: skip
    assert torch.equal(given.targets[0], given.rows[0])
    given.boards.forget_failures()
    given.copying(SHAPE)
    assert [one.state[exchange.STATE_HELD].item() for one in given.boards.contexts] == [0, 0]


@pytest.mark.parametrize("num_rows", [0, 6])
def test_after_a_failure_nothing_is_copied_and_nothing_said(device: str, num_rows: int) -> None:
    given = Given(torch.float32, num_rows, num_rows, 300, device)
    context = given.boards.contexts[0]
    fail(context)
    before = context.state.clone()
    copy_and_handshake(context, given.terms, SHAPE, given.posts[0], given.prefix, given.targets[0], given.rows[0])
    synchronize(context)
    assert (as_bytes(given.targets[0]) == UNTOUCHED).all()
    assert not any(board.any() for board in given.boards.boards)
    assert not context.table.any()
    assert not context.host.any()
    assert torch.equal(context.state, before), "nor are any blocks counted still"


def test_copies_that_disagree_fail_after_they_copied(device: str) -> None:
    given = Given(torch.bfloat16, 4, 4, 16, device)
    handles = [given.prefix, given.prefix + int32([[0, 0], [0, 1]], device)]
    given.boards.handshake(
        *(
            lambda context, rank=rank: copy_and_handshake(
                context, given.terms, SHAPE, given.posts[rank], handles[rank], given.targets[rank], given.rows[rank]
            )
            for rank in range(2)
        )
    )
    assert given.boards.record(0) == [exchange.DISAGREE, 1, 3, 0b10, 0, 0, 0]
    assert given.boards.record(1) == given.boards.record(0)


def test_the_word_of_a_copy_fits_both_sides(device: str) -> None:
    """As a call finds it: the tests above take all sizes of it."""
    words = set()
    for dtype, num_rows, num_came, columns, offset in COPIES.values():
        given = Given(dtype, num_rows, num_came, columns, device, offset)
        words.add(word_of(given.targets[0], given.rows[0]))
    assert words == {(torch.int8, False), (torch.int16, False), (torch.int32, False), (torch.int32, True)}
