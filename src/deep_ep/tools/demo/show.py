"""What the demo prints: progress, who sends what to whom, what arrived, whether it is right, and how fast."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

import torch
from rich.color import Color
from rich.console import Console, JustifyMethod
from rich.padding import Padding, PaddingDimensions
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.style import Style
from rich.table import Table
from rich.text import Text

from ... import __version__
from ..terminal import counted, only_on_terminal, plain_table, print_table, table_width
from .layer import Shape, compare, dense_layer
from .ranks import NUM_ROUNDS, STEPS, RankResult, run_layer
from .traffic import RAMP, Matrix, ramp, shares, tokens_and_mb

# In the order of `RankResult.median_secs`.
_OPERATIONS = (
    ("dispatch, full", "counts are exchanged first"),
    ("dispatch, cached", "same routes, from the handle"),
    ("combine, input in window", "get_combine_buffer(): no copy"),
    ("combine, input elsewhere", "copied into the window first"),
)

_SPARKS = "▁▂▃▄▅▆▇█"
_MOST_SPARKS = 40


def show_title(console: Console, shape: Shape) -> None:
    """What is about to run."""
    ranks = counted(shape.num_ranks, f"{shape.device.upper()} rank")
    console.print(f"[bold]deep_ep {__version__} demo[/]: one MoE layer on {ranks}, dispatch → experts → combine")
    console.print(
        f"{shape.num_tokens:,} tokens a rank, hidden {shape.hidden:,} in BF16, top-{shape.num_topk} of "
        f"{shape.num_experts} experts ({shape.num_local_experts} a rank)"
    )


def run_with_progress(console: Console, shape: Shape) -> list[RankResult]:
    """Run the layer on its ranks, and show what rank 0 says meanwhile: its transport, then its steps."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(bar_width=30), TimeElapsedColumn())
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task("starting the ranks", total=1 + len(STEPS))

    def show_news(news: str) -> None:
        if news in STEPS:
            bar.update(task, advance=1, description=news)
        else:
            console.print(f"Transport: [bold]{news}[/]")

    with only_on_terminal(console, bar):
        return run_layer(shape, show_news)


def show_traffic(console: Console, shape: Shape, results: Sequence[RankResult]) -> None:
    """The matrix of tokens: who sends how many to whom."""
    matrix = [result.num_tokens_to for result in results]
    table = _roomy_matrix(shape, matrix)
    if table_width(console, table) > console.width:
        table = _narrow_matrix(matrix)
    console.print("\n[bold]Who sends what to whom[/]  [dim](tokens; at most one copy of each to a rank)[/]")
    print_table(console, table)


def _roomy_matrix(shape: Shape, matrix: Matrix) -> Table:
    """Tokens and megabytes, on two lines a cell, with the sums of rows and columns."""
    table = plain_table(gap=1)
    table.add_column("from \\ to", style="bold", no_wrap=True)
    for rank in range(shape.num_ranks):
        table.add_column(f"rank {rank}", justify="center", no_wrap=True)
    table.add_column("sends", justify="right", style="dim", no_wrap=True)
    for rank, (counts, heats) in enumerate(zip(matrix, shares(matrix), strict=True)):
        texts = [tokens_and_mb(shape, count) for count in counts]
        table.add_row(f"rank {rank}", *_cells(texts, heats, "center", (0, 1)), tokens_and_mb(shape, sum(counts)))
    received = [sum(counts) for counts in zip(*matrix, strict=True)]
    sums = [tokens_and_mb(shape, count) for count in (*received, sum(received))]
    table.add_row(Text("receives", style="not bold"), *sums, style="dim")
    return table


def _narrow_matrix(matrix: Matrix) -> Table:
    """Tokens alone, for many ranks."""
    table = plain_table(gap=0)
    table.add_column("from \\ to", style="bold", no_wrap=True)
    for rank in range(len(matrix)):
        table.add_column(str(rank), justify="right", no_wrap=True)
    for rank, (counts, heats) in enumerate(zip(matrix, shares(matrix), strict=True)):
        table.add_row(f"rank {rank}", *_cells([str(count) for count in counts], heats, "right", (0, 0, 0, 1)))
    return table


def _cells(
    texts: Sequence[str], heats: Sequence[float], justify: JustifyMethod, padding: PaddingDimensions
) -> list[Padding]:
    """One row of cells, each in the colour of its share."""
    return [
        Padding(Text(text, justify=justify), padding, style=_heat(share))
        for text, share in zip(texts, heats, strict=True)
    ]


def _heat(share: float) -> Style:
    red, green, blue = ramp(share)
    is_dark = 0.299 * red + 0.587 * green + 0.114 * blue < 140
    return Style(color="white" if is_dark else "black", bgcolor=Color.from_rgb(red, green, blue))


def show_received(console: Console, shape: Shape, results: Sequence[RankResult]) -> None:
    """What each rank got, and how evenly its experts are loaded."""
    table = plain_table(header_style="dim")
    table.add_column("", style="bold", no_wrap=True)
    for header in ("rows", "MB", "min", "max"):
        table.add_column(header, justify="right", no_wrap=True)
    table.add_column("tokens per local expert", overflow="fold")
    most = max(max(result.num_tokens_per_expert) for result in results)
    for rank, result in enumerate(results):
        counts = result.num_tokens_per_expert
        table.add_row(
            f"rank {rank}",
            f"{result.num_rows:,}",
            f"{shape.num_mb(result.num_rows):.1f}",
            f"{min(counts):,}",
            f"{max(counts):,}",
            Text(_sparkline(counts, most), style=Style(color=Color.from_rgb(*RAMP[2]))),
        )
    console.print("\n[bold]What each rank received[/]")
    console.print(table)


def _sparkline(counts: Sequence[int], most: int) -> str:
    """A bar for every count; where there are many, one for the largest of a few neighbours."""
    num_neighbours = -(-len(counts) // _MOST_SPARKS)
    peaks = [max(counts[start : start + num_neighbours]) for start in range(0, len(counts), num_neighbours)]
    return "".join(_SPARKS[round(peak / max(most, 1) * (len(_SPARKS) - 1))] for peak in peaks)


def show_check(console: Console, shape: Shape, results: Sequence[RankResult]) -> bool:
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


def as_json(shape: Shape, results: Sequence[RankResult], ok: bool) -> str:
    """The figures of the demo as JSON."""
    names = ("dispatch", "cached_dispatch", "combine_in_window", "combine_elsewhere")
    ranks = [
        {
            "num_rows": result.num_rows,
            "num_tokens_to": result.num_tokens_to,
            "num_tokens_per_expert": result.num_tokens_per_expert,
            "median_secs": dict(zip(names, result.median_secs, strict=True)),
        }
        for result in results
    ]
    return json.dumps({"version": __version__, "ok": ok, "shape": asdict(shape), "ranks": ranks})


def _verdict(ok: bool) -> str:
    return "[bold green]OK[/]" if ok else "[bold red]not OK[/]"


def show_bandwidth(console: Console, shape: Shape, results: Sequence[RankResult]) -> None:
    """Time and bandwidth of each operation, on the rank that took longest."""
    table = plain_table(header_style="dim")
    table.add_column("BF16", no_wrap=True)
    table.add_column("ms", justify="right", no_wrap=True)
    table.add_column("GB/s a rank", justify="right", no_wrap=True)
    table.add_column("", style="dim")
    for place, (operation, remark) in enumerate(_OPERATIONS):
        secs, num_rows = max((result.median_secs[place], result.num_rows) for result in results)
        gbs = shape.num_mb(num_rows) / 1e3 / secs
        table.add_row(operation, f"{secs * 1e3:.1f}", f"{gbs:.2f}", remark)
    console.print(
        f"\n[bold]How fast[/]  [dim](slowest rank, median of {NUM_ROUNDS}; bytes a rank received per second)[/]"
    )
    console.print(table)
    console.print("\n[dim]Times are for illustration. `python -m deep_ep bench` measures properly.[/]")
