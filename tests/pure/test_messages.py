"""Messages name what the caller passed, and a remedy that fits."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist

from common import OneRank
from deep_ep import Buffer, Config, EPError, env, errors, launch, moe, reaper
from deep_ep.engine.protocol import Agreement, disagreement
from deep_ep.topology import arrange

LOW_LATENCY = Agreement("low-latency dispatch", num_experts=8, dtype=torch.bfloat16, max_tokens=4)
MINE = Agreement("dispatch", num_experts=8, num_topk=2, hidden=16, dtype=torch.bfloat16, idx_dtype=torch.int64)
CACHED = Agreement("cached dispatch", hidden=16, dtype=torch.bfloat16, handle=7)


@pytest.mark.parametrize(
    ("theirs", "remedy"),
    [
        (MINE._replace(hidden=32), "Pass the same hidden size of `x` on all ranks"),
        (MINE._replace(num_experts=4, num_topk=3), "Pass the same `num_experts` on all ranks, and the same number of"),
        (MINE._replace(dtype=torch.float32), "Pass the same dtype of `x` on all ranks"),
        (MINE._replace(operation="combine"), "Make the calls in the same order on all ranks"),
        (MINE._replace(operation="combine", hidden=8), "Make the calls in the same order on all ranks"),
        (MINE._replace(handle=5), "Pass handles of one and the same dispatch on all ranks"),
        (MINE, "Make the calls in the same order on all ranks"),
        (
            MINE._replace(operation="worst-case dispatch"),
            "has worst-case dispatch, not dispatch (rank 0/2). Pass `num_worst_tokens` on all ranks, or on none",
        ),
        (
            MINE._replace(operation="worst-case dispatch", max_tokens=3),
            "has worst-case dispatch, not dispatch (rank 0/2). Pass `do_cpu_sync=False` on all ranks, or on none",
        ),
        (MINE._replace(operation="cached dispatch", handle=7), "Pass `handle` on all ranks, or on none"),
        (MINE._replace(num_scales=4, scale_dtype=torch.float32), ". Pass scales of `x` on all ranks, or on none"),
        (MINE._replace(num_topk=0, idx_dtype=None), ". Pass `topk_idx` and `topk_weights` on all ranks, or on none"),
        (
            MINE._replace(has_weights=1),
            "topk_weights, not none (rank 0/2). Pass `topk_weights` on all ranks, or on none",
        ),
        (
            MINE._replace(is_reduced_once=1, hidden=3),
            "has allow_multiple_reduction False not True (rank 0/2). Pass the",
        ),
        (MINE._replace(alignment=1), "has do_expand True not False (rank 0/2). Pass the same `do_expand` on all ranks"),
        (MINE._replace(alignment=-1), "has a call of ElasticBuffer, not of Buffer (rank 0/2). Make the calls in the"),
    ],
)
def test_the_remedy_fits_the_difference(theirs: Agreement, remedy: str) -> None:
    text = str(disagreement("dispatch (call 3)", "rank 0/2", [("rank 1", MINE, theirs)]))
    assert text.startswith("dispatch (call 3): all ranks must make the same call, but rank 1 has ")
    assert remedy in text


@pytest.mark.parametrize(
    ("mine", "theirs", "told"),
    [
        (MINE._replace(alignment=4), {"alignment": 8}, "expert_alignment 8 not 4 (rank 0/2). Pass the same `expert_a"),
        (
            MINE._replace(alignment=4),
            {"alignment": -1},
            "do_expand False not True (rank 0/2). Pass the same `do_expand`",
        ),
        (MINE._replace(alignment=-1), {"alignment": 0}, "a call of Buffer, not of ElasticBuffer (rank 0/2). Make the"),
        (
            CACHED._replace(alignment=4),
            {"alignment": 0},
            "do_expand False not True (rank 0/2). Pass handles of one and",
        ),
        (
            CACHED._replace(num_scales=2, scale_dtype=torch.float32, has_weights=1),
            {"num_scales": 0, "scale_dtype": None, "has_weights": 0},
            "rank 1 has no topk_weights (rank 0/2). Pass `topk_weights` on all ranks, or on none",
        ),
        (
            CACHED._replace(num_topk=2, has_weights=1),
            {"num_topk": 0, "has_weights": 0},
            "rank 1 has no topk_weights (rank 0/2). Pass `topk_weights` on all ranks, or on none",
        ),
        (
            MINE._replace(operation="worst-case dispatch", max_tokens=4),
            {"max_tokens": 5},
            "num_max_tokens_per_rank 5 not 4 (rank 0/2). Pass the same `num_max_tokens_per_rank` on all ranks",
        ),
    ],
)
def test_differences_are_named_as_the_arguments_of_elastic_buffer(mine: Agreement, theirs: dict, told: str) -> None:
    text = str(disagreement("dispatch (call 3)", "rank 0/2", [("rank 1", mine, mine._replace(**theirs))]))
    assert told in text


@pytest.mark.parametrize(
    ("operation", "change", "argument"),
    [
        ("dispatch", {"dtype": torch.float8_e4m3fn, "scale_dtype": torch.float32}, "`use_fp8`"),
        ("dispatch", {"scale_dtype": torch.int32}, "`use_ue8m0`"),
        ("dispatch", {"num_scales": 1}, "`round_scale`"),
        ("dispatch", {"max_tokens": 8}, "`num_max_dispatch_tokens_per_rank`"),
        ("dispatch", {"num_experts": 16}, "`num_experts`"),
        ("combine", {"num_scales": 1}, "`use_logfmt`"),
    ],
)
def test_the_remedy_names_the_argument_of_a_low_latency_call(operation: str, change: dict, argument: str) -> None:
    mine = LOW_LATENCY._replace(operation=f"low-latency {operation}")
    text = str(disagreement("call 3", "rank 0/2", [("rank 1", mine, mine._replace(**change))]))
    assert text.endswith(f". Pass the same {argument} on all ranks")
    is_number = set(change) & {"num_scales", "max_tokens"}
    assert not is_number or f"rank 1 has {argument.strip('`')} " in text


def test_every_error_can_be_imported_from_the_package() -> None:
    import deep_ep

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, EPError)]
    for kind in (*kinds, launch.RankFailed):
        assert getattr(deep_ep, kind.__name__) is kind
        assert kind.__name__ in deep_ep.__all__


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
        topk_idx = torch.tensor([[0, 1], [1, -1]])
        per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(topk_idx, 2)
        for others, num_zeros in ((torch.tensor([[0, 1], [1, 0]]), 2), (torch.tensor([[-1, 1], [1, 1]]), 0)):
            text = f"`topk_idx` selects expert 0 {num_zeros} times, `num_tokens_per_expert` counts 1"
            with pytest.raises(ValueError, match=text):
                buffer.dispatch(torch.zeros(2, 4), None, per_rank, None, mask, per_expert, others, torch.zeros(2, 2))
        buffer.dispatch(torch.zeros(2, 4), None, per_rank, None, mask, per_expert, topk_idx.clone(), torch.zeros(2, 2))


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


@pytest.mark.parametrize(
    ("x", "error", "text"),
    [
        (torch.zeros(3, 9), ValueError, r"`x` must have shape \[\.\.\., 8\].* it has \[3, 9\]"),
        (torch.zeros(()), ValueError, r"`x` must have shape \[\.\.\., 8\].* it has \[\]"),
        (torch.zeros(3, 8, dtype=torch.float64), ValueError, r"`x` must be float32 .* Pass `x.to\(torch.float32\)`"),
        (torch.zeros(3, 8, dtype=torch.int64), ValueError, r"`x` must be float32 .* it is int64"),
        ([[0.0] * 8], TypeError, r"`x` must be a tensor, got list"),
    ],
)
def test_a_layer_refuses_before_anything_is_sent(x: Any, error: type[Exception], text: str) -> None:
    with make() as buffer:
        layer = moe.MoELayer(8, 4, 2, 1, buffer=buffer)
        with pytest.raises(error, match=f"MoELayer: {text}"):
            layer(x)
        assert not buffer.stats()["calls"]
        layer(torch.zeros(3, 8))
        with torch.autocast("cpu", torch.bfloat16):
            layer(torch.zeros(3, 8).half())


# A float where an integer belongs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [20.0, True, "20", None])
@pytest.mark.parametrize("name", Config.__dataclass_fields__)
def test_a_config_takes_integers_alone(name: str, value: Any) -> None:
    with pytest.raises(TypeError, match=f"{name} must be an integer"):
        Config(**{name: value})


def test_a_number_of_queue_pairs_is_an_integer() -> None:
    with pytest.raises(TypeError, match=r"`num_qps_per_rank` must be an integer, got 24.0"):
        Buffer(None, num_qps_per_rank=24.0, comm=OneRank(), device="cpu")  # type: ignore[arg-type]


class LowLatency:
    """A buffer of one rank and its low-latency calls."""

    def __init__(self, **more: Any) -> None:
        hint = Buffer.get_low_latency_rdma_size_hint(4, 128, 1, 4)
        self.buffer = Buffer(None, 0, hint, low_latency_mode=True, comm=OneRank(), device="cpu", **more)
        self.ids, self.weights = torch.tensor([[0, 1], [2, 3]]), torch.ones(2, 2)

    def dispatch(self, max_tokens: Any = 4, num_experts: Any = 4, **more: Any) -> tuple:
        x = torch.ones(2, 128, dtype=torch.bfloat16)
        return self.buffer.low_latency_dispatch(x, self.ids, max_tokens, num_experts, use_fp8=False, **more)


def test_a_known_low_latency_call_takes_integers_alone() -> None:
    kit = LowLatency()
    rows, _, handle, _, _ = kit.dispatch()
    kit.buffer.low_latency_combine(rows, kit.ids, kit.weights, handle)
    with pytest.raises(TypeError, match=r"`num_max_dispatch_tokens_per_rank` must be an integer, got 4.0"):
        kit.dispatch(4.0)
    with pytest.raises(TypeError, match=r"`num_experts` must be an integer, got 4.0"):
        kit.dispatch(4, 4.0)
    for item, name in ((2, "num_max_dispatch_tokens_per_rank"), (3, "hidden"), (4, "num_experts")):
        wrong = tuple(float(value) if index == item else value for index, value in enumerate(handle))
        with pytest.raises(TypeError, match=f"`{name}` must be an integer"):
            kit.buffer.low_latency_combine(rows, kit.ids, kit.weights, wrong)


def test_a_combine_waits_for_its_rows() -> None:
    kit = LowLatency()
    rows, _, handle, _, hook = kit.dispatch(return_recv_hook=True)
    with pytest.raises(ValueError, match=r"have not been received. Call the hook of its dispatch first"):
        kit.buffer.low_latency_combine(rows, kit.ids, kit.weights, handle)
    hook()
    kit.buffer.low_latency_combine(rows, kit.ids, kit.weights, handle)


def test_a_call_that_was_given_up_is_not_combined() -> None:
    kit = LowLatency(enable_shrink=True)
    rows, _, handle, _, hook = kit.dispatch(return_recv_hook=True)
    kit.buffer.clean_low_latency_buffer(4, 128, 4)
    with pytest.raises(EPError, match=r"has given up this call. Make it again"):
        hook()
    with pytest.raises(ValueError, match=r"have not been received.*or has raised, dispatch again"):
        kit.buffer.low_latency_combine(rows, kit.ids, kit.weights, handle)


# A hook that is dropped ----------------------------------------------------------------------------------------------


@pytest.fixture
def said() -> Iterator[list[warnings.WarningMessage]]:
    gc.collect()  # what earlier tests have left
    wait_for_reaper()
    with warnings.catch_warnings(record=True) as record:
        warnings.simplefilter("always")
        yield record


def wait_for_reaper() -> None:
    """Until it has done what it was handed over before. It starts with what it is to close."""
    owner, done = threading.Event(), threading.Event()
    reaper.Closing(owner, lambda _: done.set()).close_soon()
    assert done.wait(60)


def test_a_hook_that_is_dropped_is_told(said: list[warnings.WarningMessage]) -> None:
    kit = LowLatency()
    hook = kit.dispatch(return_recv_hook=True)[-1]
    assert callable(hook)
    assert not said
    del hook
    wait_for_reaper()
    assert [one.category for one in said] == [RuntimeWarning]
    assert str(said[0].message).startswith("low_latency_dispatch: the hook that it returned was dropped without ")
    kit = LowLatency()  # the other one has no room for further calls
    rows, _, handle, _, _ = kit.dispatch()
    kit.buffer.low_latency_combine(rows, kit.ids, kit.weights, handle, return_recv_hook=True)
    wait_for_reaper()
    assert str(said[1].message).startswith("low_latency_combine: the hook")
    assert len(said) == 2


def test_a_hook_is_collected_together_with_its_buffer(
    said: list[warnings.WarningMessage], caplog: pytest.LogCaptureFixture
) -> None:
    kit = LowLatency()
    hook = kit.dispatch(return_recv_hook=True)[-1]
    attributes = vars(kit.buffer)
    kept = dict(attributes)
    attributes.clear()  # as the collector does, which breaks cycles
    del hook
    wait_for_reaper()
    attributes.update(kept)
    assert not said
    assert not caplog.records


def test_no_hook_is_told_of_that_nobody_can_call_any_more(said: list[warnings.WarningMessage]) -> None:
    kit = LowLatency(enable_shrink=True)
    *_, hook = kit.dispatch(return_recv_hook=True)
    hook()
    kit.dispatch(async_finish=True)[3].current_stream_wait()
    del hook
    *_, hook = kit.dispatch(return_recv_hook=True)
    kit.buffer.clean_low_latency_buffer(4, 128, 4)
    del hook
    *_, hook = kit.dispatch(return_recv_hook=True)
    del kit, hook  # the buffer goes with it
    kit = LowLatency()
    with kit.buffer:
        *_, hook = kit.dispatch(return_recv_hook=True)
    del hook
    kit = LowLatency()
    *_, hook = kit.dispatch(return_recv_hook=True)
    try:
        raise KeyError
    except KeyError:
        del hook  # as an exception drops what it passes
    wait_for_reaper()
    assert not said, [str(one.message) for one in said]
