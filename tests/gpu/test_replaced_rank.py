"""A rank is killed, and a new process takes its position. It runs as a program without MPS:

python tests/gpu/test_replaced_rank.py STORE RANK
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from test_replacing import killed_and_replaced, nodes_are_refused
from without_mps import LIMIT_SECS, results_of

from common import run_ranks

NUM_RANKS = 2


@pytest.mark.parametrize("victim", range(NUM_RANKS))
def test_a_new_process_takes_the_position_of_a_killed_rank(victim: int, tmp_path: Path) -> None:
    results = results_of(__file__, str(tmp_path / "store"), str(victim))
    assert results[victim] is None
    assert all(threads == [] for threads in results if threads is not None), results


@pytest.mark.usefixtures("device")
def test_ranks_of_several_nodes_are_not_replaced(tmp_path: Path) -> None:
    for kind, text in run_ranks(nodes_are_refused, 2, str(tmp_path / "store"), env={"DEEP_EP_RANKS_PER_NODE": "1"}):
        assert kind == "EPUnsupported"
        assert "a new group" in text


if __name__ == "__main__":
    path, victim = sys.argv[1], int(sys.argv[2])
    arguments = (path, [victim], True)
    results = run_ranks(killed_and_replaced, NUM_RANKS + 1, *arguments, may_die=[victim], limit_secs=LIMIT_SECS)
    print(json.dumps(results))
