"""Train a small decoder whose experts live on several ranks, on sums written out as text.

    torchrun --nproc-per-node 4 examples/train_moe.py
    python examples/train_moe.py --ranks 4 --steps 200 --plot loss.png

The same batch is split over however many ranks there are, so the losses do not depend on them. After the backward pass
the gradients of everything but the experts are summed over the ranks; those of the experts are complete already.
`--exchange gloo` sends the tokens over `all_to_all_single` instead, for comparison.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from deep_ep import Buffer
from deep_ep.launch import run_ranks
from deep_ep.moe import GateOptions, MoELayer, reduce_replicated_gradients
from deep_ep.tools.plotting import require_matplotlib
from deep_ep.tools.terminal import require_folder
from train_moe_gloo import GlooMoELayer, Shape, measure_exchange
from train_moe_plot import write_plot

LETTERS = "0123456789+=; "
HIDDEN, HEADS, LAYERS, EXPERTS, TOPK = 64, 4, 2, 8, 2
MEASURED_TOKENS, LARGE_HIDDEN, LARGE_TOPK = 1024, 4096, 8


@dataclass(frozen=True)
class Options:
    """What the command line says.

    Attributes:
        steps: How many.
        sequences: Of all ranks together.
        length: Letters of a sequence.
        exchange: `deep_ep` or `gloo`.
        checkpoint: Compute activations again in the backward pass, communication included.
        device: `cpu` or `cuda`; None: a GPU where torch sees one.
        is_measured: Whether the exchange is timed at the end.
    """

    steps: int = 200
    sequences: int = 32
    length: int = 48
    exchange: str = "deep_ep"
    checkpoint: bool = False
    device: str | None = None
    is_measured: bool = False


class Result(NamedTuple):
    """What a run leaves.

    Attributes:
        losses: Of each step, over all ranks' letters, in nats.
        loads: [steps, layers, E] int64, selections of each expert.
        secs: How long it took.
    """

    losses: list[float]
    loads: torch.Tensor
    secs: float


# The text ------------------------------------------------------------------------------------------------------------


def write_sequence(source: random.Random, length: int) -> str:
    """Sums of two small numbers, such as `3+4=7; `, cut to a length."""
    text = ""
    while len(text) < length:
        a, b = source.randrange(10), source.randrange(10)
        text += f"{a}+{b}={a + b}; "
    return text[:length]


def write_batch(step: int, options: Options) -> torch.Tensor:
    """[S, N + 1] int64: the batch of a step, the same on all ranks."""
    source = random.Random(step)
    rows = [write_sequence(source, options.length + 1) for _ in range(options.sequences)]
    return torch.tensor([[LETTERS.index(letter) for letter in row] for row in rows])


def unigram_entropy(length: int) -> float:
    """Nats that a letter is worth to somebody who only knows how frequent each is."""
    source = random.Random(-1)
    counts = Counter("".join(write_sequence(source, length + 1) for _ in range(2000)))
    total = sum(counts.values())
    return -sum(count / total * math.log(count / total) for count in counts.values())


# The model -----------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Causal attention, then experts, each added to what comes in."""

    def __init__(self, buffer: Buffer, options: Options):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        layer = GlooMoELayer if options.exchange == "gloo" else MoELayer
        num_experts = -(-EXPERTS // buffer.group_size) * buffer.group_size  # every rank has as many
        gate = GateOptions(balance_loss=1e-3)
        self.moe = layer(
            HIDDEN, HIDDEN, num_experts, TOPK, buffer=buffer, shared_intermediate=HIDDEN // 2, options=gate
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, N, H] of S sequences to the same, and the auxiliary loss."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, balance_loss = self.moe(self.norms[1](x), num_sequences=max(len(x), 1))
        return x + y, balance_loss


class Decoder(nn.Module):
    """Letters in, scores of the next letters out."""

    def __init__(self, buffer: Buffer, options: Options):
        super().__init__()
        self.is_checkpointed = options.checkpoint
        self.letters, self.places = nn.Embedding(len(LETTERS), HIDDEN), nn.Embedding(options.length, HIDDEN)
        self.blocks = nn.ModuleList(Block(buffer, options) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, len(LETTERS))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, N] int64 to [S, N, letters], and the auxiliary loss of all layers."""
        x, loss = self.letters(ids) + self.places.weight[: ids.size(1)], torch.zeros((), device=ids.device)
        for block in self.blocks:
            x, more = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            loss = loss + more
        return self.head(x), loss


# Training ------------------------------------------------------------------------------------------------------------


def train(rank: int, num_ranks: int, options: Options) -> Result:
    """Train on one rank, together with the others."""
    if torch.cuda.is_available() and options.device != "cpu":
        torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks may share a GPU
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes=1 << 20, explicitly_destroy=True, device=options.device)
    torch.manual_seed(0)  # the same on all ranks: what is replicated must start alike
    model = Decoder(buffer, options).to(buffer.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses, loads, begin = [], [], time.monotonic()
    for step in range(options.steps):
        losses.append(train_step(model, optimizer, write_batch(step, options), rank, num_ranks))
        loads.append(balance(model))
        if rank == 0:
            show_progress(step, losses[-1], time.monotonic() - begin, num_ranks, options)
    secs = time.monotonic() - begin
    if options.is_measured:
        show_exchange(buffer)
    buffer.destroy()
    return Result(losses, torch.stack(loads), secs)


def train_step(
    model: Decoder, optimizer: torch.optim.Optimizer, batch: torch.Tensor, rank: int, num_ranks: int
) -> float:
    """One step on this rank's part of the batch [S, N + 1]. Returns the loss of all ranks' letters."""
    text = batch.tensor_split(num_ranks)[rank].to(model.head.weight.device)
    scores, balance_loss = model(text[:, :-1])
    # Each rank's share of the mean over the whole batch: gradients are summed over the ranks.
    loss = F.cross_entropy(scores.flatten(0, 1), text[:, 1:].flatten(), reduction="sum") / batch[:, 1:].numel()
    optimizer.zero_grad()
    (loss + balance_loss * len(text) / len(batch)).backward()
    reduce_replicated_gradients(model, dist.group.WORLD)
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item()


def balance(model: Decoder) -> torch.Tensor:
    """One step of loss-free balancing in every layer. Returns [layers, E], the selections of the step on all ranks."""
    loads = torch.stack([block.moe.gate.load for block in model.blocks])
    dist.all_reduce(loads)
    for block in model.blocks:
        block.moe.update_bias()
    return loads.cpu()


# Around it -----------------------------------------------------------------------------------------------------------


def show_progress(step: int, loss: float, secs: float, num_ranks: int, options: Options) -> None:
    if step % 10 and step != options.steps - 1:
        return
    speed = (step + 1) * options.sequences * options.length / secs
    filled = 20 * (step + 1) // options.steps
    ranks = f"{num_ranks} rank{'' if num_ranks == 1 else 's'}"
    print(
        f"[{'#' * filled}{'.' * (20 - filled)}] step {step + 1:4}/{options.steps}  loss {loss:.4f}  "
        f"{speed:8,.0f} tokens/s on {ranks}",
        flush=True,
    )


def show_exchange(buffer: Buffer) -> None:
    """Time the exchange of this model's layers, and of a large one's, by a buffer and by gloo. All ranks call it."""
    if buffer.group_size == 1 or buffer.device.type != "cpu":
        return
    num_experts = -(-EXPERTS // buffer.group_size) * buffer.group_size
    for shape in (
        Shape(MEASURED_TOKENS, HIDDEN, num_experts, TOPK, torch.float32),
        Shape(MEASURED_TOKENS, LARGE_HIDDEN, 8 * num_experts, LARGE_TOPK, torch.bfloat16),
    ):
        seen = measure_exchange(buffer, shape)
        if buffer.rank == 0:
            print(
                f"dispatch + combine, {shape}:\n  deep_ep {seen.transfer_ms:.2f} ms ({seen.total_ms:.2f} with the "
                f"waiting for peers), gloo, preallocated {seen.gloo_ms:.2f} ms: {seen.ratio:.1f} times as long",
                flush=True,
            )


def show_result(result: Result, options: Options, plot: Path | None, title: str) -> None:
    entropy = unigram_entropy(options.length)
    print(
        f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f} nats a letter in {options.steps} steps and "
        f"{result.secs:.1f} s; the unigram entropy of the text is {entropy:.4f}"
    )
    if plot is not None:
        write_plot(plot, title, result.losses, result.loads, entropy)
        print(f"wrote {plot}")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4, help="ranks to start, where torchrun has not started any")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--sequences", type=int, default=32, help="of a batch, over all ranks")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: a GPU where torch sees one")
    parser.add_argument("--exchange", choices=("deep_ep", "gloo"), default="deep_ep", help="who carries the tokens")
    parser.add_argument("--checkpoint", action="store_true", help="compute activations again in the backward pass")
    parser.add_argument("--measure", action="store_true", help="time the exchange of a layer by either at the end")
    parser.add_argument(
        "--plot", type=Path, metavar="PATH.png", help="write the loss and the experts' load as a picture"
    )
    return parser.parse_args(arguments)


def main() -> None:
    given = parse()
    if given.plot is not None:
        require_matplotlib("train_moe")
        require_folder("train_moe", given.plot)
    options = Options(
        given.steps,
        given.sequences,
        exchange=given.exchange,
        checkpoint=given.checkpoint,
        device=given.device,
        is_measured=given.measure,
    )
    if "RANK" in os.environ:  # torchrun's
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
        dist.init_process_group("gloo")
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        result = train(rank, num_ranks, options)
        dist.destroy_process_group()
    else:
        rank, num_ranks = 0, given.ranks
        result = run_ranks(train, num_ranks, options, limit_secs=3600.0)[0]
    if rank == 0:
        title = f"{LAYERS} layers of {EXPERTS} experts on {num_ranks} ranks, exchange by {options.exchange}"
        show_result(result, options, given.plot, title)


if __name__ == "__main__":
    main()
