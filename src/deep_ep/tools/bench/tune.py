"""`bench tune` on the ranks: which launch shapes are fastest on this GPU, for this group.

Each shape of `engine.shapes.Shapes` is tried in the call that uses it, everything else as it is. The candidates of a
shape take turns inside each round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from ...engine.cuda.shapes import Shapes
from ...kernels.put import LaunchShape
from ..terminal import teller
from .core import BenchVariant, time_rounds
from .gpu import device_stopwatch, enter_device, streamed
from .gpu_cases import Work
from .inputs import Setting, draw, find_layout, make_buffer

FIELDS = {
    "put": "cached dispatch, any blocks",
    "pull": "combine in window, any blocks",
    "copy": "combine elsewhere, any blocks",
    "bounded_put": "cached dispatch, bounded",
    "bounded_pull": "combine in window, bounded",
    "bounded_copy": "combine elsewhere, bounded",
}
"""The shapes, and the calls that show them."""

_WORDS = (1024, 2048, 4096)
_WARPS = (4, 8, 16, 32)
_BLOCKS = (32, 64, 128, 132, 264)
_LEAST_WORDS = 2  # of a thread
_MOST_WORDS = 32
_MOST_WORDS_TO_SUM = 16  # a thread that sums holds several rows of them, and more do not fit its registers


class TuneNote(NamedTuple):
    """What rank 0 says after each timed call: it was one for this shape."""

    field: str


_ALL_REGISTERS = 65536  # of a multiprocessor: with few blocks, one has it for itself


def candidates(field: str, num_sms: int) -> list[LaunchShape]:
    """The shapes to try for a field of `Shapes`: always the default one, and first.

    Args:
        field: Its name.
        num_sms: Blocks of a bounded call.
    """
    is_bounded = field.startswith("bounded_")
    most_words = _MOST_WORDS_TO_SUM if field.endswith("pull") else _MOST_WORDS
    default: LaunchShape = getattr(Shapes(), field)
    shapes = [dataclasses.replace(default, num_blocks=num_sms) if is_bounded else default]
    for num_blocks in (num_sms,) if is_bounded else _BLOCKS:
        for words in _WORDS:
            shapes += [
                LaunchShape(num_blocks, words, num_warps, _ALL_REGISTERS // (32 * num_warps) if is_bounded else 0)
                for num_warps in _WARPS
                if _LEAST_WORDS <= words // (32 * num_warps) <= most_words
            ]
    return list(dict.fromkeys(shapes))


def shape_name(shape: LaunchShape) -> str:
    """`64 x 4096 x 32`."""
    return f"{shape.num_blocks} x {shape.words} x {shape.num_warps}"


def tune_rank(
    rank: int, num_ranks: int, setting: Setting, plan: dict[str, Sequence[LaunchShape]], news: Connection
) -> dict[str, dict[str, list[float]]]:
    """Time candidates. Runs on every rank.

    Args:
        rank: This rank.
        num_ranks: R.
        setting: The setting.
        plan: Candidates by field of `Shapes`.
        news: Where rank 0 sends a `TuneNote` after each call.

    Returns:
        Of each field and each candidate (`shape_name`), this rank's seconds by round.
    """
    tell = teller(rank, news)
    enter_device(rank, setting.device)
    buffer = make_buffer(setting, num_ranks)
    try:
        drawn = draw(setting, rank, buffer.device)
        work = Work(setting, rank, num_ranks, buffer, drawn, find_layout(drawn, setting.num_experts, buffer))
        times = {field: _time_field(work, field, shapes, tell) for field, shapes in plan.items()}
        buffer.check()
    finally:
        buffer.destroy()
    return times


def _time_field(
    work: Work, field: str, shapes: Sequence[LaunchShape], tell: Callable[[TuneNote], object]
) -> dict[str, list[float]]:
    engine, call, watch = streamed(work.buffer), _call_of(work, field), device_stopwatch(work.buffer)
    usual = engine.shapes

    def call_with(shape: LaunchShape) -> Any:
        changed: dict[str, Any] = {field: shape}
        engine.shapes = dataclasses.replace(usual, **changed)
        return call()

    def told(timed: Callable[[], Any]) -> float:
        secs = watch(timed)
        tell(TuneNote(field))
        return secs

    variants = [BenchVariant(shape_name(shape), partial(call_with, shape)) for shape in shapes]
    try:
        return time_rounds(variants, work.setting.num_rounds, told)
    finally:
        engine.shapes = usual


def _call_of(work: Work, field: str) -> Callable[[], Any]:
    """The call that uses a shape."""
    buffer, x = work.buffer, work.drawn.x
    config = work.config(field.startswith("bounded_"))
    recv_x, _, _, _, handle, _ = work.dispatch(x)
    if field.endswith("put"):
        return partial(buffer.dispatch, x, handle=handle, config=config)
    rows = buffer.get_combine_buffer(handle) if field.endswith("pull") else torch.empty_like(recv_x)
    return partial(buffer.combine, rows.copy_(recv_x), handle, config=config)
