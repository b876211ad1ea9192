"""Defects that are put into the library on purpose: random calls must find each of them.

The search of states finds those of the protocol in its models, see `tests/pure/test_states.py`; here they are in the
code that runs.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

import pytest

from deep_ep.engine import payload
from deep_ep.engine.cpu import combine, dispatch, expanded, posted
from deep_ep.engine.cpu.call import Call, Chain
from deep_ep.engine.low_latency.cpu.engine import CpuLowLatency
from deep_ep.engine.protocol import READY, Header, step_name
from deep_ep.tools.soak import parent
from deep_ep.tools.soak.plan import Goal
from deep_ep.tools.soak.rank import RankReport, play_rank
from deep_ep.transport.arena import Arena
from deep_ep.transport.window import Window

pytestmark = [pytest.mark.cpu_only, pytest.mark.usefixtures("device")]

SHORT_SECS = 0.001  # time for a peer to look


def signal_before_data() -> None:
    """Rows are said to be there, and then put."""
    begin, put = Chain.begin, dispatch.put_rows
    rounds: list[Any] = []

    def begin_counting(self: Chain, header: Header) -> Call:
        call = begin(self, header)
        rounds[:] = [call]
        return call

    def put_late(*args: Any, **more: Any) -> None:
        rounds[0].signal(READY + 2 * (len(rounds) - 1))
        rounds.append(None)
        time.sleep(SHORT_SECS)
        put(*args, **more)

    Chain.begin = begin_counting  # type: ignore[method-assign]
    dispatch.put_rows = put_late


def offer_reused_too_early() -> None:
    """A region is free for the next call while its tensor lives."""
    take = Arena.take

    def take_and_free(self: Arena, num_bytes: int) -> memoryview | None:
        view = take(self, num_bytes)
        if view is not None:
            died, _ = next(reversed(self._regions.values()))
            self._freed.append(died)
        return view

    Arena.take = take_and_free  # type: ignore[method-assign]


def epoch_off_by_one() -> None:
    """A wait is content with the call before."""
    wait = Window.wait
    Window.wait = lambda self, epoch, step, operation: wait(self, epoch - 1, step, operation)  # type: ignore[method-assign]


def read_done_left_out() -> None:
    """A combine ends although peers still read its rows."""
    wait = Call.wait

    def wait_for_less(self: Call, step: int) -> None:
        if self.operation != "combine" or step_name(step) != "taken":
            wait(self, step)

    Call.wait = wait_for_less  # type: ignore[method-assign]


def scales_of_another_row() -> None:
    """The scales of each token are those of its neighbour."""
    for name in ("outgoing_parts", "posted_parts"):
        right = getattr(dispatch, name)

        def wrong(payload: payload.Payload, routing: Any, right: Callable = right) -> Any:
            if payload.scales is not None and len(payload.scales):  # its neighbour is itself where there is but one
                payload = replace(payload, scales=payload.scales[[-1, *range(len(payload.scales) - 1)]])
            return right(payload, routing)

        setattr(dispatch, name, wrong)


def expanded_rows_in_the_order_of_columns() -> None:
    """Rows of an expert that two columns of tokens select stand column after column, not token after token."""
    fill_plan = expanded.fill_plan

    def fill_wrongly(plan: payload.SendPlan, *args: Any) -> None:
        fill_plan(plan, *args)
        plan.token_idx = [tokens.flip(0) for tokens in plan.token_idx]

    expanded.fill_plan = fill_wrongly


def stale_id_behind_the_worst_case() -> None:
    """Behind the rows that came, ids stay what they were."""
    make_local = payload.make_local

    def make_less_local(unpacked: payload.Unpacked, num_rows: int, *sizes: int) -> None:
        before = None if unpacked.topk_idx is None else unpacked.topk_idx[num_rows:].clone()
        make_local(unpacked, num_rows, *sizes)
        if unpacked.topk_idx is not None and before is not None:
            unpacked.topk_idx[num_rows:] = before

    for module in (payload, dispatch):
        if hasattr(module, "make_local"):
            module.make_local = make_less_local


def mask_that_stays() -> None:
    """One rank stays masked when nobody shall be."""
    clean = CpuLowLatency.clean_mask

    def clean_less(self: CpuLowLatency) -> None:
        left = sorted(self.shared.masked)[:1]
        clean(self)
        self.shared.masks.update(dict.fromkeys(left, 0))

    CpuLowLatency.clean_mask = clean_less  # type: ignore[method-assign]


def bias_of_another_token() -> None:
    """The sum of each token begins with its neighbour's bias."""
    for module, name in ((combine, "reduce_rows"), (combine, "sum_rows")):
        right = getattr(module, name)

        def wrong(out: Any, *args: Any, right: Callable = right, **options: Any) -> None:
            *others, biases = args
            right(out, *others, [bias.roll(1, 0) for bias in biases], **options)

        setattr(module, name, wrong)


def posted_rows_of_the_call_before() -> None:
    """Posted rows have one place instead of two."""
    for module in (dispatch, combine):
        right = module.post_rows

        def wrong(call: Call, *args: Any, right: Callable = right) -> None:
            right(Call(call.window, call.epoch & ~1, call.header), *args)

        module.post_rows = wrong
    fetch = posted.fetch_rows

    def fetch_wrong(call: Call, *args: Any) -> None:
        fetch(Call(call.window, call.epoch & ~1, call.header), *args)

    for module in (dispatch, combine):
        module.fetch_rows = fetch_wrong


DEFECTS: dict[str, tuple[Callable[[], None], Goal, str]] = {
    one.__name__: (one, goal, said)
    for one, goal, said in (
        (signal_before_data, Goal(2, 3, num_calls=300), "recv_"),
        (offer_reused_too_early, Goal(2, 3, num_calls=300), ""),
        (epoch_off_by_one, Goal(2, 3, num_calls=300), ""),
        (read_done_left_out, Goal(3, 5, num_calls=400), "combined_"),
        (scales_of_another_row, Goal(2, 3, num_calls=300), "recv_scales"),
        (expanded_rows_in_the_order_of_columns, Goal(2, 3, num_calls=300), "recv_x"),
        (stale_id_behind_the_worst_case, Goal(2, 3, num_calls=300), "recv_topk_idx behind the rows"),
        (mask_that_stays, Goal(2, 1, num_calls=150, only_low_latency=True), "mask_status"),
        (bias_of_another_token, Goal(2, 3, num_calls=300), "combined_x"),
        (posted_rows_of_the_call_before, Goal(3, 5, num_calls=400), ""),
    )
}


def broken_rank(rank: int, num_ranks: int, goal: Goal, news: Connection, *, defect: str) -> RankReport:
    DEFECTS[defect][0]()
    return play_rank(rank, num_ranks, goal, news)


@pytest.mark.parametrize("defect", DEFECTS)
def test_random_calls_find_it(defect: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _, goal, said = DEFECTS[defect]
    monkeypatch.setattr(parent, "play_rank", functools.partial(broken_rank, defect=defect))
    outcome = parent.run_soak(goal, lambda *_: None)
    assert outcome.failures, outcome
    assert said in outcome.failures[0].text, outcome.failures[0].text
    assert outcome.replay is not None
