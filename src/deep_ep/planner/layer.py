"""A layer end to end: attention, dispatch, experts and combine, one after another or overlapped by micro-batches.

Compute times come from data sheets: the larger of operations over the FLOP rate and bytes over the memory's speed, each
reached to the shares below. They are not calibrated, so they have no interval; read them to within a third.

With two micro-batches one computes while the other communicates: a layer takes as long as the slower of the two does,
and the SMs that move rows do not compute. Low latency uses none while rows travel (its receive hook).
"""

from __future__ import annotations

from typing import NamedTuple

from .hardware import Gpu
from .models import Model

PHASES = ("training", "prefill", "decoding")

_FLOPS_SHARE = 0.6  # of the dense peak, of large GEMMs
_MEMORY_SHARE = 0.8
_BACKWARD = 3  # a forward and a backward pass are as many operations as three forward passes


class Compute(NamedTuple):
    """Microseconds of one micro-batch of a rank, in one layer with experts.

    Attributes:
        attention_us: With the shared expert.
        experts_us: Of the busiest rank.
        dense_us: Of a layer without experts.
    """

    attention_us: float
    experts_us: float
    dense_us: float


class LayerTime(NamedTuple):
    """A layer.

    Attributes:
        us: Of all micro-batches together.
        compute_us: What of it is attention and experts.
        comm_us: What of it are dispatch and combine; overlapped, the two are more than the whole.
        bound: `attention`, `experts` or `communication`, whichever takes longest.
        tokens_per_s: Of all ranks, through all layers of the model.
    """

    us: float
    compute_us: float
    comm_us: float
    bound: str
    tokens_per_s: float


def find_compute(
    model: Model, gpu: Gpu, phase: str, num_tokens: float, context: int, num_local_experts: float, load: float
) -> Compute:
    """The compute times of a micro-batch.

    Args:
        model: The model.
        gpu: The GPU.
        phase: One of `PHASES`.
        num_tokens: Of the rank; in decoding, sequences.
        context: Tokens of a sequence; causal, so that on average half of them are seen in training and prefill.
        num_local_experts: Experts of a rank, replicas included.
        load: Selections of the busiest rank over the mean.
    """
    is_decoding = phase == "decoding"
    channels, seen = (model.decode_channels, context) if is_decoding else (model.score_channels, context / 2)
    passes = _BACKWARD if phase == "training" else 1
    scores = 2.0 * channels * seen
    cache = num_tokens * context * model.kv_bytes if is_decoding else 0.0
    attention = _time(
        gpu, passes * num_tokens * (2.0 * model.attention_params + scores), 2.0 * model.attention_params + cache, False
    )
    shared = _mlp(gpu, model, num_tokens, 1, model.shared_intermediate, passes)
    experts = _mlp(gpu, model, num_tokens * model.topk * load, num_local_experts, model.intermediate, passes)
    dense = attention + _mlp(gpu, model, num_tokens, 1, model.dense_intermediate, passes)
    return Compute(attention + shared, experts, dense)


def _mlp(gpu: Gpu, model: Model, num_rows: float, num_blocks: float, intermediate: int, passes: int) -> float:
    """Gate, value and down: three GEMMs in FP8, whose weights are read once."""
    weights = 3.0 * model.hidden * intermediate
    return _time(gpu, passes * 2 * num_rows * weights, passes * min(num_blocks, num_rows) * weights, True)


def _time(gpu: Gpu, flops: float, num_bytes: float, is_fp8: bool) -> float:
    rate = (gpu.fp8_tflops if is_fp8 else gpu.bf16_tflops) * 1e6 * _FLOPS_SHARE
    return max(flops / rate, num_bytes / (gpu.memory_GBps * 1e3 * _MEMORY_SHARE))


def time_layer(
    model: Model,
    gpu: Gpu,
    phase: str,
    compute: Compute,
    dispatch_us: float,
    combine_us: float,
    num_sms: int,
    num_micro_batches: int,
    num_tokens: int,
) -> LayerTime:
    """Put a layer together.

    Args:
        model: The model.
        gpu: The GPU.
        phase: One of `PHASES`; in training the backward pass sends the same rows again.
        compute: Of a micro-batch.
        dispatch_us: Of a micro-batch.
        combine_us: Of a micro-batch.
        num_sms: SMs that move rows and so do not compute meanwhile.
        num_micro_batches: 1: nothing overlaps.
        num_tokens: Of all ranks, of all micro-batches.
    """
    comm = (dispatch_us + combine_us) * (2 if phase == "training" else 1)
    is_overlapped = num_micro_batches > 1
    slower = gpu.num_sms / max(1, gpu.num_sms - num_sms) if is_overlapped else 1.0
    attention, experts = compute.attention_us * slower, compute.experts_us * slower
    us = max(attention + experts, comm) if is_overlapped else attention + experts + comm
    parts = {"attention": attention, "experts": experts, "communication": comm}
    if is_overlapped and comm >= attention + experts:
        bound = "communication"
    elif is_overlapped:
        bound = "attention" if attention >= experts else "experts"
    else:
        bound = max(parts, key=parts.__getitem__)
    total = num_micro_batches * (model.num_layers * us + model.num_dense_layers * compute.dense_us)
    return LayerTime(
        num_micro_batches * us,
        num_micro_batches * (attention + experts),
        num_micro_batches * comm,
        bound,
        num_tokens / total * 1e6,
    )
