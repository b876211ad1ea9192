"""Decoding steps in the manner of the frameworks that call DeepEP's low-latency mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist

from common import run_ranks
from deep_ep import Buffer
from deep_ep.utils.math import per_token_cast_back

pytestmark = pytest.mark.usefixtures("device")

LIMIT = {"DEEP_EP_TIMEOUT_SECS": "30"}
HIDDEN, MAX_TOKENS, NUM_TOPK, EXPERTS_PER_RANK = 512, 16, 3, 2


def tokens_of(rank: int, num_ranks: int, seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * seed + rank)
    x = torch.randn(MAX_TOKENS - rank, HIDDEN, generator=generator).bfloat16()
    ids = torch.rand(x.size(0), EXPERTS_PER_RANK * num_ranks, generator=generator).topk(NUM_TOPK).indices
    return x, ids, torch.rand(x.size(0), NUM_TOPK, generator=generator)


def doubled(rows: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """Experts that double the rows that came; what lies behind them is garbage, and stays so."""
    out = torch.full_like(rows, torch.nan)
    for expert, count in enumerate(counts.tolist()):
        out[expert, :count] = 2 * rows[expert, :count]
    return out


def check(output: torch.Tensor, x: torch.Tensor, weights: torch.Tensor, tolerance: float) -> None:
    expected = 2 * x.float() * weights.sum(1, keepdim=True)
    assert not output.isnan().any()
    assert ((output.float() - expected).norm() / expected.norm()).item() < tolerance


# vLLM: prepare returns a hook and a receiver, finalize writes into the caller's output -------------------------------


class Decoder:
    """Prepare and finalize of one micro-batch at a time, both with hooks."""

    def __init__(self, group: dist.ProcessGroup, use_fp8: bool, use_ue8m0: bool):
        self.num_experts = EXPERTS_PER_RANK * group.size()
        num_rdma_bytes = Buffer.get_low_latency_rdma_size_hint(
            num_max_dispatch_tokens_per_rank=MAX_TOKENS,
            hidden=HIDDEN,
            num_ranks=group.size(),
            num_experts=self.num_experts,
        )
        self.buffer = Buffer(
            group=group,
            num_nvl_bytes=0,
            num_rdma_bytes=num_rdma_bytes,
            low_latency_mode=True,
            num_qps_per_rank=self.num_experts // group.size(),
            allow_nvlink_for_low_latency_mode=True,
            explicitly_destroy=True,
            enable_shrink=True,
        )
        self.use_fp8, self.use_ue8m0 = use_fp8, use_ue8m0
        self.handles: dict[int, tuple] = {}

    def prepare(self, batch: int, x: torch.Tensor, ids: torch.Tensor) -> tuple[Callable[[], None], Callable]:
        expert_x, counts, handle, _, hook = self.buffer.low_latency_dispatch(
            x,
            ids,
            MAX_TOKENS,
            self.num_experts,
            use_fp8=self.use_fp8,
            round_scale=self.use_ue8m0,
            use_ue8m0=self.use_ue8m0,
            async_finish=False,
            return_recv_hook=True,
        )
        self.handles[batch] = handle

        def receiver() -> tuple[torch.Tensor, torch.Tensor]:
            if not self.use_fp8:
                return expert_x, counts
            values, scales = expert_x
            rows = per_token_cast_back(values.view(-1, HIDDEN), scales.contiguous().view(-1, scales.size(-1)))
            return rows.view(values.shape), counts

        return hook, receiver

    def finalize(self, batch: int, output: torch.Tensor, rows: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor):
        _, _, hook = self.buffer.low_latency_combine(
            rows,
            ids,
            weights,
            self.handles.pop(batch),
            async_finish=False,
            zero_copy=False,
            return_recv_hook=True,
            out=output,
        )
        return hook


def vllm_decode(rank: int, num_ranks: int, use_fp8: bool, use_ue8m0: bool) -> None:
    decoder = Decoder(dist.new_group(list(range(num_ranks))), use_fp8, use_ue8m0)
    device = decoder.buffer.device
    with torch.inference_mode():
        for step in range(3):
            batches = [[part.to(device) for part in tokens_of(rank, num_ranks, 2 * step + one)] for one in range(2)]
            outputs = [torch.full_like(x, torch.nan) for x, _, _ in batches]
            received = []
            for batch, (x, ids, _) in enumerate(batches):  # the other micro-batch computes before the hook is called
                hook, receiver = decoder.prepare(batch, x, ids)
                hook()
                received.append(receiver())
            for batch, (x, ids, weights) in enumerate(batches):
                decoder.finalize(batch, outputs[batch], doubled(*received[batch]), ids, weights)()
                check(outputs[batch], x, weights, 6e-2 if use_fp8 else 6e-3)
        mask = torch.ones(num_ranks, dtype=torch.int32, device=device)
        decoder.buffer.low_latency_query_mask_buffer(mask)
        assert mask.tolist() == [0] * num_ranks
        dist.barrier()
        decoder.buffer.get_local_buffer_tensor(torch.int8, use_rdma_buffer=True).zero_()
        decoder.buffer.low_latency_clean_mask_buffer()
    decoder.buffer.destroy()


@pytest.mark.parametrize(("use_fp8", "use_ue8m0"), [(False, False), (True, False), (True, True)])
def test_vllm_decodes(use_fp8: bool, use_ue8m0: bool) -> None:
    run_ranks(vllm_decode, 2, use_fp8, use_ue8m0, limit_secs=90, env=LIMIT)


# SGLang: one buffer for prefill and decoding, hook or event -----------------------------------------------------------


def sglang_steps(rank: int, num_ranks: int, return_recv_hook: bool) -> None:
    """A prefill in normal mode, the buffer cleaned for low latency, two decoding steps, and again."""
    num_experts = EXPERTS_PER_RANK * num_ranks
    hint = Buffer.get_low_latency_rdma_size_hint(MAX_TOKENS, HIDDEN, num_ranks, num_experts)
    buffer = Buffer(dist.group.WORLD, 1 << 20, hint, low_latency_mode=True, num_qps_per_rank=EXPERTS_PER_RANK)
    assert buffer.low_latency_mode
    assert buffer.group_size == num_ranks
    for step in range(2):
        x, ids, weights = (part.to(buffer.device) for part in tokens_of(rank, num_ranks, step))
        per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(ids, num_experts)
        recv_x, _, _, _, handle, _ = buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            is_token_in_rank=mask,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            expert_alignment=128,
        )
        buffer.combine(recv_x, handle)
        buffer.clean_low_latency_buffer(MAX_TOKENS, HIDDEN, num_experts)
        for _ in range(2):
            (values, scales), counts, handle, event, hook = buffer.low_latency_dispatch(
                x,
                ids,
                MAX_TOKENS,
                num_experts,
                use_fp8=True,
                async_finish=not return_recv_hook,
                return_recv_hook=return_recv_hook,
            )
            hook() if return_recv_hook else event.current_stream_wait()
            rows = per_token_cast_back(values.view(-1, HIDDEN), scales.contiguous().view(-1, HIDDEN // 128))
            combined, event, hook = buffer.low_latency_combine(
                doubled(rows.view(values.shape), counts),
                ids,
                weights,
                handle,
                async_finish=not return_recv_hook,
                return_recv_hook=return_recv_hook,
            )
            hook() if return_recv_hook else event.current_stream_wait()
            check(combined, x, weights, 6e-2)


@pytest.mark.parametrize("return_recv_hook", [False, True])
def test_sglang_prefills_and_decodes(return_recv_hook: bool) -> None:
    run_ranks(sglang_steps, 2, return_recv_hook, limit_secs=90, env=LIMIT)
