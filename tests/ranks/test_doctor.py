"""Doctor: what it finds here, and what it says where something is missing."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.distributed as dist

from deep_ep import env
from deep_ep.tools import cli
from deep_ep.tools.doctor import round_trip, shared_memory, transports

pytestmark = pytest.mark.cpu_only


@pytest.fixture(autouse=True)
def _no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in env.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)


def _json(capsys: pytest.CaptureFixture[str], status: int) -> dict[str, Any]:
    assert cli.main(["doctor", "--json"]) == status
    return json.loads(capsys.readouterr().out)


def _used(report: dict[str, Any]) -> list[str]:
    return [transport["name"] for transport in report["transports"] if transport["is_used"]]


def _reason(report: dict[str, Any], name: str) -> str:
    return next(transport["reason"] for transport in report["transports"] if transport["name"] == name)


def test_doctor_as_a_process() -> None:
    command = [sys.executable, "-m", "deep_ep", "doctor", "--env"]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "COLUMNS": "80", "DEEP_EP_HOTS": "a"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    for word in ("Python", "torch", "triton", "CUDA", "CPU cores", "memory", "memfd", "/proc/<pid>/fd", "pidfd"):
        assert word in done.stdout
    for variable in env.VARIABLES:
        assert variable.name in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout
    assert re.search(
        r"What to do\n(.*\n)*note +DEEP_EP_HOTS +Did you mean DEEP_EP_HOST\?(.*\n)*\nRound trip", done.stdout
    )
    assert "CPU ranks of one host" in done.stdout
    assert "ok  dispatch" in done.stdout


def test_json(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TIMEOUT_SECS", "30")
    report = _json(capsys, 0)
    assert report["ok"] is True
    assert report["round_trip"]["ok"] is True
    assert report["round_trip"]["dispatch_ms"] > 0
    assert _used(report) == ["solo", "shm", "message"]
    assert _reason(report, "symm") == "there is no CUDA device"
    assert "127.0.0.1" in _reason(report, "message")
    assert report["gpus"] == []
    assert all(nic["state"] for nic in report["nics"])
    assert {finding["status"] for finding in report["findings"]} <= {"ok", "note", "problem"}
    assert all(finding["advice"] for finding in report["findings"] if finding["status"] != "ok")
    variables = {variable["name"]: variable for variable in report["variables"]}
    assert set(variables) == {variable.name for variable in env.VARIABLES}
    assert variables["DEEP_EP_TIMEOUT_SECS"]["is_set"]
    assert variables["DEEP_EP_TIMEOUT_SECS"]["value"] == "30.0"
    assert not variables["DEEP_EP_TRANSPORT"]["is_set"]


def test_a_setting_that_prevents_the_round_trip(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_EP_TRANSPORT", "solo")
    report = _json(capsys, 1)
    assert not report["ok"]
    assert "it is for one rank" in report["round_trip"]["problem"]
    assert "env -u DEEP_EP_TRANSPORT" in report["round_trip"]["advice"]
    assert _used(report) == ["solo", "message"]
    assert "it is for one rank, the group has 2" in _reason(report, "shm")


@pytest.mark.parametrize("wish", ["message", "interpreted"])
def test_a_setting_that_asks_for_another_transport(wish: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEP_EP_TRANSPORT", wish)
    found = {transport.name: transport for transport in transports.look_at_transports()}
    assert not found["shm"].is_used
    assert found["shm"].reason == f"DEEP_EP_TRANSPORT={wish} asks for another"
    assert found["message"].is_used


def test_a_transport_is_asked_with_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of GPUs need one: doctor makes its own, and leaves none behind. A line adds another transport."""
    asked: list[dist.ProcessGroup | None] = []

    def why_not(group: dist.ProcessGroup | None) -> str:
        asked.append(group)
        return f"it needs more than {dist.get_world_size()} rank"

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(transports, "WAYS", (*transports.WAYS, transports.TransportProbe("new", "ranks", why_not)))
    found = transports.look_at_transports()[-1]
    assert asked[0] is not None
    assert not dist.is_initialized()
    assert (found.name, found.is_used, found.reason) == ("new", False, "it needs more than 1 rank")


def test_what_is_missing_is_shown_with_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DEEP_EP_ARENA_BYTES", "plenty")
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.setattr(round_trip, "run_ranks", _raise)
    assert cli.main(["doctor"]) == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "What to do problem DEEP_EP_ARENA_BYTES DEEP_EP_ARENA_BYTES: cannot read 'plenty'" in out
    assert "DEEP_EP_TIMEOUT_SECS" not in out  # it is not set: only --env lists it
    assert "pip install triton" in out
    assert "problem EPTransportError: no memory" in out


def _raise(*args: object, **kwargs: object) -> None:
    raise RuntimeError("rank 0/2: Traceback (most recent call last):\n  File ...\nEPTransportError: no memory\n")


def test_wrong_results_are_not_a_round_trip(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [{"wrong": "", "dispatch_ms": 1.0, "combine_ms": 2.0}, {"wrong": "combined rows are wrong"}]
    monkeypatch.setattr(round_trip, "run_ranks", lambda *_, **__: [answers[0], {**answers[0], **answers[1]}])
    trip = round_trip.try_round_trip()
    assert not trip.ok
    assert trip.problem == "rank 1: combined rows are wrong"
    assert "report it" in trip.advice


def test_comparison() -> None:
    rows = torch.ones(3, 4)
    assert round_trip._is_same(rows, rows.clone())
    assert not round_trip._is_same(rows, rows + 1)
    assert not round_trip._is_same(rows, None)


def test_refused_access_is_a_problem() -> None:
    finding = shared_memory._proc_access(os.getpid(), 10**6)
    assert finding.status == "problem"
    assert "one user" in finding.advice
    assert shared_memory._pidfd(2**22 + 1).status == "note"  # beyond the largest process id
