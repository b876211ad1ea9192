"""Messages name what the caller passed, and a remedy that fits."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.distributed as dist

from common import OneRank
from deep_ep import Buffer, EPError, env
from deep_ep.engine.protocol import Agreement, disagreement
from deep_ep.topology import arrange

MINE = Agreement("dispatch", num_experts=8, num_topk=2, hidden=16, dtype=torch.bfloat16, idx_dtype=torch.int64)


@pytest.mark.parametrize(
    ("theirs", "remedy"),
    [
        (MINE._replace(hidden=32), "Pass the same hidden size of `x` on all ranks"),
        (MINE._replace(num_experts=4, num_topk=3), "Pass the same number of experts, the same number of columns"),
        (MINE._replace(dtype=torch.float32), "Pass the same dtype of `x` on all ranks"),
        (MINE._replace(operation="combine"), "Make the calls in the same order on all ranks"),
        (MINE._replace(operation="combine", hidden=8), "Make the calls in the same order on all ranks"),
        (MINE._replace(handle=5), "Pass handles of one and the same dispatch on all ranks"),
        (MINE, "Make the calls in the same order on all ranks"),
    ],
)
def test_the_remedy_fits_the_difference(theirs: Agreement, remedy: str) -> None:
    text = str(disagreement("dispatch (call 3)", "rank 0/2", [("rank 1", MINE, theirs)]))
    assert text.startswith("dispatch (call 3): all ranks must make the same call, but rank 1 has ")
    assert remedy in text


def test_ranks_that_do_not_divide() -> None:
    with pytest.raises(EPError, match=r"DEEP_EP_RANKS_PER_NODE=3 must divide the 4 ranks of a host"):
        arrange(0, ["here"] * 4, 3)


def make() -> Buffer:
    return Buffer(None, comm=OneRank(), device="cpu")


def test_shapes_are_named() -> None:
    with make() as buffer, pytest.raises(ValueError, match=r"`x` must have shape \[tokens, hidden\], it has \[3\]"):
        buffer.dispatch(torch.zeros(3))


def test_a_wrong_dtype_has_a_remedy() -> None:
    topk_idx = torch.zeros(2, 1, dtype=torch.int16)
    with make() as buffer, pytest.raises(ValueError, match=r"it is int16. Pass `topk_idx.to\(torch.int32\)`"):
        buffer.get_dispatch_layout(topk_idx, 2)


def test_ids_of_another_batch_are_noticed() -> None:
    with make() as buffer:
        per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(torch.tensor([[0, 1], [1, -1]]), 2)
        others, weights = torch.tensor([[0, 1], [1, 0]]), torch.zeros(2, 2)
        with pytest.raises(ValueError, match=r"`topk_idx` selects 4 experts, `num_tokens_per_expert` counts 3"):
            buffer.dispatch(torch.zeros(2, 4), None, per_rank, None, mask, per_expert, others, weights)


def test_a_variable_with_a_mistake_in_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_SEC", "5")
    monkeypatch.setattr(env, "_warned", set())
    with pytest.warns(
        UserWarning, match=r"DEEP_EP_TIMEOUT_SEC: there is no such .* Did you mean DEEP_EP_TIMEOUT_SECS\?"
    ):
        make()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make()  # it is said once


def test_a_process_outside_the_group() -> None:
    with pytest.raises(ValueError, match=r"this process is no member of `group`"):
        Buffer(dist.GroupMember.NON_GROUP_MEMBER, device="cpu")  # type: ignore[arg-type]
