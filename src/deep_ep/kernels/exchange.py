"""How ranks meet on the device: headers, signals, and waits with a limit. `docs/protocol.md` has the state table.

Shape letters: R ranks, E experts, L = E / R. All words are int64. Every kernel here is one block of one warp: it may
wait, so it must not keep others out. A kernel that moves rows never waits; `staging.py` has the one exception.

A *board* is the first part of a rank's window. Peers write it, each its own part, and its owner polls it:

    progress  [R, 8]              line p: how far rank p is, `epoch << 24 | step`
    failures  [R, 8]              line p: a word that is 1 once rank p has failed, and its record; before that, the last
                                  call that rank p has refused to make, see `refusal_word`
    headers   [2, R, H]           by parity of the epoch: what rank p says on entering a call, H = 24 + N + R + L words,
                                  and 64 more that say why it has refused one

The *state* of a rank is private: its epoch, the record of its failure, and what a call needs of the peers' offers.

Across nodes (N of them, P ranks each) a rank has a second board, which far ranks write by way of a courier; and what
it says to a far rank goes to a mirror of that one's board (`transport/far.py`). So the addresses to write to are a
table, `windows`, and those to read from another, `homes`; kernels do not ask what is behind them.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ..errors import encoded
from ..sizing import align
from ._triton import jit, launch, next_power_of_2, prepare, tl, triton
from .primitives import clock_ns, load_acquire, store_release, tell_host, words_at

NUM_SECTIONS = 3  # payload, scales, records
SEGMENT_BITS = 40  # a base is `segment << 40 | offset`; -1: there is none

# Failures, as their records have them.
TIMEOUT, DISAGREE, OVERFLOW, COUNTS, ASTRAY, HOST, GONE, FAR_OVERFLOW, REFUSED = 1, 2, 3, 4, 5, 6, 7, 8, 9

# Kinds of calls that a rank may refuse: each kind is numbered by itself.
NORMAL, LOW_LATENCY = 0, 1
_NORMAL = tl.constexpr(NORMAL)
_TIMES_BITS = tl.constexpr(16)  # of the word of a refusal
NOTE_WORDS = 64  # of the reason of a refusal, at the end of the header of the call
_NOTE = tl.constexpr(NOTE_WORDS)

_LINE = tl.constexpr(8)
_STEP_BITS = tl.constexpr(24)
_SEGMENT_BITS = tl.constexpr(SEGMENT_BITS)
_OFFSET_MASK = tl.constexpr((1 << SEGMENT_BITS) - 1)
_NUM_SECTIONS = tl.constexpr(NUM_SECTIONS)
_TIMEOUT, _DISAGREE, _OVERFLOW = tl.constexpr(TIMEOUT), tl.constexpr(DISAGREE), tl.constexpr(OVERFLOW)
_COUNTS, _ASTRAY, _HOST = tl.constexpr(COUNTS), tl.constexpr(ASTRAY), tl.constexpr(HOST)
_FAR_OVERFLOW, _REFUSAL = tl.constexpr(FAR_OVERFLOW), tl.constexpr(REFUSED)

# Words of a header. Behind them are N that say, across nodes, how many tokens go to each; and, in calls that have them,
# the counts of R ranks and of L experts.
HEADER_WORDS = 24
_A, _B, _HANDLE, _FREE, _TOKENS = (tl.constexpr(word) for word in range(5))
_OFFER, _HEADER = tl.constexpr(5), tl.constexpr(HEADER_WORDS)
# An offer is the rows that there is room for, the rows of a lane if the room is staging (else 0), the base of each
# section, and the rows that there is room for in far memory. The second one of a call has words of its own: a slow peer
# may still be looking at the first.
_OFFER_WORDS, _LANE, _BASES = tl.constexpr(3 + NUM_SECTIONS), tl.constexpr(1), tl.constexpr(2)
_FAR_ROOM = tl.constexpr(2 + NUM_SECTIONS)

# Words of the state and of the host's mirror of it: epoch (ticket), failed, held, then the record. A call is held while
# its rows cannot move: the guessed offers did not fit, or it was refused. Then what a call with staged ranks needs: how
# many there are, the most tokens of any rank, and, of all calls, the rounds beyond the first. Then whether the last
# meeting was announced, and, of all calls, the bytes of rows that this rank gave to its rail. Last, the call that this
# rank refused last.
STATE_EPOCH, STATE_FAILED, STATE_HELD, STATE_RECORD, STATE_WORDS = 0, 1, 2, 3, 16
STATE_STAGED, STATE_TOKENS, STATE_ROUNDS, STATE_SAID, STATE_RAIL_BYTES, STATE_REFUSED = 10, 11, 12, 13, 14, 15
REFUSALS = range(STATE_REFUSED, STATE_REFUSED + 1)
_FAILED, _HELD, _RECORD = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_HELD), tl.constexpr(STATE_RECORD)
_STAGED, _MOST_TOKENS, _STATE = tl.constexpr(STATE_STAGED), tl.constexpr(STATE_TOKENS), tl.constexpr(STATE_WORDS)
_SAID, _REFUSED = tl.constexpr(STATE_SAID), tl.constexpr(STATE_REFUSED)

# Rows of the table, behind the addresses of the sections. Of a staged rank `put` and `pull` see no room at all.
TABLE_ROOMS, TABLE_STARTS, TABLE_LANES, TABLE_ROWS = (NUM_SECTIONS + row for row in range(4))
_ROOMS, _STARTS, _LANE_ROWS = tl.constexpr(TABLE_ROOMS), tl.constexpr(TABLE_STARTS), tl.constexpr(TABLE_LANES)

# Columns of the plan of a call across nodes, a row for each node n, as a rank (a, i) needs it: rows that (n, i) sends
# to node a, and where they begin among those of all nodes; tokens that this rank sends to n, and where they begin;
# where they begin among those that (n, i) gets; where the sums for (n, i) begin among those that it gets back.
PLAN_NUM_IN, PLAN_IN_START, PLAN_NUM_OUT, PLAN_OUT_START, PLAN_TARGET_START, PLAN_BACK_START = range(6)
PLAN_WORDS = 8
_NUM_IN, _IN_START, _NUM_OUT = tl.constexpr(PLAN_NUM_IN), tl.constexpr(PLAN_IN_START), tl.constexpr(PLAN_NUM_OUT)
_OUT_START, _TARGET_START = tl.constexpr(PLAN_OUT_START), tl.constexpr(PLAN_TARGET_START)
_BACK_START, _PLAN = tl.constexpr(PLAN_BACK_START), tl.constexpr(PLAN_WORDS)


@dataclass(frozen=True)
class Places:
    """Where a rank's words are. Made once for a buffer.

    Attributes:
        rank: This rank.
        num_ranks: R.
        windows: [segments, R] int64 addresses of the ranks' memory; row 0 begins with the boards. A far rank has only a
            mirror of its board, in row 0.
        homes: [R] int64 addresses of this rank's board, for each rank that which it writes.
        state: [STATE_WORDS] int64, private.
        table: [TABLE_ROWS, R] int64: addresses of the peers' sections, rows offered, first slots, rows of a lane.
        host: [STATE_WORDS + 3 R + R * R + L] int64 in memory that the host reads while kernels run.
        header_words: H.
        limit_ns: How long a wait may take.
        num_nodes: N.
    """

    rank: int
    num_ranks: int
    windows: torch.Tensor
    homes: torch.Tensor
    state: torch.Tensor
    table: torch.Tensor
    host: torch.Tensor
    header_words: int
    limit_ns: int
    num_nodes: int = 1

    @property
    def num_near(self) -> int:
        """P, the ranks of a node."""
        return self.num_ranks // self.num_nodes

    @property
    def first_near(self) -> int:
        """The first rank of this rank's node."""
        return self.rank // self.num_near * self.num_near

    @staticmethod
    def header_room(num_ranks: int, max_experts: int, num_nodes: int = 1) -> int:
        """H: words of a header, where `max_experts` are the most of any call."""
        return align(HEADER_WORDS + num_ranks + max_experts // num_ranks + num_nodes + NOTE_WORDS, 8)

    @staticmethod
    def board_bytes(num_ranks: int, header_words: int) -> int:
        """Bytes of a board."""
        return 8 * (2 * 8 * num_ranks + 2 * num_ranks * header_words)

    @staticmethod
    def host_room(num_ranks: int, max_experts: int) -> int:
        """Words of `host`."""
        return STATE_WORDS + 3 * num_ranks + num_ranks * num_ranks + max_experts // num_ranks

    def said(self, board: torch.Tensor, epoch: int, rank: int) -> list[int]:
        """What a rank said in a call, as this rank's board has it: the two words of its agreement, and its handle's."""
        start = 2 * 8 * self.num_ranks + ((epoch & 1) * self.num_ranks + rank) * self.header_words
        return board.view(torch.int64)[start : start + 3].tolist()

    def note(self, board: torch.Tensor, epoch: int, rank: int) -> str:
        """Why a rank has refused a call, as this rank's board has it, in the header of call `epoch`."""
        stop = 2 * 8 * self.num_ranks + ((epoch & 1) * self.num_ranks + rank + 1) * self.header_words
        words = board.view(torch.int64)[stop - NOTE_WORDS : stop].tolist()
        return struct.pack(f"<{NOTE_WORDS}q", *words).rstrip(b"\0").decode(errors="replace")


class Post(NamedTuple):
    """What a rank says when it meets its peers.

    Attributes:
        step: The step that is signalled and waited for.
        operation: For the record of a failure.
        agreement: Two words that must be the same on all ranks.
        num_rows: Rows it offers.
        lane_rows: If they are offered by way of staging, how many rows of a source fit there at once; else 0.
        num_tokens: Of this rank. Cached and worst-case dispatches do not say it.
        free_bytes: The largest region that it could still take.
        bases: Where its sections are, at most `NUM_SECTIONS`; -1: nothing there.
        ticket: Echoed to the host when the counts are there; 0: the host does not wait, and what does not fit is an
            error. With a ticket the offer is a guess: if it does not fit somewhere, all ranks hold the call.
        is_pushed: The last section is for rows that peers write, and lanes are used only if a rank has no such room;
            then by all ranks.
        far_rows: Rows that there is room for in far memory.
    """

    step: int
    operation: int
    agreement: tuple[int, int]
    num_rows: int = 0
    lane_rows: int = 0
    num_tokens: int = 0
    free_bytes: int = 0
    bases: tuple[int, ...] = ()
    ticket: int = 0
    is_pushed: bool = False
    far_rows: int = 0


class Nodes(NamedTuple):
    """What ranks of different nodes tell each other when they meet.

    Attributes:
        num_tokens: [N] int32, the tokens that this rank sends to each node, also where that was in an earlier dispatch;
            or [N, C], of which the first column is read.
        plan: [N, PLAN_WORDS] int64, written.
        prefix: [N] int32, written: the rows that the ranks of this rail send to this node, up to each node.
        mark: [n] int32, all the same number, which tells dispatches apart: of the handle that all ranks follow, or, if
            there are counts, written.
    """

    num_tokens: torch.Tensor
    plan: torch.Tensor
    prefix: torch.Tensor
    mark: torch.Tensor


def meet(
    places: Places,
    post: Post,
    counts: torch.Tensor | None = None,
    given: torch.Tensor | None = None,
    num_tokens_per_expert: torch.Tensor | None = None,
    prefix: torch.Tensor | None = None,
    *,
    nodes: Nodes | None = None,
    is_new: bool = True,
    says: bool = True,
    hears: bool = True,
    run: Callable[..., None] = launch,
) -> int:
    """Say something to all peers, wait until all have said it, and work out what follows.

    Args:
        places: The words.
        post: What to say. The offers of all peers become addresses in `places.table`.
        counts: [R] int32, the tokens that go to each rank, counted; they are exchanged into `prefix`.
        given: [R] int32, what the caller says that they are.
        num_tokens_per_expert: [E] int32.
        prefix: [R, R] int32: written if there are counts, otherwise that of the handle that all ranks follow.
        nodes: Across nodes, what is said of nodes.
        is_new: A new call begins; otherwise this is the second meeting of one.
        says: Do the first half. Where a kernel carries what is said to far ranks, it goes between the halves.
        hears: Do the second half.
        run: `launch`, or `prepare`.

    Returns:
        How many words of its header this rank says: those of counts only where there are any.
    """
    nothing = places.state
    none = Nodes(nothing, nothing, nothing, nothing)
    bases = (*post.bases, *([-1] * (NUM_SECTIONS - len(post.bases))))
    num_experts = num_tokens_per_expert.numel() if num_tokens_per_expert is not None else 0
    lanes = num_lanes(places)
    run(
        _meet_kernel,
        1,
        (
            places.windows,
            places.state,
            places.table,
            places.host,
            counts if counts is not None else nothing,
            given if given is not None else nothing,
            num_tokens_per_expert if num_tokens_per_expert is not None else nothing,
            prefix if prefix is not None else nothing,
            places.homes,
            *(nodes or none),
            places.num_ranks,
            places.rank,
            places.num_nodes,
            nodes.num_tokens.stride(0) if nodes is not None else 0,
            nodes.mark.numel() if nodes is not None else 0,
            places.header_words,
            places.limit_ns,
            num_experts // places.num_ranks,
            post.step,
            post.operation,
            *post.agreement,
            post.num_rows,
            post.lane_rows,
            post.num_tokens,
            post.free_bytes,
            *bases,
            post.far_rows,
            post.ticket,
        ),
        num_warps=1,
        SAYS=says,
        HEARS=hears,
        HAS_NODES=nodes is not None,
        IS_NEW=is_new,
        HAS_COUNTS=counts is not None,
        HAS_PREFIX=prefix is not None,
        IS_PUSHED=post.is_pushed,
        LANES=lanes,
        CHUNK=max(4, 256 // lanes),
    )
    num_counts = places.num_ranks + num_experts // places.num_ranks if counts is not None else 0
    return HEADER_WORDS + places.num_nodes + num_counts


def abort(places: Places, operation: int, *, run: Callable[..., None] = launch) -> None:
    """Tell all peers that this rank gave up on the host."""
    words = (places.windows, places.state, places.host, places.num_ranks, places.rank)
    run(_abort_kernel, 1, (*words, operation), num_warps=1, LANES=num_lanes(places))


def refuse(
    places: Places,
    operation: int,
    kind: int,
    numbers: torch.Tensor,
    refused: range,
    note: torch.Tensor,
    *,
    run: Callable[..., None] = launch,
) -> None:
    """Tell all peers that this rank does not make its next call, because the caller's arguments are wrong.

    Args:
        places: The words.
        operation: What it would have been.
        kind: `NORMAL` or `LOW_LATENCY`.
        numbers: int64, private: word 0 is the number of the last call of that kind.
        refused: Which of its words are the last refusals, by number of the call.
        note: [NOTE_WORDS] int64: why, as text, see `note_words`.
        run: `launch`, or `prepare`.
    """
    words = (places.windows, places.state, numbers, note, places.num_ranks, places.rank, places.header_words)
    kept = (refused.start, len(refused))
    run(_refuse_kernel, 1, (*words, operation, kind, *kept), num_warps=1, LANES=num_lanes(places))


def note_words(reason: str, device: torch.device) -> torch.Tensor:
    """A text as words, cut to the room there is. What cannot be encoded is escaped."""
    data = encoded(reason, 8 * NOTE_WORDS).ljust(8 * NOTE_WORDS, b"\0")
    return torch.tensor(struct.unpack(f"<{NOTE_WORDS}q", data), dtype=torch.int64, device=device)


def prepare_all(places: Places) -> None:
    """Compile and load the kernels of this file, so that no peer's limit passes while one is compiled."""
    post, numbers = Post(0, 0, (0, 0)), places.state.to(torch.int32)
    meet(places, post, numbers, numbers, numbers, numbers, run=prepare)
    meet(places, post, prefix=numbers, run=prepare)
    meet(places, post, run=prepare)
    meet(places, post, is_new=False, run=prepare)
    meet(places, post._replace(is_pushed=True), prefix=numbers, run=prepare)
    _prepare_failures(places)


def prepare_nodes(places: Places, halves: Sequence[tuple[bool, bool]]) -> None:
    """Compile and load the same across nodes.

    Args:
        places: The words.
        halves: What `says` and `hears` are together.
    """
    post, numbers = Post(0, 0, (0, 0)), places.state.to(torch.int32)
    nodes = Nodes(numbers, places.state, numbers, numbers)
    for says, hears in halves:
        meet(places, post, numbers, numbers, numbers, numbers, nodes=nodes, says=says, hears=hears, run=prepare)
        meet(places, post, nodes=nodes, says=says, hears=hears, run=prepare)
        meet(places, post, says=says, hears=hears, run=prepare)
        meet(places, post, nodes=nodes, is_new=False, says=says, hears=hears, run=prepare)
    _prepare_failures(places)


def _prepare_failures(places: Places) -> None:
    abort(places, 0, run=prepare)
    refuse(places, 0, NORMAL, places.state, REFUSALS, places.state, run=prepare)


def num_lanes(places: Places) -> int:
    """A lane for each rank, and no fewer than a warp has: what decides a loop must be one value for all its threads."""
    return max(32, next_power_of_2(places.num_ranks))


# Numbers have their types written down: a kernel is not compiled again for another value of them.


@jit
def _meet_kernel(
    windows,
    state,
    table,
    host,
    counts,
    given,
    per_expert,
    prefix,
    homes,
    node_tokens,
    plan,
    node_prefix,
    mark,
    num_ranks: tl.int32,
    rank: tl.int32,
    num_nodes: tl.int32,
    node_stride: tl.int32,
    num_marks: tl.int32,
    header_words: tl.int32,
    limit_ns: tl.int64,
    num_local: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    word_a: tl.int64,
    word_b: tl.int64,
    num_rows: tl.int64,
    lane_rows: tl.int64,
    num_tokens: tl.int64,
    free_bytes: tl.int64,
    base_0: tl.int64,
    base_1: tl.int64,
    base_2: tl.int64,
    far_rows: tl.int64,
    ticket: tl.int64,
    SAYS: tl.constexpr,
    HEARS: tl.constexpr,
    HAS_NODES: tl.constexpr,
    IS_NEW: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    IS_PUSHED: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """Post, signal, wait, compare, and derive prefix sums and addresses.

    Example: two ranks, counts `[1, 2]` on rank 0 and `[3, 4]` on rank 1: prefix is `[[1, 2], [4, 6]]` on both, and
    the first slots of rank 1 are `[1, 2]`.
    """
    is_well = tl.load(state + _FAILED) == 0
    epoch = tl.load(state)
    if SAYS:
        epoch += IS_NEW
        if HAS_COUNTS and is_well:
            is_well = _check_counts(
                windows, state, host, counts, given, num_ranks, rank, epoch, operation, ticket, LANES
            )  # fmt: skip
        tl.store(state + _SAID, is_well.to(tl.int64))
        if is_well:
            tl.store(state, epoch)
            _post(
                windows, counts, per_expert, prefix, node_tokens, mark, num_ranks, rank, num_nodes, node_stride,
                header_words, num_local, epoch, word_a, word_b, num_rows, lane_rows, num_tokens, free_bytes,
                base_0, base_1, base_2, far_rows, HAS_NODES, IS_NEW, HAS_COUNTS, HAS_PREFIX, LANES, CHUNK,
            )  # fmt: skip
            signal(windows, rank, 0, num_ranks, epoch, step, LANES)
    else:
        is_well = is_well & (tl.load(state + _SAID) != 0)
    if HEARS:
        if is_well:
            is_well = wait(
                windows, homes, state, host, num_ranks, rank, 0, num_ranks, epoch, step, operation, limit_ns, LANES
            )  # fmt: skip
        if IS_NEW and is_well:
            is_well = _agree(windows, homes, state, host, num_ranks, rank, header_words, epoch, operation, LANES)
        if is_well:
            tl.store(state + _HELD, 0)
            _take_offers(
                windows, homes, state, table, num_ranks, rank, num_nodes, header_words, epoch,
                IS_NEW, HAS_COUNTS, IS_PUSHED, LANES,
            )  # fmt: skip
        if HAS_NODES and is_well:
            _take_nodes(homes, plan, node_prefix, num_ranks, rank, num_nodes, header_words, epoch, LANES)
            if HAS_COUNTS:
                for first in range(0, num_marks, LANES):
                    places = first + tl.arange(0, LANES)
                    tl.store(mark + places, (epoch & 0x3FFFFFFF).to(tl.int32) + 1, mask=places < num_marks)
            _check_far_room(
                windows, homes, state, host, num_ranks, rank, num_nodes, header_words, epoch, operation, ticket,
                IS_NEW, LANES,
            )  # fmt: skip
        if HAS_COUNTS and is_well:
            _take_counts(
                windows, homes, state, table, host, prefix, num_ranks, rank, num_nodes, header_words, num_local, epoch,
                operation, ticket, LANES, CHUNK,
            )  # fmt: skip


@triton.jit
def _check_counts(windows, state, host, counts, given, num_ranks, rank, epoch, operation, ticket, LANES: tl.constexpr):
    """Whether the caller's counts are those of its mask. If not, nothing has been said yet: the call is not made.

    Where nobody on the host waits to be told, the buffer fails: calls behind this one would not match the peers'.
    """
    lanes = tl.arange(0, LANES)
    seen = tl.load(counts + lanes, mask=lanes < num_ranks, other=0)
    said = tl.load(given + lanes, mask=lanes < num_ranks, other=0)
    is_right = tl.sum((seen != said).to(tl.int32)) == 0
    if not is_right:
        first = tl.min(tl.where(seen != said, lanes, LANES))
        one, other = tl.sum(tl.where(lanes == first, seen, 0)), tl.sum(tl.where(lanes == first, said, 0))
        if ticket != 0:
            tl.store(state + _HELD, 1)
            _write_record(host, _COUNTS, epoch, operation, first, one, other, rank)
            tell_host(host, ticket)
        else:
            fail(windows, state, host, num_ranks, rank, _COUNTS, epoch, operation, first, one, other, rank, LANES)
    return is_right


@triton.jit
def _header_of(homes, ranks, is_rank, num_ranks, header_words, epoch):
    """The headers that ranks wrote in a call, each on that board of this rank which it writes."""
    board = words_at(tl.load(homes + ranks, mask=is_rank, other=0))
    return board + 2 * _LINE * num_ranks + ((epoch & 1) * num_ranks + ranks) * header_words


@triton.jit
def _post(
    windows, counts, per_expert, prefix, node_tokens, mark, num_ranks, rank, num_nodes, node_stride, header_words,
    num_local, epoch, word_a, word_b, num_rows, lane_rows, num_tokens, free_bytes, base_0, base_1, base_2, far_rows,
    HAS_NODES: tl.constexpr, IS_NEW: tl.constexpr, HAS_COUNTS: tl.constexpr, HAS_PREFIX: tl.constexpr,
    LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write this rank's header on every board: one lane for each peer, the same words at the same place."""
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    place = 2 * _LINE * num_ranks + ((epoch & 1) * num_ranks + rank) * header_words
    header = words_at(tl.load(windows + lanes, mask=is_rank, other=0)) + place
    if IS_NEW:
        checksum = tl.zeros((), dtype=tl.int64)
        if HAS_PREFIX and not HAS_COUNTS:
            for source in range(num_ranks):
                row = tl.load(prefix + source * num_ranks + lanes, mask=is_rank, other=0).to(tl.int64)
                mixed = (row + lanes + 1) * 0x1E3779B97F4A7C15
                mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
                checksum = checksum * 1000003 + tl.sum(tl.where(is_rank, mixed ^ (mixed >> 32), 0))
        if HAS_NODES:
            if not HAS_COUNTS:
                checksum = tl.load(mark).to(tl.int64)
            tokens = tl.load(node_tokens + lanes * node_stride, mask=lanes < num_nodes, other=0).to(tl.int64)
            words = header[:, None] + _HEADER + lanes[None, :]
            tl.store(words, tokens[None, :], mask=is_rank[:, None] & (lanes < num_nodes)[None, :])
        tl.store(header + _A, word_a, mask=is_rank)
        tl.store(header + _B, word_b, mask=is_rank)
        tl.store(header + _HANDLE, checksum, mask=is_rank)
        tl.store(header + _FREE, free_bytes, mask=is_rank)
        tl.store(header + _TOKENS, num_tokens, mask=is_rank)
    offer = header + _OFFER + (1 - IS_NEW) * _OFFER_WORDS
    tl.store(offer, num_rows, mask=is_rank)
    tl.store(offer + _LANE, lane_rows, mask=is_rank)
    tl.store(offer + _BASES, base_0, mask=is_rank)
    tl.store(offer + _BASES + 1, base_1, mask=is_rank)
    tl.store(offer + _BASES + 2, base_2, mask=is_rank)
    tl.store(offer + _FAR_ROOM, far_rows, mask=is_rank)
    if HAS_COUNTS:
        for start in range(0, num_ranks, CHUNK):
            columns = start + tl.arange(0, CHUNK)
            count = tl.load(counts + columns, mask=columns < num_ranks, other=0).to(tl.int64)
            cells = header[:, None] + _HEADER + num_nodes + columns[None, :]
            tl.store(cells, count[None, :], mask=is_rank[:, None] & (columns < num_ranks)[None, :])
        for start in range(0, num_local, CHUNK):
            columns = start + tl.arange(0, CHUNK)
            is_cell = is_rank[:, None] & (columns < num_local)[None, :]
            chosen = tl.load(per_expert + lanes[:, None] * num_local + columns[None, :], mask=is_cell, other=0)
            cells = header[:, None] + _HEADER + num_nodes + num_ranks + columns[None, :]
            tl.store(cells, chosen.to(tl.int64), mask=is_cell)


@triton.jit
def _agree(windows, homes, state, host, num_ranks, rank, header_words, epoch, operation, LANES: tl.constexpr):
    """Whether all ranks make the same call, by the same handle."""
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    headers = _header_of(homes, lanes, is_rank, num_ranks, header_words, epoch)
    own = _header_of(homes, rank, True, num_ranks, header_words, epoch)
    differs = tl.load(headers + _A, mask=is_rank, other=0) != tl.load(own + _A)
    differs = differs | (tl.load(headers + _B, mask=is_rank, other=0) != tl.load(own + _B))
    differs = differs | (tl.load(headers + _HANDLE, mask=is_rank, other=0) != tl.load(own + _HANDLE))
    differs = differs & is_rank
    is_alike = tl.sum(differs.to(tl.int32)) == 0
    if not is_alike:
        subject = mask_of(differs, lanes)
        fail(windows, state, host, num_ranks, rank, _DISAGREE, epoch, operation, subject, 0, 0, rank, LANES)
    return is_alike


@triton.jit
def _take_counts(
    windows, homes, state, table, host, prefix, num_ranks, rank, num_nodes, header_words, num_local, epoch, operation,
    ticket, LANES: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Prefix sums of everybody's counts, here and on the host, this rank's first slots, and whether all rows fit."""
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    headers = _header_of(homes, lanes, is_rank, num_ranks, header_words, epoch)
    worst = tl.load(state + _HELD)  # far memory may lack room already
    for start in range(0, num_ranks, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        is_column = columns < num_ranks
        is_cell = is_rank[:, None] & is_column[None, :]
        cell = tl.load(headers[:, None] + _HEADER + num_nodes + columns[None, :], mask=is_cell, other=0)
        sums = tl.cumsum(cell, 0)
        place = lanes[:, None] * num_ranks + columns[None, :]
        tl.store(prefix + place, sums.to(tl.int32), mask=is_cell)
        tl.store(
            host + _STATE + 3 * num_ranks + place,
            sums,
            mask=is_cell & (lanes[:, None] < tl.where(ticket != 0, num_ranks, 0)),
        )
        before = tl.sum(tl.where(lanes[:, None] < rank, cell, 0), 0)
        tl.store(table + _STARTS * num_ranks + columns, before, mask=is_column)
        offers = _header_of(homes, columns, is_column, num_ranks, header_words, epoch) + _OFFER
        room = tl.load(offers, mask=is_column, other=0)
        rows = tl.sum(cell, 0)
        excess = is_column & (rows > room)
        if tl.sum(excess.to(tl.int32)) > 0:
            tl.store(state + _HELD, 1)
            if (ticket == 0) & (worst == 0):
                peer = tl.min(tl.where(excess, columns, LANES + CHUNK))
                came = tl.sum(tl.where(columns == peer, rows, 0))
                there = tl.sum(tl.where(columns == peer, room, 0))
                fail(windows, state, host, num_ranks, rank, _OVERFLOW, epoch, operation, peer, came, there, rank, LANES)
        worst = tl.maximum(worst, tl.max(tl.where(is_column, rows - room, 0)))
    if ticket != 0:
        for start in range(0, num_local, CHUNK):
            columns = start + tl.arange(0, CHUNK)
            is_cell = is_rank[:, None] & (columns < num_local)[None, :]
            cells = headers[:, None] + _HEADER + num_nodes + num_ranks + columns[None, :]
            chosen = tl.load(cells, mask=is_cell, other=0)
            place = host + _STATE + 3 * num_ranks + num_ranks * num_ranks + columns
            tl.store(place, tl.sum(chosen, 0), mask=columns < num_local)
        tl.store(host + _STATE + lanes, tl.load(headers + _FREE, mask=is_rank, other=0), mask=is_rank)
        tl.store(host + _STATE + num_ranks + lanes, tl.load(headers + _TOKENS, mask=is_rank, other=0), mask=is_rank)
        tl.store(host + _HELD, (worst > 0).to(tl.int64))
        tell_host(host, ticket)


@triton.jit
def _take_offers(
    windows, homes, state, table, num_ranks, rank, num_nodes, header_words, epoch,
    IS_NEW: tl.constexpr, HAS_COUNTS: tl.constexpr, IS_PUSHED: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Addresses of the peers' sections, the rows that they have room for, and whether some of them are staged."""
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    num_near = num_ranks // num_nodes
    is_near = is_rank & (lanes // num_near == rank // num_near)  # no row is written straight to a far rank
    headers = _header_of(homes, lanes, is_rank, num_ranks, header_words, epoch)
    offers = headers + _OFFER + (1 - IS_NEW) * _OFFER_WORDS
    sections = tl.arange(0, 4)
    is_base = is_rank[:, None] & (sections < _NUM_SECTIONS)[None, :]
    base = tl.load(offers[:, None] + _BASES + sections[None, :], mask=is_base, other=-1)
    segment = tl.where(base < 0, 0, base >> _SEGMENT_BITS)
    start = tl.load(windows + segment * num_ranks + lanes[:, None], mask=is_base, other=0)
    offset = tl.where(base < 0, 0, base & _OFFSET_MASK)
    tl.store(table + sections[None, :] * num_ranks + lanes[:, None], start + offset, mask=is_base)
    rooms = tl.load(offers, mask=is_rank, other=0)
    lane_rows = tl.load(offers + _LANE, mask=is_rank, other=0)
    if IS_PUSHED:
        is_lacking = (base < 0) & is_base & (sections == _NUM_SECTIONS - 1)[None, :]
        lane_rows = tl.where(tl.sum(tl.sum(is_lacking.to(tl.int32), 1), 0) > 0, lane_rows, 0)
    tl.store(table + _ROOMS * num_ranks + lanes, tl.where((lane_rows > 0) | ~is_near, 0, rooms), mask=is_rank)
    tl.store(table + _LANE_ROWS * num_ranks + lanes, lane_rows, mask=is_rank)
    num_staged = tl.sum((lane_rows > 0).to(tl.int64))
    tl.store(state + _STAGED, num_staged)
    if num_staged > 0:
        tl.store(state + _MOST_TOKENS, tl.max(tl.load(headers + _TOKENS, mask=is_rank, other=0)))
    if IS_NEW and not HAS_COUNTS:  # the slots of a handle are whole
        tl.store(table + _STARTS * num_ranks + lanes, tl.zeros([LANES], tl.int64), mask=is_rank)


@triton.jit
def _node_tokens(homes, ranks, is_rank, node, num_ranks, header_words, epoch):
    """The tokens that ranks send to a node, by their headers."""
    header = _header_of(homes, ranks, is_rank, num_ranks, header_words, epoch)
    return tl.load(header + _HEADER + node, mask=is_rank, other=0)


@triton.jit
def _take_nodes(
    homes, plan, node_prefix, num_ranks, rank, num_nodes, header_words, epoch, LANES: tl.constexpr
):  # fmt: skip
    """What this rank's rail sends where, see `PLAN_NUM_IN`.

    Example: two nodes, rank 0 sends 3 tokens to node 0 and 4 to node 1, the rank of its rail on node 1 sends 5 and 6.
    On rank 0: in `[3, 5]` from `[0, 3]`, out `[3, 4]` from `[0, 3]`, targets `[0, 0]`, back `[0, 0]`. On the other: in
    `[4, 6]` from `[0, 4]`, out `[5, 6]` from `[0, 5]`, targets `[3, 4]`, back `[3, 5]`.
    """
    nodes = tl.arange(0, LANES)
    is_node = nodes < num_nodes
    num_near = num_ranks // num_nodes
    node, local = rank // num_near, rank % num_near
    rail = nodes * num_near + local
    num_in = _node_tokens(homes, rail, is_node, node, num_ranks, header_words, epoch)
    num_out = _node_tokens(homes, nodes * 0 + rank, is_node, nodes, num_ranks, header_words, epoch)
    target, back = tl.zeros([LANES], tl.int64), tl.zeros([LANES], tl.int64)
    for before in range(node):
        ahead = nodes * 0 + before * num_near + local
        target += _node_tokens(homes, ahead, is_node, nodes, num_ranks, header_words, epoch)
        back += _node_tokens(homes, rail, is_node, before, num_ranks, header_words, epoch)
    in_ends = tl.cumsum(num_in, 0)
    row = plan + nodes * _PLAN
    tl.store(row + _NUM_IN, num_in, mask=is_node)
    tl.store(row + _IN_START, in_ends - num_in, mask=is_node)
    tl.store(row + _NUM_OUT, num_out, mask=is_node)
    tl.store(row + _OUT_START, tl.cumsum(num_out, 0) - num_out, mask=is_node)
    tl.store(row + _TARGET_START, target, mask=is_node)
    tl.store(row + _BACK_START, back, mask=is_node)
    tl.store(node_prefix + nodes, in_ends.to(tl.int32), mask=is_node)


@triton.jit
def _check_far_room(
    windows, homes, state, host, num_ranks, rank, num_nodes, header_words, epoch, operation, ticket,
    IS_NEW: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Whether every rank's far memory has room for what it relays and for what it sends: all ranks find the same.

    Where the host waits to be told, it is told how many rows each rank relays, and the call is held; else it fails.
    """
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    num_near = num_ranks // num_nodes
    coming, going = tl.zeros([LANES], tl.int64), tl.zeros([LANES], tl.int64)
    for node in range(num_nodes):
        rail = node * num_near + lanes % num_near
        coming += _node_tokens(homes, rail, is_rank, lanes // num_near, num_ranks, header_words, epoch)
        going += _node_tokens(homes, lanes, is_rank, node, num_ranks, header_words, epoch)
    needed = tl.maximum(coming, going)
    headers = _header_of(homes, lanes, is_rank, num_ranks, header_words, epoch)
    room = tl.load(headers + _OFFER + (1 - IS_NEW) * _OFFER_WORDS + _FAR_ROOM, mask=is_rank, other=0)
    if ticket != 0:
        tl.store(host + _STATE + 2 * num_ranks + lanes, coming, mask=is_rank)
    is_lacking = is_rank & (needed > room)
    if tl.sum(is_lacking.to(tl.int32)) > 0:
        tl.store(state + _HELD, 1)
        if ticket == 0:
            peer = tl.min(tl.where(is_lacking, lanes, LANES))
            wanted = tl.sum(tl.where(lanes == peer, needed, 0))
            there = tl.sum(tl.where(lanes == peer, room, 0))
            fail(
                windows, state, host, num_ranks, rank, _FAR_OVERFLOW, epoch, operation, peer, wanted, there, rank, LANES
            )  # fmt: skip


@jit
def _abort_kernel(windows, state, host, num_ranks: tl.int32, rank: tl.int32, operation: tl.int32, LANES: tl.constexpr):
    """Fail for a reason that only the host knows."""
    if tl.load(state + _FAILED) == 0:
        epoch = tl.load(state)
        fail(windows, state, host, num_ranks, rank, _HOST, epoch, operation, 0, 0, 0, rank, LANES)


@jit
def _refuse_kernel(
    windows,
    state,
    numbers,
    note,
    num_ranks: tl.int32,
    rank: tl.int32,
    header_words: tl.int32,
    operation: tl.int32,
    kind: tl.int32,
    refused_at: tl.int32,
    num_kept: tl.int32,
    LANES: tl.constexpr,
):
    """Store the refusal of the next call on every board: the reason, the record, then the word.

    Example: the last call had number 6. The first refusal of call 7 is the word `7 << 17 | 1`, the second
    `7 << 17 | 2`; that of a low-latency call 7 is `7 << 17 | 1 << 16 | 1`.
    """
    if tl.load(state + _FAILED) == 0:
        call = ((tl.load(numbers) + 1) << 1) + kind
        refused = numbers + refused_at + (call >> 1) % num_kept
        last = tl.load(refused)
        word = (call << _TIMES_BITS) + tl.where(last >> _TIMES_BITS == call, last & 0xFFFF, 0) + 1
        tl.store(refused, word)
        epoch = tl.load(state) + 1  # its header is free: this rank has seen all peers in the call before
        lanes = tl.arange(0, LANES)
        is_rank = lanes < num_ranks
        board = words_at(tl.load(windows + lanes, mask=is_rank, other=0))
        header = board + 2 * _LINE * num_ranks + ((epoch & 1) * num_ranks + rank) * header_words
        places = tl.arange(0, _NOTE)
        text = tl.load(note + places)
        tl.store(header[:, None] + header_words - _NOTE + places[None, :], text[None, :], mask=is_rank[:, None])
        line = board + (num_ranks + rank) * _LINE
        tl.store(line + 1, _REFUSAL, mask=is_rank)
        tl.store(line + 2, call >> 1, mask=is_rank)
        tl.store(line + 3, operation, mask=is_rank)
        tl.store(line + 4, rank, mask=is_rank)
        tl.store(line + 5, 0, mask=is_rank)
        tl.store(line + 6, epoch, mask=is_rank)
        tl.store(line + 7, rank, mask=is_rank)
        store_release(line, tl.zeros([LANES], tl.int64) + word, is_rank)


@triton.jit
def must_stop(failed, refused, number, kind):
    """Which ranks a wait for call `number` need not wait for any more, by the first words of their failures.

    A rank has failed, or has refused that very call, and more often than this rank has: whoever made the same mistake
    as often has corrected it, and so will the other.

    Args:
        failed: [LANES] int64, the words.
        refused: This rank's own last refusal of a call of that kind.
        number: Of the call.
        kind: `NORMAL` or `LOW_LATENCY`.
    """
    call = (number << 1) + kind
    times = tl.where(refused >> _TIMES_BITS == call, refused & 0xFFFF, 0)
    return (failed == 1) | ((failed >> _TIMES_BITS == call) & ((failed & 0xFFFF) > times))


@triton.jit
def signal_and_wait(
    windows, homes, state, host, num_ranks, rank, first, count, epoch, step, operation, limit_ns, LANES: tl.constexpr
):
    """Store this rank's progress at ranks [first, first + count), then poll theirs on this rank's own board.

    Returns:
        Whether all of them came in time, and no rank has failed.
    """
    signal(windows, rank, first, count, epoch, step, LANES)
    return wait(windows, homes, state, host, num_ranks, rank, first, count, epoch, step, operation, limit_ns, LANES)


@triton.jit
def signal(windows, rank, first, count, epoch, step, LANES: tl.constexpr):
    """Store this rank's progress at ranks [first, first + count), after everything that this block wrote before."""
    lanes = tl.arange(0, LANES)
    is_peer = (lanes >= first) & (lanes < first + count)
    boards = words_at(tl.load(windows + lanes, mask=is_peer, other=0))
    store_release(boards + rank * _LINE, tl.zeros_like(lanes).to(tl.int64) + (epoch << _STEP_BITS) + step, is_peer)


@triton.jit
def wait(
    windows, homes, state, host, num_ranks, rank, first, count, epoch, step, operation, limit_ns, LANES: tl.constexpr
):
    """Poll the progress of ranks [first, first + count), and every rank's failures."""
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    is_peer = (lanes >= first) & (lanes < first + count)
    target = (epoch << _STEP_BITS) + step
    # Lanes beyond the ranks look at the last rank's words: a load that acquires cannot be masked.
    writers = tl.minimum(lanes, num_ranks - 1)
    lines = words_at(tl.load(homes + writers)) + writers * _LINE
    refused = tl.load(state + _REFUSED)
    begin = tl.min(clock_ns(lanes))
    progress = load_acquire(lines)
    failed = load_acquire(lines + num_ranks * _LINE)
    num_missing = tl.sum((is_peer & (progress < target)).to(tl.int32))
    has_failed = _has_failed(failed, refused, progress, epoch, is_rank)
    num_failed = tl.sum(has_failed.to(tl.int32))
    # One value for all lanes decides, else the lanes of a warp could part ways.
    elapsed = tl.max(clock_ns(lanes)) - begin
    while (num_missing > 0) & (num_failed == 0) & (elapsed < limit_ns):
        progress = load_acquire(lines)
        failed = load_acquire(lines + num_ranks * _LINE)
        num_missing = tl.sum((is_peer & (progress < target)).to(tl.int32))
        has_failed = _has_failed(failed, refused, progress, epoch, is_rank)
        num_failed = tl.sum(has_failed.to(tl.int32))
        elapsed = tl.max(clock_ns(lanes)) - begin
    tl.debug_barrier()  # what one thread acquired, all may read
    is_astray = is_peer & (progress >= ((epoch + 2) << _STEP_BITS))
    is_well = (num_missing == 0) & (num_failed == 0) & (tl.sum(is_astray.to(tl.int32)) == 0)
    if num_failed > 0:
        spread(windows, homes, state, host, num_ranks, rank, tl.min(tl.where(has_failed, lanes, LANES)), LANES)
    elif num_missing > 0:
        subject = mask_of(is_peer & (progress < target), lanes)
        fail(windows, state, host, num_ranks, rank, _TIMEOUT, epoch, operation, subject, step, 0, rank, LANES)
    elif not is_well:
        fail(
            windows,
            state,
            host,
            num_ranks,
            rank,
            _ASTRAY,
            epoch,
            operation,
            mask_of(is_astray, lanes),
            0,
            0,
            rank,
            LANES,
        )
    return is_well


@triton.jit
def _has_failed(failed, refused, progress, epoch, is_rank):
    """Which ranks have failed, or do not make call `epoch`: who has entered it has corrected its mistake."""
    has_entered = progress > epoch << _STEP_BITS
    return is_rank & must_stop(failed, refused, epoch, _NORMAL) & ((failed == 1) | ~has_entered)


@triton.jit
def spread(windows, homes, state, host, num_ranks, rank, peer, LANES: tl.constexpr):
    """Fail for the reason that a peer has failed for."""
    record = words_at(tl.load(homes + peer)) + (num_ranks + peer) * _LINE + 1
    fail(
        windows, state, host, num_ranks, rank, tl.load(record), tl.load(record + 1), tl.load(record + 2),
        tl.load(record + 3), tl.load(record + 4), tl.load(record + 5), tl.load(record + 6), LANES,
    )  # fmt: skip


@triton.jit
def mask_of(chosen, lanes):
    """A bit for each chosen rank; ranks from 62 on share the last."""
    bits = tl.full(lanes.shape, 1, tl.int64) << tl.minimum(lanes, 62).to(tl.int64)
    low = tl.sum(tl.where(chosen & (lanes < 62), bits, 0))
    high = tl.sum((chosen & (lanes >= 62)).to(tl.int32))
    return low + tl.where(high > 0, tl.full((), 1, tl.int64) << 62, 0)


@triton.jit
def _write_record(words, code, epoch, operation, subject, seen, expected, origin):
    """The record of a failure, behind its flag in the state or on the host."""
    tl.store(words + _RECORD, code)
    tl.store(words + _RECORD + 1, epoch)
    tl.store(words + _RECORD + 2, operation)
    tl.store(words + _RECORD + 3, subject)
    tl.store(words + _RECORD + 4, seen)
    tl.store(words + _RECORD + 5, expected)
    tl.store(words + _RECORD + 6, origin)


@triton.jit
def fail(
    windows, state, host, num_ranks, rank, code, epoch, operation, subject, seen, expected, origin, LANES: tl.constexpr
):
    """Stop for good: kernels behind this one do nothing, peers that wait are told, the host sees it."""
    _write_record(state, code, epoch, operation, subject, seen, expected, origin)
    tl.store(state + _FAILED, 1)
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    line = words_at(tl.load(windows + lanes, mask=is_rank, other=0)) + (num_ranks + rank) * _LINE
    tl.store(line + 1, code, mask=is_rank)
    tl.store(line + 2, epoch, mask=is_rank)
    tl.store(line + 3, operation, mask=is_rank)
    tl.store(line + 4, subject, mask=is_rank)
    tl.store(line + 5, seen, mask=is_rank)
    tl.store(line + 6, expected, mask=is_rank)
    tl.store(line + 7, origin, mask=is_rank)
    store_release(line, tl.full([LANES], 1, tl.int64), is_rank)
    # The host last: once its caller knows, it may overwrite what peers must not read any more.
    _write_record(host, code, epoch, operation, subject, seen, expected, origin)
    tell_host(host + _FAILED, tl.full((), 1, tl.int64))
