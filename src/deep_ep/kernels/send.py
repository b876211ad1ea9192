"""The proxy over NVSHMEM: kernels that send a rank's words and rows to remote ranks (`docs/decisions/0013-relays.md`).

They are launched after the kernel that wrote the words or the rows. None waits for a peer, and only the one block of
`signal_rows` signals what other blocks have put. Addresses are numbers, and offsets are counted in words of 8 bytes;
the caller knows the layout of remote memory.

They call NVSHMEM, which Triton's interpreter does not have: `tests/kernels/test_send.py` has a substitute for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ._nvshmem import DEVICE_LIBRARY, fence, put, put_then_set, quiet, set_word
from ._triton import jit, launch, next_power_of_2, prepare, tl, triton
from .exchange import NUM_SECTIONS, STATE_FAILED, may_move
from .primitives import words_at

MOST_SLICE_BYTES = 256 << 10
LEAST_SLICE_BYTES = 64 << 10  # below it a put costs more than its bytes
_ROW_WARPS = 16

# Words of a doorbell: the epoch, the piece, which a launch gets as an argument, and three for each section.
DOORBELL_EPOCH, DOORBELL_SECTIONS = 0, 2
_DOORBELL_EPOCH, _DOORBELL_SECTIONS = tl.constexpr(DOORBELL_EPOCH), tl.constexpr(DOORBELL_SECTIONS)

_LINE = tl.constexpr(8)
_NUM_SECTIONS = tl.constexpr(NUM_SECTIONS)
_FAILED = tl.constexpr(STATE_FAILED)
_MOST, _LEAST = tl.constexpr(MOST_SLICE_BYTES), tl.constexpr(LEAST_SLICE_BYTES)


@dataclass(frozen=True)
class SendContext:
    """Where a rank's remote words are, and which its remote ranks are. Made once for a buffer.

    Attributes:
        rank: This rank.
        num_ranks: R.
        ranks_per_node: P.
        header_words: H.
        words: Address of this rank's remote words, in symmetric memory; they begin with its remote board.
        shadow_boards: Where the shadow boards begin in them, each as large as a board.
        state: [STATE_WORDS] int64, private; see `exchange.py`.
        pes: [R] int32, NVSHMEM's number of each rank.
    """

    rank: int
    num_ranks: int
    ranks_per_node: int
    header_words: int
    words: int
    shadow_boards: int
    state: torch.Tensor
    pes: torch.Tensor


def send_words(
    context: SendContext, num_words: int, *, is_failure_only: bool = False, run: Callable[..., None] = launch
) -> None:
    """Send this rank's header and progress, or its failure, from the shadow of every remote rank's board to that board.

    Args:
        context: The words.
        num_words: Words of the header, from its first on: most calls write few of them.
        is_failure_only: The kernel before it has written nothing to the shadow boards but, at most, a failure.
        run: `launch`, or `prepare`.
    """
    args = (context.state, context.pes, context.words, context.shadow_boards)
    numbers = (context.num_ranks, context.ranks_per_node, context.rank, context.header_words, num_words)
    constants = {"IS_FAILURE_ONLY": is_failure_only}
    run(_send_words_kernel, context.num_ranks, (*args, *numbers), num_warps=1, library=DEVICE_LIBRARY, **constants)


def send_rows(
    context: SendContext,
    doorbell: int,
    doorbell_step: int,
    rows: int,
    num_blocks: int,
    *,
    run: Callable[..., None] = launch,
) -> None:
    """Put the rows of a chunk to the ranks of this rail, as the chunk's doorbells describe them.

    Args:
        context: The words.
        doorbell: Where the doorbell of the chunk for node 0 is, in the words.
        doorbell_step: Words from there to that of the next node.
        rows: Address of this rank's rows piece, in symmetric memory.
        num_blocks: The grid.
        run: `launch`, or `prepare`.
    """
    args = (context.state, context.pes, context.words + 8 * doorbell, doorbell_step, rows)
    numbers = (context.num_ranks, context.ranks_per_node, context.rank, num_blocks)
    run(_send_rows_kernel, num_blocks, (*args, *numbers), num_warps=_ROW_WARPS, library=DEVICE_LIBRARY)


def signal_rows(context: SendContext, arrived: int, *, run: Callable[..., None] = launch) -> None:
    """Signal to the ranks of this rail that a chunk of this call has arrived, if `send_rows` has sent it before.

    Args:
        context: The words.
        arrived: Where the word of this node's chunk is, in the words: the same offset on all ranks.
        run: `launch`, or `prepare`.
    """
    lanes = max(32, next_power_of_2(context.num_ranks // context.ranks_per_node))
    args = (context.state, context.pes, context.words + 8 * arrived)
    numbers = (context.num_ranks, context.ranks_per_node, context.rank)
    run(_signal_rows_kernel, 1, (*args, *numbers), num_warps=1, library=DEVICE_LIBRARY, LANES=lanes)


def prepare_all(context: SendContext) -> None:
    """Compile and load the kernels of this file. NVSHMEM must have been started: the words must be there."""
    for is_failure_only in (False, True):
        send_words(context, 0, is_failure_only=is_failure_only, run=prepare)
    send_rows(context, 0, 0, context.words, 1, run=prepare)
    signal_rows(context, 0, run=prepare)


@jit
def _send_words_kernel(
    state,
    pes,
    words: tl.int64,
    shadow_boards: tl.int64,
    num_ranks: tl.int32,
    ranks_per_node: tl.int32,
    rank: tl.int32,
    header_words: tl.int32,
    num_words: tl.int32,
    IS_FAILURE_ONLY: tl.constexpr,
):
    """Block q sends what this rank has written to the shadow of remote rank q's board.

    Example: two nodes of two ranks, rank 1, epoch 5, header of 24 words, of which it has written all. Boards have 256
    words: progress at 8 p, failures at 32 + 8 p, headers at 64 + ((e & 1) * 4 + p) * 24. Block 2 puts 24 words from 184
    of shadow board 2 to 184 of rank 2's board, and then sets word 8 there to what stands at 8 of shadow board 2. Blocks
    0 and 1 do nothing. Had rank 1 failed, block 2 would put words 41 to 47, and set word 40 to 1; with
    `IS_FAILURE_ONLY` it would do nothing else.
    """
    target = tl.program_id(0)
    is_told = target // ranks_per_node != rank // ranks_per_node
    if IS_FAILURE_ONLY:
        is_told = is_told & (tl.load(state + _FAILED) != 0)
    if is_told:
        pe = tl.load(pes + target)
        board_words = 2 * (header_words + _LINE) * num_ranks
        shadow_board = words + 8 * (shadow_boards + target.to(tl.int64) * board_words)
        # Over several queue pairs a word could overtake the one that the launch before this set, and be overwritten.
        fence()
        if tl.load(state + _FAILED) == 0:
            epoch = tl.load(state)
            header = 8 * (num_ranks * 2 * _LINE + ((epoch & 1) * num_ranks + rank) * header_words)
            line = rank.to(tl.int64) * (8 * _LINE)
            progress = tl.load(words_at(shadow_board + line))
            put_then_set(words + header, shadow_board + header, 8 * num_words.to(tl.int64), words + line, progress, pe)
        else:
            line = (num_ranks + rank).to(tl.int64) * (8 * _LINE)
            size, one = tl.full((), 8 * (_LINE - 1), tl.int64), tl.full((), 1, tl.int64)
            put_then_set(words + line + 8, shadow_board + line + 8, size, words + line, one, pe)


@jit
def _send_rows_kernel(
    state,
    pes,
    doorbells: tl.int64,
    doorbell_step: tl.int64,
    rows: tl.int64,
    num_ranks: tl.int32,
    ranks_per_node: tl.int32,
    rank: tl.int32,
    num_blocks: tl.int32,
):
    """Block b puts every num_blocks-th slice of the sections that the doorbells of this call name.

    Slices are counted on over sections and nodes, so that short sections do not all fall to the first block. They are
    cut so that blocks have as many of them as others, give or take one.

    Example: two nodes, 128 blocks. A section of 58,720,256 bytes is 224 slices of 256 KiB, which would leave a quarter
    of the blocks idle in their second round; so there are two rounds, and 256 slices of 229,376 bytes.
    """
    epoch = tl.load(state)
    node = rank // ranks_per_node
    if may_move(state):
        num_done = tl.zeros((), tl.int64)
        for other in range(num_ranks // ranks_per_node):
            doorbell = words_at(doorbells) + other * doorbell_step
            # A doorbell that was not rung in this call describes the rows of an older call.
            if (other != node) & (tl.load(doorbell + _DOORBELL_EPOCH) == epoch):
                pe = tl.load(pes + other * ranks_per_node + rank % ranks_per_node)
                for section in range(_NUM_SECTIONS):
                    entry = doorbell + _DOORBELL_SECTIONS + 3 * section
                    num_done = _put_section(
                        rows + tl.load(entry), rows + tl.load(entry + 1), tl.load(entry + 2), pe, num_done, num_blocks
                    )


@triton.jit
def _put_section(source, target, num_bytes, pe, num_done, num_blocks):
    """Put this block's slices of a section. Returns the number of slices so far, of all blocks."""
    num_rounds = tl.maximum(tl.cdiv(num_bytes, num_blocks * _MOST), 1)
    slice_bytes = tl.maximum(tl.cdiv(tl.cdiv(num_bytes, num_blocks * num_rounds), 16) * 16, _LEAST)
    num_slices = tl.cdiv(num_bytes, slice_bytes)
    first = (tl.program_id(0) + num_blocks - num_done % num_blocks) % num_blocks
    for index in range(first, num_slices, num_blocks):
        start = index * slice_bytes
        put(target + start, source + start, tl.minimum(slice_bytes, num_bytes - start), pe)
    return num_done + num_slices


@jit
def _signal_rows_kernel(
    state,
    pes,
    arrived: tl.int64,
    num_ranks: tl.int32,
    ranks_per_node: tl.int32,
    rank: tl.int32,
    LANES: tl.constexpr,
):
    """Wait until all rows have arrived, then set this node's arrival word at the ranks of the rail.

    A launch orders memory of this GPU and no network. `fence` orders what follows it behind what came before it, queue
    by queue; blocks of `send_rows` may have used others than this one does, and a transport may keep such an order
    only within a queue. `quiet` waits for all queues of this PE.

    Example: two nodes of two ranks, rank 1, epoch 5: the word at rank 3 becomes 5. A lane for each node; those that
    have none, and this node's own, set the next one's word again, to the same.
    """
    if may_move(state):
        epoch = tl.load(state)
        num_nodes = num_ranks // ranks_per_node
        node = rank // ranks_per_node
        lanes = tl.arange(0, LANES) % num_nodes
        others = tl.where(lanes == node, (lanes + 1) % num_nodes, lanes)
        pe = tl.load(pes + others * ranks_per_node + rank % ranks_per_node)
        quiet()
        zeros = tl.zeros([LANES], tl.int64)
        set_word(zeros + arrived, zeros + epoch, pe)
