"""What doctor found, as plain data. `--json` prints it as it is."""

from __future__ import annotations

from dataclasses import dataclass

OK, NOTE, PROBLEM = "ok", "note", "problem"


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
    status: str = OK
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
    num_nodes: int = 1


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
