"""The benchmark end to end with two ranks and tiny sizes. It checks by itself that all variants deliver the same."""

from __future__ import annotations

import argparse
import csv
import json
from pathlib import Path

import pytest
import torch

from deep_ep.errors import EPError, EPUnsupported
from deep_ep.tools.bench import cli, layer
from deep_ep.tools.bench.cases import Case, check_outputs
from deep_ep.tools.bench.core import GLOO, PRODUCT, BenchVariant
from deep_ep.tools.bench.inputs import Setting
from deep_ep.tools.bench.normal import suite_of

VARIANTS = {"deep_ep", "copy", "gloo_preallocated", "gloo_as_written"}
CALLERS = {f"{variant}_{clock}" for variant in ("deep_ep", "add") for clock in ("host", "in_a_row", "from_idle")}
TINY = ["--tokens", "24", "--hidden", "256", "--topk", "3", "--experts", "8", "--rounds", "2"]


def run_mode(*words: str) -> int:
    parser = argparse.ArgumentParser()
    cli.add_arguments(parser)
    return cli.run(parser.parse_args(words))


def run(*words: str) -> int:
    return run_mode("normal", *words)


def all_cases(device: str) -> list[str]:
    return list(suite_of(Setting(device=device, num_sms=16)).titles)


def variants_of(name: str, device: str) -> set[str]:
    if device == "cpu":
        return VARIANTS | {"deep_ep_bf16"} if "fp8" in name else VARIANTS
    callers = set() if name.startswith("script-loop") else CALLERS
    return callers | ({"deep_ep"} if name == "layout" else {"deep_ep", "copy"})


def test_all_cases_with_two_ranks(tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str):
    files = ["--csv", str(tmp_path / "b.csv"), "--json", str(tmp_path / "b.json")]
    assert run("--ranks", "2", "3", *TINY, *files, "--device", device) == 0

    content = json.loads((tmp_path / "b.json").read_text())
    ran = {case["case"]: case for case in content["cases"] if case["num_ranks"] == 2}
    assert list(ran) == all_cases(device)
    for name, case in ran.items():
        assert set(case["times"]) == variants_of(name, device)
        assert all(len(times) == 2 and len(times[0]) == len(times[1]) == 2 for times in case["times"].values())
    # 256 BF16 elements against 256 bytes and 2 scales, for the same rows.
    for bf16, fp8 in zip(ran["cached-bf16"]["bytes_per_rank"], ran["cached-fp8"]["bytes_per_rank"], strict=True):
        assert bf16 % 512 == 0
        assert fp8 == bf16 // 512 * (256 + 2 * 4)
    assert all(case["skipped"] for case in content["cases"] if case["num_ranks"] == 3)
    where = "" if device == "cpu" else f"--device {device} "
    assert content["command"] == f"python -m deep_ep bench normal {where}--ranks 2 3 " + " ".join(TINY)

    with (tmp_path / "b.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * len(all_cases(device))
    out, err = capsys.readouterr()
    assert "cached dispatch, FP8" in out
    assert "2 ranks: combine, BF16, in window" in err


def test_group_limited_routing_and_a_subset(tmp_path: Path, device: str):
    words = ["--groups", "4", "--topk-groups", "2", "--cases", "dispatch-bf16", "--json", str(tmp_path / "b.json")]
    assert run("--ranks", "2", *TINY, *words, "--device", device) == 0
    content = json.loads((tmp_path / "b.json").read_text())
    assert [case["case"] for case in content["cases"]] == ["dispatch-bf16"]
    assert content["setting"]["num_topk_groups"] == 2


def test_what_cannot_be_met_is_refused_before_anything_runs(tmp_path: Path):
    with pytest.raises(ValueError, match="--sms is for a GPU"):
        run("--sms", "16")
    with pytest.raises(ValueError, match="layout is no case here"):
        run("--cases", "layout")
    with pytest.raises(ValueError, match="go together"):
        run("--groups", "4")
    with pytest.raises(ValueError, match="no folder"):
        run("--csv", str(tmp_path / "missing" / "b.csv"))
    with pytest.raises(ValueError, match="no file"):
        run("--readme", str(tmp_path / "README.md"))
    (tmp_path / "README.md").write_text("no markers")
    with pytest.raises(ValueError, match="<!-- bench normal -->"):
        run("--readme", str(tmp_path / "README.md"))


@pytest.mark.cpu_only
def test_a_gpu_that_is_not_there_is_missed_at_once():
    if torch.cuda.device_count():
        pytest.skip("there is one")
    for words in (["normal", "--device", "cuda"], ["tune"]):
        with pytest.raises(EPUnsupported, match="sees no GPU"):
            run_mode(*words)


def test_a_peer_that_delivers_something_else_is_not_timed():
    rows = torch.arange(6)
    product = BenchVariant(PRODUCT, lambda: rows, lambda result: [result])
    peer = BenchVariant(GLOO, lambda: rows.flip(0), lambda result: [result])
    check_outputs(Case(48, [product]), "x", 0, 2)
    with pytest.raises(EPError, match=r"gloo_preallocated and deep_ep must deliver the same.*rank 0/2"):
        check_outputs(Case(48, [product, peer]), "x", 0, 2)


def test_an_moe_layer_beside_one_process(capsys: pytest.CaptureFixture[str], device: str) -> None:
    """It checks by itself that both compute the same."""
    sizes = ["--hidden", "64", "--intermediate", "16", "--shared", "32", "--experts", "8", "--topk", "2"]
    assert run_mode("layer", "--device", device, "--ranks", "2", "--tokens", "16", "--rounds", "2", *sizes) == 0
    out = capsys.readouterr().out
    assert "16 tokens a rank, hidden 64, top-2 of 8 experts of 16" in out
    assert "communication, and smaller kernels:" in out
    assert ("dispatch kernels of rank 0" in out) == (device == "cuda")


def test_figures_of_a_layer_as_json() -> None:
    setting = layer.LayerSetting("cpu", 2, 16, 64, 16, 32, 8, 2, 3)
    ranks = [layer.Timing([1.0, 5.0, 3.0], [0.0]), layer.Timing([2.0, 1.0, 4.0], [0.0])]
    told = json.loads(layer._as_json(setting, ranks, layer.Timing([1.0, 2.0, 3.0], [0.0]), []))
    assert told["median_secs"] == {"ranks": 4.0, "one_process": 2.0}
    assert told["setting"]["hidden"] == 64
