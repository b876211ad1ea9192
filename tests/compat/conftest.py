"""What tests of the wheel share."""

from __future__ import annotations

from importlib import util
from pathlib import Path

import pytest

from installed import build_wheel, make_environment


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel of this tree."""
    if util.find_spec("hatchling") is None:
        pytest.skip("building the wheel needs hatchling")
    return build_wheel(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="session")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that has the wheel, what it declares, and nothing else."""
    return make_environment(tmp_path_factory.mktemp("environment") / "env", wheel)
