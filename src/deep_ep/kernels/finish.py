"""Ending a call: signal and wait, and, where ranks are staged, bring their rows through their staging, in rounds.

Shape letters: T tokens, R ranks, n rows, L rows of a source in staging, B tokens of a range. A staged rank has no
memory for its rows in the window. Its *staging* has R parts of L rows for each section; part s is for source s.

    dispatch, round j   `READY + 2j`: rows [j L, (j + 1) L) of every source's block lie in its part
                        `TAKEN + 2j`: they are copied out (not signalled after the last round)
    combine, round j    `READY + 2j`: the row of source s's token t, for t in [j B, (j + 1) B), is row t - j B of part s
                        `TAKEN + 2j`: every rank has summed its tokens of that range

The last block of the kernel that has moved the rows (`put.py`, `pull.py`, `selections.py`) ends the call. If no rank is
staged, it signals and waits once. In a round it waits *before* it moves rows, which no other block may. This is safe
because it is one block: it does not keep a kernel that it waits for from running (`docs/protocol.md`). It is slow, and
only for calls that would otherwise fail. Here is what is particular to rounds; the rows are moved by the loops of
`put.py` and `pull.py`, over other addresses.
"""

from __future__ import annotations

from ._triton import Launch, jit, tl, triton, variant
from .exchange import (
    NUM_SECTIONS,
    STATE_ROUNDS,
    TABLE_SOURCE_ROWS,
    Context,
    may_move,
    num_lanes,
    open_context,
    signal,
    wait,
)

_NUM_ROUNDS = tl.constexpr(STATE_ROUNDS)
_NUM_SECTIONS, _SOURCE_ROWS = tl.constexpr(NUM_SECTIONS), tl.constexpr(TABLE_SOURCE_ROWS)
_WORDS, _BYTES = tl.constexpr(2048), tl.constexpr(512)  # words of 4 bytes, or single bytes, that are copied at once


class Finish:
    """Ends calls whose rows several kernels have moved, as across nodes: signals to the ranks of this node, and waits
    for them.

    Args:
        context: The words.
        step: The step that is signalled and waited for.
        operation: For the record of a failure.
    """

    def __init__(self, context: Context, step: int, operation: int):
        kernel = variant(_finish_kernel, 1, {"LANES": num_lanes(context)})
        self.launch = Launch(kernel, (), (context.words, step, operation))

    def __call__(self) -> None:
        """End one call."""
        self.launch(1, ())


@jit
def _finish_kernel(context_words, step: tl.int32, operation: tl.int32, LANES: tl.constexpr):
    """One block of one warp."""
    context = open_context(context_words)
    if may_move(context[2]):
        signal_and_wait(context, step, operation, LANES, 1)


@triton.jit
def signal_and_wait(context, step, operation, LANES: tl.constexpr, NUM_WARPS: tl.constexpr):
    """Store this rank's progress at the ranks of its node, then poll theirs.

    Returns:
        Whether all of them came in time, and no rank has failed.
    """
    _, _, state, _, _, num_ranks, rank, num_nodes, _, _ = context
    ranks_per_node = num_ranks // num_nodes
    first = rank // ranks_per_node * ranks_per_node
    epoch = tl.load(state)
    signal(context, first, ranks_per_node, epoch, step, LANES)
    return wait(context, first, ranks_per_node, epoch, step, operation, LANES, NUM_WARPS)


# Rounds --------------------------------------------------------------------------------------------------------------


@triton.jit
def num_dispatch_rounds(context, prefix, LANES: tl.constexpr):
    """Return the rounds that the fullest part of staging needs.

    All ranks compute the same number, from the same offers and prefix sums.
    """
    table, num_ranks = context[3], context[5]
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    rows_per_source = tl.load(table + _SOURCE_ROWS * num_ranks + lanes, mask=is_rank, other=0)
    most = tl.full((), 1, tl.int64)
    before = tl.zeros([LANES], tl.int32)
    for source in range(num_ranks):
        sums = tl.load(prefix + source * num_ranks + lanes, mask=is_rank, other=0)
        needed = (sums - before + rows_per_source - 1) // tl.maximum(rows_per_source, 1)
        most = tl.maximum(most, tl.max(tl.where(rows_per_source > 0, needed, 0)))
        before = sums
    return most.to(tl.int32)


@triton.jit
def unstage(context, prefix, index, num_rows, widths, targets):
    """If this rank is staged: copy the rows of a round to where they stay. The rows of a source stay side by side.

    Args:
        context: See `exchange.open_context`.
        prefix: [R, R] int32.
        index: Of the round.
        num_rows: n.
        widths: Bytes of a row of each section; 0: it does not travel.
        targets: Addresses where the rows of each section stay.
    """
    _, _, _, table, _, num_ranks, rank, _, _, _ = context
    width_0, width_1, width_2 = widths
    target_0, target_1, target_2 = targets
    rows_per_source = tl.load(table + _SOURCE_ROWS * num_ranks + rank)
    if rows_per_source > 0:
        start = tl.zeros((), tl.int64)
        for source in range(num_ranks):
            stop = tl.minimum(tl.load(prefix + source * num_ranks + rank).to(tl.int64), num_rows)
            first = tl.minimum(start + index * rows_per_source, stop)
            count = tl.minimum(stop - first, rows_per_source)
            for section in range(_NUM_SECTIONS):
                width = tl.where(section == 0, width_0, tl.where(section == 1, width_1, width_2))
                target = tl.where(section == 0, target_0, tl.where(section == 1, target_1, target_2))
                staged = tl.load(table + section * num_ranks + rank) + source * rows_per_source * width
                _copy_bytes(target + first * width, staged, count * width)
            start = stop


@triton.jit
def range_tokens_of(context, LANES: tl.constexpr):
    """Return B: the fewest rows that any staged rank has for a source."""
    table, num_ranks = context[3], context[5]
    lanes = tl.arange(0, LANES)
    rows_per_source = tl.load(table + _SOURCE_ROWS * num_ranks + lanes, mask=lanes < num_ranks, other=0)
    return tl.min(tl.where(rows_per_source > 0, rows_per_source, 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def first_rows(context, prefix, LANES: tl.constexpr):
    """Return [LANES] int32: the first row of each source, among those that came to this rank."""
    num_ranks, rank = context[5], context[6]
    lanes = tl.arange(0, LANES)
    return tl.load(prefix + (lanes - 1) * num_ranks + rank, mask=(lanes > 0) & (lanes < num_ranks), other=0)


@triton.jit
def stage_in(context, prefix, source_idx, rows, start, range_tokens, num_rows, given, widths, LANES: tl.constexpr):
    """If this rank is staged: copy its rows of a range of source tokens into the sources' parts of staging.

    The rows of a source are in the order of its tokens, so that each round begins where the one before it ended.

    Args:
        context: See `exchange.open_context`.
        prefix: [R, R] int32.
        source_idx: [n] int32, the token of each row at its source.
        rows: [LANES] int32, the row with which the round begins, of each source.
        start: The first token of the range.
        range_tokens: B.
        num_rows: n.
        given: Addresses of the rows, and of their weights.
        widths: Bytes of a row, and of its weights; 0: there are none.
        LANES: At least R.

    Returns:
        The rows with which the next round begins.
    """
    _, _, _, table, _, num_ranks, rank, _, _, _ = context
    lanes = tl.arange(0, LANES)
    if tl.load(table + _SOURCE_ROWS * num_ranks + rank) > 0:
        for source in range(num_ranks):
            row = tl.sum(tl.where(lanes == source, rows, 0))
            stop = tl.minimum(tl.load(prefix + source * num_ranks + rank), num_rows)
            is_open = row < stop
            while is_open:
                token = tl.load(source_idx + row) - start
                if (token >= 0) & (token < range_tokens):  # never beyond the source's part, whatever the handle has
                    row_idx = (source * range_tokens + token).to(tl.int64)
                    for section in range(2):
                        width = tl.where(section == 0, widths[0], widths[1]).to(tl.int64)
                        memory = tl.where(section == 0, given[0], given[1])
                        staged = tl.load(table + section * num_ranks + rank)
                        _copy_bytes(staged + row_idx * width, memory + row.to(tl.int64) * width, width)
                is_later = token >= range_tokens
                row += tl.where(is_later, 0, 1)
                is_open = (row < stop) & (is_later == 0)
            rows = tl.where(lanes == source, row, rows)
    return rows


@triton.jit
def _copy_bytes(target, source, num_bytes):
    """Copy bytes from one address to another: in vectors of 16 where all numbers allow it."""
    if ((target | source | num_bytes) & 15) == 0:
        num_words = num_bytes // 16 * 4  # so the compiler knows that vectors of words are whole
        for start in range(0, num_words, _WORDS):
            words = start + tl.arange(0, _WORDS)
            values = tl.load(tl.multiple_of(_at(source, tl.int32), 16) + words, mask=words < num_words, other=0)
            tl.store(tl.multiple_of(_at(target, tl.int32), 16) + words, values, mask=words < num_words)
    else:
        for start in range(0, num_bytes, _BYTES):
            offsets = start + tl.arange(0, _BYTES)
            values = tl.load(_at(source, tl.int8) + offsets, mask=offsets < num_bytes, other=0)
            tl.store(_at(target, tl.int8) + offsets, values, mask=offsets < num_bytes)


@triton.jit
def _at(address, ELEMENT: tl.constexpr):
    """Return addresses as pointers."""
    return address.to(tl.int64).to(tl.pointer_type(ELEMENT))


@triton.jit
def count_rounds(context, is_well, num_more):
    """Count the rounds beyond the first, in the state and for the host, which reads them on request."""
    state, host = context[2], context[4]
    if is_well & (num_more > 0):
        total = tl.load(state + _NUM_ROUNDS) + num_more
        tl.debug_barrier()  # all have loaded what one thread stores next
        tl.store(state + _NUM_ROUNDS, total)
        tl.store(host + _NUM_ROUNDS, total)
