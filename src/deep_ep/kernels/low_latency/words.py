"""The words of low-latency calls on a GPU: where they are, how a call is sent, and how a receive phase waits.

Shape letters: R ranks, E experts, L = E / R. The low-latency memory of a rank begins with

    lines   [R, 8] int64             line p: what rank p writes here: the last call that it has sent, and its words of
                                     a rejoin (`join`)
    posts   [8, 64] int64            by number of the call modulo 8: two words of agreement, its tokens, its number,
                                     where its rows begin, and which ranks it masks, as bits
    tables  [8, MAX_EXPERTS] int64   likewise: counts [E] of a dispatch, where first rows are [L, R] of a combine

and then come the slots and the dispatch sets. The last block of a *send* kernel signals, and, where no hook comes
between, waits for the peers. After a hook, a kernel of one warp waits; so it does across nodes, where the call has to
be copied before.

Of a rank of another node there is a copy in this rank's own memory, which stands in for it (`remote_copy.py`).
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._triton import Launch, Variant, jit, next_power_of_2, prepare, tl, triton
from ..exchange import (
    DESYNC,
    DISAGREE,
    LOW_LATENCY,
    REFUSED,
    STATE_FAILED,
    TIMEOUT,
    Context,
    fail,
    mask_of,
    must_stop,
    propagate_failure,
    refuse,
    times_of,
)
from ..primitives import clock_ns, load_acquire, store_release, tell_host, words_at

NUM_KEPT = 8  # calls whose posts and tables are kept
POST_WORDS = 64
_MASK_BITS = 32  # of a word of a post
_FIRST_MASK = 8  # word of a post
MOST_RANKS = (POST_WORDS - _FIRST_MASK) // 2 * _MASK_BITS  # two bits of a post for each
# Of a rank's private words: calls sent; blocks of a send that are done; the calls that this rank refused, by number
# modulo 8: a call may be waited for when later ones have been refused; the call that used each slot last; attempts to
# rejoin.
STATE_SENT, STATE_ARRIVED, STATE_REFUSED, STATE_SLOTS, STATE_ATTEMPTS, STATE_WORDS = 0, 1, 2, 10, 13, 16
REFUSALS = range(STATE_REFUSED, STATE_REFUSED + NUM_KEPT)
# What a mask is for: the caller, or this rank by itself, masks a rank; or it is lost, and then for all ranks.
MASKED, LOST = 1, 3
# Why a kernel has masked a rank, for the host: it was silent; it goes on without this rank; another rank has lost it;
# it has refused the call.
SILENT, GONE_ON, TOLD, HAS_REFUSED = 0, 1, 2, 3
REASON_BITS = 2

_DESYNC, _DISAGREE, _TIMEOUT = tl.constexpr(DESYNC), tl.constexpr(DISAGREE), tl.constexpr(TIMEOUT)
_REFUSAL = tl.constexpr(REFUSED)
_FAILED = tl.constexpr(STATE_FAILED)
_LINE = tl.constexpr(8)
_KEPT, _POST = tl.constexpr(NUM_KEPT), tl.constexpr(POST_WORDS)
ARRIVED, _REFUSED = tl.constexpr(STATE_ARRIVED), tl.constexpr(STATE_REFUSED)
_SLOTS, _ATTEMPTS = tl.constexpr(STATE_SLOTS), tl.constexpr(STATE_ATTEMPTS)
_LOW_LATENCY = tl.constexpr(LOW_LATENCY)
_SAW = tl.constexpr(STATE_WORDS)  # what a wait saw at last, [2, R]
# Words of a line.
_ATTEMPT, _NEXT, _ECHO = tl.constexpr(1), tl.constexpr(2), tl.constexpr(3)
# Words of a post. Behind them, for every 32 ranks: those that the rank masks, and which of these all are to mask.
_A, _B, _TOKENS, _NUMBER, _BASE, _TIMES = (tl.constexpr(word) for word in range(6))
_MASKS, _BITS = tl.constexpr(_FIRST_MASK), tl.constexpr(_MASK_BITS)
_MASKED, _LOST = tl.constexpr(MASKED), tl.constexpr(LOST)
_SILENT, _GONE_ON, _TOLD, _HAS_REFUSED = (tl.constexpr(word) for word in (SILENT, GONE_ON, TOLD, HAS_REFUSED))
_REASON_BITS = tl.constexpr(REASON_BITS)
# As in `engine/low_latency/geometry.py`.
_NUM_SLOTS, _NUM_SETS = tl.constexpr(3), tl.constexpr(4)


@dataclass(frozen=True)
class LowLatencyContext:
    """Where a rank's low-latency words are. Made once for a buffer.

    Attributes:
        buffer: The context of the buffer: peers, failure, limit.
        windows: [R] int64, addresses of the ranks' low-latency memory; of remote ranks, of the copies of theirs.
        state: [num_state_words(R)] int64, private.
        mask: [R] int32, private: `MASKED` or `LOST` where a rank is masked.
        seen: [R, 2] int64, private: what the ranks posted when they disagreed.
        host: [R + 1] int64 in memory that the host reads: the call in which a rank was masked, and why.
        max_experts: Experts that a table can hold.
    """

    buffer: Context
    windows: torch.Tensor
    state: torch.Tensor
    mask: torch.Tensor
    seen: torch.Tensor
    host: torch.Tensor
    max_experts: int

    @staticmethod
    def board_bytes(num_ranks: int, max_experts: int) -> int:
        """Return the bytes in front of the slots."""
        return 8 * 8 * num_ranks + NUM_KEPT * 8 * (POST_WORDS + max_experts)

    @staticmethod
    def num_state_words(num_ranks: int) -> int:
        """Return the number of words of `state`."""
        return STATE_WORDS + 2 * num_ranks

    @functools.cached_property
    def num_lanes(self) -> int:
        """Return the number of lanes: at least one for each rank."""
        return next_power_of_2(self.buffer.num_ranks)


@dataclass(frozen=True)
class KernelCall:
    """A call, for its kernels.

    Attributes:
        agreement: Two words that must be the same on all ranks.
        region_bytes: Bytes of a region, from the plan of the call.
        set_bytes: Bytes of a dispatch set, from the plan of the call.
        operation: For the record of a failure.
        takes_slot: Its rows are in a slot, not in a dispatch set.
        copy_set_bytes: As `set_bytes`, in copies of remote ranks' memory; 0: there are none.
    """

    agreement: tuple[int, int]
    region_bytes: int
    set_bytes: int
    operation: int
    takes_slot: bool = True
    copy_set_bytes: int = 0

    @functools.cached_property
    def kernel_args(self) -> tuple[int, ...]:
        """Return the call as a kernel takes it."""
        return (*self.agreement, self.region_bytes, self.set_bytes)


class WaitOptions(NamedTuple):
    """How a call is waited for.

    Attributes:
        stats: [R] int64, nanoseconds waited are added; or None. A kernel that was made for these options takes another
            tensor in its place, but not None instead of a tensor, nor a tensor instead of None.
        can_mask: Mask ranks that are silent past the limit; otherwise fail.
    """

    stats: torch.Tensor | None = None
    can_mask: bool = False


def waiter(context: LowLatencyContext, call: KernelCall, wait_options: WaitOptions) -> Launch:
    """Return a kernel of one block that waits until every rank that is not masked has sent a call, and compares their
    posts.

    It takes what the nanoseconds waited are added to (or any tensor) and the age of the call: how many calls this rank
    has sent since.

    Args:
        context: The words.
        call: The call.
        wait_options: How to wait.
    """
    variant = _wait_variant(wait_options.stats is not None, context.num_lanes)
    return Launch(variant, (None, None), _fixed(context, call, wait_options))


def wait_for(context: LowLatencyContext, call: KernelCall, age: int, wait_options: WaitOptions) -> None:
    """Wait for a call once, with the kernel of `waiter`."""
    stats = context.state if wait_options.stats is None else wait_options.stats
    waiter(context, call, wait_options)(1, (stats,), (age,))


def _fixed(context: LowLatencyContext, call: KernelCall, wait_options: WaitOptions) -> tuple[torch.Tensor | int, ...]:
    buffer = context.buffer
    words = (context.windows, context.state, buffer.state, *awaiting(context, call, wait_options.can_mask))
    return *words, buffer.num_ranks, buffer.rank, *call.agreement


def awaiting(context: LowLatencyContext, call: KernelCall, can_mask: bool) -> tuple[torch.Tensor | int, ...]:
    """Return what `await_all` needs, as a kernel takes it."""
    buffer = context.buffer
    return (
        context.mask,
        context.seen,
        context.host,
        buffer.windows,
        buffer.own_boards,
        buffer.host,
        buffer.limit_ns,
        call.operation,
        int(can_mask),
    )


@functools.cache
def _wait_variant(has_stats: bool, lanes: int) -> Variant:
    # The condition of a loop must be one value for all threads: one warp, with no fewer lanes than it has.
    return Variant(_wait_kernel, {"HAS_STATS": has_stats, "LANES": max(32, lanes)}, num_warps=1)


def signal(context: LowLatencyContext, call: KernelCall) -> None:
    """Send a call that has no rows, such as a barrier."""
    _signal_variant(context.num_lanes)(1, *_signal_arguments(context, call))


def _signal_arguments(context: LowLatencyContext, call: KernelCall) -> tuple[torch.Tensor | int, ...]:
    buffer = context.buffer
    return context.windows, context.state, buffer.state, context.mask, buffer.num_ranks, buffer.rank, *call.agreement


@functools.cache
def _signal_variant(lanes: int) -> Variant:
    return Variant(_signal_all_kernel, {"LANES": lanes}, num_warps=1)


def join(context: LowLatencyContext) -> None:
    """Have the next call get a number that all ranks agree on, none below what any of them would give it.

    Ranks that do not come within the limit are masked, as lost.
    """
    _join_variant(context.num_lanes)(1, *_join_arguments(context))


def _join_arguments(context: LowLatencyContext) -> tuple[torch.Tensor | int, ...]:
    buffer = context.buffer
    words = (context.windows, context.state, buffer.state, context.mask, context.host)
    return *words, buffer.limit_ns, buffer.num_ranks, buffer.rank


@functools.cache
def _join_variant(lanes: int) -> Variant:
    return Variant(_join_kernel, {"LANES": max(32, lanes)}, num_warps=1)


def prepare_all(context: LowLatencyContext) -> None:
    """Compile and load the kernels that wait, so that no peer's limit passes while one is compiled."""
    call = KernelCall((0, 0), 16, 16, 0)
    for has_stats in (False, True):
        _wait_variant(has_stats, context.num_lanes).prepare(context.state, 0, *_fixed(context, call, WaitOptions()))
    _signal_variant(context.num_lanes).prepare(*_signal_arguments(context, call))
    _join_variant(context.num_lanes).prepare(*_join_arguments(context))
    refuse(context.buffer, 0, LOW_LATENCY, context.state, REFUSALS, context.state, run=prepare)


# What kernels share --------------------------------------------------------------------------------------------------


@triton.jit
def is_working(state):
    """Return whether the buffer has not failed. `state` is the buffer's.

    A branch waits for its condition, so kernels issue all the loads that they need at once, and branch afterwards.
    """
    return tl.load(state + _FAILED) == 0


@triton.jit
def post_at(memory, num_ranks, number):
    """Return the address of a rank's post of a call."""
    return words_at(memory) + _LINE * num_ranks + (number % _KEPT) * _POST


@triton.jit
def table_at(memory, num_ranks, number, max_experts):
    """Return the address of a rank's table of a call."""
    return words_at(memory) + _LINE * num_ranks + _KEPT * _POST + (number % _KEPT) * max_experts


@triton.jit
def offset_of_set(num_ranks, max_experts, number, region_bytes, set_bytes):
    """Return where the dispatch set of a call begins, behind the words and the slots."""
    return slot_offset(num_ranks, max_experts, _NUM_SLOTS, region_bytes) + (number & (_NUM_SETS - 1)) * set_bytes


@triton.jit
def copy_set_offset(num_ranks, max_experts, number, set_bytes):
    """Return where the set of a call begins in a copy of a remote rank's memory, behind the words."""
    return offset_of_sets(num_ranks, max_experts) + (number & (_NUM_SETS - 1)) * set_bytes


@triton.jit
def slot_offset(num_ranks, max_experts, slot, region_bytes):
    """Return where a slot begins, behind the words."""
    return offset_of_sets(num_ranks, max_experts) + slot * region_bytes


@triton.jit
def free_slot(ll, leased):
    """Return the slot that was used longest ago, of those that are not leased; the first of them, if there are
    several.
    """
    last_0 = tl.where((leased & 1) != 0, 1 << 62, tl.load(ll + _SLOTS))
    last_1 = tl.where((leased & 2) != 0, 1 << 62, tl.load(ll + _SLOTS + 1))
    last_2 = tl.where((leased & 4) != 0, 1 << 62, tl.load(ll + _SLOTS + 2))
    return tl.where((last_0 <= last_1) & (last_0 <= last_2), 0, tl.where(last_1 <= last_2, 1, 2))


@triton.jit
def use_slot(ll, slot, number):
    """Note that a call uses a slot, for `free_slot`."""
    tl.store(ll + _SLOTS + slot, number)


@triton.jit
def offset_of_sets(num_ranks, max_experts):
    """Return where the first slot begins, or, in a copy, the first set."""
    return tl.zeros((), tl.int64) + 8 * (_LINE * num_ranks + _KEPT * (_POST + max_experts))


@triton.jit
def masks_of(ranks_mask, num_ranks, LANES: tl.constexpr):
    """Return the masks, [LANES] int32."""
    lanes = tl.arange(0, LANES)
    return tl.load(ranks_mask + lanes, mask=lanes < num_ranks, other=0)


@triton.jit
def last_refusal(ll, number):
    """Return the word of this rank's last refusal of this call, or of an earlier one, see `times_of`.

    Kernels load it when they begin: a load behind the rows would delay the signal.
    """
    return tl.load(ll + _REFUSED + number % _KEPT)


@triton.jit
def signal_all(
    memories, ll, masks, refused, number, num_ranks, rank, word_a, word_b, num_tokens, base, LANES: tl.constexpr
):  # fmt: skip
    """Write the post of a call, and store the call's number at every peer.

    Args:
        memories: Addresses of the ranks' memory.
        ll: The private words.
        masks: Of this rank, as they were when the call began.
        refused: See `last_refusal`.
        number: The number of the call.
        num_ranks: R.
        rank: This rank.
        word_a: The first word of the agreement.
        word_b: The second word of the agreement.
        num_tokens: Of this rank.
        base: Where its rows begin, behind the beginning of its memory.
        LANES: A lane for each rank.
    """
    post = post_at(one_of(memories, rank, LANES), num_ranks, number)
    tl.store(post + _A, word_a)
    tl.store(post + _B, word_b)
    tl.store(post + _TOKENS, tl.cast(num_tokens, tl.int64))
    tl.store(post + _NUMBER, number)
    tl.store(post + _BASE, tl.cast(base, tl.int64))
    tl.store(post + _TIMES, times_of(refused, (number << 1) + _LOW_LATENCY))
    lanes = tl.arange(0, LANES)
    bits = tl.full([LANES], 1, tl.int64) << (lanes % _BITS).to(tl.int64)
    for word in tl.static_range((LANES + _BITS - 1) // _BITS):
        is_here = lanes // _BITS == word
        tl.store(post + _MASKS + 2 * word, tl.sum(tl.where(is_here & (masks != 0), bits, 0)))
        tl.store(post + _MASKS + 2 * word + 1, tl.sum(tl.where(is_here & (masks == _LOST), bits, 0)))
    tl.store(ll, number)
    store_release(words_at(memories) + rank * _LINE, tl.zeros_like(lanes).to(tl.int64) + number, lanes < num_ranks)


@triton.jit
def posted_base(memory, num_ranks, number):
    """Return where the rows of a rank begin in a call."""
    return tl.load(post_at(memory, num_ranks, number) + _BASE)


@triton.jit
def posted_tokens(memory, num_ranks, number):
    """Return the tokens of a rank in a call."""
    return tl.load(post_at(memory, num_ranks, number) + _TOKENS)


@triton.jit
def memories_of(windows, num_ranks, LANES: tl.constexpr):
    """Return the addresses of the ranks' memory, [LANES]."""
    lanes = tl.arange(0, LANES)
    return tl.load(windows + lanes, mask=lanes < num_ranks, other=0)


@triton.jit
def one_of(values, index, LANES: tl.constexpr):
    """Return the value of one lane."""
    return tl.sum(tl.where(tl.arange(0, LANES) == index, values, 0))


@triton.jit
def some_of(values, indices, LANES: tl.constexpr):
    """Return the values of some lanes."""
    lanes = tl.arange(0, LANES)
    return tl.sum(tl.where(lanes[None, :] == indices[:, None], values[None, :], 0), 1)


# Kernels -------------------------------------------------------------------------------------------------------------


@jit(name="low_latency::signal")
def _signal_all_kernel(
    windows, ll, state, ranks_mask, num_ranks: tl.int32, rank: tl.int32, word_a: tl.int64, word_b: tl.int64,
    LANES: tl.constexpr,
):  # fmt: skip
    """Send a call that has no rows."""
    number = tl.load(ll) + 1
    memories = memories_of(windows, num_ranks, LANES)
    masks = masks_of(ranks_mask, num_ranks, LANES)
    refused = last_refusal(ll, number)
    if is_working(state):
        signal_all(memories, ll, masks, refused, number, num_ranks, rank, word_a, word_b, 0, 0, LANES)


@jit(name="low_latency::join")
def _join_kernel(
    windows, ll, state, ranks_mask, ll_host, limit_ns: tl.int64, num_ranks: tl.int32, rank: tl.int32,
    LANES: tl.constexpr,
):  # fmt: skip
    """Agree with all ranks that are not masked on the next call's number, whatever calls each of them has made.

    A rank's attempts are numbered. It writes its attempt, and the number that its next call would have, into its line
    at every peer, and echoes every attempt that it sees there. A peer that has echoed this attempt is in one of its
    own, whose words were written before. The number is one more if this rank has refused that call: peers that have
    not would take it for out of step.

    Example: rank 0 is at call 17, rank 1 has missed some and is at call 12: the next call of both is 18.
    """
    lanes = tl.arange(0, LANES)
    peer = tl.minimum(lanes, num_ranks - 1)
    memories = memories_of(windows, num_ranks, LANES)
    is_peer = (lanes < num_ranks) & (lanes != rank) & (tl.load(ranks_mask + peer) == 0)
    there = words_at(memories) + rank * _LINE
    here = words_at(one_of(memories, rank, LANES)) + peer * _LINE
    attempt = tl.load(ll + _ATTEMPTS) + 1
    following = tl.load(ll) + 1
    following += (times_of(last_refusal(ll, following), (following << 1) + _LOW_LATENCY) > 0).to(tl.int64)
    if is_working(state):
        tl.store(ll + _ATTEMPTS, attempt)
        tl.store(there + _NEXT, tl.zeros([LANES], tl.int64) + following, mask=is_peer)
        store_release(there + _ATTEMPT, tl.zeros([LANES], tl.int64) + attempt, is_peer)
        begin = tl.min(clock_ns(lanes))
        elapsed = tl.zeros((), tl.int64)
        num_missing = tl.sum(is_peer.to(tl.int32))
        # The echo first: a rank that has echoed this attempt has written the one that is to be echoed here.
        while (num_missing > 0) & (elapsed < limit_ns):
            elapsed = tl.max(clock_ns(lanes)) - begin
            echo = load_acquire(here + _ECHO)
            store_release(there + _ECHO, load_acquire(here + _ATTEMPT), is_peer)
            num_missing = tl.sum((is_peer & (echo != attempt)).to(tl.int32))
        # Once more, for those that came last. (Triton 3.6 does not compile a loop that carries a tensor of bools.)
        is_missing = is_peer & (load_acquire(here + _ECHO) != attempt)
        store_release(there + _ECHO, load_acquire(here + _ATTEMPT), is_peer)
        theirs = tl.load(here + _NEXT, mask=is_peer & (is_missing == 0), other=0)
        tl.store(ll, tl.maximum(following, tl.max(theirs)) - 1)
        if tl.sum(is_missing.to(tl.int32)) > 0:
            tl.store(ranks_mask + lanes, _LOST, mask=is_missing)
            tl.store(ll_host + lanes, (following << _REASON_BITS) | _SILENT, mask=is_missing)
            tell_host(ll_host + num_ranks, following)


@jit(name="low_latency::wait")
def _wait_kernel(
    stats, age: tl.int32, windows, ll, state, ranks_mask, seen, ll_host, boards, own_boards, host, limit_ns: tl.int64,
    operation: tl.int32, can_mask: tl.int32, num_ranks: tl.int32, rank: tl.int32, word_a: tl.int64, word_b: tl.int64,
    HAS_STATS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Wait until all ranks that are not masked have sent a call."""
    number = tl.load(ll) - age
    memories = memories_of(windows, num_ranks, LANES)
    refused = last_refusal(ll, number)
    if is_working(state):
        await_all(
            memories, ll, state, ranks_mask, refused, seen, ll_host, stats, boards, own_boards, host, limit_ns,
            operation, can_mask, num_ranks, rank, number, word_a, word_b, HAS_STATS, LANES,
        )  # fmt: skip


@triton.jit
def await_all(
    memories, ll, state, ranks_mask, refused, seen, ll_host, stats, boards, own_boards, host, limit_ns, operation,
    can_mask, num_ranks, rank, number, word_a, word_b, HAS_STATS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Poll the words that the peers write here, until all have come, one has failed, or the limit has passed.

    One block does it: of a kernel of its own, or the last of a send. Each of its warps polls for itself, without a
    barrier between two polls, so they may leave the loop at different times and with different results. The result of
    one of them is then used by all.
    """
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    is_awaited = is_rank & (tl.load(ranks_mask + lanes, mask=is_rank, other=1) == 0)
    # Lanes beyond the ranks load the last rank's words: a load that acquires cannot be masked.
    peer = tl.minimum(lanes, num_ranks - 1)
    line = peer * _LINE
    board, own_board = tl.load(own_boards + peer), tl.load(own_boards + rank)
    words = words_at(one_of(memories, rank, LANES)) + line
    failures = words_at(board) + num_ranks * _LINE + line
    begin = tl.min(clock_ns(lanes))
    sent = load_acquire(words)
    failed = tl.zeros([LANES], tl.int64)
    num_missing = tl.sum((is_awaited & (sent < number)).to(tl.int32))
    num_failed = tl.zeros((), tl.int32)
    elapsed = tl.zeros((), tl.int64)
    waited = tl.zeros([LANES], tl.int64)
    while (num_missing > 0) & (num_failed == 0) & (elapsed < limit_ns):
        elapsed = tl.max(clock_ns(lanes)) - begin
        waited = tl.where(sent < number, elapsed, waited)
        failed = load_acquire(failures)
        sent = load_acquire(words)
        has_refused = must_stop(failed, refused, number, _LOW_LATENCY) & (failed != 1)
        # If ranks may be masked, one that has refused this call is waited for no longer, but all others are.
        num_missing = tl.sum((is_awaited & (sent < number) & ((has_refused == 0) | (can_mask == 0))).to(tl.int32))
        has_failed = is_awaited & ((failed == 1) | (has_refused & (can_mask == 0)))
        num_failed = tl.sum(has_failed.to(tl.int32))
    # A satisfied wait checks the failures, too.
    failed = load_acquire(failures)
    tl.store(ll + _SAW + lanes, sent, mask=is_rank)
    tl.store(ll + _SAW + num_ranks + lanes, failed, mask=is_rank)
    tl.debug_barrier()
    sent = tl.load(ll + _SAW + lanes, mask=is_rank, other=0, volatile=True)
    # A failure of a masked rank does not matter.
    failed = tl.load(ll + _SAW + num_ranks + lanes, mask=is_awaited, other=0, volatile=True)
    if HAS_STATS:
        tl.store(stats + lanes, tl.load(stats + lanes, mask=is_awaited, other=0) + waited, mask=is_awaited)
    posts = post_at(memories, num_ranks, number)
    is_here = is_awaited & (sent >= number)
    posted_a = tl.load(posts + _A, mask=is_here, other=0)
    posted_b = tl.load(posts + _B, mask=is_here, other=0)
    # A rank with a post of another call, or that has masked this rank, goes on without it; so does one more ahead than
    # a peer can be that waits for this rank, which has overwritten the set of this call.
    said_number = tl.load(posts + _NUMBER, mask=is_here, other=0)
    said_masks = tl.load(posts + _MASKS + 2 * (rank // _BITS), mask=is_here, other=0)
    has_gone_on = (sent >= number + _NUM_SETS) | (said_number != number) | ((said_masks >> (rank % _BITS)) & 1 != 0)
    # A rank that has corrected a mistake of its own alone makes another call than the others, too.
    call = (number << 1) + _LOW_LATENCY
    said_times, times = tl.load(posts + _TIMES, mask=is_here, other=0), times_of(refused, call)
    is_of_call = is_here & (said_number == number)
    is_behind, is_ahead = is_of_call & (said_times < times), is_of_call & (said_times > times)
    has_gone_on = (is_here & has_gone_on & (lanes != rank)) | is_behind
    is_silent = is_awaited & (sent < number)
    is_told = is_awaited & _is_told(posts, is_here & ((has_gone_on | is_ahead) == 0), LANES) & (lanes != rank)
    # A rank that has refused this call is masked like a silent one, if ranks may be masked.
    has_refused = is_awaited & must_stop(failed, refused, number, _LOW_LATENCY) & (failed != 1)
    is_lost = is_silent | has_gone_on | is_told | has_refused | is_ahead
    differs = is_here & (is_lost == 0) & ((posted_a != word_a) | (posted_b != word_b))
    has_failed = is_awaited & ((failed == 1) | (has_refused & (can_mask == 0)))
    # As `exchange.open_context` returns it. Its words come one by one, so that no load of them waits for another.
    context = (boards, own_boards, state, state, host, num_ranks, rank, 1, 0, limit_ns)
    if tl.sum(has_failed.to(tl.int32)) > 0:
        first = tl.min(tl.where(has_failed, lanes, LANES))
        record = words_at(one_of(board, first, LANES)) + (num_ranks + first) * _LINE + 1
        # If it is a disagreement, the rank that found it had seen all posts, so they can be read here. Those of remote
        # ranks it has seen in its own copy; a post that has not arrived here yet counts as equal to this rank's.
        noticed = tl.load(record + 1)
        there = post_at(memories, num_ranks, noticed)
        is_posted = is_rank & ((board == own_board) | (sent >= noticed))
        tl.store(seen + 2 * lanes, tl.load(there + _A, mask=is_posted, other=word_a), mask=is_rank)
        tl.store(seen + 2 * lanes + 1, tl.load(there + _B, mask=is_posted, other=word_b), mask=is_rank)
        tl.debug_barrier()
        propagate_failure(context, first, LANES)
    elif tl.sum(is_lost.to(tl.int32)) > 0:
        if can_mask != 0:
            tl.store(ranks_mask + lanes, tl.where(has_gone_on, _MASKED, _LOST), mask=is_lost)
            reason = tl.where(is_silent, _SILENT, tl.where(has_gone_on, _GONE_ON, _TOLD))
            reason = tl.where(has_refused | is_ahead, _HAS_REFUSED, reason)
            tl.store(ll_host + lanes, (number << _REASON_BITS) | reason, mask=is_lost)
            tell_host(ll_host + num_ranks, number)
        elif tl.sum((is_behind | is_ahead).to(tl.int32)) > 0:
            first = tl.min(tl.where(is_ahead, lanes, LANES))
            who = tl.where(first < LANES, first, rank)
            # Where its last refusal is of another call, so is the reason that it has left.
            noted = tl.where(times_of(one_of(failed, who, LANES), call) > 0, tl.load(state) + 1, 0)
            fail(context, _REFUSAL, number, operation, who, 0, noted, who, LANES)
        else:
            code = tl.where(tl.sum(is_silent.to(tl.int32)) > 0, _TIMEOUT, _DESYNC)
            subject = mask_of(is_lost, lanes)
            fail(context, code, number, operation, subject, 0, 0, rank, LANES)
    elif tl.sum(differs.to(tl.int32)) > 0:
        tl.store(seen + 2 * lanes, posted_a, mask=is_here)
        tl.store(seen + 2 * lanes + 1, posted_b, mask=is_here)
        tl.debug_barrier()
        subject = mask_of(differs, lanes)
        fail(context, _DISAGREE, number, operation, subject, 0, 0, rank, LANES)


@triton.jit
def _is_told(posts, is_here, LANES: tl.constexpr):
    """Return which ranks are lost according to any post, [LANES].

    Args:
        posts: Of the ranks, in this call.
        is_here: Which ranks' posts have arrived, and count.
        LANES: A lane for each rank.
    """
    lanes = tl.arange(0, LANES)
    is_told = lanes < 0
    for word in tl.static_range((LANES + _BITS - 1) // _BITS):
        # Reduced to one number for all lanes: a table of ranks by ranks would slow the usual call.
        lost = tl.reduce(tl.load(posts + _MASKS + 2 * word + 1, mask=is_here, other=0), 0, _either)
        is_told = is_told | ((lanes // _BITS == word) & (((lost >> (lanes % _BITS).to(tl.int64)) & 1) != 0))
    return is_told


@triton.jit
def _either(one, other):
    """Return the bits of both, for a reduction."""
    return one | other
