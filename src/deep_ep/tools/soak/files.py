"""What a soak leaves in files: everything as JSON, memory over time as a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from ..plotting import new_figure, write_png
from .parent import Outcome

_MB = 1e6


def write_json(path: Path, outcome: Outcome, machine: dict[str, Any]) -> None:
    """Write goal, machine, verdict, and each rank's report with its samples.

    Raises:
        ValueError: The file cannot be written.
    """
    content = {
        **vars(outcome),
        "num_calls": outcome.num_calls,
        "num_errors": outcome.num_errors,
        "is_flat": [growth.is_flat for growth in outcome.growths],
        "replay": outcome.replay,
        "machine": machine,
    }
    write_text(path, json.dumps(content, indent=1, default=vars))


def write_text(path: Path, text: str) -> None:
    """Write what `--json` asks for.

    Raises:
        ValueError: The file cannot be written.
    """
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ValueError(f"soak: --json: cannot write {path} ({error.strerror})") from None


def write_plot(path: Path, outcome: Outcome) -> None:
    """Draw each rank's memory over time: its own above, behind its arena below.

    Raises:
        ValueError: The file cannot be written.
    """
    figure = new_figure(10, 6, dpi=120)
    above, below = figure.subplots(2, 1, sharex=True)
    for rank, report in enumerate(outcome.reports):
        secs = [sample.secs for sample in report.samples]
        above.plot(secs, [sample.private_bytes / _MB for sample in report.samples], label=f"rank {rank}", linewidth=1)
        below.plot(secs, [sample.committed_bytes / _MB for sample in report.samples], linewidth=1)
    for axis, title in ((above, "private memory, MB"), (below, "committed arena, MB")):
        axis.set_title(title, loc="left", fontsize=10)
        axis.set_ylim(bottom=0)
        axis.grid(color="#e6e6e6", linewidth=0.8)
        axis.spines[["top", "right"]].set_visible(False)
    below.set_xlabel("seconds")
    if outcome.reports:
        above.legend(frameon=False, fontsize=9, ncols=min(8, len(outcome.reports)), loc="lower right")
    goal = outcome.goal
    figure.suptitle(f"deep_ep soak: {goal.num_ranks} ranks, seed {goal.seed}, {outcome.num_calls:,} calls")
    write_png("soak", figure, path)
