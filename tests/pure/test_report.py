"""`deep-ep report`: reading, counting and showing made-up traces."""

from __future__ import annotations

import gzip
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from deep_ep.tools.cli import main
from deep_ep.tools.report import make_page
from deep_ep.tools.report.figures import count
from deep_ep.tools.report.load import load
from deep_ep.tools.report.page import render
from deep_ep.tools.report.text import bytes_text, digits, share_text, time_text
from deep_ep.tools.report.timeline import timeline

COMM = 1000


def facts(rank: int, num_ranks: int = 2, **more: Any) -> dict[str, Any]:
    args = {"rank": rank, "num_ranks": num_ranks, "buffer": "b", "process": f"p{rank}", "begun": 1.0, **more}
    return {"ph": "M", "pid": rank, "tid": 0, "name": "deep_ep", "args": args}


def begin(rank: int, at_us: float, name: str = "dispatch", **args: Any) -> dict[str, Any]:
    return {"ph": "B", "pid": rank, "tid": COMM, "ts": at_us, "name": name, "cat": "call", "args": args}


def end(rank: int, at_us: float, **args: Any) -> dict[str, Any]:
    return {"ph": "E", "pid": rank, "tid": COMM, "ts": at_us, "args": args}


def wait(rank: int, at_us: float, dur_us: float, last: list[int]) -> dict[str, Any]:
    args = {"last": last, "awaited_us": {str(peer): dur_us for peer in last}}
    return {
        "ph": "X",
        "pid": rank,
        "tid": COMM,
        "ts": at_us,
        "dur": dur_us,
        "name": "wait: ready",
        "cat": "wait",
        "args": args,
    }


def write(folder: Path, rank: int, events: list[dict[str, Any]], name: str = "") -> Path:
    path = folder / (name or f"rank{rank}.json")
    path.write_text("[\n" + ",\n".join(json.dumps(event) for event in events) + "\n]\n")
    return path


def write_two(folder: Path) -> None:
    """Two ranks, one dispatch: 0 sends 1 and 2 rows, 1 sends 3 and 4; 1 is late."""
    rows = {"row_bytes": 10, "path": "direct"}
    write(
        folder,
        0,
        [
            facts(0),
            begin(0, 100.0, call=1),
            wait(0, 110.0, 50.0, [1]),
            end(0, 200.0, rows_to=[1, 2], rows_from=[1, 3], experts=[5, 0], **rows),
        ],
    )
    write(
        folder,
        1,
        [
            facts(1),
            begin(1, 150.0, call=1),
            wait(1, 160.0, 5.0, [0]),
            end(1, 190.0, rows_to=[3, 4], rows_from=[2, 4], experts=[1, 6], **rows),
        ],
    )


def test_figures(tmp_path):
    write_two(tmp_path)
    figures = count(load(tmp_path))
    assert figures.rows_to == [[1, 2], [3, 4]]
    assert figures.bytes_to == [[10, 20], [30, 40]]
    assert figures.waited_us == [[0, 50], [5, 0]]
    assert (figures.num_calls, figures.begin_us, figures.span_us) == (1, 100, 100)
    assert figures.load is not None
    assert figures.load.totals == [5, 0, 1, 6]
    assert figures.load.peak == 2.0
    assert [(kind.name, kind.durations_us, kind.wait_us, kind.num_bytes) for kind in figures.kinds] == [
        ("dispatch, direct", [100.0, 40.0], 55.0, 100.0)
    ]


def test_a_wait_for_several_is_shared_by_the_last(tmp_path):
    write(tmp_path, 0, [facts(0, 4), begin(0, 0.0), wait(0, 1.0, 30.0, [1, 3]), end(0, 40.0)])
    assert count(load(tmp_path)).waited_us[0] == [0, 15, 0, 15]


def test_a_rank_without_file_is_seen_by_its_peers(tmp_path):
    write_two(tmp_path)
    (tmp_path / "rank1.json").unlink()
    trace = load(tmp_path)
    assert any("no file of rank 1" in problem for problem in trace.problems)
    assert count(trace).rows_to == [[1, 2], [3, 0]]
    assert "no file of rank 1" in render(trace, count(trace), 100)


def test_rows_that_only_the_receiver_knows(tmp_path):
    write(tmp_path, 0, [facts(0), begin(0, 0.0), end(0, 9.0, rows_from=[4, 6], row_bytes=2)])
    write(tmp_path, 1, [facts(1), begin(1, 0.0), end(1, 9.0, rows_from=[1, 0], row_bytes=2)])
    assert count(load(tmp_path)).rows_to == [[4, 1], [6, 0]]


def test_halves_of_low_latency_calls_are_one_call(tmp_path):
    events = [
        begin(0, 0.0, "low-latency dispatch send"),
        end(0, 1.0),
        begin(0, 2.0, "low-latency dispatch receive"),
        end(0, 3.0),
    ]
    write(tmp_path, 0, [facts(0, 1), *events])
    assert count(load(tmp_path)).num_calls == 1


# Files ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cut", [1, 3, 40])
def test_a_file_that_ends_in_the_middle(tmp_path, cut: int):
    write_two(tmp_path)
    text = (tmp_path / "rank1.json").read_text()
    (tmp_path / "rank1.json").write_text(text[: len(text) - 3 - cut])  # the bracket, and part of the last event
    trace = load(tmp_path)
    assert any("rank 1" in problem for problem in trace.problems)
    call = trace.files[1].slices[0]
    assert call.is_open
    assert call.end_us == 200.0, "until the end of the trace"
    assert "has not ended" in render(trace, count(trace), 100)


def test_files_of_another_run_are_left_out(tmp_path):
    write_two(tmp_path)
    old = facts(7, 8, buffer="old", process="old", begun=0.5)
    write(tmp_path, 7, [old, begin(7, 1.0), end(7, 2.0)])
    also = facts(0, 2, buffer="second", begun=2.0)  # of the same process as rank 0
    write(tmp_path, 0, [also, begin(0, 300.0), end(0, 301.0)], "rank0-2.json")
    trace = load(tmp_path)
    assert [file.path.name for file in trace.files] == ["rank0-2.json", "rank0.json", "rank1.json"]
    assert any("rank7.json" in problem for problem in trace.problems)


def test_broken_files_are_named(tmp_path):
    write_two(tmp_path)
    (tmp_path / "rank2.json").write_text("no trace at all")
    (tmp_path / "rank3.json").write_bytes(b"\xff\xfe\x00")
    write(tmp_path, 4, [facts(4), {"ph": "X", "pid": 4, "tid": COMM, "ts": "soon", "name": "?"}])
    problems = " ".join(load(tmp_path).problems)
    for name in ("rank2.json", "rank3.json", "rank4.json"):
        assert name in problems


@pytest.mark.parametrize("case", ["missing", "empty folder", "only broken", "empty file"])
def test_no_trace(tmp_path, capsys, case: str):
    path = tmp_path / "t"
    if case != "missing":
        path.mkdir()
    if case == "only broken":
        (path / "rank0.json").write_text("[{]")
    if case == "empty file":
        (path / "rank0.json").write_text("")
    assert main(["report", str(path), "-o", str(tmp_path / "page.html")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert str(path) in said
    assert not (tmp_path / "page.html").exists()


def test_bad_options(tmp_path, capsys):
    write_two(tmp_path)
    assert main(["report", str(tmp_path), "-o", str(tmp_path / "nowhere" / "page.html")]) == 2
    assert main(["report", str(tmp_path), "--slices", "0"]) == 2
    assert main(["report", str(tmp_path), "-o", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("report:") == 3


# The page ------------------------------------------------------------------------------------------------------------


class _Page(HTMLParser):
    """Checks that elements are closed in order, and collects what would be fetched."""

    VOID = ("meta", "br", "img", "link", "input")

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.fetched: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.fetched += [value or "" for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def check(page: str) -> None:
    parser = _Page()
    parser.feed(page)
    assert parser.open == []
    assert parser.fetched == []
    assert not re.search(r"https?://|@import|url\(", page), "one file, and nothing from elsewhere"


def test_the_page_holds_everything(tmp_path, capsys):
    write_two(tmp_path)
    output, merged = tmp_path / "page.html", tmp_path / "all.json"
    assert main(["report", str(tmp_path), "-o", str(output), "--perfetto", str(merged)]) == 0
    assert "2 of 2 ranks, 1 call" in capsys.readouterr().out
    page = output.read_text()
    check(page)
    for words in (
        "Who sent what to whom",
        "Who waited for whom",
        "Load of the experts",
        "Timeline",
        "rank 0 → rank 1: 20 B, 2 rows",
        "rank 0 waited 50.0 µs for rank 1",
        "Rank 1 came last most",
    ):
        assert words in page
    events = json.loads(merged.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1}
    assert sum(event["ph"] == "B" for event in events) == sum(event["ph"] == "E" for event in events) == 2
    assert main(["report", str(tmp_path), "-o", str(output), "--perfetto", str(tmp_path / "all.json.gz")]) == 0
    assert json.loads(gzip.decompress((tmp_path / "all.json.gz").read_bytes()))["traceEvents"] == events


def test_two_runs_are_compared(tmp_path, capsys):
    for name, factor in (("slow", 2.0), ("fast", 1.0)):
        folder = tmp_path / name
        folder.mkdir()
        for rank in range(2):
            write(folder, rank, [facts(rank), begin(rank, 0.0), end(rank, 1000.0 * factor, path="direct")])
    write(tmp_path / "slow", 1, [facts(1), begin(1, 0.0, "combine"), end(1, 4000.0)])
    page = tmp_path / "page.html"
    assert main(["report", str(tmp_path / "slow"), "--against", str(tmp_path / "fast"), "-o", str(page)]) == 0
    text = page.read_text()
    check(text)
    section = text[text.index("Against another run") :]
    for cells in (
        ("of the run", "slow", "fast", "change"),
        ("dispatch, direct", "1 / 2", "2.00 ms", "1.00 ms", "2.00x"),
        ("combine", "1 / -", "4.00 ms", "-", "-"),
    ):
        assert re.search("".join(f"<t[dh]>{cell}</t[dh]>" for cell in cells), section), cells
    assert "Against another run" not in make_page(tmp_path / "slow")
    with pytest.raises(ValueError, match="none"):
        make_page(tmp_path / "slow", against=tmp_path / "none")


def test_figures_as_json(tmp_path, capsys, monkeypatch):
    write_two(tmp_path)
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(tmp_path), "--against", str(tmp_path), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["rows_to"] == [[1, 2], [3, 4]]
    assert told["calls"][0]["times"] == 2
    assert told["against"]["rows_to"] == told["rows_to"]
    assert not (tmp_path / "report.html").exists()  # nobody asked for a page
    assert main(["report", str(tmp_path), "--json", "-o", "page.html"]) == 0
    check((tmp_path / "page.html").read_text())


def test_a_notebook_shows_the_page_in_a_frame(tmp_path):
    write_two(tmp_path)
    frame = make_page(tmp_path)._repr_html_()
    assert frame.startswith('<iframe srcdoc="&lt;!doctype html&gt;')
    assert frame.count("<") == 2  # the page itself is escaped


def test_a_page_of_nothing(tmp_path):
    write(tmp_path, 0, [facts(0, 1)])
    trace = load(tmp_path)
    page = render(trace, count(trace), 100)
    check(page)
    assert "No call was recorded" in page
    assert "There is nothing to show" in page


def test_names_cannot_break_the_page(tmp_path):
    evil = "</script><b>&"
    events = [facts(0, 1, transport=evil), begin(0, 0.0, evil), end(0, 1.0, error=evil, path=evil)]
    write(tmp_path, 0, events)
    trace = load(tmp_path)
    page = render(trace, count(trace), 100)
    check(page)
    assert page.count("</script>") == 2, "of the two that are meant"


def test_many_slices_are_cut_and_it_is_said(tmp_path):
    events = [facts(0, 1)]
    for number in range(50):
        events += [begin(0, 100.0 * number), end(0, 100.0 * number + 50)]
    write(tmp_path, 0, events)
    trace = load(tmp_path)
    figures = count(trace)
    drawn = timeline(trace, figures, 20)
    assert (drawn["shown"], drawn["all"], drawn["since"]) == (20, 50, 3000.0)
    assert "the last 20 of 50 slices" in render(trace, figures, 20)
    assert figures.num_calls == 50, "only the picture is cut"


def test_many_ranks_and_experts(tmp_path):
    num_ranks, num_local = 20, 40
    rows = {"row_bytes": 8, "rows_to": list(range(num_ranks)), "path": "direct"}
    for rank in range(num_ranks):
        events = [facts(rank, num_ranks)]
        for number in range(300):
            events += [
                begin(rank, 10.0 * number, call=number),
                end(rank, 10.0 * number + 5, experts=[number] * num_local, **rows),
            ]
        write(tmp_path, rank, events)
    trace = load(tmp_path)
    page = render(trace, count(trace), 1000)
    check(page)
    assert "800 experts" in page
    assert page.count("<rect") <= 512
    assert len(page) < 2e6


def test_numbers():
    assert [digits(value) for value in (0, 0.0421, 1.254, 31.42, 5120.4, 99.97)] == [
        "0",
        "0.04",
        "1.25",
        "31.4",
        "5,120",
        "100",
    ]
    assert [bytes_text(value) for value in (0, 999, 1500, 3.98e6, 2e12)] == [
        "0 B",
        "999 B",
        "1.50 kB",
        "3.98 MB",
        "2.00 TB",
    ]
    assert [time_text(value) for value in (0, 12.34, 1500, 2.5e6, 3e9)] == [
        "0 µs",
        "12.3 µs",
        "1.50 ms",
        "2.50 s",
        "3,000 s",
    ]
    assert (share_text(1, 4), share_text(1, 0)) == ("25 %", "-")
