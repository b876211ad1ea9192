"""Inputs of random calls. Every rank makes those of all ranks, so each knows what it must receive without asking."""

from __future__ import annotations

import random
import zlib
from typing import Any

import torch

from .. import reference
from .plan import mixed

PAYLOADS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.uint8)
SUMMABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)

# What data is for: each has a stream of numbers of its own.
_X, _SCALES, _ROUTES, _ROWS, _ROW_WEIGHTS, _FIRST_BIAS, _SECOND_BIAS = range(7)


class Inputs:
    """A source of inputs, the same on all ranks.

    Args:
        seed: Of everything.
        num_ranks: Ranks to make inputs for.
        most_tokens: Upper limit of a rank's tokens.
        most_hidden: Upper limit of the hidden size.
    """

    def __init__(self, seed: int, num_ranks: int, most_tokens: int, most_hidden: int):
        self.draw = random.Random(seed)
        self.call_idx = 0  # the data of each call is its own
        self._seed = seed
        self.num_ranks = num_ranks
        self._most_tokens, self._most_hidden = most_tokens, most_hidden
        self._data = torch.Generator()

    def num_tokens(self) -> list[int]:
        """How many tokens each rank has; now and then none at all."""

        def draw() -> int:
            return self.draw.choice([0, 1, self.draw.randint(0, self._most_tokens), self._most_tokens])

        return [0] * self.num_ranks if self.draw.random() < 0.02 else [draw() for _ in range(self.num_ranks)]

    def hidden(self) -> int:
        """A hidden size."""
        return self.draw.randint(1, self._most_hidden)

    def payload(self, num_tokens: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        """What each rank sends, and perhaps scales."""
        dtype, hidden = self.draw.choice(PAYLOADS), self.hidden()
        xs = [self._values((count, hidden), dtype, rank, _X) for rank, count in enumerate(num_tokens)]
        if self.draw.random() < 0.6:
            return xs, None
        columns, is_packed = self.draw.randint(1, 5), self.draw.random() < 0.5
        scales = [self._values((columns, count), torch.float32, rank, _SCALES) for rank, count in enumerate(num_tokens)]
        # Column-major, as callers have them.
        return xs, [(one.view(torch.int32) if is_packed else one).t() for one in scales]

    def routing(self, num_tokens: list[int]) -> dict[str, Any]:
        """Ids, weights, masks and counts of all ranks."""
        num_experts = self.num_ranks * self.draw.randint(1, 4)
        num_topk, idx_dtype = self.draw.randint(1, 5), self.draw.choice((torch.int32, torch.int64))
        free_mask = self.draw.random() < 0.2  # a mask that does not follow the ids: it is the mask that counts
        ids, weights, masks, per_expert = [], [], [], []
        for rank, count in enumerate(num_tokens):
            generator = self._seeded(rank, _ROUTES)
            drawn = torch.randint(-2, num_experts + 2, (count, num_topk), generator=generator)
            ids.append(drawn.to(idx_dtype))
            weights.append(torch.rand(count, num_topk, generator=generator))
            seen = reference.layout(drawn, num_experts, self.num_ranks)
            per_expert.append(seen.num_tokens_per_expert)
            random_mask = torch.rand(count, self.num_ranks, generator=generator) < 0.5
            masks.append(random_mask if free_mask else seen.is_token_in_rank)
        return {"ids": ids, "weights": weights, "masks": masks, "per_expert": per_expert, "num_experts": num_experts}

    def rows(self, counts: list[int], hidden: int, dtype: torch.dtype) -> list[torch.Tensor]:
        """What each rank's experts give back."""
        return [self._values((count, hidden), dtype, rank, _ROWS) for rank, count in enumerate(counts)]

    def row_weights(self, counts: list[int], num_topk: int) -> list[torch.Tensor]:
        """Weights beside those rows."""
        shapes = [(count, num_topk) for count in counts]
        return [self._values(shape, torch.float32, rank, _ROW_WEIGHTS) for rank, shape in enumerate(shapes)]

    def biases(self, num_tokens: list[int], hidden: int, dtype: torch.dtype) -> list[Any] | None:
        """Biases of a combine, in one of the forms that it takes."""
        kind = self.draw.choice(("none", "one", "two", "second"))
        if kind == "none":
            return None
        biases: list[Any] = []
        for rank, count in enumerate(num_tokens):
            first, second = (
                self._values((count, hidden), dtype, rank, purpose) for purpose in (_FIRST_BIAS, _SECOND_BIAS)
            )
            biases.append({"one": first, "two": (first, second), "second": (None, second)}[kind])
        return biases

    def seeded(self, rank: int, purpose: str) -> torch.Generator:
        """A source of numbers for one purpose of this call, the same on all ranks."""
        return self._seeded(rank, zlib.crc32(purpose.encode()))

    def _seeded(self, rank: int, purpose: int) -> torch.Generator:
        return self._data.manual_seed(mixed(self._seed, self.call_idx, rank, purpose))

    def _values(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int, purpose: int) -> torch.Tensor:
        generator = self._seeded(rank, purpose)
        if dtype.is_floating_point and dtype.itemsize > 1:
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        return torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8).view(dtype)
