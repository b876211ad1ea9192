"""Fault plans, played one after the other in fresh processes, and what came of them."""

from __future__ import annotations

import json
import os
import re
import signal
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from ... import launch
from ...launch import RankFailed, run_ranks
from ..terminal import counted, hearing_ranks, plain_table
from .fault_program import Account, play_plan
from .faults import Fired, send_signal
from .plans import HANG_SECS, Expectation, FaultPlan

_ACCOUNTS = re.compile(" (?:failed|reported): ")
_ME = re.compile(r"\(rank \d+/\d+\)")  # who writes, at the end of a message
_RANKS = re.compile(r"\branks? (\d+(?:, \d+)*)")


@dataclass
class PlanResult:
    """What came of a plan.

    Attributes:
        plan: The plan.
        wrong: What did not hold; empty: the plan passed.
        stacks: Where the ranks were, if they hung.
        secs: How long it took.
    """

    plan: FaultPlan
    wrong: list[str]
    stacks: str = ""
    secs: float = 0.0


def run_plans(
    plans: Sequence[FaultPlan], on_result: Callable[[PlanResult], object] = lambda _: None
) -> list[PlanResult]:
    """Play plans. `on_result` is told of each."""
    if __name__ not in launch.PRELOADED:
        launch.PRELOADED.append(__name__)  # ranks would spend more time on importing it than on the plan
    results = []
    for plan in plans:
        results.append(run_plan(plan))
        on_result(results[-1])
    return results


def run_plan(plan: FaultPlan) -> PlanResult:
    """Play one plan in processes of its own, and compare what they saw with what must hold."""
    fired: list[Fired] = []

    def hear(news: Fired) -> None:
        fired.append(news)
        if plan.stopped_secs:
            timer = threading.Timer(plan.stopped_secs, _resume, [os.pidfd_open(news.pid)])
            timer.daemon = True
            timer.start()

    begin, accounts, wrong, stacks = time.monotonic(), [], [], ""
    with tempfile.TemporaryDirectory(prefix="deep_ep-") as folder, hearing_ranks(hear) as news:
        try:
            accounts = run_ranks(
                play_plan,
                plan.ranks,
                plan,
                news,
                folder,
                limit_secs=HANG_SECS,
                may_die=[plan.rank] if plan.is_deadly else (),
                env=plan.environment,
            )
        except RankFailed as error:
            wrong = [str(error)]
            stacks = "\n".join(f"{path.name}:\n{path.read_text()}" for path in sorted(Path(folder).iterdir()))
    if not fired:
        wrong.append("the fault never came")
    elif not wrong:
        wrong = verdict(plan, fired[0].at_secs, accounts)
    return PlanResult(plan, wrong, stacks, time.monotonic() - begin)


def _resume(pidfd: int) -> None:
    send_signal(pidfd, signal.SIGCONT)
    os.close(pidfd)


# What must hold ------------------------------------------------------------------------------------------------------


def verdict(plan: FaultPlan, fired_secs: float, accounts: Sequence[Account | None]) -> list[str]:
    """What does not hold.

    Args:
        plan: The plan that was played.
        fired_secs: When the fault came.
        accounts: What each rank saw; None: its process has ended.
    """
    wrong = []
    culprit = accounts[plan.rank]
    if plan.is_deadly and culprit is not None:
        wrong.append(f"rank {plan.rank} outlived the signal")
    wrong += [f"rank {rank} has ended" for rank in plan.survivors if accounts[rank] is None]
    seen = {rank: account for rank, account in enumerate(accounts) if account is not None}
    for rank, account in seen.items():
        wrong += [f"rank {rank}: {text}" for text in account.wrong]
        if account.left:
            wrong.append(f"rank {rank} still holds {', '.join(account.left)}")
        if account.error and account.refusal not in ("", "EPClosed"):
            wrong.append(f"rank {rank}: a call after the failure ended with {account.refusal}, not EPClosed")
    others = {rank: account for rank, account in seen.items() if rank != plan.rank}
    raised = [rank for rank, account in others.items() if account.error]
    has_stopped = culprit is None or culprit.ending != "completed"
    wrong += _wrong_numbers(plan.expectation, others, raised, has_stopped)
    for rank in raised:
        wrong += _wrong_error(rank, others[rank], plan, fired_secs)
    if plan.signal == "STOP" and plan.expectation.raises == "all" and culprit is not None:
        # It learns what the others think of it.
        wrong += _wrong_error(plan.rank, culprit, plan, None)
    return wrong


def _wrong_numbers(
    expectation: Expectation, others: dict[int, Account], raised: list[int], has_stopped: bool
) -> list[str]:
    """Whether the right ranks raised."""
    must_raise = expectation.raises == "all" or (expectation.raises == "alike" and has_stopped)
    silent = [rank for rank in others if rank not in raised]
    if must_raise and silent:
        return [f"ranks {silent} did not raise"]
    if not must_raise and raised:
        return [f"rank {rank} must not raise: {others[rank].error}" for rank in raised]
    return []


def _wrong_error(rank: int, account: Account, plan: FaultPlan, fired_secs: float | None) -> list[str]:
    """What is wrong with the error of a rank: its kind, the ranks that it names, its time."""
    if not account.error:
        return [f"rank {rank} did not raise"]
    wrong = []
    named = accused(account.error)
    if named != {plan.rank}:
        wrong.append(f"rank {rank} blames {sorted(named) or 'nobody'}, not {plan.rank}: {account.error}")
    elif not account.is_ep_error:
        wrong.append(f"rank {rank} raised no EPError: {account.error}")
    late = account.error_secs - fired_secs if fired_secs is not None else 0.0
    if late > plan.expectation.within_secs:
        wrong.append(f"rank {rank} raised after {late:.1f} s, not within {plan.expectation.within_secs:g} s")
    return wrong


def accused(text: str) -> set[int]:
    """The ranks that a message blames: those that its innermost account names.

    A message may pass on that of another rank: `rank 1 reported: dispatch (call 3): the process of rank 2 has ended`
    blames rank 2, and `rank 1 failed: MemoryError` blames rank 1.
    """
    for account in reversed(_ACCOUNTS.split(_ME.sub("", text))):
        ranks = {int(number) for found in _RANKS.findall(account) for number in found.split(", ")}
        if ranks:
            return ranks
    return set()


# What is told --------------------------------------------------------------------------------------------------------


def show_results(console: Console, results: Sequence[PlanResult]) -> None:
    """Print plans by kind, the failures with the lines that replay them, and the verdict."""
    table = plain_table(header_style="bold")
    table.add_column("fault", no_wrap=True, min_width=28)
    for header in ("plans", "passed"):
        table.add_column(header, justify="right", no_wrap=True)
    for kind, (num_plans, num_passed) in _by_kind(results).items():
        table.add_row(kind, str(num_plans), str(num_passed))
    console.print(table)
    for result in results:
        if result.wrong:
            console.print()
            console.print("\n".join([*result.wrong, result.stacks.rstrip()]).rstrip(), markup=False, soft_wrap=True)
            console.print(f"Replay: {result.plan.command}", markup=False, soft_wrap=True)
    num_failed = sum(bool(result.wrong) for result in results)
    word = "[bold red]not OK[/]" if num_failed else "[bold green]OK[/]"
    secs = sum(result.secs for result in results)
    console.print(f"\n{word}: {counted(len(results), 'fault plan')}, {num_failed} failed, {secs:.1f} s")


def as_json(results: Sequence[PlanResult]) -> str:
    """The same as JSON."""
    content: dict[str, Any] = {
        "num_plans": len(results),
        "num_failed": sum(bool(result.wrong) for result in results),
        "secs": round(sum(result.secs for result in results), 1),
        "kinds": [
            {"kind": kind, "num_plans": num_plans, "num_passed": num_passed}
            for kind, (num_plans, num_passed) in _by_kind(results).items()
        ],
        "failures": [
            {"plan": str(one.plan), "replay": one.plan.command, "wrong": one.wrong, "stacks": one.stacks}
            for one in results
            if one.wrong
        ],
    }
    return json.dumps(content, indent=1)


def _by_kind(results: Sequence[PlanResult]) -> dict[str, tuple[int, int]]:
    """Plans of each kind, and those that passed."""
    all_plans = Counter(result.plan.kind for result in results)
    passed = Counter(result.plan.kind for result in results if not result.wrong)
    return {kind: (all_plans[kind], passed[kind]) for kind in sorted(all_plans)}
