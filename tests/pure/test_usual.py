"""What needs no check: usual arguments are recognised, and nothing else is, and nothing raises."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch

from deep_ep.buffers import usual
from deep_ep.handle import Handle

CPU, META = torch.device("cpu"), torch.device("meta")


def odd_tensors(x: torch.Tensor) -> dict[str, Any]:
    """Like `x`, but each in one way not usual."""
    return {
        "none": None,
        "a list": x.tolist(),
        "a parameter": torch.nn.Parameter(x.float(), requires_grad=False),
        "elsewhere": x.to(META),
        "sparse": x.to_sparse(),
        "nested": torch.nested.nested_tensor([x, x]),
        "one row": x[:1],
        "one column": x[:, :1].contiguous(),
        "no rows": x[:0],
        "three dimensions": x[None],
        "complex": torch.complex(x.float(), x.float()),
    }


def test_payloads() -> None:
    x, scales = torch.randn(4, 6).bfloat16(), torch.rand(3, 4).t()
    assert usual.payload(x, CPU) is not None
    both = usual.payload((x, scales), CPU)
    assert both is not None
    assert both.x is x
    assert both.scales is scales, "of any strides"
    assert usual.payload(x.t(), CPU) is None
    assert usual.payload((x, scales[:3]), CPU) is None
    assert usual.payload((x,), CPU) is None
    assert usual.payload(x, META) is None
    negative = torch.complex(torch.ones(4, 6), torch.ones(4, 6)).conj().imag
    assert negative.is_neg()
    assert not usual.is_matrix(negative, CPU)
    leaf = torch.randn(4, 6, requires_grad=True)
    assert usual.payload(leaf, CPU) is None
    with torch.no_grad():  # as inside of an autograd function, whose caller takes care of gradients
        assert usual.payload(leaf, CPU) is not None
    for name, odd in odd_tensors(x.float()).items():
        assert usual.payload(odd, CPU) is None, name
        assert usual.payload((x, odd), CPU) is None, name
        assert usual.payload((odd, scales), CPU) is None, name
    seen: list[Any] = []
    torch.vmap(lambda row: (seen.append(usual.payload(row, CPU)), row)[1])(torch.randn(2, 4, 6))
    assert seen == [None]


def routing_of(**changes: Any) -> Any:
    given = {
        "per_rank": torch.zeros(2, dtype=torch.int32),
        "mask": torch.zeros(4, 2, dtype=torch.bool),
        "per_expert": torch.zeros(6, dtype=torch.int32),
        "topk_idx": torch.zeros(4, 3, dtype=torch.int64),
        "topk_weights": torch.zeros(4, 3),
        "known": None,
        "known_ids": None,
    } | changes
    return usual.routing(4, 2, CPU, *given.values())


def test_routings() -> None:
    assert routing_of() is not None
    assert routing_of(topk_idx=torch.zeros(4, 3, dtype=torch.int32)) is not None
    wrong = {
        "per_rank": [torch.zeros(3, dtype=torch.int32), torch.zeros(2)],
        "mask": [torch.zeros(4, 3, dtype=torch.bool), torch.zeros(3, 2, dtype=torch.bool), torch.zeros(4, 2)],
        "per_expert": [torch.zeros(7, dtype=torch.int32), torch.zeros(6), torch.zeros(3, 2, dtype=torch.int32)],
        "topk_idx": [torch.zeros(4, 2, dtype=torch.int64), torch.zeros(4, 3), torch.zeros(5, 3, dtype=torch.int64)],
        "topk_weights": [torch.zeros(4, 2), torch.zeros(4, 3, dtype=torch.float64), torch.zeros(3, 4).t()],
    }
    for name, tensors in wrong.items():
        for odd in [*tensors, None, tensors[0].to(META)]:
            assert routing_of(**{name: odd}) is None, (name, odd)


def test_known_ids_are_only_looked_at_for_their_shape() -> None:
    ids, square = torch.zeros(4, 3, dtype=torch.int64), torch.zeros(4, 4, dtype=torch.int64)
    made = routing_of()
    layout = {
        "per_rank": made.num_tokens_per_rank,
        "mask": made.is_token_in_rank,
        "per_expert": made.num_tokens_per_expert,
    }
    layout["known"] = tuple(map(ref, layout.values()))
    assert routing_of(**layout, topk_idx=ids, known_ids=ref(ids)).has_known_ids
    assert not routing_of(**layout, topk_idx=ids).has_known_ids
    assert not routing_of(**layout, topk_idx=ids.clone(), known_ids=ref(ids)).has_known_ids
    for name in ("per_rank", "mask", "per_expert"):
        others = layout | {name: layout[name].clone()}
        assert not routing_of(**others, topk_idx=ids, known_ids=ref(ids)).has_known_ids, name
    assert routing_of(topk_idx=None, known_ids=ref(torch.zeros(1))) is None, "of a tensor that is gone"
    assert routing_of(topk_idx=square.t_(), topk_weights=torch.zeros(4, 4), known_ids=ref(square)) is None
    more = torch.zeros(5, 3, dtype=torch.int64)
    assert routing_of(topk_idx=more, known_ids=ref(more)) is None


def test_a_known_layout_is_not_looked_at_again_and_a_dead_one_is_none() -> None:
    mask, per_rank = torch.zeros(4, 2, dtype=torch.bool), torch.zeros(2, dtype=torch.int32)
    per_expert = torch.zeros(6, dtype=torch.int32)
    known = (ref(per_rank), ref(mask), ref(per_expert))
    layout = {"per_rank": per_rank, "mask": mask, "per_expert": per_expert}
    assert routing_of(**layout, known=known) is not None
    assert routing_of(**layout, known=known, topk_weights=torch.zeros(4, 2)) is None
    assert routing_of(**layout | {"mask": torch.zeros(4, 3, dtype=torch.bool)}, known=known) is None
    del mask, per_rank, per_expert, layout
    assert known[0]() is None
    assert routing_of(per_rank=None, mask=None, per_expert=None, known=known) is None


def make_handle(change: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> Handle:
    channels, mask = torch.zeros(2, 5, dtype=torch.int32), torch.zeros(4, 2, dtype=torch.bool)
    numbers = (torch.zeros(size, dtype=torch.int32) for size in ((2, 2), (7,), (4, 2)))
    prefix, source_idx, send_head = map(change, numbers)
    return Handle(prefix, channels, channels, source_idx, mask, send_head)


def test_handles() -> None:
    ours = make_handle()
    assert usual.handle(ours, 2, CPU) is ours
    assert usual.handle(tuple(ours), 2, CPU) is None, "whoever made it"
    assert usual.handle(ours, 3, CPU) is None
    assert usual.handle(ours, 2, META) is None
    for change in (torch.Tensor.long, lambda tensor: tensor.to(META), lambda tensor: tensor[:1]):
        assert usual.handle(make_handle(change), 2, CPU) is None, "as `tree_map` makes one"


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids(dtype: torch.dtype) -> None:
    ids = torch.zeros(4, 3, dtype=dtype)
    assert usual.is_ids(ids, CPU)
    assert not usual.is_ids(ids.t(), CPU)
    for name, odd in odd_tensors(ids).items():
        assert not usual.is_ids(odd, CPU), name
