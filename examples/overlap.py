"""Two micro-batches: while the rows of one are on their way, the other computes. Receive hooks make it so.

    python examples/overlap.py --plot overlap.png
    python examples/overlap.py --device cuda --ranks 4

With `return_recv_hook=True` a call only sends, and occupies nothing afterwards; its hook receives. So a layer is

    send A's dispatch | B's attention | receive A's dispatch
    send B's dispatch | A's experts   | receive B's dispatch
    send A's combine  | B's experts   | receive A's combine
    send B's combine  | A's attention | receive B's combine

and a rank that computes longer than the others delays nobody, as long as it is their turn next. Here the ranks do so by
turns. Without hooks (the same order, each call whole) everybody waits for the slowest in every line.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

from deep_ep import Buffer
from deep_ep.launch import run_ranks
from deep_ep.tools.mps import shared_gpu
from deep_ep.tools.needs import require
from deep_ep.tools.plotting import new_figure, write_png

EXPERTS_PER_RANK, TOKENS, HIDDEN, TOPK = 4, 32, 512, 2
STAGES = 4  # of a layer: lines of the table above
UNEVEN = 0.5  # how much longer than usual the rank computes whose turn it is
SHOWN_LAYERS = 2  # in the timeline


@dataclass(frozen=True)
class Options:
    """What a rank is told: where it runs, and for how long it computes."""

    device: str = "cpu"
    layers: int = 12
    ms: float = 8.0


class Span(NamedTuple):
    """What the stream of a rank did for a while: seconds from the start of the run."""

    what: str
    start: float
    end: float


class Run(NamedTuple):
    """One rank's layers.

    Attributes:
        spans: What it did.
        wait_secs: How long its receives waited for other ranks.
    """

    spans: list[Span]
    wait_secs: float


class Batch:
    """A micro-batch: tokens, routes, and where its rows are."""

    def __init__(self, name: str, rank: int, num_experts: int, device: str):
        generator = torch.Generator(device).manual_seed(2 * rank + (name == "B"))
        self.name = name
        self.x = torch.randn(TOKENS, HIDDEN, generator=generator, device=device).bfloat16()
        self.topk_idx = torch.rand(TOKENS, num_experts, generator=generator, device=device).topk(TOPK).indices
        self.topk_weights = torch.rand(TOKENS, TOPK, generator=generator, device=device)
        self.rows = self.combined = self.handle = None

    def error(self) -> float:
        """Experts double, so this should be what comes back."""
        expected = self.x.float() * 2 * self.topk_weights.sum(1, keepdim=True)
        return float((self.combined.float() - expected).abs().max() / expected.abs().max())


class Compute:
    """Matrix products that keep a device busy for about as long as asked. All ranks do equally many."""

    def __init__(self, options: Options):
        size = 2048 if options.device == "cuda" else 256
        dtype = torch.bfloat16 if options.device == "cuda" else torch.float32
        self._is_gpu = options.device == "cuda"
        self._matrix = torch.randn(size, size, device=options.device).to(dtype) * size**-0.5
        self._out = torch.empty_like(self._matrix)
        self._products = 20
        for _ in range(3):  # the first ones are slow, and all ranks must be at it to see how fast it is
            self._products = max(2, round(self._products * options.ms * 1e-3 / self._slowest_secs()))

    def __call__(self, share: float = 1.0) -> None:
        """Compute for the time asked for, times `share`."""
        for _ in range(round(self._products * share)):
            torch.mm(self._matrix, self._matrix, out=self._out)

    def _slowest_secs(self) -> float:
        synchronize(self._is_gpu)
        dist.barrier()
        start = time.perf_counter()
        self()
        synchronize(self._is_gpu)
        secs = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(secs, dist.ReduceOp.MAX)
        return float(secs)


class Clock:
    """Times of what the current stream does: events on a GPU, else the host's clock."""

    def __init__(self, is_gpu: bool):
        self._is_gpu = is_gpu
        self._marks: list[tuple[str, object]] = []
        self.mark("")

    def mark(self, what: str) -> None:
        """Say what was done since the last mark."""
        now: object = time.perf_counter()
        if self._is_gpu:
            now = torch.cuda.Event(enable_timing=True)
            now.record()
        self._marks.append((what, now))

    def spans(self) -> list[Span]:
        """All of it."""
        synchronize(self._is_gpu)
        first = self._marks[0][1]
        secs = [first.elapsed_time(at) * 1e-3 if self._is_gpu else at - first for _, at in self._marks]
        names = [what for what, _ in self._marks]
        return [Span(what, *ends) for what, ends in zip(names[1:], pairwise(secs), strict=True)]


class Pipeline:
    """The layers of one rank.

    Args:
        rank: This rank.
        num_ranks: Of all.
        options: Sizes.
    """

    def __init__(self, rank: int, num_ranks: int, options: Options):
        self.rank, self.num_ranks, self.options = rank, num_ranks, options
        self.num_experts = EXPERTS_PER_RANK * num_ranks
        self.buffer = Buffer(
            dist.group.WORLD,
            num_rdma_bytes=Buffer.get_low_latency_rdma_size_hint(TOKENS, HIDDEN, num_ranks, self.num_experts),
            low_latency_mode=True,
            explicitly_destroy=True,
            device=options.device,
        )
        self.batches = [Batch(name, rank, self.num_experts, options.device) for name in "AB"]
        self.compute = Compute(options)

    def run(self, num_layers: int, use_hooks: bool) -> Run:
        """Run layers."""
        one, other = self.batches
        is_gpu = self.options.device == "cuda"
        self.waits = torch.zeros(STAGES * num_layers, self.num_ranks, dtype=torch.int64, device=self.options.device)
        self.stage, self.use_hooks = 0, use_hooks
        synchronize(is_gpu)
        self.buffer.clean_low_latency_buffer(TOKENS, HIDDEN, self.num_experts)  # a barrier, on the stream
        self.clock = Clock(is_gpu)
        for _ in range(num_layers):
            self.beside(one, self.dispatch, other, "attention")
            self.beside(other, self.dispatch, one, "experts")
            self.beside(one, self.combine, other, "experts")
            self.beside(other, self.combine, one, "attention")
        spans = self.clock.spans()
        # Of each call, the nanoseconds until the last rank had come.
        return Run(spans, float(self.waits.amax(1).sum()) * 1e-9)

    def beside(self, sent: Batch, call: Callable, computing: Batch, what: str) -> None:
        """Send one batch, compute the other, receive the first."""
        name, hook = call(sent, self.waits[self.stage])
        self.clock.mark(f"{name} {sent.name}" + (": send" if self.use_hooks else ""))
        is_my_turn = self.stage % self.num_ranks == self.rank
        self.compute(1 + UNEVEN * is_my_turn)
        if what == "experts":
            computing.rows.mul_(2)
        self.clock.mark(f"{what} {computing.name}")
        if hook is not None:
            hook()
            self.clock.mark(f"{name} {sent.name}: receive")
        self.stage += 1

    def dispatch(self, batch: Batch, waits: torch.Tensor) -> tuple[str, Callable | None]:
        """A dispatch in BF16; only its send half, with hooks."""
        batch.rows, _, batch.handle, _, hook = self.buffer.low_latency_dispatch(
            batch.x,
            batch.topk_idx,
            TOKENS,
            self.num_experts,
            dispatch_wait_recv_cost_stats=waits,
            use_fp8=False,
            return_recv_hook=self.use_hooks,
        )
        return "dispatch", hook

    def combine(self, batch: Batch, waits: torch.Tensor) -> tuple[str, Callable | None]:
        """A combine; only its send half, with hooks."""
        batch.combined, _, hook = self.buffer.low_latency_combine(
            batch.rows,
            batch.topk_idx,
            batch.topk_weights,
            batch.handle,
            return_recv_hook=self.use_hooks,
            combine_wait_recv_cost_stats=waits,
        )
        return "combine", hook


def work(rank: int, num_ranks: int, options: Options) -> tuple[Run, Run, float]:
    """One rank's layers without and with hooks, and the largest error."""
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks may share a GPU
    pipeline = Pipeline(rank, num_ranks, options)
    runs, errors = [], []
    for use_hooks in (False, True):
        tell(rank, f"{options.layers} layers {'with' if use_hooks else 'without'} hooks")
        pipeline.run(1, use_hooks)  # warm up
        runs.append(pipeline.run(options.layers, use_hooks))
        errors += [batch.error() for batch in pipeline.batches]
    pipeline.buffer.check()
    pipeline.buffer.destroy()
    return runs[0], runs[1], max(errors)


def synchronize(is_gpu: bool) -> None:
    if is_gpu:
        torch.cuda.synchronize()


def tell(rank: int, text: str) -> None:
    if rank == 0:
        print(f"{text} ...", file=sys.stderr, flush=True)


# What is shown -------------------------------------------------------------------------------------------------------


def show_timeline(title: str, run: Run, width: int = 60) -> None:
    """A line for each thing that a rank did, in its first layers."""
    spans = first_layers(run)
    start, whole = spans[0].start, spans[-1].end - spans[0].start
    print(f"{title}: ms from the start, ms")
    for span in spans:
        before, length = (round(width * secs / whole) for secs in (span.start - start, span.end - span.start))
        bar = " " * before + "#" * max(1, length)
        print(f"  {1e3 * (span.start - start):8.2f} {1e3 * (span.end - span.start):7.2f}  {span.what:20} {bar}")


def first_layers(run: Run) -> list[Span]:
    num_spans = len(run.spans) * SHOWN_LAYERS * STAGES
    num_stages = sum(not span.what.startswith(("dispatch", "combine")) for span in run.spans)
    return run.spans[: max(1, num_spans // num_stages)]


def draw(path: Path, without: list[Run], with_hooks: list[Run]) -> None:
    """All ranks, a row each: without hooks above, with them below."""
    colours = {"attention": "#b8bec4", "experts": "#8fbcc9", "dispatch": "#1f6f8b", "combine": "#e0a458"}
    figure = new_figure(11, 1.6 + 0.7 * len(without), dpi=130)
    panels = figure.subplots(2, 1, sharex=True)
    for panel, title, runs in zip(panels, ("without hooks", "with hooks"), (without, with_hooks), strict=True):
        for rank, run in enumerate(runs):
            for span in first_layers(run):
                ms, colour = 1e3 * (span.end - span.start), colours[span.what.split()[0]]
                panel.barh(rank, ms, left=1e3 * span.start, color=colour, edgecolor="white", linewidth=0.4)
        panel.set_title(title, loc="left", fontsize=10)
        panel.set_yticks(range(len(runs)), [f"rank {rank}" for rank in range(len(runs))])
        panel.invert_yaxis()
        panel.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("milliseconds; a dispatch or combine includes its wait")
    handles = [panels[0].barh(0, 0, color=colour, label=what) for what, colour in colours.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    write_png("overlap", figure, path)


def show(results: list[tuple[Run, Run, float]], options: Options, plot: Path | None) -> None:
    without, with_hooks, errors = (list(column) for column in zip(*results, strict=True))
    assert max(errors) < 2e-2, f"error {max(errors)}"
    show_timeline("rank 0 without hooks", without[0])
    show_timeline("rank 0 with hooks", with_hooks[0])
    waits, ms = [], []
    for title, runs in (("without hooks", without), ("with hooks", with_hooks)):
        waits.append(sum(run.wait_secs for run in runs) / len(runs) / options.layers * 1e3)
        ms.append(max(run.spans[-1].end for run in runs) / options.layers * 1e3)
        print(f"{title + ':':15} {ms[-1]:.2f} ms a layer, of which a rank waits {waits[-1]:.3f} ms for others")
    reduction = f"{100 * (1 - waits[1] / waits[0]):.0f}% less" if waits[0] else "nobody waited"
    print(f"waits: {reduction}; a layer takes {ms[1] / ms[0]:.2f} of the time; error {max(errors):.1e}")
    if plot is not None:
        draw(plot, without, with_hooks)
        print(f"wrote {plot}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=2, help="ranks to start (default: 2)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument("--layers", type=int, default=Options.layers, metavar="N", help="default: 12")
    parser.add_argument("--ms", type=float, help="milliseconds of a computation (default: 8, on a GPU 2)")
    parser.add_argument("--plot", type=Path, metavar="PATH.png", help="draw the timeline (needs matplotlib)")
    args = parser.parse_args()
    require("overlap", device=args.device, plot=args.plot, ranks=args.ranks, layers=args.layers, ms=args.ms)
    options = Options(args.device, args.layers, args.ms or (2.0 if args.device == "cuda" else 8.0))
    if args.device == "cuda":
        with shared_gpu(args.ranks):
            results = run_ranks(work, args.ranks, options)
    else:
        results = run_ranks(work, args.ranks, options)
    show(results, options, args.plot)


if __name__ == "__main__":
    main()
