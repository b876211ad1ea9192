"""Fault plans as data: their text, how they are drawn, what they expect, and how accounts are judged."""

from __future__ import annotations

import pytest

from deep_ep.tools.soak.fault_program import Account
from deep_ep.tools.soak.fault_runs import PlanResult, accused, as_json, verdict
from deep_ep.tools.soak.plans import ELASTIC_OPERATIONS, TOPOLOGIES, FaultPlan, Moment, draw_plans

LINE = "KILL rank=2 at=call:before-offered op=dispatch way=sync path=direct call=3 ranks=4 per_node=2"
KILL = FaultPlan.parse("KILL rank=2 at=call:before-offered")
DEATH = "EPError: dispatch (call 3): the process of rank 2 has ended (rank 0/3). Look at its output"


def test_a_line_is_a_plan() -> None:
    plan = FaultPlan.parse(LINE)
    assert plan == FaultPlan("KILL", 2, "call:before-offered", call=3, ranks=4, per_node=2)
    assert str(plan) == LINE
    assert plan.command == f'python -m deep_ep soak --plan "{LINE}"'
    assert plan.survivors == [0, 1, 3]
    assert plan.environment["DEEP_EP_RANKS_PER_NODE"] == "2"


def test_what_is_left_out_of_a_line_has_a_default() -> None:
    assert FaultPlan.parse("STOP rank=0 at=make+12ms").moment == Moment("make", "", 0.012)
    assert FaultPlan.parse("STOP rank=0 at=make:after-3").moment == Moment("make", "after-3", 0.0)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("HUP rank=0 at=calls+3ms", "`signal` must be one of KILL"),
        ("KILL at=calls+3ms", "rank"),
        ("KILL rank=3 at=calls+3ms", "`rank` must be one of 0, 1, 2, got 3"),
        ("KILL rank=x at=calls+3ms", "`rank` must be a number"),
        ("KILL rank=0 at=later", "`at` must be"),
        ("KILL rank=0 at=calls+3s", "`at` must be"),
        ("KILL rank=0 at=calls+3ms colour=red", "'colour=red' must be one of rank, at"),
        ("KILL rank=0 rank=1 at=calls+3ms", "once"),
        ("KILL rank=0 at=calls+3ms ranks=3 per_node=2", "`per_node` must divide"),
        ("KILL rank=0 at=call:before-taken", "has the points before-announced"),
        ("KILL rank=0 at=call:before-ready path=posted", "has the points before-announced, after-announced,"),
        ("KILL rank=0 at=calls+3ms op=ll-combine way=behind", "`way` must be one of sync, async, hook"),
        ("RAISE rank=0 at=calls+3ms", "RAISE needs a fault point"),
    ],
)
def test_a_line_that_is_no_plan(line: str, said: str) -> None:
    with pytest.raises(ValueError, match=r"^soak: --plan") as caught:
        FaultPlan.parse(line)
    assert said in str(caught.value)


def test_drawn_plans_come_from_the_seed_and_survive_their_text() -> None:
    plans = draw_plans(150, seed=3)
    assert [FaultPlan.parse(str(plan)) for plan in plans] == plans
    assert draw_plans(20, seed=3) == plans[:20]
    assert draw_plans(20, seed=4) != plans[:20]
    assert {(plan.ranks, plan.per_node) for plan in plans} == set(TOPOLOGIES)
    assert {plan.op for plan in plans} == {"dispatch", "cached", "worst-case", "combine", "growth", *ELASTIC_OPERATIONS}
    assert len({plan.kind for plan in plans}) == 28
    few = draw_plans(50, seed=3, topologies=[(2, 1)], only_low_latency=True)
    assert all(plan.is_low_latency and (plan.ranks, plan.per_node) == (2, 1) for plan in few)


def test_what_plans_expect() -> None:
    assert FaultPlan.parse("TERM rank=0 at=make+1ms").expectation.raises == "all"
    assert FaultPlan.parse("KILL rank=0 at=destroy:before").expectation.raises == "none"
    assert FaultPlan.parse("PAUSE rank=0 at=calls+1ms").expectation.raises == "none"
    assert FaultPlan.parse("INT rank=0 at=calls+1ms").expectation.raises == "alike"
    stop = FaultPlan.parse("STOP rank=0 at=calls+1ms")
    assert stop.expectation.raises == "all"
    assert stop.limit_secs < stop.stopped_secs < 10
    # A killed rank that is noticed only at the limit is noticed too late.
    assert KILL.expectation.within_secs < KILL.limit_secs


@pytest.mark.parametrize(
    ("text", "ranks"),
    [
        (DEATH, {2}),
        (f"EPPeerFailed: dispatch (call 3): rank 1 failed: {DEATH} (rank 0/3)", {2}),
        ("EPPeerFailed: combine (call 4): rank 1 failed: combine (call 4): MemoryError: none left (rank 0/3)", {1}),
        ("EPTimeout: dispatch (call 3): no signal from ranks 1, 2 after 2.5 s (rank 0/3). It exited", {1, 2}),
        ("EPTimeout: finding the nodes: not all ranks came within 2 s (rank 0/3). A rank exited", set()),
    ],
)
def test_which_ranks_a_message_blames(text: str, ranks: set[int]) -> None:
    assert accused(text) == ranks


def saw(text: str = DEATH, secs: float = 11.0, **more: object) -> Account:
    return Account(error=text, error_secs=secs, refusal="EPClosed", ending="failed", **more)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("account", "said"),
    [
        (saw(), []),
        (Account(), ["ranks [1] did not raise"]),
        (saw("EPError: rank 0 failed: ValueError"), ["rank 1 blames [0], not 2"]),
        (saw(is_ep_error=False), ["rank 1 raised no EPError"]),
        (saw(secs=30.0), ["rank 1 raised after 20.0 s"]),
        (saw(left=["1 x mapping of a memfd"]), ["rank 1 still holds 1 x mapping"]),
        (saw(wrong=["recv_x differs"]), ["rank 1: recv_x differs"]),
        (None, ["rank 1 has ended"]),
    ],
)
def test_an_account_is_judged(account: Account | None, said: list[str]) -> None:
    wrong = verdict(KILL, 10.0, [saw(), account, None])
    assert len(wrong) == len(said)
    assert all(one.startswith(start) for one, start in zip(wrong, said, strict=True))


def test_an_interrupted_rank_carries_on_or_all_others_raise() -> None:
    plan = FaultPlan.parse("INT rank=0 at=calls+5ms ranks=2")
    named = saw(DEATH.replace("2", "0"))
    assert verdict(plan, 10.0, [Account(), Account()]) == []
    assert verdict(plan, 10.0, [Account(ending="left"), named]) == []
    assert verdict(plan, 10.0, [saw("EPClosed: Buffer"), named]) == []
    assert verdict(plan, 10.0, [Account(ending="left"), Account()]) == ["ranks [1] did not raise"]
    assert verdict(plan, 10.0, [Account(), named])[0].startswith("rank 1 must not raise")


def test_a_rank_that_outlives_its_signal_is_noticed() -> None:
    assert verdict(KILL, 10.0, [saw(), saw(), Account()]) == ["rank 2 outlived the signal"]


def test_results_as_json() -> None:
    text = as_json([PlanResult(KILL, []), PlanResult(KILL, ["rank 1 blames nobody"])])
    assert '"num_failed": 1' in text
    assert '"kind": "KILL in a call"' in text
    assert "soak --plan" in text
