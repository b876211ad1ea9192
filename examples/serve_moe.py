"""A small MoE decoder served by several ranks, which survives the loss of one and takes a new process in.

    python examples/serve_moe.py
    python examples/serve_moe.py --kill 2 --revive --plot serve.png
    python examples/serve_moe.py --device cuda --ranks 2

Every rank decodes requests of its own, in two micro-batches: while the rows of one travel, the experts compute the
other. The ranks are started by this program, not by torchrun, which ends all ranks when one of them does. It also hosts
the store over which ranks find each other, so that the store survives every rank.

With `--kill` a rank is killed after a while. The others mask it and continue; answers that its experts are missing in
are flagged as degraded. With `--revive` a new process is started in its position: it loads its weights, waits in
`Buffer.join`, and the others take it in by `buffer.replace`, between two steps, without losing a request.

Ranks on the CPU share the cores of one machine, so one rank less would make the others faster. A step is therefore made
to last a while (`--step-ms`), as if every rank had a processor of its own.

All weights are small integers, so that sums are exact in whatever order they are computed. At the end every answer is
compared, token by token, with one that was computed without communication: it must be right, or flagged.
"""

from __future__ import annotations

import argparse
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
import warnings
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from deep_ep import Buffer, metrics
from deep_ep.tools.mps import shared_gpu
from deep_ep.tools.needs import require
from deep_ep.tools.plotting import new_figure, write_png

VOCABULARY, EXPERTS_PER_RANK, TOPK = 64, 4, 2
ANSWER_TOKENS = 12
MOST = 8  # the largest value of a hidden state
_SIZES = (
    ("requests", "requests of a rank at a time, even"),
    ("hidden", "hidden size"),
    ("layers", "layers of the model"),
    ("step_ms", "milliseconds that a step takes at least"),
    ("metrics_port", "rank R serves OpenMetrics at port N + R of loopback; 0: none"),
)
BINS_PER_SEC = 4  # of the picture
_NUM_PORTS = 1 << 16


@dataclass(frozen=True)
class Options:
    """What a rank is told: the sizes, and where it runs."""

    device: str = "cpu"
    ranks: int = 4
    requests: int = 16
    hidden: int = 64
    layers: int = 2
    step_ms: int = 40
    metrics_port: int = 0

    @property
    def num_experts(self) -> int:
        """Experts of all ranks."""
        return EXPERTS_PER_RANK * self.ranks


class Answer(NamedTuple):
    """A request that has been served. Its prompt is the one token that its number stands for."""

    request: int
    tokens: list[int]
    is_degraded: bool


class Report(NamedTuple):
    """What a rank tells the launcher after every step."""

    rank: int
    time: float
    num_tokens: int
    is_degraded: bool
    answers: list[Answer]


class Model:
    """All weights, the same in every process; a rank uses those of its own experts.

    A hidden state is a row of integers from -8 to 8. It is what a request remembers of its earlier tokens.
    """

    def __init__(self, options: Options):
        generator = torch.Generator().manual_seed(7)

        def weights(*shape: int) -> torch.Tensor:
            return torch.randint(-1, 2, shape, generator=generator).bfloat16().to(options.device)

        hidden, num_experts = options.hidden, options.num_experts
        self.embedding = weights(VOCABULARY, hidden)
        self.gates = [weights(hidden, num_experts) for _ in range(options.layers)]
        self.experts = [weights(num_experts, hidden, hidden) for _ in range(options.layers)]

    def enter(self, state: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """The hidden states [T, hidden] with which the next step begins."""
        return (state + self.embedding[tokens]).clamp(-MOST, MOST)

    def route(self, layer: int, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The experts of each token, [T, K], and their weights."""
        topk_idx = _ranked(x.float() @ self.gates[layer].float()).topk(TOPK).indices
        return topk_idx, x.new_tensor([0.75, 0.25], dtype=torch.float32).expand(x.size(0), TOPK).contiguous()

    def expert_rows(self, layer: int, mine: slice, rows: torch.Tensor) -> torch.Tensor:
        """Some experts' results for rows [experts, n, hidden]."""
        return torch.bmm(rows, self.experts[layer][mine]).clamp_(-MOST, MOST)

    def leave(self, x: torch.Tensor, moved: torch.Tensor) -> torch.Tensor:
        """The hidden states behind a layer, with what the experts have added."""
        return (x + moved).floor_().clamp_(-MOST, MOST)

    def next_tokens(self, x: torch.Tensor) -> torch.Tensor:
        """Of hidden states [T, hidden], the likeliest, [T]."""
        return _ranked(x.float() @ self.embedding.float().t()).argmax(1)


def _ranked(scores: torch.Tensor) -> torch.Tensor:
    """Integers without ties: of equal ones the first is the largest."""
    num = scores.size(1)
    return scores * num - torch.arange(num, device=scores.device)


class MicroBatch:
    """Requests that a rank decodes together.

    Args:
        first: The number of the first request.
        model: The model.
        options: The sizes.
        stride: From a request to the one that takes its turn when it is done.
    """

    def __init__(self, first: int, model: Model, options: Options, stride: int):
        size = options.requests // 2
        self._numbers, self._stride, self._model = torch.arange(first, first + size), stride, model
        self._device = options.device
        self._begin(torch.zeros(size, options.hidden, dtype=torch.bfloat16, device=options.device))

    def _begin(self, state: torch.Tensor) -> None:
        self.state = state.zero_()
        self.tokens = (self._numbers % VOCABULARY).to(self._device)
        self._answers: list[torch.Tensor] = []
        self._is_degraded = False

    def advance(self, x: torch.Tensor, is_degraded: bool) -> list[Answer]:
        """Take the hidden states behind the last layer. Returns the requests that are done."""
        self.state, self.tokens = x, self._model.next_tokens(x)
        self._answers.append(self.tokens.cpu())
        self._is_degraded |= is_degraded
        if len(self._answers) < ANSWER_TOKENS:
            return []
        rows = torch.stack(self._answers, 1).tolist()
        done = [Answer(n, row, self._is_degraded) for n, row in zip(self._numbers.tolist(), rows, strict=True)]
        self._numbers += self._stride
        self._begin(self.state)
        return done


class Server:
    """One rank: its experts, and the requests that it decodes.

    Args:
        rank: This rank.
        options: The sizes.
        first_request: Where it begins.
        buffer: The buffer.
    """

    def __init__(self, rank: int, options: Options, model: Model, first_request: int, buffer: Buffer):
        half = options.requests // 2
        firsts = (first_request + rank * options.requests, first_request + rank * options.requests + half)
        self.batches = [MicroBatch(first, model, options, options.ranks * options.requests) for first in firsts]
        self.buffer, self._model, self._options = buffer, model, options
        self._mine = slice(rank * EXPERTS_PER_RANK, (rank + 1) * EXPERTS_PER_RANK)
        self._masks = torch.zeros(options.ranks, dtype=torch.int32, device=options.device)

    def step(self) -> tuple[list[Answer], bool]:
        """Decode one token of every request. Returns the requests that are done, and whether experts are missing."""
        xs = [self._model.enter(one.state, one.tokens) for one in self.batches]
        for layer in range(self._options.layers):
            xs = self._moe(layer, xs)
        self.buffer.low_latency_query_mask_buffer(self._masks)
        is_degraded = bool(self._masks.any())
        answers = [self.batches[index].advance(x, is_degraded) for index, x in enumerate(xs)]
        return [one for some in answers for one in some], is_degraded

    def _moe(self, layer: int, xs: list[torch.Tensor]) -> list[torch.Tensor]:
        """A layer for both micro-batches. Two results are in flight at a time, which is what the hinted size allows."""
        model, hooks, received, combined = self._model, [], [], []
        routes = [model.route(layer, x) for x in xs]
        for x, (topk_idx, _) in zip(xs, routes, strict=True):  # both travel ...
            rows, _, handle, _, hook = self.buffer.low_latency_dispatch(
                x, topk_idx, x.size(0), self._options.num_experts, use_fp8=False, return_recv_hook=True
            )
            hooks.append(hook)
            received.append((rows, handle))
        for index, (rows, handle) in enumerate(received):  # ... while the experts compute the first
            hooks[index]()
            results = model.expert_rows(layer, self._mine, rows)
            moved, _, hook = self.buffer.low_latency_combine(results, *routes[index], handle, return_recv_hook=True)
            combined.append((moved, hook))
        for _, hook in combined:
            hook()
        return [model.leave(x, moved) for x, (moved, _) in zip(xs, combined, strict=True)]


def serve(rank: int, options: Options, port: int, first_request: int, reports: Connection) -> None:
    """The function of a rank's process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes of a terminal; the launcher ends ranks
    threading.Thread(target=end_with_launcher, daemon=True).start()
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    warnings.simplefilter("ignore", RuntimeWarning)  # masks are logged, too
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    if options.device == "cuda":
        torch.cuda.set_device(rank % torch.cuda.device_count())  # ranks may share a GPU
    model = Model(options)  # before the others are asked to wait for this rank
    buffer = make_buffer(rank, options, store)
    if options.device == "cpu":  # on a GPU kernels wait, unseen by the host
        metrics.watch(buffer, num_waits=100)
    if options.metrics_port:
        metrics.serve(buffer, options.metrics_port + rank)
    server = Server(rank, options, model, first_request, buffer)
    generation, step = buffer.generation, int(store.get("step").decode()) if store.check(["step"]) else 0
    while not is_due(store, "stop", step):
        if is_due(store, f"replace {generation}", step):
            store.set("step", str(step))  # where the new process begins to count
            buffer.replace(store)
            generation = buffer.generation
        begun = time.monotonic()
        answers, is_degraded = server.step()
        step += 1
        time.sleep(max(0.0, begun + 1e-3 * options.step_ms - time.monotonic()))
        reports.send(Report(rank, time.monotonic(), options.requests, is_degraded, answers))
    buffer.destroy()
    reports.close()


def end_with_launcher() -> None:
    """End this process when its launcher has ended, in whatever way, and also if the launcher was interrupted while it
    started this process, so that it does not know of it.
    """
    launcher = multiprocessing.parent_process()
    assert launcher is not None
    wait([launcher.sentinel])
    os._exit(1)


def make_buffer(rank: int, options: Options, store: dist.Store) -> Buffer:
    """The buffer of a rank that starts, or of one that takes the position of a rank that has ended."""
    half, num_experts = options.requests // 2, options.num_experts
    arguments: dict[str, Any] = {
        "num_rdma_bytes": Buffer.get_low_latency_rdma_size_hint(half, options.hidden, options.ranks, num_experts),
        "low_latency_mode": True,
        "enable_shrink": True,
        "explicitly_destroy": True,
        "num_cpu_timeout_secs": 20.0,
        "num_gpu_timeout_secs": 10.0,  # after which a rank that was killed is masked: kernels do not see its end
        "device": options.device,
    }
    return Buffer.join(store, rank, options.ranks, **arguments)


def is_due(store: dist.Store, name: str, step: int) -> bool:
    """Whether the launcher has asked for something, and its step has come, which is the same on all ranks.

    The rank that sees the request first chooses the step after the one that it is about to begin. No other rank can
    have begun that one: it would need this rank's tokens of the step before.
    """
    return store.check([name]) and step >= int(store.compare_set(f"{name}: step", "", str(step + 1)).decode())


class Launcher:
    """Starts ranks, kills one, starts another in its position, and collects what they report.

    Args:
        options: The sizes.
    """

    def __init__(self, options: Options):
        self._options = options
        self._start = multiprocessing.get_context("forkserver")
        self._start.set_forkserver_preload(["torch", "torch.distributed", "deep_ep"])
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._processes: dict[int, Any] = {}
        self._pipes: dict[Connection, int] = {}
        self._generation = 1
        self.reports: list[Report] = []
        self.events: list[tuple[float, str]] = []

    def start(self, rank: int, first_request: int = 0) -> None:
        """Start the process of a rank."""
        here, there = self._start.Pipe(duplex=False)
        args = (rank, self._options, self._store.port, first_request, there)
        process = self._start.Process(target=serve, args=args, name=f"rank {rank}", daemon=True)
        process.start()
        self._processes[rank] = process
        there.close()
        self._pipes[here] = rank

    def kill(self, rank: int) -> None:
        """Kill the process of a rank, as the kernel would if there were no memory left."""
        self._processes[rank].kill()
        self._processes[rank].join()
        self._note(f"rank {rank} is killed")

    def revive(self, rank: int, limit_secs: float = 60.0) -> None:
        """Start a new process in the position of a rank, and let the others take it in when it is ready."""
        done = [answer.request for report in self.reports for answer in report.answers if report.rank == rank]
        size = self._options.requests * self._options.ranks
        # It begins with the requests that its predecessor did not finish.
        self.start(rank, size * (1 + max(done, default=-1) // size))
        self._note(f"rank {rank} is started again")
        deadline = time.monotonic() + limit_secs
        while rank not in Buffer.get_joining_ranks(self._store):
            self.collect(0.02)
            if time.monotonic() > deadline:
                raise SystemExit(f"serve_moe: rank {rank} was not ready after {limit_secs:g} s")
        self._store.set(f"replace {self._generation}", "")
        self._generation += 1
        num_before = len(self.reports)
        while not any(report.rank == rank for report in self.reports[num_before:]):
            self.collect(0.02)
            if time.monotonic() > deadline:
                raise SystemExit(f"serve_moe: rank {rank} has served nothing after {limit_secs:g} s")
        self._note(f"rank {rank} serves again")

    def stop(self, limit_secs: float = 60.0) -> None:
        """Let all ranks stop at the same step, and wait for them."""
        self._store.set("stop", "")
        deadline = time.monotonic() + limit_secs
        while self._pipes:
            self.collect(0.1)
            if time.monotonic() > deadline:
                raise SystemExit(f"serve_moe: ranks {sorted(self._pipes.values())} did not stop")

    def collect(self, secs: float) -> None:
        """Take reports, for so long."""
        deadline = time.monotonic() + secs
        while self._pipes and (left := deadline - time.monotonic()) > 0:
            for pipe in wait(list(self._pipes), timeout=left):
                assert isinstance(pipe, Connection)
                try:
                    self.reports.append(pipe.recv())
                except (EOFError, OSError):  # it has ended, perhaps in the middle of a report
                    self._pipes.pop(pipe)
                    pipe.close()

    @property
    def is_running(self) -> bool:
        """Whether a rank may still report something."""
        return bool(self._pipes)

    def close(self) -> None:
        """Kill what still runs."""
        for process in self._processes.values():
            with suppress(ValueError):
                process.kill()
                process.join()

    def _note(self, text: str) -> None:
        self.events.append((time.monotonic(), text))
        print(f"{text} ...", file=sys.stderr, flush=True)


def check_answers(options: Options, answers: list[Answer]) -> tuple[int, int, int]:
    """Compute all answers without communication. Returns how many are right, flagged as degraded, and wrong."""
    options = replace(options, device="cpu")
    model = Model(options)
    numbers = torch.tensor([answer.request for answer in answers])
    tokens = numbers % VOCABULARY
    x, expected = torch.zeros(len(answers), options.hidden, dtype=torch.bfloat16), []
    for _ in range(ANSWER_TOKENS):
        x = model.enter(x, tokens)
        for layer in range(options.layers):
            topk_idx, topk_weights = model.route(layer, x)
            every = model.expert_rows(layer, slice(None), x.expand(options.num_experts, -1, -1))
            chosen = every[topk_idx, torch.arange(x.size(0)).unsqueeze(1)].float()
            x = model.leave(x, (chosen * topk_weights.unsqueeze(2)).sum(1).bfloat16())
        tokens = model.next_tokens(x)
        expected.append(tokens)
    is_right = (torch.stack(expected, 1) == torch.tensor([answer.tokens for answer in answers])).all(1).tolist()
    right = sum(one and not answer.is_degraded for one, answer in zip(is_right, answers, strict=True))
    degraded = sum(answer.is_degraded for answer in answers)
    return right, degraded, len(answers) - right - degraded


class Speeds(NamedTuple):
    """Tokens per second, by time.

    Attributes:
        secs: The beginning of each bin.
        full: Tokens of steps with all experts.
        degraded: Tokens of steps without the experts of a rank.
    """

    secs: list[float]
    full: list[float]
    degraded: list[float]


def speeds_of(reports: list[Report], begun: float) -> Speeds:
    """Tokens per second of all ranks, in bins of a quarter of a second. The last one is not full, and is left out."""
    num_bins = int(BINS_PER_SEC * (max(report.time for report in reports) - begun))
    full, degraded = [0.0] * num_bins, [0.0] * num_bins
    for report in reports:
        index = int(BINS_PER_SEC * (report.time - begun))
        if index < num_bins:
            (degraded if report.is_degraded else full)[index] += BINS_PER_SEC * report.num_tokens
    return Speeds([index / BINS_PER_SEC for index in range(num_bins)], full, degraded)


def write_plot(path: Path, title: str, speeds: Speeds, events: list[tuple[float, str]]) -> None:
    """Draw tokens per second over time, with what happened."""
    figure = new_figure(8.0, 3.6, 110)
    axes = figure.subplots()
    edges = [*speeds.secs, speeds.secs[-1] + 1 / BINS_PER_SEC]
    axes.stairs(speeds.full, edges, fill=True, color="#3a6fb0", label="all experts")
    both = [a + b for a, b in zip(speeds.full, speeds.degraded, strict=True)]
    axes.stairs(
        both, edges, baseline=speeds.full, fill=True, color="#e0a030", label="degraded: a rank's experts are missing"
    )
    top = max(both)
    for index, (secs, text) in enumerate(events):  # one below the other: they may be close
        axes.axvline(secs, color="#b03030", linestyle="--", linewidth=1)
        height = top * (1.05 + 0.09 * (len(events) - 1 - index))
        axes.text(secs, height, f" {text}", fontsize=8, color="#b03030")
    axes.set_ylim(0, top * (1.2 + 0.09 * len(events)))
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens per second")
    axes.set_xlim(0, edges[-1])
    axes.set_title(title, fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="upper left")
    write_png("serve_moe", figure, path)


def run(options: Options, seconds: float, killed: int | None, is_revived: bool) -> Launcher:
    """Serve for so long; kill a rank after a third of it, and revive it after another sixth."""
    launcher = Launcher(options)
    try:
        for rank in range(options.ranks):
            launcher.start(rank)
        while not launcher.reports:
            launcher.collect(0.1)
            if not launcher.is_running:
                raise SystemExit("serve_moe: all ranks have ended")
        launcher.collect(seconds / 3)
        if killed is not None:
            launcher.kill(killed)
            launcher.collect(seconds / 6)
            if is_revived:
                launcher.revive(killed)
            launcher.collect(seconds / 2)
        else:
            launcher.collect(2 * seconds / 3)
        launcher.stop()
    finally:
        launcher.close()
    return launcher


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ranks", type=int, default=Options.ranks, help="ranks to start (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=9.0, metavar="S", help="how long (default: %(default)s)")
    parser.add_argument("--kill", type=int, metavar="RANK", help="kill this rank after a third of the time")
    parser.add_argument("--revive", action="store_true", help="start a new process in its position")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw tokens per second over time")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    for name, what in _SIZES:
        default = getattr(Options, name)
        flag = f"--{name.replace('_', '-')}"
        parser.add_argument(flag, type=int, default=default, metavar="N", help=f"{what} (default: {default})")
    args = parser.parse_args()
    sizes = {name: getattr(args, name) for name, _ in _SIZES}
    positive = {name: size for name, size in sizes.items() if name != "metrics_port"}  # which may be 0
    require("serve_moe", device=args.device, plot=args.plot, ranks=args.ranks, seconds=args.seconds, **positive)
    if args.kill is not None and not 0 <= args.kill < args.ranks:
        parser.error(f"--kill must be a rank below {args.ranks}, got {args.kill}")
    if args.kill is not None and args.ranks == 1:
        parser.error("--kill needs ranks that go on, --ranks 2 or more")
    if args.revive and args.kill is None:
        parser.error("--revive needs --kill RANK")
    if args.requests < 2 or args.requests % 2:
        parser.error(f"--requests must be even, for two micro-batches, got {args.requests}")
    if args.metrics_port + args.ranks > _NUM_PORTS:
        parser.error(f"--metrics-port must be at most {_NUM_PORTS - args.ranks}, got {args.metrics_port}")
    options = Options(args.device, args.ranks, **sizes)
    if options.device == "cuda" and args.kill is None:  # MPS does not survive a client that is killed in a kernel
        with shared_gpu(options.ranks):
            launcher = run(options, args.seconds, args.kill, args.revive)
    else:
        launcher = run(options, args.seconds, args.kill, args.revive)

    answers = [answer for report in launcher.reports for answer in report.answers]
    if not answers:
        raise SystemExit("serve_moe: no request was answered in that time. Give it more --seconds")
    begun = min(report.time for report in launcher.reports)
    speeds = speeds_of(launcher.reports, begun)
    events = [(secs - begun, text) for secs, text in launcher.events]
    print("seconds  tokens/s  of them degraded")
    for secs, full, degraded in zip(*speeds, strict=True):
        what = "".join(f"  <- {text}" for at, text in events if secs <= at < secs + 1 / BINS_PER_SEC)
        print(f"{secs:7.2f}  {full + degraded:8,.0f}  {degraded:16,.0f}{what}")
    right, degraded, wrong = check_answers(options, answers)
    if args.revive:
        (started, _), (serves, _) = events[-2:]
        print(f"from the start of the new process to its first token: {serves - started:.2f} s")
    print(f"{len(answers)} answers: {right} right, {degraded} flagged as degraded, {wrong} wrong")
    if args.plot is not None:
        lost = "" if args.kill is None else f", rank {args.kill} is killed" + (" and replaced" if args.revive else "")
        write_plot(args.plot, f"{options.ranks} ranks on {options.device}{lost}", speeds, events)
        print(f"wrote {args.plot}")
    if wrong:
        raise SystemExit("serve_moe: answers are wrong that were not flagged")


if __name__ == "__main__":
    main()
