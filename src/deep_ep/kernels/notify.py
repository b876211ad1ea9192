"""The handshake that a call begins with: all ranks exchange what they send and what they offer.

Shape letters: T tokens, R ranks on N nodes, E experts, L = E / R, C channels of a handle. All words are int64.

`Handshake` is one kernel. Where a dispatch has routing, its blocks first number the tokens of each rank and node. One
block then does the *send half*: it writes this rank's header on every board, and signals; and the *receive half*: it
waits for the headers of all ranks, compares them, and computes prefix sums and the addresses of the peers' sections. If
a proxy must be launched to send words to other nodes, the halves are two kernels, and it goes between them.

`SelectionHandshake` does the same for V2's calls inside one node: its blocks count where the selections go, and number
the tokens, straight from `topk_idx`; each rank reads the counts of all experts on its peers' boards, and the first rows
of its own selections follow. `CopyingHandshake` copies the rows of a combine into the window before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ._triton import Launch, jit, next_power_of_2, tl, triton, variant
from .exchange import (
    COUNTS,
    DISAGREE,
    EXPANDED_OVERFLOW,
    HEADER_WORDS,
    NUM_SECTIONS,
    OVERFLOW,
    PLAN_BACK_START,
    PLAN_IN_START,
    PLAN_NUM_IN,
    PLAN_NUM_OUT,
    PLAN_OUT_START,
    PLAN_TARGET_START,
    PLAN_WORDS,
    REMOTE_OVERFLOW,
    SEGMENT_BITS,
    STATE_ANNOUNCED,
    STATE_ENDED,
    STATE_FAILED,
    STATE_HELD,
    STATE_STAGED,
    STATE_TOKENS,
    STATE_WORDS,
    TABLE_CAPACITIES,
    TABLE_EXPANDED,
    TABLE_SOURCE_ROWS,
    TABLE_STARTS,
    Context,
    fail,
    header_of,
    headers_at,
    is_last_block,
    mask_of,
    num_lanes,
    open_context,
    prepare_failures,
    selected_counts,
    signal,
    wait,
    write_record,
)
from .primitives import tell_host
from .pull import copy_pieces, copy_shape
from .put import LaunchShape, widest_word
from .selections import count_tile, num_tiles, sum_tiles, tile_tokens

_LINE = tl.constexpr(8)
_SEGMENT_BITS = tl.constexpr(SEGMENT_BITS)
_OFFSET_MASK = tl.constexpr((1 << SEGMENT_BITS) - 1)
_NUM_SECTIONS = tl.constexpr(NUM_SECTIONS)
_DISAGREE, _OVERFLOW, _COUNTS = tl.constexpr(DISAGREE), tl.constexpr(OVERFLOW), tl.constexpr(COUNTS)
_REMOTE_OVERFLOW, _EXPANDED_OVERFLOW = tl.constexpr(REMOTE_OVERFLOW), tl.constexpr(EXPANDED_OVERFLOW)
_ENDED = tl.constexpr(STATE_ENDED)
_FAILED, _HELD, _ANNOUNCED = tl.constexpr(STATE_FAILED), tl.constexpr(STATE_HELD), tl.constexpr(STATE_ANNOUNCED)
_STAGED, _MOST_TOKENS, _STATE = tl.constexpr(STATE_STAGED), tl.constexpr(STATE_TOKENS), tl.constexpr(STATE_WORDS)
_CAPACITIES, _STARTS, _SOURCE_ROWS = (
    tl.constexpr(TABLE_CAPACITIES),
    tl.constexpr(TABLE_STARTS),
    tl.constexpr(TABLE_SOURCE_ROWS),
)
_EXPANDED = tl.constexpr(TABLE_EXPANDED)
_NUM_IN, _IN_START, _NUM_OUT = tl.constexpr(PLAN_NUM_IN), tl.constexpr(PLAN_IN_START), tl.constexpr(PLAN_NUM_OUT)
_OUT_START, _TARGET_START = tl.constexpr(PLAN_OUT_START), tl.constexpr(PLAN_TARGET_START)
_BACK_START, _PLAN = tl.constexpr(PLAN_BACK_START), tl.constexpr(PLAN_WORDS)

# Words of a header. The first three must agree: two of the agreement, and the checksum of the handle, which in calls of
# expanded rows begins with their alignment (across nodes the mark of the handle). Behind them, across nodes, are N with
# the tokens that go to each node; and, in calls with counts, those of R ranks and of L experts.
_A, _B, _HANDLE, _FREE, _TOKENS = (tl.constexpr(word) for word in range(5))
_OFFER, _HEADER = tl.constexpr(5), tl.constexpr(HEADER_WORDS)
# An offer is the rows that fit, the rows that a source has if the memory is staging (else 0), the base of each
# section, the rows that fit in remote memory, and, in calls of selections, those of an expanded result. The second one
# of a call has words of its own: a slow peer may still be reading the first.
_OFFER_WORDS, _OFFER_SOURCE_ROWS, _BASES = tl.constexpr(4 + NUM_SECTIONS), tl.constexpr(1), tl.constexpr(2)
_OFFER_REMOTE_ROWS, _OFFER_EXPANDED = tl.constexpr(2 + NUM_SECTIONS), tl.constexpr(3 + NUM_SECTIONS)

_SCAN_TOKENS, _SCAN_SELECTIONS = 1024, 4096  # that a block numbers at once
_NUMBER_WARPS, _SELECTION_WARPS = 4, 8


class Terms(NamedTuple):
    """What a rank posts in every call of one signature.

    Attributes:
        step: The step that is signalled and waited for.
        operation: For the record of a failure.
        agreement: Two words that must be the same on all ranks.
        num_local: Experts of a rank, if their counts are exchanged.
    """

    step: int
    operation: int
    agreement: tuple[int, int]
    num_local: int = 0


class Post(NamedTuple):
    """What a rank posts in one call.

    Attributes:
        num_rows: Rows it offers.
        rows_per_source: If they are offered by way of staging, how many rows of a source fit there at once; else 0.
        num_tokens: Tokens of this rank; in V2's dispatches with routing the M that it gives. V1's cached and worst-case
            dispatches do not post it.
        free_bytes: The largest region that it could still take.
        bases: Where its sections are; -1: nothing there.
        remote_rows: Rows that fit in remote memory.
        ticket: Echoed to the host when the counts have arrived; 0: the host does not wait, and what does not fit is an
            error. With a ticket the offer is a guess: if it does not fit somewhere, all ranks hold the call.
    """

    num_rows: int = 0
    rows_per_source: int = 0
    num_tokens: int = 0
    free_bytes: int = 0
    bases: tuple[int, int, int] = (-1, -1, -1)
    remote_rows: int = 0
    ticket: int = 0


make_post: Callable[[tuple], Post] = partial(tuple.__new__, Post)
"""A post of all its values. Its class's own way is a function of Python, which takes longer."""


class Counted(NamedTuple):
    """Counts that are exchanged.

    Attributes:
        per_rank: [R] int32, the tokens that go to each rank, counted; written where tokens are numbered.
        given: [R] int32, the same numbers as the caller gives them.
        per_expert: [E] int32.
    """

    per_rank: torch.Tensor
    given: torch.Tensor
    per_expert: torch.Tensor


class Numbered(NamedTuple):
    """Tokens to be numbered.

    Attributes:
        is_token_in_rank: [T, R] bool, contiguous.
        numbers: [T, R] int32, written: how many tokens before this one go there, -1 where it does not.
        node_numbers: [T, N] int32, written: the same of nodes, to which goes what goes to any of their ranks; None on
            one node.
    """

    is_token_in_rank: torch.Tensor
    numbers: torch.Tensor
    node_numbers: torch.Tensor | None = None


class Nodes(NamedTuple):
    """What ranks of different nodes exchange in a handshake.

    Attributes:
        num_tokens: [N] int32, the tokens that this rank sends to each node, also where that was in an earlier dispatch;
            or [N, C], of which the first column is read. Written, contiguous, where tokens are numbered.
        plan: [N, PLAN_WORDS] int64, written.
        prefix: [N] int32, written: the rows that the ranks of this rail send to this node, up to each node.
        mark: [n] int32, all the same number, which tells dispatches apart: of the handle that all ranks follow, or, if
            there are counts, written.
    """

    num_tokens: torch.Tensor
    plan: torch.Tensor
    prefix: torch.Tensor
    mark: torch.Tensor


class HandshakeForm(NamedTuple):
    """What a handshake consists of.

    Attributes:
        has_counts: Counts are exchanged into `prefix`.
        has_prefix: There is a prefix: written if there are counts, otherwise that of the handle that all ranks follow.
        has_nodes: Numbers of nodes are exchanged.
        is_numbered: Tokens are numbered first.
        word: The word in which the mask of a node's ranks is read, if tokens are numbered.
        is_new: A new call begins; otherwise this is the second handshake of one.
        sends: The kernel does the send half.
        receives: The kernel does the receive half.
    """

    has_counts: bool = False
    has_prefix: bool = False
    has_nodes: bool = False
    is_numbered: bool = False
    word: torch.dtype = torch.uint8
    is_new: bool = True
    sends: bool = True
    receives: bool = True


# What the changing arguments of the kernel are: of which type the memory is that they point to; None: a number.
_NUMBERS = (None,) * 12
_POINTERS = (torch.int32,) * 7 + (torch.int64, torch.int32, torch.int32)


class Handshake:
    """The handshakes of calls with one signature.

    Args:
        context: The words.
        terms: What is posted in all of them.
        form: What they consist of.
    """

    def __init__(self, context: Context, terms: Terms, form: HandshakeForm):
        num_nodes = context.num_nodes if form.has_nodes else 0
        self._num_blocks = context.num_ranks + num_nodes if form.is_numbered else 1
        self._nothing = context.state  # a dummy for arguments that are not used
        num_words = context.ranks_per_node // form.word.itemsize
        constants = {
            **_constants(context, form, _NUMBER_WARPS if form.is_numbered else 1),
            "IS_NUMBERED": form.is_numbered,
            "NODE_WORDS": num_words if form.has_nodes else 0,
            "TILE": _SCAN_TOKENS,
        }
        kernel = variant(_notify_kernel, constants["NUM_WARPS"], constants, (form.word,))
        types = (torch.uint8, form.word, *_POINTERS, *_NUMBERS)
        self.launch = Launch(kernel, types, _fixed(context, terms))

    def __call__(
        self,
        post: Post,
        counted: Counted | tuple | None = None,
        prefix: torch.Tensor | None = None,
        nodes: Nodes | None = None,
        numbered: Numbered | tuple | None = None,
    ) -> None:
        """Launch one handshake. Plain tuples may be passed for the named ones: they are made faster.

        Args:
            post: What to post. The offers of all peers become addresses in the table of `context`.
            counted: Counts to exchange.
            prefix: [R, R] int32, see `HandshakeForm`.
            nodes: Numbers of nodes to exchange.
            numbered: Tokens to number first.
        """
        nothing = self._nothing
        mask = numbers = node_numbers = nothing
        num_marked = 0
        if numbered is not None:
            mask, numbers, node_numbers = numbered
            num_marked = mask.shape[0]
        per_rank, given, per_expert = counted or (nothing,) * 3
        if nodes is None:
            of_nodes, sizes = (nothing,) * 4, (0, 0)
        else:
            of_nodes, sizes = nodes, (nodes.num_tokens.stride(0), nodes.mark.numel())
        num_rows, rows_per_source, num_tokens, free_bytes, bases, remote_rows, ticket = post
        if node_numbers is None:
            node_numbers = nothing
        if prefix is None:
            prefix = nothing
        self.launch(
            self._num_blocks,
            (mask, mask, numbers, node_numbers, per_rank, given, per_expert, prefix, *of_nodes),
            (num_marked, *sizes, num_rows, rows_per_source, num_tokens, free_bytes, *bases, remote_rows, ticket),
        )


class CopyingHandshake:
    """The handshakes of combines whose rows lie outside of the window: they are copied into it first, and the last
    block of the copy does the handshake.

    Args:
        context: The words.
        terms: What is posted in all of them.
        shape: How the copy is launched.
        num_bytes: Bytes of a row.
        is_aligned: Rows consist of vectors, see `put.word_of`.
        word: What they are copied as.
    """

    def __init__(
        self, context: Context, terms: Terms, shape: LaunchShape, num_bytes: int, word: torch.dtype, is_aligned: bool
    ):
        row_vectors, vector, self._block = copy_shape(shape, num_bytes, word, is_aligned)
        self._most_blocks, self._row_words = shape.num_blocks, num_bytes // word.itemsize
        form = HandshakeForm(has_prefix=True)
        constants = {**_constants(context, form, shape.num_warps), "VECTOR": vector, "BLOCK": self._block}
        kernel = variant(_notify_copied_kernel, shape.num_warps, constants, (word,))
        types = (word, word, torch.int32, *_NUMBERS[3:], None)
        self.launch = Launch(kernel, types, (*_fixed(context, terms), row_vectors))

    def __call__(self, post: Post, prefix: torch.Tensor, target: torch.Tensor, rows: torch.Tensor) -> None:
        """Launch one handshake.

        Args:
            post: What to post.
            prefix: [R, R] int32, of the handle that all ranks follow.
            target: [n, columns] contiguous, written.
            rows: [n, columns] contiguous, of the same dtype.
        """
        num_rows, rows_per_source, num_tokens, free_bytes, bases, remote_rows, ticket = post
        count = rows.shape[0]
        num_pieces = -(-count * self._row_words // self._block)
        numbers = (num_rows, rows_per_source, num_tokens, free_bytes, *bases, remote_rows, ticket, count)
        self.launch(max(1, min(self._most_blocks, num_pieces)), (target, rows, prefix), numbers)


class Selected(NamedTuple):
    """What a handshake of selections takes and computes, beside the prefix.

    Attributes:
        topk_idx: [T, K].
        mask: [T, R] bool, written: which token goes to which rank.
        numbers: [T, R] int32, written, as in `Numbered`; not if results are expanded.
        per_rank: [R] int32, written: the tokens that go to each rank.
        per_expert: [E] int32, written: how often each expert is selected.
        tiles: [2, tiles, E + R] int32, at least one tile, written if results are expanded, see `selections.sum_tiles`.
        first: [E] int32, written: the first row of this rank's selections of each expert, at the expert's rank.
        experts: [2 L + 1] int32, written: selections of each expert of this rank; where its rows end, if the result is
            expanded, else the inclusive prefix sums of the counts, rounded up; and the largest M that a rank gave.
        stats: [L] int32, to which the selections of each expert are added; None: nothing is.
    """

    topk_idx: torch.Tensor
    mask: torch.Tensor
    numbers: torch.Tensor
    per_rank: torch.Tensor
    per_expert: torch.Tensor
    tiles: torch.Tensor
    first: torch.Tensor
    experts: torch.Tensor
    stats: torch.Tensor | None


class SelectionHandshake:
    """The handshakes of calls of selections with one signature, inside one node (`selections.py`).

    Args:
        context: The words.
        terms: What is posted in all of them.
        form: What they consist of; those with counts count selections.
        alignment: To which the rows of an expert are rounded up.
        is_expanded: Results are expanded; must be the same on all ranks, as the alignment.
        num_topk: K.
        idx_dtype: Type of the ids.
    """

    def __init__(
        self,
        context: Context,
        terms: Terms,
        form: HandshakeForm,
        alignment: int,
        is_expanded: bool,
        num_topk: int,
        idx_dtype: torch.dtype = torch.int32,
    ):
        self._nothing = context.state
        self._num_ranks, self._num_topk, self._is_expanded = context.num_ranks, num_topk, is_expanded
        topk = next_power_of_2(num_topk)
        constants = {
            **_constants(context, form, _SELECTION_WARPS if form.has_counts else 1),
            "IS_EXPANDED": is_expanded,
            "TILE": max(1, _SCAN_SELECTIONS // topk),
            "TOKENS": tile_tokens(num_topk),
            "TOPK": topk,
            "DESTINATIONS": next_power_of_2(context.num_ranks),
            "LOCALS": max(2, next_power_of_2(terms.num_local)),
        }
        kernel = variant(_notify_selections_kernel, constants["NUM_WARPS"], constants, (idx_dtype,))
        int32 = torch.int32
        types = (idx_dtype, torch.uint8, *(int32,) * 8, *(None,) * 12)
        self.launch = Launch(kernel, types, (*_fixed(context, terms), alignment, num_topk))

    def __call__(self, post: Post, expanded_rows: int, prefix: torch.Tensor, selected: Selected | None = None) -> None:
        """Launch one handshake.

        Args:
            post: What to post.
            expanded_rows: Rows of an expanded result that fit, or are given; if rows are compact, 0 or the negative of
                the most rows that an expanded result made of them may have.
            prefix: [R, R] int32, see `HandshakeForm`.
            selected: Selections to count; None: the call follows a handle.
        """
        nothing, num_blocks = self._nothing, 1
        num_tokens = has_stats = 0
        tensors: tuple[torch.Tensor, ...] = (nothing,) * 9
        if selected is not None:
            *counted, added = selected
            num_tokens, has_stats = selected.topk_idx.shape[0], int(added is not None)
            tensors = (*counted, nothing if added is None else added)
            num_blocks = self._num_ranks
            if self._is_expanded:
                num_blocks = max(1, num_tiles(num_tokens, self._num_topk))
        num_rows, rows_per_source, most_tokens, free_bytes, bases, remote_rows, ticket = post
        offered = (num_rows, rows_per_source, most_tokens, free_bytes, *bases, remote_rows, ticket, expanded_rows)
        self.launch(num_blocks, (*tensors, prefix), (num_tokens, has_stats, *offered))


def _constants(context: Context, form: HandshakeForm, num_warps: int) -> dict[str, Any]:
    lanes = num_lanes(context, num_warps)
    return {
        "SENDS": form.sends,
        "RECEIVES": form.receives,
        "HAS_NODES": form.has_nodes,
        "IS_NEW": form.is_new,
        "HAS_COUNTS": form.has_counts,
        "HAS_PREFIX": form.has_prefix,
        "LANES": lanes,
        "CHUNK": max(4, 256 // lanes),
        "NUM_WARPS": num_warps,
    }


def _fixed(context: Context, terms: Terms) -> tuple[torch.Tensor | int, ...]:
    """Return the arguments that are the same in all calls of a signature."""
    return context.words, terms.num_local, terms.step, terms.operation, *terms.agreement


def node_word(context: Context, is_token_in_rank: torch.Tensor) -> torch.dtype:
    """Return the widest word in which a mask [T, R] can be read, node by node."""
    return widest_word(context.ranks_per_node, is_token_in_rank.data_ptr())[0]


def num_words_sent(context: Context, terms: Terms, has_counts: bool) -> int:
    """Return how many words of its header a rank posts: those of counts only if there are any."""
    num_counts = context.num_ranks + terms.num_local if has_counts else 0
    return HEADER_WORDS + context.num_nodes + num_counts


def prepare_all(context: Context) -> None:
    """Compile and load handshakes of one node, so that no peer's limit passes while one is compiled."""
    terms = Terms(0, 0, (0, 0))
    forms = [
        HandshakeForm(has_counts=True, has_prefix=True, is_numbered=True),
        HandshakeForm(has_prefix=True),
        HandshakeForm(),
        HandshakeForm(is_new=False),
    ]
    for form in forms:
        Handshake(context, terms, form).launch.prepare()
    prepare_failures(context)


def prepare_nodes(context: Context, phases: Sequence[tuple[bool, bool]]) -> None:
    """Compile and load handshakes across nodes.

    Args:
        context: The words.
        phases: What `sends` and `receives` are together.
    """
    terms, word = Terms(0, 0, (0, 0)), widest_word(context.ranks_per_node)[0]
    for sends, receives in phases:
        for form in (
            HandshakeForm(
                has_counts=True, has_prefix=True, has_nodes=True, is_numbered=sends, word=word if sends else torch.uint8
            ),
            HandshakeForm(has_nodes=True),
            HandshakeForm(),
            HandshakeForm(has_nodes=True, is_new=False),
        ):
            Handshake(context, terms, form._replace(sends=sends, receives=receives)).launch.prepare()
    prepare_failures(context)


# Numbers have their types written down: a kernel is not compiled again for another value of them.


@jit
def _notify_kernel(
    mask,
    words,
    numbers,
    node_numbers,
    counts,
    given,
    per_expert,
    prefix,
    node_tokens,
    plan,
    node_prefix,
    mark,
    num_marked: tl.int32,
    node_stride: tl.int32,
    num_marks: tl.int32,
    num_rows: tl.int64,
    rows_per_source: tl.int64,
    num_tokens: tl.int64,
    free_bytes: tl.int64,
    base_0: tl.int64,
    base_1: tl.int64,
    base_2: tl.int64,
    remote_rows: tl.int64,
    ticket: tl.int64,
    context_words,
    num_local: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    word_a: tl.int64,
    word_b: tl.int64,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
    HAS_NODES: tl.constexpr,
    IS_NEW: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    IS_NUMBERED: tl.constexpr,
    NODE_WORDS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Each block numbers the tokens of one rank or node; the last block does the handshake.

    Example: two ranks, counts `[1, 2]` on rank 0 and `[3, 4]` on rank 1: prefix is `[[1, 2], [4, 6]]` on both, and
    the first slots of rank 1 are `[1, 2]`.
    """
    context = open_context(context_words)
    _, _, state, _, _, num_ranks, _, num_nodes, _, _ = context
    is_last = True
    if IS_NUMBERED:
        program = tl.program_id(0)
        if program < num_ranks:
            _number(mask, numbers, counts, program, num_marked, num_ranks, 1, 1, TILE)
        elif HAS_NODES:
            num_words = num_nodes * NODE_WORDS
            node = program - num_ranks
            _number(words, node_numbers, node_tokens, node, num_marked, num_words, node_stride, NODE_WORDS, TILE)
        is_last = is_last_block(state + _ENDED)
    if is_last:
        _handshake(
            context,
            (num_rows, rows_per_source, num_tokens, free_bytes, base_0, base_1, base_2, remote_rows, ticket),
            (num_local, step, operation, word_a, word_b),
            (counts, given, per_expert, prefix),
            (node_tokens, plan, node_prefix, mark, node_stride, num_marks),
            SENDS, RECEIVES, HAS_NODES, IS_NEW, HAS_COUNTS, HAS_PREFIX, LANES, CHUNK, NUM_WARPS,
        )  # fmt: skip


@jit
def _notify_selections_kernel(
    topk_idx,
    mask,
    numbers,
    counts,
    per_expert,
    tiles,
    first,
    experts,
    stats,
    prefix,
    num_selecting: tl.int32,
    has_stats: tl.int32,
    num_rows: tl.int64,
    rows_per_source: tl.int64,
    num_tokens: tl.int64,
    free_bytes: tl.int64,
    base_0: tl.int64,
    base_1: tl.int64,
    base_2: tl.int64,
    remote_rows: tl.int64,
    ticket: tl.int64,
    expanded_rows: tl.int64,
    context_words,
    num_local: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    word_a: tl.int64,
    word_b: tl.int64,
    alignment: tl.int64,
    num_topk: tl.int32,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
    HAS_NODES: tl.constexpr,
    IS_NEW: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    IS_EXPANDED: tl.constexpr,
    TILE: tl.constexpr,
    TOKENS: tl.constexpr,
    TOPK: tl.constexpr,
    DESTINATIONS: tl.constexpr,
    LOCALS: tl.constexpr,
):
    """With counts, a block for each rank numbers the tokens that go there; if results are expanded, a block for each
    tile counts its selections instead. The last block does the handshake.

    Example: two ranks with an expert each, counts `[1, 2]` on rank 0 and `[3, 0]` on rank 1, alignment 4: on rank 1 the
    first rows are `[1, 2]`, and both results have 4 rows.
    """
    context = open_context(context_words)
    state, num_ranks = context[2], context[5]
    is_last = True
    if HAS_COUNTS:
        program = tl.program_id(0)
        if IS_EXPANDED:
            BINS: tl.constexpr = DESTINATIONS * LOCALS  # at least E
            count_tile(
                topk_idx, mask, tiles, program, num_selecting, num_topk, num_ranks, num_local, TOKENS, TOPK,
                DESTINATIONS, BINS,
            )  # fmt: skip
        else:
            _number_selections(
                topk_idx, mask, numbers, counts, per_expert, program, num_selecting, num_topk, num_ranks, num_local,
                TILE, TOPK, LOCALS,
            )  # fmt: skip
        is_last = is_last_block(state + _ENDED)
    if is_last:
        if HAS_COUNTS and IS_EXPANDED:
            sum_tiles(tiles, counts, per_expert, tl.num_programs(0), num_ranks, num_local * num_ranks)
            tl.debug_barrier()  # all read what some have stored
        _handshake(
            context,
            (num_rows, rows_per_source, num_tokens, free_bytes, base_0, base_1, base_2, remote_rows, ticket),
            (num_local, step, operation, word_a, word_b),
            (counts, None, per_expert, prefix),
            None,
            SENDS, RECEIVES, HAS_NODES, IS_NEW, HAS_COUNTS, HAS_PREFIX, LANES, CHUNK, NUM_WARPS,
            (first, experts, stats, has_stats, expanded_rows, alignment), True, IS_EXPANDED, DESTINATIONS, LOCALS,
        )  # fmt: skip


@jit
def _notify_copied_kernel(
    target,
    rows,
    prefix,
    num_rows: tl.int64,
    rows_per_source: tl.int64,
    num_tokens: tl.int64,
    free_bytes: tl.int64,
    base_0: tl.int64,
    base_1: tl.int64,
    base_2: tl.int64,
    remote_rows: tl.int64,
    ticket: tl.int64,
    num_copied: tl.int32,
    context_words,
    num_local: tl.int32,
    step: tl.int32,
    operation: tl.int32,
    word_a: tl.int64,
    word_b: tl.int64,
    row_vectors: tl.int32,
    SENDS: tl.constexpr,
    RECEIVES: tl.constexpr,
    HAS_NODES: tl.constexpr,
    IS_NEW: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
    LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_WARPS: tl.constexpr,
    VECTOR: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Copy the rows that came, piece by piece; the last block does the handshake."""
    context = open_context(context_words)
    copy_pieces(context, target, rows, prefix, num_copied, row_vectors, VECTOR, BLOCK)
    if is_last_block(context[2] + _ENDED):
        _handshake(
            context,
            (num_rows, rows_per_source, num_tokens, free_bytes, base_0, base_1, base_2, remote_rows, ticket),
            (num_local, step, operation, word_a, word_b),
            (None, None, None, prefix),
            None,
            SENDS, RECEIVES, HAS_NODES, IS_NEW, HAS_COUNTS, HAS_PREFIX, LANES, CHUNK, NUM_WARPS,
        )  # fmt: skip


@triton.jit
def _handshake(
    context, posted, terms, counted, nodes, SENDS: tl.constexpr, RECEIVES: tl.constexpr, HAS_NODES: tl.constexpr,
    IS_NEW: tl.constexpr, HAS_COUNTS: tl.constexpr, HAS_PREFIX: tl.constexpr, LANES: tl.constexpr,
    CHUNK: tl.constexpr, NUM_WARPS: tl.constexpr, selected=None, HAS_SELECTIONS: tl.constexpr = False,
    IS_EXPANDED: tl.constexpr = False, DESTINATIONS: tl.constexpr = 1, LOCALS: tl.constexpr = 1,
):  # fmt: skip
    """Post, signal, wait, compare, and derive prefix sums and addresses. One block does it.

    Args:
        context: See `exchange.open_context`.
        posted: As in `Post`, the bases one by one.
        terms: As in `Terms`.
        counted: As in `Counted`, and the prefix.
        nodes: As in `Nodes`, the stride of the tokens, and the length of the mark.
        SENDS: Do the send half.
        RECEIVES: Do the receive half.
        HAS_NODES: Numbers of nodes are exchanged.
        IS_NEW: A new call begins.
        HAS_COUNTS: Counts are exchanged.
        HAS_PREFIX: There is a prefix.
        LANES: At least R.
        CHUNK: Columns of a matrix that are looked at at once.
        NUM_WARPS: Of the block.
        selected: Of calls of selections: as in `Selected` from `first` on, whether there are stats, the rows of an
            expanded result that are offered, and the alignment.
        HAS_SELECTIONS: It is such a call.
        IS_EXPANDED: Results are expanded.
        DESTINATIONS: At least R.
        LOCALS: At least L.
    """
    state, num_ranks = context[2], context[5]
    num_local, step, operation, word_a, word_b = terms
    counts, given, per_expert, prefix = counted
    ticket = posted[8]
    is_well = tl.load(state + _FAILED) == 0
    epoch = tl.load(state)
    tag = tl.zeros((), tl.int64)  # distinguishes calls in what the words of the agreement have no bits for
    if HAS_SELECTIONS:
        _, _, _, _, expanded_rows, alignment = selected
        tag = alignment
        if not IS_EXPANDED:
            tag = tl.full((), -1, tl.int64)  # not 0: ranks that make V1's calls store no counts on their own boards
    if NUM_WARPS > 1:
        tl.debug_barrier()  # all have loaded what one thread stores next
    if SENDS:
        epoch += IS_NEW
        if HAS_COUNTS and not HAS_SELECTIONS and is_well:  # the caller has not counted selections
            is_well = _check_counts(context, counts, given, epoch, operation, ticket, LANES)
        tl.store(state + _ANNOUNCED, is_well.to(tl.int64))
        if is_well:
            tl.store(state, epoch)
            header = headers_at(context, tl.arange(0, LANES), tl.arange(0, LANES) < num_ranks, epoch)
            if IS_NEW:
                _post_agreement(
                    context, header, posted, word_a, word_b, tag, prefix, nodes, HAS_NODES, HAS_COUNTS, HAS_PREFIX,
                    LANES,
                )  # fmt: skip
            _post_offer(context, header, posted, IS_NEW, LANES)
            if HAS_COUNTS:
                _post_counts(context, header, counts, per_expert, num_local, LANES, CHUNK)
            if HAS_SELECTIONS:
                _post_selections(
                    context, header, per_expert, num_local, epoch, expanded_rows, IS_NEW, HAS_COUNTS, LANES
                )
            signal(context, 0, num_ranks, epoch, step, LANES)
    else:
        is_well = is_well & (tl.load(state + _ANNOUNCED) != 0)
    if RECEIVES:
        if is_well:
            is_well = wait(context, 0, num_ranks, epoch, step, operation, LANES, NUM_WARPS)
        if IS_NEW and is_well:
            is_well = _agree(context, epoch, operation, LANES)
        if is_well:
            tl.store(state + _HELD, 0)
            _take_offers(context, epoch, IS_NEW, HAS_COUNTS, LANES)
        if HAS_NODES and is_well:
            _take_nodes(context, nodes, epoch, HAS_COUNTS, LANES)
            _check_remote_capacity(context, epoch, operation, ticket, IS_NEW, LANES)
        if HAS_SELECTIONS and is_well:
            _take_selections(
                context, selected, num_local, epoch, operation, ticket, IS_EXPANDED, IS_NEW, HAS_COUNTS, DESTINATIONS,
                LOCALS, LANES,
            )  # fmt: skip
        if HAS_COUNTS and is_well:
            _take_counts(context, prefix, num_local, epoch, operation, ticket, LANES, CHUNK)


@triton.jit
def _check_counts(context, counts, given, epoch, operation, ticket, LANES: tl.constexpr):
    """Return whether the caller's counts match its mask. If not, nothing has been posted yet, and the call is not made.

    If the host does not wait for the counts, the buffer fails: calls behind this one would not match the peers'.
    """
    _, _, state, _, host, num_ranks, rank, _, _, _ = context
    lanes = tl.arange(0, LANES)
    seen = tl.load(counts + lanes, mask=lanes < num_ranks, other=0)
    expected = tl.load(given + lanes, mask=lanes < num_ranks, other=0)
    is_right = tl.sum((seen != expected).to(tl.int32)) == 0
    if not is_right:
        first = tl.min(tl.where(seen != expected, lanes, LANES))
        one, other = tl.sum(tl.where(lanes == first, seen, 0)), tl.sum(tl.where(lanes == first, expected, 0))
        if ticket != 0:
            tl.store(state + _HELD, 1)
            write_record(host, _COUNTS, epoch, operation, first, one, other, rank)
            tell_host(host, ticket)
        else:
            fail(context, _COUNTS, epoch, operation, first, one, other, rank, LANES)
    return is_right


# The send half: `header` is where this rank's header is on every board, one lane for each peer. All get the same words.


@triton.jit
def _post_agreement(
    context, header, posted, word_a, word_b, tag, prefix, nodes, HAS_NODES: tl.constexpr, HAS_COUNTS: tl.constexpr,
    HAS_PREFIX: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write what must agree, and what a rank says of itself."""
    _, _, _, _, _, num_ranks, _, num_nodes, _, _ = context
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    checksum = tag
    if HAS_PREFIX and not HAS_COUNTS:
        for source in range(num_ranks):
            row = tl.load(prefix + source * num_ranks + lanes, mask=is_rank, other=0).to(tl.int64)
            mixed = (row + lanes + 1) * 0x1E3779B97F4A7C15
            mixed = (mixed ^ (mixed >> 29)) * 0x3F58476D1CE4E5B9
            checksum = checksum * 1000003 + tl.sum(tl.where(is_rank, mixed ^ (mixed >> 32), 0))
    if HAS_NODES:
        node_tokens, _, _, mark, node_stride, _ = nodes
        if not HAS_COUNTS:
            checksum = tl.load(mark).to(tl.int64)
        tokens = tl.load(node_tokens + lanes * node_stride, mask=lanes < num_nodes, other=0).to(tl.int64)
        words = header[:, None] + _HEADER + lanes[None, :]
        tl.store(words, tokens[None, :], mask=is_rank[:, None] & (lanes < num_nodes)[None, :])
    _, _, num_tokens, free_bytes, _, _, _, _, _ = posted
    tl.store(header + _A, word_a, mask=is_rank)
    tl.store(header + _B, word_b, mask=is_rank)
    tl.store(header + _HANDLE, checksum, mask=is_rank)
    tl.store(header + _FREE, free_bytes, mask=is_rank)
    tl.store(header + _TOKENS, num_tokens, mask=is_rank)


@triton.jit
def _post_offer(context, header, posted, IS_NEW: tl.constexpr, LANES: tl.constexpr):
    """Write this rank's offer."""
    num_rows, rows_per_source, _, _, base_0, base_1, base_2, remote_rows, _ = posted
    is_rank = tl.arange(0, LANES) < context[5]
    offer = header + _OFFER + (1 - IS_NEW) * _OFFER_WORDS
    tl.store(offer, num_rows, mask=is_rank)
    tl.store(offer + _OFFER_SOURCE_ROWS, rows_per_source, mask=is_rank)
    tl.store(offer + _BASES, base_0, mask=is_rank)
    tl.store(offer + _BASES + 1, base_1, mask=is_rank)
    tl.store(offer + _BASES + 2, base_2, mask=is_rank)
    tl.store(offer + _OFFER_REMOTE_ROWS, remote_rows, mask=is_rank)


@triton.jit
def _post_counts(context, header, counts, per_expert, num_local, LANES: tl.constexpr, CHUNK: tl.constexpr):
    """Write the rows that go to each rank, and to each rank how often its experts are selected."""
    _, _, _, _, _, num_ranks, _, num_nodes, _, _ = context
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
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
def _post_selections(
    context, header, per_expert, num_local, epoch, expanded_rows, IS_NEW: tl.constexpr, HAS_COUNTS: tl.constexpr,
    LANES: tl.constexpr,
):  # fmt: skip
    """Write what the header of a call of selections has more on every board, and the counts of all experts on the own
    board, from which the peers read them.
    """
    _, _, _, _, _, num_ranks, rank, _, _, _ = context
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    tl.store(header + _OFFER + (1 - IS_NEW) * _OFFER_WORDS + _OFFER_EXPANDED, expanded_rows, mask=is_rank)
    if HAS_COUNTS:
        own = selected_counts(context, rank, epoch)
        for start in range(0, num_local * num_ranks, LANES):
            experts = start + lanes
            is_expert = experts < num_local * num_ranks
            tl.store(own + experts, tl.load(per_expert + experts, mask=is_expert, other=0), mask=is_expert)


# The receive half ----------------------------------------------------------------------------------------------------


@triton.jit
def _take_selections(
    context, selected, num_local, epoch, operation, ticket, IS_EXPANDED: tl.constexpr, IS_NEW: tl.constexpr,
    HAS_COUNTS: tl.constexpr, DESTINATIONS: tl.constexpr, LOCALS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Note which peers take or give expanded rows. With counts, find the first rows of this rank's selections, the
    counts and ends of this rank's experts, and whether all expanded rows fit.

    If they do not, and the host waits for the counts, the call is held, else it fails.
    """
    _, _, state, table, host, num_ranks, rank, _, _, _ = context
    first, experts, stats, has_stats, _, alignment = selected
    peers, local = tl.arange(0, DESTINATIONS), tl.arange(0, LOCALS)
    is_peer = peers < num_ranks
    headers = header_of(context, peers, is_peer, epoch)
    offer = headers + _OFFER + (1 - IS_NEW) * _OFFER_WORDS + _OFFER_EXPANDED
    offered = tl.load(offer, mask=is_peer, other=0)
    tl.store(table + _EXPANDED * num_ranks + peers, offered, mask=is_peer)
    if HAS_COUNTS:
        is_expert = is_peer[:, None] & (local < num_local)[None, :]
        cells = peers[:, None] * num_local + local[None, :]
        total = tl.zeros([DESTINATIONS, LOCALS], tl.int32)
        before = tl.zeros([DESTINATIONS, LOCALS], tl.int32)
        for source in range(num_ranks):
            counts = selected_counts(context, source, epoch)
            count = tl.load(counts + cells, mask=is_expert, other=0)
            total += count
            before += tl.where(source < rank, count, 0)
        aligned = (total + alignment - 1) // alignment * alignment
        starts = tl.cumsum(aligned, 1) - aligned
        tl.store(first + cells, (starts + before).to(tl.int32), mask=is_expert)
        is_own = is_expert & (peers == rank)[:, None]
        ends = starts + aligned
        if IS_EXPANDED:
            ends = starts + total
        own = local[None, :] + tl.zeros_like(cells)
        tl.store(experts + own, total, mask=is_own)
        tl.store(experts + num_local + own, ends.to(tl.int32), mask=is_own)
        tokens = tl.load(headers + _TOKENS, mask=is_peer, other=0)
        tl.store(experts + 2 * num_local, tl.max(tokens).to(tl.int32))
        if has_stats != 0:
            so_far = tl.load(stats + own, mask=is_own, other=0)
            tl.debug_barrier()  # threads that have the same element load it before one of them stores it
            tl.store(stats + own, so_far + total, mask=is_own)
        if IS_EXPANDED:
            needed = tl.sum(aligned, 1)
            if ticket != 0:
                tl.store(host + _STATE + 2 * num_ranks + peers, needed, mask=is_peer)
            there = tl.where(offered < 0, -offered, offered)
            is_lacking = is_peer & (needed > there)
            if tl.sum(is_lacking.to(tl.int32)) > 0:
                tl.store(state + _HELD, 1)
                if ticket == 0:
                    peer = tl.min(tl.where(is_lacking, peers, DESTINATIONS))
                    wanted = tl.sum(tl.where(peers == peer, needed, 0))
                    room = tl.sum(tl.where(peers == peer, there, 0))
                    fail(context, _EXPANDED_OVERFLOW, epoch, operation, peer, wanted, room, rank, LANES)


@triton.jit
def _agree(context, epoch, operation, LANES: tl.constexpr):
    """Return whether all ranks make the same call, with the same handle."""
    _, _, _, _, _, num_ranks, rank, _, _, _ = context
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    headers = header_of(context, lanes, is_rank, epoch)
    own = header_of(context, rank, True, epoch)
    differs = tl.load(headers + _A, mask=is_rank, other=0) != tl.load(own + _A)
    differs = differs | (tl.load(headers + _B, mask=is_rank, other=0) != tl.load(own + _B))
    differs = differs | (tl.load(headers + _HANDLE, mask=is_rank, other=0) != tl.load(own + _HANDLE))
    differs = differs & is_rank
    is_alike = tl.sum(differs.to(tl.int32)) == 0
    if not is_alike:
        fail(context, _DISAGREE, epoch, operation, mask_of(differs, lanes), 0, 0, rank, LANES)
    return is_alike


@triton.jit
def _take_counts(
    context, prefix, num_local, epoch, operation, ticket, LANES: tl.constexpr, CHUNK: tl.constexpr
):  # fmt: skip
    """Compute prefix sums of all ranks' counts, here and on the host, this rank's first slots, and whether all rows
    fit.
    """
    _, _, state, table, host, num_ranks, rank, num_nodes, _, _ = context
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    headers = header_of(context, lanes, is_rank, epoch)
    tl.debug_barrier()  # one thread has stored the word that all load now
    worst = tl.load(state + _HELD)  # remote memory may be too small already
    for start in range(0, num_ranks, CHUNK):
        columns = start + tl.arange(0, CHUNK)
        is_column = columns < num_ranks
        is_cell = is_rank[:, None] & is_column[None, :]
        cell = tl.load(headers[:, None] + _HEADER + num_nodes + columns[None, :], mask=is_cell, other=0)
        sums = tl.cumsum(cell, 0)
        offset = lanes[:, None] * num_ranks + columns[None, :]
        tl.store(prefix + offset, sums.to(tl.int32), mask=is_cell)
        tl.store(
            host + _STATE + 3 * num_ranks + offset,
            sums,
            mask=is_cell & (lanes[:, None] < tl.where(ticket != 0, num_ranks, 0)),
        )
        before = tl.sum(tl.where(lanes[:, None] < rank, cell, 0), 0)
        tl.store(table + _STARTS * num_ranks + columns, before, mask=is_column)
        offers = header_of(context, columns, is_column, epoch) + _OFFER
        capacity = tl.load(offers, mask=is_column, other=0)
        rows = tl.sum(cell, 0)
        excess = is_column & (rows > capacity)
        if tl.sum(excess.to(tl.int32)) > 0:
            tl.store(state + _HELD, 1)
            if (ticket == 0) & (worst == 0):
                peer = tl.min(tl.where(excess, columns, LANES + CHUNK))
                came = tl.sum(tl.where(columns == peer, rows, 0))
                there = tl.sum(tl.where(columns == peer, capacity, 0))
                fail(context, _OVERFLOW, epoch, operation, peer, came, there, rank, LANES)
        worst = tl.maximum(worst, tl.max(tl.where(is_column, rows - capacity, 0)))
    if ticket != 0:
        for start in range(0, num_local, CHUNK):
            columns = start + tl.arange(0, CHUNK)
            is_cell = is_rank[:, None] & (columns < num_local)[None, :]
            cells = headers[:, None] + _HEADER + num_nodes + num_ranks + columns[None, :]
            chosen = tl.load(cells, mask=is_cell, other=0)
            counts_at = host + _STATE + 3 * num_ranks + num_ranks * num_ranks + columns
            tl.store(counts_at, tl.sum(chosen, 0), mask=columns < num_local)
        tl.store(host + _STATE + lanes, tl.load(headers + _FREE, mask=is_rank, other=0), mask=is_rank)
        tl.store(host + _STATE + num_ranks + lanes, tl.load(headers + _TOKENS, mask=is_rank, other=0), mask=is_rank)
        tl.store(host + _HELD, (worst > 0).to(tl.int64))
        tell_host(host, ticket)


@triton.jit
def _take_offers(context, epoch, IS_NEW: tl.constexpr, HAS_COUNTS: tl.constexpr, LANES: tl.constexpr):
    """Compute the addresses of the peers' sections, the rows that fit there, and whether some of them are staged."""
    windows, _, state, table, _, num_ranks, rank, num_nodes, _, _ = context
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    ranks_per_node = num_ranks // num_nodes
    # no row is written straight to a remote rank
    is_local_rank = is_rank & (lanes // ranks_per_node == rank // ranks_per_node)
    headers = header_of(context, lanes, is_rank, epoch)
    offers = headers + _OFFER + (1 - IS_NEW) * _OFFER_WORDS
    sections = tl.arange(0, 4)
    is_base = is_rank[:, None] & (sections < _NUM_SECTIONS)[None, :]
    base = tl.load(offers[:, None] + _BASES + sections[None, :], mask=is_base, other=-1)
    segment = tl.where(base < 0, 0, base >> _SEGMENT_BITS)
    start = tl.load(windows + segment * num_ranks + lanes[:, None], mask=is_base, other=0)
    offset = tl.where(base < 0, 0, base & _OFFSET_MASK)
    tl.store(table + sections[None, :] * num_ranks + lanes[:, None], start + offset, mask=is_base)
    capacities = tl.load(offers, mask=is_rank, other=0)
    rows_per_source = tl.load(offers + _OFFER_SOURCE_ROWS, mask=is_rank, other=0)
    tl.store(
        table + _CAPACITIES * num_ranks + lanes,
        tl.where((rows_per_source > 0) | ~is_local_rank, 0, capacities),
        mask=is_rank,
    )
    tl.store(table + _SOURCE_ROWS * num_ranks + lanes, rows_per_source, mask=is_rank)
    num_staged = tl.sum((rows_per_source > 0).to(tl.int64))
    tl.store(state + _STAGED, num_staged)
    if num_staged > 0:
        tl.store(state + _MOST_TOKENS, tl.max(tl.load(headers + _TOKENS, mask=is_rank, other=0)))
    if IS_NEW and not HAS_COUNTS:  # the slots of a handle are whole
        tl.store(table + _STARTS * num_ranks + lanes, tl.zeros([LANES], tl.int64), mask=is_rank)


@triton.jit
def _node_tokens(context, ranks, is_rank, node, epoch):
    """The tokens that ranks send to a node, by their headers."""
    return tl.load(header_of(context, ranks, is_rank, epoch) + _HEADER + node, mask=is_rank, other=0)


@triton.jit
def _take_nodes(context, nodes, epoch, HAS_COUNTS: tl.constexpr, LANES: tl.constexpr):
    """Compute the plan: what this rank's rail sends where, see `PLAN_NUM_IN`. With counts, also write the mark.

    Example: two nodes, rank 0 sends 3 tokens to node 0 and 4 to node 1, the rank of its rail on node 1 sends 5 and 6.
    On rank 0: in `[3, 5]` from `[0, 3]`, out `[3, 4]` from `[0, 3]`, targets `[0, 0]`, back `[0, 0]`. On the other: in
    `[4, 6]` from `[0, 4]`, out `[5, 6]` from `[0, 5]`, targets `[3, 4]`, back `[3, 5]`.
    """
    _, _, _, _, _, num_ranks, rank, num_nodes, _, _ = context
    _, plan, node_prefix, mark, _, num_marks = nodes
    lanes = tl.arange(0, LANES)
    is_node = lanes < num_nodes
    ranks_per_node = num_ranks // num_nodes
    node, local = rank // ranks_per_node, rank % ranks_per_node
    rail = lanes * ranks_per_node + local
    num_in = _node_tokens(context, rail, is_node, node, epoch)
    num_out = _node_tokens(context, lanes * 0 + rank, is_node, lanes, epoch)
    target, back = tl.zeros([LANES], tl.int64), tl.zeros([LANES], tl.int64)
    for before in range(node):
        ahead = lanes * 0 + before * ranks_per_node + local
        target += _node_tokens(context, ahead, is_node, lanes, epoch)
        back += _node_tokens(context, rail, is_node, before, epoch)
    in_ends = tl.cumsum(num_in, 0)
    row = plan + lanes * _PLAN
    tl.store(row + _NUM_IN, num_in, mask=is_node)
    tl.store(row + _IN_START, in_ends - num_in, mask=is_node)
    tl.store(row + _NUM_OUT, num_out, mask=is_node)
    tl.store(row + _OUT_START, tl.cumsum(num_out, 0) - num_out, mask=is_node)
    tl.store(row + _TARGET_START, target, mask=is_node)
    tl.store(row + _BACK_START, back, mask=is_node)
    tl.store(node_prefix + lanes, in_ends.to(tl.int32), mask=is_node)
    if HAS_COUNTS:
        for start in range(0, num_marks, LANES):
            cells = start + lanes
            tl.store(mark + cells, (epoch & 0x3FFFFFFF).to(tl.int32) + 1, mask=cells < num_marks)


@triton.jit
def _check_remote_capacity(context, epoch, operation, ticket, IS_NEW: tl.constexpr, LANES: tl.constexpr):
    """Check whether every rank's remote memory holds what it relays and what it sends. All ranks get the same result.

    If the host waits for the counts, it gets the rows that each rank relays, and the call is held; else the call fails.
    """
    _, _, state, _, host, num_ranks, rank, num_nodes, _, _ = context
    lanes = tl.arange(0, LANES)
    is_rank = lanes < num_ranks
    ranks_per_node = num_ranks // num_nodes
    coming, going = tl.zeros([LANES], tl.int64), tl.zeros([LANES], tl.int64)
    for node in range(num_nodes):
        rail = node * ranks_per_node + lanes % ranks_per_node
        coming += _node_tokens(context, rail, is_rank, lanes // ranks_per_node, epoch)
        going += _node_tokens(context, lanes, is_rank, node, epoch)
    needed = tl.maximum(coming, going)
    headers = header_of(context, lanes, is_rank, epoch)
    capacity = tl.load(headers + _OFFER + (1 - IS_NEW) * _OFFER_WORDS + _OFFER_REMOTE_ROWS, mask=is_rank, other=0)
    if ticket != 0:
        tl.store(host + _STATE + 2 * num_ranks + lanes, coming, mask=is_rank)
    is_lacking = is_rank & (needed > capacity)
    if tl.sum(is_lacking.to(tl.int32)) > 0:
        tl.store(state + _HELD, 1)
        if ticket == 0:
            peer = tl.min(tl.where(is_lacking, lanes, LANES))
            wanted = tl.sum(tl.where(lanes == peer, needed, 0))
            there = tl.sum(tl.where(lanes == peer, capacity, 0))
            fail(context, _REMOTE_OVERFLOW, epoch, operation, peer, wanted, there, rank, LANES)


@triton.jit
def _number(
    mask, numbers, counts, group, num_tokens, num_words, num_channels, SIZE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Number the tokens with a mark in a group of `SIZE` words, tile by tile, and count them, for all channels."""
    count = tl.zeros((), tl.int32)
    for start in range(0, num_tokens, TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < num_tokens
        cells = mask + tokens.to(tl.int64) * num_words + group * SIZE
        marks = tl.load(cells, mask=is_token, other=0)
        for word in tl.static_range(1, SIZE):  # unrolled, so that no load waits for another
            marks = marks | tl.load(cells + word, mask=is_token, other=0)
        goes = (marks != 0).to(tl.int32)
        sums = tl.cumsum(goes, 0)
        targets = tokens.to(tl.int64) * (num_words // SIZE) + group
        tl.store(numbers + targets, tl.where(goes > 0, count + sums - 1, -1), mask=is_token)
        count += tl.sum(goes)
    for channel in range(num_channels):
        tl.store(counts + group * num_channels + channel, count)


@triton.jit
def _number_selections(
    topk_idx, mask, numbers, counts, per_expert, group, num_tokens, num_topk, num_ranks, num_local,
    TILE: tl.constexpr, TOPK: tl.constexpr, LOCALS: tl.constexpr,
):  # fmt: skip
    """Mark and number the tokens that select an expert of a rank, tile by tile, and count them, and the selections of
    each of its experts.
    """
    columns, local = tl.arange(0, TOPK), tl.arange(0, LOCALS)
    count = tl.zeros((), tl.int32)
    chosen = tl.zeros([LOCALS], tl.int32)
    for start in range(0, num_tokens, TILE):
        tokens = start + tl.arange(0, TILE)
        is_token = tokens < num_tokens
        is_cell = is_token[:, None] & (columns < num_topk)[None, :]
        ids = tl.load(topk_idx + tokens.to(tl.int64)[:, None] * num_topk + columns[None, :], mask=is_cell, other=-1)
        expert = ids - group * num_local
        is_local = (expert >= 0) & (expert < num_local)
        flat = tl.reshape(tl.where(is_local, expert, 0).to(tl.int32), [TILE * TOPK])
        chosen += tl.histogram(flat, LOCALS, mask=tl.reshape(is_local, [TILE * TOPK]))
        goes = tl.max(is_local.to(tl.int32), 1)
        sums = tl.cumsum(goes, 0)
        cells = tokens.to(tl.int64) * num_ranks + group
        tl.store(numbers + cells, tl.where(goes > 0, count + sums - 1, -1), mask=is_token)
        tl.store(mask + cells, goes.to(tl.int8), mask=is_token)
        count += tl.sum(goes)
    tl.store(counts + group, count)
    tl.store(per_expert + group * num_local + local, chosen, mask=local < num_local)
