"""Dispatch and combine across hosts: the same program on each, started by torchrun or by Slurm.

On every host, with its number (0, 1, ...) in NODE and the name or address of host 0 in FIRST_HOST:

    torchrun --nnodes 2 --nproc-per-node 2 --node-rank $NODE --master-addr $FIRST_HOST examples/two_nodes.py

Under Slurm: `sbatch examples/two_nodes.sbatch`. Where hosts have several networks, GLOO_SOCKET_IFNAME names the
interface that connects them, for gloo and for us. Ranks of a host must be consecutive and equally many on each, as
torchrun has them.

Without hosts to spare, a host can be split: every two ranks of it are a node, with TCP between them.

    DEEP_EP_RANKS_PER_NODE=2 torchrun --standalone --nproc-per-node 4 examples/two_nodes.py
"""

from __future__ import annotations

import torch
import torch.distributed as dist

from deep_ep import Buffer
from deep_ep.tools.needs import require

TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 64, 512, 4, 8


def main() -> None:
    require(
        "two_nodes", torchrun="DEEP_EP_RANKS_PER_NODE=2 torchrun --standalone --nproc-per-node 4 examples/two_nodes.py"
    )
    dist.init_process_group("gloo")
    rank, num_ranks = dist.get_rank(), dist.get_world_size()
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20, explicitly_destroy=True, device="cpu")
    num_experts = EXPERTS_PER_RANK * num_ranks
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(TOKENS, HIDDEN, generator=random).bfloat16()
    topk_idx = torch.rand(TOKENS, num_experts, generator=random).topk(TOPK).indices

    # Tokens by rank, by node and by expert. A token crosses to a node once, however many of its ranks it goes to.
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, num_experts)
    recv_x, *_, handle, _ = buffer.dispatch(
        x,
        num_tokens_per_rank=per_rank,
        num_tokens_per_rdma_rank=per_node,
        is_token_in_rank=mask,
        num_tokens_per_expert=per_expert,
    )
    combined, _, _ = buffer.combine(recv_x, handle)  # experts that do nothing

    is_right = torch.allclose(combined.float(), x.float() * mask.sum(1, keepdim=True), rtol=2e-2)
    answers = [None] * num_ranks
    dist.all_gather_object(answers, is_right)
    if rank == 0:
        num_nodes, sent = buffer.runtime.get_num_rdma_ranks(), buffer.stats().get("rail", {}).get("bytes_sent", 0)
        print(f"transport: {buffer.transport}")
        print(f"rank 0 sent {sent / 1e3:.0f} kB to other nodes")
        verdict = (
            "all sums are right" if all(answers) else f"WRONG on ranks {[i for i, a in enumerate(answers) if not a]}"
        )
        print(f"{num_nodes} nodes of {num_ranks // num_nodes} ranks: {verdict}")
    buffer.destroy()
    dist.barrier()
    dist.destroy_process_group()
    if not all(answers):
        raise SystemExit(1)


if __name__ == "__main__":
    main()
