"""`python -m deep_ep doctor`: what this machine has, what would be used, and whether two ranks can talk.

Findings are collected first, as plain data (`report`), and then shown as tables (`show`) or as JSON. `checks` looks at
software, machine and settings, `shared_memory` at what transport `shm` stands on, `hardware` at GPUs and networks and
how far apart they are; `transports` asks each of them whether it would be used, and `round_trip` runs two ranks.
Nothing here raises for what is missing: that is a finding, with what to do about it.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from ... import __version__
from ..terminal import Terminal, only_on_terminal
from .checks import look_at_machine, look_at_names, look_at_software, look_at_variables
from .hardware import look_at_hardware
from .report import PROBLEM, DoctorReport
from .round_trip import try_round_trip
from .shared_memory import look_at_shared_memory
from .show import show_report
from .transports import look_at_transports


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of `doctor`."""
    parser.add_argument("--env", action="store_true", help="list all environment variables, with their meaning")
    parser.add_argument("--json", action="store_true", help="print one JSON object, for machines")


def run(args: argparse.Namespace) -> int:
    """Look at everything and print it.

    Returns:
        0 if the round trip worked, and all variables can be read, else 1.
    """
    if args.json:
        report = examine()
        print(json.dumps(asdict(report), indent=2))
    else:
        console = Terminal(highlight=False)
        with only_on_terminal(console, console.status("looking around, and starting two ranks")):
            report = examine()
        show_report(console, report, args.env)
    return 0 if report.ok else 1


def examine() -> DoctorReport:
    """Look at everything. The round trip takes a few seconds, most of it for starting processes."""
    findings = [*look_at_software(), *look_at_machine(), *look_at_shared_memory(), *look_at_names()]
    gpus, nics = look_at_hardware()
    transports, round_trip, variables = look_at_transports(), try_round_trip(), look_at_variables()
    ok = round_trip.ok and not any(one.status == PROBLEM for one in variables)
    return DoctorReport(__version__, ok, findings, gpus, nics, variables, transports, round_trip)
