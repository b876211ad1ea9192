"""Train a small decoder whose experts live on several ranks, on sums written out as text.

    torchrun --nproc-per-node 4 examples/train_moe.py
    python examples/train_moe.py --ranks 4 --steps 200 --plot loss.png
    python examples/train_moe.py --ranks 4 --ep 2 --steps 100 --state /tmp/run    # two replicas of the experts
    python examples/train_moe.py --ranks 2 --steps 200 --state /tmp/run           # goes on from step 100, on two ranks

Experts are DTensors over `--ep` ranks. FSDP2 shards everything else over all ranks, and the experts over their
replicas; gradients are those of the mean of all ranks' losses. The same batch is split over however many ranks there
are, so the losses do not depend on them. `--exchange gloo` sends the tokens over `all_to_all_single` instead, for
comparison.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from deep_ep import Buffer, moe
from deep_ep.launch import run_ranks
from deep_ep.moe import GateOptions, MoELayer
from deep_ep.tools.needs import require
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
        ep: Ranks that share one set of experts; 0: all.
        clip: Greatest norm of the gradients.
        compiler: Backend of `torch.compile` for the blocks; None: they are not compiled.
        state: Folder of checkpoints: the last is loaded, and one is written every `save_every` steps and at the end.
        save_every: Steps between checkpoints.
    """

    steps: int = 200
    sequences: int = 32
    length: int = 48
    exchange: str = "deep_ep"
    checkpoint: bool = False
    device: str | None = None
    is_measured: bool = False
    ep: int = 0
    clip: float = 1.0
    compiler: str | None = None
    state: Path | None = None
    save_every: int = 50


class Result(NamedTuple):
    """What a run leaves.

    Attributes:
        losses: Of each step that was made here, over all ranks' letters, in nats.
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

    def __init__(self, buffer: Buffer, mesh: DeviceMesh, options: Options):
        super().__init__()
        self.norms = nn.ModuleList([nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)])
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        layer = GlooMoELayer if options.exchange == "gloo" else MoELayer
        num_experts = -(-EXPERTS // buffer.group_size) * buffer.group_size  # every rank has as many
        self.moe = layer(
            HIDDEN,
            HIDDEN,
            num_experts,
            TOPK,
            buffer=buffer,
            mesh=mesh,
            shared_intermediate=HIDDEN // 2,
            options=GateOptions(balance_loss=1e-3),
            # Fixed shapes make one graph of a block; all tokens always suffice.
            num_worst_tokens=options.sequences * options.length if options.compiler else 0,
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, N, H] of S sequences to the same, and the auxiliary loss."""
        q, k, v = self.qkv(self.norms[0](x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        y, balance_loss = self.moe(self.norms[1](x), num_sequences=max(len(x), 1))
        return x + y, balance_loss


class Decoder(nn.Module):
    """Letters in, scores of the next letters out."""

    def __init__(self, buffer: Buffer, mesh: DeviceMesh, options: Options):
        super().__init__()
        self.is_checkpointed = options.checkpoint
        self.letters, self.places = nn.Embedding(len(LETTERS), HIDDEN), nn.Embedding(options.length, HIDDEN)
        self.blocks = nn.ModuleList(Block(buffer, mesh, options) for _ in range(LAYERS))
        self.head = nn.Linear(HIDDEN, len(LETTERS))

    def forward(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[S, N] int64 to [S * N, letters], and the auxiliary loss of all layers."""
        x, loss = self.letters(ids) + self.places.weight[: ids.size(1)], torch.zeros((), device=ids.device)
        for block in self.blocks:
            x, more = checkpoint(block, x, use_reentrant=False) if self.is_checkpointed else block(x)
            loss = loss + more
        return self.head(x.flatten(0, 1)), loss


# Training ------------------------------------------------------------------------------------------------------------


def train(rank: int, num_ranks: int, options: Options) -> Result:
    """Train on one rank, together with the others."""
    if torch.cuda.is_available() and options.device != "cpu":
        torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks may share a GPU
    grid = make_grid(num_ranks, options)
    buffer = Buffer(grid.get_group("ep"), num_nvl_bytes=1 << 20, explicitly_destroy=True, device=grid.device_type)
    torch.manual_seed(0)  # the same on all ranks: what is replicated must start alike
    model = Decoder(buffer, grid["ep"], options).to(buffer.device)
    shard(model, grid, options)
    optimizer = torch.optim.AdamW(moe.parameter_groups(model), lr=3e-3)
    saver = Saver(options.state, model, optimizer)
    losses, loads, begin = [], [], time.monotonic()
    first = saver.load()
    if first and rank == 0:
        print(f"goes on from the checkpoint of step {first} in {options.state}", flush=True)
    for step in range(first, options.steps):
        losses.append(train_step(model, optimizer, write_batch(step, options), rank, num_ranks, options))
        loads.append(balance(model))
        if (step + 1) % options.save_every == 0 or step == options.steps - 1:
            saver.save(step + 1)
        if rank == 0:
            show_progress(step, first, losses[-1], time.monotonic() - begin, num_ranks, options)
    saver.wait()
    secs = time.monotonic() - begin
    if options.is_measured:
        show_exchange(buffer)
    buffer.destroy()
    return Result(losses, torch.stack(loads) if loads else torch.empty(0, LAYERS, EXPERTS), secs)


def check(num_ranks: int, options: Options) -> None:
    """Refuse options that do not fit together, before ranks are started.

    Raises:
        ValueError: They do not.
    """
    ep, state = options.ep or num_ranks, options.state
    if num_ranks % ep:
        raise ValueError(f"train_moe: --ep must divide the {num_ranks} ranks, got {ep}")
    if options.exchange == "gloo" and ep != num_ranks:
        raise ValueError("train_moe: --exchange gloo needs the experts over all ranks; leave --ep out")
    if state is not None and state.exists() and not state.is_dir():
        raise ValueError(f"train_moe: --state must be a folder, {state} is a file")


def make_grid(num_ranks: int, options: Options) -> DeviceMesh:
    """A mesh of two dimensions: replicas of the experts, and the ranks that share one set of them."""
    check(num_ranks, options)
    ep = options.ep or num_ranks
    kind = options.device or os.environ.get("DEEP_EP_DEVICE") or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(kind, (num_ranks // ep, ep), mesh_dim_names=("dp", "ep"))


def has_fsdp(grid: DeviceMesh) -> bool:
    """Whether torch can shard there: not for ranks that share a GPU, which NCCL refuses."""
    return grid.device_type == "cpu" or "nccl" in dist.get_backend_config(grid.get_group("ep"))


def shard(model: Decoder, grid: DeviceMesh, options: Options) -> None:
    """Compile the blocks, shard the experts over their replicas, and everything else over all ranks."""
    has_replicas = grid["dp"].size() > 1
    if has_replicas and not has_fsdp(grid):
        raise ValueError("train_moe: replicas of experts need FSDP2, and so a GPU for each rank; leave --ep out")
    if options.compiler:
        for block in model.blocks:  # FSDP2 gathers experts inside of a block where they have replicas: a graph break
            block.compile(backend=options.compiler, fullgraph=not has_replicas)
    if not has_fsdp(grid):
        return
    world = init_device_mesh(grid.device_type, (grid.size(),))
    for module in (*model.blocks, model):
        if has_replicas and isinstance(module, Block):
            fully_shard(module.moe.experts, mesh=grid["dp"])
        fully_shard(module, mesh=world, ignored_params=moe.expert_parameters(module))


def train_step(
    model: Decoder,
    optimizer: torch.optim.Optimizer,
    batch: torch.Tensor,
    rank: int,
    num_ranks: int,
    options: Options,
) -> float:
    """One step on this rank's part of the batch [S, N + 1]. Returns the loss of all ranks' letters."""
    text = batch.tensor_split(num_ranks)[rank].to(next(model.parameters()).device)
    scores, balance_loss = model(text[:, :-1])
    # Each rank's share of the mean over the whole batch. Gradients become those of the mean of the ranks' losses.
    loss = F.cross_entropy(scores, text[:, 1:].flatten(), reduction="sum") / batch[:, 1:].numel()
    optimizer.zero_grad()
    (num_ranks * (loss + balance_loss * len(text) / len(batch))).backward()
    if not hasattr(model, "set_requires_gradient_sync"):  # no FSDP2
        moe.reduce_replicated_gradients(model, dist.group.WORLD, "mean")
    moe.clip_grad_norm_(model, options.clip)
    optimizer.step()
    total = loss.detach()
    dist.all_reduce(total)
    return total.item()


def balance(model: Decoder) -> torch.Tensor:
    """One step of loss-free balancing in every layer. Returns [layers, E], the selections of the step on all ranks."""
    loads = torch.stack([block.moe.gate.load for block in model.blocks])
    dist.all_reduce(loads)
    for block in model.blocks:
        block.moe.update_bias(group=dist.group.WORLD)
    return loads.cpu()


class Saver:
    """Checkpoints of model, optimizer and step, each in a folder, which any number of ranks can load."""

    def __init__(self, folder: Path | None, model: nn.Module, optimizer: torch.optim.Optimizer):
        self._folder, self._model, self._optimizer = folder, model, optimizer
        # Its thread communicates while the training does: in a group of its own.
        self._group = dist.new_group(backend="gloo") if folder is not None else None
        self._saving: Any = None

    def load(self) -> int:
        """Go on from the last checkpoint that is complete, where there is one. Returns the first step to make."""
        names = [file.parent.name for file in self._folder.glob("*/.metadata")] if self._folder else []
        steps = [int(name) for name in names if name.isdecimal()]
        if self._folder is None or not steps:
            return 0
        state = self._state(0)
        dcp.load(state, checkpoint_id=self._folder / str(max(steps)))
        parts = {"model_state_dict": state["model"], "optim_state_dict": state["optimizer"]}
        set_state_dict(self._model, self._optimizer, **parts)
        return state["step"]

    def save(self, step: int) -> None:
        """Begin to write; training goes on meanwhile."""
        if self._folder is not None:
            self.wait()
            where = self._folder / str(step)
            self._saving = dcp.async_save(self._state(step), checkpoint_id=where, process_group=self._group)

    def wait(self) -> None:
        """Until what was begun is written."""
        if self._saving is not None:
            self._saving.result()
            self._saving = None

    def _state(self, step: int) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        return {"model": model, "optimizer": optimizer, "step": step}


# Around it -----------------------------------------------------------------------------------------------------------


def show_progress(step: int, first: int, loss: float, secs: float, num_ranks: int, options: Options) -> None:
    if step % 10 and step != options.steps - 1:
        return
    speed = (step + 1 - first) * options.sequences * options.length / secs
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
    if not result.losses:
        print(f"the checkpoint in {options.state} is of step {options.steps} or later: pass more --steps")
        return
    entropy = unigram_entropy(options.length)
    print(
        f"loss {result.losses[0]:.4f} -> {result.losses[-1]:.4f} nats a letter in {len(result.losses)} steps and "
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
    parser.add_argument("--ep", type=int, help="ranks that share one set of experts; default: all")
    parser.add_argument("--clip", type=float, default=1.0, help="greatest norm of the gradients of all ranks")
    parser.add_argument(
        "--compile", nargs="?", const="inductor", metavar="BACKEND", help="compile the blocks, with fixed shapes"
    )
    parser.add_argument(
        "--state",
        type=Path,
        metavar="FOLDER",
        help=f"folder of checkpoints, to go on from and to write; ranks may change as long as they divide {EXPERTS}",
    )
    parser.add_argument("--measure", action="store_true", help="time the exchange of a layer by either at the end")
    parser.add_argument(
        "--plot", type=Path, metavar="PATH.png", help="write the loss and the experts' load as a picture"
    )
    return parser.parse_args(arguments)


def start(num_ranks: int, options: Options) -> Result:
    """Train on ranks of this machine. What the user can mend ends in one sentence."""
    try:
        check(num_ranks, options)
        return run_ranks(train, num_ranks, options, limit_secs=3600.0)[0]
    except ValueError as error:
        raise SystemExit(str(error)) from None
    except KeyboardInterrupt:
        more = f". The same command goes on from the last checkpoint in {options.state}" if options.state else ""
        print(f"train_moe: interrupted{more}", file=sys.stderr)
        raise SystemExit(130) from None


def main() -> None:
    given = parse()
    numbers = {"ranks": given.ranks, "steps": given.steps, "sequences": given.sequences, "clip": given.clip}
    require("train_moe", device=given.device, plot=given.plot, ep=given.ep, **numbers)
    options = Options(
        given.steps,
        given.sequences,
        exchange=given.exchange,
        checkpoint=given.checkpoint,
        device=given.device,
        is_measured=given.measure,
        ep=given.ep or 0,
        clip=given.clip,
        compiler=given.compile,
        state=given.state,
    )
    if "RANK" in os.environ:  # torchrun's
        torch.set_num_threads(max(1, (os.cpu_count() or 1) // int(os.environ["LOCAL_WORLD_SIZE"])))
        has_own_gpu = given.device != "cpu" and torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        dist.init_process_group("cpu:gloo,cuda:nccl" if has_own_gpu else "gloo")
        rank, num_ranks = dist.get_rank(), dist.get_world_size()
        result = train(rank, num_ranks, options)
        dist.destroy_process_group()
    else:
        rank, num_ranks = 0, given.ranks
        result = start(num_ranks, options)
    if rank == 0:
        title = f"{LAYERS} layers of {EXPERTS} experts on {num_ranks} ranks, exchange by {options.exchange}"
        show_result(result, options, given.plot, title)


if __name__ == "__main__":
    main()
