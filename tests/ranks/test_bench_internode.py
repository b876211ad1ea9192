"""The benchmark across nodes end to end, with tiny sizes: over loopback, and between namespaces."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest

from deep_ep import EPUnsupported
from deep_ep.tools import cli
from deep_ep.tools.bench.internode_cases import RAIL_CASES
from deep_ep.tools.bench.report import read_json
from deep_ep.tools.namespaces import making_hosts

pytestmark = pytest.mark.cpu_only

TINY = ["--tokens", "32", "--hidden", "2048", "--topk", "4", "--experts", "32", "--rounds", "2"]


def run(path: Path, *words: str) -> dict[str, dict[str, Any]]:
    assert cli.main(["bench", "internode", *TINY, "--json", str(path), *words]) == 0
    return {case["case"]: case for case in json.loads(path.read_text())["cases"]}


def test_over_loopback(tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str) -> None:
    readme = tmp_path / "README.md"
    readme.write_text("<!-- bench internode -->\n<!-- /bench internode -->\n")
    cases = run(tmp_path / "b.json", "--csv", str(tmp_path / "b.csv"), "--readme", str(readme))
    assert list(cases) == list(RAIL_CASES)
    for name, case in cases.items():
        assert (case["num_ranks"], case["num_nodes"]) == (4, 2)
        assert set(case["times"]) == {"deep_ep", "gloo_preallocated", "copy"}
        traffic = {kind: sum(values) for kind, values in case["traffic"].items()}
        # A row for each node of a token, its own one included: at least those that cross, and ids are not counted.
        row, sent = (2048 + 4 * 16, 2048 + 4 * 16 + 4 * 12) if "fp8" in name else (4096, 4096)
        sent += 4 * 12 if name == "dispatch-bf16" else 0
        assert traffic["rdma"] % row == traffic["nvlink"] % row == traffic["needed"] % sent == 0
        assert traffic["needed"] / sent < traffic["rdma"] / row < traffic["nvlink"] / row
        assert traffic["needed"] < traffic["rail"] < 1.05 * traffic["needed"] + 4000
        assert "wire" not in traffic
    with (tmp_path / "b.csv").open() as file:
        lines = list(csv.DictReader(file))
    assert float(lines[0]["needed_bytes_per_rank"]) * 4 == sum(cases["dispatch-bf16"]["traffic"]["needed"])
    out, err = capsys.readouterr()
    assert "2 nodes over loopback" in out
    assert "4 ranks: combine, BF16, in window" in err
    assert "| combine, BF16, in window | 2 x 2 |" in readme.read_text()
    assert read_json(tmp_path / "b.json").marker == "internode"


def test_between_namespaces(tmp_path: Path, device: str) -> None:
    try:
        with making_hosts(1, 1):
            pass
    except EPUnsupported as error:
        pytest.skip(str(error))
    words = [
        "--link",
        "200mbit",
        "--ranks-per-node",
        "1",
        "--nodes",
        "3",
        "--experts",
        "33",
        "--cases",
        "dispatch-bf16",
    ]
    cases = run(tmp_path / "b.json", *words, "--groups", "3", "--topk-groups", "2")
    case = cases["dispatch-bf16"]
    needed, wire = sum(case["traffic"]["needed"]), sum(case["traffic"]["wire"])
    assert needed < wire < 1.1 * needed + 6000  # tiny: barriers and acknowledgements count
    assert read_json(tmp_path / "b.json").name == "internode 200mbit"


def test_what_cannot_be_met_is_said(capsys: pytest.CaptureFixture[str], tmp_path: Path, device: str) -> None:
    for words, said in (
        (["--nodes", "1"], "--nodes must be at least 2"),
        (["--link", "quick"], "the rate must be one that tc knows"),
        (["--csv", str(tmp_path / "missing" / "b.csv")], "no folder"),
    ):
        assert cli.main(["bench", "internode", *words]) == 2
        error = capsys.readouterr().err
        assert said in error or "namespaces:" in error
