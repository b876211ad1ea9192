"""The MoE layer of the demo: tokens, routes and experts out of a seed, and the layer computed without communication.

Letters: R ranks, T tokens per rank, H hidden size, E experts, L = E / R of them per rank, K experts per token, n rows
that a rank received, I inner size of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

_INNER = 16  # I: the experts are there to be checked, not to keep the machine busy
_TOLERANCE = 1e-5  # of the largest expected value; the sums are FP32, in another order than the dense layer's


@dataclass(frozen=True)
class Shape:
    """The size of the demo.

    Attributes:
        num_ranks: R.
        num_tokens: T, tokens of each rank.
        hidden: H.
        num_experts: E, a multiple of R.
        num_topk: K.
        seed: What everything random follows from.
        device: `cpu` or `cuda`, of all ranks.
    """

    num_ranks: int
    num_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    seed: int
    device: str = "cpu"

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.num_experts // self.num_ranks

    def num_mb(self, num_rows: int) -> float:
        """Megabytes of BF16 rows."""
        return num_rows * self.hidden * 2 / 1e6


@dataclass(frozen=True)
class Tokens:
    """What one rank starts with.

    Attributes:
        x: [T, H] BF16.
        topk_idx: [T, K] int64, the experts of each token.
        topk_weights: [T, K] float32, which sum to 1 for each token.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor

    def to(self, device: torch.device) -> Tokens:
        """The same on a device."""
        return Tokens(self.x.to(device), self.topk_idx.to(device), self.topk_weights.to(device))


@dataclass(frozen=True)
class Expert:
    """A SwiGLU block in FP32.

    Attributes:
        up: [H, 2I], gate and value side by side.
        down: [I, H].
    """

    up: torch.Tensor
    down: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, H] of any float dtype to [n, H] float32."""
        gate, value = (x.float() @ self.up).chunk(2, dim=1)
        return (F.silu(gate) * value) @ self.down

    def to(self, device: torch.device) -> Expert:
        """The same on a device."""
        return Expert(self.up.to(device), self.down.to(device))


def _generator(shape: Shape, kind: int, index: int) -> torch.Generator:
    # torch's CPU generator looks at 32 bits of a seed: mix all three numbers into those.
    return torch.Generator().manual_seed((shape.seed * 1_000_003 + kind * 65_537 + index) % 2**32)


def make_tokens(shape: Shape, rank: int) -> Tokens:
    """The tokens of a rank and where they go: some experts are liked by all ranks, some by this one."""
    popular = torch.randn(shape.num_experts, generator=_generator(shape, 0, 0))
    random = _generator(shape, 1, rank)
    liked_here = torch.randn(shape.num_experts, generator=random)
    scores = torch.randn(shape.num_tokens, shape.num_experts, generator=random) + 0.6 * (popular + liked_here)
    best, topk_idx = scores.topk(shape.num_topk)
    x = torch.randn(shape.num_tokens, shape.hidden, generator=random).bfloat16()
    return Tokens(x, topk_idx, best.softmax(dim=1))


def make_expert(shape: Shape, expert: int) -> Expert:
    """The weights of one expert."""
    random = _generator(shape, 2, expert)
    up = torch.randn(shape.hidden, 2 * _INNER, generator=random) / shape.hidden**0.5
    return Expert(up, torch.randn(_INNER, shape.hidden, generator=random) / _INNER**0.5)


def dense_layer(shape: Shape) -> torch.Tensor:
    """The layer's output for the tokens of all ranks, [R * T, H] float32, computed here and without communication."""
    tokens = [make_tokens(shape, rank) for rank in range(shape.num_ranks)]
    x = torch.cat([part.x for part in tokens])
    gates = torch.zeros(x.size(0), shape.num_experts)
    gates.scatter_(1, torch.cat([part.topk_idx for part in tokens]), torch.cat([part.topk_weights for part in tokens]))
    output = torch.zeros(x.shape)
    for expert in range(shape.num_experts):
        (rows,) = gates[:, expert].nonzero(as_tuple=True)
        output.index_add_(0, rows, gates[rows, expert, None] * make_expert(shape, expert)(x[rows]))
    return output


@dataclass(frozen=True)
class Check:
    """How far a result is from what it must be."""

    max_abs_error: float
    limit: float
    largest: float

    @property
    def ok(self) -> bool:
        """Whether it is near enough. An error that is not a number is not."""
        return self.max_abs_error <= self.limit


def compare(output: torch.Tensor, expected: torch.Tensor) -> Check:
    """Compare the layer's output with the dense one; both [R * T, H] float32."""
    largest = expected.abs().max().item()
    return Check((output - expected).abs().max().item(), _TOLERANCE * largest, largest)
