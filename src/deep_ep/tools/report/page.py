"""The page: one HTML file with everything inside."""

from __future__ import annotations

import html
import json
import time
from importlib import resources
from typing import Any

from ... import __version__
from ..terminal import counted
from .compare import comparison
from .experts import experts, load_data
from .figures import Figures
from .load import LoadedTrace
from .matrices import traffic, waiting
from .parts import section, table
from .text import NOTHING, bytes_text, share_text, time_text
from .timeline import timeline


def render(
    trace: LoadedTrace, figures: Figures, most_slices: int, other: tuple[LoadedTrace, Figures] | None = None
) -> str:
    """The page as HTML.

    Args:
        trace: What was read.
        figures: What was counted in it.
        most_slices: Of the timeline.
        other: Another run, which it is compared with.
    """
    drawn = timeline(trace, figures, most_slices)
    data = {"timeline": drawn, "load": load_data(figures.load)}
    body = [
        _header(trace, figures),
        _notes(trace, figures),
        _tiles(figures),
        "" if other is None else comparison(figures, other[1], *_names(trace, other[0])),
        f'<div class="pair">{traffic(figures)}{waiting(figures)}</div>',
        experts(figures.load),
        _timeline_section(drawn),
        _kinds(figures),
        _ranks(trace, figures),
    ]
    text = _script_json(data)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        f"<title>deep_ep: {html.escape(trace.path.name)}</title>\n<style>\n{_asset('page.css')}</style>\n</head>\n"
        f"<body>\n<main>\n{''.join(body)}</main>\n"
        f'<script type="application/json" id="data">{text}</script>\n<script>\n{_asset("page.js")}</script>\n'
        "</body>\n</html>\n"
    )


def _names(trace: LoadedTrace, other: LoadedTrace) -> tuple[str, str]:
    """What two runs are called: their folders, as much of the paths as tells them apart."""
    if trace.path.name != other.path.name:
        return trace.path.name, other.path.name
    return str(trace.path), str(other.path)


def _script_json(data: Any) -> str:
    """JSON that can stand inside a script element, whatever texts it holds.

    The element ends at the first `</script`, `<!--` begins a comment in it, and U+2028 and U+2029 once ended lines of
    scripts. None of these characters can be outside of a text in JSON, and inside of one their escapes mean the same.
    """
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def _header(trace: LoadedTrace, figures: Figures) -> str:
    facts = trace.files[0].facts
    begun = min(file.facts.get("begun", 0.0) for file in trace.files)
    hosts = {file.facts.get("host") for file in trace.files}
    parts = [
        time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(begun)),
        counted(figures.num_ranks, "rank") + f" on {counted(len(hosts), 'host')}",
        *(str(facts[name]) for name in ("device", "transport") if name in facts),
    ]
    error_ns = max(file.facts.get("clock_error_ns", 0) for file in trace.files)
    if error_ns:
        parts.append(f"clocks agree within {time_text(error_ns / 1e3)}")
    said = " · ".join(html.escape(part) for part in parts)
    return f"<header><h1>What the ranks did</h1><p>{said}</p></header>\n"


def _notes(trace: LoadedTrace, figures: Figures) -> str:
    notes = list(trace.problems)
    for one in figures.ranks.values():
        notes += [f"Rank {one.rank}: {error}" for error in one.errors[:3]]
        if one.is_open:
            notes.append(f"Rank {one.rank} was inside a call when the trace ended.")
    if figures.num_calls == 0:
        notes.append("No call was recorded.")
    items = "".join(f"<li>{html.escape(note)}</li>" for note in notes)
    return f'<ul class="notes">{items}</ul>\n' if notes else ""


def _tiles(figures: Figures) -> str:
    call_us = sum(one.call_us for one in figures.ranks.values())
    wait_us = sum(one.wait_us for one in figures.ranks.values())
    tiles = [
        (f"{len(figures.ranks)}", "ranks", f"of {figures.num_ranks}"),
        (f"{figures.num_calls:,}", "calls", "of each rank"),
        (bytes_text(figures.num_bytes), "moved", "rows of all ranks"),
        (time_text(figures.span_us), "time span", "first call to last"),
        (share_text(wait_us, call_us), "waiting", "of the time in calls"),
    ]
    if figures.peak is not None:
        tiles.append((f"{figures.peak:.2f}x", "busiest expert", "over the mean of all"))
    cells = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{name}</span><small>{remark}</small></div>'
        for value, name, remark in tiles
    )
    return f'<section class="tiles">{cells}</section>\n'


def _timeline_section(drawn: dict[str, Any]) -> str:
    if not drawn["all"]:
        return section("Timeline", "", "<p class=verdict>There is nothing to show.</p>")
    said = "drag to move, Ctrl + wheel or the buttons to zoom, double-click to see all"
    if drawn["shown"] < drawn["all"]:
        said += (
            f"; the last {drawn['shown']:,} of {drawn['all']:,} slices, from {time_text(drawn['since'])} on "
            "(--slices shows more, --perfetto has all)"
        )
    legend = "".join(f'<span class="k{index}">{kind}</span>' for index, kind in enumerate(drawn["kinds"]))
    buttons = "".join(
        f'<button type="button" data-do="{what}" aria-label="{label}">{sign}</button>'
        for what, label, sign in (("out", "zoom out", "-"), ("in", "zoom in", "+"), ("fit", "see all", "all"))
    )
    return section(
        "Timeline",
        said,
        f'<div class="bar"><div class="legend">{legend}</div><div class="buttons">{buttons}</div></div>'
        '<div class="timeline"><canvas id="timeline" tabindex="0" role="img" aria-label="timeline of all ranks">'
        '</canvas><div id="tip" hidden></div></div>',
        wide=True,
    )


def _kinds(figures: Figures) -> str:
    rows = [
        (
            kind.name,
            f"{len(kind.durations_us):,}",
            time_text(kind.median_us),
            time_text(max(kind.durations_us)),
            share_text(kind.wait_us, sum(kind.durations_us)),
            bytes_text(kind.num_bytes) if kind.num_bytes else NOTHING,
        )
        for kind in figures.kinds
    ]
    return section(
        "Calls",
        "of all ranks; bytes are rows sent (received, where only that is known)",
        table(("call", "times", "median", "longest", "waiting", "bytes"), rows),
    )


def _ranks(trace: LoadedTrace, figures: Figures) -> str:
    arenas = {file.rank: file.facts.get("stats", {}).get("arena", {}).get("committed") for file in trace.files}
    rows = []
    for rank, one in sorted(figures.ranks.items()):
        arena = arenas.get(rank)
        rows.append(
            (
                f"rank {rank}",
                f"{one.num_calls:,}",
                time_text(one.call_us),
                time_text(one.wait_us),
                share_text(one.wait_us, one.call_us),
                bytes_text(sum(figures.bytes_to[rank])),
                bytes_text(sum(row[rank] for row in figures.bytes_to)),
                bytes_text(arena) if arena else NOTHING,
            )
        )
    head = ("rank", "calls", "in calls", "waiting", "share", "sent", "received", "arena")
    foot = f"<footer>deep_ep {__version__} · python -m deep_ep report</footer>"
    return section("Ranks", "arena: window memory at the end", table(head, rows)) + foot
