"""Kernels of normal calls as plain functions: each builds what a call of its signature keeps, and uses it once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from windows import Boards, synchronize

from deep_ep.kernels.exchange import NUM_SECTIONS, STATE_ENDED, STATE_FAILED, Context
from deep_ep.kernels.notify import (
    CopyingHandshake,
    Counted,
    Handshake,
    HandshakeForm,
    Nodes,
    Numbered,
    Post,
    Terms,
    node_word,
)
from deep_ep.kernels.pull import Given, Pull
from deep_ep.kernels.put import End, LaunchShape, Put, Received, RowSpec, Unpack, word_of

ANNOUNCED, OFFERED, READY, TAKEN = 1, 2, 3, 4
DISPATCH, COMBINE = 0, 3  # operations
SAME = (17, 4)  # what all ranks agree in


def rows_of(
    x: torch.Tensor,
    scales: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    has_records: bool,
    keeps_weights: bool = False,
) -> RowSpec:
    """What rows of these tensors are made of."""
    word, is_aligned = word_of(x)
    return RowSpec(
        x.size(1) * x.element_size(),
        word,
        is_aligned,
        scales.size(1) if scales is not None else 0,
        scales.element_size() if scales is not None else 0,
        has_records,
        topk_idx.size(1) if topk_idx is not None else 0,
        topk_idx.dtype if topk_idx is not None else torch.int32,
        keeps_weights,
    )


def int32(values: list, device: str) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=device)


# Moving rows ---------------------------------------------------------------------------------------------------------


def put_rows(
    context: Context,
    shape: LaunchShape,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    slots: torch.Tensor,
    send_head: torch.Tensor | None,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    num_local: int,
    keeps_weights: bool = False,
    received: Received | None = None,
) -> None:
    """Put rows, and end the dispatch if it is said where it receives; without `send_head` along the slots of a handle,
    and without records.
    """
    rows = rows_of(x, scales, topk_idx, send_head is not None, keeps_weights)
    end = None if received is None else End(READY, DISPATCH)
    Put(context, shape, rows, num_local, end)(x, scales, slots, send_head, topk_idx, topk_weights, received)
    require_rewound(context)


def require_rewound(context: Context) -> None:
    """Check that the next kernel counts its blocks anew."""
    assert context.state[STATE_ENDED] == 0


def unpack(
    context: Context,
    num_blocks: int,
    records: torch.Tensor,
    prefix: torch.Tensor,
    sources: torch.Tensor,
    topk_idx: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    ends: torch.Tensor | None = None,
) -> None:
    """Take all records apart."""
    num_topk, idx_dtype = (0, torch.int32) if topk_idx is None else (topk_idx.size(1), topk_idx.dtype)
    take = Unpack(context, num_blocks, num_topk, idx_dtype, has_ends=ends is not None)
    take(records, records.size(0), prefix, sources, topk_idx, topk_weights, ends)


def pull_rows(
    context: Context,
    shape: LaunchShape,
    out: torch.Tensor,
    slots: torch.Tensor,
    biases: Sequence[torch.Tensor],
    weights: torch.Tensor | None = None,
    given: Given | None = None,
) -> None:
    """Sum each token's rows, and end the combine."""
    _, is_aligned = word_of(out, *biases)
    num_topk = 0 if weights is None else weights.size(1)
    if given is None:
        nothing = int32([0], out.device.type)
        given = Given(nothing, nothing, out, weights)
    end = End(READY, COMBINE)
    pull = Pull(context, shape, out.size(1), out.dtype, len(biases), is_aligned, num_topk, end)
    pull(out, weights, slots, biases, given)
    require_rewound(context)


# Handshakes ----------------------------------------------------------------------------------------------------------


def handshake(
    context: Context,
    terms: Terms,
    post: Post,
    counts: torch.Tensor | None = None,
    given: torch.Tensor | None = None,
    per_expert: torch.Tensor | None = None,
    prefix: torch.Tensor | None = None,
    *,
    nodes: Nodes | None = None,
    numbered: Numbered | None = None,
    word: torch.dtype | None = None,
    is_new: bool = True,
    sends: bool = True,
    receives: bool = True,
) -> None:
    """A handshake. Tokens are numbered if they are given, ranks of a node looked at by `word`: the widest that fits."""
    counted = None
    if counts is not None and given is not None and per_expert is not None:
        counted = Counted(counts, given, per_expert)
        terms = terms._replace(num_local=per_expert.numel() // context.num_ranks)
    if word is None:
        is_looked_at = numbered is not None and nodes is not None
        word = node_word(context, numbered.is_token_in_rank) if is_looked_at else torch.uint8
    form = HandshakeForm(
        has_counts=counted is not None,
        has_prefix=prefix is not None,
        has_nodes=nodes is not None,
        is_numbered=numbered is not None,
        word=word,
        is_new=is_new,
        sends=sends,
        receives=receives,
    )
    Handshake(context, terms, form)(post, counted, prefix, nodes, numbered)


def positions(
    is_token_in_rank: torch.Tensor,
    node_numbers: torch.Tensor | None = None,
    node_counts: torch.Tensor | None = None,
    word: torch.dtype | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Number the tokens of each rank, and of each node if there are any, by the first half of a handshake.

    Returns:
        Numbers [T, R] and counts [R].
    """
    device, num_ranks = is_token_in_rank.device.type, is_token_in_rank.size(1)
    boards = Boards(num_ranks, device)
    context, nodes = boards.contexts[-1], None
    if node_numbers is not None and node_counts is not None:
        context = replace(context, num_nodes=node_counts.size(0))
        nothing = int32([-9], device)
        nodes = Nodes(node_counts, context.state, nothing, nothing)
    numbers = torch.full(is_token_in_rank.shape, -9, dtype=torch.int32, device=device)
    counts = torch.full((num_ranks,), -9, dtype=torch.int32, device=device)
    given = is_token_in_rank.sum(0, dtype=torch.int32)
    handshake(
        context, Terms(ANNOUNCED, 0, SAME), Post(), counts, given, torch.zeros_like(given), torch.zeros_like(given),
        nodes=nodes, numbered=Numbered(is_token_in_rank, numbers, node_numbers), word=word, receives=False,
    )  # fmt: skip
    assert context.state[STATE_FAILED] == 0
    assert context.state[STATE_ENDED] == 0, "the next kernel counts its blocks anew"
    return numbers, counts


def copy_and_handshake(
    context: Context,
    terms: Terms,
    shape: LaunchShape,
    post: Post,
    prefix: torch.Tensor,
    target: torch.Tensor,
    rows: torch.Tensor,
) -> None:
    """A copy into the window whose last block does the handshake."""
    word, is_aligned = word_of(target, rows)
    num_bytes = rows.size(1) * rows.element_size()
    CopyingHandshake(context, terms, shape, num_bytes, word, is_aligned)(post, prefix, target, rows)


def all_bases(*bases: int) -> tuple[int, int, int]:
    """Where the sections of an offer are, the last ones nowhere."""
    first, second, third = (*bases, *[-1] * (NUM_SECTIONS - len(bases)))
    return first, second, third


class Announce:
    """The handshake of a full dispatch. If it is numbered, a kernel of several warps finds the counts itself."""

    def __init__(
        self,
        counts: list[int],
        per_expert: list[int],
        device: str,
        *,
        given: list[int] | None = None,
        agreement: tuple[int, int] = SAME,
        is_numbered: bool = False,
        **said: int,
    ):
        self.terms, self.post = Terms(ANNOUNCED, 0, agreement), Post(ticket=1, **said)
        self.counts, self.per_expert = int32(counts, device), int32(per_expert, device)
        self.given = int32(counts if given is None else given, device)
        self.prefix = int32([[-1] * len(counts)] * len(counts), device)
        self.numbered = None
        if is_numbered:
            tokens = torch.arange(max(counts), device=device)
            mask = tokens[:, None] < self.counts[None, :]
            self.numbered = Numbered(mask, torch.full(mask.shape, -9, dtype=torch.int32, device=device))
            self.counts.fill_(-9)

    def __call__(self, context: Context) -> None:
        handshake(
            context, self.terms, self.post, self.counts, self.given, self.per_expert, self.prefix,
            numbered=self.numbered
        )  # fmt: skip
        synchronize(context)


class Offer:
    """A handshake with offers: of a cached dispatch, or with counts of a worst-case one."""

    def __init__(
        self,
        num_rows: int,
        bases: tuple[int, ...],
        prefix: torch.Tensor,
        counts: torch.Tensor | None = None,
        **said: int,
    ):
        self.terms, self.post = Terms(OFFERED, 1, SAME), Post(num_rows, bases=all_bases(*bases), **said)
        self.prefix, self.counts = prefix, counts
        self.per_expert = None if counts is None else torch.zeros_like(counts)

    def __call__(self, context: Context) -> None:
        handshake(context, self.terms, self.post, self.counts, self.counts, self.per_expert, self.prefix)
        synchronize(context)
