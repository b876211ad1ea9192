"""Calls of the GPU's engine that find no room in the window: on the CPU its kernels run in Triton's interpreter."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import error_of, run_ranks
from deep_ep import Buffer, launch, reference
from deep_ep.kernels import _triton
from deep_ep.tools.soak import Limits, SoakReport, soak_rank
from deep_ep.tools.soak.checks import same

pytestmark = pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")

LIMIT_SECS = 60.0
NUM_EXPERTS_EACH = 2
ARENA_BYTES = 160 << 10  # records of a call take 64 KiB of it


def env(device: str, arena_bytes: int) -> dict[str, str]:
    here = {"DEEP_EP_TRANSPORT": "interpreted"} if device == "cpu" else {}
    return {**here, "DEEP_EP_ARENA_BYTES": str(arena_bytes)}


class Layer:
    """Inputs of all ranks, made alike on each, and what the oracle makes of them."""

    def __init__(self, buffer: Buffer, num_tokens: list[int], hidden: int, seed: int, has_scales: bool = False):
        generator = torch.Generator().manual_seed(seed)
        self.buffer, self.rank, num_ranks = buffer, buffer.rank, buffer.group_size
        self.num_experts = NUM_EXPERTS_EACH * num_ranks

        def draw(count: int, columns: int) -> torch.Tensor:
            return torch.rand(count, columns, generator=generator, device="cpu")

        self.xs = [draw(count, hidden).bfloat16() for count in num_tokens]
        self.ids = [(draw(count, 3) * (self.num_experts + 1)).long() - 1 for count in num_tokens]
        self.weights = [draw(count, 3) for count in num_tokens]
        self.scales = [draw(2, count).t() for count in num_tokens] if has_scales else None
        self.layouts = [reference.layout(ids, self.num_experts, num_ranks) for ids in self.ids]
        self.masks = [one.is_token_in_rank for one in self.layouts]
        self.expected = reference.dispatch(
            self.xs,
            self.masks,
            scales=self.scales,
            topk_idx=self.ids,
            topk_weights=self.weights,
            num_experts=self.num_experts,
            num_tokens_per_expert=[one.num_tokens_per_expert for one in self.layouts],
        )
        self.num_rows = [one.recv_x.size(0) for one in self.expected]

    def sent(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self.buffer.device, copy=True)

    def payload(self) -> Any:
        x = self.sent(self.xs[self.rank])
        return x if self.scales is None else (x, self.sent(self.scales[self.rank]))

    def dispatch(self, **options: Any) -> tuple:
        """A dispatch, checked. Returns rows and handle."""
        counted = self.layouts[self.rank]
        recv, ids, weights, counts, handle, _ = self.buffer.dispatch(
            self.payload(),
            num_tokens_per_rank=self.sent(counted.num_tokens_per_rank),
            is_token_in_rank=self.sent(counted.is_token_in_rank),
            num_tokens_per_expert=self.sent(counted.num_tokens_per_expert),
            topk_idx=self.sent(self.ids[self.rank]),
            topk_weights=self.sent(self.weights[self.rank]),
            **options,
        )
        expected, num_rows = self.expected[self.rank], self.num_rows[self.rank]
        self.check_rows(recv)
        same("ids", ids[:num_rows], expected.recv_topk_idx)
        same("ids beyond", ids[num_rows:], torch.full_like(ids[num_rows:], -1))
        same("weights", weights[:num_rows], expected.recv_topk_weights)
        same("source", handle[3][:num_rows], torch.tensor(expected.src_token, dtype=torch.int32, device="cpu"))
        assert options or counts == expected.num_recv_tokens_per_expert_list
        return recv[0] if isinstance(recv, tuple) else recv, handle

    def cached(self, handle: tuple) -> torch.Tensor:
        recv = self.buffer.dispatch(self.payload(), handle=handle)[0]
        self.check_rows(recv)
        return recv[0] if isinstance(recv, tuple) else recv

    def check_rows(self, recv: Any) -> None:
        expected, num_rows = self.expected[self.rank], self.num_rows[self.rank]
        recv_x, scales = recv if isinstance(recv, tuple) else (recv, None)
        same("rows", recv_x[:num_rows], expected.recv_x)
        same("scales", None if scales is None else scales[:num_rows], expected.recv_scales)

    def combine(self, x: torch.Tensor, handle: tuple, has_weights: bool) -> None:
        """A combine of the received rows, checked."""
        weights = [torch.arange(2.0 * count, device="cpu").view(count, 2) / 7 for count in self.num_rows]
        given = None
        if has_weights:
            given = torch.zeros(x.size(0), 2, device=x.device)
            given[: self.num_rows[self.rank]] = self.sent(weights[self.rank])
        ys = [one.recv_x for one in self.expected]
        biases = [x * 3 for x in self.xs]
        expected = reference.combine(ys, self.masks, biases=biases, topk_weights=weights if has_weights else None)
        bias = self.sent(biases[self.rank])
        combined, combined_weights, _ = self.buffer.combine(x, handle, topk_weights=given, bias=bias)
        same("combined", combined, expected[self.rank].combined_x)
        same("combined weights", combined_weights, expected[self.rank].combined_topk_weights)


def fill(buffer: Buffer, handle: tuple) -> torch.Tensor:
    """Take all that is left of this rank's arena."""
    arena = buffer._engine.window.arena
    num_bytes = arena.largest_free_bytes()
    columns = num_bytes // (2 * handle[3].numel())
    rows = buffer.get_combine_buffer(handle, columns, torch.bfloat16)
    assert arena.base_of(rows) is not None
    assert arena.largest_free_bytes() < num_bytes // 4
    return rows.fill_(5)


def all_calls(rank: int, num_ranks: int, staged_ranks: list[int], num_tokens: list[int]) -> dict[str, Any]:
    """Every kind of call, while some ranks have no room at all and the others enough for anything."""
    buffer = Buffer(dist.group.WORLD, 0, explicitly_destroy=True, num_gpu_timeout_secs=LIMIT_SECS)
    layer = Layer(buffer, num_tokens, 96, seed=1)
    first, handle = layer.dispatch()
    assert buffer.stats()["calls"] == {"dispatch/direct": 1}
    room = buffer.get_combine_buffer(handle)
    room.copy_(first)
    elsewhere = first.clone()
    kept = fill(buffer, handle) if rank in staged_ranks else None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        layer.dispatch()
        layer.dispatch(num_worst_tokens=layer.num_rows[rank] + 2)
        scaled = Layer(buffer, num_tokens, 96, seed=1, has_scales=True)
        scaled.cached(handle)
        scaled.dispatch()
        layer.combine(elsewhere, handle, has_weights=False)  # copied in, or staged
        layer.combine(room, handle, has_weights=False)  # pulled on all ranks
        layer.combine(first if rank else elsewhere, handle, has_weights=True)  # pulled here, and copied or staged there
    buffer.check()
    assert kept is None or (kept == 5).all(), "what lies in the arena is left alone"
    layer.check_rows(first)
    told = [str(one.message) for one in caught if "go through staging" in str(one.message)]
    assert len(told) == (rank in staged_ranks), told
    numbers = buffer.stats()
    del kept, room, first
    layer.dispatch()
    assert buffer.stats()["calls"]["dispatch/direct"] == numbers["calls"]["dispatch/direct"] + 1, "there is room again"
    buffer.destroy()
    return numbers


@pytest.mark.parametrize(
    ("num_tokens", "staged_ranks"),
    [([6, 5], [0, 1]), ([4, 0, 5], [0]), pytest.param([3, 4, 2], [1, 2], marks=pytest.mark.exhaustive)],
)
def test_some_ranks_are_staged_and_others_are_not(device: str, num_tokens: list[int], staged_ranks: list[int]) -> None:
    results = run_ranks(all_calls, len(num_tokens), staged_ranks, num_tokens, env=env(device, ARENA_BYTES))
    for rank, numbers in enumerate(results):
        calls, is_staged = numbers["calls"], rank in staged_ranks
        assert calls.get("dispatch/staged", 0) == (4 if is_staged else 0), calls
        assert calls["dispatch/direct"] == (1 if is_staged else 5)
        assert calls.get("combine/staged", 0) == (2 if is_staged else 0)
        assert numbers["rounds"] == results[0]["rounds"] >= 8, "all ranks go through the same rounds"


def many_rounds(rank: int, num_ranks: int, num_tokens: list[int]) -> dict[str, Any]:
    """So little room that a lane holds a row or two, and some ranks have nothing to send, or nothing to receive."""
    buffer = Buffer(dist.group.WORLD, 0, explicitly_destroy=True, num_gpu_timeout_secs=LIMIT_SECS)
    for seed, hidden in enumerate((40, 3)):
        layer = Layer(buffer, num_tokens, hidden, seed, has_scales=bool(seed))
        rows, handle = layer.dispatch()
        layer.combine(rows.clone(), handle, has_weights=bool(seed))
        rows, handle = layer.dispatch(num_worst_tokens=max(1, layer.num_rows[rank]) + 2)
        layer.cached(handle)
        layer.combine(rows, handle, has_weights=True)
    numbers = buffer.stats()
    del rows
    assert buffer.stats()["arena"]["used"] == 0
    buffer.destroy()
    return numbers


@pytest.mark.parametrize(
    "num_tokens",
    [[6], [6, 0], [1, 4, 3], [0, 0, 0], pytest.param([3, 2, 4, 1], marks=pytest.mark.exhaustive)],
)
def test_many_rounds(device: str, num_tokens: list[int]) -> None:
    results = run_ranks(many_rounds, len(num_tokens), num_tokens, env=env(device, 200))
    if sum(num_tokens):
        assert any("dispatch/staged" in numbers["calls"] for numbers in results)
        num_calls = sum(results[0]["calls"].values())
        assert results[0]["rounds"] > num_calls + 10
    assert len({numbers["rounds"] for numbers in results}) == 1


def soak(rank: int, num_ranks: int, seed: int, num_calls: int) -> SoakReport:
    return soak_rank(rank, num_ranks, seed, num_calls, Limits(tokens=9, hidden=24, topk=4))


def test_random_calls_are_what_the_oracle_says(device: str) -> None:
    for report in launch.run_ranks(soak, 2, 7, 14, env=env(device, 300)):  # its oracle is on the CPU
        assert report.stats["calls"]["dispatch/staged"] > 2
        assert report.stats["calls"]["combine/staged"] > 0
        assert report.stats["rounds"] > 14


# When something goes wrong -------------------------------------------------------------------------------------------


def broken(rank: int, num_ranks: int, operation: str) -> tuple[str, str]:
    """One rank fails before its rounds begin: the others, which are in theirs, need not wait for the limit."""
    buffer = Buffer(dist.group.WORLD, 0, explicitly_destroy=True, num_gpu_timeout_secs=LIMIT_SECS)
    layer = Layer(buffer, [4, 5, 6], 8, seed=3)
    rows, handle = layer.dispatch()
    rows = rows.clone()

    def fault(point: str) -> None:
        if point in ("cached dispatch: before put", "combine: before pull"):
            raise ArithmeticError(point)

    if rank == 1:
        buffer.set_fault_hook(fault)

    def call() -> None:
        if operation == "combine":
            buffer.combine(rows, handle)
        else:
            buffer.dispatch(layer.payload(), handle=handle)
        buffer.check()

    error = error_of(call)
    assert error_of(lambda: buffer.combine(rows, handle))[0] == "EPClosed"
    return error


@pytest.mark.parametrize("operation", ["cached dispatch", "combine"])
def test_a_failure_ends_the_rounds_of_all(device: str, operation: str) -> None:
    errors = run_ranks(broken, 3, operation, env=env(device, 100))
    assert errors[1][0] == "ArithmeticError"
    for rank in (0, 2):
        assert errors[rank][0] == "EPPeerFailed"
        assert "rank 1 failed" in errors[rank][1]


def too_wide(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    buffer = Buffer(dist.group.WORLD, 0, explicitly_destroy=True, num_gpu_timeout_secs=LIMIT_SECS)
    return [error_of(lambda: Layer(buffer, [1, 1], 1 << 21, seed=4).dispatch()) for _ in range(2)]


def test_a_row_wider_than_staging_is_an_error_on_all_ranks(device: str) -> None:
    errors = run_ranks(too_wide, 2, env=env(device, 4096))
    assert "EPTransportError" in [first[0] for first, _ in errors]
    for first, later in errors:
        # A rank that is late for the handshake finds there that the other one has failed.
        assert first[0] in ("EPTransportError", "EPPeerFailed"), first
        assert later[0] == "EPClosed"
