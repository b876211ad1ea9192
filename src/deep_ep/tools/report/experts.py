"""The load of the experts: bars, and a picture over time."""

from __future__ import annotations

from typing import Any

from .figures import Load
from .parts import MOST_WORDS, section
from .text import digits

_MOST_BARS = 512
_MOST_COLUMNS, _MOST_ROWS = 240, 256  # of the picture over time


def experts(load: Load | None) -> str:
    """Bars, and where there are some dispatches, how it changes."""
    title = "Load of the experts"
    if load is None or not sum(load.totals):
        return section(title, "", "<p class=verdict>No call told how many tokens its experts got.</p>")
    group = -(-load.num_experts // _MOST_BARS)
    peaks = [max(load.totals[start : start + group]) for start in range(0, load.num_experts, group)]
    most, mean = max(peaks), sum(load.totals) / load.num_experts
    num_ranks = load.num_experts // load.num_local
    bars = "".join(
        f'<rect x="{place + 0.1:g}" y="{1 - peak / most:.4f}" width="0.8" height="{peak / most:.4f}" '
        f'class="{"odd" if place * group // load.num_local % 2 else "even"}">'
        f"<title>{_bar_tip(place * group, group, peak, load)}</title></rect>"
        for place, peak in enumerate(peaks)
    )
    labels = "".join(f"<span>{f'rank {rank}' if num_ranks <= MOST_WORDS else rank}</span>" for rank in range(num_ranks))
    chart = (
        '<div class="bars"><div class="y">'
        f"<span>{digits(most)}</span><span>{digits(most / 2)}</span><span>0</span></div>"
        f'<div class="plot"><svg viewBox="0 0 {len(peaks)} 1" preserveAspectRatio="none" role="img" '
        f'aria-label="tokens of each expert">{bars}</svg>'
        f'<div class="mean" style="bottom:{100 * mean / most:.1f}%"><span>mean {digits(mean)}</span></div></div>'
        f'<div class="x{" many" if num_ranks > 2 * MOST_WORDS else ""}">{labels}</div></div>'
    )
    times = "1 dispatch" if len(load.over_time) == 1 else f"{len(load.over_time):,} dispatches"
    said = f"tokens of each of {load.num_experts} experts, by the rank that owns it, in {times}"
    if load.num_skipped:
        said += f"; {load.num_skipped} with another number of experts left out"
    if len(load.over_time) > 2:
        chart += (
            '<h3>Over time</h3><div class="heat"><div class="y"><span>expert 0</span>'
            f'<span>{load.num_experts - 1}</span></div><canvas id="load" role="img" '
            'aria-label="tokens of each expert in each dispatch"></canvas>'
            f'<div class="x"><span>first dispatch</span><span>last of {len(load.over_time):,}</span></div></div>'
            f'<div class="scale blue" aria-hidden="true"><span>0</span><i></i>'
            f"<span>{_peak_of(load):,} tokens in a dispatch</span></div>"
        )
    return section(title, said, chart)


def _bar_tip(expert: int, group: int, peak: int, load: Load) -> str:
    which = f"expert {expert}" if group == 1 else f"busiest of experts {expert} to {expert + group - 1}"
    return f"{which} (rank {expert // load.num_local}): {peak:,} tokens"


def _peak_of(load: Load) -> int:
    """The most tokens of an expert in a dispatch, as it is drawn."""
    data = load_data(load)
    return max(map(max, data["cells"])) if data is not None else 0


def load_data(load: Load | None) -> dict[str, Any] | None:
    """Tokens by expert and dispatch; of neighbours that do not fit, the most."""
    if load is None or len(load.over_time) <= 2:
        return None
    width = -(-len(load.over_time) // _MOST_COLUMNS)
    height = -(-load.num_experts // _MOST_ROWS)
    columns = [
        [max(counts) for counts in zip(*load.over_time[start : start + width], strict=True)]
        for start in range(0, len(load.over_time), width)
    ]
    cells = [
        [max(column[start : start + height]) for column in columns] for start in range(0, load.num_experts, height)
    ]
    return {"cells": cells, "width": width, "height": height}
