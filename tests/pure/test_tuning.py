"""The tuning file: what it changes, what is refused, and what `bench tune` writes."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from deep_ep.config import Config, combine_config, dispatch_config
from deep_ep.engine.cuda.shapes import Shapes, load_shapes
from deep_ep.kernels.put import LaunchShape
from deep_ep.tools.bench import tune_report
from deep_ep.tools.bench.inputs import Setting
from deep_ep.tools.bench.tune import FIELDS, candidates

SHAPE = {"num_blocks": 48, "words": 2048, "num_warps": 8}


@pytest.fixture
def tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[object], Path]:
    """Write a tuning file and name it in the environment."""

    def write(content: object) -> Path:
        path = tmp_path / f"tuning-{len(list(tmp_path.iterdir()))}.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        monkeypatch.setenv("DEEP_EP_TUNING_FILE", str(path))
        return path

    return write


# Shapes --------------------------------------------------------------------------------------------------------------


def test_bounds_replace_the_blocks_only():
    shapes = Shapes()
    assert shapes.for_put(None) == shapes.put
    assert shapes.for_put(6) == replace(shapes.bounded_put, num_blocks=6)
    assert shapes.for_pull(6) == replace(shapes.bounded_pull, num_blocks=6)
    assert shapes.for_copy(0) == replace(shapes.bounded_copy, num_blocks=1)
    assert shapes.for_put(6) is shapes.for_put(6)  # found, not made: every call asks


def test_without_a_file_there_are_defaults(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("DEEP_EP_TUNING_FILE", raising=False)
    assert load_shapes(8) == Shapes()


def test_shapes_of_the_next_larger_group(tuned: Callable):
    tuned({"shapes": {"4": {"put": SHAPE}, "8": {"bounded_pull": SHAPE}}})
    assert load_shapes(3) == load_shapes(4) == Shapes(put=LaunchShape(48, 2048, 8))
    assert load_shapes(8) == load_shapes(16) == Shapes(bounded_pull=LaunchShape(48, 2048, 8))


# Configs -------------------------------------------------------------------------------------------------------------


def test_configs_follow_the_file(tuned: Callable):
    usual = dispatch_config(4, 20)
    tuned({"dispatch_config": {"8": [7, 300, 9, 90]}, "num_sms": 12})
    assert dispatch_config(8, 20) == Config(12, 7, 300, 9, 90)
    assert dispatch_config(4, 20) == Config(12, 6, 256, 6, 128)
    assert combine_config(8, 20) == Config(12, 4, 256, 6, 128)
    assert usual == Config(20, 6, 256, 6, 128)


# What is refused -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ("{", "it is no JSON"),
        ("[]", "the file must be an object, got list"),
        ({"num_sms": "many"}, "num_sms must be a whole number, got 'many'"),
        ({"dispatch_config": {"eight": [1, 2, 3, 4]}}, "must be numbers of ranks, got 'eight'"),
        ({"dispatch_config": {"8": [1, 2, 3]}}, r"dispatch_config\[8\] must be a list of 4 numbers"),
        ({"dispatch_config": {"8": [300, 256, 6, 128]}}, "num_max_nvl_chunked_recv_tokens must be at least 301"),
        ({"num_sms": -2}, "num_sms must be at least 0"),
        ({"shapes": {"8": {"push": SHAPE}}}, r"got \['push'\]"),
        ({"shapes": {"8": {"put": {"words": 4096}}}}, r"must have .*it has \['words'\]"),
        ({"shapes": {"8": {"put": {**SHAPE, "words": 3000}}}}, "words must be a power of 2, got 3000"),
        ({"shapes": {"8": {"put": {**SHAPE, "num_warps": 64}}}}, "num_warps must be a power of 2 up to 32, got 64"),
        ({"shapes": {"8": {"put": {**SHAPE, "num_blocks": 0}}}}, "num_blocks must be at least 1, got 0"),
        ({"shapes": {"8": {"put": {**SHAPE, "words": 1.5}}}}, "must be a whole number, got 1.5"),
    ],
)
def test_a_wrong_file_is_named_with_what_is_wrong(tuned: Callable, content: object, what: str):
    path = tuned(content)
    with pytest.raises(ValueError, match=f"^DEEP_EP_TUNING_FILE: cannot use .*{path.name}: .*{what}.*unset"):  # noqa: PT012
        load_shapes(8)
        dispatch_config(8, 20)


def test_a_missing_file(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("DEEP_EP_TUNING_FILE", "/nowhere/tuning.json")
    for look in (lambda: load_shapes(8), lambda: combine_config(8, 20)):
        with pytest.raises(ValueError, match=r"DEEP_EP_TUNING_FILE: cannot use /nowhere/tuning\.json: No such file"):
            look()


# `bench tune` --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("field", FIELDS)
def test_candidates_start_with_the_default_and_come_once(field: str):
    shapes = candidates(field, 16)
    default = getattr(Shapes(), field)
    is_bounded = field.startswith("bounded")
    assert (shapes[0].words, shapes[0].num_warps) == (default.words, default.num_warps)
    assert len(set(shapes)) == len(shapes) >= 8
    assert {shape.num_blocks for shape in shapes} == ({16} if is_bounded else {32, 64, 128, 132, 264})


def test_the_best_shape_is_that_of_the_slowest_rank():
    shapes = [LaunchShape(16, 4096, 16), LaunchShape(16, 2048, 8), LaunchShape(16, 1024, 4)]
    times = [
        {"16 x 4096 x 16": [3.0, 3.0, 9.0], "16 x 2048 x 8": [1.0, 1.0, 1.0], "16 x 1024 x 4": [2.0, 2.0, 2.0]},
        {"16 x 4096 x 16": [1.0, 1.0, 1.0], "16 x 2048 x 8": [4.0, 4.0, 4.0], "16 x 1024 x 4": [2.0, 2.5, 2.0]},
    ]
    tried = tune_report.judge("bounded_put", shapes, times)
    assert tried.secs == [3.0, 4.0, 2.0]
    assert tried.best == shapes[2]
    assert tried.ranking == [2, 0, 1]


def test_what_tune_writes_is_what_load_shapes_reads(tuned: Callable):
    best = LaunchShape(32, 2048, 16)
    tried = [tune_report.Tried(field, [getattr(Shapes(), field), best], [2e-3, 1e-3]) for field in FIELDS]
    before = {"shapes": {"2": {"put": SHAPE}}, "dispatch_config": {"2": [5, 256, 6, 128]}, "runs": {"2": {}}}
    facts = {"gpu": "NVIDIA H200", "torch": "2.11"}
    content = tune_report.with_tuned(before, facts, Setting(device="cuda", num_sms=16), 8, tried)
    assert content["device"] == "NVIDIA H200"
    assert content["runs"]["8"]["times_us"]["put"] == {"32 x 2048 x 16": 1000.0, "264 x 4096 x 16": 2000.0}
    assert content["runs"]["8"]["setting"]["num_sms"] == 16
    tuned(content)
    assert load_shapes(8) == Shapes(*[best] * len(FIELDS))
    assert load_shapes(2) == Shapes(put=LaunchShape(48, 2048, 8))  # what was there stays
    assert dispatch_config(2, 20) == Config(20, 5, 256, 6, 128)


def test_a_file_that_is_no_tuning_file_is_not_overwritten(tmp_path: Path):
    (tmp_path / "notes.json").write_text("my notes")
    with pytest.raises(ValueError, match="no tuning file"):
        tune_report.tune(Setting(device="cuda", num_sms=16), 8, tmp_path / "notes.json")
    assert (tmp_path / "notes.json").read_text() == "my notes"
