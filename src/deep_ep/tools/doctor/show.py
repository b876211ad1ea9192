"""The report as tables."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from ..terminal import plain_table
from .hardware_tables import show_hardware
from .report import NOTE, OK, PROBLEM, DoctorReport, RoundTrip, TransportReport, VariableReport

_STYLES = {OK: "green", NOTE: "yellow", PROBLEM: "bold red"}


def show_report(console: Console, report: DoctorReport, has_variables: bool) -> None:
    """Print all of it, what to do first.

    Args:
        console: Where to.
        report: What was found.
        has_variables: Whether to list all environment variables, not only those that are set.
    """
    console.print(f"[bold]deep_ep {report.version} doctor[/]")
    _show_advice(console, report)
    console.print("\n[bold]Round trip[/]  [dim](dispatch and combine between two processes, checked bit by bit)[/]")
    console.print(_round_trip_text(report.round_trip))
    console.print("\n[bold]What is here[/]")
    console.print(_table((_mark(finding.status), finding.name, Text(finding.value)) for finding in report.findings))
    show_hardware(console, report.gpus, report.nics)
    console.print("\n[bold]Transports[/]  [dim](whether they would be used here)[/]")
    console.print(_table(map(_transport_row, report.transports)))
    _show_variables(console, report.variables, has_variables)


def _show_variables(console: Console, variables: Sequence[VariableReport], are_all_shown: bool) -> None:
    if are_all_shown:
        console.print("\n[bold]Environment variables[/]  [dim](with the value in force)[/]")
        for variable in variables:
            console.print(_variable_text(variable), soft_wrap=False)
            console.print(Padding(Text(variable.help, style="dim"), (0, 0, 0, 4)))
        return
    are_set = [variable for variable in variables if variable.is_set]
    console.print("\n[bold]Environment variables[/]  [dim](--env lists all)[/]")
    console.print(Text("none is set", style="dim") if not are_set else Text("\n").join(map(_variable_text, are_set)))


def _table(rows: Iterable[tuple[Any, Any, Any]]) -> Table:
    """State, name, and what there is to say, which may take more than one line."""
    table = plain_table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def _mark(status: str) -> Text:
    return Text(status, style=_STYLES[status])


def _variable_text(variable: VariableReport) -> Text:
    if variable.status == PROBLEM:
        return Text.assemble((variable.name, "bold"), "  ", (variable.value, _STYLES[PROBLEM]))
    state = "" if variable.is_set else "  (default)"
    return Text.assemble((variable.name, "bold"), f"={variable.value}", (state, "dim"))


def _transport_row(transport: TransportReport) -> tuple[Text, str, Text]:
    state = Text("used", style=_STYLES[OK]) if transport.is_used else Text("not", style="dim")
    said = f"{transport.serves}: {transport.reason}" if transport.reason else transport.serves
    return state, transport.name, Text(said)


def _round_trip_text(trip: RoundTrip) -> Text:
    text = Text.assemble(_mark(OK if trip.ok else PROBLEM), "  ")
    if trip.problem:
        return text.append(trip.problem)
    return text.append(
        f"dispatch {trip.dispatch_ms:.2f} ms, combine {trip.combine_ms:.2f} ms; "
        f"{trip.total_secs:.1f} s with starting the processes"
    )


def _show_advice(console: Console, report: DoctorReport) -> None:
    """Print what to do: problems first, then what could be better."""
    advice = [(finding.status, finding.name, finding.advice) for finding in report.findings if finding.advice]
    advice += [(PROBLEM, one.name, one.value) for one in report.variables if one.status == PROBLEM]
    if report.round_trip.advice:
        advice.append((PROBLEM, "round trip", report.round_trip.advice))
    if not advice:
        return
    advice.sort(key=lambda item: item[0] != PROBLEM)
    console.print("\n[bold]What to do[/]")
    console.print(_table((_mark(status), name, Text(text)) for status, name, text in advice))
