"""`deep-ep report` of files that are damaged, or made to do harm: one sentence or a page, and never a traceback."""

from __future__ import annotations

import copy
import json
import re
from pathlib import Path
from typing import Any

import pytest

from deep_ep.tools.cli import main
from deep_ep.tools.report.valid import MOST_RANKS

COMM = 1000
EVENTS: list[dict[str, Any]] = [
    {
        "ph": "M",
        "pid": 1,
        "tid": 0,
        "name": "deep_ep",
        "args": {
            "rank": 0,
            "num_ranks": 2,
            "buffer": "b",
            "process": "p",
            "host": "h",
            "begun": 1.0,
            "clock_error_ns": 3,
            "transport": "shm",
            "stats": {"arena": {"committed": 4096}},
        },
    },
    {"ph": "M", "pid": 1, "tid": COMM, "name": "thread_name", "args": {"name": "comm"}},
    {
        "ph": "B",
        "pid": 1,
        "tid": COMM,
        "ts": 1.0,
        "name": "dispatch",
        "cat": "call",
        "args": {"call": 1, "tokens": 3, "hidden": 8},
    },
    {
        "ph": "X",
        "pid": 1,
        "tid": COMM,
        "ts": 2.0,
        "dur": 1.0,
        "name": "wait: ready",
        "cat": "wait",
        "args": {"last": [1], "awaited_us": {"1": 1.0}},
    },
    {
        "ph": "X",
        "pid": 1,
        "tid": COMM,
        "ts": 2.5,
        "dur": 1.0,
        "name": "put rows",
        "cat": "send",
        "args": {"rows": [1, 2], "bytes": 10},
    },
    {
        "ph": "E",
        "pid": 1,
        "tid": COMM,
        "ts": 5.0,
        "args": {
            "rows_to": [1, 2],
            "rows_from": [1, 1],
            "row_bytes": 16,
            "experts": [1, 2],
            "path": "direct",
            "rounds": 1,
            "error": "none",
        },
    },
]
DEEP = "[" * 100_000 + "]" * 100_000
HOSTILE = [
    None,
    -1,
    10**40,
    1e308,
    float("nan"),
    "</script><script>alert(1)</script>",
    "[/] \udcff \u2028",
    ["x"],
    [[1], [2]],
    {"arena": 3},
]


def run(folder: Path, text: str | bytes, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit status, and the page or what was said."""
    folder.mkdir(exist_ok=True)
    path, page = folder / "rank0.json", folder / "page.html"
    page.unlink(missing_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    status = main(["report", str(folder), "-o", str(page), "--perfetto", str(folder / "all.json")])
    told = capsys.readouterr()
    if status == 0:
        json.loads((folder / "all.json").read_text(), parse_constant=lambda name: pytest.fail(name))
        return status, page.read_text()
    assert status == 2
    assert told.err.count("\n") == 1
    assert told.err.startswith("deep-ep: ")
    assert not page.exists()
    return status, told.err


def places(value: Any, at: tuple = ()) -> list[tuple]:
    """The way to everything inside a value."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [way for key, one in inner for way in ((*at, key), *places(one, (*at, key)))]


def changed(way: tuple, value: Any) -> list[dict[str, Any]]:
    events = copy.deepcopy(EVENTS)
    holder: Any = events
    for key in way[:-1]:
        holder = holder[key]
    holder[way[-1]] = value
    return events


def test_the_events_are_a_trace(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, page = run(tmp_path / "t", json.dumps(EVENTS), capsys)
    assert status == 0
    assert "dispatch, direct" in page


@pytest.mark.parametrize("value", HOSTILE, ids=lambda value: ascii(value)[:20])
def test_any_value_anywhere(tmp_path: Path, capsys: pytest.CaptureFixture[str], value: Any) -> None:
    for way in places(EVENTS):
        status, said = run(tmp_path / "t", json.dumps(changed(way, value)), capsys)
        if status == 0:
            assert said.count("<script") == said.count("</script>") == 2, (way, value)
            data = re.search(r'id="data">(.*?)</script>', said, re.S)
            assert data is not None
            assert not set("<>&\u2028\u2029") & set(data[1]), (way, value)
            json.loads(data[1], parse_constant=lambda name: pytest.fail(name))


def test_any_field_may_be_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for way in places(EVENTS):
        events = copy.deepcopy(EVENTS)
        holder: Any = events
        for key in way[:-1]:
            holder = holder[key]
        del holder[way[-1]]
        run(tmp_path / "t", json.dumps(events), capsys)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[",
        "{}",
        "null",
        "7",
        b"\x00\x01\x7fELF\xff\xfe",
        DEEP,
        f'[{{"ph": "X", "args": {DEEP}}}]',
        "[" + json.dumps(EVENTS[0])[:-3],
        f'[{{"ph": "X", "ts": {"9" * 5000}}}]',
    ],
    ids=lambda text: ascii(text)[:20],
)
def test_damaged_files(tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes) -> None:
    status, said = run(tmp_path / "t", text, capsys)
    assert status == 2
    assert "rank0.json" in said


@pytest.mark.parametrize("num_bytes", [200, 300, 450, 600])
def test_a_file_that_is_cut_is_shown_as_far_as_it_goes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], num_bytes: int
) -> None:
    text = "[\n" + ",\n".join(json.dumps(event) for event in EVENTS)
    status, said = run(tmp_path / "t", text[:num_bytes], capsys)
    assert status == 0 or "cut off before it began" in said


def test_too_many_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, said = run(tmp_path / "t", json.dumps(changed((0, "args", "num_ranks"), 10**9)), capsys)
    assert status == 2
    assert f"1 to {MOST_RANKS}" in said
