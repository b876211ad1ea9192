"""The notebook of the examples, cell by cell as a notebook runs them, where ranks cannot import its functions."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOK = Path(__file__).parents[2] / "examples" / "tour.ipynb"

# A kernel in short: cells share one namespace, and what a last expression gives is shown. The program comes on standard
# input, so it has no file, as the main module of a kernel has none. Jupyter itself would be 100 MB of packages.
KERNEL = """
import ast, json, sys
for cell in json.load(open(sys.argv[1]))["cells"]:
    if cell["cell_type"] == "code":
        body = ast.parse("".join(cell["source"])).body
        last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), cell["id"], "exec"), globals())
        shown = None if last is None else eval(compile(last, cell["id"], "eval"), globals())
        if shown is not None:
            print("shown:", len(shown._repr_html_()) > 10_000, "Against another run" in shown)
"""


def test_the_tour() -> None:
    pytest.importorskip("cloudpickle")
    pytest.importorskip("matplotlib")
    env = {**os.environ, "MPLBACKEND": "agg", "DEEP_EP_DEVICE": "cpu"}
    command = [sys.executable, "-W", "error::RuntimeWarning", "-", str(NOTEBOOK)]
    done = subprocess.run(command, input=KERNEL, capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr
    *ranks, shown, mistake = done.stdout.splitlines()
    assert [line.split(":")[0] for line in ranks] == [f"rank {rank}" for rank in range(4)]
    assert shown == "shown: True True"
    assert "Pass the same hidden size of `x` on all ranks" in mistake


def test_what_is_stored_with_the_tour_is_small() -> None:
    """The report is left out: it is as long as all else together, and viewers of repositories do not show it."""
    cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
    kinds = [kind for cell in cells for output in cell["outputs"] for kind in output.get("data", {})]
    assert "image/png" in kinds
    assert "text/html" not in kinds
