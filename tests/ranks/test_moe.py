"""The MoE layer on several ranks against the dense layer of one process: outputs and every gradient.

The dense layer is plain torch; it shares only the gate with the other, which tests/pure/test_moe_gate.py is about. A
buffer's limit is short here: a rank that stays away from a backward pass is an error soon, not a hang.
"""

from __future__ import annotations

import functools
import io
import itertools
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import deep_ep
from common import OneRank, error_of, run_ranks
from deep_ep import moe
from deep_ep.buffers import checks
from deep_ep.moe import GateOptions, MoELayer

T, H, INNER, E, K = 20, 24, 16, 8, 3
LIMIT_SECS = 20.0
LIMITS = {torch.float64: 1e-10, torch.float32: 2e-5, torch.bfloat16: 6e-2}  # of the largest value
FP8_LIMIT = 8e-2  # E4M3 rounds to within 1/16; sums over channels even it out


PLAIN = GateOptions()


@dataclass(frozen=True)
class Case:
    """A layer and what it is given.

    Attributes:
        options: Of the gate.
        shared: Inner size of the shared expert.
        empty_rank: Has no tokens.
        unloved: The experts of the last rank get nothing.
        is_checkpointed: Whether activations are computed again.
        two_buffers: Two layers, each on a buffer of its own, in a row and side by side.
        is_fixed: Whether the layer works on the worst case of rows.
        is_fp8: Whether rows travel as FP8.
        is_expanded: Whether rows come grouped by expert.
    """

    options: GateOptions = PLAIN
    shared: int = 0
    empty_rank: int = -1
    unloved: bool = False
    is_checkpointed: bool = False
    two_buffers: bool = False
    is_fixed: bool = False
    is_fp8: bool = False
    is_expanded: bool = False


GROUPED = GateOptions(num_groups=4, topk_groups=2, scale=1.5, balance_loss=0.3)
DROPPING = GateOptions(scoring="softmax", is_normalized=False, capacity_factor=0.6, balance_loss=0.2)
CASES = {
    "plain": Case(),
    "grouped, shared": Case(GROUPED, shared=8),
    "dropping": Case(DROPPING),
    "empty rank": Case(DROPPING, empty_rank=0),
    "no rows": Case(shared=8, unloved=True),
    "checkpointed": Case(GROUPED, shared=8, is_checkpointed=True),
    "checkpointed, no rows": Case(empty_rank=1, unloved=True, is_checkpointed=True),
    "two buffers": Case(GROUPED, two_buffers=True),
    "two buffers, checkpointed": Case(two_buffers=True, unloved=True, is_checkpointed=True),
    "worst case": Case(DROPPING, shared=8, empty_rank=0, is_fixed=True),
    "worst case, checkpointed, no rows": Case(GROUPED, unloved=True, is_checkpointed=True, is_fixed=True),
    "expanded": Case(GROUPED, shared=8, is_expanded=True),
    "expanded, dropping, empty rank": Case(DROPPING, empty_rank=0, is_expanded=True),
    "expanded, checkpointed, no rows": Case(empty_rank=1, unloved=True, is_checkpointed=True, is_expanded=True),
    "expanded, worst case": Case(DROPPING, shared=8, empty_rank=1, is_fixed=True, is_expanded=True),
}
FP8_CASES = {
    "fp8": Case(GROUPED, shared=8, is_fp8=True),
    "fp8, worst case, empty rank": Case(empty_rank=1, is_fixed=True, is_fp8=True),
}


def inputs(case: Case, rank: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A rank's tokens, and the gradient of their outputs."""
    generator = torch.Generator().manual_seed(rank)
    x, grad = torch.randn(2, 0 if rank == case.empty_rank else T, H, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), grad.to(dtype)


def make_layers(case: Case, buffers: list[deep_ep.Buffer], dtype: torch.dtype) -> torch.nn.ModuleList:
    torch.manual_seed(5 + buffers[0].rank)  # the first rank's counts
    how = {"shared_intermediate": case.shared, "options": case.options, "dtype": dtype, "is_fp8": case.is_fp8}
    how["expanded"] = case.is_expanded
    if case.is_fixed:
        how["num_worst_tokens"] = T * buffers[0].group_size
    layers = torch.nn.ModuleList(MoELayer(H, INNER, E, K, buffer=buffer, **how) for buffer in buffers)
    if case.unloved:
        for layer in layers:
            layer.gate.bias[-E // 4 :] = -100.0  # at least those of the last of 4 ranks
            layer.gate.bias[-E // max(buffers[0].group_size, 2) :] = -100.0
    return layers


def network(case: Case, layers: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """One layer; or two in a row with the second one beside them, on the same input."""

    def call(layer: Any, x: torch.Tensor) -> Any:
        return checkpoint(layer, x, use_reentrant=False) if case.is_checkpointed else layer(x)

    first, loss = call(layers[0], x)
    if not case.two_buffers:
        return first, loss
    second, second_loss = call(layers[1], torch.tanh(first))
    beside, third_loss = call(layers[1], x)
    return second + beside, loss + second_loss + third_loss


def new_buffer() -> deep_ep.Buffer:
    return deep_ep.Buffer(dist.group.WORLD, num_cpu_timeout_secs=LIMIT_SECS)


def train(rank: int, num_ranks: int, names: list[str], *dtypes: torch.dtype) -> dict[Any, Any]:
    """Forward and backward of each case. Returns output, gradient of the input, all other gradients and the state."""
    buffers, seen = [new_buffer(), new_buffer()], {}
    for name, dtype in itertools.product(names, dtypes):
        case = (CASES | FP8_CASES)[name]
        layers = make_layers(case, buffers[: 1 + case.two_buffers], dtype)
        x, grad = inputs(case, rank, dtype)
        output, loss = network(case, layers, x)
        ((output * grad).sum() + loss).backward()
        moe.reduce_replicated_gradients(layers, dist.group.WORLD)
        grads = {parameter: value.grad for parameter, value in layers.named_parameters()}
        seen[name, dtype] = (output.detach(), x.grad, grads, layers.state_dict())
    return seen


class Dense(torch.nn.Module):
    """The layer without communication, with a rank's gate and shared expert and all experts."""

    def __init__(self, gate: moe.Gate, state: dict[str, torch.nn.Parameter]):
        super().__init__()
        self.gate, self.state = gate, state

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        routes, state = self.gate(x), self.state
        output = torch.zeros_like(x)
        for expert in range(E):
            weight = (routes.topk_weights * (routes.topk_idx == expert)).sum(1, keepdim=True)
            output = output + weight * self.block(x, state["experts.up"][expert], state["experts.down"][expert])
        if "shared.up" in state:
            output = output + self.block(x, state["shared.up"], state["shared.down"])
        return output, routes.balance_loss

    @staticmethod
    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        inner = x @ up.T
        return (torch.nn.functional.silu(inner[:, : down.size(1)]) * inner[:, down.size(1) :]) @ down.T


def dense_layers(case: Case, full: dict[str, torch.Tensor], dtype: torch.dtype) -> list[Dense]:
    layers = []
    for index in range(1 + case.two_buffers):
        start = f"{index}."
        state = {name[len(start) :]: value for name, value in full.items() if name.startswith(start)}
        gate = moe.Gate(H, E, K, case.options, dtype=state["gate.weight"].dtype)
        gate.load_state_dict({"weight": state.pop("gate.weight"), "bias": state.pop("gate.bias")})
        parameters = {name: torch.nn.Parameter(value.to(dtype)) for name, value in state.items()}
        layers.append(Dense(gate, parameters))
    return layers


def assert_close(name: str, seen: torch.Tensor, expected: torch.Tensor, limit: float) -> None:
    assert seen.shape == expected.shape, name
    if expected.numel():
        error, largest = (seen - expected).abs().max().item(), expected.abs().max().item()
        assert error <= limit * max(largest, 1.0), f"{name}: error {error}, largest {largest}"


def compare_with_dense(name: str, results: list[dict[Any, Any]], dtype: torch.dtype, wide: torch.dtype) -> None:
    """All ranks' results of a case against the dense layer, computed in another dtype."""
    case, limit = (CASES | FP8_CASES)[name], LIMITS[dtype]
    limit = FP8_LIMIT if case.is_fp8 else limit
    outputs, input_grads, grads, states = zip(*[result[name, dtype] for result in results], strict=True)
    layers = dense_layers(case, moe.merge_experts(states), wide)
    tokens = [inputs(case, rank, dtype) for rank in range(len(results))]
    xs = [x.detach().to(wide).requires_grad_() for x, _ in tokens]
    for rank, (x, (_, grad)) in enumerate(zip(xs, tokens, strict=True)):
        output, loss = network(replace(case, is_checkpointed=False), layers, x)
        ((output * grad).sum() + loss).backward()
        assert_close(f"output of rank {rank}", outputs[rank], output.detach(), limit)
    for rank, x in enumerate(xs):
        assert_close(f"input of rank {rank}", input_grads[rank], x.grad, limit)
    for parameter, grad in moe.merge_experts(grads).items():
        index, kind = parameter.split(".", 1)
        layer = layers[int(index)]
        expected = layer.gate.weight if kind == "gate.weight" else layer.state[kind]
        assert_close(parameter, grad, expected.grad, limit)


DTYPES = (torch.float32, torch.float64)


@pytest.fixture(scope="module")
def trained(device: str) -> Callable[[int], list[dict[Any, Any]]]:
    """What each rank of so many made of all cases; computed once."""
    return functools.cache(lambda num_ranks: run_ranks(train, num_ranks, list(CASES), *DTYPES))


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_layer_equals_the_dense_one(device: str, trained: Any, num_ranks: int) -> None:
    for name, dtype in itertools.product(CASES, DTYPES):
        compare_with_dense(name, trained(num_ranks), dtype, dtype)


def test_layer_in_bf16_and_with_fp8_on_the_way(device: str, trained: Any) -> None:
    names, dtypes = ["plain", "checkpointed", "expanded"], (torch.bfloat16, torch.float32)
    results = run_ranks(train, 2, [*names, *FP8_CASES], *dtypes)
    for name in names:
        output, input_grad, grads, _ = results[0][name, torch.bfloat16]
        assert output.dtype == input_grad.dtype == grads["0.experts.up"].dtype == torch.bfloat16
        assert grads["0.gate.weight"].dtype == torch.float32
        compare_with_dense(name, results, torch.bfloat16, torch.float32)
    for name, dtype in itertools.product(FP8_CASES, dtypes):
        compare_with_dense(name, results, dtype, torch.float32)
    exact = trained(2)[0]["grouped, shared", torch.float32][0]
    assert not torch.equal(results[0]["fp8", torch.float32][0], exact)  # it was FP8


# The operations ------------------------------------------------------------------------------------------------------


def experts_that_look_away(
    rank: int, num_ranks: int, is_expanded: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Odd ranks' experts return constants, and their tokens need no gradients; the others must not wait for them."""
    buffer = new_buffer()
    x = torch.ones(4, H, requires_grad=rank % 2 == 0)
    topk_idx = torch.arange(num_ranks).expand(4, -1)
    weights = torch.full((4, num_ranks), 0.5)
    if is_expanded:
        elastic = deep_ep.ElasticBuffer.from_buffer(buffer)
        dispatch, combine = partial(moe.dispatch_expanded, elastic), partial(moe.combine_expanded, elastic)
    else:
        dispatch, combine = partial(moe.dispatch, buffer), partial(moe.combine, buffer)
    received = dispatch(x, topk_idx, weights, num_ranks)
    y = torch.zeros(received.x.shape) if rank % 2 else received.x * 3
    combined = combine(y, received)
    combined.sum().backward()
    return combined.detach(), x.grad


def expanded_mistakes(rank: int, num_ranks: int) -> list[tuple[str, str]]:
    buffer = new_buffer()
    elastic = deep_ep.ElasticBuffer.from_buffer(buffer)
    x, ids, weights = torch.ones(4, H, dtype=torch.float64), torch.arange(2).repeat(4, 1), torch.ones(4, 2)
    received = moe.dispatch_expanded(elastic, x, ids, weights, num_ranks)
    return [
        error_of(moe.dispatch_expanded, buffer, x, ids, weights, num_ranks),
        error_of(moe.dispatch_expanded, elastic, x, ids, None, num_ranks),
        error_of(moe.dispatch_expanded, elastic, x.int(), ids, weights, num_ranks),
        error_of(moe.dispatch_expanded, elastic, x[0], ids, weights, num_ranks),
        error_of(moe.dispatch_expanded, elastic, x, ids, weights[:, :1], num_ranks),
        error_of(moe.combine_expanded, buffer, received.x, received),
        error_of(moe.combine_expanded, elastic, received.x[:-1], received),
        error_of(moe.combine_expanded, elastic, received.x, received.handle),
        error_of(lambda: MoELayer(H, INNER, 2 * num_ranks, K, buffer=buffer, expanded=True, num_worst_tokens=1)),
    ]


def test_mistakes_around_expanded_rows_are_named(device: str) -> None:
    kinds = ["TypeError"] * 3 + ["ValueError"] * 2 + ["TypeError", "ValueError", "TypeError", "ValueError"]
    for seen in run_ranks(expanded_mistakes, 2):
        assert [kind for kind, _ in seen] == kinds, seen
        assert "ElasticBuffer.from_buffer" in seen[0][1]
        assert "[4, 2], it has [4, 1]" in seen[4][1]


def too_many_tokens(rank: int, num_ranks: int) -> tuple[str, str]:
    layer = MoELayer(H, INNER, 2 * num_ranks, K, buffer=new_buffer(), expanded=True, num_worst_tokens=4 * num_ranks)
    return error_of(layer, torch.randn(4 + rank, H))


@pytest.mark.cpu_only
def test_peers_are_told_of_more_tokens_than_there_may_be() -> None:
    (told, text), (kind, _) = run_ranks(too_many_tokens, 2)
    assert kind == "ValueError"
    assert told == "EPPeerFailed"
    assert "of a MoELayer its num_worst_tokens" in text


@pytest.mark.cpu_only
def test_what_is_no_buffer_is_refused_by_its_type() -> None:
    x, idx = torch.ones(4, H), torch.zeros(4, K, dtype=torch.int64)
    for function, arguments in ((moe.dispatch, (x, idx, torch.ones(4, K), 8)), (moe.combine, (x, None))):
        with pytest.raises(TypeError, match="`buffer` must be a Buffer, got NoneType"):
            function(None, *arguments)  # type: ignore[operator]


def wrong_alone(rank: int, num_ranks: int, is_expanded: bool, what: str) -> tuple[str, str]:
    buffer = new_buffer()
    used = deep_ep.ElasticBuffer.from_buffer(buffer) if is_expanded else buffer
    dispatch = moe.dispatch_expanded if is_expanded else moe.dispatch
    combine = moe.combine_expanded if is_expanded else moe.combine
    idx, weights, x = torch.arange(2 * num_ranks)[:K].repeat(4, 1), torch.ones(4, K), torch.ones(4, H)
    received = dispatch(used, x, idx, weights, 2 * num_ranks)
    if what == "received":
        return error_of(combine, used, received.x, 3 if rank == 0 else received)
    if what == "rows":
        return error_of(combine, used, received.x[:-1] if rank == 0 else received.x, received)
    wrong = {"dtype": (x.int(), idx), "tokens": (x.double()[1:], idx), "ids": (x.double(), idx[0, 0])}[what]
    return error_of(dispatch, used, *(wrong if rank == 0 else (x, idx)), weights, 2 * num_ranks)


@pytest.mark.cpu_only
@pytest.mark.parametrize("is_expanded", [False, True])
@pytest.mark.parametrize("what", ["rows", "received", "dtype", "tokens", "ids"])
def test_peers_are_told_of_a_mistake_that_is_found_before_the_buffer_is_called(is_expanded: bool, what: str) -> None:
    (kind, text), (told, why) = run_ranks(wrong_alone, 2, is_expanded, what)
    assert kind in ("TypeError", "ValueError"), text
    assert told == "EPPeerFailed", why
    assert "rank 0 refused this call" in why
    assert text[-40:] in why


@pytest.mark.parametrize("is_expanded", [False, True])
def test_backward_is_made_by_all_ranks(device: str, is_expanded: bool) -> None:
    for rank, (combined, grad) in enumerate(run_ranks(experts_that_look_away, 3, is_expanded)):
        assert torch.equal(combined, torch.full((4, H), 6.0))
        assert grad is None if rank % 2 else torch.equal(grad, torch.full((4, H), 6.0))


def weights_in_all_ways(rank: int, num_ranks: int) -> list[list[torch.Tensor]]:
    buffer = new_buffer()
    dtypes = (torch.float32, torch.float64)
    return [weights_alone(buffer, dtype, is_async) for dtype in dtypes for is_async in (False, True)]


def weights_alone(buffer: deep_ep.Buffer, dtype: torch.dtype, is_async: bool) -> list[torch.Tensor]:
    """The sum of received weights; those whose expert is elsewhere are constants there."""
    rank, num_ranks = buffer.rank, buffer.group_size
    topk_idx = torch.tensor([[0, num_ranks - 1], [-1, 0]]).repeat(rank, 1)  # rank 0 has no tokens
    weights = torch.rand(topk_idx.shape, dtype=dtype, requires_grad=True)
    x = torch.ones(len(topk_idx), H, dtype=dtype)
    received = moe.dispatch(buffer, x, topk_idx, weights, num_ranks, async_finish=is_async)
    received = received.wait() if is_async else received
    combined = moe.combine(buffer, received.x * 0, received, async_finish=is_async)
    combined = combined.wait() if is_async else combined
    (combined.sum() + received.topk_weights.sum()).backward()
    assert received.topk_weights.dtype == dtype
    assert not received.topk_weights[received.topk_idx < 0].any()
    return [weights.grad, (topk_idx >= 0).to(dtype)]


def test_gradients_of_weights(device: str) -> None:
    for grad, expected in itertools.chain(*run_ranks(weights_in_all_ways, 3)):
        assert torch.equal(grad, expected)


def test_a_pickled_layer_names_the_state_dict(device: str) -> None:
    buffer = deep_ep.Buffer(None, comm=OneRank())
    for layer in (MoELayer(H, INNER, E, K, buffer=buffer, expanded=is_expanded) for is_expanded in (False, True)):
        kind, text = error_of(torch.save, layer, io.BytesIO())
        assert (kind, text[-45:]) == ("TypeError", "a model that has one, save its `state_dict()`")
        torch.save(layer.state_dict(), io.BytesIO())


def test_operations_without_gradients_and_with_bad_arguments(device: str) -> None:
    buffer = deep_ep.Buffer(None, comm=OneRank())
    topk_idx, weights = torch.tensor([[0, 1]]), torch.ones(1, 2)
    with torch.no_grad():
        received = moe.dispatch(buffer, torch.ones(1, H, requires_grad=True), topk_idx, weights, 2)
        combined = moe.combine(buffer, received.x, received)
    assert not combined.requires_grad
    kind, text = error_of(moe.dispatch, buffer, torch.ones(1, H, dtype=torch.int32), topk_idx, weights, 2)
    assert (kind, text[:14]) == ("TypeError", "moe.dispatch: ")
    kind, text = error_of(MoELayer, H, INNER, E, K)
    assert (kind, text[:51]) == ("ValueError", "MoELayer: `group`, `buffer` or `mesh` must be given")


def test_a_buffer_warns_once_of_gradients_that_it_loses(device: str) -> None:
    buffer = deep_ep.Buffer(None, comm=OneRank())
    x, mask = torch.ones(2, H, requires_grad=True), torch.ones(2, 1, dtype=torch.bool)
    per_rank = torch.tensor([2], dtype=torch.int32)
    layout = {"num_tokens_per_rank": per_rank, "is_token_in_rank": mask, "num_tokens_per_expert": per_rank}
    checks._warn_of_lost_gradients.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        buffer.dispatch(x.detach(), **layout)
        with torch.no_grad():
            buffer.dispatch(x, **layout)
        assert not seen
        for _ in range(2):
            assert not buffer.dispatch(x, **layout)[0].requires_grad
        moe.dispatch(buffer, x, torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1), 1)
        handle = buffer.dispatch(x.detach(), **layout)[4]
        assert not buffer.combine(x, handle)[0].requires_grad
    warning, of_combine = seen
    assert str(of_combine.message).startswith("Buffer.combine: `x` requires gradients")
    assert of_combine.filename == __file__
    assert "Use `deep_ep.moe.dispatch`" in str(warning.message)
    assert warning.filename == __file__


def test_recomputation_makes_the_dispatch_again_and_not_the_combine(device: str) -> None:
    buffer = deep_ep.Buffer(None, comm=OneRank())
    layer = MoELayer(H, INNER, E, K, buffer=buffer)
    checkpoint(layer, inputs(Case(), 0, torch.float32)[0], use_reentrant=False).x.sum().backward()
    calls = buffer.stats()["calls"]
    num_calls = [sum(calls[path] for path in calls if path.startswith(kind)) for kind in ("dispatch", "combine")]
    assert num_calls == [3, 2]  # forward, again, backward of combine; forward, backward of dispatch


def all_but_products(_context: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    is_product = operator is torch.ops.aten.mm.default
    return CheckpointPolicy.PREFER_RECOMPUTE if is_product else CheckpointPolicy.MUST_SAVE


@pytest.mark.parametrize("how", [{}, {"num_worst_tokens": 2 * T}, {"expanded": True}])
def test_selective_checkpoints_see_nothing_of_an_exchange(device: str, how: dict[str, Any]) -> None:
    """A policy that chose among its operators would have to choose alike on all ranks, and in shared memory."""
    torch.manual_seed(0)
    options = GateOptions(num_groups=2, capacity_factor=1.0, balance_loss=0.1)
    layer = MoELayer(H, INNER, E, K, buffer=deep_ep.Buffer(None, comm=OneRank()), options=options, **how)
    x, aten = torch.randn(T, H), torch.ops.aten
    policies = [[aten.mm.default], [aten.index_select.default, aten.cumsum.default, aten.sum.dim_IntList]]
    grads = []
    for policy in (None, *policies, all_but_products):
        kept = {"context_fn": partial(create_selective_checkpoint_contexts, policy)} if policy else {}
        y, loss = checkpoint(layer, x, use_reentrant=False, **kept)
        layer.zero_grad()
        (y.square().sum() + loss).backward()
        grads.append([parameter.grad for parameter in layer.parameters()])
        assert layer.gate.load.sum() == 2 * T * K * len(grads)  # as without a policy it counts again
    for other in grads[1:]:
        torch.testing.assert_close(other, grads[0])


@pytest.mark.parametrize("is_fixed", [False, True])
def test_experts_write_into_the_window(device: str, is_fixed: bool) -> None:
    buffer = deep_ep.Buffer(None, comm=OneRank())
    num_tokens = 4096  # more than a call posts beside its header
    layer = MoELayer(H, INNER, E, K, buffer=buffer, num_worst_tokens=num_tokens if is_fixed else 0)
    with torch.no_grad():
        layer(torch.ones(num_tokens, H))
    calls = buffer.stats()["calls"]
    assert {path: calls[path] for path in calls if path.startswith("combine") and calls[path]} == {"combine/pulled": 1}


# Balance and checkpoints ---------------------------------------------------------------------------------------------


def balance(rank: int, num_ranks: int) -> tuple[torch.Tensor, torch.Tensor]:
    layer = MoELayer(H, INNER, E, K, group=dist.group.WORLD)
    with torch.no_grad():
        layer(inputs(Case(), rank, torch.float32)[0].view(2, -1, H))  # any leading dimensions
    load = layer.gate.load.clone()
    layer.update_bias(speed=0.25)
    return load, layer.gate.bias.clone()


def test_the_bias_follows_all_ranks(device: str) -> None:
    loads, biases = zip(*run_ranks(balance, 2), strict=True)
    load = sum(loads).float()
    for bias in biases:
        assert torch.equal(bias, 0.25 * (load.mean() - load).sign())


def open_checkpoint(rank: int, num_ranks: int, shards: list[dict[str, torch.Tensor]], name: str) -> torch.Tensor:
    """A layer drawn from other numbers, with the state of other ranks."""
    torch.manual_seed(100 + rank)
    layers = torch.nn.ModuleList([MoELayer(H, INNER, E, K, group=dist.group.WORLD, options=CASES[name].options)])
    layers.load_state_dict(moe.take_experts(moe.merge_experts(shards), rank, num_ranks))
    with torch.no_grad():
        return torch.cat([layers[0](inputs(CASES[name], source, torch.float32)[0]).x for source in range(4)])


def test_a_checkpoint_of_four_ranks_opens_on_others(device: str, trained: Any) -> None:
    results = [result["plain", torch.float32] for result in trained(4)]
    expected, shards = torch.cat([result[0] for result in results]), [result[3] for result in results]
    for num_ranks in (1, 2):
        for output in run_ranks(open_checkpoint, num_ranks, shards, "plain"):
            assert_close("output", output, expected, LIMITS[torch.float32])
    assert error_of(moe.take_experts, moe.merge_experts(shards), 0, 3)[1].endswith("divide evenly over 3 ranks")


def test_weights_do_not_depend_on_the_number_of_ranks(device: str, trained: Any) -> None:
    alone, *many = [result["grouped, shared", torch.float32][3] for result in (*trained(1), *trained(4))]
    merged = moe.merge_experts(many)
    for name, value in alone.items():
        assert torch.equal(value, merged[name]), name
        assert "experts" in name or all(torch.equal(value, one[name]) for one in many)
    assert not torch.equal(alone["0.experts.up"][0], alone["0.experts.up"][1])
