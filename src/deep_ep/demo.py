"""`python -m deep_ep demo`: one MoE layer over a few CPU ranks, shown step by step and checked.

Every rank makes its own tokens and routes them with a made-up router. The tokens are dispatched, small experts run on
the received rows, and combine brings the sums back. The first process then computes the same layer alone, without any
communication, and compares. Everything random follows from the seed, so no input has to be sent anywhere.

Letters: R ranks, T tokens per rank, H hidden size, E experts, L = E / R of them per rank, K experts per token, n rows
that a rank received, I inner size of an expert.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from rich.color import Color
from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from . import __version__
from .buffers.legacy import Buffer
from .launch import run_ranks

_DEFAULT_EXPERTS = 64
_INNER = 16  # I: the experts are there to be checked, not to keep the machine busy
_NUM_WARMUPS, _NUM_ROUNDS = 1, 5
_TOLERANCE = 1e-5  # of the largest expected value; the sums are FP32, in another order than the dense layer's

# What is timed, in the order of the table.
_OPERATIONS = (
    "dispatch, full",
    "dispatch, cached",
    "combine, input in window",
    "combine, input elsewhere",
)
_REMARKS = (
    "counts are exchanged first",
    "same routes, from the handle",
    "get_combine_buffer(): no copy",
    "copied into the window first",
)

_STEPS = ("dispatch", "experts", "combine", *(["timing"] * (_NUM_WARMUPS + _NUM_ROUNDS)))

# A ramp of one hue, from nothing to the most; the same stops colour terminal and picture.
_RAMP = ((239, 246, 253), (165, 204, 238), (79, 148, 208), (23, 92, 158), (10, 48, 94))
_SPARKS = "▁▂▃▄▅▆▇█"
_MOST_SPARKS = 40


@dataclass(frozen=True)
class Shape:
    """The size of the demo.

    Attributes:
        num_ranks: R.
        num_tokens: T, tokens of each rank.
        hidden: H.
        num_experts: E, a multiple of R.
        num_topk: K.
        seed: What everything random follows from.
    """

    num_ranks: int
    num_tokens: int
    hidden: int
    num_experts: int
    num_topk: int
    seed: int

    @property
    def num_local_experts(self) -> int:
        """L."""
        return self.num_experts // self.num_ranks

    def num_mb(self, num_rows: int) -> float:
        """Megabytes of BF16 rows."""
        return num_rows * self.hidden * 2 / 1e6


@dataclass(frozen=True)
class Tokens:
    """What one rank starts with.

    Attributes:
        x: [T, H] BF16.
        topk_idx: [T, K] int64, the experts of each token.
        topk_weights: [T, K] float32, which sum to 1 for each token.
    """

    x: torch.Tensor
    topk_idx: torch.Tensor
    topk_weights: torch.Tensor


@dataclass(frozen=True)
class Expert:
    """A SwiGLU block in FP32.

    Attributes:
        up: [H, 2I], gate and value side by side.
        down: [I, H].
    """

    up: torch.Tensor
    down: torch.Tensor

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[n, H] of any float dtype to [n, H] float32."""
        gate, value = (x.float() @ self.up).chunk(2, dim=1)
        return (F.silu(gate) * value) @ self.down


@dataclass(frozen=True)
class RankResult:
    """What one rank has to tell.

    Attributes:
        num_tokens_to: Tokens sent to each rank, itself included.
        num_rows: n.
        num_tokens_per_expert: Rows that each local expert worked on.
        output: [T, H] float32, the layer's output for the rank's own tokens.
        agrees: Whether cached dispatch and both ways to combine gave the same bits.
        median_secs: Of each operation in `_OPERATIONS`.
    """

    num_tokens_to: list[int]
    num_rows: int
    num_tokens_per_expert: list[int]
    output: torch.Tensor
    agrees: bool
    median_secs: list[float]


@dataclass(frozen=True)
class Check:
    """How far a result is from what it must be."""

    max_abs_error: float
    limit: float
    largest: float

    @property
    def ok(self) -> bool:
        """Whether it is near enough. An error that is not a number is not."""
        return self.max_abs_error <= self.limit


# Options -------------------------------------------------------------------------------------------------------------


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `demo`."""
    parser.add_argument("--ranks", type=int, default=4, help="processes, each of which owns some of the experts")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of each rank")
    parser.add_argument("--hidden", type=int, default=2048, help="hidden size")
    parser.add_argument(
        "--experts",
        type=int,
        default=argparse.SUPPRESS,  # so that the help does not say None
        help=f"experts in all, a multiple of the ranks (default: {_DEFAULT_EXPERTS}, rounded up to one)",
    )
    parser.add_argument("--topk", type=int, default=8, help="experts that each token is sent to")
    parser.add_argument("--seed", type=int, default=0, help="for tokens, routes and experts")
    parser.add_argument(
        "--plot", type=Path, default=argparse.SUPPRESS, metavar="PATH.png", help="write the traffic as a picture, too"
    )


def run(args: argparse.Namespace) -> int:
    """Run the demo.

    Returns:
        0 if the results are right, else 1.

    Raises:
        ValueError: An option is wrong.
        EPError: The ranks could not run.
    """
    shape = _shape_of(args)
    plot_path: Path | None = getattr(args, "plot", None)
    if plot_path is not None:
        _require_plot(plot_path)
    console = Console(highlight=False)
    _show_title(console, shape)
    results = _run_with_progress(console, shape)
    _show_traffic(console, shape, results)
    _show_received(console, shape, results)
    ok = _show_check(console, shape, results)
    _show_bandwidth(console, shape, results)
    if plot_path is not None:
        write_plot(plot_path, shape, results)
        console.print(f"\nWrote {plot_path}", soft_wrap=True)
    return 0 if ok else 1


def _shape_of(args: argparse.Namespace) -> Shape:
    for name in ("ranks", "tokens", "hidden", "topk"):
        if getattr(args, name) < 1:
            raise ValueError(f"demo: --{name} must be at least 1, got {getattr(args, name)}")
    default_experts = -(-_DEFAULT_EXPERTS // args.ranks) * args.ranks
    num_experts = getattr(args, "experts", default_experts)
    if num_experts < 1 or num_experts % args.ranks:
        raise ValueError(f"demo: --experts must be a multiple of --ranks ({args.ranks}), got {num_experts}")
    if args.topk > num_experts:
        raise ValueError(f"demo: --topk must be at most the number of experts ({num_experts}), got {args.topk}")
    return Shape(args.ranks, args.tokens, args.hidden, num_experts, args.topk, args.seed)


# The layer, the same for ranks and check -----------------------------------------------------------------------------


def _generator(shape: Shape, kind: int, index: int) -> torch.Generator:
    # torch's CPU generator looks at 32 bits of a seed: mix all three numbers into those.
    return torch.Generator().manual_seed((shape.seed * 1_000_003 + kind * 65_537 + index) % 2**32)


def make_tokens(shape: Shape, rank: int) -> Tokens:
    """The tokens of a rank and where they go: some experts are liked by all ranks, some by this one."""
    popular = torch.randn(shape.num_experts, generator=_generator(shape, 0, 0))
    random = _generator(shape, 1, rank)
    liked_here = torch.randn(shape.num_experts, generator=random)
    scores = torch.randn(shape.num_tokens, shape.num_experts, generator=random) + 0.6 * (popular + liked_here)
    best, topk_idx = scores.topk(shape.num_topk)
    x = torch.randn(shape.num_tokens, shape.hidden, generator=random).bfloat16()
    return Tokens(x, topk_idx, best.softmax(dim=1))


def make_expert(shape: Shape, expert: int) -> Expert:
    """The weights of one expert."""
    random = _generator(shape, 2, expert)
    up = torch.randn(shape.hidden, 2 * _INNER, generator=random) / shape.hidden**0.5
    return Expert(up, torch.randn(_INNER, shape.hidden, generator=random) / _INNER**0.5)


def dense_layer(shape: Shape) -> torch.Tensor:
    """The layer's output for the tokens of all ranks, [R * T, H] float32, computed here and without communication."""
    tokens = [make_tokens(shape, rank) for rank in range(shape.num_ranks)]
    x = torch.cat([part.x for part in tokens])
    gates = torch.zeros(x.size(0), shape.num_experts)
    gates.scatter_(1, torch.cat([part.topk_idx for part in tokens]), torch.cat([part.topk_weights for part in tokens]))
    output = torch.zeros(x.shape)
    for expert in range(shape.num_experts):
        (rows,) = gates[:, expert].nonzero(as_tuple=True)
        output.index_add_(0, rows, gates[rows, expert, None] * make_expert(shape, expert)(x[rows]))
    return output


def compare(output: torch.Tensor, expected: torch.Tensor) -> Check:
    """Compare the layer's output with the dense one; both [R * T, H] float32."""
    largest = expected.abs().max().item()
    return Check((output - expected).abs().max().item(), _TOLERANCE * largest, largest)


# What a rank does ----------------------------------------------------------------------------------------------------


def _run_rank(rank: int, num_ranks: int, shape: Shape, progress: Connection) -> RankResult:
    """One rank: the MoE layer once, for the check, and then the communication alone, for its times."""
    tell: Callable[[str], None] = progress.send if rank == 0 else _tell_nobody
    tokens = make_tokens(shape, rank)
    num_nvl_bytes = Buffer.get_dispatch_config(num_ranks).get_nvl_buffer_size_hint(shape.hidden * 2, num_ranks)
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes, explicitly_destroy=True)
    try:
        tell(buffer.transport)
        return _run_layer(buffer, shape, tokens, tell)
    finally:
        buffer.destroy()


def _tell_nobody(step: str) -> None:
    """Only rank 0 reports: all ranks are within a call of it."""


def _run_layer(buffer: Buffer, shape: Shape, tokens: Tokens, tell: Callable[[str], None]) -> RankResult:
    tell("dispatch")
    num_tokens_per_rank, _, num_tokens_per_expert, is_token_in_rank, _ = buffer.get_dispatch_layout(
        tokens.topk_idx, shape.num_experts
    )
    layout: dict[str, Any] = {
        "num_tokens_per_rank": num_tokens_per_rank,
        "num_tokens_per_expert": num_tokens_per_expert,
        "is_token_in_rank": is_token_in_rank,
    }
    topk: dict[str, Any] = {"topk_idx": tokens.topk_idx, "topk_weights": tokens.topk_weights}
    recv_x, recv_topk_idx, recv_topk_weights, expert_counts, handle, _ = buffer.dispatch(tokens.x, **layout, **topk)
    assert isinstance(recv_x, torch.Tensor)
    assert recv_topk_idx is not None
    assert recv_topk_weights is not None
    assert expert_counts is not None
    assert handle is not None

    tell("experts")
    # The experts write into the window, where combine finds their rows without a copy.
    rows = buffer.get_combine_buffer(handle, dtype=torch.float32).zero_()
    _run_experts(shape, buffer.rank, recv_x, recv_topk_idx, recv_topk_weights, rows)

    tell("combine")
    output, _, _ = buffer.combine(rows, handle)
    del rows

    agrees = _is_consistent(buffer, tokens.x, recv_x, handle)
    num_rows = recv_x.size(0)
    del recv_x  # its memory is what the timed dispatches reuse
    median_secs = _time_operations(buffer, tokens.x, {**layout, **topk}, handle, tell)
    return RankResult(num_tokens_per_rank.tolist(), num_rows, expert_counts, output, agrees, median_secs)


def _run_experts(
    shape: Shape,
    rank: int,
    recv_x: torch.Tensor,
    recv_topk_idx: torch.Tensor,
    recv_topk_weights: torch.Tensor,
    output: torch.Tensor,
) -> None:
    """Add the weighted results of this rank's experts to `output`, [n, H] float32. Combine itself does not weight."""
    for local_expert in range(shape.num_local_experts):
        rows, slots = (recv_topk_idx == local_expert).nonzero(as_tuple=True)
        expert = make_expert(shape, rank * shape.num_local_experts + local_expert)
        output.index_add_(0, rows, recv_topk_weights[rows, slots, None] * expert(recv_x[rows]))


def _is_consistent(buffer: Buffer, x: torch.Tensor, recv_x: torch.Tensor, handle: tuple) -> bool:
    """Whether a cached dispatch gives the same rows, and combine the same sums from either place."""
    again, *_ = buffer.dispatch(x, handle=handle)
    assert isinstance(again, torch.Tensor)
    from_window, _, _ = buffer.combine(recv_x, handle)
    from_elsewhere, _, _ = buffer.combine(recv_x.clone(), handle)
    return torch.equal(again, recv_x) and torch.equal(from_window, from_elsewhere)


def _time_operations(
    buffer: Buffer, x: torch.Tensor, routing: dict[str, Any], handle: tuple, tell: Callable[[str], None]
) -> list[float]:
    """Median seconds of each of `_OPERATIONS`, which take turns."""
    inside = buffer.get_combine_buffer(handle).fill_(1)
    outside = inside.clone()
    operations: list[Callable[[], Any]] = [
        lambda: buffer.dispatch(x, **routing),
        lambda: buffer.dispatch(x, handle=handle),
        lambda: buffer.combine(inside, handle),
        lambda: buffer.combine(outside, handle),
    ]
    rounds = []
    for _ in range(_NUM_WARMUPS + _NUM_ROUNDS):
        tell("timing")
        rounds.append([_time(operation) for operation in operations])
    return [statistics.median(times) for times in zip(*rounds[_NUM_WARMUPS:], strict=True)]


def _time(operation: Callable[[], Any]) -> float:
    dist.barrier()
    start = time.perf_counter()
    operation()
    return time.perf_counter() - start


# What is seen --------------------------------------------------------------------------------------------------------


def _show_title(console: Console, shape: Shape) -> None:
    ranks = f"{shape.num_ranks} CPU rank{'s' if shape.num_ranks > 1 else ''}"
    console.print(f"[bold]deep_ep {__version__} demo[/]: one MoE layer on {ranks}, dispatch → experts → combine")
    console.print(
        f"{shape.num_tokens:,} tokens a rank, hidden {shape.hidden:,} in BF16, top-{shape.num_topk} of "
        f"{shape.num_experts} experts ({shape.num_local_experts} a rank)"
    )


def _run_with_progress(console: Console, shape: Shape) -> list[RankResult]:
    """Run the ranks, and show what rank 0 says meanwhile: its transport, then its steps."""
    listen, speak = get_context("forkserver").Pipe(duplex=False)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TimeElapsedColumn(),
        console=console,
        transient=True,
    )
    shown: AbstractContextManager = bar if console.is_terminal else nullcontext()
    with listen, shown:
        bar.add_task("starting the ranks", total=1 + len(_STEPS))
        follower = threading.Thread(target=_follow, args=(listen, bar), daemon=True)
        follower.start()
        # The ranks run from the main thread, so that Ctrl-C ends them.
        try:
            with speak:
                return run_ranks(_run_rank, shape.num_ranks, shape, speak)
        finally:
            follower.join(timeout=5.0)  # it ends by itself, once all ends of the pipe are closed


def _follow(listen: Connection, bar: Progress) -> None:
    task = bar.task_ids[0]
    try:
        bar.console.print(f"Transport: [bold]{listen.recv()}[/]")
        while True:
            bar.update(task, advance=1, description=listen.recv())
    except (EOFError, OSError):
        return


def _show_traffic(console: Console, shape: Shape, results: Sequence[RankResult]) -> None:
    """The matrix of tokens: who sends how many to whom."""
    matrix = [result.num_tokens_to for result in results]
    table = _roomy_matrix(shape, matrix)
    if console.measure(table).minimum > console.width:
        table = _narrow_matrix(matrix)
    console.print("\n[bold]Who sends what to whom[/]  [dim](tokens; at most one copy of each to a rank)[/]")
    console.print(table)


def _roomy_matrix(shape: Shape, matrix: Sequence[Sequence[int]]) -> Table:
    """Tokens and megabytes, on two lines a cell, with the sums of rows and columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("from \\ to", style="bold", no_wrap=True)
    for rank in range(shape.num_ranks):
        table.add_column(f"rank {rank}", justify="center", no_wrap=True)
    table.add_column("sends", justify="right", style="dim", no_wrap=True)
    for rank, (counts, shares) in enumerate(zip(matrix, _shares(matrix), strict=True)):
        cells = [
            Padding(Text(_tokens_and_mb(shape, count), justify="center"), (0, 1), style=_heat(share))
            for count, share in zip(counts, shares, strict=True)
        ]
        table.add_row(f"rank {rank}", *cells, _tokens_and_mb(shape, sum(counts)))
    received = [sum(counts) for counts in zip(*matrix, strict=True)]
    sums = [_tokens_and_mb(shape, count) for count in (*received, sum(received))]
    table.add_row(Text("receives", style="not bold"), *sums, style="dim")
    return table


def _narrow_matrix(matrix: Sequence[Sequence[int]]) -> Table:
    """Tokens alone, for many ranks."""
    table = Table(box=None, padding=0, pad_edge=False)
    table.add_column("from \\ to", style="bold", no_wrap=True)
    for rank in range(len(matrix)):
        table.add_column(str(rank), justify="right", no_wrap=True)
    for rank, (counts, shares) in enumerate(zip(matrix, _shares(matrix), strict=True)):
        cells = [
            Padding(Text(str(count), justify="right"), (0, 0, 0, 1), style=_heat(share))
            for count, share in zip(counts, shares, strict=True)
        ]
        table.add_row(f"rank {rank}", *cells)
    return table


def _tokens_and_mb(shape: Shape, num_tokens: int) -> str:
    return f"{num_tokens:,}\n{shape.num_mb(num_tokens):.1f} MB"


def _shares(matrix: Sequence[Sequence[int]]) -> list[list[float]]:
    """Where each count lies between the least (0) and the most (1): a few percent of difference shall be seen."""
    least, most = min(map(min, matrix)), max(map(max, matrix))
    return [[(count - least) / (most - least) if most > least else 0.5 for count in counts] for counts in matrix]


def _heat(share: float) -> Style:
    red, green, blue = ramp(share)
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    return Style(color="white" if is_dark else "black", bgcolor=Color.from_rgb(red, green, blue))


def ramp(share: float) -> tuple[int, int, int]:
    """Red, green and blue for a share between 0 and 1."""
    position = min(max(share, 0.0), 1.0) * (len(_RAMP) - 1)
    stop = min(int(position), len(_RAMP) - 2)
    part = position - stop
    red, green, blue = (
        round(low + (high - low) * part) for low, high in zip(_RAMP[stop], _RAMP[stop + 1], strict=True)
    )
    return red, green, blue


def _show_received(console: Console, shape: Shape, results: Sequence[RankResult]) -> None:
    """What each rank got, and how evenly its experts are loaded."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("", style="bold", no_wrap=True)
    for header in ("rows", "MB", "min", "max"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("tokens per local expert", no_wrap=True, overflow="ellipsis")
    most = max(max(result.num_tokens_per_expert) for result in results)
    for rank, result in enumerate(results):
        counts = result.num_tokens_per_expert
        table.add_row(
            f"rank {rank}",
            f"{result.num_rows:,}",
            f"{shape.num_mb(result.num_rows):.1f}",
            f"{min(counts):,}",
            f"{max(counts):,}",
            Text(_sparkline(counts, most), style=Style(color=Color.from_rgb(*_RAMP[2]))),
        )
    console.print("\n[bold]What each rank received[/]")
    console.print(table)


def _sparkline(counts: Sequence[int], most: int) -> str:
    """A bar for every count; where there are many, one for the largest of a few neighbours."""
    num_neighbours = -(-len(counts) // _MOST_SPARKS)
    peaks = [max(counts[start : start + num_neighbours]) for start in range(0, len(counts), num_neighbours)]
    return "".join(_SPARKS[round(peak / max(most, 1) * (len(_SPARKS) - 1))] for peak in peaks)


def _show_check(console: Console, shape: Shape, results: Sequence[RankResult]) -> bool:
    """Compare with the dense layer, print the verdict and return it."""
    check = compare(torch.cat([result.output for result in results]), dense_layer(shape))
    agrees = all(result.agrees for result in results)
    console.print("\n[bold]Is it right?[/]  [dim](FP32 experts, against the same layer in one process)[/]")
    console.print(
        f"{_verdict(check.ok)}  max abs error {check.max_abs_error:.1e}, limit {check.limit:.1e} "
        f"(largest output {check.largest:.2f})"
    )
    console.print(f"{_verdict(agrees)}  cached dispatch, and combine from inside and outside the window: same bits")
    return check.ok and agrees


def _verdict(ok: bool) -> str:
    return "[bold green]OK[/]" if ok else "[bold red]not OK[/]"


def _show_bandwidth(console: Console, shape: Shape, results: Sequence[RankResult]) -> None:
    """Time and bandwidth of each operation, on the rank that took longest."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("BF16", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("GB/s a rank", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for place, (operation, remark) in enumerate(zip(_OPERATIONS, _REMARKS, strict=True)):
        slowest = max(results, key=lambda result: result.median_secs[place])
        secs = slowest.median_secs[place]
        gbs = shape.num_mb(slowest.num_rows) / 1e3 / secs
        table.add_row(operation, f"{secs * 1e3:.1f}", f"{gbs:.2f}", remark)
    console.print(
        f"\n[bold]How fast[/]  [dim](slowest rank, median of {_NUM_ROUNDS}; bytes a rank received per second)[/]"
    )
    console.print(table)
    console.print("\n[dim]Times are for illustration. `python -m deep_ep bench` measures properly.[/]")


# The picture ---------------------------------------------------------------------------------------------------------


def _require_plot(path: Path) -> None:
    """Fail before anything runs if the picture could not be written after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ValueError("demo: --plot needs matplotlib, which is not installed. pip install deepep-python[plot]")
    if path.suffix.lower() != ".png":
        raise ValueError(f"demo: --plot must name a .png file, got {path}")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"demo: --plot: there is no folder {path.absolute().parent}")


def write_plot(path: Path, shape: Shape, results: Sequence[RankResult]) -> None:
    """Write a PNG: the traffic matrix, and the tokens of every expert.

    Raises:
        ValueError: The file cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 5), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)  # pictures are drawn without a screen, whatever matplotlib is set to
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.7))
    _plot_traffic(left, shape, [result.num_tokens_to for result in results])
    _plot_experts(right, shape, [result.num_tokens_per_expert for result in results])
    figure.suptitle(
        f"deep_ep demo: {shape.num_ranks} ranks, {shape.num_tokens:,} tokens a rank, hidden {shape.hidden:,}, "
        f"top-{shape.num_topk} of {shape.num_experts} experts"
    )
    try:
        figure.savefig(path)
    except OSError as error:
        raise ValueError(f"demo: --plot: cannot write {path} ({error.strerror})") from None


def _plot_traffic(axes: Any, shape: Shape, matrix: Sequence[Sequence[int]]) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    colours = LinearSegmentedColormap.from_list("traffic", [[part / 255 for part in stop] for stop in _RAMP])
    shares = _shares(matrix)
    axes.pcolormesh(shares, cmap=colours, vmin=0, vmax=1, edgecolors="white", linewidth=2)
    font_size = max(6, min(11, 72 // shape.num_ranks))
    for source, counts in enumerate(matrix):
        for target, count in enumerate(counts):
            is_dark = shares[source][target] > 0.45
            text = _tokens_and_mb(shape, count) if shape.num_ranks <= 8 else f"{count}"
            colour = "white" if is_dark else "#1b1b1b"
            axes.text(target + 0.5, source + 0.5, text, ha="center", va="center", fontsize=font_size, color=colour)
    middles = [rank + 0.5 for rank in range(shape.num_ranks)]
    axes.set_xticks(middles, range(shape.num_ranks))
    axes.set_yticks(middles, range(shape.num_ranks))
    axes.invert_yaxis()  # rank 0 on top, as in the terminal
    axes.set_aspect("equal")
    axes.set_xlabel("to rank")
    axes.set_ylabel("from rank")
    axes.set_title("Tokens sent (dark: most, light: fewest)", fontsize=11)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _plot_experts(axes: Any, shape: Shape, counts_by_rank: Sequence[Sequence[int]]) -> None:
    counts = [count for counts in counts_by_rank for count in counts]
    mean = sum(counts) / len(counts)
    colours = [[part / 255 for part in _RAMP[2 + rank % 2]] for rank, local in enumerate(counts_by_rank) for _ in local]
    axes.bar(range(len(counts)), counts, width=0.85, color=colours)
    axes.axhline(mean, color="#666666", linewidth=1, linestyle=(0, (4, 3)))
    axes.annotate(
        f"mean {mean:,.0f}",
        (1, mean),
        xycoords=("axes fraction", "data"),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=9,
        color="#666666",
    )
    middle = (shape.num_local_experts - 1) / 2
    axes.set_xticks(
        [rank * shape.num_local_experts + middle for rank in range(shape.num_ranks)],
        [f"rank {rank}" if shape.num_ranks <= 12 else str(rank) for rank in range(shape.num_ranks)],
    )
    axes.set_xlim(-0.8, len(counts) - 0.2)
    axes.set_xlabel(f"experts 0 to {shape.num_experts - 1}, by the rank that owns them")
    axes.set_ylabel("tokens")
    axes.set_title("Tokens per expert", fontsize=11)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
