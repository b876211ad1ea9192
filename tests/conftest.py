"""Options of the suite. Tests name no device: `--device cuda` runs them all on a GPU machine."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where the ranks' tensors live")


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device that tests of ranks run on."""
    chosen = request.config.getoption("--device")
    if chosen == "cuda":
        pytest.skip("Buffer on CUDA is not there yet")
    return chosen
