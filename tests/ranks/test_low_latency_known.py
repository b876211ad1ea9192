"""A low-latency call like one before is not checked again. Any other one is, and what it raises says the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from common import OneRank, error_of
from deep_ep import Buffer
from deep_ep.kernels import _triton

M, H, K, E = 4, 128, 2, 3


class Kit:
    """A buffer of one rank, and the right arguments of its low-latency calls."""

    def __init__(self) -> None:
        hint = Buffer.get_low_latency_rdma_size_hint(M, H, 1, E)
        self.buffer = Buffer(None, 0, hint, low_latency_mode=True, comm=OneRank())
        self.x = torch.arange(M * H).reshape(M, H).remainder(7).bfloat16()
        self.topk_idx = torch.tensor([[0, 1], [1, 2], [2, -1], [0, 2]])
        self.weights = torch.ones(M, K)
        recv_x, _, self.handle, _, _ = self.dispatch()
        self.rows = recv_x.clone()
        self.combine()

    def dispatch(self, **more: Any) -> tuple:
        given = {"x": self.x, "topk_idx": self.topk_idx, "num_max_dispatch_tokens_per_rank": M, "num_experts": E}
        return self.buffer.low_latency_dispatch(**{**given, "use_fp8": False, **more})

    def combine(self, **more: Any) -> torch.Tensor:
        given = {"x": self.rows, "topk_idx": self.topk_idx, "topk_weights": self.weights, "handle": self.handle}
        return self.buffer.low_latency_combine(**{**given, **more})[0]


@pytest.fixture(params=["this device's engine", "interpreted"])
def kit(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Kit]:
    if request.param == "interpreted":
        if not _triton.INTERPRETED:
            pytest.skip("it is for Triton's interpreter")
        monkeypatch.setenv("DEEP_EP_TRANSPORT", "interpreted")
    kit = Kit()
    for _ in range(3):  # they are known
        kit.dispatch()
        kit.combine()
    yield kit
    kit.buffer.check()


def strided(value: torch.Tensor) -> torch.Tensor:
    """The same values, with room between the rows."""
    return torch.cat([value, value], -1)[..., : value.shape[-1]]


class Wrapped(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return function(*args, **(kwargs or {}))


WRONG_TENSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a list": lambda value: value.tolist(),
    "a number": lambda _: 3,
    "nothing": lambda _: None,
    "another type": lambda value: value.double(),
    "another shape": lambda value: value[..., :-1].contiguous(),
    "a dimension more": lambda value: value[None],
    "strided": strided,
    "sparse": lambda value: value.to_sparse(),
    "elsewhere": lambda value: value.to("meta"),
    "wrapping": lambda value: value.as_subclass(Wrapped),
}
DISPATCHED = {"x": "x", "topk_idx": "topk_idx"}
COMBINED = {"x": "rows", "topk_idx": "topk_idx", "topk_weights": "weights"}


def errors_of(kit: Kit) -> dict[str, tuple[str, str]]:
    """Of calls with one wrong argument each."""
    errors = {}
    for how, wrong in WRONG_TENSORS.items():
        for name, attribute in DISPATCHED.items():
            errors[f"dispatch {name}: {how}"] = error_of(kit.dispatch, **{name: wrong(getattr(kit, attribute))})
        for name, attribute in COMBINED.items():
            errors[f"combine {name}: {how}"] = error_of(kit.combine, **{name: wrong(getattr(kit, attribute))})
        for index in range(2):
            handle = list(kit.handle)
            handle[index] = wrong(handle[index])
            errors[f"handle[{index}]: {how}"] = error_of(kit.combine, handle=tuple(handle))
        stats = torch.zeros(1, dtype=torch.int64)
        errors[f"dispatch wait: {how}"] = error_of(kit.dispatch, dispatch_wait_recv_cost_stats=wrong(stats))
        errors[f"combine wait: {how}"] = error_of(kit.combine, combine_wait_recv_cost_stats=wrong(stats))
        errors[f"combine out: {how}"] = error_of(kit.combine, out=wrong(torch.empty_like(kit.x)))
    for name, handle in {
        "short": kit.handle[:4],
        "a generator": (one for one in kit.handle),
        "a dict": dict.fromkeys(kit.handle[2:]),
        "a text": "abcde",
        "nothing": None,
        "of lists": ([], [], [], [], []),
        "of other sizes": (*kit.handle[:2], M + 1, H, E),
    }.items():
        errors[f"handle: {name}"] = error_of(kit.combine, handle=handle)
    for name, value in {"num_max_dispatch_tokens_per_rank": 2, "num_experts": [E], "use_ue8m0": True}.items():
        errors[name] = error_of(kit.dispatch, **{name: value})
    for call in (kit.dispatch, kit.combine):
        errors[f"{call.__name__}: both ways"] = error_of(call, async_finish=True, return_recv_hook=True)
    errors["both forms"] = error_of(kit.combine, use_logfmt=True, zero_copy=True)
    return errors


def test_wrong_arguments_behind_right_ones(kit: Kit) -> None:
    known = errors_of(kit)
    kit.buffer._known_dispatches.clear()
    kit.buffer._known_combines.clear()
    checked = errors_of(kit)
    for name, error in checked.items():
        assert known[name] == error, name
    allowed = {"dispatch wait: nothing", "combine wait: nothing", "combine out: nothing"}
    allowed |= {"dispatch wait: strided", "combine wait: strided"}  # of one element
    allowed |= {"dispatch topk_idx: another shape", "dispatch x: another shape"}  # any K and any H will do
    assert {name for name, (kind, _) in known.items() if kind == "none"} == allowed
    assert torch.equal(kit.dispatch()[0][0, :2], kit.x[[0, 3]])


def test_a_lazy_tensor_behind_one_that_was_not(kit: Kit) -> None:
    negated = torch._neg_view(kit.x)
    for _ in range(2):
        recv_x, *_ = kit.dispatch(x=negated)
        assert torch.equal(recv_x[0, :2], -kit.x[[0, 3]])
        assert torch.equal(kit.combine(topk_weights=torch._neg_view(kit.weights)), -kit.combine())
    assert torch.equal(kit.dispatch()[0][0, :2], kit.x[[0, 3]])


def test_one_token_whose_rows_have_any_stride(kit: Kit) -> None:
    """Of a dimension of size 1 torch calls any stride contiguous, but does not view it in another type."""
    for size in (H, 3, H):
        x = kit.x[:1].as_strided((1, H), (size, 1))
        recv_x, _, handle, _, _ = kit.dispatch(x=x, topk_idx=kit.topk_idx[:1])
        assert torch.equal(recv_x[0, 0], kit.x[0])
        combined = kit.combine(x=recv_x.clone(), topk_idx=kit.topk_idx[:1], topk_weights=kit.weights[:1], handle=handle)
        assert torch.equal(combined, 2 * kit.x[:1])


def test_rows_that_begin_anywhere(kit: Kit) -> None:
    """Where rows begin is no part of what is checked: kernels differ by it."""
    for offset in (0, 1, 8, 0):
        room = torch.zeros(M * H + offset, dtype=torch.bfloat16)
        x, out = room[offset:].view(M, H).copy_(kit.x), torch.zeros(M * H + 1, dtype=torch.bfloat16)[1:].view(M, H)
        recv_x, _, handle, _, _ = kit.dispatch(x=x)
        assert torch.equal(recv_x[0, :2], kit.x[[0, 3]])
        assert kit.combine(x=recv_x.clone(), handle=handle, out=out) is out
        assert torch.equal(out, kit.combine(x=recv_x.clone(), handle=list(handle)))
        assert torch.equal(out, kit.x * torch.tensor([[2], [2], [1], [2]]))
