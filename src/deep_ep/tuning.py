"""The tuning file that `DEEP_EP_TUNING_FILE` names: launch shapes and configs that were measured on this machine.

`python -m deep_ep bench tune` writes one. All of these are optional, and what is not there keeps its default:

    {"shapes": {"8": {"put": {"num_blocks": 64, "words": 4096, "num_warps": 32}}},
     "dispatch_config": {"8": [6, 256, 6, 128]}, "combine_config": {"8": [4, 256, 6, 128]},
     "num_sms": 16}

Numbers as keys are numbers of ranks; the four numbers of a config are its chunks, in `Config`'s order. A file is read
once in a process. Results never depend on it.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from . import env

_NUM_CHUNKS = 4

Chunks = tuple[int, int, int, int]
"""Of a `Config`: sent at once and queued inside a node, the same two between nodes."""


@dataclass(frozen=True)
class Tuning:
    """What a tuning file says; empty where none is named.

    Attributes:
        path: The file.
        num_sms: Of all configs made by default; None: not said.
        dispatch_config: Chunks of dispatch, by number of ranks.
        combine_config: Chunks of combine, likewise.
        shapes: By number of ranks: numbers of a launch shape by name, by the name of the shape.
    """

    path: str = ""
    num_sms: int | None = None
    dispatch_config: Mapping[int, Chunks] = field(default_factory=dict)
    combine_config: Mapping[int, Chunks] = field(default_factory=dict)
    shapes: Mapping[int, Mapping[str, Mapping[str, int]]] = field(default_factory=dict)


@functools.lru_cache
def load_tuning(path: str) -> Tuning:
    """Read a tuning file.

    Args:
        path: The value of `DEEP_EP_TUNING_FILE`; empty: there is no file, and nothing is said.

    Raises:
        ValueError: It cannot be read, or does not hold what it should.
    """
    if not path:
        return Tuning()
    try:
        content = json.loads(Path(path).read_text())
    except OSError as error:
        raise wrong_file(path, error.strerror or str(error)) from None
    except ValueError as error:
        raise wrong_file(path, f"it is no JSON: {error}") from None
    content = _mapping(path, "the file", content)
    num_sms = content.get("num_sms")
    return Tuning(
        path=path,
        num_sms=None if num_sms is None else _number(path, "num_sms", num_sms),
        dispatch_config=_by_ranks(path, content, "dispatch_config", _chunks),
        combine_config=_by_ranks(path, content, "combine_config", _chunks),
        shapes=_by_ranks(path, content, "shapes", _shapes),
    )


def wrong_file(path: str, what: str) -> ValueError:
    """The error that a tuning file cannot be used, which says why and what to do."""
    return ValueError(
        f"{env.TUNING_FILE.name}: cannot use {path}: {what}. "
        "Name a file that `python -m deep_ep bench tune` wrote, or unset the variable"
    )


def listed_size(table: Mapping[int, Any], num_ranks: int) -> int:
    """The next larger listed number of ranks, or the largest one."""
    return min((size for size in table if size >= num_ranks), default=max(table))


def _by_ranks(path: str, content: dict, name: str, parse: Any) -> dict[int, Any]:
    """A table by number of ranks. JSON's keys are text."""
    table = {}
    for key, value in _mapping(path, name, content.get(name, {})).items():
        if not key.isdecimal() or int(key) < 1:
            raise wrong_file(path, f"the keys of `{name}` must be numbers of ranks, got {key!r}")
        table[int(key)] = parse(path, f"{name}[{key}]", value)
    return table


def _chunks(path: str, where: str, value: object) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) != _NUM_CHUNKS:
        raise wrong_file(path, f"{where} must be a list of {_NUM_CHUNKS} numbers, got {value!r}")
    return tuple(_number(path, where, item) for item in value)


def _shapes(path: str, where: str, value: object) -> dict[str, dict[str, int]]:
    return {
        name: {key: _number(path, f"{where}.{name}.{key}", item) for key, item in _mapping(path, name, shape).items()}
        for name, shape in _mapping(path, where, value).items()
    }


def _mapping(path: str, where: str, value: object) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise wrong_file(path, f"{where} must be an object, got {type(value).__name__}")
    return value


def _number(path: str, where: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool):
        raise wrong_file(path, f"{where} must be a whole number, got {value!r}")
    return value
