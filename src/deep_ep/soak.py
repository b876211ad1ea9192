"""Random mixed calls against the oracle: the test that asks for everything at once.

All ranks draw the same plan from one seed and make every rank's inputs themselves, so each knows what it must receive
without
asking: the oracle gets all inputs and gives this rank's outputs. Everything is compared exactly.
"""

from __future__ import annotations

import gc
import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from . import reference
from .buffers.legacy import Buffer
from .event import EventOverlap

PAYLOADS = (torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.uint8)
SUMMABLE = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


@dataclass
class Dispatched:
    """A dispatch that later calls can refer to: its handle here, and what the oracle knows of all ranks."""

    handle: tuple
    masks: list[torch.Tensor]
    num_rows: list[int]  # rows of the handle on every rank, worst-case room included
    recv_x: torch.Tensor | None  # this rank's rows, while it still holds them
    rows: list[torch.Tensor]  # every rank's rows, as the oracle has them


@dataclass
class Report:
    """What a soak did."""

    calls: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)

    def count(self, kind: str) -> None:
        """Count one call."""
        self.calls[kind] = self.calls.get(kind, 0) + 1


class Mismatch(AssertionError):
    """A result differs from the oracle's."""


class Soak:
    """A plan of random calls, played on one rank.

    Args:
        buffer: This rank's buffer.
        seed: The plan; the same on all ranks.
        most_tokens: Upper limit of a rank's tokens.
        most_hidden: Upper limit of the hidden size.
    """

    def __init__(self, buffer: Buffer, seed: int, most_tokens: int = 20, most_hidden: int = 40):
        self.buffer = buffer
        self.rank, self.num_ranks = buffer.rank, buffer.group_size
        self.report = Report()
        self._plan = random.Random(seed)
        self._data = torch.Generator()
        self._seed = seed
        self._step = 0
        self._most_tokens, self._most_hidden = most_tokens, most_hidden
        self._known: list[Dispatched] = []
        self._kept: list[torch.Tensor] = []
        self._pending: deque[tuple[EventOverlap, Callable[[], None]]] = deque()

    def run(self, num_calls: int) -> Report:
        """Play `num_calls` calls, check them all, drop everything."""
        for _ in range(num_calls):
            self.step()
        self.finish()
        return self.report

    def step(self) -> None:
        """One call, and perhaps the drop of something that was kept."""
        self._step += 1
        kinds = [self._full_dispatch, self._worst_case_dispatch]
        if self._known:
            kinds += [self._cached_dispatch, self._combine, self._combine]
        self._plan.choice(kinds)()
        while self._pending and self._plan.random() < 0.6:
            self._settle()
        while len(self._known) > 4 or (self._known and self._plan.random() < 0.2):
            self._known.pop(self._plan.randrange(len(self._known)))
        while len(self._kept) > 8 or (self._kept and self._plan.random() < 0.3):
            self._kept.pop(self._plan.randrange(len(self._kept)))
        if self._plan.random() < 0.02:
            self.buffer.trim()

    def finish(self) -> None:
        """Wait for what is pending, drop what is kept, and check that the arena is empty."""
        while self._pending:
            self._settle()
        self._known.clear()
        self._kept.clear()
        gc.collect()
        self.report.stats = self.buffer.stats()
        if self.report.stats["arena"]["used"]:
            raise Mismatch(f"the arena still holds {self.report.stats['arena']}")

    # Inputs, the same on all ranks -----------------------------------------------------------------------------------

    def _seeded(self, rank: int, purpose: int) -> torch.Generator:
        return self._data.manual_seed(hash((self._seed, self._step, rank, purpose)) & 0x7FFFFFFF)

    def _values(self, shape: tuple[int, ...], dtype: torch.dtype, rank: int, purpose: int) -> torch.Tensor:
        generator = self._seeded(rank, purpose)
        if dtype.is_floating_point and dtype.itemsize > 1:
            return torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype)
        return torch.randint(0, 120, shape, generator=generator, dtype=torch.uint8).view(dtype)

    def _num_tokens(self) -> list[int]:
        def draw() -> int:
            return self._plan.choice([0, 1, self._plan.randint(0, self._most_tokens), self._most_tokens])

        return [0] * self.num_ranks if self._plan.random() < 0.02 else [draw() for _ in range(self.num_ranks)]

    def _payload(self, num_tokens: list[int]) -> tuple[list[torch.Tensor], list[torch.Tensor] | None]:
        dtype, hidden = self._plan.choice(PAYLOADS), self._plan.randint(1, self._most_hidden)
        xs = [self._values((count, hidden), dtype, rank, 0) for rank, count in enumerate(num_tokens)]
        if self._plan.random() < 0.6:
            return xs, None
        columns, is_packed = self._plan.randint(1, 5), self._plan.random() < 0.5
        scales = [self._values((columns, count), torch.float32, rank, 1) for rank, count in enumerate(num_tokens)]
        # Column-major, as callers have them.
        return xs, [(one.view(torch.int32) if is_packed else one).t() for one in scales]

    def _routing(self, num_tokens: list[int]) -> dict[str, Any]:
        """Ids, weights, masks and counts of all ranks."""
        num_experts = self.num_ranks * self._plan.randint(1, 4)
        num_topk, idx_dtype = self._plan.randint(1, 5), self._plan.choice((torch.int32, torch.int64))
        free_mask = self._plan.random() < 0.2  # a mask that does not follow the ids: it is the mask that counts
        ids, weights, masks, per_expert = [], [], [], []
        for rank, count in enumerate(num_tokens):
            generator = self._seeded(rank, 2)
            drawn = torch.randint(-2, num_experts + 2, (count, num_topk), generator=generator)
            ids.append(drawn.to(idx_dtype))
            weights.append(torch.rand(count, num_topk, generator=generator))
            seen = reference.layout(drawn, num_experts, self.num_ranks)
            per_expert.append(seen.num_tokens_per_expert)
            random_mask = torch.rand(count, self.num_ranks, generator=generator) < 0.5
            masks.append(random_mask if free_mask else seen.is_token_in_rank)
        return {"ids": ids, "weights": weights, "masks": masks, "per_expert": per_expert, "num_experts": num_experts}

    # Calls -----------------------------------------------------------------------------------------------------------

    def _full_dispatch(self) -> None:
        self._dispatch(worst_case=False)

    def _worst_case_dispatch(self) -> None:
        self._dispatch(worst_case=True)

    def _dispatch(self, worst_case: bool) -> None:
        num_tokens = self._num_tokens()
        xs, scales = self._payload(num_tokens)
        routing = self._routing(num_tokens)
        has_topk = worst_case or self._plan.random() < 0.7
        alignment = self._plan.choice((1, 4))
        extra_rows = [self._plan.randint(0, 5) for _ in range(self.num_ranks)]
        expected = reference.dispatch(
            xs,
            routing["masks"],
            scales=scales,
            topk_idx=routing["ids"] if has_topk else None,
            topk_weights=routing["weights"] if has_topk else None,
            num_experts=routing["num_experts"],
            expert_alignment=alignment,
            num_tokens_per_expert=routing["per_expert"],
        )
        num_rows = [one.recv_x.size(0) for one in expected]
        if worst_case:
            num_rows = [max(1, rows + extra) for rows, extra in zip(num_rows, extra_rows, strict=True)]
        x, mask = xs[self.rank].clone(), routing["masks"][self.rank].clone()
        sent = (x, scales[self.rank].clone()) if scales is not None else x
        result: Any = self.buffer.dispatch(
            sent,
            num_tokens_per_rank=mask.sum(0, dtype=torch.int32),
            is_token_in_rank=mask,
            num_tokens_per_expert=routing["per_expert"][self.rank],
            topk_idx=routing["ids"][self.rank] if has_topk else None,
            topk_weights=routing["weights"][self.rank] if has_topk else None,
            expert_alignment=alignment,
            num_worst_tokens=num_rows[self.rank] if worst_case else 0,
            **self._stream_arguments(),
        )
        recv, idx, weights, counts, handle, event = result
        self.report.count("worst-case dispatch" if worst_case else "full dispatch")
        mine = expected[self.rank]
        recv_x = recv[0] if isinstance(recv, tuple) else recv
        self._known.append(Dispatched(handle, routing["masks"], num_rows, recv_x, [one.recv_x for one in expected]))

        def check() -> None:
            rows = mine.recv_x.size(0)
            same("recv_x", recv_x[:rows], mine.recv_x)
            if scales is not None:
                same("recv_scales", recv[1][:rows], mine.recv_scales)
            if has_topk:
                same("recv_topk_idx", idx[:rows], mine.recv_topk_idx)
                same("recv_topk_weights", weights[:rows], mine.recv_topk_weights)
                same("recv_topk_idx beyond the rows", idx[rows:], torch.full_like(idx[rows:], -1))
            same("recv_src_idx", handle[3][:rows], torch.tensor(mine.src_token, dtype=torch.int32))
            expected_counts = [] if worst_case else mine.num_recv_tokens_per_expert_list
            if counts != expected_counts:
                raise Mismatch(f"counts {counts}, expected {expected_counts}")
            scribble(x)

        self._later(event, check, recv_x)

    def _cached_dispatch(self) -> None:
        known = self._plan.choice(self._known)
        xs, scales = self._payload([mask.size(0) for mask in known.masks])
        expected = reference.dispatch(xs, known.masks, scales=scales)[self.rank]
        x = xs[self.rank].clone()
        sent = (x, scales[self.rank]) if scales is not None else x
        # A handle is all there is: clones of its tensors do as well, once the dispatch has filled them.
        is_cloned = self._plan.random() < 0.5 and not self._pending
        handle = tuple(item.clone() for item in known.handle) if is_cloned else known.handle
        recv, *nothing, event = self.buffer.dispatch(sent, handle=handle, **self._stream_arguments())
        self.report.count("cached dispatch")
        recv_x = recv[0] if isinstance(recv, tuple) else recv

        def check() -> None:
            if nothing != [None] * 4:
                raise Mismatch(f"a cached dispatch returned {nothing}")
            same("cached recv_x", recv_x[: expected.recv_x.size(0)], expected.recv_x)
            if scales is not None:
                same("cached recv_scales", recv[1][: expected.recv_x.size(0)], expected.recv_scales)
            scribble(x)

        self._later(event, check, recv_x)

    def _combine(self) -> None:
        known = self._plan.choice(self._known)
        source = self._plan.choice(("received", "combine buffer", "elsewhere"))
        rows = [one.size(0) for one in known.rows]
        dtype, hidden = self._plan.choice(SUMMABLE), self._plan.randint(1, self._most_hidden)
        in_place = source == "received" and known.recv_x is not None and known.rows[0].dtype in SUMMABLE
        in_place = in_place and not self._pending  # a check that is still to come would find the rows overwritten
        if in_place:
            ys = known.rows
            dtype, hidden = ys[0].dtype, ys[0].size(1)
        else:
            ys = [self._values((count, hidden), dtype, rank, 3) for rank, count in enumerate(rows)]
        x = known.recv_x if in_place else self._combine_input(known, ys[self.rank], source)
        assert x is not None
        num_topk = self._plan.randint(1, 4) if self._plan.random() < 0.4 else 0
        weights = [self._values((count, num_topk), torch.float32, rank, 4) for rank, count in enumerate(rows)]
        biases = self._biases(known, hidden, dtype)
        expected = reference.combine(ys, known.masks, biases=biases, topk_weights=weights if num_topk else None)[
            self.rank
        ]
        out, out_weights, event = self.buffer.combine(
            x,
            known.handle,
            topk_weights=padded(weights[self.rank], x.size(0)) if num_topk else None,
            bias=biases[self.rank] if biases is not None else None,
            **self._stream_arguments(),
        )
        self.report.count(f"combine ({'received' if in_place else source})")
        if in_place:
            known.recv_x = None  # it is overwritten below

        def check() -> None:
            same("combined_x", out, expected.combined_x)
            if num_topk:
                same("combined_topk_weights", out_weights, expected.combined_topk_weights)
            scribble(x)

        self._later(event, check, out)

    def _combine_input(self, known: Dispatched, y: torch.Tensor, source: str) -> torch.Tensor:
        num_rows = known.num_rows[self.rank]
        if source != "combine buffer":
            return padded(y, num_rows)
        x = self.buffer.get_combine_buffer(known.handle, hidden=y.size(1), dtype=y.dtype)
        x[: y.size(0)] = y
        return x

    def _biases(self, known: Dispatched, hidden: int, dtype: torch.dtype) -> list[Any] | None:
        kind = self._plan.choice(("none", "one", "two", "second"))
        if kind == "none":
            return None
        biases: list[Any] = []
        for rank, mask in enumerate(known.masks):
            first, second = (self._values((mask.size(0), hidden), dtype, rank, purpose) for purpose in (5, 6))
            biases.append({"one": first, "two": (first, second), "second": (None, second)}[kind])
        return biases

    def _stream_arguments(self) -> dict[str, Any]:
        async_finish = self._plan.random() < 0.5
        previous = self._plan.random() < 0.5
        event = None
        if previous:
            event = self._pending[-1][0] if self._pending else Buffer.capture()
        return {
            "async_finish": async_finish,
            "previous_event": event,
            "allocate_on_comm_stream": previous and async_finish and self._plan.random() < 0.5,
        }

    def _later(self, event: EventOverlap, check: Callable[[], None], result: torch.Tensor) -> None:
        """Check now, or, after an asynchronous call, some calls later. Perhaps keep a view of the result."""
        if self._plan.random() < 0.5:
            self._kept.append(result[::2])
        if event.event is None:
            check()
        else:
            self._pending.append((event, check))

    def _settle(self) -> None:
        event, check = self._pending.popleft()
        event.current_stream_wait()
        check()


def same(name: str, got: Any, expected: torch.Tensor | None) -> None:
    """Compare exactly, bit patterns included, whatever the dtype."""
    assert expected is not None
    equal = got.shape == expected.shape and got.dtype == expected.dtype
    if equal and got.numel():
        equal = torch.equal(got.contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8))
    if not equal:
        raise Mismatch(f"{name}: got {got.dtype} {list(got.shape)}\n{got}\nexpected {expected.dtype}\n{expected}")


def scribble(tensor: torch.Tensor) -> None:
    """Overwrite an input whose call has ended: nobody may read it any more."""
    tensor.view(torch.uint8).fill_(0xA5)


def padded(rows: torch.Tensor, num_rows: int) -> torch.Tensor:
    """A copy of `rows` with room for `num_rows`."""
    padding = torch.full((num_rows - rows.size(0), rows.size(1)), 7.0, dtype=rows.dtype)
    return torch.cat([rows, padding])


def soak_rank(_rank: int, _num_ranks: int, seed: int, num_calls: int, **sizes: int) -> Report:
    """Play a soak on one rank of the default group; `run_ranks` calls it."""
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes=0, explicitly_destroy=True)
    report = Soak(buffer, seed, **sizes).run(num_calls)
    buffer.destroy()
    return report
