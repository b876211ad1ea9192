"""The sums of a combine across nodes: of a node's rows for the ranks of its rail, and of what the nodes have.

Shape letters: T tokens, H elements of a row, N nodes of P ranks, F rows that this rank passes on inside its node. FP32
accumulation (FP64 for FP64 rows), rounded once for each node, as what crosses is; then biases first and nodes in
ascending order, and rounded again. The result does not depend on the grid, nor on where a node's sum is made.

No kernel here waits or signals; all of them do nothing once the buffer has failed, or while a call is held.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ._triton import jit, launch, next_power_of_2, tl, triton
from .exchange import PLAN_IN_START, PLAN_WORDS, STATE_FAILED, STATE_HELD, TABLE_ROOMS, Places
from .primitives import rounded
from .pull import add_biases
from .put import VECTOR_BYTES, Shape, load_slots, word_of
from .relay import in_bounds, landed_row

_FAILED, _HELD, _ROOMS = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_HELD), tl.constexpr(TABLE_ROOMS)
_IN_START, _PLAN_WORDS = tl.constexpr(PLAN_IN_START), tl.constexpr(PLAN_WORDS)
_MOST_AT_ONCE = 8  # rows that a block loads before it adds the first


def sum_for_rail(
    places: Places,
    shape: Shape,
    section: int,
    out: torch.Tensor,
    passed_on: torch.Tensor,
    plan: torch.Tensor,
    node: int,
    chunk: int,
    num_chunks: int,
) -> None:
    """Sum this node's rows of the tokens that other nodes sent to it by way of this rank.

    Args:
        places: Holds the addresses and the rows of the P ranks of this node.
        shape: How to launch.
        section: Which of their sections.
        out: [F or fewer, H], written where a row is another node's.
        passed_on: [F, P] int32, the row of each token at each rank of the node; -1: it has none.
        plan: [N, PLAN_WORDS] int64.
        node: This node.
        chunk: Which part of each node's rows.
        num_chunks: Of how many.
    """
    num_rows, hidden = min(out.size(0), passed_on.size(0)), out.size(1)
    if num_rows == 0 or hidden == 0:
        return
    vector, block, num_warps = _shape(shape, out)
    launch(
        _sum_for_rail_kernel,
        max(1, min(shape.num_blocks, num_rows * -(-hidden // block))),
        (
            out,
            passed_on,
            places.table,
            plan,
            places.state,
            num_rows,
            hidden * out.element_size() // vector,
            places.num_ranks,
            plan.size(0),
            node,
            section,
            chunk,
            num_chunks,
        ),
        (out.dtype,),
        num_warps=num_warps,
        num_registers=shape.num_registers,
        BLOCK=block,
        AT_ONCE=min(_MOST_AT_ONCE, next_power_of_2(places.num_ranks)),
        LANES=next_power_of_2(places.num_ranks),
        NODES=next_power_of_2(plan.size(0)),
        VECTOR=vector,
        WIDE=_wide(out),
    )


def sum_nodes(
    near: Places,
    nodes: Places,
    shape: Shape,
    section: int,
    out: torch.Tensor,
    node_slots: torch.Tensor,
    passed_on: torch.Tensor,
    plan: torch.Tensor,
    biases: Sequence[torch.Tensor],
) -> None:
    """Sum what the nodes have of this rank's tokens: this node's rows are summed here, the others' sums are there.

    Args:
        near: Holds the addresses and the rows of the P ranks of this node.
        nodes: Holds those of the N nodes' sums; of this node none.
        shape: How to launch.
        section: Which section.
        out: [T, H], written.
        node_slots: [T, N] int32, where a token's sum lies among those of a node; -1: it was not there.
        passed_on: [F, P] int32, as above; this rank's own tokens are among them.
        plan: [N, PLAN_WORDS] int64.
        biases: At most two tensors [T, H] of out's dtype, added first and in order.
    """
    num_tokens, hidden = out.shape
    if out.numel() == 0:
        return
    vector, block, num_warps = _shape(shape, out, *biases)
    launch(
        _sum_nodes_kernel,
        min(shape.num_blocks, num_tokens * -(-hidden // block)),
        (
            out,
            *(*biases, out, out)[:2],
            node_slots,
            passed_on if passed_on.numel() else node_slots,
            near.table,
            nodes.table,
            plan,
            near.state,
            num_tokens,
            passed_on.size(0),
            hidden * out.element_size() // vector,
            near.num_ranks,
            nodes.num_ranks,
            nodes.rank,
            section,
        ),
        (out.dtype,),
        num_warps=num_warps,
        num_registers=shape.num_registers,
        NUM_BIASES=len(biases),
        BLOCK=block,
        AT_ONCE=min(_MOST_AT_ONCE, next_power_of_2(near.num_ranks)),
        NODES_AT_ONCE=min(_MOST_AT_ONCE, next_power_of_2(nodes.num_ranks)),
        LANES=next_power_of_2(near.num_ranks),
        NODES=next_power_of_2(nodes.num_ranks),
        VECTOR=vector,
        WIDE=_wide(out),
    )


def _shape(shape: Shape, out: torch.Tensor, *more: torch.Tensor) -> tuple[int, int, int]:
    """Bytes of a vector, elements of a block, and warps."""
    _, is_aligned = word_of(out, *more)
    block = min(shape.words * 4 // out.element_size(), next_power_of_2(out.size(1)))
    return VECTOR_BYTES if is_aligned else out.element_size(), block, max(1, min(shape.num_warps, block // 32))


def _wide(out: torch.Tensor) -> tl.dtype:
    return tl.float64 if out.dtype == torch.float64 else tl.float32


@jit
def _sum_for_rail_kernel(
    out,
    passed_on,
    table,
    plan,
    state,
    num_slots: tl.int32,
    row_vectors: tl.int32,
    num_near: tl.int32,
    num_nodes: tl.int32,
    node: tl.int32,
    section: tl.int32,
    chunk: tl.int32,
    num_chunks: tl.int32,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
    NODES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Items are pieces of rows: piece c of the r-th row of this chunk, of all nodes, is item `r * pieces + c`.

    Example: two nodes of two ranks, this is node 0; node 1 has 1 row, row 4 of those passed on, with slots `[2, 5]`:
    row 4 of `out` is row 2 of rank 0 plus row 5 of rank 1.
    """
    if (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0):
        ELEMENT_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
        hidden = row_vectors * (VECTOR // ELEMENT_BYTES)  # so the compiler knows that vectors of elements are whole
        lanes = tl.arange(0, LANES)
        is_lane = lanes < num_near
        bases = tl.load(table + section * num_near + lanes, mask=is_lane, other=0)
        rooms = tl.load(table + _ROOMS * num_near + lanes, mask=is_lane, other=0)
        ends, shifts, num_rows = in_bounds(plan, num_nodes, node, chunk, num_chunks, NODES)
        num_pieces = tl.cdiv(hidden, BLOCK)
        num_items = num_rows * num_pieces
        row = landed_row(tl.program_id(0) // num_pieces, ends, shifts)
        slot = load_slots(passed_on, row, num_slots, num_near, lanes)
        for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
            next_row = landed_row((item + tl.num_programs(0)) // num_pieces, ends, shifts)
            next_slot = load_slots(passed_on, next_row, num_slots, num_near, lanes)
            if row < num_slots:
                columns = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
                has_row = (slot >= 0) & (slot < rooms)
                rows = tl.where(has_row, bases + slot.to(tl.int64) * hidden * ELEMENT_BYTES, 0)
                total = _sum_rows(out, rows, columns, hidden, num_near, AT_ONCE, VECTOR, WIDE)
                target = tl.multiple_of(out + row * hidden, VECTOR) + columns
                tl.store(target, rounded(total, out.dtype.element_ty), mask=columns < hidden)
            row, slot = next_row, next_slot


@jit
def _sum_nodes_kernel(
    out,
    bias_0,
    bias_1,
    node_slots,
    passed_on,
    near_table,
    node_table,
    plan,
    state,
    num_tokens: tl.int32,
    num_slots: tl.int32,
    row_vectors: tl.int32,
    num_near: tl.int32,
    num_nodes: tl.int32,
    node: tl.int32,
    section: tl.int32,
    NUM_BIASES: tl.constexpr,
    BLOCK: tl.constexpr,
    AT_ONCE: tl.constexpr,
    NODES_AT_ONCE: tl.constexpr,
    LANES: tl.constexpr,
    NODES: tl.constexpr,
    VECTOR: tl.constexpr,
    WIDE: tl.constexpr,
):
    """Items are pieces of rows: piece c of token t is item `t * pieces + c`.

    Example: two nodes of one rank, this is node 1; token 0 has node slots `[3, 2]` and its own begin at row 4 of those
    passed on: out is row 3 of node 0's sums, plus row `passed_on[6, 0]` of this rank.
    """
    if (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0):
        ELEMENT_BYTES: tl.constexpr = out.dtype.element_ty.primitive_bitwidth // 8
        hidden = row_vectors * (VECTOR // ELEMENT_BYTES)
        lanes, nodes = tl.arange(0, LANES), tl.arange(0, NODES)
        is_lane, is_node = lanes < num_near, nodes < num_nodes
        bases = tl.load(near_table + section * num_near + lanes, mask=is_lane, other=0)
        rooms = tl.load(near_table + _ROOMS * num_near + lanes, mask=is_lane, other=0)
        far_bases = tl.load(node_table + section * num_nodes + nodes, mask=is_node, other=0)
        far_rooms = tl.load(node_table + _ROOMS * num_nodes + nodes, mask=is_node, other=0)
        start = tl.load(plan + node * _PLAN_WORDS + _IN_START)
        num_pieces = tl.cdiv(hidden, BLOCK)
        num_items = num_tokens * num_pieces
        far, own, slot = _token_slots(
            node_slots, passed_on, tl.program_id(0) // num_pieces, start, node, num_tokens, num_slots, num_near,
            num_nodes, lanes, nodes,
        )  # fmt: skip
        for item in range(tl.program_id(0), num_items, tl.num_programs(0)):
            # The next token's slots are on their way while this one's rows are added.
            next_far, next_own, next_slot = _token_slots(
                node_slots, passed_on, (item + tl.num_programs(0)) // num_pieces, start, node, num_tokens, num_slots,
                num_near, num_nodes, lanes, nodes,
            )  # fmt: skip
            token = item // num_pieces
            columns = (item % num_pieces) * BLOCK + tl.arange(0, BLOCK)
            has_row = (slot >= 0) & (slot < rooms)
            rows = tl.where(has_row, bases + slot.to(tl.int64) * hidden * ELEMENT_BYTES, 0)
            is_there = (far >= 0) & (far < far_rooms)
            sums = tl.where(is_there, far_bases + far.to(tl.int64) * hidden * ELEMENT_BYTES, 0)
            begin = tl.cast(token, tl.int64) * hidden
            total = add_biases(bias_0 + begin, bias_1 + begin, columns, hidden, NUM_BIASES, VECTOR, WIDE)
            mine = _sum_rows(out, rows, columns, hidden, num_near, AT_ONCE, VECTOR, WIDE)
            mine = rounded(mine, out.dtype.element_ty).to(WIDE)  # as if it had crossed
            if NODES_AT_ONCE >= NODES:  # no loop: all rows, near and far, are on their way at once
                values = _load_rows(out, sums, 0, columns, hidden, NODES_AT_ONCE, VECTOR)
                total = _add_nodes(total, values, mine, own, node, 0, NODES_AT_ONCE, WIDE)
            else:
                for first in range(0, num_nodes, NODES_AT_ONCE):
                    values = _load_rows(out, sums, first, columns, hidden, NODES_AT_ONCE, VECTOR)
                    total = _add_nodes(total, values, mine, own, node, first, NODES_AT_ONCE, WIDE)
            target = tl.multiple_of(out + begin, VECTOR) + columns
            tl.store(target, rounded(total, out.dtype.element_ty), mask=columns < hidden)
            far, own, slot = next_far, next_own, next_slot


@triton.jit
def _sum_rows(
    like, rows, columns, hidden, count, AT_ONCE: tl.constexpr, VECTOR: tl.constexpr, WIDE: tl.constexpr
):  # fmt: skip
    """The sum of one piece of some rows, in order, of `count` that `rows` has the addresses of, as in `pull.add_to`."""
    total = tl.zeros([columns.shape[0]], WIDE)
    if rows.shape[0] <= AT_ONCE:  # no loop: the compiler does not ask for rows beyond one
        total = _add_values(total, _load_rows(like, rows, 0, columns, hidden, AT_ONCE, VECTOR), AT_ONCE, WIDE)
    else:
        for first in range(0, count, AT_ONCE):
            values = _load_rows(like, rows, first, columns, hidden, AT_ONCE, VECTOR)
            total = _add_values(total, values, AT_ONCE, WIDE)
    return total


@triton.jit
def _load_rows(like, rows, first, columns, hidden, AT_ONCE: tl.constexpr, VECTOR: tl.constexpr):
    """One piece of some rows, from the `first` one on. All are asked for before anybody waits for one of them.

    Where there is no row its values are -0.0, which changes no sum: 0.0 would make 0.0 of -0.0.
    """
    lanes = tl.arange(0, rows.shape[0])
    nothing = (tl.zeros((), tl.float32) * -1.0).to(like.dtype.element_ty)  # as a literal it would lose its sign
    values = ()
    for turn in tl.static_range(AT_ONCE):
        row = tl.sum(tl.where(lanes == first + turn, rows, 0))
        pointer = tl.multiple_of(row.to(like.dtype), VECTOR)
        value = tl.load(pointer + columns, mask=columns < tl.where(row != 0, hidden, 0), other=nothing)
        values = values + (value,)  # type: ignore[assignment]
    return values


@triton.jit
def _add_values(total, values, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Add what `_load_rows` has loaded, in order."""
    for turn in tl.static_range(COUNT):
        total += values[turn].to(WIDE)
    return total


@triton.jit
def _add_nodes(total, values, mine, own, node, first, COUNT: tl.constexpr, WIDE: tl.constexpr):
    """Add what nodes have, from the `first` one on: this node's is `mine`, if the token was here."""
    for turn in tl.static_range(COUNT):
        total += tl.where((first + turn == node) & (own >= 0), mine, values[turn].to(WIDE))
    return total


@triton.jit
def _token_slots(
    node_slots, passed_on, token, start, node, num_tokens, num_slots, num_near, num_nodes, lanes, nodes
):  # fmt: skip
    """Where a token's sums lie at the nodes, its place among this node's tokens, and its rows at the ranks here."""
    far = load_slots(node_slots, token, num_tokens, num_nodes, nodes)
    own = tl.sum(tl.where(nodes == node, far, 0))
    row = tl.where(own >= 0, own + start, num_slots)
    return far, own, load_slots(passed_on, row, num_slots, num_near, lanes)
