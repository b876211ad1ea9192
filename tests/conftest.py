"""Options of the suite. Tests name no device: `--device cuda` runs them all on a GPU machine.

On the CPU kernels run in Triton's interpreter, which must be asked for before Triton is imported, and in the
forkserver that ranks come from: so the environment is set here, before any test is collected.
"""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

import alone
from common import default_device, quicken_interpreter

torch.set_num_threads(1)

HERE = Path(__file__).parent
GPU_FOLDER = HERE / "gpu"
FEW_BLOCKS = HERE / "few_blocks.json"  # the interpreter spends time on each, also if it is idle


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", choices=("cpu", "cuda"), default="cpu", help="where the ranks' tensors live")
    parser.addoption("--part", type=_part, default=(1, 1), metavar="K/N", help="only the K-th of N equal parts")


def _part(text: str) -> tuple[int, int]:
    part, _, num_parts = text.partition("/")
    if not 1 <= int(part) <= int(num_parts):
        raise ValueError(text)
    return int(part), int(num_parts)


def pytest_configure(config: pytest.Config) -> None:
    chosen = config.getoption("--device")
    os.environ["DEEP_EP_DEVICE"] = chosen  # ranks and programs inherit it
    if chosen == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        os.environ.setdefault("DEEP_EP_TUNING_FILE", str(FEW_BLOCKS))
        quicken_interpreter()
        _preload()
        return
    os.environ.pop("TRITON_INTERPRET", None)
    if not torch.cuda.is_available():
        raise pytest.UsageError("--device cuda: torch sees no GPU")
    if not config.option.collectonly:
        _share_gpu(config)


def _preload() -> None:
    """Have ranks find imported what many tests need: each would spend up to a second on it."""
    from deep_ep import launch  # late: the environment that it is imported under is set above

    launch.PRELOADED += ["preloaded"]
    # The forkserver finds it by the environment: not that of every Python looks where this process does.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HERE), os.environ.get("PYTHONPATH")]))


def _share_gpu(config: pytest.Config) -> None:
    """Have ranks share the GPU by MPS, where it can be had, until the end of the suite."""
    from deep_ep.tools.mps import shared_gpu  # late: the environment that it is imported under is set above

    signal.signal(signal.SIGTERM, signal.default_int_handler)  # who ends the suite ends the daemon, too
    torch.ones(1, device="cuda").sum().item()  # this process stays outside of MPS, so that MPS can end before it
    stack = config.stash[_OPEN] = ExitStack()
    stack.enter_context(shared_gpu())


_OPEN: pytest.StashKey[ExitStack] = pytest.StashKey()


def pytest_unconfigure(config: pytest.Config) -> None:
    gc.unfreeze()
    alone.forget()
    stack = config.stash.get(_OPEN, None)
    if stack is not None:
        stack.close()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    items.sort(key=alone.is_alone)  # last: else workers would wait for each other again and again
    part, num_parts = config.getoption("--part")
    if num_parts > 1:
        # Every N-th test, so that slow files are spread over all parts.
        left_out = [item for number, item in enumerate(items) if number % num_parts != part - 1]
        config.hook.pytest_deselected(items=left_out)
        items[:] = items[part - 1 :: num_parts]
    on_cuda = config.getoption("--device") == "cuda"
    for item in items:
        if on_cuda and item.get_closest_marker("cpu_only"):
            item.add_marker(pytest.mark.skip(reason="only the CPU has this"))
        if not on_cuda and GPU_FOLDER in item.path.parents:
            item.add_marker(pytest.mark.skip(reason="only a GPU has this"))


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # what is imported and collected stays: tests that collect garbage need not look at it again and again


@pytest.fixture(autouse=True)
def _in_turn(request: pytest.FixtureRequest) -> Iterator[None]:
    """Where several workers run the suite: let tests that must be alone be so."""
    with alone.turn(alone.is_alone(request.node)):
        yield


@pytest.fixture(scope="session")
def device(request: pytest.FixtureRequest) -> str:
    """The device that tests of kernels and ranks run on."""
    return request.config.getoption("--device")


@pytest.fixture(params=["message", "nvshmem", "nvshmem put"])
def transport(request: pytest.FixtureRequest, device: str) -> str:
    """How GPU ranks of different nodes reach each other. On the CPU, one memory stands for that of NVSHMEM."""
    if request.param == "nvshmem put" and device == "cpu":
        pytest.skip("NVSHMEM needs a GPU")
    if request.param != "message" and device == "cuda":
        from deep_ep.transport import nvshmem

        if not nvshmem.is_built_in():
            pytest.skip("torch comes without NVSHMEM")
    return request.param


@pytest.fixture(autouse=True)
def _tensors_on_the_device(request: pytest.FixtureRequest) -> Iterator[None]:
    """In tests that ask for the device, tensors are made there unless they say otherwise."""
    if "device" not in request.fixturenames:
        yield
        return
    with default_device(request.getfixturevalue("device")):
        yield
