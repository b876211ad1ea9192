"""Launches that go past Triton's launcher: what compiled kernels are given, with stand-ins for what launches them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from deep_ep.kernels import _triton
from deep_ep.kernels._triton import Launch, Variant, find_launcher

pytestmark = pytest.mark.cpu_only

DEVICE, STREAM = 3, 77
TENSORS, NUMBERS = (torch.zeros(4), torch.zeros(4)), (10, 11)


class Launcher:
    """As Triton's: it finds out what a launch needs, and calls `launch`, which here writes down what it was given."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.launches: list[tuple] = []
        self.num_calls = 0
        self.launch = self._launch

    def _launch(self, *given: Any) -> None:
        if given[4] != "function":
            raise TypeError("there is no such kernel")
        self.launches.append(given)

    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        self.num_calls += 1
        self.launch(x, y, z, stream, function, False, "scratch", *args)  # as Triton 3.6


class Packing(Launcher):
    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        self.num_calls += 1
        self.launch(x, y, z, stream, function, *args[:4], "signature", args[4:])  # as Triton 3.9


class Allocating(Launcher):
    global_scratch_size = 128


class Changing(Launcher):
    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        self.num_calls += 1
        self.launch(x, y, z, stream, function, *args, "one more")


class Silent(Launcher):
    def __call__(self, x: int, y: int, z: int, stream: int, function: Any, *args: Any) -> None:
        self.num_calls += 1
        self._launch(x, y, z, stream, function, *args)


PASSED_BY, USUAL = [Launcher, Packing], [Allocating, Changing, Silent]


@pytest.fixture(autouse=True)
def _compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where there is a GPU."""
    monkeypatch.setattr(_triton, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: DEVICE)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: STREAM + device, raising=False)


def make_launch(monkeypatch: pytest.MonkeyPatch, launcher: Launcher) -> Launch:
    way = find_launcher(launcher, "function", "metadata", 10)
    monkeypatch.setattr(Variant, "loaded", lambda *_: way)
    variant = Variant(None, {"ONE": 1, "TWO": True}, num_warps=4)
    return Launch(variant, (None, torch.int32, None, None), (torch.zeros(2), 5, torch.zeros(3), 6))


@pytest.mark.parametrize("kind", [*PASSED_BY, *USUAL])
def test_a_kernel_is_given_the_same_either_way(monkeypatch: pytest.MonkeyPatch, kind: type[Launcher]) -> None:
    launcher = kind()
    one = make_launch(monkeypatch, launcher)
    launcher.launches.clear()  # of one that does more than call what launches
    launcher.num_calls = 0
    one(8, TENSORS, NUMBERS)
    assert launcher.num_calls == (0 if kind in PASSED_BY else 1)
    [direct] = launcher.launches
    args = (*(tensor.data_ptr() for tensor in TENSORS), *NUMBERS, *one._numbers)
    launcher(8, 1, 1, STREAM + DEVICE, "function", "metadata", None, None, None, *args)
    assert direct == launcher.launches[1]
    assert direct[:4] == (8, 1, 1, STREAM + DEVICE)


def test_nothing_is_launched_without_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = Packing()
    one = make_launch(monkeypatch, launcher)
    for num_blocks in (0, 8, 0, 8):
        one(num_blocks, TENSORS, NUMBERS)
    assert [given[0] for given in launcher.launches] == [8, 8]


@pytest.mark.skipif(not _triton.HAS_TRITON, reason="Triton is not installed")
def test_there_is_a_way_past_the_launcher_of_this_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """If not, calls are slower, and nothing else: look at how its launcher calls what launches."""
    import triton
    from triton.backends.nvidia.driver import CudaLauncher

    class Unmade(CudaLauncher):
        def __init__(self) -> None:
            """Without a GPU it cannot be made: whatever it would know is 0."""
            self.launches: list[tuple] = []
            self.launch = lambda *given: self.launches.append(given)

        def __getattr__(self, name: str) -> int:
            if name.startswith("__"):
                raise AttributeError(name)
            return 0

    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace(), raising=False)
    launcher = Unmade()
    args = tuple(range(100, 109))
    call, between, is_packed = find_launcher(launcher, "function", "metadata", len(args))
    assert call is launcher.launch
    assert launcher.launches == []
    launcher(8, 1, 1, STREAM, "function", "metadata", None, None, None, *args)
    call(8, 1, 1, STREAM, *between, *((args,) if is_packed else args))
    usual, direct = launcher.launches
    assert usual == direct
