"""The MoE layer on a GPU: communication beside the shared expert, seen in a profile, and torch's grouped kernel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile, record_function

from deep_ep import Buffer
from deep_ep.launch import run_ranks
from deep_ep.moe import MoELayer
from deep_ep.moe.grouped import _has_kernel, grouped_linear, padded_linear

NUM_RANKS = 4
TOKENS, HIDDEN, INNER, SHARED, EXPERTS, TOPK = 2048, 4096, 512, 8192, 16, 4


class Span(NamedTuple):
    """Something that ran on the device, in microseconds."""

    name: str
    stream: int
    start: float
    stop: float

    def meets(self, other: Span) -> bool:
        return self.start < other.stop and other.start < self.stop


def spans_of(trace: dict[str, Any], category: str) -> list[Span]:
    events = [event for event in trace["traceEvents"] if event.get("cat") == category and event.get("ph") == "X"]
    return [
        Span(event["name"], event["args"].get("stream", event["tid"]), event["ts"], event["ts"] + event["dur"])
        for event in events
    ]


def mark_forward(module: torch.nn.Module, name: str) -> None:
    """Have a module's forward show in profiles."""
    mark = record_function(name)

    def begin(*_: object) -> None:
        mark.__enter__()

    def end(*_: object) -> None:
        mark.__exit__(None, None, None)

    module.register_forward_pre_hook(begin)
    module.register_forward_hook(end)


SLEEP_CYCLES = 100_000_000  # some 50 ms


def train_step(layer: MoELayer, x: torch.Tensor) -> None:
    torch.cuda._sleep(SLEEP_CYCLES)  # so that the host is ahead, as it is in a model of many layers
    layer.zero_grad()
    layer(x).x.float().square().mean().backward()
    torch.cuda.synchronize()


def profiled(rank: int, num_ranks: int, folder: str) -> None:
    """One step, profiled on the first rank, with the shared expert's forward marked."""
    torch.cuda.set_device(0)
    buffer = Buffer(dist.group.WORLD, num_nvl_bytes=256 << 20, explicitly_destroy=True, device="cuda")
    layer = MoELayer(
        HIDDEN,
        INNER,
        EXPERTS,
        TOPK,
        buffer=buffer,
        shared_intermediate=SHARED,
        dtype=torch.bfloat16,
        num_worst_tokens=TOKENS * num_ranks,  # the host waits for nothing, so it is ahead of the device
    )
    assert layer.shared is not None
    mark_forward(layer.shared, "shared expert")
    x = torch.randn(TOKENS, HIDDEN, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    for _ in range(3):
        train_step(layer, x)
    dist.barrier()
    if rank == 0:
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            train_step(layer, x)
        seen.export_chrome_trace(f"{folder}/step.json")
    else:
        train_step(layer, x)
    dist.barrier()
    del x, layer
    buffer.destroy()


def test_dispatch_overlaps_with_the_shared_expert(tmp_path: Path) -> None:
    run_ranks(profiled, NUM_RANKS, str(tmp_path))
    trace = json.loads((tmp_path / "step.json").read_text())
    (shared,) = [span for span in spans_of(trace, "gpu_user_annotation") if span.name == "shared expert"]
    kernels = spans_of(trace, "kernel")
    beside = [span for span in kernels if span.stream != shared.stream]
    assert any("dispatch_rows_kernel" in span.name and span.meets(shared) for span in beside), sorted(
        (span.name, span.start - shared.start, span.stop - shared.start) for span in beside
    )
    # Backward: while the tokens' gradients come home, the only products left are those of the shared expert.
    pulls = [span for span in beside if "combine_rows_kernel" in span.name and span.start > shared.stop]
    own = [span for span in kernels if span.stream == shared.stream and span.start > shared.stop]
    assert any(pull.meets(span) for pull in pulls for span in own), (pulls, own)


def grouped_grads(call: Any, x: torch.Tensor, weight: torch.Tensor, num_rows: int) -> list[torch.Tensor]:
    x, weight = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y = call(x, weight)[:num_rows]
    y.float().square().sum().backward()
    return [y.detach().float(), x.grad[:num_rows].float(), weight.grad.float()]


def test_the_grouped_kernel_equals_a_product_for_each_expert() -> None:
    torch.manual_seed(0)
    counts, spare = [40, 0, 7, 81], 24
    num_rows = sum(counts)
    x = torch.randn(num_rows + spare, 64, device="cuda").bfloat16()
    weight = torch.randn(len(counts), 48, 64, device="cuda").bfloat16() / 8
    assert _has_kernel(x, weight)
    expected = grouped_grads(
        lambda x, weight: grouped_linear(x, weight, counts), x[:num_rows].float(), weight.float(), num_rows
    )
    x[num_rows:] = float("nan")  # rows of nobody
    ends = torch.tensor(counts, device="cuda").cumsum(0).int()
    exact = grouped_grads(lambda x, weight: grouped_linear(x, weight, counts), x[:num_rows], weight, num_rows)
    padded = grouped_grads(lambda x, weight: padded_linear(x, weight, ends), x, weight, num_rows)
    for one, other, reference in zip(exact, padded, expected, strict=True):
        for seen in (one, other):
            torch.testing.assert_close(seen, reference, rtol=3e-2, atol=3e-2 * reference.abs().max().item())


if __name__ == "__main__":
    import tempfile

    from deep_ep.tools.mps import shared_gpu

    with shared_gpu(), tempfile.TemporaryDirectory() as folder:
        test_dispatch_overlaps_with_the_shared_expert(Path(folder))
    print("dispatch overlaps with the shared expert, forward and backward")
