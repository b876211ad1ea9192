"""Some fault plans, through `soak --plan` and `soak --faults`: what holds after a fault, and that a failure is told."""

from __future__ import annotations

import json
import signal
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from deep_ep import Buffer
from deep_ep.tools import cli
from deep_ep.tools.soak import fault_program, fault_runs
from deep_ep.tools.soak.fault_program import Account
from deep_ep.tools.soak.fault_runs import run_plan
from deep_ep.tools.soak.plans import FaultPlan

pytestmark = pytest.mark.cpu_only

PLANS = [
    "KILL rank=2 at=call:before-offered",
    "KILL rank=3 at=call:after-announced way=behind ranks=4 per_node=2",
    "KILL rank=1 at=calls+30ms op=growth way=async ranks=2",
    "KILL rank=1 at=call:before-receive op=ll-dispatch way=hook",
    "KILL rank=0 at=destroy:before op=cached",
    "KILL rank=1 at=call:before-ready op=expanded way=async",
    "RAISE rank=0 at=call:after-ready op=expanded-combine ranks=2",
    "TERM rank=0 at=calls+20ms op=combine ranks=2 per_node=1",
    "PAUSE rank=1 at=make:before-2 ranks=2",
    "PAUSE rank=1 at=call:before-offered op=worst-case way=queued",
    "RAISE rank=0 at=call:after-offered op=cached ranks=2",
]


@pytest.mark.parametrize("line", PLANS)
def test_a_plan(device: str, line: str) -> None:
    result = run_plan(FaultPlan.parse(line))
    assert not result.wrong, result


def wrong_rows(rank: int, num_ranks: int, plan: FaultPlan, news: Connection, folder: str) -> Account:
    """Rank 0 receives a wrong row, and forgets to close its buffer."""
    right = fault_program.tokens_of

    def wrong(source: int, step: int, hidden: int) -> object:
        return right(source, step, hidden) + (source == 1 and step == 2)

    if rank == 0:
        fault_program.tokens_of = wrong  # type: ignore[assignment]
        Buffer.destroy = lambda self: held.append(self)  # type: ignore[method-assign, assignment, return-value]
        fault_program.left_since.__globals__["_LEFT_SECS"] = 0.1
    return fault_program.play_plan(rank, num_ranks, plan, news, folder)


held: list[Buffer] = []


def test_a_failure_is_told_with_the_line_that_replays_it(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setattr(fault_runs, "play_plan", wrong_rows)
    line = "PAUSE rank=1 at=call:before-offered op=dispatch way=sync path=direct call=1 ranks=2 per_node=0"
    path = tmp_path / "plans.json"
    assert cli.main(["soak", "--plan", line, "--json", str(path)]) == 1
    out, _ = capsys.readouterr()
    assert "rank 0: recv_x of step 2" in out
    assert "rank 0 still holds" in out
    assert f'Replay: python -m deep_ep soak --plan "{line}"' in out
    assert "not OK: 1 fault plan, 1 failed" in out
    assert json.loads(path.read_text())["failures"][0]["plan"] == line


def hang(rank: int, num_ranks: int, plan: FaultPlan, news: Connection, folder: str) -> Account:
    fault_program._DUMP_SECS = 0.7
    if rank == 0:
        fault_program._go_on = lambda _: signal.pause()  # type: ignore[assignment]
    return fault_program.play_plan(rank, num_ranks, plan, news, folder)


def test_a_hang_is_told_with_the_stacks(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fault_runs, "play_plan", hang)
    monkeypatch.setattr(fault_runs, "HANG_SECS", 4.0)
    result = run_plan(FaultPlan.parse("RAISE rank=1 at=call:before-offered ranks=2"))
    assert "did not end within 4 s" in result.wrong[0]
    assert "in hang" in result.stacks
    assert "in _play" in result.stacks


def test_plans_are_drawn_for_the_topology_and_printed_as_json(
    device: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    played = []
    monkeypatch.setattr(fault_runs, "run_plan", lambda plan: played.append(plan) or fault_runs.PlanResult(plan, []))
    assert cli.main(["soak", "--faults", "5", "--ranks", "4", "--ranks-per-node", "2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["num_plans"] == 5
    assert {(plan.ranks, plan.per_node) for plan in played} == {(4, 2)}
    for wrong in (["--faults", "0"], ["--faults", "3", "--minutes", "1"], ["--plan", "KILL"], ["--json"]):
        assert cli.main(["soak", *wrong]) != 0
