"""The sums of a combine across nodes: of a node's rows for the ranks of its rail, and of the nodes' sums.

Shape letters: T tokens, H elements of a row, N nodes of P ranks, F rows that this rank forwards inside its node. FP32
accumulation (FP64 for FP64 rows), rounded once for each node, as what crosses is; then biases first and nodes in
ascending order, and rounded again. The result does not depend on the grid, nor on where a node's sum is made.

No kernel here waits or signals; all of them do nothing once the buffer has failed, or while a call is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from ._triton import jit, launch, next_power_of_2, tl, triton
from .exchange import (
    PLAN_IN_START,
    PLAN_NUM_OUT,
    PLAN_OUT_START,
    PLAN_TARGET_START,
    PLAN_WORDS,
    TABLE_CAPACITIES,
    may_move,
)
from .primitives import rounded, widened
from .pull import add_biases, wide_type
from .put import LaunchShape, load_slots, word_of
from .relay import chunk_of, share_start

_CAPACITIES = tl.constexpr(TABLE_CAPACITIES)
_IN_START, _PLAN_WORDS, _NUM_OUT = tl.constexpr(PLAN_IN_START), tl.constexpr(PLAN_WORDS), tl.constexpr(PLAN_NUM_OUT)
_OUT_START, _TARGET_START = tl.constexpr(PLAN_OUT_START), tl.constexpr(PLAN_TARGET_START)
_MOST_AT_ONCE = 4  # rows of ranks that a block loads before it adds the first
_MOST_UNROLLED = tl.constexpr(8)  # rows whose sum is unrolled, so that what they have in common is computed once
_MOST_NODES_AT_ONCE = 2  # likewise of nodes: both are held while the next ones are loaded


class Node(NamedTuple):
    """This node in a combine.

    Attributes:
        number: Which node it is.
        table: [TABLE_ROWS, P] int64, of any stride: addresses of its ranks' sections, and their rows.
        plan: [N, PLAN_WORDS] int64.
        state: [STATE_WORDS] int64, see `exchange.py`.
    """

    number: int
    table: torch.Tensor
    plan: torch.Tensor
    state: torch.Tensor


class RemoteSums(NamedTuple):
    """Where the sums of other nodes are, of one section.

    Attributes:
        begin: Address of the first one in the receive buffer; with `sources`: bytes to it from where an outbox begins.
        sources: [N] int64, addresses of the outboxes that they still are in; None: they have arrived.
    """

    begin: int
    sources: torch.Tensor | None


def sum_for_rail(
    node: Node,
    shape: LaunchShape,
    section: int,
    out: torch.Tensor,
    forwarded: torch.Tensor,
    chunk: int,
    num_chunks: int,
) -> None:
    """Sum this node's rows of the tokens that other nodes sent to it through this rank.

    Args:
        node: This node.
        shape: How to launch.
        section: Which section of its ranks.
        out: [F or fewer, H], written where a row is another node's.
        forwarded: [F, P] int32, the row of each token at each rank of the node; -1: it has none.
        chunk: Which part of each node's rows.
        num_chunks: Of how many.
    """
    num_rows, hidden = min(out.size(0), forwarded.size(0)), out.size(1)
    if num_rows == 0 or hidden == 0:
        return
    ranks_per_node, num_nodes = node.table.size(1), node.plan.size(0)
    vector, block, num_pieces, num_warps = shape.cut(hidden, out.element_size(), word_of(out)[1])
    launch(
        _sum_for_rail_kernel,
        max(1, min(shape.num_blocks, num_rows * num_pieces)),
        (
            out,
            forwarded,
            node.table,
            node.plan,
            node.state,
            num_rows,
            hidden * out.element_size() // vector,
            ranks_per_node,
            node.table.stride(0),
            num_nodes,
            node.number,
            section,
            chunk,
            num_chunks,
        ),
        (out.dtype,),
        num_warps=num_warps,
        num_registers=shape.num_registers,
        BLOCK=block,
        AT_ONCE=min(_MOST_AT_ONCE, next_power_of_2(ranks_per_node)),
        LANES=next_power_of_2(ranks_per_node),
        VECTOR=vector,
        WIDE=wide_type(out.dtype),
        IS_WHOLE=num_pieces == 1,
    )


def sum_nodes(
    node: Node,
    remote: RemoteSums,
    shape: LaunchShape,
    section: int,
    out: torch.Tensor,
    node_slots: torch.Tensor,
    forwarded: torch.Tensor,
    biases: Sequence[torch.Tensor],
) -> None:
    """Sum the nodes' sums of this rank's tokens: this node's rows are summed here, the sums of other nodes have
    arrived.

    Args:
        node: This node.
        remote: The sums of the others.
        shape: How to launch.
        section: Which section.
        out: [T, H], written.
        node_slots: [T, N] int32, where a token's sum lies among those of a node; -1: it was not there.
        forwarded: [F, P] int32, as above; this rank's own tokens are among them.
        biases: At most two tensors [T, H] of out's dtype, added first and in order.
    """
    num_tokens, hidden = out.shape
    if out.numel() == 0:
        return
    ranks_per_node, num_nodes = node.table.size(1), node.plan.size(0)
    vector, block, num_pieces, num_warps = shape.cut(hidden, out.element_size(), word_of(out, *biases)[1])
    launch(
        _sum_nodes_kernel,
        min(shape.num_blocks, num_tokens * num_pieces),
        (
            out,
            *(*biases, out, out)[:2],
            node_slots,
            forwarded if forwarded.numel() else node_slots,
            node.table,
            remote.sources if remote.sources is not None else node.plan,
            node.plan,
            node.state,
            remote.begin,
            num_tokens,
            forwarded.size(0),
            hidden * out.element_size() // vector,
            ranks_per_node,
            node.table.stride(0),
            num_nodes,
            node.number,
            section,
        ),
        (out.dtype,),
        num_warps=num_warps,
        num_registers=shape.num_registers,
        NUM_BIASES=len(biases),
        BLOCK=block,
        AT_ONCE=min(_MOST_AT_ONCE, next_power_of_2(ranks_per_node)),
        NODES_AT_ONCE=min(_MOST_NODES_AT_ONCE, next_power_of_2(num_nodes)),
        LANES=next_power_of_2(ranks_per_node),
        NODES=next_power_of_2(num_nodes),
        IS_FETCHED=remote.sources is not None,
        VECTOR=vector,
        WIDE=wide_type(out.dtype),
        IS_WHOLE=num_pieces == 1,
    )


@jit
def _sum_for_rail_kernel(
    out,
    forwarded,
    table,
    plan,
    state,
    num_slots: tl.int32,
    row_vectors: tl.int32,
    ranks_per_node: tl.int32,
    table_stride: tl.int32,
    num_nodes: tl.int32,
    node: tl.int32,
    section: tl.int32,
    chunk: tl.int32,
    num_chunks: tl.int32,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Node after node. Items are pieces of rows: piece c of the r-th row of its chunk is item `r * pieces + c`.

    Example: two nodes of two ranks, this is node 0; node 1 has 1 row, row 4 of those forwarded, with slots `[2, 5]`:
    row 4 of `out` is row 2 of rank 0 plus row 5 of rank 1.
    """
    if may_move(state):
        ELEMENT_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
        hidden = row_vectors * (VECTOR // ELEMENT_BYTES)  # so the compiler knows that vectors of elements are whole
        lanes = tl.arange(0, LANES)
        bases = tl.load(table + section * table_stride + lanes, mask=lanes < ranks_per_node, other=0)
        capacities = tl.load(table + _CAPACITIES * table_stride + lanes, mask=lanes < ranks_per_node, other=0)
        num_pieces = 1 if IS_WHOLE else tl.cdiv(hidden, BLOCK)
        step = tl.num_programs(0)
        num_before = tl.zeros((), tl.int32)
        for other in range(num_nodes):
            if other != node:
                _, num_rows, first_row = chunk_of(plan, other, chunk, num_chunks)
                num_rows = tl.minimum(num_rows, num_slots - first_row).to(tl.int32)
                num_items = num_rows * num_pieces
                slots, sums = forwarded + first_row * ranks_per_node, out + first_row * hidden
                start = share_start(num_before, step)
                num_before += tl.maximum(num_items, 0)
                # While an item's rows are added, the next one's are being loaded, and the slots of the one behind it.
                slot = load_slots(slots, start // num_pieces, num_rows, ranks_per_node, lanes)
                numbers, values = _ask(out, slot, bases, capacities, start, num_pieces, hidden, AT_ONCE, BLOCK, VECTOR)
                slot = load_slots(slots, (start + step) // num_pieces, num_rows, ranks_per_node, lanes)
                for item in range(start, num_items, step):
                    following = item + step
                    next_numbers, next_values = _ask(
                        out, slot, bases, capacities, following, num_pieces, hidden, AT_ONCE, BLOCK, VECTOR
                    )
                    slot = load_slots(slots, (following + step) // num_pieces, num_rows, ranks_per_node, lanes)
                    columns = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
                    total = _sum_rows(
                        out, numbers, bases, values, columns, hidden, ranks_per_node, AT_ONCE, VECTOR, WIDE
                    )
                    target = tl.multiple_of(sums + tl.cast(item // num_pieces, tl.int64) * hidden, VECTOR) + columns
                    tl.store(target, rounded(total, out.dtype.element_ty), mask=columns < hidden)
                    numbers, values = next_numbers, next_values


@jit
def _sum_nodes_kernel(
    out,
    bias_0,
    bias_1,
    node_slots,
    forwarded,
    table,
    sources,
    plan,
    state,
    remote_begin: tl.int64,
    num_tokens: tl.int32,
    num_slots: tl.int32,
    row_vectors: tl.int32,
    ranks_per_node: tl.int32,
    table_stride: tl.int32,
    num_nodes: tl.int32,
    node: tl.int32,
    section: tl.int32,
    NUM_BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    NODES_AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
    NODES: tl.constexpr,
    IS_FETCHED: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
    IS_WHOLE: tl.constexpr,
):
    """Items are pieces of rows: piece c of token t is item `t * pieces + c`.

    Example: two nodes of one rank, this is node 1; token 0 has node slots `[3, 2]` and its own begin at row 4 of those
    forwarded: out is row 3 of node 0's sums, plus row `forwarded[6, 0]` of this rank.
    """
    if may_move(state):
        ELEMENT_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
        hidden = row_vectors * (VECTOR // ELEMENT_BYTES)
        lanes, nodes = tl.arange(0, LANES), tl.arange(0, NODES)
        bases = tl.load(table + section * table_stride + lanes, mask=lanes < ranks_per_node, other=0)
        capacities = tl.load(table + _CAPACITIES * table_stride + lanes, mask=lanes < ranks_per_node, other=0)
        remote_bases, remote_capacities = _locate(
            plan, sources, remote_begin, hidden * ELEMENT_BYTES, num_nodes, node, nodes, IS_FETCHED
        )
        start = tl.load(plan + node * _PLAN_WORDS + _IN_START)
        num_pieces = 1 if IS_WHOLE else tl.cdiv(hidden, BLOCK)
        num_items = num_tokens * num_pieces
        # As above, one token more: its slots among the rows forwarded are found by its slots at the nodes.
        first, step = tl.program_id(0), tl.num_programs(0)
        own_rows = (forwarded, start, num_slots, ranks_per_node)
        own_remote = load_slots(node_slots, first // num_pieces, num_tokens, num_nodes, nodes)
        is_here, slot = _own_slots(own_rows, own_remote, node, nodes, lanes)
        numbers, values = _ask(out, slot, bases, capacities, first, num_pieces, hidden, AT_ONCE, BLOCK, VECTOR)
        remote_numbers, remote_values = _ask(
            out, own_remote, remote_bases, remote_capacities, first, num_pieces, hidden, NODES_AT_ONCE, BLOCK, VECTOR
        )
        remote = load_slots(node_slots, (first + step) // num_pieces, num_tokens, num_nodes, nodes)
        next_here, slot = _own_slots(own_rows, remote, node, nodes, lanes)
        later = load_slots(node_slots, (first + 2 * step) // num_pieces, num_tokens, num_nodes, nodes)
        for item in range(first, num_items, step):
            following = item + step
            next_numbers, next_values = _ask(
                out, slot, bases, capacities, following, num_pieces, hidden, AT_ONCE, BLOCK, VECTOR
            )
            next_remote_numbers, next_remote_values = _ask(
                out,
                remote,
                remote_bases,
                remote_capacities,
                following,
                num_pieces,
                hidden,
                NODES_AT_ONCE,
                BLOCK,
                VECTOR,
            )
            later_here, slot = _own_slots(own_rows, later, node, nodes, lanes)
            remote = later
            later = load_slots(node_slots, (following + 2 * step) // num_pieces, num_tokens, num_nodes, nodes)
            columns = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
            begin = tl.cast(item // num_pieces, tl.int64) * hidden
            total = add_biases(bias_0 + begin, bias_1 + begin, columns, hidden, NUM_BIASES, VECTOR, WIDE)
            mine = _sum_rows(out, numbers, bases, values, columns, hidden, ranks_per_node, AT_ONCE, VECTOR, WIDE)
            mine = widened(rounded(mine, out.dtype.element_ty), WIDE)  # as if it had crossed
            own = tl.where(is_here, node, -1)
            total = _add_nodes(total, remote_values, mine, own, 0, NODES_AT_ONCE, WIDE)
            if NODES > NODES_AT_ONCE:
                for other in range(NODES_AT_ONCE, num_nodes, NODES_AT_ONCE):
                    more = _load_rows(out, remote_numbers, remote_bases, other, columns, hidden, NODES_AT_ONCE, VECTOR)
                    total = _add_nodes(total, more, mine, own, other, NODES_AT_ONCE, WIDE)
            target = tl.multiple_of(out + begin, VECTOR) + columns
            tl.store(target, rounded(total, out.dtype.element_ty), mask=columns < hidden)
            numbers, values, remote_numbers, remote_values = (
                next_numbers,
                next_values,
                next_remote_numbers,
                next_remote_values,
            )
            is_here, next_here = next_here, later_here


@triton.jit
def _own_slots(own_rows, node_slot, node, nodes, lanes):
    """Whether a token goes to a rank of its own node, and its rows at the ranks there."""
    forwarded, start, num_slots, ranks_per_node = own_rows
    own = tl.sum(tl.where(nodes == node, node_slot, 0))
    row = tl.where(own >= 0, own + start, num_slots)
    return own >= 0, load_slots(forwarded, row, num_slots, ranks_per_node, lanes)


@triton.jit
def _locate(plan, sources, begin, row_bytes, num_nodes, node, nodes, IS_FETCHED: tl.constexpr):
    """Where each other node's sums of this rank's tokens begin, and how many there are; of this node none."""
    is_remote = (nodes < num_nodes) & (nodes != node)
    line = plan + nodes * _PLAN_WORDS
    start = tl.load(line + (_TARGET_START if IS_FETCHED else _OUT_START), mask=is_remote, other=0)
    bases = begin + start * row_bytes
    if IS_FETCHED:
        bases += tl.load(sources + nodes, mask=is_remote, other=0)
    return bases, tl.load(line + _NUM_OUT, mask=is_remote, other=0)


@triton.jit
def _ask(
    like, slot, bases, capacities, item, num_pieces, hidden, AT_ONCE: tl.constexpr, BLOCK: tl.constexpr,
    VECTOR: tl.constexpr
):  # fmt: skip
    """Return the numbers of an item's rows, from 1 on, 0 if there is none, and the values of the first `AT_ONCE` of
    them.
    """
    numbers = tl.where((slot >= 0) & (slot < capacities), slot + 1, 0)
    columns = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
    return numbers, _load_rows(like, numbers, bases, 0, columns, hidden, AT_ONCE, VECTOR)


@triton.jit
def _sum_rows(
    like, numbers, bases, values, columns, hidden, count, AT_ONCE: tl.constexpr, VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Return the sum of one piece of some rows, in order: of `values`, which are loaded, and of the rows after them.

    It is a part of a sum, and begins with -0.0: that changes no number, so that a zero has the sign that it has where
    all rows are added in one go.
    """
    nothing = tl.zeros([columns.shape[0]], WIDE) * -1.0  # as a literal it would lose its sign
    total = _add_values(nothing, values, AT_ONCE, WIDE)
    if numbers.shape[0] <= _MOST_UNROLLED:
        for first in tl.static_range(AT_ONCE, numbers.shape[0], AT_ONCE):
            more = _load_rows(like, numbers, bases, first, columns, hidden, AT_ONCE, VECTOR)
            total = _add_values(total, more, AT_ONCE, WIDE)
    else:
        for first in range(AT_ONCE, count, AT_ONCE):
            more = _load_rows(like, numbers, bases, first, columns, hidden, AT_ONCE, VECTOR)
            total = _add_values(total, more, AT_ONCE, WIDE)
    return total


@triton.jit
def _load_rows(like, numbers, bases, first, columns, hidden, AT_ONCE: tl.constexpr, VECTOR: tl.constexpr):
    """Load one piece of some rows, from the `first` one on. All loads are issued before any of them is waited for.

    Where there is no row its values are -0.0, which changes no sum: 0.0 would make 0.0 of -0.0.
    """
    lanes = tl.arange(0, numbers.shape[0])
    nothing = (tl.zeros((), tl.float32) * -1.0).to(like.dtype.element_ty)  # as a literal it would lose its sign
    values = ()
    for turn in tl.static_range(AT_ONCE):
        number = tl.sum(tl.where(lanes == first + turn, numbers, 0))
        base = tl.sum(tl.where(lanes == first + turn, bases, 0))
        address = base + (number - 1).to(tl.int64) * (hidden * (like.dtype.element_ty.primitive_bitwidth // 8))
        pointer = tl.multiple_of(address.to(like.dtype), VECTOR)
        value = tl.load(pointer + columns, mask=columns < tl.where(number > 0, hidden, 0), other=nothing)
        values = values + (value,)  # type: ignore[assignment]
    return values


@triton.jit
def _add_values(total, values, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Add the values that `_load_rows` has loaded, in order."""
    for turn in tl.static_range(COUNT):
        total += widened(values[turn], WIDE)
    return total


@triton.jit
def _add_nodes(total, values, mine, own, first, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Add the nodes' sums, from the `first` one on. That of node `own` is `mine`; -1: no node."""
    for turn in tl.static_range(COUNT):
        total += tl.where(first + turn == own, mine, widened(values[turn], WIDE))
    return total
