"""The words of rows on the rail: doorbells for the proxy, and waits for rows that have arrived or may be fetched.

Shape letters: N nodes, C chunks of the rows for a node. Remote memory is laid out by `transport/remote.py`: its offsets
come as numbers. Every kernel here is one block of one warp: those that wait must not occupy SMs that others need.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from ._triton import jit, launch, prepare, tl, triton
from .exchange import (
    PLAN_BACK_START,
    PLAN_IN_START,
    PLAN_NUM_IN,
    PLAN_NUM_OUT,
    PLAN_OUT_START,
    PLAN_TARGET_START,
    PLAN_WORDS,
    STATE_RAIL_BYTES,
    TIMEOUT,
    Context,
    fail,
    mask_of,
    may_move,
    num_lanes,
    open_context,
    propagate_failure,
)
from .primitives import clock_ns, load_acquire, store_release, words_at

DOORBELL_LEFT = 15  # the word of a doorbell that says what has left

_RAIL = tl.constexpr(STATE_RAIL_BYTES)
_NUM_IN, _IN_START, _NUM_OUT = tl.constexpr(PLAN_NUM_IN), tl.constexpr(PLAN_IN_START), tl.constexpr(PLAN_NUM_OUT)
_OUT_START, _TARGET_START = tl.constexpr(PLAN_OUT_START), tl.constexpr(PLAN_TARGET_START)
_BACK_START, _PLAN = tl.constexpr(PLAN_BACK_START), tl.constexpr(PLAN_WORDS)
_TIMEOUT, _LINE = tl.constexpr(TIMEOUT), tl.constexpr(8)
_MOST_CHUNKS = tl.constexpr(4)  # that one look takes in; the last one is looked at again where there are fewer
_DOORBELL_PIECE, _DOORBELL_SECTIONS = tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class RemoteContext:
    """Where a rank's remote words are. Made once for a buffer.

    Attributes:
        words: [n] int64, all of them.
        doorbells: The word at which doorbells begin.
        doorbell_words: Words of a doorbell.
        arrived: The word at which lines of what has arrived begin.
        most_chunks: Lines and doorbells of a node.
    """

    words: torch.Tensor
    doorbells: int
    doorbell_words: int
    arrived: int
    most_chunks: int


class RemoteRowLayout(NamedTuple):
    """How a call lays its rows into outbox and receive buffer.

    Attributes:
        piece: Number of the memory.
        recv_offset: Bytes from the outbox to the receive buffer.
        widths: Bytes of a row of each section; 0: it does not travel.
        offsets: Where each section begins.
    """

    piece: int
    recv_offset: int
    widths: tuple[int, int, int]
    offsets: tuple[int, int, int]


_NO_ROWS = RemoteRowLayout(0, 0, (0, 0, 0), (0, 0, 0))


def ring_doorbell(
    context: Context,
    remote: RemoteContext,
    rows: RemoteRowLayout,
    plan: torch.Tensor,
    chunk: int,
    num_chunks: int,
    is_back: bool = False,
    *,
    run: Callable[..., None] = launch,
) -> None:
    """Ring the doorbells of a chunk: its rows are ready to be sent to every other node.

    Args:
        context: The words.
        remote: The remote words.
        rows: How they lie.
        plan: [N, PLAN_WORDS] int64.
        chunk: Which chunk.
        num_chunks: Chunks of the call.
        is_back: The rows are sums that go back to where their tokens came from; else they are this rank's tokens.
        run: `launch`, or `prepare`.
    """
    run(
        _ring_doorbell_kernel,
        1,
        (
            remote.words[remote.doorbells :],
            plan,
            context.words,
            remote.most_chunks,
            remote.doorbell_words,
            chunk,
            num_chunks,
            rows.piece,
            rows.recv_offset,
            *rows.widths,
            *rows.offsets,
        ),
        num_warps=1,
        IS_BACK=is_back,
        LANES=num_lanes(context),
    )


def await_arrived(
    context: Context,
    remote: RemoteContext,
    operation: int,
    step: int,
    chunk: int,
    num_chunks: int = 1,
    *,
    run: Callable[..., None] = launch,
) -> None:
    """Wait until chunks [chunk, chunk + num_chunks) of all other nodes have arrived.

    Args:
        context: The words.
        remote: The remote words.
        operation: For the record of a failure.
        step: The step, for the record of a failure.
        chunk: The first one.
        num_chunks: How many.
        run: `launch`, or `prepare`.
    """
    _await(context, remote, operation, step, remote.arrived, remote.arrived, _LINE.value, chunk, num_chunks, 0, run)


def await_left(context: Context, remote: RemoteContext, operation: int, step: int, num_chunks: int) -> None:
    """Wait until the proxy has read what it was last asked to send; then the outbox may be written again."""
    wanted = remote.doorbells
    _await(context, remote, operation, step, wanted, wanted + DOORBELL_LEFT, remote.doorbell_words, 0, num_chunks, 1)


def _await(
    context: Context,
    remote: RemoteContext,
    operation: int,
    step: int,
    wanted: int,
    seen: int,
    line: int,
    chunk: int,
    num_chunks: int,
    is_left: int,
    run: Callable[..., None] = launch,
) -> None:
    run(
        _await_kernel,
        1,
        (
            remote.words[wanted:],
            remote.words[seen:],
            context.words,
            line,
            remote.most_chunks,
            chunk,
            num_chunks,
            is_left,
            step,
            operation,
        ),
        num_warps=1,
        LANES=num_lanes(context),
    )


def rail_handshake(
    context: Context,
    remote: RemoteContext,
    rail: torch.Tensor,
    rows: RemoteRowLayout,
    plan: torch.Tensor,
    operation: int,
    step: int,
    is_back: bool = False,
    *,
    run: Callable[..., None] = launch,
) -> None:
    """Signal to the ranks of this rail that this rank's rows may be fetched, and wait until theirs may be.

    Args:
        context: The words.
        remote: The remote words.
        rail: [N] int64, addresses of the remote words of this rail's ranks.
        rows: How the rows lie.
        plan: [N, PLAN_WORDS] int64.
        operation: For the record of a failure.
        step: The step, for the record of a failure.
        is_back: As in `ring_doorbell`.
        run: `launch`, or `prepare`.
    """
    run(
        _rail_handshake_kernel,
        1,
        (
            remote.words[remote.arrived :],
            rail,
            plan,
            context.words,
            sum(rows.widths),
            remote.arrived,
            remote.most_chunks,
            step,
            operation,
        ),
        num_warps=1,
        IS_BACK=is_back,
        LANES=num_lanes(context),
    )


def prepare_doorbells(context: Context, remote: RemoteContext, plan: torch.Tensor) -> None:
    """Compile and load the kernels that ring doorbells and wait, so that no peer's limit passes while a kernel is
    compiled.
    """
    for is_back in (False, True):
        ring_doorbell(context, remote, _NO_ROWS, plan, 0, 1, is_back, run=prepare)
    await_arrived(context, remote, 0, 0, 0, run=prepare)


def prepare_rail_handshake(context: Context, remote: RemoteContext, plan: torch.Tensor) -> None:
    """Compile and load the handshake of the rail, so that no peer's limit passes while a kernel is compiled."""
    for is_back in (False, True):
        rail_handshake(context, remote, plan, _NO_ROWS, plan, 0, 0, is_back, run=prepare)


@jit
def _ring_doorbell_kernel(
    doorbells,
    plan,
    context_words,
    most_chunks: tl.int32,
    doorbell_words: tl.int32,
    chunk: tl.int64,
    num_chunks: tl.int64,
    piece: tl.int64,
    recv_offset: tl.int64,
    width_0: tl.int64,
    width_1: tl.int64,
    width_2: tl.int64,
    offset_0: tl.int64,
    offset_1: tl.int64,
    offset_2: tl.int64,
    IS_BACK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One lane for each node.

    Example: 5 tokens for node 1, from row 3 of the outbox on, which begin at row 2 there; chunk 1 of 2, rows of 16
    bytes: 48 bytes from byte `(3 + 2) * 16` on, to byte `recv_offset + (2 + 2) * 16`.
    """
    context = open_context(context_words)
    _, _, state, _, host, num_ranks, rank, num_nodes, _, _ = context
    if may_move(state) & _may_send(context, IS_BACK, LANES):
        nodes = tl.arange(0, LANES)
        is_remote = (nodes < num_nodes) & (nodes != rank // (num_ranks // num_nodes))
        row = plan + nodes * _PLAN
        count = tl.load(row + (_NUM_IN if IS_BACK else _NUM_OUT), mask=is_remote, other=0)
        source = tl.load(row + (_IN_START if IS_BACK else _OUT_START), mask=is_remote, other=0)
        target = tl.load(row + (_BACK_START if IS_BACK else _TARGET_START), mask=is_remote, other=0)
        first, last = count * chunk // num_chunks, count * (chunk + 1) // num_chunks
        doorbell = doorbells + (nodes * most_chunks + chunk) * doorbell_words
        tl.store(doorbell + _DOORBELL_PIECE, piece, mask=is_remote)
        num_bytes = tl.zeros([LANES], tl.int64)
        for section in tl.static_range(3):
            width = width_0 if section == 0 else (width_1 if section == 1 else width_2)
            offset = offset_0 if section == 0 else (offset_1 if section == 1 else offset_2)
            words = doorbell + _DOORBELL_SECTIONS + 3 * section
            tl.store(words, offset + (source + first) * width, mask=is_remote)
            tl.store(words + 1, recv_offset + offset + (target + first) * width, mask=is_remote)
            tl.store(words + 2, (last - first) * width, mask=is_remote)
            num_bytes += (last - first) * width
        store_release(doorbell, tl.zeros([LANES], tl.int64) + tl.load(state), is_remote)
        _count(state, host, tl.sum(tl.where(is_remote, num_bytes, 0)))


@triton.jit
def _may_send(context, IS_BACK: tl.constexpr, LANES: tl.constexpr):
    """Return whether what this rank has for other nodes may be sent.

    A rank that fails sets its failure word before its caller overwrites its rows. So sums of them are right if no rank
    has failed by now. Other nodes could not detect it, and would complete their calls with wrong sums; the wait that
    follows makes this rank fail, too.
    """
    own_boards, num_ranks = context[1], context[5]
    num_failed = tl.zeros((), tl.int32)
    if IS_BACK:
        # Lanes beyond the ranks load the last rank's words: a load that acquires cannot be masked.
        ranks = tl.minimum(tl.arange(0, LANES), num_ranks - 1)
        failures = words_at(tl.load(own_boards + ranks)) + (num_ranks + ranks) * _LINE
        num_failed += tl.sum((load_acquire(failures) == 1).to(tl.int32))
    return num_failed == 0


@triton.jit
def _count(state, host, num_bytes):
    """Add to the bytes that this rank has sent over its rail."""
    total = tl.load(state + _RAIL) + num_bytes
    tl.store(state + _RAIL, total)
    tl.store(host + _RAIL, total)


@jit
def _rail_handshake_kernel(
    arrived,
    rail,
    plan,
    context_words,
    row_bytes: tl.int64,
    arrived_at: tl.int64,
    most_chunks: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    IS_BACK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One lane for each node, then one for each rank.

    Example: two nodes of two ranks, rank 1, epoch 5: the line of node 0 at rank 3 becomes 5, and this rank waits until
    its line of node 1 has come to 5.
    """
    context = open_context(context_words)
    _, _, state, _, host, num_ranks, rank, num_nodes, _, _ = context
    if may_move(state):
        nodes = tl.arange(0, LANES)
        node = rank // (num_ranks // num_nodes)
        is_remote = (nodes < num_nodes) & (nodes != node)
        count = tl.load(plan + nodes * _PLAN + (_NUM_IN if IS_BACK else _NUM_OUT), mask=is_remote, other=0)
        _count(state, host, tl.sum(count) * row_bytes)
        lines = words_at(tl.load(rail + nodes, mask=is_remote, other=0)) + arrived_at + node * most_chunks * _LINE
        is_sent = is_remote & (nodes < tl.where(_may_send(context, IS_BACK, LANES), num_nodes, 0))
        store_release(lines, tl.zeros([LANES], tl.int64) + tl.load(state), is_sent)
        _await_words(context, arrived, arrived, _LINE, most_chunks, 0, 1, 0, step, operation, LANES, 1)


@jit
def _await_kernel(
    wanted,
    seen,
    context_words,
    line: tl.int32,
    most_chunks: tl.int32,
    chunk: tl.int32,
    num_chunks: tl.int32,
    is_left: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    LANES: tl.constexpr,
):
    """Poll the words of some chunks of all other nodes, and every rank's failures.

    Words of `seen` must reach the epoch of the call or, when waiting for the outbox, those of `wanted`.
    """
    context = open_context(context_words)
    if may_move(context[2]):
        _await_words(
            context, wanted, seen, line, most_chunks, chunk, num_chunks, is_left, step, operation, LANES, _MOST_CHUNKS
        )


@triton.jit
def _await_words(
    context, wanted, seen, line, most_chunks, chunk, num_chunks, is_left, step, operation, LANES: tl.constexpr,
    CHUNKS: tl.constexpr,
):  # fmt: skip
    """Do what `_await_kernel` describes. Fails if the words do not come in time."""
    _, own_boards, state, _, _, num_ranks, rank, num_nodes, _, limit_ns = context
    ranks_per_node = num_ranks // num_nodes
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    is_remote = is_rank & (lanes != rank) & (lanes % ranks_per_node == rank % ranks_per_node)  # the ranks of this rail
    # A load that acquires cannot be masked: the other lanes look at their node's words, or at the last rank's.
    writers = tl.minimum(lanes, num_ranks - 1)
    nodes = writers // ranks_per_node
    failures = words_at(tl.load(own_boards + writers)) + (num_ranks + writers) * _LINE
    epoch = tl.load(state)
    chunks = tl.minimum(tl.arange(0, CHUNKS), num_chunks - 1) + chunk
    offsets = (nodes[:, None] * most_chunks + chunks[None, :]) * line
    targets = tl.where(is_left != 0, tl.load(wanted + offsets), epoch)
    begin = tl.min(clock_ns(lanes))
    values = load_acquire(seen + offsets)
    failed = load_acquire(failures)
    num_missing = tl.sum(tl.sum((is_remote[:, None] & (values < targets)).to(tl.int32), 1), 0)
    num_failed = tl.sum((is_rank & (failed == 1)).to(tl.int32))
    # The condition is one value for all lanes, else the lanes of a warp could diverge.
    elapsed = tl.max(clock_ns(lanes)) - begin
    while (num_missing > 0) & (num_failed == 0) & (elapsed < limit_ns):
        values = load_acquire(seen + offsets)
        failed = load_acquire(failures)
        num_missing = tl.sum(tl.sum((is_remote[:, None] & (values < targets)).to(tl.int32), 1), 0)
        num_failed = tl.sum((is_rank & (failed == 1)).to(tl.int32))
        elapsed = tl.max(clock_ns(lanes)) - begin
    tl.debug_barrier()  # what one thread acquired, all may read
    if num_failed > 0:
        first = tl.min(tl.where(is_rank & (failed == 1), lanes, LANES))
        propagate_failure(context, first, LANES)
    elif num_missing > 0:
        subject = mask_of(is_remote & (tl.sum((values < targets).to(tl.int32), 1) > 0), lanes)
        fail(context, _TIMEOUT, epoch, operation, subject, step, 0, rank, LANES)
