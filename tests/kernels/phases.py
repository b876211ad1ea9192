"""One phase of a low-latency call, made once: the kernels as the engine launches them."""

from __future__ import annotations

import torch

from deep_ep.kernels.low_latency import combine, dispatch
from deep_ep.kernels.low_latency.words import KernelCall, LowLatencyContext, WaitOptions


def send_dispatch(
    context: LowLatencyContext,
    call: KernelCall,
    sizes: dispatch.DispatchSizes,
    x: torch.Tensor,
    topk_idx: torch.Tensor,
    wait_options: WaitOptions | None = None,
) -> None:
    """Publish a rank's rows, once: one kernel, whose last block signals.

    Args:
        context: The words.
        call: The call.
        sizes: The sizes of the rows.
        x: [T, H] BF16.
        topk_idx: [T, K].
        wait_options: The last block then waits for the peers, in this way; None: it does not.
    """
    launch = dispatch.sender(context, call, sizes, topk_idx.dtype, x.data_ptr() % 16 == 0, wait_options)
    stats = context.state if wait_options is None or wait_options.stats is None else wait_options.stats
    launch(dispatch.num_send_blocks(sizes, x.size(0)), (x, topk_idx, stats), (x.size(0), 0))


def receive_dispatch(
    context: LowLatencyContext,
    call: KernelCall,
    sizes: dispatch.DispatchSizes,
    age: int,
    x: torch.Tensor,
    scales: torch.Tensor | None,
    count: torch.Tensor,
    src_info: torch.Tensor,
    layout_range: torch.Tensor,
    stats: torch.Tensor | None,
) -> None:
    """Fetch the rows of this rank's experts, once.

    Args:
        context: The words; `wait_for` came before.
        call: The call.
        sizes: The sizes of the rows.
        age: How many calls this rank has sent since.
        x: [L, R * M, H], written.
        scales: [L, R * M, S] over memory [L, S, R * M], written: float32, or int32 with four exponents each; or None.
        count: [L] int32, written.
        src_info: [L, R * M] int32, written.
        layout_range: [L, R] int64, written.
        stats: [L] int32, the counts are added; or None.
    """
    launch = dispatch.receiver(context, call, sizes, scales.dtype if scales is not None else None, stats is not None)
    some_scales, some_stats = (count if one is None else one for one in (scales, stats))
    num_blocks = dispatch.num_receive_blocks(sizes, context.buffer.num_ranks)
    launch(num_blocks, (x, some_scales, count, src_info, layout_range, some_stats), (age,))


def send_combine(
    context: LowLatencyContext,
    call: KernelCall,
    sizes: combine.CombineSizes,
    x: torch.Tensor,
    layout_range: torch.Tensor,
    topk_idx: torch.Tensor,
    earlier: torch.Tensor,
    slot: int | None,
    wait_options: WaitOptions | None = None,
) -> None:
    """Publish the rows of this rank's experts, once: one kernel, whose last block signals.

    Args:
        context: The words.
        call: The call.
        sizes: The sizes of the rows.
        x: [L, n, H] BF16; not read where there is a zero-copy tensor.
        layout_range: [L, R] int64, of the handle.
        topk_idx: [T, K], of this rank's own tokens.
        earlier: [T, K] int32, written: how many tokens before have the same expert. The receive phase needs it.
        slot: Of the zero-copy tensor; None: copy, into a free one.
        wait_options: The last block then waits for the peers, in this way; None: it does not.
    """
    is_copied = slot is None
    launch = combine.sender(context, call, sizes, topk_idx.dtype, is_copied, x.data_ptr() % 16 == 0, wait_options)
    num_blocks, num_tokens = combine.num_send_blocks(sizes, is_copied), topk_idx.size(0)
    stats = context.state if wait_options is None or wait_options.stats is None else wait_options.stats
    launch(num_blocks, (x, layout_range, topk_idx, earlier, stats), (num_tokens, slot or 0))


def receive_combine(
    context: LowLatencyContext,
    sizes: combine.CombineSizes,
    age: int,
    out: torch.Tensor,
    topk_idx: torch.Tensor,
    topk_weights: torch.Tensor,
    earlier: torch.Tensor,
) -> None:
    """Sum each token's rows, once.

    `out[t] = sum over k of topk_weights[t, k] * the row of token t at expert topk_idx[t, k]`

    Args:
        context: The words; `wait_for` came before.
        sizes: The sizes of the rows.
        age: How many calls this rank has sent since.
        out: [T, H] BF16, written; T is not 0.
        topk_idx: [T, K].
        topk_weights: [T, K] float32.
        earlier: [T, K] int32, from `send_combine`.
    """
    launch, num_pieces = combine.receiver(context, sizes, topk_idx.dtype, out.data_ptr() % 16 == 0)
    launch(out.size(0) * num_pieces, (out, topk_idx, topk_weights, earlier), (age,))
