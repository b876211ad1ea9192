"""Synchronisation of ranks on the device: boards, signals, failures, and waits with a time limit.

`docs/protocol.md` has the state table, `notify.py` the handshake that a call begins with.

Shape letters: R ranks, E experts, L = E / R. All words are int64. One block of a kernel waits, and it must not occupy
an SM that others need: it is the only block of its kernel, or the last one of it that still runs. `wait` describes what
a block of several warps needs. No block moves rows once it has waited; `finish.py` has the one exception.

A *board* is the first part of a rank's window. Peers write it, each its own part, and its owner polls it; only the
counts at its end are the owner's own, which peers read:

    progress  [R, 8]              line p: how far rank p is, `epoch << 24 | step`
    failures  [R, 8]              line p: a word that is 1 once rank p has failed, and its record; before that, the last
                                  call that rank p has refused to make, see `_refuse_kernel`
    headers   [2, R, H]           by parity of the epoch: what rank p posts in a call, H = 24 + N + R + L words,
                                  and 64 more with the reason if it has refused one
    counts    [2, R * H] int32    by parity of the epoch: how often the owner selects each expert, in the first E words
                                  of R * H; only in dispatches of selections (`selections.py`)

The *state* of a rank is private: its epoch, the record of its failure, and what a call needs of the peers' offers.

Across nodes (N of them, P ranks each) a rank has a second board, which remote ranks write by way of a proxy; and what
it posts for a remote rank goes to a shadow of that rank's board (`transport/remote.py`). So the addresses to write to
are a table, `windows`, and those to read from another, `own_boards`; kernels do not depend on what is behind them.
"""

from __future__ import annotations

import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import encoded
from ..sizing import align
from ._triton import jit, launch, next_power_of_2, prepare, tl, triton
from .primitives import clock_ns, load_acquire, store_release, tell_host, words_at

WARP_LANES = 32  # threads of a warp
NUM_SECTIONS = 3  # payload, scales, records
SEGMENT_BITS = 40  # a base is `segment << 40 | offset`; -1: there is none

# Failures, as their records have them.
TIMEOUT, DISAGREE, OVERFLOW, COUNTS, DESYNC, HOST, GONE, REMOTE_OVERFLOW, REFUSED = 1, 2, 3, 4, 5, 6, 7, 8, 9
EXPANDED_OVERFLOW = 10

# Kinds of calls that a rank may refuse: each kind is numbered by itself.
NORMAL, LOW_LATENCY = 0, 1
_NORMAL = tl.constexpr(NORMAL)
_TIMES_BITS = tl.constexpr(16)  # of the word of a refusal
NOTE_WORDS = 64  # of the reason of a refusal, at the end of the header of the call
_NOTE = tl.constexpr(NOTE_WORDS)

_LINE = tl.constexpr(8)
_STEP_BITS = tl.constexpr(24)
_TIMEOUT, _DESYNC, _HOST = tl.constexpr(TIMEOUT), tl.constexpr(DESYNC), tl.constexpr(HOST)
_REFUSAL = tl.constexpr(REFUSED)

HEADER_WORDS = 24  # of a header, before the counts; `notify.py` says what they are

# Words of the state and of the host's copy of it: epoch (ticket), failed, held, then the record. A call is held while
# its rows cannot move: the guessed offers did not fit, or it was refused. Then what a call with staged ranks needs: how
# many there are, the most tokens of any rank, and, of all calls, the rounds beyond the first. Then whether the last
# handshake was announced, and, of all calls, the bytes of rows that this rank gave to its rail. Then the call that this
# rank refused last, and how many blocks of a kernel have ended. Behind them a state has what a wait saw last, [2, R].
STATE_EPOCH, STATE_FAILED, STATE_HELD, STATE_RECORD, STATE_WORDS = 0, 1, 2, 3, 24
STATE_STAGED, STATE_TOKENS, STATE_ROUNDS, STATE_ANNOUNCED, STATE_RAIL_BYTES, STATE_REFUSED = 10, 11, 12, 13, 14, 15
STATE_ENDED = 16
REFUSALS = range(STATE_REFUSED, STATE_REFUSED + 1)
_FAILED, _HELD = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_HELD)
_RECORD, _REFUSED = tl.constexpr(STATE_RECORD), tl.constexpr(STATE_REFUSED)
_SAW = tl.constexpr(STATE_WORDS)

# Rows of the table, behind the addresses of the sections. Of a staged rank `put` and `pull` see no room at all. The
# last row is for calls of selections: rows of an expanded result that a peer takes or gives; 0 or less: its rows are
# compact.
TABLE_CAPACITIES, TABLE_STARTS, TABLE_SOURCE_ROWS, TABLE_EXPANDED, TABLE_ROWS = (NUM_SECTIONS + row for row in range(5))

# Columns of the plan of a call across nodes, a row for each node n, as a rank (a, i) needs it: rows that (n, i) sends
# to node a, and where they begin among those of all nodes; tokens that this rank sends to n, and where they begin;
# where they begin among those that (n, i) gets; where the sums for (n, i) begin among those that it gets back.
PLAN_NUM_IN, PLAN_IN_START, PLAN_NUM_OUT, PLAN_OUT_START, PLAN_TARGET_START, PLAN_BACK_START = range(6)
PLAN_WORDS = 8


@dataclass(frozen=True)
class Context:
    """Where a rank's words are, for kernels. Made once for a buffer.

    Attributes:
        rank: This rank.
        num_ranks: R.
        windows: [segments, R] int64 addresses of the ranks' memory; row 0 begins with the boards. A remote rank has
            only a shadow of its board, in row 0.
        own_boards: [R] int64 addresses of this rank's board, for each rank the board that it writes.
        state: [num_state_words(R)] int64, private.
        table: [TABLE_ROWS, R] int64: addresses of the peers' sections, rows offered, first slots, rows that a source
            has in staging, rows of expanded results.
        host: [STATE_WORDS + 3 R + R * R + L] int64 in memory that the host reads while kernels run.
        header_words: H.
        limit_ns: How long a wait may take.
        num_nodes: N.
    """

    rank: int
    num_ranks: int
    windows: torch.Tensor
    own_boards: torch.Tensor
    state: torch.Tensor
    table: torch.Tensor
    host: torch.Tensor
    header_words: int
    limit_ns: int
    num_nodes: int = 1

    @functools.cached_property
    def words(self) -> torch.Tensor:
        """[10] int64, the context as kernels take it, see `open_context`: one argument instead of ten."""
        addresses = [part.data_ptr() for part in (self.windows, self.own_boards, self.state, self.table, self.host)]
        numbers = [self.num_ranks, self.rank, self.num_nodes, self.header_words, self.limit_ns]
        return torch.tensor([*addresses, *numbers], dtype=torch.int64, device="cpu").to(self.state.device)

    @property
    def ranks_per_node(self) -> int:
        """The number of ranks of a node, P."""
        return self.num_ranks // self.num_nodes

    @staticmethod
    def num_header_words(num_ranks: int, max_experts: int, num_nodes: int = 1) -> int:
        """Return H, the words of a header, if no call has more than `max_experts` experts."""
        return align(HEADER_WORDS + num_ranks + max_experts // num_ranks + num_nodes + NOTE_WORDS, 8)

    @staticmethod
    def board_bytes(num_ranks: int, header_words: int) -> int:
        """Return the bytes of a board."""
        return 8 * (2 * 8 * num_ranks + 3 * num_ranks * header_words)

    @staticmethod
    def num_state_words(num_ranks: int) -> int:
        """Return the number of words of `state`."""
        return STATE_WORDS + 2 * num_ranks

    @staticmethod
    def num_host_words(num_ranks: int, max_experts: int) -> int:
        """Return the number of words of `host`."""
        return STATE_WORDS + 3 * num_ranks + num_ranks * num_ranks + max_experts // num_ranks

    def posted_agreement(self, board: torch.Tensor, epoch: int, rank: int) -> list[int]:
        """Return what a rank posted in a call, from this rank's board: the two words of its agreement, and its
        handle's.
        """
        start = 2 * 8 * self.num_ranks + ((epoch & 1) * self.num_ranks + rank) * self.header_words
        return board.view(torch.int64)[start : start + 3].tolist()

    def note(self, board: torch.Tensor, epoch: int, rank: int) -> str:
        """Return why a rank has refused a call, from the header of call `epoch` on this rank's board."""
        stop = 2 * 8 * self.num_ranks + ((epoch & 1) * self.num_ranks + rank + 1) * self.header_words
        words = board.view(torch.int64)[stop - NOTE_WORDS : stop].tolist()
        return struct.pack(f"<{NOTE_WORDS}q", *words).rstrip(b"\0").decode(errors="replace")


def abort(context: Context, operation: int, *, run: Callable[..., None] = launch) -> None:
    """Report to all peers that this rank gave up on the host."""
    run(_abort_kernel, 1, (context.words, operation), num_warps=1, LANES=num_lanes(context))


def refuse(
    context: Context,
    operation: int,
    kind: int,
    numbers: torch.Tensor,
    refused: range,
    note: torch.Tensor,
    *,
    run: Callable[..., None] = launch,
) -> None:
    """Report to all peers that this rank does not make its next call, because the caller's arguments are wrong.

    Args:
        context: The words.
        operation: The operation of that call.
        kind: `NORMAL` or `LOW_LATENCY`.
        numbers: int64, private: word 0 is the number of the last call of that kind.
        refused: The indices of its words with the last refusals, by number of the call.
        note: [NOTE_WORDS] int64: why, as text, see `note_words`.
        run: `launch`, or `prepare`.
    """
    kept = (refused.start, len(refused))
    args = (numbers, note, context.words, operation, kind, *kept)
    run(_refuse_kernel, 1, args, num_warps=1, LANES=num_lanes(context))


def note_words(reason: str, device: torch.device) -> torch.Tensor:
    """Encode a text as words, truncated to `NOTE_WORDS`. Characters that cannot be encoded are escaped."""
    data = encoded(reason, 8 * NOTE_WORDS).ljust(8 * NOTE_WORDS, b"\0")
    return torch.tensor(struct.unpack(f"<{NOTE_WORDS}q", data), dtype=torch.int64, device=device)


def prepare_failures(context: Context) -> None:
    """Compile and load the kernels of this file, so that no peer's limit passes while one is compiled."""
    abort(context, 0, run=prepare)
    refuse(context, 0, NORMAL, context.state, REFUSALS, context.state, run=prepare)


def num_lanes(context: Context, num_warps: int = 1) -> int:
    """Return how many lanes a block of so many warps looks at ranks with: at least one for each rank.

    The condition of a loop must be one value for all threads. So there are as many lanes as a warp has threads, and
    then every warp has all of them; or at least as many as the block has threads, and then none is there twice.
    """
    if context.num_ranks <= WARP_LANES:
        return WARP_LANES
    return max(num_warps * WARP_LANES, next_power_of_2(context.num_ranks))


# Numbers have their types written down: a kernel is not compiled again for another value of them.


@triton.jit
def open_context(words):
    """Return what kernels know of a buffer, from `Context.words`: windows, own boards, state, table and host, each a
    pointer to int64 words; and the number of ranks, this rank, the number of nodes, H and the limit.

    Functions that take a `context` take this tuple.
    """
    return (
        words_at(tl.load(words)),
        words_at(tl.load(words + 1)),
        words_at(tl.load(words + 2)),
        words_at(tl.load(words + 3)),
        words_at(tl.load(words + 4)),
        tl.load(words + 5).to(tl.int32),
        tl.load(words + 6).to(tl.int32),
        tl.load(words + 7).to(tl.int32),
        tl.load(words + 8).to(tl.int32),
        tl.load(words + 9),
    )


@triton.jit
def may_move(state):
    """Return whether rows may move: the buffer has not failed, and the call is not held."""
    return (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0)


@triton.jit
def may_still_move(state):
    """Read both words again, in the last block: others have done nothing if the buffer has failed in between."""
    return (tl.load(state + _FAILED, volatile=True) == 0) & (tl.load(state + _HELD, volatile=True) == 0)


@triton.jit
def header_of(context, ranks, is_rank, epoch):
    """Return the headers that ranks wrote in a call, each on the board of this rank that it writes."""
    _, own_boards, _, _, _, num_ranks, _, _, header_words, _ = context
    board = words_at(tl.load(own_boards + ranks, mask=is_rank, other=0))
    return board + 2 * _LINE * num_ranks + ((epoch & 1) * num_ranks + ranks) * header_words


@triton.jit
def headers_at(context, lanes, is_rank, epoch):
    """Return where this rank's header of a call is on the board of every rank."""
    windows, _, _, _, _, num_ranks, rank, _, header_words, _ = context
    board = words_at(tl.load(windows + lanes, mask=is_rank, other=0))
    return board + 2 * _LINE * num_ranks + ((epoch & 1) * num_ranks + rank) * header_words


@triton.jit
def selected_counts(context, source, epoch):
    """Return where a rank has stored how often it selects each expert in a call, [E] int32. E is at most R * H."""
    windows, _, _, _, _, num_ranks, _, _, header_words, _ = context
    board = words_at(tl.load(windows + source)) + 2 * _LINE * num_ranks + 2 * num_ranks * header_words
    return board.to(tl.pointer_type(tl.int32)) + (epoch & 1) * num_ranks * header_words


@jit
def _abort_kernel(context_words, operation: tl.int32, LANES: tl.constexpr):
    """Fail for a reason on the host."""
    context = open_context(context_words)
    state, rank = context[2], context[6]
    if tl.load(state + _FAILED) == 0:
        fail(context, _HOST, tl.load(state), operation, 0, 0, 0, rank, LANES)


@jit
def _refuse_kernel(
    numbers,
    note,
    context_words,
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
    context = open_context(context_words)
    windows, _, state, _, _, num_ranks, rank, _, header_words, _ = context
    if tl.load(state + _FAILED) == 0:
        call = ((tl.load(numbers) + 1) << 1) + kind
        refused = numbers + refused_at + (call >> 1) % num_kept
        last = tl.load(refused)
        word = (call << _TIMES_BITS) + tl.where(last >> _TIMES_BITS == call, last & 0xFFFF, 0) + 1
        tl.store(refused, word)
        epoch = tl.load(state) + 1  # its header is free: this rank has seen all peers in the call before
        lanes = tl.arange(0, LANES)
        is_rank = lanes < num_ranks
        columns = tl.arange(0, _NOTE)
        text = tl.load(note + columns)
        cells = headers_at(context, lanes, is_rank, epoch)[:, None] + header_words - _NOTE + columns[None, :]
        tl.store(cells, text[None, :], mask=is_rank[:, None])
        line = words_at(tl.load(windows + lanes, mask=is_rank, other=0)) + (num_ranks + rank) * _LINE
        _write_words(line + 1, _REFUSAL, call >> 1, operation, rank, 0, epoch, rank, is_rank)
        store_release(line, tl.zeros([LANES], tl.int64) + word, is_rank)


@triton.jit
def must_stop(failed, refused, number, kind):
    """Return which ranks a wait for call `number` need not wait for any more, by the first words of their failures.

    A rank has failed, or has refused that very call, and more often than this rank has: a rank that has made the same
    mistake as often has corrected it, and the other is expected to do so, too. If the other has made a call after all,
    it is another one than this rank's.

    Args:
        failed: [LANES] int64, the words.
        refused: This rank's own last refusal of a call of that kind.
        number: The number of the call.
        kind: `NORMAL` or `LOW_LATENCY`.
    """
    call = (number << 1) + kind
    return (failed == 1) | ((failed >> _TIMES_BITS == call) & ((failed & 0xFFFF) > times_of(refused, call)))


@triton.jit
def falls_behind(failed, refused, number, kind):
    """Return which ranks, of those that have entered call `number`, had refused it less often than this rank: this rank
    has corrected a mistake of its own alone, and what it calls now is not what the others call.

    Refusals of one kind of calls overwrite those of the other, and later ones earlier ones: then nothing is known. Nor
    is it of ranks whose words do not come straight to this rank's board: a refusal may not come at all.

    Args:
        failed: See `must_stop`, also for the others.
        refused: Likewise.
        number: Likewise.
        kind: Likewise.
    """
    call = (number << 1) + kind
    theirs = failed >> _TIMES_BITS
    is_known = (failed == 0) | ((theirs <= call) & ((theirs & 1) == kind) & (failed != 1))
    return is_known & (times_of(failed, call) < times_of(refused, call))


@triton.jit
def times_of(word, call):
    """Return how often a call was refused, by the word of a rank's last refusal."""
    return tl.where(word >> _TIMES_BITS == call, word & 0xFFFF, 0)


@triton.jit
def signal(context, first, count, epoch, step, LANES: tl.constexpr):
    """Store this rank's progress at ranks [first, first + count), after everything that this block wrote before."""
    windows, rank = context[0], context[6]
    lanes = tl.arange(0, LANES)
    is_peer = (lanes >= first) & (lanes < first + count)
    boards = words_at(tl.load(windows + lanes, mask=is_peer, other=0))
    store_release(boards + rank * _LINE, tl.zeros_like(lanes).to(tl.int64) + (epoch << _STEP_BITS) + step, is_peer)


@triton.jit
def wait(context, first, count, epoch, step, operation, LANES: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Poll the progress of ranks [first, first + count), and every rank's failures.

    If there are several warps, each may poll for itself, without a barrier between two polls, so they may leave the
    loop at different times and with different results. The result of one of them is then used by all. `num_lanes` says
    how many lanes there may be.

    Returns:
        Whether all of them came in time, and no rank has failed.
    """
    _, own_boards, state, _, _, num_ranks, rank, _, _, limit_ns = context
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    is_peer = (lanes >= first) & (lanes < first + count)
    target = (epoch << _STEP_BITS) + step
    # Lanes beyond the ranks load the last rank's words: a load that acquires cannot be masked.
    writers = tl.minimum(lanes, num_ranks - 1)
    boards = tl.load(own_boards + writers)
    lines = words_at(boards) + writers * _LINE
    own_board, refused = tl.load(own_boards + rank), tl.load(state + _REFUSED)
    begin = tl.min(clock_ns(lanes))
    progress = load_acquire(lines)
    failed = load_acquire(lines + num_ranks * _LINE)
    num_missing = tl.sum((is_peer & (progress < target)).to(tl.int32))
    has_failed = is_rank & must_stop(failed, refused, epoch, _NORMAL)
    num_failed = tl.sum(has_failed.to(tl.int32))
    # The condition is one value for all lanes, else the lanes of a warp could diverge.
    elapsed = tl.max(clock_ns(lanes)) - begin
    while (num_missing > 0) & (num_failed == 0) & (elapsed < limit_ns):
        progress = load_acquire(lines)
        failed = load_acquire(lines + num_ranks * _LINE)
        num_missing = tl.sum((is_peer & (progress < target)).to(tl.int32))
        has_failed = is_rank & must_stop(failed, refused, epoch, _NORMAL)
        num_failed = tl.sum(has_failed.to(tl.int32))
        elapsed = tl.max(clock_ns(lanes)) - begin
    tl.debug_barrier()  # what one thread acquired, all may read
    if NUM_WARPS > 1:
        tl.store(state + _SAW + lanes, progress, mask=is_rank)
        tl.store(state + _SAW + num_ranks + lanes, failed, mask=is_rank)
        tl.debug_barrier()
        progress = tl.load(state + _SAW + lanes, mask=is_rank, other=0, volatile=True)
        failed = tl.load(state + _SAW + num_ranks + lanes, mask=is_rank, other=0, volatile=True)
        num_missing = tl.sum((is_peer & (progress < target)).to(tl.int32))
        has_failed = is_rank & must_stop(failed, refused, epoch, _NORMAL)
        num_failed = tl.sum(has_failed.to(tl.int32))
    is_desync = is_peer & (progress >= ((epoch + 2) << _STEP_BITS))
    is_behind = is_peer & (lanes != rank) & (boards == own_board) & falls_behind(failed, refused, epoch, _NORMAL)
    num_astray = tl.sum((is_desync | is_behind).to(tl.int32))
    is_well = (num_missing == 0) & (num_failed == 0) & (num_astray == 0)
    if num_failed > 0:
        propagate_failure(context, tl.min(tl.where(has_failed, lanes, LANES)), LANES)
    elif num_missing > 0:
        subject = mask_of(is_peer & (progress < target), lanes)
        fail(context, _TIMEOUT, epoch, operation, subject, step, 0, rank, LANES)
    elif tl.sum(is_behind.to(tl.int32)) > 0:
        fail(context, _REFUSAL, epoch, operation, rank, 0, epoch, rank, LANES)
    elif not is_well:
        fail(context, _DESYNC, epoch, operation, mask_of(is_desync, lanes), 0, 0, rank, LANES)
    return is_well


@triton.jit
def is_last_block(ended, WRITES_PEERS: tl.constexpr = False):
    """End a block of a kernel of several blocks. Returns whether all others have ended.

    The last one acquires what the others released, so that its own release, a signal, publishes all of it. For what
    they have written in this GPU's memory the GPU's scope is enough: order is transitive (PTX: causality order), so
    that a thread that acquires the signal, which is of system scope, sees it. What they have written in the memory of
    peers they release to the system.

    Args:
        ended: A word that counts the blocks which have ended; 0 between kernels.
        WRITES_PEERS: Blocks have written memory of peers.
    """
    SCOPE: tl.constexpr = "sys" if WRITES_PEERS else "gpu"
    tl.debug_barrier()
    is_last = tl.atomic_add(ended, 1, sem="acq_rel", scope=SCOPE) == tl.num_programs(0) - 1
    if is_last:
        tl.store(ended, 0)
    return is_last


@triton.jit
def propagate_failure(context, peer, LANES: tl.constexpr):
    """Fail with the record of a peer that has failed."""
    own_boards, num_ranks = context[1], context[5]
    record = words_at(tl.load(own_boards + peer)) + (num_ranks + peer) * _LINE + 1
    fail(
        context, tl.load(record), tl.load(record + 1), tl.load(record + 2), tl.load(record + 3), tl.load(record + 4),
        tl.load(record + 5), tl.load(record + 6), LANES,
    )  # fmt: skip


@triton.jit
def mask_of(chosen, lanes):
    """A bit for each chosen rank; ranks from 62 on share the last."""
    bits = tl.full(lanes.shape, 1, tl.int64) << tl.minimum(lanes, 62).to(tl.int64)
    low = tl.sum(tl.where(chosen & (lanes < 62), bits, 0))
    high = tl.sum((chosen & (lanes >= 62)).to(tl.int32))
    return low + tl.where(high > 0, tl.full((), 1, tl.int64) << 62, 0)


@triton.jit
def write_record(words, code, epoch, operation, subject, seen, expected, origin):
    """Write the record of a failure, behind its flag in the state or on the host."""
    _write_words(words + _RECORD, code, epoch, operation, subject, seen, expected, origin, None)


@triton.jit
def _write_words(words, code, epoch, operation, subject, seen, expected, origin, mask):
    """Write the seven words of a record."""
    tl.store(words, code, mask=mask)
    tl.store(words + 1, epoch, mask=mask)
    tl.store(words + 2, operation, mask=mask)
    tl.store(words + 3, subject, mask=mask)
    tl.store(words + 4, seen, mask=mask)
    tl.store(words + 5, expected, mask=mask)
    tl.store(words + 6, origin, mask=mask)


@triton.jit
def fail(context, code, epoch, operation, subject, seen, expected, origin, LANES: tl.constexpr):
    """Fail for good: later kernels do nothing, and the failure is stored for the peers that wait and for the host."""
    windows, _, state, _, host, num_ranks, rank, _, _, _ = context
    write_record(state, code, epoch, operation, subject, seen, expected, origin)
    tl.store(state + _FAILED, 1)
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    line = words_at(tl.load(windows + lanes, mask=is_rank, other=0)) + (num_ranks + rank) * _LINE
    _write_words(line + 1, code, epoch, operation, subject, seen, expected, origin, is_rank)
    store_release(line, tl.full([LANES], 1, tl.int64), is_rank)
    # The host comes last: once its caller sees the failure, it may overwrite what peers must not read any more.
    write_record(host, code, epoch, operation, subject, seen, expected, origin)
    tell_host(host + _FAILED, tl.full((), 1, tl.int64))
