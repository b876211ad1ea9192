"""Parts of a page that look alike everywhere."""

from __future__ import annotations

import html
from collections.abc import Sequence

MOST_WORDS = 12  # ranks up to which there is room for words


def section(title: str, said: str, content: str, wide: bool = False) -> str:
    """A card with a title and a line under it."""
    remark = f"<p>{html.escape(said)}</p>" if said else ""
    return f'<section class="card{" wide" if wide else ""}"><h2>{title}</h2>{remark}{content}</section>\n'


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table of words and numbers."""
    heads = "".join(f"<th>{html.escape(name)}</th>" for name in head)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f'<div class="scroll"><table class="plain"><tr>{heads}</tr>{body}</table></div>'
