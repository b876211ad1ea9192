"""Every wrong argument of `Buffer`: which exception, what it names, and that nothing was sent because of it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import OneRank, layout_of, run_ranks
from deep_ep import Buffer, Config, EPClosed, EPError, EPUnsupported, EventHandle, EventOverlap, reference

pytestmark = pytest.mark.usefixtures("device")

NUM_TOKENS, HIDDEN, NUM_TOPK, EXPERTS_PER_RANK = 6, 8, 2, 2
WRONG_TYPE = (TypeError, ValueError)  # where the type is right and its structure is not, either fits


@dataclass
class Kit:
    """A buffer, right arguments for its calls, and what they must return."""

    buffer: Buffer
    rank: int = 0
    num_ranks: int = 1
    xs: list[torch.Tensor] = field(default_factory=list)
    ids: list[torch.Tensor] = field(default_factory=list)
    weights: list[torch.Tensor] = field(default_factory=list)
    handle: tuple[torch.Tensor, ...] = ()
    num_rows: int = 0

    @property
    def num_experts(self) -> int:
        return self.num_ranks * EXPERTS_PER_RANK

    def layout_arguments(self) -> dict[str, Any]:
        return {"topk_idx": self.ids[self.rank], "num_experts": self.num_experts}

    def dispatch_arguments(self) -> dict[str, Any]:
        return {
            "x": self.xs[self.rank],
            **layout_of(self.buffer, **self.layout_arguments()),
            "topk_idx": self.ids[self.rank],
            "topk_weights": self.weights[self.rank],
        }

    def cached_arguments(self) -> dict[str, Any]:
        return {"x": self.xs[self.rank], "handle": self.handle}

    def combine_arguments(self) -> dict[str, Any]:
        rows = torch.ones(self.num_rows, HIDDEN)
        return {"x": rows, "handle": self.handle, "topk_weights": torch.ones(self.num_rows, NUM_TOPK)}

    def combine_buffer_arguments(self) -> dict[str, Any]:
        return {"handle": self.handle, "hidden": HIDDEN, "dtype": torch.float32}

    def local_buffer_arguments(self) -> dict[str, Any]:
        return {"dtype": torch.int32}


def make_kit(buffer: Buffer) -> Kit:
    kit = Kit(buffer, buffer.rank, buffer.group_size)
    for rank in range(kit.num_ranks):
        random = torch.Generator().manual_seed(rank)
        kit.xs.append(torch.randn(NUM_TOKENS + rank, HIDDEN, generator=random))
        shape = (NUM_TOKENS + rank, NUM_TOPK)
        kit.ids.append(torch.randint(-1, kit.num_experts, shape, generator=random))
        kit.weights.append(torch.rand(shape, generator=random))
    round_trip(kit)
    return kit


def round_trip(kit: Kit) -> None:
    """Dispatch and combine with right arguments, and compare all that comes with the oracle."""
    masks = [reference.layout(ids, kit.num_experts, kit.num_ranks).is_token_in_rank for ids in kit.ids]
    expected = reference.dispatch(kit.xs, masks, None, kit.ids, kit.weights, kit.num_experts)
    recv_x, recv_idx, recv_weights, _, handle, event = kit.buffer.dispatch(**kit.dispatch_arguments())
    mine = expected[kit.rank]
    assert torch.equal(recv_x, mine.recv_x)
    assert torch.equal(recv_idx, mine.recv_topk_idx)
    assert torch.equal(recv_weights, mine.recv_topk_weights)
    assert handle[3].tolist() == mine.src_token
    assert event.event is None
    combined, combined_weights, _ = kit.buffer.combine(recv_x, handle, topk_weights=recv_weights)
    sums = reference.combine(
        [part.recv_x for part in expected], masks, topk_weights=[part.recv_topk_weights for part in expected]
    )[kit.rank]
    assert torch.equal(combined, sums.combined_x)
    assert torch.equal(combined_weights, sums.combined_topk_weights)
    kit.handle, kit.num_rows = handle, recv_x.size(0)


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor, device="meta")


def strided(tensor: torch.Tensor) -> torch.Tensor:
    """The same values with a gap behind every element."""
    return torch.stack([tensor, tensor], dim=-1)[..., 0]


def with_item(handle: tuple[torch.Tensor, ...], index: int, item: Any) -> tuple:
    return (*handle[:index], item, *handle[index + 1 :])


@dataclass(frozen=True)
class Bad:
    """One wrong call: the right arguments with a change."""

    name: str
    error: type[BaseException] | tuple[type[BaseException], ...]
    names: str
    change: dict[str, Any] | Callable[[Kit], dict[str, Any]]
    least_ranks: int = 1
    needs_host: bool = False  # found by looking into tensors, which on a GPU the host does not wait for

    def arguments(self, kit: Kit, right: dict[str, Any]) -> dict[str, Any]:
        return right | (self.change if isinstance(self.change, dict) else self.change(kit))


def bad_tensor(name: str, make: Callable[[Kit], torch.Tensor], *dtypes: torch.dtype, least_ranks: int = 1) -> list[Bad]:
    """What can be wrong with a contiguous argument. A vector of one element cannot be strided: then `least_ranks`."""
    quoted = f"`{name}`"
    hint = f"`{name}.contiguous()`"
    cases = [
        Bad(f"{name} is a dict", TypeError, quoted, lambda kit: {name: {"tensor": make(kit)}}),
        Bad(f"{name} is a number", TypeError, quoted, {name: 3}),
        Bad(f"{name} has a dimension more", ValueError, quoted, lambda kit: {name: make(kit).unsqueeze(0)}),
        Bad(f"{name} has a dimension less", ValueError, quoted, lambda kit: {name: make(kit)[0].clone()}),
        Bad(f"{name} is strided", ValueError, hint, lambda kit: {name: strided(make(kit))}, least_ranks),
        Bad(f"{name} is elsewhere", ValueError, quoted, lambda kit: {name: on_meta(make(kit))}),
    ]
    for dtype in dtypes:
        change = partial(lambda dtype, kit: {name: make(kit).to(dtype)}, dtype)
        cases.append(Bad(f"{name} is {dtype}", ValueError, quoted, change))
    return cases


def bad_rows(name: str, make: Callable[[Kit], torch.Tensor], names: str | None = None) -> list[Bad]:
    names = f"`{names or name}`"
    return [
        Bad(f"{name} lacks a row", ValueError, names, lambda kit: {name: make(kit)[1:].contiguous()}),
        Bad(f"{name} has a row more", ValueError, names, lambda kit: {name: torch.cat([make(kit), make(kit)[:1]])}),
    ]


def bad_integer(name: str, too_small: int, *others: Any) -> list[Bad]:
    cases = [Bad(f"{name}={too_small}", ValueError, name, {name: too_small})]
    for value in ("8", 8.0, True, *others):
        cases.append(Bad(f"{name}={value!r}", TypeError, name, {name: value}))
    return cases


BAD_EVENTS = [
    Bad("previous_event is no event", TypeError, "previous_event", {"previous_event": "event"}),
    Bad(
        "allocate_on_comm_stream alone",
        AssertionError,
        "allocate_on_comm_stream",
        {"allocate_on_comm_stream": True},
    ),
    Bad(
        "allocate_on_comm_stream without async_finish",
        AssertionError,
        "allocate_on_comm_stream",
        {"allocate_on_comm_stream": True, "previous_event": Buffer.capture()},
    ),
    Bad(
        "allocate_on_comm_stream without an event",
        AssertionError,
        "allocate_on_comm_stream",
        {"allocate_on_comm_stream": True, "async_finish": True},
    ),
    Bad(
        "allocate_on_comm_stream with an empty event",
        AssertionError,
        "allocate_on_comm_stream",
        {"allocate_on_comm_stream": True, "async_finish": True, "previous_event": EventOverlap(None)},
    ),
]

UNKNOWN = Bad("an unknown keyword", TypeError, "num_tokens", {"num_tokens": 3})
BAD_CONFIG = Bad("config is a dict", TypeError, "config", {"config": {"num_sms": 20}})


def my_x(kit: Kit) -> torch.Tensor:
    return kit.xs[kit.rank]


def my_ids(kit: Kit) -> torch.Tensor:
    return kit.ids[kit.rank]


def my_weights(kit: Kit) -> torch.Tensor:
    return kit.weights[kit.rank]


def my_mask(kit: Kit) -> torch.Tensor:
    return kit.handle[4]


def per_rank(kit: Kit) -> torch.Tensor:
    return my_mask(kit).sum(0, dtype=torch.int32)


def per_expert(kit: Kit) -> torch.Tensor:
    return reference.layout(my_ids(kit), kit.num_experts, kit.num_ranks).num_tokens_per_expert


BAD_LAYOUTS = [
    *bad_tensor("topk_idx", my_ids, torch.float32, torch.int16, torch.bool),
    Bad("topk_idx is missing", TypeError, "topk_idx", {"topk_idx": None}),
    *bad_integer("num_experts", 0, None),
    Bad("num_experts=-4", ValueError, "num_experts", {"num_experts": -4}),
    Bad("too many experts", ValueError, "16384", {"num_experts": 16386}),
    Bad("experts do not divide", ValueError, "experts", lambda kit: {"num_experts": kit.num_experts + 1}, 2),
    *BAD_EVENTS,
    UNKNOWN,
]

BAD_DISPATCHES = [
    *bad_tensor("x", my_x),
    Bad("x is transposed", ValueError, "`x.contiguous()`", lambda kit: {"x": my_x(kit).t().contiguous().t()}),
    *bad_rows("x", my_x, names="is_token_in_rank"),  # of two that disagree, the later one is named
    Bad("x is missing", TypeError, "`x`", {"x": None}),
    Bad("x has no columns", ValueError, "`x`", lambda kit: {"x": my_x(kit)[:, :0].contiguous()}),
    Bad("x is a tuple of one", WRONG_TYPE, "`x`", lambda kit: {"x": (my_x(kit),)}),
    Bad("x is a tuple of three", WRONG_TYPE, "`x`", lambda kit: {"x": (my_x(kit),) * 3}),
    Bad("x beside scales is missing", TypeError, "`x`", lambda kit: {"x": (None, my_x(kit))}),
    Bad("scales are a list", TypeError, "scales", lambda kit: {"x": (my_x(kit), [1.0])}),
    Bad("scales are a vector", ValueError, "scales", lambda kit: {"x": (my_x(kit), my_x(kit)[:, 0].clone())}),
    Bad("scales lack a row", ValueError, "scales", lambda kit: {"x": (my_x(kit), my_x(kit)[1:])}),
    Bad("scales have no columns", ValueError, "scales", lambda kit: {"x": (my_x(kit), my_x(kit)[:, :0])}),
    Bad("scales are elsewhere", ValueError, "scales", lambda kit: {"x": (my_x(kit), on_meta(my_x(kit)))}),
    *[
        Bad(f"{name} is missing", ValueError, name, {name: None})
        for name in ("num_tokens_per_rank", "is_token_in_rank", "num_tokens_per_expert")
    ],
    *bad_tensor("num_tokens_per_rank", per_rank, torch.int64, torch.float32, least_ranks=2),
    *bad_rows("num_tokens_per_rank", per_rank),
    Bad(
        "num_tokens_per_rank counts a token more",
        ValueError,
        "num_tokens_per_rank",
        lambda kit: {"num_tokens_per_rank": per_rank(kit) + 1},
    ),
    Bad(
        "num_tokens_per_rank is negative",
        ValueError,
        "num_tokens_per_rank",
        lambda kit: {"num_tokens_per_rank": -per_rank(kit)},
    ),
    Bad(
        "is_token_in_rank has a token less than the counts",
        ValueError,
        "is_token_in_rank",
        lambda kit: {"is_token_in_rank": my_mask(kit) & False},
    ),
    Bad(
        "worst case with counts of another mask",
        ValueError,
        "num_tokens_per_rank",
        lambda kit: {"num_tokens_per_rank": per_rank(kit) + 1, "num_worst_tokens": 100},
        needs_host=True,
    ),
    *bad_tensor("is_token_in_rank", my_mask, torch.uint8, torch.int32),
    *bad_rows("is_token_in_rank", my_mask),
    Bad(
        "is_token_in_rank has a rank more",
        ValueError,
        "is_token_in_rank",
        lambda kit: {"is_token_in_rank": torch.cat([my_mask(kit), my_mask(kit)[:, :1]], dim=1)},
    ),
    *bad_tensor("num_tokens_per_expert", per_expert, torch.int64, torch.float32),
    Bad(
        "num_tokens_per_expert is empty",
        ValueError,
        "num_tokens_per_expert",
        lambda kit: {"num_tokens_per_expert": per_expert(kit)[:0]},
    ),
    Bad(
        "num_tokens_per_expert does not divide",
        ValueError,
        "expert",
        lambda kit: {"num_tokens_per_expert": per_expert(kit)[1:].clone()},
        2,
    ),
    Bad(
        "num_tokens_per_expert is too long",
        ValueError,
        "16384",
        lambda kit: {"num_tokens_per_expert": per_expert(kit).new_zeros(16386)},
    ),
    Bad("ids without weights", ValueError, "topk_weights", {"topk_weights": None}),
    Bad("weights without ids", ValueError, "topk_idx", {"topk_idx": None}),
    *bad_tensor("topk_idx", my_ids, torch.float32, torch.int16),
    *bad_rows("topk_idx", my_ids),
    *bad_tensor("topk_weights", my_weights, torch.float64, torch.bfloat16, torch.int32),
    *bad_rows("topk_weights", my_weights),
    Bad(
        "topk_weights has a column more",
        ValueError,
        "topk_weights",
        lambda kit: {"topk_weights": torch.cat([my_weights(kit)] * 2, dim=1)},
    ),
    *bad_integer("expert_alignment", 0, None),
    Bad("expert_alignment=-128", ValueError, "expert_alignment", {"expert_alignment": -128}),
    *bad_integer("num_worst_tokens", -1, None, torch.tensor(8.5)),
    Bad(
        "num_worst_tokens without top-k",
        ValueError,
        "num_worst_tokens",
        {"num_worst_tokens": 100, "topk_idx": None, "topk_weights": None},
    ),
    BAD_CONFIG,
    *BAD_EVENTS,
    UNKNOWN,
]


def bad_item(index: int, name: str, dtype: torch.dtype) -> list[Bad]:
    """What can be wrong with one tensor of a handle."""

    def change(what: str, make: Callable[[torch.Tensor], torch.Tensor]) -> Bad:
        return Bad(
            f"handle's {name} {what}",
            ValueError,
            "handle",
            lambda kit: {"handle": with_item(kit.handle, index, make(kit.handle[index]))},
        )

    return [
        change(f"is {dtype}", lambda item: item.to(dtype)),
        change("has a dimension more", lambda item: item.unsqueeze(0)),
        change("has no dimension", lambda item: torch.zeros((), dtype=item.dtype)),
        change("is elsewhere", on_meta),
    ]


BAD_HANDLES = [
    Bad("handle is a text", TypeError, "handle", {"handle": "handle"}),
    Bad("handle is a tensor", TypeError, "handle", lambda kit: {"handle": kit.handle[0]}),
    Bad("handle holds a list", TypeError, "handle", lambda kit: {"handle": with_item(kit.handle, 3, [0, 1])}),
    Bad("handle holds None", TypeError, "handle", lambda kit: {"handle": with_item(kit.handle, 3, None)}),
    Bad("handle is empty", ValueError, "handle", {"handle": ()}),
    Bad("handle lacks an item", ValueError, "handle", lambda kit: {"handle": kit.handle[:5]}),
    Bad("handle has an item more", ValueError, "handle", lambda kit: {"handle": (*kit.handle, kit.handle[0])}),
    Bad("handle is of several nodes", ValueError, "handle", lambda kit: {"handle": kit.handle[:1] * 10}),
    *bad_item(0, "rank_prefix_matrix", torch.int64),
    Bad(
        "handle's rank_prefix_matrix is of another group",
        ValueError,
        "handle",
        lambda kit: {
            "handle": with_item(kit.handle, 0, torch.zeros(kit.num_ranks + 1, kit.num_ranks + 1, dtype=torch.int32))
        },
    ),
    *bad_item(3, "recv_src_idx", torch.int64),
    *bad_item(4, "is_token_in_rank", torch.uint8),
    Bad(
        "handle's is_token_in_rank lacks a token",
        ValueError,
        "handle",
        lambda kit: {"handle": with_item(kit.handle, 4, kit.handle[4][1:])},
    ),
    Bad(
        "handle's is_token_in_rank has a rank more",
        ValueError,
        "handle",
        lambda kit: {"handle": with_item(kit.handle, 4, torch.cat([kit.handle[4], kit.handle[4][:, :1]], dim=1))},
    ),
    *bad_item(5, "send_head", torch.int64),
    Bad(
        "handle's send_head lacks a token",
        ValueError,
        "handle",
        lambda kit: {"handle": with_item(kit.handle, 5, kit.handle[5][1:])},
    ),
]


def short_of_a_row(kit: Kit) -> tuple[torch.Tensor, ...]:
    """A handle that counts one row more than it lists."""
    return with_item(kit.handle, 3, kit.handle[3][1:].clone())


BAD_CACHED = [
    *bad_tensor("x", my_x),
    *bad_rows("x", my_x),
    Bad("scales lack a row", ValueError, "scales", lambda kit: {"x": (my_x(kit), my_x(kit)[1:])}),
    *[
        Bad(f"{'+'.join(given)} with a handle", AssertionError, "handle", given)
        for given in (
            {"topk_idx": torch.zeros(NUM_TOKENS, NUM_TOPK, dtype=torch.int64)},
            {"topk_weights": torch.zeros(NUM_TOKENS, NUM_TOPK)},
            {
                "topk_idx": torch.zeros(NUM_TOKENS, NUM_TOPK, dtype=torch.int64),
                "topk_weights": torch.zeros(NUM_TOKENS, NUM_TOPK),
            },
        )
    ],
    *BAD_HANDLES,
    Bad(
        "handle has fewer rows than it counts",
        ValueError,
        "handle",
        lambda kit: {"handle": short_of_a_row(kit)},
        needs_host=True,
    ),
    BAD_CONFIG,
    *BAD_EVENTS,
    UNKNOWN,
]


def rows_of(kit: Kit) -> torch.Tensor:
    return torch.ones(kit.num_rows, HIDDEN)


def weights_of(kit: Kit) -> torch.Tensor:
    return torch.ones(kit.num_rows, NUM_TOPK)


def bias_of(kit: Kit) -> torch.Tensor:
    return torch.ones_like(my_x(kit))


BAD_COMBINES = [
    *bad_tensor("x", rows_of, torch.int32, torch.float8_e4m3fn, torch.complex64, torch.bool),
    *bad_rows("x", rows_of),
    Bad("x is missing", TypeError, "`x`", {"x": None}),
    Bad("x is a pair", TypeError, "`x`", lambda kit: {"x": (rows_of(kit), rows_of(kit))}),
    Bad("handle is missing", TypeError, "handle", {"handle": None}),
    *BAD_HANDLES,
    Bad(
        "handle has fewer rows than it counts",
        ValueError,
        "handle",
        lambda kit: {"handle": short_of_a_row(kit), "x": rows_of(kit)[1:], "topk_weights": None},
        needs_host=True,
    ),
    *bad_tensor("topk_weights", weights_of, torch.float64, torch.bfloat16, torch.int64),
    *bad_rows("topk_weights", weights_of),
    *bad_tensor("bias", bias_of, torch.bfloat16, torch.float64),
    *bad_rows("bias", bias_of),
    Bad(
        "bias has a column more",
        ValueError,
        "bias",
        lambda kit: {"bias": torch.ones(my_x(kit).size(0), HIDDEN + 1)},
    ),
    Bad("bias is a text", TypeError, "bias", {"bias": "bias"}),
    Bad("no biases", ValueError, "bias", {"bias": ()}),
    Bad("one bias in a tuple", ValueError, "bias", lambda kit: {"bias": (bias_of(kit),)}),
    Bad("three biases", ValueError, "bias", lambda kit: {"bias": (bias_of(kit),) * 3}),
    Bad("second bias lacks a row", ValueError, "bias", lambda kit: {"bias": (None, bias_of(kit)[1:])}),
    Bad("second bias is BF16", ValueError, "bias", lambda kit: {"bias": (bias_of(kit), bias_of(kit).bfloat16())}),
    Bad("second bias is a number", TypeError, "bias", lambda kit: {"bias": (bias_of(kit), 1.0)}),
    BAD_CONFIG,
    *BAD_EVENTS,
    UNKNOWN,
]

BAD_COMBINE_BUFFERS = [
    Bad("handle is missing", TypeError, "handle", {"handle": None}),
    *BAD_HANDLES,
    *bad_integer("hidden", 0),
    Bad("hidden=-8", ValueError, "hidden", {"hidden": -8}),
    Bad("dtype is int8", ValueError, "dtype", {"dtype": torch.int8}),
    Bad("dtype is FP8", ValueError, "dtype", {"dtype": torch.float8_e4m3fn}),
    Bad("dtype is a text", WRONG_TYPE, "dtype", {"dtype": "float32"}),
    UNKNOWN,
]

# The buffer of `solo` has 1024 bytes, 256 elements of int32.
BAD_LOCAL_BUFFERS = [
    Bad("dtype is a text", TypeError, "dtype", {"dtype": "int32"}),
    Bad("dtype is missing", TypeError, "dtype", {"dtype": None}),
    Bad("size is too large", ValueError, "size", {"size": torch.Size([257])}),
    Bad("size is too large in two dimensions", ValueError, "size", {"size": torch.Size([2, 129])}),
    Bad("size is of the other buffer", ValueError, "size", {"size": (129,), "use_rdma_buffer": True}),
    Bad("size is negative", ValueError, "size", {"size": (-1,)}),
    Bad("size is negative twice", ValueError, "size", {"size": (-2, -3)}),
    Bad("size is a text", TypeError, "size", {"size": "large"}),
    *bad_integer("offset", -4, None),
    Bad("offset is beyond the end", ValueError, "offset", {"offset": 1028}),
    Bad("offset is not aligned", ValueError, "offset", {"offset": 2}),
    UNKNOWN,
]

METHODS: dict[str, tuple[str, Callable[[Kit], dict[str, Any]], list[Bad]]] = {
    "layout": ("get_dispatch_layout", Kit.layout_arguments, BAD_LAYOUTS),
    "dispatch": ("dispatch", Kit.dispatch_arguments, BAD_DISPATCHES),
    "cached dispatch": ("dispatch", Kit.cached_arguments, BAD_CACHED),
    "combine": ("combine", Kit.combine_arguments, BAD_COMBINES),
    "combine buffer": ("get_combine_buffer", Kit.combine_buffer_arguments, BAD_COMBINE_BUFFERS),
    "local buffer": ("get_local_buffer_tensor", Kit.local_buffer_arguments, BAD_LOCAL_BUFFERS),
}
COMMUNICATING = [name for name in METHODS if name != "local buffer"]


def check_rejected(call: Callable[..., Any], arguments: dict[str, Any], bad: Bad, where: str) -> None:
    """The call raises what it should, and says where and what."""
    try:
        call(**arguments)
    except bad.error as error:
        message = str(error)
    except BaseException as error:
        raise AssertionError(f"{bad.name}: expected {bad.error}, got {type(error).__name__}: {error}") from error
    else:
        raise AssertionError(f"{bad.name}: expected {bad.error}, but the call returned")
    assert bad.names in message, f"{bad.name}: {bad.names!r} is not in {message!r}"
    assert where in message, f"{bad.name}: {where!r} is not in {message!r}"


@pytest.fixture
def solo() -> Kit:
    return make_kit(Buffer(None, 1024, 512, low_latency_mode=True, comm=OneRank()))


@pytest.mark.parametrize(
    ("method", "bad"),
    [
        pytest.param(method, bad, id=f"{method}: {bad.name}", marks=[pytest.mark.cpu_only] if bad.needs_host else [])
        for method, (_, _, bads) in METHODS.items()
        for bad in bads
        if bad.least_ranks == 1
    ],
)
def test_a_wrong_argument_is_named_and_the_buffer_goes_on(solo: Kit, method: str, bad: Bad):
    name, right_arguments, _ = METHODS[method]
    arguments = bad.arguments(solo, right_arguments(solo))
    check_rejected(getattr(solo.buffer, name), arguments, bad, name)
    round_trip(solo)


@pytest.mark.parametrize("method", METHODS)
def test_the_arguments_that_the_tables_change_are_right(solo: Kit, method: str):
    name, right_arguments, _ = METHODS[method]
    getattr(solo.buffer, name)(**right_arguments(solo))


def wrong_calls(rank: int, num_ranks: int, method: str) -> int:
    """All ranks make the same wrong calls, not all at the same time; then all make the right ones."""
    kit = make_kit(Buffer(dist.group.WORLD, 1024, num_cpu_timeout_secs=10))
    name, right_arguments, bads = METHODS[method]
    bads = [bad for bad in bads if not bad.needs_host or kit.buffer.device.type == "cpu"]
    for bad in bads:
        arguments = bad.arguments(kit, right_arguments(kit))
        check_rejected(getattr(kit.buffer, name), arguments, bad, name)
        round_trip(kit)
    return len(bads)


@pytest.mark.parametrize("method", COMMUNICATING)
def test_a_wrong_call_sends_nothing(method: str):
    counts = run_ranks(wrong_calls, 2, method, limit_secs=60)
    assert min(counts) >= len([bad for bad in METHODS[method][2] if not bad.needs_host])


# Construction --------------------------------------------------------------------------------------------------------

BAD_BYTES = [
    *[(name, value, ValueError) for name in ("num_nvl_bytes", "num_rdma_bytes") for value in (-128, 1, 100, 1000)],
    *[
        (name, value, TypeError)
        for name in ("num_nvl_bytes", "num_rdma_bytes")
        for value in (None, "128", 128.0, True, [])
    ],
]


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        *BAD_BYTES,
        ("group", "group", TypeError),
        ("comm", "comm", TypeError),
        ("num_cpu_timeout_secs", 0, ValueError),
        ("num_cpu_timeout_secs", -1.0, ValueError),
        ("num_cpu_timeout_secs", float("nan"), ValueError),
        ("num_cpu_timeout_secs", "soon", WRONG_TYPE),
        ("num_cpu_timeout_secs", [], TypeError),
        ("num_gpu_timeout_secs", 0, ValueError),
        ("num_gpu_timeout_secs", -1.0, ValueError),
        ("device", "nonsense", ValueError),
        ("device", 3.5, TypeError),
        ("num_bytes", 128, TypeError),  # no such argument
    ],
)
def test_construction_names_the_wrong_argument(name: str, value: Any, error: type[Exception]):
    with pytest.raises(error) as caught:
        Buffer(**{"group": None, "comm": OneRank(), name: value})
    assert name in str(caught.value)


def test_construction_needs_a_group_or_a_communicator():
    with pytest.raises(ValueError, match=r"group.*comm"):
        Buffer(None)


def test_construction_takes_use_fabric_by_keyword_only():
    Buffer(None, 0, 0, False, 24, True, False, False, False, OneRank(), use_fabric=True)
    with pytest.raises(TypeError):
        Buffer(None, 0, 0, False, 24, True, False, False, False, OneRank(), True)


def test_a_device_without_a_transport_is_the_worlds_fault():
    with pytest.raises(EPUnsupported, match="device meta"):
        Buffer(None, comm=OneRank(), device="meta")


# Static methods ------------------------------------------------------------------------------------------------------


@pytest.fixture
def default_num_sms(monkeypatch: pytest.MonkeyPatch) -> int:
    for name in ("num_sms", "_is_bounded"):
        monkeypatch.setattr(Buffer, name, getattr(Buffer, name))  # put back at the end
    return Buffer.num_sms


@pytest.mark.parametrize(
    ("value", "error"),
    [
        (21, AssertionError),
        (-3, AssertionError),
        (-2, ValueError),
        ("20", TypeError),
        (20.0, TypeError),
        (None, TypeError),
    ],
)
def test_set_num_sms_refuses(default_num_sms: int, value: Any, error: type[BaseException]):
    with pytest.raises(error, match="num_sms"):
        Buffer.set_num_sms(value)
    assert Buffer.num_sms == default_num_sms


def test_set_num_sms_takes_an_even_number(default_num_sms: int):
    Buffer.set_num_sms(default_num_sms + 4)
    assert Buffer.get_dispatch_config(2) == Config(default_num_sms + 4, 24, 256, 6, 128)
    assert Buffer.get_combine_config(2) == Config(default_num_sms + 4, 10, 256, 6, 128)


@pytest.mark.parametrize("method", [Buffer.get_dispatch_config, Buffer.get_combine_config])
@pytest.mark.parametrize(
    ("num_ranks", "error"), [(0, ValueError), (-8, ValueError), ("8", TypeError), (8.0, TypeError), (None, TypeError)]
)
def test_configs_name_the_wrong_number_of_ranks(method: Callable, num_ranks: Any, error: type[Exception]):
    with pytest.raises(error, match="num_ranks"):
        method(num_ranks)


@pytest.mark.parametrize(
    ("name", "value", "error"),
    [
        ("num_max_dispatch_tokens_per_rank", -1, ValueError),
        ("num_max_dispatch_tokens_per_rank", "128", TypeError),
        ("hidden", -1, ValueError),
        ("num_ranks", 0, ValueError),
    ],
)
def test_the_low_latency_size_hint_names_the_wrong_argument(name: str, value: Any, error: type[Exception]):
    arguments = {"num_max_dispatch_tokens_per_rank": 128, "hidden": 7168, "num_ranks": 8, "num_experts": 256}
    with pytest.raises(error, match=name):
        Buffer.get_low_latency_rdma_size_hint(**(arguments | {name: value}))


@pytest.mark.parametrize("bias", [(), (None,), (None, None, None)])
def test_unpack_bias_takes_one_or_two(bias: tuple):
    with pytest.raises(ValueError, match="bias"):
        Buffer._unpack_bias(bias)


# Order of calls, destroy ---------------------------------------------------------------------------------------------


def test_get_combine_buffer_needs_hidden_before_the_first_dispatch(solo: Kit):
    fresh = Buffer(None, comm=OneRank())
    with pytest.raises(ValueError, match="hidden"):
        fresh.get_combine_buffer(solo.handle)
    assert fresh.get_combine_buffer(solo.handle, 16, torch.float16).shape == (solo.num_rows, 16)


@pytest.mark.cpu_only
def test_too_few_worst_tokens_name_both_numbers_and_write_nothing(solo: Kit):
    with pytest.raises(EPError, match=rf"{solo.num_rows} rows.*num_worst_tokens=2"):
        solo.buffer.dispatch(**solo.dispatch_arguments(), num_worst_tokens=2)
    round_trip(solo)


def test_an_event_that_is_empty_counts_as_not_given(solo: Kit):
    expected = solo.buffer.dispatch(**solo.dispatch_arguments())[0]
    for event in (None, EventOverlap(None), EventOverlap(EventHandle()), EventHandle()):
        assert torch.equal(solo.buffer.dispatch(**solo.dispatch_arguments(), previous_event=event)[0], expected)


def test_a_top_k_of_no_columns_works_or_is_refused(solo: Kit):
    arguments = solo.dispatch_arguments()
    arguments |= {name: arguments[name][:, :0].contiguous() for name in ("topk_idx", "topk_weights")}
    with contextlib.suppress(ValueError):
        assert solo.buffer.dispatch(**arguments)[1].shape == (solo.num_rows, 0)
    round_trip(solo)


def test_destroy_needs_the_option(solo: Kit):
    with pytest.raises(AssertionError, match="explicitly_destroy"):
        solo.buffer.destroy()
    round_trip(solo)


@pytest.mark.parametrize("method", METHODS)
def test_a_destroyed_buffer_refuses_every_call(method: str):
    kit = make_kit(Buffer(None, 1024, comm=OneRank(), explicitly_destroy=True))
    name, right_arguments, _ = METHODS[method]
    arguments = right_arguments(kit)
    kit.buffer.destroy()
    with pytest.raises(EPClosed, match=name):
        getattr(kit.buffer, name)(**arguments)


def test_destroy_twice_does_nothing_and_received_tensors_stay():
    kit = make_kit(Buffer(None, 1024, comm=OneRank(), explicitly_destroy=True))
    recv_x = kit.buffer.dispatch(**kit.dispatch_arguments())[0]
    expected = recv_x.clone()
    kit.buffer.destroy()
    kit.buffer.destroy()
    assert kit.buffer.runtime is None
    assert torch.equal(recv_x, expected)
