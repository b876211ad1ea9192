"""What `bench elastic` times: DeepEP V2's calls, beside `Buffer` with a permutation by torch, and beside a plain copy.

    compact           `ElasticBuffer.dispatch`; beside it layout and dispatch of `Buffer`
    expanded          with `do_expand`; beside it the same, and the rows gathered by expert
    combine-compact   beside it `Buffer.combine`
    combine-expanded  beside it the rows of each token summed by torch, and `Buffer.combine`
    combine-...-window  on a GPU: the same, of rows that the experts have written into the window
    decode            on a GPU: 128 tokens in a CUDA graph, without CPU sync; beside it low-latency mode, likewise

The floor copies the rows that a rank receives, or gives: of expanded calls one for each selection. On a GPU it is the
time of the least bytes that must be read and written, as in `gpu_cases`. Letters as in `cases`; X expanded rows.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ...buffers.elastic import ElasticBuffer
from ...buffers.legacy import Buffer
from ...kernels.rows import as_bytes
from .cases import Case
from .core import BUFFER, PRODUCT, BenchVariant
from .gpu_cases import GpuCase, GpuLine, Work
from .inputs import Drawn, Inputs, Setting
from .peers import WarmPair, bytes_of_row

_BF16_STEP = 2.0**-7  # two sums that round to neighbouring BF16 values differ by this part of themselves
_DECODE_TOKENS = 128


def make_elastic(setting: Setting, num_tokens: int) -> ElasticBuffer:
    """A buffer of V2 for calls of so many tokens."""
    return ElasticBuffer(
        dist.group.WORLD,
        num_max_tokens_per_rank=num_tokens,
        hidden=setting.hidden,
        num_topk=setting.num_topk,
        device=setting.device,
    )


class ElasticCalls:
    """The calls of one rank, of both interfaces, with the same results.

    Args:
        setting: The setting.
        buffer: For the calls of `Buffer`.
        drawn: Rows and routes.
    """

    def __init__(self, setting: Setting, buffer: Buffer, drawn: Drawn):
        self._setting, self._buffer, self._drawn = setting, buffer, drawn
        self.elastic = make_elastic(setting, setting.num_tokens)

    def dispatch(self, is_expanded: bool) -> tuple:
        """A dispatch of V2."""
        x, topk_idx, topk_weights = self._drawn
        return self.elastic.dispatch(
            x, topk_idx, topk_weights, num_experts=self._setting.num_experts, num_sms=self._setting.num_sms,
            do_expand=is_expanded,
        )  # fmt: skip

    def dispatch_v1(self) -> tuple:
        """Layout and dispatch of `Buffer`."""
        x, topk_idx, topk_weights = self._drawn
        per_rank, _, per_expert, mask, _ = self._buffer.get_dispatch_layout(topk_idx, self._setting.num_experts)
        return self._buffer.dispatch(
            x, num_tokens_per_rank=per_rank, is_token_in_rank=mask, num_tokens_per_expert=per_expert,
            topk_idx=topk_idx, topk_weights=topk_weights,
        )  # fmt: skip

    def dispatch_permuted(self) -> torch.Tensor:
        """The same, and its rows gathered by expert."""
        recv_x, ids, _, _, _, _ = self.dispatch_v1()
        return recv_x.index_select(0, selected_rows(ids))

    def combine_permuted(self, y: torch.Tensor, rows: torch.Tensor, num_rows: int, handle: tuple) -> torch.Tensor:
        """Sum the rows of each token, and combine the sums."""
        sums = torch.zeros(num_rows, y.size(1), dtype=torch.float32, device=y.device)
        sums.index_add_(0, rows, y.float())
        return self._buffer.combine(sums.to(y.dtype), handle)[0]

    def combine_v1(self, y: torch.Tensor, handle: tuple) -> torch.Tensor:
        """A combine of `Buffer`."""
        return self._buffer.combine(y, handle)[0]

    def combine(self, y: torch.Tensor, handle: Any) -> torch.Tensor:
        """A combine of V2."""
        return self.elastic.combine(y, handle, num_sms=self._setting.num_sms)[0]


def selected_rows(ids: torch.Tensor) -> torch.Tensor:
    """The compact row of each selection, by expert, then in order: what a permutation gathers.

    Args:
        ids: [n, K] local ids; -1: none.
    """
    keys = torch.where(ids >= 0, ids, torch.iinfo(ids.dtype).max).flatten()
    num_selected = int((ids >= 0).sum())
    return keys.argsort(stable=True)[:num_selected] // ids.size(1)


def _same_sums(one: torch.Tensor, other: torch.Tensor) -> bool:
    # Rows that are combined have no negative numbers, so that nothing cancels.
    return torch.allclose(one.float(), other.float(), rtol=2 * _BF16_STEP, atol=1e-3)


# On the CPU ----------------------------------------------------------------------------------------------------------


def _calls(inputs: Inputs, buffer: Buffer) -> ElasticCalls:
    return ElasticCalls(inputs.setting, buffer, Drawn(inputs.x, inputs.topk_idx, inputs.topk_weights))


def dispatch_case(inputs: Inputs, buffer: Buffer, *, is_expanded: bool) -> Case:
    """Compact or expanded dispatch of BF16 rows."""
    calls = _calls(inputs, buffer)
    recv_x = calls.dispatch(is_expanded)[0]
    num_bytes = recv_x.numel() * recv_x.element_size()
    pair = WarmPair(recv_x.size(0), [bytes_of_row(recv_x)])
    product = BenchVariant(PRODUCT, partial(calls.dispatch, is_expanded), lambda result: [as_bytes(result[0])])
    if is_expanded:
        peer = BenchVariant(BUFFER, calls.dispatch_permuted, lambda rows: [as_bytes(rows)])
    else:
        peer = BenchVariant(BUFFER, calls.dispatch_v1, lambda result: [as_bytes(result[0])])
    return Case(num_bytes, [product, peer, pair.floor(num_bytes)])


def combine_case(inputs: Inputs, buffer: Buffer, *, is_expanded: bool) -> Case:
    """Combine of BF16 rows, compact or expanded."""
    calls = _calls(inputs, buffer)
    recv_x, _, _, handle, _ = calls.dispatch(is_expanded)
    old_x, ids, _, _, old_handle, _ = calls.dispatch_v1()
    y = recv_x.abs() * (inputs.rank + 1)  # another factor on each rank: a row from the wrong rank must show
    num_bytes = y.numel() * y.element_size()
    pair = WarmPair(y.size(0), [bytes_of_row(y)])
    call: Callable[[], torch.Tensor] = partial(calls.combine_v1, y, old_handle)
    if is_expanded:
        call = partial(calls.combine_permuted, y, selected_rows(ids), old_x.size(0), old_handle)
    product = BenchVariant(PRODUCT, partial(calls.combine, y, handle), lambda sums: [sums])
    peer = BenchVariant(BUFFER, call, lambda sums: [sums])
    return Case(num_bytes, [product, peer, pair.floor(num_bytes)], _same_sums)


ELASTIC_CASES: dict[str, tuple[str, Callable[[Inputs, Buffer], Case]]] = {
    "compact": ("compact dispatch, BF16", partial(dispatch_case, is_expanded=False)),
    "expanded": ("expanded dispatch, BF16", partial(dispatch_case, is_expanded=True)),
    "combine-compact": ("combine of compact rows", partial(combine_case, is_expanded=False)),
    "combine-expanded": ("combine of expanded rows", partial(combine_case, is_expanded=True)),
}
"""By name: how a table calls it, and how a rank makes it."""


# On a GPU ------------------------------------------------------------------------------------------------------------


def gpu_dispatch_case(work: Work, *, is_expanded: bool, is_product: bool) -> GpuCase:
    """Compact or expanded dispatch: of V2, or of `Buffer` with a permutation."""
    calls = ElasticCalls(work.setting, work.buffer, work.drawn)
    expected = calls.dispatch_permuted() if is_expanded else calls.dispatch_v1()[0]
    row_bytes = bytes_of_row(expected)
    call: Callable[[], Any] = partial(calls.dispatch, is_expanded)
    if not is_product:
        call = calls.dispatch_permuted if is_expanded else calls.dispatch_v1

    def is_right(result: Any) -> bool:
        rows = result if isinstance(result, torch.Tensor) else result[0]
        return torch.equal(rows, expected)

    num_bytes = expected.size(0) * row_bytes
    return GpuCase(call, num_bytes, num_bytes + work.drawn.x.size(0) * row_bytes, is_right, row_bytes, row_bytes)


def gpu_combine_case(work: Work, *, is_expanded: bool, is_product: bool, in_window: bool = False) -> GpuCase:
    """Combine of compact or expanded rows: of V2, or of `Buffer` after a sum by torch.

    The floor reads the rows and writes the sums; rows that lie elsewhere are copied, or summed, into the window first.
    """
    calls = ElasticCalls(work.setting, work.buffer, work.drawn)
    recv_x, _, _, handle, _ = calls.dispatch(is_expanded)
    old_x, ids, _, _, old_handle, _ = calls.dispatch_v1()
    y = recv_x.abs() * (work.rank + 1)
    peer: Callable[[], torch.Tensor] = partial(calls.combine_v1, y, old_handle)
    if is_expanded:
        peer = partial(calls.combine_permuted, y, selected_rows(ids), old_x.size(0), old_handle)
    expected, row_bytes = peer(), bytes_of_row(y)
    if in_window:
        y = calls.elastic.get_combine_buffer(handle).copy_(y)
    num_bytes = y.size(0) * row_bytes
    call = partial(calls.combine, y, handle) if is_product else peer
    memory_bytes = num_bytes + expected.size(0) * row_bytes
    return GpuCase(call, num_bytes, memory_bytes, partial(_same_sums, expected), row_bytes, row_bytes)


class _Replayed:
    """A call in a CUDA graph, which is replayed. Holds what the graph uses.

    Args:
        call: Launches kernels on the current stream, and waits for nothing.
    """

    def __init__(self, call: Callable[[], torch.Tensor]):
        self._call = call
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call()
        torch.cuda.current_stream().wait_stream(stream)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self._result = call()

    def __call__(self) -> torch.Tensor:
        """Replay it."""
        self._graph.replay()
        return self._result


def decode_case(work: Work) -> GpuCase:
    """A compact dispatch without CPU sync and its combine, in a graph."""
    setting = work.setting
    num_tokens = min(_DECODE_TOKENS, setting.num_tokens)
    x, topk_idx, topk_weights = (part[:num_tokens].contiguous() for part in work.drawn)
    elastic = make_elastic(setting, num_tokens)

    def call() -> torch.Tensor:
        recv_x, _, _, handle, _ = elastic.dispatch(
            x, topk_idx, topk_weights, num_experts=setting.num_experts, num_sms=setting.num_sms, do_cpu_sync=False
        )
        return elastic.combine(recv_x, handle)[0]

    times = work.layout["is_token_in_rank"][:num_tokens].sum(1, keepdim=True)
    return GpuCase(_Replayed(call), is_right=lambda sums: torch.allclose(sums.float(), x.float() * times, rtol=0.05))


def low_latency_decode_case(work: Work) -> GpuCase:
    """The same tokens by low-latency mode, in BF16, in a graph."""
    setting, num_ranks = work.setting, work.num_ranks
    num_tokens = min(_DECODE_TOKENS, setting.num_tokens)
    x, topk_idx, _ = (part[:num_tokens].contiguous() for part in work.drawn)
    weights = torch.ones(topk_idx.shape, device=x.device)
    num_bytes = Buffer.get_low_latency_rdma_size_hint(num_tokens, setting.hidden, num_ranks, setting.num_experts)
    buffer = Buffer(dist.group.WORLD, 0, num_bytes, low_latency_mode=True, device=setting.device)

    def call() -> torch.Tensor:
        recv_x, _, handle, _, _ = buffer.low_latency_dispatch(
            x, topk_idx, num_tokens, setting.num_experts, use_fp8=False
        )
        assert isinstance(recv_x, torch.Tensor)
        return buffer.low_latency_combine(recv_x, topk_idx, weights, handle)[0]

    expected = x.float() * setting.num_topk
    return GpuCase(_Replayed(call), is_right=lambda sums: torch.allclose(sums.float(), expected, rtol=0.05))


def _both(name: str, title: str, make: Callable[..., GpuCase], is_expanded: bool) -> dict[str, GpuLine]:
    return {
        name: GpuLine(title, partial(make, is_expanded=is_expanded, is_product=True)),
        f"{name}-buffer": GpuLine(f"{title}, Buffer", partial(make, is_expanded=is_expanded, is_product=False)),
    }


ELASTIC_GPU_CASES = {
    **_both("compact", "compact dispatch, BF16", gpu_dispatch_case, is_expanded=False),
    **_both("expanded", "expanded dispatch, BF16", gpu_dispatch_case, is_expanded=True),
    **_both("combine-compact", "combine of compact rows", gpu_combine_case, is_expanded=False),
    **_both("combine-expanded", "combine of expanded rows", gpu_combine_case, is_expanded=True),
    "combine-compact-window": GpuLine(
        "combine of compact rows, in window",
        partial(gpu_combine_case, is_expanded=False, is_product=True, in_window=True),
    ),
    "combine-expanded-window": GpuLine(
        "combine of expanded rows, in window",
        partial(gpu_combine_case, is_expanded=True, is_product=True, in_window=True),
    ),
    "decode": GpuLine("decode, 128 tokens, graph", decode_case),
    "decode-low-latency": GpuLine("the same by low-latency mode", low_latency_decode_case),
}
"""Those that end in `-buffer` are what the line above them is compared with."""
