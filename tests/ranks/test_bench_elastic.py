"""The benchmark of V2's calls with two ranks and tiny sizes. It checks by itself that all variants deliver the same."""

from __future__ import annotations

import argparse
import json
from multiprocessing import Pipe
from pathlib import Path

import pytest

from common import run_ranks
from deep_ep.tools.bench import cli
from deep_ep.tools.bench.core import BUFFER, FLOOR, PRODUCT
from deep_ep.tools.bench.elastic_cases import ELASTIC_CASES, ELASTIC_GPU_CASES
from deep_ep.tools.bench.gpu_cases import GpuMeasured, run_gpu_cases
from deep_ep.tools.bench.inputs import Setting

TINY = ["--tokens", "24", "--hidden", "256", "--topk", "3", "--experts", "8", "--rounds", "2"]


@pytest.mark.cpu_only
def test_all_cases_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    words = ["elastic", "--ranks", "2", *TINY, "--json", str(tmp_path / "b.json")]
    assert cli.run(parser.parse_args(words)) == 0
    content = json.loads((tmp_path / "b.json").read_text())
    ran = {case["case"]: case for case in content["cases"]}
    assert list(ran) == list(ELASTIC_CASES)
    assert all(set(case["times"]) == {PRODUCT, BUFFER, FLOOR} for case in ran.values())
    # Every token selects three experts, so all ranks together receive three rows of it.
    assert sum(ran["expanded"]["bytes_per_rank"]) == 2 * 24 * 3 * 2 * 256
    assert sum(ran["compact"]["bytes_per_rank"]) < sum(ran["expanded"]["bytes_per_rank"])
    assert ran["combine-expanded"]["bytes_per_rank"] == ran["expanded"]["bytes_per_rank"]
    assert "combine of expanded rows" in capsys.readouterr().out


def gpu_cases(rank: int, num_ranks: int, setting: Setting, names: list[str]) -> list[GpuMeasured]:
    here, there = Pipe(duplex=False)
    with here, there:
        return run_gpu_cases(rank, num_ranks, setting, names, there, 1 << 20, ELASTIC_GPU_CASES)


def test_all_cases_of_a_gpu(device: str):
    """Without a GPU in the interpreter, where there are no graphs."""
    names = [name for name in ELASTIC_GPU_CASES if device == "cuda" or not name.startswith("decode")]
    setting = Setting(5, 16, 2, 4, num_rounds=1, num_in_row=1, device=device, num_sms=2)
    env = {} if device == "cuda" else {"DEEP_EP_TRANSPORT": "interpreted", "TRITON_INTERPRET": "1"}
    for parts in zip(*run_ranks(gpu_cases, 2, setting, names, env=env), strict=True):
        assert all(part.times[PRODUCT] for part in parts)
