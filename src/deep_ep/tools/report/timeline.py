"""What the page's timeline draws: rows of slices, as few numbers as possible."""

from __future__ import annotations

from typing import Any

from ...trace import CALL, COMM, DEVICE, NETWORK, RECEIVE, SEND, WAIT
from .figures import Figures
from .load import LoadedSlice, LoadedTrace, RankFile
from .text import bytes_text, time_text

MOST_SLICES = 40_000

KINDS = ("dispatch", "combine", "other call", SEND, WAIT, RECEIVE, NETWORK, "error")


class Names:
    """Texts that occur often, by number."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}

    def number(self, text: str) -> int:
        """Of a text."""
        if text not in self._numbers:
            self._numbers[text] = len(self.texts)
            self.texts.append(text)
        return self._numbers[text]


def timeline(trace: LoadedTrace, figures: Figures, most_slices: int) -> dict[str, Any]:
    """Everything that is drawn; times are microseconds from the begin of the trace.

    Returns:
        `span`, `names`, `kinds`, `ranks` (a name and rows each; a row is a label and slices `[begin, duration, name,
        kind, remark]`), and `shown` of `all` slices from `since` on: where there are too many, the last are shown.
    """
    begins = sorted((one.begin_us for file in trace.files for one in file.slices), reverse=True)
    since_us = begins[most_slices - 1] if len(begins) > most_slices else figures.begin_us
    names, ranks, num_shown = Names(), [], 0
    for file in trace.files:
        rows: dict[tuple[int, int], list[list[float]]] = {}
        for one in file.slices:
            if one.begin_us >= since_us:
                packed = _packed(one, figures.begin_us, names)
                rows.setdefault((one.track, _depth(one)), []).append(packed)
                num_shown += 1
        ranks.append(
            {
                "name": _name_of(file, trace.files),
                "rows": [
                    {"label": _label(file, *place), "kind": _height(*place), "slices": rows[place]}
                    for place in sorted(rows)
                ],
            }
        )
    return {
        "span": figures.span_us,
        "since": since_us - figures.begin_us,
        "names": names.texts,
        "kinds": KINDS,
        "ranks": ranks,
        "shown": num_shown,
        "all": len(begins),
    }


def _name_of(file: RankFile, files: list[RankFile]) -> str:
    mates = [one for one in files if one.rank == file.rank]
    return f"rank {file.rank}" if len(mates) == 1 else f"rank {file.rank} ({mates.index(file) + 1})"


def _depth(one: LoadedSlice) -> int:
    """Calls are one row, what happens in them is another."""
    return int(one.kind != CALL)


def _label(file: RankFile, track: int, depth: int) -> str:
    if track in (COMM, DEVICE):
        return ("steps" if depth else "calls") if track == COMM else ("on the device" if depth else "device calls")
    label = file.tracks.get(track, str(track))
    return "host waits" if depth and track < COMM else label.replace("network ", "")


def _height(track: int, depth: int) -> str:
    if track > DEVICE:
        return "thin"
    return "thick" if depth else "plain"


def _packed(one: LoadedSlice, begin_us: float, names: Names) -> list[float]:
    remark = _remark(one)
    return [
        round(one.begin_us - begin_us, 1),
        round(one.dur_us, 1),
        names.number(one.name),
        _kind(one),
        names.number(remark) if remark else -1,
    ]


def _kind(one: LoadedSlice) -> int:
    if "error" in one.args or one.is_open:
        return KINDS.index("error")
    if one.kind == CALL:
        return next((index for index, name in enumerate(KINDS[:2]) if name in one.name), 2)
    return KINDS.index(one.kind) if one.kind in KINDS else 2


def _remark(one: LoadedSlice) -> str:
    """What a reader wants to know of a slice, in a few lines."""
    args, lines = one.args, []
    if one.is_open:
        lines.append("has not ended: killed, or hanging")
    if "error" in args:
        lines.append(str(args["error"]))
    if "call" in args:
        shape = f", {args['tokens']} tokens of {args['hidden']}" if args.get("hidden") and "tokens" in args else ""
        lines.append(f"call {args['call']}{shape}")
    if "path" in args:
        rounds = args.get("rounds", 1)
        lines.append(f"{args['path']}" + (f", {rounds} rounds" if rounds != 1 else ""))
    if "row_bytes" in args:
        pairs = (("sent", args.get("rows_to")), ("received", args.get("rows_from")))
        lines += [
            f"{verb} {sum(rows):,} rows, {bytes_text(sum(rows) * args['row_bytes'])}" for verb, rows in pairs if rows
        ]
    if "awaited_us" in args:
        waited = sorted(args["awaited_us"].items(), key=lambda item: -item[1])
        lines += [f"rank {rank} came after {time_text(us)}" for rank, us in waited[:8]]
    if "bytes" in args:
        lines.append(bytes_text(args["bytes"]))
    if isinstance(args.get("rows"), list):
        lines.append(f"rows by rank: {', '.join(str(count) for count in args['rows'][:16])}")
    elif "rows" in args:
        lines.append(f"{args['rows']:,} rows")
    return "\n".join(lines)
