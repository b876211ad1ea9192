"""Train a small decoder whose experts live on several ranks, on sums written out as text.

    torchrun --nproc-per-node 2 examples/train_moe.py
    python examples/train_moe.py --ranks 2 --steps 60

Each rank has text of its own and its share of the experts. After the backward pass the gradients of everything but the
experts are summed over the ranks; those of the experts are complete already. `--checkpoint` computes activations again
in the backward pass, communication included.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deep_ep import Buffer
from deep_ep.moe import GateOptions, MoELayer, reduce_replicated_gradients

LETTERS = "0123456789+=; "
HIDDEN, HEADS, LAYERS, EXPERTS, TOPK = 64, 4, 2, 8, 2


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    steps: int = 60
    sequences: int = 8  # of each rank
    length: int = 48
    checkpoint: bool = False


class Block(nn.Module):
    """Causal attention, then experts, each added to what comes in."""

    def __init__(self, buffer: Buffer):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        options = GateOptions(num_groups=4, topk_groups=2, balance_loss=1e-3)
        self.moe = MoELayer(
            HIDDEN, HIDDEN, EXPERTS, TOPK, buffer=buffer, shared_intermediate=HIDDEN // 2, options=options
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, N, H] of S sequences to the same, and the auxiliary loss."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, balance_loss = self.moe(self.norms[1](x), num_sequences=len(x))
        return x + y, balance_loss


class Decoder(nn.Module):
    """Letters in, scores of the next letters out."""

    def __init__(self, buffer: Buffer, options: Options):
        super().__init__()
        self.is_checkpointed = options.checkpoint
        self.letters, self.places = nn.Embedding(len(LETTERS), HIDDEN), nn.Embedding(options.length, HIDDEN)
        self.blocks = nn.ModuleList(Block(buffer) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, len(LETTERS))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, N] int64 to [S, N, letters], and the auxiliary loss of all layers."""
        x, loss = self.letters(ids) + self.places.weight[: ids.size(1)], torch.zeros((), device=ids.device)
        for block in self.blocks:
            x, more = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            loss = loss + more
        return self.head(x), loss


def write_text(source: random.Random, options: Options) -> torch.Tensor:
    """[S, N + 1] int64: sums of two small numbers, such as `3+4=7; `."""
    rows = []
    for _ in range(options.sequences):
        text = ""
        while len(text) <= options.length:
            a, b = source.randrange(10), source.randrange(10)
            text += f"{a}+{b}={a + b}; "
        rows.append([LETTERS.index(letter) for letter in text[: options.length + 1]])
    return torch.tensor(rows)


def train(rank: int, num_ranks: int, options: Options) -> list[float]:
    """Train on one rank. Returns the loss of each step, the mean over all ranks."""
    if torch.cuda.is_available():
        torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks may share a GPU
    group = dist.group.WORLD
    buffer = Buffer(group, num_nvl_bytes=1 << 20, explicitly_destroy=True)
    torch.manual_seed(0)  # the same on all ranks: what is replicated must start alike
    model = Decoder(buffer, options).to(buffer.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    source, losses, begin = random.Random(rank), [], time.monotonic()
    for step in range(options.steps):
        text = write_text(source, options).to(buffer.device)
        scores, balance_loss = model(text[:, :-1])
        loss = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        ((loss + balance_loss) / num_ranks).backward()  # gradients are summed over the ranks
        reduce_replicated_gradients(model, group)
        optimizer.step()
        for block in model.blocks:
            block.moe.update_bias()
        mean = loss.detach() / num_ranks
        dist.all_reduce(mean, group=group)
        losses.append(mean.item())
        if rank == 0 and (step % 20 == 0 or step == options.steps - 1):
            num_tokens = (step + 1) * num_ranks * options.sequences * options.length
            speed = num_tokens / (time.monotonic() - begin)
            print(f"step {step:3}: loss {losses[-1]:.3f}, {speed:,.0f} tokens/s on {num_ranks} ranks", flush=True)
    buffer.destroy()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start, where torchrun has not started any")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--checkpoint", action="store_true", help="compute activations again in the backward pass")
    given = parser.parse_args()
    options = Options(steps=given.steps, checkpoint=given.checkpoint)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        train(dist.get_rank(), dist.get_world_size(), options)
        dist.destroy_process_group()
    else:
        from deep_ep.launch import run_ranks

        run_ranks(train, given.ranks, options)


if __name__ == "__main__":
    main()
