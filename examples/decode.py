"""A decode loop with low-latency calls. On a GPU the step is captured in a CUDA graph and replayed for every token.

    python examples/decode.py --ranks 2
    python examples/decode.py --device cuda --ranks 8 --tokens 128 --hidden 2048

The model is small and random: embeddings, MoE layers, greedy choice of the next token. A layer is a gate, a dispatch,
the experts as batched matrix products over the packed rows, and a combine. Layers are checked against the same without
communication, and on a GPU replayed steps against eager ones.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist

from deep_ep import Buffer
from deep_ep.launch import run_ranks
from deep_ep.tools.mps import shared_gpu
from deep_ep.tools.needs import require

VOCABULARY, EXPERTS_PER_RANK, TOPK = 256, 4, 2


@dataclass(frozen=True)
class Options:
    """What a rank is told: the sizes, and where it runs."""

    device: str = "cpu"
    tokens: int = 16
    hidden: int = 256
    layers: int = 2
    steps: int = 40


class Model:
    """All weights, the same on every rank; a rank uses its own experts, and the others' only to check."""

    def __init__(self, options: Options, num_ranks: int):
        generator = torch.Generator(options.device).manual_seed(7)

        def weights(*shape: int) -> torch.Tensor:
            values = torch.randn(*shape, generator=generator, device=options.device)
            return (values * shape[-2] ** -0.5).bfloat16()

        self.num_experts = EXPERTS_PER_RANK * num_ranks
        hidden, self.layers = options.hidden, range(options.layers)
        self.embedding = weights(VOCABULARY, hidden) * VOCABULARY**0.5
        self.gates = [weights(hidden, self.num_experts) for _ in self.layers]
        self.up = [weights(self.num_experts, hidden, hidden) for _ in self.layers]
        self.down = [weights(self.num_experts, hidden, hidden) for _ in self.layers]

    def route(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, [T, K], and their weights."""
        scores, topk_idx = (x @ self.gates[layer]).float().topk(TOPK)
        return topk_idx, scores.softmax(1)

    def experts(self, layer: int, mine: slice, rows: torch.Tensor) -> torch.Tensor:
        """Some experts' results for rows [experts, n, hidden]."""
        return torch.bmm(torch.bmm(rows, self.up[layer][mine]).relu_(), self.down[layer][mine])

    def next_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Of hidden states [T, hidden], the likeliest, [T]."""
        return (x @ self.embedding.t()).argmax(1)


class Decoder:
    """One rank's part of the model: its experts, and the tokens that it decodes.

    Args:
        rank: This rank.
        num_ranks: Of all.
        options: The sizes.
    """

    def __init__(self, rank: int, num_ranks: int, options: Options):
        sizes = (options.tokens, options.hidden, num_ranks, EXPERTS_PER_RANK * num_ranks)
        self.buffer = Buffer(
            dist.group.WORLD,
            num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint(*sizes),
            low_latency_mode=True,
            explicitly_destroy=True,
            device=options.device,
        )
        self.model, self.max_tokens = Model(options, num_ranks), options.tokens
        self.mine = slice(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
        generator = torch.Generator().manual_seed(rank)
        self.tokens = torch.randint(VOCABULARY, (options.tokens,), generator=generator).to(options.device)

    def step(self) -> torch.Tensor:
        """One step: writes the next tokens in the place of the last. Returns the hidden states, [T, hidden] BF16."""
        x = self.model.embedding[self.tokens]
        for layer in self.model.layers:
            x = x + self.moe(layer, x)
        self.tokens.copy_(self.model.next_tokens(x))
        return x

    def moe(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """What the experts of all ranks make of this rank's tokens, [T, hidden] BF16."""
        topk_idx, topk_weights = self.model.route(layer, x)
        rows, _, handle, _, _ = self.buffer.low_latency_dispatch(
            x, topk_idx, self.max_tokens, self.model.num_experts, use_fp8=False
        )
        # Rows behind an expert's last one are garbage: so are their results, which nobody reads.
        results = self.model.experts(layer, self.mine, rows)
        return self.buffer.low_latency_combine(results, topk_idx, topk_weights, handle)[0]

    def moe_alone(self, layer: int, x: torch.Tensor) -> torch.Tensor:
        """The same without communication: every expert is here."""
        topk_idx, topk_weights = self.model.route(layer, x)
        every = self.model.experts(layer, slice(None), x.expand(self.model.num_experts, -1, -1))
        chosen = every[topk_idx, torch.arange(x.size(0), device=x.device).unsqueeze(1)]
        return (chosen.float() * topk_weights.unsqueeze(2)).sum(1).bfloat16()

    def captured(self) -> tuple[torch.cuda.CUDAGraph, torch.Tensor]:
        """The step as a graph, and where it leaves the hidden states."""
        graph = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            x = self.step()
        return graph, x


def error_of(got: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest error, as a part of the largest value."""
    return float((got.float() - expected.float()).abs().max() / expected.float().abs().max())


def check_layers(decoder: Decoder) -> float:
    """Compare the layers with themselves without communication. Returns the largest error."""
    x, error = decoder.model.embedding[decoder.tokens], 0.0
    for layer in decoder.model.layers:
        y = decoder.moe(layer, x)
        error = max(error, error_of(y, decoder.moe_alone(layer, x)))
        x = x + y
    return error


def check_replays(decoder: Decoder, graph: torch.cuda.CUDAGraph, x: torch.Tensor, num_steps: int) -> float:
    """Replay and repeat eagerly, from the same tokens. Returns the largest error."""
    error = 0.0
    for _ in range(num_steps):
        before = decoder.tokens.clone()
        graph.replay()
        replayed = x.clone()
        decoder.tokens.copy_(before)
        error = max(error, error_of(replayed, decoder.step()))
    return error


def decode(rank: int, num_ranks: int, options: Options) -> tuple[float, float]:
    """Decode on one rank. Returns tokens a second of this rank, and the largest error."""
    is_gpu = options.device == "cuda"
    if is_gpu:
        torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks may share a GPU
    decoder = Decoder(rank, num_ranks, options)
    tell(rank, "checking the layers")
    error = check_layers(decoder)
    run = decoder.step
    if is_gpu:
        tell(rank, "capturing a step")
        decoder.step()  # kernels are compiled before the capture
        graph, x = decoder.captured()
        error = max(error, check_replays(decoder, graph, x, 3))
        run = graph.replay
    tell(rank, f"decoding {options.steps} tokens")
    synchronize(is_gpu)
    dist.barrier()
    start = time.perf_counter()
    for _ in range(options.steps):
        run()
    synchronize(is_gpu)
    elapsed = time.perf_counter() - start
    decoder.buffer.check()
    if is_gpu:
        del run, graph, x  # before the memory that it reads and writes
    decoder.buffer.destroy()
    return options.tokens * options.steps / elapsed, error


def synchronize(is_gpu: bool) -> None:
    if is_gpu:
        torch.cuda.synchronize()


def tell(rank: int, text: str) -> None:
    if rank == 0:
        print(f"{text} ...", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    for name in ("tokens", "hidden", "layers", "steps"):
        default = getattr(Options, name)
        parser.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"default: {default}")
    args = vars(parser.parse_args())
    num_ranks = args.pop("ranks")
    require("decode", ranks=num_ranks, **args)
    if args["device"] == "cuda":
        with shared_gpu(num_ranks):
            results = run_ranks(decode, num_ranks, Options(**args))
    else:
        results = run_ranks(decode, num_ranks, Options(**args))
    speeds, errors = zip(*results, strict=True)
    assert max(errors) < 2e-2, f"error {max(errors)}"
    print(
        f"{num_ranks} ranks on {args['device']}: {sum(speeds):,.0f} tokens/s, {1e3 * args['tokens'] / min(speeds):.2f} "
        f"ms a step of {args['tokens']} tokens a rank, error {max(errors):.1e}"
    )


if __name__ == "__main__":
    main()
