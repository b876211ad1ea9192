"""Who sent what to whom, and who waited for whom: tables in the colours of their numbers."""

from __future__ import annotations

import html

from .figures import Figures, Matrix
from .parts import MOST_WORDS, section
from .text import TableUnit, bytes_text, bytes_unit, share_text, time_text, time_unit


def traffic(figures: Figures) -> str:
    """Bytes from rank to rank."""
    unit = bytes_unit(max(map(max, figures.bytes_to)))
    tips = [
        [
            f"rank {source} → rank {target}: {bytes_text(num_bytes)}, {figures.rows_to[source][target]:,.0f} rows"
            for target, num_bytes in enumerate(row)
        ]
        for source, row in enumerate(figures.bytes_to)
    ]
    matrix = _matrix(figures.bytes_to, unit, tips, ("from", "to"), ("sends", "receives"), "blue")
    return section("Who sent what to whom", f"{unit.name} of rows, all calls together", matrix)


def waiting(figures: Figures) -> str:
    """Time that ranks waited for each other."""
    waited = figures.waited_us
    unit = time_unit(max(map(max, waited)))
    tips = [
        [f"rank {rank} waited {time_text(us)} for rank {peer}" for peer, us in enumerate(row)]
        for rank, row in enumerate(waited)
    ]
    matrix = _matrix(waited, unit, tips, ("waits", "for"), ("waited", "awaited"), "amber")
    said = f"{unit.name}; a wait for several counts for the last to come"
    return section("Who waited for whom", said, matrix + _verdict(waited))


def _verdict(waited: Matrix) -> str:
    """Whom the group waited for most, in a sentence."""
    awaited = [sum(column) for column in zip(*waited, strict=True)]
    total = sum(awaited)
    if not total:
        return '<p class="verdict">No wait names a rank. (A GPU does not say for whom it waits.)</p>'
    worst = max(range(len(awaited)), key=awaited.__getitem__)
    return (
        f'<p class="verdict">Rank {worst} came last most: {time_text(awaited[worst])} of all waiting, '
        f"{share_text(awaited[worst], total)}. Evenly spread it would be {share_text(1, len(awaited))}.</p>"
    )


def _matrix(
    values: Matrix,
    unit: TableUnit,
    tips: list[list[str]],
    axes: tuple[str, str],
    sums: tuple[str, str],
    colour: str,
) -> str:
    size, most, least = len(values), max(map(max, values)), min(map(min, values))
    has_words = size <= MOST_WORDS
    heads = "".join(f"<th>{rank}</th>" for rank in range(size))
    rows = []
    for rank, row in enumerate(values):
        cells = [_cell(value, least, most, unit, tip, has_words) for value, tip in zip(row, tips[rank], strict=True)]
        rows.append(f"<tr><th>{rank}</th>{''.join(cells)}<td class=sum>{unit.text(sum(row))}</td></tr>")
    columns = [sum(column) for column in zip(*values, strict=True)]
    below = ""
    if has_words:
        totals = "".join(f"<td class=sum>{unit.text(total)}</td>" for total in columns)
        below = f"<tr><th class=axis>{sums[1]}</th>{totals}<td class=sum>{unit.text(sum(columns))}</td></tr>"
    return (
        f'<div class="scroll"><table class="matrix {colour}{"" if has_words else " dense"}">'
        f"<tr><th class=axis>{axes[0]} ↓ {axes[1]} →</th>{heads}<th class=axis>{sums[0]}</th></tr>"
        f"{''.join(rows)}{below}</table></div>{_scale(least, most, unit, colour)}"
    )


def _cell(value: float, least: float, most: float, unit: TableUnit, tip: str, has_words: bool) -> str:
    share = (value - least) / (most - least) if most > least else 0.5 * (most > 0)
    word = unit.text(value) if has_words and value else ""
    strong = " class=strong" if share > 0.68 else ""
    return f'<td{strong} style="--v:{100 * share:.0f}%" title="{html.escape(tip)}">{word}</td>'


def _scale(least: float, most: float, unit: TableUnit, colour: str) -> str:
    ends = f"<span>{unit.text(least)}</span><i></i><span>{unit.text(most)} {unit.name}</span>"
    return f'<div class="scale {colour}" aria-hidden="true">{ends}</div>'
