"""Reading the files of a trace: those of one run, also where some are missing or end in the middle."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ...errors import named
from ...trace import COMM
from .valid import Event, check_event, check_facts

_PATTERN = "rank*.json"


@dataclass
class LoadedSlice:
    """Something that began and ended.

    Attributes:
        name: What it is.
        kind: `call`, `send`, `wait`, `receive` or `network`.
        track: Where it is shown.
        begin_us: When, by the clock of rank 0.
        dur_us: How long.
        args: What was said of it.
        is_open: It has no end in the trace: its rank was killed, or hangs.
    """

    name: str
    kind: str
    track: int
    begin_us: float
    dur_us: float
    args: dict[str, Any]
    is_open: bool = False

    @property
    def end_us(self) -> float:
        """When it ended."""
        return self.begin_us + self.dur_us


@dataclass
class RankFile:
    """The file of one rank's buffer.

    Attributes:
        path: Its path.
        facts: What it says of itself.
        events: All events, as they are in the file.
        is_whole: Its writer has closed it.
        slices: By their begin.
        tracks: Names of tracks.
    """

    path: Path
    facts: dict[str, Any]
    events: list[Event]
    is_whole: bool
    slices: list[LoadedSlice] = field(default_factory=list)
    tracks: dict[int, str] = field(default_factory=dict)

    @property
    def rank(self) -> int:
        """Whose file it is."""
        return int(self.facts["rank"])


@dataclass
class LoadedTrace:
    """All that was read.

    Attributes:
        path: As it was given.
        files: By rank.
        problems: What is missing, and why; sentences.
    """

    path: Path
    files: list[RankFile]
    problems: list[str]


def load(path: Path) -> LoadedTrace:
    """Read a folder of files, or one file.

    Raises:
        ValueError: There is nothing to read.
    """
    if not path.exists():
        raise ValueError(f"report: there is no {path}. Run the program with DEEP_EP_TRACE={path}, then report on it")
    paths = sorted(path.glob(_PATTERN)) if path.is_dir() else [path]
    if not paths:
        raise ValueError(f"report: {path} has no files {_PATTERN}. Run the program with DEEP_EP_TRACE={path}")
    files, problems = [], []
    for one in paths:
        try:
            files.append(read_file(one))
        except ValueError as error:
            problems.append(str(error))
    if not files:
        raise ValueError(f"report: nothing in {path} is a trace: {'; '.join(problems)}")
    files, left_out = _newest_run(files)
    if left_out:
        problems.append(f"Left out, because they are of another run: {', '.join(one.path.name for one in left_out)}.")
    files.sort(key=lambda one: (one.rank, one.path.name))
    problems += _missing(files) + _cut(files)
    _close_open(files)
    return LoadedTrace(path, files, problems)


def read_file(path: Path) -> RankFile:
    """Read one file.

    Raises:
        ValueError: It is not a trace of ours; the message is a sentence.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"{path.name} cannot be read ({error.strerror}).") from None
    except UnicodeDecodeError:
        raise ValueError(f"{path.name} cannot be read (it is not text).") from None
    events, is_whole = _parse(text)
    facts: dict[str, Any] = {}
    for event in events:
        if event.get("ph") == "M" and event.get("name") == "deep_ep":
            args = event.get("args")
            facts.update(args if isinstance(args, dict) else {})
    if type(facts.get("rank")) is not int or type(facts.get("num_ranks")) is not int:  # not even a bool, which is one
        raise ValueError(f"{path.name} is not a trace of deep_ep, or was cut off before it began.")
    file = RankFile(path, facts, events, is_whole)
    try:
        check_facts(facts)
        for event in events:
            check_event(event)
        file.slices = sorted(_slices_of(file), key=lambda one: (one.begin_us, -one.dur_us))
    except KeyError as error:
        raise ValueError(f"{path.name} has an event that makes no sense (it has no {error}).") from None
    except ValueError as error:
        raise ValueError(f"{path.name} has an event that makes no sense ({error}).") from None
    return file


def _parse(text: str) -> tuple[list[Event], bool]:
    """The events, and whether the array is closed. An event that was cut off is left out."""
    try:
        events = _read_json(text)
        return ([one for one in events if isinstance(one, dict)] if isinstance(events, list) else []), True
    except (ValueError, RecursionError):
        pass
    events = []
    for line in text.split("\n"):  # not `splitlines`: a text may hold other ends of lines
        try:
            event = _read_json(line.strip().rstrip(","))
        except (ValueError, RecursionError):
            continue  # the bracket, half an event, or nested so deeply that it is none
        if isinstance(event, dict):
            events.append(event)
    return events, False


def _read_json(text: str) -> Any:
    """JSON alone: what Python reads beside it (NaN, Infinity) is nothing, since no other reader knows it."""
    return json.loads(text, parse_constant=lambda _: None)


def _slices_of(file: RankFile) -> list[LoadedSlice]:
    slices: list[LoadedSlice] = []
    open_slices: dict[int, list[LoadedSlice]] = {}
    for event in file.events:
        phase, track = event.get("ph"), event.get("tid", 0)
        if phase == "M" and event.get("name") == "thread_name":
            file.tracks[track] = str(event.get("args", {}).get("name", track))
        elif phase in ("X", "B"):
            name, kind = str(event.get("name", "")), str(event.get("cat", ""))
            dur_us = float(event.get("dur", 0.0))
            one = LoadedSlice(name, kind, track, float(event["ts"]), dur_us, event.get("args", {}), phase == "B")
            slices.append(one)
            if phase == "B":
                open_slices.setdefault(track, []).append(one)
        elif phase == "E" and open_slices.get(track):
            one = open_slices[track].pop()
            one.dur_us, one.is_open = float(event["ts"]) - one.begin_us, False
            one.args = {**one.args, **event.get("args", {})}
    return slices


def _newest_run(files: list[RankFile]) -> tuple[list[RankFile], list[RankFile]]:
    """Those of the run that began last, and the others. Files belong together by a buffer or by a process."""
    groups: list[tuple[set[str], list[RankFile]]] = []
    for file in files:
        marks = {f"{name} {file.facts.get(name)}" for name in ("buffer", "process")}
        members = [file]
        others = []
        for group in groups:
            if group[0] & marks:
                marks |= group[0]
                members += group[1]
            else:
                others.append(group)
        groups = [*others, (marks, members)]
    newest = max(groups, key=lambda group: max(file.facts.get("begun", 0.0) for file in group[1]))[1]
    return newest, [file for _, group in groups if group is not newest for file in group]


def _missing(files: list[RankFile]) -> list[str]:
    num_ranks = max(file.facts["num_ranks"] for file in files)
    missing = sorted(set(range(num_ranks)) - {file.rank for file in files})
    if not missing:
        return []
    return [f"There is no file of {named(missing)}: what they sent is shown as far as others received it."]


def _cut(files: list[RankFile]) -> list[str]:
    cut = sorted({file.rank for file in files if not file.is_whole})
    if not cut:
        return []
    verb = "was" if len(cut) == 1 else "were"
    return [f"Not closed {verb} the trace of {named(cut)}: a process runs, was killed, or did not destroy its buffer."]


def _close_open(files: list[RankFile]) -> None:
    """What has no end lasts until the end of the trace."""
    end_us = max((one.end_us for file in files for one in file.slices), default=0.0)
    for file in files:
        for one in file.slices:
            if one.is_open:
                one.dur_us = max(0.0, end_us - one.begin_us)


def is_comm(one: LoadedSlice) -> bool:
    """Whether a slice belongs to communication itself, not to a caller or to a link."""
    return COMM <= one.track < COMM + 2
