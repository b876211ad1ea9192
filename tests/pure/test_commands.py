"""Commands refuse options that make no sense in one sentence, before they start anything, and end well in pipes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deep_ep.launch import run_ranks
from deep_ep.tools import cli

pytestmark = pytest.mark.cpu_only


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("plan --ranks-per-node 0", "--ranks-per-node must be at least 1, got 0"),
        ("plan --network-gbps -5", "--network-gbps must be greater than 0, and finite, got -5.0"),
        ("plan --link-gbps nan", "--link-gbps must be greater than 0, and finite, got nan"),
        ("plan --zipf nan", "--zipf must be at least 0, and finite, got nan"),
        ("plan --sizes 8 0", "--sizes must be at least 1, got 0"),
        ("plan --system nobody", "there is no system 'nobody'. There are DeepEP, "),
        ("plan --results x.json", "--results needs --calibrate"),
        ("plan -o x.json", "-o needs --fit or --calibrate"),
        ("soak --minutes inf", "--minutes must be greater than 0, and finite, got inf"),
        ("soak --plan x", "--plan must be a signal and pairs"),
        ("soak --calls 1 --json .", ". is a folder, and must be a file to write"),
        ("bench normal --ranks 0", "--ranks must be at least 1, got 0"),
        ("bench normal --json .", ". is a folder, and must be a file to write"),
        ("bench normal --save /etc/hostname", "File exists"),
        ("bench layer --rounds 0", "--rounds must be at least 1, got 0"),
    ],
)
def test_options_that_make_no_sense(
    arguments: str, said: str, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(arguments.split()) == 2
    seen = capsys.readouterr()
    assert said in seen.err
    assert len(seen.err.splitlines()) == 1
    assert not seen.out


def test_help_shows_defaults_once(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        cli.main(["plan", "--help"])
    text = " ".join(capsys.readouterr().out.split())
    assert "(default: None)" not in text
    assert "(default: 8 to 2048) (default" not in text
    assert "(default: deepseek-v3)" in text


def run_plan(stdout: int, **variables: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "deep_ep", "plan", "--sizes", "8"]
    return subprocess.Popen(command, stdout=stdout, stderr=subprocess.PIPE, env={**os.environ, **variables})


def test_a_reader_that_has_seen_enough() -> None:
    reading, writing = os.pipe()
    process = run_plan(writing)
    os.close(reading)
    os.close(writing)
    assert process.communicate(timeout=60)[1] == b""
    assert process.returncode == 141


def test_a_disk_that_is_full() -> None:
    with open("/dev/full", "wb") as full:
        process = run_plan(full.fileno())
        errors = process.communicate(timeout=60)[1].decode()
    assert process.returncode == 2
    assert errors == "deep-ep: [Errno 28] No space left on device\n"


def test_a_terminal_without_arrows(monkeypatch: pytest.MonkeyPatch) -> None:
    out = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", out)
    cli.main([])
    print("\u2192", flush=True)
    assert out.buffer.getvalue().endswith(b"?\n")


@pytest.mark.parametrize(
    ("arguments", "options", "kind", "said"),
    [
        ((0,), {}, ValueError, "`num_ranks` must be at least 1, got 0"),
        ((2.0,), {}, TypeError, "`num_ranks` must be an int, got float"),
        ((True,), {}, TypeError, "`num_ranks` must be an int, got bool"),
        ((2,), {"limit_secs": "5"}, TypeError, "`limit_secs` must be a number of seconds, got str"),
        ((2,), {"env": {"A": 1}}, TypeError, "`env` must have strings for values, `A` is int"),
    ],
)
def test_run_ranks_checks_its_arguments(arguments: tuple, options: dict, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=f"run_ranks: {said}"):
        run_ranks(max, *arguments, **options)
