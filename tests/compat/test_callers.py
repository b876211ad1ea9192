"""Whole steps in the manner of the frameworks that call DeepEP, checked against one process that has all the tokens."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import run_ranks
from deep_ep import Buffer, Config, reference
from deep_ep.utils import EventHandle, EventOverlap
from deep_ep.utils.math import per_token_cast_back, per_token_cast_to_fp8

pytestmark = pytest.mark.usefixtures("device")

LIMIT = {"DEEP_EP_TIMEOUT_SECS": "30"}  # a call that never ends fails its test, and soon


@dataclass(frozen=True)
class Layer:
    """The tokens and routes of all ranks. Every rank makes the same, so that each can compute what all do."""

    num_ranks: int
    num_experts: int
    xs: list[torch.Tensor]
    ids: list[torch.Tensor]
    weights: list[torch.Tensor]

    @property
    def experts_per_rank(self) -> int:
        return self.num_experts // self.num_ranks

    @property
    def masks(self) -> list[torch.Tensor]:
        return [reference.layout(ids, self.num_experts, self.num_ranks).is_token_in_rank for ids in self.ids]

    @property
    def per_expert(self) -> list[torch.Tensor]:
        return [reference.layout(ids, self.num_experts, self.num_ranks).num_tokens_per_expert for ids in self.ids]


def make_layer(
    num_ranks: int,
    hidden: int,
    dtype: torch.dtype = torch.float32,
    num_topk: int = 3,
    experts_per_rank: int = 3,
    num_tokens: int = 20,
    seed: int = 0,
    only_rank: int | None = None,
) -> Layer:
    """Rank r has `num_tokens + 3 * r` tokens. Some select nothing in a slot; with `only_rank` all go to that rank."""
    random = torch.Generator().manual_seed(seed)
    num_experts = num_ranks * experts_per_rank
    xs, ids, weights = [], [], []
    for rank in range(num_ranks):
        count = num_tokens + 3 * rank
        xs.append(torch.randn(count, hidden, generator=random).to(dtype))
        scores = torch.rand(count, num_experts, generator=random)
        if only_rank is not None:
            scores[:, : only_rank * experts_per_rank] -= 1
            scores[:, (only_rank + 1) * experts_per_rank :] -= 1
        weight, chosen = scores.topk(num_topk, dim=1)
        chosen[torch.rand(chosen.shape, generator=random) < 0.15] = -1
        ids.append(chosen)
        weights.append(weight.abs().contiguous())
    return Layer(num_ranks, num_experts, xs, ids, weights)


def apply_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, experts: torch.Tensor, first_expert: int = 0
) -> torch.Tensor:
    """The weighted sum of the experts of every row, `[n, H]`; expert e multiplies by the matrix `experts[e]`."""
    out = torch.zeros_like(x)
    for local in range(experts.size(0)):
        row, slot = (ids == first_expert + local).nonzero(as_tuple=True)
        out = out.index_add(0, row, (x[row] @ experts[local]) * weights[row, slot].unsqueeze(1).to(x.dtype))
    return out


def check_close(found: torch.Tensor, expected: torch.Tensor, rtol: float, atol: float) -> None:
    """`torch.testing.assert_close` without its imports, which take each rank seconds."""
    found, expected = found.detach().double(), expected.detach().double()
    assert found.shape == expected.shape
    excess = (found - expected).abs() - rtol * expected.abs() - atol
    assert torch.isfinite(found).all()
    assert (excess <= 0).all(), f"beyond the tolerance by up to {excess.max():g}"


def make_experts(layer: Layer, hidden: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(99)
    return torch.randn(layer.num_experts, hidden, hidden, generator=random) / hidden**0.5


# Megatron-LM: a fused dispatch and a fused combine under autograd -----------------------------------------------------


def make_buffer_from_hints(group: dist.ProcessGroup, hidden_bytes: int) -> Buffer:
    nvl_bytes, rdma_bytes = 0, 0
    for config in (Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())):
        nvl_bytes = max(config.get_nvl_buffer_size_hint(hidden_bytes, group.size()), nvl_bytes)
        rdma_bytes = max(config.get_rdma_buffer_size_hint(hidden_bytes, group.size()), rdma_bytes)
    return Buffer(group, nvl_bytes, rdma_bytes)


class FusedDispatch(torch.autograd.Function):
    """Forward: layout and dispatch. Backward: combine of the gradients, with those of the weights beside them."""

    @staticmethod
    def forward(ctx, x, ids, weights, num_experts, buffer, is_async):
        previous = EventOverlap(EventHandle()) if is_async else None
        per_rank, per_node, per_expert, mask, event = buffer.get_dispatch_layout(
            ids, num_experts, previous_event=previous, async_finish=is_async, allocate_on_comm_stream=is_async
        )
        recv_x, recv_ids, recv_weights, expert_list, handle, after = buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=mask,
            num_tokens_per_expert=per_expert,
            previous_event=event,  # of a synchronous layout it is empty, and passed all the same
            async_finish=is_async,
            allocate_on_comm_stream=is_async,
        )
        if is_async:
            after.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.is_async = buffer, handle, is_async
        return recv_x, recv_ids, recv_weights, torch.tensor(expert_list), handle

    @staticmethod
    def backward(ctx, grad_x, _grad_ids, grad_weights, *_):
        previous = EventOverlap(EventHandle()) if ctx.is_async else None
        grad, grad_topk_weights, after = ctx.buffer.combine(
            grad_x.contiguous(),
            ctx.handle,
            topk_weights=grad_weights.float(),
            previous_event=previous,
            async_finish=ctx.is_async,
            allocate_on_comm_stream=ctx.is_async,
        )
        if ctx.is_async:
            after.current_stream_wait()
        return grad, None, grad_topk_weights, None, None, None


class FusedCombine(torch.autograd.Function):
    """Forward: combine. Backward: dispatch of the gradients along the same routes."""

    @staticmethod
    def forward(ctx, x, handle, buffer, is_async):
        previous = EventOverlap(EventHandle()) if is_async else None
        combined, _, after = buffer.combine(
            x, handle=handle, async_finish=is_async, previous_event=previous, allocate_on_comm_stream=is_async
        )
        if is_async:
            after.current_stream_wait()
        ctx.buffer, ctx.handle, ctx.is_async = buffer, handle, is_async
        return combined

    @staticmethod
    def backward(ctx, grad_out):
        previous = EventOverlap(EventHandle()) if ctx.is_async else None
        grad, _, _, _, _, after = ctx.buffer.dispatch(
            grad_out.contiguous(),
            handle=ctx.handle,
            previous_event=previous,
            async_finish=ctx.is_async,
            allocate_on_comm_stream=ctx.is_async,
        )
        if ctx.is_async:
            after.current_stream_wait()
        return grad, None, None, None


def megatron_step(rank: int, num_ranks: int, is_async: bool, dtype_name: str) -> None:
    """Two micro-batches forward, then backward in reverse; gradients equal those of one process with all tokens."""
    dtype, hidden = getattr(torch, dtype_name), 16
    Buffer.set_num_sms(24)
    buffer = make_buffer_from_hints(dist.group.WORLD, hidden * max(dtype.itemsize, 2))
    layers = [make_layer(num_ranks, hidden, dtype, seed=seed) for seed in range(2)]
    experts = make_experts(layers[0], hidden).to(dtype)
    mine = slice(rank * layers[0].experts_per_rank, (rank + 1) * layers[0].experts_per_rank)

    local_experts = experts[mine].clone().requires_grad_()
    inputs, losses = [], []
    for layer in layers:
        x, weights = layer.xs[rank].clone().requires_grad_(), layer.weights[rank].clone().requires_grad_()
        recv_x, recv_ids, recv_weights, counts, handle = FusedDispatch.apply(
            x, layer.ids[rank], weights, layer.num_experts, buffer, is_async
        )
        assert counts.tolist() == torch.stack(layer.per_expert).sum(0)[mine].tolist()
        out = apply_experts(recv_x, recv_ids, recv_weights, local_experts)
        combined = FusedCombine.apply(out, handle, buffer, is_async)
        inputs.append((x, weights, combined))
        losses.append((combined.float() * loss_weights(combined, rank)).sum())
    for loss in reversed(losses):
        loss.backward()

    dense_experts = experts.double().requires_grad_()
    for layer, (x, weights, combined) in zip(layers, inputs, strict=True):
        total, dense = 0.0, []
        for source in range(num_ranks):
            dense_x = layer.xs[source].double().requires_grad_()
            dense_weights = layer.weights[source].double().requires_grad_()
            out = apply_experts(dense_x, layer.ids[source], dense_weights, dense_experts)
            total = total + (out * loss_weights(out, source)).sum()
            dense.append((dense_x, dense_weights, out))
        total.backward()
        dense_x, dense_weights, out = dense[rank]
        assert weights.grad[layer.ids[rank] < 0].abs().sum() == 0
        tolerance = (1e-5, 1e-5) if dtype == torch.float32 else (0.05, 0.15)
        check_close(combined, out, *tolerance)
        check_close(x.grad, dense_x.grad, *tolerance)
        check_close(weights.grad, dense_weights.grad, *tolerance)
    if dtype == torch.float32:
        check_close(local_experts.grad, dense_experts.grad[mine], 1e-5, 1e-5)


def loss_weights(out: torch.Tensor, rank: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 + rank)
    return torch.randn(out.shape, generator=random)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("is_async", "dtype_name"), [(True, "float32"), (False, "float32"), (True, "bfloat16")])
def test_megatron_gradients(num_ranks: int, is_async: bool, dtype_name: str):
    run_ranks(megatron_step, num_ranks, is_async, dtype_name, limit_secs=90, env=LIMIT)


@pytest.mark.cpu_only
@pytest.mark.parametrize("is_async", [False, True])
def test_megatron_gradients_across_nodes(is_async: bool):
    nodes = {**LIMIT, "DEEP_EP_RANKS_PER_NODE": "2"}
    run_ranks(megatron_step, 4, is_async, "float32", limit_secs=90, env=nodes)


def test_megatron_probes():
    with pytest.raises(ImportError):
        from deep_ep import HybridEPBuffer  # noqa: F401 (callers look whether it is there)


# A training step in DeepEP's own words --------------------------------------------------------------------------------


def training_step(rank: int, num_ranks: int, has_previous_event: bool) -> None:
    """Dispatch and combine forward, and the two of backward, all asynchronous; to the bit what the oracle says."""
    hidden = 24
    layer = make_layer(num_ranks, hidden, torch.bfloat16, seed=5)
    buffer = make_buffer_from_hints(dist.group.WORLD, hidden * 2)
    expected = reference.dispatch(
        layer.xs,
        layer.masks,
        topk_idx=layer.ids,
        topk_weights=layer.weights,
        num_experts=layer.num_experts,
        num_tokens_per_expert=layer.per_expert,
    )

    def dispatch_forward(x, ids, weights, previous_event):
        per_rank, per_node, per_expert, mask, previous_event = buffer.get_dispatch_layout(
            ids,
            layer.num_experts,
            previous_event=previous_event,
            async_finish=True,
            allocate_on_comm_stream=previous_event is not None,
        )
        return buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=mask,
            num_tokens_per_expert=per_expert,
            previous_event=previous_event,
            async_finish=True,
            allocate_on_comm_stream=True,
        )

    def previous() -> dict[str, Any]:
        event = Buffer.capture() if has_previous_event else None
        return {"previous_event": event, "async_finish": True, "allocate_on_comm_stream": event is not None}

    event = Buffer.capture() if has_previous_event else None
    recv_x, recv_ids, recv_weights, counts, handle, event = dispatch_forward(
        layer.xs[rank], layer.ids[rank], layer.weights[rank], event
    )
    event.current_stream_wait()
    assert torch.equal(recv_x, expected[rank].recv_x)
    assert torch.equal(recv_ids, expected[rank].recv_topk_idx)
    assert torch.equal(recv_weights, expected[rank].recv_topk_weights)
    assert counts == expected[rank].num_recv_tokens_per_expert_list

    rows = [part.recv_x * (1 + peer) for peer, part in enumerate(expected)]
    sums = reference.combine(rows, layer.masks)
    combined, no_weights, event = buffer.combine(recv_x * (1 + rank), handle, **previous())
    event.current_stream_wait()
    assert torch.equal(combined, sums[rank].combined_x)
    assert no_weights is None

    # Backward of combine, then of dispatch.
    grads = [layer.xs[peer] * 0.5 for peer in range(num_ranks)]
    grad_rows = reference.dispatch(grads, layer.masks)
    answer = buffer.dispatch(grads[rank], handle=handle, **previous())
    grad_x, *nothing, event = answer
    assert len(answer) == 6
    assert nothing == [None] * 4
    event.current_stream_wait()
    assert torch.equal(grad_x, grad_rows[rank].recv_x)

    weights = [part.recv_topk_weights * 2 for part in expected]
    grad_sums = reference.combine([part.recv_x for part in grad_rows], layer.masks, topk_weights=weights)
    grad, grad_weights, event = buffer.combine(grad_x, handle, topk_weights=weights[rank], **previous())
    event.current_stream_wait()
    assert torch.equal(grad, grad_sums[rank].combined_x)
    assert torch.equal(grad_weights, grad_sums[rank].combined_topk_weights)
    assert torch.equal(grad_weights, torch.where(layer.ids[rank] < 0, 0, 2 * layer.weights[rank]))


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("has_previous_event", [True, False])
def test_training_step(num_ranks: int, has_previous_event: bool):
    run_ranks(training_step, num_ranks, has_previous_event, limit_secs=90, env=LIMIT)


def inputs_under_autograd(rank: int, num_ranks: int) -> None:
    """Tensors that require gradients are data like others, and no result hangs on their graph."""
    layer = make_layer(num_ranks, 8)
    buffer = Buffer(dist.group.WORLD, 1 << 20)
    x, weights = layer.xs[rank].clone().requires_grad_(), layer.weights[rank].clone().requires_grad_()
    per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(layer.ids[rank], layer.num_experts)
    recv_x, _, recv_weights, _, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        is_token_in_rank=mask,
        num_tokens_per_expert=per_expert,
        topk_idx=layer.ids[rank],
        topk_weights=weights,
    )
    rows, bias = recv_x.clone().requires_grad_(), x.detach().clone().requires_grad_()
    combined, combined_weights, _ = buffer.combine(rows, handle, recv_weights.clone().requires_grad_(), bias=bias)
    check_close(combined, x.detach() * (1 + mask.sum(1, keepdim=True)), 1e-6, 1e-6)
    for result in (recv_x, recv_weights, combined, combined_weights):
        assert not result.requires_grad


def test_results_carry_no_graph():
    run_ranks(inputs_under_autograd, 2, limit_secs=90, env=LIMIT)


# vLLM, high throughput: prepare, experts, finalize --------------------------------------------------------------------


class HighThroughput:
    """Prepare and finalize, with a handle for each of two micro-batches."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int, hidden: int):
        # The group that moves Python objects; rows are rounded up to 512 bytes as the kernels like them.
        hidden_bytes = -(-hidden * 2 // 512) * 512
        num_nvl_bytes = 0
        for config in (Buffer.get_dispatch_config(group.size()), Buffer.get_combine_config(group.size())):
            num_nvl_bytes = max(num_nvl_bytes, config.get_nvl_buffer_size_hint(hidden_bytes, group.size()))
        self.buffer = Buffer(
            group=group,
            num_nvl_bytes=num_nvl_bytes,
            num_rdma_bytes=0,
            low_latency_mode=False,
            num_qps_per_rank=1,
            explicitly_destroy=True,
        )
        self.num_experts = num_experts
        self.first_expert = group.rank() * num_experts // group.size()
        self.handles: list[tuple | None] = [None, None]

    def prepare(self, batch: int, tokens: Any, ids: torch.Tensor, weights: torch.Tensor, is_async: bool):
        captured = Buffer.capture()
        per_rank, per_node, per_expert, mask, event = self.buffer.get_dispatch_layout(
            topk_idx=ids,
            num_experts=self.num_experts,
            previous_event=captured,
            async_finish=False,
            allocate_on_comm_stream=False,
        )
        received, recv_ids, recv_weights, expert_list, handle, event = self.buffer.dispatch(
            x=tokens,
            handle=None,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=mask,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            expert_alignment=1,
            config=self.config(),
            previous_event=captured,
            async_finish=is_async,
            allocate_on_comm_stream=False,
        )
        self.handles[batch] = handle

        def receiver():
            if event.event is not None:
                event.current_stream_wait()
            # What is elsewhere becomes an expert that this rank has not: kernels there skip it.
            nowhere = self.num_experts - 1 if self.first_expert == 0 else 0
            global_ids = torch.where(recv_ids == -1, nowhere, recv_ids + self.first_expert)
            return received, global_ids, recv_weights, expert_list

        assert (event.event is not None) == is_async
        return receiver

    def finalize(self, batch: int, output: torch.Tensor, rows: torch.Tensor, is_async: bool):
        handle, self.handles[batch] = self.handles[batch], None
        combined, _, event = self.buffer.combine(
            x=rows,
            handle=handle,
            topk_weights=None,
            config=self.config(),
            previous_event=Buffer.capture(),
            async_finish=is_async,
            allocate_on_comm_stream=False,
        )

        def receiver() -> None:
            if event.event is not None:
                event.current_stream_wait()
            output.copy_(combined)

        assert (event.event is not None) == is_async
        return receiver

    def config(self) -> Config | None:
        return Buffer.get_dispatch_config(self.buffer.group_size) if self.buffer.group_size in (2, 4, 8) else None


def vllm_forward(rank: int, num_ranks: int, is_async: bool, mode: str) -> None:
    """FP8 tokens out, BF16 rows back, two micro-batches in flight; then a batch of which all goes to one rank."""
    hidden = 256
    group = dist.new_group(list(range(num_ranks)))
    batches = [
        make_layer(num_ranks, hidden, torch.bfloat16, seed=seed, only_rank=None if seed < 2 else 1) for seed in range(3)
    ]
    scale = 1.0 + torch.arange(batches[0].num_experts)
    communication = HighThroughput(group, batches[0].num_experts, hidden)
    local = range(communication.first_expert, communication.first_expert + batches[0].experts_per_rank)

    def experts_of(received: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        if received.size(0) == 0:  # nothing came; the combine still has to be made
            return torch.empty(0, hidden, dtype=torch.bfloat16)
        is_local = (ids >= local.start) & (ids < local.stop)
        factor = torch.where(is_local, scale[ids] * weights, 0.0).sum(1, keepdim=True)
        return (received.float() * factor).bfloat16()

    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]():
        outputs, finals, receivers = {}, {}, {}
        casts = [per_token_cast_to_fp8(batch.xs[rank]) for batch in batches]
        for pair in ((0, 1), (2,)):
            for index in pair:
                receivers[index] = communication.prepare(
                    index % 2, casts[index], batches[index].ids[rank], batches[index].weights[rank], is_async
                )
            for index in pair:
                (received, scales), ids, weights, expert_list = receivers[index]()
                check_received(batches[index], rank, received, scales, expert_list)
                rows = experts_of(per_token_cast_back(received, scales), ids, weights)
                outputs[index] = torch.full((batches[index].xs[rank].size(0), hidden), torch.nan, dtype=torch.bfloat16)
                finals[index] = communication.finalize(index % 2, outputs[index], rows, is_async)
            for index in reversed(pair):
                finals[index]()
        if rank != 1:
            assert received.shape == (0, hidden)
    communication.buffer.destroy()

    for index, batch in enumerate(batches):
        ids = batch.ids[rank]
        factor = torch.where(ids >= 0, scale[ids] * batch.weights[rank], 0.0).sum(1, keepdim=True)
        expected = per_token_cast_back(*per_token_cast_to_fp8(batch.xs[rank])).float() * factor
        # Each row is rounded to BF16 once at its expert, and once more as a sum.
        check_close(outputs[index], expected, 2**-6, 2**-6 * float(expected.abs().max()))


def check_received(layer: Layer, rank: int, received: torch.Tensor, scales: torch.Tensor, counts: list[int]) -> None:
    sent = [per_token_cast_to_fp8(x) for x in layer.xs]
    expected = reference.dispatch(
        [rows.view(torch.uint8) for rows, _ in sent],
        layer.masks,
        [scale for _, scale in sent],
        num_experts=layer.num_experts,
        num_tokens_per_expert=layer.per_expert,
    )[rank]
    assert received.dtype == torch.float8_e4m3fn
    assert torch.equal(received.view(torch.uint8), expected.recv_x)
    assert torch.equal(scales, expected.recv_scales)
    assert counts == expected.num_recv_tokens_per_expert_list


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("is_async", [False, True])
def test_vllm_high_throughput(num_ranks: int, is_async: bool):
    run_ranks(vllm_forward, num_ranks, is_async, "no_grad", limit_secs=90, env=LIMIT)


@pytest.mark.parametrize("is_async", [False, True])
def test_vllm_high_throughput_in_inference_mode(is_async: bool):
    run_ranks(vllm_forward, 2, is_async, "inference_mode", limit_secs=90, env=LIMIT)


# SGLang, normal mode: dispatch and combine in two halves --------------------------------------------------------------

TUNING = json.dumps(
    {
        part: {
            "num_sms": 8,
            "num_max_nvl_chunked_send_tokens": send,
            "num_max_nvl_chunked_recv_tokens": 256,
            "num_max_rdma_chunked_send_tokens": 6,
            "num_max_rdma_chunked_recv_tokens": 128,
        }
        for part, send in (("normal_dispatch", 16), ("normal_combine", 4))
    }
)


def pack_ue8m0(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """FP8 rows, and their scales as exponents, four groups of 128 to an int32, columns contiguous."""
    groups = x.float().view(x.size(0), -1, 128)
    exponent = torch.ceil(torch.log2(groups.abs().amax(2).clamp(min=1e-4) / 448)).int()
    rows = (groups / torch.exp2(exponent.float()).unsqueeze(2)).to(torch.float8_e4m3fn).view(x.shape)
    packed = (exponent + 127).to(torch.uint8).contiguous().view(torch.int32)
    return rows, packed.t().contiguous().t()


class NormalDispatcher:
    """Dispatch a and b, combine a and b; what passes between them is kept on the object."""

    def __init__(self, group: dist.ProcessGroup, num_experts: int, hidden: int, is_async: bool):
        tuning = json.loads(TUNING)
        self.dispatch_config = Config(**tuning["normal_dispatch"])
        self.combine_config = Config(**tuning["normal_combine"])
        configs = (self.dispatch_config, self.combine_config)
        num_bytes = max(config.get_nvl_buffer_size_hint(hidden * 2, group.size()) for config in configs)
        self.buffer = Buffer(group, num_bytes, 0, low_latency_mode=False, num_qps_per_rank=1)
        self.num_experts = num_experts
        self.is_async = is_async
        self.handle: tuple | None = None

    def dispatch_a(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
        return pack_ue8m0(x), ids, weights, Buffer.capture() if self.is_async else None

    def dispatch_b(self, x, ids, weights, previous_event):
        per_rank, per_node, per_expert, mask, previous_event = self.buffer.get_dispatch_layout(
            ids,
            self.num_experts,
            previous_event=previous_event,
            async_finish=self.is_async,
            allocate_on_comm_stream=previous_event is not None,
        )
        received, recv_ids, recv_weights, expert_list, self.handle, event = self.buffer.dispatch(
            x,
            topk_idx=ids,
            topk_weights=weights,
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_node,
            is_token_in_rank=mask,
            num_tokens_per_expert=per_expert,
            previous_event=previous_event,
            async_finish=self.is_async,
            allocate_on_comm_stream=(previous_event is not None) and self.is_async,
            expert_alignment=128,
            config=self.dispatch_config,
        )
        if self.is_async:
            event.current_stream_wait()
        return received, recv_ids, recv_weights, expert_list

    def combine_a(self, rows: torch.Tensor):
        return rows, Buffer.capture() if self.is_async else None

    def combine_b(self, rows: torch.Tensor, previous_event: EventOverlap | None) -> torch.Tensor:
        combined, _, event = self.buffer.combine(
            rows,
            self.handle,
            async_finish=self.is_async,
            previous_event=previous_event,
            allocate_on_comm_stream=previous_event is not None,
            config=self.combine_config,
        )
        if self.is_async:
            event.current_stream_wait()
        self.handle = None
        return combined


def grouped_experts(
    x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor, counts: list[int], scale: torch.Tensor
) -> torch.Tensor:
    """Gather the rows of each expert into its aligned part of one matrix, apply the experts, and sum back."""
    starts = [0, *torch.tensor(counts, dtype=torch.int64).cumsum(0).tolist()]
    grouped = torch.zeros(starts[-1], x.size(1))
    out = torch.zeros(x.shape)
    for expert, (start, end) in enumerate(pairwise(starts)):
        row, slot = (ids == expert).nonzero(as_tuple=True)
        assert row.numel() <= end - start < row.numel() + 128
        grouped[start : start + row.numel()] = x[row].float()
        out.index_add_(0, row, grouped[start : start + row.numel()] * scale[expert] * weights[row, slot].unsqueeze(1))
    return out.bfloat16()


def sglang_forward(rank: int, num_ranks: int, is_async: bool, mode: str) -> None:
    """Three layers through one dispatcher, FP8 out with packed column-major scales, BF16 back."""
    hidden = 1024
    dispatcher: NormalDispatcher | None = None
    with {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode}[mode]():
        for seed in range(3):
            layer = make_layer(num_ranks, hidden, torch.bfloat16, seed=10 + seed, num_tokens=70 if seed == 1 else 9)
            scale = 1.0 + torch.arange(layer.num_experts)
            dispatcher = dispatcher or NormalDispatcher(dist.group.WORLD, layer.num_experts, hidden, is_async)
            inner = dispatcher.dispatch_a(layer.xs[rank], layer.ids[rank], layer.weights[rank])
            assert inner[0][1].stride(0) == 1
            (rows, scales), ids, weights, counts = dispatcher.dispatch_b(*inner)

            sent = [pack_ue8m0(x) for x in layer.xs]
            expected = reference.dispatch(
                [part.view(torch.uint8) for part, _ in sent],
                layer.masks,
                [packed for _, packed in sent],
                layer.ids,
                layer.weights,
                layer.num_experts,
                expert_alignment=128,
                num_tokens_per_expert=layer.per_expert,
            )[rank]
            assert torch.equal(rows.view(torch.uint8), expected.recv_x)
            assert scales.dtype == torch.int32
            assert scales.is_contiguous()
            assert torch.equal(scales, expected.recv_scales)
            assert torch.equal(ids, expected.recv_topk_idx)
            assert torch.equal(weights, expected.recv_topk_weights)
            assert counts == expected.num_recv_tokens_per_expert_list

            mine = slice(rank * layer.experts_per_rank, (rank + 1) * layer.experts_per_rank)
            out = grouped_experts(per_token_cast_back(rows, scales), ids, weights, counts, scale[mine])
            combined = dispatcher.combine_b(*dispatcher.combine_a(out))

            factor = torch.where(layer.ids[rank] >= 0, scale[layer.ids[rank]] * layer.weights[rank], 0.0).sum(1)
            dense = per_token_cast_back(*sent[rank]).float() * factor.unsqueeze(1)
            check_close(combined, dense, 2**-6, 2**-6 * float(dense.abs().max()))


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("is_async", [False, True])
def test_sglang_normal(num_ranks: int, is_async: bool):
    run_ranks(sglang_forward, num_ranks, is_async, "no_grad", limit_secs=90, env=LIMIT)


def test_sglang_normal_in_inference_mode():
    run_ranks(sglang_forward, 2, True, "inference_mode", limit_secs=90, env=LIMIT)
