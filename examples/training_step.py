"""One training step's four communications, checked against the same layer without communication.

    torchrun --nproc-per-node 4 examples/training_step.py
    python examples/training_step.py --ranks 4

Each rank holds 2 experts (here: a number each row is multiplied by) and 16 tokens. Forward: dispatch, experts, combine.
Backward: the gradient of combine is a dispatch along the same routes, the gradient of dispatch is a combine.
"""

from __future__ import annotations

import argparse
import os

import torch
import torch.distributed as dist

import deep_ep
from deep_ep import Buffer, EventOverlap
from deep_ep.tools.needs import require

EXPERTS_PER_RANK, TOKENS, HIDDEN, TOPK = 2, 16, 32, 2


def dispatch_forward(
    buffer: Buffer, x, topk_idx, topk_weights, num_experts, previous_event: EventOverlap | None = None
):
    """Send tokens to their experts' ranks. The rows may still be on their way when this returns."""
    num_tokens_per_rank, num_tokens_per_rdma_rank, num_tokens_per_expert, is_token_in_rank, event = (
        buffer.get_dispatch_layout(
            topk_idx,
            num_experts,
            previous_event=previous_event,
            async_finish=True,
            allocate_on_comm_stream=previous_event is not None,
        )
    )
    return buffer.dispatch(
        x,
        topk_idx=topk_idx,
        topk_weights=topk_weights,
        num_tokens_per_rank=num_tokens_per_rank,
        num_tokens_per_rdma_rank=num_tokens_per_rdma_rank,
        is_token_in_rank=is_token_in_rank,
        num_tokens_per_expert=num_tokens_per_expert,
        previous_event=event,
        async_finish=True,
        allocate_on_comm_stream=True,
    )


def dispatch_backward(buffer: Buffer, grad_recv_x, grad_recv_topk_weights, handle):
    """Gradients of received rows and weights, summed back to the tokens that they came from."""
    return buffer.combine(grad_recv_x, handle, topk_weights=grad_recv_topk_weights, async_finish=True)


def combine_forward(buffer: Buffer, y, handle, previous_event: EventOverlap | None = None):
    """Sum the experts' rows per token."""
    return buffer.combine(
        y,
        handle,
        async_finish=True,
        previous_event=previous_event,
        allocate_on_comm_stream=previous_event is not None,
    )


def combine_backward(buffer: Buffer, grad_combined_x, handle, previous_event: EventOverlap | None = None):
    """The gradient of a token, sent to every row that was summed into it."""
    return buffer.dispatch(
        grad_combined_x,
        handle=handle,
        async_finish=True,
        previous_event=previous_event,
        allocate_on_comm_stream=previous_event is not None,
    )


def step(rank: int, num_ranks: int) -> float:
    """Forward and backward on one rank. Returns the largest error; all tensors are FP32."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks may share a GPU
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20, explicitly_destroy=True)
    num_experts, device = EXPERTS_PER_RANK * num_ranks, buffer.device
    factors = torch.arange(1.0, num_experts + 1, device=device)  # expert e multiplies by e + 1
    generator = torch.Generator(device).manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=generator, device=device)
    topk_idx = torch.rand(TOKENS, num_experts, generator=generator, device=device).topk(TOPK).indices
    topk_weights = torch.rand(TOKENS, TOPK, generator=generator, device=device)
    grad = torch.randn(TOKENS, HIDDEN, generator=generator, device=device)

    recv_x, recv_topk_idx, recv_topk_weights, counts, handle, event = dispatch_forward(
        buffer, x, topk_idx, topk_weights, num_experts, Buffer.capture()
    )
    event.current_stream_wait()
    local = factors[rank * EXPERTS_PER_RANK : (rank + 1) * EXPERTS_PER_RANK]
    factor = torch.where(recv_topk_idx >= 0, local[recv_topk_idx.clamp(min=0)], 0.0)
    y = recv_x * (factor * recv_topk_weights).sum(1, keepdim=True)
    combined, _, event = combine_forward(buffer, y, handle, Buffer.capture())
    event.current_stream_wait()

    grad_y, _, _, _, _, event = combine_backward(buffer, grad, handle, Buffer.capture())
    event.current_stream_wait()
    grad_recv_x = grad_y * (factor * recv_topk_weights).sum(1, keepdim=True)
    grad_recv_weights = factor * (grad_y * recv_x).sum(1, keepdim=True)
    grad_x, grad_weights, event = dispatch_backward(buffer, grad_recv_x, grad_recv_weights, handle)
    event.current_stream_wait()

    # The same without communication: every expert is here.
    dense = factors[topk_idx]
    weight = (dense * topk_weights).sum(1, keepdim=True)
    errors = [
        (combined - x * weight).abs().max(),
        (grad_x - grad * weight).abs().max(),
        (grad_weights - dense * (grad * x).sum(1, keepdim=True)).abs().max(),
        torch.tensor(float(sum(counts) != int((recv_topk_idx >= 0).sum()))),
    ]
    buffer.destroy()
    return max(float(error) for error in errors)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=4, help="ranks to start, where torchrun has not started any")
    options = parser.parse_args()
    require("training_step", ranks=options.ranks)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        errors = [step(dist.get_rank(), dist.get_world_size())]
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        dist.destroy_process_group()
    else:
        from deep_ep.launch import run_ranks

        errors = run_ranks(step, options.ranks)
        rank, num_ranks = 0, options.ranks
    assert max(errors) < 1e-3, f"rank {rank}: error {max(errors)}"
    if rank == 0:
        print(f"deep_ep {deep_ep.__version__}, {num_ranks} ranks: forward and backward right, error {max(errors):.1e}")


if __name__ == "__main__":
    main()
