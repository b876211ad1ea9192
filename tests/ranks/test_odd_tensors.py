"""Tensors that are not what their bytes say: odd strides, lazy signs, subclasses."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import NOTHING_POSTED, OneRank, layout_of, run_ranks
from deep_ep import Buffer, ElasticBuffer, EventHandle
from deep_ep.tensors import is_lazy, ordinary

pytestmark = pytest.mark.usefixtures("device")

HIDDEN = 128


def with_odd_strides(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, contiguous as torch sees it, with a stride of 77 wherever a size is 1."""
    strides = [77 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True)]
    odd = tensor.new_empty(max(1, tensor.numel())).as_strided(tensor.shape, strides).copy_(tensor)
    assert odd.is_contiguous()
    return odd


def lazily_negated(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, as what they are the negation of."""
    negated = torch._neg_view(tensor.neg())
    assert negated.is_neg()
    return negated


def annotated(tensor: torch.Tensor) -> torch.Tensor:
    class Annotated(torch.Tensor):
        pass

    return tensor.as_subclass(Annotated)


# Everything that a call takes, changed and unchanged ------------------------------------------------------------------


def round_trip(buffer: Buffer, x: torch.Tensor, change: Callable, change_float: Callable) -> list[torch.Tensor]:
    """Every normal call with all its tensors changed; one rank holds all tokens' experts."""
    num_experts = 2 * buffer.group_size
    topk_idx = torch.arange(x.size(0)).view(-1, 1) % num_experts
    weights, scales = torch.rand(x.size(0), 1, generator=torch.Generator().manual_seed(1)), x[:, :1].float()
    per_rank, per_node, per_expert, mask, _ = buffer.get_dispatch_layout(change(topk_idx), num_experts)
    layout = {
        "num_tokens_per_rank": change(per_rank),
        "num_tokens_per_rdma_rank": None if per_node is None else change(per_node),
        "is_token_in_rank": change(mask),
        "num_tokens_per_expert": change(per_expert),
    }
    top = {"topk_idx": change(topk_idx), "topk_weights": change_float(weights)}
    payload = (change_float(x), change_float(scales))
    (recv_x, recv_scales), recv_idx, recv_weights, _, handle, _ = buffer.dispatch(payload, **layout, **top)
    handle = tuple(map(change, handle))
    (again, _), *_ = buffer.dispatch(payload, handle=handle)
    worst, *_ = buffer.dispatch(change_float(x), **layout, **top, num_worst_tokens=x.size(0) * buffer.group_size)
    bias = (change_float(2 * x), change_float(x))
    sums, sum_weights, _ = buffer.combine(change_float(recv_x), handle, change_float(recv_weights), bias)
    plain, *_ = buffer.combine(change_float(recv_x.clone()), handle)
    return [recv_x, recv_scales, recv_idx, recv_weights, again, worst[: recv_x.size(0)], sums, sum_weights, plain]


def low_latency_trip(buffer: Buffer, x: torch.Tensor, change: Callable, change_float: Callable) -> list[torch.Tensor]:
    num_ranks, max_tokens = buffer.group_size, 4
    topk_idx = torch.arange(x.size(0)).view(-1, 1) % num_ranks
    weights, seen, waited = torch.ones(x.size(0), 1), torch.zeros(1), torch.zeros(num_ranks)
    seen, waited = change(seen.int()), change(waited.long())
    results = []
    for use_fp8 in (False, True):
        rows, count, handle, _, _ = buffer.low_latency_dispatch(
            change_float(x.bfloat16()), change(topk_idx), max_tokens, num_ranks, seen, waited, use_fp8=use_fp8
        )
        results += [(rows[0] if use_fp8 else rows)[:, : int(count[0])].clone(), count]
    handle = (handle[0], change(handle[1]), *handle[2:])
    got = torch.zeros(num_ranks, max_tokens * num_ranks, x.size(1)).bfloat16()[:1]
    got[:, : int(count[0])] = results[0]
    out = change(torch.empty(x.size(0), x.size(1)).bfloat16())
    combined, _, _ = buffer.low_latency_combine(
        change_float(got), change(topk_idx), change_float(weights), handle, out=out
    )
    assert combined is out
    return [*results, seen, out]


CHANGES: dict[str, tuple[Callable, Callable]] = {  # of all tensors, and of those with a sign
    "odd strides": (with_odd_strides, with_odd_strides),
    "negated": (lambda tensor: tensor, lazily_negated),
    "annotated": (annotated, annotated),
    "parameter": (lambda tensor: tensor, torch.nn.Parameter),
}


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def compare(rank: int, num_ranks: int, shapes: list[tuple[int, int]], names: list[str]) -> bool:
    size = Buffer.get_low_latency_rdma_size_hint(4, HIDDEN, num_ranks, num_ranks)
    buffer = Buffer(dist.group.WORLD, 1 << 20, size, low_latency_mode=True, num_cpu_timeout_secs=30)
    for shape in shapes:
        x = torch.randn(shape, generator=torch.Generator().manual_seed(rank))
        for trip in (round_trip, low_latency_trip):
            expected = trip(buffer, x, same, same)
            for name in names:
                for index, (one, other) in enumerate(zip(expected, trip(buffer, x, *CHANGES[name]), strict=True)):
                    assert torch.equal(one, other), (trip.__name__, name, shape, index, one, other)
    return True


WAYS = {
    "posted": {},
    "put": NOTHING_POSTED,
    "nodes": {"DEEP_EP_RANKS_PER_NODE": "1"},
    "kernels": {"DEEP_EP_TRANSPORT": "interpreted"},
}


@pytest.mark.parametrize("way", [*WAYS])
def test_arguments_are_made_ordinary(way: str, device: str) -> None:
    if device == "cuda" and way in ("nodes", "kernels"):
        pytest.skip("low latency across nodes needs NVSHMEM there, and kernels are not interpreted")
    if way == "kernels":  # in the interpreter every launch costs milliseconds
        shapes, names = [(1, 1)], ["odd strides", "negated"]
    else:
        shapes, names = [(3, 1), (1, HIDDEN), (1, 1)], [*CHANGES]
    assert all(run_ranks(compare, 2, shapes, names, env=WAYS[way]))


def solo() -> Buffer:
    return Buffer(None, 1 << 20, comm=OneRank())


def first_expert_layout(buffer: Buffer, num_tokens: int) -> dict[str, Any]:
    topk_idx = torch.zeros(num_tokens, 1, dtype=torch.int64)
    return layout_of(buffer, topk_idx, 2)


def test_a_conjugate_is_sent_as_what_it_is() -> None:
    buffer = solo()
    x = torch.randn(3, 4, dtype=torch.complex64).conj()
    assert is_lazy(x)
    recv_x, *_ = buffer.dispatch(x, **first_expert_layout(buffer, 3))
    assert torch.equal(recv_x, x)
    recv_x, *_ = buffer.dispatch(x.imag, **first_expert_layout(buffer, 3))  # a negated view with gaps
    assert torch.equal(recv_x, x.imag)


@pytest.mark.cpu_only
def test_a_lazy_tensor_is_read_behind_the_event() -> None:
    buffer, completion = solo(), Future()
    x, layout = torch.zeros(3, 4), first_expert_layout(buffer, 3)
    stream = buffer.get_comm_stream()

    def fill() -> None:
        x.fill_(1.0)
        completion.set_result(None)

    timer = threading.Timer(0.2, fill)
    timer.start()
    recv_x, *_, event = buffer.dispatch(
        torch._neg_view(x), **layout, previous_event=EventHandle(completion), async_finish=True
    )
    event.current_stream_wait()
    timer.join()
    assert stream.query()
    assert torch.equal(recv_x, -torch.ones(3, 4))


class Wrapper(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapper:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype, device=inner.device)

    def __init__(self, inner: torch.Tensor):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(function)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("make", "seen"),
    [
        (torch.Tensor.to_sparse, "sparse_coo"),
        (torch.Tensor.to_sparse_csr, "sparse_csr"),
        (lambda x: torch.nested.nested_tensor([x, x]), "nested"),
        (lambda x: torch.quantize_per_tensor(x.cpu(), 0.1, 0, torch.quint8).to(x.device), "quantized"),
        (Wrapper, "Wrapper"),
    ],
)
def test_what_has_no_bytes_is_refused(make: Callable, seen: str) -> None:
    buffer = solo()
    wrong = make(torch.randn(3, 4))
    with pytest.raises(ValueError, match=f"dispatch: `x` must be an ordinary strided tensor, .*{seen}"):
        buffer.dispatch(wrong, **first_expert_layout(buffer, 3))
    buffer.dispatch(torch.randn(3, 4), **first_expert_layout(buffer, 3))


@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.qint32, torch.quint4x2, torch.quint2x4])
def test_quantized_dtypes_are_refused(dtype: torch.dtype) -> None:
    """Torch does not call such a view quantized, and ends the process where it is to make one over the window."""
    buffer, x = solo(), torch.ones(3, 4, dtype=torch.int32)
    elastic, layout = ElasticBuffer.from_buffer(buffer, 3), first_expert_layout(buffer, 3)
    wrong = x.view(dtype)
    assert not wrong.is_quantized
    for name, given in (("x", wrong), ("scales", (x, wrong))):
        with pytest.raises(ValueError, match=f"dispatch: `{name}` must not have a quantized dtype, it is q"):
            buffer.dispatch(given, **layout)
        with pytest.raises(ValueError, match=f"dispatch: `{name}` must not have a quantized dtype, it is q"):
            elastic.dispatch(given, torch.zeros(3, 1, dtype=torch.int64), num_experts=2)
    buffer.dispatch(x, **layout)


def test_a_transformed_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match=r"`x` must be an ordinary strided tensor, .*vmap"):
        torch.vmap(lambda x: ordinary("dispatch", "x", x))(torch.randn(3, 4))


def test_what_is_written_must_not_be_lazy() -> None:
    with pytest.raises(ValueError, match="`out` is written, so it must not be lazily negated"):
        ordinary("low_latency_combine", "out", torch._neg_view(torch.zeros(3)), is_written=True)


def test_an_empty_tensor_gets_ordinary_strides() -> None:
    odd = torch.empty(0, 8)[:, ::2]
    assert ordinary("dispatch", "x", odd).stride() == torch.empty(0, 4).stride()
