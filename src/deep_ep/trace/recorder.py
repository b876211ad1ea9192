"""What a rank records: calls and what happens in them, as slices on tracks."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

from ..reaper import Closing
from .clock import Clock
from .file import TraceFile

# Kinds of slices.
CALL, SEND, WAIT, RECEIVE, NETWORK = "call", "send", "wait", "receive", "network"

# Tracks of a rank, in the order in which they are shown: callers' threads, communication, the device, links.
_FIRST_CALLER, COMM, DEVICE, _FIRST_LINK = 1, 1000, 1001, 1002
# Between slices that touch: their times become floats, and a reader's rounding must not make them overlap.
_SEAM_NS = 10
_BUFFER_STRIDE = 100_000  # between the numbers of a rank's buffers, each of which is a process of the trace


def to_track(rank: int) -> int:
    """The track of what the system takes for a rank of another node."""
    return _FIRST_LINK + 2 * rank


def from_track(rank: int) -> int:
    """The track of what comes from a rank of another node."""
    return _FIRST_LINK + 2 * rank + 1


class Slice:
    """Something that begins and ends, as a context. What is added to it meanwhile is shown with it."""

    def __init__(self, trace: Trace, name: str, kind: str, track: int, args: dict[str, Any]):
        self._trace = trace
        self._name, self._kind, self._track = name, kind, track
        self._args = args
        self._begin_ns = 0

    def add(self, **args: Any) -> None:
        """Add facts to the slice."""
        self._args.update(args)

    def waited(self, secs: Mapping[int, float], first_rank: int = 0) -> None:
        """Add how long it waited for each rank, and which came last.

        Args:
            secs: Seconds waited for each rank that was not there yet.
            first_rank: To be added to the ranks.
        """
        if secs:
            most = max(secs.values())
            self.add(
                awaited_us={str(first_rank + rank): round(value * 1e6, 1) for rank, value in secs.items()},
                last=[first_rank + rank for rank, value in secs.items() if value == most],
            )

    def __enter__(self) -> Slice:
        self._begin_ns = time.monotonic_ns()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: object) -> None:
        if error is not None:
            self._args["error"] = _text_of(error)
        self._trace.record(self._name, self._kind, self._begin_ns, time.monotonic_ns(), self._track, self._args)


class _NoSlice(Slice):
    """What there is where nothing is recorded."""

    def __init__(self) -> None:
        pass

    def add(self, **args: Any) -> None:
        """Do nothing: there is no trace."""

    def waited(self, secs: Mapping[int, float], first_rank: int = 0) -> None:
        """Do nothing: there is no trace."""

    def __enter__(self) -> Slice:
        return self

    def __exit__(self, *error: object) -> None:
        pass


NO_SLICE = _NoSlice()


class Trace:
    """What one rank records of one buffer.

    Args:
        file: Where it goes.
        rank: This rank.
        clock: How its clock stands to that of rank 0.
        number: Of the buffer, among those that this process traces.
        facts: What a reader should know.
    """

    def __init__(self, file: TraceFile, rank: int, clock: Clock, number: int, facts: Mapping[str, Any]):
        self._file = file
        self._offset_ns = clock.offset_ns
        self._process = 1 + rank + number * _BUFFER_STRIDE  # readers take process 0 for the system's
        self._named: set[int] = set()
        self._callers: dict[int, int] = {}
        self._noted: dict[str, Any] = {}
        self._is_calling = False
        self.describe(rank=rank, clock_offset_ns=clock.offset_ns, clock_error_ns=clock.error_ns, **facts)
        name = f"rank {rank}" if number == 0 else f"rank {rank}, buffer {number + 1}"
        self._tell("process_name", 0, name=name)
        self._tell("process_sort_index", 0, sort_index=self._process)
        self._closing = Closing(self, lambda _: file.close())  # at the latest when the process ends

    def describe(self, **facts: Any) -> None:
        """Write facts about the buffer into the trace."""
        self._tell("deep_ep", 0, **facts)
        self._file.flush()

    # Calls, on the comm stream ---------------------------------------------------------------------------------------

    def begin_call(self, operation: str, **args: Any) -> None:
        """A call, or half of one, begins. It is in the file at once, so that one sees where a rank hangs."""
        self.end_call()
        self._is_calling = True
        self._name_track(COMM)
        self._add("B", COMM, time.monotonic_ns(), name=operation, cat=CALL, args=args)
        self._file.flush()

    def note(self, **args: Any) -> None:
        """Something to show with the call when it ends."""
        self._noted.update(args)

    def end_call(self, error: BaseException | None = None, **args: Any) -> None:
        """The call ends, if there is one."""
        if not self._is_calling:
            return
        noted, self._noted, self._is_calling = self._noted, {}, False
        if error is not None:
            noted["error"] = _text_of(error)
        self._add("E", COMM, time.monotonic_ns(), args={**noted, **args})
        self._file.flush()

    # Slices ----------------------------------------------------------------------------------------------------------

    def slice(self, name: str, kind: str, **args: Any) -> Slice:
        """A slice around a block of a call."""
        return Slice(self, name, kind, COMM, args)

    def caller_slice(self, name: str, kind: str = CALL) -> Slice:
        """A slice of the thread that calls."""
        return Slice(self, name, kind, self._caller_track(), {})

    def record(self, name: str, kind: str, begin_ns: int, end_ns: int, track: int, args: Mapping[str, Any]) -> None:
        """A slice that has ended, in this host's time."""
        self._name_track(track)
        dur = max(0, end_ns - begin_ns - _SEAM_NS) / 1000
        self._add("X", track, begin_ns, name=name, cat=kind, dur=dur, args=dict(args))
        if track < COMM:
            self._file.flush()  # of a caller: perhaps its last, in a process that ends without a word

    def close(self, stats: Mapping[str, Any] | None = None) -> None:
        """End the trace, with what the buffer has counted. A second call does nothing."""
        if self._closing.detach() is not None:
            self.end_call()
            if stats is not None:
                self.describe(stats=dict(stats))
            self._file.close()

    # Inside ----------------------------------------------------------------------------------------------------------

    def _add(self, phase: str, track: int, at_ns: int, **event: Any) -> None:
        at = (at_ns + self._offset_ns) / 1000  # microseconds, as the format has them
        self._file.add({"ph": phase, "pid": self._process, "tid": track, "ts": at, **event})

    def _tell(self, what: str, track: int, **args: Any) -> None:
        self._file.add({"ph": "M", "pid": self._process, "tid": track, "name": what, "args": args})

    def _name_track(self, track: int) -> None:
        if track not in self._named:
            self._named.add(track)
            self._tell("thread_name", track, name=self._track_name(track))
            self._tell("thread_sort_index", track, sort_index=track)

    def _track_name(self, track: int) -> str:
        if track < COMM:
            return "caller" if track == _FIRST_CALLER else f"caller {track}"
        if track in (COMM, DEVICE):
            return "communication" if track == COMM else "device"
        rank, is_from = divmod(track - _FIRST_LINK, 2)
        return f"network from rank {rank}" if is_from else f"network to rank {rank}"

    def _caller_track(self) -> int:
        thread = threading.get_ident()
        return self._callers.setdefault(thread, min(_FIRST_CALLER + len(self._callers), COMM - 1))


def _text_of(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:500]
