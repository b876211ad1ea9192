"""`bench tune` in the process that starts the ranks: the run, its table, and the file for `DEEP_EP_TUNING_FILE`."""

from __future__ import annotations

import dataclasses
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from ... import env
from ...kernels.put import LaunchShape
from ...launch import run_ranks
from ..terminal import hearing_ranks, only_on_terminal
from .core import slowest_by_round
from .figures import three_digits
from .gpu import gpu_machine
from .inputs import Setting, normal_bytes, reason_to_skip
from .results import show_table, tell
from .suite import free_bytes_of
from .tune import FIELDS, TuneNote, candidates, shape_name, tune_rank

OUT = Path("deep_ep-tuning.json")

_LIMIT_SECS = 3600.0
_NUM_SHOWN = 3  # of the candidates of a shape, beside the default
_FACTS = ("gpu", "gpu_sms", "num_gpus", "cuda", "torch", "triton", "deep_ep", "mps")


@dataclass(frozen=True)
class Tried:
    """The candidates of one shape.

    Attributes:
        field: Its name in `Shapes`.
        shapes: The candidates; the default first.
        secs: Of each, the median over rounds of the slowest rank's seconds.
    """

    field: str
    shapes: Sequence[LaunchShape]
    secs: Sequence[float]

    @property
    def ranking(self) -> list[int]:
        """Indices of the candidates, the fastest first."""
        return sorted(range(len(self.shapes)), key=lambda index: self.secs[index])

    @property
    def best(self) -> LaunchShape:
        """The fastest."""
        return self.shapes[self.ranking[0]]


def tune(setting: Setting, num_ranks: int, out: Path) -> None:
    """Try launch shapes on this machine, show a table, and write the best to a tuning file.

    Raises:
        ValueError: The group cannot run here, or the file is not one of these.
        EPError: There is no GPU, or the run failed.
    """
    content = _read(out)
    with gpu_machine(num_ranks) as machine:
        reason = reason_to_skip(setting, num_ranks, free_bytes_of(machine, num_ranks), normal_bytes)
        if reason is not None:
            raise ValueError(f"bench tune: {num_ranks} ranks cannot run here: {reason}")
        tried = _try_all(setting, num_ranks)
    show_table(tune_table(tried, f"{machine['gpu']}, {num_ranks} ranks"))
    facts = {name: machine[name] for name in _FACTS}
    out.write_text(json.dumps(with_tuned(content, facts, setting, num_ranks, tried), indent=1) + "\n")
    tell(f"wrote {out}. To use it: export {env.TUNING_FILE.name}={out.absolute()}")


def _read(out: Path) -> dict[str, Any]:
    """What the file holds already: other group sizes, and configs, stay in it."""
    if not out.exists():
        return {}
    try:
        content = json.loads(out.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"bench tune: {out} is there and no tuning file ({error}). Name another with --out") from None
    if not isinstance(content, dict):
        raise ValueError(f"bench tune: {out} is there and no tuning file. Name another with --out")
    return content


def _try_all(setting: Setting, num_ranks: int) -> list[Tried]:
    plan = {field: candidates(field, setting.num_sms) for field in FIELDS}
    num_calls = sum(map(len, plan.values())) * (setting.num_rounds + 1)  # one round is for warming up
    with _showing_progress(num_calls) as news:
        results = run_ranks(tune_rank, num_ranks, setting, plan, news, limit_secs=_LIMIT_SECS)
    return [judge(field, shapes, [result[field] for result in results]) for field, shapes in plan.items()]


def judge(field: str, shapes: Sequence[LaunchShape], times: Sequence[Mapping[str, Sequence[float]]]) -> Tried:
    """All ranks' times of the candidates of a shape, as one number each.

    Args:
        field: The shape.
        shapes: The candidates.
        times: Of each rank, seconds by candidate and round.
    """
    names = [shape_name(shape) for shape in shapes]
    secs = [statistics.median(slowest_by_round([rank_times[name] for rank_times in times])) for name in names]
    return Tried(field, shapes, secs)


def tune_table(tried: Sequence[Tried], title: str) -> Table:
    """The best candidates of each shape, and the default to compare with."""
    caption = "us: median over the rounds of the slowest rank's time, the whole call."
    table = Table(title=title, title_justify="left", title_style="dim", caption=caption, caption_justify="left")
    for head in ("shape", "seen in", "blocks x words x warps", "us"):
        table.add_column(head, justify="right" if head == "us" else "left", no_wrap=True)
    for one in tried:
        default = [0] if 0 not in one.ranking[:_NUM_SHOWN] else []
        for place, index in enumerate([*one.ranking[:_NUM_SHOWN], *default]):
            what = [one.field, FIELDS[one.field]] if place == 0 else ["", ""]
            name = shape_name(one.shapes[index]) + (" (default)" if index == 0 else "")
            table.add_row(*what, name, three_digits(one.secs[index] * 1e6), end_section=False)
        table.add_section()
    return table


def with_tuned(
    content: Mapping[str, Any],
    facts: Mapping[str, Any],
    setting: Setting,
    num_ranks: int,
    tried: Sequence[Tried],
) -> dict[str, Any]:
    """A tuning file's content with a group size added or replaced.

    Args:
        content: What it held before.
        facts: The machine and its versions.
        setting: What was timed.
        num_ranks: The group size.
        tried: What was tried.
    """
    key = str(num_ranks)
    best = {one.field: dataclasses.asdict(one.best) for one in tried}
    times = {
        one.field: {shape_name(one.shapes[index]): round(one.secs[index] * 1e6, 1) for index in one.ranking}
        for one in tried
    }
    run = {**facts, "setting": dataclasses.asdict(setting), "times_us": times}
    return {
        **content,
        "device": facts["gpu"],
        "shapes": {**content.get("shapes", {}), key: best},
        "runs": {**content.get("runs", {}), key: run},
    }


@contextmanager
def _showing_progress(num_calls: int) -> Iterator[Connection]:
    """A bar on a terminal, else a line for each shape, on stderr. Yields where rank 0 sends its notes."""
    console = Console(stderr=True, highlight=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    bar = Progress(*columns, console=console, refresh_per_second=2)
    task = bar.add_task("starting the ranks", total=num_calls)
    seen: list[str] = []

    def show(note: TuneNote) -> None:
        bar.update(task, description=f"{note.field}: {FIELDS[note.field]}", advance=1)
        if note.field not in seen:
            seen.append(note.field)
            if not console.is_terminal:
                console.print(f"{note.field}: {FIELDS[note.field]}")

    with only_on_terminal(console, bar), hearing_ranks(show) as news:
        yield news
