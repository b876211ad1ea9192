"""The demo's picture: the traffic matrix, and the tokens of every expert."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..plotting import new_figure, write_png
from .layer import Shape
from .ranks import RankResult
from .traffic import RAMP, Matrix, shares, tokens_and_mb

_COLOURS = [tuple(part / 255 for part in stop) for stop in RAMP]
_DARK_SHARE = 0.45  # from here on, words in a cell are white
_GREY = "#666666"


def write_plot(path: Path, shape: Shape, results: Sequence[RankResult]) -> None:
    """Write it as PNG.

    Raises:
        ValueError: The file cannot be written.
    """
    figure = new_figure(13, 5, dpi=120)
    left, right = figure.subplots(1, 2, width_ratios=(1, 1.7))
    _plot_traffic(left, shape, [result.num_tokens_to for result in results])
    _plot_experts(right, shape, [result.num_tokens_per_expert for result in results])
    figure.suptitle(
        f"deep_ep demo: {shape.num_ranks} ranks, {shape.num_tokens:,} tokens a rank, hidden {shape.hidden:,}, "
        f"top-{shape.num_topk} of {shape.num_experts} experts"
    )
    write_png("demo", figure, path)


def _plot_traffic(axes: Any, shape: Shape, matrix: Matrix) -> None:
    from matplotlib.colors import LinearSegmentedColormap

    heats = shares(matrix)
    colours = LinearSegmentedColormap.from_list("traffic", _COLOURS)
    axes.pcolormesh(heats, cmap=colours, vmin=0, vmax=1, edgecolors="white", linewidth=2)
    font_size = max(6, min(11, 72 // shape.num_ranks))
    for source, counts in enumerate(matrix):
        for target, count in enumerate(counts):
            text = tokens_and_mb(shape, count) if shape.num_ranks <= 8 else f"{count}"
            colour = "white" if heats[source][target] > _DARK_SHARE else "#1b1b1b"
            axes.text(target + 0.5, source + 0.5, text, ha="center", va="center", fontsize=font_size, color=colour)
    middles = [rank + 0.5 for rank in range(shape.num_ranks)]
    axes.set_xticks(middles, range(shape.num_ranks))
    axes.set_yticks(middles, range(shape.num_ranks))
    axes.invert_yaxis()  # rank 0 on top, as in the terminal
    axes.set_aspect("equal")
    axes.set(xlabel="to rank", ylabel="from rank")
    axes.set_title("Tokens sent (dark: most, light: fewest)", fontsize=11)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _plot_experts(axes: Any, shape: Shape, counts_by_rank: Matrix) -> None:
    counts = [count for counts in counts_by_rank for count in counts]
    mean = sum(counts) / len(counts)
    colours = [_COLOURS[2 + rank % 2] for rank, local in enumerate(counts_by_rank) for _ in local]
    axes.bar(range(len(counts)), counts, width=0.85, color=colours)
    axes.axhline(mean, color=_GREY, linewidth=1, linestyle=(0, (4, 3)))
    behind_axes = {"xycoords": ("axes fraction", "data"), "xytext": (4, 0), "textcoords": "offset points"}
    axes.annotate(f"mean {mean:,.0f}", (1, mean), **behind_axes, va="center", fontsize=9, color=_GREY)
    middle = (shape.num_local_experts - 1) / 2
    axes.set_xticks(
        [rank * shape.num_local_experts + middle for rank in range(shape.num_ranks)],
        [f"rank {rank}" if shape.num_ranks <= 12 else str(rank) for rank in range(shape.num_ranks)],
    )
    axes.set_xlim(-0.8, len(counts) - 0.2)
    axes.set(xlabel=f"experts 0 to {shape.num_experts - 1}, by the rank that owns them", ylabel="tokens")
    axes.set_title("Tokens per expert", fontsize=11)
    axes.tick_params(axis="x", length=0)
    axes.spines[["top", "right"]].set_visible(False)
