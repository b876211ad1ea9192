"""`bench layer`: forward and backward of an MoE layer on several ranks, beside the same layer in one process.

The one process has all ranks' tokens and all experts, and no communication. Where the ranks share a GPU, both do the
same work on it, so what is left between their times is what communication adds, and that R processes launch smaller
kernels: those of one rank may fill what another leaves idle. On a GPU a profile of one step tells how much of the
communication ran beside computation.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from ...buffers.legacy import Buffer
from ...launch import run_ranks
from ...moe import MoELayer, Routes
from ...moe.gate import count_ids
from ...moe.ops import Received
from ..mps import shared_gpu
from ..terminal import require_device, require_positive
from .gpu import enter_device

_WARM_UP = 3
_CLOSE = 2e-2  # of BF16 sums, taken in another order


@dataclass(frozen=True)
class LayerSetting:
    """What is measured. The help texts in `cli.py` say what the sizes are."""

    device: str
    num_ranks: int
    num_tokens: int
    hidden: int
    intermediate: int
    shared: int
    num_experts: int
    topk: int
    num_rounds: int

    @property
    def dtype(self) -> torch.dtype:
        """BF16 where there are kernels for it."""
        return torch.bfloat16 if self.device == "cuda" else torch.float32


class Timing(NamedTuple):
    """Of one process: seconds of each round, and for each rank whose tokens it has the sum of |outputs|."""

    secs: list[float]
    checksums: list[float]


def run(args: argparse.Namespace) -> None:
    """Measure, and print it."""
    sizes = (args.hidden, args.intermediate, args.shared, args.experts, args.topk, args.rounds)
    setting = LayerSetting(args.device, args.ranks, args.tokens, *sizes)
    names = ("ranks", "tokens", "hidden", "intermediate", "experts", "topk", "rounds")
    require_positive("bench layer", **{name: getattr(args, name) for name in names})
    require_device("bench layer", setting.device)
    is_cuda = setting.device == "cuda"
    with tempfile.TemporaryDirectory() as folder, shared_gpu(args.ranks) if is_cuda else contextlib.nullcontext():
        ranks = run_ranks(_measure_rank, setting.num_ranks, setting, folder, limit_secs=600.0)
        (alone,) = run_ranks(_measure_alone, 1, setting, limit_secs=600.0)
        for rank, timing in enumerate(ranks):
            _check(rank, timing.checksums[0], alone.checksums[rank])
        overlaps = _find_overlaps(Path(folder) / "step.json") if is_cuda else []
        if args.json:
            print(_as_json(setting, ranks, alone, overlaps))
        else:
            _show(setting, ranks, alone, overlaps)


def _check(rank: int, seen: float, expected: float) -> None:
    if abs(seen - expected) > _CLOSE * abs(expected):
        raise ValueError(f"bench layer: rank {rank} has outputs of {seen:.6g} in all, the one process {expected:.6g}")


# Measuring -----------------------------------------------------------------------------------------------------------


class _LocalLayer(MoELayer):
    """The same layer with all experts in this process, and no exchange."""

    def _exchange(self, tokens: torch.Tensor, routes: Routes) -> torch.Tensor:
        shared = self.shared(tokens) if self.shared is not None else None
        num_rows = count_ids(routes.topk_idx.flatten(), self.num_experts).tolist()
        received = Received(tokens, routes.topk_idx, routes.topk_weights, num_rows, (), tokens)
        rows, weights, outputs = self._select(received)
        weighted = outputs * weights.unsqueeze(1)
        combined = torch.zeros_like(tokens, dtype=weighted.dtype).index_add(0, rows, weighted).to(tokens.dtype)
        return combined if shared is None else combined + shared


def _make_layer(kind: type[MoELayer], buffer: Buffer, setting: LayerSetting) -> MoELayer:
    torch.manual_seed(0)
    return kind(
        setting.hidden,
        setting.intermediate,
        setting.num_experts,
        setting.topk,
        buffer=buffer,
        shared_intermediate=setting.shared,
        dtype=setting.dtype,
    )


def _make_tokens(rank: int, setting: LayerSetting) -> torch.Tensor:
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(setting.num_tokens, setting.hidden, generator=generator)
    return x.to(setting.device, setting.dtype).requires_grad_()


def _step(layer: MoELayer, x: torch.Tensor) -> torch.Tensor:
    layer.zero_grad()
    x.grad = None
    y = layer(x).x
    y.backward(y.detach())
    return y.detach()


def _time_rounds(layer: MoELayer, x: torch.Tensor, num_rounds: int) -> list[float]:
    """Seconds of each round, from a barrier of all ranks until the device is done."""
    secs = []
    for _ in range(_WARM_UP + num_rounds):
        _synchronize(x)
        dist.barrier()
        begin = time.perf_counter()
        _step(layer, x)
        _synchronize(x)
        secs.append(time.perf_counter() - begin)
    return secs[_WARM_UP:]


def _synchronize(x: torch.Tensor) -> None:
    if x.is_cuda:
        torch.cuda.synchronize()


def _measure_rank(rank: int, num_ranks: int, setting: LayerSetting, folder: str) -> Timing:
    del num_ranks
    enter_device(rank, setting.device)
    with Buffer(dist.group.WORLD, device=setting.device) as buffer:
        layer, x = _make_layer(MoELayer, buffer, setting), _make_tokens(rank, setting)
        secs = _time_rounds(layer, x, setting.num_rounds)
        checksum = _step(layer, x).double().abs().sum().item()
        if setting.device == "cuda":
            dist.barrier()
            with (
                profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
                if rank == 0
                else contextlib.nullcontext() as seen
            ):
                _step(layer, x)
                torch.cuda.synchronize()
            if seen is not None:
                seen.export_chrome_trace(f"{folder}/step.json")
            dist.barrier()
        del layer, x
    return Timing(secs, [checksum])


def _measure_alone(rank: int, num_ranks: int, setting: LayerSetting) -> Timing:
    del num_ranks
    enter_device(rank, setting.device)
    buffer = Buffer(dist.group.WORLD, device=setting.device)  # nothing is sent through it
    layer = _make_layer(_LocalLayer, buffer, setting)
    parts = [_make_tokens(rank, setting).detach() for rank in range(setting.num_ranks)]
    x = torch.cat(parts).requires_grad_()
    secs = _time_rounds(layer, x, setting.num_rounds)
    sums = [part.double().abs().sum().item() for part in _step(layer, x).chunk(setting.num_ranks)]
    return Timing(secs, sums)


# Showing -------------------------------------------------------------------------------------------------------------


class _Overlap(NamedTuple):
    """Of rank 0's kernels of one operation: how long they ran, and which share beside kernels of other streams."""

    operation: str
    ms: float
    share: float


def _medians(ranks: list[Timing], alone: Timing) -> tuple[float, float]:
    """Seconds of a step: on ranks, where the slowest one counts in each round, and in one process."""
    slowest = [max(times) for times in zip(*(timing.secs for timing in ranks), strict=True)]
    return statistics.median(slowest), statistics.median(alone.secs)


def _as_json(setting: LayerSetting, ranks: list[Timing], alone: Timing, overlaps: list[_Overlap]) -> str:
    many, one = _medians(ranks, alone)
    figures = {
        "setting": asdict(setting),
        "median_secs": {"ranks": many, "one_process": one},
        "secs": {"ranks": [timing.secs for timing in ranks], "one_process": alone.secs},
        "overlaps": [overlap._asdict() for overlap in overlaps],
    }
    return json.dumps(figures)


def _show(setting: LayerSetting, ranks: list[Timing], alone: Timing, overlaps: list[_Overlap]) -> None:
    num_tokens = setting.num_tokens * setting.num_ranks
    many, one = _medians(ranks, alone)
    kind = str(setting.dtype).removeprefix("torch.")
    print(
        f"MoE layer, forward and backward, {setting.device}, {kind}: {setting.num_tokens} tokens a rank, hidden "
        f"{setting.hidden}, top-{setting.topk} of {setting.num_experts} experts of {setting.intermediate}, shared "
        f"expert of {setting.shared}; median of {setting.num_rounds} rounds, slowest rank of each"
    )
    print(f"  {setting.num_ranks} ranks: {many * 1e3:9.2f} ms, {num_tokens / many:12,.0f} tokens/s")
    print(f"  1 process: {one * 1e3:7.2f} ms, {num_tokens / one:12,.0f} tokens/s, without communication")
    added = f"{100 * (many - one) / one:+.1f}% of the time ({(many - one) * 1e3:+.2f} ms)"
    print(f"  communication, and smaller kernels: {added}")
    for name, ms, share in overlaps:
        print(f"  {name} kernels of rank 0: {ms:.2f} ms, {100 * share:.0f}% of it beside its own computation")


class _Span(NamedTuple):
    """A kernel, in microseconds."""

    name: str
    stream: int
    start: float
    stop: float


def _find_overlaps(file: Path) -> list[_Overlap]:
    """How much of rank 0's communication kernels ran while kernels of its own ran on other streams."""
    events = [event for event in json.loads(file.read_text())["traceEvents"] if event.get("cat") == "kernel"]
    kernels = [_Span(e["name"], e["args"].get("stream", 0), e["ts"], e["ts"] + e["dur"]) for e in events]
    overlaps = []
    for word in ("notify", "dispatch", "combine"):
        moving = [span for span in kernels if word in span.name]
        total = sum(span.stop - span.start for span in moving)
        beside = sum(_overlap(span, kernels) for span in moving)
        overlaps.append(_Overlap(word, total / 1e3, beside / total if total else 0.0))
    return overlaps


def _overlap(span: _Span, kernels: list[_Span]) -> float:
    """Microseconds of a kernel during which any kernel of another stream ran."""
    others = sorted((o.start, o.stop) for o in kernels if o.stream != span.stream)
    total, reached = 0.0, span.start
    for start, stop in others:
        start, stop = max(start, reached), min(stop, span.stop)
        if stop > start:
            total, reached = total + stop - start, stop
    return total
