"""The words of rows on the rail: bells that are rung for the courier, and waits for what has landed or may be fetched.

Shape letters: N nodes, C chunks of the rows for a node. Far memory is laid out by `transport/far.py`: its offsets come
as numbers. Every kernel here is one block of one warp: those that wait must not keep others out.
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
    STATE_FAILED,
    STATE_HELD,
    STATE_RAIL_BYTES,
    TIMEOUT,
    Places,
    fail,
    mask_of,
    num_lanes,
    spread,
)
from .primitives import clock_ns, load_acquire, store_release, words_at

BELL_LEFT = 15  # the word of a doorbell that says what has left

_FAILED, _HELD, _RAIL = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_HELD), tl.constexpr(STATE_RAIL_BYTES)
_NUM_IN, _IN_START, _NUM_OUT = tl.constexpr(PLAN_NUM_IN), tl.constexpr(PLAN_IN_START), tl.constexpr(PLAN_NUM_OUT)
_OUT_START, _TARGET_START = tl.constexpr(PLAN_OUT_START), tl.constexpr(PLAN_TARGET_START)
_BACK_START, _PLAN = tl.constexpr(PLAN_BACK_START), tl.constexpr(PLAN_WORDS)
_TIMEOUT, _LINE = tl.constexpr(TIMEOUT), tl.constexpr(8)
_MOST_CHUNKS = tl.constexpr(4)  # that one look takes in; the last one is looked at again where there are fewer
_BELL_PIECE, _BELL_SECTIONS = tl.constexpr(1), tl.constexpr(2)


@dataclass(frozen=True)
class FarPlaces:
    """Where a rank's far words are. Made once for a buffer.

    Attributes:
        words: [n] int64, all of them.
        bells: The word at which doorbells begin.
        bell_words: Words of a doorbell.
        landed: The word at which lines of what has landed begin.
        most_chunks: Lines and doorbells of a node.
    """

    words: torch.Tensor
    bells: int
    bell_words: int
    landed: int
    most_chunks: int


class FarRows(NamedTuple):
    """How a call lays its rows into outbox and landing.

    Attributes:
        piece: Number of the memory.
        landing: Bytes from the outbox to the landing.
        widths: Bytes of a row of each section; 0: it does not travel.
        offsets: Where each section begins.
    """

    piece: int
    landing: int
    widths: tuple[int, int, int]
    offsets: tuple[int, int, int]


_NO_ROWS = FarRows(0, 0, (0, 0, 0), (0, 0, 0))


def ring(
    places: Places,
    far: FarPlaces,
    rows: FarRows,
    plan: torch.Tensor,
    chunk: int,
    num_chunks: int,
    is_back: bool = False,
    *,
    run: Callable[..., None] = launch,
) -> None:
    """Say which rows are ready to be carried: those of a chunk, for every other node.

    Args:
        places: The words.
        far: The far words.
        rows: How they lie.
        plan: [N, PLAN_WORDS] int64.
        chunk: Which chunk.
        num_chunks: Of the call.
        is_back: The rows are sums that go back to where their tokens came from; else they are this rank's tokens.
        run: `launch`, or `prepare`.
    """
    run(
        _ring_kernel,
        1,
        (
            places.homes,
            places.state,
            places.host,
            far.words[far.bells :],
            plan,
            places.num_ranks,
            places.rank // places.num_near,
            places.num_nodes,
            far.most_chunks,
            far.bell_words,
            chunk,
            num_chunks,
            rows.piece,
            rows.landing,
            *rows.widths,
            *rows.offsets,
        ),
        num_warps=1,
        IS_BACK=is_back,
        LANES=num_lanes(places),
    )


def await_landed(
    places: Places,
    far: FarPlaces,
    operation: int,
    step: int,
    chunk: int,
    num_chunks: int = 1,
    *,
    run: Callable[..., None] = launch,
) -> None:
    """Wait until chunks [chunk, chunk + num_chunks) of all other nodes have landed.

    Args:
        places: The words.
        far: The far words.
        operation: For the record of a failure.
        step: Likewise.
        chunk: The first one.
        num_chunks: How many.
        run: `launch`, or `prepare`.
    """
    _await(places, far, operation, step, far.landed, far.landed, _LINE.value, chunk, num_chunks, 0, run)


def await_left(
    places: Places,
    far: FarPlaces,
    operation: int,
    step: int,
    num_chunks: int,
    *,
    run: Callable[..., None] = launch,
) -> None:
    """Wait until the courier has what it was last told to carry: then the outbox may be written again."""
    _await(places, far, operation, step, far.bells, far.bells + BELL_LEFT, far.bell_words, 0, num_chunks, 1, run)


def _await(
    places: Places,
    far: FarPlaces,
    operation: int,
    step: int,
    wanted: int,
    seen: int,
    line: int,
    chunk: int,
    num_chunks: int,
    is_left: int,
    run: Callable[..., None],
) -> None:
    run(
        _await_kernel,
        1,
        (
            places.windows,
            places.homes,
            places.state,
            places.host,
            far.words[wanted:],
            far.words[seen:],
            line,
            places.num_ranks,
            places.rank,
            places.num_near,
            far.most_chunks,
            chunk,
            num_chunks,
            is_left,
            step,
            operation,
            places.limit_ns,
        ),
        num_warps=1,
        LANES=num_lanes(places),
    )


def meet_rail(
    places: Places,
    far: FarPlaces,
    rail: torch.Tensor,
    rows: FarRows,
    plan: torch.Tensor,
    operation: int,
    step: int,
    is_back: bool = False,
    *,
    run: Callable[..., None] = launch,
) -> None:
    """Tell the ranks of this rail that this rank's rows may be fetched, and wait until theirs may be.

    Args:
        places: The words.
        far: The far words.
        rail: [N] int64, addresses of the far words of this rail's ranks.
        rows: How the rows lie.
        plan: [N, PLAN_WORDS] int64.
        operation: For the record of a failure.
        step: Likewise.
        is_back: As in `ring`.
        run: `launch`, or `prepare`.
    """
    run(
        _meet_rail_kernel,
        1,
        (
            places.windows,
            places.homes,
            places.state,
            places.host,
            far.words[far.landed :],
            rail,
            plan,
            sum(rows.widths),
            far.landed,
            places.num_ranks,
            places.rank,
            places.num_near,
            far.most_chunks,
            step,
            operation,
            places.limit_ns,
        ),
        num_warps=1,
        IS_BACK=is_back,
        LANES=num_lanes(places),
    )


def prepare_bells(places: Places, far: FarPlaces, plan: torch.Tensor) -> None:
    """Compile and load what rings and waits, so that no peer's limit passes while a kernel is compiled."""
    for is_back in (False, True):
        ring(places, far, _NO_ROWS, plan, 0, 1, is_back, run=prepare)
    await_landed(places, far, 0, 0, 0, run=prepare)


def prepare_meetings(places: Places, far: FarPlaces, plan: torch.Tensor) -> None:
    """Likewise what meets."""
    for is_back in (False, True):
        meet_rail(places, far, plan, _NO_ROWS, plan, 0, 0, is_back, run=prepare)


@jit
def _ring_kernel(
    homes,
    state,
    host,
    bells,
    plan,
    num_ranks: tl.int32,
    node: tl.int32,
    num_nodes: tl.int32,
    most_chunks: tl.int32,
    bell_words: tl.int32,
    chunk: tl.int64,
    num_chunks: tl.int64,
    piece: tl.int64,
    landing: tl.int64,
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
    bytes: 48 bytes from byte `(3 + 2) * 16` on, to byte `landing + (2 + 2) * 16`.
    """
    if (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0) & _may_send(homes, num_ranks, IS_BACK, LANES):
        nodes = tl.arange(0, LANES)
        is_far = (nodes < num_nodes) & (nodes != node)
        row = plan + nodes * _PLAN
        count = tl.load(row + (_NUM_IN if IS_BACK else _NUM_OUT), mask=is_far, other=0)
        source = tl.load(row + (_IN_START if IS_BACK else _OUT_START), mask=is_far, other=0)
        target = tl.load(row + (_BACK_START if IS_BACK else _TARGET_START), mask=is_far, other=0)
        first, last = count * chunk // num_chunks, count * (chunk + 1) // num_chunks
        bell = bells + (nodes * most_chunks + chunk) * bell_words
        tl.store(bell + _BELL_PIECE, piece, mask=is_far)
        num_bytes = tl.zeros([LANES], tl.int64)
        for section in tl.static_range(3):
            width = width_0 if section == 0 else (width_1 if section == 1 else width_2)
            offset = offset_0 if section == 0 else (offset_1 if section == 1 else offset_2)
            words = bell + _BELL_SECTIONS + 3 * section
            tl.store(words, offset + (source + first) * width, mask=is_far)
            tl.store(words + 1, landing + offset + (target + first) * width, mask=is_far)
            tl.store(words + 2, (last - first) * width, mask=is_far)
            num_bytes += (last - first) * width
        store_release(bell, tl.zeros([LANES], tl.int64) + tl.load(state), is_far)
        _count(state, host, tl.sum(tl.where(is_far, num_bytes, 0)))


@triton.jit
def _may_send(homes, num_ranks, IS_BACK: tl.constexpr, LANES: tl.constexpr):
    """Whether other nodes may have what this rank has made for them.

    A rank that fails says so before its caller overwrites its rows. So sums of them are right if nobody has failed by
    now. Other nodes could not tell, and would end their calls with them; the wait behind this has this rank fail, too.
    """
    num_failed = tl.zeros((), tl.int32)
    if IS_BACK:
        # Lanes beyond the ranks look at the last rank's words: a load that acquires cannot be masked.
        ranks = tl.minimum(tl.arange(0, LANES), num_ranks - 1)
        failures = words_at(tl.load(homes + ranks)) + (num_ranks + ranks) * _LINE
        num_failed += tl.sum((load_acquire(failures) == 1).to(tl.int32))
    return num_failed == 0


@triton.jit
def _count(state, host, num_bytes):
    """Add to what this rank has given to its rail."""
    total = tl.load(state + _RAIL) + num_bytes
    tl.store(state + _RAIL, total)
    tl.store(host + _RAIL, total)


@jit
def _meet_rail_kernel(
    windows,
    homes,
    state,
    host,
    landed,
    rail,
    plan,
    row_bytes: tl.int64,
    landed_at: tl.int64,
    num_ranks: tl.int32,
    rank: tl.int32,
    num_near: tl.int32,
    most_chunks: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    limit_ns: tl.int64,
    IS_BACK: tl.constexpr,
    LANES: tl.constexpr,
):
    """One lane for each node, then one for each rank.

    Example: two nodes of two ranks, rank 1, epoch 5: the line of node 0 at rank 3 becomes 5, and this rank waits until
    its line of node 1 has come to 5.
    """
    if (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0):
        nodes = tl.arange(0, LANES)
        node = rank // num_near
        is_far = (nodes < num_ranks // num_near) & (nodes != node)
        count = tl.load(plan + nodes * _PLAN + (_NUM_IN if IS_BACK else _NUM_OUT), mask=is_far, other=0)
        _count(state, host, tl.sum(count) * row_bytes)
        lines = words_at(tl.load(rail + nodes, mask=is_far, other=0)) + landed_at + node * most_chunks * _LINE
        is_sent = is_far & _may_send(homes, num_ranks, IS_BACK, LANES)
        store_release(lines, tl.zeros([LANES], tl.int64) + tl.load(state), is_sent)
        _await_words(
            windows, homes, state, host, landed, landed, _LINE, num_ranks, rank, num_near, most_chunks, 0, 1, 0, step,
            operation, limit_ns, LANES, 1,
        )  # fmt: skip


@jit
def _await_kernel(
    windows,
    homes,
    state,
    host,
    wanted,
    seen,
    line: tl.int32,
    num_ranks: tl.int32,
    rank: tl.int32,
    num_near: tl.int32,
    most_chunks: tl.int32,
    chunk: tl.int32,
    num_chunks: tl.int32,
    is_left: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    limit_ns: tl.int64,
    LANES: tl.constexpr,
):
    """Poll the words of some chunks of all other nodes, and every rank's failures.

    Words of `seen` must come up to the epoch of the call or, for what has left, to those of `wanted`.
    """
    if (tl.load(state + _FAILED) == 0) & (tl.load(state + _HELD) == 0):
        _await_words(
            windows, homes, state, host, wanted, seen, line, num_ranks, rank, num_near, most_chunks, chunk, num_chunks,
            is_left, step, operation, limit_ns, LANES, _MOST_CHUNKS,
        )  # fmt: skip


@triton.jit
def _await_words(
    windows, homes, state, host, wanted, seen, line, num_ranks, rank, num_near, most_chunks, chunk, num_chunks, is_left,
    step, operation, limit_ns, LANES: tl.constexpr, CHUNKS: tl.constexpr,
):  # fmt: skip
    """As `_await_kernel`: fail, if they do not come in time."""
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    is_far = is_rank & (lanes != rank) & (lanes % num_near == rank % num_near)  # the ranks of this rail
    # A load that acquires cannot be masked: the other lanes look at their node's words, or at the last rank's.
    writers = tl.minimum(lanes, num_ranks - 1)
    nodes = writers // num_near
    failures = words_at(tl.load(homes + writers)) + (num_ranks + writers) * _LINE
    epoch = tl.load(state)
    chunks = tl.minimum(tl.arange(0, CHUNKS), num_chunks - 1) + chunk
    places = (nodes[:, None] * most_chunks + chunks[None, :]) * line
    targets = tl.where(is_left != 0, tl.load(wanted + places), epoch)
    begin = tl.min(clock_ns(lanes))
    values = load_acquire(seen + places)
    failed = load_acquire(failures)
    num_missing = tl.sum(tl.sum((is_far[:, None] & (values < targets)).to(tl.int32), 1), 0)
    num_failed = tl.sum((is_rank & (failed == 1)).to(tl.int32))
    # One value for all lanes decides, else the lanes of a warp could part ways.
    elapsed = tl.max(clock_ns(lanes)) - begin
    while (num_missing > 0) & (num_failed == 0) & (elapsed < limit_ns):
        values = load_acquire(seen + places)
        failed = load_acquire(failures)
        num_missing = tl.sum(tl.sum((is_far[:, None] & (values < targets)).to(tl.int32), 1), 0)
        num_failed = tl.sum((is_rank & (failed == 1)).to(tl.int32))
        elapsed = tl.max(clock_ns(lanes)) - begin
    tl.debug_barrier()  # what one thread acquired, all may read
    if num_failed > 0:
        first = tl.min(tl.where(is_rank & (failed == 1), lanes, LANES))
        spread(windows, homes, state, host, num_ranks, rank, first, LANES)
    elif num_missing > 0:
        subject = mask_of(is_far & (tl.sum((values < targets).to(tl.int32), 1) > 0), lanes)
        fail(windows, state, host, num_ranks, rank, _TIMEOUT, epoch, operation, subject, step, 0, rank, LANES)
