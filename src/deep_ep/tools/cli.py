"""The command line: `python -m deep_ep demo | doctor | bench | soak | report | plan`.

Exit status 0: all is well. 1: a check failed (wrong results, no round trip, an error in a soak). 2: it could not be
run. 130: Ctrl-C. 143: it was terminated.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from .. import __version__
from ..errors import EPError

_PROGRAM = "deep-ep"


class _Parser(argparse.ArgumentParser):
    """A parser that raises `ValueError` for bad options, so that every error takes the same way out."""

    def error(self, message: str) -> NoReturn:
        """Raise instead of printing the usage and exiting."""
        raise ValueError(f"{self.prog}: {message}. See `{self.prog} --help`")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: Arguments; default those of the process.

    Returns:
        The exit status.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # an arrow must not end a command on a terminal that has none
    try:
        parser = _parser(arguments)
        args = parser.parse_args(arguments)
        if args.command is None:
            parser.print_help()
            return 0
        with _leaving_when_terminated():
            status = _run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `| head` has seen enough
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:  # no space, no permission
        _drop_output()
        print(_one_line(error), file=sys.stderr)
        return 2
    except (EPError, ValueError) as error:
        print(_one_line(error), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except _Terminated:
        return 128 + signal.SIGTERM


def _drop_output() -> None:
    """Write what is still to be written nowhere: Python would fail once more, at its end."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, where there are some and the help does not say them already."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or "(default" in (action.help or ""):
            return action.help
        return super()._get_help_string(action)


class _Terminated(BaseException):
    """Somebody wants this process to end."""


@contextmanager
def _leaving_when_terminated() -> Iterator[None]:
    """Have SIGTERM end a command the way that Ctrl-C does: ranks, hosts and daemons that it started end with it."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_: object) -> None:
        raise _Terminated

    usual = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, usual)


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    """The parser of all commands. What a command imports is imported only where it is the one called."""
    parser = _Parser(prog=_PROGRAM, description="Expert-parallel dispatch and combine for Mixture-of-Experts models.")
    parser.add_argument("--version", action="version", version=f"deep_ep {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="command")
    formatter = _Formatter
    demo = commands.add_parser("demo", help="see one MoE layer run over several CPU ranks", formatter_class=formatter)
    doctor = commands.add_parser("doctor", help="see what this machine has, and whether two ranks can talk")
    bench = commands.add_parser("bench", help="measure dispatch and combine properly", formatter_class=formatter)
    soak = commands.add_parser(
        "soak", help="random calls against the oracle, with delays and stops", formatter_class=formatter
    )
    report = commands.add_parser(
        "report", help="turn a trace (DEEP_EP_TRACE) into a page, and a file for Perfetto", formatter_class=formatter
    )
    plan = commands.add_parser(
        "plan", help="what calls and layers will cost on some cluster, before it is there", formatter_class=formatter
    )
    if "plan" in arguments:
        from .plan import cli as plan_command

        plan_command.add_arguments(plan)
    if "demo" in arguments:
        from . import demo as demo_command

        demo_command.add_arguments(demo)
    if "doctor" in arguments:
        from . import doctor as doctor_command

        doctor_command.add_arguments(doctor)
    if "bench" in arguments:
        from .bench import cli as bench_command

        bench_command.add_arguments(bench)
    if "soak" in arguments:
        from . import soak as soak_command

        soak_command.add_arguments(soak)
    if "report" in arguments:
        from . import report as report_command

        report_command.add_arguments(report)
    return parser


def _run(args: argparse.Namespace) -> int:
    if args.command == "demo":
        from . import demo

        return demo.run(args)
    if args.command == "doctor":
        from . import doctor

        return doctor.run(args)
    if args.command == "soak":
        from . import soak

        return soak.run(args)
    if args.command == "report":
        from . import report

        return report.run(args)
    if args.command == "plan":
        from .plan import cli as plan

        return plan.run(args)
    from .bench import cli as bench

    return bench.run(args)


def _one_line(error: Exception) -> str:
    """An error as one line. Of a rank's traceback: which rank, and the last line, which says what happened."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return f"{_PROGRAM}: {type(error).__name__}"
    said = lines[0] if len(lines) == 1 else f"{lines[0].split(': Traceback')[0]}: {lines[-1]}"
    return said if said.startswith(_PROGRAM) else f"{_PROGRAM}: {said}"
