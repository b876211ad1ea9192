"""What `train_moe.py` is compared with: the same exchange over `all_to_all_single`, and how long either takes.

Shape letters: T tokens of this rank, n rows that it receives, m rows that it sends, H hidden size, E experts, K
selections of a token, R ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deep_ep import Buffer
from deep_ep.moe import MoELayer, MoEOutput


class AllToAll(torch.autograd.Function):
    """`all_to_all_single` of rows; its gradient goes the same way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, recv_splits: list[int], send_splits: list[int]) -> torch.Tensor:
        """[m, ...] to [n, ...]."""
        ctx.splits = send_splits, recv_splits
        received = rows.new_empty(sum(recv_splits), *rows.shape[1:])
        dist.all_to_all_single(received, rows.contiguous(), recv_splits, send_splits)
        return received

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:
        """[n, ...] to [m, ...]."""
        return AllToAll.apply(grad, *ctx.splits), None, None


class Routes(NamedTuple):
    """Where rows go: the tokens to send [m], by destination, and how many to and from each rank."""

    token_idx: torch.Tensor
    send_splits: list[int]
    recv_splits: list[int]


def find_routes(topk_idx: torch.Tensor, num_experts: int, num_ranks: int) -> Routes:
    """Exchange counts. A token goes to a rank once, however many of its experts are there."""
    ranks = torch.where(topk_idx < 0, num_ranks, topk_idx // (num_experts // num_ranks))
    is_token_in_rank = torch.zeros(len(topk_idx), num_ranks + 1, dtype=torch.bool, device=topk_idx.device)
    is_token_in_rank = is_token_in_rank.scatter_(1, ranks, True)[:, :num_ranks]
    sent = is_token_in_rank.sum(0)
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return Routes(is_token_in_rank.T.nonzero()[:, 1], sent.tolist(), received.tolist())


class GlooMoELayer(MoELayer):
    """`MoELayer` with another exchange. The same weights, the same result."""

    def forward(self, x: torch.Tensor, num_sequences: int = 1) -> MoEOutput:
        """As in `MoELayer`."""
        tokens = x.reshape(-1, x.size(-1))
        gate = self.gate(tokens, num_sequences)
        token_idx, sent, received = find_routes(gate.topk_idx, self.num_experts, self.buffer.group_size)
        rows = AllToAll.apply(tokens[token_idx], received, sent)
        ids = AllToAll.apply(gate.topk_idx[token_idx], received, sent)
        weights = AllToAll.apply(gate.topk_weights[token_idx], received, sent)
        back = AllToAll.apply(self._run(rows, ids, weights), sent, received)
        combined = torch.zeros_like(tokens).index_add(0, token_idx, back)
        if self.shared is not None:
            combined = combined + self.shared(tokens)
        return MoEOutput(combined.view_as(x), gate.balance_loss)

    def _run(self, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """[n, H], each row the weighted sum of what this rank's experts make of it."""
        num_local = self.experts.num_local
        ids = (ids - self.buffer.rank * num_local).flatten()
        ids = torch.where((ids >= 0) & (ids < num_local), ids, num_local)
        counts = torch.bincount(ids, minlength=num_local + 1)[:num_local].tolist()
        order = ids.argsort(stable=True)[: sum(counts)]
        row_idx = order // weights.size(1)
        outputs = self.experts(rows[row_idx], counts) * weights.flatten()[order].unsqueeze(1)
        return torch.zeros_like(rows).index_add(0, row_idx, outputs.to(rows.dtype))


# How long it takes ---------------------------------------------------------------------------------------------------

_WARM_UP, _ROUNDS = 3, 15


class Shape(NamedTuple):
    """One layer's exchange: T tokens a rank, H, E, K, and the dtype of the rows."""

    num_tokens: int
    hidden: int
    num_experts: int
    topk: int
    dtype: torch.dtype

    def __str__(self) -> str:
        kind = "FP32" if self.dtype == torch.float32 else "BF16"
        return f"{self.num_tokens} tokens a rank, hidden {self.hidden}, top-{self.topk} of {self.num_experts}, {kind}"


class Transfer(NamedTuple):
    """Milliseconds of an exchange (a dispatch and a combine): medians over the rounds, of the slowest rank of each.

    Attributes:
        total_ms: By a buffer.
        transfer_ms: The same without the waiting for peers.
        gloo_ms: By gloo, along routes that are known, into memory that is there. What it waits cannot be told apart.
        ratio: Gloo's time over ours without the waiting; the median over the rounds.
    """

    total_ms: float
    transfer_ms: float
    gloo_ms: float
    ratio: float


def measure_exchange(buffer: Buffer, shape: Shape) -> Transfer:
    """Time a dispatch and its combine, by either in turns, all ranks starting together."""
    num_tokens, hidden, num_experts, topk, dtype = shape
    generator = torch.Generator().manual_seed(buffer.rank)
    x = torch.randn(num_tokens, hidden, generator=generator).to(dtype)
    topk_idx = torch.rand(num_tokens, num_experts, generator=generator).topk(topk).indices
    weights = torch.rand(num_tokens, topk, generator=generator)
    gloo = _PreallocatedGloo(x, topk_idx, weights, num_experts, buffer.group_size)

    def ours() -> torch.Tensor:
        per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
        received = buffer.dispatch(x, None, per_rank, per_node, mask, per_expert, topk_idx, weights)
        return buffer.combine(received[0], received[4])[0]

    torch.testing.assert_close(ours(), gloo())
    rounds = [(*_secs(ours, buffer), _secs(gloo, buffer)[0]) for _ in range(_WARM_UP + _ROUNDS)][_WARM_UP:]
    gathered: list[Any] = [None] * buffer.group_size
    dist.all_gather_object(gathered, rounds)
    total, transfer, theirs = (
        [max(rank[index][column] for rank in gathered) for index in range(_ROUNDS)] for column in range(3)
    )
    ratio = statistics.median(b / a for a, b in zip(transfer, theirs, strict=True))
    return Transfer(*(1e3 * statistics.median(secs) for secs in (total, transfer, theirs)), ratio)


def _secs(call: Callable[[], torch.Tensor], buffer: Buffer) -> tuple[float, float]:
    """Seconds of a call, and without those that the buffer waited for the slowest peer."""
    before = buffer.stats()["wait_secs"]
    dist.barrier()  # nobody waits for a rank that is still elsewhere
    begin = time.perf_counter()
    call()
    secs = time.perf_counter() - begin
    after = buffer.stats()["wait_secs"]
    return secs, secs - max(late - early for early, late in zip(before, after, strict=True))


class _PreallocatedGloo:
    """The same by gloo at its best: nothing is allocated, and nobody asks how many rows come."""

    def __init__(
        self, x: torch.Tensor, topk_idx: torch.Tensor, weights: torch.Tensor, num_experts: int, num_ranks: int
    ):
        self._routes = find_routes(topk_idx, num_experts, num_ranks)
        token_idx, _, received = self._routes
        self._parts = [x, topk_idx, weights]
        self._sent = [part[token_idx] for part in self._parts]
        self._received = [part.new_zeros(sum(received), part.size(1)) for part in self._parts]
        self._back = torch.zeros_like(self._sent[0])
        self._sums, self._out = torch.zeros(x.shape), torch.zeros_like(x)
        self._wide = torch.zeros(max(self._routes.send_splits), x.size(1))

    def __call__(self) -> torch.Tensor:
        token_idx, sent, received = self._routes
        for part, out, into in zip(self._parts, self._sent, self._received, strict=True):
            torch.index_select(part, 0, token_idx, out=out)
            dist.all_to_all_single(into, out, received, sent)
        dist.all_to_all_single(self._back, self._received[0], sent, received)
        self._sums.zero_()
        for rows, tokens in zip(self._back.split(sent), token_idx.split(sent), strict=True):
            is_narrow = rows.dtype != torch.float32  # sums are FP32, as ours are
            self._sums.index_add_(0, tokens, self._wide[: len(rows)].copy_(rows) if is_narrow else rows)
        return self._out.copy_(self._sums)
