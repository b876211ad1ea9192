"""The steps of real calls are a path of the models that `soak --states` explores, and a wrong step is not."""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from low_latency import Case, inputs, make_buffer

import deep_ep
from common import NOTHING_POSTED, error_of, layout_of, run_ranks
from deep_ep.tools.soak.states import low_latency
from deep_ep.tools.soak.states import trace as states
from deep_ep.tools.soak.states.trace import Event, StepTrace, recording
from internode import dispatch as dispatch_world
from internode import layout_arguments, make_world, nodes_of, topk_arguments
from internode import make_buffer as make_rails_buffer

pytestmark = [pytest.mark.usefixtures("device"), pytest.mark.cpu_only]

TOKENS, HIDDEN, TOPK, EXPERTS_PER_RANK = 9, 16, 2, 2
STAGED = {**NOTHING_POSTED, "DEEP_EP_ARENA_BYTES": "256"}


@contextmanager
def disturbed(buffer: deep_ep.Buffer, seed: int) -> Iterator[StepTrace]:
    """Record the calls of a buffer, in whose steps this rank is late now and then: other interleavings come up."""
    late = random.Random(seed)

    def fault(_: str) -> None:
        time.sleep(late.choice((0.0, 0.0, 0.004)))

    buffer.set_fault_hook(fault)
    with warnings.catch_warnings(), recording() as trace:
        warnings.simplefilter("ignore", RuntimeWarning)  # that calls are staged
        yield trace


def all_calls(rank: int, num_ranks: int) -> tuple[StepTrace, dict[str, int]]:
    """Each kind of call twice, in one order, and then another one; a worst-case dispatch also with too many rows."""
    buffer = deep_ep.Buffer(dist.group.WORLD, 0, explicitly_destroy=True)
    generator = torch.Generator().manual_seed(rank)
    num_experts = EXPERTS_PER_RANK * num_ranks
    x = torch.randn(TOKENS, HIDDEN, generator=generator).bfloat16()
    topk_idx = torch.rand(TOKENS, num_experts, generator=generator).topk(TOPK).indices
    routing: dict[str, Any] = {
        **layout_of(buffer, topk_idx, num_experts),
        "topk_idx": topk_idx,
        "topk_weights": torch.ones(TOKENS, TOPK),
    }
    with disturbed(buffer, rank) as trace:
        for _ in range(2):
            recv_x, _, _, _, handle, _ = buffer.dispatch(x, **routing)
            buffer.combine(recv_x, handle)
            buffer.combine(recv_x.clone(), handle)
            del recv_x
            buffer.dispatch(x, handle=handle)
            buffer.dispatch(x, **routing, num_worst_tokens=TOKENS * num_ranks)
            assert error_of(buffer.dispatch, x, **routing, num_worst_tokens=1)[0] == "EPOverflow"
    calls = buffer.stats()["calls"]
    buffer.destroy()
    return trace, calls


def swapped(trace: StepTrace, place: int) -> StepTrace:
    """With two steps in the other order."""
    events = list(trace.events)
    events[place : place + 2] = reversed(events[place : place + 2])
    return trace._replace(events=events)


def without(trace: StepTrace, place: int) -> StepTrace:
    """With a step left out."""
    return trace._replace(events=[*trace.events[:place], *trace.events[place + 1 :]])


def require_sharp(traces: list[StepTrace], check: Callable[[list[StepTrace]], str | None]) -> None:
    """Whatever step of a rank is missing, or changes places with the next, the rest is no path.

    Rows of a rail may come and go while other things are done.
    """
    first, *others = traces
    for place in range(0, min(len(first.events) - 1, 48), 3):
        assert check([without(first, place), *others]), first.events[place]
        pair = first.events[place : place + 2]
        if pair[0] != pair[1] and not any("ROWS" in event.name for event in pair):
            assert check([swapped(first, place), *others]), pair


@pytest.mark.parametrize(
    ("path", "env"), [("posted", {}), ("direct", NOTHING_POSTED), ("staged", STAGED)], ids=lambda value: str(value)[:6]
)
def test_calls_of_one_node(path: str, env: dict[str, str]) -> None:
    results = run_ranks(all_calls, 2, env=env)
    traces = [trace for trace, _ in results]
    for trace, calls in results:
        assert calls[f"dispatch/{path}"] >= 6, calls
        names = {event.name for event in trace.events}
        assert ("signal READY(2)" in names) == (path == "staged"), "several rounds"
    drawn = states.drawn_of(traces)
    assert states.check_one_hop(traces, drawn) is None
    require_sharp(traces, lambda traces: states.check_one_hop(traces, drawn))


def mixed_memory(rank: int, num_ranks: int) -> StepTrace:
    """One rank posts, one is staged, and one has room for all."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in ({}, STAGED, NOTHING_POSTED)[rank].items():
            patch.setenv(name, value)
        return all_calls(rank, num_ranks)[0]


def test_three_ranks_of_which_one_posts_and_one_is_staged() -> None:
    traces = run_ranks(mixed_memory, 3)
    drawn = states.drawn_of(traces)
    assert drawn[0] == ("dispatch", ("posted", "staged", "direct"), drawn[0].rounds, False, False)
    assert states.check_one_hop(traces, drawn) is None
    assert states.check_one_hop([traces[0], without(traces[1], 7), traces[2]], drawn)


# Low latency ---------------------------------------------------------------------------------------------------------

CASE = Case(max_tokens=4, hidden=128)


def two_in_flight(rank: int, num_ranks: int) -> tuple[StepTrace, list[str]]:
    """Two micro-batches, with hooks called in another order on each rank; then whole rounds of other sizes."""
    small = CASE._replace(max_tokens=1)
    buffer = make_buffer(num_ranks, CASE)
    num_experts = CASE.experts_per_rank * num_ranks
    kinds: list[str] = []

    def send(case: Case, seed: int) -> tuple[tuple, tuple]:
        given = inputs(rank, num_ranks, case._replace(seed=seed))
        kinds.append(low_latency.DISPATCH)
        got = buffer.low_latency_dispatch(
            given.x, given.topk_idx, case.max_tokens, num_experts, use_fp8=False, return_recv_hook=True
        )
        return given, got

    def send_back(given: tuple, got: tuple) -> Callable[[], None]:
        kinds.append(low_latency.COMBINE)
        *_, hook = buffer.low_latency_combine(got[0], given[1], given[2], got[2], return_recv_hook=True)
        assert hook is not None
        return hook

    with disturbed(buffer, rank) as trace:
        for seed in range(3):
            batches = [send(CASE, seed), send(CASE, seed + 10)]
            for _, got in batches if (rank + seed) % 2 else reversed(batches):
                got[4]()
            hooks = [send_back(*batch) for batch in batches]
            for hook in hooks if (rank + seed) % 2 else reversed(hooks):
                hook()
        for seed in range(2):
            given, got = send(small, seed)
            got[4]()
            send_back(given, got)()
    buffer.destroy()
    return trace, kinds


def test_low_latency_with_two_in_flight() -> None:
    results = run_ranks(two_in_flight, 2)
    traces, kinds = [trace for trace, _ in results], results[0][1]
    assert states.check_low_latency(traces, kinds) is None
    require_sharp(traces, lambda traces: states.check_low_latency(traces, kinds))


# Two hops ------------------------------------------------------------------------------------------------------------


def calls_across(rank: int, num_ranks: int, ranks_per_node: int) -> StepTrace:
    world = make_world(num_ranks, ranks_per_node, num_tokens=6)
    buffer = make_rails_buffer()
    routing = {**layout_arguments(buffer, world), **topk_arguments(world, buffer)}
    with disturbed(buffer, rank) as trace:
        for _ in range(2):
            recv_x, *_, handle, _ = dispatch_world(buffer, world)
            buffer.combine(recv_x, handle)
            del recv_x
            buffer.dispatch(world.xs[rank], handle=handle)
            buffer.dispatch(world.xs[rank], **routing, num_worst_tokens=8 * num_ranks)
            error = error_of(buffer.dispatch, world.xs[rank], **routing, num_worst_tokens=1)
            assert error[0] == "EPOverflow", error
    buffer.destroy()
    return trace


@pytest.mark.parametrize("env", [{}, {"DEEP_EP_ARENA_BYTES": "2048"}], ids=["direct", "staged"])
def test_calls_across_nodes(env: dict[str, str]) -> None:
    traces = run_ranks(calls_across, 2, 1, env={**nodes_of(1), **env})
    assert any(event.name == "copy out" for event in traces[0].events) == bool(env)
    drawn = states.drawn_of(traces)
    assert states.check_two_hops(traces, drawn, 1) is None
    require_sharp(traces, lambda traces: states.check_two_hops(traces, drawn, 1))


def test_calls_of_two_nodes_of_two() -> None:
    traces = run_ranks(calls_across, 4, 2, env=nodes_of(2))
    drawn = states.drawn_of(traces)
    assert states.check_two_hops(traces, drawn, 2) is None
    assert states.check_two_hops([*traces[:3], without(traces[3], 3)], drawn, 2)


def test_what_the_code_does_not_name_so_is_no_path() -> None:
    events = [Event("post header", 1)]
    traces = [StepTrace(events, {1: "dispatch"}), StepTrace([], {1: "dispatch"})]
    told = states.check_one_hop(traces, states.drawn_of(traces))
    assert told is not None
    assert "rank 0 gets to post header of call 1" in told
