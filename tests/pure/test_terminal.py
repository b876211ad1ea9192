"""Tables that do not fit: no value is cut."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.table import Table

from deep_ep.tools.terminal import print_table


def make_table(num_columns: int = 12) -> Table:
    table = Table(title="a title of several words", caption="a caption of several words", show_edge=False)
    for column in range(num_columns):
        table.add_column(f"head {column}", no_wrap=True)
    for row in range(3):
        table.add_row(*(f"cell-{row}-{column}" for column in range(num_columns)))
    return table


def printed(table: Table, width: int, num_kept: int = 1) -> str:
    file = io.StringIO()
    print_table(Console(file=file, width=width), table, num_kept)
    return file.getvalue()


@pytest.mark.parametrize("width", [24, 40, 80, 200])
def test_no_value_is_cut(width: int) -> None:
    text = printed(make_table(), width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for row in range(3):
        for column in range(1, 12):
            assert text.count(f"cell-{row}-{column} ") + text.count(f"cell-{row}-{column}\n") == 1
    assert "a title of several words" in text
    assert "a caption of several words" in " ".join(text.split())


def test_all_parts_begin_with_the_same_columns() -> None:
    text = printed(make_table(), 60, num_kept=2)
    assert text.count("cell-1-0 ") == text.count("cell-1-1 ") == text.count("head 0") > 1


def test_what_is_wider_than_the_terminal_is_folded() -> None:
    table = Table(box=None)
    table.add_column("name", no_wrap=True)
    table.add_column("value", no_wrap=True)
    table.add_row("x", "0123456789" * 3)
    text = printed(table, 20)
    assert max(map(len, text.splitlines())) <= 20
    assert "0123456789" * 3 in "".join(text.split())
