"""Numbers that no call can have: too large, negative, or not those of the dispatch. Refused before anything is sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import NOTHING_POSTED, OneRank, layout_of, run_ranks
from deep_ep import Buffer

pytestmark = pytest.mark.usefixtures("device")

HIDDEN = 128
WAYS = {"posted": {}, "put": NOTHING_POSTED, "nodes": {"DEEP_EP_RANKS_PER_NODE": "1"}}


def solo() -> Buffer:
    return Buffer(None, 1 << 20, comm=OneRank())


def first_expert_layout(buffer: Buffer, num_tokens: int) -> dict[str, Any]:
    topk_idx = torch.zeros(num_tokens, 1, dtype=torch.int64)
    return layout_of(buffer, topk_idx, 2)


@pytest.mark.parametrize("number", [1 << 31, 1 << 62, 1 << 70])
@pytest.mark.parametrize("name", ["num_worst_tokens", "expert_alignment"])
def test_a_number_beyond_int32_is_refused(name: str, number: int) -> None:
    buffer, x = solo(), torch.randn(3, 4)
    top = {"topk_idx": torch.zeros(3, 1, dtype=torch.int64), "topk_weights": torch.ones(3, 1)}
    with pytest.raises(ValueError, match=f"`{name}` must be at most {(1 << 31) - 1}, got {number}"):
        buffer.dispatch(x, **first_expert_layout(buffer, 3), **top, **{name: number})
    with pytest.raises(ValueError, match="`hidden` must be at most"):
        buffer.get_combine_buffer(buffer.dispatch(x, **first_expert_layout(buffer, 3), **top)[4], number)


def tamper(rank: int, num_ranks: int) -> list[str]:
    """A call with each wrong value, which all ranks refuse, and a right one behind it."""
    size = Buffer.get_low_latency_rdma_size_hint(4, HIDDEN, num_ranks, num_ranks)
    buffer = Buffer(dist.group.WORLD, 1 << 20, size, low_latency_mode=True, num_cpu_timeout_secs=30)
    x, topk_idx = torch.randn(3, HIDDEN), torch.arange(3).view(-1, 1) % num_ranks
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, num_ranks)

    def dispatch(per_expert: torch.Tensor) -> tuple:
        return buffer.dispatch(x, None, per_rank, per_node, mask, per_expert)

    recv_x, _, _, _, handle, _ = dispatch(per_expert)
    rows, _, low_latency, _, _ = buffer.low_latency_dispatch(x.bfloat16(), topk_idx, 4, num_ranks, use_fp8=False)

    def with_item(items: tuple, index: int, change: Callable[[torch.Tensor], torch.Tensor]) -> tuple:
        return (*items[:index], change(items[index].clone()), *items[index + 1 :])

    def remote_slot(slots: torch.Tensor) -> torch.Tensor:
        slots[slots >= 0] += 1_000_000
        return slots

    prefix = 6 if per_node is not None else 0
    wrong: list[Callable[[], Any]] = [
        lambda: dispatch(per_expert - 7),
        lambda: buffer.combine(recv_x, with_item(handle, prefix, lambda sums: sums.fill_(-7))),
        lambda: buffer.dispatch(x, with_item(handle, prefix, lambda sums: sums.fill_(-7))),
        lambda: buffer.low_latency_combine(
            rows, topk_idx, torch.ones(3, 1), with_item(low_latency, 1, lambda word: word.fill_((1 << 40) | (1 << 20)))
        ),
        lambda: buffer.low_latency_combine(
            rows, topk_idx, torch.ones(3, 1), with_item(low_latency, 1, lambda word: word.fill_(-1))
        ),
    ]
    if per_node is None:
        wrong += [
            lambda: buffer.dispatch(x, with_item(handle, 5, remote_slot)),
            lambda: buffer.combine(recv_x, with_item(handle, 5, remote_slot)),
            lambda: buffer.combine(recv_x, with_item(handle, 5, lambda slots: slots.fill_(-1))),
        ]
    texts = []
    for call in wrong:
        with pytest.raises(ValueError) as caught:
            call()
        texts.append(str(caught.value))
        assert torch.equal(buffer.combine(dispatch(per_expert)[0], handle)[0], x)
    assert torch.equal(buffer.low_latency_combine(rows, topk_idx, torch.ones(3, 1), low_latency)[0], x.bfloat16())
    return texts


@pytest.mark.cpu_only  # on a GPU the host does not look into tensors
@pytest.mark.parametrize("way", [*WAYS])
def test_tampered_values_are_refused(way: str) -> None:
    for texts in run_ranks(tamper, 2, env=WAYS[way]):
        assert "must not be negative" in texts[0]
        assert all("Pass the handle as" in text for text in texts[1:])


# Limits ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("DEEP_EP_TIMEOUT_SECS", "inf", "1000000"),
        ("DEEP_EP_TIMEOUT_SECS", "1e400", "1000000"),
        ("DEEP_EP_TIMEOUT_SECS", "nan", "1000000"),
        ("DEEP_EP_ARENA_BYTES", str(1 << 80), str(1 << 40)),
        ("DEEP_EP_ARENA_BYTES", "1e400", str(1 << 40)),
        ("DEEP_EP_ARENA_BYTES", "-1e400", str(1 << 40)),
    ],
)
def test_a_variable_has_a_limit(monkeypatch: pytest.MonkeyPatch, name: str, value: str, limit: str) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}: .*at most {limit}"):
        solo()


@pytest.mark.parametrize(
    ("given", "limit"),
    [
        ({"num_nvl_bytes": 1 << 70}, f"`num_nvl_bytes` must be at most {1 << 40}"),
        ({"num_rdma_bytes": (1 << 40) + 128}, f"`num_rdma_bytes` must be at most {1 << 40}"),
        ({"num_cpu_timeout_secs": math.inf}, "`num_cpu_timeout_secs` must be at most 1000000"),
        ({"num_cpu_timeout_secs": 10**400}, "`num_cpu_timeout_secs` must be at most 1000000"),
        ({"num_gpu_timeout_secs": math.nan}, "`num_gpu_timeout_secs` must be greater than 0"),
    ],
)
def test_an_argument_has_a_limit(given: dict[str, Any], limit: str) -> None:
    with pytest.raises(ValueError, match=limit):
        Buffer(None, comm=OneRank(), **given)


@pytest.mark.cpu_only
def test_the_largest_sizes_can_be_asked_for() -> None:
    buffer = Buffer(None, 1 << 40, 1 << 40, True, comm=OneRank(), num_cpu_timeout_secs=1_000_000)
    with pytest.raises(ValueError, match=r"`size` .* does not fit"):
        buffer.get_local_buffer_tensor(torch.uint8, (1 << 40, 1 << 40))
