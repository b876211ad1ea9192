"""The data of a call, for all ranks: bits of every dtype, in every layout that the interface takes.

Every rank makes the inputs of all ranks, so each knows what it must receive without asking. They come out of one pool
of random bytes, at offsets that follow from the segment's seed, the call's number, the rank and the purpose: so making
them costs no more than copying, and what belongs to another call, rank or row is different bytes.
"""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass
from typing import NamedTuple

import torch

from . import oracle
from .layouts import SCALE_LAYOUTS, SUMMABLE, X_LAYOUTS, integers_of, resolved, without_nan
from .seeds import mixed

PAYLOADS = (
    *SUMMABLE,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.float8_e4m3fnuz,
    torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu,
    torch.uint8,
    torch.int8,
    torch.int16,
    torch.uint16,
    torch.int32,
    torch.uint32,
    torch.int64,
    torch.uint64,
    torch.bool,
    torch.complex64,
    torch.complex128,
)
_SCALE_DTYPES = (torch.float32, torch.int32, torch.uint8, torch.float8_e8m0fnu, torch.bfloat16, torch.float64)

# Purposes of data: each has bytes of its own.
X, SCALES, IDS, WEIGHTS, MASK, ROWS, ROW_WEIGHTS, BIAS, SECOND_BIAS, EXPERTS, TOKENS = range(11)

_POOL_BYTES, _POOL_SEED, _POOL_ALIGNMENT = 1 << 22, 17, 16


@functools.cache
def _pool() -> torch.Tensor:
    """Random bytes, the same in every process; twice in a row, so that any piece of it lies in one piece."""
    half = random.Random(_POOL_SEED).randbytes(_POOL_BYTES)
    return torch.frombuffer(bytearray(half + half), dtype=torch.uint8)


@dataclass(frozen=True)
class Palette:
    """The few sizes and types that calls on a GPU are made of: kernels are compiled for each, which takes a second.

    Attributes:
        hiddens: Channels of a row.
        topks: Selections of a token.
        dtypes: Of payloads.
        scales: Type, number and layouts of scales.
        low_latency: Most tokens, channels, experts of a rank and selections of low-latency rounds.
    """

    hiddens: tuple[int, ...]
    topks: tuple[int, ...]
    dtypes: tuple[torch.dtype, ...]
    scales: tuple[torch.dtype, int, tuple[str, ...]]
    low_latency: tuple[tuple[int, int, int, int], ...]

    @classmethod
    def draw(cls, seed: int) -> Palette:
        """One of them. The seeds of a hundred have the same one, so that soaks side by side share their kernels."""
        draw = random.Random(mixed(seed // 100, 3))
        sized = {size: [dtype for dtype in PAYLOADS if dtype.itemsize == size] for size in (1, 2, 4, 8, 16)}
        return cls(
            hiddens=(draw.choice((1, 7)), draw.choice((128, 200, 1000, 4000))),
            topks=(draw.choice((1, 2, 3)), draw.choice((8, 9, 64))),
            dtypes=(*(draw.choice(dtypes) for dtypes in sized.values()), draw.choice(SUMMABLE)),
            scales=(draw.choice(_SCALE_DTYPES), draw.choice((1, 5, 32)), tuple(draw.sample(SCALE_LAYOUTS, 3))),
            low_latency=(
                (draw.choice((1, 5)), draw.choice((1, 33)), draw.choice((1, 4)), draw.choice((1, 4))),
                (12, draw.choice((128, 300)), draw.choice((1, 3)), draw.choice((2, 9))),
            ),
        )


@dataclass(frozen=True)
class Limits:
    """How large calls are at most.

    Attributes:
        tokens: Of a rank.
        hidden: Channels of a row.
        topk: Selections of a token.
        experts_per_rank: Experts of a rank.
        scales: Scales of a row.
        palette: Draw sizes and types from there; None: any.
    """

    tokens: int = 20
    hidden: int = 40
    topk: int = 8
    experts_per_rank: int = 4
    scales: int = 5
    palette: Palette | None = None


class RankPayload(NamedTuple):
    """What a rank sends.

    Attributes:
        values: [T, H] contiguous: what peers must receive, to the bit.
        scales: [T, S] likewise, or None.
    """

    values: torch.Tensor
    scales: torch.Tensor | None


@dataclass(frozen=True)
class PayloadForm:
    """What the payloads of all ranks are like.

    Attributes:
        dtype: Of x.
        hidden: H.
        x_layout: How x lies in memory.
        scale_dtype: Of the scales; None: there are none.
        num_scales: S.
        scale_layout: How scales lie in memory.
    """

    dtype: torch.dtype
    hidden: int
    x_layout: str
    scale_dtype: torch.dtype | None = None
    num_scales: int = 0
    scale_layout: str = "rows"


class GroupRouting(NamedTuple):
    """Where the tokens of all ranks go; each list has an item for each rank.

    Attributes:
        num_experts: E.
        ids: [T, K] int32 or int64.
        weights: [T, K] float32, any bits.
        layouts: What `get_dispatch_layout` says of the ids.
        masks: [T, R] bool: where tokens are sent. As a rule, that of the layout.
    """

    num_experts: int
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]
    layouts: list[oracle.TokenLayout]
    masks: list[torch.Tensor]


class Data:
    """The data of one call.

    Args:
        seed: Of the segment.
        number: Of the call.
        num_ranks: R.
        num_nodes: Nodes of the ranks.
        limits: How large calls are at most.

    Attributes:
        draw: Decides everything about the call that is not data, alike on all ranks.
    """

    def __init__(self, seed: int, number: int, num_ranks: int, num_nodes: int, limits: Limits):
        self.draw = random.Random(mixed(seed, number, 1))
        self.num_ranks, self.num_nodes, self.limits = num_ranks, num_nodes, limits
        self._seed, self._number = seed, number

    # Sizes -----------------------------------------------------------------------------------------------------------

    def num_tokens(self) -> list[int]:
        """How many tokens each rank has; now and then none at all, anywhere."""
        most = self.limits.tokens
        if self.draw.random() < 0.03:
            return [0] * self.num_ranks
        return [self.draw.choice((0, 1, most, self.draw.randint(0, most))) for _ in range(self.num_ranks)]

    def hidden(self) -> int:
        """A hidden size: one, an odd one, or whatever."""
        most = self.limits.hidden
        if self.limits.palette is not None:
            return self.draw.choice(self.limits.palette.hiddens)
        return self.draw.choice((1, min(most, 2 * self.draw.randint(0, 8) + 1), *[self.draw.randint(1, most)] * 3))

    def num_experts(self) -> int:
        """Few experts, as a rule, so that they have many tokens; now and then as many as there may be."""
        most = self.limits.experts_per_rank
        few = self.draw.randint(1, min(4, most))
        return self.num_ranks * (self.draw.randint(1, most) if self.draw.random() < 0.05 else few)

    def num_topk(self) -> int:
        """Few selections, as a rule; now and then as many as there may be."""
        most = self.limits.topk
        if self.limits.palette is not None:
            return self.draw.choice(self.limits.palette.topks)
        return self.draw.randint(1, most if self.draw.random() < 0.1 else min(6, most))

    # Tensors ---------------------------------------------------------------------------------------------------------

    def bits(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int, purpose: int) -> torch.Tensor:
        """Random bits: a view of the pool, not to be written."""
        num_bytes = dtype.itemsize
        for size in shape:
            num_bytes *= size
        start = mixed(self._seed, self._number, rank, purpose) % _POOL_BYTES // _POOL_ALIGNMENT * _POOL_ALIGNMENT
        pool = _pool()
        if start + num_bytes > pool.numel():
            pool = pool.repeat(-(-num_bytes // pool.numel()) + 1)
        piece = pool[start : start + num_bytes]
        if dtype == torch.bool:
            return (piece & 1).view(dtype).view(shape)
        return piece.view(dtype).view(shape)

    def numbers(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int, purpose: int) -> torch.Tensor:
        """Numbers of any magnitude (random bits), or such whose sums are rounded (a few hundred, with fractions)."""
        if self._has_any_magnitude:
            return self.bits(shape, dtype, rank, purpose)
        return (self.bits(shape, torch.int16, rank, purpose).float() / 128).to(dtype)

    @functools.cached_property
    def _has_any_magnitude(self) -> bool:
        return mixed(self._seed, self._number, 2) % 2 == 0

    def integers(self, shape: tuple[int, ...], rank: int, purpose: int) -> torch.Tensor:
        """Float32 integers from -8 to 7: sums of them are exact in any order."""
        return (self.bits(shape, torch.uint8, rank, purpose) % 16).float() - 8

    # Payloads --------------------------------------------------------------------------------------------------------

    def form(self) -> PayloadForm:
        """What payloads are like."""
        draw = self.draw
        palette = self.limits.palette
        dtype, hidden = draw.choice(PAYLOADS if palette is None else palette.dtypes), self.hidden()
        x_layout = draw.choice(X_LAYOUTS)
        if draw.random() < 0.6:
            return PayloadForm(dtype, hidden, x_layout)
        if palette is not None:
            scale_dtype, columns, layouts = palette.scales
            return PayloadForm(dtype, hidden, x_layout, scale_dtype, columns, draw.choice(layouts))
        columns = draw.randint(1, self.limits.scales)
        return PayloadForm(dtype, hidden, x_layout, draw.choice(_SCALE_DTYPES), columns, draw.choice(SCALE_LAYOUTS))

    def payload(self, form: PayloadForm, num_tokens: int, rank: int) -> RankPayload:
        """What a rank sends."""
        values = self.bits((num_tokens, form.hidden), form.dtype, rank, X)
        if form.x_layout == "lazy":
            values = resolved(without_nan(values))
        if form.scale_dtype is None:
            return RankPayload(values, None)
        scales = self.bits((num_tokens, form.num_scales), form.scale_dtype, rank, SCALES)
        if form.scale_layout == "expanded" and num_tokens:
            scales = integers_of(scales)[:1].expand(num_tokens, -1).contiguous().view(form.scale_dtype)
        return RankPayload(values, scales)

    # Routing ---------------------------------------------------------------------------------------------------------

    def routing(self, num_tokens: list[int]) -> GroupRouting:
        """Ids with duplicates, negative ones, ones beyond the experts, and now and then the extremes of their dtype."""
        draw = self.draw
        num_experts, num_topk = self.num_experts(), self.num_topk()
        dtype = draw.choice((torch.int32, torch.int64))
        kind = draw.choice(("any", "any", "one rank", "few experts", "extremes"))
        first = draw.randrange(num_experts)
        has_free_mask = draw.random() < 0.15  # one that does not follow the ids: it is the mask that counts
        ids, weights, masks = [], [], []
        for rank, count in enumerate(num_tokens):
            shape = (count, num_topk)
            raw = self.bits(shape, torch.int64, rank, IDS)
            ids.append(_ids(raw, kind, num_experts, first, self.num_ranks, dtype))
            weights.append(self.bits(shape, torch.float32, rank, WEIGHTS))
            masks.append(self.bits((count, self.num_ranks), torch.bool, rank, MASK))
        layouts = [oracle.layout(one, num_experts, self.num_ranks, self.num_nodes) for one in ids]
        return GroupRouting(
            num_experts, ids, weights, layouts, masks if has_free_mask else [one.mask for one in layouts]
        )


def _ids(
    raw: torch.Tensor, kind: str, num_experts: int, first: int, num_ranks: int, dtype: torch.dtype
) -> torch.Tensor:
    """Expert ids out of random 64-bit numbers."""
    num_local = num_experts // num_ranks
    ids = raw % (num_experts + 4) - 2  # two on either side select nothing
    if kind == "one rank":
        ids = first // num_local * num_local + raw % num_local
    elif kind == "few experts":
        ids = (first + raw % 2) % num_experts
    elif kind == "extremes":
        limits = torch.iinfo(dtype)
        wild = torch.tensor([limits.min, limits.max, -1, num_experts, num_experts - 1, 0, limits.min + 1, limits.max])
        ids = torch.where(raw % 3 == 0, wild[(raw >> 8) % 8], ids)
    return ids.to(dtype)
