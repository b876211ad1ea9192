"""What `bench normal` times: dispatch and combine, beside gloo doing the same work, and beside a plain copy.

Rules that hold for all cases:

- Everyone starts from `is_token_in_rank` (DeepEP's `get_dispatch_layout` is a call of its own) and from rows that lie
  ready. Rows that stay on their rank count, for all variants.
- `gloo_preallocated` is `all_to_all_single` at its best: splits known, all memory made and touched beforehand, rows
  gathered in the widest elements. It never exchanges counts, not even beside a full dispatch, which does.
- `gloo_as_written` is the same as users write it: index by destination, exchange counts, make tensors in the call.
- The floor copies as many bytes as the case declares, between two warm buffers, on all ranks at once. Those two
  buffers are gloo's preallocated ones too: at DeepEP's setting each is hundreds of megabytes.
- Dispatch declares the bytes that a rank receives, combine those that it reads.

Shape letters: T tokens, H hidden, K top-k, E experts, R ranks, n rows received, m rows sent.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..buffers.legacy import Buffer
from ..errors import EPError
from ..kernels.rows import as_bytes, rows_as
from ..quant import per_token_cast_to_fp8
from .core import FLOOR, GLOO, GLOO_AS_WRITTEN, PRODUCT, PRODUCT_BF16, Variant, time_rounds

_LINE_BYTES = 64
_BF16_STEP = 2.0**-7  # two sums that round to neighbouring BF16 values differ by this part of themselves


# The setting ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """The shape of the work, the same on every rank.

    Attributes:
        num_tokens: T, tokens of each rank.
        hidden: H.
        num_topk: K.
        num_experts: E, of all ranks together.
        num_groups: Groups that the experts are split into; 0: routing is not group-limited.
        num_topk_groups: Groups that a token may use.
        num_rounds: Rounds that are timed.
        seed: Of rows and routes.
    """

    num_tokens: int = 4096
    hidden: int = 7168
    num_topk: int = 8
    num_experts: int = 256
    num_groups: int = 0
    num_topk_groups: int = 0
    num_rounds: int = 15
    seed: int = 0

    def check(self) -> None:
        """Refuse what cannot be routed, with `ValueError`."""
        for name in ("num_tokens", "hidden", "num_topk", "num_experts", "num_rounds"):
            if getattr(self, name) < 1:
                raise ValueError(f"bench: `{name}` must be at least 1, got {getattr(self, name)}")
        if bool(self.num_groups) != bool(self.num_topk_groups):
            raise ValueError("bench: --groups and --topk-groups go together, got only one of them")
        if not self.num_groups:
            reachable = self.num_experts
        elif self.num_groups < 0 or self.num_experts % self.num_groups:
            raise ValueError(f"bench: --groups must divide the {self.num_experts} experts, got {self.num_groups}")
        elif not 1 <= self.num_topk_groups <= self.num_groups:
            raise ValueError(f"bench: --topk-groups must be within 1..{self.num_groups}, got {self.num_topk_groups}")
        else:
            reachable = self.num_experts // self.num_groups * self.num_topk_groups
        if self.num_topk > reachable:
            raise ValueError(f"bench: a token can reach {reachable} experts, too few for --topk {self.num_topk}")


def reason_to_skip(setting: Setting, num_ranks: int, available_bytes: int | None) -> str | None:
    """Why this group size cannot run here, or None.

    Args:
        setting: The setting.
        num_ranks: R.
        available_bytes: Memory that is free; None if that is not known.
    """
    if num_ranks < 1:
        return f"there is no group of {num_ranks} ranks"
    if setting.num_experts % num_ranks:
        return f"{setting.num_experts} experts cannot be shared by {num_ranks} ranks"
    needed = _needed_bytes(setting, num_ranks)
    if available_bytes is not None and needed > available_bytes:
        return f"needs about {needed / 2**30:.1f} GiB of memory, {available_bytes / 2**30:.1f} are available"
    return None


def _needed_bytes(setting: Setting, num_ranks: int) -> int:
    """About the peak of the hungriest case, combine: six times the rows (gloo as written takes FP32 copies)."""
    rows = setting.num_tokens * num_ranks * (1 - (1 - 1 / num_ranks) ** setting.num_topk)
    return int(num_ranks * setting.hidden * (6.5 * 2 * rows + 16 * setting.num_tokens))


def route(setting: Setting, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose experts by random scores; group-limited if the setting says so.

    Group-limited: of each token, only the groups with the best scores stay, judged by their best expert.

    Returns:
        `topk_idx` [T, K] int64 and `topk_weights` [T, K] float32.
    """
    scores = torch.rand(setting.num_tokens, setting.num_experts, generator=generator)
    if setting.num_groups:
        groups = scores.view(setting.num_tokens, setting.num_groups, -1)
        best = groups.amax(2).topk(setting.num_topk_groups).indices
        stays = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        scores = groups.masked_fill(~stays.unsqueeze(2), -1.0).flatten(1)
    weights, idx = scores.topk(setting.num_topk)
    return idx, weights


# One rank's inputs ---------------------------------------------------------------------------------------------------


class Routes(NamedTuple):
    """Where rows go, as gloo needs to know it.

    Attributes:
        token_idx: [m] int64, the tokens to send, by destination and then in order.
        send_splits: R numbers of rows to send.
        recv_splits: R numbers of rows to receive.
    """

    token_idx: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]


@dataclass(frozen=True)
class Inputs:
    """What one rank brings to every case.

    Attributes:
        setting: The setting.
        rank: This rank.
        num_ranks: R.
        x: [T, H] bfloat16.
        topk_idx: [T, K] int64.
        topk_weights: [T, K] float32.
        is_token_in_rank: [T, R] bool.
        layout: The layout arguments of a full dispatch.
        routes: The same for gloo.
    """

    setting: Setting
    rank: int
    num_ranks: int
    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor
    is_token_in_rank: torch.Tensor
    layout: dict[str, Any]
    routes: Routes


def make_inputs(setting: Setting, rank: int, num_ranks: int, buffer: Buffer) -> Inputs:
    """Draw rows and routes, and tell all ranks the counts."""
    generator = torch.Generator().manual_seed(setting.seed * 1000 + rank)
    x = torch.randn(setting.num_tokens, setting.hidden, generator=generator).bfloat16()
    idx, weights = route(setting, generator)
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(idx, setting.num_experts)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": mask, "num_tokens_per_expert": per_expert}
    return Inputs(setting, rank, num_ranks, x, idx, weights, mask, layout, _find_routes(mask))


def _find_routes(is_token_in_rank: torch.Tensor) -> Routes:
    """Index by destination and exchange the counts."""
    by_rank = [column.nonzero().view(-1) for column in is_token_in_rank.t()]
    counts = torch.tensor([tokens.numel() for tokens in by_rank])
    recv_counts = torch.empty_like(counts)
    dist.all_to_all_single(recv_counts, counts)
    return Routes(torch.cat(by_rank), counts.tolist(), recv_counts.tolist())


def make_buffer(setting: Setting, num_ranks: int) -> Buffer:
    """A buffer of the size that DeepEP's users give it."""
    num_bytes = Buffer.get_dispatch_config(num_ranks).get_nvl_buffer_size_hint(2 * setting.hidden, num_ranks)
    return Buffer(dist.group.WORLD, num_bytes, 0, explicitly_destroy=True)


# Cases ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """One line of the table, ready to be timed on this rank.

    Attributes:
        num_bytes: What this rank moves.
        variants: Product, peers and floor.
        same: Whether two delivered tensors agree.
    """

    num_bytes: int
    variants: list[Variant]
    same: Callable[[torch.Tensor, torch.Tensor], bool] = torch.equal


def dispatch_case(inputs: Inputs, buffer: Buffer, *, fp8: bool, cached: bool) -> Case:
    """Full dispatch (counts exchanged, ids and weights sent along), or cached dispatch (layout known, rows only).

    FP8: E4M3 rows and [T, H / 128] float32 scales; the same call in BF16 is timed beside it.
    """
    payload = per_token_cast_to_fp8(inputs.x) if fp8 else inputs.x
    product = _product_dispatch(inputs, buffer, payload, cached)
    parts = list(payload) if isinstance(payload, tuple) else [payload]
    if not cached:
        parts += [inputs.topk_idx, inputs.topk_weights]
    parts = [as_bytes(part) if part.element_size() == 1 else part for part in parts]  # gloo knows no FP8
    row_bytes = [_row_bytes(part) for part in parts]
    num_recv, num_sent = sum(inputs.routes.recv_splits), sum(inputs.routes.send_splits)
    # The floor reads as many bytes from `near` as it writes to `far`.
    near, far = (_touched(_room(max(num_recv, num_sent), row_bytes)) for _ in range(2))
    num_bytes = num_recv * sum(row_bytes)
    preallocated = partial(
        exchange_preallocated,
        [as_bytes(part) for part in parts],
        _carve(near, num_sent, row_bytes),
        _carve(far, num_recv, row_bytes),
        inputs.routes,
    )
    as_written = partial(exchange_as_written, parts, inputs.is_token_in_rank)
    outputs = partial(_exchanged, inputs, not cached)
    variants = [
        Variant(PRODUCT, product, _dispatched),
        Variant(GLOO, preallocated, outputs),
        Variant(GLOO_AS_WRITTEN, as_written, outputs),
        Variant(FLOOR, partial(far[:num_bytes].copy_, near[:num_bytes])),
    ]
    if fp8:
        variants.append(Variant(PRODUCT_BF16, _product_dispatch(inputs, buffer, inputs.x, cached)))
    return Case(num_bytes, variants)


def combine_case(inputs: Inputs, buffer: Buffer, *, in_window: bool) -> Case:
    """Combine of BF16 rows that lie in the window (`get_combine_buffer`), or elsewhere."""
    recv_x, _, _, _, handle, _ = buffer.dispatch(inputs.x, **inputs.layout)
    assert isinstance(recv_x, torch.Tensor)
    assert handle is not None
    num_recv, num_sent, row_bytes = recv_x.size(0), sum(inputs.routes.send_splits), _row_bytes(inputs.x)
    near, far = (_touched(_room(max(num_recv, num_sent), [row_bytes])) for _ in range(2))
    elsewhere = rows_as(_carve(near, num_recv, [row_bytes])[0], torch.bfloat16)
    rows = buffer.get_combine_buffer(handle) if in_window else elsewhere
    # Another factor on each rank: a row summed from the wrong rank must show.
    torch.mul(recv_x, inputs.rank + 1, out=rows)
    back = rows_as(_carve(far, num_sent, [row_bytes])[0], torch.bfloat16)
    num_bytes = num_sent * row_bytes
    variants = [
        Variant(PRODUCT, partial(buffer.combine, rows, handle), lambda result: [result[0]]),
        Variant(GLOO, PreallocatedCombine(rows, back, inputs), lambda sums: [sums]),
        Variant(
            GLOO_AS_WRITTEN, partial(combine_as_written, rows, inputs.routes, inputs.x.size(0)), lambda sums: [sums]
        ),
        Variant(FLOOR, partial(far[:num_bytes].copy_, near[:num_bytes])),
    ]
    return Case(num_bytes, variants, _same_sums)


CASES: dict[str, tuple[str, Callable[[Inputs, Buffer], Case]]] = {
    "dispatch-bf16": ("dispatch, BF16", partial(dispatch_case, fp8=False, cached=False)),
    "cached-bf16": ("cached dispatch, BF16", partial(dispatch_case, fp8=False, cached=True)),
    "dispatch-fp8": ("dispatch, FP8", partial(dispatch_case, fp8=True, cached=False)),
    "cached-fp8": ("cached dispatch, FP8", partial(dispatch_case, fp8=True, cached=True)),
    "combine-window": ("combine, BF16, in window", partial(combine_case, in_window=True)),
    "combine-elsewhere": ("combine, BF16, elsewhere", partial(combine_case, in_window=False)),
}
"""By name: how a table calls it, and how a rank makes it."""


# The product ---------------------------------------------------------------------------------------------------------


def _product_dispatch(
    inputs: Inputs, buffer: Buffer, payload: torch.Tensor | tuple[torch.Tensor, torch.Tensor], cached: bool
) -> Callable[[], Any]:
    if cached:
        handle = buffer.dispatch(payload, **inputs.layout)[4]
        return partial(buffer.dispatch, payload, handle=handle)
    return partial(
        buffer.dispatch, payload, **inputs.layout, topk_idx=inputs.topk_idx, topk_weights=inputs.topk_weights
    )


def _dispatched(result: tuple) -> list[torch.Tensor]:
    """What a dispatch of the product delivered: rows, scales, ids, weights, as far as it has them."""
    recv_x, recv_topk_idx, recv_topk_weights = result[:3]
    rows = list(recv_x) if isinstance(recv_x, tuple) else [recv_x]
    parts = [*rows, recv_topk_idx, recv_topk_weights]
    return [as_bytes(part) for part in parts if part is not None]


# The peers -----------------------------------------------------------------------------------------------------------


def exchange_preallocated(
    parts: Sequence[torch.Tensor], sends: Sequence[torch.Tensor], recvs: Sequence[torch.Tensor], routes: Routes
) -> Sequence[torch.Tensor]:
    """Dispatch by gloo into memory that is there, along known routes.

    Args:
        parts: Matrices of bytes, one row a token.
        sends: [m, W] uint8 for each part, written.
        recvs: [n, W] uint8 for each part, written.
        routes: Where the rows go.
    """
    for part, send, recv in zip(parts, sends, recvs, strict=True):
        torch.index_select(_wide(part), 0, routes.token_idx, out=_wide(send))
        dist.all_to_all_single(recv, send, routes.recv_splits, routes.send_splits)
    return recvs


def exchange_as_written(parts: Sequence[torch.Tensor], is_token_in_rank: torch.Tensor) -> list[torch.Tensor]:
    """Dispatch by gloo as users write it.

    Args:
        parts: Matrices, one row a token.
        is_token_in_rank: [T, R] bool.

    Returns:
        Of each part, the rows received.
    """
    routes = _find_routes(is_token_in_rank)
    received = []
    for part in parts:
        recv = torch.empty(sum(routes.recv_splits), part.size(1), dtype=part.dtype)
        dist.all_to_all_single(recv, part[routes.token_idx], routes.recv_splits, routes.send_splits)
        received.append(recv)
    return received


def _exchanged(inputs: Inputs, has_topk: bool, received: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What gloo delivered, with the ids made local as the product does it."""
    parts = list(received)
    if has_topk:
        num_local = inputs.setting.num_experts // inputs.num_ranks
        ids = rows_as(parts[-2], torch.int64) - inputs.rank * num_local
        is_local = (ids >= 0) & (ids < num_local)
        parts[-2] = torch.where(is_local, ids, -1)
        parts[-1] = torch.where(is_local, rows_as(parts[-1], torch.float32), 0.0)
    return [as_bytes(part) for part in parts]


class PreallocatedCombine:
    """Combine by gloo into memory that is there: rows back, then sums in FP32, one source after the other.

    Args:
        rows: [n, H] bfloat16 to give back.
        back: [m, H] bfloat16, where rows come back to.
        inputs: The rank's inputs.
    """

    def __init__(self, rows: torch.Tensor, back: torch.Tensor, inputs: Inputs):
        self._rows = rows
        self._back = back
        self._routes = inputs.routes
        self._sums = torch.zeros(inputs.x.shape, dtype=torch.float32)
        self._one_source = torch.zeros(max(inputs.routes.send_splits), rows.size(1), dtype=torch.float32)
        self._out = torch.zeros_like(inputs.x)

    def __call__(self) -> torch.Tensor:
        """Returns the sums, [T, H] bfloat16."""
        token_idx, send_splits, recv_splits = self._routes
        dist.all_to_all_single(self._back, self._rows, send_splits, recv_splits)
        self._sums.zero_()
        for rows, tokens in zip(self._back.split(send_splits), token_idx.split(send_splits), strict=True):
            self._sums.index_add_(0, tokens, self._one_source[: rows.size(0)].copy_(rows))
        return self._out.copy_(self._sums)


def combine_as_written(rows: torch.Tensor, routes: Routes, num_tokens: int) -> torch.Tensor:
    """Combine by gloo as users write it.

    Args:
        rows: [n, H] to give back.
        routes: Those of the dispatch.
        num_tokens: T.

    Returns:
        [T, H] of the rows' dtype.
    """
    back = torch.empty(sum(routes.send_splits), rows.size(1), dtype=rows.dtype)
    dist.all_to_all_single(back, rows, routes.send_splits, routes.recv_splits)
    sums = torch.zeros(num_tokens, rows.size(1), dtype=torch.float32)
    sums.index_add_(0, routes.token_idx, back.float())
    return sums.to(rows.dtype)


def _same_sums(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=_BF16_STEP, atol=1e-3)


# Memory --------------------------------------------------------------------------------------------------------------


def _row_bytes(rows: torch.Tensor) -> int:
    return rows.size(1) * rows.element_size()


def _room(num_rows: int, row_bytes: Sequence[int]) -> int:
    """Bytes for some rows of every part, each part on a cache line of its own."""
    return sum(num_rows * width + _LINE_BYTES for width in row_bytes)


def _wide(rows: torch.Tensor) -> torch.Tensor:
    """The same rows [n, W] uint8 in the widest elements that fit: gathering costs by the element."""
    fitting = (dtype for dtype in (torch.int64, torch.int32, torch.int16) if rows.size(1) % dtype.itemsize == 0)
    return rows_as(rows, next(fitting, torch.uint8))


def _touched(num_bytes: int) -> torch.Tensor:
    """Memory whose pages are all there: `zeros` would leave them to the first one who writes."""
    return torch.empty(num_bytes, dtype=torch.uint8).fill_(1)


def _carve(memory: torch.Tensor, num_rows: int, row_bytes: Sequence[int]) -> list[torch.Tensor]:
    """Matrices [num_rows, W] uint8 one after the other in `memory`, each on a cache line of its own."""
    start, carved = 0, []
    for width in row_bytes:
        carved.append(memory[start : start + num_rows * width].view(num_rows, width))
        start += -(-num_rows * width // _LINE_BYTES) * _LINE_BYTES
    return carved


# A rank's work -------------------------------------------------------------------------------------------------------


class RankMeasured(NamedTuple):
    """One rank's part of a case: the bytes that it moves, and its seconds of each variant."""

    num_bytes: int
    times: dict[str, list[float]]


class Note(NamedTuple):
    """What rank 0 says on its way: so many rounds of a case are done."""

    num_ranks: int
    case: str
    num_done: int


def run_cases(
    rank: int, num_ranks: int, setting: Setting, names: Sequence[str], notes: Connection | None = None
) -> list[RankMeasured]:
    """Check and time cases, one after the other. Runs on every rank.

    Args:
        rank: This rank.
        num_ranks: R.
        setting: The setting.
        names: Keys of `CASES`.
        notes: Where rank 0 sends a `Note` when a case begins and after each round.
    """
    tell = notes.send if notes is not None and rank == 0 else _say_nothing
    results = []
    for name in names:
        tell(Note(num_ranks, name, 0))
        results.append(_run_case(rank, num_ranks, setting, name, tell))
        gc.collect()  # hundreds of megabytes that the next case would come on top of
    return results


def _run_case(rank: int, num_ranks: int, setting: Setting, name: str, tell: Callable[[Note], object]) -> RankMeasured:
    buffer = make_buffer(setting, num_ranks)
    try:
        case = CASES[name][1](make_inputs(setting, rank, num_ranks, buffer), buffer)
        check_outputs(case, name, rank, num_ranks)
        times = time_rounds(
            case.variants, setting.num_rounds, dist.barrier, on_round=lambda done: tell(Note(num_ranks, name, done))
        )
    finally:
        buffer.destroy()
    return RankMeasured(case.num_bytes, times)


def check_outputs(case: Case, name: str, rank: int, num_ranks: int) -> None:
    """Call every variant once, and refuse to time what does not deliver the same.

    Raises:
        EPError: A peer delivered something else than the product.
    """
    expected: list[torch.Tensor] = []
    for variant in case.variants:
        result = variant.call()
        if variant.outputs is None:
            continue
        if variant.name == PRODUCT:
            expected = variant.outputs(result)
            continue
        outputs = variant.outputs(result)
        pairs_agree = [case.same(one, other) for one, other in zip(expected, outputs, strict=True)]
        if not all(pairs_agree):
            raise EPError(
                f"bench {name}: {variant.name} and {PRODUCT} must deliver the same, but they differ in tensors "
                f"{[index for index, agrees in enumerate(pairs_agree) if not agrees]} of {len(expected)} "
                f"(rank {rank}/{num_ranks}). One of them is wrong: nothing was timed"
            )


def _say_nothing(_: Note) -> None:
    pass
