"""`python -m deep_ep doctor`: what this machine has, what would be used, and whether two ranks can talk.

Findings are collected first, as plain data, and then shown as tables or as JSON. Nothing here raises for what is
missing: that is a finding, with what to do about it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from rich.text import Text

from . import __version__, env, reference
from .buffers.legacy import Buffer
from .errors import EPError
from .launch import run_ranks
from .transport import choose
from .transport.memory import available_bytes
from .transport.words import word_type

_LEAST_MEMORY_BYTES = 1 << 30
_OK, _NOTE, _PROBLEM = "ok", "note", "problem"
_STYLES = {_OK: "green", _NOTE: "yellow", _PROBLEM: "bold red"}

# The round trip: small, and odd enough that a mistake in rows, ids or weights shows.
_NUM_RANKS, _NUM_TOKENS, _HIDDEN, _NUM_EXPERTS, _NUM_TOPK, _NUM_REPEATS = 2, 33, 72, 6, 3, 5


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        name: What.
        value: What was seen.
        status: `ok`; `note`, where something optional is missing; `problem`, where something needed is.
        advice: What to do about it, or nothing.
    """

    name: str
    value: str
    status: str = _OK
    advice: str = ""


@dataclass(frozen=True)
class VariableReport:
    """An environment variable: whether it is set, and the value in force."""

    name: str
    is_set: bool
    value: str
    status: str
    help: str


@dataclass(frozen=True)
class TransportReport:
    """Which transport a group of that size would get (None: none), and why."""

    num_ranks: int
    name: str | None
    reason: str


@dataclass(frozen=True)
class RoundTrip:
    """How the round trip went. Times are None where it did not."""

    ok: bool
    num_ranks: int
    total_secs: float
    dispatch_ms: float | None = None
    combine_ms: float | None = None
    problem: str = ""
    advice: str = ""


@dataclass(frozen=True)
class Report:
    """All that doctor found."""

    version: str
    ok: bool
    findings: list[Finding]
    variables: list[VariableReport]
    transports: list[TransportReport]
    round_trip: RoundTrip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `doctor`."""
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")


def run(args: argparse.Namespace) -> int:
    """Look at everything and print it.

    Returns:
        0 if the round trip worked, else 1.
    """
    if args.json:
        report = examine()
        print(json.dumps(asdict(report), indent=2))
    else:
        console = Console(highlight=False)
        # Only a terminal shows it while it works; elsewhere it would be a line of no use.
        with (
            console.status("looking around, and starting two ranks")
            if console.is_terminal
            else contextlib.nullcontext()
        ):
            report = examine()
        _show(console, report)
    return 0 if report.ok else 1


def examine() -> Report:
    """Look at everything. The round trip takes a few seconds, most of it for starting processes."""
    findings = [*_software(), *_machine(), *_shared_memory()]
    variables = [_variable(variable) for variable in env.VARIABLES]
    transports = [_transport(num_ranks) for num_ranks in (1, 2)]
    round_trip = _round_trip()
    return Report(__version__, round_trip.ok, findings, variables, transports, round_trip)


# Software and machine ------------------------------------------------------------------------------------------------


def _software() -> Iterator[Finding]:
    yield Finding("Python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("torch", torch.__version__)
    if dist.is_available() and dist.is_gloo_available():
        yield Finding("torch.distributed", "with gloo")
    else:
        advice = "`deep-ep demo` and this round trip need gloo: install a torch build that has it"
        yield Finding("torch.distributed", "without gloo", _PROBLEM, advice)
    yield _optional_package("triton", "Only GPU kernels need it; CPU ranks do not. pip install triton")
    yield _optional_package("matplotlib", "Only `demo --plot` needs it. pip install deepep-python[plot]")


def _optional_package(name: str, advice: str) -> Finding:
    try:
        importlib.import_module(name)
        return Finding(name, importlib.metadata.version(name))
    except ImportError as error:
        reason = "not installed" if isinstance(error, ModuleNotFoundError) and error.name == name else str(error)
        return Finding(name, reason, _NOTE, advice)
    except Exception as error:  # a broken installation may raise anything; it is a finding all the same
        return Finding(name, f"cannot be imported: {error}", _NOTE, advice)


def _machine() -> Iterator[Finding]:
    yield _cuda()
    advice = "Linux is needed for more than one rank; a group of one rank works" if sys.platform != "linux" else ""
    yield Finding("platform", platform.platform(), _PROBLEM if advice else _OK, advice)
    num_cores, num_usable = os.cpu_count() or 1, _num_usable_cores()
    few = "" if num_usable > 1 else "Ranks take turns on one core: results are right, times mean little"
    yield Finding("CPU cores", f"{num_usable} usable of {num_cores}", _NOTE if few else _OK, few)
    num_bytes = available_bytes()
    little = num_bytes < _LEAST_MEMORY_BYTES
    advice = "Received tensors may not fit. Use fewer ranks or tokens, or raise the container's memory limit"
    value = f"{num_bytes / 1e9:.1f} GB available" if num_bytes < 1 << 60 else "unknown"
    yield Finding("memory", value, _NOTE if little else _OK, advice if little else "")


def _cuda() -> Finding:
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
        return Finding("CUDA", f"{len(names)} visible: {', '.join(sorted(set(names)))}")
    if torch.version.cuda is None:
        return Finding("CUDA", "this torch is built without it", _NOTE, "CPU ranks work. GPUs need torch's CUDA build")
    advice = "CPU ranks work. For GPUs check `nvidia-smi`, CUDA_VISIBLE_DEVICES and the container's device options"
    return Finding("CUDA", f"torch has CUDA {torch.version.cuda}, but no GPU is visible", _NOTE, advice)


def _num_usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# Shared memory: what transport `shm` stands on -----------------------------------------------------------------------

# A process like a peer: it makes a memfd, says which, and lives until its input ends.
_PEER = "import os, sys; print(os.memfd_create('deep_ep'), flush=True); sys.stdin.read()"


def _shared_memory() -> Iterator[Finding]:
    yield _words()
    if not hasattr(os, "memfd_create"):
        advice = "More than one rank needs it: Linux, and a Python built against glibc 2.27 or musl 1.2 or later"
        yield Finding("memfd", "this Python has no os.memfd_create", _PROBLEM, advice)
        return
    try:
        os.close(os.memfd_create("deep_ep"))
    except OSError as error:
        advice = "More than one rank needs it. Allow memfd_create in the container's seccomp profile"
        yield Finding("memfd", f"refused: {error.strerror}", _PROBLEM, advice)
        return
    yield Finding("memfd", "available")
    yield from _peer_access()


def _words() -> Finding:
    name = "atomic words"
    try:
        word_type()
    except EPError as error:
        return Finding(name, str(error), _PROBLEM, "More than one rank needs it. Install libatomic1")
    return Finding(name, f"available on {platform.machine()}")


def _peer_access() -> Iterator[Finding]:
    """What a rank may do to a peer: open its memory through /proc, and notice its end by a pidfd."""
    with subprocess.Popen([sys.executable, "-c", _PEER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as peer:
        try:
            assert peer.stdout is not None
            yield _proc_access(peer.pid, int(peer.stdout.readline()))
            yield _pidfd(peer.pid)
        except ValueError:
            yield Finding(
                "/proc/<pid>/fd",
                "could not be tried: a second Python did not start",
                _PROBLEM,
                "Run it by hand: python -c 'print(1)'",
            )
        finally:
            peer.kill()


def _proc_access(pid: int, fd: int) -> Finding:
    name = "/proc/<pid>/fd"
    try:
        os.close(os.open(f"/proc/{pid}/fd/{fd}", os.O_RDWR | os.O_CLOEXEC))
        return Finding(name, "a peer's memory can be opened")
    except OSError as error:
        advice = (
            "Ranks map each other's memory through it. Mount /proc without hidepid, run all ranks as one user, "
            "and in one process namespace (docker: --pid=host or one container)"
        )
        return Finding(name, f"refused: {error.strerror}", _PROBLEM, advice)


def _pidfd(pid: int) -> Finding:
    try:
        os.close(os.pidfd_open(pid))
        return Finding("pidfd", "available: a killed rank is noticed at once")
    except (OSError, AttributeError) as error:
        advice = f"A killed rank is noticed only after {env.TIMEOUT_SECS.name}. Linux 5.3 or later has pidfds"
        return Finding("pidfd", f"not available ({error})", _NOTE, advice)


# Variables, transports, round trip -----------------------------------------------------------------------------------


def _variable(variable: env.Variable) -> VariableReport:
    try:
        value, status = str(variable.get()), _OK
    except ValueError as error:
        value, status = str(error), _PROBLEM
    return VariableReport(variable.name, variable.name in _settings(), value, status, variable.help)


def _transport(num_ranks: int) -> TransportReport:
    try:
        choice = choose(num_ranks)
    except (EPError, ValueError) as error:
        return TransportReport(num_ranks, None, str(error))
    return TransportReport(num_ranks, choice.name, choice.reason)


def _round_trip() -> RoundTrip:
    start = time.perf_counter()
    try:
        # A forkserver that runs already has older settings: hand these over.
        results = run_ranks(_round_trip_rank, _NUM_RANKS, limit_secs=60.0, env=_settings())
    except Exception as error:  # whatever it is, it is what the user came to see
        problem = next((line.strip() for line in reversed(str(error).splitlines()) if line.strip()), repr(error))
        return RoundTrip(False, _NUM_RANKS, time.perf_counter() - start, problem=problem, advice=_round_trip_advice())
    total_secs = time.perf_counter() - start
    wrong = [f"rank {rank}: {result['wrong']}" for rank, result in enumerate(results) if result["wrong"]]
    dispatch_ms, combine_ms = (max(result[name] for result in results) for name in ("dispatch_ms", "combine_ms"))
    if wrong:
        advice = "This is a bug in deep_ep: please report it with the output of `python -m deep_ep doctor --json`"
        return RoundTrip(False, _NUM_RANKS, total_secs, dispatch_ms, combine_ms, "; ".join(wrong), advice)
    return RoundTrip(True, _NUM_RANKS, total_secs, dispatch_ms, combine_ms)


def _settings() -> dict[str, str]:
    return {variable.name: text for variable in env.VARIABLES if (text := os.environ.get(variable.name, "").strip())}


def _round_trip_advice() -> str:
    if names := list(_settings()):
        return f"Try without your settings: env {' '.join(f'-u {name}' for name in names)} python -m deep_ep doctor"
    return "See the problems above; where there are none, please report this with `python -m deep_ep doctor --json`"


def _round_trip_rank(rank: int, num_ranks: int) -> dict[str, Any]:
    """Dispatch and combine on one rank, compared bit by bit with the oracle, which needs no communication."""
    xs, idxs, weights = zip(*(_inputs(peer) for peer in range(num_ranks)), strict=True)
    layouts = [reference.layout(idx, _NUM_EXPERTS, num_ranks) for idx in idxs]
    masks = [layout.is_token_in_rank for layout in layouts]
    dispatched = reference.dispatch(xs, masks, topk_idx=idxs, topk_weights=weights, num_experts=_NUM_EXPERTS)
    combined = reference.combine([part.recv_x for part in dispatched], masks)

    buffer = Buffer(dist.group.WORLD, 1 << 20, explicitly_destroy=True)
    try:
        per_rank, _, per_expert, mask, _ = buffer.get_dispatch_layout(idxs[rank], _NUM_EXPERTS)
        for _ in range(_NUM_REPEATS):  # the last counts: the first ones also set memory aside
            start = time.perf_counter()
            recv_x, recv_idx, recv_weights, _, handle, _ = buffer.dispatch(
                xs[rank],
                num_tokens_per_rank=per_rank,
                num_tokens_per_expert=per_expert,
                is_token_in_rank=mask,
                topk_idx=idxs[rank],
                topk_weights=weights[rank],
            )
            middle = time.perf_counter()
            assert isinstance(recv_x, torch.Tensor)
            assert handle is not None
            output, _, _ = buffer.combine(recv_x, handle)
            end = time.perf_counter()
    finally:
        buffer.destroy()
    pairs = {
        "received rows": (recv_x, dispatched[rank].recv_x),
        "received expert ids": (recv_idx, dispatched[rank].recv_topk_idx),
        "received weights": (recv_weights, dispatched[rank].recv_topk_weights),
        "combined rows": (output, combined[rank].combined_x),
    }
    wrong = [f"{name} are wrong" for name, (seen, expected) in pairs.items() if not _is_same(seen, expected)]
    return {"wrong": ", ".join(wrong), "dispatch_ms": (middle - start) * 1e3, "combine_ms": (end - middle) * 1e3}


def _inputs(rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [T, H] BF16, expert ids [T, K] int64 and weights [T, K] float32 of a rank, the same in every process."""
    random = torch.Generator().manual_seed(rank)
    x = torch.randn(_NUM_TOKENS, _HIDDEN, generator=random).bfloat16()
    topk_weights, topk_idx = torch.rand(_NUM_TOKENS, _NUM_EXPERTS, generator=random).topk(_NUM_TOPK)
    return x, topk_idx, topk_weights


def _is_same(seen: object, expected: object) -> bool:
    return isinstance(seen, torch.Tensor) and isinstance(expected, torch.Tensor) and torch.equal(seen, expected)


# What is seen --------------------------------------------------------------------------------------------------------


def _show(console: Console, report: Report) -> None:
    console.print(f"[bold]deep_ep {report.version} doctor[/]")
    console.print("\n[bold]What is here[/]")
    console.print(_findings_table(report.findings))
    console.print("\n[bold]Environment variables[/]  [dim](with the value in force)[/]")
    console.print(_variables_table(report.variables))
    console.print("\n[bold]Transport that would be chosen[/]")
    console.print(_transports_table(report.transports))
    console.print("\n[bold]Round trip[/]  [dim](dispatch and combine between two processes, checked bit by bit)[/]")
    console.print(_round_trip_text(report.round_trip))
    _show_advice(console, report)


def _table(*columns: str) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
    for style in columns[:-1]:
        table.add_column(style=style, no_wrap=True)
    table.add_column(style=columns[-1], overflow="fold")
    return table


def _mark(status: str) -> Text:
    return Text(status, style=_STYLES[status])


def _findings_table(findings: list[Finding]) -> Table:
    table = _table("", "bold", "")
    for finding in findings:
        table.add_row(_mark(finding.status), finding.name, Text(finding.value))
    return table


def _variables_table(variables: list[VariableReport]) -> Table:
    table = _table("", "bold", "")
    for variable in variables:
        state = Text("set", style="cyan") if variable.is_set else Text("default", style="dim")
        text = Text(variable.value or "(empty)", style=_STYLES[_PROBLEM] if variable.status == _PROBLEM else "")
        if variable.status == _OK:
            text.append(f"  {variable.help}", style="dim")
        table.add_row(state, variable.name, text)
    return table


def _transports_table(transports: list[TransportReport]) -> Table:
    table = _table("", "bold", "")
    for transport in transports:
        ranks = f"{transport.num_ranks} rank{'s' if transport.num_ranks > 1 else ''}"
        name = Text(transport.name or "none", style="" if transport.name else _STYLES[_PROBLEM])
        table.add_row(ranks, name, Text(transport.reason))
    return table


def _round_trip_text(trip: RoundTrip) -> Text:
    text = Text.assemble(_mark(_OK if trip.ok else _PROBLEM), "  ")
    if trip.problem:
        return text.append(trip.problem)
    return text.append(
        f"dispatch {trip.dispatch_ms:.2f} ms, combine {trip.combine_ms:.2f} ms; "
        f"{trip.total_secs:.1f} s with starting the processes"
    )


def _show_advice(console: Console, report: Report) -> None:
    advice = [(finding.status, finding.name, finding.advice) for finding in report.findings if finding.advice]
    if report.round_trip.advice:
        advice.append((_PROBLEM, "round trip", report.round_trip.advice))
    if not advice:
        return
    console.print("\n[bold]What to do[/]")
    table = _table("", "bold", "")
    for status, name, text in sorted(advice, key=lambda item: item[0] != _PROBLEM):
        table.add_row(_mark(status), name, Text(text))
    console.print(table)
