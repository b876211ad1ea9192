"""What `bench normal --device cuda` times.

A call is timed by the device's clock (events behind a barrier of all ranks' streams) and by those of a caller
(`gpu.CallerClocks`), and adds of a small tensor by the latter. The script loop has a clock of its own
(`gpu.script_stopwatch`).

The floor of a case is the time that a plain copy would take for the least bytes that the call must read and write
through memory. A copy of 256 MB by all ranks at once is timed in the same rounds, and its time is scaled: ranks that
share a GPU share its bandwidth. (Between GPUs rows also cross NVLink, which this floor does not know.)

    dispatch            reads T rows, writes n rows
    combine, in window  reads n rows, writes T rows
    combine, elsewhere  reads and writes n rows more: the copy into the window
    layer               a dispatch, and a combine in window

A full dispatch also moves ids and weights, and its host waits for the counts. Bytes for GB/s are counted as DeepEP
does: rows that a rank receives in the dispatch, payload and scales; in the layer there and back.

Every rank can draw every rank's rows, and checks what it receives before anything is timed. Letters as in `cases`.
"""

from __future__ import annotations

import dataclasses
import gc
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import torch

from ...buffers.legacy import Buffer
from ...config import Config
from ...errors import EPError
from ...kernels.rows import as_bytes
from ...quant import per_token_cast_to_fp8
from ..terminal import teller
from .cases import Note
from .core import FLOOR, PRODUCT, BenchVariant, Measured, Stopwatch, slowest_by_round, time_rounds
from .gpu import caller_variants, device_stopwatch, enter_device, script_stopwatch
from .inputs import Drawn, Setting, draw, find_layout, make_buffer
from .peers import bytes_of_row

COPY_BYTES = 256 << 20
_NUM_WARMUP = 3
_BF16_STEP = 2.0**-7  # two sums that round to neighbouring BF16 values differ by this part of themselves

Payload = torch.Tensor | tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Work:
    """What one rank brings to every case.

    Attributes:
        setting: The setting.
        rank: This rank.
        num_ranks: R.
        buffer: The buffer.
        drawn: Rows and routes.
        layout: The layout arguments of a full dispatch.
    """

    setting: Setting
    rank: int
    num_ranks: int
    buffer: Buffer
    drawn: Drawn
    layout: dict[str, Any]

    def config(self, is_bounded: bool) -> Config | None:
        """The config of a call; None: as many blocks as the library likes."""
        if not is_bounded or not self.setting.num_sms:
            return None
        return dataclasses.replace(Buffer.get_dispatch_config(self.num_ranks), num_sms=self.setting.num_sms)

    def dispatch(self, payload: Payload, config: Config | None = None, layout: dict[str, Any] | None = None) -> tuple:
        """A full dispatch, with the layout that is known or with another one."""
        idx, weights = self.drawn.topk_idx, self.drawn.topk_weights
        layout = self.layout if layout is None else layout
        return self.buffer.dispatch(payload, **layout, topk_idx=idx, topk_weights=weights, config=config)


@dataclass(frozen=True)
class GpuCase:
    """One line of the table, ready to be timed on this rank.

    Attributes:
        call: What is timed.
        num_bytes: What this rank receives, as DeepEP counts it; 0: nothing.
        memory_bytes: The least that it must read and write through memory; 0: there is no floor.
        is_right: Whether what the call returned is right; None: not looked at.
        row_bytes: Of a row, payload and scales.
        moved_bytes: Of a row with all that goes with it: in a full dispatch ids and weights.
    """

    call: Callable[[], Any]
    num_bytes: int = 0
    memory_bytes: int = 0
    is_right: Callable[[Any], bool] | None = None
    row_bytes: int = 0
    moved_bytes: int = 0


def layout_case(work: Work) -> GpuCase:
    """Counting where tokens go: too few bytes for a floor."""
    return GpuCase(partial(work.buffer.get_dispatch_layout, work.drawn.topk_idx, work.setting.num_experts))


def dispatch_case(work: Work, *, fp8: bool, cached: bool, is_bounded: bool = True) -> GpuCase:
    """Full or cached dispatch, of BF16 rows, or of E4M3 rows with float32 scales."""
    x, config = work.drawn.x, work.config(is_bounded)
    payload = per_token_cast_to_fp8(x) if fp8 else x
    recv_x, _, _, _, handle, _ = work.dispatch(x)
    num_rows = recv_x.size(0)
    if cached:
        call = partial(work.buffer.dispatch, payload, handle=handle, config=config)
    else:
        call = partial(work.dispatch, payload, config)
    row_bytes = sum(map(bytes_of_row, _parts(payload)))
    moved_bytes = row_bytes if cached else row_bytes + _beside_bytes(work)
    return GpuCase(
        call,
        num_rows * row_bytes,
        (x.size(0) + num_rows) * moved_bytes,
        partial(_is_dispatched, work, fp8),
        row_bytes,
        moved_bytes,
    )


def _beside_bytes(work: Work) -> int:
    """Ids and weights of a row."""
    return bytes_of_row(work.drawn.topk_idx) + bytes_of_row(work.drawn.topk_weights)


def _parts(payload: Payload) -> tuple[torch.Tensor, ...]:
    return payload if isinstance(payload, tuple) else (payload,)


def _is_dispatched(work: Work, fp8: bool, result: tuple) -> bool:
    """Whether the rows of all sources are there, in order."""
    start, received = 0, _parts(result[0])
    per_rank = work.setting.num_experts // work.num_ranks
    for source in range(work.num_ranks):
        drawn = draw(work.setting, source, work.buffer.device)
        is_mine = (drawn.topk_idx // per_rank == work.rank).any(1)
        sent = _parts(per_token_cast_to_fp8(drawn.x) if fp8 else drawn.x)
        expected = [as_bytes(part.contiguous())[is_mine] for part in sent]
        end = start + expected[0].size(0)
        if not all(torch.equal(one, as_bytes(part)[start:end]) for one, part in zip(expected, received, strict=True)):
            return False
        start = end
    return start == received[0].size(0)


def combine_case(work: Work, *, in_window: bool, is_bounded: bool = True) -> GpuCase:
    """Combine of BF16 rows that lie in the window (`get_combine_buffer`), or elsewhere."""
    buffer, x = work.buffer, work.drawn.x
    recv_x, _, _, _, handle, _ = work.dispatch(x)
    rows = buffer.get_combine_buffer(handle) if in_window else torch.empty_like(recv_x)
    # Another factor on each rank: a row summed from the wrong rank must show.
    factors = range(1, work.num_ranks + 1)
    torch.mul(recv_x, factors[work.rank], out=rows)
    row_bytes = bytes_of_row(x)
    given, taken = (one.size(0) * row_bytes for one in (rows, x))
    path = "combine/pulled" if in_window else "combine/copied_in"
    num_before = _num_calls(work, path)

    def is_right(result: tuple) -> bool:
        """Whether the sums are right, and the rows came from where the case says."""
        return _is_combined(work, factors, result) and _num_calls(work, path) == num_before + 1

    return GpuCase(
        partial(buffer.combine, rows, handle, config=work.config(is_bounded)),
        given,
        (given if in_window else 3 * given) + taken,
        is_right,
        row_bytes,
        row_bytes,
    )


def _num_calls(work: Work, path: str) -> int:
    return work.buffer.stats()["calls"].get(path, 0)


def _is_combined(work: Work, factors: Sequence[int], result: tuple) -> bool:
    """Whether the sums are right, where each rank gave its rows back times its factor."""
    x, mask = work.drawn.x, work.layout["is_token_in_rank"]
    expected = torch.zeros_like(x, dtype=torch.float32)
    for peer, factor in enumerate(factors):
        expected += (x * factor).float() * mask[:, peer : peer + 1]
    return torch.allclose(result[0].float(), expected, rtol=_BF16_STEP, atol=1e-3)


def layer_case(work: Work) -> GpuCase:
    """Layout, full dispatch, and combine of the received rows as they are: what a layer calls."""
    buffer, x, config = work.buffer, work.drawn.x, work.config(is_bounded=True)
    num_rows = work.dispatch(x)[0].size(0)

    def call() -> tuple:
        layout = find_layout(work.drawn, work.setting.num_experts, buffer)
        recv_x, _, _, _, handle, _ = work.dispatch(x, config, layout)
        return buffer.combine(recv_x, handle, config=config)

    row_bytes = bytes_of_row(x)
    moved_bytes = 2 * row_bytes + _beside_bytes(work)  # there with ids and weights, and back without
    is_right = partial(_is_combined, work, [1] * work.num_ranks)
    return GpuCase(call, 2 * num_rows * row_bytes, (x.size(0) + num_rows) * moved_bytes, is_right)


class GpuLine(NamedTuple):
    """A case before a rank has made it.

    Attributes:
        title: How a table calls it.
        make: Makes it, on a rank.
        in_script_loop: Whether it is timed as DeepEP's own script does, and by nothing else.
    """

    title: str
    make: Callable[[Work], GpuCase]
    in_script_loop: bool = False


_CACHED_BF16 = partial(dispatch_case, fp8=False, cached=True)
_CACHED_FP8 = partial(dispatch_case, fp8=True, cached=True)
_COMBINE = partial(combine_case, in_window=True)

GPU_CASES = {
    "layout": GpuLine("get_dispatch_layout", layout_case),
    "dispatch-bf16": GpuLine("dispatch, BF16", partial(dispatch_case, fp8=False, cached=False)),
    "cached-bf16": GpuLine("cached dispatch, BF16", _CACHED_BF16),
    "dispatch-fp8": GpuLine("dispatch, FP8", partial(dispatch_case, fp8=True, cached=False)),
    "cached-fp8": GpuLine("cached dispatch, FP8", _CACHED_FP8),
    "combine-window": GpuLine("combine, BF16, in window", _COMBINE),
    "combine-elsewhere": GpuLine("combine, BF16, elsewhere", partial(combine_case, in_window=False)),
    "layer": GpuLine("layer, BF16", layer_case),
    "script-loop-bf16": GpuLine("script loop, BF16", _CACHED_BF16, in_script_loop=True),
    "script-loop-fp8": GpuLine("script loop, FP8", _CACHED_FP8, in_script_loop=True),
    "cached-bf16-free": GpuLine("cached dispatch, BF16", partial(_CACHED_BF16, is_bounded=False)),
    "combine-window-free": GpuLine("combine, BF16, in window", partial(_COMBINE, is_bounded=False)),
}
"""Those that end in `-free` have any number of blocks."""


def gpu_titles(num_sms: int) -> dict[str, str]:
    """How a table calls the cases. Where nothing bounds the blocks, the free cases are the others once more."""
    titles = {}
    for name, line in GPU_CASES.items():
        is_free = name.endswith("-free")
        if is_free and not num_sms:
            continue
        has_blocks = name != "layout"
        blocks = f", {num_sms} blocks" if num_sms and not is_free else ", any blocks"
        titles[name] = line.title + (blocks if has_blocks else "")
    return titles


# A rank's work -------------------------------------------------------------------------------------------------------


class GpuMeasured(NamedTuple):
    """One rank's part of a case.

    Attributes:
        num_bytes: As the case declares them.
        memory_bytes: Likewise.
        gpu: The index of the rank's GPU.
        copy_bytes: Bytes that the copy reads, and writes.
        times: Seconds of each variant or clock; of the floor, of that copy.
    """

    num_bytes: int
    memory_bytes: int
    gpu: int
    copy_bytes: int
    times: dict[str, list[float]]


def run_gpu_cases(
    rank: int,
    num_ranks: int,
    setting: Setting,
    names: Sequence[str],
    news: Connection,
    copy_bytes: int = COPY_BYTES,
    lines: Mapping[str, GpuLine] = GPU_CASES,
) -> list[GpuMeasured]:
    """Check and time cases, one after the other. Runs on every rank.

    Args:
        rank: This rank.
        num_ranks: R.
        setting: The setting.
        names: Keys of `lines`.
        news: Where rank 0 sends a `Note` when a case begins and after each round.
        copy_bytes: Size of the copy that bandwidth is measured with.
        lines: The cases, as `GPU_CASES` has them.
    """
    tell = teller(rank, news)
    gpu = enter_device(rank, setting.device)
    buffer = make_buffer(setting, num_ranks)
    try:
        work, floor = make_work(setting, rank, buffer), copy_floor(copy_bytes, buffer.device)
        results = []
        for name in names:
            tell(Note(num_ranks, name, 0))
            case = lines[name].make(work)
            check_case(case, name, work)
            variants = [
                *variants_of(case, work, lines[name].in_script_loop),
                *([floor] if case.memory_bytes else []),
            ]
            times = time_case(name, variants, device_stopwatch(buffer), work, tell)
            results.append(GpuMeasured(case.num_bytes, case.memory_bytes, gpu, copy_bytes, times))
            del case, variants
            gc.collect()  # what a case held in the window is room for the next
        buffer.check()
    finally:
        buffer.destroy()
    return results


def make_work(setting: Setting, rank: int, buffer: Buffer) -> Work:
    """Draw what a rank brings."""
    drawn = draw(setting, rank, buffer.device)
    return Work(setting, rank, buffer.group_size, buffer, drawn, find_layout(drawn, setting.num_experts, buffer))


def copy_floor(copy_bytes: int, device: torch.device) -> BenchVariant:
    """The copy that bandwidth is measured with."""
    pair = tuple(torch.ones(copy_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return BenchVariant(FLOOR, partial(pair[0].copy_, pair[1]))


def variants_of(case: GpuCase, work: Work, in_script_loop: bool) -> list[BenchVariant]:
    """The product by the device's clock and by those of a caller, with adds beside it; or in a loop like the script's.

    Args:
        case: The case.
        work: What the rank brings.
        in_script_loop: Which of the two.
    """
    num_in_row, device = work.setting.num_in_row, work.buffer.device
    if in_script_loop:
        return [BenchVariant(PRODUCT, case.call, stopwatch=script_stopwatch(num_in_row, device))]
    return [BenchVariant(PRODUCT, case.call), *caller_variants(case.call, num_in_row, device)]


def check_case(case: GpuCase, name: str, work: Work) -> None:
    """Call the product once, and refuse to time what is wrong.

    Raises:
        EPError: It did not deliver what it should.
    """
    if case.is_right is not None and not case.is_right(case.call()):
        raise EPError(
            f"bench {name}: what was delivered is wrong, or came another way than the case is about "
            f"(rank {work.rank}/{work.num_ranks}). Nothing was timed"
        )


def time_case(
    name: str, variants: Sequence[BenchVariant], stopwatch: Stopwatch, work: Work, tell: Callable[[Note], object]
) -> dict[str, list[float]]:
    """This rank's seconds of each variant; see `time_rounds`."""
    return time_rounds(
        variants,
        work.setting.num_rounds,
        stopwatch,
        num_warmup=_NUM_WARMUP if work.buffer.device.type == "cuda" else 0,
        on_round=lambda done: tell(Note(work.num_ranks, name, done)),
    )


# All ranks' work -----------------------------------------------------------------------------------------------------


def join_gpu_cases(name: str, parts: Sequence[GpuMeasured]) -> Measured:
    """One case out of all ranks' parts of it: the copy's times become those of the floor."""
    times = {variant: [part.times[variant] for part in parts] for variant in parts[0].times}
    copy_gbs = None
    if FLOOR in times:
        copy_gbs = _copy_gbs(parts)
        times[FLOOR] = [[secs * _share(parts, part.gpu) for secs in part.times[FLOOR]] for part in parts]
    return Measured(name, len(parts), [part.num_bytes for part in parts], times, copy_gbs=copy_gbs)


def _share(parts: Sequence[GpuMeasured], gpu: int) -> float:
    """The least bytes of all ranks on a GPU, over those that their copies read and write."""
    there = [part for part in parts if part.gpu == gpu]
    return sum(part.memory_bytes for part in there) / sum(2 * part.copy_bytes for part in there)


def _copy_gbs(parts: Sequence[GpuMeasured]) -> float:
    """10^9 bytes a second that the copies of the first rank's GPU read and wrote together, the median over rounds."""
    there = [part for part in parts if part.gpu == parts[0].gpu]
    num_bytes = sum(2 * part.copy_bytes for part in there)
    return num_bytes / statistics.median(slowest_by_round([part.times[FLOOR] for part in there])) / 1e9
