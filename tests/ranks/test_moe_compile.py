"""The fixed-shape path under `torch.compile`: one graph, and the results of the uncompiled layer.

On the CPU the layer is compiled by `aot_eager`: it traces, makes the backward graph and runs both, without the minute
that the CPU's compiler takes. On a GPU by inductor. What inductor makes of a rank without tokens needs no ranks: it is
looked at in one process, whose exchanges are listed.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._inductor import config as inductor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import deep_ep
from common import OneRank, error_of, layout_of
from deep_ep.buffers import registry
from deep_ep.launch import run_ranks  # without a default device, as in `made_by`
from deep_ep.moe import GateOptions, MoELayer, combine, dispatch, keep_exchanges
from deep_ep.moe.grouped import grouped_linear, padded_linear

T, H, INNER, E, K = 12, 32, 16, 8, 3
# Torch finds graphs of earlier runs by the program, whatever has changed about its operators.
FRESH = {"force_disable_caches": True}


class Block(torch.nn.Module):
    """A layer as decoders have it."""

    def __init__(self, buffer: deep_ep.Buffer, dtype: torch.dtype, **how: Any):
        super().__init__()
        options = GateOptions(num_groups=4, topk_groups=2, capacity_factor=1.5, balance_loss=0.1)
        self.norm = torch.nn.RMSNorm(H, dtype=dtype)
        self.moe = MoELayer(H, INNER, E, K, buffer=buffer, options=options, shared_intermediate=8, dtype=dtype, **how)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, loss = self.moe(self.norm(x))
        return x + y, loss


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def step(block: Block, call: Any, x: torch.Tensor) -> list[torch.Tensor]:
    """Output and all gradients."""
    block.zero_grad()
    x = x.clone().requires_grad_()
    y, loss = call(x)
    (y.square().sum() + loss).backward()
    grads = {name: local(parameter.grad).clone() for name, parameter in block.named_parameters()}
    return [y.detach(), x.grad, *grads.values(), grads["moe.experts.up"]]


def compile_block(
    rank: int, num_ranks: int, compiler: str, dtype: torch.dtype, has_mesh: bool
) -> tuple[list[torch.Tensor], ...]:
    """With no tokens on the last rank."""
    buffer = deep_ep.Buffer(dist.group.WORLD, num_cpu_timeout_secs=100, num_gpu_timeout_secs=100)
    mesh = init_device_mesh(buffer.device.type, (num_ranks,)) if has_mesh else None
    torch.manual_seed(0)
    block = Block(buffer, dtype, num_worst_tokens=T * num_ranks, mesh=mesh)
    block.norm.to(buffer.device)
    compiled = torch.compile(block, backend=compiler, fullgraph=True)
    x = torch.randn(0 if rank == num_ranks - 1 else T, H, generator=torch.Generator().manual_seed(rank), dtype=dtype)
    x = x.to(buffer.device)
    with inductor.patch(FRESH):
        return step(block, block, x), step(block, compiled, x)


@pytest.mark.parametrize("where", ["one node", "one node, experts as DTensors", "two nodes"])
def test_a_compiled_block(device: str, where: str) -> None:
    compiler = "inductor" if device == "cuda" else "aot_eager"
    env = {"DEEP_EP_RANKS_PER_NODE": "1"} if where == "two nodes" else {}
    dtype = torch.float64 if where == "two nodes" else torch.float32
    for plain, compiled in run_ranks(compile_block, 2, compiler, dtype, "DTensors" in where, env=env):
        for expected, seen in zip(plain, compiled, strict=True):
            torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-5)
        assert plain[-1].any()  # gradients came to the experts of both ranks


@pytest.mark.cpu_only  # nothing of it depends on the device
def test_without_fixed_shapes_the_exchange_is_one_graph_break(device: str) -> None:
    buffer = deep_ep.Buffer(None, comm=OneRank())
    block = Block(buffer, torch.float32)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    compiled, x = torch.compile(block, backend="aot_eager"), torch.randn(T, H)
    for expected, seen in zip(step(block, block, x), step(block, compiled, x), strict=True):
        torch.testing.assert_close(seen, expected)
    (reason,) = torch._dynamo.utils.counters["graph_break"]
    assert "`MoELayer._exchange_untraced` receives as many rows as come" in reason
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # before it and after it, no more inside


@pytest.mark.cpu_only  # nothing of it depends on the device
def test_calls_of_a_buffer_are_not_traced(device: str) -> None:
    buffer = deep_ep.Buffer(None, comm=OneRank())

    def program(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        layout = layout_of(buffer, ids, E)
        rows, *_, handle, _ = buffer.dispatch(x.sin(), **layout)
        return buffer.combine(rows.cos(), handle)[0].tan()

    x, ids = torch.randn(T, H), torch.rand(T, E).topk(K).indices
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    assert torch.equal(torch.compile(program, backend="eager")(x, ids), program(x, ids))
    assert all("calls of a buffer are not traced" in why for why in torch._dynamo.utils.counters["graph_break"])
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] <= 4  # between three calls


Program = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], list[torch.Tensor]]


@pytest.fixture
def exchanges(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which buffer made which call, in order."""
    made: list[str] = []

    def watch(name: str) -> None:
        call = getattr(deep_ep.Buffer, name)

        def watched(buffer: deep_ep.Buffer, *args: Any, **kwargs: Any) -> Any:
            made.append(f"{name} {buffer.number}")
            return call(buffer, *args, **kwargs)

        monkeypatch.setattr(deep_ep.Buffer, name, watched)

    watch("dispatch")
    watch("combine")
    return made


def made_by(exchanges: list[str], program: Program, num_tokens: int, backend: str | None) -> list[str]:
    """The exchanges of a forward and a backward pass, made by a compiler's graphs; None: as it is written.

    Tensors say where they are made: torch 2.11 compiles nothing while there is a default device.
    """
    device = deep_ep.Buffer(None, comm=OneRank()).device
    x, ids = torch.randn(num_tokens, H, device=device), torch.rand(num_tokens, E, device=device).topk(K).indices
    weights = torch.rand(num_tokens, K, device=device)
    torch.compiler.reset()
    with inductor.patch(FRESH):
        call = torch.compile(program, backend=backend, fullgraph=True) if backend else program
        results = call(x.requires_grad_(), ids, weights.requires_grad_())
        sum(result.sum() for result in results).backward()
    seen, exchanges[:] = exchanges[:], []
    return seen


def there_and_back(buffer: deep_ep.Buffer, *inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sums, and the received weights: as results of a program, they leave nothing that needs the CPU's compiler."""
    received = dispatch(buffer, *inputs, E, num_worst_tokens=T)
    return combine(buffer, received.x, received), received.topk_weights


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_rank_without_tokens_makes_every_exchange(backend: str, exchanges: list[str]) -> None:
    """Layers in a row, and an exchange whose result nobody wants: none is dropped, and their order holds."""
    first, second = deep_ep.Buffer(None, comm=OneRank()), deep_ep.Buffer(None, comm=OneRank())

    def program(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        there_and_back(second, x, ids, weights)
        results = []
        for buffer in (first, second, first):
            y, recv_weights = there_and_back(buffer, x, ids, weights)
            x = x + y
            results.append(recv_weights)
        return [x, *results]

    written = made_by(exchanges, program, 0, None)
    assert len(written) == 2 * 4 + 2 * 3
    assert made_by(exchanges, program, 0, backend) == written


# With nothing, with the function that is for it, and with a policy that wants all of it repeated.
CONTEXTS: dict[str, dict[str, Any]] = {
    "": {},
    "keep_exchanges": {"context_fn": keep_exchanges},
    "a policy": {"context_fn": lambda: create_selective_checkpoint_contexts([torch.ops.aten.sin.default])},
}


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("num_tokens", [0, 4])
def test_checkpoints_of_a_compiled_graph_keep_exchanges(num_tokens: int, context: str, exchanges: list[str]) -> None:
    """However many tokens a rank has: the compiler's choice of what to compute again must be the same on all."""
    buffer = deep_ep.Buffer(None, comm=OneRank())

    def program(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> list[torch.Tensor]:
        def layer(x: torch.Tensor) -> torch.Tensor:
            return x + there_and_back(buffer, x.sin(), ids, weights)[0].sin()

        return [checkpoint(layer, x, use_reentrant=False, **CONTEXTS[context]).cos()]

    both = [f"dispatch {buffer.number}", f"combine {buffer.number}"]
    if context == "keep_exchanges":
        assert made_by(exchanges, program, num_tokens, None) == both * 3  # forward, again, backward
    assert made_by(exchanges, program, num_tokens, "aot_eager") == both * 2


@pytest.mark.parametrize("context", ["", "keep_exchanges"])
def test_a_layer_is_checkpointed_in_a_compiled_graph(device: str, context: str) -> None:
    """Also in training, where the gate counts its choices: a graph that is computed again may have no side effects."""
    layer, x = (
        MoELayer(H, INNER, E, K, buffer=deep_ep.Buffer(None, comm=OneRank()), num_worst_tokens=T),
        torch.randn(T, H),
    )

    def program(x: torch.Tensor) -> torch.Tensor:
        return checkpoint(layer, x, use_reentrant=False, **CONTEXTS[context])[0]

    seen = []
    torch.compiler.reset()
    with inductor.patch(FRESH):
        for call in (program, torch.compile(program, backend="aot_eager", fullgraph=True)):
            layer.zero_grad()
            layer.gate.load.zero_()
            y = call(x)
            y.sum().backward()
            seen.append((y, layer.experts.up.grad, layer.gate.weight.grad, layer.gate.load.clone()))
    torch.testing.assert_close(seen[1][:3], seen[0][:3])
    assert torch.equal(seen[1][3] / seen[1][3].sum(), seen[0][3] / seen[0][3].sum()), "however often it was computed"
    assert seen[1][3].any()


def test_operators_keep_their_word(device: str) -> None:
    """Schemas, fake kernels and gradients of all operators against what they do."""
    ops, buffer = torch.ops.deep_ep_moe, deep_ep.Buffer(None, comm=OneRank())
    x, topk_idx = torch.randn(T, H, requires_grad=True), torch.rand(T, E).topk(K).indices
    weights = torch.rand(T, K, requires_grad=True)
    torch.library.opcheck(ops.dispatch, (x, weights, topk_idx, buffer.number, E, T, False))
    with torch.no_grad():
        rows, ids, recv_weights, tie, *routes = ops.dispatch(x, weights, topk_idx, buffer.number, E, T, True)
    torch.library.opcheck(ops.sum_back, (rows, recv_weights, ids, routes, buffer.number))
    torch.library.opcheck(ops.combine, (tie, rows.clone().requires_grad_(), routes, buffer.number, False))
    torch.library.opcheck(ops.send_back, (x.detach(), routes, buffer.number, True))
    values, places = torch.randn(2 * T, H, requires_grad=True), torch.arange(2 * T) // 2
    torch.library.opcheck(ops.add_rows, (values, places, routes, buffer.number, torch.bfloat16))
    matrices, ends = torch.randn(3, 8, H, requires_grad=True), torch.tensor([4, 4, 9], dtype=torch.int32)
    torch.library.opcheck(ops.padded_linear, (x, matrices, ends))
    torch.library.opcheck(ops.padded_outer, (torch.randn(T, 8), x.detach(), ends))


def test_rows_of_nobody_stay_out(device: str) -> None:
    """NaN beyond the experts' rows reaches neither results nor gradients."""
    x, weight = torch.randn(7, H, dtype=torch.float64), torch.randn(3, 8, H, dtype=torch.float64, requires_grad=True)
    known = x[:5].clone().requires_grad_()
    expected = grouped_linear(known, weight, [2, 0, 3])
    expected.sum().backward()
    weight_grad, weight.grad = weight.grad, None
    x[5:] = float("nan")
    x.requires_grad_()
    y = padded_linear(x, weight, torch.tensor([2, 2, 5], dtype=torch.int32))
    assert torch.allclose(y[:5], expected)
    assert not y[5:].any()
    y.sum().backward()
    assert torch.allclose(weight.grad, weight_grad)
    assert torch.allclose(x.grad[:5], known.grad)
    assert not x.grad[5:].any()


@pytest.mark.cpu_only  # the error is the same
def test_without_a_number_of_rows_the_error_says_what_to_pass(device: str) -> None:
    buffer = deep_ep.Buffer(None, comm=OneRank())
    block = Block(buffer, torch.float32)
    _, text = error_of(torch.compile(block, backend="aot_eager", fullgraph=True), torch.ones(2, H))
    assert "Pass `num_worst_tokens`" in text


@pytest.mark.cpu_only  # nothing of it depends on the device
def test_expanded_rows_are_two_graph_breaks_that_say_what_to_leave_out(device: str) -> None:
    layer = MoELayer(H, INNER, E, K, buffer=deep_ep.Buffer(None, comm=OneRank()), num_worst_tokens=T, expanded=True)
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    torch.compile(layer, backend="eager")(torch.randn(T, H))
    reasons = list(torch._dynamo.utils.counters["graph_break"])
    assert ["`combine_expanded`" in reason for reason in reasons] == [False, True]
    assert all("and without `expanded`" in reason and "Pass `num_worst" not in reason for reason in reasons)


def test_buffers_are_found_as_long_as_somebody_has_them(device: str) -> None:
    buffer = deep_ep.Buffer(None, comm=OneRank())
    number = buffer.number
    assert registry.find(number) is buffer
    del buffer
    gc.collect()
    kind, text = error_of(registry.find, number)
    assert (kind, text.split(".")[0]) == ("EPClosed", f"operator: buffer {number} is gone")
