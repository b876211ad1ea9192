"""Ending a call: signal and wait, and, where ranks are staged, bring their rows through their staging, in rounds.

Shape letters: T tokens, K selections of a token, R ranks, n rows, L rows of a source in staging, B tokens of a range. A
staged rank has no memory for its rows in the window. Its *staging* has R parts of L rows for each section; part s is
for source s.

    dispatch, round j   `READY + 2j`: rows [j L, (j + 1) L) of every source's block lie in its part
                        `TAKEN + 2j`: they are copied out (not signalled after the last round)
    combine, round j    `READY + 2j`: the row of source s's token t, for t in [j B, (j + 1) B), is row t - j B of part s
                        `TAKEN + 2j`: every rank has summed its tokens of that range

These kernels wait *before* they move rows, which no others may. It is safe because each is one block of one warp: it
does not keep a kernel that it waits for from running (`docs/protocol.md`). So they are slow, and only for calls that
would otherwise fail. If no rank is staged, they signal and wait once. Addresses and widths come as numbers and rows
move as bytes, so that they are compiled once, when a buffer is made, and not for every dtype.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._triton import Launch, jit, tl, triton, variant
from .exchange import (
    NUM_SECTIONS,
    STATE_FAILED,
    STATE_HELD,
    STATE_ROUNDS,
    STATE_STAGED,
    STATE_TOKENS,
    TABLE_CAPACITIES,
    TABLE_SOURCE_ROWS,
    TABLE_STARTS,
    Context,
    num_lanes,
    signal_and_wait,
)
from .primitives import rounded
from .put import RowSpec, load_slots, record_words

_FAILED, _HELD, _STAGED = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_HELD), tl.constexpr(STATE_STAGED)
_MOST_TOKENS, _NUM_ROUNDS = tl.constexpr(STATE_TOKENS), tl.constexpr(STATE_ROUNDS)
_NUM_SECTIONS = tl.constexpr(NUM_SECTIONS)
_CAPACITIES, _STARTS, _SOURCE_ROWS = (
    tl.constexpr(TABLE_CAPACITIES),
    tl.constexpr(TABLE_STARTS),
    tl.constexpr(TABLE_SOURCE_ROWS),
)
_WORDS, _BYTES = tl.constexpr(1024), tl.constexpr(256)  # words of 4 bytes, or single bytes, that it copies at once
_COLUMNS = tl.constexpr(1024)  # that it sums at once; half of it of 8 bytes

# What a combine may sum, as the kernel numbers it.
_KINDS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2, torch.float64: 3}
_FLOAT32 = tl.constexpr(_KINDS[torch.float32])


class FinishDispatch:
    """Ends dispatches: signals that this rank's rows have been put, and waits for the peers'; sends and receives the
    rows of staged ranks.

    Args:
        context: Holds the offers of the call.
        step: `READY`.
        operation: For the record of a failure.
        rows: What the rows are made of.
        num_local_experts: Of a rank.
    """

    def __init__(self, context: Context, step: int, operation: int, rows: RowSpec, num_local_experts: int = 0):
        fixed = (
            context.windows,
            context.own_boards,
            context.state,
            context.table,
            context.host,
            context.num_ranks,
            context.rank,
            context.first_rank,
            context.ranks_per_node,
            context.limit_ns,
            step,
            operation,
            rows.row_bytes,
            rows.num_scales,
            rows.scale_bytes or 1,
            rows.idx_dtype.itemsize // 4,
            rows.num_topk,
            num_local_experts,
            4 * record_words(rows.num_topk) if rows.has_records else 0,
            int(rows.keeps_weights),
        )
        constants = {"LANES": num_lanes(context)}
        types = (torch.int32, torch.int32, *(None,) * 11)
        self.launch = Launch(variant(_finish_rows_kernel, 1, constants), types, fixed)

    def __call__(
        self,
        x: torch.Tensor,
        scales: torch.Tensor | None,
        slots: torch.Tensor,
        topk_idx: torch.Tensor | None,
        topk_weights: torch.Tensor | None,
        prefix: torch.Tensor,
        num_rows: int = 0,
        targets: Sequence[int] = (0, 0, 0),
    ) -> None:
        """End one dispatch.

        Args:
            x: [T, H] contiguous, as `put.Put` has sent it to the ranks that are not staged.
            scales: [T, S] of any strides, or None.
            slots: [T, R] int32, relative to the first slots of the table.
            topk_idx: [T, K] int32 or int64 contiguous, or None.
            topk_weights: [T, K] float32 contiguous, or None.
            prefix: [R, R] int32.
            num_rows: n, if this rank is staged.
            targets: Addresses where its rows, scales and records stay then, [n, ...] each; 0: it does not travel.
        """
        stride_t, stride_s = (0, 0) if scales is None else scales.stride()
        sent = (0 if scales is None else scales.data_ptr(), stride_t, stride_s)
        topk = (0, 0) if topk_idx is None or topk_weights is None else (topk_idx.data_ptr(), topk_weights.data_ptr())
        self.launch(1, (slots, prefix), (x.shape[0], num_rows, x.data_ptr(), *sent, *topk, *targets))


class FinishCombine:
    """Ends combines: signals that this rank has summed its tokens, and waits for the peers; gives and sums the rows of
    staged ranks.

    Args:
        context: Holds the offers of the call.
        step: `READY`; if no rank is staged, only the step after it is signalled.
        operation: For the record of a failure.
        hidden: H.
        dtype: The dtype of the rows.
        num_topk: K, of the weights that come with the rows; 0: none do.
    """

    def __init__(self, context: Context, step: int, operation: int, hidden: int, dtype: torch.dtype, num_topk: int = 0):
        fixed = (
            context.windows,
            context.own_boards,
            context.state,
            context.table,
            context.host,
            context.num_ranks,
            context.rank,
            context.first_rank,
            context.ranks_per_node,
            context.limit_ns,
            step,
            operation,
            hidden,
            num_topk,
            dtype.itemsize,
            _KINDS[dtype],
        )
        constants = {"LANES": num_lanes(context)}
        types = (torch.int32, torch.int32, torch.int32, *(None,) * 8)
        self.launch = Launch(variant(_finish_sums_kernel, 1, constants), types, fixed)

    def __call__(
        self,
        rows: Sequence[torch.Tensor],
        sums: Sequence[torch.Tensor],
        biases: Sequence[torch.Tensor],
        slots: torch.Tensor,
        prefix: torch.Tensor,
        recv_src_idx: torch.Tensor,
    ) -> None:
        """End one combine.

        Args:
            rows: This rank's rows [n, H], and weights [n, K] float32 if they travel, contiguous.
            sums: [T, H] and [T, K]: `pull.Pull` has written them where a token has no row at a staged rank.
            biases: At most two tensors [T, H], as `pull.Pull` has them.
            slots: [T, R] int32.
            prefix: [R, R] int32.
            recv_src_idx: [n] int32, the token of each row at its source, ascending for each source.
        """
        has_weights = len(rows) > 1
        first, second = (*(bias.data_ptr() for bias in biases), 0, 0)[:2] if biases else (0, 0)
        counts = (sums[0].shape[0], rows[0].shape[0])
        given = (rows[0].data_ptr(), rows[1].data_ptr() if has_weights else 0)
        summed = (sums[0].data_ptr(), sums[1].data_ptr() if has_weights else 0)
        self.launch(1, (slots, prefix, recv_src_idx), (*counts, *given, *summed, first, second))


def prepare_all(context: Context) -> None:
    """Compile and load both kernels, so that no peer's limit passes while one is compiled."""
    FinishDispatch(context, 0, 0, RowSpec(4, torch.int32, is_aligned=False)).launch.prepare()
    FinishCombine(context, 0, 0, 1, torch.float32).launch.prepare()


# Dispatch ------------------------------------------------------------------------------------------------------------


@jit
def _finish_rows_kernel(
    slots,
    prefix,
    num_tokens: tl.int32,
    num_rows: tl.int64,
    x: tl.int64,
    scales: tl.int64,
    scale_stride_t: tl.int64,
    scale_stride_s: tl.int64,
    topk_idx: tl.int64,
    topk_weights: tl.int64,
    target_0: tl.int64,
    target_1: tl.int64,
    target_2: tl.int64,
    windows,
    own_boards,
    state,
    table,
    host,
    num_ranks: tl.int32,
    rank: tl.int32,
    first_rank: tl.int32,
    ranks_per_node: tl.int32,
    limit_ns: tl.int64,
    step: tl.int32,
    operation: tl.int32,
    row_bytes: tl.int64,
    num_scales: tl.int64,
    scale_bytes: tl.int64,
    idx_words: tl.int32,
    num_topk: tl.int32,
    num_local: tl.int32,
    record_bytes: tl.int64,
    keeps_weights: tl.int32,
    LANES: tl.constexpr,
):
    """Signal and wait; with staged ranks, send before every other signal and copy out after it.

    Example: one rank, staged, with staging of 2 rows for each source, sends itself its tokens 0, 3 and 4: tokens 0 and
    3 in round 0, token 4 in round 1. The steps are `READY`, `TAKEN`, `READY + 2`.
    """
    is_well = (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0)
    is_staged = tl.load(state + _STAGED) != 0
    epoch = tl.load(state)
    num_turns = tl.full((), 1, tl.int32)
    if is_well & is_staged:
        num_turns = 2 * _num_rounds(table, prefix, num_ranks, LANES) - 1
    tokens = tl.zeros([LANES], tl.int32)  # with which the next round begins, for each peer
    turn = tl.zeros((), tl.int32)
    while is_well & (turn < num_turns):
        is_round = is_staged & (turn % 2 == 0)
        if is_round:
            tokens = _send(
                table, slots, prefix, tokens, num_ranks, rank, turn // 2, num_tokens, x, row_bytes, scales,
                scale_stride_t, scale_stride_s, num_scales, scale_bytes, topk_idx, idx_words, topk_weights, num_topk,
                num_local, record_bytes, keeps_weights, LANES,
            )  # fmt: skip
        is_well = signal_and_wait(
            windows, own_boards, state, host, num_ranks, rank, first_rank, ranks_per_node, epoch, step + turn,
            operation, limit_ns, LANES,
        )  # fmt: skip
        if is_well & is_round:
            _copy_out(
                table, prefix, num_ranks, rank, turn // 2, num_rows, row_bytes, num_scales * scale_bytes,
                record_bytes, target_0, target_1, target_2,
            )  # fmt: skip
        turn += 1
    _count_rounds(state, host, is_well, num_turns // 2)


@triton.jit
def _num_rounds(table, prefix, num_ranks, LANES: tl.constexpr):
    """Return the rounds that the fullest part of staging needs.

    All ranks compute the same number, from the same offers and prefix sums.
    """
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
def _send(
    table, slots, prefix, tokens, num_ranks, rank, index, num_tokens, x, row_bytes, scales, scale_stride_t,
    scale_stride_s, num_scales, scale_bytes, topk_idx, idx_words, topk_weights, num_topk, num_local, record_bytes,
    keeps_weights, LANES: tl.constexpr,
):  # fmt: skip
    """Write this rank's rows of a round into its part of staging at every staged peer.

    Slots ascend with the tokens, so that each round begins where the one before it ended.

    Returns:
        [LANES] the token with which the next round begins, for each peer.
    """
    lanes = tl.arange(0, LANES)
    for turn in range(num_ranks):
        peer = (rank + 1 + turn) % num_ranks
        rows_per_source = tl.load(table + _SOURCE_ROWS * num_ranks + peer)
        if rows_per_source > 0:
            token = tl.sum(tl.where(lanes == peer, tokens, 0))
            first = tl.load(prefix + (rank - 1) * num_ranks + peer, mask=rank > 0, other=0)
            shift = tl.load(table + _STARTS * num_ranks + peer) - first - index * rows_per_source
            is_open = token < num_tokens
            while is_open:
                slot = tl.load(slots + token.to(tl.int64) * num_ranks + peer)
                row = slot + shift
                if (slot >= 0) & (row >= 0) & (row < rows_per_source):  # never beyond its part, whatever the slots are
                    row_idx = rank * rows_per_source + row
                    source = token.to(tl.int64)
                    _copy_bytes(tl.load(table + peer) + row_idx * row_bytes, x + source * row_bytes, row_bytes)
                    _lay_scales(
                        tl.load(table + num_ranks + peer) + row_idx * num_scales * scale_bytes,
                        scales + source * scale_stride_t * scale_bytes,
                        scale_stride_s, num_scales, scale_bytes,
                    )  # fmt: skip
                    if record_bytes > 0:
                        _lay_record(
                            tl.load(table + 2 * num_ranks + peer) + row_idx * record_bytes, token,
                            topk_idx + source * num_topk * idx_words * 4, idx_words,
                            topk_weights + source * num_topk * 4, num_topk, peer * num_local, num_local, num_ranks,
                            keeps_weights,
                        )  # fmt: skip
                is_later = (slot >= 0) & (row >= rows_per_source)
                token += tl.where(is_later, 0, 1)
                is_open = (token < num_tokens) & (is_later == 0)
            tokens = tl.where(lanes == peer, token, tokens)
    return tokens


@triton.jit
def _lay_scales(target, source, stride, num_scales, scale_bytes):
    """Write a token's scales, which may lie apart, side by side."""
    num_bytes = num_scales * scale_bytes
    for start in range(0, num_bytes, _BYTES):
        offsets = start + tl.arange(0, _BYTES)
        sources = source + offsets // scale_bytes * stride * scale_bytes + offsets % scale_bytes
        values = tl.load(_at(sources, tl.int8), mask=offsets < num_bytes, other=0)
        tl.store(_at(target + offsets, tl.int8), values, mask=offsets < num_bytes)


@triton.jit
def _lay_record(target, token, ids, idx_words, weights, num_topk, first_expert, num_local, num_ranks, keeps_weights):
    """Write a token's record, as `put.py` describes it. Ids of 8 bytes are read as two words."""
    record = _at(target, tl.int32)
    tl.store(record, token)
    for start in range(0, num_topk, 32):
        columns = start + tl.arange(0, 32)
        is_column = columns < num_topk
        low = tl.load(_at(ids, tl.int32) + columns * idx_words, mask=is_column, other=-1).to(tl.int64)
        high = tl.load(_at(ids, tl.int32) + columns * idx_words + idx_words - 1, mask=is_column, other=-1).to(tl.int64)
        expert = tl.where(idx_words == 2, (high << 32) | (low & 0xFFFFFFFF), low)
        is_expert = (expert >= 0) & (expert < num_local * num_ranks)
        local = tl.where(is_expert, expert - first_expert, -1)
        is_local = (local >= 0) & (local < num_local)
        bits = tl.load(_at(weights, tl.int32) + columns, mask=is_column, other=0)
        tl.store(record + 1 + columns, tl.where(is_local, local, -1).to(tl.int32), mask=is_column)
        tl.store(record + 1 + num_topk + columns, tl.where(is_local | (keeps_weights != 0), bits, 0), mask=is_column)


@triton.jit
def _copy_out(
    table,
    prefix,
    num_ranks,
    rank,
    index,
    num_rows,
    row_bytes,
    scale_row_bytes,
    record_bytes,
    target_0,
    target_1,
    target_2,
):
    """If this rank is staged: copy the rows of a round to where they stay. The rows of a source stay side by side."""
    rows_per_source = tl.load(table + _SOURCE_ROWS * num_ranks + rank)
    if rows_per_source > 0:
        start = tl.zeros((), tl.int64)
        for source in range(num_ranks):
            stop = tl.minimum(tl.load(prefix + source * num_ranks + rank).to(tl.int64), num_rows)
            first = tl.minimum(start + index * rows_per_source, stop)
            count = tl.minimum(stop - first, rows_per_source)
            for section in range(_NUM_SECTIONS):
                width = tl.where(section == 0, row_bytes, tl.where(section == 1, scale_row_bytes, record_bytes))
                target = tl.where(section == 0, target_0, tl.where(section == 1, target_1, target_2))
                staged = tl.load(table + section * num_ranks + rank) + source * rows_per_source * width
                _copy_bytes(target + first * width, staged, count * width)
            start = stop


# Combine -------------------------------------------------------------------------------------------------------------


@jit
def _finish_sums_kernel(
    slots,
    prefix,
    recv_src_idx,
    num_tokens: tl.int32,
    num_rows: tl.int32,
    x: tl.int64,
    weights: tl.int64,
    out_0: tl.int64,
    out_1: tl.int64,
    bias_0: tl.int64,
    bias_1: tl.int64,
    windows,
    own_boards,
    state,
    table,
    host,
    num_ranks: tl.int32,
    rank: tl.int32,
    first_rank: tl.int32,
    ranks_per_node: tl.int32,
    limit_ns: tl.int64,
    step: tl.int32,
    operation: tl.int32,
    hidden: tl.int32,
    num_topk: tl.int32,
    element_bytes: tl.int32,
    kind: tl.int32,
    LANES: tl.constexpr,
):
    """Signal and wait; with staged ranks, copy in before every other signal and sum after it.

    Example: one rank of 5 tokens, staged, with staging of 2 rows for each source: 3 rounds, for tokens 0 and 1, 2 and
    3, 4. The steps are `READY`, `TAKEN`, ... `READY + 4`, `TAKEN + 4`; without staging just `TAKEN`.
    """
    is_well = (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0)
    is_staged = tl.load(state + _STAGED) != 0
    epoch = tl.load(state)
    lanes = tl.arange(0, LANES)
    num_turns = tl.full((), 2, tl.int32)
    range_tokens = tl.full((), 1, tl.int32)
    rows = tl.zeros([LANES], tl.int32)  # with which the next round begins, of each source
    if is_well & is_staged:
        range_tokens = _range_tokens(table, num_ranks, LANES)
        most_tokens = tl.maximum(tl.load(state + _MOST_TOKENS), 1)
        num_turns = (2 * ((most_tokens + range_tokens - 1) // range_tokens)).to(tl.int32)
        is_later = (lanes > 0) & (lanes < num_ranks)
        rows = tl.load(prefix + (lanes - 1) * num_ranks + rank, mask=is_later, other=0)
    turn = tl.where(is_staged, 0, 1)
    while is_well & (turn < num_turns):
        is_round = is_staged & (turn % 2 == 0)
        start = turn // 2 * range_tokens
        if is_round:
            rows = _copy_in(
                table, prefix, recv_src_idx, rows, num_ranks, rank, start, range_tokens, num_rows, x, weights,
                hidden * element_bytes, num_topk * 4, LANES,
            )  # fmt: skip
        is_well = signal_and_wait(
            windows, own_boards, state, host, num_ranks, rank, first_rank, ranks_per_node, epoch, step + turn,
            operation, limit_ns, LANES,
        )  # fmt: skip
        if is_well & is_round:
            _sum_range(
                table, slots, num_ranks, rank, start, range_tokens, num_tokens, out_0, out_1, bias_0, bias_1, hidden,
                num_topk, element_bytes, kind, LANES,
            )  # fmt: skip
        turn += 1
    _count_rounds(state, host, is_well, num_turns // 2 - 1)


@triton.jit
def _range_tokens(table, num_ranks, LANES: tl.constexpr):
    """Return B: the fewest rows that any staged rank has for a source."""
    lanes = tl.arange(0, LANES)
    rows_per_source = tl.load(table + _SOURCE_ROWS * num_ranks + lanes, mask=lanes < num_ranks, other=0)
    return tl.min(tl.where(rows_per_source > 0, rows_per_source, 0x7FFFFFFF)).to(tl.int32)


@triton.jit
def _copy_in(
    table, prefix, recv_src_idx, rows, num_ranks, rank, start, range_tokens, num_rows, x, weights, width_0, width_1,
    LANES: tl.constexpr,
):  # fmt: skip
    """If this rank is staged: copy its rows of a range of source tokens into the sources' parts of staging.

    The rows of a source are in the order of its tokens, so that each round begins where the one before it ended.

    Returns:
        [LANES] the row with which the next round begins, of each source.
    """
    lanes = tl.arange(0, LANES)
    if tl.load(table + _SOURCE_ROWS * num_ranks + rank) > 0:
        for source in range(num_ranks):
            row = tl.sum(tl.where(lanes == source, rows, 0))
            stop = tl.minimum(tl.load(prefix + source * num_ranks + rank), num_rows)
            is_open = row < stop
            while is_open:
                token = tl.load(recv_src_idx + row) - start
                if (token >= 0) & (token < range_tokens):  # never beyond the source's part, whatever the handle has
                    row_idx = (source * range_tokens + token).to(tl.int64)
                    for section in range(2):
                        width = tl.where(section == 0, width_0, width_1)
                        given = tl.where(section == 0, x, weights)
                        staged = tl.load(table + section * num_ranks + rank)
                        _copy_bytes(staged + row_idx * width, given + row.to(tl.int64) * width, width.to(tl.int64))
                is_later = token >= range_tokens
                row += tl.where(is_later, 0, 1)
                is_open = (row < stop) & (is_later == 0)
            rows = tl.where(lanes == source, row, rows)
    return rows


@triton.jit
def _sum_range(
    table, slots, num_ranks, rank, start, range_tokens, num_tokens, out_0, out_1, bias_0, bias_1, hidden, num_topk,
    element_bytes, kind, LANES: tl.constexpr,
):  # fmt: skip
    """Sum those of this rank's tokens of a range that have a row at a staged rank: all their rows, in one go."""
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    rows_per_source = tl.load(table + _SOURCE_ROWS * num_ranks + lanes, mask=is_rank, other=0)
    capacities = tl.load(table + _CAPACITIES * num_ranks + lanes, mask=is_rank, other=0)
    for token in range(start, tl.minimum(start + range_tokens, num_tokens)):
        slot = load_slots(slots, token, num_tokens, num_ranks, lanes)
        has_staged_row = (slot >= 0) & (rows_per_source > 0)
        has_row = has_staged_row | ((slot >= 0) & (slot < capacities))
        if tl.sum(has_staged_row.to(tl.int32)) > 0:
            row_idx = tl.where(rows_per_source > 0, rank * range_tokens + token - start, slot).to(tl.int64)
            for section in range(2):
                num_columns = tl.where(section == 0, hidden, num_topk)
                width = num_columns * tl.where(section == 0, element_bytes, 4)
                out = tl.where(section == 0, out_0, out_1) + tl.cast(token, tl.int64) * width
                first = tl.where((section == 0) & (bias_0 != 0), bias_0 + tl.cast(token, tl.int64) * width, 0)
                second = tl.where((section == 0) & (bias_1 != 0), bias_1 + tl.cast(token, tl.int64) * width, 0)
                bases = tl.load(table + section * num_ranks + lanes, mask=is_rank, other=0)
                rows = tl.where(has_row, bases + row_idx * width, 0)
                _sum_kind(
                    tl.where(section == 0, kind, _FLOAT32), out, first, second, rows, lanes, num_ranks, num_columns
                )


@triton.jit
def _sum_kind(kind, out, bias_0, bias_1, rows, lanes, num_ranks, num_columns):
    """`_sum_row` for the dtype that `_KINDS` numbers."""
    if kind == 0:
        _sum_row(out, bias_0, bias_1, rows, lanes, num_ranks, num_columns, tl.bfloat16, tl.float32, _COLUMNS)
    elif kind == 1:
        _sum_row(out, bias_0, bias_1, rows, lanes, num_ranks, num_columns, tl.float16, tl.float32, _COLUMNS)
    elif kind == 2:
        _sum_row(out, bias_0, bias_1, rows, lanes, num_ranks, num_columns, tl.float32, tl.float32, _COLUMNS)
    else:
        _sum_row(out, bias_0, bias_1, rows, lanes, num_ranks, num_columns, tl.float64, tl.float64, _COLUMNS // 2)


@triton.jit
def _sum_row(
    out, bias_0, bias_1, rows, lanes, num_ranks, num_columns,
    ELEMENT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum a token's rows, at the addresses `rows` (0: none), in the order and with the rounding of `pull.py`."""
    for start in range(0, num_columns, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        total = _load_wide(bias_0, columns, num_columns, ELEMENT, WIDE)
        value = _load_wide(bias_1, columns, num_columns, ELEMENT, WIDE)
        total = tl.where(bias_1 != 0, total + value, total)  # adding nothing must not make 0.0 of -0.0
        for peer in range(num_ranks):
            row = tl.sum(tl.where(lanes == peer, rows, 0))
            value = _load_wide(row, columns, num_columns, ELEMENT, WIDE)
            total = tl.where(row != 0, total + value, total)
        tl.store(_at(out, ELEMENT) + columns, rounded(total, ELEMENT), mask=columns < num_columns)


@triton.jit
def _load_wide(row, columns, num_columns, ELEMENT: tl.constexpr, WIDE: tl.constexpr):
    """Load elements of the row at an address, for adding; zeros if there is none."""
    width = tl.where(row != 0, num_columns, 0)
    return tl.load(_at(row, ELEMENT) + columns, mask=columns < width, other=0.0).to(WIDE)


# Both ----------------------------------------------------------------------------------------------------------------


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
def _count_rounds(state, host, is_well, num_more):
    """Count the rounds beyond the first, in the state and for the host, which reads them on request."""
    if is_well & (num_more > 0):
        total = tl.load(state + _NUM_ROUNDS) + num_more
        tl.store(state + _NUM_ROUNDS, total)
        tl.store(host + _NUM_ROUNDS, total)
